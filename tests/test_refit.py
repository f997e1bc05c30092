# SPDX-License-Identifier: Apache-2.0
"""Refitting: new leaf values for the splits that are there."""

import dataclasses
from dataclasses import replace

import lightgbm
import numpy as np
import pytest
import scipy.sparse
import xgboost
from compilations import Compilations
from tables import SMALL, make_regression, same_bits

import jboost as jb

X, Y = make_regression()
LATER = make_regression(seed=5)
LOSSES = jb.losses
HALF = np.where(np.arange(len(Y)) % 2, 0.5, 2.0)
FITTED = (
    "sample_weight", "offset", "learning_rate", "l1", "l2", "max_delta_step",
    "regularization", "curvature", "leaf_solver", "init_score", "implementation",
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return jb.fit(X, Y, **SMALL)[0]


def fit_and_refit(x, y, loss, **settings):
    """Returns a trained model, and the same one refitted to what it was trained on.

    The second one does not know the old leaf values where rows are. Only refitting
    takes the implementation: those of training give the same trees.
    """
    training = {n: v for n, v in settings.items() if n != "implementation"}
    model, _ = jb.fit(x, y, loss, **{**SMALL, **training})
    reached = np.asarray(model.sums.weight) > 0
    values = np.where(reached, 99.0, model.leaf_value).astype(np.float32)
    same = {name: settings[name] for name in FITTED if name in settings}
    blank = replace(
        model, leaf_value=values, sums=None, init_score=0 * model.init_score
    )
    return model, jb.refit(blank, x, y, loss, **same)


@pytest.mark.parametrize(
    "loss, settings",
    [
        (
            LOSSES.squared_error,
            dict(
                l1=0.2,
                l2=0.3,
                max_delta_step=0.5,
                init_score=0.25,
                sample_weight=HALF,
                implementation="xla",
            ),
        ),
        (LOSSES.absolute_error, dict(sample_weight=HALF)),
        (
            LOSSES.huber,
            dict(leaf_solver="median_step", init_score="median", curvature="exact"),
        ),
        (
            LOSSES.log_cosh,
            dict(
                leaf_solver="line_search",
                max_delta_step=0.5,
                curvature="unit",
                regularization="absolute",
            ),
        ),
    ],
)
def test_every_way_of_fitting_leaves_is_that_of_training(loss, settings):
    """Beside those of test_routes.py."""
    same_bits(*fit_and_refit(X, Y, loss, **settings))


def test_sparse_rows_and_files(tmp_path):
    random = np.random.default_rng(0)
    cells = np.where(random.random(X.shape) < 0.3, 0, X).astype(np.float32)
    sparse = scipy.sparse.csr_matrix(cells)
    model, again = fit_and_refit(sparse, Y, LOSSES.squared_error, absent="zero")
    same_bits(again, model)
    jb.save(model, tmp_path / "model")
    same_bits(jb.refit(jb.load(tmp_path / "model"), cells, Y), model)


def test_a_sum_of_leaf_means_by_hand(model):
    """Squared error (s - t)^2: value = -G / (H + l2) with H = 2 W, in float64."""
    x, y = LATER
    model = dataclasses.replace(model, slopes=None, ranges=None)
    weights, offset = HALF[::-1].copy(), x[:, 0]
    decay, rate, l2 = 0.3, 0.2, 2.0
    found = jb.refit(
        model, x, y, LOSSES.squared_error, sample_weight=weights, offset=offset,
        decay=decay, learning_rate=rate, l2=l2, regularization="absolute",
    )  # fmt: skip
    leaves = np.asarray(jb.leaf_indices(model, x))
    start = np.average(y - offset, weights=weights)
    start = decay * float(model.init_score) + (1 - decay) * start
    np.testing.assert_allclose(found.init_score, start, rtol=1e-5)
    scores = offset + start
    for number in range(model.num_rounds):
        old = np.asarray(model.leaf_value[number, 0], np.float64)
        gradient = 2 * weights * (scores - y)
        sums = np.bincount(leaves[:, number], gradient, len(old))
        mass = np.bincount(leaves[:, number], weights, len(old))
        new = decay * old - (1 - decay) * rate * sums / (2 * mass + l2)
        new = np.where(mass > 0, new, old)
        np.testing.assert_allclose(
            found.leaf_value[number, 0], new, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(found.sums.weight[number, 0], mass, rtol=1e-6)
        scores = scores + new[leaves[:, number]]
    np.testing.assert_allclose(
        jb.predict(found, x, offset=offset), scores, rtol=1e-4, atol=1e-4
    )


def test_decay_one_changes_no_value_and_a_leaf_without_rows_none_ever(model):
    x, y = LATER
    kept = jb.refit(model, x, y, decay=1.0)
    same_bits((kept.leaf_value, kept.init_score), (model.leaf_value, model.init_score))
    few = jb.refit(model, x[:3], y[:3])
    leaves = np.asarray(jb.leaf_indices(model, x[:3]))
    reached = np.zeros(model.leaf_value.shape, bool)
    for number in range(model.num_rounds):
        reached[number, 0, leaves[:, number]] = True
    same = np.asarray(few.leaf_value) == np.asarray(model.leaf_value)
    assert same[~reached].all() and not same[reached].any()
    assert (np.asarray(few.sums.weight) > 0).tolist() == reached.tolist()
    attributions = jb.shap_values(few, x)
    total = np.asarray(attributions.values).sum(axis=1) + attributions.base
    np.testing.assert_allclose(total, jb.predict(few, x), atol=1e-4)
    assert np.isfinite(jb.feature_importance(few, "gain").values).all()


def test_another_loss_and_a_model_without_rounds(model):
    skewed = np.exp(Y / 4)
    lower = jb.refit(model, X, skewed, LOSSES.absolute_error, learning_rate=0.5)
    constant = np.abs(skewed - np.median(skewed)).mean()
    assert np.abs(jb.predict(lower, X) - skewed).mean() < 0.6 * constant
    none = jb.refit(jb.truncate(model, 0), X, Y + 1)
    np.testing.assert_allclose(none.init_score, np.mean(Y + 1), rtol=1e-5)
    assert none.num_rounds == 0


def test_xgboost_refreshes_the_same_leaves():
    x, y = LATER
    labels, later = (Y > 1).astype(float), (y > 1).astype(float)
    settings = dict(
        objective="binary:logistic",
        max_depth=2,
        eta=0.3,
        nthread=1,
        base_score=0.4,
        verbosity=0,
    )
    booster = xgboost.train(settings, xgboost.DMatrix(X, labels), 6)
    model = jb.interchange.read_xgboost(booster)
    refresh = dict(process_type="update", updater="refresh", refresh_leaf=True)
    rows = xgboost.DMatrix(x, later)
    updated = xgboost.train(settings | refresh, rows, 6, xgb_model=booster)
    found = jb.refit(
        model, x, later, LOSSES.logistic, learning_rate=0.3, curvature="exact",
        leaf_solver="newton", regularization="absolute", init_score=model.init_score,
    )  # fmt: skip
    expected = jb.interchange.read_xgboost(updated)
    np.testing.assert_allclose(found.leaf_value, expected.leaf_value, atol=1e-5)
    np.testing.assert_allclose(
        found.sums.curvature, expected.sums.curvature, rtol=1e-4, atol=1e-4
    )


def test_lightgbm_refits_the_same_leaves():
    x, y = LATER
    settings = dict(
        objective="regression", num_leaves=4, learning_rate=0.2, verbosity=-1,
        num_threads=1, boost_from_average=False, min_data_in_leaf=30, lambda_l2=1.5,
    )  # fmt: skip
    booster = lightgbm.train(settings, lightgbm.Dataset(X, Y), 6)
    expected = booster.refit(x, y, decay_rate=0.6)
    found = jb.refit(
        jb.interchange.read_lightgbm(booster), x, y, decay=0.6, learning_rate=0.2,
        l2=3.0, regularization="absolute", init_score=0.0,  # of (s - t)^2, not / 2
    )  # fmt: skip
    np.testing.assert_allclose(jb.predict(found, x), expected.predict(x), atol=1e-5)


def test_rounds_share_one_program(model):
    jb.refit(model, X, Y)
    with Compilations() as compiled:
        jb.refit(model, X, Y + 1, learning_rate=0.2, l2=0.5, decay=0.25)
        jb.refit(jb.truncate(model, 7), X, Y)
    assert not [name for name in compiled.names if "refit" in name]


def test_estimators_give_their_model():
    from jboost.sklearn import JBoostRegressor

    estimator = JBoostRegressor(num_rounds=8, max_depth=3).fit(X, Y)
    later = jb.refit(estimator.model_, *LATER)
    assert later.num_rounds == 8
    with pytest.raises(TypeError, match="pass its model_"):
        jb.refit(estimator, *LATER)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(decay=1.5), r"decay must be .* got 1.5"),
        (dict(decay="some"), r"decay must be .* got 'some'"),
        (dict(learning_rate=0), r"learning_rate must be .* got 0"),
        (dict(x=X[:, :2]), r"x must have 3 columns.* got 2"),
        (dict(y=Y[:9]), r"y must have 200 rows.* got shape"),
        (dict(y=None), r"y must .* got None"),
        (dict(sample_weight=-HALF), r"sample_weight must be .* >= 0"),
        (dict(offset=X), r"offset must have shape \(200,\)"),
        (dict(loss=LOSSES.poisson), r"y must contain numbers >= 0"),
        (dict(curvature="odd"), r"curvature must be one of"),
        (dict(init_score="odd"), r"init_score must be .auto"),
        (dict(init_score=[1.0, 2.0]), r"init_score must be .* got shape"),
        (dict(loss=lambda s, t: -s), r"must have a minimum"),
        (dict(decey=0.5), r"unexpected keyword argument 'decey'; .*'decay'"),
    ],
)
def test_bad_arguments_are_named(model, change, match):
    given = {**dict(x=X, y=Y, loss=LOSSES.squared_error), **change}
    with pytest.raises((TypeError, ValueError), match=match):
        jb.refit(model, **given)


def test_losses_that_diverge_are_named(model):
    with pytest.raises(ValueError, match=r"leaf values of round \d+ became"):
        jb.refit(model, X, Y, learning_rate=1e30)
