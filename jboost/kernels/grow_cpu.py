# SPDX-License-Identifier: Apache-2.0
"""The operations of native/grow.h, which grow one level of a tree on a CPU.

In: codes, the rows by node, limits. Out: histograms, splits, the rows by child node.
All results equal those of plain XLA bit for bit. :mod:`jboost.trees.native_growth`
calls these operations level by level.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt16, UInt32

from jboost.kernels import code_operands
from jboost.kernels.code_operands import CodeOperands
from jboost.kernels.library import call

CHUNK = 16384  # kChunk of native/grow.h
_WORD = 32  # kWordBits of native/categories.h


class SplitLimits(NamedTuple):
    """The conditions that a split must meet; see :func:`jboost.fit`."""

    l2: Float[Array, ""]
    min_gain: Float[Array, ""]
    min_child_weight: Float[Array, ""]
    min_child_samples: Int32[Array, ""]


class SlotSplits(NamedTuple):
    """See :class:`jboost.trees.splitting.Split`."""

    feature: Int32[Array, " M"]
    threshold: Int32[Array, " M"]
    missing_left: Bool[Array, " M"]
    gain: Float[Array, " M"]
    found: Bool[Array, " M"]
    child_bounds: Float[Array, "M 2 2"] | None
    left_codes: UInt32[Array, "M W"] | None = None
    absent_codes: UInt32[Array, "M W"] | None = None


class SlotRows(NamedTuple):
    """The rows in the bag, grouped by slot within each chunk; see native/grow.h.

    Attributes:
      rounded: gradient and curvature of each row as integers, in one 64-bit word.
      order: the position of each row in its chunk.
      segments: where the rows of each slot begin and end in a chunk.
    """

    rounded: Int32[Array, "N 2"]
    order: UInt16[Array, " N"]
    segments: Int32[Array, "chunks M 2"]


class GrowState(NamedTuple):
    """The rows and the tree so far, in the order of the kernels' operands."""

    rounded: Int32[Array, "N 2"]
    order: UInt16[Array, " N"]
    segments: Int32[Array, "chunks M 2"]
    feature: Int32[Array, " I"]
    threshold: Int32[Array, " I"]
    missing_left: Bool[Array, " I"]
    position: Int32[Array, " M"]
    leaf: Int32[Array, " N"]
    left_codes: UInt32[Array, "I W"] | None = None

    @property
    def rows(self) -> SlotRows:
        """Returns the rows alone."""
        return SlotRows(self.rounded, self.order, self.segments)


def histogram(
    codes: CodeOperands,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """See :func:`jboost.trees.histogram.sum_histogram`."""
    shape = (num_nodes, codes.shape[0], num_bins, channels.shape[1])
    operands = (codes.codes, channels, node, *codes.entries)
    return call("histogram", jax.ShapeDtypeStruct(shape, jnp.int32), *operands)


def find_leaves(
    codes: CodeOperands,
    feature: Int32[Array, " I"],
    threshold: Int32[Array, " I"],
    missing_left: Bool[Array, " I"],
    skip: Bool[Array, " N"],
    leaf: Int32[Array, " N"],
    left_codes: UInt32[Array, "I W"] | None = None,
) -> Int32[Array, " N"]:
    """Finds the leaf of each row; rows with ``skip`` keep the one they have."""
    if left_codes is not None:
        tree = (feature, threshold, missing_left, left_codes)
        operands = (codes.codes, *tree, skip, leaf)
        return call("find_category_leaves", _like(leaf), *operands, aliases={6: 0})
    operands = (codes.codes, feature, threshold, missing_left, skip, leaf)
    operands += codes.entries
    return call("find_leaves", _like(leaf), *operands, aliases={5: 0})


def start_rows(
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"],
    seed: UInt32[Array, "2"],
    *,
    slots: int,
    uniform: bool,
) -> tuple[SlotRows, Float[Array, "2"]]:
    """Rounds the derivatives, and puts all rows in the bag into slot 0.

    Returns:
      The rows, and what one integer of gradient and of curvature stands for.
    """
    num_rows = gradient.shape[0]
    shapes = (
        jax.ShapeDtypeStruct((num_rows, 2), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.uint16),
        jax.ShapeDtypeStruct((-(-num_rows // CHUNK), slots, 2), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    )
    *rows, unit = call(
        "start", shapes, gradient, curvature, in_bag, seed, uniform=int(uniform)
    )
    return SlotRows(*rows), unit


def sum_root(
    codes: CodeOperands,
    rows: SlotRows,
    min_child_samples: Int32[Array, ""],
    *,
    num_bins: int,
    uniform: bool,
) -> Int32[Array, "M C F B"]:
    """Sums the root's histogram, cumulative over bins, into slot 0."""
    slots, channels = rows.segments.shape[1], 2 if uniform else 3
    shape = (slots, channels, codes.shape[0], num_bins)
    sums, *_ = call(
        "sum_root",
        (jax.ShapeDtypeStruct(shape, jnp.int32), *_scratch(codes)),
        codes.packed, *rows, min_child_samples, *codes.entries,
    )  # fmt: skip
    return sums


def find_splits(
    operands: tuple[Array, ...],
    limits: SplitLimits,
    bounds: Any,
    values: Any,
    categories: Any,
) -> SlotSplits:
    """Finds the best split of each slot.

    Args:
      operands: sums, the index of each slot's sums, the slots' positions, the
        features that each slot may be split by, and the unit of the sums.
      limits: the conditions that a split must meet.
      bounds: least and greatest leaf value of each slot; None without ``values``.
      values: a :class:`jboost.trees.splitting.ValueLimits`, or None.
      categories: a :class:`jboost.trees.category_splits.CategoryLimits`, or None;
        not with sparse codes.
    """
    if categories is None:
        return _find_thresholds(operands, limits, bounds, values)
    *sums, masks, unit = operands
    ordered = jnp.ones(masks.shape[1], bool).at[categories.features].set(False)
    # min_gain is subtracted last: rounding could otherwise make gains equal.
    free = limits._replace(min_gain=jnp.float32(0))
    numeric = _find_thresholds(
        (*sums, masks & ordered[None], unit), free, bounds, values
    )
    slots = masks.shape[0]
    words = jax.ShapeDtypeStruct((slots, -(-sums[0].shape[3] // _WORD)), jnp.uint32)
    feature, threshold, missing_left, gain, found, left_codes, absent_codes = call(
        "find_category_splits", (*_split_shapes(slots), words, words), *operands,
        *limits, *categories, *numeric[:4],
        *(() if values is None else (values.l1, bounds)),
    )  # fmt: skip
    child_bounds = numeric.child_bounds
    if child_bounds is not None:  # sets of categories have no order to preserve
        same = jnp.stack([bounds, bounds], axis=1)
        child_bounds = jnp.where((threshold < 0)[:, None, None], same, child_bounds)
    return SlotSplits(
        feature, threshold, missing_left, gain, found, child_bounds, left_codes,
        absent_codes,
    )  # fmt: skip


def _find_thresholds(operands, limits, bounds, values):
    slots = operands[0].shape[0]
    results = _split_shapes(slots)
    if values is None:
        found = call("find_splits", results, *operands, *limits)
        return SlotSplits(*found, child_bounds=None)
    results = (*results, jax.ShapeDtypeStruct((slots, 2, 2), jnp.float32))
    more = (values.l1, bounds, values.monotone)
    return SlotSplits(*call("find_limited_splits", results, *operands, *limits, *more))


def _split_shapes(slots):
    """Returns the shapes of feature, threshold, missing_left, gain and found."""
    kinds = (jnp.int32, jnp.int32, jnp.bool_, jnp.float32, jnp.bool_)
    return tuple(jax.ShapeDtypeStruct((slots,), kind) for kind in kinds)


def split_rows(
    codes: CodeOperands,
    level: Int32[Array, ""],
    split: SlotSplits,
    state: GrowState,
    *,
    max_depth: int,
) -> tuple[GrowState, Int32[Array, " pairs"], Bool[Array, " pairs"]]:
    """Writes a level's splits into the tree, and moves the rows to the children.

    Returns:
      The new state; the slot of each pair's parent, -1 for none; and whether the left
      child of each pair has no more rows than the right one.
    """
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
        codes.codes, level, split.feature, split.threshold, split.missing_left,
        split.found, *sets,
    )  # fmt: skip
    new = call(
        name, results, *before, *arrays, *codes.entries,
        aliases={len(before) + i: i for i in range(len(arrays))}, max_depth=max_depth,
    )  # fmt: skip
    parent, left_smaller = new[len(arrays) :]
    return GrowState(*new[: len(arrays)]), parent, left_smaller


def sum_children(
    codes: CodeOperands,
    rows: SlotRows,
    min_child_samples: Int32[Array, ""],
    parent: Int32[Array, " pairs"],
    left_smaller: Bool[Array, " pairs"],
    index: Int32[Array, " M"],
    sums: Int32[Array, "M C F B"],
) -> tuple[Int32[Array, " M"], Int32[Array, "M C F B"]]:
    """Sums the smaller child of each pair, and subtracts it from the parent's sums.

    Returns:
      The index of each slot's sums, and the sums.
    """
    index, sums, *_ = call(
        "sum_children", (_like(index), _like(sums), *_scratch(codes)),
        codes.packed, *rows, min_child_samples, parent, left_smaller, index, sums,
        *codes.entries, aliases={8: 1},
    )  # fmt: skip
    return index, sums


def _scratch(codes):
    """Returns the shape of the memory that sums of a sparse matrix need, if any."""
    scratch = jax.ShapeDtypeStruct((codes.shape[1], 4), jnp.int32)
    return (scratch,) if codes.entries else ()


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


class BlockRows(NamedTuple):
    """The rows of one block, and their leaves; see :class:`SlotRows`."""

    rounded: Int32[Array, "n 2"]
    order: UInt16[Array, " n"]
    segments: Int32[Array, "chunks M 2"]
    leaf: Int32[Array, " n"]


def split_block(columns, rows, level, split, position, *, max_depth):
    """Moves the rows of a block to the children; at the last level finds their leaves.

    Args:
      columns: codes by feature; ``split.feature`` indexes its rows.
      rows: BlockRows.
      split: feature, threshold, missing_left, gain and found of each slot; where rows
        are missing, missing_left must be the tree's.
      position: of the slots' nodes.
    """
    num_nodes = 2**max_depth - 1
    nothing = jnp.zeros(num_nodes, jnp.int32)
    state = GrowState(
        rows.rounded, rows.order, rows.segments, nothing, nothing,
        jnp.zeros(num_nodes, bool), position, rows.leaf,
    )  # fmt: skip
    codes = CodeOperands(columns, None, (), columns.shape)
    state, _, _ = split_rows(
        codes, level, SlotSplits(*split), state, max_depth=max_depth
    )
    return BlockRows(*state.rows, state.leaf)


def sum_block(columns, rows, num_pairs, left_smaller, sums, *, num_bins):
    """Sums the smaller child of each pair, and subtracts it from ``sums``.

    ``sum_children`` subtracts a child's sums from its parent's. With parents that
    start at zero, in the upper half of the slots, the differences accumulate the
    negative sums of all blocks; the lower half is scratch memory.

    Args:
      num_pairs: slots 2r and 2r + 1 are a pair for r below it.
      left_smaller: of each pair.
      sums: [slots, channels, F, B], cumulative over bins.
    """
    pairs = sums.shape[0] // 2
    pair = jnp.arange(pairs, dtype=jnp.int32)
    index = jnp.concatenate([pairs + pair, jnp.zeros(pairs, jnp.int32)])
    packed = code_operands.pack(columns, num_bins)
    return sum_children(
        CodeOperands(columns, packed, (), columns.shape),
        SlotRows(rows.rounded, rows.order, rows.segments),
        jnp.int32(2),  # above 1, so that rows are always counted
        jnp.where(pair < num_pairs, pair, -1),
        left_smaller,
        index,
        sums,
    )[1]
