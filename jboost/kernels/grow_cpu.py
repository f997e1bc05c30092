# SPDX-License-Identifier: Apache-2.0
"""Grows a tree with the CPU kernels of native/grow.h.

In: codes in two layouts, derivatives, limits. Out: the tree's arrays and each row's
leaf, the same to the bit as those of plain XLA. Per level four calls: sample features,
search, split, sum; XLA's own part is the loop around them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt16, UInt32

from jboost.kernels import paths
from jboost.kernels.library import call, vary
from jboost.kernels.paths import Paths
from jboost.kernels.sampling_cpu import sample_features

CHUNK = 16384  # kChunk of native/grow.h
_WORD = 32  # kWordBits of native/categories.h


class Grown(NamedTuple):
    """A tree in heap order, and where the rows went."""

    feature: Int32[Array, " I"]
    threshold: Int32[Array, " I"]
    missing_left: Bool[Array, " I"]
    leaf: Int32[Array, " N"]
    bounds: Float[Array, "I+1 2"] | None  # of leaf values, where they are limited
    left_codes: UInt32[Array, "I W"] | None  # where there are categories


class Limits(NamedTuple):
    """What a split must fulfill; see :func:`jboost.fit`."""

    l2: Float[Array, ""]
    min_gain: Float[Array, ""]
    min_child_weight: Float[Array, ""]
    min_child_samples: Int32[Array, ""]


class _Splits(NamedTuple):
    """See :class:`jboost.trees.splitting.Split`."""

    feature: Int32[Array, " M"]
    threshold: Int32[Array, " M"]
    missing_left: Bool[Array, " M"]
    gain: Float[Array, " M"]
    found: Bool[Array, " M"]
    child_bounds: Float[Array, "M 2 2"] | None
    left_codes: UInt32[Array, "M W"] | None = None
    absent_codes: UInt32[Array, "M W"] | None = None


class _State(NamedTuple):
    """What is carried from level to level, in the order of the kernel's operands."""

    words: Int32[Array, "N 2"]
    order: UInt16[Array, " N"]
    segments: Int32[Array, "chunks M 2"]
    feature: Int32[Array, " I"]
    threshold: Int32[Array, " I"]
    missing_left: Bool[Array, " I"]
    position: Int32[Array, " M"]
    leaf: Int32[Array, " N"]
    left_codes: UInt32[Array, "I W"] | None = None


class Source(NamedTuple):
    """Codes, as operands of the kernels.

    Attributes:
      columns: by feature [F, N]; of a sparse matrix those of its entries [1, E].
      packed: what sums are made of: codes by row, or ``columns`` of a sparse matrix.
      entries: of a sparse matrix, starts, rows and absent codes; else empty.
      shape: (F, N).
    """

    columns: UInt8[Array, "F N"] | UInt16[Array, "F N"]
    packed: Array | None
    entries: tuple[Array, ...]
    shape: tuple[int, int]


def dense_source(columns: Array, packed: Array | None) -> Source:
    """Codes by feature and, for sums, by row."""
    num_features, num_rows = columns.shape
    return Source(columns, packed, (), (num_features, num_rows))


def sparse_source(
    starts: Array, rows: Array, codes: Array, absent: Array, *, num_rows: int
) -> Source:
    """The arrays of :class:`jboost.codes.codes.SparseCodes`."""
    columns, entries = codes[None], (starts, rows, absent)
    return Source(columns, columns, entries, (absent.shape[0], num_rows))


def packed_shape(num_features: int, num_rows: int) -> tuple[int, int, int]:
    """The shape [blocks, N, width] of packed codes.

    Up to 32 features lie side by side in rows of 8, 16 or 32 codes; more are cut into
    blocks of 16. Codes beyond the last feature are 0.
    """
    width = 16 if num_features > 32 else max(8, 1 << (num_features - 1).bit_length())
    return -(-num_features // width), num_rows, width


def pack(columns: UInt8[Array, "F N"] | UInt16[Array, "F N"], num_bins: int) -> Array:
    """Codes by row, from codes by feature: [blocks, N, width], zeros at the end.

    A code beyond the bins counts as the last one, because the sums are addressed by it.
    """
    result = jax.ShapeDtypeStruct(packed_shape(*columns.shape), columns.dtype)
    return call("pack", result, columns, num_bins=num_bins)


def histogram(*operands, num_nodes, num_bins):
    """See :func:`jboost.trees.histogram.build_histogram`.

    The operands are columns, channels and node; or the arrays of sparse codes instead
    of the columns.
    """
    *codes, channels, node = operands
    if len(codes) > 1:
        source = sparse_source(*codes, num_rows=len(node))
    else:
        source = dense_source(codes[0], None)
    shape = (num_nodes, source.shape[0], num_bins, channels.shape[1])
    operands = (source.columns, channels, node, *source.entries)
    return call("histogram", jax.ShapeDtypeStruct(shape, jnp.int32), *operands)


def find_leaves(
    source: Source,
    feature: Int32[Array, " I"],
    threshold: Int32[Array, " I"],
    missing_left: Bool[Array, " I"],
    skip: Bool[Array, " N"],
    leaf: Int32[Array, " N"],
    left_codes: UInt32[Array, "I W"] | None = None,
) -> Int32[Array, " N"]:
    """The leaf of each row of codes; rows with ``skip`` keep theirs."""
    if left_codes is not None:
        tree = (feature, threshold, missing_left, left_codes)
        operands = (source.columns, *tree, skip, leaf)
        return call("find_category_leaves", _like(leaf), *operands, aliases={6: 0})
    operands = (source.columns, feature, threshold, missing_left, skip, leaf)
    operands += source.entries
    return call("find_leaves", _like(leaf), *operands, aliases={5: 0})


def grow(
    source: Source,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: Limits,
    fractions: Float[Array, "3"],
    path: Paths,
    values: Any = None,
    categories: Any = None,
    *,
    max_depth: int,
    num_bins: int,
    slots: int,
    uniform: bool,
) -> Grown:
    """Grows the tree.

    Args:
      fractions: of features, by tree, level and node.
      path: what is open at the root.
      values: limits of leaf values; see :class:`jboost.trees.splitting.ValueLimits`.
      categories: see :class:`jboost.trees.category_splits.CategoryLimits`; not with
        sparse codes.
    """
    num_features, num_rows = source.shape
    shapes = (
        jax.ShapeDtypeStruct((num_rows, 2), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.uint16),
        jax.ShapeDtypeStruct((-(-num_rows // CHUNK), slots, 2), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    )
    *rows, units = call(
        "start", shapes, gradient, curvature, in_bag, seed, uniform=int(uniform)
    )
    channels = 2 if uniform else 3
    shape = (slots, channels, num_features, num_bins)
    sums, *_ = call(
        "sum_root",
        (jax.ShapeDtypeStruct(shape, jnp.int32), *_room(source)),
        source.packed, *rows, limits.min_child_samples, *source.entries,
    )  # fmt: skip
    num_nodes, words = 2**max_depth - 1, -(-num_bins // _WORD)
    state = _State(
        *rows,
        feature=jnp.zeros(num_nodes, jnp.int32),
        threshold=jnp.full(num_nodes, num_bins - 1, jnp.int32),
        missing_left=jnp.ones(num_nodes, bool),
        position=jnp.full(slots, -1, jnp.int32).at[0].set(0),
        leaf=jnp.zeros(num_rows, jnp.int32),
        left_codes=None
        if categories is None
        else jnp.zeros((num_nodes, words), jnp.uint32),
    )

    def unfinished(carry):
        level, state, *_ = carry
        return (level < max_depth) & (state.position[0] >= 0)

    def grow_level(carry):
        level, state, path, place, sums = carry
        masks = sample_features(seed, level, fractions, slots, num_features)
        operands = (sums, place, state.position, paths.allow(path, masks), units)
        split = _find_splits(operands, limits, path.bounds, values, categories)
        found = paths.keep_best(path, split.gain, split.found)
        split, position = split._replace(found=found), state.position
        state, parent, left_smaller = _split_rows(
            source, level, split, state, max_depth
        )
        path = paths.descend(
            path, level, position, split.feature, found, split.child_bounds,
            jnp.maximum(parent, 0), slots=slots, max_depth=max_depth,
        )  # fmt: skip
        if path.free is not None:  # none: nobody looks at the next level's sums
            parent = jnp.where(path.free > 0, parent, -1)
        place, sums = _sum_children(
            source, state, limits, parent, left_smaller, place, sums
        )
        return level + 1, state, path, place, sums

    places = jnp.zeros(slots, jnp.int32)
    start = jax.tree.map(lambda a: vary(a, sums), (state, path, places))
    carry = (jnp.int32(0), *start, sums)
    _, state, path, _, _ = jax.lax.while_loop(unfinished, grow_level, carry)
    tree = (state.feature, state.threshold, state.missing_left)
    leaf = find_leaves(source, *tree, in_bag, state.leaf, state.left_codes)
    return Grown(*tree, leaf, path.leaf_bounds, state.left_codes)


def _find_splits(operands, limits, bounds, values, categories):
    """The best split of each slot, within ``bounds`` where there are any."""
    if categories is None:
        return _find_thresholds(operands, limits, bounds, values)
    *sums, masks, units = operands
    ordered = jnp.ones(masks.shape[1], bool).at[categories.features].set(False)
    # min_gain is taken off at the end: rounding could make gains equal.
    free = limits._replace(min_gain=jnp.float32(0))
    numeric = _find_thresholds(
        (*sums, masks & ordered[None], units), free, bounds, values
    )
    slots = masks.shape[0]
    words = jax.ShapeDtypeStruct((slots, -(-sums[0].shape[3] // _WORD)), jnp.uint32)
    feature, threshold, missing_left, gain, found, left_codes, absent_codes = call(
        "find_category_splits", (*_split_shapes(slots), words, words), *operands,
        *limits, *categories, *numeric[:4],
        *(() if values is None else (values.l1, bounds)),
    )  # fmt: skip
    child_bounds = numeric.child_bounds
    if child_bounds is not None:  # between sets of categories is no order to keep
        same = jnp.stack([bounds, bounds], axis=1)
        child_bounds = jnp.where((threshold < 0)[:, None, None], same, child_bounds)
    return _Splits(
        feature, threshold, missing_left, gain, found, child_bounds, left_codes,
        absent_codes,
    )  # fmt: skip


def _find_thresholds(operands, limits, bounds, values):
    slots = operands[0].shape[0]
    results = _split_shapes(slots)
    if values is None:
        found = call("find_splits", results, *operands, *limits)
        return _Splits(*found, child_bounds=None)
    results = (*results, jax.ShapeDtypeStruct((slots, 2, 2), jnp.float32))
    more = (values.l1, bounds, values.monotone)
    return _Splits(*call("find_limited_splits", results, *operands, *limits, *more))


def _split_shapes(slots):
    """Of feature, threshold, missing_left, gain and found."""
    kinds = (jnp.int32, jnp.int32, jnp.bool_, jnp.float32, jnp.bool_)
    return tuple(jax.ShapeDtypeStruct((slots,), kind) for kind in kinds)


def _split_rows(source, level, split, state, max_depth):
    pairs = max(1, state.position.shape[0] // 2)
    name, sets = "split_rows", ()
    if split.left_codes is not None:
        name, sets = "split_category_rows", (split.left_codes, split.absent_codes)
    arrays = tuple(array for array in state if array is not None)
    results = (
        *map(_like, arrays),
        jax.ShapeDtypeStruct((pairs,), jnp.int32),
        jax.ShapeDtypeStruct((pairs,), jnp.bool_),
    )
    before = (
        source.columns, level, split.feature, split.threshold, split.missing_left,
        split.found, *sets,
    )  # fmt: skip
    new = call(
        name, results, *before, *arrays, *source.entries,
        aliases={len(before) + i: i for i in range(len(arrays))}, max_depth=max_depth,
    )  # fmt: skip
    parent, left_smaller = new[len(arrays) :]
    return _State(*new[: len(arrays)]), parent, left_smaller


def _sum_children(source, state, limits, parent, left_smaller, place, sums):
    rows = (state.words, state.order, state.segments)
    samples = limits.min_child_samples
    place, sums, *_ = call(
        "sum_children", (_like(place), _like(sums), *_room(source)),
        source.packed, *rows, samples, parent, left_smaller, place, sums,
        *source.entries, aliases={8: 1},
    )  # fmt: skip
    return place, sums


def _room(source):
    """What sums of a sparse matrix need: a word and a place for each row."""
    room = jax.ShapeDtypeStruct((source.shape[1], 4), jnp.int32)
    return (room,) if source.entries else ()


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


class BlockRows(NamedTuple):
    """The state of the rows of one block; see native/grow.h."""

    words: Int32[Array, "n 2"]
    order: UInt16[Array, " n"]
    segments: Int32[Array, "chunks M 2"]
    leaf: Int32[Array, " n"]


def split_block(columns, rows, level, split, position, *, max_depth):
    """Routes the rows of a block in the bag; at the last level writes their leaves.

    Args:
      columns: codes, in which ``split.feature`` counts.
      rows: BlockRows.
      split: feature, threshold, missing_left, gain and found of each slot; where rows
        are missing, missing_left must be the tree's.
      position: of the slots' nodes.
    """
    num_nodes = 2**max_depth - 1
    nothing = jnp.zeros(num_nodes, jnp.int32)
    state = _State(
        rows.words, rows.order, rows.segments, nothing, nothing,
        jnp.zeros(num_nodes, bool), position, rows.leaf,
    )  # fmt: skip
    source = dense_source(columns, None)
    state, _, _ = _split_rows(source, level, split, state, max_depth)
    return BlockRows(state.words, state.order, state.segments, state.leaf)


def sum_block(columns, rows, num_pairs, left_smaller, sums, *, num_bins):
    """Adds up the smaller child of each pair: subtracts its sums from ``sums``.

    ``sum_children`` takes a child's sums away from its parent's. Parents that begin
    as zeros, in the upper half of the places, so gather the negative sums of all
    blocks; the lower half is room.

    Args:
      num_pairs: slots 2r and 2r + 1 are a pair for r below it.
      left_smaller: of each pair.
      sums: [slots, channels, F, B], cumulative over bins.
    """
    pairs = sums.shape[0] // 2
    pair = jnp.arange(pairs, dtype=jnp.int32)
    place = jnp.concatenate([pairs + pair, jnp.zeros(pairs, jnp.int32)])
    samples = jnp.int32(2)  # rows are always counted
    operands = (
        pack(columns, num_bins), rows.words, rows.order, rows.segments, samples,
        jnp.where(pair < num_pairs, pair, -1), left_smaller, place, sums,
    )  # fmt: skip
    shapes = (_like(place), _like(sums))
    return call("sum_children", shapes, *operands, aliases={8: 1})[1]
