# SPDX-License-Identifier: Apache-2.0
"""Refuses losses that are not finite, or have no gradient, where training starts.

In: values of the loss at the start. Out: an error that names the first row whose loss
cannot be used, and says whether its target is the reason.
"""

from typing import Any, NoReturn

import jax
import numpy as np

from jboost.boosting.sharding import rows_of
from jboost.boosting.state import BoostState, Problem
from jboost.entry.decorators import fetch
from jboost.entry.exchanges import (
    agree,
    gather_numbers,
)
from jboost.entry.messages import show
from jboost.entry.stages import run_in_stages
from jboost.objective.evaluation import Objective, loss_values
from jboost.objective.faults import (
    describe_gap,
    describe_lost_slope,
    find_gaps,
    find_lost_slopes,
    find_never_finite,
)
from jboost.training.history import UNNAMED
from jboost.training.rows import PaddedRows
from jboost.training.sharded import compile_for_rows


def check_values(
    place: str, problem: Problem, rows: PaddedRows, values: Any, state: BoostState
) -> None:
    """Raises for the first row of positive weight whose loss is not finite.

    The initial score, or a parameter of the loss, may be NaN because of one row of one
    process. The rows that are most likely the reason are named.

    Args:
      place: the name of a validation set, or "the data".
      values: the loss of each row at the start; of each group, with weights.
    """
    doubt, message = 0, ""
    with agree():
        if rows.data.groups is not None:
            _check_group_values(place, rows, values)
            return
        values, weights = rows.fetch((values, rows.data.weights))
        bad = ~np.isfinite(values) & (weights > 0)
        if bad.any():
            doubt, message = _describe_rows(place, problem, rows, bad, state)
    worst = max(gather_numbers(doubt))
    with agree():
        if 0 < doubt == worst:
            raise ValueError(message)


def refuse_rows(
    place: str,
    problem: Problem,
    rows: PaddedRows,
    bad: np.ndarray,
    state: BoostState,
) -> NoReturn:
    """Raises for the first of some rows of this process whose loss is not finite."""
    raise ValueError(_describe_rows(place, problem, rows, bad, state)[1])


def _describe_rows(place, problem, rows, bad, state):
    """Describes the first of some rows whose loss is not finite.

    Rows whose loss is finite at no score come first; if these are all rows, those whose
    target is not finite.

    Returns:
      How likely the row is the reason: 1, 2 or 3; and the description.
    """
    targets, weights = rows.real
    start = rows.fetch(rows.offset, axis=1)
    constants, parameters = fetch((problem.constants, state.parameters))
    objective = Objective(problem.loss, constants, targets, parameters, None)
    init_score = np.asarray(state.init_score).reshape(-1, 1)
    with run_in_stages():
        never = find_never_finite(objective, start) & (weights > 0)
        known = np.isfinite(init_score).all()
        start = jax.device_put(start + init_score if known else start)
        values = np.asarray(loss_values(objective, start))
        if not known:
            lost = np.asarray(find_lost_slopes(objective, start)) & np.isfinite(values)
            slope = _describe_lost(lost, targets, weights, start)
            if slope is not None:
                return 3, slope
    gaps = find_gaps(targets, weights)
    for likely in (never, gaps if (never | (weights == 0)).all() else never):
        bad = bad & likely if (bad & likely).any() else bad
    row = int(np.argmax(bad))
    target = jax.tree.map(lambda t: t[row].tolist(), targets)
    score = np.asarray(start)[:, row].tolist()
    if never[row] and gaps[row]:
        return 3, describe_gap(_name_targets(place), target, row)
    return 2 if never[row] else 1, (
        f"loss must be finite on {place}, got {float(values[row])} in row {row} "
        f"for target {show(target)} at score {score}; a target may lie "
        "outside what the loss is defined for, the arguments of the loss may be "
        "swapped (the call is loss(score, target)), or init_score may be needed"
    )


def _name_targets(place):
    if place == "the data":
        return "y"
    return "validation y" if place == UNNAMED else f"validation[{show(place)}] y"


def _check_group_values(place, rows, pair):
    """Raises for the first group of positive weight whose loss is not finite."""
    values, weights = map(np.asarray, pair)
    bad = ~np.isfinite(values) & (weights > 0)
    if not bad.any():
        return
    groups, at = rows.data.groups, int(np.argmax(bad))
    members = np.arange(rows.size)
    which = "a group of random rows" if groups.kind == "random" else "all rows"
    if groups.kind == "ids":
        number = np.concatenate([np.asarray(table.number) for table in groups.tables])
        members = np.flatnonzero(np.asarray(groups.number)[: rows.size] == number[at])
        which = f"the group of rows {members[:8].tolist()}"
    refuse_group(place, rows, members, values[at], which)


def refuse_group(
    place: str, rows: PaddedRows, members: Any, value: Any, which: str
) -> NoReturn:
    """Raises for a group whose loss is not finite.

    Args:
      members: the rows that may be the reason.
      which: a description of the group.
    """
    gaps, reason = np.intersect1d(members, np.flatnonzero(find_gaps(*rows.real))), ""
    if len(gaps):
        target = jax.tree.map(lambda t: t[gaps[0]].tolist(), rows.real[0])
        reason = f" ({_name_targets(place)} is {show(target)} in row {gaps[0]})"
    raise ValueError(
        f"loss must be finite on {place}, got {value} for {which}{reason}; a target "
        "may lie outside what the loss is defined for, the arguments may be swapped "
        "(the call is loss(scores, targets, *, where)), or init_score may be needed"
    )


def check_slopes(problem: Problem, rows: PaddedRows, state: BoostState) -> None:
    """Raises for the first row whose gradient is NaN where its loss is finite.

    At kinks the gradient may be NaN if it is not beside them.
    """
    if problem.loss.coupled:
        return
    constants, data = problem.constants, problem.data
    if rows.spread is None:
        with run_in_stages():
            lost = _find_lost(problem.loss, constants, data, state)
    else:
        spec = rows_of(rows.spread.shards)
        run = compile_for_rows(rows.spread, _find_lost, problem.loss, results=spec)
        lost = run(constants, data, state)
    with agree():
        lost, (targets, weights) = rows.fetch(lost), rows.real
        scores = rows.fetch(state.scores, axis=1)
        message = _describe_lost(lost, targets, weights, scores)
        if message is not None:
            raise ValueError(message)


def _describe_lost(lost, targets, weights, scores):
    """Describes the first row of positive weight whose gradient is lost, if any."""
    bad = np.asarray(lost) & (weights > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: t[row].tolist(), targets)
        score = np.asarray(scores)[:, row].tolist()
        return describe_lost_slope(target, row, f"score {score}")
    return None


def _find_lost(loss, constants, data, state):
    objective = Objective(loss, constants, data.targets, state.parameters, None)
    return find_lost_slopes(objective, state.scores)
