"""How Sphinx builds the guide: ``python -m sphinx -W -n examples/guide runs/guide``, offline, in less than a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon.docstring import GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # where Sphinx finds `pages`

project = "Signalfire"
author = "the authors of Signalfire"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "pages"]
html_theme = "furo"
html_title = "Signalfire"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "scorer.js")
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_search_summary = False  # browsers refuse to read other pages of a site that was opened as a file
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py", "pages.py", "pictures.py", "scorer.js"]

# Names in single backticks are links where they are names of this package, and code where they are not.
default_role = "named"  # in pages.py
napoleon_custom_sections = ["Source", ("Errors", "Raises")]
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
myst_enable_extensions = ["attrs_inline", "deflist"]  # the first one: anchors of codes
myst_heading_anchors = 3
autodoc_inherit_docstrings = False  # those of dict and others say nothing of ours

# Types of other packages, whose pages are elsewhere; every link to a page of this guide is checked.
nitpick_ignore_regex = [("py:.*", r".*")]


def setup(app: Any) -> None:
    """The docstring of an attribute is a text, also where it has a colon: napoleon takes what is before it for a type."""
    GoogleDocstring._parse_attribute_docstring = lambda self: list(self._lines)
