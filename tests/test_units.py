# SPDX-License-Identifier: Apache-2.0
"""Units do not matter: of scores, of the loss, and of the targets.

A model of K scores in other units is the same model: with scores a_k s_k + b_k, a loss
written for them and multiplied by c, it has the same trees with leaf values in the new
units. Powers of two change no bit; other numbers change what float32 rounds.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tables import ROWS, SMALL, make_columns

import jboost as jb

L = jb.losses
RNG = np.random.default_rng(0)
X = make_columns()
Z = (X[:, 0] + np.sin(2 * X[:, 1])).astype(np.float32)
NOISE = RNG.normal(size=ROWS).astype(np.float32) * np.exp(X[:, 2] / 2)
FEW = settings(
    max_examples=3, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate],
)  # fmt: skip


def gaussian(s, y):
    return s[1] + jnp.exp(-2 * s[1]) * (y - s[0]) ** 2 / 2


def student(s, y):
    """Student's t: center, logarithms of the scale and of the degrees of freedom."""
    half = jnp.exp(s[2]) / 2
    normal = jax.lax.lgamma(half) - jax.lax.lgamma(half + 0.5) + s[2] / 2 + s[1]
    ratio = (y - s[0]) ** 2 * jnp.exp(-2 * s[1] - s[2])
    return normal + (half + 0.5) * jnp.log1p(ratio)


def coupled(s, y):
    """Squared error of a product and of a sum, which shares no unit with it."""
    return (s[0] * s[1] - y) ** 2 + (s[0] + 3 * s[1] - y) ** 2 / 8


# A loss, its targets, K, and where training starts if no argmin is searched.
LOSSES = {
    "squared": (L.squared_error, Z + NOISE, 1, 0.5),
    "logistic": (L.logistic, (Z + NOISE > 0).astype(np.float32), 1, 0.5),
    "gaussian": (gaussian, Z + NOISE, 2, (0.5, 0.25)),
    "coupled": (coupled, Z + NOISE + 3, 2, (1.5, 1.25)),
    "softmax": (L.softmax, np.digitize(Z, [-1, 1]).astype(np.int32), 3, (0.5, 0.25, 0)),
}


def train(loss, y, num_scores, **others):
    settings = SMALL | dict(num_scores=num_scores) | others
    model, history = jb.fit(X, y, loss, **settings)
    return model, np.asarray(jb.predict(model, X)), np.asarray(history.train_loss)


def in_units(loss, units, shifts, factor):
    """The loss of scores s = unit s' + shift, times a factor."""
    units, shifts, factor = map(jnp.float32, (units, shifts, factor))

    def scaled(score, target):
        return factor * loss(units * score + shifts, target)

    return scaled


def first(numbers, num_scores):
    numbers = np.float32(numbers[:num_scores])
    return numbers[0] if num_scores == 1 else numbers


@cache
def train_in_own_units(name):
    loss, y, num_scores, start = LOSSES[name]
    zero = np.zeros_like(first([0.0] * 3, num_scores))
    return train(in_units(loss, zero + 1, zero, 1.0), y, num_scores, init_score=start)


powers = st.lists(st.integers(-9, 9).map(lambda n: 2.0**n), min_size=3, max_size=3)


@pytest.mark.parametrize("name", LOSSES)
@given(units=powers, power=st.integers(-9, 9))
@example(units=[1.0, 1.0, 1.0], power=1)  # its square root is no power of two
@FEW
def test_units_that_are_powers_of_two_change_no_bit(name, units, power):
    loss, y, num_scores, start = LOSSES[name]
    units = first(units, num_scores)
    zero = np.zeros_like(units)
    own, _, losses = train(
        in_units(loss, zero + 1, zero, 1.0), y, num_scores, init_score=start
    )
    scaled = in_units(loss, units, zero, 2.0**power)
    other, _, others = train(scaled, y, num_scores, init_score=start / units)
    np.testing.assert_array_equal(own.feature, other.feature)
    np.testing.assert_array_equal(own.threshold, other.threshold)
    values = np.asarray(other.leaf_value) * units.reshape(-1, 1)
    np.testing.assert_array_equal(own.leaf_value, values)
    np.testing.assert_array_equal(losses * 2.0**power, others)


numbers = st.lists(st.floats(-3, 3).map(lambda n: 10.0**n), min_size=3, max_size=3)
moves = st.lists(st.floats(-2, 2), min_size=3, max_size=3)


@pytest.mark.parametrize("name", LOSSES)
@given(units=numbers, shifts=moves, factor=st.floats(-3, 3).map(lambda n: 10.0**n))
@FEW
def test_other_units_change_what_float32_rounds(name, units, shifts, factor):
    loss, y, num_scores, start = LOSSES[name]
    units, shifts = first(units, num_scores), first(shifts, num_scores)
    _, own, losses = train_in_own_units(name)
    scaled = in_units(loss, units, shifts, factor)
    begin = (start - shifts) / units
    _, other, others = train(scaled, y, num_scores, init_score=begin)
    np.testing.assert_allclose(others / factor, losses, rtol=1e-5)
    found = other * units + shifts
    np.testing.assert_allclose(found, own, rtol=0, atol=1e-3 * np.std(own))


# Losses of residuals, and units of targets in which float32 holds what they need.
RESIDUALS = {
    "squared_error": (L.squared_error, (-100, -64, 50)),
    "expectile": (L.expectile, (-50, 50)),
    "absolute_error": (L.absolute_error, (-100, -64, 64, 100)),
    "quantile": (partial(L.quantile, tau=0.3), (-100, 100)),
}
GROWTHS = {
    "plain": {},
    "in XLA": dict(implementation="xla", linear_leaves=False),
    "sorted": dict(candidates="exact"),
    "monotone": dict(monotone=(1, 0, 0)),
}


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        *(("squared_error", growth) for growth in GROWTHS), ("expectile", "plain"),
        ("absolute_error", "monotone"), ("quantile", "plain"),
    ],
)  # fmt: skip
def test_targets_may_be_multiplied_by_any_power_of_two(name, growth):
    loss, powers = RESIDUALS[name]
    start = dict(init_score=0.0) if name == "expectile" else {}  # bisection rounds it
    own, _, losses = train(loss, Z + NOISE, 1, **GROWTHS[growth], **start)
    assert losses[-1] < 0.9 * losses[0]
    for power in powers:
        unit = np.float32(2.0**power)
        other, *_ = train(loss, (Z + NOISE) * unit, 1, **GROWTHS[growth], **start)
        np.testing.assert_array_equal(own.feature, other.feature)
        np.testing.assert_array_equal(own.threshold, other.threshold)
        # Sums lose what is below 2^-124, and their gradients or curvatures are 2^-100.
        slack = 1e-5 if abs(power) == 100 else 0
        values = other.leaf_value / unit
        np.testing.assert_allclose(own.leaf_value, values, rtol=0, atol=slack)


@pytest.mark.parametrize("loss", [L.poisson, L.gamma, L.tweedie])
def test_units_of_positive_targets_shift_the_scores(loss):
    y = np.exp((Z + NOISE) / 2)
    _, own, losses = train(loss, y, 1)
    assert losses[-1] < losses[0]
    for unit in (1e-30, 1e30):
        _, other, _ = train(loss, y * unit, 1)
        assert np.corrcoef(other, own)[0, 1] > 0.99


@pytest.mark.usefixtures("full_search")
def test_weights_may_be_multiplied_by_any_power_of_two():
    """Where l2 is a weight of rows, of which those below 1 are the unit."""

    def run(weight):
        return train(
            L.huber, Z + NOISE, 1, sample_weight=np.full(ROWS, weight),
            l2=max(weight, 1), min_child_weight=max(weight, 1),
        )[1]  # fmt: skip

    own = run(np.float32(1))
    for power in (-100, -60, 60, 90):
        other = run(np.float32(2.0**power))
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "share"),
    [(L.squared_error, 1 / ROWS), (L.absolute_error, 0.01), (L.huber, 0.7)],
)
def test_weights_below_one_are_counted_in_their_mean(loss, share):
    """Also by limits that are no defaults; weights may differ from row to row."""
    weights = RNG.uniform(0.5, 1.5, size=ROWS)
    weights *= share / weights.mean()
    settings = dict(l2=2.0, min_child_weight=4.0, min_gain=0.01, l1=0.1)
    if loss is L.absolute_error:
        settings = {}  # l1 does not apply to medians
    own, other = (
        train(loss, Z + NOISE, 1, sample_weight=w, **settings)[1]
        for w in (weights, weights / weights.mean())
    )
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_targets_of_several_scores_may_be_shifted():
    def pinball(scores, target):
        tau = jnp.array([0.1, 0.9])
        error = target - scores
        return jnp.sum(jnp.maximum(tau * error, (tau - 1) * error))

    model, own, _ = train(pinball, Z + NOISE, 2)
    ordered = np.sort(Z + NOISE)  # all minima of a tenth: from the 20th to the 21st
    assert (ordered[[19, 179]] - 1e-3 <= model.init_score).all()
    assert (model.init_score <= ordered[[20, 180]] + 1e-3).all()
    shift = np.float32(100)
    other = train(pinball, Z + NOISE + shift, 2)[1]
    np.testing.assert_allclose(other - shift, own, atol=1e-3 * np.std(own))


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("loss", [L.absolute_error, L.huber, L.log_cosh])
def test_one_outlier_does_not_keep_robust_losses_from_learning(loss):
    y, others = Z + NOISE, np.arange(ROWS) != 7

    def error_of(targets):
        found = train(loss, targets, 1, num_rounds=30, learning_rate=0.3)[1]
        return np.abs(found - y)[others].mean()

    own = error_of(y)
    assert own < 0.5 * np.abs(y).mean()
    for outlier in np.float32([1e9, 1e20, -1e30]):
        assert error_of(np.where(others, y, outlier)) < 1.2 * own


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("loss", [L.huber, L.log_cosh, L.pseudo_huber])
def test_losses_with_a_unit_of_their_own_learn_far_from_it(loss):
    """Small residuals are squared, large ones are absolute."""
    y, settings = Z + NOISE, dict(num_rounds=30, learning_rate=0.3)
    expected = [
        train(plain, y, 1, **settings)[1]
        for plain in (L.squared_error, L.absolute_error)
    ]
    for unit in np.float32([1e-30, 1e-10, 1e10, 1e18]):
        _, found, _ = train(loss, y * unit, 1, **settings)
        assert np.corrcoef(found, expected[int(unit > 1)])[0, 1] > 0.95


def test_targets_of_student_may_have_any_unit():
    """The first rounds; after many, what float32 rounds makes other splits."""
    unit = np.float32(1e4)
    own, other = (
        train(student, (Z + NOISE) * by, 3, init_score=(0, np.log(by), 1), num_rounds=3)
        for by in (np.float32(1), unit)
    )
    np.testing.assert_array_equal(own[0].threshold, other[0].threshold)
    assert own[2][-1] < own[2][0]
    np.testing.assert_allclose(other[2] - np.log(unit), own[2], atol=2e-5)
