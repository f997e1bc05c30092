# SPDX-License-Identifier: Apache-2.0
"""The loops of the host: that of ``fit``, and that of new leaf values.

In: a training run before its next round. Out: its rounds, in the record. After each
round the host records losses and metrics, calls callbacks, shows progress and checks
early stopping; after some it writes a checkpoint. Where several processes train
together, the loss of one of them ends the others with the rounds so far.

``refit_rounds`` gives the rounds of a model new leaf values, round by round as in
training: ``fit`` calls it after rows were held out, and ``refit`` for any rows.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32
from tqdm import tqdm

from jboost.boosting.state import BoostState, Problem
from jboost.entry.context import use_implementation
from jboost.entry.decorators import fetch, is_out_of_memory
from jboost.entry.exchanges import (
    gather_numbers,
    gather_tables,
    has_failed,
    has_lost_others,
    is_preempted,
    meet,
    num_processes,
    process_number,
)
from jboost.entry.messages import show, warn_user
from jboost.model.ensemble import Ensemble, map_rounds
from jboost.model.predicting import leaf_indices
from jboost.numerics.arrays import pad_rows
from jboost.objective.faults import warn_of_lost_rows
from jboost.tables.frames import SourceError
from jboost.training.checkpoints import Checkpoint, write_checkpoint
from jboost.training.chunks import (
    MOST_ROUNDS,
    ArrayRunner,
    Chunk,
    Job,
    Position,
    Runner,
    move_bar,
    open_bar,
    pace_rounds,
    skip_to,
)
from jboost.training.metrics import Compared, describe_gaps, measure
from jboost.training.record import Record, Trained, TrainingError, TrainingInterrupted
from jboost.training.rows import PaddedRows
from jboost.training.starting import (
    describe_halt,
    describe_idleness,
    describe_limits,
    has_split,
)
from jboost.trees.slopes import GivenLeaves
from jboost.trees.tree import LeafSums, Tree

_SEEN = ("trees", "losses", "improvement", "parameters")
_MOST_LEAVES = 2**26  # leaf indices of all rows and rounds at a time
_FAILED = 2  # answer of a callback that raised; 0: go on, 1: stop


class FitRun(NamedTuple):
    """A training run before its next round.

    Attributes:
      runner: makes the rounds.
      position: the state before the next round.
      record: the rounds so far.
      patience: rounds without improvement after which the run stops; None: never.
      watchers: the callbacks.
      watched: whether some process has callbacks.
      checkpoint: the file that stores the run; None: no file.
      bar: shows progress.
    """

    job: Job
    runner: Runner
    position: Position
    record: Record
    patience: int | None
    watchers: tuple[Callable[..., Any], ...]
    watched: bool
    checkpoint: Checkpoint | None
    bar: tqdm


def run_rounds(run: FitRun) -> Trained:
    """Makes rounds until all are made or the run stops.

    Raises:
      TrainingError: a round failed.
      TrainingInterrupted: a signal (ctrl-C) ended the run.
    """
    try:
        kept = _train_until_over(run)
        _tell_gaps(run, kept)
        return Trained(run.record.model(kept), run.record.history(kept))
    except KeyboardInterrupt as interrupt:
        number = run.record.num_rounds
        raise TrainingInterrupted(
            f"training was interrupted in round {number}; {_tell_kept(run)}",
            number,
            model=run.record.model(number),
            history=run.record.history(),
        ).with_traceback(interrupt.__traceback__) from None


def _train_until_over(run):
    """Makes rounds; returns how many of them the model keeps."""
    try:
        _make_rounds(run)
    except TrainingError:
        raise
    except Exception as error:
        number = run.record.num_rounds
        if has_failed():
            reason = f"round {number} could not be finished"
        elif has_lost_others(error):
            reason = (
                f"process {process_number()} of {num_processes()} could not finish "
                f"round {number} with the others, one of which was probably lost "
                "(killed, out of memory, or its machine stopped)"
            )
        elif is_out_of_memory(error):
            reason = f"round {number} ran out of memory"
        else:
            raise
        message = f"{reason}: {error}; {_tell_kept(run)}"
        raise TrainingError(message, run.record, number) from error
    number = run.record.num_rounds
    return run.record.best_round() + 1 if run.patience else number


def _tell_gaps(run, kept):
    """Warns of rounds that could not be compared.

    Raises:
      TrainingError: early stopping found no round that it could keep.
    """
    record = run.record
    number = record.num_rounds
    if not record.set_names or number == 0:
        return
    name = record.set_names[0]
    rows = run.job.real.get(name, (None, None))
    compared = Compared(f"set {show(name)}", record.compared(), *rows)
    gaps = describe_gaps(record.by, [compared])
    if gaps is None:
        return
    if kept == 0:
        raise TrainingError(
            f"early stopping found no best round: {gaps}; pass another by, or rows on "
            f"which it is finite; {_tell_kept(run)}",
            record,
            number - 1,
        )
    warn_user(f"{gaps}; history.best_round is none of them")


def _make_rounds(run: FitRun) -> None:
    """Makes rounds, and records them."""
    record, position, num_rounds = run.record, run.position, len(run.job.rates)
    stopped, over, split = False, record.is_over(run.patience), record.restored > 0
    ends = halted = False
    sums = record.no_trees.sums
    calls = pace_rounds(
        num_rounds,
        first=record.num_rounds,
        most=run.runner.most_rounds,
        # A call ends where the run is written.
        every=None if run.checkpoint is None else run.checkpoint.every,
    )
    skip_to(run.bar, record.num_rounds)
    for first, count in () if over else calls:
        chunk = _make_chunk(run, position, first, count)
        position = Position(chunk.state, chunk.set_steps)
        made = jax.tree.map(lambda array: array[:count], chunk.trees)  # noqa: B023
        split, sums = split or bool(has_split(made)), made.sums
        halted = run.job.rates[first + count - 1] != 0 and not made.leaf_value[-1].any()
        for entry in range(count):
            ends = record.ends_at(np.asarray(chunk.losses[entry]), run.patience)
            if ends:
                break
            values = _record_round(run, chunk, entry)
            move_bar(run.bar, 1, values)
            stopped, over = _notify(run), record.is_over(run.patience)
            if stopped or over:
                break
        meet()  # something may have failed on one process
        if ends:  # a checkpoint keeps the rounds before, which end in the same way
            break
        preempted = is_preempted()
        if run.checkpoint is not None:
            here = position if record.num_rounds == first + count else None
            final = stopped or preempted or first + count == num_rounds
            _keep(run.checkpoint, record, here, over, final)
        if stopped or over:
            break
        if preempted and record.num_rounds < num_rounds:
            number = record.num_rounds - 1
            raise TrainingError(
                f"the run was preempted after round {number}; {_tell_kept(run)}",
                record,
                number,
            )
    if halted and record.num_rounds == num_rounds:
        last = jax.tree.map(lambda array: np.asarray(array[-1]), sums)
        reason = describe_halt(run.job.problem, run.job.rows, position.state, last)
        if reason is not None:
            warn_user(f"round {record.num_rounds - 1} learned nothing: {reason}")
    if record.num_rounds > 0 and not split:
        last = jax.tree.map(lambda array: np.asarray(array[-1]), sums)
        problem, rows = run.job.problem, run.job.rows
        reason = describe_no_split(record, problem, rows, position.state, last)
        if reason is not None:
            warn_user(reason)


def describe_no_split(
    record: Record,
    problem: Problem,
    rows: PaddedRows,
    state: BoostState,
    sums: LeafSums | None = None,
    place: str = "",
) -> str | None:
    """Explains why no tree of a run has a split; see :func:`describe_limits`."""
    reason = describe_limits(problem, rows, state, record.bins, sums)
    if reason is None:
        return None
    rounds = f"{record.num_rounds} round{'' if record.num_rounds == 1 else 's'}"
    return f"no tree of {rounds} has a split{place}: {reason}"


def _tell_kept(run):
    """Returns which rounds are left of a run that ends early, and how to go on."""
    if run.checkpoint is None:
        kept = "no file keeps them; fit(checkpoint=) writes one"
    else:
        kept = (
            f"checkpoint {os.fspath(run.checkpoint.path)!r} keeps {run.record.kept} "
            "rounds: the same call goes on from there, with any number of processes"
        )
    return f"the error's .model and .history hold the rounds before, and {kept}"


def _make_chunk(run: FitRun, position: Position, first: int, count: int) -> Chunk:
    """Makes rounds, and fetches the results that the host needs."""
    before = np.asarray(position.state.lost)
    meet()
    try:
        chunk = run.runner.run(position, first, count)
    except SourceError as error:
        raise TrainingError(
            f"the blocks of the stream could not be read in round {first}: {error}; "
            "the error's .model and .history hold the rounds before",
            run.record,
            first,
        ) from error
    seen = fetch({name: getattr(chunk, name) for name in _SEEN})
    every = (run.job.rows, *run.job.sets.values())
    snapshots = [
        rows.fetch(scores, axis=2)
        for rows, scores in zip(every, chunk.snapshots, strict=False)
    ]
    chunk = chunk._replace(**seen, snapshots=tuple(snapshots))
    _, num_rows = run.job.rows.division
    warn_of_lost_rows(before, np.asarray(chunk.state.lost), num_rows)
    begins = first == run.record.restored and run.job.rates[first] != 0
    if begins and not np.any(chunk.trees.leaf_value[0]):
        check_first(run.record, run.job.problem, run.job.rows, chunk.state)
    return chunk


def check_first(
    record: Record,
    problem: Problem,
    rows: PaddedRows,
    state: BoostState,
    place: str = "",
    *fold: int,
) -> None:
    """Raises if the first round added nothing because of the gradients of the loss.

    The scores are then still those of the start. They are taken from the state after
    the round, because runs on blocks overwrite the one before it.
    """
    reason = describe_idleness(problem, rows, state)
    if reason is not None:
        number = record.num_rounds
        message = f"training learned nothing in round {number}{place}: {reason}"
        raise TrainingError(message, record, number, fold)


def _keep(checkpoint, record, position, over, final):
    """Writes the run if it is due.

    If the disk is full, the run ends without losing rounds: the error has the model.
    """
    due = final or record.num_rounds % checkpoint.every == 0
    if not over and (position is None or not due):
        return
    position = None if over else position  # no round will follow
    try:
        write_checkpoint(checkpoint, record, position)
    except OSError as error:
        number = record.num_rounds - 1
        raise TrainingError(
            f"the checkpoint could not be written after round {number}: {error}; the "
            "error's .model and .history hold the rounds until then",
            record,
            number,
        ) from error


def _record_round(run, chunk, entry):
    """Appends one round to the record; returns the losses to show."""
    losses = np.asarray(chunk.losses[entry])
    improvement = chunk.improvement
    run.record.add(
        jax.tree.map(lambda array: np.asarray(array[entry]), chunk.trees),
        losses,
        _measure(run.job, chunk, entry, run.record),
        None if improvement is None else improvement[entry],
        jax.tree.map(lambda array: np.asarray(array[entry]), chunk.parameters),
    )
    return dict(zip(("train", *run.job.sets), losses.tolist(), strict=True))


def _notify(run):
    """Calls every callback; returns whether one, on any process, asks to stop."""
    if not run.watched:
        return False
    record = run.record
    done = record.num_rounds
    number, history, model = done - 1, record.history(), record.model(done)
    stops, failures = [], []
    try:
        # A callback may run programs on another platform than training does.
        with use_implementation(None):
            stops = [bool(watch(number, history, model)) for watch in run.watchers]
    except BaseException as error:
        failures.append(error)
    answers = gather_numbers(_FAILED if failures else int(any(stops)))
    if _FAILED in answers:
        rank = answers.index(_FAILED)
        where = "" if len(answers) == 1 else f" on process {rank}"
        if failures and not isinstance(failures[0], Exception):
            raise failures.pop()  # ctrl-C, or an exit
        what = "".join(f": {error!r}" for error in failures)
        if len(answers) == 1:
            what += "; to stop training without an error, return a true value"
        # Popped: its traceback holds this frame, and a cycle would keep the rows.
        raise TrainingError(
            f"a callback failed in round {number}{where}{what}", record, number
        ) from (failures.pop() if failures else None)
    return any(answers)


def _measure(job, chunk, entry, record):
    """Returns the metrics of one round on all sets, on the rows without padding."""

    def read_sets():
        every = (job.rows, *job.sets.values())
        for name, rows, scores in zip(job.real, every, chunk.snapshots, strict=True):
            # All processes use the rows of all, so that they stop after the same round.
            score = scores[entry]
            score = gather_tables(score[0] if score.shape[0] == 1 else score.T)
            targets, weights = job.real[name]
            whole = score, targets, weights
            own = whole
            if job.holds_out:  # functions may leave weights out
                counted = weights > 0
                own = jax.tree.map(lambda array, c=counted: array[c], whole)
            yield f"set {show(name)}", own, whole, rows.data.groups

    number = record.num_rounds
    fail = lambda message: TrainingError(message, record, number)  # noqa: E731
    return measure(job.metrics, read_sets(), number, fail)


def refit_rounds(
    model: Ensemble,
    tables: Sequence[Any],
    job: Job,
    state: BoostState,
    decay: float = 0.0,
    progress: bool = False,
) -> Ensemble:
    """Returns the model with new leaf values in all its rounds; see :func:`refit`.

    Args:
      tables: the tables of the rows of the job, one after the other, which determine
        their leaves.
      job: the rows, their loss and settings, and the learning rate of each round.
      state: the state of the rows before the first round.
      decay: the share of the old values that is kept.

    Raises:
      ValueError: a leaf value became infinite or NaN.
    """
    if job.problem.data.values is None:  # new leaves are constant
        model = replace(model, slopes=None, ranges=None)
    spread, runner = job.rows.spread, ArrayRunner(job)
    position = Position(state, ())
    old: Any = jax.tree.map(np.asarray, (model.leaf_value, model.slopes))
    values = old[0]
    sums = LeafSums(values, values, values, values[..., 0])
    none: Any = None
    every = Tree(none, none, none, values, sums, slopes=old[1])
    parts = [jax.tree.map(lambda array: array[:0], every)]  # no rounds
    first, before = 0, np.asarray(state.lost)
    with open_bar(model.num_rounds, progress) as bar:
        for leaves in find_leaves(model, tables, job.rows):
            count = len(leaves)
            runner.given = [
                GivenLeaves(
                    own if spread is None else spread.put(own, axis=1),
                    *jax.tree.map(lambda array, n=first + i: array[n], old),
                    np.float32(decay),  # type: ignore[arg-type]
                )
                for i, own in enumerate(leaves)
            ]
            chunk = runner.run(position, first, count)
            trees, position = chunk.trees, Position(chunk.state, ())
            bad = ~np.isfinite(np.asarray(trees.leaf_value)).all(axis=(1, 2))
            if bad.any():
                raise ValueError(
                    f"the leaf values of round {first + int(np.argmax(bad))} became "
                    "infinite or NaN: the loss diverges, or its gradient is NaN where "
                    "its value is finite; use a smaller learning_rate, or a larger "
                    "decay or l2"
                )
            before = _check_lost(before, chunk.state, job.rows)
            parts.append(trees)
            first += count
            bar.update(count)
    joined: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return replace(
        model,
        leaf_value=jax.device_put(joined.leaf_value),
        sums=LeafSums(*jax.device_put(tuple(joined.sums))),
        slopes=jax.device_put(joined.slopes),
        init_score=position.state.init_score,
    )


def _rounds_at_once(rows: PaddedRows) -> int:
    """Returns the number of rounds per computation of leaf indices."""
    return max(1, min(MOST_ROUNDS, _MOST_LEAVES // max(1, rows.offset.size)))


def find_leaves(
    model: Ensemble, tables: Sequence[Any], rows: PaddedRows
) -> Iterator[Int32[np.ndarray, "R S N"]]:
    """Yields the leaf of each row in each tree, for some rounds at a time.

    ``tables`` hold the rows, one after the other. Padding has the leaves of row 0; rows
    that are divided among devices have none.
    """
    total = rows.size if rows.spread is not None else rows.offset.shape[1]
    step = _rounds_at_once(rows)
    model = jax.tree.map(np.asarray, model)  # slices of NumPy arrays need no program
    for first in range(0, model.num_rounds, step):
        part = map_rounds(lambda array, f=first: array[f : f + step], model)
        found = np.concatenate([np.asarray(leaf_indices(part, x)) for x in tables])
        found = found.reshape(rows.size, -1, model.feature.shape[1])
        yield np.ascontiguousarray(pad_rows(found, total).transpose(1, 2, 0))


def _check_lost(before, state, rows: PaddedRows):
    """Warns of rows without derivatives; raises if they are all."""
    after, size = np.asarray(state.lost), int(np.count_nonzero(rows.real[1]))
    if after[1] >= size:
        raise ValueError(
            f"the leaf values of round {after[0] - 1} became so large that no row has "
            "finite derivatives: the loss diverges; use a smaller learning_rate, or a "
            "larger decay or l2"
        )
    warn_of_lost_rows(before, after, size)
    return after
