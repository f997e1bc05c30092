# SPDX-License-Identifier: Apache-2.0
"""Finds columns whose values float32 cannot tell apart, such as Unix seconds.

In: the float64 thresholds of a model, and the ranges of the columns in training. Out:
the columns that prediction must compare in float64.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

_WHOLE = 2.0**24  # float32 cannot hold all whole numbers from here on
# Thresholds are that many float32 numbers apart, or a share of the values between them
# that matters (up to 1 / 2^11 on average) is rounded to the other side.
_LEAST_STEPS = 2.0**10
_BINS = 255  # as many bins share the range of a column by default
_TINY = float(np.finfo(np.float32).tiny)


def find_wide_features(
    feature: Int[np.ndarray, " n"],
    threshold: Float[np.ndarray, " n"],
    ranges: Mapping[int, tuple[float, float]],
) -> list[int]:
    """Returns the features with a threshold, or a gap, that asks for float64.

    A threshold does if it is 2^24 or more in size, and the gap between two thresholds
    if it is smaller than 1024 float32 numbers. So does the range of a column if one of
    255 parts of it is: there may be few thresholds.

    Args:
      feature, threshold: of all numeric splits.
      ranges: the least and the largest value of features, where they are known.
    """
    found = []
    for index in np.unique(feature).tolist():
        own = np.unique(threshold[feature == index])
        own = own[np.isfinite(own)]
        ends = np.array(ranges.get(index, ()), float)
        narrow = _is_narrow(own) or (ends.size and _is_narrow(ends, _BINS))
        if narrow or np.any(np.abs(own) >= _WHOLE):
            found.append(index)
    return found


def _is_narrow(values, parts=1):
    """Returns whether a gap, in equal parts, is smaller than it may be."""
    size = np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.maximum(np.spacing(size.astype(np.float32)), _TINY)
        gap = np.diff(values) / parts
    return bool(np.any((gap < _LEAST_STEPS * step) & (gap > 0)))
