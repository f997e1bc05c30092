# SPDX-License-Identifier: Apache-2.0
"""Settles which implementation a program runs, before it is traced.

In: an array of the program. Out: a context.
"""

from contextlib import AbstractContextManager

from jaxtyping import Array

from jboost.entry.context import current_implementation, use_implementation
from jboost.kernels.cuda_ready import PLATFORMS, are_ready
from jboost.kernels.library import may_run


def resolve_implementation(array: Array) -> AbstractContextManager[None]:
    """Replaces None by the implementation that it stands for where ``array`` is.

    Programs that are called at once are lowered for the platform of their operands
    alone, so that only one implementation needs to be traced.
    """
    implementation = current_implementation()
    if implementation is None:
        platforms = {device.platform for device in array.devices()}
        if platforms == {"cpu"} and may_run():
            implementation = "cpu"
        elif platforms <= PLATFORMS and are_ready():
            implementation = "cuda"
        elif platforms != {"tpu"}:  # its kernel has no name of its own
            implementation = "xla"
    return use_implementation(implementation)
