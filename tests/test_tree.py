# SPDX-License-Identifier: Apache-2.0
"""grow_levels against a literal grower, and laws of trees.

Gradients are whole multiples of 2^-20 and curvatures of 1/4, so that sums are exact
here and, their total being below 2^9, in the library: equal partitions then tie
exactly in both, and are broken by the same rule.
"""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from by_column import find_leaves, grow_levels

from jboost.trees.limits import TreeLimits
from jboost.trees.tree import Tree

NUM_ROWS, NUM_FEATURES, NUM_BINS = 600, 4, 16
WORDS = jnp.array([5, 6], jnp.uint32)
PLAIN = references.Limits()
SIZES = ("max_depth", "num_bins", "max_nodes", "uniform", "implementation")
grow_compiled = jax.jit(grow_levels, static_argnames=SIZES)
descend = jax.jit(find_leaves)


class Rows(NamedTuple):
    columns: np.ndarray
    gradient: np.ndarray
    curvature: np.ndarray
    in_bag: np.ndarray


def make_rows(seed=0, missing=0.2, uniform=False):
    """Codes 0 to 12 of 16, some features coarse; a step and noise to be learnt."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(1, most, NUM_ROWS) for most in (13, 13, 5, 3)]
    columns = np.stack(codes).astype(np.uint8)
    columns[:3][rng.random((3, NUM_ROWS)) < missing] = 0  # the last one is complete
    noise = rng.integers(-(2**19), 2**19, NUM_ROWS) / 2**20
    gradient = (noise + 0.25 * (columns[0] > 4)).astype(np.float32)
    curvature = rng.integers(1, 5, NUM_ROWS) / 4
    curvature = np.ones(NUM_ROWS) if uniform else curvature
    in_bag = np.ones(NUM_ROWS, bool)
    return Rows(columns, gradient, curvature.astype(np.float32), in_bag)


def as_limits(limits, **more):
    limits = TreeLimits(**limits._asdict(), **more)
    floats = jax.tree.map(jnp.float32, limits)
    samples = jnp.int32(limits.min_child_samples)
    return floats._replace(min_child_samples=samples)


def grow(rows, limits=PLAIN, *, max_depth, **sizes):
    """grow_levels with NumPy in and out."""
    arrays = [jnp.asarray(array) for array in rows]
    sizes = {"max_depth": max_depth, "num_bins": NUM_BINS, **sizes}
    grown = grow_compiled(*arrays, WORDS, as_limits(limits), **sizes)
    return jax.tree.map(np.asarray, grown)


def split_nodes(tree):
    """Nodes that are split: the others send every value left."""
    return np.flatnonzero(tree.threshold < NUM_BINS - 1)


def assert_equals_literal_grower(rows, limits, max_depth, **sizes):
    tree, leaf = grow(rows, limits, max_depth=max_depth, **sizes)
    expected = references.grow_tree(*rows, limits, max_depth, NUM_BINS)
    np.testing.assert_array_equal(tree.feature, expected.feature)
    np.testing.assert_array_equal(tree.threshold, expected.threshold)
    np.testing.assert_array_equal(tree.missing_left, expected.missing_left)
    np.testing.assert_array_equal(leaf, expected.leaf)
    descended = descend(jax.tree.map(jnp.asarray, tree), jnp.asarray(rows.columns))
    np.testing.assert_array_equal(descended, leaf)
    assert np.all(tree.leaf_value == 0)
    return tree, leaf


# Against the literal grower.

LIMITS = {
    "plain": PLAIN,
    "free": references.Limits(l2=0.0, min_child_weight=0.0),
    "regularised": references.Limits(5.0, 0.05, 2.5, 1),
    "samples": references.Limits(min_child_samples=9),
    "everything": references.Limits(2.0, 0.01, 6.25, 11),
}


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("max_depth", [1, 3, 6])
def test_tree_equals_the_literal_grower(max_depth, name, missing):
    rows = make_rows(seed=max_depth, missing=missing)
    tree, leaf = assert_equals_literal_grower(rows, LIMITS[name], max_depth)
    assert len(np.unique(leaf)) > min(max_depth, 4)  # it did grow
    assert tree.max_depth == max_depth


@pytest.mark.parametrize("name", LIMITS)
def test_uniform_curvature_needs_no_counts(name):
    rows = make_rows(seed=9, uniform=True)
    assert_equals_literal_grower(rows, LIMITS[name], 6, uniform=True)


@pytest.mark.parametrize("uniform", [False, True])
def test_rows_out_of_the_bag_are_routed_but_do_not_count(uniform):
    rows = make_rows(seed=10, uniform=True)
    out = np.random.default_rng(0).random(NUM_ROWS) < 0.4
    rows.gradient[out], rows.curvature[out] = np.nan, np.inf
    rows = rows._replace(in_bag=~out)
    limits = references.Limits(min_child_samples=7)
    _, leaf = assert_equals_literal_grower(rows, limits, 6, uniform=uniform)
    assert len(np.unique(leaf[out])) > 6


def test_the_smaller_child_may_have_more_rows_out_of_the_bag():
    """Which child is summed, and how many rows that takes, goes by rows in the bag."""
    rows = make_rows(seed=22, missing=0.0)
    right = rows.columns[0] > 9
    in_bag = right | (np.random.default_rng(0).random(NUM_ROWS) < 0.1)
    gradient = np.where(right, rows.gradient, rows.gradient - 2).astype(np.float32)
    rows = rows._replace(gradient=gradient, in_bag=in_bag)
    tree, _ = assert_equals_literal_grower(rows, PLAIN, 6)
    assert (tree.feature[0], tree.threshold[0]) == (0, 9)
    assert np.sum(~right & in_bag) < np.sum(right & in_bag)
    assert np.sum(~right) > NUM_ROWS // 2


def test_a_cap_on_nodes_that_holds_changes_nothing():
    rows, least = make_rows(seed=11), 40
    limits = references.Limits(min_child_samples=least)
    sizes = {"max_nodes": NUM_ROWS // least}
    _, leaf = assert_equals_literal_grower(rows, limits, 6, **sizes)
    assert len(np.unique(leaf)) > 8


def test_twelve_levels():
    """More levels than the rows can fill: nodes are limited by N."""
    _, leaf = assert_equals_literal_grower(make_rows(seed=12), LIMITS["free"], 12)
    assert len(np.unique(leaf)) > 400


def test_an_empty_bag_grows_nothing():
    rows = make_rows()._replace(in_bag=np.zeros(NUM_ROWS, bool))
    tree, leaf = grow(rows, LIMITS["free"], max_depth=3)
    assert len(split_nodes(tree)) == 0
    assert np.all(leaf == 0)


def test_a_single_row_in_the_bag_grows_nothing():
    rows = make_rows()._replace(in_bag=np.arange(NUM_ROWS) == 7)
    tree, _ = grow(rows, LIMITS["free"], max_depth=3)
    assert len(split_nodes(tree)) == 0


# Laws.


@pytest.mark.parametrize("num_rows", [1, 3])
def test_few_rows_are_split_apart(num_rows):
    columns = np.tile(np.arange(1, num_rows + 1, dtype=np.uint8), (NUM_FEATURES, 1))
    ones = np.ones(num_rows, np.float32)
    gradient = np.arange(num_rows, dtype=np.float32) ** 2
    rows = Rows(columns, gradient, ones, ones > 0)
    _, leaf = grow(rows, LIMITS["free"], max_depth=2)
    assert len(np.unique(leaf)) == num_rows


def test_weight_of_two_equals_a_duplicate():
    rows = make_rows(seed=13)
    last = np.arange(NUM_ROWS) >= 400
    twice = np.where(np.arange(NUM_ROWS) < 200, 2, 1).astype(np.float32)
    weighted = rows._replace(
        gradient=twice * rows.gradient, curvature=twice * rows.curvature, in_bag=~last
    )
    source = np.where(last, np.arange(NUM_ROWS) - 400, np.arange(NUM_ROWS))
    duplicated = Rows(
        rows.columns[:, source], rows.gradient[source], rows.curvature[source],
        rows.in_bag,
    )  # fmt: skip
    one, one_leaf = grow(weighted, PLAIN, max_depth=6)
    two, two_leaf = grow(duplicated, PLAIN, max_depth=6)
    np.testing.assert_array_equal(one.feature, two.feature)
    np.testing.assert_array_equal(one.threshold, two.threshold)
    np.testing.assert_array_equal(one_leaf[:400], two_leaf[:400])
    plain, _ = grow(rows._replace(in_bag=~last), PLAIN, max_depth=6)
    assert not np.array_equal(plain.threshold, one.threshold)  # weights do matter


def test_gradients_in_another_unit_grow_the_same_tree():
    """A power of two scales gains and nothing else: l2 is 0."""
    rows = make_rows(seed=15)
    scaled = rows._replace(gradient=rows.gradient * np.float32(2.0**-40))
    tree, _ = grow(rows, LIMITS["free"], max_depth=6)
    other, _ = grow(scaled, LIMITS["free"], max_depth=6)
    chex.assert_trees_all_equal(tree, other)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("least", "found"), [(200, True), (201, False)])
def test_min_child_samples_is_exact(least, found, uniform):
    codes = np.where(np.arange(NUM_ROWS) < 200, 1, 2).astype(np.uint8)
    ones = np.ones(NUM_ROWS, np.float32)
    gradient = np.where(codes == 1, ones, -ones)
    rows = Rows(np.tile(codes, (NUM_FEATURES, 1)), gradient, ones, ones > 0)
    limits = references.Limits(min_child_samples=least)
    tree, _ = grow(rows, limits, max_depth=6, uniform=uniform)
    assert (len(split_nodes(tree)) > 0) == found


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("least", [601, 1800, 2**20, 2**31 - 1])
def test_more_samples_than_rows_allow_no_split(least, uniform):
    limits = references.Limits(min_child_samples=least)
    rows = make_rows(uniform=True)
    tree, _ = grow(rows, limits, max_depth=6, uniform=uniform)
    assert len(split_nodes(tree)) == 0


@pytest.mark.parametrize("num_low", [250, 300, 301, 350])
def test_unseen_missing_values_go_where_most_rows_go(num_low):
    codes = np.where(np.arange(NUM_ROWS) < num_low, 1, 2).astype(np.uint8)
    ones = np.ones(NUM_ROWS, np.float32)
    gradient = np.where(codes == 1, ones, -ones)
    rows = Rows(np.tile(codes, (NUM_FEATURES, 1)), gradient, ones, ones > 0)
    tree, _ = grow(rows, max_depth=1)
    assert tree.threshold.tolist() == [1]
    assert bool(tree.missing_left[0]) == (2 * num_low >= NUM_ROWS)


def test_missing_values_out_of_the_bag_do_not_choose_their_side():
    """They are as unseen as those of new data: 500 rows in the bag, 300 of them low."""
    codes = np.where(np.arange(NUM_ROWS) < 300, 1, 2).astype(np.uint8)
    codes[500:] = 0
    ones = np.ones(NUM_ROWS, np.float32)
    gradient = np.where(codes == 1, ones, -ones)
    in_bag = codes > 0
    rows = Rows(np.tile(codes, (NUM_FEATURES, 1)), gradient, ones, in_bag)
    tree, leaf = grow(rows, max_depth=1)
    assert bool(tree.missing_left[0])
    assert np.all(leaf[500:] == 0)


def test_nodes_that_are_not_split_say_so():
    rows = make_rows(seed=17, uniform=True)
    gradient = np.where(rows.columns[3] == 1, 1, -1).astype(np.float32)
    tree, leaf = grow(rows._replace(gradient=gradient), max_depth=3)
    assert tree.feature.tolist() == [3] + [0] * 6
    assert tree.threshold.tolist() == [1] + [NUM_BINS - 1] * 6
    assert tree.missing_left.tolist()[1:] == [True] * 6
    assert np.unique(leaf).tolist() == [0, 4]
    nothing, leaf = grow(rows._replace(gradient=0 * gradient), max_depth=3)
    assert nothing.feature.tolist() == [0] * 7
    assert nothing.threshold.tolist() == [NUM_BINS - 1] * 7
    assert np.all(nothing.missing_left)
    assert np.all(leaf == 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_column_sampling_limits_the_features_used(seed):
    rows = make_rows(seed=18 + seed)
    words = jnp.array([seed, 3], jnp.uint32)
    run = partial(grow_compiled, max_depth=6, num_bins=NUM_BINS)
    arrays = [jnp.asarray(array) for array in rows]

    def features(**shares):
        limits = as_limits(PLAIN, **shares)
        tree, _ = run(*arrays, words, limits)
        split = split_nodes(tree)
        levels = np.log2(split + 1).astype(int)
        every = np.asarray(tree.feature)[split]
        return [set(every[levels == level].tolist()) for level in range(6)]

    assert len(set().union(*features())) == NUM_FEATURES
    assert len(set().union(*features(colsample_bytree=0.5))) == 2
    by_level = features(colsample_bylevel=0.25)
    assert max(map(len, by_level)) == 1 < len(set().union(*by_level))
    by_node = features(colsample_bynode=0.25)
    assert max(map(len, by_node)) > 1
    both = features(colsample_bytree=0.5, colsample_bylevel=0.5)
    assert max(map(len, both)) == 1
    assert len(set().union(*both)) <= 2


def test_vmap_and_bare_calls_agree():
    rows = make_rows(seed=20)
    columns, *arrays = (jnp.asarray(array) for array in rows)
    limits = as_limits(PLAIN)
    run = partial(grow_levels, max_depth=3, num_bins=NUM_BINS)
    gradients = jnp.stack([arrays[0], arrays[0][::-1], -(arrays[0] ** 2)])
    axes = (None, 0, None, None, None, None)
    mapped = jax.jit(jax.vmap(run, axes))
    many = mapped(columns, gradients, *arrays[1:], WORDS, limits)
    for entry in range(3):
        one = grow_compiled(
            columns, gradients[entry], *arrays[1:], WORDS, limits,
            max_depth=3, num_bins=NUM_BINS,
        )  # fmt: skip
        same = jax.tree.map(lambda a, b, n=entry: bool(np.all(a[n] == b)), many, one)
        assert all(jax.tree.leaves(same))


def test_find_leaves_follows_the_drawing():
    tree = Tree(
        feature=jnp.array([1, 0, 0]),
        threshold=jnp.array([2, 3, 1]),
        missing_left=jnp.array([False, True, False]),
        leaf_value=jnp.zeros(4),
    )
    columns = jnp.array([[3, 4, 0, 1, 2, 0], [2, 1, 1, 3, 0, 9]], jnp.uint8)
    assert find_leaves(tree, columns).tolist() == [0, 1, 0, 2, 3, 3]
