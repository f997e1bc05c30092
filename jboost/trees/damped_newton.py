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
from jboost.objective.diagonals import MANY_SCORES
from jboost.objective.evaluation import (
    gradients,
    hessians,
    loss_values,
    mean_hessian,
    weighted_mean,
)
from jboost.objective.products import mean_product

_NEWTON_STEPS = 50  # at most, for K numbers
_PRODUCTS = 30  # with the Hessian of many scores, at most, for a step
_SOLVED = 1e-4  # of the largest slope: what such a step may leave
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
        if len(scores) > MANY_SCORES:
            proposal = _propose_for_many(objective, scores, state, slopes, weights)
        else:
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
    unit = _find_units(jnp.diagonal(hessian), sizes)
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


class _Solution(NamedTuple):
    """Where the conjugate gradients of a step stand, in standard units.

    Attributes:
      number: products so far.
      step: minimizes the parabola along the directions so far.
      left: the slope after the step, negated.
      along: the next direction.
      product: of what is left, preconditioned, with itself.
      convex: whether no curvature so far was negative.
    """

    number: Int32[Array, ""]
    step: Float[Array, " K"]
    left: Float[Array, " K"]
    along: Float[Array, " K"]
    product: Float[Array, ""]
    convex: Bool[Array, ""]


class _Parabola(NamedTuple):
    """What a step is made from, besides products with the mean Hessian.

    Attributes:
      unit: the standard unit of each score.
      own: the curvature of each score, damped; the preconditioner.
      damping: added to the curvature.
      enough: a slope that may be left.
    """

    unit: Float[Array, " K"]
    own: Float[Array, " K"]
    damping: Float[Array, ""]
    enough: Float[Array, ""]


def _propose_for_many(objective, scores, state, slopes, weights):
    """Does what :func:`_propose` does by conjugate gradients, without the Hessian.

    They are preconditioned by the diagonal and end where the slope along no score is
    more than rounding, or much less than at first; or at a negative curvature.
    """

    def unfinished(found):
        numpy = for_branches()
        more = numpy.asarray(found.number) < _PRODUCTS
        steep = numpy.max(numpy.abs(numpy.asarray(found.left))) > parabola.enough
        return more & numpy.asarray(found.convex) & steep

    def improve(found):
        along = _in_own_units(parabola.unit, found.along)
        product = mean_product(objective, scores, weights, along)
        return _follow(found, parabola, product)

    diagonal = hessians(objective, scores)
    sizes = weighted_mean(_find_magnitudes(slopes), weights)
    means = weighted_mean(slopes, weights), weighted_mean(diagonal, weights)
    parabola, start = _begin_step(state.damping, sizes, *means)
    found = repeat_while(unfinished, improve, start)
    return _end_step(state.point, parabola, found)


@elementwise
def _find_magnitudes(numpy, values):
    return numpy.abs(values)


@elementwise
def _in_own_units(numpy, unit, along):
    del numpy
    return unit * along


@stage
def _begin_step(damping, sizes, slope, curvature):
    unit = _find_units(curvature, sizes)
    own, slope = jnp.abs(curvature) * unit * unit, slope * unit
    size = jnp.maximum(jnp.max(own), 1e-30)
    noise = ROUNDING * jnp.max(unit * sizes)
    slope = jnp.where(jnp.abs(slope) > noise, slope, 0.0)
    enough = jnp.maximum(noise, _SOLVED * jnp.max(jnp.abs(slope)))
    damping = damping * size
    parabola = _Parabola(unit, own + damping, damping, enough)
    along = -slope / parabola.own
    convex = jnp.min(curvature * unit * unit) >= -_CONCAVE * size
    zero, product = jnp.zeros_like(slope), jnp.sum(-slope * along)
    return parabola, _Solution(jnp.int32(0), zero, -slope, along, product, convex)


@stage
def _follow(found, parabola, product) -> _Solution:
    moved = parabola.unit * product + parabola.damping * found.along
    bend = jnp.sum(found.along * moved)
    least = jnp.sum(parabola.own * jnp.square(found.along))
    convex = bend >= -_CONCAVE * least
    bend = jnp.where(bend > 0, bend, least)
    length = found.product / jnp.where(bend > 0, bend, 1.0)
    length = jnp.where(convex | (found.number == 0), length, 0.0)
    left = found.left - length * moved
    scaled = left / parabola.own
    after = jnp.sum(left * scaled)
    share = after / jnp.where(found.product > 0, found.product, 1.0)
    return _Solution(
        number=found.number + 1,
        step=found.step + length * found.along,
        left=left,
        along=scaled + share * found.along,
        product=after,
        convex=found.convex & convex,
    )


@stage
def _end_step(point, parabola, found) -> _NewtonStep:
    # Without a product, the step of the diagonal.
    step = jnp.where(found.number > 0, found.step, found.along)
    size = jnp.max(parabola.own)
    length = jnp.max(jnp.abs(step)) * jnp.maximum(1.0, jnp.sqrt(size))
    return _NewtonStep(point + parabola.unit * step, length, found.convex)


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


def _find_units(curvature, sizes):
    """Powers of two, by which scores of smaller curvature are multiplied.

    Scores without any curvature (the center of Laplace's distribution) are compared by
    the mean magnitudes of their gradients.
    """
    curvature = jnp.abs(curvature)
    ratio = curvature / jnp.maximum(jnp.max(curvature), 1e-30)
    steepness = sizes / jnp.maximum(jnp.max(sizes), 1e-30)
    ratio = jnp.where(curvature > 0, jnp.sqrt(ratio), steepness)
    return jnp.exp2(jnp.where(ratio > 0, jnp.round(-jnp.log2(ratio)), 0.0))
