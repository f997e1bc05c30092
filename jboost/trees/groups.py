# SPDX-License-Identifier: Apache-2.0
"""The problems of the leaves of a tree; see :mod:`jboost.trees.leaves`."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int32


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
