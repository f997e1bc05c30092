# SPDX-License-Identifier: Apache-2.0
"""Fetches results of programs, and recognizes errors that tell a lack of memory."""

import re
from typing import Any

import jax

_EXHAUSTED = re.compile("RESOURCE_EXHAUSTED: |INTERNAL: .*[Oo]ut of memory", re.DOTALL)


def fetch(arrays: Any) -> Any:
    """Returns a pytree with its arrays as NumPy arrays.

    Reading an array that could not be allocated ends the process, or never returns, in
    XLA. Waiting for it first raises an error.
    """
    return jax.device_get(jax.block_until_ready(arrays))


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error of Python, a kernel or XLA tells a lack of memory.

    A program raises a ValueError where it runs at once, and a JaxRuntimeError where its
    result is awaited. XLA replaces the status of programs that wait for others.
    """
    from_program = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    exhausted = from_program and _EXHAUSTED.match(str(error)) is not None
    return exhausted or isinstance(error, MemoryError)
