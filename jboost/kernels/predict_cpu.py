# SPDX-License-Identifier: Apache-2.0
"""Prediction by the CPU kernels of native/predict.h.

In: the rows of a matrix as flat memory, trees on raw thresholds. Out: scores, scores by
round, leaves; the same to the bit as those of ``jboost.ensemble`` in plain XLA.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped, UInt32

from jboost.kernels.library import call, count_unaligned


class Trees(NamedTuple):
    """R rounds of K trees; see :class:`jboost.Ensemble`.

    Attributes:
      left_codes: None where no feature is categorical.
      left_child: None where the trees are in heap order.
    """

    feature: Int32[Array, "R K I"]
    threshold: Float[Array, "R K I"]
    missing_left: Bool[Array, "R K I"]
    left_codes: UInt32[Array, "R K I W"] | None = None
    left_child: Int32[Array, "R K I"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A matrix [N, F] as flat memory.

    Attributes:
      head: its first numbers, copied, so that the others begin at an aligned address.
      body: the others, possibly in memory of the caller's.
      by_column: whether the columns lie one after the other.
      codes: of the categories in the columns ``coded_features``; see
        :class:`jboost.categories.Categories`.
    """

    head: Float[Array, " H"] | Float[np.ndarray, " H"]
    body: Float[Array, " M"] | Float[np.ndarray, " M"]
    # An int, or a dimension without a size where a program is exported.
    num_rows: Any = field(metadata=dict(static=True))
    num_features: int = field(metadata=dict(static=True))
    by_column: bool = field(default=False, metadata=dict(static=True))
    # Integers; derivatives put something else in their place.
    codes: Shaped[Array, "G V"] | Shaped[np.ndarray, "G V"] | None = None
    coded_features: tuple[int, ...] = field(default=(), metadata=dict(static=True))

    def matrix(self) -> Float[Array, "N F"]:
        """The matrix, categories as they came."""
        flat = jnp.concatenate([self.head, self.body])
        if self.by_column:
            return flat.reshape(self.num_features, self.num_rows).T
        return flat.reshape(self.num_rows, self.num_features)


def as_rows(matrix: Float[Array, "N F"]) -> Rows:
    """An array of JAX's, which is aligned."""
    num_rows, num_features = matrix.shape
    return Rows(jnp.zeros(0, jnp.float32), matrix.reshape(-1), num_rows, num_features)


def borrow_rows(matrix: Float[np.ndarray, "N F"]) -> Rows:
    """Rows in the memory of a NumPy array, if there are no gaps in it.

    Until what is computed from them is ready, the array must not be written to.
    """
    by_column = matrix.flags.f_contiguous and not matrix.flags.c_contiguous
    flat = np.require(matrix.T if by_column else matrix, requirements=["C", "A"])
    flat, (num_rows, num_features) = flat.reshape(-1), matrix.shape
    first = count_unaligned(flat)
    return Rows(flat[:first].copy(), flat[first:], num_rows, num_features, by_column)


def predict(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"],
    init_score: Float[Array, " K"],
    *,
    max_depth: int,
) -> Float[Array, "N K"]:
    """The score of each row."""
    shape = (rows.num_rows, trees.feature.shape[1])
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _call("predict", result, max_depth, rows, trees, leaf_value, init_score)


def staged_predict(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"],
    init_score: Float[Array, " K"],
    *,
    max_depth: int,
) -> Float[Array, "R N K"]:
    """The scores after each round."""
    num_rounds, num_scores = trees.feature.shape[:2]
    shape = (num_rounds, rows.num_rows, num_scores)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    values = (leaf_value, init_score)
    return _call("staged_predict", result, max_depth, rows, trees, *values)


def leaf_indices(rows: Rows, trees: Trees, *, max_depth: int) -> Int32[Array, "N R K"]:
    """The leaf of each row in each tree."""
    shape = (rows.num_rows, *trees.feature.shape[:2])
    result = jax.ShapeDtypeStruct(shape, jnp.int32)
    return _call("leaf_indices", result, max_depth, rows, trees)


def list_operands(rows: Rows, trees: Trees) -> tuple[ArrayLike, ...]:
    """Rows and trees as kernels take them: what is not there is empty."""
    codes, left_codes, left_child = rows.codes, trees.left_codes, trees.left_child
    return (
        rows.head,
        rows.body,
        jnp.zeros((0, 0), jnp.int32) if codes is None else codes,
        np.array(rows.coded_features, np.int32),
        *trees[:3],
        jnp.zeros(0, jnp.uint32) if left_codes is None else left_codes,
        jnp.zeros(0, jnp.int32) if left_child is None else left_child,
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
