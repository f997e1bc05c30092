# SPDX-License-Identifier: Apache-2.0
"""Binning on the CPU: a matrix of floats to cuts, and to codes in two layouts.

In: rows of float32 in host memory, or an array inside a program. Out: the distinct
values around each threshold; codes by feature [F, N], and in rows as the sums over
rows take them (see ``code_operands.packed_shape``).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int32, Shaped, UInt8, UInt16

from jboost.kernels import library
from jboost.kernels.code_operands import packed_shape

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
    values = jax.ShapeDtypeStruct((num_features, max(1, max_bins - 2)), np.float32)
    counts = jax.ShapeDtypeStruct((num_features,), np.int32)
    results = values, values, counts
    return library.call_on_host("find_cuts", results, matrix, words, max_bins=max_bins)


def find_codes(
    thresholds: Float[Array, "F T"], matrix: Float[Array, "N F"]
) -> UInt8[Array, "N F"] | UInt16[Array, "N F"]:
    """Codes as ``apply_bins`` gives them, in a compiled program."""
    num_rows, num_features = matrix.shape
    results = _results(thresholds, (0, num_rows), (1, num_rows, num_features))
    thresholds = jnp.asarray(thresholds, jnp.float32)
    return library.call("find_codes", results, matrix, thresholds)[1][0]


def find_codes_on_host(
    thresholds: Float[np.ndarray, "F T"], matrix: Float[np.ndarray, "N F"]
) -> UInt8[np.ndarray, "N F"] | UInt16[np.ndarray, "N F"]:
    """Runs ``find_codes`` eagerly: no program depends on the number of rows."""
    num_rows, num_features = matrix.shape
    results = _results(thresholds, (0, num_rows), (1, num_rows, num_features))
    found = library.call_on_host("find_codes", results, matrix, thresholds)
    return found[1][0]


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
    return library.call_on_host("find_codes", results, matrix, thresholds)


def propose(
    columns: Shaped[Array, "F N"],
    order: Int32[Array, "F N"],
    mass: Int32[Array, " N"],
    *,
    num_bins: int,
) -> tuple[UInt8[Array, "F N"] | UInt16[Array, "F N"], Int32[Array, "F B"]]:
    """Cuts values into bins of equal mass; see `jboost.trees.candidates.propose`."""
    codes = jax.ShapeDtypeStruct(columns.shape, code_dtype(num_bins))
    highest = jax.ShapeDtypeStruct((columns.shape[0], num_bins), jnp.int32)
    return library.call("propose", (codes, highest), columns, order, mass)


def _results(thresholds, columns_shape, packed_shape):
    dtype = code_dtype(thresholds.shape[1] + 1)
    shapes = columns_shape, packed_shape
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
