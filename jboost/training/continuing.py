# SPDX-License-Identifier: Apache-2.0
"""Training that goes on from a model.

In: a model, a run on new or the same data, before its first round. Out: the run as it
stands after the model's rounds: their scores, their number (which seeds and schedules
count on from), and what an average row curved in the first of them.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost.boosting.rounds import begin_round, estimate_parameters
from jboost.entry.programs import compiled
from jboost.model.ensemble import Ensemble, check_model, map_rounds
from jboost.model.predicting import leaf_indices
from jboost.streams.batches import checked_batches
from jboost.streams.streaming import Stream
from jboost.tables.categories import Categories
from jboost.tables.sparse import Absent
from jboost.training.chunks import Job
from jboost.training.host_loop import Position
from jboost.training.rows import Rows, name_sets

_MOST_ROUNDS = 16  # whose leaves are found at a time
_MOST_LEAVES = 2**26  # of all rows


def check_start(
    model: Any, init_score: Any, num_scores: int, absent: Absent | None
) -> Ensemble:
    """Checks that training can continue from the model.

    Returns:
      The model, with ``absent`` if that is given and the model does not say.
    """
    check_model(model)
    if model.num_scores != num_scores:
        raise ValueError(
            f"num_scores must be {model.num_scores}, as the model has, got {num_scores}"
        )
    if not isinstance(init_score, str) or init_score != "auto":
        raise ValueError(
            "init_score must be 'auto' where a model is given, whose own is kept, got "
            f"{init_score!r}"
        )
    if None not in (absent, model.absent) and model.absent != absent:
        raise ValueError(
            f"absent must be {model.absent!r}, as the model was trained, got "
            f"{absent!r}; to change it, use dataclasses.replace(model, "
            f"absent={absent!r})"
        )
    return replace(model, absent=model.absent or absent)


def match_columns(
    model: Ensemble, num_features: int, feature_names: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Whether the columns are those of the model; their names."""
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
            f"{expected!r}, got {got!r}"
        )
    return feature_names or known


def match_categories(model: Ensemble, categories: Categories | None) -> None:
    """Whether a code stands for one category in the model and in the new rounds."""
    known = model.categories
    if known is None and categories is None:
        return
    if known is None or categories is None:
        kinds = ["none" if c is None else f"{c.features}" for c in (known, categories)]
        raise ValueError(
            f"the categorical features must be those of the model, {kinds[0]}, got "
            f"{kinds[1]}"
        )
    same = known.features == categories.features and known.values == categories.values
    if not same or not np.array_equal(known.codes, categories.codes):
        raise ValueError(
            "the categories of x must have the codes that they have in the model, got "
            "others; training can go on from it with the same categories alone"
        )


def continue_from(
    model: Ensemble, job: Job, position: Position, x: Any, validation: Any
) -> Position:
    """The position after the model's rounds.

    Laws: on the same data, ``fit(m rounds)`` and then ``n`` rounds from that model are
    ``fit(m + n rounds)``; training from a model of no rounds is training.
    """
    sets = tuple(
        _score(model, parts[0], job.sets[name])
        for name, (_, parts) in name_sets(validation).items()
    )
    run = compiled(_average_curvature, job.loss, job.method)
    data = job.rows.data._replace(codes=None)
    state = position.state
    if model.num_rounds:
        first_mean = run(job.constants, job.numbers, data, state)
        scores = _score(model, x, job.rows)
        estimate = compiled(estimate_parameters, job.loss)
        state = state._replace(
            scores=scores,
            parameters=estimate(job.constants, data, scores),
            first_mean=first_mean,
            round=jnp.int32(model.num_rounds),
        )
    return Position(state, sets)


def _average_curvature(loss, method, constants, numbers, data, state):
    """What "relative" divides by in the first round, which starts at init_score."""
    _, now = begin_round(loss, constants, method, numbers, data, state)
    return now.fitted.mean


def _score(model, x, rows: Rows):
    """Scores of padded rows after the model's rounds."""
    start = np.asarray(model.init_score).reshape(-1, 1)
    scores = np.asarray(rows.scores) + start
    real = scores[:, : rows.size]
    if isinstance(x, Stream):
        first = 0
        for batch in checked_batches(x.source):
            end = first + len(batch.x)
            _add_rounds(model, batch.x, real[:, first:end])
            first = end
    else:
        _add_rounds(model, x, real)
    scores[:, rows.size :] = scores[:, :1]  # padding repeats row 0
    return jax.device_put(scores)


def _add_rounds(model, x, scores):
    """Adds leaf values round by round, in the order of training, and so to its bits."""
    num_scores, num_rows = scores.shape
    step = max(1, min(_MOST_ROUNDS, _MOST_LEAVES // (num_scores * num_rows)))
    values = np.asarray(model.leaf_value)
    for first in range(0, model.num_rounds, step):
        part = map_rounds(lambda array, f=first: array[f : f + step], model)
        leaves = np.asarray(leaf_indices(part, x))
        leaves = leaves.reshape(num_rows, -1, num_scores)
        for number in range(leaves.shape[1]):
            for k in range(num_scores):
                scores[k] += values[first + number, k][leaves[:, number, k]]
