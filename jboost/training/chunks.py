# SPDX-License-Identifier: Apache-2.0
"""Chunks of up to 16 rounds, and their pacing.

With few rows, or on a GPU, the host waits once per chunk.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Shaped
from tqdm import tqdm

from jboost.boosting.derivatives import choose_scaling
from jboost.boosting.method import Method
from jboost.boosting.reports import RowLosses, no_sizes
from jboost.boosting.round_programs import (
    GrowOperands,
    IncludeFallbacks,
    RoundBuffers,
    RoundInputs,
    Summary,
    choose_options,
    derive,
    finish,
    for_derivatives,
    for_finish,
    for_growth,
    grow,
    with_derived,
    with_loss,
    without_loss,
)
from jboost.boosting.state import Arrays, BoostState, Problem, bind_objective
from jboost.entry import checks
from jboost.entry.context import is_on_cpu
from jboost.entry.decorators import check_process, fetch
from jboost.entry.exchanges import process_number, slowest
from jboost.entry.memory import release_free_memory
from jboost.entry.programs import (
    FEW,
    FULL,
    GROUPS,
    LIGHT,
    QUICK,
    WHOLE,
    CompileOptions,
    compiled,
    num_made,
)
from jboost.entry.stages import run_in_stages
from jboost.numerics.arrays import count_words, unpack
from jboost.objective.evaluation import RowPrograms, bind_rows, loss_values
from jboost.training.rows import PaddedRows
from jboost.training.sharded import bind_shards, compile_round
from jboost.trees import category_splits
from jboost.trees.slopes import GivenLeaves
from jboost.trees.tree import LeafSums, Slopes, Tree

MOST_ROUNDS = 16  # the most rounds in one call of a runner: a chunk
_MOST_TRIALS = 2**26  # numbers in the scores after each tree of a round
_COMPILING = "compiling"  # the description of a bar meanwhile
_CALL_SECONDS = 0.5  # how long a call should take, so that progress keeps moving
_SHORTEST_SLEEP, _LONGEST_SLEEP = 5e-5, 0.02  # seconds between looks at a call
_SLEEP_SHARE = 0.02  # share of the time waited so far, so that sleep adds little


def pace_rounds(
    num_rounds: int,
    *,
    first: int = 0,
    most: int = MOST_ROUNDS,
    every: int | None = None,
    fixed: bool = False,
) -> Iterator[tuple[int, int]]:
    """Yields (first round, number of rounds) of each call, until all are made.

    The number doubles or halves with the time that the caller takes between two
    yields: small data wants few calls, large data frequent progress. It starts at 1,
    because nothing is known about the time yet. Processes that train together make
    the same calls.

    Args:
      num_rounds: the number of rounds of the whole run.
      first: the round to start from.
      most: the most rounds of one call.
      every: calls end at multiples of this number, if it is given.
      fixed: whether each call makes ``most`` rounds, however long that takes.

    Raises:
      RuntimeError: a callback has forked, and this is the new process.
    """
    aim = most if fixed else 1
    while first < num_rounds:
        check_process("training")
        count = min(aim, num_rounds - first)
        if every is not None:
            count = min(count, every - first % every)
        begun = time.perf_counter()
        yield first, count
        first, seconds = first + count, slowest(time.perf_counter() - begun)
        if fixed:
            continue
        if seconds < _CALL_SECONDS / 2:
            aim = min(most, 2 * aim)
        elif seconds > 2 * _CALL_SECONDS:
            aim = max(1, aim // 2)


def wait_for(results: Any, count: int) -> None:
    """Waits for the results of a call so that signals are handled meanwhile (ctrl-C).

    Python handles signals in its main thread, but not while JAX waits in it. Calls
    of several rounds are short enough; see :func:`pace_rounds`.

    Args:
      results: arrays; their errors are left to those who read them.
      count: rounds of the call.
    """
    if count > 1 or threading.current_thread() is not threading.main_thread():
        return
    begun, pending = time.perf_counter(), jax.tree.leaves(results)
    # A thread that waits instead would need memory, and where there is none, Python
    # waits forever for the thread to start.
    while not all(array.is_ready() for array in pending):
        waited = time.perf_counter() - begun
        time.sleep(min(_LONGEST_SLEEP, max(_SHORTEST_SLEEP, _SLEEP_SHARE * waited)))


def open_bar(total: float, progress: bool, unit: str = "round") -> tqdm:
    """Opens a progress bar of rounds or other units; hidden without ``progress``.

    If several processes train together, only the first one shows it.

    Until the first round is made, it says that programs are being compiled.
    """
    hidden = not checks.check_flag("progress", progress) or process_number() > 0
    return tqdm(total=total, disable=hidden, unit=unit, desc=_COMPILING)


def begin_compiling(bar: tqdm) -> None:
    """Says that programs are being compiled, until the bar moves."""
    bar.set_description(_COMPILING)


def skip_to(bar: tqdm, first: int) -> None:
    """Starts a bar at the round that a run continues with."""
    bar.initial = bar.n = first
    if first == bar.total:
        _end_compiling(bar)
    bar.refresh()


def move_bar(bar: tqdm, count: int, values: dict[str, float]) -> None:
    """Moves the bar by some rounds, and shows the current values."""
    _end_compiling(bar)
    shown = {name: f"{value:.5g}" for name, value in values.items()}
    bar.set_postfix(shown, refresh=False)
    bar.update(count)


def _end_compiling(bar):
    """Excludes the compilation before the rounds from their time."""
    if not bar.disable and bar.desc:
        bar.unpause()
        bar.set_description(refresh=False)


class Chunk(NamedTuple):
    """The result of one call of a runner; the first ``count`` entries are valid."""

    state: BoostState
    set_steps: tuple[Float[Array, "K N"], ...]
    trees: Tree
    losses: Float[Array, "R S"]  # losses of the training rows, then of each set
    snapshots: tuple[Float[Array, "R K N"], ...]  # scores, where metrics need them
    improvement: Float[Array, " R"] | None  # out of the bag; None without a bag
    parameters: Any  # those of an adaptive loss after each round; () for others


class Job(NamedTuple):
    """A training run, checked and on the device.

    Attributes:
      problem: loss, settings and training rows, as the programs take them.
      rates: the learning rate of each round.
      rows: the training rows.
      sets: the validation sets.
      metrics: the metric functions by name.
      real: targets and weights of all rows without padding, by set, for metrics.
    """

    problem: Problem
    rates: np.ndarray
    rows: PaddedRows
    sets: dict[str, PaddedRows]
    metrics: dict[str, Callable[..., Any]]
    real: dict[str, tuple[Any, np.ndarray]]

    @property
    def holds_out(self) -> bool:
        """Whether the validation set consists of training rows that are held out."""
        return any(rows.data.codes is None for rows in self.sets.values())

    @property
    def bagged(self) -> bool:
        """Whether rounds leave rows out of splits and leaf values."""
        return self.problem.leaves_out

    @property
    def reports(self) -> tuple[bool, bool]:
        """Whether scores are kept for metrics, and whether rows are left out."""
        return bool(self.metrics), self.bagged


class Position(NamedTuple):
    """The state before the next round.

    Attributes:
      state: the state of the training rows.
      set_steps: the steps of each validation set.
    """

    state: BoostState
    set_steps: tuple[Float[Array, "K N"], ...]


class Runner(Protocol):
    """Makes rounds for the host loop, whether the rows are in memory or on disk."""

    @property
    def most_rounds(self) -> int:
        """The most rounds that one call may make."""
        ...

    def run(self, position: Position, first: int, count: int) -> Chunk:
        """Makes ``count`` rounds, beginning with round ``first``."""
        ...

    def read_codes(self) -> Iterator[Shaped[np.ndarray, "F n"]]:
        """Yields the codes of the training rows, part by part."""
        ...


class ArrayRunner:
    """Makes rounds on rows in memory; see :mod:`jboost.boosting.round_programs`."""

    most_rounds = MOST_ROUNDS

    def __init__(self, job: Job):
        # The leaves of each round of the next call, where they only need new values.
        self.given: Sequence[GivenLeaves | None] = [None] * MOST_ROUNDS
        arrays = job.problem.arrays
        self.job = job
        self._programs: dict[Any, Any] = {}
        self._whole = IncludeFallbacks(derive=False, slopes=False, finish=False)
        self._num_programs = num_made[0]
        spread = job.rows.spread
        self._put = put = jax.device_put if spread is None else spread.put_everywhere
        self._sizes: Any = None
        self._row_losses: Any = None, None  # steps, and the losses there
        if spread is not None:
            self._sizes = no_sizes(len(job.sets), job.bagged)
        # Numbers that are on the device are cheaper to hand to a program.
        self._growth = GrowOperands(
            put(arrays.numbers),
            arrays.data._replace(targets=(), prepared=None),
            tuple(
                rows.data._replace(targets=(), prepared=None)
                for rows in job.sets.values()
            ),
        )
        self._rows = Arrays(
            put(arrays.constants),
            self._growth.numbers,
            arrays.data._replace(codes=None),
        )
        # Those of a `finish` without a loss.
        bare = self._rows.data._replace(targets=(), prepared=None)
        self._bare_rows = self._rows._replace(constants=(), data=bare)
        self._sets = tuple(rows.data for rows in job.sets.values())
        self._row_programs: list[RowPrograms] = []
        self._entries = [put(np.int32(i)) for i in range(MOST_ROUNDS)]

    def run(self, position: Position, first: int, count: int) -> Chunk:
        """Makes ``count`` rounds, beginning with round ``first``."""
        last, stored, trees, made = self._queue_rounds(position, first, count)
        while (whole := self._whole.extend(made)) != self._whole:
            self._whole = whole
            last, stored, trees, made = self._queue_rounds(position, first, count)
        self._tidy(position.state.steps)
        return Chunk(
            last.state, last.set_steps, trees, made.losses, stored.snapshots,
            made.improvement, stored.parameters,
        )  # fmt: skip

    def read_codes(self) -> Iterator[Shaped[np.ndarray, "F n"]]:
        """Yields the codes of the training rows, part by part."""
        return self.job.rows.read_codes()

    def _queue_rounds(self, position, first, count):
        """Makes rounds; with few rows, waits only for the last one."""
        state, set_steps = position
        here, many = is_on_cpu(state.steps), self._has_many(state.steps)
        # Losses in a program of their own: it reads all rows and trial scores again,
        # which costs a CPU with many rows more than it saves.
        trials = len(state.steps) ** 2 * self.job.rows.padded
        apart = not many or (not here and trials <= _MOST_TRIALS)
        sizes = self.job.reports, self._whole, apart
        options = choose_options(self.job.problem, state, *sizes)
        run_derive, run_grow, run_finish = self._find_programs(options, state.steps)
        rates = self.job.rates[first : first + count].astype(np.float32)
        words, stored = self._make_room(position)
        row_losses = self._find_row_losses(state, options)
        grown = None
        each = zip(rates, self._entries, self.given, strict=False)
        for rate, entry, given in each:
            self._tidy(state.steps)
            changed, derived = run_derive(self._rows, state)
            state = with_derived(state, changed)
            turn = RoundInputs(state, set_steps, rate, entry, given)
            bare = turn._replace(state=without_loss(state))
            self._tidy(state.steps)
            if many and here and grown is not None:
                # On a CPU, XLA gives memory to a program long before it can run, so
                # only one is started at a time. That would leave a GPU idle.
                jax.block_until_ready(grown.all_finite)
            grown = run_grow(self._growth, bare, derived, words)
            self._tidy(state.steps)
            losses, rows, sets = RowLosses(row_losses), self._rows, self._sets
            if options.scored:
                losses = self._evaluate(state, row_losses, grown)
                rows, sets = self._bare_rows, self._growth.sets
                turn = bare._replace(state=self._bare(state))
            found, stored, row_losses = run_finish(
                rows, sets, turn, grown, stored, losses
            )
            if options.finish.solve:
                after, set_steps, words = found
                parameters = after.parameters
            else:
                after, set_steps, words = grown.state, grown.set_steps, grown.words
                parameters = found
            state = with_loss(after, state)._replace(parameters=parameters)
        wait_for(stored.numbers, count)
        kept = stored.snapshots  # with a mesh, they are on several devices
        self._row_losses = state.steps, row_losses
        words, stored = fetch((words, stored._replace(snapshots=())))
        stored, self._sizes = stored._replace(snapshots=kept), stored.sizes
        # A copy, because a view would keep the memory of rounds that were not made.
        trees = unpack(words[:count].copy(), self._one_round_trees(position))
        like = like_summary(len(set_steps), self.job.bagged)
        made = unpack(stored.numbers[:count], like)
        return Position(state, set_steps), stored, trees, made

    def _bare(self, state):
        """Returns the state for a ``finish`` without a loss."""
        minimizer = state.minimizer if self._whole.slopes else None
        return without_loss(state)._replace(minimizer=minimizer)

    def _evaluate(self, state, before, grown):
        """Returns the losses that a ``finish`` without a loss needs."""
        own, *others = self._find_row_programs(state)
        after, *sets = grown.scores
        moved = slope = sloped = None
        with run_in_stages():
            after = own.value(after)
            if grown.moved is not None:
                moved = tuple(map(own.value, grown.moved))
                if self._whole.slopes:
                    slope = tuple(map(own.gradient, grown.moved))
            if grown.sloped is not None:
                sloped = tuple(map(own.value, grown.sloped)) or (after,)
            pairs = zip(others, sets, strict=True)
            values = tuple(each.value(scores) for each, scores in pairs)
            return RowLosses(before, after, moved, slope, sloped, values)

    def _find_row_programs(self, state):
        """Returns the programs of the loss of the training rows, and of each set."""
        if not self._row_programs:
            own = [rows for rows in self._sets if rows.codes is not None]
            tables = [self.job.problem.data, *own]
            self._row_programs += [self._bind_rows(rows, state) for rows in tables]
        return self._row_programs

    def _bind_rows(self, rows, state):
        problem, spread = self.job.problem, self.job.rows.spread
        if spread is not None:
            rows = rows._replace(codes=None, values=None, prepared=None)
            effort = choose_effort(problem, self.job.rows.padded)
            parts = problem.loss, self._rows.constants, rows
            return bind_shards(spread, *parts, effort)
        arrays = problem.arrays._replace(data=rows)
        objective = bind_objective(problem._replace(arrays=arrays), state)
        return bind_rows(objective, rows.offset)

    def _find_programs(self, options, scores):
        """Returns the programs of a round."""
        static = self.job.problem.static
        # Devices that share rows compile as one that holds them all, for the same bits.
        effort = choose_effort(self.job.problem, self.job.rows.padded)
        return (
            self._find(derive, for_derivatives(static), options.smooth, effort=effort),
            self._find(
                grow, for_growth(static.method), choose_scaling(self.job.problem),
                options.steps, options.scored, donate=(3,),
                effort=LIGHT if self._has_many(scores) else QUICK,
            ),
            self._find(
                finish, for_finish(static) if options.scored else static,
                options.finish, donate=(4,), effort=effort,
            ),
        )  # fmt: skip

    def _has_many(self, scores):
        """Returns whether running programs takes longer than starting them."""
        return len(scores) * self.job.rows.padded > FEW

    def _tidy(self, scores):
        """Releases memory after compiling; for few rows the time would matter more."""
        if self._num_programs != num_made[0]:
            self._num_programs = num_made[0]
            if self._has_many(scores):
                release_free_memory()

    def _find(self, function, *static, **options):
        """Returns a program of the round."""
        key = function, static
        if key not in self._programs:
            make, spread = compiled, self.job.rows.spread
            if spread is not None:
                make = partial(compile_round, spread, self.given[0] is not None)
            program = make(function, *static, **options)
            self._programs[key] = program.of_one_shape()
        return self._programs[key]

    def _one_round_trees(self, position):
        """Returns arrays like the trees of a round."""
        given = self.given[0]
        if given is not None:
            none: Any = None
            values: Any = given.leaf_value
            sums = LeafSums(values, values, values, values[:, 0])
            return Tree(none, none, none, values, sums, slopes=given.slopes)
        return like_trees(self.job.problem.method, len(position.state.steps))

    def _make_room(self, position):
        """Returns empty arrays for the rounds of a chunk."""
        keep, _ = self.job.reports
        state, set_steps = position
        every = (self.job.rows, *self.job.sets.values())
        kept = (state.steps, *set_steps) if keep else ()

        def empty(array):
            return np.zeros((MOST_ROUNDS, *array.shape), array.dtype)

        def hold(rows, scores) -> Any:
            if rows.spread is None:
                return empty(scores)
            return rows.spread.put_zeros((MOST_ROUNDS, len(scores)))

        def words(like) -> Any:
            # Placed as a round's results are: otherwise a mesh compiles rounds twice.
            return self._put(np.zeros((MOST_ROUNDS, count_words(like)), np.int32))

        return words(self._one_round_trees(position)), RoundBuffers(
            numbers=words(like_summary(len(set_steps), self.job.bagged)),
            snapshots=tuple(map(hold, every, kept)),
            parameters=jax.tree.map(empty, state.parameters),
            sizes=self._put(self._sizes),
        )

    def _find_row_losses(self, state, options):
        """Returns the loss of each row if rounds need it and can pass it on."""
        problem, spread = self.job.problem, self.job.rows.spread
        judged = options.steps == "judged" and not problem.method.share_structure
        adaptive = problem.loss.estimate is not None
        if not options.scored and (adaptive or not judged or spread is not None):
            return None
        steps, row_losses = self._row_losses
        if steps is state.steps:
            return row_losses
        with run_in_stages():
            if options.scored:
                return self._find_row_programs(state)[0].value(state.scores)
            return loss_values(bind_objective(problem, state), state.scores)


def choose_effort(problem: Problem, num_rows: int) -> CompileOptions:
    """Returns how much work to spend on the programs of a loss with its rows.

    With one score, the bits of models do not depend on the number of rows.
    """
    num_scores = problem.loss.num_scores
    many = num_scores * num_rows > FEW
    if problem.loss.coupled:
        return GROUPS if many else LIGHT
    if num_scores == 1:
        return FULL if many else WHOLE
    return LIGHT


def like_trees(method: Method, num_scores: int) -> Tree:
    """Returns NumPy arrays like the trees of one round."""
    return jax.tree.map(lambda array: array[0], no_trees(method, num_scores, 1))


def like_summary(num_sets: int, bagged: bool) -> Summary:
    """Returns NumPy arrays like the small results of a round."""
    losses: Any = np.zeros(1 + num_sets, np.float32)
    improvement: Any = np.float32(0) if bagged else None
    true: Any = np.bool_(True)
    return Summary(losses, improvement, all_finite=true, enough=true, kept=true)


def no_trees(method: Method, num_scores: int, rounds: int = 0) -> Tree:
    """Returns NumPy arrays for the trees of ``rounds`` rounds; empty for 0 rounds."""
    nodes, num_trees = (
        2**method.max_depth - 1,
        1 if method.share_structure else num_scores,
    )
    shape, leaves = (rounds, num_trees, nodes), (rounds, num_scores, nodes + 1)
    values = np.zeros(leaves, np.float32)
    sums: Any = (values, values, values, np.zeros(leaves[:2], np.float32))
    words = (*shape, category_splits.count_words(method.num_bins))
    arrays: Any = (
        np.zeros(shape, np.int32),
        np.ones(shape, np.int32),
        np.zeros(shape, bool),
        values,
        LeafSums(*sums),
    )
    left_codes: Any = np.zeros(words, np.uint32) if method.categorical else None
    slopes = None
    if method.num_terms:
        terms = (*shape[:2], nodes + 1, method.num_terms)
        each: Any = np.zeros((*leaves, method.num_terms), np.float32)
        slopes: Any = Slopes(each[:, : terms[1]].astype(np.int32), each, each)
    return Tree(*arrays, left_codes=left_codes, slopes=slopes)
