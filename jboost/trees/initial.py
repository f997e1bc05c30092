# SPDX-License-Identifier: Apache-2.0
"""Finds the score that training starts from, and whether there is something to learn.

The score is argmin_c of the weighted loss, one number or K (the problem of ``leaves``
with one group), or the median of the rows' own minimizers.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.collectives import (
    count_rows,
    current_shards,
    every,
    first_row,
    gather,
    real_rows,
    some,
    total,
)
from jboost.entry.stages import (
    branch,
    elementwise,
    for_branches,
    is_any,
    map_points,
    repeat,
    stage,
)
from jboost.kernels.exact_sums import count_times
from jboost.objective.evaluation import (
    Objective,
    gradients,
    hessian_matrices,
    hessians,
    known_shares,
    known_targets,
    loss_values,
    mean_weight,
    weighted_mean,
)
from jboost.objective.minimizers import locate_minimizers
from jboost.trees.joint_start import (
    ROUNDING,
    begin_at,
    best_of,
    keeps_digits,
    minimise_jointly,
    move_scores,
    one_group,
    total_loss,
)
from jboost.trees.leaves import find_medians, solve_at_kinks, solve_groups

_PROBES = 6  # distances of the compared losses, 1/16 to 16^4 times the score
_BESIDE = 2.0**-10  # times 1 + |minimizer|: where the loss must be defined, too


class RowCounts(NamedTuple):
    """Numbers of rows that a tree can or cannot learn from, all of positive weight.

    Attributes:
      not_finite: number of rows with a derivative that is not a finite number.
      zero: number of rows with only zero derivatives.
      settled: number of rows in ``zero`` that are at a minimum of their own loss.
    """

    rows: Int32[Array, ""]
    not_finite: Int32[Array, ""]
    zero: Int32[Array, ""]
    settled: Int32[Array, ""]

    def stuck(self) -> Any:
        """Returns whether no row has a finite slope, and one is not at its minimum."""
        return (self.not_finite + self.zero == self.rows) & (self.settled < self.rows)


def count_slopes(
    objective: Objective,
    slopes: Float[Array, "K N"],
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> RowCounts:
    """Counts the rows that ``slopes`` at some scores leave nothing to learn from."""
    minimizer, known = objective.minimizer, None
    here = loss_values(objective, scores)
    settled = _is_lowest(objective, scores, here)
    curved = minimizer is None or len(scores) > 1
    curvature = hessians(objective, scores) if curved else None
    if minimizer is not None:
        known = (minimizer, loss_values(objective, minimizer))
    return _count(slopes, weights, here, settled, curvature, known)


def count_group_slopes(
    slopes: Float[Array, "K N"], weights: Float[Array, " N"]
) -> RowCounts:
    """Counts rows as :func:`count_slopes`, for a loss of groups: no row is settled."""
    counts = weights > 0
    flat = jnp.all(slopes == 0, axis=0)
    lost = ~jnp.all(jnp.isfinite(slopes), axis=0)
    none = jnp.zeros_like(counts)
    rows = jnp.stack([counts, counts & lost, counts & flat, none])
    return RowCounts(*jnp.sum(rows, axis=1, dtype=jnp.int32))


@stage
def _count(slopes, weights, here, settled, curvature, known):
    counts = weights > 0
    flat = jnp.all(slopes == 0, axis=0)
    lost = ~jnp.all(jnp.isfinite(slopes), axis=0)
    if curvature is not None:
        settled |= jnp.all(curvature > 0, axis=0)
    if known is not None:
        minimizer, least = known
        known = jnp.all(jnp.isfinite(minimizer), axis=0)
        settled = jnp.where(known, here <= least + ROUNDING * jnp.abs(least), settled)
    rows = jnp.stack([counts, counts & lost, counts & flat, counts & flat & settled])
    return RowCounts(*total(jnp.sum(rows, axis=1, dtype=jnp.int32)))


def _is_lowest(objective, scores, here):
    """Returns whether no score far or near gives a row a lower loss.

    The loss of a row without a minimum may have reached its infimum in float32: the
    logistic loss of a score of 150 is 0, and so are its derivatives.
    """

    def probe(number, lowest):
        values = loss_values(objective, _distant_point(number, scores))
        return _is_no_lower(lowest, values, here)

    return repeat(2 * _PROBES * len(scores), probe, _every_row(scores))


@stage
def _every_row(scores):
    return jnp.ones(scores.shape[1], bool)


@stage
def _distant_point(number, scores):
    num_scores, size = len(scores), jnp.maximum(jnp.abs(scores), 1.0)
    k, number = number % num_scores, number // num_scores
    powers = jnp.asarray(16.0 ** np.arange(-1, _PROBES - 1), jnp.float32)
    sign, distance = 1.0 - 2.0 * jnp.float32(number % 2), powers[number // 2]
    along = (jnp.arange(num_scores, dtype=jnp.int32) == k)[:, None]
    return scores + jnp.where(along, sign * distance * size, 0.0)


@stage
def _is_no_lower(lowest, values, here):
    return lowest & ~(values < here - ROUNDING * jnp.abs(here))


def is_unbounded(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Bool[ArrayLike, ""]:
    """Returns whether a loss of constant curvature has slopes but no minima.

    A loss that is NaN beside a point has no minimum there. Other losses may approach
    their infimum at infinity (logistic) and are not judged.
    """
    if not objective.loss.quadratic:
        return np.asarray(False)
    slopes, minimizer = gradients(objective, scores), objective.minimizer
    curvature, around = hessians(objective, scores), None
    if minimizer is not None:
        around = [loss_values(objective, point) for point in _around(minimizer)]
    return _is_sloping_only(slopes, curvature, minimizer, around, weights)


@elementwise
def _around(numpy, minimizer):
    side = _BESIDE * (1 + numpy.abs(minimizer))
    return minimizer - side, minimizer + side


@elementwise
def _is_sloping_only(numpy, slopes, curvature, minimizer, around, weights):
    counts, slopes, bounded = weights > 0, slopes[0], curvature[0] > 0
    sloping = some(numpy.any(counts & numpy.isfinite(slopes) & (slopes != 0)))
    if minimizer is not None:
        known = ~numpy.isnan(around[0] + around[1])
        bounded = bounded | (numpy.isfinite(minimizer[0]) & known)
    return sloping & ~some(numpy.any(counts & bounded))


_SHARES = np.linspace(0.0, 1.0, 32, dtype=np.float32)  # quantiles to begin from
START_RULES = ("argmin", "fallback", "half event")
# Slopes are compared at these distances from 0 if the argmin is at infinity.
_DISTANCES = np.append(0.0, 2.0 ** np.arange(-4, 8.5, 0.5)).astype(np.float32)
_BOUNDED = 2.001  # slopes that rise no more from 0 to a distance do not grow on
_ONE_SIDED = 1 - 1e-6  # |mean slope| / mean |slope|


class MedianStart(NamedTuple):
    """Asks for :func:`median_score`; a pytree without arrays, so that jit sees it."""


class Start(NamedTuple):
    """An initial score, and the index in ``START_RULES`` of the rule that gave it."""

    score: Float[ArrayLike, " K"]
    rule: Int32[ArrayLike, ""]


def initial_score(
    objective: Objective,
    offset: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Start:
    """Finds argmin_c of the weighted loss at scores offset + c.

    One number: the quadratic's own step, an order statistic of the rows' minimizers,
    or the exact solver, begun at the best of 33 quantiles of them (a loss with several
    minima has its best one near some row's). K numbers: score by score where they do
    not interact, else see :func:`minimise_jointly`.

    Where the loss is least no row may have a slope, because the argmin is on a plateau.
    The start is then 0 or the own minimizer of some row, where the most rows have a
    slope. For an argmin at infinity (no events) see :func:`_approach_infinity`.
    """
    found = _find_argmin(objective, offset, weights)
    if objective.minimizer is None:  # a quadratic has no plateaus
        return Start(found, np.int32(0))
    slopes = gradients(objective, move_scores(offset, found))
    start = _avoid_plateau(objective, offset, weights, slopes, found)
    none = _have_no_minimizer(objective.minimizer, weights)

    def approach(start):
        return _approach_infinity(objective, offset, weights, slopes, none, start)

    return branch(is_any(none), approach, lambda start: start, start)


def _approach_infinity(objective, offset, weights, slopes, none, start):
    """Moves scores that all rows push the same way to where half an event keeps them.

    No event is in the N rows. Half a row that pushes the other way, as hard as one
    mirrored at 0, or as one at 0 where slopes grow without bound, balances the others:

        N |g(c)| = |g(-c)| / 2, for a logistic loss c = -log 2N, p = 1 / (2N + 1);
        N |g(c)| = |g(0)| / 2, for Poisson's c = -log 2N, a mean of 1 / 2N.
    """

    def look_again(slopes):
        return gradients(objective, move_scores(offset, start.score))

    known = known_targets(objective.loss, objective.targets)
    slopes = branch(start.rule == 0, lambda slopes: slopes, look_again, slopes)
    means = [weighted_mean(each, weights) for each in _with_magnitudes(slopes)]
    sign = _find_direction(none, *means)

    def move(start):
        def measure(point):
            found = gradients(objective, move_scores(offset, point))
            return weighted_mean(found, weights)

        points = [_place_along(sign * way, start.score) for way in (1, -1)]
        found = [map_points(measure, each) for each in points]
        shares = known_shares(known, weights, len(sign))
        moved = _balance(start, sign, *found, weights, mean_weight(weights), shares)
        ends = start.score, moved.score
        kept = keeps_digits(objective, offset, weights, *ends)
        return branch(kept, lambda: moved, lambda: start)

    return branch(is_any(sign != 0), move, lambda start: start, start)


@elementwise
def _have_no_minimizer(numpy, minimizer, weights):
    bounded = numpy.isfinite(minimizer) & (weights > 0)[None, :]
    return ~some(numpy.any(bounded, axis=1))


@elementwise
def _with_magnitudes(numpy, slopes):
    return slopes, numpy.abs(slopes)


@elementwise
def _find_direction(numpy, none, mean, magnitude):
    """Returns the sign of the infinity where each score has its argmin; 0: nowhere."""
    same = none & (numpy.abs(mean) >= _ONE_SIDED * magnitude)
    return numpy.where(same, -numpy.sign(mean), np.float32(0))


@elementwise
def _place_along(numpy, sign, score):
    points = sign[None] * numpy.asarray(_DISTANCES)[:, None]
    return numpy.where(sign[None] != 0, points, score[None])


@elementwise
def _balance(numpy, start, sign, slopes, mirrored, weights, mean_weight, shares):
    rows = total(numpy.sum(weights > 0, dtype=np.int32)).astype(np.float32)
    rows = rows * shares * numpy.maximum(mean_weight, np.float32(1))
    slopes, mirrored = (numpy.abs(numpy.asarray(s)) for s in (slopes, mirrored))
    grows = ~(mirrored <= _BOUNDED * slopes[:1])
    event = numpy.where(grows, slopes[:1], mirrored)
    tiny = np.float32(1e-37)
    excess = numpy.log(numpy.maximum(slopes, tiny)) - numpy.log(
        numpy.maximum(event / 2, tiny)
    )
    excess = excess + numpy.log(rows)[None]
    balanced = excess <= 0
    found = numpy.any(balanced, axis=0) & (sign != 0)
    end = numpy.maximum(numpy.argmax(balanced, axis=0), 1)
    distances, places = numpy.asarray(_DISTANCES), numpy.arange(len(sign))
    # Slopes of losses without a minimum mostly fade exponentially.
    before, after = excess[end - 1, places], excess[end, places]
    share = numpy.clip(before / (before - after), 0.0, 1.0)
    near, far = distances[end - 1], distances[end]
    point = sign * (near + share * (far - near))
    score = numpy.where(found & numpy.isfinite(point), point, start.score)
    rule = numpy.where(numpy.any(found), np.int32(2), start.rule)
    return Start(score.astype(np.float32), rule.astype(np.int32))


def _find_argmin(objective, offset, weights):
    num_scores = offset.shape[0]
    if num_scores == 1:
        return _initial_along(objective, offset, weights, np.int32(0))
    assert objective.minimizer is not None  # always found for K > 1
    targets = known_targets(objective.loss, objective.targets)
    known = _are_all_known(objective.minimizer, weights, targets)

    def separately(offset):
        # One program for all scores: K copies of it would take K times as long to
        # compile, also if the scores of the loss interact.
        numbers = np.arange(num_scores, dtype=np.int32)
        found = partial(_initial_along, objective, offset, weights)
        return _flatten(map_points(found, numbers))

    def jointly(offset):
        return minimise_jointly(objective, offset, weights)

    return branch(known, separately, jointly, offset)


@stage
def _flatten(numbers):
    return numbers.reshape(-1)


@elementwise
def _are_all_known(numpy, minimizer, weights, targets):
    known = numpy.isfinite(minimizer) | (weights <= 0)[None, :]
    return every(numpy.all(known if targets is None else known | ~targets))


def median_score(
    objective: Objective,
    offset: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Float[Array, " K"]:
    """Returns the weighted median of the rows' own minimizers, for each score.

    NaN where a row that counts has a slope, but no minimum.
    """
    minimizer = objective.minimizer
    if minimizer is None:  # a quadratic, which training needs none for
        minimizer = locate_minimizers(objective, weights.shape[0])
        objective = objective._replace(minimizer=minimizer)
    medians = [
        find_medians(objective, one_group(offset, weights, np.int32(k)))
        for k in range(offset.shape[0])
    ]
    slopes = gradients(objective, offset)
    return _where_known(medians, slopes, minimizer, weights)


@stage
def _where_known(medians, slopes, minimizer, weights):
    known = jnp.isfinite(minimizer) | (slopes == 0) | (weights <= 0)[None, :]
    return jnp.where(every(jnp.all(known, axis=1)), jnp.concatenate(medians), jnp.nan)


def _initial_along(objective, offset, weights, k):
    if objective.minimizer is None:  # a quadratic: one step, one more against rounding
        start = np.zeros(1, np.float32)
        for _ in range(2):
            scores = move_scores(offset, start)
            slopes = gradients(objective, scores)
            matrices = hessian_matrices(objective, scores)
            slopes, curvature = _take_first(slopes, matrices)
            means = weighted_mean(slopes, weights), weighted_mean(curvature, weights)
            start = _take_newton_step(start, *means)
        return start
    groups = one_group(offset, weights, k)

    def search():
        return _search_start(objective, groups, k)

    if objective.kinks is None:
        return search()
    return solve_at_kinks(objective, groups, objective.kinks, search)


@elementwise
def _take_first(numpy, slopes, matrices):
    del numpy
    return slopes[0], matrices[:, 0, 0]


@elementwise
def _take_newton_step(numpy, start, gradient, hessian):
    return start - gradient / numpy.where(hessian > 0, hessian, np.inf)


def _search_start(objective, groups, k):
    points = _starting_points(objective.minimizer, groups.scores, k, groups.weights)
    start = best_of(objective, groups, points)
    moved, step = begin_at(groups, k, start)
    # No Newton step is at hand: a small step to bracket from, not to fall back on.
    found = solve_groups(objective, moved, step, np.ones(1, bool))
    losses = [
        total_loss(objective, moved, end) for end in (_only(found), np.float32(0))
    ]
    return _add_if_better(start, found, *losses)


@elementwise
def _only(numpy, found):
    return found[0]


@elementwise
def _add_if_better(numpy, start, found, loss, loss_before):
    return start + numpy.where(loss <= loss_before, found, 0.0)


@elementwise
def _starting_points(numpy, minimizer, scores, k, weights):
    """Returns 0 and quantiles of the minimizers, by sorting at most 8,192 rows.

    Rows count as often as :func:`jboost.kernels.exact_sums.split_weights` says.
    """
    distance = minimizer[k] - scores[k]
    usable = numpy.where(weights > 0, distance, np.float32(np.nan))
    stride = -(-count_rows(usable.shape[0]) // 8192)
    rows = _take_strided(numpy.stack([usable, weights], axis=1), stride)
    rows = rows[numpy.argsort(rows[:, 0])]  # NaN last
    ordered, times = rows[:, 0], count_times(numpy, rows[:, 1])[0]
    times = numpy.where(numpy.isfinite(ordered), times.astype(np.int32), 0)
    below = numpy.cumsum(times, dtype=np.int32)
    most = numpy.maximum(below[-1] - 1, 0).astype(np.float32)
    wanted = numpy.round(_SHARES * most).astype(np.int32)
    index = numpy.searchsorted(below, wanted, side="right")
    index = numpy.minimum(index, len(ordered) - 1)
    points = numpy.where(below[-1] > 0, ordered[index], np.float32(0))
    return numpy.append(points, np.float32(0))


def _take_strided(values, stride):
    """Returns the global rows 0, stride, ... of [N, C], on shards with rows of NaN."""
    if current_shards() is None:
        return values[::stride]
    num_rows = values.shape[0]
    start = (-first_row()) % jnp.int32(stride)
    rows = start + stride * jnp.arange(num_rows // stride + 1, dtype=jnp.int32)
    usable = (rows < num_rows) & real_rows(num_rows)[jnp.minimum(rows, num_rows - 1)]
    taken = values[jnp.minimum(rows, num_rows - 1)]
    return gather(jnp.where(usable[:, None], taken, jnp.nan))


def _avoid_plateau(objective, offset, weights, slopes, found):
    """Moves a start where no row has a slope to where the most rows have one."""

    def move(found):
        scores = move_scores(offset, found)
        counts = count_slopes(objective, slopes, scores, weights)
        if len(offset) > 1:
            starts = np.zeros((1, len(offset)), np.float32)
        else:
            k = np.int32(0)
            starts = _starting_points(objective.minimizer, offset, k, weights)[:, None]

        def measure(c):
            return _share(gradients(objective, move_scores(offset, c)), weights)

        return _move_if_stuck(counts, starts, map_points(measure, starts), found)

    def stay(found):
        return Start(found, np.int32(0))

    can_learn = for_branches().asarray(_share(slopes, weights)) > 0
    return branch(can_learn, stay, move, found)


def _share(slopes, weights):
    """Returns the share of rows with a slope."""
    return weighted_mean(_are_usable(slopes), weights)


@elementwise
def _are_usable(numpy, slopes):
    usable = numpy.any(numpy.isfinite(slopes) & (slopes != 0), axis=0)
    return usable.astype(np.float32)


@elementwise
def _move_if_stuck(numpy, counts, starts, shares, found):
    moves = counts.stuck() & (numpy.max(shares) > 0)
    start = numpy.asarray(starts)[numpy.argmax(shares)]
    return Start(numpy.where(moves, start, found), moves.astype(np.int32))
