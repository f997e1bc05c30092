# SPDX-License-Identifier: Apache-2.0
"""The categories that LightGBM's text files speak of.

In: the header, the parameters and the categorical splits of a file. Out: of each
categorical feature its values, and what they stand for in a data frame.

A file names the values of training in ``feature_infos``, as a:b:c ("none" for a column
that is constant or was dropped before training), the categorical columns by their
places in the parameters, and the categories of the categorical columns of a pandas
frame one after the other, without the columns they belong to.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jboost.entry.warning import warn_user
from jboost.interchange.category_sets import CategorySplit, KnownValues

# Values that no split lists go right, as missing ones do: up to here they are kept as
# categories.
_MOST_UNLISTED = 2**16


def find_categories(
    infos: Sequence[str], rest: str, splits: Sequence[CategorySplit]
) -> tuple[dict[int, KnownValues], dict[int, tuple[Any, ...]]]:
    """The categories of each feature, and their names where they are known.

    Args:
      infos: of each feature what training saw.
      rest: the file behind its trees.
      splits: the categorical ones.
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
    """Gives the categories of a data frame to the categorical columns that they fit."""
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
        "category dtype, but does not tell which they were; the names of categories "
        "are dropped: predict from their codes (column.cat.codes, NaN where missing)"
    )
    return {}


def _match(lists, features, values, whole):
    """For each list the first feature behind the last one that it fits.

    Matches from both ends are the same where there is only one.

    Args:
      whole: whether training must have seen all categories of a list.
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
    """The places of categorical columns that the parameters name."""
    for line in rest.splitlines():
        name, found, value = line.partition(": ")
        if found and name == "[categorical_feature":
            places = {int(v) for v in value.rstrip("]").split(",") if v.isdecimal()}
            return {place for place in places if place < num_features}
    return set()


def _read_names(rest):
    """The categories of a pandas frame, a list for each column of category dtype."""
    for line in rest.splitlines():
        key, _, value = line.partition(":")
        if key == "pandas_categorical":
            lists = json.loads(value) or []
            if not all(isinstance(names, list) for names in lists):
                raise ValueError("pandas_categorical must hold lists")
            return lists
    return []
