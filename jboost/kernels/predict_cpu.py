# SPDX-License-Identifier: Apache-2.0
"""Prediction by the CPU kernels of native/predict.h.

In: the rows of a matrix as flat memory, trees on raw thresholds. Out: scores, scores by
round, leaves; the same to the bit as those of ``jboost.model.scores`` in plain XLA.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped, UInt32

from jboost.kernels.library import call


class Trees(NamedTuple):
    """R rounds of S trees; see :class:`jboost.Ensemble`.

    Attributes:
      left_codes: the codes that go left, as bits; None if no feature is categorical.
      left_child: the left child of each node; None for trees in heap order.
    """

    feature: Int32[Array, "R S I"]
    threshold: Float[Array, "R S I"]
    missing_left: Bool[Array, "R S I"]
    left_codes: UInt32[Array, "R S I W"] | None = None
    left_child: Int32[Array, "R S I"] | None = None

    def of_scores(self, num_scores: int) -> "Trees":
        """Returns a tree for each score; one that all scores share is repeated."""

        def repeat(array):
            return jnp.broadcast_to(array, (len(array), num_scores, *array.shape[2:]))

        return jax.tree.map(repeat, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A matrix [N, F] as flat memory.

    Attributes:
      values: the numbers of the matrix; a NumPy array is the memory of the caller.
      by_column: whether the columns lie one after the other; only in NumPy's memory.
      codes: the codes of the categories in the columns ``coded_features``; see
        :class:`jboost.tables.categories.Categories`.
    """

    values: Float[Array, " M"] | Float[np.ndarray, " M"]
    # An int, or a dimension without a size where a program is exported.
    num_rows: Any = field(metadata=dict(static=True))
    num_features: int = field(metadata=dict(static=True))
    by_column: bool = field(default=False, metadata=dict(static=True))
    # Integers; derivatives put something else in their place.
    codes: Shaped[Array, "G V"] | Shaped[np.ndarray, "G V"] | None = None
    coded_features: tuple[int, ...] = field(default=(), metadata=dict(static=True))

    def matrix(self) -> Float[Array, "N F"] | Float[np.ndarray, "N F"]:
        """Returns the matrix, with categories as they came."""
        if self.by_column:
            return self.values.reshape(self.num_features, self.num_rows).T
        return self.values.reshape(self.num_rows, self.num_features)


def as_rows(matrix: Float[Array, "N F"]) -> Rows:
    """Returns a JAX array as rows."""
    num_rows, num_features = matrix.shape
    return Rows(matrix.reshape(-1), num_rows, num_features)


def predict(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"] | Float[np.ndarray, "R K L"],
    init_score: Float[Array, " K"] | Float[np.ndarray, " K"],
    *,
    max_depth: int,
) -> Float[Array, "N K"] | Float[np.ndarray, "N K"]:
    """Computes the score of each row."""
    shape = (rows.num_rows, leaf_value.shape[1])
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _call("predict", result, max_depth, rows, trees, leaf_value, init_score)


def staged_predict(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"] | Float[np.ndarray, "R K L"],
    init_score: Float[Array, " K"] | Float[np.ndarray, " K"],
    *,
    max_depth: int,
) -> Float[Array, "R N K"] | Float[np.ndarray, "R N K"]:
    """Computes the scores after each round."""
    num_rounds, num_scores = leaf_value.shape[:2]
    shape = (num_rounds, rows.num_rows, num_scores)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    values = (leaf_value, init_score)
    return _call("staged_predict", result, max_depth, rows, trees, *values)


def leaf_indices(
    rows: Rows, trees: Trees, *, max_depth: int
) -> Int32[Array, "N R S"] | Int32[np.ndarray, "N R S"]:
    """Finds the leaf of each row in each tree."""
    shape = (rows.num_rows, *trees.feature.shape[:2])
    result = jax.ShapeDtypeStruct(shape, jnp.int32)
    return _call("leaf_indices", result, max_depth, rows, trees)


def list_operands(rows: Rows, trees: Trees) -> tuple[ArrayLike, ...]:
    """Lists rows and trees as operands of a kernel; missing parts are empty arrays."""
    codes, left_codes, left_child = rows.codes, trees.left_codes, trees.left_child
    return (
        rows.values,
        np.zeros((0, 0), np.int32) if codes is None else codes,
        np.array(rows.coded_features, np.int32),
        *trees[:3],
        np.zeros(0, np.uint32) if left_codes is None else left_codes,
        np.zeros(0, np.int32) if left_child is None else left_child,
    )


def _call(name, result, max_depth, rows, trees, *values):
    return call(
        name,
        result,
        *list_operands(rows, trees),
        *values,
        num_features=rows.num_features,
        by_column=int(rows.by_column),
        max_depth=max_depth,
    )
