# SPDX-License-Identifier: Apache-2.0
"""Draws the rows that a round learns from, and scales their derivatives.

In: the state and the derivatives of a round. Out: a Round: what is known of it before
its trees grow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.boosting.auto import decide_by_data
from jboost.boosting.first_sums import FirstSums, Sizes, sum_first
from jboost.boosting.row_derivatives import (
    RawDerivatives,
    RowDerivatives,
    Scaling,
    draw_rows,
    round_seeds,
    scale_derivatives,
)
from jboost.boosting.shared_trees import Line, draw_line
from jboost.boosting.state import BoostState, Data, Problem
from jboost.trees.limits import TreeLimits, count_in


class Round(NamedTuple):
    """What is known of a round before its trees grow, score by score.

    Attributes:
      k: 0 .. K - 1.
      seeds: one for each tree.
      shape: derivatives that shape the trees.
      fitted: derivatives that leaves are fitted with.
      in_bag: rows that the trees learn from; None in programs that know it is all.
      whole: whether no row is left out.
      limits: numbers that shape the trees, "auto" resolved.
      first: sums over the shards, where rows are sharded; for trees whose leaves are
        fitted with the derivatives that shape them.
      sizes, lost: of the state after the round.
      line: what the tree is grown from where one serves all scores; None otherwise.
    """

    k: Int32[Array, " K"]
    seeds: UInt32[Array, "K 2"]
    shape: RowDerivatives
    fitted: RowDerivatives
    in_bag: Bool[Array, " N"]
    whole: Bool[Array, ""]
    limits: TreeLimits
    first: FirstSums | None
    sizes: Sizes | None
    lost: Int32[Array, "3"]
    line: Line | None = None

    def trees(self) -> "OneTree":
        """Returns what differs from score to score, to be mapped over."""
        return OneTree(self.k, self.seeds, self.shape, self.fitted, self.first)

    def structure(self) -> "OneTree":
        """Returns what the splits of the tree of all scores are found with."""
        assert self.line is not None
        one = OneTree(self.k[:1], self.seeds[:1], *self.line, None)
        return jax.tree.map(lambda array: array[0], one)

    def weights(
        self, data: Data, known: Bool[Array, "*K N"] | None = None
    ) -> Float[Array, "*K N"]:
        """Returns the weights of the rows that the trees learn from, 0 for others.

        Rows of weight 0 have a derivative in their weight, unless rows are sampled.

        Args:
          known: of the derivatives that leaves are fitted with.
        """
        weights = data.weights
        if self.in_bag is not None:
            inside = self.in_bag | (self.whole & (data.weights == 0))
            weights = jnp.where(inside, data.weights, 0.0)
        return weights if known is None else jnp.where(known, weights, 0.0)


class OneTree(NamedTuple):
    """What a round knows of one tree; the fields are those of :class:`Round`."""

    k: Int32[Array, "*K"]
    seed: UInt32[Array, "*K 2"]
    shape: RowDerivatives
    fitted: RowDerivatives
    first: FirstSums | None


def start_round(
    problem: Problem,
    scaling: Scaling,
    state: BoostState,
    raw: tuple[RawDerivatives, ...],
) -> Round:
    """Draws the rows and the seeds of a round, and scales the derivatives.

    Args:
      scaling: from :func:`jboost.boosting.row_derivatives.choose_scaling`.
      raw: from :func:`jboost.boosting.row_derivatives.differentiate`.
    """
    numbers, num_scores = problem.arrays.numbers, state.steps.shape[0]
    seeds = round_seeds(state)
    limits, share = numbers.limits, numbers.subsample
    if scaling.relative:
        limits = count_in(limits, state.weight_unit)
    choices = decide_by_data(
        state.pointed,
        state.least_rows,
        problem.method.leaf_solver,
        limits.min_child_samples,
    )
    weights = problem.data.weights
    in_bag = draw_rows(problem, state)
    first, sizes = None, state.sizes
    if len(scaling.policies) == 1 and raw[0].known is None:  # all rows count alike
        raised = scaling.policies[0].raised
        pair = raw[0].gradient, raw[0].curvature
        first, sizes = sum_first(*pair, weights, in_bag, raised, sizes)
    shape, fitted, first = scale_derivatives(scaling, weights, state, raw, first)
    now = Round(
        k=jnp.arange(num_scores, dtype=jnp.int32),
        seeds=seeds[1:],
        shape=shape,
        fitted=fitted,
        in_bag=in_bag,
        whole=jnp.asarray(True if share is None else share >= 1),
        limits=limits._replace(min_child_samples=choices.min_child_samples),
        first=first,
        sizes=sizes,
        lost=state.lost,
    )
    if not problem.method.share_structure:
        return now
    coupling = state.coupling
    competing = False if coupling is None else jnp.any(coupling.competing)
    line = draw_line(seeds[1], shape, fitted, now.weights(problem.data), competing)
    # Only the sums of one score's tree are known before it grows.
    return now._replace(line=line, first=None)
