# SPDX-License-Identifier: Apache-2.0
"""Grows a tree on blocks of rows, which are read one after the other.

Each level takes one pass, which routes the rows by the splits of the level before and
sums the histograms of the smaller children, which counts of rows determine before it.
Sums are integers: for any blocks and processes, plain XLA (the definition, which comes
first) and the CPU kernels grow the tree of ``grow_tree``.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt8, UInt32

from jboost.boosting.method import Method
from jboost.codes.codes import DenseCodes
from jboost.entry.context import current_implementation
from jboost.entry.exchanges import add_processes, agree
from jboost.entry.programs import compiled
from jboost.kernels import grow_cpu, levels_cpu
from jboost.kernels.calls import call_on_host
from jboost.kernels.exact_sums import join_digits
from jboost.numerics.exact import FixedPoint, fit_scale
from jboost.streams.blocks import (
    NUM_BUFFERS,
    Block,
    BlockReader,
    BlockSet,
    count_row_bytes,
)
from jboost.streams.folders import BlockError, added_bytes, count_bytes, trim_heap
from jboost.trees.grow import make_level_limits
from jboost.trees.histogram import sum_plain_histogram
from jboost.trees.levels import (
    Pairs,
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
from jboost.trees.rounding import Quantization, make_measure, round_rows
from jboost.trees.splitting import Split
from jboost.trees.tree import Tree


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
    """Derivatives of all rows, and how often they count, as splits see them.

    ``measure`` is None where the CPU kernels measure the rows of one process.
    """

    gradient: Float[Array, " N"]
    curvature: Float[Array, " N"]
    in_bag: UInt8[Array, " N"]
    limits: TreeLimits
    measure: Quantization | None


class _BlockState(NamedTuple):
    """The rows of a block."""

    channels: Int32[Array, "n C"]
    in_bag: Bool[Array, " n"]
    slot: Int32[Array, " n"]
    position: Int32[Array, " n"]


class PlainGrower:
    """Grows trees one after the other.

    A tree takes these steps: ``start``; for each level ``add`` for every block, then
    ``find``, until it returns False; ``finish`` for every block; ``end``. Between
    ``add`` and ``find``, ``sums`` holds the integer sums over the rows of all blocks;
    the caller may add the sums of other processes.
    """

    def __init__(self, method: Method, blocks: BlockSet, num_rows: int, first_row: int):
        self._first_row = first_row
        most = min(method.max_nodes, 1 << (max(1, num_rows) - 1).bit_length())
        slots = max(2, min(2 ** (method.max_depth - 1), most))  # at least a pair
        self._states: Any = None
        self._leaf: Any = None
        self._nodes: Any = None
        self._sizes = (method.max_depth, method.num_bins, slots)
        self._uniform, self._max_leaves = method.uniform, method.max_leaves
        channels = 2 if method.uniform else 3
        self._shape = (slots // 2, blocks.num_features, method.num_bins, channels)

    def read(self, reader: BlockReader) -> Any:
        """Yields blocks with the codes that the other methods take."""
        return reader.read()

    def start(
        self,
        rows: Derivatives,
        words: UInt32[np.ndarray, "2"],
        leaf: Int32[np.ndarray, " N"],
        blocks: BlockSet,
    ) -> None:
        """Rounds the rows of all blocks to integers."""
        self._words, self._leaf = words, leaf
        assert rows.measure is not None
        self._given = rows.limits, rows.measure.unit
        self._limits, unit = compiled(to_search_units)(*self._given)
        self._measure = rows.measure._replace(unit=unit)
        self._states = [self._start_block(rows, words, each) for each in blocks.blocks]
        self._level = 0
        self._step: Any = None
        self.sums = jnp.zeros(self._shape, jnp.int32)

    def _start_block(self, rows, words, block):
        static, first = (self._uniform, block.num_rows), np.int32(block.first_row)
        everywhere = np.int32(self._first_row + block.first_row)
        cut = compiled(_cut_rows, *static)
        channels, in_bag = cut(rows, words, first, everywhere)
        start = jnp.zeros(block.num_rows, jnp.int32)
        return _BlockState(channels, in_bag, start, start)

    def add(self, block: Block, codes: Shaped[np.ndarray, "F n"]) -> None:
        """Routes the rows of a block to the level's nodes, and adds their sums."""
        state = self._states[block.number]
        if self._step is None:
            self.sums = compiled(_sum_all)(state, codes, self.sums)
        else:
            move = compiled(_move, *self._sizes)
            state, self.sums = move(state, codes, self._step, self.sums)
            self._states[block.number] = state
        # Wait: the buffer of the codes is reused after the next block.
        jax.block_until_ready((state, self.sums))

    def find(self) -> bool:
        """Finds the splits of the level; returns whether another one follows."""
        if self._step is None:
            make_root = compiled(_make_root, self._max_leaves, *self._sizes)
            self._nodes = make_root(self.sums, self._limits)
        else:
            join = compiled(_join, self._sizes[2])
            self._nodes = join(self._nodes.histogram, self._step, self.sums)
        self._step = compiled(_find, *self._sizes)(
            np.int32(self._level), self._nodes, self._measure, self._words, self._limits
        )
        self.sums = jnp.zeros(self._shape, jnp.int32)
        self._level += 1
        return int(self._step.num_found) > 0 and self._level < self._sizes[0]

    def finish(self, block: Block, codes: Shaped[np.ndarray, "F n"]) -> None:
        """Writes the leaves of the rows of a block."""
        state, level = self._states[block.number], np.int32(self._level - 1)
        find = compiled(_find_leaves, *self._sizes)
        leaf = find(state, codes, level, self._step)
        self._leaf[block.first_row : block.first_row + block.num_rows] = leaf

    def end(self) -> Tree:
        """Returns the tree, and releases the rows."""
        step, self._states, self._leaf, self._nodes = self._step, None, None, None
        bounds = compiled(restore_bounds)(step.paths.leaf_bounds, *self._given)
        return step.tree._replace(bounds=bounds)

    def kept_bytes(self) -> int:
        """Returns the bytes of a row that stay in memory from tree to tree."""
        return 0

    def row_bytes(self) -> int:
        """Returns the bytes of a row while a tree grows, besides its leaf."""
        return 4 * self._shape[3] + 1 + 4 + 4

    def start_bytes(self, rows: Any, words: Any, num_rows: int) -> int:
        """Returns the bytes that the start of a tree adds to its rows."""
        static, first = (self._uniform, num_rows), np.int32(0)
        return added_bytes(compiled(_cut_rows, *static), rows, words, first, first)

    def block_bytes(self, blocks: BlockSet) -> int:
        """Returns the bytes of the blocks, and those that routing and sums take."""
        shape: Any = jax.ShapeDtypeStruct
        num_rows, num_features = blocks.block_rows, blocks.num_features
        rows = shape((num_rows,), np.int32)
        channels = shape((num_rows, self._shape[3]), np.int32)
        state = _BlockState(channels, shape((num_rows,), bool), rows, rows)
        codes = shape((num_features, num_rows), blocks.dtype)
        added = added_bytes(
            compiled(_sum_all), state, codes, shape(self._shape, np.int32)
        )
        row = NUM_BUFFERS * num_features * blocks.dtype.itemsize
        return row * num_rows + added + count_bytes(rows)

    def node_bytes(self, limits: TreeLimits) -> int:
        """Returns the bytes of a level: its nodes, splits, and the next level's."""
        sums: Any = jax.ShapeDtypeStruct(self._shape, np.int32)
        make = partial(_make_root, self._max_leaves, *self._sizes)
        nodes = jax.eval_shape(make, sums, limits)
        scalar: Any = np.int32(0)
        some: Any = np.zeros(2, np.float32)
        words: Any = np.zeros(2, np.uint32)
        measure = Quantization(FixedPoint(some, some, scalar > 0), some, scalar)
        operands = (scalar, nodes, measure, words, limits)
        step = jax.eval_shape(partial(_find, *self._sizes), *operands)
        join = compiled(_join, self._sizes[2])
        joined = added_bytes(join, nodes.histogram, step, sums)
        found = added_bytes(compiled(_find, *self._sizes), *operands)
        return count_bytes((nodes, step)) + max(found, count_bytes(sums) + joined)


def _cut_rows(uniform, size, rows, words, first_row, first_of_all):
    """Returns the integers of a block, and which of its rows are in the bag.

    The first row has one number in this process, and one among all rows.
    """
    parts = (rows.gradient, rows.curvature, rows.in_bag)
    gradient, curvature, in_bag = (
        jax.lax.dynamic_slice(part, (first_row,), (size,)) for part in parts
    )
    channels = round_rows(
        gradient, curvature, in_bag, words, rows.measure, uniform, first_of_all
    )
    return channels, in_bag > 0


def _sum_all(state, columns, sums):
    node = jnp.where(state.in_bag, jnp.int32(0), -1)
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
        step.left_smaller,
        state.in_bag,
        state.slot,
        state.position,
        slots=slots,
    )


def _move(max_depth, num_bins, slots, state, columns, step, sums):
    moved = _route(slots, state, columns, step)
    sums = sums + _sum(columns, state.channels, moved.node, sums)
    return state._replace(slot=moved.slot, position=moved.position), sums


def _find_leaves(max_depth, num_bins, slots, state, columns, level, step):
    moved = _route(slots, state, columns, step)
    return moved.position << (max_depth - 1 - level)


def _make_root(max_leaves, max_depth, num_bins, slots, sums, limits):
    """Makes the first level: the root in slot 0, the other slots empty."""
    return LevelNodes(
        histogram=jnp.zeros((slots, *sums.shape[1:]), jnp.int32).at[0].set(sums[0]),
        position=jnp.full(slots, -1, jnp.int32).at[0].set(0),
        tree=make_leaf(max_depth, num_bins),
        paths=start_paths(limits, max_leaves, slots, max_depth),
    )


def _find(max_depth, num_bins, slots, level, nodes, measure, words, limits):
    split = find_splits(
        level, nodes.histogram, nodes.position, nodes.paths, measure.unit,
        measure.num_in_bag, words, limits,
    )  # fmt: skip
    count = count_sides(nodes.histogram, split)
    split, left_smaller, _ = settle_splits(split, count, num_bins)
    pairs = pair_children(nodes.position, split, slots)
    return Step(
        split=split,
        left_smaller=left_smaller,
        pairs=pairs,
        num_found=jnp.sum(split.found, dtype=jnp.int32),
        tree=write_splits(level, nodes.position, nodes.tree, split),
        paths=pass_paths(
            nodes.paths, level, nodes.position, split, pairs.source, slots, max_depth
        ),
    )


def _join(slots, histogram, step, sums):
    pairs = step.pairs
    joined = join_children(histogram, pairs.source, step.left_smaller, sums, slots)
    return LevelNodes(joined, pairs.position, step.tree, step.paths)


# Codes by feature and by row.
BothLayouts = tuple[Shaped[np.ndarray, "F n"], Shaped[np.ndarray, "b n w"]]


class _Sizes(NamedTuple):
    max_depth: int
    max_leaves: int
    num_slots: int
    channels: int
    num_features: int
    num_bins: int
    uniform: bool


class NativeGrower:
    """Grows trees one after the other; see :class:`PlainGrower` for the steps."""

    def __init__(self, method: Method, blocks: BlockSet, num_rows: int, first_row: int):
        self._first_row = first_row
        most = min(method.max_nodes, 1 << (max(1, num_rows) - 1).bit_length())
        self._sizes = _Sizes(
            max_depth=method.max_depth,
            max_leaves=method.max_leaves or 0,
            num_slots=min(2 ** (method.max_depth - 1), most),
            channels=2 if method.uniform else 3,
            num_features=blocks.num_features,
            num_bins=method.num_bins,
            uniform=method.uniform,
        )
        self._rows: Any = None
        self._state: Any = None
        self._in_bag: Any = None
        self._leaf: Any = None

    def read(self, reader: BlockReader) -> Any:
        """Yields blocks with the codes that the other methods take."""
        return reader.read_for_kernels(self._needed)

    def start(
        self,
        rows: Derivatives,
        words: UInt32[np.ndarray, "2"],
        leaf: Int32[np.ndarray, " N"],
        blocks: BlockSet,
    ) -> None:
        """Rounds the rows of all blocks to integers."""
        sizes = self._sizes
        gradient, curvature = np.asarray(rows.gradient), np.asarray(rows.curvature)
        self._in_bag = in_bag = np.asarray(rows.in_bag)
        measure = rows.measure or _measure(gradient, curvature, in_bag, sizes.uniform)
        self._given = rows.limits, measure.unit
        prepare = compiled(make_level_limits, sizes.num_features)
        limits = prepare(rows.limits, words, measure.unit)
        self._limits = jax.tree.map(np.asarray, limits)
        scale = np.asarray(measure.fixed.scale)
        stochastic = np.asarray(measure.fixed.stochastic)
        if self._rows is None:
            self._rows = [self._make_rows(block) for block in blocks.blocks]
            self._state = _make_zeros(_shape_state(sizes, limits))
        self._level, self._leaf = 0, leaf
        self._summed, self._needed = np.zeros(1, np.int32), []
        self._splits: Any = None
        self._zero_sums()
        for block in blocks.blocks:
            own = _rows_of(block)
            levels_cpu.start_rows(
                gradient[own], curvature[own], in_bag[own], words, scale, stochastic,
                np.array(self._first_row + block.first_row, np.int32),
                num_slots=sizes.num_slots, uniform=sizes.uniform,
                into=self._rows[block.number],
            )  # fmt: skip

    def _make_rows(self, block):
        """Makes the memory of a block's rows, which is kept from tree to tree."""
        shapes = levels_cpu.shape_rows(block.num_rows, self._sizes.num_slots)
        return _make_zeros(shapes)

    def add(self, block: Block, codes: BothLayouts) -> None:
        """Routes the rows of a block to the level's nodes, and adds their sums."""
        own, sizes = self._rows[block.number], self._sizes
        sums = (self._limits.limits.num_features, self._summed, self.sums)
        if self._splits is None:
            levels_cpu.sum_slots(codes[1], own, *sums)
            return
        levels_cpu.route_and_sum(
            codes, self._splits, own, self._leaf[_rows_of(block)], *sums,
            level=self._level - 1, max_depth=sizes.max_depth,
        )  # fmt: skip

    def find(self) -> bool:
        """Finds the splits of the level; returns whether another one follows."""
        sizes = self._sizes
        self._state, self._splits, self._summed = levels_cpu.find_level(
            self._limits, self.sums, self._summed, None, None, self._state,
            level=self._level, max_depth=sizes.max_depth, max_leaves=sizes.max_leaves,
        )  # fmt: skip
        self._level += 1
        self._zero_sums()
        grows = bool(self._summed[0] >= 0)
        features = self._splits.feature[self._splits.found]
        if not grows and not self._in_bag.all():  # others go down the whole tree
            features = self._state.feature
        self._needed = sorted({*features.tolist()})
        return grows

    def finish(self, block: Block, codes: BothLayouts) -> None:
        """Writes the leaves of the rows of a block."""
        self._route(block, codes)
        state, own, level = self._state, _rows_of(block), self._level
        if level < self._sizes.max_depth:  # the level's children are leaves
            nowhere = np.zeros_like(self._splits.found)
            splits = self._splits._replace(position=state.position, found=nowhere)
            self._route(block, codes, splits, level)
        leaf = self._leaf[own]
        call_on_host(
            "find_leaves", leaf, codes[0], state.feature, state.threshold,
            state.missing_left, self._in_bag[own] > 0, leaf,
        )  # fmt: skip

    def end(self) -> Tree:
        """Returns the tree."""
        state, self._in_bag, self._leaf = self._state, None, None
        no_values: Any = np.zeros(2**self._sizes.max_depth, np.float32)
        bounds: Any = compiled(restore_bounds)(state.leaf_bounds, *self._given)
        bounds = bounds if bounds is None else np.asarray(bounds)
        return Tree(
            state.feature.copy(),
            state.threshold.copy(),
            state.missing_left.copy(),
            leaf_value=no_values,
            bounds=bounds,
        )

    def kept_bytes(self) -> int:
        """Returns the bytes of a row that stay in memory from tree to tree."""
        return 8 + 2 + -(-8 * self._sizes.num_slots // grow_cpu.CHUNK)

    def row_bytes(self) -> int:
        """Returns the bytes of a row while a tree grows, besides its leaf."""
        return 1  # the number of times that it counts

    def start_bytes(self, rows: Any, words: Any, num_rows: int) -> int:
        """Returns the bytes that the start of a tree adds to its rows."""
        del rows, words, num_rows
        return 0

    def block_bytes(self, blocks: BlockSet) -> int:
        """Returns the bytes of the blocks that are in memory."""
        row = count_row_bytes(blocks.num_features, blocks.dtype)
        row += blocks.num_features * blocks.dtype.itemsize
        return NUM_BUFFERS * row * blocks.block_rows

    def node_bytes(self, limits: TreeLimits) -> int:
        """Returns the bytes of the nodes of a level."""
        sizes = self._sizes
        some: Any = np.zeros(2, np.float32)
        words, unit = np.zeros(2, np.uint32), some
        prepare = partial(make_level_limits, sizes.num_features)
        shapes = jax.eval_shape(prepare, limits, seed=words, unit=unit)
        state = _shape_state(sizes, shapes)
        table = math.prod(state.histograms.shape[1:])
        sums = 4 * table * levels_cpu.count_pairs(sizes.max_depth - 1, sizes.num_slots)
        # The kernels keep a few tables of sums in 64 bits, twice as wide with counts.
        scratch = 8 * 4 * 2 * sizes.num_features * max(256, sizes.num_bins)
        return count_bytes(state) + 2 * sums + scratch

    def _route(self, block, codes, splits=None, level=None):
        """Routes by the splits of the level before, if no others are given."""
        levels_cpu.route_rows(
            codes[0], splits or self._splits, self._rows[block.number],
            self._leaf[_rows_of(block)], max_depth=self._sizes.max_depth,
            level=self._level - 1 if level is None else level,
        )  # fmt: skip

    def _zero_sums(self):
        """Sets the sums of the nodes that are summed next, [nodes, C, F, B], to 0."""
        sizes = self._sizes
        shape = (*self._summed.shape, *sizes[3:6])
        self.sums = np.zeros(shape, np.int32)


def _measure(gradient, curvature, in_bag, uniform):
    """Computes :func:`jboost.trees.rounding.measure_rows` without copies of rows."""
    greatest, count = levels_cpu.find_greatest_derivatives(gradient, curvature, in_bag)
    digits = levels_cpu.sum_magnitudes(gradient, curvature, in_bag, greatest)
    return compiled(_fit_measure, uniform)(greatest, digits, count)


def _fit_measure(uniform, greatest, digits, num_in_bag):
    total = jnp.where(jnp.isfinite(greatest), join_digits(digits, greatest), jnp.inf)
    fixed = fit_scale(total, num_in_bag)
    return make_measure(fixed, num_in_bag, greatest[1] if uniform else None)


def _make_zeros(shapes):
    return jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes)


def _shape_state(sizes, limits):
    return levels_cpu.shape_state(
        limits, max_depth=sizes.max_depth, num_slots=sizes.num_slots,
        sums_shape=sizes[3:6],
    )  # fmt: skip


def _rows_of(block):
    return slice(block.first_row, block.first_row + block.num_rows)


Grower = PlainGrower | NativeGrower


def make_grower(
    method: Method, blocks: BlockSet, num_rows: int, first_row: int
) -> Grower:
    """Returns the grower of the trees of a run, for the current implementation.

    Args:
      num_rows: the number of rows of all processes.
      first_row: the number of the first row of this process among all rows.
    """
    make = NativeGrower if current_implementation() == "cpu" else PlainGrower
    return make(method, blocks, num_rows, first_row)


def grow_blocks(
    grower: Grower,
    reader: BlockReader,
    words: UInt32[np.ndarray, "2"],
    measure_all: Callable[[], Derivatives],
    leaf: Int32[np.ndarray, " N"],
) -> Tree:
    """Grows one tree, and writes the leaf of every row to ``leaf``.

    ``measure_all`` returns the derivatives. They are released before the first pass,
    because each block keeps its own rows as integers.
    """
    grower.start(measure_all(), words, leaf, reader.set)
    trim_heap(leaf.nbytes)  # the derivatives are free now
    while True:
        with agree(BlockError):
            for block, codes in grower.read(reader):
                grower.add(block, codes)
                del codes
        grower.sums = add_processes(grower.sums)
        if not grower.find():
            break
    with agree(BlockError):
        for block, codes in grower.read(reader):
            grower.finish(block, codes)
            del codes
    leaf[reader.set.num_rows :] = leaf[:1]  # these rows repeat the first one
    return grower.end()
