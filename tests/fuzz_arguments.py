# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments: tables, targets, weights, offsets and settings of any kind.

A case is a call. Its arrays come in other types, layouts and shapes, and hold other
numbers than a careful user would pass. The call must give what it gives for a clean
copy of the same numbers, or raise an error that names the argument.
"""

import array
import inspect
import io
import re
import traceback
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import scipy.sparse
from fuzz_changes import pick

import jboost as jb
from jboost.sklearn import JBoostRegressor

FAULTLESS = TypeError, ValueError, jb.TrainingError


class Given(NamedTuple):
    """An argument.

    Attributes:
      value: as it is passed.
      clean: the same as a contiguous array; None if there is none.
      kept: whether it must be accepted where ``clean`` is.
      text: what is odd about it.
    """

    value: Any
    clean: Any
    kept: bool
    text: str


class Call(NamedTuple):
    """A function, and what it is called with."""

    function: str
    given: dict[str, Given]

    def __str__(self) -> str:
        texts = ", ".join(f"{name}: {each.text}" for name, each in self.given.items())
        return f"{self.function}({texts})"


# Numbers.


def draw_numbers(shape, random):
    """Returns float64 numbers, and what is odd about them."""
    numbers = np.round(random.normal(size=shape), 2)
    kind = pick(("plain",) * 4 + (*_ODD, "constant", "all nan", "many"), random)
    size = numbers.size
    if kind in _ODD and size:
        places = random.integers(0, size, random.integers(1, 4))
        numbers.reshape(-1)[places] = _ODD[kind]
    elif kind == "constant":
        numbers[...] = 3.25
    elif kind == "all nan":
        numbers[...] = np.nan
    elif kind == "many" and size:
        numbers.reshape(-1)[:] = random.choice([*_ODD.values()], size)
    return numbers, kind


_ODD = {
    "nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e300": 1e300, "-1e39": -1e39,
    "max": 3.4028234e38, "1e-310": 1e-310, "1e-40": 1e-40, "-0": -0.0,
    "2^53+2": 2.0**53 + 2, "2^24+1": 2.0**24 + 1, "2^62": 2.0**62, "-5": -5.0,
}  # fmt: skip
DTYPES = (
    ("float64",) * 6 + ("float32",) * 4 + ("float16", "longdouble", "bfloat16", "bool")
    + ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)  # fmt: skip


def cast(numbers, dtype):
    """Returns the numbers in a dtype; what it cannot hold becomes something else."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return numbers.astype(ml_dtypes.bfloat16)
        if np.dtype(dtype).kind in "iu":
            limits = np.iinfo(dtype)
            low, high = float(limits.min), float(np.nextafter(float(limits.max), 0))
            numbers = np.clip(np.nan_to_num(numbers * 3), low, high)
        return numbers.astype(dtype)


# Layouts, of the same numbers.


class _Subclass(np.ndarray):
    pass


class _Interface:
    def __init__(self, held):
        self._held = held

    def __array__(self, dtype=None, copy=None):
        return self._held.astype(dtype or self._held.dtype)


def _unaligned(a):
    raw = bytearray(a.nbytes + 1)
    raw[1:] = a.tobytes()
    return np.frombuffer(bytes(raw), a.dtype, a.size, 1).reshape(a.shape)


def _strided(a):
    wide = np.full([2 * n + 1 for n in a.shape], 77).astype(a.dtype)
    part = wide[tuple(slice(1, 1 + 2 * n, 2) for n in a.shape)]
    part[...] = a
    return part


def _reversed(a):
    turned = np.ascontiguousarray(a[tuple(slice(None, None, -1) for _ in a.shape)])
    return turned[tuple(slice(None, None, -1) for _ in a.shape)]


def _read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def _as_jax(a):
    return jnp.asarray(a)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "copy": lambda a: a.copy(),
    "fortran": np.asfortranarray,
    "strided": _strided,
    "reversed": _reversed,
    "read-only": _read_only,
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "unaligned": _unaligned,
    "subclass": lambda a: a.copy().view(_Subclass),
    "no mask": lambda a: np.ma.array(a),
    "false mask": lambda a: np.ma.array(a, mask=np.zeros(a.shape, bool)),
    "interface": _Interface,
    "jax": _as_jax,
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(a.tolist()),
    "pandas": lambda a: (pd.DataFrame if a.ndim == 2 else pd.Series)(a),
    "arrow": lambda a: _as_arrow(a),
    "polars": lambda a: pl.DataFrame(_name(a)) if a.ndim == 2 else pl.Series(a),
}
_EXACT = ("list", "tuple")  # whose numbers are Python's: float64 and int64


def _name(a):
    return {f"c{i}": np.ascontiguousarray(column) for i, column in enumerate(a.T)}


def _as_arrow(a):
    return pa.table(_name(a)) if a.ndim == 2 else pa.array(a)


def draw_layout(plain, random):
    """Returns the same numbers in another layout: must be accepted."""
    name = pick([*LAYOUTS], random)
    if name == "big-endian" and plain.dtype == ml_dtypes.bfloat16:
        name = "copy"
    narrow = plain.dtype in (np.float64, np.int64, np.bool_)
    framed = plain.dtype.kind in "fiub" and plain.dtype.itemsize in (4, 8)
    if name in _EXACT and not (narrow and plain.size):
        name = "copy"
    if name == "tuple" and plain.ndim == 1:
        name = "copy"  # tuples of targets are several targets
    if name in ("pandas", "arrow", "polars") and not (framed and plain.size):
        name = "copy"
    if name == "jax" and plain.dtype.itemsize * (plain.dtype.kind != "b") not in (0, 4):
        name = "copy"
    return LAYOUTS[name](plain), name


# Values that are no clean arrays.


def _mask(a, random):
    mask = random.random(a.shape) < 0.3
    return np.ma.array(a, mask=mask, fill_value=7)


def _objects(a, random):
    odd = [None, "x", "1.5", Decimal("0.5"), Fraction(1, 3), 10**400, 2**80, 1j, b"1"]
    odd += [pd.NA, pd.NaT, float("nan"), [], np.ma.masked, np.float16(2), object()]
    held = a.astype(object)
    if held.size and random.random() < 0.8:
        held.reshape(-1)[random.integers(held.size)] = pick(odd, random)
    return held


class _Failing:
    shape, ndim, dtype = (40, 3), 2, np.dtype("float32")

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no array")

    def __len__(self):
        return 40


class _Endless:
    """Holds itself."""

    def __len__(self):
        return 1

    def __getitem__(self, number):
        if number:
            raise IndexError
        return self


ODDITIES: dict[str, Callable[[Any, Any], Any]] = {
    "masked": _mask,
    "objects": _objects,
    "strings": lambda a, r: a.astype(float).astype(str),
    "bytes": lambda a, r: a.astype(float).astype("S"),
    "complex": lambda a, r: a + 1j,
    "dates": lambda a, r: np.zeros(a.shape, "datetime64[s]"),
    "durations": lambda a, r: np.zeros(a.shape, "timedelta64[s]"),
    "void": lambda a, r: np.zeros(a.shape, "V8"),
    "records": lambda a, r: np.zeros(a.shape, [("a", float), ("b", "U2")]),
    "nested records": lambda a, r: np.zeros(
        a.shape[:1], [("a", float, (2,)), ("b", [("c", int)])]
    ),
    "masked records": lambda a, r: np.ma.array(
        np.zeros(a.shape[:1], [("a", float), ("b", "U2")]), mask=True
    ),
    "ragged": lambda a, r: [[1.0], [1.0, 2.0]],
    "none": lambda a, r: None,
    "text": lambda a, r: pick(["x", "all", "", "\ud800"], r),
    "scalar": lambda a, r: pick([0, 3.5, True, np.float32(1), jnp.float32(1)], r),
    "generator": lambda a, r: (row for row in a),
    "set": lambda a, r: {1.0, 2.0},
    "dict": lambda a, r: {"a": a, "b": a.tolist()},
    "empty": lambda a, r: pick([[], (), {}, [[]], np.zeros((0, 0)), np.zeros(())], r),
    "3-D": lambda a, r: a[None, ..., None] if r.random() < 0.5 else a[..., None],
    "flat": lambda a, r: a.reshape(-1),
    "transposed": lambda a, r: a.T,
    "short": lambda a, r: a[:-1],
    "no rows": lambda a, r: a[:0],
    "no columns": lambda a, r: a[:, :0] if a.ndim == 2 else a[:0],
    "memory": lambda a, r: memoryview(np.ascontiguousarray(a, np.float64)),
    "array.array": lambda a, r: array.array("d", a.astype(float).reshape(-1).tolist()),
    "failing": lambda a, r: _Failing(),
    "endless": lambda a, r: _Endless(),
    "type": lambda a, r: pick([float, np.ndarray, len, jb], r),
    "matrix": lambda a, r: np.asmatrix(a.astype(float)),
    "categories": lambda a, r: pd.DataFrame(
        {"a": pd.Categorical.from_codes(np.arange(len(a)) % 3 - 1, ["u", "v"])}
    ),
    "duplicates": lambda a, r: pd.DataFrame(
        np.zeros((len(a), 2)), columns=[*"aa"]
    ),
    "names": lambda a, r: pd.DataFrame(np.zeros((len(a), 2)), columns=["a", 1]),
    "nullable": lambda a, r: pd.DataFrame(
        {"a": pd.array([1, None] * len(a), "Int64")[: len(a)]}
    ),
    "shape of another": lambda a, r: jax.ShapeDtypeStruct(a.shape, jnp.float32),
    "sparse": lambda a, r: _sparse(a, r),
    "broken sparse": lambda a, r: _break(_sparse(a, r), r),
}  # fmt: skip


def _sparse(a, random):
    a = np.atleast_2d(np.nan_to_num(np.asarray(a, np.float64)))
    kind = pick(["csr", "csc", "coo", "lil", "dok", "bsr", "dia"], random)
    make = scipy.sparse.coo_array(a * (random.random(a.shape) < 0.5)).asformat
    return make(kind)


def _break(matrix, random):
    """Indices that lead out of a matrix, or starts that do not ascend.

    SciPy does not look at them when a matrix is made from its parts.
    """
    matrix = matrix.asformat(pick(["csr", "csc"], random))
    kind = random.random()
    if kind < 0.5 and len(matrix.indices):
        value = pick(
            [-1, matrix.shape[0], matrix.shape[1], 2**31 - 1, -(2**31)], random
        )
        matrix.indices = matrix.indices.copy()
        matrix.indices[random.integers(len(matrix.indices))] = value
    elif kind < 0.8:
        matrix.indptr = matrix.indptr.copy()
        place = random.integers(len(matrix.indptr))
        matrix.indptr[place] = pick([-1, 0, len(matrix.indices) + 5, 2**31 - 1], random)
    elif kind < 0.9:
        matrix.data = matrix.data[:-1]
    else:
        matrix.indices = matrix.indices[::-1].copy()
    return matrix


def draw_given(shape, random, *, oddities):
    """Returns an argument of numbers."""
    numbers, text = draw_numbers(shape, random)
    dtype = pick(DTYPES, random)
    plain = cast(numbers, dtype)
    if oddities and random.random() < 0.35:
        name = pick([*ODDITIES], random)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ODDITIES[name](np.asarray(plain), random)
        clean = None
        if name == "masked" and len(shape) == 2:
            clean = plain.astype(np.float32)
            clean[value.mask] = np.nan
        return Given(value, clean, clean is not None, f"{dtype} {name} {text}")
    if random.random() < 0.1 and len(shape) == 2:
        plain, value, name = _overlapping(plain, random)
    else:
        value, name = draw_layout(plain, random)
    return Given(value, plain, True, f"{dtype} {name} {text}")


def _overlapping(a, random):
    """Rows that share memory: windows of one column, or the same row again."""
    if random.random() < 0.5 or a.size == 0:
        view = np.broadcast_to(a[:1], a.shape)
        return view.copy(), view, "broadcast"
    column = np.resize(a[:, 0], a.shape[0] + a.shape[1] - 1)
    view = np.lib.stride_tricks.sliding_window_view(column, a.shape[1])
    return view.copy(), view, "windows"


# Settings.


class _Number:
    def __float__(self):
        return 1.0

    def __index__(self):
        return 1


SETTINGS = (
    None, True, False, np.bool_(True), -1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 10**400,
    -(10**400), 0.5, -0.5, 1e-310, 1e308, 1e39, float("nan"), float("inf"),
    -float("inf"), np.float16(0.5), np.float64(0.5), np.int8(1), np.uint64(2**63),
    np.array(0.5), np.array([0.5]), np.array([1, 2]), np.zeros((0,)), np.array("x"),
    np.ma.masked, np.ma.array(0.5, mask=True), jnp.float32(0.5), jnp.array([1, 2]),
    Decimal("0.5"), Fraction(1, 2), 1j, "auto", "x", b"x", "\ud800", "", [], [0],
    [0, 0], [-1], [99], ["a"], [None], (), {}, {"a": 1}, {0: 1}, {1, 2},
    [[0, 1], [1, 2]], [[]], object(), int, len, lambda: 1, lambda *a: 1, _Number(),
    np.datetime64("2020-01-01"), pd.NA, range(2), iter([1]), np.array([None]),
    np.array(["auto"]), [float("nan")], [2**70], "1" * 5000, slice(2), Ellipsis,
)  # fmt: skip


def draw_setting(random):
    value = pick(SETTINGS, random)
    return Given(value, None, False, f"setting {value!r}"[:80])


# Functions.

ROWS = 40
NOT_SETTINGS = {
    "x", "y", "X", "sample_weight", "offset", "model", "bins", "args", "kwargs", "self",
    "checkpoint", "mesh", "source", "directories", "values", "weight", "settings",
}  # fmt: skip


@cache
def make_parts():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3)).astype(np.float32)
    y = x[:, 0] + 1
    model, _ = jb.fit(x, y, num_rounds=2, max_depth=2, absent="zero")
    return dict(x=x, y=y, model=model, bins=jb.fit_bins(x, max_bins=8, absent="zero"))


QUICK = dict(num_rounds=2, max_depth=2)


def _fit(x, y, loss=jb.losses.squared_error, **more):
    model, history = jb.fit(x, y, loss, **(QUICK | more))
    return model, history.train_loss


def _boost(y, **more):
    parts = make_parts()
    codes = jb.apply_bins(parts["bins"], parts["x"])
    loss, key = jb.losses.squared_error, jax.random.key(0)
    return jb.boost(codes, y, loss, key, **(QUICK | more))


def _stream(x, y, sample_weight=None, offset=None, **more):
    stream = jb.stream([(x, y, sample_weight, offset)], memory="64 MiB", **more)
    return jb.fit(stream, **QUICK)[0]


def _cross_validate(x, y, **more):
    found = jb.cross_validate(x, y, **(QUICK | dict(folds=2) | more))
    return jax.tree.map(np.asarray, found.history) if hasattr(found, "history") else 0


def _regressor(x, y, sample_weight=None, **more):
    settings = dict(num_rounds=2, max_depth=2) | more
    return JBoostRegressor(**settings).fit(x, y, sample_weight).model_


def _with_model(function):
    def run(x, **more):
        return function(make_parts()["model"], x, **more)

    run.__signature__ = inspect.signature(function)
    return run


def _with_bins(x, **more):
    return jb.apply_bins(make_parts()["bins"], x, **more)


def _sketch(x, sample_weight=None, **more):
    sketch = jb.sketches.make_sketch(3, **more)
    sketch = jb.sketches.update_sketch(sketch, x, sample_weight)
    return jb.sketches.bins_from_sketch(sketch, max_bins=8).thresholds


def _summary(y, sample_weight=None):
    return jb.sketches.make_summary(y, sample_weight)


def _permute(x, y, **more):
    model = make_parts()["model"]
    return jb.explanation.permutation_importance(
        model, x, y, jb.losses.squared_error, **more
    )


def _conformal(x, y, **more):
    return jb.conformal(make_parts()["model"], x, y, **(dict(alpha=0.1) | more))


def _refit(x, y, **more):
    return jb.refit(make_parts()["model"], x, y, jb.losses.squared_error, **more)


# name: (function, its arrays, what says which settings it has)
FUNCTIONS: dict[str, Any] = {
    "fit": (_fit, ("x", "y", "sample_weight", "offset", "validation"), jb.fit),
    "boost": (_boost, ("y", "sample_weight"), jb.boost),
    "predict": (_with_model(jb.predict), ("x", "offset"), jb.predict),
    "staged_predict": (
        _with_model(jb.staged_predict), ("x", "offset"), jb.staged_predict,
    ),
    "leaf_indices": (_with_model(jb.leaf_indices), ("x",), jb.leaf_indices),
    "fit_bins": (jb.fit_bins, ("x", "sample_weight"), jb.fit_bins),
    "apply_bins": (_with_bins, ("x",), jb.apply_bins),
    "fit_tree": (jb.cart.fit_tree, ("x", "y", "sample_weight"), jb.cart.fit_tree),
    "shap_values": (_with_model(jb.shap_values), ("x",), jb.shap_values),
    "cross_validate": (
        _cross_validate, ("x", "y", "sample_weight", "offset"), jb.cross_validate,
    ),
    "stream": (_stream, ("x", "y", "sample_weight", "offset"), jb.stream),
    "sketch": (_sketch, ("x", "sample_weight"), jb.sketches.make_sketch),
    "summary": (_summary, ("y", "sample_weight"), None),
    "regressor": (_regressor, ("x", "y", "sample_weight"), JBoostRegressor),
    "permutation": (
        _permute, ("x", "y", "sample_weight"), jb.explanation.permutation_importance,
    ),
    "conformal": (_conformal, ("x", "y", "sample_weight"), jb.conformal),
    "refit": (_refit, ("x", "y", "sample_weight", "offset"), jb.refit),
}  # fmt: skip
NEEDED = ("x", "y")
# By what an error may name an argument.
NAMES = {
    "x": "x|X",
    "y": "y|values",
    "validation": "validation",
    "sample_weight": "sample_weight|weight",
}


def draw_call(name: str, random: np.random.Generator) -> Call:
    """Returns a call of a function."""
    _, arrays, settings = FUNCTIONS[name]
    given = {}
    rows = ROWS if random.random() < 0.8 else int(random.choice([0, 1, 2, 3]))
    free = name in ("fit", "fit_bins", "fit_tree", "stream", "regressor")
    columns = 3 if not free or random.random() < 0.7 else int(random.choice([1, 2]))
    odd = random.integers(len(arrays))
    for number, argument in enumerate(arrays):
        chosen = number == odd or random.random() < 0.1
        if argument not in NEEDED and not chosen:
            continue
        shape = (rows, columns) if argument == "x" else (rows,)
        if not chosen and argument in NEEDED:
            plain = np.arange(1.0, 1 + np.prod(shape)).reshape(shape) % 7
            given[argument] = Given(plain, plain, True, "plain")
        elif argument == "validation":
            given[argument] = _draw_validation(rows, columns, random)
        else:
            given[argument] = draw_given(shape, random, oddities=True)
    if settings is not None and random.random() < 0.3:
        names = [*inspect.signature(settings).parameters]
        names = [n for n in names if n not in NOT_SETTINGS]
        if names:
            given[pick(names, random)] = draw_setting(random)
    return Call(name, given)


def _draw_validation(rows, columns, random):
    if random.random() < 0.3:
        return draw_setting(random)
    parts = [
        draw_given(shape, random, oddities=random.random() < 0.5)
        for shape in ((rows, columns), (rows,), (rows,))[: random.integers(1, 4)]
    ]
    known = all(each.clean is not None for each in parts)
    return Given(
        tuple(each.value for each in parts),
        tuple(each.clean for each in parts) if known else None,
        known,
        " | ".join(each.text for each in parts),
    )


def check_call(call: Call) -> bool:
    """Makes a call; returns whether it was accepted.

    Raises:
      AssertionError: the result is not that of clean arguments, or an error names no
        argument.
      Exception: any error that a user should not see.
    """
    function = FUNCTIONS[call.function][0]
    found = error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = function(**{n: each.value for n, each in call.given.items()})
        except FAULTLESS as caught:
            _check_message(call, caught)
            error = caught
        except RuntimeError as caught:
            # scikit-learn passes on what __array__ raises.
            passed_on = call.function == "regressor" and str(caught) == "no array"
            if not passed_on and not str(caught).startswith("metric failed: "):
                raise
            error = caught
        if any(each.clean is None for each in call.given.values()):
            return error is None
        clean = {name: _clean(name, each) for name, each in call.given.items()}
        try:
            expected = function(**clean)
        except FAULTLESS as caught:
            assert error is not None, f"accepted, but clean arguments are not: {caught}"
            return False
    if error is not None:
        if call.function == "regressor":
            return False  # scikit-learn's own checks refuse more
        if all(each.kept for each in call.given.values()):
            raise AssertionError(f"clean arguments are accepted, but: {error}")
        return False
    _check_same(found, expected)
    return True


def _clean(name, given):
    if isinstance(given.clean, tuple):
        return tuple(np.array(part) for part in given.clean)
    if name != "x":
        return np.array(given.clean)
    with np.errstate(over="ignore"):
        return np.array(given.clean).astype(np.float32)


def _check_message(call, error):
    if isinstance(error, jb.TrainingError) or _is_of_peer(error):
        return
    if callable(getattr(call.given.get("learning_rate"), "value", None)):
        return  # what a user's function raises is passed on
    text = str(error)
    words = "|".join(NAMES.get(name, name) for name in call.given)
    more = "|loss|target|source|batch|rows|model|inverse_link|absent|categorical|folds"
    if not re.search(rf"(?<![a-zA-Z])({words}{more})(?![a-z])", text):
        text = f"names no argument: {type(error).__name__}: {text}"
        raise AssertionError(text) from error


def _is_of_peer(error):
    """Checks whether scikit-learn's own checks refuse the arguments of an estimator."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("/site-packages/sklearn/" in frame.filename for frame in frames)


def _check_same(found, expected):
    """Asserts that results are equal to the bit."""
    if isinstance(found, tuple) and isinstance(found[0], jb.Ensemble):
        found, expected = (_as_bytes(pair[0]) for pair in (found, expected))
    if isinstance(found, jb.Ensemble):
        found, expected = _as_bytes(found), _as_bytes(expected)
    one, other = map(jax.tree.leaves, (found, expected))
    assert len(one) == len(other), "results differ"
    for a, b in zip(one, other, strict=True):
        if isinstance(a, bytes):
            assert a == b, "results differ"
        elif isinstance(a, (np.ndarray, jax.Array)):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def _as_bytes(model):
    from dataclasses import replace

    file = io.BytesIO()
    jb.save(replace(model, feature_names=None, absent=None), file)
    return file.getvalue()
