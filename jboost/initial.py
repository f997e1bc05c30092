# SPDX-License-Identifier: Apache-2.0
"""The score that training starts from.

In: a loss bound to its data, offsets. Out: argmin_c of the weighted loss, or the
median of the rows' own minimisers, one number or K: the problem of ``leaves`` with
one group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.curvature import (
    Objective,
    find_minimisers,
    gradients,
    hessian_matrices,
    loss_values,
    mean_of_rows,
)
from jboost.leaves import Groups, find_medians, solve_at_kinks, solve_groups

_STARTS = 33  # where the search may begin
_ROUNDING = 2.0**-21  # of a mean in float32
_NEWTON_STEPS = 50  # at most, for K numbers


class MedianStart(NamedTuple):
    """Asks for :func:`median_score`; a pytree without arrays, so that jit sees it."""


def initial_score(
    objective: Objective,
    offset: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Float[Array, " K"]:
    """argmin_c of the weighted loss at scores offset + c.

    One number: the quadratic's own step, an order statistic of the rows' minimisers,
    or the exact solver, begun at the best of 33 quantiles of them (a loss with several
    minima has its best one near some row's). K numbers: score by score where they do
    not interact, else damped Newton with the full K x K Hessian.
    """
    num_scores = offset.shape[0]
    if num_scores == 1:
        return _initial_along(objective, offset, weights, 0)[None]
    minimiser = objective.minimiser
    assert minimiser is not None  # always found for K > 1
    known = jnp.isfinite(minimiser) | (weights <= 0)[None, :]

    def separately(offset):
        along = [
            _initial_along(objective, offset, weights, k) for k in range(num_scores)
        ]
        return jnp.stack(along)

    def jointly(offset):
        return _damped_newton(objective, offset, weights)

    return jax.lax.cond(jnp.all(known), separately, jointly, offset)


def median_score(
    objective: Objective,
    offset: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Float[Array, " K"]:
    """The weighted median of the rows' own minimisers F* - offset, for each score.

    NaN where a row that counts has a slope, but no minimum.
    """
    minimiser = objective.minimiser
    if minimiser is None:  # a quadratic, which training needs none for
        minimiser = find_minimisers(objective, weights.shape[0])
        objective = objective._replace(minimiser=minimiser)
    flat = gradients(objective, offset) == 0
    known = jnp.all(jnp.isfinite(minimiser) | flat | (weights <= 0)[None, :], axis=1)
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
    if objective.minimiser is None:  # a quadratic: one step, one more against rounding
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
    offset, weights = groups.scores, groups.weights
    starts = _starting_points(objective.minimiser[k] - offset[k], weights)
    losses = jax.lax.map(lambda c: _total_loss(objective, groups, c), starts)
    start = starts[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]
    moved = groups._replace(scores=offset.at[k].add(start))
    step = jnp.maximum(jnp.abs(start), 1.0)[None] * 2.0**-10
    everything = jnp.ones(1, bool)
    # No Newton step is at hand: a small step to bracket from, not to fall back on.
    found = solve_groups(objective, moved, step, everything)
    better = _total_loss(objective, moved, found[0]) <= _total_loss(
        objective, moved, jnp.float32(0)
    )
    return start + jnp.where(better, found[0], 0.0)


def _starting_points(distance, weights):
    """0 and quantiles of the rows' own minimisers, by sorting at most 8,192 rows."""
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


def _damped_newton(objective, offset, weights):
    """Levenberg-Marquardt on the mean loss of K scores, along the Hessian's axes."""

    def mean_loss(c):
        values = loss_values(objective, offset + c[:, None])
        value = mean_of_rows(objective, values, weights)
        return jnp.where(jnp.isfinite(value), value, jnp.inf)

    def unfinished(state):
        count, _, _, _, moved = state
        return (count < _NEWTON_STEPS) & (moved > 1e-6)

    def improve(state):
        count, c, damping, loss, moved = state
        scores = offset + c[:, None]
        rows = gradients(objective, scores)
        matrices = hessian_matrices(objective, scores)
        hessian = mean_of_rows(objective, jnp.moveaxis(matrices, 0, -1), weights)
        size = jnp.maximum(jnp.max(jnp.abs(hessian)), 1e-30)
        curvature, axes = jnp.linalg.eigh(hessian)
        slope = mean_of_rows(objective, rows, weights) @ axes
        # What is left of a sum that should be 0 says nothing. Where there is no
        # curvature either (scores of softmax may all be shifted), it would be followed
        # far away.
        noise = _ROUNDING * jnp.max(mean_of_rows(objective, jnp.abs(rows), weights))
        slope = jnp.where(jnp.abs(slope) > noise, slope, 0.0)
        step = -(axes @ (slope / (curvature + damping * size)))
        new_loss = mean_loss(c + step)
        # Close to the minimum the loss is flat to the last bits, the gradient is not.
        better = new_loss <= loss + _ROUNDING * jnp.abs(loss)
        return (
            count + 1,
            jnp.where(better, c + step, c),
            jnp.where(better, jnp.maximum(damping / 10, 1e-6), damping * 10),
            jnp.where(better, new_loss, loss),
            jnp.where(
                better, jnp.max(jnp.abs(step)), jnp.where(damping > 1e6, 0.0, moved)
            ),
        )

    start = jnp.zeros(offset.shape[0], jnp.float32)
    state = (jnp.int32(0), start, jnp.float32(1e-3), mean_loss(start), jnp.float32(1))
    return jax.lax.while_loop(unfinished, improve, state)[1]
