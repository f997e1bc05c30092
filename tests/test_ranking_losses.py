# SPDX-License-Identifier: Apache-2.0
"""Ranking losses equal double loops in float64; lambdas equal those of the peers."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import lightgbm
import numpy as np
import pytest
import xgboost

import jboost as jb
from jboost.losses import ranking

L = jb.losses
SIZE = 12
RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=SIZE).astype(np.float32)
RELEVANCE = RANDOM.integers(0, 4, SIZE).astype(np.float32)
PAIRS = [(i, j) for i in range(SIZE) for j in range(SIZE)]


def log_softmax(s):
    return s - np.log(np.exp(s).sum())


def pairwise_by_hand(s, y):
    return sum(np.log1p(np.exp(s[j] - s[i])) for i, j in PAIRS if y[i] > y[j])


def softmax_by_hand(s, y):
    gain = 2.0**y - 1
    return -(gain / gain.sum() * log_softmax(s)).sum()


def list_mle_by_hand(s, y):
    """Efron: an equal document that came before counts in part."""
    value = 0.0
    for level in np.unique(y):
        equal = y == level
        for count in range(equal.sum()):
            part = np.where(equal, 1 - count / equal.sum(), y < level)
            value += np.log((part * np.exp(s)).sum())
    return value - s.sum()


def approx_ndcg_by_hand(s, y):
    gain = 2.0**y - 1
    z = (s[None] - s[:, None]) / 0.1
    rank = 0.5 + (1 / (1 + np.exp(-z))).sum(1)
    ideal = (np.sort(gain)[::-1] / np.log2(2 + np.arange(SIZE))).sum()
    return 1 - (gain / np.log2(1 + rank)).sum() / ideal


def lambdas_by_hand(s, y, at, normalize):
    """The gradient, pair by pair, as the peers compute it."""
    gain, rank = 2.0**y - 1, np.empty(len(s), int)
    rank[np.argsort(-s, kind="stable")] = np.arange(len(s))
    discount = 1 / np.log2(2 + rank)
    ideal = (np.sort(gain)[::-1] / np.log2(2 + np.arange(len(s))))[:at].sum()
    gradient, total = np.zeros(len(s)), 0.0
    for i, j in itertools.product(range(len(s)), repeat=2):
        if y[i] > y[j] and min(rank[i], rank[j]) < at:
            change = abs((gain[i] - gain[j]) * (discount[i] - discount[j])) / ideal
            if normalize in ("scores", "both") and s.min() < s.max():
                change /= 0.01 + abs(s[i] - s[j])
            slope = change / (1 + np.exp(s[i] - s[j]))
            gradient[i] -= slope
            gradient[j] += slope
            total += 2 * slope
    if normalize in ("sum", "both") and total > 0:
        gradient *= np.log2(1 + total) / total
    return gradient


def differentiate(function, s, step=1e-5):
    return np.array([
        (function(s + step * unit) - function(s - step * unit)) / (2 * step)
        for unit in np.eye(len(s))
    ])  # fmt: skip


@pytest.mark.parametrize(("loss", "by_hand", "tolerance"), [
    (L.pairwise_logistic, pairwise_by_hand, 1e-5),
    (L.listwise_softmax, softmax_by_hand, 1e-6),
    (L.list_mle, list_mle_by_hand, 1e-5),
    (L.approx_ndcg, approx_ndcg_by_hand, 1e-5),
])  # fmt: skip
def test_values_and_gradients(loss, by_hand, tolerance):
    found, gradient = jax.jit(jax.value_and_grad(loss))(SCORES, jnp.asarray(RELEVANCE))
    exact = partial(by_hand, y=RELEVANCE.astype(np.float64))
    scores = SCORES.astype(np.float64)
    np.testing.assert_allclose(found, exact(scores), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, differentiate(exact, scores), atol=tolerance)


def test_list_mle_without_ties_is_the_likelihood_of_a_permutation():
    order = np.argsort(-SCORES)
    relevance = jnp.arange(SIZE, 0, -1, dtype=jnp.float32)
    scores = SCORES.astype(np.float64)[order]
    expected = -sum(log_softmax(scores[i:])[0] for i in range(SIZE))
    found = jax.jit(L.list_mle)(jnp.asarray(SCORES[order]), relevance)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("at", "normalize"), [(3, "none"), (None, "scores"), (None, "sum"), (3, "both")]
)
def test_lambdas(at, normalize):
    loss = partial(L.lambda_rank, at=at, normalize=normalize)
    gradient = jax.jit(jax.grad(loss))(SCORES, jnp.asarray(RELEVANCE))
    scores, relevance = SCORES.astype(np.float64), RELEVANCE.astype(np.float64)
    expected = lambdas_by_hand(scores, relevance, at or SIZE, normalize)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("counted", [0, SIZE])
def test_lambdas_of_equal_scores_follow_the_rows(counted, monkeypatch):
    monkeypatch.setattr(ranking, "_COUNTED", counted)  # ranks by sorting, by counting
    slope = jax.jit(jax.grad(partial(L.lambda_rank, normalize="both")))
    gradient = slope(jnp.zeros(SIZE), jnp.asarray(RELEVANCE))
    expected = lambdas_by_hand(np.zeros(SIZE), RELEVANCE, SIZE, "both")
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_words_of_lambda_rank():
    with pytest.raises(ValueError, match="most"):
        L.lambda_rank(SCORES, RELEVANCE, normalize="most")
    with pytest.raises(ValueError, match="0"):
        L.lambda_rank(SCORES, RELEVANCE, at=0)


GROUPS = [8, 8, 8]  # one shape: one program
QUERY = np.repeat(np.arange(3), GROUPS)
FEATURE = np.arange(24, dtype=np.float32)[:, None]


def find_lambdas(scores, relevance, **options):
    loss = jax.jit(jax.grad(partial(L.lambda_rank, **options)))
    parts = [
        loss(scores[q == QUERY], jnp.asarray(relevance[q == QUERY])) for q in range(3)
    ]
    return np.concatenate(parts)


def make_queries():
    random = np.random.default_rng(3)
    relevance = random.integers(0, 4, 24).astype(np.float32)
    return jnp.asarray(random.normal(size=24), jnp.float32), jnp.asarray(relevance)


@pytest.mark.parametrize(("norm", "normalize"), [(True, "both"), (False, "none")])
def test_lambdas_are_those_of_lightgbm(norm, normalize):
    """Its leaves hold -gradient / Hessian, and sums of Hessians.

    It looks sigmoids up in a table, whose steps are 1e-4 wide.
    """
    scores, relevance = make_queries()
    data = lightgbm.Dataset(
        FEATURE, np.asarray(relevance), group=GROUPS,
        init_score=np.asarray(scores, float),
        params=dict(min_data_in_bin=1, verbose=-1),
    )  # fmt: skip
    options = dict(
        objective="lambdarank", lambdarank_truncation_level=4, lambdarank_norm=norm,
        num_leaves=24, min_data_in_leaf=1, min_sum_hessian_in_leaf=0, learning_rate=1.0,
        verbose=-1,
    )  # fmt: skip
    booster = lightgbm.train(options, data, 1)
    table = booster.trees_to_dataframe().set_index("node_index")
    leaves = booster.predict(FEATURE, pred_leaf=True).ravel()
    own = find_lambdas(scores, relevance, at=4, normalize=normalize)
    for leaf in np.unique(leaves):
        row = table.loc[f"0-L{leaf}"]
        slope = -row["value"] * row["weight"]
        np.testing.assert_allclose(own[leaves == leaf].sum(), slope, atol=2e-4)
    assert len(np.unique(leaves)) > 12


@pytest.mark.parametrize(("words", "normalize"), [
    ((True, True), "both"), ((True, False), "scores"), ((False, True), "sum"),
])  # fmt: skip
def test_lambdas_are_those_of_xgboost(words, normalize):
    scores, relevance = make_queries()
    data = xgboost.DMatrix(
        FEATURE, np.asarray(relevance), qid=QUERY, base_margin=np.asarray(scores)
    )
    options = dict(
        objective="rank:ndcg", lambdarank_num_pair_per_sample=4, eta=1.0, max_depth=24,
        lambdarank_pair_method="topk", min_child_weight=0, reg_lambda=0, base_score=0,
        tree_method="exact", lambdarank_score_normalization=words[0],
        lambdarank_normalization=words[1],
    )  # fmt: skip
    booster = xgboost.train(options, data, 1)
    table = booster.trees_to_dataframe().set_index("Node")
    leaves = booster.predict(data, pred_leaf=True).ravel()
    own = find_lambdas(scores, relevance, at=4, normalize=normalize)
    for leaf in np.unique(leaves):
        slope = -table.loc[leaf, "Gain"] * table.loc[leaf, "Cover"]
        np.testing.assert_allclose(own[leaves == leaf].sum(), slope, atol=1e-5)
    assert len(np.unique(leaves)) > 12


def test_xendcg_has_new_labels_for_each_key():
    """Its mean over many draws is the cross-entropy to mean shares."""
    keys = jax.random.split(jax.random.key(0), 4000)
    targets = jnp.asarray(RELEVANCE)
    draw = jax.vmap(jax.grad(lambda s, key: L.xendcg(s, targets, key=key)), (None, 0))
    gradients = np.asarray(jax.jit(draw)(SCORES, keys))
    assert len(np.unique(gradients[:, 0])) > 3000
    drawn = 2.0**RELEVANCE - np.random.default_rng(1).random((4000, SIZE))
    shares = (drawn / drawn.sum(1, keepdims=True)).mean(0)
    expected = np.exp(log_softmax(SCORES.astype(np.float64))) - shares
    np.testing.assert_allclose(gradients.mean(0), expected, atol=2e-3)


def test_bag_of_one_row_is_logistic():
    for target in (0.0, 1.0):
        for score in (-30.0, -1.0, 0.5, 30.0):
            one = L.bag(jnp.array([score]), jnp.array([target]))
            expected = L.logistic(score, target)
            np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("positive", [False, True])
def test_bag(positive):
    def by_hand(s):
        negative = np.prod(1 / (1 + np.exp(s)))
        return -np.log(1 - negative if positive else negative)

    targets = jnp.zeros(SIZE).at[3].set(float(positive))
    found, gradient = jax.value_and_grad(L.bag)(jnp.asarray(SCORES), targets)
    scores = SCORES.astype(np.float64)
    np.testing.assert_allclose(found, by_hand(scores), rtol=1e-5)
    np.testing.assert_allclose(gradient, differentiate(by_hand, scores), atol=1e-5)
