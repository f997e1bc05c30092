# SPDX-License-Identifier: Apache-2.0
"""Sums of parts of the rows, joined: the bits of the sums of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jboost.entry.implementation import use_implementation
from jboost.kernels import leaves_cpu, library, reduce_cpu, sums_xla
from jboost.numerics.sums import sum_channels, sum_rows

pytestmark = pytest.mark.skipif(
    not library.available(), reason="the kernels were not built"
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


def multiples(values, up):
    """Python's integers in place of the kernel's digits."""
    scaled = np.where(np.isfinite(values), values, 0).astype(np.float64) * float(up)
    return sum(int(each) for each in np.rint(scaled))


def join(digits):
    """The integers that digits [..., 4] stand for."""
    return np.asarray(digits).astype(object) @ np.array([1 << 19 * i for i in range(4)])


@pytest.mark.parametrize("odd", ODD)
def test_sums_of_rows(odd):
    values = make_values(3, ODD[odd])
    parts = [jnp.asarray(part) for part in split(values)]
    sizes, others = zip(*map(reduce_cpu.find_greatest, parts), strict=True)
    greatest = find_most(sizes)
    finite = np.where(np.isfinite(values), values, 0)
    np.testing.assert_array_equal(greatest, np.abs(finite).max(axis=1))
    up = sums_xla.choose_unit(greatest)[0]
    digits = sum(reduce_cpu.sum_digits(part, greatest) for part in parts)
    wanted = [multiples(row, each) for row, each in zip(values, up, strict=True)]
    assert join(digits).tolist() == wanted
    total = sums_xla.join_digits(sums_xla.carry(digits), greatest) + sum(others)
    for name in library.IMPLEMENTATIONS:
        with use_implementation(name):
            expected = jax.jit(sum_rows)(jnp.asarray(values))
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("odd", ODD)
def test_sums_by_group(odd):
    num_groups, values = 9, make_values(6, ODD[odd])
    group = np.random.default_rng(1).integers(-1, num_groups + 1, values.shape[1])
    group = group.astype(np.int32)
    group[7:10] = [2, 2, 5]
    groups = [jnp.asarray(part) for part in split(group)]
    parts = [[jnp.asarray(row) for row in part] for part in split(values)]
    found = [
        leaves_cpu.find_greatest(own, *part, num_groups=num_groups)
        for own, part in zip(groups, parts, strict=True)
    ]
    sizes, others = zip(*found, strict=True)
    greatest = find_most(sizes)
    inside = (group >= 0) & (group < num_groups) & np.isfinite(values)
    magnitudes = np.abs(np.where(inside, values, 0))
    np.testing.assert_array_equal(greatest, magnitudes.max(axis=1))
    up = sums_xla.choose_unit(greatest)[0]
    digits = sum(
        leaves_cpu.sum_digits(own, greatest, *part, num_groups=num_groups)
        for own, part in zip(groups, parts, strict=True)
    )
    for c in range(values.shape[0]):
        wanted = [multiples(values[c][group == g], up[c]) for g in range(num_groups)]
        assert join(digits[c]).tolist() == wanted
    total = sums_xla.join_digits(sums_xla.carry(digits), greatest[:, None])
    total += sum(others)
    for name in library.IMPLEMENTATIONS:
        with use_implementation(name):
            expected = jax.jit(sum_channels, static_argnums=2)(
                [jnp.asarray(row) for row in values], jnp.asarray(group), num_groups
            )
        np.testing.assert_array_equal(total, expected)
