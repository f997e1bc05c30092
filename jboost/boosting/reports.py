# SPDX-License-Identifier: Apache-2.0
"""Reports a round: losses, out-of-bag improvement, scores.

Rows in memory and rows on disk are reported by the same traced function.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from jboost.boosting.groups import round_words
from jboost.boosting.state import BoostState, Data, Problem, reported_parameters
from jboost.objective.coupled import GroupObjective, group_values
from jboost.objective.evaluation import (
    Objective,
    loss_values,
    weighted_mean,
    weighted_means,
)
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.tracing import TracedLoss
from jboost.trees.grow import find_leaves
from jboost.trees.joint_start import move_scores
from jboost.trees.slopes import add_leaves
from jboost.trees.tree import Tree


class Report(NamedTuple):
    """Outputs of a round other than trees and state.

    Attributes:
      losses: the mean loss of the training rows, then of each validation set.
      snapshots: the scores of these rows and sets, if metrics need them.
      improvement: decrease of the mean loss of the rows out of the bag; None if all
        rows are in the bag.
      sizes: the greatest terms of the losses' sums, guesses for the next round; None on
        one device.
      row_losses: the loss of each training row, or of each group of rows.
    """

    losses: Float[Array, " S"]
    snapshots: tuple[Float[Array, "K N"], ...]
    improvement: Float[Array, ""] | None
    sizes: Float[Array, " G"] | None
    row_losses: Float[Array, " N"] | None


class RowLosses(NamedTuple):
    """The losses of rows that decide about a round and report it; None: not known.

    Attributes:
      before, after: those of the training rows before and after the round.
      moved: those after the Newton steps of each score, without slopes of leaves.
      slope: the gradients there.
      sloped: those after the tree of each score, if leaves have slopes.
      sets: those of the validation sets that have rows of their own, after the round.
    """

    before: Float[Array, " N"] | None
    after: Float[Array, " N"] | None = None
    moved: tuple[Float[Array, " N"], ...] | None = None
    slope: tuple[Float[Array, "K N"], ...] | None = None
    sloped: tuple[Float[Array, " N"], ...] | None = None
    sets: tuple[Float[Array, " _"], ...] = ()


_UNKNOWN = RowLosses(None)


def report_round(
    problem: Problem,
    keep: bool,
    sets: tuple[Data, ...],
    before: BoostState,
    state: BoostState,
    set_steps: tuple[Array, ...],
    in_bag: Bool[Array, " N"] | None,
    *,
    sizes: Float[Array, " G"] | None = None,
    losses: RowLosses = _UNKNOWN,
) -> Report:
    """Reports a round; ``in_bag`` is None if the trees learned from all rows.

    Losses that are not given are computed here. The problem has no loss if all are.
    """
    loss, constants, data = problem.loss, problem.constants, problem.data
    set_scores = [
        move_scores(rows.offset, state.init_score.reshape(-1)) + steps
        for rows, steps in zip(sets, set_steps, strict=True)
    ]

    def weigh(rows, scores, known):
        if known is not None:
            return known, rows.weights
        parameters = reported_parameters(loss, state)
        return weigh_losses(loss, constants, parameters, rows, scores, state.words)

    pairs: list[Any] = [weigh(data, state.scores, losses.after)]
    others = iter(losses.sets)
    for rows, scores in zip(sets, set_scores, strict=True):
        # Sets without codes are the training rows, with other weights.
        alike = rows.codes is None and not isinstance(loss, GroupLoss)
        pairs.append(
            (pairs[0][0], rows.weights)
            if alike
            else weigh(rows, scores, next(others, None))
        )
    if in_bag is not None:
        if losses.before is not None and losses.after is not None:
            out = jnp.where(in_bag, 0.0, data.weights)
            pairs.append((losses.before - losses.after, out))
        else:
            pairs.append(_improvements(loss, constants, data, ~in_bag, before, state))
    means, sizes = weighted_means(pairs, sizes)
    return Report(
        losses=jnp.stack(means[: 1 + len(sets)]),
        snapshots=(state.scores, *set_scores) if keep else (),
        improvement=None if in_bag is None else means[-1],
        sizes=sizes,
        row_losses=pairs[0][0],
    )


def no_sizes(num_sets: int, bagged: bool) -> Float[np.ndarray, " G"]:
    """Returns the sizes of a report before the first one."""
    return np.zeros(2 * (1 + num_sets + bagged), np.float32)


def mean_loss(
    loss: TracedLoss | GroupLoss,
    constants: tuple[Any, ...],
    parameters: Any,
    rows: Data,
    scores: Float[Array, "K N"],
    words: UInt32[Array, "2"],
) -> Float[Array, ""]:
    """Returns the weighted mean loss; an adaptive loss takes ``parameters``."""
    pair = weigh_losses(loss, constants, parameters, rows, scores, words)
    return weighted_mean(*pair)


def weigh_losses(
    loss: TracedLoss | GroupLoss,
    constants: tuple[Any, ...],
    parameters: Any,
    rows: Data,
    scores: Float[Array, "K N"],
    words: UInt32[Array, "2"],
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Returns the loss of each row, or of each group, and its weight.

    The random draws of a loss of groups are those of the first round, in all rounds.
    """
    if isinstance(loss, GroupLoss):
        assert rows.groups is not None
        objective = GroupObjective(
            loss, constants, rows.targets, rows.weights, rows.groups, parameters,
            round_words(words, 0), rows.prepared,
        )  # fmt: skip
        return group_values(objective, scores)
    return find_values(loss, constants, rows, scores, parameters), rows.weights


def find_values(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    rows: Data,
    scores: Float[Array, "K N"],
    parameters: Any = (),
) -> Float[Array, " N"]:
    """Returns the loss of each row; an adaptive loss takes ``parameters``."""
    objective = Objective(loss, constants, rows.targets, parameters, None)
    return loss_values(objective, scores)


def _improvements(loss, constants, data, rows, before, after):
    """Returns how much the loss of each row fell, and weights, 0 for other rows."""
    out = data._replace(weights=jnp.where(rows, data.weights, 0.0))
    (old, weights), (new, _) = (
        weigh_losses(
            loss, constants, reported_parameters(loss, state), out, state.scores,
            after.words,
        )
        for state in (before, after)
    )  # fmt: skip
    return old - new, weights


def add_to_sets(
    trees: Tree,
    sets: tuple[Data, ...],
    set_steps: tuple[Float[Array, "K _"], ...],
    steps: Float[Array, "K N"],
) -> tuple[Float[Array, "K _"], ...]:
    """Returns the steps of the validation sets after the K trees of a round.

    ``steps`` are those of the training rows; sets without codes share them.
    """
    return tuple(
        steps if rows.codes is None else add_tree(trees, rows, before)
        for rows, before in zip(sets, set_steps, strict=True)
    )


def add_tree(tree: Tree, rows: Data, steps: Float[Array, "K N"]):
    """Returns the steps after adding the trees of a round."""
    nothing: Any = None
    structure = tree._replace(leaf_value=nothing, sums=None, slopes=None)
    leaf = jax.vmap(find_leaves, (0, None))(structure, rows.codes)
    return add_leaves(steps, tree, leaf, rows.values, in_place=True)
