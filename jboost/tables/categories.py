# SPDX-License-Identifier: Apache-2.0
"""Categorical features: which they are, and the codes of their categories.

In: a matrix whose categorical columns hold integers 0, 1, 2, ..., NaN where missing.
Out: the same with codes in their place, which the trees' sets of categories speak of.
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
WORD = 32  # codes in one word of a set
_BLOCK_ROWS = 4096  # checked at a time, so that they stay in the cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # arrays have no one truth value
class Categories:
    """The categorical features of a model.

    Attributes:
      codes: of feature ``features[g]``, value v (an integer in [0, V)) has the code
        ``codes[g, v] >= 1``; 0 where training did not see it, which is then missing.
      features: their places, ascending.
      values: the categories that v = 0, 1, ... of each feature stand for, where they
        came with a data frame: those of training, sorted, then those that its dtype
        declared besides.
    """

    codes: Int32[Array, "G V"] | Int32[np.ndarray, "G V"]
    features: tuple[int, ...] = field(metadata=dict(static=True))
    values: tuple[tuple[Category, ...] | None, ...] | None = field(
        default=None, metadata=dict(static=True)
    )

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


def column_values(
    categories: Categories | None, num_features: int
) -> tuple[tuple[Category, ...] | None, ...] | None:
    """Of each column the categories that 0, 1, 2, ... stand for, None for numbers.

    None instead of the tuple where no column has such.
    """
    if categories is None or categories.values is None:
        return None
    values: list[Any] = [None] * num_features
    for place, known in zip(categories.features, categories.values, strict=True):
        values[place] = known
    return tuple(values)


def encode(categories: Categories, matrix: Any) -> Any:
    """The matrix with codes in its categorical columns; traceable.

    What is no value of a category that training saw (fractions and negative numbers,
    too) becomes NaN, as if it were missing. A NumPy matrix stays one.

    Args:
      categories: of the model.
      matrix: numbers [N, F].
    """
    if isinstance(matrix, np.ndarray):
        encoded = matrix.copy()
        encoded[:, list(categories.features)] = _encode(np, categories, matrix)
        return encoded
    places = np.array(categories.features, np.int32)
    return matrix.at[:, places].set(_encode(jnp, categories, matrix))


def _encode(numpy: Any, categories, matrix):
    """The categorical columns, as codes."""
    places = np.array(categories.features, np.int32)
    codes = numpy.asarray(categories.codes)
    column = matrix[:, places]
    known = (column >= 0) & (column < codes.shape[1]) & (column == numpy.floor(column))
    value = numpy.where(known, column, 0).astype(np.int32)
    code = codes[np.arange(len(places))[None, :], value].astype(matrix.dtype)
    missing = numpy.asarray(np.nan, matrix.dtype)
    return numpy.where(known & (code > 0), code, missing)


def goes_left(
    left_codes: UInt32[Array, "*nodes W"], code: Int32[Array, " *nodes"]
) -> Bool[Array, " *nodes"]:
    """Whether a code is in its node's set: bit c % 32 of word c // 32.

    Codes that the set has no bit for are not.
    """
    inside = (code >= 0) & (code < WORD * left_codes.shape[-1])
    code = jnp.where(inside, code, 0)
    word = jnp.take_along_axis(left_codes, (code // WORD)[..., None], axis=-1)[..., 0]
    return inside & ((word >> (code % WORD).astype(jnp.uint32)) & 1 == 1)


def check_values(
    matrix: Any,
    places: tuple[int, ...],
    name: str,
    feature_names: Sequence[str] | None = None,
) -> None:
    """Checks that categorical columns hold integers >= 0, or NaN.

    A traced matrix is taken on trust.
    """
    if isinstance(matrix, Tracer):
        return
    columns = list(places)
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
                f"missing, in {_describe(places[group], feature_names)}, got "
                f"{block[row, group]} in row {first + row}"
            )


def _describe(place, feature_names):
    """A column in messages: its place, and its name where there is one."""
    name = "" if feature_names is None else f" ({feature_names[place]!r})"
    return f"column {place}{name}"
