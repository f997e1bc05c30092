# SPDX-License-Identifier: Apache-2.0
"""Cumulative sums along the last axis, by products with small triangular matrices.

In: an array. Out: its cumulative sums. On CPU this takes half the time of
``jnp.cumsum``, and so does its derivative. It only adds: sums of positive numbers are
accurate to a few units in the last place, however their sizes differ.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

BLOCK = 16


def cumulate(
    values: Float[Array, "*batch N"], *, reverse: bool = False
) -> Float[Array, "*batch N"]:
    """Returns the sums of the values up to each index, or from it on if ``reverse``."""
    size = values.shape[-1]
    if size <= BLOCK:
        return _multiply(values, reverse)
    blocks = -(-size // BLOCK)
    ends = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, [*ends, (0, blocks * BLOCK - size)])
    rows = padded.reshape(*values.shape[:-1], blocks, BLOCK)
    inside = _multiply(rows, reverse)
    totals = cumulate(inside[..., 0 if reverse else -1], reverse=reverse)
    other = _shift(totals, reverse)
    summed = inside + other[..., None]
    return summed.reshape(*values.shape[:-1], -1)[..., :size]


def cumulate_in_blocks(
    values: Float[Array, "K N"], *, reverse: bool = False
) -> Float[Array, "K N"]:
    """Returns cumulative sums of row k that start anew every 2^k places.

    All rows are summed at once. N must be a power of two, at least 2^(K - 1).
    """
    count, size = values.shape
    width = min(size, BLOCK)
    whole = BLOCK.bit_length() - 1  # rows from here on never start inside a block
    starts = np.arange(width) >> np.minimum(np.arange(count), whole)[:, None]
    same = starts[:, :, None] == starts[:, None, :]
    matrices = same & np.triu(np.ones((width, width), bool))
    matrices = matrices.transpose(0, 2, 1) if reverse else matrices
    inside = jnp.matmul(
        values.reshape(count, -1, width), jnp.asarray(matrices, values.dtype),
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    if count > whole:
        totals = inside[whole:, :, 0 if reverse else -1]
        other = _shift(cumulate_in_blocks(totals, reverse=reverse), reverse)
        places = np.arange(size // width)
        places = places[::-1] if reverse else places
        begun = places & ((1 << np.arange(count - whole)[:, None]) - 1) > 0
        inside = inside.at[whole:].add(jnp.where(begun, other, 0)[:, :, None])
    return inside.reshape(count, size)


def _shift(sums, reverse):
    """Returns the sums before each block.

    Subtracting the block's own total instead would cancel.
    """
    ends = [(0, 0)] * (sums.ndim - 1)
    other = sums[..., 1:] if reverse else sums[..., :-1]
    return jnp.pad(other, [*ends, (0, 1) if reverse else (1, 0)])


def _multiply(values, reverse):
    """Multiplies by a triangular matrix of ones."""
    size = values.shape[-1]
    ones = jnp.ones((size, size), values.dtype)
    matrix = jnp.tril(ones) if reverse else jnp.triu(ones)
    return jnp.matmul(values, matrix, precision=lax.Precision.HIGHEST)
