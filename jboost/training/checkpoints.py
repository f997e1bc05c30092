# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run of ``fit`` in a file, from which the same call continues.

In: a run after some rounds. Out: a file with what the next round needs and what cannot
be computed from the data: trees, history, a few numbers; and with a fingerprint of
data, loss and settings, so that no other run continues from it. The size of the file
does not grow with the rows: scores are computed from the trees when a run goes on.
Early stopping needs the history only, and random numbers depend on seed and round
alone. Of several processes, process 0 reads and writes the file.
"""

import io
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.entry.exchanges import (
    run_on_first,
)
from jboost.model.containers import (
    Container,
    FileError,
    read_container,
    write_container,
)
from jboost.model.files import pack, unpack
from jboost.training.chunks import Job, Position
from jboost.training.continuing import add_model
from jboost.training.fingerprints import Fingerprint, compare_fingerprints
from jboost.training.record import Record

_STATE = (
    "init_score", "pointed", "endless", "least_rows", "first_mean", "concentration",
    "round",
)  # fmt: skip
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
    fingerprint: Fingerprint
    rates: np.ndarray


def write_checkpoint(
    checkpoint: Checkpoint, record: Record, position: Position | None
) -> None:
    """Writes a run, replacing the file if it exists; notes it in the record.

    Args:
      position: where the next round begins; None for a run that is over.

    Raises:
      OSError: it cannot be written.
    """
    run_on_first(partial(_write, checkpoint, record, position))
    record.kept = record.num_rounds


def _write(checkpoint, record, position) -> None:
    model = pack(record.model(record.num_rounds), "model.")
    arrays = dict(model.arrays)
    arrays["rates"] = checkpoint.rates[: record.num_rounds]
    settings, blocks = checkpoint.fingerprint
    for name, value in record.table().items():
        arrays[f"history.{name}"] = value
    for name, value in blocks.items():
        arrays[f"blocks.{name}"] = value
    if position is not None:
        arrays |= _flatten(position.state)
    fields = {**model.fields, "fingerprint": settings}
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
    settings = container.fields.get("fingerprint")
    blocks = {
        key.removeprefix("blocks."): words
        for key, words in container.arrays.items()
        if key.startswith("blocks.")
    }
    if not isinstance(settings, dict) or not blocks:
        raise ValueError(
            f"checkpoint {name} was written by {container.written_by} in an older "
            "format, whose digests of the rows cannot be compared; give another path, "
            f"with model=jb.load({name}) to go on from its model"
        )
    old = Fingerprint(settings, blocks)
    compare_fingerprints(old, checkpoint.fingerprint, name)
    if "rates" in container.arrays:
        _compare_rates(container.arrays["rates"], checkpoint.rates, name)
    return container


def _read(path) -> bytes | None:
    _remove_parts(path)
    return path.read_bytes() if path.exists() else None


def resume(
    container: Container, record: Record, position: Position, job: Job, xs: Any
) -> Position:
    """Fills the record, and returns the position after its rounds.

    Args:
      container: from :func:`read_checkpoint`.
      record: before its first round.
      position: before the first round.
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
    """Returns the arrays of a state whose size does not grow with the rows."""
    arrays = {f"state.{name}": np.asarray(getattr(state, name)) for name in _STATE}
    for name in _PARAMETERS:
        for number, leaf in enumerate(jax.tree.leaves(getattr(state, name))):
            arrays[f"state.{name}.{number}"] = np.asarray(leaf)
    return arrays


def _unflatten(arrays, state):
    """Returns a state with the arrays that ``_flatten`` took from one like it."""
    found = {
        key: jax.device_put(_like(arrays[key], value))
        for key, value in _flatten(state).items()
    }
    fields = {name: found[f"state.{name}"] for name in _STATE}
    for name in _PARAMETERS:
        leaves, structure = jax.tree.flatten(getattr(state, name))
        leaves = [found[f"state.{name}.{number}"] for number in range(len(leaves))]
        fields[name] = jax.tree.unflatten(structure, leaves)
    return state._replace(**fields)


def _like(array, template):
    if array.shape != template.shape or array.dtype != template.dtype:
        raise ValueError(
            f"shape {array.shape} of {array.dtype}, expected {template.shape} of "
            f"{template.dtype}"
        )
    return array


def _remove_parts(path: Path) -> None:
    """Removes temporary files of killed processes that were writing to this path."""
    path = Path(os.path.realpath(path))
    for part in path.parent.glob(f".{_glob_escape(path.name)}.*.part"):
        with suppress(OSError):
            part.unlink()


def _glob_escape(name):
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
