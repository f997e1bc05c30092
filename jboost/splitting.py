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
WEIGHT_SLACK = 1 - 1e-5  # float32 means of equal curvatures miss 1 by a few ulp


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
      histogram: integer sums of gradient, curvature and count. With C = 2 all rows
        have the same curvature, 1 as an integer, which then is the count.
      unit: what one integer of gradient and of curvature stands for; positive.
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
    limits = (
        l2,
        jnp.float32(min_child_weight) * jnp.float32(WEIGHT_SLACK),
        least_count,
    )
    parent = _score(total, unit, l2)
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
    gain = (_score(left, unit, l2) + _score(right, unit, l2) - parent) / 2
    lighter = jnp.minimum(left[1], right[1]).astype(jnp.float32) * unit[1]
    admissible = lighter >= least_weight
    admissible &= jnp.minimum(left[-1], right[-1]) >= least_count
    return jnp.where(admissible, gain, -jnp.inf)


def _score(sums, unit, l2):
    """G^2 / (H + l2), and 0 for a side without weight.

    l2 is added in units of H's integers: no product then feeds a sum, which some
    compilers would contract and others not, and gains are the same bits everywhere.
    """
    gradient = sums[0].astype(jnp.float32) * unit[0]
    weight = (sums[1].astype(jnp.float32) + l2 / unit[1]) * unit[1]
    return jnp.square(gradient) / jnp.where(weight > 0, weight, jnp.inf)
