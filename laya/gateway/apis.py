"""Owns: which APIs this server speaks beside its own, each translated to it over inner exchanges."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route

from laya.config import Config
from laya.gateway.fleet import Fleet
from laya.gateway.inner import Inner
from laya.gateway.messages import MessagesApi
from laya.gateway.ollama import OllamaApi
from laya.gateway.passthrough import Passthrough
from laya.gateway.responses import ResponsesApi
from laya.gateway.responses_kept import KeptResponses
from laya.gateway.tokens import Tokenizers, TokensApi


class Apis:
    """Their routes, and what they do in the background."""

    def __init__(self, config: Config, inner: Inner, fleet: Fleet, database: Path) -> None:
        """database: the server's own, where the config names no other."""
        self.kept = KeptResponses(config.store, database, config.server.max_body_bytes)
        tokenizers = Tokenizers(fleet)
        self.routes: list[Route] = [
            *ResponsesApi(inner, self.kept, tokenizers).routes(),
            *MessagesApi(inner, tokenizers).routes(),
            *TokensApi(inner, tokenizers).routes(),
            *OllamaApi(inner, fleet, tokenizers).routes(),
            *Passthrough(fleet, config.server.max_body_bytes).routes(),
        ]

    async def run(self) -> None:
        """For as long as the server runs."""
        await self.kept.keep_pruned()
