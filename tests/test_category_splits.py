# SPDX-License-Identifier: Apache-2.0
"""Splits by categories: against brute force, a literal grower, XGBoost, and laws.

Gradients are whole multiples of 2^-20 and curvatures of 1/4, so that sums are exact
here and in the library, and equal partitions tie exactly in both.
"""

from functools import partial
from itertools import combinations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from by_column import find_leaves, grow_levels
from implementations import IMPLEMENTATIONS, needs_cpu_kernels

from jboost.entry.context import use_implementation
from jboost.trees.category_splits import CategoryLimits, find_mixed_split, pack_bits
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import Draw, ValueLimits

NUM_ROWS, NUM_FEATURES, NUM_BINS = 500, 4, 12
WORDS = jnp.array([5, 6], jnp.uint32)
UNIT = jnp.array([0.25, 0.5])
FASTEST = IMPLEMENTATIONS[-1]  # another test compares it with plain XLA
CODES = {0: 11, 2: 3}  # categorical features and how many codes they have
SIZES = ("max_depth", "num_bins", "max_leaves", "uniform", "implementation")
grow_compiled = jax.jit(grow_levels, static_argnames=SIZES)
search = jax.jit(find_mixed_split)


def as_limits(rules):
    features = sorted(rules.features)
    return CategoryLimits(
        jnp.array(features, jnp.int32),
        jnp.array([rules.features[f] for f in features], jnp.int32),
        jnp.int32(rules.max_onehot),
    )


def unpack(words):
    """The codes of a set."""
    words = np.asarray(words)
    return {c for c in range(32 * len(words)) if words[c // 32] >> (c % 32) & 1}


# One node.


def find_best_subset(sums, l2):
    """The best of all 2^(C-1) - 1 divisions of the categories of one feature."""
    codes = references.seen_codes(sums)
    total = sums.sum(axis=0)
    best = -np.inf
    for size in range(1, len(codes)):
        for chosen in combinations(codes, size):
            left = references.left_sums(sums, frozenset(chosen), False)
            right = total - left
            scores = [references.score(*s[:2], l2) for s in (left, right, total)]
            best = max(best, (scores[0] + scores[1] - scores[2]) / 2)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_sorted_cut_is_the_best_of_all_subsets(seed):
    """Fisher 1958: without smoothing and l2, in the order of the means."""
    rng = np.random.default_rng(seed)
    num_codes = int(rng.integers(2, 11))
    sums = np.zeros((1, NUM_BINS, 3), np.int32)
    sums[0, 1 : num_codes + 1, 0] = rng.integers(-1000, 1000, num_codes)
    sums[0, 1 : num_codes + 1, 1:] = rng.integers(1, 30, (num_codes, 1))
    rules = references.Categories({0: num_codes})
    split = search(
        jnp.asarray(sums), UNIT, jnp.ones(1, bool), as_limits(rules), l2=0.0,
        min_child_weight=0.0,
    )  # fmt: skip
    values = sums[0] * np.append(np.asarray(UNIT, np.float64), 1.0)
    expected = find_best_subset(values, 0.0)
    # Three scores of three roundings each, their sum rounded twice.
    assert float(split.gain) == pytest.approx(expected, rel=1e-6)
    left = references.left_sums(values, frozenset(unpack(split.left_codes)), False)
    parts = left, values.sum(axis=0) - left, values.sum(axis=0)
    scores = [references.score(*part[:2], 0.0) for part in parts]
    assert (scores[0] + scores[1] - scores[2]) / 2 == pytest.approx(expected, rel=1e-9)


def draw_categories(rng, spread, count=400, rows=25):
    """Sums of categories whose means have a standard deviation, in rows of noise 1."""
    noise = rng.normal(size=(count, rows))
    gradient = 1000 * (noise + spread * rng.normal(size=(count, 1)))
    sums = np.zeros((1, 512, 2), np.int32)
    sums[0, 1 : count + 1, 0] = gradient.sum(axis=1)
    sums[0, 1 : count + 1, 1] = rows
    return sums, np.sum(gradient**2)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_gains_are_what_categories_explain_beyond_noise(spread):
    """The half above the mean: C / pi of variances of the means, in a normal order.

    (Sum of H_c E|m_c|)^2 / H = H (2 / pi) var(m_c), and half of it is the gain. Of the
    means seen, var is spread^2 + 1/25; of the shrunk ones, spread^4 over that.
    """
    rng = np.random.default_rng(round(100 * spread))
    limits = as_limits(references.Categories({0: 400}))
    gains = []
    for _ in range(8):
        sums, squares = draw_categories(rng, spread)
        gains.append(
            [
                float(
                    search(
                        jnp.asarray(sums), jnp.array([1e-3, 1.0]), jnp.ones(1, bool),
                        limits, jnp.float32(given), l2=0.0,
                    ).gain
                )
                for given in (0.0, squares)
            ]
        )  # fmt: skip
    seen = spread**2 + 1 / 25
    expected = 400 * 25 / np.pi * np.array([seen, spread**4 / seen])
    # Eight times 400 normal numbers: their variance is known to 2.5 %. The noise of
    # rows is measured with the effects in it, which takes spread^2 of a row more.
    error = 0.1 * expected + [0.0, 2 * expected[1] * spread**2 / (25 * seen)]
    found = np.mean(np.maximum(gains, 0.0), axis=0)  # -inf: no set may be chosen
    np.testing.assert_array_less(abs(found - expected), error + 3.0)


def test_a_planted_set_is_found_and_other_codes_are_told_apart():
    sums = np.zeros((2, NUM_BINS, 3), np.int32)
    sums[0, [2, 5, 7], 0], sums[0, [1, 3], 0] = -50, 70
    sums[0, [1, 2, 3, 5, 7], 1:] = 10
    sums[1, 1] = sums[0].sum(axis=0)
    split = search(
        jnp.asarray(sums),
        UNIT,
        jnp.ones(2, bool),
        as_limits(references.Categories(CODES)),
    )
    assert int(split.threshold) == -1 and int(split.feature) == 0 and bool(split.found)
    assert unpack(split.left_codes) == {2, 5, 7}
    assert unpack(split.absent_codes) == {4, 6, 8, 9, 10, 11}


@pytest.mark.parametrize("seed", range(4))
def test_frequency_splits_where_means_are_noise(seed):
    """Codes fall with frequency: of the first t of them, the best t, by brute force."""
    rng = np.random.default_rng(seed)
    sums = np.zeros((1, NUM_BINS, 3), np.int32)
    sums[0, :, 0] = rng.integers(-1000, 1000, NUM_BINS)
    sums[0, :, 1:] = rng.integers(1, 30, (NUM_BINS, 1))
    sums[0, 0] *= seed % 2  # missing values, or none
    rules = as_limits(references.Categories({0: NUM_BINS - 1}))
    call = partial(
        search, jnp.asarray(sums), UNIT, jnp.ones(1, bool), rules, jnp.float32(1e9),
        l2=0.5, min_child_weight=0.0,
    )  # fmt: skip
    values = sums[0] * np.append(np.asarray(UNIT, np.float64), 1.0)
    total, gains = values.sum(axis=0), {}
    for last in range(1, NUM_BINS):
        for missing_left in (False, True):
            left = values[1 : last + 1].sum(axis=0) + missing_left * values[0]
            scores = [
                references.score(*s[:2], 0.5) for s in (left, total - left, total)
            ]
            gains[last, missing_left] = (scores[0] + scores[1] - scores[2]) / 2
    # Where all rows have values, the two directions are one.
    best = max(gains, key=lambda cut: (gains[cut], not cut[1]))
    split = call(draw=Draw(jnp.int32(1), WORDS))
    assert float(split.gain) == pytest.approx(gains[best], rel=1e-5)
    assert unpack(split.left_codes) == {*range(1, best[0] + 1)}
    assert bool(split.missing_left) == best[1] and int(split.threshold) == -1
    assert not unpack(split.absent_codes)
    # Without drawn thresholds, codes without an order of means stay together.
    whole = unpack(call().left_codes)
    assert whole in ({*range(1, NUM_BINS)}, set())
    onehot = rules._replace(max_onehot=jnp.int32(NUM_BINS))
    alone = search(
        jnp.asarray(sums), UNIT, jnp.ones(1, bool), onehot, l2=0.5,
        min_child_weight=0.0, draw=Draw(jnp.int32(1), WORDS),
    )  # fmt: skip
    assert len(unpack(alone.left_codes)) == 1


def test_bits_are_where_they_are_said_to_be():
    chosen = np.random.default_rng(0).random(70) < 0.5
    assert unpack(pack_bits(jnp.asarray(chosen))) == set(np.flatnonzero(chosen))


# Trees.

RULES = {
    "sorted": references.Categories(CODES),
    "few one by one": references.Categories(CODES, 4),
    "one by one": references.Categories(CODES, 99),
}
CONSTRAINTS = {
    "free": references.FREE,
    "limited": references.Constraints(0.25, 0.75, (0, 1, 0, -1), (), 9),
}


def make_rows(seed, missing=0.15):
    """Two categorical features of skewed frequency, and two numbers."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(1, NUM_BINS, (NUM_FEATURES, NUM_ROWS))
    for feature, count in CODES.items():
        columns[feature] = 1 + rng.integers(0, count, NUM_ROWS) * (
            rng.random(NUM_ROWS) ** 0.5
        )
    effect = rng.integers(-(2**19), 2**19, NUM_BINS)
    noise = rng.integers(-(2**18), 2**18, NUM_ROWS)
    gradient = (noise + effect[columns[0]] + 2**18 * (columns[1] > 6)) / 2**20
    columns[:3][rng.random((3, NUM_ROWS)) < missing] = 0
    curvature = rng.integers(1, 5, NUM_ROWS) / 4
    return (
        columns.astype(np.uint8), gradient.astype(np.float32),
        curvature.astype(np.float32), rng.random(NUM_ROWS) < 0.9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "samples", "held"),
    [
        ("sorted", 1, "limited"), ("sorted", 12, "free"), ("few one by one", 1, "free"),
        ("few one by one", 12, "limited"), ("one by one", 1, "limited"),
    ],
)  # fmt: skip
def test_trees_equal_the_literal_grower(name, samples, held):
    rules, constraints = RULES[name], CONSTRAINTS[held]
    limits = references.Limits(1.5, 0.0, 0.0, samples)
    rows = make_rows(seed=len(name), missing=0.15 if samples > 1 else 0.0)
    values = None
    if held == "limited":
        step = constraints.max_delta_step
        signs = jnp.array(constraints.monotone, jnp.int32)
        values = ValueLimits(
            jnp.float32(constraints.l1), jnp.array([-step, step], jnp.float32), signs
        )
    all_limits = TreeLimits(
        **limits._asdict(), values=values, categories=as_limits(rules)
    )
    leaves = None if held == "free" else constraints.max_leaves
    tree, leaf = grow_compiled(
        *map(jnp.asarray, rows), WORDS, all_limits, max_depth=4, num_bins=NUM_BINS,
        max_leaves=leaves, implementation=FASTEST,
    )  # fmt: skip
    expected = references.grow_tree(
        *rows, limits, 4, NUM_BINS, constraints, categories=rules
    )
    np.testing.assert_array_equal(tree.feature, expected.feature)
    np.testing.assert_array_equal(tree.threshold, expected.threshold)
    np.testing.assert_array_equal(tree.missing_left, expected.missing_left)
    np.testing.assert_array_equal(leaf, expected.leaf)
    found = {n: unpack(words) for n, words in enumerate(tree.left_codes) if any(words)}
    assert found == {n: set(codes) for n, codes in expected.left_codes.items() if codes}
    assert len(expected.left_codes) >= 2 and len(np.unique(leaf)) >= 4
    with use_implementation(FASTEST):
        descended = find_leaves(tree, jnp.asarray(rows[0]))
    np.testing.assert_array_equal(descended, leaf)


# rows, bins, codes, depth, max_onehot, min_child_samples, missing, uniform, limited,
# rows per threshold
SHAPES = {
    "two bytes": (20000, 300, {0: 140, 1: 250}, 4, 4, 20, 0.2, False, True, None),
    "drawn": (20000, 64, {0: 40, 3: 3, 4: 63}, 5, 4, 20, 0.2, True, False, 300),
}


@needs_cpu_kernels
@pytest.mark.parametrize("name", SHAPES)
def test_trees_of_the_kernels_are_those_of_plain_xla(name):
    size, bins, codes, depth, onehot, samples, missing, *flags, rows = SHAPES[name]
    uniform, limited = flags
    rng = np.random.default_rng(size)
    columns = rng.integers(1, bins, (5, size))
    for feature, count in codes.items():
        columns[feature] = np.minimum(rng.geometric(0.05, size), count)
    gradient = rng.normal(size=size) + rng.normal(size=bins)[columns[min(codes)]]
    columns[rng.random(columns.shape) < missing] = 0
    curvature = (
        np.ones(size) if uniform else rng.random(size) * (rng.random(size) > 0.1)
    )
    signs = [0 if f in codes else 1 for f in range(5)]
    values = ValueLimits(
        jnp.float32(0.5),
        jnp.array([-0.4, 0.4], jnp.float32),
        jnp.array(signs, jnp.int32),
    )
    limits = TreeLimits(
        min_child_samples=samples,
        values=values if limited else None,
        categories=as_limits(references.Categories(codes, onehot)),
        rows_per_threshold=None if rows is None else jnp.int32(rows),
    )
    rows = (
        jnp.asarray(columns.astype(np.uint8 if bins <= 256 else np.uint16)),
        jnp.asarray(gradient, jnp.float32), jnp.asarray(curvature, jnp.float32),
        jnp.asarray(rng.random(size) < 0.8), WORDS, limits,
    )  # fmt: skip
    one, other = (
        jax.jit(
            partial(
                grow_levels, max_depth=depth, num_bins=bins, uniform=uniform,
                max_leaves=12 if limited else None, implementation=which,
            )
        )(*rows)
        for which in ("xla", "cpu")
    )  # fmt: skip
    chex.assert_trees_all_equal(one, other, strict=True)
    assert np.sum(np.asarray(one[0].threshold) == -1) > 2


def test_a_category_that_a_node_does_not_have_goes_with_missing_values():
    """Code 3 is in the table, but no row in the bag has it."""
    codes = np.array([[1] * 6 + [2] * 4 + [3] * 2], np.uint8)
    in_bag = codes[0] < 3
    gradient = np.where(codes[0] == 1, 1.0, -1.0).astype(np.float32)
    limits = TreeLimits(categories=as_limits(references.Categories({0: 3})))
    tree, leaf = grow_compiled(
        jnp.asarray(codes), jnp.asarray(gradient), jnp.ones(12), jnp.asarray(in_bag),
        WORDS, limits, max_depth=1, num_bins=4, implementation=FASTEST,
    )  # fmt: skip
    assert not tree.missing_left[0]  # six rows of code 1 go right, four left
    assert unpack(tree.left_codes[0]) == {2}
    np.testing.assert_array_equal(leaf, np.where(codes[0] == 2, 0, 1))
