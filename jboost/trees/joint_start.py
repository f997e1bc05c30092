# SPDX-License-Identifier: Apache-2.0
"""Finds where training starts if K > 1 scores interact: damped Newton and a search.

In: a loss bound to its data, offsets. Out: argmin_c of the weighted loss at scores
offset + c; and the search along one score, which a single score uses, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.stages import map_points, stage
from jboost.objective.evaluation import (
    Objective,
    gradients,
    loss_values,
    mean_hessian,
    mean_of_rows,
)
from jboost.trees.leaves import Groups, locate_minima

_NEWTON_STEPS = 50  # at most, for K numbers
_COMPARABLE = 2.0**-10  # ratio of lengths down to which scores share a unit
_SEARCHED_ROWS = 4096  # at most, in the search along one score after another
_SEARCHED_NUMBERS = 2**15  # at most, these rows times K
_SWEEPS = 4  # over all K scores, before each run of Newton's method
_TURNS = 6  # of searches and Newton's method
_CONCAVE = 1e-4  # of the largest: a negative curvature that is none of rounding
_BALANCED = 1e-3  # |mean gradient| / mean |gradient| at a minimum
ROUNDING = 2.0**-21  # of a mean in float32


@stage
def one_group(
    offset: Float[Array, "K N"], weights: Float[Array, " N"], k: Int32[ArrayLike, ""]
) -> Groups:
    """Puts all rows into one group: the problem of a constant added to score k."""
    return Groups(
        jnp.int32(k), offset, weights, None, jnp.zeros(offset.shape[1], jnp.int32),
        jnp.zeros(1, jnp.float32),
    )  # fmt: skip


def best_of(
    objective: Objective, groups: Groups, starts: Float[Array, " S"]
) -> Float[Array, ""]:
    """Returns the start of the least mean loss."""
    losses = map_points(lambda c: total_loss(objective, groups, c), starts)
    return _choose_least(starts, losses)


@stage
def _choose_least(starts, losses):
    return starts[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]


@stage
def begin_at(groups, k, start):
    """Moves the problem to a start, with a small first step from there."""
    moved = groups._replace(scores=groups.scores.at[k].add(start))
    return moved, jnp.maximum(jnp.abs(start), 1.0)[None] * 2.0**-10


def total_loss(
    objective: Objective, groups: Groups, c: Float[ArrayLike, ""]
) -> Float[Array, ""]:
    """Returns the mean loss with c added to the groups' score."""
    scores = _add_to_score(groups, c)
    return mean_of_rows(objective, loss_values(objective, scores), groups.weights)


@stage
def _add_to_score(groups, c):
    return groups.scores.at[groups.k].add(c)


@stage
def minimise_jointly(objective, offset, weights):
    """Minimizes the mean loss over K scores that interact.

    Damped Newton from 0 is enough for a convex loss in ordinary units. Otherwise it is
    restarted where a search along one score after another ends, as long as that
    helps. The search goes by slopes alone: it also finds where the gradients balance if
    they are not the derivatives of the values (``jax.lax.stop_gradient``).
    """
    few = _take_rows(objective, offset, weights)
    zero = jnp.zeros(offset.shape[0], jnp.float32)

    def unfinished(state):
        turn, _, done = state
        return (turn < _TURNS) & ~done

    def descend(state):
        turn, best, _ = state
        last = jnp.where(turn == 1, zero, best.point)
        begin = jax.lax.cond(
            turn == 0, lambda c: zero, lambda c: _search_along(*few, c), last
        )
        start = _judge(objective, offset, weights, begin)
        wanted = (turn == 0) | _is_better(start, best)
        end, settled = _damped_newton(objective, offset, weights, begin, wanted)
        end = _judge(objective, offset, weights, end)
        end = _choose(_is_better(start, end), start, end)
        done = jnp.where(turn == 0, settled, (turn > 1) & ~wanted)
        return turn + 1, _choose(wanted, end, best), done

    nowhere = _Merit(zero, jnp.asarray(False), jnp.float32(jnp.inf))
    state = (jnp.int32(0), nowhere, jnp.asarray(False))
    _, best, _ = jax.lax.while_loop(unfinished, descend, state)
    if few[1].shape == offset.shape:
        return best.point

    def refine(c):
        return _search_along(objective, offset, weights, c)

    return jax.lax.cond(best.balanced, lambda c: c, refine, best.point)


def _take_rows(objective, offset, weights):
    """Takes at most 4,096 rows, one from each stretch of rows."""
    num_scores, number = offset.shape
    most = min(_SEARCHED_ROWS, -(-_SEARCHED_NUMBERS // num_scores))
    if number <= most:
        return objective, offset, weights
    edges = np.linspace(0, number, most + 1).astype(int)
    rows = np.random.default_rng(0).integers(edges[:-1], edges[1:]).astype(np.int32)
    targets = jax.tree.map(lambda target: target[rows], objective.targets)
    few = objective._replace(targets=targets, minimizer=None)
    return few, offset[:, rows], weights[rows]


def _search_along(objective, offset, weights, start):
    """Minimizes along one score after another, by slopes alone."""
    num_scores = offset.shape[0]
    objective = objective._replace(minimizer=None)
    powers = 16.0 ** np.arange(-6, 9)
    grid = np.concatenate([-powers, [0.0], powers]).astype(np.float32)

    def search(turn, c):
        k = turn % num_scores
        groups = one_group(offset + c[:, None], weights, k)
        begin = best_of(objective, groups, jnp.asarray(grid))
        moved, step = begin_at(groups, k, begin)
        found = locate_minima(objective, moved, step, jnp.ones(1, bool))
        root = jnp.where(found.strict | found.jump, found.point, 0.0)[0]
        return c.at[k].add(begin + root)

    return jax.lax.fori_loop(0, _SWEEPS * num_scores, search, start)


class _Merit(NamedTuple):
    """What speaks for a point: whether its gradients balance, then its mean loss."""

    point: Float[Array, " K"]
    balanced: Bool[Array, ""]
    loss: Float[Array, ""]


def _judge(objective, offset, weights, point):
    scores = offset + point[:, None]
    slopes = gradients(objective, scores)
    sizes = mean_of_rows(objective, jnp.abs(slopes), weights)
    sums = jnp.abs(mean_of_rows(objective, slopes, weights))
    balanced = jnp.all((sums <= _BALANCED * sizes) & (sizes > 0))
    loss = mean_of_rows(objective, loss_values(objective, scores), weights)
    return _Merit(point, balanced, jnp.where(jnp.isnan(loss), jnp.inf, loss))


def _is_better(one, other):
    margin = jnp.where(jnp.isfinite(other.loss), ROUNDING * jnp.abs(other.loss), 0.0)
    less = one.loss < other.loss - margin
    same = one.balanced == other.balanced
    return jnp.isfinite(one.loss) & jnp.where(same, less, one.balanced)


def _choose(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _damped_newton(objective, offset, weights, start, wanted):
    """Minimizes the mean loss of K scores by Levenberg-Marquardt.

    A score is measured in units in which it curves like the others, if it curves less
    than a millionth as much (a mean in dollars beside the logarithm of a scale).

    Returns:
      The last point; whether it is a minimum, and no curvature on the way was negative.
    """

    def mean_loss(c):
        values = loss_values(objective, offset + c[:, None])
        value = mean_of_rows(objective, values, weights)
        return jnp.where(jnp.isfinite(value), value, jnp.inf)

    def unfinished(state):
        count, _, _, _, moved, _ = state
        return (count < _NEWTON_STEPS) & (moved > 1e-6)

    def improve(state):
        count, c, damping, loss, moved, convex = state
        scores = offset + c[:, None]
        rows = gradients(objective, scores)
        hessian = mean_hessian(objective, scores, weights)
        sizes = mean_of_rows(objective, jnp.abs(rows), weights)
        unit = _units(hessian, sizes)
        hessian = hessian * unit[:, None] * unit[None, :]
        size = jnp.maximum(jnp.max(jnp.abs(hessian)), 1e-30)
        curvature, axes = jnp.linalg.eigh(hessian)
        slope = (unit * mean_of_rows(objective, rows, weights)) @ axes
        # What is left of a sum that should be 0 says nothing. Where there is no
        # curvature either (scores of softmax may all be shifted), it would be followed
        # far away.
        noise = ROUNDING * jnp.max(unit * sizes)
        slope = jnp.where(jnp.abs(slope) > noise, slope, 0.0)
        step = -(axes @ (slope / (jnp.abs(curvature) + damping * size)))
        new_loss = mean_loss(c + unit * step)
        # Close to the minimum the loss is flat to the last bits, the gradient is not.
        better = new_loss <= loss + ROUNDING * jnp.abs(loss)
        length = jnp.max(jnp.abs(step)) * jnp.maximum(1.0, jnp.sqrt(size))
        return (
            count + 1,
            jnp.where(better, c + unit * step, c),
            jnp.where(better, jnp.maximum(damping / 10, 1e-6), damping * 10),
            jnp.where(better, new_loss, loss),
            jnp.where(better, length, jnp.where(damping > 1e6, 0.0, moved)),
            convex & (jnp.min(curvature) >= -_CONCAVE * size),
        )

    first = jnp.where(wanted, jnp.float32(1), 0.0)
    state = (
        jnp.int32(0), start, jnp.float32(1e-3), mean_loss(start), first,
        jnp.asarray(True),
    )  # fmt: skip
    state = jax.lax.while_loop(unfinished, improve, state)
    count, end, damping, loss, _, convex = state
    settled = (count < _NEWTON_STEPS) & (damping <= 1e-3) & jnp.isfinite(loss)
    return end, convex & settled


def _units(hessian, sizes):
    """Powers of two, by which scores of far smaller curvature are multiplied.

    Scores without any curvature (the center of Laplace's distribution) are compared by
    the mean magnitudes of their gradients.
    """
    curvature = jnp.abs(jnp.diagonal(hessian))
    ratio = curvature / jnp.maximum(jnp.max(curvature), 1e-30)
    steepness = sizes / jnp.maximum(jnp.max(sizes), 1e-30)
    ratio = jnp.where(curvature > 0, jnp.sqrt(ratio), steepness)
    small = (ratio < _COMPARABLE) & (ratio > 0)
    return jnp.exp2(jnp.where(small, jnp.round(-jnp.log2(ratio)), 0.0))
