# SPDX-License-Identifier: Apache-2.0
"""Predicts exactly from columns with distinct values that are equal in float32.

Models of libraries that compare float64, and their columns, are converted to numbers
that float32 holds and that compare as the float64 numbers do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Float64, UInt32

from jboost.entry.messages import warn_user
from jboost.model.ensemble import Ensemble, find_sharding
from jboost.tables.columns import WideColumn, make_wide_column
from jboost.tables.sparse import is_sparse

Matched = tuple[Ensemble, Mapping[int, WideColumn]]
_matched: WeakKeyDictionary[Ensemble, Matched] = WeakKeyDictionary()


def match_wide(
    model: Ensemble, x: Any
) -> tuple[Ensemble, Mapping[int, WideColumn] | None]:
    """Returns the model to predict from ``x`` with, and the columns to convert.

    Most models have no such columns and are returned as they are, with None. So are
    all models where x is float32 or traced, which ``threshold`` is for.

    Args:
      x: a table of any kind, or an iterable of tables.
    """
    if model.wide_threshold is None:
        return model, None
    arrays = model.feature, model.threshold, model.missing_left, model.wide_threshold
    typed = isinstance(x, np.ndarray | jax.Array) or is_sparse(x)
    dtype = getattr(x, "dtype", np.float32) if typed else None
    traced = any(isinstance(array, Tracer) for array in (x, *arrays))
    if traced or dtype == np.float32:
        return model, None
    found = _matched.get(model)
    if found is None:
        found = _match(model)
        # NumPy arrays may be written to, so that they are read each time.
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model)):
            _matched[model] = found
    return found


def _match(model) -> Matched:
    exact = unpack_float64(np.asarray(model.wide_threshold))
    feature, threshold = np.asarray(model.feature), np.array(model.threshold)
    split = np.asarray(model.is_split) & ~np.isnan(threshold)
    columns = {}
    for index in _list_wide(model):
        nodes = split & (feature == index)
        own = np.where(np.isnan(exact[nodes]), threshold[nodes], exact[nodes])
        values, first, place = np.unique(own, return_index=True, return_inverse=True)
        rounded = np.maximum.accumulate(threshold[nodes][first])
        columns[index] = make_wide_column(values, rounded)
        threshold[nodes] = columns[index].codes[place]
    placed = [a for a in jax.tree.leaves(model) if isinstance(a, jax.Array)]
    threshold = jax.device_put(threshold, find_sharding(placed))
    return replace(model, threshold=threshold, wide_threshold=None), columns


def warn_of_float32(model: Ensemble, user: str) -> None:
    """Warns if the model compares columns in float64, and the ``user`` does not."""
    if model.wide_threshold is None or isinstance(model.wide_threshold, Tracer):
        return
    names = model.feature_names or range(model.num_features)
    warn_user(
        f"the model compares columns {[names[index] for index in _list_wide(model)]} "
        f"in float64, because float32 cannot tell their values apart, but {user} "
        "compares float32: rows whose values become equal get the same score"
    )


def _list_wide(model):
    """Returns the indices of the columns that are compared in float64."""
    exact = unpack_float64(np.asarray(model.wide_threshold))
    return np.unique(np.asarray(model.feature)[~np.isnan(exact)]).tolist()


def pack_float64(values: Float64[np.ndarray, "*n"]) -> UInt32[np.ndarray, "*n 2"]:
    """Returns the bits of float64 numbers, which JAX rounds to float32 by default."""
    return np.ascontiguousarray(values, "<f8")[..., None].view("<u4").astype(np.uint32)


def unpack_float64(words: UInt32[np.ndarray, "*n 2"]) -> Float64[np.ndarray, "*n"]:
    """Reverses :func:`pack_float64`."""
    return np.ascontiguousarray(words, "<u4").view("<f8")[..., 0].astype(np.float64)
