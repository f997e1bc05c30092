# SPDX-License-Identifier: Apache-2.0
"""``curvature=`` takes a function: the user's own second-order weight of a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.base
from compilations import Compilations

import jboost as jb
from jboost import plotting

N = 200
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = (X[:, 0] + np.exp(X[:, 1] / 2) * RNG.normal(size=N)).astype(np.float32)
START = np.array([0.1, 0.2], np.float32)  # a search compiles for long and is not tested
SETTINGS = dict(num_scores=2, num_rounds=3, max_depth=2, init_score=START)


def normal(score, target):
    return score[1] + jnp.exp(-2 * score[1]) * (target - score[0]) ** 2 / 2


def fisher(score, target):
    del target
    return jnp.exp(-2 * score[1]), 2.0


def train(curvature, **others):
    model, history = jb.fit(X, Y, normal, curvature=curvature, **SETTINGS | others)
    return model, history


@pytest.mark.usefixtures("full_search")
def test_leaves_of_the_first_round_are_scoring_steps():
    """-rate G / (H + l2 mean), H the Fisher information: exp(-2 s1) and 2."""
    rate, l2 = 0.5, 3.0
    model, history = train(
        fisher, num_rounds=1, learning_rate=rate, l2=l2, leaf_solver="newton",
        min_child_weight=0.0,
    )  # fmt: skip
    assert history.choices["curvature"] == "function"
    center, log_scale = np.asarray(model.init_score, np.float64)
    z = (Y - center) * np.exp(-log_scale)
    gradient = np.stack([-z * np.exp(-log_scale), 1 - z**2])
    information = np.array([np.exp(-2 * log_scale), 2.0])
    leaves = np.asarray(jb.leaf_indices(model, X)).reshape(N, 2)
    for k in range(2):
        for leaf in np.unique(leaves[:, k]):
            rows = leaves[:, k] == leaf
            step = -gradient[k, rows].sum() / (information[k] * (rows.sum() + l2))
            found = model.leaf_value[0, k, leaf]
            np.testing.assert_allclose(found, rate * step, rtol=1e-4, atol=1e-6)


def test_a_matrix_counts_by_its_diagonal():
    """Off-diagonal numbers are not used: those of the Hessian give "exact"."""

    def hessian(score, target):
        return jax.hessian(normal)(score, target)

    exact, _ = train("exact")
    own, _ = train(hessian)
    jax.tree.map(np.testing.assert_array_equal, exact, own)


@pytest.mark.usefixtures("full_search")
def test_one_score_takes_a_number():
    def half(score, target):
        return 2 * jax.nn.sigmoid(score) * jax.nn.sigmoid(-score) + 0 * target

    labels = (Y > 0).astype(np.float32)
    model, _ = jb.fit(
        X, labels, jb.losses.logistic, curvature=half, num_rounds=1, max_depth=1, l2=0,
        learning_rate=1.0, leaf_solver="newton",
    )  # fmt: skip
    share = labels.mean()
    leaves = np.asarray(jb.leaf_indices(model, X)).reshape(N)
    for leaf in np.unique(leaves):
        step = (labels[leaves == leaf].mean() - share) / (2 * share * (1 - share))
        np.testing.assert_allclose(model.leaf_value[0, 0, leaf], step, rtol=1e-4)


def weigh(score, target):
    return 1 + jnp.abs(target) + 0 * score


WEIGHED = dict(curvature=weigh, num_rounds=3, max_depth=2, linear_leaves=False)


def test_every_entry_gives_the_same_trees():
    bins, loss = jb.fit_bins(X), jb.losses.squared_error
    codes, key = jb.apply_bins(bins, X), jax.random.key(0)
    model, _ = jb.fit(X, Y, loss, **WEIGHED)
    trees, _ = jb.boost(codes, Y, loss, key, **WEIGHED)
    np.testing.assert_array_equal(trees.trees.leaf_value, model.leaf_value)
    state = jb.init(codes, Y, loss, key)
    for number in range(3):
        state, tree = jb.boost_step(state, codes, Y, loss, curvature=weigh, max_depth=2)
        np.testing.assert_array_equal(tree.leaf_value, model.leaf_value[number])
    stream = jb.stream(
        jb.streams.array_batches(X, Y, batch_rows=64), bins=bins, memory=10**9
    )
    streamed, _ = jb.fit(stream, loss=loss, **WEIGHED)
    np.testing.assert_allclose(streamed.leaf_value, model.leaf_value, rtol=1e-5)


def test_cross_validation_and_sweeps():
    settings, loss = WEIGHED | dict(folds=2), jb.losses.squared_error
    curves = jb.cross_validate(X, Y, loss, **settings)
    points = dict(curvature=[settings.pop("curvature"), "auto"])
    result = jb.sweep(X, Y, loss, points, **settings)
    found = result.validation_loss[0]
    np.testing.assert_allclose(found, curves.validation_loss, rtol=1e-5)
    assert not np.allclose(result.validation_loss[1], found)


def test_estimators():
    loss = jb.losses.squared_error
    estimator = sklearn.base.clone(jb.sklearn.JBoostRegressor(loss, **WEIGHED))
    model, _ = jb.fit(X, Y, loss, **WEIGHED)
    found = estimator.fit(X, Y).predict(X)
    np.testing.assert_array_equal(found, jb.predict(model, X))


def test_equal_functions_and_other_numbers_share_programs():
    def make(factor):
        factors = jnp.asarray([factor, 2.0], jnp.float32)
        return lambda score, target: factors * jnp.exp(-2 * score[1]) + 0 * target

    first, _ = train(make(1.0))
    with Compilations() as counted:
        second, _ = train(make(1.0))
        other, _ = train(make(3.0))
    assert not counted.names
    np.testing.assert_array_equal(first.leaf_value, second.leaf_value)
    assert not np.array_equal(first.leaf_value, other.leaf_value)


def test_curvatures_can_be_mapped():
    codes = jb.apply_bins(jb.fit_bins(X), X)

    def run(factor):
        trees, _ = jb.boost(
            codes, Y, jb.losses.squared_error, jax.random.key(0),
            curvature=lambda score, target: factor * weigh(score, target),
            leaf_solver="newton", num_rounds=2, max_depth=2,
        )  # fmt: skip
        return trees.trees.leaf_value

    both = jax.vmap(run)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(both[1][0], both[0][0] / 2, rtol=1e-5)


def test_adaptive_losses_pass_their_parameters():
    def loss(score, target, scale):
        return jnp.log1p(((score - target) / scale) ** 2)

    def curvature(score, target, scale):
        return 1 / scale**2 + 0 * score * target

    def estimate(scores, targets, weights):
        return jnp.sum(weights * jnp.abs(scores - targets)) / jnp.sum(weights)

    _, history = jb.fit(
        X, Y, jb.losses.adaptive(loss, estimate), curvature=curvature, num_rounds=3,
        max_depth=2, linear_leaves=False,
    )  # fmt: skip
    assert history.train_loss[-1] < history.train_loss[0]


def test_inspection_and_pictures():
    report = jb.inspect_loss(jb.losses.squared_error, 0.5, curvature=weigh)
    np.testing.assert_allclose(report.curvature, 1.5)
    axes = plotting.loss(jb.losses.squared_error, 0.5, curvature=("auto", weigh))
    labels = [line.get_label() for line in axes[2].get_lines()]
    assert labels[:3] == ["Hessian", '"auto"', "weigh"]


def test_a_checkpoint_of_another_function_is_refused(tmp_path):
    path = tmp_path / "run.jboost"
    train(fisher, checkpoint=path)
    train(lambda s, t: fisher(s, t), checkpoint=path, num_rounds=4)  # the same
    with pytest.raises(ValueError, match=r"checkpoint .*loss"):
        train(lambda s, t: (jnp.exp(-s[1]), 2.0), checkpoint=path, num_rounds=5)


@pytest.mark.parametrize(
    ("curvature", "kind", "message"),
    [
        (lambda s, t: s[0], ValueError, r"curvature .*2 numbers.*\(2, 2\).*\(\)"),
        (lambda s, t: jnp.ones(3), ValueError, r"curvature .*2 numbers.*\(3,\)"),
        (lambda s: s, TypeError, r"curvature .*failed.*\(score, target\)"),
        (3.0, ValueError, r"curvature .*function.*3\.0"),
        ("expected", ValueError, r"curvature .*'exact'.*'expected'"),
    ],
)
def test_bad_curvatures_are_refused(curvature, kind, message):
    with pytest.raises(kind, match=message):
        train(curvature)
