# SPDX-License-Identifier: Apache-2.0
"""Sums, ranges and order statistics by group, by the CPU kernels of native/leaves.h."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.entry.collectives import current_shards
from jboost.kernels.leaves_xla import find_middles
from jboost.kernels.library import call
from jboost.kernels.reduce_cpu import optional
from jboost.kernels.sums_xla import choose_unit

_MOST_CHANNELS = 4


def sum_channels(
    group: Int32[Array, " N"],
    weights: Float[Array, " N"] | None,
    *channels: Float[Array, "..."],
    num_groups: int,
) -> Float[Array, "C G"]:
    """See :func:`jboost.kernels.sums_xla.sum_channels`; equal to it bit for bit."""
    sums, last = [], optional(weights)
    for some in _cut(channels):
        result = jax.ShapeDtypeStruct((len(some), num_groups), jnp.float32)
        sums.append(call("sum_by_group", result, group, *some, *last))
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums)


def sum_changes(
    group: Int32[Array, " N"],
    weights: Float[Array, " N"] | None,
    before: Float[Array, " N"],
    after: Float[Array, " N"],
    *,
    num_groups: int,
) -> Float[Array, "2 G"]:
    """See :func:`jboost.kernels.sums_xla.sum_changes`; equal to it bit for bit."""
    result = jax.ShapeDtypeStruct((2, num_groups), jnp.float32)
    return call("sum_changes", result, group, before, after, *optional(weights))


def find_greatest(
    group: Int32[Array, " N"],
    weights: Float[Array, " N"] | None,
    *channels: Float[Array, "..."],
    num_groups: int,
) -> tuple[Float[Array, " C"], Float[Array, "C G"]]:
    """See :func:`jboost.kernels.sums_xla.find_group_greatest`; the same bits."""
    bits, others, last = [], [], optional(weights)
    for some in _cut(channels):
        results = (
            jax.ShapeDtypeStruct((len(some),), jnp.int32),
            jax.ShapeDtypeStruct((len(some), num_groups), jnp.float32),
        )
        found = call("greatest_by_group", results, group, *some, *last)
        bits.append(found[0])
        others.append(found[1])
    greatest = jax.lax.bitcast_convert_type(jnp.concatenate(bits), jnp.float32)
    return greatest, jnp.concatenate(others)


def sum_digits(
    group: Int32[Array, " N"],
    greatest: Float[Array, " C"],
    weights: Float[Array, " N"] | None,
    *channels: Float[Array, "..."],
    num_groups: int,
) -> Int32[Array, "C G 4"]:
    """See :func:`jboost.kernels.sums_xla.sum_group_digits`; equal to it."""
    digits, last, units = [], optional(weights), _cut(choose_unit(greatest)[0])
    for some, up in zip(_cut(channels), units, strict=True):
        result = jax.ShapeDtypeStruct((len(some), num_groups, 4), jnp.int32)
        digits.append(call("digits_by_group", result, up, group, *some, *last))
    return jnp.concatenate(digits)


def _cut(channels):
    """Divides channels into as many as one call takes."""
    firsts = range(0, len(channels), _MOST_CHANNELS)
    return [channels[first : first + _MOST_CHANNELS] for first in firsts]


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
    rows = (minimizer, scores, weights, left, kink, scale, group)
    if current_shards() is None:
        result = jax.ShapeDtypeStruct((num_groups,), jnp.float32)
        return call("middle_minimisers", result, *rows)
    shape = (2, 2, num_groups + 1)

    def sum_digits(prefixes, shift, digit):
        result = jax.ShapeDtypeStruct((*shape, 1 << digit), jnp.int32)
        both = jnp.broadcast_to(prefixes, (2, num_groups + 1))
        found = call("sum_kinks_by_digit", result, *rows, both, shift.astype(jnp.int32))
        return found[:, : len(prefixes)]

    sums = call("sum_kinks", jax.ShapeDtypeStruct(shape, jnp.int32), *rows)
    return find_middles(sums, sum_digits)
