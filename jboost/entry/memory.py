# SPDX-License-Identifier: Apache-2.0
"""Recognizes a lack of memory, and returns unused memory to the system.

The compiler allocates tens of MB for a program, on several threads, and frees most of
them. The C library of Linux keeps what is free, apart for each thread, so that the
process would hold the sum of these peaks and those of training.
"""

import ctypes
import re
import sys
from functools import cache
from typing import Any

import jax

_EXHAUSTED = re.compile("RESOURCE_EXHAUSTED: |INTERNAL: .*[Oo]ut of memory", re.DOTALL)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error of Python, a kernel or XLA tells a lack of memory.

    A program raises a ValueError where it runs at once, and a JaxRuntimeError where its
    result is awaited. XLA replaces the status of programs that wait for others.
    """
    from_program = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    exhausted = from_program and _EXHAUSTED.match(str(error)) is not None
    return exhausted or isinstance(error, MemoryError)


def fetch(arrays: Any) -> Any:
    """Returns a pytree with its arrays as NumPy arrays.

    Reading an array that could not be allocated ends the process, or never returns, in
    XLA. Waiting for it first raises an error.
    """
    return jax.device_get(jax.block_until_ready(arrays))


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
