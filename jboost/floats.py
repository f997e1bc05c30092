# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of float32 that does not depend on the machine.

In: arrays of float32. Out: sums in a fixed order; the float halfway between two.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_BLOCK = 256  # rows summed at a time


def sum_rows(values: Float[Array, "*K N"]) -> Float[Array, "*K"]:
    """Sums the last axis, in blocks and then the blocks.

    A float32 error grows with the length of a block instead of with N. The barrier
    keeps XLA from merging the two steps into one sum over N numbers, which it would
    split among threads: the order, and so the bits, would depend on their number.
    """
    padded = -values.shape[-1] % _BLOCK
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padded)])
    blocks = jnp.sum(values.reshape(*values.shape[:-1], -1, _BLOCK), axis=-1)
    return jnp.sum(jax.lax.optimization_barrier(blocks), axis=-1)


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
