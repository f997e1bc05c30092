# SPDX-License-Identifier: Apache-2.0
"""Linear leaves in training: slopes, laws, constraints and refusals.

The reference solves the ridge regression of each leaf in NumPy, in float64.
"""

import jax
import numpy as np
import pytest
import scipy.sparse
from tables import same_bits, squared_distance

import jboost as jb

RNG = np.random.default_rng(0)
ROWS = 600
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
X[:, 2] = np.exp(X[:, 2])  # a tail
X[:, 3] = RNG.integers(0, 2, ROWS)  # too few values for slopes
HOLES = np.where(RNG.random(X.shape) < 0.05, np.nan, X).astype(np.float32)
SIGNAL = np.sin(X[:, 0]) + X[:, 1] * X[:, 2] / 2 + X[:, 3]
Y = (SIGNAL + 0.2 * RNG.normal(size=ROWS)).astype(np.float32)
LABELS = (Y > 0).astype(np.float32)
WEIGHTS = RNG.integers(0, 4, ROWS).astype(np.float32)
CALL = dict(linear_leaves=True, max_depth=3, num_rounds=5)
RIDGE, ROWS_PER_TERM = 2.0, 3


def fit(x=X, y=Y, loss=jb.losses.squared_error, **call):
    return jb.fit(x, y, loss, **{**CALL, **call})


def scale(x, ranges):
    middle, half = ranges.mean(axis=1), (ranges[:, 1] - ranges[:, 0]) / 2
    return (np.clip(x, *ranges.T) - middle) / np.where(half > 0, half, 1)


@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS / 3])
def test_slopes_are_those_of_a_ridge_regression(weights):
    """Of logistic's first round: gradient p - y and curvature p (1 - p)."""
    model, _ = fit(
        HOLES, LABELS, jb.losses.logistic, num_rounds=1, init_score=0.3,
        learning_rate=1.0, subsample=1.0, sample_weight=weights, parent_rows=0.0,
    )  # fmt: skip
    w = np.ones(ROWS) if weights is None else weights.astype(float)
    p = 1 / (1 + np.exp(-0.3))
    gradient, curvature = w * (p - LABELS), w * p * (1 - p)
    unit = model.sums.l2[0, 0]  # l2 = 1 row, whose curvature this is
    scaled = scale(HOLES.astype(float), np.asarray(model.ranges, float))
    half = np.diff(np.asarray(model.ranges, float), axis=1)[:, 0] / 2
    leaf, slopes = np.asarray(jb.leaf_indices(model, HOLES)).ravel(), model.slopes
    found = 0
    for number in np.unique(leaf):
        features = np.asarray(slopes.feature[0, 0, number])
        features = features[features >= 0]
        assert 3 not in features
        d = scaled[:, features]
        own = (leaf == number) & ~np.isnan(d).any(axis=1) & (w > 0)
        if not len(features):
            continue
        found += 1
        d, g, h = d[own], gradient[own], curvature[own]
        center = h @ d / h.sum()
        d = d - center
        matrix = (h * d.T) @ d + RIDGE * float(unit) * np.eye(len(features))
        slope = -np.linalg.solve(matrix, d.T @ g) / half[features]
        measured = np.asarray(slopes.slope[0, 0, number])[: len(features)]
        np.testing.assert_allclose(measured, slope, rtol=1e-3, atol=1e-5)
    assert found >= 4


def test_terms_are_the_numeric_features_of_the_path_nearest_first():
    model, _ = fit()
    feature = np.asarray(model.feature)[:, 0]
    stays = (np.asarray(model.threshold) == np.inf)[:, 0]
    for tree, leaf in np.ndindex(5, 8):
        node, path = leaf + 7, []
        while node:
            node = (node - 1) // 2
            if not stays[tree, node] and feature[tree, node] not in (3, *path):
                path.append(feature[tree, node])
        terms = np.asarray(model.slopes.feature[tree, 0, leaf])
        assert terms[terms >= 0].tolist() in ([], path)  # none in leaves of few rows
    assert (np.asarray(model.slopes.feature) >= 0).sum() > 5 * 8


@pytest.mark.parametrize("loss", ["squared_error", "logistic", "poisson", "huber"])
def test_scores_of_training_are_those_of_the_model(loss):
    loss = getattr(jb.losses, loss)
    y = np.abs(np.round(Y)) if loss is jb.losses.poisson else LABELS
    model, history = fit(HOLES, y, loss, num_rounds=8, validation=(X[::3], y[::3]))
    for x, target, found in (
        (HOLES, y, history.train_loss), (X[::3], y[::3], history.validation_loss),
    ):  # fmt: skip
        values = jax.jit(jax.vmap(loss))(jb.predict(model, x), target)
        assert found[-1] == pytest.approx(float(np.mean(values)), rel=1e-5)


def test_they_fit_a_smooth_function_better():
    """Of rows that they have not seen."""
    y = SIGNAL - X[:, 3]
    call = dict(num_rounds=60, validation=(X[400:, :3], y[400:]))
    linear, constant = (
        fit(X[:400, :3], y[:400], linear_leaves=linear, **call)[1].best_loss
        for linear in (True, False)
    )
    assert linear < 0.5 * constant


def test_bits_do_not_depend_on_the_order_and_copies_of_rows():
    few = slice(300)
    call = dict(subsample=1.0, rows_per_threshold=0, min_child_samples=1)
    x, y, w = HOLES[few], Y[few], WEIGHTS[few]
    weighted = fit(x, y, sample_weight=w, **call)[0].slopes
    copies = np.repeat(np.arange(300), w.astype(int))
    ones = np.ones(len(copies))
    repeated = fit(x[copies], y[copies], sample_weight=ones, **call)[0]
    same_bits(repeated.slopes, weighted)
    order = RNG.permutation(300)
    shuffled = fit(x[order], y[order], sample_weight=w[order], **call)[0]
    same_bits(shuffled.slopes, weighted)


def test_units_of_loss_and_rows_do_not_matter():
    def scaled(score, target):
        return 1024 * jb.losses.logistic(score, target)

    model, _ = fit(y=LABELS, loss=jb.losses.logistic)
    np.testing.assert_allclose(
        fit(y=LABELS, loss=scaled)[0].slopes.slope, model.slopes.slope, rtol=1e-4
    )
    x = X * np.float32([4, 1, 0.5, 1])  # powers of two
    np.testing.assert_array_equal(
        jb.predict(fit(x, LABELS, jb.losses.logistic)[0], x), jb.predict(model, X)
    )


def test_values_are_clipped_and_missing_ones_leave_the_leaf_value():
    model, _ = fit()
    ends = np.asarray(model.ranges).copy()
    ends[3] = -np.inf, np.inf  # no slope
    beyond = np.clip(X * 10, *ends.T)
    far = np.where(np.abs(X) > 0.5, X * 1e6, beyond).astype(np.float32)
    np.testing.assert_array_equal(
        jb.predict(model, far), jb.predict(model, np.clip(far, *ends.T))
    )
    none = np.full((1, 4), np.nan, np.float32)
    leaf = np.asarray(jb.leaf_indices(model, none))[0]
    values = np.asarray(model.leaf_value)[np.arange(5), 0, leaf]
    bare = float(model.init_score) + values[np.newaxis].sum()
    assert float(jb.predict(model, none)[0]) == pytest.approx(bare, abs=1e-6)


def test_constraints_hold():
    model, _ = fit(monotone={0: 1}, num_rounds=30)
    assert not (np.asarray(model.slopes.feature) == 0).any()
    assert (np.asarray(model.slopes.slope) != 0).any()
    steps = np.linspace(-4, 4, 60, dtype=np.float32)
    grid = np.repeat(X[None, :40], len(steps), axis=0)
    grid[:, :, 0] = steps[:, None]
    scores = np.asarray(jb.predict(model, grid.reshape(-1, 4))).reshape(len(steps), -1)
    assert (np.diff(scores, axis=0) >= -1e-6).all()
    model, _ = fit(max_delta_step=0.2, num_rounds=1, init_score=0.0, learning_rate=1.0)
    assert np.abs(jb.predict(model, 10 * X)).max() <= 0.2 + 1e-6


def test_refitting_the_training_rows_gives_the_model():
    y, loss = Y, jb.losses.huber
    model, _ = fit(HOLES, y, loss, subsample=1.0)
    found = jb.refit(model, HOLES, y, loss)
    same_bits(found.slopes, model.slopes)
    np.testing.assert_array_equal(found.leaf_value, model.leaf_value)
    for decay in (0.25, 1.0):  # at every row, as at its leaf
        new = jb.refit(model, X, y + 1, loss, decay=decay, init_score=model.init_score)
        plain = jb.refit(model, X, y + 1, loss, init_score=model.init_score)
        one = [jb.truncate(each, 1) for each in (model, plain, new)]
        old, fresh, mixed = (np.asarray(jb.predict(each, X)) for each in one)
        np.testing.assert_allclose(mixed, decay * old + (1 - decay) * fresh, atol=1e-5)
    with pytest.raises(ValueError, match="x must be dense for a model with linear"):
        jb.refit(model, scipy.sparse.csr_array(X), y, loss)


@pytest.mark.parametrize("shared", [True, False])
def test_several_scores_have_slopes_if_asked(shared):
    y, loss = np.stack([Y, SIGNAL], 1), squared_distance
    call = dict(
        y=y, loss=loss, num_scores=2, share_structure=shared, init_score=[0.0, 0.5]
    )  # fmt: skip
    linear, history = fit(**call)
    assert linear.slopes.feature.shape[1] == (1 if shared else 2)
    if shared:
        constant, _ = fit(**call, linear_leaves="auto", num_rounds=0)
        assert constant.slopes is None and linear.slopes is not None
    values = np.square(np.asarray(jb.predict(linear, X)) - y).sum(axis=1)
    assert history.train_loss[-1] == pytest.approx(float(np.mean(values)), rel=1e-5)


def test_cross_validation_and_continued_training_have_them():
    found = jb.cross_validate(X, Y, folds=3, return_models=True, **CALL)
    assert found.models.slopes.slope.shape[0] == 3
    first, _ = fit(num_rounds=3)
    both, history = fit(num_rounds=2, model=first)
    same_bits(both.slopes, fit(num_rounds=5)[0].slopes)
    assert history.choices["linear_leaves"]


def test_leaves_stay_constant_where_there_are_no_slopes():
    def choice(*rows, **call):
        return jb.fit(*rows, num_rounds=0, **call)[1].choices["linear_leaves"]

    assert choice(X, Y)
    assert not choice(X, Y, jb.losses.absolute_error)
    assert not choice(X, Y, rows_per_threshold=0)
    assert not choice(X, Y, regularization="absolute")
    assert not choice(scipy.sparse.csr_array(X), Y)
    binned, key = jb.apply_bins(jb.fit_bins(X), X), jax.random.key(0)
    for call in (
        lambda: jb.fit(X, Y, jb.losses.absolute_error, linear_leaves=True),
        lambda: jb.fit(scipy.sparse.csr_array(X), Y, linear_leaves=True),
        lambda: jb.boost(binned, Y, jb.losses.huber, key, linear_leaves=True),
    ):
        with pytest.raises(ValueError, match="linear_leaves must be 'auto' or False"):
            call()
