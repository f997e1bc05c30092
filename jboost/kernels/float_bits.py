# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the bits of float32.

In: float32 or integers. Out: exponents, powers of two, and integers that sort like the
floats.
"""

import jax
import jax.numpy as jnp


def power_of_two(exponent):
    """Returns 2^exponent for -126 <= exponent <= 127; exp2 is not exact everywhere."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def exponent_above(value):
    """Returns the e with 2^(e-1) <= value < 2^e, for normal positive values."""
    return (jax.lax.bitcast_convert_type(value, jnp.int32) >> 23) - 126


def ordered_bits(x):
    """Maps float32 to uint32 of the same order; -0 comes just before 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return bits ^ jnp.where(bits >> 31 != 0, jnp.uint32(2**32 - 1), jnp.uint32(2**31))


def from_ordered_bits(ordered):
    """Inverts :func:`ordered_bits`."""
    flip = jnp.where(ordered >> 31 != 0, jnp.uint32(2**31), jnp.uint32(2**32 - 1))
    return jax.lax.bitcast_convert_type(ordered ^ flip, jnp.float32)
