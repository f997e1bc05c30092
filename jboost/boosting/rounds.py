# SPDX-License-Identifier: Apache-2.0
"""One round of boosting, from a traced loss and arrays.

In: the state after a round. Out: the state after the next, and its trees. What the
public loops (``boosting``) and ``fit`` (``training``) share: no checks, no words to
look up, every number traced.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.boosting.auto import decide_by_data, needs_minimizer
from jboost.boosting.method import Method, Numbers
from jboost.codes.codes import Codes
from jboost.entry.representation import show_fields
from jboost.numerics.random_bits import derive
from jboost.numerics.sampling import sample
from jboost.numerics.sums import sum_channels
from jboost.objective.curvature import derivatives, is_pointed
from jboost.objective.evaluation import Kinks, Objective, mean_of_rows
from jboost.objective.minimizers import find_kinks, find_minimizers
from jboost.objective.tracing import TracedLoss
from jboost.trees.candidates import (
    measure,
    propose,
    restore_thresholds,
)
from jboost.trees.growing import grow_levels
from jboost.trees.initial import MedianStart, initial_score, median_score
from jboost.trees.leaf_operations import add_values
from jboost.trees.leaves import (
    Groups,
    newton_step,
    solve_leaves,
)
from jboost.trees.limits import TreeLimits
from jboost.trees.sorted_growth import grow_sorted_tree
from jboost.trees.splitting import UNBOUNDED
from jboost.trees.tree import LeafSums, Tree

_LARGEST = float(np.finfo(np.float32).max)


class Data(NamedTuple):
    """The training rows.

    Attributes:
      codes: with ``order`` where the method sorts rows.
      targets: a pytree with the N rows in front.
      weights: 0 for rows that do not count, which may hold anything.
    """

    codes: Codes
    targets: Any
    weights: Float[Array, " N"]


class BoostState(NamedTuple):
    """What one round hands to the next.

    Attributes:
      scores: of the training rows, offset included: [N] or [N, K] in the states that
        :func:`jboost.init` and :func:`jboost.boost_step` return, [K, N] within a round.
      minimizer: each row's own minimizer of the loss, inf where there is none.
      kinks: of a piecewise linear loss, else None.
      init_score: where training started, [] or [K].
      parameters: of an adaptive loss, estimated from ``scores``; else ().
      first_parameters: those of the first round, if losses are reported at them;
        else ().
      pointed: whether the loss looks like |r| to most rows at the start; see
        :func:`jboost.objective.curvature.is_pointed`.
      first_mean: mean curvature of the first round (0 before it), for each score.
      words: seed.
      round: how many rounds have been made.
    """

    scores: Float[Array, "..."]
    minimizer: Float[Array, "K N"] | None
    kinks: Kinks | None
    init_score: Float[Array, "*K"]
    parameters: Any
    first_parameters: Any
    pointed: Bool[Array, ""]
    first_mean: Float[Array, " K"]
    words: UInt32[Array, "2"]
    round: Int32[Array, ""]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


def init_state(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    data: Data,
    offset: Float[Array, "K N"],
    init_score: Float[Array, " K"] | MedianStart | None,
    words: UInt32[Array, "2"],
    minimizer: Float[Array, "K N"] | None = None,
) -> BoostState:
    """Makes the state before the first round; see :func:`start_state`."""
    return start_state(loss, constants, data, offset, init_score, words, minimizer)[0]


def start_state(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    data: Data,
    offset: Float[Array, "K N"],
    init_score: Float[Array, " K"] | MedianStart | None,
    words: UInt32[Array, "2"],
    minimizer: Float[Array, "K N"] | None = None,
) -> tuple[BoostState, Bool[Array, ""]]:
    """Finds the rows' minimizers and the initial score; None asks for the argmin.

    Minimizers that are known, from :func:`own_minimizers`, may be given.

    Returns:
      The state, and whether training could not have started at the argmin.
    """
    start = None if isinstance(init_score, MedianStart) else init_score
    scores = offset if start is None else offset + start[:, None]
    parameters = estimate_parameters(loss, constants, data, scores)
    objective = Objective(loss, constants, data.targets, parameters, None)
    if needs_minimizer(loss):
        objective = _find_minima(objective, data, minimizer)
    fell_back = jnp.asarray(False)
    if start is None:
        if init_score is None:
            start, fell_back = initial_score(objective, offset, data.weights)
        else:
            start = median_score(objective, offset, data.weights)
        scores = offset + start[:, None]
        parameters = estimate_parameters(loss, constants, data, scores)
    state = BoostState(
        scores=scores,
        minimizer=objective.minimizer,
        kinks=objective.kinks,
        init_score=start if start.shape[0] > 1 else start[0],
        parameters=parameters,
        first_parameters=parameters if loss.reports_first else (),
        pointed=is_pointed(objective, scores, data.weights),
        first_mean=jnp.zeros(start.shape, jnp.float32),
        words=words,
        round=jnp.int32(0),
    )
    return state, fell_back


def own_minimizers(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    data: Data,
) -> Float[Array, "K N"] | None:
    """Each row's own minimizer, where it is asked for and depends on its target alone.

    Weights, and so the folds of a cross-validation, do not matter to it.
    """
    if loss.estimate is not None or not needs_minimizer(loss):
        return None
    objective = Objective(loss, constants, data.targets, (), None)
    return find_minimizers(objective, data.weights.shape[0])


class Round(NamedTuple):
    """What is known of a round before its trees are grown; score by score.

    Attributes:
      k: 0 .. K - 1.
      seeds: one for each tree.
      shape: derivatives that shape the trees.
      fitted: derivatives that leaves are fitted with.
      in_bag: rows that the trees learn from.
      limits: numbers that shape the trees, "auto" resolved.
    """

    k: Int32[Array, " K"]
    seeds: UInt32[Array, "K 2"]
    shape: "RowDerivatives"
    fitted: "RowDerivatives"
    in_bag: Bool[Array, " N"]
    limits: TreeLimits

    def trees(self) -> tuple[Any, ...]:
        """What differs from tree to tree, to be mapped over."""
        return self.k, self.seeds, self.shape, self.fitted


class RowDerivatives(NamedTuple):
    """Derivatives of every row, before weights.

    Attributes:
      mean: what "relative" divides by.
      value_unit: leaf values fitted with these, for one as the splits see it.
    """

    gradient: Float[Array, "*K N"]
    curvature: Float[Array, "*K N"]
    mean: Float[Array, "*K"]
    value_unit: Float[Array, "*K"]


def grow_round(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    method: Method,
    numbers: Numbers,
    learning_rate: Float[ArrayLike, ""],
    data: Data,
    state: BoostState,
) -> tuple[BoostState, Tree, Bool[Array, " N"]]:
    """One round: K trees, one for each score, and the rows they learned from."""
    state, now = begin_round(loss, constants, method, numbers, data, state)

    def grow(one):
        tree, leaf = grow_structure(method, data, now, one)
        tree = fit_leaves(
            loss, constants, method, learning_rate, data, state, now, one, tree, leaf
        )
        return tree, leaf

    if state.scores.shape[0] > 1:  # one by one: side by side, every branch is taken
        trees, leaf = jax.lax.map(grow, now.trees())
    else:  # the same without a batch axis, which would cost speed
        first = jax.tree.map(lambda a: a[0], now.trees())
        trees, leaf = jax.tree.map(lambda a: a[None], grow(first))
    state = end_round(loss, constants, method, data, state, now, trees, leaf)
    return state, trees, now.in_bag


def begin_round(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    method: Method,
    numbers: Numbers,
    data: Data,
    state: BoostState,
) -> tuple[BoostState, Round]:
    """Derivatives, sampled rows and seeds of a round."""
    objective = _bind(loss, constants, data, state)
    if loss.estimate is not None and state.minimizer is not None:
        # With its parameters a row's minimum may move.
        objective = _find_minima(objective, data)
        state = state._replace(minimizer=objective.minimizer, kinks=objective.kinks)
    num_scores = state.scores.shape[0]
    # A round uses 1 + K seeds: the rows', and one for each tree.
    uses = jnp.arange(num_scores + 1, dtype=jnp.int32)
    seeds = derive(state.words, (num_scores + 1) * state.round + uses)
    limits = numbers.limits
    choices = decide_by_data(
        state.pointed, method.leaf_solver, limits.min_child_samples
    )
    shape, fitted = _row_derivatives(objective, state, data.weights, method)
    return state, Round(
        k=jnp.arange(num_scores, dtype=jnp.int32),
        seeds=seeds[1:],
        shape=shape,
        fitted=fitted,
        in_bag=sample(seeds[0], data.weights > 0, numbers.subsample),
        limits=limits._replace(min_child_samples=choices.min_child_samples),
    )


def shaping_derivatives(
    data: Data, now: Round, shape: RowDerivatives
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Gradient and curvature of every row as a tree's splits see them."""
    weights = jnp.where(now.in_bag, data.weights, 0.0)
    gradient = _weigh(weights, shape.gradient) / shape.mean
    return gradient, _weigh(weights, shape.curvature) / shape.mean


def grow_structure(
    method: Method, data: Data, now: Round, one: tuple[Any, ...]
) -> tuple[Tree, Int32[Array, " N"]]:
    """The splits of one of ``now.trees()``, and the leaf of every row."""
    _, seed, shape, fitted = one
    gradient, curvature = shaping_derivatives(data, now, shape)
    limits = shaping_limits(now.limits, shape, fitted)
    rows: Any = (gradient, curvature, now.in_bag, seed, limits)
    sizes: Any = dict(
        max_depth=method.max_depth,
        max_nodes=method.max_nodes,
        max_leaves=method.max_leaves,
        uniform=method.uniform,
    )
    grow = partial(grow_levels, num_bins=method.num_bins)
    if not method.sorts_rows:
        return grow(data.codes, *rows, **sizes)
    codes: Any = data.codes  # dense, and sorted by feature
    mass = None
    if method.candidates != "exact":
        mass = _measure_candidates(method, data, now, curvature)
    if method.candidates != "global":
        return grow_sorted_tree(codes, *rows, mass=mass, **sizes)
    assert mass is not None
    proposal = propose(codes, mass, num_bins=method.num_bins)
    tree, leaf = grow(proposal.codes, *rows, **sizes)
    threshold = restore_thresholds(proposal, tree.feature, tree.threshold)
    return tree._replace(threshold=threshold), leaf


def _measure_candidates(method, data, now, curvature):
    """What each row counts in the quantiles that candidates are taken from."""
    values = curvature
    if method.candidate_weights == "samples":
        values = jnp.where(now.in_bag, data.weights, 0.0)
    return measure(values, jnp.sum(now.in_bag))


def shaping_limits(
    limits: TreeLimits, shape: RowDerivatives, fitted: RowDerivatives
) -> TreeLimits:
    """The limits in the units of the derivatives that shape the tree."""
    values = limits.values
    if values is None:
        return limits
    l1 = values.l1 * (fitted.mean / shape.mean)
    bounds = jnp.clip(values.bounds / fitted.value_unit, -UNBOUNDED, UNBOUNDED)
    return limits._replace(values=values._replace(l1=l1, bounds=bounds))


def fit_leaves(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    method: Method,
    learning_rate: Float[ArrayLike, ""],
    data: Data,
    state: BoostState,
    now: Round,
    one: tuple[Any, ...],
    tree: Tree,
    leaf: Int32[Array, " N"],
) -> Tree:
    """The tree with its leaf values, times the learning rate."""
    k, _, _, fitted = one
    objective = _bind(loss, constants, data, state)
    weights = jnp.where(now.in_bag, data.weights, 0.0)
    num_leaves = tree.leaf_value.shape[0]
    choices = decide_by_data(
        state.pointed, method.leaf_solver, now.limits.min_child_samples
    )
    penalty, values = now.limits.l2 * fitted.mean, now.limits.values
    l1 = None if values is None else values.l1 * fitted.mean
    if method.order_statistics:
        penalty, l1 = jnp.float32(0), None  # they are not shrunk
    gradient, curvature = (
        _weigh(weights, values) for values in (fitted.gradient, fitted.curvature)
    )
    channels = (gradient, curvature, weights)
    sums = sum_channels(channels, leaf, num_leaves)

    def newton():
        step, promised = newton_step(sums[0], sums[1], penalty, l1)
        return step, jnp.where(choices.exact_leaves, jnp.inf, promised)

    groups = Groups(
        k=k,
        scores=state.scores,
        weights=weights,
        direction=None,
        group=leaf,
        penalty=jnp.broadcast_to(penalty, num_leaves),
        l1=l1,
    )
    bounds = None if tree.bounds is None else tree.bounds * fitted.value_unit
    value = solve_leaves(objective, groups, newton, method.leaf_solver, bounds)
    if method.regularization == "absolute" and method.leaf_solver == "newton":
        # As in XGBoost; only the root of a tree without splits can weigh less.
        least = now.limits.min_child_weight
        value = jnp.where(jnp.sum(sums[1]) < least, 0.0, value)
    if values is not None:  # what a line search may have passed
        value = jnp.clip(value, *values.bounds)
    return tree._replace(
        # Rounded by itself: fused into the sum of scores it would be rounded with it.
        # The clip does nothing to numbers, but it keeps the compiler from rounding
        # product and sum of scores as one: leaf values would not add up to scores.
        leaf_value=jnp.clip(learning_rate * value, -_LARGEST, _LARGEST),
        sums=LeafSums(*sums, l2=now.limits.l2 * fitted.mean),
        bounds=None,
    )


def end_round(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    method: Method,
    data: Data,
    state: BoostState,
    now: Round,
    trees: Tree,
    leaf: Int32[Array, "K N"],
) -> BoostState:
    """The state after a round, whose trees put the rows into these leaves."""
    scores = add_values(state.scores, trees.leaf_value, leaf, in_place=True)
    return state._replace(
        scores=scores,
        parameters=estimate_parameters(loss, constants, data, scores),
        first_mean=jnp.where(state.round == 0, now.fitted.mean, state.first_mean),
        round=state.round + 1,
    )


def _find_minima(objective, data, minimizer=None):
    if minimizer is None:
        minimizer = find_minimizers(objective, data.weights.shape[0])
    objective = objective._replace(minimizer=minimizer)
    if objective.loss.straight:
        objective = objective._replace(kinks=find_kinks(objective, data.weights))
    return objective


def estimate_parameters(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    data: Data,
    scores: Float[Array, "K N"],
) -> Any:
    """The parameters of an adaptive loss at these scores; () for other losses."""
    if loss.estimate is None:
        return ()
    rows = scores[0] if scores.shape[0] == 1 else scores.T
    # Fused with what surrounds it, a sum may be rounded differently, and a continued
    # run would differ from one without interruption.
    inputs = (rows, data.targets, data.weights)
    inputs = jax.lax.optimization_barrier(inputs)
    return jax.lax.optimization_barrier(loss.estimate(constants, *inputs))


def reported_parameters(loss: TracedLoss, state: BoostState) -> Any:
    """The parameters at which losses after a round are reported."""
    return state.first_parameters if loss.reports_first else state.parameters


def _bind(loss, constants, data, state):
    return Objective(
        loss, constants, data.targets, state.parameters, state.minimizer, state.kinks
    )


def _row_derivatives(objective, state, weights, method):
    """Derivatives that shape the tree, and those that its leaves are fitted with.

    Both pairs are the same unless ``method.leaf_curvature`` differs from the curvature
    of the splits. Then "relative" divides both by the mean curvature of the splits,
    but for unit curvature, which says nothing about the scale of the loss: there each
    pair is divided by its own mean.
    """

    def evaluate(curvature):
        gradient, positive = derivatives(objective, state.scores, weights, curvature)
        mean = jnp.ones(state.scores.shape[0], jnp.float32)
        if method.regularization == "relative" and curvature != "unit":
            # An average row of the first round or of this one, whichever curves
            # more: where the fit flattens the loss (logistic), regularization must
            # not fade with it.
            mean = mean_of_rows(objective, positive, weights)
            flat = mean == 0  # no row has any curvature: all count alike
            positive = jnp.where(flat[:, None], 1.0, positive)
            if mean.shape[0] > 1:
                # Scores that compete for a row (softmax) share what it curves.
                coupled = ~jnp.any(jnp.isfinite(state.minimizer))
                mean = jnp.where(coupled, jnp.sum(mean), mean)
            mean = jnp.maximum(mean, state.first_mean)
            mean = jnp.where(flat | ~(mean > 0), 1.0, mean)
        return RowDerivatives(gradient, positive, mean, jnp.ones_like(mean))

    shape = evaluate(method.curvature)
    if method.leaf_curvature == method.curvature:
        return shape, shape
    fitted = evaluate(method.leaf_curvature)
    if method.curvature != "unit":
        return shape, fitted._replace(mean=shape.mean)
    mean = mean_of_rows(objective, fitted.curvature, weights)
    unit = 1 / jnp.where(mean > 0, mean, 1.0)
    return shape, fitted._replace(value_unit=unit)


def _weigh(weights, values):
    return jnp.where(weights > 0, weights * values, 0.0)
