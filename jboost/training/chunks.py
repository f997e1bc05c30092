# SPDX-License-Identifier: Apache-2.0
"""Makes rounds: up to 16 of them in one call of a compiled program.

In: a training run, checked and on the device, and its position. Out: a chunk of
rounds with their losses. The number of rounds is traced, so that all chunks share a
program. Rows on disk are trained on by another :class:`Runner`, of the same interface.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jboost.boosting.method import Method
from jboost.boosting.reports import report_round
from jboost.boosting.round import grow_round
from jboost.boosting.state import BoostState, Problem
from jboost.entry.programs import compiled
from jboost.training.pacing import MOST_ROUNDS
from jboost.training.rows import PaddedRows
from jboost.trees.category_splits import count_words
from jboost.trees.tree import LeafSums, Tree


class Chunk(NamedTuple):
    """What one call of a runner returns; the first ``count`` entries are valid."""

    state: BoostState
    set_scores: tuple[Float[Array, "K N"], ...]
    trees: Tree
    losses: Float[Array, "R S"]  # of the training rows, then of each set
    snapshots: tuple[Float[Array, "R K N"], ...]  # scores, where metrics need them
    improvement: Float[Array, " R"] | None  # out of the bag; None if all rows are in
    parameters: Any  # of an adaptive loss after each round; () for other losses


class Job(NamedTuple):
    """A training run, checked and on the device.

    Attributes:
      problem: loss, settings and training rows, as the programs take them.
      rates: the learning rate of each round.
      rows: the training rows.
      sets: the validation sets.
      metrics: by name.
    """

    problem: Problem
    rates: np.ndarray
    rows: PaddedRows
    sets: dict[str, PaddedRows]
    metrics: dict[str, Callable[..., Any]]

    @property
    def bagged(self) -> bool:
        """Whether rounds leave rows out."""
        return bool(self.problem.arrays.numbers.subsample < 1)

    @property
    def reports(self) -> tuple[bool, bool]:
        """Whether scores are kept for metrics, and whether rows are left out."""
        return bool(self.metrics), self.bagged


class Position(NamedTuple):
    """The state from which the next round begins.

    Attributes:
      state: of the training rows.
      set_scores: of each validation set.
    """

    state: BoostState
    set_scores: tuple[Float[Array, "K N"], ...]


class Runner(Protocol):
    """Makes rounds for the host loop, whether the rows are in memory or on disk."""

    @property
    def most_rounds(self) -> int:
        """How many rounds one call may make."""
        ...

    def run(self, position: Position, first: int, count: int) -> Chunk:
        """Makes ``count`` rounds, of which ``first`` is the first."""
        ...

    def read_codes(self) -> Iterator[Shaped[np.ndarray, "F n"]]:
        """Yields the codes of the training rows, part by part."""
        ...


class ArrayRunner:
    """Makes rounds on rows in memory."""

    most_rounds = MOST_ROUNDS

    def __init__(self, job: Job):
        self.job = job

    def run(self, position: Position, first: int, count: int) -> Chunk:
        """Makes ``count`` rounds, of which ``first`` is the first."""
        job = self.job
        rates = np.zeros(MOST_ROUNDS, np.float32)
        rates[:count] = job.rates[first : first + count]
        run = compiled(_chunk, job.problem.static, job.reports)
        sets = tuple(rows.data for rows in job.sets.values())
        return run(job.problem.arrays, rates, np.int32(count), sets, position)

    def read_codes(self) -> Iterator[Shaped[np.ndarray, "F n"]]:
        """Yields the codes of the training rows, part by part."""
        return self.job.rows.read_codes()


def _chunk(static, reports, arrays, rates, count, sets, position):
    """Makes up to 16 rounds, traced."""
    problem, (keep, bagged) = Problem(static, arrays), reports
    state, set_scores = position

    def one_round(number, chunk):
        state, trees, in_bag = grow_round(problem, rates[number], chunk.state)
        report = report_round(
            problem, keep, sets, chunk.state, state, chunk.set_scores, trees,
            in_bag if bagged else None,
        )  # fmt: skip

        def store(buffer, value):  # at[].set compiles to more than this
            return jax.lax.dynamic_update_index_in_dim(buffer, value, number, 0)

        return Chunk(
            state=state,
            set_scores=report.set_scores,
            trees=jax.tree.map(store, chunk.trees, trees),
            losses=store(chunk.losses, report.losses),
            snapshots=jax.tree.map(store, chunk.snapshots, report.snapshots),
            improvement=jax.tree.map(store, chunk.improvement, report.improvement),
            parameters=jax.tree.map(store, chunk.parameters, state.parameters),
        )

    def buffers(tree):
        return jax.tree.map(lambda a: jnp.zeros((MOST_ROUNDS, *a.shape), a.dtype), tree)

    one_round_trees = no_trees(problem.method, state.scores.shape[0], 1)
    empty = Chunk(
        state=state,
        set_scores=set_scores,
        trees=buffers(jax.tree.map(lambda a: a[0], one_round_trees)),
        losses=jnp.zeros((MOST_ROUNDS, 1 + len(sets)), jnp.float32),
        snapshots=buffers((state.scores, *set_scores) if keep else ()),
        improvement=jnp.zeros(MOST_ROUNDS, jnp.float32) if bagged else None,
        parameters=buffers(state.parameters),
    )
    return jax.lax.fori_loop(0, count, one_round, empty)


def no_trees(method: Method, num_scores: int, rounds: int = 0) -> Tree:
    """Returns arrays for so many rounds of trees, in NumPy; empty for none."""
    nodes = 2**method.max_depth - 1
    shape, leaves = (rounds, num_scores, nodes), (rounds, num_scores, nodes + 1)
    values = np.zeros(leaves, np.float32)
    sums: Any = (values, values, values, np.zeros(leaves[:2], np.float32))
    words = (*shape, count_words(method.num_bins))
    arrays: Any = (
        np.zeros(shape, np.int32),
        np.ones(shape, np.int32),
        np.zeros(shape, bool),
        values,
        LeafSums(*sums),
    )
    left_codes: Any = np.zeros(words, np.uint32) if method.categorical else None
    return Tree(*arrays, left_codes=left_codes)
