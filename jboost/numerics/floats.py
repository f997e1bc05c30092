# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of float32 that does not depend on the machine."""

from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.kernels.float_bits import from_ordered_bits, ordered_bits

_TINY = float(np.finfo(np.float32).tiny)  # smaller magnitudes are denormal
Floats = TypeVar("Floats", Array, np.ndarray)


def flush_denormals(x: Floats) -> Floats:
    """Replaces denormals by 0, because processors differ in whether they do so."""
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    return numpy.where(numpy.abs(x) < _TINY, np.float32(0), x)


def middle_float(
    low: Float[Array | np.ndarray, "*n"], high: Float[Array | np.ndarray, "*n"]
) -> Any:
    """Returns the float32 halfway from low to high in the order of bit patterns.

    About 32 such halvings reach adjacent floats from any interval of any scale, while
    arithmetic means need as many halvings as the exponents differ.
    """
    first, second = ordered_bits(low), ordered_bits(high)
    middle = (first & second) + ((first ^ second) >> 1)  # cannot overflow
    return from_ordered_bits(middle)
