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
from jaxtyping import ArrayLike, Bool

from jboost.objective.curvature import Chosen, Curvature
from jboost.objective.tracing import TracedLoss
from jboost.trees.leaves import LeafSolver

# A median of few rows follows its noise: its variance falls with the number of rows,
# and no l2 shrinks it. Newton steps are shrunk, so that one row per leaf may do.
_ORDER_STATISTIC_SAMPLES = 20
_SAMPLES = 1


class LossChoices(NamedTuple):
    """What the loss decides.

    Attributes:
      curvature: the policy that splits are found with.
      leaf_solver: never "auto".
      leaf_curvature: the policy that leaf values are fitted with.
      min_child_samples: the least rows of a child; 0: the data decide.
      constant_curvature: whether all rows have the same curvature, so that a count of
        rows replaces its sum.
      order_statistics: whether leaf values are medians or quantiles, which l1 and l2
        do not shrink.
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
        min_child_samples = _ORDER_STATISTIC_SAMPLES if loss.straight else 0
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
    pointed: Bool[ArrayLike, ""], leaf_solver: LeafSolver, min_child_samples: Any
) -> DataChoices:
    """Makes the choices that the loss left to the data.

    Args:
      pointed: see :func:`jboost.objective.curvature.is_pointed`; traced or concrete.
      leaf_solver, min_child_samples: those of :func:`decide_by_loss`.
    """
    numpy: Any = jnp if isinstance(pointed, jax.Array) else np
    samples = numpy.where(pointed, _ORDER_STATISTIC_SAMPLES, _SAMPLES)
    return DataChoices(
        numpy.where(min_child_samples > 0, min_child_samples, samples),
        pointed if leaf_solver == "guarded" else False,
    )


def describe_choices(choices: LossChoices) -> dict[str, Any]:
    """What the loss decides of the settings, by their names; see ``inspect_loss``."""
    either = f"{_SAMPLES} or {_ORDER_STATISTIC_SAMPLES}"
    return dict(
        curvature=choices.curvature,
        leaf_solver=choices.leaf_solver,
        min_child_samples=choices.min_child_samples or either,
    )
