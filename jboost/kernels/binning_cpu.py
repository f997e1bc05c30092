# SPDX-License-Identifier: Apache-2.0
"""Binning on the CPU: a matrix of floats to cuts, and to codes in two layouts.

Codes lie by feature [F, N], and in rows as the sums over rows take them (see
``packed_shape``); other kernels take both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int32, UInt8, UInt16

from jboost.kernels import calls
from jboost.kernels.calls import floats, ints

MOST_BINS = 65536  # limit of the kernels' codes


def code_dtype(num_bins: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """Returns the narrowest type that holds the codes."""
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
    """Finds neighboring values with a threshold between them, and counts them."""
    words = np.zeros((0, 2), np.uint32)  # two of them hold a float64
    if weight is not None:
        words = np.ascontiguousarray(weight).view(np.uint32).reshape(-1, 2)
    num_features = matrix.shape[1]
    values = floats(num_features, max(1, max_bins - 2))
    results = values, values, ints(num_features)
    return calls.call_on_host("find_cuts", results, matrix, words, max_bins=max_bins)


def find_codes(
    thresholds: Float[Array, "F T"] | Float[np.ndarray, "F T"],
    matrix: Float[Array, "N F"] | Float[np.ndarray, "N F"],
    run: Callable[..., Any] = calls.call,
) -> Any:
    """Returns the codes [N, F] of ``apply_bins``.

    With ``run=call_on_host`` no program depends on the number of rows.
    """
    num_rows, num_features = matrix.shape
    results = _results(thresholds, (0, num_rows), (1, num_rows, num_features))
    thresholds = thresholds.astype(np.float32)
    return run("find_codes", results, matrix, thresholds)[1][0]


def find_columns(
    thresholds: Float[np.ndarray, "F T"],
    matrix: Float[np.ndarray, "N F"],
    num_rows: int,
) -> tuple[
    UInt8[np.ndarray, "F M"] | UInt16[np.ndarray, "F M"],
    UInt8[np.ndarray, "blocks M width"] | UInt16[np.ndarray, "blocks M width"],
]:
    """Codes by feature and in rows.

    Rows beyond those of the matrix, up to ``num_rows``, repeat row 0.
    """
    num_features = thresholds.shape[0]
    shape = packed_shape(num_features, num_rows)
    results = _results(thresholds, (num_features, num_rows), shape)
    return calls.call_on_host("find_codes", results, matrix, thresholds)


def _results(thresholds, columns_shape, packed_shape):
    dtype = code_dtype(thresholds.shape[1] + 1)
    shapes = columns_shape, packed_shape
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


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
    return calls.call("pack", result, columns, num_bins=num_bins)
