# SPDX-License-Identifier: Apache-2.0
"""The kernels that grow trees, sample and sum give the bits of plain XLA."""

import os
import subprocess
import sys
from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_column import find_leaves, grow_levels
from implementations import each_isa
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jboost as jb
from jboost.boosting.derivatives import weigh_rows
from jboost.boosting.round_programs import take_parts
from jboost.codes.codes import DenseCodes, pack_codes
from jboost.entry.context import use_implementation
from jboost.kernels import binning_cpu, calls, grow_cpu, levels_cpu
from jboost.numerics.exact import choose_scale, quantize, sum_rows
from jboost.numerics.random import sample
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import UNBOUNDED, ValueLimits

pytestmark = pytest.mark.skipif(
    not calls.available(), reason="the kernels were not built"
)
WORDS = jnp.array([3, 5], jnp.uint32)
BEST = calls.ISAS.index(calls.best_isa()) if calls.available() else 0
DEFAULT = TreeLimits()
COUNTED = TreeLimits(min_child_samples=20)
DRAWN = TreeLimits(rows_per_threshold=300)
# The same program, in which nothing is drawn.
ALL, ALL_COUNTED = (
    limits._replace(rows_per_threshold=0) for limits in (DEFAULT, COUNTED)
)
SAMPLED = TreeLimits(
    colsample_bytree=0.7, colsample_bylevel=0.8, colsample_bynode=0.6
)  # fmt: skip


ISAS = calls.ISAS[: BEST + 1]


@pytest.fixture(params=ISAS)
def isa(request):
    before = calls.current_isa()
    calls.set_isa(request.param)
    yield request.param
    calls.set_isa(before)


def make_rows(num_rows, num_features, num_bins, missing=0.0, bag=1.0, uniform=False):
    rng = np.random.default_rng(num_rows + num_features)
    dtype = np.uint8 if num_bins <= 256 else np.uint16
    columns = rng.integers(1, num_bins, (num_features, num_rows)).astype(dtype)
    columns[rng.random(columns.shape) < missing] = 0
    gradient = rng.normal(size=num_rows) + 2.0 * (columns[0] > num_bins // 2)
    curvature = np.ones(num_rows) if uniform else rng.random(num_rows)
    in_bag = rng.random(num_rows) < bag
    in_bag[0] = True
    return (
        jnp.asarray(columns), jnp.asarray(gradient, jnp.float32),
        jnp.asarray(curvature, jnp.float32), jnp.asarray(in_bag), WORDS,
    )  # fmt: skip


SIZES = ("max_depth", "num_bins", "max_nodes", "max_leaves", "uniform")
compiled = jax.jit(grow_levels, static_argnames=(*SIZES, "implementation"))


def grow(rows, limits, implementation, **sizes):
    return compiled(*rows, limits, implementation=implementation, **sizes)


def both_ways(rows, limits, **sizes):
    """The tree and leaves of plain XLA and of the kernels."""
    return [grow(rows, limits, name, **sizes) for name in ("xla", "cpu")]


# rows, features, bins, depth, limits, missing, share in the bag, uniform curvature
TREES = {
    "one row": (1, 1, 4, 2, DEFAULT, 0.0, 1.0, False),
    "depth one": (40, 3, 8, 1, DEFAULT, 0.1, 1.0, False),
    "exactly two chunks": (32768, 7, 64, 7, DEFAULT, 0.05, 1.0, True),
    "several chunks": (40001, 10, 256, 4, DEFAULT, 0.2, 1.0, False),
    "two groups of chunks, drawn": (
        160_000, 3, 32, 4, TreeLimits(rows_per_threshold=3000), 0.1, 0.9, True
    ),
    "half in the bag": (40001, 10, 256, 4, DEFAULT, 0.2, 0.5, False),
    "counts": (40001, 10, 256, 4, COUNTED, 0.1, 0.9, False),
    "hardly any in the bag": (40001, 10, 256, 4, DEFAULT, 0.2, 0.001, False),
    "counts of uniform rows": (32768, 7, 64, 7, COUNTED, 0.1, 0.9, True),
    "two-byte codes": (20000, 6, 1000, 4, ALL, 0.1, 1.0, False),
    "two-byte codes, counts": (20000, 6, 1000, 4, ALL_COUNTED, 0.1, 1.0, False),
    "two-byte codes, drawn": (20000, 6, 1000, 4, DRAWN, 0.1, 0.9, False),
    "many features": (5000, 70, 32, 4, DEFAULT, 0.0, 1.0, False),
    "many sampled features": (5000, 70, 32, 4, SAMPLED, 0.1, 1.0, False),
    "a feature of missing values": (40, 3, 8, 1, DEFAULT, 1.0, 1.0, False),
}  # fmt: skip


@lru_cache(maxsize=1)
def expected_tree(name):
    """Plain XLA's, once for all instruction sets; what to grow it from, and how."""
    num_rows, features, bins, depth, limits, missing, bag, uniform = TREES[name]
    rows = make_rows(num_rows, features, bins, missing, bag, uniform)
    sizes = dict(max_depth=depth, num_bins=bins, uniform=uniform)
    return grow(rows, limits, "xla", **sizes), (rows, limits), sizes


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("name", TREES)
def test_trees_are_those_of_plain_xla(name, isa):
    expected, arguments, sizes = expected_tree(name)
    grown = grow(*arguments, "cpu", **sizes)
    chex.assert_trees_all_equal(grown, expected)
    if name not in ("one row", "hardly any in the bag", "a feature of missing values"):
        assert len(np.unique(grown[1])) > 1  # there was something to compare


@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_rows_are_weighed_as_in_plain_xla(isa):
    rng = np.random.default_rng(1)
    odd = np.float32([0, 1, 3, 255, 256, 0.5, 1 - 2.0**-24, 254.5, 2.0**-126, 1e30])
    weights = np.concatenate([odd, rng.exponential(size=40_003).astype(np.float32)])
    gradient, curvature = rng.normal(size=(2, len(weights))).astype(np.float32)
    gradient[:: len(odd)] = np.inf  # of rows of weight 0, too
    in_bag = rng.random(len(weights)) < 0.9
    rows = in_bag, weights, gradient, curvature, np.float32(0.3)
    expected, found = (
        jax.jit(run)(*map(jnp.asarray, rows))
        for run in (weigh_rows, grow_cpu.weigh_rows)
    )
    chex.assert_trees_all_equal(found, expected)
    assert set(np.asarray(found[2][: len(odd)])) <= {0, 1, 3, 255}


@pytest.mark.parametrize("odd", [None, (0, np.nan), (1, np.inf), (1, 1.0)])
def test_pairs_are_split(isa, odd):
    """Whether derivatives are finite does not depend on rows of weight 0."""
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(2, 40_003)).astype(np.float32)
    weights = (rng.random(40_003) < 0.5).astype(np.float32)
    parts[:, weights == 0] = -np.inf
    if odd is not None:
        parts[odd[0], np.flatnonzero(weights)[-1]] = odd[1]
    pairs = jax.lax.complex(*map(jnp.asarray, parts))
    for run in (take_parts, grow_cpu.split_pairs):
        *found, finite = jax.jit(run)(pairs, jnp.asarray(weights))
        left = np.where(np.isfinite(parts).all(0), parts, 0)
        np.testing.assert_array_equal(np.stack(found), left)
        assert bool(finite) == np.isfinite(parts[:, weights > 0]).all()


def limit_values(l1, most, num_features):
    signs = jnp.arange(num_features, dtype=jnp.int32) % 3 - 1
    bounds = jnp.array([-most, most], jnp.float32)
    return ValueLimits(jnp.float32(l1), bounds, signs)


# The same, then l1 and the largest leaf value, groups of features, leaves.
CONSTRAINED = {
    "values": ((20000, 9, 64, 4, DEFAULT, 0.1, 1.0, False), (3.0, 0.4), 0, None),
    "signs": ((20000, 9, 64, 4, COUNTED, 0.2, 0.8, False), (0.0, UNBOUNDED), 0, None),
    "all": ((9000, 8, 300, 4, DRAWN, 0.1, 1.0, True), (1.0, UNBOUNDED), 3, 11),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_constrained_trees_are_those_of_plain_xla(name):
    """With the bounds of their leaves."""
    shape, numbers, num_groups, max_leaves = CONSTRAINED[name]
    num_rows, features, bins, depth, limits, missing, bag, uniform = shape
    rows = make_rows(num_rows, features, bins, missing, bag, uniform)
    limits = limits._replace(values=limit_values(*numbers, features))
    if num_groups:
        groups = np.random.default_rng(0).random((num_groups, features)) < 0.5
        limits = limits._replace(groups=jnp.asarray(groups))
    sizes = dict(max_depth=depth, num_bins=bins, max_leaves=max_leaves, uniform=uniform)
    expected = grow(rows, limits, "xla", **sizes)
    assert len(np.unique(expected[0].bounds)) > 4
    for _ in each_isa():
        chex.assert_trees_all_equal(grow(rows, limits, "cpu", **sizes), expected)


def test_at_most_so_many_nodes_as_rows_allow():
    rows = make_rows(300, 4, 16)
    sizes = dict(max_depth=5, num_bins=16, max_nodes=15)
    xla, cpu = both_ways(rows, COUNTED, **sizes)
    chex.assert_trees_all_equal(xla, cpu)


def test_a_split_at_equal_gains_is_the_first():
    columns = jnp.tile(jnp.array([1, 1, 2, 2], jnp.uint8), (3, 10))
    gradient = jnp.tile(jnp.array([-1.0, -1.0, 1.0, 1.0]), 10)
    rows = (columns, gradient, jnp.ones(40), jnp.ones(40, bool), WORDS)
    sizes = dict(max_depth=1, num_bins=8, uniform=False)  # the program of "depth one"
    xla, cpu = both_ways(rows, DEFAULT, **sizes)
    chex.assert_trees_all_equal(xla, cpu)
    assert cpu[0].feature[0] == 0


def test_codes_beyond_the_bins_do_no_harm():
    columns = jnp.array([[200, 1, 255], [1, 3, 7]], jnp.uint8)
    rows = (columns, jnp.ones(3), jnp.ones(3), jnp.ones(3, bool), WORDS)
    _, leaf = grow(rows, DEFAULT, "cpu", max_depth=2, num_bins=4)
    assert np.all((np.asarray(leaf) >= 0) & (np.asarray(leaf) < 4))


def test_packing_rows():
    for features, rows in [(1, 1), (8, 5), (9, 20000), (33, 77), (48, 16384)]:
        columns = np.random.default_rng(0).integers(0, 256, (features, rows))
        columns = jnp.asarray(columns, jnp.uint8)
        packed = np.asarray(pack_codes(DenseCodes(columns), 256).packed)
        blocks, _, width = binning_cpu.packed_shape(features, rows)
        expected = np.zeros((blocks * width, rows), np.uint8)
        expected[:features] = columns
        expected = expected.reshape(blocks, width, rows).transpose(0, 2, 1)
        np.testing.assert_array_equal(packed, expected)


scale, round_rows = jax.jit(choose_scale), jax.jit(quantize)
sum_compiled, sample_compiled = jax.jit(sum_rows), jax.jit(sample)


@pytest.mark.parametrize(
    ("num_rows", "uniform"), [(1, False), (300, True), (40001, False), (40001, True)]
)
def test_words_hold_the_rounded_rows(num_rows, uniform, isa):
    _, gradient, curvature, in_bag, words = make_rows(num_rows, 1, 4, bag=0.8)
    if uniform:
        curvature = jnp.ones_like(curvature)
    values = jnp.where(in_bag, jnp.stack([gradient, curvature]), 0.0)
    times = np.asarray(in_bag).astype(np.uint8)
    if not uniform:
        times *= np.random.default_rng(1).integers(1, 256, num_rows, np.uint8)
    fixed = scale(values, jnp.sum(in_bag), times)
    channels = np.array(round_rows(values.T, fixed, words, 0, times))
    if uniform:
        channels[:, 1] = in_bag
    chunk = grow_cpu.CHUNK
    columns = jnp.ones((1, num_rows), jnp.uint8)
    rows = levels_cpu.start_rows(
        gradient, curvature, times, words, fixed.scale, fixed.stochastic,
        jnp.int32(0), num_slots=1, uniform=uniform,
    )  # fmt: skip
    packed, order, _ = rows
    sums = jnp.zeros((1, 2 if uniform else 3, 1, 2), jnp.int32)
    codes, root = binning_cpu.pack(columns, 2), jnp.zeros(1, jnp.int32)
    sums = levels_cpu.sum_slots(codes, rows, jnp.int32(1), root, sums)
    expected = channels[np.asarray(in_bag)].astype(np.int64)
    expected = (expected[:, 1] << 32) + expected[:, 0]
    for first in range(0, num_rows, chunk):
        rows = first + np.flatnonzero(np.asarray(in_bag)[first : first + chunk])
        place = first + np.arange(len(rows))
        np.testing.assert_array_equal(first + np.asarray(order)[place], rows)
        word = np.asarray(packed)[place].view(np.int64)[:, 0]
        done = int(np.sum(np.asarray(in_bag)[:first]))
        np.testing.assert_array_equal(word, expected[done : done + len(rows)])
    total = np.asarray(sums)[0, :2, 0, -1]
    np.testing.assert_array_equal(total, channels[np.asarray(in_bag)].sum(axis=0))


@pytest.mark.parametrize("num_rows", [1, 31, 1025, 70_003])
def test_sums_of_floats_do_not_depend_on_the_order(num_rows, isa):
    rng = np.random.default_rng(0)
    size = np.float32(10) ** rng.integers(-5, 6, (3, num_rows)).astype(np.float32)
    values = (rng.normal(size=(3, num_rows)) * size).astype(np.float32)
    with use_implementation("xla"):
        expected = sum_compiled(values)
    with use_implementation("cpu"):
        sums = sum_compiled(values)
        shuffled = sum_compiled(rng.permuted(values, axis=1))
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(sums, shuffled)
    exact = values.astype(np.float64).sum(axis=1)
    # Each term is off by half a unit, the result by one rounding in each of 3 digits.
    greatest = np.abs(values).max(axis=1).astype(np.float64)
    error = num_rows * 2.0**-38 * greatest + 2.0**-23 * np.abs(exact)
    assert np.all(np.abs(sums - exact) <= error)


@pytest.mark.parametrize("num_rows", [2, 70_000])
def test_a_row_of_whole_weight_adds_what_so_many_rows_add(num_rows, isa):
    rng = np.random.default_rng(1)
    size = np.float32(10) ** rng.integers(-9, 3, num_rows).astype(np.float32)
    values = (rng.normal(size=(2, num_rows)) * size).astype(np.float32)
    weights = rng.choice(np.float32([0, 1, 2, 3, 7, 255, 0.3]), num_rows)
    values[:, 0], weights[0] = np.nan, 0
    times = np.where(weights == np.float32(0.3), 1, weights).astype(int)
    terms = np.where(times == weights, np.float32(1), weights) * values
    for implementation in ("xla", "cpu"):
        with use_implementation(implementation):
            weighted = sum_compiled(values, weights)
            repeated = sum_compiled(np.repeat(terms, times, axis=1))
        np.testing.assert_array_equal(weighted, repeated)


def test_sums_of_any_magnitude():
    """Also of what is not finite, beyond float32, and at the least unit, 2^-124."""
    inf, nan, most, tiny = np.inf, np.nan, np.finfo(np.float32).max, 2.0**-124
    rows = [
        [0, 0, 0, 0], [-0.0, -0.0, -0.0, -0.0], [1, -1, 2, -2], [most, most, 0, 0],
        [most, -most, 1, 0], [tiny, tiny, tiny, -tiny], [tiny / 4, tiny / 8, 0, 0],
        [inf, 1, 2, most], [inf, -inf, 0, 0], [nan, 1, 2, 3], [-inf, -inf, 5, 0],
    ]  # fmt: skip
    values = np.array(rows, np.float32)
    expected = [0, 0, 0, inf, 0, 2 * tiny, 0, inf, nan, nan, -inf]
    for implementation in ("xla", "cpu"):
        with use_implementation(implementation):
            np.testing.assert_array_equal(sum_compiled(values), expected)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 300, 70_000])
@pytest.mark.parametrize("fraction", [1e-4, 0.3, 0.5, 0.999, 1.0])
def test_samples_are_those_of_plain_xla(num_rows, fraction):
    rng = np.random.default_rng(num_rows)
    eligible = jnp.asarray(rng.random(num_rows) < 0.8)
    words = jnp.asarray(rng.integers(0, 2**32, 2, dtype=np.uint32))
    with use_implementation("xla"):
        expected = sample_compiled(words, eligible, jnp.float32(fraction))
    for _ in each_isa():
        with use_implementation("cpu"):
            found = sample_compiled(words, eligible, jnp.float32(fraction))
        np.testing.assert_array_equal(found, expected)


def test_leaves_of_other_rows():
    rows = make_rows(3000, 9, 32, missing=0.2)
    tree, leaf = grow(rows, DEFAULT, "cpu", max_depth=4, num_bins=32)
    assert len(np.unique(leaf)) > 8
    for implementation in ("xla", "cpu"):
        with use_implementation(implementation):
            found = jax.jit(find_leaves)(tree, rows[0])
        np.testing.assert_array_equal(found, leaf)


# The transformations.


def test_batches_and_scans_of_trees_are_loops():
    columns, gradient, curvature, in_bag, words = make_rows(3000, 5, 32)

    @jax.jit
    def grow(gradient):
        rows = columns, gradient, curvature, in_bag, words
        sizes = dict(max_depth=4, num_bins=32, implementation="cpu")
        return grow_levels(*rows, DEFAULT, **sizes)

    gradients = jnp.stack([gradient, -gradient, jnp.sqrt(jnp.abs(gradient))])
    alone = [grow(each) for each in gradients]
    alone = jax.tree.map(lambda *arrays: jnp.stack(arrays), *alone)
    chex.assert_trees_all_equal(jax.jit(jax.vmap(grow))(gradients), alone)
    scanned = jax.jit(lambda each: jax.lax.scan(lambda _, g: (0, grow(g)), 0, each))
    chex.assert_trees_all_equal(scanned(gradients)[1], alone)


needs_linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs Linux"
)
LIMIT = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
"""


def run_alone(code, *arguments, **environment):
    """Runs code in a process of its own, which must end within a minute or two."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], timeout=200,
        env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


TRAIN = """
import hashlib, numpy as np, jax, jboost as jb
from jboost.kernels import calls
rng = np.random.default_rng(0)
x = rng.normal(size=(40_000, 3)).astype(np.float32)
y = (x[:, 0] * x[:, 1] + rng.normal(size=40_000)).astype(np.float32)
begun, found = jb.implementations()["instructions"], []
best = calls.best_isa()
for isa in calls.ISAS[: calls.ISAS.index(best) + 1]:
    calls.set_isa(isa)
    model, _ = jb.fit(
        x, y, num_rounds=3, subsample=0.7, seed=3, max_depth=4, linear_leaves=False
    )
    score = jb.predict(model, x)
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((model, score))]
    found.append(hashlib.sha256(b"".join(leaves)).hexdigest())
calls.set_isa(begun)
"""


DEADLOCK = """
import jax, jax.numpy as jnp, numpy as np, jboost as jb
from jboost.entry.context import use_implementation
from jboost.trees.limits import TreeLimits
from jboost.codes.codes import DenseCodes
from jboost.trees.grow import grow_levels
rng = np.random.default_rng(0)
def grow(*rows):
    with use_implementation("cpu"):
        return grow_levels(*rows, max_depth=3, num_bins=64)

words, rows = jnp.array([1, 2], jnp.uint32), 60_000
columns = jnp.asarray(rng.integers(1, 64, (8, rows)), jnp.uint8)
ones = jnp.ones(rows)

def many(gradients):  # independent of each other: XLA may run them side by side
    every = [
        grow(DenseCodes(columns), gradient, ones, ones > 0, words, TreeLimits())[1]
        for gradient in gradients
    ]
    return sum(jnp.sum(leaf) for leaf in every)

gradients = jnp.asarray(rng.normal(size=(8, rows)), jnp.float32)
run = jax.jit(many)
sums = [int(run(gradients)) for _ in range(3)]
"""


@needs_linux
def test_any_threads_and_instructions_give_the_same_bytes_and_end():
    """The environment says with which instructions a process begins."""
    code = f"{LIMIT}\n{TRAIN}\ncalls.set_isa(best)\n{DEADLOCK}"
    tell = "\nprint(begun, *found, *sums)"
    begun, *one = run_alone(code + tell, "1", JBOOST_ISA="baseline").split()
    exec(TRAIN, here := {})
    assert begun == "baseline"
    *found, first, second, third = one
    assert len(found) == len(here["found"]) == len(ISAS)
    assert len({*found, *here["found"]}) == 1
    assert first == second == third


@needs_linux
def test_many_large_calls_on_two_cores_end():
    code = f"{LIMIT}\n{DEADLOCK}\nprint(jb.implementations()['instructions'], *sums)"
    begun, *sums = run_alone(code, "2", JBOOST_ISA="").split()
    assert begun == calls.best_isa()
    assert len(sums) == 3 and len({*sums}) == 1


def test_training_on_two_devices_under_shard_map():
    """Kernels of binning, sampling, sums, growth and leaves, on halves of the rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(600, 3)), jnp.float32)
    y = x[:, 0] + jnp.asarray(rng.standard_t(2, size=600), jnp.float32)
    bins, key = jb.fit_bins(x), jax.random.key(0)

    def train(x, y):
        binned = jb.apply_bins(bins, x, implementation="cpu")
        return jb.boost(
            binned, y, jb.losses.absolute_error, key, num_rounds=2, max_depth=2,
            subsample=0.7, colsample_bynode=0.7, init_score=0.0,
            implementation="cpu",
        )[1]  # fmt: skip

    # A loss is recorded as a program outside the map, which JAX cannot check inside.
    spread = jax.shard_map(
        train, mesh=Mesh(np.array(jax.devices()[:2]), ("rows",)),
        in_specs=(P("rows"), P("rows")), out_specs=P("rows"), check_vma=False,
    )  # fmt: skip
    together = np.asarray(jax.jit(spread)(x, y))
    alone = jax.jit(train)
    for half in (slice(0, 300), slice(300, 600)):
        np.testing.assert_array_equal(together[half], alone(x[half], y[half]))


# The choice.


def test_kernels_are_what_runs_on_a_cpu():
    rows = make_rows(300, 3, 16)
    for implementation, expected in [("xla", False), ("cpu", True), (None, True)]:
        grow = partial(
            grow_levels, max_depth=1, num_bins=16, implementation=implementation
        )
        text = jax.jit(grow).lower(*rows, DEFAULT).as_text()
        assert ("jboost_grow" in text) == expected


def test_implementations_tell_what_is_used(isa):
    used = jb.implementations()
    assert used["training"] == "cpu"
    assert used["instructions"] == isa


def test_an_unknown_implementation_or_instruction_set_is_refused():
    with pytest.raises(ValueError, match=r"implementation .*'gpu'"):
        jb.fit(np.ones((4, 1)), np.ones(4), num_rounds=1, implementation="gpu")
    with pytest.raises(ValueError, match=r"JBOOST_ISA .*'sse9'"):
        calls.set_isa("sse9")


WITHOUT = """
import warnings
from jboost.kernels import calls
calls.LIBRARY = None  # as if it had not been built
import numpy as np, jboost as jb
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        x = np.arange(20.0)[:, None]
        model, _ = jb.fit(x, x[:, 0], num_rounds=2, max_depth=1, linear_leaves=False)
        jb.predict(model, np.ones((2, 1)))
found = [each for each in caught if "without its CPU kernels" in str(each.message)]
print(len(found), found[0].category.__name__, found[0].filename)
print(jb.implementations()["training"])
try:
    jb.fit(np.ones((4, 1)), np.ones(4), num_rounds=1, implementation="cpu")
except ValueError as error:
    print("refused" if "installed without" in str(error) else error)
"""


def test_without_the_library_plain_xla_runs_and_says_so_once():
    assert run_alone(WITHOUT).split() == [
        "1", "RuntimeWarning", "<string>", "xla", "refused"
    ]  # fmt: skip
