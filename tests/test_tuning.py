# SPDX-License-Identifier: Apache-2.0
"""``jb.tune``: what it says of a setting is what ``cross_validate`` and ``fit`` say.

Other references are definitions: a weighted mean, the ends of a range, an even cover.
"""

import pickle
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tables import make_regression, same_bits, squared_distance

import jboost as jb
from jboost import losses
from jboost.selection import tuning
from jboost.selection.planning import Axis, Planner
from jboost.selection.tuning import _Tried
from jboost.sklearn import JBoostClassifier, JBoostRegressor, JBoostSearchCV
from jboost.training.metrics import BY_LOSS

X, Y = make_regression()
FEW = dict(folds=3, num_rounds=32, max_bins=32)
SMALL = dict(
    max_depth=2, linear_leaves=False, init_score=0.0, curvature="exact",
    leaf_solver="newton",
)  # fmt: skip
tune = partial(jb.tune, **FEW)
tune_small = partial(tune, **SMALL)  # batches of 8 share their programs


def scaled(score, target, scale):
    return jnp.log(scale) + jnp.log1p(((score - target) / scale) ** 2)


def mean_distance(scores, targets, weights):
    return jnp.sum(jnp.abs(scores - targets) * weights) / jnp.sum(weights)


@pytest.fixture(scope="module")
def tuned():
    """Ten settings of two programs."""
    space = {"max_depth": [3, 2], "linear_leaves": [False], "l2": (1, 20)}
    return tune(X, Y, trials=10, space=space, seed=3), space


def test_a_number_of_trials_gives_the_same_result(tuned):
    (model, found), space = tuned
    again, other = tune(X, Y, trials=10, space=space, seed=3)
    same_bits(model, again)
    assert found.points == other.points
    for one, two in zip(found.curves, other.curves, strict=True):
        np.testing.assert_array_equal(one, two)
    assert len(found.points) == len(found.curves) == 10


def test_curves_are_those_of_cross_validation(tuned):
    (_, found), _ = tuned
    for index in (0, 9):
        rounds = len(found.curves[index])
        settings = {**FEW, **found.points[index], "num_rounds": rounds, "seed": 3}
        expected = jb.cross_validate(X, Y, **settings).mean
        np.testing.assert_allclose(found.curves[index], expected, rtol=1e-6)


def test_the_model_is_the_weighted_mean_of_fits(tuned):
    (model, found), _ = tuned
    total = 0
    for member in found.members:
        settings = {**FEW, **found.params(member.setting), "seed": member.seed}
        del settings["folds"]
        one, _ = jb.fit(X, Y, **settings)
        if found.finished[member.setting]:
            assert one.num_rounds == np.argmin(found.curves[member.setting]) + 1
        total = total + member.weight * np.asarray(jb.predict(one, X))
    assert sum(member.weight for member in found.members) == pytest.approx(1)
    np.testing.assert_allclose(jb.predict(model, X), total, rtol=1e-4, atol=1e-5)


def test_the_ensemble_lowers_the_held_out_loss(tuned):
    """Or nearly: scores are kept after each 16 rounds, not after the best one."""
    (_, found), _ = tuned
    scores = [
        jb.cross_validate(
            X, Y, **{**FEW, **found.points[m.setting], "seed": 3},
        ).scores
        for m in found.members
    ]  # fmt: skip
    weights = [member.weight for member in found.members]
    mean = np.einsum("m,mn->n", weights, scores)
    alone = min(np.mean((each - Y) ** 2) for each in scores)
    assert np.mean((mean - Y) ** 2) < 1.02 * alone


def test_the_table_and_the_best(tuned):
    pandas = pytest.importorskip("pandas")
    (_, found), space = tuned
    table = found.to_frame()
    assert isinstance(table, pandas.DataFrame)
    assert table["loss"].is_monotonic_increasing
    assert table.index[0] == found.best == np.argmin(found.values)
    assert table["weight"].sum() == pytest.approx(1)
    assert found.best_value == min(each.min() for each in found.curves)
    assert found.best_params["num_rounds"] == found.best_round + 1
    assert {*table["max_depth"]} <= {*space["max_depth"]}
    assert table["l2"].between(1, 20).all()
    assert all(isinstance(point["l2"], int) for point in found.points)
    assert "10 settings" in repr(found)


@pytest.mark.parametrize(
    "case",
    [
        dict(y=np.stack([Y, X[:, 0]], 1), loss=squared_distance, num_scores=2,
             x=np.c_[X, np.arange(len(X)) % 4, np.arange(len(X)) % 7],
             categorical=[3, 4]),
        dict(loss=losses.quantile, curvature="auto", leaf_solver="auto",
             space={"tau": (0.1, 0.9)}, metrics=["mae"], by="mae",
             y=Y.tolist(), offset=X[:, 0], x=np.where(X < -1.5, np.nan, X),
             monotone={0: 1}),
        dict(loss=losses.adaptive(scaled, mean_distance),
             sample_weight=np.linspace(0, 2, len(Y))),
    ],
)  # fmt: skip
def test_every_kind_of_data_and_loss(case):
    call = dict(x=X, y=Y, trials=3, ensemble=2) | case
    model, found = tune_small(**call)
    assert len(found.points) == 3
    assert np.isfinite(found.best_value)
    assert np.isfinite(jb.predict(model, call["x"])).all()
    if "space" in case:
        assert len({point["tau"] for point in found.points}) == 3


def test_rates_that_are_not_given_are_lower_in_the_model():
    """A third of the rate with three times the rounds."""
    settings = dict(folds=3, max_bins=32, early_stopping_rounds=3, **SMALL)
    model, found = jb.tune(X, Y, trials=1, **settings)
    assert found.slower == 3
    rate = found.points[0]["learning_rate"]
    assert found.best_params["learning_rate"] == pytest.approx(rate / 3)
    assert model.num_rounds == found.best_params["num_rounds"]
    assert model.num_rounds == 3 * (found.best_round + 1)
    assert len(found.curves[0]) - found.best_round <= 3 + 16


def test_too_little_time_trains_the_defaults():
    """The best setting of one chunk stops early by held-out rows, as ``fit`` does."""
    few = dict(max_bins=32, **SMALL)
    model, found = jb.tune(X, Y, seconds=1e-3, folds=3, **few)
    assert len(found.members) == 1 and len(found.points) == 8
    assert not any(found.finished)
    best = found.best_params
    assert best["num_rounds"] == "auto"
    expected, _ = jb.fit(X, Y, **few, **best)
    same_bits(model, expected)
    default, _ = jb.fit(X, Y, **few)
    losses_of = [
        np.mean((np.asarray(jb.predict(m, X)) - Y) ** 2) for m in (model, default)
    ]
    assert losses_of[0] < 2 * losses_of[1]


def test_an_interrupt_returns_the_best_so_far(monkeypatch):
    judge, calls = tuning._Tuner.judge, []

    def interrupt(*operands):
        judge(*operands)
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning._Tuner, "judge", interrupt)
    model, found = tune_small(X, Y, trials=16)
    assert len(calls) == 1
    assert found.interrupted
    assert len(found.points) == 8
    assert model.num_rounds > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(seconds=0), "seconds must be"),
        (dict(trials=0), "trials must be"),
        (dict(ensemble=0), "ensemble must be"),
        (dict(space=["l2"]), "space must be {name"),
        (dict(space={"eta": (0, 1)}), "space must name loss, .*got 'eta'"),
        (dict(space={"l2": (3, 1)}), r"space\['l2'\] must be \(low, high\)"),
        (dict(space={"l2": 3}), r"space\['l2'\] must be \(low, high\)"),
        (dict(space={"max_depth": (2, 4)}, max_depth=3), "must not name max_depth"),
        (dict(loss=losses.huber, space={"delta": (0.5, 2.0)}), "by must name a metric"),
    ],
)
def test_refusals(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        tune(**{"x": X, "y": Y, "trials": 2, **change})


def test_ranges_of_sizes_are_lists():
    """Points of one size train side by side; the default is first."""
    space = {"max_depth": (2, 7)}
    _, found = tune(X, Y, trials=12, space=space, linear_leaves=False)
    depths = [point["max_depth"] for point in found.points]
    assert depths == [6] * 8 + [depths[8]] * 4 and 2 <= depths[8] <= 7


def test_rates_that_diverge_are_left_behind():
    _, found = tune_small(X, Y, trials=8, space={"learning_rate": (0.1, 1e4)})
    assert found.best_params["learning_rate"] < 2
    assert np.isfinite(found.best_value)


def test_the_first_points_cover_the_space():
    planner = Planner({"l2": Axis(0.0, 1.0), "l1": Axis(0.0, 1.0)}, seed=0)
    points = [point for _ in range(4) for point in planner.plan([], 16)]
    cells = [(int(4 * point["l1"]), int(4 * point["l2"])) for point in points]
    counts = [cells.count((i, j)) for i in range(4) for j in range(4)]
    assert min(counts) >= 3  # of 4; at random 0 or 1
    assert max(counts) <= 5


def test_later_points_are_near_good_ones():
    axis = Axis(0.01, 100.0, log=True)
    planner, trials = Planner({"l2": axis}, seed=0), []
    for value in np.geomspace(0.01, 99, 40):
        place = planner.locate({"l2": value})
        assert axis.at(place[0]) == pytest.approx(value)
        rank = np.log(value / 3.0) ** 2
        trials.append(_Tried({"l2": value}, place, 0.1, (), None, np.array([rank])))
    drawn = np.array([point["l2"] for point in planner.plan(trials, 40)])
    assert np.mean((drawn > 0.75) & (drawn < 12)) > 0.8  # 30 % of the range


def test_outer_folds_are_unknown_to_the_search():
    """Their targets are wrong, which changes no model, and the loss says so."""
    outer = np.where(np.arange(len(Y)) % 4 == 0, 0, -1)
    offset = 0.1 * X[:, 0]
    run = partial(tune_small, X, trials=8, ensemble=1, offset=offset)
    _, found = run(Y, outer_folds=outer)
    _, other = run(np.where(outer == 0, Y + 100, Y), outer_folds=outer)
    model, _ = run(Y, sample_weight=(outer < 0).astype(np.float32))
    rest = np.asarray(jb.predict(model, X) + offset - Y)[outer == 0]
    np.testing.assert_allclose(found.outer, [np.mean(rest**2)], rtol=1e-5)
    np.testing.assert_allclose(other.outer, [np.mean((rest - 100) ** 2)], rtol=1e-5)


def test_outer_folds_of_groups_are_measured_on_their_groups():
    grades, ids = np.clip(Y.round(), 0, 3), np.arange(len(Y)) // 8
    outer = np.where(ids % 4 == 0, 0, -1)
    call = dict(loss=losses.listwise_softmax, groups=ids, trials=1, ensemble=1)
    call["curvature"] = "auto"
    _, found = tune_small(X, grades, outer_folds=outer, **call)
    weights = (outer < 0).astype(np.float32)
    model, _ = tune_small(X, grades, sample_weight=weights, **call)
    scores = np.asarray(jb.predict(model, X))
    measure = jax.jit(partial(losses.listwise_softmax, where=np.ones(8, bool)))
    expected = [
        measure(scores[ids == i], grades[ids == i]) for i in np.unique(ids[outer == 0])
    ]
    np.testing.assert_allclose(found.outer, [np.mean(expected)], rtol=1e-4)


def test_the_default_point_has_the_l2_of_the_default():
    """It is 3 if all thresholds are tried."""
    for rows, l2 in ((0, 3.0), (100, 1.0)):
        _, found = tune_small(X, Y, trials=1, rows_per_threshold=rows)
        assert found.points[0]["l2"] == pytest.approx(l2)


def test_importance_is_of_names_that_matter():
    rng = np.random.default_rng(0)
    l2, depth, l1 = rng.random(64), rng.integers(2, 4, 64), rng.random(64)
    curves = tuple(np.array([a + 3 * b]) for a, b in zip(l2, depth, strict=True))
    points = tuple(
        {"l2": a, "max_depth": int(b), "l1": c}
        for a, b, c in zip(l2, depth, l1, strict=True)
    )
    found = jb.Tuned(points, curves, (), BY_LOSS, (), 1, 0.0).importance
    assert found["max_depth"] > 0.7 > 0.1 > found["l1"]
    assert 0.05 < found["l2"] < 0.3  # a quarter of the variance is within each depth


def test_a_search_of_scikit_learn():
    """In a pipeline, cloned, pickled, and asked by scikit-learn's own functions."""
    labels = np.where(Y > 1, "high", "low")
    few = JBoostClassifier(num_rounds=16, max_bins=32, **SMALL)
    search = JBoostSearchCV(few, trials=3, cv=2, space={"l2": (0.5, 5.0)}, ensemble=2)
    pipeline = make_pipeline(StandardScaler(), search).fit(X, labels)
    fitted = pipeline[-1]
    assert fitted.best_estimator_.max_depth == 2
    assert "max_depth" not in fitted.best_params_
    assert fitted.best_score_ == max(fitted.cv_results_["mean_test_score"])
    assert fitted.cv_results_["rank_test_score"][fitted.best_index_] == 1
    assert [*fitted.classes_] == ["high", "low"]
    assert pipeline.score(X, labels) > 0.8
    copy = pickle.loads(pickle.dumps(pipeline))
    chances = pipeline.predict_proba(X)
    np.testing.assert_array_equal(copy.predict_proba(X), chances)
    assert cross_val_score(clone(search), X, labels, cv=2).min() > 0.7
    expected, _ = jb.tune(
        StandardScaler().fit_transform(X), labels == "low", losses.logistic, trials=3,
        folds=2, stratify=True, space={"l2": (0.5, 5.0)}, ensemble=2, num_rounds=16,
        max_bins=32, **SMALL,
    )  # fmt: skip
    same_bits(replace(fitted.best_estimator_.model_, absent=expected.absent), expected)
    assert not hasattr(JBoostSearchCV(JBoostRegressor()), "predict_proba")
    with pytest.raises(ValueError, match="eval_set must be None"):
        search.fit(X, labels, eval_set=(X, labels))
    with pytest.raises(ValueError, match="members of the estimator must be 1"):
        JBoostSearchCV(JBoostRegressor(members=2)).fit(X, Y)
    with pytest.raises(TypeError, match=r"estimator of jboost\.sklearn"):
        JBoostSearchCV(StandardScaler()).fit(X, labels)


def test_traced_arguments_are_refused():
    with pytest.raises(TypeError, match=r"call jb\.boost there"):
        jax.jit(lambda x: tune(x, Y, trials=1))(X)
