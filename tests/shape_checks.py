# SPDX-License-Identifier: Apache-2.0
"""Checks annotated shapes at run time, in every module of the package.

Left out are public functions, those named ``check_...``, and ``jboost.entry``: they
work on what users pass, and their messages have tests of their own. A function is
public if it has a decorator of ``jboost.entry``, is listed in an ``__all__`` or a stub,
or stands in a public module. Containers are checked where functions take them, not
where they are made: JAX fills them with batches and with values that are no arrays.
"""

import ast
from pathlib import Path
from typing import get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

PACKAGE = Path(__file__).parents[1] / "jboost"
DECORATORS = {"traceable", "on_host", "explain_arguments"}


def _list_public():
    """Names of public functions and classes."""
    names = set()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and path.suffix == ".pyi":
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                if getattr(node.targets[0], "id", "") == "__all__":
                    names |= {element.value for element in node.value.elts}
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                used = (getattr(d, "func", d) for d in node.decorator_list)
                decorated = DECORATORS & {getattr(name, "id", "") for name in used}
                if decorated or path.parent == PACKAGE:
                    names.add(node.name)
    return names


def _is_checked(annotation):
    """Whether it holds an array with axes, or a container of the package's own."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    module, name = (getattr(annotation, n, "") for n in ("__module__", "__name__"))
    if module.startswith("jboost.") and isinstance(annotation, type):
        # A protocol says what an object can do, not what it is.
        return name not in _PUBLIC and not getattr(annotation, "_is_protocol", False)
    return any(map(_is_checked, get_args(annotation)))


def check(function):
    """Adds checks of shapes to a function that is not public."""
    owner, _, method = function.__qualname__.partition(".")
    if owner in _PUBLIC or owner.startswith("check_") or method == "__init__":
        return function
    kept = function.__annotations__.items()
    kept = {name: each for name, each in kept if _is_checked(each)}
    function.__annotations__ = kept
    return beartype(function) if kept else function


_PUBLIC = _list_public()


def install():
    """Must run before jboost is imported."""
    paths = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")]
    names = {".".join(path.with_suffix("").parts) for path in paths}
    names = {n for n in names if not n.startswith("jboost.entry")}
    # Functions of public modules are exempt; losses must stay plain functions, because
    # tracing looks at what they read.
    names = {n for n in names if n.count(".") > 1 and ".losses." not in n}
    names = {n for n in names if not n.endswith("__init__")}
    install_import_hook(sorted(names), "shape_checks.check")
