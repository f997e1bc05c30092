# SPDX-License-Identifier: Apache-2.0
"""Grows a tree on blocks of rows, which are read one after the other.

In: derivatives of all rows, codes in files. Out: the tree that ``grow_tree`` returns,
and the leaf of every row. Each level takes one pass over the blocks, which routes the
rows by the splits of the level before and sums the histograms of the smaller children:

    root       sum | find splits
    level 1    route, sum | join, find splits
    ...
    the end    route to leaves: reads only the columns of the last splits

Sums are integers, so that they do not depend on how rows are divided into blocks. The
smaller child of each split must be known before a pass; therefore counts are summed
with the derivatives.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt32

from jboost.boosting.method import Method
from jboost.codes.bins import MISSING
from jboost.entry.programs import compiled, count_bytes
from jboost.numerics.fixed_point import FixedPoint
from jboost.streams.block_rows import Derivatives, LevelNodes, Step, make_way
from jboost.streams.blocks import BlockReader
from jboost.streams.heap import trim_heap
from jboost.trees.levels import (
    Measure,
    find_splits,
    join_children,
    make_leaf,
    pair_children,
    pass_paths,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.trees.limits import TreeLimits
from jboost.trees.tree import Tree


def grow_blocks(
    reader: BlockReader,
    method: Method,
    words: UInt32[np.ndarray, "2"],
    measure_all: Callable[[], Derivatives],
    leaf: Int32[np.ndarray, " N"],
) -> Tree:
    """Grows one tree, and writes the leaf of every row to ``leaf``.

    ``measure_all`` returns the derivatives. They are released before the first pass,
    because each block keeps its own rows as integers.

    Raises:
      BlockError: a block cannot be read.
    """
    way, blocks = make_way(method, reader.set, len(leaf)), reader.set.blocks
    sizes, rows = way.sizes, measure_all()
    states = [way.prepare(rows, words, block) for block in blocks]
    measure, limits = rows.measure, rows.limits
    del rows
    trim_heap(leaf.nbytes)

    sums = way.zeros()
    for block, codes in reader.read():
        # Wait: the buffer of the codes is reused after the next block.
        sums = jax.block_until_ready(way.sum_all(states[block.number], codes, sums))
        trim_heap(codes.nbytes)
    make_root = compiled(_make_root, way.unpack, method.max_leaves, *sizes)
    find_step, join = compiled(_step, *sizes), compiled(_join, way.unpack, sizes[2])
    nodes, level = make_root(sums, limits), 0
    while True:
        step = find_step(np.int32(level), nodes, measure, words, limits)
        if int(step.num_found) == 0 or level == method.max_depth - 1:
            break
        sums = way.zeros()
        for block, codes in reader.read():
            moved = way.move(states[block.number], codes, level, nodes, step, sums)
            states[block.number], sums = jax.block_until_ready(moved)
            trim_heap(codes.nbytes)
        nodes = join(nodes.histogram, step, sums)
        level += 1

    wanted = way.features_of_leaves(step, int(measure.num_in_bag) < reader.set.num_rows)
    for block, codes in _read_some(reader, wanted):
        end = block.first_row + block.num_rows
        leaf[block.first_row : end] = way.find_leaves(
            states[block.number], codes, level, nodes, step, wanted
        )
    leaf[reader.set.num_rows :] = leaf[0]  # these rows repeat the first one
    return step.tree._replace(bounds=step.paths.leaf_bounds)


def count_node_bytes(way: Any, method: Method, limits: TreeLimits) -> int:
    """Returns the bytes of a level: its histograms, splits, and the next level's."""
    sums = jax.eval_shape(way.zeros)
    make = partial(_make_root, way.unpack, method.max_leaves, *way.sizes)
    nodes = jax.eval_shape(make, sums, limits)
    scalar: Any = np.int32(0)
    some: Any = np.zeros(2, np.float32)
    words: Any = np.zeros(2, np.uint32)
    measure = Measure(FixedPoint(some, some, scalar > 0), some, scalar)
    operands = (scalar, nodes, measure, words, limits)
    step = jax.eval_shape(partial(_step, *way.sizes), *operands)
    join = compiled(_join, way.unpack, way.sizes[2])
    joined = join.added_bytes(nodes.histogram, step, sums)
    found = compiled(_step, *way.sizes).added_bytes(*operands)
    return count_bytes((nodes, step)) + max(found, count_bytes(sums) + joined)


def _make_root(unpack, max_leaves, max_depth, num_bins, slots, sums, limits):
    """Makes the first level: the root in slot 0, the other slots empty."""
    sums = unpack(sums)
    return LevelNodes(
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
    """Counts rows in the bag by slot: at or below the threshold, above, missing."""
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
    return LevelNodes(joined, pairs.position, step.tree, step.paths)


def _read_some(reader, features):
    """Yields blocks with the columns of some features; reads nothing for none."""
    if features:
        yield from reader.read(features)
        return
    for block in reader.set.blocks:
        yield block, np.zeros((1, block.num_rows), reader.set.dtype)
