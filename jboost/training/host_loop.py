# SPDX-License-Identifier: Apache-2.0
"""The loop of ``fit``: chunks of rounds, and what the host does between them.

In: a training run before its first round. Out: its rounds, in the record. After each
round the host looks at losses, metrics, callbacks, progress and early stopping; after
some it writes a checkpoint.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from jboost.boosting.rounds import BoostState
from jboost.entry.implementation import use_implementation
from jboost.streams.block_rounds import BlockRun
from jboost.streams.blocks import BlockError
from jboost.training.checkpoints import Checkpoint, write_checkpoint
from jboost.training.chunks import (
    MOST_ROUNDS,
    Job,
    describe_idleness,
    run_chunk,
    start_scores,
)
from jboost.training.history import Record, TrainingError, explain_divergence
from jboost.training.scoring import SIGNATURE, evaluate_metric

_CHUNK_SECONDS = 0.5  # how long a call should take, so that progress moves


class Position(NamedTuple):
    """Where a run is: what the next round begins with.

    Attributes:
      state: of the training rows.
      set_scores: of each validation set, [K, N].
    """

    state: BoostState
    set_scores: tuple[Array, ...]


def first_position(job: Job, state: BoostState) -> Position:
    """Before the first round: all rows have the initial score."""
    return Position(state, tuple(map(partial(start_scores, state), job.sets.values())))


def run_rounds(
    job: Job,
    blocks: BlockRun | None,
    position: Position,
    record: Record,
    patience: int | None,
    watchers: tuple[Callable[..., Any], ...],
    checkpoint: Checkpoint | None,
    bar: tqdm,
) -> int:
    """Runs rounds until done or stopped; returns how many the model keeps."""
    num_rounds, most, stopped = len(job.rates), 1, False
    over = _is_over(record, patience)
    while record.num_rounds < num_rounds and not (stopped or over):
        count = min(most, num_rounds - record.num_rounds)
        if checkpoint is not None:  # a chunk ends where the run is written
            count = min(count, checkpoint.every - record.num_rounds % checkpoint.every)
        begun, last = time.perf_counter(), record.num_rounds + count
        chunk = _run(job, blocks, position, record, count)
        position = Position(chunk.state, chunk.set_scores)
        fields = ("trees", "losses", "snapshots", "improvement", "parameters")
        seen = jax.device_get({name: getattr(chunk, name) for name in fields})
        chunk = chunk._replace(**seen)
        if not record.trees:
            _check_first(job, chunk, record)
        while record.num_rounds < last and not (stopped or over):
            _look(job, chunk, count - last + record.num_rounds, record, bar)
            stopped, over = _notify(watchers, record), _is_over(record, patience)
        if checkpoint is not None:
            here = position if record.num_rounds == last else None
            _keep(checkpoint, record, here, over, stopped or last == num_rounds)
        seconds = time.perf_counter() - begun
        if blocks is not None:
            continue  # one round at a time
        if seconds < _CHUNK_SECONDS / 2:
            most = min(MOST_ROUNDS, 2 * most)
        elif seconds > 2 * _CHUNK_SECONDS:
            most = max(1, most // 2)
    number = record.num_rounds
    return record.best_round(number) + 1 if patience else number


def _check_first(job, chunk, record):
    """Raises if the first round added nothing because of the loss's gradients.

    The scores are then still those of the start, whose buffers streams have reused.
    """
    number = record.num_rounds
    if np.any(chunk.trees.leaf_value[0]) or job.rates[number] == 0:
        return
    reason = describe_idleness(
        job.loss, job.constants, job.method, job.rows.data, chunk.state
    )
    if reason is not None:
        raise TrainingError(
            f"training learned nothing in round {number}: {reason}", record, number
        )


def _is_over(record, patience):
    """Whether early stopping ends the run."""
    number = record.num_rounds
    if not patience or number == 0:
        return False
    return number - 1 - record.best_round(number) >= patience


def _keep(checkpoint, record, position, over, final):
    """Writes the run, if it is time; what is trained outlives a full disk."""
    if over:
        state, set_scores = None, ()  # no round will follow
    elif position and (final or record.num_rounds % checkpoint.every == 0):
        state, set_scores = position
    else:
        return
    try:
        write_checkpoint(checkpoint, record, state, set_scores)
    except OSError as error:
        number = record.num_rounds - 1
        raise TrainingError(
            f"the checkpoint could not be written after round {number}: {error}; the "
            "error's .model and .history hold the rounds until then",
            record,
            number,
        ) from error


def _run(job, blocks, position, record, count):
    """Makes rounds; a damaged file of blocks spoils its round alone."""
    (state, set_scores), number = position, record.num_rounds
    if blocks is None:
        return run_chunk(job, state, set_scores, number, count)
    try:
        return blocks.run_round(state, set_scores, number)
    except BlockError as error:
        raise TrainingError(
            f"the blocks of the stream could not be read in round {number}: {error}; "
            "the error's .model and .history hold the rounds before",
            record,
            number,
        ) from error


def _look(job, chunk, entry, record, bar):
    """Takes one round into the record."""
    number = record.num_rounds
    train_loss, *set_losses = np.asarray(chunk.losses[entry]).tolist()
    if not np.isfinite(train_loss):
        raise TrainingError(
            f"the loss of the training rows became {train_loss} in round {number}; "
            f"{explain_divergence(record.train_loss, train_loss)}; the error's .model "
            "and .history hold the rounds before",
            record,
            number,
        )
    values = _measure(job, chunk, entry, record)
    record.trees.append(
        jax.tree.map(lambda array: np.asarray(array[entry]), chunk.trees)
    )
    record.train_loss.append(train_loss)
    record.set_losses.append(np.array(set_losses))
    record.metrics.append(values)
    record.parameters.append(
        jax.tree.map(lambda array: np.asarray(array[entry]), chunk.parameters)
    )
    if chunk.improvement is not None:
        record.improvement.append(float(chunk.improvement[entry]))
    shown = {"train": f"{train_loss:.5g}"}
    shown |= {n: f"{v:.5g}" for n, v in zip(job.sets, set_losses, strict=True)}
    bar.set_postfix(shown, refresh=False)
    bar.update()


def _notify(watchers, record):
    """Calls every callback; whether one asks to stop."""
    if not watchers:
        return False
    done = record.num_rounds
    number, history, model = done - 1, record.history(done), record.model(done)
    try:
        # Programs that a callback runs may belong on another platform than training.
        with use_implementation(None):
            stops = [bool(watch(number, history, model)) for watch in watchers]
    except Exception as error:
        raise TrainingError(
            f"a callback failed in round {number}: {error!r}", record, number
        ) from error
    return any(stops)


def _measure(job, chunk, entry, record):
    """{set: {metric: value}} of one round, on the real rows."""
    values: dict[str, dict[str, float]] = {}
    every = {"train": job.rows, **job.sets} if job.metrics else {}
    for (name, rows), scores in zip(every.items(), chunk.snapshots, strict=True):
        score = scores[entry, :, : rows.size]
        score = score[0] if score.shape[0] == 1 else score.T
        arguments = (score, *rows.real)
        values[name] = {}
        for metric, function in job.metrics.items():
            try:
                values[name][metric] = evaluate_metric(function, arguments)
            except Exception as error:
                number = record.num_rounds
                raise TrainingError(
                    f"metrics[{metric!r}] failed in round {number} on set {name!r}: "
                    f"{error!r}; it is called as {SIGNATURE}",
                    record,
                    number,
                ) from error
    return values
