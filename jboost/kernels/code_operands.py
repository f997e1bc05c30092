# SPDX-License-Identifier: Apache-2.0
"""Codes as operands of the CPU kernels, dense or sparse.

In: codes by feature. Out: the same codes by row, which the sums over rows read.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, UInt8, UInt16

from jboost.kernels.library import call


class CodeOperands(NamedTuple):
    """Codes as operands of the kernels.

    Attributes:
      codes: codes by feature [F, N], or the codes of the entries of a sparse matrix
        [1, E].
      packed: codes by row from :func:`pack`, which the sums over rows read; ``codes``
        if sparse.
      entries: starts, rows and absent codes of a sparse matrix; empty if dense.
      shape: (F, N).
    """

    codes: UInt8[Array, "_ _"] | UInt16[Array, "_ _"]
    packed: Array | None
    entries: tuple[Array, ...]
    shape: tuple[int, int]


def packed_shape(num_features: int, num_rows: int) -> tuple[int, int, int]:
    """Returns the shape [blocks, N, width] of packed codes.

    Up to 32 features lie side by side in rows of 8, 16 or 32 codes; more are cut into
    blocks of 16. Codes beyond the last feature are 0.
    """
    width = 16 if num_features > 32 else max(8, 1 << (num_features - 1).bit_length())
    return -(-num_features // width), num_rows, width


def pack(columns: UInt8[Array, "F N"] | UInt16[Array, "F N"], num_bins: int) -> Array:
    """Arranges codes by row: [blocks, N, width], zeros at the end.

    A code beyond the bins counts as the last one, because the sums are addressed by it.
    """
    result = jax.ShapeDtypeStruct(packed_shape(*columns.shape), columns.dtype)
    return call("pack", result, columns, num_bins=num_bins)
