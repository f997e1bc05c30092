# SPDX-License-Identifier: Apache-2.0
"""Single regression trees: against exact fractions, scikit-learn, and laws."""

import copy
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import references
from compilations import Compilations
from implementations import IMPLEMENTATIONS
from scipy.sparse import csr_array
from sklearn.tree import DecisionTreeRegressor

import jboost as jb
from jboost.entry.context import use_implementation

NAN, INF = float("nan"), float("inf")
ARRAYS = (
    "left", "feature", "threshold", "missing_left", "value", "gain", "squared_error",
    "weight", "num_rows",
)  # fmt: skip


def make_table(num_rows, num_columns, *, missing=0.0, outputs=None, seed=0):
    """Values that are all different; targets that depend on them, and noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_columns)).astype(np.float32)
    y = np.sin(2 * x[:, 0]) + x[:, -1] + rng.normal(size=num_rows)
    if outputs:
        y = np.stack([y * (k + 1) + rng.normal(size=num_rows) for k in range(outputs)])
        y = y.T
    x[rng.random(x.shape) < missing] = np.nan
    return x, y


def make_small_table(seed, missing=0.0, outputs=None):
    """Few values, so that gains tie exactly."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 4, (24, 3)).astype(np.float32)
    y = rng.integers(0, 4, (24, outputs) if outputs else 24).astype(np.float64)
    x[rng.random(x.shape) < missing] = np.nan
    return x, y, rng.integers(1, 4, 24).astype(np.float64)


def assert_same_fields(tree, other, rtol=0.0):
    for name in ARRAYS:
        found, expected = getattr(tree, name), getattr(other, name)
        np.testing.assert_allclose(found, expected, rtol=rtol, err_msg=name)


# ---- against exact fractions ---------------------------------------------------------


def assert_equal_to_reference(tree, node, reference):
    found = [np.atleast_1d(tree.value[node]), tree.squared_error[node]]
    expected = [np.array(reference.value, float), float(reference.squared_error)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert tree.weight[node] == reference.weight
    assert tree.num_rows[node] == reference.num_rows
    if reference.split is None:
        assert tree.left[node] == -1 and tree.gain[node] == 0
        return
    feature, threshold, missing_left, gain = reference.split
    assert tree.left[node] > 0
    assert (tree.feature[node], tree.threshold[node]) == (feature, threshold)
    assert tree.missing_left[node] == missing_left
    np.testing.assert_allclose(tree.gain[node], float(gain), rtol=1e-12, atol=1e-12)
    assert_equal_to_reference(tree, tree.left[node], reference.left)
    assert_equal_to_reference(tree, tree.left[node] + 1, reference.right)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("missing", "outputs", "weighted", "limits"),
    [
        (0.0, None, False, {}),
        (0.3, None, False, {}),
        (0.0, None, True, {}),
        (0.3, None, True, dict(min_child_samples=2)),
        (0.3, 2, True, {}),
        (0.0, 2, False, dict(min_split_samples=6)),
        (0.2, None, True, dict(min_child_weight=5.0)),
        (0.2, None, False, dict(min_child_weight=3.0)),
        (0.2, None, False, dict(max_depth=2)),
        (0.0, None, True, dict(min_gain=1.5)),
    ],
)
def test_equals_exact_recursion_with_ties(
    name, seed, missing, outputs, weighted, limits
):
    x, y, weights = make_small_table(seed, missing, outputs)
    weights = weights if weighted else np.ones(len(x))
    given = dict(sample_weight=weights) if weighted else {}
    with use_implementation(name):
        tree = jb.cart.fit_tree(x, y, **given, **limits)
    reference = references.fit_cart(x, y.reshape(24, -1), weights, **limits)
    assert_equal_to_reference(tree, 0, reference)


# ---- against scikit-learn ------------------------------------------------------------


def assert_same_up_to_ties(tree, other, x):
    """Walks down both trees; returns how many splits were compared.

    Where they part the rows differently, both splits must gain the same: then it is a
    tie (two rows can be parted by any column), and the walk ends.
    """
    other, compared = other.tree_, 0
    stack = [(0, 0, np.arange(len(x)))]

    def part(values, threshold, missing_left):
        return np.where(np.isnan(values), missing_left, values <= threshold)

    def gain(node):
        children = [other.children_left[node], other.children_right[node]]
        errors = other.impurity * other.weighted_n_node_samples * other.n_outputs
        return errors[node] - errors[children].sum()

    while stack:
        mine, its, rows = stack.pop()
        value = other.value[its].reshape(-1)
        np.testing.assert_allclose(
            np.atleast_1d(tree.value[mine]), value, rtol=1e-9, atol=1e-12
        )
        assert tree.num_rows[mine] == other.n_node_samples[its]
        assert (tree.left[mine] == -1) == (other.children_left[its] == -1)
        if tree.left[mine] == -1:
            continue
        compared += 1
        np.testing.assert_allclose(tree.gain[mine], gain(its), rtol=1e-6, atol=1e-9)
        left = part(
            x[rows, tree.feature[mine]], tree.threshold[mine], tree.missing_left[mine]
        )
        its_left = part(
            x[rows, other.feature[its]], other.threshold[its],
            other.missing_go_to_left[its],
        )  # fmt: skip
        if not np.array_equal(left, its_left):
            continue
        stack.append((tree.left[mine], other.children_left[its], rows[left]))
        stack.append((tree.left[mine] + 1, other.children_right[its], rows[~left]))
    return compared


@pytest.mark.parametrize(
    ("shape", "table", "weighted", "limits"),
    [
        ((400, 1), {}, False, {}),
        ((400, 1), {}, True, {}),
        ((400, 5), {}, False, {}),
        ((400, 5), dict(missing=0.2), False, {}),
        ((400, 5), dict(missing=0.2), True, {}),
        ((400, 5), dict(missing=0.6), False, dict(max_depth=4)),
        ((400, 3), dict(outputs=3), False, {}),
        ((400, 3), dict(outputs=2, missing=0.1), True, dict(min_child_samples=7)),
        ((1500, 4), {}, True, dict(min_child_samples=20)),
        ((1500, 4), dict(missing=0.1), False, dict(min_split_samples=50)),
        ((40_000, 4), {}, False, dict(min_child_samples=50)),  # several blocks
    ],
)
def test_same_tree_as_scikit_learn(shape, table, weighted, limits):
    x, y = make_table(*shape, **table)
    weights = np.random.default_rng(5).uniform(0.1, 3, len(x)) if weighted else None
    tree = jb.cart.fit_tree(x, y, sample_weight=weights, **limits)
    names = dict(
        min_child_samples="min_samples_leaf", min_split_samples="min_samples_split",
        max_depth="max_depth",
    )  # fmt: skip
    settings = {names[name]: value for name, value in limits.items()}
    peer = DecisionTreeRegressor(random_state=0, **settings)
    peer.fit(x, y, sample_weight=weights)
    compared = assert_same_up_to_ties(tree, peer, x)
    assert compared > 0.5 * (tree.num_leaves - 1)
    assert tree.num_nodes == peer.tree_.node_count
    scores = np.asarray(jb.predict(tree, x))
    np.testing.assert_allclose(scores, peer.predict(x), rtol=1e-6, atol=1e-6)
    if "max_depth" not in limits and limits:  # no small nodes, hence no ties
        fresh, _ = make_table(*shape, seed=1)
        np.testing.assert_allclose(
            jb.predict(tree, fresh), peer.predict(fresh), rtol=1e-6, atol=1e-6
        )


def test_min_gain_is_scikit_learns_in_sums():
    x, y = make_table(400, 3)
    tree = jb.cart.fit_tree(x, y, min_gain=8.0)
    peer = DecisionTreeRegressor(min_impurity_decrease=8.0 / len(x)).fit(x, y)
    assert tree.num_nodes == peer.tree_.node_count > 10
    np.testing.assert_allclose(jb.predict(tree, x), peer.predict(x), rtol=1e-6)


# ---- laws ----------------------------------------------------------------------------


def test_statistics_of_nodes():
    x, y = make_table(300, 3, missing=0.2)
    weights = np.random.default_rng(3).uniform(0.1, 3, 300)
    tree = jb.cart.fit_tree(x, y, sample_weight=weights, min_child_samples=4)
    leaves = np.asarray(jb.leaf_indices(tree, x))
    assert set(leaves) == set(np.flatnonzero(tree.left == -1))
    for leaf in np.unique(leaves):
        rows = leaves == leaf
        mean = np.average(y[rows], weights=weights[rows])
        error = np.sum(weights[rows] * (y[rows] - mean) ** 2)
        np.testing.assert_allclose(tree.value[leaf], mean)
        np.testing.assert_allclose(tree.squared_error[leaf], error)
        np.testing.assert_allclose(tree.weight[leaf], weights[rows].sum())
        assert tree.num_rows[leaf] == rows.sum() >= 4
    inner = np.flatnonzero(tree.left != -1)
    left, right = tree.left[inner], tree.left[inner] + 1
    for name in ("weight", "num_rows"):
        field = getattr(tree, name)
        np.testing.assert_allclose(field[inner], field[left] + field[right])
    error = tree.squared_error
    fall = error[inner] - error[left] - error[right]
    np.testing.assert_allclose(tree.gain[inner], fall, rtol=1e-9, atol=1e-9)
    # Breadth first: children are numbered in the order of their parents.
    np.testing.assert_array_equal(tree.left[inner], 1 + 2 * np.arange(len(inner)))
    assert tree.num_nodes == 2 * tree.num_leaves - 1


def test_weight_two_is_a_duplicate_and_weight_zero_is_nobody():
    x, y = make_table(200, 3, missing=0.2)
    weights = np.random.default_rng(1).integers(0, 3, 200)
    tree = jb.cart.fit_tree(x, y, sample_weight=weights)
    copies = np.repeat(np.arange(200), weights)
    other = jb.cart.fit_tree(x[copies], y[copies])
    different = tree.num_rows != other.num_rows
    assert different.any()  # duplicates are rows, and weights are not
    assert_same_fields(replace(tree, num_rows=other.num_rows), other, rtol=1e-9)


def test_the_order_of_rows_is_irrelevant():
    x, y, weights = make_small_table(0, missing=0.2)
    order = np.random.default_rng(0).permutation(len(x))
    tree = jb.cart.fit_tree(x, y + 0.1, sample_weight=weights / 7)
    other = jb.cart.fit_tree(x[order], y[order] + 0.1, sample_weight=weights[order] / 7)
    for name in ("left", "feature", "threshold", "missing_left", "num_rows"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))


def test_a_mirrored_column_is_a_tie_and_the_first_one_is_taken():
    x, y = make_table(500, 1)
    tree = jb.cart.fit_tree(np.hstack([-x, x, x]), y)
    assert set(tree.feature) == {0}


@pytest.mark.parametrize(("scale", "offset"), [(2.0**-90, 0), (2.0**90, 0), (1, 2**20)])
def test_units_of_the_target_are_irrelevant(scale, offset):
    x, y = make_table(300, 2)
    y = np.round(y * 2**10) / 2**10  # exact with the offset, too
    tree = jb.cart.fit_tree(x, y, min_child_samples=3)
    other = jb.cart.fit_tree(x, y * scale + offset, min_child_samples=3)
    for name in ("left", "feature", "threshold", "missing_left", "num_rows"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))
    np.testing.assert_allclose((other.value - offset) / scale, tree.value, atol=1e-9)
    np.testing.assert_allclose(
        other.squared_error / scale**2, tree.squared_error, rtol=1e-6, atol=1e-9
    )


# ---- corners -------------------------------------------------------------------------


def test_a_chain_of_78_levels():
    y = 3.0 ** np.arange(79)
    x = np.arange(79.0)[:, None]
    tree = jb.cart.fit_tree(x, y)
    assert tree.max_depth == 78 and tree.num_nodes == 157
    np.testing.assert_array_equal(jb.predict(tree, x), y.astype(np.float32))
    assert jb.cart.fit_tree(x, y, max_depth=35).max_depth == 35
    path = jb.cart.pruning_path(tree)
    assert np.all(np.diff(path.alphas) > 0) and path.num_leaves[-1] == 1
    assert jb.cart.prune(tree, path.alphas[50]).num_leaves == path.num_leaves[50] == 29


def test_two_scales_on_one_level():
    """A node of tiny targets beside one of huge ones is split as if alone."""
    tiny = np.array([1.0, 2, 3, 10, 11, 12, 40, 41]) * 2.0**-60
    y = np.concatenate([tiny, 2.0**60 * np.arange(101, 109)])
    x = np.arange(16.0)[:, None]
    tree = jb.cart.fit_tree(x, y)
    assert tree.threshold[0] == 7.5
    np.testing.assert_array_equal(jb.predict(tree, x), y.astype(np.float32))
    alone = jb.cart.fit_tree(x[:8], tiny)
    assert tree.threshold[1] == alone.threshold[0] == 5.5


def test_constant_targets_and_single_rows_make_a_root():
    x, _ = make_table(50, 2)
    tree = jb.cart.fit_tree(x, np.full(50, 0.1))
    assert (tree.num_nodes, tree.max_depth, tree.num_leaves) == (1, 0, 1)
    assert tree.value[0] == pytest.approx(0.1) and tree.threshold[0] == INF
    single = jb.cart.fit_tree(x[:1], np.array([3.0]))
    np.testing.assert_array_equal(jb.predict(single, x), np.full(50, 3.0))
    assert jb.cart.pruning_path(single).num_leaves.tolist() == [1]
    assert jb.cart.fit_tree(x, x[:, 0], max_depth=0).num_nodes == 1


def test_nothing_to_split_on():
    x = np.full((6, 2), np.nan)
    x[:, 1] = 5.0
    assert jb.cart.fit_tree(x, np.arange(6.0)).num_nodes == 1
    x[:3, 0] = 1.0  # values from missing ones
    tree = jb.cart.fit_tree(x, np.arange(6.0))
    assert tree.num_nodes == 3 and tree.threshold[0] == INF
    assert not tree.missing_left[0]
    np.testing.assert_array_equal(
        jb.predict(tree, [[1e30, 0], [INF, 0], [NAN, 0]]), [1.0, 1.0, 4.0]
    )


def test_a_split_that_gains_nothing_is_made():
    x = np.array([[0.0, 0], [0, 1], [1, 0], [1, 1]])
    tree = jb.cart.fit_tree(x, x[:, 0] != x[:, 1])
    assert tree.num_leaves == 4 and tree.gain[0] == 0 and tree.feature[0] == 0
    # One alone is taken back at no price, both levels at the mean of their gains.
    stump = jb.cart.fit_tree(x, x[:, 0] != x[:, 1], max_depth=1)
    assert jb.cart.prune(stump, 0.0).num_leaves == 1
    assert jb.cart.pruning_path(tree).alphas.tolist() == pytest.approx([0, 1 / 3])


def test_missing_values_that_training_never_saw_follow_the_heavier_child():
    x = np.arange(5.0)[:, None]
    y = np.array([0.0, 0, 1, 1, 1])
    assert not jb.cart.fit_tree(x, y).missing_left[0]
    assert jb.cart.fit_tree(x[1:], y[1:], sample_weight=[3.0, 1, 1, 1]).missing_left[0]
    assert jb.cart.fit_tree(x[:4], y[:4]).missing_left[0]  # a tie


def test_values_are_float32_with_infinities_and_without_denormals():
    y = np.array([0.0, 1.0, 5.0])
    with pytest.warns(UserWarning, match=r"column 0 of x.* 2"):
        tree = jb.cart.fit_tree(np.array([[1.0], [1.0 + 1e-9], [1.0]]), y)
    assert tree.num_nodes == 1
    tree = jb.cart.fit_tree(np.array([[-INF], [0.0], [INF]]), y)
    assert tree.threshold[0] == 0.0 and tree.threshold[tree.left[0]] == -INF
    np.testing.assert_array_equal(jb.predict(tree, [[-INF], [0], [INF]]), y)
    tiny = np.array([[0.0], [-0.0], [1e-40], [1.0]], np.float32)
    tree = jb.cart.fit_tree(tiny, np.array([0.0, 1, 2, 3]))
    assert tree.num_rows.tolist() == [4, 3, 1]


def test_weights_over_many_magnitudes():
    """A row that weighs next to nothing is not worth a split; others are as ever."""
    x = np.arange(6.0)[:, None]
    y = np.array([0.0, 0, 1, 1, 2, 9])
    weights = np.array([1e-20, 1, 1, 1, 1, 1e-20])
    tree = jb.cart.fit_tree(x, y, sample_weight=weights)
    assert sorted(tree.threshold[tree.left != -1]) == [1.5, 3.5]
    np.testing.assert_allclose(jb.predict(tree, x), [0, 0, 1, 1, 2, 2])
    many = np.logspace(-30, 30, 6)
    assert np.all(np.isfinite(jb.cart.fit_tree(x, y, sample_weight=many).value))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_split_is_lost_where_weights_differ_by_magnitudes(name):
    x, y = make_table(1000, 5)
    weights = 10 ** np.random.default_rng(0).uniform(-4, 4, 1000)
    with use_implementation(name):
        assert jb.cart.fit_tree(x, y, sample_weight=weights).num_leaves == 1000


def test_neighbouring_floats_are_told_apart():
    low = np.float32(1)
    x = np.array([[low], [np.nextafter(low, np.float32(2))]])
    tree = jb.cart.fit_tree(x, np.array([0.0, 1.0]))
    np.testing.assert_array_equal(jb.predict(tree, x), [0.0, 1.0])


# ---- the tree as a pytree ------------------------------------------------------------


def test_arrays_cannot_be_written_to():
    tree = jb.cart.fit_tree(*make_table(50, 2))
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(tree, name)[0] = 0
    with pytest.raises(AttributeError):
        tree.left = None
    for other in (pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree)):
        assert_same_fields(tree, other)
    assert len(jax.tree.leaves(tree)) == len(ARRAYS)


@pytest.mark.parametrize("outputs", [None, 2])
def test_predict_under_vmap(outputs):
    x, y = make_table(90, 3, missing=0.2, outputs=outputs)
    tree = jb.cart.fit_tree(x, y, min_child_samples=3)
    scores = jb.predict(tree, x)
    assert scores.shape == y.shape and scores.dtype == jnp.float32
    np.testing.assert_allclose(
        scores, tree.value[jb.leaf_indices(tree, x)].astype(np.float32)
    )
    np.testing.assert_array_equal(jb.predict(tree, jnp.asarray(x)), scores)
    np.testing.assert_array_equal(
        jax.vmap(jb.predict, (None, 0))(tree, x.reshape(3, 30, 3)),
        scores.reshape(3, 30, *y.shape[1:]),
    )
    trees = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)
    both = jax.vmap(jb.predict, (0, None))(trees, x)
    np.testing.assert_array_equal(both, jnp.stack([scores, scores]))


def find_leaf(tree, row):
    node = 0
    while tree.left[node] != -1:
        value = row[tree.feature[node]]
        left = value <= tree.threshold[node]
        left = tree.missing_left[node] if np.isnan(value) else left
        node = tree.left[node] + (not left)
    return node


@pytest.mark.parametrize("outputs", [None, 3])
@pytest.mark.parametrize("function", [jb.predict, jb.leaf_indices])
def test_every_implementation_takes_the_same_leaves(function, outputs):
    x, y = make_table(90, 3, missing=0.2, outputs=outputs)
    tree = jb.cart.fit_tree(x, y)
    expected = [find_leaf(tree, row) for row in x]
    if function is jb.predict:
        expected = tree.value[expected].astype(np.float32)
    for name in IMPLEMENTATIONS:
        found = function(tree, x, implementation=name)
        np.testing.assert_array_equal(found, expected, err_msg=name)
    np.testing.assert_array_equal(function(tree, csr_array(x)), expected)


def test_predict_is_linear_in_values():
    x, y = make_table(90, 3)
    tree = jb.cart.fit_tree(x, y, min_child_samples=5)

    def total(value):
        return jb.predict(replace(tree, value=value), x).sum()

    count = jax.grad(total)(jnp.asarray(tree.value, jnp.float32))
    np.testing.assert_array_equal(count, np.where(tree.left == -1, tree.num_rows, 0))


def test_similar_sizes_share_programs():
    x, y = make_table(200, 3)
    trees = [jb.cart.fit_tree(x, y, min_child_samples=n) for n in (8, 9, 10)]
    assert len({tree.num_nodes for tree in trees}) == 3
    jb.predict(trees[0], x)
    with Compilations() as compilations:
        for tree, size in zip(trees, (200, 197, 193), strict=True):
            assert jb.predict(tree, x[:size]).shape == (size,)
    assert not compilations.names


def test_names_of_columns_are_kept():
    x, y = make_table(50, 2)
    frame = pd.DataFrame(x, columns=["a", "b"])
    tree = jb.cart.fit_tree(frame, y)
    for other in (
        jb.cart.fit_tree(x, y, feature_names=["a", "b"]),
        jb.cart.prune(tree, 1.0),
        jb.cart.cross_validate_alpha(frame, y).tree,
    ):
        assert other.feature_names == ("a", "b")
    np.testing.assert_array_equal(jb.predict(tree, frame), jb.predict(tree, x))
    with pytest.raises(ValueError, match=r"'a'.*'b'"):
        jb.predict(tree, frame[["b", "a"]])
    with pytest.raises(ValueError, match=r"feature_names .*2"):
        jb.cart.fit_tree(x, y, feature_names=["a", "a"])


def test_importance_is_scikit_learns():
    x, y = make_table(400, 4)
    tree = jb.cart.fit_tree(x, y, min_child_samples=10, feature_names=list("abcd"))
    peer = DecisionTreeRegressor(min_samples_leaf=10).fit(x, y)
    found = jb.feature_importance(tree)
    assert found.names == tuple("abcd")
    np.testing.assert_allclose(
        found.values / found.values.sum(), peer.feature_importances_, rtol=1e-9
    )
    inner = peer.tree_.children_left != -1
    splits = np.bincount(peer.tree_.feature[inner], minlength=4)
    np.testing.assert_array_equal(jb.feature_importance(tree, "splits").values, splits)
    rows = np.bincount(peer.tree_.feature[inner], peer.tree_.n_node_samples[inner])
    np.testing.assert_array_equal(jb.feature_importance(tree, "cover").values, rows)
    shuffled = jb.explanation.permutation_importance(tree, x, y, num_repeats=2)
    assert set(np.argsort(shuffled.values)[-2:]) == {0, 3}


@pytest.mark.parametrize("outputs", [None, 2])
def test_the_table_of_nodes_is_the_tree(outputs):
    x, y = make_table(60, 3, missing=0.2, outputs=outputs)
    tree = jb.cart.fit_tree(x, y, max_depth=4)
    frame = jb.explanation.trees_to_dataframe(tree)
    inner = tree.left != -1
    for k, table in frame.groupby("Tree"):
        value = tree.value if outputs is None else tree.value[:, k]
        np.testing.assert_array_equal(table["Feature"] == "Leaf", ~inner)
        np.testing.assert_array_equal(table["Split"][inner], tree.threshold[inner])
        np.testing.assert_array_equal(table["Gain"], np.where(inner, tree.gain, value))
        np.testing.assert_array_equal(table["Cover"], tree.weight)
        yes = table["Yes"][inner].str.split("-").str[1].astype(int)
        np.testing.assert_array_equal(yes, tree.left[inner])
    assert len(frame) == tree.num_nodes * (outputs or 1)


# ---- bad calls -----------------------------------------------------------------------

X, Y = make_table(20, 3)


def changed(array, row, value):
    array = np.array(array, np.float64)
    array[row] = value
    return array


DATA = {
    "x 1-D": (dict(x=X[:, 0]), ValueError, r"x must be 2-D.*\(20,\)"),
    "x strings": (dict(x=X.astype(str)), TypeError, "x must hold numbers.*<U"),
    "x no rows": (dict(x=X[:0], y=Y[:0]), ValueError, "at least one row"),
    "y short": (dict(y=Y[:-1]), ValueError, r"y must have 20 rows.*\(19,\)"),
    "y nan": (dict(y=changed(Y, 7, NAN)), ValueError, "y must be finite.*nan in row 7"),
    "y huge": (
        dict(y=changed(Y, 7, 1e300)), ValueError, "y must be finite.*1e.300 in row 7",
    ),
    "y 3-D": (
        dict(y=np.ones((20, 2, 2))), ValueError, r"y must be \[N\].*\(20, 2, 2\)",
    ),
    "y no targets": (dict(y=np.ones((20, 0))), ValueError, r"y must be .*\(20, 0\)"),
    "y number": (dict(y=3.0), ValueError, r"y must have 20 rows.*\(\)"),
    "y dict": (dict(y={"a": Y}), TypeError, "y must be an array.*got dict"),
    "y tuple": (dict(y=(Y, Y)), TypeError, "y must be an array.*got tuple"),
    "y none": (dict(y=None), ValueError, "y must .*, got None"),
    "y strings": (dict(y=Y.astype(str)), TypeError, "y must hold numbers.*<U"),
    "weights short": (
        dict(sample_weight=Y[:5]), ValueError, r"sample_weight must have shape \(20,\)",
    ),
    "weights negative": (
        dict(sample_weight=changed(np.ones(20), 3, -1)), ValueError,
        "sample_weight must be finite and >= 0, got -1.0 in row 3",
    ),
    "weights zero": (
        dict(sample_weight=np.zeros(20)), ValueError, "sample_weight must be positive",
    ),
    "weights strings": (
        dict(sample_weight=["a"] * 20), TypeError, "sample_weight must hold numbers",
    ),
}  # fmt: skip
LIMITS = {
    f"{name}={value!r}": ({name: value}, error, rf"{name} must be an? .*got {value!r}")
    for name, value, error in [
        ("max_depth", -1, ValueError),
        ("max_depth", 2.5, TypeError),
        ("max_depth", True, TypeError),
        ("min_child_samples", 0, ValueError),
        ("min_child_samples", "auto", TypeError),
        ("min_split_samples", 0, ValueError),
        ("min_split_samples", 0.1, TypeError),
        ("min_child_weight", -1, ValueError),
        ("min_child_weight", None, TypeError),
        ("min_gain", -0.5, ValueError),
        ("min_gain", INF, ValueError),
        ("min_gain", NAN, ValueError),
    ]
}
TABLE = {**DATA, **LIMITS}


@pytest.mark.parametrize("function", [jb.cart.fit_tree, jb.cart.cross_validate_alpha])
@pytest.mark.parametrize("name", TABLE)
def test_fitting_refuses(function, name):
    arguments, error, message = TABLE[name]
    arguments = dict(x=X, y=Y) | arguments
    x, y = arguments.pop("x"), arguments.pop("y")
    with pytest.raises(error, match=f"(?s){message}"):
        function(x, y, **arguments)


def test_fitting_cannot_be_traced():
    with pytest.raises(TypeError, match=r"\bx is traced.*jb\.boost"):
        jax.jit(jb.cart.fit_tree)(X, Y)
    with pytest.raises(TypeError, match="max_depth is traced"):
        jax.jit(lambda depth: jb.cart.fit_tree(X, Y, max_depth=depth))(3)
    with pytest.raises(TypeError, match="min_gain is traced"):
        jax.jit(lambda gain: jb.cart.fit_tree(X, Y, min_gain=gain))(3.0)


@pytest.mark.parametrize("function", [jb.predict, jb.leaf_indices])
@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (X[:, :2], {}, ValueError, "x must have 3 columns, as in training, got 2"),
        (X[0], {}, ValueError, "x must be 2-D"),
        (X.astype(str), {}, TypeError, "x must hold numbers"),
        (X, dict(implementation="gpu"), ValueError, "implementation must be .*'gpu'"),
    ],
)
def test_predict_refuses(function, x, arguments, error, message):
    tree = jb.cart.fit_tree(X, Y)
    with pytest.raises(error, match=message):
        function(tree, x, **arguments)


def test_what_is_for_ensembles_only_is_refused():
    tree = jb.cart.fit_tree(X, Y)
    with pytest.raises(ValueError, match=r"offset .*RegressionTree"):
        jb.predict(tree, X, offset=Y)
    for function in (jb.staged_predict, lambda tree, _: jb.truncate(tree, 1)):
        with pytest.raises(TypeError, match="RegressionTree"):
            function(tree, X)
