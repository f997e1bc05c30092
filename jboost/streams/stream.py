# SPDX-License-Identifier: Apache-2.0
"""Data larger than memory, as ``fit`` takes it in place of x and y; its memory plan."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jboost.boosting.state import StartPoint
from jboost.codes.bins import Bins
from jboost.entry import checks
from jboost.entry.exchanges import agree, gather_numbers, process_number
from jboost.entry.messages import show
from jboost.kernels.library import resolve_implementation
from jboost.streams.batches import RowBatch, as_source, checked_batches
from jboost.streams.block_rounds import (
    BlockRunner,
    GrownTrees,
    count_trees,
    make_programs,
    share_derivatives,
)
from jboost.streams.blocks import BlockSet
from jboost.streams.folders import (
    added_bytes,
    as_text,
    compile_ahead,
    count_bytes,
    read_bytes,
    trim_heap,
)
from jboost.streams.growth import make_grower
from jboost.streams.writing import (
    BlockTable,
    Options,
    load_rows,
    shape_rows,
    write_table,
)
from jboost.tables.domains import check_domain
from jboost.tables.frames import RowSource, Schema
from jboost.training.chunks import Job, no_trees
from jboost.training.preparing import TrainingRows, make_problem
from jboost.training.request import FitRequest
from jboost.training.starting import start_program

_WORDS = np.zeros(2, np.uint32)  # stands for a seed


class Plan(NamedTuple):
    """The bytes that a run holds at a time, by purpose.

    Attributes:
      rows: targets, weights, scores, minimizers and leaves of each row.
      rounds: the most that the programs of the start and of a round add.
      nodes: histograms of a level, and memory of the search for splits.
      blocks: codes of the blocks that are in memory.
      validation: the validation sets, with their codes.
    """

    rows: int
    rounds: int
    nodes: int
    blocks: int
    validation: int


_ADVICE = dict(
    rows="fewer rows",
    rounds="fewer rows or scores",
    nodes="shallower trees or fewer bins",
    blocks="smaller blocks (block_rows)",
    validation="smaller validation sets",
)  # ways to make each part of a plan smaller


def _plan_memory(job, blocks, memory, init_score):
    """Computes the bytes that a run takes; returns the parts of the plan by name.

    More than ``memory``, in this process or another one, is refused.
    """
    plan = _make_plan(job, blocks, init_score)
    needed, parts = sum(plan), plan._asdict()
    with agree():
        if needed > memory:
            listed = _list_parts(parts)
            largest = max(parts, key=lambda name: parts[name])
            raise ValueError(
                f"memory must be at least {needed} bytes ({as_text(needed)}) to train "
                f"on {blocks.num_rows} rows of {blocks.num_features} features "
                f"({listed}), got {as_text(memory)}; set stream.memory, which keeps "
                f"the blocks, or use {_ADVICE[largest]}"
            )
    trim_heap(needed)  # frees memory that the compiler used
    return parts


def _list_parts(plan):
    return ", ".join(f"{as_text(size)} for {name}" for name, size in plan.items())


def _make_plan(job, blocks, init_score):
    data, num_rows = job.rows.data, job.rows.offset.shape[1]
    method, limits = job.problem.method, job.problem.arrays.numbers.limits
    begin = StartPoint(init_score, _WORDS)
    start, operands = start_program(job, begin)
    starts, (state, *_) = compile_ahead(start, *operands)
    need = _measure_round(job, state)
    spread = job.rows.spread
    # Bytes of programs are those of one device, bytes of shapes those of all rows.
    devices = 1 if spread is None else len(spread.own)
    share = 1 if spread is None else devices / len(spread.shards.sizes)
    first, _ = job.rows.division
    grower = make_grower(method, blocks, num_rows, first)
    num_rows = round(share * num_rows)

    def count(arrays):
        return round(share * count_bytes(arrays))

    copies = 1 if spread is None else 2  # on the devices, and on the host
    held, moving = count(need.plan), grower.row_bytes() * num_rows
    starting = grower.start_bytes(need.measured, _WORDS, blocks.block_rows)
    rounds = max(
        devices * starts,
        devices * need.begin,
        held + devices * need.measure,
        held + copies * count(need.measured) + moving + starting,
        held + devices * need.fit,
        held + devices * need.end,
    )
    leaves, kept = 4 * count_trees(job) * num_rows, grower.kept_bytes() * num_rows
    leaves *= copies
    sets = [(rows.data, rows.offset) for rows in job.sets.values()]
    return Plan(
        rows=count((data, need.state)) + leaves + kept,
        rounds=rounds,
        nodes=grower.node_bytes(limits),
        blocks=grower.block_bytes(blocks),
        validation=count(sets),
    )


class _Need(NamedTuple):
    """Arrays that a round holds, and the bytes that each of its programs adds.

    Attributes:
      state: shapes of the state, which stays between rounds.
      plan: shapes of the arrays that stay during a round.
      measured: shapes of the arrays that stay while a tree grows.
    """

    state: Any
    plan: Any
    measured: Any
    begin: int
    measure: int
    fit: int
    end: int


def _measure_round(job, state):
    """Compiles the programs of a round, for shapes alone."""
    data, num_rows = job.rows.data, job.rows.offset.shape[1]
    programs, number, rate = make_programs(job), np.int32(0), np.float32(0)
    problem = job.problem
    begin = (problem.arrays, state)
    begun, (state, held) = compile_ahead(programs.begin, *begin)
    plan = share_derivatives(held)
    measuring, measured = compile_ahead(programs.measure, data, plan, number)
    trees, tree = _tree_shapes(job)
    spread = job.rows.spread

    def describe_leaves(*shape):
        place = None if spread is None else spread.place(len(shape) - 1)
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=place)

    leaf = describe_leaves(num_rows)
    fit = (problem.arrays, rate, state, plan, number, tree, leaf)
    sets = tuple(rows.data for rows in job.sets.values())
    steps = tuple(rows.offset for rows in job.sets.values())
    leaves: Any = describe_leaves(count_trees(job), num_rows)
    end = (problem.arrays, sets, state, steps, plan, GrownTrees(trees, leaves))
    return _Need(
        state=state,
        plan=held,
        measured=measured,
        begin=begun,
        measure=measuring,
        fit=added_bytes(programs.fit, *fit),
        end=added_bytes(programs.end, *end),
    )


def _tree_shapes(job):
    """Returns the trees of a round, and one of them before its leaves are fitted."""
    num_scores, limits = job.rows.offset.shape[0], job.problem.arrays.numbers.limits
    trees = jax.tree.map(lambda a: a[0], no_trees(job.problem.method, num_scores, 1))
    tree = jax.tree.map(lambda a: a[0], trees)._replace(sums=None)
    if limits.values is not None:
        bounds: Any = jax.ShapeDtypeStruct((*tree.leaf_value.shape, 2), np.float32)
        tree = tree._replace(bounds=bounds)
    return trees, tree


class Stream(RowSource):
    """Rows on disk, for training; see :func:`stream`.

    Attributes:
      memory: the most bytes to hold; may be changed.
      plan: the bytes that are used, by purpose; known before the first round, when
        ``fit(progress=True)`` prints it.
      source: a function that returns an iterator of batches.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(400, 3))
      >>> batches = jb.streams.array_batches(x, x[:, 0], batch_rows=100)
      >>> rows = jb.stream(batches, memory="64 MiB")
      >>> rows.memory
      67108864
    """

    def __init__(self, source, memory, directories, bins, block_rows):
        self.memory = memory
        self.plan: dict[str, int] = {}
        self.source: Callable[[], Iterator[Any]] = source
        self._directories: Sequence[str | os.PathLike[str]] | None = directories
        self._bins: Bins | None = bins
        self.has_bins = bins is not None
        self._block_rows: int | None = block_rows
        self._table: BlockTable | None = None

    def batches(
        self, schema: Schema, *, categorical: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields the checked rows of each batch to predict, and their offset."""
        for batch in checked_batches(self.source, schema, categorical):
            offset = batch.offset
            if offset is not None:
                offset = offset[0] if len(offset) == 1 else offset.T
            if len(batch.x):
                yield batch.x, offset

    @property
    def memory(self) -> int:
        """The most bytes to hold."""
        return self._memory

    @memory.setter
    def memory(self, value: int | str):
        self._memory = read_bytes(value)

    @property
    def disk_bytes(self) -> int:
        """The size of the files; 0 before they are written."""
        return 0 if self._table is None else self._table.blocks.num_bytes

    def prepare(
        self,
        max_bins: int,
        progress: bool = False,
        check: Callable[[RowBatch, int], None] = lambda batch, number: None,
        num_scores: int = 1,
        plan: Callable[[Bins, BlockSet, RowBatch], None] = lambda *rows: None,
    ) -> BlockTable:
        """Writes the blocks, unless they are written already.

        Args:
          check: called with each batch of the first pass, and its number; may raise.
          num_scores: the number of scores of the model to train.
          plan: called with the bins, the blocks that will be written, and one row,
            before files are written; may raise. Not called if ``bins`` were given,
            because the number of rows is then unknown.

        Raises:
          BlockError: files cannot be written.
          TypeError, ValueError: batches are malformed, or differ between passes; or
            ``memory`` cannot hold the values of all rows that stay in memory.
        """
        wanted = None if self._bins is not None else max_bins
        ready = self._table is not None and self._table.max_bins == wanted
        if not all(gather_numbers(int(ready))):  # some process reads its rows
            self._table = None  # removes its files
            options = Options(
                self.memory, self._directories, self._block_rows, progress, check,
                num_scores, plan,
            )  # fmt: skip
            self._table = write_table(self.source, self._bins, wanted, options)
        assert self._table is not None
        return self._table

    def prepare_training(self, request: FitRequest) -> TrainingRows:
        """Writes the rows to disk, and loads their values that stay in memory."""
        settings = request.settings
        table = self.prepare(
            settings.max_bins, request.progress, partial(_check_batch, request),
            settings.num_scores, partial(self._plan_ahead, request),
        )  # fmt: skip
        return TrainingRows(
            bins=replace(table.bins, absent=settings.absent or table.bins.absent),
            rows=load_rows(table, settings.num_scores, request.padded, request.mesh),
            schema=Schema(table.names),
            weighted=table.weighted,
            with_offset=table.num_offsets > 0,
            make_runner=partial(self._make_runner, table.blocks, request.progress),
        )

    def _plan_ahead(self, request, bins, blocks, first):
        """Raises if the plan does not fit, validation sets aside; writes no files."""
        settings, weighted = request.settings, first.weights is not None
        size = blocks.num_rows, settings.num_scores, request.padded
        training = TrainingRows(
            bins=bins,
            rows=shape_rows(first, *size, request.mesh),
            schema=Schema(first.names),
            weighted=weighted,
            with_offset=first.offset is not None,
            make_runner=partial(self._make_runner, blocks, False),
        )
        problem = make_problem(
            settings,
            request.loss,
            training.rows,
            bins,
            first.names,
            uniform=not weighted,
        )
        job = Job(problem, request.rates, training.rows, {}, {}, {})
        with resolve_implementation(jnp.zeros(1)):  # as training will
            _plan_memory(job, blocks, self.memory, request.begin)

    def _make_runner(self, blocks, progress, job, init_score):
        """Plans the memory of a run, and returns its runner."""
        self.plan = _plan_memory(job, blocks, self.memory, init_score)
        if progress and process_number() == 0:
            needed, memory = as_text(sum(self.plan.values())), as_text(self.memory)
            line = f"training takes {needed} of {memory}: {_list_parts(self.plan)}"
            tqdm.write(line, file=sys.stderr)
        return BlockRunner(job, blocks)

    def close(self) -> None:
        """Removes the files; they are written again when needed."""
        self._table = None


def _check_batch(request, batch, number):
    """Refuses columns and targets that do not suit a request."""
    if number == 0:
        request.check_columns(batch.x.shape[1], batch.names)
    weights = np.ones(len(batch.x)) if batch.weights is None else batch.weights
    num_scores = request.settings.num_scores
    name = f"y of batch {number}"
    check_domain(request.loss, batch.targets, weights, num_scores, name)


def stream(
    source: Any,
    *,
    memory: int | str,
    directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    bins: Bins | None = None,
    block_rows: int | None = None,
) -> Stream:
    """Trains on more rows than memory holds: pass the result to ``fit`` as x.

    The codes of the features (two bytes per value, or less) go to disk and are read
    once for every level of a tree. In memory stay a few numbers for each row: target,
    weight, score, derivatives; 60 to 90 bytes in all for one score, by loss, and about
    60 more for each further score. With the same thresholds (``bins``) the model is the
    same, bit for bit, as that of ``fit`` on arrays; in plain XLA, which compiles the
    parts of a round apart, the last bits of leaf values may differ.

    With ``fit(mesh=)`` of several processes, each streams its own rows; the order of
    all rows is that of the processes. A process without rows gives a batch without
    rows, which shows the columns.

    :func:`jboost.predict` takes streams, too, and works batch by batch. All other
    functions need rows in memory and refuse streams.

    Args:
      source: a callable that gives a new iterator of batches (x, y), (x, y,
        sample_weight) or (x, y, sample_weight, offset) each time; a list of such; or
        the result of :func:`array_batches` or :func:`parquet_batches`. It is read
        twice (once, if ``bins`` are given), and must give the same rows in the same
        order; checksums of both passes are compared. If x is a data frame, the model
        keeps the names of its columns.
      memory: the most memory that jboost may hold at a time, "512 MiB" or a number of
        bytes, in addition to the interpreter, the compiler and its programs (20 to 120
        MiB for any number of rows), and the source's own batches. Freed memory is
        returned to the system. ``fit`` refuses to train with less than it needs; the
        error states the number of bytes.
      directories: one or several folders (disks) for block files, filled in turn; by
        default the system's folder for temporary files. Block files are removed with
        the stream, at the end of the process, and on SIGTERM and SIGHUP unless the
        program handles these itself. SIGKILL leaves folders ``jboost-blocks-*`` behind,
        which the next stream with the same directories removes.
      bins: thresholds from :func:`fit_bins` or :func:`bins_from_sketch`; by default
        they come from a sketch of all rows.
      block_rows: the number of rows of a block; by default as many as fit an eighth of
        the budget, at most 262,144.

    Returns:
      A Stream: ``jb.fit(stream, loss=...)``. Several calls share its files.

    Raises:
      TypeError, ValueError: for bad arguments.

    Example:
      >>> import numpy as np, jboost as jb
      >>> def batches():
      ...     for seed in range(4):
      ...         x = np.random.default_rng(seed).normal(size=(100, 3))
      ...         yield x, x[:, 0] + x[:, 1] ** 2
      >>> rows = jb.stream(batches, memory="64 MiB")
      >>> model, history = jb.fit(rows, num_rounds=3, max_depth=3)
      >>> bool(history.train_loss[-1] < history.train_loss[0])
      True
    """
    folders = directories
    if isinstance(folders, str | os.PathLike):
        folders = (folders,)
    for folder in folders:
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"directories must be paths, got {show(folder)}")
    if bins is not None and not isinstance(bins, Bins):
        raise TypeError(f"bins must be Bins or None, got {type(bins).__name__}")
    if block_rows is not None:
        block_rows = checks.check_integer("block_rows", block_rows, least=1)
    return Stream(as_source(source), memory, tuple(folders), bins, block_rows)
