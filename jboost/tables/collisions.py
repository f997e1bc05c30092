# SPDX-License-Identifier: Apache-2.0
"""Finds distinct values that become equal in float32.

In: tables, targets and offsets as the user passes them. Out: a warning that names the
first column with such values, because jboost computes in float32.
"""

from typing import Any

import numpy as np

from jboost.entry.representation import show
from jboost.entry.warning import warn_user
from jboost.tables.frames import read_values
from jboost.tables.orders import first_rows
from jboost.tables.sparse import is_sparse, sort_entries

_ROWS = 100_000  # rows per column that are checked
_SHARE = 0.01  # a column is reported if it loses more than this share of its values


def warn_of_collisions(x: Any) -> None:
    """Warns once if distinct values of a column become equal in float32."""
    count = _count_stored if is_sparse(x) else _count_columns
    for feature, dtype, num_rows, before, after in count(x):
        if _warn(f"column {show(feature)} of x", dtype, num_rows, before, after):
            return


def warn_of_rounding(values: Any, name: str) -> None:
    """Warns once if distinct targets or offsets become equal in float32.

    Args:
      values: one or more numbers per row, as the user passed them. JAX arrays are not
        checked: they usually are float32 already.
      name: name of the argument, for the message.
    """
    values = read_values(values, name)
    if not isinstance(values, np.ndarray):
        return
    head = values[:_ROWS]
    for column in head.reshape(len(head), -1).T if len(head) else ():
        if _warn(name, column.dtype, len(column), *_count_distinct(column)):
            return


def _warn(label, dtype, num_rows, before, after):
    """Warns if too many distinct values become equal; returns whether it warned."""
    if before - after <= _SHARE * before:
        return False
    warn_user(
        f"{label} has {before:.0f} distinct {dtype} values (in its first {num_rows} "
        f"rows) but {after:.0f} in float32, which jboost computes in; subtract a "
        "constant or rescale to keep them distinct"
    )
    return True


def _may_collide(dtype):
    return dtype.kind in "fiu" and dtype.itemsize >= 4 and dtype != np.float32


def _count_distinct(column):
    """Counts distinct values before and after rounding; (0, 0) if rounding is exact."""
    if _may_collide(column.dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = column.astype(np.float32)
            exact = np.array_equal(rounded.astype(column.dtype), column)
        if not exact:
            return len(np.unique(column)), len(np.unique(rounded))
    return 0, 0


def _count_columns(x):
    """Yields feature, dtype, rows checked, distinct values, and those in float32."""
    for feature, column in first_rows(x, _ROWS):
        yield feature, column.dtype, len(column), *_count_distinct(column)


def _count_stored(x):
    """Returns what :func:`_count_columns` yields, for entries of a sparse matrix."""
    if not _may_collide(np.dtype(x.dtype)):
        return ()
    stored = sort_entries(x, "x", by_column=True)
    sizes = np.diff(stored.starts)
    feature = np.repeat(np.arange(stored.shape[1]), sizes)
    order = np.lexsort((stored.values, feature))
    values, new = stored.values[order], feature[1:] != feature[:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float32)

    def count(values):
        first = np.append([True], new | (values[1:] != values[:-1]))
        return np.bincount(feature, first[: len(feature)], minlength=len(sizes))

    pairs = zip(sizes, count(values), count(rounded), strict=True)
    return ((feature, x.dtype, *pair) for feature, pair in enumerate(pairs))
