# SPDX-License-Identifier: Apache-2.0
"""Few sizes for many: programs are compiled for sizes, so that sizes are rounded up.

In: how many. Out: how many with padding; padded arrays.
"""

from typing import Any

import numpy as np

_FEW_ROWS = 8192  # compiling takes longer than training on so many
_FEW_COLUMNS = 32


def padded_size(size: int, least: int = 64) -> int:
    """Rounds up to 8 sizes per power of two: nearby sizes share programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def padded_rows(num_rows: int) -> int:
    """Rounds the rows of a training run up: powers of two for small tables."""
    if num_rows > _FEW_ROWS:
        return padded_size(num_rows)
    return max(64, 1 << (num_rows - 1).bit_length())


def padded_columns(num_rows: int, num_columns: int) -> int:
    """Rounds the columns of a training run up to multiples of 8 for small tables."""
    if num_rows > _FEW_ROWS or num_columns > _FEW_COLUMNS:
        return num_columns
    return -(-num_columns // 8) * 8


def pad_rows(array: Any, size: int) -> np.ndarray:
    """Repeats row 0 up to so many rows; in NumPy, because no size is compiled there.

    An array without rows gets zeros.
    """
    array = np.asarray(array)
    if len(array) == size:
        return array
    shape = (size - len(array), *array.shape[1:])
    first = np.broadcast_to(array[:1] if len(array) else array.dtype.type(), shape)
    return np.concatenate([array, first])
