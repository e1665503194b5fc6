"""Owns: which of the two route tables this process has: the native one, or its twin where there is no extension."""

from __future__ import annotations

from laya.routing import choice_twin, feature_twin

UNKNOWN_MODEL = choice_twin.UNKNOWN_MODEL
NO_ENDPOINT = choice_twin.NO_ENDPOINT
BAD_FEATURE = choice_twin.BAD_FEATURE
FLAG_STREAMING = feature_twin.FLAG_STREAMING

try:
    from laya._core import COMPILER, RouteTable, hash_name, pack_feature, prefix_blocks, unpack_feature

    NATIVE = True
    WHY_NOT_NATIVE = ""
except ImportError as error:
    # No compiler when Laya was installed, or an extension built for another machine: the answers are the same.
    from laya.routing.feature_twin import hash_name, pack_feature, prefix_blocks, unpack_feature
    from laya.routing.table_twin import RouteTable  # type: ignore[assignment]

    COMPILER = ""
    NATIVE = False
    WHY_NOT_NATIVE = str(error)

__all__ = [
    "BAD_FEATURE",
    "COMPILER",
    "FLAG_STREAMING",
    "NATIVE",
    "NO_ENDPOINT",
    "UNKNOWN_MODEL",
    "WHY_NOT_NATIVE",
    "RouteTable",
    "hash_name",
    "pack_feature",
    "prefix_blocks",
    "unpack_feature",
]
