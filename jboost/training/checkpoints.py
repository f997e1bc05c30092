# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run of ``fit`` in a file, which the same call continues.

A fingerprint of data, loss and settings keeps other runs from the file; it does not
depend on the division of rows among processes. A lock ends with the run or its process.
The size of the file does not grow with the rows: it holds trees, history and a few
numbers, and scores are computed from the trees when a run goes on.
"""

import glob
import hashlib
import io
import json
import math
import os
import platform
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer, UInt64

from jboost.boosting.settings import RoundSettings, declared
from jboost.codes.codes import SparseCodes
from jboost.entry.context import current_implementation
from jboost.entry.exchanges import (
    gather_texts,
    num_processes,
    run_on_first,
    total_of_processes,
)
from jboost.model.containers import (
    Container,
    FileError,
    library_version,
    read_container,
    write_container,
)
from jboost.model.files import pack, unpack
from jboost.objective.group_tracing import GroupLoss
from jboost.tables.frames import RowSource
from jboost.training.chunks import Job, Position, Runner
from jboost.training.continuing import add_model
from jboost.training.preparing import Prepared
from jboost.training.record import Record
from jboost.training.request import FitRequest
from jboost.training.rows import PaddedRows
from jboost.trees.initial import MedianStart

_STEP = 2**13  # rows at a time, so that their hashes stay in the CPU cache
_LONGEST = 200  # characters of a loss that errors show
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DIGESTS = ("sha256:", "sum64:")  # prefixes; errors do not show digests
_TRACED_TOO = ("max_bins",)  # static, but a number of the program, too
_NAMES: dict[str, str] = {
    "values.bounds": "max_delta_step", "values.l1": "l1", "values.monotone": "monotone",
    "groups": "interactions", "categories.features": "categorical",
    "categories.max_onehot": "max_onehot",
}  # fmt: skip


def take_fingerprint(
    request: FitRequest, prepared: Prepared, job: Job, runner: Runner
) -> dict[str, Any]:
    """Returns everything that the result of a run depends on, by name.

    The entries are the settings as JSON stores them, and digests of the rows.
    """
    digests = _hash_rows("", job.rows, runner.read_codes())
    for name, (place, _) in request.sets.items():
        part = job.sets[name]
        digests |= _hash_rows(f"{place} ", part, part.read_codes())
    return describe_run(request, prepared, job) | digests


def describe_run(request: FitRequest, prepared: Prepared, job: Job) -> dict[str, Any]:
    """Returns everything that a run depends on except its rows."""
    (loss, method), arrays = job.problem
    if isinstance(loss, GroupLoss):
        programs = [*loss.values, *loss.gradients, loss.estimate]
    else:
        programs = [loss.value, loss.gradient, loss.hessian, loss.estimate]
        programs.append(loss.curvature)
    text = repr([program and program.structure for program in programs])
    described = _without_addresses(text)  # functions print their addresses
    named: dict[str, Any] = {
        name: getattr(method, name)
        for name, setting in declared(RoundSettings).items()
        if not setting.traced and name not in _TRACED_TOO
    }
    # The thresholds tell the ranges of features.
    for name, value in _name_numbers(arrays.numbers._replace(ranges=None)):
        assert name not in named, name  # or one would hide the other
        named[name] = value
    named.setdefault("subsample", 1.0)
    bins, names, begin = prepared.bins, prepared.feature_names, request.begin
    if isinstance(begin, MedianStart) or begin is None:
        begin = "auto" if begin is None else "median"
    rows = _describe_rows("", job.rows)
    for name, (place, _) in request.sets.items():
        rows |= _describe_rows(f"{place} ", job.sets[name])
    found = {
        "jboost": library_version(),
        "jax": jax.__version__,
        "thresholds of x": _digest(replace(bins, absent="missing")),
        "absent": bins.absent,
        **rows,
        "loss": _digest(described),
        "numbers in the loss": _digest(arrays.constants),
        **named,
        "implementation": current_implementation(),
        "init_score": begin if isinstance(begin, str) else np.asarray(begin).tolist(),
        "seed": request.settings.seed,
        "early_stopping_rounds": request.settings.early_stopping_rounds,
        "metrics": sorted(job.metrics),
        "by": None if request.by.metric is None else [*request.by],
        "validation": [*job.sets],
        "feature_names": names and [*names],
        "model": None if prepared.model is None else _digest(prepared.model),
    }
    return json.loads(json.dumps(found))


def describe_call(request: FitRequest) -> dict[str, Any]:
    """Returns the arguments that all processes must share, before they read rows."""
    plain = (bool, int, float, str, type(None))
    named = {
        name: value if isinstance(value, plain) else _without_addresses(repr(value))
        for name, value in request.settings.values.items()
    }
    checkpoint = None if request.checkpoint is None else request.checkpoint_rounds
    loss = _without_addresses(repr(request.loss))
    rows, source = request.rows, isinstance(request.rows.x, RowSource)
    optional = {
        name: getattr(rows, name) for name in ("sample_weight", "offset", "groups")
    }
    for place, parts in request.sets.values():
        names = (f"{place} {name}" for name in ("sample_weight", "offset", "groups"))
        optional |= zip(names, parts[2:], strict=True)
    return {
        "jboost": library_version(),
        "jax": jax.__version__,
        "x": f"a stream, bins given: {rows.x.has_bins}" if source else "rows",
        **{name: None if each is None else "given" for name, each in optional.items()},
        "loss": loss if len(loss) <= _LONGEST else _digest(loss),
        "rows are padded": request.padded,
        **named,
        "learning_rate": _digest(request.rates),
        "checkpoint_rounds": checkpoint,
        "metrics": sorted(request.metrics),
        "by": None if request.by.metric is None else [*request.by],
        "validation": [*request.sets],
        "model": None if request.model is None else _digest(request.model),
    }


def compare_processes(settings: dict[str, Any]) -> None:
    """Raises on every process if the settings of two processes differ.

    Raises:
      ValueError: they differ; the message names the settings and a process.
    """
    if num_processes() == 1:
        return
    first, *others = map(json.loads, gather_texts(json.dumps(settings)))
    for number, other in enumerate(others, start=1):
        differing = _name_differences(first, other, "{} on process 0, {} there")
        if differing:
            raise ValueError(
                f"all processes must train with the same arguments; process {number} "
                f"differs in {', '.join(differing)}"
            )


def _without_addresses(text):
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _name_differences(old, new, form):
    """Names the entries that differ, with both values unless these are digests."""
    differing = []
    for key in {**new, **old}:
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        hidden = any(str(each).startswith(_DIGESTS) for each in (before, now))
        values = form.format(repr(before), repr(now))
        differing.append(key if hidden else f"{key} ({values})")
    return differing


def _name_numbers(numbers: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name in ``fit``, value) of every number that the program takes."""
    for name, value in numbers._asdict().items():
        if name == "limits":
            yield from _name_numbers(value)
        elif hasattr(value, "_fields"):
            yield from _name_numbers(value, f"{name}.")
        elif value is not None and name != "num_features":  # x is digested
            whole = group + name
            yield str(_NAMES.get(whole, whole)), np.asarray(value).tolist()


def _describe_rows(prefix, rows: PaddedRows):
    """Returns the number of rows, the type of y, and the kind of groups, by name."""
    leaves, structure = jax.tree.flatten(rows.data.targets)
    kinds = [f"{leaf.dtype.name}{[*leaf.shape[1:]]}" for leaf in leaves]
    groups = rows.data.groups
    named = {}
    if groups is not None:
        named[f"{prefix}groups"] = f"{groups.kind} {groups.width}"
    return {
        **named,
        f"{prefix}number of rows": rows.division[1],
        f"{prefix}type of y": " ".join([*kinds, str(structure)]),
    }


def _hash_rows(prefix, rows: PaddedRows, codes):
    """Returns the digests of rows without their padding."""
    sparse = rows.data.codes
    targets, weights = rows.real
    words = [_as_words(leaf) for leaf in jax.tree.leaves(targets)]
    offset = rows.fetch(rows.offset, axis=1).T
    first = rows.division[0]
    sums = {
        "x": _hash_entries(sparse)
        if isinstance(sparse, SparseCodes)
        else hash_rows(codes, first),
        "y": hash_rows([np.concatenate(words)], first),
        "sample_weight": hash_rows([_as_words(weights)], first),
        "offset": hash_rows([_as_words(offset)], first),
    }
    if rows.data.values is not None:  # beside x, which is hashed as codes
        values = rows.fetch(rows.data.values)[:, : rows.num_features]
        sums["x"] = sums["x"] + hash_rows([_as_words(values)], first)
    groups = rows.data.groups
    if groups is not None and groups.number is not None:
        number = np.asarray(groups.number)[: rows.size]
        sums["numbers of groups"] = hash_rows([_as_words(number)], first)
    return {
        prefix + name: _write_sum(total_of_processes(each))
        for name, each in sums.items()
    }


def _write_sum(sums):
    """Returns the sum of hashes as text."""
    return f"sum64:{int(np.sum(sums, dtype=np.uint64)):016x}"


def _as_words(array):
    """Returns the bytes of each row as unsigned integers, [W, N]."""
    size, width = math.prod(array.shape[1:]), array.dtype.itemsize
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.view(f"<u{width}").reshape(len(array), size).T  # or of no row


def hash_rows(
    parts: Iterable[Integer[np.ndarray, "W n"]], first_row: int
) -> UInt64[np.ndarray, "1"]:
    """Hashes rows of integers w.

    The hash is the sum of mix(sum_j m_j w_ij + i * golden) over rows i, modulo 2^64,
    with odd random m_j (multilinear hashing) and the finalizer of SplitMix64 (Steele,
    Lea and Flood 2014). It depends on the order of rows, but not on how they are
    divided into parts.

    Args:
      parts: the rows of this process, in order.
      first_row: the number of the first of them among all rows.
    """
    # Sums of arrays wrap silently, those of scalars warn.
    total, first = np.zeros(1, np.uint64), first_row
    for part in parts:
        multipliers = _choose_multipliers(len(part))
        for start in range(0, part.shape[1], _STEP):
            step = part[:, start : start + _STEP]
            numbers = np.arange(step.shape[1], dtype=np.uint64)
            hashes = (numbers + np.uint64(first + start)) * _GOLDEN
            for column, multiplier in zip(step, multipliers, strict=True):
                hashes += column.astype(np.uint64) * multiplier
            total += np.sum(_mix(hashes), dtype=np.uint64)
        first += part.shape[1]
    return total


def _hash_entries(codes: SparseCodes):
    """Hashes the stored entries of sparse codes."""
    starts = np.asarray(codes.starts)
    rows = np.asarray(codes.rows)[: starts[-1]].astype(np.uint64)
    multipliers = np.repeat(_choose_multipliers(len(starts) - 1), np.diff(starts))
    values = np.asarray(codes.codes)[: starts[-1]].astype(np.uint64) + np.uint64(1)
    hashes = _mix(values * multipliers + rows * _GOLDEN)
    return np.sum(hashes, keepdims=True, dtype=np.uint64)


def _choose_multipliers(number):
    return np.random.PCG64(0).random_raw(number) | np.uint64(1)


def _mix(hashes):
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _digest(tree):
    """Digests a pytree: its structure, its arrays and strings."""
    leaves, structure = jax.tree.flatten(tree)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, str):
            found.update(leaf.encode("utf-8", "surrogatepass"))
            continue
        array = np.asarray(leaf)
        found.update(f"{array.dtype.name}{array.shape}".encode())
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        found.update(little.reshape(-1).view(np.uint8).data)
    return "sha256:" + found.hexdigest()


try:
    import fcntl
except ImportError:  # not POSIX
    fcntl: Any = None

_held: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes the copies of a forked process, which may outlive the run."""
    for file in list(_held):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_checkpoint(path: Path | None) -> Iterator[None]:
    """Holds the lock of a checkpoint within a ``with`` block; None: there is none.

    It is a system lock on a file next to the checkpoint, which is removed afterwards.
    A file that a killed process left behind is not locked. On file systems without
    locks, nothing is locked.

    Raises:
      ValueError: another run holds the lock, or the file cannot be written.
    """
    if path is not None:
        run_on_first(lambda: _check_folder(path))
    if path is None or fcntl is None:
        yield
        return
    name = path.with_name(f".{path.name}.lock")
    held: list[Any] = []
    try:
        run_on_first(lambda: held.append(_lock(name, path)))
        yield
    finally:
        for file in filter(None, held):
            with suppress(OSError):
                os.unlink(name)  # first: nobody else can have locked this file
            file.close()


def _check_folder(path) -> None:
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            "checkpoint must be a file in a folder that can be written to, got "
            f"{os.fspath(path)!r}"
        )


def _lock(name, path) -> IO[str] | None:
    """Returns the open file, or None if it cannot be locked."""
    while True:
        file = open(name, "a+")  # noqa: SIM115  # closed where it is not returned
        _held.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(200) or "another process"
            file.close()
            raise ValueError(
                f"checkpoint {os.fspath(path)!r} is in use by another run ({owner}); "
                "wait until it ends, or give another path; if there is no such run, "
                f"remove {os.fspath(name)!r}"
            ) from None
        except OSError:  # a file system without locks
            os.unlink(name)
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                break
        file.close()  # the run that had it removed it meanwhile
    with suppress(OSError):  # the disk may be full
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
    return file


_STATE = (
    "init_score", "pointed", "endless", "least_rows", "first_mean", "concentration",
    "round",
)  # fmt: skip
_PARAMETERS = ("parameters", "first_parameters")  # pytrees of the state


class Checkpoint(NamedTuple):
    """A file that holds a run.

    Attributes:
      path: the path of the file.
      every: the number of rounds between two writes of the file.
      fingerprint: everything that the result of the run depends on, by name.
      rates: the learning rate of each round.
    """

    path: Path
    every: int
    fingerprint: dict[str, Any]
    rates: np.ndarray


def write_checkpoint(
    checkpoint: Checkpoint, record: Record, position: Position | None
) -> None:
    """Writes a run, replacing an existing file; updates ``record.kept``.

    Args:
      position: the position before the next round; None for a run that is over.

    Raises:
      OSError: the file cannot be written.
    """
    run_on_first(partial(_write, checkpoint, record, position))
    record.kept = record.num_rounds


def _write(checkpoint, record, position) -> None:
    model = pack(record.model(record.num_rounds), "model.")
    arrays = dict(model.arrays)
    arrays["rates"] = checkpoint.rates[: record.num_rounds]
    for name, value in record.table().items():
        arrays[f"history.{name}"] = value
    if position is not None:
        arrays |= _flatten(position.state)
    fields = {**model.fields, "fingerprint": checkpoint.fingerprint}
    write_container(Container("Checkpoint", fields, arrays), checkpoint.path)
    record.kept = record.num_rounds  # even if other processes are lost now


def read_sharing(path: str | os.PathLike[str]) -> bool | None:
    """Returns whether the scores share trees in a run; None if there is no file."""
    container = _read_run(path)
    if container is None:
        return None
    settings = container.fields.get("fingerprint")
    shares = settings.get("share_structure") if isinstance(settings, dict) else None
    return shares if isinstance(shares, bool) else None  # else of another run


def _read_run(path):
    content = run_on_first(partial(_read, path))
    if content is None:
        return None
    file = io.BytesIO(content)
    file.name = os.fspath(path)  # type: ignore[attr-defined]  # for errors
    return read_container(file)


def read_checkpoint(checkpoint: Checkpoint) -> Container | None:
    """Reads the file, if it exists; it must be of this run.

    Raises:
      FileError: the file is damaged, or is not a checkpoint.
      ValueError: the file is of another run.
    """
    container = _read_run(checkpoint.path)
    if container is None:
        return None
    name = repr(os.fspath(checkpoint.path))
    if container.type != "Checkpoint":
        raise FileError(f"checkpoint {name} holds {container.type}, not a checkpoint")
    old, new = container.fields.get("fingerprint"), checkpoint.fingerprint
    if not isinstance(old, dict) or "y" not in old:
        raise ValueError(
            f"checkpoint {name} was written by {container.written_by} in an older "
            "format, whose digests of the rows cannot be compared; give another path, "
            f"with model=jb.load({name}) to go on from its model"
        )
    differing = _name_differences(old, new, "was {}, is {}")
    if differing:
        raise ValueError(
            f"checkpoint {name} is of another run: what differs is "
            f"{', '.join(differing)}; repeat the call that wrote it (num_rounds may be "
            f"raised), or give another path, with model=jb.load({name}) to go on from "
            "its model"
        )
    if "rates" in container.arrays:
        _compare_rates(container.arrays["rates"], checkpoint.rates, name)
    return container


def _read(path) -> bytes | None:
    """Reads a file; first removes temporary files of killed processes."""
    whole = Path(os.path.realpath(path))
    for part in whole.parent.glob(f".{glob.escape(whole.name)}.*.part"):
        with suppress(OSError):
            part.unlink()
    return path.read_bytes() if path.exists() else None


def resume(
    container: Container, record: Record, position: Position, job: Job, xs: Any
) -> Position:
    """Fills the record, and returns the position after its rounds.

    Args:
      container: the contents of the file, from :func:`read_checkpoint`.
      record: the record of the run before its first round.
      position: the position before the first round.
      xs: the raw rows: those of training, then of each validation set.

    Raises:
      FileError: the contents do not fit this run.
    """
    arrays = container.arrays
    try:
        model = unpack(container)
        table = {key: arrays[f"history.{key}"] for key in record.table()}
        done, before = len(arrays["rates"]), record.before
        earlier = 0 if before is None else before.num_rounds
        losses, init_score = table["train_loss"], model.init_score
        if losses.shape != (done,) or model.num_rounds != earlier + done:
            raise ValueError(f"trees or losses are not those of {done} rounds")
        if init_score.shape != np.shape(record.init_score):
            raise ValueError(f"scores have shape {init_score.shape}")
        record.restore(model, table)
        over = "state.round" not in arrays
        if not over:
            state = _unflatten(arrays, position.state)
            position = add_model(model, job, position._replace(state=state), xs)
    except (KeyError, ValueError) as error:
        raise FileError(f"the checkpoint does not fit this run: {error}") from None
    return position


def _compare_rates(old, new, name):
    """Checks that the rounds made so far had the same learning rates."""
    if old.ndim != 1:
        raise FileError(f"checkpoint {name} has learning rates of shape {old.shape}")
    done = len(old)
    if done > len(new):
        raise ValueError(
            f"num_rounds must be at least {done}, which checkpoint {name} holds, got "
            f"{len(new)}; jb.truncate(jb.load({name}), num_rounds) takes fewer"
        )
    if not np.array_equal(old, new[:done]):
        number = int(np.argmax(old != new[:done]))
        raise ValueError(
            f"learning_rate must be that of the run in checkpoint {name}, "
            f"{old[number]} in round {number}, got {new[number]}"
        )


def _flatten(state):
    """Returns the arrays of a state that do not grow with the number of rows."""
    arrays = {f"state.{name}": np.asarray(getattr(state, name)) for name in _STATE}
    for name in _PARAMETERS:
        for number, leaf in enumerate(jax.tree.leaves(getattr(state, name))):
            arrays[f"state.{name}.{number}"] = np.asarray(leaf)
    return arrays


def _unflatten(arrays, state):
    """Returns a state with the arrays that ``_flatten`` took from one like it."""
    found = {}
    for key, like in _flatten(state).items():
        array = arrays[key]
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"shape {array.shape} of {array.dtype}, expected {like.shape} of "
                f"{like.dtype}"
            )
        found[key] = jax.device_put(array)
    fields = {name: found[f"state.{name}"] for name in _STATE}
    for name in _PARAMETERS:
        structure = jax.tree.structure(getattr(state, name))
        leaves = (found[f"state.{name}.{i}"] for i in range(structure.num_leaves))
        fields[name] = jax.tree.unflatten(structure, leaves)
    return state._replace(**fields)
