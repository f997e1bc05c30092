# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every row at the start of a round, and what they are divided by.

In: an objective and scores. Out: two pairs of gradient and curvature: one shapes the
trees, the other fits their leaves.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.boosting.auto import needs_minimizer
from jboost.boosting.state import BoostState, Problem, bind_objective, find_minima
from jboost.objective.curvature import derivatives, is_raised, raise_curvature
from jboost.objective.evaluation import weighted_mean


class RowDerivatives(NamedTuple):
    """Derivatives of every row, before weights.

    Attributes:
      mean: what "relative" regularization divides by.
      value_unit: the unit of leaf values fitted with these derivatives, in units of
        the values that the splits see.
    """

    gradient: Float[Array, "*K N"]
    curvature: Float[Array, "*K N"]
    mean: Float[Array, "*K"]
    value_unit: Float[Array, "*K"]


class RawDerivatives(NamedTuple):
    """Gradient and positive curvature of every row by one policy."""

    gradient: Float[Array, "K N"]
    curvature: Float[Array, "K N"]


class Policy(NamedTuple):
    """What follows from a curvature policy for its numbers.

    Attributes:
      unit: whether the curvature says nothing about the scale of the loss.
      raised: whether it has a least value, and
      by_start: whether that depends on the start of training.
    """

    unit: bool
    raised: bool
    by_start: bool


class Scaling(NamedTuple):
    """How derivatives are scaled; it does not hold the loss.

    Attributes:
      relative: whether they are divided by the mean curvature.
      policies: one, or that of the splits and that of the leaves.
    """

    relative: bool
    policies: tuple[Policy, ...]


def choose_scaling(problem: Problem) -> Scaling:
    """Returns how the derivatives of a problem are scaled."""
    method = problem.method
    loss: Any = problem.loss
    num_scores = 1 if loss is None else loss.num_scores
    given = problem.arrays.given is not None
    minima = loss is not None and needs_minimizer(loss)

    def describe(curvature):
        raised = not given and is_raised(minima, curvature)
        by_start = raised and curvature == "auto" and num_scores > 1
        return Policy(curvature == "unit", raised, by_start)

    policies = tuple(describe(curvature) for curvature in _policies(method))
    return Scaling(method.regularization == "relative", policies)


def row_derivatives(
    problem: Problem, state: BoostState
) -> tuple[BoostState, RowDerivatives, RowDerivatives]:
    """Returns derivatives that shape the trees, and those that fit their leaves.

    Both pairs are the same unless ``method.leaf_curvature`` differs from the curvature
    of the splits. Then "relative" divides both by the mean curvature of the splits,
    except for unit curvature, which says nothing about the scale of the loss: there
    each pair is divided by its own mean.

    Returns:
      The state, with new minimizers where parameters of the loss have moved them, and
      both pairs.
    """
    state, raw = differentiate(problem, state)
    scaling, weights = choose_scaling(problem), problem.data.weights
    return state, *scale_derivatives(scaling, weights, state, raw)


def differentiate(
    problem: Problem, state: BoostState, smooth: bool | None = None
) -> tuple[BoostState, tuple[RawDerivatives, ...]]:
    """Evaluates the derivatives of every row.

    Args:
      smooth: see :func:`jboost.objective.curvature.derivatives`.

    Returns:
      The state, as :func:`row_derivatives` does, and derivatives by each policy.
    """
    method, weights = problem.method, problem.data.weights
    objective = bind_objective(problem, state)
    if problem.loss.estimate is not None and state.minimizer is not None:
        # The parameters have changed, and with them the minimum of a row may move.
        objective = find_minima(objective, problem.data)
        state = state._replace(minimizer=objective.minimizer, kinks=objective.kinks)

    def evaluate(curvature):
        found = problem.arrays.given or derivatives(
            objective, state.scores, weights, curvature, smooth, raised=False
        )
        return RawDerivatives(*found)

    return state, tuple(evaluate(curvature) for curvature in _policies(method))


def scale_derivatives(
    scaling: Scaling,
    weights: Float[Array, " N"],
    state: BoostState,
    raw: tuple[RawDerivatives, ...],
) -> tuple[RowDerivatives, RowDerivatives]:
    """Returns both pairs of :func:`row_derivatives`."""

    def scale(policy, raw):
        gradient, positive = raw
        if policy.raised:
            coupling: Any = state.coupling
            start = coupling.start if policy.by_start else None
            positive = raise_curvature(positive, weights, start)
        mean = jnp.ones(state.scores.shape[0], jnp.float32)
        if scaling.relative and not policy.unit:
            mean = weighted_mean(positive, weights)
            flat = mean == 0  # no row has any curvature: all count alike
            positive = jnp.where(flat[:, None], 1.0, positive)
            mean = _stabilise(mean, flat, state)
        return RowDerivatives(gradient, positive, mean, jnp.ones_like(mean))

    shape, *rest = map(scale, scaling.policies, raw)
    if not rest:
        return shape, shape
    (fitted,) = rest
    if not scaling.policies[0].unit:
        return shape, fitted._replace(mean=shape.mean)
    mean = weighted_mean(fitted.curvature, weights)
    unit = 1 / jnp.where(mean > 0, mean, 1.0)
    return shape, fitted._replace(value_unit=unit)


def _policies(method):
    """Returns the policies of the splits and, if it is another one, of the leaves."""
    if method.leaf_curvature == method.curvature:
        return (method.curvature,)
    return method.curvature, method.leaf_curvature


def _stabilise(mean, flat, state):
    """Returns what "relative" divides by, from the mean curvature of each score."""
    if state.coupling is not None:
        # Scores that compete for a row (softmax) share the curvature of the row: the
        # sum of their means, in units in which all of them move alike.
        competing, move, _ = state.coupling
        squares = jnp.where(competing, jnp.square(move), 1.0)
        total = jnp.sum(jnp.where(competing, mean * squares, 0.0))
        mean = jnp.where(competing, total / squares, mean)
    # The larger of the first round and this one: where the fit flattens the loss
    # (logistic), regularization must not fade with the curvature.
    mean = jnp.maximum(mean, state.first_mean)
    return jnp.where(flat | ~(mean > 0), 1.0, mean)
