# SPDX-License-Identifier: Apache-2.0
"""Grows one least-squares tree on all distinct values, level by level, on the host.

Each column is sorted once, as 64-bit words: the bits of the value above the index of
the row, which breaks ties. Each level stores, for each column, the rows of its nodes
contiguously and in sorted order, missing values last, so that one cumulative sum serves
all nodes. A CPU kernel grows the same trees, which this NumPy code defines.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from jboost.codes.thresholds import midpoints
from jboost.kernels import grow_cpu, library
from jboost.model.nodes import LEAF
from jboost.model.regression_tree import RegressionTree
from jboost.numerics.arrays import flush_denormals


def make_tree(**arrays: Any) -> RegressionTree:
    """Returns a tree with read-only arrays."""
    for array in arrays.values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return RegressionTree(**arrays)


_ROW = np.uint64(2**32 - 1)  # the bits of a word that hold the row's index
_MISSING = np.uint64((2**32 - 1) << 32)  # words from here on hold NaN


def sort_words(columns: Float[np.ndarray, "F N"]) -> UInt64[np.ndarray, "F N"]:
    """Returns the words of each column in ascending order, missing values last."""
    bits = columns.view(np.uint32)
    # Negative floats sort in reverse by their bits: flip all bits of negative values,
    # and the sign bit of the others, and integers sort as the floats do.
    key = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    key = np.where(np.isnan(columns), np.uint32(2**32 - 1), key).astype(np.uint64)
    return np.sort((key << 32) | np.arange(columns.shape[1], dtype=np.uint64), axis=1)


def row_indices(words: UInt64[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Returns the indices of the rows."""
    return (words & _ROW).view(np.int64)


def is_missing(words: UInt64[np.ndarray, "*n"]) -> Bool[np.ndarray, "*n"]:
    """Returns whether each value is missing."""
    return words >= _MISSING


_TIE = 1e-10  # relative: gains closer than this differ only by rounding
_NOISE = 1e-20  # largest gain due to rounding, as a fraction of a node's error
_LEAST_SHARE = 1e-12  # share of a node's weight; rounding hides lighter children
_BLOCK = 2**16  # words processed together, few enough to stay in the cache


class Rules(NamedTuple):
    """Limits on splits; see :func:`jboost.cart.fit_tree`."""

    max_depth: int
    min_child_samples: int
    min_split_samples: int
    min_child_weight: float
    min_gain: float


class SplitNodes(NamedTuple):
    """A tree, breadth first; see :class:`jboost.cart.RegressionTree`."""

    left: Int[np.ndarray, " M"]
    feature: Int[np.ndarray, " M"]
    threshold: Float[np.ndarray, " M"]
    missing_left: Bool[np.ndarray, " M"]
    value: Float[np.ndarray, "K M"]
    gain: Float[np.ndarray, " M"]
    squared_error: Float[np.ndarray, " M"]
    weight: Float[np.ndarray, " M"]
    num_rows: Int[np.ndarray, " M"]


class _Data(NamedTuple):
    """Training data, and two arrays that each level overwrites.

    Attributes:
      scaled: weight times residual, scaled so that it sums to 0 over every node and
        gains are fractions of the node's squared error.
      excess: a row's fraction of its node's weight minus 1 / rows; None if all
        weights are equal.
    """

    columns: Float[np.ndarray, "F N"]
    targets: Float[np.ndarray, "K N"]
    weights: Float[np.ndarray, " N"] | None
    scaled: Float[np.ndarray, "K N"]
    excess: Float[np.ndarray, " N"] | None


class _Stats(NamedTuple):
    """Statistics of S nodes; ``pure``: all targets are equal."""

    num_rows: Int[np.ndarray, " S"]
    weight: Float[np.ndarray, " S"]
    value: Float[np.ndarray, "K S"]
    squared_error: Float[np.ndarray, " S"]
    pure: Bool[np.ndarray, " S"]


class _Cuts(NamedTuple):
    """Candidate cuts, one after each position of the sorted rows.

    Attributes:
      factor: 1 / (fraction of weight left * fraction of weight right).
      allowed: whether the rules allow the cut, even between equal values.
    """

    factor: Float[np.ndarray, "*f n"]
    allowed: Bool[np.ndarray, "*f n"]


class _Level(NamedTuple):
    """S nodes that may be split; the n rows of all nodes are stored contiguously."""

    words: UInt64[np.ndarray, "F n"]
    node: Int[np.ndarray, " S"]
    stats: _Stats
    slot: Int[np.ndarray, " n"]  # the node of each position
    starts: Int[np.ndarray, " S"]
    num_left: Int[np.ndarray, " n"]  # rows of the node up to this position
    share: Float[np.ndarray, " n"]  # num_left / rows of the node
    cuts: _Cuts  # valid for equal weights; others depend on the column


class _Split(NamedTuple):
    """The best split of each of S nodes."""

    found: Bool[np.ndarray, " S"]
    feature: Int[np.ndarray, " S"]
    threshold: Float[np.ndarray, " S"]
    missing_left: Bool[np.ndarray, " S"]
    has_missing: Bool[np.ndarray, " S"]
    gain: Float[np.ndarray, " S"]


def grow(
    matrix: Float[np.ndarray, "N F"],
    targets: Float[np.ndarray, "K N"],
    weights: Float[np.ndarray, " N"] | None,
    rules: Rules,
) -> SplitNodes:
    """Grows a tree; each split is the one that reduces the squared error most."""
    if library.may_run():
        return SplitNodes(
            **grow_cpu.grow_cart(matrix, targets, weights, **rules._asdict())
        )
    columns = flush_denormals(np.ascontiguousarray(matrix.T))
    excess = None if weights is None else np.zeros(len(weights))
    data = _Data(columns, targets, weights, np.zeros_like(targets), excess)
    return _grow_levels(data, rules)


def _grow_levels(data, rules):
    words = sort_words(data.columns)
    size = data.columns.shape[1]
    stats = _summarize(data, np.arange(size), np.array([size]))
    node, depth, num_nodes = np.zeros(1, np.int64), 0, 1
    made, splits = [(node, stats)], []
    may_grow = _may_grow(stats, rules, depth)
    while may_grow.any():
        growing = _Stats(*(field[..., may_grow] for field in stats))
        level = _make_level(words, node[may_grow], growing, rules)
        split = _find_splits(data, level, rules)
        rows, right = _route(data, level, split)
        num_right = np.bincount(level.slot[right], minlength=len(level.node))
        sizes = np.concatenate([growing.num_rows - num_right, num_right])
        stats = _summarize(data, rows, sizes[np.tile(split.found, 2)])
        left = num_nodes + 2 * np.argsort(np.argsort(level.node[split.found]))
        node, depth = np.concatenate([left, left + 1]), depth + 1
        num_nodes += len(node)
        made.append((node, stats))
        splits.append(_describe(level, split, stats, left))
        may_grow = _may_grow(stats, rules, depth)
        words = _partition(level, split, right, may_grow, size)
    return _assemble(num_nodes, made, splits)


def _summarize(data, rows, sizes):
    """Returns statistics of nodes of contiguous ``rows``; writes scaled residuals."""
    starts = np.cumsum(sizes) - sizes
    slot = np.repeat(np.arange(len(sizes)), sizes)
    y = data.targets[:, rows]
    w = np.ones(len(rows)) if data.weights is None else data.weights[rows]
    if len(sizes) == 0:
        nothing = np.zeros(0)
        return _Stats(sizes, nothing, np.zeros((len(y), 0)), nothing, nothing > 0)
    weight = np.add.reduceat(w, starts)
    rough = np.add.reduceat(w * y, starts, axis=1) / weight
    residual = y - rough[:, slot]
    # Rounding leaves a small mean if targets are large; subtract it, because
    # _try_cuts relies on residuals that sum to 0 in each node.
    rest = np.add.reduceat(w * residual, starts, axis=1) / weight
    residual -= rest[:, slot]
    error = np.add.reduceat(w * residual**2, starts, axis=1).sum(axis=0)
    spread = np.maximum.reduceat(y, starts, 1) - np.minimum.reduceat(y, starts, 1)
    pure = np.all(spread == 0, axis=0) | (error == 0)
    scale = np.sqrt(weight * np.where(pure, np.inf, error))
    data.scaled[:, rows] = w * residual / scale[slot]
    if data.excess is not None:
        data.excess[rows] = w / weight[slot] - 1 / sizes[slot]
    return _Stats(sizes, weight, rough + rest, error, pure)


def _may_grow(stats, rules, depth):
    least = max(rules.min_split_samples, 2 * rules.min_child_samples)
    return ~stats.pure & (stats.num_rows >= least) & (depth < rules.max_depth)


def _make_level(words, node, stats, rules):
    starts = np.cumsum(stats.num_rows) - stats.num_rows
    slot = np.repeat(np.arange(len(node)), stats.num_rows)
    num_left = np.arange(1, len(slot) + 1) - starts[slot]
    share = num_left / stats.num_rows[slot]
    cuts = _weigh_cuts(stats, slot, num_left, share, rules)
    return _Level(words, node, stats, slot, starts, num_left, share, cuts)


def _weigh_cuts(stats, slot, num_left, share, rules):
    num_right = stats.num_rows[slot] - num_left
    # Tolerance: sums of weights are rounded.
    least = rules.min_child_weight * (1 - 1e-9) / stats.weight
    least = np.maximum(least, _LEAST_SHARE)[slot]
    allowed = np.minimum(num_left, num_right) >= rules.min_child_samples
    allowed = allowed & (np.minimum(share, 1 - share) >= least)
    return _Cuts(1 / np.where(allowed, share * (1 - share), 1), allowed)


def _find_splits(data, level, rules):
    """Finds the best split of each node: first the column, then the cut in it."""

    def search(words):
        gains = _try_cuts(data, level, rules, words)
        return np.maximum.reduce([_largest(level, gain) for gain in gains])

    blocks = _blocks(*level.words.shape)
    best = np.concatenate([search(level.words[block]) for block in blocks])
    top = best.max(axis=0)
    # Ties up to rounding go to the first feature, so that results are reproducible.
    enough = top * (1 - _TIE) - _NOISE
    feature = np.argmax(best >= enough, axis=0)
    words = level.words[feature[level.slot], np.arange(len(level.slot))][None]
    gains = _try_cuts(data, level, rules, words)
    # Rows of other columns come before those of a node now, so that sums differ by
    # rounding, by more than a tie if weights differ by magnitudes.
    again = np.maximum.reduce([_largest(level, gain)[0] for gain in gains])
    enough = np.minimum(enough, again * (1 - _TIE) - _NOISE)[level.slot]
    indices = [_first_place(level, gain[0] >= enough) for gain in gains]
    index = np.minimum.reduce(indices)
    gain = np.where(top > _NOISE, top, 0) * level.stats.squared_error
    found = (index < len(level.slot)) & (gain >= rules.min_gain * (1 - _TIE))
    last = level.starts + level.stats.num_rows - 1
    ends = (np.minimum(index + offset, last) for offset in (0, 1))
    low, high = (data.columns[feature, row_indices(words[0, end])] for end in ends)
    threshold = np.where(np.isnan(high), np.float32(np.inf), midpoints(low, high))
    return _Split(
        found=found,
        feature=feature,
        threshold=threshold,
        missing_left=indices[-1] < indices[0],
        has_missing=is_missing(words[0, last]),
        gain=gain,
    )


def _blocks(num_columns, num_rows):
    width = max(1, _BLOCK // max(1, num_rows))
    return [slice(i, i + width) for i in range(0, num_columns, width)]


def _try_cuts(data, level, rules, words):
    """Returns the gain of the cut after each position; -1 where no cut is allowed.

    Gains are fractions of the node's error: with residuals r of mean 0 it falls by
    (sum_left w r)^2 W / (W_L W_R). Residuals sum to 0 in every node, so that one
    cumulative sum serves all nodes. The list holds the gains with missing values going
    right; then, if any value is missing, the gains with missing values going left.
    """
    rows = row_indices(words)
    sums = [np.cumsum(np.take(scaled, rows), axis=1) for scaled in data.scaled]
    distinct = np.zeros(words.shape, bool)
    distinct[:, :-1] = (words[:, 1:] ^ words[:, :-1]) > _ROW  # the next value differs
    share, cuts = level.share, level.cuts
    if data.excess is not None:
        share = share + np.cumsum(np.take(data.excess, rows), axis=1)
        cuts = _weigh_cuts(level.stats, level.slot, level.num_left, share, rules)
    gains = [_gain(sums, cuts, distinct)]
    if not is_missing(words[:, level.starts + level.stats.num_rows - 1]).any():
        return gains
    missing = is_missing(words)
    distinct[:, :-1] &= ~missing[:, 1:]
    num_missing = np.add.reduceat(missing, level.starts, axis=1, dtype=np.int64)
    # The last position of a node that holds a value; missing values follow.
    end = level.starts + np.maximum(level.stats.num_rows - num_missing - 1, 0)

    # The left sum with missing values going left: they are sorted last, and the node's
    # total is 0, so that their sum is minus the cumulative sum at ``end``.
    def from_end(run):
        ends = np.take_along_axis(np.broadcast_to(run, words.shape), end, axis=1)
        return run - np.take(ends, level.slot, axis=1)

    missing_left = np.take(num_missing, level.slot, axis=1)
    distinct &= missing_left > 0  # other nodes would differ by rounding only
    num_left = level.num_left + missing_left
    cuts = _weigh_cuts(level.stats, level.slot, num_left, 1 + from_end(share), rules)
    return [*gains, _gain([from_end(one) for one in sums], cuts, distinct)]


def _gain(sums, cuts, distinct):
    gain = sum(np.square(one) for one in sums) * cuts.factor
    return np.where(distinct & cuts.allowed, gain, -1.0)


def _largest(level, gain):
    """Returns the largest gain of each node in each column, [f, S]."""
    width, size = gain.shape
    starts = (np.arange(width)[:, None] * size + level.starts).ravel()
    return np.maximum.reduceat(gain.ravel(), starts).reshape(width, -1)


def _first_place(level, hit):
    """Returns the first position of each node where ``hit``; n if there is none."""
    indices = np.full(len(level.starts), len(hit))
    every = np.flatnonzero(hit)[::-1]
    indices[level.slot[every]] = every  # reversed, so that the first hit is kept
    return indices


def _route(data, level, split):
    """Returns the children's rows, left ones first, and which positions go right."""
    rows = row_indices(level.words[0])
    values = data.columns[split.feature[level.slot], rows]
    right = values > split.threshold[level.slot]
    missing = np.isnan(values)
    right[missing] = ~split.missing_left[level.slot[missing]]
    found = split.found[level.slot]
    return np.concatenate([rows[found & ~right], rows[found & right]]), right


def _describe(level, split, children, left):
    """Returns the nodes that are split, and their fields of SplitNodes by name."""
    found = split.found
    left_weight, right_weight = np.split(children.weight, 2)
    return level.node[found], dict(
        left=left,
        feature=split.feature[found],
        threshold=split.threshold[found],
        missing_left=np.where(
            split.has_missing[found],
            split.missing_left[found],
            left_weight >= right_weight,
        ),
        gain=split.gain[found],
    )


def _partition(level, split, right, may_grow, num_rows):
    """Returns the words of the children that may be split, left children first."""
    grows = np.zeros((2, len(level.node)), bool)
    grows[:, split.found] = may_grow.reshape(2, -1)
    side = np.zeros(num_rows, np.uint8)
    way = right.astype(np.uint8)
    chosen = grows[way, level.slot]
    side[row_indices(level.words[0])] = np.where(chosen, way, 2)
    sizes = [np.sum(chosen & ~right), np.sum(chosen & right)]
    words = np.empty((len(level.words), sum(sizes)), np.uint64)
    for block in _blocks(*level.words.shape):
        old = level.words[block]
        sides = np.take(side, row_indices(old))
        words[block, : sizes[0]] = old[sides == 0].reshape(len(old), sizes[0])
        words[block, sizes[0] :] = old[sides == 1].reshape(len(old), sizes[1])
    return words


def _assemble(size, made, splits):
    """Returns all nodes in the order of their indices."""
    node = np.concatenate([node for node, _ in made])
    stats = [
        np.concatenate(f, axis=-1) for f in zip(*(s for _, s in made), strict=True)
    ]
    order = np.argsort(node)
    count, weight, value, error, _ = (field[..., order] for field in stats)
    nodes = SplitNodes(
        left=np.full(size, LEAF, np.int32),
        feature=np.zeros(size, np.int32),
        threshold=np.full(size, np.inf, np.float32),
        missing_left=np.ones(size, bool),
        value=value,
        gain=np.zeros(size),
        squared_error=error,
        weight=weight,
        num_rows=count.astype(np.int32),
    )
    for where, fields in splits:
        for name, values in fields.items():
            getattr(nodes, name)[where] = values
    return nodes
