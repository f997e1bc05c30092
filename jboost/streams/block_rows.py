# SPDX-License-Identifier: Apache-2.0
"""Rows of a block: routed down a tree and summed, by the CPU kernels or plain XLA.

In: codes of a block, and the splits of a level. Out: the nodes of its rows, and sums
of the smaller children. Both implementations give the same integers.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt8

from jboost.boosting.method import Method
from jboost.codes.codes import DenseCodes
from jboost.entry.implementation import current_implementation
from jboost.entry.programs import compiled, count_bytes
from jboost.kernels import code_operands, grow_cpu
from jboost.streams.blocks import BlockSet
from jboost.trees.histogram import sum_plain_histogram
from jboost.trees.levels import Measure, Pairs, round_rows, route_rows
from jboost.trees.limits import TreeLimits
from jboost.trees.paths import Paths
from jboost.trees.splitting import Split
from jboost.trees.tree import Tree

_LEAST_COLUMNS = 8  # read even if fewer are needed, so that few shapes compile


class LevelNodes(NamedTuple):
    """The nodes of a level, in slots."""

    histogram: Int32[Array, "M F B C"]
    position: Int32[Array, " M"]
    tree: Tree
    paths: Paths


class Step(NamedTuple):
    """The splits of a level, before its rows are routed."""

    split: Split
    left_smaller: Bool[Array, " M"]
    pairs: Pairs
    num_found: Int32[Array, ""]
    tree: Tree
    paths: Paths


class Derivatives(NamedTuple):
    """Derivatives of all rows, and how often they count, as splits see them."""

    gradient: Float[Array, " N"]
    curvature: Float[Array, " N"]
    in_bag: UInt8[Array, " N"]
    measure: Measure
    limits: TreeLimits


def make_way(method: Method, blocks: BlockSet, num_rows: int) -> Any:
    """Returns how the rows of a block are routed and summed."""
    most = min(method.max_nodes, 1 << (max(1, num_rows) - 1).bit_length())
    slots = max(2, min(2 ** (method.max_depth - 1), most))  # at least a pair
    make = _Kernels if current_implementation() == "cpu" else _PlainXla
    sizes = (method.max_depth, method.num_bins, slots)
    return make(sizes, method.uniform, blocks.num_features)


class _PlainXla:
    """Rows of a block in plain XLA: the definition."""

    class PlainState(NamedTuple):
        channels: Int32[Array, "n C"]
        in_bag: Bool[Array, " n"]
        slot: Int32[Array, " n"]
        position: Int32[Array, " n"]

    def __init__(self, sizes, uniform, num_features):
        self.sizes, self._uniform = sizes, uniform
        _, num_bins, slots = sizes
        self._shape = (slots // 2, num_features, num_bins, 2 if uniform else 3)

    def prepare(self, rows, words, block):
        static, first = (self._uniform, block.num_rows), np.int32(block.first_row)
        channels, in_bag = compiled(_cut_rows, *static)(rows, words, first)
        start = jnp.zeros(block.num_rows, jnp.int32)
        return self.PlainState(channels, in_bag, start, start)

    def zeros(self):
        return jnp.zeros(self._shape, jnp.int32)

    def row_bytes(self):
        return 4 * self._shape[3] + 1 + 4 + 4

    def prepare_bytes(self, rows, words, num_rows):
        """Returns the bytes needed to prepare a block, besides its state."""
        static, first = (self._uniform, num_rows), np.int32(0)
        return compiled(_cut_rows, *static).added_bytes(rows, words, first)

    def pass_bytes(self, num_rows, dtype):
        """Returns the bytes needed to route and sum the rows of a block."""
        shape: Any = jax.ShapeDtypeStruct
        rows = shape((num_rows,), np.int32)
        channels = shape((num_rows, self._shape[3]), np.int32)
        state = self.PlainState(channels, shape((num_rows,), bool), rows, rows)
        codes = shape((self._shape[1], num_rows), dtype)
        sums = shape(self._shape, np.int32)
        added = compiled(_sum_all).added_bytes(state, codes, sums)
        return added + count_bytes(rows)

    def sum_all(self, state, codes, sums):
        return compiled(_sum_all)(state, codes, sums)

    def move(self, state, codes, level, nodes, step, sums):
        del level, nodes
        return compiled(_move, *self.sizes)(state, codes, step, sums)

    @staticmethod
    def unpack(sums):
        return sums

    def features_of_leaves(self, step, others):
        del others
        found = np.asarray(step.split.found)
        return _widen(np.asarray(step.split.feature)[found], self._shape[1])

    def find_leaves(self, state, codes, level, nodes, step, wanted):
        del nodes
        feature = _renumber(np.asarray(step.split.feature), wanted)
        step = step._replace(split=step.split._replace(feature=feature))
        find = compiled(_find_leaves, *self.sizes)
        return find(state, codes, np.int32(level), step)


def _cut_rows(uniform, size, rows, words, first_row):
    """Returns the integers of a block, and which of its rows are in the bag."""
    parts = (rows.gradient, rows.curvature, rows.in_bag)
    gradient, curvature, in_bag = (
        jax.lax.dynamic_slice(part, (first_row,), (size,)) for part in parts
    )
    channels = round_rows(
        gradient, curvature, in_bag, words, rows.measure, uniform, first_row
    )
    return channels, in_bag > 0


def _sum_all(state, columns, sums):
    node = jnp.where(state.in_bag, 0, -1)
    return sums + _sum(columns, state.channels, node, sums)


def _sum(columns, channels, node, sums):
    num_nodes, _, num_bins, _ = sums.shape
    return sum_plain_histogram(
        DenseCodes(columns), channels, node, num_nodes=num_nodes, num_bins=num_bins
    )


def _route(slots, state, columns, step):
    return route_rows(
        DenseCodes(columns),
        step.split,
        step.pairs.pair,
        state.slot,
        state.position,
        slots,
    )


def _move(max_depth, num_bins, slots, state, columns, step, sums):
    moved = _route(slots, state, columns, step)
    left_smaller = jnp.append(step.left_smaller, False)[state.slot]
    smaller = (moved.right == 0) == left_smaller
    node = jnp.where(state.in_bag & smaller, moved.pair, -1)
    sums = sums + _sum(columns, state.channels, node, sums)
    return state._replace(slot=moved.slot, position=moved.position), sums


def _find_leaves(max_depth, num_bins, slots, state, columns, level, step):
    moved = _route(slots, state, columns, step)
    return moved.position << (max_depth - 1 - level)


class _Kernels:
    """Rows of a block in the layout of the CPU kernels; see kernels/native/grow.h."""

    class KernelState(NamedTuple):
        rows: grow_cpu.BlockRows
        in_bag: Bool[Array, " n"]

    def __init__(self, sizes, uniform, num_features):
        self.sizes, self._uniform = sizes, uniform
        _, num_bins, slots = sizes
        self._shape = (slots, 2 if uniform else 3, num_features, num_bins)

    def prepare(self, rows, words, block):
        static, first = (self._uniform, block.num_rows), np.int32(block.first_row)
        pairs, in_bag = compiled(_cut_words, *static)(rows, words, first)
        bag = np.asarray(in_bag)
        grouped = _group_rows(np.asarray(pairs), bag, self.sizes[2])
        nowhere = np.zeros(block.num_rows, np.int32)
        rows = grow_cpu.BlockRows(*map(jnp.asarray, (*grouped, nowhere)))
        return self.KernelState(rows, in_bag)

    def zeros(self):
        return jnp.zeros(self._shape, jnp.int32)

    def row_bytes(self):
        return 8 + 2 + 4 + 1

    def prepare_bytes(self, rows, words, num_rows):
        """Returns the bytes needed to prepare a block, besides its state."""
        static, first = (self._uniform, num_rows), np.int32(0)
        return compiled(_cut_words, *static).added_bytes(rows, words, first)

    def pass_bytes(self, num_rows, dtype):
        """Returns the bytes needed to route and sum rows: their codes by row."""
        packed = code_operands.packed_shape(self._shape[2], num_rows)
        return math.prod(packed) * np.dtype(dtype).itemsize

    def sum_all(self, state, codes, sums):
        every = np.ones(self.sizes[2] // 2, bool)
        add = compiled(_sum_in_kernels, self.sizes[1], donate=(4,))
        return add(codes, state.rows, np.int32(1), every, sums)

    def move(self, state, codes, level, nodes, step, sums):
        move = compiled(_move_in_kernels, self.sizes, donate=(1, 5))
        position = nodes.position
        rows, sums = move(codes, state.rows, np.int32(level), position, step, sums)
        return state._replace(rows=rows), sums

    @staticmethod
    def unpack(sums):
        """Converts the sums of the kernels: negative, cumulative, in the upper half."""
        sums = -sums[sums.shape[0] // 2 :]
        before = jnp.pad(sums, ((0, 0), (0, 0), (0, 0), (1, 0)))[..., :-1]
        return jnp.moveaxis(sums - before, 1, -1)

    def features_of_leaves(self, step, others):
        feature = np.asarray(step.split.feature)[np.asarray(step.split.found)]
        if others:  # rows that were not routed
            feature = np.append(feature, np.asarray(step.tree.feature))
        return _widen(feature, self._shape[2])

    def find_leaves(self, state, codes, level, nodes, step, wanted):
        split = step.split
        split = split._replace(feature=_renumber(np.asarray(split.feature), wanted))
        tree = step.tree
        tree = tree._replace(feature=_renumber(np.asarray(tree.feature), wanted))
        find = compiled(_find_leaves_in_kernels, self.sizes[0])
        return find(codes, state, np.int32(level), nodes.position, split, tree)


def _cut_words(uniform, size, rows, words, first_row):
    """Returns rows as words (curvature << 32) + gradient, and those in the bag."""
    channels, in_bag = _cut_rows(uniform, size, rows, words, first_row)
    gradient = channels[:, 0]
    borrowed = channels[:, 1] - (gradient < 0).astype(jnp.int32)
    return jnp.stack([gradient, borrowed], axis=1), in_bag


def _group_rows(words, in_bag, slots):
    """Puts rows in the bag first, chunk by chunk, all of them in slot 0."""
    size, chunk = len(in_bag), grow_cpu.CHUNK
    num_chunks = -(-size // chunk)
    segments = np.zeros((num_chunks, slots, 2), np.int32)
    order = np.resize(np.arange(chunk, dtype=np.uint16), size)
    if in_bag.all():
        segments[:, 0, 1] = np.minimum(chunk, size - chunk * np.arange(num_chunks))
        return words, order, segments
    words = words.copy()
    for number, first in enumerate(range(0, size, chunk)):
        kept = np.flatnonzero(in_bag[first : first + chunk])
        order[first : first + len(kept)] = kept
        words[first : first + len(kept)] = words[first + kept]
        segments[number, 0, 1] = len(kept)
    return words, order, segments


def _sum_in_kernels(num_bins, columns, rows, num_pairs, left_smaller, sums):
    return grow_cpu.sum_block(
        columns, rows, num_pairs, left_smaller, sums, num_bins=num_bins
    )


def _move_in_kernels(sizes, columns, rows, level, position, step, sums):
    max_depth, num_bins, _ = sizes
    rows = grow_cpu.split_block(
        columns, rows, level, step.split, position, max_depth=max_depth
    )
    left_smaller = step.left_smaller[step.pairs.source]
    return rows, grow_cpu.sum_block(
        columns, rows, step.num_found, left_smaller, sums, num_bins=num_bins
    )


def _find_leaves_in_kernels(max_depth, columns, state, level, position, split, tree):
    rows = grow_cpu.split_block(
        columns, state.rows, level, split, position, max_depth=max_depth
    )
    return grow_cpu.find_leaves(
        DenseCodes(columns).operands,
        tree.feature,
        tree.threshold,
        tree.missing_left,
        state.in_bag,
        rows.leaf,
    )


def _widen(features, num_features):
    """Returns features in order, padded with repeats so that few shapes compile."""
    wanted = sorted({int(feature) for feature in features})
    size = max(_LEAST_COLUMNS, 1 << (len(wanted) - 1).bit_length()) if wanted else 0
    if size >= num_features:
        return list(range(num_features))
    return wanted + wanted[:1] * (size - len(wanted))


def _renumber(features, wanted):
    """Returns the index of features among the columns read; 0 for the others."""
    place = np.zeros(int(np.max(features, initial=0)) + 1, np.int32)
    for number, feature in reversed(list(enumerate(wanted))):
        if feature < len(place):
            place[feature] = number
    return place[features]
