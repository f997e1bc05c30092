# SPDX-License-Identifier: Apache-2.0
"""Rounds that cannot be compared, and runs without a split: never silent.

A round is never chosen by a value that is NaN or infinite, whoever compares rounds.
"""

import re
import warnings
from operator import attrgetter

import jax
import numpy as np
import pytest

import jboost as jb
from jboost.entry.importing import _OWN
from jboost.sklearn import JBoostClassifier, JBoostRanker, JBoostRegressor

RANDOM = np.random.default_rng(0)
N = 200
X = RANDOM.normal(size=(N, 3)).astype(np.float32)
Y = X[:, 0] + X[:, 1] ** 2
LABELS = (Y > 1).astype(np.int32)
QUERIES = np.repeat(np.arange(20), 10)
ONE_CLASS = X[:60], np.zeros(60, np.int32)
ALIKE = X[:60], np.full(60, 2.0, np.float32)
RUN = dict(num_rounds=4, max_depth=1, linear_leaves=False)
LOGISTIC, PAIRWISE = jb.losses.logistic, jb.losses.pairwise_logistic
FOLDS = np.arange(N) % 4


def correlation(y_true, y_pred):
    with np.errstate(all="ignore"):
        return np.corrcoef(y_true, y_pred)[0, 1]


def fit_labels(**more):
    return jb.fit(X, LABELS, LOGISTIC, validation=ONE_CLASS, **RUN, **more)


def fit_stream(**more):
    stream = jb.stream([(X, LABELS)], memory="64 MiB")
    return jb.fit(
        stream, loss=LOGISTIC, validation=ONE_CLASS, init_score=0.0, **RUN, **more
    )


def fit_again(**more):
    model, _ = jb.fit(X, LABELS, LOGISTIC, **RUN)
    return jb.fit(X, LABELS, LOGISTIC, validation=ONE_CLASS, model=model, **RUN, **more)


def fit_numbers(**more):
    metrics = dict(correlation=correlation)
    return jb.fit(X, Y, validation=ALIKE, metrics=metrics, **RUN, **more)


def fit_groups(**more):
    held_out = jb.rows(*ONE_CLASS, groups=QUERIES[:60])
    return jb.fit(
        X, LABELS, PAIRWISE, groups=QUERIES, validation=held_out, init_score=0.0,
        **RUN, **more,
    )  # fmt: skip


def fit_classifier(**more):
    return JBoostClassifier(**RUN, **more).fit(X, LABELS, eval_set=ONE_CLASS)


def fit_regressor(**more):
    metrics = dict(correlation=correlation)
    return JBoostRegressor(**RUN, metrics=metrics, **more).fit(X, Y, eval_set=ALIKE)


def fit_ranker(**more):
    held_out = jb.rows(*ONE_CLASS, groups=QUERIES[:60])
    ranker = JBoostRanker(PAIRWISE, init_score=0.0, **RUN, **more)
    return ranker.fit(X, LABELS, qid=QUERIES, eval_set=held_out)


UNDEFINED = {
    "auc": (fit_labels, "auc"),
    "stream": (fit_stream, "auc"),
    "model": (fit_again, "auc"),
    "own metric": (fit_numbers, ("correlation", "max")),
    "groups": (fit_groups, "ndcg@5"),
    "classifier": (fit_classifier, "auc"),
    "regressor": (fit_regressor, ("correlation", "max")),
    "ranker": (fit_ranker, "ndcg@5"),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_early_stopping_by_what_is_never_finite_is_refused(case):
    train, by = UNDEFINED[case]
    name = by if isinstance(by, str) else by[0]
    words = rf"by='{name}' is nan in all 2 rounds on set 'validation'.* of all 60 rows"
    with pytest.raises(jb.TrainingError, match=words) as caught:
        train(by=by, early_stopping_rounds=2)
    assert caught.value.model.num_rounds % 4 == 2
    assert caught.value.history.best_round == -1


def test_without_early_stopping_it_is_told_and_no_round_is_best():
    with pytest.warns(UserWarning, match="by='auc' is nan in all 4 rounds") as caught:
        model, history = fit_labels(by="auc")
    assert caught[0].filename == __file__
    assert model.num_rounds == 4 and history.best_round == -1
    assert np.isnan(history.best_loss) and "no best round" in repr(history)
    jb.plotting.learning_curve(history)
    # A metric that is only reported may be undefined.
    _, history = fit_labels(metrics="auc", early_stopping_rounds=2)
    assert history.best_round >= 0


@pytest.mark.parametrize("odd", [np.nan, -np.inf])
def test_rounds_of_odd_values_are_told_and_never_best(odd):
    values = [odd, 3.0, odd, 2.0, 4.0, odd, odd]
    for patience, kept in ((None, 7), (3, 4)):
        left = iter(values)

        def metric(scores, targets, weights, left=left):
            return next(left) if len(np.asarray(targets)) == 60 else 1.0

        told = r"by='metric' is .* in [34] of 7 rounds, the first of them 0"
        with pytest.warns(UserWarning, match=told):
            model, history = jb.fit(
                X, Y, validation=ALIKE, metrics=[metric], by="metric",
                early_stopping_rounds=patience, **RUN | dict(num_rounds=7),
            )  # fmt: skip
        assert history.best_round == 3 and history.best_loss == 2.0
        assert model.num_rounds == kept


@pytest.mark.parametrize("patience", [None, 2])
def test_cross_validation_by_what_is_never_finite_is_refused(patience):
    labels = np.where(FOLDS == 2, 0, LABELS)
    more = dict(folds=FOLDS, by="auc", early_stopping_rounds=patience, **RUN)
    words = r"by='auc' is nan in all .* the held-out rows of fold 2.* 50 rows are 0"
    with pytest.raises(RuntimeError, match=words):
        jb.cross_validate(X, labels, LOGISTIC, **more)
    with pytest.raises(RuntimeError, match=words):
        jb.sweep(X, labels, LOGISTIC, dict(l2=[1.0, 2.0]), **more)


def test_a_point_that_is_never_finite_is_never_best():
    def bounded(scores, targets, weights):
        scores = np.asarray(scores)
        return np.nan if np.ptp(scores) > 1 else float(np.mean((scores - targets) ** 2))

    points = dict(learning_rate=[3.0, 0.01])
    more = dict(metrics=[bounded], by="bounded", folds=3, **RUN)
    with pytest.warns(UserWarning, match=r"fold 0 of points\[0\]"):
        found = jb.sweep(X, Y, jb.losses.squared_error, points, **more)
    assert found.best == 1 and found.best_rounds[0] == -1 and found.best_round >= 0


def test_the_best_loss_is_the_value_that_rounds_are_compared_by():
    _, history = jb.fit(X, Y, **RUN)
    assert history.best_loss == history.train_loss[-1]
    sets = {"a": (X[:60], Y[:60]), "b": ALIKE}
    _, history = jb.fit(X, Y, validation=sets, **RUN)
    assert history.best_loss == history.validation_loss["a"].min()
    _, history = jb.fit(X, Y, validation=sets, by="r2", **RUN)
    assert history.best_loss == history.metrics["a"]["r2"].max()


# Runs without a split.

LIMITS = {
    "gain": (dict(min_gain=1e9), r"min_gain=1e\+09"),
    "samples": (dict(min_child_samples=101), "min_child_samples=101 .* 202 .* 200"),
    "cut samples": (dict(min_child_samples=900), "min_child_samples .* 200"),
    "weight": (dict(min_child_weight=101.0), "min_child_weight=101 .* 202 .* 200"),
    "absolute": (
        # The second derivative of (s - t)^2 is 2.
        dict(min_child_weight=201.0, regularization="absolute"),
        "min_child_weight=201 .* 402 .* 400",
    ),
    "l1": (dict(l1=1e9), r"l1=1e\+09"),
    "order statistics": (
        dict(loss=jb.losses.absolute_error, min_child_weight=101.0),
        "min_child_weight=101 .* 200",
    ),
    "logistic": (
        dict(y=LABELS, loss=LOGISTIC, min_child_weight=60.0, regularization="absolute"),
        "min_child_weight=60 .* 120",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_limits_that_allow_no_split_are_told_with_their_numbers(case):
    settings, words = LIMITS[case]
    with pytest.warns(
        UserWarning, match=f"no tree of 4 rounds has a split: .*{words}"
    ) as caught:
        model, _ = jb.fit(**dict(x=X, y=Y) | settings, **RUN)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert not np.isfinite(model.threshold).any()


def test_all_who_train_tell_of_it():
    few = dict(min_child_samples=101, **RUN)
    model, _ = jb.fit(X, Y, **RUN)
    for train in (
        lambda: fit_stream(min_child_samples=101),
        lambda: jb.fit(X, Y, model=model, **few),
        lambda: JBoostRegressor(**few).fit(X, Y),
        lambda: jb.cross_validate(X, LABELS, LOGISTIC, folds=FOLDS, **few),
        lambda: jb.sweep(X, LABELS, LOGISTIC, dict(l2=[1.0, 2.0]), folds=FOLDS, **few),
        lambda: fit_groups(min_child_samples=101),
        lambda: jb.fit(X, Y, mesh=jax.make_mesh((2,), ("rows",)), **few),
    ):
        with pytest.warns(UserWarning, match="no tree of .* min_child_samples") as told:
            train()
        assert len(told) == 1


def test_where_there_is_nothing_to_learn_limits_are_not_blamed():
    flat = np.ones((N, 2), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jb.fit(X, np.ones_like(Y), **RUN)
        jb.fit(X, np.zeros_like(LABELS), LOGISTIC, **RUN)
        jb.fit(flat, Y, **RUN)


# Two classes learned by squared error.


@pytest.mark.parametrize("labels", [(0, 1), (-1, 1), (False, True)])
def test_two_classes_hint_at_the_logistic_loss(labels):
    y = np.array(labels)[LABELS]
    with pytest.warns(UserWarning, match="losses.logistic") as caught:
        jb.fit(X, y, **RUN)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jb.fit(X, y, jb.losses.squared_error, **RUN)
        jb.fit(X, np.where(LABELS, 0.25, 7.5), **RUN)
        JBoostRegressor(**RUN).fit(X, y)


# Names of other libraries.

PLACE = r"\b(?:jb|jboost)\.([\w.]+)"


def test_unknown_attributes_name_what_there_is():
    trained = jb.fit(X, Y, **RUN)
    model, history = trained
    assert trained.model is model and trained.history is history
    for thing, name, words in (
        (model, "predict", r"jb\.predict\(model, x\)"),
        (model, "save", r"jb\.save\(model"),
        (trained, "predict", r"\(model, history\).*jb\.predict"),
        (trained, "nosuch", r"\(model, history\)"),
        (jb, "train", r"jb\.fit"),
        (jb, "cv", r"jb\.cross_validate"),
        (jb, "plot_importance", r"jb\.plotting\.importance"),
        (jb, "DMatrix", r"jb\.fit"),
        (jb, "XGBClassifier", r"jboost\.sklearn\.JBoostClassifier"),
        (jb, "trees_to_dataframe", r"jboost\.explanation\.trees_to_dataframe"),
        (JBoostClassifier(), "save_model", r"jb\.save.*model_"),
        (JBoostClassifier(), "evals_result_", "not fitted yet"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(thing, name)
        assert not hasattr(thing, name)


def test_names_of_the_hints_exist():
    places = {place for text in _OWN.values() for place in re.findall(PLACE, text)}
    assert len(places) > 20
    for place in places:
        attrgetter(place)(jb)
