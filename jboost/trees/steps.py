# SPDX-License-Identifier: Apache-2.0
"""Histograms and splits as public functions, for loops of one's own.

In: codes from ``apply_bins`` (or prepared by ``prepare_codes``), gradients and
curvatures. Out: histograms, and the best split of each node.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32, Key, Shaped

from jboost.codes.codes import Codes
from jboost.entry import checks
from jboost.entry.decorators import traceable
from jboost.entry.programs import compiled
from jboost.entry.representation import show_fields
from jboost.kernels.library import takes_implementation
from jboost.numerics.random_bits import seed_from_key
from jboost.trees.histogram import sum_histogram
from jboost.trees.levels import least_samples
from jboost.trees.rounding import make_rows
from jboost.trees.search_units import (
    find_scale,
    restore_bounds,
    to_search_units,
)
from jboost.trees.splitting import Split, search_split
from jboost.trees.step_arguments import (
    make_limits,
    read_codes,
    read_curvature,
    read_rows,
)

_MOST_DEPTH = 20  # a heap of 2^20 leaves


class Histogram(NamedTuple):
    """Sums of gradient, curvature and count per node, feature and code.

    Attributes:
      sums: integers, so that they do not depend on the order of the rows.
      unit: what one integer of gradient and of curvature stands for.
      num_rows: how many rows were summed.
    """

    sums: Int32[Array, "M F B 3"]
    unit: Float[Array, "2"]
    num_rows: Int32[Array, ""]

    def __repr__(self) -> str:
        """Returns the shapes and dtypes of the fields; the arrays would fill pages."""
        return show_fields(self)

    @property
    def gradients(self) -> Float[Array, "M F B"]:
        """Returns the sums of gradients."""
        return self.sums[..., 0].astype(jnp.float32) * self.unit[0]

    @property
    def curvatures(self) -> Float[Array, "M F B"]:
        """Returns the sums of curvatures."""
        return self.sums[..., 1].astype(jnp.float32) * self.unit[1]

    @property
    def counts(self) -> Int32[Array, "M F B"]:
        """Returns the numbers of rows."""
        return self.sums[..., 2]


@traceable
@takes_implementation
def build_histogram(
    binned: Shaped[ArrayLike, "N F"] | Codes,
    gradient: Shaped[ArrayLike, " N"],
    curvature: Shaped[ArrayLike, " N"] | float = 1.0,
    *,
    node: Int[ArrayLike, " N"] | None = None,
    num_nodes: int = 1,
    max_bins: int = 256,
    key: Key[Array, ""] | None = None,
    implementation: str | None = None,
) -> Histogram:
    """Sums gradients, curvatures and counts over the rows of each node and code.

    sums[m, f, b] is the sum over rows i with node[i] = m and binned[i, f] = b. Values
    are rounded to multiples of a unit, chosen so that sums of integers are exact.

    Args:
      binned: codes from :func:`jboost.apply_bins`, of a dense or a sparse matrix, or
        from :func:`jboost.parts.prepare_codes`.
      gradient, curvature: of each row, times its weight; curvature may be one number.
      node: of each row; rows outside [0, num_nodes) are left out. None: all in node 0.
      num_nodes: M.
      max_bins: B, as in :func:`jboost.fit_bins`.
      key: seeds stochastic rounding, which tables of more than 32,768 rows need.
      implementation: "xla", "cpu" or "cuda" (the compiled kernels), or None for the
        best where the program runs.

    Raises:
      TypeError, ValueError: arguments that do not fit together.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x = jnp.array([[1.0], [2.0], [1.0]])
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> histogram = jb.parts.build_histogram(binned, jnp.array([5.0, 7.0, 9.0]))
      >>> histogram.gradients[0, 0, :3].tolist(), histogram.counts[0, 0, :3].tolist()
      ([0.0, 14.0, 7.0], [0, 2, 1])
    """
    num_nodes = checks.check_integer("num_nodes", num_nodes, least=1)
    codes = read_codes(binned, max_bins)
    gradient = read_rows("gradient", gradient, codes)
    curvature, _ = read_curvature(curvature, codes)
    if node is None:
        node = np.zeros(codes.num_rows, np.int32)
    elif np.shape(node) != (codes.num_rows,):
        raise ValueError(f"{codes.shape=} and node.shape={np.shape(node)} differ in N")
    node = jnp.asarray(node, jnp.int32)
    run = compiled(_build_histogram, num_nodes, max_bins)
    return run(codes, (gradient, curvature, node), seed_from_key(key))


def _build_histogram(num_nodes, num_bins, codes, given, seed):
    gradient, curvature, node = given
    inside = ((node >= 0) & (node < num_nodes)).astype(jnp.uint8)
    rows = (gradient, curvature, inside)
    rounded = make_rows(codes, *rows, seed, uniform=False)
    sums = sum_histogram(
        codes, rounded.channels, node, num_nodes=num_nodes, num_bins=num_bins
    )
    return Histogram(sums, rounded.unit, rounded.num_in_bag.astype(jnp.int32))


@traceable
def find_split(
    histogram: Histogram,
    *,
    features: Bool[ArrayLike, " F"] | None = None,
    l1: Float[ArrayLike, ""] | float = 0.0,
    l2: Float[ArrayLike, ""] | float = 1.0,
    max_delta_step: Float[ArrayLike, ""] | float = float("inf"),
    min_gain: Float[ArrayLike, ""] | float = 0.0,
    min_child_weight: Float[ArrayLike, ""] | float = 1.0,
    min_child_samples: int = 1,
    monotone: Any = None,
) -> Split:
    """Finds the best split of each node: feature, threshold, direction of missing.

    gain = [G_L^2/(H_L+l2) + G_R^2/(H_R+l2) - G^2/(H+l2)] / 2 - min_gain (Chen and
    Guestrin 2016, eq. 7). Equal gains go to the lowest feature, then the lowest
    threshold, then to missing rows right.

    Args:
      histogram: of M nodes, from :func:`jboost.parts.build_histogram`.
      features: those that may be used; None for all.
      l1, l2, max_delta_step, min_gain, min_child_samples, monotone: as for
        :func:`jboost.fit`.
      min_child_weight: least sum of curvature of a child.

    Returns:
      The splits, with an axis M in front of each field. ``threshold`` is a code: rows
      with 1 <= code <= threshold go left.

    Raises:
      TypeError, ValueError: arguments that do not fit together.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x = jnp.array([[1.0], [1.0], [2.0], [2.0]])
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> gradient = jnp.array([-3.0, -3.0, 3.0, 3.0])
      >>> histogram = jb.parts.build_histogram(binned, gradient)
      >>> split = jb.parts.find_split(histogram, l2=0.0)
      >>> split.threshold.tolist(), split.gain.tolist()
      ([1], [18.0])
    """
    if not isinstance(histogram, Histogram):
        raise TypeError(
            "histogram must be from jboost.parts.build_histogram, got "
            f"{type(histogram).__name__}"
        )
    num_features = histogram.sums.shape[1]
    limits = make_limits(
        num_features, l1=l1, l2=l2, max_delta_step=max_delta_step, min_gain=min_gain,
        min_child_weight=min_child_weight, min_child_samples=min_child_samples,
        monotone=monotone,
    )  # fmt: skip
    allowed = np.ones(num_features, bool) if features is None else features
    if np.shape(allowed) != (num_features,):
        raise ValueError(
            f"features must be a mask of shape ({num_features},), got shape "
            f"{np.shape(allowed)}"
        )
    return compiled(_find_split)(histogram, jnp.asarray(allowed, bool), limits)


def _find_split(histogram, features, limits):
    searched, unit = to_search_units(limits, histogram.unit)
    search = partial(
        search_split, l2=limits.l2, min_gain=searched.min_gain, values=searched.values,
        min_child_weight=limits.min_child_weight,
        min_child_samples=least_samples(limits, histogram.num_rows),
    )  # fmt: skip
    split = jax.vmap(search, (0, None, None))(histogram.sums, unit, features)
    scale = find_scale(histogram.unit)
    return split._replace(
        gain=split.gain / scale / scale,
        child_bounds=restore_bounds(split.child_bounds, limits, histogram.unit),
    )
