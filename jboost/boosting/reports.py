# SPDX-License-Identifier: Apache-2.0
"""What is looked at after a round: losses, scores, improvement.

In: the state before a round and after it, and its trees. Out: the scores of other sets
of rows, the losses of all, and what rows outside the bag gained. The same for rows in
memory (``chunks``) and on disk (``block_rounds``).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jboost.boosting.method import Method
from jboost.boosting.rounds import BoostState, Data, reported_parameters
from jboost.codes.codes import Codes
from jboost.objective.evaluation import Objective, loss_values, mean_of_rows
from jboost.objective.tracing import TracedLoss
from jboost.trees.growing import find_leaves
from jboost.trees.leaf_operations import add_values
from jboost.trees.tree import Tree


class Report(NamedTuple):
    """What one round adds to a chunk, besides trees and state."""

    set_scores: tuple[Float[Array, "K N"], ...]
    losses: Float[Array, " S"]
    snapshots: tuple[Float[Array, "K N"], ...]
    improvement: Float[Array, ""] | None


def report_round(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    method: Method,
    keep: bool,
    data: Data,
    sets: tuple[Data, ...],
    before: BoostState,
    state: BoostState,
    set_scores: tuple[Array, ...],
    trees: Tree,
    in_bag: Bool[Array, " N"] | None,
) -> Report:
    """What is looked at after a round, traced.

    Args:
      keep: whether metrics need the scores.
      before: the state before the round, and ``set_scores`` the scores of the other
        sets then.
      state: the state after it.
      in_bag: rows that the trees learned from; None if all did.
    """
    parameters = reported_parameters(loss, state)
    set_scores = tuple(
        add_tree(trees, rows.codes, scores)
        for rows, scores in zip(sets, set_scores, strict=True)
    )
    every = ((data, state.scores), *zip(sets, set_scores, strict=True))
    losses = [
        mean_loss(loss, constants, parameters, rows.targets, rows.weights, scores)
        for rows, scores in every
    ]
    improvement = None
    if in_bag is not None:
        improvement = mean_improvement(loss, constants, data, ~in_bag, before, state)
    return Report(
        set_scores=set_scores,
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
    """The weighted mean loss; ``parameters`` are those of an adaptive loss."""
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
    """The weighted mean loss of some rows before, minus after; NaN without rows."""
    objectives = [
        Objective(loss, constants, data.targets, reported_parameters(loss, state), None)
        for state in (before, after)
    ]
    change = loss_values(objectives[0], before.scores)
    change -= loss_values(objectives[1], after.scores)
    return mean_of_rows(objectives[1], change, jnp.where(rows, data.weights, 0.0))


def add_tree(tree: Tree, codes: Codes, scores: Float[Array, "K N"]):
    """Scores after adding one round of K trees."""
    leaf = jax.vmap(find_leaves, (0, None))(tree, codes)
    return add_values(scores, tree.leaf_value, leaf, in_place=True)
