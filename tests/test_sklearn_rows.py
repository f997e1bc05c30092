# SPDX-License-Identifier: Apache-2.0
"""Rows given to the estimators: each length is checked, each container is read alike.

The tables go over all estimators, methods and arguments, so that a new one is in them.
"""

import inspect
import itertools
import re
from functools import cache

import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tables import ROWS, make_regression

import jboost as jb
from jboost.sklearn import (
    JBoostClassifier,
    JBoostDistribution,
    JBoostRanker,
    JBoostRegressor,
)

X, Y = make_regression()
FEW = dict(num_rounds=2, max_depth=3)
STOPPING = dict(FEW, early_stopping_rounds=2)
QUERIES = np.arange(ROWS) // 10
LEVELS = np.digitize(Y, [0.5, 1.5])
# {name: (estimator, targets, number of scores, other arguments of fit and score)}
CASES = {
    "regressor": (JBoostRegressor(**FEW), Y, 1, {}),
    "outputs": (JBoostRegressor(**FEW), np.stack([Y, -Y], axis=1), 2, {}),
    "classifier": (JBoostClassifier(**FEW), np.where(Y > 1, "b", "a"), 1, {}),
    "classes": (JBoostClassifier(init_score=[0, 0, 0], **FEW), LEVELS, 3, {}),
    "labels": (JBoostClassifier(**FEW), LEVELS[:, None] > [0, 1], 2, {}),
    "ranker": (JBoostRanker(**FEW), LEVELS, 1, dict(qid=QUERIES)),
    "distribution": (JBoostDistribution(init_score=[0, 0], **FEW), Y, 2, {}),
}


@cache
def get_fitted(name):
    estimator, y, _, more = CASES[name]
    return clone(estimator).fit(X, y, **more)


def make_arguments(name):
    """Values for every row, by the name of the argument that takes them."""
    _, y, num_scores, more = CASES[name]
    shape = (ROWS,) if num_scores == 1 else (ROWS, num_scores)
    return dict(y=y, sample_weight=np.ones(ROWS), offset=np.zeros(shape), **more)


def list_calls():
    """Yields (case, settings, method, argument) of every method that takes rows."""
    for name, (estimator, *_) in CASES.items():
        for method, function in inspect.getmembers(estimator, callable):
            if method.startswith(("_", "set_", "get_")):
                continue
            taken = inspect.signature(function).parameters
            for argument in {*make_arguments(name)} & {*taken}:
                yield name, FEW, method, argument
                if method == "fit":
                    yield name, STOPPING, method, argument


CALLS = sorted(list_calls(), key=str)


def test_the_table_of_calls_is_full():
    found = {(name, method) for name, _, method, _ in CALLS}
    assert {(name, "score") for name in CASES} <= found
    assert ("distribution", "predict_quantiles") in found and len(CALLS) > 80


@pytest.mark.parametrize("size", [1, 150, 250])
@pytest.mark.parametrize(
    ("name", "settings", "method", "argument"),
    CALLS,
    ids=[f"{n}-{m}-{a}-{'early_stopping_rounds' in s}" for n, s, m, a in CALLS],
)
def test_arguments_of_other_lengths_are_refused(name, settings, method, argument, size):
    """In the words of scikit-learn where its own ``score`` checks them."""
    estimator = get_fitted(name)
    if method == "fit":
        estimator = clone(estimator).set_params(**settings)
    function = getattr(estimator, method)
    values = make_arguments(name)
    taken = {*inspect.signature(function).parameters} & {"y", "qid"}
    given = {each: values[each] for each in taken}
    given[argument] = np.resize(values[argument], (size, *values[argument].shape[1:]))
    words = rf"\b{argument} must|inconsistent numbers of samples"
    with pytest.raises(ValueError, match=words):
        found = function(X, **given)
        [*found] if inspect.isgenerator(found) else found


@pytest.mark.parametrize("name", CASES)
def test_validation_sets_of_other_lengths_are_refused(name):
    estimator, y, _, more = CASES[name]
    values = make_arguments(name)
    for part, words in enumerate(("y|eval_qid", "weight", "offset"), start=1):
        parts = [X, y, values["sample_weight"], values["offset"]]
        parts[part] = parts[part][:150]
        queries = dict(eval_qid=QUERIES) if more else {}
        with pytest.raises(ValueError, match=words):
            clone(estimator).fit(
                X, y, offset=values["offset"], eval_set=tuple(parts), **more, **queries
            )


@pytest.mark.parametrize("name", CASES)
def test_returned_arrays_belong_to_the_caller(name):
    fitted, checked = get_fitted(name), []
    for method in dir(fitted):
        if not re.match("(staged_)?(predict|decision_function|apply)", method):
            continue
        if not hasattr(fitted, method) or method == "predict_dist":
            continue
        found = getattr(fitted, method)(X)
        arrays = [*found] if inspect.isgenerator(found) else [found]
        assert all(type(array) is np.ndarray for array in arrays)
        before = [array.copy() for array in arrays]
        for array in arrays:
            array[...] = array[0]
        again = getattr(fitted, method)(X)
        again = [*again] if inspect.isgenerator(again) else [again]
        np.testing.assert_array_equal(again, before)
        checked.append(method)
    assert {"predict", "staged_predict", "apply"} <= {*checked}
    for array in (fitted.feature_importances_, fitted.evals_result_["train"]["loss"]):
        assert array.flags.writeable


# Containers.


@pytest.mark.usefixtures("constant_leaves")
@pytest.mark.filterwarnings("ignore:Constructing a DIA matrix")
def test_all_sparse_formats_hold_out_the_same_rows():
    dense = np.where(np.abs(X) < 0.5, np.float32(0), X)
    noise = np.random.default_rng(0).normal(size=ROWS)
    expected = JBoostRegressor(**STOPPING).fit(dense, noise)
    kinds = ("array", "matrix")
    kinds = [
        getattr(scipy.sparse, f"{form}_{kinds[number % 2]}")
        for number, form in enumerate(("coo", "csr", "csc", "lil", "dok", "bsr", "dia"))
    ] + [jax.experimental.sparse.BCOO.fromdense]
    matrices = [kind(dense) for kind in kinds]
    for matrix in matrices:
        found = JBoostRegressor(**STOPPING).fit(matrix, noise)
        for set_name in ("train", "validation"):
            np.testing.assert_array_equal(
                found.evals_result_[set_name]["loss"],
                expected.evals_result_[set_name]["loss"],
            )
        np.testing.assert_array_equal(found.predict(matrix), expected.predict(dense))


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_all_containers_hold_out_the_same_rows():
    columns = dict(zip("abc", X.T, strict=True))
    weights = np.arange(ROWS) % 3
    expected = JBoostRegressor(**STOPPING).fit(X, Y, weights, offset=Y)
    wraps = itertools.cycle((pd.Series, pl.Series, pa.array, list, jnp.asarray))
    for table in (
        pd.DataFrame(columns, index=range(7, ROWS + 7)), pl.DataFrame(columns),
        pa.table(columns), pa.record_batch(columns), X.tolist(), jnp.asarray(X),
        np.rec.fromarrays([*columns.values()], names=[*columns]),
    ):  # fmt: skip
        wrap = next(wraps)
        found = JBoostRegressor(**STOPPING).fit(table, Y, wrap(weights), offset=wrap(Y))
        np.testing.assert_array_equal(
            found.history_.validation_loss, expected.history_.validation_loss
        )


# Rows that are held out.


def test_rows_are_held_out_as_by_fit():
    held = JBoostRegressor(**STOPPING, random_state=3).fit(X, Y)
    model, history = jb.fit(X, Y, **STOPPING, seed=3)
    for part in ("train", "validation"):
        np.testing.assert_array_equal(
            held.evals_result_[part]["loss"], getattr(history, f"{part}_loss")
        )
    np.testing.assert_array_equal(held.predict(X), jb.predict(model, X))


@pytest.mark.parametrize(
    ("estimator", "given", "kind"),
    [
        (JBoostRegressor(), dict(sample_weight=np.arange(ROWS) == 5), "rows"),
        (JBoostRanker(), dict(group=[ROWS]), "groups"),
        (
            JBoostRanker(), dict(qid=QUERIES, sample_weight=1.0 * (np.arange(20) == 5)),
            "groups",
        ),
    ],
)  # fmt: skip
def test_splits_that_cannot_be_made_name_the_argument(estimator, given, kind):
    message = f"early_stopping_rounds needs .* too few {kind}"
    with pytest.raises(ValueError, match=message):
        clone(estimator).set_params(**STOPPING).fit(X, LEVELS, **given)


@pytest.mark.parametrize("name", ["regressor", "ranker"])
def test_a_pipeline_transforms_the_validation_table(name):
    scaled = StandardScaler().fit(X).transform
    estimator, y, _, more = CASES[name]
    more = more | ({"eval_qid": QUERIES} if more else {})
    expected = clone(estimator).set_params(**STOPPING)
    expected.fit(scaled(X), y, eval_set=(scaled(X), y), **more)
    with sklearn.config_context(enable_metadata_routing=True):
        names = dict.fromkeys(("eval_X", "eval_y", *more), True)
        last = clone(estimator).set_params(**STOPPING).set_fit_request(**names)
        pipe = make_pipeline(StandardScaler(), last, transform_input=["eval_X"])
        pipe.fit(X, y, eval_X=X, eval_y=y, **more)
    np.testing.assert_array_equal(
        pipe[-1].history_.validation_loss, expected.history_.validation_loss
    )


def test_a_set_in_two_arguments_is_whole():
    for estimator, y, _, more in CASES.values():
        for given in (dict(eval_X=X), dict(eval_X=X, eval_y=y, eval_set=(X, y))):
            with pytest.raises(ValueError, match=r"eval_X and eval_y .* together"):
                clone(estimator).fit(X, y, **given, **more)


# Targets.


@pytest.mark.parametrize(
    ("labels", "wrap"),
    [([False, True], np.asarray), ([3, 7], pd.Series)],
)
def test_objects_that_are_all_of_one_kind_are_labels(labels, wrap):
    plain = np.array(labels)[(Y > 1).astype(int)]
    expected = JBoostClassifier(**FEW).fit(X, plain)
    y = wrap(plain.astype(object))
    found = JBoostClassifier(**FEW).fit(X, y, eval_set=(X, y))
    np.testing.assert_array_equal(found.classes_, labels)
    np.testing.assert_array_equal(found.predict(X), expected.predict(X))
    assert found.score(X, y) == expected.score(X, plain)
    for mixed in ([True, "a"], [True, 2], [1, "a"], [(1,), (2, 3)]):
        y = np.empty(ROWS, object)
        y[:] = mixed * (ROWS // 2)
        with pytest.raises(ValueError, match=r"labels of one kind.*got "):
            JBoostClassifier(**FEW).fit(X, y)


@pytest.mark.parametrize("name", ["regressor", "outputs", "ranker", "distribution"])
def test_strings_are_for_the_classifier(name):
    estimator, y, _, more = CASES[name]
    words = np.where(LEVELS > 0, "high", "low")
    for labels in (words, words.astype(object), pd.Series(words), words.tolist()):
        with pytest.raises(ValueError, match=r"y must hold numbers.*JBoostClassifier"):
            clone(estimator).fit(X, labels, **more)
    more = more | ({"eval_qid": QUERIES} if more else {})
    for wrong in (words, 3):
        with pytest.raises(ValueError, match=r"^eval_set must hold"):
            clone(estimator).fit(X, y, eval_set=(X, wrong), **more)


@pytest.mark.parametrize("name", CASES)
def test_targets_that_no_array_can_hold_are_refused(name):
    """Lists without a shape, and cells that are arrays."""
    estimator, _, _, more = CASES[name]
    cells, nested = np.empty(ROWS, object), []
    cells[:] = [np.ones(2)] * ROWS
    nested.append(nested)
    for wrong in (cells, nested, [[1.0, 2.0], [3.0]] * (ROWS // 2)):
        with pytest.raises((TypeError, ValueError), match=r"^y must hold"):
            clone(estimator).fit(X, wrong, **more)


def test_scores_check_their_targets_and_weights():
    ranker, distribution = get_fitted("ranker"), get_fitted("distribution")
    for wrong in (-1, np.nan):
        with pytest.raises(ValueError, match="y must contain relevances"):
            ranker.score(X, np.where(LEVELS == 1, wrong, LEVELS), qid=QUERIES)
    for wrong in (-1.0, np.nan, 0.0):
        with pytest.raises(ValueError, match="sample_weight must be"):
            distribution.score(X, Y, np.full(ROWS, wrong))


# Names.


@pytest.mark.parametrize("name", CASES)
def test_results_before_fit_are_not_there_yet(name):
    estimator = CASES[name][0]
    known = [each for each in vars(get_fitted(name)) if each.endswith("_")]
    known += ["evals_result_", "n_iter_", "best_iteration_", "feature_importances_"]
    assert {"model_", "history_", "n_features_in_"} < {*known}
    for attribute in known:
        assert not hasattr(estimator, attribute)
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(estimator, attribute)
        getattr(get_fitted(name), attribute)
    with pytest.raises(AttributeError, match="no attribute 'nothing_'"):
        get_fitted(name).nothing_  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'predict_proba'"):
        JBoostClassifier("hinge").predict_proba  # noqa: B018


def test_attributes_of_other_libraries_are_answered():
    for attribute, words in dict(
        save_model=r"jb\.save\(estimator\.model_", load_model=r"jb\.load",
        booster_="get_booster", evals_result="evals_result_", best_score_="evals_res",
        best_iteration="best_iteration_", n_estimators_="n_iter_", plot="plotting",
        shap_values=r"jb\.shap_values", partial_fit=r"jb\.fit\(.*model=", history="y_",
        feature_name_="feature_names_in_", get_score=r"jb\.feature_importance",
    ).items():  # fmt: skip
        for estimator in (get_fitted("classifier"), JBoostRanker()):
            assert not hasattr(estimator, attribute)
            with pytest.raises(AttributeError, match=f"'{attribute}'; use .*{words}"):
                getattr(estimator, attribute)


def test_fit_and_estimators_take_the_words_of_each_other():
    sets = dict(held=(X, Y))
    expected, history = jb.fit(X, Y, validation=sets, seed=3, subsample=0.5, **FEW)
    found, other = jb.fit(X, Y, eval_set=sets, random_state=3, subsample=0.5, **FEW)
    np.testing.assert_array_equal(jb.predict(found, X), jb.predict(expected, X))
    np.testing.assert_array_equal(
        other.validation_loss["held"], history.validation_loss["held"]
    )
    for estimator in (
        JBoostRegressor(seed=3, subsample=0.5, **FEW),
        JBoostRegressor(subsample=0.5, **FEW).set_params(seed=3),
    ):
        assert estimator.get_params()["random_state"] == 3
        estimator.fit(X, Y, validation=sets)
        np.testing.assert_array_equal(estimator.predict(X), jb.predict(expected, X))
        assert [*estimator.evals_result_] == ["train", "held"]
    search = GridSearchCV(JBoostRegressor(**FEW), {"seed": [4]}, cv=2).fit(X, Y)
    assert search.best_estimator_.random_state == 4
    for call, first in (
        (lambda: jb.fit(X, Y, seed=1, random_state=1), "seed"),
        (lambda: jb.cross_validate(X, Y, seed=1, random_state=1), "seed"),
        (lambda: jb.fit(X, Y, validation=sets, eval_set=sets), "validation"),
        (lambda: JBoostDistribution(seed=1, random_state=1), "random_state"),
        (lambda: JBoostRanker().set_params(seed=1, random_state=1), "random_state"),
        (lambda: JBoostClassifier().fit(X, Y, eval_set=1, validation=1), "eval_set"),
    ):
        with pytest.raises(TypeError, match=f"{first} and .* are the same argument"):
            call()
    with pytest.raises(TypeError, match="'X_val'; use 'eval_X'"):
        JBoostRegressor().fit(X, Y, X_val=X, y_val=Y)
