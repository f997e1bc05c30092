# SPDX-License-Identifier: Apache-2.0
"""One tree for all scores of a round: its splits from one direction, vectors as leaves.

In: gradient and curvature of every score. Out: derivatives along one direction of the
space of scores, from which a tree is grown as for a single score; the tree with a value
for each score in each leaf.

A round restricts all changes of scores to multiples of a direction u: a leaf may add
c u to the scores of its rows. The objective of c has the gradient sum_k u_k g_k, the
curvature sum_k u_k^2 h_k and the penalty sum_k u_k^2 l2_k. The direction is the Newton
step of a random half of the rows against the other half:

    u_k = sum_i z_i w_i g_ik / m_k,    z_i = 1 or -1 at random, m_k the mean curvature,

so that scores whose gradients differ most between rows count most. It does not depend
on the units of the scores, and turns with them where they are rotated. The idea of
growing vector trees from few random projections of the gradient is that of SketchBoost
(Iosipoi and Vakhrushev 2022, section 3.3); leaves are fitted with all scores.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jboost.boosting.row_derivatives import RowDerivatives
from jboost.entry.collectives import first_row
from jboost.numerics.derivatives import round_alone
from jboost.numerics.random_bits import derive, hash_words
from jboost.numerics.sums import sum_rows
from jboost.trees.limits import TreeLimits

_SIGNS = 1 << 30  # keeps signs apart from what else a tree's seed draws


class Line(NamedTuple):
    """Derivatives along one direction, for a tree of all scores.

    Attributes:
      derivatives: with an axis of one tree in front.
      units: those of the leaf values, into which limits on them are converted; see
        :func:`jboost.boosting.structure.shaping_limits`. No derivatives of rows.
    """

    derivatives: RowDerivatives
    units: RowDerivatives


def draw_line(
    seed: UInt32[Array, "2"],
    shape: RowDerivatives,
    fitted: RowDerivatives,
    weights: Float[Array, " N"],
) -> Line:
    """Draws the direction of a round; returns the derivatives along it.

    Args:
      shape: derivatives of the K scores that shape the tree, and
      fitted: those that its leaves are fitted with.
      weights: of the rows; 0 for rows that the tree does not learn from.
    """
    shape, fitted, weights = jax.lax.stop_gradient((shape, fitted, weights))
    direction = _draw_direction(seed, fitted, weights)
    size, magnitude = jnp.square(direction), jnp.abs(direction)
    one, nothing = jnp.ones(1, jnp.float32), None

    def replace_zero(value):
        return jnp.where(value > 0, value, 1.0)[None]

    derivatives = RowDerivatives(
        gradient=_add_scores(direction, shape.gradient)[None],
        curvature=_add_scores(size, shape.curvature)[None],
        mean=replace_zero(_add_scores(size, shape.mean)),
        first_mean=one, concentration=one, value_unit=one,
    )  # fmt: skip
    units: Any = derivatives._replace(gradient=nothing, curvature=nothing)
    return Line(
        derivatives,
        units._replace(
            mean=replace_zero(_add_scores(magnitude, fitted.mean)),
            value_unit=replace_zero(jnp.max(magnitude * fitted.value_unit)),
        ),
    )


def _draw_direction(seed, fitted, weights):
    number = first_row() + jnp.arange(weights.shape[0], dtype=jnp.int32)
    bits = hash_words(number.astype(jnp.uint32), derive(seed, jnp.int32(_SIGNS)))
    signs = jnp.where(bits >> 31 == 0, jnp.float32(1), jnp.float32(-1))
    known = jnp.where((weights > 0)[None, :], signs * fitted.gradient, 0.0)
    step = sum_rows(known, weights) / fitted.mean
    # Of length 1 in its largest entry, so that no square overflows.
    largest = jnp.max(jnp.abs(step))
    return step / jnp.where(largest > 0, largest, 1.0)


def _add_scores(factors, values):
    """Returns sum_k factors[k] values[k], added in this order in every program."""
    shape = (-1,) + (1,) * (values.ndim - 1)
    return jnp.sum(round_alone(factors.reshape(shape) * values), axis=0)


def free_limits(limits: TreeLimits) -> TreeLimits:
    """Returns limits without monotone constraints.

    Those hold for each score, which a search along one direction cannot see; see
    :func:`jboost.trees.vector_bounds.bound_leaves`.
    """
    if limits.values is None:
        return limits
    free = jnp.zeros_like(limits.values.monotone)
    return limits._replace(values=limits.values._replace(monotone=free))
