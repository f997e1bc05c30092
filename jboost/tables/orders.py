# SPDX-License-Identifier: Apache-2.0
"""Looks at the columns of a table that has been checked, before they become float32.

In: a table of any supported type. Out: the levels of columns of an ordered dtype, the
first cells of numeric columns.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jboost.tables.columns import Column, list_levels, read_numbers
from jboost.tables.frames import find_columns
from jboost.tables.sparse import is_sparse


def list_orders(x: Any) -> dict[int, list[Any]]:
    """Maps the index of each column of an ordered dtype to its levels, in order."""
    table = None if is_sparse(x) else find_columns(x, "x")
    columns = [] if table is None else table.items()
    orders = {
        feature: _list_order(Column(f"column {label!r} of x", column))
        for feature, (label, column) in enumerate(columns)
    }
    return {f: levels for f, levels in orders.items() if levels is not None}


def first_rows(x: Any, num_rows: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields label and cells of each numeric column, before conversion to float32."""
    table = find_columns(x, "x")
    if table is None:
        yield from enumerate(np.asarray(x)[:num_rows].T)
        return
    for label, column in table.items():
        head: Any = Column(f"column {label!r} of x", column[:num_rows])
        numeric = (
            head.dtype.kind in "fiu"
            if isinstance(column, np.ndarray)
            else head.dtype.is_numeric()
        )
        if numeric:
            yield label, read_numbers(head)


def _list_order(column: Column) -> list[Any] | None:
    """Returns the levels of an ordered dtype in their order; None for other dtypes."""
    if isinstance(column.cells, np.ndarray):
        return None
    import narwhals.stable.v2 as nw  # takes long, and arrays do not need it

    arrow = getattr(column.cells.to_native(), "type", None)
    if isinstance(column.dtype, nw.Enum) or getattr(arrow, "ordered", False):
        levels = list_levels(column.cells)
        return [v.item() if isinstance(v, np.generic) else v for v in levels]
    return None
