# SPDX-License-Identifier: Apache-2.0
"""Which implementations run on the device that tests use, and what it promises."""

import jax
import numpy as np
import pytest

import jboost as jb

# Plain XLA, and the kernels of the device, if there are any.
IMPLEMENTATIONS = tuple(dict.fromkeys(("xla", jb.implementations()["training"])))
needs_cpu_kernels = pytest.mark.skipif(
    "cpu" not in IMPLEMENTATIONS, reason="the CPU kernels do not run here"
)


def assert_same_values(found, expected):
    """Compares floats of two programs: bit for bit on a CPU.

    On a GPU, XLA rounds a division in the last bit as each program has it compiled;
    see "Same bits" in docs/gpus.md.
    """
    if jax.default_backend() == "gpu":
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)
