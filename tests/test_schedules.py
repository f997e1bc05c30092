# SPDX-License-Identifier: Apache-2.0
"""optax schedules are learning rates wherever a learning rate is accepted."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import SMALL, make_regression

import jboost as jb

X, Y = make_regression()
SQUARES = jb.losses.squared_error
SCHEDULES = {
    "constant": optax.constant_schedule(0.25),
    "exponential": optax.exponential_decay(0.5, transition_steps=1, decay_rate=0.5),
    "cosine": optax.cosine_decay_schedule(0.5, decay_steps=10),
    "warmup": optax.warmup_cosine_decay_schedule(0.125, 0.5, 2, decay_steps=10),
    "joined": optax.join_schedules(
        [optax.constant_schedule(0.5), optax.linear_schedule(0.25, 0.125, 4)], [3]
    ),
}
COSINE = SCHEDULES["cosine"]


def as_numbers(schedule):
    """The same rates as Python numbers, which are tested without optax."""
    rates = [float(schedule(number)) for number in range(SMALL["num_rounds"])]
    return lambda number: rates[number]


@pytest.fixture(scope="module")
def codes():
    return jb.apply_bins(jb.fit_bins(X), X)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_fit(schedule):
    found, expected = (
        jb.fit(X, Y, learning_rate=rate, **SMALL)[0]
        for rate in (schedule, as_numbers(schedule))
    )
    chex.assert_trees_all_equal(found, expected, strict=True)
    # Trees of the first round do not depend on its rate, but for the scale of leaves.
    whole, _ = jb.fit(X, Y, learning_rate=1.0, num_rounds=1, max_depth=3)
    scaled = float(schedule(0)) * whole.leaf_value[0]
    np.testing.assert_allclose(found.leaf_value[0], scaled, rtol=1e-6)


def test_boost(codes):
    def run(schedule):
        key = jax.random.key(0)
        return jb.boost(codes, Y, SQUARES, key, learning_rate=schedule, **SMALL)

    expected = run(as_numbers(COSINE))
    chex.assert_trees_all_equal(jax.jit(lambda: run(COSINE))(), expected, strict=True)


def test_boost_step(codes):
    """A loop of steps calls the schedule itself."""
    key = jax.random.key(0)
    state = jb.init(codes, Y, SQUARES, key)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, rate):
        return jb.boost_step(state, codes, Y, SQUARES, learning_rate=rate, max_depth=3)

    for number in range(SMALL["num_rounds"]):
        state, _ = step(state, COSINE(number))
    _, scores = jb.boost(codes, Y, SQUARES, key, learning_rate=COSINE, **SMALL)
    chex.assert_trees_all_equal(state.scores, scores)


def test_cross_validate_and_sweep():
    settings = dict(folds=4, **SMALL)
    found, expected = (
        jb.cross_validate(X, Y, SQUARES, learning_rate=rate, l2=1.0, **settings)
        for rate in (COSINE, as_numbers(COSINE))
    )
    chex.assert_trees_all_equal(found.validation_loss, expected.validation_loss)
    points = {"l2": [1.0, 5.0]}
    swept = jb.sweep(X, Y, SQUARES, points, learning_rate=COSINE, **settings)
    # A batch of points is another program.
    np.testing.assert_allclose(swept.mean[0], expected.mean, rtol=1e-5)


def test_a_schedule_must_give_finite_numbers():
    with pytest.raises(ValueError, match=r"learning_rate\(0\).*nan"):
        jb.fit(X, Y, learning_rate=lambda number: jnp.nan, **SMALL)
