# SPDX-License-Identifier: Apache-2.0
"""Paces the rounds of training: how many each call of a program makes, and progress.

In: the number of rounds. Out: pieces of it, and a progress bar. The host loops of
``fit`` and of cross-validation share both.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from tqdm import tqdm

from jboost.entry import checks
from jboost.entry.decorators import check_process
from jboost.entry.exchanges import (
    process_number,
    slowest,
)

MOST_ROUNDS = 16  # in one call of a compiled program
_CALL_SECONDS = 0.5  # how long a call should take, so that progress keeps moving
_SHORTEST_SLEEP, _LONGEST_SLEEP = 5e-5, 0.02  # seconds between looks at a call
_SLEEP_SHARE = 0.02  # of the time waited so far, so that little is added to it


def pace_rounds(
    num_rounds: int,
    *,
    first: int = 0,
    most: int = MOST_ROUNDS,
    every: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Yields (first round, number of rounds) of each call, until all are made.

    The number doubles or halves with the time that the caller takes between two
    yields: small data wants few calls, large data frequent progress. It starts at 1,
    because nothing is known about the time yet. Processes that train together make
    the same calls.

    Args:
      num_rounds: of the whole run.
      first: the round to start from.
      most: rounds of one call.
      every: calls end at multiples of this, where given.

    Raises:
      RuntimeError: a callback has forked, and this is the new process.
    """
    aim = 1
    while first < num_rounds:
        check_process("training")
        count = min(aim, num_rounds - first)
        if every is not None:
            count = min(count, every - first % every)
        begun = time.perf_counter()
        yield first, count
        first, seconds = first + count, slowest(time.perf_counter() - begun)
        if seconds < _CALL_SECONDS / 2:
            aim = min(most, 2 * aim)
        elif seconds > 2 * _CALL_SECONDS:
            aim = max(1, aim // 2)


def wait_for(results: Any, count: int) -> None:
    """Waits for the results of a call so that signals are handled meanwhile (ctrl-C).

    Python handles signals in its main thread, and not as long as JAX waits in it. Calls
    of several rounds are short enough; see :func:`pace_rounds`.

    Args:
      results: arrays; their errors are left to those who read them.
      count: rounds of the call.
    """
    if count > 1 or threading.current_thread() is not threading.main_thread():
        return
    begun, pending = time.perf_counter(), jax.tree.leaves(results)
    # A thread that waits instead would need memory, and where there is none, Python
    # waits forever for the thread to start.
    while not all(array.is_ready() for array in pending):
        waited = time.perf_counter() - begun
        time.sleep(min(_LONGEST_SLEEP, max(_SHORTEST_SLEEP, _SLEEP_SHARE * waited)))


def open_bar(total: int, progress: bool, unit: str = "round") -> tqdm:
    """Opens a progress bar of rounds or other units; hidden without ``progress``.

    Of several processes that train together the first one shows it.

    Until the first is made it says that programs are being compiled.
    """
    hidden = not checks.check_flag("progress", progress) or process_number() > 0
    return tqdm(total=total, disable=hidden, unit=unit, desc="compiling")


def skip_to(bar: tqdm, first: int) -> None:
    """Starts a bar at the round from which a run goes on."""
    bar.initial = bar.n = first
    if first == bar.total:
        _end_compiling(bar)
    bar.refresh()


def advance(bar: tqdm, count: int, values: dict[str, float]) -> None:
    """Moves the bar by some rounds, and shows the current values."""
    _end_compiling(bar)
    shown = {name: f"{value:.5g}" for name, value in values.items()}
    bar.set_postfix(shown, refresh=False)
    bar.update(count)


def _end_compiling(bar):
    """Times rounds without what was compiled before them."""
    if not bar.disable and bar.desc:
        bar.unpause()
        bar.set_description(refresh=False)
