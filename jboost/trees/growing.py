# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level on codes, and applies it.

In: codes by feature, weighted gradient and curvature per row. Out: a Tree in heap
order, and each row's leaf. Node i has children 2i + 1 and 2i + 2; a node that is not
split sends everything left, so that every path has max_depth steps and ends in one
of 2^max_depth leaves:

    level 0            0                node position on level d: node - (2^d - 1)
    level 1        1       2            leaf = position on level max_depth
    level 2      3   4   5   6
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from jboost.codes.bins import MISSING
from jboost.codes.codes import Codes, SparseCodes, count_rows
from jboost.entry.decorators import traceable
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose, may_run, takes_implementation
from jboost.kernels.paths import Paths
from jboost.tables.categories import goes_left
from jboost.trees.histogram import build_child_histogram, build_in_xla
from jboost.trees.levels import (
    TreeLimits,
    column_fractions,
    count_sides,
    find_splits,
    join_children,
    lookup,
    make_leaf,
    make_rows,
    pair_children,
    pass_paths,
    route_rows,
    row_codes,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.trees.splitting import WEIGHT_SLACK
from jboost.trees.tree import CATEGORICAL, Tree

_SHARED_LEVELS = 6  # at most so many levels share one compiled loop body


class _Level(NamedTuple):
    """What is carried from level to level; M slots hold the nodes still growing."""

    histogram: Int32[Array, "M F B C"]
    position: Int32[Array, " M"]  # of the slot's node on its level; -1: slot is empty
    row_slot: Int32[Array, " N"]  # M: the row's node has stopped growing
    row_position: Int32[Array, " N"]
    tree: Tree
    paths: Paths


@traceable
@takes_implementation
def grow_tree(
    columns: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"],
    words: UInt32[Array, "2"],
    limits: TreeLimits,
    *,
    max_depth: int,
    num_bins: int,
    max_nodes: int | None = None,
    max_leaves: int | None = None,
    uniform: bool = False,
    packed: Shaped[Array, "blocks N W"] | None = None,
    implementation: str | None = None,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the structure of one tree; its leaf values are zero.

    Chen and Guestrin 2016, algorithm 1 by levels, over bins. A level's histograms
    are those of the smaller child of each split, and parent minus child.

    Args:
      columns: codes, one row per feature; or those of a sparse matrix.
      gradient, curvature: of each row, times its weight.
      in_bag: rows to learn from; the others are only routed.
      words: seed of column sampling and stochastic rounding.
      limits: numbers; may be traced.
      max_depth: number of levels of splits.
      num_bins: number of codes.
      max_nodes: the most nodes a level can have, if known to be less than N: N over
        ``min_child_samples``.
      max_leaves: the most leaves: on each level the splits of the highest gain are
        made first, those of equal gain from left to right.
      uniform: all rows in the bag have the same curvature, so that counts of rows
        follow from it.
      packed: the same codes by row, from :func:`pack_codes`; made here if needed.
      implementation: as for :func:`jboost.trees.histogram.build_histogram`.

    Returns:
      The tree and the leaf of every row. Where leaf values are limited, the tree
      has the bounds of its leaves.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> from jboost.trees.levels import TreeLimits
      >>> x, residual = jnp.arange(8.0)[:, None], jnp.array([0.0] * 4 + [1.0] * 4)
      >>> columns = jb.apply_bins(jb.fit_bins(x), x).T
      >>> tree, leaf = jb.parts.grow_tree(
      ...     columns, -residual, jnp.ones(8), jnp.ones(8, bool),
      ...     jnp.zeros(2, jnp.uint32), TreeLimits(), max_depth=1, num_bins=256,
      ... )
      >>> leaf.tolist()
      [0, 0, 0, 0, 1, 1, 1, 1]
    """
    num_rows = gradient.shape[0]
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    most = 1 << (max(1, most) - 1).bit_length()
    sizes: Any = dict(
        max_depth=max_depth, num_bins=num_bins, most=most, max_leaves=max_leaves,
        uniform=uniform,
    )  # fmt: skip
    grow = choose(
        # A batch of trees is grown one by one: in lockstep their rows would be copied.
        cpu=sequential_vmap(partial(_grow_with_kernels, **sizes)),
        xla=partial(_grow_in_xla, **sizes),
    )
    return grow(packed, columns, gradient, curvature, in_bag, words, limits)


def pack_codes(columns: Codes, num_bins: int) -> Shaped[Array, "blocks N W"] | None:
    """Codes by row, where the kernels that want them may run; else None."""
    if not may_run() or isinstance(columns, SparseCodes):
        return None

    def nothing(columns):
        shape = grow_cpu.packed_shape(*columns.shape)
        return jnp.zeros(shape, columns.dtype)

    pack = partial(grow_cpu.pack, num_bins=num_bins)
    return choose(cpu=pack, xla=nothing)(columns)


def predict_tree(tree: Tree, columns: Codes) -> Int32[Array, " N"]:
    """The leaf of each row of codes."""
    wide = not isinstance(columns, SparseCodes) and columns.dtype == jnp.uint32
    if wide:  # wider than any histogram: no kernel takes them
        return _descend(tree, columns)
    find = choose(cpu=_find_leaves_with_kernels, xla=_descend)
    return find(tree, columns)


def _find_leaves_with_kernels(tree, columns):
    num_rows = count_rows(columns)
    structure = (tree.feature, tree.threshold, tree.missing_left)
    nobody, anywhere = jnp.zeros(num_rows, bool), jnp.zeros(num_rows, jnp.int32)
    return grow_cpu.find_leaves(
        _source(columns, None), *structure, nobody, anywhere, tree.left_codes
    )


def _source(columns, packed):
    """The codes as the kernels' operands."""
    if isinstance(columns, SparseCodes):
        return grow_cpu.sparse_source(*columns.arrays, num_rows=columns.num_rows)
    return grow_cpu.dense_source(columns, packed)


def _descend(tree, columns):
    def descend(_, node):
        codes = row_codes(columns, tree.feature[node])
        threshold = tree.threshold[node]
        above = codes > threshold
        if tree.left_codes is not None:
            left = goes_left(tree.left_codes[node], codes)
            above = jnp.where(threshold == CATEGORICAL, ~left, above)
        right = jnp.where(codes == MISSING, ~tree.missing_left[node], above)
        return 2 * node + 1 + right.astype(jnp.int32)

    start = jnp.zeros(count_rows(columns), jnp.int32)
    node = jax.lax.fori_loop(0, tree.max_depth, descend, start)
    return node - (2**tree.max_depth - 1)


def _grow_with_kernels(
    packed, columns, gradient, curvature, in_bag, words, limits,
    *, max_depth, num_bins, most, max_leaves, uniform,
):  # fmt: skip
    slots = min(2 ** (max_depth - 1), most)
    if packed is None and not isinstance(columns, SparseCodes):
        packed = grow_cpu.pack(columns, num_bins)
    grown = grow_cpu.grow(
        _source(columns, packed),
        gradient,
        curvature,
        in_bag,
        words,
        grow_cpu.Limits(
            l2=jnp.float32(limits.l2),
            min_gain=jnp.float32(limits.min_gain),
            min_child_weight=jnp.float32(limits.min_child_weight)
            * jnp.float32(WEIGHT_SLACK),
            min_child_samples=jnp.int32(limits.min_child_samples),
        ),
        column_fractions(limits),
        start_paths(limits, max_leaves, slots, max_depth),
        limits.values,
        _as_compared(limits.categories),
        max_depth=max_depth,
        num_bins=num_bins,
        slots=slots,
        uniform=uniform,
    )
    tree = Tree(
        grown.feature,
        grown.threshold,
        grown.missing_left,
        leaf_value=jnp.zeros(2**max_depth, jnp.float32),
        bounds=grown.bounds,
        left_codes=grown.left_codes,
    )
    return tree, grown.leaf


def _as_compared(categories):
    """With the least weight of a child as sums are compared with it."""
    if categories is None:
        return None
    weight = jnp.float32(categories.min_weight) * jnp.float32(WEIGHT_SLACK)
    return categories._replace(min_weight=weight)


def _grow_in_xla(
    packed, columns, gradient, curvature, in_bag, words, limits,
    *, max_depth, num_bins, most, max_leaves, uniform,
):  # fmt: skip
    """The definition: what the kernels do, in plain XLA."""
    rows = make_rows(columns, gradient, curvature, in_bag, words, uniform)

    def grow_level(level, state, slots):
        split = find_splits(
            level, state.histogram, state.position, state.paths, rows.unit,
            rows.num_in_bag, words, limits,
        )  # fmt: skip
        last = jnp.asarray(level == max_depth - 1)
        return _split_nodes(
            level, last, state, split, rows, limits, slots, num_bins, max_depth
        )

    # Levels of few nodes share one loop body, with slots for the largest of them: it
    # compiles once, and empty slots cost little. Deeper levels would pay for them,
    # and are written out. The loop hands on as many slots as it takes, so that if
    # more levels follow, its last one is the first of those.
    slots = min(2 ** (min(max_depth, _SHARED_LEVELS) - 1), most)
    shared = max_depth if max_depth <= _SHARED_LEVELS else _SHARED_LEVELS - 1
    node = jnp.where(in_bag, 0, -1)
    root = _sum_nodes(build_in_xla, rows, node, 1, limits, num_bins)
    path = start_paths(limits, max_leaves, slots, max_depth)
    leaf = make_leaf(max_depth, num_bins, limits.categories is not None)
    state = _make_root(root, gradient.shape[0], leaf, slots, path)
    state = jax.lax.fori_loop(
        0, shared, lambda level, state: grow_level(level, state, slots), state
    )
    for level in range(shared, max_depth):
        state = grow_level(level, state, min(2 ** min(level + 1, max_depth - 1), most))
    return state.tree._replace(bounds=state.paths.leaf_bounds), state.row_position


def _make_root(root, num_rows, tree, slots, path):
    """The first level: the root in slot 0, the other slots empty."""
    histogram = jnp.zeros((slots, *root.shape[1:]), jnp.int32).at[:1].set(root)
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    start = jnp.zeros(num_rows, jnp.int32)
    return _Level(histogram, position, start, start, tree, path)


def _sum_nodes(kernel, rows, node, num_nodes, limits, num_bins):
    """Histograms of the nodes; counts only where somebody asks for them."""
    sizes = dict(num_nodes=num_nodes, num_bins=num_bins)

    def build(channels):
        return kernel(rows.columns, channels, node, **sizes)

    sums = build(rows.channels[:, :2])
    if rows.channels.shape[1] == 2:
        return sums
    nothing = jnp.zeros((*sums.shape[:-1], 1), jnp.int32)
    counted = jnp.asarray(limits.min_child_samples) > 1
    counts = jax.lax.cond(counted, build, lambda _: nothing, rows.channels[:, 2:])
    return jnp.concatenate([sums, counts], axis=-1)


def _split_nodes(level, last, state, split, rows, limits, slots, num_bins, max_depth):
    """Writes the splits down, routes the rows, and sums the next level's nodes."""
    count = count_sides(rows.columns, split, state.row_slot, rows.in_bag)
    split, left_smaller = settle_splits(split, count, num_bins)
    tree = write_splits(level, state.position, state.tree, split)
    pairs = pair_children(state.position, split, slots)
    moved = route_rows(
        rows.columns, split, pairs.pair, state.row_slot, state.row_position, slots
    )
    path = pass_paths(
        state.paths, level, state.position, split, pairs.source, slots, max_depth
    )

    def sum_children(histogram):
        smaller = (moved.right == 0) == lookup(left_smaller, state.row_slot, False)
        node = jnp.where(rows.in_bag & smaller, moved.pair, -1)
        size = pairs.source.shape[0]
        small = _sum_nodes(build_child_histogram, rows, node, size, limits, num_bins)
        return join_children(histogram, pairs.source, left_smaller, small, slots)

    def stop(histogram):
        return jnp.zeros((slots, *histogram.shape[1:]), jnp.int32)

    done = last | ~jnp.any(split.found)
    if path.free is not None:
        done |= path.free == 0
    histogram = jax.lax.cond(done, stop, sum_children, state.histogram)
    return _Level(histogram, pairs.position, moved.slot, moved.position, tree, path)
