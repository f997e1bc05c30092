# SPDX-License-Identifier: Apache-2.0
"""Models come from LightGBM and scikit-learn, and predict goes to StableHLO.

The measure are the predictions of those libraries. They add float64 where jboost adds
float32: a sum of T leaves may differ by a few roundings each.
"""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from test_predict_categories import add_sets, link
from test_predict_kernels import assert_same_bits, make_model, make_rows
from threadpoolctl import threadpool_limits

import jboost as jb

lightgbm = pytest.importorskip("lightgbm")
pytest.importorskip("sklearn")

ROWS = 400
CLOSE = dict(rtol=2e-6, atol=2e-6)


@pytest.fixture(scope="module")
def table():
    """Numbers with gaps, a column without, zeros, categories."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    x[:, 2] *= random.random(ROWS) < 0.5
    x[:, 3] = random.integers(0, 40, ROWS)
    y = x[:, 0] + np.isin(x[:, 3], [3, 4, 8, 12]) + 0.3 * random.normal(size=ROWS)
    gaps = random.random(x.shape) < 0.1
    gaps[:, 1] = False
    x[gaps] = np.nan
    return x, y


def probe(x):
    """Rows of training, with what training did not see in them."""
    x = x.copy()
    x[:40, 1] = np.nan
    x[40:80, 0] = 0
    x[80:140, 3] = np.random.default_rng(1).integers(0, 60, 60)
    return x


# LightGBM.


def train(table, num_rounds=5, target=None, **parameters):
    x, y = table
    data = lightgbm.Dataset(x, y if target is None else target, categorical_feature=[3])
    settings = dict(
        verbose=-1, num_threads=1, min_data_in_leaf=5, min_data_per_group=1,
        cat_smooth=1, num_leaves=15,
    )  # fmt: skip
    return lightgbm.train(settings | parameters, data, num_rounds)


def assert_raw_scores(model, booster, x):
    expected = booster.predict(x, raw_score=True)
    assert np.ptp(expected) > 0 or model.max_depth == 1
    np.testing.assert_allclose(jb.predict(model, x), expected, **CLOSE)


@pytest.mark.parametrize("saved", [False, True])
def test_lightgbm_from_files_and_memory(table, tmp_path, saved):
    booster = source = train(table, max_cat_to_onehot=1)
    if saved:
        source = tmp_path / "model.txt"
        booster.save_model(source)
    model = jb.interchange.read_lightgbm(source)
    assert model.categories.features == (3,)
    assert model.feature_names == ("Column_0", "Column_1", "Column_2", "Column_3")
    assert_raw_scores(model, booster, probe(table[0]))


@pytest.mark.parametrize(
    "parameters",
    [
        dict(num_leaves=150, min_data_in_leaf=1),  # linked
        dict(boosting="dart"),
        dict(use_missing=False),
        dict(objective="regression_l1"),
        dict(min_data_in_leaf=1000),  # one leaf
        dict(num_leaves=2),
        dict(objective="binary", sigmoid=2.0),
    ],
)
def test_lightgbm_trees_of_all_kinds(table, parameters):
    target = table[1] > 0 if "sigmoid" in parameters else None
    booster = train(table, 3, target=target, **parameters)
    model = jb.interchange.read_lightgbm(booster)
    assert model.links is not None or parameters.get("num_leaves") != 150
    assert_raw_scores(model, booster, probe(table[0]))


def test_lightgbm_classes_and_forests(table):
    x, y = table
    target = np.digitize(y, [-0.5, 0.5])
    booster = train(table, 2, target=target, objective="multiclass", num_class=3)
    model = jb.interchange.read_lightgbm(booster)
    assert model.num_scores == 3 and model.num_rounds == 2
    assert_raw_scores(model, booster, probe(x))
    forest = train(table, boosting="rf", bagging_freq=1, bagging_fraction=0.5)
    scores = jb.predict(jb.interchange.read_lightgbm(forest), x)
    np.testing.assert_allclose(scores, forest.predict(x), **CLOSE)


def test_lightgbm_zero_as_missing(table):
    """What sends 0 another way than numbers around it is refused, the rest is equal."""
    refused = 0
    for seed in range(4):
        booster = train(
            table,
            1,
            zero_as_missing=True,
            num_leaves=3,
            feature_fraction=0.5,
            seed=seed,
        )
        x = probe(table[0])
        x[:4, :3] = [[1e-35], [-1e-35], [1e-36], [1e-34]]
        try:
            model = jb.interchange.read_lightgbm(booster)
        except ValueError as error:
            assert "zero_as_missing" in str(error)
            refused += 1
        else:
            assert_raw_scores(model, booster, x)
    assert refused < 4


@pytest.mark.parametrize(
    "parameters",
    [
        dict(),
        dict(num_leaves=150, min_data_in_leaf=2, linear_lambda=0.01),  # linked
        dict(objective="multiclass", num_class=3),
        dict(boosting="rf", bagging_freq=1, bagging_fraction=0.5),
        dict(lambda_l2=20.0),  # values for missing terms differ much from constants
    ],
)
def test_lightgbm_linear_trees(table, parameters):
    """With missing values, categories, and columns far from 0."""
    x = table[0] + np.float32([0, 2000, 0, 0])
    x[:, 2] = np.exp(3 * x[:, 2])
    y = table[1] + x[:, 1] - 2000 + np.nan_to_num(x[:, 0]) ** 2
    target = np.digitize(y, [-0.5, 1]) if "num_class" in parameters else y
    booster = train((x, y), 4, target=target, linear_tree=True, **parameters)
    model = jb.interchange.read_lightgbm(booster)
    assert np.sum(np.asarray(model.slopes.feature) >= 0, axis=3).max() > 1
    rows = probe(x)
    rows[140:200] *= 2  # slopes go on beyond the training rows
    expected = booster.predict(rows, raw_score="boosting" not in parameters)
    found = jb.predict(model, rows)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6 * scale)


def test_lightgbm_linear_leaves_need_resolved_columns(table):
    x = np.arange(ROWS, dtype=float)[:, None]
    y = np.abs(x[:, 0] - 150)
    for start, fits in ((1e4, True), (1.7e9, False)):
        data = lightgbm.Dataset(x + start, y)
        booster = lightgbm.train(dict(verbose=-1, linear_tree=True), data, 3)
        if fits:
            model = jb.interchange.read_lightgbm(booster)
            found = jb.predict(model, x + start)
            np.testing.assert_allclose(found, booster.predict(x + start), rtol=1e-5)
        else:
            with pytest.raises(ValueError, match="'Column_0', which lay from 17"):
                jb.interchange.read_lightgbm(booster)


def test_lightgbm_weights_and_rows(table):
    booster = train(table, 2)
    sums = jb.interchange.read_lightgbm(booster).sums
    np.testing.assert_array_equal(np.asarray(sums.weight).sum(2), ROWS)
    np.testing.assert_allclose(np.asarray(sums.curvature).sum(2), ROWS, rtol=1e-6)


def test_lightgbm_categories_of_a_data_frame(table):
    pandas = pytest.importorskip("pandas")
    code = np.nan_to_num(table[0][:, 3] % 3, nan=-1).astype(int)
    column = pandas.Categorical.from_codes(code, ["u", "vé", "w"])
    frame = pandas.DataFrame(dict(a=table[0][:, 0], c=column))
    data = lightgbm.Dataset(frame, table[1])
    booster = lightgbm.train(dict(verbose=-1, num_leaves=7), data, 3)
    model = jb.interchange.read_lightgbm(booster)
    assert model.categories.values == (("u", "vé", "w"),)
    assert_raw_scores(model, booster, frame)


def test_gaps_of_sparse_rows_are_zeros_as_in_the_other_library(table):
    """Training saw dense rows, with zeros and missing values."""
    from sklearn import ensemble

    x, y = np.nan_to_num(table[0]), table[1]
    x[np.random.default_rng(4).random(x.shape) < 0.5] = 0
    sparse = scipy.sparse.csr_matrix(x)
    booster = train((table[0], y))
    model = jb.interchange.read_lightgbm(booster)
    expected = booster.predict(sparse, raw_score=True)
    np.testing.assert_allclose(jb.predict(model, sparse), expected, **CLOSE)
    forest = ensemble.RandomForestRegressor(5, max_depth=4, random_state=0).fit(x, y)
    model = jb.interchange.read_sklearn(forest)
    np.testing.assert_allclose(
        jb.predict(model, sparse), forest.predict(sparse), **CLOSE
    )


def test_lightgbm_what_is_refused(table, tmp_path):
    with pytest.raises(TypeError, match="source must be"):
        jb.interchange.read_lightgbm(3)
    linear = train(table, 2, linear_tree=True).model_to_string()
    path, whole = tmp_path / "model.txt", train(table, 2).model_to_string()
    end = whole.index("end of trees") + 12
    cuts = [whole[:size] for size in range(0, end, end // 40)]
    cuts += ["x" + whole, whole.replace("split_feature=", "split_feature=9 ")]
    cuts += [whole.replace("left_child=", "left_child=0 0 "), whole.replace("=", "")]
    cuts += [
        linear.replace(f"leaf_{name}=", f"leaf_{name}=3 ")
        for name in ("const", "coeff", "features")
    ]
    cuts += [
        re.sub("leaf_features=[0-9]", "leaf_features=3", linear),  # categorical
        re.sub("leaf_features=[0-9]", "leaf_features=4", linear),
        re.sub("leaf_coeff=[-0-9.]+", "leaf_coeff=0", linear),
        re.sub("num_features=[0-9]", "num_features=9", linear),
    ]
    for content in cuts:
        path.write_text(content)
        with pytest.raises(ValueError, match="LightGBM"):
            jb.interchange.read_lightgbm(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="LightGBM"):
        jb.interchange.read_lightgbm(path)


# scikit-learn.


def make_estimators():
    from sklearn import ensemble, tree

    small = dict(n_estimators=3, random_state=0)
    boosted = small | dict(max_depth=2)
    hist = dict(max_iter=3, min_samples_leaf=5, max_leaf_nodes=12)
    return {
        "tree": tree.DecisionTreeRegressor(random_state=0),
        "classes of a tree": tree.DecisionTreeClassifier(max_depth=3, random_state=0),
        "forest": ensemble.RandomForestRegressor(**small),
        "two outputs": ensemble.RandomForestRegressor(max_depth=3, **small),
        "two classes": ensemble.RandomForestClassifier(**small),
        "three classes": ensemble.RandomForestClassifier(max_depth=4, **small),
        "extra": ensemble.ExtraTreesRegressor(**small),
        "boosting": ensemble.GradientBoostingRegressor(**boosted),
        "boosting from 0": ensemble.GradientBoostingRegressor(init="zero", **boosted),
        "boosted two classes": ensemble.GradientBoostingClassifier(**boosted),
        "boosted three classes": ensemble.GradientBoostingClassifier(**boosted),
        "histograms": ensemble.HistGradientBoostingRegressor(**hist),
        "histograms, poisson": ensemble.HistGradientBoostingRegressor(
            loss="poisson", **hist
        ),
        "histograms, categories": ensemble.HistGradientBoostingRegressor(
            categorical_features=[0, 3], **hist
        ),
        "histograms, three classes": ensemble.HistGradientBoostingClassifier(
            categorical_features=[3], **hist
        ),
    }


@pytest.mark.parametrize("name", make_estimators())
def test_sklearn(table, name):
    """On float64 values, which its trees round, as jboost does."""
    estimator = make_estimators()[name]
    random = np.random.default_rng(3)
    x, y = table[0] + 0.0, table[1]
    x[:, :3] += 1e-9 * random.normal(size=(ROWS, 3))
    x = x.astype(float)
    if "boost" in name:  # these know no missing values
        x = np.nan_to_num(x)
    if "categories" in name:
        x[:, 0] = np.round(np.abs(x[:, 0]) * 3)
    if name == "two outputs":
        y = np.stack([y, -y], axis=1)
    elif "poisson" in name:
        y = np.exp(y)
    elif "classes" in name:
        y = np.digitize(y, [0, 0.5] if "three" in name or "tree" in name else [0])
    with threadpool_limits(1):  # threads that wait for each other take time
        estimator.fit(x, y)
    if hasattr(estimator, "decision_function"):
        expected = estimator.decision_function(x)
    elif "classes" in name:
        expected = estimator.predict_proba(x)
        expected = expected[:, 1] if name == "two classes" else expected
    else:
        expected = estimator.predict(x)
        expected = np.log(expected) if "poisson" in name else expected
    model = jb.interchange.read_sklearn(estimator)
    shared = name in ("two outputs", "three classes", "classes of a tree")
    assert model.shares_structure == shared
    np.testing.assert_allclose(jb.predict(model, x), expected, **CLOSE)
    sums = np.asarray(model.sums.weight).sum(axis=2)
    np.testing.assert_array_equal(sums, np.full_like(sums, ROWS))
    if "histograms" in name:
        x[:60, 3] = np.arange(60)  # some not seen in training
        scores = getattr(estimator, "decision_function", estimator.predict)(x)
        scores = np.log(scores) if "poisson" in name else scores
        np.testing.assert_allclose(jb.predict(model, x), scores, **CLOSE)


def test_sklearn_categories_of_a_data_frame(table):
    pandas = pytest.importorskip("pandas")
    from sklearn.ensemble import HistGradientBoostingRegressor

    code = np.nan_to_num(table[0][:, 3] % 3, nan=-1).astype(int)
    column = pandas.Categorical.from_codes(code, ["u", "vé", "w"])
    frame = pandas.DataFrame(dict(a=table[0][:, 0], c=column))
    estimator = HistGradientBoostingRegressor(
        max_iter=3, categorical_features="from_dtype"
    ).fit(frame, table[1])
    model = jb.interchange.read_sklearn(estimator)
    assert model.categories.values == (("u", "vé", "w"),)
    np.testing.assert_allclose(
        jb.predict(model, frame), estimator.predict(frame), **CLOSE
    )


def test_sklearn_what_is_refused(table):
    from sklearn import ensemble, linear_model

    x, y = np.nan_to_num(table[0]), table[1]
    with pytest.raises(TypeError, match="AdaBoost"):
        jb.interchange.read_sklearn(ensemble.AdaBoostRegressor())
    with pytest.raises(ValueError, match="fitted"):
        jb.interchange.read_sklearn(ensemble.RandomForestRegressor())
    start = linear_model.LinearRegression()
    boosting = ensemble.GradientBoostingRegressor(n_estimators=1, init=start)
    with pytest.raises(ValueError, match="LinearRegression"):
        jb.interchange.read_sklearn(boosting.fit(x, y))
    forest = ensemble.RandomForestClassifier(2).fit(x, np.stack([y > 0, y > 1], 1))
    with pytest.raises(ValueError, match="one output"):
        jb.interchange.read_sklearn(forest)
    x[:, 3] += 0.5
    hist = ensemble.HistGradientBoostingRegressor(max_iter=1, categorical_features=[3])
    with pytest.raises(ValueError, match="integers"):
        jb.interchange.read_sklearn(hist.fit(x, y))


# StableHLO.

RUN = """
try:
    import jboost
except ImportError:
    pass
else:
    raise SystemExit("jboost can be imported")
import jax, numpy as np
data = np.load(sys.argv[1])
for name in sys.argv[2:]:
    program = jax.export.deserialize(bytearray(open(name, "rb").read()))
    np.save(name + ".npy", program.call(data["x"], data["offset"]))
    assert program.call(data["x"][:1], data["offset"][:1]).shape == (1, 2)
assert "jboost" not in sys.modules
"""


def test_exports_run_where_jboost_is_not(tmp_path):
    """A fresh process, isolated from the environment and the working directory."""
    flatbuffers = pytest.importorskip("flatbuffers")
    model = add_sets(make_model(3, 3, 5, num_scores=2), [1, 3])
    models = dict(heaps=model, linked=link(model))
    x = make_rows(100, 5)
    x[:, [1, 3]] = np.random.default_rng(1).integers(0, 45, (100, 2))
    x[:9, 1] = np.nan
    offset = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    for name, model in models.items():
        jb.interchange.export_predict(
            model, tmp_path / name, inverse_link=jax.nn.softmax, offset=True
        )
    np.savez(tmp_path / "data.npz", x=x, offset=offset)
    # The installed packages but jboost, which may lie among them.
    packages = tmp_path / "packages"
    packages.mkdir()
    for module in (jax, flatbuffers):
        folder = Path(module.__file__).parent.parent
        for entry in folder.iterdir():
            link_to = packages / entry.name
            if "jboost" not in entry.name and not link_to.exists():
                link_to.symlink_to(entry)
    files = [str(tmp_path / name) for name in ("data.npz", *models)]
    code = f"import sys; sys.path[:0] = [{str(packages)!r}]\n{RUN}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *files],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        expected = jb.predict(
            model, x, offset=offset, inverse_link=jax.nn.softmax, implementation="xla"
        )
        assert_same_bits(np.load(tmp_path / f"{name}.npy"), expected)


def test_export_of_a_score(tmp_path):
    pytest.importorskip("flatbuffers")
    model, path = make_model(2, 2, 3), tmp_path / "program"
    jb.interchange.export_predict(model, path)
    program = jax.export.deserialize(bytearray(path.read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    calls = set(re.findall(r"custom_call @(\w+)", program.mlir_module()))
    assert calls <= {"shape_assertion"}
    for num_rows in (1, 7):
        x = make_rows(num_rows, 3)
        assert_same_bits(program.call(x), jb.predict(model, x, implementation="xla"))


def test_export_takes_the_matrix_of_a_table(tmp_path):
    """Categories, those that training did not see, and missing ones; by hand, too."""
    pytest.importorskip("flatbuffers")
    random = np.random.default_rng(0)
    words = random.choice(["lo", "mid", "hi"], 40)
    table = pd.DataFrame({"a": random.normal(size=40), "s": pd.Categorical(words)})
    model, _ = jb.fit(
        table, words == "mid", jb.losses.squared_error, num_rounds=3, max_depth=2
    )
    jb.interchange.export_predict(model, tmp_path / "program", platforms=("cpu",))
    content = (tmp_path / "program").read_bytes()
    program = jax.export.deserialize(bytearray(content))
    later = pd.DataFrame(
        {"a": [0.0, np.nan, 1.0, 2.0], "s": pd.Categorical(["mid", "new", None, "hi"])}
    )
    matrix = jb.interchange.to_matrix(model, later)
    assert matrix.dtype == np.float32
    values = list(model.categories.values[0])
    expected = [values.index("mid"), np.nan, np.nan, values.index("hi")]
    np.testing.assert_array_equal(matrix[:, 1], expected)
    found = jb.predict(model, later, implementation="xla")
    assert_same_bits(program.call(matrix), found)
    assert_same_bits(jb.predict(model, matrix, implementation="xla"), found)
    with pytest.raises(ValueError, match="columns"):
        jb.interchange.to_matrix(model, later[["a"]])


def test_export_what_is_refused(tmp_path):
    model, path = make_model(2, 2, 3), tmp_path / "program"
    for arguments, match in [
        (dict(platforms="cpu"), "platforms"),
        (dict(platforms=()), "platforms"),
        (dict(platforms=["abacus"]), "platforms"),
        (dict(offset=np.zeros(3)), "offset"),
        (dict(inverse_link=3), "inverse_link"),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            jb.interchange.export_predict(model, path, **arguments)
    with pytest.raises(TypeError, match="Ensemble"):
        jb.interchange.export_predict(3, path)
    assert not path.exists()
