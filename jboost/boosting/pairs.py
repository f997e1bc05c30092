# SPDX-License-Identifier: Apache-2.0
"""Gradient and curvature of each row as one array, between the programs of a round.

In: derivatives. Out: complex numbers, and the derivatives again. XLA gives each result
of a program a loop of its own, which repeats what both have in common or reads it from
memory; one array takes one pass over the rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex64, Float, Int32

from jboost.boosting.row_derivatives import RawDerivatives, list_policies
from jboost.boosting.state import Problem
from jboost.entry.collectives import every
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose
from jboost.objective.curvature import are_finite, count_lost


def are_joined(problem: Problem) -> bool:
    """Returns whether derivatives are joined: those of one score, if both take work."""
    loss = problem.loss
    alone = not loss.coupled and loss.num_scores == 1 and not loss.quadratic
    return alone and set(list_policies(problem.method)) != {"unit"}


def join_pairs(
    problem: Problem, raw: tuple[RawDerivatives, ...]
) -> tuple[RawDerivatives, ...]:
    """Joins the derivatives of one score in ``gradient``."""
    if not are_joined(problem):
        return raw
    nothing: Any = None
    return tuple(
        each._replace(
            gradient=jax.lax.complex(each.gradient, each.curvature), curvature=nothing
        )
        for each in raw
    )


def split_pairs(
    raw: tuple[RawDerivatives, ...],
    weights: Float[Array, " N"],
    regular: Bool[Array, ""] | None,
) -> tuple[tuple[RawDerivatives, ...], Bool[Array, ""], Int32[Array, "2"]]:
    """Undoes :func:`join_pairs`, and leaves out derivatives that are not finite.

    Args:
      regular: the second result, if it is known.

    Returns:
      The derivatives; whether those of all rows that count are finite; and
      :func:`jboost.objective.curvature.count_lost` of rows of joined derivatives.
    """
    found = [_split(each, weights, regular) for each in raw]
    finite = jnp.all(jnp.stack([each for _, each, _ in found]))
    return tuple(each for each, _, _ in found), finite, found[0][2]


def _split(raw, weights, regular):
    if raw.curvature is not None:
        pair = raw.gradient, raw.curvature
        finite = are_finite(*pair, weights) if regular is None else regular
        return raw, finite, jnp.zeros(2, jnp.int32)
    pairs = raw.gradient[0]
    run = choose(cpu=grow_cpu.split_pairs, xla=take_parts)
    gradient, curvature, finite = run(pairs, weights)
    raw = raw._replace(gradient=gradient[None], curvature=curvature[None])
    finite = every(finite)

    def count(pairs):
        return count_lost(~jnp.isfinite(pairs) & (weights > 0))

    lost = jax.lax.cond(finite, lambda _: jnp.zeros(2, jnp.int32), count, pairs)
    return raw, finite if regular is None else regular, lost


def take_parts(
    pairs: Complex64[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Bool[Array, ""]]:
    """Returns real and imaginary parts, and whether those that count are finite.

    Both parts are 0 where one is not finite.
    """
    finite = jnp.isfinite(pairs)
    parts = (
        jnp.where(finite, part, 0.0) for part in (jnp.real(pairs), jnp.imag(pairs))
    )
    return *parts, jnp.all(finite | (weights <= 0))
