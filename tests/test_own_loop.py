# SPDX-License-Identifier: Apache-2.0
"""The page "Write your own loop": its algorithms against their descriptions."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.ensemble import AdaBoostClassifier
from sklearn.tree import DecisionTreeClassifier

import jboost as jb

PAGE = Path(__file__).parent.parent / "docs" / "own-loop.md"
N, ROUNDS, KEY = 300, 8, jax.random.key(0)
RNG = np.random.default_rng(1)
X = (RNG.integers(0, 60, (N, 4)) / 16).astype(np.float32)
Y = (np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * RNG.normal(size=N)).astype("f4")
Y -= Y.mean()


@pytest.fixture(scope="module")
def page(full_search_of_file):
    """The functions of the page, on other data; its examples do not run."""
    text = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    bins = jb.fit_bins(X)
    codes = jb.parts.prepare_codes(jb.apply_bins(bins, X))
    names = dict(
        jax=jax, jnp=jnp, np=np, jb=jb, x=X, y=jnp.asarray(Y), bins=bins, codes=codes
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks[1:-1]:
            exec(re.split(r"\n\n\n(?=label|trees)", block)[0], names)
        yield names


def raw_leaves(page, trees, weights):
    """The unscaled leaf values of each tree, and the leaf of each row."""
    single = [jax.tree.map(lambda a, t=t: a[t, 0], trees.trees) for t in range(ROUNDS)]
    leaf = [np.asarray(jb.parts.find_leaves(tree, page["codes"])) for tree in single]
    values = [np.asarray(tree.leaf_value) for tree in single]
    return [v / w for v, w in zip(values, weights, strict=True)], leaf


def assert_fits(values, leaf, residual, rate):
    """Leaf values of squared error: rate times sum of residuals over rows + l2."""
    for number in np.unique(leaf):
        rows = leaf == number
        expected = rate * residual[rows].sum() / (rows.sum() + 3.0)
        np.testing.assert_allclose(values[number], expected, rtol=2e-3, atol=2e-5)


def test_dart_without_drops_is_fit(page):
    trees, scores = page["dart"](page["codes"], page["y"], KEY, 0.0, ROUNDS)
    model, _ = jb.fit(
        X, Y, jb.losses.squared_error, num_rounds=ROUNDS, max_depth=4, learning_rate=0.3
    )
    own = jb.to_ensemble(trees, page["bins"])
    for field in ("feature", "threshold", "missing_left", "init_score"):
        np.testing.assert_array_equal(getattr(own, field), getattr(model, field))
    # The loop adds trees to the scores, training to the steps beside the start.
    np.testing.assert_allclose(own.leaf_value, model.leaf_value, atol=1e-6)
    np.testing.assert_allclose(jb.predict(model, X), scores, atol=1e-6)


def test_dart_fits_what_the_kept_trees_leave_and_normalizes(page):
    """Rashmi and Gilad-Bachrach 2015, algorithm 1, replayed on the same trees."""
    trees, scores = page["dart"](page["codes"], page["y"], KEY, 0.5, ROUNDS)
    chosen = np.asarray(jax.random.bernoulli(KEY, 0.5, (ROUNDS, ROUNDS)))
    weights, drops = np.zeros(ROUNDS), []
    for number in range(ROUNDS):
        dropped = np.flatnonzero(chosen[number, :number])
        drops.append((dropped, weights.copy()))
        weights[dropped] *= len(dropped) / (len(dropped) + 1)
        weights[number] = 1 / (len(dropped) + 1)
    assert max(len(dropped) for dropped, _ in drops) >= 3
    values, leaf = raw_leaves(page, trees, weights)
    outputs = np.stack([v[rows] for v, rows in zip(values, leaf, strict=True)])
    init = float(trees.init_score)
    for number, (dropped, before) in enumerate(drops):
        before[dropped] = 0
        residual = Y - init - before @ outputs
        assert_fits(values[number], leaf[number], residual, 0.3)
    np.testing.assert_allclose(scores, init + weights @ outputs, atol=1e-5)
    assert np.mean((Y - scores) ** 2) < 0.5 * np.var(Y)


def test_adaboost_is_that_of_scikit_learn(page):
    label = np.where(Y > 0, 1.0, -1.0)
    trees, errors = page["adaboost"](page["codes"], jnp.float32(label), ROUNDS)
    theirs = AdaBoostClassifier(
        DecisionTreeClassifier(max_depth=1), n_estimators=ROUNDS
    ).fit(X, label)
    np.testing.assert_allclose(errors, theirs.estimator_errors_, rtol=1e-4)
    votes = np.abs(np.asarray(trees.trees.leaf_value)[:, 0])
    np.testing.assert_allclose(votes[:, 0], theirs.estimator_weights_, rtol=1e-3)
    model = jb.to_ensemble(trees, page["bins"])
    own = np.sign(np.asarray(jb.predict(model, X)))
    np.testing.assert_array_equal(own, theirs.predict(X))
    losses = [np.exp(-label * s).mean() for s in jb.staged_predict(model, X)]
    assert losses[-1] < losses[0]


def test_momentum_follows_the_recursion(page):
    """Biau, Cadre and Rouviere 2019, on the same trees."""
    trees, scores = page["accelerate"](page["codes"], page["y"], KEY, ROUNDS)
    lambdas = [0.0]
    for _ in range(ROUNDS + 1):
        lambdas.append((1 + np.sqrt(1 + 4 * lambdas[-1] ** 2)) / 2)
    gammas = [(1 - a) / b for a, b in itertools.pairwise(lambdas[1:])]
    # The coefficients of the trees in F and G, as a matrix product.
    f = g = np.zeros(ROUNDS)
    ahead = []
    for number, gamma in enumerate(gammas):
        ahead.append(g)
        new = g + np.eye(ROUNDS)[number]
        f, g = new, (1 - gamma) * new + gamma * f
    values, leaf = raw_leaves(page, trees, f)
    outputs = np.stack([v[rows] for v, rows in zip(values, leaf, strict=True)])
    init = float(trees.init_score)
    for number in range(ROUNDS):
        residual = Y - init - ahead[number] @ outputs
        assert_fits(values[number], leaf[number], residual, 0.1)
    np.testing.assert_allclose(scores, init + f @ outputs, atol=1e-5)
    plain, _ = jb.fit(
        X, Y, jb.losses.squared_error, num_rounds=ROUNDS, max_depth=4, learning_rate=0.1
    )
    loss, slower = (np.mean((Y - s) ** 2) for s in (scores, jb.predict(plain, X)))
    assert loss < slower < np.var(Y)
