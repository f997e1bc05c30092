# SPDX-License-Identifier: Apache-2.0
"""Chooses thresholds from quantile sketches and summaries.

In: a sketch of all rows, or the summary of one column. Out: bins, or the thresholds of
one feature.
"""

import numpy as np
from jaxtyping import Float

from jboost.codes.binning import pad_thresholds
from jboost.codes.bins import Bins
from jboost.codes.thresholds import check_max_bins, cut_positions, midpoints
from jboost.entry.decorators import on_host
from jboost.sketches.sketch import QuantileSketch, summarize_sketch
from jboost.sketches.summary import (
    QuantileSummary,
    find_candidates,
    spread_between,
)

_LEAST_SHARE = 4  # the error is at most 1/4 of a bin's share of the weight


@on_host("call it on concrete arrays")
def bins_from_sketch(sketch: QuantileSketch, *, max_bins: int = 256) -> Bins:
    """Chooses thresholds like :func:`jb.fit_bins`, for streamed rows.

    A threshold is midway between two adjacent entries lo < hi of the summary. If all
    values are known (a feature with at most 24 / eps distinct values), thresholds equal
    those of ``fit_bins``, up to rounding of fractional weights. Otherwise, unknown
    values whose total weight is at most the sketch's error can lie between lo and hi.

    Bins have equal shares of capped weight, as in ``fit_bins``. With ``eps <= 1 / (8 *
    max_bins)``, the error is less than 1/6 of a bin's share of the weight that remains
    without the heavy values.

    Args:
      sketch: the sketch of all rows.
      max_bins: the maximum number of codes per feature, including the missing code.

    Returns:
      Bins with as many codes as necessary, rounded up to a power of two, at most
      ``max_bins``.

    Raises:
      ValueError: max_bins is not in [2, 65536], or is greater than 1 + 1 / (4 eps),
        where the error would exceed 1/4 of a bin's share.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> sketch = sketches.make_sketch(1)
      >>> for value in (1.0, 4.0, 2.0):
      ...     sketch = sketches.update_sketch(sketch, [[value]])
      >>> np.asarray(sketches.bins_from_sketch(sketch).thresholds)
      array([[1.5, 3. , inf]], dtype=float32)
    """
    check_max_bins(max_bins)
    most = 1 + int(1 / (_LEAST_SHARE * sketch.eps))
    if _LEAST_SHARE * sketch.eps * (max_bins - 1) > 1:
        raise ValueError(
            f"max_bins must be at most {most} for a sketch made with eps={sketch.eps} "
            f"(1 + 1/(4 eps)), got {max_bins}"
        )
    rows = [
        cut_summary(summarize_sketch(sketch, feature), int(max_bins))
        for feature in range(sketch.num_features)
    ]
    absent = "missing" if np.any(sketch.missing > 0) else None
    return pad_thresholds(rows, int(max_bins), absent)


def cut_summary(summary: QuantileSummary, max_bins: int) -> Float[np.ndarray, " C"]:
    """Chooses the thresholds of one feature; see :func:`bins_from_sketch`."""
    lower = np.arange(summary.num_entries - 1)
    if summary.num_entries > max_bins - 1:
        between = spread_between(summary)
        lower = cut_positions(summary.weight, max_bins - 1, between)
    return _thresholds_above(summary, lower)


@on_host("call it on concrete arrays", runs_jax=False)
def find_thresholds(summary: QuantileSummary, *, eps: float) -> Float[np.ndarray, " C"]:
    """Returns thresholds at split candidates whose ranks are less than ``eps`` apart.

    There is one threshold above each candidate of :func:`find_candidates` except the
    largest, midway to the next value in the summary. If there are few distinct values,
    each is a candidate, and the thresholds equal those of exact search.

    Args:
      summary: the summary of a feature, or of the rows of one node weighted with
        Hessians.
      eps: as in :func:`find_candidates`.

    Returns:
      Ascending thresholds; ``x <= threshold`` goes left.

    Raises:
      TypeError, ValueError: as :func:`find_candidates`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> summary = sketches.make_summary(np.arange(100), np.ones(100))
      >>> sketches.find_thresholds(summary, eps=0.3).tolist()
      [0.5, 25.5, 50.5, 75.5]
    """
    candidates = find_candidates(summary, eps=eps).value
    return _thresholds_above(summary, np.searchsorted(summary.value, candidates[:-1]))


def _thresholds_above(summary, lower):
    """Returns the thresholds between the given entries and the next ones."""
    return midpoints(summary.value[lower], summary.value[lower + 1])
