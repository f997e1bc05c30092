# SPDX-License-Identifier: Apache-2.0
"""Returns freed memory to the operating system.

glibc keeps freed memory for later allocations. These reuse it only in part, so that a
process may hold twice the memory of its arrays.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

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
