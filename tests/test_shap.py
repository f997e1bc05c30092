# SPDX-License-Identifier: Apache-2.0
"""SHAP values against sums over all subsets of features, XGBoost, and their laws."""

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import scipy.sparse
import test_xgboost_parity as parity
import xgboost as xgb
from implementations import IMPLEMENTATIONS, each_isa, needs_cpu_kernels
from shared_models import expand, share
from sklearn.tree import DecisionTreeRegressor
from tables import ROWS, SMALL, make_regression

import jboost as jb
from jboost.interchange.linked import build_ensemble
from jboost.model.ensemble import Links
from jboost.model.nodes import Nodes
from jboost.tables.categories import Categories
from jboost.trees.tree import LeafSums, Slopes

FEATURES = 4
X, Y = make_regression()
WEIGHTS = np.random.default_rng(1).uniform(0.5, 2, ROWS).astype(np.float32)
MODEL, _ = jb.fit(X, Y, **SMALL)
# Of the sum over trees of the largest leaf value: a quarter of what jb.shap_values
# promises for models of any size.
TOLERANCE = 2.0**-22


def make_heaps(generator, shape, depth):
    """Random trees in heap order: features repeat on paths, nodes are not split."""
    inner = (*shape, 2**depth - 1)
    unsplit = generator.random(inner) < 0.2
    return dict(
        feature=np.where(unsplit, 0, generator.integers(0, FEATURES, inner, np.int32)),
        threshold=np.where(unsplit, np.inf, generator.normal(size=inner)),
        missing_left=unsplit | (generator.random(inner) < 0.5),
    ), 2**depth


def make_links(generator, shape, num_splits):
    """Random trees of nodes in any order, the children of one beside each other."""
    num_nodes = 2 * num_splits + 1
    left = np.tile(np.arange(num_nodes, dtype=np.int32), (*shape, 1))
    feature = np.zeros_like(left)
    threshold = np.full(left.shape, np.inf)
    missing_left = np.ones(left.shape, bool)
    deepest = 0
    for tree in np.ndindex(*shape):
        depth = {0: 0}
        for child in 1 + 2 * generator.permutation(num_splits):
            node = generator.choice(list(depth))
            left[tree][node] = child
            feature[tree][node] = generator.integers(FEATURES)
            threshold[tree][node] = generator.normal()
            missing_left[tree][node] = generator.random() < 0.5
            depth[child] = depth[child + 1] = depth.pop(node) + 1
        deepest = max(deepest, *depth.values())
    arrays = dict(feature=feature, threshold=threshold, missing_left=missing_left)
    return arrays, num_nodes, Links(jnp.asarray(left), deepest)


def add_terms(model, features=range(FEATURES), num_terms=2, seed=7):
    """Gives leaves random linear terms, also of features off their paths."""
    generator = np.random.default_rng(seed)
    shape = (*model.leaf_value.shape, num_terms)
    order = generator.random((*model.feature.shape[:2], shape[2], len(features)))
    feature = np.array(features)[np.argsort(order, axis=3)[..., :num_terms]]
    feature = np.where(generator.random(feature.shape) < 0.3, -1, feature)
    slope, center = generator.normal(size=(2, *shape)).astype(np.float32)
    ends = np.sort(generator.normal(size=(model.num_features, 2)).astype(np.float32))
    slopes = Slopes(feature.astype(np.int32), slope, center)
    slopes = jax.tree.map(jnp.asarray, slopes)
    return replace(model, slopes=slopes, ranges=jnp.asarray(ends))


def make_model(kind, seed=0, shape=(3, 2)):
    """Random trees of a kind; some leaves have no cover."""
    if kind == "linear":
        return add_terms(make_model("categories", seed, shape), (0, 2))
    if kind == "linear shared":
        return add_terms(share(make_model("linked", seed, (shape[0], 1)), 3))
    generator = np.random.default_rng(seed)
    links = categories = left_codes = None
    if kind == "linked":
        arrays, leaves, links = make_links(generator, shape, 12)
    else:
        arrays, leaves = make_heaps(generator, shape, 4)
    if kind == "categories":
        codes = np.array([[2, 1, 0, 3, 40], [1, 2, 3, 4, 5]], np.int32)
        categories = Categories(jnp.asarray(codes), features=(1, 3))
        split = np.isfinite(arrays["threshold"])
        place = np.isin(arrays["feature"], (1, 3)) & split
        arrays["threshold"] = np.where(place, np.nan, arrays["threshold"])
        left_codes = generator.integers(0, 2**32, (*place.shape, 2), np.uint32)
    cover = generator.integers(0, 5, (*shape, leaves)).astype(np.float32)
    value = generator.normal(size=cover.shape).astype(np.float32)
    init_score = generator.normal(size=shape[1]).astype(np.float32)
    arrays["threshold"] = arrays["threshold"].astype(np.float32)
    return jb.Ensemble(
        **jax.tree.map(jnp.asarray, arrays),
        leaf_value=jnp.asarray(value),
        init_score=jnp.asarray(init_score if shape[1] > 1 else init_score[0]),
        num_features=FEATURES,
        sums=LeafSums(*(jnp.asarray(cover * s) for s in (0, 2, 1)), jnp.zeros(shape)),
        left_codes=None if left_codes is None else jnp.asarray(left_codes),
        categories=categories,
        links=links,
    )


def make_rows(kind, num_rows, seed=1):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_rows, FEATURES)).astype(np.float32)
    if kind in ("categories", "linear"):
        x[:, [1, 3]] = generator.integers(0, 6, (num_rows, 2))  # 5 was never seen
    x[generator.random(x.shape) < 0.2] = np.nan
    return x


def nest(model, row, tree, node=0):
    """One tree as references.tree_game wants it, for one row."""
    inner = model.feature.shape[2]
    if model.links is None:
        left, leaf = 2 * node + 1, node - inner if node >= inner else None
    else:
        left = int(model.links.left_child[tree][node])
        leaf = node if left == node else None
    if leaf is not None:
        value = read_leaf(model, row, tree, leaf)
        return value, float(model.sums.weight[tree][leaf])
    if not model.is_split[tree][node]:
        return nest(model, row, tree, left)
    feature = int(model.feature[tree][node])
    own = left if goes_left(model, row[feature], tree, node, feature) else left + 1
    sides = [nest(model, row, tree, child) for child in (own, 2 * left + 1 - own)]
    return feature, *sides


def read_leaf(model, row, tree, leaf):
    """The value of a leaf, or if it is linear, a function of the known features."""
    value = float(model.leaf_value[tree][leaf])
    if model.slopes is None:
        return value
    terms = {}
    for feature, slope, center in zip(
        *(part[tree][leaf].tolist() for part in model.slopes), strict=True
    ):
        if feature >= 0:
            x = np.clip(float(row[feature]), *model.ranges[feature].tolist())
            terms[feature] = slope * (x - center)
    if any(np.isnan(term) for term in terms.values()):
        return value
    return lambda known: value + sum(terms.get(feature, 0) for feature in known)


def goes_left(model, value, tree, node, feature):
    """One row at one node."""
    categories = model.categories
    if categories is not None and feature in categories.features:
        codes = categories.codes[categories.features.index(feature)]
        known = not np.isnan(value) and value < len(codes)
        code = int(codes[int(value)]) if known else 0
        if code > 0:
            return int(model.left_codes[tree][node][code // 32]) >> (code % 32) & 1
        value = np.nan
    if np.isnan(value):
        return model.missing_left[tree][node]
    return value <= model.threshold[tree][node]


def brute_force(model, x):
    """Values [N, F, K], interactions [N, F, F, K] and base [K], by all subsets."""
    if model.shares_structure:
        model = expand(model)
    model = jax.tree.map(np.asarray, model)
    num_rounds, num_scores = model.feature.shape[:2]
    values = np.zeros((len(x), FEATURES, num_scores))
    pairs = np.zeros((len(x), FEATURES, FEATURES, num_scores))
    base = np.array(np.broadcast_to(model.init_score, num_scores), float)
    for n, r, k in np.ndindex(len(x), num_rounds, num_scores):
        game = references.tree_game(nest(model, x[n], (r, k)), FEATURES)
        values[n, :, k] += references.shapley_values(game, FEATURES)
        pairs[n, :, :, k] += references.shapley_interactions(game, FEATURES)
        base[k] += game[frozenset()] if n == 0 else 0
    return values, pairs, base


def allowed(model):
    """How far float32 may be off."""
    largest = np.abs(np.asarray(model.leaf_value))
    if model.slopes is not None:
        reach = np.abs(model.ranges).max() + np.abs(model.slopes.center)
        largest = largest + np.sum(np.abs(model.slopes.slope) * reach, axis=3)
    return TOLERANCE * float(largest.max(axis=2).sum(axis=0).max())


KINDS = ["heaps", "linked", "categories", "linear", "linear shared"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_averages_over_all_orders(kind):
    """Plain XLA takes long to compile: these two kinds have all that others have."""
    model, x = make_model(kind), make_rows(kind, 6)
    explained = brute_force(model, x)
    every = kind in ("linear", "linear shared")
    for implementation in IMPLEMENTATIONS if every else IMPLEMENTATIONS[-1:]:
        assert_explained(model, x, explained, implementation)


def assert_explained(model, x, explained, implementation):
    values, pairs, base = explained
    found = jb.shap_values(model, x, implementation=implementation)
    tolerance = dict(rtol=0, atol=allowed(model))
    np.testing.assert_allclose(found.values, values, **tolerance)
    np.testing.assert_allclose(found.base, base, **tolerance)
    scores = jb.predict(model, x)
    total = np.asarray(found.values).sum(1) + np.asarray(found.base)
    np.testing.assert_allclose(total, scores, **tolerance)
    found = jb.explanation.shap_interactions(model, x, implementation=implementation)
    np.testing.assert_allclose(found, pairs, **tolerance)


def largest(values):
    return float(np.abs(np.asarray(values)).max())


def below(threshold):
    """The largest float32 below."""
    return np.nextafter(threshold, np.float32(-np.inf))


def read_booster(booster):
    """The trees of XGBoost: its split is x < threshold, its cover a sum of Hessians."""
    learner = json.loads(booster.save_raw("json"))["learner"]
    trees = []
    for tree in learner["gradient_booster"]["model"]["trees"]:
        number = lambda name, tree=tree: np.array(tree[name], np.float32)  # noqa: E731
        place = lambda name, tree=tree: np.array(tree[name], np.int32)  # noqa: E731
        left, unknown = place("left_children"), np.full(len(tree["parents"]), np.nan)
        trees.append(
            Nodes(
                left=left, right=place("right_children"),
                feature=np.where(left < 0, 0, place("split_indices")),
                threshold=below(number("split_conditions")),
                missing_left=np.array(tree["default_left"], bool),
                value=number("split_conditions"), gradient=unknown,
                curvature=np.array(tree["sum_hessian"]), weight=unknown,
            )
        )  # fmt: skip
    return trees


def read_sklearn(tree):
    """The nodes of one of its trees: x <= threshold, in float64."""
    threshold = tree.threshold.astype(np.float32)
    threshold = np.where(threshold > tree.threshold, below(threshold), threshold)
    left = tree.children_left.astype(np.int32)
    return Nodes(
        left=left, right=tree.children_right.astype(np.int32),
        feature=np.where(left < 0, 0, tree.feature).astype(np.int32),
        threshold=threshold, missing_left=tree.missing_go_to_left.astype(bool),
        value=tree.value[:, 0, 0].astype(np.float32),
        gradient=np.zeros(len(left)), curvature=np.zeros(len(left)),
        weight=tree.weighted_n_node_samples,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "missing"), [("squared", True), ("logistic", False)]
)
def test_values_and_interactions_are_those_of_xgboost(problem, missing):
    x, y, weight = parity.make_data(missing)
    chosen, settings = parity.PROBLEMS[problem], parity.SETTINGS["plain"]
    booster = parity.train_booster(x, y, weight, chosen, settings)
    start = np.array([chosen.init_score], np.float32)
    model = build_ensemble(
        read_booster(booster), init_score=start, num_features=5, absent="missing"
    )
    rows = xgb.DMatrix(x[:200])
    found = jb.shap_values(model, x[:200])
    expected = booster.predict(rows, pred_contribs=True)
    # XGBoost unwinds paths in float32, for which we have no bound.
    tolerance = dict(rtol=0, atol=1e-5 * largest(expected))
    np.testing.assert_allclose(found.values, expected[:, :-1], **tolerance)
    np.testing.assert_allclose(found.base, expected[0, -1], **tolerance)
    found = jb.explanation.shap_interactions(model, x[:200])
    expected = booster.predict(rows, pred_interactions=True)[:, :-1, :-1]
    np.testing.assert_allclose(found, expected, **tolerance)


def test_weight_and_curvature_are_different_covers():
    """Of a logistic loss they are: less curvature where scores are far from 0."""
    x, y, weight = parity.make_data(False)
    problem, settings = parity.PROBLEMS["logistic"], parity.SETTINGS["plain"]
    model = parity.train_jboost(x, y, weight, problem, settings)
    weighted, curved = (
        jb.shap_values(model, x, cover=cover) for cover in ("weight", "curvature")
    )
    jax.tree.map(
        np.testing.assert_array_equal, weighted, jb.shap_values(model, x, cover="auto")
    )
    scores = np.asarray(jb.predict(model, x), np.float64)
    mean = np.average(scores, weights=weight)
    np.testing.assert_allclose(weighted.base, mean, rtol=0, atol=allowed(model))
    assert abs(curved.base - mean) > 100 * allowed(model)


def test_a_tree_is_explained_as_by_the_shap_package():
    shap = pytest.importorskip("shap")
    theirs = DecisionTreeRegressor(max_depth=5, random_state=0)
    theirs.fit(X, Y, sample_weight=WEIGHTS)
    explainer = shap.TreeExplainer(theirs)
    nodes, start = read_sklearn(theirs.tree_), np.zeros(1, np.float32)
    model = build_ensemble([nodes], init_score=start, num_features=3, absent="missing")
    found = jb.shap_values(model, X)
    expected = explainer.shap_values(X)
    tolerance = dict(rtol=0, atol=1e-5 * largest(expected))
    np.testing.assert_allclose(found.values, expected, **tolerance)
    np.testing.assert_allclose(found.base, explainer.expected_value[0], **tolerance)
    expected = explainer.shap_interaction_values(X)
    np.testing.assert_allclose(
        jb.explanation.shap_interactions(model, X), expected, **tolerance
    )


def test_trees_of_several_targets_and_single_leaves():
    targets = np.stack([Y, X[:, 2] ** 2], axis=1)
    tree = jb.cart.fit_tree(X, targets, max_depth=3)
    found = jb.shap_values(tree, X)
    assert found.values.shape == (ROWS, 3, 2) and found.base.shape == (2,)
    total = np.asarray(found.values).sum(1) + np.asarray(found.base)
    np.testing.assert_allclose(total, jb.predict(tree, X), rtol=0, atol=1e-5)
    traced = jax.jit(lambda tree: jb.shap_values(tree, X))(tree)
    np.testing.assert_allclose(traced.values, found.values, rtol=0, atol=1e-6)
    leaf = jb.cart.fit_tree(X, Y, max_depth=0)
    found = jb.shap_values(leaf, X)
    np.testing.assert_allclose(found.base, Y.mean(), rtol=1e-6)
    assert (
        not found.values.any() and not jb.explanation.shap_interactions(leaf, X).any()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_interactions_keep_their_laws(kind):
    """On more rows than a block of the kernel, and a number that no vector divides."""
    model, x = make_model(kind, seed=2), make_rows(kind, 150)
    values = np.asarray(jb.shap_values(model, x).values)
    pairs = np.asarray(jb.explanation.shap_interactions(model, x))
    np.testing.assert_array_equal(pairs, np.swapaxes(pairs, 1, 2))
    tolerance = dict(rtol=0, atol=allowed(model))
    np.testing.assert_allclose(pairs.sum(2), values, **tolerance)


def test_blocks_of_rows_change_nothing(monkeypatch):
    """A shape of its own, for which nothing is compiled yet."""
    model, x = make_model("heaps", shape=(2, 3)), make_rows("heaps", 150)
    monkeypatch.setattr("jboost.explanation.shap._BLOCK_CELLS", 64 * 50)
    blocks = jb.shap_values(model, x, implementation="xla").values
    np.testing.assert_allclose(
        blocks, jb.shap_values(model, x).values, rtol=0, atol=allowed(model)
    )
    single = [jb.shap_values(model, x[i : i + 1]).values[0] for i in (0, 49, 50, 149)]
    np.testing.assert_array_equal(
        np.stack(single), jb.shap_values(model, x).values[np.array([0, 49, 50, 149])]
    )


def make_deep(num_features, depth, seed=5):
    """One chain of splits: a leaf on one side, everything else on the other."""
    generator = np.random.default_rng(seed)
    num_nodes = 2 * depth + 1
    node = np.arange(num_nodes, dtype=np.int32)
    inner = (node < num_nodes - 2) & ((node % 2 == 0) | (node == 0))
    feature = np.where(inner, generator.permutation(num_nodes) % num_features, 0)
    threshold = np.where(inner, generator.normal(size=num_nodes), np.inf)
    value = generator.normal(size=num_nodes).astype(np.float32)
    cover = generator.integers(1, 5, num_nodes).astype(np.float32)
    arrays = dict(
        feature=feature.astype(np.int32), threshold=threshold.astype(np.float32),
        missing_left=np.ones(num_nodes, bool), leaf_value=value,
    )  # fmt: skip
    left = np.where(inner, node + 1, node)
    cover = jnp.asarray(cover)[None, None]
    return jb.Ensemble(
        **{name: jnp.asarray(a)[None, None] for name, a in arrays.items()},
        init_score=jnp.float32(1), num_features=num_features,
        sums=LeafSums(cover, cover, cover, jnp.zeros((1, 1))),
        links=Links(jnp.asarray(left, jnp.int32)[None, None], depth),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_features", "depth", "linear", "implementation"),
    # More points than the kernel takes at once; too deep for it, hence by plain XLA.
    [
        (10, 12, False, IMPLEMENTATIONS[-1]), (10, 12, True, IMPLEMENTATIONS[-1]),
        (10, 12, True, "xla"), (3, 300, False, IMPLEMENTATIONS[-1]),
    ],
)  # fmt: skip
def test_deep_trees(num_features, depth, linear, implementation):
    model = make_deep(num_features, depth)
    model = add_terms(model, range(num_features)) if linear else model
    x = np.random.default_rng(6).normal(size=(2, num_features)).astype(np.float32)
    found = jb.shap_values(model, x, implementation=implementation)
    host = jax.tree.map(np.asarray, model)
    for row, values in zip(x, np.asarray(found.values), strict=True):
        game = references.tree_game(nest(host, row, (0, 0)), num_features)
        expected = references.shapley_values(game, num_features)
        np.testing.assert_allclose(values, expected, rtol=0, atol=allowed(model))


@needs_cpu_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_give_the_same_bits(kind):
    model, x = make_model(kind, shape=(5, 1)), make_rows(kind, 77)
    found = [
        (jb.shap_values(model, x).values, jb.explanation.shap_interactions(model, x))
        for _ in each_isa()
    ]
    for other in found[1:]:
        chex.assert_trees_all_equal(other, found[0])


def test_traced_calls_agree():
    """jit, vmap over rows and over models; NaN is seen there, too."""
    model, x = make_model("linear", shape=(2, 1)), make_rows("linear", 5)
    sums = model.sums._replace(weight=jnp.full_like(model.sums.weight, jnp.nan))
    foreign = replace(model, sums=sums)
    expected = jb.shap_values(foreign, x)
    run = jax.jit(lambda model, x: jb.shap_values(model, x))
    chex.assert_trees_all_equal(run(foreign, x), expected)
    by_row = jax.vmap(lambda row: jb.shap_values(foreign, row[None]).values[0])
    np.testing.assert_array_equal(by_row(jnp.asarray(x)), expected.values)
    models = jax.tree.map(lambda *a: jnp.stack(a), model, foreign)
    both = jax.vmap(lambda m: jb.shap_values(m, x))(models)
    for number, own in enumerate((model, foreign)):
        one = jax.tree.map(lambda array, i=number: array[i], both)
        chex.assert_trees_all_equal(one, jb.shap_values(own, x))


def test_an_offset_belongs_to_the_base():
    offset = np.linspace(-1, 1, ROWS, dtype=np.float32)
    found = jb.shap_values(MODEL, X, offset=offset)
    plain = jb.shap_values(MODEL, X)
    np.testing.assert_array_equal(found.values, plain.values)
    np.testing.assert_array_equal(found.base, plain.base + offset)
    total = np.asarray(found.values).sum(1) + np.asarray(found.base)
    scores = jb.predict(MODEL, X, offset=offset)
    np.testing.assert_allclose(total, scores, rtol=0, atol=allowed(MODEL))
    model, x = make_model("heaps"), make_rows("heaps", ROWS)
    both = np.stack([offset, -offset], axis=1)
    found = jb.shap_values(model, x, offset=both)
    total = np.asarray(found.values).sum(1) + np.asarray(found.base)
    scores = jb.predict(model, x, offset=both)
    np.testing.assert_allclose(total, scores, rtol=0, atol=allowed(model))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_single_leaf_may_be_linear(implementation):
    model = jb.cart.fit_tree(X, Y, max_depth=0).as_ensemble()
    model = add_terms(model, range(3), 3, seed=0)
    found = jb.shap_values(model, X, implementation=implementation)
    feature, slope, center = (np.asarray(a)[0, 0, 0] for a in model.slopes)
    ends = np.asarray(model.ranges)[feature]
    expected = slope * (np.clip(X[:, feature], *ends.T) - center)
    expected = np.where(feature < 0, 0, expected)
    assert (feature >= 0).sum() > 1
    tolerance = dict(rtol=0, atol=allowed(model))
    np.testing.assert_allclose(found.values[:, feature], expected, **tolerance)
    np.testing.assert_allclose(found.base, Y.mean(), rtol=1e-6)


@pytest.mark.parametrize(("absent", "linear"), [("missing", True), ("zero", False)])
def test_sparse_rows_have_dense_values(absent, linear):
    kept = np.random.default_rng(3).random(X.shape) < 0.5
    wide = np.zeros((ROWS, 40), np.float32)
    wide[:, [3, 17, 30]] = np.where(kept, X, 0)
    matrix = scipy.sparse.csr_matrix(wide)
    if absent == "missing":
        wide = np.where(wide == 0, np.float32(np.nan), wide)
    model, _ = jb.fit(matrix, Y, absent=absent, **SMALL)
    model = add_terms(model, (3, 17, 30)) if linear else model
    found, dense = jb.shap_values(model, matrix), jb.shap_values(model, wide)
    assert found.values.shape == wide.shape
    np.testing.assert_array_equal(found.values, dense.values)
    np.testing.assert_array_equal(
        jb.explanation.shap_interactions(model, matrix),
        jb.explanation.shap_interactions(model, wide),
    )
    used = np.asarray(found.values).any(axis=0)
    np.testing.assert_array_equal(np.flatnonzero(used), [3, 17, 30])


def test_memory_by_column_and_no_rounds():
    plain = jb.shap_values(MODEL, X)
    many = np.tile(X, (700, 1))  # more than is copied
    for x in (many, np.asfortranarray(many)):
        found = np.asarray(jb.shap_values(MODEL, x).values)
        np.testing.assert_array_equal(found[-ROWS:], plain.values)
    empty = jb.shap_values(jb.truncate(MODEL, 0), X)
    assert not empty.values.any() and empty.base == MODEL.init_score


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="cover must be one of"):
        jb.shap_values(MODEL, X, cover="rows")
    with pytest.raises(ValueError, match="sums are None"):
        jb.shap_values(replace(MODEL, sums=None), X)
    nothing = jnp.full_like(MODEL.sums.weight, jnp.nan)
    foreign = replace(MODEL, sums=MODEL.sums._replace(weight=nothing))
    with pytest.raises(ValueError, match="'curvature'"):
        jb.shap_values(foreign, X, cover="weight")
    expected = jb.shap_values(MODEL, X, cover="curvature")
    found = jb.shap_values(foreign, X)
    chex.assert_trees_all_equal(found, expected)
    neither = replace(foreign, sums=foreign.sums._replace(curvature=nothing))
    with pytest.raises(ValueError, match="neither"):
        jb.explanation.shap_interactions(neither, X)
    negative = replace(MODEL, sums=MODEL.sums._replace(weight=-MODEL.sums.weight))
    with pytest.raises(ValueError, match="must be >= 0"):
        jb.shap_values(negative, X)
    with pytest.raises(ValueError, match="x must have 3 columns"):
        jb.shap_values(MODEL, X[:, :2])
    with pytest.raises(TypeError, match="unpack it"):
        jb.shap_values((MODEL, None), X)
    with pytest.raises(ValueError, match=r"offset .*\(200,\)"):
        jb.shap_values(MODEL, X, offset=np.zeros(3))


@pytest.mark.parametrize("make", [np.asarray, scipy.sparse.csr_matrix])
def test_no_rows(make):
    values, base = jb.shap_values(MODEL, make(X[:0]))
    assert values.shape == (0, X.shape[1])
    assert base.shape == ()
    assert jb.explanation.shap_interactions(MODEL, make(X[:0])).shape == (
        0,
        *2 * X.shape[1:],
    )
