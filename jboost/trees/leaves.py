# SPDX-License-Identifier: Apache-2.0
"""Leaf values: Newton steps, order statistics, and exact searches.

The value c of a leaf minimizes, over the rows i of a group,

    sum_i w_i l(F_i + c d_i, y_i) + penalty c^2 / 2 - pull c + l1 |c|

with d = 1 and a group per leaf (TreeBoost), d = the tree's own values and one group
(one multiplier per tree), or d = 1 and one group (the initial score).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.collectives import current_shards, on_first_shard
from jboost.entry.stages import elementwise, stage, switch
from jboost.kernels.library import choose
from jboost.kernels.xla import round_alone
from jboost.numerics.derivatives import differentiable
from jboost.numerics.exact import sum_changes, sum_channels, sum_rows
from jboost.objective.evaluation import (
    Kinks,
    Objective,
    gradients,
    hessians,
    loss_values,
    weighted_mean,
)
from jboost.objective.minimizers import exact_scale, kink_slopes
from jboost.objective.minimum import Minimum, find_minimum
from jboost.trees.implicit import derive_solution
from jboost.trees.leaf_operations import add_values, find_range, middle_minimizers
from jboost.trees.tree import LeafSums


class LeafProblems(NamedTuple):
    """Minimization problems along one score, one for each group of rows.

    Attributes:
      k: index of the score.
      weights: the row weights; 0 for rows that do not count.
      direction: d of each row (see the module's formula); None: 1.
      penalty: coefficient of c^2 / 2 in each problem.
      pull: coefficient of -c in each problem, which moves the minimum of the penalty
        to pull / penalty; None: 0.
      l1: coefficient of |c| in every problem; None: 0.
      zero_rows: weight of one pseudo-row per group, which pulls order statistics toward
        0; see :func:`jboost.trees.leaves.solve_at_kinks`. None: 0.
    """

    k: Int32[Array, ""]
    scores: Float[Array, "K N"]
    weights: Float[Array, " N"]
    direction: Float[Array, " N"] | None
    group: Int32[Array, " N"]
    penalty: Float[Array, " G"]
    pull: Float[Array, " G"] | None = None
    l1: Float[Array, ""] | None = None
    zero_rows: Float[Array, ""] | None = None


def take_rows(groups: LeafProblems, rows: Int32[Array, " M"]) -> LeafProblems:
    """Returns the same problems with some of their rows."""
    direction = groups.direction
    return groups._replace(
        scores=groups.scores[:, rows],
        weights=groups.weights[rows],
        direction=None if direction is None else direction[rows],
        group=groups.group[rows],
    )


@stage
def shift_scores(groups: LeafProblems, c: Float[Array, " G"]) -> Float[Array, "K N"]:
    """Returns the scores after adding c times the direction."""
    if groups.direction is not None:
        change = round_alone(c[groups.group] * groups.direction)
        return _replace_score(groups, (groups.scores[groups.k] + change)[None])
    row = groups.scores[groups.k][None]
    return _replace_score(groups, add_values(row, c[None], groups.group[None]))


def _replace_score(groups, row):
    """Returns all scores, with another row in place of score k."""
    if groups.scores.shape[0] == 1:
        return row
    return jax.lax.dynamic_update_slice_in_dim(groups.scores, row, groups.k, 0)


def newton_step(
    gradient: Float[Array, "*K L"],
    curvature: Float[Array, "*K L"],
    penalty: Float[Array, "..."],
    l1: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "*K L"], Float[Array, "*K L"]]:
    """Returns -G / (H + penalty) of each leaf (Chen and Guestrin 2016, eq. 5).

    It is 0 where H is not positive, as in XGBoost. G and H are weighted sums over the
    leaf's rows; ``l1`` shifts G toward 0 first, for a term l1 |c| in the objective. The
    second result is the decrease G^2 / (2 (H + penalty)) that the values promise.
    """
    weight = jnp.where(curvature > 0, curvature + penalty, jnp.inf)
    if l1 is not None:
        gradient = gradient - jnp.clip(gradient, -l1, l1)
    value = -gradient / weight
    return value, -gradient * value / 2


class NewtonSteps(NamedTuple):
    """The Newton steps of the leaves of a tree, or of the trees of K scores.

    No loss is needed for them besides the sums of its derivatives.

    Attributes:
      value: the steps.
      promised: the decrease of each leaf's loss that its step promises.
      usual: the median of the promises of a tree that are positive; NaN: none is.
      penalty, pull: fields of :class:`LeafProblems`.
    """

    value: Float[Array, "*K L"]
    promised: Float[Array, "*K L"]
    usual: Float[Array, "*K"]
    penalty: Float[Array, "*K L"]
    pull: Float[Array, "*K L"] | None


def find_steps(
    sums: LeafSums,
    penalty: Float[Array, ""],
    parent: Float[Array, ""] | None,
    l1: Float[Array, ""] | None,
) -> NewtonSteps:
    """Returns the Newton steps of the leaves of a tree.

    ``parent`` is the weight of :func:`pull_to_parents`; None: steps are shrunk to 0.
    """
    gradient, pull = sums.gradient, None
    penalties = jnp.broadcast_to(penalty, gradient.shape)
    if parent is not None:
        penalties, pull = pull_to_parents(sums, penalty, parent, l1)
        gradient = gradient - pull
    value, promised = newton_step(gradient, sums.curvature, penalties, l1)
    usual = jnp.nanmedian(jnp.where(promised > 0, promised, jnp.nan))
    return NewtonSteps(value, promised, usual, penalties, pull)


def pull_to_parents(
    sums: LeafSums,
    penalty: Float[Array, "..."],
    parent: Float[Array, "..."],
    l1: Float[Array, "..."] | None,
) -> tuple[Float[Array, "*K L"], Float[Array, "*K L"]]:
    """Returns penalty and pull of each leaf of a tree that shrinks values to parents.

    From the root down, a node has the value

        v = -(G - parent v_above) / (H + penalty + parent),

    where v_above is the value of the node above it. The root is shrunk to 0 by the
    penalty alone. A node without rows on one side is no split: its child keeps its
    value.
    """
    nodes = jnp.stack([sums.gradient, sums.curvature, sums.weight])
    leaf = np.arange(nodes.shape[-1])
    depth = len(leaf).bit_length() - 1
    siblings = leaf ^ (1 << np.arange(depth))[:, None]

    def rise(nodes, sibling):  # each leaf gets the sums of the nodes above it
        others = nodes[..., sibling]
        return nodes + others, (nodes[:2], (nodes[2] > 0) & (others[2] > 0))

    more = penalty + parent

    def fall(state, below):
        (gradient, curvature), split = below
        toward = round_alone(parent * state[-1])
        step, _ = newton_step(gradient - toward, curvature, more, l1)
        found = more, toward, step
        return tuple(map(partial(jnp.where, split), found, state)), None

    root, below = _walk(rise, nodes, siblings.astype(np.int32), depth)
    value, _ = newton_step(root[0], root[1], penalty, l1)
    state = jnp.broadcast_to(penalty, value.shape), jnp.zeros_like(value), value
    (total, pull, _), _ = _walk(fall, state, below, depth, reverse=True)
    return total, pull


def _walk(step, state, levels, depth, reverse=False):
    """Scans levels; a GPU runs each step of a loop as several kernels."""
    loop = partial(jax.lax.scan, step, reverse=reverse)
    unrolled = partial(loop, unroll=max(1, depth))
    return choose(xla=loop, cuda=unrolled)(state, levels)


def find_medians(objective: Objective, groups: LeafProblems) -> Float[Array, " G"]:
    """Finds the middle of all c that minimize sum_i w_i |F*_i - F_i - c| per group.

    The weighted median of the rows' own minimizers F*; rows without one do not count.
    """
    return _find_medians(objective.minimizer, groups)


@stage
def _find_medians(minimizer, groups):
    assert minimizer is not None
    minimizer = minimizer[groups.k]
    known = jnp.isfinite(minimizer)
    weights = jnp.where(known, groups.weights, 0.0)
    slopes = (jnp.float32(1), jnp.float32(2))
    return middle_minimizers(
        jnp.where(known, minimizer, 0.0), groups.scores[groups.k], weights, slopes,
        exact_scale(2 * sum_rows(weights)), groups.group, groups.penalty.shape[0],
    )  # fmt: skip


def solve_at_kinks(
    objective: Objective,
    groups: LeafProblems,
    kinks: Kinks,
    solve: Callable[[], Float[Array, " G"]],
) -> Float[Array, " G"]:
    """Returns order statistics if each row has one kink, else the result of ``solve``.

    With ``groups.zero_rows`` = m, each group has one more row, of weight m, with the
    slopes of an average row and its minimum at the present score. For squared error
    such a row would add m c^2 / 2 to a leaf's loss, as l2 does; for absolute error the
    value is the median of the residuals and of m zeros.
    """
    assert objective.minimizer is not None
    minimizer = objective.minimizer

    def of_rows():
        return _find_middles(minimizer, groups, kinks, kink_slopes(objective))

    def of_all():
        slopes = (kinks.left, kinks.right)
        return _find_middles(minimizer, groups, kinks, slopes)

    return switch(kinks.kind, [solve, of_rows, of_all])


@stage
def _find_middles(minimizer, groups, kinks, slopes):
    left, right = slopes
    kinks_of_rows, scale = (left, left + right), kinks.scale
    rows = (minimizer[0], groups.scores[0], groups.weights, groups.group)
    if groups.zero_rows is not None:
        rows, kinks_of_rows, scale = _add_zero_rows(rows, kinks_of_rows, scale, groups)
    *values, group = rows
    return middle_minimizers(
        *values, kinks_of_rows, scale, group, groups.penalty.shape[0]
    )


def _add_zero_rows(rows, kinks, scale, groups):
    num_groups, zero_rows = groups.penalty.shape[0], groups.zero_rows
    every = jnp.arange(num_groups, dtype=groups.group.dtype)
    means = [weighted_mean(kink, groups.weights) for kink in kinks if kink.ndim]
    if means:
        kinks = [
            jnp.append(kink, jnp.broadcast_to(mean, num_groups))
            for kink, mean in zip(kinks, means, strict=True)
        ]
    kink = means[1] if means else kinks[1]
    added = (jnp.float32(0), jnp.float32(0), on_first_shard(zero_rows), every)
    rows = [
        jnp.append(values, jnp.broadcast_to(value, num_groups))
        for values, value in zip(rows, added, strict=True)
    ]
    # Half of the range for the rows, half for the added rows.
    scale = jnp.minimum(scale, exact_scale(zero_rows * kink)) / 2
    return rows, tuple(kinks), scale


LeafSolver = Literal[
    "auto",
    "newton",
    "hessian",
    "guarded",
    "exact",
    "line_search",
    "median_step",
    "joint",
]
_NOISE = 1e-6  # rounding error of a float32 sum, relative to the sum of magnitudes
_SHORTEST = 2.0**-40  # first step, relative to the bounds of the minimum
_MANY_SCORES = 32_768  # from this K * N on, rows of poor leaves are gathered,
_ROWS_PER_GATHERED = 16  # if they are at most one row in 16
_KEPT = 0.25  # share of the predicted decrease that a Newton step must achieve


def solve_leaves(
    objective: Objective,
    groups: LeafProblems,
    newton: NewtonSteps,
    leaf_solver: LeafSolver,
    bounds: Float[Array, "L 2"] | None = None,
) -> Float[Array, " L"]:
    """Computes leaf values from Newton steps.

    ``"newton"``, ``"hessian"``: the steps, with different curvatures. ``"exact"``: the
    argmin of each leaf's loss, or the midpoint if the argmin is an interval; never
    worse than the Newton step or than 0. ``"guarded"``: the step in leaves with at
    least a quarter of the decrease that it promises, else the exact value.
    ``"line_search"``: the steps times one number per tree, the argmin of the loss
    (Friedman 2001, algorithm 1).
    ``"median_step"``: one step from the median, see :func:`step_from_median`.

    Args:
      newton: the steps of the leaves.
      leaf_solver: any but "auto".
      bounds: least and greatest value of each leaf. Values are clipped to them, which
        is optimal for a convex loss. With "line_search" the steps are clipped, and
        their multiple is at least 0, so that their order stays.
    """
    if leaf_solver == "line_search":
        return _search_line(objective, groups, _within(newton.value, bounds), bounds)
    return _within(_solve_freely(objective, groups, newton, leaf_solver), bounds)


def _within(value, bounds):
    return value if bounds is None else jnp.clip(value, bounds[:, 0], bounds[:, 1])


def _search_line(objective, groups, step, bounds):
    """Returns the steps times the multiple that minimizes the tree's loss."""
    along = step[groups.group]
    if groups.direction is not None:
        along = along * groups.direction
    one = LeafProblems(
        groups.k, groups.scores, groups.weights, along,
        jnp.zeros_like(groups.group), jnp.zeros(1, jnp.float32),
    )  # fmt: skip
    start, everything = jnp.ones(1, jnp.float32), jnp.ones(1, bool)
    multiple = solve_groups(objective, one, start, everything)[0]
    return step * (multiple if bounds is None else jnp.maximum(multiple, 0.0))


def _solve_freely(objective, groups, newton, leaf_solver):
    """Finds unbounded leaf values, leaf by leaf."""
    if leaf_solver == "exact":
        return _solve_exactly(objective, groups, newton)
    if leaf_solver == "median_step":
        return step_from_median(objective, groups)
    step = newton.value
    if leaf_solver in ("newton", "hessian"):
        return step
    fallen, hidden = _try_steps(objective, groups, newton)

    def settle(step):
        moved = newton._replace(value=step)
        kept = _ask(objective, groups, moved, fallen, hidden)

        def solve(step):
            return _solve_some(objective, groups, step, ~kept)

        return jax.lax.cond(jnp.all(kept), lambda step: step, solve, step)

    # Most rounds meet only this condition; a GPU waits for each.
    return jax.lax.cond(jnp.all(fallen & ~hidden), lambda step: step, settle, step)


def _solve_some(objective, groups, step, wanted):
    """Computes :func:`solve_groups`, on gathered rows if few are concerned."""
    counts = wanted[groups.group] & (groups.weights > 0)
    groups = groups._replace(weights=jnp.where(counts, groups.weights, 0.0))
    most = len(counts) // _ROWS_PER_GATHERED
    if groups.scores.size < _MANY_SCORES or current_shards() is not None:
        return solve_groups(objective, groups, step, wanted)

    def solve_gathered():
        (rows,) = jnp.nonzero(counts, size=most)
        there = jnp.arange(most) < jnp.sum(counts, dtype=jnp.int32)
        few = take_rows(groups, rows)
        few = few._replace(weights=jnp.where(there, few.weights, 0.0))
        minimizer = objective.minimizer
        part = objective._replace(
            targets=jax.tree.map(lambda column: column[rows], objective.targets),
            minimizer=None if minimizer is None else minimizer[:, rows],
        )
        return solve_groups(part, few, step, wanted)

    def solve_all():
        return solve_groups(objective, groups, step, wanted)

    few = jnp.sum(counts, dtype=jnp.int32) <= most
    return jax.lax.cond(few, solve_gathered, solve_all)


def keeps_steps(
    objective: Objective,
    groups: LeafProblems,
    newton: NewtonSteps,
    before: Float[Array, " N"] | None = None,
) -> Bool[Array, " L"]:
    """Returns whether each leaf's loss falls by a quarter of the promised decrease.

    If the rounding error of the loss hides that (one row far away is enough), the slope
    after the step decides. A quadratic that falls by a quarter of the promise then
    has a slope of at most 3/2 the promise over the step. ``before`` is the loss of each
    row at the scores of ``groups``; None: computed here.
    """
    kept, hidden = _try_steps(objective, groups, newton, before)
    return jax.lax.cond(
        jnp.any(hidden),
        lambda step: _ask(objective, groups, newton._replace(value=step), kept, hidden),
        lambda step: kept,
        newton.value,
    )


def _try_steps(objective, groups, newton, before=None):
    if before is None:
        before = loss_values(objective, groups.scores)
    moved = shift_scores(groups, newton.value)
    return compare_losses(groups, newton, before, loss_values(objective, moved))


def _ask(objective, groups, newton, kept, hidden):
    slope = gradients(objective, shift_scores(groups, newton.value))
    return ask_slopes(groups, newton, kept, hidden, slope)


def compare_losses(
    groups: LeafProblems,
    newton: NewtonSteps,
    before: Float[Array, " N"],
    after: Float[Array, " N"],
) -> tuple[Bool[Array, " L"], Bool[Array, " L"]]:
    """Returns whether each loss falls by enough, and whether rounding may hide that.

    ``before`` and ``after`` are the losses of the rows without and with the steps.
    """
    step, promised = newton.value, newton.promised
    (change, noise), *_ = _sum_changes(groups, before, [after], [step])
    kept = -change >= _KEPT * promised - noise
    # Most trees have leaves that promise next to nothing; these do not count.
    hidden = kept & (noise >= _KEPT * jnp.fmax(promised, newton.usual)) & (step != 0)
    return kept, hidden


def ask_slopes(
    groups: LeafProblems,
    newton: NewtonSteps,
    kept: Bool[Array, " L"],
    hidden: Bool[Array, " L"],
    gradient: Float[Array, "K N"],
) -> Bool[Array, " L"]:
    """Returns ``kept``, but with the slope test for leaves in ``hidden``.

    ``gradient`` is that of the rows after the steps.
    """
    step, promised = newton.value, newton.promised
    slope, error = _sum_slopes(groups, step, gradient)
    if groups.l1 is not None:
        slope = slope + groups.l1 * jnp.sign(step)
    most = 2 * (1 - _KEPT) * promised + error * jnp.abs(step)
    return kept & (~hidden | (slope * step <= most))


def step_from_median(objective: Objective, groups: LeafProblems) -> Float[Array, " G"]:
    """Steps from the median: m - sum_i w_i l'(F_i + m) / sum_i w_i l''(F*_i).

    For Huber's loss, it is m + mean of sign(r - m) min(delta, |r - m|), the leaf of
    M_TreeBoost (Friedman 2001, algorithm 4; Huber 1964). A robust loss curves most at
    its minimum, so this step lowers the leaf's loss; where it would not, the value is
    m. It is NaN where a row that counts has a slope but no minimum F*.
    """
    assert objective.minimizer is not None
    middle = find_medians(objective, groups)
    known = jnp.isfinite(objective.minimizer[groups.k])
    slope = gradients(objective, shift_scores(groups, middle))[groups.k]
    curvature = hessians(objective, objective.minimizer)[groups.k]
    lost = jnp.where(known | (slope == 0), 0, jnp.float32(jnp.nan))
    channels = (slope, jnp.where(known, curvature, 0.0), lost)
    sums = sum_channels(channels, groups.group, middle.shape[0], groups.weights)
    slope, weight, doubt = sums
    stepped = middle - slope / jnp.where(weight > 0, weight, jnp.inf)
    (of_middle, noise), (of_stepped, _) = _loss_changes(
        objective, groups, [middle, stepped]
    )
    better = jnp.isfinite(of_stepped) & (of_stepped <= of_middle + noise)
    return jnp.where(better, stepped, middle) + doubt


def _solve_exactly(objective, groups, newton):
    def solve():
        wanted = jnp.ones(newton.value.shape, bool)
        return solve_groups(objective, groups, newton.value, wanted)

    kinks = objective.kinks
    if kinks is None or groups.direction is not None:
        return solve()
    if not isinstance(kinks.kind, int):
        # With a penalty it is not an order statistic.
        penalized = jnp.any(groups.penalty != 0)
        kinks = kinks._replace(kind=jnp.where(penalized, 0, kinks.kind))
    return solve_at_kinks(objective, groups, kinks, solve)


def solve_groups(
    objective: Objective,
    groups: LeafProblems,
    step: Float[Array, " G"],
    wanted: Bool[ArrayLike, " G"],
) -> Float[Array, " G"]:
    """Returns the exact minimizer where wanted, else ``step``.

    It is the candidate with the least loss among the minimum found, the step and 0: if
    a loss has several minima, the one found may be a poor one. For derivatives, see
    :func:`jboost.trees.implicit.derive_solution`.
    """
    loss, arrays = objective.loss, objective._replace(loss=None)
    return differentiable(
        partial(_solve_groups, loss), partial(derive_solution, loss, _slope),
        arrays, groups, step, wanted,
    )  # fmt: skip


def _solve_groups(loss, arrays, groups, step, wanted):
    objective = arrays._replace(loss=loss)
    side, moves = None, wanted
    if groups.l1 is not None:
        # |c| has a kink at 0. If the minimum is not there, it lies downhill, where the
        # slope of |c| is known.
        at_zero, _ = _slope(objective, groups, jnp.zeros_like(step))
        side = jnp.where(at_zero < 0, groups.l1, -groups.l1)
        moves = wanted & ~(jnp.abs(at_zero) <= groups.l1)
    sizes = weighted_mean(_find_sizes(groups), groups.weights)
    probe = _choose_probe(step, sizes)
    found = locate_minima(objective, groups, probe, moves, side)
    root = _take_roots(found, step, moves, wanted)
    changes = _loss_changes(objective, groups, [root, step])
    return _choose_least(changes, root, step, wanted)


@elementwise
def _find_sizes(numpy, groups):
    return numpy.abs(groups.scores[groups.k])


@elementwise
def _choose_probe(numpy, step, size):
    return numpy.where(step == 0, 1e-3 * (1 + size), numpy.abs(step))


@elementwise
def _take_roots(numpy, found, step, moves, wanted):
    root = numpy.where(moves & (found.strict | found.jump), found.point, step)
    return numpy.where(wanted & ~moves, 0.0, root)


@elementwise
def _choose_least(numpy, changes, root, step, wanted):
    (of_root, noise), (of_step, _) = changes
    of_step = numpy.where(numpy.isfinite(of_step), of_step, np.inf)
    fallback = numpy.where(of_step <= 0, step, 0.0)
    best = numpy.minimum(of_step, 0.0)
    value = numpy.where(of_root <= best + noise, root, fallback)
    return numpy.where(wanted, value, step)


def locate_minima(
    objective: Objective,
    groups: LeafProblems,
    step: Float[Array, " G"],
    wanted: Bool[ArrayLike, " G"],
    side: Float[Array, " G"] | None = None,
) -> Minimum:
    """Finds where each problem's slope changes its sign, from 0.

    The first probe is at a distance of ``step`` > 0. ``side`` is the slope of
    ``l1`` |c| where the minimum lies; None for 0.
    """
    start, *ends = _bounds(objective.minimizer, groups)

    def slope(c):
        value, noise = _slope(objective, groups, c)
        return (value if side is None else value + side), noise

    step = _reach_bounds(step, *ends)
    return find_minimum(slope, start, step, low=ends[0], high=ends[1], wanted=wanted)


@elementwise
def _reach_bounds(numpy, step, low, high):
    """Returns a first step that few probes take to bounds far away."""
    least = _SHORTEST * numpy.maximum(numpy.abs(low), numpy.abs(high))
    return numpy.where(numpy.isfinite(least), numpy.maximum(step, least), step)


def _slope(objective, groups, c):
    """Returns d/dc of each problem, and a bound on its rounding error."""
    return _sum_slopes(groups, c, gradients(objective, shift_scores(groups, c)))


@stage
def _sum_slopes(groups, c, gradient):
    gradient = gradient[groups.k]
    if groups.direction is not None:
        gradient = gradient * groups.direction
    channels = (gradient, jnp.abs(gradient))
    slope, size = sum_channels(channels, groups.group, c.shape[0], groups.weights)
    slope = slope + round_alone(groups.penalty * c)
    return slope if groups.pull is None else slope - groups.pull, _NOISE * size


def _loss_changes(
    objective: Objective,
    groups: LeafProblems,
    steps: Sequence[Float[Array, " G"]],
    before: Float[Array, " N"] | None = None,
):
    """Returns, per step, each problem's change of loss and its rounding error.

    A change that is not finite is a rise: a loss of -inf has lost its digits.
    """
    if before is None:
        before = loss_values(objective, groups.scores)
    afters = [loss_values(objective, shift_scores(groups, c)) for c in steps]
    return _sum_changes(groups, before, afters, list(steps))


@stage
def _sum_changes(groups, before, afters, steps):
    changes = []
    for after, c in zip(afters, steps, strict=True):
        rows = before, after, groups.group, len(groups.penalty), groups.weights
        change, size = sum_changes(*rows)
        # c^2 may overflow.
        penalty = round_alone(round_alone(groups.penalty * c) * c / 2)
        if groups.l1 is not None:
            penalty = penalty + groups.l1 * jnp.abs(c)
        if groups.pull is not None:
            penalty = penalty - round_alone(groups.pull * c)
        change, known = change + penalty, jnp.isfinite(size)
        changes.append(
            (jnp.where(known, change, jnp.inf), jnp.where(known, _NOISE * size, 0.0))
        )
    return changes


@stage
def _bounds(minimizer, groups):
    """Returns 0 and bounds of the minimum, infinite if rows have no minimizers."""
    num_groups = groups.penalty.shape[0]
    start = jnp.zeros(num_groups, jnp.float32)
    unknown = jnp.full(num_groups, jnp.inf, jnp.float32)
    if minimizer is None:
        return start, -unknown, unknown
    distance = minimizer[groups.k] - groups.scores[groups.k]
    moves = groups.weights > 0
    if groups.direction is not None:
        # Rows that do not move (direction 0) are happy with every c.
        moves &= groups.direction != 0
        distance = distance / jnp.where(moves, groups.direction, 1.0)
    distance = jnp.where(
        jnp.isfinite(distance), jnp.where(distance == 0, 0.0, distance), jnp.nan
    )
    group = jnp.where(moves, groups.group, num_groups)
    low, high = find_range(distance, group, num_groups)
    # The penalty pulls toward its minimum; empty groups stay at 0.
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    if groups.pull is not None:
        least = groups.pull / jnp.where(groups.penalty > 0, groups.penalty, jnp.inf)
        low, high = jnp.minimum(low, least), jnp.maximum(high, least)
    return start, low, high
