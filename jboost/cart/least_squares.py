# SPDX-License-Identifier: Apache-2.0
"""Grows one least-squares tree on all distinct values, level by level, on the host.

In: a float32 matrix, float64 targets and weights. Out: Nodes, breadth first. Every
column is sorted once; then each level keeps, per column, the rows of its nodes side
by side in sorted order, so that one running sum serves all nodes:

    node             |    a     |      b       |  c   |
    column 0, rows   | 3  0  7  |  5  1  9  2  | 8  4 |    ascending within a node,
    column 1, rows   | 7  3  0  |  9  5  2  1  | 4  8 |    missing values last

A row is held as one 64-bit word, the bits of its value above the number of the row.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from jboost.codes.thresholds import midpoints
from jboost.model.nodes import LEAF
from jboost.numerics.floats import flush_denormals

_ROW = np.uint64(2**32 - 1)  # the half of a word that is the row's number
_MISSING = np.uint64((2**32 - 1) << 32)  # words from here on hold NaN
_TIE = 1e-10  # relative: gains closer than this differ by rounding only
_NOISE = 1e-20  # what rounding makes of no gain, as a share of a node's error
_LEAST_SHARE = 1e-12  # of a node's weight: a lighter child is lost in rounding
_BLOCK = 2**16  # words looked at together, so that they stay in the cache


class Rules(NamedTuple):
    """When a node is split; see :func:`jboost.cart.fit_tree`."""

    max_depth: int
    min_child_samples: int
    min_split_samples: int
    min_child_weight: float
    min_gain: float


class Nodes(NamedTuple):
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
    """What the tree is grown from, and what a level writes down for each row.

    Attributes:
      scaled: weight times residual, by outputs, in units that make every node's sum
        0 and its squared error 1.
      excess: a row's share of its node's weight minus 1 / rows; None if all weigh
        the same.
    """

    columns: Float[np.ndarray, "F N"]
    targets: Float[np.ndarray, "K N"]
    weights: Float[np.ndarray, " N"] | None
    scaled: Float[np.ndarray, "K N"]
    excess: Float[np.ndarray, " N"] | None


class _Stats(NamedTuple):
    """Of each of S nodes."""

    num_rows: Int[np.ndarray, " S"]
    weight: Float[np.ndarray, " S"]
    value: Float[np.ndarray, "K S"]
    squared_error: Float[np.ndarray, " S"]
    pure: Bool[np.ndarray, " S"]


class _Cuts(NamedTuple):
    """Cuts after each place.

    Attributes:
      factor: 1 / (share of weight left * share of weight right).
      allowed: by the rules; whether values differ there is not looked at.
    """

    factor: Float[np.ndarray, "*f n"]
    allowed: Bool[np.ndarray, "*f n"]


class _Level(NamedTuple):
    """S nodes that may be split, their n rows side by side."""

    words: UInt64[np.ndarray, "F n"]
    node: Int[np.ndarray, " S"]
    stats: _Stats
    slot: Int[np.ndarray, " n"]  # of a place: which of the S nodes
    starts: Int[np.ndarray, " S"]
    num_left: Int[np.ndarray, " n"]  # rows of the node up to this place
    share: Float[np.ndarray, " n"]  # of the node's rows
    cuts: _Cuts  # after each place, if all rows weigh the same


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
) -> Nodes:
    """Splits every node where the squared error falls most, while the rules allow."""
    columns = np.ascontiguousarray(matrix.T)
    columns = flush_denormals(columns)
    excess = None if weights is None else np.zeros(len(weights))
    data = _Data(columns, targets, weights, np.zeros_like(targets), excess)
    with ThreadPoolExecutor(_num_threads()) as pool:

        def run(function, items):
            return list((pool.map if len(items) > 1 else map)(function, items))

        return _grow_levels(data, rules, run)


def _grow_levels(data, rules, run):
    words = [data.columns[block] for block in _blocks(*data.columns.shape)]
    words = np.concatenate(run(_sort_words, words))
    size = data.columns.shape[1]
    stats = _summarize(data, np.arange(size), np.array([size]))
    node, depth, num_nodes = np.zeros(1, np.int64), 0, 1
    made, splits = [(node, stats)], []
    may_grow = _may_grow(stats, rules, depth)
    while may_grow.any():
        level = _make_level(words, node[may_grow], _keep(stats, may_grow), rules)
        split = _find_splits(data, level, rules, run)
        rows, right = _route(data, level, split)
        stats = _summarize(data, rows, _child_sizes(level, split, right))
        left = num_nodes + 2 * np.argsort(np.argsort(level.node[split.found]))
        node, depth = np.concatenate([left, left + 1]), depth + 1
        num_nodes += len(node)
        made.append((node, stats))
        splits.append(_describe(level, split, stats, left))
        may_grow = _may_grow(stats, rules, depth)
        words = _partition(level, split, right, may_grow, size, run)
    return _assemble(num_nodes, made, splits)


def _num_threads():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _sort_words(columns):
    """Words in ascending order; the bits of floats made to order like the floats."""
    bits = columns.view(np.uint32)
    key = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    key = np.where(np.isnan(columns), np.uint32(2**32 - 1), key).astype(np.uint64)
    return np.sort((key << 32) | np.arange(columns.shape[1], dtype=np.uint64), axis=1)


def _rows(words):
    """The numbers of the rows, as indices."""
    return (words & _ROW).view(np.int64)


def _summarize(data, rows, sizes):
    """Statistics of nodes whose rows lie side by side; centers and scales these."""
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
    # What rounding left of their mean: then they sum to 0 however large the targets.
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


def _keep(stats, chosen):
    return _Stats(*(field[..., chosen] for field in stats))


def _make_level(words, node, stats, rules):
    starts = np.cumsum(stats.num_rows) - stats.num_rows
    slot = np.repeat(np.arange(len(node)), stats.num_rows)
    num_left = np.arange(1, len(slot) + 1) - starts[slot]
    share = num_left / stats.num_rows[slot]
    cuts = _weigh_cuts(stats, slot, num_left, share, rules)
    return _Level(words, node, stats, slot, starts, num_left, share, cuts)


def _weigh_cuts(stats, slot, num_left, share, rules):
    num_right = stats.num_rows[slot] - num_left
    # A little less than asked for: sums of weights are rounded.
    least = rules.min_child_weight * (1 - 1e-9) / stats.weight
    least = np.maximum(least, _LEAST_SHARE)[slot]
    allowed = np.minimum(num_left, num_right) >= rules.min_child_samples
    allowed = allowed & (np.minimum(share, 1 - share) >= least)
    return _Cuts(1 / np.where(allowed, share * (1 - share), 1), allowed)


def _find_splits(data, level, rules, run):
    """The best split of every node: of which column, then where in it."""

    def search(words):
        gains = _try_cuts(data, level, rules, words)
        return np.maximum.reduce([_largest(level, gain) for gain in gains])

    words = [level.words[block] for block in _blocks(*level.words.shape)]
    best = np.concatenate(run(search, words))
    top = best.max(axis=0)
    enough = top * (1 - _TIE) - _NOISE
    feature = np.argmax(best >= enough, axis=0)
    words = level.words[feature[level.slot], np.arange(len(level.slot))][None]
    places = [
        _first_place(level, gain[0] >= enough[level.slot])
        for gain in _try_cuts(data, level, rules, words)
    ]
    place = np.minimum.reduce(places)
    gain = np.where(top > _NOISE, top, 0) * level.stats.squared_error
    found = (place < len(level.slot)) & (gain >= rules.min_gain * (1 - _TIE))
    last = level.starts + level.stats.num_rows - 1
    ends = (np.minimum(place + offset, last) for offset in (0, 1))
    low, high = (data.columns[feature, _rows(words[0, end])] for end in ends)
    threshold = np.where(np.isnan(high), np.float32(np.inf), midpoints(low, high))
    return _Split(
        found=found,
        feature=feature,
        threshold=threshold,
        missing_left=places[-1] < places[0],
        has_missing=words[0, last] >= _MISSING,
        gain=gain,
    )


def _blocks(num_columns, num_rows):
    width = max(1, _BLOCK // max(1, num_rows))
    return [slice(i, i + width) for i in range(0, num_columns, width)]


def _try_cuts(data, level, rules, words):
    """What a cut after each place gains, as a share of its node's error; -1: no cut.

    With residuals r of mean 0 the squared error falls by (sum_left w r)^2 W / (W_L
    W_R). Every node's sum is 0, so that one running sum goes through all of them.
    Missing values go right; then, if there are any, once more with them going left.
    """
    rows = _rows(words)
    sums = [np.cumsum(np.take(scaled, rows), axis=1) for scaled in data.scaled]
    distinct = np.zeros(words.shape, bool)
    distinct[:, :-1] = (words[:, 1:] ^ words[:, :-1]) > _ROW
    share, cuts = level.share, level.cuts
    if data.excess is not None:
        share = share + np.cumsum(np.take(data.excess, rows), axis=1)
        cuts = _weigh_cuts(level.stats, level.slot, level.num_left, share, rules)
    gains = [_gain(sums, cuts, distinct)]
    if not (words[:, level.starts + level.stats.num_rows - 1] >= _MISSING).any():
        return gains
    missing = words >= _MISSING
    distinct[:, :-1] &= ~missing[:, 1:]
    num_missing = np.add.reduceat(missing, level.starts, axis=1, dtype=np.int64)
    # Where the values of a node end; what follows is missing.
    end = level.starts + np.maximum(level.stats.num_rows - num_missing - 1, 0)

    def from_end(run):
        ends = np.take_along_axis(np.broadcast_to(run, words.shape), end, axis=1)
        return run - np.take(ends, level.slot, axis=1)

    num_left = level.num_left + np.take(num_missing, level.slot, axis=1)
    cuts = _weigh_cuts(level.stats, level.slot, num_left, 1 + from_end(share), rules)
    return [*gains, _gain([from_end(one) for one in sums], cuts, distinct)]


def _gain(sums, cuts, distinct):
    gain = sum(np.square(one) for one in sums) * cuts.factor
    return np.where(distinct & cuts.allowed, gain, -1.0)


def _largest(level, gain):
    """In each node, [f, S]."""
    width, size = gain.shape
    starts = (np.arange(width)[:, None] * size + level.starts).ravel()
    return np.maximum.reduceat(gain.ravel(), starts).reshape(width, -1)


def _first_place(level, hit):
    """The first place of each node where ``hit``; n if there is none."""
    places = np.full(len(level.starts), len(hit))
    every = np.flatnonzero(hit)[::-1]
    places[level.slot[every]] = every  # the one written last stays
    return places


def _route(data, level, split):
    """Rows of split nodes, left children's in front, and which places go right."""
    rows = _rows(level.words[0])
    values = data.columns[split.feature[level.slot], rows]
    right = values > split.threshold[level.slot]
    missing = np.isnan(values)
    right[missing] = ~split.missing_left[level.slot[missing]]
    found = split.found[level.slot]
    return np.concatenate([rows[found & ~right], rows[found & right]]), right


def _child_sizes(level, split, right):
    num_right = np.bincount(level.slot[right], minlength=len(level.node))
    sizes = np.concatenate([level.stats.num_rows - num_right, num_right])
    return sizes[np.tile(split.found, 2)]


def _describe(level, split, children, left):
    """What is written down of the nodes that are split, by name of the field."""
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


def _partition(level, split, right, may_grow, num_rows, run):
    """The words of the children that may grow; left children in front."""
    grows = np.zeros((2, len(level.node)), bool)
    grows[:, split.found] = may_grow.reshape(2, -1)
    side = np.zeros(num_rows, np.uint8)
    way = right.astype(np.uint8)
    chosen = grows[way, level.slot]
    side[_rows(level.words[0])] = np.where(chosen, way, 2)
    sizes = [np.sum(chosen & ~right), np.sum(chosen & right)]
    words = np.empty((len(level.words), sum(sizes)), np.uint64)

    def move(block):
        old = level.words[block]
        sides = np.take(side, _rows(old))
        words[block, : sizes[0]] = old[sides == 0].reshape(len(old), sizes[0])
        words[block, sizes[0] :] = old[sides == 1].reshape(len(old), sizes[1])

    run(move, _blocks(*level.words.shape))
    return words


def _assemble(size, made, splits):
    """Puts nodes in the order of their numbers."""
    node = np.concatenate([node for node, _ in made])
    stats = [
        np.concatenate(f, axis=-1) for f in zip(*(s for _, s in made), strict=True)
    ]
    order = np.argsort(node)
    count, weight, value, error, _ = (field[..., order] for field in stats)
    nodes = Nodes(
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
