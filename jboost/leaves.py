# SPDX-License-Identifier: Apache-2.0
"""What each leaf adds to the score, and the score that training starts from.

In: a loss bound to its data, current scores, the leaf of each row. Out: one value
per leaf. A problem is always the same: minimise over c

    sum_i w_i l(F_i + c d_i, y_i) + penalty c^2 / 2      over the rows i of a group,

with d = 1 and a group per leaf (TreeBoost), d = the tree's own values and one group
(one multiplier per tree), or d = 1 and one group (the initial score).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jboost.curvature import (
    Objective,
    gradients,
    hessian_matrices,
    loss_values,
    weighted_mean,
)
from jboost.histogram import sum_by_group
from jboost.minimum import find_minimum

LeafSolver = Literal["auto", "newton", "exact", "line_search"]
Fitted = Literal["newton", "guarded", "exact", "line_search"]  # "auto" resolved
_NOISE = 1e-6  # of a sum of magnitudes: what float32 sums cannot tell from zero
_KEPT = 0.25  # share of the predicted decrease that a Newton step must achieve
_STARTS = 33  # where the search for an initial score may begin
_NEWTON_STEPS = 50  # at most, for an initial score of K numbers


class Groups(NamedTuple):
    """Problems along one score.

    Attributes:
      k: which score.
      scores: of all rows.
      weights: 0 for rows that do not count.
      direction: d above.
      group: of each row.
      penalty: of each problem.
    """

    k: Int32[Array, ""]
    scores: Float[Array, "K N"]
    weights: Float[Array, " N"]
    direction: Float[Array, " N"]
    group: Int32[Array, " N"]
    penalty: Float[Array, " G"]


def newton_step(
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    leaf: Int32[Array, " N"],
    penalty: Float[Array, ""],
    num_leaves: int,
) -> tuple[Float[Array, " L"], Float[Array, " L"]]:
    """-G / (H + penalty) of each leaf (Chen and Guestrin 2016, eq. 5).

    Args:
      gradient, curvature: times weight; 0 for rows that do not count.

    Returns:
      The values, and the decrease G^2 / (2 (H + penalty)) that they promise.
    """
    slope = sum_by_group(gradient, leaf, num_leaves)
    weight = sum_by_group(curvature, leaf, num_leaves) + penalty
    value = -slope / jnp.where(weight > 0, weight, jnp.inf)
    return value, -slope * value / 2


def solve_leaves(
    objective: Objective,
    groups: Groups,
    step: Float[Array, " L"],
    promised: Float[Array, " L"],
    leaf_solver: LeafSolver | Fitted,
) -> Float[Array, " L"]:
    """Leaf values from Newton steps.

    ``"newton"``: the steps. ``"exact"``: the argmin of each leaf's loss; where that
    is an interval, its midpoint; never worse than the Newton step or than 0.
    ``"guarded"``: the exact value in leaves whose loss falls by less than a quarter
    of what the Newton step promised, else the step. ``"line_search"``: the steps
    times one number per tree, the argmin of the loss (Friedman 2001, algorithm 1).
    """
    if leaf_solver == "newton":
        return step
    if leaf_solver == "line_search":
        along = step[groups.group] * groups.direction
        one = Groups(
            groups.k, groups.scores, groups.weights, along,
            jnp.zeros_like(groups.group), jnp.zeros(1, jnp.float32),
        )  # fmt: skip
        return (
            step
            * solve_groups(objective, one, jnp.ones(1, jnp.float32), jnp.ones(1, bool))[
                0
            ]
        )
    if leaf_solver == "exact":
        return solve_groups(objective, groups, step, jnp.ones(step.shape, bool))
    change, noise = _loss_change(objective, groups, step)
    # A change that is not a number fails this comparison, as it should.
    kept = -change >= _KEPT * promised - noise
    return solve_groups(objective, groups, step, ~kept)


def solve_groups(
    objective: Objective,
    groups: Groups,
    step: Float[Array, " G"],
    wanted: Bool[Array, " G"],
) -> Float[Array, " G"]:
    """The exact minimiser where wanted, else ``step``.

    The candidate with the least loss among the minimum found, the step and 0: for a
    loss with several minima the one found may be a poor one.
    """
    low, high = _bounds(objective, groups)
    size = weighted_mean(jnp.abs(groups.scores[groups.k]), groups.weights)
    probe = jnp.where(step == 0, 1e-3 * (1 + size), jnp.abs(step))
    found = find_minimum(
        lambda c: _slope(objective, groups, c),
        jnp.zeros_like(step),
        probe,
        low=low,
        high=high,
        wanted=wanted,
    )
    solved = wanted & (found.strict | found.jump)

    def choose(_):
        root = jnp.where(solved, found.point, step)
        of_root, noise = _loss_change(objective, groups, root)
        of_step, _ = _loss_change(objective, groups, step)
        of_step = jnp.where(jnp.isfinite(of_step), of_step, jnp.inf)
        fallback = jnp.where(of_step <= 0, step, 0.0)
        best = jnp.minimum(of_step, 0.0)
        return jnp.where(of_root <= best + noise, root, fallback)

    value = jax.lax.cond(jnp.any(wanted), choose, lambda _: step, None)
    return jnp.where(wanted, value, step)


def initial_score(
    objective: Objective, offset: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Float[Array, " K"]:
    """argmin_c of the weighted loss at scores offset + c.

    One number: the quadratic's own step, or the exact solver, begun at the best of
    33 quantiles of the rows' own minimisers (a loss with several minima has its best
    one near some row's). K numbers: score by score where they do not interact, else
    damped Newton with the full K x K Hessian.
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


def _initial_along(objective, offset, weights, k):
    rows = offset.shape[1]
    groups = Groups(
        jnp.int32(k), offset, weights, jnp.ones(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32), jnp.zeros(1, jnp.float32),
    )  # fmt: skip
    if objective.minimiser is None:  # a quadratic: one step, one more against rounding
        start = jnp.float32(0)
        for _ in range(2):
            scores = offset + start
            gradient = weighted_mean(gradients(objective, scores)[0], weights)
            hessian = weighted_mean(
                hessian_matrices(objective, scores)[:, 0, 0], weights
            )
            start -= gradient / jnp.where(hessian > 0, hessian, jnp.inf)
        return start
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
    return weighted_mean(loss_values(objective, scores), groups.weights)


def _damped_newton(objective, offset, weights):
    """Levenberg-Marquardt on the mean loss of K scores."""
    num_scores = offset.shape[0]
    identity = jnp.eye(num_scores, dtype=jnp.float32)

    def mean_loss(c):
        value = weighted_mean(loss_values(objective, offset + c[:, None]), weights)
        return jnp.where(jnp.isfinite(value), value, jnp.inf)

    def unfinished(state):
        count, _, _, _, moved = state
        return (count < _NEWTON_STEPS) & (moved > 1e-6)

    def improve(state):
        count, c, damping, loss, moved = state
        scores = offset + c[:, None]
        gradient = weighted_mean(gradients(objective, scores), weights)
        matrices = hessian_matrices(objective, scores)
        hessian = weighted_mean(jnp.moveaxis(matrices, 0, -1), weights)
        size = jnp.maximum(jnp.max(jnp.abs(hessian)), 1e-30)
        step = -jnp.linalg.solve(hessian + damping * size * identity, gradient)
        new_loss = mean_loss(c + step)
        better = new_loss < loss
        return (
            count + 1,
            jnp.where(better, c + step, c),
            jnp.where(better, jnp.maximum(damping / 10, 1e-6), damping * 10),
            jnp.where(better, new_loss, loss),
            jnp.where(
                better, jnp.max(jnp.abs(step)), jnp.where(damping > 1e6, 0.0, moved)
            ),
        )

    start = jnp.zeros(num_scores, jnp.float32)
    state = (jnp.int32(0), start, jnp.float32(1e-3), mean_loss(start), jnp.float32(1))
    return jax.lax.while_loop(unfinished, improve, state)[1]


def _shift(groups, c):
    """Scores after adding c times the direction."""
    return groups.scores.at[groups.k].add(c[groups.group] * groups.direction)


def _slope(objective, groups, c):
    """d/dc of each problem; exactly zero where it is lost in rounding."""
    gradient = gradients(objective, _shift(groups, c))[groups.k] * groups.direction
    weighted = jnp.where(groups.weights > 0, groups.weights * gradient, 0.0)
    slope = sum_by_group(weighted, groups.group, c.shape[0]) + groups.penalty * c
    size = sum_by_group(jnp.abs(weighted), groups.group, c.shape[0])
    return slope, _NOISE * size


def _loss_change(objective, groups, c):
    """Change of each problem's loss from 0 to c, and what rounding may add to it."""
    before = loss_values(objective, groups.scores)
    after = loss_values(objective, _shift(groups, c))
    counts = groups.weights > 0
    change = jnp.where(counts, groups.weights * (after - before), 0.0)
    size = jnp.where(counts, groups.weights * (jnp.abs(after) + jnp.abs(before)), 0.0)
    total = sum_by_group(change, groups.group, c.shape[0])
    noise = _NOISE * sum_by_group(size, groups.group, c.shape[0])
    return total + groups.penalty * jnp.square(c) / 2, noise


def _bounds(objective, groups):
    """Between which the minimum lies if all rows know theirs, else nothing."""
    num_groups = groups.penalty.shape[0]
    unknown = jnp.full(num_groups, jnp.inf, jnp.float32)
    if objective.minimiser is None:
        return -unknown, unknown
    distance = objective.minimiser[groups.k] - groups.scores[groups.k]
    # Rows that do not move (direction 0) are happy with every c.
    moves = (groups.weights > 0) & (groups.direction != 0)
    wish = distance / jnp.where(moves, groups.direction, 1.0)
    wish_high = jnp.where(jnp.isfinite(wish), wish, jnp.inf)
    wish_low = jnp.where(jnp.isfinite(wish), wish, -jnp.inf)
    group = jnp.where(moves, groups.group, num_groups)
    high = jax.ops.segment_max(wish_high, group, num_segments=num_groups)
    low = jax.ops.segment_min(wish_low, group, num_segments=num_groups)
    # The penalty pulls towards 0; empty groups stay there.
    return jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
