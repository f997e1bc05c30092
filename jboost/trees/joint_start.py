# SPDX-License-Identifier: Apache-2.0
"""The start of training for K > 1 interacting scores: damped Newton and a search."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.collectives import count_rows, current_shards, take_rows, use_shards
from jboost.entry.stages import (
    branch,
    elementwise,
    for_branches,
    map_points,
    repeat_while,
    stage,
)
from jboost.numerics.derivatives import differentiable
from jboost.objective.coupling import mean_product
from jboost.objective.evaluation import (
    Objective,
    gradients,
    hessians,
    loss_values,
    mean_hessian,
    weighted_mean,
)
from jboost.objective.jaxprs import MANY_SCORES
from jboost.trees.implicit import derive_joint_start
from jboost.trees.leaves import LeafProblems, locate_minima

_NEWTON_STEPS = 50  # the most steps, for K numbers
_PRODUCTS = 30  # the most products with the Hessian of many scores, for one step
_SOLVED = 1e-4  # the slope left after such a step, relative to the largest
_CONCAVE = 1e-4  # relative to the largest: negative curvature beyond rounding
ROUNDING = 2.0**-21  # the relative rounding error of a mean in float32
# A loss that falls farther than its slopes explain has lost its digits: the logarithm
# of a gamma function at 1e10, say. A convex one falls by at most the slope times the
# step, and step and slope of one of negative curvature by half more.
_MOST_FALL = 4.0
_EXACT = jax.lax.Precision.HIGHEST  # or a GPU would round the factors of products


@elementwise
def move_scores(numpy, offset, point):
    """Returns offset + point for every row, [K, N]."""
    del numpy
    return offset + point[:, None]


def damped_newton(objective, offset, weights, start, wanted):
    """Minimizes the mean loss of K scores by Levenberg-Marquardt.

    Each score gets its own unit, so that all curvatures agree within a factor of 4 (a
    mean in dollars may stand beside the logarithm of a scale).

    Also returns whether the last point is a minimum and no curvature was negative.
    """

    def unfinished(state):
        numpy = for_branches()
        more = numpy.asarray(state.turn) < _NEWTON_STEPS
        return more & (numpy.asarray(state.moved) > 1e-6)

    def improve(state):
        scores = move_scores(offset, state.point)
        if len(scores) > MANY_SCORES:
            proposal = _propose_for_many(objective, scores, state, weights)
        else:
            hessian = mean_hessian(objective, scores, weights)
            proposal = _propose(state, hessian, weights)
        scores = move_scores(offset, proposal.point)
        slopes = gradients(objective, scores)
        sizes = weighted_mean(_find_magnitudes(slopes), weights)
        loss = weighted_mean(loss_values(objective, scores), weights)
        return _judge_step(state, proposal, loss, slopes, sizes)

    scores = move_scores(offset, start)
    values, slopes = loss_values(objective, scores), gradients(objective, scores)
    state = _begin(start, weighted_mean(values, weights), slopes, wanted)
    return _conclude_newton(repeat_while(unfinished, improve, state))


class _Newton(NamedTuple):
    """State of Newton's method.

    Attributes:
      damping: number added to the curvatures, relative to the largest.
      slopes: gradient of each row at the point.
      moved: length of the last step, in standard units.
      convex: whether no curvature on the way was negative.
    """

    turn: Int32[Array, ""]
    point: Float[Array, " K"]
    damping: Float[Array, ""]
    loss: Float[Array, ""]
    slopes: Float[Array, "K N"]
    moved: Float[Array, ""]
    convex: Bool[Array, ""]


class _NewtonStep(NamedTuple):
    """A Newton step: the new point, its length, whether no curvature was negative.

    ``promised`` is the decrease of the loss along its slope.
    """

    point: Float[Array, " K"]
    length: Float[Array, ""]
    convex: Bool[Array, ""]
    promised: Float[Array, ""]


@elementwise
def _begin(numpy, start, loss, slopes, wanted) -> _Newton:
    first, damping = numpy.where(wanted, np.float32(1), 0.0), numpy.float32(1e-3)
    loss, yes = _or_infinite(numpy, loss), numpy.asarray(True)
    return _Newton(numpy.int32(0), start, damping, loss, slopes, first, yes)


@stage
def _propose(state, hessian, weights) -> _NewtonStep:
    slopes = state.slopes
    sizes = weighted_mean(jnp.abs(slopes), weights)
    unit = _find_units(jnp.diagonal(hessian), sizes)
    hessian = hessian * unit[:, None] * unit[None, :]
    size = jnp.maximum(jnp.max(jnp.abs(hessian)), 1e-30)
    curvature, axes = jnp.linalg.eigh(hessian)
    slope = unit * weighted_mean(slopes, weights)
    slope = jnp.matmul(slope, axes, precision=_EXACT)
    # The remainder of a sum that should be 0 is rounding. Without curvature in the same
    # direction (softmax scores may all be shifted), a step would follow it far away.
    noise = ROUNDING * jnp.max(unit * sizes)
    slope = jnp.where(jnp.abs(slope) > noise, slope, 0.0)
    along = slope / (jnp.abs(curvature) + state.damping * size)
    step = -jnp.matmul(axes, along, precision=_EXACT)
    length = jnp.max(jnp.abs(step)) * jnp.maximum(1.0, jnp.sqrt(size))
    convex = jnp.min(curvature) >= -_CONCAVE * size
    promised = jnp.sum(slope * along)
    return _NewtonStep(state.point + unit * step, length, convex, promised)


class _Solution(NamedTuple):
    """State of the conjugate gradients of a step, in standard units.

    Attributes:
      step: minimizer of the parabola along the directions so far.
      left: the residual, which is the negated slope after the step.
      product: inner product of the residual and the preconditioned residual.
    """

    number: Int32[Array, ""]
    step: Float[Array, " K"]
    left: Float[Array, " K"]
    along: Float[Array, " K"]
    product: Float[Array, ""]
    convex: Bool[Array, ""]


class _Parabola(NamedTuple):
    """Fixed inputs of the conjugate gradients of one step, without the mean Hessian.

    Attributes:
      unit: the standard unit of each score.
      own: the damped curvature of each score; the preconditioner.
      damping: number added to the curvature.
      enough: the largest slope that ends the iteration.
    """

    unit: Float[Array, " K"]
    own: Float[Array, " K"]
    damping: Float[Array, ""]
    enough: Float[Array, ""]


def _propose_for_many(objective, scores, state, weights):
    """Proposes a step like :func:`_propose`, by conjugate gradients, with no Hessian.

    The preconditioner is the diagonal. The iteration ends when no slope exceeds
    rounding or a small share of the first slopes, or at a negative curvature.
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
    sizes = weighted_mean(_find_magnitudes(state.slopes), weights)
    means = weighted_mean(state.slopes, weights), weighted_mean(diagonal, weights)
    parabola, start = _begin_step(state.damping, sizes, *means)
    found = repeat_while(unfinished, improve, start)
    return _end_step(state.point, parabola, start.left, found)


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
def _end_step(point, parabola, downhill, found) -> _NewtonStep:
    # Before the first product, this is the step of the diagonal.
    step = jnp.where(found.number > 0, found.step, found.along)
    size = jnp.max(parabola.own)
    length = jnp.max(jnp.abs(step)) * jnp.maximum(1.0, jnp.sqrt(size))
    promised = jnp.sum(downhill * step)
    return _NewtonStep(point + parabola.unit * step, length, found.convex, promised)


@elementwise
def _judge_step(numpy, state, proposal, loss, slopes, sizes) -> _Newton:
    """Takes the step if it lowers the loss, else damps the next one more.

    ``slopes``, of mean magnitude ``sizes``, are those after the step. If they are not
    finite, no step leads on from there.
    """
    loss, damping = _or_infinite(numpy, loss), state.damping
    # Close to the minimum, the loss is flat to the last bits, but the gradient is not.
    noise = ROUNDING * numpy.abs(state.loss)
    better = loss <= state.loss + noise
    explained = state.loss - loss <= _MOST_FALL * proposal.promised + noise
    better = better & (explained | ~numpy.isfinite(state.loss))
    better = better & numpy.all(numpy.isfinite(sizes))
    less = numpy.maximum(damping * np.float32(0.1), np.float32(1e-6))
    given_up = numpy.where(damping > 1e6, 0.0, state.moved)
    return _Newton(
        turn=state.turn + 1,
        point=numpy.where(better, proposal.point, state.point),
        damping=numpy.where(better, less, damping * 10),
        loss=numpy.where(better, loss, state.loss),
        slopes=numpy.where(better, slopes, state.slopes),
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
    """Returns a power of two per score; these units make the curvatures about equal.

    Scores without any curvature (the center of Laplace's distribution) are compared by
    the mean magnitudes of their gradients.
    """
    curvature = jnp.abs(curvature)
    ratio = curvature / jnp.maximum(jnp.max(curvature), 1e-30)
    steepness = sizes / jnp.maximum(jnp.max(sizes), 1e-30)
    ratio = jnp.where(curvature > 0, jnp.sqrt(ratio), steepness)
    return jnp.exp2(jnp.where(ratio > 0, jnp.round(-jnp.log2(ratio)), 0.0))


_SEARCHED_ROWS = 4096  # the most rows in the search along one score after another
_SEARCHED_NUMBERS = 2**15  # limit on these rows times K
_SWEEPS = 4  # searches over all K scores, before each run of Newton's method
_HARDLY = 2.0**-8  # a move, relative to the score, that is left to Newton's method
_TURNS = 6  # the most repetitions of searches and Newton's method
_BALANCED = 1e-3  # |mean gradient| / mean |gradient| at a minimum
# Shares of a path where its slopes are evaluated: the closer to an end, the denser.
_PATH = np.concatenate([[0], 1 / (1 + np.exp(np.linspace(12, -12, 127))), [1]])
_SMALL_FALL = 1e-4  # relative to the loss: a fall that needs no explanation


@elementwise
def one_group(
    numpy,
    offset: Float[Array | np.ndarray, "K N"],
    weights: Float[Array | np.ndarray, " N"],
    k: Int32[ArrayLike, ""],
) -> LeafProblems:
    """Puts all rows into one group: the problem of a constant added to score k."""
    make: Any = LeafProblems  # holds arrays of NumPy or JAX
    return make(
        numpy.asarray(k), offset, weights, None,
        numpy.zeros(offset.shape[1], np.int32), numpy.zeros(1, np.float32),
    )  # fmt: skip


def best_of(
    objective: Objective, groups: LeafProblems, starts: Float[Array | np.ndarray, " S"]
) -> Float[Array, ""]:
    """Returns the start with the least mean loss."""
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
    objective: Objective, groups: LeafProblems, c: Float[ArrayLike, ""]
) -> Float[Array, ""]:
    """Returns the mean loss with c added to the groups' score."""
    scores = _add_to_score(groups, c)
    return weighted_mean(loss_values(objective, scores), groups.weights)


@elementwise
def _add_to_score(numpy, groups, c):
    return _move_one(numpy, groups.scores, groups.k, c)


def _move_one(numpy, scores, k, c):
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
    they are not the derivatives of the values (``jax.lax.stop_gradient``). With many
    scores, the search would take too long and is left out.

    Derivatives follow the implicit function theorem: -H^+ dg, with g the mean gradient
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

    def doubt(best, start):
        with use_shards(current_shards() if whole else None):
            return confirm(*few, best, start)

    def unfinished(state):
        numpy = for_branches()
        return (numpy.asarray(state.turn) < _TURNS) & ~numpy.asarray(state.done)

    def descend(state):
        first = for_branches().asarray(state.turn) == 0
        last = _find_last(state)
        begin = branch(first, lambda c: state.zero, search_few, last)
        start = _judge(objective, offset, weights, begin)
        explain = partial(doubt, state.best)
        start = branch(first, lambda start: start, explain, start)
        wanted = _is_wanted(state, start)
        end, settled = damped_newton(objective, offset, weights, begin, wanted)
        end = _judge(objective, offset, weights, end)
        return _conclude_turn(state, start, end, wanted, settled)

    best = repeat_while(unfinished, descend, _begin_descent(offset)).best
    if whole:
        return best.point

    def refine(best):
        found = _search_along(objective, offset, weights, best.point)
        end = doubt(best, _judge(objective, offset, weights, found))
        return _keep_explained(best, end)

    return branch(best.balanced, lambda best: best.point, refine, best)


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

    def unfinished(state):
        numpy = for_branches()
        more = numpy.asarray(state.turn) < _SWEEPS * num_scores
        return more & (numpy.asarray(state.still) < num_scores)

    def search(state):
        groups, k = _open_line(offset, weights, state.point, state.turn)
        begin = _find_best(objective, groups, grid)
        moved, step = begin_at(groups, k, begin)
        found = locate_minima(objective, moved, step, np.ones(1, bool))
        return _add_root(state, k, begin, found)

    return repeat_while(unfinished, search, _begin_search(start)).point


@partial(stage, any_rounding=True)  # one program: there are thousands of values
def _find_best(objective, groups, starts):
    return best_of(objective, groups, jnp.asarray(starts))


@stage
def _open_line(offset, weights, c, turn):
    """Returns the problem along the score of a turn, and the index of that score."""
    k = turn % offset.shape[0]
    return one_group(offset + c[:, None], weights, k), k


class _Sweeps(NamedTuple):
    """State of a search; ``still`` counts the last scores that hardly moved."""

    turn: Int32[Array, ""]
    still: Int32[Array, ""]
    point: Float[Array, " K"]


@elementwise
def _begin_search(numpy, point) -> _Sweeps:
    return _Sweeps(numpy.int32(0), numpy.int32(0), numpy.asarray(point))


@stage
def _add_root(state, k, begin, found) -> _Sweeps:
    root = jnp.where(found.strict | found.jump, found.point, 0.0)[0]
    moved = begin + root
    still = jnp.abs(moved) <= _HARDLY * jnp.maximum(jnp.abs(state.point[k]), 1.0)
    still = jnp.where(still, state.still + 1, 0)
    return _Sweeps(state.turn + 1, still, state.point.at[k].add(moved))


class _Merit(NamedTuple):
    """Merit of a point: first whether its gradients balance, then its mean loss."""

    point: Float[Array, " K"]
    balanced: Bool[Array, ""]
    loss: Float[Array, ""]


class _Descent(NamedTuple):
    """The best point so far; ``done`` if more runs of Newton's method do not help."""

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
    sizes = weighted_mean(_find_magnitudes(slopes), weights)
    means = weighted_mean(slopes, weights), weighted_mean(values, weights)
    return _conclude_merit(point, sizes, *means)


@elementwise
def _conclude_merit(numpy, point, sizes, slopes, loss) -> _Merit:
    balanced = numpy.all((numpy.abs(slopes) <= _BALANCED * sizes) & (sizes > 0))
    usable = numpy.isfinite(loss) & numpy.all(numpy.isfinite(sizes))
    return _Merit(point, balanced, numpy.where(usable, loss, np.inf))


def keeps_digits(objective, offset, weights, start, end):
    """Returns whether the loss is finite at ``end``, and slopes explain its fall."""
    best, end = (_judge(objective, offset, weights, each) for each in (start, end))
    end = confirm(objective, offset, weights, best, end)
    return for_branches().isfinite(for_branches().asarray(end.loss))


def confirm(objective, offset, weights, best, end):
    """Returns ``end``, with a loss of inf where slopes do not explain that it is less.

    A search by values ends where float32 has lost the digits of the loss, if it may:
    no value is less than a wrong one. Along the path from the best point, the slopes
    must add up to the fall of the loss. Gradients that balance need no values.
    """

    def measure(share):
        point = _go_along(best.point, end.point, share)
        slopes = gradients(objective, move_scores(offset, point))
        return weighted_mean(slopes, weights)

    def compare(end):
        ends = [
            weighted_mean(
                loss_values(objective, move_scores(offset, each.point)), weights
            )
            for each in (best, end)
        ]
        slopes = map_points(measure, _PATH.astype(np.float32))
        return _compare_with_slopes(best, end, slopes, *ends)

    return branch(_is_doubtful(best, end), compare, lambda end: end, end)


@elementwise
def _is_doubtful(numpy, best, end):
    return _is_better(numpy, end, best) & ~end.balanced


@elementwise
def _go_along(numpy, start, end, share):
    del numpy
    return start + share * (end - start)


@elementwise
def _compare_with_slopes(numpy, best, end, slopes, before, after) -> _Merit:
    along = slopes @ (end.point - best.point)
    fall = before - after
    most = fall / 2 + _SMALL_FALL * numpy.abs(before)
    explained = numpy.asarray(True)
    for first in (0, 1):  # slopes without digits may add up by chance, but not twice
        part = along[first::2]
        widths = numpy.asarray(np.diff(_PATH[first::2]).astype(np.float32))
        predicted = -numpy.sum(widths * (part[1:] + part[:-1])) / 2
        explained = explained & (numpy.abs(fall - predicted) <= most)
    explained = explained | (fall <= 0) | ~numpy.isfinite(before)
    return end._replace(loss=numpy.where(explained, end.loss, np.inf))


@elementwise
def _keep_explained(numpy, best, end):
    return numpy.where(numpy.isfinite(end.loss), end.point, best.point)


def _is_better(numpy, one, other):
    size = numpy.where(numpy.isfinite(other.loss), numpy.abs(other.loss), 0.0)
    less = one.loss < other.loss - ROUNDING * size
    same = one.balanced == other.balanced
    return numpy.isfinite(one.loss) & numpy.where(same, less, one.balanced)


def _choose(numpy, condition, one, other):
    return jax.tree.map(lambda a, b: numpy.where(condition, a, b), one, other)
