# SPDX-License-Identifier: Apache-2.0
"""The kernels of leaves: independent answers, and the bits of plain XLA."""

import os
import subprocess
import sys
from functools import lru_cache, partial
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import each_isa

from jboost.entry.collectives import Shards, use_shards
from jboost.entry.context import use_implementation
from jboost.kernels import calls
from jboost.numerics.exact import sum_changes, sum_channels
from jboost.trees.leaf_operations import add_values, find_range, middle_minimizers

pytestmark = pytest.mark.skipif(
    not calls.available(), reason="the kernels were not built"
)
SIZES = [(1, 1), (70_001, 7), (65_536, 1024)]
WEIGHTS = {
    "one": np.ones,
    "bag": lambda n: np.random.default_rng(1).integers(0, 2, n),
    "counts": lambda n: np.random.default_rng(1).integers(0, 4, n),
    "any": lambda n: np.random.default_rng(1).lognormal(size=n),
}


def make(num_rows, num_groups):
    """Values and groups, of which some lie outside."""
    rng = np.random.default_rng(num_rows)
    group = rng.integers(-1, num_groups + 1, num_rows).astype(np.int32)
    group[0] = 0
    return rng.normal(size=(3, num_rows)).astype(np.float32), group, rng


@lru_cache
def program(function, name, **sizes):
    """Compiled once for a shape, whatever the values and the instructions."""
    run = jax.jit(partial(function, **sizes))

    def call(*arguments):
        with use_implementation(name):
            return run(*arguments)

    return call


def both(function, *arguments, **sizes):
    """Plain XLA's result, after checking that kernels of all instructions agree."""
    arguments = jax.tree.map(jnp.asarray, arguments)
    expected = jax.tree.map(np.asarray, program(function, "xla", **sizes)(*arguments))
    for _ in each_isa():
        found = program(function, "cpu", **sizes)(*arguments)
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint32), b.view(np.uint32)
            )
    return expected


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "num_channels"),
    [(*size, channels) for size, channels in zip(SIZES, (1, 5, 2), strict=True)],
)
def test_sums(num_rows, num_groups, num_channels):
    values, group, _ = make(num_rows, num_groups)
    channels = tuple(values[c % 3] * (c + 1) for c in range(num_channels))
    sums = both(sum_channels, channels, group, num_groups=num_groups)
    inside = (group >= 0) & (group < num_groups)
    for channel, sum_of in zip(channels, sums, strict=True):
        exact, size = np.zeros((2, num_groups))
        np.add.at(exact, group[inside], channel[inside].astype(np.float64))
        np.add.at(size, group[inside], np.abs(channel[inside]).astype(np.float64))
        # Half a unit a row, and roundings of the result; see test_histogram.
        count = np.bincount(group[inside], minlength=num_groups)
        bound = count * 2.0**-38 * np.abs(channel).max() + 2.0**-23 * size
        assert np.all(np.abs(sum_of - exact) <= bound)


def add_weighted(channels, group, weights, num_groups):
    return sum_channels(channels, group, num_groups, weights)


def add_changes(before, after, group, weights, num_groups):
    return sum_changes(before, after, group, num_groups, weights)


@pytest.mark.parametrize(("num_rows", "num_groups"), SIZES[:2])
def test_sums_of_changes(num_rows, num_groups):
    (before, after, _), group, rng = make(num_rows, num_groups)
    weights = rng.choice(np.float32([0, 0.5, 1, 3]), num_rows)
    for odd in (0, np.inf):
        before[0] += np.float32(odd)
        sums = both(add_changes, before, after, group, weights, num_groups=num_groups)
        channels = after - before, np.abs(after) + np.abs(before)
        expected = both(add_weighted, channels, group, weights, num_groups=num_groups)
        np.testing.assert_array_equal(sums, expected)


def test_a_row_of_whole_weight_adds_what_so_many_rows_add():
    values, group, rng = make(5000, 33)
    weights = rng.choice(np.float32([0, 1, 2, 3, 255]), 5000)
    times, channels = weights.astype(int), tuple(np.where(weights > 0, values, np.nan))
    sums = both(add_weighted, channels, group, weights, num_groups=33)
    repeated = tuple(np.repeat(values, times, axis=1))
    expected = both(sum_channels, repeated, np.repeat(group, times), num_groups=33)
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("number", [1.0, 0.1, -np.inf])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_one_number_for_all_rows(weights, number):
    values, group, _ = make(3000, 9)
    weights = WEIGHTS[weights](3000).astype(np.float32)
    number = np.float32(number)
    sums = [
        both(add_weighted, channels, group, weights, num_groups=9)
        for channels in ((values[0], number), (values[0], np.full(3000, number)))
    ]
    np.testing.assert_array_equal(*sums)


def test_sums_of_what_is_not_finite():
    values, group, rng = make(30_000, 9)
    odd = rng.choice(np.float32([np.nan, np.inf, -np.inf]), 30_000)
    channel = np.where((group == 3) & (rng.random(30_000) < 0.01), odd, values[0])
    channel = np.where(group == 5, np.inf, channel)
    channel[group < 0] = np.nan
    sums = program(sum_channels, "xla", num_groups=9)((channel, values[1]), group)
    for _ in each_isa():  # NaN may have any bits
        found = program(sum_channels, "cpu", num_groups=9)((channel, values[1]), group)
        np.testing.assert_array_equal(found, sums)
    assert np.isnan(sums[0, 3]) and sums[0, 5] == np.inf
    finite = np.isfinite(sums).all(axis=0)
    assert finite.tolist() == [g not in (3, 5) for g in range(9)]


@pytest.mark.parametrize(("num_rows", "num_groups"), SIZES)
def test_ranges(num_rows, num_groups):
    values, group, rng = make(num_rows, num_groups)
    values = np.where(rng.random(num_rows) < 1e-3, np.float32(np.nan), values[0])
    low, high = both(find_range, values, group, num_groups=num_groups)
    for g in range(min(num_groups, 20)):
        of_group = values[group == g]
        unknown = np.isnan(of_group).any()
        expected = (-np.inf, np.inf) if unknown else (
            of_group.min(initial=np.inf), of_group.max(initial=-np.inf)
        )  # fmt: skip
        assert (low[g], high[g]) == expected


@pytest.mark.parametrize(("num_rows", "num_groups"), SIZES)
def test_scores_are_updated(num_rows, num_groups):
    values, group, rng = make(num_rows, num_groups)
    leaf = np.stack([group, group[::-1]])
    of_leaf = rng.normal(size=(2, num_groups)).astype(np.float32)
    values[0, : num_rows // 2] = -0.0
    scores = both(add_values, values[:2], of_leaf, leaf)
    inside = (leaf >= 0) & (leaf < num_groups)
    change = np.take_along_axis(of_leaf, np.where(inside, leaf, 0), axis=1)
    expected = np.where(inside, values[:2] + change, values[:2])
    np.testing.assert_array_equal(scores.view(np.uint32), expected.view(np.uint32))


def test_scores_are_updated_in_place_within_a_loop():
    values, group, _ = make(30_000, 9)
    of_leaf = jnp.linspace(-1, 1, 9)[None]

    def run(scores, leaf):
        def one(scores, _):
            new = add_values(scores, of_leaf, leaf, in_place=True)
            return new, jnp.sum(scores)  # somebody reads the old ones

        return jax.lax.scan(one, scores, None, length=5)

    both(run, values[:1], group[None])


def middle_by_sorting(key, left, kink, slack=2.0**-20):
    """Exact weighted order statistics of one group, in float64."""
    if not (kink > 0).any():
        return 0.0
    key, kinks = key[order := np.argsort(key, kind="stable")], kink[order]
    reached = np.cumsum(kinks)
    wanted, slack = left.sum(), slack * reached[-1]
    first = np.argmax(
        reached >= min(max(wanted - slack, kinks[kinks > 0][0]), reached[-1])
    )
    last = np.argmax(reached > min(wanted + slack, reached[-1] * (1 - 1e-15)))
    return key[first] / 2 + key[last] / 2


def scale_of(kink):
    """A power of two: the sum of all is below 2^39."""
    total = max(float(np.sum(kink, dtype=np.float64)), 1e-6)
    return np.float32(2.0 ** (39 - np.ceil(np.log2(total)) - 1))


KEYS = {
    "normal": lambda v: v,
    "ties": lambda v: np.round(2 * v) / 2,
    "equal": np.zeros_like,
    "far": lambda v: v * np.float32(1e30),
    "tiny": lambda v: v * np.float32(1e-42),
    "infinite": lambda v: np.where(np.abs(v) > 1, v * np.float32(np.inf), v),
}


def solve_middle(key, weights, left, kink, group, num_groups):
    scores = np.zeros_like(key)
    every = np.broadcast_to(np.float32(kink), key.shape)
    scale = scale_of(weights * every)
    weights = weights.astype(np.float32)

    slopes = (np.float32(left), np.float32(kink))
    return both(
        middle_minimizers, key, scores, weights, slopes, scale, group,
        num_groups=num_groups,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "keys", "num_rows", "num_groups"),
    [(*each, 5003, 64) for each in product(WEIGHTS, KEYS)]
    + [
        (*each, *size) for size in SIZES
        for each in zip(WEIGHTS, KEYS, strict=False)
    ],
)  # fmt: skip
def test_order_statistics(weights, keys, num_rows, num_groups):
    values, group, _ = make(num_rows, num_groups)
    key, weights = KEYS[keys](values[0]).astype(np.float32), WEIGHTS[weights](num_rows)
    found = solve_middle(key, weights, 0.25, 1.0, group, num_groups)
    key = np.where(np.abs(key) < np.finfo(np.float32).tiny, 0, key).astype(np.float64)
    for g in range(min(num_groups, 12)):
        rows = (group == g) & (weights > 0)
        kink = weights[rows].astype(np.float32).astype(np.float64)
        expected = middle_by_sorting(key[rows], kink / 4, kink)
        if np.isnan(expected):  # the middle of -inf and inf
            assert np.isnan(found[g])
        else:
            np.testing.assert_allclose(found[g], expected, rtol=2e-7, atol=1e-37)


def test_order_statistics_with_slopes_of_each_row(num_rows=70_001):
    values, group, rng = make(num_rows, 5)
    kink = rng.lognormal(size=num_rows).astype(np.float32)
    left = (kink * rng.uniform(0.1, 0.9, num_rows)).astype(np.float32)
    weights = rng.integers(0, 3, num_rows)
    found = solve_middle(values[0], weights, left, kink, group, 5)
    for g in range(5):
        rows = (group == g) & (weights > 0)
        weighted = (
            weights[rows] * part[rows].astype(np.float64) for part in (left, kink)
        )
        expected = middle_by_sorting(values[0][rows].astype(np.float64), *weighted)
        # Rounded to 2^-39 of all slopes.
        np.testing.assert_allclose(found[g], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_groups", "weights", "keys"),
    [
        (7, "counts", "infinite"),
        (1100, "bag", "normal"),  # digits of 4 bits
    ],
)
def test_order_statistics_of_shards(num_groups, weights, keys):
    """Shards, here of a mapped axis, find what all rows have."""
    values, group, _ = make(20_000, num_groups)
    key, weights = KEYS[keys](values[0]).astype(np.float32), WEIGHTS[weights](20_000)
    key[weights == 0] = np.nan
    expected = solve_middle(key, weights, 0.25, 1.0, group, num_groups)
    scale = jnp.asarray(scale_of(weights))
    slopes = (jnp.float32(0.25), jnp.float32(1))

    def run(key, weights, group):
        with use_shards(Shards(("rows",), (5000,) * 4, 20_000)):
            scores = jnp.zeros_like(key)
            return middle_minimizers(
                key, scores, weights, slopes, scale, group, num_groups
            )

    rows = (key, weights.astype(np.float32), group)
    parts = tuple(row.reshape(4, -1) for row in rows)
    found = both(jax.vmap(run, axis_name="rows"), *parts)
    np.testing.assert_array_equal(found, np.stack([expected] * 4))


def test_a_misleading_sample():
    """Every 32nd row, of which the sample consists, lies far from the others."""
    values, group, _ = make(70_001, 7)
    key = values[0]
    key[::32] += 100
    found = solve_middle(key, np.ones(len(key)), 1.0, 2.0, group, 7)
    expected = [np.median(key[group == g].astype(np.float64)) for g in range(7)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_rows_that_do_not_count_may_hold_anything():
    values, group, rng = make(70_001, 7)
    key, weights = values[0], rng.integers(0, 2, 70_001)
    clean = solve_middle(key, weights, 0.5, 1.0, group, 7)
    key = np.where(weights > 0, key, np.float32(np.nan))
    weights = np.where((weights == 0) & (values[1] > 0), np.float32(np.nan), weights)
    dirty = solve_middle(key, np.nan_to_num(weights, nan=-1.0), 0.5, 1.0, group, 7)
    np.testing.assert_array_equal(clean, dirty)


def test_under_vmap_and_scan():
    values, group, _ = make(3000, 5)
    groups = jnp.stack([jnp.asarray(group), jnp.asarray(group[::-1].copy())])
    ones, scale = jnp.ones(3000), jnp.float32(2.0**20)
    slopes = (jnp.float32(1), jnp.float32(2))

    def run(group):
        zeros = jnp.zeros(3000)
        key = jnp.asarray(values[0])
        return (
            sum_channels((key, ones), group, 5),
            find_range(key, group, 5),
            middle_minimizers(key, zeros, ones, slopes, scale, group, 5),
        )

    def run_both_ways(groups):
        return jax.vmap(run)(groups), jax.lax.scan(lambda _, g: (0, run(g)), 0, groups)

    bare = [both(run, group) for group in groups]
    bare = jax.tree.map(lambda *a: np.stack(a), *bare)
    for _ in each_isa():
        mapped, (_, scanned) = program(run_both_ways, "cpu")(groups)
        chex.assert_trees_all_equal(mapped, bare)
        chex.assert_trees_all_equal(scanned, bare)


SCRIPT = """
import hashlib
import jax.numpy as jnp, numpy as np
from jboost.numerics.exact import sum_channels
from jboost.trees.leaf_operations import add_values, find_range, middle_minimizers

rng = np.random.default_rng(0)
v = jnp.asarray(rng.normal(size=(2, 100_007)), jnp.float32)
group = jnp.asarray(rng.integers(0, 33, 100_007), jnp.int32)
one, scale = jnp.float32(1), jnp.float32(2.0**19)
digest = hashlib.sha256()
for array in (
    sum_channels((v[0], v[1]), group, 33),
    *find_range(v[0], group, 33),
    add_values(v, v[:, :33], jnp.stack([group, group])),
    middle_minimizers(v[0], v[1], jnp.exp(v[1]), (one, one * 3), scale, group, 33),
):
    digest.update(np.asarray(array).tobytes())
found = digest.hexdigest()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_any_number_of_threads():
    alone = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"{alone}\nsys.path[:0] = {sys.path}\n{SCRIPT}\nprint(found)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=-1, text=True)
    here = {}
    exec(SCRIPT, here)
    assert done.stdout.strip() == here["found"]


def test_wrong_shapes_are_refused():
    group = jnp.zeros(4, jnp.int32)
    result = jax.ShapeDtypeStruct((1, 3), jnp.float32)
    with pytest.raises(Exception, match="channels must be float32"):
        calls.call("sum_by_group", result, group, jnp.zeros(5)).block_until_ready()
    with pytest.raises(Exception, match="must be"):
        calls.call(
            "add_values", result, jnp.zeros((1, 3)), jnp.zeros((2, 3)), group[None, :3]
        ).block_until_ready()
