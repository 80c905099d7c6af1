"""Sphinx: Markdown pages by MyST, an API reference from the docstrings, the furo theme.

Build it with `uv run --group docs sphinx-build -W docs docs/_build`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import docstrings  # noqa: E402

import mxjax  # noqa: E402

project = "mxjax"
author = "The mxjax developers"
copyright = author
version = release = mxjax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mxjax {version}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings follow Google's style, with two sections of ours.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = list(docstrings.OUR_SECTIONS)
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures without jaxtyping's annotations; docstrings give shapes and dtypes
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True


def setup(app):
    """Connects the normalization of docstrings, before napoleon's own."""
    app.connect("autodoc-process-docstring", docstrings.normalize, priority=100)
