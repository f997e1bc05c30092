# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of results is short, and frames hold all of it."""

import sys
from dataclasses import replace
from xml.etree import ElementTree

import jax
import numpy as np
import pandas as pd
import pytest
import xgboost
from linear_leaves import add_slopes

import jboost as jb
from jboost import explanation

N = 60
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 2)).astype(np.float32)
Y = np.round(2 * X[:, 0])
TABLE = pd.DataFrame(
    {"a": X[:, 0], "s": pd.Categorical(RANDOM.choice(["lo", "mid", "hi"], N))}
)
LETTERS = np.asarray(TABLE["s"].cat.codes)
SETTINGS = dict(num_rounds=3, max_depth=2, max_bins=16)


@pytest.fixture(scope="module")
def run():
    target = Y + 3 * (LETTERS == 1)
    sets = {"first": (TABLE, target), "second": (TABLE, target)}
    return jb.fit(
        TABLE, target, validation=sets, metrics=["mae", "mse", "rmse"], subsample=0.9,
        leaf_rows="sample", rows_per_threshold=0,
        **SETTINGS,
    )  # fmt: skip


def results(model, history):
    bins = jb.fit_bins(X, max_bins=16)
    codes = jb.apply_bins(bins, X)
    key = jax.random.key(0)
    trees, _ = jb.boost(codes, Y, jb.losses.squared_error, key=key, **SETTINGS)
    tree = jb.cart.fit_tree(X, Y, max_depth=3)
    sketch = jb.sketches.update_sketch(jb.sketches.make_sketch(2), X)
    points = {"l2": list(range(1, 15))}
    shared = dict(folds=2, **SETTINGS)
    loss = jb.losses.squared_error
    return [
        history, jb.inspect_loss(jb.losses.logistic, 1.0), bins, trees, trees.trees,
        jb.init(codes, Y, loss, key=key), tree, jb.cart.pruning_path(tree),
        sketch, jb.sketches.make_summary(X[:, 0]), jb.feature_importance(model), model,
        model.categories, model.sums, jb.partial_dependence(model, TABLE, "a"),
        jb.shap_values(model, TABLE),
        jb.sweep(X, Y, loss, points, **shared),
        jb.feature_importance(jb.cart.fit_tree(np.tile(X, (1, 20)), Y)),
    ]  # fmt: skip


def test_what_is_shown_is_short(run):
    for result in results(*run):
        lines = repr(result).splitlines()
        assert len(lines) <= 12, lines
        assert type(result).__name__.split("Tree")[0] in lines[0] or len(lines) > 5
        # No arrays: they wrap, and end in brackets.
        assert max(map(len, lines)) < 200  # a sentence of a loss report, say
        assert "array(" not in repr(result) and "Array(" not in repr(result)


def test_notebooks_show_tables(run):
    """Of the same numbers, well formed, with text that is escaped."""
    points = {"l2": [1.0, 2.0]}
    shared = dict(folds=2, **SETTINGS)
    swept = jb.sweep(X, Y, jb.losses.squared_error, points, **shared)
    _, tuned = jb.tune(X, Y, trials=2, **shared)
    model, history = run
    importance = jb.feature_importance(model)
    report = jb.inspect_loss(jb.losses.logistic, 1.0)
    for result in (model, history, swept, tuned, importance, report):
        page = ElementTree.fromstring(result._repr_html_())
        rows = page.findall(".//tr")
        assert 2 <= len(rows) <= 12
        assert page.find("p").text
    cells = [e.text for e in ElementTree.fromstring(history._repr_html_()).iter("td")]
    assert f"{history.train_loss[-1]:.5g}" in cells
    named = importance._replace(names=("<a>", *importance.names[1:]))
    assert "&lt;a&gt;" in named._repr_html_()


def test_containers_are_shown_where_arrays_are_traced_or_none(run):
    model, _ = run
    seen = []
    jax.jit(lambda parts: seen.append(repr(parts)))((model.sums, model.categories))
    seen.append(repr(jax.tree.map(lambda array: None, model.sums)))
    bins = jb.fit_bins(X, max_bins=8)
    seen += [repr(jax.tree.map(lambda array: None, bins)), repr(bins)]
    assert all("LeafSums" in text for text in seen[:2])
    assert seen[2] == "Bins(...)" and "num_bins=8" in seen[3]


def test_history_says_first_best_and_last(run):
    _, history = run
    lines = repr(history).splitlines()
    assert lines[1].split() == ["first", "best", "last"]
    name, *numbers = lines[2].split()
    values = history.train_loss[[0, history.best_round, -1]]
    assert name == "train_loss"
    np.testing.assert_allclose([float(n) for n in numbers], values, rtol=1e-4)
    assert "6 more" in lines[-1]  # of 3 * 4 + 1
    empty = jb.fit(X, Y, num_rounds=0)[1]
    assert "0 rounds" in repr(empty) and empty.to_frame().empty


def test_frames_hold_all_curves(run):
    _, history = run
    frame = history.to_frame()
    expected = [
        f"{name}_{curve}" for name in ("train", "first", "second")
        for curve in ("loss", "mae", "mse", "rmse")
    ]  # fmt: skip
    assert [*frame.columns] == [*expected, "oob_improvement"]
    assert frame.index.name == "round" and len(frame) == 3
    found = frame["second_mae"].to_numpy()
    np.testing.assert_array_equal(found, history.metrics["second"]["mae"])
    _, plain = jb.fit(X, Y, validation=(X, Y), **SETTINGS)
    assert [*plain.to_frame().columns] == ["train_loss", "validation_loss"]


def test_importances_are_a_series(run):
    model, _ = run
    found = jb.feature_importance(model)
    series = found.to_series()
    assert series.to_dict() == found.as_dict() and [*series.index] == ["a", "s"]


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softmax"])
def test_nodes_are_those_that_xgboost_lists(objective):
    """XGBoost's own frame of a model, against that of the model read from it."""
    several = objective == "multi:softmax"
    labels = np.arange(N) % 3 if several else Y > 0
    gaps = np.where(RANDOM.uniform(size=X.shape) < 0.2, np.nan, X)
    booster = xgboost.train(
        {"objective": objective, "max_depth": 3, "num_class": 3 if several else 0},
        xgboost.DMatrix(gaps, labels), 3,
    )  # fmt: skip
    expected = booster.trees_to_dataframe().drop(columns="Target", errors="ignore")
    model = jb.interchange.read_xgboost(booster)
    found = explanation.trees_to_dataframe(model)
    assert [*found.columns] == [*expected.columns]
    for name in ("Tree", "Node", "ID", "Feature", "Yes", "No", "Missing"):
        pd.testing.assert_series_equal(
            found[name].astype("str"), expected[name].astype("str"), check_dtype=False
        )
    inner = (expected["Feature"] != "Leaf").to_numpy()
    below = np.nextafter(expected["Split"].to_numpy(np.float32), np.float32(-np.inf))
    np.testing.assert_array_equal(found["Split"][inner], below[inner])
    np.testing.assert_allclose(found["Cover"], expected["Cover"], rtol=1e-5)
    leaves = [column["Gain"][~inner] for column in (found, expected)]
    np.testing.assert_allclose(*leaves, rtol=1e-6)


def test_nodes_add_up_to_importances(run):
    model, _ = run
    frame = explanation.trees_to_dataframe(model)
    inner = frame[frame["Feature"] != "Leaf"]
    for kind, column in (("gain", "Gain"), ("cover", "Cover"), ("splits", None)):
        groups = inner.groupby("Feature")
        found = (groups[column].sum() if column else groups.size()).to_dict()
        assert found == pytest.approx(jb.feature_importance(model, kind).as_dict())
    sets = inner["Category"][inner["Feature"] == "s"]
    assert ["lo"] in [*sets] or ["hi", "mid"] in [*sets]
    assert len(frame["Tree"].unique()) == 3 and frame["ID"].is_unique
    # The rows that a leaf's values come from: walk the frame by hand.
    nodes = frame.set_index("ID")
    scores = np.full(N, float(model.init_score))
    for row in range(N):
        for tree in range(3):
            node = nodes.loc[f"{tree}-0"]
            while node["Feature"] != "Leaf":
                value = TABLE[node["Feature"]][row]
                known = node["Category"]
                left = value <= node["Split"] if known is None else value in known
                node = nodes.loc[node["Yes" if left else "No"]]
            scores[row] += node["Gain"]
    np.testing.assert_allclose(jb.predict(model, TABLE), scores, rtol=1e-6)


def test_terms_of_linear_leaves_add_up_to_scores():
    names = ["a", "b"]
    constant = jb.fit(X, Y, feature_names=names, rows_per_threshold=0, **SETTINGS)[0]
    model = add_slopes(replace(constant, slopes=None, ranges=None), seed=3)
    frame = explanation.trees_to_dataframe(model)
    leaves = frame[frame["Feature"] == "Leaf"]
    assert frame["Slopes"][frame["Feature"] != "Leaf"].isna().all()
    gaps = np.where(np.arange(2 * N).reshape(N, 2) % 7 == 3, np.nan, X)
    scores = np.full(N, float(model.init_score))
    found = np.asarray(jb.leaf_indices(model, gaps))
    for tree in range(3):
        rows = leaves[leaves["Tree"] == tree].set_index("Gain")
        for row, leaf in enumerate(found[:, tree]):
            value = float(model.leaf_value[tree, 0, leaf])
            lines = [
                slope * (np.clip(gaps[row, names.index(name)], -1.5, 1.5) - center)
                for name, slope, center in rows["Slopes"][value] or ()
            ]
            scores[row] += value + np.nan_to_num(sum(lines))
    predicted = jb.predict(model, gaps, implementation="xla")
    np.testing.assert_allclose(predicted, scores, rtol=1e-5, atol=1e-5)


def test_without_pandas_it_is_named(run, monkeypatch):
    model, history = run
    monkeypatch.setitem(sys.modules, "pandas", None)
    importance = jb.feature_importance(model)
    for call in (
        history.to_frame,
        importance.to_series,
        lambda: jb.explanation.trees_to_dataframe(model),
    ):  # fmt: skip
        with pytest.raises(ImportError, match="needs pandas"):
            call()
