# SPDX-License-Identifier: Apache-2.0
"""Weakest-link pruning: against scikit-learn, all subtrees one by one, and laws."""

from itertools import pairwise

import chex
import jax
import numpy as np
import pytest
import references
from sklearn.tree import DecisionTreeRegressor

import jboost as jb


def make_table(num_rows, num_columns=1, *, missing=0.0, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_columns)).astype(np.float32)
    y = np.sin(2 * x[:, 0]) + x[:, -1] + rng.normal(size=num_rows)
    x[rng.random(x.shape) < missing] = np.nan
    return x, y, rng.uniform(0.1, 3, num_rows)


# ---- against scikit-learn ------------------------------------------------------------

# One column or nodes that are not small: no ties, hence the same tree to begin with.
TABLES = {
    "all the way down": (dict(num_rows=300), False, 1),
    "weights": (dict(num_rows=300), True, 1),
    "missing": (dict(num_rows=600, num_columns=3, missing=0.2), True, 8),
    "columns": (dict(num_rows=1000, num_columns=4), False, 10),
}


def fit_both(name, **pruning):
    arguments, weighted, least = TABLES[name]
    x, y, weights = make_table(**arguments)
    weights = weights if weighted else None
    tree = jb.cart.fit_tree(x, y, sample_weight=weights, min_child_samples=least)
    peer = DecisionTreeRegressor(min_samples_leaf=least, random_state=0, **pruning)
    return x, y, weights, tree, peer


@pytest.mark.parametrize("name", TABLES)
def test_same_alphas_as_scikit_learn(name):
    x, y, weights, tree, peer = fit_both(name)
    path = jb.cart.pruning_path(tree)
    expected = peer.cost_complexity_pruning_path(x, y, sample_weight=weights)
    total = tree.weight[0]  # its errors are means
    np.testing.assert_allclose(path.alphas / total, expected.ccp_alphas, atol=1e-12)
    np.testing.assert_allclose(
        path.squared_error / total, expected.impurities, atol=1e-12
    )
    assert len(path.alphas) > 20


@pytest.mark.parametrize("name", TABLES)
def test_same_pruned_trees_as_scikit_learn(name):
    _, _, _, tree, _ = fit_both(name)
    alphas = jb.cart.pruning_path(tree).alphas
    for alpha in np.sqrt(alphas[:-1] * alphas[1:])[:: len(alphas) // 4]:
        x, y, weights, tree, peer = fit_both(name, ccp_alpha=alpha / tree.weight[0])
        peer.fit(x, y, sample_weight=weights)
        pruned = jb.cart.prune(tree, alpha)
        assert pruned.num_nodes == peer.tree_.node_count
        fresh = make_table(500, x.shape[1], missing=float(np.isnan(x).mean()), seed=9)
        np.testing.assert_allclose(
            jb.predict(pruned, fresh[0]), peer.predict(fresh[0]), rtol=1e-6, atol=1e-6
        )


def test_ties_are_one_step():
    x = np.arange(8.0)[:, None]
    y = np.array([0.0, 1, 10, 11, 100, 101, 110, 111])
    path = jb.cart.pruning_path(jb.cart.fit_tree(x, y))
    expected = DecisionTreeRegressor().cost_complexity_pruning_path(x, y)
    distinct = np.unique(np.round(expected.ccp_alphas, 9))
    np.testing.assert_allclose(path.alphas / 8, distinct)
    assert path.num_leaves.tolist() == [8, 4, 2, 1]


# ---- laws ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_subtree_is_better(seed):
    """Of all subtrees, those of least cost; of these, the smallest."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 6, (9, 2)).astype(np.float32)
    y = rng.integers(0, 5, 9).astype(np.float64)
    tree = jb.cart.fit_tree(x, y)
    reference = references.fit_cart(x, y[:, None], np.ones(9))
    every = references.pruned_costs(reference)
    path = jb.cart.pruning_path(tree)
    between = [(a + b) / 2 for a, b in pairwise(path.alphas)]
    for alpha in [*path.alphas, *between, 2 * path.alphas[-1] + 1]:
        costs = [float(error) + alpha * leaves for leaves, error in every]
        least = min(costs) + 1e-9
        best = [n for (n, _), cost in zip(every, costs, strict=True) if cost <= least]
        pruned = jb.cart.prune(tree, alpha)
        is_leaf = pruned.left == -1
        cost = pruned.squared_error[is_leaf].sum() + alpha * pruned.num_leaves
        assert cost <= least
        assert pruned.num_leaves == min(best)
    assert len(path.alphas) > 1


def test_subtrees_are_nested_and_complete():
    x, y, weights = make_table(300, 3, missing=0.2)
    tree = jb.cart.fit_tree(x, y, sample_weight=weights)
    path = jb.cart.pruning_path(tree)
    assert path.alphas[0] == 0 and path.num_leaves[-1] == 1
    assert np.all(np.diff(path.alphas) > 0) and np.all(np.diff(path.num_leaves) < 0)
    chex.assert_trees_all_equal(jb.cart.prune(tree, 0.0), tree)
    smaller = tree
    for alpha, leaves, error in list(zip(*path, strict=True))[::40]:
        pruned = jb.cart.prune(tree, alpha)
        smaller = jb.cart.prune(smaller, alpha)
        chex.assert_trees_all_equal(smaller, pruned)
        assert pruned.num_leaves == leaves
        is_leaf = pruned.left == -1
        np.testing.assert_allclose(pruned.squared_error[is_leaf].sum(), error)
        inner = pruned.left[~is_leaf]
        np.testing.assert_array_equal(inner, 1 + 2 * np.arange(len(inner)))
        assert np.all(pruned.threshold[is_leaf] == np.inf)
        found = np.asarray(jb.leaf_indices(pruned, x))
        assert set(found) == set(np.flatnonzero(is_leaf))
        for leaf in np.unique(found):
            rows = found == leaf
            mean = np.average(y[rows], weights=weights[rows])
            np.testing.assert_allclose(pruned.value[leaf], mean)
    root = jb.cart.prune(tree, np.inf)
    assert root.num_nodes == 1
    assert root.value[0] == pytest.approx(np.average(y, weights=weights))


def test_large_trees_are_pruned_quickly_and_alike():
    """The sequence of a large tree agrees with collapsing link by link."""
    x, y, _ = make_table(2000, 2)
    tree = jb.cart.fit_tree(x, y, min_child_samples=5)
    path = jb.cart.pruning_path(tree)
    for step, (alpha, after) in enumerate(pairwise(path.alphas)):
        if step % 25:
            continue
        pruned = jb.cart.prune(tree, alpha)
        errors, leaves = pruned.squared_error.copy(), np.ones(pruned.num_nodes)
        for node in range(pruned.num_nodes - 1, -1, -1):
            if pruned.left[node] != -1:
                pair = slice(pruned.left[node], pruned.left[node] + 2)
                errors[node], leaves[node] = errors[pair].sum(), leaves[pair].sum()
        inner = pruned.left != -1
        falls = (pruned.squared_error - errors)[inner] / (leaves[inner] - 1)
        np.testing.assert_allclose(falls.min(), after, rtol=1e-9)


# ---- cross-validation ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights", "missing", "columns"])
def test_cross_validation_equals_a_literal_one(name):
    x, y, weights, tree, _ = fit_both(name)
    weights = np.ones(len(y)) if weights is None else weights
    least = TABLES[name][2]
    folds = np.random.default_rng(4).integers(0, 4, len(y))
    choice = jb.cart.cross_validate_alpha(
        x, y, sample_weight=weights, folds=folds, min_child_samples=least
    )
    path = jb.cart.pruning_path(tree)
    np.testing.assert_array_equal(choice.num_leaves, path.num_leaves)
    assert np.all(choice.alphas[1:-1] > path.alphas[1:-1])
    assert np.all(choice.alphas[:-1] < path.alphas[1:])
    chosen = list(range(0, len(choice.alphas), len(choice.alphas) // 5))
    for i in chosen:
        errors = np.zeros(len(y))
        for fold in range(4):
            held = folds == fold
            alpha = min(choice.alphas[i], 1e9) / weights.sum()
            peer = DecisionTreeRegressor(
                min_samples_leaf=least, ccp_alpha=alpha, random_state=0
            )
            peer.fit(x[~held], y[~held], sample_weight=weights[~held])
            errors[held] = (y[held] - peer.predict(x[held])) ** 2
        mean = np.average(errors, weights=weights)
        np.testing.assert_allclose(choice.mean_error[i], mean, rtol=1e-9)
        variance = np.sum((weights * (errors - mean)) ** 2) / weights.sum() ** 2
        np.testing.assert_allclose(
            choice.standard_error[i], np.sqrt(variance), rtol=1e-9
        )
    chex.assert_trees_all_equal(choice.tree, tree)


def test_the_two_choices():
    x, y, _ = make_table(400, 3)
    choice = jb.cart.cross_validate_alpha(x, y, seed=1)
    ties = choice.mean_error <= choice.mean_error.min() * (1 + 1e-9)
    best = np.flatnonzero(ties)[-1]
    assert ties.sum() > 1 and choice.best_alpha == choice.alphas[best]
    limit = choice.mean_error[best] + choice.standard_error[best]
    one = list(choice.alphas).index(choice.one_se_alpha)
    assert choice.mean_error[one] <= limit
    assert np.all(choice.mean_error[one + 1 :] > limit) and one > best
    pruned = jb.cart.prune(choice.tree, choice.one_se_alpha)
    assert pruned.num_leaves == choice.num_leaves[one] < choice.num_leaves[best]


def test_cross_validation_finds_the_planted_steps():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(1000, 3))
    y = 3 * (x[:, 0] > 0.3) + 3 * (x[:, 1] > 0.6) * (x[:, 0] > 0.3)
    choice = jb.cart.cross_validate_alpha(x, y + rng.normal(size=1000))
    tree = jb.cart.prune(choice.tree, choice.one_se_alpha)
    assert tree.num_leaves == 3
    np.testing.assert_allclose(tree.threshold[tree.left != -1], [0.3, 0.6], atol=0.02)
    assert choice.mean_error.min() < 1.15 and choice.mean_error[0] > 1.7


def test_pure_noise_is_pruned_to_the_root():
    x, _, noise = make_table(300, 3)
    choice = jb.cart.cross_validate_alpha(x, noise)
    assert choice.one_se_alpha == np.inf
    assert jb.cart.prune(choice.tree, choice.one_se_alpha).num_leaves == 1


def test_constant_targets_leave_nothing_to_choose():
    x, _, _ = make_table(20)
    choice = jb.cart.cross_validate_alpha(x, np.full(20, 3.0), folds=20)
    assert choice.alphas.tolist() == [np.inf] and choice.num_leaves.tolist() == [1]
    assert choice.mean_error[0] == choice.standard_error[0] == 0
    assert choice.best_alpha == choice.one_se_alpha == np.inf


def test_folds_are_seeded_and_weights_respected():
    x, y, _ = make_table(150, 2)
    first, again, other = (
        jb.cart.cross_validate_alpha(x, y, seed=seed).mean_error for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    # Rows of weight 0 are not there; labels may be anything.
    weights = np.repeat([1.0, 0.0], [100, 50])
    labels = np.where(np.arange(150) % 3 == 0, "a", "b")
    some = jb.cart.cross_validate_alpha(x, y, sample_weight=weights, folds=labels)
    few = jb.cart.cross_validate_alpha(x[:100], y[:100], folds=labels[:100])
    np.testing.assert_array_equal(some.mean_error, few.mean_error)
    np.testing.assert_array_equal(some.standard_error, few.standard_error)
    # A weight of two counts twice, in fitting as in judging.
    heavy = jb.cart.cross_validate_alpha(x, y, sample_weight=np.full(150, 2.0), seed=3)
    np.testing.assert_allclose(heavy.mean_error, first, rtol=1e-9)
    np.testing.assert_allclose(heavy.alphas[:-1], 2 * few_alphas(x, y)[:-1])


def few_alphas(x, y):
    return jb.cart.cross_validate_alpha(x, y, folds=2).alphas


def test_several_targets():
    x, y, _ = make_table(200, 2)
    pair = np.stack([y, y], axis=1)
    one = jb.cart.cross_validate_alpha(x, y, min_child_samples=3)
    two = jb.cart.cross_validate_alpha(x, pair, min_child_samples=3)
    np.testing.assert_allclose(two.mean_error, 2 * one.mean_error)
    np.testing.assert_allclose(two.alphas, 2 * one.alphas)
    assert jb.cart.prune(two.tree, two.best_alpha).value.shape[1] == 2


# ---- bad calls -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "error"),
    [(-1.0, ValueError), (float("nan"), ValueError), ("one", TypeError)],
)
def test_prune_refuses_alphas(alpha, error):
    x, y, _ = make_table(20)
    with pytest.raises(error, match=rf"alpha .*{alpha!r}"):
        jb.cart.prune(jb.cart.fit_tree(x, y), alpha)


@pytest.mark.parametrize(
    "function", [jb.cart.pruning_path, lambda tree: jb.cart.prune(tree, 1)]
)
def test_pruning_refuses_what_is_no_tree(function):
    x, y, _ = make_table(20)
    with pytest.raises(TypeError, match=r"tree .*ndarray"):
        function(x)
    with pytest.raises(TypeError, match="tree is traced"):
        jax.jit(function)(jb.cart.fit_tree(x, y))
    with pytest.raises(TypeError, match="alpha is traced"):
        jax.jit(lambda alpha: jb.cart.prune(jb.cart.fit_tree(x, y), alpha).left)(1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(folds=1), ValueError, "folds must be an integer from 2 to 20, got 1"),
        (dict(folds=21), ValueError, "folds must be an integer from 2 to 20, got 21"),
        (dict(folds=2.5), TypeError, "folds must be an integer"),
        (dict(folds=np.arange(3)), ValueError, r"folds must .*\(20,\), got \(3,\)"),
        (dict(folds=np.ones(20)), ValueError, r"at least 2 labels, got \[1.0\]"),
        (dict(seed=-1), ValueError, "seed must be .*got -1"),
        (dict(sample_weight=np.eye(20)[0]), ValueError, "at least 2 rows.*got 1"),
    ],
)
def test_cross_validation_refuses(arguments, error, message):
    x, y, _ = make_table(20)
    with pytest.raises(error, match=message):
        jb.cart.cross_validate_alpha(x, y, **arguments)
