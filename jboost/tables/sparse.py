# SPDX-License-Identifier: Apache-2.0
"""Reads sparse matrices of ``scipy.sparse`` and ``jax.experimental.sparse``.

This module does not import these packages: a caller who has such a matrix has already
imported its package.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jboost.entry.messages import show
from jboost.tables.columns import WideColumn

Absent = Literal["missing", "zero"]
ABSENT = ("missing", "zero")


class SparseMatrix(NamedTuple):
    """Holds the stored entries of a matrix, sorted by column (CSC) or by row (CSR).

    Attributes:
      starts: index of the first entry of each column (row), then E: [F + 1].
      places: row (column) index of each entry, ascending within a column (row): [E].
      values: float32; NaN is missing, a stored 0 is the value 0: [E].
      shape: (N, F).
    """

    starts: np.ndarray
    places: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]

    @property
    def num_entries(self) -> int:
        """The number of stored entries, E."""
        return self.values.shape[0]

    def to_dense(self, absent: Absent | None) -> np.ndarray:
        """Returns the matrix of entries sorted by column, [N, F]."""
        fill = np.nan if absent == "missing" else 0
        dense = np.full(self.shape, fill, np.float32)
        columns = np.repeat(np.arange(self.shape[1]), np.diff(self.starts))
        dense[self.places, columns] = self.values
        return dense


def check_absent(absent: Any) -> None:
    """Checks that ``absent`` is "missing", "zero" or None."""
    if absent is not None and not (isinstance(absent, str) and absent in ABSENT):
        raise ValueError(f"absent must be one of {ABSENT} or None, got {show(absent)}")


def check_gaps(absent: Absent | None, matrix: SparseMatrix, name: str) -> None:
    """Raises ValueError if it is unknown how to read entries that are not stored.

    Args:
      absent: ``absent`` of the model or the bins; None if training had dense rows
        without missing values and did not specify it.
    """
    num_cells = matrix.shape[0] * matrix.shape[1]
    if absent is None and matrix.num_entries < num_cells:
        raise ValueError(
            f"absent must be 'zero' or 'missing' if {name} is sparse and x was dense "
            f"without missing values in training, got None: {name} stores "
            f"{matrix.num_entries} of {num_cells} entries, and the others may be zero "
            "or missing; pass absent in training, or use "
            "dataclasses.replace(model, absent='zero') or "
            "dataclasses.replace(model, absent='missing')"
        )


def is_sparse(x: Any) -> bool:
    """Checks whether ``x`` is a sparse matrix of a supported type."""
    if isinstance(x, SparseMatrix) or _is_scipy(x):
        return True
    kinds = sys.modules.get("jax.experimental.sparse")
    return kinds is not None and isinstance(x, kinds.JAXSparse)


def read_columns(x: Any, name: str) -> SparseMatrix:
    """Returns the stored entries sorted by column; see :func:`read_rows`."""
    if isinstance(x, SparseMatrix):
        return x
    return _as_float32(sort_entries(x, name, by_column=True))


def check_shape(shape: tuple[int, ...], name: str, least_rows: int = 1) -> None:
    """Raises ValueError if a table has no columns or too few rows."""
    if shape[0] < least_rows or shape[1] == 0:
        rows = (
            "at least one row and one column" if least_rows else "at least one column"
        )
        raise ValueError(f"{name} must have {rows}, got shape {tuple(shape)}")


def read_rows(
    x: Any,
    name: str,
    least_rows: int = 1,
    wide: Mapping[int, WideColumn] | None = None,
) -> SparseMatrix:
    """Returns the stored entries sorted by row, in float32, with duplicates summed.

    Args:
      least_rows: 0 if a matrix without rows is allowed.
      wide: columns to convert while they still are float64, by index.
    """
    if isinstance(x, SparseMatrix):
        row = np.argsort(x.places, kind="stable")
        columns = np.repeat(np.arange(x.shape[1], dtype=np.int32), np.diff(x.starts))
        starts = _count_starts(x.places, x.shape[0])
        return SparseMatrix(starts, columns[row], x.values[row], x.shape)
    entries = sort_entries(x, name, by_column=False, least_rows=least_rows)
    found = _as_float32(entries)
    if wide:
        found = found._replace(values=found.values.copy())
    for index, column in (wide or {}).items():
        cells = entries.places == index
        found.values[cells] = column.convert(entries.values[cells])
    return found


def sort_entries(
    x: Any, name: str, *, by_column: bool, least_rows: int = 1
) -> SparseMatrix:
    """Returns the stored entries sorted by column or row, in the dtype of ``x``."""
    if len(x.shape) != 2:
        raise ValueError(f"{name} must be 2-D [rows, features], got {x.shape=}")
    check_shape(x.shape, name, least_rows)
    kind = np.dtype(x.dtype).kind if str(x.dtype) != "bfloat16" else "f"
    if kind not in "fiub":
        raise TypeError(
            f"{name} must hold numbers (NaN for missing), got a sparse matrix of dtype "
            f"{x.dtype}"
        )
    if _is_scipy(x):
        found = _sort_scipy(x, name, by_column)
    else:
        found = _sort_jax(x, name, by_column)
    if max(found.num_entries, *found.shape) >= 2**31 - 1:
        raise ValueError(
            f"{name} must have fewer than 2^31 stored entries, rows and columns, got "
            f"{found.num_entries} entries, {x.shape=}"
        )
    return found


def _as_float32(found):
    with np.errstate(over="ignore"):  # overflow becomes +-inf, a valid value
        values = found.values.astype(np.float32, copy=False)
    starts, places = (a.astype(np.int32, copy=False) for a in found[:2])
    return SparseMatrix(starts, places, values, found.shape)


def _is_scipy(x):
    scipy = sys.modules.get("scipy.sparse")
    return scipy is not None and scipy.issparse(x)


def _sort_scipy(x, name, by_column):
    _check_scipy(x, name)  # SciPy's conversions follow any indices
    try:
        found = x.tocsc() if by_column else x.tocsr()
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"{name} must be a valid sparse matrix: {error}") from None
    if found.format != x.format:
        _check_scipy(found, name)
    if not found.has_canonical_format:
        found = found.copy()  # sum_duplicates works in place
        found.sum_duplicates()
    end = found.indptr[-1]  # the arrays may be longer
    return SparseMatrix(
        found.indptr, found.indices[:end], found.data[:end], tuple(x.shape)
    )


def _check_scipy(x, name):
    """Checks the indices, because SciPy does not when a matrix is made."""
    if x.format == "coo":
        good = all(map(_are_inside, x.coords, x.shape))
        good &= all(len(axis) == len(x.data) for axis in x.coords)
    elif x.format in ("csr", "csc", "bsr"):
        sizes = x.shape if x.format != "csc" else x.shape[::-1]
        if x.format == "bsr":
            sizes = [n // part for n, part in zip(sizes, x.blocksize, strict=True)]
        starts, places = x.indptr, x.indices
        good = len(starts) == sizes[0] + 1 and starts[0] == 0
        good = good and bool(np.all(starts[1:] >= starts[:-1]))
        good = good and starts[-1] <= min(len(places), len(x.data))
        good = good and _are_inside(places[: starts[-1]], sizes[1])
    else:
        return
    if not good:
        raise ValueError(
            f"{name} must be a valid sparse matrix, got indices that lead out of its "
            f"shape {tuple(x.shape)}, or starts of rows or columns that do not ascend"
        )


def _are_inside(places, size):
    return not len(places) or bool(places.min() >= 0 and places.max() < size)


def _sort_jax(x, name, by_column):
    """Returns the entries of BCOO or BCSR; indices out of bounds are padding."""
    kinds = sys.modules["jax.experimental.sparse"]
    if not isinstance(x, kinds.BCOO | kinds.BCSR) or x.n_batch or x.n_dense:
        raise TypeError(
            f"{name} must be a scipy.sparse matrix, or a BCOO or BCSR matrix without "
            f"batch or dense dimensions, got {show(x)}"
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
        raise TypeError(
            f"{name} must not be traced if it is sparse, because its entries are "
            "sorted on the host; inside jit, vmap or grad use the codes from "
            f"apply_bins, or a dense matrix ({name}.todense())"
        )
    values, places = np.asarray(x.data), np.asarray(x.indices)
    if isinstance(x, kinds.BCSR):
        starts = np.asarray(x.indptr, np.int64)
        rows = np.repeat(np.arange(x.shape[0]), np.diff(starts))
        values, columns = values[: len(rows)], places[: len(rows)]
    else:
        rows, columns = places[:, 0], places[:, 1]
    inside = (rows >= 0) & (rows < x.shape[0])
    inside &= (columns >= 0) & (columns < x.shape[1])
    major, minor = (columns, rows) if by_column else (rows, columns)
    return _sort_triples(
        major[inside], minor[inside], values[inside], tuple(x.shape), by_column
    )


def _sort_triples(major, minor, values, shape, by_column):
    """Sorts entries by two indices and sums entries with equal indices."""
    order = np.lexsort((minor, major))
    major, minor, values = major[order], minor[order], values[order]
    new = np.ones(len(order), bool)
    new[1:] = (major[1:] != major[:-1]) | (minor[1:] != minor[:-1])
    if not new.all():
        values = np.add.reduceat(values, np.flatnonzero(new))
        major, minor = major[new], minor[new]
    starts = _count_starts(major, shape[1 if by_column else 0])
    return SparseMatrix(starts, minor, values, shape)


def _count_starts(major, size):
    counts = np.bincount(major, minlength=size)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
