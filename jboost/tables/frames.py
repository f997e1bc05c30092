# SPDX-License-Identifier: Apache-2.0
"""Reads tables of any supported type into a float32 matrix.

Tables are NumPy or JAX arrays, sparse matrices, data frames of every library that
narwhals supports (pandas, polars, pyarrow and others), and NumPy structured arrays.
Only this folder knows about data frames.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.entry.checks import as_array, fill_mask, refuse_mask
from jboost.entry.labels import check_labels, read_labels
from jboost.entry.messages import show
from jboost.tables.columns import Column, Values, WideColumn, read_cells, read_numbers
from jboost.tables.sparse import check_shape, is_sparse, read_columns

_BLOCK_ROWS = 4096  # rows filled at a time, so that they stay in the CPU cache


class Schema(NamedTuple):
    """Holds the names and categories of the columns in training.

    Attributes:
      names: names of all F columns, if known.
      categories: the values of each categorical column, None for a numeric column;
        None instead of the tuple if all columns are numeric.
      compared: False where it is not known whether columns have names, as for Bins.
      wide: columns to convert while they still are float64, by index.
    """

    names: tuple[str, ...] | None = None
    categories: tuple[Values | None, ...] | None = None
    compared: bool = True
    wide: Mapping[int, WideColumn] | None = None


class RowSource:
    """Rows that come in batches: the interface of the result of :func:`jboost.stream`.

    Stages that need such rows call these methods, and do not import streams.

    Attributes:
      source: a function that returns a new iterator over the batches.
      has_bins: whether thresholds were given.
    """

    source: Callable[[], Iterator[Any]]
    has_bins: bool

    def batches(
        self, schema: Schema, *, categorical: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields the rows to predict: x [n, F], and offset [n] or [n, K] or None."""
        raise NotImplementedError

    def prepare_training(self, request: Any) -> Any:
        """Prepares the rows for training.

        Args:
          request: a :class:`jboost.training.request.FitRequest`.

        Returns:
          :class:`jboost.training.preparing.TrainingRows`.
        """
        raise NotImplementedError


class SourceError(RuntimeError):
    """The rows of a source could not be read while training."""


class Frame(NamedTuple):
    """Holds a table as numbers.

    Attributes:
      matrix: float32 [N, F], NaN for missing cells: a JAX array if x is one, a
        :class:`jboost.tables.sparse.SparseMatrix` if x is sparse, otherwise a NumPy
        array.
      names: names of the columns; None for a matrix, and for the labels 0, 1, 2, ...
      categories: the values that the cells 0, 1, 2, ... of each categorical column
        represent, None for a numeric column; None instead of the tuple if all are
        numeric.
      doubts: a warning for each column of strings that may not be meant as categories,
        None for other columns; empty without warnings. The caller issues the warning
        for columns that the user did not declare categorical.
    """

    matrix: Any
    names: tuple[str, ...] | None = None
    categories: tuple[Values | None, ...] | None = None
    doubts: tuple[str | None, ...] = ()

    @property
    def schema(self) -> Schema:
        """The names and categories that later tables must match."""
        return Schema(self.names, self.categories)


def read_frame(
    x: Any,
    name: str,
    *,
    schema: Schema | None = None,
    sparse: bool = False,
    categorical: bool = False,
    extend: bool = False,
    least_rows: int = 1,
) -> Frame:
    """Checks that ``x`` is a table of numbers and categories, and reads it.

    A contiguous float32 matrix is not copied. Masked cells are missing. In data frames,
    nullable and decimal numbers become floats, booleans 0 and 1, and nulls NaN. Columns
    of strings or of a categorical dtype become categories: the sorted values that
    occur, then the other levels of the dtype. Dates, durations, nested and mixed cells
    are rejected.

    Args:
      x: the table; may be traced if it is a matrix.
      schema: the columns of training, or None in training. Names must be the same, in
        the same order. Categories become their indices in training.
      extend: whether categories that training did not see get the next indices;
        otherwise they become NaN.
      sparse, categorical: whether the caller supports sparse matrices, and categories.
      least_rows: 0 if a table without rows is allowed.

    Raises:
      TypeError, ValueError: ``x`` is not such a table; the message names the column.
    """
    refuse_batches(x, name)
    x = fill_mask(x)
    if is_sparse(x):
        if sparse:
            return Frame(read_columns(x, name))
        raise TypeError(
            f"{name} must be a dense matrix here, got a sparse one, "
            f"{type(x).__name__}; fit, fit_bins, apply_bins, predict, staged_predict, "
            "leaf_indices, shap_values and shap_interactions take sparse ones"
        )
    wide = (schema.wide if schema is not None else None) or {}
    simple = schema is not None and schema.categories is None and not wide
    if schema is not None and simple and _holds_few_numbers(x):
        labels = _read_labels(x.columns.tolist(), schema, name)
        check_shape(x.shape, name, least_rows)
        with np.errstate(over="ignore"):  # overflow becomes +-inf, a valid value
            return Frame(x.to_numpy(np.float32), labels.kept)
    table = find_columns(x, name, least_rows)
    if table is None:
        return Frame(_read_matrix(x, name, least_rows, wide))
    labels = _read_labels(table, schema, name)
    known: tuple[Values | None, ...] = (None,) * len(table)
    if schema is not None:
        # The caller checks the number of columns, with a message of its own.
        known = (*(schema.categories or ()), *known)[: len(table)]
    cells, categories, doubts = [], [], []
    pairs = zip(table.items(), known, strict=True)
    for index, ((label, column), values) in enumerate(pairs):
        column = Column(f"column {label!r} of {name}", column)
        held, values, doubt = read_cells(
            column, values, new=schema is None, extend=extend
        )
        if values is not None and not categorical:
            raise TypeError(
                f"{column.label} must hold numbers here, got categories "
                f"({column.dtype}); encode them as numbers first"
            )
        cells.append(wide[index].convert(held) if index in wide else held)
        categories.append(values)
        doubts.append(doubt)
    some = any(values is not None for values in categories)
    categories = tuple(categories) if some else None
    doubts = tuple(doubts) if any(doubts) else ()
    return Frame(_fill_matrix(cells), labels.kept, categories, doubts)


def refuse_batches(x: Any, name: str) -> None:
    """Raises TypeError for streams and their sources, which few functions accept."""
    if isinstance(x, RowSource):
        raise TypeError(
            f"{name} must be in memory here, got a stream; only jboost.fit and "
            "jboost.predict accept streams; call this function with one batch, "
            "x, *_ = next(stream.source())"
        )
    if callable(x):
        raise TypeError(
            f"{name} must be a table of numbers, got a callable, {type(x).__name__}; "
            "if it is a source of batches, pass jb.stream(source, memory=...)"
        )


def read_values(values: Any, name: str) -> Any:
    """Reads targets, weights or offsets: one or more numbers per row.

    A series or a data frame with one column becomes [N], one with K columns [N, K].
    Nulls become NaN; the index of a data frame is ignored. Masked values are refused.
    JAX arrays are returned unchanged; all other types become NumPy arrays.
    """
    if isinstance(values, jax.Array):
        return values
    values = refuse_mask(values, name)
    if not isinstance(values, np.ndarray):
        series = _find_series(values, name)
        if series is not None:
            return read_numbers(Column(name, series))
    table = find_columns(values, name)
    if table is not None:
        columns = [
            read_numbers(Column(f"column {show(label)} of {name}", column))
            for label, column in table.items()
        ]
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    array = as_array(values, f"{name} must hold numbers")
    if array.dtype.kind == "O" and array.ndim == 1:
        return read_numbers(Column(name, array))
    if not _holds_numbers(array):
        raise TypeError(f"{name} must hold numbers, got dtype {array.dtype}")
    return array


def find_columns(x: Any, name: str, least_rows: int = 1) -> dict[Any, Any] | None:
    """Returns columns by label of a data frame or structured array; None for others."""
    if isinstance(x, np.ndarray):
        if x.dtype.names is None:
            return None
        if x.ndim != 1:
            raise ValueError(
                f"{name} must be 1-D where it is a structured array, got {x.shape=}"
            )
        shape = len(x), len(x.dtype)
        columns = {n: fill_mask(x[n]) for n in x.dtype.names}
    elif isinstance(x, jax.Array):
        return None
    else:
        frame = find_frame(x, name)
        if frame is None:
            return None
        pairs = zip(frame.columns, frame.iter_columns(), strict=True)
        shape, columns = frame.shape, dict(pairs)
    check_shape(shape, name, least_rows)
    return columns


def _find_series(values, name):
    """Returns the values as a narwhals series, or None if they are not a series."""
    import narwhals.stable.v2 as nw  # takes long, and arrays do not need it

    arrow: Any = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(values, arrow.Array):
        values = arrow.chunked_array(values)
    try:
        series = nw.from_native(values, pass_through=True, allow_series=True)
    except nw.exceptions.DuplicateError as error:
        raise _refuse_duplicates(error, name) from None
    return series if isinstance(series, nw.Series) else None


def _holds_few_numbers(x):
    """Checks for a small frame of numbers, which pandas converts fastest as a whole."""
    pandas: Any = sys.modules.get("pandas")
    if pandas is None or type(x) is not pandas.DataFrame or len(x) > _BLOCK_ROWS:
        return False
    kinds = {each.kind if isinstance(each, np.dtype) else None for each in x.dtypes}
    return kinds <= {*"fiub"} and x.columns.is_unique


def find_frame(x: Any, name: str) -> Any:
    """Returns ``x`` as a narwhals data frame, or None if it is not a data frame."""
    import narwhals.stable.v2 as nw

    if hasattr(x, "__arrow_c_stream__") and hasattr(x, "column_names"):
        x = sys.modules["pyarrow"].table(x)  # accepts record batches, too
    try:
        frame = nw.from_native(x, pass_through=True)
    except nw.exceptions.DuplicateError as error:
        raise _refuse_duplicates(error, name) from None
    if isinstance(frame, nw.LazyFrame):
        raise TypeError(
            f"{name} must be in memory, got a {type(x).__name__}, which is lazy; "
            f"pass {name}.collect()"
        )
    return frame if isinstance(frame, nw.DataFrame) else None


def _refuse_duplicates(error, name):
    found = " ".join(str(error).split())
    return ValueError(f"{name} must have unique column names: {found}")


def _read_labels(labels, schema, name):
    """Returns the labels of a table, compared with those of training."""
    found = read_labels(labels, name)
    if schema is not None and schema.compared:
        check_labels(found, schema.names, name)
    return found


def _read_matrix(x, name, least_rows, wide):
    """Returns a matrix in float32; a JAX array stays on its device."""
    if isinstance(x, jax.Array) and not wide:  # includes tracers
        matrix = x
    else:
        matrix = read_objects(as_array(x, f"{name} must be a matrix of numbers"), name)
    if not _holds_numbers(matrix):
        raise TypeError(
            f"{name} must hold numbers (NaN for missing), got dtype {matrix.dtype}; "
            "encode strings and objects as numbers first, or pass a data frame"
        )
    if matrix.ndim != 2:
        way = "values.reshape(-1, 1)" if hasattr(x, "reshape") else "table[['column']]"
        hint = f"; pass one column as {way}" if matrix.ndim == 1 else ""
        raise ValueError(
            f"{name} must be 2-D [rows, features], got {type(x).__name__} of shape "
            f"{matrix.shape}{hint}"
        )
    check_shape(matrix.shape, name, least_rows)
    with np.errstate(over="ignore"):  # overflow becomes +-inf, a valid value
        if not isinstance(matrix, np.ndarray):
            return matrix.astype(np.float32)
        rounded = matrix.astype(np.float32, order="C", copy=bool(wide))
    for index in wide.keys() & {*range(matrix.shape[1])}:
        rounded[:, index] = wide[index].convert(matrix[:, index])
    return rounded


def read_objects(array: np.ndarray, name: str) -> np.ndarray:
    """Converts a matrix of Python numbers to floats; None and NaN mean missing.

    Arrays of other dtypes or dimensions are returned unchanged.
    """
    if array.dtype.kind != "O" or array.ndim != 2:
        return array
    cells = read_numbers(Column(name, array.ravel()))
    return cells.reshape(array.shape)


def _holds_numbers(array):
    return np.dtype(array.dtype).kind in "fiub" or str(array.dtype) == "bfloat16"


def _fill_matrix(columns):
    """Returns a float32 matrix of the columns, filled block by block."""
    matrix = np.empty((len(columns[0]), len(columns)), np.float32)
    with np.errstate(over="ignore"):  # overflow becomes +-inf, a valid value
        for first in range(0, len(matrix), _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            for feature, column in enumerate(columns):
                matrix[rows, feature] = column[rows]
    return matrix


def check_offset(
    offset: Any, num_rows: int, num_scores: int, name: str = "offset"
) -> Array | np.ndarray:
    """Returns an offset [N], or [N, K] for K > 1, as float32 scores [K, N]."""
    shape = (num_rows,) if num_scores == 1 else (num_rows, num_scores)
    array = read_values(offset, name)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    given, array = array, narrow_floats(array)
    check_finite(array, None, name, given)
    return array[None, :] if num_scores == 1 else array.T


def read_offset(
    offset: Any, num_rows: int, num_scores: int, name: str = "offset"
) -> Array | np.ndarray:
    """Returns :func:`check_offset` as [N, K].

    The result is a NumPy array unless traced, because operations of JAX would be
    compiled for each number of rows.
    """
    if isinstance(offset, jax.Array) and not isinstance(offset, Tracer):
        offset = np.asarray(offset)
    return check_offset(offset, num_rows, num_scores, name).T


def narrow_floats(array: Any) -> Any:
    """Returns float32; numbers too large for it become infinite, without a warning."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def check_finite(array: Any, weights: Any, name: str, given: Any) -> None:
    """Checks that numbers are finite in float32.

    Args:
      array: numbers in float32, or integers.
      weights: row weights; rows of weight 0 are not checked. None: all rows are.
      given: the numbers before they became float32.
    """
    if isinstance(array, Tracer) or not jnp.issubdtype(array.dtype, np.floating):
        return
    host = np.asarray(array)
    bad = ~np.isfinite(host).all(axis=tuple(range(1, host.ndim)))
    if weights is not None and not isinstance(weights, Tracer):
        bad &= np.asarray(weights) > 0
    if bad.any():
        row = np.flatnonzero(bad)[0]
        raise ValueError(
            f"{name} must be finite in every row of positive weight, got "
            f"{np.asarray(given)[row]} in row {row}"
        )
