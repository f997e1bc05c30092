# SPDX-License-Identifier: Apache-2.0
"""The memory limit of a stream."""

import ctypes
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

from jboost.entry.messages import show
from jboost.entry.programs import Compiled

_FEW_BYTES = 1 << 20  # freed arrays below this size are left to the allocator


def trim_heap(num_bytes: int) -> None:
    """Returns freed memory to the system if about ``num_bytes`` were freed.

    Does nothing with allocators other than glibc's.
    """
    if num_bytes >= _FEW_BYTES:
        _find_trim()(0)


@cache
def _find_trim() -> Callable[[int], Any]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return bool


_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LEAST_MEMORY = 1 << 16


def read_bytes(memory: Any) -> int:
    """Returns the number of bytes that the argument ``memory`` stands for."""
    expected = f"memory must be a number of bytes >= {_LEAST_MEMORY} or like '512 MiB'"
    if isinstance(memory, bool) or not isinstance(memory, str | int | np.integer):
        raise TypeError(f"{expected}, got {show(memory)}")
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        try:
            number = float(found[1]) if found else np.nan
        except ValueError:
            number = np.nan
        if not found or not np.isfinite(number):
            raise ValueError(f"{expected}, got {show(memory)}")
        memory = int(number * (1024 if found[3] else 1000) ** _UNITS[found[2]])
    if memory < _LEAST_MEMORY:
        raise ValueError(f"{expected}, got {show(memory)}")
    return int(memory)


def as_text(size: int) -> str:
    """Formats a number of bytes."""
    return f"{size / (1 << 20):.1f} MiB"


def count_bytes(arrays: Any) -> int:
    """Returns the size of a pytree of arrays, or of shapes."""
    return sum(
        math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def added_bytes(program: Compiled, *operands: Any) -> int:
    """Compiles for such shapes; returns the bytes needed besides the operands.

    These are results and scratch. A later call with operands of these shapes does not
    compile again.
    """
    found = program.jitted(*operands).lower(*operands).compile().memory_analysis()
    if found is None:
        return 0
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return max(0, results) + found.temp_size_in_bytes
