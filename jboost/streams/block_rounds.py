# SPDX-License-Identifier: Apache-2.0
"""Rounds of boosting on blocks of rows that lie on disk.

The trees, scores and losses are those that ``chunks`` gives for arrays. Derivatives,
sampling, leaf values and scores are computed by the same traced functions, on arrays of
all rows; only the splits are found block by block.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int32, Shaped

from jboost.boosting.derivatives import (
    Projection,
    RoundPlan,
    RowDerivatives,
    choose_scaling,
    differentiate,
    shaping_derivatives,
    shaping_limits,
    start_round,
)
from jboost.boosting.first_sums import measure_first
from jboost.boosting.reports import Report, add_to_sets, report_round
from jboost.boosting.round import (
    add_trees,
    find_own_steps,
    fit_leaves,
    fit_trees,
    shorten_together,
    sum_leaves,
    sum_shared_leaves,
)
from jboost.boosting.sharding import (
    EVERYWHERE,
    rows_of,
    spec_of_data,
    spec_of_state,
)
from jboost.boosting.state import Problem
from jboost.entry.context import current_implementation
from jboost.entry.decorators import fetch
from jboost.entry.programs import Compiled, compiled
from jboost.streams.blocks import BlockReader, BlockSet, aligned_empty
from jboost.streams.folders import trim_heap
from jboost.streams.growth import Derivatives, grow_blocks, make_grower
from jboost.training.chunks import Chunk, Job, Position, choose_effort
from jboost.training.sharded import compile_shards, fill_spec, spec_of_arrays
from jboost.trees.rounding import measure_rows
from jboost.trees.tree import Tree


class Programs(NamedTuple):
    """The programs of a round, in the order of their calls.

    Attributes:
      begin: computes derivatives and samples rows, once per round.
      measure: returns the derivatives for the splits of one tree.
      fit: computes the leaf values of this tree.
      end: computes the scores after the round and the losses, once per round.
    """

    begin: Compiled
    measure: Compiled
    fit: Compiled
    end: Compiled


class GrownTrees(NamedTuple):
    """The T trees of a round, and the leaf of each row."""

    trees: Tree
    leaf: Int32[Array, "T N"]


def make_programs(job: Job) -> Programs:
    """Returns the programs of a run, not yet compiled."""
    static, spread = job.problem.static, job.rows.spread
    # The kernels measure rows without a copy, but only those of one process.
    native = current_implementation() == "cpu" and spread is None
    effort = choose_effort(job.problem, job.rows.padded)  # as for arrays
    make = partial(_compile, spread, static.method, effort=effort)
    return Programs(  # begin and end update the state in place
        begin=make(_begin, static, donate=(1,)),
        measure=make(_measure, static.method, native),
        fit=make(_fit, static),
        end=make(_end, static, job.reports, donate=(2,)),
    )


def _compile(spread, method, function, *static, **options):
    if spread is None:
        return compiled(function, *static, **options)
    specs, results = _describe_operands(spread.shards, method)[function.__name__]
    return compile_shards(function, static, spread, specs, results, **options)


def _describe_operands(shards, method):
    """Returns how the operands and results of each program are divided."""
    rows, columns, same = rows_of(shards), rows_of(shards, 1), EVERYWHERE
    data, state = spec_of_data(shards), spec_of_state(shards)
    arrays = spec_of_arrays(shards)
    both = fill_spec(
        RowDerivatives, gradient=columns, curvature=columns, factor=columns,
        known=columns,
    )  # fmt: skip
    plan = fill_spec(RoundPlan, for_splits=both, for_leaves=both, in_bag=rows)
    if method.share_structure:
        plan = plan._replace(projection=Projection(both, fill_spec(RowDerivatives)))
    once = method.leaf_curvature == method.curvature
    begun = plan._replace(for_leaves=same) if once else plan
    measured = fill_spec(Derivatives, gradient=rows, curvature=rows, in_bag=rows)
    grown = fill_spec(GrownTrees, leaf=columns)
    report = fill_spec(Report, snapshots=rows_of(shards, 2))
    return dict(
        _begin=((arrays, state), (state, begun)),
        _measure=((data, plan, same), measured),
        _fit=((arrays, same, state, plan, same, same, rows), same),
        _end=(
            (arrays, data, state, columns, plan, grown),
            (same, state, columns, report),
        ),
    )


class BlockRunner:
    """Makes rounds on blocks; the rows of ``job`` have no codes.

    The blocks are those of this process. If a mesh holds the rows, its devices compute
    everything except the splits.
    """

    most_rounds = 1

    def __init__(self, job: Job, blocks: BlockSet):
        self.job, self.reader = job, BlockReader(blocks)
        self.programs = make_programs(job)
        num_rows, num_trees = job.rows.offset.shape[1], count_trees(job)
        own = num_rows if job.rows.spread is None else blocks.num_rows
        self._leaf = aligned_empty((num_trees, own), np.int32)
        first, _ = job.rows.division
        self._grower = make_grower(job.problem.method, blocks, num_rows, first)

    def run(self, position: Position, first: int, count: int) -> Chunk:
        """Makes round ``first``; the chunk has one entry."""
        assert count == 1
        job, (state, set_steps) = self.job, position
        arrays = job.problem.arrays
        jax.block_until_ready(state)  # the start, or the round before
        trim_heap(self._leaf.nbytes)
        state, plan = self.programs.begin(arrays, state)
        plan = jax.block_until_ready(share_derivatives(plan))
        rate = np.float32(job.rates[first])
        trees = [self._grow(k, rate, state, plan) for k in range(len(self._leaf))]
        trees = jax.tree.map(lambda *arrays: np.concatenate(arrays), *trees)
        sets = tuple(rows.data for rows in job.sets.values())
        grown = GrownTrees(trees, self._put(self._leaf))
        trees, state, set_steps, report = self.programs.end(
            arrays, sets, state, set_steps, plan, grown
        )

        def alone(array) -> Any:
            return np.asarray(array)[None]

        return Chunk(
            state=state,
            set_steps=set_steps,
            trees=jax.tree.map(alone, trees),
            losses=alone(report.losses),
            snapshots=report.snapshots,
            improvement=jax.tree.map(alone, report.improvement),
            parameters=jax.tree.map(alone, state.parameters),
        )

    def read_codes(self) -> Iterator[Shaped[np.ndarray, "F n"]]:
        """Yields the codes of the training rows, block by block."""
        return (codes for _, codes in self.reader.read())

    def _grow(self, k, rate, state, plan):
        """Grows the tree of one score, or of all, and fits its leaves."""
        problem, leaf, number = self.job.problem, self._leaf[k], np.int32(k)
        words = np.asarray(plan.seeds)[k]

        def measure():
            return self._fetch(self.programs.measure(problem.data, plan, number))

        tree = grow_blocks(self._grower, self.reader, words, measure, leaf)
        leaf = self._put(leaf)
        tree = self.programs.fit(problem.arrays, rate, state, plan, number, tree, leaf)
        return jax.block_until_ready(tree)  # the next program finds its memory freed

    def _fetch(self, rows: Derivatives) -> Derivatives:
        """Returns the derivatives of the rows of this process."""
        if self.job.rows.spread is None:
            return rows
        parts = (rows.gradient, rows.curvature, rows.in_bag)
        gradient, curvature, in_bag = self.job.rows.fetch(parts)
        limits, measure = fetch((rows.limits, rows.measure))
        return Derivatives(gradient, curvature, in_bag, limits, measure)

    def _put(self, leaf: np.ndarray) -> Any:
        """Returns the leaves of the rows of this process as programs take them."""
        spread = self.job.rows.spread
        return leaf if spread is None else spread.put(leaf, axis=leaf.ndim - 1)


def _begin(static, arrays, state):
    """Starts a round; derivatives that are needed twice are returned once."""
    problem = Problem(static, arrays)
    state, raw = differentiate(problem, state)
    plan = start_round(problem, choose_scaling(problem), state, raw)
    return state, plan._replace(
        for_leaves=None
    ) if plan.for_leaves is plan.for_splits else plan


def share_derivatives(plan: Any) -> Any:
    """Completes the round that the program ``begin`` returned."""
    return (
        plan._replace(for_leaves=plan.for_splits) if plan.for_leaves is None else plan
    )


def count_trees(job: Job) -> int:
    """Returns the number of trees in a round."""
    return 1 if job.problem.method.share_structure else job.rows.offset.shape[0]


def _pick(plan, k):
    return jax.tree.map(lambda array: array[k], plan.trees())


def _measure(method, native, data, plan, k):
    task = plan.structure() if method.share_structure else _pick(plan, k)
    gradient, curvature, in_bag = shaping_derivatives(data, plan, task.for_splits)
    measure = None
    if not native:
        parts = (gradient, curvature, in_bag, method.uniform)
        first = measure_first(task.shard_sums, task.for_splits.mean, *parts)
        measure = first or measure_rows(*parts)
    limits = shaping_limits(plan, task)
    return Derivatives(gradient, curvature, in_bag, limits, measure)


def _fit(static, arrays, rate, state, plan, k, tree, leaf):
    """Returns the trees that share this structure, with an axis of them in front."""
    problem = Problem(static, arrays)
    if static.method.share_structure:
        trees = sum_shared_leaves(problem.data, plan, tree, leaf)
        return fit_trees(problem, rate, state, plan, trees, leaf[None], state.pointed)
    task = _pick(plan, k)
    tree = sum_leaves(problem, plan, task, tree, leaf)
    newton = find_own_steps(problem, plan, task, tree)
    tree = fit_leaves(problem, rate, state, plan, task, tree, leaf, newton)
    return jax.tree.map(lambda array: array[None], tree)


def _end(static, reports, arrays, sets, state, set_steps, plan, grown):
    """Adds the trees of a round, and reports it; see ``chunks``."""
    (keep, bagged), problem, before = reports, Problem(static, arrays), state
    trees = shorten_together(problem, state, plan, grown.trees, grown.leaf)
    state = add_trees(problem, state, plan, trees, grown.leaf)
    set_steps = add_to_sets(trees, sets, set_steps, state.steps)
    in_bag = plan.in_bag if bagged else None
    report = report_round(problem, keep, sets, before, state, set_steps, in_bag)
    # A chunk has an axis of rounds.
    snapshots = jax.tree.map(lambda scores: scores[None], report.snapshots)
    report = report._replace(snapshots=snapshots, row_losses=None)
    return trees, state, set_steps, report
