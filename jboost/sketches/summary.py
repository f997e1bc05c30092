# SPDX-License-Identifier: Apache-2.0
"""Weighted quantile summaries of one column, with bounds that always hold.

In: the values of a column and their weights. Out: a few of the values, each with
bounds on the weight below it and up to it; on these work merge, prune and query of
Chen and Guestrin (2016), "XGBoost", arXiv:1603.02754, appendix A.

The rank of y lies between the weight of the values below y and that of the values up
to y; their difference is the weight of y itself::

    weight     rmin   <=  [ values < y ]    and    [ values <= y ]  <=   rmax

The error of a summary is the most that rmax - rmin - weight can be at any y. Merging
adds errors, pruning to b + 1 entries adds at most total / b.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.codes.thresholds import count_distinct
from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.entry.representation import show_fields
from jboost.numerics.floats import flush_denormals
from jboost.tables.frames import read_frame, read_values


class QuantileSummary(NamedTuple):
    """Some values of a column, ascending, the least and the largest among them.

    Attributes:
      value: distinct; NaN is never among them.
      weight: of the rows known to have this very value; a lower bound.
      rmin: a lower bound of the weight of all smaller values.
      rmax: an upper bound of the weight of all values up to this one.
    """

    value: Float[np.ndarray, " n"]
    weight: Float[np.ndarray, " n"]
    rmin: Float[np.ndarray, " n"]
    rmax: Float[np.ndarray, " n"]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)

    @property
    def num_entries(self) -> int:
        """n."""
        return len(self.value)

    @property
    def total(self) -> float:
        """The weight of all rows."""
        return float(self.rmax[-1]) if self.num_entries else 0.0

    @property
    def error(self) -> float:
        """The widest bounds anywhere, in units of weight.

        Between two entries they are rmin + weight of the one and rmax - weight of the
        other; at an entry they are no wider than in the gap before it.
        """
        known = self.rmin[:-1] + self.weight[:-1] + self.weight[1:]
        return float(np.max(self.rmax[1:] - known, initial=0.0))

    @property
    def is_exact(self) -> bool:
        """Whether every value of the column is here, with all its weight."""
        return np.array_equal(self.rmin + self.weight, self.rmax) and np.array_equal(
            self.rmin[1:], self.rmax[:-1]
        )


@on_host("call it on concrete arrays", runs_jax=False)
def make_summary(
    values: Shaped[ArrayLike, " N"],
    weight: Shaped[ArrayLike, " N"] | None = None,
) -> QuantileSummary:
    """Sums up a column exactly: every distinct value, with its weight.

    Args:
      values: numbers, taken as float32; NaN is left out, infinities are values,
        denormals count as 0. May be empty.
      weight: finite and >= 0 (hessians, say), 1 if not given; rows of weight 0 are
        left out.

    Returns:
      A summary of error 0.

    Raises:
      TypeError, ValueError: values or weight are not such.

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
    """:func:`make_summary` of what has been checked."""
    keep = ~np.isnan(column)
    if weight is not None:
        keep &= weight > 0
    values = flush(column[keep])
    if weight is None:
        return _accumulate(*count_distinct(np.sort(values)))
    order = np.argsort(values, kind="stable")
    return _accumulate(*count_distinct(values[order], weight[keep][order]))


@on_host("call it on concrete arrays", runs_jax=False)
def merge_summaries(first: QuantileSummary, second: QuantileSummary) -> QuantileSummary:
    """Sums up two columns laid end to end; the errors add up at most.

    All distinct values of both are kept, and their bounds are the sums of both
    (appendix A.3). So the error relative to the total weight is at most
    the larger of the two relative errors.

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
    """Keeps at most ``b + 1`` entries, b being ``num_ranks``; bounds stay as they are.

    As in Chen and Guestrin (2016), appendix A.4, the entries kept are the answers to
    b + 1 equally spaced ranks, but ranks of capped weight: no entry
    counts for more than the spacing c of the ranks, so c solves

        sum_i min(weight_i, c) + (weight between the entries) = c * b.

    An entry heavier than c is then always kept, and the weight that comes to lie
    between two neighbors grows by at most c <= total / b. So the error grows by at
    most c, and where a few heavy values hold nearly all the weight c is as small as
    the rest demands: c <= (weight of all but any h values) / (b - h).

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
    cap = _find_cap(summary.weight, np.sum(between), num_ranks)
    edges = np.cumsum(np.minimum(summary.weight, cap) + between)
    picked = np.searchsorted(edges[:-1], cap * np.arange(num_ranks + 1), side="right")
    keep = summary.weight > cap  # these are picked, too, but for rounding
    keep[picked] = True
    keep[[0, -1]] = True
    return QuantileSummary(*(field[keep] for field in summary))


@on_host("call it on concrete arrays", runs_jax=False)
def query_ranks(
    summary: QuantileSummary, ranks: Shaped[ArrayLike, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    """Values of given ranks, to within half the error of the summary.

    The answer x to the rank d satisfies, with E the error (appendix A.4)::

        [values < x] - E/2  <=  d  <=  [values <= x] + E/2

    Args:
      summary: of a column with at least one value.
      ranks: from 0 to ``summary.total``; the median has ``summary.total / 2``.

    Raises:
      TypeError, ValueError: ranks are not such numbers, or the summary is empty.

    Example:
      >>> from jboost import sketches
      >>> summary = sketches.make_summary([1.0, 2.0, 3.0], [1.0, 1.0, 8.0])
      >>> sketches.query_ranks(summary, [0.0, 1.5, 5.0]).tolist()
      [1.0, 2.0, 3.0]
    """
    if not summary.num_entries:
        raise ValueError("summary must hold at least one value to be queried")
    ranks = np.asarray(ranks)
    if ranks.dtype.kind not in "fiu":
        raise TypeError(f"ranks must be numbers, got dtype {ranks.dtype}")
    bad = ranks[~((ranks >= 0) & (ranks <= summary.total))]
    if bad.size:
        raise ValueError(f"ranks must lie in [0, {summary.total}], got {bad[0]}")
    after = summary.rmin[:-1] + summary.weight[:-1]
    before = summary.rmax[1:] - summary.weight[1:]
    # Between two entries the answer changes in the middle of what is known there.
    place = np.searchsorted((after + before) / 2, ranks, side="right")
    return summary.value[place]


@on_host("call it on concrete arrays", runs_jax=False)
def bound_ranks(
    summary: QuantileSummary, values: Shaped[ArrayLike, " m"]
) -> QuantileSummary:
    """Bounds of the ranks of any values (appendix A.1).

    Returns:
      The values with ``weight <= [values = y]``, ``rmin <= [values < y]`` and
      ``[values <= y] <= rmax``; ``rmax - rmin - weight`` is at most the error.

    Raises:
      TypeError, ValueError: values are not a list of numbers, or are NaN.

    Example:
      >>> from jboost import sketches
      >>> summary = sketches.make_summary([1.0, 2.0, 2.0])
      >>> found = sketches.bound_ranks(summary, [1.5, 2.0])
      >>> found.rmin.tolist(), found.rmax.tolist()
      ([1.0, 1.0], [1.0, 3.0])
    """
    column = _as_values(values, "values")
    if column.ndim != 1 or np.isnan(column).any():
        raise ValueError(f"values must be 1-D and not NaN, got {values!r}")
    return _bound(summary, flush(column))


@on_host("call it on concrete arrays", runs_jax=False)
def find_candidates(summary: QuantileSummary, *, eps: float) -> QuantileSummary:
    """Proposes values to split at: neighbors are less than ``eps`` apart in rank.

    With r(s) = [values < s] / total as in Chen and Guestrin (2016), eq. 8 and 9: the
    first candidate is the least value, the last the largest, and

        r(s_{j+1}) - r(s_j) < eps,   or s_j alone holds eps / 8 or more;

    then what lies strictly between the two is still less than eps. There are at most
    8 / (7 eps) + 2 of them if the summary is exact, 8 / (3 eps) + 2 in the worst case.

    Args:
      summary: of an error of at most ``eps * total / 2``: of the rows themselves, or
        of a sketch made with at most half of ``eps``.
      eps: greater than 0 and at most 1.

    Returns:
      The entries of the candidates; they are its ``value``.

    Raises:
      ValueError: eps is not such a number, or too small for this summary.

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
            f"eps must be at least twice the error of the summary, which is "
            f"{error / total:.3g} of its weight, got {eps}"
        )
    if not total:
        return summary
    num_ranks = np.ceil(total / (7 / 8 * eps * total - error))
    return prune_summary(summary, int(min(num_ranks, summary.num_entries)))


def spread_between(summary: QuantileSummary) -> Float[np.ndarray, " n"]:
    """Half of the weight that may lie in the gaps on each side of an entry.

    With the weights of the entries they sum to the total. Exactly 0 in an exact
    summary: the order of additions is that in which its ranks were summed.
    """
    below = summary.rmin[1:] - (summary.rmin[:-1] + summary.weight[:-1])
    above = summary.rmax[1:] - (summary.rmax[:-1] + summary.weight[1:])
    # Negative by rounding only.
    return np.maximum(np.r_[0.0, below] + np.r_[above, 0.0], 0.0) / 2


def flush(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Counts denormal values as 0, as binning does."""
    return flush_denormals(values)


def check_eps(eps: float, *, most: float) -> None:
    """A number greater than 0."""
    checks.check_number("eps", eps, above=0.0, most=most)


def check_weight(
    weight: Shaped[ArrayLike, " N"], num_rows: int, name: str
) -> Float[np.ndarray, " N"]:
    """Float64 weights, finite and >= 0; all may be zero, as rows come in batches."""
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
    """Float32, of any shape; only matrices are checked elsewhere."""
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.float32)
    column = read_frame(array.reshape(-1, 1), name).matrix
    return np.asarray(column).reshape(array.shape)


def _accumulate(value, weight):
    """The exact summary of distinct values and their weights."""
    rmax = np.cumsum(weight)
    return QuantileSummary(value, weight, rmin=np.r_[0.0, rmax][:-1], rmax=rmax)


def _bound(summary, values):
    """Bounds at values that need not be entries."""
    if not summary.num_entries:
        zeros = np.zeros(len(values))
        return QuantileSummary(values, zeros, zeros, zeros)
    place = np.searchsorted(summary.value, values)
    entry = np.minimum(place, summary.num_entries - 1)
    known = summary.value[entry] == values
    after = np.r_[0.0, summary.rmin + summary.weight]
    before = np.r_[summary.rmax - summary.weight, summary.total]
    return QuantileSummary(
        value=values,
        weight=np.where(known, summary.weight[entry], 0.0),
        rmin=np.where(known, summary.rmin[entry], after[place]),
        rmax=np.where(known, summary.rmax[entry], before[place]),
    )


def _find_cap(weight, between, num_ranks):
    """Solves sum_i min(weight_i, cap) + between = cap * num_ranks.

    The light weights are added up from the lightest, never taken from the total,
    so that the cap stays positive however heavy the others are.
    """
    ascending = np.sort(weight)
    light = between + np.r_[0.0, np.cumsum(ascending)]
    num_heavy = np.arange(num_ranks)
    num_light = len(weight) - num_heavy  # more than num_ranks of them, less num_heavy
    caps = light[num_light] / (num_ranks - num_heavy)
    # The first count of heavy values whose cap no other value exceeds.
    return caps[np.argmax(ascending[num_light - 1] <= caps)]
