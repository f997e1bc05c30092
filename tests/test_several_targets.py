# SPDX-License-Identifier: Apache-2.0
"""Targets [N, K]: a built-in loss of one score is summed over the columns.

The columns share nothing but the rounds, so that a model of K columns is K models of
one column, up to rounding.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix
from sklearn import metrics as reference
from sklearn.multiclass import OneVsRestClassifier

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRegressor

RNG = np.random.default_rng(11)
ROWS = 200
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = np.stack([X[:, 0], 1000 * np.exp(X[:, 1])], 1) + RNG.normal(size=(ROWS, 2))
LABELS = (Y - np.median(Y, axis=0) > 0).astype(np.float32)
KNOWN = RNG.uniform(size=Y.shape) < 0.7
GAPPY = np.where(KNOWN, LABELS, np.nan)
SETTINGS = dict(num_rounds=4, max_depth=3)
LOGISTIC = jb.losses.logistic


def fit_columns(targets, loss, **more):
    models = [jb.fit(X, y, loss, **SETTINGS, **more)[0] for y in targets.T]
    return np.stack([jb.predict(model, X) for model in models], 1)


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize(
    ("loss", "targets"), [(jb.losses.squared_error, Y), (LOGISTIC, LABELS)]
)
def test_columns_share_nothing_but_the_rounds(loss, targets):
    model, _ = jb.fit(X, targets, loss, **SETTINGS)
    assert model.num_scores == 2
    scale = targets.std(axis=0)
    np.testing.assert_allclose(
        np.asarray(jb.predict(model, X)) / scale,
        fit_columns(targets, loss) / scale,
        atol=2e-5,
    )


def test_the_inverse_link_maps_every_score():
    model, _ = jb.fit(X, LABELS, LOGISTIC, **SETTINGS)
    link = jb.losses.inverse_link(LOGISTIC)
    np.testing.assert_allclose(
        jb.predict(model, X, inverse_link=link),
        1 / (1 + np.exp(-jb.predict(model, X))), rtol=1e-5,
    )  # fmt: skip


def test_every_way_to_train_counts_the_scores():
    expected = np.asarray(jb.predict(jb.fit(X, Y, **SETTINGS)[0], X))
    frame = pd.DataFrame(Y, columns=["small", "large"])
    for targets in (frame, Y.tolist(), jnp.asarray(Y, jnp.float32)):
        model, _ = jb.fit(X, targets, **SETTINGS)
        np.testing.assert_array_equal(jb.predict(model, X), expected)
    loss = jb.losses.squared_error
    codes = jb.apply_bins(jb.fit_bins(X), X)
    key = jax.random.key(0)
    begin = partial(jb.init, codes, Y, loss, key, init_score=0.0)
    assert jax.eval_shape(lambda: begin().scores).shape == (ROWS, 2)
    more = dict(num_scores=3, **SETTINGS)
    for train in (
        partial(jb.boost, codes, Y, loss, key), partial(jb.cross_validate, X, Y),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"num_scores must be 2 .* got 3"):
            train(**more)
    refined, _ = jb.refine(model, X, Y, num_epochs=1)
    assert jb.predict(refined, X).shape == (ROWS, 2)


def test_streams_are_told_the_number_of_scores():
    def stream():
        source = jb.streams.array_batches(X, Y, batch_rows=100)
        return jb.stream(source, memory="256 MiB", bins=jb.fit_bins(X))

    start = dict(init_score=0.0, **SETTINGS)
    model, _ = jb.fit(stream(), num_scores=2, **start)
    expected = jb.predict(jb.fit(X, Y, **start)[0], X)
    np.testing.assert_allclose(jb.predict(model, X), expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match=r"num_scores must be 2 .* 2 columns, got 1"):
        jb.fit(stream(), **start)


def test_missing_labels_have_no_gradient():
    gradient = jax.jit(jax.grad(jb.losses.sum_targets(jb.losses.gamma)))
    found = gradient(jnp.float32([0.5, -200.0, 1.0]), jnp.float32([2, np.nan, 3]))
    single = [1 - t * np.exp(-s) for s, t in ((0.5, 2.0), (1.0, 3.0))]
    np.testing.assert_allclose(found, [single[0], 0, single[1]], rtol=1e-6)


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize(
    ("loss", "known"), [("squared_error", 0.3), ("logistic", 0.5), ("poisson", 0.5)]
)
def test_a_missing_target_is_no_row(loss, known):
    """Counts, curvature and leaves of a score are those of its known rows alone."""
    random, size = np.random.default_rng(5), 250
    x = random.integers(0, 12, size=(size, 3)).astype(np.float32)
    mean = x[:, 0] / 4 + np.sin(x[:, 1])
    y = dict(
        squared_error=mean + random.normal(size=size), logistic=mean > 1.4,
        poisson=random.poisson(np.exp(mean / 2)),
    )[loss].astype(np.float32)  # fmt: skip
    rows = random.random(size) < known
    targets = np.stack([y, np.where(rows, y, np.nan)], axis=1)
    loss, settings = getattr(jb.losses, loss), dict(num_rounds=8, max_depth=3)
    model, history = jb.fit(x, targets, loss, share_structure=False, **settings)
    own, of_known = jb.fit(x[rows], y[rows], loss, **settings)
    np.testing.assert_allclose(
        np.asarray(jb.predict(model, x))[:, 1], jb.predict(own, x), atol=2e-5
    )
    counts = history.choices["min_child_samples"]
    assert counts == [5, of_known.choices["min_child_samples"]]
    assert np.asarray(model.sums.weight)[0, 1].sum() == rows.sum()
    if loss is not LOGISTIC:  # which rows count is the same for all
        return
    shared, _ = jb.fit(x, targets, loss, share_structure=True, **settings)
    weight = np.asarray(shared.sums.weight)[:, 1].sum(axis=1)
    np.testing.assert_array_equal(weight, rows.sum())


def test_missing_labels_are_left_out():
    """The start is the argmin of the known labels, and the loss is theirs."""
    model, history = jb.fit(
        X, GAPPY, LOGISTIC, metrics=[*PEERS], by="auc", validation=(X, GAPPY),
        **SETTINGS,
    )  # fmt: skip
    for values in history.metrics["validation"].values():
        assert np.isfinite(values).all()
    share = np.nanmean(GAPPY, axis=0)
    np.testing.assert_allclose(model.init_score, np.log(share / (1 - share)), rtol=1e-4)
    scores = np.asarray(jb.predict(model, X), np.float64)
    losses = np.logaddexp(0, scores) - np.where(KNOWN, GAPPY, 0) * scores
    expected = np.sum(losses * KNOWN) / ROWS
    np.testing.assert_allclose(history.validation_loss[-1], expected, rtol=1e-5)


PEERS = dict(
    auc=reference.roc_auc_score, log_loss=reference.log_loss,
    average_precision=reference.average_precision_score,
    brier=reference.brier_score_loss,
)  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_metrics_of_labels_are_means_over_columns(name):
    scores = RNG.normal(size=Y.shape).astype(np.float32)
    chances = 1 / (1 + np.exp(-scores))
    function = PEERS[name]
    weights = RNG.integers(1, 4, ROWS)
    expected = np.mean(
        [
            function(LABELS[rows, k], chances[rows, k], sample_weight=weights[rows])
            for k, rows in enumerate(KNOWN.T)
        ]
    )
    metric = jax.jit(partial(jb.metrics.METRICS[name], inverse_link=jax.nn.sigmoid))
    found = metric(scores, GAPPY, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_errors_of_missing_targets_are_left_out():
    scores = RNG.normal(size=Y.shape).astype(np.float32)
    targets = np.where(KNOWN, Y, np.nan)
    for name, function in dict(
        mae=reference.mean_absolute_error, r2=reference.r2_score,
        rmse=reference.root_mean_squared_error,
    ).items():  # fmt: skip
        each = [function(Y[rows, k], scores[rows, k]) for k, rows in enumerate(KNOWN.T)]
        found = jax.jit(jb.metrics.METRICS[name])(scores, targets)
        np.testing.assert_allclose(found, np.mean(each), rtol=1e-5)
    assert np.isnan(jb.metrics.mae(scores[:, 0], targets[:, 0]))


REFUSALS = {
    "too many scores": (dict(num_scores=3), r"num_scores must be 2 .* got 3"),
    "classes": (dict(loss=jb.losses.softmax), r"use losses\.logistic"),
    "infinite": (dict(y=np.where(KNOWN, Y, np.inf)), r"y must be finite .* inf"),
    "no label": (dict(y=2 * LABELS, loss=LOGISTIC), r"from 0 to 1 .* got 2"),
    "a column": (dict(y=Y[:, :1]), r"pass y\[:, 0\]"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_other_targets_are_refused(name):
    given, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        jb.fit(**(dict(x=X, y=Y) | given), **SETTINGS)
    with pytest.raises(ValueError, match=r"of one score, got losses\.softmax"):
        jb.losses.sum_targets(jb.losses.softmax)


def test_own_losses_get_what_they_are_given():
    """A custom loss may take a target of several numbers beside one score."""

    def interval(score, bounds):
        return jnp.logaddexp(score - bounds[0], bounds[1] - score)

    model, _ = jb.fit(X, LABELS, interval, num_rounds=0, init_score=0.0)
    assert model.num_scores == 1
    huber = partial(jb.losses.huber, delta=2.0)
    own = jb.losses.sum_targets(huber)
    model, _ = jb.fit(X, LABELS, own, num_scores=2, **SETTINGS)
    other, _ = jb.fit(X, LABELS, huber, **SETTINGS)
    np.testing.assert_array_equal(jb.predict(model, X), jb.predict(other, X))


# Estimators.


@pytest.mark.usefixtures("full_search")
def test_a_classifier_of_several_labels():
    found = JBoostClassifier(**SETTINGS).fit(X, LABELS.astype(int))
    one = OneVsRestClassifier(JBoostClassifier(**SETTINGS)).fit(X, LABELS)
    np.testing.assert_allclose(found.predict_proba(X), one.predict_proba(X), atol=1e-5)
    np.testing.assert_array_equal(found.predict(X), one.predict(X))
    np.testing.assert_array_equal(found.predict(X), found.decision_function(X) > 0)
    assert found.classes_.tolist() == [0, 1] and found.predict(X).dtype.kind == "i"
    stored = JBoostClassifier(**SETTINGS).fit(X, csr_matrix(LABELS))
    np.testing.assert_array_equal(stored.predict(X), found.predict(X))
    assert found.score(X, LABELS) > 0.5
    signed = JBoostClassifier(loss="hinge", **SETTINGS).fit(X, LABELS)
    assert (signed.predict(X) == LABELS).mean() > 0.7


def test_estimators_take_missing_labels():
    classifier = JBoostClassifier(early_stopping_rounds=2, **SETTINGS).fit(
        X, GAPPY, eval_set=(X, GAPPY)
    )
    assert (classifier.predict(X) == LABELS)[~KNOWN].mean() > 0.6
    targets = np.where(KNOWN, Y, np.nan)
    regressor = JBoostRegressor(**SETTINGS).fit(X, targets)
    model, _ = jb.fit(X, targets, **SETTINGS)
    np.testing.assert_array_equal(
        regressor.predict(X), np.asarray(jb.predict(model, X), np.float64)
    )
    with pytest.raises(ValueError, match="NaN"):
        JBoostRegressor(**SETTINGS).fit(X, targets[:, 0])


@pytest.mark.parametrize(
    ("settings", "targets", "message"),
    [
        (dict(loss="softmax"), LABELS, "loss must be one of"),
        (dict(class_weight="balanced"), LABELS, "class_weight must be None"),
        ({}, 2 * LABELS, "MultiOutputClassifier"),
    ],
)
def test_a_classifier_refuses_other_labels(settings, targets, message):
    with pytest.raises(ValueError, match=message):
        JBoostClassifier(**settings).fit(X, targets)
