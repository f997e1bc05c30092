# SPDX-License-Identifier: Apache-2.0
"""Configures Sphinx: ``sphinx-build -W -b html docs docs/_build``."""

import ast
import importlib.metadata
import inspect
import re
import sys
import textwrap
from pathlib import Path

from sphinx.util.nodes import make_refnode

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

# Literals and references, which are reStructuredText already.
_MARKED = re.compile(r"(``.+?``|:\w+:`.+?`)")
_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Notes|Raises|Returns):$")
_NAMES = re.compile(r"\s+(\w+, )*\w+,")


def _escape(line):
    """Escapes bars, stars and underscores of formulas."""
    parts = _MARKED.split(line)
    parts[::2] = [re.sub(r"([|*\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def _read_docstring(app, what, name, obj, options, lines):
    """Converts a plain-text docstring; indented paragraphs in front are formulas."""
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
    """Joins the names of arguments that share a description on one line."""
    joined = []
    for line in lines:
        if joined and _NAMES.fullmatch(joined[-1]):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return joined


def _is_output(lines):
    """Returns whether the next line is the output of an example."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if line.lstrip().startswith((">>>", "...")):
            return True
    return False


def _escape_types(app, what, name, obj, options, lines):
    """Escapes the stars of shapes in types of variables."""
    lines[:] = [
        line.replace("*", r"\*") if line.startswith(":vartype") else line
        for line in lines
    ]


def _read_signature(app, what, name, obj, options, signature, result):
    """Returns the signature as in the source, with named shapes; none for classes."""
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


def _find_target(app, env, node, contnode):
    """Links names written as in the code: ``jb.fit``, or ``fit_bins`` in its box."""
    name = re.sub(r"^(jb|jboost)\.", "", node.get("reftarget", ""))
    domain = env.get_domain("py")
    found = [full for full in domain.objects if full.endswith(f".{name}")]
    if f"jboost.{name}" in found:  # the name at the top is the public one
        found = [f"jboost.{name}"]
    if len(found) != 1:
        return None
    (full,) = found
    entry = domain.objects[full]
    return make_refnode(
        app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, full
    )


def setup(app):
    """Draws missing pictures, and registers the converters of docstrings."""
    make_pictures.draw_missing()
    # Before Napoleon, which converts the sections to reStructuredText.
    app.connect("autodoc-process-docstring", _read_docstring, priority=100)
    app.connect("autodoc-process-signature", _read_signature)
    app.connect("autodoc-process-docstring", _escape_types, priority=900)
    app.connect("missing-reference", _find_target)
