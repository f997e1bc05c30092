# SPDX-License-Identifier: Apache-2.0
"""The traceable loop obeys jit and vmap, and boosting keeps its laws."""

import operator
from dataclasses import replace
from functools import partial

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from tables import ROWS, SMALL, make_columns, make_regression, squared_distance

import jboost as jb
from jboost.numerics.random import seed_from_key

X, Y = make_regression()
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)
KEY = jax.random.key(0)
SQUARES = jb.losses.squared_error
PARTS = ("tree", "level", "node")
SMALL = SMALL | dict(linear_leaves=False)


def boost(loss=SQUARES, y=Y, key=KEY, **settings):
    return jb.boost(CODES, y, loss, key, **{**SMALL, **settings})


def fit(loss=SQUARES, x=X, y=Y, **settings):
    return jb.fit(x, y, loss, **{**SMALL, **settings})


def assert_same_splits(one, other):
    """Bit for bit; of trees on codes or of models."""
    for name in ("feature", "threshold", "missing_left"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def huber_mean(scores, delta, weights):
    residual = np.abs(np.asarray(scores) - Y)
    values = np.where(
        residual <= delta, residual**2 / 2, delta * (residual - delta / 2)
    )
    return np.average(values, weights=weights)


def test_vmap_over_every_number():
    """Rates, l2, a number of the loss, keys and weights at once equal separate runs."""
    generator = np.random.default_rng(0)
    cases = dict(
        learning_rate=jnp.array([0.1, 0.3, 0.5]),
        l2=jnp.array([0.0, 1.0, 10.0]),
        factor=jnp.array([0.1, 1.0, 5.0]),
        key=jax.random.split(KEY, 3),
        weights=jnp.asarray(generator.uniform(0.5, 2, (3, ROWS)), jnp.float32),
    )

    def train(learning_rate, l2, factor, key, weights):
        return boost(
            lambda s, t: jnp.square(s - factor * t), key=key, num_rounds=3,
            learning_rate=learning_rate, l2=l2, sample_weight=weights, subsample=0.8,
        )  # fmt: skip

    together, once = jax.vmap(train)(*cases.values()), jax.jit(train)
    for number in range(3):
        found = jax.tree.map(operator.itemgetter(number), together)
        alone = once(*(values[number] for values in cases.values()))
        assert_same_splits(found[0].trees, alone[0].trees)
        # A batch is another program, which may round in the last bit: of one value
        # in 200 here.
        chex.assert_trees_all_close(found, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("loss", [SQUARES, jb.losses.huber])
def test_weight_two_is_a_duplicate_row(loss):
    """And rows of weight 0, which hold NaN here, do not exist."""
    half = ROWS // 2
    twice = np.r_[np.full(half, 2.0), np.zeros(half)]
    x, y = np.r_[X[:half], np.full((half, 3), np.nan)], np.r_[Y[:half], [np.nan] * half]
    weighted, history = fit(loss, x, y, sample_weight=twice)
    ones = np.ones(ROWS)
    doubled, expected = fit(
        loss, X[:half].repeat(2, 0), Y[:half].repeat(2), sample_weight=ones
    )
    # Sums add the same numbers in another order, in float32.
    np.testing.assert_allclose(history.train_loss, expected.train_loss, rtol=1e-5)
    assert_same_splits(weighted, doubled)
    found, expected = jb.predict(weighted, X[:half]), jb.predict(doubled, X[:half])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("full_search")
def test_weights_are_relative():
    """Without l2 and limits in units of weight, only their ratios matter."""
    weights = np.random.default_rng(0).uniform(0.5, 2, ROWS).astype(np.float32)
    free = dict(l2=0.0, min_child_weight=0.0)
    first, second = (
        replace(fit(sample_weight=factor * weights, **free)[0], sums=None)
        for factor in (1, 8)
    )
    chex.assert_trees_all_equal(first, second)  # a power of two: no rounding differs


def test_keys_of_four_words_are_different_seeds():
    words = [seed_from_key(jax.random.key(seed, impl="rbg")) for seed in range(8)]
    assert len({tuple(np.asarray(pair).tolist()) for pair in words}) == 8


@pytest.mark.parametrize("loss", ["absolute_error", "softmax"])
def test_plain_xla_means_no_kernel_anywhere(loss):
    """Sums over rows included: the program calls nothing of jboost's."""
    y, sizes = Y, dict(max_depth=1)
    if loss == "softmax":
        y, sizes = np.arange(ROWS) % 2, dict(max_depth=1, num_scores=2, init_score=0.0)
        sizes["leaf_solver"] = "guarded"

    def trace(how):
        train = partial(boost, getattr(jb.losses, loss), y, implementation=how, **sizes)
        return str(jax.make_jaxpr(train)())

    assert "jboost_" not in trace("xla")
    if loss == "absolute_error" and "cpu" in jb.implementations().values():
        assert "jboost_" in trace("cpu")


# The convex losses, and their targets from numbers of about a standard deviation of 1.
TARGETS = {
    "number": lambda y: y,
    "class": lambda y: (y > np.median(y)).astype(np.float32),
    "sign": lambda y: np.sign(y - np.median(y)),
    "positive": lambda y: np.exp(np.clip(y, -9, 9) / 2),
}
CONVEX = {
    "squared_error": "number", "absolute_error": "number", "huber": "number",
    "pseudo_huber": "number", "log_cosh": "number", "quantile": "number",
    "expectile": "number", "logistic": "class", "hinge": "sign",
    "hinge_squared": "sign", "exponential": "sign", "poisson": "positive",
    "gamma": "positive", "tweedie": "positive",
}  # fmt: skip

SLOPED = {"squared_error", "poisson"}  # with linear leaves


@pytest.mark.parametrize("name", CONVEX)
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    noise=st.sampled_from([0.0, 0.3, 30.0]),
    orders=st.sampled_from([0, 6]),
    rate=st.sampled_from([0.3, 1.0]),
)
def test_training_loss_does_not_rise(name, seed, noise, orders, rate):
    """With any learning rate up to 1, and weights over twelve orders of magnitude."""
    x, y = make_regression(seed, noise)
    y, linear = TARGETS[CONVEX[name]](y), "auto" if name in SLOPED else False
    weights = 10.0 ** np.random.default_rng(seed).uniform(-orders, orders, len(y))
    _, history = fit(
        getattr(jb.losses, name), x, y, learning_rate=rate, seed=seed,
        sample_weight=weights, linear_leaves=linear,
    )  # fmt: skip
    losses = history.train_loss
    chex.assert_tree_all_finite(losses)
    assert (np.diff(losses) <= 2e-6 * np.max(np.abs(losses))).all()  # rounding


@pytest.mark.usefixtures("full_search")
def test_training_loss_is_that_of_the_model():
    for seed, more in enumerate([{}, *3 * [dict(subsample=0.7)]]):
        x, y = make_regression(seed)
        model, history = fit(x=x, y=y, seed=seed, **more)
        stages = np.asarray(jb.staged_predict(model, x))
        losses, expected = history.train_loss, ((stages - y) ** 2).mean(1)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)  # float32
        assert losses[-1] < 0.5 * np.var(y)
        assert (np.diff(losses) <= 0.05 * losses[0]).all()  # in subsamples, it may rise


@pytest.mark.usefixtures("full_search")
def test_schedules():
    rates = [0.5, 0.0, 0.25, 0.1, 0.1, 0.1, 0.1, 0.1]
    model, _ = fit(learning_rate=lambda step: rates[step])
    constant, _ = fit(learning_rate=0.5)
    values = np.asarray(model.leaf_value)
    np.testing.assert_array_equal(values[0], constant.leaf_value[0])
    assert not values[1].any() and values[2].any()
    # The tree of round 1 added nothing, so that round 2 grows it again.
    np.testing.assert_array_equal(model.threshold[1], model.threshold[2])


@pytest.mark.usefixtures("full_search")
def test_subsets_are_reproducible():
    everything, _ = fit()
    for name in ("subsample", *(f"colsample_by{part}" for part in PARTS)):
        first, again, other = (fit(seed=seed, **{name: 0.4})[0] for seed in (1, 1, 2))
        chex.assert_trees_all_equal(first, again)
        assert np.any(first.threshold != other.threshold), name
        assert np.any(first.threshold != everything.threshold), name
    # Where rounding is to nearest, the seed is not used otherwise.
    chex.assert_trees_all_equal(fit(seed=2)[0], everything)


@pytest.mark.usefixtures("full_search")
def test_a_tree_of_one_column():
    model, _ = fit(colsample_bytree=0.3)  # one of three
    split = np.isfinite(model.threshold[:, 0])
    used = [
        set(np.asarray(model.feature[number, 0])[split[number]].tolist())
        for number in range(model.num_rounds)
    ]
    assert all(len(columns) == 1 for columns in used)
    assert len(set.union(*used)) > 1


def test_an_offset_is_a_start_per_row():
    offset = 3 * X[:, 2] + 5
    with_offset, history = fit(offset=offset)
    without, expected = fit(y=Y - offset)
    np.testing.assert_allclose(  # targets near 10 are rounded to 1e-6
        history.train_loss, expected.train_loss, rtol=1e-4
    )
    assert_same_splits(with_offset, without)
    scores = jb.predict(with_offset, X, offset=offset)
    expected = np.asarray(jb.predict(without, X)) + offset
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("full_search")
def test_the_first_leaf_values_are_those_of_xgboost_by_hand():
    """One tree on 200 rows: -G / (H + l2 * mean curvature), times the rate."""
    model, _ = fit(num_rounds=1, l2=3.0)
    leaf = np.asarray(jb.leaf_indices(model, X))[:, 0]
    residual = Y - Y.mean()
    for number in np.unique(leaf):
        inside = residual[leaf == number]
        expected = 0.1 * inside.sum() / (len(inside) + 3)
        actual = float(model.leaf_value[0, 0, number])
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)  # float32


CLASSES = np.digitize(Y, [0.5, 2.0])


def test_a_given_initial_score_is_the_start():
    model, history = fit(init_score=2.5, num_rounds=0)
    assert float(model.init_score) == history.choices["init_score"] == 2.5
    np.testing.assert_array_equal(jb.predict(model, X), np.full(ROWS, 2.5))


@pytest.mark.usefixtures("full_search")
def test_softmax_trains_three_classes():
    model, history = fit(jb.losses.softmax, y=CLASSES, num_scores=3)
    share = jax.nn.softmax(model.init_score)
    # Damped Newton stops when the loss no longer falls in float32.
    np.testing.assert_allclose(share, np.bincount(CLASSES) / ROWS, atol=1e-3)
    scores = jb.predict(model, X)
    assert scores.shape == (ROWS, 3) and model.feature.shape == (8, 3, 7)
    assert np.mean(np.argmax(scores, 1) == CLASSES) > 0.8
    assert (np.diff(history.train_loss) < 0).all()


def test_steps_keep_their_digits_beside_a_large_start():
    """Integers near 2^22 are exact in float32; small steps beside them are not."""
    y = np.round(100 * np.asarray(Y))
    errors = []
    for start in (2.0**22, -np.mean(y)):
        model, _ = fit(y=start + y, num_rounds=100, learning_rate=0.01)
        found = np.asarray(jb.predict(model, X), np.float64)
        errors.append(np.mean((found - start - y) ** 2))
    assert errors[0] < 1.01 * errors[1]


def test_an_adaptive_loss_follows_the_fit():
    """Every round uses the parameter of its own scores, the history the first's."""
    loss = jb.losses.make_adaptive_huber(alpha=0.5)
    model, history = fit(loss, num_rounds=8)
    start = np.full(ROWS, model.init_score, np.float32)
    delta = np.sort(np.abs(Y - start))[ROWS // 2 - 1]
    expected = huber_mean(jb.predict(model, X), delta, np.ones(ROWS))
    np.testing.assert_allclose(history.train_loss[-1], expected, rtol=1e-4)  # float32
    assert history.train_loss[-1] < history.train_loss[0]


@pytest.mark.usefixtures("full_search")
def test_missing_values_are_used():
    x = make_columns()
    hidden = np.random.default_rng(1).random(ROWS) < 0.3
    x[hidden, 0] = np.nan
    y = np.where(hidden, 3.0, -1.0)
    model, _ = fit(x=x, y=y, learning_rate=1.0, l2=0.0)
    np.testing.assert_allclose(jb.predict(model, x), y, atol=1e-4)  # float32 means


def test_scores_of_a_state_are_laid_out_as_those_of_boost():
    offset, y = jnp.asarray(X[:, :2]), X[:, 1:]
    given = dict(num_scores=2, init_score=[0.5, -1.0])
    start = jb.init(CODES, y, squared_distance, KEY, offset=offset, **given)
    np.testing.assert_array_equal(start.scores, offset + start.init_score[None])
    state, tree = jb.boost_step(
        start, CODES, y, squared_distance, max_depth=1, leaf_solver="newton"
    )
    assert int(state.round) == 1
    trees = jb.BoostedTrees(
        jax.tree.map(lambda a: np.asarray(a)[None], tree), start.init_score
    )
    expected = jb.predict(jb.to_ensemble(trees, BINS), X, offset=offset)
    np.testing.assert_allclose(state.scores, expected, rtol=1e-5, atol=1e-6)
    many = jax.tree.map(lambda a: np.stack([a, a]), state)
    with pytest.raises(ValueError, match=r"state must be .*\(2, "):
        jb.boost_step(many, CODES, y, squared_distance)


def test_jitted_boost_is_exported_from_plain_xla():
    pytest.importorskip("flatbuffers")

    def train(y):
        return boost(y=y, num_rounds=1, max_depth=1, implementation="xla")

    shape = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    content = jax.export.export(jax.jit(train))(shape).serialize()
    trees, scores = jax.export.deserialize(content).call(jnp.asarray(Y, jnp.float32))
    assert isinstance(trees, jb.BoostedTrees)
    found = jb.predict(jb.to_ensemble(trees, BINS), X)
    np.testing.assert_allclose(found, scores, rtol=1e-6)
