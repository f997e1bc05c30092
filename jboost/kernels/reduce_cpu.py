# SPDX-License-Identifier: Apache-2.0
"""Sums of float32 by the CPU kernel of native/reduce.h."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.kernels.library import call


def sum_rows(values: Float[Array, "*K N"]) -> Float[Array, "*K"]:
    """See :func:`jboost.numerics.sums.sum_rows`; equal to it bit for bit."""
    lead = values.shape[:-1]
    matrix = values.reshape(-1, values.shape[-1])
    sums = call("sum_rows", jax.ShapeDtypeStruct(matrix.shape[:1], jnp.float32), matrix)
    return sums.reshape(lead)
