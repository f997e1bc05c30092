# SPDX-License-Identifier: Apache-2.0
"""A model as data for a page, and its inverse link as JavaScript.

In: an Ensemble, and a function in jax.numpy. Out: arrays by name, as
``trees.js`` reads them, and the text of a function of the scores of a row.
"""

import json
import math
import zlib
from base64 import b64encode
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jboost.model.ensemble import Ensemble
from jboost.model.nodes import take_tree
from jboost.objective.jaxprs import inlined_body

# ---- trees --------------------------------------------------------------------------


def list_arrays(model: Ensemble) -> dict[str, np.ndarray]:
    """Returns all that a prediction takes, the trees node by node.

    Trees follow each other; ``start`` has the first node of each. A tree that K scores
    share is listed once, with K values a node. ``words`` holds the sets of categories
    that go left, one for each node with a set; ``set`` is its number, or else -1.
    """
    nodes = model.nodes()
    every = model.num_scores if model.shares_structure else 1
    num_trees = len(nodes.left) // every
    trees = [
        [take_tree(nodes, number * every + k) for k in range(every)]
        for number in range(num_trees)
    ]
    firsts = [same[0] for same in trees]
    sizes = [len(tree.left) for tree in firsts]

    def join(name, dtype):
        return _join([getattr(tree, name) for tree in firsts], dtype)

    arrays = {
        "start": np.cumsum([0, *sizes]).astype(np.int32),
        "left": join("left", np.int32),
        "feature": join("feature", np.int32),
        "threshold": join("threshold", np.float32),
        "missing_left": join("missing_left", np.uint8),
        "weight": join("weight", np.float32),
        "value": _join([np.stack([t.value for t in s], 1) for s in trees], np.float32),
        "init": np.asarray(model.init_score, np.float32).reshape(-1),
    }
    if nodes.left_codes is not None:
        divided = np.isnan(arrays["threshold"])
        arrays["set"] = np.where(divided, np.cumsum(divided) - 1, -1).astype(np.int32)
        arrays["words"] = join("left_codes", np.uint32)[divided]
    if nodes.slopes is not None:
        slopes: list[Any] = [[tree.slopes for tree in same] for same in trees]
        arrays["term"] = _join([same[0].feature for same in slopes], np.int32)
        for name in ("slope", "center"):
            parts = [np.stack([getattr(s, name) for s in same], 1) for same in slopes]
            arrays[name] = _join(parts, np.float32)
        arrays["ranges"] = np.asarray(model.ranges, np.float32)
    if model.categories is not None:
        arrays["codes"] = np.asarray(model.categories.codes, np.int32)
    return arrays


def _join(parts, dtype):
    return np.concatenate([np.zeros((0, *parts[0].shape[1:])), *parts]).astype(dtype)


def pack(arrays: dict[str, np.ndarray]) -> str:
    """Returns arrays as text: base64 of a compressed header in JSON and their bytes."""
    table, pieces, offset = [], [], 0
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<")
        data = np.ascontiguousarray(array, dtype).tobytes()
        data += b"\0" * (-len(data) % 8)
        table.append((name, dtype.name, array.size, offset))
        pieces.append(data)
        offset += len(data)
    header = json.dumps(table).encode()
    header += b" " * (-(len(header) + 8) % 8)
    whole = len(header).to_bytes(8, "little") + header + b"".join(pieces)
    return b64encode(zlib.compress(whole, 9)).decode()


# ---- inverse links ------------------------------------------------------------------


class Script(NamedTuple):
    """A function of the scores of a row, in JavaScript.

    Attributes:
      names: the names of its results; empty for a single one.
      body: the body of a function of ``s``, an array of K scores; it returns an array.
    """

    names: list[str]
    body: str


def write_link(link: Callable[..., Any] | None, num_scores: int) -> Script | None:
    """Writes an inverse link in JavaScript; None if it has loops or rare operations.

    Each number of the link's jaxpr becomes a constant: rows have few scores.
    """
    shape = (num_scores,) if num_scores > 1 else ()
    names: list[str] = []

    def flat(score):
        found = score if link is None else link(score)
        leaves = jax.tree_util.tree_leaves_with_path(found)
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            size = math.prod(jnp.shape(leaf))
            numbers = [str(number) for number in range(size)] if size > 1 else [""]
            names.extend(".".join(filter(None, (name, n))) for n in numbers)
        return [jnp.ravel(leaf) for _, leaf in leaves]

    closed = jax.make_jaxpr(flat)(jax.ShapeDtypeStruct(shape, jnp.float32))
    writer, scores = _Translator([]), [f"s[{number}]" for number in range(num_scores)]
    try:
        given = np.array(scores, object).reshape(shape)
        results = writer.run(closed.jaxpr, closed.consts, [given])
    except _UnknownOperation:
        return None
    found = ",".join(_show(entry) for part in results for entry in part.ravel())
    names = [] if names == [""] else names
    return Script(names, "".join([*writer.lines, f"return [{found}];"]))


class _UnknownOperation(Exception):
    """The jaxpr holds an operation that is not written in JavaScript here."""


# Operations on single numbers; these have the names of JavaScript.
_CALLS = (
    "exp", "log", "log1p", "expm1", "tanh", "sqrt", "abs", "sign", "floor", "ceil",
    "sin", "cos", "tan", "atan2", "sinh", "cosh", "max", "min", "pow", "cbrt", "asinh",
    "atan",
)  # fmt: skip
_SIGNS = {
    "add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|",
}  # fmt: skip
_TEXTS = {
    "neg": "-{}", "exp2": "2**{}", "logistic": "1/(1+Math.exp(-{}))",
    "rsqrt": "1/Math.sqrt({})",
    "square": "{0}*{0}", "not": "+!{}", "is_finite": "+Number.isFinite({})",
    "clamp": "Math.min(Math.max({1},{0}),{2})",
    "integer_pow": "{}**{y}",
}  # fmt: skip
_SAME = ("convert_element_type", "copy", "stop_gradient", "reduce_precision")
# Operations that only move numbers.
_MOVES = (
    "reshape", "squeeze", "broadcast_in_dim", "transpose", "concatenate", "slice",
    "rev", "dynamic_slice", "gather", "expand_dims", "split",
)  # fmt: skip
_FOLDS = {
    "reduce_sum": "{}+{}", "reduce_prod": "{}*{}",
    "reduce_max": "Math.max({},{})", "reduce_min": "Math.min({},{})",
    "cumsum": "{}+{}", "cumprod": "{}*{}", "cummax": "Math.max({},{})",
}  # fmt: skip


class _Translator(NamedTuple):
    """Runs a jaxpr on arrays of expressions; each line defines one constant."""

    lines: list[str]

    def run(self, jaxpr, constants, arguments) -> list[np.ndarray]:
        values = dict(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(operand):
            literal = isinstance(operand, jex_core.Literal)
            return np.asarray(operand.val) if literal else values[operand]

        for equation in jaxpr.eqns:
            found = self.apply(equation, [read(each) for each in equation.invars])
            values |= dict(zip(equation.outvars, found, strict=True))
        return [read(each) for each in jaxpr.outvars]

    def apply(self, equation, operands: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the results of one operation."""
        name, params = equation.primitive.name, equation.params
        inner = inlined_body(equation)
        if inner is not None:
            return self.run(inner.jaxpr, inner.consts, operands)
        if all(operand.dtype != object for operand in operands):
            found = equation.primitive.bind(*operands, **params)
            several = equation.primitive.multiple_results
            return [np.asarray(each) for each in (found if several else [found])]
        if name in _SAME:
            whole = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
            return [self.map("Math.trunc({})", *operands) if whole else operands[0]]
        if name in _MOVES:
            return _move(equation, operands)
        if name in _FOLDS:
            return [self.fold(name, operands[0], params)]
        if name == "select_n" and len(operands) == 3:
            return [self.map("{0}?{2}:{1}", *operands)]
        if name in _CALLS:
            text = f"Math.{name}({','.join(['{}'] * len(operands))})"
        elif name in _SIGNS:
            text = f"{{}}{_SIGNS[name]}{{}}"
        elif name in _TEXTS:
            text = _TEXTS[name].replace("{y}", str(params.get("y")))
        else:
            raise _UnknownOperation(name)
        return [self.map(text, *operands)]

    def map(self, text: str, *operands: np.ndarray) -> np.ndarray:
        """Applies an operation to each entry of arrays of one shape, or of scalars."""
        same = np.broadcast_arrays(*(np.asarray(each, object) for each in operands))
        found = np.empty(same[0].shape, object)
        for index in np.ndindex(found.shape):
            found[index] = self.define(text, *(each[index] for each in same))
        return found

    def define(self, text: str, *entries: Any) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {name}={text.format(*map(_show, entries))};")
        return name

    def fold(self, name, operand, params) -> np.ndarray:
        """Reduces or accumulates an array along its axes."""
        text, running = _FOLDS[name], name.startswith("cum")
        axes = [params["axis"]] if running else params["axes"]
        for axis in sorted(axes, reverse=True):
            slices = list(np.moveaxis(operand, axis, 0))
            if params.get("reverse"):
                slices.reverse()
            sums = slices[:1]
            for each in slices[1:]:
                sums.append(self.map(text, sums[-1], each))
            if params.get("reverse"):
                sums.reverse()
            operand = np.stack(sums, axis) if running else np.asarray(sums[-1], object)
        return operand


def _move(equation, operands) -> list[np.ndarray]:
    """Moves the places of entries as the operation does, then the entries."""
    entries: list[Any] = []
    places = []
    for operand in operands:
        if operand.dtype != object and np.issubdtype(operand.dtype, np.integer):
            places.append(operand)  # where to begin
            continue
        first = len(entries)
        entries += operand.ravel().tolist()
        places.append(np.arange(first, len(entries), dtype=np.float32))
        places[-1] = places[-1].reshape(operand.shape)
    found = equation.primitive.bind(*places, **equation.params)
    several = equation.primitive.multiple_results
    table = np.array([*entries, None], object)
    indices = (np.asarray(each) for each in (found if several else [found]))
    return [
        np.asarray(table[np.nan_to_num(index, nan=-1).astype(int)], object)
        for index in indices
    ]


def _show(entry: Any) -> str:
    """Returns an expression, in parentheses where it is a negative number."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, bool | np.bool_):
        return str(int(entry))
    number = float(entry)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "(-Infinity)"
    return repr(number) if number >= 0 else f"({number!r})"


# Values of rows, with all digits of float32.
_EXACT = ("low", "high", "middle", "values", "x", "y", "target", "score")


def clean(value: Any, digits: int = 5) -> Any:
    """Returns plain values for JSON: short numbers, None for those not finite."""
    if isinstance(value, dict):
        pairs = ((key, 9 if key in _EXACT else digits) for key in value)
        return {str(key): clean(value[key], number) for key, number in pairs}
    if isinstance(value, np.ndarray | list | tuple):
        return [clean(each, digits) for each in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
