# SPDX-License-Identifier: Apache-2.0
"""The door of cross-validation and of sweeps.

In: raw tables, folds, points. Out: all of it checked and on the device, and the
curves of the points.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jboost import losses
from jboost.boosting.method import initial_scores, make_method
from jboost.boosting.settings import RoundSettings, Settings, declared
from jboost.entry import checks
from jboost.kernels.library import settle_implementation
from jboost.objective.tracing import trace_loss
from jboost.selection.curves import Curve, Point, Table, run_points, same_loss
from jboost.selection.folds import check_folds, make_folds
from jboost.streams.streaming import Stream
from jboost.tables.domains import check_domain
from jboost.training.fitting import bin_arrays
from jboost.training.scoring import bind_metrics, check_metrics, read_by, try_metrics

# Settings that decide the codes, which all points share.
_OF_CODES = ("max_bins", "candidates", "candidate_weights")
SWEPT = (
    "loss",
    *(name for name in declared(RoundSettings) if name not in _OF_CODES),
    "init_score",
)


class Request(NamedTuple):
    """What all points share, as it was given.

    Attributes:
      metrics, by: as they were given.
      keeps_models: whether trees and scores of held-out rows are wanted.
    """

    x: Any
    y: Any
    sample_weight: Any
    offset: Any
    folds: Any
    stratify: Any
    groups: Any
    shuffle: bool
    metrics: Any
    by: Any
    feature_names: Any
    progress: bool
    keeps_models: bool


def compare(
    request: Request, loss: Any, points: list[dict[str, Any]], settings: Settings
) -> tuple[Table, list[Curve]]:
    """Checks everything, and runs all folds of all points.

    Args:
      points: what each sets, of ``SWEPT`` and of the keywords of the loss.
      settings: what a point does not set.
    """
    _check_rows(request.x)
    bound = [_bind_loss(loss, point) for point in points]
    # The estimates of an adaptive loss see real rows only.
    padded = not any(isinstance(each, losses.Adaptive) for each in bound)
    by, metrics = read_by(request.by, check_metrics(request.metrics))
    given, table = _make_table(request, settings, padded, by, tuple(metrics))
    made = []
    for index, (each, point) in enumerate(zip(bound, points, strict=True)):
        own = settings.replace(**{name: point[name] for name in point if name in SWEPT})
        name = f" of points[{index}], {point}" if point else ""
        made.append(_make_point(name, each, own, given, table, metrics))
    if table.by.name == "loss" and not all(same_loss(made[0], each) for each in made):
        raise ValueError(
            "by must name a metric where points differ in their loss, because "
            f"values of different losses cannot be compared, got {request.by!r}"
        )
    with settle_implementation(table.rows.data.weights):
        return table, run_points(table, made, settings.num_rounds, request.progress)


def _make_point(name, loss, settings, given, table: Table, metrics) -> Point:
    """One point, checked against the data."""
    data, num_scores = table.rows.data, settings.num_scores
    rates = checks.learning_rates(settings.learning_rate, settings.num_rounds)
    begin = initial_scores(settings)
    check_domain(loss, data.targets, data.weights, num_scores, "y")
    traced, constants = trace_loss(loss, data.targets, num_scores)
    method, numbers = make_method(
        settings, traced, data.columns, num_rows=len(data.weights),
        uniform=given.uniform and not table.folds.repeated,
        max_bins=settings.max_bins if given.sorted else table.bins.num_bins,
        num_features=table.bins.num_features, categories=table.bins.categories,
        feature_names=table.names,
    )  # fmt: skip
    measures = bind_metrics(metrics, loss, num_scores)
    try_metrics(measures, *table.rows.real, num_scores)
    return Point(
        name, traced, constants, method, numbers, begin, np.asarray(rates), measures
    )


def _check_rows(x):
    """Rows must be here to be held out."""
    if isinstance(x, Stream):
        raise ValueError(
            "x must hold its rows in memory (an array, a data frame, a sparse matrix), "
            "got a stream; leave rows out of its batches and call fit"
        )


def _bind_loss(loss, point):
    """The loss of a point."""
    loss = point.get("loss", loss)
    own = {name: value for name, value in point.items() if name not in SWEPT}
    return partial(loss, **own) if own else loss


def _make_table(request, settings, padded, by, metrics):
    """Thresholds, rows on the device, and folds."""
    given = bin_arrays(
        request.x, request.y, request.sample_weight, request.offset, settings, padded,
        request.feature_names,
    )  # fmt: skip
    rows, num_features = given.rows, given.bins.num_features
    targets = jax.tree.leaves(rows.data.targets)
    labels = np.asarray(targets[0])[: rows.size] if len(targets) == 1 else None
    folds = make_folds(
        request.folds, rows.size, y=labels, stratify=request.stratify,
        groups=request.groups, shuffle=request.shuffle, seed=settings.seed,
    )  # fmt: skip
    check_folds(folds, np.asarray(rows.data.weights)[: rows.size])
    return given, Table(
        bins=given.bins,
        rows=rows,
        folds=folds,
        names=checks.check_names(
            request.feature_names, given.schema.names, num_features
        ),
        metrics=metrics,
        by=by,
        patience=settings.early_stopping_rounds,
        seed=settings.seed,
        keeps_models=request.keeps_models,
    )


def average(values: Float[np.ndarray, "folds R"]):
    """The mean over the folds, and its standard error."""
    count = len(values)
    if count < 2:
        return values.mean(axis=0), np.full(values.shape[1], np.nan)
    return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(count)
