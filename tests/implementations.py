# SPDX-License-Identifier: Apache-2.0
"""Which implementations run on the device that tests use."""

import pytest

import jboost as jb

# Plain XLA, and the kernels of the device, if there are any.
IMPLEMENTATIONS = tuple(dict.fromkeys(("xla", jb.implementations()["training"])))
needs_cpu_kernels = pytest.mark.skipif(
    "cpu" not in IMPLEMENTATIONS, reason="the CPU kernels do not run here"
)
