# SPDX-License-Identifier: Apache-2.0
"""Files that earlier versions wrote still load, and predict what they predicted then.

``data/version-0.1.0`` was written once, by ``write`` below, which calls that version.
These files are never written again: a later layout gets a folder of its own. There are
no checkpoints and block files, because only the version that wrote them reads them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tables import draw

import jboost as jb

FOLDER = Path(__file__).parent / "data" / "version-0.1.0"
LINEAR = FOLDER.parent / "version-0.2.0" / "linear.jboost"
MODELS = ("plain", "categories", "scores", "linked", "tree", "two-targets")
WORDS = np.array(["red", "green", "blue", "größer"])
FEW, ONE = dict(num_rounds=3, max_depth=3), dict(num_rounds=1, max_depth=3)

X = draw(80, 3)
X[::7, 0] = np.nan
Y = np.nan_to_num(X[:, 0]) + np.abs(X[:, 1])


def make_frame():
    """A column of words, one of integers and two of numbers."""
    pandas = pytest.importorskip("pandas")
    codes = np.abs(X[:, 2]).astype(int)
    words = pandas.Categorical(WORDS[codes % 4])
    return pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": words, "d": codes})


def table_of(name):
    return make_frame() if name == "categories" else X


@pytest.fixture(scope="module")
def expected():
    return json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_models_predict_what_they_predicted(name, expected):
    model = jb.load(FOLDER / f"{name}.jboost")
    found = np.asarray(jb.predict(model, table_of(name)))
    # Written when leaf values were added to init_score one by one; now their sum is.
    np.testing.assert_allclose(found, np.float32(expected[name]), rtol=2.5e-7)


def test_names_and_categories_are_kept():
    model = jb.load(FOLDER / "categories.jboost")
    assert model.feature_names == ("a", "b", "c", "d")
    assert set(model.categories.values[0]) == {*WORDS.tolist()}
    assert jb.load(FOLDER / "plain.jboost").feature_names == ("x", "größe", "z")


def test_sums_of_leaves_are_kept(expected):
    """What importance and SHAP values need besides the trees."""
    model = jb.load(FOLDER / "plain.jboost")
    found = jb.feature_importance(model).values
    np.testing.assert_allclose(found, expected["importance"], rtol=1e-6)


def test_bins_give_the_same_codes(expected):
    bins = jb.load(FOLDER / "bins.jboost")
    np.testing.assert_array_equal(jb.apply_bins(bins, X), expected["codes"])


def test_training_goes_on():
    model = jb.load(FOLDER / "plain.jboost")
    names = model.feature_names
    longer, _ = jb.fit(X, Y, model=model, feature_names=names, **ONE)
    assert longer.num_rounds == 4
    np.testing.assert_array_equal(longer.leaf_value[:3], model.leaf_value)


def test_linear_leaves_predict_what_they_predicted():
    """Version 0.2.0 wrote them, by ``write_linear``."""
    model = jb.load(LINEAR)
    assert model.slopes is not None
    expected = json.loads(LINEAR.with_suffix(".json").read_text())
    np.testing.assert_array_equal(jb.predict(model, X), np.float32(expected))


def write_linear():
    """Writes the file; run under version 0.2.0."""
    model, _ = jb.fit(X, Y, linear_leaves=True, **FEW)
    jb.save(model, LINEAR)
    values = np.asarray(jb.predict(model, X)).astype(str).astype(float).tolist()
    LINEAR.with_suffix(".json").write_text(f"{json.dumps(values)}\n")


def two_distances(scores, target):
    return ((scores - target) ** 2).sum()


def write():
    """Writes the folder; run under version 0.1.0, with the test folder in the path."""
    from sklearn.tree import DecisionTreeRegressor

    known = np.nan_to_num(X)
    several = np.stack([Y, -Y], axis=1)
    other = DecisionTreeRegressor(max_leaf_nodes=9, random_state=0).fit(known, Y)
    models = {
        "plain": jb.fit(X, Y, **FEW, feature_names=["x", "größe", "z"])[0],
        "categories": jb.fit(make_frame(), Y, categorical=["d"], **FEW)[0],
        "scores": jb.fit(X, several, two_distances, num_scores=2, **FEW)[0],
        "linked": jb.read_sklearn(other),
        "tree": jb.fit_tree(X, Y, max_depth=4),
        "two-targets": jb.fit_tree(X, several, max_depth=3),
    }
    bins = jb.fit_bins(X, max_bins=16)
    values = {
        name: np.asarray(jb.predict(model, table_of(name)), np.float32)
        for name, model in models.items()
    }
    values["importance"] = np.float32(jb.feature_importance(models["plain"]).values)
    decimals = {k: v.astype(str).astype(float).tolist() for k, v in values.items()}
    decimals["codes"] = np.asarray(jb.apply_bins(bins, X)).tolist()
    FOLDER.mkdir(exist_ok=True)
    for name, each in {**models, "bins": bins}.items():
        jb.save(each, FOLDER / f"{name}.jboost")
    (FOLDER / "expected.json").write_text(
        json.dumps(decimals).replace('], "', '],\n"') + "\n"
    )
