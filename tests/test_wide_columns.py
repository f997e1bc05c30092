# SPDX-License-Identifier: Apache-2.0
"""Models of float64 libraries predict exactly what float32 cannot hold.

The measure are the predictions of those libraries on the same rows. A row in the wrong
leaf differs by far more than the roundings of a sum.
"""

import io
import re
import warnings
from dataclasses import replace

import jax.numpy as jnp
import lightgbm
import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
from sklearn.ensemble import HistGradientBoostingClassifier as HistClassifier
from sklearn.ensemble import HistGradientBoostingRegressor as HistRegressor
from tables import ROWS

import jboost as jb
from jboost.interchange.linked import round_down
from jboost.model.wide_thresholds import pack_float64, unpack_float64
from jboost.tables.columns import make_wide_column

CLOSE = dict(rtol=3e-6, atol=3e-6)
TINY = np.finfo(np.float32).tiny

# The law of one column, by loops over all pairs.

SEVERAL = np.random.default_rng(0).normal(size=20)
THRESHOLDS = {
    "seconds": 1.7e9 + np.arange(40) * 7 + 0.5,
    "negative": -1.7e9 - np.arange(40) * 7 - 0.5,
    "equal in float32": 1 + np.arange(30) * 1e-12,
    "around zero": np.concatenate([-1e-40 * SEVERAL, [0.0], 1e-38 * SEVERAL]),
    "both signs": np.concatenate([[-1 - 1e-9, -1], [-1e-9, 1e-9], [1, 1 + 1e-9]]),
    "plain": SEVERAL,
    "one": np.array([0.1]),
    "beyond float32": np.array([-1e300, -1e39, -2e38, 1e38, 1e39, 1e300, np.inf]),
    "largest": np.array([1e39, 2e39]),
}


@pytest.mark.parametrize("kind", THRESHOLDS)
def test_numbers_compare_as_the_values_do(kind):
    thresholds = np.unique(THRESHOLDS[kind])
    rounded = round_down(thresholds)
    column = make_wide_column(thresholds, rounded)
    beside = [np.nextafter(thresholds, side) for side in (-np.inf, np.inf)]
    spread = [thresholds + step for step in (-1e-7, -0.4, 0.4, 1e-7)]
    values = np.concatenate([thresholds, *beside, *spread, [0.0, -0.0, np.nan]])
    converted = column.convert(values)
    assert converted.dtype == column.codes.dtype == np.float32
    assert np.isnan(converted[-1]) and (converted[-3:-1] == 0).all()
    # XLA compares denormals as 0.
    flush = lambda a: np.where(np.abs(a) < TINY, np.float32(0), a)  # noqa: E731
    found = flush(converted)[:, None] <= flush(column.codes)
    np.testing.assert_array_equal(found, values[:, None] <= thresholds)
    assert np.isfinite(column.codes[np.isfinite(thresholds)][1:]).all()
    # float32 values are compared with the thresholds for float32.
    single = values[np.isfinite(values) & (np.abs(values) < 1e38)].astype(np.float32)
    single = single[np.abs(single) >= TINY]
    found = column.convert(single)[:, None] <= column.codes
    np.testing.assert_array_equal(found, single[:, None] <= rounded)


def test_float64_goes_through_words():
    values = np.array([[0.1, np.nan, -np.inf], [1e300, -0.0, 5e-324]])
    words = pack_float64(values)
    assert words.dtype == np.uint32 and words.shape == (2, 3, 2)
    np.testing.assert_array_equal(unpack_float64(words), values)


# Models.


def make_table(kind):
    """Three columns; values of the first are too close for float32."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3))
    position = random.integers(0, 9000, ROWS)
    x[:, 0] = {
        "seconds": 1.7e9 + position,
        "milliseconds": 1.7e12 + position,
        "numbers": 9e14 + position,
        "negative": -1.7e9 - position,
        "days": 2.46e6 + position / 86400,
        "fractions": 1 + position * 1e-9,
        "two values": 2.0**25 + position % 2,
    }[kind]
    x[::9, 0] = np.nan
    jumps = position % 2 if kind == "two values" else np.sin(position / 700)
    return x, 2 * jumps + x[:, 1]


COLUMNS = (
    "seconds", "milliseconds", "numbers", "negative", "days", "fractions", "two values",
)  # fmt: skip


def train_lightgbm(x, y, num_rounds=5, **settings):
    plain = dict(verbose=-1, num_threads=1, min_data_in_leaf=3, num_leaves=15)
    data = lightgbm.Dataset(x, y)
    booster = lightgbm.train(plain | settings, data, num_rounds)
    return jb.interchange.read_lightgbm(booster), booster.predict


def train_sklearn(x, y):
    estimator = HistRegressor(max_iter=5, min_samples_leaf=3).fit(x, y)
    return jb.interchange.read_sklearn(estimator), estimator.predict


READERS = {"lightgbm": train_lightgbm, "sklearn": train_sklearn}


@pytest.mark.parametrize(
    ("kind", "reader"),
    [(kind, "lightgbm") for kind in COLUMNS]
    + [(kind, "sklearn") for kind in ("milliseconds", "fractions", "two values")],
)
def test_values_that_float32_cannot_hold(kind, reader):
    x, y = make_table(kind)
    model, predict = READERS[reader](x, y)
    assert model.wide_threshold is not None
    expected = predict(x)
    np.testing.assert_allclose(jb.predict(model, x), expected, **CLOSE)
    # Thresholds for float32 would not do.
    plain = replace(model, wide_threshold=None)
    assert np.abs(np.asarray(jb.predict(plain, x)) - expected).max() > 0.01
    # At thresholds, and beside them.
    exact = unpack_float64(np.asarray(model.wide_threshold))
    edges = np.resize(exact[~np.isnan(exact)], ROWS)
    for value in (edges, np.nextafter(edges, 0), np.nextafter(edges, edges * 2)):
        x[:, 0] = value
        np.testing.assert_allclose(jb.predict(model, x), predict(x), **CLOSE)


def predict_stream(model, x):
    parts = [(x[:90], np.zeros(90)), (pd.DataFrame(x[90:]), np.zeros(ROWS - 90))]
    return jb.predict(model, jb.stream(lambda: iter(parts), memory="100MB"))


def predict_saved(model, x):
    file = io.BytesIO()
    jb.save(model, file)
    file.seek(0)
    return jb.predict(jb.load(file), x)


def sum_leaves(model, x):
    leaves = np.asarray(jb.leaf_indices(model, x))
    values = np.asarray(model.leaf_value)[:, 0]
    rounds = np.arange(model.num_rounds)
    return np.asarray(model.init_score) + values[rounds, leaves].sum(axis=1)


def sum_shap(model, x):
    found = jb.shap_values(model, x)
    return found.values.sum(axis=1) + found.base


def frame(x, model, library):
    names = model.feature_names or ("a", "b", "c")
    return library.DataFrame(dict(zip(names, x.T, strict=True)))


ROUTES = {
    "xla": lambda m, x: jb.predict(m, x, implementation="xla"),
    "list": lambda m, x: jb.predict(m, x.tolist()),
    "pandas": lambda m, x: jb.predict(m, frame(x, m, pd)),
    "polars": lambda m, x: jb.predict(m, frame(x, m, pl)),
    "masked": lambda m, x: jb.predict(m, np.ma.masked_invalid(x)),
    "fortran": lambda m, x: jb.predict(m, np.asfortranarray(x)),
    "sparse": lambda m, x: jb.predict(m, scipy.sparse.csc_matrix(x)),
    "sparse in xla": lambda m, x: jb.predict(
        m, scipy.sparse.csr_matrix(x), implementation="xla"
    ),
    "stream": predict_stream,
    "saved": predict_saved,
    "leaves": sum_leaves,
    "stages": lambda m, x: jb.staged_predict(m, x)[-1],
    "all rounds": lambda m, x: jb.predict(jb.truncate(m, m.num_rounds), x),
    "offset": lambda m, x: jb.predict(m, x, offset=np.ones(ROWS)) - 1,
    "shap": sum_shap,
    "shap of sparse rows": lambda m, x: sum_shap(m, scipy.sparse.csr_matrix(x)),
}


@pytest.fixture(scope="module")
def trained():
    """Rows, of which some hold zeros, a model, and what LightGBM predicts."""
    x, y = make_table("seconds")
    x[5:30, 0] = 0  # what sparse matrices do not store
    model, predict = train_lightgbm(x, y)
    return model, x, predict(x)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_compares_float64(route, trained):
    model, x, expected = trained
    np.testing.assert_allclose(ROUTES[route](model, x), expected, **CLOSE)


def test_integers_and_categories_of_a_data_frame():
    x, y = make_table("numbers")
    words = np.arange(ROWS) % 5
    table = pd.DataFrame(
        {"id": np.nan_to_num(x[:, 0], nan=3).astype(np.int64), "b": x[:, 1]}
    )
    table["w"] = pd.Categorical.from_codes(words, [*"uvwxy"])
    y = y + 2 * (words % 3 == 1)
    settings = dict(cat_smooth=1, min_data_per_group=1, max_cat_to_onehot=1)
    model, predict = train_lightgbm(table, y, **settings)
    np.testing.assert_allclose(jb.predict(model, table), predict(table), **CLOSE)
    estimator = HistRegressor(
        max_iter=5, min_samples_leaf=3, categorical_features="from_dtype"
    ).fit(table, y)
    model = jb.interchange.read_sklearn(estimator)
    np.testing.assert_allclose(
        jb.predict(model, table), estimator.predict(table), **CLOSE
    )


def test_several_classes_and_deep_trees():
    x, y = make_table("seconds")
    labels = np.digitize(y, [-1, 1])
    model, predict = train_lightgbm(x, labels, objective="multiclass", num_class=3)
    np.testing.assert_allclose(
        jb.predict(model, x), predict(x, raw_score=True), **CLOSE
    )
    estimator = HistClassifier(max_iter=3, min_samples_leaf=3).fit(x, labels)
    model = jb.interchange.read_sklearn(estimator)
    np.testing.assert_allclose(
        jb.predict(model, x), estimator.decision_function(x), **CLOSE
    )
    model, predict = train_lightgbm(x, y, num_leaves=90, min_data_in_leaf=1)
    assert model.links is not None
    np.testing.assert_allclose(jb.predict(model, x), predict(x), **CLOSE)


def test_float32_rows_are_compared_as_they_are():
    """By arrays of NumPy and of JAX and by tables alike."""
    x, y = make_table("seconds")
    model, predict = train_lightgbm(x, y)
    single = x.astype(np.float32)
    expected = predict(single.astype(float))
    for rows in (single, jnp.asarray(single), frame(single, model, pd)):
        np.testing.assert_allclose(jb.predict(model, rows), expected, **CLOSE)


@pytest.mark.usefixtures("full_search")
def test_refitted_leaves_are_means_of_the_rows_that_reach_them():
    x, y = make_table("seconds")
    model, _ = train_lightgbm(x, y, num_rounds=1)
    refitted = jb.refit(
        model, x, y, jb.losses.squared_error, decay=0.0, learning_rate=1.0, l2=0.0
    )
    refitted = refitted[0] if isinstance(refitted, tuple) else refitted
    leaves = np.asarray(jb.leaf_indices(model, x))[:, 0]
    means = {leaf: y[leaves == leaf].mean() for leaf in np.unique(leaves)}
    expected = [means[leaf] for leaf in leaves]
    np.testing.assert_allclose(jb.predict(refitted, x), expected, rtol=1e-4, atol=1e-4)


def test_shuffled_columns_measure_the_same_loss():
    x, y = make_table("seconds")
    model, predict = train_lightgbm(x, y)
    found = jb.explanation.permutation_importance(
        model, x, y, jb.losses.squared_error, num_repeats=1
    )
    order = np.random.default_rng((0, 0, 0)).permutation(ROWS)
    shuffled = np.column_stack([x[order, 0], x[:, 1:]])
    expected = np.mean((predict(shuffled) - y) ** 2) - np.mean((predict(x) - y) ** 2)
    np.testing.assert_allclose(found.values[0], expected, rtol=1e-4)


def test_what_compares_float32_says_so(tmp_path):
    x, y = make_table("seconds")
    model, _ = train_lightgbm(x, y)
    path = tmp_path / "model.json"
    for call, user in [
        (lambda: jb.interchange.write_xgboost(model, path), "XGBoost"),
        (lambda: jb.interchange.to_matrix(model, x), "exported program"),
        (lambda: jb.partial_dependence(model, x, 1, grid=[0.0]), "partial_dependence"),
        (lambda: jb.fit(x, y, model=model, num_rounds=1, max_depth=3), "training"),
    ]:
        with pytest.warns(UserWarning) as caught:
            call()
        told = [w for w in caught if f"but {user}" in str(w.message).replace("an ", "")]
        assert len(told) == 1 and told[0].filename == __file__
        assert "columns ['Column_0']" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        longer, _ = jb.fit(x, y, model=model, num_rounds=1, max_depth=3)
    first = jb.predict(jb.truncate(longer, 5), x)
    np.testing.assert_array_equal(first, jb.predict(model, x.astype(np.float32)))


def test_other_models_compare_float32():
    """Of numbers that float32 tells apart, however they are rounded."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3)) * [1, 1000, 1e-6]
    y = np.sin(3 * x[:, 0]) + x[:, 1] / 1000
    for train in READERS.values():
        model, predict = train(x, y)
        assert model.wide_threshold is None
        np.testing.assert_allclose(jb.predict(model, x), predict(x), **CLOSE)


def test_damaged_words_are_refused():
    model, _ = train_lightgbm(*make_table("seconds"))
    model = replace(model, wide_threshold=model.wide_threshold[..., :1])
    with pytest.raises(
        ValueError, match=re.escape("words of wide_threshold must be 2")
    ):
        jb.save(model, io.BytesIO())
