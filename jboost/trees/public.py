# SPDX-License-Identifier: Apache-2.0
"""Histograms, splits and single trees as public functions, for loops of one's own."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32, Key, Shaped

from jboost.codes.codes import Codes, DenseCodes
from jboost.codes.preparing import arrange_codes, check_codes
from jboost.entry import checks, feature_checks
from jboost.entry.decorators import traceable
from jboost.entry.messages import show_fields
from jboost.entry.programs import compiled
from jboost.kernels.library import takes_implementation
from jboost.numerics.exact import sum_channels
from jboost.numerics.random import seed_from_key
from jboost.tables.categories import Categories
from jboost.trees import grow as growing
from jboost.trees.grow import grow_levels
from jboost.trees.histogram import sum_histogram
from jboost.trees.leaves import newton_step
from jboost.trees.levels import least_samples
from jboost.trees.limits import (
    TreeLimits,
    as_float,
    as_int,
    find_scale,
    limit_categories,
    limit_values,
    restore_bounds,
    to_search_units,
)
from jboost.trees.rounding import make_rows
from jboost.trees.splitting import Split, search_split
from jboost.trees.tree import BoostedTrees, LeafSums, Tree


def read_codes(binned: Any, max_bins: int) -> Codes:
    """Returns codes that are packed for the kernels."""
    max_bins = checks.check_integer("max_bins", max_bins, least=2, most=65536)
    return arrange_codes(check_codes(binned, max_bins), max_bins)


def read_rows(name, values, codes) -> Any:
    """Returns one float32 number per row."""
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if values.shape != (codes.shape[0],):
        raise ValueError(
            f"{name} must have shape ({codes.shape[0]},), one number for each row, got "
            f"shape {values.shape}"
        )
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{name} must hold numbers, got {values.dtype}")
    return values.astype(np.float32)


def read_curvature(curvature, codes) -> Any:
    """Returns the curvature of each row, and whether it is one number for all."""
    if np.ndim(curvature) > 0:
        return read_rows("curvature", curvature, codes), False
    checks.check_number("curvature", curvature, least=0.0)
    full: Any = jnp.full if isinstance(curvature, Tracer) else np.full
    return full(codes.shape[0], curvature, np.float32), True


def read_mask(mask, codes) -> Any:
    """Returns which rows count; all where the mask is None."""
    if mask is None:
        return np.ones(codes.shape[0], bool)
    if np.shape(mask) != (codes.shape[0],) or mask.dtype != bool:
        raise ValueError(
            f"mask must be {codes.shape[0]} booleans, one for each row, got shape "
            f"{np.shape(mask)}"
        )
    return mask


def make_limits(
    num_features: int,
    *,
    l1: Any,
    l2: Any,
    max_delta_step: Any,
    min_gain: Any,
    min_child_weight: Any,
    min_child_samples: Any,
    monotone: Any,
    interactions: Any = None,
    rows_per_threshold: Any = 0,
    colsample_bytree: Any = 1.0,
    colsample_bylevel: Any = 1.0,
    colsample_bynode: Any = 1.0,
) -> TreeLimits:
    """Checks the numbers that shape a tree, and puts them into a container."""
    for name, value in (
        ("l1", l1), ("l2", l2), ("min_gain", min_gain),
        ("min_child_weight", min_child_weight),
    ):  # fmt: skip
        checks.check_number(name, value, least=0.0)
    checks.check_number("max_delta_step", max_delta_step, least=0.0, finite=False)
    if not isinstance(min_child_samples, Tracer):
        checks.check_integer("min_child_samples", min_child_samples, least=1)
        min_child_samples = np.int32(min_child_samples)
    if not isinstance(rows_per_threshold, Tracer):
        checks.check_integer("rows_per_threshold", rows_per_threshold, least=0)
    draws = isinstance(rows_per_threshold, Tracer) or rows_per_threshold > 0
    shares: dict[str, Any] = dict(
        colsample_bytree=colsample_bytree, colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode,
    )  # fmt: skip
    for name, value in shares.items():
        checks.check_number(name, value, above=0.0, most=1.0)
    signs = feature_checks.check_monotone(monotone, num_features)
    groups: Any = feature_checks.check_interactions(interactions, num_features)
    return TreeLimits(
        l2=as_float(l2),
        min_gain=as_float(min_gain),
        min_child_weight=as_float(min_child_weight),
        min_child_samples=min_child_samples,
        **{name: as_float(share) for name, share in shares.items()},
        values=limit_values(l1, max_delta_step, signs, num_features),
        groups=groups,
        rows_per_threshold=as_int(rows_per_threshold) if draws else None,
    )


def add_categories(
    limits: TreeLimits,
    codes: Codes,
    categories: Any,
    max_onehot: Any,
) -> TreeLimits:
    """Adds the limits on category splits, if there are categorical features."""
    if not isinstance(max_onehot, Tracer):
        checks.check_integer("max_onehot", max_onehot, least=0)
    if categories is None:
        return limits
    if not isinstance(categories, Categories):
        raise TypeError(
            "categories must be those of the bins (bins.categories) or None, got "
            f"{type(categories).__name__}"
        )
    features = categories.features
    if codes.is_sparse or features[-1] >= codes.num_features:
        raise ValueError(
            "categories must be those of the bins that the dense codes are from, got "
            f"categorical columns {features} and {codes.shape=}"
        )
    signs: Any = None if limits.values is None else limits.values.monotone
    if not isinstance(signs, Tracer | None) and np.any(signs[list(features)]):
        raise ValueError(
            "monotone must be 0 for categorical columns, which have no order, got "
            f"{signs.tolist()} and categorical columns {features}"
        )
    return limits._replace(categories=limit_categories(categories, max_onehot))


_MOST_DEPTH = 20  # a heap of 2^20 leaves


class Histogram(NamedTuple):
    """Sums of gradient, curvature and count per node, feature and code.

    Attributes:
      sums: integers, so that they do not depend on the order of the rows.
      unit: value of one integer of gradient and of one integer of curvature.
      num_rows: number of rows summed.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x = jnp.array([[1.0], [2.0], [1.0]])
      >>> codes = jb.apply_bins(jb.fit_bins(x), x)
      >>> histogram = jb.parts.build_histogram(codes, jnp.array([5.0, 7.0, 9.0]))
      >>> histogram.counts[0, 0, :3].tolist(), int(histogram.num_rows)
      ([0, 2, 1], 3)
    """

    sums: Int32[Array, "M F B 3"]
    unit: Float[Array, "2"]
    num_rows: Int32[Array, ""]

    def __repr__(self) -> str:
        """Returns the shapes and dtypes of the fields; the arrays would fill pages."""
        return show_fields(self)

    @property
    def gradients(self) -> Float[Array, "M F B"]:
        """The sums of gradients of each node, feature and code."""
        return self.sums[..., 0].astype(jnp.float32) * self.unit[0]

    @property
    def curvatures(self) -> Float[Array, "M F B"]:
        """The sums of curvatures of each node, feature and code."""
        return self.sums[..., 1].astype(jnp.float32) * self.unit[1]

    @property
    def counts(self) -> Int32[Array, "M F B"]:
        """The number of rows of each node, feature and code."""
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
      gradient, curvature: derivatives times row weights; curvature may be one number.
      node: the node of each row; rows outside [0, num_nodes) are left out. None: all
        rows are in node 0.
      num_nodes: M.
      max_bins: B, as in :func:`jboost.fit_bins`.
      key: seeds stochastic rounding, which tables of more than 32,768 rows need.
      implementation: "xla", "cpu" or "cuda" (the compiled kernels), or None for the
        best where the program runs.

    Raises:
      TypeError, ValueError: an argument is invalid, or two do not fit together.

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
    """Finds the best split of each node, and the side that missing values go to.

    gain = [G_L^2/(H_L+l2) + G_R^2/(H_R+l2) - G^2/(H+l2)] / 2 - min_gain (Chen and
    Guestrin 2016, eq. 7). Among equal gains, the lowest feature wins, then the lowest
    threshold, then the split that sends missing rows to the right.

    Args:
      histogram: sums of M nodes, from :func:`jboost.parts.build_histogram`.
      features: mask of the features that may be used; None: all.
      l1, l2, max_delta_step, min_gain, min_child_samples, monotone: hyperparameters
        of :func:`jboost.fit`.
      min_child_weight: least sum of curvature of a child.

    Returns:
      The splits, with an axis M in front of each field. ``threshold`` is a code: rows
      with 1 <= code <= threshold go left.

    Raises:
      TypeError, ValueError: an argument is invalid, or two do not fit together.

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


@traceable
@takes_implementation
def grow_tree(
    binned: Shaped[ArrayLike, "N F"] | Codes,
    gradient: Shaped[ArrayLike, " N"],
    curvature: Shaped[ArrayLike, " N"] | float = 1.0,
    *,
    max_depth: int = 6,
    max_bins: int = 256,
    l1: Float[ArrayLike, ""] | float = 0.0,
    l2: Float[ArrayLike, ""] | float = 1.0,
    max_delta_step: Float[ArrayLike, ""] | float = float("inf"),
    min_gain: Float[ArrayLike, ""] | float = 0.0,
    min_child_weight: Float[ArrayLike, ""] | float = 1.0,
    min_child_samples: int = 1,
    max_leaves: int | None = None,
    monotone: Any = None,
    interactions: Any = None,
    rows_per_threshold: int = 0,
    colsample_bytree: Float[ArrayLike, ""] | float = 1.0,
    colsample_bylevel: Float[ArrayLike, ""] | float = 1.0,
    colsample_bynode: Float[ArrayLike, ""] | float = 1.0,
    categories: Categories | None = None,
    max_onehot: int = 4,
    mask: Bool[ArrayLike, " N"] | None = None,
    key: Key[Array, ""] | None = None,
    implementation: str | None = None,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows one tree from gradients and curvatures, with Newton leaf values.

    Chen and Guestrin 2016, algorithm 1 level by level, over bins; a leaf's value is
    -G / (H + l2), with the sums G and H over its rows. The hyperparameters are those
    of :func:`jboost.fit`, in the units of ``curvature``
    (``regularization="absolute"``).

    Args:
      binned: codes from :func:`jboost.apply_bins`, of a dense or a sparse matrix, or
        from :func:`jboost.parts.prepare_codes`, which are arranged only once.
      gradient, curvature: derivatives of each row, times its weight. One number as
        curvature of all rows is faster: the counts need no sums of their own.
      min_child_weight: least sum of curvature of a child. If curvatures are weights
        that sum to 1, use 0 or multiply them by N.
      categories: categories of the bins (``bins.categories``); None: no column is
        categorical.
      mask: rows to learn from; the others only get a leaf. None: all.
      key: seeds column sampling, drawn thresholds, and stochastic rounding, which
        tables of more than 32,768 rows need; use another for each tree.
      implementation: the kernels to use, as in :func:`jboost.parts.build_histogram`.

    Returns:
      The tree, and the leaf of each row: ``tree.leaf_value[leaf]`` is its
      contribution to the scores. The tree works on codes; see
      :func:`jboost.parts.predict_tree` and :func:`jboost.parts.stack_trees`.

    Raises:
      TypeError, ValueError: an argument is invalid, or two do not fit together.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.array([1.0] * 4 + [3.0] * 4)
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> tree, leaf = jb.parts.grow_tree(binned, -y, max_depth=1, l2=0.0)
      >>> tree.leaf_value[leaf].tolist()
      [1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    """
    max_depth = checks.check_integer("max_depth", max_depth, least=1, most=_MOST_DEPTH)
    if max_leaves is not None:
        max_leaves = checks.check_integer("max_leaves", max_leaves, least=2)
    codes = read_codes(binned, max_bins)
    gradient = read_rows("gradient", gradient, codes)
    curvature, uniform = read_curvature(curvature, codes)
    limits = make_limits(
        codes.num_features, l1=l1, l2=l2, max_delta_step=max_delta_step,
        min_gain=min_gain, min_child_weight=min_child_weight,
        min_child_samples=min_child_samples, monotone=monotone,
        interactions=interactions, rows_per_threshold=rows_per_threshold,
        colsample_bytree=colsample_bytree, colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode,
    )  # fmt: skip
    limits = add_categories(limits, codes, categories, max_onehot)
    sizes = dict(
        max_depth=max_depth, num_bins=max_bins, uniform=uniform,
        # None where every tree of that depth has as few.
        max_leaves=max_leaves if max_leaves and max_leaves < 2**max_depth else None,
    )  # fmt: skip
    run = compiled(_grow_tree, tuple(sizes.items()))
    rows = (gradient, curvature, read_mask(mask, codes))
    return run(codes, rows, seed_from_key(key), limits, as_float(l1))


def _grow_tree(sizes, codes, rows, seed, limits, l1):
    samples, sizes = limits.min_child_samples, dict(sizes)
    limits = limits._replace(min_child_samples=jnp.minimum(samples, codes.num_rows))
    gradient, curvature, in_bag = rows
    tree, leaf = grow_levels(codes, gradient, curvature, in_bag, seed, limits, **sizes)
    tree = _fit_leaves(tree, leaf, rows, l1, limits.l2)
    if limits.values is not None:
        value = jnp.clip(tree.leaf_value, *limits.values.bounds)
        tree = tree._replace(leaf_value=value)
    return tree, leaf


@traceable
@takes_implementation
def fit_leaves(
    tree: Tree,
    leaf: Int32[Array, " N"],
    gradient: Shaped[ArrayLike, " N"],
    curvature: Shaped[ArrayLike, " N"] | float = 1.0,
    *,
    l1: Float[ArrayLike, ""] | float = 0.0,
    l2: Float[ArrayLike, ""] | float = 1.0,
    mask: Bool[ArrayLike, " N"] | None = None,
    implementation: str | None = None,
) -> Tree:
    """Gives a tree Newton leaf values -G / (H + l2) from other derivatives or rows.

    Args:
      tree, leaf: a tree and the leaf of each row, from :func:`jboost.parts.grow_tree`
        or :func:`jboost.parts.find_leaves`.
      gradient, curvature: derivatives times row weights; curvature may be one number.
      l1: moves each G toward 0 first.
      l2: added to each H.
      mask: rows to learn from; None: all.
      implementation: the kernels to use, as in :func:`jboost.parts.build_histogram`.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(4.0)[:, None], jnp.array([1.0, 1.0, 5.0, 7.0])
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> tree, leaf = jb.parts.grow_tree(binned, -y, max_depth=1)
      >>> jb.parts.fit_leaves(tree, leaf, -y, l2=0.0).leaf_value.tolist()
      [1.0, 6.0]
    """
    _check_tree(tree)
    for name, value in (("l1", l1), ("l2", l2)):
        checks.check_number(name, value, least=0.0)
    leaf = jnp.asarray(leaf, jnp.int32)
    gradient = read_rows("gradient", gradient, leaf)
    curvature, _ = read_curvature(curvature, leaf)
    run = compiled(_fit_leaves)
    rows = (gradient, curvature, read_mask(mask, leaf))
    return run(tree, leaf, rows, as_float(l1), as_float(l2))


def _fit_leaves(tree, leaf, rows, l1, l2):
    gradient, curvature, in_bag = rows
    weights = in_bag.astype(jnp.float32)
    channels = [jnp.where(in_bag, part, 0.0) for part in (gradient, curvature)]
    num_leaves = tree.leaf_value.shape[0]
    sums = sum_channels((*channels, weights), leaf, num_leaves)
    value, _ = newton_step(sums[0], sums[1], l2, l1)
    if tree.bounds is not None:
        value = jnp.clip(value, tree.bounds[:, 0], tree.bounds[:, 1])
    leaf_sums = LeafSums(*sums, l2=jnp.asarray(l2, jnp.float32))
    return tree._replace(leaf_value=value, sums=leaf_sums, bounds=None)


@traceable
@takes_implementation
def find_leaves(
    tree: Tree,
    binned: Shaped[ArrayLike, "N F"] | Codes,
    *,
    implementation: str | None = None,
) -> Int32[Array, "N *K"]:
    """Finds the leaf of each row of codes.

    Args:
      tree: a tree from :func:`jboost.parts.grow_tree`, or a round of K trees from
        :func:`jboost.boost_step`.
      binned: codes of any rows, from the same bins as in training.
      implementation: the kernels to use, as in :func:`jboost.parts.build_histogram`.

    Returns:
      Leaves [N], also if K scores share one tree; [N, K] for K > 1 trees.

    Raises:
      TypeError, ValueError: tree or binned is invalid.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(4.0)[:, None], jnp.array([1.0, 1.0, 5.0, 7.0])
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> tree, _ = jb.parts.grow_tree(binned, -y, max_depth=1)
      >>> jb.parts.find_leaves(tree, binned).tolist()
      [0, 0, 1, 1]
    """
    _check_tree(tree, axes=2)
    run = compiled(_find_leaves)
    return run(tree, check_codes(binned, None))


def _find_leaves(tree, binned):
    leaf = _find_rows(tree, binned)
    return leaf[0] if len(leaf) == 1 else leaf.T


@traceable
@takes_implementation
def predict_tree(
    tree: Tree,
    binned: Shaped[ArrayLike, "N F"] | Codes,
    *,
    implementation: str | None = None,
) -> Float[Array, "N *K"]:
    """Returns the contribution of a tree to the score of each row of codes.

    Args:
      tree, binned, implementation: arguments of :func:`jboost.parts.find_leaves`.

    Returns:
      Contributions [N]; [N, K] for K > 1 scores.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(4.0)[:, None], jnp.array([1.0, 1.0, 5.0, 7.0])
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> tree, _ = jb.parts.grow_tree(binned, -y, max_depth=1, l2=0.0)
      >>> jb.parts.predict_tree(tree, binned).tolist()
      [1.0, 1.0, 6.0, 6.0]
    """
    _check_tree(tree, axes=2)
    run = compiled(_predict_tree)
    return run(tree, check_codes(binned, None))


def _predict_tree(tree, binned):
    values = jnp.atleast_2d(tree.leaf_value)
    leaf = _find_rows(tree, binned)
    leaf = jnp.broadcast_to(leaf, (len(values), leaf.shape[1]))
    found = jax.vmap(lambda value, leaf: value[leaf])(values, leaf)
    return found[0] if len(found) == 1 else found.T


def _find_rows(tree, binned):
    """Returns the leaf of each row in each tree, [S, N]."""
    codes = DenseCodes(binned.T) if isinstance(binned, jax.Array) else binned
    splits = tree._replace(leaf_value=None, sums=None, bounds=None)
    if splits.feature.ndim == 1:
        return growing.find_leaves(splits, codes)[None]
    return jax.vmap(lambda tree: growing.find_leaves(tree, codes))(splits)


@traceable
def stack_trees(
    trees: Sequence[Tree] | Tree, init_score: ArrayLike | float = 0.0
) -> BoostedTrees:
    """Stacks trees into a model on codes; :func:`jboost.to_ensemble` makes one on x.

    Args:
      trees: one or more trees of equal depth from :func:`jboost.parts.grow_tree`, or
        rounds of K trees from :func:`jboost.boost_step`; a sequence, or one Tree with
        an axis of trees in front, as ``jax.lax.scan`` returns it.
      init_score: the initial score of training, a number or [K].

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(4.0)[:, None], jnp.array([1.0, 1.0, 5.0, 7.0])
      >>> bins = jb.fit_bins(x)
      >>> tree, _ = jb.parts.grow_tree(
      ...     jb.apply_bins(bins, x), -y, max_depth=1, l2=0.0
      ... )
      >>> model = jb.to_ensemble(jb.parts.stack_trees([tree]), bins)
      >>> jb.predict(model, x).tolist()
      [1.0, 1.0, 6.0, 6.0]
    """
    stacked = trees if isinstance(trees, Tree) else _stack([*trees])
    if stacked.feature.ndim == 2:
        stacked = jax.tree.map(lambda field: field[:, None], stacked)
    return BoostedTrees(stacked, jnp.asarray(init_score, jnp.float32))


def _stack(trees):
    if not trees or not all(isinstance(tree, Tree) for tree in trees):
        raise ValueError("trees must be a sequence of at least one Tree")
    if len({tree.leaf_value.shape for tree in trees}) > 1:
        shapes = sorted({tree.leaf_value.shape for tree in trees})
        raise ValueError(f"trees must all have the same depth and K, got {shapes=}")
    return jax.tree.map(lambda *fields: jnp.stack(fields), *trees)


def _check_tree(tree, axes=1):
    if not isinstance(tree, Tree):
        raise TypeError(f"tree must be a Tree, got {type(tree).__name__}")
    if tree.feature.ndim > axes:
        kind = "one tree" if axes == 1 else "one tree, or the K trees of a round"
        raise ValueError(
            f"tree must be {kind}, got leaf values of shape {tree.leaf_value.shape}"
        )
