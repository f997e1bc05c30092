# SPDX-License-Identifier: Apache-2.0
"""Gradient and curvature of each row as one array, between the programs of a round.

In: derivatives. Out: complex numbers, and the derivatives again. XLA gives each result
of a program a loop of its own, which repeats what both have in common or reads it from
memory; one array takes one pass over the rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex64, Float

from jboost.boosting.row_derivatives import RawDerivatives, list_policies
from jboost.boosting.state import Problem
from jboost.entry.collectives import every
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose
from jboost.objective.curvature import are_finite


def join_pairs(
    problem: Problem, raw: tuple[RawDerivatives, ...]
) -> tuple[RawDerivatives, ...]:
    """Joins the derivatives of one score in ``gradient``, where both take work."""
    loss = problem.loss
    if loss.coupled or loss.num_scores > 1 or loss.quadratic:
        return raw
    if set(list_policies(problem.method)) == {"unit"}:
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
) -> tuple[tuple[RawDerivatives, ...], Bool[Array, ""]]:
    """Undoes :func:`join_pairs`; returns whether all rows that count are finite.

    Args:
      regular: what is returned instead, if it is known.
    """
    found = [_split(each, weights, regular) for each in raw]
    finite = jnp.all(jnp.stack([each for _, each in found]))
    return tuple(each for each, _ in found), finite


def _split(raw, weights, regular):
    if raw.curvature is not None:
        pair = raw.gradient, raw.curvature
        return raw, are_finite(*pair, weights) if regular is None else regular
    run = choose(cpu=grow_cpu.split_pairs, xla=take_parts)
    gradient, curvature, finite = run(raw.gradient[0], weights)
    raw = raw._replace(gradient=gradient[None], curvature=curvature[None])
    return raw, every(finite) if regular is None else regular


def take_parts(
    pairs: Complex64[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Bool[Array, ""]]:
    """Returns real and imaginary parts, and whether those that count are finite."""
    finite = jnp.isfinite(pairs) | (weights <= 0)
    return jnp.real(pairs), jnp.imag(pairs), jnp.all(finite)
