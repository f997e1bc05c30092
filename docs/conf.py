# SPDX-License-Identifier: Apache-2.0
"""How the pages are built: ``sphinx-build -W -b html docs docs/_build``."""

import ast
import importlib.metadata
import inspect
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import make_pictures  # noqa: E402

project = "jboost"
author = "the jboost authors"
release = importlib.metadata.version("jboost")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"jboost {release}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

# Text between these is reStructuredText already: literals and references.
_MARKED = re.compile(r"(``.+?``|:\w+:`.+?`)")
_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Notes|Raises|Returns):$")
_NAMES = re.compile(r"\s+(\w+, )*\w+,")


def _escape(line):
    """Bars, stars and underscores of formulas stand for themselves."""
    parts = _MARKED.split(line)
    parts[::2] = [re.sub(r"([|*\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def _read_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text: indented paragraphs before a section are formulas."""
    result, formula, section = [], False, False
    lines[:] = _join_names(lines)
    for number, line in enumerate(lines):
        section = section or bool(_SECTION.match(line.strip()))
        indented = not section and line.startswith("    ")
        if indented and not formula and not lines[number - 1].strip():
            said = "".join(lines[:number]).rstrip().endswith("::")
            result += [] if said else ["::", ""]
            formula = True
        elif line.strip() and not indented:
            formula = False
        code = formula or line.lstrip().startswith(">>>") or _is_output(result)
        result.append(line if code else _escape(line))
    lines[:] = result


def _join_names(lines):
    """Arguments that are explained together stand on one line."""
    joined = []
    for line in lines:
        if joined and _NAMES.fullmatch(joined[-1]):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return joined


def _is_output(lines):
    """Whether the next line is what an example prints."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if line.lstrip().startswith((">>>", "...")):
            return True
    return False


def _escape_types(app, what, name, obj, options, lines):
    """Shapes have stars."""
    lines[:] = [
        line.replace("*", r"\*") if line.startswith(":vartype") else line
        for line in lines
    ]


def _read_signature(app, what, name, obj, options, signature, result):
    """As it stands in the source: shapes by their names. Of classes, none."""
    if what == "class":
        return "", None
    if what not in ("function", "method"):
        return None
    source = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj))))
    function = source.body[0]
    for node in ast.walk(function):
        if isinstance(getattr(node, "annotation", None), ast.Constant):
            node.annotation = ast.Name(str(node.annotation.value))
    returns = None if function.returns is None else ast.unparse(function.returns)
    return f"({ast.unparse(function.args)})", returns and returns.strip("'")


def setup(app):
    """Draws the pictures that are missing, and reads docstrings as they are written."""
    make_pictures.draw_missing()
    # Before Napoleon, which makes reStructuredText of their sections.
    app.connect("autodoc-process-docstring", _read_docstring, priority=100)
    app.connect("autodoc-process-signature", _read_signature)
    app.connect("autodoc-process-docstring", _escape_types, priority=900)
