# SPDX-License-Identifier: Apache-2.0
"""Reads one column: numbers, categories, or neither.

In: a series of a data frame, or a field of a structured array. Out: numbers as a NumPy
array; for categories, the index of each cell's value in a tuple of all values.
"""

import datetime
import math
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache, partial
from numbers import Real
from typing import Any, NamedTuple

import narwhals.stable.v2 as nw
import numpy as np
from jaxtyping import Float, Shaped

from jboost.tables.categories import Category

Values = tuple[Category, ...]

_NUMBERS = (Real, Decimal, np.bool_)
_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64)
_KINDS = (str, int, float, bool)  # of categories
_NO_ARRAY = (nw.Boolean, nw.Decimal, nw.Int128, nw.UInt128)  # until they are floats
_MOST_LEVELS = 2**16  # of a dtype that are kept even if they do not occur
_FEW_ROWS = 1000  # up to here a Python loop is faster than calls into the library
_OWN_SHARE = 0.9  # of the rows: with more distinct strings, a column looks like an ID
_LEAST_STRINGS = 20  # columns with fewer distinct strings are not reported as IDs


class Column(NamedTuple):
    """A series or an array [N], and what errors call it."""

    place: str
    cells: Any

    @property
    def dtype(self) -> Any:
        """Of narwhals or of NumPy."""
        return self.cells.dtype


class _Labels(NamedTuple):
    """Cells that are no numbers.

    Attributes:
      distinct: the values that occur, in no order, without the missing ones.
      replace: maps a number for each of these to an array [N], NaN where missing.
      levels: lists the categories that the dtype declares; None if it declares none.
    """

    distinct: list[Any]
    replace: Callable[[list[float]], Float[np.ndarray, " N"]]
    levels: Callable[[], list[Any]] | None = None


def read_cells(
    column: Column, known: Values | None, *, new: bool
) -> tuple[Shaped[np.ndarray, " N"], Values | None, str | None]:
    """A column of x: numbers and None, or places of categories and their values.

    In training the values that occur come first, sorted; then the levels that the dtype
    declares and that do not occur. A column without any value goes with every kind.

    Args:
      column: the cells.
      known: the values that training saw; None if it saw numbers.
      new: whether this is training.

    Returns:
      The cells, the values, and a warning where strings of training look like numbers
      or identifiers, else None.

    Raises:
      TypeError: the cells are neither; or of the other kind than in training.
    """
    cells = _sort_out(column)
    if isinstance(cells, np.ndarray):
        if known is not None and not np.isnan(cells).all():
            raise TypeError(
                f"{column.place} must hold categories, as in training, got numbers "
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
            f"{column.place} must hold numbers, as in training, got categories "
            f"({column.dtype}), such as {values[0]!r}"
        )
    if known and values and isinstance(known[0], str) != isinstance(values[0], str):
        raise TypeError(
            f"{column.place} must hold categories such as {known[0]!r}, as in "
            f"training, got {values[0]!r}"
        )
    places = _number_values(known)
    numbers = cells.replace([places.get(value, np.nan) for value in values])
    undeclared = new and cells.levels is None
    return numbers, known, _doubt(column, values, numbers) if undeclared else None


@lru_cache(maxsize=128)
def _number_values(known: Values) -> dict[Category, float]:
    """The index of each value; cached, because servers predict row by row."""
    return {value: float(place) for place, value in enumerate(known)}


def _doubt(column, values, numbers):
    """Returns a warning if the strings look like numbers or identifiers, else None."""
    if all(map(_is_numeric, values)):
        problem = f"only strings that are numbers, such as {values[0]!r}"
        remedy = "convert it to numbers if their order matters"
    else:
        rows = np.count_nonzero(~np.isnan(numbers))
        if len(values) < max(_LEAST_STRINGS, _OWN_SHARE * rows):
            return None
        problem = f"{len(values)} distinct strings in {rows} rows"
        remedy = "drop it if it identifies rows"
    return (
        f"{column.place} holds {problem}, which become unordered categories; {remedy}, "
        "or list it in categorical to keep it as it is"
    )


def _is_numeric(text):
    """Whether it is a finite number as tables write it: no nan, inf or 1_000."""
    try:
        return math.isfinite(float(text)) and "_" not in text
    except ValueError:
        return False


def read_numbers(column: Column) -> Shaped[np.ndarray, " N"]:
    """Numbers in the type that fits them, NaN where a cell is missing.

    Raises:
      TypeError: the cells are no numbers.
    """
    cells = _sort_out(column)
    if isinstance(cells, np.ndarray):
        return cells
    if cells.distinct or cells.levels is not None:
        raise TypeError(
            f"{column.place} must hold numbers, got {column.dtype}; encode strings "
            "and categories as numbers first"
        )
    return cells.replace([])


def find_gap(values: Shaped[np.ndarray, " N"]) -> int | None:
    """The first row that holds None, NaN or NA; None if there is no such row."""
    if values.dtype.kind == "O":
        return next((row for row, v in enumerate(values.tolist()) if is_gap(v)), None)
    gaps = np.flatnonzero(values != values)
    return int(gaps[0]) if len(gaps) else None


def is_gap(value: Any) -> bool:
    """Whether it is None, NaN, or NA of pandas, which has no truth value."""
    if isinstance(value, str):
        return False
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def list_order(column: Column) -> list[Any] | None:
    """Returns the levels of an ordered dtype in their order; None for other dtypes."""
    if isinstance(column.cells, np.ndarray):
        return None
    arrow = getattr(column.cells.to_native(), "type", None)
    if isinstance(column.dtype, nw.Enum) or getattr(arrow, "ordered", False):
        levels = _list_levels(column.cells)
        return [v.item() if isinstance(v, np.generic) else v for v in levels]
    return None


def _sort_out(column):
    """Numbers [N], or _Labels."""
    cells, dtype = column.cells, column.dtype
    if isinstance(cells, np.ndarray):
        return _sort_out_array(column)
    if dtype.is_temporal():
        raise _refuse_dates(column, dtype)
    if isinstance(dtype, _NO_ARRAY):
        has_gaps = isinstance(dtype, nw.Boolean) and not cells.is_null().any()
        return cells.to_numpy() if has_gaps else cells.cast(nw.Float64).to_numpy()
    if dtype.is_numeric():
        return cells.to_numpy()
    if isinstance(dtype, nw.String | nw.Categorical | nw.Enum):
        categorical = not isinstance(dtype, nw.String)
        levels = partial(_list_levels, cells) if categorical else None
        if len(cells) <= _FEW_ROWS:
            return _label_objects(cells.to_list(), levels)
        return _label_series(cells, levels)
    if isinstance(dtype, nw.Unknown):  # arrow's nulls, or sparse columns of pandas
        array = cells.to_numpy()
        if array.dtype.kind in "fiub":
            return array
    return _sort_out_objects(column, cells.to_list(), cells.is_null().to_list())


def _sort_out_array(column):
    """The same of a field of a structured array."""
    cells, kind = column.cells, column.dtype.kind
    if cells.ndim != 1:
        raise TypeError(
            f"{column.place} must hold one number or category in each row, got cells "
            f"of shape {cells.shape[1:]}"
        )
    if kind in "fiub":
        return cells
    if kind in "mM":
        raise _refuse_dates(column, column.dtype)
    values = (np.strings.decode(cells, "utf-8") if kind == "S" else cells).tolist()
    return _sort_out_objects(column, values, [*map(is_gap, values)])


def _sort_out_objects(column, values, gaps):
    """Python objects are looked at one by one."""
    present = [value for value, gap in zip(values, gaps, strict=True) if not gap]
    kinds = {type(value) for value in present}
    if kinds and all(issubclass(kind, _NUMBERS) for kind in kinds):
        numbers = [np.nan if g else float(v) for v, g in zip(values, gaps, strict=True)]
        return np.array(numbers)
    if any(map(_is_date, kinds)):
        raise _refuse_dates(column, _names(kinds))
    if not all(issubclass(kind, str) for kind in kinds):
        raise TypeError(
            f"{column.place} must hold one kind of numbers or strings, got "
            f"{column.dtype} cells that are {_names(kinds)}"
        )
    return _label_objects(values, levels=None)


def _label_objects(values, levels):
    """Labels of a list of cells; missing ones are None or NaN."""
    found = [value for value in {*values} if not is_gap(value)]

    def replace(numbers):
        places: Any = _Places(zip(found, numbers, strict=True))
        return np.fromiter(map(places.__getitem__, values), np.float64, len(values))

    return _Labels(found, replace, levels)


class _Places(dict):
    """Numbers of values; NaN for any other value."""

    def __missing__(self, value):
        return np.nan


def _label_series(cells, levels):
    """The same, by operations of the data frame's library."""
    if cells.implementation.is_pyarrow() and levels is None:
        cells = cells.cast(nw.String)  # arrow's string views know few operations
    found = cells.unique()
    found = found.filter(~found.is_null()).to_list()

    def replace(numbers):
        if not found:
            return np.full(len(cells), np.nan)
        return cells.replace_strict(found, numbers, return_dtype=nw.Float64).to_numpy()

    return _Labels(found, replace, levels)


def _is_date(kind):
    """Whether it is a type of dates, times or durations."""
    pandas: Any = sys.modules.get("pandas")
    return issubclass(kind, _DATES if pandas is None else (*_DATES, pandas.Period))


def _list_levels(cells):
    """The categories that a dtype declares."""
    try:
        return cells.cat.get_categories().to_list()
    except AttributeError:  # of pandas' columns of arrow dictionaries
        return []


def _find_unused(levels, values):
    """Sorted, the levels of a dtype that do not occur and are of the same kind."""
    levels = levels() if levels else []
    if not levels or len(levels) > _MOST_LEVELS:
        return []
    levels = [v.item() if isinstance(v, np.generic) else v for v in levels]
    kind = type((values or levels)[0])
    if kind not in _KINDS or not all(type(level) is kind for level in levels):
        return []
    return sorted({*levels} - {*values})


def _check_values(distinct, column) -> list[Any]:
    """Values as Python's, all of one kind."""
    values = [v.item() if isinstance(v, np.generic) else v for v in distinct]
    kinds = {type(value) for value in values}
    if any(map(_is_date, kinds)):
        raise _refuse_dates(column, _names(kinds))
    if len(kinds) > 1 or not kinds <= {*_KINDS}:
        raise TypeError(
            f"{column.place} must hold categories of one kind, strings, numbers or "
            f"booleans, got {_names(kinds)}; make them strings first"
        )
    return values


def _refuse_dates(column, got):
    return TypeError(
        f"{column.place} must hold numbers or categories, got dates or times ({got}); "
        "put what matters of them into columns of their own: the year, the month, the "
        "day of the week, the hour, or the days (seconds) since an event"
    )


def _names(kinds):
    return " and ".join(sorted(kind.__name__ for kind in kinds))
