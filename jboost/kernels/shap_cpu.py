# SPDX-License-Identifier: Apache-2.0
"""Shapley values of trees by the CPU kernel of native/shap.h.

In: the rows of a matrix as flat memory, trees on raw thresholds, the cover of their
leaves. Out: what features, or pairs of them, add to each score; those of
``jboost.explanation.attributions`` in plain XLA but for rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.kernels.predict_cpu import Rows, Trees, choose_call, list_operands

DEEPEST = 255  # kMaxShapDepth


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
    """Values [N, F, K], or with ``pairs`` interactions [N, F, F, K].

    ``place`` and ``weight`` are the points of a quadrature on [0, 1].
    """
    num_features, num_scores = rows.num_features, leaf_value.shape[1]
    features = (num_features,) * (2 if pairs else 1)
    return choose_call(rows)(
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
