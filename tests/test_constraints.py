# SPDX-License-Identifier: Apache-2.0
"""l1, max_delta_step, monotone, interactions, max_leaves: oracles and laws.

Gradients are whole multiples of 2^-20 where trees are compared, as in test_tree, so
that equal partitions tie exactly.
"""

from functools import partial
from itertools import product

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from by_column import grow_levels
from hypothesis import given, settings
from references import Constraints
from scipy import optimize
from tables import squared_distance

import jboost as jb
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import UNBOUNDED, ValueLimits, search_split

NUM_ROWS, NUM_FEATURES, NUM_BINS = 500, 4, 16
WORDS = jnp.array([5, 6], jnp.uint32)
SIGNS = (1, -1, 0, 1)
OVERLAPPING = ((0, 1), (1, 2))  # feature 3 is of no group
HALF_ULP = 2.0**-24

SIZES = ("max_depth", "num_bins", "max_leaves", "implementation")
grow_compiled = jax.jit(grow_levels, static_argnames=SIZES)


def make_rows(seed, missing):
    rng = np.random.default_rng(seed)
    codes = [rng.integers(1, most, NUM_ROWS) for most in (13, 13, 5, 3)]
    columns = np.stack(codes).astype(np.uint8)
    columns[:3][rng.random((3, NUM_ROWS)) < missing] = 0
    noise = rng.integers(-(2**19), 2**19, NUM_ROWS) / 2**20
    wave = (columns[0] > 4) * 0.5 - (columns[0] > 8) * 0.75 + (columns[1] > 6) * 0.25
    gradient = (noise + wave - 0.25 * (columns[2] == 2)).astype(np.float32)
    curvature = (rng.integers(1, 5, NUM_ROWS) / 4).astype(np.float32)
    return columns, gradient, curvature, np.ones(NUM_ROWS, bool)


def make_values(constraints):
    """Limits on leaf values; None where only paths are constrained."""
    most = min(constraints.max_delta_step, UNBOUNDED)
    if constraints.l1 == 0 and most == UNBOUNDED and not constraints.monotone:
        return None
    signs = constraints.monotone or (0,) * NUM_FEATURES
    return ValueLimits(
        jnp.float32(constraints.l1),
        jnp.array([-most, most], jnp.float32),
        jnp.array(signs, jnp.int32),
    )


def make_limits(limits, constraints):
    floats = TreeLimits(**jax.tree.map(jnp.float32, limits._asdict()))
    groups = None
    if constraints.groups:
        groups = np.zeros((len(constraints.groups), NUM_FEATURES), bool)
        for number, group in enumerate(constraints.groups):
            groups[number, list(group)] = True
    return floats._replace(
        min_child_samples=jnp.int32(limits.min_child_samples),
        values=make_values(constraints),
        groups=groups,
    )


# The grown tree, against the literal grower.

TREES = {
    "l1": Constraints(l1=0.5),
    "large l1": Constraints(l1=8.0),
    "max_delta_step": Constraints(max_delta_step=0.25),
    "monotone": Constraints(monotone=SIGNS),
    "values": Constraints(0.25, 0.3, SIGNS),
    "interactions": Constraints(groups=OVERLAPPING),
    "max_leaves": Constraints(max_leaves=11),
    "everything": Constraints(0.25, 0.3, SIGNS, OVERLAPPING, 11),
}


@pytest.mark.parametrize(
    ("name", "missing"), [("everything", 0.0), *((name, 0.2) for name in TREES)]
)
def test_tree_equals_the_literal_grower(name, missing):
    constraints, limits = TREES[name], references.Limits(0.5, 0.001, 1.25, 1)
    rows, depth = make_rows(len(name), missing), 5
    most = min(constraints.max_leaves, 2**depth)
    tree, leaf = jax.tree.map(
        np.asarray,
        grow_compiled(
            *map(jnp.asarray, rows), WORDS, make_limits(limits, constraints),
            max_depth=depth, num_bins=NUM_BINS, max_leaves=most,
        ),
    )  # fmt: skip
    expected = references.grow_tree(*rows, limits, depth, NUM_BINS, constraints)
    np.testing.assert_array_equal(tree.feature, expected.feature)
    np.testing.assert_array_equal(tree.threshold, expected.threshold)
    np.testing.assert_array_equal(tree.missing_left, expected.missing_left)
    np.testing.assert_array_equal(leaf, expected.leaf)
    used = np.unique(leaf)
    assert 3 < len(used) <= most
    if make_values(constraints) is None:
        assert tree.bounds is None
        return
    bounds = np.array([expected.bounds[number] for number in used])
    bounds = np.clip(bounds, -UNBOUNDED, UNBOUNDED)
    np.testing.assert_allclose(tree.bounds[used], bounds, rtol=1e-5, atol=1e-6)
    assert np.all(tree.bounds[used, 0] <= tree.bounds[used, 1])


# The split of one node, against brute force.

find = jax.jit(search_split)
UNIT = np.array([0.25, 0.5])


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    missing=st.sampled_from([0.0, 0.4]),
    l1=st.sampled_from([0.0, 0.5, 4.0]),
    l2=st.sampled_from([0.0, 1.0, 20.0]),
    bounds=st.sampled_from([(-np.inf, np.inf), (-0.5, 0.5), (0.25, 3.0), (-2, -0.125)]),
    signs=st.lists(st.sampled_from([-1, 0, 1]), min_size=3, max_size=3),
)
def test_split_equals_brute_force(seed, missing, l1, l2, bounds, signs):
    rng = np.random.default_rng(seed)
    columns = rng.integers(1, 6, (3, 24))
    columns[rng.random(columns.shape) < missing] = 0
    channels = np.stack(
        [rng.integers(-9, 10, 24), rng.integers(0, 4, 24), np.ones(24, int)], axis=1
    )
    sums = references.histogram(columns, channels, np.zeros(24, int), 1, 6)[0]
    limits = references.Limits(l2=l2, min_child_weight=0.5, min_child_samples=2)
    constraints = Constraints(l1=l1, monotone=tuple(signs))
    values = sums * np.append(UNIT, 1.0)
    cuts = references.candidates(values, np.ones(3), limits, constraints, bounds)
    best = references.find_split(values, np.ones(3), limits, constraints, bounds)
    finite = np.clip(bounds, -UNBOUNDED, UNBOUNDED)
    split = jax.tree.map(
        np.asarray,
        find(
            jnp.asarray(sums, jnp.int32), jnp.asarray(UNIT, jnp.float32),
            jnp.ones(3, bool), l2=l2, min_gain=0.0,
            min_child_weight=0.5, min_child_samples=jnp.int32(2),
            values=ValueLimits(
                jnp.float32(l1), jnp.asarray(finite, jnp.float32),
                jnp.asarray(signs, jnp.int32),
            ),
        ),
    )  # fmt: skip
    gradient, curvature = values[0].sum(axis=0)[:2]
    size = references.score_size(gradient, curvature, l2, l1, bounds)
    top = max((cut.gain for cut in cuts), default=-np.inf)
    # A score has five roundings, of terms at most 4 sizes of a side; there are three.
    largest = size + 2 * max(abs(top), 0.0) if cuts else size
    error = 3 * 5 * 4 * HALF_ULP * (1 + largest)
    if abs(top) > error and abs(2 * top - 1e-6 * size) > error:
        assert split.found == (best is not None)
    if split.found and best is not None:
        place = tuple(array.item() for array in split[:3])
        gains = {cut[1:]: cut.gain for cut in cuts}
        assert gains[place] >= best.gain - 2 * error
        cut = references.Cut(0.0, *place)
        expected = references.child_bounds(values, cut, limits, constraints, bounds)
        expected = np.clip(expected, -UNBOUNDED, UNBOUNDED)
        np.testing.assert_allclose(split.child_bounds, expected, rtol=1e-6, atol=1e-7)


# Laws of whole models.


def make_table(seed, num_rows=200):
    """Waves that no monotone function follows; missing values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 3)).astype(np.float32)
    latent = np.sin(3 * x[:, 0]) + x[:, 0] + x[:, 1] * x[:, 2] - np.cos(2 * x[:, 1])
    x[rng.random(x.shape) < 0.1] = np.nan
    return x, (latent + 0.3 * rng.normal(size=num_rows)).astype(np.float32)


def slopes(model, x, feature):
    """Changes of the scores as one feature rises, the others being those of rows."""
    moved = np.repeat(x[None, :60], 41, axis=0)
    moved[:, :, feature] = np.linspace(-4, 4, 41)[:, None]
    scores = np.asarray(jb.predict(model, moved.reshape(-1, 3)))
    return np.diff(scores.reshape(41, 60, -1), axis=0)


MODELS = {
    "squared": (jb.losses.squared_error, dict(max_depth=4, min_child_weight=0.0)),
    "medians": (
        jb.losses.absolute_error,
        dict(curvature="unit", min_child_samples=3, max_depth=3),
    ),
    "logistic": (jb.losses.logistic, dict(subsample=0.7, max_depth=3)),
    "huber by a line": (
        partial(jb.losses.huber, delta=0.5),
        dict(leaf_solver="line_search", max_depth=3),
    ),
    "two scores": (
        squared_distance, dict(num_scores=2, max_depth=3, init_score=[0.0, 2.0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_are_monotone(name):
    """Rising in feature 0, falling in feature 1, to the bit: sums of floats keep order.

    Without constraints a model of the same data is not.
    """
    loss, settings = MODELS[name]
    for seed, l1, step in [(0, 0.0, np.inf), (1, 0.5, 0.4), (2, 0.0, 0.2)]:
        x, y = make_table(seed)
        if name == "logistic":
            y = (y > 0).astype(np.float32)
        if name == "two scores":
            y = np.stack([y, y**2], axis=1)
        train = partial(jb.fit, x, y, loss, num_rounds=8, learning_rate=0.5)
        model, history = train(
            **settings, monotone={0: 1, 1: -1}, l1=l1, max_delta_step=step, seed=seed
        )
        assert slopes(model, x, 0).min() >= 0
        assert slopes(model, x, 1).max() <= 0
        assert np.ptp(slopes(model, x, 0)) > 0
        assert np.abs(model.leaf_value).max() <= np.float32(0.5) * np.float32(step)
        assert history.train_loss[-1] < 0.97 * history.train_loss[0]
    if name == "squared":
        model, _ = train(**settings)
        assert slopes(model, x, 0).min() < 0


def mixed_differences(model, points, first, second):
    """f(a, b) - f(a', b) - f(a, b') + f(a', b') along two features."""
    base = np.zeros((len(points) ** 2, 4), np.float32)
    base[:, [first, second]] = list(product(points, points))
    for other in {0, 1, 2, 3} - {first, second}:
        base[:, other] = 0.3
    scores = np.asarray(jb.predict(model, base), np.float64)
    table = scores.reshape(len(points), len(points))
    return np.diff(np.diff(table, axis=0), axis=1)


def interacting_table():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(200, 4)).astype(np.float32)
    y = x[:, 0] * x[:, 1] + x[:, 1] * x[:, 2] + x[:, 0] * x[:, 2] * x[:, 3]
    y += 3 * (x[:, 0] > 0) * (x[:, 2] > 0) + 2 * (x[:, 1] > 0) * (x[:, 3] > 0)
    return x, y.astype(np.float32)


POINTS = np.linspace(-2, 2, 15)


def test_interactions_are_none_across_groups():
    x, y = interacting_table()
    run = dict(num_rounds=20, max_depth=3)
    model, _ = jb.fit(x, y, interactions=[[0, 1], [1, 2]], **run)
    free, _ = jb.fit(x, y, **run)
    # Scores stay below 16; each of 20 roundings is half an ulp of that, in 4 scores.
    rounding = 20 * 4 * 16 * HALF_ULP
    for pair in [(0, 2), (0, 3), (1, 3), (2, 3)]:
        assert np.abs(mixed_differences(model, POINTS, *pair)).max() <= rounding
        assert np.abs(mixed_differences(free, POINTS, *pair)).max() > 100 * rounding
    for pair in [(0, 1), (1, 2)]:
        assert np.abs(mixed_differences(model, POINTS, *pair)).max() > 100 * rounding


def test_depth_is_the_order_of_interaction():
    """Depth 1 adds functions of one feature; depth 2 has no three-way differences."""
    x, y = interacting_table()
    rounding = 20 * 8 * 16 * HALF_ULP
    stumps, _ = jb.fit(x, y, num_rounds=20, max_depth=1)
    pairs, _ = jb.fit(x, y, num_rounds=20, max_depth=2)
    triples, _ = jb.fit(x, y, num_rounds=20, max_depth=3)
    assert np.abs(mixed_differences(stumps, POINTS, 0, 1)).max() <= rounding
    assert np.abs(mixed_differences(pairs, POINTS, 0, 2)).max() > 100 * rounding
    points = np.linspace(-2, 2, 8)
    cube = np.full((512, 4), 0.3, np.float32)
    cube[:, [0, 2, 3]] = list(product(points, points, points))

    def third(model):
        table = np.asarray(jb.predict(model, cube), np.float64).reshape(8, 8, 8)
        return np.abs(np.diff(np.diff(np.diff(table, axis=0), axis=1), axis=2)).max()

    assert third(pairs) <= rounding
    assert third(triples) > 100 * rounding


@pytest.mark.usefixtures("full_search")
def test_trees_have_so_many_leaves():
    x, y = interacting_table()
    model, _ = jb.fit(x, y, num_rounds=20, max_leaves=9, max_depth=4)
    counts = [len(np.unique(tree)) for tree in np.asarray(jb.leaf_indices(model, x)).T]
    assert set(counts) == {9}
    unlimited, _ = jb.fit(x, y, num_rounds=20, max_depth=3)
    same, _ = jb.fit(x, y, num_rounds=20, max_depth=3, max_leaves=8)
    np.testing.assert_array_equal(unlimited.leaf_value, same.leaf_value)


# Numbers are traced.


def test_limits_may_be_mapped_and_do_not_recompile():
    x, y = make_table(0)
    binned = jb.apply_bins(jb.fit_bins(x, max_bins=16), x)

    @chex.assert_max_traces(n=2)  # under jit and under vmap
    def train(l1, max_delta_step):
        return jb.boost(
            binned, y, jb.losses.squared_error, jax.random.key(0), num_rounds=3,
            max_bins=16, max_depth=2, l1=l1, max_delta_step=max_delta_step,
        )[1]  # fmt: skip

    every, steps = jnp.array([0.0, 2.0, 1e6]), jnp.array([0.0, 0.125, jnp.inf])
    alone = jax.jit(train)
    together = jax.vmap(train)(every, steps)
    expected = [alone(every[n], steps[n]) for n in range(3)]
    np.testing.assert_allclose(together, expected, rtol=0, atol=1e-5)
    # 0 and inf: no limit; l1 beyond all gradients: nothing is learnt.
    free = jb.boost(
        binned, y, jb.losses.squared_error, jax.random.key(0), num_rounds=3,
        max_bins=16, max_depth=2,
    )[1]  # fmt: skip
    np.testing.assert_allclose(together[0], free, rtol=0, atol=1e-5)
    assert np.ptp(together[2]) == 0
    assert np.ptp(together[1]) > 0


@pytest.mark.usefixtures("full_search")
def test_relative_l1_is_counted_in_mean_curvatures():
    """A loss times a thousand trains the same; XGBoost's alpha is l1 times 2 here."""
    x, y = make_table(3)

    def train(factor, **more):
        factor = jnp.float32(factor)

        def loss(score, target):
            return factor * jnp.square(score - target)

        more = dict(l2=1.0, min_child_samples=1) | more
        model, _ = jb.fit(x, y, loss, num_rounds=5, max_depth=3, **more)
        return np.asarray(jb.predict(model, x))

    relative = train(1.0, l1=3.0)
    np.testing.assert_array_equal(train(1024.0, l1=3.0), relative)
    absolute = train(1.0, l1=6.0, l2=2.0, min_child_weight=2.0,
                     regularization="absolute")  # fmt: skip
    np.testing.assert_allclose(absolute, relative, rtol=1e-5, atol=1e-5)
    assert np.abs(train(1.0) - relative).max() > 0.01


# Leaf values, group by group.


def make_groups():
    """Four groups of rows, apart in their only feature; the second is balanced."""
    rng = np.random.default_rng(0)
    x = np.repeat(np.arange(4.0), 40)[:, None]
    share = np.repeat([0.2, 0.5, 0.7, 0.95], 40)
    return x, (rng.random(160) < share).astype(np.float32)


@pytest.mark.parametrize("l1", [1.0, 4.0])
def test_exact_leaves_minimise_loss_and_penalties(l1):
    """sum of log(1 + e^c) - y c, plus l2 c^2 / 2 + l1 |c|; some are 0, some are not."""
    x, y = make_groups()
    model, _ = jb.fit(
        x, y, jb.losses.logistic, num_rounds=1, learning_rate=1.0, max_depth=3, l1=l1,
        l2=0.5, min_child_weight=0.0, regularization="absolute", init_score=0.0,
        leaf_solver="exact",
    )  # fmt: skip
    leaf = np.asarray(jb.leaf_indices(model, x))[:, 0]
    values = np.asarray(model.leaf_value)[0, 0, leaf]
    for number in np.unique(leaf):
        rows = y[leaf == number]

        def objective(c, rows=rows):
            losses = np.logaddexp(0, c) - rows * c
            return losses.sum() + 0.25 * c**2 + l1 * abs(c)

        best = optimize.minimize_scalar(objective, (-3, 3), tol=1e-12).x
        # Slopes below 1e-6 of their terms, 1/2 each at c = 0, count as zero; the
        # curvature is more than 0.02 of a row.
        tolerance = 1e-6 * (0.5 * len(rows) + l1) / (0.02 * len(rows))
        best = 0.0 if abs(best) < 1e-7 else best
        assert values[leaf == number][0] == pytest.approx(best, abs=2 * tolerance)
    assert np.any(values == 0) == (l1 == 4.0)
    assert np.any(values != 0)


# At the door.

REFUSED = {
    "l1 negative": (dict(l1=-1.0), ValueError, "l1 must be a number >= 0.*-1.0"),
    "l1 infinite": (dict(l1=np.inf), ValueError, "l1 must be a number >= 0.*inf"),
    "step negative": (
        dict(max_delta_step=-0.5), ValueError, "max_delta_step must be.*-0.5",
    ),
    "step nan": (dict(max_delta_step=np.nan), ValueError, "max_delta_step.*nan"),
    "step word": (dict(max_delta_step="no"), TypeError, "max_delta_step.*'no'"),
    "leaves": (dict(max_leaves=1), ValueError, "max_leaves.*from 2 to.*got 1"),
    "leaves float": (dict(max_leaves=8.0), TypeError, "max_leaves.*got 8.0"),
    "signs short": (dict(monotone=[1, 0]), ValueError, r"monotone.*3 signs.*\(2,\)"),
    "signs large": (dict(monotone=[1, 0, 2]), ValueError, r"-1, 0 or 1.*2\]"),
    "signs fraction": (dict(monotone=[1, 0, 0.5]), ValueError, "-1, 0 or 1"),
    "signs words": (dict(monotone="(1,0,0)"), TypeError, "monotone must be"),
    "sign of nothing": (dict(monotone={3: 1}), ValueError, "from 0 to 2, got 3"),
    "sign of a name": (dict(monotone={"a": 1}), ValueError, "monotone must .* got 'a'"),
    "sign twice": (
        dict(monotone={"a": 1, 0: -1}, feature_names=["a", "b", "c"]), ValueError,
        "monotone must list each feature once",
    ),
    "group twice": (
        dict(interactions=[[1], [0, 2, "a"]], feature_names=["a", "b", "c"]),
        ValueError, r"interactions\[1\] must list each feature once",
    ),
    "sign nan": (dict(monotone={0: np.nan}), ValueError, "-1, 0 or 1"),
    "groups word": (dict(interactions="[[0, 1]]"), TypeError, "sequence of groups"),
    "groups flat": (dict(interactions=[0, 1]), TypeError, r"interactions\[0\].*got 0"),
    "groups none": (dict(interactions=[]), ValueError, "at least one"),
    "group empty": (
        dict(interactions=[[0], []]), ValueError, r"interactions\[1\] must .* got \[\]",
    ),
    "group far": (dict(interactions=[[0, 3]]), ValueError, "from 0 to 2, got 3"),
    "group below": (dict(interactions=[[-1]]), ValueError, "from 0 to 2, got -1"),
}  # fmt: skip


def test_features_may_be_named():
    x, y = make_table(0)
    train = partial(jb.fit, x, y, num_rounds=2, max_depth=3)
    names = ["age", "rooms", "size"]
    model, _ = train(
        monotone={"rooms": -1, 0: 1}, interactions=[["age", 1], ["size"]],
        feature_names=names,
    )  # fmt: skip
    same, _ = train(monotone=(1, -1, 0), interactions=[[0, 1], [2]])
    np.testing.assert_array_equal(model.leaf_value, same.leaf_value)
    with pytest.raises(ValueError, match=r"monotone must .*'size'.*got 'floor'"):
        train(monotone={"floor": 1}, feature_names=names)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_constraints_are_refused(name):
    arguments, error, message = REFUSED[name]
    x, y = make_table(0, 30)
    with pytest.raises(error, match=f"(?s){message}"):
        jb.fit(x, y, num_rounds=1, **arguments)
