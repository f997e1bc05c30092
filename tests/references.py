# SPDX-License-Identifier: Apache-2.0
"""Naive NumPy versions of jboost's parts: literal, slow, in float64; the oracles."""

from fractions import Fraction
from itertools import chain, combinations, product
from math import comb
from typing import NamedTuple

import numpy as np

WEIGHT_SLACK = 1 - 1e-5  # of min_child_weight, as the library grants it
LEAST_GAIN = 1e-6  # of the parent's score, below which no split is made
TINY = np.finfo(np.float32).tiny


class Cut(NamedTuple):
    """One candidate split; ``gain`` is before the price of a leaf.

    ``threshold`` is a code, or the set of codes that go left.
    """

    gain: float
    feature: int
    threshold: int | frozenset
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


class Categories(NamedTuple):
    """``features``: {place: number of codes} of the categorical features."""

    features: dict
    max_onehot: int = 0


FREE = Constraints()
NO_CATEGORIES = Categories({})
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


def left_sums(sums, threshold, missing_left):
    """Of one feature's sums, those that a cut sends left."""
    if isinstance(threshold, frozenset):
        left = sum((sums[code] for code in threshold), np.zeros(sums.shape[1]))
    else:
        left = sums[1 : threshold + 1].sum(axis=0)
    return left + sums[0] if missing_left else left


def seen_codes(sums):
    """Codes of one feature that some row has; the rows of others are no matter."""
    return [code for code in range(1, len(sums)) if np.any(sums[code] != 0)]


def shrink(sums, squares, rows_weight):
    """Replaces sums of gradient by their expectations in a model of random effects.

    G_c = H_c (mean + effect_c) + error of variance phi H_c, with phi from the rows and
    the variance of effects by the method of moments; None if there is none.
    """
    seen = [code for code in seen_codes(sums) if sums[code][1] > 0]
    shrunk = sums.copy()
    if not seen:
        return None
    gradient, weight = sums[seen, 0], sums[seen, 1]
    mean = sum(sums[1:, 0]) / sum(weight)
    between = sum(weight * (gradient / weight - mean) ** 2)
    phi = squares / rows_weight
    spread = sum(weight) - sum(weight**2) / sum(weight)
    excess = between - (len(seen) - 1) * phi
    if len(seen) < 2 or excess <= 1e-9 * between:
        return None
    shrunk[1:, 0] = 0.0
    strength = phi * spread / excess
    effect = (gradient / weight - mean) * weight / (weight + strength)
    shrunk[seen, 0] = weight * (mean + effect)
    return shrunk


def left_sets(sums, shrunk, num_codes, categories):
    """Sets of categories that may go left, in order."""
    seen = seen_codes(sums)
    if num_codes <= categories.max_onehot:
        return [frozenset([code]) for code in seen]
    if shrunk is None:
        return [frozenset(seen)] if seen else []

    def mean(code):
        # Equal sums are equal numbers, however they were rounded.
        return round(shrunk[code][0] / max(shrunk[code][1], 1e-30), 12)

    order = sorted(seen, key=mean)  # stable: equal means by code
    return [frozenset(order[: size + 1]) for size in range(len(order))]


def candidates(
    sums, features, limits, constraints=FREE, bounds=NO_BOUNDS, thresholds=None,
    categories=NO_CATEGORIES, squares=0.0,
):  # fmt: skip
    """Every admissible cut of one node.

    Args:
      sums: [F, B, 3], gradient, curvature and count.
      squares: sum of the squares of the rows' gradients.
      thresholds: for each feature, which to try; all if not given.
    """
    cuts = []
    num_bins = sums.shape[1]
    for feature in np.flatnonzero(features):
        of_codes = sums[feature]
        every = range(1, num_bins) if thresholds is None else thresholds[feature]
        if feature in categories.features:
            num_codes = categories.features[feature]
            if num_codes > categories.max_onehot:
                rows_weight = of_codes[:, 1].sum()
                of_codes = shrink(of_codes, squares, rows_weight)
            every = left_sets(sums[feature], of_codes, num_codes, categories)
        of_codes = sums[feature] if of_codes is None else of_codes
        total = of_codes.sum(axis=0)
        for threshold, missing_left in product(every, (False, True)):
            left = left_sums(of_codes, threshold, missing_left)
            right = total - left
            if min(left[1], right[1]) < limits.min_child_weight * WEIGHT_SLACK:
                continue
            if min(left[2], right[2]) < limits.min_child_samples:
                continue
            sides = (left, right, total)
            scores, values = zip(
                *(side(*s[:2], limits.l2, constraints.l1, bounds) for s in sides),
                strict=True,
            )
            sign = constraints.monotone[feature] if constraints.monotone else 0
            # Above the last threshold are no values, only missing ones.
            inside = sign != 0 and threshold < num_bins - 1
            if inside and sign * values[0] > sign * values[1]:
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


def local_thresholds(codes, mass, num_bins, last):
    """Highest codes of the bins of a node's values, 1, and the last of all codes.

    So all values may go right, and all may go left, whatever values other rows have.
    """
    present = codes > 0
    bins = find_bins(codes[present].tolist(), mass[present].tolist(), num_bins)
    ends = {found: code for code, found in sorted(bins.items())}
    return sorted({*ends.values(), last} | ({1} if 1 not in bins else set()))


def find_split(
    sums, features, limits, constraints=FREE, bounds=NO_BOUNDS, thresholds=None,
    categories=NO_CATEGORIES, squares=0.0,
):  # fmt: skip
    """The best cut, or None.

    Ties go to the lowest feature, then the lowest threshold, then missing right.
    """
    cuts = candidates(
        sums, features, limits, constraints, bounds, thresholds, categories, squares
    )
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
    left = left_sums(sums[cut.feature], cut.threshold, cut.missing_left)
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
    """In heap order, and the leaf of every row, as :class:`jboost.parts.Tree`.

    ``bounds`` of leaf values, for leaves that rows are in; ``left_codes`` of nodes that
    categories split, whose threshold is -1.
    """

    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    leaf: np.ndarray
    bounds: dict
    left_codes: dict


def grow_tree(
    columns, gradient, curvature, in_bag, limits, max_depth, num_bins, constraints=FREE,
    local=None, categories=NO_CATEGORIES,
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
    left_codes = {}
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
                    local_thresholds(column[learnt], mass[learnt], bins, num_bins - 1)
                    for column in columns
                ]
            cut = find_split(
                sums[here], usable, limits, constraints, bounds[here], thresholds,
                categories, np.sum(values[learnt, 0] ** 2),
            )  # fmt: skip
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
                feature[here], missing_left[here] = cut.feature, cut.missing_left
                if isinstance(cut.threshold, frozenset):
                    threshold[here] = -1
                    goes_left = np.isin(codes, list(cut.threshold))
                else:
                    threshold[here] = cut.threshold
                    goes_left = codes <= cut.threshold
                if not np.any(codes == 0):
                    missing_left[here] = 2 * np.sum(goes_left) >= len(codes)
                if threshold[here] == -1:  # other categories go with missing values
                    every_code = set(range(1, categories.features[cut.feature] + 1))
                    absent = every_code - {*seen_codes(sums[here][cut.feature])}
                    gone = absent if missing_left[here] else set()
                    left_codes[here] = cut.threshold | gone
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
                if code and here in left_codes:
                    left = code in left_codes[here]
                node[row] = 2 * here + (1 if left else 2)
    first = 2**max_depth - 1
    leaf_bounds = {here - first: bounds[here] for here in bounds if here >= first}
    leaf = node - first
    return GrownTree(feature, threshold, missing_left, leaf, leaf_bounds, left_codes)


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


LEAST_DROP = 1e-9  # of a node's cost: less is rounding


def least_squares(responses, weights):
    """The cost of a node, sum w (response - mean)^2, as a function of its rows."""

    def cost(rows):
        mean = np.average(responses[rows], weights=weights[rows])
        return np.sum(weights[rows] * (responses[rows] - mean) ** 2)

    return cost


def second_order(gradient, hessian, limits):
    """-1/2 G^2 / (H + lambda) + gamma (Chen and Guestrin 2016, eq. 6, of one leaf)."""

    def cost(rows):
        total, weight = gradient[rows].sum(), hessian[rows].sum()
        if weight < limits.min_child_weight:
            return np.inf
        return -(total**2) / (weight + limits.l2) / 2 + limits.min_gain

    return cost


def exhaustive_tree(x, cost, in_bag, depth):
    """Tries every feature and every midpoint of distinct values, in every node.

    Returns:
      The leaf of each row as in heap order, a node without split sending all left; and
      the least lead, relative to its own drop of the cost, of a chosen cut over one
      that parts the rows otherwise: how far the data are from a tie.
    """
    node, lead = np.zeros(len(x), np.int64), np.inf
    values = [np.unique(column) for column in x.T]
    middles = [v[:-1] / 2 + v[1:] / 2 for v in values]
    cuts = [(k, middle) for k, some in enumerate(middles) for middle in some]
    for here in range(2**depth - 1):
        rows = np.flatnonzero(node == here)
        learnt = rows[in_bag[rows]]
        tried = []
        for feature, threshold in cuts:
            left = x[learnt, feature] <= threshold
            if 0 < left.sum() < len(learnt):
                total = cost(learnt[left]) + cost(learnt[~left])
                tried.append((total, feature, threshold, left))
        best = min(tried, key=lambda cut: cut[0], default=(np.inf,))
        drop = cost(learnt) - best[0] if len(learnt) else -np.inf
        node[rows] = 2 * here + 1
        if drop > LEAST_DROP * (1 + abs(best[0])):
            right = x[rows, best[1]] > best[2]
            node[rows[right]] = 2 * here + 2
            # The same two parts, left and right exchanged or not, gain the same.
            others = [
                total for total, _, _, left in tried if len({*(left == best[3])}) > 1
            ]
            lead = min([lead, *((total - best[0]) / drop for total in others)])
    return node - (2**depth - 1), lead


class Boosted(NamedTuple):
    """Scores [R, N] or [R, N, K] and leaves [R, K, N] of each round; see ``lead``."""

    scores: np.ndarray
    leaves: np.ndarray
    lead: float


class Plan(NamedTuple):
    """How to boost, and which rows each round learns from."""

    rate: float
    depth: int
    bags: np.ndarray  # [R, N]


def tree_boost(x, w, start, respond, leaf_value, plan):
    """Friedman 2001, algorithms 2 to 5: they differ in start, response and leaf.

    Args:
      respond: scores -> pseudo-responses of all rows.
      leaf_value: (scores, the rows of a leaf that are in the bag) -> gamma.
    """
    scores, stages, leaves, leads = np.full(len(x), float(start)), [], [], []
    for bag in plan.bags:
        now = scores.copy()
        cost = least_squares(respond(now), w)
        leaf, lead = exhaustive_tree(x, cost, bag, plan.depth)
        for j in np.unique(leaf[bag]):
            gamma = leaf_value(now, np.flatnonzero(bag & (leaf == j)))
            scores[leaf == j] += plan.rate * gamma
        stages.append(scores.copy())
        leaves.append([leaf])
        leads.append(lead)
    return Boosted(np.array(stages), np.array(leaves), min(leads))


def ls_tree_boost(x, y, w, plan):
    """Algorithm 2, with weights."""

    def mean_residual(scores, rows):
        return np.average(y[rows] - scores[rows], weights=w[rows])

    start = np.average(y, weights=w)
    return tree_boost(x, w, start, lambda scores: y - scores, mean_residual, plan)


def median(values, weights):
    """Midpoint of all c with at most half the weight on either side."""
    order = np.argsort(values)
    order = order[weights[order] > 0]
    below = np.cumsum(weights[order], dtype=np.float64)
    half = below[-1] / 2
    first = np.flatnonzero(below >= half * (1 - 1e-12))[0]
    last = np.flatnonzero(below > half * (1 + 1e-12))[0]
    return (values[order[first]] + values[order[last]]) / 2


def lad_tree_boost(x, y, w, plan):
    """Algorithm 3, with weights."""

    def median_residual(scores, rows):
        return median(y[rows] - scores[rows], w[rows])

    def signs(scores):
        return np.sign(y - scores)

    return tree_boost(x, w, median(y, w), signs, median_residual, plan)


def upper_size(residual, weights, alpha):
    """The least size above 0 with a share alpha of the weight at or below it: delta."""
    order = np.argsort(abs(residual))
    below = np.cumsum(weights[order], dtype=np.float64)
    delta = abs(residual)[order[np.argmax(below >= alpha * below[-1])]]
    positive = abs(residual)[(weights > 0) & (residual != 0)]
    return max(delta, positive.min(initial=np.inf)) if len(positive) else delta


def m_tree_boost(x, y, w, plan, alpha):
    """Algorithm 4, with weights."""

    def clip(residual, delta):
        return np.sign(residual) * np.minimum(delta, abs(residual))

    def respond(scores):
        return clip(y - scores, upper_size(y - scores, w, alpha))

    def one_step(scores, rows):
        residual, delta = y[rows] - scores[rows], upper_size(y - scores, w, alpha)
        middle = median(residual, w[rows])
        return middle + np.average(clip(residual - middle, delta), weights=w[rows])

    return tree_boost(x, w, median(y, w), respond, one_step, plan)


def l2_tree_boost(x, y, w, plan):
    """Algorithm 5 as printed: targets -1 and +1, F half the log-odds; with weights."""
    sign = 2 * y - 1

    def respond(scores):
        return 2 * sign / (1 + np.exp(2 * sign * scores))

    def newton(scores, rows):
        response = respond(scores)[rows]
        size = np.sum(w[rows] * abs(response) * (2 - abs(response)))
        return np.sum(w[rows] * response) / size

    mean = np.average(sign, weights=w)
    start = np.log((1 + mean) / (1 - mean)) / 2
    return tree_boost(x, w, start, respond, newton, plan)


def l2_tree_boost_multiclass(x, y, num_classes, w, plan):
    """Algorithm 6 as printed, with weights; F_k0 = 0."""
    scores = np.zeros((len(x), num_classes))
    stages, leaves, leads = [], [], []
    for bag in plan.bags:
        odds = np.exp(scores)
        p = odds / odds.sum(axis=1, keepdims=True)
        leaves.append([])
        for k in range(num_classes):
            response = (y == k) - p[:, k]
            cost = least_squares(response, w)
            leaf, lead = exhaustive_tree(x, cost, bag, plan.depth)
            for j in np.unique(leaf[bag]):
                rows = np.flatnonzero(bag & (leaf == j))
                size = abs(response[rows])
                gamma = np.sum(w[rows] * response[rows])
                gamma /= np.sum(w[rows] * size * (1 - size))
                gamma *= (num_classes - 1) / num_classes
                scores[leaf == j, k] += plan.rate * gamma
            leaves[-1].append(leaf)
            leads.append(lead)
        stages.append(scores.copy())
    return Boosted(np.array(stages), np.array(leaves), min(leads))


def gradient_boost(x, w, start, negative_gradient, multiplier, plan):
    """Algorithm 1 with a least squares tree, and the multiplier of each round.

    Args:
      negative_gradient: scores -> pseudo-responses of all rows.
      multiplier: (scores, the tree's values, rows in the bag) -> rho.
    """
    scores = np.full(len(x), float(start))
    stages, leaves, leads, rhos = [], [], [], []
    for bag in plan.bags:
        response = negative_gradient(scores)
        leaf, lead = exhaustive_tree(x, least_squares(response, w), bag, plan.depth)
        values = np.zeros(len(x))
        for j in np.unique(leaf[bag]):
            rows = np.flatnonzero(bag & (leaf == j))
            values[leaf == j] = np.average(response[rows], weights=w[rows])
        rhos.append(multiplier(scores, values, np.flatnonzero(bag)))
        scores = scores + plan.rate * rhos[-1] * values
        stages.append(scores)
        leaves.append([leaf])
        leads.append(lead)
    return Boosted(np.array(stages), np.array(leaves), min(leads)), rhos


def xgboost(x, w, start, derivatives, limits, plan):
    """Chen and Guestrin 2016, section 2, by exact greedy search.

    Args:
      derivatives: scores -> gradient and hessian of all rows.
    """
    scores = np.full(len(x), float(start))
    stages, leaves, leads = [], [], []
    for bag in plan.bags:
        gradient, hessian = (w * values for values in derivatives(scores))
        cost = second_order(gradient, hessian, limits)
        leaf, lead = exhaustive_tree(x, cost, bag, plan.depth)
        for j in np.unique(leaf[bag]):
            rows = np.flatnonzero(bag & (leaf == j))
            value = -gradient[rows].sum() / (hessian[rows].sum() + limits.l2)
            scores[leaf == j] += plan.rate * value
        stages.append(scores.copy())
        leaves.append([leaf])
        leads.append(lead)
    return Boosted(np.array(stages), np.array(leaves), min(leads))


def tree_game(tree, num_features):
    """{features that are known: mean value of the leaves}, for one row in one tree.

    A tree is (value, cover) of a leaf, or (feature, the side that the row goes to, the
    other one). Where there is no cover to share, each side gets a half. The value may
    be a function of the known features.
    """

    def covered(tree):
        return tree[1] if len(tree) == 2 else covered(tree[1]) + covered(tree[2])

    def expect(tree, known):
        if len(tree) == 2:
            return float(tree[0](known) if callable(tree[0]) else tree[0])
        feature, own, other = tree
        if feature in known:
            return expect(own, known)
        total = covered(own) + covered(other)
        share = covered(own) / total if total > 0 else 0.5
        return share * expect(own, known) + (1 - share) * expect(other, known)

    features = range(num_features)
    sets = [combinations(features, size) for size in range(num_features + 1)]
    return {frozenset(known): expect(tree, known) for known in chain(*sets)}


def shapley_values(game, num_features):
    """The average over all orders of what each player adds."""
    values = np.zeros(num_features)
    for player, known in product(range(num_features), game):
        if player not in known:
            factor = 1 / (num_features * comb(num_features - 1, len(known)))
            values[player] += factor * (game[known | {player}] - game[known])
    return values


def shapley_interactions(game, num_features):
    """Lundberg et al. 2020, equations 3 to 5."""
    pairs = np.zeros((num_features, num_features))
    for i, j, known in product(range(num_features), range(num_features), game):
        if i != j and not known & {i, j}:
            factor = 1 / (2 * (num_features - 1) * comb(num_features - 2, len(known)))
            both = game[known | {i, j}] - game[known | {i}] - game[known | {j}]
            pairs[i, j] += factor * (both + game[known])
    np.fill_diagonal(pairs, shapley_values(game, num_features) - pairs.sum(axis=1))
    return pairs
