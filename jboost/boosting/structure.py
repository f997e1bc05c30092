# SPDX-License-Identifier: Apache-2.0
"""The structure of a tree: its splits, and the leaf of every row.

In: what is known of a round, and one of its trees. Out: the tree before its leaves
are fitted. Which function grows it depends on where candidates for thresholds come
from. Derivatives of training hold the structure constant.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from jboost.boosting.first_sums import measure_first
from jboost.boosting.row_derivatives import RowDerivatives
from jboost.boosting.row_sample import OneTree, Round
from jboost.boosting.state import Data, Problem
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose
from jboost.kernels.sums_xla import split_weights
from jboost.numerics.derivatives import weigh
from jboost.trees.candidates import measure, propose, restore_thresholds
from jboost.trees.growing import grow_levels
from jboost.trees.limits import TreeLimits
from jboost.trees.sorted_growth import grow_sorted_tree
from jboost.trees.splitting import UNBOUNDED
from jboost.trees.tree import Tree


def shaping_derivatives(
    data: Data, now: Round, shape: RowDerivatives
) -> tuple[Float[Array, " N"], Float[Array, " N"], UInt8[Array, " N"]]:
    """Returns gradient and curvature of every row as a tree's splits see them.

    And how many times each row counts, 0 for rows outside the bag; see
    :func:`jboost.kernels.sums_xla.split_weights`.
    """
    in_bag = now.in_bag if shape.known is None else now.in_bag & shape.known
    rows = in_bag, data.weights, shape.gradient, shape.curvature, shape.mean
    run = choose(cpu=grow_cpu.weigh_rows, xla=weigh_rows)
    return run(*jax.lax.stop_gradient(rows))


def weigh_rows(
    in_bag: Bool[Array, " N"],
    weights: Float[Array, " N"],
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    mean: Float[Array, ""],
) -> tuple[Float[Array, " N"], Float[Array, " N"], UInt8[Array, " N"]]:
    """Does what :func:`shaping_derivatives` does, in plain XLA: the definition."""
    times, factors = split_weights(jnp.where(in_bag, weights, 0.0))
    gradient = weigh(factors, gradient) / mean
    return gradient, weigh(factors, curvature) / mean, times


def grow_structure(
    problem: Problem, now: Round, one: OneTree
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the splits of a tree; returns it with the leaf of every row."""
    method, data = problem.method, problem.data
    gradient, curvature, in_bag = shaping_derivatives(data, now, one.shape)
    limits = jax.lax.stop_gradient(shaping_limits(now, one))
    parts = (gradient, curvature, in_bag)
    measure = measure_first(one.first, one.shape.mean, *parts, method.uniform)
    rows: Any = (*parts, one.seed, limits)
    sizes: Any = dict(
        max_depth=method.max_depth,
        max_nodes=method.max_nodes,
        max_leaves=method.max_leaves,
        uniform=method.uniform,
    )
    grow = partial(grow_levels, measure=measure, num_bins=method.num_bins)
    if not method.sorts_rows:
        return grow(data.codes, *rows, **sizes)
    codes: Any = data.codes  # dense, and sorted by feature
    mass = None
    if method.candidates != "exact":
        mass = _measure_candidates(method, data, curvature, in_bag)
    if method.candidates != "global":
        return grow_sorted_tree(codes, *rows, mass=mass, **sizes)
    assert mass is not None
    proposal = propose(codes, mass, num_bins=method.num_bins)
    tree, leaf = grow(proposal.codes, *rows, **sizes)
    threshold = restore_thresholds(proposal, tree.feature, tree.threshold)
    return tree._replace(threshold=threshold), leaf


def _measure_candidates(method, data, curvature, in_bag):
    """Returns the weight of each row in the quantiles that become candidates."""
    values = curvature
    if method.candidate_weights == "samples":
        _, values = split_weights(jax.lax.stop_gradient(data.weights))
    return measure(values, in_bag)


def shaping_limits(now: Round, one: OneTree) -> TreeLimits:
    """Returns the limits in the units of the derivatives that shape the tree.

    Leaves are fitted with derivatives in other units where the curvature of the splits
    is "unit"; l1 and bounds are given in the units of the leaves. Monotone constraints
    hold for each score, which the search for a tree of all scores cannot see; see
    :func:`jboost.trees.vector_bounds.bound_leaves`.
    """
    limits, values = now.limits, now.limits.values
    own: Any = limits.min_child_samples
    if jnp.ndim(own):
        least = own[one.k] if now.line is None else jnp.max(own)
        limits = limits._replace(min_child_samples=least)
    if values is None:
        return limits
    if now.line is not None:
        values = values._replace(monotone=jnp.zeros_like(values.monotone))
    l1 = values.l1 * (one.fitted.mean / one.shape.mean)
    bounds = jnp.clip(values.bounds / one.fitted.value_unit, -UNBOUNDED, UNBOUNDED)
    return limits._replace(values=values._replace(l1=l1, bounds=bounds))
