# SPDX-License-Identifier: Apache-2.0
"""Binning on the CPU: a matrix of floats to cuts, and to codes in two layouts.

In: rows of float32 in host memory, or an array inside a program. Out: the distinct
values around each threshold; codes by feature [F, N], and in rows as the sums over
rows take them (see ``grow_cpu.packed_shape``).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int32, UInt8, UInt16

from jboost.kernels import library
from jboost.kernels.grow_cpu import packed_shape

MOST_BINS = 65536  # for codes that the kernels know
_SMALL = 1 << 20  # bytes that are copied rather than taken from wherever they lie


class Rows(NamedTuple):
    """A matrix whose first rows lie apart, so that the rest begins at such an address.

    Attributes:
      head: the first rows, if any.
      body: all values but the first ``start``, which are in the head.
      start: below a few rows' length.
    """

    head: Float[Array, "R F"] | Float[np.ndarray, "R F"]
    body: Float[Array, " size"] | Float[np.ndarray, " size"]
    start: int

    @property
    def num_rows(self) -> int:
        """N."""
        return (self.start + self.body.shape[0]) // self.head.shape[1]


def make_rows(matrix: Float32[Array, "N F"] | Float32[np.ndarray, "N F"]) -> Rows:
    """Splits a matrix in host memory so that XLA need not copy it."""
    start = 0
    if isinstance(matrix, np.ndarray):
        matrix = np.ascontiguousarray(matrix)
        if matrix.nbytes >= _SMALL and matrix.flags.aligned:
            start = library.count_unaligned(matrix)
    head_rows = -(-start // matrix.shape[1])
    return Rows(matrix[:head_rows], matrix.reshape(-1)[start:], start)


def code_dtype(num_bins: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """The narrowest type that holds the codes."""
    if num_bins > MOST_BINS:
        return np.uint32
    return np.uint8 if num_bins <= 256 else np.uint16


def find_cuts(
    matrix: Float32[np.ndarray, "N F"],
    weight: Float64[np.ndarray, " N"] | None,
    max_bins: int,
) -> tuple[
    Float32[np.ndarray, "F C"], Float32[np.ndarray, "F C"], Int32[np.ndarray, " F"]
]:
    """Neighbouring distinct values with a threshold between them, and how many."""
    rows = make_rows(matrix)
    words = np.zeros((0, 2), np.uint32)  # two of them hold a float64
    if weight is not None:
        words = np.ascontiguousarray(weight).view(np.uint32).reshape(-1, 2)
    found = _find_cuts(rows.head, rows.body, words, start=rows.start, max_bins=max_bins)
    lower, upper, num_cuts = (np.asarray(each) for each in found)
    return lower, upper, num_cuts


@functools.partial(jax.jit, static_argnames=("start", "max_bins"))
def _find_cuts(head, body, words, *, start, max_bins):
    num_features = head.shape[1]
    values = jax.ShapeDtypeStruct((num_features, max(1, max_bins - 2)), np.float32)
    return library.call(
        "find_cuts",
        (values, values, jax.ShapeDtypeStruct((num_features,), np.int32)),
        head,
        body,
        words,
        start=start,
        max_bins=max_bins,
    )


def find_codes(
    thresholds: Float[Array, "F T"], matrix: Float[Array, "N F"]
) -> UInt8[Array, "N F"] | UInt16[Array, "N F"]:
    """Codes as ``apply_bins`` gives them."""
    num_rows, num_features = matrix.shape
    _, codes = _call(
        thresholds, make_rows(matrix), (0, num_rows), (1, num_rows, num_features)
    )
    return codes[0]


def find_columns(
    thresholds: Float[Array, "F T"] | Float[np.ndarray, "F T"],
    rows: Rows,
    num_rows: int | None = None,
    *,
    packed: bool = True,
) -> tuple[
    UInt8[Array, "F M"] | UInt16[Array, "F M"],
    UInt8[Array, "blocks M width"] | UInt16[Array, "blocks M width"] | None,
]:
    """Codes by feature and, if asked for, in rows.

    Rows beyond those of the matrix, up to ``num_rows``, repeat row 0.
    """
    num_features = thresholds.shape[0]
    num_rows = rows.num_rows if num_rows is None else num_rows
    shape = packed_shape(num_features, num_rows)
    shape = shape if packed else (0, num_rows, 1)
    columns, blocks = _call_compiled(
        thresholds,
        rows.head,
        rows.body,
        start=rows.start,
        columns_shape=(num_features, num_rows),
        packed_shape=shape,
    )
    return columns, blocks if packed else None


def _call(thresholds, rows, columns_shape, packed_shape):
    dtype = code_dtype(thresholds.shape[1] + 1)
    return library.call(
        "find_codes",
        (
            jax.ShapeDtypeStruct(columns_shape, dtype),
            jax.ShapeDtypeStruct(packed_shape, dtype),
        ),
        rows.head,
        rows.body,
        jnp.asarray(thresholds, jnp.float32),
        start=rows.start,
    )


@functools.partial(jax.jit, static_argnames=("start", "columns_shape", "packed_shape"))
def _call_compiled(thresholds, head, body, *, start, columns_shape, packed_shape):
    return _call(thresholds, Rows(head, body, start), columns_shape, packed_shape)
