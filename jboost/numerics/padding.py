# SPDX-License-Identifier: Apache-2.0
"""Rounds sizes up to a few values, because each size compiles another program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.entry.context import is_on_cpu
from jboost.entry.programs import compiled

_MANY_BYTES = 2**24  # from this size on, compiling takes less time than copying


def padded_size(size: int, least: int = 64) -> int:
    """Rounds up to 8 sizes per power of two: nearby sizes share programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def pad_rows(array: Any, size: int) -> Any:
    """Pads to ``size`` rows with copies of row 0, in NumPy, which compiles nothing.

    An array without rows gets zeros. Large arrays on another device than the CPU are
    padded by a program that is compiled for their size.
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
    """Returns whether an array of ``least`` bytes or more is not on the CPU."""
    large = isinstance(array, jax.Array) and array.nbytes >= least
    return large and not isinstance(array, Tracer) and not is_on_cpu(array)
