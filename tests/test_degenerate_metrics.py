# SPDX-License-Identifier: Apache-2.0
"""Metrics of degenerate rows are those of scikit-learn, or NaN where it has none."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as peers

import jboost as jb
from jboost.metrics import METRICS

NAN, INF = np.nan, np.inf
EVEN = [1.0, 1.0, 1.0]

# Predictions, targets.
NUMBERS = {
    "equal targets, exact": (EVEN, EVEN),
    "equal targets": ([1.0, 2.0, 1.0], EVEN),
    "equal targets with a rounded mean": ([0.1] * 7, [0.1] * 7),
    "equal targets, almost exact": ([16777214.0, 16777216.0], [16777216.0] * 2),
    "exact": ([1.0, 2.0], [1.0, 2.0]),
    "a column of equal targets": ([[1.0, 2], [2.0, 3]], [[1.0, 2], [1.0, 3]]),
    "columns of equal targets": (np.eye(3) + 1, np.ones((3, 3))),
    "zeros": ([0.0, 0.0], [0.0, 0.0]),
    "errors at zero": ([1.0, 0.0], [0.0, 0.0]),
    "one row": ([2.0], [1.0]),
}
REGRESSION = {
    "mae": peers.mean_absolute_error,
    "mse": peers.mean_squared_error,
    "rmse": peers.root_mean_squared_error,
    "mape": peers.mean_absolute_percentage_error,
    "r2": peers.r2_score,
}
# Scores whose logistic function or softmax is their probability, and classes.
SCORES = {
    "certain": ([INF, -INF], [1, 0]),
    "certain of one class": ([INF, INF], [1, 1]),
    "wrong": ([INF, -INF], [0, 1]),
    "one row": ([-INF], [0]),
    "three classes": ([[INF, 0, 0], [0, INF, 0], [-INF, 0, -INF]], [0, 1, 1]),
    "three classes, wrong": ([[INF, 0, 0], [0, INF, 0], [-INF, 0, 1]], [1, 1, 2]),
    "two certain classes": ([[INF, INF, 0], [0, 1, 0]], [1, 1]),
}


compiled = cache(lambda name, link: jax.jit(partial(METRICS[name], inverse_link=link)))


def measure(name, scores, targets, weights=None, link=None):
    metric = compiled(name, link)
    scores = np.asarray(scores, np.float32)
    targets = np.asarray(targets, np.float32)
    return float(metric(scores, targets, weights))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize("case", NUMBERS)
@pytest.mark.parametrize("name", REGRESSION)
def test_errors_are_those_of_scikit_learn(name, case):
    found, targets = (np.asarray(a, np.float32) for a in NUMBERS[case])
    expected = REGRESSION[name](targets, found)
    approx = partial(pytest.approx, rel=1e-6, nan_ok=True)
    if case in ("equal targets", "one row", "columns of equal targets"):
        assert measure(name, found, targets) == approx(expected)
    # Rows of weight 0 change nothing, whatever they hold: one program for many cases.
    weights = (np.arange(8) < len(found)).astype(np.float32)
    more = [
        np.concatenate([a, np.full((8 - len(a), *a.shape[1:]), 9, np.float32)])
        for a in (found, targets)
    ]
    assert measure(name, *more, weights) == approx(expected)


def to_chances(scores):
    """Probabilities of two or three classes; several infinities share everything."""
    scores = np.asarray(scores, np.float64)
    if scores.ndim == 1:
        return 1 / (1 + np.exp(-scores))
    rows = np.clip(scores, -1e4, 1e4)
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize("case", SCORES)
def test_infinite_scores_are_limits(case):
    scores, targets = SCORES[case]
    chances, several = to_chances(scores), np.ndim(scores) == 2
    labels = [*range(3)] if several else [0, 1]
    found = partial(
        measure, scores=scores, targets=targets,
        link=jax.nn.softmax if several else jax.nn.sigmoid,
    )  # fmt: skip
    expected = peers.brier_score_loss(targets, chances, labels=labels)
    assert found("brier") == pytest.approx(expected)
    share = np.mean((chances.argmax(1) if several else chances > 0.5) == targets)
    if case != "two certain classes":
        assert found("accuracy") == pytest.approx(share)
        assert found("error") == pytest.approx(1 - share)
    expected = peers.log_loss(targets, chances, labels=labels)
    # From scores, log(0) is not clipped.
    wanted = INF if expected > 10 else pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert found("log_loss") == wanted


def test_average_precision_needs_a_positive_row():
    """One of weight zero is none; without negative rows, the precision is 1."""
    average = partial(measure, "average_precision", [0.5, 0.25, 1.0])
    assert np.isnan(average(np.zeros(3)))
    assert np.isnan(average(np.array([0, 1, 0]), np.array([1, 0, 1], np.float32)))
    assert average(np.ones(3)) == 1


@pytest.mark.parametrize("name", METRICS)
def test_a_score_that_is_nan_has_no_metric(name):
    counts = [1.0, 1.0, 0.0] if name != "gamma_deviance" else [1.0, 2.0, 3.0]
    broken = np.array([0.5, NAN, 0.25], np.float32)
    assert np.isnan(measure(name, broken, counts))
    weights = np.array([1.0, 0.0, 1.0], np.float32)
    assert np.isfinite(measure(name, broken, counts, weights))
    if name in ("auc", "accuracy", "log_loss", "brier"):
        rows = np.stack([broken, broken, broken], axis=1)
        assert np.isnan(measure(name, rows, [0, 1, 2], link=jax.nn.softmax))


def test_deviances_have_limits_where_means_round_to_zero():
    """Against float64, in which they do not."""
    scores, targets = np.array([-200.0, 0.0, 1.0]), [0.0, 2.0, 1.0]
    found = measure("poisson_deviance", scores, targets, link=jnp.exp)
    expected = peers.mean_poisson_deviance(targets, np.exp(scores))
    assert found == pytest.approx(expected)
    for name in ("poisson_deviance", "gamma_deviance"):
        assert measure(name, scores, EVEN, link=jnp.exp) == INF
        assert measure(name, -scores, EVEN, link=jnp.exp) == INF
        assert np.isnan(measure(name, [-1.0, 1.0], EVEN[:2]))


def test_folds_are_compared_by_r2_of_equal_targets():
    """The first fold holds equal targets only."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = np.where(np.arange(60) < 30, 1.0, x[:, 0])
    first, second = np.arange(30), np.arange(30, 60)
    folds = [(second, first), (first, second)]
    found = jb.cross_validate(x, y, by="r2", folds=folds, num_rounds=3, max_depth=3)
    assert np.isfinite(found.mean).all()
