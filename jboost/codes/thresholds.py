# SPDX-License-Identifier: Apache-2.0
"""Cuts a column of values into bins: the definition, in float64 on the host.

A cut is a threshold between two neighboring distinct values; see
:func:`jboost.fit_bins` for the rule.
"""

import numpy as np
from jaxtyping import Float, Int

from jboost.entry.context import current_implementation
from jboost.entry.messages import show
from jboost.kernels import binning_cpu, library
from jboost.kernels.calls import host
from jboost.numerics.arrays import flush_denormals
from jboost.tables.sparse import Absent, SparseMatrix

_FEW_VALUES = 50_000  # up to here NumPy is faster than compiling a call of a kernel


def find_cuts(
    column: Float[np.ndarray, " N"],
    weight: Float[np.ndarray, " N"] | None,
    max_bins: int,
    zeros: float = 0.0,
) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]]:
    """Finds neighboring values with a threshold between them: the definition.

    Sums run value by value, each value's weight row by row, so that a kernel can
    round as they do. ``zeros`` is the weight of zeros that are not in the column.
    """
    keep = ~np.isnan(column)
    if weight is not None:
        keep &= weight > 0
    values = column[keep]
    values = flush_denormals(values)
    if weight is None:
        distinct, mass = count_distinct(np.sort(values))
    else:
        order = np.argsort(values, kind="stable")
        distinct, mass = count_distinct(values[order], weight[keep][order])
    if zeros:
        index = np.searchsorted(distinct, 0)
        if index == len(distinct) or distinct[index] != 0:
            distinct, mass = np.insert(distinct, index, 0), np.insert(mass, index, 0)
        mass[index] += zeros
    if len(distinct) < 2:
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    lower = np.arange(len(distinct) - 1)
    if len(distinct) > max_bins - 1:
        lower = cut_positions(mass, max_bins - 1)
    return distinct[lower], distinct[lower + 1]


def count_distinct(
    ordered: Float[np.ndarray, " N"], weight: Float[np.ndarray, " N"] | None = None
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Returns the distinct values of a sorted column and the weight of each."""
    if len(ordered) == 0:
        return ordered, np.zeros(0)
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ends = np.r_[first[1:], len(ordered)]
    if weight is None:
        return ordered[first], (ends - first).astype(np.float64)
    group = np.repeat(np.arange(len(first)), ends - first)
    return ordered[first], np.bincount(group, weight)


def cut_positions(
    mass: Float[np.ndarray, " n"],
    num_value_bins: int,
    spread: Float[np.ndarray, " n"] | float = 0.0,
) -> Int[np.ndarray, " C"]:
    """Positions p such that a threshold goes between distinct values p and p + 1.

    Solves sum_i min(mass_i, cap) = cap * num_value_bins for the cap: each value
    heavier than the cap fills one bin, and the lighter ones share the rest. A value
    belongs to the bin that holds the middle of its capped mass. A quantile summary
    adds the ``spread`` about a value, of unknown values and never capped.
    """
    with np.errstate(all="ignore"):  # weights may overflow, or differ by too much
        heaviest = np.sort(mass)[::-1][: num_value_bins - 1]
        rest = np.cumsum(mass)[-1] - np.r_[0.0, np.cumsum(heaviest)] + np.sum(spread)
        cap = find_cap(heaviest, rest, num_value_bins)
        capped = np.minimum(mass, cap) + spread
        middle = np.cumsum(capped) - capped / 2
        # fmax, fmin: NaN counts as 0.
        share = np.fmin(np.fmax(middle / cap, 0), num_value_bins - 1)
    code = share.astype(np.int64)
    return np.flatnonzero(code[1:] != code[:-1])


def find_cap(
    heaviest: Float[np.ndarray, " H"],
    rest: Float[np.ndarray, " H+1"],
    num_shares: int,
) -> float:
    """Solves sum_i min(weight_i, cap) = cap * num_shares for the cap.

    Args:
      heaviest: the H < num_shares largest weights, descending.
      rest: the weight of all values except the h heaviest, for h = 0, ..., H.
    """
    caps = rest / (num_shares - np.arange(len(rest)))
    # The smallest number of heavy values such that no other value exceeds the cap.
    return caps[np.argmax(np.r_[heaviest <= caps[:-1], True])]


def midpoints(
    low: Float[np.ndarray, " C"], high: Float[np.ndarray, " C"]
) -> Float[np.ndarray, " C"]:
    """Thresholds between neighbors low < high, by the rule of :func:`fit_bins`."""
    with np.errstate(over="ignore", invalid="ignore"):
        middle = low / 2 + high / 2
    middle = flush_denormals(middle)
    return np.where((low <= middle) & (middle < high), middle, low)


def find_dense_thresholds(
    matrix: Float[np.ndarray, "N F"],
    weight: Float[np.ndarray, " N"] | None,
    max_bins: int,
) -> list[Float[np.ndarray, " _"]]:
    """Finds the thresholds of each feature, without the final +inf."""
    small = current_implementation() is None and matrix.size <= _FEW_VALUES
    if not library.may_run() or host() is None or small:
        cuts = [find_cuts(column, weight, max_bins) for column in matrix.T]
        return [midpoints(low, high) for low, high in cuts]
    low, high, sizes = binning_cpu.find_cuts(matrix, weight, max_bins)
    return [midpoints(low[f, :n], high[f, :n]) for f, n in enumerate(sizes)]


def find_sparse_thresholds(
    matrix: SparseMatrix,
    weight: Float[np.ndarray, " N"] | None,
    max_bins: int,
    absent: Absent,
) -> list[Float[np.ndarray, " _"]]:
    """Thresholds of each feature, from its stored entries alone.

    Where absent entries are zeros, their weight is that of all rows minus that of the
    stored ones. Sums of rows, or of weights of similar size, are exact in float64, and
    the thresholds are then those of the dense matrix.
    """
    ones = np.ones(matrix.shape[0])
    kept = ones if weight is None else np.where(weight > 0, weight, 0)
    total, number = np.sum(kept), np.count_nonzero(kept)
    least = np.min(kept[kept > 0], initial=np.inf)

    def weigh_absent(rows):
        own = kept[rows]
        if number == np.count_nonzero(own):
            return 0.0
        # At least one row's, whatever rounding makes of the difference.
        return max(least, total - np.sum(own))

    sizes = np.diff(matrix.starts)
    small = sizes < max_bins - 1  # even with a zero, each value has a bin
    thresholds = _separate_values(matrix, small, kept > 0, absent == "zero")
    for feature in np.flatnonzero(~small & (sizes > 0)):
        part = slice(*matrix.starts[feature : feature + 2])
        rows = matrix.places[part]
        zeros = weigh_absent(rows) if absent == "zero" else 0.0
        own = None if weight is None else weight[rows]
        cuts = find_cuts(matrix.values[part], own, max_bins, zeros)
        thresholds[feature] = midpoints(*cuts)
    return thresholds


def _separate_values(matrix, features, rows, with_zeros):
    """Thresholds between all distinct values of some features; none of the others.

    Of all at once: there may be a million columns of a few entries each.
    """
    num_features = matrix.shape[1]
    feature = np.repeat(np.arange(num_features), np.diff(matrix.starts))
    kept = features[feature] & rows[matrix.places]
    feature, values = feature[kept], matrix.values[kept]
    stored = np.bincount(feature, minlength=num_features)
    values = flush_denormals(values)
    feature, values = feature[~np.isnan(values)], values[~np.isnan(values)]
    if with_zeros:
        zero = np.flatnonzero(features & (stored > 0) & (stored < np.sum(rows)))
        feature = np.concatenate([feature, zero])
        values = np.concatenate([values, np.zeros(len(zero), np.float32)])
    order = np.lexsort((values, feature))
    feature, values = feature[order], values[order]
    cut = (feature[1:] == feature[:-1]) & (values[1:] > values[:-1])
    middles = midpoints(values[:-1][cut], values[1:][cut])
    ends = np.cumsum(np.bincount(feature[1:][cut], minlength=num_features))
    return np.split(middles, ends[:-1])


def check_max_bins(max_bins: int) -> None:
    """Checks for an integer such that codes fit 16 bits."""
    if not isinstance(max_bins, int | np.integer) or not 2 <= max_bins <= 65536:
        raise ValueError(
            f"max_bins must be an integer in [2, 65536], got {show(max_bins)}"
        )
