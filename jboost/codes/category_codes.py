# SPDX-License-Identifier: Apache-2.0
"""Assigns codes to categories: 1 to the heaviest of a feature, 2 to the next, ..."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jboost.entry.feature_checks import check_feature
from jboost.entry.messages import show
from jboost.tables.categories import Categories, Category, describe_column

MOST_VALUES = 2**24  # float32 tells apart integers up to this one
MOST_CELLS = 2**26  # the most cells of the table of codes: 256 MiB


def find_categorical_features(
    categorical: Any,
    num_features: int,
    feature_names: Sequence[str] | None = None,
    values: tuple[tuple[Category, ...] | None, ...] | None = None,
) -> tuple[int, ...]:
    """Returns the indices of the categorical features, ascending.

    Args:
      categorical: names or indices, "auto" or None.
      values: the categories that the table holds for each column, or None; a column
        with categories is categorical, whatever ``categorical`` is.
    """
    found = {index for index, known in enumerate(values or ()) if known is not None}
    if categorical is None or (isinstance(categorical, str) and categorical == "auto"):
        return tuple(sorted(found))
    expected = "categorical must be 'auto', None or a sequence of features"
    kinds = list | tuple | set | frozenset | range | np.ndarray
    if not isinstance(categorical, kinds):
        raise TypeError(f"{expected}, got {show(categorical)}")
    if isinstance(categorical, np.ndarray):
        categorical = categorical.ravel().tolist()
    features = [
        check_feature("categorical", feature, num_features, feature_names)
        for feature in categorical
    ]
    if len({*features}) < len(features):
        raise ValueError(f"{expected}, each of them once, got {show(categorical)}")
    return tuple(sorted(found.union(features)))


def fit_categories(
    matrix: Float[np.ndarray, "N G"],
    features: tuple[int, ...],
    weight: Float[np.ndarray, " N"] | None,
    max_codes: int,
    values: tuple[tuple[Category, ...] | None, ...] | None = None,
    known: Categories | None = None,
    feature_names: Sequence[str] | None = None,
) -> Categories:
    """Assigns codes to the categories of each feature, the heaviest first.

    If there are more than ``max_codes`` categories, the lightest share the last code.
    Among equal weights, the smaller value comes first. Rows of weight 0 are ignored.

    Args:
      matrix: the categorical columns, checked by
        :func:`jboost.tables.categories.check_values`.
      values: the categories that the numbers represent, as in :class:`Categories`.
      known: the categories of a model that is trained further; they keep their codes,
        and new categories get the next codes.
    """
    if weight is not None:
        matrix, weight = matrix[weight > 0], weight[weight > 0]
    if known is not None and values is None:
        values = known.values  # x is a matrix
    named = values or (None,) * len(features)
    most = []
    for column, own in zip(matrix.T, named, strict=True):
        largest = int(np.max(column, initial=0, where=~np.isnan(column)))
        most.append(max(largest, len(own or ()) - 1))
    size = 1 + max(most, default=0)
    if size > MOST_VALUES or size * len(features) > MOST_CELLS:
        worst = features[int(np.argmax(most))]
        raise ValueError(
            f"x must hold categories as small integers, below {MOST_VALUES} and fewer "
            f"than {MOST_CELLS} for all categorical columns together, got "
            f"{max(most)} in column {worst}; number them 0, 1, 2, ..."
        )
    codes = np.zeros((len(features), size), np.int32)
    if known is not None:
        before = np.asarray(known.codes)
        codes = np.pad(before, ((0, 0), (0, max(0, size - before.shape[1]))))
        size = codes.shape[1]
    for group, column in enumerate(matrix.T):
        present = ~np.isnan(column)
        value = column[present].astype(np.int64)
        mass = np.bincount(value, None if weight is None else weight[present], size)
        seen = np.flatnonzero(np.bincount(value, minlength=size))
        last = codes[group].max()
        seen = seen[codes[group, seen] == 0]
        if known is not None and len(seen):
            place = f"{describe_column(features[group], feature_names)} of x"
            _check_new(place, seen, named[group], last >= max_codes)
        order = seen[np.argsort(-mass[seen], kind="stable")]
        new = np.minimum(last + 1 + np.arange(len(order)), max_codes)
        codes[group, order] = new
    return Categories(codes=codes, features=features, values=values)


def _check_new(place, seen, values, full):
    if values is not None and seen[-1] >= len(values):
        raise ValueError(
            f"{place} must hold the numbers of the model's {len(values)} categories, "
            f"from 0 to {len(values) - 1}, got {seen[-1]}; pass a data frame, which "
            "names new categories"
        )
    if full:
        new = [int(v) if values is None else values[v] for v in seen[:5]]
        raise ValueError(
            f"max_bins must be larger to give codes to categories of {place} that the "
            f"model does not know, such as {new}; or replace them by missing values"
        )
