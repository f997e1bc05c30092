# SPDX-License-Identifier: Apache-2.0
"""Checks annotated shapes at run time, in every module of the package.

Left out are public functions, those named ``check_...``, and ``jboost.entry``: they
work on what users pass, and their messages have tests of their own. A function is
public if it has a decorator of public ones, is listed in an ``__all__`` or a stub, or
stands in a public module. Containers are checked where functions take them, not
where they are made: JAX fills them with batches and with values that are no arrays.
"""

import ast
import functools
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import get_args

from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped

PACKAGE = Path(__file__).parents[1] / "jboost"
DECORATORS = {"traceable", "on_host", "explain_arguments", "of_rows"}


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
    public = owner in _PUBLIC | DECORATORS or owner.startswith("check_")
    if public or method == "__init__":
        return function
    written = function.__annotations__
    kept = {name: each for name, each in written.items() if _is_checked(each)}
    if not kept:
        return function
    function.__annotations__ = kept
    checked = beartype(function)
    function.__annotations__ = written

    @functools.wraps(function)
    def run(*args, **kwargs):
        __tracebackhide__ = True
        with jaxtyped("context"):  # in which names of axes have one size
            return checked(*args, **kwargs)

    return run


class _Loader(SourceFileLoader):
    """Adds ``check`` to the decorators of functions that have annotations.

    The hook of jaxtyping itself adds it to all functions, those inside of others too,
    and checks arguments twice in each call: a fifth of the time of the tests.
    """

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _has_annotations(node):
                decorator = ast.parse("__import__('shape_checks').check", mode="eval")
                node.decorator_list.append(ast.copy_location(decorator.body, node))
                ast.fix_missing_locations(node.decorator_list[-1])
        return compile(tree, path, "exec", dont_inherit=True)


def _has_annotations(node):
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    every += (node.args.vararg, node.args.kwarg)
    return node.returns or any(argument and argument.annotation for argument in every)


class _Finder:
    """Finds the modules whose functions are checked."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


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
    sys.meta_path.insert(0, _Finder(names))
