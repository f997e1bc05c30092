# SPDX-License-Identifier: Apache-2.0
"""Starts training: the state before the first round, and what must hold there.

In: a training run, checked and on the device. Out: its state before the first round,
or an error that names the first row whose loss cannot be used.
"""

from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import Array

from jboost.boosting.state import (
    BoostState,
    Problem,
    StartPoint,
    bind_objective,
    start_state,
)
from jboost.entry.programs import Compiled, compiled
from jboost.entry.stages import run_in_stages
from jboost.objective.curvature import derivatives
from jboost.objective.evaluation import Objective, gradients, loss_values
from jboost.training.chunks import Job, Position
from jboost.training.rows import PaddedRows
from jboost.trees.initial import MedianStart, count_slopes, is_endless


def start(
    job: Job, init_score: Array | MedianStart | None, seed: int, in_stages: bool = True
) -> tuple[BoostState, str]:
    """Makes the state before the first round, and checks that the loss is finite.

    Args:
      job: the run.
      init_score: where it starts.
      seed: of everything random.
      in_stages: whether small programs run one after another, which compile in a
        fraction of the time of one program, whose memory is known beforehand.

    Returns:
      The state, and the rule that gave the initial score; see
      :class:`jboost.training.history.History`.
    """
    words = np.array([0, seed], np.uint32)  # as seed_from_key(jax.random.key(seed))
    begin = StartPoint(job.rows.scores, init_score, words)
    whole, operands = start_program(job, begin)
    operands = jax.device_put(operands)  # once for all stages
    with run_in_stages(in_stages):
        run = partial(_find_start, job.problem.loss) if in_stages else whole
        state, fell_back, values, endless = run(*operands)
    problem = job.problem
    if endless:
        refuse_endless()
    if isinstance(init_score, MedianStart):
        check_minimizers(problem, state, "init_score='median'")
    if problem.method.leaf_solver == "median_step":
        check_minimizers(problem, state, "leaf_solver='median_step'")
    _check_values("the data", job.rows, values, state.init_score)
    for name, rows in job.sets.items():
        with run_in_stages():
            values = _find_values(
                problem.loss, problem.constants, rows.data, start_scores(state, rows),
                state.parameters,
            )  # fmt: skip
        _check_values(name, rows, values, state.init_score)
    if init_score is None:
        return state, "fallback" if fell_back else "argmin"
    return state, "median" if isinstance(init_score, MedianStart) else "given"


def start_position(job: Job, state: BoostState) -> Position:
    """Returns the position before the first round."""
    return Position(state, tuple(start_scores(state, s) for s in job.sets.values()))


def start_scores(state: BoostState, rows: PaddedRows) -> Array:
    """Returns the scores of a validation set before the first round."""
    # In NumPy, because sets of other sizes would need other programs.
    init_score = np.asarray(state.init_score).reshape(-1, 1)
    return jax.device_put(np.asarray(rows.scores) + init_score)


def start_program(job: Job, start: StartPoint) -> tuple[Compiled, tuple[Any, ...]]:
    """Returns the start as one program, and its operands."""
    operands = (job.problem.constants, job.problem.data, start)
    return compiled(_find_start, job.problem.loss), operands


def check_minimizers(problem: Problem, state: BoostState, setting: str) -> None:
    """Raises if a row has no minimizer of its own, which a setting needs.

    Rows of weight 0 and rows without a slope do not need one.
    """
    if state.minimizer is None:
        return
    data = problem.data
    objective = bind_objective(problem, state)._replace(minimizer=None, kinks=None)
    with run_in_stages():
        slopes = np.asarray(gradients(objective, state.scores))
    missing = ~np.isfinite(np.asarray(state.minimizer)) & (slopes != 0)
    bad = missing.any(axis=0) & (np.asarray(data.weights) > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)
        raise ValueError(
            f"{setting} needs a loss that has a minimum of its own in every row, got "
            f"none in row {row} for target {target}"
        )


def describe_idleness(problem: Problem, state: BoostState) -> str | None:
    """Explains why no tree can learn from the gradients at a state; None if one can.

    Rows that are all at their own minimum leave nothing to learn, which is no error.
    """
    run = compiled(_idleness_program, problem.loss, problem.method.curvature)
    found = run(problem.constants, problem.data, state)
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


def _check_values(place, rows, values, init_score):
    """Raises for the first row of positive weight whose loss is not finite."""
    values = np.asarray(values)
    bad = ~np.isfinite(values) & (np.asarray(rows.data.weights) > 0)
    if bad.any():
        row = int(np.argmax(bad))
        refuse_value(place, rows, row, float(values[row]), init_score)


def refuse_value(
    place: str, rows: PaddedRows, row: int, value: float, init_score: Any
) -> NoReturn:
    """Raises for a row whose loss is not finite."""
    target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), rows.data.targets)
    score = np.asarray(rows.scores[:, row] + init_score).tolist()
    raise ValueError(
        f"loss must be finite on {place}, got {value} in row {row} "
        f"for target {target} at score {score}; a target may lie outside what the "
        "loss is defined for, the arguments of the loss may be swapped (the call is "
        "loss(score, target)), or init_score may be needed"
    )


def _find_start(loss, constants, data, start):
    state, fell_back = start_state(loss, constants, data, start)
    values = _find_values(loss, constants, data, state.scores, state.parameters)
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer
    )
    endless = is_endless(objective, state.scores, data.weights)
    return state, fell_back, values, endless


def _find_values(loss, constants, data, scores, parameters):
    objective = Objective(loss, constants, data.targets, parameters, None)
    return loss_values(objective, scores)


def _idleness_program(loss, curvature, constants, data, state):
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer, state.kinks,
        state.coupling,
    )  # fmt: skip
    slopes, _ = derivatives(objective, state.scores, data.weights, curvature)
    return count_slopes(objective, slopes, state.scores, data.weights)
