# SPDX-License-Identifier: Apache-2.0
"""Finds the categories of the features of a LightGBM model.

In: the header, the parameters and the categorical splits of a text file. Out: for each
categorical feature, its values and the categories of a data frame that they represent.

The file spreads this information over three entries:

- ``feature_infos`` lists the values seen in training, as a:b:c, or "none" for a column
  that is constant or was dropped before training;
- the parameters list the indices of the categorical columns;
- ``pandas_categorical`` holds one list of categories for each column of category dtype,
  in the order of the columns, but not which columns these are.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jboost.entry.warning import warn_user
from jboost.interchange.category_sets import CategorySplit, KnownValues

# Values that no split lists go right, as missing values do, so dropping them does not
# change a prediction. We keep them up to this limit only to bound the arrays.
_MOST_UNLISTED = 2**16


def find_categories(
    infos: Sequence[str], rest: str, splits: Sequence[CategorySplit]
) -> tuple[dict[int, KnownValues], dict[int, tuple[Any, ...]]]:
    """Returns the categories of each feature, and their names where they are known.

    Args:
      infos: the entry of each feature in ``feature_infos``.
      rest: the part of the file after the trees.
      splits: the categorical splits of all trees.
    """
    listed: dict[int, list[np.ndarray]] = {}
    for split in splits:
        listed.setdefault(split.feature, []).append(split.values)
    for feature, info in enumerate(infos):
        if info[:1] not in ("[", "") and info != "none":
            seen = np.array(info.split(":"), np.int64)
            seen = seen[(seen >= 0) & (seen < _MOST_UNLISTED)]
            listed.setdefault(feature, []).append(seen)
    values = {feature: np.unique(np.concatenate(v)) for feature, v in listed.items()}
    names = _place_names(infos, rest, values)
    known = {}
    for feature in values.keys() | names.keys():
        own = values.get(feature, np.zeros(0, np.int64))
        length = max(int(own.max(initial=0)) + 1, len(names.get(feature, ())))
        known[feature] = KnownValues(length, own)
    return known, names


def _place_names(infos, rest, values):
    """Assigns the categories of a data frame to the columns that they fit.

    Returns nothing, and warns, if the file allows more than one assignment.
    """
    lists = _read_names(rest)
    if not lists:
        return {}
    features = sorted(_read_places(rest, len(infos)) | values.keys())
    for whole in (False, True):
        first = _match(lists, features, values, whole)
        last = _match(lists[::-1], features[::-1], values, whole)
        if first is not None and last is not None and first == last[::-1]:
            return dict(zip(first, map(tuple, lists), strict=True))
    warn_user(
        f"the model was trained on a pandas data frame with {len(lists)} columns of "
        "category dtype, but the file does not say which columns; the names of "
        "categories are dropped: predict from the codes (column.cat.codes, with NaN "
        "for missing values)"
    )
    return {}


def _match(lists, features, values, whole):
    """Assigns each list to the first feature that fits, in ascending order.

    The caller also matches in reverse order: there is exactly one assignment if both
    directions find the same one.

    Args:
      lists: the categories of each column of category dtype.
      features: indices of the features that may be categorical.
      values: the values of each feature that the file lists.
      whole: whether training must have seen all categories of a list.

    Returns:
      A feature for each list, or None if some list fits no feature.
    """
    left = iter(features)
    found = []
    for names in lists:
        for feature in left:
            own = values.get(feature, np.zeros(0, np.int64))
            if own.max(initial=-1) < len(names) and (
                not whole or own.size == len(names)
            ):
                found.append(feature)
                break
    return found if len(found) == len(lists) else None


def _read_places(rest, num_features):
    """Returns the indices of the categorical columns that the parameters list."""
    for line in rest.splitlines():
        name, found, value = line.partition(": ")
        if found and name == "[categorical_feature":
            places = {int(v) for v in value.rstrip("]").split(",") if v.isdecimal()}
            return {place for place in places if place < num_features}
    return set()


def _read_names(rest):
    """Returns a list of categories for each pandas column of category dtype."""
    for line in rest.splitlines():
        key, _, value = line.partition(":")
        if key == "pandas_categorical":
            lists = json.loads(value) or []
            if not all(isinstance(names, list) for names in lists):
                raise ValueError(
                    f"pandas_categorical must hold lists, got {value[:60]}"
                )
            return lists
    return []
