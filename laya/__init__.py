"""Laya serves open-weight language models on machines that people own.

`import laya` is fast and needs neither torch, nor a GPU, nor a compiler.
"""

__version__ = "0.1.0"
