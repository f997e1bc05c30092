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

from jboost.binning import MISSING
from jboost.histogram import (
    Codes,
    build_child_histogram,
    build_histogram,
    choose_scale,
    count_rows,
    derive,
    quantise,
    sum_by_group,
)
from jboost.kernels import grow_cpu, paths, sparse_xla
from jboost.kernels.library import choose, may_run
from jboost.kernels.paths import Paths
from jboost.sampling import sample
from jboost.sparse import SparseCodes
from jboost.splitting import WEIGHT_SLACK, ValueLimits, find_split

_sample_in_xla = partial(sample, implementation="xla")
_SHARED_LEVELS = 6  # at most so many levels share one compiled loop body


class LeafSums(NamedTuple):
    """What a tree's leaves were fitted to: sums over the rows it learnt from.

    Attributes:
      gradient, curvature: weighted, in the loss's units.
      weight: of the rows.
      l2: what is added to a node's curvature in a gain.
    """

    gradient: Float[Array, "*T L"]
    curvature: Float[Array, "*T L"]
    weight: Float[Array, "*T L"]
    l2: Float[Array, "*T"]


class Tree(NamedTuple):
    """A tree on codes; more axes in front for more trees.

    Attributes:
      feature: 0 where a node is not split.
      threshold: a code; ``1 <= code <= threshold`` goes left. The highest code where
        a node is not split.
      missing_left: where code 0 goes. True where a node is not split.
      leaf_value: what each leaf adds to the score.
      sums: what its leaves were fitted to; None in a tree that was only grown.
      bounds: least and greatest value of each leaf; None where leaf values are not
        limited, and in a tree that has its values.
    """

    feature: Int32[Array, "*T I"]  # I = 2^max_depth - 1
    threshold: Int32[Array, "*T I"]
    missing_left: Bool[Array, "*T I"]
    leaf_value: Float[Array, "*T I+1"]
    sums: LeafSums | None = None
    bounds: Float[Array, "*T I+1 2"] | None = None

    @property
    def max_depth(self) -> int:
        """D, levels of splits."""
        return self.leaf_value.shape[-1].bit_length() - 1


class TreeLimits(NamedTuple):
    """The numbers that shape a tree; all may be traced.

    See :func:`jboost.fit` for their meaning. The last two are None for no limit.

    Attributes:
      values: what holds leaf values back; at the root the bounds are those of
        ``max_delta_step``.
      groups: features that may meet on a path (``interactions``).
    """

    l2: Float[Array, ""] | float = 1.0
    min_gain: Float[Array, ""] | float = 0.0
    min_child_weight: Float[Array, ""] | float = 1.0
    min_child_samples: Int32[Array, ""] | int = 1
    colsample_bytree: Float[Array, ""] | float = 1.0
    colsample_bylevel: Float[Array, ""] | float = 1.0
    colsample_bynode: Float[Array, ""] | float = 1.0
    values: ValueLimits | None = None
    groups: Bool[Array, "G F"] | None = None
    max_bins: Int32[Array, ""] | int = 256


class _Level(NamedTuple):
    """What is carried from level to level; M slots hold the nodes still growing."""

    histogram: Int32[Array, "M F B C"]
    position: Int32[Array, " M"]  # of the slot's node on its level; -1: slot is empty
    row_slot: Int32[Array, " N"]  # M: the row's node has stopped growing
    row_position: Int32[Array, " N"]
    tree: Tree
    paths: Paths


class RoundedRows(NamedTuple):
    """What a tree is grown from; constant over its levels.

    Attributes:
      channels: integers: gradient, curvature, and a count unless curvature is one.
      unit: what one integer of gradient and of curvature stands for.
    """

    columns: Codes
    channels: Int32[Array, "N C"]
    in_bag: Bool[Array, " N"]
    num_in_bag: Int32[Array, ""]
    unit: Float[Array, "2"]


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
      implementation: as for :func:`jboost.histogram.build_histogram`.

    Returns:
      The tree and the leaf of every row. Where leaf values are limited, the tree
      has the bounds of its leaves.
    """
    num_rows = gradient.shape[0]
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    most = 1 << (max(1, most) - 1).bit_length()
    sizes: Any = dict(
        max_depth=max_depth, num_bins=num_bins, most=most, max_leaves=max_leaves,
        uniform=uniform,
    )  # fmt: skip
    grow = choose(
        implementation,
        # A batch of trees is grown one by one: in lockstep their rows would be copied.
        cpu=sequential_vmap(partial(_grow_with_kernels, **sizes)),
        xla=partial(_grow_in_xla, **sizes),
    )
    return grow(packed, columns, gradient, curvature, in_bag, words, limits)


def pack_codes(
    columns: Codes, num_bins: int, implementation: str | None = None
) -> Shaped[Array, "blocks N W"] | None:
    """Codes by row, where the kernels that want them may run; else None."""
    if not may_run(implementation) or isinstance(columns, SparseCodes):
        return None

    def nothing(columns):
        shape = grow_cpu.packed_shape(*columns.shape)
        return jnp.zeros(shape, columns.dtype)

    pack = partial(grow_cpu.pack, num_bins=num_bins)
    return choose(implementation, cpu=pack, xla=nothing)(columns)


def predict_tree(
    tree: Tree, columns: Codes, implementation: str | None = None
) -> Int32[Array, " N"]:
    """The leaf of each row of codes."""
    wide = not isinstance(columns, SparseCodes) and columns.dtype == jnp.uint32
    if wide:  # wider than any histogram: no kernel takes them
        return _descend(tree, columns)
    find = choose(implementation, cpu=_find_leaves_with_kernels, xla=_descend)
    return find(tree, columns)


def _find_leaves_with_kernels(tree, columns):
    num_rows = count_rows(columns)
    structure = (tree.feature, tree.threshold, tree.missing_left)
    nobody, anywhere = jnp.zeros(num_rows, bool), jnp.zeros(num_rows, jnp.int32)
    return grow_cpu.find_leaves(_source(columns, None), *structure, nobody, anywhere)


def _source(columns, packed):
    """The codes as the kernels' operands."""
    if isinstance(columns, SparseCodes):
        return grow_cpu.sparse_source(*columns.arrays, num_rows=columns.num_rows)
    return grow_cpu.dense_source(columns, packed)


def _descend(tree, columns):
    def descend(_, node):
        codes = _row_codes(columns, tree.feature[node])
        above = codes > tree.threshold[node]
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
        _fractions(limits),
        start_paths(limits, max_leaves, slots, max_depth),
        limits.values,
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
    )
    return tree, grown.leaf


def _grow_in_xla(
    packed, columns, gradient, curvature, in_bag, words, limits,
    *, max_depth, num_bins, most, max_leaves, uniform,
):  # fmt: skip
    """The definition: what the kernels do, in plain XLA."""
    rows = make_rows(columns, gradient, curvature, in_bag, words, uniform)

    def grow_level(level, state, slots):
        split = _find_splits(level, state, rows, words, limits)
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
    build = partial(build_histogram, implementation="xla")
    root = _sum_nodes(build, rows, node, 1, limits, num_bins)
    path = start_paths(limits, max_leaves, slots, max_depth)
    state = _make_root(root, gradient.shape[0], max_depth, num_bins, slots, path)
    state = jax.lax.fori_loop(
        0, shared, lambda level, state: grow_level(level, state, slots), state
    )
    for level in range(shared, max_depth):
        state = grow_level(level, state, min(2 ** min(level + 1, max_depth - 1), most))
    return state.tree._replace(bounds=state.paths.leaf_bounds), state.row_position


def start_paths(limits, max_leaves, slots, max_depth):
    """What the root hands down to its children."""
    bounds = None if limits.values is None else limits.values.bounds
    return paths.start(
        bounds, limits.groups, max_leaves, slots=slots, max_depth=max_depth
    )


def make_rows(columns, gradient, curvature, in_bag, words, uniform):
    """Rounds the rows' derivatives to integers."""
    values = jnp.where(in_bag[None, :], jnp.stack([gradient, curvature]), 0.0)
    num_in_bag = jnp.sum(in_bag)
    fixed = choose_scale(values, num_in_bag, implementation="xla")
    unit, channels = fixed.unit, quantise(values.T, fixed, words)
    count = in_bag.astype(jnp.int32)
    if uniform:  # curvature in units of a row: a count, exact however it is rounded
        largest = jnp.maximum(jnp.max(values[1]), jnp.float32(1e-30))
        unit = jnp.stack([unit[0], largest])
        channels = jnp.stack([channels[:, 0], count], axis=1)
    else:
        channels = jnp.concatenate([channels, count[:, None]], axis=1)
    return RoundedRows(columns, channels, in_bag, num_in_bag, unit)


def _make_root(root, num_rows, max_depth, num_bins, slots, path):
    """The first level: the root in slot 0, the other slots empty."""
    tree = make_leaf(max_depth, num_bins)
    histogram = jnp.zeros((slots, *root.shape[1:]), jnp.int32).at[:1].set(root)
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    start = jnp.zeros(num_rows, jnp.int32)
    return _Level(histogram, position, start, start, tree, path)


def make_leaf(max_depth, num_bins):
    """A tree without a split."""
    num_nodes = 2**max_depth - 1
    return Tree(
        feature=jnp.zeros(num_nodes, jnp.int32),
        threshold=jnp.full(num_nodes, num_bins - 1, jnp.int32),
        missing_left=jnp.ones(num_nodes, bool),
        leaf_value=jnp.zeros(num_nodes + 1, jnp.float32),
    )


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


def _find_splits(level, state, rows, words, limits):
    """The best split of each slot; none for empty slots."""
    slots = state.position.shape[0]
    masks = sample_features(words, level, slots, state.histogram.shape[1], limits)
    masks = paths.allow(state.paths, masks)
    least = least_samples(limits, rows.num_in_bag)

    def find(histogram, mask, bounds):
        values = limits.values
        if values is not None:
            values = values._replace(bounds=bounds)
        return find_split(
            histogram,
            rows.unit,
            mask,
            l2=limits.l2,
            min_gain=limits.min_gain,
            min_child_weight=limits.min_child_weight,
            min_child_samples=least,
            values=values,
        )

    split = jax.vmap(find)(state.histogram, masks, state.paths.bounds)
    found = split.found & (state.position >= 0)
    return split._replace(found=paths.keep_best(state.paths, split.gain, found))


def least_samples(limits, num_in_bag):
    """What to ask of counts: a child without rows gives no gain, so 1 asks nothing
    (and counts may be missing: see _sum_nodes)."""
    least = jnp.asarray(limits.min_child_samples, jnp.int32)
    return jnp.where(least > 1, jnp.minimum(least, num_in_bag + 1), 0)


def sample_features(words, level, slots, num_features, limits):
    """Masks [M, F]: some of the tree's features, of those the level's, the node's."""
    fractions = _fractions(limits)
    stage = jnp.arange(3, dtype=jnp.int32)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    # Every use has a number of its own: the tree 0, level d 1 + d, then the nodes.
    node = 64 + 2**level + slot
    use = jnp.where(stage == 0, 0, jnp.where(stage == 1, 1 + level, node))
    seeds = derive(words, use)

    def narrow(stage, masks):  # one body for all three: it is compiled
        return jax.vmap(_sample_in_xla, (0, 0, None))(
            seeds[stage], masks, fractions[stage]
        )

    every = jnp.ones((slots, num_features), bool)
    return jax.lax.cond(
        jnp.min(fractions) < 1,
        lambda masks: jax.lax.fori_loop(0, 3, narrow, masks),
        lambda masks: masks,
        every,
    )


def _fractions(limits):
    shares = (
        limits.colsample_bytree, limits.colsample_bylevel, limits.colsample_bynode
    )  # fmt: skip
    return jnp.stack([jnp.asarray(share, jnp.float32) for share in shares])


def _split_nodes(level, last, state, split, rows, limits, slots, num_bins, max_depth):
    """Writes the splits down, routes the rows, and sums the next level's nodes."""
    split, right, left_smaller = route(state, split, rows, num_bins)
    tree = write_splits(level, state, split)
    pair, source, position = assign_slots(state, split, slots)
    row_pair = lookup(pair, state.row_slot, slots)
    row_slot = jnp.minimum(2 * row_pair + right, slots)
    row_position = 2 * state.row_position + right
    path = paths.descend(
        state.paths, level, state.position, split.feature, split.found,
        split.child_bounds, source, slots=slots, max_depth=max_depth,
    )  # fmt: skip

    def sum_children(histogram):
        smaller = (right == 0) == lookup(left_smaller, state.row_slot, False)
        node = jnp.where(rows.in_bag & smaller, row_pair, -1)
        pairs = source.shape[0]
        small = _sum_nodes(build_child_histogram, rows, node, pairs, limits, num_bins)
        large = histogram[source] - small
        first = left_smaller[source][:, None, None, None]
        both = jnp.where(first, small, large), jnp.where(first, large, small)
        return jnp.stack(both, axis=1).reshape(-1, *histogram.shape[1:])[:slots]

    def stop(histogram):
        return jnp.zeros((slots, *histogram.shape[1:]), jnp.int32)

    done = last | ~jnp.any(split.found)
    if path.free is not None:
        done |= path.free == 0
    histogram = jax.lax.cond(done, stop, sum_children, state.histogram)
    return _Level(histogram, position, row_slot, row_position, tree, path)


def assign_slots(state, split, slots):
    """The children of the r-th split node take slots 2r and 2r + 1.

    Returns:
      r for each slot (``slots`` where it is not split), the slot of each r, and the
      positions of the next level's slots.
    """
    num_found = jnp.sum(split.found)
    every = jnp.arange(state.position.shape[0], dtype=jnp.int32)
    pair = jnp.where(split.found, jnp.cumsum(split.found) - 1, slots).astype(jnp.int32)
    source = jnp.zeros(max(1, slots // 2), jnp.int32).at[pair].set(every, mode="drop")
    parent = jnp.stack([state.position[source]] * 2, axis=1).reshape(-1)[:slots]
    slot = jnp.arange(slots, dtype=jnp.int32)
    position = jnp.where(slot < 2 * num_found, 2 * parent + (slot & 1), -1)
    return pair, source, position


def route(state, split, rows, num_bins):
    """Decides where missing values go, and which rows go right.

    Returns:
      The split as it is to be written, whether each row goes right, and whether
      each slot's left child has fewer rows.
    """
    slots = state.position.shape[0]
    threshold = jnp.where(split.found, split.threshold, num_bins - 1)
    slot = state.row_slot
    codes = _row_codes(rows.columns, lookup(split.feature, slot, 0))
    above = (codes > lookup(threshold, slot, num_bins - 1)).astype(jnp.int32)
    kind = jnp.where(codes == MISSING, 2, above)
    group = jnp.where(rows.in_bag & (slot < slots), 3 * slot + kind, 3 * slots)
    ones = jnp.ones(slot.shape[0], jnp.int32)
    count = sum_by_group(ones, group, 3 * slots).reshape(slots, 3)
    # Where training saw no missing value, missing goes to the child with more rows.
    missing_left = jnp.where(
        count[:, 2] > 0, split.missing_left, count[:, 0] >= count[:, 1]
    )
    missing_left = missing_left | ~split.found
    left = count[:, 0] + jnp.where(missing_left, count[:, 2], 0)
    left_smaller = 2 * left <= jnp.sum(count, axis=1)
    missing_right = (~lookup(missing_left, slot, True)).astype(jnp.int32)
    right = jnp.where(codes == MISSING, missing_right, above)
    split = split._replace(threshold=threshold, missing_left=missing_left)
    return split, right, left_smaller


def write_splits(level, state, split):
    """The tree with the splits of a level."""
    tree = state.tree
    outside = tree.feature.shape[0]
    node = jnp.where(split.found, 2**level - 1 + state.position, outside)
    # One scatter of triples: three of single numbers take longer to compile.
    fields = (split.feature, split.threshold, split.missing_left.astype(jnp.int32))
    table = (tree.feature, tree.threshold, tree.missing_left.astype(jnp.int32))
    table = jnp.stack(table, axis=1).at[node].set(jnp.stack(fields, 1), mode="drop")
    return Tree(table[:, 0], table[:, 1], table[:, 2] > 0, tree.leaf_value)


def lookup(table, slot, otherwise):
    """table[slot], with a value for rows whose node has stopped growing."""
    return jnp.append(table, jnp.asarray(otherwise, table.dtype))[slot]


def _row_codes(columns, feature):
    """The code of each row in a feature of its own."""
    if isinstance(columns, SparseCodes):
        return sparse_xla.row_codes(*columns.arrays, feature)
    num_rows = columns.shape[1]
    index = feature * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    return columns.reshape(-1)[index].astype(jnp.int32)
