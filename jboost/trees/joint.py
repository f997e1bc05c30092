# SPDX-License-Identifier: Apache-2.0
"""Leaf values that depend on each other, and their bounds under monotone constraints.

In: the gradient g, and a function that multiplies by the Hessian H. Out: leaf values w
that minimize b'w + w' A w / 2 with b = P'W g and A = P'W H P + l2 I, where P [N, L] is
the indicator of leaves and W the weights of rows. Conjugate gradients, preconditioned
by P'W h + l2, make this a truncated Newton method (Dembo and Steihaug 1983).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jboost.kernels.xla import add_halves, round_alone
from jboost.trees.tree import Tree


def bound_leaves(
    tree: Tree,
    sums: tuple[Float[Array, "K L"], Float[Array, "K L"], Float[Array, "K 1"]],
    monotone: Int32[Array, " F"],
    bounds: Float[Array, "2"],
    num_bins: int,
) -> Float[Array, "K L 2"]:
    """Returns bounds that separate the leaves below every split by a monotone feature.

    From the root down, the two sides of such a split are kept apart by the mean of the
    Newton steps of both, within the bounds of the node, as in XGBoost. With a single
    score, a split with its sides in the wrong order is not admitted. Here it may be
    right for other scores, so that both sides get that mean as bound.

    Args:
      tree: the tree; its splits have a leading axis of length 1.
      sums: gradient and curvature of each leaf, and the penalty added to the curvature.
      monotone: the direction of each feature: 1 rising, -1 falling, 0 either.
      num_bins: the threshold of nodes that are not split, or that separate values
        from missing ones, which have no order.
    """
    gradient, curvature, penalty = sums
    num_scores, num_leaves = gradient.shape
    levels = [(gradient, curvature)]
    while levels[-1][0].shape[1] > 1:
        first, second = (
            jnp.sum(part.reshape(num_scores, -1, 2), axis=2) for part in levels[-1]
        )
        levels.append((first, second))
    levels.reverse()
    low, high = (jnp.broadcast_to(bound, (num_scores, 1)) for bound in bounds)
    for level, (slopes, weights) in enumerate(levels[1:]):
        nodes = slice(2**level - 1, 2 ** (level + 1) - 1)
        feature, threshold = tree.feature[0, nodes], tree.threshold[0, nodes]
        sign = jnp.where(threshold < num_bins - 1, monotone[feature], 0)
        weights = jnp.where(weights > 0, weights + penalty, jnp.inf)
        steps = (-slopes / weights).reshape(num_scores, -1, 2)
        middle = jnp.clip(jnp.mean(steps, axis=2), low, high)
        rising, falling = sign > 0, sign < 0
        lows = jnp.where(falling, middle, low), jnp.where(rising, middle, low)
        highs = jnp.where(rising, middle, high), jnp.where(falling, middle, high)
        low, high = (
            jnp.stack(sides, axis=2).reshape(num_scores, -1) for sides in (lows, highs)
        )
    return jnp.stack([low, high], axis=2).reshape(num_scores, num_leaves, 2)


_LEAST = 0.1  # share of a step that the slope check leaves
_CHECKS = 3


class Stopping(NamedTuple):
    """The stopping rules of the conjugate gradients.

    Attributes:
      steps: products with the Hessian, at most.
      residual: the share of the first squared residual, measured by 1 / M, that ends
        them.
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

    They are those of :func:`find_step`, shortened by :func:`shorten`.

    Args:
      slope_at: returns b after values have been added to the scores.
    """
    values = find_step(gradient, curvature, penalty, multiply, stopping)
    return shorten(values, gradient, slope_at, stopping)


def find_step(
    gradient: Float[Array, "C *L"],
    curvature: Float[Array, "C *L"],
    penalty: Float[Array, "..."],
    multiply: Callable[[Float[Array, "C *L"]], Float[Array, "C *L"]],
    stopping: Stopping,
) -> Float[Array, "C *L"]:
    """Returns leaf values by conjugate gradients.

    Args:
      gradient: b, the sum of each leaf.
      penalty: l2, in the units of the curvature.
      multiply: multiplies values of leaves by P'W H P.
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
    return jnp.where(jnp.any(values != 0, axis=0, keepdims=True), values, first)


def _dot(a, b):
    """Returns the product of vectors along the first axis, which keeps length 1."""
    return add_halves(round_alone(a * b))[None]


class _Check(NamedTuple):
    """A step that is shortened: its share, the slope there, evaluations."""

    share: Float[Array, "*L"]
    slope: Float[Array, "*L"]
    number: Int32[Array, ""]


def shorten(
    values: Float[Array, "C *L"],
    gradient: Float[Array, "C *L"],
    slope_at: Callable[[Float[Array, "C *L"]], Float[Array, "C *L"]],
    stopping: Stopping,
) -> Float[Array, "C *L"]:
    """Shortens a step until the slope of the loss along it is not positive at its end.

    ``stopping`` may allow a little. A longer step is shortened to where a parabola
    through both slopes is least.
    """
    before = _dot(values, gradient)

    def is_fine(check):
        # Half a step beyond the minimum of the parabola is good enough. A slope that
        # is not a number counts as one that rises.
        most = jnp.where(check.number > 1, 0.5, stopping.overshoot)
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
        found = _dot(values, slope_at(round_alone(share * values)))
        return _Check(share, found, check.number + 1)

    start = _Check(jnp.ones_like(before), jnp.zeros_like(before), jnp.int32(0))
    return jax.lax.while_loop(rises, evaluate, start).share * values


def multiply_by(triangles: Float[Array, "T L"], num_scores: int) -> Callable[..., Any]:
    """Returns the product with symmetric matrices, given by their upper triangles."""
    matrix = jnp.zeros((num_scores, num_scores, triangles.shape[1]), jnp.float32)
    first, second = np.triu_indices(num_scores)
    matrix = matrix.at[first, second].set(triangles).at[second, first].set(triangles)

    def multiply(values):
        return add_halves(round_alone(matrix * values[:, None, :]))

    return multiply
