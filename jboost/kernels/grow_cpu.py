# SPDX-License-Identifier: Apache-2.0
"""The operations of native/tree.h and native/grow.h, which grow trees on a CPU.

In: codes, derivatives, limits. Out: a tree and the leaf of each row; for blocks of rows
on disk, histograms and the rows by child node. All results equal those of plain XLA bit
for bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt16, UInt32

from jboost.kernels import code_operands
from jboost.kernels.code_operands import CodeOperands
from jboost.kernels.library import call

CHUNK = 16384  # kChunk of native/grow.h
WORD = 32  # kWordBits of native/categories.h


class SplitLimits(NamedTuple):
    """The conditions that a split must meet; see `jboost.trees.limits.TreeLimits`."""

    l2: Float[Array, ""]
    min_gain: Float[Array, ""]
    min_child_weight: Float[Array, ""]
    min_child_samples: Int32[Array, ""]
    num_features: Int32[Array, ""]


class SlotSplits(NamedTuple):
    """See :class:`jboost.trees.splitting.Split`."""

    feature: Int32[Array, " M"]
    threshold: Int32[Array, " M"]
    missing_left: Bool[Array, " M"]
    gain: Float[Array, " M"]
    found: Bool[Array, " M"]


class TreeSizes(NamedTuple):
    """What the kernel that grows a tree is told of sizes.

    Attributes:
      max_leaves: 0 for no limit.
      num_slots: the most nodes of a level.
      uniform: whether all rows in the bag have the same curvature.
    """

    max_depth: int
    max_leaves: int
    num_bins: int
    num_slots: int
    uniform: int


class GrownTree(NamedTuple):
    """A tree in heap order, and the leaf of each row; None for what was not asked."""

    feature: Int32[Array, " I"]
    threshold: Int32[Array, " I"]
    missing_left: Bool[Array, " I"]
    leaf: Int32[Array, " N"]
    bounds: Float[Array, "L 2"] | None
    left_codes: UInt32[Array, "I W"] | None


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


def grow_tree(
    codes: CodeOperands,
    rows: tuple[Array, ...],
    limits: SplitLimits,
    values: Any,
    groups: Bool[Array, "G F"] | None,
    categories: Any,
    *,
    sizes: TreeSizes,
) -> GrownTree:
    """Grows a whole tree.

    Args:
      codes: the columns and the codes by row.
      rows: gradient, curvature, how many times each row counts, seed, and the
        fractions of features by tree, level and node.
      limits: the conditions that a split must meet.
      values: a :class:`jboost.trees.splitting.ValueLimits`, or None.
      groups: features that may meet on a path, or None.
      categories: a :class:`jboost.trees.category_splits.CategoryLimits`, or None;
        not with sparse codes.
    """
    num_rows, num_features = codes.shape[1], codes.shape[0]
    nodes, words = 2**sizes.max_depth - 1, -(-sizes.num_bins // WORD)
    chunks, channels = -(-num_rows // CHUNK), 2 if sizes.uniform else 3
    shapes: list[Any] = [
        ((nodes,), jnp.int32), ((nodes,), jnp.int32), ((nodes,), jnp.bool_),
        ((num_rows,), jnp.int32),
    ]  # fmt: skip
    shapes += [((nodes + 1, 2), jnp.float32)] if values is not None else []
    shapes += [((nodes, words), jnp.uint32)] if categories is not None else []
    used = len(shapes)
    shapes += [  # memory that the kernel needs
        ((num_rows, 2), jnp.int32), ((num_rows,), jnp.uint16),
        ((chunks, sizes.num_slots, 2), jnp.int32),
        ((sizes.num_slots, channels, num_features, sizes.num_bins), jnp.int32),
    ]  # fmt: skip
    shapes += [((num_rows, 4), jnp.int32)] if codes.entries else []
    layouts = (codes.codes,) if codes.entries else (codes.codes, codes.packed)
    optional = () if values is None else values
    optional += () if groups is None else (groups,)
    optional += () if categories is None else categories
    found = call(
        "grow", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        *layouts, *rows, *limits, *codes.entries, *optional,
        limited=int(values is not None), grouped=int(groups is not None),
        categorical=int(categories is not None), **sizes._asdict(),
    )[:used]  # fmt: skip
    feature, threshold, missing_left, leaf, *rest = found
    bounds = rest.pop(0) if values is not None else None
    left_codes = rest.pop(0) if categories is not None else None
    return GrownTree(feature, threshold, missing_left, leaf, bounds, left_codes)


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
    results = (
        *map(_like, state),
        jax.ShapeDtypeStruct((pairs,), jnp.int32),
        jax.ShapeDtypeStruct((pairs,), jnp.bool_),
    )
    before = (
        codes.codes, level, split.feature, split.threshold, split.missing_left,
        split.found,
    )  # fmt: skip
    *new, parent, left_smaller = call(
        "split_rows", results, *before, *state,
        aliases={len(before) + i: i for i in range(len(state))}, max_depth=max_depth,
    )  # fmt: skip
    return GrowState(*new), parent, left_smaller


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
    index, sums = call(
        "sum_children", (_like(index), _like(sums)),
        codes.packed, *rows, min_child_samples, parent, left_smaller, index, sums,
        aliases={8: 1},
    )  # fmt: skip
    return index, sums


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
        codes, level, SlotSplits(*split[:5]), state, max_depth=max_depth
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
