# SPDX-License-Identifier: Apache-2.0
"""Finds where training starts if K > 1 scores interact: damped Newton and a search.

In: a loss bound to its data, offsets. Out: argmin_c of the weighted loss at scores
offset + c; and the search along one score, which a single score uses, too.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.collectives import (
    count_rows,
    current_shards,
    take_rows,
    use_shards,
)
from jboost.entry.stages import (
    branch,
    elementwise,
    for_branches,
    map_points,
    repeat,
    repeat_while,
    stage,
)
from jboost.numerics.derivatives import differentiable
from jboost.objective.diagonals import MANY_SCORES
from jboost.objective.evaluation import (
    Objective,
    gradients,
    loss_values,
    mean_of_rows,
    weighted_mean,
)
from jboost.trees.damped_newton import ROUNDING, damped_newton, move_scores
from jboost.trees.groups import Groups
from jboost.trees.implicit import derive_joint_start
from jboost.trees.leaves import locate_minima

_SEARCHED_ROWS = 4096  # at most, in the search along one score after another
_SEARCHED_NUMBERS = 2**15  # at most, these rows times K
_SWEEPS = 4  # over all K scores, before each run of Newton's method
_TURNS = 6  # of searches and Newton's method
_BALANCED = 1e-3  # |mean gradient| / mean |gradient| at a minimum


@elementwise
def one_group(
    numpy,
    offset: Float[Array | np.ndarray, "K N"],
    weights: Float[Array | np.ndarray, " N"],
    k: Int32[ArrayLike, ""],
) -> Groups:
    """Puts all rows into one group: the problem of a constant added to score k."""
    make: Any = Groups  # of arrays of NumPy or JAX
    return make(
        numpy.asarray(k), offset, weights, None,
        numpy.zeros(offset.shape[1], np.int32), numpy.zeros(1, np.float32),
    )  # fmt: skip


def best_of(
    objective: Objective, groups: Groups, starts: Float[Array | np.ndarray, " S"]
) -> Float[Array, ""]:
    """Returns the start of the least mean loss."""
    losses = map_points(lambda c: total_loss(objective, groups, c), starts)
    return _choose_least(starts, losses)


@elementwise
def _choose_least(numpy, starts, losses):
    least = numpy.argmin(numpy.where(numpy.isfinite(losses), losses, np.inf))
    best = numpy.asarray(starts)[least]
    if numpy is np:
        return best
    return jax.lax.stop_gradient(best)  # where a search begins does not matter


@elementwise
def begin_at(numpy, groups, k, start):
    """Moves the problem to a start, with a small first step from there."""
    moved = groups._replace(scores=_move_one(numpy, groups.scores, k, start))
    return moved, numpy.maximum(numpy.abs(start), np.float32(1))[None] * 2.0**-10


def total_loss(
    objective: Objective, groups: Groups, c: Float[ArrayLike, ""]
) -> Float[Array, ""]:
    """Returns the mean loss with c added to the groups' score."""
    scores = _add_to_score(groups, c)
    return mean_of_rows(objective, loss_values(objective, scores), groups.weights)


@elementwise
def _add_to_score(numpy, groups, c):
    return _move_one(numpy, groups.scores, groups.k, c)


def _move_one(numpy, scores, k, c):
    """Adds c to score k of every row."""
    if numpy is not np:
        return jax.lax.dynamic_update_index_in_dim(scores, scores[k] + c, k, 0)
    scores = scores.copy()
    scores[k] += c
    return scores


def minimise_jointly(objective, offset, weights):
    """Minimizes the mean loss over K scores that interact.

    Damped Newton from 0 is enough for a convex loss in ordinary units. Otherwise it is
    restarted where a search along one score after another ends, as long as that
    helps. The search goes by slopes alone: it also finds where the gradients balance if
    they are not the derivatives of the values (``jax.lax.stop_gradient``). Along many
    scores it would take too long: they go without.

    Derivatives are by the implicit function theorem: -H^+ dg, with g the mean gradient
    and H its derivative; 0 along directions without curvature, NaN for a score that has
    slopes and no curvature.
    """
    loss, arrays = objective.loss, objective._replace(loss=None)
    return differentiable(
        partial(_minimise, loss), partial(derive_joint_start, loss),
        arrays, offset, weights,
    )  # fmt: skip


def _minimise(loss, arrays, offset, weights):
    objective = arrays._replace(loss=loss)
    if offset.shape[0] > MANY_SCORES:
        zero, wanted = _begin_descent(offset).zero, np.asarray(True)
        return damped_newton(objective, offset, weights, zero, wanted)[0]
    few = _take_rows(objective, offset, weights)
    whole = few[1] is offset

    def search_few(c):
        with use_shards(current_shards() if whole else None):  # all shards have them
            return _search_along(*few, c)

    def unfinished(state):
        numpy = for_branches()
        return (numpy.asarray(state.turn) < _TURNS) & ~numpy.asarray(state.done)

    def descend(state):
        first = for_branches().asarray(state.turn) == 0
        last = _find_last(state)
        begin = branch(first, lambda c: state.zero, search_few, last)
        start = _judge(objective, offset, weights, begin)
        wanted = _is_wanted(state, start)
        end, settled = damped_newton(objective, offset, weights, begin, wanted)
        end = _judge(objective, offset, weights, end)
        return _conclude_turn(state, start, end, wanted, settled)

    best = repeat_while(unfinished, descend, _begin_descent(offset)).best
    if whole:
        return best.point

    def refine(c):
        return _search_along(objective, offset, weights, c)

    return branch(best.balanced, lambda c: c, refine, best.point)


def _take_rows(objective, offset, weights):
    """Takes at most 4,096 rows, one from each stretch of rows."""
    num_scores, number = offset.shape
    most = min(_SEARCHED_ROWS, -(-_SEARCHED_NUMBERS // num_scores))
    number = count_rows(number)
    if number <= most:
        return objective, offset, weights
    edges = np.linspace(0, number, most + 1).astype(int)
    rows = np.random.default_rng(0).integers(edges[:-1], edges[1:]).astype(np.int32)
    targets, offset, weights = _gather(objective.targets, offset, weights, rows)
    return objective._replace(targets=targets, minimizer=None), offset, weights


@stage
def _gather(targets, offset, weights, rows):
    targets, offset, weights = take_rows((targets, offset.T, weights), rows)
    return targets, offset.T, weights


def _search_along(objective, offset, weights, start):
    """Minimizes along one score after another, by slopes alone."""
    num_scores = offset.shape[0]
    objective = objective._replace(minimizer=None)
    powers = 16.0 ** np.arange(-6, 9)
    grid = np.concatenate([-powers, [0.0], powers]).astype(np.float32)

    def search(turn, c):
        groups, k = _open_line(offset, weights, c, turn)
        begin = _find_best(objective, groups, grid)
        moved, step = begin_at(groups, k, begin)
        found = locate_minima(objective, moved, step, np.ones(1, bool))
        return _add_root(c, k, begin, found)

    return repeat(_SWEEPS * num_scores, search, start)


@partial(stage, any_rounding=True)  # one program: there are thousands of values
def _find_best(objective, groups, starts):
    return best_of(objective, groups, jnp.asarray(starts))


@stage
def _open_line(offset, weights, c, turn):
    """Returns the problem along the score of a turn, and that score."""
    k = turn % offset.shape[0]
    return one_group(offset + c[:, None], weights, k), k


@stage
def _add_root(c, k, begin, found):
    root = jnp.where(found.strict | found.jump, found.point, 0.0)[0]
    return c.at[k].add(begin + root)


class _Merit(NamedTuple):
    """What speaks for a point: whether its gradients balance, then its mean loss."""

    point: Float[Array, " K"]
    balanced: Bool[Array, ""]
    loss: Float[Array, ""]


class _Descent(NamedTuple):
    """The best point so far.

    Attributes:
      turn: number of runs of Newton's method.
      done: whether more would not help.
      zero: K zeros.
    """

    turn: Int32[Array, ""]
    best: _Merit
    done: Bool[Array, ""]
    zero: Float[Array, " K"]


@elementwise
def _begin_descent(numpy, offset) -> _Descent:
    zero, no = numpy.zeros(offset.shape[0], np.float32), numpy.asarray(False)
    nowhere = _Merit(zero, no, numpy.float32(np.inf))
    return _Descent(numpy.int32(0), nowhere, no, zero)


@elementwise
def _find_last(numpy, state):
    return numpy.where(state.turn == 1, state.zero, state.best.point)


@elementwise
def _is_wanted(numpy, state, start):
    return (state.turn == 0) | _is_better(numpy, start, state.best)


@elementwise
def _conclude_turn(numpy, state, start, end, wanted, settled) -> _Descent:
    end = _choose(numpy, _is_better(numpy, start, end), start, end)
    done = numpy.where(state.turn == 0, settled, (state.turn > 1) & ~wanted)
    best = _choose(numpy, wanted, end, state.best)
    return _Descent(state.turn + 1, best, done, state.zero)


def _judge(objective, offset, weights, point):
    scores = move_scores(offset, point)
    slopes, values = gradients(objective, scores), loss_values(objective, scores)
    return _make_merit(point, slopes, values, weights)


def _make_merit(point, slopes, values, weights) -> _Merit:
    sizes = weighted_mean(_find_magnitudes(slopes), weights)
    means = weighted_mean(slopes, weights), weighted_mean(values, weights)
    return _conclude_merit(point, sizes, *means)


@elementwise
def _find_magnitudes(numpy, values):
    return numpy.abs(values)


@elementwise
def _conclude_merit(numpy, point, sizes, slopes, loss) -> _Merit:
    balanced = numpy.all((numpy.abs(slopes) <= _BALANCED * sizes) & (sizes > 0))
    return _Merit(point, balanced, numpy.where(numpy.isnan(loss), np.inf, loss))


def _is_better(numpy, one, other):
    size = numpy.where(numpy.isfinite(other.loss), numpy.abs(other.loss), 0.0)
    less = one.loss < other.loss - ROUNDING * size
    same = one.balanced == other.balanced
    return numpy.isfinite(one.loss) & numpy.where(same, less, one.balanced)


def _choose(numpy, condition, one, other):
    return jax.tree.map(lambda a, b: numpy.where(condition, a, b), one, other)
