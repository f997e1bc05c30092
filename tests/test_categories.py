# SPDX-License-Identifier: Apache-2.0
"""Categorical columns from table to prediction: codes, doors, laws, XGBoost's trees."""

import json
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from tables import squared_distance

import jboost as jb
from jboost.codes.binning import fit_categories
from jboost.tables.categories import encode, goes_left

ROWS, COUNT = 400, 12
SMALL = dict(num_rounds=5, max_depth=3, learning_rate=0.5)


class Table(NamedTuple):
    x: np.ndarray  # a number and two columns of categories
    y: np.ndarray


@pytest.fixture(scope="module")
def table():
    """Effects of 12 categories in no order; some cells are missing."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, COUNT, ROWS)
    few = rng.integers(0, 3, ROWS)
    effect = rng.permutation(np.linspace(-2, 2, COUNT))
    number = rng.normal(size=ROWS)
    y = effect[codes] + 0.5 * number + (few == 1) + 0.1 * rng.normal(size=ROWS)
    x = np.stack([number, codes, few], axis=1)
    x[rng.random(ROWS) < 0.1, 1] = np.nan
    return Table(x.astype(np.float32), y.astype(np.float32))


@pytest.fixture(scope="module")
def model(table):
    return jb.fit(*table, categorical=[1, 2], **SMALL)[0]


# Codes.


def test_codes_go_by_weight_and_ties_by_value():
    column = np.repeat([7, 2, 5, 9, np.nan], [2, 3, 3, 1, 4])[:, None]
    categories = fit_categories(column.astype(np.float32), (0,), None, 99)
    expected = np.zeros(10)
    expected[[2, 5, 7, 9]] = 1, 2, 3, 4
    np.testing.assert_array_equal(categories.codes, expected[None])
    weight = np.where(column[:, 0] == 9, 100.0, 1.0)
    heavy = fit_categories(column.astype(np.float32), (0,), weight, 99)
    assert heavy.codes[0, 9] == 1 and heavy.codes[0, 2] == 2


def test_the_lightest_share_the_last_code():
    column = np.repeat(np.arange(6), [6, 5, 4, 3, 2, 1])[:, None].astype(np.float32)
    categories = fit_categories(column, (0,), None, 4)
    np.testing.assert_array_equal(categories.codes, [[1, 2, 3, 4, 4, 4]])


@pytest.mark.parametrize(("columns", "codes"), [(1, 1023), (1024, 511), (16384, 63)])
def test_categories_have_more_codes_than_numbers(columns, codes):
    """16 times as many; the histogram of a node has at most 2^19 cells for that."""
    x = np.zeros((1200, columns), np.float32)
    x[:, 0] = np.arange(1200)
    bins = jb.fit_bins(x, max_bins=64, categorical=[0])
    assert np.max(bins.categories.codes) == codes
    assert bins.num_bins == max(64, np.max(bins.categories.codes) + 1)


def test_rows_of_weight_zero_are_not_looked_at():
    column = np.array([[0], [1], [4]], np.float32)
    categories = fit_categories(column, (0,), np.array([1.0, 2.0, 0.0]), 99)
    np.testing.assert_array_equal(categories.codes, [[2, 1]])


@pytest.mark.parametrize("numpy", [np, jnp])
def test_what_is_no_known_value_is_missing(numpy):
    column = np.array([[0], [0], [3]], np.float32)
    categories = fit_categories(column, (0,), None, 99)
    given = [[0.0], [3.0], [1.0], [4.0], [1e9], [-1.0], [0.5], [np.nan], [np.inf]]
    got = np.asarray(encode(categories, numpy.array(given, np.float32)))[:, 0]
    np.testing.assert_array_equal(got, [1, 2] + [np.nan] * 7)


def test_bins_give_every_category_its_code(table):
    bins = jb.fit_bins(table.x, categorical=[1, 2])
    binned = np.asarray(jb.apply_bins(bins, table.x))
    known = ~np.isnan(table.x[:, 1])
    value = table.x[known, 1].astype(int)
    np.testing.assert_array_equal(binned[known, 1], bins.categories.codes[0, value])
    assert not np.any(binned[~known, 1])
    jitted = jax.jit(jb.apply_bins)(bins, jnp.asarray(table.x))
    np.testing.assert_array_equal(jitted, binned)


# The model.


def test_categories_beat_their_order(table, model):
    as_numbers = jb.fit(*table, **SMALL)[0]
    scores = [jb.predict(m, table.x) for m in (model, as_numbers)]
    losses = [np.mean((score - table.y) ** 2) for score in scores]
    assert losses[0] < 0.7 * losses[1]


def test_prediction_takes_the_leaves_of_training(table):
    """Scores of training, of codes, and of raw values; with a validation set."""
    bins = jb.fit_bins(table.x, categorical=[1, 2])
    binned = jb.apply_bins(bins, table.x)
    trees, scores = jb.boost(
        binned, table.y, jb.losses.squared_error, jax.random.key(0),
        categories=bins.categories, max_bins=bins.num_bins, **SMALL,
    )  # fmt: skip
    made = jb.to_ensemble(trees, bins)
    np.testing.assert_array_equal(jb.predict(made, table.x), scores)
    fitted, history = jb.fit(*table, categorical=[1, 2], validation=table, **SMALL)
    np.testing.assert_array_equal(history.train_loss, history.validation_loss)
    stages = jb.staged_predict(jb.truncate(fitted, 3), table.x)
    np.testing.assert_array_equal(stages, jb.staged_predict(fitted, table.x)[:3])


def test_names_of_categories_do_not_matter(table, model):
    """Any other numbering, in which no two categories weigh the same, fits the same."""
    rng = np.random.default_rng(1)
    weight = rng.random(ROWS).astype(np.float32)
    new = rng.permutation(40)[:COUNT]
    other = table.x.copy()
    known = ~np.isnan(other[:, 1])
    other[known, 1] = new[other[known, 1].astype(int)]
    first, second = (
        jb.fit(x, table.y, sample_weight=weight, categorical=[1, 2], **SMALL)[0]
        for x in (table.x, other)
    )
    np.testing.assert_array_equal(jb.predict(first, table.x), jb.predict(second, other))


def test_unseen_categories_are_missing(table, model):
    unseen, missing = table.x.copy(), table.x.copy()
    missing[:, 1] = np.nan
    for code in (1e6, -1.0, -2.0):  # the last two as OrdinalEncoder writes them
        unseen[:, 1] = code
        unseen[0] = table.x[0]
        missing[0] = table.x[0]
        np.testing.assert_array_equal(
            jb.predict(model, unseen), jb.predict(model, missing)
        )


def test_without_categorical_columns_nothing_changes(table):
    plain = jb.fit(*table, **SMALL)[0]
    assert plain.left_codes is None and plain.categories is None
    none = jb.fit(*table, categorical=None, **SMALL)[0]
    assert jax.tree.structure(plain) == jax.tree.structure(none)


def test_one_category_against_the_rest_where_there_are_few(table):
    fitted = jb.fit(*table, categorical=[1, 2], max_onehot=99, **SMALL)[0]
    sets = np.asarray(fitted.left_codes)[np.isnan(np.asarray(fitted.threshold))]
    # One category, and those that the node does not have where they go with it.
    assert np.any(np.bitwise_count(sets).sum(axis=-1) == 1)
    root = np.asarray(fitted.left_codes)[:, 0, 0]
    assert np.all(np.bitwise_count(root).sum(axis=-1) <= 1)


def test_many_categories_without_effect_do_not_spoil_the_rest():
    """10,000 categories in 3,000 rows beside a number that says it all."""
    rng = np.random.default_rng(3)
    x = np.stack([rng.normal(size=6000), rng.integers(0, 10_000, 6000)], axis=1)
    y = np.where(x[:, 0] > 0, 1.0, -1.0) + 0.5 * rng.normal(size=6000)
    sizes = dict(num_rounds=30, max_depth=3, categorical=[1])
    fitted, history = jb.fit(x[:3000], y[:3000], **sizes)
    assert fitted.left_codes.shape[-1] == 128  # of 4,096 codes
    held_out = float(np.mean((jb.predict(fitted, x[3000:]) - y[3000:]) ** 2))
    assert held_out < 1.03 * 0.25  # of the noise
    assert held_out < 1.1 * history.train_loss[-1]


@pytest.mark.usefixtures("full_search")
def test_several_scores(table):
    y = np.stack([table.y, -table.y], axis=1)
    fitted, history = jb.fit(
        table.x, y, squared_distance, num_scores=2, categorical=[1],
        init_score=[1.0, -1.0], **SMALL,
    )  # fmt: skip
    assert fitted.left_codes.shape[:3] == (5, 2, 7)
    assert history.train_loss[-1] < 0.5 * history.train_loss[0]
    both = np.asarray(jb.predict(fitted, table.x))
    np.testing.assert_array_equal(both[:, 0], -both[:, 1])


def test_training_goes_on_with_the_codes_of_the_model(table, model):
    """On other data, too; test_routes.py goes on with the same."""
    more = dict(SMALL, num_rounds=3)
    some = table.x[:, 1] < 6  # other categories, by other weights
    part = np.flatnonzero(some)[: ROWS // 4]
    other = jb.fit(table.x[part], table.y[part], model=model, **more)[0]
    np.testing.assert_array_equal(other.categories.codes, model.categories.codes)
    before = np.mean((jb.predict(model, table.x[part]) - table.y[part]) ** 2)
    assert np.mean((jb.predict(other, table.x[part]) - table.y[part]) ** 2) < before


# Data frames.


@pytest.fixture(scope="module")
def frame(table):
    names = np.array([*"mlkjihgfedcb"], object)
    cells = pd.Series(table.x[:, 1]).map(dict(enumerate(names)))
    return pd.DataFrame(
        {"number": table.x[:, 0], "name": cells, "few": table.x[:, 2].astype(int)}
    )


def test_a_data_frame_says_what_is_categorical(frame, table):
    fitted = jb.fit(frame, table.y, categorical=["few"], **SMALL)[0]
    assert fitted.categories.features == (1, 2)
    assert fitted.categories.values == (tuple("bcdefghijklm"), None)
    same = jb.fit(frame, table.y, categorical=["name", "few"], **SMALL)[0]
    np.testing.assert_array_equal(jb.predict(fitted, frame), jb.predict(same, frame))
    new = frame.assign(name="never seen")
    gone = frame.assign(name=pd.Series([None] * ROWS, dtype=object))
    with pytest.warns(UserWarning, match="'name' of x .* 'never seen'") as caught:
        scores = jb.predict(fitted, new)
    assert len(caught) == 1
    np.testing.assert_array_equal(scores, jb.predict(fitted, gone))
    bins = jb.fit_bins(frame, categorical=["few"])
    binned = jb.apply_bins(bins, frame[::-1])
    np.testing.assert_array_equal(binned[::-1], jb.apply_bins(bins, frame))


# Refusals.

BAD_CELLS = {"negative": -1.0, "a fraction": 0.5, "infinite": np.inf}


@pytest.mark.parametrize("name", BAD_CELLS)
def test_cells_that_are_no_categories_are_refused(table, model, name):
    x = table.x.copy()
    x[7, 1] = BAD_CELLS[name]
    calls = [
        partial(jb.fit, x, table.y, categorical=[1], **SMALL),
        partial(jb.fit_bins, x, categorical=[1]),
        partial(jb.refit, model, x, table.y),
    ]
    if name != "negative":  # which are categories that training did not see
        calls += [
            partial(jb.fit, *table, categorical=[1], validation=(x, table.y), **SMALL),
            partial(jb.apply_bins, jb.fit_bins(table.x, categorical=[1]), x),
            partial(jb.predict, model, x),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=r"column 1.*row 7"):
            call()


@pytest.mark.parametrize("code", [-1.0, -2.0, 99.0, 1e6])
def test_a_column_of_unseen_codes_is_reported_once(table, model, code):
    x = table.x.copy()
    x[:, 1] = code
    bins = jb.fit_bins(table.x, categorical=[1])
    message = rf"^column 1 of .*x holds no category .*, such as {int(code)}, "
    for call in (
        partial(jb.predict, model, x),
        partial(jb.apply_bins, bins, x),
        partial(
            jb.fit, *table, categorical=[1], validation=(x, table.y), num_rounds=1,
            max_depth=3,
        ),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=message) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]
    jb.predict(model, x[:1])  # of single rows nothing is said
    x[:, 1] = np.nan
    jb.predict(model, x)
    assert not np.any(jb.apply_bins(bins, x)[:, 1])


def test_numbers_that_are_too_large_are_refused(table):
    x = table.x.copy()
    x[7, 2] = 1e9
    with pytest.raises(ValueError, match=r"1000000000.*column 2"):
        jb.fit(x, table.y, categorical=[1, 2], **SMALL)


REFUSED = {
    "word": (dict(categorical="all"), TypeError, "categorical must be 'auto'"),
    "place": (dict(categorical=[3]), ValueError, "categorical must .* got 3"),
    "twice": (dict(categorical=[1, 1]), ValueError, "each of them once"),
    "monotone": (dict(monotone={1: 1}), ValueError, "monotone must be 0"),
    "local": (dict(candidates="local"), ValueError, "candidates must be 'global'"),
    "curvature": (
        dict(candidate_weights="curvature"), ValueError, "candidate_weights 'samples'",
    ),
    "onehot": (dict(max_onehot=1.5), TypeError, "max_onehot must be an integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(table, name):
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        jb.fit(*table, **{"categorical": [1], **SMALL, **given})


# XGBoost's trees.


def train_xgboost(x, y, kinds, **parameters):
    matrix = xgb.DMatrix(x, y, feature_types=kinds, enable_categorical=True)
    booster = xgb.train(
        {
            "objective": "reg:squarederror", "base_score": 0.25, "max_depth": 4,
            "eta": 0.3, "lambda": 1.0, "gamma": 2e-6, "min_child_weight": 0.0,
            "tree_method": "hist", "nthread": 1, **parameters,
        },
        matrix,
        8,
    )  # fmt: skip
    stages = [
        booster.predict(matrix, iteration_range=(0, stage)) for stage in range(1, 9)
    ]
    return np.stack(stages), booster


def half_squared_error(score, target):
    return jnp.square(score - target) / 2


def test_scores_are_those_of_xgboost_round_by_round():
    """No missing values, one category against the rest: what rules have in common.

    XGBoost keeps a smallest gain of 1e-6, hence min_gain; where a node lacks a
    category, only rows out of training could tell the difference.
    """
    rng = np.random.default_rng(5)
    x = np.stack([rng.integers(0, 9, 800), rng.integers(0, 15, 800)], axis=1)
    effect = rng.normal(size=(9, 15))
    y = (effect[x[:, 0], x[:, 1]] + rng.normal(size=800)).astype(np.float32)
    x = x.astype(np.float32)
    expected, booster = train_xgboost(
        x, y, ["c", "c"], max_cat_to_onehot=100, max_cat_threshold=100
    )
    fitted, _ = jb.fit(
        x, y, half_squared_error, categorical=[0, 1], num_rounds=8, max_depth=4,
        learning_rate=0.3, l2=1.0, min_gain=1e-6, min_child_weight=0.0,
        init_score=0.25, max_onehot=100, regularization="absolute",
    )  # fmt: skip
    assert '"categories_nodes":[0' in json.dumps(
        json.loads(booster.save_raw("json")), separators=(",", ":")
    )
    # Scores below 4 are rounded once a round: half an ulp is 2 * 2^-24 of 4.
    got = np.asarray(jb.staged_predict(fitted, x))
    np.testing.assert_allclose(got, expected, atol=8 * 8 * 2.0**-24)


def test_sets_are_looked_up_bit_by_bit():
    words = np.array([[0b1010, 1 << 31], [1, 0]], np.uint32)
    code = jnp.array([3, 63], jnp.int32)
    assert goes_left(jnp.asarray(words[[0, 0]]), code).tolist() == [True, True]
    assert goes_left(jnp.asarray(words[[1, 1]]), code).tolist() == [False, False]
