# SPDX-License-Identifier: Apache-2.0
"""How good a model is on some rows: numbers and charts for its kind of loss.

    classes          calibration, ROC or confusion
    numbers          predictions beside targets, residuals by decile
    quantiles        the share of targets below the prediction, by decile
    distributions    probability integral transform, coverage of intervals, means
    ranking          NDCG by rank beside a random order
    survival         concordance, survival by quartile of risk

Charts are dicts, as ``page.js`` draws them.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from jboost import losses, metrics
from jboost.entry.arguments import bound_keywords, takes_mask
from jboost.survival import kaplan_meier
from jboost.tables.groups import RowGroups
from jboost.training.metrics import GroupMetric, evaluate_metric

Chart = dict[str, Any]

_DECILES = 10
_MOST_POINTS = 600  # points of a cloud
_MOST_CLASSES = 20  # classes of a confusion matrix
_MOST_OUTPUTS = 4  # charts of targets [N, K]
_RANKS = (1, 2, 3, 5, 10)
_STEPS = 60  # points of a ROC curve
_RARE = 0.1  # share of positive rows
_TINY = np.float32(1e-30)
_LEVELS = (0.5, 0.8, 0.9, 0.95)
_MARGINS = (losses.hinge, losses.hinge_squared, losses.exponential)
_NORMAL = 1.96  # standard errors of a 95 % interval


_TITLES = {
    "auc": "AUC", "brier": "Brier score", "rmse": "RMSE", "mae": "MAE", "r2": "R²",
    "mse": "MSE", "mape": "MAPE", "mrr": "MRR",
}  # fmt: skip


def title(name: str) -> str:
    """Returns the name of a metric or a loss as people write it."""
    if name.startswith("ndcg"):
        return name.upper()
    return _TITLES.get(name) or name.capitalize().replace("_", " ")


class Scored(NamedTuple):
    """Rows, and the predictions of a model for them.

    Attributes:
      predicted: the result of the inverse link for all rows.
      numbers: the places of the rows in the table; those without weight are left out.
      row_losses: [N]; None if the loss is one of groups.
      start_loss: the mean loss of the initial score; None for groups.
      class_names: the names of classes; None for their numbers.
    """

    loss: Any
    link: Callable[..., Any] | None
    scores: Float[np.ndarray, "N *K"]
    predicted: Any
    targets: Any
    weights: Float[np.ndarray, " N"]
    offset: Float[np.ndarray, "N K"] | None
    numbers: Int[np.ndarray, " N"]
    row_losses: Float[np.ndarray, " N"] | None
    start_loss: float | None
    groups: RowGroups | None
    class_names: list[str] | None

    def measure(self, *names: str) -> list[tuple[str, float]]:
        """Evaluates metrics of rows."""
        rows = self.scores, self.targets, self.weights
        found = []
        for name in names:
            bound = partial(metrics.METRICS[name], inverse_link=self.link)
            found.append((title(name), evaluate_metric(bound, rows)))
        return found


class Quality(NamedTuple):
    """The numbers and charts for one kind of model.

    Attributes:
      kind: the kind, in words.
      numbers: names and values.
      num_classes: the number of classes; 0 for other targets.
    """

    kind: str
    numbers: list[tuple[str, float]]
    charts: list[Chart]
    num_classes: int = 0


def judge(rows: Scored) -> Quality:
    """Chooses the kind by loss and targets, and measures."""
    found = _judge(rows)
    if rows.row_losses is None:
        return found._replace(numbers=[*_measure_groups(rows), *found.numbers])
    mean = float(np.average(rows.row_losses, weights=rows.weights))
    numbers = [("Loss", mean), ("Loss of the initial score", rows.start_loss)]
    # Where the loss is a metric, it is there already.
    others = [
        (name, value)
        for name, value in found.numbers
        if not (name == "Log loss" and math.isclose(value, mean, rel_tol=1e-4))
    ]
    return found._replace(numbers=[*numbers, *others])


def _measure_groups(rows):
    """Returns the mean loss of groups of given ids."""
    if rows.groups is None or not rows.groups.tables:
        return []
    if isinstance(rows.loss, losses.Adaptive) or not takes_mask(rows.loss):
        return []
    mean = GroupMetric(rows.loss)(rows.scores, rows.targets, rows.weights, rows.groups)
    return [("Mean loss of the groups", mean)]


def _judge(rows):
    targets, known = rows.targets, losses.bare_loss(rows.loss)
    if known in (losses.cox, losses.concordance):
        return _judge_survival(rows)
    if not isinstance(targets, np.ndarray) or targets.ndim > 2:
        return _judge_any(rows)
    if rows.groups is not None and rows.row_losses is None:
        ranked = targets.ndim == rows.scores.ndim == 1 and (targets >= 0).all()
        return _judge_ranking(rows) if ranked else _judge_any(rows)
    if hasattr(rows.predicted, "cdf") and targets.ndim == 1:
        return _judge_distribution(rows)
    predicted = rows.predicted
    parameters = isinstance(known, losses.Likelihood) and rows.link is None
    if parameters or not isinstance(predicted, np.ndarray):
        return _judge_any(rows)
    if targets.ndim == 1 and predicted.ndim == 2:
        return _judge_classes(rows) if _are_chances(predicted) else _judge_any(rows)
    if targets.ndim == 1 and known is losses.quantile:
        return _judge_quantile(rows)
    if targets.ndim == 1 and _has_classes(rows, known):
        return _judge_two(rows, known)
    if known in (losses.logistic, losses.focal) and predicted.shape == targets.shape:
        given = np.isfinite(targets)
        every = np.broadcast_to(
            rows.weights.reshape(-1, *[1] * (targets.ndim - 1)), targets.shape
        )
        charts = [_calibrate(predicted[given], targets[given], every[given])]
        kind = "shares" if targets.ndim == 1 else f"{targets.shape[1]} labels a row"
        return Quality(kind, rows.measure("log_loss", "brier"), charts)
    if predicted.shape == targets.shape and known not in _MARGINS:
        return _judge_numbers(rows)
    return _judge_any(rows)


def _are_chances(predicted):
    return bool((predicted >= 0).all() and np.allclose(predicted.sum(1), 1, atol=1e-3))


def _has_classes(rows, known):
    """Returns whether targets are two classes, and the loss may be one of classes."""
    if set(np.unique(rows.targets).tolist()) not in ({0, 1}, {-1, 1}):
        return False
    built_in = any(known is each for each in losses.LOSSES.values())
    return not built_in or known in (losses.logistic, losses.focal, *_MARGINS)


# ---- classes ------------------------------------------------------------------------


def _judge_two(rows, known):
    """Two classes, 0 and 1 or -1 and 1."""
    positive = (rows.targets > 0).astype(np.float32)
    chance = rows.predicted
    rows = rows._replace(targets=positive)
    own = rows._replace(link=None).measure("auc", "average_precision")
    charts = [_draw_roc(rows, own[0][1])]
    decided = rows.scores > 0 if known in _MARGINS else None
    if rows.link is not None and ((chance >= 0) & (chance <= 1)).all():
        own += rows.measure("log_loss", "brier")
        charts.insert(0, _calibrate(chance, positive, rows.weights))
        charts.append(_draw_chances(chance, positive, rows))
        if np.average(positive, weights=rows.weights) < _RARE:
            charts.append(_draw_recall(rows))
        decided = chance > 0.5
    if decided is not None:
        right = decided == (positive > 0)
        own.append(("Accuracy", float(np.average(right, weights=rows.weights))))
        charts.append(_confuse(positive.astype(int), decided.astype(int), 2, rows))
    return Quality("two classes", own, charts, 2)


def _judge_classes(rows):
    """K classes with probabilities [N, K]."""
    count = rows.predicted.shape[1]
    truth, decided = rows.targets.astype(int), rows.predicted.argmax(axis=1)
    right = (truth == decided).astype(np.float32)
    surest = rows.predicted.max(axis=1)
    calibration = _calibrate(surest, right, rows.weights)
    calibration["title"] = "Calibration of the most probable class"
    calibration["y_label"] = "share of rows where it is right"
    charts = [calibration, _confuse(truth, decided, count, rows)]
    numbers = rows.measure("log_loss", "accuracy", "brier")
    return Quality(f"{count} classes", numbers, charts, count)


def _calibrate(chance, outcome, weights) -> Chart:
    """Mean outcome by decile of the probability, with 95 % intervals."""
    parts = _split(chance, weights)
    mean = [float(np.average(chance[p], weights=weights[p])) for p in parts]
    share = np.array([np.average(outcome[p], weights=weights[p]) for p in parts])
    size = np.array([_count(weights[p]) for p in parts])
    # Agresti and Coull 1998: bounded shares of few rows.
    center = (share * size + _NORMAL**2 / 2) / (size + _NORMAL**2)
    half = _NORMAL * np.sqrt(center * (1 - center) / (size + _NORMAL**2))
    high = np.maximum(np.minimum(center + half, 1), share)
    top = max(*mean, high.max())
    return dict(
        type="intervals", title="Calibration", x=mean, y=share.tolist(),
        low=np.minimum(np.maximum(center - half, 0), share).tolist(),
        high=high.tolist(),
        x_label="mean probability by decile", y_label="share of rows with the class",
        diagonal=True, range=[0, 1 if top > 0.5 else 1.05 * top],
    )  # fmt: skip


def _count(weights):
    """Returns the number of rows of equal weight with as exact a mean (Kish 1965)."""
    return weights.sum() ** 2 / (weights**2).sum()


def _find_quantiles(values, weights, levels):
    """Returns the least values that reach a share of the weights."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order], dtype=np.float64)
    place = np.searchsorted(reached, np.asarray(levels) * reached[-1] * (1 - 1e-9))
    return values[order][np.minimum(place, len(order) - 1)]


def _split(
    values: Shaped[np.ndarray, " N"], weights: Float[np.ndarray, " N"]
) -> list[Int[np.ndarray, " n"]]:
    """Splits rows at the deciles of a column; equal values stay together."""
    levels = np.arange(1, _DECILES) / _DECILES
    edges = np.unique(_find_quantiles(values, weights, levels))
    place = np.searchsorted(edges, values, side="left")
    return [np.flatnonzero(place == number) for number in np.unique(place)]


def _draw_roc(rows, auc) -> Chart:
    order = np.argsort(-rows.scores, kind="stable")
    weight, positive = rows.weights[order], rows.targets[order] > 0
    last = np.append(np.diff(rows.scores[order]) != 0, True)
    true = np.cumsum(weight * positive)[last] / max((weight * positive).sum(), 1e-30)
    false = np.cumsum(weight * ~positive)[last] / max((weight * ~positive).sum(), 1e-30)
    way = true + false  # from 0 to 2, in equal steps
    kept = np.unique(np.searchsorted(way, np.linspace(way[0], way[-1], _STEPS)))
    kept = np.minimum(kept, len(way) - 1)
    return dict(
        type="lines", title=f"ROC curve, area {auc:.3f}", x=[0, *false[kept]],
        series=[dict(name="model", y=[0, *true[kept]])], diagonal=True, range=[0, 1],
        x_label="false positive rate", y_label="true positive rate",
    )  # fmt: skip


def _draw_recall(rows) -> Chart:
    order = np.argsort(-rows.scores, kind="stable")
    weight, positive = rows.weights[order], rows.targets[order] > 0
    found, taken = np.cumsum(weight * positive), np.cumsum(weight)
    last = np.append(np.diff(rows.scores[order]) != 0, True)
    recall, precision = (found / found[-1])[last], (found / taken)[last]
    kept = np.searchsorted(recall, np.linspace(recall[0], 1, _STEPS))
    kept = np.unique(np.minimum(kept, len(recall) - 1))
    return dict(
        type="lines", title="Precision by recall", x=recall[kept],
        series=[dict(name="model", y=precision[kept])], zero=True,
        x_label="share of the positive rows found", y_label="share that is positive",
    )  # fmt: skip


def _draw_chances(chance, positive, rows) -> Chart:
    edges = np.linspace(0, min(1, 1.05 * chance.max()), 21)
    names = rows.class_names or ["0", "1"]
    series = []
    for label, name in enumerate(names[:2]):
        own = positive == label
        heights = np.histogram(chance[own], edges, weights=rows.weights[own])[0]
        total = heights.sum() or 1
        series.append(dict(name=f"class {name}", y=(heights / total).tolist()))
    return dict(
        type="lines", title="Probabilities by true class", series=series,
        x=((edges[:-1] + edges[1:]) / 2).tolist(), x_label="probability",
        y_label="share of the class", zero=True,
    )  # fmt: skip


def _confuse(truth, decided, count, rows) -> Chart:
    """Weights of rows by true and predicted class; rare classes are joined."""
    names = rows.class_names or [str(number) for number in range(count)]
    frequent = np.argsort(-np.bincount(truth, minlength=count), kind="stable")
    kept = np.sort(frequent[:_MOST_CLASSES])
    place = np.full(max(count, len(names)), len(kept))
    place[kept] = np.arange(len(kept))
    size = len(kept) + (count > len(kept))
    cells = np.zeros((size, size))
    np.add.at(cells, (place[truth], place[decided]), rows.weights)
    shown = [str(names[label]) for label in kept] + ["others"] * (size - len(kept))
    return dict(
        type="matrix", title="Confusion", labels=shown, cells=cells.tolist(),
        wide=size > 8,
    )  # fmt: skip


# ---- numbers ------------------------------------------------------------------------


def _judge_numbers(rows):
    targets, predicted = rows.targets, rows.predicted
    if targets.ndim == 1:
        charts = _draw_numbers(targets, predicted, rows.weights, "")
        return Quality("numbers", _measure_numbers(rows), charts)
    charts = []
    for output in range(min(targets.shape[1], _MOST_OUTPUTS)):
        known = np.isfinite(targets[:, output])
        pair = targets[known, output], predicted[known, output]
        charts += _draw_numbers(*pair, rows.weights[known], f", output {output}")[:1]
    return Quality(f"{targets.shape[1]} numbers a row", [], charts)


def _measure_numbers(rows):
    plain = rows._replace(scores=rows.predicted, link=None)
    return plain.measure("rmse", "mae", "r2")


def _draw_numbers(targets, predicted, weights, name) -> list[Chart]:
    """Predictions beside targets, and both and the residuals by decile."""
    some = np.random.default_rng(0).permutation(len(targets))[:_MOST_POINTS]
    parts = _split(predicted, weights)
    middle = [float(np.average(predicted[p], weights=weights[p])) for p in parts]
    observed, errors = [], []
    for part in parts:
        own = weights[part]
        mean = np.average(targets[part], weights=own)
        spread = np.average((targets[part] - mean) ** 2, weights=own)
        observed.append(float(mean))
        errors.append(float(_NORMAL * np.sqrt(spread / _count(own))))
    low, half, high = _spread(targets - predicted, weights, parts)
    return [
        dict(
            type="points", title=f"Predictions and targets{name}", diagonal=True,
            x=predicted[some].tolist(), y=targets[some].tolist(),
            x_label="prediction", y_label="target",
        ),
        dict(
            type="intervals", title=f"Mean target by decile{name}", diagonal=True,
            x=middle, y=observed,
            low=[m - e for m, e in zip(observed, errors, strict=True)],
            high=[m + e for m, e in zip(observed, errors, strict=True)],
            x_label="mean prediction", y_label="mean target, 95 % interval",
        ),
        dict(
            type="intervals", title=f"Residuals by decile{name}", level=0,
            x=middle, y=half, low=low, high=high, x_label="mean prediction",
            y_label="residual: median, 10 to 90 %",
        ),
    ]  # fmt: skip


def _spread(values, weights, parts):
    """Returns the 10 %, 50 % and 90 % quantiles of parts of the rows."""
    levels = 0.1, 0.5, 0.9
    found = [_find_quantiles(values[p], weights[p], levels).tolist() for p in parts]
    return np.array(found).T.tolist()


def _judge_quantile(rows):
    signature = inspect.signature(losses.quantile).parameters["tau"].default
    tau = float(bound_keywords(rows.loss).get("tau", signature))
    below = (rows.targets <= rows.predicted).astype(np.float32)
    chart = _calibrate(rows.predicted, below, rows.weights)
    chart |= dict(
        title=f"Coverage by decile, wanted {tau:g}", level=tau, range=None,
        diagonal=False, x_label="mean prediction", y_label="share of targets below",
    )  # fmt: skip
    charts = [chart, *_draw_numbers(rows.targets, rows.predicted, rows.weights, "")]
    covered = float(np.average(below, weights=rows.weights))
    name = f"Share of targets below, wanted {tau:g}"
    return Quality(f"the {tau:g}-quantile", [(name, covered)], charts[:2] + charts[-1:])


def _judge_distribution(rows):
    """Probability integral transforms, which are uniform if the model is right."""
    found, targets = rows.predicted, rows.targets
    place = np.asarray(found.cdf(targets))
    # Where the distribution has a mass, a value is drawn inside the step of its cdf.
    counts = bool((targets == np.round(targets)).all())
    counts = counts and np.mean(np.asarray(found.cdf(targets + 0.5)) == place) > 0.5
    step = np.float32(0.5) if counts else np.abs(targets) * np.float32(1e-6) + _TINY
    before = np.asarray(found.cdf(targets - step))
    draw = np.random.default_rng(0).uniform(size=len(place))
    place = before + draw * (place - before)
    edges = np.linspace(0, 1, 11)
    heights = np.histogram(place, edges, weights=rows.weights)[0]
    share = heights / (heights.sum() or 1)
    covered = [
        float(np.average(np.abs(place - 0.5) <= level / 2, weights=rows.weights))
        for level in _LEVELS
    ]
    numbers = [
        (f"Coverage of the {level:.0%} interval", share)
        for level, share in zip(_LEVELS, covered, strict=True)
    ]
    charts = [
        dict(
            type="bars", title="Probability integral transform", level=0.1,
            labels=[f"{low:.1f} to {low + 0.1:.1f}" for low in edges[:-1]],
            values=share.tolist(), x_label="share of rows, 0.1 if calibrated",
        ),
        dict(
            type="lines", title="Coverage of central intervals", diagonal=True,
            x=list(_LEVELS), series=[dict(name="model", y=covered, dots=True)],
            x_label="probability of the interval", y_label="share of targets inside",
        ),
    ]  # fmt: skip
    mean = getattr(found, "mean", None)
    if mean is not None:
        middle = np.asarray(mean() if callable(mean) else mean)
        if middle.shape == targets.shape and np.isfinite(middle).all():
            numbers += _measure_numbers(rows._replace(predicted=middle))
            charts += _draw_numbers(targets, middle, rows.weights, "")
    return Quality(f"a {type(found).__name__} distribution", numbers, charts)


# ---- groups, and the rest -----------------------------------------------------------


def _judge_ranking(rows):
    def value(name, *several):
        metric: Any = metrics.find_metric(name)
        metric = GroupMetric(metric)
        return [metric(s, rows.targets, rows.weights, rows.groups) for s in several]

    # Documents of equal score share their discounts: the mean over all orders.
    both = rows.scores, np.zeros_like(rows.scores)
    found = np.array([value(f"ndcg@{at}", *both) for at in _RANKS])
    series = [
        dict(name=name, y=found[:, number], dots=True)
        for number, name in enumerate(("model", "random order"))
    ]
    numbers: list[Any] = [(f"NDCG@{at}", found[_RANKS.index(at), 0]) for at in (5, 10)]
    for name in ("mean_average_precision", "mrr"):
        numbers += [(title(name), *value(name, rows.scores))]
    chart = dict(
        type="lines", title="NDCG of the first ranks", x=_RANKS, series=series,
        x_label="ranks", y_label="mean NDCG of the groups",
    )  # fmt: skip
    return Quality("ranking", numbers, [chart])


def _judge_survival(rows):
    targets = rows.targets
    if rows.groups.tables:  # strata: pairs within them
        value = GroupMetric(metrics.concordance_index)(
            rows.scores, targets, rows.weights, rows.groups
        )
    else:
        ranked = jax.jit(metrics.concordance_index)
        value = ranked(rows.scores, targets, weights=rows.weights)
    survive = jax.jit(kaplan_meier)
    edges = _find_quantiles(rows.scores, rows.weights, (0.25, 0.5, 0.75))
    place = np.searchsorted(edges, rows.scores)
    times = np.quantile(targets["time"], np.linspace(0, 1, 41))
    series = []
    for number, name in enumerate(("lowest", "second", "third", "highest")):
        own = np.where(place == number, rows.weights, 0)
        if own.any():  # rows without weight keep the shapes, and so the program
            curve = survive(targets, weights=own)
            at = np.searchsorted(np.asarray(curve.times), times, side="right")
            steps = np.append(1.0, np.asarray(curve.probabilities))[at]
            series.append(dict(name=f"{name} quarter of risk", y=steps.tolist()))
    chart = dict(
        type="lines", title="Survival by predicted risk (Kaplan-Meier)", series=series,
        x=times.tolist(), x_label="time", y_label="share without event", zero=True,
    )  # fmt: skip
    return Quality("survival", [("Concordance index", float(value))], [chart])


def _judge_any(rows):
    """Any other loss: its distribution over the rows."""
    charts = []
    if rows.row_losses is not None and rows.scores.ndim == 1:
        parts = _split(rows.scores, rows.weights)
        low, half, high = _spread(rows.row_losses, rows.weights, parts)
        charts.append(
            dict(
                type="intervals", title="Loss by decile of the score", y=half, low=low,
                high=high, x=[float(rows.scores[part].mean()) for part in parts],
                x_label="mean score", y_label="loss: median, 10 to 90 %",
            )
        )  # fmt: skip
    kind = "a loss of groups" if rows.row_losses is None else "a loss of its own"
    return Quality(kind, [], charts)


def find_row_losses(
    loss: Any, scores: Any, start: Any, targets: Any, weights: Any, num_scores: int
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Returns the losses of rows at their scores, and at the start.

    An adaptive loss estimates its parameters at the scores.
    """
    loss = losses.names.widen_loss(loss, targets, num_scores)
    parameters: tuple[Any, ...] = ()
    if isinstance(loss, losses.Adaptive):
        parameters, loss = (loss.estimate(scores, targets, weights),), loss.loss

    def row(score, target):
        return loss(score, target, *parameters)

    evaluate = jax.jit(jax.vmap(row))
    found, before = evaluate(scores, targets), evaluate(start, targets)
    return np.asarray(found, np.float32), np.asarray(before, np.float32)
