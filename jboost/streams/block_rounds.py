# SPDX-License-Identifier: Apache-2.0
"""Rounds of boosting on blocks of rows, and the memory that they take.

In: a training run whose codes lie in files. Out: one round at a time, of the same
trees, scores and losses as ``chunks`` gives for arrays. Derivatives, sampling, leaf
values and scores are computed by the same traced functions as there, on arrays of all
rows; only the splits are found block by block.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jboost.boosting.reports import report_round
from jboost.boosting.rounds import (
    BoostState,
    begin_round,
    end_round,
    fit_leaves,
    init_state,
    shaping_derivatives,
    shaping_limits,
)
from jboost.entry.programs import added_bytes, count_bytes, program, run
from jboost.streams.block_rows import Derivatives, make_way
from jboost.streams.block_trees import count_node_bytes, grow_blocks
from jboost.streams.blocks import NUM_BUFFERS, BlockReader, aligned_empty
from jboost.streams.heap import trim_heap
from jboost.streams.streaming import Stream, Table, as_text
from jboost.training.chunks import Chunk, Job, no_trees, start_program
from jboost.trees.initial import MedianStart
from jboost.trees.levels import measure_rows

_STATE = (3,)  # the operand that _begin and _end update in place


class Plan(NamedTuple):
    """How many bytes a run holds at a time, and what for.

    Attributes:
      rows: what stays of each row: targets, weights, scores, minima, leaves.
      rounds: the most that the programs of the start and of a round add to it.
      nodes: histograms of a level, and what the search for splits adds.
      blocks: codes of the blocks that are in memory.
      validation: the sets that are looked at, codes and all.
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
)  # what makes each part of a plan smaller


def plan_run(
    job: Job, table: Table, stream: Stream, init_score: Array | MedianStart | None
) -> "BlockRun":
    """Finds out what memory a run takes, from its compiled programs.

    Raises:
      ValueError: more than the stream may take.
    """
    blocks = table.blocks
    plan = _make_plan(job, blocks, init_score)
    needed, size = sum(plan), blocks.num_rows
    if needed > stream.memory:
        parts = plan._asdict()
        listed = ", ".join(f"{as_text(v)} for {k}" for k, v in parts.items())
        largest = max(parts, key=lambda name: parts[name])
        raise ValueError(
            f"memory must be at least {needed} bytes ({as_text(needed)}) to train on "
            f"{size} rows of {blocks.num_features} features ({listed}), got "
            f"{as_text(stream.memory)}; set stream.memory, which keeps the blocks, or "
            f"use {_ADVICE[largest]}"
        )
    stream.plan = plan._asdict()
    trim_heap(needed)  # of what the compiler took
    return BlockRun(job, BlockReader(blocks))


def _make_plan(job, blocks, init_score):
    data, method, num_scores = job.rows.data, job.method, job.rows.scores.shape[0]
    num_rows, programs = job.rows.scores.shape[1], _plan_programs(job)
    kept = count_bytes(programs["state"]), count_bytes(programs["now"])
    way = make_way(method, blocks, num_rows)
    words = np.zeros(2, np.uint32)
    start, operands = start_program(job, init_score, words)
    measured = programs["measured"]
    prepared = way.prepare_bytes(measured, words, blocks.block_rows)
    rounds = max(
        added_bytes(start.lower(*operands).compile()),  # jit compiles it no more
        programs["begin"],
        kept[1] + programs["measure"],
        kept[1] + count_bytes(measured) + way.row_bytes() * num_rows + prepared,
        kept[1] + way.row_bytes() * num_rows + programs["fit"],
        kept[1] + programs["end"],
    )
    dtype, most = blocks.dtype, blocks.block_rows
    buffers = (NUM_BUFFERS * blocks.num_features + 2) * most * dtype.itemsize
    sets = [(rows.data, rows.scores, rows.scores) for rows in job.sets.values()]
    return Plan(
        rows=count_bytes((data, job.rows.scores)) + kept[0] + 4 * num_scores * num_rows,
        rounds=rounds,
        nodes=count_node_bytes(way, job.method, job.numbers.limits),
        blocks=buffers + way.pass_bytes(most, dtype),
        validation=count_bytes(sets),
    )


def _plan_programs(job):
    """What each program of a round adds to memory, and what two of them give."""
    data, loss, method = job.rows.data, job.loss, job.method
    num_scores, num_rows = job.rows.scores.shape
    static, number, rate = (loss, method), np.int32(0), np.float32(0)
    words, shape = np.zeros(2, np.uint32), jax.ShapeDtypeStruct
    begin = partial(init_state, loss)
    state = jax.eval_shape(begin, job.constants, data, job.rows.scores, None, words)
    operands = (job.constants, job.numbers, data, state)
    started = program(_begin, static, *operands, donate=_STATE)
    state, now = jax.eval_shape(partial(_begin, *static), *operands)
    held, now = now, _share(now)
    measure = (data, now, number)
    trees = jax.tree.map(lambda array: array[0], no_trees(method, num_scores, 1))
    tree = jax.tree.map(lambda array: array[0], trees)._replace(sums=None)
    if job.numbers.limits.values is not None:
        bounds = shape((*tree.leaf_value.shape, 2), np.float32)
        tree = tree._replace(bounds=bounds)
    leaf = shape((num_rows,), np.int32)
    fit = (job.constants, rate, data, state, now, number, tree, leaf)
    sets = tuple(rows.data for rows in job.sets.values())
    scores = tuple(rows.scores for rows in job.sets.values())
    leaves = shape((num_scores, num_rows), np.int32)
    end = (job.constants, data, sets, state, scores, now, trees, leaves)
    return dict(
        state=state,
        now=held,
        measured=jax.eval_shape(partial(_measure, method), *measure),
        begin=added_bytes(started),
        measure=added_bytes(program(_measure, (method,), *measure)),
        fit=added_bytes(program(_fit, static, *fit)),
        end=added_bytes(program(_end, (*static, *_reports(job)), *end, donate=_STATE)),
    )


class BlockRun:
    """A training run on blocks; ``job`` as for arrays, without codes."""

    def __init__(self, job: Job, reader: BlockReader):
        self.job, self.reader = job, reader
        num_scores, num_rows = job.rows.scores.shape
        self._leaf = aligned_empty((num_scores, num_rows), np.int32)

    def run_round(
        self, state: BoostState, set_scores: tuple[Array, ...], number: int
    ) -> Chunk:
        """Makes one round; the chunk has one entry.

        Raises:
          BlockError: a block cannot be read.
        """
        job = self.job
        data, loss, method = job.rows.data, job.loss, job.method
        static, rate = (loss, method), np.float32(job.rates[number])
        self._trim(state)  # after the start, or the round before
        operands = (job.constants, job.numbers, data, state)
        state, now = run(_begin, static, *operands, donate=_STATE)
        now, trees = _share(now), []
        self._trim(now)
        for k, leaf in enumerate(self._leaf):
            each, words = np.int32(k), np.asarray(now.seeds)[k]
            measure = partial(run, _measure, (method,), data, now, each)
            tree = grow_blocks(self.reader, method, words, measure, leaf)
            self._trim(tree)
            operands = (job.constants, rate, data, state, now, each, tree, leaf)
            trees.append(run(_fit, static, *operands))
            self._trim(trees[-1])
        trees = jax.tree.map(lambda *arrays: np.stack(arrays), *trees)
        sets = tuple(rows.data for rows in job.sets.values())
        state, report = run(
            _end, (*static, *_reports(job)),
            job.constants, data, sets, state, set_scores, now, trees, self._leaf,
            donate=_STATE,
        )  # fmt: skip

        def alone(array) -> Any:
            return np.asarray(array)[None]

        return Chunk(
            state=state,
            set_scores=report.set_scores,
            trees=jax.tree.map(alone, trees),
            losses=alone(report.losses),
            snapshots=jax.tree.map(alone, report.snapshots),
            improvement=jax.tree.map(alone, report.improvement),
            parameters=jax.tree.map(alone, state.parameters),
        )

    def _trim(self, results):
        """Waits for a program, so that the next one finds its memory freed."""
        jax.block_until_ready(results)
        trim_heap(self._leaf.nbytes)


def _reports(job):
    """Whether scores are kept for metrics, and whether rows are left out of the bag."""
    return bool(job.metrics), bool(job.numbers.subsample < 1)


def _begin(loss, method, constants, numbers, data, state):
    """As ``begin_round``; derivatives that are needed twice are returned once."""
    state, now = begin_round(loss, constants, method, numbers, data, state)
    return state, now._replace(fitted=None) if now.fitted is now.shape else now


def _share(now):
    """The whole round, of what ``_begin`` returned."""
    return now._replace(fitted=now.shape) if now.fitted is None else now


def _pick(now, k):
    return jax.tree.map(lambda array: array[k], now.trees())


def _measure(method, data, now, k):
    _, _, shape, fitted = _pick(now, k)
    gradient, curvature = shaping_derivatives(data, now, shape)
    return Derivatives(
        gradient,
        curvature,
        now.in_bag,
        measure=measure_rows(gradient, curvature, now.in_bag, method.uniform),
        limits=shaping_limits(now.limits, shape, fitted),
    )


def _fit(loss, method, constants, rate, data, state, now, k, tree, leaf):
    one = _pick(now, k)
    return fit_leaves(loss, constants, method, rate, data, state, now, one, tree, leaf)


def _end(
    loss, method, keep, bagged,
    constants, data, sets, state, set_scores, now, trees, leaf,
):  # fmt: skip
    """The state after a round, and what is looked at then."""
    before = state
    state = end_round(loss, constants, method, data, state, now, trees, leaf)
    return state, report_round(
        loss, constants, method, keep, data, sets, before, state, set_scores, trees,
        now.in_bag if bagged else None,
    )  # fmt: skip
