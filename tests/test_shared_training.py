# SPDX-License-Identifier: Apache-2.0
"""Training of trees that all scores share: leaves, laws, and what else fit does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import sparse
from tables import Classes

import jboost as jb
from jboost.boosting.auto import decide_sharing
from jboost.boosting.settings import FitSettings, read_settings
from jboost.objective.tracing import trace_loss

RNG = np.random.default_rng(7)
N, K = 200, 3
X = RNG.normal(size=(N, K)).astype(np.float32)
X[RNG.random(X.shape) < 0.05] = np.nan
LABELS = np.nan_to_num(X) + 0.5 * RNG.normal(size=(N, K))
LABELS = LABELS.argmax(axis=1).astype(np.int32)
TARGETS = np.nan_to_num(X)
TARGETS[:, 1:] = np.sin(TARGETS[:, 1:])
TARGETS = (TARGETS + 0.1 * RNG.normal(size=TARGETS.shape)).astype(np.float32)
SHARED = dict(share_structure=True, num_rounds=6, max_depth=2)


def half_square(score, target):
    return jnp.sum((score - target) ** 2) / 2


def train(loss=jb.losses.softmax, y=LABELS, num_scores=K, x=X, **changes):
    """Starts in given scores: a search for them compiles for long."""
    given = dict(num_scores=num_scores, init_score=np.linspace(-0.4, 0.4, num_scores))
    return jb.fit(x, y, loss, **given | SHARED | changes)[0]


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.usefixtures("full_search")
def test_leaves_solve_the_system_of_their_rows():
    """One round of softmax, against NumPy's solution with the full Hessian."""
    weights = RNG.uniform(0.5, 2.0, N).astype(np.float32)
    model = train(num_rounds=1, learning_rate=1.0, l2=2.0, sample_weight=weights)
    start = np.asarray(model.init_score, np.float64)
    p = np.exp(start) / np.exp(start).sum()
    gradient = p - np.eye(K)[LABELS]
    hessian = np.diag(p) - np.outer(p, p)
    penalty = 2.0 * np.trace(hessian) * np.eye(K)  # all compete for a row
    leaf = np.asarray(jb.leaf_indices(model, X))[:, 0]
    for number in np.unique(leaf):
        rows = leaf == number
        weight = weights[rows].sum()
        total = weights[rows] @ gradient[rows]
        step = -np.linalg.solve(weight * hessian + penalty, total)
        after = np.exp(start + step) / np.exp(start + step).sum()
        slope = weights[rows] @ (after - np.eye(K)[LABELS[rows]]) @ step
        found = np.asarray(model.leaf_value)[0, :, number]
        share = 1.0
        if slope > -total @ step / 2:  # beyond the minimum: the step is shortened
            share = (found @ step) / (step @ step)
            assert 0.1 <= share < 0.8
        np.testing.assert_allclose(found, share * step, atol=2e-3 * np.abs(step).max())


@pytest.mark.usefixtures("full_search")
def test_newton_leaves_take_the_diagonal():
    model = train(num_rounds=1, learning_rate=1.0, l2=2.0, leaf_solver="newton")
    sums = model.sums
    expected = -sums.gradient / (sums.curvature + sums.l2[..., None])
    np.testing.assert_allclose(model.leaf_value, expected, rtol=1e-6, atol=1e-9)


def test_one_score_shares_nothing():
    y = TARGETS[:, 0]
    models = [
        jb.fit(X, y, **SHARED | dict(share_structure=s))[0] for s in (True, False)
    ]
    assert_same(*models)


def test_rotated_scores_give_the_rotated_model():
    """loss(Q s, t) in place of loss(s, t), with an orthogonal matrix Q.

    Float32 rounds Q'Q to a matrix that is almost, but not quite, diagonal.
    """
    square = np.random.default_rng(3).normal(size=(K, K))
    q = np.linalg.qr(square)[0].astype(np.float32)
    settings = dict(init_score=0.0, linear_leaves=True)

    def rotated(score, target):
        return half_square(jnp.asarray(q) @ score, target)

    plain = train(half_square, TARGETS, **settings)
    turned = train(rotated, TARGETS, **settings)
    assert_same(plain.feature, turned.feature)
    assert_same(plain.threshold, turned.threshold)
    scores = np.asarray(jb.predict(turned, X)) @ q.T
    np.testing.assert_allclose(scores, jb.predict(plain, X), atol=2e-5)


def test_units_of_the_scores_do_not_matter():
    units = np.array([1024.0, 0.125, 1.0], np.float32)

    def scaled_loss(score, target):
        return half_square(score / units, target / units)

    plain = train(half_square, TARGETS, init_score=0.0)
    scaled = train(scaled_loss, TARGETS * units, init_score=0.0)
    assert_same(plain.threshold, scaled.threshold)
    values = plain.leaf_value * units[None, :, None]
    np.testing.assert_allclose(scaled.leaf_value, values, rtol=1e-6)


@pytest.mark.parametrize(
    ("solver", "candidates"), [("joint", "global"), ("newton", "local")]
)
def test_monotone_scores(solver, candidates):
    """Every score rises with feature 0, at any values of the others."""
    model = train(monotone={0: 1}, leaf_solver=solver, candidates=candidates)
    assert np.any(np.asarray(model.feature)[np.asarray(model.is_split)] == 0)
    rows = np.repeat(X[:40], 30, axis=0)
    rows[:, 0] = np.tile(np.linspace(-3, 3, 30, dtype=np.float32), 40)
    scores = np.asarray(jb.predict(model, rows)).reshape(40, 30, K)
    assert np.all(np.diff(scores, axis=1) >= -1e-6)


def test_values_keep_within_max_delta_step():
    model = train(max_delta_step=0.3, learning_rate=0.5, l1=0.01)
    assert np.abs(model.leaf_value).max() <= 0.15
    assert np.abs(model.leaf_value).max() > 0.14


@pytest.mark.parametrize(
    "changes",
    [
        dict(
            x=sparse.csr_matrix(np.nan_to_num(X)), absent="zero", curvature="unit",
        ),
        dict(
            x=(np.nan_to_num(X) * 3 + 20).astype(np.int64), categorical=[0, 1],
            regularization="absolute", subsample=0.5, max_leaves=4, max_depth=3,
        ),
    ],
    ids=["sparse, unit", "bag, leaves, categories, absolute"],
)  # fmt: skip
def test_settings_meet_shared_trees(changes):
    """The loss of held-out rows falls well below that of the start."""
    rows = changes.get("x", X)
    model = train(**changes | dict(x=rows[:150]), y=LABELS[:150], num_rounds=20)
    assert model.shares_structure
    scores = jb.predict(model, rows[150:])
    losses = jax.jit(jax.vmap(jb.losses.softmax))(scores, LABELS[150:])
    assert np.mean(losses) < 0.85 * np.log(K)


def test_losses_of_piecewise_lines_take_quantiles():
    levels = jnp.array([0.1, 0.5, 0.9])

    def pinball(score, target):
        error = target - score
        return jnp.sum(jnp.maximum(levels * error, (levels - 1) * error))

    model = train(pinball, TARGETS[:, 0], num_rounds=15, learning_rate=0.3)
    below = np.mean(TARGETS[:, :1] < np.asarray(jb.predict(model, X)), axis=0)
    np.testing.assert_allclose(below, levels, atol=0.06)


def test_boost_and_its_derivatives():
    """The loss moves with the rate."""
    codes = jb.apply_bins(jb.fit_bins(X), X)
    given = dict(init_score=0.0, num_rounds=2, max_depth=1)

    def last_loss(learning_rate, solver):
        _, scores = jb.boost(
            codes, TARGETS, half_square, jax.random.key(0), num_scores=K,
            learning_rate=learning_rate, leaf_solver=solver, **SHARED | given,
        )  # fmt: skip
        return jnp.mean(jax.vmap(half_square)(scores, jnp.asarray(TARGETS)))

    def derive(rate, solver):
        return jax.jvp(lambda rate: last_loss(rate, solver), (rate,), (1.0,))

    once = jax.jit(derive, static_argnums=1)
    (low, start), (high, end) = (once(rate, "newton") for rate in (0.29, 0.31))
    np.testing.assert_allclose((start + end) / 2, (high - low) / 0.02, rtol=1e-2)
    with pytest.raises(NotImplementedError, match="share_structure=False"):
        derive(0.3, "joint")


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_bad_values_are_named(value):
    with pytest.raises(
        (TypeError, ValueError), match="share_structure must be 'auto', True or False"
    ):
        train(share_structure=value)


def test_joint_leaves_need_something_to_join():
    with pytest.raises(ValueError, match="leaf_solver"):
        train(share_structure=False, leaf_solver="joint")


def test_auto_is_decided_by_scores_rates_and_loss():
    """Programs of traced learning rates do not know their sum.

    A shared tree would serve a location, a scale and a weight badly, and targets with
    losses of their own. The leaves of a likelihood are weighted score by score.
    """
    binned = jb.apply_bins(jb.fit_bins(X), X)

    def boost(rate):
        return jb.boost(
            binned, LABELS, jb.losses.softmax, jax.random.key(0), num_scores=K,
            init_score=0.0, num_rounds=2, max_depth=1, learning_rate=rate,
        )[0]  # fmt: skip

    def decide(rate, loss, y=LABELS):
        given = dict(num_rounds=2, learning_rate=rate, num_scores=K)
        settings = read_settings(given, FitSettings)
        return decide_sharing(settings, trace_loss(loss, y, K)[0])

    def formula(score, target):
        away = jnp.asarray(target, jnp.float32) - score[0]
        ratio = away * jnp.exp(-score[1])
        return jax.nn.softplus(score[2]) * ratio**2 + score[1] - score[2]

    trees = jax.eval_shape(boost, jnp.float32(15))
    assert trees.trees.feature.shape[1] == K
    assert decide(15.0, jb.losses.softmax) and not decide(14.0, jb.losses.softmax)
    for loss in (formula, jb.losses.likelihood(Classes)):
        assert not decide(15.0, loss)
    separate = jb.losses.sum_targets(jb.losses.squared_error)
    assert not decide(15.0, separate, TARGETS)


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("kind", ["missing class", "constant", "few weights"])
def test_odd_tables_are_trained_on(kind):
    """Scores are finite; those of rows that look alike are the same."""
    weights = np.ones(N, np.float32)
    if kind == "few weights":
        weights[10:] = 0
    x = np.ones_like(X) if kind == "constant" else X
    y = LABELS % (K - 1) if kind == "missing class" else LABELS
    model = train(x=x, y=y, sample_weight=weights, init_score="auto")
    scores = np.asarray(jb.predict(model, x))
    assert model.shares_structure and np.isfinite(scores).all()
    if kind == "missing class":
        assert (scores.argmax(axis=1) < K - 1).all()
    if kind == "constant":
        assert (scores == scores[0]).all()


def test_units_of_targets_do_not_shape_the_trees():
    """Squared error of targets in other units: the same splits, the same fit."""
    units = np.array([1e-6, 1e5, 1.0], np.float32)
    plain = train(half_square, TARGETS, init_score=0.0)
    other = train(half_square, TARGETS * units, init_score=0.0)
    assert_same(plain.threshold, other.threshold)
    values = np.asarray(other.leaf_value) / units[None, :, None]
    np.testing.assert_allclose(values, plain.leaf_value, atol=1e-5)


def test_auto_goes_on_as_the_run_that_it_continues(tmp_path):
    def run(num_rounds, **changes):
        start = {} if "model" in changes else dict(init_score=0.0)
        return jb.fit(
            X, LABELS, jb.losses.softmax, num_scores=K, max_depth=2,
            num_rounds=num_rounds, **start, **changes,
        )  # fmt: skip

    path = tmp_path / "run"
    first, _ = run(4, checkpoint=path)
    assert not first.shares_structure
    more, history = run(6, checkpoint=path, learning_rate=lambda number: 0.1)
    assert more.num_rounds == 6 and not history.choices["share_structure"]
    shared = train(num_rounds=3)
    both, history = run(3, model=shared)
    assert both.shares_structure and history.choices["share_structure"]


def test_auto_adds_up_the_rates_of_a_schedule():
    schedule = dict(num_rounds=1, learning_rate=lambda number: 40.0)
    assert train(share_structure="auto", **schedule).shares_structure


def smooth(score, target):
    return optax.softmax_cross_entropy(
        score, optax.smooth_labels(jax.nn.one_hot(target, K), 0.1)
    )


@pytest.mark.parametrize(("loss", "shares"), [
    (jb.losses.softmax, True),
    (lambda s, t: jax.nn.logsumexp(s) - s[t], True),
    (lambda s, t: -jnp.take(jax.nn.log_softmax(s), t), True),
    (lambda s, t: -jnp.log(jax.nn.softmax(s)[t]), True),
    (lambda s, t: -((1 - jax.nn.softmax(s)[t]) ** 2) * jax.nn.log_softmax(s)[t], True),
    (lambda s, t: jax.nn.relu(jnp.max(s - s[t])), True),
    (optax.softmax_cross_entropy_with_integer_labels, True),
    (smooth, True),
    (lambda s, t: jax.nn.logsumexp(s) - s[t] + 0.01 * jnp.sum(s**2), False),
    (lambda s, t: jax.nn.logsumexp(s) - 2 * s[t], False),
    (lambda s, t: jnp.sum(s**2) - s[t], False),
    (lambda s, t: jnp.exp(-jnp.sum(s)) + jnp.max(s) - s[t], False),
])  # fmt: skip
def test_losses_of_differences_are_known(loss, shares):
    """Scores that all grow by one number have the same loss, in any words."""
    traced, _ = trace_loss(loss, LABELS, K)
    assert traced.of_differences == shares
    scores = RNG.normal(size=K).astype(np.float32)
    change = loss(scores + 1.5, 1) - loss(scores, 1)
    assert (abs(float(change)) < 1e-5) == shares
