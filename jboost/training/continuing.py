# SPDX-License-Identifier: Apache-2.0
"""Training that continues from a model.

In: a model, and a run on the same or other data before its first round. Out: the
position of the run after the rounds of the model: the steps, the number of rounds
(seeds and schedules count from there), and the mean curvature of the first round.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jboost.boosting.derivatives import (
    choose_scaling,
    differentiate,
    scale_derivatives,
)
from jboost.boosting.settings import Settings
from jboost.boosting.sharding import EVERYWHERE
from jboost.boosting.state import Arrays, Problem, estimate_parameters
from jboost.entry.messages import show
from jboost.entry.programs import compiled
from jboost.model.ensemble import (
    Ensemble,
    check_model,
    map_rounds,
    take_part,
    truncate,
)
from jboost.model.predicting import leaf_indices, predict
from jboost.model.wide_thresholds import warn_of_float32
from jboost.tables.categories import WORD, Categories
from jboost.tables.frames import RowSource
from jboost.training.chunks import Job, Position, choose_effort
from jboost.training.rows import PaddedRows
from jboost.training.sharded import compile_for_rows

_MOST_ROUNDS = 16  # rounds of leaf indices that are computed at a time
_MOST_LEAVES = 2**26  # leaf indices of all rows and rounds at a time


def check_start(model: Any, settings: Settings) -> Ensemble:
    """Checks that training can continue from the model.

    Returns:
      The model, with the given ``absent`` if its own is None.
    """
    check_model(model)
    init_score, absent = settings.init_score, settings.absent
    num_scores = settings.num_scores
    if model.num_scores != num_scores:
        raise ValueError(
            f"num_scores must be {model.num_scores}, as the model has, got {num_scores}"
        )
    if not isinstance(init_score, str) or init_score != "auto":
        raise ValueError(
            "init_score must be 'auto' where a model is given, whose own is kept, got "
            f"{show(init_score)}"
        )
    if None not in (absent, model.absent) and model.absent != absent:
        raise ValueError(
            f"absent must be {model.absent!r}, as the model was trained, got "
            f"{show(absent)}; to change it, use dataclasses.replace(model, "
            f"absent={absent!r})"
        )
    warn_of_float32(model, "training, and the model that continues from it,")
    return replace(model, absent=model.absent or absent, wide_threshold=None)


def match_columns(
    model: Ensemble, num_features: int, feature_names: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Checks that the columns are those of the model; returns their names."""
    if model.num_features != num_features:
        raise ValueError(
            f"x must have {model.num_features} columns, as the model was trained on, "
            f"got {num_features}"
        )
    known = model.feature_names
    if known and feature_names and known != feature_names:
        pairs = zip(known, feature_names, strict=True)
        expected, got = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            "x must have the columns of the model in the same order, expected "
            f"{show(expected)}, got {show(got)}"
        )
    return feature_names or known


def adopt_categories(model: Ensemble, categories: Categories | None) -> Ensemble:
    """Returns the model with categories that it did not see.

    The trees of the model treat them as before, as missing: where missing values go
    left, the codes of the new categories join the set that goes left.

    Args:
      model: the model that training continues.
      categories: the categories of its training rows, then those of the new rows, from
        :func:`jboost.codes.binning.fit_categories`.
    """
    known = model.categories
    if known is None and categories is None:
        return model
    if known is None or categories is None or known.features != categories.features:
        kinds = ["none" if c is None else f"{c.features}" for c in (known, categories)]
        raise ValueError(
            f"the categorical features must be those of the model, {kinds[0]}, got "
            f"{kinds[1]}"
        )
    model = replace(model, categories=categories)
    old, new = (np.asarray(c.codes).max(axis=1) for c in (known, categories))
    if model.left_codes is None or np.all(old == new):
        return model
    code = np.arange(WORD * (new.max() // WORD + 1))
    bits = (code > old[:, None]) & (code <= new[:, None])
    added = bits.reshape(len(new), -1, WORD) @ (1 << np.arange(WORD, dtype=np.uint32))
    by_feature = np.zeros((model.num_features, added.shape[1]), np.uint32)
    by_feature[list(categories.features)] = added
    sets = np.asarray(model.left_codes)
    missing = max(0, added.shape[1] - sets.shape[3])
    sets = np.pad(sets, (*[(0, 0)] * 3, (0, missing)))
    left = np.asarray(model.missing_left) & np.isnan(np.asarray(model.threshold))
    added = by_feature[np.asarray(model.feature)] * left[..., None]
    sets[..., : added.shape[3]] |= added
    return replace(model, left_codes=jax.device_put(sets))


def continue_from(
    model: Ensemble, job: Job, position: Position, xs: Sequence[Any]
) -> Position:
    """Returns the position after the model's rounds.

    Args:
      position: the position before the first round.
      xs: the raw rows: those of training, then of each validation set.

    Laws: on the same data, ``fit(m rounds)`` and then ``n`` rounds from that model are
    ``fit(m + n rounds)``; training from a model of no rounds is training.
    """
    before, problem = position.state, job.problem
    position = add_model(model, job, position, xs)
    if not model.num_rounds:
        return position
    # These programs do not look at codes.
    data = problem.data._replace(codes=None)
    effort = choose_effort(problem, job.rows.padded)  # as for rounds
    make: Any = partial(compiled, effort=effort)
    if job.rows.spread is not None:
        spread, options = job.rows.spread, dict(results=EVERYWHERE, effort=effort)
        make = partial(compile_for_rows, spread, **options)
    measure = make(_measure_first_round, problem.static)
    operands = (problem.constants, data, before)
    if problem.loss.coupled:
        operands += (problem.arrays.numbers,)
    first_mean, concentration = measure(*operands)
    estimate = make(_estimate_anew, problem.loss)
    state = position.state._replace(
        parameters=estimate(problem.constants, data, position.state),
        first_mean=first_mean,
        concentration=concentration,
        round=np.int32(model.num_rounds),
    )
    return position._replace(state=state)


def add_model(
    model: Ensemble, job: Job, position: Position, xs: Sequence[Any]
) -> Position:
    """Replaces the steps of all rows by those after the rounds of a model.

    Args:
      position: the position to change; its other values are kept.
      xs: the raw rows: those of training, then of each validation set.
    """
    state, (x, *set_xs) = position.state, xs
    sets = job.sets.values()
    if job.problem.loss.coupled:
        state = _replay_probes(model, job, state, x)
    else:
        state = state._replace(steps=_sum_steps(model, x, job.rows))
    if any(rows.data.codes is None for rows in sets):  # the training rows
        return Position(state, (state.steps,))
    pairs = zip(set_xs, sets, strict=True)
    return Position(state, tuple(_sum_steps(model, x, rows) for x, rows in pairs))


def _replay_probes(model, job, state, x):
    """Returns the state with steps and the probe that the rounds have left.

    The probe is an average over rounds: its products are made again.
    """
    problem, rows = job.problem, job.rows
    arrays = problem.arrays._replace(data=problem.data._replace(codes=None))
    effort = choose_effort(problem, rows.padded)  # as for rounds
    replay = compiled(_replay_round, problem.static, effort=effort)
    steps = rows.no_steps()
    begin = compiled(_estimate_anew, problem.loss, effort=effort)
    at = state._replace(round=np.int32(0))
    at = at._replace(parameters=begin(problem.constants, arrays.data, at))
    for _ in _each_round(model, x, steps):
        at = replay(arrays, at, rows.put_scores(steps))
    return state._replace(steps=at.steps, probe=at.probe)


def _replay_round(static, arrays, state, steps):
    problem = Problem(static, arrays)
    state, _ = differentiate(problem, state)
    state = state._replace(steps=steps, round=state.round + 1)
    parameters = estimate_parameters(
        problem.loss, problem.constants, problem.data, state.scores
    )
    return state._replace(parameters=parameters)


def _estimate_anew(loss, constants, data, state):
    return estimate_parameters(loss, constants, data, state.scores)


def _measure_first_round(static, constants, data, state, numbers=None):
    """Returns mean curvature and concentration at init_score."""
    none: Any = numbers
    problem = Problem(static, Arrays(constants, none, data))
    state, raw = differentiate(problem, state)
    scaling = choose_scaling(problem)
    _, fitted, _ = scale_derivatives(scaling, data.weights, state, raw)
    return fitted.first_mean, fitted.concentration


def _sum_steps(model, x, rows: PaddedRows):
    """Returns the steps of padded rows after the rounds of the model."""
    steps = rows.no_steps()
    if isinstance(x, RowSource):
        first = 0
        for batch, _ in x.batches(model.schema, categorical=False):
            end = first + len(batch)
            _add_rounds(model, batch, steps[:, first:end])
            first = end
    else:
        _add_rounds(model, x, steps)
    return rows.put_scores(steps)


def _add_rounds(model, x, steps):
    """Adds leaf values round by round, as training did, to get the same bits."""
    for _ in _each_round(model, x, steps):
        pass


def _each_round(model, x, steps):
    """Adds the leaf values of a round to the steps, and yields its number."""
    num_scores, num_rows = steps.shape
    if not num_rows:  # other processes have some
        return
    if model.slopes is not None:
        yield from _each_linear_round(model, x, steps)
        return
    step = max(1, min(_MOST_ROUNDS, _MOST_LEAVES // (num_scores * num_rows)))
    values = np.asarray(model.leaf_value)
    for first in range(0, model.num_rounds, step):
        rounds = (slice(first, first + step),)
        part = map_rounds(lambda array, r=rounds: take_part(array, r), model)
        leaves = np.asarray(leaf_indices(part, x))
        leaves = leaves.reshape(num_rows, -1, model.feature.shape[1])
        leaves = np.broadcast_to(leaves, (*leaves.shape[:2], num_scores))
        for number in range(leaves.shape[1]):
            for k in range(num_scores):
                steps[k] += values[first + number, k][leaves[:, number, k]]
            yield first + number


def _each_linear_round(model, x, steps):
    """Adds the values of linear leaves to the steps, as :func:`_each_round`."""
    start = jax.device_put(np.zeros(np.shape(model.init_score), np.float32))
    model = replace(model, init_score=start)
    for number in range(model.num_rounds):
        added = np.asarray(predict(truncate(model, 1, first=number), x))
        steps += added.reshape(len(added), -1).T
        yield number
