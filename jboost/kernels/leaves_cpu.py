# SPDX-License-Identifier: Apache-2.0
"""Sums, ranges and order statistics by group, by the CPU kernels of native/leaves.h."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.kernels.library import call

_MOST_CHANNELS = 4


def sum_channels(
    group: Int32[Array, " N"], *channels: Float[Array, " N"], num_groups: int
) -> Float[Array, "C G"]:
    """See :func:`jboost.numerics.sums.sum_channels`; equal to it bit for bit."""
    sums = []
    for first in range(0, len(channels), _MOST_CHANNELS):
        some = channels[first : first + _MOST_CHANNELS]
        result = jax.ShapeDtypeStruct((len(some), num_groups), jnp.float32)
        sums.append(call("sum_by_group", result, group, *some))
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums)


def find_range(
    values: Float[Array, " N"], group: Int32[Array, " N"], *, num_groups: int
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """See :func:`jboost.trees.leaf_operations.find_range`; equal to it bit for bit."""
    result = jax.ShapeDtypeStruct((num_groups,), jnp.float32)
    return tuple(call("range_by_group", (result, result), values, group))


def add_values(
    scores: Float[Array, "K N"],
    values: Float[Array, "K L"],
    leaf: Int32[Array, "K N"],
    *,
    in_place: bool,
) -> Float[Array, "K N"]:
    """See :func:`jboost.trees.leaf_operations.add_values`; equal to it bit for bit."""
    result = jax.ShapeDtypeStruct(scores.shape, jnp.float32)
    # In place without need, XLA copies the scores first.
    aliases = {0: 0} if in_place else None
    return call("add_values", result, scores, values, leaf, aliases=aliases)


def middle_minimizers(
    minimizer: Float[Array, " N"],
    scores: Float[Array, " N"],
    weights: Float[Array, " N"],
    left: Float[Array, "*N"],
    kink: Float[Array, "*N"],
    scale: Float[Array, ""],
    group: Int32[Array, " N"],
    *,
    num_groups: int,
) -> Float[Array, " G"]:
    """See :func:`jboost.trees.leaf_operations.middle_minimizers`; the same bits."""
    result = jax.ShapeDtypeStruct((num_groups,), jnp.float32)
    rows = (minimizer, scores, weights, left, kink, scale, group)
    return call("middle_minimisers", result, *rows)
