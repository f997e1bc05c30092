# SPDX-License-Identifier: Apache-2.0
"""JBoostDistribution behaves as scikit-learn expects, and predicts distributions."""

import pickle
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from sklearn.base import clone, is_regressor
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator
from tables import FULL

import jboost as jb
from jboost.sklearn import JBoostDistribution

RNG = np.random.default_rng(0)
ROWS = 1000
X = RNG.uniform(-1, 1, (ROWS, 3)).astype(np.float32)
SCALE = np.exp(X[:, 1])
Y = (3 * X[:, 0] + SCALE * RNG.normal(size=ROWS)).astype(np.float32)
SIMPLE: dict[str, Any] = dict(max_depth=2, max_bins=16, linear_leaves=False, **FULL)
SMALL = dict(num_rounds=40, **SIMPLE)
FEW = dict(num_rounds=2, init_score=0.0, **SIMPLE)
SOME = slice(200)
START = FEW | dict(num_rounds=0)  # what is known before the first tree


def one_score(score):
    """Its programs are smaller than those of two scores."""
    return jb.distributions.Normal(score, jnp.ones_like(score))


@pytest.fixture(scope="module")
def fitted():
    return JBoostDistribution(**SMALL).fit(X, Y)


@pytest.mark.filterwarnings("ignore:no tree of 2 rounds has a split")
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(partial(check, estimator), id=check.func.__name__)
        for estimator, check in estimator_checks_generator(
            JBoostDistribution(one_score, **FEW)
        )
    ],
)
def test_checks_of_scikit_learn(check):
    check()


def test_equal_to_fit(fitted):
    loss = jb.losses.likelihood(jb.distributions.normal)
    model, _ = jb.fit(X, Y, loss, num_scores=2, **SMALL)
    found = jb.predict(model, X, inverse_link=jb.distributions.normal)
    distribution = fitted.predict_dist(X)
    np.testing.assert_array_equal(distribution.scale, found.scale)
    np.testing.assert_array_equal(fitted.predict(X), found.mean)
    log_prob = st.norm(found.loc, found.scale).logpdf(Y)
    np.testing.assert_allclose(fitted.score(X, Y), log_prob.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        fitted.score(X, Y, X[:, 0] > 0), log_prob[X[:, 0] > 0].mean(), rtol=1e-5
    )
    assert is_regressor(fitted)
    assert [*fitted.staged_predict(X[:5])][-1].tolist() == found.mean[:5].tolist()


def test_quantiles(fitted):
    shares = [0.1, 0.5, 0.9]
    found = fitted.predict_quantiles(X, shares)
    assert found.shape == (ROWS, 3)
    covered = (Y[:, None] <= found).mean(axis=0)
    np.testing.assert_allclose(covered, shares, atol=0.04)
    # The scale follows the data, which a constant one would not.
    assert np.corrcoef(found[:, 2] - found[:, 0], SCALE)[0, 1] > 0.9
    for wrong in ([0.0], [1.5], [[0.5]]):
        with pytest.raises(ValueError, match="quantiles must be numbers in"):
            fitted.predict_quantiles(X, wrong)


def test_a_family_by_name():
    """All are trained in test_likelihoods.py."""
    y = np.abs(Y)[SOME]
    found = JBoostDistribution("weibull", **START).fit(X[SOME], y)
    assert found.predict(X).shape == (ROWS,)
    quantiles = found.predict_quantiles(X[:50], [0.1, 0.6])
    assert (quantiles[:, 0] <= quantiles[:, 1]).all()
    assert np.isfinite(found.score(X[SOME], y))


def test_own_distribution():
    found = JBoostDistribution(one_score, **FEW).fit(X[SOME], Y[SOME])
    assert found.get_booster().num_scores == 1
    start = dict(START, init_score=(0, 1))
    one = JBoostDistribution("normal_mixture", 2, **start).fit(X[SOME], Y[SOME])
    assert one.predict_dist(X).locs.shape == (ROWS, 1)
    raw = JBoostDistribution(inverse_link=None, **START).fit(X, Y)
    assert raw.predict(X).shape == (ROWS, 2)


def test_tools_of_scikit_learn(fitted):
    scores = cross_val_score(clone(fitted), X, Y, cv=3)
    assert (scores > st.norm(Y.mean(), Y.std()).logpdf(Y).mean()).all()
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    stopped = JBoostDistribution(
        early_stopping_rounds=5, metrics="rmse", num_rounds=200, **SIMPLE
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
        JBoostDistribution("weibull", **START).fit(X[SOME], Y[SOME])
