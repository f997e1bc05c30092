# SPDX-License-Identifier: Apache-2.0
"""One round of boosting: structure of the trees, leaf values and the next state.

Derivatives of training hold the structure constant. A leaf of a tree of all scores has
the values -(sum_i w_i H_i + l2)^-1 sum_i w_i g_i; see :mod:`jboost.trees.joint`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.boosting.auto import decide_by_data
from jboost.boosting.derivatives import (
    RoundPlan,
    TreeTask,
    choose_scaling,
    differentiate,
    shaping_derivatives,
    shaping_limits,
    start_round,
)
from jboost.boosting.first_sums import find_leaf_sizes, measure_first
from jboost.boosting.groups import solve_group_leaves
from jboost.boosting.reports import RowLosses
from jboost.boosting.state import (
    BoostState,
    Data,
    Problem,
    bind_groups,
    bind_objective,
    estimate_parameters,
)
from jboost.kernels.exact_sums import split_weights
from jboost.kernels.library import choose
from jboost.kernels.xla import round_alone
from jboost.numerics.derivatives import without_derivatives
from jboost.numerics.exact import sum_changes, sum_channels, sum_tables
from jboost.objective.curvature import information_triangles, round_seed
from jboost.objective.evaluation import (
    gradients,
    hessian_products,
    loss_values,
    rest_at_minima,
)
from jboost.trees.candidates import measure, propose
from jboost.trees.exact_growth import grow_sorted_tree
from jboost.trees.grow import grow_levels
from jboost.trees.joint import Stopping, bound_leaves, multiply_by, solve_jointly
from jboost.trees.leaf_operations import add_values
from jboost.trees.leaves import (
    LeafProblems,
    NewtonSteps,
    ask_slopes,
    compare_losses,
    find_steps,
    keeps_steps,
    shift_scores,
    solve_leaves,
)
from jboost.trees.slopes import (
    GivenLeaves,
    add_leaves,
    fit_slopes,
    limit_slopes,
    list_terms,
)
from jboost.trees.tree import LeafSums, Tree


def grow_structure(
    problem: Problem, plan: RoundPlan, task: TreeTask
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the splits of a tree; returns it with the leaf of every row."""
    method, data = problem.method, problem.data
    gradient, curvature, in_bag = shaping_derivatives(data, plan, task.for_splits)
    limits = jax.lax.stop_gradient(shaping_limits(plan, task))
    parts = (gradient, curvature, in_bag)
    quantization = measure_first(
        task.shard_sums, task.for_splits.mean, *parts, method.uniform
    )
    rows: Any = (*parts, task.seed, limits)
    sizes: Any = dict(
        max_depth=method.max_depth,
        max_nodes=method.max_nodes,
        max_leaves=method.max_leaves,
        uniform=method.uniform,
    )
    grow = partial(grow_levels, measure=quantization, num_bins=method.num_bins)
    if not method.sorts_rows:
        return grow(data.codes, *rows, **sizes)
    codes: Any = data.codes  # dense, and sorted by feature
    mass = None
    if method.candidates != "exact":
        values = curvature
        if method.candidate_weights == "samples":
            _, values = split_weights(jax.lax.stop_gradient(data.weights))
        mass = measure(values, in_bag)
    if method.candidates != "global":
        return grow_sorted_tree(codes, *rows, mass=mass, **sizes)
    assert mass is not None
    codes, highest = propose(codes, mass, num_bins=method.num_bins)
    tree, leaf = grow(codes, *rows, **sizes)
    return tree._replace(threshold=highest[tree.feature, tree.threshold]), leaf


def sum_leaves(
    problem: Problem,
    plan: RoundPlan,
    task: TreeTask,
    tree: Tree,
    leaf: Int32[Array, " N"],
) -> Tree:
    """Returns the tree with the sums that its leaf values are fitted to."""
    weights, fitted = plan.weights(problem.data, task.for_leaves.known), task.for_leaves
    channels = (fitted.gradient, fitted.curvature, jnp.float32(1))
    # Whether the splits and the leaf values are those of the same rows.
    same = problem.leaves_out or problem.arrays.numbers.subsample is None
    sizes = find_leaf_sizes(task.shard_sums) if same else None
    sums = sum_channels(channels, leaf, tree.leaf_value.shape[0], weights, sizes)
    return tree._replace(sums=LeafSums(*sums, l2=plan.limits.l2 * task.for_leaves.mean))


def fit_leaves(
    problem: Problem,
    learning_rate: Float[ArrayLike, ""],
    state: BoostState,
    plan: RoundPlan,
    task: TreeTask,
    tree: Tree,
    leaf: Int32[Array, " N"],
    newton: NewtonSteps,
) -> Tree:
    """Returns the tree of :func:`sum_leaves` with values, times the learning rate.

    ``newton`` is the result of :func:`find_own_steps`.
    """
    method, limits, sums = problem.method, plan.limits, tree.sums
    assert sums is not None
    newton = _doubt(problem, state, newton)
    groups = _pose_problems(problem, state, plan, task, leaf, newton)
    bounds = None if tree.bounds is None else tree.bounds * task.for_leaves.value_unit
    if bounds is not None and limits.values is not None:
        # The same numbers, but with the derivative in max_delta_step.
        most = jnp.broadcast_to(limits.values.bounds, bounds.shape)
        bounds = jnp.where(bounds == most, most, bounds)
    if method.leaf_solver == "joint":
        assert state.probe is not None
        value = solve_group_leaves(
            bind_groups(problem, state, groups.weights), state.scores, state.probe,
            task.k, leaf, sums, groups,
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
    if bounds is None and limits.values is not None:
        bounds = jnp.broadcast_to(limits.values.bounds, (*value.shape, 2))
    tree = _finish(problem, learning_rate, tree, value, bounds)._replace(bounds=None)
    if tree.slopes is None or method.leaf_solver in ("newton", "hessian", "joint"):
        return tree
    lower = _lowers_loss(problem, state, groups, tree)
    slope = jnp.where(lower, tree.slopes.slope, 0.0)
    return tree._replace(slopes=tree.slopes._replace(slope=slope))


def _lowers_loss(problem, state, groups, tree, before=None):
    """Returns whether the loss does not rise where a tree with slopes is added.

    ``before`` is the loss of each row before; None: computed here.
    """
    trees = jax.tree.map(lambda array: array[None], tree)
    own, leaf = state.steps[groups.k][None], groups.group[None]
    steps = add_leaves(own, trees, leaf, problem.data.values)
    if len(state.steps) > 1:
        steps = state.steps.at[groups.k].set(steps[0])
    objective = bind_objective(problem, state)
    after = loss_values(objective, state._replace(steps=steps).scores)
    before = loss_values(objective, groups.scores) if before is None else before
    return _is_lower(before, after, groups.weights)


def _finish(problem, learning_rate, tree, value, bounds):
    """Returns the tree with values and slopes of leaves times the learning rate.

    Slopes shrink until the leaves stay in their bounds.
    """
    # Otherwise, leaf values would not sum to the scores bit for bit.
    tree = tree._replace(leaf_value=round_alone(learning_rate * value))
    if tree.slopes is None:
        return tree
    slopes = tree.slopes._replace(slope=round_alone(learning_rate * tree.slopes.slope))
    if bounds is not None:
        parts = slopes, tree.leaf_value, learning_rate * bounds
        slopes = limit_slopes(*parts, problem.arrays.numbers.ranges)
    return tree._replace(slopes=slopes)


def list_own_terms(problem: Problem, tree: Tree) -> Int32[Array, "L P"] | None:
    """Returns the features of the terms of each leaf; None if leaves are constant.

    Features with a monotone constraint have no slopes.
    """
    (limits, _, ranges), method = problem.arrays.numbers, problem.method
    if problem.data.values is None or ranges is None:
        return None
    if limits.values is not None:
        ranges = jnp.where(limits.values.monotone[:, None] == 0, ranges, 0.0)
    return list_terms(tree, ranges, method.num_terms, method.num_bins)


def add_slopes(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    task: TreeTask,
    tree: Tree,
    leaf: Int32[Array, " N"],
    terms: Int32[Array, "L P"] | None,
) -> Tree:
    """Returns the tree of :func:`sum_leaves` with the slopes of linear leaves.

    ``terms`` are those of :func:`list_own_terms`, or of a tree that is refitted. Slopes
    are 0 where the rows of the run have almost no curvature.
    """
    table, ranges, method = (
        problem.data.values, problem.arrays.numbers.ranges, problem.method
    )  # fmt: skip
    if terms is None or table is None or ranges is None:
        return tree
    fitted, sums = task.for_leaves, tree.sums
    assert sums is not None
    unit: Any = state.weight_unit if method.regularization == "relative" else 1.0
    slopes = fit_slopes(
        table, ranges, terms, leaf, (fitted.gradient, fitted.curvature),
        plan.weights(problem.data, fitted.known), sums, (fitted.mean * unit, unit),
    )  # fmt: skip
    least = plan.limits.min_child_samples
    exact = decide_by_data(state.pointed, state.least_rows, method.leaf_solver, least)
    slope = jnp.where(exact.exact_leaves, 0.0, slopes.slope)
    return tree._replace(slopes=slopes._replace(slope=slope))


def add_shared_slopes(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    trees: Tree,
    leaf: Int32[Array, " N"],
    terms: Int32[Array, "L P"] | None,
) -> Tree:
    """Computes :func:`add_slopes` for each score of a tree of all scores."""
    if terms is None:
        return trees

    def fit(parts):
        task, tree = parts
        return add_slopes(problem, state, plan, task, tree, leaf, terms).slopes

    none: Any = None
    each = Tree(none, none, none, trees.leaf_value, trees.sums)
    slopes = jax.lax.map(fit, (plan.trees(), each))
    return trees._replace(slopes=slopes._replace(feature=slopes.feature[:1]))


def are_steps_kept(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    trees: Tree,
    leaf: Int32[Array, "T N"],
    newton: NewtonSteps,
    steps: Float[Array, "K N"],
    row_losses: Float[Array, " N"] | None,
) -> tuple[Bool[Array, ""], Float[Array, " N"] | None]:
    """Returns whether "guarded" keeps the Newton steps of all leaves of a round.

    ``newton`` are those steps, and ``steps`` those of all rows after the round. Also
    returns the loss of each row there, if it was computed.
    """

    newton = _doubt(problem, state, newton)

    def check(task, tree, newton, leaf, row_losses=None):
        groups = _pose_problems(problem, state, plan, task, leaf, newton)
        objective = bind_objective(problem, state)
        kept = jnp.all(keeps_steps(objective, groups, newton, row_losses))
        if tree.slopes is None or problem.method.share_structure:
            return kept
        return kept & _lowers_loss(problem, state, groups, tree, row_losses)

    if problem.method.share_structure:
        only = leaf[0]
        each = *_split_scores(problem, plan, trees), newton
        kept = jax.lax.map(lambda parts: check(*parts, leaf=only), each)
        return jnp.all(kept), None
    if row_losses is None:
        row_losses = loss_values(bind_objective(problem, state), state.scores)
    each = plan.trees(), trees, newton, leaf
    kept = map_scores(lambda parts: check(*parts, row_losses=row_losses), each)
    if len(steps) == 1:  # its tree has been compared leaf by leaf
        return jnp.all(kept), None
    lower, after = _lower_together(problem, state, plan, steps, row_losses)
    return jnp.all(kept) & lower, after


def judge_steps(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    trees: Tree,
    leaf: Int32[Array, "K N"],
    newton: NewtonSteps,
    losses: RowLosses,
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Computes :func:`are_steps_kept` from losses of the rows.

    The second result is whether they suffice; without slopes they may not.
    """
    before, after = losses.before, losses.after
    assert before is not None and losses.moved is not None

    def judge(parts):
        task, newton, leaf, moved, slope, sloped = parts
        groups = _pose_problems(problem, state, plan, task, leaf, newton)
        kept, hidden = compare_losses(groups, newton, before, moved)
        enough = ~jnp.any(hidden)
        if slope is not None:
            slope = rest_at_minima(
                state.minimizer, shift_scores(groups, newton.value), slope
            )
            kept = ask_slopes(groups, newton, kept, hidden, slope)
            enough = jnp.asarray(True)
        kept = jnp.all(kept)
        if sloped is not None:
            kept = kept & _is_lower(before, sloped, groups.weights)
        return kept, enough

    each = losses.moved, losses.slope, losses.sloped
    each = [None if one is None else jnp.stack(one) for one in each]
    kept, enough = map_scores(judge, (plan.trees(), newton, leaf, *each))
    kept = jnp.all(kept)
    if len(leaf) > 1:
        kept = kept & _is_lower(before, after, plan.weights(problem.data))
    return kept, jnp.all(enough)


def _lower_together(problem, state, plan, steps, before):
    """Returns whether the loss does not rise where the trees of all scores are added.

    ``before`` is the loss of each row before; that after is returned, too.
    """
    objective, weights = bind_objective(problem, state), plan.weights(problem.data)
    after = loss_values(objective, state._replace(steps=steps).scores)
    return _is_lower(before, after, weights), after


def _is_lower(before, after, weights):
    """Returns whether a sum of losses is finite and, up to rounding, no greater."""
    group = jnp.zeros(len(after), jnp.int32)
    change, size = sum_changes(before, after, group, 1, weights)
    return (jnp.isfinite(size) & (change <= 1e-6 * size))[0]


_HALVINGS = 12


def shorten_together(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    trees: Tree,
    leaf: Int32[Array, "K N"],
) -> Tree:
    """Halves the leaf values of a round until the loss does not rise.

    Each tree alone lowers the loss, but trees of scores that hardly differ in effect,
    such as a rate and the probability of an additional zero, may raise it together.
    Leaf values are 0 if 12 halvings do not help.
    """
    if problem.method.leaf_solver != "guarded" or len(leaf) == 1:
        return trees
    fixed = jax.lax.stop_gradient((problem.arrays, state, plan, trees))
    arrays, state, plan, given = fixed
    problem = problem._replace(arrays=arrays)
    before = loss_values(bind_objective(problem, state), state.scores)

    def rises(found):
        share, lower = found
        return ~lower & (share > 0)

    def halve(found):
        share, _ = found
        share = jnp.where(share > 0.5**_HALVINGS, share / 2, 0.0)
        parts = _shrink(given, share), leaf, problem.data.values
        steps = add_leaves(state.steps, *parts)
        return share, _lower_together(problem, state, plan, steps, before)[0]

    start = jnp.float32(2), jnp.asarray(False)
    share, _ = jax.lax.while_loop(rises, halve, start)
    return _shrink(trees, share)


def _shrink(trees, share):
    """Returns trees with a share of their leaf values and slopes, a power of two."""
    slopes = trees.slopes
    if slopes is not None:
        slopes = slopes._replace(slope=share * slopes.slope)
    return trees._replace(leaf_value=share * trees.leaf_value, slopes=slopes)


def find_newton_steps(problem: Problem, plan: RoundPlan, trees: Tree) -> NewtonSteps:
    """Returns the Newton steps of all scores, from the sums of their leaves."""
    each = plan.trees(), trees
    if problem.method.share_structure:
        each = _split_scores(problem, plan, trees)
    return jax.vmap(partial(find_own_steps, problem, plan))(*each)


def find_own_steps(
    problem: Problem, plan: RoundPlan, task: TreeTask, tree: Tree
) -> NewtonSteps:
    """Returns the Newton steps of the leaves of one score, from their sums."""
    assert tree.sums is not None
    method, fitted, limits = problem.method, task.for_leaves, plan.limits
    penalty, parent, l1 = jnp.float32(0), None, None
    if not method.order_statistics:
        penalty = round_alone(limits.l2 * fitted.mean)
        if limits.values is not None:
            l1 = round_alone(limits.values.l1 * fitted.mean)
        if limits.parent_rows is not None:
            parent = round_alone(limits.parent_rows * fitted.mean)
    return find_steps(tree.sums, penalty, parent, l1)


def _doubt(problem, state, newton):
    """Returns Newton steps with promises that none keeps, if a loss is pointed."""
    if problem.method.leaf_solver != "guarded":
        return newton
    promised = jnp.where(state.pointed, jnp.inf, newton.promised)
    return newton._replace(promised=promised)


def _pose_problems(problem, state, plan, task, leaf, newton):
    """Returns the problems that the leaf values of one score solve."""
    method, fitted, limits = problem.method, task.for_leaves, plan.limits
    l1 = zero_rows = None
    if method.order_statistics:
        if method.leaf_solver == "exact" and method.regularization == "relative":
            zero_rows = limits.l2  # the weight of each leaf's pseudo-row at zero
    elif limits.values is not None:
        l1 = round_alone(limits.values.l1 * fitted.mean)
    scores, weights = state.scores, plan.weights(problem.data, fitted.known)
    return LeafProblems(
        k=task.k,
        scores=scores,
        weights=weights if fitted.factor is None else weights * fitted.factor,
        direction=None,
        group=leaf,
        penalty=newton.penalty,
        pull=newton.pull,
        l1=l1,
        zero_rows=zero_rows,
    )


_STOPPING = Stopping(steps=10, residual=1e-6, least_bend=0.02, overshoot=0.5)


def sum_shared_leaves(
    data: Data, plan: RoundPlan, tree: Tree, leaf: Int32[Array, " N"]
) -> Tree:
    """Computes :func:`sum_leaves` for a tree of all scores, with no axis of trees."""
    fitted, num_scores = plan.for_leaves, len(plan.k)
    tables, others = [fitted.gradient, fitted.curvature], [jnp.float32(1)]
    if fitted.known is not None:
        tables, others = [*tables, fitted.known.astype(jnp.float32)], []
    num_leaves = tree.leaf_value.shape[0]
    sums = sum_tables(tables, others, leaf, num_leaves, plan.weights(data))
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
            l2=plan.limits.l2 * fitted.mean,
        ),
    )


def _fit_shared_leaves(
    problem, learning_rate, state, plan, tree, leaf, pointed, newton
):
    """Returns the tree with its leaf values, times the learning rate.

    ``pointed`` says that the loss resembles |r| in most rows, so that its Hessian is
    useless: each score is then fitted by itself, exactly. It is traced or concrete.
    """
    each, method = _split_scores(problem, plan, tree), problem.method
    joint = method.leaf_solver == "joint" and not problem.loss.coupled
    alone = replace(method, leaf_solver="guarded") if joint else method
    alone = problem._replace(static=problem.static._replace(method=alone))

    def fit_alone():
        def fit(parts):
            task, own, newton = parts
            sizes = jnp.float32(1), state, plan
            return fit_leaves(alone, *sizes, task, own, leaf, newton)

        return jax.lax.map(fit, (*each, newton)).leaf_value

    def fit_jointly():
        value, own = _solve_vectors(problem, state, plan, tree, leaf, newton), each[1]
        if own.bounds is not None:
            bounds = own.bounds * plan.for_leaves.value_unit[:, None, None]
            value = jnp.clip(value, *jnp.moveaxis(bounds, -1, 0))
        return value

    if joint and isinstance(pointed, Tracer):
        value = jax.lax.cond(pointed, fit_alone, fit_jointly)
    else:
        value = fit_jointly() if joint and not pointed else fit_alone()
    bounds = each[1].bounds
    if bounds is not None:
        bounds = bounds * plan.for_leaves.value_unit[:, None, None]
    return _finish(problem, learning_rate, tree, value, bounds)


def _split_scores(problem, plan, tree):
    """Returns the tree as one tree for each score, to be mapped over."""
    limits, fitted, bounds = plan.limits, plan.for_leaves, None
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
    task = plan._replace(for_splits=nothing, for_leaves=nothing).trees()
    return task, Tree(none, none, none, tree.leaf_value, tree.sums, bounds)


def _solve_vectors(problem, state, plan, tree, leaf, newton):
    weights, fitted, values = (
        plan.weights(problem.data),
        plan.for_leaves,
        plan.limits.values,
    )
    scores, sums = state.scores, tree.sums
    arrays, scores, sums = without_derivatives(
        (problem.arrays, scores, sums),
        "derivatives of training are not supported where the scores of a leaf are "
        "solved for together; use share_structure=False or leaf_solver='newton'",
    )
    objective = bind_objective(problem._replace(arrays=arrays), state)
    gradient, pull = sums.gradient, newton.pull
    if pull is not None:
        gradient = gradient - pull
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
        multiply = multiply_by(sum_leaves(triangles), len(scores))

    def slope_at(values):
        every = jnp.broadcast_to(leaf, scores.shape)
        slope = sum_leaves(gradients(objective, add_values(scores, values, every)))
        return slope if pull is None else slope - pull

    return solve_jointly(
        gradient, sums.curvature, newton.penalty, multiply, slope_at, _STOPPING
    )


STRUCTURE = "structure of trees"  # reverse mode keeps it, besides the state


def grow_round(
    problem: Problem, learning_rate: Float[ArrayLike, ""], state: BoostState
) -> tuple[BoostState, Tree, Bool[Array, " N"]]:
    """Makes one round; returns the rows in the bag, too.

    There are K trees, one for each score, or one for all.
    """
    state, raw = differentiate(problem, state)
    plan = start_round(problem, choose_scaling(problem), state, raw)
    trees, leaf = grow_trees(problem, state, plan)
    trees = fit_trees(problem, learning_rate, state, plan, trees, leaf, state.pointed)
    return add_trees(problem, state, plan, trees, leaf), trees, plan.in_bag


def step_round(
    problem: Problem,
    learning_rate: Float[ArrayLike, ""],
    state: BoostState,
    smooth: bool | None,
) -> tuple[BoostState, Tree, Bool[Array, ""]]:
    """Makes one round by Newton steps, in a shorter program than :func:`grow_round`.

    Returns whether that would make the same round: the leaf solver keeps all steps, and
    ``smooth``, that of :func:`differentiate`, lost no derivative.
    """
    state, raw = differentiate(problem, state, smooth)
    plan = start_round(problem, choose_scaling(problem), state, raw)
    method = problem.method
    guarded = method.leaf_solver == "guarded"
    solver: Any = "hessian" if guarded else method.leaf_solver
    static = problem.static._replace(method=replace(method, leaf_solver=solver))
    stepping = problem._replace(static=static)
    trees, leaf = grow_trees(stepping, state, plan)
    newton = find_newton_steps(problem, plan, trees)
    parts = plan, trees, leaf, False, newton
    trees = fit_trees(stepping, learning_rate, state, *parts)
    after = add_trees(problem, state, plan, trees, leaf)
    kept = state.lost[1] == 0
    if guarded:
        parts = problem, state, plan, trees, leaf, newton, after.steps, None
        kept = kept & are_steps_kept(*parts)[0]
    return after, trees, kept


def grow_trees(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    given: GivenLeaves | None = None,
) -> tuple[Tree, Int32[Array, "T N"]]:
    """Grows the trees of a round, sums the derivatives in their leaves, fits slopes.

    If leaves are ``given``, trees have no splits.
    """

    def grow(task):
        tree, leaf = grow_structure(problem, plan, task)
        return checkpoint_name((tree, leaf), STRUCTURE)

    def grow_one(task):
        tree, leaf = grow(task)
        tree = sum_leaves(problem, plan, task, tree, leaf)
        terms = list_own_terms(problem, tree)
        return add_slopes(problem, state, plan, task, tree, leaf, terms), leaf

    if given is not None:
        trees, leaf = _sum_given(problem, state, plan, given), given.leaf
    elif problem.method.share_structure:
        tree, leaf = grow(plan.structure())
        trees = sum_shared_leaves(problem.data, plan, tree, leaf)
        terms = list_own_terms(problem, tree)
        trees = add_shared_slopes(problem, state, plan, trees, leaf, terms)
        leaf = leaf[None]
    else:
        together = problem.method.count_together(*problem.data.codes.shape)
        trees, leaf = map_scores(grow_one, plan.trees(), together)
    return trees, leaf


def _sum_given(problem, state, plan, given):
    """Returns trees of given leaves, with their sums and the slopes of their terms."""
    leaf, terms = given.leaf, None if given.slopes is None else given.slopes.feature

    def make_tree(values, limits):
        none: Any = None
        bounds = None
        if limits.values is not None:
            bounds = jnp.broadcast_to(limits.values.bounds, (len(values), 2))
        return Tree(none, none, none, values, bounds=bounds)

    if problem.method.share_structure:
        tree = make_tree(given.leaf_value[0], plan.limits._replace(values=None))
        trees = sum_shared_leaves(problem.data, plan, tree, leaf[0])
        own = None if terms is None else terms[0]
        return add_shared_slopes(problem, state, plan, trees, leaf[0], own)

    def sum_tree(parts):
        leaf, values, task, terms = parts
        tree = make_tree(values, shaping_limits(plan, task))
        tree = sum_leaves(problem, plan, task, tree, leaf)
        return add_slopes(problem, state, plan, task, tree, leaf, terms)

    return map_scores(sum_tree, (leaf, given.leaf_value, plan.trees(), terms))


def fit_trees(
    problem: Problem,
    learning_rate: Float[ArrayLike, ""],
    state: BoostState,
    plan: RoundPlan,
    trees: Tree,
    leaf: Int32[Array, "T N"],
    pointed: Bool[ArrayLike, ""],
    newton: NewtonSteps | None = None,
) -> Tree:
    """Returns the trees of a round with leaf values, times the learning rate.

    The trees have the sums of their leaves. ``pointed`` is the flag of the state, if
    possible not traced. ``newton`` is the result of :func:`find_newton_steps`, if it is
    known.
    """
    if newton is None:
        newton = find_newton_steps(problem, plan, trees)
    if problem.method.share_structure:
        return _fit_shared_leaves(
            problem, learning_rate, state, plan, trees, leaf[0], pointed, newton
        )

    def fit(parts):
        return fit_leaves(problem, learning_rate, state, plan, *parts)

    trees = map_scores(fit, (plan.trees(), trees, leaf, newton))
    return shorten_together(problem, state, plan, trees, leaf)


def add_trees(
    problem: Problem,
    state: BoostState,
    plan: RoundPlan,
    trees: Tree,
    leaf: Int32[Array, "T N"],
) -> BoostState:
    """Returns the state after a round, from its trees and the leaf of every row."""
    table = problem.data.values
    steps = add_leaves(state.steps, trees, leaf, table, in_place=True)
    return advance(problem, state, plan, steps)


def advance(
    problem: Problem, state: BoostState, plan: RoundPlan, steps: Float[Array, "K N"]
) -> BoostState:
    """Returns the state after a round that has led to these steps."""
    state = count_round(state, plan, steps)
    parameters = estimate_parameters(
        problem.loss, problem.constants, problem.data, state.scores
    )
    return state._replace(parameters=parameters)


def count_round(
    state: BoostState, plan: RoundPlan, steps: Float[Array, "K N"]
) -> BoostState:
    """Computes :func:`advance` for a loss with constant parameters."""
    return state._replace(
        steps=steps,
        first_mean=plan.for_leaves.first_mean,
        concentration=plan.for_leaves.concentration,
        round=state.round + 1,
        sizes=plan.sizes,
        lost=plan.lost,
    )


def map_scores(function: Callable[[Any], Any], each: Any, together: int = 1) -> Any:
    """Maps a function over the K scores, axis 0 of each array.

    It runs on one score at a time, because ``jax.vmap`` would take every branch; with
    the kernels for GPUs on as many as divide K, up to ``together``.
    """
    count = len(jax.tree.leaves(each)[0])
    if count > 1:
        some = max(n for n in range(1, count + 1) if count % n == 0 and n <= together)
        side_by_side = partial(jax.lax.map, function, batch_size=some)
        alone = partial(jax.lax.map, function)
        return choose(xla=alone, cuda=side_by_side if some > 1 else None)(each)
    # The same without a batch axis, which would cost speed.
    first = jax.tree.map(lambda a: a[0], each)
    return jax.tree.map(lambda a: a[None], function(first))
