# SPDX-License-Identifier: Apache-2.0
"""JBoostDistribution behaves as scikit-learn expects, and predicts distributions."""

import pickle
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from sklearn.base import clone, is_regressor
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator

import jboost as jb
from jboost.sklearn import JBoostDistribution
from jboost.sklearn.distribution import FAMILIES

RNG = np.random.default_rng(0)
ROWS = 1000
X = RNG.uniform(-1, 1, (ROWS, 3)).astype(np.float32)
SCALE = np.exp(X[:, 1])
Y = (3 * X[:, 0] + SCALE * RNG.normal(size=ROWS)).astype(np.float32)
SMALL = dict(num_rounds=40, max_depth=2)
FITTED = JBoostDistribution(**SMALL).fit(X, Y)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(partial(check, estimator), id=check.func.__name__)
        for estimator, check in estimator_checks_generator(
            JBoostDistribution(num_rounds=3, max_depth=2)
        )
    ],
)
def test_checks_of_scikit_learn(check):
    check()


def test_equal_to_fit():
    loss = jb.losses.likelihood(jb.distributions.normal)
    model, _ = jb.fit(X, Y, loss, num_scores=2, **SMALL)
    found = jb.predict(model, X, inverse_link=jb.distributions.normal)
    distribution = FITTED.predict_dist(X)
    np.testing.assert_array_equal(distribution.scale, found.scale)
    np.testing.assert_array_equal(FITTED.predict(X), found.mean)
    log_prob = st.norm(found.loc, found.scale).logpdf(Y)
    np.testing.assert_allclose(FITTED.score(X, Y), log_prob.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        FITTED.score(X, Y, X[:, 0] > 0), log_prob[X[:, 0] > 0].mean(), rtol=1e-5
    )
    assert is_regressor(FITTED)
    assert [*FITTED.staged_predict(X[:5])][-1].tolist() == found.mean[:5].tolist()


def test_quantiles():
    shares = [0.1, 0.5, 0.9]
    found = FITTED.predict_quantiles(X, shares)
    assert found.shape == (ROWS, 3)
    covered = (Y[:, None] <= found).mean(axis=0)
    np.testing.assert_allclose(covered, shares, atol=0.04)
    # The scale follows the data, which a constant one would not.
    assert np.corrcoef(found[:, 2] - found[:, 0], SCALE)[0, 1] > 0.9
    for wrong in ([0.0], [1.5], [[0.5]]):
        with pytest.raises(ValueError, match="quantiles must be numbers in"):
            FITTED.predict_quantiles(X, wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    y = dict(
        beta=1 / (1 + np.exp(-Y)), negative_binomial=np.abs(np.round(Y)),
        zero_inflated_poisson=np.abs(np.round(Y)),
    ).get(name, np.exp(Y / 4))  # fmt: skip
    found = JBoostDistribution(name, num_rounds=3, max_depth=2).fit(X, y)
    assert found.predict(X).shape == (ROWS,)
    quantiles = found.predict_quantiles(X[:50], [0.1, 0.6])
    assert (quantiles[:, 0] <= quantiles[:, 1]).all()
    assert np.isfinite(found.score(X, y))


def test_own_distribution():
    def half(score):
        return jb.distributions.Gamma(jnp.exp(score), jnp.ones_like(score))

    found = JBoostDistribution(half, **SMALL).fit(X, np.exp(Y / 4))
    assert found.get_booster().num_scores == 1
    three = JBoostDistribution("normal_mixture", 8, num_rounds=2, max_depth=2).fit(X, Y)
    assert three.predict_dist(X).locs.shape == (ROWS, 3)
    raw = JBoostDistribution(inverse_link=None, num_rounds=2).fit(X, Y)
    assert raw.predict(X).shape == (ROWS, 2)


def test_tools_of_scikit_learn():
    scores = cross_val_score(clone(FITTED), X, Y, cv=3)
    assert (scores > st.norm(Y.mean(), Y.std()).logpdf(Y).mean()).all()
    again = pickle.loads(pickle.dumps(FITTED))
    np.testing.assert_array_equal(again.predict(X), FITTED.predict(X))
    stopped = JBoostDistribution(
        early_stopping_rounds=5, metrics="rmse", num_rounds=200, max_depth=2
    ).fit(X, Y)
    assert stopped.n_iter_ < 200
    measured = stopped.evals_result_["validation"]
    assert len(measured["rmse"]) == len(measured["loss"])
    assert measured["rmse"][-1] < measured["rmse"][0]


def test_errors():
    with pytest.raises(ValueError, match=r"distribution must .*'normal'.*'gaussian'"):
        JBoostDistribution("gaussian").fit(X, Y)
    with pytest.raises(ValueError, match="num_scores must"):
        JBoostDistribution("normal", 0).fit(X, Y)
    with pytest.raises(ValueError, match=r"\brow"):
        JBoostDistribution("gamma").fit(X, Y)
