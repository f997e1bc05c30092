# SPDX-License-Identifier: Apache-2.0
"""sample: exact counts, only what is eligible, every subset equally often."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jboost.numerics.random import derive_seeds, sample

WORDS = jnp.array([11, 22], jnp.uint32)
NUM_SEEDS = 4000
take = jax.jit(sample)
take_many = jax.jit(jax.vmap(sample, (0, None, None)))


def draw(eligible, fraction, words=WORDS):
    return np.asarray(take(words, jnp.asarray(eligible), jnp.float32(fraction)))


def draw_many(eligible, fraction):
    seeds = derive_seeds(WORDS, jnp.arange(NUM_SEEDS, dtype=jnp.int32))
    return np.asarray(take_many(seeds, jnp.asarray(eligible), jnp.float32(fraction)))


def some_rows(num_rows=1000, share=0.6):
    return np.random.default_rng(0).random(num_rows) < share


@pytest.mark.parametrize("fraction", [1e-30, 0.0004, 0.25, 0.5, 0.99999, 1.0, 1.5])
def test_count_is_exact_and_chosen_entries_are_eligible(fraction):
    eligible = some_rows()
    chosen = draw(eligible, fraction)
    assert not np.any(chosen & ~eligible)
    assert not draw(np.zeros(1000, bool), fraction).any()
    assert chosen.sum() == max(1, round(min(np.float32(fraction), 1) * eligible.sum()))


def test_the_only_eligible_entry_is_chosen():
    eligible = np.arange(1000) == 777
    np.testing.assert_array_equal(draw(eligible, 0.1), eligible)


def test_padding_changes_nothing():
    eligible = some_rows()
    padded = np.pad(eligible, (0, 500))
    np.testing.assert_array_equal(draw(padded, 0.3)[:1000], draw(eligible, 0.3))


def test_smaller_fractions_choose_subsets():
    eligible = some_rows()
    assert not np.any(draw(eligible, 0.2) & ~draw(eligible, 0.6))


def test_seeds_differ_and_repeat():
    eligible = np.ones(1000, bool)
    first = draw(eligible, 0.5)
    np.testing.assert_array_equal(first, draw(eligible, 0.5))
    for other in (WORDS + jnp.uint32(1), WORDS[::-1]):
        shared = np.sum(first & draw(eligible, 0.5, other))
        # Hypergeometric: mean 250, deviation 7.9; six of them.
        assert abs(shared - 250) <= 48


def test_every_subset_is_equally_likely():
    subsets = list(combinations(range(6), 3))
    eligible = np.array([True, True, False, True, True, True, False, True])
    chosen = draw_many(eligible, 0.5)[:, eligible]
    seen = [tuple(np.flatnonzero(row).tolist()) for row in chosen]
    counts = np.array([seen.count(subset) for subset in subsets])
    assert counts.sum() == NUM_SEEDS
    expected = NUM_SEEDS / len(subsets)
    # Chi-square of 19 degrees of freedom: beyond 50.8 once in ten thousand.
    assert np.square(counts - expected).sum() / expected <= 50.8


def test_every_entry_is_equally_likely():
    chosen = draw_many(np.ones(50, bool), 0.2)
    counts, expected = chosen.sum(axis=0), NUM_SEEDS * 0.2
    # Exactly 10 of 50 each time: the counts' covariance is that of a multinomial
    # times (1 - 0.2) 50 / 49. Of 49 degrees of freedom: beyond 96.0 once in 10^4.
    variance = expected * 0.8 * 50 / 49
    assert np.square(counts - expected).sum() / variance <= 96.0


def test_vmap_and_bare_calls_agree():
    eligible = np.ones(50, bool)
    seeds = derive_seeds(WORDS, jnp.arange(3, dtype=jnp.int32))
    many = draw_many(eligible, 0.2)
    for entry in range(3):
        bare = sample(seeds[entry], jnp.asarray(eligible), 0.2)
        np.testing.assert_array_equal(many[entry], bare)
