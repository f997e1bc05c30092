# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level on codes in plain XLA: the definition.

In: codes, weighted gradient and curvature of each row, limits. Out: a tree in heap
order and the leaf of each row. A level's histograms are those of the smaller child of
each split, and the parent's minus that.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8, UInt32

from jboost.codes.codes import Codes
from jboost.entry.collectives import current_shards, total
from jboost.numerics.sums import sum_by_group
from jboost.trees.histogram import sum_child_histogram, sum_plain_histogram
from jboost.trees.levels import (
    count_sides,
    find_splits,
    join_children,
    make_leaf,
    pair_children,
    pass_paths,
    route_rows,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.trees.limits import TreeLimits
from jboost.trees.paths import Paths
from jboost.trees.rounding import Measure, make_rows
from jboost.trees.search_units import restore_bounds, to_search_units
from jboost.trees.tree import Tree

_SHARED_LEVELS = 6


class _PlainState(NamedTuple):
    """What is carried from level to level; M slots hold the nodes still growing."""

    histogram: Int32[Array, "M F B C"]
    position: Int32[Array, " M"]  # of the slot's node on its level; -1: slot is empty
    row_slot: Int32[Array, " N"]  # M: the row's node has stopped growing
    row_position: Int32[Array, " N"]
    tree: Tree
    paths: Paths


def grow_plainly(
    codes: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    measure: Measure | None = None,
    *,
    max_depth: int,
    num_bins: int,
    most: int,
    max_leaves: int | None,
    uniform: bool,
    shared_levels: int = _SHARED_LEVELS,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the tree; see :func:`jboost.trees.growing.grow_levels`.

    Args:
      most: the most nodes of a level.
      shared_levels: at most so many levels share one compiled loop body.
    """
    rows = make_rows(codes, gradient, curvature, in_bag, seed, uniform, measure)
    given = limits
    limits, unit = to_search_units(given, rows.unit)

    def grow_level(level, state, slots):
        squares = None
        if limits.categories is not None:
            squares = _sum_squares(rows, state.row_slot, state.position.shape[0])
        split = find_splits(
            level, state.histogram, state.position, state.paths, unit,
            rows.num_in_bag, seed, limits, squares=squares,
        )  # fmt: skip
        return _split_nodes(
            level, state, split, rows, limits, slots, num_bins, max_depth
        )

    # Levels of few nodes share one loop body, with slots for the largest of them: it
    # compiles once, and empty slots cost little. Deeper levels would pay for them,
    # and are written out. The loop hands on as many slots as it takes, so that if
    # more levels follow, its last one is the first of those.
    slots = min(2 ** (max(1, min(max_depth, shared_levels)) - 1), most)
    shared = max_depth if max_depth <= shared_levels else max(0, shared_levels - 1)
    node = jnp.where(rows.in_bag, jnp.int32(0), -1)
    root = _sum_nodes(sum_plain_histogram, rows, node, 1, limits, num_bins)
    path = start_paths(limits, max_leaves, slots, max_depth)
    leaf = make_leaf(max_depth, num_bins, limits.categories is not None)
    state = _make_root(root, gradient.shape[0], leaf, slots, path)
    state = jax.lax.fori_loop(
        0, shared, lambda level, state: grow_level(jnp.int32(level), state, slots),
        state,
    )  # fmt: skip
    for level in range(shared, max_depth):
        state = grow_level(level, state, min(2 ** min(level + 1, max_depth - 1), most))
    bounds = restore_bounds(state.paths.leaf_bounds, given, rows.unit)
    return state.tree._replace(bounds=bounds), state.row_position


def _make_root(root, num_rows, tree, slots, path):
    """Returns the first level: the root in slot 0, the other slots empty."""
    histogram = jnp.zeros((slots, *root.shape[1:]), jnp.int32).at[:1].set(root)
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    start = jnp.zeros(num_rows, jnp.int32)
    return _PlainState(histogram, position, start, start, tree, path)


def _sum_nodes(kernel, rows, node, num_nodes, limits, num_bins, enabled: Any = True):
    """Sums the histograms of the nodes, and counts only where they are needed."""
    sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
    counted = jnp.asarray(limits.min_child_samples) > 1
    return total(kernel(rows.codes, rows.channels, node, enabled, counted, **sizes))


def _sum_squares(rows, row_slot, slots):
    """Sums the squares of the gradient's integers over the rows of each slot.

    Rows that have stopped are a group of their own, so that sums are multiples of the
    same unit on all levels.
    """
    gradient = rows.channels[:, 0].astype(jnp.float32)
    group = jnp.minimum(row_slot, slots)
    return sum_by_group(jnp.square(gradient), group, slots + 1)[:slots]


def _split_nodes(level, state, split, rows, limits, slots, num_bins, max_depth):
    """Records the splits, routes the rows, and sums the next level's nodes."""
    count = count_sides(rows.codes, split, state.row_slot, rows.in_bag)
    split, left_smaller = settle_splits(split, count, num_bins)
    tree = write_splits(level, state.position, state.tree, split)
    pairs = pair_children(state.position, split, slots)
    moved = route_rows(
        rows.codes, split, pairs.pair, left_smaller, rows.in_bag, state.row_slot,
        state.row_position, slots=slots,
    )  # fmt: skip
    path = pass_paths(
        state.paths, level, state.position, split, pairs.source, slots, max_depth
    )
    last = jnp.asarray(level == max_depth - 1)
    done = last | ~jnp.any(split.found)
    if path.free is not None:
        done |= path.free == 0
    # Of one shard, more than half of the rows may be in smaller children.
    whole = current_shards() is None
    kernel = sum_child_histogram if whole else sum_plain_histogram
    size = pairs.source.shape[0]
    small = _sum_nodes(kernel, rows, moved.node, size, limits, num_bins, ~done)
    histogram = join_children(state.histogram, pairs.source, left_smaller, small, slots)
    return _PlainState(
        histogram, pairs.position, moved.slot, moved.position, tree, path
    )
