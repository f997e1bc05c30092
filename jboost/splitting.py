# SPDX-License-Identifier: Apache-2.0
"""The best split of one node, from its histogram.

In: integer sums [F, B, C] of one node; the caller maps over nodes. Out: a Split.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jboost.binning import MISSING

_LEAST_GAIN = 1e-6  # relative to the parent's score: what rounding can fake
_WEIGHT_SLACK = 1 - 1e-5  # float32 means of equal curvatures miss 1 by a few ulp


class Split(NamedTuple):
    """How a node is split; the fields are scalars, or have an axis of nodes.

    Attributes:
      feature: which feature.
      threshold: a code; rows with 1 <= code <= threshold go left.
      missing_left: whether rows with code 0 go left.
      gain: what the regularised objective falls by, before learning rate.
      found: whether there is an admissible split of positive gain.
    """

    feature: Int32[Array, "*M"]
    threshold: Int32[Array, "*M"]
    missing_left: Bool[Array, "*M"]
    gain: Float[Array, "*M"]
    found: Bool[Array, "*M"]


def find_split(
    histogram: Int32[Array, "F B C"],
    unit: Float[Array, "2"],
    count_unit: Int32[Array, ""],
    features: Bool[Array, " F"],
    *,
    l2: Float[Array, ""] | float = 1.0,
    min_gain: Float[Array, ""] | float = 0.0,
    min_child_weight: Float[Array, ""] | float = 1.0,
    min_child_samples: Int32[Array, ""] | int = 1,
) -> Split:
    """Searches every feature, threshold and direction of the missing rows.

    gain = [G_L^2/(H_L+l2) + G_R^2/(H_R+l2) - G^2/(H+l2)] / 2 - min_gain (Chen and
    Guestrin 2016, eq. 7).

    Missing rows are tried on both sides. Where a threshold is above all values,
    values are split from missing ones. Equal gains go to the lowest feature, then
    the lowest threshold, then to missing rows right.

    Args:
      histogram: integer sums of gradient, curvature and (C = 3) count.
      unit: what one integer of gradient and of curvature stands for.
      count_unit: for C = 2, the integer curvature of one row, the same for all.
      features: those that may be used.
      l2: Lambda of eq. 7.
      min_gain: kappa, the price of a leaf.
      min_child_weight: least sum of curvature of a child.
      min_child_samples: least number of rows of a child.
    """
    # Channels in front: long rows of bins vectorise, pairs of channels do not.
    sums = jnp.moveaxis(histogram, -1, 0)
    cumulative = jnp.cumsum(sums, axis=2)
    total, missing = cumulative[:, :1, -1:], sums[:, :, MISSING, None]
    least_count = jnp.asarray(min_child_samples, jnp.int32)
    if sums.shape[0] == 2:  # counts are curvatures, in another unit
        least_count = least_count * count_unit
    limits = (l2, min_child_weight * _WEIGHT_SLACK, least_count)
    parent = _score(*_as_floats(total, unit), l2)
    num_bins = sums.shape[2]
    # Code 0 is no threshold: "all values right" mirrors "all values left".
    allowed = features[:, None] & (jnp.arange(num_bins) > MISSING)[None, :]

    def try_direction(direction, best):
        """Missing rows right (0) or left (1), all features and thresholds."""
        left = cumulative - (1 - direction) * missing
        gains = _gains(left, total - left, parent, unit, limits)
        flat = jnp.where(allowed, gains, -jnp.inf).reshape(-1)
        gain = jnp.max(flat)
        # Maximum, then first match: XLA's argmax is several times slower on CPU.
        position = jnp.arange(flat.size, dtype=jnp.int32)
        first = jnp.min(jnp.where(flat == gain, position, flat.size - 1))
        better = (gain > best[0]) | ((gain == best[0]) & (first < best[1]))
        new = (gain, first, jnp.asarray(direction == 1))
        return tuple(jnp.where(better, n, b) for n, b in zip(new, best, strict=True))

    nothing = (jnp.float32(-jnp.inf), jnp.int32(allowed.size), jnp.asarray(False))
    directions = 1 + jnp.any(missing != 0).astype(jnp.int32)
    best, first, left = jax.lax.fori_loop(0, directions, try_direction, nothing)
    return Split(
        feature=jax.lax.div(first, jnp.int32(num_bins)),
        threshold=jax.lax.rem(first, jnp.int32(num_bins)),
        missing_left=left,
        gain=best - min_gain,
        found=(best > min_gain) & (2 * best > _LEAST_GAIN * parent[0, 0]),
    )


def _gains(left, right, parent, unit, limits):
    """Gain of every cut from integer sums [C, F, B]; -inf where not admissible."""
    l2, least_weight, least_count = limits
    (left_gradient, left_weight) = _as_floats(left, unit)
    (right_gradient, right_weight) = _as_floats(right, unit)
    left_score = _score(left_gradient, left_weight, l2)
    gain = (left_score + _score(right_gradient, right_weight, l2) - parent) / 2
    admissible = jnp.minimum(left_weight, right_weight) >= least_weight
    admissible &= jnp.minimum(left[-1], right[-1]) >= least_count
    return jnp.where(admissible, gain, -jnp.inf)


def _as_floats(sums, unit):
    return (
        sums[0].astype(jnp.float32) * unit[0],
        sums[1].astype(jnp.float32) * unit[1],
    )


def _score(gradient, curvature, l2):
    """G^2 / (H + l2), and 0 for a side without weight."""
    weight = curvature + l2
    return jnp.square(gradient) / jnp.where(weight > 0, weight, jnp.inf)
