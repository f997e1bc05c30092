# SPDX-License-Identifier: Apache-2.0
"""Tables on the device, and times, for ``gpu_parts.py``.

In: functions that compute on a device, in the background. Out: milliseconds a call, or
a tree, and a file with all figures so far.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmark_cases import Case
from benchmark_peers import add_signal, find_loss, list_jboost
from benchmark_timing import choose_times, time_call
from experiment_tools import find_slope, save_json
from gpu_cases import FULL, QUICK

import jboost as jb

CHUNK = 1_000_000  # rows that are generated and coded at a time
SAMPLE = 200_000  # rows that thresholds are found from
READINGS = 3


class Task:
    """One part: its sizes, and the file that its figures go to."""

    def __init__(self, path: Path, platform: str, quick: bool):
        """Nothing is written yet."""
        self.path, self.platform, self.quick = path, platform, quick
        self.sizes = QUICK if quick else FULL
        self.figures: dict[str, Any] = {}

    def save(self, **figures: Any) -> None:
        """Adds figures, and writes all of them in one step."""
        self.figures |= figures
        save_json(self.path, self.figures)

    def note(self, kind: str, name: str, error: Exception) -> None:
        """Adds an error to those of a kind."""
        said = str(error).splitlines()[0] if str(error) else ""
        known = self.figures.get(kind, {})
        self.save(**{kind: known | {name: f"{type(error).__name__}: {said}"}})

    @property
    def case(self) -> Case:
        """The main table, for the peers."""
        rows, features, depth, *_ = self.sizes
        return Case(rows, features, max_depth=depth)

    @property
    def implementation(self) -> str:
        """What runs if none is named."""
        return jb.implementations()["training"]


# ---- data and timing ----------------------------------------------------------------


class Rows(NamedTuple):
    """A table on the device."""

    x: Any  # [N, F], or None
    y: Any  # [N]
    bins: Any
    binned: Any  # [N, F]


def draw_rows(rows: int, features: int, keep: bool = True) -> Rows:
    """Generates a table on the device, like those of ``benchmark.py``.

    Args:
      rows, features: its size.
      keep: whether the values are needed as well as the codes.
    """

    @partial(jax.jit, static_argnums=1)
    def draw(key, count):
        noise, values = jax.random.split(key)
        x = jax.random.normal(values, (count, features))
        return x, add_signal(jax.random.normal(noise, (count,)), x, jnp.sin)

    parts, bins = [], None
    for begin in range(0, rows, CHUNK):
        key = jax.random.fold_in(jax.random.key(0), begin)
        x, y = draw(key, min(CHUNK, rows - begin))
        bins = bins or jb.fit_bins(x[:SAMPLE])
        parts.append((x if keep else None, y, jb.apply_bins(bins, x)))
    x, y, binned = (
        None if column[0] is None else jnp.concatenate(column)
        for column in zip(*parts, strict=True)
    )
    return Rows(x, y, bins, binned)


def read_slopes(
    task: Task,
    trainers: dict[str, Callable[[int], Any]],
    rounds: tuple[int, int],
    ratios: dict[str, tuple[str, str]],
) -> None:
    """Saves milliseconds a tree of functions of a number of rounds, read in turn.

    They are saved after every turn; None is below noise. One that raises is left out,
    with its error. The slowest of five readings is dropped: the host may have stalled.

    Args:
      task: where they are saved.
      trainers: functions of a number of rounds.
      rounds: the two numbers of the slope.
      ratios: names of further figures, and the two that they divide.
    """
    few, many = rounds
    seconds: dict[str, dict[int, list]] = {}
    for name, train in trainers.items():
        try:
            for number in rounds:
                wait_for(train, number)  # compiles
            seconds[name] = {number: [] for number in rounds}
        except Exception as error:
            task.note("errors", name, error)
    for _ in range(task.sizes.turns):
        found: dict[str, float | None] = {}
        for name, taken in seconds.items():
            for number, column in taken.items():
                column.append(time_call(partial(wait_for, trainers[name], number)))
            kept = [
                sorted(column)[: 4 * len(column) // 5 or 1] for column in taken.values()
            ]
            slope = find_slope(*kept, many - few).measured
            found[name] = None if slope is None else 1e3 * slope
        for name, (over, under) in ratios.items():
            known = found.get(over) is not None and found.get(under) is not None
            found[name] = found[over] / found[under] if known else None
        task.save(**found)


def wait_for(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a result that has been computed."""
    return jax.block_until_ready(function(*arguments))


def time_latency(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the milliseconds from a call to its result: a median of means."""
    call = partial(wait_for, function, *arguments)
    call()
    times = choose_times(call)
    return 1e3 * statistics.median(time_call(call, times) for _ in range(READINGS))


def time_queue(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the milliseconds of a call among many that the device works off.

    What the host needs for a call counts only if the device is faster.
    """
    wait_for(function, *arguments)
    calls, readings = choose_times(partial(wait_for, function, *arguments)), []
    for _ in range(READINGS):
        begin, found = time.perf_counter(), None
        for _ in range(calls):
            found = function(*arguments)
        jax.block_until_ready(found)
        readings.append((time.perf_counter() - begin) / calls)
    return 1e3 * statistics.median(readings)


def make_trainer(
    rows: Rows, case: Case, implementation: str | None = None
) -> Callable[[int], Any]:
    """Returns jboost on codes that are on the device, as a function of rounds."""
    codes = jb.parts.prepare_codes(rows.binned, implementation=implementation)
    settings, loss = list_jboost(case), find_loss(case)

    def train(rounds):
        key = jax.random.key(0)
        return jb.boost(
            codes, rows.y, loss, key, num_rounds=rounds,
            implementation=implementation, **settings,
        )  # fmt: skip

    return train
