# SPDX-License-Identifier: Apache-2.0
"""Groups of rows for losses, such as queries; before them, properties of raw tables.

Ids of rows, in any order, become :class:`RowGroups`: tables of row numbers, [groups,
rows], in a few widths. A loss is evaluated on all groups of a table at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int32, Shaped

from jboost.entry.checks import fill_mask
from jboost.entry.messages import show
from jboost.numerics.arrays import number_ids, padded_size, read_ids
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


MOST_CHECKED = 256  # rows of the group that a loss is checked with
_MOST_WIDTHS = 8  # tables; each is compiled
_MOST_SIZES = 64  # group sizes, for losses that take no padding
_TABLE_COST = 1 << 14  # places that cost less than the compilation of another table
_NO_WEIGHTS = "unless the loss takes weights, loss(scores, targets, *, where, weights)"
# Not 28: its rest beyond a multiple of 8 takes XLA longer than the 4 rows up to 32.
_SMALL_WIDTHS = (*range(1, 9), *range(10, 17, 2), 20, 24, *range(32, 65, 8))

Kind = Literal["ids", "all", "random"]


class GroupTable(NamedTuple):
    """Groups of at most G rows.

    Attributes:
      rows: row numbers; a group with fewer rows repeats its first row.
      size: the number of rows of each group; 0 for padding.
      number: the index of each group, from 0 to the number of groups - 1.
    """

    rows: Int32[Array, "n G"]
    size: Int32[Array, " n"]
    number: Int32[Array, " n"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("tables", "slot", "number", "weights"),
    meta_fields=("kind", "width", "num_groups", "padded"),
)
@dataclass(frozen=True)
class RowGroups:
    """The division of N rows into groups; see :func:`make_groups`.

    Attributes:
      tables: the tables of the groups, for the kind "ids".
      slot: the position of each row in the flattened tables, one after another; -1 if
        it is in none.
      number: the group of each row.
      weights: row weights for a loss that takes them itself, else None.
      kind: "ids"; "all": all rows are one group; or "random": groups of ``width`` rows,
        new ones in each round.
      num_groups: the number of groups of the kind "ids", without padding.
      padded: whether a group has fewer rows than its table is wide.
    """

    tables: tuple[GroupTable, ...]
    slot: Int32[Array, " N"] | None
    number: Int32[Array, " N"] | None
    weights: Float[Array, " N"] | None
    kind: Kind
    width: int
    num_groups: int
    padded: bool = False

    def __repr__(self) -> str:
        if self.kind == "all":
            return "RowGroups(all rows)"
        if self.kind == "random":
            return f"RowGroups(random groups of {self.width} rows)"
        widths = [table.rows.shape[1] for table in self.tables]
        return f"RowGroups({self.num_groups} groups, tables of {widths} rows)"


def random_groups(size: int) -> RowGroups:
    """Returns groups of ``size`` random rows, others in each round.

    They serve losses of pairs, contrasts or distributions of rows (contrastive losses,
    AUC, MMD): on all rows, the cost would grow with the square of their number. The
    last group has the remaining rows; ``size`` must divide the number of rows if the
    loss does not take ``where``. Losses are reported on the groups of the first round.

    Example:
      >>> import jboost as jb
      >>> jb.random_groups(256)
      RowGroups(random groups of 256 rows)
    """
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 2:
        raise ValueError(f"size must be an integer >= 2, got {show(size)}")
    return RowGroups((), None, None, None, "random", int(size), 0)


def make_groups(ids: Any, *, padded: bool = True) -> Any:
    """Returns the groups that rows of equal ids form, for :func:`jboost.boost`.

    Args:
      ids: N ids of any kind (numbers, strings), in any order; or "all", for one group
        of all rows.
      padded: whether a table may hold groups of different sizes; False for losses that
        do not take ``where``, where groups may have at most 64 different sizes.

    Raises:
      TypeError, ValueError: ids are missing, or not one for each row.

    Example:
      >>> import jboost as jb
      >>> jb.make_groups([7, 7, 3, 7, 3])
      RowGroups(2 groups, tables of [3] rows)
    """
    if isinstance(ids, RowGroups):
        return ids
    if isinstance(ids, str):
        if ids != "all":
            raise ValueError(
                f"groups must be an id for each row, 'all' or jb.random_groups(n), got "
                f"{show(ids)}"
            )
        return RowGroups((), None, None, None, "all", 0, 1)
    number: Any
    number, names = number_ids(read_ids(ids))
    count = len(names)
    sizes = np.bincount(number, minlength=count)
    widths = _choose_widths(sizes) if padded else _list_sizes(sizes)
    order = np.argsort(number, kind="stable")
    first = np.cumsum(sizes) - sizes
    slot: Any = np.full(len(number), -1, np.int32)
    tables, start = [], 0
    for least, width in zip((0, *widths), widths, strict=False):
        chosen = np.flatnonzero((sizes > least) & (sizes <= width))
        total = padded_size(len(chosen), least=1) if padded else len(chosen)
        table: Any = np.zeros((total, width), np.int32)
        size: Any = np.zeros(total, np.int32)
        named: Any = np.zeros(total, np.int32)
        column = np.arange(width)
        size[: len(chosen)], named[: len(chosen)] = sizes[chosen], chosen
        # Places beyond the rows of a group repeat its first row.
        inside = column[None] < sizes[chosen][:, None]
        at = first[chosen][:, None] + np.where(inside, column[None], 0)
        table[: len(chosen)] = order[at]
        flat = start + np.arange(len(chosen) * width).reshape(len(chosen), width)
        slot[table[: len(chosen)][inside]] = flat[inside]
        tables.append(GroupTable(table, size, named))
        start += total * width
    return RowGroups(
        tuple(tables), slot, number.astype(np.int32), None, "ids", 0, count,
        padded=not set(sizes.tolist()) <= set(widths),
    )  # fmt: skip


def take_first_group(number: np.ndarray) -> np.ndarray:
    """Returns rows of the first group of several rows, at most 256."""
    sizes = np.bincount(number)
    usable = np.flatnonzero((sizes > 1) & (sizes <= MOST_CHECKED))
    chosen = usable[0] if len(usable) else 0
    return np.flatnonzero(number == chosen)[:MOST_CHECKED]


def check_full_groups(groups: RowGroups, num_rows: int, name: str) -> None:
    """Raises if a group is padded, for losses that take no mask."""
    reason = "because the loss does not take where, which marks the real rows"
    if groups.padded:
        raise ValueError(
            f"{name} must be ids, or jb.make_groups(ids, padded=False), {reason}, got "
            "tables that hold groups of different sizes"
        )
    if groups.kind == "random" and num_rows % groups.width:
        raise ValueError(
            f"{name} must be random groups whose size divides the {num_rows} rows, "
            f"{reason}, got a size of {groups.width}"
        )


def check_group_weights(
    groups: RowGroups, weights: Any, name: str, reason: str = _NO_WEIGHTS
) -> None:
    """Raises for weights that differ within a group; rows of weight 0 are left out."""
    if isinstance(weights, Tracer):
        return
    weights = np.asarray(weights)
    if groups.number is None or groups.kind != "ids":
        number, count = np.zeros(len(weights), np.int32), 1
    else:
        number, count = np.asarray(groups.number)[: len(weights)], groups.num_groups
    inside = weights > 0
    least, most = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(least, number[inside], weights[inside])
    np.maximum.at(most, number[inside], weights[inside])
    bad = np.flatnonzero(most > least)
    if len(bad):
        row = int(np.flatnonzero(inside & (number == bad[0]))[0])
        raise ValueError(
            f"{name} must be the same in all rows of a group {reason}, got "
            f"{least[bad[0]]:g} and {most[bad[0]]:g} in the group of row {row}"
        )


def _list_sizes(sizes):
    """Returns the different sizes, for tables without padding."""
    found = np.unique(sizes)
    if len(found) > _MOST_SIZES:
        raise ValueError(
            f"groups must have at most {_MOST_SIZES} different sizes where the loss "
            f"does not take where, got {len(found)}; write loss(scores, targets, *, "
            "where), where marks the real rows of a padded group"
        )
    return found.tolist()


def _choose_widths(sizes: np.ndarray) -> Sequence[int]:
    """Returns the widths, at most 8, of tables with few places in all.

    From few candidates, so that other groups of similar sizes share programs.
    """
    ordered = np.sort(sizes)
    candidates = [*_SMALL_WIDTHS]
    while candidates[-1] < ordered[-1]:
        candidates.append(padded_size(candidates[-1] + 1))
    counts = np.searchsorted(ordered, candidates, side="right").tolist()
    last = int(np.searchsorted(candidates, ordered[-1]))
    # best[j]: cost and widths for the groups of at most candidates[j] rows.
    pairs = list(zip(candidates, counts, strict=True))[: last + 1]
    best = [
        (width * count + _TABLE_COST, (width,)) if count else (0, ())
        for width, count in pairs
    ]
    for _ in range(_MOST_WIDTHS - 1):
        best = [
            min([best[j], *_add_width(best[:j], pairs[: j + 1])])
            for j in range(len(pairs))
        ]
    return best[last][1]


def _add_width(best, pairs):
    """Returns cost and widths after one more width, the last one, for each start."""
    width, count = pairs[-1]
    return [
        (cost + width * (count - below) + _TABLE_COST, (*widths, width))
        for (cost, widths), (_, below) in zip(best, pairs, strict=False)
        if below < count
    ]
