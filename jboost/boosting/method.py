# SPDX-License-Identifier: Apache-2.0
"""Sorts settings into static and traced values.

A Method holds the options and sizes that are compiled into the program. Numbers are
traced: other values of them need no compilation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jboost.boosting.auto import LossChoices, decide_by_loss, decide_sharing
from jboost.boosting.memory_needs import check_cells, refuse_large_histograms
from jboost.boosting.settings import LeafRows, Regularization, Settings
from jboost.codes.codes import Codes, SparseCodes
from jboost.entry import feature_checks
from jboost.entry.checks import refuse_mask
from jboost.entry.messages import show, warn_user
from jboost.kernels.library import may_run
from jboost.objective.curvature import INFORMED, Chosen
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.tracing import TracedLoss
from jboost.tables.categories import Categories
from jboost.tables.sparse import SparseMatrix
from jboost.trees.candidates import Candidates, CandidateWeights
from jboost.trees.exact_growth import MOST_CODES
from jboost.trees.initial import MedianStart
from jboost.trees.leaves import LeafSolver
from jboost.trees.limits import (
    TreeLimits,
    as_float,
    as_int,
    limit_categories,
    limit_values,
)
from jboost.trees.slopes import MOST_TERMS

_MOST_CELLS = 2**30  # limit on the histograms of one level of sparse data: 4 GiB
_MOST_NUMBERS = 2**28  # limit on trees that a GPU grows side by side: 1 GiB
_ROW_NUMBERS = 16  # about as many numbers describe a row while a GPU grows a tree


@dataclass(frozen=True)
class Method:
    """The static part of the settings: options and sizes.

    ``curvature``, ``leaf_solver``, ``leaf_curvature`` and ``order_statistics`` are
    those of :class:`jboost.boosting.auto.LossChoices`. ``uniform`` says that all rows
    weigh the same (or nothing) and have the same curvature; ``categorical`` that some
    feature holds categories; ``share_structure`` that one tree serves all scores. A
    leaf has up to ``num_terms`` linear terms.
    """

    curvature: Chosen
    leaf_solver: LeafSolver
    leaf_curvature: Chosen
    leaf_rows: LeafRows
    order_statistics: bool
    regularization: Regularization
    max_depth: int
    num_bins: int
    max_nodes: int
    max_leaves: int | None
    uniform: bool
    categorical: bool
    candidates: Candidates
    candidate_weights: CandidateWeights
    share_structure: bool
    num_terms: int

    @property
    def linear_leaves(self) -> bool:
        """Whether leaves have linear terms."""
        return self.num_terms > 0

    @property
    def sorts_rows(self) -> bool:
        """Whether trees are grown from sorted rows and codes of every value."""
        return self.candidates != "global" or self.candidate_weights != "samples"

    def count_together(self, num_rows: int, num_features: int) -> int:
        """Returns how many trees a GPU grows side by side, with one launch for all."""
        if self.sorts_rows:
            return 1
        histograms = 3 * self.max_nodes * num_features * self.num_bins
        return max(1, _MOST_NUMBERS // (_ROW_NUMBERS * num_rows + histograms))


class Numbers(NamedTuple):
    """The traced part of the settings; the page "Parameters" explains them.

    ``subsample`` is None where it is known to be 1: a program then samples no rows.
    ``ranges`` are those of :class:`jboost.Ensemble`; None: leaves are constant.
    """

    limits: TreeLimits
    subsample: Float[Array, ""] | None
    ranges: Float[Array, "F 2"] | None = None


def make_method(
    settings: Settings,
    loss: TracedLoss | GroupLoss,
    codes: Codes,
    *,
    num_rows: int,
    uniform: bool,
    max_bins: int,
    num_features: int,
    categories: Categories | None,
    feature_names: Any = None,
    num_devices: int = 1,
    ranges: Any = None,
) -> tuple[Method, Numbers]:
    """Sorts settings into static and traced values, and compares them with the data.

    Args:
      codes: the codes of ``num_rows`` rows; only shapes are used.
      uniform: whether all rows with a positive weight have the same weight.
      max_bins: the codes of a feature: ``settings.max_bins``, or the number in use.
      ranges: the ranges of the features in linear leaves; None: leaves are constant.
    """
    refuse_sorting(settings, codes)
    choices = decide_by_loss(
        loss, settings.curvature, settings.leaf_solver, settings.l2,
        settings.min_child_samples, settings.regularization,
        decide_sharing(settings, loss), settings.draws_thresholds,
    )  # fmt: skip
    _check_solver(loss, choices)
    by_information = num_devices > 1 and choices.curvature in INFORMED
    if by_information and not isinstance(loss, GroupLoss) and loss.sampled:
        # Random samples on a mesh would differ in the last bits.
        raise ValueError(
            f"mesh must be None with curvature={choices.curvature!r} where the "
            "information of a distribution is estimated from samples; give it "
            f"fisher_information, or use curvature='absolute', got {num_devices} "
            "devices"
        )
    if categories is not None and not isinstance(categories, Categories):
        raise TypeError(
            "categories must be those of the bins (bins.categories) or None, got "
            f"{type(categories).__name__}"
        )
    most = settings.max_leaves
    method = Method(
        curvature=choices.curvature,
        leaf_solver=choices.leaf_solver,
        leaf_curvature=choices.leaf_curvature,
        leaf_rows=settings.leaf_rows,
        order_statistics=choices.order_statistics,
        regularization=settings.regularization,
        max_depth=settings.max_depth,
        # Histograms need the size; sorted growth takes max_bins as a traced number.
        num_bins=max_bins if settings.candidates == "global" else MOST_CODES,
        max_nodes=_count_nodes(settings.max_depth, choices, num_rows),
        # None if the depth implies the limit.
        max_leaves=most if most and most < 2**settings.max_depth else None,
        uniform=uniform and choices.constant_curvature,
        categorical=categories is not None,
        candidates=settings.candidates,
        candidate_weights=settings.candidate_weights,
        share_structure=choices.share_structure,
        num_terms=_count_terms(settings, choices, ranges, num_features),
    )
    _warn_of_no_steps(loss, method)
    _check_size(codes, method, num_devices)
    limits = _make_limits(
        settings, choices, num_rows, num_features, categories, feature_names
    )
    limits = limits._replace(max_bins=np.int32(max_bins))
    if categories is not None:
        _check_categories(categories, codes, method, limits, num_features)
    share = settings.subsample
    sampled = isinstance(share, Tracer) or share < 1
    ranges = None if method.num_terms == 0 else ranges
    return method, Numbers(limits, as_float(share) if sampled else None, ranges)


def _count_terms(settings, choices, ranges, num_features):
    """Returns the number of terms of a leaf; 0 for leaves that are order statistics."""
    if not settings.linear_leaves or choices.leaf_solver == "line_search":
        return 0
    if ranges is None or choices.order_statistics:
        if settings.given["linear_leaves"] is True and num_features:
            why = "leaves that are order statistics"
            if not choices.order_statistics:
                why = "streams and functions that see only codes; use jb.fit on arrays"
            raise ValueError(
                f"linear_leaves must be 'auto' or False for {why}, got True"
            )
        return 0
    return min(MOST_TERMS, settings.max_depth)


def _make_limits(settings, choices, num_rows, num_features, categories, feature_names):
    groups: Any = feature_checks.check_interactions(
        settings.interactions, num_features, feature_names
    )
    signs: Any = feature_checks.check_monotone(
        settings.monotone, num_features, feature_names
    )
    samples: Any = choices.min_child_samples
    if isinstance(samples, Tracer):
        samples = jnp.minimum(samples, num_rows).astype(jnp.int32)
    else:
        samples = np.int32(min(samples, num_rows))
    # None where they are known to be 0: the program is then smaller.
    parent: Any = settings.parent_rows
    shrinks = isinstance(parent, Tracer) or parent > 0
    return TreeLimits(
        l2=as_float(choices.l2),
        parent_rows=as_float(parent) if shrinks else None,
        min_gain=as_float(settings.min_gain),
        min_child_weight=as_float(settings.min_child_weight),
        min_child_samples=samples,
        colsample_bytree=as_float(settings.colsample_bytree),
        colsample_bylevel=as_float(settings.colsample_bylevel),
        colsample_bynode=as_float(settings.colsample_bynode),
        values=limit_values(settings.l1, settings.max_delta_step, signs, num_features),
        groups=groups,
        categories=limit_categories(categories, settings.max_onehot),
        num_features=np.int32(num_features),
        rows_per_threshold=(
            as_int(settings.rows_per_threshold) if settings.draws_thresholds else None
        ),
    )  # fmt: skip


def _count_nodes(max_depth, choices, num_rows) -> int:
    """Returns the most nodes of a level that the rows can fill, a power of two."""
    samples = choices.min_child_samples
    known = not isinstance(samples, Tracer) and samples > 0
    largest: Any = num_rows // samples if known else num_rows
    return min(2 ** (max_depth - 1), 1 << (max(1, largest) - 1).bit_length())


def _check_solver(loss, choices: LossChoices):
    """Refuses "joint" and "median_step" for losses that have no use for them."""
    if isinstance(loss, GroupLoss):
        return
    if choices.leaf_solver == "joint" and not choices.share_structure:
        raise ValueError(
            "leaf_solver='joint' needs a loss of groups (see groups), or scores that "
            "share trees (see share_structure); otherwise no leaf value depends on "
            "another one"
        )
    if choices.leaf_solver == "median_step" and loss.quadratic:
        better = "exact" if loss.piecewise_linear else "newton"
        raise ValueError(
            "leaf_solver='median_step' needs a loss whose second derivative changes "
            f"with the score, such as Huber's; this one has its minimum by {better!r}"
        )


def _warn_of_no_steps(loss, method):
    """Warns if all Newton steps of a piecewise linear loss are 0."""
    if isinstance(loss, GroupLoss):
        return
    flat = loss.piecewise_linear and method.leaf_curvature in ("exact", "absolute")
    steps = method.leaf_solver in ("newton", "hessian", "line_search")
    if flat and steps and method.regularization == "absolute":
        warn_user(
            "nothing will be learned: the loss is piecewise linear, so that its second "
            "derivative is 0, and so is every leaf with curvature="
            f"{method.curvature!r}, leaf_solver={method.leaf_solver!r} and "
            "regularization='absolute' (as in XGBoost); use leaf_solver='auto' and "
            "curvature='auto'"
        )


def _check_categories(categories, codes, method, limits, num_features):
    """Refuses settings that do not support categorical features."""
    if categories.features[-1] >= num_features:
        raise ValueError(
            f"categories must be of the {num_features} columns of binned, got columns "
            f"{categories.features}"
        )
    if codes.is_sparse:
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


def refuse_sorting(settings: Settings, x: Any) -> None:
    """Raises for sparse data where trees would be grown from sorted rows."""
    if settings.sorts_rows and isinstance(x, SparseCodes | SparseMatrix):
        raise ValueError(
            "candidates must be 'global' and candidate_weights 'samples' for sparse "
            f"data, got {settings.candidates!r} and {settings.candidate_weights!r}"
        )


def _check_size(codes, method, num_devices):
    """Refuses data that exceed 32-bit indices, and histograms that exceed memory."""
    if not codes.is_sparse:
        check_cells(-(-codes.num_rows // num_devices) * codes.num_features)
        plain = num_devices > 1 or not may_run()
        refuse_large_histograms(method, codes.num_features, plain=plain)
        return
    # Stored entries may be few, but every node has a sum for each feature and code.
    nodes = min(method.max_nodes, method.max_leaves or method.max_nodes)
    sizes = (nodes, codes.num_features, method.num_bins, 3)
    if np.prod(sizes, dtype=np.float64) > _MOST_CELLS:
        raise ValueError(
            "a level's histograms must have at most 2^30 cells (4 GiB), got nodes x "
            f"features x codes x channels = {' x '.join(map(str, sizes))}; use a "
            "smaller max_depth or max_bins, or a larger min_child_samples"
        )


def initial_scores(settings: Settings) -> Array | MedianStart | None:
    """Returns the initial scores [K], or how to find them; None: the argmin."""
    init_score, num_scores = settings.init_score, settings.num_scores
    if isinstance(init_score, str) and init_score in ("auto", "median"):
        return MedianStart() if init_score == "median" else None
    traced = any(isinstance(n, Tracer) for n in jax.tree.leaves(init_score))
    numpy: Any = jnp if traced else np
    try:
        with np.errstate(over="ignore"):  # refused below, as an infinity
            array = numpy.asarray(refuse_mask(init_score, "init_score"), numpy.float32)
    except (TypeError, ValueError, OverflowError) as error:
        kind = ValueError if isinstance(init_score, str) else TypeError
        raise kind(
            f"init_score must be 'auto', 'median', a number or {num_scores} numbers, "
            f"got {show(init_score)}: {str(error)[:80]}"
        ) from None
    if array.shape not in ((), (num_scores,)):
        raise ValueError(
            f"init_score must be 'auto', 'median', a number or {num_scores} numbers, "
            f"got shape {array.shape}"
        )
    if not traced and not np.isfinite(array).all():
        raise ValueError(f"init_score must be finite, got {show(init_score)}")
    scores = numpy.broadcast_to(array, (num_scores,))
    return scores if traced else jax.device_put(scores)
