# SPDX-License-Identifier: Apache-2.0
"""Every exchange of values of the host between processes that train a model together.

The functions do nothing outside :func:`use_processes`, and every process must call them
in the same order. Each begins by exchanging whether a process has failed: a process
that raises an error anywhere takes part in the exchange that the others come to next,
and all raise its error.
"""

import builtins
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt64

from jboost.entry.collectives import Shards, are_apart, total, use_shards
from jboost.entry.programs import compiled


@dataclass
class _Run:
    """A run of several processes; ``failed`` once one of them has."""

    failed: bool = False


_together: ContextVar[_Run | None] = ContextVar("_together", default=None)
_polls = itertools.count()  # the same on all processes
_kinds: dict[str, type[Exception]] = {}  # kinds of errors besides Python's own


@contextmanager
def use_processes(together: bool) -> Iterator[None]:
    """Sets within a ``with`` block whether all processes train one model together.

    Raises:
      Exception: the error of the block on the process that failed; the others raise an
        error of the same class if they know it, otherwise a RuntimeError, with the
        number of the first process that failed.
    """
    run = _Run() if together and jax.process_count() > 1 else None
    token = _together.set(run)
    try:
        yield
    except BaseException as error:
        _tell_others(error)
        raise
    finally:
        _together.reset(token)


def has_failed() -> bool:
    """Returns whether the run of several processes around this call has failed."""
    run = _together.get()
    return run is not None and run.failed


def _tell_others(error):
    """Takes part in the next exchange of the others, which raise the error, too."""
    run, cause = _together.get(), error
    while run is not None and isinstance(cause, Exception):
        if has_lost_others(cause):
            return
        cause = cause.__cause__
    if run is None or run.failed:
        return
    run.failed = True
    try:
        _exchange([1, 0])
        _exchange_texts(json.dumps([type(error).__name__, str(error)]))
    except Exception:  # the others are lost, too: the error says more
        return


def _exchange(numbers):
    """Returns integers of every process, [P, n]."""
    return _gather(np.array(numbers, np.int32)).tolist()


def _gather(values):
    """Returns the arrays of every process, [P, ...]."""
    return _send(np.broadcast_to(values, (jax.process_count(), *np.shape(values))))


def _send(parts):
    """Sends parts[q] to process q; returns the parts sent to this one, [P, ...].

    Between CPUs, Gloo's sums and gathers take ten times as long to start; where a
    process has one core, they wait for their own polling thread.
    """
    return _run(_swap, parts)


def _swap(parts):
    return jax.lax.all_to_all(parts, "processes", 0, 0)


def _run(function, operand):
    """Returns the result of a function of each process's operand, on this process."""
    count = jax.process_count()
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[rank] for rank in range(count)]), ("processes",))
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    shape = count * len(operand), *operand.shape[1:]
    operands = jax.make_array_from_process_local_data(rows, operand, shape)
    found = compiled(_run_on_processes, function, mesh)(operands)
    return np.asarray(found.addressable_data(0))


def _run_on_processes(function, mesh, operands):
    shards = Shards(("processes",), (1,) * mesh.size, mesh.size, are_apart(mesh))

    def run(own):
        with use_shards(shards):
            return function(own)

    rows: Any = PartitionSpec("processes")
    call = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return call(operands)


def _exchange_texts(text):
    content = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    sizes = [size for (size,) in _exchange([len(content)])]
    room = np.zeros(max(1, *sizes), np.uint8)
    room[: len(content)] = content
    pairs = zip(_gather(room), sizes, strict=True)
    return [part[:size].tobytes().decode() for part, size in pairs]


def _raise_for(failed):
    """Raises the error of the first process that failed."""
    run = _together.get()
    assert run is not None
    texts, rank, run.failed = _exchange_texts(""), failed.index(1), True
    name, text = json.loads(texts[rank])
    message = text if _names_process(text) else f"process {rank}: {text}"
    kind = _kinds.get(name, getattr(builtins, name, None))
    error: Exception = RuntimeError(f"{message} ({name})")
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some kinds take more than a text
            error = kind(message)
    raise error


def _names_process(text):
    return re.match(r"process \d+: ", text) is not None


def num_processes() -> int:
    """Returns the number of processes that train the model."""
    return 1 if _together.get() is None else jax.process_count()


def process_number() -> int:
    """Returns the number of this process among those that train the model."""
    return 0 if _together.get() is None else jax.process_index()


def has_lost_others(error: Exception) -> bool:
    """Returns whether an error means that an exchange with other processes failed.

    JAX raises a JaxRuntimeError where it waits for a result, and a ValueError with the
    same text where it starts a program.
    """
    failed = isinstance(error, jax.errors.JaxRuntimeError)
    status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
    return num_processes() > 1 and (failed or bool(status))


def slowest(seconds: float) -> float:
    """Returns the longest time that a process took."""
    if num_processes() == 1:
        return seconds
    meet()
    return float(np.max(_gather(np.float32(seconds))))


def total_of_processes(values: UInt64[np.ndarray, "*s"]) -> UInt64[np.ndarray, "*s"]:
    """Sums over all processes, modulo 2^64."""
    if num_processes() == 1:
        return values
    meet()
    # 64-bit integers may be disabled in JAX.
    whole = _gather(values.view(np.uint32)).view(np.uint64)
    return np.asarray(np.sum(whole, axis=0, dtype=np.uint64))


def add_processes(values: Any) -> Any:
    """Sums arrays of int32 over all processes, modulo 2^32."""
    if num_processes() == 1:
        return values
    meet()
    return _run(total, np.asarray(values)[None])[0]


def gather_numbers(number: int) -> list[int]:
    """Gathers one number from every process, in order of rank."""
    if num_processes() == 1:
        return [number]
    found = _exchange([0, number])
    failed = [each[0] for each in found]
    if any(failed):
        _raise_for(failed)
    return [each[1] for each in found]


def meet() -> None:
    """Raises the error of a process that has failed since the last exchange.

    If something may have failed on one process alone, call it (or make another exchange
    on the host) before a program that exchanges values between devices.
    """
    gather_numbers(0)


def gather_tables(tables: Any) -> Any:
    """Returns the rows of arrays [n, ...] of all processes, in order of rank."""
    if num_processes() == 1:
        return tables
    count = num_processes()
    return jax.tree.map(lambda array: send_rows([array] * count), tables)


def send_rows(parts: list[np.ndarray]) -> np.ndarray:
    """Sends the rows ``parts[q]`` to process q; returns those sent here, in order.

    All parts of a process have the same number of rows.
    """
    sizes, like = gather_numbers(len(parts[0])), parts[0]
    room = np.zeros((len(parts), max(1, *sizes), *like.shape[1:]), like.dtype)
    for own, part in zip(room, parts, strict=True):
        own[: len(part)] = part
    # Bytes, because JAX would convert numbers of 64 bits.
    found = _send(room.reshape(len(parts), -1).view(np.uint8))
    found = found.view(like.dtype).reshape(room.shape)
    return np.concatenate(
        [part[:size] for part, size in zip(found, sizes, strict=True)]
    )


def gather_texts(text: str) -> list[str]:
    """Gathers one text from every process, in order of rank."""
    content = np.frombuffer(text.encode(), np.uint8)
    ends = np.cumsum(gather_numbers(len(content)))
    parts = np.split(gather_tables(content), ends[:-1])
    return [part.tobytes().decode() for part in parts]


@contextmanager
def agree(*kinds: type[Exception]) -> Iterator[None]:
    """Raises an error of a ``with`` block on all processes.

    The block must not exchange anything. The message of the error names the first
    process that failed.

    Args:
      kinds: classes of errors, besides Python's own, that all processes raise as such.
    """
    if num_processes() == 1:
        yield
        return
    _kinds.update({kind.__name__: kind for kind in kinds})
    try:
        yield
    except Exception as error:
        text = error.args[0] if error.args else None
        if isinstance(text, str) and not _names_process(text):
            error.args = (f"process {process_number()}: {text}", *error.args[1:])
        _tell_others(error)
        raise
    meet()


def run_on_first(function: Callable[[], bytes | None]) -> bytes | None:
    """Runs a function on process 0 only; all processes return its result.

    An error that the function raises is raised on all processes.
    """
    if num_processes() == 1:
        return function()
    result = None
    with agree():
        if process_number() == 0:
            result = function()
    size = gather_numbers(-1 if result is None else len(result))[0]
    if size < 0:
        return None
    padded = np.zeros(-(-size // 4), np.int32)
    if result is not None:
        padded.view(np.uint8)[:size] = np.frombuffer(result, np.uint8)
    padded = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return padded.view(np.uint8)[:size].tobytes()


def awaits_preemption() -> bool:
    """Returns whether JAX handles SIGTERM as a notice that a machine is taken away.

    It does if ``jax.config.update("jax_enable_preemption_service", True)`` was called
    before ``jax.distributed.initialize``.
    """
    enabled = jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
    return bool(enabled) and jax.distributed.is_initialized()


def is_preempted() -> bool:
    """Returns whether a process of this run got a notice of preemption.

    All processes must ask equally often; they get the notice at the same call. See
    ``jax.experimental.multihost_utils.reached_preemption_sync_point``.
    """
    # Processes that train models of their own ask at different times.
    alone = num_processes() == 1 and jax.process_count() > 1
    if alone or not awaits_preemption():
        return False
    return bool(multihost_utils.reached_preemption_sync_point(next(_polls)))
