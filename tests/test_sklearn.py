# SPDX-License-Identifier: Apache-2.0
"""The estimators do what fit and predict do, in scikit-learn's words."""

import inspect
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.metrics import get_scorer
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from tables import FULL, ROWS, make_regression

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRegressor

# Settings that share programs, and search for no initial scores or minima. Those of
# LIKE_FIT are used where an estimator has to repeat all that fit does.
SIMPLE = dict(init_score=0.0, curvature="exact", leaf_solver="newton")
FEW: dict[str, Any] = dict(max_bins=16, linear_leaves=False, **FULL)
SMALL = dict(num_rounds=8, max_depth=3, **SIMPLE, **FEW)
LIKE_FIT = dict(num_rounds=8, max_depth=3)
X, Y = make_regression()
HELD_X, HELD_Y = make_regression(1)
LABELS = np.where(Y > 1, "high", "low")
CODES = (LABELS == "low").astype(np.int32)  # the second label is the positive one
THREE = np.array(["a", "b", "c"])[np.digitize(Y, [0.5, 1.5])]
WEIGHTS = np.random.default_rng(2).integers(0, 4, ROWS)
OFFSET = np.linspace(-1, 1, ROWS, dtype=np.float32)
REGRESSOR = JBoostRegressor(**SMALL).fit(X, Y)
CLASSIFIER = JBoostClassifier(**SMALL).fit(X, LABELS)
MANY = JBoostClassifier(**LIKE_FIT).fit(X, THREE)


def assert_same(model, other):
    """Whatever the gaps of sparse matrices would be: scikit-learn's are zeros."""
    other = replace(other, absent=model.absent)
    chex.assert_trees_all_equal(model, other)


# scikit-learn's own checks.

QUICK = SMALL | dict(num_rounds=4, max_depth=2, learning_rate=1.0)
DEFAULTS = (JBoostRegressor(), JBoostClassifier())
CHECKS = [pair for each in DEFAULTS for pair in estimator_checks_generator(each)]


def name_part(value):
    """Without addresses of functions: processes must agree on names."""
    return getattr(getattr(value, "func", value), "__name__", type(value).__name__)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=name_part)
def test_scikit_learns_checks(estimator, check):
    check(clone(estimator).set_params(**QUICK))


# The same as fit and predict.


def test_a_regressor_is_fit_and_predict():
    model, history = jb.fit(X, Y, **SMALL)
    assert_same(REGRESSOR.model_, model)
    assert REGRESSOR.get_booster() is REGRESSOR.model_
    np.testing.assert_array_equal(REGRESSOR.predict(X), jb.predict(model, X))
    np.testing.assert_array_equal(
        np.stack([*REGRESSOR.staged_predict(X)]), jb.staged_predict(model, X)
    )
    np.testing.assert_array_equal(REGRESSOR.apply(X), jb.leaf_indices(model, X))
    np.testing.assert_array_equal(
        REGRESSOR.evals_result_["train"]["loss"], history.train_loss
    )
    assert REGRESSOR.n_iter_ == SMALL["num_rounds"]
    assert REGRESSOR.n_features_in_ == 3
    values = jb.feature_importance(model).values
    np.testing.assert_allclose(REGRESSOR.feature_importances_, values / values.sum())


def test_a_classifier_is_fit_and_predict_with_a_link():
    model, _ = jb.fit(X, CODES, jb.losses.logistic, **SMALL)
    assert_same(CLASSIFIER.model_, model)
    assert CLASSIFIER.classes_.tolist() == ["high", "low"]
    scores = np.asarray(jb.predict(model, X))
    np.testing.assert_array_equal(CLASSIFIER.decision_function(X), scores)
    found = CLASSIFIER.predict_proba(X)
    np.testing.assert_allclose(found[:, 1], 1 / (1 + np.exp(-scores)), rtol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(CLASSIFIER.predict_log_proba(X), np.log(found))
    np.testing.assert_array_equal(
        CLASSIFIER.predict(X), np.where(scores > 0, "low", "high")
    )
    assert CLASSIFIER.score(X, LABELS) > 0.85
    stages = np.stack([*CLASSIFIER.staged_decision_function(X)])
    np.testing.assert_array_equal(stages, jb.staged_predict(model, X))
    np.testing.assert_array_equal([*CLASSIFIER.staged_predict_proba(X)][-1], found)
    labels = [*CLASSIFIER.staged_predict(X)]
    assert len(labels) == SMALL["num_rounds"]
    np.testing.assert_array_equal(labels[-1], CLASSIFIER.predict(X))


def test_more_classes_are_softmax():
    codes = np.searchsorted(["a", "b", "c"], THREE)
    model, _ = jb.fit(X, codes, jb.losses.softmax, num_scores=3, **LIKE_FIT)
    assert_same(MANY.model_, model)
    scores = np.asarray(jb.predict(model, X), np.float64)
    exps = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = exps / exps.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(MANY.predict_proba(X), expected, rtol=1e-5)
    np.testing.assert_array_equal(
        MANY.predict(X), np.array(["a", "b", "c"])[scores.argmax(axis=1)]
    )
    assert MANY.decision_function(X).shape == (ROWS, 3)
    logs = np.log(np.bincount(codes) / ROWS)
    # Softmax does not see a common shift.
    start = np.asarray(model.init_score, np.float64)
    np.testing.assert_allclose(start - start.mean(), logs - logs.mean(), atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "make"),
    [
        ([3, 7], np.ndarray.tolist), ([3, 7], pd.Series), ([False, True], pl.Series),
        ([-1.0, 1.0], np.asarray),
    ],
)  # fmt: skip
def test_labels_of_every_kind_come_back(labels, make):
    values = np.array(labels)[CODES]
    found = JBoostClassifier(**SMALL).fit(X, make(values))
    assert found.classes_.dtype == values.dtype
    np.testing.assert_array_equal(found.classes_, labels)
    np.testing.assert_array_equal(
        found.predict(X) == labels[1], CLASSIFIER.predict(X) == "low"
    )


def test_weights_offsets_and_validation_sets_go_to_fit():
    sets = dict(one=(HELD_X, HELD_Y, WEIGHTS, OFFSET), two=(X, Y, None, OFFSET))
    found = JBoostRegressor(**LIKE_FIT, metrics=dict(bias=bias), random_state=3).fit(
        X, Y, WEIGHTS, offset=OFFSET, eval_set=sets
    )
    model, history = jb.fit(
        X, Y, sample_weight=WEIGHTS, offset=OFFSET, validation=sets, seed=3, **LIKE_FIT
    )
    assert_same(found.model_, model)
    np.testing.assert_array_equal(
        found.predict(X, offset=OFFSET), jb.predict(model, X, offset=OFFSET)
    )
    assert found.best_iteration_ == history.best_round
    results = found.evals_result_
    assert [*results] == ["train", "one", "two"]
    assert [*results["one"]] == ["loss", "bias"]
    np.testing.assert_array_equal(
        results["one"]["loss"], history.validation_loss["one"]
    )
    listed = JBoostRegressor(**SMALL).fit(X, Y, eval_set=[(X, Y), (HELD_X, HELD_Y)])
    assert [*listed.evals_result_] == ["train", "validation_0", "validation_1"]


def bias(scores, targets, weights):
    return np.average(scores - targets, weights=weights)


def test_weights_are_duplicates():
    twice = np.repeat(np.arange(ROWS), WEIGHTS)
    settings = dict(SMALL, min_child_samples=1)  # it counts rows, not their weights
    found = JBoostClassifier(**settings).fit(X, LABELS, WEIGHTS)
    expected = JBoostClassifier(**settings).fit(X[twice], LABELS[twice])
    np.testing.assert_allclose(
        found.predict_proba(X), expected.predict_proba(X), rtol=1e-4
    )


def square(score, target):
    """A loss whose rows have no minima to search for, which takes long."""
    return jb.losses.squared_error(score, target)


def test_class_weights_multiply_sample_weights():
    weight = dict(high=3.0, low=0.5)
    found = JBoostClassifier(square, **SMALL, class_weight=weight).fit(
        X, LABELS, WEIGHTS
    )
    by_hand = WEIGHTS * np.where(LABELS == "high", 3.0, 0.5)
    expected = JBoostClassifier(square, **SMALL).fit(X, LABELS, by_hand)
    assert_same(found.model_, expected.model_)
    balanced = JBoostClassifier(square, **SMALL, class_weight="balanced").fit(X, LABELS)
    share = np.where(CODES == 1, CODES.mean(), 1 - CODES.mean())
    expected = JBoostClassifier(square, **SMALL).fit(X, LABELS, 0.5 / share)
    np.testing.assert_allclose(
        balanced.decision_function(X), expected.decision_function(X), atol=1e-5
    )


# Losses and links.


@pytest.mark.parametrize(
    ("loss", "link"),
    [
        ("poisson", np.exp),
        (partial(jb.losses.huber, delta=0.8), None),
        (partial(jb.losses.tweedie, power=1.3), np.exp),
        (square, None),
    ],
    ids=["name", "partial", "partial link", "function"],
)
def test_losses_by_name_or_as_functions(loss, link):
    y = np.abs(Y)
    found = JBoostRegressor(loss, **SMALL).fit(X, y)
    function = jb.losses.LOSSES[loss] if isinstance(loss, str) else loss
    model, _ = jb.fit(X, y, function, **SMALL)
    assert_same(found.model_, model)
    scores = np.asarray(jb.predict(model, X))
    expected = link(scores) if link else scores
    np.testing.assert_allclose(found.predict(X), expected, rtol=1e-6)
    raw = JBoostRegressor(loss, **SMALL, inverse_link=None).fit(X, y)
    np.testing.assert_array_equal(raw.predict(X), scores)


def test_a_loss_of_targets_minus_one_and_one():
    signs = 2 * CODES - 1
    found = JBoostClassifier("exponential", **SMALL)
    found.fit(X, LABELS, eval_set=(X, LABELS))
    loss = jb.losses.exponential
    model, history = jb.fit(X, signs, loss, validation=(X, signs), **SMALL)
    assert_same(found.model_, model)
    np.testing.assert_array_equal(
        found.evals_result_["validation"]["loss"], history.validation_loss
    )
    scores = np.asarray(jb.predict(model, X))
    np.testing.assert_array_equal(found.predict(X) == "low", scores > 0)
    np.testing.assert_allclose(
        found.predict_proba(X)[:, 1], 1 / (1 + np.exp(-2 * scores)), rtol=1e-5
    )


def half_logistic(score):
    return jax.nn.sigmoid(score / 2 - 0.5)


def test_a_loss_and_a_link_of_ones_own():
    own = JBoostClassifier(lambda s, t: jb.losses.logistic(s, t), **SMALL)
    for without in (own, JBoostClassifier("hinge")):
        assert not hasattr(without, "predict_proba")
    found = clone(own).set_params(inverse_link=half_logistic).fit(X, LABELS)
    assert_same(found.model_, CLASSIFIER.model_)
    scores = CLASSIFIER.decision_function(X)
    expected = 1 / (1 + np.exp(0.5 - scores / 2))
    np.testing.assert_allclose(found.predict_proba(X)[:, 1], expected, rtol=1e-5)
    np.testing.assert_array_equal(found.predict(X) == "low", expected > 0.5)
    assert (found.predict(X) != CLASSIFIER.predict(X)).any()
    np.testing.assert_array_equal([*found.staged_predict(X)][-1], found.predict(X))


def test_links_of_predict():
    model = CLASSIFIER.model_
    scores = jb.predict(model, X)
    expected = jax.nn.sigmoid(scores)
    for run in (jb.predict, jax.jit(jb.predict, static_argnames="inverse_link")):
        found = run(model, X, inverse_link=jax.nn.sigmoid)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    stages = jb.staged_predict(model, X, inverse_link=jax.nn.sigmoid)
    np.testing.assert_array_equal(
        stages[-1], jb.predict(model, X, inverse_link=jax.nn.sigmoid)
    )
    sparse = scipy.sparse.csr_array(X)
    np.testing.assert_allclose(
        jb.predict(model, sparse, inverse_link=jax.nn.sigmoid), expected, rtol=1e-6
    )
    rows = jb.predict(MANY.model_, X, inverse_link=jax.nn.softmax)
    np.testing.assert_array_equal(rows, MANY.predict_proba(X))
    best = jb.staged_predict(MANY.model_, X, inverse_link=jnp.argmax)
    assert best.shape == (SMALL["num_rounds"], ROWS)
    tree = jb.cart.fit_tree(X, np.abs(Y), max_depth=2)
    np.testing.assert_allclose(
        jb.predict(tree, X, inverse_link=jnp.log1p), np.log1p(jb.predict(tree, X)),
        rtol=1e-6,
    )  # fmt: skip
    for wrong, message in (
        (3, "inverse_link must be callable"),
        (jax.nn.softmax, r"inverse_link must .* shape \(\)"),
        (lambda score: None, "must return an array or a pytree"),
    ):
        for function in (jb.predict, jb.staged_predict):
            with pytest.raises(TypeError, match=message):
                function(model, X, inverse_link=wrong)


def test_several_outputs_are_as_several_models():
    targets = np.stack([Y, X[:, 2] ** 2], axis=1)
    found = JBoostRegressor(**SMALL).fit(X, targets)
    predicted = found.predict(X)
    assert predicted.shape == targets.shape
    for k in range(2):
        single = JBoostRegressor(**SMALL).fit(X, targets[:, k])
        np.testing.assert_allclose(predicted[:, k], single.predict(X), atol=1e-4)
    np.testing.assert_array_equal([*found.staged_predict(X)][-1], predicted)


# Early stopping.


def test_early_stopping_by_a_set_or_by_a_share_of_the_rows():
    noise = np.random.default_rng(0).normal(size=ROWS)
    patient = SMALL | dict(num_rounds=40, early_stopping_rounds=3)
    found = JBoostRegressor(**patient).fit(X, noise, eval_set=(HELD_X, noise))
    _, history = jb.fit(X, noise, validation=(HELD_X, noise), **patient)
    assert found.n_iter_ == found.best_iteration_ + 1 == history.best_round + 1 < 40
    for container in (scipy.sparse.csr_array(X), pd.DataFrame(X), X):
        alone = JBoostRegressor(**patient, validation_fraction=0.25)
        alone.fit(container, noise, WEIGHTS)
        assert alone.n_iter_ < 40
        assert [*alone.evals_result_] == ["train", "validation"]
    again = clone(alone).fit(container, noise, WEIGHTS)
    assert_same(alone.model_, again.model_)
    other = clone(alone).set_params(random_state=1).fit(container, noise, WEIGHTS)
    assert (alone.history_.train_loss[0] != other.history_.train_loss[0]).any()


def test_held_out_rows_keep_the_shares_of_classes():
    rare = np.where(X[:, 0] < np.sort(X[:, 0])[8], "rare", "common")
    seen = []

    def count(scores, targets, weights):
        seen.append((len(targets), int(targets.sum())))
        return 0.0  # the sum makes it NumPy's: a traced one is no integer

    found = JBoostClassifier(
        **SMALL, early_stopping_rounds=2, validation_fraction=0.25,
        metrics=dict(count=count), min_child_samples=1,
    ).fit(X, rare)  # fmt: skip
    assert (150, 6) in seen and (50, 2) in seen
    assert found.classes_.tolist() == ["common", "rare"]


# In company.


def test_pipelines_searches_and_folds():
    search = GridSearchCV(
        make_pipeline(StandardScaler(), JBoostRegressor(**SMALL)),
        {"jboostregressor__learning_rate": [0.01, 0.5]},
        cv=2,
    ).fit(X, Y)
    assert search.best_params_ == {"jboostregressor__learning_rate": 0.5}
    scores = cross_val_score(JBoostClassifier(**SMALL), X, LABELS, cv=2)
    assert (scores > 0.8).all()


def test_pandas_come_out_of_a_scaler_and_names_are_checked():
    frame = pd.DataFrame(X, columns=list("abc"))
    pipe = make_pipeline(StandardScaler(), JBoostRegressor(**SMALL))
    pipe.set_output(transform="pandas").fit(frame, Y)
    assert pipe[-1].feature_names_in_.tolist() == ["a", "b", "c"]
    assert pipe[-1].model_.feature_names == ("a", "b", "c")
    found = JBoostRegressor(**SMALL, monotone={"b": 1}).fit(frame, Y)
    np.testing.assert_array_equal(
        found.predict(frame), found.predict(pl.from_pandas(frame))
    )
    with pytest.raises(ValueError, match="feature names should match"):
        found.predict(frame[["b", "a", "c"]])
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        found.predict(X)
    with pytest.raises(ValueError, match="X has 2 features, but JBoostRegressor is"):
        REGRESSOR.predict(X[:, :2])


def test_categories_of_a_frame_are_split_by():
    word = np.array(["p", "q", "r", "s"])[np.random.default_rng(5).integers(0, 4, ROWS)]
    frame = pd.DataFrame(dict(a=X[:, 0], b=word, c=X[:, 2]))
    y = np.isin(word, ["p", "r"]) * 1.0
    settings = SMALL | dict(num_rounds=2, learning_rate=1.0, l2=0.0)
    found = JBoostRegressor(**settings).fit(frame, y)
    np.testing.assert_allclose(found.predict(frame), y, atol=1e-6)
    assert found.model_.categories.values == (("p", "q", "r", "s"),)
    other = frame.assign(b=pd.Categorical(word, categories=["z", *"srqp"]))
    np.testing.assert_allclose(found.predict(other), y, atol=1e-6)


def test_sparse_matrices_are_dense_ones_with_zeros():
    dense = np.where(np.abs(X) < 0.5, np.float32(0), X)
    sparse = scipy.sparse.csr_array(dense)
    found = JBoostRegressor(**SMALL).fit(sparse, Y)
    expected = JBoostRegressor(**SMALL).fit(dense, Y)
    np.testing.assert_array_equal(found.predict(sparse), expected.predict(dense))
    np.testing.assert_array_equal(found.predict(dense), expected.predict(dense))


def test_weights_are_routed():
    with sklearn.config_context(enable_metadata_routing=True):
        estimator = JBoostRegressor(**SMALL)
        estimator.set_fit_request(sample_weight=True, offset=True)
        scorer = get_scorer("neg_mean_squared_error")
        found = cross_validate(
            make_pipeline(estimator), X, Y, cv=2, return_estimator=True,
            scoring=scorer.set_score_request(sample_weight=True),
            params=dict(sample_weight=WEIGHTS, offset=OFFSET),
        )["estimator"][0]  # fmt: skip
        rest = slice(ROWS // 2, None)  # the first fold is held out
        model, _ = jb.fit(
            X[rest], Y[rest], sample_weight=WEIGHTS[rest], offset=OFFSET[rest], **SMALL
        )
    assert_same(found[-1].model_, model)


def test_inspection_and_calibration():
    found = permutation_importance(REGRESSOR, X, Y, n_repeats=2, random_state=0)
    assert found.importances_mean.argmin() == 2
    curve = partial_dependence(CLASSIFIER, X, [0], grid_resolution=5)
    assert curve["average"].shape == (1, 5)
    calibrated = CalibratedClassifierCV(JBoostClassifier(**SMALL), cv=2)
    assert calibrated.fit(X, LABELS).score(X, LABELS) > 0.9


@pytest.mark.parametrize(
    "estimator", [REGRESSOR, CLASSIFIER, MANY], ids=["r", "c", "m"]
)
def test_pickled_and_cloned(estimator):
    copy = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(copy.predict(X), estimator.predict(X))
    assert clone(copy).get_params() == estimator.get_params()


def test_defaults_and_names_are_those_of_fit():
    ours = inspect.signature(JBoostRegressor).parameters
    theirs = inspect.signature(jb.fit).parameters
    both = [name for name in ours if name in theirs and name not in ("loss", "absent")]
    assert len(both) > 20
    for name in both:
        assert ours[name].default == theirs[name].default, name
    classifier = inspect.signature(JBoostClassifier).parameters
    assert {n: p.default for n, p in classifier.items() if n != "class_weight"} == {
        n: p.default for n, p in ours.items()
    }


# Errors.


@pytest.mark.parametrize(
    ("estimator", "y", "given", "error", "message"),
    [
        (JBoostRegressor("hubber"), Y, {}, ValueError, "mean 'huber'"),
        (JBoostRegressor(num_rounds=-1), Y, {}, ValueError, "num_rounds must be"),
        (JBoostRegressor(inverse_link="exp"), Y, {}, ValueError, "inverse_link must"),
        (JBoostRegressor(), Y, dict(eval_set=X), ValueError, r"eval_set must be \(X"),
        (JBoostRegressor(), None, {}, ValueError, "requires y to be passed"),
        (JBoostClassifier("huber"), LABELS, {}, ValueError, "loss must be 'softmax'"),
        (JBoostClassifier("hinge"), THREE, {}, ValueError, "of 3 scores for 3 cl"),
        (JBoostClassifier(), Y, {}, ValueError, "Unknown label type"),
        (JBoostClassifier(), LABELS[:1].repeat(ROWS), {}, ValueError, "two classes"),
        (
            JBoostClassifier(), np.where(THREE == "b", None, THREE), {}, ValueError,
            "y must hold a label in every row, got None in row",
        ),
        (
            JBoostClassifier(), THREE, dict(eval_set=(X, np.where(Y > 1, None, THREE))),
            ValueError, "eval_set must hold a label in every row, got None in row",
        ),
        (
            JBoostClassifier(), LABELS, dict(eval_set=(X, THREE)), ValueError,
            "eval_set must hold the classes of y",
        ),
        (
            JBoostClassifier(early_stopping_rounds=1, validation_fraction=0.0), LABELS,
            {}, ValueError, "validation_fraction must be",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(estimator, y, given, error, message):
    with pytest.raises(error, match=message):
        estimator.fit(X, y, **given)


def test_no_rows_predict_to_empty_arrays():
    assert REGRESSOR.predict(X[:0]).shape == (0,)
    assert CLASSIFIER.predict_proba(X[:0]).shape == (0, 2)
    assert CLASSIFIER.predict(X[:0]).dtype == CLASSIFIER.predict(X).dtype
