# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the names of categories in XGBoost files.

In: the categories of each feature. Out: the entry "cats", which XGBoost 3.1 and later
uses to assign codes to the categories of a data frame; and the reverse.
"""

import itertools
from typing import Any, Literal

import numpy as np

from jboost.entry.representation import show
from jboost.model.ensemble import Ensemble
from jboost.tables.categories import Category

CategoryNames = Literal["names", "codes"]
_INT64 = 15  # XGBoost's number for a list of int64
_NO_NAMES: dict[str, Any] = {"offsets": [], "values": []}


def describe_categories(model: Ensemble, categories: CategoryNames) -> dict[str, Any]:
    """Returns the entry "cats" of a model.

    Args:
      model: the model to write.
      categories: "names", or "codes" to leave out the names.

    Raises:
      ValueError: XGBoost cannot store the name of a category.
    """
    known = model.schema.categories or ()
    if categories == "codes" or not any(values is not None for values in known):
        none = np.zeros(0, np.int32)
        return {"enc": [], "feature_segments": none, "sorted_idx": none}
    for feature, values in enumerate(known):
        _check_names(model, feature, values or ())
    # XGBoost finds the code of a category by binary search in the sorted names.
    order = [sorted(range(len(v or ())), key=(v or ()).__getitem__) for v in known]
    return {
        "enc": [_encode(values or ()) for values in known],
        "feature_segments": np.cumsum([0, *map(len, order)]).astype(np.int32),
        "sorted_idx": np.array([*itertools.chain(*order)], np.int32),
    }


def _check_names(model, feature, values: tuple[Category, ...]):
    """Checks that all categories are ASCII strings or int64.

    XGBoost stores strings as bytes but computes their offsets in characters, so strings
    beyond ASCII come back corrupted.
    """
    for value in values:
        if isinstance(value, str):
            good = value.isascii() and "\0" not in value
        else:
            good = type(value) is int and -(2**63) <= value < 2**63
        if not good:
            name = (model.feature_names or {feature: feature})[feature]
            raise ValueError(
                'categories must be "codes" for this model, because XGBoost stores '
                f"only ASCII strings and int64 as names of categories, got "
                f"{show(value)} "
                f"in feature {show(name)}; then pass XGBoost the indices of "
                "categories in "
                "model.categories.values"
            )


def _encode(values):
    if not values:
        return _NO_NAMES
    if isinstance(values[0], int):
        return {"type": _INT64, "values": np.array(values, np.int64)}
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    text = "".join(values).encode("ascii")
    return {"offsets": ends, "values": np.frombuffer(text, np.int8)}


def read_categories(encoding: dict[str, Any]) -> tuple[Category, ...] | None:
    """Returns the categories of a feature, or None if their names are unknown.

    The names are unknown if the file has none, or if they are not ASCII: XGBoost 3.2
    stores bytes but counts characters, so the original strings cannot be recovered.
    """
    values = np.asarray(encoding["values"])
    if "offsets" not in encoding:
        return tuple(values.tolist())
    ends = np.asarray(encoding["offsets"], np.int64)
    if len(ends) < 2:
        return None
    if ends[0] != 0 or ends[-1] > len(values) or np.any(np.diff(ends) < 0):
        raise ValueError("offsets of categories must ascend within their text")
    text = values.astype(np.int8).tobytes()
    pairs = itertools.pairwise(ends.tolist())
    if not text.isascii():
        return None
    return tuple(text[first:last].decode("ascii") for first, last in pairs)
