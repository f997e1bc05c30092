# SPDX-License-Identifier: Apache-2.0
"""Finds how the scores of a loss interact, for K > 1.

In: a traced loss bound to its data, the scores that training starts from. Out: which
scores interact, whether they compete, and the size of their curvatures.

Scores may have any units: a mean in dollars beside the logarithm of a scale. Numbers of
different scores must not be added, or a change of units would change the model.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.entry.stages import elementwise, stage
from jboost.numerics.derivatives import round_alone
from jboost.objective.diagonals import MANY_SCORES
from jboost.objective.evaluation import (
    Coupling,
    Objective,
    hessians,
    map_hessians,
    mean_hessian,
    row_products,
    weighted_mean,
)
from jboost.objective.information import summarize_information
from jboost.objective.products import find_dependent, find_flat_direction

_LEAST = float(np.finfo(np.float32).tiny)
_ZERO = 1e-2  # of a sum of magnitudes: a sum that says nothing in float32
_TAKES_PART = 1e-5  # entry of a direction of length 1, for scores that it moves


def find_coupling(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Coupling | None:
    """Describes the interaction of K scores at the start; None for K = 1.

    The Fisher information takes the place of the Hessian where there is one.

    Scores compete if moving them together in some direction changes no row's loss. The
    direction is an eigenvector of the mean Hessian, with eigenvalue 0, once each score
    is measured in units in which its mean curvature is 1.
    """
    num_scores = scores.shape[0]
    if num_scores == 1:
        return None
    if objective.loss.information is None and num_scores > MANY_SCORES:
        return _find_of_many(objective, scores, weights)
    if objective.loss.information is None:
        direction, along = _find_direction(mean_hessian(objective, scores, weights))
        sums = map_hessians(objective, scores, _summarize, along)
        return _conclude(weighted_mean(sums, weights), direction, along)
    # A likelihood need not have second derivatives (Laplace).
    rows = summarize_information(objective, scores, _flatten)
    mean = weighted_mean(rows, weights).reshape(num_scores, num_scores)
    direction, along = _find_direction(mean)
    sums = summarize_information(objective, scores, _summarize, along)
    found = _conclude(weighted_mean(sums, weights), direction, along)
    own = jnp.where(found.competing, 0.0, jnp.diagonal(mean))
    return found._replace(start=own)


def _find_of_many(objective, scores, weights):
    """Does the same by products with the Hessians, none of which is made.

    Where a product vanishes, the parts of a sum that oppose those of the score itself
    are as large: twice the latter stand for the sum of all magnitudes.
    """
    diagonal = hessians(objective, scores)
    unit = _find_units(weighted_mean(diagonal, weights))
    direction = find_flat_direction(objective, scores, weights, unit)
    along = _scale(unit, direction)
    rows = diagonal, row_products(objective, scores, along)
    parts = *rows, find_dependent(objective, scores)
    means = [weighted_mean(_magnitudes(part), weights) for part in parts]
    return _conclude(_list_sums(means, along), direction, along)


@elementwise
def _scale(numpy, unit, direction):
    del numpy
    return unit * direction


@elementwise
def _magnitudes(numpy, values):
    return numpy.abs(values).astype(np.float32)


@stage
def _list_sums(means, along):
    own, total, others = means
    return jnp.stack([own, others, 2 * own * jnp.abs(along), total])


def _flatten(rows):
    return rows.reshape(len(rows), -1).T


@stage
def _find_direction(mean):
    """Returns the eigenvector, in those units and in the scores' own."""
    mean = _finite(mean)
    unit = _find_units(jnp.diagonal(mean))
    # eigh adds the transpose.
    values, axes = jnp.linalg.eigh(round_alone(unit[:, None] * mean * unit[None, :]))
    direction = axes[:, jnp.argmin(jnp.abs(values))]
    # Whether scores compete is a constant; eigenvectors may have no derivative.
    return jax.lax.stop_gradient((direction, unit * direction))


@stage
def _find_units(diagonal):
    """Returns what makes each diagonal entry 1; 0 for those that are 0."""
    size = jnp.abs(_finite(diagonal))
    # A no-op bound that keeps XLA from replacing 1 / sqrt by an inexact rsqrt.
    root = jnp.maximum(jnp.sqrt(jnp.maximum(size, _LEAST)), _LEAST)
    return jnp.where(size > 0, 1 / root, 0.0)


def _summarize(rows, along):
    """Returns sums over the rows of each Hessian, [4, K, N]."""
    own = jnp.abs(jnp.diagonal(rows, axis1=1, axis2=2))
    others = jnp.sum(jnp.abs(rows), axis=2) - own
    every = jnp.abs(rows) @ jnp.abs(along)
    return jnp.stack([own.T, others.T, every.T, jnp.abs(rows @ along).T])


@stage
def _conclude(means, direction, along):
    own, others, every, total = _finite(means)
    competing = jnp.abs(direction) >= _TAKES_PART
    competing &= jnp.all(total <= _ZERO * every) & (others > 0)
    start = jnp.where((others > 0) & ~competing, own, 0.0)
    return Coupling(competing, along, start)


def _finite(numbers):
    return jnp.where(jnp.isfinite(numbers), numbers, 0.0)
