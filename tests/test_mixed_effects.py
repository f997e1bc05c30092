# SPDX-License-Identifier: Apache-2.0
"""The likelihood of random intercepts is that of a multivariate normal distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

import jboost as jb

L = jb.losses


def make_groups(intercept, *, count=40, size=6, seed=0):
    """Residuals of groups of different sizes, and the number of each row's group."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), random.integers(1, size, count))
    effect = np.sqrt(intercept) * random.normal(size=count)
    return effect[groups] + 0.7 * random.normal(size=len(groups)), groups


def likelihood(residuals, groups, variances):
    value = 0.0
    for group in np.unique(groups):
        part = residuals[groups == group]
        covariance = variances[0] * np.eye(len(part)) + variances[1]
        value -= multivariate_normal.logpdf(part, np.zeros(len(part)), covariance)
    return value


def test_loss_and_gradient():
    targets = np.random.default_rng(0).normal(size=5)
    loss = jax.value_and_grad(lambda s: L.random_intercept(s, targets, (0.5, 2.0)))
    value, gradient = loss(jnp.zeros(5))
    expected = likelihood(targets, np.zeros(5), (0.5, 2.0)) - 2.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    covariance = 0.5 * np.eye(5) + 2.0
    expected = -np.linalg.solve(covariance, targets)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("intercept", [1.5, 0.05])
def test_variances_maximize_the_likelihood(intercept):
    residuals, groups = make_groups(intercept)
    best = minimize(
        lambda logs: likelihood(residuals, groups, np.exp(logs)), np.zeros(2),
        method="Nelder-Mead", options=dict(xatol=1e-6, fatol=1e-9),
    )  # fmt: skip
    scores = jnp.asarray(np.random.default_rng(1).normal(size=len(groups)), jnp.float32)
    found = jax.jit(L.estimate_variances)(
        scores, scores + jnp.asarray(residuals, jnp.float32),
        jnp.ones(len(groups)), jnp.asarray(groups, jnp.int32),
    )  # fmt: skip
    np.testing.assert_allclose(found, np.exp(best.x), rtol=1e-3)


def estimate(residuals, groups, weights=None):
    residuals = jnp.asarray(residuals, jnp.float32)
    weights = jnp.ones(len(residuals)) if weights is None else jnp.asarray(weights)
    zeros = jnp.zeros(len(residuals))
    return L.estimate_variances(zeros, residuals, weights, jnp.asarray(groups))


def test_groups_that_do_not_differ_have_no_intercepts():
    residuals = np.tile([-1.0, 1.0], 10)
    residual, intercept = estimate(residuals, np.repeat(np.arange(10), 2))
    assert (float(residual), float(intercept)) == (1.0, 0.0)


def test_extreme_residuals_are_finite():
    groups = np.repeat(np.arange(5), 4)
    for residuals in (np.zeros(20), groups - 2.0, np.full(20, 1e4)):
        assert np.isfinite(estimate(residuals, groups)).all()
    assert np.isfinite(estimate(np.arange(20.0), np.arange(20))).all()


def test_weight_two_is_a_duplicate():
    residuals, groups = make_groups(1.0)
    copies = np.random.default_rng(2).integers(0, 3, len(groups))
    repeated = np.repeat(residuals, copies), np.repeat(groups, copies)
    expected = estimate(repeated[0], np.unique(repeated[1], return_inverse=True)[1])
    found = estimate(residuals, groups, copies.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    half = groups == groups[-1]
    weighted = L.random_intercept(
        jnp.zeros(half.sum()), residuals[half], found,
        weights=jnp.asarray(copies[half], jnp.float32),
    )  # fmt: skip
    rows = np.repeat(residuals[half], copies[half])
    plain = L.random_intercept(jnp.zeros(len(rows)), rows, found)
    np.testing.assert_allclose(weighted, plain, rtol=1e-5)


def test_intercepts_are_conditional_means():
    """E[b | r] = t^2 1' (s^2 I + t^2 1 1')^-1 r."""
    residuals, groups = make_groups(1.0, count=3)
    zeros = np.zeros(len(groups))
    found = L.predict_intercepts(zeros, residuals, (0.5, 2.0), groups)
    for group in range(3):
        part = residuals[groups == group]
        covariance = 0.5 * np.eye(len(part)) + 2.0
        expected = 2.0 * np.linalg.solve(covariance, part).sum()
        np.testing.assert_allclose(found[groups == group], expected, rtol=1e-5)


@pytest.mark.parametrize("names", [[100, 100, 7], [-1, -1, 0], ["b", "b", "a"]])
def test_groups_may_have_any_ids(names):
    rows = np.zeros(3), np.array([2.0, 4.0, 1.0])
    found = L.predict_intercepts(*rows, (1.0, 1.0), names)
    np.testing.assert_allclose(found, [2, 2, 0.5], rtol=1e-6)
    traced = jax.jit(lambda ids: L.predict_intercepts(*rows, (1.0, 1.0), ids))
    np.testing.assert_array_equal(traced(jnp.array([0, 0, 1])), found)
    rows = map(jnp.float32, (*rows, np.ones(3)))
    scores, targets, weights = rows
    expected = L.estimate_variances(scores, targets, weights, jnp.array([0, 0, 1]))
    np.testing.assert_array_equal(
        L.estimate_variances(scores, targets, weights, names), expected
    )


@pytest.mark.parametrize("names", [[1, 2], [1, None, 2]])
def test_bad_groups_are_refused(names):
    with pytest.raises(ValueError, match="groups"):
        L.predict_intercepts(np.zeros(3), np.ones(3), (1.0, 1.0), names)


def test_loss_is_adaptive():
    loss = L.make_random_intercept()
    assert isinstance(loss, L.Adaptive)
    assert loss.report == "current"
