# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level on sorted rows: any value may be a threshold.

In: codes by feature, one for every distinct value; the rows in order of each feature;
weighted gradient and curvature per row. Out: a Tree in heap order, and each row's
leaf.

Each feature's order is kept grouped by node, and sorted by code within a node, so
that missing rows (code 0) come first. The groups lie at the same positions for every
feature, because they hold the same rows:

    positions   0 1 2 3 4 5 6 7 8 9
    level 0     [     node 0      ] rows out of the bag
    level 1     [ left ][  right  ] rows out of the bag

To split a node moves its rows to either side without changing their order: a running
sum and a scatter, no sort. The rows of a node that has stopped growing stay where
they are. A level costs O(F N), whatever the number of nodes. The CPU kernel (see
native/sorted.h) does the same, and gives the same bits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.codes.codes import DenseCodes
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose
from jboost.trees.levels import (
    column_fractions,
    count_sides,
    lookup,
    make_leaf,
    pair_children,
    pass_paths,
    route_rows,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.trees.limits import TreeLimits
from jboost.trees.native_growth import kernel_limits
from jboost.trees.rounding import make_rows
from jboost.trees.search_units import restore_bounds, to_search_units
from jboost.trees.sorted_splits import (
    MOST_CODES,
    RowMoves,
    SortedGroups,
    SortedLevel,
    find_sorted_splits,
)
from jboost.trees.tree import Tree


def grow_sorted_tree(
    codes: DenseCodes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"] | UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    mass: Int32[Array, " N"] | None = None,
    *,
    max_depth: int,
    max_nodes: int | None = None,
    max_leaves: int | None = None,
    uniform: bool = False,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the structure of one tree; its leaf values are zero.

    Without ``mass`` every distinct value of a node's rows is tried: Chen and Guestrin
    2016, algorithm 1. With it, candidates are proposed for each node from its own
    rows ("local", algorithm 2); see :func:`jboost.trees.candidates.find_bins`.

    Sums are those of :func:`jboost.parts.grow_tree`, integers, and so are gains and the
    rule for ties. A threshold is the code of the highest value on its left among the
    node's rows. So where each code is a bin of its own, both grow the same tree.

    Args:
      codes: with ``order``.
      gradient, curvature, in_bag: as for :func:`jboost.trees.growing.grow_levels`.
      seed: of column sampling and stochastic rounding.
      limits: numbers; may be traced. ``max_bins`` is that of each node.
      mass: what each row counts in a node's quantiles, from
        :func:`jboost.trees.candidates.measure`; None for every value.
      max_depth: number of levels of splits.
      max_nodes, max_leaves: as for :func:`jboost.parts.grow_tree`.
      uniform: all rows in the bag have the same curvature.

    Returns:
      The tree and the leaf of every row.
    """
    num_rows = codes.num_rows
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    most = 1 << (max(1, most) - 1).bit_length()
    sizes: Any = dict(
        max_depth=max_depth, slots=min(2 ** (max_depth - 1), most),
        max_leaves=max_leaves, uniform=uniform,
    )  # fmt: skip
    # A batch of trees is grown one by one: in lockstep their rows would be copied.
    grow = choose(
        cpu=sequential_vmap(partial(_grow_natively, **sizes)),
        xla=sequential_vmap(partial(_grow_plainly, **sizes)),
    )
    rows = (gradient, curvature, in_bag.astype(jnp.uint8))
    return grow(codes, *rows, seed, limits, mass)


def _grow_natively(
    codes, gradient, curvature, in_bag, seed, limits, mass, *, max_depth, slots,
    max_leaves, uniform,
):  # fmt: skip
    bins = mass
    if mass is not None:
        bins = mass, jnp.asarray(limits.max_bins, jnp.int32) - 1
    found = grow_cpu.grow_sorted_tree(
        (codes.columns, codes.order),
        (gradient, curvature, in_bag, seed, column_fractions(limits)),
        kernel_limits(limits._replace(num_features=None), codes.num_features),
        limits.values,
        limits.groups,
        bins,
        sizes=grow_cpu.SortedSizes(max_depth, max_leaves or 0, slots, int(uniform)),
    )
    nodes = found.feature, found.threshold, found.missing_left
    leaf_value = jnp.zeros(2**max_depth, jnp.float32)
    return Tree(*nodes, leaf_value=leaf_value, bounds=found.bounds), found.leaf


def _grow_plainly(
    codes, gradient, curvature, in_bag, seed, limits, mass, *, max_depth, slots,
    max_leaves, uniform,
):  # fmt: skip
    rows = make_rows(codes, gradient, curvature, in_bag, seed, uniform)
    given, given_unit = limits, rows.unit
    limits, unit = to_search_units(given, given_unit)
    rows = rows._replace(unit=unit)
    path = start_paths(limits, max_leaves, slots, max_depth)
    state = _make_root(codes.order, rows, max_depth, slots, path)

    def grows_on(carry):
        level, state = carry
        return (level < max_depth) & jnp.any(state.position >= 0)

    def grow_level(carry):
        level, state = carry
        order, split = find_sorted_splits(level, state, rows, seed, limits, mass)
        state = _split_nodes(level, state, order, split, rows, max_depth)
        return level + 1, state

    level, state = jax.lax.while_loop(grows_on, grow_level, (jnp.int32(0), state))
    bounds = restore_bounds(state.paths.leaf_bounds, given, given_unit)
    tree = state.tree._replace(bounds=bounds)
    # Where no node grew on, every row goes left down to its leaf.
    return tree, state.row_position << (max_depth - level)


def _make_root(order, rows, max_depth, slots, path):
    """Returns the first level: rows in the bag in slot 0, the others outside."""
    num_rows = order.shape[1]
    where = jnp.arange(num_rows, dtype=jnp.int32)
    nobody, size = jnp.zeros(num_rows, jnp.int32), rows.num_in_bag.astype(jnp.int32)
    inside = where < size
    second = jnp.broadcast_to(size, num_rows)
    moves = RowMoves(~rows.in_bag, jnp.zeros(num_rows, bool), nobody, second)
    first = jnp.zeros(slots, jnp.int32)
    groups = SortedGroups(jnp.where(inside, 0, slots), first, first.at[0].set(size))
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    tree = make_leaf(max_depth, MOST_CODES)
    return SortedLevel(order, moves, groups, position, nobody, nobody, tree, path)


def _split_nodes(level, state, order, split, rows, max_depth):
    """Records the splits, and determines which rows move."""
    slots, (slot, start, size) = state.position.shape[0], state.groups
    count = count_sides(rows.codes, split, state.row_slot, rows.in_bag)
    split, left_smaller = settle_splits(split, count, MOST_CODES)
    source, pair, position = pair_children(state.position, split, slots)
    moved = route_rows(
        rows.codes, split, pair, left_smaller, rows.in_bag, state.row_slot,
        state.row_position, slots=slots,
    )  # fmt: skip
    right = (moved.position & 1) == 1
    moving = rows.in_bag & right & (state.row_slot < slots)
    num_right = jnp.zeros(slots + 1, jnp.int32).at[state.row_slot]
    num_right = num_right.add(moving.astype(jnp.int32))[:slots]
    second = start + size - num_right
    moves = RowMoves(
        right=moving,
        stays=slot == slots,
        before=lookup(jnp.cumsum(num_right) - num_right, slot, 0),
        second=lookup(second, slot, 0),
    )
    here = jnp.arange(slot.shape[0], dtype=jnp.int32)
    child = 2 * lookup(pair, slot, slots) + (here >= moves.second).astype(jnp.int32)
    starts = jnp.stack([start[source], second[source]], axis=1).reshape(-1)[:slots]
    sizes = size[source] - num_right[source], num_right[source]
    sizes = jnp.stack(sizes, axis=1).reshape(-1)[:slots]
    used = position >= 0
    return SortedLevel(
        order=order,
        moves=moves,
        groups=SortedGroups(
            slot=jnp.minimum(child, slots),
            start=jnp.where(used, starts, 0),
            size=jnp.where(used, sizes, 0),
        ),
        position=position,
        row_slot=moved.slot,
        row_position=moved.position,
        tree=write_splits(level, state.position, state.tree, split),
        paths=pass_paths(
            state.paths, level, state.position, split, source, slots, max_depth
        ),
    )
