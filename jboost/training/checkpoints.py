# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run of ``fit`` in a file, from which the same call continues.

In: a run after some rounds. Out: a file with everything that the next round needs and
that cannot be computed from the data: trees, scores of all rows, history; and with a
fingerprint of data, loss and settings, so that no other run continues from it. Early
stopping needs the history only, and random numbers depend on seed and round alone.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.boosting.settings import RoundSettings, declared
from jboost.entry.implementation import current_implementation
from jboost.model.containers import (
    Container,
    FileError,
    library_version,
    read_container,
    remove_parts,
    write_container,
)
from jboost.model.files import pack, unpack
from jboost.training.chunks import Job, Position, Runner
from jboost.training.history import Record
from jboost.training.preparing import Prepared
from jboost.training.request import FitRequest
from jboost.training.rows import PaddedRows
from jboost.trees.initial import MedianStart

_TRACED_TOO = ("max_bins",)  # static, but a number of the program, too
_NAMES: dict[str, str] = {
    "values.bounds": "max_delta_step", "values.l1": "l1", "values.monotone": "monotone",
    "groups": "interactions", "categories.features": "categorical",
    "categories.l2": "category_l2", "categories.smoothing": "category_smoothing",
    "categories.min_weight": "min_category_weight",
    "categories.max_onehot": "max_onehot",
}  # fmt: skip
_STATE = ("scores", "init_score", "pointed", "first_mean", "concentration", "round")
_PARAMETERS = ("parameters", "first_parameters")  # pytrees of the state


class Checkpoint(NamedTuple):
    """A file in which a run is stored.

    Attributes:
      path: of the file.
      every: the number of rounds after which it is written again.
      fingerprint: of the run.
      rates: the learning rate of each round.
    """

    path: Path
    every: int
    fingerprint: dict[str, Any]
    rates: np.ndarray


def write_checkpoint(
    checkpoint: Checkpoint, record: Record, position: Position | None
) -> None:
    """Writes a run, replacing the file if it exists.

    Args:
      position: where the next round begins; None for a run that is over.

    Raises:
      OSError: it cannot be written.
    """
    model = pack(record.model(record.num_rounds), "model.")
    arrays = dict(model.arrays)
    arrays["rates"] = checkpoint.rates[: record.num_rounds]
    for name, value in record.table().items():
        arrays[f"history.{name}"] = value
    if position is not None:
        arrays |= _flatten(position)
    fields = {**model.fields, "fingerprint": checkpoint.fingerprint}
    write_container(Container("Checkpoint", fields, arrays), checkpoint.path)


def read_checkpoint(checkpoint: Checkpoint) -> Container | None:
    """Reads the file, if it exists; it must be of this run.

    Raises:
      FileError: the file is damaged, or is not a checkpoint.
      ValueError: the file is of another run.
    """
    remove_parts(checkpoint.path)
    if not checkpoint.path.exists():
        return None
    name = repr(os.fspath(checkpoint.path))
    container = read_container(checkpoint.path)
    if container.type != "Checkpoint":
        raise FileError(f"checkpoint {name} holds {container.type}, not a checkpoint")
    _compare(container.fields.get("fingerprint"), checkpoint.fingerprint, name)
    if "rates" in container.arrays:
        _compare_rates(container.arrays["rates"], checkpoint.rates, name)
    return container


def resume(container: Container, record: Record, position: Position) -> Position:
    """Fills the record, and returns the position after its rounds.

    Args:
      container: from :func:`read_checkpoint`.
      record: before its first round.
      position: before the first round.

    Raises:
      FileError: the contents do not fit this run.
    """
    arrays = container.arrays
    try:
        model = unpack(container)
        table = {key: arrays[f"history.{key}"] for key in record.table()}
        done, before = len(arrays["rates"]), record.before
        earlier = 0 if before is None else before.num_rounds
        lengths = {len(table["train_loss"]), len(table["set_losses"])}
        rows = {len(v) for k, v in table.items() if k.startswith("parameters.")}
        if lengths != {done} or rows - {done + 1} or model.num_rounds != earlier + done:
            raise ValueError(f"trees or losses are not those of {done} rounds")
        if "state.scores" in arrays:
            start = _flatten(position)
            found = {key: _like(arrays[key], value) for key, value in start.items()}
            position = _unflatten(found, position)
    except (KeyError, ValueError) as error:
        raise FileError(f"the checkpoint does not fit this run: {error}") from None
    record.restore(model, table)
    return position


def _compare_rates(old, new, name):
    """Checks that the rounds made so far had the same learning rates."""
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


def _flatten(position):
    """Returns what cannot be computed from the data, or is cheap to store."""
    state, set_scores = position
    arrays = {f"state.{name}": np.asarray(getattr(state, name)) for name in _STATE}
    for name in _PARAMETERS:
        for number, leaf in enumerate(jax.tree.leaves(getattr(state, name))):
            arrays[f"state.{name}.{number}"] = np.asarray(leaf)
    for number, scores in enumerate(set_scores):
        arrays[f"scores.{number}"] = np.asarray(scores)
    return arrays


def _unflatten(arrays, position):
    """Returns a position with the arrays that ``_flatten`` took from one like it."""
    state, set_scores = position
    arrays = {name: jax.device_put(array) for name, array in arrays.items()}
    fields = {name: arrays[f"state.{name}"] for name in _STATE}
    for name in _PARAMETERS:
        leaves, structure = jax.tree.flatten(getattr(state, name))
        leaves = [arrays[f"state.{name}.{number}"] for number in range(len(leaves))]
        fields[name] = jax.tree.unflatten(structure, leaves)
    state = state._replace(**fields)
    scores = tuple(arrays[f"scores.{n}"] for n in range(len(set_scores)))
    return Position(state, scores)


def _like(array, template):
    if array.shape != template.shape or array.dtype != template.dtype:
        raise ValueError(
            f"shape {array.shape} of {array.dtype}, expected {template.shape} of "
            f"{template.dtype}"
        )
    return array


def take_fingerprint(
    request: FitRequest, prepared: Prepared, job: Job, runner: Runner
) -> dict[str, Any]:
    """Returns what a run depends on: settings as JSON stores them, data as digests."""
    (loss, method), arrays = job.problem
    programs = [
        loss.value, loss.gradient, loss.hessian, loss.estimate, loss.curvature
    ]  # fmt: skip
    text = repr([program and program.structure for program in programs])
    described = re.sub(r" at 0x[0-9a-f]+", "", text)  # of functions within
    named: dict[str, Any] = {
        name: getattr(method, name)
        for name, setting in declared(RoundSettings).items()
        if not setting.traced and name not in _TRACED_TOO
    }
    for name, value in _name_numbers(arrays.numbers):
        assert name not in named, name  # or one would hide the other
        named[name] = value
    bins, names, begin = prepared.bins, prepared.feature_names, request.begin
    if isinstance(begin, MedianStart) or begin is None:
        begin = "auto" if begin is None else "median"
    found = {
        "jboost": library_version(),
        "jax": jax.__version__,
        "thresholds of x": _digest(replace(bins, absent="missing")),
        "absent": bins.absent,
        **_describe_rows("", job.rows, runner.read_codes()),
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
    for name, rows in job.sets.items():
        found |= _describe_rows(f"{name} ", rows, rows.read_codes())
    return json.loads(json.dumps(found))


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


def _describe_rows(prefix, rows: PaddedRows, codes):
    """Returns digests of rows without their padding; ``codes`` are read if dense."""
    size, data = rows.size, rows.data
    targets = jax.tree.map(lambda target: np.asarray(target)[:size], data.targets)
    sparse = data.codes.is_sparse
    return {
        f"{prefix}x": _digest(data.codes) if sparse else _digest_columns(codes),
        f"{prefix}y": _digest(targets),
        f"{prefix}sample_weight": _digest(np.asarray(data.weights)[:size]),
        f"{prefix}offset": _digest(np.asarray(rows.scores)[:, :size]),
    }


def _digest_columns(parts):
    """Digests codes by feature, however their rows are divided into parts."""
    columns = None
    for part in parts:
        columns = columns or [hashlib.sha256() for _ in part]
        for column, codes in zip(columns, part, strict=True):
            column.update(_as_bytes(codes))
    return _digest([column.hexdigest() for column in columns or ()])


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
        found.update(_as_bytes(array))
    return "sha256:" + found.hexdigest()


def _as_bytes(array):
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _compare(old, new, name):
    """Raises if fingerprints differ; names what differs."""
    old = old if isinstance(old, dict) else {}
    differing = []
    for key in {**new, **old}:
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        hidden = str(before).startswith("sha256:") or str(now).startswith("sha256:")
        differing.append(key if hidden else f"{key} (was {before!r}, is {now!r})")
    if differing:
        raise ValueError(
            f"checkpoint {name} is of another run: what differs is "
            f"{', '.join(differing)}; repeat the call that wrote it (num_rounds may be "
            f"raised), or give another path, with model=jb.load({name}) to go on from "
            "its model"
        )
