# SPDX-License-Identifier: Apache-2.0
"""Which implementations and instruction sets run on the device that tests use."""

import pytest

import jboost as jb
from jboost.kernels import calls

# Plain XLA, and the kernels of the device, if there are any.
IMPLEMENTATIONS = tuple(dict.fromkeys(("xla", jb.implementations()["training"])))
needs_cpu_kernels = pytest.mark.skipif(
    "cpu" not in IMPLEMENTATIONS, reason="the CPU kernels do not run here"
)


def each_isa():
    """Yields each instruction set that this processor has, in use; the best last.

    Afterwards the one from before is in use: the sanitizers test one at a time.
    """
    before = calls.current_isa()
    try:
        for isa in calls.ISAS[: calls.ISAS.index(calls.best_isa()) + 1]:
            calls.set_isa(isa)
            yield isa
    finally:
        calls.set_isa(before)
