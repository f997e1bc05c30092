# SPDX-License-Identifier: Apache-2.0
"""What a round does in another way where the loss couples the rows of a group.

In: a problem whose loss is of groups, and the state after a round. Out: the state
before the first round, derivatives, leaf values. Everything else of a round is the same
for all losses.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.numerics.random_bits import derive
from jboost.numerics.sampling import sample
from jboost.numerics.sums import sum_channels, sum_rows
from jboost.objective.coupled import GroupObjective, group_gradient
from jboost.objective.minimum import find_minimum
from jboost.objective.probing import Probe, linearize, raise_curvature, renew_probe
from jboost.tables.groups import RowGroups
from jboost.trees.damped_newton import move_scores
from jboost.trees.joint_leaves import Stopping, solve_jointly

_STREAM = np.uint32(0x9E3779B9)  # keeps these random numbers apart from those of trees
_NOISE = 1e-5  # of a sum of magnitudes: what float32 sums of a group cannot tell from 0
_FIRST_STEP = 1e-3  # of the search for the initial score
_PROBES = 10  # 16 times as far each: up to 7e7
_SWEEPS = 4  # over K > 1 scores
_STOPPING = Stopping(steps=5, residual=0.1, least_bend=0.25, overshoot=0.0)


def round_words(
    words: UInt32[Array, "2"], number: Int32[ArrayLike, ""]
) -> UInt32[Array, "2"]:
    """Returns the seed of what a loss of groups draws in a round."""
    return derive(jnp.asarray(words) ^ _STREAM, jnp.asarray(number, jnp.int32))


def draw_bag(
    groups: RowGroups | None,
    seed: UInt32[Array, "2"],
    weights: Float[Array, " N"],
    share: Float[Array, ""],
) -> Bool[Array, " N"]:
    """Draws a share of the rows, or of the groups, none of which is divided."""
    eligible = weights > 0
    if groups is None or groups.number is None or groups.kind != "ids":
        return sample(seed, eligible, share)
    # There are at most as many groups as rows.
    counted = jnp.zeros_like(eligible).at[groups.number].max(eligible)
    return sample(seed, counted, share)[groups.number] & eligible


def find_group_start(
    objective: GroupObjective, offset: Float[Array, "K N"]
) -> tuple[Float[Array, " K"], Bool[Array, ""]]:
    """Finds the number that minimizes the loss when it is added to all scores.

    Returns:
      The number for each score, and whether the loss does not depend on any: the
      numbers are then 0.
    """
    weights = objective.weights

    def slope(start, k):
        gradient = group_gradient(objective, move_scores(offset, start))[k]
        counted = jnp.where(weights > 0, gradient * weights, 0.0)
        return sum_rows(counted), _NOISE * sum_rows(jnp.abs(counted))

    def solve(start, k):
        # One after the other: the gradient is compiled once.
        beside = jnp.array([0, -1, 1], jnp.float32)
        slopes, noises = jax.lax.map(lambda c: slope(start.at[k].add(c), k), beside)
        flat = jnp.all(jnp.abs(slopes) <= noises)

        def slope_at(point):
            value, error = slope(start.at[k].set(point[0]), k)
            # Far away a loss may overflow.
            value = jnp.where(jnp.isnan(value), point[0] - start[k], value)
            return value[None], jnp.where(jnp.isnan(error), 0.0, error)[None]

        unbounded = jnp.full(1, jnp.inf, jnp.float32)
        found = find_minimum(
            slope_at, start[k][None], jnp.full(1, _FIRST_STEP, jnp.float32),
            low=-unbounded, high=unbounded, wanted=~flat[None], num_probes=_PROBES,
        )  # fmt: skip
        good = found.strict[0] & ~flat
        return jnp.where(good, start.at[k].set(found.point[0]), start), flat

    num_scores = offset.shape[0]
    numbers = jnp.tile(
        jnp.arange(num_scores, dtype=jnp.int32), _SWEEPS if num_scores > 1 else 1
    )
    start, flat = jax.lax.scan(solve, jnp.zeros(num_scores, jnp.float32), numbers)
    return start, jnp.all(flat)


def probe_round(
    objective: GroupObjective,
    scores: Float[Array, "K N"],
    probe: Probe,
    number: Int32[Array, ""],
    policies: tuple[str, ...],
) -> tuple[Probe, list[tuple[Float[Array, "K N"], Float[Array, "K N"]]]]:
    """Returns the probe of a round, and gradient and curvature by each policy."""
    gradient, probe = renew_probe(objective, scores, probe, number)

    def curvature(policy):
        if policy == "unit":
            return jnp.ones_like(gradient)
        return raise_curvature(probe, objective.weights)

    return probe, [(gradient, curvature(policy)) for policy in policies]


def solve_group_leaves(
    objective: GroupObjective,
    scores: Float[Array, "K N"],
    probe: Probe,
    k: Int32[Array, ""],
    leaf: Int32[Array, " N"],
    sums: Any,
    penalty: Float[Array, ""],
    l1: Float[Array, ""] | None,
) -> Float[Array, " L"]:
    """Returns the values of all leaves of a tree; see :func:`solve_jointly`.

    Args:
      objective: its weights are 0 for rows outside the bag.
      leaf: of every row.
      sums: :class:`jboost.trees.tree.LeafSums` of the tree.
    """
    gradient, curvature = sums.gradient, sums.curvature
    if l1 is not None:
        gradient = gradient - jnp.clip(gradient, -l1, l1)
    num_leaves, weights = gradient.shape[0], objective.weights
    product = linearize(objective, scores, probe)

    def sum_leaves(rows):
        rows = jnp.where(weights > 0, rows[k], 0.0)
        return sum_channels((rows,), leaf, num_leaves, weights)[0]

    def multiply(values):
        direction = jnp.zeros_like(scores).at[k].set(values[leaf])
        return sum_leaves(product(direction))

    def slope_at(values):
        return sum_leaves(group_gradient(objective, scores.at[k].add(values[leaf])))

    return solve_jointly(gradient, curvature, penalty, multiply, slope_at, _STOPPING)
