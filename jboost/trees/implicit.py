# SPDX-License-Identifier: Apache-2.0
"""Derivatives of exact solutions: by how much a minimum moves if its problem changes.

Tangents follow from the implicit function theorem where the slope crosses 0 smoothly.
At a kink of the loss they are those of the rows that have the kink.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.numerics.exact import sum_by_group
from jboost.objective.evaluation import gradients, weighted_mean
from jboost.objective.minimizers import find_kinked
from jboost.objective.tracing import TracedLoss
from jboost.trees.leaf_operations import derive_selected

_BALANCED = 1e-3  # |slope| at a minimum, of the sum of magnitudes
_FLAT = 1e-5  # relative curvature of a direction that counts as having none
_CLOSE = 2.0**-21  # relative distance of a few floats


def derive_solution(
    loss: TracedLoss,
    slope: Callable[..., Any],
    value: Float[Array, " G"],
    operands: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> Float[Array, " G"]:
    """Returns the tangent of a solution of :func:`jboost.trees.leaves.solve_groups`.

    With S(c) the slope of a problem: -dS / S'(c) at a root of S where S'(c) > 0. A
    minimum at the kink of a row's loss moves with the row, by F* - F; one in the middle
    of an interval where S = 0 moves with the rows at both ends, and its derivative is
    NaN if the ends are not at the minimizers of rows. A value that is no minimum moves
    with the step if it equals the step, and else not at all.

    ``slope`` takes an objective, groups and c; it returns S(c) and its rounding error.
    The operands are the objective, its groups, the step and ``wanted``.
    """
    arrays, groups, step, wanted = operands
    objective = arrays._replace(loss=loss)
    l1 = 0.0 if groups.l1 is None else groups.l1

    def level(arrays, groups, c):
        found = slope(arrays._replace(loss=loss), groups, c)[0]
        return found if groups.l1 is None else found + groups.l1 * jnp.sign(value)

    def change_of(arrays, groups):
        return level(arrays, groups, value)

    here, change = jax.jvp(change_of, (arrays, groups), tangents[:2])
    _, curve = jax.jvp(
        lambda c: level(arrays, groups, c), (value,), (jnp.ones_like(value),)
    )
    pull = jnp.abs(gradients(objective, _moved(groups, value))[groups.k])
    if groups.direction is not None:
        pull = pull * jnp.abs(groups.direction)
    size = rows = sum_by_group(pull, groups.group, len(value), groups.weights)
    size = size + jnp.abs(groups.penalty * value)
    if groups.pull is not None:
        size = size + jnp.abs(groups.pull)
    balanced = jnp.abs(here) <= _BALANCED * size
    if groups.l1 is not None:  # at 0 the kink of |c| holds it
        balanced &= (value != 0) | (l1 == 0)
    crosses = balanced & (curve > 0)
    inside = -change / jnp.where(crosses, curve, 1.0)
    held = jnp.where(value == step, tangents[2], 0.0)
    level_interval = balanced & ~crosses & (rows > 0)
    moved = jnp.where(crosses, inside, jnp.where(level_interval, jnp.nan, held))
    if objective.minimizer is not None:
        beside, at_kink, between = _follow_rows(objective, groups, value, tangents)
        moved = jnp.where(at_kink | (level_interval & between), beside, moved)
    return jnp.where(wanted, moved, tangents[2])


def _moved(groups, c):
    """Returns the scores after adding c times the direction."""
    change = c[groups.group]
    if groups.direction is not None:
        change = change * groups.direction
    return groups.scores.at[groups.k].add(change)


def _follow_rows(objective, groups, value, tangents):
    """Returns the tangents of the kinks that each value is at, or between.

    Masks say whether a value is at a kink, and whether it is between two.
    """
    k, minimizer, scores = groups.k, objective.minimizer, groups.scores[groups.k]
    known = jnp.isfinite(minimizer[k])
    point = groups.scores.at[k].set(jnp.where(known, minimizer[k], scores))
    counts = known & (groups.weights > 0) & find_kinked(objective, point, k)
    key = jnp.where(known, minimizer[k], 0.0) - scores
    moved = tangents[0].minimizer[k] - tangents[1].scores[k]
    close = _CLOSE * (jnp.abs(scores) + jnp.abs(key))
    if groups.direction is not None:
        counts &= groups.direction != 0
        along = jnp.where(counts, groups.direction, 1.0)
        key, close = key / along, close / jnp.abs(along)
        moved = (moved - key * tangents[1].direction) / along
    group = jnp.where(counts, groups.group, len(value))
    here = jnp.append(value, jnp.nan)[group]
    at_kink = counts & (jnp.abs(key - here) <= close)
    key = jnp.where(at_kink, here, key)
    beside, between = derive_selected(
        value, key, moved, groups.weights, counts, groups.group
    )
    at_kink = jax.ops.segment_max(at_kink.astype(jnp.int32), group, len(value) + 1)
    return beside, at_kink[: len(value)] > 0, between


def derive_joint_start(
    loss: TracedLoss,
    start: Float[Array, " K"],
    operands: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> Float[Array, " K"]:
    """Returns the tangent of a solution of ``minimise_jointly``: -H^+ dg.

    ``start`` minimizes the mean loss; g is the mean gradient there, H its derivative.
    The operands are the objective, the offset and the weights.
    """
    objective, offset, weights = operands[0]._replace(loss=loss), *operands[1:]

    def balance(arrays, offset, weights, c=start):
        objective = arrays._replace(loss=loss)
        rows = gradients(objective, offset + c[:, None])
        return weighted_mean(rows, weights)

    _, change = jax.jvp(balance, operands, tangents)
    hessian = jax.jacfwd(partial(balance, *operands))(start)
    unit = jnp.sqrt(jnp.abs(jnp.diagonal(hessian)))
    unit = 1 / jnp.where(unit > 0, unit, 1.0)
    inverse = jnp.linalg.pinv(hessian * jnp.outer(unit, unit), rtol=_FLAT)
    slopes = jnp.abs(gradients(objective, offset + start[:, None]))
    lost = jnp.all(hessian == 0, axis=1)
    lost &= weighted_mean(slopes, weights) > 0
    step = jnp.matmul(inverse, unit * change, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(lost, jnp.nan, -unit * step)
