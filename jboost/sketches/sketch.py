# SPDX-License-Identifier: Apache-2.0
"""Quantile sketches of streamed rows, with a guaranteed error bound.

Memory depends on the error bound and only logarithmically on the number of rows. The
summary depends on how rows were cut into batches and merged; that of
:mod:`jboost.sketches.ordered` does not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.sketches.summary import (
    QuantileSummary,
    check_eps,
    check_weight,
    make_summary,
    merge_summaries,
    prune_summary,
    summarize_column,
)
from jboost.tables.frames import read_frame

FAN = 8  # a level merges at least this many summaries before it is pruned


EMPTY = make_summary(np.zeros(0))

Levels = tuple[QuantileSummary, ...]


class PendingRows(NamedTuple):
    """Holds rows that are not summarized yet; without weights each row counts 1."""

    x: Float[np.ndarray, "n F"]
    weight: Float[np.ndarray, " n"] | None


class QuantileSketch(NamedTuple):
    """Summarizes the rows seen so far, with an error of at most ``eps``.

    Level 0 is exact. When a level exceeds its capacity, its summary is pruned to
    b_l + 1 entries and merged into the next level l, and the level becomes empty::

        rows -> level 0 (exact) -> level 1 -> level 2 -> ...      b_l = T_{l+1} / eps

    where T_{l+1} = (l + 1)(l + 2) / 2 = 3, 6, 10, 15, ... are the triangular numbers.

    Error: a row enters level l at most once, by a pruning that adds at most 1 / b_l of
    the pruned weight. Let W be the weight of all rows. All prunings together add at
    most W * sum_l 1 / b_l = W * eps * sum_l 2 / ((l + 1)(l + 2)) = eps * W, for any
    order, number and weights of the rows. Merging two sketches merges each level, so
    the bound also holds for the result.

    A few heavy values do not increase the error. For any h <= 1 / (8 eps) values, it is
    at most 1.2 eps * (weight of all other values): a pruning adds c <= W' / (b_l - h),
    where W' is the weight not known to belong to the h values. W' is at most the weight
    of the others plus h times the error so far. With the sum above, the error E obeys
    E <= eps (W_others + h E) / (1 - 1/24).

    Memory: a level l >= 1 has at most 8 (b_l + 1) entries and merges more than 8
    summaries before it is pruned, so N rows fill at most 1 + log_8(N eps / 24) levels.
    That is O(log(N eps)^3 / eps) entries per feature.
    A feature with at most 24 / eps distinct values never leaves level 0.

    All bounds hold up to rounding of float64 sums, and exactly if weights are integers
    with a sum below 2^53.

    Attributes:
      eps: the error bound, relative to the weight of a feature's non-missing values.
      missing: the weight of the missing values of each feature.
      levels: the levels of each feature.
      pending: batches that are not summarized yet, because sorting many rows at once is
        cheaper.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> sketch = sketches.update_sketch(sketches.make_sketch(2), np.zeros((5, 2)))
      >>> sketch.num_features, sketch.missing.tolist()
      (2, [0.0, 0.0])
    """

    eps: float
    missing: Float[np.ndarray, " F"]
    levels: tuple[Levels, ...]
    pending: tuple[PendingRows, ...]

    def __repr__(self) -> str:
        sizes = f"num_features={self.num_features}, num_entries={self.num_entries}"
        return f"QuantileSketch({sizes}, eps={self.eps:.3g})"

    @property
    def num_features(self) -> int:
        """The number of features, F."""
        return len(self.missing)

    @property
    def num_entries(self) -> int:
        """The number of entries in all features and levels, plus pending values."""
        held = sum(entry.num_entries for levels in self.levels for entry in levels)
        return held + sum(batch.x.size for batch in self.pending)


def make_sketch(num_features: int, *, eps: float = 1 / 2048) -> QuantileSketch:
    """Makes an empty sketch.

    Args:
      num_features: F.
      eps: the error bound, relative to the weight of all non-missing values; greater
        than 0 and at most 1/2. The default is 1/8 of the share of one of 256 bins.

    Returns:
      An empty sketch, for :func:`update_sketch`.

    Raises:
      TypeError, ValueError: an argument is invalid.

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
    """Adds rows to a sketch; the given sketch does not change.

    Args:
      sketch: the sketch of the previous rows.
      x: numbers; NaN is missing, infinities are values, as in :func:`jb.fit_bins`.
      sample_weight: weights of the rows (or their Hessians), finite and >= 0; rows of
        weight 0 are ignored.

    Returns:
      The sketch of all rows.

    Raises:
      TypeError, ValueError: x is not a numeric matrix with the sketch's number of
        columns, or the weights are invalid.

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
            f"x must have {sketch.num_features} columns, like the sketch, got "
            f"{matrix.shape[1]}"
        )
    weight = None
    if sample_weight is not None:
        weight = check_weight(sample_weight, len(matrix), "sample_weight")
    absent = np.isnan(matrix)
    missing = np.sum(absent, axis=0) if weight is None else weight @ absent
    grown = sketch._replace(
        missing=sketch.missing + missing,
        pending=(*sketch.pending, PendingRows(matrix, weight)),
    )
    return _settle(grown, own=matrix)


def merge_sketches(first: QuantileSketch, second: QuantileSketch) -> QuantileSketch:
    """Merges two sketches; the result has the same error bound.

    Sketches of parts of the data can be merged in any order and grouping.

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
    """Returns the quantile summary of one feature, with all levels merged.

    Returns:
      A summary with an error of at most ``sketch.eps`` times its total weight. It is
      exact if only level 0 is in use. See :func:`jb.sketches.query_ranks`,
      :func:`jb.sketches.bound_ranks` and :func:`find_candidates`.

    Raises:
      ValueError: the feature does not exist.

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
    summary = summarize_pending(sketch.pending, feature)
    for level in sketch.levels[feature]:
        summary = merge_summaries(summary, level)
    return summary


def max_entries(eps: float, num_rows: int) -> int:
    """Returns the maximum number of entries and pending values of one feature.

    An entry takes 28 bytes, a pending value 4 bytes.
    """
    most = capacity(0, eps)  # pending values
    level, summaries = 0, num_rows
    while summaries > 0:
        most += capacity(level, eps)
        summaries //= capacity(0, eps) if level == 0 else FAN
        level += 1
    return most


def num_ranks(level: int, eps: float) -> int:
    """Returns b_l; summaries that enter level l have b_l + 1 entries."""
    return int(np.ceil((level + 1) * (level + 2) / (2 * eps)))


def capacity(level: int, eps: float) -> int:
    """Returns the maximum number of entries of a level, equal for levels 0 and 1."""
    return FAN * (num_ranks(max(level, 1), eps) + 1)


def summarize_pending(pending: Sequence[PendingRows], feature: int) -> QuantileSummary:
    """Returns the exact summary of one feature of the pending rows."""
    if not pending:
        return EMPTY
    column = np.concatenate([batch.x[:, feature] for batch in pending])
    if all(batch.weight is None for batch in pending):
        return summarize_column(column, None)
    return summarize_column(column, join_weights(pending))


def join_weights(pending: Sequence[PendingRows]) -> Float[np.ndarray, " n"]:
    """Returns the weights of pending rows."""
    weights = [
        np.ones(len(batch.x)) if batch.weight is None else batch.weight
        for batch in pending
    ]
    return np.concatenate([np.zeros(0), *weights])


def _settle(sketch, own=None):
    """Summarizes pending rows once there are many; until then it copies ``own``.

    ``own`` is the matrix of the caller, who may overwrite it.
    """
    num_pending = sum(len(batch.x) for batch in sketch.pending)
    if num_pending <= capacity(0, sketch.eps):
        pending = tuple(
            PendingRows(batch.x.copy(), batch.weight) if batch.x is own else batch
            for batch in sketch.pending
        )
        return sketch._replace(pending=pending)
    levels = (
        _merge_levels(
            sketch.levels[feature],
            (summarize_pending(sketch.pending, feature),),
            sketch.eps,
        )
        for feature in range(sketch.num_features)
    )
    return sketch._replace(levels=tuple(levels), pending=())


def _merge_levels(first: Levels, second: Levels, eps: float) -> Levels:
    """Merges the levels of two sketches of a feature and prunes full levels."""
    merged, carry = [], EMPTY
    for level in range(max(len(first), len(second)) + 1):
        here = carry
        for levels in (first, second):
            if level < len(levels):
                here = merge_summaries(here, levels[level])
        carry = EMPTY
        if here.num_entries > capacity(level, eps):
            here, carry = EMPTY, prune_summary(here, num_ranks(level + 1, eps))
        merged.append(here)
    while merged and not merged[-1].num_entries:
        merged.pop()
    return tuple(merged)
