# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a training run on blocks, before the run takes any.

In: a training run, its blocks, and how many bytes it may take. Out: how many bytes it
needs, and for what; the sizes come from the compiled programs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.boosting.state import StartPoint
from jboost.entry.exchanges import (
    agree,
)
from jboost.streams.block_rounds import (
    GrownTrees,
    count_trees,
    make_programs,
    share_derivatives,
)
from jboost.streams.block_trees import make_grower
from jboost.streams.blocks import BlockSet
from jboost.streams.heap import trim_heap
from jboost.streams.memory import added_bytes, as_text, count_bytes
from jboost.training.chunks import Job, no_trees
from jboost.training.starting import start_program

_WORDS = np.zeros(2, np.uint32)  # stands for a seed


class Plan(NamedTuple):
    """The bytes that a run holds at a time, by purpose.

    Attributes:
      rows: what stays in memory of each row: targets, weights, scores, minimizers,
        leaves.
      rounds: the most that the programs of the start and of a round add.
      nodes: histograms of a level, and what the search for splits adds.
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
)  # what makes each part of a plan smaller


def plan_memory(
    job: Job, blocks: BlockSet, memory: int, init_score: Any
) -> dict[str, int]:
    """Finds out how many bytes a run takes; returns the parts of the plan by name.

    Raises:
      ValueError: it takes more than ``memory``, in this process or another one.
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
    trim_heap(needed)  # of what the compiler took
    return parts


def describe_plan(plan: dict[str, int], memory: int) -> str:
    """Returns a line that says what a plan takes of the memory."""
    needed = as_text(sum(plan.values()))
    return f"training takes {needed} of {as_text(memory)}: {_list_parts(plan)}"


def _list_parts(plan):
    return ", ".join(f"{as_text(size)} for {name}" for name, size in plan.items())


def _make_plan(job, blocks, init_score):
    data, num_rows = job.rows.data, job.rows.offset.shape[1]
    method, limits = job.problem.method, job.problem.arrays.numbers.limits
    begin = StartPoint(init_score, _WORDS)
    start, operands = start_program(job, begin)
    state, *_ = jax.eval_shape(partial(start), *operands)
    need = _measure_round(job, state)
    spread = job.rows.spread
    # Programs tell what one device takes, and shapes what all rows take.
    devices = 1 if spread is None else len(spread.own)
    share = 1 if spread is None else devices / len(spread.shards.sizes)
    first, _ = job.rows.division
    grower = make_grower(method, blocks, num_rows, first)
    num_rows = round(share * num_rows)

    def count(arrays):
        return round(share * count_bytes(arrays))

    copies = 1 if spread is None else 2  # on the devices, and on the host
    held, moving = count(need.now), grower.row_bytes() * num_rows
    starting = grower.start_bytes(need.measured, _WORDS, blocks.block_rows)
    rounds = max(
        devices * added_bytes(start, *operands),
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
    """What a round holds, and what each of its programs adds in bytes.

    Attributes:
      state: shapes of the state, which stays between rounds.
      now: shapes of what stays during a round.
      measured: shapes of what stays while a tree grows.
    """

    state: Any
    now: Any
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
    begun = added_bytes(programs.begin, *begin)
    state, held = jax.eval_shape(partial(programs.begin), *begin)
    now = share_derivatives(held)
    measure = (data, now, number)
    trees, tree = _tree_shapes(job)
    leaf = jax.ShapeDtypeStruct((num_rows,), np.int32)
    fit = (problem.arrays, rate, state, now, number, tree, leaf)
    sets = tuple(rows.data for rows in job.sets.values())
    steps = tuple(rows.offset for rows in job.sets.values())
    leaves: Any = jax.ShapeDtypeStruct((count_trees(job), num_rows), np.int32)
    end = (problem.arrays, sets, state, steps, now, GrownTrees(trees, leaves))
    return _Need(
        state=state,
        now=held,
        measured=jax.eval_shape(partial(programs.measure), *measure),
        begin=begun,
        measure=added_bytes(programs.measure, *measure),
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
