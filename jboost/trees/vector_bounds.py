# SPDX-License-Identifier: Apache-2.0
"""Bounds of leaf values that keep a tree of several scores monotone.

In: a tree whose splits were found along one direction, sums of its leaves for each
score. Out: the least and greatest value of each leaf, so that each score rises or falls
with a feature as it must.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.trees.tree import Tree


def bound_leaves(
    tree: Tree,
    sums: tuple[Float[Array, "K L"], Float[Array, "K L"], Float[Array, "K 1"]],
    monotone: Int32[Array, " F"],
    bounds: Float[Array, "2"],
    num_bins: int,
) -> Float[Array, "K L 2"]:
    """Returns bounds that separate the leaves below every split by a monotone feature.

    From the root down, the two sides of such a split are kept apart by the mean of the
    Newton steps of both, within the bounds of the node, as in XGBoost. A split of a
    single score whose sides come in the wrong order is not admitted; here, it may be
    right for other scores, and both sides get that mean as bound.

    Args:
      tree: with an axis of one tree in front of its splits.
      sums: gradient and curvature of each leaf, and what is added to the curvature.
      monotone: of each feature: 1 rising, -1 falling, 0 either.
      bounds: of all leaves.
      num_bins: the threshold of nodes that are not split, or that separate values
        from missing ones, which have no order.
    """
    gradient, curvature, penalty = sums
    num_scores, num_leaves = gradient.shape
    levels = [(gradient, curvature)]
    while levels[-1][0].shape[1] > 1:
        first, second = (
            jnp.sum(part.reshape(num_scores, -1, 2), axis=2) for part in levels[-1]
        )
        levels.append((first, second))
    levels.reverse()
    low, high = (jnp.broadcast_to(bound, (num_scores, 1)) for bound in bounds)
    for level, (slopes, weights) in enumerate(levels[1:]):
        nodes = slice(2**level - 1, 2 ** (level + 1) - 1)
        feature, threshold = tree.feature[0, nodes], tree.threshold[0, nodes]
        sign = jnp.where(threshold < num_bins - 1, monotone[feature], 0)
        weights = jnp.where(weights > 0, weights + penalty, jnp.inf)
        steps = (-slopes / weights).reshape(num_scores, -1, 2)
        middle = jnp.clip(jnp.mean(steps, axis=2), low, high)
        rising, falling = sign > 0, sign < 0
        lows = jnp.where(falling, middle, low), jnp.where(rising, middle, low)
        highs = jnp.where(rising, middle, high), jnp.where(falling, middle, high)
        low, high = (
            jnp.stack(sides, axis=2).reshape(num_scores, -1) for sides in (lows, highs)
        )
    return jnp.stack([low, high], axis=2).reshape(num_scores, num_leaves, 2)
