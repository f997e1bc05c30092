# SPDX-License-Identifier: Apache-2.0
"""Importance against sums over rows, XGBoost, and the mean over all permutations."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import test_xgboost_parity as parity
import xgboost as xgb
from linear_leaves import add_slopes
from tables import ROWS, SMALL, make_regression, squared_distance

import jboost as jb
from jboost.entry.context import use_implementation
from jboost.model.ensemble import Links
from jboost.trees.tree import LeafSums

X, Y = make_regression()
WEIGHTS = np.random.default_rng(1).uniform(0.5, 2, ROWS).astype(np.float32)
MODEL, _ = jb.fit(X, Y, **SMALL)
UNKNOWN = replace(MODEL, sums=None)


def squared_deviations(values, weights):
    """Of the rows from their weighted mean."""
    mean = np.average(values, weights=weights)
    return np.sum(weights * (values - mean) ** 2)


def improvements(model, x, y, weights):
    """Friedman's sums, from the rows of every node and their residuals."""
    stages = np.asarray(jb.staged_predict(model, x), np.float64)
    starts = np.r_[[np.full(len(y), float(model.init_score))], stages[:-1]]
    leaves = np.asarray(jb.leaf_indices(model, x))
    total = np.zeros(x.shape[1])
    inner = model.feature.shape[2]
    for number, start in enumerate(starts):
        residual = y - start
        place = leaves[:, number] + inner  # in the heap
        while place[0] > 0:
            parent = (place - 1) // 2
            for node in np.unique(parent):
                rows, right = parent == node, place == 2 * node + 2
                sides = [rows & right, rows & ~right]
                if all(side.any() for side in sides):
                    whole, *parts = (
                        squared_deviations(residual[part], weights[part])
                        for part in (rows, *sides)
                    )
                    feature = model.feature[number, 0, node]
                    total[feature] += whole - sum(parts)
            place = parent
    return total / len(starts)


@pytest.mark.parametrize(
    ("weighted", "regularization"), [(False, "absolute"), (True, "relative")]
)
def test_improvement_is_what_the_splits_explain(weighted, regularization):
    weights = WEIGHTS if weighted else np.ones(ROWS, np.float32)
    given = dict(sample_weight=weights) if weighted else {}
    model, _ = jb.fit(X, Y, **SMALL, **given, regularization=regularization)
    expected = improvements(model, X, Y, weights)
    found = jb.feature_importance(model)
    # Leaf sums are float32: 2^-24 of each row's residual, amplified by cancelling.
    np.testing.assert_allclose(found.values, expected, rtol=1e-4)
    assert (expected > 0).sum() >= 2


@pytest.mark.parametrize(
    ("problem", "missing", "settings"),
    [
        ("squared", False, "plain"), ("squared", True, "heavy l2"),
        ("logistic", True, "plain"), ("logistic", False, "heavy l2"),
    ],
)  # fmt: skip
def test_gain_cover_and_splits_are_those_of_xgboost(problem, missing, settings):
    x, y, weight = parity.make_data(missing)
    chosen, numbers = parity.PROBLEMS[problem], parity.SETTINGS[settings]
    model = parity.train_jboost(x, y, weight, chosen, numbers)
    l2, min_gain, min_child_weight = numbers
    booster = xgb.train(
        {
            "objective": chosen.objective, "base_score": chosen.base_score,
            "max_bin": 256, "max_depth": parity.MAX_DEPTH, "eta": parity.RATE,
            "lambda": l2, "gamma": 2 * min_gain, "min_child_weight": min_child_weight,
            "nthread": 1,
        },
        xgb.DMatrix(x, y, weight=weight),
        parity.NUM_ROUNDS,
    )  # fmt: skip
    for theirs, kind, factor, per_split in (
        ("weight", "splits", 1, False), ("total_gain", "gain", 2, False),
        ("total_cover", "cover", 1, False), ("gain", "gain", 2, True),
        ("cover", "cover", 1, True),
    ):  # fmt: skip
        expected = booster.get_score(importance_type=theirs)
        expected = [expected.get(f"f{i}", 0.0) for i in range(x.shape[1])]
        found = jb.feature_importance(model, kind, per_split=per_split)
        # XGBoost keeps each gain and cover in float32; gains are differences.
        np.testing.assert_allclose(factor * found.values, expected, rtol=1e-3)
        assert min(expected) > 0


def test_permutation_is_the_mean_over_all_permutations():
    """Of one column: on average over permutations, all pairs of rows meet alike."""
    x, y = X[:, :1], X[:, 0] + 0.1 * Y
    model, _ = jb.fit(x, y, **SMALL)
    scores = np.asarray(jb.predict(model, x), np.float64)
    pairs = np.average(np.square(scores[:, None] - y[None]), axis=1).mean()
    repeats = 40
    found = jb.explanation.permutation_importance(model, x, y, num_repeats=repeats)
    expected = pairs - np.mean(np.square(scores - y))
    error = found.deviations[0] / np.sqrt(repeats)
    assert abs(found.values[0] - expected) < 4 * error < expected / 4


def test_permutation_uses_weights_offsets_losses_and_metrics():
    kept = WEIGHTS * (np.arange(ROWS) % 2)
    offset = np.linspace(0, 1, ROWS, dtype=np.float32)
    same = dict(offset=offset, num_repeats=2)
    loss = jb.losses.absolute_error
    first = jb.explanation.permutation_importance(
        MODEL, X, Y, loss, sample_weight=kept, **same
    )

    def mean(scores, targets, weights):
        return np.average(np.abs(scores - targets), weights=weights)

    second = jb.explanation.permutation_importance(
        MODEL, X, Y, metric=mean, sample_weight=kept, **same
    )
    np.testing.assert_allclose(first.values, second.values, rtol=1e-4, atol=1e-6)
    plain = jb.explanation.permutation_importance(MODEL, X, Y, loss, num_repeats=2)
    assert not np.allclose(plain.values, first.values, rtol=0.01)


def test_an_adaptive_loss_keeps_the_parameters_of_the_unshuffled_data():
    loss = jb.losses.make_adaptive_huber()
    scores = jb.predict(MODEL, X)
    magnitude = jnp.abs(scores - Y)
    delta = jb.losses.weighted_quantile(magnitude, jnp.ones(ROWS), 0.9)
    fixed = lambda s, t: jb.losses.huber(s, t, delta=float(delta))  # noqa: E731
    found, expected = (
        jb.explanation.permutation_importance(MODEL, X, Y, this, num_repeats=1).values
        for this in (loss, fixed)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_columns_that_no_tree_uses_count_for_nothing():
    x = np.c_[X, np.zeros(ROWS, np.float32)]
    model, _ = jb.fit(x, Y, **SMALL)
    for kind in ("improvement", "gain", "cover", "splits"):
        assert (
            jb.feature_importance(model, kind, per_split=kind == "gain").values[-1] == 0
        )
    found = jb.explanation.permutation_importance(model, x, Y, num_repeats=1)
    assert found.values[-1] == 0 and found.deviations[-1] == 0


def test_linear_terms_count_in_permutations_only():
    x = np.c_[X, np.arange(ROWS, dtype=np.float32) % 3]
    unused = np.c_[X, np.zeros(ROWS)]
    model, _ = jb.fit(unused, Y, linear_leaves=False, **SMALL)
    lines = add_slopes(model)
    same = [jb.feature_importance(each).values for each in (model, lines)]
    np.testing.assert_array_equal(*same)
    with use_implementation("xla"):
        found = jb.explanation.permutation_importance(lines, x, Y, num_repeats=1)
    assert same[0][-1] == 0 and found.values[-1] != 0


def test_splits_between_values_and_missing_ones_count():
    x = np.where(np.arange(ROWS) % 3 == 0, np.nan, 1.0).astype(np.float32)[:, None]
    missing = np.isnan(x[:, 0]).astype(np.float32)
    model, _ = jb.fit(x, missing, jb.losses.squared_error, num_rounds=1, max_depth=2)
    assert jb.feature_importance(model, "splits").values.tolist() == [1]


def test_several_scores_and_truncated_models():
    targets = np.stack([Y, X[:, 2] ** 2], axis=1)
    start = dict(num_scores=2, init_score=[0, 0])
    model, _ = jb.fit(X, targets, squared_distance, **start, **SMALL)
    splits = jb.feature_importance(model, "splits").values
    assert splits.sum() == np.isfinite(model.threshold).sum()
    half = jb.truncate(model, 2)
    gains = [jb.feature_importance(m, "gain").values for m in (half, model)]
    assert (gains[0] <= gains[1]).all() and gains[0].sum() < gains[1].sum()
    found = jb.explanation.permutation_importance(model, X, targets, squared_distance)
    assert found.values.min() > 0


def test_names_come_from_a_data_frame_or_by_hand():
    names = [f"column {i}" for i in range(X.shape[1])]
    frame = pd.DataFrame(X, columns=names)
    from_frame, _ = jb.fit(frame, Y, **SMALL)
    by_hand, _ = jb.fit(X, Y, **SMALL, feature_names=names)
    assert from_frame.feature_names == by_hand.feature_names == tuple(names)
    found = jb.feature_importance(from_frame)
    assert set(found.as_dict()) == set(names)
    values = list(found.as_dict().values())
    assert values == sorted(values, reverse=True)
    assert str(found).splitlines()[0].startswith(next(iter(found.as_dict())))
    assert " +- " in str(
        jb.explanation.permutation_importance(by_hand, frame, Y, num_repeats=2)
    )
    np.testing.assert_array_equal(jb.predict(from_frame, frame), jb.predict(MODEL, X))
    with pytest.raises(ValueError, match=r"'column 0'.*'column 1'"):
        jb.predict(from_frame, frame[[names[1], names[0], *names[2:]]])


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["a"], ValueError, rf"feature_names .*{X.shape[1]} .*\['a'\]"),
        (["a"] * X.shape[1], ValueError, r"feature_names .*'a', 'a'"),
        (list(range(X.shape[1])), TypeError, "sequence of strings"),
        ("abc", TypeError, "sequence of strings, got 'abc'"),
    ],
)
def test_bad_names_are_refused(names, error, message):
    with pytest.raises(error, match=message):
        jb.fit(X, Y, **SMALL, feature_names=names)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"kind .*'size'"):
        jb.feature_importance(MODEL, "size")
    with pytest.raises(TypeError, match=r"model .*pair"):
        jb.feature_importance((MODEL, None))
    with pytest.raises(ValueError, match="kind='splits' needs none"):
        jb.feature_importance(UNKNOWN, "gain")
    assert jb.feature_importance(UNKNOWN, "splits").values.sum() > 0
    with pytest.raises(ValueError, match=r"num_repeats .*1"):
        jb.explanation.permutation_importance(MODEL, X, Y, num_repeats=0)
    with pytest.raises(ValueError, match="y must have 200 rows"):
        jb.explanation.permutation_importance(MODEL, X, Y[:-1])
    with pytest.raises(ValueError, match="x must have 3 columns"):
        jb.explanation.permutation_importance(MODEL, X[:, :2], Y)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_losses_that_are_not_finite_are_refused(value):
    """They were reported as a rise of NaN for every feature."""
    own = float(np.mean((np.asarray(jb.predict(MODEL, X)) - Y) ** 2))

    def metric(scores, targets, weights):
        error = np.mean((np.asarray(scores) - targets) ** 2)
        return value if error > bound else 1.0

    bound = 0.0
    with pytest.raises(ValueError, match=rf"metric .*{value}"):
        jb.explanation.permutation_importance(MODEL, X, Y, metric=metric)
    loss = lambda s, t: (s - t) ** 2 + jnp.where(s > t, value, 0.0)  # noqa: E731
    with pytest.raises(ValueError, match=rf"loss .*{value}"):
        jb.explanation.permutation_importance(MODEL, X, Y, loss)
    bound = 1.001 * own
    if np.isnan(value):  # a rise may be infinite
        with pytest.raises(ValueError, match=r"metric .*column '.' of x"):
            jb.explanation.permutation_importance(MODEL, X, Y, metric=metric)


def _as_linked(model):
    """The same trees, each node of the heap linked to its children."""
    inner = model.feature.shape[2]
    left = np.arange(2 * inner + 1)
    left[:inner] = 2 * left[:inner] + 1
    shape = (*model.feature.shape[:2], len(left))

    def extend(array, value):
        return np.concatenate(
            [np.asarray(array), np.full((*shape[:2], inner + 1), value)], axis=2
        ).astype(array.dtype)

    def move(array):  # what leaves have
        array = np.asarray(array)
        return np.concatenate([np.zeros_like(array[..., 1:]), array], axis=2)

    return replace(
        model,
        feature=extend(model.feature, 0),
        threshold=extend(model.threshold, np.inf),
        missing_left=extend(model.missing_left, True),
        leaf_value=move(model.leaf_value),
        sums=LeafSums(*map(move, model.sums[:3]), l2=model.sums.l2),
        links=Links(np.broadcast_to(left, shape).astype(np.int32), model.max_depth),
        slopes=None,
        ranges=None,
    )


@pytest.mark.parametrize("kind", ["improvement", "gain", "cover", "splits"])
def test_the_layout_of_trees_does_not_matter(kind):
    found = jb.feature_importance(_as_linked(MODEL), kind).values
    expected = jb.feature_importance(MODEL, kind).values
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_sums_that_are_not_known_are_said():
    gradient = np.full_like(MODEL.sums.gradient, np.nan)
    foreign = replace(MODEL, sums=MODEL.sums._replace(gradient=gradient))
    with pytest.raises(ValueError, match="another library"):
        jb.feature_importance(foreign, "gain")
    cover = jb.feature_importance(foreign, "cover").values
    np.testing.assert_array_equal(cover, jb.feature_importance(MODEL, "cover").values)
