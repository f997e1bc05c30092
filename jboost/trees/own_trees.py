# SPDX-License-Identifier: Apache-2.0
"""Single trees as public functions, for loops of one's own.

In: codes from ``apply_bins`` (or prepared by ``prepare_codes``), gradients and
curvatures. Out: a tree, its leaf values, what it predicts on codes, and a model of
several trees. All functions work under ``jit`` and ``vmap``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Key, Shaped

from jboost.codes.codes import Codes, DenseCodes
from jboost.codes.preparing import check_codes
from jboost.entry import checks
from jboost.entry.decorators import traceable
from jboost.entry.programs import compiled
from jboost.kernels.library import takes_implementation
from jboost.numerics.random_bits import seed_from_key
from jboost.numerics.sums import sum_channels
from jboost.tables.categories import Categories
from jboost.trees import growing
from jboost.trees.growing import grow_levels
from jboost.trees.limits import as_float
from jboost.trees.newton import newton_step
from jboost.trees.step_arguments import (
    add_categories,
    make_limits,
    read_codes,
    read_curvature,
    read_mask,
    read_rows,
)
from jboost.trees.tree import BoostedTrees, LeafSums, Tree

_MOST_DEPTH = 20  # a heap of 2^20 leaves


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
    colsample_bytree: Float[ArrayLike, ""] | float = 1.0,
    colsample_bylevel: Float[ArrayLike, ""] | float = 1.0,
    colsample_bynode: Float[ArrayLike, ""] | float = 1.0,
    categories: Categories | None = None,
    category_l2: Float[ArrayLike, ""] | float = 0.0,
    category_smoothing: Float[ArrayLike, ""] | float = 0.0,
    min_category_weight: Float[ArrayLike, ""] | float = 0.0,
    max_onehot: int = 4,
    mask: Bool[ArrayLike, " N"] | None = None,
    key: Key[Array, ""] | None = None,
    implementation: str | None = None,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows one tree from gradients and curvatures, with Newton leaf values.

    Chen and Guestrin 2016, algorithm 1 level by level, over bins; a leaf's value is
    -G / (H + l2), with the sums G and H over its rows. The hyperparameters mean what
    they mean for :func:`jboost.fit`, in the units of ``curvature``
    (``regularization="absolute"``).

    Args:
      binned: codes from :func:`jboost.apply_bins`, of a dense or a sparse matrix, or
        from :func:`jboost.parts.prepare_codes`, which are arranged only once.
      gradient, curvature: of each row, times its weight. One number for all rows is
        faster as curvature: their counts need no sums of their own.
      min_child_weight: least sum of curvature of a child. If curvatures are weights
        that sum to 1, use 0 or multiply them by N.
      categories: those of the bins (``bins.categories``); None where no column is
        categorical.
      mask: rows to learn from; the others only get a leaf. None for all.
      key: seeds column sampling, and stochastic rounding, which tables of more than
        32,768 rows need; use another for each tree.
      implementation: as for :func:`jboost.parts.build_histogram`.

    Returns:
      The tree, and the leaf of each row: ``tree.leaf_value[leaf]`` is what it adds to
      the scores. It works on codes; see :func:`jboost.parts.predict_tree` and
      :func:`jboost.parts.stack_trees`.

    Raises:
      TypeError, ValueError: arguments that do not fit together.

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
        interactions=interactions, colsample_bytree=colsample_bytree,
        colsample_bylevel=colsample_bylevel, colsample_bynode=colsample_bynode,
    )  # fmt: skip
    limits = add_categories(
        limits, codes, categories, category_l2=category_l2,
        category_smoothing=category_smoothing, min_category_weight=min_category_weight,
        max_onehot=max_onehot,
    )  # fmt: skip
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
      tree, leaf: from :func:`jboost.parts.grow_tree` or
        :func:`jboost.parts.find_leaves`.
      gradient, curvature: of each row, times its weight; curvature may be one number.
      l1: moves each G toward 0 first.
      l2: added to each H.
      mask: rows to learn from; None for all.
      implementation: as for :func:`jboost.parts.build_histogram`.

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
      tree: from :func:`jboost.parts.grow_tree`, or a round of K trees from
        :func:`jboost.boost_step`.
      binned: codes of any rows, from the same bins as in training.
      implementation: as for :func:`jboost.parts.build_histogram`.

    Returns:
      [N], also of one tree that K scores share; of K > 1 trees [N, K].

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
    """Returns what a tree adds to the score of each row of codes.

    Args:
      tree, binned, implementation: as for :func:`jboost.parts.find_leaves`.

    Returns:
      [N]; of K > 1 scores [N, K].

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
    """Makes a model on codes of trees; :func:`jboost.to_ensemble` makes it one on x.

    Args:
      trees: at least one, all of one depth: from :func:`jboost.parts.grow_tree`, or
        rounds of K trees from :func:`jboost.boost_step`; a sequence, or one Tree with
        an axis of trees in front, as ``jax.lax.scan`` returns it.
      init_score: where training started, a number or [K].

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
