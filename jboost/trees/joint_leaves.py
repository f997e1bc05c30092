# SPDX-License-Identifier: Apache-2.0
"""Solves for leaf values that depend on each other.

In: the gradient of the loss at the scores, a function that multiplies by its Hessian.
Out: leaf values. Where a loss couples the rows of several leaves, these are the values
of all leaves; where scores share a tree, the K values of each leaf, in a system of its
own. With P [N, L] the indicator of leaves, W the weights of the rows, H the Hessian:

    minimize  b'w + w' A w / 2,    b = P'W g,    A = P'W H P + l2 I

by conjugate gradients, preconditioned by the diagonal M = P'W h + l2 that a single
Newton step divides by: a truncated Newton method (Dembo and Steihaug 1983). Values that
are fitted one by one diverge where a loss couples many rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.numerics.derivatives import round_alone

_LEAST = 0.1  # share of a step that the slope check leaves
_CHECKS = 3


class Stopping(NamedTuple):
    """How far the conjugate gradients go.

    Attributes:
      steps: products with the Hessian, at most.
      residual: the share of the squared residual, measured by 1 / M, at which they end.
      least_bend: the least curvature along a direction, relative to the diagonal's.
      overshoot: the slope at the end of a step, relative to that at its start, up to
        which the step is not shortened.
    """

    steps: int
    residual: float
    least_bend: float
    overshoot: float


def solve_jointly(
    gradient: Float[Array, "C *L"],
    curvature: Float[Array, "C *L"],
    penalty: Float[Array, "..."],
    multiply: Callable[[Float[Array, "C *L"]], Float[Array, "C *L"]],
    slope_at: Callable[[Float[Array, "C *L"]], Float[Array, "C *L"]],
    stopping: Stopping,
) -> Float[Array, "C *L"]:
    """Returns leaf values; those along the first axis depend on each other.

    They end where the slope of the loss along them is not positive, or no more than
    ``stopping`` allows: a longer step is shortened to where a parabola through both
    slopes is least.

    Args:
      gradient: b, the sum of each leaf.
      curvature: the sum of the curvature of each leaf.
      penalty: l2, in the units of the curvature.
      multiply: multiplies values of leaves by P'W H P.
      slope_at: returns b after values have been added to the scores.
      stopping: how exactly to solve.
    """
    diagonal = jnp.where(curvature > 0, curvature + penalty, jnp.inf)

    def goes_on(state):
        *_, product, number = state
        unsolved = jnp.any(product > stopping.residual * at_start)
        return (number < stopping.steps) & unsolved

    def step(state):
        values, residual, direction, product, number = state
        along = jnp.where(jnp.isfinite(diagonal), multiply(direction), 0.0)
        along = along + round_alone(penalty * direction)
        bend = _dot(direction, along)
        goes = (bend > 0) & (product > 0)  # NaN and directions without a minimum stop
        # Far along a direction of little curvature the quadratic says nothing.
        own = _dot(jnp.where(jnp.isfinite(diagonal), diagonal, 0.0), direction**2)
        bend = jnp.maximum(bend, stopping.least_bend * own)
        length = jnp.where(goes, product / jnp.where(goes, bend, 1.0), 0.0)
        values = values + round_alone(length * direction)
        residual = residual - round_alone(length * along)
        scaled = residual / diagonal
        after = _dot(residual, scaled)
        share = after / jnp.where(product > 0, product, 1.0)
        direction = jnp.where(goes, scaled + round_alone(share * direction), 0.0)
        return values, residual, direction, jnp.where(goes, after, 0.0), number + 1

    first = -gradient / diagonal
    at_start = -_dot(gradient, first)
    start = (jnp.zeros_like(first), -gradient, first, at_start, jnp.int32(0))
    values, *_ = jax.lax.while_loop(goes_on, step, start)
    # Without a direction that bends upward, the step of the diagonal remains.
    values = jnp.where(jnp.any(values != 0, axis=0, keepdims=True), values, first)
    return _check_slope(values, gradient, slope_at, stopping.overshoot)


def _dot(a, b):
    """Returns the product of vectors along the first axis, which keeps length 1."""
    return jnp.sum(a * b, axis=0, keepdims=True)


class _Check(NamedTuple):
    """A step that is shortened: its share, the slope there, evaluations."""

    share: Float[Array, "*L"]
    slope: Float[Array, "*L"]
    number: Int32[Array, ""]


def _check_slope(values, gradient, slope_at, overshoot):
    """Shortens a step until the slope along it is hardly positive at its end."""
    before = _dot(values, gradient)

    def is_fine(check):
        # Half a step beyond the minimum of the parabola is good enough. A slope that
        # is not a number counts as one that rises.
        most = jnp.where(check.number > 1, 0.5, overshoot)
        return check.slope <= -before * most

    def rises(check):
        fine = jnp.all(is_fine(check))
        return (check.number == 0) | (~fine & (check.number <= _CHECKS))

    def evaluate(check):
        """Evaluates one gradient: the only place, because it is compiled."""
        slope = jnp.where(jnp.isfinite(check.slope), check.slope, jnp.inf)
        factor = jnp.clip(-before / (slope - before), _LEAST, 1.0)
        share = jnp.where(is_fine(check), check.share, check.share * factor)
        share = jnp.where(check.number > 0, share, 1.0)
        found = _dot(values, slope_at(share * values))
        return _Check(share, found, check.number + 1)

    start = _Check(jnp.ones_like(before), jnp.zeros_like(before), jnp.int32(0))
    return jax.lax.while_loop(rises, evaluate, start).share * values
