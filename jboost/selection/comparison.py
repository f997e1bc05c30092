# SPDX-License-Identifier: Apache-2.0
"""The door of cross-validation and of sweeps.

In: raw tables, folds, points. Out: all of it checked and on the device, and the
curves of the points.
"""

from functools import partial

import jax
import numpy as np
from jaxtyping import Float

from jboost import losses
from jboost.boosting.settings import initial_scores, make_settings
from jboost.entry import checks
from jboost.kernels.library import settle_implementation
from jboost.objective.tracing import trace_loss
from jboost.selection.curves import Curve, Setting, Table, run_points, same_loss
from jboost.selection.folds import check_folds, make_folds
from jboost.streams.streaming import Stream
from jboost.training.fitting import bin_arrays
from jboost.training.scoring import bind_metrics, check_metrics, read_by, try_metrics

SWEPT = (
    "loss", "learning_rate", "max_depth", "l1", "l2", "max_delta_step", "min_gain",
    "min_child_weight", "min_child_samples", "regularization", "subsample",
    "colsample_bytree", "colsample_bylevel", "colsample_bynode", "max_leaves",
    "monotone", "interactions", "curvature", "leaf_solver", "init_score", "category_l2",
    "category_smoothing", "min_category_weight", "max_onehot",
)  # fmt: skip


def compare(
    x, y, loss, points, *, keeps_models, shared, base
) -> tuple[Table, list[Curve]]:
    """Checks everything, and runs all folds of all points."""
    _check_rows(x)
    num_rounds = checks.check_integer("num_rounds", shared["num_rounds"], least=0)
    bound = [_bind_loss(loss, point) for point in points]
    # The estimates of an adaptive loss see real rows only.
    padded = not any(isinstance(each, losses.Adaptive) for each in bound)
    by, metrics = read_by(shared["by"], check_metrics(shared["metrics"]))
    given, table = _make_table(x, y, padded, keeps_models, by, tuple(metrics), shared)
    data, num_scores = table.rows.data, len(table.rows.scores)
    settings = []
    for place, (each, point) in enumerate(zip(bound, points, strict=True)):
        chosen = base | {name: point[name] for name in base if name in point}
        rates = checks.learning_rates(chosen.pop("learning_rate"), num_rounds)
        begin = initial_scores(chosen.pop("init_score"), num_scores)
        losses.check_domain(each, data.targets, data.weights, num_scores, "y")
        traced, constants = trace_loss(each, data.targets, num_scores)
        method, numbers = make_settings(
            traced, data, uniform=given.uniform and not table.folds.repeated,
            max_bins=shared["max_bins"] if given.sorted else table.bins.num_bins,
            num_features=table.bins.num_features, categories=table.bins.categories,
            candidates=shared["candidates"], feature_names=table.names,
            candidate_weights=shared["candidate_weights"],
            **chosen,
        )  # fmt: skip
        rates = np.asarray(rates)
        name = f" of points[{place}], {point}" if point else ""
        measures = bind_metrics(metrics, each, num_scores)
        try_metrics(measures, *table.rows.real, num_scores)
        settings.append(
            Setting(name, traced, constants, method, numbers, begin, rates, measures)
        )
    if table.by.name == "loss" and not all(
        same_loss(settings[0], each) for each in settings
    ):
        raise ValueError(
            "by must name a metric where points differ in their loss, because "
            f"values of different losses cannot be compared, got {shared['by']!r}"
        )
    with settle_implementation(data.weights):
        return table, run_points(table, settings, num_rounds, shared["progress"])


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


def _make_table(x, y, padded, keeps_models, by, metrics, shared):
    """Thresholds, rows on the device, folds; and what is wanted of them."""
    num_scores = checks.check_integer("num_scores", shared["num_scores"], least=1)
    max_bins = checks.check_integer("max_bins", shared["max_bins"], least=2, most=65536)
    seed = checks.check_integer("seed", shared["seed"], least=0, most=2**32 - 1)
    patience = shared["early_stopping_rounds"]
    if patience is not None:
        checks.check_integer("early_stopping_rounds", patience, least=1)
    given = bin_arrays(
        x, y, shared["sample_weight"], shared["offset"], max_bins, num_scores, padded,
        shared["feature_names"], absent=shared["absent"],
        candidates=shared["candidates"], candidate_weights=shared["candidate_weights"],
        categorical=shared["categorical"],
    )  # fmt: skip
    rows, num_features = given.rows, given.bins.num_features
    draw = {name: shared[name] for name in ("stratify", "groups", "shuffle")}
    targets = jax.tree.leaves(rows.data.targets)
    labels = np.asarray(targets[0])[: rows.size] if len(targets) == 1 else None
    folds = make_folds(shared["folds"], rows.size, y=labels, seed=seed, **draw)
    check_folds(folds, np.asarray(rows.data.weights)[: rows.size])
    return given, Table(
        bins=given.bins,
        rows=rows,
        folds=folds,
        names=checks.check_names(
            shared["feature_names"], given.schema.names, num_features
        ),
        metrics=metrics,
        by=by,
        patience=patience,
        seed=seed,
        keeps_models=keeps_models,
    )


def average(values: Float[np.ndarray, "folds R"]):
    """The mean over the folds, and its standard error."""
    count = len(values)
    if count < 2:
        return values.mean(axis=0), np.full(values.shape[1], np.nan)
    return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(count)
