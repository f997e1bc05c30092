# SPDX-License-Identifier: Apache-2.0
"""Reports a round: losses, out-of-bag improvement, scores.

In: the states before and after a round. Out: a Report. Rows in memory
and rows on disk are reported by the same traced function.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jboost.boosting.state import BoostState, Data, Problem, reported_parameters
from jboost.codes.codes import Codes
from jboost.objective.evaluation import Objective, loss_values, mean_of_rows
from jboost.objective.tracing import TracedLoss
from jboost.trees.growing import find_leaves
from jboost.trees.leaf_operations import add_values
from jboost.trees.tree import Tree


class Report(NamedTuple):
    """What one round adds to a chunk, besides trees and state.

    Attributes:
      losses: of the training rows, then of each set.
      snapshots: the scores of all, where metrics need them.
      improvement: how much the loss of the rows out of the bag fell; None if all rows
        are in the bag.
    """

    losses: Float[Array, " S"]
    snapshots: tuple[Float[Array, "K N"], ...]
    improvement: Float[Array, ""] | None


def report_round(
    problem: Problem,
    keep: bool,
    sets: tuple[Data, ...],
    before: BoostState,
    state: BoostState,
    set_scores: tuple[Array, ...],
    in_bag: Bool[Array, " N"] | None,
) -> Report:
    """Reports a round.

    Args:
      keep: whether metrics need the scores.
      sets: the rows of the validation sets.
      before: the state before the round.
      state: the state after the round, and ``set_scores`` those of the sets.
      in_bag: rows that the trees learned from; None: all rows.
    """
    loss, constants, data = problem.loss, problem.constants, problem.data
    parameters = reported_parameters(loss, state)
    every = ((data, state.scores), *zip(sets, set_scores, strict=True))
    losses = [
        mean_loss(loss, constants, parameters, rows.targets, rows.weights, scores)
        for rows, scores in every
    ]
    improvement = None
    if in_bag is not None:
        improvement = mean_improvement(loss, constants, data, ~in_bag, before, state)
    return Report(
        losses=jnp.stack(losses),
        snapshots=(state.scores, *set_scores) if keep else (),
        improvement=improvement,
    )


def mean_loss(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    parameters: Any,
    targets: Any,
    weights: Float[Array, " N"],
    scores: Float[Array, "K N"],
) -> Float[Array, ""]:
    """Returns the weighted mean loss; an adaptive loss takes ``parameters``."""
    objective = Objective(loss, constants, targets, parameters, None)
    return mean_of_rows(objective, loss_values(objective, scores), weights)


def mean_improvement(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    data: Data,
    rows: Bool[Array, " N"],
    before: BoostState,
    after: BoostState,
) -> Float[Array, ""]:
    """Returns how much the weighted mean loss of some rows fell; NaN without rows."""
    objectives = [
        Objective(loss, constants, data.targets, reported_parameters(loss, state), None)
        for state in (before, after)
    ]
    change = loss_values(objectives[0], before.scores)
    change -= loss_values(objectives[1], after.scores)
    return mean_of_rows(objectives[1], change, jnp.where(rows, data.weights, 0.0))


def add_to_sets(
    trees: Tree, sets: tuple[Data, ...], set_scores: tuple[Float[Array, "K N"], ...]
) -> tuple[Float[Array, "K N"], ...]:
    """Returns the scores of the validation sets after the K trees of a round."""
    pairs = zip(sets, set_scores, strict=True)
    return tuple(add_tree(trees, rows.codes, scores) for rows, scores in pairs)


def add_tree(tree: Tree, codes: Codes, scores: Float[Array, "K N"]):
    """Returns the scores after adding the K trees of a round."""
    leaf = jax.vmap(find_leaves, (0, None))(tree, codes)
    return add_values(scores, tree.leaf_value, leaf, in_place=True)
