# SPDX-License-Identifier: Apache-2.0
"""Sums of parts of the rows, joined: the bits of the sums of all rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jboost.entry.context import use_implementation
from jboost.kernels import calls, exact_sums
from jboost.numerics.exact import sum_channels, sum_rows

pytestmark = pytest.mark.skipif(
    not calls.available(), reason="the kernels were not built"
)
ODD = {"finite": (), "infinite": (jnp.inf,), "both": (jnp.inf, -jnp.inf, jnp.nan)}
SIZES = (0, 1, 70_001, 5)  # of the parts; the last one has only zeros


def make_values(count, odd, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, sum(SIZES))) * np.exp(rng.normal(size=(count, 1)))
    values[:, -5:] = 0.0
    values = values.astype(np.float32)
    values[0, 7 : 7 + len(odd)] = odd
    return values


def split(array):
    return np.split(array, np.cumsum(SIZES)[:-1], axis=-1)


def find_most(parts):
    return jnp.max(jnp.stack(parts), axis=0)


def make_times(repeated):
    """How many times each row counts; the rows of the last part do not."""
    if not repeated:
        return None, [None] * len(SIZES)
    times = np.random.default_rng(2).integers(1, 256, sum(SIZES)).astype(np.float32)
    times[-5:] = 0
    return times, [jnp.asarray(part) for part in split(times)]


def multiples(values, up, times):
    """Python's integers in place of the kernel's digits."""
    scaled = np.where(np.isfinite(values), values, 0).astype(np.float64) * float(up)
    whole = np.rint(scaled).astype(np.int64)
    whole = whole if times is None else whole * times.astype(np.int64)
    return sum(whole.tolist())


def as_weights(times):
    return None if times is None else jnp.asarray(times, jnp.float32)


def join(digits):
    """The integers that digits [..., 4] stand for."""
    return np.asarray(digits).astype(object) @ np.array([1 << 19 * i for i in range(4)])


@jax.jit
def join_sums(digits, greatest):
    return exact_sums.join_digits(exact_sums.carry(digits), greatest)


choose_unit = jax.jit(exact_sums.choose_unit)
GROUPS = 9
sum_digits = [
    jax.jit(add) for add in (exact_sums.sum_digits_natively, exact_sums.sum_digits)
]
find_greatest = jax.jit(
    partial(exact_sums.find_group_greatest_natively, num_groups=GROUPS)
)
sum_group_digits = [
    jax.jit(partial(add, num_groups=GROUPS))
    for add in (exact_sums.sum_group_digits_natively, exact_sums.sum_group_digits)
]
sum_all = jax.jit(sum_rows)
sum_groups = jax.jit(sum_channels, static_argnums=2)
CASES = pytest.mark.parametrize(
    ("odd", "repeated"), [("finite", False), ("infinite", True), ("both", True)]
)


@CASES
def test_sums_of_rows(odd, repeated):
    values, (times, own_times) = make_values(3, ODD[odd]), make_times(repeated)
    parts = [jnp.asarray(part) for part in split(values)]
    sizes, others = zip(*map(exact_sums.find_greatest_natively, parts), strict=True)
    greatest = find_most(sizes)
    finite = np.where(np.isfinite(values), values, 0)
    np.testing.assert_array_equal(greatest, np.abs(finite).max(axis=1))
    up = choose_unit(greatest)[0]
    wanted = [multiples(row, each, times) for row, each in zip(values, up, strict=True)]
    for add in sum_digits:
        digits = sum(
            add(part, greatest, own) for part, own in zip(parts, own_times, strict=True)
        )
        assert join(digits).tolist() == wanted
    total = join_sums(digits, greatest) + sum(others)
    for name in ("xla", "cpu"):
        with use_implementation(name):
            expected = sum_all(jnp.asarray(values), as_weights(times))
        np.testing.assert_array_equal(total, expected)


@CASES
def test_sums_by_group(odd, repeated):
    values = make_values(4, ODD[odd])
    times, own_times = make_times(repeated)
    group = np.random.default_rng(1).integers(-1, GROUPS + 1, values.shape[1])
    group = group.astype(np.int32)
    group[7:10] = [2, 2, 5]
    groups = [jnp.asarray(part) for part in split(group)]
    parts = [[jnp.asarray(row) for row in part] for part in split(values)]
    found = [
        find_greatest(own, None, *part) for own, part in zip(groups, parts, strict=True)
    ]
    sizes, others = zip(*found, strict=True)
    greatest = find_most(sizes)
    inside = (group >= 0) & (group < GROUPS) & np.isfinite(values)
    magnitudes = np.abs(np.where(inside, values, 0))
    np.testing.assert_array_equal(greatest, magnitudes.max(axis=1))
    up = choose_unit(greatest)[0]
    chosen = [
        (group == g, None if times is None else times[group == g])
        for g in range(GROUPS)
    ]
    for add in sum_group_digits:
        digits = sum(
            add(own, greatest, number, *part)
            for own, number, part in zip(groups, own_times, parts, strict=True)
        )
        for c in range(values.shape[0]):
            wanted = [multiples(values[c][rows], up[c], own) for rows, own in chosen]
            assert join(digits[c]).tolist() == wanted
    total = join_sums(digits, greatest[:, None]) + sum(others)
    for name in ("xla", "cpu"):
        with use_implementation(name):
            rows = [jnp.asarray(row) for row in values], jnp.asarray(group)
            expected = sum_groups(*rows, GROUPS, as_weights(times))
        np.testing.assert_array_equal(total, expected)
