# SPDX-License-Identifier: Apache-2.0
"""Grows a tree on blocks of rows that are read one after the other.

In: derivatives of all rows, codes in files. Out: the tree that ``grow_tree`` gives,
and the leaf of every row. Each level takes one pass over the blocks, which routes the
rows by the splits of the level before and sums the histograms of the smaller children:

    root       sum | find splits
    level 1    route, sum | join, find splits
    ...
    the end    route to leaves: reads only the columns of the last splits

Sums are of integers, so that it does not matter how rows are cut into blocks. Where
rows go must be known before a pass: counts are summed with the derivatives.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.binning import MISSING
from jboost.blocks import BlockReader, BlockSet
from jboost.histogram import FixedPoint, build_histogram
from jboost.kernels import grow_cpu
from jboost.kernels.paths import Paths
from jboost.levels import (
    Measure,
    Pairs,
    Tree,
    TreeLimits,
    find_splits,
    join_children,
    make_leaf,
    pair_children,
    pass_paths,
    round_rows,
    route_rows,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.rounds import Method
from jboost.splitting import Split

_MOST_PROGRAMS = 128
_LEAST_COLUMNS = 8  # that are read where fewer are needed: few shapes are compiled


class Nodes(NamedTuple):
    """The nodes of a level, in slots."""

    histogram: Int32[Array, "M F B C"]
    position: Int32[Array, " M"]
    tree: Tree
    paths: Paths


class Step(NamedTuple):
    """What is known of a level before its rows move."""

    split: Split
    left_smaller: Bool[Array, " M"]
    pairs: Pairs
    num_found: Int32[Array, ""]
    tree: Tree
    paths: Paths


class Derivatives(NamedTuple):
    """Of all rows, as a tree's splits see them."""

    gradient: Float[Array, " N"]
    curvature: Float[Array, " N"]
    in_bag: Bool[Array, " N"]
    measure: Measure
    limits: TreeLimits


def program(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    *operands: Any,
    donate: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """``function`` compiled for these operands, or for shapes like theirs."""
    leaves, structure = jax.tree.flatten(operands)
    shapes = tuple(
        jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves
    )
    return _compile(function, static, donate, structure, shapes)


@lru_cache(maxsize=_MOST_PROGRAMS)
def _compile(function, static, donate, structure, shapes):
    operands = jax.tree.unflatten(structure, shapes)
    run = jax.jit(partial(function, *static), donate_argnums=donate)
    return run.lower(*operands).compile()


def run(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    *operands: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compiles, if need be, and calls."""
    return program(function, static, *operands, donate=donate)(*operands)


def grow_blocks(
    reader: BlockReader,
    method: Method,
    words: UInt32[Array, "2"],
    measure_all: Callable[[], Derivatives],
    leaf: Int32[np.ndarray, " N"],
) -> Tree:
    """Grows one tree, and writes the leaf of every row to ``leaf``.

    ``measure_all`` gives the derivatives, which are not kept: each block gets its own
    rows as integers.

    Raises:
      BlockError: a block cannot be read.
    """
    way, blocks = make_way(method, reader.set, len(leaf)), reader.set.blocks
    sizes, rows = way.sizes, measure_all()
    states = [way.prepare(rows, words, block) for block in blocks]
    measure, limits = rows.measure, rows.limits
    del rows

    sums = way.zeros()
    for block, codes in reader.read():
        # Waiting, because the buffer of the codes is used again after the next block.
        sums = jax.block_until_ready(way.sum_all(states[block.number], codes, sums))
    start = (way.unpack, method.max_leaves, *sizes)
    nodes, level = run(_make_root, start, sums, limits), 0
    while True:
        step = run(_step, sizes, np.int32(level), nodes, measure, words, limits)
        if int(step.num_found) == 0 or level == method.max_depth - 1:
            break
        sums = way.zeros()
        for block, codes in reader.read():
            moved = way.move(states[block.number], codes, level, nodes, step, sums)
            states[block.number], sums = jax.block_until_ready(moved)
        nodes = run(_join, (way.unpack, sizes[2]), nodes.histogram, step, sums)
        level += 1

    wanted = way.features_of_leaves(step, int(measure.num_in_bag) < reader.set.num_rows)
    for block, codes in _read_some(reader, wanted):
        end = block.first_row + block.num_rows
        leaf[block.first_row : end] = way.find_leaves(
            states[block.number], codes, level, nodes, step, wanted
        )
    leaf[reader.set.num_rows :] = leaf[0]  # these rows repeat the first one
    return step.tree._replace(bounds=step.paths.leaf_bounds)


def make_way(method: Method, blocks: BlockSet, num_rows: int) -> Any:
    """How the rows of a block are moved and summed: with kernels, or in plain XLA."""
    most = min(method.max_nodes, 1 << (max(1, num_rows) - 1).bit_length())
    slots = max(2, min(2 ** (method.max_depth - 1), most))  # at least a pair
    make = _Kernels if method.implementation == "cpu" else _PlainXla
    sizes = (method.max_depth, method.num_bins, slots)
    return make(sizes, method.uniform, blocks.num_features)


def count_node_bytes(way: Any, method: Method, limits: TreeLimits) -> int:
    """What a level's histograms take while splits are found and the next are made."""
    sums = jax.eval_shape(way.zeros)
    make = partial(_make_root, way.unpack, method.max_leaves, *way.sizes)
    nodes = jax.eval_shape(make, sums, limits)
    scalar: Any = np.int32(0)
    some: Any = np.zeros(2, np.float32)
    words: Any = np.zeros(2, np.uint32)
    measure = Measure(FixedPoint(some, some, scalar > 0), some, scalar)
    operands = (scalar, nodes, measure, words, limits)
    step = jax.eval_shape(partial(_step, *way.sizes), *operands)
    join = program(_join, (way.unpack, way.sizes[2]), nodes.histogram, step, sums)
    find = program(_step, way.sizes, *operands)
    held = count_bytes((nodes, step))
    return held + max(added_bytes(find), count_bytes(sums) + added_bytes(join))


def count_bytes(arrays: Any) -> int:
    """What arrays, or shapes of such, take."""
    return sum(
        math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def added_bytes(executable: Any) -> int:
    """What a program takes beside its operands: its results and its own room."""
    found = executable.memory_analysis()
    if found is None:
        return 0
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return max(0, results) + found.temp_size_in_bytes


def _make_root(unpack, max_leaves, max_depth, num_bins, slots, sums, limits):
    """The first level: the root in slot 0, the other slots empty."""
    sums = unpack(sums)
    return Nodes(
        histogram=jnp.zeros((slots, *sums.shape[1:]), jnp.int32).at[0].set(sums[0]),
        position=jnp.full(slots, -1, jnp.int32).at[0].set(0),
        tree=make_leaf(max_depth, num_bins),
        paths=start_paths(limits, max_leaves, slots, max_depth),
    )


def _step(max_depth, num_bins, slots, level, nodes, measure, words, limits):
    split = find_splits(
        level, nodes.histogram, nodes.position, nodes.paths, measure.unit,
        measure.num_in_bag, words, limits,
    )  # fmt: skip
    count = _count_sides(nodes.histogram, split)
    split, left_smaller = settle_splits(split, count, num_bins)
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


def _count_sides(histogram, split):
    """Rows in the bag of each slot: at or below the threshold, above it, missing."""
    slots, _, num_bins, _ = histogram.shape
    # The last channel counts rows, also where it is the curvature of uniform ones.
    count = histogram[jnp.arange(slots), split.feature, :, -1]
    code = jnp.arange(num_bins)[None, :]
    below = (code > MISSING) & (code <= split.threshold[:, None])
    left = jnp.sum(jnp.where(below, count, 0), axis=1)
    missing = count[:, MISSING]
    right = jnp.sum(count, axis=1) - left - missing
    return jnp.stack([left, right, missing], axis=1)


def _join(unpack, slots, histogram, step, sums):
    pairs = step.pairs
    joined = join_children(
        histogram, pairs.source, step.left_smaller, unpack(sums), slots
    )
    return Nodes(joined, pairs.position, step.tree, step.paths)


def _read_some(reader, features):
    """Blocks with the columns of some features; without reading if there are none."""
    if features:
        yield from reader.read(features)
        return
    for block in reader.set.blocks:
        yield block, np.zeros((1, block.num_rows), reader.set.dtype)


def _widen(features, num_features):
    """Features in order, some more than once so that few shapes are compiled."""
    wanted = sorted({int(feature) for feature in features})
    size = max(_LEAST_COLUMNS, 1 << (len(wanted) - 1).bit_length()) if wanted else 0
    if size >= num_features:
        return list(range(num_features))
    return wanted + wanted[:1] * (size - len(wanted))


def _renumber(features, wanted):
    """Where features lie in the columns that were read; 0 for those that were not."""
    place = np.zeros(int(np.max(features, initial=0)) + 1, np.int32)
    for number, feature in reversed(list(enumerate(wanted))):
        if feature < len(place):
            place[feature] = number
    return place[features]


class _PlainXla:
    """Rows of a block in plain XLA: the definition."""

    class State(NamedTuple):
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
        channels, in_bag = run(_cut_rows, static, rows, words, first)
        start = jnp.zeros(block.num_rows, jnp.int32)
        return self.State(channels, in_bag, start, start)

    def zeros(self):
        return jnp.zeros(self._shape, jnp.int32)

    def row_bytes(self):
        return 4 * self._shape[3] + 1 + 4 + 4

    def pass_bytes(self, num_rows, dtype):
        """What it takes to move and sum the rows of a block."""
        shape: Any = jax.ShapeDtypeStruct
        rows = shape((num_rows,), np.int32)
        channels = shape((num_rows, self._shape[3]), np.int32)
        state = self.State(channels, shape((num_rows,), bool), rows, rows)
        codes = shape((self._shape[1], num_rows), dtype)
        sums = shape(self._shape, np.int32)
        return added_bytes(program(_sum_all, (), state, codes, sums)) + count_bytes(
            rows
        )

    def sum_all(self, state, codes, sums):
        return run(_sum_all, (), state, codes, sums)

    def move(self, state, codes, level, nodes, step, sums):
        del level, nodes
        return run(_move, self.sizes, state, codes, step, sums)

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
        return run(_find_leaves, self.sizes, state, codes, np.int32(level), step)


def _cut_rows(uniform, size, rows, words, first_row):
    """A block's integers, and which of its rows are in the bag."""
    parts = (rows.gradient, rows.curvature, rows.in_bag)
    gradient, curvature, in_bag = (
        jax.lax.dynamic_slice(part, (first_row,), (size,)) for part in parts
    )
    channels = round_rows(
        gradient, curvature, in_bag, words, rows.measure, uniform, first_row
    )
    return channels, in_bag


def _sum_all(state, columns, sums):
    node = jnp.where(state.in_bag, 0, -1)
    return sums + _sum(columns, state.channels, node, sums)


def _sum(columns, channels, node, sums):
    num_nodes, _, num_bins, _ = sums.shape
    return build_histogram(
        columns, channels, node, num_nodes=num_nodes, num_bins=num_bins,
        implementation="xla",
    )  # fmt: skip


def _route(slots, state, columns, step):
    return route_rows(
        columns, step.split, step.pairs.pair, state.slot, state.position, slots
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

    class State(NamedTuple):
        rows: grow_cpu.BlockRows
        in_bag: Bool[Array, " n"]

    def __init__(self, sizes, uniform, num_features):
        self.sizes, self._uniform = sizes, uniform
        _, num_bins, slots = sizes
        self._shape = (slots, 2 if uniform else 3, num_features, num_bins)

    def prepare(self, rows, words, block):
        static, first = (self._uniform, block.num_rows), np.int32(block.first_row)
        pairs, in_bag = run(_cut_words, static, rows, words, first)
        bag = np.asarray(in_bag)
        grouped = _group_rows(np.asarray(pairs), bag, self.sizes[2])
        nowhere = np.zeros(block.num_rows, np.int32)
        rows = grow_cpu.BlockRows(*map(jnp.asarray, (*grouped, nowhere)))
        return self.State(rows, in_bag)

    def zeros(self):
        return jnp.zeros(self._shape, jnp.int32)

    def row_bytes(self):
        return 8 + 2 + 4 + 1

    def pass_bytes(self, num_rows, dtype):
        """What it takes to move and sum the rows of a block: their codes by row."""
        packed = grow_cpu.packed_shape(self._shape[2], num_rows)
        return math.prod(packed) * np.dtype(dtype).itemsize

    def sum_all(self, state, codes, sums):
        every = np.ones(self.sizes[2] // 2, bool)
        operands = (codes, state.rows, np.int32(1), every, sums)
        return run(_sum_in_kernels, self.sizes[1:2], *operands, donate=(4,))

    def move(self, state, codes, level, nodes, step, sums):
        operands = (codes, state.rows, np.int32(level), nodes.position, step, sums)
        rows, sums = run(_move_in_kernels, self.sizes, *operands, donate=(1, 5))
        return state._replace(rows=rows), sums

    @staticmethod
    def unpack(sums):
        """From the negative sums, cumulative over bins, of the upper half."""
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
        operands = (codes, state, np.int32(level), nodes.position, split, tree)
        return run(_find_leaves_in_kernels, self.sizes[:1], *operands)


def _cut_words(uniform, size, rows, words, first_row):
    """A block's rows as words (curvature << 32) + gradient, and who is in the bag."""
    channels, in_bag = _cut_rows(uniform, size, rows, words, first_row)
    gradient = channels[:, 0]
    borrowed = channels[:, 1] - (gradient < 0).astype(jnp.int32)
    return jnp.stack([gradient, borrowed], axis=1), in_bag


def _group_rows(words, in_bag, slots):
    """Rows in the bag first, chunk by chunk, all of them in slot 0."""
    size, chunk = len(in_bag), grow_cpu.CHUNK
    num_chunks = -(-size // chunk)
    segments = np.zeros((num_chunks, slots, 2), np.int32)
    order = (np.arange(size) % chunk).astype(np.uint16)
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


def _move_in_kernels(
    max_depth, num_bins, slots, columns, rows, level, position, step, sums
):
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
        grow_cpu.dense_source(columns, None),
        tree.feature,
        tree.threshold,
        tree.missing_left,
        state.in_bag,
        rows.leaf,
    )
