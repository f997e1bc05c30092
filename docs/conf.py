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

import make_parameters  # noqa: E402
import make_pictures  # noqa: E402

import jboost as jb  # noqa: E402

project = "jboost"
author = "the jboost authors"
release = importlib.metadata.version("jboost")
repository = "https://github.com/jboost/jboost"
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton",
]  # fmt: skip
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"jboost {release}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
    "source_repository": repository,
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
    "footer_icons": [{"name": "GitHub", "url": repository, "html": "GitHub"}],
}
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    (title, "params_style") for title in make_parameters.list_sections()
]
toc_object_entries_show_parents = "hide"

# Literals and references, which are reStructuredText already.
_MARKED = re.compile(r"(``.+?``|:\w+:`.+?`|``.+$)")
_HOMES = r"jaxtyping|jaxlib\._jax|jax|numpy|typing|collections\.abc"
_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Notes|Raises|Returns):$")
_NAMES = re.compile(r"\s+(\w+, )*\w+,")
# The index of a symbol: F_{m-1}, gamma_jk, sum_{i in D}; and a power in braces.
_SYMBOL = (
    "[A-Za-z]|alpha|beta|gamma|delta|mu|phi|sigma|sum|prod|integral|mean|median|argmin"
    "|gain|rank|tree"
)
_INDEX = re.compile(
    rf"(?<![\w`])({_SYMBOL})_(\{{[^{{}}]*\}}|[A-Za-z0-9]{{1,2}}(?![\w`]))"
)
_POWER = re.compile(r"\^\{([^{}]*)\}")


def _escape(line, begun):
    """Escapes bars, stars and underscores of formulas, and lowers their indices.

    Where a literal has begun on the line above, the line starts with its end.
    """
    end = line.find("``") + 2 if begun else 0
    parts = ["", line[:end], *_MARKED.split(line[end:])]
    for number, part in enumerate(parts[::2]):
        part = re.sub(r"([|*\\]|_(?=\W|$)(?!\{))", r"\\\1", part)
        part = _INDEX.sub(_lower, part)
        parts[2 * number] = _POWER.sub(r"\ :sup:`\1`\ ", part)
    return "".join(parts)


def _lower(match):
    """Writes an index below the line; ends of names, as in ``y_true``, are longer."""
    name, index = match[1], match[2].strip("{}")
    return rf"{name}\ :sub:`{index}`\ "


def _read_docstring(app, what, name, obj, options, lines):
    """Converts a plain-text docstring; indented paragraphs in front are formulas."""
    result, formula, quoted, section, begun = [], False, False, False, False
    lines[:] = _group_settings(name, _join_names(lines))
    for number, line in enumerate(lines):
        section = section or bool(_SECTION.match(line.strip()))
        indented = not section and line.startswith("    ")
        if indented and not formula and not lines[number - 1].strip():
            said = "".join(lines[:number]).rstrip().endswith(("::", ":: python"))
            result += [] if said else [".. parsed-literal::", ""]
            formula, quoted = True, said
        elif line.strip() and not indented:
            formula = False
        example = line.lstrip().startswith(">>>") or _is_output(result)
        code = (formula and quoted) or example
        result.append(line if code else _escape(line, begun))
        begun = bool(line.strip()) and not code and begun ^ line.count("``") % 2 == 1
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


def _group_settings(name, lines):
    """Divides the settings of ``fit`` as the page of parameters does.

    Other functions that take many of them list their names.
    """
    titles = [line.strip() for line in lines]
    if "Args:" not in titles:
        return lines
    begin = titles.index("Args:") + 1
    end = titles.index("", begin) if "" in titles[begin:] else len(lines)
    entries = _read_entries(lines[begin:end])
    sections = make_parameters.list_sections()
    settings = {each for names in sections.values() for each in names}
    if name == "jboost.fit":
        grouped = [
            line for each, text in entries.items() if each not in settings
            for line in text
        ]  # fmt: skip
        for title, names in sections.items():
            grouped += ["", f"{title}:", *(line for n in names for line in entries[n])]
        call = _write_call(sections)
        return [*lines[: begin - 1], *call, "", "Args:", *grouped, *lines[end:]]
    fit = inspect.getdoc(jb.fit).partition("Args:\n")[2].partition("\n\n")[0]
    known = _read_entries(fit.splitlines())
    same = [n for n in entries if n in settings and entries[n] == known[n]]
    if len(same) < 5:
        return lines
    kept = [line for n, text in entries.items() if n not in same for line in text]
    text = ", ".join(f"``{each}``" for each in same)
    kept.append(f"  settings: arguments of :func:`jboost.fit`: {text}.")
    return [*lines[:begin], *kept, *lines[end:]]


def _read_entries(lines):
    """Returns {name: lines} of the arguments; several names are one."""
    entries, current = {}, []
    for line in lines:
        if match := re.match(r"  (\w[\w, *]*): ", line):
            current = entries.setdefault(match[1], [])
        current.append(line)
    return entries


def _write_call(sections):
    """Writes the call of ``fit`` with its defaults, a group of arguments a line."""
    known = inspect.signature(jb.fit).parameters
    lines = ["x, y=None, loss=jb.losses.squared_error, *,"]
    for title, names in sections.items():
        shown = ", ".join(f"{each}={known[each].default!r}" for each in names) + ","
        lines += [f"# {title}", *textwrap.wrap(shown, 84)]
    code = ["model, history = jb.fit(", *[f"    {line}" for line in lines], ")"]
    return [".. code-block:: python", "", *[f"    {line}" for line in code], ""]


def _is_output(lines):
    """Returns whether the next line is the output of an example."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if line.lstrip().startswith((">>>", "...")):
            return True
    return False


def _escape_types(app, what, name, obj, options, lines):
    """Escapes the stars of shapes in types of variables, and shortens the types."""
    for number, line in enumerate(lines):
        if line.startswith(":vartype"):
            line = re.sub(rf"\b({_HOMES})\.", "", line)
            lines[number] = line.replace("*", r"\*")


def _read_signature(app, what, name, obj, options, signature, result):
    """Returns the signature as in the source, with named shapes; none for classes."""
    if what == "class":
        return "", None
    if what not in ("function", "method"):
        return None
    if name == "jboost.fit":
        return "(x, y=None, loss=losses.squared_error, *, ...)", "Trained"
    source = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj))))
    function = source.body[0]
    for node in ast.walk(function):
        if isinstance(getattr(node, "annotation", None), ast.Constant):
            node.annotation = ast.Name(str(node.annotation.value))
    if what == "method" and function.args.args[:1]:
        function.args.args.pop(0)  # self
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
