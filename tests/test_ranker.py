"""JBoostRanker, against fit(groups=) and with scikit-learn's tools."""

import numpy as np
import pytest
import sklearn
from sklearn.metrics import ndcg_score
from sklearn.model_selection import GroupKFold, cross_validate
from tables import FULL, ROWS, make_columns

import jboost as jb
from jboost.sklearn import JBoostRanker

SIMPLE = dict(max_depth=2, max_bins=16, linear_leaves=False, init_score=0.0, **FULL)
SMALL = dict(num_rounds=8, **SIMPLE)
RNG = np.random.default_rng(0)
QUERIES = np.repeat(np.arange(20), 10)
X = make_columns()
Y = np.digitize(X[:, 0] + 0.5 * RNG.normal(size=ROWS), [-0.5, 0.5, 1.5])
PAIR = dict(eval_set=[(X, Y), (X, Y)])


def test_fit_is_fit_with_groups():
    order = RNG.permutation(ROWS)
    model, _ = jb.fit(
        X[order], Y[order], jb.losses.listwise_softmax, groups=QUERIES[order], **SMALL
    )
    ranker = JBoostRanker(**SMALL).fit(X[order], Y[order], qid=QUERIES[order])
    np.testing.assert_array_equal(ranker.predict(X), jb.predict(model, X))
    sizes = np.full(20, 10)
    grouped = JBoostRanker(**SMALL).fit(X, Y, group=sizes)
    named = JBoostRanker(**SMALL).fit(X, Y, qid=QUERIES)
    np.testing.assert_array_equal(grouped.predict(X), named.predict(X))


def test_score_is_the_mean_ndcg():
    ranker = JBoostRanker("listwise_softmax", **SMALL).fit(X, Y, qid=QUERIES)
    scores = ranker.predict(X).reshape(20, 10)
    gains = (2.0**Y - 1).reshape(20, 10)
    relevant = gains.max(axis=1) > 0
    expected = ndcg_score(gains[relevant], scores[relevant])
    assert ranker.score(X, Y, qid=QUERIES) == pytest.approx(expected, abs=1e-5)


def test_weights_may_be_those_of_queries():
    by_query = RNG.integers(0, 3, 20).astype(np.float64)
    shuffled = RNG.permutation(20)[QUERIES]  # another order of names
    one, other = (
        JBoostRanker(**SMALL).fit(X, Y, sample_weight=weights, qid=shuffled)
        for weights in (by_query, np.repeat(by_query, 10))
    )
    np.testing.assert_array_equal(one.predict(X), other.predict(X))


def test_early_stopping_holds_whole_queries_out():
    settings = dict(num_rounds=60, early_stopping_rounds=4, **SIMPLE)
    ranker = JBoostRanker(**settings, metrics=["ndcg@3"], by="ndcg@3")
    ranker.fit(X, Y, qid=QUERIES)
    values = ranker.evals_result_["validation"]["ndcg@3"]
    assert len(values) < 60 and ranker.best_iteration_ == np.argmax(values)
    other = JBoostRanker(**settings, metrics=["ndcg@3"], by="ndcg@3").fit(
        X, Y, qid=QUERIES, eval_set=[(X, Y), (X, Y)], eval_qid=[QUERIES, QUERIES]
    )
    curves = other.evals_result_
    np.testing.assert_array_equal(
        curves["validation_0"]["ndcg@3"], curves["train"]["ndcg@3"]
    )


def test_queries_are_routed():
    with sklearn.config_context(enable_metadata_routing=True):
        ranker = JBoostRanker(**SMALL).set_fit_request(qid=True)
        ranker.set_score_request(qid=True)
        found = cross_validate(
            ranker, X, Y, cv=GroupKFold(2), params=dict(qid=QUERIES, groups=QUERIES)
        )
    assert (found["test_score"] > 0.7).all()


@pytest.mark.parametrize(
    "given, name",
    [
        ({}, "qid"),
        (dict(qid=QUERIES, group=[ROWS]), "both"),
        (dict(group=[3, 4]), "sum to the 200 rows"),
        (dict(group=[-1, 201]), "integers >= 1"),
        (dict(qid=QUERIES, sample_weight=np.ones(7)), "sample_weight"),
        (dict(qid=QUERIES, eval_set=[(X, Y)]), "eval_qid"),
        (dict(qid=QUERIES[1:]), "^qid .* 200 rows, got 199"),
        (dict(qid=np.where(QUERIES > 3, None, QUERIES)), "^qid .* got None in row 40"),
        (dict(qid=QUERIES, eval_qid=QUERIES), "eval_qid must be None without eval_set"),
        (dict(qid=QUERIES, **PAIR, eval_qid=[QUERIES]), "eval_qid .* 2 sets .* got 1"),
        (dict(qid=QUERIES, **PAIR, eval_qid={"a": QUERIES}), "eval_qid .* got dict"),
        (dict(qid=QUERIES, eval_set=[(X, Y)], eval_qid=QUERIES), "eval_qid .*ndarray"),
        (
            dict(qid=QUERIES, eval_set=(X, Y), eval_qid=[QUERIES]),
            r"eval_qid .*\(1, 200",
        ),
        (
            dict(qid=QUERIES, eval_set={"v": (X, Y)}, eval_group={"w": [ROWS]}),
            r"eval_group .*\['v'\], got \['w'\]",
        ),
    ],
)
def test_bad_queries_are_refused(given, name):
    with pytest.raises(ValueError, match=name):
        JBoostRanker(**SMALL).fit(X, Y, **given)


@pytest.mark.parametrize(
    "loss, hint",
    [
        ("cox", "times and events"),
        ("concordance", "times and events"),
        ("squared_error", "of one row; use JBoostRegressor"),
        ("rank:ndcg", "did you mean 'lambda_rank'"),
        ("nothing like it", "got 'nothing like it'; losses are 'pairwise_logistic', "),
    ],
)
def test_unknown_losses_are_explained(loss, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        JBoostRanker(loss).fit(X, Y, qid=QUERIES)
    assert str(caught.value).count("'xendcg'") <= 1


def test_early_stopping_needs_two_queries():
    ranker = JBoostRanker(**SMALL, early_stopping_rounds=2)
    with pytest.raises(ValueError, match="too few groups"):
        ranker.fit(X, Y, group=[ROWS])


@pytest.mark.parametrize(
    "given, name",
    [
        (dict(qid=QUERIES[1:]), "^qid .* 200 rows, got 199"),
        (dict(qid=QUERIES, sample_weight=np.arange(ROWS) % 3), "same in all rows"),
        (
            dict(qid=QUERIES, sample_weight=np.arange(ROWS) - 1.0),
            "sample_weight .*>= 0",
        ),
    ],
)
def test_score_checks_queries_and_weights(given, name):
    ranker = JBoostRanker(**SMALL).fit(X, Y, qid=QUERIES)
    with pytest.raises(ValueError, match=name):
        ranker.score(X, Y, **given)
