# SPDX-License-Identifier: Apache-2.0
"""The Fisher information of every row, and the curvatures that follow from it.

In: a likelihood bound to its data, and scores [K, N]. Out: the matrices F of all rows
as packed triangles, or gradient and curvature of every row. F is the expected second
derivative of the loss: unlike the second derivative itself it is never negative.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from jboost.entry.collectives import first_row
from jboost.entry.stages import stage
from jboost.numerics.random_bits import derive
from jboost.objective.evaluation import (
    Objective,
    gradients,
    map_information,
    weighted_mean,
)

# The exponent a of each policy: gradient F^(a - 1) g and curvature F^a.
EXPONENTS: Mapping[str, float] = MappingProxyType(
    {"fisher": 1.0, "standardized": 0.5, "natural": 0.0}
)
_STREAM = np.uint32(0x85EBCA6B)  # keeps these random numbers apart from those of trees
_FLOOR = 1e-6  # least information of a row, relative to the weighted mean


def information_triangles(
    objective: Objective, scores: Float[Array, "K N"], seed: UInt32[Array, "2"]
) -> Float[Array, "P N"]:
    """Returns the information of every row, the entries F_kl with k <= l, row by row.

    P = K (K + 1) / 2, in the order of ``numpy.triu_indices(K)``. N matrices are never
    in memory at once.

    Args:
      seed: of what is drawn, where the distribution has no formula.
    """
    return map_information(objective, scores, _row_seeds(scores, seed), pack_triangles)


def information_diagonals(
    objective: Objective, scores: Float[Array, "K N"], seed: UInt32[Array, "2"]
) -> Float[Array, "K N"]:
    """Returns F_kk of every row."""
    return map_information(objective, scores, _row_seeds(scores, seed), take_diagonals)


def summarize_information(
    objective: Objective,
    scores: Float[Array, "K N"],
    finish: Callable[..., Float[Array, "... N"]],
    *operands: Any,
):
    """Applies ``finish(rows, *operands)`` to blocks of matrices [N, K, K]."""
    seeds = _row_seeds(scores, jnp.zeros(2, jnp.uint32))
    return map_information(objective, scores, seeds, finish, *operands)


def round_seed(words: UInt32[Array, "2"], number: Array) -> UInt32[Array, "2"]:
    """Returns the seed of what a round draws to estimate the information."""
    return derive(jnp.asarray(words) ^ _STREAM, jnp.asarray(number, jnp.int32))


def pack_triangles(rows: Float[Array, "N ..."]) -> Float[Array, "P N"]:
    """Returns the upper triangles of the matrices [N, K, K], or numbers [N]."""
    if rows.ndim == 1:
        return rows[None]
    first, second = np.triu_indices(rows.shape[1])
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    return jnp.stack([rows[:, k, other] for k, other in pairs])


def take_diagonals(rows: Float[Array, "N ..."]) -> Float[Array, "K N"]:
    """Returns the diagonals of the matrices [N, K, K], or numbers [N]."""
    if rows.ndim == 1:
        return rows[None]
    return jnp.stack([rows[:, k, k] for k in range(rows.shape[1])])


def _row_seeds(scores, seed):
    number = jnp.arange(scores.shape[1], dtype=jnp.int32) + first_row()
    return derive(seed, number)


def informed_derivatives(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    curvature: str,
    seed: UInt32[Array, "2"],
) -> tuple[Float[Array, "K N"], Float[Array, "K N"], Float[Array, "K N"] | None]:
    """Returns w g, w F and w = F^(a - 1) of every row, where F is F_kk of score k.

    A leaf is then the least squares fit of the natural gradient g / F with weights F^a,
    and the Newton step by information of the loss in which w weighs the rows. a = 1
    ("fisher") weighs rows by how much they tell about the score, a = 0 all alike, as
    NGBoost does. "natural" is a = 1/2: w g = g / sqrt(F) has unit variance in each row
    if the distribution is right.

    Returns:
      w g; w F; w, or None for a = 1.
    """
    gradient = gradients(objective, scores)
    information = information_diagonals(objective, scores, seed)
    return _weigh(gradient, information, weights, EXPONENTS[curvature])


@stage
def _weigh(gradient, information, weights, exponent):
    if exponent == 1:
        return gradient, information, None
    least = _FLOOR * weighted_mean(information, weights)
    information = jnp.maximum(information, least[:, None])
    # 0 where no row has any, such as about degrees of freedom near the normal limit.
    informed = information > 0
    factor = jnp.where(informed, information, 1) ** (exponent - 1)
    factor = jnp.where(informed, factor, 0)
    return factor * gradient, factor * information, factor
