"""Owns: this Laya under its own name for a vLLM in another environment, where it is not installed.

The folder above goes into that program's PYTHONPATH, with the entry point beside this package that vLLM looks for. The
folder that holds the real package would bring everything that is installed there. The entry point is in an .egg-info,
as a wheel holds one .dist-info, its own.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[3]
__path__ = [str(_PACKAGE)]
exec(compile((_PACKAGE / "__init__.py").read_text(), str(_PACKAGE / "__init__.py"), "exec"))
