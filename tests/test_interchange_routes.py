# SPDX-License-Identifier: Apache-2.0
"""Every kind of model goes to XGBoost and comes back; other libraries' models come.

The measure are the predictions of the other library. The kinds stand in tables: a new
kind of model is a new line, which all routes then take.
"""

import lightgbm
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import xgboost
from tables import ROWS, SMALL, make_columns, make_regression, squared_distance

import jboost as jb

CLOSE = dict(rtol=2e-6, atol=2e-6)
LEVELS = {"few": 3, "many": 40, "some": 9}  # numbers of categories of the columns


def fit(x, y, loss=jb.losses.squared_error, **settings):
    settings = SMALL | dict(linear_leaves=False) | settings
    return jb.fit(x, y, loss, **settings)[0]


def make_matrix(columns=(), seed=0):
    """Three columns of numbers, some of which are replaced by integer categories."""
    x = make_columns(seed)
    random = np.random.default_rng(seed)
    for column, size in enumerate(columns):
        x[:, column] = random.integers(0, size, ROWS)
    x[random.random(x.shape) < 0.1] = np.nan
    return x


def make_target(x):
    """A step of the last column, and jumps of categories that are no neighbors."""
    known = np.nan_to_num(np.asarray(x, np.float32), nan=-1)
    return ((known[:, 2] > 0) + 2.0 * (known % 3 == 1).sum(axis=1)).astype(np.float32)


def make_table(names, integers=()):
    """A column of numbers and columns of categories, with gaps and unused levels."""
    random = np.random.default_rng(1)
    table = pd.DataFrame({"number": random.normal(size=ROWS)})
    target = table["number"].to_numpy(np.float32)
    for name in names:
        size = LEVELS[name]
        kind = (lambda i: 7 * i - 5) if name in integers else "{}x".format
        levels = [kind(i) for i in random.permutation(size)]
        codes = random.integers(-1, size - 1, ROWS)  # the last level does not occur
        table[name] = pd.Categorical.from_codes(codes, levels)
        target = target + 2 * (codes % 3 == 1)
    return table, target


def fit_table(names, integers=(), **settings):
    table, target = make_table(names, integers)
    return fit(table, target, **settings), table


def fit_numbers(loss=jb.losses.squared_error, **settings):
    x, y = make_regression()
    x[::7, 0] = np.nan
    return fit(x, settings.pop("y", y), loss, **settings), x


def fit_codes(columns, **settings):
    x = make_matrix(columns)
    categorical = list(range(len(columns)))
    return fit(x, make_target(x), categorical=categorical, **settings), x


def fit_sparse():
    x, y = make_regression()
    x[x < 0.3] = 0
    rows = scipy.sparse.csr_matrix(x)
    return fit(rows, y, absent="missing"), rows


def fit_offset():
    offset = np.linspace(-1, 1, ROWS, dtype=np.float32)
    return fit_numbers(offset=offset)


THREE = dict(loss=squared_distance, num_scores=3, init_score=[0, 0.5, 1])
MODELS = {
    "numbers": fit_numbers,
    "no rounds": lambda: fit_numbers(num_rounds=0),
    "one round": lambda: fit_numbers(num_rounds=1),
    "deep": lambda: fit_numbers(max_depth=9, num_rounds=2),
    "linked": lambda: (
        jb.interchange.read_lightgbm(
            lightgbm.train(
                dict(verbose=-1, num_leaves=90, min_data_in_leaf=1),
                lightgbm.Dataset(*make_regression()),
                2,
            )
        ),
        make_regression()[0],
    ),
    "three scores": lambda: fit_numbers(**THREE, share_structure=False),
    "three scores with shared trees": lambda: fit_numbers(
        **THREE, share_structure=True
    ),
    "an offset": fit_offset,
    "sparse rows": fit_sparse,
    "sets of integers": lambda: fit_codes([30]),
    "integers of two sizes": lambda: fit_codes([5, 30]),
    "single integers of two sizes": lambda: fit_codes([5, 30], max_onehot=64),
    "one column of strings": lambda: fit_table(["many"]),
    "strings of two sizes": lambda: fit_table(["few", "many"]),
    "strings of two sizes, the larger first": lambda: fit_table(["many", "few"]),
    "strings of three sizes": lambda: fit_table([*LEVELS]),
    "single strings of three sizes": lambda: fit_table([*LEVELS], max_onehot=64),
    "strings and integers": lambda: fit_table([*LEVELS], ["many", "some"]),
    "categories and no rounds": lambda: fit_table(["few", "many"], num_rounds=0),
    "categories and one round": lambda: fit_table(["few", "many"], num_rounds=1),
    "categories and scores": lambda: fit_table(
        ["few", "many"], **THREE, share_structure=False
    ),
}


def score_in_xgboost(booster, x):
    if not isinstance(x, pd.DataFrame):
        names, types = booster.feature_names, booster.feature_types
        options = dict(feature_names=names, feature_types=types)
    else:
        options = {}
    data = xgboost.DMatrix(x, enable_categorical=True, **options)
    return booster.predict(data, output_margin=True)


@pytest.mark.parametrize("kind", MODELS)
def test_models_go_to_xgboost_and_come_back(kind, tmp_path):
    """From both formats, as XGBoost saved them again, and when written again."""
    model, x = MODELS[kind]()
    expected = np.asarray(jb.predict(model, x))
    assert model.num_rounds == 0 or np.ptp(expected) > 0.1
    first, second, third = (tmp_path / name for name in ("a.json", "b.ubj", "c.json"))
    jb.interchange.write_xgboost(model, first)
    booster = xgboost.Booster(model_file=first)
    booster.save_model(second)
    jb.interchange.write_xgboost(jb.interchange.read_xgboost(second), third)
    for source in (first, second, third, booster):
        again = jb.interchange.read_xgboost(source)
        np.testing.assert_allclose(jb.predict(again, x), expected, **CLOSE)
        assert again.feature_names == model.feature_names
        assert again.shares_structure == model.shares_structure
        if model.schema.categories is not None:
            assert again.schema == model.schema
    for path in (first, second, third):
        booster = xgboost.Booster(model_file=path)
        scores = score_in_xgboost(booster, x)
        np.testing.assert_allclose(scores.reshape(expected.shape), expected, **CLOSE)


@pytest.mark.parametrize("onehot", [1, 64])
@pytest.mark.parametrize("names", [["few", "many"], ["many", "few"], [*LEVELS]])
def test_categories_of_several_sizes_come_from_xgboost(names, onehot, tmp_path):
    """Trained there, so that the file lists only categories that exist."""
    table, target = make_table(names, ["some"])
    data = xgboost.DMatrix(table, target, enable_categorical=True)
    settings = dict(max_depth=3, nthread=1, max_cat_to_onehot=onehot)
    booster = xgboost.train(settings, data, 5)
    model = jb.interchange.read_xgboost(booster)
    expected = booster.predict(data)
    np.testing.assert_allclose(jb.predict(model, table), expected, **CLOSE)
    jb.interchange.write_xgboost(model, tmp_path / "model.json")
    again = jb.interchange.read_xgboost(tmp_path / "model.json")
    np.testing.assert_allclose(jb.predict(again, table), expected, **CLOSE)


@pytest.mark.parametrize("names", [["few", "many"], ["many", "few"], [*LEVELS]])
def test_categories_of_several_sizes_come_from_lightgbm(names, tmp_path):
    table, target = make_table(names)
    settings = dict(
        verbose=-1, num_threads=1, min_data_in_leaf=5, min_data_per_group=1,
        cat_smooth=1, num_leaves=15, max_cat_to_onehot=1,
    )  # fmt: skip
    booster = lightgbm.train(settings, lightgbm.Dataset(table, target), 5)
    model = jb.interchange.read_lightgbm(booster)
    expected = booster.predict(table)
    assert model.categories.features == tuple(range(1, 1 + len(names)))
    np.testing.assert_allclose(jb.predict(model, table), expected, **CLOSE)
    jb.interchange.write_xgboost(model, tmp_path / "model.json")
    again = jb.interchange.read_xgboost(tmp_path / "model.json")
    np.testing.assert_allclose(jb.predict(again, table), expected, **CLOSE)


@pytest.mark.parametrize("names", [["few", "many"], ["many", "few"], [*LEVELS]])
def test_categories_of_several_sizes_come_from_scikit_learn(names, tmp_path):
    from sklearn.ensemble import HistGradientBoostingRegressor

    table, target = make_table(names)
    estimator = HistGradientBoostingRegressor(
        max_iter=5, min_samples_leaf=5, categorical_features="from_dtype"
    ).fit(table, target)
    model = jb.interchange.read_sklearn(estimator)
    expected = estimator.predict(table)
    np.testing.assert_allclose(jb.predict(model, table), expected, **CLOSE)
    jb.interchange.write_xgboost(model, tmp_path / "model.json")
    again = jb.interchange.read_xgboost(tmp_path / "model.json")
    np.testing.assert_allclose(jb.predict(again, table), expected, **CLOSE)
