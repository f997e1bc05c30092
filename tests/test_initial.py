# SPDX-License-Identifier: Apache-2.0
"""Training starts at the argmin, from a point with gradients, or says what is wrong.

References are minima that SciPy finds in float64, in standard units.
"""

import warnings
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaln, xlogy
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import nbinom
from tables import ROWS

import jboost as jb
from jboost.objective.evaluation import Objective
from jboost.objective.tracing import trace_loss
from jboost.trees.joint_start import minimise_jointly

RNG = np.random.default_rng(21)
Z = RNG.normal(size=ROWS) + 0.3
WEIGHTS = RNG.uniform(0, 2, size=ROWS) * (RNG.uniform(size=ROWS) < 0.8)
X = np.zeros((ROWS, 1), np.float32)


class Family(NamedTuple):
    """Likelihoods of a location and the logarithm of a scale, as one formula."""

    square: float = 0.0
    absolute: float = 0.0
    logarithm: float = 0.0
    stopped: float = 0.0

    def loss(self, np, s, t):
        z = (t - s[0]) * np.exp(-s[1])
        rho = self.square * z**2 / 2 + self.absolute * np.abs(z)
        return s[1] + rho + self.logarithm * np.log1p(z**2 / 4)


@cache
def make_loss(family):
    """The loss for ``fit``: all share a program, the numbers being constants."""
    numbers = Family(*map(jnp.float32, family))

    def loss(s, t):
        factor = jax.lax.stop_gradient(jnp.exp(numbers.stopped * s[1]))
        return factor * numbers.loss(jnp, s, t)

    return loss


NORMAL, LAPLACE = Family(square=1.0), Family(absolute=1.0)
STUDENT = Family(logarithm=2.5)
BETA_NLL = Family(square=1.0, stopped=1.0)


def at_infinity(s, t):
    """Least where tanh is 1, and its gradient 0."""
    return t * jnp.tanh((s[0] - s[1]) / 2)


def pick(losses, number):
    """One of several losses that share a compiled program."""
    index = jnp.int32(number)
    return lambda s, t: jax.lax.switch(index, losses, s, t)


def fit(loss, targets, num_scores=2, **settings):
    settings = dict(num_rounds=0, num_scores=num_scores, max_depth=1) | settings
    settings = dict(sample_weight=np.ones(ROWS), offset=None) | settings
    if settings["offset"] is None:
        settings["offset"] = np.zeros((ROWS, num_scores))
    if num_scores == 1:
        settings["offset"] = settings["offset"][:, 0]
    return jb.fit(X, targets.astype(np.float32), loss, **settings)


def mean_loss(family, score, targets, weights=None, offset=0.0):
    scores = (np.asarray(score, np.float64) + offset * np.ones((ROWS, 1))).T
    return np.average(family.loss(np, scores, targets), weights=weights)


def least_loss(family, targets, weights=None, offset=0.0):
    def mean(score):
        return mean_loss(family, score, targets, weights, offset)

    if family is NORMAL:
        return mean([targets.mean(), np.log(targets.std())])
    if family is LAPLACE:
        middle = np.median(targets)
        return mean([middle, np.log(np.abs(targets - middle).mean())])
    options = dict(xatol=1e-9, fatol=1e-13)
    found = minimize(mean, [0.3, 0.0], method="Nelder-Mead", options=options)
    return min(found.fun, minimize(mean, found.x, method="Powell").fun)


@pytest.mark.parametrize(
    ("family", "unit", "shift"),
    [
        (NORMAL, 1e6, 0.0), (NORMAL, 1e-6, 1e3), (LAPLACE, 1e-6, 0.0),
        (LAPLACE, 1.0, 1e3), (LAPLACE, 80000.0, 2.25), (STUDENT, 1.0, 0.0),
        (STUDENT, 1e-6, 1e3),
    ],
)  # fmt: skip
def test_two_scores_start_at_the_argmin_in_any_unit(family, unit, shift):
    targets = (unit * (Z + shift)).astype(np.float32).astype(float)
    _, history = fit(make_loss(family), targets)
    reached = mean_loss(family, history.choices["init_score"], targets)
    # The loss is the one in standard units plus the logarithm of the unit.
    least = least_loss(family, targets / unit - shift) + np.log(unit)
    assert history.choices["init_score_rule"] == "argmin"
    # A location far from 0 is known to 2^-24 of itself.
    np.testing.assert_allclose(reached, least, rtol=0, atol=1e-5)


def test_weights_and_offsets_move_the_argmin():
    offset = np.stack([np.linspace(0, 2, ROWS), np.linspace(-1, 0, ROWS)], axis=1)
    offset = offset.astype(np.float32)
    _, history = fit(make_loss(STUDENT), Z, sample_weight=WEIGHTS, offset=offset)
    reached = mean_loss(STUDENT, history.choices["init_score"], Z, WEIGHTS, offset)
    least = least_loss(STUDENT, Z, WEIGHTS, offset)
    np.testing.assert_allclose(reached, least, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        (jb.losses.logistic, 1e-3), (jb.losses.logistic, 1e-20),
        (jb.losses.poisson, 1e-8),
    ],
)  # fmt: skip
def test_rare_events_start_at_the_argmin(loss, share):
    """However faint the slope of rare events is beside that of a score of 0."""
    y = (np.arange(ROWS) % 2).astype(np.float32)
    weights = np.where(y > 0, share, 1.0)
    model, _ = jb.fit(X, y, loss, sample_weight=weights, num_rounds=0)
    mean = share / (1 + share)
    expected = np.log(share if loss is jb.losses.logistic else mean)
    np.testing.assert_allclose(model.init_score, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "target", "start", "weight"),
    [
        ("logistic", 0.0, -np.log(2 * ROWS), 1.0),
        ("logistic", 1.0, np.log(2 * ROWS), 0.01),
        ("poisson", 0.0, -np.log(2 * ROWS), 3.0),
        ("exponential", -1.0, -np.log(2 * ROWS), 3.0),
        ("tweedie", 0.0, -2 * np.log(2 * ROWS), 3.0),
    ],
)
def test_without_events_training_starts_at_half_an_event(loss, target, start, weight):
    """N g(c) = g(-c) / 2, with N rows; a row of weight 3 is three rows."""
    model, history = jb.fit(
        X, np.full(ROWS, target), getattr(jb.losses, loss), num_rounds=0,
        sample_weight=np.full(ROWS, weight),
    )  # fmt: skip
    more = np.sign(start) * np.log(max(weight, 1)) * (2 if loss == "tweedie" else 1)
    np.testing.assert_allclose(model.init_score, start + more, rtol=1e-3)
    assert history.choices["init_score_rule"] == "half event"


def test_each_score_without_events_starts_near_its_limit():
    columns = np.stack([Z > 0, np.zeros(ROWS)], axis=1).astype(np.float32)
    model, _ = jb.fit(X, columns, jb.losses.logistic, num_rounds=0)
    share = columns[:, 0].mean()
    expected = [np.log(share / (1 - share)), -np.log(2 * ROWS)]
    np.testing.assert_allclose(model.init_score, expected, rtol=1e-3)
    for classes in (Z > 0, np.zeros(ROWS)):
        model, history = jb.fit(
            X, classes.astype(int), jb.losses.softmax, num_scores=3, num_rounds=0
        )
        share = jax.nn.softmax(model.init_score)[2]
        assert 0.05 / ROWS < share < 1 / ROWS
        assert history.choices["init_score_rule"] == "half event"


def test_stopped_gradients_start_where_gradients_balance():
    """The minimum of the values would be elsewhere."""
    targets = 29.6 + 7 * Z
    _, history = fit(make_loss(BETA_NLL), targets)
    expected = [targets.mean(), np.log(targets.std())]
    np.testing.assert_allclose(history.choices["init_score"], expected, rtol=1e-4)


def test_an_argmin_at_infinity_falls_back():
    _, history = fit(at_infinity, Z)
    assert history.choices["init_score"] == [0.0, 0.0]
    assert history.choices["init_score_rule"] == "fallback"


def test_vmap_starts_where_single_calls_start():
    scales = np.array([1e-6, 1.0, 1e6], np.float32)
    nowhere, offset = jnp.full((2, ROWS), jnp.inf), jnp.zeros((2, ROWS))

    def laplace(s, t):
        return s[1] + jnp.abs(t - s[0]) * jnp.exp(-s[1])

    def start(scale):
        targets = scale * Z.astype(np.float32)
        traced, constants = trace_loss(laplace, targets, 2)
        objective = Objective(traced, constants, targets, (), nowhere)
        return minimise_jointly(objective, offset, jnp.ones(ROWS))

    starts = jax.jit(jax.vmap(start))(scales)
    for scale, found in zip(scales, starts, strict=True):
        targets = (scale * Z.astype(np.float32)).astype(float)
        expected = least_loss(LAPLACE, targets / scale) + np.log(scale)
        reached = mean_loss(LAPLACE, found, targets)
        np.testing.assert_allclose(reached, expected, atol=1e-5)


# Losses of one score that share a compiled program.
def asymmetric_tukey(s, t):
    """Flat from 1 above and from 0.3 below: least far below, where all is flat."""
    width = jnp.where(s > t, 1.0, 0.3)
    share = jnp.clip((s - t) / width, -1.0, 1.0)
    return width**2 * (1 - (1 - share**2) ** 3)


def poisoned(s, t):
    """The branch that is never taken has no derivative."""
    return (s - t) ** 2 + jnp.where(t > 1e9, jnp.sqrt(s - s), 0.0)


def huber(s, t):
    return jb.losses.huber(s, t)


def insensitive(s, t):
    return jnp.maximum(0.0, jnp.abs(s - t) - 9.0) ** 2


ONE = [asymmetric_tukey, poisoned, huber, insensitive]


def test_a_flat_argmin_falls_back_to_rows_with_gradients():
    targets = np.where(Z.min() == Z, -200.0, 30 * Z)  # the least is alone
    model, history = fit(pick(ONE, 0), targets, 1, num_rounds=1)
    assert history.choices["init_score_rule"] == "fallback"
    assert abs(history.choices["init_score"] - np.median(targets)) < 30
    assert np.any(model.leaf_value)


def test_gradients_that_are_not_numbers_stop_training():
    with pytest.raises(ValueError, match=r"gradient .* NaN in row 0 .* jnp\.where"):
        fit(pick(ONE, 1), Z, 1, num_rounds=1)


def test_rows_that_are_at_their_minimum_are_no_error():
    for loss, targets in ((huber, np.full(ROWS, 3.0)), (insensitive, Z)):
        _, history = fit(pick(ONE, ONE.index(loss)), targets, 1, num_rounds=1)
        np.testing.assert_array_equal(history.train_loss, [0.0])
        assert history.choices["init_score_rule"] == "argmin"
    constant = np.full(ROWS, 3.0)
    model, _ = jb.fit(X, constant, num_rounds=1, max_depth=1)
    np.testing.assert_array_equal(jb.predict(model, X), constant)


@pytest.mark.parametrize("num_scores", [1, 2])
def test_saturated_rows_are_no_error(num_scores):
    """Losses without a minimum reach 0 in float32, and so do their derivatives."""
    labels = (Z > 0).astype(np.float32)
    offset = np.where(labels > 0, 150.0, -150.0).astype(np.float32)
    loss = jb.losses.logistic
    if num_scores == 2:
        loss = jb.losses.softmax
        labels, offset = labels.astype(np.int32), np.stack([-offset, offset], 1)
    _, history = jb.fit(
        X, labels, loss, offset=offset, num_scores=num_scores, init_score=0.0,
        num_rounds=1, max_depth=1,
    )  # fmt: skip
    np.testing.assert_array_equal(history.train_loss, [0.0])


def test_a_start_without_gradients_stops_training():
    pattern = rf"0 .* NaN .* {ROWS} .* zero"
    with pytest.raises(jb.TrainingError, match=pattern) as error:
        fit(pick(ONE, 0), Z, 1, num_rounds=1, init_score=1e4)
    assert "jnp.where" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda s, t: t**2, "zero at every score"),
        (lambda s, t: jnp.float32(1), "zero at every score"),
        (lambda s, t: (jnp.round(s) - t) ** 2, "rounds"),
        (lambda s, t: jax.nn.softplus(t) - s * t, "swapped"),
        # Beyond the domain of their targets these are NaN.
        (lambda s, t: jb.losses.logistic(t, s), "swapped"),
        (lambda s, t: -((s - t) ** 2), "sign"),
    ],
)
def test_losses_without_a_minimum_are_refused(loss, problem):
    with pytest.raises(ValueError, match=problem):
        jb.fit(X, Z, loss)


def test_a_loss_that_falls_for_ever_is_named():
    """The cubic has an inflection for a start and no minimum."""
    with pytest.warns(UserWarning, match="round 399 learned nothing.*unbounded"):
        _, history = jb.fit(
            X, Z, lambda s, t: (s - t) ** 3 * 1e30, num_rounds=400, max_depth=1
        )
    assert -np.inf < history.train_loss[-1] < 0
    with pytest.raises(jb.TrainingError) as error:
        jb.fit(X, Z, num_rounds=9, max_depth=1, learning_rate=1e30, init_score=1.0)
    assert "unbounded" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "unused"),
    [
        (lambda s, t: (s[0] - t) ** 2, [1, 2]),
        (lambda s, t: (s[-1] - t) ** 2 + s[1] * s[0] * 0.0, [0, 1]),
        (jax.jit(lambda s, t: jnp.sum((s[::2] - t) ** 2)), [1]),
        (lambda s, t: jnp.sum((s[jnp.array([0, 2])] - t) ** 2 + s[1]), []),
        (lambda s, t: -jax.nn.log_softmax(s)[0] * t, []),
        (lambda s, t: s[t.astype(int)] ** 2, []),
    ],
)
def test_scores_without_a_gradient_are_named(loss, unused):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced, constants = trace_loss(loss, Z, 3)
    named = [k for k in range(3) for w in caught if f"score[{k}]" in str(w.message)]
    assert named == unused
    # The reference: gradients of random scores.
    points = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    targets = np.arange(20, dtype=np.float32) % 3
    gradient = jax.jit(jax.vmap(traced.gradient, (None, 0, 0, None)))
    slopes = gradient(constants, points, targets, ())
    assert np.flatnonzero(~np.any(slopes != 0, axis=0)).tolist() == unused


class Plain:
    """A distribution as most people write it, with no care for float32."""

    def __init__(self, log_prob):
        self.log_prob = log_prob


def zero_inflated(score):
    """Negative binomial, with more zeros."""
    mean, shape = jnp.exp(score[0]), jnp.exp(score[1])
    gate = jax.nn.sigmoid(score[2])

    def log_prob(y):
        ways = gammaln(y + shape) - gammaln(shape) - gammaln(y + 1)
        ways += shape * jnp.log(shape / (shape + mean))
        inside = (1 - gate) * jnp.exp(ways + xlogy(y, mean / (shape + mean)))
        return jnp.log(jnp.where(y == 0, gate, 0.0) + inside)

    return Plain(log_prob)


def classes(score):
    return Plain(lambda y: jax.nn.log_softmax(score)[y.astype(jnp.int32)])


RARE = np.random.default_rng(0).poisson(2.0, ROWS) * (np.arange(ROWS) % 8 == 0) * 1.0
INFLATED, CLASSES = map(jb.losses.likelihood, (zero_inflated, classes))
# The least loss of some in float64.
EDGES = {
    "rare counts": (INFLATED, RARE, None),  # with no dispersion beyond Poisson's
    "only zeros": (INFLATED, np.zeros(ROWS), 0.0),
    "one class": (CLASSES, np.ones(ROWS), 0.0),
}


def least_of_counts(y):
    """Minimizes the loss of inflated counts by SciPy, in float64."""

    def loss(point):
        shape, gate = np.exp(point[1]), expit(point[2])
        inside = nbinom(shape, shape / (shape + np.exp(point[0]))).pmf(y)
        return -np.log((y == 0) * gate + (1 - gate) * inside).mean()

    bounds, starts = [(-5, 5), (-5, 25), (-20, 20)], ([0, 0, 0], [1, 12, 2])
    return min(minimize(loss, start, bounds=bounds).fun for start in starts)


@partial(jax.jit, static_argnums=0)
def evaluate(loss, start, y):
    return jax.vmap(jax.value_and_grad(loss), (None, 0))(start, y)


@pytest.mark.parametrize("case", EDGES)
def test_a_start_at_the_edge_of_a_family_keeps_its_digits(case):
    loss, y, least = EDGES[case]
    least = least_of_counts(y) if least is None else least
    x = (np.arange(ROWS) % 8.0)[:, None]
    _, history = jb.fit(x, y, loss, num_scores=3, num_rounds=5, max_depth=2)
    start = np.float32(history.choices["init_score"])
    values, slopes = evaluate(loss, start, np.float32(y))
    assert np.isfinite(values).all() and np.isfinite(slopes).all()
    first, last = values.mean(), history.train_loss[-1]
    # Differences of lgamma lose digits first; the search may end where they err by 1 %.
    assert least * 0.99 - 1e-6 <= first <= least * 1.01 + 0.01
    assert np.isfinite(last) and last <= first + 1e-6
