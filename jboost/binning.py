# SPDX-License-Identifier: Apache-2.0
"""Turns feature values into small integer codes.

In: a matrix of numbers, NaN meaning "missing". Out: thresholds per feature and a
matrix of codes, on which every later stage works. Code 0 is "missing"; code c >= 1
says that the value lies above threshold c - 2 and at or below threshold c - 1.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped, UInt8, UInt16

MISSING = 0  # the code of a missing value
_TINY = float(np.finfo(np.float32).tiny)  # below it, float32 is denormal
_COLLISION_ROWS = 100_000  # rows looked at for float64 values that collide
_COLLISION_SHARE = 0.01  # of a column's distinct values: more than this is reported


class Bins(NamedTuple):
    """Thresholds per feature.

    Attributes:
      thresholds: ascending along a row and padded with +inf; the last column is
        always +inf, so that every value has a code.
    """

    thresholds: Float[Array, "F B-1"] | Float[np.ndarray, "F B-1"]

    @property
    def num_features(self) -> int:
        """F."""
        return self.thresholds.shape[0]

    @property
    def num_bins(self) -> int:
        """Number of codes, the missing one included."""
        return self.thresholds.shape[1] + 1


def fit_bins(
    x: Shaped[ArrayLike, "N F"],
    *,
    max_bins: int = 256,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
) -> Bins:
    """Chooses thresholds: midpoints of distinct values, or weighted quantiles.

    A feature with at most ``max_bins - 1`` distinct values gets one bin per value
    and thresholds midway between neighbours, so that split search is exact. Any
    other feature is cut at quantiles of capped weight: no distinct value counts
    for more than one bin, and the bins share what remains equally, so that one
    heavy value (zero, often) does not use up the bins of the others.

    A threshold between neighbouring values lo < hi is lo/2 + hi/2 if that lies in
    [lo, hi), else lo; ``x <= threshold`` goes left.

    Args:
      x: numbers; NaN is missing, infinities are values.
      max_bins: the most codes a feature may use, the missing one included.
      sample_weight: weights of the rows; rows of weight 0 are not looked at.

    Returns:
      Bins of as many codes as the data needs, rounded up to a power of two (so
      that similar data shares compiled programs), at most ``max_bins``.

    Raises:
      TypeError, ValueError: x is not a numeric matrix, or max_bins is not in
        [2, 65536].

    Example:
      >>> import numpy as np, jboost as jb
      >>> bins = jb.fit_bins(np.array([[1.0], [2.0], [4.0]]))
      >>> np.asarray(bins.thresholds)
      array([[1.5, 3. , inf]], dtype=float32)
    """
    if not isinstance(max_bins, int | np.integer) or not 2 <= max_bins <= 65536:
        raise ValueError(f"max_bins must be an integer in [2, 65536], got {max_bins!r}")
    matrix = np.asarray(as_matrix(x, "x"))
    weight = None if sample_weight is None else np.asarray(sample_weight, np.float64)
    if weight is not None and weight.shape != (matrix.shape[0],):
        raise ValueError(
            f"sample_weight must have shape ({matrix.shape[0]},), got {weight.shape}"
        )
    rows = [_feature_thresholds(column, weight, max_bins) for column in matrix.T]
    needed = max(len(row) for row in rows) + 2
    num_bins = min(int(max_bins), max(4, 1 << (needed - 1).bit_length()))
    thresholds = np.full((len(rows), num_bins - 1), np.inf, np.float32)
    for feature, row in enumerate(rows):
        thresholds[feature, : len(row)] = row
    return Bins(thresholds=thresholds)


def apply_bins(
    bins: Bins, x: Shaped[ArrayLike, "N F"]
) -> UInt8[Array, "N F"] | UInt16[Array, "N F"]:
    """Codes of values: 0 if missing, else 1 + #{thresholds < x}.

    Traceable: may be called under ``jax.jit`` and ``jax.vmap``.

    Args:
      bins: from :func:`fit_bins`.
      x: numbers, with as many columns as ``bins``.

    Returns:
      uint8 codes for up to 256 bins, else uint16.

    Raises:
      TypeError, ValueError: x is not a numeric matrix with that many columns.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.array([[1.0], [2.0], [np.nan]])
      >>> jb.apply_bins(jb.fit_bins(x), x).tolist()
      [[1], [2], [0]]
    """
    matrix = as_matrix(x, "x")
    if matrix.shape[1] != bins.num_features:
        raise ValueError(
            f"x must have {bins.num_features} columns, as the bins have, "
            f"got {matrix.shape[1]}"
        )
    return _apply_bins(bins.thresholds, matrix)


def as_matrix(x: ArrayLike, name: str) -> np.ndarray | Array:
    """Checks that ``x`` is a numeric matrix and makes it float32, where it lives."""
    if isinstance(x, jax.Array):  # a tracer is one, too
        matrix, kind = x, np.dtype(x.dtype).kind
    else:
        try:
            matrix = np.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a matrix of numbers: {error}") from None
        kind = matrix.dtype.kind
    if kind not in "fiub" and str(matrix.dtype) != "bfloat16":
        raise TypeError(
            f"{name} must hold numbers (NaN for missing), got dtype {matrix.dtype}; "
            "encode strings and objects as numbers first"
        )
    if matrix.ndim != 2:
        raise ValueError(f"{name} must be 2-D [rows, features], got {matrix.shape=}")
    if 0 in matrix.shape:
        raise ValueError(
            f"{name} must have at least one row and one column, got {matrix.shape=}"
        )
    with np.errstate(over="ignore"):  # beyond float32 is +-inf, which is a value
        return matrix.astype(np.float32)


def warn_of_collisions(x: ArrayLike) -> None:
    """Warns once if distinct 64-bit values of a column become equal in float32."""
    matrix = np.asarray(x)
    if matrix.dtype.kind not in "fiu" or matrix.dtype.itemsize < 4:
        return
    if matrix.dtype == np.float32:
        return
    for feature in range(matrix.shape[1]):
        column = matrix[:_COLLISION_ROWS, feature]
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = column.astype(np.float32)
        if np.array_equal(rounded.astype(matrix.dtype), column):
            continue
        before, after = len(np.unique(column)), len(np.unique(rounded))
        if before - after > _COLLISION_SHARE * before:
            warnings.warn(
                f"column {feature} of x has {before} distinct {matrix.dtype} values "
                f"(in its first {len(column)} rows) but {after} in float32, in which "
                "jboost computes; subtract an offset or rescale the column to keep "
                "them apart",
                stacklevel=3,
            )
            return


def flush_denormals(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Counts denormal float32 values as 0: hardware differs in whether it does."""
    return jnp.where(jnp.abs(x) < _TINY, 0.0, x)


@jax.jit
def _apply_bins(thresholds, matrix):
    num_bins = thresholds.shape[1] + 1
    values = flush_denormals(matrix)

    def code_column(row, column):
        code = 1 + jnp.searchsorted(row, column, side="left")
        code = jnp.where(jnp.isnan(column), MISSING, code)
        return code.astype(jnp.uint8 if num_bins <= 256 else jnp.uint16)

    return jax.lax.map(lambda pair: code_column(*pair), (thresholds, values.T)).T


def _feature_thresholds(column, weight, max_bins):
    """Thresholds of one feature, without the final +inf."""
    keep = ~np.isnan(column)
    if weight is not None:
        keep &= weight > 0
    values = column[keep]
    values = np.where(np.abs(values) < _TINY, np.float32(0), values)
    if weight is None:
        distinct, mass = _count_distinct(np.sort(values))
    else:
        order = np.argsort(values, kind="stable")
        distinct, mass = _count_distinct(values[order], weight[keep][order])
    if len(distinct) < 2:
        return np.zeros(0, np.float32)
    lower = np.arange(len(distinct) - 1)
    if len(distinct) > max_bins - 1:
        lower = _cut_positions(mass, max_bins - 1)
    return _midpoints(distinct[lower], distinct[lower + 1])


def _count_distinct(ordered, weight=None):
    """Distinct values of a sorted column and the weight of each."""
    if len(ordered) == 0:
        return ordered, np.zeros(0)
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ends = np.r_[first[1:], len(ordered)]
    if weight is None:
        return ordered[first], (ends - first).astype(np.float64)
    return ordered[first], np.add.reduceat(weight, first)


def _cut_positions(mass, num_value_bins):
    """Positions p such that a threshold goes between distinct values p and p + 1.

    Solves sum_i min(mass_i, cap) = cap * num_value_bins for the cap: each value
    heavier than the cap fills one bin, and the lighter ones share the rest. A value
    belongs to the bin in which the middle of its capped mass lies.
    """
    heaviest = np.sort(mass)[::-1][: num_value_bins - 1]
    rest = mass.sum() - np.r_[0.0, np.cumsum(heaviest)]
    caps = rest / (num_value_bins - np.arange(len(rest)))
    # The first count of heavy values whose cap no remaining value exceeds.
    cap = caps[np.argmax(np.r_[heaviest <= caps[:-1], True])]
    capped = np.minimum(mass, cap)
    middle = np.cumsum(capped) - capped / 2
    code = np.minimum((middle / cap).astype(np.int64), num_value_bins - 1)
    return np.flatnonzero(code[1:] != code[:-1])


def _midpoints(low, high):
    with np.errstate(over="ignore", invalid="ignore"):
        middle = low / 2 + high / 2
    middle = np.where(np.abs(middle) < _TINY, np.float32(0), middle)
    return np.where((low <= middle) & (middle < high), middle, low)
