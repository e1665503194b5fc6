"""Owns: which launcher starts an engine of these settings. A new kind of child is one more line here."""

from __future__ import annotations

from laya.engines.command import CommandLauncher
from laya.engines.launcher import Launcher, StartSettings
from laya.engines.llamacpp_launcher import LlamaCppLauncher
from laya.engines.settings import CommandSettings, EngineSettings
from laya.engines.vllm import VllmEngineSettings
from laya.engines.vllm_launcher import VllmLauncher


def launcher_for(settings: StartSettings) -> Launcher:
    """A fresh one, for one start."""
    if isinstance(settings, CommandSettings):
        return CommandLauncher(settings)
    if isinstance(settings, VllmEngineSettings):
        return VllmLauncher(settings)
    assert isinstance(settings, EngineSettings), f"nothing here starts {type(settings).__name__}"
    return LlamaCppLauncher(settings)
