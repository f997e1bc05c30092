# SPDX-License-Identifier: Apache-2.0
"""What each "auto" stands for.

In: a traced loss, and later whether it looks like |r| to most rows. Out: the choices
that replace "auto". This is the only place that makes them: a round of boosting,
``history.choices`` and :func:`jboost.inspect_loss` all call the two functions below.

1. :func:`decide_by_loss`: what follows from the loss alone, before training.
2. :func:`decide_by_data`: what depends on the targets and the initial score. It works
   on traced values, inside a round, and on concrete ones, for the history.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Int32

from jboost.entry.stages import elementwise
from jboost.objective.curvature import Chosen, Curvature
from jboost.objective.evaluation import Kinks
from jboost.objective.tracing import TracedLoss
from jboost.trees.leaves import LeafSolver

# Newton steps are shrunk, so that one row per leaf may do. An extreme quantile of few
# rows follows their noise, and so does a minimum that nothing shrinks.
_SAMPLES = 1
_MOST_SAMPLES = 20


class LossChoices(NamedTuple):
    """What the loss decides.

    Attributes:
      curvature: the policy that splits are found with.
      leaf_solver: never "auto".
      leaf_curvature: the policy that leaf values are fitted with.
      min_child_samples: the least rows of a child; 0: the data decide.
      constant_curvature: whether all rows have the same curvature, so that a count of
        rows replaces its sum.
      order_statistics: whether leaf values are medians or quantiles, which no l1
        shrinks, and l2 only by rows at rest.
    """

    curvature: Chosen
    leaf_solver: LeafSolver
    leaf_curvature: Chosen
    min_child_samples: Any
    constant_curvature: bool
    order_statistics: bool


def decide_by_loss(
    loss: TracedLoss,
    curvature: Curvature = "auto",
    leaf_solver: LeafSolver = "auto",
    min_child_samples: Any = "auto",
) -> LossChoices:
    """Replaces each "auto" by what it stands for with this loss.

    Passing the result back in as explicit settings trains the same model.
    """
    policy: Any = curvature if isinstance(curvature, str) else "function"
    if policy == "auto" and loss.quadratic and not loss.straight:
        policy = "exact"  # the Hessian is constant: nothing to smooth
    if leaf_solver == "auto" and loss.straight:
        leaf_solver = "exact"  # a Newton step needs a second derivative; here it is 0
    elif leaf_solver == "auto":
        step: LeafSolver = "hessian" if policy == "unit" else "newton"
        leaf_solver = step if loss.quadratic else "guarded"
    if isinstance(min_child_samples, str):
        min_child_samples = 0
    exact = leaf_solver == "exact" and loss.straight
    return LossChoices(
        curvature=policy,
        leaf_solver=leaf_solver,
        leaf_curvature=_leaf_curvature(policy, leaf_solver),
        min_child_samples=min_child_samples,
        constant_curvature=policy == "unit" or (policy == "exact" and loss.uniform),
        order_statistics=exact or leaf_solver == "median_step",
    )


def _leaf_curvature(curvature: Chosen, leaf_solver: LeafSolver) -> Chosen:
    """The curvature that leaf values are fitted with."""
    if leaf_solver == "hessian":
        return "exact"
    # Unit curvature says nothing about the scale of the scores, and the steps of these
    # solvers are starting points that must have it.
    scaled = leaf_solver in ("exact", "guarded", "median_step")
    return "auto" if scaled and curvature == "unit" else curvature


def needs_minimizer(loss: TracedLoss) -> bool:
    """Whether training looks for each row's own minimizer of the loss.

    A quadratic loss has a constant Hessian to go by, unless that is zero.
    """
    return loss.straight or not loss.quadratic


class DataChoices(NamedTuple):
    """What the data decide.

    Attributes:
      min_child_samples: the least rows of a child.
      exact_leaves: whether "guarded" trusts no Newton step, and fits every leaf
        exactly.
    """

    min_child_samples: Any
    exact_leaves: Any


def decide_by_data(
    pointed: Bool[ArrayLike, ""],
    least_rows: Int32[ArrayLike, ""],
    leaf_solver: LeafSolver,
    min_child_samples: Any,
) -> DataChoices:
    """Makes the choices that the loss left to the data.

    Args:
      pointed: see :func:`jboost.objective.curvature.is_pointed`; traced or concrete.
      least_rows: see :func:`count_least_rows`; traced or concrete.
      leaf_solver, min_child_samples: those of :func:`decide_by_loss`.
    """
    numpy: Any = jnp if isinstance(pointed, jax.Array) else np
    return DataChoices(
        numpy.where(min_child_samples > 0, min_child_samples, least_rows),
        pointed if leaf_solver == "guarded" else False,
    )


def count_least_rows(
    pointed: Bool[ArrayLike, ""], kinks: Kinks | None
) -> Int32[ArrayLike, ""]:
    """Returns what ``min_child_samples="auto"`` stands for.

    Where leaves are tau-quantiles, so many rows that with one row at rest (l2 = 1) two
    are beyond the quantile on average: 2 / min(tau, 1 - tau) - 1, at most 20; where the
    slopes differ from row to row, those of a median.

    Args:
      pointed, kinks: of the loss with its data, before the first round.
    """
    if kinks is None:
        return _count_least_rows(pointed)
    return _count_quantile_rows(kinks.kind, kinks.left, kinks.right)


@elementwise
def _count_least_rows(numpy, pointed):
    return numpy.where(pointed, _MOST_SAMPLES, _SAMPLES).astype(np.int32)


@elementwise
def _count_quantile_rows(numpy, kind, left, right):
    share = left / (left + right)
    share = numpy.where(kind == 2, numpy.minimum(share, 1 - share), 0.5)
    rows = numpy.minimum(numpy.round(2 / share) - 1, _MOST_SAMPLES)
    return numpy.where(kind == 0, _MOST_SAMPLES, rows).astype(np.int32)


def describe_choices(choices: LossChoices) -> dict[str, Any]:
    """What the loss decides of the settings, by their names; see ``inspect_loss``."""
    return dict(
        curvature=choices.curvature,
        leaf_solver=choices.leaf_solver,
        min_child_samples=choices.min_child_samples or "auto",
    )
