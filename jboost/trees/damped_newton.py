# SPDX-License-Identifier: Apache-2.0
"""Minimizes the mean loss over K scores by damped Newton steps.

In: a loss bound to its data, offsets, a point. Out: the last point, and whether it is a
minimum.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.stages import elementwise, for_branches, repeat_while, stage
from jboost.objective.evaluation import (
    gradients,
    loss_values,
    mean_hessian,
    weighted_mean,
)

_NEWTON_STEPS = 50  # at most, for K numbers
_CONCAVE = 1e-4  # of the largest: a negative curvature that is none of rounding
ROUNDING = 2.0**-21  # of a mean in float32


@elementwise
def move_scores(numpy, offset, point):
    """Returns offset + point for every row, [K, N]."""
    del numpy
    return offset + point[:, None]


def damped_newton(objective, offset, weights, start, wanted):
    """Minimizes the mean loss of K scores by Levenberg-Marquardt.

    Scores are measured in units in which all of them curve alike, within a factor of 4
    (a mean in dollars beside the logarithm of a scale).

    Returns:
      The last point; whether it is a minimum, and no curvature on the way was negative.
    """

    def unfinished(state):
        numpy = for_branches()
        more = numpy.asarray(state.turn) < _NEWTON_STEPS
        return more & (numpy.asarray(state.moved) > 1e-6)

    def improve(state):
        scores = move_scores(offset, state.point)
        slopes = gradients(objective, scores)
        hessian = mean_hessian(objective, scores, weights)
        proposal = _propose(state, slopes, hessian, weights)
        values = loss_values(objective, move_scores(offset, proposal.point))
        return _accept(state, proposal, values, weights)

    values = loss_values(objective, move_scores(offset, start))
    state = _begin_newton(start, values, weights, wanted)
    return _conclude_newton(repeat_while(unfinished, improve, state))


class _Newton(NamedTuple):
    """Where Newton's method stands.

    Attributes:
      turn: number of steps tried.
      point: the best so far.
      damping: added to the curvatures, relative to the largest.
      loss: the mean loss at the point.
      moved: length of the last step, in standard units.
      convex: whether no curvature on the way was negative.
    """

    turn: Int32[Array, ""]
    point: Float[Array, " K"]
    damping: Float[Array, ""]
    loss: Float[Array, ""]
    moved: Float[Array, ""]
    convex: Bool[Array, ""]


class _NewtonStep(NamedTuple):
    """A step of Newton's method: where to, how long it is, what it saw."""

    point: Float[Array, " K"]
    length: Float[Array, ""]
    convex: Bool[Array, ""]


def _begin_newton(start, values, weights, wanted) -> _Newton:
    return _begin(start, weighted_mean(values, weights), wanted)


@elementwise
def _begin(numpy, start, loss, wanted) -> _Newton:
    first, damping = numpy.where(wanted, np.float32(1), 0.0), numpy.float32(1e-3)
    loss, yes = _or_infinite(numpy, loss), numpy.asarray(True)
    return _Newton(numpy.int32(0), start, damping, loss, first, yes)


@stage
def _propose(state, slopes, hessian, weights) -> _NewtonStep:
    sizes = weighted_mean(jnp.abs(slopes), weights)
    unit = _units(hessian, sizes)
    hessian = hessian * unit[:, None] * unit[None, :]
    size = jnp.maximum(jnp.max(jnp.abs(hessian)), 1e-30)
    curvature, axes = jnp.linalg.eigh(hessian)
    slope = (unit * weighted_mean(slopes, weights)) @ axes
    # What is left of a sum that should be 0 says nothing. Where there is no curvature
    # either (scores of softmax may all be shifted), it would be followed far away.
    noise = ROUNDING * jnp.max(unit * sizes)
    slope = jnp.where(jnp.abs(slope) > noise, slope, 0.0)
    step = -(axes @ (slope / (jnp.abs(curvature) + state.damping * size)))
    length = jnp.max(jnp.abs(step)) * jnp.maximum(1.0, jnp.sqrt(size))
    convex = jnp.min(curvature) >= -_CONCAVE * size
    return _NewtonStep(state.point + unit * step, length, convex)


def _accept(state, proposal, values, weights) -> _Newton:
    return _judge_step(state, proposal, weighted_mean(values, weights))


@elementwise
def _judge_step(numpy, state, proposal, loss) -> _Newton:
    """Takes the step if it lowers the loss, else damps the next one more."""
    loss, damping = _or_infinite(numpy, loss), state.damping
    # Close to the minimum the loss is flat to the last bits, the gradient is not.
    better = loss <= state.loss + ROUNDING * numpy.abs(state.loss)
    less = numpy.maximum(damping * np.float32(0.1), np.float32(1e-6))
    given_up = numpy.where(damping > 1e6, 0.0, state.moved)
    return _Newton(
        turn=state.turn + 1,
        point=numpy.where(better, proposal.point, state.point),
        damping=numpy.where(better, less, damping * 10),
        loss=numpy.where(better, loss, state.loss),
        moved=numpy.where(better, proposal.length, given_up),
        convex=state.convex & proposal.convex,
    )


@elementwise
def _conclude_newton(numpy, state):
    settled = (state.turn < _NEWTON_STEPS) & (state.damping <= 1e-3)
    return state.point, state.convex & settled & numpy.isfinite(state.loss)


def _or_infinite(numpy, loss):
    return numpy.where(numpy.isfinite(loss), loss, np.inf)


def _units(hessian, sizes):
    """Powers of two, by which scores of smaller curvature are multiplied.

    Scores without any curvature (the center of Laplace's distribution) are compared by
    the mean magnitudes of their gradients.
    """
    curvature = jnp.abs(jnp.diagonal(hessian))
    ratio = curvature / jnp.maximum(jnp.max(curvature), 1e-30)
    steepness = sizes / jnp.maximum(jnp.max(sizes), 1e-30)
    ratio = jnp.where(curvature > 0, jnp.sqrt(ratio), steepness)
    return jnp.exp2(jnp.where(ratio > 0, jnp.round(-jnp.log2(ratio)), 0.0))
