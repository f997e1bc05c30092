# SPDX-License-Identifier: Apache-2.0
"""Rounds floats to integers whose sums cannot overflow and do not depend on order.

In: floats [C, N]. Out: integers, each a power of two times the float; the power is
chosen per channel so that no sum over rows leaves 31 bits.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8, UInt32

from jboost.kernels.float_bits import exponent_above, power_of_two
from jboost.numerics.random_bits import hash_words
from jboost.numerics.sums import sum_rows

_NEAREST_BITS = (
    16  # bits left for a row above which rounding to nearest is exact enough
)


class FixedPoint(NamedTuple):
    """How floats become integers.

    Attributes:
      scale: a power of two for each channel.
      unit: its inverse.
      stochastic: whether rounding is stochastic instead of to nearest.
    """

    scale: Float[Array, " C"]
    unit: Float[Array, " C"]
    stochastic: Bool[Array, ""]


def choose_scale(
    values: Float[Array, "C N"],
    num_rows: Int[Array, ""],
    times: UInt8[Array, " N"] | None = None,
) -> FixedPoint:
    """Finds the largest scales with which no sum over rows can leave 31 bits.

    Rounding is to nearest while at least 16 bits a row remain; below, stochastic.

    Args:
      values: finite; 0 for rows that must not count.
      num_rows: how many rows count.
      times: how many times each of them does; None: once.
    """
    weights = None if times is None else times.astype(jnp.float32)
    return fit_scale(sum_rows(jnp.abs(values), weights), num_rows)


def fit_scale(total: Float[Array, " C"], num_rows: Int[Array, ""]) -> FixedPoint:
    """Returns the scales of :func:`choose_scale`, from the sums of magnitudes."""
    total = jnp.maximum(total, jnp.float32(1e-30))
    # The scaled sum stays below 2^30; rounding adds at most 1 a row.
    exponent = jnp.clip(30 - exponent_above(total), -126, 126)
    exponent = jnp.where(jnp.isfinite(total), exponent, -126)  # a row is below 2^2
    return FixedPoint(
        scale=power_of_two(exponent),
        unit=power_of_two(-exponent),
        stochastic=num_rows > 2 ** (31 - _NEAREST_BITS),
    )


def quantize(
    values: Float[Array, "N C"],
    fixed: FixedPoint,
    seed: UInt32[Array, "2"],
    first_row: Int32[Array, ""] | int = 0,
    times: UInt8[Array, " N"] | None = None,
) -> Int32[Array, "N C"]:
    """Rounds each channel to integers, which times ``fixed.unit`` give the values.

    Rounding to nearest is followed by the product with ``times``, so that a row gives
    exactly what so many rows give. Stochastic rounding comes after it, because a
    product would multiply its error.

    Stochastically means up with probability equal to the fraction, by a hash of
    channel, row and seed, so that a sum over many rows stays unbiased.

    Args:
      values: finite; 0 for rows that must not count.
      fixed: from :func:`choose_scale`.
      seed: another for each tree.
      first_row: the number of the first row, where these are not all rows.
      times: how many times each row counts; None: once.
    """
    after = None
    if times is not None:
        factor = times.astype(jnp.float32)[:, None]
        values = jnp.where(fixed.stochastic, values * factor, values)
        after = jnp.where(fixed.stochastic, 1, times.astype(jnp.int32)[:, None])
    scaled = values * fixed.scale[None, :]
    row = jnp.arange(values.shape[0], dtype=jnp.uint32)[:, None]
    row = row + jnp.asarray(first_row).astype(jnp.uint32)
    channel = jnp.arange(values.shape[1], dtype=jnp.uint32)[None, :]
    bits = hash_words(row ^ (channel << 31), seed)
    fraction = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    offset = jnp.where(fixed.stochastic, fraction, jnp.float32(0.5))
    # Rows that must not count hold 0 and stay 0: floor(0 + offset) = 0.
    whole = jnp.floor(scaled + offset).astype(jnp.int32)
    return whole if after is None else whole * after
