# SPDX-License-Identifier: Apache-2.0
"""Computes weighted quantile summaries of one column, with guaranteed bounds.

A summary holds some of the values, each with bounds on the total weight of smaller
values and of values up to it. The operations merge, prune and query are those of Chen
and Guestrin (2016), "XGBoost", arXiv:1603.02754, appendix A.

Let [ values < y ] be the weight of all values below y. The entry of y has::

    rmin   <=  [ values < y ]    and    [ values <= y ]  <=   rmax

and ``weight`` is a lower bound of their difference, the weight of y itself. The error
of a summary is the maximum of rmax - rmin - weight over all y. Merging adds errors;
pruning to b + 1 entries adds at most total / b.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.codes.thresholds import count_distinct, find_cap
from jboost.entry import checks
from jboost.entry.checks import as_array, fill_mask
from jboost.entry.decorators import on_host
from jboost.entry.messages import show, show_fields
from jboost.numerics.arrays import flush_denormals
from jboost.tables.frames import read_frame, read_values


class QuantileSummary(NamedTuple):
    """Holds some values of a column, including the smallest and the largest.

    Attributes:
      value: distinct values, ascending, without NaN.
      weight: lower bound of the total weight of the rows with this value.
      rmin: lower bound of the total weight of all smaller values.
      rmax: upper bound of the total weight of all values up to this one.

    Example:
      >>> from jboost import sketches
      >>> summary = sketches.make_summary([1.0, 2.0, 2.0])
      >>> summary.value.tolist(), summary.rmin.tolist(), summary.rmax.tolist()
      ([1.0, 2.0], [0.0, 1.0], [1.0, 3.0])
    """

    value: Float[np.ndarray, " n"]
    weight: Float[np.ndarray, " n"]
    rmin: Float[np.ndarray, " n"]
    rmax: Float[np.ndarray, " n"]

    def __repr__(self) -> str:
        return show_fields(self)

    @property
    def num_entries(self) -> int:
        """The number of entries, n."""
        return len(self.value)

    @property
    def total(self) -> float:
        """The total weight of all rows."""
        return float(self.rmax[-1]) if self.num_entries else 0.0

    @property
    def error(self) -> float:
        """The error: the largest rmax - rmin - weight at any value, in units of weight.

        Between two entries, the bounds are rmin + weight of the first and rmax - weight
        of the second. At an entry, they are no wider than in the gap before it.
        """
        known = self.rmin[:-1] + self.weight[:-1] + self.weight[1:]
        return float(np.max(self.rmax[1:] - known, initial=0.0))

    @property
    def is_exact(self) -> bool:
        """Whether the summary has every value of the column with its full weight."""
        return np.array_equal(self.rmin + self.weight, self.rmax) and np.array_equal(
            self.rmin[1:], self.rmax[:-1]
        )


@on_host("call it on concrete arrays", runs_jax=False)
def make_summary(
    values: Shaped[ArrayLike, " N"],
    weight: Shaped[ArrayLike, " N"] | None = None,
) -> QuantileSummary:
    """Makes the exact summary of a column: every distinct value with its weight.

    Args:
      values: numbers, converted to float32. NaN is ignored, infinities are values,
        denormals count as 0. There may be none.
      weight: finite weights >= 0, for example Hessians; 1 if not given. Rows of weight
        0 are ignored.

    Returns:
      A summary with error 0.

    Raises:
      TypeError, ValueError: values or weight are invalid.

    Example:
      >>> from jboost import sketches
      >>> summary = sketches.make_summary([3.0, 1.0, 3.0], [1.0, 2.0, 4.0])
      >>> summary.value.tolist(), summary.weight.tolist(), summary.rmax.tolist()
      ([1.0, 3.0], [2.0, 5.0], [2.0, 7.0])
    """
    column = _as_values(values, "values")
    if column.ndim != 1:
        raise ValueError(f"values must be 1-D, got shape {column.shape}")
    if weight is not None:
        weight = check_weight(weight, len(column), "weight")
    return summarize_column(column, weight)


def summarize_column(
    column: Float[np.ndarray, " N"], weight: Float[np.ndarray, " N"] | None
) -> QuantileSummary:
    """Makes the exact summary of checked values; see :func:`make_summary`."""
    keep = ~np.isnan(column)
    if weight is not None:
        keep &= weight > 0
    values = flush_denormals(column[keep])
    if weight is None:
        return _accumulate(*count_distinct(np.sort(values)))
    order = np.argsort(values, kind="stable")
    return _accumulate(*count_distinct(values[order], weight[keep][order]))


@on_host("call it on concrete arrays", runs_jax=False)
def merge_summaries(first: QuantileSummary, second: QuantileSummary) -> QuantileSummary:
    """Returns the summary of two columns concatenated; errors add up at most.

    It contains all distinct values of both, and its bounds are the sums of theirs
    (appendix A.3). Therefore its error relative to the total weight is at most the
    larger of the two relative errors.

    Example:
      >>> from jboost import sketches
      >>> odd = sketches.make_summary([1.0, 3.0])
      >>> even = sketches.make_summary([2.0, 4.0])
      >>> sketches.merge_summaries(odd, even).value.tolist()
      [1.0, 2.0, 3.0, 4.0]
    """
    if not first.num_entries or not second.num_entries:
        return first if first.num_entries else second
    values = np.union1d(first.value, second.value)
    one, other = _bound(first, values), _bound(second, values)
    weight = one.weight + other.weight
    if first.is_exact and second.is_exact:  # stays so despite rounding
        return _accumulate(values, weight)
    return QuantileSummary(
        values, weight, rmin=one.rmin + other.rmin, rmax=one.rmax + other.rmax
    )


@on_host("call it on concrete arrays", runs_jax=False)
def prune_summary(summary: QuantileSummary, num_ranks: int) -> QuantileSummary:
    """Prunes a summary to at most b + 1 entries, b = ``num_ranks``; bounds are kept.

    As in Chen and Guestrin (2016), appendix A.4, the entries kept are the answers to b
    + 1 equally spaced rank queries. Unlike there, ranks are those of capped weight: no
    entry counts for more than the spacing c of the ranks, so c solves

        sum_i min(weight_i, c) + (weight between the entries) = c * b.

    Therefore an entry heavier than c is always kept, and the weight between two
    adjacent entries grows by at most c <= total / b, and so does the error. If a few
    heavy values have nearly all the weight, c depends only on the others: for any h
    values, c <= (weight of all but these) / (b - h).

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> summary = sketches.prune_summary(sketches.make_summary(np.arange(1000)), 4)
      >>> summary.value.tolist(), summary.error
      ([0.0, 250.0, 500.0, 750.0, 999.0], 249.0)
    """
    checks.check_integer("num_ranks", num_ranks, least=1)
    if summary.num_entries <= num_ranks + 1:
        return summary
    between = spread_between(summary)
    ascending = np.sort(summary.weight)
    # Light weights are summed from the lightest. Subtracting the heavy ones from the
    # total could cancel and make the cap 0 or negative.
    light = np.sum(between) + np.r_[0.0, np.cumsum(ascending)]
    cap = find_cap(ascending[::-1][: num_ranks - 1], light[::-1][:num_ranks], num_ranks)
    edges = np.cumsum(np.minimum(summary.weight, cap) + between)
    picked = np.searchsorted(edges[:-1], cap * np.arange(num_ranks + 1), side="right")
    keep = summary.weight > cap  # queries pick these, too, except for rounding
    keep[picked] = True
    keep[[0, -1]] = True
    return QuantileSummary(*(field[keep] for field in summary))


@on_host("call it on concrete arrays", runs_jax=False)
def query_ranks(
    summary: QuantileSummary, ranks: Shaped[ArrayLike, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    """Returns the values at given ranks, up to half the error of the summary.

    The answer x to the rank d satisfies, where E is the error (appendix A.4)::

        [values < x] - E/2  <=  d  <=  [values <= x] + E/2

    Args:
      summary: a summary with at least one entry.
      ranks: numbers from 0 to ``summary.total``; the median is at
        ``summary.total / 2``.

    Raises:
      TypeError, ValueError: ranks are invalid, or the summary is empty.

    Example:
      >>> from jboost import sketches
      >>> summary = sketches.make_summary([1.0, 2.0, 3.0], [1.0, 1.0, 8.0])
      >>> sketches.query_ranks(summary, [0.0, 1.5, 5.0]).tolist()
      [1.0, 2.0, 3.0]
    """
    if not summary.num_entries:
        raise ValueError("summary must have at least one entry, got an empty summary")
    ranks = np.asarray(ranks)
    if ranks.dtype.kind not in "fiu":
        raise TypeError(f"ranks must be numbers, got dtype {ranks.dtype}")
    bad = ranks[~((ranks >= 0) & (ranks <= summary.total))]
    if bad.size:
        raise ValueError(f"ranks must lie in [0, {summary.total}], got {bad[0]}")
    after = summary.rmin[:-1] + summary.weight[:-1]
    before = summary.rmax[1:] - summary.weight[1:]
    # Between two entries the answer changes at the midpoint of the bounds.
    entry = np.searchsorted((after + before) / 2, ranks, side="right")
    return summary.value[entry]


@on_host("call it on concrete arrays", runs_jax=False)
def bound_ranks(
    summary: QuantileSummary, values: Shaped[ArrayLike, " m"]
) -> QuantileSummary:
    """Returns bounds of the ranks of any values (appendix A.1).

    Returns:
      The values with ``weight <= [values = y]``, ``rmin <= [values < y]`` and
      ``[values <= y] <= rmax``; ``rmax - rmin - weight`` is at most the error.

    Raises:
      TypeError, ValueError: values are not 1-D numbers, or contain NaN.

    Example:
      >>> from jboost import sketches
      >>> summary = sketches.make_summary([1.0, 2.0, 2.0])
      >>> found = sketches.bound_ranks(summary, [1.5, 2.0])
      >>> found.rmin.tolist(), found.rmax.tolist()
      ([1.0, 1.0], [1.0, 3.0])
    """
    column = _as_values(values, "values")
    if column.ndim != 1 or np.isnan(column).any():
        raise ValueError(f"values must be 1-D and without NaN, got {show(values)}")
    return _bound(summary, flush_denormals(column))


@on_host("call it on concrete arrays", runs_jax=False)
def find_candidates(summary: QuantileSummary, *, eps: float) -> QuantileSummary:
    """Proposes split candidates with ranks less than ``eps`` apart.

    Let r(s) = [values < s] / total, as in Chen and Guestrin (2016), eq. 8 and 9. The
    first candidate is the smallest value, the last one is the largest, and

        r(s_{j+1}) - r(s_j) < eps,   or s_j alone has weight eps / 8 or more;

    in the latter case, the weight strictly between the two is still less than eps.
    There are at most 8 / (7 eps) + 2 candidates if the summary is exact, and at most 8
    / (3 eps) + 2 otherwise.

    Args:
      summary: a summary with an error of at most ``eps * total / 2``: that of the rows
        themselves, or of a sketch with at most half of ``eps``.
      eps: greater than 0 and at most 1.

    Returns:
      The entries of the candidates; the candidates are its ``value``.

    Raises:
      ValueError: eps is out of range, or too small for this summary.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> hessian = np.r_[np.full(50, 1.0), np.full(50, 9.0)]
      >>> summary = sketches.make_summary(np.arange(100), hessian)
      >>> sketches.find_candidates(summary, eps=0.25).value.tolist()
      [0.0, 55.0, 66.0, 77.0, 88.0, 99.0]
    """
    check_eps(eps, most=1.0)
    error, total = summary.error, summary.total
    if error > eps / 2 * total:
        raise ValueError(
            "eps must be at least twice the error of the summary relative to its "
            f"weight, {error / total:.3g}, got {eps}"
        )
    if not total:
        return summary
    num_ranks = np.ceil(total / (7 / 8 * eps * total - error))
    return prune_summary(summary, int(min(num_ranks, summary.num_entries)))


def spread_between(summary: QuantileSummary) -> Float[np.ndarray, " n"]:
    """Returns half of the unknown weight in the gaps on both sides of each entry.

    Together with the weights of the entries, it sums to the total. It is exactly 0 for
    an exact summary, because the numbers are added in the same order as for the ranks.
    """
    below = summary.rmin[1:] - (summary.rmin[:-1] + summary.weight[:-1])
    above = summary.rmax[1:] - (summary.rmax[:-1] + summary.weight[1:])
    # Rounding can make these slightly negative.
    return np.maximum(np.r_[0.0, below] + np.r_[above, 0.0], 0.0) / 2


def check_eps(eps: float, *, most: float) -> None:
    """Checks that eps is a number greater than 0 and at most ``most``."""
    checks.check_number("eps", eps, above=0.0, most=most)


def check_weight(
    weight: Shaped[ArrayLike, " N"], num_rows: int, name: str
) -> Float[np.ndarray, " N"]:
    """Returns float64 weights, finite and >= 0; a batch may have only zeros."""
    array = np.asarray(read_values(weight, name))
    if array.shape != (num_rows,):
        raise ValueError(f"{name} must have shape ({num_rows},), got {array.shape}")
    array = array.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ValueError(
            f"{name} must be finite and >= 0, got {array[bad[0]]} in row {bad[0]}"
        )
    return array


def _as_values(values, name):
    """Checks values of any shape and converts them to float32."""
    array = as_array(fill_mask(values), f"{name} must hold numbers")
    if array.size == 0:
        return array.astype(np.float32)
    column = read_frame(array.reshape(-1, 1), name).matrix  # checks 2-D tables only
    return np.asarray(column).reshape(array.shape)


def _accumulate(value, weight):
    """Returns the exact summary of distinct values and their weights."""
    rmax = np.cumsum(weight)
    return QuantileSummary(value, weight, rmin=np.r_[0.0, rmax][:-1], rmax=rmax)


def _bound(summary, values):
    """Returns bounds at values that need not be entries."""
    if not summary.num_entries:
        zeros = np.zeros(len(values))
        return QuantileSummary(values, zeros, zeros, zeros)
    index = np.searchsorted(summary.value, values)
    entry = np.minimum(index, summary.num_entries - 1)
    known = summary.value[entry] == values
    after = np.r_[0.0, summary.rmin + summary.weight]
    before = np.r_[summary.rmax - summary.weight, summary.total]
    return QuantileSummary(
        value=values,
        weight=np.where(known, summary.weight[entry], 0.0),
        rmin=np.where(known, summary.rmin[entry], after[index]),
        rmax=np.where(known, summary.rmax[entry], before[index]),
    )
