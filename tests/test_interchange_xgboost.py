# SPDX-License-Identifier: Apache-2.0
"""Models go to XGBoost and come from it; XGBoost's own predictions are the measure."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import shared_models
import xgboost
from linear_leaves import add_slopes
from test_predict_categories import add_sets, link
from test_predict_kernels import make_model, make_rows

import jboost as jb
from jboost.interchange.linked import list_trees
from jboost.interchange.xgboost_format import read_ubjson, write_ubjson

ROWS = 300
TYPES = ["q", "q", "q", "c"]
DEEP = dict(max_depth=20, min_child_weight=0, reg_lambda=0)


@pytest.fixture(scope="module")
def table():
    """Numbers, whole numbers, a column that is always missing, categories."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[:, 3] = random.integers(0, 40, ROWS)
    y = x[:, 0] + np.isin(x[:, 3], [3, 4, 8, 12]) + 0.3 * random.normal(size=ROWS)
    x[random.random(x.shape) < 0.1] = np.nan
    x[:, 2] = np.nan
    return x, y.astype(np.float32)


def matrix(x, y=None):
    return xgboost.DMatrix(x, y, feature_types=TYPES, enable_categorical=True)


def train(table, num_rounds=5, **parameters):
    x, y = table
    settings = dict(max_depth=4, nthread=1) | parameters
    return xgboost.train(settings, matrix(x, y), num_rounds)


def assert_margins(model, x, booster, data):
    """Sums are in the same order: what may differ is the rounding of base_score."""
    expected = booster.predict(data, output_margin=True)
    scores = np.asarray(jb.predict(model, x))
    assert scores.shape == expected.shape and np.isfinite(scores).all()
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)


# From XGBoost.


@pytest.mark.parametrize("suffix", ["json", "ubj", ""])
def test_read_from_files_and_memory(table, tmp_path, suffix):
    booster = train(table, max_cat_to_onehot=1)
    source = booster
    if suffix:
        source = tmp_path / f"model.{suffix}"
        booster.save_model(source)
    model = jb.interchange.read_xgboost(source)
    assert model.categories.features == (3,) and model.num_rounds == 5
    assert_margins(model, table[0], booster, matrix(table[0]))


@pytest.mark.parametrize(
    "parameters, num_rounds, depth, linked",
    [
        (DEEP, 2, 15, True),
        (dict(booster="dart", rate_drop=0.5), 8, 4, False),
        (dict(num_parallel_tree=3, subsample=0.5), 2, 4, False),
        (dict(grow_policy="lossguide", max_leaves=9, max_depth=0), 2, None, False),
        (dict(min_split_loss=5), 3, None, False),  # pruned: some nodes are deleted
        (dict(min_split_loss=1e9), 2, 1, False),  # one leaf
        (dict(max_depth=1), 3, 1, False),
        (dict(), 0, 1, False),
    ],
)
def test_read_all_kinds_of_trees(table, parameters, num_rounds, depth, linked):
    booster = train(table, num_rounds, **parameters)
    model = jb.interchange.read_xgboost(booster)
    assert model.num_rounds == num_rounds * parameters.get("num_parallel_tree", 1)
    assert (model.links is not None) == linked
    assert depth is None or model.max_depth >= depth
    assert_margins(model, table[0], booster, matrix(table[0]))


def test_gaps_of_sparse_rows_are_missing(table):
    dense = np.nan_to_num(table[0][:, :2])
    dense[::2, 0] = 0
    booster = xgboost.train(dict(max_depth=3), xgboost.DMatrix(dense, table[1]), 3)
    x = scipy.sparse.csr_matrix(dense)
    expected = booster.predict(xgboost.DMatrix(x))
    np.testing.assert_allclose(
        jb.predict(jb.interchange.read_xgboost(booster), x),
        expected,
        rtol=1e-6,
        atol=1e-6,
    )


def test_read_covers(table):
    booster = train(table, max_depth=3)
    covers = booster.get_score(importance_type="total_cover")
    own = jb.feature_importance(jb.interchange.read_xgboost(booster), "cover").values
    expected = [covers.get(f"f{feature}", 0) for feature in range(4)]
    np.testing.assert_allclose(own, expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["one_output_per_tree", "multi_output_tree"])
def test_read_several_targets(table, strategy):
    x, y = table
    data = xgboost.DMatrix(x[:, :2], np.stack([y, -y, y * y], axis=1))
    settings = dict(max_depth=3, multi_strategy=strategy, nthread=1)
    booster = xgboost.train(settings, data, 3)
    model = jb.interchange.read_xgboost(booster)
    assert model.shares_structure == (strategy == "multi_output_tree")
    assert_margins(model, x[:, :2], booster, data)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("deep", "json"), ("linked", "ubj"), ("categories", "json")]
)
def test_write_vector_leaves(kind, suffix, tmp_path):
    model, x = shared_models.make_model(kind), shared_models.make_rows(300)
    path = tmp_path / f"model.{suffix}"
    for objective in "reg:squarederror", "multi:softprob":
        jb.interchange.write_xgboost(model, path, objective=objective)
        booster = xgboost.Booster(model_file=path)
        types = ["float"] * 4 + ["c" if kind == "categories" else "float"]
        data = xgboost.DMatrix(x, feature_types=types, enable_categorical=True)
        assert_margins(model, x, booster, data)
    for own, other, factor in ("gain", "total_gain", 2), ("cover", "total_cover", 1):
        measured = jb.feature_importance(model, own).values * factor
        found = booster.get_score(importance_type=other)
        expected = [found.get(f"f{feature}", 0) for feature in range(5)]
        np.testing.assert_allclose(measured, expected, rtol=1e-5)
    again = jb.interchange.read_xgboost(path)
    assert again.shares_structure
    np.testing.assert_array_equal(jb.predict(again, x), jb.predict(model, x))


def test_read_classes(table):
    x, y = table
    data = matrix(x, np.digitize(y, [-0.5, 0.5]))
    settings = dict(objective="multi:softprob", num_class=3, num_parallel_tree=2)
    booster = xgboost.train(settings | dict(max_depth=3, nthread=1), data, 3)
    model = jb.interchange.read_xgboost(booster)
    assert model.num_scores == 3 and model.num_rounds == 6
    assert_margins(model, x, booster, data)
    probabilities = jb.predict(model, x, inverse_link=jax.nn.softmax)
    np.testing.assert_allclose(probabilities, booster.predict(data), rtol=1e-5)


@pytest.mark.parametrize(
    "objective",
    [
        "binary:logistic", "binary:logitraw", "binary:hinge", "reg:logistic",
        "count:poisson", "reg:gamma", "reg:tweedie", "reg:squaredlogerror",
        "reg:pseudohubererror", "reg:absoluteerror", "survival:cox", "rank:pairwise",
    ],
)  # fmt: skip
def test_read_the_initial_score_of_each_objective(table, objective):
    x, y = table
    data = xgboost.DMatrix(x[:, :2], (y > 0) + 0.5 * (objective == "reg:gamma"))
    if objective.startswith("rank"):
        data.set_group([ROWS])
    settings = dict(objective=objective, max_depth=2, nthread=1)
    booster = xgboost.train(settings, data, 1)
    assert_margins(jb.interchange.read_xgboost(booster), x[:, :2], booster, data)


def test_read_categories_of_a_data_frame(table):
    pandas = pytest.importorskip("pandas")
    code = np.nan_to_num(table[0][:, 3] % 3, nan=-1).astype(int)
    column = pandas.Categorical.from_codes(code, ["u", "v", "w"])
    frame = pandas.DataFrame(dict(a=table[0][:, 0], c=column))
    data = xgboost.DMatrix(frame, table[1], enable_categorical=True)
    booster = xgboost.train(dict(max_depth=3, max_cat_to_onehot=1), data, 3)
    model = jb.interchange.read_xgboost(booster)
    assert model.feature_names == ("a", "c")
    assert model.categories.values == (("u", "v", "w"),)
    assert_margins(model, frame, booster, data)


def test_read_as_many_rounds_as_an_estimator_uses(table):
    x, y = table[0][:, :2], table[1]
    estimator = xgboost.XGBRegressor(
        n_estimators=60, max_depth=3, learning_rate=1, early_stopping_rounds=2, n_jobs=1
    )
    estimator.fit(x[:200], y[:200], eval_set=[(x[200:], y[200:])], verbose=False)
    model = jb.interchange.read_xgboost(estimator)
    assert model.num_rounds == estimator.best_iteration + 1 < 60
    np.testing.assert_allclose(jb.predict(model, x), estimator.predict(x), rtol=1e-6)


def test_categories_that_are_not_listed_go_left(table):
    booster = train(table, 2, max_cat_to_onehot=1)
    x = np.tile(table[0][:1], (4, 1))
    x[:, 3] = [39, 40, 500, 1000]  # two of them beyond all that was seen
    assert_margins(jb.interchange.read_xgboost(booster), x, booster, matrix(x))


def test_what_is_refused(table, tmp_path):
    path = tmp_path / "model"
    with pytest.raises(FileNotFoundError):
        jb.interchange.read_xgboost(path)
    with pytest.raises(TypeError, match="source must be a path"):
        jb.interchange.read_xgboost(3)
    x, y = table
    linear = xgboost.train(dict(booster="gblinear"), xgboost.DMatrix(x[:, :2], y), 1)
    with pytest.raises(ValueError, match="gblinear"):
        jb.interchange.read_xgboost(linear)


@pytest.mark.parametrize("kind", ["json", "ubj"])
def test_damaged_files_are_refused(table, tmp_path, kind):
    path = tmp_path / "model"
    whole = bytes(train(table, 2).save_raw(kind))
    cuts = [whole[:size] for size in range(0, len(whole), len(whole) // 40)]
    cuts += [whole + b"x", b"binf" + whole, b"{}", b"{", b"[1]", b'{"learner": 3}']
    for content in cuts:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model"):
            jb.interchange.read_xgboost(path)


def test_altered_trees_are_refused(table, tmp_path):
    document = json.loads(train(table, 1).save_raw("json"))
    tree = document["learner"]["gradient_booster"]["model"]["trees"][0]
    path = tmp_path / "model.json"
    changes = dict(
        left_children=[0], right_children=[10**6], split_indices=[4], tree_param=[3],
        default_left=[], sum_hessian=["many"], split_conditions=[None],
    )  # fmt: skip
    for name, start in changes.items():
        before = tree[name]
        tree[name] = [*start, *before[1:]] if start and name != "tree_param" else start
        path.write_text(json.dumps(document))
        with pytest.raises(ValueError, match="damaged"):
            jb.interchange.read_xgboost(path)
        tree[name] = before


# To XGBoost.


def assert_written(model, x, folder, **arguments):
    """XGBoost predicts the same from both formats, and we read the same back."""
    boosters, path = [], folder
    for suffix in ("json", "ubj"):
        path = folder / f"model.{suffix}"
        jb.interchange.write_xgboost(model, path, **arguments)
        booster = xgboost.Booster(model_file=path)
        data = xgboost.DMatrix(
            x, feature_names=booster.feature_names,
            feature_types=booster.feature_types, enable_categorical=True,
        )  # fmt: skip
        assert_margins(model, x, booster, data)
        boosters.append((booster, data))
    again = jb.interchange.read_xgboost(path)
    np.testing.assert_allclose(
        jb.predict(again, x), jb.predict(model, x), rtol=1e-6, atol=1e-6
    )
    return boosters[0]


def finite_model(num_rounds, max_depth, num_features, num_scores=1):
    model = make_model(num_rounds, max_depth, num_features, num_scores)
    odd = jnp.isnan(model.threshold)
    return replace(model, threshold=jnp.where(odd, 0, model.threshold))


def finite_rows(num_rows, num_features):
    """Denormals and NaN, but no infinities, which XGBoost refuses."""
    x = make_rows(num_rows, num_features)
    return np.where(np.abs(x) > 1e38, np.float32(3), x)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("num_scores", [1, 3])
def test_write_any_trees(tmp_path, linked, num_scores):
    model = finite_model(5, 4, 4, num_scores)
    model = link(model) if linked else model
    assert_written(model, finite_rows(500, 4), tmp_path)


@pytest.mark.parametrize("linked", [False, True])
def test_write_categories(tmp_path, linked):
    model = add_sets(finite_model(4, 4, 4), [0, 2])
    threshold = jnp.where(jnp.isin(model.feature, jnp.array([0, 2])), jnp.nan, 0.5)
    model = replace(model, threshold=jnp.where(model.is_split, threshold, jnp.inf))
    model = link(model) if linked else model
    x = finite_rows(400, 4)
    x[:, [0, 2]] = np.random.default_rng(0).integers(0, 40, (400, 2))  # some unseen
    x[:50, 0] = np.nan
    booster, _ = assert_written(model, x, tmp_path)
    assert booster.feature_types == ["c", "float", "c", "float"]


@pytest.mark.parametrize(
    "objective, loss, num_scores, start",
    [
        ("binary:logistic", jb.losses.logistic, 1, 9.37),
        ("count:poisson", jb.losses.poisson, 1, -2.0),
        ("multi:softprob", jb.losses.softmax, 3, 0.5),
        ("reg:squarederror", jb.losses.squared_error, 1, 3.0),
    ],
)
def test_what_xgboost_makes_of_scores(tmp_path, objective, loss, num_scores, start):
    """Its base_score cannot tell the probabilities of large scores apart."""
    model = finite_model(3, 3, 4, num_scores)
    model = replace(model, init_score=jnp.full(model.init_score.shape, start))
    x = finite_rows(200, 4)
    booster, data = assert_written(model, x, tmp_path, objective=objective)
    expected = jb.predict(model, x, inverse_link=jb.losses.inverse_link(loss))
    np.testing.assert_allclose(booster.predict(data), expected, rtol=2e-6, atol=1e-6)


def test_explanations_and_importance_in_xgboost(table, tmp_path):
    x, y = table[0][:, :3], table[1]
    model, _ = jb.fit(
        x, y, num_rounds=5, max_depth=3, l2=0.5, feature_names=["a", "b", "c"],
        linear_leaves=False,
    )  # fmt: skip
    booster, data = assert_written(model, x, tmp_path)
    contributions = booster.predict(data, pred_contribs=True)
    np.testing.assert_allclose(contributions.sum(1), jb.predict(model, x), atol=1e-5)
    own = jb.shap_values(model, x)
    np.testing.assert_allclose(contributions[:, :3], own.values, atol=1e-5)
    for kind, scale in (("gain", 2), ("cover", 1)):  # XGBoost has no 1/2
        found = booster.get_score(importance_type=f"total_{kind}")
        expected = jb.feature_importance(model, kind).as_dict()
        for name, value in found.items():
            np.testing.assert_allclose(value, scale * expected[name], rtol=1e-4)


def test_what_cannot_be_written(tmp_path):
    model = finite_model(2, 2, 3)
    path = tmp_path / "model.json"
    with pytest.raises(TypeError, match="Ensemble"):
        jb.interchange.write_xgboost(3, path)
    with pytest.raises(ValueError, match="objective"):
        jb.interchange.write_xgboost(model, path, objective="survival:cox")
    with pytest.raises(ValueError, match="objective"):
        jb.interchange.write_xgboost(model, path, objective="multi:softprob")
    bad = replace(model, leaf_value=model.leaf_value.at[0].set(jnp.inf))
    with pytest.raises(ValueError, match="leaf_value"):
        jb.interchange.write_xgboost(bad, path)
    with pytest.raises(ValueError, match="linear leaves"):
        jb.interchange.write_xgboost(add_slopes(model), path)
    with pytest.raises(ValueError, match="codes"):
        jb.interchange.write_xgboost(add_sets(finite_model(9, 3, 3), [0, 1, 2]), path)
    assert list(tmp_path.iterdir()) == []


# Lists of nodes, and UBJSON.


def test_unsplit_nodes_are_left_out():
    model = finite_model(3, 4, 4)
    for tree, split in zip(list_trees(model), model.is_split[:, 0], strict=True):
        inner = ~tree.is_leaf
        assert inner.sum() <= split.sum() and len(tree.left) == 2 * inner.sum() + 1
        assert np.isfinite(tree.threshold[inner]).sum() + tree.is_leaf.sum() > 0


def test_ubjson_there_and_back():
    value = {
        "text": "vé", "list": [1, -2, [], {}], "none": {},
        "floats": np.float32([1.5, np.inf]), "bytes": np.uint8([0, 255]),
    }  # fmt: skip
    found = read_ubjson(write_ubjson(value))
    assert list(found) == list(value)
    assert found["list"] == value["list"] and found["text"] == value["text"]
    for name in ("floats", "bytes"):
        np.testing.assert_array_equal(found[name], value[name])
    assert read_ubjson(b"[ZTFi\xffU\xffCxSi\x02ab]") == [
        None, True, False, -1, 255, "x", "ab",
    ]  # fmt: skip
    for bad in (b"", b"[", b"[#i\xff", b"{Si\x01a", b"[" * 100, b"x", b"Si\x01\xff"):
        with pytest.raises(ValueError):
            read_ubjson(bad)
