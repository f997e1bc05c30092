# SPDX-License-Identifier: Apache-2.0
"""Sums of integers by key as a CUDA kernel: see cuda/sums.cu."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jboost.kernels.cuda_launch import BLOCKS, Launch, divide_rows, launch

_INT = 4  # bytes
_LANES = 32  # of a warp
_MOST_BYTES = 48 * 1024  # of a block's table


def sum_keys(
    values: Int32[Array, "N C"], keys: Int32[Array, " N"], num_keys: int
) -> Int32[Array, "G C"]:
    """Sums rows of ``values`` by key; rows with another key are left out."""
    num_rows, channels = values.shape
    copies = count_copies(num_keys * channels)
    blocks, rows = divide_rows(num_rows, BLOCKS)
    run = Launch(
        "sum_by_key",
        (jax.ShapeDtypeStruct((num_keys, channels), jnp.int32),),
        (blocks, 1),
        (num_rows, channels, num_keys, rows, copies),
        num_keys * channels * copies * _INT,
        zeroed=(True,),
    )
    return launch(run, values, keys)


def count_copies(cells: int) -> int:
    """Returns how many copies of a table fit: a power of two, or 0."""
    fit = _MOST_BYTES // (max(1, cells) * _INT)
    return min(_LANES, 1 << (fit.bit_length() - 1)) if fit else 0
