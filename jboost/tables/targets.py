# SPDX-License-Identifier: Apache-2.0
"""Checks targets, weights and offsets, and converts them to 32 bits.

Every message names the argument, the expectation and the value. Traced values are not
checked, only their shapes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.entry.checks import as_array, refuse_mask
from jboost.entry.messages import show
from jboost.tables.domains import warn_of_rounding
from jboost.tables.frames import check_finite, narrow_floats, read_values


def check_targets(
    y: Any, num_rows: int, weights: Any, name: str, *, warn: bool = False
) -> Any:
    """Returns targets as a pytree of arrays, with 64-bit numbers converted to 32 bits.

    Numbers may be infinite or NaN; the loss says whether it is defined for them.
    """
    leaves = jax.tree.leaves(y)
    if isinstance(y, list) and not any(np.ndim(leaf) for leaf in leaves):
        # A list of numbers is one target per row, not a pytree.
        y = as_array(refuse_mask(y, name), f"{name} must hold numbers")
    elif isinstance(y, list):
        try:
            y = np.asarray(refuse_mask(y, name))
        except ValueError:
            raise ValueError(
                f"{name} must be an array, got a list of arrays of different shapes; "
                "pass a tuple or a dict for several targets per row"
            ) from None
    if not jax.tree.leaves(y):
        raise ValueError(f"{name} must contain at least one array, got {show(y)}")

    def check(leaf):
        given = array = _read_numbers(leaf, name)
        if jnp.issubdtype(array.dtype, np.floating):
            array = narrow_floats(array)
        elif array.dtype.itemsize == 8:
            array = _narrow_integers(array, name)
        if array.ndim == 0 or array.shape[0] != num_rows:
            raise ValueError(
                f"{name} must have {num_rows} rows, as x has, got shape {array.shape}"
            )
        floats = jnp.issubdtype(array.dtype, np.floating)
        narrowed = given.dtype.itemsize > array.dtype.itemsize
        if floats and narrowed and not isinstance(given, Tracer):
            # Finite numbers may have become infinite in float32.
            known = np.where(np.isfinite(given), np.asarray(array), 0)
            check_finite(known, weights, name, given)
        if warn:
            warn_of_rounding(given, name)
        return array

    return jax.tree.map(check, y)


def _read_numbers(values, name):
    """Reads numbers; says who encodes labels that are none."""
    try:
        return read_values(values, name)
    except TypeError as error:
        if as_array(values, f"{name} must hold numbers").dtype.kind not in "OSTU":
            raise
        raise TypeError(
            f"{error}; jboost.sklearn.JBoostClassifier takes labels of any kind"
        ) from None


def match_targets(targets: Any, training: Any, weights: Any, name: str) -> Any:
    """Converts targets of a validation set to the structure and dtypes of training.

    In rows of weight 0 numbers may change.
    """
    expected, got = jax.tree.structure(training), jax.tree.structure(targets)
    if expected != got:
        raise ValueError(f"{name} must have the structure of y, {expected}, got {got}")

    def match(array, like):
        if array.shape[1:] != like.shape[1:]:
            raise ValueError(
                f"{name} must have rows of shape {like.shape[1:]}, like y, got "
                f"{array.shape[1:]}"
            )
        if array.dtype == like.dtype:
            return array
        host = np.asarray(array)
        with np.errstate(invalid="ignore"):
            cast = host.astype(like.dtype)
        lost = (cast.astype(host.dtype) != host) & ~(np.isnan(host) & np.isnan(cast))
        counts = np.ones(len(host), bool) if weights is None else np.asarray(weights)
        lost &= (counts > 0).reshape(-1, *(1,) * (host.ndim - 1))
        if lost.any():
            raise ValueError(
                f"{name} must contain values that {like.dtype}, the dtype of y, can "
                f"represent, got {host[lost][0]}"
            )
        return cast

    return jax.tree.map(match, targets, training)


def check_weights(
    weights: Any, num_rows: int, name: str, *, all_rows: bool = True, most: float = 1e30
) -> Array | np.ndarray:
    """Returns weights as float32: finite, >= 0, and of a sum that float32 can bear.

    Args:
      all_rows: whether these are all rows; of some, all may have weight 0.
      most: the greatest sum; by default such that sums of losses fit float32.
    """
    array = read_values(weights, name)
    array = array if isinstance(array, Tracer) else np.asarray(array)
    if array.shape != (num_rows,):
        raise ValueError(f"{name} must have shape ({num_rows},), got {array.shape}")
    given, array = array, narrow_floats(array)
    if isinstance(array, Tracer):
        return array
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if len(bad):
        raise ValueError(
            f"{name} must be finite and >= 0, got {given[bad[0]]} in row {bad[0]}"
        )
    if all_rows and not np.any(array > 0):
        tiny = f"at most {given.max()}, which is 0 in float32"
        got = tiny if np.any(given > 0) else "only zeros"
        raise ValueError(f"{name} must be positive in at least one row, got {got}")
    least = 1 / most if all_rows else 0.0
    if not least <= (total := np.sum(array, dtype=np.float64)) <= most:
        raise ValueError(f"{name} must sum to {least:.0e} to {most:.0e}, got {total:g}")
    return array


def _narrow_integers(array, name):
    if isinstance(array, Tracer):
        return array.astype(jnp.int32)
    large = np.abs(array) > 2**31 - 1
    if np.any(large):
        raise ValueError(
            f"{name} must contain integers below 2^31 in magnitude, got "
            f"{array[large][0]}; pass floats instead"
        )
    return array.astype(np.int32)
