# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of float32 that does not depend on the machine.

In: arrays of float32. Out: sums in a fixed order; the float halfway between two.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.kernels import reduce_cpu
from jboost.kernels.library import choose

_FAN = 32  # numbers summed at a time


def sum_rows(
    values: Float[Array, "*K N"], implementation: str | None = None
) -> Float[Array, "*K"]:
    """Sums the last axis: 32 numbers at a time, then 32 of those sums, and so on.

    Of 32 numbers the second half is added to the first, then the second quarter to
    the first, down to one: an error grows with the logarithm of N. All by additions of
    slices, because the order in which XLA reduces depends on sizes, processor and
    number of threads.
    """
    run = choose(implementation, cpu=reduce_cpu.sum_rows, xla=_sum_rows)
    return run(values)


def _sum_rows(values):
    values = _sum_groups(values)
    while values.shape[-1] > 1:
        values = _sum_groups(values)
    return values[..., 0]


def _sum_groups(values):
    short = -values.shape[-1] % _FAN
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)])
    sums = values.reshape(*values.shape[:-1], -1, _FAN)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return jax.lax.optimization_barrier(sums[..., 0])


def power_of_two(exponent: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """2^exponent for -126 <= exponent <= 127; exp2 is not exact everywhere."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def exponent_above(value: Float[Array, "*n"]) -> Int32[Array, "*n"]:
    """The e with 2^(e-1) <= value < 2^e, for normal positive values."""
    return (jax.lax.bitcast_convert_type(value, jnp.int32) >> 23) - 126


def middle_float(low: Float[Array, "*n"], high: Float[Array, "*n"]):
    """The float32 halfway from low to high in the order of bit patterns.

    About 32 such halvings reach neighbouring floats from any interval, whatever
    its scale; an arithmetic mean needs as many as the exponents differ.
    """
    first, second = _to_ordered(low), _to_ordered(high)
    middle = (first & second) + ((first ^ second) >> 1)  # cannot overflow
    return _from_ordered(middle)


def _to_ordered(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(ordered):
    bits = jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
