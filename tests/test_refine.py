# SPDX-License-Identifier: Apache-2.0
"""Refining: all leaf values trained together, for splits that stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from compilations import Compilations
from linear_leaves import add_slopes, staged_scores
from tables import FULL, SMALL, make_regression, same_bits
from test_continue import grown, linked

import jboost as jb

X, Y = make_regression()
HELD = make_regression(seed=5)
LOSSES = jb.losses
HALF = np.where(np.arange(len(Y)) % 2, 0.5, 2.0).astype(np.float32)
MODEL, _ = jb.fit(X, Y, **SMALL, **FULL)
CLOSE = dict(rtol=2e-4, atol=1e-6)


def mean_loss(loss, scores, targets, weights=None):
    """The weighted mean of a loss."""
    values = jax.jit(jax.vmap(loss))(np.float32(scores), targets)
    return np.average(np.float64(values), weights=weights)


def spread(model, x):
    """The standard deviation of the scores."""
    return np.std(np.asarray(jb.predict(model, x), np.float64))


def test_a_step_follows_the_gradient_of_predict():
    """One step of gradient descent, against jax.grad through jb.predict."""
    rate, rounds = 0.3, MODEL.num_rounds

    def objective(model):
        return jnp.mean(jnp.square(jb.predict(model, X) - Y))

    unit = spread(MODEL, X)
    residual = np.asarray(jb.predict(MODEL, X)) - Y
    scale = unit * np.mean(np.abs(2 * residual))
    gradient = jax.grad(objective, allow_int=True)(MODEL)
    found, curves = jb.refine(
        MODEL, X, Y, optimizer=optax.sgd(rate), num_epochs=1, l2=0.0
    )
    assert curves.best_epoch == 1
    change = rate * np.asarray(gradient.leaf_value) * (unit / rounds) ** 2 / scale
    np.testing.assert_allclose(MODEL.leaf_value - found.leaf_value, change, **CLOSE)
    change = rate * np.asarray(gradient.init_score) * unit**2 / scale
    np.testing.assert_allclose(
        MODEL.init_score - found.init_score, change, rtol=1e-3, atol=1e-6
    )
    np.testing.assert_allclose(curves.train_loss[0], objective(MODEL), rtol=1e-5)
    np.testing.assert_allclose(curves.train_loss[1], objective(found), rtol=1e-5)


def test_linear_leaves_keep_their_slopes():
    model = add_slopes(MODEL)
    x = np.where(np.arange(len(X))[:, None] % 7 == 3, np.nan, X)
    given = dict(offset=HALF, validation=(x, Y, None, HALF), implementation="xla")
    found, curves = jb.refine(model, x, Y, **given)
    same_bits(found.slopes, model.slopes)
    places = ((model, 0), (found, curves.best_epoch))
    for each, epoch in places:
        scores = staged_scores(each, x)[-1] + HALF
        loss = np.mean(np.square(scores - Y))
        np.testing.assert_allclose(curves.validation_loss[epoch], loss, rtol=1e-5)
    assert curves.validation_loss[curves.best_epoch] < 0.8 * curves.validation_loss[0]


def test_the_penalty_counts_rows():
    """In one round: sum_i 2 (F_i - y_i) / scale + l2 (v - v_0) / unit^2 = 0."""
    model, l2 = jb.truncate(MODEL, 1), 20.0
    unit, before = spread(model, X), np.asarray(model.leaf_value[0, 0], np.float64)
    scale = unit * np.mean(np.abs(2 * (np.asarray(jb.predict(model, X)) - Y)))
    found, _ = jb.refine(
        model, X, Y, optimizer=optax.sgd(3.0, momentum=0.95), num_epochs=3000, l2=l2,
        early_stopping_epochs=None,
    )  # fmt: skip
    leaf = np.asarray(jb.leaf_indices(model, X))[:, 0]
    residual = np.asarray(jb.predict(found, X), np.float64) - Y
    pull = np.bincount(leaf, 2 * residual, len(before)) / scale
    change = np.asarray(found.leaf_value[0, 0], np.float64) - before
    np.testing.assert_allclose(pull, -l2 * change / unit**2, rtol=1e-2, atol=1e-2)
    assert abs(residual.mean()) < 1e-3
    assert np.abs(l2 * change / unit**2).max() > 1  # it does pull


def test_without_a_penalty_it_reaches_least_squares():
    model = jb.truncate(MODEL, 2)
    leaves = np.asarray(jb.leaf_indices(model, X))
    columns = np.concatenate([np.eye(8)[leaves[:, 0]], np.eye(8)[leaves[:, 1]]], axis=1)
    best = np.linalg.lstsq(columns, Y, rcond=None)[0]
    least = np.mean(np.square(columns @ best - Y))
    _, curves = jb.refine(
        model, X, Y, optimizer=optax.sgd(1.0, momentum=0.95), num_epochs=2000, l2=0.0,
        early_stopping_epochs=None,
    )  # fmt: skip
    assert curves.train_loss[0] > 1.5 * least
    np.testing.assert_allclose(np.min(curves.train_loss), least, rtol=1e-3)


def test_the_best_values_on_validation_are_returned():
    found, curves = jb.refine(MODEL, X, Y, validation=HELD, optimizer=optax.adam(0.1))
    assert curves.best_epoch == np.argmin(curves.validation_loss) > 0
    assert len(curves.train_loss) == curves.best_epoch + 21  # early stopping
    x, y = HELD
    for model, number in ((MODEL, 0), (found, curves.best_epoch)):
        expected = mean_loss(LOSSES.squared_error, jb.predict(model, x), y)
        np.testing.assert_allclose(curves.validation_loss[number], expected, rtol=1e-5)
    same_bits(
        (found.feature, found.threshold, found.sums),
        (MODEL.feature, MODEL.threshold, MODEL.sums),
    )
    # Steps that only do harm, or end in NaN: the given values are returned.
    for rate in (100.0, 1e30):
        kept, curves = jb.refine(
            MODEL, X, Y, validation=HELD, optimizer=optax.sgd(rate), num_epochs=30
        )
        assert curves.best_epoch == 0 and len(curves.train_loss) <= 21
        same_bits(kept, MODEL)


CASES = {
    "weights": (
        np.where(np.abs(X) > 1, np.nan, X), Y, LOSSES.huber,
        dict(sample_weight=HALF, offset=X[:, 0]), {},
    ),
    "scores": (
        X, np.digitize(Y, [0.5, 2]), LOSSES.softmax, dict(offset=0.1 * X),
        dict(num_scores=3, init_score=0.0),
    ),
    "sparse": (
        scipy.sparse.csr_matrix(np.where(np.abs(X) > 1, X, 0)), Y, LOSSES.squared_error,
        {}, dict(absent="zero"),
    ),
    "categories": (
        np.c_[X[:, :2], np.round(3 * np.abs(X[:, 2]))].astype(np.float32), Y,
        LOSSES.squared_error, {}, dict(categorical=[2]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_curves_are_the_losses_of_predictions(name):
    x, y, loss, rows, settings = CASES[name]
    model, _ = jb.fit(x, y, loss, linear_leaves=False, **rows, **settings, **SMALL)
    parts = x, y, rows.get("sample_weight"), rows.get("offset")
    found, curves = jb.refine(
        model, x, y, loss, validation=parts, num_epochs=60, **rows
    )
    np.testing.assert_allclose(curves.train_loss, curves.validation_loss, rtol=1e-6)
    assert curves.best_epoch > 5
    for each, number in ((model, 0), (found, curves.best_epoch)):
        scores = jb.predict(each, x, offset=rows.get("offset"))
        expected = mean_loss(loss, scores, y, rows.get("sample_weight"))
        np.testing.assert_allclose(curves.train_loss[number], expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["deep", "linked"])
def test_leaves_of_other_layouts(kind):
    model = grown(9) if kind == "deep" else linked(grown(3))
    found, curves = jb.refine(model, X, Y, num_epochs=40)
    expected = mean_loss(LOSSES.squared_error, jb.predict(found, X), Y)
    np.testing.assert_allclose(curves.train_loss[-1], expected, rtol=1e-4)
    assert expected < 0.95 * curves.train_loss[0]


def test_units_of_targets_and_losses_do_not_matter():
    large, _ = jb.fit(X, 1000 * Y, **SMALL, **FULL)
    found, curves = jb.refine(MODEL, X, Y, validation=HELD)
    x, y = HELD
    other, others = jb.refine(
        large, X, 1000 * Y, lambda s, t: 7 * (s - t) ** 2, validation=(x, 1000 * y)
    )
    # Adam divides by the root of the squared gradient plus 1e-8.
    np.testing.assert_allclose(
        np.asarray(jb.predict(other, x)) / 1000, jb.predict(found, x), atol=5e-3
    )
    ratio = others.validation_loss.min() / curves.validation_loss.min()
    np.testing.assert_allclose(ratio, 7e6, rtol=1e-3)


def test_parameters_of_a_loss_are_trained_along():
    """The scale of normal noise: at the optimum it is the mean squared residual."""

    def normal(score, target, parameters):
        scale = jnp.exp(parameters["log_scale"])
        return 0.5 * jnp.square((target - score) / scale) + jnp.log(scale)

    found, curves = jb.refine(
        MODEL, X, Y, normal, parameters={"log_scale": 1.0}, num_epochs=800, l2=1000.0
    )
    residual = np.asarray(jb.predict(found, X)) - Y
    scale = np.exp(curves.parameters["log_scale"])
    np.testing.assert_allclose(scale, np.sqrt(np.mean(residual**2)), rtol=0.05)
    assert curves.train_loss[curves.best_epoch] < curves.train_loss[0] - 0.4


def test_batches_are_seeded_and_learn():
    run = dict(validation=HELD, batch_size=64, num_epochs=30)
    found, curves = jb.refine(MODEL, X, Y, seed=1, **run)
    again, _ = jb.refine(MODEL, X, Y, seed=1, **run)
    other, _ = jb.refine(MODEL, X, Y, seed=2, **run)
    same_bits(again, found)
    assert np.any(np.asarray(other.leaf_value) != np.asarray(found.leaf_value))
    assert np.min(curves.validation_loss) < 0.98 * curves.validation_loss[0]
    whole, _ = jb.refine(MODEL, X, Y, batch_size=len(Y) + 99, num_epochs=5)
    same_bits(whole, jb.refine(MODEL, X, Y, num_epochs=5)[0])


def test_optimizers_of_other_rates_share_a_program():
    jb.refine(MODEL, X, Y, optimizer=optax.adam(0.02), num_epochs=2)
    with Compilations() as compiled:
        jb.refine(MODEL, X, Y + 1, optimizer=optax.adam(0.03), num_epochs=70, l2=2.0)
    assert not [name for name in compiled.names if "run_epochs" in name]


def test_leaves_without_rows_and_models_without_rounds():
    few, _ = jb.refine(MODEL, X[:5], Y[:5], num_epochs=10)
    leaves = np.asarray(jb.leaf_indices(MODEL, X[:5]))
    reached = np.zeros(MODEL.leaf_value.shape, bool)
    for number in range(MODEL.num_rounds):
        reached[number, 0, leaves[:, number]] = True
    same = np.asarray(few.leaf_value) == np.asarray(MODEL.leaf_value)
    assert same[~reached].all() and not same[reached].all()
    none, curves = jb.refine(jb.truncate(MODEL, 0), X, Y + 1, num_epochs=300)
    assert curves.train_loss[-1] < curves.train_loss[0]
    np.testing.assert_allclose(none.init_score, np.mean(Y + 1), atol=0.05)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(optimizer=0.1), r"optimizer must be .* got 0.1"),
        (dict(optimizer=optax.lbfgs()), r"optimizer must be .* whose update takes"),
        (dict(num_epochs=-1), r"num_epochs must be .* got -1"),
        (dict(early_stopping_epochs=0), r"early_stopping_epochs must be .* got 0"),
        (dict(batch_size=0), r"batch_size must be .* got 0"),
        (dict(l2=-1.0), r"l2 must be .* got -1"),
        (dict(seed=None), r"seed must be .* got None"),
        (dict(validation=(X,)), r"validation must be \(x, y\)"),
        (dict(validation=(X, Y, None, Y)), r"validation must be .* with an offset if"),
        (dict(validation={"a": HELD, "b": HELD}), r"validation must be one set"),
        (dict(validation=(X[:, :2], Y)), r"validation x must have 3 columns"),
        (dict(validation=(X, Y[:9])), r"validation y must have 200 rows"),
        (dict(parameters={"a": "b"}), r"parameters must be .* numbers, got 'b'"),
        (dict(parameters=1.0), r"loss .* failed on one row"),
        (dict(loss=3), r"loss must be callable .* got 3"),
        (dict(loss=LOSSES.poisson), r"y must contain numbers >= 0"),
        (
            dict(loss=LOSSES.adaptive(LOSSES.squared_error, lambda s, t, w: ())),
            r"loss must not be adaptive",
        ),
        (
            dict(loss=lambda s, t: jnp.log(s - 2) ** 2),
            r"loss must be finite on the data",
        ),
    ],
)
def test_bad_arguments_are_named(change, match):
    given = dict(x=X, y=Y, loss=LOSSES.squared_error) | change
    with pytest.raises((TypeError, ValueError), match=match):
        jb.refine(MODEL, **given)
