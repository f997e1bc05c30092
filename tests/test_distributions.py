# SPDX-License-Identifier: Apache-2.0
"""Built-in distributions equal SciPy's; their information equals quadrature."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as ss
import scipy.stats as st

import jboost as jb
from jboost.losses.likelihoods import find_information
from jboost.losses.names import LOSSES

D = jb.distributions
Q = np.linspace(0.02, 0.98, 13)


def inverse_logit(s):
    return 1 / (1 + np.exp(-s))


class Inflated:
    """Zero-inflated Poisson in float64; SciPy has none."""

    def __init__(self, rate, gate, logit=None):
        self.inner, self.gate, self.rate = st.poisson(rate), gate, rate
        self.rest = 1 - gate if logit is None else ss.expit(-logit)

    def logpmf(self, y):
        zero = np.log1p(self.rest * np.expm1(-self.rate))
        return np.where(y == 0, zero, np.log(self.rest) + self.inner.logpmf(y))

    def pmf(self, y):
        return np.exp(self.logpmf(np.asarray(y)))

    def cdf(self, y):
        return self.gate + self.rest * self.inner.cdf(y)

    def ppf(self, q):
        inner = self.inner.ppf(np.clip((q - self.gate) / self.rest, 0, 1))
        return np.where(q <= self.gate, 0, inner)

    def mean(self):
        return self.rest * self.rate

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
        low, high = np.full(np.shape(q), -2000.0), np.full(np.shape(q), 2000.0)
        for _ in range(100):
            middle = (low + high) / 2
            enough = self.cdf(middle) >= q
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return high


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


BATCH = 6  # of one shape: each family is compiled once


@cache
def compile_family(name):
    """Returns a function of scores [6, S], values [6, 13] and shares [13]."""

    @jax.jit
    def evaluate(scores, y, shares):
        batch = jax.vmap(getattr(D, name))(scores)
        log_prob, below = (jax.vmap(f, 1, 1)(y) for f in (batch.log_prob, batch.cdf))
        quantiles = jax.vmap(batch.icdf, out_axes=1)(shares)
        return batch, log_prob, below, quantiles, batch.mean, batch.variance

    return evaluate


def evaluate_family(name, scores, y, shares):
    """The functions of few rows, [N, ...]: their rows are repeated up to six."""
    scores = np.resize(np.float32(scores), (BATCH, len(scores[0])))
    y = np.resize(np.float32(y), (BATCH, len(Q)))
    found = compile_family(name)(scores, y, np.float32(shares))
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_scipy(name):
    """A batch is a pytree whose parts are those of single rows."""
    in_float64, scores = FAMILIES[name]
    both = np.float32([scores, np.add(scores, 0.1)])
    references = [in_float64(np.asarray(row, float)) for row in both]
    y = np.stack([reference.ppf(Q) for reference in references])
    batch, *found = evaluate_family(name, both, y, Q)
    assert batch.shape == (BATCH,)
    drawn = jax.eval_shape(lambda: batch.sample(jax.random.key(0), (3,)))
    assert drawn.shape == (3, BATCH)
    found = zip(*(each[:2] for each in found), y, references, strict=True)
    for log_prob, below, quantiles, mean, variance, at, reference in found:
        np.testing.assert_allclose(log_prob, log_density(reference, at), atol=2e-5)
        np.testing.assert_allclose(below, reference.cdf(at), atol=1e-5)
        np.testing.assert_allclose(quantiles, at, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(mean, reference.mean(), rtol=1e-5)
        np.testing.assert_allclose(variance, reference.var(), rtol=1e-4)


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


@cache
def compile_information(name):
    """Returns a function of scores [N, S]: information by scores, and by parameters."""
    family = getattr(D, name)
    own = find_information(jb.losses.likelihood(family), len(FAMILIES[name][1]))
    assert not own.sampled

    @jax.jit
    def evaluate(scores):
        found = jax.vmap(lambda s: own.evaluate(s, jnp.zeros(2, jnp.uint32)))(scores)
        return found, jax.vmap(family)(scores[:2]).fisher_information()

    return evaluate


def evaluate_information(name, scores):
    """In float64; of any number of rows: they are repeated to one shape."""
    size = np.shape(scores)[1]
    rows = np.resize(np.float32(scores), (2 + 5**size, size))
    found, batch = compile_information(name)(rows)
    return np.asarray(found, float)[: len(scores)], batch


MORE = {
    "normal": (-700, 3), "laplace": (5, -3), "student_t": (0, 2, 4), "beta": (-1, 4),
    "log_normal": (3, 0.5), "gamma": (-3, 3), "weibull": (-5, 1.5),
    "negative_binomial": (3, -1), "zero_inflated_poisson": (-1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_information_equals_quadrature(name):
    """And far away it is finite, and positive definite where float32 can tell."""
    size = len(MORE[name])
    grid = np.stack(np.meshgrid(*[[-20, -9, 0, 9, 20]] * size), -1).reshape(-1, size)
    near = FAMILIES[name][1], MORE[name]
    scores = np.concatenate([near, grid]).astype(np.float32)
    found, batch = evaluate_information(name, scores)
    for row, matrix in zip(near, found, strict=False):
        expected = find_reference_information(name, row)
        scale = np.sqrt(np.diag(expected))
        assert (np.abs(matrix - expected) / np.outer(scale, scale)).max() < 0.02
        np.testing.assert_array_less(0, np.linalg.eigvalsh(matrix))
    assert np.isfinite(found).all()
    assert (np.diagonal(found, axis1=1, axis2=2) >= 0).all()
    if name == "beta":
        limit = found[(scores[:, 0] == 0) & (scores[:, 1] == 20)][0]
        np.testing.assert_allclose(np.diag(limit), [np.exp(20) / 4, 0.5], rtol=1e-4)
    single = jax.jit(lambda: make(name).fisher_information())()
    np.testing.assert_allclose(batch[..., 0], single, rtol=1e-5)


class Placed:
    """Has ``log_prob``, moments and a support like NumPyro's, and no formula."""

    def __init__(self, inner, name):
        self.log_prob, self.mean = inner.log_prob, inner.mean
        self.variance, self.support = inner.variance, self
        self.is_discrete = name in COUNTS
        lower, upper = inner.support
        self.lower_bound = -np.inf if lower < 0 else 0
        self.upper_bound = np.inf if upper > 1 else 1


# The largest error, and scores; "weibull" has its quantiles in closed form.
NODES = {
    "normal": (0.01, (3, -4), (-700, 3)), "gamma": (0.05, (2, -0.5), (0, 5)),
    "beta": (0.02, (-1, 3), (2, 5)),
    "student_t": (0.1, (0, 2, 1), (3, -3, 0.5)),
    "negative_binomial": (0.15, (2, -3), (7, -2), (0, 6), (7, 3), (-4, 0)),
    "zero_inflated_poisson": (0.15, (7, -1), (0, 4), (-3, 0), (2, -4)),
    "weibull": (0.02, (-3, -2), (0, 0), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_information_from_nodes(name):
    """Of narrow, skewed, inflated and heavy-tailed distributions."""
    family, (error, *scores) = getattr(D, name), NODES[name]

    def make(score):
        inner = family(score)
        found = Placed(inner, name)
        if name == "weibull":
            found.icdf, found.support = inner.icdf, None
        return found

    information = find_information(jb.losses.likelihood(make), len(scores[0]))
    assert not information.sampled
    scores, seed = np.float32(scores), jnp.zeros(2, jnp.uint32)
    found = jax.jit(jax.vmap(lambda s: information.evaluate(s, seed)))(scores)
    found, expected = np.asarray(found, float), evaluate_information(name, scores)[0]
    scale = np.sqrt(np.diagonal(expected, axis1=1, axis2=2))
    relative = (found - expected) / (scale[:, :, None] * scale[:, None, :])
    assert np.abs(relative).max() < error


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


GRID = np.float32([0, 0.3, 1, 3, 8, 12, 17, 20, 28, 45, 80, 88, 100, 1e3, 1e4])
GRID = np.unique(np.concatenate([-GRID, GRID]))
TARGETS = {
    "real": (-1e3, -3, 0, 0.5, 7), "positive": (1e-3, 0.5, 3, 1e3),
    "share": (0, 0.3, 1), "unit": (1e-3, 0.5, 1 - 1e-3), "count": (0, 1, 7, 1e4),
    "sign": (-1, 1), "class": (0, 1),
}  # fmt: skip
KIND = {
    "log_normal": "positive", "gamma": "positive", "weibull": "positive",
    "beta": "unit", "negative_binomial": "count", "zero_inflated_poisson": "count",
    "poisson": "count", "tweedie": "count", "logistic": "share", "focal": "share",
    "softmax": "class", "exponential": "sign", "hinge": "sign",
    "hinge_squared": "sign",
}  # fmt: skip


@cache
def compile_derivatives(name):
    """Returns the loss of rows with its derivatives; scores on a grid, and targets."""
    family = name.removeprefix("likelihood of ")
    if name == family:
        loss, size = LOSSES[name], 2 if name == "softmax" else 1
    else:
        loss, size = jb.losses.likelihood(getattr(D, family)), len(FAMILIES[family][1])
    if size > 3:
        scores = np.random.default_rng(0).choice(GRID, (1000, size))
    else:
        scores = np.stack(np.meshgrid(*[GRID] * size), -1).reshape(-1, size)

    @jax.jit
    @jax.vmap
    def run(score, target):
        def slopes(score):
            value, gradient = jax.value_and_grad(loss)(score, target)
            return gradient, (value, gradient)

        curvature, (value, gradient) = jax.jacfwd(slopes, has_aux=True)(score)
        return value, gradient, curvature

    targets = np.asarray(TARGETS[KIND.get(family, "real")], np.float32)
    scores, targets = np.repeat(scores, len(targets), 0), np.tile(targets, len(scores))
    return run, scores[:, 0] if size == 1 else scores, targets


def derive(name, scores, targets):
    """The loss of rows and its derivatives, in calls of one shape."""
    run, grid, _ = compile_derivatives(name)
    size, found = min(len(grid), 4096), []
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        padded = np.resize(scores[part], (size, *grid.shape[1:]))
        found.append(run(padded, np.resize(targets[part], size)))
    return [np.concatenate(each)[: len(targets)] for each in zip(*found, strict=True)]


def derive_likelihood(name, score, targets):
    """The same for the targets of one score."""
    targets = np.float32(targets)
    scores = np.tile(np.float32(score), (len(targets), 1))
    return derive(f"likelihood of {name}", scores, targets)


@pytest.mark.parametrize(("name", "y"), [
    ("log_normal", -1), ("gamma", 0), ("weibull", -2), ("beta", 1), ("beta", -0.5),
    ("negative_binomial", 0.5), ("zero_inflated_poisson", -1),
])  # fmt: skip
def test_values_outside_the_support(name, y):
    value, slope, _ = derive_likelihood(name, FAMILIES[name][1], [y])
    assert value == np.inf  # the likelihood is 0
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(("name", "scores", "y"), [
    ("student_t", (0.0, 0.0, 15.0), 1.5), ("gamma", (2.0, 12.0), 7.4),
    ("beta", (0.3, 12.0), 0.574), ("negative_binomial", (2.0, 14.0), 9.0),
    ("zero_inflated_poisson", (9.0, -3.0), 8100.0),
])  # fmt: skip
def test_no_digits_are_lost_near_a_limit(name, scores, y):
    """Many degrees of freedom, large concentrations, large counts."""
    reference = FAMILIES[name][0](np.float64(np.float32(scores)))
    expected = log_density(reference, np.float64(np.float32(y)))
    found = evaluate_family(name, [scores], y, Q)[1]
    np.testing.assert_allclose(found[0, 0], expected, rtol=2e-2, atol=2e-2)


def test_a_mixture_has_three_scores_for_each_component():
    with pytest.raises(ValueError, match=r"num_scores .*3 M - 1.* got 4"):
        D.normal_mixture(jnp.zeros(4))
    run = jax.jit(lambda scores, y: D.normal_mixture(scores).log_prob(y))
    found = run(np.float32([2, 0]), np.float32(2.5))
    np.testing.assert_allclose(found, st.norm(2).logpdf(2.5), rtol=1e-6)


def test_student_t_is_right_at_any_distance():
    every = [(0.0, 0.0, log_df) for log_df in (3.0, 4.6, 5.0, 7.5, 12.0)]
    z = np.float32([0.1, 3, 30, 300, 1e5, 4e9, 1e16, *range(6)])
    batch, found, *_ = evaluate_family("student_t", every, z, Q)
    for i in range(len(every)):
        reference = read_fields(jax.tree.map(lambda leaf, i=i: leaf[i], batch))
        np.testing.assert_allclose(found[i], reference.logpdf(np.float64(z)), rtol=3e-6)


# Scores far from the middle: limits, tiny and large shapes, and counts.
FAR = {
    "normal": [(3.0, -9.0), (-5.0, 12.0)],
    "laplace": [(1.0, 3.0), (0.0, -12.0)],
    "student_t": [(0.0, 0.0, 15.0), (0.5, 2.0, 9.0), (0.0, -1.0, -9.0), (0, 0, 39)],
    "log_normal": [(1.0, -3.0), (-2.0, 1.5)],
    "gamma": [(2.0, 11.0), (0.0, 15.0), (-5.0, -2.0), (9.0, 4.0)],
    "weibull": [(0.0, 9.0), (2.0, -2.0), (-7.0, 3.0)],
    "beta": [(0.3, 11.0), (-8.0, 10.0), (9.0, 12.0), (0.5, -1.0), (0.0, 15.0)],
    "negative_binomial": [(3.0, 16.0), (4.0, 30.0), (8.0, -2.0), (13.0, 9.0)],
    "zero_inflated_poisson": [(3.0, 20.0), (2.0, -20.0), (9.0, 0.0), (-6.0, 1.0)],
    "normal_mixture": [(-3.0, 5.0, 4.0, -2.0, 6.0)],
}  # fmt: skip
SHARES = [1e-8, 1e-4, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999, 0.99999]
SHARES = np.float32([*SHARES, 1e-6, 0.01, 0.6, 0.99])  # the places 4 and 6 are read


def read_fields(found):
    """The distribution of these float32 fields, in float64."""
    field = {n: np.float64(v) for n, v in vars(found).items()}
    if isinstance(found, D.Normal | D.Laplace):
        kind = st.norm if isinstance(found, D.Normal) else st.laplace
        return kind(field["loc"], field["scale"])
    if isinstance(found, D.StudentT):
        return st.t(field["df"], field["loc"], field["scale"])
    if isinstance(found, D.LogNormal):
        return st.lognorm(field["scale"], scale=np.exp(field["loc"]))
    if isinstance(found, D.Weibull):
        return st.weibull_min(field["concentration"], scale=field["scale"])
    if isinstance(found, D.Gamma):
        k = field["concentration"]
        return st.gamma(k, scale=field["mean"] / k)
    if isinstance(found, D.Beta):
        shares = ss.expit([field["logit"], -field["logit"]])
        return st.beta(*(shares * field["concentration"]))
    if isinstance(found, D.NegativeBinomial):
        r = field["concentration"]
        if r > 1e9:  # log Gamma(r + n) - log Gamma(r) cancels in SciPy
            return st.poisson(field["mean"])
        return st.nbinom(r, r / (r + field["mean"]))
    return Inflated(field["rate"], ss.expit(field["logit"]), field["logit"])


@pytest.mark.parametrize("name", FAR)
def test_equal_to_scipy_far_from_the_middle(name):
    """A relative error of 1e-4 of each function at every score."""
    every, mixture = FAR[name], name == "normal_mixture"
    fields, *_ = evaluate_family(name, every, Q, SHARES)
    references = [
        Mixed(np.asarray(s)) if mixture
        else read_fields(jax.tree.map(lambda leaf, i=i: leaf[i], fields))
        for i, s in enumerate(every)
    ]  # fmt: skip
    exacts = [reference.ppf(SHARES.astype(float)) for reference in references]
    found = evaluate_family(name, every, exacts, SHARES)[1:]
    found = zip(
        every, references, exacts, *(f[: len(every)] for f in found), strict=True
    )
    for scores, reference, exact, log_prob, below, quantiles, mean, variance in found:
        y = exact.astype(np.float32)
        held = (np.abs(y) > 1e-36) & (np.abs(y) < 1e37) | (name in COUNTS)
        if name == "beta":
            held &= (y > 0) & (y < 1)
        if name == "gamma" and scores[1] == 15:
            held &= SHARES > 1e-6  # SciPy's is wrong by 0.1 % beyond
        at = np.where(held, y.astype(float), exact[4])
        tolerance = dict(rtol=1e-4, atol=1e-36, err_msg=f"{scores}")
        expected = [log_density(reference, at), reference.cdf(at), exact]
        np.testing.assert_allclose(
            log_prob[held], expected[0][held], rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(below[held], expected[1][held], **tolerance)
        tolerance["atol"] = 1e-4 * np.abs(exact[6] - exact[4])
        np.testing.assert_allclose(quantiles[held], exact[held], **tolerance)
        if np.isfinite(reference.mean()) and reference.var() < 1e38:
            np.testing.assert_allclose(mean, reference.mean(), rtol=1e-4)
        if name == "weibull" and scores[1] == 9:  # SciPy's cancels
            expected = (math.pi / math.exp(9)) ** 2 / 6
            np.testing.assert_allclose(variance, expected, rtol=1e-3)
        elif reference.var() < 1e38:
            np.testing.assert_allclose(variance, reference.var(), rtol=1e-4)


# Scores of samples that have the variance, too.
SPREAD = {
    "beta": (0.0, 20.0), "gamma": (1.0, 20.0), "negative_binomial": (14.0, 30.0),
    "zero_inflated_poisson": (15.0, -20.0), "student_t": (0.0, 0.0, 39.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_distribution(name):
    """They are inside the support wherever the scores are."""
    size = 20_000

    def draw(scores):
        return np.asarray(make(name, scores).sample(jax.random.key(1), (size,)))

    in_float64, scores = FAMILIES[name]
    reference, drawn = in_float64(np.asarray(scores, float)), draw(scores)
    y = reference.ppf(np.array([0.1, 0.5, 0.9]))
    shares = (drawn[:, None] <= y + 1e-6 * np.abs(y)).mean(axis=0)
    # Five standard errors.
    np.testing.assert_allclose(shares, reference.cdf(y), atol=5 * 0.5 / size**0.5)
    for far in [*FAR[name], (2.0, *[0.0] * (len(scores) - 1))]:
        assert np.isfinite(derive_likelihood(name, far, draw(far))[0]).all()
    if name in SPREAD:
        found = make(name, SPREAD[name])
        drawn = np.float64(draw(SPREAD[name]))
        np.testing.assert_allclose(drawn.var(), found.variance, rtol=0.05)
        error = abs(drawn.mean() - float(found.mean)) / math.sqrt(found.variance)
        assert error < 5 / math.sqrt(size)


@pytest.mark.parametrize("name", [*LOSSES, *(f"likelihood of {n}" for n in FAMILIES)])
def test_derivatives_are_finite_wherever_training_can_be(name):
    """Where the loss of a row is below 1e12: steps that exceed that are refused.

    Second derivatives, which the Fisher information replaces by default, contain the
    third power of a scale: they are held to scales above exp(-29) = 3e-13. Student's t
    has finite losses of targets that are 1e16 scales away, whose squares are not.
    """
    family = name.removeprefix("likelihood of ")
    _, scores, targets = compile_derivatives(name)
    value, *derivatives = derive(name, scores, targets)
    reached = np.asarray(value) < 1e12
    assert not np.isnan(value).any()
    least = -12 if family == "student_t" else -29
    scale = {"normal": 1, "student_t": 1, "log_normal": 1, "normal_mixture": [2, 3]}
    low = scores[:, scale[family]] < least if family in scale else np.zeros(len(value))
    low = low.reshape(len(value), -1).any(axis=1)
    for found, where in zip(derivatives, (reached, reached & ~low), strict=True):
        found = np.isfinite(np.asarray(found)).reshape(len(value), -1).all(axis=1)
        bad = where & ~found
        assert not bad.any(), (scores[bad][0], targets[bad][0])
