"""Sphinx: the pages in this folder, and a reference from the docstrings.

Nothing is fetched while it builds, and the pages fetch nothing when they are read.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import givens

project = "givens"
author = "the authors of givens"
release = version = givens.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "measured", "refused"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "givens"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2166b0", "color-brand-content": "#2166b0"},
    "dark_css_variables": {"color-brand-primary": "#6db3f2", "color-brand-content": "#6db3f2"},
}

# Arguments of a class are told by its __init__.
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False


def plain_words(
    _app: Any, _what: str, _name: str, _subject: Any, _options: Any, lines: list[str]
) -> None:
    """Docstrings are plain words with `code` in them: to reStructuredText, all else is no markup.

    Else |A| would be a substitution, `rotate_pairs_` a link and *batch the start of an emphasis.
    """
    for at, line in enumerate(lines):
        words = line.split("`")
        words[::2] = [re.sub(r"([|*]|_(?!\w))", r"\\\1", part) for part in words[::2]]
        words[1::2] = [f"``{code}``\\ " for code in words[1::2]]
        lines[at] = "".join(words)


def setup(app: Any) -> None:
    """Before napoleon, whose priority is 500, has made sections of the words."""
    app.connect("autodoc-process-docstring", plain_words, priority=400)
