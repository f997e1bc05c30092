# SPDX-License-Identifier: Apache-2.0
"""One round of boosting: derivatives, sample, grow, leaves, add.

In: the state after a round. Out: the state after the next, and its trees. ``boost``,
``fit`` and cross-validation run this function. For rows on disk, ``streams`` runs the
same parts, with another one in place of ``grow_structure``.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.boosting.leaf_values import fit_leaves, sum_leaves
from jboost.boosting.row_derivatives import choose_scaling, differentiate
from jboost.boosting.row_sample import Round, start_round
from jboost.boosting.shared_leaves import fit_shared_leaves, sum_shared_leaves
from jboost.boosting.state import BoostState, Problem, estimate_parameters
from jboost.boosting.structure import grow_structure
from jboost.trees.leaf_operations import add_values
from jboost.trees.tree import Tree

STRUCTURE = "structure of trees"  # what reverse mode keeps of a round besides the state


def grow_round(
    problem: Problem, learning_rate: Float[ArrayLike, ""], state: BoostState
) -> tuple[BoostState, Tree, Bool[Array, " N"]]:
    """Makes one round: K trees, one for each score, or one for all.

    Returns:
      The next state, the trees, and the rows that they learned from.
    """
    state, raw = differentiate(problem, state)
    now = start_round(problem, choose_scaling(problem), state, raw)
    if problem.method.share_structure:
        trees, leaf = grow_shared_tree(problem, now)
        own = state.pointed
        trees = fit_trees(problem, learning_rate, state, now, trees, leaf, own)
        return add_trees(problem, state, now, trees, leaf), trees, now.in_bag

    def grow(one):
        grown = grow_structure(problem, now, one)
        tree, leaf = checkpoint_name(grown, STRUCTURE)
        tree = sum_leaves(problem.data, now, one, tree, leaf)
        return fit_leaves(problem, learning_rate, state, now, one, tree, leaf), leaf

    trees, leaf = map_scores(grow, now.trees())
    return add_trees(problem, state, now, trees, leaf), trees, now.in_bag


def grow_shared_tree(problem: Problem, now: Round) -> tuple[Tree, Int32[Array, "1 N"]]:
    """Grows the tree of all scores, and sums the derivatives in its leaves."""
    grown = grow_structure(problem, now, now.structure())
    tree, leaf = checkpoint_name(grown, STRUCTURE)
    return sum_shared_leaves(problem.data, now, tree, leaf), leaf[None]


def fit_trees(
    problem: Problem,
    learning_rate: Float[ArrayLike, ""],
    state: BoostState,
    now: Round,
    trees: Tree,
    leaf: Int32[Array, "T N"],
    pointed: Bool[ArrayLike, ""],
) -> Tree:
    """Returns the trees of a round with leaf values, times the learning rate.

    Args:
      trees: with the sums of their leaves, and ``leaf`` that of every row.
      pointed: that of the state, if possible not traced.
    """
    if problem.method.share_structure:
        return fit_shared_leaves(
            problem, learning_rate, state, now, trees, leaf[0], pointed
        )

    def fit(parts):
        one, tree, leaf = parts
        return fit_leaves(problem, learning_rate, state, now, one, tree, leaf)

    return map_scores(fit, (now.trees(), trees, leaf))


def add_trees(
    problem: Problem,
    state: BoostState,
    now: Round,
    trees: Tree,
    leaf: Int32[Array, "T N"],
) -> BoostState:
    """Returns the state after a round, whose trees put the rows into these leaves."""
    steps = add_values(state.steps, trees.leaf_value, leaf, in_place=True)
    return advance(problem, state, now, steps)


def advance(
    problem: Problem, state: BoostState, now: Round, steps: Float[Array, "K N"]
) -> BoostState:
    """Returns the state after a round that has led to these steps."""
    state = count_round(state, now, steps)
    parameters = estimate_parameters(
        problem.loss, problem.constants, problem.data, state.scores
    )
    return state._replace(parameters=parameters)


def count_round(
    state: BoostState, now: Round, steps: Float[Array, "K N"]
) -> BoostState:
    """Does what :func:`advance` does, for a loss whose parameters stay the same."""
    return state._replace(
        steps=steps,
        first_mean=now.fitted.first_mean,
        concentration=now.fitted.concentration,
        round=state.round + 1,
        sizes=now.sizes,
        lost=now.lost,
    )


def map_scores(function: Callable[[Any], Any], each: Any) -> Any:
    """Maps a function over the K scores, whose axis comes first in each array.

    One by one: mapped side by side, every branch would be taken.
    """
    if len(jax.tree.leaves(each)[0]) > 1:
        return jax.lax.map(function, each)
    # The same without a batch axis, which would cost speed.
    first = jax.tree.map(lambda a: a[0], each)
    return jax.tree.map(lambda a: a[None], function(first))
