# SPDX-License-Identifier: Apache-2.0
"""Shapley values of trees by the CPU kernel of native/shap.h.

In: the rows of a matrix as flat memory, trees on raw thresholds, the cover of their
leaves. Out: contributions of features, or of pairs of them, to each score; up to
rounding, those of ``jboost.explanation.shap`` in plain XLA.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.kernels.library import call, call_on_host
from jboost.kernels.predict_cpu import Rows, Trees, list_operands

DEEPEST = 255  # kMaxShapDepth


def borrow_rows(matrix: Float[np.ndarray, "N F"]) -> Rows:
    """Rows in the memory of a NumPy array, if there are no gaps in it."""
    by_column = matrix.flags.f_contiguous and not matrix.flags.c_contiguous
    flat = np.require(matrix.T if by_column else matrix, requirements=["C", "A"])
    num_rows, num_features = matrix.shape
    return Rows(flat.reshape(-1), num_rows, num_features, by_column)


def explain(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"] | Float[np.ndarray, "R K L"],
    cover: Float[Array, "R K L"] | Float[np.ndarray, "R K L"],
    place: Float[np.ndarray, " P"],
    weight: Float[np.ndarray, " P"],
    *,
    max_depth: int,
    pairs: bool,
) -> Float[Array, "N *F K"] | Float[np.ndarray, "N *F K"]:
    """Returns Shapley values [N, F, K], or with ``pairs`` interactions [N, F, F, K].

    ``place`` and ``weight`` are the points of a quadrature on [0, 1].
    """
    num_features, num_scores = rows.num_features, leaf_value.shape[1]
    features = (num_features,) * (2 if pairs else 1)
    # Rows in NumPy's memory are looked at at once, others by a compiled program.
    run = call_on_host if isinstance(rows.values, np.ndarray) else call
    return run(
        "shap",
        jax.ShapeDtypeStruct((rows.num_rows, *features, num_scores), jnp.float32),
        *list_operands(rows, trees),
        leaf_value,
        cover,
        place,
        weight,
        num_features=num_features,
        by_column=int(rows.by_column),
        max_depth=max_depth,
        pairs=int(pairs),
    )
