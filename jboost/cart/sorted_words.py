# SPDX-License-Identifier: Apache-2.0
"""Packs a row's value and index into one 64-bit word that sorts by value.

In: float32 columns. Out: sorted words: the bits of the value above the index of the
row. Sorting words is faster than an argsort, needs no second array, and breaks ties by
row index, so that the result does not depend on the sorting algorithm.
"""

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

_ROW = np.uint64(2**32 - 1)  # the bits of a word that hold the row's index
_MISSING = np.uint64((2**32 - 1) << 32)  # words from here on hold NaN


def sort_words(columns: Float[np.ndarray, "F N"]) -> UInt64[np.ndarray, "F N"]:
    """Returns the words of each column in ascending order, missing values last."""
    bits = columns.view(np.uint32)
    # Negative floats sort in reverse by their bits: flip all bits of negative values,
    # and the sign bit of the others, and integers sort as the floats do.
    key = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    key = np.where(np.isnan(columns), np.uint32(2**32 - 1), key).astype(np.uint64)
    return np.sort((key << 32) | np.arange(columns.shape[1], dtype=np.uint64), axis=1)


def row_indices(words: UInt64[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Returns the indices of the rows."""
    return (words & _ROW).view(np.int64)


def is_missing(words: UInt64[np.ndarray, "*n"]) -> Bool[np.ndarray, "*n"]:
    """Returns whether each value is missing."""
    return words >= _MISSING


def value_changes(words: UInt64[np.ndarray, "f n"]) -> Bool[np.ndarray, "f n-1"]:
    """Returns whether each value differs from the next one of its column."""
    return (words[:, 1:] ^ words[:, :-1]) > _ROW
