# SPDX-License-Identifier: Apache-2.0
"""Takes parts of arrays without compiling a program for each size.

In: an array and an index. Out: the part, as a JAX array.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_FEW, _OFTEN = 2**10, 16  # numbers in a small result; results of the same shape


def take_part(array: Any, index: tuple[Any, ...], sharding: Any = None) -> Any:
    """Returns ``array[index]``, cut in NumPy: JAX compiles a slice for each size.

    Args:
      array: a NumPy or JAX array; traced arrays are sliced by JAX.
      index: slices and integers.
      sharding: of the result of a NumPy array; None for the default device.
    """
    if isinstance(array, Tracer):
        return array[index]
    if isinstance(array, jax.Array):
        sharding = find_sharding([array])
    part = np.asarray(array)[index]
    if 2 * part.nbytes < array.nbytes:
        part = part.copy()  # a view would keep the whole array alive
    return place(part, sharding)


def place(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns a NumPy array, which nobody else uses, as a JAX array."""
    small = sharding is None and array.size <= _FEW
    if small and next(_count(array.shape, array.dtype)) >= _OFTEN:
        return _identity(array)
    return jax.device_put(array, sharding)


def find_sharding(arrays: Sequence[Any]) -> Any:
    """Returns the sharding of a result of these arrays; None if none is committed."""
    return next((array.sharding for array in arrays if array.committed), None)


@jax.jit
def _identity(value):
    """A compiled copy: faster than ``device_put`` for a shape that is used often."""
    return value


@lru_cache(maxsize=64)
def _count(shape, dtype):
    """Returns a counter of the recent results of a shape."""
    del shape, dtype
    return itertools.count()
