# SPDX-License-Identifier: Apache-2.0
"""A table has the columns of training, whatever their labels are."""

import datetime
import io
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from tables import SMALL, make_regression, same_bits

import jboost as jb
from jboost import plotting
from jboost.sklearn import (
    JBoostClassifier,
    JBoostDistribution,
    JBoostRanker,
    JBoostRegressor,
)

X, Y = make_regression()
START = dict(num_rounds=0, init_score=0.0)  # columns are compared before trees are
DAYS = pd.date_range("2026-01-01", periods=3)
# {labels: (those of training, then those of tables that have other columns)}.
LABELS = {
    "default": ([0, 1, 2], [[2, 1, 0], [1, 2, 3], ["0", "2", "1"], [0.0, 2.0, 1.0]]),
    "integers": ([1, 2, 4], [[1, 4, 2], [0, 1, 2], [1, 2, 3], ["a", "b", "c"]]),
    "tuples": ([("a", 1), ("a", 2), ("b", 1)], [[("a", 1), ("b", 1), ("a", 2)]]),
    "dates": ([*DAYS], [[*DAYS[::-1]], [*(DAYS + pd.Timedelta("1D"))]]),
    "floats": ([0.5, 1.5, 2.5], [[0.5, 2.5, 1.5], [0, 1, 2]]),
    "strings": (["a", "b", "c"], [["a", "c", "b"], [1, 2, 3]]),
}


def label(labels):
    """Returns X as a table; tuples become a MultiIndex."""
    return pd.DataFrame(X, columns=pd.Index(labels))


def estimate(kind, train, table):
    y = Y > 0 if kind is JBoostClassifier else Y
    return kind(**START).fit(train, y).predict(table)


def rank(train, table):
    queries = np.repeat(np.arange(20), 10)
    ranker = JBoostRanker(**START).fit(train, np.arange(len(X)) % 3, qid=queries)
    return ranker.predict(table)


def make_stream(*tables):
    return jb.stream([(table, Y) for table in tables], memory="1 MiB")


# {entry point: call(model, the table of training, a table to read)}.
CALLS = {
    "predict": lambda m, _, t: jb.predict(m, t),
    "staged": lambda m, _, t: jb.staged_predict(m, t),
    "leaves": lambda m, _, t: jb.leaf_indices(m, t),
    "shap": lambda m, _, t: jb.shap_values(m, t),
    "interactions": lambda m, _, t: jb.explanation.shap_interactions(m, t),
    "swarm": lambda m, _, t: plotting.shap_summary(m, t),
    "dependence": lambda m, _, t: jb.partial_dependence(m, t, 0),
    "curves": lambda m, _, t: plotting.partial_dependence(m, t, 0),
    "permutation": lambda m, _, t: jb.explanation.permutation_importance(m, t, Y),
    "matrix": lambda m, _, t: jb.interchange.to_matrix(m, t),
    "refit": lambda m, _, t: jb.refit(m, t, Y),
    "refine": lambda m, _, t: jb.refine(m, t, Y),
    "refine set": lambda m, a, t: jb.refine(m, a, Y, validation=(t, Y)),
    "continued": lambda m, _, t: jb.fit(t, Y, model=m, **SMALL),
    "set": lambda m, a, t: jb.fit(a, Y, validation=(t, Y), **SMALL),
    "stream": lambda m, a, t: jb.predict(m, make_stream(a, t)),
    "batch": lambda m, a, t: jb.fit(make_stream(a, t), **SMALL),
    "stream set": lambda m, a, t: jb.fit(make_stream(a), validation=(t, Y), **SMALL),
    "stream continued": lambda m, a, t: jb.fit(make_stream(t), model=m, **SMALL),
    "tree": lambda m, a, t: jb.predict(jb.cart.fit_tree(a, Y, max_depth=2), t),
    "saved": lambda m, _, t: jb.predict(save_and_load(m), t),
    "truncated": lambda m, _, t: jb.predict(jb.truncate(m, 1), t),
    "regressor": lambda m, a, t: estimate(JBoostRegressor, a, t),
    "classifier": lambda m, a, t: estimate(JBoostClassifier, a, t),
    "distribution": lambda m, a, t: estimate(JBoostDistribution, a, t),
    "ranker": lambda m, a, t: rank(a, t),
    "eval set": lambda m, a, t: JBoostRegressor(**SMALL).fit(a, Y, eval_set=(t, Y)),
}


ESTIMATORS = ("regressor", "classifier", "distribution", "ranker")


def save_and_load(model):
    file = io.BytesIO()
    jb.save(model, file)
    file.seek(0)
    return jb.load(file)


@pytest.fixture(scope="module")
def models():
    return {
        name: jb.fit(label(labels), Y, **SMALL)[0]
        for name, (labels, _) in LABELS.items()
    }


@pytest.mark.filterwarnings("ignore:X has feature names, but")  # of scikit-learn
@pytest.mark.parametrize("call", CALLS)
def test_other_columns_are_refused_everywhere(models, call):
    for name in LABELS if call in ("predict", "continued") else ("default", "tuples"):
        labels, others = LABELS[name]
        # An estimator is fitted for each: one table with other columns is enough.
        for other in others[: 1 if call in ESTIMATORS else None]:
            with pytest.raises(
                ValueError, match=r"columns of (training|the model)|feature names"
            ):
                CALLS[call](models[name], label(labels), label(other))


@pytest.mark.parametrize("name", LABELS)
def test_the_columns_of_training_and_matrices_are_taken(models, name):
    labels, _ = LABELS[name]
    model, table = models[name], label(labels)
    scores = jb.predict(jb.fit(X, Y, **SMALL)[0], X)
    names = None if name == "default" else tuple(map(str, labels))
    assert model.feature_names == names
    assert jb.feature_importance(model).names == (names or ("0", "1", "2"))
    for rows in (table, X, pd.concat([table] * 30)):  # small and larger tables
        np.testing.assert_array_equal(jb.predict(model, rows)[: len(X)], scores)
    both, _ = jb.fit(table, Y, model=model, **SMALL)
    same_bits(both, jb.fit(X, Y, model=model, **SMALL)[0])
    assert both.feature_names == names
    np.testing.assert_array_equal(jb.predict(save_and_load(model), table), scores)
    regressor = JBoostRegressor(**SMALL).fit(table, Y)
    np.testing.assert_array_equal(regressor.predict(table), scores)
    assert hasattr(regressor, "feature_names_in_") == (name == "strings")


def test_a_table_with_the_labels_of_a_matrix_is_one(models):
    scores = jb.predict(models["strings"], X)
    np.testing.assert_array_equal(
        jb.predict(models["strings"], pd.DataFrame(X)), scores
    )
    for name in ("strings", "tuples", "dates"):  # a model without names takes names
        table = label(LABELS[name][0])
        np.testing.assert_array_equal(jb.predict(models["default"], table), scores)


def test_a_part_of_the_columns(models):
    table = pd.DataFrame(X)
    part = table.drop(columns=0)
    model, _ = jb.fit(part, Y, **SMALL)
    assert jb.feature_importance(model).names == ("1", "2")
    with pytest.raises(ValueError, match=r"lacks \['2'\].*additional columns \['0'\]"):
        jb.predict(model, table[[0, 1]])
    np.testing.assert_array_equal(jb.predict(model, part), jb.predict(model, X[:, 1:]))
    with pytest.raises(ValueError, match=r"lacks \['0'\]"):
        jb.predict(models["default"], part)


def test_bins_know_no_names_and_take_any():
    part = pd.DataFrame(X).drop(columns=0)
    codes = jb.apply_bins(jb.fit_bins(part), part)
    np.testing.assert_array_equal(codes, jb.apply_bins(jb.fit_bins(part), X[:, 1:]))


# Features in calls.

DAY = datetime.datetime(2026, 1, 1)


@pytest.mark.parametrize(
    ("name", "feature", "index"),
    [
        ("default", 1, 1), ("default", np.int64(2), 2),
        ("integers", "2", 1), ("integers", 0, 0), ("integers", 4.0, 2),
        ("tuples", ("a", 2), 1), ("tuples", 2, 2), ("tuples", "('b', 1)", 2),
        ("dates", DAYS[1], 1), ("dates", DAY, 0), ("floats", 1.5, 1),
        ("strings", "b", 1), ("strings", 1, 1),
    ],
)  # fmt: skip
def test_features_are_found_by_label_name_and_index(models, name, feature, index):
    table, run = label(LABELS[name][0]), dict(num_rounds=1, max_depth=2)
    for given, plain in (
        (dict(monotone={feature: 1}), dict(monotone={index: 1})),
        (dict(interactions=[[feature]]), dict(interactions=[[index]])),
    ):
        model, _ = jb.fit(table, Y, **given, **run)
        same_bits(replace(model, feature_names=None), jb.fit(X, Y, **plain, **run)[0])
    grid = dict(grid=[0.0, 1.0])
    found = jb.partial_dependence(models[name], table, feature, **grid)
    plain = jb.partial_dependence(models["default"], X, index, **grid)
    np.testing.assert_array_equal(found.average, plain.average)


INTEGERS, ORDER = label([1, 2, 4]), "'1' for column 0.*, or '2' for the column at index"
UNKNOWN = {
    "both": (INTEGERS, 1, ORDER),
    "label only": (INTEGERS, 4, "'4' for column 2, which has this label$"),
    "neither": (INTEGERS, 5, "from 0 to 2, or by name, one of .'1', '2', '4'.*got 5"),
    "typo": (label(["bmi", "age", "sex"]), "BIM", "got 'BIM'; did you mean 'bmi'?"),
    "far": (label(["bmi", "age", "sex"]), "pressure", "got 'pressure'$"),
    "matrix": (X, "bmi", "from 0 to 2, got 'bmi'$"),
    "tuple": (label([("a", 1), ("a", 2), ("b", 1)]), ("a", 3), "got .'a', 3"),
    "date": (label(DAYS), DAY - datetime.timedelta(1), "by name.*got datetime"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_feature_that_is_unknown_or_ambiguous_is_a_value_error(name):
    table, feature, message = UNKNOWN[name]
    model, _ = jb.fit(table, Y, num_rounds=1, max_depth=3)
    for call in (
        partial(jb.fit, table, Y, monotone={feature: 1}),
        partial(jb.fit, table, Y, interactions=[[feature]]),
        partial(jb.fit, table, Y, categorical=[feature]),
        partial(jb.fit_bins, table, categorical=[feature]),
        partial(jb.cross_validate, table, Y, monotone={feature: 1}),
        partial(JBoostRegressor(monotone={feature: 1}).fit, table, Y),
        partial(jb.partial_dependence, model, table, [feature]),
        partial(plotting.partial_dependence, model, table, [feature]),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Labels that cannot be names, and tables that have none.


def test_labels_that_are_no_names_are_refused():
    for labels, error, message in (
        (["a", 1, 2], TypeError, "only string column names|string names"),
        ([DAY, str, "a"], TypeError, "only string column names|string names"),
        ([1, 1.0, 2], ValueError, "unique|differ as strings"),
        ([True, ("a",), ("a",)], ValueError, "unique"),
    ):
        table = pd.DataFrame(X, columns=pd.Index(labels, dtype=object))
        for call in (
            partial(jb.fit, table, Y),
            partial(jb.cart.fit_tree, table, Y),
            partial(JBoostRegressor().fit, table, Y),
            partial(jb.fit, X, Y, validation=(table, Y), **SMALL),
        ):
            with pytest.raises(error, match=message):
                call()


@pytest.mark.parametrize(
    ("column", "hint"),
    [
        (X[:, 0], "ndarray of shape (200,); pass one column as values.reshape"),
        (jax.numpy.asarray(X[:, 0]), "values.reshape"),
        (pd.Series(X[:, 0]), "Series of shape (200,); pass one column as table[["),
        (X[:, 0].tolist(), "list of shape (200,); pass"),
        (X[None], "ndarray of shape (1, 200, 3)"),
    ],
)
def test_a_single_column_is_no_table(column, hint):
    for call in (jb.fit, jb.cross_validate, jb.cart.fit_tree):
        with pytest.raises(ValueError, match=r"^x must be 2-D") as caught:
            call(column, Y)
        assert hint in str(caught.value)


def test_objects_are_read_alike_everywhere():
    objects = X.astype(object)
    objects[3, 1], gap = None, X.copy()
    gap[3, 1] = np.nan
    model, _ = jb.fit(gap, Y, **SMALL)
    scores = jb.predict(model, gap)
    for rows in (objects, objects.tolist()):
        same_bits(jb.fit(rows, Y, validation=(rows, Y), **SMALL)[0], model)
        np.testing.assert_array_equal(jb.predict(model, rows), scores)
        regressor = JBoostRegressor(**SMALL).fit(rows, Y, eval_set=(rows, Y))
        np.testing.assert_array_equal(regressor.predict(rows), scores)
    objects[3, 1] = "1.5"
    for call in (
        partial(jb.fit, objects, Y),
        partial(jb.fit, X, Y, validation=(objects, Y)),
        partial(jb.predict, model, objects),
        partial(JBoostRegressor(**SMALL).fit, objects, Y),
        partial(JBoostRegressor(**SMALL).fit, X, Y, eval_set=(objects, Y)),
    ):
        with pytest.raises(TypeError, match=r"[xX] must hold only numbers or only"):
            call()


def test_a_set_cannot_have_the_name_of_the_training_rows():
    with pytest.raises(ValueError, match="'train', by which the history calls"):
        jb.fit(X, Y, validation={"train": (X, Y)})
