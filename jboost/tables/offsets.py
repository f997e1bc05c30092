# SPDX-License-Identifier: Apache-2.0
"""Checks offsets, the base scores of rows, and narrows them to float32.

Traced values are not checked, only their shapes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.tables.frames import read_values


def check_offset(
    offset: Any, num_rows: int, num_scores: int, name: str = "offset"
) -> Array | np.ndarray:
    """Returns an offset [N], or [N, K] for K > 1, as float32 scores [K, N]."""
    shape = (num_rows,) if num_scores == 1 else (num_rows, num_scores)
    array = read_values(offset, name)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    given, array = array, narrow_floats(array)
    check_finite(array, None, name, given)
    return array[None, :] if num_scores == 1 else array.T


def read_offset(
    offset: Any, num_rows: int, num_scores: int, name: str = "offset"
) -> Array | np.ndarray:
    """Returns :func:`check_offset` as [N, K].

    The result is a NumPy array unless traced, because operations of JAX would be
    compiled for each number of rows.
    """
    if isinstance(offset, jax.Array) and not isinstance(offset, Tracer):
        offset = np.asarray(offset)
    return check_offset(offset, num_rows, num_scores, name).T


def narrow_floats(array: Any) -> Any:
    """Returns float32; numbers too large for it become infinite, without a warning."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def check_finite(array: Any, weights: Any, name: str, given: Any) -> None:
    """Checks that numbers are finite in float32.

    Args:
      array: numbers in float32, or integers.
      weights: row weights; rows of weight 0 are not checked. None: all rows are.
      given: the numbers before they became float32.
    """
    if isinstance(array, Tracer) or not jnp.issubdtype(array.dtype, np.floating):
        return
    host = np.asarray(array)
    bad = ~np.isfinite(host).all(axis=tuple(range(1, host.ndim)))
    if weights is not None and not isinstance(weights, Tracer):
        bad &= np.asarray(weights) > 0
    if bad.any():
        row = np.flatnonzero(bad)[0]
        raise ValueError(
            f"{name} must be finite in every row of positive weight, got "
            f"{np.asarray(given)[row]} in row {row}"
        )
