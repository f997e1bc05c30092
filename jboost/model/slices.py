# SPDX-License-Identifier: Apache-2.0
"""Takes parts of arrays without compiling a program for each size.

In: an array and an index. Out: the part, as a JAX array.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jboost.numerics.padding import is_large_elsewhere

_FEW, _OFTEN = 2**10, 16  # numbers in a small result; results of the same shape
_MANY_BYTES = 2**21  # from which compiling a slice takes less time than copying


def take_part(array: Any, index: tuple[Any, ...], sharding: Any = None) -> Any:
    """Returns ``array[index]``, cut in NumPy: JAX compiles a slice for each size.

    Large arrays on another device are cut there: copying them takes longer.

    Args:
      array: a NumPy or JAX array; traced arrays are sliced by JAX.
      index: slices and integers.
      sharding: of the result of a NumPy array; None for the default device.
    """
    if isinstance(array, Tracer):
        return array[index]
    if is_large_elsewhere(array, _MANY_BYTES):
        return array[index]
    if isinstance(array, jax.Array):
        sharding = find_sharding([array])
    part = np.asarray(array)[index]
    if 2 * part.nbytes < array.nbytes:
        part = part.copy()  # a view would keep the whole array alive
    return jax.device_put(part, sharding)


def place(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns a NumPy array, which nobody else uses, as a JAX array."""
    if sharding is None and array.size <= _FEW:
        found = _find_shape(array.shape, array.dtype)
        found.num_results += 1
        if found.num_results > _OFTEN:
            return found.copy(array)
    return jax.device_put(array, sharding)


def find_sharding(arrays: Sequence[Any]) -> Any:
    """Returns the sharding of a result of these arrays; None if none is committed."""
    return next((array.sharding for array in arrays if array.committed), None)


class _Shape:
    """Results of one shape."""

    def __init__(self):
        self.num_results = 0
        # For a shape that is used often a compiled copy is faster than `device_put`.
        self.copy = jax.jit(lambda value: value)


@lru_cache(maxsize=64)
def _find_shape(shape, dtype):
    del shape, dtype
    return _Shape()
