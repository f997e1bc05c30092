# SPDX-License-Identifier: Apache-2.0
"""Naive NumPy versions of jboost's parts: literal, slow, in float64; the oracles."""

from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np

WEIGHT_SLACK = 1 - 1e-5  # of min_child_weight, as the library grants it
LEAST_GAIN = 1e-6  # of the parent's score, below which no split is made
TINY = np.finfo(np.float32).tiny


class Cut(NamedTuple):
    """One candidate split; ``gain`` is before the price of a leaf."""

    gain: float
    feature: int
    threshold: int
    missing_left: bool


class Limits(NamedTuple):
    l2: float = 1.0
    min_gain: float = 0.0
    min_child_weight: float = 1.0
    min_child_samples: int = 1


class Constraints(NamedTuple):
    """``monotone``: a sign for each feature; ``groups``: sets; empty for none."""

    l1: float = 0.0
    max_delta_step: float = np.inf
    monotone: tuple = ()
    groups: tuple = ()
    max_leaves: float = np.inf


FREE = Constraints()
NO_BOUNDS = (-np.inf, np.inf)


def apply_bins(thresholds, x):
    """0 for NaN, else 1 + the number of thresholds below the value."""
    codes = np.zeros(x.shape, np.int64)
    for row, feature in np.ndindex(*x.shape):
        value = np.float32(x[row, feature])
        if abs(value) < TINY:
            value = np.float32(0)
        if not np.isnan(value):
            below = sum(bool(value > threshold) for threshold in thresholds[feature])
            codes[row, feature] = 1 + below
    return codes


def histogram(columns, channels, node, num_nodes, num_bins):
    """Adds the channels of every row, one by one."""
    num_features, num_rows = columns.shape
    shape = (num_nodes, num_features, num_bins, channels.shape[1])
    sums = np.zeros(shape, np.int64)
    for row, feature in product(range(num_rows), range(num_features)):
        if 0 <= node[row] < num_nodes:
            sums[node[row], feature, columns[feature, row]] += channels[row]
    return sums


def score(gradient, curvature, l2):
    """G^2 / (H + l2), and 0 for a side without weight."""
    return gradient**2 / (curvature + l2) if curvature + l2 > 0 else 0.0


def side(gradient, curvature, l2, l1, bounds):
    """(score, leaf value): of all places where the least can be, the best."""
    low, high = bounds

    def objective(w):
        return 2 * gradient * w + (curvature + l2) * w**2 + 2 * l1 * abs(w)

    if curvature + l2 <= 0:
        return 0.0, float(np.clip(0.0, low, high))
    weight = curvature + l2
    places = [low, high, 0.0, -(gradient + l1) / weight, -(gradient - l1) / weight]
    places = [float(w) for w in places if low <= w <= high and np.isfinite(w)]
    best = min(places, key=objective)
    return -objective(best), best


def candidates(
    sums, features, limits, constraints=FREE, bounds=NO_BOUNDS, thresholds=None
):
    """Every admissible cut of one node.

    Args:
      sums: [F, B, 3], gradient, curvature and count.
      thresholds: for each feature, which to try; all if not given.
    """
    shrink = limits.l2, constraints.l1, bounds
    cuts = []
    num_bins = sums.shape[1]
    for feature in np.flatnonzero(features):
        total = sums[feature].sum(axis=0)
        every = range(1, num_bins) if thresholds is None else thresholds[feature]
        for threshold, missing_left in product(every, (False, True)):
            left = sums[feature, 1 : threshold + 1].sum(axis=0)
            if missing_left:
                left = left + sums[feature, 0]
            right = total - left
            least_weight = limits.min_child_weight * WEIGHT_SLACK
            if min(left[1], right[1]) < least_weight:
                continue
            if min(left[2], right[2]) < limits.min_child_samples:
                continue
            scores, values = zip(
                *(side(*sums[:2], *shrink) for sums in (left, right, total)),
                strict=True,
            )
            sign = constraints.monotone[feature] if constraints.monotone else 0
            # Above the last threshold are no values, only missing ones.
            if threshold < num_bins - 1 and sign * values[0] > sign * values[1]:
                continue
            gain = (scores[0] + scores[1] - scores[2]) / 2
            cuts.append(Cut(gain, int(feature), threshold, missing_left))
    return cuts


def find_bins(values, mass, num_bins):
    """The bin of each distinct value: where the middle of its mass lies."""
    distinct = sorted(set(values))
    each = [
        sum(m for v, m in zip(values, mass, strict=True) if v == d) for d in distinct
    ]
    total = max(sum(each), 1)
    bins, below = {}, 0.0
    for value, own in zip(distinct, each, strict=True):
        bins[value] = min(int((below + own / 2) * num_bins / total), num_bins - 1)
        below += own
    return bins


def local_thresholds(codes, mass, num_bins):
    """Highest codes of the bins of a node's values, and 1: all values may go right."""
    present = codes > 0
    bins = find_bins(codes[present].tolist(), mass[present].tolist(), num_bins)
    ends = {found: code for code, found in sorted(bins.items())}
    return sorted({1, *ends.values()} if 1 not in bins else set(ends.values()))


def find_split(
    sums, features, limits, constraints=FREE, bounds=NO_BOUNDS, thresholds=None
):
    """The best cut, or None.

    Ties go to the lowest feature, then the lowest threshold, then missing right.
    """
    cuts = candidates(sums, features, limits, constraints, bounds, thresholds)
    if not cuts:
        return None
    best = max(cuts, key=lambda cut: cut.gain)  # the first of the largest
    gradient, curvature = sums[0].sum(axis=0)[:2]
    size = score_size(gradient, curvature, limits.l2, constraints.l1, bounds)
    enough = best.gain > limits.min_gain and 2 * best.gain > LEAST_GAIN * size
    return best if enough else None


def score_size(gradient, curvature, l2, l1, bounds):
    """How large the terms of a score are; without bounds, the score itself."""
    weight = curvature + l2
    if weight <= 0:
        return 0.0
    _, value = side(gradient, curvature, l2, l1, bounds)
    pulled = abs(gradient + l1 * np.sign(value)) / weight
    return weight * abs(value) * max(abs(value), pulled)


def child_bounds(sums, cut, limits, constraints, bounds):
    """Bounds of leaf values below the left and the right child."""
    left = sums[cut.feature, 1 : cut.threshold + 1].sum(axis=0)
    if cut.missing_left:
        left = left + sums[cut.feature, 0]
    right = sums[cut.feature].sum(axis=0) - left
    values = [side(*s[:2], limits.l2, constraints.l1, bounds)[1] for s in (left, right)]
    sign = constraints.monotone[cut.feature] if constraints.monotone else 0
    if sign == 0:
        return bounds, bounds
    if cut.threshold == sums.shape[1] - 1:
        sign = 1 if values[0] <= values[1] else -1
    middle = sum(values) / 2
    lower, upper = (bounds[0], middle), (middle, bounds[1])
    return (lower, upper) if sign > 0 else (upper, lower)


def may_use(path, groups, num_features):
    """Features that may follow on a path, as a mask."""
    if not groups or not path:
        return np.ones(num_features, bool)
    allowed = set(path).union(*(group for group in groups if set(path) <= set(group)))
    return np.isin(np.arange(num_features), list(allowed))


class GrownTree(NamedTuple):
    """In heap order, and the leaf of every row, as :class:`jboost.Tree`.

    ``bounds`` of leaf values, for leaves that rows are in.
    """

    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    leaf: np.ndarray
    bounds: dict


def grow_tree(
    columns, gradient, curvature, in_bag, limits, max_depth, num_bins, constraints=FREE,
    local=None,
):  # fmt: skip
    """Grows level by level; every node looks at its own rows.

    ``local`` is a pair (mass of each row, number of bins): each node then tries only
    the ends of its own bins.
    """
    num_features, num_rows = columns.shape
    feature = np.zeros(2**max_depth - 1, np.int64)
    threshold = np.full(2**max_depth - 1, num_bins - 1)
    missing_left = np.ones(2**max_depth - 1, bool)
    node = np.zeros(num_rows, np.int64)
    values = np.stack([gradient, curvature, np.ones(num_rows)], axis=1)
    values = values.astype(np.float64)
    most = constraints.max_delta_step
    bounds, paths, num_leaves = {0: (-most, most)}, {0: ()}, 1
    for level in range(max_depth):
        every = range(2**level - 1, 2 ** (level + 1) - 1)
        sums, cuts = {}, {}
        for here in every:
            learnt = np.flatnonzero((node == here) & in_bag)
            if len(learnt) == 0:
                continue
            sums[here] = np.zeros((num_features, num_bins, 3))
            for f in range(num_features):
                np.add.at(sums[here][f], columns[f, learnt], values[learnt])
            usable = may_use(paths[here], constraints.groups, num_features)
            thresholds = None
            if local is not None:
                mass, bins = local
                thresholds = [
                    local_thresholds(column[learnt], mass[learnt], bins)
                    for column in columns
                ]
            cut = find_split(
                sums[here], usable, limits, constraints, bounds[here], thresholds
            )
            if cut is not None:
                cuts[here] = cut
        best_first = sorted(cuts, key=lambda here: -cuts[here].gain)  # stable
        room = constraints.max_leaves - num_leaves
        cuts = {here: cuts[here] for n, here in enumerate(best_first) if n < room}
        num_leaves += len(cuts)
        for here in every:
            rows, cut = np.flatnonzero(node == here), cuts.get(here)
            if here in bounds:
                bounds[2 * here + 1] = bounds[here]
                paths[2 * here + 1] = paths[here]
            if cut is not None:
                codes = columns[cut.feature, rows[in_bag[rows]]]
                feature[here], threshold[here] = cut.feature, cut.threshold
                missing_left[here] = cut.missing_left
                if not np.any(codes == 0):
                    num_left = np.sum(codes <= cut.threshold)
                    missing_left[here] = 2 * num_left >= len(codes)
                children = 2 * here + 1, 2 * here + 2
                of_children = child_bounds(
                    sums[here], cut, limits, constraints, bounds[here]
                )
                for child, of_child in zip(children, of_children, strict=True):
                    bounds[child] = of_child
                    paths[child] = (*paths[here], cut.feature)
            for row in rows:
                code = columns[feature[here], row]
                left = code <= threshold[here] if code else missing_left[here]
                node[row] = 2 * here + (1 if left else 2)
    first = 2**max_depth - 1
    leaf_bounds = {here - first: bounds[here] for here in bounds if here >= first}
    return GrownTree(feature, threshold, missing_left, node - first, leaf_bounds)


def predict(model, x):
    """Scores of an Ensemble on raw values, one row and one tree at a time."""
    arrays = (model.feature, model.threshold, model.missing_left, model.leaf_value)
    feature, threshold, missing_left, leaf_value = map(np.asarray, arrays)
    num_rounds, num_scores, num_nodes = feature.shape
    start = np.asarray(model.init_score, np.float64).reshape(-1)
    scores = np.tile(start, (len(x), 1))
    for row, tree, k in product(range(len(x)), range(num_rounds), range(num_scores)):
        node = 0
        while node < num_nodes:
            value = np.float32(x[row, feature[tree, k, node]])
            value = np.float32(0) if abs(value) < TINY else value
            left = value <= threshold[tree, k, node]
            if np.isnan(value):
                left = missing_left[tree, k, node]
            node = 2 * node + (1 if left else 2)
        scores[row, k] += leaf_value[tree, k, node - num_nodes]
    return scores if np.ndim(model.init_score) else scores[:, 0]


class CartNode(NamedTuple):
    """A node of a single regression tree; leaves have no split and no children."""

    value: list
    squared_error: Fraction
    weight: Fraction
    num_rows: int
    split: tuple | None = None  # feature, threshold, missing_left, gain
    left: "CartNode | None" = None
    right: "CartNode | None" = None


def fit_cart(
    x, y, weights, *, max_depth=10**9, min_child_samples=1, min_split_samples=2,
    min_child_weight=0, min_gain=0,
):  # fmt: skip
    """Grows a tree of least squares by recursion, in exact fractions.

    Args:
      x: [N, F] with NaN; y: [N, K]; weights: [N], positive.
    """
    y = [[Fraction(float(value)) for value in row] for row in y]
    w = [Fraction(float(weight)) for weight in weights]

    def describe(rows):
        total = sum(w[i] for i in rows)
        sums = [sum(w[i] * y[i][k] for i in rows) for k in range(len(y[0]))]
        value = [s / total for s in sums]
        error = sum(
            w[i] * (y[i][k] - value[k]) ** 2 for i in rows for k in range(len(value))
        )
        return CartNode(value, error, total, len(rows))

    def cuts(rows, node):
        for feature in range(x.shape[1]):
            values = sorted({float(v) for v in x[rows, feature] if not np.isnan(v)})
            gaps = list(zip(values, [*values[1:], np.inf], strict=False))
            missing = bool(np.isnan(x[rows, feature]).any())
            for (low, high), missing_left in product(gaps, (False, True)):
                last = low == values[-1]
                if (missing_left and (last or not missing)) or (last and not missing):
                    continue
                v = x[rows, feature]
                left = np.where(np.isnan(v), missing_left, v <= low)
                sides = [[i for i, s in zip(rows, left, strict=True) if s == side]
                         for side in (True, False)]  # fmt: skip
                first, second = map(describe, sides)
                if min(first.num_rows, second.num_rows) < min_child_samples:
                    continue
                if min(first.weight, second.weight) < min_child_weight:
                    continue
                middle = np.float32(np.inf if last else (low + high) / 2)
                if not missing:
                    missing_left = first.weight >= second.weight
                gain = node.squared_error - first.squared_error - second.squared_error
                yield gain, (feature, middle, missing_left, gain), sides

    def grow(rows, depth):
        node = describe(rows)
        few = len(rows) < min_split_samples
        if depth == max_depth or few or node.squared_error == 0:
            return node
        best = max(cuts(rows, node), key=lambda cut: cut[0], default=None)
        if best is None or best[0] < min_gain:
            return node
        left, right = (grow(side, depth + 1) for side in best[2])
        return node._replace(split=best[1], left=left, right=right)

    return grow(list(range(len(x))), 0)


def pruned_costs(node):
    """(leaves, squared error) of every subtree with the same root, all of them."""
    costs = [(1, node.squared_error)]
    if node.left is not None:
        pairs = product(pruned_costs(node.left), pruned_costs(node.right))
        costs += [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
    return costs
