# SPDX-License-Identifier: Apache-2.0
"""Converts what a user passes to NumPy arrays of native byte order.

In: arrays, lists, and objects that can be converted. Out: plain NumPy arrays. Masks of
``numpy.ma`` are respected: a masked cell of a table is a missing value; masked
targets, weights and other values of rows are refused.
"""

from typing import Any

import numpy as np


def is_masked_array(values: Any) -> bool:
    """Checks for a masked array, or a list that holds one."""
    if isinstance(values, list | tuple):
        return any(isinstance(value, np.ma.MaskedArray) for value in values)
    return isinstance(values, np.ma.MaskedArray)


def as_array(values: Any, expected: str) -> np.ndarray:
    """Returns values as an array of native byte order; masks are left out.

    Raises:
      TypeError: they cannot be converted; ``expected`` begins the message.
    """
    try:
        array = np.asarray(values)
    except Exception as error:  # what __array__ of any class may raise
        text = f"{type(error).__name__}: {error}"
        raise TypeError(f"{expected}, but conversion raised {text}") from error
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def refuse_mask(values: Any, name: str) -> Any:
    """Returns values without a mask.

    Raises:
      ValueError: some of them are masked.
    """
    if not is_masked_array(values):
        return values
    array = np.ma.asarray(values)
    mask = np.ma.getmaskarray(array)
    mask = mask if mask.dtype.names is None else mask.view(np.bool_)
    if mask.any():
        raise ValueError(
            f"{name} must not have masked values, got a masked array with "
            f"{np.count_nonzero(mask)} of {mask.size} values masked; leave their rows "
            "out"
        )
    return array.data


def fill_mask(x: Any) -> Any:
    """Returns a table whose masked cells are missing: NaN, or None for strings."""
    if not is_masked_array(x):
        return x
    x = np.ma.asarray(x)
    if x.dtype.names is not None:
        return x  # its columns are filled one by one
    mask = np.ma.getmaskarray(x)
    if not mask.any():
        return x.data
    if x.dtype.kind in "fc":
        return x.filled(np.nan)
    if x.dtype.kind in "iub" or str(x.dtype) == "bfloat16":
        return np.where(mask, np.nan, x.data.astype(np.float64))
    data = np.strings.decode(x.data, "utf-8") if x.dtype.kind == "S" else x.data
    cells = data.astype(object)
    cells[mask] = None
    return cells
