# SPDX-License-Identifier: Apache-2.0
"""Training and prediction where a Dask cluster holds the rows.

``fit`` gives each worker neighboring partitions, and starts a process beside each
worker: it receives the worker's rows, and trains with the others as the page "Many
machines" describes. It is a process of its own because ``jax.distributed`` connects
once in a process, and ends it when another is lost. The processes wait some minutes for
the next call of the client, and have its programs then.
"""

import contextlib
import io
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost import losses
from jboost.entry.messages import warn_user
from jboost.training.record import Trained

HEARTBEAT = 30  # seconds without a sign of life until JAX gives a process up
_UNEVEN = 0.1  # rows that a worker may have beyond its share, as a part of it
_REFUSED = {
    "groups": "rows of a group may lie on several workers",
    "mesh": "the workers are the mesh",
    "implementation": "each worker chooses its own",
}
_PATIENCE = 300  # seconds that a process waits for the next call
# In a worker, its processes by group and rank; in a client, the workers and the group
# that wait for its next call.
_children: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
_groups: Any = weakref.WeakKeyDictionary()


def fit(
    client: Any,
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    validation: Any = None,
    sample_weight: Any = None,
    offset: Any = None,
    **settings: Any,
) -> Trained:
    """Trains on the workers of a Dask cluster that hold the rows.

    The model has the bits of ``jb.fit(x.compute(), y.compute(), ...)``, for any number
    of workers and partitions. Rows stay on the workers that hold them, but for those
    that move, with a warning, to give each worker as many, and neighbors.

    Args:
      client: a ``distributed.Client``. Beside each of its workers runs a process with
        as many threads.
      x: a Dask data frame, a Dask array [N, F], or a list of delayed parts.
      y: targets: a Dask collection with the partitions of x, or a dict or tuple of
        such.
      loss: any loss of :func:`jboost.fit`, but not of groups.
      validation, sample_weight, offset: those of :func:`jboost.fit`, as collections.
      **settings: the other arguments of :func:`jboost.fit`, but groups, mesh and
        implementation. All workers see the path ``checkpoint``, and run callbacks.

    Returns:
      The model and its history.

    Raises:
      TypeError, ValueError: as :func:`jboost.fit`; partitions differ.
      TrainingError, RuntimeError: as :func:`jboost.fit`; a worker was lost.

    Example:
      >>> import dask.array as da, jboost as jb, jboost.dask  # doctest: +SKIP
      >>> from distributed import Client, LocalCluster  # doctest: +SKIP
      >>> client = Client(LocalCluster(n_workers=2))  # doctest: +SKIP
      >>> x = da.random.normal(size=(10_000, 5), chunks=(1000, 5))  # doctest: +SKIP
      >>> model, _ = jb.dask.fit(client, x, x[:, 0], num_rounds=9)  # doctest: +SKIP
      >>> jb.dask.predict(model, x).compute().shape  # doctest: +SKIP
      (10000,)
    """
    refuse_settings(settings)
    if client.asynchronous:
        raise TypeError("client must be synchronous, got asynchronous=True")
    several = validation if isinstance(validation, dict) else {"": validation}
    tables: dict[Any, Any] = {None: (x, y, sample_weight, offset)}
    tables |= {k: (*v, None, None)[:4] for k, v in several.items() if v is not None}
    known = client.scheduler_info(n_workers=-1)["workers"]
    workers = {name: each["nthreads"] for name, each in sorted(known.items())}
    held = {}
    for name, table in tables.items():
        label = "" if name is None else f"validation {name} ".replace("  ", " ")
        parts = _read_parts(table, label)
        if name is None:
            workers = _order(client, workers, parts)
        held[name] = _place(client, [*workers], parts, label)
    task = ClusterTask(loss, settings, isinstance(validation, dict))
    return _Call(client, workers, task, held).wait()


def predict(model: Any, x: Any, **arguments: Any) -> Any:
    """Predicts by partition, lazily.

    Args:
      model: a model of :func:`fit` or :func:`jboost.fit`.
      x: a Dask data frame, a Dask array, or a list of delayed parts.
      **arguments: those of :func:`jboost.predict` that are not rows.

    Returns:
      For a data frame: a series, or a frame of K scores, with its divisions and index;
      for an array: an array; for a list: a list.
    """
    dask: Any = import_module("dask")
    model = jax.device_get(model)
    call = _predict, dask.delayed(model, pure=True), arguments
    if isinstance(x, list):
        return [dask.delayed(call[0])(part, *call[1:]) for part in x]
    x = _check(x, "x")
    if not hasattr(x, "chunks"):
        with warnings.catch_warnings(action="ignore"):  # categories are made up
            like = _predict(x._meta_nonempty, model, arguments).iloc[:0]
        return x.map_partitions(*call, meta=like)
    row = _predict(np.zeros((1, x.shape[1]), np.float32), model, arguments)
    shape: Any = {"chunks": (x.chunks[0], row.shape[1:])}
    if row.ndim == 1:
        shape = {"drop_axis": 1}
    return x.map_blocks(*call, dtype=row.dtype, meta=row[:0], **shape)


def _predict(part: Any, model: Any, arguments: dict[str, Any]) -> Any:
    from jboost import predict

    some = part if len(part) else np.zeros((1, model.num_features), np.float32)
    found = np.asarray(predict(model, some, **arguments))[: len(part)]
    if not hasattr(part, "index"):
        return found
    import pandas as pd

    make = pd.Series if found.ndim == 1 else pd.DataFrame
    return make(found, index=part.index)


# Rows: tuples (x, targets, weights, offset), of Dask's collections or of tables.


def _check(collection: Any, name: str) -> Any:
    """Returns a collection with all columns in each partition."""
    if isinstance(collection, list):
        return collection
    if not hasattr(collection, "to_delayed"):
        raise TypeError(
            f"{name} must be a Dask data frame, a Dask array or a list of delayed "
            f"parts, got {type(collection).__name__}"
        )
    several = hasattr(collection, "chunks") and collection.ndim > 1
    return collection.rechunk({1: -1}) if several else collection


def _read_parts(table, label):
    """Returns the rows by partition, each delayed."""
    leaves, tree = jax.tree.flatten(table, is_leaf=lambda leaf: isinstance(leaf, list))
    columns = []
    for leaf in leaves:
        leaf = _check(leaf, f"{label}{'y or weights' if columns else 'x'}")
        known = [each.chunks[0] for each in (leaf, table[0]) if hasattr(each, "chunks")]
        if len(known) == 2 and not np.isnan(np.concatenate(known)).any():
            leaf = leaf.rechunk({0: known[1]})
        parts = leaf if isinstance(leaf, list) else [*np.ravel(leaf.to_delayed())]
        if columns and len(parts) != len(columns[0]):
            raise ValueError(
                f"{label}y, sample_weight and offset must have the {len(columns[0])} "
                f"partitions of x, got {len(parts)}"
            )
        columns.append(parts)
    return [jax.tree.unflatten(tree, each) for each in zip(*columns, strict=True)]


def _find_places(client, parts):
    """Returns the workers that hold each partition; none if it is not computed."""
    futures_of = import_module("distributed").futures_of
    own = [futures_of(part) for part in parts]
    where = client.who_has([each for futures in own for each in futures] or None)
    return [{w for each in futures for w in where.get(each.key, ())} for futures in own]


def _order(client, workers, parts):
    """Orders the workers as the partitions that they hold."""
    places = _find_places(client, [part[0] for part in parts])

    def find_first(worker):
        return next((i for i, held in enumerate(places) if worker in held), 0)

    return {worker: workers[worker] for worker in sorted(workers, key=find_first)}


def _place(client, workers, parts, label):
    """Returns a future for each worker: neighboring rows, joined there."""
    dask: Any = import_module("dask")
    count, numbers, held = len(workers), range(len(parts)), [None] * len(parts)
    chosen = [
        tuple(sorted(found.intersection(workers)))
        or (workers[number * count // len(parts)],)
        for number, found in enumerate(_find_places(client, [x for x, *_ in parts]))
    ]
    for own in {*chosen}:  # at once, because each call goes through the whole graph
        here = [number for number in numbers if chosen[number] == own]
        each = [dask.delayed(tuple)(parts[number]) for number in here]
        for number, future in zip(
            here, client.compute(each, workers=[*own]), strict=True
        ):
            held[number] = future
    counts = client.map(_count_rows, held, numbers, label=label, pure=False)
    sizes = client.gather(counts)
    places, ends = _find_places(client, held), np.cumsum([0, *sizes])
    cuts = ends[-1] * np.arange(count + 1) // count
    near = ends[abs(ends[:, None] - cuts).argmin(0)]  # the next ends of partitions
    cuts = np.where(abs(near - cuts) <= _UNEVEN * ends[-1] / count, near, cuts)
    joined, moved = [], 0
    for worker, first, last in zip(workers, cuts[:-1], cuts[1:], strict=True):
        low, high = (np.clip(cut - ends[:-1], 0, sizes) for cut in (first, last))
        own = np.flatnonzero(low < high).tolist() or [0]
        pieces = [(held[i], int(low[i]), int(high[i])) for i in own]
        moved += sum(high[i] - low[i] for i in own if worker not in places[i])
        joined.append(client.submit(_join, pieces, workers=[worker], pure=False))
    if moved:
        warn_user(
            f"{moved} of {ends[-1]} {label}rows move between workers, so that each has "
            "as many, and neighbors; hold neighboring partitions of one size on each "
            "worker to avoid it"
        )
    import_module("distributed").wait(joined)
    return joined


def _count_rows(rows, number, label):
    """Returns the rows of a partition, which its tables agree on."""
    if hasattr(rows[0], "tocsr"):
        raise TypeError(f"{label}x must be dense on a cluster, got {type(rows[0])}")
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(rows)}
    if len(sizes) > 1:
        raise ValueError(
            f"{label}x, y, sample_weight and offset must have the same rows, got "
            f"{sorted(sizes)} in partition {number}"
        )
    return sizes.pop()


def _join(pieces):
    """Concatenates parts of partitions, (rows, first, last)."""

    def join(*tables):
        frames = hasattr(tables[0], "iloc")
        cut = [
            (table.iloc if frames else table)[first:last]
            for table, (_, first, last) in zip(tables, pieces, strict=True)
        ]
        if len(cut) == 1:
            return cut[0]
        if not frames:
            return np.concatenate(cut)
        from dask.dataframe.dispatch import concat

        return concat(cut)  # joins categories

    return jax.tree.map(join, *[rows for rows, _, _ in pieces])


# The training processes.


def refuse_settings(settings: dict[str, Any]) -> None:
    """Raises ValueError for arguments of ``fit`` that a cluster does not take."""
    for name, reason in _REFUSED.items():
        if settings.get(name) is not None:
            raise ValueError(f"{name} must not be given here: {reason}")


def dump(content: Any) -> bytes:
    """Pickles objects, among them functions that other processes cannot import."""
    return import_module("cloudpickle").dumps(content)


class ClusterTask(NamedTuple):
    """The call of ``fit`` that all processes make."""

    loss: Any
    settings: dict[str, Any]
    named: bool  # whether validation sets have names


class _Call:
    """A call of fit: a process beside each worker, and a thread that waits for it."""

    def __init__(
        self, client: Any, workers: dict[str, int], task: ClusterTask, held: Any
    ):
        self.client, self.workers, self.group = client, workers, uuid.uuid4().hex
        self.held, self.left, self.quiet = held, {*range(len(workers))}, False
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        before, group = _groups.pop(client, ({}, ""))
        waiting = group and [*before] == [*workers] and self._tell(_is_waiting, group)
        address = None
        if waiting and sum(waiting.values()) == len(workers):
            self.group = group  # its processes know each other
        else:
            if group:
                self._tell(_stop, group)
            first, *_ = workers
            (address,) = client.run(_find_address, workers=[first]).values()
        client.subscribe_topic(self.group, lambda event: self.heard.put(event[1]))
        payload, place = dump(task), dict(address=address, count=len(workers))
        for rank, (worker, threads) in enumerate(workers.items()):
            here = dict(place, rank=rank, threads=threads)
            keys = {name: each[rank].key for name, each in held.items()}
            call = rank, worker, (_train, self.group, payload, here, keys)
            threading.Thread(target=self._watch, args=call, daemon=True).start()

    def _tell(self, function, group, **options):
        """Calls a function on all workers that are still there."""
        return self.client.run(
            function, group, workers=[*self.workers], on_error="ignore", **options
        )

    def _end(self):
        with contextlib.suppress(Exception):  # the client may be closed meanwhile
            self._tell(_stop, self.group, wait=False)

    def _watch(self, rank, worker, call):
        place = f"the training process {rank} beside the worker {worker}"
        try:
            found = self.client.run(*call, workers=[worker])[worker]
        except OSError as error:
            found = EOFError(f"its worker was lost: {error}")
        except Exception as error:
            found = error
        if isinstance(found, EOFError):
            found = _Lost(f"{place} did not finish: {found}")
        if isinstance(found, Exception):
            found.add_note(f"raised by {place}")
        self.heard.put(("over", rank, found))

    def wait(self) -> Trained:
        """Returns the model of process 0, or raises the error of one of them.

        Where a worker is lost, the errors of the others say more: they hold the model.
        """
        found: Any = None
        error, end = None, float("inf")
        try:
            while self.left and time.monotonic() < end:
                with contextlib.suppress(queue.Empty):
                    kind, *content = self.heard.get(timeout=1)
                    if kind != "over":
                        self._show(kind, *content)
                        continue
                    rank, result = content
                    self.left.discard(rank)
                    found = result if rank == 0 else found
                    if isinstance(result, _Lost):
                        end = min(end, time.monotonic() + HEARTBEAT + 5)
                        error = error or result
                    elif isinstance(result, BaseException):
                        error, end = result, 0
            with contextlib.suppress(queue.Empty):
                while not self.quiet:  # the last words of process 0
                    self._show(*self.heard.get(timeout=0.5))
        finally:
            self.client.unsubscribe_topic(self.group)
            if error is not None or self.left:
                # Not here: Dask looks for a lost worker for half a minute.
                threading.Thread(target=self._end, daemon=True).start()
        if error is not None:
            raise error
        _groups[self.client] = self.workers, self.group
        return Trained(*pickle.loads(found))

    def _show(self, kind, content, *_):
        if kind == "received":  # the process has its rows now
            for futures in self.held.values():
                futures[content] = None
        elif kind == "quiet":
            self.quiet = self.quiet or content == 0
        elif kind == "warning":
            category, text = pickle.loads(content)
            warn_user(text, category)
        elif kind != "over":
            print(content, end="", file=getattr(sys, kind), flush=True)


class _Lost(RuntimeError):
    """A worker, or its process, ended without a word."""


def _find_address(dask_worker):
    """Returns an address for the processes to meet, on the machine of a worker."""
    host = dask_worker.address.rpartition("://")[2].rpartition(":")[0]
    if dask_worker.address.startswith("inproc"):
        host = "127.0.0.1"
    with socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET) as probe:
        probe.bind((host.strip("[]"), 0))
        return f"{host}:{probe.getsockname()[1]}"


async def _train(group, task, place, keys, dask_worker):
    """Runs on a worker, aside from its tasks: trains in a process beside it."""
    import asyncio

    def tell(*event):
        dask_worker.loop.add_callback(dask_worker.log_event, group, event)

    rows = {name: dask_worker.data[key] for name, key in keys.items()}
    return await asyncio.to_thread(_watch_child, group, task, place, rows, tell)


def _watch_child(group, task, place, rows, tell):
    """Sends a process its rows, and waits for its result."""
    rank = place["rank"]
    if (group, rank) not in _children:
        _children[group, rank] = subprocess.Popen(
            [sys.executable, "-m", "jboost.dask"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PJRT_NPROC": str(place["threads"])},
        )  # fmt: skip
    child: Any = _children[group, rank]
    try:
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((task, place, [*rows]), child.stdin)
            while rows:
                pickle.dump(rows.pop(next(iter(rows))), child.stdin, protocol=5)
            child.stdin.flush()
            tell("received", rank)
        while True:
            kind, content = pickle.load(child.stdout)
            if kind == "over":
                tell("quiet", rank)
                return content
            tell(kind, content)
    except (EOFError, pickle.UnpicklingError):
        return EOFError(f"it ended with code {child.wait()}")


def _is_waiting(group):
    return any(of == group and p.poll() is None for (of, _), p in _children.items())


async def _stop(group):  # a coroutine, so that clients need not wait
    for key in [key for key in _children if key[0] == group]:
        with _children.pop(key) as child, contextlib.suppress(OSError):
            child.kill()


def _serve():
    """Runs in a process beside a worker: receives rows, trains, sends the model."""
    channel, source = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # prints of others go to the log of the worker
    lock = threading.Lock()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def say(kind, content):
        with lock:
            channel.write(dump((kind, content)))
            channel.flush()

    def receive():
        with contextlib.suppress(EOFError):
            while True:
                inbox.put(pickle.load(source))
        os._exit(1)  # with the worker

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            task, place, names = inbox.get(timeout=_PATIENCE)
        except queue.Empty:
            os._exit(0)
        if place["rank"] == 0:
            sys.stdout, sys.stderr = _Voice(say, "stdout"), _Voice(say, "stderr")
            warnings.showwarning = lambda message, category, *_: say(
                "warning", pickle.dumps((category, str(message)))
            )
        try:
            # Not by name, so that rows are released when training is over.
            found = train_share(
                pickle.loads(task), place, {name: inbox.get() for name in names}
            )
            say("over", found)
        except BaseException as error:
            say("over", error)


class _Voice(io.TextIOBase):
    """A text stream that the client hears."""

    def __init__(self, say: Any, kind: str):
        self.say, self.kind = say, kind

    def write(self, text: str) -> int:
        """Sends a text."""
        self.say(self.kind, text)
        return len(text)


def train_share(task: ClusterTask, place: dict[str, Any], tables: Any) -> bytes | None:
    """Trains on the rows of this process, together with the others.

    Args:
      place: the address where the processes meet, the rank of this one, their count.
      tables: (x, y, weights, offset) of the training rows by None, and of each
        validation set by its name.

    Returns:
      The pickled model and history in process 0, None in the others.
    """
    from jboost.training.fitting import fit

    if (count := place["count"]) > 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            place["address"], count, place["rank"], heartbeat_timeout_seconds=HEARTBEAT
        )
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    x, y, weights, offset = tables.pop(None)
    found = fit(
        x, y, task.loss, sample_weight=weights, offset=offset, mesh=mesh,
        validation=tables if task.named else tables.get(""), **task.settings,
    )  # fmt: skip
    return pickle.dumps((*found,)) if place["rank"] == 0 else None


if __name__ == "__main__":
    _serve()
