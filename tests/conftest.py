# SPDX-License-Identifier: Apache-2.0
"""Runs the tests strictly: no silent promotion, and annotated shapes are checked."""

import os
import shutil
import tempfile

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Installed before jboost is imported. The other modules are doors: they check their
# arguments themselves, and the tests look at what they say.
INNER = (
    "candidates", "categories", "category_codes", "category_splits", "chunks",
    "curvature", "histogram", "initial", "kernels", "least_squares", "leaves",
    "levels", "minimum", "padding", "reports", "rounds", "sampling", "sorted_growth",
    "splitting", "tracing", "tree",
)  # fmt: skip
install_import_hook([f"jboost.{name}" for name in INNER], "beartype.beartype")


def pytest_configure(config):
    """The processes that share the tests share what they compile, for this run.

    Where JAX is told to keep programs for longer, it does.
    """
    kept = "JAX_COMPILATION_CACHE_DIR" in os.environ
    if not kept and not hasattr(config, "workerinput"):
        config.programs = tempfile.mkdtemp(prefix="jboost-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.programs
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"


def pytest_unconfigure(config):
    """Removes it."""
    if hasattr(config, "programs"):
        shutil.rmtree(config.programs, ignore_errors=True)
