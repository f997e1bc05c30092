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


@pytest.fixture(params=calls.ISAS)
def isa(request):
    """Runs a test once for each instruction set that this processor has."""
    before = calls.current_isa()
    try:
        calls.set_isa(request.param)
    except ValueError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    calls.set_isa(before)


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
    lower, upper, sizes = binning_cpu.find_cuts(x, weight, max_bins)
    for feature in range(x.shape[1]):
        low, high = thresholds.find_cuts(x[:, feature], weight, max_bins)
        name = names[feature] if names else feature
        size = sizes[feature]
        np.testing.assert_array_equal(lower[feature, :size], low, err_msg=str(name))
        np.testing.assert_array_equal(upper[feature, :size], high, err_msg=str(name))


# Thresholds.


@pytest.mark.parametrize("num_rows", [1, 2, 3, 254, 1000, 20_001])
@pytest.mark.parametrize("max_bins", [2, 3, 17, 256])
def test_cuts_of_sorted_rows_are_the_definitions(num_rows, max_bins):
    x, names = odd_columns(num_rows)
    assert_same_cuts(x, None, max_bins, names)


@pytest.mark.parametrize("max_bins", [2, 63, 255, 256])
def test_cuts_of_counted_rows_are_the_definitions(isa, max_bins):
    x, names = odd_columns(COUNTED_ROWS + 1)
    assert_same_cuts(x, None, max_bins, names)


@pytest.mark.parametrize("seed", range(3))
def test_cuts_of_many_rows_are_the_definitions(seed):
    x, names = odd_columns(200_003, seed=seed + 1)
    assert_same_cuts(x, None, 256, names)


@pytest.mark.parametrize("max_bins", [1000, 1024, 5000, 65536])
def test_cuts_into_many_bins_are_the_definitions(max_bins):
    x, names = odd_columns(COUNTED_ROWS)
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
@pytest.mark.parametrize(("num_rows", "max_bins"), [(3000, 16), (20_001, 256)])
def test_cuts_of_weighted_rows_are_the_definitions(kind, num_rows, max_bins):
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


@pytest.mark.parametrize("num_features", [1, 3, 8, 33])
def test_features_side_by_side_do_not_meet(num_features):
    rng = np.random.default_rng(num_features)
    x = rng.normal(size=(COUNTED_ROWS, num_features)).astype(np.float32)
    x *= 10.0 ** np.arange(num_features, dtype=np.float32) % 7
    assert_same_cuts(x, None, 32)


@pytest.mark.parametrize("offset", range(0, 16))
def test_rows_may_begin_at_any_address(offset):
    memory = np.random.default_rng(0).normal(size=300_000 + 16).astype(np.float32)
    x = memory[offset : offset + 300_000].reshape(-1, 5)
    assert_same_cuts(x, None, 16)
    bins = jb.fit_bins(x, max_bins=16, implementation="cpu")
    with use_implementation("cpu"):
        columns = binning.bin_columns(bins, x).columns
    expected = jb.apply_bins(bins, x, implementation="xla")
    np.testing.assert_array_equal(columns, expected.T)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
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


@pytest.mark.parametrize("num_thresholds", [1, 3, 14, 15, 16, 63, 254, 255])
@pytest.mark.parametrize(("num_features", "num_rows"), [(1, 1), (5, 700), (17, 33)])
def test_codes_are_the_definitions(isa, num_thresholds, num_features, num_rows):
    thresholds, x = thresholds_and_values(num_thresholds, num_features, num_rows)
    codes = jax.jit(binning_cpu.find_codes)(thresholds, x)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, binning._find_codes(thresholds, x))
    np.testing.assert_array_equal(codes, references.apply_bins(thresholds, x))


@pytest.mark.parametrize("num_thresholds", [256, 257, 4095, 4096, 65535])
def test_wide_codes_are_the_definitions(isa, num_thresholds):
    thresholds, x = thresholds_and_values(num_thresholds, 3, 3000)
    codes = jax.jit(binning_cpu.find_codes)(thresholds, x)
    assert codes.dtype == np.uint16
    np.testing.assert_array_equal(codes, binning._find_codes(thresholds, x))


def test_thresholds_at_zero_are_not_below_what_counts_as_zero(isa):
    thresholds = np.array([[-0.0, INF], [0.0, INF], [1e-40, INF]], np.float32)
    x = np.array([[0.0], [-0.0], [1e-40], [-1e-40], [TINY]], np.float32)
    x = np.repeat(x, 3, axis=1)
    codes = jax.jit(binning_cpu.find_codes)(thresholds, x)
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
    [
        (256, 1),
        (256, 8),
        (256, 13),
        (256, 28),
        (256, 33),
        (256, 100),
        (300, 13),
        (300, 33),
    ],
)
@pytest.mark.parametrize(("size", "num_rows"), [(1, 1), (1, 8), (2500, 2503)])
def test_both_layouts_hold_the_codes(isa, num_bins, num_features, size, num_rows):
    thresholds, x = thresholds_and_values(num_bins - 1, num_features, size)
    bins = jb.Bins(thresholds)
    with use_implementation("cpu"):
        codes = binning.bin_columns(bins, x, num_rows)
    columns, packed = codes.columns, codes.packed
    expected = np.asarray(jb.apply_bins(bins, x, implementation="xla")).T
    np.testing.assert_array_equal(columns[:, :size], expected)
    first = np.repeat(expected[:, :1], num_rows - size, axis=1)
    np.testing.assert_array_equal(columns[:, size:], first)
    assert packed is not None
    assert packed.dtype == columns.dtype
    assert packed.shape == binning_cpu.packed_shape(num_features, num_rows)
    rows = np.moveaxis(np.asarray(packed), 0, 1).reshape(num_rows, -1)
    np.testing.assert_array_equal(rows[:, :num_features].T, columns)
    assert not rows[:, num_features:].any()
    with use_implementation("xla"):
        plain = binning.bin_columns(bins, x, num_rows)
    assert plain.packed is None
    np.testing.assert_array_equal(plain.columns, columns)


# Under transformations, and threads.


def test_codes_under_jit_vmap_and_scan():
    thresholds, x = thresholds_and_values(31, 4, 600)
    bins = jb.Bins(jnp.asarray(thresholds))
    bare = jb.apply_bins(bins, x, implementation="xla")

    def apply(part):
        return jb.apply_bins(bins, part, implementation="cpu")

    parts = jnp.asarray(x).reshape(6, 100, 4)
    np.testing.assert_array_equal(jax.jit(apply)(x), bare)
    np.testing.assert_array_equal(jax.vmap(apply)(parts).reshape(600, 4), bare)
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
    thresholds, x = thresholds_and_values(255, 8, 50_000)

    @jax.jit
    def run(x):
        return [
            jb.apply_bins(jb.Bins(jnp.asarray(thresholds)), x + i, implementation="cpu")
            for i in range(12)
        ]

    for i, codes in enumerate(run(x)):
        expected = binning._find_codes(thresholds, jnp.asarray(x) + i)
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_one_thread_gives_the_same():
    code = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
import jboost as jb
from jboost.codes import binning
from jboost.entry.context import use_implementation
x = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
bins = jb.fit_bins(x, implementation="cpu")
with use_implementation("cpu"):
    codes = binning.bin_columns(bins, x)
sys.stdout.buffer.write(np.asarray(bins.thresholds).tobytes())
sys.stdout.buffer.write(np.asarray(codes.columns).tobytes())
sys.stdout.buffer.write(np.asarray(codes.packed).tobytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    x = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
    bins = jb.fit_bins(x, implementation="cpu")
    with use_implementation("cpu"):
        codes = binning.bin_columns(bins, x)
    parts = [
        np.asarray(each) for each in (bins.thresholds, codes.columns, codes.packed)
    ]
    assert done.stdout == b"".join(part.tobytes() for part in parts)


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
