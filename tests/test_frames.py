# SPDX-License-Identifier: Apache-2.0
"""Tables of every library train the model that their numbers train."""

import datetime
import warnings
from dataclasses import replace
from decimal import Decimal

import chex
import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tables import ROWS, SMALL, make_regression

import jboost as jb
from jboost.codes.binning import fit_frame
from jboost.sklearn import JBoostRegressor
from jboost.tables import columns
from jboost.tables.frames import Frame, Schema, read_frame, read_values

X, Y = make_regression()
X = np.where(np.random.default_rng(3).uniform(size=X.shape) < 0.1, np.float32("nan"), X)
NAMES = ("a", "b", "c")
MODEL, HISTORY = jb.fit(X, Y, **SMALL, feature_names=NAMES)
UNNAMED = replace(MODEL, feature_names=None)
CODES, KEY = jb.apply_bins(jb.fit_bins(X), X), jax.random.key(0)
NULLS = [[None if np.isnan(cell) else float(cell) for cell in row] for row in X.T]
COLUMNS = dict(zip(NAMES, NULLS, strict=True))
STRUCTURED = np.array([tuple(row) for row in X], [(name, "f4") for name in NAMES])
TABLES = dict(
    pandas=pd.DataFrame(X, columns=NAMES),
    pandas_float64=pd.DataFrame(X.astype(np.float64), columns=NAMES),
    pandas_by_column=pd.DataFrame({n: X[:, i] for i, n in enumerate(NAMES)}),
    pandas_nullable=pd.DataFrame(COLUMNS, dtype="Float64"),
    pandas_arrow=pd.DataFrame(COLUMNS, dtype="double[pyarrow]"),
    pandas_objects=pd.DataFrame(COLUMNS, dtype=object),
    pandas_index=pd.DataFrame(X, columns=NAMES, index=np.arange(ROWS)[::-1]),
    polars=pl.DataFrame(COLUMNS),
    polars_float32=pl.DataFrame(X, schema=list(NAMES)),
    arrow=pa.table(COLUMNS),
    arrow_batch=pa.record_batch(COLUMNS),
    structured=STRUCTURED,
)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_trains_the_model_of_its_numbers(name):
    table = TABLES[name]
    model, history = jb.fit(table, Y, **SMALL, validation=(table, Y))
    chex.assert_trees_all_equal(model, MODEL)
    assert model.feature_names == NAMES
    np.testing.assert_array_equal(history.train_loss, HISTORY.train_loss)
    np.testing.assert_array_equal(history.validation_loss, history.train_loss)


@pytest.mark.parametrize("name", TABLES)
def test_every_function_of_rows_takes_tables(name):
    table = TABLES[name]
    for function in (jb.predict, jb.staged_predict, jb.leaf_indices):
        np.testing.assert_array_equal(function(MODEL, table), function(MODEL, X))
    bins = jb.fit_bins(table)
    np.testing.assert_array_equal(bins.thresholds, jb.fit_bins(X).thresholds)
    np.testing.assert_array_equal(jb.apply_bins(bins, table), jb.apply_bins(bins, X))


def test_single_trees_importance_sketches_and_streams_take_tables():
    table = TABLES["polars"]
    tree = jb.cart.fit_tree(table, Y, max_depth=3)
    chex.assert_trees_all_equal(
        tree, jb.cart.fit_tree(X, Y, max_depth=3, feature_names=NAMES)
    )
    np.testing.assert_array_equal(jb.predict(tree, table), jb.predict(tree, X))
    with pytest.raises(ValueError, match=r"lacks \['c'\]"):
        jb.predict(tree, table.select("a", "b"))
    assert (
        jb.cart.cross_validate_alpha(table, Y, max_depth=2).tree.feature_names == NAMES
    )
    found = jb.explanation.permutation_importance(MODEL, table, Y, num_repeats=1)
    expected = jb.explanation.permutation_importance(MODEL, X, Y, num_repeats=1)
    np.testing.assert_array_equal(found.values, expected.values)
    sketches = [
        jb.sketches.update_sketch(jb.sketches.make_sketch(3), x) for x in (table, X)
    ]
    rows = [jb.sketches.bins_from_sketch(sketch).thresholds for sketch in sketches]
    np.testing.assert_array_equal(*rows)


# What single columns hold.

CELLS = {
    "integers": (pd.Series([3, -1, 2]), [3, -1, 2]),
    "Int64": (pd.array([3, None, 2], dtype="Int64"), [3, np.nan, 2]),
    "UInt8": (pd.array([3, None, 255], dtype="UInt8"), [3, np.nan, 255]),
    "Float32": (pd.array([0.5, None, 2], dtype="Float32"), [0.5, np.nan, 2]),
    "arrow in pandas": (
        pd.array([3, None, 2], dtype="int64[pyarrow]"), [3, np.nan, 2],
    ),
    "bool": (pd.Series([True, False, True]), [1, 0, 1]),
    "boolean": (pd.array([True, None, False], dtype="boolean"), [1, np.nan, 0]),
    "bool objects": (pd.Series([True, None, False], dtype=object), [1, np.nan, 0]),
    "number objects": (pd.Series([1, None, 2.5], dtype=object), [1, np.nan, 2.5]),
    "decimal objects": (pd.Series([Decimal("1.5"), None, 1]), [1.5, np.nan, 1]),
    "nothing": (pd.Series([None, None, None], dtype=object), [np.nan] * 3),
    "sparse pandas": (pd.arrays.SparseArray([0.0, 1.0, 0.0]), [0, 1, 0]),
    "half": (np.array([1, 2, 3], np.float16), [1, 2, 3]),
    "infinite": (pd.Series([np.inf, -np.inf, 1e300]), [np.inf, -np.inf, np.inf]),
    "polars integers": (pl.Series([3, None, 2]), [3, np.nan, 2]),
    "polars booleans": (pl.Series([True, None, False]), [1, np.nan, 0]),
    "polars decimals": (pl.Series([Decimal("1.5"), None]), [1.5, np.nan]),
    "polars Int128": (pl.Series([1, 2, 3], dtype=pl.Int128), [1, 2, 3]),
    "polars nulls": (pl.Series([None] * 3), [np.nan] * 3),
    "arrow integers": (pa.array([3, None, 2]), [3, np.nan, 2]),
    "arrow booleans": (pa.array([True, None, False]), [1, np.nan, 0]),
    "arrow nulls": (pa.nulls(3), [np.nan] * 3),
    "arrow decimals": (pa.array([Decimal("1.5"), None, Decimal(2)]), [1.5, np.nan, 2]),
}  # fmt: skip


def frame_of(column, name="z"):
    """A data frame of one column, in the library of the column."""
    if isinstance(column, pl.Series):
        return pl.DataFrame({name: column})
    return (
        pa.table({name: column})
        if isinstance(column, pa.Array)
        else (pd.DataFrame({name: column}))
    )


@pytest.mark.parametrize("name", CELLS)
def test_numbers_of_every_kind(name):
    column, expected = CELLS[name]
    frame = read_frame(frame_of(column), "x")
    assert frame.matrix.dtype == np.float32
    assert frame.names == ("z",) and frame.categories is None
    np.testing.assert_array_equal(frame.matrix[:, 0], np.float32(expected))


WORDS = ["q", None, "p", "q"]
CATEGORIES = {
    "pandas str": pd.Series(WORDS, dtype="str"),
    "pandas string": pd.Series(WORDS, dtype="string"),
    "pandas objects": pd.Series(WORDS, dtype=object),
    "pandas mixed gaps": pd.Series(["q", pd.NA, "p", "q"], dtype=object),
    "pandas category": pd.Series(pd.Categorical(WORDS, categories=["a", "q", "p"])),
    "pandas ordered": pd.Series(
        pd.Categorical(WORDS, categories=["a", "q", "p"], ordered=True)
    ),
    "pandas arrow": pd.Series(
        WORDS, dtype=pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))
    ),
    "polars": pl.Series(WORDS),
    "polars Categorical": pl.Series(WORDS, dtype=pl.Categorical),
    "polars Enum": pl.Series(WORDS, dtype=pl.Enum(["a", "q", "p"])),
    "arrow": pa.array(WORDS),
    "arrow large": pa.array(WORDS, pa.large_string()),
    "arrow view": pa.array(WORDS, pa.string_view()),
    "arrow dictionary": pa.array(WORDS).dictionary_encode(),
}


DECLARES_A_THIRD = ("pandas category", "pandas ordered", "polars Enum")


@pytest.mark.parametrize("few", [0, 1000])  # rows, by the library or one by one
@pytest.mark.parametrize("name", CATEGORIES)
def test_categories_are_sorted_those_that_occur_first(name, few, monkeypatch):
    monkeypatch.setattr(columns, "_FEW_ROWS", few)
    table = frame_of(CATEGORIES[name])
    frame = read_frame(table, "x", categorical=True)
    unused = ("a",) if name in DECLARES_A_THIRD else ()
    assert frame.categories == (("p", "q", *unused),)
    np.testing.assert_array_equal(frame.matrix[:, 0], [1, np.nan, 0, 1])
    # With the places that training gave them; what it did not see is missing.
    schema = Schema(("z",), (("b", "q", "z"),))
    later = read_frame(table, "x", schema=schema, categorical=True)
    np.testing.assert_array_equal(later.matrix[:, 0], [1, np.nan, np.nan, 1])
    assert later.categories == schema.categories


def test_few_rows_of_numbers_are_read_as_many_are():
    table = pd.DataFrame(
        {
            "wide": np.array([2**60 + 2**36 + 1, -(2**24) - 1, 3]),
            "byte": np.array([0, 255, 7], np.uint8),
            "large": [1e300, np.nan, -1e-300],
            "single": np.array([1e-42, np.inf, 0.1], np.float32),
            "flag": [True, False, True],
        }
    )
    known = Schema(tuple(table.columns))
    found = read_frame(table, "x", schema=known)
    expected = read_frame(table, "x")
    assert found.names == expected.names and found.matrix.dtype == np.float32
    np.testing.assert_array_equal(found.matrix, expected.matrix)
    with pytest.raises(ValueError, match="in the same order"):
        read_frame(table[table.columns[::-1]], "x", schema=known)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pd.Categorical([3, None, 1]), (1, 3)),
        (pd.Categorical([2.5, None, 1.5]), (1.5, 2.5)),
        (pd.Categorical([True, None, False]), (False, True)),
        (pa.array([3, None, 1]).dictionary_encode(), (1, 3)),
    ],
    ids=["integers", "floats", "booleans", "arrow"],
)
def test_categories_may_be_numbers(column, values):
    table = frame_of(column)
    frame = read_frame(table, "x", categorical=True)
    assert frame.categories == (values,)
    assert [type(v) for v in frame.categories[0]] == [type(values[0])] * 2
    np.testing.assert_array_equal(frame.matrix[:, 0], [1, np.nan, 0])
    later = read_frame(table, "x", schema=frame.schema, categorical=True)
    np.testing.assert_array_equal(later.matrix, frame.matrix)


def test_a_table_of_numbers_and_categories_keeps_its_columns():
    table = pl.DataFrame(dict(a=[1.5, 2.5], b=["x", "w"], c=[True, False]))
    frame = read_frame(table, "x", categorical=True)
    assert frame.schema == Schema(("a", "b", "c"), (None, ("w", "x"), None))
    np.testing.assert_array_equal(frame.matrix, [[1.5, 1, 1], [2.5, 0, 0]])
    fields = [("a", "f8"), ("b", "U1"), ("c", "?")]
    for kind in ("U1", "S1", "O"):
        fields[1] = ("b", kind)
        rows = [(1.5, np.array("x").astype(kind).item(), True), (2.5, "w", False)]
        if kind == "S1":
            rows[1] = (2.5, b"w", False)
        same = read_frame(np.array(rows, fields), "x", categorical=True)
        np.testing.assert_array_equal(same.matrix, frame.matrix)
        assert same.schema == frame.schema


def test_what_was_numeric_stays_numeric_and_the_reverse():
    words, numbers = pd.DataFrame(dict(z=["p", "q"])), pd.DataFrame(dict(z=[1.0, 2.0]))
    schema = read_frame(words, "x", categorical=True).schema

    def read(x, schema):
        return read_frame(x, "x", schema=schema, categorical=True).matrix

    with pytest.raises(TypeError, match=r"column 'z' of x.*categories"):
        read(numbers, schema)
    with pytest.raises(TypeError, match=r"column 'z' of x.*numbers"):
        read(words, Schema(("z",), (None,)))
    with pytest.raises(TypeError, match=r"'z' .*'p'.* 1"):
        read(numbers.astype(int).astype("category"), schema)
    for nothing in ([None, None], [np.nan, np.nan]):  # goes with both
        empty = pd.DataFrame(dict(z=nothing))
        for known in (schema, Schema(("z",), None)):
            assert np.isnan(read(empty, known)).all()


WORDS_OF = {
    "numbers": [f"{i / 7:.3f}" for i in range(40)],
    "few numbers": ["1", "2", None, "1e3"] * 10,
    "names": [f"name {i}" for i in range(40)],
    "names, some twice": [f"name {i % 38}" for i in range(40)],
    "half": [f"name {i % 20}" for i in range(40)],
    "few rows": ["p", "q"],
    "a number among words": ["1", "2", "none", "3"] * 10,
    "not finite": ["nan", "inf", "-Infinity"],
    "digits in groups": ["1_000", "2_000"],
}
SETTINGS = dict(max_bins=256, sample_weight=None, absent=None, categorical="auto")
LOOK_LIKE_IDS = ("names", "names, some twice")


@pytest.mark.parametrize("kind", [pd.Series, pl.Series, pa.array, np.array])
@pytest.mark.parametrize("name", WORDS_OF)
def test_strings_that_look_like_numbers_or_identifiers_are_reported(name, kind):
    words = WORDS_OF[name]
    table = frame_of(kind(words)) if kind is not np.array else None
    if table is None:  # a structured array
        table = np.array([(word,) for word in words], [("z", object)])

    def warnings_of(table, **arguments):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            frame = read_frame(table, "x", categorical=True, **arguments)
            fit_frame(frame, **SETTINGS)
        return frame, [str(warning.message) for warning in caught]

    frame, messages = warnings_of(table)
    if "numbers" in name:
        assert "column 'z' of x" in messages[0] and "numbers" in messages[0]
    elif name in LOOK_LIKE_IDS:
        assert "column 'z' of x" in messages[0] and "40 rows" in messages[0]
    assert len(messages) == ("numbers" in name or name in LOOK_LIKE_IDS)
    assert not warnings_of(table, schema=frame.schema)[1]  # said once, in training
    declared = pd.DataFrame(dict(z=pd.Categorical(words)))
    assert not warnings_of(declared)[1]


def test_fit_bins_reports_strings_that_look_like_numbers():
    table = pd.DataFrame(dict(z=[str(i / 7) for i in range(ROWS)]))
    with pytest.warns(UserWarning, match="column 'z' of x"):
        jb.fit_bins(table)


def test_strings_that_the_caller_declares_categorical_are_not_reported():
    words = [str(i % 9) for i in range(ROWS)]
    table = pd.DataFrame(dict(a=words, b=words))
    y = (np.arange(ROWS) % 9).astype(np.float32)
    own = dict(num_rounds=0)
    calls = [
        lambda **more: jb.fit(table, y, **own, **more),
        lambda **more: jb.cross_validate(table, y, folds=2, **own, **more),
        lambda **more: jb.fit_bins(table, **more),
        lambda **more: JBoostRegressor(**own, **more).fit(table, y),
    ]
    for listed, reported in ((["a"], "b"), ([1], "a"), (["b", 0], ""), ((), "ab")):
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(categorical=listed)
            found = [str(warning.message).split("'")[1] for warning in caught]
            assert found == [*reported]
            assert all(warning.filename == __file__ for warning in caught)


DATE, DAY = datetime.datetime(2020, 1, 1), datetime.timedelta(days=1)
REFUSED = {
    "dates": (
        pd.Series([DATE, None]),
        r"dates or times \(Datetime.*the day of the wee",
    ),
    "date objects": (
        pd.Series([DATE.date()], dtype=object),
        r"dates or times \(date\)",
    ),
    "durations": (pd.Series([DAY]), r"dates or times \(Duration"),
    "polars dates": (pl.Series([DATE.date()]), r"dates or times \(Date\)"),
    "polars times": (pl.Series([DATE.time()]), r"dates or times \(Time\)"),
    "arrow dates": (pa.array([DATE]), r"dates or times \(Datetime"),
    "date categories": (pd.Categorical([DATE]), r"dates or times \(Timestamp\)"),
    "mixed": (pd.Series([1, "p", None], dtype=object), "int and str"),
    "mixed categories": (pd.Categorical([1, "p"]), "of one type.*got int and str"),
    "intervals": (
        pd.cut([1, 2, 3], 2),
        "of one type.*got Interval; convert them to str",
    ),
    "periods": (pd.period_range("2020", periods=2, freq="M"), "times .Period"),
    "period categories": (
        pd.Categorical(pd.period_range("2020", periods=2, freq="M")),
        "times .Period",
    ),
    "complex": (pd.Series([1j]), "of types complex"),
    "lists": (pd.Series([[1], [2]]), "of types list"),
    "polars lists": (pl.Series([[1], [2]]), "of types list"),
    "polars structs": (pl.Series([{"p": 1}]), "of types dict"),
    "bytes": (pl.Series([b"p"]), "of types bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_is_refused_by_name(name):
    column, message = REFUSED[name]
    with pytest.raises(TypeError, match=rf"column 'z' of x.*{message}"):
        read_frame(frame_of(column), "x", categorical=True)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (pl.LazyFrame({"a": [1.0]}), TypeError, "x must be in memory, got a LazyFrame"),
        (pd.DataFrame(X, columns=["a", "b", "a"]), ValueError, "unique .*'a'"),
        (pd.DataFrame(X, columns=["a", 1, 2]), TypeError, "only string column names"),
        (pd.DataFrame({"a": []}), ValueError, r"x must have .*1"),
        (pl.DataFrame(), ValueError, "x must have at least one"),
        (pd.Series([1.0]), ValueError, "x must be 2-D"),
        (STRUCTURED[None], ValueError, "x must be 1-D where it is a structured array"),
        (np.zeros(2, [("a", "f4", 2)]), TypeError, "column 'a' .* cells of shape"),
        (np.zeros(2, [("a", "M8[D]")]), TypeError, r"dates or times \(datetime64"),
    ],
)  # fmt: skip
def test_tables_that_are_none_are_refused(x, error, message):
    for read in (jb.fit_bins, lambda x: jb.predict(UNNAMED, x)):
        with pytest.raises(error, match=message):
            read(x)


# Names.


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["b", "a", "c"], r"same order, expected 'a', got 'b'"),
        (["a", "b"], r"lacks \['c'\]"),
        (["a", "b", "c", "d"], r"has additional columns \['d'\]"),
        (["a", "b", "z"], r"lacks \['c'\], has additional columns \['z'\]"),
    ],
)
def test_other_columns_than_in_training_are_named(columns, message):
    table = pl.DataFrame({name: np.zeros(4) for name in columns})
    with pytest.raises(ValueError, match=rf"^x .*{message}"):
        jb.predict(MODEL, table)
    with pytest.raises(ValueError, match=rf"^validation x .*{message}"):
        jb.fit(TABLES["arrow"], Y, validation=(table, np.zeros(4)), **SMALL)


def test_tables_without_names_and_models_without_names():
    unnamed = pd.DataFrame(X)
    assert read_frame(unnamed, "x") == Frame(pytest.approx(X, nan_ok=True), None, None)
    np.testing.assert_array_equal(jb.predict(MODEL, unnamed), jb.predict(MODEL, X))
    model, _ = jb.fit(unnamed, Y, **SMALL)
    assert model.feature_names is None
    np.testing.assert_array_equal(
        jb.predict(model, TABLES["pandas"]), jb.predict(MODEL, X)
    )
    with pytest.raises(ValueError, match="x must have 3 columns"):
        jb.predict(model, unnamed[[0, 1]])
    with pytest.raises(ValueError, match=r"feature_names .*'a', 'b'"):
        jb.fit(TABLES["pandas"], Y, feature_names=["p", "q", "r"])


def test_a_column_that_collides_in_float32_is_named():
    wide = pd.DataFrame(dict(a=X[:, 0], b=1e9 + np.arange(ROWS)))
    with pytest.warns(UserWarning, match=r"column 'b' of x.*200"):
        jb.fit(wide, Y, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jb.fit(wide.assign(b=np.arange(ROWS)), Y, **SMALL)


FAR = 1e9 + Y.astype(np.float64)
FAR_CALLS = {
    "y": lambda: jb.fit(X, FAR, num_rounds=0),
    "integer y": lambda: jb.fit(X, 10**9 + np.arange(ROWS), num_rounds=0),
    "y of several": lambda: jb.boost(
        CODES,
        dict(a=Y, b=FAR),
        lambda s, t: (s - t["a"]) ** 2,
        KEY,
        num_rounds=0,
        init_score=0.0,
    ),
    "validation y": lambda: jb.fit(X, Y, validation=(X, FAR), num_rounds=0),
    "offset": lambda: jb.fit(X, Y, offset=FAR, num_rounds=0),
    "validation offset": lambda: jb.fit(
        X, Y, offset=Y, validation=(X, Y, None, FAR), num_rounds=0
    ),
    "y of batch 0": lambda: jb.fit(jb.stream([(X, FAR)], memory="1 MiB"), num_rounds=0),
    "y of folds": lambda: jb.cross_validate(X, FAR, num_rounds=0),
}


@pytest.mark.parametrize("name", FAR_CALLS)
def test_targets_and_offsets_that_collide_in_float32_are_named(name):
    place = name.removeprefix("integer ").removesuffix(" of several")
    place = place.removesuffix(" of folds")
    message = f"^{place} has 200 distinct .*64 values"
    with pytest.warns(UserWarning, match=message) as caught:
        FAR_CALLS[name]()
    assert caught[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jb.fit(X, Y.astype(np.float64), offset=Y.astype(np.float64), num_rounds=0)


def test_warnings_within_an_estimator_name_the_line_of_its_caller():
    with pytest.warns(UserWarning, match="^y has 200 distinct") as caught:
        JBoostRegressor(num_rounds=0).fit(X, FAR)
    assert caught[0].filename == __file__


# Targets, weights, offsets.

TARGETS = dict(
    pandas=pd.Series(Y, index=np.arange(ROWS)[::-1]),
    nullable=pd.Series(Y, dtype="Float32"),
    objects=pd.Series(Y.tolist(), dtype=object),
    index=pd.Index(Y),
    frame=pd.DataFrame(dict(y=Y)),
    polars=pl.Series(Y),
    polars_frame=pl.DataFrame(dict(y=Y)),
    arrow=pa.array(Y),
    arrow_chunks=pa.chunked_array([Y[:50], Y[50:]]),
    arrow_table=pa.table(dict(y=Y)),
)


@pytest.mark.parametrize("name", TARGETS)
def test_targets_weights_and_offsets_of_every_kind(name):
    y = TARGETS[name]
    given = read_values(y, "y")
    assert given.shape == (ROWS,)
    np.testing.assert_array_equal(given, Y)
    weight = type(y)(np.abs(Y)) if name in ("pandas", "polars") else np.abs(Y)
    model, _ = jb.fit(X, y, sample_weight=weight, offset=y, **SMALL)
    expected, _ = jb.fit(X, Y, sample_weight=np.abs(Y), offset=Y, **SMALL)
    chex.assert_trees_all_equal(model, expected)
    scores = jb.predict(model, X, offset=y)
    np.testing.assert_array_equal(scores, jb.predict(expected, X, offset=Y))
    tree = jb.cart.fit_tree(X, y, sample_weight=weight, max_depth=2)
    chex.assert_trees_all_equal(
        tree, jb.cart.fit_tree(X, Y, sample_weight=np.abs(Y), max_depth=2)
    )


def test_targets_keep_their_type_and_their_columns():
    assert read_values(pd.Series([1, 2], dtype="Int64"), "y").dtype == np.int64
    assert read_values(pd.Series([True], dtype="boolean"), "y").dtype == bool
    missing = read_values(pl.Series([1, None]), "y")
    np.testing.assert_array_equal(missing, [1, np.nan])
    pairs = read_values(pl.DataFrame(dict(p=[1, 2], q=[0.5, None])), "y")
    np.testing.assert_array_equal(pairs, [[1, 0.5], [2, np.nan]])
    objects = read_values(np.array([True, None, 2.5], object), "y")
    np.testing.assert_array_equal(objects, [1, np.nan, 2.5])
    with pytest.raises(TypeError, match=r"^y .*object"):
        read_values(np.array(["p", None], object), "y")
    with pytest.raises(TypeError, match=r"^y .*String"):
        jb.fit(X, pl.Series(["p"] * ROWS))
    with pytest.raises(TypeError, match=r"^y .*dates"):
        jb.fit(X, pd.Series([DATE] * ROWS))
    with pytest.raises(ValueError, match=r"^y .*row 7"):
        jb.fit(X, pd.Series(Y, dtype="Float32").where(np.arange(ROWS) != 7), **SMALL)
