# SPDX-License-Identifier: Apache-2.0
"""Encodes the categorical features of a model.

Columns of integers 0, 1, 2, ... (NaN for missing) become category codes, the numbers
that splits by sets contain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32, UInt32

from jboost.entry.messages import show_fields, warn_user

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

    Values that training did not see, including negative numbers, become NaN (missing).
    A NumPy matrix stays a NumPy matrix.
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
    column = matrix[:, features]
    code = _find_codes(numpy, numpy.asarray(categories.codes), column)
    missing = numpy.asarray(np.nan, matrix.dtype)
    return numpy.where(code > 0, code.astype(matrix.dtype), missing)


def _find_codes(numpy: Any, codes, column):
    """Returns the codes of values [N, G]; 0 for those that training did not see."""
    known = (column >= 0) & (column < codes.shape[1]) & (column == numpy.floor(column))
    value = numpy.where(known, column, 0).astype(np.int32)
    code = codes[np.arange(codes.shape[0])[None, :], value]
    return numpy.where(known, code, 0)


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
    *,
    codes: Any = None,
) -> None:
    """Checks that categorical columns hold integers, or NaN.

    Training refuses negative integers. After it they are categories that training did
    not see; a column of at least two rows that holds only such categories is reported
    in a warning. A traced matrix is taken on trust.

    Args:
      codes: the codes of the model, [G, V]; None in training.
    """
    if isinstance(matrix, Tracer):
        return
    columns, new = list(indices), codes is None
    if isinstance(matrix, jax.Array):  # may be on another device
        matrix, columns = np.asarray(matrix[:, np.array(columns)]), slice(None)
    # Categorical columns without a coded value so far, and one value of each.
    compared = not new and not isinstance(codes, Tracer) and len(matrix) > 1
    if compared:
        codes = np.asarray(codes)
        compared = not _has_codes(codes, matrix[0, columns].tolist())  # the usual case
    unseen: Any = np.full(len(indices), compared)
    example: Any = np.full(len(indices), np.nan)
    for first in range(0, len(matrix), _BLOCK_ROWS):
        block = matrix[first : first + _BLOCK_ROWS, columns]
        with np.errstate(invalid="ignore"):
            whole = (block == np.floor(block)) & (block < np.inf)
            whole &= (block >= 0) if new else (block > -np.inf)
        bad = np.argwhere(~whole & ~np.isnan(block))
        if len(bad):
            row, group = bad[0]
            hint = "; replace codes of missing values by NaN" if new else ""
            raise ValueError(
                f"{name} must hold integers 0, 1, 2, ... for categories, NaN where "
                f"missing, in {describe_column(indices[group], feature_names)}, got "
                f"{block[row, group]} in row {first + row}{hint}"
            )
        if not compared:
            continue
        unseen = unseen & ~np.any(_find_codes(np, codes, block), axis=0)
        compared = bool(unseen.any())
        if compared:
            example = np.fmin(example, np.fmin.reduce(block, axis=0))
    for group in np.flatnonzero(unseen & ~np.isnan(example)) if compared else ():
        if not np.any(codes[group]):  # from another library, without splits on it
            continue
        column = f"{describe_column(indices[group], feature_names)} of {name}"
        warn_of_unseen(column, int(example[group]))


def _has_codes(codes, row):
    """Checks whether all values of a row have codes; NumPy takes longer for one."""
    size = codes.shape[1]
    return all(0 <= v < size and codes[g, int(v)] > 0 for g, v in enumerate(row))


def warn_of_unseen(column: str, value: Category) -> None:
    """Warns of a column that holds no category of the model."""
    warn_user(
        f"{column} holds no category that the model knows, but others, such as "
        f"{value!r}, which are treated as missing"
    )


def describe_column(index: int, feature_names: Sequence[str] | None = None) -> str:
    """Returns a column in messages: its index, and its name if it has one."""
    name = "" if feature_names is None else f" ({feature_names[index]!r})"
    return f"column {index}{name}"
