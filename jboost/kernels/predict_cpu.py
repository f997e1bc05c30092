# SPDX-License-Identifier: Apache-2.0
"""Prediction by the CPU kernels of native/predict.h.

In: the rows of a matrix as flat memory, trees on raw thresholds. Out: scores, scores by
round, leaves; the same to the bit as those of ``jboost.ensemble`` in plain XLA.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

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

    @property
    def plain(self) -> bool:
        """Whether all splits are numeric, and all trees in heap order."""
        return self.left_codes is None and self.left_child is None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A matrix [N, F] as flat memory.

    Attributes:
      head: its first numbers, copied, so that the others begin at an aligned address.
      body: the others, possibly in memory of the caller's.
      by_column: whether the columns lie one after the other.
    """

    head: Float[Array, " H"] | Float[np.ndarray, " H"]
    body: Float[Array, " M"] | Float[np.ndarray, " M"]
    num_rows: int = field(metadata=dict(static=True))
    num_features: int = field(metadata=dict(static=True))
    by_column: bool = field(default=False, metadata=dict(static=True))

    def matrix(self) -> Float[Array, "N F"]:
        """The matrix."""
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
) -> Float[Array, "N K"]:
    """The score of each row."""
    shape = (rows.num_rows, trees.feature.shape[1])
    return _call(
        "predict", shape, jnp.float32, rows, *trees[:3], leaf_value, init_score
    )


def staged_predict(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"],
    init_score: Float[Array, " K"],
) -> Float[Array, "R N K"]:
    """The scores after each round."""
    num_rounds, num_scores = trees.feature.shape[:2]
    shape = (num_rounds, rows.num_rows, num_scores)
    operands = (*trees[:3], leaf_value, init_score)
    return _call("staged_predict", shape, jnp.float32, rows, *operands)


def leaf_indices(rows: Rows, trees: Trees) -> Int32[Array, "N R K"]:
    """The leaf of each row in each tree."""
    shape = (rows.num_rows, *trees.feature.shape[:2])
    return _call("leaf_indices", shape, jnp.int32, rows, *trees[:3])


def _call(name, shape, dtype, rows, *operands):
    operands = (rows.head, rows.body, *operands)
    return call(
        name,
        jax.ShapeDtypeStruct(shape, dtype),
        *operands,
        num_features=rows.num_features,
        by_column=int(rows.by_column),
    )
