# SPDX-License-Identifier: Apache-2.0
"""Partial dependence against a loop over grid and rows, scikit-learn, and its laws."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.inspection import partial_dependence
from tables import ROWS, SMALL, make_regression, squared_distance

import jboost as jb
from jboost.tables.categories import Categories

X, Y = make_regression()
WEIGHTS = np.random.default_rng(1).integers(0, 3, ROWS).astype(np.float32)


@cache
def train():
    return jb.fit(X, Y, **SMALL)[0]


@cache
def find_both():
    return jb.partial_dependence(train(), X, 1, grid=7, kind="both")


class Duck(RegressorMixin, BaseEstimator):
    """A model as scikit-learn knows estimators."""

    def fit(self, x, y):
        self.n_features_in_ = x.shape[1]
        return self

    def predict(self, x):
        return np.asarray(jb.predict(train(), x))


def loop(model, x, places, grid):
    """The curve of each row, [N, *grid, *K], one prediction for each point."""
    shape = tuple(map(len, grid))
    curves = [None] * int(np.prod(shape))
    for number, index in enumerate(np.ndindex(*shape)):
        changed = np.array(x)
        for place, values, i in zip(places, grid, index, strict=True):
            changed[:, place] = values[i]
        curves[number] = np.asarray(jb.predict(model, changed))
    return np.moveaxis(np.reshape(curves, (*shape, *curves[0].shape)), len(shape), 0)


@pytest.mark.parametrize("features", [0, (2, 1)])
def test_averages_are_those_of_scikit_learn(features):
    """Its brute force, on a grid of its own."""
    places = np.atleast_1d(features)
    estimator = Duck().fit(X, Y)
    expected = partial_dependence(
        estimator, X, places, grid_resolution=6, kind="average", method="brute"
    )
    grid = [values.astype(np.float32) for values in expected["grid_values"]]
    given = grid if len(places) > 1 else grid[0]
    found = jb.partial_dependence(train(), X, features, grid=given)
    assert found.individual is None
    np.testing.assert_allclose(found.average, expected["average"][0], rtol=1e-6)
    for values, own in zip(grid, found.grid, strict=True):
        np.testing.assert_array_equal(values, own)


def test_individual_curves_are_predictions():
    both = find_both()
    np.testing.assert_array_equal(both.individual, loop(train(), X, [1], both.grid))
    np.testing.assert_allclose(both.average, both.individual.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(
        both.centred, both.individual - both.individual[:, :1]
    )
    two = jb.partial_dependence(train(), X, (0, 1), grid=3, kind="individual")
    assert two.average is None
    np.testing.assert_array_equal(two.individual, loop(train(), X, [0, 1], two.grid))
    assert not two.centred[:, 0, 0].any() and two.centred.any()


def test_blocks_of_points_change_nothing(monkeypatch):
    both = find_both()
    monkeypatch.setattr("jboost.explanation.dependence._BLOCK_CELLS", 3 * X.size)
    found = jb.partial_dependence(train(), X, 1, grid=7, kind="both")
    np.testing.assert_array_equal(found.individual, both.individual)
    np.testing.assert_array_equal(found.average, both.average)


def test_several_scores_links_and_offsets():
    targets = np.stack([Y, X[:, 2] ** 2], axis=1)
    start = dict(num_scores=2, init_score=[0, 0])
    model, _ = jb.fit(X, targets, squared_distance, **start, **SMALL)
    offset = np.linspace(0, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    found = jb.partial_dependence(
        model, X, (0, 2), grid=3, kind="both", inverse_link=jax.nn.softmax,
        offset=offset,
    )  # fmt: skip
    assert found.average.shape == (3, 3, 2)
    scores = loop(model, X, [0, 2], found.grid) + offset[:, None, None]
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(found.individual, expected, rtol=1e-5)
    np.testing.assert_allclose(found.average, expected.mean(0), rtol=1e-5)


def test_a_weight_counts_rows():
    """In averages and in the grid."""
    rows = np.repeat(np.arange(ROWS), WEIGHTS.astype(int))
    repeated = jb.partial_dependence(train(), X[rows], 0, grid=9)
    weighted = jb.partial_dependence(train(), X, 0, grid=9, sample_weight=WEIGHTS)
    np.testing.assert_array_equal(weighted.grid[0], repeated.grid[0])
    np.testing.assert_allclose(weighted.average, repeated.average, rtol=1e-6)


def test_the_grid_is_of_quantiles_or_of_all_values():
    column = np.arange(1, 101, dtype=np.float32)
    x = np.stack([column, column % 4, np.where(column > 3, np.nan, column)], axis=1)
    grid = lambda feature: jb.partial_dependence(train(), x, feature, grid=5).grid[0]  # noqa: E731
    np.testing.assert_array_equal(grid(0), [10, 30, 50, 70, 90])
    np.testing.assert_array_equal(grid(1), [0, 1, 2, 3])
    np.testing.assert_array_equal(grid(2), [1, 2, 3])
    given = jb.partial_dependence(train(), X, 0, grid=[np.nan, 0.5])
    changed = X.copy()
    changed[:, 0] = np.nan
    expected = np.mean(jb.predict(train(), changed))
    np.testing.assert_allclose(given.average[0], expected, rtol=1e-6)


def test_categories_are_values():
    """Splits on sets of codes; training saw 0, 1 and 3 of them."""
    model = jb.Ensemble(
        feature=jnp.zeros((1, 1, 1), jnp.int32),
        threshold=jnp.full((1, 1, 1), jnp.nan),
        missing_left=jnp.zeros((1, 1, 1), bool),
        leaf_value=jnp.array([[[-1.0, 1.0]]]),
        init_score=jnp.float32(0),
        num_features=3,
        left_codes=jnp.full((1, 1, 1, 1), 0b0110, jnp.uint32),
        categories=Categories(jnp.array([[1, 2, 0, 3]], jnp.int32), features=(0,)),
    )
    found = jb.partial_dependence(model, X, 0)
    assert found.grid[0].tolist() == [0, 1, 3]
    assert found.average.tolist() == [-1, -1, 1]
    values = (("red", "green", "grey", "blue"),)
    named = replace(model, categories=replace(model.categories, values=values))
    found = jb.partial_dependence(named, X, 0)
    assert found.grid[0].tolist() == ["red", "green", "blue"]
    found = jb.partial_dependence(named, X, 0, grid=["blue", "red"])
    assert found.average.tolist() == [1, -1]
    found = jb.partial_dependence(named, X, 0, grid=[None, "red", np.nan])
    assert found.average.tolist() == [1, -1, 1]
    with pytest.raises(ValueError, match="'pink'"):
        jb.partial_dependence(named, X, 0, grid=["pink"])


def test_categories_are_counted_by_weight():
    """Also those that are floats, which are labels and not numbers."""
    level = np.arange(ROWS) % 3
    frame = pd.DataFrame({"a": X[:, 0], "c": pd.Categorical(level / 2)})
    model, _ = jb.fit(frame, Y + level, **SMALL)
    found = jb.partial_dependence(model, frame, ("c", "a"), sample_weight=WEIGHTS)
    labels, numbers = found.grid
    assert labels.tolist() == [0.0, 0.5, 1.0] and labels.dtype.kind == "O"
    assert numbers.dtype.kind == "f" and found.counts[1] is None
    expected = [WEIGHTS[level == value].sum() for value in range(3)]
    np.testing.assert_allclose(found.counts[0], expected)
    given = jb.partial_dependence(model, frame, "c", grid=[1.0, np.nan, 0.0])
    assert given.counts[0].tolist() == [(level == 2).sum(), 0, (level == 0).sum()]


def test_names_and_trees():
    both = find_both()
    names = ["a", "b", "c"]
    frame = pd.DataFrame(X, columns=names)
    model, _ = jb.fit(frame, Y, **SMALL)
    found = jb.partial_dependence(model, frame, "b", grid=7, kind="both")
    assert found.names == ("b",) and both.names == ("1",)
    np.testing.assert_array_equal(found.individual, both.individual)
    tree = jb.cart.fit_tree(X, Y, max_depth=3)
    found = jb.partial_dependence(tree, X, 1, grid=7, kind="individual")
    np.testing.assert_array_equal(found.individual, loop(tree, X, [1], found.grid))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(features=3), ValueError, "features .*from 0 to 2.* got 3"),
        (dict(features="a"), ValueError, "features .*from 0 to 2.* got 'a'"),
        (dict(features=(0, 1, 2)), ValueError, "one or two features"),
        (dict(features=(1, 1)), ValueError, "two different ones"),
        (dict(grid=0), ValueError, "grid must be an integer from 1"),
        (dict(grid="fine"), TypeError, "grid must be a number of values"),
        (dict(grid=[]), ValueError, "at least one"),
        (dict(grid=["a"]), TypeError, "grid must hold numbers"),
        (dict(features=(0, 1), grid=[1, 2]), ValueError, "a sequence for each"),
        (dict(kind="all"), ValueError, "kind must be one of"),
        (dict(inverse_link=3), TypeError, "inverse_link must be callable"),
        (dict(x=X[:, :2]), ValueError, "x must have 3 columns"),
        (dict(x=np.full_like(X, np.nan)), ValueError, "column 0 of x has no values"),
        (dict(model=3), TypeError, "Ensemble or a RegressionTree, got int"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    good = dict(model=train(), x=X, features=0, grid=3)
    with pytest.raises(error, match=message):
        jb.partial_dependence(**{**good, **arguments})
