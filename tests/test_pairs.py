# SPDX-License-Identifier: Apache-2.0
"""Sums over pairs of rows, whose derivatives are written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.losses.ranking import logistic_pairs
from jboost.objective import coupled
from jboost.objective.group_tracing import trace_group_loss
from jboost.tables.groups import make_groups

SIZE = 7


def make_pairs(first, seed=0):
    """Scores, and the weights of pairs of the first rows, some of them 0."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=2.0, size=SIZE).astype(np.float32)
    above = np.triu(rng.normal(size=(SIZE, SIZE)) * (rng.random((SIZE, SIZE)) < 0.8), 1)
    return jnp.array(scores), jnp.asarray((above - above.T)[:first], jnp.float32)


def by_definition(scores, weights):
    """Pair by pair, with JAX's own derivatives."""
    first, total = len(weights), 0.0
    for i in range(first):
        for j in range(i + 1, SIZE):
            w = weights[i, j]
            loss = jnp.log1p(jnp.exp(-jnp.sign(w) * (scores[i] - scores[j])))
            total += jnp.abs(w) * loss
    return total


@pytest.mark.parametrize("first", [SIZE, 3])
def test_sums_over_pairs_and_their_derivatives(first):
    scores, weights = make_pairs(first)

    def make(function):
        of_weights = jax.grad(function, 1)

        def every(scores, weights):
            # The definition reads each pair once, above the diagonal. At a weight of 0
            # there is a kink.
            changes = jnp.triu(of_weights(scores, weights) - turn(of_weights), 1)
            return (
                function(scores, weights),
                jax.grad(function)(scores, weights),
                jax.hessian(function)(scores, weights),
                jnp.where(weights == 0, 0.0, changes),
            )

        def turn(of_weights):
            found = of_weights(scores, weights)[:, :first]
            return jnp.pad(found.T, ((0, 0), (0, SIZE - first)))

        return jax.jit(every)

    expected = make(by_definition)(scores, weights)
    for found, wanted in zip(
        make(logistic_pairs)(scores, weights), expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_derivatives_of_the_gradient_in_weights():
    scores, weights = make_pairs(SIZE)

    along = jnp.cos(jnp.arange(SIZE, dtype=jnp.float32))

    def slope(function):
        def scaled(factor):
            return jax.grad(function)(scores, factor * weights) @ along

        return float(jax.jit(jax.grad(scaled))(1.5))

    assert slope(logistic_pairs) == pytest.approx(slope(by_definition), rel=1e-5)


@pytest.mark.parametrize("name", ["pairwise_logistic", "lambda_rank", "plain"])
def test_products_with_kept_numbers_equal_those_computed_again(name):
    """Groups of two widths, and so many that they are evaluated in chunks."""

    def plain(scores, targets, *, where):
        pairs = (targets[:, None] > targets[None, :]) & where[:, None] & where[None, :]
        away = jnp.tanh(scores[:, None] - scores[None, :])
        return jnp.sum(jnp.where(pairs, jnp.square(away - 1), 0.0))

    rng = np.random.default_rng(1)
    sizes = [17] * 40 + [40] * 400
    ids = np.repeat(np.arange(len(sizes)), sizes)
    targets = jnp.asarray(rng.integers(0, 4, len(ids)), jnp.int32)
    scores, direction = jnp.asarray(rng.normal(size=(2, 1, len(ids))), jnp.float32)
    groups = jax.device_put(make_groups(rng.permutation(ids)))
    widths = [table.rows.shape[1] for table in groups.tables]
    loss = plain if name == "plain" else getattr(jb.losses, name)
    traced, constants = trace_group_loss(loss, targets, widths)
    assert all(traced.by_pairs)
    objective = coupled.GroupObjective(
        traced, constants, targets, jnp.ones(len(ids)), groups, (),
        jnp.zeros(2, jnp.uint32),
    )  # fmt: skip

    def gradient(scores):
        return coupled.group_gradient(objective, scores)

    @jax.jit
    def both(scores, direction):
        multiply = coupled.linearize_by_group(objective, scores)
        assert multiply is not None
        return multiply(direction), jax.jvp(gradient, (scores,), (direction,))[1]

    found, wanted = both(scores, direction)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_products_keep_no_more_than_fits(monkeypatch):
    monkeypatch.setattr(coupled, "_MOST_KEPT", 3 * 20**2)
    targets = jnp.arange(60, dtype=jnp.int32)
    groups = jax.device_put(make_groups(np.arange(60) // 20))
    traced, constants = trace_group_loss(jb.losses.pairwise_logistic, targets, [20])
    objective = coupled.GroupObjective(
        traced, constants, targets, jnp.ones(60), groups, (), jnp.zeros(2, jnp.uint32)
    )
    assert coupled.linearize_by_group(objective, jnp.zeros((1, 60))) is None
