# SPDX-License-Identifier: Apache-2.0
"""Converts categorical splits that list values into splits by sets of codes.

In: for each split, the values that it lists. Out: the code of each value, and the codes
that go left at each split. Values that no split lists share one code, because all
splits treat them alike; this keeps the sets short.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt32

from jboost.codes.category_codes import MOST_CELLS, MOST_VALUES
from jboost.interchange.failures import ForeignError
from jboost.tables.categories import WORD, Categories, Category

_SHARED = 1  # the code of all values that no split lists; 0 means missing
_MOST_BYTES = 2**28  # arrays up to this size are always allowed
_MOST_GROWTH = 256  # the most bytes of arrays per byte of the trees in the file


class CategorySplit(NamedTuple):
    """Describes a split that lists values.

    Attributes:
      tree, node: indices of the tree and of its node; trees are numbered in the order
        of rounds, K per round.
      feature: index of the feature.
      values: the values that the split lists.
      goes_left: True if the listed values go left and all other known values go right;
        False for the reverse.
    """

    tree: int
    node: int
    feature: int
    values: Int[np.ndarray, " n"]
    goes_left: bool


class KnownValues(NamedTuple):
    """Holds the categories of a feature; all other values count as missing.

    Attributes:
      length: categories are integers in [0, length).
      listed: the categories, or None if all integers in [0, length) are categories.
    """

    length: int
    listed: Int[np.ndarray, " n"] | None = None


def code_splits(
    splits: Sequence[CategorySplit],
    known: Mapping[int, KnownValues],
    values: Mapping[int, tuple[Category, ...]],
) -> tuple[Categories | None, UInt32[np.ndarray, "S W"]]:
    """Assigns codes to values and returns the codes that go left at each split.

    Args:
      splits: the categorical splits of all trees.
      known: the categories of each categorical feature; its length exceeds every value
        that the splits list.
      values: the categories that the integers 0, 1, ... represent, for the features
        where they are known.

    Returns:
      The categories, and one set of codes (a bit mask) per split. If no feature is
      categorical: None, and an array of size 0.

    Raises:
      ValueError: a value or the resulting arrays would be too large.
    """
    if not known:
        return None, np.zeros((0, 0), np.uint32)
    features = tuple(sorted(known))
    size = max(1, *(each.length for each in known.values()))
    _check_table(known, features, size)
    listed: dict[int, list[np.ndarray]] = {feature: [] for feature in features}
    for split in splits:
        listed[split.feature].append(split.values)
    codes = np.zeros((len(features), size), np.int32)
    for row, feature in zip(codes, features, strict=True):
        each = known[feature]
        row[slice(each.length) if each.listed is None else each.listed] = _SHARED
        own = np.unique(np.concatenate([*listed[feature], np.zeros(0, int)]))
        row[own] = _SHARED + 1 + np.arange(own.size)
    rows = dict(zip(features, codes, strict=True))
    names = tuple(values.get(feature) for feature in features)
    named = any(name is not None for name in names)
    categories = Categories(
        codes=codes, features=features, values=names if named else None
    )
    return categories, _pack_sets(splits, rows, int(codes.max()) // WORD + 1)


def _check_table(known, features, size):
    """Checks the limits that training has, before memory is allocated."""
    if size > MOST_VALUES:
        worst = max(features, key=lambda feature: known[feature].length)
        raise ForeignError(
            f"must have categories below {MOST_VALUES}, because float32 cannot "
            f"represent all larger integers, got {size - 1} in feature {worst}; "
            "renumber the categories before training"
        )
    if size * len(features) > MOST_CELLS:
        raise ForeignError(
            "must have a product of the number of categorical features and the number "
            f"of categories of at most {MOST_CELLS}, got {len(features)} features and "
            f"{size} categories; renumber the categories before training"
        )


def _pack_sets(splits, rows, num_words):
    """Packs the codes that go left at each split into 32-bit words."""
    # Every set is as wide as the largest one, so a small file could need much memory.
    held = 8 * sum(split.values.size for split in splits)
    check_growth(4 * len(splits) * num_words, held)
    words = np.zeros((len(splits), num_words), np.uint32)
    most = {feature: int(row.max()) for feature, row in rows.items()}
    for own, split in zip(words, splits, strict=True):
        bits = np.zeros(num_words * WORD, bool)
        # Code 0 (missing) stays unset: nodes have a separate flag for missing values.
        bits[1 : most[split.feature] + 1] = not split.goes_left
        bits[rows[split.feature][split.values]] = split.goes_left
        own[:] = np.packbits(bits, bitorder="little").view("<u4")
    return words


def check_growth(needed: int, held: int) -> None:
    """Checks that arrays are not many times larger than the data in the file.

    All trees share arrays of one shape. A file with one large tree and many small ones
    could thus need far more memory than its own size, and exhaust the memory of the
    process that reads it.

    Args:
      needed: size of the arrays in bytes.
      held: size of the trees in the file in bytes.

    Raises:
      ValueError: the arrays would be too large.
    """
    if needed > max(_MOST_BYTES, _MOST_GROWTH * held):
        raise ValueError(
            f"its trees must fit into arrays of at most {_MOST_GROWTH} times their own "
            f"size of {held} bytes, got {needed} bytes"
        )


def list_values(
    categories: Categories, feature: int, words: UInt32[np.ndarray, " W"]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"], Int[np.ndarray, " u"]]:
    """Returns the values that go left at a split, go right, and are not known."""
    row = np.asarray(categories.codes)[categories.features.index(feature)]
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    left = (row < bits.size) & (bits[np.minimum(row, bits.size - 1)] == 1)
    known = row > 0
    right = np.flatnonzero(known & ~left)
    return np.flatnonzero(known & left), right, np.flatnonzero(~known)
