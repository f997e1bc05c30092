# SPDX-License-Identifier: Apache-2.0
"""Times calls, and the load of other processes during them.

In: a function. Out: a ``Reading``: how long it took, and which share of the cores that
it may use other processes used meanwhile, from /proc/stat (Linux).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BEFORE = 0.1  # seconds watched before a call
WINDOW = 0.2  # seconds watched when waiting for a quiet moment


class Reading(NamedTuple):
    """A measured value and the share of the cores that others used; None: unknown."""

    value: float
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


def read_own() -> float:
    """Returns the processor seconds of this process and its finished children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def take(function: Callable[[], Any]) -> Reading:
    """Times one call; the load includes a moment before it."""
    before, own, start = read_busy(), read_own(), time.perf_counter()
    time.sleep(BEFORE)
    begin = time.perf_counter()
    function()
    end = time.perf_counter()
    after, own = read_busy(), read_own() - own
    if before is None or after is None:
        return Reading(end - begin, None)
    others = max(0.0, after[0] - before[0] - own)
    return Reading(end - begin, others / ((end - start) * after[1]))


def worst(*readings: Reading) -> float | None:
    """Returns the highest load of several readings."""
    loads = [reading.load for reading in readings if reading.load is not None]
    return max(loads, default=None)


def wait_for_quiet(most_load: float, patience: float) -> float:
    """Sleeps until other processes leave the cores alone; returns the seconds.

    Args:
      most_load: of other processes, as a share of the cores.
      patience: maximum seconds to wait.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < patience:
        load = take(lambda: time.sleep(WINDOW - BEFORE)).load
        if load is None or load <= most_load:
            break
    return time.perf_counter() - begin
