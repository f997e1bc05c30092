# SPDX-License-Identifier: Apache-2.0
"""Files of models: fields and arrays of each type, their validation, save and load.

After the checks, no file can make a program read out of bounds or loop forever.
"""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.codes.bins import Bins
from jboost.entry.decorators import on_host
from jboost.entry.messages import show
from jboost.model.containers import (
    Container,
    FileError,
    read_container,
    write_container,
)
from jboost.model.ensemble import FORMAT_VERSION, Ensemble, Links, describe_model
from jboost.model.nodes import LEAF
from jboost.model.regression_tree import FORMAT_VERSION as TREE_VERSION
from jboost.model.regression_tree import RegressionTree
from jboost.tables.categories import WORD, Categories
from jboost.tables.sparse import check_absent
from jboost.trees.tree import LeafSums, Slopes

Layout = dict[str, tuple[str, str]]  # name: (dtype, lengths)

# More than the widest public tables have. Bounds arrays of one number per feature to
# 1 GiB for any file.
_MOST_FEATURES = 2**27
_SCALARS = (str, int, float, bool)  # types of categories

ENSEMBLE: Layout = {
    "feature": ("int32", "R S I"),
    "threshold": ("float32", "R S I"),
    "missing_left": ("bool", "R S I"),
    "leaf_value": ("float32", "R K L"),
    "init_score": ("float32", "*K"),
    "sums.gradient": ("float32", "R K L"),
    "sums.curvature": ("float32", "R K L"),
    "sums.weight": ("float32", "R K L"),
    "sums.l2": ("float32", "R K"),
    "left_codes": ("uint32", "R S I W"),
    "categories.codes": ("int32", "G V"),
    "links.left_child": ("int32", "R S I"),
    "wide_threshold": ("uint32", "R S I P"),
    "slopes.feature": ("int32", "R S L T"),
    "slopes.slope": ("float32", "R K L T"),
    "slopes.center": ("float32", "R K L T"),
    "ranges": ("float32", "F E"),
}
REGRESSION_TREE: Layout = {
    "left": ("int32", "M"),
    "feature": ("int32", "M"),
    "threshold": ("float32", "M"),
    "missing_left": ("bool", "M"),
    "value": ("float64", "M *K"),
    "gain": ("float64", "M"),
    "squared_error": ("float64", "M"),
    "weight": ("float64", "M"),
    "num_rows": ("int32", "M"),
}
BINS: Layout = {"thresholds": ("float32", "F C"), "categories.codes": ("int32", "G V")}


class Kind(NamedTuple):
    """How a type is stored in a file.

    Attributes:
      fields: names of the other fields, without those of groups.
      groups: optional containers: {name: (container, fields)}.
      check: raises ValueError unless fields and arrays are consistent.
    """

    build: Callable[..., Any]
    layout: Layout
    fields: tuple[str, ...]
    groups: dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
    check: Callable[[dict[str, Any], dict[str, np.ndarray], dict[str, int]], None]


def check_container(
    kind: Kind, static: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    """Raises ValueError unless these make a valid model."""
    expected, names = set(kind.fields), set(kind.layout)
    for group, (_, inner) in kind.groups.items():
        here = {name for name in names if name.startswith(f"{group}.")}
        if any(name.startswith(f"{group}.") for name in arrays):
            expected |= {f"{group}.{name}" for name in inner}
        else:
            names -= here
    names -= {"left_codes", "wide_threshold", "ranges"} - arrays.keys()
    for what, wanted, found in (
        ("fields", expected, static.keys()), ("arrays", names, arrays.keys()),
    ):  # fmt: skip
        if wanted != found:
            missing, unknown = sorted(wanted - found), sorted(found - wanted)
            raise ValueError(f"{missing} missing from its {what}, {unknown} unknown")
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        _check_shape(name, array, *kind.layout[name], sizes)
    kind.check(static, arrays, sizes)


def _check_shape(name, array, dtype, lengths, sizes):
    """Checks an array's dtype and shape; axes of the same letter have equal length."""
    if array.dtype.name != dtype:
        raise ValueError(f"{name} must be {dtype}, got {array.dtype.name}")
    letters = lengths.split()
    if letters[-1].startswith("*") and array.ndim < len(letters):
        letters = letters[:-1]  # the last axis is optional
    letters = [letter.strip("*") for letter in letters]
    if array.ndim != len(letters):
        raise ValueError(f"{name} must have axes {lengths!r}, got shape {array.shape}")
    for letter, length in zip(letters, array.shape, strict=True):
        if sizes.setdefault(letter, length) != length:
            raise ValueError(
                f"{name} must have axes {lengths!r} with {letter} = {sizes[letter]}, "
                f"got shape {array.shape}"
            )


def _check_ensemble(static, arrays, sizes):
    _expect("format_version", static["format_version"], FORMAT_VERSION)
    num_features = _check_common(static)
    check_absent(static["absent"])
    num_nodes, num_leaves = sizes["I"], sizes["L"]
    if sizes["K"] < 1 or (arrays["init_score"].ndim == 0) != (sizes["K"] == 1):
        raise ValueError(
            f"init_score must hold {sizes['K']} scores, got shape "
            f"{arrays['init_score'].shape}"
        )
    if sizes["S"] not in (1, sizes["K"]):
        raise ValueError(
            f"feature must hold 1 tree per round or {sizes['K']}, one for each score, "
            f"got {sizes['S']}"
        )
    feature, threshold = arrays["feature"], arrays["threshold"]
    _check_range("feature", feature, num_features)
    if "links.left_child" in arrays:
        _expect("the number of leaf values", num_leaves, num_nodes)
        _check_links(static, arrays)
    elif num_leaves != num_nodes + 1 or num_leaves & num_nodes or num_nodes < 1:
        raise ValueError(
            "trees in heap order must have 2^d - 1 nodes and 2^d leaves, got "
            f"{num_nodes} and {num_leaves}"
        )
    if "wide_threshold" in arrays:
        _expect("the number of words of wide_threshold", sizes["P"], 2)
    if ("slopes.feature" in arrays) != ("ranges" in arrays):
        raise ValueError("slopes must come with ranges")
    if "ranges" in arrays:
        _expect("the number of ranges", sizes["F"], num_features)
        _expect("the number of ends of ranges", sizes["E"], 2)
        _check_range("slopes.feature", arrays["slopes.feature"] + 1, num_features + 1)
    _check_categories(static, arrays, sizes, num_features)
    by_set = np.isnan(threshold)
    indices = np.array(static.get("categories.features", ()), np.int64)
    if by_set.any() and (
        "left_codes" not in arrays or not np.isin(feature[by_set], indices).all()
    ):
        raise ValueError("threshold must not be NaN except in categorical splits")


def _check_categories(static, arrays, sizes, num_features):
    if "left_codes" in arrays and "categories.codes" not in arrays:
        raise ValueError("left_codes must come with categories")
    if "categories.codes" not in arrays:
        return
    indices, values = static["categories.features"], static["categories.values"]
    good = isinstance(indices, tuple) and all(type(index) is int for index in indices)
    good = good and len(indices) == sizes["G"] and list(indices) == sorted({*indices})
    if not good or not all(0 <= index < num_features for index in indices):
        raise ValueError(
            f"categories.features must be {sizes['G']} ascending indices of features, "
            f"got {show(indices)}"
        )
    if sizes["V"] < 1 or sizes.get("W", 1) < 1:
        raise ValueError("categories.codes and left_codes must not be empty, got none")
    most = WORD * sizes.get("W", 2**20)
    _check_range("categories.codes", arrays["categories.codes"], most)
    good = values is None or (isinstance(values, tuple) and len(values) == sizes["G"])
    if good and values is not None:
        pairs = zip(values, arrays["categories.codes"], strict=True)
        good = all(each is None or _are_names(each, codes) for each, codes in pairs)
    if not good:
        raise ValueError(
            "categories.values must hold one category per code for each categorical "
            "feature, or None"
        )


def _are_names(values, codes):
    """Returns whether these are names of all values that have a code."""
    return (
        isinstance(values, tuple)
        and all(isinstance(value, _SCALARS) for value in values)
        and len(values) <= len(codes)
        and not codes[len(values) :].any()
    )


def _check_links(static, arrays):
    """Checks that links form trees of this depth; leaves must link to themselves."""
    left, shape = arrays["links.left_child"], arrays["links.left_child"].shape
    depth, num_nodes = static["links.max_depth"], shape[2]
    node = np.broadcast_to(np.arange(num_nodes, dtype=np.int32), shape)
    leaf = left == node
    stays = (arrays["threshold"] == np.inf) & arrays["missing_left"]
    inside = (left >= 0) & (left < num_nodes - 1)
    if num_nodes < 1 or not np.all(np.where(leaf, stays, inside)):
        raise ValueError(
            "links.left_child must be the node itself in a leaf, whose threshold is "
            f"+inf and missing_left True, and elsewhere below {num_nodes - 1}"
        )
    if type(depth) is not int or not 0 <= depth <= max(num_nodes, 1):
        raise ValueError(f"links.max_depth must be up to {num_nodes}, got {depth!r}")
    # If each node has one parent, and the root none, no path can have a cycle.
    tree = np.arange(math.prod(shape[:2]))[:, None] * num_nodes
    flat = left.reshape(-1, num_nodes).astype(np.int64) + tree
    children = flat[~leaf.reshape(flat.shape)]
    children = np.concatenate([children, children + 1, tree[:, 0]])
    if len(np.unique(children)) < len(children):
        raise ValueError("links.left_child must give each node one parent, the root 0")
    level = tree[:, 0]
    for _ in range(depth):
        level = level[flat.reshape(-1)[level] != level]
        level = flat.reshape(-1)[level]
        level = np.concatenate([level, level + 1])
    if np.any(flat.reshape(-1)[level] != level):
        raise ValueError(f"links.max_depth must be the depth of trees, got {depth}")


def _check_tree(static, arrays, sizes):
    _expect("format_version", static["format_version"], TREE_VERSION)
    _check_range("feature", arrays["feature"], _check_common(static))
    left, num_nodes = arrays["left"], sizes["M"]
    inner = np.flatnonzero(left != LEAF)
    # Breadth first: the children of the j-th inner node are nodes 2j + 1 and 2j + 2.
    children = 1 + 2 * np.arange(len(inner))
    if (
        num_nodes != 1 + 2 * len(inner)
        or np.any(left[inner] != children)
        or np.any(children <= inner)
    ):
        raise ValueError("left must number the nodes level by level, -1 in leaves")


def _check_bins(static, arrays, sizes):
    check_absent(static["absent"])
    rows = arrays["thresholds"]
    if 0 in rows.shape or not np.all(rows[:, -1] == np.inf):
        raise ValueError("thresholds must have rows that end with +inf")
    if not np.all(rows[:, 1:] >= rows[:, :-1]):  # also false for NaN
        raise ValueError("thresholds must ascend in each row")
    _check_categories(static, arrays, sizes, sizes["F"])


def _check_common(static):
    """Checks the number of features and their names; returns the number."""
    number, names = static["num_features"], static["feature_names"]
    if type(number) is not int or not 1 <= number <= _MOST_FEATURES:
        raise ValueError(f"num_features must be 1 to {_MOST_FEATURES}, got {number!r}")
    if names is None:
        return number
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"feature_names must be {number} strings, got other values")
    if len(names) != number:
        raise ValueError(f"feature_names must be {number} strings, got {len(names)}")
    return number


def _check_range(name, array, end):
    if array.size and not 0 <= array.min() <= array.max() < end:
        raise ValueError(
            f"{name} must lie from 0 to {end - 1}, got {array.min()} to {array.max()}"
        )


def _expect(name, got, expected):
    if type(got) is not int or got != expected:
        raise ValueError(f"{name} must be {expected}, got {show(got)}")


_CATEGORIES = (Categories, ("features", "values"))
_COMMON = ("num_features", "format_version", "feature_names")
KINDS = {
    "Ensemble": Kind(
        Ensemble,
        ENSEMBLE,
        (*_COMMON, "absent"),
        {
            "sums": (LeafSums, ()),
            "categories": _CATEGORIES,
            "links": (Links, ("max_depth",)),
            "slopes": (Slopes, ()),
        },
        _check_ensemble,
    ),
    "RegressionTree": Kind(RegressionTree, REGRESSION_TREE, _COMMON, {}, _check_tree),
    "Bins": Kind(Bins, BINS, ("absent",), {"categories": _CATEGORIES}, _check_bins),
}


Model = Ensemble | RegressionTree | Bins


@on_host("call it on concrete arrays", runs_jax=False)
def save(model: Model, path: Any) -> None:
    """Writes a model to a file; :func:`load` restores it bit for bit.

    The file holds arrays and a JSON header, no code; docs/file-format.md explains how
    to read it without jboost. Writing is atomic: a temporary file in the same folder
    is renamed, so that the path always holds the complete old or new file.

    Args:
      model: an Ensemble, a RegressionTree from :func:`jboost.cart.fit_tree`, or Bins.
      path: a path, or a binary file that is open for writing.

    Raises:
      TypeError: the model is of another type, or traced.
      ValueError: its arrays are inconsistent.
      OSError: the file cannot be written; an existing file is not changed.

    Example:
      >>> import io, numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> file = io.BytesIO()
      >>> jb.save(model, file)
      >>> _ = file.seek(0)
      >>> same = jb.load(file)
      >>> bool((jb.predict(same, x) == jb.predict(model, x)).all())
      True
    """
    write_container(pack(model), path)


@on_host("load the model first")
def load(path: Any) -> Any:
    """Reads a file written by :func:`save`, or the model of a checkpoint of ``fit``.

    Files are not trusted: nothing in them is executed, and checksums, lengths and the
    structure of the trees are checked before a model is built from them.

    Args:
      path: a path, or a binary file that is open for reading.

    Returns:
      The saved Ensemble, RegressionTree or Bins.

    Raises:
      FileError: the file is damaged, of another format, or of a later version.
      OSError: it cannot be read.

    Example:
      >>> import numpy as np, tempfile, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jb.save(model, f"{folder}/model.jboost")
      ...     same = jb.load(f"{folder}/model.jboost")
      >>> same
      Ensemble(num_rounds=20, num_scores=1, max_depth=6, num_features=1)
    """
    container = read_container(path)
    name = repr(getattr(path, "name", path) if hasattr(path, "read") else str(path))
    try:
        return unpack(container)
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{name}, written by {container.written_by}, has invalid contents: {error}"
        ) from None


def pack(model: Any, prefix: str = "") -> Container:
    """Converts a model to a container; ``prefix`` is put before all names."""
    kind = KINDS.get(type(model).__name__)
    if kind is None or type(model) is not kind.build:
        raise TypeError(
            f"model must be one of {tuple(KINDS)}, got {describe_model(model)}"
        )
    written, arrays = _check_contents(kind, model)
    return Container(
        type(model).__name__,
        {prefix + name: value for name, value in written.items()},
        {prefix + name: array for name, array in arrays.items()},
    )


def check_contents(model: Model) -> None:
    """Checks a model as :func:`load` checks a file."""
    _check_contents(KINDS[type(model).__name__], model)


def _check_contents(kind, model):
    """Checks a model; returns its plain fields, as for JSON, and its arrays."""
    static, arrays = {}, {}
    _flatten(model, "", static, arrays)
    written = {name: _to_json(value) for name, value in static.items()}
    read = {name: _from_json(value) for name, value in written.items()}
    check_container(kind, read, arrays)
    return written, arrays


def unpack(container: Container) -> Any:
    """Returns the model in a container; in a checkpoint, names begin with "model."."""
    kept = container.type == "Checkpoint"
    start, name = ("model.", "Ensemble") if kept else ("", container.type)
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(
            f"its type must be one of {(*KINDS, 'Checkpoint')}, got "
            f"{show(container.type)}"
        )
    given, arrays = _strip(container.fields, start), _strip(container.arrays, start)
    static = {key: _from_json(value) for key, value in given.items()}
    check_container(kind, static, arrays)
    return _build(kind, static, arrays)


def _strip(table, prefix):
    size = len(prefix)
    return {name[size:]: v for name, v in table.items() if name.startswith(prefix)}


def _flatten(value, prefix, static, arrays):
    """Collects fields under their names; names of nested fields are joined by dots."""
    if is_dataclass(value):
        entries = [
            (part.name, part.metadata.get("static", False))
            for part in fields(value)
            if not part.metadata.get("derived", False)
        ]
    else:
        entries = [(name, False) for name in value._fields]
    for name, is_static in entries:
        part = getattr(value, name)
        if is_static:
            static[prefix + name] = part
        elif is_dataclass(part) or hasattr(part, "_fields"):
            _flatten(part, f"{prefix}{name}.", static, arrays)
        elif part is not None:
            arrays[prefix + name] = np.asarray(part)


def _build(kind, static, arrays):
    """Builds the model; arrays of an Ensemble are on the device, others on the host."""
    device = jax.device_put if kind.build is Ensemble else lambda arrays: arrays
    arrays = device(arrays)
    parts: dict[str, Any] = {}
    for group, (build, _) in kind.groups.items():
        inner = {**_strip(arrays, f"{group}."), **_strip(static, f"{group}.")}
        parts[group] = build(**inner) if inner else None
    own = {name: v for name, v in {**arrays, **static}.items() if "." not in name}
    return kind.build(**own, **parts)


def _to_json(value):
    """Converts plain fields for JSON; non-finite floats are stored by name."""
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _from_json(value):
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        if [*value] != ["float"] or value["float"] not in ("inf", "-inf", "nan"):
            raise ValueError(f"a field must not hold {show(value)}")
        return float(value["float"])
    return value
