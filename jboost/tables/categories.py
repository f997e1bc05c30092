# SPDX-License-Identifier: Apache-2.0
"""Encodes the categorical features of a model.

In: a matrix whose categorical columns hold integers 0, 1, 2, ..., or NaN for missing.
Out: the same matrix with category codes, the numbers that splits by sets contain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32, UInt32

from jboost.entry.representation import show_fields

Category = str | int | float | bool
WORD = 32  # codes per 32-bit word of a set
_BLOCK_ROWS = 4096  # rows checked at a time, so that they stay in the CPU cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # == of arrays has no single truth value
class Categories:
    """Holds the categorical features of a model.

    Attributes:
      codes: ``codes[g, v] >= 1`` is the code of the value v, an integer in [0, V), of
        feature ``features[g]``; 0 if training did not see v, which then counts as
        missing.
      features: indices of the categorical features, ascending.
      values: the categories that v = 0, 1, ... represent, for features from a data
        frame: first those seen in training, sorted, then the other categories that the
        dtype declares.
    """

    codes: Int32[Array, "G V"] | Int32[np.ndarray, "G V"]
    features: tuple[int, ...] = field(metadata=dict(static=True))
    values: tuple[tuple[Category, ...] | None, ...] | None = field(
        default=None, metadata=dict(static=True)
    )

    def __repr__(self) -> str:
        """Shows the shapes of arrays instead of their contents."""
        return show_fields(self)


def column_values(
    categories: Categories | None, num_features: int
) -> tuple[tuple[Category, ...] | None, ...] | None:
    """Returns the categories of each column, or None for a numeric column.

    Returns None instead of the tuple if no column has named categories.
    """
    if categories is None or categories.values is None:
        return None
    values: list[Any] = [None] * num_features
    for feature, known in zip(categories.features, categories.values, strict=True):
        values[feature] = known
    return tuple(values)


def encode(categories: Categories, matrix: Any) -> Any:
    """Replaces the values in categorical columns by their codes; traceable.

    Values that training did not see, including fractions and negative numbers, become
    NaN (missing). A NumPy matrix stays a NumPy matrix.

    Args:
      categories: the categorical features of the model.
      matrix: numbers [N, F].
    """
    if isinstance(matrix, np.ndarray):
        encoded = matrix.copy()
        encoded[:, list(categories.features)] = _encode(np, categories, matrix)
        return encoded
    features = np.array(categories.features, np.int32)
    return matrix.at[:, features].set(_encode(jnp, categories, matrix))


def _encode(numpy: Any, categories, matrix):
    """Returns the codes of the categorical columns, [N, G]."""
    features = np.array(categories.features, np.int32)
    codes = numpy.asarray(categories.codes)
    column = matrix[:, features]
    known = (column >= 0) & (column < codes.shape[1]) & (column == numpy.floor(column))
    value = numpy.where(known, column, 0).astype(np.int32)
    code = codes[np.arange(len(features))[None, :], value].astype(matrix.dtype)
    missing = numpy.asarray(np.nan, matrix.dtype)
    return numpy.where(known & (code > 0), code, missing)


def goes_left(
    left_codes: UInt32[Array, "*nodes W"], code: Int32[Array, " *nodes"]
) -> Bool[Array, " *nodes"]:
    """Checks whether a code c is in its node's set: bit c % 32 of word c // 32.

    Codes beyond the last bit are not in the set.
    """
    inside = (code >= 0) & (code < WORD * left_codes.shape[-1])
    code = jnp.where(inside, code, 0)
    word = jnp.take_along_axis(left_codes, (code // WORD)[..., None], axis=-1)[..., 0]
    return inside & ((word >> (code % WORD).astype(jnp.uint32)) & 1 == 1)


def check_values(
    matrix: Any,
    indices: tuple[int, ...],
    name: str,
    feature_names: Sequence[str] | None = None,
) -> None:
    """Checks that categorical columns hold integers >= 0, or NaN.

    A traced matrix is taken on trust.
    """
    if isinstance(matrix, Tracer):
        return
    columns = list(indices)
    if isinstance(matrix, jax.Array):  # may be on another device
        matrix, columns = np.asarray(matrix[:, np.array(columns)]), slice(None)
    for first in range(0, len(matrix), _BLOCK_ROWS):
        block = matrix[first : first + _BLOCK_ROWS, columns]
        with np.errstate(invalid="ignore"):
            whole = (block >= 0) & (block == np.floor(block)) & (block < np.inf)
        bad = np.argwhere(~whole & ~np.isnan(block))
        if len(bad):
            row, group = bad[0]
            raise ValueError(
                f"{name} must hold integers 0, 1, 2, ... for categories, NaN where "
                f"missing, in {_describe(indices[group], feature_names)}, got "
                f"{block[row, group]} in row {first + row}"
            )


def _describe(index, feature_names):
    """A column in messages: its index, and its name if it has one."""
    name = "" if feature_names is None else f" ({show(feature_names[index])})"
    return f"column {index}{name}"
