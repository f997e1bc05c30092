# SPDX-License-Identifier: Apache-2.0
"""The histogram kernel for TPUs: interpreted, against a loop, and lowered.

Nothing here needs a TPU.
"""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import jboost as jb
from jboost.kernels import histogram_tpu, xla

# The first does each step of the grid in JAX; the second imitates a TPU of two cores
# and its memory, in which what was not written, and what lies beyond an array, holds
# anything.
INTERPRETERS = {
    "steps": True,
    "memory": pltpu.InterpretParams(
        num_cores_or_threads=2, random_seed=1, out_of_bounds_reads="uninitialized"
    ),
}

# name: (rows, features, codes, nodes, channels)
SHAPES = {
    "one of each": (1, 1, 1, 1, 1),
    "odd sizes": (109, 3, 7, 5, 3),
    "rows of several tiles": (4097, 2, 256, 3, 2),
    "more nodes than a tile": (300, 2, 20, 41, 2),
    "more features than a tile": (130, 35, 16, 2, 1),
    "more codes than a tile": (500, 2, 300, 3, 2),
    "more channels than digits": (200, 2, 9, 3, 7),
}
EVERY_AXIS = (2100, 33, 257, 17, 2)  # two tiles along each


def draw_rows(shape, seed=0):
    """Codes, channels and nodes; some rows have no node."""
    num_rows, num_features, num_bins, num_nodes, num_channels = shape
    rng = np.random.default_rng(seed)
    dtype = np.uint8 if num_bins <= 256 else np.uint16
    columns = rng.integers(0, num_bins, (num_features, num_rows)).astype(dtype)
    size = (num_rows, num_channels)
    most = (2**31 - 1) // num_rows
    channels = rng.integers(-most, most, size, endpoint=True).astype(np.int32)
    node = rng.integers(-1, num_nodes, num_rows, endpoint=True).astype(np.int32)
    return columns, channels, node


@cache
def compiled(num_nodes, num_bins, how):
    sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
    kernel = partial(histogram_tpu.histogram, **sizes, interpret=INTERPRETERS[how])
    return jax.jit(kernel)


def run(columns, channels, node, num_nodes, num_bins, how="steps"):
    kernel = compiled(num_nodes, num_bins, how)
    return np.asarray(kernel(*map(jnp.asarray, (columns, channels, node))))


def check(columns, channels, node, num_nodes, num_bins, how="steps"):
    sums = run(columns, channels, node, num_nodes, num_bins, how)
    expected = references.histogram(columns, channels, node, num_nodes, num_bins)
    assert sums.dtype == np.int32
    np.testing.assert_array_equal(sums, expected)


# Interpreted.


@pytest.mark.parametrize("name", SHAPES)
def test_sums_equal_the_loop(name):
    shape = SHAPES[name]
    check(*draw_rows(shape), shape[3], shape[2])


def test_tiles_along_every_axis_equal_the_loop():
    check(*draw_rows(EVERY_AXIS), EVERY_AXIS[3], EVERY_AXIS[2], "memory")


def test_two_cores_and_what_lies_beyond_arrays_change_nothing():
    shape = SHAPES["odd sizes"]
    check(*draw_rows(shape), shape[3], shape[2], "memory")


# Times four channels, the last two are 0.
@pytest.mark.parametrize("outside", [-1, 4, 2**31 - 1, -(2**31), 2**30])
def test_rows_without_a_node_are_left_out(outside):
    columns, channels, _ = draw_rows((300, 2, 8, 4, 4))
    node = np.full(300, outside, np.int32)
    node[7] = 3
    check(columns, channels, node, 4, 8)


# Sums of these are no less than -2^31 and less than 2^31. Those with a name have
# digits of the greatest magnitude: 128 * 2^8d is -128 and a carry.
VALUES = {
    "greatest": [2**31 - 1],
    "least": [-(2**31)],
    "all 31 bits": [2**30, 2**30 - 1],
    "all 31 bits below 0": [-(2**30), -(2**30)],
    "cancel": [2**31 - 1, -(2**31), 1],
    "digits": [sign * 128 << 8 * digit for digit in range(3) for sign in (1, -1)],
    "below digits": [(128 << 8 * digit) - 1 for digit in range(3)],
}


@pytest.mark.parametrize("name", VALUES)
def test_integers_of_any_magnitude_are_exact(name):
    channels = np.zeros((6, 1), np.int32)
    channels[: len(VALUES[name]), 0] = VALUES[name]
    columns, node = np.ones((1, 6), np.uint8), np.zeros(6, np.int32)
    assert run(columns, channels, node, 1, 2).tolist() == [
        [[[0], [int(channels.sum(dtype=np.int64))]]]
    ]


@pytest.mark.parametrize("value", [127, -128, 128, -129])
def test_many_rows_of_great_digits_are_exact(value):
    """Four tiles of rows, all in one cell, whose lowest digit is 127 or -128."""
    count = 8000
    columns, node = np.full((1, count), 5, np.uint8), np.zeros(count, np.int32)
    sums = run(columns, np.full((count, 1), value, np.int32), node, 1, 6)
    assert sums[0, 0, :, 0].tolist() == [0] * 5 + [count * value]


def test_sums_that_overflow_wrap_as_those_of_plain_xla():
    columns, _, node = draw_rows((2500, 2, 3, 2, 2))
    channels = np.random.default_rng(1).integers(-(2**31), 2**31, (2500, 2))
    rows = (columns, channels.astype(np.int32), node)
    plain = jax.jit(partial(xla.histogram, num_nodes=2, num_bins=3))(*rows)
    np.testing.assert_array_equal(run(*rows, 2, 3), plain)


@pytest.mark.parametrize("empty", ["rows", "features", "channels"])
def test_nothing_sums_to_zeros(empty):
    shape = tuple(0 if name == empty else 3 for name in ("rows", "features"))
    num_channels = 0 if empty == "channels" else 2
    rows = (
        np.zeros(shape[::-1], np.uint8), np.zeros((shape[0], num_channels), np.int32),
        np.zeros(shape[0], np.int32),
    )  # fmt: skip
    expected = np.zeros((4, shape[1], 5, num_channels), np.int32)
    np.testing.assert_array_equal(run(*rows, 4, 5), expected)


def test_wide_codes_equal_the_loop():
    columns, *rows = draw_rows((200, 2, 300, 2, 2))
    check(columns.astype(np.uint32), *rows, 2, 300)


def test_vmap_equals_a_loop():
    batch = [draw_rows((40, 2, 8, 3, 2), seed) for seed in range(3)]
    columns = jnp.asarray(batch[0][0])
    channels, node = (
        jnp.stack([jnp.asarray(rows[part]) for rows in batch]) for part in (1, 2)
    )
    kernel = partial(histogram_tpu.histogram, num_nodes=3, num_bins=8, interpret=True)
    mapped = jax.jit(jax.vmap(kernel, (None, 0, 0)))(columns, channels, node)
    for entry in range(3):
        expected = references.histogram(columns, *batch[entry][1:], 3, 8)
        np.testing.assert_array_equal(mapped[entry], expected)


# On shards of the rows.


def sum_shards(check_vma, **options):
    """Returns the sums over four shards, as a function of all rows."""
    mesh = jax.make_mesh(
        (4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices("cpu")[:4],
    )  # fmt: skip

    def add(*rows):
        sizes = dict(num_nodes=3, num_bins=8)
        sums = histogram_tpu.histogram(*rows, **sizes, **options)
        return jax.lax.psum(sums, "rows")

    rows = (P(None, "rows"), P("rows"), P("rows"))
    return jax.jit(
        jax.shard_map(add, mesh=mesh, in_specs=rows, out_specs=P(), check_vma=check_vma)
    )


def test_shards_add_up_to_the_whole():
    rows = draw_rows((1200, 3, 8, 3, 2))
    sums = sum_shards(False, interpret=True)(*rows)
    np.testing.assert_array_equal(sums, references.histogram(*rows, 3, 8))


@pytest.mark.parametrize("check_vma", [False, True])
def test_shards_are_lowered(check_vma):
    traced = sum_shards(check_vma).trace(*draw_rows((1200, 3, 8, 3, 2)))
    assert "tpu_custom_call" in lower(traced)


# Lowered.


def lower(traced):
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("shape", [*SHAPES.values(), EVERY_AXIS])
def test_every_shape_is_lowered_without_a_scatter(shape):
    kernel = partial(histogram_tpu.histogram, num_nodes=shape[3], num_bins=shape[2])
    text = lower(jax.jit(kernel).trace(*draw_rows(shape)))
    assert "tpu_custom_call" in text and "jboost_histogram" in text
    assert "scatter" not in text


def test_a_batch_is_one_call():
    kernel = partial(histogram_tpu.histogram, num_nodes=3, num_bins=8)
    columns, channels, node = draw_rows((40, 2, 8, 3, 2))
    mapped = jax.jit(jax.vmap(kernel, (None, 0, 0)))
    text = lower(mapped.trace(columns, channels[None], node[None]))
    assert text.count("tpu_custom_call") == 1 and "stablehlo.while" not in text


def test_double_precision_changes_nothing():
    """With it on, JAX makes 64-bit integers of Python's, which no TPU kernel may have.

    They are lowered, but refused by the compiler.
    """
    shape = SHAPES["odd sizes"]
    rows, sizes = draw_rows(shape), dict(num_nodes=shape[3], num_bins=shape[2])

    def find_kernel():
        kernel = jax.jit(partial(histogram_tpu.histogram, **sizes))
        return re.findall(r"body\\22: \\22([^\\]+)", lower(kernel.trace(*rows)))

    single = find_kernel()
    with jax.enable_x64(True):
        compiled.cache_clear()
        check(*rows, *sizes.values())
        assert find_kernel() == single and len(single) == 1 and len(single[0]) > 1000


def test_training_is_lowered_with_the_kernel(monkeypatch):
    monkeypatch.setattr(histogram_tpu, "available", lambda: True)
    codes, y = jnp.zeros((64, 3), jnp.uint8), jnp.arange(64.0)

    def train(codes, y, key):
        return jb.boost(
            codes, y, jb.losses.squared_error, key, num_rounds=2, max_depth=3,
            max_bins=16,
        )  # fmt: skip

    traced = jax.jit(train).trace(codes, y, jax.random.key(0))
    assert lower(traced).count("@tpu_custom_call") == 2  # the root, and the levels
