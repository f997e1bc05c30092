# SPDX-License-Identifier: Apache-2.0
"""Bits of float32: exponents, powers of two, integers that sort like the floats."""

import jax
import jax.numpy as jnp
import numpy as np


def power_of_two(exponent):
    """Returns 2^exponent for -126 <= exponent <= 127; exp2 is not exact everywhere."""
    return ((exponent + 127) << 23).view(np.float32)


def exponent_above(value):
    """Returns the e with 2^(e-1) <= value < 2^e, for normal positive values."""
    return (value.view(np.int32) >> 23) - 126


def ordered_bits(x):
    """Maps float32 to uint32 of the same order; -0 comes just before 0."""
    bits = x.view(np.uint32)
    flip = _module(x).where(bits >> 31 != 0, np.uint32(2**32 - 1), np.uint32(2**31))
    return bits ^ flip


def from_ordered_bits(ordered):
    """Inverts :func:`ordered_bits`."""
    above = ordered >> 31 != 0
    flip = _module(ordered).where(above, np.uint32(2**31), np.uint32(2**32 - 1))
    return (ordered ^ flip).view(np.float32)


def _module(x):
    return jnp if isinstance(x, jax.Array) else np
