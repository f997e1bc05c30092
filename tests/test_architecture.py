# SPDX-License-Identifier: Apache-2.0
"""Checks the layout of the package from its source, without importing it.

The folders of ``jboost`` are the boxes of one diagram. A module imports only from its
own box and from boxes to its left.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jboost"

# From left to right.
BOXES = (
    "entry", "kernels", "numerics", "distributions", "losses", "metrics", "survival",
    "tables", "codes", "objective", "trees", "model", "boosting", "training",
    "refitting", "cart", "sketches", "streams", "selection", "explanation",
    "calibration", "interchange", "plotting", "reports", "recipes", "sklearn", "dask",
    "ray", "parts",
)  # fmt: skip
# 160 ask for memory and devices, 710 bring kernels to GPUs, 240 compare columns of
# other libraries' models in float64, 160 read labels, 110 shorten values in messages,
# 350 make, check, list and evaluate linear leaves.
MODEL_LINES = 7070
MODULE_LINES = 800
MOST_MODULES = 200  # may fall, not rise: one idea to a file, not one step
FUNCTION_LINES = 60
POSITIONAL = 8


@cache
def find_modules():
    """Returns {"jboost.model.ensemble": its path}; packages by their own name."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


@cache
def parse(path):
    return ast.parse(path.read_text())


@cache
def find_imports(module):
    """Returns the modules of the package that a module imports, stubs included."""
    path, found = find_modules()[module], set()
    trees = [parse(path)]
    stub = path.with_suffix(".pyi")
    if stub.exists():
        trees.append(parse(stub))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # only stubs of packages import relatively
                base = ".".join(filter(None, (module, base)))
            names = [f"{base}.{alias.name}" for alias in node.names] + [base]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name for name in names if name in find_modules()}
    # Importing a module runs its packages; those with stubs import nothing then.
    return found - {module, "jboost"}


def find_closure(module):
    """Returns every module that importing this one loads."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for old in new for name in find_imports(old)} - found
    return found


def find_box(module):
    return module.split(".")[1]


MODULES = [name for name in find_modules() if name != "jboost"]


def test_every_top_entry_is_a_box():
    entries = {
        path.stem for path in PACKAGE.iterdir()
        if path.name != "__pycache__" and path.suffix in ("", ".py")
    }  # fmt: skip
    assert entries == {*BOXES, "__init__"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_left(module):
    own = BOXES.index(find_box(module))
    right = {name for name in find_imports(module) if BOXES.index(find_box(name)) > own}
    assert sorted(right) == []


def test_no_import_is_circular():
    done, open_ = set(), []

    def visit(module):
        assert module not in open_, [*open_, module]
        if module not in done:
            open_.append(module)
            for name in sorted(find_imports(module)):
                visit(name)
            done.add(open_.pop())

    for module in MODULES:
        visit(module)


def test_prediction_does_not_know_training():
    loaded = find_closure("jboost.model")
    boxes = {find_box(name) for name in loaded}
    others = {"boosting", "training", "cart", "sketches", "streams", "objective"}
    assert not boxes & others
    assert [name for name in loaded if find_box(name) == "trees"] in (
        [], ["jboost.trees.tree"],
    )  # fmt: skip
    lines = sum(len(find_modules()[name].read_text().splitlines()) for name in loaded)
    assert lines < MODEL_LINES


LONG_MODULES: dict[str, str] = {}  # {name: reason}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_ARGUMENTS: dict[str, str] = {}


def find_functions(module):
    """Yields (name, node) of every function and method."""
    for node in ast.walk(parse(find_modules()[module])):
        if isinstance(node, ast.FunctionDef):
            yield f"{module.removeprefix('jboost.')}.{node.name}", node


def count_code_lines(node, text):
    """Counts the lines of a function without docstring, comments and blank lines."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    lines = text.splitlines()[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(re.match(r"\s*[^#\s]", line)) for line in lines)


def test_modules_are_short():
    lengths = {m: len(p.read_text().splitlines()) for m, p in find_modules().items()}
    assert {m for m, n in lengths.items() if n > MODULE_LINES} == {*LONG_MODULES}


def test_modules_are_few():
    assert len(find_modules()) <= MOST_MODULES


def test_functions_are_short():
    long = {
        name
        for module in MODULES
        for name, node in find_functions(module)
        if count_code_lines(node, find_modules()[module].read_text()) > FUNCTION_LINES
    }
    assert long == {*LONG_FUNCTIONS}


def test_functions_have_few_positional_parameters():
    many = {
        name
        for module in MODULES
        for name, node in find_functions(module)
        if len(node.args.posonlyargs + node.args.args) > POSITIONAL
    }
    assert many == {*MANY_ARGUMENTS}


def test_no_class_name_is_used_twice():
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(parse(find_modules()[module])):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@cache
def find_names(module):
    """Returns the names that a module defines, imports or (in a class) documents."""
    path, names = find_modules()[module], set()
    trees = [parse(path)]
    if path.with_suffix(".pyi").exists():
        trees.append(parse(path.with_suffix(".pyi")))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[-1])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def resolves(reference):
    """Whether a dotted name is a module, or a name in one."""
    parts = reference.split(".")
    for size in range(len(parts), 0, -1):
        module = ".".join(parts[:size])
        if module in find_modules():
            rest = parts[size:]
            if rest and rest[0] == "__version__":
                return True
            return not rest or rest[0] in find_names(module)
    return False


SOURCES = [
    path
    for folder in ("jboost", "tests", "experiments", "docs")
    for suffix in ("*.py", "*.cc", "*.h", "*.md")
    for path in sorted((ROOT / folder).rglob(suffix))
    if "_build" not in path.parts
] + [ROOT / "README.md"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_references_resolve(path):
    """Checks every dotted name of the package in code, docstrings and pages."""
    text = re.sub(r"https?://\S+", "", path.read_text())
    references = {*re.findall(r"(?<![\w/.@-])jboost(?:\.[A-Za-z_]\w*)+", text)}
    endings = (".so", ".py", ".json", ".png", ".svg")  # names of files
    references = {r for r in references if not r.endswith(endings)}
    assert sorted(r for r in references if not resolves(r)) == []


# gpu_programs.py chooses kernels that cannot run where it compiles them, and reads the
# programs of fit; gpu_user.py chooses how they compile.
PRIVATE_NAMES = (
    "jboost.entry.context.use_implementation", "jboost.entry.programs.Compiled",
    "jboost.entry.programs", "jboost.training.chunks",
)  # fmt: skip


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda path: path.stem
)
def test_experiments_use_public_names_only(path):
    names = find_names("jboost")
    submodules = {name for name in names if f"jboost.{name}" in find_modules()}
    for node in ast.walk(parse(path)):
        found = []
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = [f"jboost.{node.attr}"] if node.value.id == "jb" else []
        for name in found:
            first, *rest = name.split(".")
            if first != "jboost" or not rest or name in PRIVATE_NAMES:
                continue
            assert rest[0] in names | {"__version__"}, name
            # jboost.cart.fit_tree, and no deeper.
            assert len(rest) <= (2 if rest[0] in submodules else 1), name
