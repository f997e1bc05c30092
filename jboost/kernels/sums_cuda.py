# SPDX-License-Identifier: Apache-2.0
"""Sums of integers by key as a CUDA kernel: see cuda/sums.cu."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from jboost.kernels.cuda_launch import BLOCKS, Launch, divide_rows, launch

_INT = 4  # bytes
_LANES = 32  # the lanes of a warp
_WORD = 8  # bytes
_MOST_THREADS = 1024
_MOST_BYTES = 48 * 1024  # the largest table of a block
_MOST_ROWS = 2**15  # the most rows of a block, so that sums of 16 bits fit 31


def sum_keys(
    values: Int32[Array, "N C"], keys: Int32[Array, " N"], num_keys: int
) -> Int32[Array, "G C"]:
    """Sums rows of ``values`` by key; leaves out keys outside 0 to num_keys - 1."""
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


def sum_terms(
    values: Float[Array, "K N"],
    scale: Float[Array, " K"],
    weights: Float[Array, " N"] | None,
) -> UInt32[Array, "K 4"]:
    """Sums weighted values as whole multiples of 1 / scale, each rounded by itself.

    Terms that are not finite are left out, and so are rows of weight 0. See
    :func:`jboost.kernels.sums_xla.split_weights` for the product with a weight.

    Returns:
      Four words for low + high * 2^32: two of low, then two of high, which is signed.
    """
    num_sums, num_rows = values.shape
    blocks, rows = divide_rows(num_rows, BLOCKS)
    run = Launch(
        "sum_terms",
        (_words(num_sums),),
        (blocks, num_sums),
        (num_rows, rows, weights is not None),
        2 * _WORD * _MOST_THREADS // _LANES,
        zeroed=(True,),
    )
    return launch(run, values, _or_nothing(weights), scale)


def sum_terms_by_key(
    values: Float[Array, "C N"],
    scale: Float[Array, " C"],
    keys: Int32[Array, " N"],
    weights: Float[Array, " N"] | None,
    num_keys: int,
) -> UInt32[Array, "C G 4"]:
    """Computes :func:`sum_terms` by key; leaves out keys outside 0 to num_keys - 1."""
    channels, num_rows = values.shape
    copies = count_copies(3 * num_keys)
    rows = min(divide_rows(num_rows, BLOCKS)[1], _MOST_ROWS)
    run = Launch(
        "sum_terms_by_key",
        (_words(channels, num_keys),),
        (-(-num_rows // rows), channels),
        (num_rows, num_keys, rows, copies, weights is not None),
        3 * num_keys * copies * _INT,
        zeroed=(True,),
    )
    return launch(run, values, _or_nothing(weights), keys, scale)


def find_kinds(
    terms: Float[Array, "C N"], keys: Int32[Array, " N"], num_keys: int
) -> UInt32[Array, "C G"]:
    """Finds which kinds of non-finite terms each key has.

    Returns:
      Bit 0 if a term is +inf, bit 1 if a term is -inf; both if a term is NaN.
    """
    channels, num_rows = terms.shape
    run = Launch(
        "find_kinds",
        (jax.ShapeDtypeStruct((channels, num_keys), jnp.uint32),),
        (divide_rows(num_rows, BLOCKS)[0], channels),
        (num_rows, num_keys),
        zeroed=(True,),
    )
    return launch(run, terms, keys)


def _or_nothing(weights):
    return jnp.zeros(1, jnp.float32) if weights is None else weights


def _words(*shape):
    return jax.ShapeDtypeStruct((*shape, 4), jnp.uint32)


def count_copies(cells: int) -> int:
    """Returns how many copies of a table fit: a power of two, or 0."""
    fit = _MOST_BYTES // (max(1, cells) * _INT)
    return min(_LANES, 1 << (fit.bit_length() - 1)) if fit else 0
