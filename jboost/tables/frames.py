# SPDX-License-Identifier: Apache-2.0
"""The door for tables: whatever has rows and columns becomes a matrix of floats.

In: arrays of NumPy or JAX, sparse matrices, data frames of every library that narwhals
knows (pandas, polars, pyarrow and others), structured arrays of NumPy. Out: a Frame:
the matrix, the names of its columns, and the categories that its cells stand for. No
other room knows what a data frame is.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import narwhals.stable.v2 as nw
import numpy as np

from jboost.tables.columns import Column, Values, list_order, read_cells, read_numbers
from jboost.tables.sparse import check_shape, is_sparse, read_columns

_BLOCK_ROWS = 4096  # are filled at a time, so that they stay in the cache


class Schema(NamedTuple):
    """What training knows of its columns.

    Attributes:
      names: of all F columns, where they are known.
      categories: of each column the values, None where it held numbers; None if all
        did.
    """

    names: tuple[str, ...] | None = None
    categories: tuple[Values | None, ...] | None = None


class RowSource:
    """Rows that come in batches; the base of what :func:`jboost.stream` returns.

    Attributes:
      source: returns a new iterator of batches.
    """

    source: Callable[[], Iterator[Any]]

    def batches(
        self, schema: Schema, *, categorical: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields the rows to predict: x [n, F] and its offset [n] or [n, K], or None.

        Args:
          schema: what the model knows of its columns.
          categorical: whether the model takes categories.
        """
        raise NotImplementedError


class Frame(NamedTuple):
    """A table as numbers.

    Attributes:
      matrix: [N, F] in float32, NaN where a cell is missing: a NumPy array, a JAX one
        where x was such, or a :class:`jboost.tables.sparse.SparseMatrix` where x was
        sparse.
      names: of the columns, if x has such.
      categories: of each column the values that its cells 0, 1, 2, ... stand for, None
        where cells are numbers; None if all are.
      doubts: of each column the warning that its strings may be no categories, for
        callers that train and know which columns the user declared categorical; empty
        if there is none.
    """

    matrix: Any
    names: tuple[str, ...] | None = None
    categories: tuple[Values | None, ...] | None = None
    doubts: tuple[str | None, ...] = ()

    @property
    def schema(self) -> Schema:
        """What later tables must be like."""
        return Schema(self.names, self.categories)


def read_frame(
    x: Any,
    name: str,
    *,
    schema: Schema | None = None,
    sparse: bool = False,
    categorical: bool = False,
    least_rows: int = 1,
) -> Frame:
    """Checks that ``x`` is a table of numbers and categories, and reads it.

    A float32 matrix without gaps is not copied. Of a data frame nullable and decimal
    numbers become floats, booleans 0 and 1, nulls NaN. Strings, and columns declared
    categorical, hold categories: the sorted values that occur, then the other levels of
    the dtype. Dates, durations, nested and mixed cells are refused.

    Args:
      x: the table; may be traced if it is a matrix.
      name: of the argument, for errors.
      schema: what training knows, None in training. Names must be the same in the same
        order; cells get the places that training gave to their values, NaN where it
        saw no such value.
      sparse: whether the caller can use a sparse matrix.
      categorical: whether the caller can use categories.
      least_rows: 0 where a table without rows is allowed.

    Raises:
      TypeError, ValueError: ``x`` is no such table; names the column.
    """
    refuse_batches(x, name)
    if is_sparse(x):
        if sparse:
            return Frame(read_columns(x, name))
        raise TypeError(
            f"{name} must be a dense matrix here, got a sparse one, "
            f"{type(x).__name__}; fit, fit_bins, apply_bins, predict, staged_predict, "
            "leaf_indices, shap_values and shap_interactions take sparse ones"
        )
    table = _find_columns(x, name, least_rows)
    if table is None:
        return Frame(_read_matrix(x, name, least_rows))
    names = _find_names(table, name)
    known: tuple[Values | None, ...] = (None,) * len(table)
    if schema is not None:
        _check_names(names, schema.names, name)
        # That there are too many or too few columns is for the caller to say.
        known = (*(schema.categories or ()), *known)[: len(table)]
    cells, categories, doubts = [], [], []
    for (label, column), values in zip(table.items(), known, strict=True):
        column = Column(f"column {label!r} of {name}", column)
        held, values, doubt = read_cells(column, values, new=schema is None)
        if values is not None and not categorical:
            raise TypeError(
                f"{column.place} must hold numbers here, got categories "
                f"({column.dtype}); encode them as numbers first"
            )
        cells.append(held)
        categories.append(values)
        doubts.append(doubt)
    some = any(values is not None for values in categories)
    categories = tuple(categories) if some else None
    doubts = tuple(doubts) if any(doubts) else ()
    return Frame(_fill_matrix(cells), names, categories, doubts)


def refuse_batches(x: Any, name: str) -> None:
    """Raises for streams and their sources, which few functions take."""
    if isinstance(x, RowSource):
        raise TypeError(
            f"{name} must hold its rows in memory here, got a stream; jboost.fit "
            "and jboost.predict take streams; call this function for a batch: x, *_ = "
            "next(stream.source())"
        )
    if callable(x):
        raise TypeError(
            f"{name} must be a table of numbers, got a callable, {type(x).__name__}; "
            "a source of batches becomes a stream by jb.stream(source, memory=...)"
        )


def read_values(values: Any, name: str) -> Any:
    """Numbers of whatever holds one or more in each row: targets, weights, offsets.

    A series or a frame of one column gives [N], a frame of K columns [N, K]; nulls are
    NaN, and rows are taken in their order, whatever their index. JAX arrays stay such,
    all else becomes NumPy's.

    Raises:
      TypeError: it holds no numbers.
    """
    if isinstance(values, jax.Array):
        return values
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(values, arrow.Array):
        values = arrow.chunked_array(values)
    series = nw.from_native(values, pass_through=True, allow_series=True)
    if isinstance(series, nw.Series):
        return read_numbers(Column(name, series))
    table = _find_columns(values, name)
    if table is not None:
        columns = [
            read_numbers(Column(f"column {label!r} of {name}", column))
            for label, column in table.items()
        ]
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold numbers: {error}") from None
    if array.dtype.kind == "O" and array.ndim == 1:
        return read_numbers(Column(name, array))
    if not _holds_numbers(array):
        raise TypeError(f"{name} must hold numbers, got dtype {array.dtype}")
    return array


def is_table(x: Any) -> bool:
    """Whether ``x`` is a data frame or a structured array: its columns differ."""
    if isinstance(x, np.ndarray):
        return x.dtype.names is not None
    return not is_sparse(x) and _find_frame(x, "x") is not None


def list_orders(x: Any) -> dict[int, list[Any]]:
    """Maps the place of each column of an ordered dtype to its levels, in order."""
    table = None if is_sparse(x) else _find_columns(x, "x")
    columns = [] if table is None else table.items()
    orders = {
        place: list_order(Column(f"column {label!r} of x", column))
        for place, (label, column) in enumerate(columns)
    }
    return {place: levels for place, levels in orders.items() if levels is not None}


def first_rows(x: Any, num_rows: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Label and cells of the columns of numbers, as they are before float32."""
    table = _find_columns(x, "x")
    if table is None:
        yield from enumerate(np.asarray(x)[:num_rows].T)
        return
    for label, column in table.items():
        head: Any = Column(f"column {label!r} of x", column[:num_rows])
        numeric = (
            head.dtype.kind in "fiu"
            if isinstance(column, np.ndarray)
            else (head.dtype.is_numeric())
        )
        if numeric:
            yield label, read_numbers(head)


def _find_columns(x, name, least_rows=1) -> dict[Any, Any] | None:
    """Columns by label, of a data frame or a structured array; None of a matrix."""
    if isinstance(x, np.ndarray):
        if x.dtype.names is None:
            return None
        if x.ndim != 1:
            raise ValueError(
                f"{name} must be 1-D where it is a structured array, got {x.shape=}"
            )
        shape, columns = (len(x), len(x.dtype)), {n: x[n] for n in x.dtype.names}
    elif isinstance(x, jax.Array):
        return None
    else:
        frame = _find_frame(x, name)
        if frame is None:
            return None
        pairs = zip(frame.columns, frame.iter_columns(), strict=True)
        shape, columns = frame.shape, dict(pairs)
    check_shape(shape, name, least_rows)
    return columns


def _find_frame(x, name) -> nw.DataFrame[Any] | None:
    """``x`` as a data frame of narwhals, if it is one of any kind."""
    if hasattr(x, "__arrow_c_stream__") and hasattr(x, "column_names"):
        x = sys.modules["pyarrow"].table(x)  # of a batch of records, too
    try:
        frame = nw.from_native(x, pass_through=True)
    except nw.exceptions.DuplicateError as error:
        found = " ".join(str(error).split())
        message = f"{name} must have columns of different names: {found}"
        raise ValueError(message) from None
    if isinstance(frame, nw.LazyFrame):
        raise TypeError(
            f"{name} must be in memory, got a {type(x).__name__}, which is lazy; "
            f"collect it first: {name}.collect()"
        )
    return frame if isinstance(frame, nw.DataFrame) else None


def _find_names(table, name):
    """Names if all labels are strings, None if no label is."""
    strings = [isinstance(label, str) for label in table]
    if any(strings) and not all(strings):
        raise TypeError(
            f"{name} must have columns that are all named by strings, or none of them, "
            f"got {[*table]}"
        )
    return tuple(table) if all(strings) else None


def _check_names(names, expected, name):
    """A table with names has those of training, in their order."""
    if names is None or expected is None or names == expected:
        return
    lacking = [label for label in expected if label not in names]
    unknown = [label for label in names if label not in expected]
    message = f"{name} must have the columns of training in the same order"
    if lacking:
        message += f", lacks {lacking}"
    if unknown:
        message += f", has {unknown} besides"
    if not lacking and not unknown:
        pairs = zip(names, expected, strict=True)
        got, wanted = next(pair for pair in pairs if pair[0] != pair[1])
        message += (
            f", expected {wanted!r}, got {got!r}; put them in order first: "
            f"{name}[list(model.feature_names)]"
        )
    raise ValueError(message)


def _read_matrix(x, name, least_rows):
    """A matrix in float32, where it lives."""
    if isinstance(x, jax.Array):  # a tracer is one, too
        matrix = x
    else:
        try:
            matrix = np.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a matrix of numbers: {error}") from None
    if not _holds_numbers(matrix):
        raise TypeError(
            f"{name} must hold numbers (NaN for missing), got dtype {matrix.dtype}; "
            "encode strings and objects as numbers first, or pass a data frame"
        )
    if matrix.ndim != 2:
        raise ValueError(f"{name} must be 2-D [rows, features], got {matrix.shape=}")
    check_shape(matrix.shape, name, least_rows)
    with np.errstate(over="ignore"):  # beyond float32 is +-inf, which is a value
        if isinstance(matrix, np.ndarray):
            return matrix.astype(np.float32, order="C", copy=False)
        return matrix.astype(np.float32)


def _holds_numbers(array):
    return np.dtype(array.dtype).kind in "fiub" or str(array.dtype) == "bfloat16"


def _fill_matrix(columns):
    """A float32 matrix of columns, some rows at a time."""
    matrix = np.empty((len(columns[0]), len(columns)), np.float32)
    with np.errstate(over="ignore"):  # beyond float32 is +-inf, which is a value
        for first in range(0, len(matrix), _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            for place, column in enumerate(columns):
                matrix[rows, place] = column[rows]
    return matrix
