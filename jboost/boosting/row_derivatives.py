# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every row at the start of a round, and what they are divided by.

In: an objective and scores. Out: two pairs of gradient and curvature: one shapes the
trees, the other fits their leaves.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.boosting.auto import needs_minimizer
from jboost.boosting.first_sums import FirstSums
from jboost.boosting.group_rounds import draw_bag, probe_round
from jboost.boosting.method import Method
from jboost.boosting.state import (
    BoostState,
    Problem,
    bind_groups,
    bind_objective,
    find_minima,
)
from jboost.entry.collectives import most
from jboost.numerics.random_bits import derive
from jboost.objective.curvature import (
    Chosen,
    derivatives,
    is_raised,
    least_curvature,
    leave_out_lost,
    mean_positive,
    smoothing_scale,
)
from jboost.objective.evaluation import known_targets, weighted_mean
from jboost.objective.information import (
    EXPONENTS,
    informed_derivatives,
    round_seed,
)


class RowDerivatives(NamedTuple):
    """Derivatives of every row, before weights.

    Attributes:
      mean: what "relative" regularization divides by.
      first_mean: the mean curvature of the first round; 1 if it is not used.
      concentration: N / N_eff of the first round, see :func:`_concentrate`; 1 if it is
        not used.
      value_unit: the unit of leaf values fitted with these derivatives, in units of
        the values that the splits see.
      factor: by which the derivatives of each row are multiplied already; None for 1.
      known: rows whose target of this score is known; None for all.
    """

    gradient: Float[Array, "*K N"]
    curvature: Float[Array, "*K N"]
    mean: Float[Array, "*K"]
    first_mean: Float[Array, "*K"]
    concentration: Float[Array, "*K"]
    value_unit: Float[Array, "*K"]
    factor: Float[Array, "*K N"] | None = None
    known: Bool[Array, "*K N"] | None = None


class RawDerivatives(NamedTuple):
    """Gradient and positive curvature of every row by one policy.

    Attributes:
      factor, known: see :class:`RowDerivatives`.
    """

    gradient: Float[Array, "K N"]
    curvature: Float[Array, "K N"]
    factor: Float[Array, "K N"] | None = None
    known: Bool[Array, "K N"] | None = None


class Policy(NamedTuple):
    """What follows from a curvature policy for its numbers.

    Attributes:
      unit: whether the curvature says nothing about the scale of the loss.
      raised: whether it has a least value, and
      by_start: whether that depends on the start of training.
      varies: whether the concentration of information is measured.
    """

    unit: bool
    raised: bool
    by_start: bool
    varies: bool


class Scaling(NamedTuple):
    """How derivatives are scaled; it does not hold the loss.

    Attributes:
      relative: whether they are divided by the mean curvature.
      policies: one, or that of the splits and that of the leaves.
    """

    relative: bool
    policies: tuple[Policy, ...]


def choose_scaling(problem: Problem) -> Scaling:
    """Returns how the derivatives of a problem are scaled."""
    method = problem.method
    loss: Any = problem.loss
    num_scores = 1 if loss is None else loss.num_scores
    given = problem.arrays.given is not None
    minima = loss is not None and needs_minimizer(loss)

    def describe(curvature):
        raised = not given and is_raised(minima, curvature)
        by_start = raised and curvature == "auto" and num_scores > 1
        varies = curvature != "unit" and not given and minima
        return Policy(curvature == "unit", raised, by_start, varies)

    policies = tuple(describe(curvature) for curvature in list_policies(method))
    return Scaling(method.regularization == "relative", policies)


def differentiate(
    problem: Problem,
    state: BoostState,
    smooth: bool | None = None,
    leave_out: bool = True,
) -> tuple[BoostState, tuple[RawDerivatives, ...]]:
    """Evaluates the derivatives of every row.

    Args:
      smooth: see :func:`jboost.objective.curvature.derivatives`.
      leave_out: whether derivatives that are not finite are replaced by 0; if not, that
        is left to :func:`jboost.boosting.pairs.split_pairs`.

    Returns:
      The state, with new minimizers where parameters of the loss have moved them and
      new sizes where rows are sharded, and derivatives by each policy.
    """
    method, weights = problem.method, problem.data.weights
    if problem.loss.coupled:
        return _differentiate_groups(problem, state)
    objective = bind_objective(problem, state)
    if problem.loss.estimate is not None and state.minimizer is not None:
        # The parameters have changed, and with them the minimum of a row may move.
        objective = find_minima(objective, problem.data)
        state = state._replace(minimizer=objective.minimizer, kinks=objective.kinks)

    delta = None
    alone = problem.loss.num_scores == 1  # others may have scores without minima
    if state.sizes is not None and alone and (problem.loss.straight or smooth):
        guess, (scores, sizes) = state.sizes.smoothing, (state.scores, state.sizes)
        delta, found = smoothing_scale(objective, scores, weights, guess)
        state = state._replace(sizes=sizes._replace(smoothing=found))

    def evaluate(curvature):
        if curvature not in EXPONENTS:
            return *derivatives(
                objective, state.scores, weights, curvature, smooth, raised=False,
                delta=delta,
            ), None  # fmt: skip
        seed = round_seed(state.words, state.round)
        gradient, positive, factor = informed_derivatives(
            objective, state.scores, weights, curvature, seed
        )
        if factor is not None:
            factor = jnp.where(jnp.isfinite(factor), factor, 0.0)
        return gradient, positive, factor

    known = known_targets(problem.loss, problem.data.targets)
    policies = list_policies(method)
    if problem.arrays.given is not None:
        raw = RawDerivatives(*problem.arrays.given, known=known)
        return state, (raw,) * len(policies)
    raw = tuple(RawDerivatives(*evaluate(each), known) for each in policies)
    if problem.loss.quadratic and "function" not in policies:
        return state, raw
    return _leave_out(state, raw, weights) if leave_out else (state, raw)


def _leave_out(state, raw, weights):
    """Returns the state and derivatives of which those that are lost are 0."""
    found = [leave_out_lost(each.gradient, each.curvature, weights) for each in raw]
    raw = tuple(
        each._replace(gradient=gradient, curvature=positive)
        for each, (gradient, positive, _) in zip(raw, found, strict=True)
    )
    return note_lost(state, found[0][2]), raw


def note_lost(state: BoostState, lost: Int32[Array, "2"]) -> BoostState:
    """Returns the state with the first round in which rows have lost a derivative.

    Args:
      lost: from :func:`jboost.objective.curvature.count_lost`, in this round.
    """
    now = jnp.concatenate([state.round[None], lost])
    first = (state.lost[1] == 0) & (lost[0] > 0)
    return state._replace(lost=jnp.where(first, now, state.lost))


def _differentiate_groups(problem, state):
    weights, groups = problem.data.weights, problem.data.groups
    if groups.kind != "ids":  # rows outside the bag leave their group
        weights = jnp.where(draw_rows(problem, state), weights, 0.0)
    objective = bind_groups(problem, state, weights)
    policies = list_policies(problem.method)
    probe, found = probe_round(
        objective, state.scores, state.probe, state.round, policies
    )
    raw = tuple(RawDerivatives(*pair) for pair in found)
    return _leave_out(state._replace(probe=probe), raw, weights)


def draw_rows(problem: Problem, state: BoostState) -> Bool[Array, " N"]:
    """Draws the rows that a round learns from."""
    share, weights = problem.arrays.numbers.subsample, problem.data.weights
    if share is None:
        return weights > 0
    seed, share = round_seeds(state)[0], jax.lax.stop_gradient(share)
    return draw_bag(problem.data.groups, seed, weights, share)


def round_seeds(state: BoostState) -> UInt32[Array, "seeds 2"]:
    """Returns the seeds of a round: one for the rows, and one for each tree."""
    num_scores = state.steps.shape[0]
    uses = jnp.arange(num_scores + 1, dtype=jnp.int32)
    return derive(state.words, (num_scores + 1) * state.round + uses)


def scale_derivatives(
    scaling: Scaling,
    weights: Float[Array, " N"],
    state: BoostState,
    raw: tuple[RawDerivatives, ...],
    first: FirstSums | None = None,
) -> tuple[RowDerivatives, RowDerivatives, FirstSums | None]:
    """Returns derivatives that shape the trees, and those that fit their leaves.

    Both pairs are the same unless ``method.leaf_curvature`` differs from the curvature
    of the splits. Then "relative" divides both by the mean curvature of the splits,
    except for unit curvature, which says nothing about the scale of the loss: there
    each pair is divided by its own mean.

    Args:
      first: where rows are sharded, if there is one policy.

    Returns:
      Both pairs, and ``first`` with what is found of whether it holds.
    """
    (shape, first), *rest = (
        _scale(scaling, weights, state, policy, each, first)
        for policy, each in zip(scaling.policies, raw, strict=True)
    )
    if not rest:
        return shape, shape, first
    ((fitted, _),) = rest
    if not scaling.policies[0].unit:
        fitted = fitted._replace(
            mean=shape.mean,
            first_mean=shape.first_mean,
            concentration=shape.concentration,
        )
        return shape, fitted, first
    mean = weighted_mean(fitted.curvature, weights)
    unit = 1 / jnp.where(mean > 0, mean, 1.0)
    return shape, fitted._replace(value_unit=unit), first


def _scale(scaling, weights, state, policy, raw, first):
    """Returns a pair, and the first sums with whether they hold."""
    gradient, positive, factor, known = raw
    if policy.raised:
        mean = mean_positive(positive, weights) if first is None else first.mean
        least = least_curvature(mean, state.coupling.start if policy.by_start else None)
        positive = jnp.maximum(positive, least[:, None])
        if first is not None:
            first = first._replace(holds=first.least >= least)
    one = jnp.ones(state.steps.shape[0], jnp.float32)
    if policy.unit or not scaling.relative:
        units = (one, one, one, one)
        return RowDerivatives(gradient, positive, *units, factor, known), first
    mean = _find_mean(positive, weights, first)
    flat = mean == 0  # no row has any curvature: all count alike
    positive = jnp.where(flat[:, None], 1.0, positive)
    if first is not None:
        first = first._replace(holds=first.holds & ~flat)
    # Means are over all rows; those without a target have no curvature.
    mean = _share_among_scores(mean / state.known_shares, flat, state)
    first_mean = jnp.where(state.round > 0, state.first_mean, mean)
    concentration = one
    if policy.varies:
        concentration = jax.lax.cond(
            state.round > 0,
            lambda gradient, positive: state.concentration,
            partial(_concentrate, weights, state),
            gradient, positive,
        )  # fmt: skip
    mean = concentration * _follow(mean, first_mean)
    pair = RowDerivatives(
        gradient, positive, mean, first_mean, concentration, one, factor, known
    )
    return pair, first


def _find_mean(positive, weights, first):
    if first is None:
        return weighted_mean(positive, weights)
    return jax.lax.cond(
        jnp.all(first.holds), lambda *_: first.mean, weighted_mean, positive, weights
    )


def list_policies(method: Method) -> tuple[Chosen, ...]:
    """Returns the policies of the splits and, if it is another one, of the leaves."""
    if method.leaf_curvature == method.curvature:
        return (method.curvature,)
    return method.curvature, method.leaf_curvature


def _concentrate(weights, state, gradient, curvature):
    """Returns N / N_eff: the rows per equally informative row, for each score.

    The information of a row is i = (h + g^2 / phi) / 2 with phi = mean g^2 / mean h,
    which is near 1 for a likelihood. The N rows hold as much as N_eff = (sum i)^2 /
    sum i^2 equally informative ones. For a logistic loss at its
    constant score p it is 1 / (4 p (1 - p)), so that the mean curvature times it is
    1/4, the most that a row can have, however rare positive rows are.

    1 for scores that interact (those that compete share the curvature of a row
    already), and where some row has a minimum of its own: far from it the curvature
    may be anything.
    """
    # Rows of weight 0 may hold anything, and have a derivative in their weight.
    known = jnp.isfinite(gradient) & jnp.isfinite(curvature)
    gradient, curvature = (
        jnp.where(known, values, 0.0) for values in (gradient, curvature)
    )
    # Divided by the largest, so that squares of squares are finite.
    counted = jnp.where((weights > 0)[None, :], jnp.abs(gradient), 0.0)
    greatest = most(jnp.max(counted, axis=1, keepdims=True))
    greatest = jax.lax.stop_gradient(greatest)
    square = jnp.square(gradient / jnp.where(greatest > 0, greatest, 1.0))
    information = (_relate(curvature, weights) + _relate(square, weights)) / 2
    found = weighted_mean(jnp.square(information), weights)
    varies = state.endless
    if state.coupling is not None:
        varies &= ~state.coupling.competing & (state.coupling.start == 0)
    return jnp.where(varies, found * state.known_shares, 1.0)


def _relate(values, weights):
    """Divides by the weighted mean; 1 where that is 0."""
    mean = weighted_mean(values, weights)[:, None]
    return jnp.where(mean > 0, values / jnp.where(mean > 0, mean, 1.0), 1.0)


def _follow(mean, first):
    """Returns the present mean; if that is less than the first, their geometric mean.

    Where the fit flattens the loss (logistic), regularization must not fade as fast as
    the curvature, because rows fitted by chance flatten it, too; nor must it
    stay constant, which would prevent a perfect fit of separable classes.
    """
    share = jnp.sqrt(jnp.minimum(mean / first, 1.0))
    return jnp.maximum(mean, first) * share


def _share_among_scores(mean, flat, state):
    """Returns the mean curvature of each score, or of all that compete."""
    if state.coupling is not None:
        # Scores that compete for a row (softmax) share the curvature of the row: the
        # sum of their means, in units in which all of them move alike.
        competing, move, _ = state.coupling
        squares = jnp.where(competing, jnp.square(move), 1.0)
        total = jnp.sum(jnp.where(competing, mean * squares, 0.0))
        mean = jnp.where(competing, total / squares, mean)
    return jnp.where(flat | ~(mean > 0), 1.0, mean)
