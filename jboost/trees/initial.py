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
from jaxtyping import Array, Bool, Float, Int32

from jboost.objective.evaluation import (
    Objective,
    gradients,
    hessian_matrices,
    hessians,
    loss_values,
    mean_of_rows,
)
from jboost.objective.minimizers import find_minimizers
from jboost.trees.joint_start import (
    ROUNDING,
    begin_at,
    best_of,
    minimise_jointly,
    one_group,
    total_loss,
)
from jboost.trees.leaves import (
    find_medians,
    solve_at_kinks,
    solve_groups,
)

_STARTS = 33  # where the search may begin
_PROBES = 6  # distances, 1/16 to 16^4 times the score, at which losses are compared
_BESIDE = 2.0**-10  # of 1 + |minimizer|: where the loss must be defined, too


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
    not interact, else see :func:`minimise_jointly`.

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
        return minimise_jointly(objective, offset, weights)

    return jax.lax.cond(jnp.all(known), separately, jointly, offset)


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
        minimizer = find_minimizers(objective, weights.shape[0])
        objective = objective._replace(minimizer=minimizer)
    flat = gradients(objective, offset) == 0
    known = jnp.all(jnp.isfinite(minimizer) | flat | (weights <= 0)[None, :], axis=1)
    medians = [
        find_medians(objective, one_group(offset, weights, k))[0]
        for k in range(offset.shape[0])
    ]
    return jnp.where(known, jnp.stack(medians), jnp.nan)


def _initial_along(objective, offset, weights, k):
    groups = one_group(offset, weights, k)
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
    moved, step = begin_at(groups, k, start)
    everything = jnp.ones(1, bool)
    # No Newton step is at hand: a small step to bracket from, not to fall back on.
    found = solve_groups(objective, moved, step, everything)
    better = total_loss(objective, moved, found[0]) <= total_loss(
        objective, moved, jnp.float32(0)
    )
    return start + jnp.where(better, found[0], 0.0)


def _best_start(objective, groups, k):
    """Returns the best start along a score: 0 or a quantile of the minimizers."""
    starts = _starting_points(objective.minimizer[k] - groups.scores[k], groups.weights)
    return best_of(objective, groups, starts)


def _starting_points(distance, weights):
    """Returns 0 and quantiles of the minimizers, by sorting at most 8,192 rows."""
    usable = jnp.where(weights > 0, distance, jnp.nan)
    stride = -(-usable.shape[0] // 8192)
    ordered = jnp.sort(usable[::stride])  # NaN last
    number = jnp.sum(jnp.isfinite(ordered))
    share = jnp.linspace(0.0, 1.0, _STARTS - 1, dtype=jnp.float32)
    index = jnp.round(share * jnp.maximum(number - 1, 0).astype(jnp.float32))
    points = jnp.where(number > 0, ordered[index.astype(jnp.int32)], 0.0)
    return jnp.append(points, 0.0)


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
        """Returns whether no row has a finite slope, and one is not at its minimum."""
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
        settled = jnp.where(known, here <= least + ROUNDING * jnp.abs(least), settled)
    every = (counts, counts & lost, counts & flat, counts & flat & settled)
    return Slopes(*(jnp.sum(rows, dtype=jnp.int32) for rows in every))


def _is_lowest(objective, scores, here):
    """Returns whether no score far or near gives a row a lower loss.

    The loss of a row without a minimum may have reached its infimum in float32: the
    logistic loss of a score of 150 is 0, and so are its derivatives.
    """
    num_scores = len(scores)
    least = here - ROUNDING * jnp.abs(here)
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
    """Returns whether a loss of constant curvature has slopes but no minima.

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
