# SPDX-License-Identifier: Apache-2.0
"""Answers questions about tables and columns before they become float32.

In: a table or a column of any supported type. Out: whether it is a table, the levels of
columns of an ordered dtype, the first cells of numeric columns, the first gap.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jboost.entry.arrays import fill_mask
from jboost.entry.representation import show
from jboost.tables.columns import Column, is_gap, list_levels, read_numbers
from jboost.tables.frames import find_columns, find_frame
from jboost.tables.sparse import is_sparse


def is_table(x: Any) -> bool:
    """Checks whether ``x`` is a data frame or a structured array."""
    if isinstance(x, np.ndarray):
        return x.dtype.names is not None
    return not is_sparse(x) and find_frame(x, "x") is not None


def list_orders(x: Any) -> dict[int, list[Any]]:
    """Maps the index of each column of an ordered dtype to its levels, in order."""
    table = None if is_sparse(x) else find_columns(x, "x")
    columns = [] if table is None else table.items()
    orders = {
        feature: _list_order(Column(f"column {show(label)} of x", column))
        for feature, (label, column) in enumerate(columns)
    }
    return {f: levels for f, levels in orders.items() if levels is not None}


def first_rows(x: Any, num_rows: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields label and cells of each numeric column, before conversion to float32."""
    table = find_columns(x, "x")
    if table is None:
        yield from enumerate(np.asarray(fill_mask(x))[:num_rows].T)
        return
    for label, column in table.items():
        head: Any = Column(f"column {show(label)} of x", column[:num_rows])
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


def find_gap(values: Shaped[np.ndarray, " N"]) -> int | None:
    """Returns the first row with None, NaN or NA; None if there is no such row."""
    if values.dtype.kind == "O":
        return next((row for row, v in enumerate(values.tolist()) if is_gap(v)), None)
    gaps = np.flatnonzero(values != values)
    return int(gaps[0]) if len(gaps) else None
