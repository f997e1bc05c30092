# SPDX-License-Identifier: Apache-2.0
"""Returns memory that is not used to the system.

The compiler allocates tens of MB for a program, on several threads, and frees most of
them. The C library of Linux keeps what is free, apart for each thread, so that the
process would hold the sum of these peaks and those of training.
"""

import ctypes
import sys
from functools import cache


def release_free_memory() -> None:
    """Returns free memory to the system, which takes milliseconds."""
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim():
    """Returns the function of the C library; None where it has none."""
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
    return trim
