# SPDX-License-Identifier: Apache-2.0
"""Sums of float32 by the CPU kernel of native/reduce.h."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.kernels.library import call
from jboost.kernels.sums_xla import choose_unit


def sum_rows(
    values: Float[Array, "*K N"], weights: Float[Array, " N"] | None = None
) -> Float[Array, "*K"]:
    """See :func:`jboost.kernels.sums_xla.sum_rows`; equal to it bit for bit."""
    lead = values.shape[:-1]
    matrix = _as_matrix(values)
    result = jax.ShapeDtypeStruct(matrix.shape[:1], jnp.float32)
    return call("sum_rows", result, matrix, *optional(weights)).reshape(lead)


def find_greatest(
    values: Float[Array, "*K N"], weights: Float[Array, " N"] | None = None
) -> tuple[Float[Array, "*K"], Float[Array, "*K"]]:
    """See :func:`jboost.kernels.sums_xla.find_greatest`; equal to it bit for bit."""
    lead = values.shape[:-1]
    matrix = _as_matrix(values)
    size = matrix.shape[:1]
    results = jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, "f4")
    bits, others = call("greatest_of_rows", results, matrix, *optional(weights))
    greatest = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return greatest.reshape(lead), others.reshape(lead)


def sum_digits(
    values: Float[Array, "*K N"],
    greatest: Float[Array, "*K"],
    weights: Float[Array, " N"] | None = None,
) -> Int32[Array, "*K 4"]:
    """See :func:`jboost.kernels.sums_xla.sum_digits`; equal to it."""
    matrix = _as_matrix(values)
    result = jax.ShapeDtypeStruct((matrix.shape[0], 4), jnp.int32)
    up = choose_unit(greatest.reshape(-1))[0]
    digits = call("digits_of_rows", result, matrix, up, *optional(weights))
    return digits.reshape(*values.shape[:-1], 4)


def optional(weights: Array | None) -> tuple[Array, ...]:
    """Returns the operand of a call that may lack it."""
    return () if weights is None else (weights,)


def _as_matrix(values):
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
