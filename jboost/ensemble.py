# SPDX-License-Identifier: Apache-2.0
"""The model: trees on raw thresholds, and what can be asked of it.

In: a matrix of floats. Out: scores, scores by round, leaves. The model is an
immutable pytree of arrays; every function here can be jitted, vmapped and, in leaf
values, initial score and offset, differentiated.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped

from jboost import checks
from jboost.binning import Bins, as_matrix, flush_denormals
from jboost.boosting import BoostedTrees

FORMAT_VERSION = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ensemble:
    """A trained model. R rounds of K trees in heap order, I = 2^max_depth - 1.

    Attributes:
      feature: 0 where a node is not split.
      threshold: ``x <= threshold`` goes left; +inf where a node is not split.
      missing_left: where NaN goes; True where a node is not split.
      leaf_value: learning rate included.
      init_score: [] for one score per row, else [K].
      num_features: how many columns ``predict`` expects.
      format_version: of this layout.
    """

    feature: Int32[Array, "R K I"]
    threshold: Float[Array, "R K I"]
    missing_left: Bool[Array, "R K I"]
    leaf_value: Float[Array, "R K I+1"]
    init_score: Float[Array, "*K"]
    num_features: int = field(metadata=dict(static=True))
    format_version: int = field(default=FORMAT_VERSION, metadata=dict(static=True))

    @property
    def num_rounds(self) -> int:
        """R."""
        return self.feature.shape[0]

    @property
    def num_scores(self) -> int:
        """K."""
        return self.feature.shape[1]

    @property
    def max_depth(self) -> int:
        """D, levels of splits."""
        return self.leaf_value.shape[2].bit_length() - 1


def to_ensemble(trees: BoostedTrees, bins: Bins) -> Ensemble:
    """Turns thresholds that are codes into raw ones; traceable.

    Law: ``predict(to_ensemble(trees, bins), x)`` takes the same leaves as the trees
    do on ``apply_bins(bins, x)``, for every x.
    """
    tree = trees.trees
    # NumPy arrays stay in NumPy, where another number of rounds compiles nothing.
    host = isinstance(tree.feature, np.ndarray)
    thresholds = np.asarray(bins.thresholds) if host else jnp.asarray(bins.thresholds)
    # The last threshold is +inf: where a node is not split.
    code = (tree.threshold - 1).clip(0, thresholds.shape[1] - 1)
    arrays: dict[str, Any] = dict(
        feature=tree.feature,
        threshold=thresholds[tree.feature, code],
        missing_left=tree.missing_left,
        leaf_value=tree.leaf_value,
        init_score=trees.init_score,
    )
    return Ensemble(
        **(jax.device_put(arrays) if host else arrays),
        num_features=bins.num_features,
    )


def predict(
    model: Ensemble,
    x: Shaped[ArrayLike, "N F"],
    *,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
) -> Float[Array, "N *K"]:
    """The raw score F(x) = init_score + sum of leaf values (+ offset).

    Args:
      model: from :func:`jboost.fit`.
      x: numbers, NaN = missing, with the columns that the model was trained on.
      offset: [N] or [N, K], added to the score, as in training.

    Returns:
      [N], or [N, K] for K > 1 scores a row. A probability is a link away:
      ``jax.nn.sigmoid`` for logistic, ``jax.nn.softmax`` for softmax, ``jnp.exp``
      for poisson, gamma and tweedie.

    Raises:
      TypeError, ValueError: the model is not an Ensemble, x is no numeric matrix, or
        has another number of columns.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.predict(model, x).shape
      (40,)
    """
    matrix, rows = _door(model, x)
    scores = _predict(_pad_rounds(model), matrix)[:, :rows]
    return _finish(model, scores, offset)


def staged_predict(
    model: Ensemble,
    x: Shaped[ArrayLike, "N F"],
    *,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
) -> Float[Array, "R N *K"]:
    """The score after each round, [R, N] or [R, N, K]; see :func:`predict`."""
    matrix, rows = _door(model, x)
    scores = _staged_predict(_pad_rounds(model), matrix)
    scores = scores[: model.num_rounds, :, :rows]
    return jax.vmap(lambda stage: _finish(model, stage, offset))(scores)


def leaf_indices(
    model: Ensemble, x: Shaped[ArrayLike, "N F"]
) -> Int32[Array, "N R *K"]:
    """The leaf of each row in each tree, from 0 to 2^max_depth - 1: [N, R(, K)]."""
    matrix, rows = _door(model, x)
    leaves = _leaf_indices(_pad_rounds(model), matrix)
    leaves = jnp.moveaxis(leaves[: model.num_rounds, :, :rows], 2, 0)
    return leaves[:, :, 0] if model.init_score.ndim == 0 else leaves


def truncate(model: Ensemble, num_rounds: int) -> Ensemble:
    """The model after its first ``num_rounds`` rounds."""
    _check_model(model)
    checks.check_integer("num_rounds", num_rounds, least=0, most=model.num_rounds)
    return replace(
        model,
        feature=model.feature[:num_rounds],
        threshold=model.threshold[:num_rounds],
        missing_left=model.missing_left[:num_rounds],
        leaf_value=model.leaf_value[:num_rounds],
    )


def padded_size(size: int, least: int = 64) -> int:
    """The next of 8 sizes per octave: nearby sizes share compiled programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def _check_model(model):
    if isinstance(model, tuple) and model and isinstance(model[0], Ensemble):
        raise TypeError(
            "model must be an Ensemble, got the pair (model, history) that fit "
            "returns; unpack it: model, history = jb.fit(...)"
        )
    if not isinstance(model, Ensemble):
        raise TypeError(f"model must be an Ensemble, got {type(model).__name__}")


def _door(model, x):
    """Checks the arguments; concrete rows are padded to few sizes."""
    _check_model(model)
    matrix = as_matrix(x, "x")
    if matrix.shape[1] != model.num_features:
        raise ValueError(
            f"x must have {model.num_features} columns, as in training, got "
            f"{matrix.shape[1]}"
        )
    rows = matrix.shape[0]
    if matrix.size >= 2**31:
        raise ValueError(f"x must have fewer than 2^31 cells, got {matrix.shape=}")
    if not isinstance(matrix, Tracer):
        short = padded_size(rows) - rows
        matrix = np.pad(np.asarray(matrix), ((0, short), (0, 0)))
    return matrix, rows


def _pad_rounds(model):
    """Adds rounds that add nothing, up to one of few numbers of rounds."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(model)):
        return model
    short = padded_size(model.num_rounds, least=8) - model.num_rounds

    def pad(array):  # in NumPy, which compiles nothing
        return np.pad(np.asarray(array), ((0, short), (0, 0), (0, 0)))

    return replace(
        model,
        feature=pad(model.feature),
        threshold=pad(model.threshold),
        missing_left=pad(model.missing_left),
        leaf_value=pad(model.leaf_value),
    )


def _finish(model, scores, offset):
    """Adds the offset and gives one score per row no axis of its own."""
    if offset is not None:
        scores += checks.check_offset(offset, scores.shape[1], scores.shape[0])
    return scores[0] if model.init_score.ndim == 0 else scores.T


def _tree_leaves(tree, columns):
    """The leaf of every row in one tree on raw values [F, N]."""
    feature, threshold, missing_left = tree
    num_rows = columns.shape[1]
    flat, rows = columns.reshape(-1), jnp.arange(num_rows, dtype=jnp.int32)

    def descend(_, node):
        value = flat[feature[node] * num_rows + rows]
        above = value > threshold[node]
        right = jnp.where(jnp.isnan(value), ~missing_left[node], above)
        return 2 * node + 1 + right.astype(jnp.int32)

    depth = (feature.shape[0] + 1).bit_length() - 1
    start = jnp.zeros(num_rows, jnp.int32)
    return jax.lax.fori_loop(0, depth, descend, start) - feature.shape[0]


def _add_rounds(model, matrix, collect):
    """Scans over rounds; ``collect(scores, leaves)`` says what to keep of each."""
    columns = flush_denormals(matrix).T
    shape = (model.num_scores, matrix.shape[0])
    start = jnp.broadcast_to(model.init_score.reshape(-1, 1), shape)

    def add_round(scores, trees):
        *structure, values = trees
        leaves = jax.vmap(_tree_leaves, (0, None))(structure, columns)
        scores += jax.vmap(lambda value, leaf: value[leaf])(values, leaves)
        return scores, collect(scores, leaves)

    trees = (model.feature, model.threshold, model.missing_left, model.leaf_value)
    return jax.lax.scan(add_round, start, trees)


@jax.jit
def _predict(model, matrix):
    return _add_rounds(model, matrix, lambda scores, leaves: None)[0]


@jax.jit
def _staged_predict(model, matrix):
    return _add_rounds(model, matrix, lambda scores, leaves: scores)[1]


@jax.jit
def _leaf_indices(model, matrix):
    return _add_rounds(model, matrix, lambda scores, leaves: leaves)[1]
