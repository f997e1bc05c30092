# SPDX-License-Identifier: Apache-2.0
"""The CPU's binning against its definition in NumPy and XLA, bit for bit."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from implementations import each_isa

import jboost as jb
from jboost.codes import binning, thresholds
from jboost.entry.context import use_implementation
from jboost.kernels import binning_cpu, calls
from jboost.tables import frames

pytestmark = pytest.mark.skipif(
    not calls.available(), reason="the CPU kernels were not built"
)

INF = np.inf
TINY = np.finfo(np.float32).tiny
COUNTED_ROWS = 60_000  # beyond what is sorted whole


def odd_columns(num_rows, seed=0):
    """One column per way in which thresholds can be hard to find."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=num_rows)
    uniform = rng.random(num_rows)
    integers = rng.integers(0, 1 << 30, num_rows)
    columns = {
        "normal": normal,
        "uniform": uniform,
        "heavy tails": np.tan(np.pi * (uniform - 0.5)),
        "every exponent": np.exp2(rng.uniform(-126, 127, num_rows)) * np.sign(normal),
        "every bit": rng.integers(0, 1 << 32, num_rows, np.uint32).view(np.float32),
        "narrow": 1e6 + 1000 * uniform,
        "narrow beside zero": np.where(uniform < 0.01, 0, 1e6 + 1000 * normal),
        "mostly zero": np.where(uniform < 0.9, 0, normal),
        "heavy among light": np.where(uniform < 0.4, 0.5, np.abs(normal)),
        "several heavy": np.where(uniform < 0.6, integers % 5 / 5, uniform),
        "many heavy": np.where(uniform < 0.9, integers % 200, normal),
        "geometric masses": np.floor(-np.log2(uniform)),
        "two values": integers % 2,
        "254 values": integers % 254,
        "255 values": integers % 255,
        "256 values": integers % 256,
        "256 values, one once": np.where(np.arange(num_rows) == 7, 1e9, integers % 255),
        "3000 values": integers % 3000,
        "two decimals": np.round(normal, 2),
        "neighbouring floats": (np.float32(1).view(np.int32) + integers % 997)
        .astype(np.int32)
        .view(np.float32),
        "all equal": np.full(num_rows, 3.0),
        "all missing": np.full(num_rows, np.nan),
        "one known": np.where(np.arange(num_rows) == num_rows // 2, 1.0, np.nan),
        "missing": np.where(uniform < 0.5, np.nan, normal),
        "rising": np.arange(num_rows),
        "falling": -np.arange(num_rows),
        "rare outliers": np.where(np.arange(num_rows) % 29_999 == 17, 1e30, normal),
        "denormals": normal * 1e-38,
        "zeros": np.where(uniform < 0.3, -0.0, np.where(uniform < 0.6, 0.0, normal)),
        "infinite": np.select(
            [uniform < 0.1, uniform < 0.3], [-INF, INF], normal * 1e38
        ),
        "only infinite": np.where(uniform < 0.5, -INF, INF),
    }
    with np.errstate(over="ignore"):
        x = np.stack([c.astype(np.float32) for c in columns.values()], axis=1)
    return x, list(columns)


def assert_same_cuts(x, weight, max_bins, names=None):
    """Cuts, not only thresholds: of what two neighbours give the same threshold?"""
    expected = [thresholds.find_cuts(column, weight, max_bins) for column in x.T]
    for isa in each_isa():
        *cuts, sizes = binning_cpu.find_cuts(x, weight, max_bins)
        for feature, (size, pair) in enumerate(zip(sizes, expected, strict=True)):
            name = f"{names[feature] if names else feature}, {isa}"
            for found, wanted in zip(cuts, pair, strict=True):
                np.testing.assert_array_equal(found[feature, :size], wanted, name)


# Thresholds.


@pytest.mark.parametrize(
    ("num_rows", "max_bins"),
    [
        (1, 2), (2, 256), (3, 3), (254, 2), (254, 256), (1000, 3), (1000, 17),
        (1000, 1024), (1000, 65536), (20_001, 256), (COUNTED_ROWS + 1, 2),
        (COUNTED_ROWS + 1, 63), (COUNTED_ROWS + 1, 255), (COUNTED_ROWS, 256),
        (COUNTED_ROWS, 5000), (200_003, 256),
    ],
)  # fmt: skip
def test_cuts_are_the_definitions(num_rows, max_bins):
    x, names = odd_columns(num_rows)
    assert_same_cuts(x, None, max_bins, names)


def test_a_value_that_the_sample_misses_is_found():
    x = np.zeros((COUNTED_ROWS, 2), np.float32)
    x[12_345, 0] = 1
    x[:, 1] = np.arange(COUNTED_ROWS) % 255
    x[54_321, 1] = 300.5
    assert_same_cuts(x, None, 256)
    bins = jb.fit_bins(x, implementation="cpu")
    assert np.asarray(bins.thresholds)[0, 0] == 0.5


@pytest.mark.parametrize(
    "kind", ["counts", "uniform", "huge", "tiny", "denormal", "mixed", "zeros", "inf"]
)
def test_cuts_of_weighted_rows_are_the_definitions(kind):
    num_rows, max_bins = (20_001, 256) if kind == "mixed" else (3000, 16)
    x, names = odd_columns(num_rows)
    rng = np.random.default_rng(5)
    weight = {
        "counts": rng.integers(0, 4, num_rows).astype(np.float64),
        "uniform": rng.random(num_rows),
        "huge": rng.random(num_rows) * 1e308,
        "tiny": rng.random(num_rows) * 1e-300,
        "denormal": rng.random(num_rows) * 1e-310,
        "mixed": np.exp(rng.uniform(-600, 600, num_rows)),
        "zeros": np.zeros(num_rows),
        "inf": np.where(rng.random(num_rows) < 0.01, INF, 1.0),
    }[kind]
    assert_same_cuts(x, weight, max_bins, names)


def test_weighted_cuts_of_many_rows_are_the_definitions():
    x, names = odd_columns(COUNTED_ROWS)
    weight = np.random.default_rng(6).random(len(x)) ** 4
    assert_same_cuts(x, weight, 256, names)


@pytest.mark.parametrize("num_features", [1, 8, 33])
def test_features_side_by_side_do_not_meet(num_features):
    rng = np.random.default_rng(num_features)
    x = rng.normal(size=(COUNTED_ROWS, num_features)).astype(np.float32)
    x *= 10.0 ** np.arange(num_features, dtype=np.float32) % 7
    assert_same_cuts(x, None, 32)


@pytest.mark.parametrize("offset", [0, 1, 7, 15])
def test_rows_may_begin_at_any_address(offset):
    memory = np.random.default_rng(0).normal(size=300_000 + 16).astype(np.float32)
    x = memory[offset : offset + 300_000].reshape(-1, 5)
    assert_same_cuts(x, None, 16)
    bins = jb.fit_bins(x, max_bins=16, implementation="cpu")
    with use_implementation("cpu"):
        columns = binning.bin_columns(bins, x).columns
    expected = jb.apply_bins(bins, x, implementation="xla")
    np.testing.assert_array_equal(columns, expected.T)


@pytest.mark.parametrize(
    ("order", "dtype"), [("C", np.float32), ("F", np.float64), ("F", np.int16)]
)
def test_implementations_agree_through_the_door(order, dtype):
    rng = np.random.default_rng(3)
    x = np.asarray(rng.normal(size=(51_000, 4)) * 1000, dtype, order=order)
    weight = rng.random(len(x))
    for sample_weight in (None, weight):
        bins = [
            jb.fit_bins(x, sample_weight=sample_weight, implementation=each)
            for each in ("xla", "cpu", None)
        ]
        for other in bins[1:]:
            np.testing.assert_array_equal(bins[0].thresholds, other.thresholds)
    np.testing.assert_array_equal(
        jb.apply_bins(bins[0], x, implementation="cpu"),
        jb.apply_bins(bins[0], x, implementation="xla"),
    )


def test_the_door_does_not_copy_or_change_what_it_need_not():
    x = np.random.default_rng(0).normal(size=(1000, 300)).astype(np.float32)
    before = x.copy()
    assert np.shares_memory(frames.read_frame(x, "x").matrix, x)
    jb.apply_bins(jb.fit_bins(x, implementation="cpu"), x, implementation="cpu")
    np.testing.assert_array_equal(x, before)


# Codes.

find_codes = jax.jit(binning_cpu.find_codes)


def thresholds_and_values(num_thresholds, num_features, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    thresholds = np.sort(rng.normal(size=(num_features, num_thresholds)), axis=1)
    thresholds = thresholds.astype(np.float32)
    for feature in range(num_features):  # from -inf, and of different lengths
        thresholds[feature, : feature % 2] = -INF
        thresholds[feature, num_thresholds - 1 - feature * 7 % num_thresholds :] = INF
    x = rng.normal(size=(num_rows, num_features)).astype(np.float32)
    odd = [np.nan, -INF, INF, 0.0, -0.0, 1e-40, -1e-40, TINY, -TINY, 3e38, -3e38]
    at = rng.random(x.shape)
    x = np.where(at < 0.2, rng.choice(odd, x.shape), x)
    some = thresholds[np.arange(num_features), rng.integers(0, num_thresholds, x.shape)]
    return thresholds, np.where(at > 0.8, some, x).astype(np.float32)


SMALL = [1, 3, 14, 15, 16, 63, 254, 255]


@pytest.mark.parametrize(
    ("num_thresholds", "num_features", "num_rows"),
    [(each, 5, 700) for each in SMALL] + [(255, 1, 1), (16, 17, 33), (255, 17, 33)]
    + [(each, 3, 3000) for each in (256, 257, 4095, 4096, 65535)],
)  # fmt: skip
def test_codes_are_the_definitions(num_thresholds, num_features, num_rows):
    thresholds, x = thresholds_and_values(num_thresholds, num_features, num_rows)
    expected = binning._find_codes(thresholds, x)
    if num_thresholds < 256:
        np.testing.assert_array_equal(expected, references.apply_bins(thresholds, x))
    for _ in each_isa():
        codes = find_codes(thresholds, x)
        assert codes.dtype == (np.uint8 if num_thresholds < 256 else np.uint16)
        np.testing.assert_array_equal(codes, expected)


def test_thresholds_at_zero_are_not_below_what_counts_as_zero():
    thresholds = np.array([[-0.0, INF], [0.0, INF], [1e-40, INF]], np.float32)
    x = np.array([[0.0], [-0.0], [1e-40], [-1e-40], [TINY]], np.float32)
    x = np.repeat(x, 3, axis=1)
    for _ in each_isa():
        codes = find_codes(thresholds, x)
        assert codes.tolist() == [[1, 1, 1]] * 4 + [[2, 2, 2]]
    np.testing.assert_array_equal(codes, binning._find_codes(thresholds, x))


@pytest.mark.parametrize(
    ("num_features", "shape"),
    [
        (1, (1, 9, 8)),
        (8, (1, 9, 8)),
        (9, (1, 9, 16)),
        (28, (1, 9, 32)),
        (32, (1, 9, 32)),
        (33, (3, 9, 16)),
        (100, (7, 9, 16)),
    ],
)
def test_packed_shape(num_features, shape):
    assert binning_cpu.packed_shape(num_features, 9) == shape


@pytest.mark.parametrize(
    ("num_bins", "num_features"),
    [(256, 1), (256, 28), (256, 33), (300, 13), (300, 100)],
)
def test_both_layouts_hold_the_codes(num_bins, num_features):
    for size, num_rows in (1, 1), (1, 8), (2500, 2503):
        thresholds, x = thresholds_and_values(num_bins - 1, num_features, size)
        bins = jb.Bins(thresholds)
        expected = np.asarray(jb.apply_bins(bins, x, implementation="xla")).T
        first = np.repeat(expected[:, :1], num_rows - size, axis=1)
        expected = np.concatenate([expected, first], axis=1)
        with use_implementation("xla"):
            plain = binning.bin_columns(bins, x, num_rows)
        assert plain.packed is None
        np.testing.assert_array_equal(plain.columns, expected)
        for _ in each_isa():
            with use_implementation("cpu"):
                codes = binning.bin_columns(bins, x, num_rows)
            np.testing.assert_array_equal(codes.columns, expected)
            packed = codes.packed
            assert packed is not None and packed.dtype == codes.columns.dtype
            assert packed.shape == binning_cpu.packed_shape(num_features, num_rows)
            rows = np.moveaxis(np.asarray(packed), 0, 1).reshape(num_rows, -1)
            np.testing.assert_array_equal(rows[:, :num_features].T, expected)
            assert not rows[:, num_features:].any()


# Under transformations, and threads.


def test_codes_under_jit_vmap_and_scan():
    thresholds, x = thresholds_and_values(31, 4, 600)
    bins = jb.Bins(jnp.asarray(thresholds))
    bare = jb.apply_bins(bins, x, implementation="xla")

    def apply(part):
        return jb.apply_bins(bins, part, implementation="cpu")

    parts = jnp.asarray(x).reshape(6, 100, 4)
    np.testing.assert_array_equal(jax.jit(apply)(x), bare)
    np.testing.assert_array_equal(jax.jit(jax.vmap(apply))(parts).reshape(600, 4), bare)
    _, scanned = jax.lax.scan(lambda carry, part: (carry, apply(part)), 0, parts)
    np.testing.assert_array_equal(scanned.reshape(600, 4), bare)


def test_codes_under_vmap_over_bins():
    thresholds, x = thresholds_and_values(31, 4, 100)
    both = jnp.stack([jnp.asarray(thresholds), jnp.asarray(thresholds) + 1])
    mapped = jax.vmap(lambda each: jb.apply_bins(jb.Bins(each), x))(both)
    for index in range(2):
        expected = jb.apply_bins(jb.Bins(both[index]), x, implementation="xla")
        np.testing.assert_array_equal(mapped[index], expected)


def test_codes_of_a_constant_inside_a_program():
    thresholds, x = thresholds_and_values(31, 4, 100)
    inside = jax.jit(lambda each: jb.apply_bins(jb.Bins(each), x))(thresholds)
    np.testing.assert_array_equal(inside, jb.apply_bins(jb.Bins(thresholds), x))


def test_many_large_calls_in_one_program_end():
    thresholds, x = thresholds_and_values(15, 8, 50_000)

    @jax.jit
    def run(x):
        return [
            jb.apply_bins(jb.Bins(jnp.asarray(thresholds)), x + i, implementation="cpu")
            for i in range(6)
        ]

    for i, codes in enumerate(run(x)):
        expected = binning._find_codes(thresholds, jnp.asarray(x) + i)
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_one_thread_gives_the_same():
    code = """
import numpy as np
import jboost as jb
from jboost.codes import binning
from jboost.entry.context import use_implementation
x = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
bins = jb.fit_bins(x, implementation="cpu")
with use_implementation("cpu"):
    codes = binning.bin_columns(bins, x)
parts = [np.asarray(each) for each in (bins.thresholds, codes.columns, codes.packed)]
found = b"".join(part.tobytes() for part in parts)
"""
    alone = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    alone += code + "sys.stdout.buffer.write(found)"
    done = subprocess.run([sys.executable, "-c", alone], stdout=-1, check=True)
    here = {}
    exec(code, here)
    assert done.stdout == here["found"]


# What the kernel refuses.


def call(how, x, thresholds, columns, packed, dtype=np.uint8):
    results = tuple(jax.ShapeDtypeStruct(each, dtype) for each in (columns, packed))
    return how("find_codes", results, x, thresholds)


@pytest.mark.parametrize(
    "change",
    [
        dict(x=np.zeros(12, np.float32)),
        dict(x=np.zeros((0, 3), np.float32)),
        dict(x=np.zeros((5, 3), np.float32)),
        dict(x=np.zeros((4, 2), np.float32)),
        dict(x=np.zeros((4, 3), np.int32)),
        dict(thresholds=np.zeros((2, 7), np.float32)),
        dict(thresholds=np.zeros((3, 256), np.float32)),
        dict(columns=(2, 4)),
        dict(columns=(3, 4, 1)),
        dict(packed=(1, 5, 8)),
        dict(packed=(1, 4, 2)),
        dict(packed=(2, 4, 8)),
        dict(columns=(3, 2), packed=(1, 2, 8)),
        dict(dtype=np.uint32),
    ],
)
@pytest.mark.parametrize("how", [calls.call, calls.call_on_host])
def test_wrong_shapes_are_refused(change, how):
    good = dict(
        x=np.zeros((4, 3), np.float32),
        thresholds=np.full((3, 7), INF, np.float32),
        columns=(3, 4),
        packed=(1, 4, 8),
    )
    jax.block_until_ready(call(how, **good))
    with pytest.raises(Exception, match=r"jboost kernel: |Wrong (type|buffer)"):
        jax.block_until_ready(call(how, **(good | change)))
