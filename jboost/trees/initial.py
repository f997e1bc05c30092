# SPDX-License-Identifier: Apache-2.0
"""Finds the score that training starts from.

In: a loss bound to its data, offsets. Out: argmin_c of the weighted loss, or the
median of the rows' own minimizers, one number or K: the problem of ``leaves`` with
one group.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jboost.objective.evaluation import (
    Objective,
    gradients,
    hessian_matrices,
    hessians,
    loss_values,
    mean_hessian,
    mean_of_rows,
)
from jboost.objective.minimizers import find_minimizers
from jboost.trees.leaves import (
    Groups,
    find_medians,
    locate_minima,
    solve_at_kinks,
    solve_groups,
)

_STARTS = 33  # where the search may begin
_PROBES = 6  # distances, 1/16 to 16^4 times the score, at which losses are compared
_ROUNDING = 2.0**-21  # of a mean in float32
_NEWTON_STEPS = 50  # at most, for K numbers
_COMPARABLE = 2.0**-10  # ratio of lengths down to which scores share a unit
_SEARCHED_ROWS = 4096  # at most, in the search along one score after another
_SEARCHED_NUMBERS = 2**15  # at most, these rows times K
_SWEEPS = 4  # over all K scores, before each run of Newton's method
_TURNS = 6  # of searches and Newton's method
_CONCAVE = 1e-4  # of the largest: a negative curvature that is none of rounding
_BESIDE = 2.0**-10  # of 1 + |minimizer|: where the loss must be defined, too
_BALANCED = 1e-3  # |mean gradient| / mean |gradient| at a minimum


class MedianStart(NamedTuple):
    """Asks for :func:`median_score`; a pytree without arrays, so that jit sees it."""


class Start(NamedTuple):
    """An initial score.

    Attributes:
      score: one number for each score.
      fell_back: whether training could not have started at the argmin.
    """

    score: Float[Array, " K"]
    fell_back: Bool[Array, ""]


def initial_score(
    objective: Objective,
    offset: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Start:
    """Finds argmin_c of the weighted loss at scores offset + c.

    One number: the quadratic's own step, an order statistic of the rows' minimizers,
    or the exact solver, begun at the best of 33 quantiles of them (a loss with several
    minima has its best one near some row's). K numbers: score by score where they do
    not interact, else see :func:`_minimise_jointly`.

    Where the loss is least no row may have a slope (the argmin is on a plateau or at
    infinity). The start is then 0 or the own minimizer of some row, where the most rows
    have a slope.
    """
    found = _find_argmin(objective, offset, weights)
    if objective.minimizer is None:  # a quadratic has no plateaus
        return Start(found, jnp.asarray(False))
    return _avoid_plateau(objective, offset, weights, found)


def _find_argmin(objective, offset, weights):
    num_scores = offset.shape[0]
    if num_scores == 1:
        return _initial_along(objective, offset, weights, 0)[None]
    minimizer = objective.minimizer
    assert minimizer is not None  # always found for K > 1
    known = jnp.isfinite(minimizer) | (weights <= 0)[None, :]

    def separately(offset):
        # One program for all scores: K copies of it would take K times as long to
        # compile, also for losses whose scores interact.
        every = jnp.arange(num_scores, dtype=jnp.int32)
        return jax.lax.map(partial(_initial_along, objective, offset, weights), every)

    def jointly(offset):
        return _minimise_jointly(objective, offset, weights)

    return jax.lax.cond(jnp.all(known), separately, jointly, offset)


def median_score(
    objective: Objective,
    offset: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Float[Array, " K"]:
    """The weighted median of the rows' own minimizers F* - offset, for each score.

    NaN where a row that counts has a slope, but no minimum.
    """
    minimizer = objective.minimizer
    if minimizer is None:  # a quadratic, which training needs none for
        minimizer = find_minimizers(objective, weights.shape[0])
        objective = objective._replace(minimizer=minimizer)
    flat = gradients(objective, offset) == 0
    known = jnp.all(jnp.isfinite(minimizer) | flat | (weights <= 0)[None, :], axis=1)
    medians = [
        find_medians(objective, _one_group(offset, weights, k))[0]
        for k in range(offset.shape[0])
    ]
    return jnp.where(known, jnp.stack(medians), jnp.nan)


def _one_group(offset, weights, k):
    return Groups(
        jnp.int32(k), offset, weights, None, jnp.zeros(offset.shape[1], jnp.int32),
        jnp.zeros(1, jnp.float32),
    )  # fmt: skip


def _initial_along(objective, offset, weights, k):
    groups = _one_group(offset, weights, k)
    if objective.minimizer is None:  # a quadratic: one step, one more against rounding
        start = jnp.float32(0)
        for _ in range(2):
            scores = offset + start
            gradient = mean_of_rows(objective, gradients(objective, scores)[0], weights)
            hessian = mean_of_rows(
                objective, hessian_matrices(objective, scores)[:, 0, 0], weights
            )
            start -= gradient / jnp.where(hessian > 0, hessian, jnp.inf)
        return start

    def search():
        return _search_start(objective, groups, k)[None]

    if objective.kinks is None:
        return search()[0]
    kinks = objective.kinks
    return solve_at_kinks(objective, groups, kinks, search)[0]


def _search_start(objective, groups, k):
    start = _best_start(objective, groups, k)
    moved, step = _begin_at(groups, k, start)
    everything = jnp.ones(1, bool)
    # No Newton step is at hand: a small step to bracket from, not to fall back on.
    found = solve_groups(objective, moved, step, everything)
    better = _total_loss(objective, moved, found[0]) <= _total_loss(
        objective, moved, jnp.float32(0)
    )
    return start + jnp.where(better, found[0], 0.0)


def _best_start(objective, groups, k):
    """Where along a score the loss is least, of some of the rows' minimizers and 0."""
    starts = _starting_points(objective.minimizer[k] - groups.scores[k], groups.weights)
    return _best_of(objective, groups, starts)


def _best_of(objective, groups, starts):
    losses = jax.lax.map(lambda c: _total_loss(objective, groups, c), starts)
    return starts[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]


def _begin_at(groups, k, start):
    """The problem moved to a start, and a small first step from there."""
    moved = groups._replace(scores=groups.scores.at[k].add(start))
    return moved, jnp.maximum(jnp.abs(start), 1.0)[None] * 2.0**-10


def _starting_points(distance, weights):
    """0 and quantiles of the rows' own minimizers, by sorting at most 8,192 rows."""
    usable = jnp.where(weights > 0, distance, jnp.nan)
    stride = -(-usable.shape[0] // 8192)
    ordered = jnp.sort(usable[::stride])  # NaN last
    number = jnp.sum(jnp.isfinite(ordered))
    share = jnp.linspace(0.0, 1.0, _STARTS - 1, dtype=jnp.float32)
    place = jnp.round(share * jnp.maximum(number - 1, 0).astype(jnp.float32))
    points = jnp.where(number > 0, ordered[place.astype(jnp.int32)], 0.0)
    return jnp.append(points, 0.0)


def _total_loss(objective, groups, c):
    scores = groups.scores.at[groups.k].add(c)
    return mean_of_rows(objective, loss_values(objective, scores), groups.weights)


def _minimise_jointly(objective, offset, weights):
    """Minimizes the mean loss over K scores that interact.

    Damped Newton from 0 ends at once for a convex loss in ordinary units. Else it is
    begun anew where a search along one score after another ends, as long as that
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
    """The loss of at most 4,096 rows, one from each stretch of rows."""
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
        groups = _one_group(offset + c[:, None], weights, k)
        begin = _best_of(objective, groups, jnp.asarray(grid))
        moved, step = _begin_at(groups, k, begin)
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
    margin = jnp.where(jnp.isfinite(other.loss), _ROUNDING * jnp.abs(other.loss), 0.0)
    less = one.loss < other.loss - margin
    same = one.balanced == other.balanced
    return jnp.isfinite(one.loss) & jnp.where(same, less, one.balanced)


def _choose(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _damped_newton(objective, offset, weights, start, wanted):
    """Levenberg-Marquardt on the mean loss of K scores, along the Hessian's axes.

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
        noise = _ROUNDING * jnp.max(unit * sizes)
        slope = jnp.where(jnp.abs(slope) > noise, slope, 0.0)
        step = -(axes @ (slope / (jnp.abs(curvature) + damping * size)))
        new_loss = mean_loss(c + unit * step)
        # Close to the minimum the loss is flat to the last bits, the gradient is not.
        better = new_loss <= loss + _ROUNDING * jnp.abs(loss)
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


class Slopes(NamedTuple):
    """How many rows of positive weight a tree can learn from.

    Attributes:
      rows: of positive weight.
      not_finite: of these, rows with a derivative that is not a finite number.
      zero: rows whose derivatives are all zero.
      settled: of ``zero``, rows that are at a minimum of their own loss.
    """

    rows: Int32[Array, ""]
    not_finite: Int32[Array, ""]
    zero: Int32[Array, ""]
    settled: Int32[Array, ""]

    def stuck(self) -> Bool[Array, ""]:
        """Whether no row has a finite slope, though one is not at its minimum."""
        return (self.not_finite + self.zero == self.rows) & (self.settled < self.rows)


def count_slopes(
    objective: Objective,
    slopes: Float[Array, "K N"],
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Slopes:
    """Counts the rows that ``slopes`` at some scores leave nothing to learn from."""
    counts, minimizer = weights > 0, objective.minimizer
    flat = jnp.all(slopes == 0, axis=0)
    lost = ~jnp.all(jnp.isfinite(slopes), axis=0)
    here = loss_values(objective, scores)
    settled = _is_lowest(objective, scores, here)
    if minimizer is None or len(scores) > 1:
        settled |= jnp.all(hessians(objective, scores) > 0, axis=0)
    if minimizer is not None:
        least = loss_values(objective, minimizer)
        known = jnp.all(jnp.isfinite(minimizer), axis=0)
        settled = jnp.where(known, here <= least + _ROUNDING * jnp.abs(least), settled)
    every = (counts, counts & lost, counts & flat, counts & flat & settled)
    return Slopes(*(jnp.sum(rows, dtype=jnp.int32) for rows in every))


def _is_lowest(objective, scores, here):
    """Whether no score far or near gives a row a lower loss.

    The loss of a row without a minimum may have reached its infimum in float32: the
    logistic loss of a score of 150 is 0, and so are its derivatives.
    """
    num_scores = len(scores)
    least = here - _ROUNDING * jnp.abs(here)
    size = jnp.maximum(jnp.abs(scores), 1.0)

    def probe(number, lowest):
        k, number = number % num_scores, number // num_scores
        sign, distance = 1 - 2 * (number % 2), jnp.float32(16.0) ** (number // 2 - 1)
        along = (jnp.arange(num_scores) == k)[:, None]
        point = scores + jnp.where(along, sign * distance * size, 0.0)
        return lowest & ~(loss_values(objective, point) < least)

    every = jnp.ones(scores.shape[1], bool)
    return jax.lax.fori_loop(0, 2 * _PROBES * num_scores, probe, every)


def is_endless(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Bool[Array, ""]:
    """Whether a loss of constant curvature has slopes, but a minimum for no row.

    A loss that is NaN beside a point has no minimum there. Other losses may approach
    their infimum at infinity (logistic) and are not judged.
    """
    if not objective.loss.quadratic:
        return jnp.asarray(False)
    counts, minimizer = weights > 0, objective.minimizer
    slopes = gradients(objective, scores)[0]
    sloping = jnp.any(counts & jnp.isfinite(slopes) & (slopes != 0))
    bounded = hessians(objective, scores)[0] > 0
    if minimizer is not None:
        side = _BESIDE * (1 + jnp.abs(minimizer))
        around = [loss_values(objective, minimizer + d) for d in (-side, side)]
        bounded |= jnp.isfinite(minimizer[0]) & ~jnp.isnan(around[0] + around[1])
    return sloping & ~jnp.any(counts & bounded)


def _avoid_plateau(objective, offset, weights, found):
    """Moves a start where no row has a slope to where the most rows have one."""

    def share(slopes):
        usable = jnp.any(jnp.isfinite(slopes) & (slopes != 0), axis=0)
        return mean_of_rows(objective, usable.astype(jnp.float32), weights)

    scores = offset + found[:, None]
    slopes = gradients(objective, scores)

    def move(found):
        stuck = count_slopes(objective, slopes, scores, weights).stuck()
        starts = _plateau_exits(objective, offset, weights)

        def measure(c):
            return share(gradients(objective, offset + c[:, None]))

        shares = jax.lax.map(measure, starts)
        moves = stuck & (jnp.max(shares) > 0)
        return Start(jnp.where(moves, starts[jnp.argmax(shares)], found), moves)

    def stay(found):
        return Start(found, jnp.asarray(False))

    return jax.lax.cond(share(slopes) > 0, stay, move, found)


def _plateau_exits(objective, offset, weights):
    """Points that training may start from instead of an argmin without slopes."""
    if offset.shape[0] > 1:
        return jnp.zeros((1, offset.shape[0]), jnp.float32)
    return _starting_points(objective.minimizer[0] - offset[0], weights)[:, None]
