# SPDX-License-Identifier: Apache-2.0
"""The values of a tree's leaves.

In: a tree, the leaf of every row, derivatives to fit leaves with. Out: the tree with
leaf values, times the learning rate, and the sums that they come from.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.boosting.auto import decide_by_data
from jboost.boosting.first_sums import find_leaf_sizes
from jboost.boosting.group_rounds import solve_group_leaves
from jboost.boosting.row_sample import OneTree, Round
from jboost.boosting.state import (
    BoostState,
    Data,
    Problem,
    bind_groups,
    bind_objective,
)
from jboost.numerics.derivatives import round_alone
from jboost.numerics.sums import sum_channels
from jboost.trees.groups import Groups
from jboost.trees.leaves import keeps_steps, solve_leaves
from jboost.trees.newton import newton_step
from jboost.trees.tree import LeafSums, Tree


def sum_leaves(
    data: Data, now: Round, one: OneTree, tree: Tree, leaf: Int32[Array, " N"]
) -> Tree:
    """Returns the tree with the sums that its leaf values are fitted to.

    Args:
      tree: its splits, and ``leaf`` that of every row; the others are those of
        :func:`fit_leaves`.
    """
    weights, fitted = now.weights(data, one.fitted.known), one.fitted
    channels = (fitted.gradient, fitted.curvature, jnp.float32(1))
    sizes = find_leaf_sizes(one.first)
    sums = sum_channels(channels, leaf, tree.leaf_value.shape[0], weights, sizes)
    return tree._replace(sums=LeafSums(*sums, l2=now.limits.l2 * one.fitted.mean))


def fit_leaves(
    problem: Problem,
    learning_rate: Float[ArrayLike, ""],
    state: BoostState,
    now: Round,
    one: OneTree,
    tree: Tree,
    leaf: Int32[Array, " N"],
) -> Tree:
    """Returns the tree with its leaf values, times the learning rate.

    Args:
      one: of ``now.trees()``.
      tree: from :func:`sum_leaves`, and ``leaf`` that of every row.
    """
    method, limits = problem.method, now.limits
    newton, groups, sums = _prepare(problem, state, now, one, tree, leaf)
    bounds = None if tree.bounds is None else tree.bounds * one.fitted.value_unit
    if bounds is not None and limits.values is not None:
        # The same numbers, but with the derivative in max_delta_step.
        most = jnp.broadcast_to(limits.values.bounds, bounds.shape)
        bounds = jnp.where(bounds == most, most, bounds)
    if method.leaf_solver == "joint":
        assert state.probe is not None
        value = solve_group_leaves(
            bind_groups(problem, state, groups.weights), state.scores, state.probe,
            one.k, leaf, sums, groups.penalty[0], groups.l1,
        )  # fmt: skip
        value = value if bounds is None else jnp.clip(value, bounds[:, 0], bounds[:, 1])
    else:
        objective = bind_objective(problem, state)
        value = solve_leaves(objective, groups, newton, method.leaf_solver, bounds)
    if method.regularization == "absolute" and method.leaf_solver == "newton":
        # As in XGBoost. Splits keep children above the limit, so that only the root
        # of a tree without splits can weigh less.
        value = jnp.where(jnp.sum(sums.curvature) < limits.min_child_weight, 0.0, value)
    if limits.values is not None:  # a line search may have passed the bounds
        value = jnp.clip(value, *limits.values.bounds)
    return tree._replace(
        # Or leaf values would not sum to the scores bit for bit.
        leaf_value=round_alone(learning_rate * value),
        bounds=None,
    )


def are_steps_kept(
    problem: Problem,
    state: BoostState,
    now: Round,
    one: OneTree,
    tree: Tree,
    leaf: Int32[Array, " N"],
    row_losses: Float[Array, " N"] | None = None,
) -> Bool[Array, ""]:
    """Returns whether "guarded" keeps the Newton steps of all leaves.

    Args:
      one: likewise the others, those of :func:`fit_leaves`.
      row_losses: the loss of each row before the round, if it is known.
    """
    newton, groups, _ = _prepare(problem, state, now, one, tree, leaf)
    objective = bind_objective(problem, state)
    return jnp.all(keeps_steps(objective, groups, *newton(), row_losses))


def _prepare(problem, state, now, one, tree, leaf):
    """Returns what gives the Newton steps, the problems of the leaves, and sums."""
    method, fitted, limits = problem.method, one.fitted, now.limits
    penalty, l1 = _shrinkage(problem, limits, fitted)
    choices = decide_by_data(
        state.pointed, state.least_rows, method.leaf_solver, limits.min_child_samples
    )
    sums = tree.sums
    assert sums is not None

    def newton():
        step, promised = newton_step(sums.gradient, sums.curvature, penalty, l1)
        return step, jnp.where(choices.exact_leaves, jnp.inf, promised)

    groups = Groups(
        k=one.k,
        scores=state.scores,
        weights=_weigh_rows(problem.data, now, fitted),
        direction=None,
        group=leaf,
        penalty=jnp.broadcast_to(penalty, tree.leaf_value.shape[0]),
        l1=l1,
        resting=_count_resting(method, limits),
    )
    return newton, groups, sums


def _weigh_rows(data, now, fitted):
    """Returns the weights of the rows in the loss of a leaf."""
    weights = now.weights(data, fitted.known)
    return weights if fitted.factor is None else weights * fitted.factor


def _shrinkage(problem, limits, fitted):
    """Returns l2 and l1 in the units of the derivatives that fit the leaves."""
    values = limits.values
    if problem.method.order_statistics:
        return jnp.float32(0), None  # see _count_resting
    l1 = None if values is None else round_alone(values.l1 * fitted.mean)
    return round_alone(limits.l2 * fitted.mean), l1


def _count_resting(method, limits):
    """Returns how many rows at rest each leaf has: l2, counted in rows."""
    exact = method.order_statistics and method.leaf_solver == "exact"
    return limits.l2 if exact and method.regularization == "relative" else None
