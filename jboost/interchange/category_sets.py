# SPDX-License-Identifier: Apache-2.0
"""Categorical splits of other libraries, which list values, as sets of codes.

In: for each such split the values it lists. Out: the codes of values, and the codes
that go left at each split. Values that no split lists share one code.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt32

from jboost.codes.category_codes import MOST_CELLS, MOST_VALUES
from jboost.interchange.failures import ForeignError
from jboost.tables.categories import WORD, Categories, Category

_SHARED = 1  # the code of values that no split lists
_MOST_BYTES = 2**28  # that any file may ask for
_MOST_GROWTH = 256  # from what a larger file holds to the arrays made of it


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


class KnownValues(NamedTuple):
    """The categories of a feature: 0 to length - 1, or of these the ones listed.

    Other values count as missing.
    """

    length: int
    listed: Int[np.ndarray, " n"] | None = None


def code_splits(
    splits: Sequence[CategorySplit],
    known: Mapping[int, KnownValues],
    values: Mapping[int, tuple[Category, ...]],
) -> tuple[Categories | None, UInt32[np.ndarray, "S W"]]:
    """Codes for values, and the codes that go left at each split.

    Args:
      known: of each categorical feature; its length covers what the splits list.
      values: what the values 0, 1, ... of a feature stand for, where that is known.

    Returns:
      None and no words where no feature is categorical.

    Raises:
      ValueError: a value is too large, or the arrays would be.
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
    """The limits of training, before memory is taken."""
    if size > MOST_VALUES:
        worst = max(features, key=lambda feature: known[feature].length)
        raise ForeignError(
            f"has categories of {MOST_VALUES} and more, which float32 does not tell "
            f"apart: {size - 1} of feature {worst}; number them before training"
        )
    if size * len(features) > MOST_CELLS:
        raise ForeignError(
            f"has {len(features)} categorical features and a category {size - 1}, "
            f"whose product must be below {MOST_CELLS}; number them before training"
        )


def _pack_sets(splits, rows, num_words):
    """The codes that go left at each split, as bits."""
    held = 8 * sum(split.values.size for split in splits)
    check_growth(4 * len(splits) * num_words, held)
    words = np.zeros((len(splits), num_words), np.uint32)
    most = {feature: int(row.max()) for feature, row in rows.items()}
    for own, split in zip(words, splits, strict=True):
        bits = np.zeros(num_words * WORD, bool)
        bits[1 : most[split.feature] + 1] = not split.goes_left
        bits[rows[split.feature][split.values]] = split.goes_left
        own[:] = np.packbits(bits, bitorder="little").view("<u4")
    return words


def check_growth(needed: int, held: int) -> None:
    """Checks that arrays are not many times what they are made of.

    Arrays have one shape for all trees, so that a file with one large tree among many
    small ones may need far more memory than it has bytes.

    Args:
      needed: bytes of the arrays.
      held: bytes of what the file holds.

    Raises:
      ValueError: they are.
    """
    if needed > max(_MOST_BYTES, _MOST_GROWTH * held):
        raise ValueError(
            f"its trees must fit into arrays of {_MOST_GROWTH} times their own size, "
            f"{held} bytes, got {needed} bytes"
        )


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
