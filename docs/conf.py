"""Sphinx configuration. The tables in the pages are docs/make_tables.py's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import te_attn_ops

project = "te_attn_ops"
copyright = "the te_attn_ops authors"
version = release = te_attn_ops.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# results is what tables are made from.
exclude_patterns = ["_build", "results"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"te_attn_ops {release}"
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def _keep_whole_sentences(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before the first colon of a property's docstring for its type: nothing, then."""
    if what in ("property", "attribute") and lines:
        lines[0] = f": {lines[0]}"


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _keep_whole_sentences, priority=400)
