# SPDX-License-Identifier: Apache-2.0
"""Categorical splits of other libraries, which list values, as sets of codes.

In: for each such split the values it lists. Out: the codes of values, and the codes
that go left at each split. Values that no split lists share one code.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt32

from jboost.categories import WORD, Categories, Category

_SHARED = 1  # the code of values that no split lists


class CategorySplit(NamedTuple):
    """A split that lists values.

    Attributes:
      tree, node: where it is; trees count through rounds and scores.
      goes_left: whether what is listed goes left and the rest of what is known right,
        or the reverse.
    """

    tree: int
    node: int
    feature: int
    values: Int[np.ndarray, " n"]
    goes_left: bool


def code_splits(
    splits: Sequence[CategorySplit],
    known: Mapping[int, Bool[np.ndarray, " V"]],
    values: Mapping[int, tuple[Category, ...]],
) -> tuple[Categories | None, UInt32[np.ndarray, "S W"]]:
    """Codes for values, and the codes that go left at each split.

    Args:
      known: of each categorical feature, which values are categories; the others are
        as if missing.
      values: what the values 0, 1, ... of a feature stand for, where that is known.

    Returns:
      None and no words where no feature is categorical.
    """
    if not known:
        return None, np.zeros((0, 0), np.uint32)
    features = tuple(sorted(known))
    codes = np.zeros((len(features), max(map(len, known.values()))), np.int32)
    for row, feature in zip(codes, features, strict=True):
        own = [split.values for split in splits if split.feature == feature]
        row[: len(known[feature])] = np.where(known[feature], _SHARED, 0)
        listed = np.unique(np.concatenate([*own, np.zeros(0, int)]))
        row[listed] = _SHARED + 1 + np.arange(listed.size)
    num_words = int(codes.max()) // WORD + 1
    left = np.zeros((len(splits), num_words * WORD), bool)
    for bits, split in zip(left, splits, strict=True):
        row = codes[features.index(split.feature)]
        bits[1 : row.max() + 1] = not split.goes_left
        bits[row[split.values]] = split.goes_left
    words = np.packbits(left, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    names = tuple(values.get(feature) for feature in features)
    categories = Categories(
        codes=codes, features=features, values=names if any(names) else None
    )
    return categories, words


def list_values(
    categories: Categories, feature: int, words: UInt32[np.ndarray, " W"]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"], Int[np.ndarray, " u"]]:
    """The values of a feature that go left at a split, right, and those unknown."""
    row = np.asarray(categories.codes)[categories.features.index(feature)]
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    left = (row < bits.size) & (bits[np.minimum(row, bits.size - 1)] == 1)
    known = row > 0
    right = np.flatnonzero(known & ~left)
    return np.flatnonzero(known & left), right, np.flatnonzero(~known)
