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
_WHOLE = 4  # BLOCK = 2^4: from this level on no sum starts inside a block


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


def cumulate_levels(
    values: Float[Array, "K N"], *, reverse: bool = False
) -> Float[Array, " N"]:
    """Returns the sum of K cumulative sums, of which the k-th starts every 2^k places.

    N must be a power of two, at least 2^(K - 1).
    """
    rows, matrices = _divide(values, reverse)
    total = _add_rows(jnp.matmul(rows, matrices, precision=lax.Precision.HIGHEST))
    if len(values) > _WHOLE:
        before = _add_rows(_sums_before(rows, matrices, reverse))
        total = (total.reshape(-1, BLOCK) + before[:, None]).reshape(-1)
    return total


def _add_rows(values):
    """Returns the sum over the first axis; on CPU ``jnp.sum`` is many times slower."""
    rows = values.reshape(len(values), -1)
    ones = jnp.ones(len(values), values.dtype)
    return jnp.matmul(ones, rows, precision=lax.Precision.HIGHEST)


def _divide(values, reverse):
    """Returns rows of a block [K, N / BLOCK, BLOCK], and matrices that sum them."""
    count, size = values.shape
    width = min(size, BLOCK)
    starts = np.arange(width) >> np.minimum(np.arange(count), _WHOLE)[:, None]
    same = starts[:, :, None] == starts[:, None, :]
    matrices = same & np.triu(np.ones((width, width), bool))
    matrices = matrices.transpose(0, 2, 1) if reverse else matrices
    return values.reshape(count, -1, width), jnp.asarray(matrices, values.dtype)


def _sums_before(rows, matrices, reverse):
    """Returns for each sum that never starts inside a block what comes before each."""
    totals = jnp.einsum(
        "kbp,kp->kb", rows[_WHOLE:], matrices[_WHOLE:, :, 0 if reverse else -1],
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    count, size = totals.shape
    inner, triangles = _divide(totals, reverse)
    sums = jnp.matmul(inner, triangles, precision=lax.Precision.HIGHEST)
    if count > _WHOLE:
        before = _sums_before(inner, triangles, reverse)[:, :, None]
        sums = jnp.concatenate([sums[:_WHOLE], sums[_WHOLE:] + before])
    places = np.arange(size)[::-1] if reverse else np.arange(size)
    begun = places & ((1 << np.arange(count)[:, None]) - 1) > 0
    return jnp.where(begun, _shift(sums.reshape(count, size), reverse), 0)


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
