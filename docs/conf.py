"""Sphinx's settings: `make docs` builds these pages into build/docs, from the files alone, with nothing fetched."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from sphinx.application import Sphinx  # noqa: E402

from laya import __version__  # noqa: E402

project = "Laya"
author = "the authors of Laya"
copyright = "Apache-2.0"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = f"Laya {release}"
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4  # the anchors that GitHub makes of headings too
suppress_warnings = ["myst.header"]  # a page may begin a level deeper than another

default_role = "code"  # docstrings say `name` as the pages do
# The packages of the lab: not needed to read about it.
autodoc_mock_imports = ["torch", "transformers", "safetensors", "gguf"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def setup(app: Sphinx) -> None:
    """Pages outside of docs/ are not of the site: their links become their names."""
    outside = re.compile(r"\[([^\]]*)\]\(\.\./([\w./-]+\.md)(#[^)\s]*)?\)")

    def name_them(app: Sphinx, page: str, source: list[str]) -> None:
        source[0] = outside.sub(r"\1 (`\2`)", source[0])

    app.connect("source-read", name_them)
