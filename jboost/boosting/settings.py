# SPDX-License-Identifier: Apache-2.0
"""What is asked of training: checked, and sorted into what is static and what is not.

In: the arguments of ``fit`` and ``boost``. Out: a Method, which shapes the compiled
program, and Numbers, which may be traced and never recompile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.boosting.rounds import (
    ORDER_STATISTIC_SAMPLES,
    Data,
    Method,
    Numbers,
    Regularization,
)
from jboost.codes.codes import SparseCodes
from jboost.entry import checks
from jboost.entry.warning import warn_user
from jboost.objective.curvature import Curvature
from jboost.objective.tracing import TracedLoss
from jboost.tables.categories import Categories
from jboost.tables.sparse import SparseMatrix
from jboost.trees.candidates import Candidates, CandidateWeights
from jboost.trees.category_splits import (
    CATEGORY_L2,
    CATEGORY_SMOOTHING,
    MAX_ONEHOT,
    MIN_CATEGORY_WEIGHT,
    CategoryLimits,
)
from jboost.trees.initial import MedianStart
from jboost.trees.leaves import LeafSolver
from jboost.trees.levels import TreeLimits
from jboost.trees.sorted_growth import MOST_CODES
from jboost.trees.splitting import UNBOUNDED, ValueLimits

_MOST_DEPTH = 20  # a heap of 2^20 leaves
_MOST_CELLS = 2**30  # of a level's histograms of sparse data: 4 GiB


def make_settings(
    loss: TracedLoss,
    data: Data,
    *,
    uniform: bool,
    max_depth: int,
    max_bins: int,
    num_features: int,
    l1: Any,
    l2: Any,
    max_delta_step: Any,
    min_gain: Any,
    min_child_weight: Any,
    min_child_samples: Any,
    regularization: Regularization,
    subsample: Any,
    colsample_bytree: Any,
    colsample_bylevel: Any,
    colsample_bynode: Any,
    max_leaves: int | None,
    monotone: Any,
    interactions: Any,
    candidates: Candidates,
    candidate_weights: CandidateWeights,
    categories: Categories | None = None,
    category_l2: Any = CATEGORY_L2,
    category_smoothing: Any = CATEGORY_SMOOTHING,
    min_category_weight: Any = MIN_CATEGORY_WEIGHT,
    max_onehot: Any = MAX_ONEHOT,
    curvature: Curvature,
    leaf_solver: LeafSolver,
    feature_names: Any = None,
) -> tuple[Method, Numbers]:
    """Checks what shapes training and sorts it into what is static and what is not."""
    check_settings(
        max_depth=max_depth, l1=l1, l2=l2, max_delta_step=max_delta_step,
        min_gain=min_gain, min_child_weight=min_child_weight,
        min_child_samples=min_child_samples, regularization=regularization,
        subsample=subsample, colsample_bytree=colsample_bytree,
        colsample_bylevel=colsample_bylevel, colsample_bynode=colsample_bynode,
        max_leaves=max_leaves, candidates=candidates,
        candidate_weights=candidate_weights, category_l2=category_l2,
        category_smoothing=category_smoothing, min_category_weight=min_category_weight,
        max_onehot=max_onehot, curvature=curvature, leaf_solver=leaf_solver,
    )  # fmt: skip
    max_bins = checks.check_integer("max_bins", max_bins, least=2, most=65536)
    sorts_rows(candidates, candidate_weights, data.columns)
    if leaf_solver == "median_step" and loss.quadratic:
        better = "exact" if loss.straight else "newton"
        raise ValueError(
            "leaf_solver='median_step' needs a loss whose second derivative changes "
            f"with the score, as Huber's; this one has its minimum by {better!r}"
        )
    if categories is not None and not isinstance(categories, Categories):
        raise TypeError(
            "categories must be those of the bins (bins.categories) or None, got "
            f"{type(categories).__name__}"
        )
    samples, num_rows = resolve_samples(loss, min_child_samples), len(data.weights)
    known = not isinstance(samples, Tracer) and samples > 0
    largest: Any = num_rows // samples if known else num_rows
    method = Method(
        curvature=curvature,
        leaf_solver=leaf_solver,
        regularization=regularization,
        max_depth=int(max_depth),
        # A size for histograms alone: in sorted growth it is just a number.
        num_bins=max_bins if candidates == "global" else MOST_CODES,
        max_nodes=min(2 ** (max_depth - 1), 1 << (max(1, largest) - 1).bit_length()),
        # None where every tree of that depth has as few.
        max_leaves=max_leaves if max_leaves and max_leaves < 2**max_depth else None,
        uniform=uniform,
        categorical=categories is not None,
        candidates=candidates,
        candidate_weights=candidate_weights,
    ).resolve(loss)
    _warn_of_no_steps(loss, method)
    _check_size(data.columns, method)
    limits = TreeLimits(
        l2=l2,
        min_gain=min_gain,
        min_child_weight=min_child_weight,
        min_child_samples=samples,
        colsample_bytree=colsample_bytree,
        colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode,
    )
    limits = jax.tree.map(_as_float, limits)
    limits = limits._replace(
        min_child_samples=_minimum(samples, num_rows),
        max_bins=np.int32(max_bins),
        values=_limit_values(
            l1,
            max_delta_step,
            checks.check_monotone(monotone, num_features, feature_names),
            num_features,
        ),
        groups=checks.check_interactions(interactions, num_features, feature_names),
        categories=_limit_categories(
            categories, category_l2, category_smoothing, min_category_weight, max_onehot
        ),
    )
    if categories is not None:
        _check_categories(categories, data.columns, method, limits, num_features)
    if candidates != "global" and limits.values is not None:
        raise ValueError(
            "candidates must be 'global' with l1, max_delta_step or monotone, which "
            f"searches of sorted rows do not know, got {candidates!r}"
        )
    return method, Numbers(limits, _as_float(subsample))


def _warn_of_no_steps(loss, method):
    """Warns of a piecewise linear loss whose Newton steps are all 0."""
    flat = loss.straight and method.leaf_curvature in ("exact", "absolute")
    steps = method.leaf_solver in ("newton", "hessian", "line_search")
    if flat and steps and method.regularization == "absolute":
        warn_user(
            "nothing will be learned: the loss is piecewise linear, so that its second "
            "derivative is 0, and so is every leaf with curvature="
            f"{method.curvature!r}, leaf_solver={method.leaf_solver!r} and "
            "regularization='absolute' (as in XGBoost); use leaf_solver='auto' and "
            "curvature='auto'"
        )


def check_settings(
    *,
    max_depth: Any,
    l1: Any,
    l2: Any,
    max_delta_step: Any,
    min_gain: Any,
    min_child_weight: Any,
    min_child_samples: Any,
    regularization: Any,
    subsample: Any,
    colsample_bytree: Any,
    colsample_bylevel: Any,
    colsample_bynode: Any,
    max_leaves: Any,
    candidates: Any,
    candidate_weights: Any,
    category_l2: Any = CATEGORY_L2,
    category_smoothing: Any = CATEGORY_SMOOTHING,
    min_category_weight: Any = MIN_CATEGORY_WEIGHT,
    max_onehot: Any = MAX_ONEHOT,
    curvature: Any,
    leaf_solver: Any,
) -> None:
    """Checks what can be checked before any data are looked at.

    Raises:
      TypeError, ValueError: for bad arguments.
    """
    checks.check_integer("max_depth", max_depth, least=1, most=_MOST_DEPTH)
    if max_leaves is not None:
        checks.check_integer("max_leaves", max_leaves, least=2)
    checks.check_word("regularization", regularization, checks.REGULARIZATIONS)
    checks.check_word("curvature", curvature, checks.CURVATURES)
    checks.check_word("leaf_solver", leaf_solver, checks.LEAF_SOLVERS)
    sorts_rows(candidates, candidate_weights)
    if isinstance(min_child_samples, str):
        checks.check_word("min_child_samples", min_child_samples, ("auto",))
    elif not isinstance(min_child_samples, Tracer):
        checks.check_integer("min_child_samples", min_child_samples, least=1)
    for name, value in (
        ("l1", l1), ("l2", l2), ("min_gain", min_gain),
        ("min_child_weight", min_child_weight), ("category_l2", category_l2),
        ("category_smoothing", category_smoothing),
        ("min_category_weight", min_category_weight),
    ):  # fmt: skip
        checks.check_number(name, value, least=0.0)
    if not isinstance(max_onehot, Tracer):
        checks.check_integer("max_onehot", max_onehot, least=0)
    checks.check_number("max_delta_step", max_delta_step, least=0.0, finite=False)
    for name, value in (
        ("subsample", subsample), ("colsample_bytree", colsample_bytree),
        ("colsample_bylevel", colsample_bylevel),
        ("colsample_bynode", colsample_bynode),
    ):  # fmt: skip
        checks.check_number(name, value, above=0.0, most=1.0)


def _limit_values(l1, max_delta_step, signs: Any, num_features):
    """What holds leaf values back; None if nothing does, which is known here.

    A traced number may be anything: it is taken for a limit.
    """
    known = not isinstance(l1, Tracer) and not isinstance(max_delta_step, Tracer)
    if signs is None and known and l1 == 0 and max_delta_step in (0, np.inf):
        return None
    step = _as_float(max_delta_step)
    numpy: Any = jnp if isinstance(step, jax.Array) else np
    most = numpy.float32(UNBOUNDED)
    step = numpy.where(step == 0, most, numpy.minimum(step, most))
    bounds = numpy.stack([-step, step])
    signs = np.zeros(num_features, np.int32) if signs is None else signs
    return ValueLimits(_as_float(l1), bounds, signs)


def _limit_categories(categories, l2, smoothing, min_weight, max_onehot):
    """Numbers of the categorical features, where there are any."""
    if categories is None:
        return None
    codes = categories.codes
    traced = isinstance(codes, Tracer)
    num_codes: Any = jnp.max(codes, axis=1) if traced else np.max(codes, axis=1)
    features: Any = np.array(categories.features, np.int32)
    most: Any = max_onehot if isinstance(max_onehot, Tracer) else np.int32(max_onehot)
    return CategoryLimits(
        features, num_codes, _as_float(l2), _as_float(smoothing),
        _as_float(min_weight), most,
    )  # fmt: skip


def _check_categories(categories, columns, method, limits, num_features):
    """Refuses what does not know categories."""
    if categories.features[-1] >= num_features:
        raise ValueError(
            f"categories must be of the {num_features} columns of binned, got columns "
            f"{categories.features}"
        )
    if isinstance(columns, SparseCodes):
        raise ValueError(
            "x must be dense where columns are categorical, got a sparse matrix and "
            f"categorical columns {categories.features}"
        )
    if method.sorts_rows:
        raise ValueError(
            "candidates must be 'global' and candidate_weights 'samples' where columns "
            f"are categorical, got {method.candidates!r} and "
            f"{method.candidate_weights!r}"
        )
    signs = None if limits.values is None else limits.values.monotone
    if signs is None or isinstance(signs, Tracer):
        return
    ordered = [f for f in categories.features if signs[f] != 0]
    if ordered:
        raise ValueError(
            "monotone must be 0 for categorical columns, which have no order, got "
            f"{signs[ordered[0]]} for column {ordered[0]}"
        )


def sorts_rows(candidates: Any, candidate_weights: Any, data: Any = None) -> bool:
    """Whether trees are grown from sorted rows, with a code for every value.

    Raises:
      ValueError: words that are not known, or do not go together, or with sparse data.
    """
    checks.check_word("candidates", candidates, checks.CANDIDATES)
    words = checks.CANDIDATE_WEIGHTS
    checks.check_word("candidate_weights", candidate_weights, words)
    if candidates == "exact" and candidate_weights != "samples":
        raise ValueError(
            "candidate_weights must be 'samples' with candidates='exact', which tries "
            f"every value whatever it weighs, got {candidate_weights!r}"
        )
    sorts = candidates != "global" or candidate_weights != "samples"
    if sorts and isinstance(data, SparseCodes | SparseMatrix):
        raise ValueError(
            "candidates must be 'global' and candidate_weights 'samples' for sparse "
            f"data, got {candidates!r} and {candidate_weights!r}"
        )
    return sorts


def _check_size(columns, method):
    """Refuses what cannot be addressed, or hardly held."""
    if not isinstance(columns, SparseCodes):
        if columns.size >= 2**31:
            raise ValueError(
                "x must have fewer than 2^31 cells (rows, padded, times columns), got "
                f"{columns.size}"
            )
        return
    # Stored entries may be few, but every node has a sum for each feature and code.
    nodes = min(method.max_nodes, method.max_leaves or method.max_nodes)
    sizes = (nodes, columns.num_features, method.num_bins, 3)
    if np.prod(sizes, dtype=np.float64) > _MOST_CELLS:
        raise ValueError(
            "a level's histograms must have at most 2^30 cells (4 GiB), got nodes x "
            f"features x codes x channels = {' x '.join(map(str, sizes))}; use a "
            "smaller max_depth or max_bins, or a larger min_child_samples"
        )


def _as_float(number) -> Any:
    """float32, by NumPy where that can be: it compiles nothing."""
    if isinstance(number, jax.Array):
        return number.astype(jnp.float32)
    return np.float32(number)


def _minimum(samples, num_rows) -> Any:
    """int32, likewise."""
    if isinstance(samples, Tracer):
        return jnp.minimum(samples, num_rows).astype(jnp.int32)
    return np.int32(min(samples, num_rows))


def resolve_samples(loss: TracedLoss, min_child_samples: Any) -> Any:
    """A number; for "auto" 20 where leaves are medians, else 0: the rows decide."""
    if isinstance(min_child_samples, str):
        return ORDER_STATISTIC_SAMPLES if loss.straight else 0
    return min_child_samples


def initial_scores(init_score: Any, num_scores: int) -> Array | MedianStart | None:
    """The initial scores [K], or how to find them: None asks for the argmin."""
    if isinstance(init_score, str):
        checks.check_word("init_score", init_score, ("auto", "median"))
        return MedianStart() if init_score == "median" else None
    traced = any(isinstance(n, Tracer) for n in jax.tree.leaves(init_score))
    numpy: Any = jnp if traced else np
    array = numpy.asarray(init_score, numpy.float32)
    if array.shape not in ((), (num_scores,)):
        raise ValueError(
            f"init_score must be 'auto', 'median', a number or {num_scores} numbers, "
            f"got shape {array.shape}"
        )
    if not traced and not np.isfinite(array).all():
        raise ValueError(f"init_score must be finite, got {init_score!r}")
    scores = numpy.broadcast_to(array, (num_scores,))
    return scores if traced else jax.device_put(scores)
