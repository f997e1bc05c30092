# SPDX-License-Identifier: Apache-2.0
"""Grows a tree on blocks by the CPU kernels; see :mod:`jboost.kernels.levels_cpu`.

Rows are routed by the blocks' codes by feature, and summed from their codes by row.
Kernels are called on arrays in host memory, which they update in place.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Shaped, UInt32

from jboost.boosting.method import Method
from jboost.entry.programs import compiled
from jboost.kernels import grow_cpu, levels_cpu
from jboost.kernels.sums_xla import join_digits
from jboost.numerics.fixed_point import fit_scale
from jboost.streams.blocks import NUM_BUFFERS, Block, BlockReader, BlockSet
from jboost.streams.column_codes import count_row_bytes
from jboost.streams.memory import count_bytes
from jboost.streams.plain_blocks import Derivatives
from jboost.trees.limits import TreeLimits
from jboost.trees.native_growth import make_level_limits
from jboost.trees.rounding import make_measure
from jboost.trees.search_units import restore_bounds
from jboost.trees.tree import Tree

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
        prepare = compiled(_make_limits, sizes.num_features)
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
        levels_cpu.find_leaves(
            codes[0], state.feature, state.threshold, state.missing_left,
            self._in_bag[own] > 0, self._leaf[own],
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
        return 1  # how often it counts

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
        prepare = partial(make_level_limits, num_columns=sizes.num_features)
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
    """Does what :func:`jboost.trees.rounding.measure_rows` does, without a copy."""
    greatest, count = levels_cpu.find_greatest_derivatives(gradient, curvature, in_bag)
    digits = levels_cpu.sum_magnitudes(gradient, curvature, in_bag, greatest)
    return compiled(_fit_measure, uniform)(greatest, digits, count)


def _fit_measure(uniform, greatest, digits, num_in_bag):
    total = jnp.where(jnp.isfinite(greatest), join_digits(digits, greatest), jnp.inf)
    fixed = fit_scale(total, num_in_bag)
    return make_measure(fixed, num_in_bag, greatest[1] if uniform else None)


def _make_limits(num_columns, limits, words, unit):
    return make_level_limits(limits, num_columns, words, unit)


def _make_zeros(shapes):
    return jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes)


def _shape_state(sizes, limits):
    return levels_cpu.shape_state(
        limits, max_depth=sizes.max_depth, num_slots=sizes.num_slots,
        sums_shape=sizes[3:6],
    )  # fmt: skip


def _rows_of(block):
    return slice(block.first_row, block.first_row + block.num_rows)
