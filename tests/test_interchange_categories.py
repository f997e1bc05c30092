# SPDX-License-Identifier: Apache-2.0
"""Categories of data frames go to XGBoost and come from LightGBM by name.

The measure are the predictions of those libraries for the table of training itself.
"""

import warnings

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from tables import SMALL

import jboost as jb

ROWS = 200
CLOSE = dict(rtol=2e-6, atol=2e-6)
WORDS = ["lo", "mid", "hi", "", "zz top"]


def make_frame(seed=0, integers=False):
    """Numbers, strings and integers as categories; gaps, and levels without rows."""
    random = np.random.default_rng(seed)
    words = random.integers(-1, 4, ROWS)  # -1: missing; "zz top" never occurs
    tens = random.choice([5, 10, -20, 40], ROWS)
    frame = pd.DataFrame(
        {
            "Größe": random.normal(size=ROWS),
            "words": pd.Categorical.from_codes(words, WORDS),
            "ten,s": pd.Categorical(tens, categories=[40, -20, 99, 5, 10]),
            'a "quote"\\': random.integers(0, 9, ROWS) if integers else 0.5,
            "empty": pd.Categorical([None] * ROWS, categories=["never"]),
        }
    )
    target = (words == 1) + 2.0 * (tens == 5) - (tens == 40) + frame["Größe"]
    return frame, target.to_numpy(np.float32)


def fit(frame, target, **settings):
    settings = SMALL | dict(linear_leaves=False) | settings
    return jb.fit(frame, target, **settings)[0]


def assert_same_scores(model, frame, path, table=None, **arguments):
    """XGBoost's scores of the frame, or of a table in its place, are ours."""
    jb.interchange.write_xgboost(model, path, **arguments)
    booster = xgboost.Booster(model_file=path)
    table = frame if table is None else table
    data = xgboost.DMatrix(table, enable_categorical=True)
    if arguments:
        data.feature_names = booster.feature_names
        data.feature_types = booster.feature_types
    ours = jb.predict(model, frame)
    assert np.ptp(ours) > 1
    np.testing.assert_allclose(booster.predict(data), ours, **CLOSE)
    return booster


@pytest.mark.parametrize(
    "columns",
    [slice(None), ["Größe", "words"], ["ten,s", "Größe"]],
    ids=["mixed", "strings", "integers"],
)
def test_xgboost_predicts_the_same_from_the_table_of_training(tmp_path, columns):
    frame, target = make_frame()
    frame = frame.loc[:, columns]
    model, path = fit(frame, target), tmp_path / "model.json"
    for other in (path, tmp_path / "model.ubj"):
        booster = assert_same_scores(model, frame, other)
        assert booster.feature_names == [*frame.columns]
    # Rows that training did not see, of categories that it saw or that were declared.
    later = pd.concat([frame[::-1], frame[:9]], ignore_index=True)
    if "words" in frame:
        later.loc[:20, "words"] = "zz top"
    if "ten,s" in frame:
        later.loc[9:30, "ten,s"] = 99
    assert_same_scores(model, later, path)
    # The model is the same when it comes back.
    again = jb.interchange.read_xgboost(path)
    np.testing.assert_allclose(
        jb.predict(again, later), jb.predict(model, later), **CLOSE
    )


def test_xgboost_predicts_the_same_where_an_integer_column_is_categorical(tmp_path):
    """Such a column has no names: XGBoost takes its integers, as we do."""
    frame, target = make_frame(integers=True)
    places = ["words", "ten,s", 'a "quote"\\']
    model = fit(frame, target + 3 * (frame[places[2]] == 4), categorical=places)
    assert_same_scores(model, frame, tmp_path / "model.json")


@pytest.mark.parametrize(
    "levels, value",
    [(["u", "vé", "w"], "vé"), ([0.5, 1.5], 0.5), ([False, True], False)],
)
def test_names_that_xgboost_cannot_hold_are_refused_unless_codes_will_do(
    tmp_path, levels, value
):
    frame, target = make_frame()
    codes = np.arange(ROWS) % len(levels)
    frame["é"] = pd.Categorical.from_codes(codes, levels)
    frame = frame[["Größe", "words", "é"]]
    model, path = fit(frame, target + 2 * codes), tmp_path / "model.json"
    with pytest.raises(ValueError, match=rf"categories .*{value!r} .*'é'"):
        jb.interchange.write_xgboost(model, path)
    assert not path.exists()
    # Without names XGBoost takes positions in ``categories.values``.
    values = dict(zip(["words", "é"], model.categories.values, strict=True))
    matrix = frame[["Größe"]].to_numpy(np.float32)
    for name, known in values.items():
        places = pd.Categorical(frame[name], categories=known).codes.astype("f4")
        matrix = np.column_stack([matrix, np.where(places < 0, np.nan, places)])
    booster = assert_same_scores(model, frame, path, matrix, categories="codes")
    assert booster.feature_types == ["float", "c", "c"]
    assert booster.get_categories().empty()


def test_feature_names_that_xgboost_cannot_read_are_refused(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(ROWS, 2)), np.arange(ROWS)
    for name, suffixes in [("a\x01", ["json"]), ("\0", ["json", "ubj"])]:
        model = fit(x, y, num_rounds=1, feature_names=[name, "b"])
        for suffix in ("json", "ubj"):
            path = tmp_path / f"{len(name)}.{suffix}"
            if suffix in suffixes:
                with pytest.raises(ValueError, match="feature_names"):
                    jb.interchange.write_xgboost(model, path)
            else:
                jb.interchange.write_xgboost(model, path)
                assert xgboost.Booster(model_file=path).feature_names == [name, "b"]


# From LightGBM.


def train(frame, target, num_rounds=5, **arguments):
    settings = dict(
        verbose=-1, num_threads=1, min_data_in_leaf=5, min_data_per_group=1,
        cat_smooth=1, num_leaves=7, max_cat_to_onehot=1, deterministic=True,
    )  # fmt: skip
    return lightgbm.train(
        settings, lightgbm.Dataset(frame, target, **arguments), num_rounds
    )


def assert_raw_scores(model, booster, frame):
    expected = booster.predict(frame, raw_score=True)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(jb.predict(model, frame), expected, **CLOSE)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    "name, column",
    [
        ("empty", pd.Categorical([None] * ROWS, categories=["never"])),
        ("constant", pd.Categorical(["k"] * ROWS)),
        ("half", pd.Categorical(["k"] * ROWS, categories=["k", "l"])),
        ("large", np.arange(ROWS) % 7 + 100),
        ("small", np.arange(ROWS) % 3),
    ],
)
def test_lightgbm_keeps_the_names_of_categories(tmp_path, saved, name, column):
    """Beside a column that is constant, or one of integers that is categorical."""
    frame, target = make_frame()
    frame = frame.rename(columns={"ten,s": "tens"})[["Größe", "words", "tens"]]
    integers = isinstance(column, np.ndarray)
    if integers:  # or nothing would tell which columns had names
        for other in ("words", "tens"):
            frame[other] = frame[other].cat.remove_unused_categories()
        target = target + 2 * (column % 3 == 1)
    frame.insert(0, name, column)
    booster = source = train(
        frame,
        target,
        categorical_feature=[name, "words", "tens"] if integers else "auto",
    )
    if saved:
        source = tmp_path / "model.txt"
        booster.save_model(source)
    model = jb.interchange.read_lightgbm(source)
    named = dict(zip(model.categories.features, model.categories.values, strict=True))
    places = [*frame.columns]
    assert named[places.index("words")] == tuple(frame["words"].cat.categories)
    assert named[places.index("tens")] == tuple(frame["tens"].cat.categories)
    assert_raw_scores(model, booster, frame)


def test_lightgbm_names_whose_column_is_not_clear_are_dropped_with_a_warning():
    """Two columns of three categories each, of which one is a column of integers."""
    random = np.random.default_rng(0)
    code, number = random.integers(0, 3, (2, ROWS))
    frame = pd.DataFrame(
        dict(a=pd.Categorical.from_codes(code, ["u", "v", "w"]), b=number)
    )
    booster = train(frame, 2.0 * code + (number == 1), categorical_feature=["a", "b"])
    with pytest.warns(UserWarning, match="names of categories") as caught:
        model = jb.interchange.read_lightgbm(booster)
    assert caught[0].filename == __file__
    expected = booster.predict(frame)
    frame["a"] = frame["a"].cat.codes
    np.testing.assert_allclose(jb.predict(model, frame), expected, **CLOSE)


def test_lightgbm_names_are_not_given_to_another_column():
    """A column of category dtype that LightGBM was told to take for numbers."""
    frame, target = make_frame()
    frame = frame[["Größe", "words"]].assign(ids=np.arange(ROWS) % 7)
    frame["words"] = frame["words"].cat.remove_unused_categories()
    booster = train(frame, target + frame["ids"], categorical_feature=["ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = jb.interchange.read_lightgbm(booster)
    assert model.categories.values is None
    matrix = frame.assign(words=frame["words"].cat.codes.replace(-1, np.nan))
    expected = booster.predict(frame, raw_score=True)
    np.testing.assert_allclose(jb.predict(model, matrix), expected, **CLOSE)


@pytest.mark.parametrize("least", [2**24 - 8, 2**24])
def test_lightgbm_of_large_integers(tmp_path, least):
    """Equal, or refused where float32 merges them."""
    x = np.random.default_rng(0).integers(0, 8, (ROWS, 1)) + least
    y = np.isin(x[:, 0] - least, [1, 2, 5]) * 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LightGBM's, of large values
        booster = train(x.astype(float), y, 1, categorical_feature=[0])
    if least < 2**24:
        assert_raw_scores(
            jb.interchange.read_lightgbm(booster), booster, x.astype(np.float32)
        )
    else:
        with pytest.raises(jb.FileError, match=f"{2**24}"):
            jb.interchange.read_lightgbm(booster)


def test_what_lightgbm_saw_and_does_not_list_takes_no_memory(tmp_path):
    path, frame = tmp_path / "model.txt", np.arange(ROWS)[:, None] % 5
    text = train(frame, frame[:, 0] == 3, categorical_feature=[0]).model_to_string()
    assert text.count("feature_infos=") == 1
    path.write_text(text.replace("feature_infos=", "feature_infos=3000000000:"))
    assert jb.interchange.read_lightgbm(path).categories.codes.shape[1] == 5
