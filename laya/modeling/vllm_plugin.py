"""Owns: how vLLM comes to know LayaForCausalLM: by its own backend for transformers' models, with Laya's router in it.

vLLM calls `register` in each of its processes: by the entry point of laya-llm where that is installed in vLLM's
environment, else by the one in `vllm_path`, which `engine: vllm` shows it. Attention, norms and experts are vLLM's.
"""

from __future__ import annotations

_ARCHITECTURE = "LayaForCausalLM"
_BACKEND = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"


def register() -> None:
    """May be called more than once."""
    from vllm import ModelRegistry  # type: ignore[import-not-found]

    import laya.modeling.model  # noqa: F401  (tells transformers of the classes)

    ModelRegistry.register_model(_ARCHITECTURE, _BACKEND)
