"""Owns: Laya's Mixture-of-Experts model as Hugging Face classes, and its expert router. Needs `laya-llm[torch]`.

The expert router picks which experts process a token; the request router, which engine serves a request, is
`laya.routing`. Serving imports nothing of this. The router alone needs no transformers.
"""

from typing import TYPE_CHECKING, Any

from laya.modeling.router import ExpertRouter, LayaRouter, RouterOutput, make_router, register_router
from laya.modeling.rule import GateRule
from laya.modeling.selection import select

if TYPE_CHECKING:
    from laya.modeling.config import LayaConfig
    from laya.modeling.model import LayaForCausalLM, LayaModel

_OF_TRANSFORMERS = {"LayaConfig": "config", "LayaForCausalLM": "model", "LayaModel": "model"}

__all__ = [
    "ExpertRouter",
    "GateRule",
    "LayaConfig",
    "LayaForCausalLM",
    "LayaModel",
    "LayaRouter",
    "RouterOutput",
    "make_router",
    "register_router",
    "select",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module 'laya.modeling' has no attribute '{name}'")
    import_module("laya.modeling.model")  # registers all of them with transformers
    return getattr(import_module(f"laya.modeling.{_OF_TRANSFORMERS[name]}"), name)
