# SPDX-License-Identifier: Apache-2.0
"""search_split: planted answers, brute force, ties, two channels, drawn thresholds."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from hypothesis import given, settings

from jboost.trees.splitting import Draw, draw_thresholds, search_split

NUM_FEATURES, NUM_BINS, NUM_ROWS = 3, 6, 24
UNIT = jnp.array([0.25, 0.5])
HALF_ULP = 2.0**-24  # relative rounding error of one float32 operation
find = jax.jit(search_split)


def make_histogram(columns, gradient, curvature, count=None):
    """Integer sums [F, B, 3] of one node."""
    count = np.ones(len(gradient)) if count is None else count
    channels = np.stack([gradient, curvature, count], axis=1).astype(np.int64)
    node = np.zeros(len(gradient), np.int64)
    sums = references.histogram(columns, channels, node, 1, NUM_BINS)[0]
    return sums.astype(np.int32)


def search(sums, features=None, limits=None, unit=UNIT):
    """search_split with NumPy in and out."""
    features = np.ones(len(sums), bool) if features is None else features
    limits = references.Limits() if limits is None else limits
    return jax.tree.map(
        lambda array: array.item(),
        find(
            jnp.asarray(sums), unit, jnp.asarray(features),
            l2=jnp.float32(limits.l2), min_gain=jnp.float32(limits.min_gain),
            min_child_weight=jnp.float32(limits.min_child_weight),
            min_child_samples=jnp.int32(limits.min_child_samples),
        ),
    )  # fmt: skip


def where(split):
    return split.feature, split.threshold, split.missing_left


# Planted answers.


@pytest.mark.parametrize("missing_left", [False, True])
@pytest.mark.parametrize("feature", range(NUM_FEATURES))
def test_a_split_planted_at_any_bin_is_recovered(feature, missing_left):
    rng = np.random.default_rng(0)
    for threshold in range(1, NUM_BINS - 1):
        columns = rng.integers(0, NUM_BINS, (NUM_FEATURES, 300))
        code = columns[feature]
        left = np.where(code == 0, missing_left, code <= threshold)
        gradient = np.where(left, -40, 60) + rng.integers(-5, 6, 300)
        split = search(make_histogram(columns, gradient, np.ones(300)))
        assert split.found
        assert where(split) == (feature, threshold, missing_left)


@pytest.mark.parametrize("feature", range(NUM_FEATURES))
def test_missing_is_split_from_values(feature):
    rng = np.random.default_rng(1)
    columns = rng.integers(0, NUM_BINS, (NUM_FEATURES, 300))
    gradient = np.where(columns[feature] == 0, 50, -30)
    split = search(make_histogram(columns, gradient, np.ones(300)))
    assert where(split) == (feature, NUM_BINS - 1, False)


def test_gain_is_that_of_the_formula():
    columns = np.array([[1, 1, 2, 2]] * NUM_FEATURES)
    sums = make_histogram(columns, [-8, -8, 4, 4], [2, 2, 2, 2])
    limits = references.Limits(l2=2.0, min_gain=0.125)
    # G_L = -16/4, G_R = 8/4, H_L = H_R = 4/2: 16/4 + 4/4 - 4/6, halved, less a leaf.
    expected = (16 / 4 + 4 / 4 - 4 / 6) / 2 - 0.125
    gain = search(sums, limits=limits).gain
    # Each score is rounded thrice, their sum twice.
    assert gain == pytest.approx(expected, rel=5 * HALF_ULP)


# Against brute force.

LIMITS = st.builds(
    references.Limits,
    l2=st.sampled_from([0.0, 0.5, 1.0, 20.0]),
    min_gain=st.sampled_from([0.0, 0.25, 3.0, 40.0]),
    min_child_weight=st.sampled_from([0.0, 1.0, 2.5, 6.0]),
    min_child_samples=st.sampled_from([0, 1, 2, 5, 13]),
)


@st.composite
def nodes(draw):
    """Rows of one node: codes with many missing ones, gradients, curvatures."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, NUM_BINS, (NUM_FEATURES, NUM_ROWS))
    columns[rng.random(columns.shape) < draw(st.sampled_from([0, 0.4]))] = 0
    present = rng.random(NUM_ROWS) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    spread = draw(st.sampled_from([1, 3, 1000]))
    gradient = rng.integers(-spread, spread + 1, NUM_ROWS)
    curvature = rng.integers(0, draw(st.sampled_from([2, 6])), NUM_ROWS)
    rows = columns[:, present], gradient[present], curvature[present]
    return make_histogram(*rows)


def all_candidates(sums, features, limits):
    """Every admissible cut, the score of the parent, and the error of a gain."""
    values = sums * np.append(np.asarray(UNIT, np.float64), 1.0)
    cuts = references.candidates(values, features, limits)
    parent = references.score(*values[0].sum(axis=0)[:2], limits.l2)
    best = max((cut.gain for cut in cuts), default=0.0)
    # Sums and units are exact here. Each of the three scores is rounded thrice (a
    # square, a sum, a quotient) and their sum twice; half of that, for the gain, plus
    # the rounding of min_gain's subtraction. The sides' scores are 2 gain + parent.
    size = 2 * max(best, 0.0) + 2 * parent
    return values, cuts, parent, (2.5 * size + limits.min_gain) * HALF_ULP


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    sums=nodes(),
    limits=LIMITS,
    features=st.lists(st.booleans(), min_size=NUM_FEATURES, max_size=NUM_FEATURES),
)
def test_split_equals_brute_force(sums, limits, features):
    features = np.array(features)
    values, cuts, parent, error = all_candidates(sums, features, limits)
    best = references.find_split(values, features, limits)
    split = search(sums, features, limits)
    top = max((cut.gain for cut in cuts), default=-np.inf)
    edges = limits.min_gain, references.LEAST_GAIN * parent / 2
    if all(abs(top - edge) > error for edge in edges):
        assert split.found == (best is not None)
    if split.found and best is not None:
        gains = {cut[1:]: cut.gain for cut in cuts}
        assert where(split) in gains  # admissible
        chosen = gains[where(split)]
        assert chosen >= best.gain - 2 * error
        assert abs(split.gain - (chosen - limits.min_gain)) <= error


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(sums=nodes(), limits=LIMITS, samples=st.sampled_from([0, 1, 2, 5, 13]))
def test_two_channels_of_uniform_curvature_equal_three(sums, limits, samples):
    sums[..., 1] = sums[..., 2]
    limits = limits._replace(min_child_samples=samples)
    unit = jnp.array([UNIT[0], 0.7], jnp.float32)  # of every row
    three = search(sums, limits=limits, unit=unit)
    assert search(sums[..., :2], limits=limits, unit=unit) == three


# Ties.


def test_ties_go_to_the_lowest_feature_allowed():
    rng = np.random.default_rng(2)
    columns = np.tile(rng.integers(1, NUM_BINS, 200), (NUM_FEATURES, 1))
    gradient = np.where(columns[0] <= 3, -20, 30) + rng.integers(-3, 4, 200)
    sums = make_histogram(columns, gradient, np.ones(200))
    for first in range(NUM_FEATURES):
        features = np.arange(NUM_FEATURES) >= first
        assert where(search(sums, features)) == (first, 3, False)


def test_ties_go_to_the_lowest_threshold():
    """Bins that are empty leave several thresholds with the same two sides."""
    columns = np.array([[1, 1, 5, 5]] * NUM_FEATURES)
    sums = make_histogram(columns, [-9, -8, 9, 8], [2, 2, 2, 2])
    assert where(search(sums)) == (0, 1, False)


def test_mirrored_gains_go_to_the_lowest_threshold():
    """Cutting off the first or the last of three equal steps gains the same."""
    columns = np.array([[1, 2, 3]] * NUM_FEATURES)
    sums = make_histogram(columns, [-4, 0, 4], [2, 2, 2])
    assert where(search(sums)) == (0, 1, False)


def test_ties_go_to_the_lowest_feature_in_either_direction_of_missing():
    """Feature 0 needs missing rows left to do what feature 1 does without any."""
    columns = np.array([[0, 1, 2, 2], [1, 1, 2, 2], [1, 1, 1, 1]])
    sums = make_histogram(columns, [-9, -8, 9, 8], [2, 2, 2, 2])
    assert where(search(sums)) == (0, 1, True)


def test_ties_of_direction_go_right():
    columns = np.array([[0, 1, 2]] * NUM_FEATURES)
    sums = make_histogram(columns, [0, -9, 9], [0, 2, 2])
    assert where(search(sums)) == (0, 1, False)


# Nothing to split.


def test_constant_features_are_not_split():
    columns = np.full((NUM_FEATURES, NUM_ROWS), 2)
    gradient = np.arange(NUM_ROWS)
    sums = make_histogram(columns, gradient, np.ones(NUM_ROWS))
    assert not search(sums).found


@pytest.mark.parametrize("l2", [0.0, 1.0])
def test_a_constant_target_is_not_split(l2):
    """The gains are zero, but float32 makes some of them positive."""
    rng = np.random.default_rng(3)
    columns = rng.integers(0, NUM_BINS, (NUM_FEATURES, 4000))
    positive = 0
    for gradient, curvature in rng.integers(1000, 2**30 // 4000, (20, 2)):
        rows = np.full(4000, gradient), np.full(4000, curvature)
        sums = make_histogram(columns, *rows)
        split = search(sums, limits=references.Limits(l2=l2, min_child_weight=0))
        assert not split.found
        positive += split.gain > 0
    assert l2 > 0 or positive > 0  # else nothing was tested


def test_no_feature_allowed_is_no_split():
    columns = np.array([[1, 2, 3]] * NUM_FEATURES)
    sums = make_histogram(columns, [-4, 0, 4], [2, 2, 2])
    assert not search(sums, np.zeros(NUM_FEATURES, bool)).found


def test_an_empty_node_is_not_split():
    sums = np.zeros((NUM_FEATURES, NUM_BINS, 3), np.int32)
    limits = references.Limits(0.0, 0.0, 0.0, 0)
    split = search(sums, limits=limits)
    assert not split.found
    assert split.gain == 0


@pytest.mark.parametrize(("least", "found"), [(3, True), (4, False)])
def test_min_child_samples_is_exact(least, found):
    columns = np.array([[1, 1, 1, 2, 2, 2, 2]] * NUM_FEATURES)
    sums = make_histogram(columns, [-9, -9, -9, 7, 7, 7, 7], np.full(7, 5))
    limits = references.Limits(min_child_samples=least)
    assert search(sums, limits=limits).found == found
    counts = np.stack([sums[..., 0], sums[..., 2]], axis=-1)
    unit = jnp.array([UNIT[0], 5 * UNIT[1]], jnp.float32)
    assert search(counts, limits=limits, unit=unit).found == found


@pytest.mark.parametrize(("least", "found"), [(1.5, True), (1.5001, False)])
def test_min_child_weight_is_exact_up_to_its_slack(least, found):
    columns = np.array([[1, 1, 1, 2, 2, 2, 2]] * NUM_FEATURES)
    sums = make_histogram(columns, [-9, -9, -9, 7, 7, 7, 7], np.full(7, 1))
    limits = references.Limits(min_child_weight=least)
    assert search(sums, limits=limits).found == found


# Drawn thresholds.


draw = jax.jit(draw_thresholds)


@pytest.mark.parametrize("has_missing", [False, True])
@pytest.mark.parametrize(("rows", "per"), [(10, 100), (149, 100), (260, 100), (900, 7)])
def test_thresholds_are_drawn_from_equal_ranges_of_ranks(rows, per, has_missing):
    rng = np.random.default_rng(rows)
    seen = rng.random((3, 60)) < np.array([[0.2], [0.5], [1.0]])
    seen[:, 0] = False
    cuts = seen.sum(axis=1) - (not has_missing)
    wanted = max(1, int(rows / per + 0.5))
    for seed in range(20):
        words = jnp.array([seed, 7], jnp.uint32)
        chosen = np.asarray(
            draw(
                jnp.asarray(seen), jnp.asarray(cuts, jnp.int32), jnp.int32(rows),
                jnp.arange(3, dtype=jnp.int32), Draw(jnp.int32(per), words),
            )
        )  # fmt: skip
        for own, bins, number in zip(chosen, seen, cuts, strict=True):
            if wanted >= number:
                assert own.all()
                continue
            ranks = np.flatnonzero(own[bins])
            assert own.sum() == len(ranks) == wanted
            ends = np.arange(1, wanted + 1) * number // wanted
            np.testing.assert_array_equal(np.searchsorted(ends, ranks, "right"),
                                          np.arange(wanted))  # fmt: skip


def test_every_cut_is_drawn_equally_often():
    seen = jnp.arange(12)[None, :] > 0
    seeds = jax.random.bits(jax.random.key(0), (20_000, 2), jnp.uint32)
    shape = seen, jnp.array([10], jnp.int32), jnp.int32(3), jnp.zeros(1, jnp.int32)
    chosen = jax.vmap(lambda words: draw(*shape, Draw(jnp.int32(9), words)))(seeds)
    frequency = np.asarray(chosen).mean(axis=0)[0, 1:11]
    np.testing.assert_allclose(frequency, 0.1, atol=5 * (0.09 / len(seeds)) ** 0.5)


def test_a_search_among_drawn_thresholds_equals_brute_force():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, NUM_BINS, (NUM_FEATURES, 40))
    gradient, curvature = rng.normal(0, 9, 40).round(), rng.integers(1, 6, 40)
    sums = make_histogram(codes, gradient, curvature)
    seen, found = (sums[..., 2] > 0) & (np.arange(NUM_BINS) > 0), set()
    cuts = all_candidates(sums, np.ones(NUM_FEATURES, bool), references.Limits())[1]
    for seed in range(30):
        own = Draw(jnp.int32(20), jnp.array([seed, 0], jnp.uint32))
        number = jnp.full(NUM_FEATURES, NUM_BINS - 1, jnp.int32)
        every = jnp.arange(NUM_FEATURES, dtype=jnp.int32)
        chosen = np.asarray(draw(jnp.asarray(seen), number, jnp.int32(40), every, own))
        split = find(jnp.asarray(sums), UNIT, jnp.ones(NUM_FEATURES, bool), draw=own)
        best = max((cut for cut in cuts if chosen[cut[1:3]]), key=lambda cut: cut.gain)
        np.testing.assert_allclose(split.gain, best.gain, rtol=1e-5)
        assert chosen[split.feature, split.threshold]
        found.add((int(split.feature), int(split.threshold)))
    assert len(found) > 3
