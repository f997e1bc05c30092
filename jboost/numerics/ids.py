# SPDX-License-Identifier: Apache-2.0
"""Reads ids of any kind, and numbers them.

Ids are numbers, strings, dates or other objects, and none is missing.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from jboost.entry.checks import refuse_mask


def read_ids(ids: Any, name: str = "groups") -> np.ndarray:
    """Returns concrete ids, none of them missing, as an array of one dimension."""
    if isinstance(ids, Tracer):
        raise TypeError(
            f"{name} must be concrete, because they determine shapes; make them with "
            "jb.make_groups(ids) outside jit and pass the result"
        )
    array = np.asarray(refuse_mask(ids, name))
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(
            f"{name} must be an id for each row, got an array of shape {array.shape}"
        )
    missing = np.zeros(len(array), bool)
    if array.dtype.kind in "fMm":
        missing = np.isnan(array) if array.dtype.kind == "f" else np.isnat(array)
    elif array.dtype.kind == "O":
        missing = np.array([_is_missing(each) for each in array])
    if missing.any():
        row = int(np.argmax(missing))
        raise ValueError(
            f"{name} must be an id for each row, got {array[row]} in row {row}"
        )
    return array


def _is_missing(value):
    """Returns whether an object is None, NaN, which differs from itself, or NA."""
    if value is None:
        return True
    equal = value == value
    return not (isinstance(equal, bool | np.bool_) and equal)


def number_ids(ids: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Returns the number of each id, in order of appearance, and the distinct ids."""
    if ids.dtype.kind == "O":
        numbers: dict[Any, int] = {}
        number = [numbers.setdefault(each, len(numbers)) for each in ids.tolist()]
        return np.array(number), [*numbers]
    names, first, number = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(first), np.int64)
    rank[order] = np.arange(len(first))
    return rank[number.reshape(-1)], names[order].tolist()
