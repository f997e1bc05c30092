# SPDX-License-Identifier: Apache-2.0
"""Grows the splits of one tree level by level on codes, and finds the leaves of rows.

Out: a Tree in heap order. Node i has children 2i + 1 and 2i + 2. A node that is not
split sends all rows left, so that every path ends in one of 2^max_depth leaves. Plain
XLA comes first and defines the tree; the CPU kernel returns the same bits.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.codes.bins import MISSING
from jboost.codes.codes import Codes
from jboost.entry import collectives
from jboost.entry.collectives import count_rows, current_shards, total
from jboost.kernels import grow_cpu, levels_cpu
from jboost.kernels.library import choose
from jboost.numerics.exact import sum_by_group
from jboost.tables.categories import goes_left
from jboost.trees.histogram import sum_plain_histogram
from jboost.trees.levels import (
    column_fractions,
    count_per_threshold,
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
from jboost.trees.limits import TreeLimits, restore_bounds, to_search_units
from jboost.trees.paths import Paths
from jboost.trees.rounding import Quantization, make_rows, measure_rows
from jboost.trees.splitting import child_limits
from jboost.trees.tree import CATEGORICAL, Tree

_SHARED_LEVELS = 6  # the most levels that share one compiled loop body


class _PlainState(NamedTuple):
    """The state carried from level to level; M slots hold the nodes still growing."""

    histogram: Int32[Array, "M F B C"]
    position: Int32[Array, " M"]  # position of the slot's node on its level; -1: empty
    row_slot: Int32[Array, " N"]  # M: the row's node has stopped growing
    row_position: Int32[Array, " N"]
    paths: Paths


def _grow_plainly(
    codes, gradient, curvature, in_bag, seed, limits, measure=None, *, max_depth,
    num_bins, most, max_leaves, uniform, shared_levels=_SHARED_LEVELS,
):  # fmt: skip
    """Grows the tree in plain XLA; ``most`` is the most nodes of a level."""
    rows = make_rows(codes, gradient, curvature, in_bag, seed, uniform, measure)
    given = limits
    limits, unit = to_search_units(given, rows.unit)

    def grow_level(level, state, slots):
        """Returns the next level, and the splits of this one."""
        squares = None
        if limits.categories is not None:
            squares = _sum_squares(rows, state.row_slot, state.position.shape[0])
        split = find_splits(
            level, state.histogram, state.position, state.paths, unit,
            rows.num_in_bag, seed, limits, squares=squares,
        )  # fmt: skip
        return _split_nodes(level, state, split, rows, slots, num_bins, max_depth)

    def grow_shared(level, carried):
        level, (state, tree) = jnp.int32(level), carried
        after, split = grow_level(level, state, slots)
        return after, write_splits(level, state.position, tree, split)

    # Levels of few nodes share one loop body, with slots for the largest of them: it
    # compiles once, and empty slots cost little. Deeper levels would pay for them,
    # and are written out. The loop hands on as many slots as it takes, so that if
    # more levels follow, its last one is the first of those.
    slots = min(2 ** (max(1, min(max_depth, shared_levels)) - 1), most)
    shared = max_depth if max_depth <= shared_levels else max(0, shared_levels - 1)
    node = jnp.where(rows.in_bag, jnp.int32(0), -1)
    root = _sum_nodes(rows, node, 1, num_bins)
    path = start_paths(limits, max_leaves, slots, max_depth)
    leaf = make_leaf(max_depth, num_bins, limits.categories is not None)
    # The first level: the root in slot 0, the other slots empty.
    histogram = jnp.zeros((slots, *root.shape[1:]), jnp.int32).at[:1].set(root)
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    start = jnp.zeros(gradient.shape[0], jnp.int32)
    state = _PlainState(histogram, position, start, start, path)
    state, tree = jax.lax.fori_loop(0, shared, grow_shared, (state, leaf))
    made = []
    for level in range(shared, max_depth):
        before, width = state, min(2 ** min(level + 1, max_depth - 1), most)
        state, split = grow_level(level, before, width)
        made.append((jnp.full_like(before.position, level), before.position, split))
    if made:
        levels, positions, splits = jax.tree.map(lambda *a: jnp.concatenate(a), *made)
        tree = write_splits(levels, positions, tree, splits)
    bounds = restore_bounds(state.paths.leaf_bounds, given, rows.unit)
    return tree._replace(bounds=bounds), state.row_position


def _sum_nodes(rows, node, num_nodes, num_bins, enabled: Any = True, sizes=None):
    """Sums the histograms of the nodes."""
    rows = rows.codes, rows.channels, node, enabled, sizes
    return total(sum_plain_histogram(*rows, num_nodes=num_nodes, num_bins=num_bins))


def _sum_squares(rows, row_slot, slots):
    """Sums the squares of the gradient's integers over the rows of each slot.

    Rows that have stopped are a group of their own, so that sums are multiples of the
    same unit on all levels.
    """
    gradient = rows.channels[:, 0].astype(jnp.float32)
    group = jnp.minimum(row_slot, slots)
    return sum_by_group(jnp.square(gradient), group, slots + 1)[:slots]


def _split_nodes(level, state, split, rows, slots, num_bins, max_depth):
    """Routes the rows, and sums the next level's nodes; also returns final splits."""
    count = count_sides(state.histogram, split)
    split, left_smaller, fewer = settle_splits(split, count, num_bins)
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
    sizes, number = None, pairs.source.shape[0]
    if current_shards() is None:  # a shard does not know how many of its rows they are
        sizes = jnp.where(pairs.used, fewer[pairs.source], 0)
    small = _sum_nodes(rows, moved.node, number, num_bins, ~done, sizes)
    histogram = join_children(state.histogram, pairs.source, left_smaller, small, slots)
    after = _PlainState(histogram, pairs.position, moved.slot, moved.position, path)
    return after, split


def _grow_natively(
    codes, gradient, curvature, in_bag, seed, limits, measure=None, *, max_depth,
    num_bins, most, max_leaves, uniform,
):  # fmt: skip
    sizes = grow_cpu.TreeSizes(
        max_depth=max_depth,
        max_leaves=max_leaves or 0,
        num_bins=num_bins,
        num_slots=min(2 ** (max_depth - 1), most),
        uniform=int(uniform),
    )
    rows = gradient, curvature, in_bag, seed
    codes = codes.pack(num_bins)
    if collectives.current_shards() is None:
        found = grow_cpu.grow_tree(
            codes.operands, (*rows, column_fractions(limits)),
            kernel_limits(limits, codes.num_features), limits.values, limits.groups,
            limits.categories, sizes=sizes,
        )  # fmt: skip
    else:
        measure = measure or measure_rows(gradient, curvature, in_bag, uniform)
        found = _grow_in_shards(codes, rows, measure, limits, sizes)
    tree = Tree(
        found.feature,
        found.threshold,
        found.missing_left,
        leaf_value=jnp.zeros(2**max_depth, jnp.float32),
        bounds=found.bounds,
        left_codes=found.left_codes,
    )
    return tree, found.leaf


def _grow_in_shards(codes, rows, measure, limits, sizes):
    """Grows the tree by calls for each level, with sums over all shards in between."""
    gradient, curvature, in_bag, seed = rows
    operands, uniform = codes.operands, bool(sizes.uniform)
    assert not operands.entries, "sparse codes cannot be divided among devices"
    depths = dict(max_depth=sizes.max_depth)
    level_limits = make_level_limits(codes.num_features, limits, seed, measure.unit)
    part = levels_cpu.start_rows(
        gradient, curvature, in_bag, seed, measure.fixed.scale,
        measure.fixed.stochastic, collectives.first_row(),
        num_slots=sizes.num_slots, uniform=uniform,
    )  # fmt: skip
    shape = (2 if uniform else 3, codes.num_features, sizes.num_bins)
    state = jax.tree.map(
        lambda like: jnp.zeros(like.shape, like.dtype),
        levels_cpu.shape_state(
            level_limits, num_slots=sizes.num_slots, sums_shape=shape, **depths
        ),
    )
    greatest = squares = None
    if limits.categories is not None:
        found: Any = levels_cpu.find_greatest(part)
        greatest = collectives.most(found)
    leaf: Any = jnp.zeros_like(in_bag, jnp.int32)
    summed = jnp.zeros(1, jnp.int32)
    for level in range(sizes.max_depth):
        sums = jnp.zeros((*summed.shape, *shape), jnp.int32)
        sums = levels_cpu.sum_slots(
            operands.packed, part, level_limits.limits.num_features, summed, sums
        )
        if greatest is not None:
            slots = min(2**level, sizes.num_slots)
            squares = levels_cpu.sum_squares(part, greatest, num_slots=slots)
        sums, squares = _add_shards(summed[0] >= 0, sums, squares)
        state, splits, summed = levels_cpu.find_level(
            level_limits, sums, summed, squares, greatest, state,
            level=level, max_leaves=sizes.max_leaves, **depths,
        )  # fmt: skip
        part, leaf = levels_cpu.route_rows(
            operands.codes, splits, part, leaf, level=level, **depths
        )
    nodes = state.feature, state.threshold, state.missing_left
    leaf = grow_cpu.find_leaves(operands, *nodes, in_bag > 0, leaf, state.left_codes)
    bounds = restore_bounds(state.leaf_bounds, limits, measure.unit)
    return grow_cpu.GrownTree(*nodes, leaf, bounds, state.left_codes)


def _add_shards(needed, sums, squares):
    """Adds the sums of all shards, by one exchange; none if no node was summed."""
    if squares is None:
        return jax.lax.cond(needed, collectives.total, lambda sums: sums, sums), None
    whole = jnp.concatenate([sums.reshape(-1), squares.reshape(-1)])
    whole = jax.lax.cond(needed, collectives.total, lambda whole: whole, whole)
    return whole[: sums.size].reshape(sums.shape), whole[sums.size :].reshape(-1, 4)


def make_level_limits(num_columns, limits, seed, unit):
    """Returns the operands of the search for splits, besides sums.

    They are in the units of the search, and so are the bounds that it finds.
    """
    limits, unit = to_search_units(limits, unit)
    return levels_cpu.LevelLimits(
        seed=seed,
        fractions=column_fractions(limits),
        limits=kernel_limits(limits, num_columns),
        unit=unit,
        values=limits.values,
        groups=limits.groups,
        categories=limits.categories,
    )


def kernel_limits(limits, num_columns):
    """Returns the limits as the kernel compares sums with them."""
    weight, least = child_limits(limits.min_child_weight, limits.min_child_samples)
    return grow_cpu.SplitLimits(
        l2=jnp.float32(limits.l2),
        min_gain=jnp.float32(limits.min_gain),
        min_child_weight=weight,
        min_child_samples=least,
        num_features=jnp.int32(
            num_columns if limits.num_features is None else limits.num_features
        ),
        rows_per_threshold=count_per_threshold(limits),
    )


def grow_levels(
    codes: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"] | UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    measure: Quantization | None = None,
    *,
    max_depth: int,
    num_bins: int,
    max_nodes: int | None = None,
    max_leaves: int | None = None,
    uniform: bool = False,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the structure of one tree; its leaf values are zero.

    Chen and Guestrin 2016, algorithm 1 by levels, over bins. This is
    :func:`jboost.parts.grow_tree` without its checks and without leaf values.

    Args:
      codes: dense or sparse; packed where CPU kernels run, else they are packed here.
      gradient, curvature: the derivatives of each row, times its weight unless
        ``in_bag`` holds how many times the row counts.
      in_bag: rows to learn from, or how many times each row counts; the others, which
        count 0 times, are only routed.
      seed: the random seed of column sampling and stochastic rounding.
      measure: how derivatives become integers, if known; the kernel that grows a tree
        on one device does not need it.
      max_nodes: the most nodes a level can have, if known to be less than N: N over
        ``min_child_samples``.
      max_leaves: the most leaves: on each level the splits of the highest gain are
        made first, those of equal gain from left to right.
      uniform: all rows in the bag have the same curvature, so that counts of rows
        follow from it.

    Where leaf values are limited, the tree has the bounds of its leaves.
    """
    num_rows = count_rows(gradient.shape[0])
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    # A power of two, so that similar numbers of rows share compiled programs.
    most = 1 << (max(1, most) - 1).bit_length()
    sizes: Any = dict(
        max_depth=max_depth, num_bins=num_bins, most=most, max_leaves=max_leaves,
        uniform=uniform,
    )  # fmt: skip
    grow = choose(
        # A batch of trees is grown one by one: in lockstep their rows would be copied.
        cpu=sequential_vmap(partial(_grow_natively, **sizes)),
        # Kernels compile nothing, and empty slots would cost time.
        cuda=partial(_grow_plainly, **sizes, shared_levels=0),
        xla=partial(_grow_plainly, **sizes),
    )
    in_bag = in_bag.astype(jnp.uint8)
    return grow(codes, gradient, curvature, in_bag, seed, limits, measure)


def find_leaves(tree: Tree, codes: Codes) -> Int32[Array, " N"]:
    """Finds the leaf of each row of codes."""
    if codes.operands.codes.dtype == jnp.uint32:  # no kernel takes codes that wide
        return _descend(tree, codes)
    find = choose(cpu=_find_leaves_natively, xla=_descend)
    return find(tree, codes)


def _find_leaves_natively(tree, codes):
    splits = (tree.feature, tree.threshold, tree.missing_left)
    skip, leaf = jnp.zeros(codes.num_rows, bool), jnp.zeros(codes.num_rows, jnp.int32)
    return grow_cpu.find_leaves(codes.operands, *splits, skip, leaf, tree.left_codes)


def _descend(tree, codes):
    def descend(_, node):
        code = codes.row_codes(tree.feature[node])
        threshold = tree.threshold[node]
        above = code > threshold
        if tree.left_codes is not None:
            left = goes_left(tree.left_codes[node], code)
            above = jnp.where(threshold == CATEGORICAL, ~left, above)
        right = jnp.where(code == MISSING, ~tree.missing_left[node], above)
        return 2 * node + 1 + right.astype(jnp.int32)

    start = jnp.zeros(codes.num_rows, jnp.int32)
    node = jax.lax.fori_loop(0, tree.max_depth, descend, start)
    return node - (2**tree.max_depth - 1)
