# SPDX-License-Identifier: Apache-2.0
"""Minimizers of the rows' own losses, with derivatives.

In: a traced loss bound to its data. Out: minimizers [K, N] that can be differentiated
in all that the loss reads, and which of them are at a kink.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jboost.numerics.derivatives import differentiable
from jboost.objective.evaluation import (
    Objective,
    gradients,
    hessian_matrices,
    loss_values,
)
from jboost.objective.minimizers import find_minimizers

_SIDE = 2.0**-20  # relative distance at which slopes beside a minimizer are evaluated
_LEAST_SIDE = 1e-36  # the same distance from 0
_FARTHER = 1024.0  # times that distance: there a smooth slope is as many times steeper
_SAME = 0.1  # of the slope farther away: so steep only a slope that jumps is
_JUMP = 2.0**-10  # of the slope far away: a smaller jump may be rounding


def locate_minimizers(objective: Objective, num_rows: int) -> Float[Array, "K N"]:
    """Returns what :func:`find_minimizers` finds, with derivatives.

    With g and h the derivatives of a row's loss l at its minimizer F*, and d the change
    of a quantity at a fixed score: dF* = -dg / h. At a kink, where l is continuous and
    g jumps, the kink moves by -(dl(F*+) - dl(F*-)) / (g(F*+) - g(F*-)); the same
    quotient, at a greater distance, replaces -dg / h where h is 0. Missing minimizers
    do not move.
    """
    loss, arrays = objective.loss, objective._replace(loss=None, minimizer=None)
    return differentiable(
        partial(_find, loss, num_rows), partial(_derive, loss), arrays
    )


def _find(loss, num_rows, arrays):
    return find_minimizers(arrays._replace(loss=loss), num_rows)


def _derive(loss, minimizer, operands, tangents):
    known = jnp.isfinite(minimizer)
    point = jnp.where(known, minimizer, 0.0)

    def slope(arrays):
        return gradients(arrays._replace(loss=loss), point)

    _, change = jax.jvp(slope, operands, tangents)
    objective = operands[0]._replace(loss=loss)
    matrices = hessian_matrices(objective, point)
    hessian = jnp.diagonal(matrices, axis1=1, axis2=2).T
    smooth = (hessian > 0) & jnp.isfinite(hessian)

    def along(k):
        """Returns which rows are at a kink of score k, and how that and others move."""
        kinked = find_kinked(objective, point, k)
        side = jnp.where(kinked, _near(point[k]), 1 + jnp.abs(point[k]))

        def values(arrays):
            above, below = (
                loss_values(arrays._replace(loss=loss), _add(point, k, distance))
                for distance in (side, -side)
            )
            return above - below

        _, change = jax.jvp(values, operands, tangents)
        jump = _rise(objective, point, k, side)
        moves = (jump > 0) & jnp.isfinite(jump)
        return kinked, jnp.where(moves, -change / jnp.where(moves, jump, 1.0), 0.0)

    kinked, beside = jax.lax.map(along, jnp.arange(len(point), dtype=jnp.int32))
    smooth &= ~kinked
    inside = -change / jnp.where(smooth, hessian, 1.0)
    return jnp.where(known, jnp.where(smooth, inside, beside), 0.0)


def find_kinked(
    objective: Objective, point: Float[Array, "K N"], k: Int32[Array, ""]
) -> Bool[Array, " N"]:
    """Returns the rows whose slope jumps at a point, along score k."""
    near = _near(point[k])
    jump = _rise(objective, point, k, near)
    farther = _rise(objective, point, k, _FARTHER * near)
    away = _rise(objective, point, k, 1 + jnp.abs(point[k]))
    least = jnp.maximum(_SAME * farther, _JUMP * away)
    return jax.lax.stop_gradient((jump > 0) & (jump > least))


def _near(point):
    return _SIDE * jnp.abs(point) + _LEAST_SIDE


def _rise(objective, point, k, distance):
    """Returns by how much the slope rises from one side of a point to the other."""
    above, below = (
        gradients(objective, _add(point, k, d))[k] for d in (distance, -distance)
    )
    return above - below


def _add(point, k, distance):
    along = (jnp.arange(len(point), dtype=jnp.int32) == k)[:, None]
    return point + jnp.where(along, distance[None], 0.0)
