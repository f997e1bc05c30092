# SPDX-License-Identifier: Apache-2.0
"""Exact SHAP values of trees: the contribution of each feature to a score.

In: a trained model or tree, and rows. Out: one number per row and feature
(ShapValues), or per row and pair of features; these sum to the row's score.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.entry import checks
from jboost.entry.available_memory import require_memory
from jboost.entry.decorators import traceable
from jboost.entry.programs import compiled
from jboost.entry.representation import show_fields
from jboost.explanation.attributions import explain, make_points, mean_values
from jboost.kernels import shap_cpu
from jboost.kernels.library import takes_implementation
from jboost.kernels.predict_cpu import Trees, as_rows
from jboost.kernels.shap_cpu import borrow_rows
from jboost.model.ensemble import Model, read_model
from jboost.model.preparing import prepare
from jboost.model.scores import code_columns, read_trees, to_host
from jboost.model.sparse_blocks import keep_used_features, run_in_blocks
from jboost.model.wide_thresholds import match_wide
from jboost.tables.offsets import read_offset
from jboost.tables.sparse import is_sparse

Cover = Literal["auto", "weight", "curvature"]
COVERS = ("auto", "weight", "curvature")


class ShapValues(NamedTuple):
    """The contribution of each feature to each row's score.

    Law: ``values.sum(axis=1) + base`` is the score.

    Attributes:
      values: [N, F], or [N, F, K] for K > 1 scores per row.
      base: the mean score of the training rows, computed from the cover of the leaves;
        with an offset, one for each row, [N] or [N, K].
    """

    values: Float[Array, "N F *K"]
    base: Float[Array, "*K"]

    def __repr__(self) -> str:
        """Returns the shapes of the fields; the arrays would fill pages."""
        return show_fields(self)


@traceable
@takes_implementation
def shap_values(
    model: Model,
    x: Any,
    *,
    cover: Cover = "auto",
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    implementation: str | None = None,
) -> ShapValues:
    """Computes exact SHAP values of raw scores (TreeSHAP, path-dependent).

    These are the Shapley values of a game for each row. If the features S are known,
    its value f(S) is a mean over leaves: at a split on a feature in S it follows the
    row; at any other split it averages both children, weighted by their fraction of
    the training rows (Lundberg et al. 2020, algorithm 1):

        phi_i = sum over S without i of |S|! (F - |S| - 1)! / F! (f(S + i) - f(S))

    Law: ``values.sum(axis=1) + base`` equals ``predict(model, x)``. Both are float32
    sums, which differ by less than 2^-20 of the sum over trees of the largest leaf
    value (measured with 50 to 1,000 trees: 2^-23 to 2^-21.6).

    Args:
      model: from :func:`jboost.fit`, or a tree from :func:`jboost.cart.fit_tree`.
      x: as for :func:`jboost.predict`; for a sparse matrix values are dense.
      cover: what weights the children of a split: the "weight" of the rows (as in
        LightGBM, scikit-learn and the literature, where fractions are probabilities),
        or their "curvature", the sum of Hessians (as in XGBoost). "auto": the weight,
        or the curvature if the model was read from a file that does not hold weights.
      offset: as for :func:`jboost.predict`; it is added to ``base``.
      implementation: "xla", "cpu" (the compiled kernels), or None for the best one
        available; "cuda" is "xla" here. Results differ only by rounding, with the
        bound given above. Trees with more than 255 levels always use plain XLA.

    Returns:
      ShapValues with values [N, F], or [N, F, K] for K > 1 scores per row.

    Raises:
      TypeError, ValueError: an argument is invalid, or the model does not hold the
        cover of its leaves; x is sparse, and x or the model is traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, x[:, 0] * x[:, 1], num_rounds=20)
      >>> values, base = jb.shap_values(model, x)
      >>> bool(np.allclose(values.sum(axis=1) + base, jb.predict(model, x), atol=1e-5))
      True

    Notes:
      Lundberg et al. 2020, From local explanations to global understanding with
      explainable AI for trees; Yu et al. 2022, Linear TreeSHAP. The time per row is
      proportional to the number of nodes times half the depth.
    """
    model = _read_model(model, cover)
    values = _explain(model, x, pairs=False)
    base = compiled(_mean_score)(_strip(model))
    if offset is not None:
        offset = read_offset(offset, values.shape[0], model.num_scores)
        base = _add_offset(base, offset[:, 0] if base.ndim == 0 else offset)
    return ShapValues(values, base)


@traceable
@takes_implementation
def shap_interactions(
    model: Model,
    x: Any,
    *,
    cover: Cover = "auto",
    implementation: str | None = None,
) -> Float[Array, "N F F *K"]:
    """Computes SHAP interaction values: contributions of pairs of features.

    phi_ij for i != j is half of the joint contribution of i and j minus their separate
    contributions, averaged as in a Shapley value (Lundberg et al. 2020, equation 3;
    Fujimoto et al. 2006); phi_ii is the rest of phi_i.

    Laws: ``phi[:, i, j] == phi[:, j, i]``; ``phi.sum(axis=2)`` equals the
    :func:`shap_values`, which sum to the score.

    Args:
      model, x, cover, implementation: as for :func:`shap_values`.

    Returns:
      [N, F, F], or [N, F, F, K] for K > 1 scores per row: N F^2 K numbers.

    Raises:
      TypeError, ValueError: as :func:`shap_values`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, x[:, 0] * x[:, 1], num_rounds=20)
      >>> size = np.abs(jb.explanation.shap_interactions(model, x)).mean(axis=0)
      >>> bool(size[0, 1] > 5 * size[0, 2])
      True
    """
    return _explain(_read_model(model, cover), x, pairs=True)


# ---- checks of the model, and execution ---------------------------------------------


def _read_model(model, cover):
    """Returns an ensemble whose ``sums.weight`` is the requested cover."""
    checks.check_word("cover", cover, COVERS)
    model = read_model(model)
    if model.sums is None:
        raise ValueError(
            "model must hold the cover of its leaves, got a model whose sums are None"
        )
    known = {name: getattr(model.sums, name) for name in COVERS[1:]}
    if any(isinstance(array, Tracer) for array in known.values()):
        chosen = _choose_traced(known, cover)
    else:
        chosen = _choose_known(known, cover)
    return replace(model, sums=model.sums._replace(weight=chosen))


def _choose_traced(known, cover):
    """Chooses the cover in the program, because traced values cannot be read here."""
    if cover != "auto":
        return known[cover]
    unknown = jnp.any(jnp.isnan(known["weight"]))
    return jnp.where(unknown, known["curvature"], known["weight"])


def _choose_known(known, cover):
    tells = [name for name, array in known.items() if not np.isnan(array).any()]
    if cover == "auto" and tells:
        cover = tells[0]
    if cover not in tells:
        has = f"only {tells[0]!r}" if tells else "neither"
        wanted = "cover" if cover == "auto" else repr(cover)
        raise ValueError(
            f"model must hold the {wanted} of its leaves for cover={cover!r}, got a "
            f"model with {has}"
        )
    if np.any(np.asarray(known[cover]) < 0):
        raise ValueError(f"the {cover} of the leaves of model must be >= 0")
    return known[cover]


def _explain(model, x, *, pairs):
    if is_sparse(x):
        return _explain_sparse(model, x, pairs)
    task = prepare(model, x, explain=True)
    sizes = [task.num_rows, *[model.num_features] * (1 + pairs), model.num_scores]
    require_memory(
        4.0 * math.prod(sizes),
        f"the result of shape {tuple(sizes)}",
        "pass x in parts",
    )
    if task.on_host and model.max_depth <= shap_cpu.DEEPEST:
        found = _explain_on_host(task.model, borrow_rows(task.rows), pairs)
    else:
        found = compiled(_explain_matrix, pairs)(task.model, task.rows)
    return task.cut(found, rows_axis=0)


def _explain_sparse(model, x, pairs):
    """Explains blocks of rows on the features that the model uses; others get 0."""
    small, place, width = keep_used_features(match_wide(model, x)[0])
    small = replace(small, sums=model.sums)

    def run(_, block):
        return _explain(small, block, pairs=pairs)

    found = np.asarray(run_in_blocks(run, model, x, None, rows_axis=0))
    used = np.flatnonzero(place < width)
    shape = (model.num_features,) * (2 if pairs else 1)
    values = np.zeros((len(found), *shape, *model.init_score.shape), np.float32)
    count = slice(len(used))
    if pairs:
        values[:, used[:, None], used] = found[:, count, count]
    else:
        values[:, used] = found[:, count]
    return jax.device_put(values)


def _add_offset(base, offset):
    """Adds in NumPy unless traced, because JAX compiles a sum for each shape."""
    if isinstance(base, Tracer) or isinstance(offset, Tracer):
        return base + offset
    return jax.device_put(np.asarray(base) + offset)


def _strip(model):
    """Removes fields that the program does not need; names would compile it again."""
    return replace(model, feature_names=None, absent=None, categories=None)


def _explain_on_host(model, rows, pairs):
    """Calls the CPU kernels directly, so that no number of rows is compiled for."""
    rows, trees = read_trees(model := to_host(model), rows)
    if rows.codes is not None:
        rows = borrow_rows(np.asarray(code_columns(rows)).T)
    points = make_points(model.max_depth, rows.num_features)
    found = shap_cpu.explain(
        rows, trees, model.leaf_value, model.sums.weight, *points,
        max_depth=model.max_depth, pairs=pairs,
    )  # fmt: skip
    return found[..., 0] if model.init_score.ndim == 0 else found


def _explain_matrix(pairs, model, matrix):
    """Returns [N, F] or [N, F, F], with a last axis K for several scores."""
    rows, trees = read_trees(model, matrix)
    if rows.codes is not None:
        coded: Any = code_columns(rows)
        rows = as_rows(coded.T)
    found = explain(
        rows, trees, model.leaf_value, model.sums.weight, max_depth=model.max_depth,
        pairs=pairs,
    )  # fmt: skip
    return found[..., 0] if model.init_score.ndim == 0 else found


def _mean_score(model):
    """Returns the base, [] or [K]."""
    structure = (model.feature, model.threshold, model.missing_left, model.left_codes)
    left_child = None if model.links is None else model.links.left_child
    mean = mean_values(
        Trees(*structure, left_child), model.leaf_value, model.sums.weight,
        max_depth=model.max_depth,
    )  # fmt: skip
    return model.init_score + mean.reshape(model.init_score.shape)
