# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of ``fit``: the start, and up to 16 rounds at a time.

In: a training run, checked and on the device. Out: the state before the first round,
and chunks of rounds with their losses. Numbers of rounds are traced, so that all
chunks share a program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.boosting.method import Method, Numbers
from jboost.boosting.reports import report_round
from jboost.boosting.rounds import BoostState, Data, grow_round, start_state
from jboost.entry.programs import compiled, jitted
from jboost.objective.curvature import derivatives
from jboost.objective.evaluation import Objective, gradients, loss_values
from jboost.objective.tracing import TracedLoss
from jboost.training.rows import Rows
from jboost.trees.category_splits import count_words
from jboost.trees.initial import MedianStart, count_slopes, is_endless
from jboost.trees.tree import LeafSums, Tree

MOST_ROUNDS = 16  # in one call of the compiled program


class Chunk(NamedTuple):
    """What one call of the compiled program returns; ``count`` entries hold."""

    state: BoostState
    set_scores: tuple[Float[Array, "K N"], ...]
    trees: Tree
    losses: Float[Array, "R S"]  # of the training rows, then of each set
    snapshots: tuple[Float[Array, "R K N"], ...]  # scores, where metrics need them
    improvement: Float[Array, " R"] | None  # out of the bag; None if all rows are in
    parameters: Any  # of an adaptive loss after each round; () for other losses


class Job(NamedTuple):
    """A training run, checked and on the device."""

    loss: TracedLoss
    constants: tuple[Any, ...]
    method: Method
    numbers: Numbers
    rates: np.ndarray
    rows: Rows
    sets: dict[str, Rows]
    metrics: dict[str, Callable[..., Any]]


def run_chunk(
    job: Job,
    state: BoostState,
    set_scores: tuple[Array, ...],
    first: int,
    count: int,
) -> Chunk:
    """Makes ``count`` rounds from round ``first`` on."""
    rates = np.zeros(MOST_ROUNDS, np.float32)
    rates[:count] = job.rates[first : first + count]
    keep, bagged = bool(job.metrics), bool(job.numbers.subsample < 1)
    run = compiled(_chunk, job.loss, job.method, keep, bagged)
    sets = tuple(rows.data for rows in job.sets.values())
    data = job.rows.data
    return run(
        job.constants,
        job.numbers,
        rates,
        np.int32(count),
        data,
        sets,
        state,
        set_scores,
    )


def _chunk(
    loss, method, keep, bagged,
    constants, numbers, rates, count, data, sets, state, set_scores,
):  # fmt: skip
    """Up to 16 rounds, traced."""

    def one_round(number, chunk):
        state, trees, in_bag = grow_round(
            loss, constants, method, numbers, rates[number], data, chunk.state
        )
        report = report_round(
            loss, constants, method, keep, data, sets, chunk.state, state,
            chunk.set_scores, trees, in_bag if bagged else None,
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

    num_scores = state.scores.shape[0]
    empty = Chunk(
        state=state,
        set_scores=set_scores,
        trees=buffers(jax.tree.map(lambda a: a[0], no_trees(method, num_scores, 1))),
        losses=jnp.zeros((MOST_ROUNDS, 1 + len(sets)), jnp.float32),
        snapshots=buffers((state.scores, *set_scores) if keep else ()),
        improvement=jnp.zeros(MOST_ROUNDS, jnp.float32) if bagged else None,
        parameters=buffers(state.parameters),
    )
    return jax.lax.fori_loop(0, count, one_round, empty)


def start(
    job: Job, init_score: Array | MedianStart | None, seed: int
) -> tuple[BoostState, str]:
    """Makes the state before the first round; the loss must be finite there.

    Returns:
      The state, and the rule that gave the initial score; see
      :class:`jboost.training.history.History`.
    """
    words = np.array([0, seed], np.uint32)  # as seed_from_key(jax.random.key(seed))
    run, operands = start_program(job, init_score, words)
    state, fell_back, values, endless = run(*operands)
    data, offset = job.rows.data, job.rows.scores
    if endless:
        refuse_endless()
    if isinstance(init_score, MedianStart):
        check_minimizers(*job[:2], data, state, "init_score='median'")
    if job.method.leaf_solver == "median_step":
        check_minimizers(*job[:2], data, state, "leaf_solver='median_step'")
    _check_values("the data", data, values, offset, state.init_score)
    for name, rows in job.sets.items():
        scores = start_scores(state, rows)
        run = compiled(_values_program, job.loss)
        values = run(job.constants, rows.data, scores, state.parameters)
        _check_values(name, rows.data, values, rows.scores, state.init_score)
    if init_score is None:
        return state, "fallback" if fell_back else "argmin"
    return state, "median" if isinstance(init_score, MedianStart) else "given"


def start_scores(state: BoostState, rows: Rows) -> Array:
    """Of a validation set before the first round; in NumPy, which compiles nothing."""
    init_score = np.asarray(state.init_score).reshape(-1, 1)
    return jax.device_put(np.asarray(rows.scores) + init_score)


def start_program(
    job: Job, init_score: Array | MedianStart | None, words: np.ndarray
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted program of the start, and its operands."""
    operands = (job.constants, job.rows.data, job.rows.scores, init_score, words)
    return jitted(_start_program, (job.loss,), *operands), operands


def check_minimizers(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    data: Data,
    state: BoostState,
    setting: str,
) -> None:
    """Raises for the first row of positive weight that slopes, but has no minimum."""
    if state.minimizer is None:
        return
    run = compiled(_slopes_program, loss)
    slopes = np.asarray(run(constants, data, state.scores, state.parameters))
    missing = ~np.isfinite(np.asarray(state.minimizer)) & (slopes != 0)
    bad = missing.any(axis=0) & (np.asarray(data.weights) > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)
        raise ValueError(
            f"{setting} needs a loss that has a minimum of its own in every row, got "
            f"none in row {row} for target {target}"
        )


def describe_idleness(
    loss: TracedLoss,
    constants: tuple[Any, ...],
    method: Method,
    data: Data,
    state: BoostState,
) -> str | None:
    """Says why no tree can learn from the gradients at a state; None if one can.

    Rows that are all at their own minimum leave nothing to learn, and that is fine.
    """
    run = compiled(_idleness_program, loss, method)
    found = run(constants, data, state)
    if not found.not_finite and not found.stuck():
        return None
    start = np.asarray(state.init_score).tolist()
    branch = (
        ". A gradient is NaN beside a finite loss where a branch of jnp.where that is "
        "not taken has no derivative"
    )
    return (
        f"of {found.rows} rows of positive weight, {found.not_finite} have a gradient "
        f"that is NaN or infinite and {found.zero} one that is zero (init_score "
        f"{start}); look at the loss there with jb.inspect_loss, or pass another "
        f"init_score{branch if found.not_finite else ''}"
    )


def refuse_endless() -> NoReturn:
    """Raises for a loss that :func:`is_endless`."""
    raise ValueError(
        "loss must have a minimum in the score, got one without a minimum for any row "
        "of positive weight: it is linear or concave in the score, so unbounded below; "
        "its arguments may be swapped (the call is loss(score, target)), or its sign "
        "may be wrong"
    )


def _check_values(place, data, values, offset, init_score):
    """Raises for the first row of positive weight whose loss is not finite."""
    values = np.asarray(values)
    bad = ~np.isfinite(values) & (np.asarray(data.weights) > 0)
    if bad.any():
        row = int(np.argmax(bad))
        refuse_value(place, data, row, float(values[row]), offset, init_score)


def refuse_value(
    place: str, data: Data, row: int, value: float, offset: Any, init_score: Any
) -> NoReturn:
    """Raises for a row whose loss is not finite."""
    target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)
    score = np.asarray(offset[:, row] + init_score).tolist()
    raise ValueError(
        f"loss must be finite on {place}, got {value} in row {row} "
        f"for target {target} at score {score}; a target may lie outside what the "
        "loss is defined for, the arguments of the loss may be swapped (the call is "
        "loss(score, target)), or init_score be needed"
    )


def _start_program(loss, constants, data, offset, init_score, words):
    state, fell_back = start_state(loss, constants, data, offset, init_score, words)
    values = _values_program(loss, constants, data, state.scores, state.parameters)
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer
    )
    endless = is_endless(objective, state.scores, data.weights)
    return state, fell_back, values, endless


def _values_program(loss, constants, data, scores, parameters):
    objective = Objective(loss, constants, data.targets, parameters, None)
    return loss_values(objective, scores)


def _slopes_program(loss, constants, data, scores, parameters):
    objective = Objective(loss, constants, data.targets, parameters, None)
    return gradients(objective, scores)


def _idleness_program(loss, method, constants, data, state):
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer, state.kinks
    )
    slopes, _ = derivatives(objective, state.scores, data.weights, method.curvature)
    return count_slopes(objective, slopes, state.scores, data.weights)


def no_trees(method: Method, num_scores: int, rounds: int = 0) -> Tree:
    """Arrays of so many rounds of trees, in NumPy; empty for none."""
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
