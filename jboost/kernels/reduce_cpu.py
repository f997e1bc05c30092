# SPDX-License-Identifier: Apache-2.0
"""Sums of float32 by the CPU kernel of native/reduce.h."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jboost.kernels.library import call
from jboost.kernels.sums_xla import choose_unit


def sum_rows(
    values: Float[Array, "*K N"], times: UInt8[Array, " N"] | None = None
) -> Float[Array, "*K"]:
    """See :func:`jboost.numerics.sums.sum_rows`; equal to it bit for bit."""
    lead = values.shape[:-1]
    matrix = _as_matrix(values)
    result = jax.ShapeDtypeStruct(matrix.shape[:1], jnp.float32)
    operands = (matrix,) if times is None else (matrix, times)
    sums = call("sum_rows", result, *operands)
    return sums.reshape(lead)


def find_greatest(
    values: Float[Array, "*K N"],
) -> tuple[Float[Array, "*K"], Float[Array, "*K"]]:
    """See :func:`jboost.kernels.sums_xla.find_greatest`; equal to it bit for bit."""
    lead = values.shape[:-1]
    matrix = _as_matrix(values)
    size = matrix.shape[:1]
    results = jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, "f4")
    bits, others = call("greatest_of_rows", results, matrix)
    greatest = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return greatest.reshape(lead), others.reshape(lead)


def sum_digits(
    values: Float[Array, "*K N"],
    greatest: Float[Array, "*K"],
    times: UInt8[Array, " N"] | None = None,
) -> Int32[Array, "*K 4"]:
    """See :func:`jboost.kernels.sums_xla.sum_digits`; equal to it."""
    matrix = _as_matrix(values)
    result = jax.ShapeDtypeStruct((matrix.shape[0], 4), jnp.int32)
    operands = (matrix, choose_unit(greatest.reshape(-1))[0])
    operands += () if times is None else (times,)
    digits = call("digits_of_rows", result, *operands)
    return digits.reshape(*values.shape[:-1], 4)


def _as_matrix(values):
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
