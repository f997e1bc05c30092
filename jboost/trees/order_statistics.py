# SPDX-License-Identifier: Apache-2.0
"""Leaf values that are order statistics: medians and quantiles.

In: the rows' own minimizers and kinks, and the leaf of each row, as Groups. Out: one
value per leaf.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.entry.collectives import on_first_shard
from jboost.entry.stages import stage, switch
from jboost.numerics.sums import sum_rows
from jboost.objective.evaluation import Kinks, Objective, weighted_mean
from jboost.objective.minimizers import exact_scale, kink_slopes
from jboost.trees.groups import Groups
from jboost.trees.leaf_operations import middle_minimizers


def find_medians(objective: Objective, groups: Groups) -> Float[Array, " G"]:
    """Finds the middle of all c that minimize sum_i w_i |F*_i - F_i - c| per group.

    The weighted median of the rows' own minimizers F*; rows without one do not count.
    """
    return _find_medians(objective.minimizer, groups)


@stage
def _find_medians(minimizer, groups):
    assert minimizer is not None
    minimizer = minimizer[groups.k]
    known = jnp.isfinite(minimizer)
    weights = jnp.where(known, groups.weights, 0.0)
    slopes = (jnp.float32(1), jnp.float32(2))
    return middle_minimizers(
        jnp.where(known, minimizer, 0.0), groups.scores[groups.k], weights, slopes,
        exact_scale(2 * sum_rows(weights)), groups.group, groups.penalty.shape[0],
    )  # fmt: skip


def solve_at_kinks(
    objective: Objective,
    groups: Groups,
    kinks: Kinks,
    solve: Callable[[], Float[Array, " G"]],
) -> Float[Array, " G"]:
    """Returns order statistics if each row has one kink, else what ``solve`` finds.

    With ``groups.resting`` = m, each group has one more row, of weight m, the slopes of
    an average row and its minimum at the present score. For squared error such a row
    would add m c^2 / 2 to a leaf's loss, as l2 does; for absolute error the value is
    the median of the residuals and of m zeros.
    """
    assert objective.minimizer is not None
    minimizer = objective.minimizer

    def of_rows():
        return _find_middles(minimizer, groups, kinks, kink_slopes(objective))

    def of_all():
        slopes = (kinks.left, kinks.right)
        return _find_middles(minimizer, groups, kinks, slopes)

    return switch(kinks.kind, [solve, of_rows, of_all])


@stage
def _find_middles(minimizer, groups, kinks, slopes):
    left, right = slopes
    kinks_of_rows, scale = (left, left + right), kinks.scale
    rows = (minimizer[0], groups.scores[0], groups.weights, groups.group)
    if groups.resting is not None:
        rows, kinks_of_rows, scale = _add_resting(rows, kinks_of_rows, scale, groups)
    *values, group = rows
    return middle_minimizers(
        *values, kinks_of_rows, scale, group, groups.penalty.shape[0]
    )


def _add_resting(rows, kinks, scale, groups):
    """Appends one row to each group."""
    num_groups, resting = groups.penalty.shape[0], groups.resting
    every = jnp.arange(num_groups, dtype=groups.group.dtype)
    means = [weighted_mean(kink, groups.weights) for kink in kinks if kink.ndim]
    if means:
        kinks = [
            jnp.append(kink, jnp.broadcast_to(mean, num_groups))
            for kink, mean in zip(kinks, means, strict=True)
        ]
    kink = means[1] if means else kinks[1]
    added = (jnp.float32(0), jnp.float32(0), on_first_shard(resting), every)
    rows = [
        jnp.append(values, jnp.broadcast_to(value, num_groups))
        for values, value in zip(rows, added, strict=True)
    ]
    # Half of the range for the rows, half for what is added.
    scale = jnp.minimum(scale, exact_scale(resting * kink)) / 2
    return rows, tuple(kinks), scale
