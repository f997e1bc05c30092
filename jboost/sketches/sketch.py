# SPDX-License-Identifier: Apache-2.0
"""Quantile sketches of streamed rows: what binning needs to know of all of them.

In: batches of rows, in any number and order, on one machine or several. Out: a
quantile summary per feature with a proven error, and from it the thresholds. The
memory depends on the error asked for and hardly on the number of rows.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.codes.binning import check_max_bins, pad_thresholds
from jboost.codes.bins import Bins
from jboost.codes.thresholds import cut_positions, midpoints
from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.sketches.summary import (
    QuantileSummary,
    check_eps,
    check_weight,
    find_candidates,
    make_summary,
    merge_summaries,
    prune_summary,
    spread_between,
    summarize_column,
)
from jboost.tables.frames import read_frame

FAN = 8  # a level takes at least so many summaries before it is pruned
LEAST_SHARE = 4  # of a bin's share of the weight, the error is at most 1/4
_EMPTY = make_summary(np.zeros(0))

Levels = tuple[QuantileSummary, ...]


class Batch(NamedTuple):
    """Rows not summed up yet; without weights each counts 1."""

    x: Float[np.ndarray, "n F"]
    weight: Float[np.ndarray, " n"] | None


class QuantileSketch(NamedTuple):
    """What is known of the rows seen so far, with an error of at most ``eps``.

    Level 0 is exact. Where a level outgrows its capacity it is emptied: its summary
    is pruned to b_l + 1 entries and merged into the next, l::

        rows -> level 0 (exact) -> level 1 -> level 2 -> ...      b_l = T_{l+1} / eps

    with the triangular numbers T_{l+1} = (l + 1)(l + 2) / 2 = 3, 6, 10, 15, ...

    The error: a row comes into level l at most once, by a pruning that adds at most
    1 / b_l of the weight pruned. All prunings together add at most
    W * sum_l 1 / b_l = W * eps * sum_l 2 / ((l + 1)(l + 2)) = eps * W, with W the
    weight of all rows and whatever their order, number and weights. Merging two
    sketches joins them level by level, so that the same holds for both together.

    A few heavy values do no harm: of any h <= 1 / (8 eps) values the weight does not
    count, and the error is at most 1.2 eps * (weight of all the others). A pruning
    adds c <= W' / (b_l - h), with W' what the summary does not know to be theirs;
    that is the weight of the others and at most h times the error so far. With
    the sum above the error E obeys E <= eps (W_others + h E) / (1 - 1/24).

    The memory: a level l >= 1 holds at most 8 (b_l + 1) entries and is pruned after
    more than 8 summaries at the earliest, so N rows fill at most 1 + log_8(N eps / 24)
    levels. That is O(log(N eps)^3 / eps) entries per feature; :func:`max_entries`
    counts them. A feature with at most 24 / eps distinct values never leaves level 0.

    All bounds hold up to the rounding of sums in float64: exactly, when the weights
    are integers (below 2^53 in sum).

    Attributes:
      eps: the error asked for, relative to the weight of a feature's known values.
      missing: the weight of the missing values of each feature.
      levels: of each feature.
      pending: batches that are still too small to be worth sorting.
    """

    eps: float
    missing: Float[np.ndarray, " F"]
    levels: tuple[Levels, ...]
    pending: tuple[Batch, ...]

    def __repr__(self) -> str:
        """Its sizes: the summaries would fill pages."""
        sizes = f"num_features={self.num_features}, num_entries={self.num_entries}"
        return f"QuantileSketch({sizes}, eps={self.eps:.3g})"

    @property
    def num_features(self) -> int:
        """F."""
        return len(self.missing)

    @property
    def num_entries(self) -> int:
        """Entries held in all features and levels, and values pending."""
        held = sum(entry.num_entries for levels in self.levels for entry in levels)
        return held + sum(batch.x.size for batch in self.pending)


def make_sketch(num_features: int, *, eps: float = 1 / 2048) -> QuantileSketch:
    """Makes the sketch of no rows.

    Args:
      num_features: F.
      eps: the error, relative to the weight of all known values; greater than 0, at
        most 1/2. The default is an eighth of the share of one of 256 bins.

    Returns:
      An empty sketch, for :func:`update_sketch`.

    Raises:
      TypeError, ValueError: an argument is not such a number.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> sketch = sketches.make_sketch(2, eps=0.01)
      >>> for batch in np.split(np.arange(20_000.0).reshape(-1, 2), 10):
      ...     sketch = sketches.update_sketch(sketch, batch)
      >>> summary = sketches.summarize_sketch(sketch, 0)
      >>> summary.total, summary.error <= 0.01 * summary.total
      (10000.0, True)
    """
    num_features = checks.check_integer("num_features", num_features, least=1)
    check_eps(eps, most=0.5)
    return QuantileSketch(
        eps=float(eps),
        missing=np.zeros(num_features),
        levels=((),) * num_features,
        pending=(),
    )


@on_host("call it on concrete arrays", runs_jax=False)
def update_sketch(
    sketch: QuantileSketch,
    x: Any,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
) -> QuantileSketch:
    """Adds rows; the sketch given is left as it was.

    Args:
      sketch: of the rows before.
      x: numbers; NaN is missing, infinities are values, as in :func:`jb.fit_bins`.
      sample_weight: weights of the rows (or their hessians), finite and >= 0; rows
        of weight 0 are not looked at.

    Returns:
      The sketch of all rows.

    Raises:
      TypeError, ValueError: x is not a numeric matrix with the sketch's number of
        columns, or the weights are not such.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> sketch = sketches.make_sketch(2)
      >>> sketch = sketches.update_sketch(sketch, np.zeros((5, 2)), np.full(5, 2.0))
      >>> sketches.summarize_sketch(sketch, 1).total
      10.0
    """
    matrix = np.asarray(read_frame(x, "x").matrix)
    if matrix.shape[1] != sketch.num_features:
        raise ValueError(
            f"x must have {sketch.num_features} columns, as the sketch has, got "
            f"{matrix.shape[1]}"
        )
    weight = None
    if sample_weight is not None:
        weight = check_weight(sample_weight, len(matrix), "sample_weight")
    absent = np.isnan(matrix)
    missing = np.sum(absent, axis=0) if weight is None else weight @ absent
    grown = sketch._replace(
        missing=sketch.missing + missing,
        pending=(*sketch.pending, Batch(matrix, weight)),
    )
    return _settle(grown, own=matrix)


def merge_sketches(first: QuantileSketch, second: QuantileSketch) -> QuantileSketch:
    """The sketch of the rows of both, with the error bound of each.

    Sketches of parts of the data may be merged in any order and any tree.

    Raises:
      ValueError: the sketches differ in eps or in the number of features.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> x = np.arange(100.0)[:, None]
      >>> empty = sketches.make_sketch(1)
      >>> parts = [sketches.update_sketch(empty, part) for part in (x, -x)]
      >>> sketches.summarize_sketch(sketches.merge_sketches(*parts), 0).total
      200.0
    """
    if first.eps != second.eps:
        raise ValueError(
            f"sketches must have the same eps, got {first.eps} and {second.eps}"
        )
    if first.num_features != second.num_features:
        raise ValueError(
            "sketches must have the same number of features, got "
            f"{first.num_features} and {second.num_features}"
        )
    pairs = zip(first.levels, second.levels, strict=True)
    merged = QuantileSketch(
        eps=first.eps,
        missing=first.missing + second.missing,
        levels=tuple(_merge_levels(*pair, first.eps) for pair in pairs),
        pending=first.pending + second.pending,
    )
    return _settle(merged)


@on_host("call it on concrete arrays", runs_jax=False)
def summarize_sketch(sketch: QuantileSketch, feature: int) -> QuantileSummary:
    """The quantile summary of one feature, all levels merged.

    Returns:
      A summary of an error of at most ``sketch.eps`` of its total weight; exact while
      no level but the first is in use. See :func:`jb.sketches.query_ranks`,
      :func:`jb.sketches.bound_ranks` and :func:`find_candidates`.

    Raises:
      ValueError: there is no such feature.

    Example:
      >>> import numpy as np
      >>> from jboost import sketches
      >>> x = np.arange(100.0)[:, None]
      >>> sketch = sketches.update_sketch(sketches.make_sketch(1), x)
      >>> summary = sketches.summarize_sketch(sketch, 0)
      >>> sketches.query_ranks(summary, 50.0).tolist()
      50.0
    """
    most = sketch.num_features - 1
    feature = checks.check_integer("feature", feature, least=0, most=most)
    summary = _summarize_pending(sketch.pending, feature)
    for level in sketch.levels[feature]:
        summary = merge_summaries(summary, level)
    return summary


@on_host("call it on concrete arrays")
def bins_from_sketch(sketch: QuantileSketch, *, max_bins: int = 256) -> Bins:
    """Chooses thresholds as :func:`jb.fit_bins` does, for rows that were streamed.

    A threshold lies midway between two neighboring entries lo < hi of the summary.
    Where all values are known (a feature with at most 24 / eps distinct ones) the
    thresholds are those of ``fit_bins``, up to the rounding of fractional weights.
    Elsewhere unknown values lie between lo and hi, of at most the sketch's error
    in weight, and the threshold goes through the middle of them.

    Shares are of capped weight as in ``fit_bins``, also where values are unknown: with
    ``eps <= 1 / (8 * max_bins)`` the error is less than a sixth of a bin's share of
    the weight that is left beside the heavy values.

    Args:
      sketch: of all rows.
      max_bins: the most codes a feature may use, the missing one included.

    Returns:
      Bins of as many codes as are needed, rounded up to a power of two, at most
      ``max_bins``.

    Raises:
      ValueError: max_bins is not in [2, 65536], or is greater than 1 + 1 / (4 eps),
        so that a bin's share would drown in the error.

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
    if LEAST_SHARE * sketch.eps * (max_bins - 1) > 1:
        raise ValueError(
            f"max_bins must be at most {1 + int(1 / (LEAST_SHARE * sketch.eps))} for a "
            f"sketch made with eps={sketch.eps} (1 + 1/(4 eps)), got {max_bins}"
        )
    rows = []
    for feature in range(sketch.num_features):
        summary = summarize_sketch(sketch, feature)
        lower = np.arange(summary.num_entries - 1)
        if summary.num_entries > max_bins - 1:
            between = spread_between(summary)
            lower = cut_positions(summary.weight, int(max_bins) - 1, between)
        rows.append(_thresholds_above(summary, lower))
    absent = "missing" if np.any(sketch.missing > 0) else None
    return pad_thresholds(rows, int(max_bins), absent)


@on_host("call it on concrete arrays", runs_jax=False)
def find_thresholds(summary: QuantileSummary, *, eps: float) -> Float[np.ndarray, " C"]:
    """Thresholds at split candidates that are less than ``eps`` apart.

    One threshold above each candidate of :func:`find_candidates` but the largest,
    midway to the next value in the summary; so every distinct value is a candidate
    where all are few, and the thresholds are those of exact search.

    Args:
      summary: of a feature, or of the rows of one node, weighted with hessians.
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


def max_entries(eps: float, num_rows: int) -> int:
    """The most values and entries of one feature that ``num_rows`` rows can fill.

    An entry takes 28 bytes, a pending value 4.
    """
    most = _capacity(0, eps)  # pending values
    level, summaries = 0, num_rows
    while summaries > 0:
        most += _capacity(level, eps)
        summaries //= _capacity(0, eps) if level == 0 else FAN
        level += 1
    return most


def _num_ranks(level, eps):
    """b_l: summaries that come into the level have one entry more."""
    return int(np.ceil((level + 1) * (level + 2) / (2 * eps)))


def _capacity(level, eps):
    """The most entries of a level; of level 0 as many as of the next."""
    return FAN * (_num_ranks(max(level, 1), eps) + 1)


def _settle(sketch, own=None):
    """Sums up pending rows once they are many; keeps a copy of ``own`` until then."""
    num_pending = sum(len(batch.x) for batch in sketch.pending)
    if num_pending <= _capacity(0, sketch.eps):
        pending = tuple(
            Batch(batch.x.copy(), batch.weight) if batch.x is own else batch
            for batch in sketch.pending
        )
        return sketch._replace(pending=pending)
    levels = (
        _merge_levels(
            sketch.levels[feature],
            (_summarize_pending(sketch.pending, feature),),
            sketch.eps,
        )
        for feature in range(sketch.num_features)
    )
    return sketch._replace(levels=tuple(levels), pending=())


def _summarize_pending(pending, feature):
    """The exact summary of the pending rows' values of one feature."""
    if not pending:
        return _EMPTY
    column = np.concatenate([batch.x[:, feature] for batch in pending])
    if all(batch.weight is None for batch in pending):
        return summarize_column(column, None)
    weights = [
        np.ones(len(batch.x)) if batch.weight is None else batch.weight
        for batch in pending
    ]
    return summarize_column(column, np.concatenate(weights))


def _merge_levels(first: Levels, second: Levels, eps: float) -> Levels:
    """Joins two features' levels; what outgrows a level goes on to the next."""
    merged, carry = [], _EMPTY
    for level in range(max(len(first), len(second)) + 1):
        here = carry
        for levels in (first, second):
            if level < len(levels):
                here = merge_summaries(here, levels[level])
        carry = _EMPTY
        if here.num_entries > _capacity(level, eps):
            here, carry = _EMPTY, prune_summary(here, _num_ranks(level + 1, eps))
        merged.append(here)
    while merged and not merged[-1].num_entries:
        merged.pop()
    return tuple(merged)


def _thresholds_above(summary, lower):
    """Thresholds between given entries and the next."""
    return midpoints(summary.value[lower], summary.value[lower + 1])
