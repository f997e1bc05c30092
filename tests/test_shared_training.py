# SPDX-License-Identifier: Apache-2.0
"""Training of trees that all scores share: leaves, laws, and what else fit does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse

import jboost as jb

RNG = np.random.default_rng(7)
N, K = 600, 4
X = RNG.normal(size=(N, 5)).astype(np.float32)
X[RNG.random(X.shape) < 0.05] = np.nan
LABELS = np.nan_to_num(X[:, :K]) + 0.5 * RNG.normal(size=(N, K))
LABELS = LABELS.argmax(axis=1).astype(np.int32)
TARGETS = np.stack([np.nan_to_num(X[:, 0]), np.sin(np.nan_to_num(X[:, 1]))], axis=1)
TARGETS = (TARGETS + 0.1 * RNG.normal(size=TARGETS.shape)).astype(np.float32)
SHARED = dict(share_structure=True, num_rounds=6, max_depth=3)


def half_square(score, target):
    return jnp.sum((score - target) ** 2) / 2


def train(loss=jb.losses.softmax, y=LABELS, num_scores=K, x=X, **changes):
    return jb.fit(x, y, loss, num_scores=num_scores, **SHARED | changes)[0]


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("num_scores", [3, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_leaves_solve_the_system_of_their_rows(num_scores, weighted):
    """One round of softmax, against NumPy's solution with the full Hessian."""
    scores = np.nan_to_num(X) @ RNG.normal(size=(5, num_scores))
    y = (scores + RNG.normal(size=scores.shape)).argmax(axis=1).astype(np.int32)
    weights = RNG.uniform(0.5, 2.0, N).astype(np.float32) if weighted else np.ones(N)
    model = train(
        y=y, num_scores=num_scores, num_rounds=1, learning_rate=1.0, l2=2.0,
        sample_weight=weights.astype(np.float32) if weighted else None,
    )  # fmt: skip
    start = np.asarray(model.init_score, np.float64)
    p = np.exp(start) / np.exp(start).sum()
    gradient = p - np.eye(num_scores)[y]
    hessian = np.diag(p) - np.outer(p, p)
    penalty = 2.0 * np.trace(hessian) * np.eye(num_scores)  # all compete for a row
    leaf = np.asarray(jb.leaf_indices(model, X))[:, 0]
    for number in np.unique(leaf):
        rows = leaf == number
        weight = weights[rows].sum()
        total = weights[rows] @ gradient[rows]
        step = -np.linalg.solve(weight * hessian + penalty, total)
        after = np.exp(start + step) / np.exp(start + step).sum()
        slope = weights[rows] @ (after - np.eye(num_scores)[y[rows]]) @ step
        found = np.asarray(model.leaf_value)[0, :, number]
        share = 1.0
        if slope > -total @ step / 2:  # beyond the minimum: the step is shortened
            share = (found @ step) / (step @ step)
            assert 0.1 <= share < 0.8
        np.testing.assert_allclose(found, share * step, atol=2e-3 * np.abs(step).max())


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
    """loss(Q s, t) in place of loss(s, t), with an orthogonal matrix Q."""
    angle = 0.7
    q = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    q = q.astype(np.float32)

    def rotated(score, target):
        return half_square(jnp.asarray(q) @ score, target)

    plain = train(half_square, TARGETS, 2)
    turned = train(rotated, TARGETS, 2)
    assert_same(plain.feature, turned.feature)
    assert_same(plain.threshold, turned.threshold)
    scores = np.asarray(jb.predict(turned, X)) @ q.T
    np.testing.assert_allclose(scores, jb.predict(plain, X), atol=2e-5)


@pytest.mark.parametrize("units", [(1024.0, 1024.0), (1024.0, 0.125)])
def test_units_of_the_scores_do_not_matter(units):
    units = np.array(units, np.float32)

    def scaled_loss(score, target):
        return half_square(score / units, target / units)

    plain = train(half_square, TARGETS, 2, init_score=0.0)
    scaled = train(scaled_loss, TARGETS * units, 2, init_score=0.0)
    assert_same(plain.threshold, scaled.threshold)
    values = plain.leaf_value * units[None, :, None]
    np.testing.assert_allclose(scaled.leaf_value, values, rtol=1e-6)


def test_boost_and_fit_grow_the_same_trees():
    bins = jb.fit_bins(X)
    trees, scores = jb.boost(
        jb.apply_bins(bins, X), LABELS, jb.losses.softmax, jax.random.key(0),
        num_scores=K, **SHARED,
    )  # fmt: skip
    model = train()
    assert trees.trees.feature.shape == (6, 1, 7)
    assert_same(jb.to_ensemble(trees, bins).threshold, model.threshold)
    np.testing.assert_allclose(trees.trees.leaf_value, model.leaf_value, atol=1e-6)
    np.testing.assert_allclose(scores, jb.predict(model, X), atol=1e-5)


def test_plain_xla_trains_the_same_model():
    model = train(implementation="xla")
    assert_same(model.leaf_value, train().leaf_value)


@pytest.mark.parametrize("solver", ["joint", "newton"])
def test_monotone_scores(solver):
    """Every score rises with feature 0, at any values of the others."""
    model = train(monotone={0: 1}, leaf_solver=solver, num_rounds=15)
    assert np.any(np.asarray(model.feature)[np.asarray(model.is_split)] == 0)
    rows = np.repeat(X[:40], 30, axis=0)
    rows[:, 0] = np.tile(np.linspace(-3, 3, 30, dtype=np.float32), 40)
    scores = np.asarray(jb.predict(model, rows)).reshape(40, 30, K)
    assert np.all(np.diff(scores, axis=1) >= -1e-6)


def test_values_keep_within_max_delta_step():
    model = train(max_delta_step=0.3, learning_rate=0.5, l1=0.01)
    assert np.abs(model.leaf_value).max() <= 0.15
    assert np.abs(model.leaf_value).max() > 0.14


def test_continued_training_is_training():
    first = train(num_rounds=3)
    both, _ = jb.fit(
        X, LABELS, jb.losses.softmax, num_scores=K, model=first,
        **SHARED | dict(num_rounds=3),
    )  # fmt: skip
    assert_same(both.leaf_value, train().leaf_value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(subsample=0.5), dict(candidates="local"), dict(max_leaves=4),
        dict(curvature="unit"), dict(regularization="absolute"),
        dict(x=sparse.csr_matrix(np.nan_to_num(X)), absent="zero"),
        dict(x=(np.nan_to_num(X) * 3 + 20).astype(np.int64), categorical=[0, 1]),
    ],
    ids=["bag", "local", "leaves", "unit", "absolute", "sparse", "categories"],
)  # fmt: skip
def test_settings_meet_shared_trees(changes):
    """The loss of held-out rows falls well below that of the start."""
    rows = changes.get("x", X)
    model = train(**changes | dict(x=rows[:400]), y=LABELS[:400], num_rounds=20)
    assert model.shares_structure
    scores = jb.predict(model, rows[400:])
    losses = jax.vmap(jb.losses.softmax)(scores, LABELS[400:])
    assert np.mean(losses) < 0.85 * np.log(K)


def test_losses_of_piecewise_lines_take_quantiles():
    levels = jnp.array([0.1, 0.5, 0.9])

    def pinball(score, target):
        error = target - score
        return jnp.sum(jnp.maximum(levels * error, (levels - 1) * error))

    model = train(pinball, TARGETS[:, 0], 3, num_rounds=40)
    below = np.mean(TARGETS[:, :1] < np.asarray(jb.predict(model, X)), axis=0)
    np.testing.assert_allclose(below, levels, atol=0.06)


def test_derivatives_of_training():
    bins = jb.fit_bins(X)
    codes = jb.apply_bins(bins, X)

    def last_loss(learning_rate, solver):
        _, scores = jb.boost(
            codes, TARGETS, half_square, jax.random.key(0), num_scores=2,
            learning_rate=learning_rate, leaf_solver=solver,
            **SHARED | dict(num_rounds=2),
        )  # fmt: skip
        return jnp.mean(jax.vmap(half_square)(scores, jnp.asarray(TARGETS)))

    slope = jax.grad(last_loss)(0.3, "newton")
    ends = [last_loss(0.3 + move, "newton") for move in (0.01, -0.01)]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 0.02, rtol=1e-2)
    with pytest.raises(NotImplementedError, match="share_structure=False"):
        jax.grad(last_loss)(0.3, "joint")


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_bad_values_are_named(value):
    with pytest.raises(
        (TypeError, ValueError), match="share_structure must be 'auto', True or False"
    ):
        train(share_structure=value)


def test_joint_leaves_need_something_to_join():
    with pytest.raises(ValueError, match="leaf_solver"):
        train(share_structure=False, leaf_solver="joint")


def test_auto_is_decided_by_scores_and_rates():
    """Programs that are mapped over learning rates do not know their sum."""
    bins = jb.fit_bins(X)
    binned = jb.apply_bins(bins, X)

    def boost(rate, **changes):
        settings = dict(num_scores=K, num_rounds=2, max_depth=2) | changes
        trees, _ = jb.boost(
            binned, LABELS, jb.losses.softmax, jax.random.key(0),
            learning_rate=rate, **settings,
        )  # fmt: skip
        return jb.to_ensemble(trees, bins)

    assert boost(15.0).shares_structure and not boost(14.0).shares_structure
    assert not jax.jit(boost)(jnp.float32(15)).shares_structure
    rates = jnp.array([0.1, 0.3], jnp.float32)
    models = jax.vmap(lambda rate: boost(rate, share_structure=True))(rates)
    for number, rate in enumerate(rates):
        one = boost(rate, share_structure=True)
        mapped = jax.tree.map(lambda array, n=number: array[n], models)
        np.testing.assert_allclose(
            jb.predict(mapped, X), jb.predict(one, X), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["missing class", "constant", "few weights"])
def test_odd_tables_are_trained_on(kind):
    """Scores are finite; those of rows that look alike are the same."""
    weights = np.ones(N, np.float32)
    if kind == "few weights":
        weights[10:] = 0
    x = np.ones_like(X) if kind == "constant" else X
    classes = K + 1 if kind == "missing class" else K
    model = train(x=x, num_scores=classes, sample_weight=weights)
    scores = np.asarray(jb.predict(model, x))
    assert model.shares_structure and np.isfinite(scores).all()
    if kind == "missing class":
        assert (scores.argmax(axis=1) < K).all()
    if kind == "constant":
        assert (scores == scores[0]).all()


def test_units_of_targets_do_not_shape_the_trees():
    """Squared error of targets in other units: the same splits, the same fit."""
    units = np.array([1e-6, 1e5], np.float32)
    plain = train(half_square, TARGETS, 2, init_score=0.0)
    other = train(half_square, TARGETS * units, 2, init_score=0.0)
    assert_same(plain.threshold, other.threshold)
    values = np.asarray(other.leaf_value) / units[None, :, None]
    np.testing.assert_allclose(values, plain.leaf_value, atol=1e-5)


def test_auto_goes_on_as_the_run_that_it_continues(tmp_path):
    settings = dict(num_scores=K, max_depth=2, max_bins=16)

    def run(num_rounds, **changes):
        return jb.fit(
            X, LABELS, jb.losses.softmax, num_rounds=num_rounds, **settings | changes
        )

    path = tmp_path / "run"
    first, _ = run(4, checkpoint=path)
    assert not first.shares_structure
    more, history = run(6, checkpoint=path, learning_rate=lambda number: 0.1)
    assert more.num_rounds == 6 and not history.choices["share_structure"]
    shared = train(num_rounds=3)
    both, history = run(3, model=shared)
    assert both.shares_structure and history.choices["share_structure"]


def test_auto_keeps_separate_targets_separate():
    targets = np.concatenate([TARGETS, TARGETS[:, :1]], axis=1)
    _, history = jb.fit(X, targets, num_rounds=1, learning_rate=lambda number: 40.0)
    assert not history.choices["share_structure"]
    _, history = jb.fit(
        X, LABELS, jb.losses.softmax, num_scores=K, num_rounds=1,
        learning_rate=lambda number: 40.0,
    )  # fmt: skip
    assert history.choices["share_structure"]
