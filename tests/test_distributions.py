# SPDX-License-Identifier: Apache-2.0
"""Built-in distributions equal SciPy's; their information equals quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as ss
import scipy.stats as st

import jboost as jb
from jboost.losses.likelihoods import find_information

D = jb.distributions
Q = np.linspace(0.02, 0.98, 13)


def inverse_logit(s):
    return 1 / (1 + np.exp(-s))


class Inflated:
    """Zero-inflated Poisson in float64; SciPy has none."""

    def __init__(self, rate, gate):
        self.inner, self.gate = st.poisson(rate), gate
        self.rate = rate

    def pmf(self, y):
        return (1 - self.gate) * self.inner.pmf(y) + self.gate * (np.asarray(y) == 0)

    def logpmf(self, y):
        return np.log(self.pmf(y))

    def cdf(self, y):
        return self.gate + (1 - self.gate) * self.inner.cdf(y)

    def ppf(self, q):
        counts = np.arange(200)
        return np.array([counts[self.cdf(counts) >= each][0] for each in q])

    def mean(self):
        return (1 - self.gate) * self.rate

    def var(self):
        return self.mean() * (1 + self.gate * self.rate)


class Mixed:
    """A mixture of two normal distributions in float64."""

    def __init__(self, s):
        scales = np.exp(s[2:4])
        first, second = s[:2] + np.array([-1, 1]) * scales
        self.parts = (st.norm(first, scales[0]), st.norm(second, scales[1]))
        self.weights = ss.softmax([s[4], 0])

    def _sum(self, name, *values):
        parts = zip(self.weights, self.parts, strict=True)
        return sum(w * getattr(part, name)(*values) for w, part in parts)

    def logpdf(self, y):
        return np.log(self._sum("pdf", y))

    def cdf(self, y):
        return self._sum("cdf", y)

    def mean(self):
        return self._sum("mean")

    def var(self):
        return self._sum("moment", 2) - self.mean() ** 2

    def ppf(self, q):
        grid = np.linspace(-40, 40, 400_001)
        return np.interp(q, self.cdf(grid), grid)


# The distribution in float64, and scores.
FAMILIES = {
    "normal": (lambda s: st.norm(s[0], np.exp(s[1])), (3.0, 0.4)),
    "laplace": (lambda s: st.laplace(s[0], np.exp(s[1])), (-2.0, 0.7)),
    "student_t": (lambda s: st.t(1 + np.exp(s[2]), s[0], np.exp(s[1])), (1, -0.5, 1)),
    "log_normal": (lambda s: st.lognorm(np.exp(s[1]), scale=np.exp(s[0])), (1, -0.5)),
    "gamma": (lambda s: st.gamma(np.exp(s[1]), scale=np.exp(s[0] - s[1])), (1, 0.3)),
    "weibull": (lambda s: st.weibull_min(np.exp(s[1]), scale=np.exp(s[0])), (2, 0.4)),
    "beta": (
        lambda s: st.beta(
            *np.exp(s[1]) * np.array([inverse_logit(s[0]), inverse_logit(-s[0])])
        ),
        (0.5, 1.8),
    ),
    "negative_binomial": (
        lambda s: st.nbinom(np.exp(s[1]), 1 / (1 + np.exp(s[0] - s[1]))), (1.5, 0.6),
    ),
    "zero_inflated_poisson": (
        lambda s: Inflated(np.exp(s[0]), inverse_logit(s[1])), (1.1, -0.5),
    ),
    "normal_mixture": (Mixed, (-1, 1.5, 0.2, -0.3, 0.4)),
}  # fmt: skip
COUNTS = ("negative_binomial", "zero_inflated_poisson")


def log_density(reference, y):
    return reference.logpmf(y) if hasattr(reference, "logpmf") else reference.logpdf(y)


def make(name, scores=None):
    score = jnp.asarray(FAMILIES[name][1] if scores is None else scores, jnp.float32)
    return getattr(D, name)(score)


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_scipy(name):
    in_float64, scores = FAMILIES[name]
    reference, found = in_float64(np.asarray(scores, float)), make(name)
    y = reference.ppf(Q)
    log_prob = jax.vmap(found.log_prob)(jnp.asarray(y, jnp.float32))
    np.testing.assert_allclose(log_prob, log_density(reference, y), atol=2e-5)
    below = jax.vmap(found.cdf)(jnp.asarray(y, jnp.float32))
    np.testing.assert_allclose(below, reference.cdf(y), atol=1e-5)
    quantiles = jax.vmap(found.icdf)(jnp.asarray(Q, jnp.float32))
    np.testing.assert_allclose(quantiles, y, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found.mean, reference.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.variance, reference.var(), rtol=1e-4)


def find_reference_information(name, scores):
    """E g g' with derivatives by differences of SciPy's densities, in float64."""
    in_float64, scores = FAMILIES[name][0], np.asarray(scores, float)
    reference = in_float64(scores)
    if name in COUNTS:
        y = np.arange(400)
        y = y[reference.pmf(y) > 1e-30]
        weight = reference.pmf(y)
    else:
        # Quantiles on a grid that is dense near 0 and 1.
        t = np.linspace(-12, 12, 20_001)
        share = st.norm.cdf(t)
        inside = (share > 1e-15) & (share < 1 - 1e-14)
        y, weight = reference.ppf(share[inside]), st.norm.pdf(t[inside]) * (t[1] - t[0])
    slopes = []
    for k in range(len(scores)):
        move = 1e-4 * np.eye(len(scores))[k]
        up, down = (in_float64(scores + sign * move) for sign in (1, -1))
        slopes.append((log_density(up, y) - log_density(down, y)) / 2e-4)
    slopes = np.asarray(slopes)
    return (slopes * weight) @ slopes.T


MORE = {
    "normal": (-700, 3), "laplace": (5, -3), "student_t": (0, 2, 4), "beta": (-1, 4),
    "log_normal": (3, 0.5), "gamma": (-3, 3), "weibull": (-5, 1.5),
    "negative_binomial": (3, -1), "zero_inflated_poisson": (-1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_information_equals_quadrature(name):
    loss = jb.losses.likelihood(getattr(D, name))
    for scores in (FAMILIES[name][1], MORE[name]):
        information = find_information(loss, len(scores))
        assert not information.sampled
        found = information.evaluate(
            jnp.asarray(scores, jnp.float32), jnp.zeros(2, jnp.uint32)
        )
        expected = find_reference_information(name, scores)
        size = np.sqrt(np.diag(expected))
        error = np.abs(found - expected) / np.outer(size, size)
        assert error.max() < 0.02
        np.testing.assert_array_less(0, np.linalg.eigvalsh(np.asarray(found)))


def test_information_from_samples_equals_quadrature():
    scores = FAMILIES["normal_mixture"][1]
    information = find_information(jb.losses.likelihood(D.normal_mixture), 5)
    assert information.sampled
    words = jnp.arange(40_000, dtype=jnp.uint32).reshape(-1, 2)
    score = jnp.asarray(scores, jnp.float32)
    draw = jax.jit(jax.vmap(lambda words: information.evaluate(score, words)))
    found = draw(words).mean(axis=0)
    expected = find_reference_information("normal_mixture", scores)
    size = np.sqrt(np.diag(expected))
    assert (np.abs(found - expected) / np.outer(size, size)).max() < 0.02


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_distribution(name):
    in_float64, scores = FAMILIES[name]
    reference, found = in_float64(np.asarray(scores, float)), make(name)
    drawn = np.asarray(found.sample(jax.random.key(1), (20_000,)))
    y = reference.ppf(np.array([0.1, 0.5, 0.9]))
    shares = (drawn[:, None] <= y + 1e-6 * np.abs(y)).mean(axis=0)
    # Five standard errors.
    np.testing.assert_allclose(shares, reference.cdf(y), atol=5 * 0.5 / 20_000**0.5)


@pytest.mark.parametrize("name", FAMILIES)
def test_of_many_rows(name):
    """A batch is a pytree whose parts are those of single rows."""
    scores = np.asarray(FAMILIES[name][1], np.float32)
    batch = jax.vmap(getattr(D, name))(jnp.stack([scores, scores + np.float32(0.1)]))
    one = make(name, scores + np.float32(0.1))
    assert batch.shape == (2,)
    y = jnp.ones(2, jnp.float32) * (1 if name != "beta" else 0.5)
    for found, expected in (
        (batch.log_prob(y), one.log_prob(y[1])), (batch.cdf(y), one.cdf(y[1])),
        (batch.icdf(0.3), one.icdf(0.3)), (batch.mean, one.mean),
        (batch.variance, one.variance),
    ):  # fmt: skip
        assert found.shape == (2,)
        np.testing.assert_allclose(found[1], expected, rtol=1e-5)
    assert batch.sample(jax.random.key(0), (3,)).shape == (3, 2)
    if name != "normal_mixture":
        matrix = batch.fisher_information()
        np.testing.assert_allclose(matrix[..., 1], one.fisher_information(), rtol=1e-5)


@pytest.mark.parametrize(("name", "y"), [
    ("log_normal", -1), ("gamma", 0), ("weibull", -2), ("beta", 1), ("beta", -0.5),
    ("negative_binomial", 0.5), ("zero_inflated_poisson", -1),
])  # fmt: skip
def test_values_outside_the_support(name, y):
    assert make(name).log_prob(y) == -np.inf
    slope = jax.grad(lambda s: make(name, s).log_prob(jnp.float32(y)))
    scores = jnp.asarray(FAMILIES[name][1], jnp.float32)
    assert np.isfinite(slope(scores)).all()


@pytest.mark.parametrize(("name", "scores", "y"), [
    ("student_t", (0.0, 0.0, 15.0), 1.5), ("gamma", (2.0, 12.0), 7.4),
    ("beta", (0.3, 12.0), 0.574), ("negative_binomial", (2.0, 14.0), 9.0),
    ("zero_inflated_poisson", (9.0, -3.0), 8100.0),
])  # fmt: skip
def test_no_digits_are_lost_near_a_limit(name, scores, y):
    """Many degrees of freedom, large concentrations, large counts."""
    scores32 = jnp.asarray(scores, jnp.float32)
    reference = FAMILIES[name][0](np.asarray(scores32, float))
    expected = log_density(reference, np.float64(np.float32(y)))
    found = getattr(D, name)(scores32).log_prob(jnp.float32(y))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_a_mixture_has_three_scores_for_each_component():
    with pytest.raises(ValueError, match=r"num_scores .*3 M - 1.* got 4"):
        D.normal_mixture(jnp.zeros(4))
    one = D.normal_mixture(jnp.array([2.0, 0.0]))
    np.testing.assert_allclose(one.log_prob(2.5), st.norm(2).logpdf(2.5), rtol=1e-6)
