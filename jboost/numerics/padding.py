# SPDX-License-Identifier: Apache-2.0
"""Few sizes for many: programs are compiled for sizes, so that sizes are rounded up.

In: how many. Out: how many with padding; padded arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.entry.context import is_on_cpu
from jboost.entry.programs import compiled

_MANY_BYTES = 2**24  # from which compiling takes less time than copying


def padded_size(size: int, least: int = 64) -> int:
    """Rounds up to 8 sizes per power of two: nearby sizes share programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def pad_rows(array: Any, size: int) -> Any:
    """Repeats row 0 up to so many rows; in NumPy, because no size is compiled there.

    An array without rows gets zeros. Large arrays on another device stay there: a
    program is compiled for their size.
    """
    if is_large_elsewhere(array, _MANY_BYTES):
        if len(array) == size:
            return array
        return compiled(_repeat_row, size - len(array), small=True)(array)
    array = np.asarray(array)
    if len(array) == size:
        return array
    shape = (size - len(array), *array.shape[1:])
    first = np.broadcast_to(array[:1] if len(array) else array.dtype.type(), shape)
    return np.concatenate([array, first])


def _repeat_row(times, array):
    first = jnp.broadcast_to(array[:1], (times, *array.shape[1:]))
    return jnp.concatenate([array, first])


def is_large_elsewhere(array: Any, least: int) -> bool:
    """Returns whether an array of so many bytes, or more, is on another device."""
    large = isinstance(array, jax.Array) and array.nbytes >= least
    return large and not isinstance(array, Tracer) and not is_on_cpu(array)
