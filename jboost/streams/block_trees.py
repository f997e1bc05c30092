# SPDX-License-Identifier: Apache-2.0
"""Grows a tree on blocks of rows, which are read one after the other.

In: derivatives of all rows, codes in files. Out: the tree that ``grow_tree`` returns,
and the leaf of every row. Each level takes one pass over the blocks, which routes the
rows by the splits of the level before and sums the histograms of the smaller children:

    root       sum | find splits
    level 1    route, sum | join, find splits
    ...
    the end    route to leaves

Sums are integers, so that they do not depend on how rows are divided into blocks, nor
on how blocks are divided among processes, whose sums are added up after each pass. The
smaller child of each split must be known before a pass; therefore counts are summed
with the derivatives.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, UInt32

from jboost.boosting.method import Method
from jboost.entry.exchanges import (
    add_processes,
    agree,
)
from jboost.entry.implementation import current_implementation
from jboost.streams.blocks import BlockReader, BlockSet
from jboost.streams.folders import BlockError
from jboost.streams.heap import trim_heap
from jboost.streams.native_blocks import NativeGrower
from jboost.streams.plain_blocks import Derivatives, PlainGrower
from jboost.trees.tree import Tree

Grower = PlainGrower | NativeGrower


def make_grower(
    method: Method, blocks: BlockSet, num_rows: int, first_row: int
) -> Grower:
    """Returns what grows the trees of a run, with the implementation in force.

    Args:
      blocks: of this process.
      num_rows: of all processes.
      first_row: the number of the first row of this process among them.
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

    Raises:
      BlockError: a block cannot be read.
    """
    grower.start(measure_all(), words, leaf, reader.set)
    trim_heap(leaf.nbytes)  # of the derivatives
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
