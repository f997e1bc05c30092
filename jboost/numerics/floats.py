# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of float32 that does not depend on the machine.

In: arrays of float32. Out: the same with denormal values replaced by 0; the float
halfway between two.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

TINY = float(np.finfo(np.float32).tiny)  # float32 values closer to 0 are denormal
Floats = TypeVar("Floats", Array, np.ndarray)


def flush_denormals(x: Floats) -> Floats:
    """Replaces denormal float32 values by 0: hardware differs in whether it does."""
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    return numpy.where(numpy.abs(x) < TINY, np.float32(0), x)


def middle_float(low: Float[Array, "*n"], high: Float[Array, "*n"]):
    """The float32 halfway from low to high in the order of bit patterns.

    About 32 such halvings reach neighboring floats from any interval, whatever
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
