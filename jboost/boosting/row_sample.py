# SPDX-License-Identifier: Apache-2.0
"""Draws the rows that a round learns from.

In: the state and the derivatives of a round. Out: a Round: what is known of it before
its trees grow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.boosting.auto import decide_by_data
from jboost.boosting.row_derivatives import RowDerivatives
from jboost.boosting.state import BoostState, Data, Problem
from jboost.numerics.random_bits import derive
from jboost.numerics.sampling import sample
from jboost.trees.limits import TreeLimits


class Round(NamedTuple):
    """What is known of a round before its trees grow, score by score.

    Attributes:
      k: 0 .. K - 1.
      seeds: one for each tree.
      shape: derivatives that shape the trees.
      fitted: derivatives that leaves are fitted with.
      in_bag: rows that the trees learn from.
      whole: whether no row is left out.
      limits: numbers that shape the trees, "auto" resolved.
    """

    k: Int32[Array, " K"]
    seeds: UInt32[Array, "K 2"]
    shape: RowDerivatives
    fitted: RowDerivatives
    in_bag: Bool[Array, " N"]
    whole: Bool[Array, ""]
    limits: TreeLimits

    def trees(self) -> "OneTree":
        """Returns what differs from tree to tree, to be mapped over."""
        return OneTree(self.k, self.seeds, self.shape, self.fitted)

    def weights(self, data: Data) -> Float[Array, " N"]:
        """Returns the weights of the rows that the trees learn from, 0 for others.

        Rows of weight 0 have a derivative in their weight, unless rows are sampled.
        """
        known = self.in_bag | (self.whole & (data.weights == 0))
        return jnp.where(known, data.weights, 0.0)


class OneTree(NamedTuple):
    """What a round knows of one tree; the fields are those of :class:`Round`."""

    k: Int32[Array, "*K"]
    seed: UInt32[Array, "*K 2"]
    shape: RowDerivatives
    fitted: RowDerivatives


def sample_rows(
    problem: Problem, state: BoostState, shape: RowDerivatives, fitted: RowDerivatives
) -> Round:
    """Draws the rows and the seeds of a round."""
    numbers, num_scores = problem.arrays.numbers, state.scores.shape[0]
    # A round uses 1 + K seeds: one for the rows, and one for each tree.
    uses = jnp.arange(num_scores + 1, dtype=jnp.int32)
    seeds = derive(state.words, (num_scores + 1) * state.round + uses)
    limits, share = numbers.limits, jax.lax.stop_gradient(numbers.subsample)
    choices = decide_by_data(
        state.pointed,
        state.least_rows,
        problem.method.leaf_solver,
        limits.min_child_samples,
    )
    return Round(
        k=jnp.arange(num_scores, dtype=jnp.int32),
        seeds=seeds[1:],
        shape=shape,
        fitted=fitted,
        in_bag=sample(seeds[0], problem.data.weights > 0, share),
        whole=share >= 1,
        limits=limits._replace(min_child_samples=choices.min_child_samples),
    )
