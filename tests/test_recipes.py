# SPDX-License-Identifier: Apache-2.0
"""Each recipe grows the trees of a literal NumPy transcription of its algorithm.

Columns have fewer distinct values than bins, so that all thresholds are tried. Rows
have weights, or signs and classes would gain the same by many cuts; that no best cut is
close to another one (``lead``) is tested, too. Scores are float32 and of size one: both
agree to TOLERANCE.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from scipy import optimize
from scipy.special import logsumexp
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

import jboost as jb
from jboost.numerics.random import derive_seeds, sample

ROWS, ROUNDS, RATE, DEPTH, SEED = 80, 5, 0.3, 2, 3
TOLERANCE = 2e-5
LEAST_LEAD = 1e-5  # ten times what float32 makes of a gain
SIZES = dict(num_rounds=ROUNDS, max_depth=DEPTH, seed=SEED)


def make_table(seed=0):
    """Columns, targets with outliers, targets 0 and 1, classes 0 to 2."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    latent = np.sin(2 * x[:, 0]) + x[:, 1] * (x[:, 2] > 0)
    y = (latent + 0.3 * rng.standard_t(2, ROWS)).astype(np.float32)
    noisy = latent + rng.normal(size=ROWS)
    return x, y, (noisy > 0).astype(int), np.digitize(noisy, [-0.8, 0.8])


X, Y, BINARY, CLASSES = make_table()
WEIGHTS = np.random.default_rng(7).uniform(0.2, 2, ROWS).astype(np.float32)
EXACT = Y.astype(np.float64)


def bags_of(subsample, weights, num_scores):
    """The rows of each round's bag: a round uses 1 + K seeds, the first for rows."""
    words = jnp.array([0, SEED], jnp.uint32)
    uses = (num_scores + 1) * jnp.arange(ROUNDS, dtype=jnp.int32)
    eligible = jnp.asarray(weights > 0)
    draw = jax.vmap(lambda seed: sample(seed, eligible, jnp.float32(subsample)))
    return np.asarray(draw(derive_seeds(words, uses)))


def plan(subsample=1.0, weights=WEIGHTS, num_scores=1):
    bags = bags_of(subsample, weights, num_scores)
    return references.Plan(RATE, DEPTH, bags)


def train(recipe, y, **settings):
    """The model, its history, and the scores of every round."""
    given = dict(learning_rate=RATE, sample_weight=WEIGHTS) | SIZES
    model, history = jb.fit(X, y, **(given | recipe | settings))
    return model, history, np.asarray(jb.staged_predict(model, X))


def compare(model, stages, expected, rows=slice(None)):
    """Same leaves, same scores, and no tie near."""
    assert expected.lead > LEAST_LEAD
    leaves = np.asarray(jb.leaf_indices(model, X)).reshape(ROWS, ROUNDS, -1)
    leaves = np.moveaxis(leaves, 0, 2)
    np.testing.assert_array_equal(leaves[..., rows], expected.leaves[..., rows])
    np.testing.assert_allclose(
        stages[:, rows], expected.scores[:, rows], atol=TOLERANCE
    )


PEER = dict(
    n_estimators=ROUNDS, learning_rate=RATE, max_depth=DEPTH, random_state=0
)  # fmt: skip


def peer_stages(peer, y, scores="predict"):
    peer.fit(X, y, sample_weight=WEIGHTS)
    stages = getattr(peer, f"staged_{scores}")(X)
    return np.array([np.squeeze(stage) for stage in stages])


@pytest.mark.parametrize(
    ("recipe", "reference", "loss"),
    [
        (jb.recipes.ls_tree_boost(), references.ls_tree_boost, "squared_error"),
        (jb.recipes.lad_tree_boost(), references.lad_tree_boost, "absolute_error"),
        (
            jb.recipes.m_tree_boost(alpha=0.8),
            lambda *a: references.m_tree_boost(*a, 0.8),
            "huber",
        ),
    ],
)
def test_regression(recipe, reference, loss):
    model, history, stages = train(recipe, Y)
    compare(model, stages, reference(X, EXACT, WEIGHTS, plan()))
    assert history.oob_improvement is None
    peer = GradientBoostingRegressor(loss=loss, alpha=0.8, **PEER)
    if loss == "absolute_error":  # from the median, where its sign of zero is -1
        peer.set_params(init="zero")
        *_, stages = train(recipe, Y, init_score=0.0)
    np.testing.assert_allclose(stages, peer_stages(peer, EXACT), atol=TOLERANCE)


def test_functional_gradient_descent():
    """Unit curvature, Newton leaves: trees fitted to -g by least squares, G / n."""

    def respond(scores):
        return BINARY - 1 / (1 + np.exp(-scores))

    def mean_response(scores, rows):
        return np.average(respond(scores)[rows], weights=WEIGHTS[rows])

    recipe = dict(jb.recipes.l2_tree_boost(), leaf_solver="newton", init_score=0.25)
    model, _, stages = train(recipe, BINARY)
    expected = references.tree_boost(X, WEIGHTS, 0.25, respond, mean_response, plan())
    compare(model, stages, expected)


def test_huber_of_mostly_equal_targets():
    """delta is the least |r| above 0, and 1 if all targets are equal."""
    y = np.where(np.arange(ROWS) % 20 == 0, Y, 0)
    model, _, stages = train(jb.recipes.m_tree_boost(alpha=0.8), y)
    expected = references.m_tree_boost(X, y.astype(float), WEIGHTS, plan(), 0.8)
    compare(model, stages, expected)
    assert stages.any()
    _, _, stages = train(jb.recipes.m_tree_boost(alpha=0.8), 0 * Y)
    assert not stages.any()


def test_binomial():
    """Friedman's F is half the log-odds."""
    model, _, stages = train(jb.recipes.l2_tree_boost(), BINARY)
    expected = references.l2_tree_boost(X, BINARY, WEIGHTS, plan())
    compare(model, stages, expected._replace(scores=2 * expected.scores))
    peer = peer_stages(GradientBoostingClassifier(**PEER), BINARY, "decision_function")
    np.testing.assert_allclose(stages, peer, atol=TOLERANCE)


@pytest.mark.parametrize("rate", [RATE, lambda number: RATE])
def test_multinomial(rate):
    recipe = jb.recipes.l2_tree_boost_multiclass(3, learning_rate=rate)
    model, _, stages = train(recipe, CLASSES)
    expected = references.l2_tree_boost_multiclass(X, CLASSES, 3, WEIGHTS, plan())
    compare(model, stages, expected)
    peer = GradientBoostingClassifier(init="zero", **PEER)
    peer = peer_stages(peer, CLASSES, "decision_function")
    np.testing.assert_allclose(stages, peer, atol=TOLERANCE)


def test_one_multiplier_per_tree_of_squared_error():
    """The general search finds the closed form sum w r f / sum w f^2."""

    def closed_form(scores, values, rows):
        residual, f, w = EXACT[rows] - scores[rows], values[rows], WEIGHTS[rows]
        return np.sum(w * residual * f) / np.sum(w * f**2)

    model, _, stages = train(jb.recipes.gradient_boost(jb.losses.squared_error), Y)
    expected, rhos = references.gradient_boost(
        X, WEIGHTS, np.average(EXACT, weights=WEIGHTS),
        lambda scores: 2 * (EXACT - scores), closed_form, plan(),
    )  # fmt: skip
    compare(model, stages, expected)
    np.testing.assert_allclose(rhos, 0.5)  # -g is twice the residual


def huber(residual, delta=0.5):
    size = abs(residual)
    return np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))


def test_one_multiplier_per_tree_of_huber():
    """The tree's own values are its means of -g: a Newton step is another tree."""

    def respond(scores):
        return np.clip(EXACT - scores, -0.5, 0.5)

    def search(scores, values, rows):
        def total(rho):
            residual = EXACT[rows] - scores[rows] - rho * values[rows]
            return WEIGHTS[rows] @ huber(residual)

        return optimize.minimize_scalar(total, tol=1e-12).x

    def total(c):
        return WEIGHTS @ huber(EXACT - c)

    start = optimize.minimize_scalar(total, tol=1e-12).x

    def loss(score, target):
        return jb.losses.huber(score, target, delta=0.5)

    model, _, stages = train(jb.recipes.gradient_boost(loss), Y)
    expected, rhos = references.gradient_boost(
        X, WEIGHTS, start, respond, search, plan()
    )
    assert min(rhos) > 1.2
    compare(model, stages, expected)


def test_xgboost():
    def derivatives(scores):
        p = 1 / (1 + np.exp(-scores))
        return p - BINARY, p * (1 - p)

    limits = references.Limits(l2=2.0, min_gain=0.3, min_child_weight=1.7)
    recipe = jb.recipes.xgboost(
        jb.losses.logistic, base_score=0.2, l2=2.0, min_gain=0.3, min_child_weight=1.7
    )
    model, _, stages = train(recipe, BINARY)
    expected = references.xgboost(X, WEIGHTS, 0.2, derivatives, limits, plan())
    compare(model, stages, expected)


def compare_improvement(model, history, stages, losses, weights, bags):
    """oob_improvement is the drop of the mean loss of the rows out of the bag.

    Args:
      losses: scores [R, N] or [R, N, K] -> [R, N], in NumPy.
    """
    start = np.broadcast_to(model.init_score, stages[:1].shape)
    drop = -np.diff(losses(np.concatenate([start, stages]).astype(np.float64)), axis=0)
    expected = [
        np.average(values[~bag], weights=weights[~bag])
        for values, bag in zip(drop, bags, strict=True)
    ]
    np.testing.assert_allclose(history.oob_improvement, expected, atol=TOLERANCE)
    assert np.ptp(expected) > 100 * TOLERANCE


def test_stochastic_squared_error():
    recipe = jb.recipes.stochastic(jb.recipes.ls_tree_boost())
    model, history, stages = train(recipe, Y)
    chosen = plan(0.5)
    assert np.all(chosen.bags.sum(axis=1) == ROWS // 2)
    compare(model, stages, references.ls_tree_boost(X, EXACT, WEIGHTS, chosen))
    compare_improvement(
        model, history, stages, lambda scores: (scores - EXACT) ** 2, WEIGHTS,
        chosen.bags,
    )  # fmt: skip


@pytest.mark.parametrize("report", ["first", "current"])
def test_stochastic_huber(report):
    """Rows of no weight are out of every bag, but do not count."""
    weights = np.where(np.arange(ROWS) % 10 == 0, 0, WEIGHTS)
    recipe = jb.recipes.stochastic(jb.recipes.m_tree_boost(alpha=0.8), subsample=0.4)
    recipe["loss"] = recipe["loss"]._replace(report=report)
    model, history, stages = train(recipe, Y, sample_weight=weights)
    chosen = plan(0.4, weights)
    expected = references.m_tree_boost(X, EXACT, weights, chosen, 0.8)
    # Rows without weight make no thresholds in fit, but in the reference.
    compare(model, stages, expected, weights > 0)

    def losses(scores):
        deltas = [references.upper_size(EXACT - s, weights, 0.8) for s in scores]
        reported = deltas if report == "current" else deltas[:1]
        return huber(scores - EXACT, np.array(reported)[:, None])

    compare_improvement(model, history, stages, losses, weights, chosen.bags)


def test_stochastic_multinomial():
    recipe = jb.recipes.l2_tree_boost_multiclass(3, learning_rate=RATE)
    model, history, stages = train(jb.recipes.stochastic(recipe), CLASSES)
    chosen = plan(0.5, num_scores=3)
    expected = references.l2_tree_boost_multiclass(X, CLASSES, 3, WEIGHTS, chosen)
    compare(model, stages, expected)

    def losses(scores):
        chosen = np.take_along_axis(scores, CLASSES[None, :, None], 2)[..., 0]
        return logsumexp(scores, axis=2) - chosen

    compare_improvement(model, history, stages, losses, WEIGHTS, chosen.bags)


def test_improvement_of_many_rounds_and_of_a_stopped_run():
    """Chunks of rounds fit together, and every history is as long as its rounds."""
    recipe = jb.recipes.stochastic(jb.recipes.ls_tree_boost())
    _, history, _ = train(recipe, Y, num_rounds=20)
    lengths = []

    def watch(number, so_far, model):
        lengths.append(len(so_far.oob_improvement))
        return number == 17

    _, stopped, _ = train(recipe, Y, num_rounds=20, callbacks=watch)
    assert lengths == list(range(1, 19))
    np.testing.assert_array_equal(stopped.oob_improvement, history.oob_improvement[:18])
    assert "oob_improvement" in repr(history)


def test_a_recipe_serves_boost_as_well():
    _, scores = jb.boost(
        jb.apply_bins(jb.fit_bins(X), X), Y, key=jax.random.key(SEED),
        num_rounds=ROUNDS, max_depth=DEPTH, learning_rate=RATE, sample_weight=WEIGHTS,
        **jb.recipes.m_tree_boost(),
    )  # fmt: skip
    expected = references.m_tree_boost(X, EXACT, WEIGHTS, plan(), alpha=0.9)
    np.testing.assert_allclose(scores, expected.scores[-1], atol=TOLERANCE)


def test_median_start():
    """Of targets less offset, for every score; for a quadratic loss as well."""
    offset = np.random.default_rng(5).normal(size=(ROWS, 2)).astype(np.float32)
    targets = np.stack([Y, 2 * Y + 1], axis=1)

    def loss(score, target):
        return jnp.sum(jnp.square(score - target))

    model, _ = jb.fit(
        X, targets, loss, init_score="median", offset=offset, num_scores=2,
        sample_weight=WEIGHTS, num_rounds=0,
    )  # fmt: skip
    residual = targets.astype(np.float64) - offset
    expected = [references.median(r, WEIGHTS) for r in residual.T]
    np.testing.assert_allclose(model.init_score, expected, atol=TOLERANCE)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: jb.recipes.m_tree_boost(alpha=1.0), r"alpha .* got 1\.0$"),
    (lambda: jb.recipes.l2_tree_boost_multiclass(1), r"num_classes .* got 1$"),
    (
        lambda: jb.recipes.l2_tree_boost_multiclass(3, learning_rate=0),
        r"learning_rate .* got 0$",
    ),
    (lambda: jb.recipes.stochastic({}, subsample=1.5), r"subsample .* got 1\.5$"),
])  # fmt: skip
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
