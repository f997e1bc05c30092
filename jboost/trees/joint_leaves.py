# SPDX-License-Identifier: Apache-2.0
"""Solves for all leaf values at once, where a loss couples the rows of several leaves.

In: the gradient of the loss at the scores, a function that multiplies by its Hessian.
Out: leaf values. With P [N, L] the indicator of leaves, W the weights of the rows, H
the Hessian:

    minimize  b'w + w' A w / 2,    b = P'W g,    A = P'W H P + l2 I

by conjugate gradients, preconditioned by the diagonal M = P'W h + l2 that a single
Newton step divides by. They end when the residual, measured by 1 / M, is a third of the
gradient: a truncated Newton method (Dembo and Steihaug 1983). Leaves that are fitted
one by one diverge where a loss couples many rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_STEPS = 5  # products with the Hessian, at most
_ENOUGH = 0.1  # of the squared residual, at which the steps end
_LEAST_BEND = 0.25  # least curvature along a direction, relative to the diagonal's
_LEAST = 0.1  # share of a step that the slope check leaves
_CHECKS = 3


def solve_jointly(
    gradient: Float[Array, " L"],
    curvature: Float[Array, " L"],
    penalty: Float[Array, ""],
    multiply: Callable[[Float[Array, " L"]], Float[Array, " L"]],
    slope_at: Callable[[Float[Array, " L"]], Float[Array, " L"]],
) -> Float[Array, " L"]:
    """Returns leaf values.

    They end where the slope of the loss along them is not positive: a step after which
    it rises is shortened to where a parabola through both slopes is least.

    Args:
      gradient: b, the sum of each leaf.
      curvature: the sum of the curvature of each leaf.
      penalty: l2, in the units of the curvature.
      multiply: multiplies values of leaves by P'W H P.
      slope_at: returns b after values have been added to the scores.
    """
    diagonal = jnp.where(curvature > 0, curvature + penalty, jnp.inf)

    def goes_on(state):
        *_, product, number = state
        return (number < _STEPS) & (product > _ENOUGH * at_start)

    def step(state):
        values, residual, direction, product, number = state
        along = jnp.where(jnp.isfinite(diagonal), multiply(direction), 0.0)
        along = along + penalty * direction
        bend = jnp.sum(direction * along)
        goes = (bend > 0) & (product > 0)  # NaN and directions without a minimum stop
        # Far along a direction of little curvature the quadratic says nothing.
        own = jnp.sum(jnp.where(jnp.isfinite(diagonal), diagonal, 0.0) * direction**2)
        bend = jnp.maximum(bend, _LEAST_BEND * own)
        length = jnp.where(goes, product / jnp.where(goes, bend, 1.0), 0.0)
        values = values + length * direction
        residual = residual - length * along
        scaled = residual / diagonal
        after = jnp.sum(residual * scaled)
        share = after / jnp.where(product > 0, product, 1.0)
        direction = jnp.where(goes, scaled + share * direction, 0.0)
        return values, residual, direction, jnp.where(goes, after, 0.0), number + 1

    first = -gradient / diagonal
    at_start = -jnp.sum(gradient * first)
    start = (jnp.zeros_like(first), -gradient, first, at_start, jnp.int32(0))
    values, *_ = jax.lax.while_loop(goes_on, step, start)
    # Without a direction that bends upward, the step of the diagonal remains.
    values = jnp.where(jnp.any(values != 0), values, first)
    return _check_slope(values, gradient, slope_at)


class _Check(NamedTuple):
    """A step that is shortened: its share, the slope there, evaluations."""

    share: Float[Array, ""]
    slope: Float[Array, ""]
    number: Int32[Array, ""]


def _check_slope(values, gradient, slope_at):
    """Shortens a step until the slope along it is hardly positive at its end."""
    before = jnp.sum(values * gradient)

    def rises(check):
        # Half a step beyond the minimum of the parabola is good enough. A slope that
        # is not a number counts as one that rises.
        fine = check.slope <= jnp.where(check.number > 1, -before / 2, 0.0)
        return (check.number == 0) | (~fine & (check.number <= _CHECKS))

    def evaluate(check):
        """Evaluates one gradient: the only place, because it is compiled."""
        slope = jnp.where(jnp.isfinite(check.slope), check.slope, jnp.inf)
        factor = jnp.clip(-before / (slope - before), _LEAST, 1.0)
        share = jnp.where(check.number > 0, check.share * factor, 1.0)
        found = jnp.sum(values * slope_at(share * values))
        return _Check(share, found, check.number + 1)

    start = _Check(jnp.float32(1), jnp.float32(0), jnp.int32(0))
    return jax.lax.while_loop(rises, evaluate, start).share * values
