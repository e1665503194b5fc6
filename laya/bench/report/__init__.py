"""`laya bench report`: each claim of the two articles that Laya answers, measured again on this machine."""

from laya.bench.report.command import main

__all__ = ["main"]
