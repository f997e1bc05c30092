# SPDX-License-Identifier: Apache-2.0
"""Finds the best split of one node from its histogram; the caller maps over nodes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.codes.bins import MISSING
from jboost.numerics.random import hash_words

_LEAST_GAIN = 1e-6  # relative to the parent's score: less may be rounding
_WEIGHT_SLACK = 1 - 1e-5  # float32 means of equal curvatures miss 1 by a few ulp
UNBOUNDED = float(np.finfo(np.float32).max)  # finite: bounds are averaged


class ValueLimits(NamedTuple):
    """Limits of the leaf values below a node.

    Attributes:
      l1: shift of gradient sums toward 0.
      bounds: least and greatest leaf value.
      monotone: constraint on each feature: 1 rising, -1 falling, 0 either.
    """

    l1: Float[Array, ""]
    bounds: Float[Array, "2"]
    monotone: Int32[Array, " F"]


class Split(NamedTuple):
    """The split of a node; the fields are scalars, or have an axis of nodes.

    Attributes:
      feature: index of the feature.
      threshold: a code; rows with 1 <= code <= threshold go left. -1 where codes are
        categories.
      missing_left: whether rows with code 0 go left.
      gain: decrease of the regularized objective, before the learning rate.
      found: whether there is an admissible split of positive gain.
      child_bounds: least and greatest leaf value below the left and the right child,
        if leaf values are limited.
      left_codes, absent_codes: bits of the categories that go left, and of those
        without a row in the node, if there are categorical features.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x = jnp.array([[1.0], [1.0], [2.0], [2.0]])
      >>> codes = jb.apply_bins(jb.fit_bins(x), x)
      >>> gradient = jnp.array([-3.0, -3.0, 3.0, 3.0])
      >>> split = jb.parts.find_split(jb.parts.build_histogram(codes, gradient), l2=0.0)
      >>> split.found.tolist(), split.feature.tolist(), split.gain.tolist()
      ([True], [0], [18.0])
    """

    feature: Int32[Array, "*M"]
    threshold: Int32[Array, "*M"]
    missing_left: Bool[Array, "*M"]
    gain: Float[Array, "*M"]
    found: Bool[Array, "*M"]
    child_bounds: Float[Array, "*M 2 2"] | None = None
    left_codes: UInt32[Array, "*M W"] | None = None
    absent_codes: UInt32[Array, "*M W"] | None = None


class Draw(NamedTuple):
    """Inputs of :func:`draw_thresholds` for one node.

    Attributes:
      rows_per_threshold: rows of the node per threshold to try; 0: try all thresholds.
      seed: the seed of the node.
    """

    rows_per_threshold: Int32[Array, ""]
    seed: UInt32[Array, "2"]


def search_split(
    histogram: Int32[Array, "F B C"],
    unit: Float[Array, "2"],
    features: Bool[Array, " F"],
    *,
    l2: Float[Array, ""] | float = 1.0,
    min_gain: Float[Array, ""] | float = 0.0,
    min_child_weight: Float[Array, ""] | float = 1.0,
    min_child_samples: Int32[Array, ""] | int = 1,
    values: ValueLimits | None = None,
    draw: Draw | None = None,
) -> Split:
    """Searches the features, thresholds and directions of the missing rows.

    gain = [G_L^2/(H_L+l2) + G_R^2/(H_R+l2) - G^2/(H+l2)] / 2 - min_gain (Chen and
    Guestrin 2016, eq. 7).

    With limits on leaf values, each of the three terms is -min over w in the node's
    bounds of 2 G w + (H + l2) w^2 + 2 l1 |w|, which is the above without limits; and
    where a feature is monotone, only cuts with w_L <= w_R (or >=) are admissible.
    Leaf values below such a cut are kept apart by (w_L + w_R) / 2. A cut between
    values and missing ones may have either order.

    Missing rows are tried on both sides. Where a threshold is above all values,
    values are split from missing ones. Equal gains go to the lowest feature, then
    the lowest threshold, then to missing rows right.

    Args:
      histogram: integer sums of gradient, curvature and count. With C = 2 all rows
        have the same curvature, 1 as an integer, which then is the count.
      unit: value of one integer of gradient and of one of curvature; positive.
      min_gain: kappa, the price of a leaf.
      draw: the thresholds to try; None: all.
    """
    # Channels in front: long rows of bins vectorize, pairs of channels do not.
    sums = jnp.moveaxis(histogram, -1, 0)
    cumulative = jnp.cumsum(sums, axis=2)
    total, missing = cumulative[:, :1, -1:], sums[:, :, MISSING, None]
    least = child_limits(min_child_weight, min_child_samples)
    num_bins = sums.shape[2]
    if values is None:
        gain_of = partial(cut_gain, node_score(total, unit, l2), unit, l2)
    else:
        parent, _, _ = limited_score(total, unit, l2, values)
        # Above the last threshold are no values, only missing ones.
        inside = (jnp.arange(num_bins, dtype=jnp.int32) < num_bins - 1)[None, :]
        sign = jnp.where(inside, values.monotone[:, None], 0)
        gain_of = partial(limited_gain, parent, unit, l2, values, sign)
    # Code 0 is no threshold: "all values right" mirrors "all values left".
    known = (jnp.arange(num_bins, dtype=jnp.int32) > MISSING)[None, :]
    allowed = features[:, None] & known
    if draw is not None:
        feature = jnp.arange(features.shape[0], dtype=jnp.int32)
        seen = known & jnp.any(sums != 0, axis=0)
        complete = jnp.all(missing == 0, axis=(0, 2)).astype(jnp.int32)
        cuts = jnp.sum(seen, axis=1, dtype=jnp.int32) - complete
        allowed &= draw_thresholds(seen, cuts, total[-1, 0, 0], feature, draw)

    def measure(left, right):
        admissible = allowed & are_large_enough(left, right, unit, least)
        return jnp.where(admissible, gain_of(left, right), -jnp.inf)

    best, first, left = search_cuts(measure, cumulative, missing, total)
    feature = jax.lax.div(first, jnp.int32(num_bins))
    threshold = jax.lax.rem(first, jnp.int32(num_bins))
    if values is None:
        noise, child_bounds = node_score(total, unit, l2), None
    else:
        noise = limited_score(total, unit, l2, values)[2]
        cut = cumulative[:, feature, threshold]
        cut -= jnp.where(left, 0, missing[:, feature, 0])
        child_bounds = bound_children(
            cut, total[:, 0, 0], unit, l2, values, feature, threshold == num_bins - 1
        )
    return Split(
        feature=feature,
        threshold=threshold,
        missing_left=left,
        gain=best - min_gain,
        found=is_worth(best, noise[0, 0], min_gain),
        child_bounds=child_bounds,
    )


def draw_thresholds(
    seen: Bool[Array, "F B"],
    cuts: Int32[Array, " F"],
    num_rows: Int32[Array, ""],
    feature: Int32[Array, " F"],
    draw: Draw,
) -> Bool[Array, "F B"]:
    """Draws the thresholds of one node that the search tries.

    Of the m cuts of a feature, k = max(1, round(n / rows_per_threshold)) are drawn, one
    from each of k ranges of ranks, where n is the number of the node's rows. Sizes of
    the ranges differ by at most 1. If k >= m, all cuts are tried.

    Args:
      seen: the bins with rows; cut r is above the r-th of them.
      cuts: the number m of cuts of each feature; ``seen`` may hold one bin more.
      num_rows: the number n of rows of the node.
      feature: the index of each feature, which the random numbers depend on.
    """
    cuts = jnp.maximum(cuts, 1)[:, None]
    per = jnp.maximum(draw.rows_per_threshold, 1)
    wanted = jnp.maximum((num_rows + (per >> 1)) // per, 1)
    every = (draw.rows_per_threshold <= 0) | (wanted >= cuts)
    wanted = jnp.minimum(wanted, cuts).astype(jnp.uint32)
    cuts = cuts.astype(jnp.uint32)
    rank = jnp.cumsum(seen, axis=1, dtype=jnp.uint32)  # from 1
    # The last range that begins at or below a rank; products are below 2^32.
    number = (jnp.maximum(rank, 1) * wanted - 1) // cuts
    first, end = number * cuts // wanted, (number + 1) * cuts // wanted
    word = hash_words(feature[:, None].astype(jnp.uint32) * 65536 + number, draw.seed)
    drawn = first + (((word >> 16) * (end - first)) >> 16)
    return every | (seen & (rank <= cuts) & (rank == drawn + 1))


def child_limits(
    min_weight: Float[Array, "*G"] | float, min_count: Int32[Array, ""] | int
) -> tuple[Float[Array, "*G"], Int32[Array, ""]]:
    """Returns the least weight and count of a child, to compare sums with."""
    weight = jnp.asarray(min_weight, jnp.float32) * jnp.float32(_WEIGHT_SLACK)
    return weight, jnp.asarray(min_count, jnp.int32)


def search_cuts(
    measure: Callable[[Array, Array], Array],
    cumulative: Int32[Array, "C F B"],
    missing: Int32[Array, "C F 1"],
    total: Int32[Array, "C #F 1"],
) -> tuple[Float[Array, ""], Int32[Array, ""], Bool[Array, ""]]:
    """Finds the best of all cuts, in both directions of the missing rows.

    ``measure`` takes the sums left and right of each cut, and returns gains, -inf where
    a cut is not admissible. ``cumulative`` are the sums left of each cut, with missing
    rows; ``total`` is that of the node, for all features or for each. Returns the best
    gain, the flattened index of its cut in [F, B], and whether missing rows go left.
    """

    def try_direction(direction, best):
        """Sends missing rows right (0) or left (1), for all features and thresholds."""
        left = cumulative - (1 - direction) * missing
        flat = measure(left, total - left).reshape(-1)
        gain = jnp.max(flat)
        # Maximum, then first match: XLA's argmax is several times slower on CPU.
        position = jnp.arange(flat.size, dtype=jnp.int32)
        first = jnp.min(jnp.where(flat == gain, position, flat.size - 1))
        better = (gain > best[0]) | ((gain == best[0]) & (first < best[1]))
        new = (gain, first, jnp.asarray(direction == 1))
        return tuple(jnp.where(better, n, b) for n, b in zip(new, best, strict=True))

    size = cumulative.shape[1] * cumulative.shape[2]
    nothing = (jnp.float32(-jnp.inf), jnp.int32(size), jnp.asarray(False))

    def try_needed(missing):
        directions = 1 + jnp.any(missing != 0).astype(jnp.int32)
        return jax.lax.fori_loop(0, directions, try_direction, nothing)

    def try_both(missing):
        # Without missing rows the second direction changes nothing; a GPU would wait
        # until the host knows.
        del missing
        return jax.lax.fori_loop(0, 2, try_direction, nothing)

    return jax.lax.platform_dependent(missing, cpu=try_needed, default=try_both)


def is_worth(gain, parent, min_gain):
    """Returns whether a gain pays for a leaf, and exceeds rounding errors."""
    return (gain > min_gain) & (2 * gain > _LEAST_GAIN * parent)


def are_large_enough(left, right, unit, limits):
    """Returns whether both children of each cut are, from sums [C, F, B]."""
    least_weight, least_count = limits
    lighter = jnp.minimum(left[1], right[1]).astype(jnp.float32) * unit[1]
    enough = lighter >= least_weight
    return enough & (jnp.minimum(left[-1], right[-1]) >= least_count)


def cut_gain(parent, unit, l2, left, right):
    """Returns the gain of every cut, without limits on leaf values."""
    return (node_score(left, unit, l2) + node_score(right, unit, l2) - parent) / 2


def node_score(sums, unit, l2):
    """Returns G^2 / (H + l2), and 0 for a side without weight.

    l2 is added in units of H's integers: no product then feeds a sum, which some
    compilers would contract and others not, and gains are the same bits everywhere.
    """
    gradient, weight = sums_in_units(sums, unit, l2)
    return jnp.square(gradient) / jnp.where(weight > 0, weight, jnp.inf)


def sums_in_units(sums, unit, l2):
    """Returns G and H + l2 from integers."""
    gradient = sums[0].astype(jnp.float32) * unit[0]
    return gradient, (sums[1].astype(jnp.float32) + l2 / unit[1]) * unit[1]


def limited_gain(parent, unit, l2, values, sign, left, right):
    """Returns the gain of every cut, with limits on leaf values.

    ``sign`` is 1 where the right value must not be the lower one, -1 where it must
    not be the higher one, else 0.
    """
    left_score, left_value, _ = limited_score(left, unit, l2, values)
    right_score, right_value, _ = limited_score(right, unit, l2, values)
    gain = (left_score + right_score - parent) / 2
    wrong = (sign > 0) & (left_value > right_value)
    wrong |= (sign < 0) & (left_value < right_value)
    return jnp.where(wrong, -jnp.inf, gain)


def limited_score(sums, unit, l2, values):
    """Returns the score of a side, its leaf value, and the size of the terms.

    With D = H + l2, w the leaf value and p = -(G + l1 sign(w)) / D:
    -(2 G w + D w^2 + 2 l1 |w|) = D w (2 p - w). Multiplying by 2 or by a sign is
    exact, so that contraction changes nothing; the last product would feed a sum but
    for the maximum, which changes nothing either. 0 for a side without weight.
    """
    gradient, weight = sums_in_units(sums, unit, l2)
    usable = (weight > 0) & (weight < jnp.inf)
    divisor, factor = jnp.where(usable, weight, jnp.inf), jnp.where(usable, weight, 0.0)
    shrunk = jnp.maximum(jnp.abs(gradient) - values.l1, 0.0)
    value = jnp.where(gradient > 0, -shrunk, shrunk) / divisor
    value = jnp.minimum(jnp.maximum(value, values.bounds[0]), values.bounds[1])
    pulled = -(gradient + values.l1 * jnp.sign(value)) / divisor
    score = (factor * value) * (2 * pulled - value)
    size = (factor * jnp.abs(value)) * jnp.maximum(jnp.abs(pulled), jnp.abs(value))
    return jnp.maximum(score, -UNBOUNDED), value, size


def bound_children(cut, total, unit, l2, values, feature, is_missing):
    """Returns the bounds [2, 2] of the leaf values below the children of one node.

    ``cut`` are sums of the rows that go left, ``total`` those of all rows of the node.
    If ``is_missing``, only missing values go right.
    """
    left = limited_score(cut, unit, l2, values)[1]
    right = limited_score(total - cut, unit, l2, values)[1]
    sign, (low, high) = values.monotone[feature], values.bounds
    middle = left / 2 + right / 2
    free, rising = sign == 0, jnp.where(is_missing, left <= right, sign > 0)
    return jnp.stack(
        [
            jnp.where(free | rising, low, middle),
            jnp.where(free | ~rising, high, middle),
            jnp.where(free | ~rising, low, middle),
            jnp.where(free | rising, high, middle),
        ]
    ).reshape(2, 2)
