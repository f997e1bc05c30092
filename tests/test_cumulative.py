# SPDX-License-Identifier: Apache-2.0
"""Cumulative sums equal NumPy's, also of numbers of very different sizes."""

from functools import partial

import jax
import numpy as np
import pytest

from jboost.numerics.exact import cumulate, cumulate_levels

RANDOM = np.random.default_rng(0)


def draw(*shape):
    return np.exp(RANDOM.uniform(-60, 60, shape)).astype(np.float32)


def sum_by_hand(values, reverse):
    values = values.astype(np.float64)
    flip = np.s_[..., ::-1] if reverse else np.s_[...]
    return np.cumsum(values[flip], axis=-1)[flip]


@partial(jax.jit, static_argnums=0)
def both(function, values, slope):
    """Returns the sums, and a slope pulled back."""
    found, pull = jax.vjp(function, values)
    return found, pull(slope)[0]


@pytest.mark.parametrize(
    ("shape", "reverse"),
    [
        ((1,), False), ((16,), True), ((17,), False), ((300,), True), ((5000,), False),
        ((3, 2, 40), False), ((3, 2, 40), True),
    ],
)  # fmt: skip
def test_cumulative_sums(shape, reverse):
    values = draw(*shape)
    found, slope = both(partial(cumulate, reverse=reverse), values, values)
    np.testing.assert_allclose(found, sum_by_hand(values, reverse), rtol=2e-6)
    expected = sum_by_hand(values, not reverse)
    np.testing.assert_allclose(slope, expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("levels", "reverse"), [(1, False), (3, True), (4, False), (5, True), (10, True)]
)
def test_sums_start_anew(levels, reverse):
    values = draw(levels, 2**levels)
    one = draw(2**levels)
    found, slope = both(partial(cumulate_levels, reverse=reverse), values, one)
    expected = 0.0
    for level, row in enumerate(values):
        block = (-1, 2**level)
        expected += sum_by_hand(row.reshape(block), reverse).ravel()
        back = sum_by_hand(one.reshape(block), not reverse).ravel()
        np.testing.assert_allclose(slope[level], back, rtol=2e-6)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
