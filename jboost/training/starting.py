# SPDX-License-Identifier: Apache-2.0
"""Starts training: the state before the first round, and what must hold there.

In: a training run, checked and on the device. Out: its state before the first round,
or an error.
"""

from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import Array

from jboost.boosting.auto import decide_by_data
from jboost.boosting.first_sums import no_sizes
from jboost.boosting.reports import weigh_losses
from jboost.boosting.sharding import rows_of
from jboost.boosting.state import (
    BoostState,
    Problem,
    StartPoint,
    bind_objective,
    start_state,
)
from jboost.entry.decorators import fetch
from jboost.entry.exchanges import (
    agree,
)
from jboost.entry.messages import show
from jboost.entry.programs import FEW, FULL, Compiled, compiled
from jboost.entry.stages import run_in_stages
from jboost.objective.evaluation import Objective, gradients, loss_values
from jboost.training.chunks import Job, Position, choose_effort, no_trees
from jboost.training.record import Record
from jboost.training.refusing import check_slopes, check_values
from jboost.training.rows import PaddedRows
from jboost.training.sharded import compile_for_rows, compile_start
from jboost.trees.initial import START_RULES, MedianStart
from jboost.trees.slopes import is_endless


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
    begin = StartPoint(init_score, words)
    found = _start_together(job, begin) if in_stages else _start_apart(job, begin)
    (state, rule, values, endless), problem = found, job.problem
    if endless:
        refuse_endless()
    if isinstance(init_score, MedianStart):
        check_minimizers(problem, job.rows, state, "init_score='median'")
    if problem.method.leaf_solver == "median_step":
        check_minimizers(problem, job.rows, state, "leaf_solver='median_step'")
    check_values("the data", problem, job.rows, values, state)
    check_slopes(problem, job.rows, state)
    for name, rows in job.sets.items():
        values = _find_set_values(problem, rows, state)
        check_values(name, problem, rows, values, state)
    if init_score is None:
        if problem.loss.coupled:
            return state, "shift-invariant" if rule else "argmin"
        return state, START_RULES[np.asarray(rule).item()]
    return state, "median" if isinstance(init_score, MedianStart) else "given"


def _start_together(job, begin):
    """Finds the start in stages, where all rows can be on one device."""
    rows, loss, constants = job.rows, job.problem.loss, job.problem.constants
    if loss.coupled:
        return _start_apart(job, begin)
    num_scores = len(rows.offset)
    data = job.problem.data._replace(codes=None)
    if rows.spread is not None:
        # Programs on few rows may round in another way than those on many.
        if num_scores * rows.spread.shards.padded > FEW:
            return _start_apart(job, begin)
        constants = fetch(constants)  # from all devices
        data = rows.gather()
    with run_in_stages():
        # On the device once for all stages.
        found = _find_start(loss, *jax.device_put((constants, data, begin)))
    if rows.spread is None:
        return found
    state, rule, values, endless = fetch(found)
    first = rows.spread.first_row
    own = slice(first, first + rows.size)
    by_row = {
        name: None if value is None else rows.put_scores(value[:, own])
        for name in ("start", "steps", "minimizer")
        for value in [getattr(state, name)]
    }
    state = state._replace(**dict.fromkeys(by_row), sizes=fetch(no_sizes(num_scores)))
    state = rows.spread.put_everywhere(state)._replace(**by_row)
    return state, rule, rows.spread.put(values[own]), endless


def _start_apart(job, begin):
    """Finds the start in one program."""
    program, operands = start_program(job, begin)
    return program(*operands)


def _find_set_values(problem, rows, state):
    """Returns the loss of each row of a validation set at the start."""
    # In NumPy, because sets of other sizes would need other programs.
    init_score = np.asarray(state.init_score).reshape(-1, 1)
    start = rows.put_scores(rows.fetch(rows.offset, axis=1) + init_score)
    state = state._replace(start=start, steps=rows.put_scores(rows.no_steps()))
    loss, constants = problem.loss, problem.constants
    if loss.coupled:
        effort = choose_effort(problem, len(rows.data.weights))
        run = compiled(_find_state_values, loss, effort=effort)
        return run(constants, rows.data, state)
    if rows.spread is None:
        with run_in_stages():
            return _find_values(loss, constants, rows.data, start, state.parameters)
    state = state._replace(minimizer=None)
    run = compile_for_rows(
        rows.spread, _find_state_values, loss, results=rows_of(rows.spread.shards)
    )
    return run(constants, rows.data, state)


def start_position(job: Job, state: BoostState) -> Position:
    """Returns the position before the first round."""
    return Position(state, tuple(s.put_scores(s.no_steps()) for s in job.sets.values()))


def start_program(job: Job, start: StartPoint) -> tuple[Compiled, tuple[Any, ...]]:
    """Returns the start as one program, and its operands."""
    loss, data, spread = job.problem.loss, job.problem.data, job.rows.spread
    operands = (job.problem.constants, data, start)
    if spread is None:
        effort = choose_effort(job.problem, len(data.weights))
        return compiled(
            _find_start, loss, effort=effort if loss.coupled else FULL
        ), operands
    # The start does not depend on the features.
    operands = (job.problem.constants, data._replace(codes=None), start)
    return compile_start(spread, _find_start, loss), operands


def check_minimizers(
    problem: Problem, rows: PaddedRows, state: BoostState, setting: str
) -> None:
    """Raises if a row has no minimizer of its own, which a setting needs.

    Rows of weight 0 and rows without a slope do not need one.
    """
    if state.minimizer is None:
        return
    data = problem.data
    objective = bind_objective(problem, state)._replace(minimizer=None, kinks=None)
    if rows.spread is None:
        with run_in_stages():
            slopes = gradients(objective, state.scores)
    else:
        columns = rows_of(rows.spread.shards, 1)
        run = compile_for_rows(rows.spread, _find_slopes, problem.loss, results=columns)
        slopes = run(problem.constants, data, state)
    with agree():
        _check_found(problem, rows, state, slopes, setting)


def _check_found(problem, rows, state, slopes, setting):
    slopes, minimizer = rows.fetch((slopes, state.minimizer), axis=1)
    missing = ~np.isfinite(minimizer) & (slopes != 0)
    targets, weights = rows.real
    bad = missing.any(axis=0) & (weights > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: t[row].tolist(), targets)
        raise ValueError(
            f"{setting} needs a loss that has a minimum of its own in every row, got "
            f"none in row {row} for target {show(target)}"
        )


def refuse_endless() -> NoReturn:
    """Raises for a loss that :func:`is_endless`."""
    raise ValueError(
        "loss must have a minimum in the score, got one without a minimum for any row "
        "of positive weight: it is linear or concave in the score, so unbounded below; "
        "its arguments may be swapped (the call is loss(score, target)), or its sign "
        "may be wrong"
    )


def _find_start(loss, constants, data, start):
    state, rule = start_state(loss, constants, data, start)
    if loss.coupled:
        values = _find_state_values(loss, constants, data, state)
        return state, rule, values, False
    values = _find_values(loss, constants, data, state.scores, state.parameters)
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer
    )
    endless = is_endless(objective, state.scores, data.weights)
    return state, rule, values, endless


def _find_state_values(loss, constants, data, state):
    if loss.coupled:
        return weigh_losses(
            loss, constants, state.parameters, data, state.scores, state.words
        )
    return _find_values(loss, constants, data, state.scores, state.parameters)


def _find_values(loss, constants, data, scores, parameters):
    objective = Objective(loss, constants, data.targets, parameters, None)
    return loss_values(objective, scores)


def _find_slopes(loss, constants, data, state):
    parameters = state.parameters
    objective = Objective(loss, constants, data.targets, parameters, None)
    return gradients(objective, state.scores)


def start_record(request: Any, prepared: Any, job: Job, state: BoostState, rule: str):
    """Returns the record of a run before its first round."""
    method, bins = job.problem.method, prepared.bins
    limits = job.problem.arrays.numbers.limits
    decided = decide_by_data(
        np.asarray(state.pointed),
        np.asarray(state.least_rows),
        method.leaf_solver,
        limits.min_child_samples,
    )
    init_score = np.asarray(state.init_score)
    return Record(
        bins=bins,
        init_score=init_score,
        set_names=tuple(job.sets),
        named=request.named,
        no_trees=no_trees(method, request.settings.num_scores),
        choices=dict(
            curvature=method.curvature,
            leaf_solver="exact" if decided.exact_leaves else method.leaf_solver,
            regularization=method.regularization,
            l2=float(limits.l2),
            min_child_samples=np.asarray(decided.min_child_samples).tolist(),
            init_score=init_score.tolist(),
            init_score_rule=rule,
            num_bins=bins.num_bins,
            share_structure=method.share_structure,
        ),
        feature_names=prepared.feature_names,
        metric_names=tuple(job.metrics),
        measured=tuple(job.real),
        bagged=job.bagged,
        before=prepared.model,
        parameters=[fetch(state.parameters)],
        by=request.by,
    )
