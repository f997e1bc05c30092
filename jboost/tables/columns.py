# SPDX-License-Identifier: Apache-2.0
"""Columns of tables as numbers or categories, also those too fine for float32."""

import datetime
import math
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache, partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, Shaped

from jboost.entry.messages import show
from jboost.tables.categories import Category, warn_of_unseen

Values = tuple[Category, ...]

_NUMBERS = (Real, Decimal, np.bool_)
_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64)
_KINDS = (str, int, float, bool)  # types of categories
_MOST_LEVELS = 2**16  # unused levels are kept if a dtype declares at most this many
_FEW_ROWS = 1000  # up to here, a Python loop is faster than calls to the library
_OWN_SHARE = 0.9  # a column with more distinct strings per row looks like an ID
_LEAST_STRINGS = 20  # columns with fewer distinct strings are not reported as IDs


class Column(NamedTuple):
    """Holds a series or an array [N], and its name in error messages."""

    label: str
    cells: Any

    @property
    def dtype(self) -> Any:
        """The dtype, of narwhals or of NumPy."""
        return self.cells.dtype


class _Labels(NamedTuple):
    """Holds cells that are not numbers.

    Attributes:
      distinct: the distinct values, unordered, without missing ones.
      replace: maps one number per distinct value to an array [N], NaN where missing.
      levels: lists the categories that the dtype declares; None if it declares none.
    """

    distinct: list[Any]
    replace: Callable[[list[float]], Float[np.ndarray, " N"]]
    levels: Callable[[], list[Any]] | None = None


def read_cells(
    column: Column, known: Values | None, *, new: bool, extend: bool = False
) -> tuple[Shaped[np.ndarray, " N"], Values | None, str | None]:
    """Reads a column of x: numbers, or indices of categories and their values.

    In training, the values that occur come first, sorted, then the other levels that
    the dtype declares. A column of missing cells alone can be of any kind.

    Args:
      known: the values seen in training, or None if the column was numeric.
      new: whether the kinds of the columns are not known yet.
      extend: whether unknown values are appended to the known ones; otherwise they
        are missing, with a warning if no value is known.

    Returns:
      The cells; the categories, or None for numbers; and a warning if strings look like
      numbers or identifiers in training, otherwise None.
    """
    cells = _sort_out(column)
    if isinstance(cells, np.ndarray):
        if known is not None and not np.isnan(cells).all():
            raise TypeError(
                f"{column.label} must hold categories, as in training, got numbers "
                f"({column.dtype})"
            )
        return cells, known, None
    values = _check_values(cells.distinct, column)
    if not values and not (new and cells.levels is not None):
        return cells.replace([]), known, None
    if new:
        known = (*sorted(values), *_find_unused(cells.levels, values))
    elif known is None:
        raise TypeError(
            f"{column.label} must hold numbers, as in training, got categories "
            f"({column.dtype}), such as {show(values[0])}"
        )
    if known and values and isinstance(known[0], str) != isinstance(values[0], str):
        raise TypeError(
            f"{column.label} must hold categories such as {show(known[0])}, as in "
            f"training, got {show(values[0])}"
        )
    indices = _number_values(known)
    unknown = [] if new else [value for value in values if value not in indices]
    if unknown and extend:
        known = (*known, *sorted(unknown))
        indices = _number_values(known)
    elif len(unknown) == len(values) > 0 and len(column.cells) > 1:
        warn_of_unseen(column.label, unknown[0])
    numbers = cells.replace([indices.get(value, np.nan) for value in values])
    undeclared = new and cells.levels is None
    return numbers, known, _doubt(column, values, numbers) if undeclared else None


@lru_cache(maxsize=128)
def _number_values(known: Values) -> dict[Category, float]:
    """Returns the index of each value; cached, because servers predict row by row."""
    return {value: float(index) for index, value in enumerate(known)}


def _doubt(column, values, numbers):
    """Returns a warning if the strings look like numbers or identifiers, else None."""
    if all(map(_is_numeric, values)):
        problem = f"only strings that look like numbers, such as {show(values[0])}"
        remedy = "convert it to numbers if their order matters"
    else:
        rows = np.count_nonzero(~np.isnan(numbers))
        if len(values) < max(_LEAST_STRINGS, _OWN_SHARE * rows):
            return None
        problem = f"{len(values)} distinct strings in {rows} rows"
        remedy = "drop it if it identifies rows"
    return (
        f"{column.label} holds {problem}, which become unordered categories; {remedy}, "
        "or list it in categorical to silence this warning"
    )


def _is_numeric(text):
    """Checks whether a string is a finite number; "nan", "inf" and "1_000" are not."""
    try:
        return math.isfinite(float(text)) and "_" not in text
    except ValueError:
        return False


def read_numbers(column: Column) -> Shaped[np.ndarray, " N"]:
    """Reads a column of numbers in its own dtype, with NaN for missing cells."""
    cells = _sort_out(column)
    if isinstance(cells, np.ndarray):
        return cells
    if cells.distinct or cells.levels is not None:
        raise TypeError(
            f"{column.label} must hold numbers, got {column.dtype}; encode strings "
            "and categories as numbers first"
        )
    return cells.replace([])


def is_gap(value: Any) -> bool:
    """Checks whether a value is None, NaN, or pandas.NA."""
    if isinstance(value, str):
        return False
    # pandas.NA is recognized by name, because pandas.NA != pandas.NA is not a bool.
    differs = value is None or type(value).__name__ == "NAType" or value != value
    return getattr(differs, "ndim", 0) == 0 and bool(differs)  # arrays are no gaps


def _sort_out(column):
    """Returns numbers [N], or _Labels."""
    cells, dtype = column.cells, column.dtype
    if isinstance(cells, np.ndarray):
        return _sort_out_array(column)
    import narwhals.stable.v2 as nw

    if dtype.is_temporal():
        raise _refuse_dates(column, dtype)
    if isinstance(dtype, (nw.Boolean, nw.Decimal, nw.Int128, nw.UInt128)):
        has_gaps = isinstance(dtype, nw.Boolean) and not cells.is_null().any()
        return cells.to_numpy() if has_gaps else cells.cast(nw.Float64).to_numpy()
    if dtype.is_numeric():
        return cells.to_numpy()
    if isinstance(dtype, nw.String | nw.Categorical | nw.Enum):
        categorical = not isinstance(dtype, nw.String)
        levels = partial(list_levels, cells) if categorical else None
        if len(cells) <= _FEW_ROWS:
            return _label_objects(cells.to_list(), levels)
        return _label_series(cells, levels)
    if isinstance(dtype, nw.Unknown):  # Arrow's null type, or sparse columns of pandas
        array = cells.to_numpy()
        if array.dtype.kind in "fiub":
            return array
    return _sort_out_objects(column, cells.to_list(), cells.is_null().to_list())


def _sort_out_array(column):
    """Returns the same for a field of a structured array."""
    cells, kind = column.cells, column.dtype.kind
    if cells.ndim != 1:
        raise TypeError(
            f"{column.label} must hold one number or category in each row, got cells "
            f"of shape {cells.shape[1:]}"
        )
    if kind in "fiub":
        return cells
    if kind in "mM":
        raise _refuse_dates(column, column.dtype)
    values = (np.strings.decode(cells, "utf-8") if kind == "S" else cells).tolist()
    return _sort_out_objects(column, values, [*map(is_gap, values)])


def _sort_out_objects(column, values, gaps):
    """Returns the same for Python objects, which are checked one by one."""
    present = [value for value, gap in zip(values, gaps, strict=True) if not gap]
    kinds = {type(value) for value in present}
    if kinds and all(issubclass(kind, _NUMBERS) for kind in kinds):
        pairs = zip(values, gaps, strict=True)
        return np.array([np.nan if gap else _as_float(value) for value, gap in pairs])
    if any(map(_is_date, kinds)):
        raise _refuse_dates(column, _names(kinds))
    if not all(issubclass(kind, str) for kind in kinds):
        raise TypeError(
            f"{column.label} must hold only numbers or only strings, got "
            f"{column.dtype} cells of types {_names(kinds)}"
        )
    return _label_objects(values, levels=None)


def _as_float(number):
    """Converts a number; one beyond the range of floats becomes infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number > 0 or -1)


def _label_objects(values, levels):
    """Returns the labels of a list of cells; missing cells are None or NaN."""
    found = [value for value in {*values} if not is_gap(value)]

    def replace(numbers):
        table: Any = _NaNByDefault(zip(found, numbers, strict=True))
        return np.fromiter(map(table.__getitem__, values), np.float64, len(values))

    return _Labels(found, replace, levels)


class _NaNByDefault(dict):
    """Maps values to numbers, and any other value to NaN."""

    def __missing__(self, value):
        return np.nan


def _label_series(cells, levels):
    """Returns the same for a series, with operations of the data frame's library."""
    import narwhals.stable.v2 as nw

    if cells.implementation.is_pyarrow() and levels is None:
        cells = cells.cast(nw.String)  # Arrow's string views support few operations
    found = cells.unique()
    found = found.filter(~found.is_null()).to_list()

    def replace(numbers):
        if not found:
            return np.full(len(cells), np.nan)
        return cells.replace_strict(found, numbers, return_dtype=nw.Float64).to_numpy()

    return _Labels(found, replace, levels)


def _is_date(kind):
    pandas: Any = sys.modules.get("pandas")
    return issubclass(kind, _DATES if pandas is None else (*_DATES, pandas.Period))


def list_levels(cells):
    """Returns the categories that a dtype declares."""
    try:
        return cells.cat.get_categories().to_list()
    except AttributeError:  # pandas columns of Arrow dictionaries
        return []


def _find_unused(levels, values):
    """Returns the sorted levels of a dtype that do not occur and have the same type."""
    levels = levels() if levels else []
    if not levels or len(levels) > _MOST_LEVELS:
        return []
    levels = [v.item() if isinstance(v, np.generic) else v for v in levels]
    kind = type((values or levels)[0])
    if kind not in _KINDS or not all(type(level) is kind for level in levels):
        return []
    return sorted({*levels} - {*values})


def _check_values(distinct, column) -> list[Any]:
    """Converts values to Python types and checks that all have the same type."""
    values = [v.item() if isinstance(v, np.generic) else v for v in distinct]
    kinds = {type(value) for value in values}
    if any(map(_is_date, kinds)):
        raise _refuse_dates(column, _names(kinds))
    if len(kinds) > 1 or not kinds <= {*_KINDS}:
        raise TypeError(
            f"{column.label} must hold categories of one type, strings, numbers or "
            f"booleans, got {_names(kinds)}; convert them to strings first"
        )
    return values


def _refuse_dates(column, got):
    return TypeError(
        f"{column.label} must hold numbers or categories, got dates or times ({got}); "
        "extract numeric columns from them, such as the year, the month, the day of "
        "the week, the hour, or the days or seconds since an event"
    )


def _names(kinds):
    return " and ".join(sorted(kind.__name__ for kind in kinds))


_MAGNITUDE, _DENORMALS = 0x7FFFFFFF, 0x7FFFFF  # bits of a float32, of its denormals


class WideColumn(NamedTuple):
    """Holds the thresholds of a column.

    Attributes:
      rounded: the thresholds that float32 values are compared with, ascending.
      codes: distinct, ascending numbers near ``rounded``, which replace the thresholds.
      bounds: the least and the most number that replaces a value between two
        thresholds, [2, m + 1].
    """

    thresholds: Float64[np.ndarray, " m"]
    rounded: Float32[np.ndarray, " m"]
    codes: Float32[np.ndarray, " m"]
    bounds: Float32[np.ndarray, "2 m+1"]

    def convert(self, values: Shaped[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
        """Returns the numbers that replace values; NaN stays NaN.

        Law: ``convert(x) <= codes[i]`` where ``x <= thresholds[i]``, compared in
        float64. Values that are float32 are compared with ``rounded``.
        """
        known = self.rounded if values.dtype == np.float32 else self.thresholds
        with np.errstate(over="ignore"):
            near = values.astype(np.float32)
        # The number of thresholds below each value; all of them for NaN.
        rank = np.searchsorted(known, values.astype(known.dtype))
        return np.clip(near, self.bounds[0, rank], self.bounds[1, rank])


def make_wide_column(
    thresholds: Float64[np.ndarray, " m"], rounded: Float32[np.ndarray, " m"]
) -> WideColumn:
    """Finds numbers that replace ascending thresholds.

    They are as near to the rounded thresholds as they can be while they are distinct,
    and 0 keeps its place among them: sparse matrices do not store it.
    """
    place, last = np.arange(len(rounded)), len(rounded) - 1
    number = _to_number(rounded)
    shifted, low = number - place, number < 0
    shifted[~low] = np.maximum.accumulate(shifted[~low])
    shifted[low] = np.minimum.accumulate(shifted[low][::-1])[::-1]
    # Only an infinite threshold may become infinite.
    top = np.inf if thresholds[-1] == np.inf else np.finfo(np.float32).max
    least, most = _to_number(np.array([-np.inf, top], np.float32))
    number = np.clip(shifted, least, most - last) + place
    codes, infinite = _to_float(number), np.full(1, np.inf, np.float32)
    end = _to_number(infinite)
    above = np.append(-infinite, _to_float(np.minimum(number + 1, end)))
    bounds = np.stack([above, np.append(codes, infinite)])
    return WideColumn(thresholds, rounded, codes, bounds)


def _to_number(values) -> Int64[np.ndarray, " m"]:
    """Numbers float32 values in their order, 0 for 0; denormals count as 0."""
    bits = values.view(np.int32).astype(np.int64)
    size = np.maximum((bits & _MAGNITUDE) - _DENORMALS, 0)
    return np.where(bits < 0, -size, size)


def _to_float(number) -> Float32[np.ndarray, " m"]:
    """Returns the values of numbers from :func:`_to_number`."""
    size = np.abs(number)
    bits = np.where(size > 0, size + _DENORMALS, 0).astype(np.int32)
    return np.where(number < 0, -bits.view(np.float32), bits.view(np.float32))
