# SPDX-License-Identifier: Apache-2.0
"""Few sizes for many: programs are compiled for sizes, so that sizes are rounded up.

In: how many. Out: how many with padding; padded arrays.
"""

from typing import Any

import numpy as np


def padded_size(size: int, least: int = 64) -> int:
    """Rounds up to 8 sizes per power of two: nearby sizes share programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


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
