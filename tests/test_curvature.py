# SPDX-License-Identifier: Apache-2.0
"""Derivatives are finite at kinks, curvature is positive, minimizers are true."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.boosting.auto import needs_minimizer
from jboost.objective.coupling import find_coupling
from jboost.objective.curvature import derivatives, smoothing_scale
from jboost.objective.evaluation import Objective
from jboost.objective.minimizers import find_minimizers
from jboost.objective.tracing import trace_loss

L = jb.losses
ROWS = 15
POLICIES = ("auto", "exact", "secant", "absolute", "unit")


@partial(jax.jit, static_argnums=0)
def search(traced, constants, targets):
    objective = Objective(traced, constants, targets, (), None)
    return find_minimizers(objective, jax.tree.leaves(targets)[0].shape[0])


def bind(loss, targets, num_scores=1):
    """The objective, with minimizers where the rules ask for them."""
    targets = jax.tree.map(jnp.asarray, targets)
    traced, constants = trace_loss(loss, targets, num_scores)
    objective = Objective(traced, constants, targets, (), None)
    if needs_minimizer(traced):
        rows = jax.tree.leaves(targets)[0].shape[0]
        index = np.resize(np.arange(rows), ROWS)  # one shape: one program per loss
        padded = jax.tree.map(lambda array: array[index], targets)
        found = search(traced, constants, padded)[:, :rows]
        objective = objective._replace(minimizer=found)
    return objective


def minimizers(loss, targets, num_scores=1):
    found = np.asarray(bind(loss, targets, num_scores).minimizer)
    return found[0] if num_scores == 1 else found


@partial(jax.jit, static_argnums=(0, 1))
def evaluate(traced, policies, constants, targets, minimizer, scores):
    objective = Objective(traced, constants, targets, (), minimizer)
    weights = jnp.ones(scores.shape[1])
    coupling = find_coupling(objective, scores, weights)
    objective = objective._replace(coupling=coupling)
    return {p: derivatives(objective, scores, weights, p) for p in policies}


def derive(loss, targets, scores, policies=POLICIES, num_scores=1):
    """{policy: (gradient, curvature)} at scores [K, N], all rows weighing 1."""
    traced, constants, targets, _, minimizer, *_ = bind(loss, targets, num_scores)
    scores = jnp.asarray(scores, jnp.float32)
    scores = scores[None] if scores.ndim == 1 else scores
    values = evaluate(traced, policies, constants, targets, minimizer, scores)
    return jax.tree.map(np.asarray, values)


RESIDUALS = np.resize(np.float32([0, 0, -3, -0.5, 0, 0.01, 1, 40]), ROWS)
TARGETS = np.resize(np.float32([0, 1, 2, -3, 1e3, 0, 0.1, 7]), ROWS)

KINKED = {
    "jnp.abs": lambda s, t: jnp.abs(s - t),
    "root of a square": lambda s, t: jnp.sqrt((s - t) ** 2),
    "|r|^1.5": lambda s, t: jnp.abs(s - t) ** 1.5,
    "welsch": L.welsch,
}


@pytest.mark.parametrize("name", KINKED)
def test_finite_and_positive_at_kinks(name):
    values = derive(KINKED[name], TARGETS, TARGETS + RESIDUALS)
    for policy, (gradient, curvature) in values.items():
        assert np.isfinite(gradient).all(), policy
        assert np.isfinite(curvature).all(), policy
        straight = name == "jnp.abs"
        if straight and policy in ("exact", "absolute"):
            assert (curvature == 0).all(), policy
        else:
            assert (curvature > 0).all(), policy


@pytest.mark.parametrize("name", ["jnp.abs", "root of a square", "|r|^1.5"])
def test_a_row_at_its_own_minimum_wants_to_stay(name):
    gradient, _ = derive(KINKED[name], TARGETS, TARGETS + RESIDUALS)["auto"]
    np.testing.assert_array_equal(gradient[0, RESIDUALS == 0], 0)
    moving = RESIDUALS != 0
    assert (np.sign(gradient[0, moving]) == np.sign(RESIDUALS[moving])).all()


# Targets of every scale that float32 tells apart from 1 by its exponent alone.
SCALES = np.float32([1e-20, 1e-6, 0.3, 1, 7, 1e6, 1e20])
SIGNED = np.concatenate([-SCALES, [0], SCALES]).astype(np.float32)
AT_TARGET = {
    "abs": L.absolute_error,
    "pinball": partial(L.quantile, tau=0.1),
    "huber": L.huber,
    "log_cosh": L.log_cosh,
    "tiny abs": lambda s, t: 1e-6 * jnp.abs(s - t),
}


@pytest.mark.parametrize("name", AT_TARGET)
def test_minimizer_is_the_target(name):
    found = minimizers(AT_TARGET[name], SIGNED)
    # Within 2^-20 of the target, from which on the search trusts it.
    np.testing.assert_allclose(found, SIGNED, rtol=2.0**-20, atol=1e-36)


def flat_bottom(score, target):
    return jnp.maximum(0.0, jnp.abs(score - target) - 0.1)


COUNTS = np.float32([1e-4, 0.5, 1, 3, 1e6, 1e20])
POSITIVE = np.float32([1e-6, 0.5, 1, 3, 1e6])
SHARED = np.float32([0.01, 0.25, 0.5, 0.9, 0.999])
WIDE = np.float32([-1e4, -3, 0, 0.02, 5, 1e4])
# {name: (loss, targets, their minimizers, tolerance)}.
CLOSED = {
    # float32 near 1e4 is a multiple of 1e-3, so that the edges +-0.1 are rounded.
    "middle of a flat bottom": (flat_bottom, WIDE, WIDE, 1e-6),
    # exp(score) - target is zero within a relative 1e-7 of the target.
    "counts": (L.poisson, COUNTS, np.log(COUNTS), 1e-6),
    "gamma": (L.gamma, POSITIVE, np.log(POSITIVE), 1e-6),
    # A relative 1e-7 in 1 - 0.999 is 1e-4 in odds, hence 1e-4 in the logit.
    "logit of a share": (L.logistic, SHARED, np.log(SHARED / (1 - SHARED)), 2e-4),
    "edge of a hinge": (L.hinge, np.float32([-1, 1]), [-1, 1], 1e-6),
}


@pytest.mark.parametrize("name", CLOSED)
def test_minimizers_have_their_closed_form(name):
    loss, targets, expected, tolerance = CLOSED[name]
    found = minimizers(loss, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=tolerance)


def test_a_certain_class_has_no_minimizer():
    def loss(score, target):
        return L.logistic(score, target["y"])

    assert np.isinf(minimizers(L.poisson, np.float32([0]))).all()
    assert np.isinf(minimizers(L.logistic, np.array([False, True]))).all()
    assert np.isinf(minimizers(loss, {"y": np.int32([0, 1])})).all()


def test_losses_that_fall_for_ever_have_none():
    assert np.isinf(minimizers(L.focal, np.float32([0.5, 1, 1]))[1:]).all()


def test_quadratics_are_not_searched():
    assert bind(L.squared_error, TARGETS).minimizer is None
    assert bind(L.absolute_error, TARGETS).minimizer is not None


def test_curvature_of_competing_scores():
    """p (1 - p), and twice that where XGBoost's rule is asked for."""
    scores = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    targets = np.int32([0, 1, 2, 0, 1])
    values = derive(L.softmax, targets, scores, ("auto", "exact"), num_scores=3)
    share = np.exp(scores) / np.exp(scores).sum(0)
    indicator = np.eye(3)[targets].T
    for (gradient, curvature), times in zip(values.values(), (1, 2), strict=True):
        np.testing.assert_allclose(gradient, share - indicator, atol=1e-6)  # float32
        expected = times * share * (1 - share)
        np.testing.assert_allclose(curvature, expected, rtol=1e-5)


def test_curvature_of_scores_that_interact():
    """|H_kk|, at least what it was on average at the start, of a normal likelihood."""

    def normal(s, y):
        return s[1] + jnp.exp(-2 * s[1]) * (s[0] - y) ** 2 / 2

    mean, log_deviation = np.float32([[0.0, 1, 2, 3, 4], [0.0, -1, 1, 2, 0.5]])
    scores = np.stack([mean, log_deviation])
    targets = np.float32([1, 1, -1, 4, 4.1])
    values = derive(normal, targets, scores, ("auto", "exact"), num_scores=2)
    precision = np.exp(-2 * log_deviation)
    hessian = np.stack([precision, 2 * precision * (mean - targets) ** 2])
    np.testing.assert_allclose(values["exact"][1][0], hessian[0], rtol=1e-5)
    least = hessian.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(values["auto"][1], np.maximum(hessian, least), rtol=1e-5)


def test_separable_sums_have_minimizers():
    targets = np.float32([[1, -2], [30, 4], [0, 5]])
    found = minimizers(lambda s, t: jnp.sum(jnp.abs(s - t)), targets, 2)
    np.testing.assert_allclose(found, targets.T, rtol=1e-6, atol=1e-6)
    coupled = minimizers(lambda s, t: jnp.abs(s[0] * s[1] - t[0]) ** 3, targets, 2)
    assert np.isinf(coupled).all()


def huber_gradient(residual, delta=1.0):
    return np.clip(residual, -delta, delta)


def test_auto_is_the_larger_of_secant_and_slope():
    residual = np.linspace(-5, 5, ROWS).astype(np.float32)
    values = derive(L.huber, np.zeros(ROWS, np.float32), residual)
    distance = np.abs(residual)
    delta = np.mean(np.sqrt(distance)) ** 2
    gradient = huber_gradient(residual)
    secant = np.abs(gradient) / np.sqrt(distance**2 + delta**2)
    up, down = huber_gradient(residual + delta), huber_gradient(residual - delta)
    slope = (up - down) / (2 * delta)
    expected = {
        "auto": np.maximum(secant, slope),
        "secant": np.maximum(secant, 1e-6 * secant.mean()),
        "unit": np.ones(ROWS),
        "exact": np.maximum(distance <= 1, 1e-6 * np.mean(distance <= 1)),
    }
    for policy, curvature in expected.items():
        # float32; differences of gradients cancel to about 1e-7 / delta
        np.testing.assert_allclose(
            values[policy][1][0], curvature, rtol=1e-5, atol=2e-7
        )
        np.testing.assert_allclose(values[policy][0][0], gradient, rtol=1e-6)


def test_smoothing_scale_ignores_rows_without_weight_or_minimizer():
    scores = jnp.array([[1.0, 4.0, 9.0, jnp.nan]])
    minimizer = jnp.array([[0.0, 0.0, jnp.nan, 0.0]])
    traced, constants = trace_loss(L.absolute_error, np.zeros(4, np.float32), 1)
    objective = Objective(traced, constants, jnp.zeros(4), (), minimizer)
    weights = jnp.array([1.0, 3.0, 1.0, 0.0])
    delta, _ = jax.jit(partial(smoothing_scale, objective))(scores, weights)
    np.testing.assert_allclose(delta, [((1 + 3 * 2) / 4) ** 2], rtol=1e-6)  # float32


def test_no_row_asks_to_step_beyond_its_own_minimum():
    residual = np.geomspace(1e-3, 50, ROWS).astype(np.float32)
    for loss in (lambda s, t: (s - t) ** 4, L.cauchy):
        values = derive(loss, np.zeros(ROWS, np.float32), residual, ("auto",))
        gradient, curvature = values["auto"]
        # Up to the smoothing: |g| / curvature <= sqrt(t^2 + delta^2).
        delta = np.mean(np.sqrt(residual)) ** 2
        limit = np.sqrt(residual**2 + delta**2)
        assert (np.abs(gradient[0]) <= curvature[0] * limit * (1 + 1e-5)).all()


def scale(loss, factor):
    """The factor is an array: one program for all."""
    factor = jnp.float32(factor)
    return lambda score, target: factor * loss(score, target)


def test_curvature_scales_with_the_loss():
    residual = np.resize(np.float32([-3, -0.2, 0, 0.1, 0.7, 2, 5]), ROWS)
    targets = np.resize(np.float32([1, 2, 3, -4, 5, 0, 0.5]), ROWS)

    def scaled(factor):
        loss = scale(L.welsch, factor)
        return derive(loss, targets, targets + residual, ("auto", "secant"))

    plain = scaled(1.0)
    for factor in (1e6, 1e-6):
        values_of = scaled(factor)
        for policy in ("auto", "secant"):
            values = values_of[policy]
            for one, other in zip(values, plain[policy], strict=True):
                # float32 rounding; the floor of 1e-6 of the mean is below it
                size = np.abs(other).max()
                np.testing.assert_allclose(
                    one / factor, other, rtol=1e-4, atol=1e-5 * size
                )


def test_minimizers_of_many_rows_are_those_of_few():
    loss = L.poisson  # of targets 0 without any
    num_rows = 20_001  # three blocks, the last one not full
    target = np.random.default_rng(0).integers(0, 2, num_rows).astype(np.float32)
    traced, constants = trace_loss(loss, target, 1)
    found = search(traced, constants, jnp.asarray(target))
    few = minimizers(loss, np.float32([0, 1]))
    expected = few[target.astype(int)]
    np.testing.assert_array_equal(np.asarray(found)[0], expected)
