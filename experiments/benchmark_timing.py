# SPDX-License-Identifier: Apache-2.0
"""Times calls, and the load of other processes during them.

In: a function. Out: a ``Reading``: how long it took, and which share of the cores that
it may use other processes used meanwhile, from /proc/stat (Linux).
"""

import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LEAST = 0.2  # seconds of a reading: shorter calls are repeated
WINDOW = 0.2  # seconds watched when waiting for a quiet moment


class Reading(NamedTuple):
    """Measured values and the share of the cores that others used; None: unknown."""

    values: tuple[float, ...]
    load: float | None


def read_busy() -> tuple[float, int] | None:
    """Returns the busy seconds of this process's cores, and their number.

    Time that the host of a virtual machine takes ("steal") counts as busy.
    """
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [words for words in map(str.split, lines) if words and words[0] in names]
    # user nice system idle iowait irq softirq steal; guests are part of user.
    fields = [[int(word) for word in words[1:9]] for words in rows]
    busy = sum(sum(row) - row[3] - row[4] for row in fields)
    return (busy / os.sysconf("SC_CLK_TCK"), len(rows)) if busy else None


def read_own(*of: int) -> float:
    """Returns the processor seconds of this process and its finished children."""
    used = map(resource.getrusage, of or (_SELF, CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in used)


_SELF, CHILDREN = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN


def watch(function: Callable[[], Any]) -> tuple[Any, float | None]:
    """Calls a function; returns its result and the load of others meanwhile."""
    before, own, begin = read_busy(), read_own(), time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    after, own = read_busy(), read_own() - own
    if before is None or after is None:
        return result, None
    others = max(0.0, after[0] - before[0] - own)
    return result, others / (seconds * after[1])


def time_call(function: Callable[[], Any], times: int = 1) -> float:
    """Returns the mean seconds of so many calls, or of fewer if they are slow."""
    begin = end = time.perf_counter()
    done = 0
    while done < times and end - begin < 10 * LEAST:
        function()
        end, done = time.perf_counter(), done + 1
    return (end - begin) / done


def choose_times(function: Callable[[], Any]) -> int:
    """Returns how many calls make a reading, from one call or, if it is short, two."""
    seconds = time_call(function)
    if seconds < LEAST:  # the first call may have been slower
        seconds = time_call(function)
    return math.ceil(LEAST / max(1e-6, seconds))


def wait_for_quiet(most_load: float, patience: float) -> float:
    """Sleeps until other processes leave the cores alone; returns the seconds.

    Args:
      most_load: of other processes, as a share of the cores.
      patience: maximum seconds to wait.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < patience:
        load = watch(lambda: time.sleep(WINDOW))[1]
        if load is None or load <= most_load:
            break
    return time.perf_counter() - begin
