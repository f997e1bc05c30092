# SPDX-License-Identifier: Apache-2.0
"""Where trees may split: every value, or quantiles of a node's or a tree's rows.

Codes have few values where they are compared with histograms, which then try every
value, too; else against literal versions, and XGBoost's own exact search.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import test_xgboost_parity as parity
import xgboost as xgb
from implementations import IMPLEMENTATIONS, needs_cpu_kernels
from tables import make_regression

import jboost as jb
from jboost.codes.codes import DenseCodes
from jboost.codes.preparing import sort_rows
from jboost.entry.context import use_implementation
from jboost.trees.candidates import measure, propose
from jboost.trees.exact_growth import grow_sorted_tree
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import UNBOUNDED, ValueLimits

N = 256
SEED = jnp.zeros(2, jnp.uint32)


def make_few(seed=0):
    """Five features of 2 to 100 values, with missing ones; a target that needs them."""
    rng = np.random.default_rng(seed)
    counts = (2, 5, 12, 40, 100)
    x = np.stack([rng.integers(0, count, N) / count for count in counts], axis=1)
    y = 2 * x[:, 3] * x[:, 4] - x[:, 2] + 0.5 * x[:, 0] + rng.normal(0, 0.3, N)
    x[rng.random(x.shape) < [0.3, 0.1, 0.0, 0.2, 0.05]] = np.nan
    return x.astype(np.float32), y.astype(np.float32)


# Against histograms, where both try every value.

FEW = dict(num_rounds=4, max_depth=4)
SETTINGS = {
    "plain": {},
    "free": dict(l2=0.0, min_child_weight=0.0),
    "priced": dict(min_gain=0.3, min_child_weight=7.5),
    "samples": dict(subsample=0.6),
    "constrained": dict(interactions=[[0, 1], [1, 2, 3], [4]], max_leaves=7),
    "limited": dict(monotone=[0, 1, -1, 1, 0], l1=0.1, max_delta_step=0.5),
    "columns": dict(colsample_bytree=0.8, colsample_bylevel=0.7, colsample_bynode=0.6),
}


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_value_is_tried_as_by_histograms(settings):
    x, y = make_few()
    weighted = settings in ("free", "samples", "limited")
    weight = np.random.default_rng(1).integers(0, 4, N) / 2 if weighted else None
    train = partial(jb.fit, x, y, sample_weight=weight, **FEW, **SETTINGS[settings])
    expected, expected_history = train()
    found, history = train(candidates="exact")
    chex.assert_trees_all_equal(found, expected)
    np.testing.assert_array_equal(history.train_loss, expected_history.train_loss)
    assert np.sum(np.isfinite(found.threshold)) > 12
    if settings == "columns":  # more bins than rows: a node tries all of its values
        local, _ = train(candidates="local", max_bins=4096)
        chex.assert_trees_all_equal(local, expected)


def test_a_tree_s_own_candidates_may_be_every_value():
    x, y = make_few()
    expected, _ = jb.fit(x, y, **FEW)
    found, _ = jb.fit(x, y, candidate_weights="curvature", max_bins=4096, **FEW)
    chex.assert_trees_all_equal(found, expected)


# Against literal versions.


def make_rows(seed, num_values=60, missing=0.15):
    rng = np.random.default_rng(seed)
    columns = rng.integers(1, num_values + 1, (3, N)).astype(np.uint8)
    columns[rng.random(columns.shape) < missing] = 0
    gradient = rng.normal(size=N).astype(np.float32)
    curvature = rng.integers(1, 9, N).astype(np.float32)
    in_bag = rng.random(N) < 0.9
    return columns, gradient, curvature, in_bag


@partial(
    jax.jit, static_argnames=("max_depth", "max_leaves", "uniform", "implementation")
)
def grow(
    columns, gradient, curvature, in_bag, mass, seed, limits, implementation=None,
    max_depth=4, **sizes,
):  # fmt: skip
    codes = DenseCodes(columns, order=sort_rows(columns))
    if mass is not None:
        mass = measure(mass, in_bag.astype(jnp.uint8))
    with use_implementation(implementation):
        return grow_sorted_tree(
            codes, gradient, curvature, in_bag, seed, limits, mass,
            max_depth=max_depth, **sizes,
        )  # fmt: skip


@pytest.mark.parametrize("value", [1.0, 0.3])
def test_equal_masses_stay_equal(value):
    """Also of so many rows that others are rounded stochastically."""
    in_bag = jnp.arange(70_000, dtype=jnp.int32).astype(jnp.uint8) % 3
    mass = jax.jit(measure)(jnp.full(70_000, value, jnp.float32), in_bag)
    each = int(mass[1])
    assert each > 1000
    np.testing.assert_array_equal(mass, each * np.asarray(in_bag).astype(int))


def compare(tree, leaf, expected):
    split = expected.threshold < 255
    np.testing.assert_array_equal(leaf, expected.leaf)
    np.testing.assert_array_equal(tree.feature, expected.feature)
    # No code is as high as the last one.
    found = np.where(split, np.minimum(tree.threshold, 255), 255)
    np.testing.assert_array_equal(found, expected.threshold)
    np.testing.assert_array_equal(tree.missing_left, expected.missing_left)
    return np.sum(split)


def limit_values(constraints):
    most = np.minimum(constraints.max_delta_step, UNBOUNDED)
    return ValueLimits(
        jnp.float32(constraints.l1),
        jnp.asarray(np.float32([-most, most])),
        jnp.asarray(np.int32(constraints.monotone or (0, 0, 0))),
    )


@pytest.mark.parametrize(
    ("num_bins", "missing", "by_curvature"),
    [
        (1, 0.15, False), (2, 0.0, True), (3, 0.15, True), (5, 0.0, False),
        (16, 0.15, True), (64, 0.15, False),
    ],
)  # fmt: skip
def test_nodes_propose_from_their_own_rows(num_bins, missing, by_curvature):
    rows = make_rows(num_bins, missing=missing)
    columns, gradient, curvature, in_bag = rows
    mass = curvature if by_curvature else np.ones(N, np.float32)
    limits = TreeLimits(
        max_bins=jnp.int32(num_bins + 1), values=limit_values(references.Constraints())
    )
    expected = references.grow_tree(
        columns, gradient, curvature, in_bag, references.Limits(), 4, 256,
        local=(mass, num_bins),
    )  # fmt: skip
    operands = (*map(jnp.asarray, (*rows, mass)), SEED, limits)
    for implementation in IMPLEMENTATIONS:
        found = grow(*operands, implementation=implementation, max_leaves=None)
        assert compare(*found, expected) > 6 or num_bins == 1


LIMITED = {
    "l1": references.Constraints(l1=2.0, max_leaves=9),
    "max_delta_step": references.Constraints(max_delta_step=0.1),
    "monotone": references.Constraints(monotone=(1, -1, 0), max_leaves=9),
    "all": references.Constraints(0.5, 0.2, (-1, 1, 1)),
}


@pytest.mark.parametrize(
    ("name", "num_bins", "missing"),
    [
        ("l1", None, 0.3), ("monotone", None, 0.0), ("max_delta_step", 9, 0.0),
        ("all", 9, 0.3),
    ],
)  # fmt: skip
def test_leaf_values_are_limited_as_by_the_literal_grower(name, num_bins, missing):
    constraints, limits = LIMITED[name], references.Limits(0.5, 0.001, 1.25, 1)
    # Exact sums: gains that are equal in the reference are equal here.
    columns, gradient, curvature, in_bag = make_rows(len(name), 25, missing)
    gradient = np.round(gradient * 2**10).astype(np.float32) / 2**12
    gradient += (columns[0] > 9) * np.float32(0.5) - (columns[1] > 12) * 0.25
    rows = columns, gradient.astype(np.float32), curvature, in_bag
    ones = np.ones(N, np.float32)
    expected = references.grow_tree(
        *rows, limits, 4, 256, constraints, local=num_bins and (ones, num_bins)
    )
    values = limit_values(constraints)
    operands = (*map(jnp.asarray, rows), num_bins and jnp.asarray(ones), SEED)
    most = jnp.int32((num_bins or 0) + 1)
    limits = TreeLimits(**limits._asdict(), values=values, max_bins=most)
    leaves = min(constraints.max_leaves, 2**4)
    for implementation in IMPLEMENTATIONS:
        tree, leaf = grow(
            *operands, limits, implementation=implementation,
            max_leaves=leaves if leaves < 2**4 else None,
        )  # fmt: skip
        assert compare(tree, leaf, expected) > 3
        used = np.unique(leaf)
        bounds = np.array([expected.bounds[number] for number in used])
        bounds = np.clip(bounds, -UNBOUNDED, UNBOUNDED)
        np.testing.assert_allclose(tree.bounds[used], bounds, rtol=1e-5, atol=1e-6)


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("dtype", "local", "limited"),
    [
        (jnp.uint8, False, True), (jnp.uint16, True, True), (jnp.uint32, True, False),
    ],
)  # fmt: skip
def test_the_kernel_equals_plain_xla(dtype, local, limited):
    """To the bit, also across blocks of a sweep, and for rows out of the bag."""
    rng = np.random.default_rng(7)
    uniform, rows = dtype == jnp.uint16, 3000
    values = (7, 250, 200 if dtype == jnp.uint8 else 3000)
    columns = np.stack([rng.integers(1, most + 1, rows) for most in values])
    columns[rng.random(columns.shape) < [[0.3], [0.0], [0.02]]] = 0
    gradient = rng.normal(size=rows) + columns[0] % 3 - np.cos(columns[2] / 60)
    curvature = np.ones(rows) if uniform else rng.random(rows)
    values = ValueLimits(
        jnp.float32(3.0), jnp.array([-3.0, 2.5], jnp.float32),
        jnp.array([1, 0, -1], jnp.int32),
    )  # fmt: skip
    for number, samples in enumerate((1, 9)):
        in_bag = np.ones(rows) if number == 1 else rng.integers(0, 3, rows)
        operands = (
            jnp.asarray(columns.astype(dtype)),
            jnp.asarray(gradient, jnp.float32),
            jnp.asarray(curvature, jnp.float32),
            jnp.asarray(in_bag.astype(np.uint8)),
            jnp.asarray(curvature, jnp.float32) if local else None,
            jnp.array([number, 5], jnp.uint32),
            TreeLimits(
                l2=0.5, min_gain=0.1 * number, min_child_weight=2.0,
                min_child_samples=jnp.int32(samples), max_bins=jnp.int32(40),
                colsample_bynode=(1.0, 0.7)[number],
                values=values if limited else None,
            ),
        )  # fmt: skip
        sizes = dict(max_depth=5, uniform=uniform)
        expected = grow(*operands, implementation="xla", **sizes)
        found = grow(*operands, implementation="cpu", **sizes)
        chex.assert_trees_all_equal(found, expected)
        assert len(np.unique(found[1])) > 8


@partial(jax.jit, static_argnames=("num_bins", "implementation"))
def propose_compiled(codes, mass, num_bins, implementation):
    with use_implementation(implementation):
        return propose(codes, mass, num_bins=num_bins)


MASSES = {
    "equal": lambda rng: np.ones(N),
    "whole": lambda rng: rng.integers(0, 9, N),
    "heavy": lambda rng: np.where(np.arange(N) % 50 == 7, 300, 1),
    "one": lambda rng: np.where(np.arange(N) == 100, 5000, 1),
    "steep": lambda rng: np.floor(1.04 ** np.arange(N)),
    "none": lambda rng: np.zeros(N),
}


@pytest.mark.parametrize("masses", MASSES)
@pytest.mark.parametrize("num_bins", [3, 32])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_candidates_are_less_than_eps_apart(implementation, num_bins, masses):
    """Between candidates lies less than eps and half of the outermost values."""
    rng = np.random.default_rng(2)
    codes = np.stack([rng.permutation(N) // 2 + 1, rng.integers(0, 30, N)])
    mass = MASSES[masses](rng).astype(np.int32)
    columns = jnp.asarray(codes.astype(np.uint8))
    proposed, highest = propose_compiled(
        DenseCodes(columns, order=sort_rows(columns)), jnp.asarray(mass),
        num_bins=num_bins + 1, implementation=implementation,
    )  # fmt: skip
    for feature, (found, most) in enumerate(
        zip(proposed.columns, highest, strict=True)
    ):
        own = codes[feature]
        values, known = np.unique(own[own > 0]), own > 0
        expected = references.find_bins(
            own[known].tolist(), mass[known].tolist(), num_bins
        )
        lowest = min(expected.values())  # has code 1
        np.testing.assert_array_equal(
            found,
            [1 + expected[code] - lowest if code else 0 for code in own.tolist()],
        )
        each = np.array([mass[own == value].sum() for value in values])
        bins, eps = np.array([expected[v] for v in values.tolist()]), 1 / num_bins
        assert bins.min() >= 0 and bins.max() < num_bins
        for number in range(num_bins):
            inside = each[bins == number]
            if len(inside) and each.sum():
                edges = (inside[0] + inside[-1]) / 2 if len(inside) > 1 else inside[0]
                assert inside.sum() < eps * each.sum() + edges + 1e-9
                assert len(inside) == 1 or inside.max() < 2 * eps * each.sum()
            upto = values[bins - lowest <= number]
            assert most[1 + number] == (upto[-1] if len(upto) else 0)


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(candidate_weights="curvature"),
        dict(candidates="local", candidate_weights="curvature", max_bins=6),
        dict(candidates="exact"),
    ],
    ids=str,
)
def test_the_model_is_the_one_that_was_trained(settings):
    """The loss that training reports is that of the returned model's predictions.

    On tables with few or many distinct values, of which some or all are missing, with
    weights of which some are 0.
    """
    rng = np.random.default_rng(0)
    for table in (0, 3):
        x = np.round(rng.normal(size=(120, 3)) * 4 ** (table - 1), 0)
        x[rng.random(x.shape) < rng.choice([0.0, 0.3, 0.9], 3)] = np.nan
        x[:, 2] = np.where(x[:, 2] > 0, np.nan, x[:, 2])
        y = 3 * np.isnan(x[:, 0]) + np.nan_to_num(x[:, 1]) + rng.normal(size=120)
        weight = rng.integers(0, 3, 120).astype(np.float32)
        model, history = jb.fit(
            x, y, sample_weight=weight, num_rounds=3, max_depth=2, learning_rate=1.0,
            l2=0.1, min_child_weight=0.0, **settings,
        )  # fmt: skip
        error = (np.asarray(jb.predict(model, x)) - y) ** 2
        loss = np.average(error, weights=weight)
        np.testing.assert_allclose(history.train_loss[-1], loss, rtol=1e-5)


def test_a_tree_s_candidates_follow_the_curvature_of_its_round():
    """Each round's thresholds are ends of bins of p (1 - p), and they move."""
    x, y = make_few()
    x = np.random.default_rng(3).normal(size=(N, 2)).astype(np.float32)
    x[:9, 1] = np.nan
    y = (y > 0).astype(np.float32)
    settings = dict(num_rounds=6, max_depth=3, learning_rate=1.0, max_bins=6, l2=0.1)
    model, _ = jb.fit(
        x, y, jb.losses.logistic, curvature="exact", regularization="absolute",
        min_child_weight=0.0, candidate_weights="curvature", **settings,
    )  # fmt: skip
    scores = np.concatenate(
        [[np.full(N, model.init_score)], jb.staged_predict(model, x)]
    )
    used = []
    for number in range(6):
        p = 1 / (1 + np.exp(-scores[number].astype(np.float64)))
        tree = (
            np.asarray(model.feature)[number, 0],
            np.asarray(model.threshold)[number, 0],
        )
        for feature in (0, 1):
            known = ~np.isnan(x[:, feature])
            values = np.sort(x[known, feature])
            mass = (p * (1 - p))[known][np.argsort(x[known, feature])]
            bins = references.find_bins(values.tolist(), mass.tolist(), 5)
            ends = np.flatnonzero(np.diff([bins[v] for v in values.tolist()]))
            allowed = {np.inf, *(values[ends] / 2 + values[ends + 1] / 2).tolist()}
            mine = set(tree[1][tree[0] == feature].tolist())
            assert mine <= allowed
            used += mine - {np.inf}
    assert len(set(used)) > 12  # 8 candidates would do if they stayed


# Against XGBoost.


@pytest.mark.parametrize(
    ("words", "theirs"),
    [
        ({}, {}),
        (dict(l1=2.5), dict(alpha=2.5)),
        (dict(max_delta_step=0.2), dict(max_delta_step=0.2)),
        (
            dict(monotone=(1, 0, -1, 1, -1)),
            dict(monotone_constraints=(1, 0, -1, 1, -1)),
        ),
    ],
)
def test_trees_are_those_of_xgboost_s_exact_search(words, theirs):
    """Features are continuous; thresholds differ, in the gap between two rows."""
    x, y, _ = parity.make_data(missing=True)
    noise = np.random.default_rng(4).normal(0, 0.2, x.shape)
    x = (x + noise).astype(np.float32)
    l2, min_gain, min_child_weight = parity.SETTINGS["heavy children"]
    chosen = parity.PROBLEMS["logistic"]
    parameters = {
        "objective": chosen.objective, "base_score": chosen.base_score,
        "tree_method": "exact", "max_depth": 4, "eta": parity.RATE, "lambda": l2,
        "gamma": 2 * min_gain, "min_child_weight": min_child_weight, "nthread": 1,
        **theirs,
    }  # fmt: skip
    matrix = xgb.DMatrix(x, y)
    booster = xgb.train(parameters, matrix, 6)
    expected = booster.predict(matrix, pred_leaf=True).astype(int)
    model, _ = jb.fit(
        x, y, chosen.loss, num_rounds=6, learning_rate=parity.RATE, max_depth=4, l2=l2,
        min_gain=min_gain, min_child_weight=min_child_weight, candidates="exact",
        regularization="absolute", curvature="exact", leaf_solver="newton",
        init_score=chosen.init_score, **words,
    )  # fmt: skip
    leaves = np.asarray(jb.leaf_indices(model, x))
    for number in range(6):
        np.testing.assert_array_equal(
            parity.group_rows(leaves[:, number]),
            parity.group_rows(expected[:, number]),
            f"tree {number}",
        )
    np.testing.assert_allclose(
        jb.predict(model, x),
        booster.predict(matrix, output_margin=True),
        rtol=0,
        atol=parity.TOLERANCE,
    )
    assert max(len(np.unique(tree)) for tree in leaves.T) > 8


# Codes of any number.


@pytest.mark.usefixtures("full_search")
def test_more_values_than_any_histogram_has_bins():
    """The planted step is between two of 70,000 values; new rows find their side."""
    rng = np.random.default_rng(5)
    x = rng.permutation(70_000).astype(np.float32)[:, None]
    y = np.where(x[:, 0] > 43_210, 1.0, -1.0)
    new = np.array([[43_210.4], [43_210.6], [-5], [1e9], [np.nan]])
    model, history = jb.fit(
        x, y, jb.losses.squared_error, num_rounds=1, max_depth=1, learning_rate=1.0,
        l2=0.0, candidates="exact", validation=(new, np.array([-1.0, 1, -1, 1, -1])),
    )  # fmt: skip
    assert model.threshold[0, 0, 0] == 43_210.5
    np.testing.assert_allclose(jb.predict(model, new)[:4], [-1, 1, -1, 1], atol=1e-5)
    expected = np.mean((np.asarray(jb.predict(model, new)) - [-1, 1, -1, 1, -1]) ** 2)
    np.testing.assert_allclose(history.validation_loss, [expected], atol=1e-6)


def test_boost_learns_as_fit_does_in_batches():
    """And without them: test_routes.py."""
    x, y = make_few()
    settings = dict(num_rounds=4, max_depth=2, candidates="local", max_bins=12)
    bins = jb.fit_bins(x, max_bins=None)
    binned = jb.apply_bins(bins, x)
    assert bins.num_bins == 128 and binned.dtype == jnp.uint8

    def train(rate):
        return jb.boost(
            binned, y, jb.losses.squared_error, jax.random.key(0), **settings,
            learning_rate=rate,
        )  # fmt: skip

    rates = (0.1, 0.5)
    found = jax.jit(jax.vmap(train))(jnp.array(rates))
    for number, rate in enumerate(rates):
        model, _ = jb.fit(x, y, learning_rate=rate, **settings)
        trees = jax.tree.map(lambda array, n=number: np.asarray(array)[n], found[0])
        member = jb.to_ensemble(trees, bins)
        for name in ("feature", "threshold", "missing_left"):
            np.testing.assert_array_equal(getattr(member, name), getattr(model, name))
        # A batch is another program, which may round in the last bit.
        chex.assert_trees_all_close(member, model, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_rows_are_sorted_alike_on_the_host_and_by_jax(dtype):
    codes = np.random.default_rng(6).integers(0, 20, (3, 500)).astype(dtype)
    expected = [sorted(range(500), key=row.__getitem__) for row in codes.tolist()]
    np.testing.assert_array_equal(sort_rows(codes), expected)
    np.testing.assert_array_equal(jax.jit(sort_rows)(jnp.asarray(codes)), expected)


# At the door.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (dict(candidates="all"), r"candidates must be one of .*'exact'.*got 'all'"),
        (dict(candidate_weights="hessian"), "candidate_weights must be one of .*hessi"),
        (
            dict(candidates="exact", candidate_weights="curvature"),
            "candidate_weights must be 'samples' with candidates='exact'.*'curvature'",
        ),
    ],
)
def test_words_are_checked(words, message):
    x, y = make_regression()
    with pytest.raises(ValueError, match=message):
        jb.fit(x, y, num_rounds=1, **words)
    with pytest.raises(ValueError, match=message):
        jb.boost(
            jb.apply_bins(jb.fit_bins(x), x), y, jb.losses.squared_error,
            jax.random.key(0), num_rounds=1, **words,
        )  # fmt: skip


def test_histograms_refuse_wide_codes():
    codes = jnp.ones((5, 1), jnp.uint32)
    with pytest.raises(ValueError, match=r"binned .*uint32"):
        jb.boost(codes, jnp.ones(5), jb.losses.squared_error, jax.random.key(0))


@pytest.mark.parametrize("candidates", ["local", "exact"])
def test_only_global_candidates_are_drawn(candidates):
    with pytest.raises(ValueError, match="rows_per_threshold must be 0 unless"):
        jb.fit(np.ones((9, 1)), np.ones(9), rows_per_threshold=9, candidates=candidates)
