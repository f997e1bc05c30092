# SPDX-License-Identifier: Apache-2.0
"""The formulas on the page "Losses of the literature" are those of SciPy.

The examples themselves run with those of the other pages.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, stats

import jboost as jb

PAGE = Path(__file__).parents[1] / "docs" / "losses-of-the-literature.md"
FUNCTION = re.compile(r"^(?:def .*?\n(?=\n\n|```)|TAUS = .*?\n)", re.M | re.S)


@pytest.fixture(scope="module")
def page():
    """The functions of the page, by name."""
    names = dict(jax=jax, jnp=jnp, np=np, jb=jb)
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        for code in FUNCTION.findall(block + "```"):
            exec(code, names)
    return names


@pytest.fixture(autouse=True)
def plain_settings():
    """JAX as the readers of the page have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    ("mean", "log_sigma", "target"), [(0.3, -0.5, 1.2), (-1, 1, -4)]
)
def test_crps_is_the_integral(page, mean, log_sigma, target):
    law = stats.norm(mean, np.exp(log_sigma))
    below, _ = integrate.quad(lambda t: law.cdf(t) ** 2, -60, target)
    above, _ = integrate.quad(lambda t: law.sf(t) ** 2, target, 60)
    found = page["crps"](jnp.array([mean, log_sigma], jnp.float32), target)
    np.testing.assert_allclose(found, below + above, rtol=1e-5)


def test_quantiles_are_in_order_and_minimize_the_pinball_loss(page):
    score = jnp.array([-1.0, 0.5, -3.0])
    found = np.asarray(page["quantiles"](score))
    assert (np.diff(found) > 0).all()
    expected = sum(
        max(tau * (0.2 - q), (tau - 1) * (0.2 - q))
        for tau, q in zip((0.1, 0.5, 0.9), found, strict=True)
    )
    np.testing.assert_allclose(page["pinball"](score, 0.2), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "bounds", [(2.0, 2.0), (2.0, np.inf), (0.0, 3.0), (2.0, 3.0), (1e-3, 1e4)]
)
def test_censored_lifetimes_have_the_likelihood_of_scipy(page, bounds):
    location, log_scale = 0.4, -0.7
    law = stats.logistic(location, np.exp(log_scale))
    with np.errstate(divide="ignore"):
        lower, upper = np.log(bounds)
    chance = law.cdf(upper) - law.cdf(lower)
    expected = -law.logpdf(lower) if lower == upper else -np.log(chance)
    loss, score = page["survival_time"], jnp.array([location, log_scale])
    target = jnp.array(bounds)
    np.testing.assert_allclose(loss(score, target), expected, rtol=1e-4, atol=1e-6)
    for derivative in (jax.grad(loss), jax.hessian(loss)):
        assert np.isfinite(derivative(score, target)).all()


def test_known_labels_alone_count(page):
    loss, score = page["tasks"], jnp.array([0.5, -0.3])
    both = jb.losses.squared_error(0.5, 2.0) + jb.losses.logistic(-0.3, 1.0)
    np.testing.assert_allclose(loss(score, jnp.array([2.0, 1.0])), both, rtol=1e-6)
    one = loss(score, jnp.array([2.0, jnp.nan]))
    np.testing.assert_allclose(one, jb.losses.squared_error(0.5, 2.0))
    slopes = jax.grad(loss)(score, jnp.array([2.0, jnp.nan]))
    np.testing.assert_allclose(slopes, [-3.0, 0.0])


def test_cross_entropy_is_that_of_scipy(page):
    score, shares = np.array([0.5, -1.0, 2.0]), np.array([0.2, 0.5, 0.3])
    chances = np.exp(score) / np.exp(score).sum()
    expected = stats.entropy(shares, chances) + stats.entropy(shares)
    found = page["cross_entropy"](jnp.asarray(score), jnp.asarray(shares))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_ordered_classes_have_the_chances_of_the_latent_number(page):
    cuts = np.array([-2.0, -0.5, 1.0, 3.0])
    edges = np.concatenate([[-np.inf], cuts, [np.inf]])
    chances = np.diff(stats.logistic.cdf(edges - 0.7))
    for target in range(5):
        found = page["ordinal"](jnp.float32(0.7), target, jnp.asarray(cuts))
        np.testing.assert_allclose(found, -np.log(chances[target]), rtol=1e-5)
        far = jax.grad(page["ordinal"])(jnp.float32(80.0), target, jnp.asarray(cuts))
        assert np.isfinite(far)


def test_cut_points_solve_the_likelihood_equations(page):
    rng = np.random.default_rng(0)
    scores, targets = rng.normal(size=400) * 3, rng.integers(0, 5, 400)
    weights = rng.integers(0, 3, 400) * 1.0
    found = page["estimate_cuts"](
        jnp.asarray(scores), jnp.asarray(targets), jnp.asarray(weights)
    )
    for level, cut in enumerate(found):

        def slope(c, level=level):
            gap = stats.logistic.cdf(c - scores) - (targets <= level)
            return np.sum(weights * gap)

        expected = optimize.brentq(slope, -30, 30)
        np.testing.assert_allclose(cut, expected, rtol=1e-3, atol=1e-3)


def test_counts_with_zeros_have_probabilities_that_sum_to_one(page):
    counts = np.arange(60.0)
    for name, at_zero in (("zero_inflated", None), ("hurdle", 1 / (1 + np.exp(0.4)))):
        score = jnp.array([1.3, 0.4])
        losses = [page[name](score, jnp.float32(count)) for count in counts]
        chances = np.exp(-np.array(losses))
        np.testing.assert_allclose(chances.sum(), 1, rtol=1e-4)
        poisson = stats.poisson.pmf(counts[1:], np.exp(1.3))
        ratio = chances[1:40] / poisson[:39]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)
        if at_zero is not None:
            np.testing.assert_allclose(chances[0], at_zero, rtol=1e-5)
    inflated = 1 / (1 + np.exp(-0.4))
    expected = inflated + (1 - inflated) * np.exp(-np.exp(1.3))
    found = np.exp(-page["zero_inflated"](jnp.array([1.3, 0.4]), jnp.float32(0)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
