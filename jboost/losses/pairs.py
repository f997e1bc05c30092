# SPDX-License-Identifier: Apache-2.0
"""A sum over the pairs of rows of a group, with derivatives that are short programs.

In: scores [G] and the weights of pairs. Out: one number. What JAX derives by itself
evaluates a pair several times for the gradient, and keeps several numbers for each pair
for products with the Hessian. By the rules below, it is one of each.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jboost.losses.groups import softplus


@jax.custom_jvp
def logistic_pairs(scores, weights):
    """Returns the sum over pairs of |w_ij| log(1 + exp(-sign(w_ij) (s_i - s_j))).

    Args:
      scores: [G].
      weights: [T, G], of all pairs that one of the first T rows belongs to: positive
        where row i should have the higher score, negative where row j should. w_ji is
        -w_ij; such a pair counts once.

    Returns:
      A scalar.
    """
    return sum_once(jnp.abs(weights) * softplus(-find_lead(scores, weights)))


@partial(logistic_pairs.defjvp, symbolic_zeros=True)
def _differentiate_pairs(primals, tangents):
    (scores, weights), (moved, changed) = primals, tangents
    tangent = jnp.zeros((), scores.dtype)
    if not isinstance(moved, SymbolicZero):
        tangent += jnp.sum(_find_slopes(scores, weights) * moved)
    if not isinstance(changed, SymbolicZero):
        lead = find_lead(scores, weights)
        tangent += sum_once(jnp.sign(weights) * softplus(-lead) * changed)
    return logistic_pairs(scores, weights), tangent


@jax.custom_jvp
def _find_slopes(scores, weights):
    """Returns the derivative in the scores: - sum_j w_ij / (1 + exp(lead_ij))."""
    return -_sum_by_row(weights * jax.nn.sigmoid(-find_lead(scores, weights)))


@partial(_find_slopes.defjvp, symbolic_zeros=True)
def _differentiate_slopes(primals, tangents):
    (scores, weights), (moved, changed) = primals, tangents
    share = jax.nn.sigmoid(-find_lead(scores, weights))
    tangent = jnp.zeros_like(scores)
    if not isinstance(moved, SymbolicZero):
        # The only numbers that products with the Hessian need.
        curvature = jnp.abs(weights) * share * (1 - share)
        tangent += _sum_by_row(curvature * _subtract(moved, len(weights)))
    if not isinstance(changed, SymbolicZero):
        tangent -= _sum_by_row(changed * share)
    return -_sum_by_row(weights * share), tangent


def find_lead(scores, weights):
    """Returns by how much the score that should be higher is, [T, G]."""
    lead = _subtract(scores, len(weights))
    return jnp.where(weights < 0, -lead, lead)


def sum_once(values):
    """Sums values [T, G] of pairs, of which those of the first T rows appear twice."""
    first, size = values.shape
    share = jnp.where(jnp.arange(size, dtype=jnp.int32) < first, 0.5, 1.0)
    return jnp.sum(values * share.astype(values.dtype)[None])


def _subtract(values, first):
    """Returns the differences [T, G] of the first T values to all."""
    return values[:first, None] - values[None, :]


def _sum_by_row(values):
    """Sums values [T, G] of pairs, where that of (j, i) is the negative, to [G]."""
    first, size = values.shape
    sums = jnp.sum(values, axis=1)
    if first == size:
        return sums
    return jnp.concatenate([sums, -jnp.sum(values[:, first:], axis=0)])
