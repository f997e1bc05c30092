# SPDX-License-Identifier: Apache-2.0
"""Sums of float32 that do not depend on the order of the terms, in plain XLA.

Terms are rounded to multiples of one unit, 2^-38 of the power of two above the
greatest magnitude, and the multiples are added as integers. So the sum has the same
bits for any order of the rows, any padding with zeros and any number of threads; and a
row of weight 2 counts exactly as two rows (as long as it is above 2^-14 of the
greatest). Rounding changes a sum of N terms by at most N 2^-39 times the greatest
magnitude, less than float32's own rounding of any running sum.

A multiple has 38 bits and a sign, too many for int32. It travels as limbs of ``width``
bits, so few that their sum over N rows fits 31 bits, and the sums of limbs are joined
by carrying.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jboost.kernels import xla
from jboost.kernels.float_bits import exponent_above, power_of_two

_BITS = 38  # of a multiple
_DIGIT = 19  # bits at which sums are carried
_MASK = (1 << _DIGIT) - 1
_FINEST = 124  # the unit is at least 2^-124: denormal terms are 0 everywhere


def sum_rows(values):
    """See :func:`jboost.numerics.sums.sum_rows`."""
    finite = jnp.isfinite(values)
    up, down = _choose_unit(jnp.max(jnp.abs(jnp.where(finite, values, 0)), axis=-1))
    width = _limb_width(values.shape[-1])
    limbs = _split(jnp.where(finite, values, 0) * up[..., None], width)
    sums = [jnp.sum(limb, axis=-1, dtype=jnp.int32) for limb in limbs]
    # Of infinities and NaN the order does not matter either.
    return _join(sums, width, down) + jnp.sum(jnp.where(finite, 0, values), axis=-1)


def sum_channels(group, *channels, num_groups):
    """See :func:`jboost.numerics.sums.sum_channels`."""

    def add(group, *channels):
        inside = (group >= 0) & (group < num_groups)
        # One more group takes the rows that have none.
        key = jnp.where(inside, group, num_groups)
        values = jnp.stack(channels, axis=1)

        def sum_keys(values):
            return xla.segment_sum(values, key, num_groups + 1)[:num_groups].T

        if values.dtype != jnp.float32:
            return sum_keys(values)
        finite = jnp.isfinite(values)
        kept = jnp.where(finite & inside[:, None], values, 0)
        up, down = _choose_unit(jnp.max(jnp.abs(kept), axis=0))
        width = _limb_width(values.shape[0])
        sums = [sum_keys(limb) for limb in _split(kept * up[None], width)]
        total = _join(sums, width, down[:, None])

        def add_others():
            return total + sum_keys(jnp.where(finite, 0, values))

        return jax.lax.cond(jnp.all(finite), lambda: total, add_others)

    return sequential_vmap(add)(group, *channels)


def _choose_unit(greatest):
    """Returns 1 / unit, and the unit."""
    exponent = jnp.minimum(_BITS - exponent_above(greatest), _FINEST)
    return power_of_two(exponent), power_of_two(-exponent)


def _limb_width(num_rows):
    """Bits of a limb such that a sum over all rows stays below 2^30."""
    return min(_DIGIT, 30 - num_rows.bit_length())


def _split(multiples, width):
    """Rounds to whole numbers and cuts them into int32 limbs, lowest first; exact."""
    whole = jnp.round(multiples)
    size, sign = jnp.abs(whole), jnp.where(whole < 0, -1, 1)
    limbs = []
    for number in reversed(range(-(-_BITS // width))):
        limb = jnp.floor(size * 2.0 ** (-width * number))
        size = size - limb * 2.0 ** (width * number)
        limbs.append(limb.astype(jnp.int32) * sign)
    return limbs[::-1]


def _join(sums, width, unit):
    """Joins sums of limbs to one sum, times the unit, in float32."""
    digits = [jnp.zeros_like(sums[0]) for _ in range(4)]
    for number, limb in enumerate(sums):
        index, shift = divmod(width * number, _DIGIT)
        rest = _DIGIT - shift
        digits[index] += (limb & ((1 << rest) - 1)) << shift
        digits[index + 1] += limb >> rest
    for index in range(3):
        digits[index + 1] += digits[index] >> _DIGIT
        digits[index] &= _MASK
    # Products with a power of two are exact: contraction changes nothing.
    total = digits[3].astype(jnp.float32)
    for digit in digits[2::-1]:
        total = total * 2.0**_DIGIT + digit.astype(jnp.float32)
    return total * unit
