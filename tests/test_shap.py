# SPDX-License-Identifier: Apache-2.0
"""SHAP values against sums over all subsets of features, XGBoost, and their laws."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from tables import ROWS, SMALL, make_regression, squared_distance

import jboost as jb
from jboost.categories import Categories
from jboost.ensemble import Links
from jboost.kernels import library
from jboost.levels import LeafSums

IMPLEMENTATIONS = ["cpu", "xla"]
FEATURES = 4
# Of the sum over trees of the largest leaf value; see jb.shap_values.
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


def make_model(kind, seed=0, shape=(3, 2)):
    """Random trees of a kind; some leaves have no cover."""
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
    if kind == "categories":
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
        return model.leaf_value[tree][leaf], float(model.sums.weight[tree][leaf])
    if not model.is_split[tree][node]:
        return nest(model, row, tree, left)
    feature = int(model.feature[tree][node])
    own = left if goes_left(model, row[feature], tree, node, feature) else left + 1
    sides = [nest(model, row, tree, child) for child in (own, 2 * left + 1 - own)]
    return feature, *sides


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
    largest = np.abs(np.asarray(model.leaf_value)).max(axis=2)
    return TOLERANCE * float(largest.sum(axis=0).max())


@pytest.fixture(scope="module", params=["heaps", "linked", "categories"])
def case(request):
    """A model, rows, and what sums over all subsets say."""
    model, x = make_model(request.param), make_rows(request.param, 6)
    return model, x, *brute_force(model, x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_are_averages_over_all_orders(case, implementation):
    model, x, values, pairs, base = case
    found = jb.shap_values(model, x, implementation=implementation)
    tolerance = dict(rtol=0, atol=allowed(model))
    np.testing.assert_allclose(found.values, values, **tolerance)
    np.testing.assert_allclose(found.base, base, **tolerance)
    scores = jb.predict(model, x)
    total = np.asarray(found.values).sum(1) + np.asarray(found.base)
    np.testing.assert_allclose(total, scores, **tolerance)
    found = jb.shap_interactions(model, x, implementation=implementation)
    np.testing.assert_allclose(found, pairs, **tolerance)
