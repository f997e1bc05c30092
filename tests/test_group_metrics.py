# SPDX-License-Identifier: Apache-2.0
"""Metrics of groups equal those of scikit-learn, or double loops."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as peers

import jboost as jb

M = jb.metrics
SIZE = 23
RANDOM = np.random.default_rng(0)
RELEVANCE = RANDOM.integers(0, 4, SIZE).astype(np.float32)
SCORES = {
    "distinct": RANDOM.normal(size=SIZE).astype(np.float32),
    "tied": RANDOM.integers(0, 5, SIZE).astype(np.float32),
    "equal": np.zeros(SIZE, np.float32),
}
TIMES = dict(
    time=RANDOM.integers(0, 12, SIZE).astype(np.float32),
    event=RANDOM.integers(0, 3, SIZE).astype(np.float32),
)
WEIGHTS = RANDOM.integers(0, 4, SIZE).astype(np.float32)
CASES = {
    "ndcg": (M.ndcg, RELEVANCE),
    "ndcg@5": (partial(M.ndcg, at=5), RELEVANCE),
    "map": (M.mean_average_precision, RELEVANCE),
    "map@5": (partial(M.mean_average_precision, at=5), RELEVANCE),
    "mrr": (M.mrr, RELEVANCE),
    "mrr@2": (partial(M.mrr, at=2), RELEVANCE),
    "concordance": (M.concordance_index, TIMES),
}
parametrize = pytest.mark.parametrize("kind", SCORES)


# One program for each shape, whatever partial names the metric.
compiled = cache(lambda function, **options: jax.jit(partial(function, **options)))


def measure(metric, scores, targets, **options):
    bound = compiled(getattr(metric, "func", metric), **getattr(metric, "keywords", {}))
    found = bound(scores, targets, **options)
    assert found.dtype == np.float32 and found.shape == ()
    return float(found)


@parametrize
@pytest.mark.parametrize("at", [1, 5, None, 99])
def test_ndcg(kind, at):
    found = measure(partial(M.ndcg, at=at), SCORES[kind], RELEVANCE)
    expected = peers.ndcg_score([2**RELEVANCE - 1], [SCORES[kind]], k=at)
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


@parametrize
def test_mean_average_precision(kind):
    found = measure(M.mean_average_precision, SCORES[kind], RELEVANCE)
    expected = peers.average_precision_score(RELEVANCE > 0, SCORES[kind])
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


@parametrize
@pytest.mark.parametrize("at", [1, 5])
def test_ranks_of_relevant_documents(kind, at):
    scores = SCORES[kind]
    hit = RELEVANCE > 2
    rank = np.array([(scores >= score).sum() for score in scores])
    hits = np.array([(hit & (scores >= score)).sum() for score in scores])
    counted = hit & (rank <= at)
    expected = (hits / rank)[counted].sum() / min(hit.sum(), at)
    found = measure(partial(M.mean_average_precision, at=at), scores, hit)
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    best = rank[hit].min()
    expected = 1 / best if best <= at else 0.0
    found = measure(partial(M.mrr, at=at), scores, hit)
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def concordance_by_hand(scores, time, event, weights):
    value = total = 0.0
    for i, j in np.ndindex(len(scores), len(scores)):
        before = time[i] < time[j] or (time[i] == time[j] and not event[j])
        if event[i] and before:
            right = (scores[j] < scores[i]) + 0.5 * (scores[j] == scores[i])
            value += weights[i] * weights[j] * right
            total += weights[i] * weights[j]
    return value / total if total else np.nan


@parametrize
@pytest.mark.parametrize("size", [2, 5, 16, SIZE])
def test_concordance(kind, size):
    case = (SCORES[kind], TIMES["time"], TIMES["event"], WEIGHTS)
    scores, time, event, weights = (array[-size:] for array in case)
    expected = concordance_by_hand(scores, time, event, weights)
    targets = dict(time=time, event=event)
    found = measure(M.concordance_index, scores, targets, weights=weights)
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_concordance_of_many_rows():
    """Exactly known: a fraction of scores is in order, the others are tied."""
    size = 20_000
    time = np.random.default_rng(1).permutation(size).astype(np.float32)
    scores = np.maximum(-time, -size // 2).astype(np.float32)
    targets = dict(time=time, event=np.ones(size, np.float32))
    tied = (scores == scores.min()).sum()
    expected = 1 - tied * (tied - 1) / (size * (size - 1)) / 2
    found = measure(M.concordance_index, scores, targets)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_masked_rows_change_nothing(name):
    metric, targets = CASES[name]
    scores = SCORES["tied"]
    where = RANDOM.random(SIZE) < 0.6
    expected = measure(metric, scores[where], jax.tree.map(lambda t: t[where], targets))
    garbage = np.where(where, scores, np.float32(1e30))
    assert measure(metric, garbage, targets, where=where) == pytest.approx(expected)
    weights = where.astype(np.float32)
    assert measure(metric, garbage, targets, weights=weights) == pytest.approx(expected)
    mapped = jax.jit(jax.vmap(lambda s, w: metric(s, targets, where=w)))
    pair = mapped(np.stack([garbage] * 2), np.stack([where, ~where]))
    assert float(pair[0]) == pytest.approx(expected)


@pytest.mark.parametrize("name", CASES)
def test_groups_without_comparisons_are_nan(name):
    metric, targets = CASES[name]
    nothing = jax.tree.map(np.zeros_like, targets)
    assert np.isnan(measure(metric, SCORES["tied"], nothing))
    nobody = np.zeros(SIZE, bool)
    assert np.isnan(measure(metric, SCORES["tied"], targets, where=nobody))


def test_the_order_of_the_rows_does_not_matter():
    order = RANDOM.permutation(SIZE)
    for metric, targets in CASES.values():
        moved = jax.tree.map(lambda t: t[order], targets)
        expected = measure(metric, SCORES["tied"], targets)
        found = measure(metric, SCORES["tied"][order], moved)
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_depths_are_checked():
    for metric in (M.ndcg, M.mean_average_precision, M.mrr, jb.losses.lambda_rank):
        with pytest.raises(ValueError, match=r"at .* got 0"):
            metric(jnp.zeros(2), jnp.zeros(2), at=0)
        with pytest.raises(TypeError, match=r"at .* got 2.5"):
            metric(jnp.zeros(2), jnp.zeros(2), at=2.5)


@pytest.mark.parametrize("bad", [-1, 101, np.nan])
def test_relevances_without_a_gain_are_refused(bad):
    targets = np.array([bad, 0, 2])
    with pytest.raises(ValueError, match=r"from 0 to 100, .* in row 0"):
        M.ndcg([1.0, 2, 3], targets)
    assert M.ndcg([1.0, 2, 3], targets, where=np.array([False, True, True])) == 1


@pytest.mark.parametrize("name", CASES)
def test_scores_and_shapes_are_checked(name):
    metric, targets = CASES[name]
    with pytest.raises(ValueError, match=r"\(23,\), .*\(1,\)"):
        metric(SCORES["tied"], jax.tree.map(lambda t: t[:1], targets))
    with pytest.raises(ValueError, match=r"\(1, 23\)"):
        metric(SCORES["tied"][None], targets)
    with pytest.raises(ValueError, match="NaN, got it in row 0"):
        metric(np.full(SIZE, np.nan), jax.tree.map(np.zeros_like, targets))


def test_times_of_concordance_are_checked():
    with pytest.raises(ValueError, match=r"\['time'\] must not be NaN.* row 1"):
        M.concordance_index([1.0, 2], dict(time=[1.0, np.nan], event=[1, 1]))
    with pytest.raises(ValueError, match="got 2 in row 0"):
        M.concordance_index([1.0, 2], dict(time=[1.0, 2], event=[2, 1]))


def test_every_metric_is_tested():
    tested = {getattr(metric, "func", metric) for metric, _ in CASES.values()}
    assert tested == {*M.GROUP_METRICS.values()}
