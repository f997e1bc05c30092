# SPDX-License-Identifier: Apache-2.0
"""The problems of the leaves of a tree; see :mod:`jboost.trees.leaves`."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from jboost.entry.stages import stage
from jboost.numerics.derivatives import round_alone
from jboost.trees.leaf_operations import add_values


class Groups(NamedTuple):
    """Problems along one score.

    Attributes:
      k: which score.
      scores: of all rows.
      weights: 0 for rows that do not count.
      direction: d above; None for 1.
      group: of each row.
      penalty: of each problem.
      l1: of every problem; None for 0.
      resting: weight of rows at rest, of which order statistics take one for each
        group; see :func:`jboost.trees.leaves.solve_at_kinks`. None for 0.
    """

    k: Int32[Array, ""]
    scores: Float[Array, "K N"]
    weights: Float[Array, " N"]
    direction: Float[Array, " N"] | None
    group: Int32[Array, " N"]
    penalty: Float[Array, " G"]
    l1: Float[Array, ""] | None = None
    resting: Float[Array, ""] | None = None


def take_rows(groups: Groups, rows: Int32[Array, " M"]) -> Groups:
    """Returns the same problems with some of their rows."""
    direction = groups.direction
    return groups._replace(
        scores=groups.scores[:, rows],
        weights=groups.weights[rows],
        direction=None if direction is None else direction[rows],
        group=groups.group[rows],
    )


@stage
def shift_scores(groups: Groups, c: Float[Array, " G"]) -> Float[Array, "K N"]:
    """Returns the scores after adding c times the direction."""
    if groups.direction is not None:
        change = round_alone(c[groups.group] * groups.direction)
        return _replace_score(groups, (groups.scores[groups.k] + change)[None])
    row = groups.scores[groups.k][None]
    return _replace_score(groups, add_values(row, c[None], groups.group[None]))


def _replace_score(groups, row):
    """Returns all scores, with another row in place of score k."""
    if groups.scores.shape[0] == 1:
        return row
    return jax.lax.dynamic_update_slice_in_dim(groups.scores, row, groups.k, 0)
