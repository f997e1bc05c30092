# SPDX-License-Identifier: Apache-2.0
"""Each loss equals an independent formula in float64, and differentiates well."""

import contextlib
from functools import partial

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from scipy import special
from sklearn import metrics

import jboost as jb
from jboost.entry import arguments
from jboost.losses import Adaptive, weighted_quantile
from jboost.losses.groups import softplus

L = jb.losses
GRID = np.linspace(-4.1, 3.9, 33)  # misses the kinks at 0 and +-1
NUMBERS = (-2.0, 0.25, 1.7)
COUNTS = (0.0, 1.0, 7.0)
SIGNS = (-1.0, 1.0)
SHARES = (0.0, 1.0, 0.3)


def pinball(s, t, tau):
    return np.maximum(tau * (t - s), (tau - 1) * (t - s))


def cross_entropy(s, t):
    p = special.expit(s)
    return -special.xlogy(t, p) - special.xlogy(1 - t, 1 - p)


def focal_by_hand(s, t, gamma, alpha):
    p = special.expit(s)
    p_t, alpha_t = t * p + (1 - t) * (1 - p), t * alpha + (1 - t) * (1 - alpha)
    return -alpha_t * (1 - p_t) ** gamma * np.log(p_t)


def huber_by_hand(s, t, d):
    return special.huber(d, s - t)


def tweedie_by_hand(s, t, p):
    return -t * np.exp(s * (1 - p)) / (1 - p) + np.exp(s * (2 - p)) / (2 - p)


# name: the loss, the same in NumPy or SciPy, targets
TABLE = {
    "squared_error": (L.squared_error, lambda s, t: (s - t) ** 2, NUMBERS),
    "absolute_error": (L.absolute_error, lambda s, t: np.abs(s - t), NUMBERS),
    "huber": (L.huber, partial(huber_by_hand, d=1.0), NUMBERS),
    "huber_wide": (
        partial(L.huber, delta=2.5), partial(huber_by_hand, d=2.5), NUMBERS,
    ),
    "pseudo_huber": (
        partial(L.pseudo_huber, delta=0.7),
        lambda s, t: special.pseudo_huber(0.7, s - t),
        NUMBERS,
    ),
    "log_cosh": (L.log_cosh, lambda s, t: np.log(np.cosh(s - t)), NUMBERS),
    "quantile": (partial(L.quantile, tau=0.8), partial(pinball, tau=0.8), NUMBERS),
    "expectile": (
        partial(L.expectile, tau=0.8),
        lambda s, t: np.where(s > t, 0.2, 0.8) * (s - t) ** 2,
        NUMBERS,
    ),
    "poisson": (L.poisson, lambda s, t: np.exp(s) - t * s, COUNTS),
    "gamma": (L.gamma, lambda s, t: t / np.exp(s) + s, (0.5, 1.0, 7.0)),
    "tweedie": (
        partial(L.tweedie, power=1.3), partial(tweedie_by_hand, p=1.3), COUNTS,
    ),
    "logistic": (L.logistic, cross_entropy, SHARES),
    "exponential": (L.exponential, lambda s, t: np.exp(-t * s), SIGNS),
    "focal": (L.focal, partial(focal_by_hand, gamma=2.0, alpha=0.25), (0.0, 1.0)),
    "focal_sharp": (
        partial(L.focal, gamma=3.0, alpha=0.6),
        partial(focal_by_hand, gamma=3.0, alpha=0.6),
        (0.0, 1.0),
    ),
    "hinge": (L.hinge, lambda s, t: np.maximum(0, 1 - t * s), SIGNS),
    "hinge_squared": (
        L.hinge_squared, lambda s, t: np.maximum(0, 1 - t * s) ** 2, SIGNS,
    ),
    "cauchy": (
        partial(L.cauchy, scale=1.5),
        lambda s, t: np.log(1 + ((s - t) / 1.5) ** 2 / 2),
        NUMBERS,
    ),
    "welsch": (
        partial(L.welsch, scale=1.5),
        lambda s, t: 1 - np.exp(-(((s - t) / 1.5) ** 2) / 2),
        NUMBERS,
    ),
}  # fmt: skip


@contextlib.contextmanager
def float64():
    """64-bit numbers; strict promotion refuses what the losses say for these."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def on_grid(function, targets):
    """Values at GRID for each target, in float64."""
    scores, target = jnp.asarray(GRID), jnp.asarray(np.array(targets))
    rows = jax.vmap(function, (0, None))
    return np.asarray(jax.jit(jax.vmap(rows, (None, 0)))(scores, target))


def close(actual, expected, **tolerance):
    """Equal but for float64 rounding, of numbers of order one to e^8."""
    tolerance = tolerance or dict(rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(actual, expected, **tolerance)


@pytest.mark.parametrize(
    ("loss", "deviance", "target"),
    [
        (L.poisson, metrics.mean_poisson_deviance, 3.0),
        (L.gamma, metrics.mean_gamma_deviance, 3.0),
        (
            partial(L.tweedie, power=1.6),
            partial(metrics.mean_tweedie_deviance, power=1.6),
            3.0,
        ),
        (
            partial(L.quantile, tau=0.3),
            lambda y, mu: 2 * metrics.mean_pinball_loss(y, np.log(mu), alpha=0.3),
            3.0,
        ),
    ],
)
def test_differences_equal_scikit_learn_deviance(loss, deviance, target):
    """Twice the loss is the deviance, up to a term without the score."""
    with float64():
        actual = 2 * on_grid(loss, [target])[0]
    expected = np.array([deviance([target], [np.exp(s)]) for s in GRID])
    close(actual - actual[0], expected - expected[0], rtol=1e-10, atol=1e-10)


def test_softmax_equals_log_of_share_and_its_gradient_is_share_minus_indicator():
    with float64():
        scores = jnp.array([[0.3, -1.0, 2.0], [5.0, 5.0, -5.0]])
        for target in range(3):
            both = jax.vmap(jax.value_and_grad(L.softmax), (0, None))
            actual, slope = jax.jit(both)(scores, target)
            close(actual, -special.log_softmax(scores, axis=1)[:, target])
            expected = special.softmax(scores, axis=1) - np.eye(3)[target]
            close(slope, expected)


@pytest.mark.parametrize("name", TABLE)
def test_value_equals_formula_and_derivatives_its_differences(name):
    loss, formula, targets = TABLE[name]

    def every(score, target):
        functions = (loss, jax.grad(loss), jax.hessian(loss))
        return jnp.stack([function(score, target) for function in functions])

    with float64():
        actual, gradient, hessian = np.moveaxis(on_grid(every, targets), -1, 0)
    assert actual.dtype == np.float64
    close(actual, [formula(GRID, t) for t in targets])
    step = 1e-4
    at = [np.array([formula(GRID + k * step, t) for t in targets]) for k in (-1, 0, 1)]
    # Central differences err by step^2 times a derivative (at most e^5 here), and
    # by rounding 1e-16 e^5 / step^order.
    close(gradient, (at[2] - at[0]) / (2 * step), rtol=1e-6, atol=1e-6)
    second = (at[2] - 2 * at[1] + at[0]) / step**2
    close(hessian, second, rtol=1e-5, atol=1e-5)


def test_losses_of_optax_equal_the_same_formulas():
    """Users who change from one to the other keep their loss."""
    focal = partial(optax.sigmoid_focal_loss, alpha=0.25, gamma=2.0)
    others = {
        "squared_error": optax.squared_error, "huber": optax.huber_loss,
        "log_cosh": optax.log_cosh, "logistic": optax.sigmoid_binary_cross_entropy,
        "hinge": optax.hinge_loss, "focal": focal,
    }  # fmt: skip
    for name, other in others.items():
        _, formula, targets = TABLE[name]
        with float64():
            actual = on_grid(other, targets)
        close(actual, [formula(GRID, t) for t in targets], err_msg=name)


def at(loss, score, target):
    """Value, gradient and Hessian in float32."""
    score, target = jnp.float32(score), jnp.float32(target)

    @jax.jit
    def evaluate(score, target):
        functions = (loss, jax.grad(loss), jax.hessian(loss))
        return [function(score, target) for function in functions]

    return [float(value) for value in evaluate(score, target)]


@pytest.mark.parametrize(
    ("loss", "score", "target", "value", "gradient"),
    [
        (L.logistic, 100, 0, 100, 1),
        (L.logistic, -100, 1, 100, -1),
        (L.logistic, 100, 1, 0, 0),
        (L.logistic, -100, 0, 0, 0),
        (L.log_cosh, 1e4, 0, 1e4 - np.log(2), 1),
        (L.log_cosh, -1e4, 0, 1e4 - np.log(2), -1),
        (L.log_cosh, 1e-15, 0, 5e-31, 1e-15),
        (L.log_cosh, -1e-3, 0, 4.9999992e-7, -9.9999967e-4),
        (L.pseudo_huber, 1e8, 0, 1e8, 1),
        (L.pseudo_huber, 1e-8, 0, 0.5e-16, 1e-8),
        (L.focal, 50, 1, 0, 0),
        (L.focal, -50, 0, 0, 0),
        (L.focal, 50, 0, 0.75 * 50, 0.75),
        (L.focal, -50, 1, 0.25 * 50, -0.25),
        (L.huber, 1e20, 0, 1e20, 1),
        (L.absolute_error, -1e30, 1e30, 2e30, -1),
        (L.welsch, 1e6, 0, 1, 0),
        (L.cauchy, 1e6, 0, np.log(0.5e12), 2e-6),
        (L.exponential, 80, 1, np.exp(-80), -np.exp(-80)),
        (L.poisson, -80, 2, 160, -2),
        (L.hinge, 1e30, -1, 1e30, 1),
    ],
)
def test_extreme_scores(loss, score, target, value, gradient):
    actual = at(loss, score, target)
    chex.assert_tree_all_finite(actual)
    # float32 rounding; what underflows may differ from zero by e^-50
    close(actual[:2], [value, gradient], rtol=3e-6, atol=1e-18)


def test_gradient_is_zero_at_the_kink():
    assert at(L.absolute_error, 2, 2) == [0, 0, 0]
    assert at(L.huber, 2, 2)[:2] == [0, 0]


def test_integer_targets():
    for loss in (L.squared_error, L.absolute_error, L.poisson, L.logistic, L.focal):
        assert float(loss(jnp.float32(0.5), jnp.int32(1))) == float(
            loss(jnp.float32(0.5), jnp.float32(1))
        )


ROW_COUNT = 9
any_number = st.one_of(
    st.sampled_from([-np.inf, np.inf, 0.0, 1.0, -1.0]),
    st.floats(width=32, allow_nan=False),
)
quantile_of_rows = jax.jit(weighted_quantile)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(any_number, min_size=ROW_COUNT, max_size=ROW_COUNT),
    # Small whole weights and sixteenths: every sum and product is exact.
    weights=st.lists(st.integers(0, 4), min_size=ROW_COUNT, max_size=ROW_COUNT).filter(
        any
    ),
    q=st.integers(1, 16).map(lambda k: k / 16),
)
def test_weighted_quantile_equals_sorting(values, weights, q):
    values, weights = np.array(values, np.float32), np.array(weights, np.float32)
    actual = float(quantile_of_rows(values, weights, q))
    order = np.argsort(values, kind="stable")
    order = order[weights[order] > 0]
    enough = np.cumsum(weights[order]) >= q * weights.sum()
    expected = values[order][np.argmax(enough)]
    tiny = np.finfo(np.float32).tiny  # denormals count as 0
    assert actual == expected or abs(actual - expected) <= tiny


def test_weighted_quantile_ignores_rows_without_weight():
    values = jnp.array([np.nan, 1.0, 2.0, 3.0, np.inf], jnp.float32)
    weights = jnp.array([0.0, 1.0, 1.0, 1.0, 0.0], jnp.float32)
    assert float(weighted_quantile(values, weights, 0.5)) == 2
    assert float(weighted_quantile(values, weights, 1.0)) == 3


def test_adaptive_huber_estimates_its_delta():
    loss = L.make_adaptive_huber(alpha=0.75)
    scores = jnp.zeros(8, jnp.float32)
    targets = jnp.array([-1, 2, -3, 4, -5, 6, -7, 80], jnp.float32)
    delta = loss.estimate(scores, targets, jnp.ones(8, jnp.float32))
    assert float(delta) == 6  # the 6th of 8 absolute residuals
    weights = jnp.array([9, 1, 1, 1, 0, 0, 0, 0], jnp.float32)
    assert float(loss.estimate(scores, targets, weights)) == 1
    expected = L.huber(jnp.float32(0), jnp.float32(80), delta=6.0)
    assert float(loss.loss(scores[7], targets[7], delta)) == float(expected)


def test_adaptive_checks_what_it_is_given():
    assert isinstance(L.adaptive(L.huber, np.mean), Adaptive)
    with pytest.raises(TypeError, match=r"loss .*3"):
        L.adaptive(3, np.mean)
    with pytest.raises(TypeError, match=r"estimate .*None"):
        L.adaptive(L.huber, None)
    with pytest.raises(ValueError, match=r"alpha .*1\.5"):
        L.make_adaptive_huber(alpha=1.5)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("binary:logistic", "logistic"),
        ("reg:squarederror", "squared_error"),
        ("RMSE", "squared_error"),
        ("regression_l1", "absolute_error"),
        ("log_loss", "logistic"),
        ("Quantile:alpha=0.9", "quantile"),
        ("count:poisson", "poisson"),
        ("multi:softprob", "softmax"),
        ("hubber", "huber"),
    ],
)
def test_names_of_other_libraries_are_answered(given, meant):
    with pytest.raises(TypeError, match=rf"{given}.*jb\.losses\.{meant}\b"):
        jb.fit(np.zeros((3, 1)), np.zeros(3), given)  # type: ignore
    with pytest.raises(TypeError, match=r"jb\.losses\.cauchy"):
        jb.fit(np.zeros((3, 1)), np.zeros(3), "qqqqqqqq")  # type: ignore


def test_every_suggestion_exists():
    assert set(arguments._LOSSES) <= {*L.LOSSES, *L.GROUP_LOSSES}


def test_softplus_is_exact_to_float32():
    """At scores near 0, where the logarithm is of almost 1, and where it overflows."""
    sizes = np.concatenate([np.geomspace(1e-30, 80, 2000), [0.0, np.inf]])
    scores = np.concatenate([-sizes, sizes]).astype(np.float32)
    expected = np.logaddexp(scores.astype(np.float64), 0.0)
    found = jax.jit(softplus)(jnp.asarray(scores))
    np.testing.assert_allclose(found, expected, rtol=5e-7)
    slopes = jax.jit(jax.vmap(jax.grad(softplus)))(jnp.asarray(scores))
    np.testing.assert_allclose(slopes, special.expit(scores), rtol=5e-7)
