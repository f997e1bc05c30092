# SPDX-License-Identifier: Apache-2.0
"""Runs the tests strictly: no silent promotion, and annotated shapes are checked."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Installed before jboost is imported. The other modules are doors: they check their
# arguments themselves, and the tests look at what they say.
INNER = (
    "candidates", "chunks", "curvature", "histogram", "initial",
    "kernels", "least_squares", "leaves", "levels", "minimum", "padding", "rounds",
    "sampling", "sorted_growth", "splitting", "tracing", "tree",
)  # fmt: skip
install_import_hook([f"jboost.{name}" for name in INNER], "beartype.beartype")
