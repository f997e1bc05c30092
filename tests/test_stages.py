# SPDX-License-Identifier: Apache-2.0
"""Stages that run from the host do what one traced program does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations

import jboost as jb
from jboost.boosting.state import Data, StartPoint, start_state
from jboost.entry.programs import compiled
from jboost.entry.stages import (
    branch,
    map_points,
    repeat,
    repeat_while,
    run_in_stages,
    stage,
    switch,
    unless_idle,
)
from jboost.objective.tracing import trace_loss
from jboost.trees.initial import MedianStart

ROWS = 300
RNG = np.random.default_rng(5)
TARGETS = RNG.normal(size=ROWS).astype(np.float32)
WEIGHTS = RNG.uniform(0, 2, ROWS).astype(np.float32)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
STARTS = {
    "poisson": (jb.losses.poisson, np.round(np.exp(TARGETS)), MedianStart()),
    # It has kinks, and curves down.
    "own": (
        lambda s, t: 1 - jnp.exp(-jnp.maximum(jnp.abs(s - t) - 0.3, 0.0)),
        TARGETS, None,
    ),
}  # fmt: skip


@stage
def add(one, other, *, twice=False):
    return one + other * (2 if twice else 1)


@stage
def is_less(one, other):
    return one < other


def run_everything(number):
    """Returns 2^k - 1 over 100, and what else the tools compute."""
    one = np.int32(1)
    grown = repeat_while(
        lambda n: is_less(n, np.int32(100)), lambda n: add(one, n, twice=True), number
    )
    summed = repeat(4, lambda turn, n: add(n, turn), number)
    mapped = map_points(lambda n: add(n, one), np.arange(3, dtype=np.int32))
    less = is_less(number, np.int32(5))
    chosen = branch(less, lambda n: n, lambda n: add(n, n), grown)
    taken = switch(summed % 2, [lambda: grown, lambda: summed])
    kept = unless_idle(less, lambda n: jnp.where(less, n + 1, n), number)
    return grown, summed, mapped, chosen, taken, kept


@pytest.mark.parametrize("number", [0, 5, 6])
def test_tools_do_what_those_of_lax_do(number):
    number = np.int32(number)
    with run_in_stages():
        found = run_everything(number)
    wanted = jax.jit(run_everything)(number)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stage_is_part_of_what_is_traced():
    text = str(jax.make_jaxpr(lambda n: add(n, n, twice=True))(1))
    assert "jit" not in text and text.count("mul") == text.count("add") == 1


@pytest.mark.parametrize("name", STARTS)
def test_a_start_in_stages_is_that_of_one_program(name):
    """As test_routes.py says of models that fit and boost train, of other losses."""
    loss, targets, begin = STARTS[name]
    targets = np.float32(targets)
    traced, constants = trace_loss(loss, targets)
    offset = np.linspace(-1, 1, ROWS, dtype=np.float32)[None]
    rows = map(jax.device_put, (targets, WEIGHTS))
    data = Data(None, *rows, offset=jax.device_put(offset))
    start = StartPoint(begin, np.zeros(2, np.uint32))
    whole, _ = compiled(start_state, traced)(constants, data, start)
    with run_in_stages():
        state, _ = start_state(traced, constants, data, start)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        # A loss may round differently by one unit within a program of its own.
        np.testing.assert_allclose(one, other, rtol=2e-7, atol=1e-7)


def test_a_new_loss_compiles_little_of_its_own():
    """The rest of the start and the growth of trees serve all losses."""

    def fit(power):
        jb.fit(X, TARGETS, lambda s, t: jnp.abs(s - t) ** power + (s - t) ** 2,
               num_rounds=1, max_depth=2)  # fmt: skip

    fit(4)
    with Compilations() as compilations:
        fit(6)
    own = {name.removeprefix("jit(").removesuffix(")") for name in compilations.names}
    start, rounds = (
        {"_loss_values", "_raw_gradients", "_hessian_matrices"},
        {"derive", "finish"},
    )
    assert own <= start | rounds, own
