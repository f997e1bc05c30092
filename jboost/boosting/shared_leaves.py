# SPDX-License-Identifier: Apache-2.0
"""The values of a tree that all scores share.

In: the splits of a tree, the leaf of every row, derivatives of every score. Out: the
tree with a value for each score in each leaf. Its structure has an axis of one tree in
front, its leaves have one of K scores.

The K values of a leaf solve one system, with the sum of the Hessians of its rows:

    w = -(sum_i w_i H_i + l2)^-1 sum_i w_i g_i

by conjugate gradients, which need products H_i v instead of N matrices of K x K; see
:mod:`jboost.trees.joint_leaves`. A leaf whose Hessian is not positive along the steps
takes the Newton step of each score. With ``curvature="fisher"``, the Fisher information
takes the place of the Hessian.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.boosting.leaf_values import are_steps_kept, fit_leaves
from jboost.boosting.row_sample import Round
from jboost.boosting.state import BoostState, Data, Problem, bind_objective
from jboost.numerics.derivatives import round_alone, without_derivatives
from jboost.numerics.sums import sum_tables
from jboost.objective.evaluation import gradients, hessian_products
from jboost.objective.information import information_triangles, round_seed
from jboost.trees.joint_leaves import Stopping, solve_jointly
from jboost.trees.leaf_operations import add_values
from jboost.trees.tree import LeafSums, Tree
from jboost.trees.vector_bounds import bound_leaves

_STOPPING = Stopping(steps=10, residual=1e-6, least_bend=0.02, overshoot=0.5)


def sum_shared_leaves(
    data: Data, now: Round, tree: Tree, leaf: Int32[Array, " N"]
) -> Tree:
    """Returns the tree with the sums that its leaf values are fitted to.

    Args:
      tree: without an axis of trees, and ``leaf`` that of every row.
    """
    fitted, num_scores = now.fitted, len(now.k)
    tables, others = [fitted.gradient, fitted.curvature], [jnp.float32(1)]
    if fitted.known is not None:
        tables, others = [*tables, fitted.known.astype(jnp.float32)], []
    num_leaves = tree.leaf_value.shape[0]
    sums = sum_tables(tables, others, leaf, num_leaves, now.weights(data))
    shape = (num_scores, num_leaves)
    structure = jax.tree.map(
        lambda array: array[None], tree._replace(leaf_value=None, bounds=None)
    )
    return structure._replace(
        leaf_value=jnp.zeros(shape, jnp.float32),
        sums=LeafSums(
            gradient=sums[:num_scores],
            curvature=sums[num_scores : 2 * num_scores],
            weight=jnp.broadcast_to(sums[2 * num_scores :], shape),
            l2=now.limits.l2 * fitted.mean,
        ),
    )


def fit_shared_leaves(
    problem: Problem,
    learning_rate: Float[ArrayLike, ""],
    state: BoostState,
    now: Round,
    tree: Tree,
    leaf: Int32[Array, " N"],
    pointed: Bool[ArrayLike, ""],
) -> Tree:
    """Returns the tree with its leaf values, times the learning rate.

    Args:
      tree: from :func:`sum_shared_leaves`, and ``leaf`` that of every row.
      pointed: whether the loss looks like |r| to most rows, so that its Hessian says
        nothing: each score is then fitted by itself, exactly. Traced or concrete.
    """
    each, method = _split_scores(problem, now, tree), problem.method
    joint = method.leaf_solver == "joint" and not problem.loss.coupled
    alone = replace(method, leaf_solver="guarded") if joint else method
    alone = problem._replace(static=problem.static._replace(method=alone))

    def fit_alone():
        def fit(parts):
            one, own = parts
            return fit_leaves(alone, learning_rate, state, now, one, own, leaf)

        return jax.lax.map(fit, each).leaf_value

    def fit_jointly():
        value, own = _solve_vectors(problem, state, now, tree, leaf), each[1]
        if own.bounds is not None:
            bounds = own.bounds * now.fitted.value_unit[:, None, None]
            value = jnp.clip(value, *jnp.moveaxis(bounds, -1, 0))
        return round_alone(learning_rate * value)

    if joint and isinstance(pointed, Tracer):
        value = jax.lax.cond(pointed, fit_alone, fit_jointly)
    else:
        value = fit_jointly() if joint and not pointed else fit_alone()
    return tree._replace(leaf_value=value)


def are_shared_steps_kept(
    problem: Problem,
    state: BoostState,
    now: Round,
    tree: Tree,
    leaf: Int32[Array, " N"],
) -> Bool[Array, ""]:
    """Does what :func:`jboost.boosting.leaf_values.are_steps_kept` does, for all."""

    def check(parts):
        one, own = parts
        return are_steps_kept(problem, state, now, one, own, leaf)

    return jnp.all(jax.lax.map(check, _split_scores(problem, now, tree)))


def _split_scores(problem, now, tree):
    """Returns the tree as one tree for each score, to be mapped over."""
    limits, fitted, bounds = now.limits, now.fitted, None
    if limits.values is not None:
        penalty = (limits.l2 * fitted.mean)[:, None]
        steps = tree.sums.gradient, tree.sums.curvature, penalty
        most = limits.values.bounds
        if tree.feature is None:  # the leaves of the rows are known, but no splits
            bounds = jnp.broadcast_to(most, (*steps[0].shape, 2))
        else:
            sizes = limits.values.monotone, most, problem.method.num_bins
            bounds = bound_leaves(tree, steps, *sizes)
        bounds = bounds / fitted.value_unit[:, None, None]
    none: Any = None
    nothing: Any = fitted._replace(gradient=none, curvature=none)
    one = now._replace(shape=nothing, fitted=nothing).trees()
    return one, Tree(none, none, none, tree.leaf_value, tree.sums, bounds)


def _solve_vectors(problem, state, now, tree, leaf):
    """Solves the system of each leaf."""
    weights, fitted, values = now.weights(problem.data), now.fitted, now.limits.values
    scores, sums = state.scores, tree.sums
    arrays, scores, sums = without_derivatives(
        (problem.arrays, scores, sums),
        "derivatives of training are not supported where the scores of a leaf are "
        "solved for together; use share_structure=False or leaf_solver='newton'",
    )
    objective = bind_objective(problem._replace(arrays=arrays), state)
    penalty = round_alone(now.limits.l2 * fitted.mean)[:, None]
    gradient = sums.gradient
    if values is not None:
        l1 = round_alone(values.l1 * fitted.mean)[:, None]
        gradient = gradient - jnp.clip(gradient, -l1, l1)
    num_leaves = gradient.shape[1]

    def sum_leaves(rows):
        return sum_tables([rows], [], leaf, num_leaves, weights)

    def multiply(values):
        return sum_leaves(hessian_products(objective, scores, values.T[leaf]))

    if problem.method.leaf_curvature == "fisher":
        seed = round_seed(state.words, state.round)
        triangles = information_triangles(objective, scores, seed)
        multiply = _multiply_by(sum_leaves(triangles), len(scores))

    def slope_at(values):
        every = jnp.broadcast_to(leaf, scores.shape)
        return sum_leaves(gradients(objective, add_values(scores, values, every)))

    return solve_jointly(
        gradient, sums.curvature, penalty, multiply, slope_at, _STOPPING
    )


def _multiply_by(triangles, num_scores):
    """Returns a function that multiplies by matrices, of which these are halves."""
    matrix = jnp.zeros((num_scores, num_scores, triangles.shape[1]), jnp.float32)
    first, second = np.triu_indices(num_scores)
    matrix = matrix.at[first, second].set(triangles).at[second, first].set(triangles)

    def multiply(values):
        return jnp.sum(round_alone(matrix * values[None, :, :]), axis=1)

    return multiply
