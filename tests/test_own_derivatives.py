# SPDX-License-Identifier: Apache-2.0
"""Derivatives that are handed in instead of those of a loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from sklearn.tree import DecisionTreeRegressor
from tables import make_regression, squared_distance

import jboost as jb

X, Y = make_regression()
LABEL = (Y > 1).astype(np.float32)
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)
KEY = jax.random.key(1)
SMALL = dict(num_rounds=8, max_depth=3)
HALF = np.where(np.arange(len(Y)) % 2, 0.5, 2.0).astype(np.float32)


def of_logistic(scores, targets, key):
    del key
    share = jax.nn.sigmoid(scores)
    return share - targets, share * (1 - share)


def of_distance(scores, targets, key):
    del key
    return 2 * (scores - targets), 2.0


PAIR = np.stack([Y, -X[:, 0]], 1)
# "relative" counts the rows of a logistic loss by what they tell, which handed-in
# derivatives do not say.
ABSOLUTE = dict(regularization="absolute")
compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def test_the_derivatives_of_a_loss_give_its_model():
    """Without the loss, of several scores and weighted rows: boost and boost_step."""
    more = dict(subsample=0.7, leaf_solver="newton", sample_weight=HALF)
    start = dict(num_scores=2, init_score=np.array([0.5, -0.2], np.float32))
    known, scores = jb.boost(
        CODES, PAIR, squared_distance, KEY, curvature="exact", **more, **start, **SMALL
    )
    start["init_score"] = known.init_score
    given, found = jb.boost(
        CODES, PAIR, None, KEY, derivatives=of_distance, **more, **start, **SMALL
    )
    compare(found, scores)
    compare(given.trees.leaf_value, known.trees.leaf_value)

    state = jb.init(CODES, None, None, KEY, sample_weight=HALF, **start)
    for _ in range(SMALL["num_rounds"]):
        gradient, curvature = of_distance(state.scores, PAIR, KEY)
        state, _ = jb.boost_step(
            state, CODES, None, None, gradient=gradient, curvature=curvature,
            max_depth=3, **more,
        )  # fmt: skip
    compare(state.scores, scores)


def test_limits_and_categories():
    """Beside the loss."""
    x = np.c_[X[:, :2], np.round(3 * np.abs(X[:, 2]))].astype(np.float32)
    bins = jb.fit_bins(x, categorical=[2])
    codes = jb.apply_bins(bins, x)
    more = dict(
        l1=0.1, monotone={0: 1}, init_score=0.25, categories=bins.categories,
        leaf_solver="newton", subsample=0.7, **ABSOLUTE, **SMALL,
    )  # fmt: skip
    given = codes, LABEL, jb.losses.logistic, KEY
    _, scores = jb.boost(*given, curvature="exact", **more)
    trees, found = jb.boost(*given, derivatives=of_logistic, **more)
    compare(found, scores)
    model = jb.to_ensemble(trees, bins)
    compare(jb.predict(model, x), scores, atol=1e-5)


@pytest.mark.usefixtures("full_search")
def test_gentle_adaboost_is_that_of_the_textbook():
    """Friedman, Hastie and Tibshirani (2000), algorithm 4, with scikit-learn's trees.

    Weights w = exp(-y F); each round adds the weighted mean of y in each leaf.
    """
    sign = 2 * LABEL - 1
    scores = np.zeros(len(sign))
    for _ in range(6):
        tree = DecisionTreeRegressor(max_depth=2, random_state=0)
        scores += tree.fit(X, sign, sample_weight=np.exp(-sign * scores)).predict(X)

    def reweigh(scores, sign, key):
        weights = jnp.exp(-sign * scores)
        return -weights * sign, weights

    _, found = jb.boost(
        CODES, sign, None, KEY, derivatives=reweigh, init_score=0.0, learning_rate=1.0,
        num_rounds=6, max_depth=2, l2=0.0, min_child_weight=0.0, min_child_samples=1,
    )  # fmt: skip
    np.testing.assert_allclose(found, scores, atol=1e-4)


@pytest.mark.usefixtures("full_search")
def test_each_round_and_run_has_its_own_key():
    """The sum of R independent draws of variance 1 has variance R, not R^2."""
    rounds = 16

    def draw(scores, targets, key):
        return jax.random.normal(key, scores.shape), 1.0

    def run(key, scale=1.0):
        def scaled(*arguments):
            gradient, curvature = draw(*arguments)
            return scale * gradient, curvature

        return jb.boost(
            CODES, None, None, key, derivatives=scaled, init_score=0.0, max_depth=6,
            num_rounds=rounds, learning_rate=1.0, l2=0.0, min_child_weight=0.0,
        )[1]  # fmt: skip

    scores = np.stack([run(key) for key in jax.random.split(KEY, 3)])
    # Leaves of few rows: the variance of their means is somewhat below that of a row.
    assert (0.2 * rounds < scores.var(axis=1)).all()
    assert (scores.var(axis=1) < 1.5 * rounds).all()
    assert np.abs(np.corrcoef(scores)[~np.eye(3, dtype=bool)]).max() < 0.3
    np.testing.assert_array_equal(run(KEY), run(KEY))
    with Compilations() as compiled:
        run(KEY, 0.5)  # numbers that the function closes over are traced
    assert not [name for name in compiled.names if "boost" in name]


def test_leaf_solvers_take_their_values_from_the_loss():
    """Derivatives of ten times the loss: the guard keeps the argmin of the loss."""

    def tenfold(scores, targets, key):
        gradient, curvature = of_logistic(scores, targets, key)
        return 10 * gradient, curvature

    _, scores = jb.boost(
        CODES, LABEL, jb.losses.logistic, KEY, derivatives=tenfold,
        leaf_solver="guarded", learning_rate=1.0, num_rounds=1, max_depth=3,
        init_score=0.0,
    )  # fmt: skip
    values, leaf = np.unique(scores, return_inverse=True)
    assert len(values) > 4
    share = np.bincount(leaf, LABEL) / np.bincount(leaf)
    steps = 10 * (share - 0.5) / 0.25  # Newton's, without a guard

    def mean_loss(scores):
        return np.mean(np.logaddexp(0, scores) - LABEL * scores)

    assert mean_loss(steps[leaf]) > 1.5 * mean_loss(np.asarray(scores))


STATE = jb.init(CODES, None, None, KEY, init_score=0.0)
ONES = np.ones(len(Y), np.float32)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(derivatives=3), r"derivatives must be callable as .* got 3"),
        (dict(derivatives=lambda s, t: s), r"derivatives failed; it must accept"),
        (dict(derivatives=lambda s, t, k: s), r"derivatives must return the pair"),
        (
            dict(derivatives=lambda s, t, k: (s[:9], s)),
            r"the gradient that derivatives returns must have the shape .*\(200,\)",
        ),
        (
            dict(derivatives=lambda s, t, k: (s, s[:9])),
            r"the curvature that .* or a number, got \(9,\)",
        ),
        (dict(curvature="exact"), r"curvature must be .*'auto'.* got 'exact'"),
        (dict(leaf_solver="hessian"), r"leaf_solver must be 'newton' .* 'hessian'"),
        (
            dict(leaf_solver="exact", loss=None, init_score=0.0),
            r"leaf_solver must be .* loss is None, got 'exact', which needs the values",
        ),
        (dict(loss=None), r"init_score must be a number .* loss is None, got 'auto'"),
        (dict(derivatives=None, loss=None, init_score=0.0), r"loss must be callable"),
        (dict(y=None), r"y must"),
    ],
)
def test_bad_arguments_of_boost_are_named(change, match):
    given = dict(y=LABEL, loss=jb.losses.logistic, derivatives=of_logistic) | change
    with pytest.raises((TypeError, ValueError), match=match):
        jb.boost(CODES, key=KEY, **{**SMALL, **given})


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(gradient=ONES[:9]), r"gradient must have the shape .* got \(9,\)"),
        (dict(gradient="g"), r"gradient must be an array .* got 'g'"),
        (dict(curvature=ONES[:, None]), r"curvature must have the shape .* \(200, 1\)"),
        (dict(curvature="exact"), r"curvature must be an array .* got 'exact'"),
        (dict(curvature=-ONES), r"curvature must be >= 0 .* got -1"),
        (dict(leaf_solver="guarded"), r"leaf_solver must be 'newton'"),
        (dict(gradient=None), r"gradient must be given .* got None"),
        (dict(loss=jb.losses.logistic, y=LABEL), r"loss must be the one"),
    ],
)
def test_bad_arguments_of_boost_step_are_named(change, match):
    given = dict(y=None, loss=None, gradient=ONES, curvature=ONES) | change
    with pytest.raises((TypeError, ValueError), match=match):
        jb.boost_step(STATE, CODES, **given)
