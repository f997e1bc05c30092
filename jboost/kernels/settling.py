# SPDX-License-Identifier: Apache-2.0
"""Settles which implementation a program runs, before it is traced.

In: an array of the program. Out: a context.
"""

from contextlib import AbstractContextManager

from jaxtyping import Array

from jboost.entry.implementation import current_implementation, use_implementation
from jboost.kernels.library import may_run


def settle_implementation(array: Array) -> AbstractContextManager[None]:
    """Replaces None by the implementation that it stands for where ``array`` is.

    Programs that are called at once are lowered for the platform of their operands
    alone, so that only one implementation needs to be traced.
    """
    implementation = current_implementation()
    if implementation is None:
        on_cpu = all(device.platform == "cpu" for device in array.devices())
        implementation = "cpu" if on_cpu and may_run() else "xla"
    return use_implementation(implementation)
