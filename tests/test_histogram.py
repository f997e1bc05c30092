# SPDX-License-Identifier: Apache-2.0
"""Every histogram kernel against a loop, laws of sums, rounding to integers, hashes."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from by_column import sum_child_histogram, sum_histogram
from implementations import IMPLEMENTATIONS

from jboost.kernels.xla import select_rows
from jboost.numerics.exact import choose_scale, quantize, sum_by_group
from jboost.numerics.random import derive_seeds, hash_words

every_kernel = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
WORDS = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)

# name: (rows, features, codes, nodes, channels)
SHAPES = {
    "one example": (1, 3, 4, 1, 2),
    "one feature": (50, 1, 8, 2, 2),
    "one code": (20, 2, 1, 2, 2),
    "one channel": (33, 2, 8, 3, 1),
    "three channels": (67, 3, 16, 4, 3),
    "odd rows": (1009, 2, 7, 5, 2),
    "full bytes": (601, 2, 256, 3, 2),
    "two-byte codes": (601, 2, 300, 3, 3),
    "more nodes than rows": (5, 2, 4, 16, 2),
}


def draw_rows(shape, seed=0):
    """Codes, channels and nodes; some rows have no node."""
    num_rows, num_features, num_bins, num_nodes, num_channels = shape
    rng = np.random.default_rng(seed)
    dtype = np.uint8 if num_bins <= 256 else np.uint16
    columns = rng.integers(0, num_bins, (num_features, num_rows)).astype(dtype)
    size = (num_rows, num_channels)
    channels = rng.integers(-(2**20), 2**20, size).astype(np.int32)
    node = rng.integers(-1, num_nodes + 1, num_rows).astype(np.int32)
    return columns, channels, node


compiled = jax.jit(
    sum_histogram, static_argnames=("num_nodes", "num_bins", "implementation")
)
compiled_child = jax.jit(sum_child_histogram, static_argnames=("num_nodes", "num_bins"))
sum_groups = jax.jit(sum_by_group, static_argnums=2)


def build(columns, channels, node, **sizes):
    arrays = map(jnp.asarray, (columns, channels, node))
    return np.asarray(compiled(*arrays, **sizes))


# Against the loop.


@every_kernel
@pytest.mark.parametrize("case", SHAPES)
def test_histogram_equals_the_loop(implementation, case):
    num_bins, num_nodes = SHAPES[case][2:4]
    rows = draw_rows(SHAPES[case])
    sizes = {"num_nodes": num_nodes, "num_bins": num_bins}
    sums = build(*rows, implementation=implementation, **sizes)
    assert sums.dtype == np.int32
    np.testing.assert_array_equal(sums, references.histogram(*rows, *sizes.values()))


@pytest.mark.parametrize("case", SHAPES)
def test_child_histogram_equals_the_loop(case):
    num_bins, num_nodes = SHAPES[case][2:4]
    columns, channels, node = draw_rows(SHAPES[case])
    placed = np.flatnonzero((node >= 0) & (node < num_nodes))
    node[placed[len(node) // 2 :]] = -1  # at most half the rows have a node
    sizes = {"num_nodes": num_nodes, "num_bins": num_bins}
    arrays = map(jnp.asarray, (columns, channels, node))
    sums = compiled_child(*arrays, **sizes)
    expected = references.histogram(columns, channels, node, *sizes.values())
    np.testing.assert_array_equal(sums, expected)


def test_a_single_row_has_its_child_histogram():
    """N // 2 is 0 for one row, but there must be room for it."""
    sums = compiled_child(
        jnp.array([[2]], jnp.uint8), jnp.array([[7]]), jnp.array([0]),
        num_nodes=1, num_bins=3,
    )  # fmt: skip
    assert sums.tolist() == [[[[0], [0], [7]]]]


@every_kernel
def test_empty_nodes_and_missing_features(implementation):
    columns, channels, node = draw_rows((300, 3, 8, 4, 2))
    columns[1] = 0
    node[node == 2] = -1
    sums = build(
        columns, channels, node, num_nodes=4, num_bins=8, implementation=implementation
    )
    assert np.all(sums[2] == 0)
    assert np.all(sums[:, 1, 1:] == 0)
    for here in (0, 1, 3):
        assert sums[here, 1, 0].tolist() == channels[node == here].sum(0).tolist()


@every_kernel
@pytest.mark.parametrize("outside", [-1, 4, -(2**31), 2**31 - 1])
def test_rows_without_a_node_are_left_out(implementation, outside):
    columns, channels, _ = draw_rows((300, 2, 8, 4, 2))
    node = np.full(300, outside, np.int32)
    node[7] = 3
    sums = build(
        columns, channels, node, num_nodes=4, num_bins=8, implementation=implementation
    )
    assert np.all(sums[:3] == 0)
    assert sums[3].sum(axis=1).tolist() == [channels[7].tolist()] * 2


@every_kernel
def test_sums_use_all_31_bits(implementation):
    channels = np.full((4, 1), 2**29 - 1, np.int32)
    sums = build(
        np.ones((1, 4), np.uint8), channels, np.zeros(4, np.int32),
        num_nodes=1, num_bins=2, implementation=implementation,
    )  # fmt: skip
    assert sums[0, 0, 1, 0] == 4 * (2**29 - 1)


@pytest.mark.parametrize(
    "kernel",
    [compiled_child]
    + [partial(compiled, implementation=name) for name in IMPLEMENTATIONS],
)
def test_vmap_equals_a_loop(kernel):
    batch = [draw_rows((40, 2, 8, 3, 2), seed) for seed in range(3)]
    columns = jnp.asarray(batch[0][0])
    channels = jnp.stack([jnp.asarray(rows[1]) for rows in batch])
    node = jnp.stack([jnp.asarray(rows[2]) for rows in batch])
    node = jnp.where(jnp.arange(40)[None, :] % 2 == 0, node, -1)
    run = partial(kernel, num_nodes=3, num_bins=8)
    mapped = jax.jit(jax.vmap(run, (None, 0, 0)))(columns, channels, node)
    for entry in range(3):
        bare = run(columns, channels[entry], node[entry])
        np.testing.assert_array_equal(mapped[entry], bare)


def test_the_default_is_one_of_the_kernels():
    rows = draw_rows((50, 2, 8, 2, 2))
    expected = references.histogram(*rows, 2, 8)
    sums = build(*rows, num_nodes=2, num_bins=8, implementation=None)
    np.testing.assert_array_equal(sums, expected)


def test_bad_arguments_are_refused():
    columns, channels, node = map(jnp.asarray, draw_rows((50, 2, 8, 2, 2)))
    sizes = {"num_nodes": 2, "num_bins": 8}
    with pytest.raises(ValueError, match=r"implementation .*'slow'"):
        sum_histogram(columns, channels, node, implementation="slow", **sizes)
    for kernel in (sum_histogram, sum_child_histogram):
        unchecked = inspect.unwrap(kernel)  # users have no type checker in between
        with pytest.raises(ValueError, match="differ in N"):
            unchecked(columns[:, 1:], channels, node, **sizes)


# Choosing rows, and sums of floats.


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 20, 100])
def test_select_rows_gives_the_first_positions(share, size):
    chosen = np.random.default_rng(0).random(60) < share
    rows, filled = map(np.asarray, select_rows(jnp.asarray(chosen), size))
    expected = np.flatnonzero(chosen)[:size]
    assert rows.shape == filled.shape == (size,)
    assert filled.tolist() == [True] * len(expected) + [False] * (size - len(expected))
    assert rows[filled].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("num_rows", "num_groups"), [(1, 1), (1000, 3), (5000, 4096), (100_003, 8)]
)
def test_group_sums_are_exact_to_the_last_digits(num_rows, num_groups):
    rng = np.random.default_rng(0)
    values = rng.lognormal(size=num_rows).astype(np.float32)
    group = rng.integers(-1, num_groups + 1, num_rows).astype(np.int32)
    sums = sum_groups(jnp.asarray(values), jnp.asarray(group), num_groups)
    expected = np.zeros(num_groups)
    inside = (group >= 0) & (group < num_groups)
    np.add.at(expected, group[inside], values[inside].astype(np.float64))
    # Half a unit a row, and one rounding of the result in each of 3 digits.
    count = np.bincount(group[inside], minlength=num_groups)
    bound = count * 2.0**-38 * values.max() + 2.0**-23 * expected
    assert np.all(np.abs(np.asarray(sums, np.float64) - expected) <= bound)
    order = rng.permutation(num_rows)
    again = sum_groups(
        jnp.asarray(values[order]), jnp.asarray(group[order]), num_groups
    )
    np.testing.assert_array_equal(sums, again)


def test_rows_of_weight_two_count_as_two_rows():
    rng = np.random.default_rng(0)
    values = rng.normal(size=3000).astype(np.float32)
    weight = rng.integers(1, 4, 3000)
    group = rng.integers(0, 5, 3000).astype(np.int32)
    repeat = np.repeat(np.arange(3000), weight)
    weighted, repeated = (
        sum_groups(jnp.asarray(terms), jnp.asarray(groups), 5)
        for terms, groups in (
            (values * weight.astype(np.float32), group),
            (values[repeat], group[repeat]),
        )
    )
    np.testing.assert_array_equal(weighted, repeated)


def test_a_long_sum_keeps_its_digits():
    """One float32 sum of a million tenths in a row is off by a hundredth."""
    values = np.full(2**20, 0.1, np.float32)
    exact = values.astype(np.float64).sum()
    group = jnp.zeros(2**20, jnp.int32)
    assert sum_groups(jnp.asarray(values), group, 1)[0] == np.float32(exact)


def test_group_sums_of_integers_are_exact():
    values = np.random.default_rng(0).integers(-(2**15), 2**15, 3000).astype(np.int32)
    group = np.random.default_rng(1).integers(0, 7, 3000).astype(np.int32)
    sums = sum_groups(jnp.asarray(values), jnp.asarray(group), 7)
    expected = [int(values[group == g].sum()) for g in range(7)]
    assert sums.tolist() == expected


def test_group_sums_under_vmap_equal_a_loop():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, 600)), jnp.float32)
    group = jnp.asarray(np.random.default_rng(1).integers(0, 5, 600), jnp.int32)
    mapped = jax.vmap(sum_groups, (0, None, None))(values, group, 5)
    for entry in range(2):
        bare = sum_groups(values[entry], group, 5)
        np.testing.assert_array_equal(mapped[entry], bare)


# Rounding to integers.


@jax.jit
def round_rows(values, num_rows, words):
    fixed = choose_scale(values.T, num_rows)
    return quantize(values, fixed, words), fixed.unit


NEAREST_ROWS = 2**15  # the most rows that are rounded to nearest
MANY_ROWS = 100_000


def one_huge(num_rows, huge, tiny):
    values = np.full(num_rows, tiny, np.float32)
    values[num_rows // 2] = huge
    return values


ADVERSARIES = {
    "one huge row": lambda n: one_huge(n, 1e30, 1.0),
    "the rest round up": lambda n: one_huge(n, 2.0**28, 0.5),
    "the rest round down": lambda n: one_huge(n, -(2.0**28), -0.5),
    "all equal": lambda n: np.full(n, 0.1),
    "signs alternate": lambda n: np.resize([1e9, -1e9], n),
    "just below a power of two": lambda n: np.full(n, np.nextafter(np.float32(1), 0)),
    "sum beyond float32": lambda n: np.full(n, 3e38),
    "smallest normal": lambda n: np.full(n, 2e-38),
    "all zero": lambda n: np.zeros(n),
    "heavy tails": lambda n: np.random.default_rng(0).standard_cauchy(n) ** 3,
}


@pytest.mark.parametrize("num_rows", [NEAREST_ROWS, MANY_ROWS])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_sum_of_rows_leaves_31_bits(name, num_rows):
    values = ADVERSARIES[name](num_rows).astype(np.float32)[:, None]
    whole, unit = round_rows(jnp.asarray(values), jnp.int32(num_rows), WORDS)
    whole, unit = np.asarray(whole, np.int64), float(unit[0])
    assert np.abs(whole).sum() <= 2**31 - 1  # bounds the sum over any subset
    assert np.frexp(unit)[0] == 0.5  # a power of two
    error = np.abs(whole * unit - values.astype(np.float64))
    # Below 1 unit stochastically; to nearest half a unit, but 1 where adding a half
    # to 2^23 or more is itself rounded.
    small = np.abs(whole) < 2**22
    nearest = small & (num_rows <= NEAREST_ROWS)
    assert np.all(error <= np.where(nearest, unit / 2, unit))


def test_rounded_rows_use_their_bits():
    """The sum of magnitudes gets at least a quarter of 31 bits, less 1 per row."""
    values = np.random.default_rng(0).normal(size=(NEAREST_ROWS, 2)) * [1e-9, 1e9]
    rows = jnp.asarray(values, jnp.float32)
    whole, _ = round_rows(rows, jnp.int32(NEAREST_ROWS), WORDS)
    used = np.abs(np.asarray(whole, np.int64)).sum(axis=0)
    assert np.all(used >= 2**29 - 2 * NEAREST_ROWS)


def test_rounding_is_unbiased_where_it_is_stochastic():
    num_rows, num_seeds = MANY_ROWS, 16
    values = np.full((num_rows, 1), 0.1, np.float32)
    seeds = derive_seeds(WORDS, jnp.arange(num_seeds, dtype=jnp.int32))
    errors = []
    for seed in seeds:
        whole, unit = round_rows(jnp.asarray(values), jnp.int32(num_rows), seed)
        scaled = float(values[0, 0]) / float(unit[0])
        errors.append(np.asarray(whole, np.int64).sum() - num_rows * scaled)
    fraction = scaled % 1
    assert 0.1 < fraction < 0.9  # to nearest, every row would err the same way
    deviation = np.sqrt(num_rows * fraction * (1 - fraction))
    # Five standard deviations, of one sum and of the mean of all.
    assert np.max(np.abs(errors)) <= 5 * deviation
    assert abs(np.mean(errors)) <= 5 * deviation / np.sqrt(num_seeds)
    assert np.std(errors) >= deviation / 2  # another seed, other roundings


def test_channels_are_rounded_independently():
    values = jnp.full((MANY_ROWS, 2), 0.1, jnp.float32)
    whole, _ = round_rows(values, jnp.int32(MANY_ROWS), WORDS)
    correlation = np.corrcoef(np.asarray(whole, np.float64).T)[0, 1]
    assert abs(correlation) <= 5 / np.sqrt(MANY_ROWS)  # five standard deviations


@pytest.mark.parametrize("num_rows", [NEAREST_ROWS, MANY_ROWS])
def test_zero_stays_zero(num_rows):
    values = np.random.default_rng(0).normal(size=(num_rows, 2)).astype(np.float32)
    values[::3] = 0
    whole, _ = round_rows(jnp.asarray(values), jnp.int32(num_rows), WORDS)
    assert np.all(np.asarray(whole)[::3] == 0)
    assert np.any(np.asarray(whole)[1::3] != 0)


def test_a_row_count_chooses_the_rounding_not_the_length():
    """Padding must not turn rounding to nearest into stochastic rounding."""
    values = np.zeros((MANY_ROWS, 1), np.float32)
    values[:1000] = np.random.default_rng(0).normal(size=(1000, 1))
    first, _ = round_rows(jnp.asarray(values), jnp.int32(1000), WORDS)
    second, _ = round_rows(jnp.asarray(values), jnp.int32(1000), WORDS + 1)
    np.testing.assert_array_equal(first, second)


# Hashes.


def undo_shift(word, shift):
    """Solves y = x ^ (x >> shift) for x."""
    result = word
    for times in range(1, 32 // shift + 1):
        result = result ^ (word >> np.uint32(times * shift))
    return result


def undo_hash(word, words):
    """The inverse of hash_words, step by step backwards."""
    for part in np.asarray(words)[::-1]:
        word = undo_shift(word, 16)
        word = undo_shift(word * np.uint32(pow(0x846CA68B, -1, 2**32)), 15)
        word = undo_shift(word * np.uint32(pow(0x7FEB352D, -1, 2**32)), 16)
        word = word - part
    return word


def test_hash_has_an_inverse():
    word = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    word[:4] = [0, 1, 2**31, 2**32 - 1]
    hashed = np.asarray(hash_words(jnp.asarray(word), WORDS))
    np.testing.assert_array_equal(undo_hash(hashed, WORDS), word)


def test_a_million_hashes_are_distinct_and_even():
    hashed = np.asarray(hash_words(jnp.arange(2**20, dtype=jnp.uint32), WORDS))
    assert len(np.unique(hashed)) == 2**20
    for shift in (24, 0):  # the highest and the lowest byte
        counts = np.bincount((hashed >> shift) & 255, minlength=256)
        # Chi-square of 255 degrees of freedom: mean 255, deviation 22.6; six of them.
        assert np.square(counts - 4096).sum() / 4096 <= 255 + 6 * 22.6


def test_each_use_of_a_seed_has_words_of_its_own():
    words = np.asarray(derive_seeds(WORDS, jnp.arange(10_000, dtype=jnp.int32)))
    assert words.shape == (10_000, 2)
    assert len(np.unique(words)) == 20_000
    one = derive_seeds(WORDS, jnp.int32(77))
    np.testing.assert_array_equal(one, words[77])
