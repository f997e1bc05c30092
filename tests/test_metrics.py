# SPDX-License-Identifier: Apache-2.0
"""Metrics are those of scikit-learn, and decide which round is best."""

import re
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as peers
import xgboost
from sklearn.base import clone
from tables import FULL

import jboost as jb
from jboost.metrics import METRICS
from jboost.sklearn import JBoostClassifier, JBoostRegressor
from jboost.training.metrics import (
    Criterion,
    bind_metrics,
    check_metrics,
    evaluate_metric,
)
from jboost.training.record import Record

N = 60
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 2)).astype(np.float32)
LABELS = (X[:, 0] + RANDOM.normal(size=N) > 0).astype(np.int32)
CLASSES = np.arange(N, dtype=np.int32) % 3
COUNTS = RANDOM.poisson(3.0, size=N).astype(np.float32)
# Few values: ties. Some weights are 0.
CHANCE = RANDOM.integers(1, 8, size=N).astype(np.float32) / 8
CHANCES = np.asarray(jax.nn.softmax(RANDOM.normal(size=(N, 3)).round(1), axis=1))
CHANCES = CHANCES.astype(np.float32)
MEANS = RANDOM.gamma(2.0, size=N).astype(np.float32) + 0.1
WEIGHTS = RANDOM.integers(0, 4, size=N).astype(np.float32)
PAIR = np.stack([MEANS, CHANCE], 1), np.stack([COUNTS, MEANS], 1)
OVR = dict(multi_class="ovr")


def label(function):
    def measure(y, found, **weights):
        found = found.argmax(1) if found.ndim == 2 else found > 0.5
        return function(y, found, **weights)

    return measure


# name: [(targets, predictions, the function of scikit-learn)]
CASES = {
    "auc": [
        (LABELS, CHANCE, peers.roc_auc_score),
        (CLASSES, CHANCES, partial(peers.roc_auc_score, **OVR)),
    ],
    "average_precision": [
        (LABELS, CHANCE, peers.average_precision_score),
        (CLASSES, CHANCES, peers.average_precision_score),
    ],
    "log_loss": [(LABELS, CHANCE, peers.log_loss), (CLASSES, CHANCES, peers.log_loss)],
    "brier": [
        (LABELS, CHANCE, peers.brier_score_loss),
        (CLASSES, CHANCES, peers.brier_score_loss),
    ],
    "accuracy": [
        (LABELS, CHANCE, label(peers.accuracy_score)),
        (CLASSES, CHANCES, label(peers.accuracy_score)),
    ],
    "error": [
        (LABELS, CHANCE, label(peers.zero_one_loss)),
        (CLASSES, CHANCES, label(peers.zero_one_loss)),
    ],
    "poisson_deviance": [(COUNTS, MEANS, peers.mean_poisson_deviance)],
    "gamma_deviance": [(MEANS, CHANCE, peers.mean_gamma_deviance)],
} | {
    name: [(COUNTS, MEANS, function), (*PAIR[::-1], function)]
    for name, function in {
        "mae": peers.mean_absolute_error,
        "mse": peers.mean_squared_error,
        "rmse": peers.root_mean_squared_error,
        "mape": peers.mean_absolute_percentage_error,
        "r2": peers.r2_score,
    }.items()
}


def test_all_metrics_are_compared():
    assert CASES.keys() == METRICS.keys()


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_scikit_learn(name):
    for targets, found, peer in CASES[name]:
        # What rows of weight 0 hold does not matter.
        weights = WEIGHTS.reshape(-1, *[1] * (targets.ndim - 1))
        odd = np.where(weights > 0, targets, 0 if targets.dtype == np.int32 else np.nan)
        rows = (targets, None), (targets, WEIGHTS), (odd, WEIGHTS)
        values = jax.jit(
            lambda found, rows: [METRICS[name](found, *each) for each in rows]
        )(found, rows)
        expected = peer(targets, found), peer(targets, found, sample_weight=WEIGHTS)
        np.testing.assert_allclose(values, [*expected, expected[1]], rtol=2e-6)


def test_two_classes_may_have_two_scores_or_signs():
    logit = jnp.log(CHANCE / (1 - CHANCE))
    pair = np.stack([-logit / 2, logit / 2], axis=1)
    rows = (CHANCE, LABELS), (CHANCE, 2 * LABELS - 1), (pair, LABELS)
    links = None, None, jax.nn.softmax
    for name in ("auc", "log_loss", "brier", "error"):
        expected, signed, found = jax.jit(
            lambda rows, metric=METRICS[name]: [
                metric(*each, WEIGHTS, inverse_link=link)
                for each, link in zip(rows, links, strict=True)
            ]
        )(rows)
        assert signed == expected
        if name != "error":  # an even chance is the first class of two
            assert found == pytest.approx(float(expected), rel=2e-6), name


def test_log_loss_is_exact_where_probabilities_round_to_one():
    metric = jb.metrics.log_loss
    for link, scale in (
        (jax.nn.sigmoid, 1.0), (jb.losses.inverse_link(jb.losses.exponential), 2.0)
    ):  # fmt: skip
        found = metric([-40.0], [1], inverse_link=link)
        assert float(found) == pytest.approx(40.0 * scale)
    found = metric([[0.0, 40.0, 0.0]], [2], inverse_link=jax.nn.softmax)
    assert float(found) == pytest.approx(40.0)


SCORES = RANDOM.normal(size=(N, 3)).astype(np.float32)


# Programs with these settings are few and small.
SETTINGS: dict[str, Any] = dict(
    num_rounds=4, max_depth=1, max_bins=16, learning_rate=1.0, init_score=0.0,
    curvature="exact", leaf_solver="newton", linear_leaves=False, **FULL,
)  # fmt: skip


WEIGHTED = (X[::-1], LABELS[::-1], WEIGHTS)


@pytest.mark.parametrize(
    ("loss", "targets", "num_scores", "metrics"),
    [
        ("logistic", LABELS, 1, ["auc", "log_loss", "brier", "accuracy", "error"]),
        ("exponential", 2 * LABELS - 1, 1, ["average_precision", "log_loss"]),
        ("hinge", 2 * LABELS - 1, 1, ["accuracy", "auc"]),
        ("softmax", CLASSES, 3, ["auc", "log_loss", "brier", "error"]),
        ("poisson", COUNTS, 1, ["mae", "poisson_deviance", "r2"]),
        ("squared_error", MEANS, 1, ["rmse", "mape", "gamma_deviance"]),
    ],
)
def test_names_use_the_link_of_the_loss(loss, targets, num_scores, metrics):
    function = getattr(jb.losses, loss)
    scores = SCORES if num_scores > 1 else SCORES[:, 0]
    link = jb.losses.inverse_link(function) or abs
    if loss == "hinge":
        link = jb.metrics.second_class
    if loss == "squared_error":
        scores = abs(scores)
    found = np.asarray(jax.vmap(link)(scores))
    y = (targets > 0) * 1 if targets.min() < 0 else targets
    bound = bind_metrics(check_metrics(metrics), function, num_scores)
    for name in metrics:
        peer = CASES[name][-1 if num_scores > 1 else 0][2]
        ranked = scores if loss == "hinge" and name == "auc" else found
        expected = peer(y, ranked, sample_weight=WEIGHTS)
        value = evaluate_metric(bound[name], (scores, targets, WEIGHTS))
        assert value == pytest.approx(expected, rel=1e-5), name


def test_metrics_of_scikit_learn_get_predictions():
    """By name of their first argument; in training, folds, sweeps and estimators."""
    given = [peers.roc_auc_score, peers.brier_score_loss]
    own = dict(metrics=["auc", "brier", *given])
    _, history = jb.fit(
        X, LABELS, jb.losses.logistic, validation=WEIGHTED, **own, **SETTINGS
    )
    result = jb.cross_validate(
        X, LABELS, jb.losses.logistic, folds=3, sample_weight=WEIGHTS, **own,
        **SETTINGS,
    )  # fmt: skip
    for found in (history.metrics["validation"], result.metrics):
        np.testing.assert_allclose(found["roc_auc_score"], found["auc"], rtol=1e-5)
        np.testing.assert_allclose(found["brier_score_loss"], found["brier"], rtol=1e-5)


def test_metrics_that_cannot_be_called_are_refused_by_name():
    def fit(metrics, **more):
        own = {"loss": jb.losses.logistic, "y": LABELS, **SETTINGS, **more}
        return jb.fit(X, own.pop("y"), **own, metrics=metrics)

    half = lambda score, target: (score - target) ** 2 / 2  # noqa: E731
    for metrics, words, more in (
        (3, ["metrics", "int"], {}),
        (["rocauc"], ["metrics", "'rocauc'"], {}),
        (["binary_logloss"], ["'binary_logloss'", "'log_loss'"], {}),
        ({"m": 3}, ["metrics['m']", "scores, targets, weights"], {}),
        ({"m": lambda a, b: 0.0}, ["metrics['m']", "(a, b)", "y_true"], {}),
        ({"m": misnamed_weights}, ["metrics['m']", "sample_weight=", "weights)"], {}),
        ({"m": three_arrays}, ["metrics['m']", "sample_weight=", "y_other"], {}),
        ({"m": no_weights}, ["metrics['m']", "sample_weight="], dict(
            sample_weight=WEIGHTS)),
        ({"loss": lambda s, t, w: 0.0}, ["metrics", "'loss'"], {}),
        (["auc", jb.metrics.auc], ["'auc' twice"], {}),
        (["auc"], ["metrics['auc']", "0 and 1"], dict(y=COUNTS, loss=half)),
        (["log_loss"], ["metrics['log_loss']", "inverse_link"], dict(loss=half)),
        (["brier"], ["metrics['brier']"], dict(y=COUNTS, loss=jb.losses.poisson)),
        (["mae"], ["metrics['mae']", "(60, 3)"], dict(
            y=CLASSES, loss=jb.losses.softmax, num_scores=3)),
        (["mae"], ["metrics['mae']", "one array"], dict(
            y={"a": COUNTS}, loss=lambda s, t: (s - t["a"]) ** 2)),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as caught:
            fit(metrics, **more)
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(jb.TrainingError, match="y_true, y_pred") as caught:
        fit({"mine": peers.accuracy_score}, sample_weight=WEIGHTS)
    assert "metrics['mine']" in str(caught.value) and "continuous" in str(caught.value)
    _, history = fit({"m": no_weights}, sample_weight=2 * (WEIGHTS > 1))
    assert len(history.metrics["train"]["m"])  # rows that count have equal weights
    bound = {"log_loss": partial(jb.metrics.log_loss, inverse_link=jax.nn.sigmoid)}
    _, history = fit(bound, loss=half, y=LABELS.astype(np.float32))
    assert 0 < history.metrics["train"]["log_loss"][-1] < 1


def no_weights(y_true, y_pred):
    return np.abs(y_true - y_pred).max()


def misnamed_weights(y_true, y_pred, weights):
    return 0.0


def three_arrays(y_true, y_pred, y_other, *, sample_weight=None):
    return 0.0


def swapped(targets, scores, weights):
    return 0.0


def test_mirrored_arguments_are_warned_of():
    mirrored = [
        lambda y_true, y_pred: (
            jnp.where(y_pred > y_true, 3.0, 1.0) * (y_pred - y_true) ** 2
        ),
        lambda target, score: (score - target) ** 2,
    ]
    for loss in mirrored:
        with pytest.warns(UserWarning, match=r"loss\(score, target\)"):
            jb.inspect_loss(loss, 1.0)
    with pytest.warns(UserWarning, match=re.escape("metrics['m']")) as caught:
        jb.fit(X, COUNTS, metrics={"m": swapped}, **SETTINGS)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jb.inspect_loss(lambda y_pred, y_true: (y_pred - y_true) ** 2, 1.0)


# Values of a metric by round: its best round is neither the last nor that of the loss.
def swing(scores, targets, weights):
    return jnp.sin(jnp.sum(jnp.abs(scores)))


@pytest.mark.parametrize("by", ["swing", ("swing", "max"), "auc"])
def test_rounds_are_compared_by_a_metric(by, tmp_path):
    """One meaning in training, checkpoints, folds, sweeps and streams."""
    own = dict(metrics={"swing": swing}, by=by)
    twelve = SETTINGS | dict(num_rounds=12, learning_rate=0.1)
    train = dict(loss=jb.losses.squared_error, validation=WEIGHTED, **twelve)
    name, sign = ("auc", -1) if by == "auc" else ("swing", -1 if "max" in by else 1)
    model, whole = jb.fit(X, LABELS, **train, **own)
    values = sign * whole.metrics["validation"][name]
    assert whole.by == (name, "max" if sign < 0 else "min")
    assert whole.best_round == values.argmin() and model.num_rounds == 12
    # The first place after which there is no better value for so long.
    patience = 2
    best = next(
        i for i in range(12)
        if values[i] == values[: i + 1 + patience].min() and values[i] < min(
            values[:i], default=np.inf)
    )  # fmt: skip
    early = dict(early_stopping_rounds=patience, **own)
    path = tmp_path / "run"
    every = dict(checkpoint=path, checkpoint_rounds=1)
    for x, y in ((X, LABELS), (jb.stream([(X, LABELS)], memory="64 MiB"), None)):
        stopped, history = jb.fit(x, y, **train, **early)
        assert history.best_round == best and stopped.num_rounds == best + 1
        assert len(history.train_loss) == min(12, best + 1 + patience)
    kept, history = jb.fit(X, LABELS, **train, **early, **every)
    again, resumed = jb.fit(X, LABELS, **train, **early, **every)
    assert kept.num_rounds == again.num_rounds == best + 1
    assert history.best_round == resumed.best_round == best
    with pytest.raises(ValueError, match="by "):
        jb.fit(X, LABELS, **train, **{**early, "by": "loss"}, **every)
    shared = dict(**twelve, folds=3, **early)
    result = jb.cross_validate(X, LABELS, jb.losses.squared_error, l2=1.0, **shared)
    ranked = sign * result.metrics[name].mean(axis=0)
    assert result.best_round == ranked.argmin() and result.by == whole.by
    near = ranked <= ranked.min() + result.standard_error[result.best_round]
    assert result.one_se_round == near.argmax()
    points = {"l2": [1.0, 100.0]}
    found = jb.sweep(X, LABELS, jb.losses.squared_error, points, **shared)
    ranks = np.nanmin(sign * found.mean, axis=1)
    assert found.best == ranks.argmin() and found.best_rounds[0] == result.best_round
    first = str(found).splitlines()[1].split()[0]
    assert float(first) == found.best_point["l2"]


def test_what_rounds_are_compared_by_is_checked():
    train = dict(loss=jb.losses.logistic, validation=WEIGHTED, **SETTINGS)
    score = {"my_score": lambda s, t, w: 0.0}
    for by, words, more in (
        (3, ["by", "3"], {}),
        ("nosuch", ["by", "'nosuch'"], {}),
        (("auc", "most"), ["by", "'most'"], {}),
        (("loss", "max"), ["by", "loss"], {}),
        ("my_score", ["by", "'my_score'", "'max'"], dict(metrics=score)),
        ("auc", ["by", "'max'"], dict(metrics={"auc": lambda s, t, w: 0.0})),
        ("auc", ["by", "validation"], dict(validation=None)),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            jb.fit(X, LABELS, **{**train, **more}, by=by)
        assert all(word in str(caught.value) for word in words), caught.value
    for by in (None, "loss", ("loss", "min")):
        assert jb.fit(X, LABELS, **train, by=by)[1].by == ("loss", "min")


def test_a_metric_that_is_not_finite_is_never_best():
    values = iter([3.0, np.nan, 2.0, np.inf])
    record = Record(
        bins=None, init_score=0.0, set_names=("validation",), named=False,
        no_trees=None, choices={}, bagged=False, metric_names=("m",),
        measured=("train", "validation"), by=Criterion("m", "max"),
    )  # fmt: skip
    for value in values:
        record.add((), [1.0, 1.0], [[9.0], [value]], None, ())
        assert record.best_round() == 0


def test_estimators_measure_what_they_predict():
    """By their own link; several outputs, several classes, a link of one's own."""
    both = np.stack([COUNTS, COUNTS[::-1]], axis=1)
    regressor = JBoostRegressor(metrics=["mae", "rmse"], by="mae", **SETTINGS).fit(
        X, both, eval_set=(X, both, WEIGHTS)
    )
    names = np.array(["a", "b", "c"])[CLASSES]
    classes = JBoostClassifier(
        metrics=["auc", "error", peers.log_loss], by="auc", **SETTINGS
    ).fit(X, names, eval_set=(X, names, WEIGHTS))
    own = JBoostClassifier(
        inverse_link=lambda score: jax.nn.sigmoid(3 * score),
        metrics=["log_loss", "accuracy"],
        early_stopping_rounds=2, by="accuracy", **SETTINGS,
    ).fit(X, LABELS, eval_set=(X, LABELS, WEIGHTS))  # fmt: skip
    kept = own.model_.num_rounds - 1
    for estimator, name, expected, place in (
        (regressor, "mae", peers.mean_absolute_error(
            both, regressor.predict(X), sample_weight=WEIGHTS), -1),
        (regressor, "rmse", peers.root_mean_squared_error(
            both, regressor.predict(X), sample_weight=WEIGHTS), -1),
        (classes, "auc", peers.roc_auc_score(
            names, classes.predict_proba(X), sample_weight=WEIGHTS, **OVR), -1),
        (classes, "error", 1 - classes.score(X, names, WEIGHTS), -1),
        (classes, "log_loss", peers.log_loss(
            names, classes.predict_proba(X), sample_weight=WEIGHTS), -1),
        (own, "log_loss", peers.log_loss(
            LABELS, own.predict_proba(X), sample_weight=WEIGHTS), kept),
        (own, "accuracy", own.score(X, LABELS, WEIGHTS), kept),
    ):  # fmt: skip
        values = estimator.evals_result_["validation"][name]
        assert values[place] == pytest.approx(expected, rel=1e-5), name
    assert regressor.history_.by == ("mae", "min")
    assert own.best_iteration_ == kept == own.history_.metrics["validation"][
        "accuracy"].argmax()  # fmt: skip
    for by in ("auc", ("auc", "max")):
        cloned = clone(classes).set_params(by=by)
        cloned.fit(X, names, eval_set=(X, names, WEIGHTS))
        assert cloned.history_.by == ("auc", "max")


def test_permutations_lower_a_metric_that_should_be_large():
    model, _ = jb.fit(X, LABELS, jb.losses.logistic, **SETTINGS)
    find = partial(
        jb.explanation.permutation_importance, model, X, LABELS, jb.losses.logistic
    )
    by_name = find(metric="auc", num_repeats=2)
    own = find(metric=lambda s, t, w: -jb.metrics.auc(s, t, w), num_repeats=2)
    np.testing.assert_allclose(by_name.values, own.values, atol=1e-6)
    assert by_name.values[0] > 0.1


def test_a_weight_of_positives_is_that_of_xgboost():
    """scale_pos_weight is a sample weight, there as here, and a class weight."""
    shared = dict(max_depth=2, n_estimators=3, base_score=0.5, n_jobs=1)
    there = xgboost.XGBClassifier(scale_pos_weight=3.0, **shared).fit(X, LABELS)
    weights = np.where(LABELS == 1, 3.0, 1.0)
    same = xgboost.XGBClassifier(**shared).fit(X, LABELS, sample_weight=weights)
    np.testing.assert_allclose(there.predict_proba(X), same.predict_proba(X), rtol=1e-6)
    model, _ = jb.fit(X, LABELS, jb.losses.logistic, sample_weight=weights, **SETTINGS)
    labelled = JBoostClassifier(class_weight={0: 1.0, 1: 3.0}, **SETTINGS)
    found = labelled.fit(X, LABELS).decision_function(X)
    np.testing.assert_array_equal(found, jb.predict(model, X))
