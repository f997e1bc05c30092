# SPDX-License-Identifier: Apache-2.0
"""Replaces "auto" settings by the choices for a loss and its data.

No other module makes these choices: a round of boosting, ``history.choices`` and
:func:`jboost.inspect_loss` all call the functions below.

1. :func:`decide_by_loss`: choices that follow from the loss alone, before training.
2. :func:`decide_by_data`: choices that depend on the targets and the initial score. It
   works on traced values, inside a round, and on concrete ones, for the history.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.boosting.settings import Settings, learning_rates
from jboost.entry.collectives import total
from jboost.entry.messages import show
from jboost.entry.stages import elementwise
from jboost.objective.curvature import INFORMED, Chosen, Curvature
from jboost.objective.evaluation import Kinks
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.jaxprs import MANY_SCORES
from jboost.objective.tracing import TracedLoss
from jboost.trees.leaves import LeafSolver

# docs/defaults.md explains these numbers. "absolute" is for models like those of
# XGBoost, and uses its numbers.
_L2_OF_ALL_THRESHOLDS = 3.0
_L2 = 1.0
_ROWS_PER_SAMPLE = 50  # rows of the table for each row that a child must have
_MOST_SAMPLES = 20
_MOST_OF_DRAWN = 10  # if thresholds are drawn
_LEAST_SHARING = 3  # scores that share trees, and
_LEAST_RATES = 30.0 - 1e-3  # the sum of learning rates, in float32
_BY_SCORE = ("function", "natural", "standardized")  # curvatures that are not matrices
_NOT_BY = {"joint": _BY_SCORE, "hessian": ("natural", "standardized")}


class LossChoices(NamedTuple):
    """Choices that follow from the loss alone; none is "auto".

    Attributes:
      curvature: the policy of the splits; ``leaf_curvature`` is that of the leaves.
      min_child_samples: the minimum number of rows of a child; 0: the data decide;
        negative: they do, and this is the most.
      constant_curvature: whether all rows have the same curvature, so that a count of
        rows replaces its sum.
      order_statistics: whether leaf values are medians or quantiles. l1 does not shrink
        them; l2 does only as the weight of a pseudo-row at zero.
    """

    curvature: Chosen
    leaf_solver: LeafSolver
    leaf_curvature: Chosen
    l2: Any
    min_child_samples: Any
    constant_curvature: bool
    order_statistics: bool
    share_structure: bool


def decide_by_loss(
    loss: TracedLoss | GroupLoss,
    curvature: Curvature = "auto",
    leaf_solver: LeafSolver = "auto",
    l2: Any = "auto",
    min_child_samples: Any = "auto",
    regularization: str = "relative",
    share_structure: bool = False,
    draws_thresholds: bool = True,
) -> LossChoices:
    """Replaces each "auto" by the choice for this loss.

    ``draws_thresholds`` says whether nodes try some thresholds, not all. Passing the
    result back in as explicit settings trains the same model.
    """
    if isinstance(loss, GroupLoss):
        return _decide_for_groups(
            curvature, leaf_solver, l2, min_child_samples,
            regularization == "absolute", draws_thresholds,
        )._replace(share_structure=share_structure)  # fmt: skip
    if curvature == "probe":
        raise ValueError(
            "curvature='probe' needs a loss of groups (see groups), whose rows depend "
            "on each other; the curvature of other losses is known"
        )
    policy: Any = curvature if isinstance(curvature, str) else "function"
    if policy in INFORMED and loss.information is None:
        raise ValueError(
            f"curvature={policy!r} needs a loss from losses.likelihood whose "
            "distribution has fisher_information, a KL divergence or samples"
        )
    if policy == "auto" and loss.information is not None:
        # docs/distributions.md explains this choice.
        policy = "fisher" if leaf_solver == "hessian" else "standardized"
    if policy == "auto" and loss.quadratic and not loss.piecewise_linear:
        policy = "exact"  # the Hessian is constant: nothing to smooth
    if leaf_solver == "auto" and share_structure and policy not in _BY_SCORE:
        leaf_solver = "joint"  # the scores of a leaf depend on each other
    elif policy in _NOT_BY.get(leaf_solver, ()):
        raise ValueError(
            "leaf_solver must be 'auto', or one that weighs rows likewise, where "
            f"curvature={show(curvature)} weighs them score by score, got "
            f"{show(leaf_solver)}"
        )
    elif leaf_solver == "auto" and loss.piecewise_linear:
        leaf_solver = "exact"  # a Newton step needs a second derivative; here it is 0
    elif leaf_solver == "auto":
        step: LeafSolver = "hessian" if policy == "unit" else "newton"
        # To check the steps of K trees, each by itself, takes N K^2 operations.
        plain = loss.quadratic or loss.num_scores > MANY_SCORES
        leaf_solver = step if plain else "guarded"
    exact = leaf_solver == "exact" and loss.piecewise_linear
    if exact and policy == "auto" and regularization == "absolute":
        # As in XGBoost: min_child_weight and l2 count rows. Under "auto" the curvature
        # of a row would shrink as the targets spread.
        policy = "unit"
    order_statistics = exact or leaf_solver == "median_step"
    absolute = regularization == "absolute"
    l2, min_child_samples = _decide_sizes(
        l2,
        min_child_samples,
        small_l2=absolute or draws_thresholds or order_statistics,
        # Kinks determine how many rows a quantile needs.
        least=0 if loss.piecewise_linear else _find_least(absolute, draws_thresholds),
    )
    return LossChoices(
        curvature=policy,
        leaf_solver=leaf_solver,
        leaf_curvature=_leaf_curvature(policy, leaf_solver),
        l2=l2,
        min_child_samples=min_child_samples,
        constant_curvature=policy == "unit" or (policy == "exact" and loss.uniform),
        order_statistics=order_statistics,
        share_structure=share_structure,
    )


def _decide_sizes(l2, min_child_samples, small_l2, least):
    if isinstance(l2, str):
        l2 = _L2 if small_l2 else _L2_OF_ALL_THRESHOLDS
    return l2, least if isinstance(min_child_samples, str) else min_child_samples


def _find_least(absolute, draws_thresholds):
    if absolute:
        return 1
    return -_MOST_OF_DRAWN if draws_thresholds else 0


def decide_sharing(settings: Settings, loss: TracedLoss | GroupLoss) -> bool:
    """Returns whether one tree serves all scores of a round.

    "auto" shares trees of three classes or more (the loss depends on the differences of
    scores) if the learning rates of all rounds sum to 30, such as 300 rounds at 0.1: a
    shared tree serves one direction of the scores, so that models need two to three
    times as many rounds, and then have a lower loss. Other scores, such as parameters
    of a distribution, depend on different features. They have a tree for each score, as
    do likelihoods, models like those of other libraries, and those with constraints,
    which a search along one direction cannot see.
    """
    if loss.num_scores == 1 or settings.share_structure != "auto":
        return loss.num_scores > 1 and settings.share_structure is True
    plain = settings.leaf_solver == "auto" and settings.regularization == "relative"
    plain &= (
        settings.monotone is None and loss.of_differences and loss.information is None
    )
    if loss.num_scores < _LEAST_SHARING or not plain:
        return False
    rates = learning_rates(settings.learning_rate, settings.num_rounds)
    return isinstance(rates, np.ndarray) and bool(np.sum(rates) >= _LEAST_RATES)


def _decide_for_groups(
    curvature, leaf_solver, l2, min_child_samples, absolute, draws_thresholds
):
    allowed = {
        "curvature": (curvature, ("auto", "probe", "unit")),
        "leaf_solver": (leaf_solver, ("auto", "joint", "newton")),
    }
    for name, (value, words) in allowed.items():
        if value not in words:
            raise ValueError(
                f"{name} must be one of {words} for a loss of groups, whose rows have "
                f"no loss of their own, got {show(value)}"
            )
    l2, min_child_samples = _decide_sizes(
        l2,
        min_child_samples,
        small_l2=absolute or draws_thresholds,
        least=_find_least(absolute, draws_thresholds),
    )
    return LossChoices(
        curvature="unit" if curvature == "unit" else "probe",
        leaf_solver="joint" if leaf_solver == "auto" else leaf_solver,
        leaf_curvature="probe",
        l2=l2,
        min_child_samples=min_child_samples,
        constant_curvature=curvature == "unit",
        order_statistics=False,
        share_structure=False,
    )


def _leaf_curvature(curvature: Chosen, leaf_solver: LeafSolver) -> Chosen:
    if leaf_solver == "hessian":
        return "exact"
    # Unit curvature says nothing about the scale of the scores, and the steps of these
    # solvers are starting points that must have it.
    scaled = leaf_solver in ("exact", "guarded", "median_step", "joint")
    return "auto" if scaled and curvature == "unit" else curvature


def needs_minimizer(loss: TracedLoss | GroupLoss) -> bool:
    """Whether training looks for each row's own minimizer of the loss.

    A quadratic loss has a constant Hessian to go by, unless that is zero.
    """
    if isinstance(loss, GroupLoss):
        return False
    return loss.piecewise_linear or not loss.quadratic


class DataChoices(NamedTuple):
    """Choices that depend on the data.

    With ``exact_leaves``, "guarded" fits every leaf exactly, without a Newton step.
    """

    min_child_samples: Any
    exact_leaves: Any


def decide_by_data(
    pointed: Bool[ArrayLike, ""],
    least_rows: Int32[ArrayLike, "*K"],
    leaf_solver: LeafSolver,
    min_child_samples: Any,
) -> DataChoices:
    """Makes the choices that the loss alone does not determine.

    ``pointed`` is the result of :func:`jboost.objective.curvature.is_pointed`, and
    ``least_rows`` that of :func:`count_least_rows`, both traced or concrete.
    """
    numpy: Any = jnp if isinstance(pointed, jax.Array) else np
    # Given, or those that the data decide, with or without an own limit.
    most = numpy.where(min_child_samples < 0, -min_child_samples, least_rows)
    decided = numpy.minimum(least_rows, most)
    return DataChoices(
        numpy.where(min_child_samples > 0, min_child_samples, decided),
        pointed if leaf_solver == "guarded" else False,
    )


def count_least_rows(
    pointed: Bool[ArrayLike, ""],
    kinks: Kinks | None,
    weights: Float[Array, " N"],
    known: Bool[Array, "K N"] | None = None,
) -> Int32[ArrayLike, "*K"]:
    """Returns the number of rows for ``min_child_samples="auto"``.

    One in 50 of the rows of positive weight, from 1 to 20; 20 if the loss is pointed.
    For tau-quantiles 2 / min(tau, 1 - tau) - 1, at most 20: with this number of rows
    and one pseudo-row at zero (l2 = 1), two are beyond the quantile on average. If the
    slopes differ from row to row, the number for a median. 20 if kinks can be anywhere,
    or the loss is constant on one side of a row's minimum, as a hinge loss is.
    If ``known`` masks the known targets of each score, each score has its own count.
    """
    if kinks is None:
        return _count_rows(pointed, weights, known)
    return _count_quantile_rows(kinks.kind, kinks.left, kinks.right)


@elementwise
def _count_rows(numpy, pointed, weights, known):
    counts = weights > 0 if known is None else known & (weights > 0)[None, :]
    rows = total(numpy.sum(counts, axis=-1, dtype=np.int32))
    least = numpy.clip(rows // np.int32(_ROWS_PER_SAMPLE), 1, _MOST_SAMPLES)
    return numpy.where(pointed, _MOST_SAMPLES, least).astype(np.int32)


@elementwise
def _count_quantile_rows(numpy, kind, left, right):
    many = (kind == 0) | (left == 0) | (right == 0)
    share = left / numpy.where(many, 1, left + right)
    share = numpy.where((kind == 2) & ~many, numpy.minimum(share, 1 - share), 0.5)
    rows = numpy.minimum(numpy.round(2 / share) - 1, _MOST_SAMPLES)
    return numpy.where(many, _MOST_SAMPLES, rows).astype(np.int32)
