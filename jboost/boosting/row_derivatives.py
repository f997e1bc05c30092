# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every row at the start of a round, and what they are divided by.

In: an objective and scores. Out: two pairs of gradient and curvature: one shapes the
trees, the other fits their leaves.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.boosting.state import BoostState, Problem, bind_objective, find_minima
from jboost.objective.curvature import derivatives
from jboost.objective.evaluation import mean_of_rows


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


def row_derivatives(
    problem: Problem, state: BoostState, smooth: bool | None = None
) -> tuple[BoostState, RowDerivatives, RowDerivatives]:
    """Returns derivatives that shape the trees, and those that fit their leaves.

    Both pairs are the same unless ``method.leaf_curvature`` differs from the curvature
    of the splits. Then "relative" divides both by the mean curvature of the splits,
    except for unit curvature, which says nothing about the scale of the loss: there
    each pair is divided by its own mean.

    Args:
      smooth: see :func:`jboost.objective.curvature.derivatives`.

    Returns:
      The state, with new minimizers where parameters of the loss have moved them, and
      both pairs.
    """
    method, weights = problem.method, problem.data.weights
    objective = bind_objective(problem, state)
    if problem.loss.estimate is not None and state.minimizer is not None:
        # The parameters have changed, and with them the minimum of a row may move.
        objective = find_minima(objective, problem.data)
        state = state._replace(minimizer=objective.minimizer, kinks=objective.kinks)

    def evaluate(curvature):
        gradient, positive = problem.arrays.given or derivatives(
            objective, state.scores, weights, curvature, smooth
        )
        mean = jnp.ones(state.scores.shape[0], jnp.float32)
        if method.regularization == "relative" and curvature != "unit":
            mean = mean_of_rows(objective, positive, weights)
            flat = mean == 0  # no row has any curvature: all count alike
            positive = jnp.where(flat[:, None], 1.0, positive)
            mean = _stabilise(mean, flat, state)
        return RowDerivatives(gradient, positive, mean, jnp.ones_like(mean))

    shape = evaluate(method.curvature)
    if method.leaf_curvature == method.curvature:
        return state, shape, shape
    fitted = evaluate(method.leaf_curvature)
    if method.curvature != "unit":
        return state, shape, fitted._replace(mean=shape.mean)
    mean = mean_of_rows(objective, fitted.curvature, weights)
    unit = 1 / jnp.where(mean > 0, mean, 1.0)
    return state, shape, fitted._replace(value_unit=unit)


def _stabilise(mean, flat, state):
    """Returns what "relative" divides by, from the mean curvature of each score."""
    if state.coupling is not None:
        # Scores that compete for a row (softmax) share the curvature of the row.
        competing = state.coupling.competing
        mean = jnp.where(competing, jnp.sum(competing, dtype=mean.dtype) * mean, mean)
    # The larger of the first round and this one: where the fit flattens the loss
    # (logistic), regularization must not fade with the curvature.
    mean = jnp.maximum(mean, state.first_mean)
    return jnp.where(flat | ~(mean > 0), 1.0, mean)
