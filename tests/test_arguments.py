# SPDX-License-Identifier: Apache-2.0
"""Arguments of other libraries, and models in other clothes, are answered with ours."""

import inspect

import lightgbm
import numpy as np
import pytest
import scipy.sparse
import xgboost
from sklearn.base import clone
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
)
from tables import ROWS, make_regression

import jboost as jb
from jboost import plotting
from jboost.entry import arguments
from jboost.sklearn import JBoostClassifier, JBoostRegressor

X, Y = make_regression()
FUNCTIONS = (jb.fit, jb.boost, jb.cross_validate, jb.sweep)
# What peers have and jboost has nothing like.
UNLIKE = {
    "feature_weights", "max_cat_threshold", "multi_strategy", "sampling_method",
    "validate_parameters", "subsample_for_bin", "tol", "validation_fraction",
    "ccp_alpha", "min_samples_split", "min_weight_fraction_leaf", "valid_names",
    "keep_training_booster", "dtrain", "train_set", "fpreproc", "as_pandas",
    "show_stdv",
}  # fmt: skip


def parameters(function):
    return [*inspect.signature(function).parameters]


@pytest.mark.parametrize(
    "peer",
    [
        xgboost.XGBClassifier, lightgbm.LGBMClassifier, GradientBoostingClassifier,
        HistGradientBoostingClassifier, xgboost.train, xgboost.cv, lightgbm.train,
    ],
    ids=lambda peer: peer.__name__,
)  # fmt: skip
def test_arguments_of_peers_are_answered(peer):
    names = parameters(peer) if not isinstance(peer, type) else peer().get_params()
    own = [name for function in FUNCTIONS for name in parameters(function)]
    for name in {*names} - {*own} - UNLIKE - {*arguments._TWINS}:
        for call in (
            lambda **given: jb.fit(X, Y, **given),
            lambda **given: jb.boost(X, Y, **given),
            lambda **given: jb.cross_validate(X, Y, **given),
            lambda **given: jb.sweep(X, Y, jb.losses.squared_error, {}, **given),
            JBoostClassifier,
        ):
            if call is JBoostClassifier and name in parameters(JBoostClassifier):
                continue
            with pytest.raises(TypeError, match=f"keyword argument '{name}'") as caught:
                call(**{name: 1})
            hint = str(caught.value).partition(f"'{name}'")[2]
            assert any(word in hint for word in ("use", "pass", "jboost")), hint


def test_answers_name_arguments_that_exist():
    known = {name for function in FUNCTIONS for name in parameters(function)}
    assert arguments._NAMES.keys() <= known
    assert not {*arguments._PEERS} & {*parameters(jb.fit)}
    known = {*jb.metrics.METRICS, *jb.metrics.GROUP_METRICS}
    assert arguments._METRICS.keys() == known


@pytest.mark.parametrize(
    "name",
    [
        "cat_l2", "cat_smooth", "min_data_per_group", "category_l2",
        "category_smoothing", "min_category_weight",
    ],
)  # fmt: skip
def test_what_noise_replaces_is_answered_with_it(name):
    step = jb.boost_step
    for call in (
        lambda **given: jb.fit(X, Y, **given),
        lambda **given: jb.boost(X, Y, jb.losses.squared_error, **given),
        lambda **given: step(None, X, Y, jb.losses.squared_error, **given),
        lambda **given: jb.sweep(X, Y, jb.losses.squared_error, given),
        JBoostRegressor,
        JBoostRegressor().set_params,
    ):
        with pytest.raises((TypeError, ValueError), match=f"'{name}'.* the noise of"):
            call(**{name: [0.0]})


def test_misspelt_arguments_are_answered_where_they_belong():
    for call, words in (
        (lambda: jb.fit(X, Y, max_dept=3), ["max_dept", "max_depth"]),
        (lambda: JBoostRegressor(max_dept=3), ["max_dept", "max_depth"]),
        (lambda: JBoostRegressor(eval_set=[]), ["eval_set", "method fit"]),
        (lambda: JBoostRegressor().fit(X, Y, seed=1), ["'seed'", "'random_state'"]),
        (lambda: JBoostRegressor().fit(X, Y, verbose=1), ["progress", "JBoostRegr"]),
        (lambda: JBoostClassifier(scale_pos_weight=2), ["class_weight"]),
        (lambda: JBoostRegressor().set_params(eta=1), ["'eta'", "learning_rate"]),
        (lambda: jb.sweep(X, Y, jb.losses.huber, {"eta": [1]}), ["learning_rate"]),
        (lambda: jb.fit(X, Y, zzz=3), ["fit() got", "zzz"]),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value
    estimator = clone(JBoostRegressor(l2=3.0)).set_params(num_rounds=2)
    assert estimator.l2 == 3.0 and "num_rounds=2" in repr(estimator)


def test_softmax_and_losses_of_several_scores_ask_for_num_scores():
    labels = (np.arange(ROWS) % 3).astype(np.int32)
    for loss in (jb.losses.softmax, lambda s, t: (s[0] - t) ** 2 + s[1] ** 2):
        for call in (jb.fit, jb.cross_validate):
            with pytest.raises((TypeError, ValueError), match="num_scores"):
                call(X, labels.astype(np.float32), loss, num_rounds=1)


@pytest.fixture(scope="module")
def estimator():
    settings = dict(num_rounds=2, max_depth=3, linear_leaves=False)
    return JBoostRegressor(**settings).fit(X, Y)


def test_estimators_are_answered_with_their_model(estimator, tmp_path):
    calls = [
        lambda: jb.predict(estimator, X), lambda: jb.staged_predict(estimator, X),
        lambda: jb.leaf_indices(estimator, X), lambda: jb.truncate(estimator, 1),
        lambda: jb.shap_values(estimator, X), lambda: jb.feature_importance(estimator),
        lambda: jb.explanation.shap_interactions(estimator, X),
        lambda: jb.explanation.permutation_importance(estimator, X, Y),
        lambda: jb.partial_dependence(estimator, X, 0),
        lambda: jb.fit(X, Y, model=estimator),
        lambda: jb.save(estimator, tmp_path / "m"),
        lambda: jb.interchange.write_xgboost(estimator, tmp_path / "m"),
        lambda: jb.interchange.export_predict(estimator, tmp_path / "m"),
        lambda: plotting.importance(estimator), lambda: plotting.tree(estimator),
        lambda: plotting.tree_to_dot(estimator),
        lambda: plotting.shap_summary(estimator, X),
        lambda: plotting.partial_dependence(estimator, X, 0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"JBoostRegressor.*model_"):
            call()
    with pytest.raises(TypeError, match=r"JBoostRegressor.*history_"):
        plotting.learning_curve(estimator)


@pytest.mark.usefixtures("constant_leaves")
def test_training_goes_on_from_an_estimator(estimator):
    """With its ``absent``, on dense rows, sparse ones and streams."""
    model, more = estimator.model_, dict(num_rounds=2, max_depth=3, learning_rate=0.1)
    assert model.absent == "zero"
    whole = JBoostRegressor(num_rounds=4, max_depth=3).fit(X, Y)
    rows = jb.stream([(X, Y)], memory="64 MiB")
    for absent in (None, "zero"):
        longer, _ = jb.fit(X, Y, model=model, absent=absent, **more)
        assert longer.absent == "zero" and longer.num_rounds == 4
        np.testing.assert_array_equal(jb.predict(longer, X), whole.predict(X))
    assert jb.fit(rows, model=model, **more)[0].absent == "zero"
    sparse = scipy.sparse.csr_array(X)
    for x, validation in ((sparse, None), (X, (sparse, Y)), (X, {"a": (sparse, Y)})):
        with pytest.raises(ValueError, match="absent must be 'zero'"):
            jb.fit(x, Y, model=model, validation=validation, absent="missing", **more)
        jb.fit(x, Y, model=model, validation=validation, **more)
    with pytest.raises(ValueError, match="absent"):
        jb.fit(X, Y, model=model, absent="nothing", **more)


def test_paths_into_missing_folders_name_the_folder(estimator, tmp_path):
    folder = tmp_path / "nosuch"
    for call in (
        lambda: jb.save(estimator.model_, folder / "model"),
        lambda: jb.interchange.write_xgboost(estimator.model_, folder / "model.json"),
        lambda: jb.fit(X, Y, checkpoint=folder / "run"),
    ):
        with pytest.raises((OSError, ValueError), match="folder") as caught:
            call()
        assert str(folder) in str(caught.value)


def test_a_checkpoint_of_other_gaps_names_absent(tmp_path):
    run = dict(checkpoint=tmp_path / "run", num_rounds=1, max_depth=3)
    jb.fit(X, Y, **run)
    with pytest.raises(ValueError, match="absent") as caught:
        jb.fit(X, Y, absent="zero", **run)
    assert "thresholds" not in str(caught.value)
