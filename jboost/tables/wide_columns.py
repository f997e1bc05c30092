# SPDX-License-Identifier: Apache-2.0
"""Converts columns whose values float32 cannot tell apart, such as Unix seconds.

In: the float64 thresholds of a column in a model of another library, and values. Out:
float32 numbers in their place, one for each threshold and each value, that compare the
same way.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

_MAGNITUDE, _DENORMALS = 0x7FFFFFFF, 0x7FFFFF  # bits of a float32, of its denormals


class WideColumn(NamedTuple):
    """Holds the thresholds of a column.

    Attributes:
      thresholds: the distinct thresholds, ascending.
      rounded: the thresholds that float32 values are compared with, ascending.
      codes: distinct, ascending numbers near ``rounded``, which replace the thresholds.
      bounds: the least and the most number that replaces a value between two
        thresholds, [2, m + 1].
    """

    thresholds: Float64[np.ndarray, " m"]
    rounded: Float32[np.ndarray, " m"]
    codes: Float32[np.ndarray, " m"]
    bounds: Float32[np.ndarray, "2 m+1"]

    def convert(self, values: Shaped[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
        """Returns the numbers that replace values; NaN stays NaN.

        Law: ``convert(x) <= codes[i]`` where ``x <= thresholds[i]``, compared in
        float64. Values that are float32 are compared with ``rounded``.
        """
        known = self.rounded if values.dtype == np.float32 else self.thresholds
        with np.errstate(over="ignore"):
            near = values.astype(np.float32)
        # The number of thresholds below each value; all of them for NaN.
        rank = np.searchsorted(known, values.astype(known.dtype))
        return np.clip(near, self.bounds[0, rank], self.bounds[1, rank])


def make_wide_column(
    thresholds: Float64[np.ndarray, " m"], rounded: Float32[np.ndarray, " m"]
) -> WideColumn:
    """Finds numbers that replace ascending thresholds.

    They are as near to the rounded thresholds as they can be while they are distinct,
    and 0 keeps its place among them: sparse matrices do not store it.
    """
    place, last = np.arange(len(rounded)), len(rounded) - 1
    number = _to_number(rounded)
    shifted, low = number - place, number < 0
    shifted[~low] = np.maximum.accumulate(shifted[~low])
    shifted[low] = np.minimum.accumulate(shifted[low][::-1])[::-1]
    # Only an infinite threshold may become infinite.
    top = np.inf if thresholds[-1] == np.inf else np.finfo(np.float32).max
    least, most = _to_number(np.array([-np.inf, top], np.float32))
    number = np.clip(shifted, least, most - last) + place
    codes, infinite = _to_float(number), np.full(1, np.inf, np.float32)
    end = _to_number(infinite)
    above = np.append(-infinite, _to_float(np.minimum(number + 1, end)))
    bounds = np.stack([above, np.append(codes, infinite)])
    return WideColumn(thresholds, rounded, codes, bounds)


def _to_number(values) -> Int64[np.ndarray, " m"]:
    """Numbers float32 values in their order, 0 for 0; denormals count as 0."""
    bits = values.view(np.int32).astype(np.int64)
    size = np.maximum((bits & _MAGNITUDE) - _DENORMALS, 0)
    return np.where(bits < 0, -size, size)


def _to_float(number) -> Float32[np.ndarray, " m"]:
    """Returns the values of numbers from :func:`_to_number`."""
    size = np.abs(number)
    bits = np.where(size > 0, size + _DENORMALS, 0).astype(np.int32)
    return np.where(number < 0, -bits.view(np.float32), bits.view(np.float32))
