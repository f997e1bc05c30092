# SPDX-License-Identifier: Apache-2.0
"""Memory that this process may use, and memory returned to the system.

The C library keeps freed memory, separately for each thread, until it is trimmed.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_LITTLE = 2**26  # bytes that are not worth asking for
_GROUPS = Path("/sys/fs/cgroup")


def require_memory(needed: float, work: str, advice: str, reserved: float = 0) -> None:
    """Raises an error if the memory cannot hold the arrays of a computation.

    Args:
      needed: a lower bound of the bytes used, so that no feasible work is refused.
      work: the computation and its sizes, for the error message.
      advice: the arguments to change, for the error message.
      reserved: bytes that are allocated, whether they are used or not.
    """
    if max(needed, reserved) < _LITTLE:
        return
    for size, there in ((needed, available_memory), (reserved, total_memory)):
        found = there()
        if found is not None and size > found:
            raise MemoryError(
                f"{work} needs at least {_show(size)} of memory, but there are "
                f"{_show(found)}; {advice}"
            )


def available_memory() -> float | None:
    """Returns how many bytes this process can still use; None if that is unknown."""
    system = _read_numbers(Path("/proc/meminfo"))
    free = system.get("MemAvailable")
    if free is None:
        return min((*_find_own_limits(), _count_pages()), default=None)
    swap = system.get("SwapFree", 0)
    groups = (each + swap for each in _find_group_limits())
    return min(free + swap, *groups, *_find_own_limits())


def total_memory() -> float | None:
    """Returns how many bytes an allocation may have; None if that is unknown.

    Pages that are never written to take no memory, but Linux refuses to allocate more
    than the machine has, unless it is told not to.
    """
    own, system = [*_find_own_limits()], _read_numbers(Path("/proc/meminfo"))
    mode = _read_text(Path("/proc/sys/vm/overcommit_memory")).strip()
    if "MemTotal" in system and mode != "1":
        own.append(system["MemTotal"] + system.get("SwapTotal", 0))
    return min(own, default=None)


def _show(size):
    return f"{size / 2**30:,.1f} GiB"


def _count_pages():
    """Returns the memory of the machine; infinity if the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")


def _find_own_limits() -> Iterator[float]:
    """Yields the bytes that the process's limits (``ulimit -v``, ``-d``) leave."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = _read_numbers(Path("/proc/self/status"))
    for limit, name in (
        (resource.RLIMIT_AS, "VmSize"),
        (resource.RLIMIT_DATA, "VmData"),
    ):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in used:
            yield max(0.0, most - used[name])


def _find_group_limits() -> Iterator[float]:
    """Yields the bytes that the control groups of the process leave, without swap.

    A group counts the pages of files that it has read, which can be given up.
    """
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, kinds, path = line.split(":", 2)
        old = "memory" in kinds.split(",")
        if kinds and not old:
            continue
        top = _GROUPS / "memory" if old else _GROUPS
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        names = names if old else ("memory.max", "memory.current", "file")
        folder = top / path.lstrip("/")
        # In a container the path may be that of the machine.
        for group in (folder, *folder.parents):
            limit, used = (_read_text(group / name).strip() for name in names[:2])
            if limit.isdigit() and used.isdigit():
                files = _read_numbers(group / "memory.stat", 1).get(names[2], 0)
                yield max(0.0, float(limit) - float(used) + files)
            if group == top:
                break


def _read_numbers(path: Path, unit: int = 1024) -> dict[str, float]:
    """Returns the numbers of lines such as "MemFree:  123 kB", in bytes."""
    found = {}
    for line in _read_text(path).splitlines():
        name, _, rest = line.partition(" " if unit == 1 else ":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = float(words[0]) * unit
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
