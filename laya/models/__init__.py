"""The models room: which models there are, where they lie, and how they get here.

Its door is this module. Knows nothing of memory, engines or the gateway; downloads load their libraries when used.
"""

from __future__ import annotations

from laya.models.card import ModelCard, show
from laya.models.catalogue import CatalogueEntry, Shape, default_model, entries
from laya.models.found import OllamaEntry, ollama_entries
from laya.models.library import (
    Library,
    available,
    home_path,
    is_config_alone,
    remove,
    resolve,
)
from laya.models.pulling import Offer, pull, size_text
from laya.models.remote import RemoteModel, is_remote, open_remote
from laya.models.sources import Progress

__all__ = [
    "CatalogueEntry",
    "Library",
    "ModelCard",
    "Offer",
    "OllamaEntry",
    "Progress",
    "RemoteModel",
    "Shape",
    "available",
    "default_model",
    "entries",
    "home_path",
    "is_config_alone",
    "is_remote",
    "ollama_entries",
    "open_remote",
    "pull",
    "remove",
    "resolve",
    "show",
    "size_text",
]
