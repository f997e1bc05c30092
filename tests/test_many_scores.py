# SPDX-License-Identifier: Apache-2.0
"""Many scores: nothing takes K^2 numbers for each row, and no program grows with K."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import make_columns

import jboost as jb
from jboost.boosting.derivatives import _direct_by_rows, _direct_by_scores
from jboost.objective.coupling import _find_of_many, find_coupling, find_dependent
from jboost.objective.evaluation import Objective, hessians
from jboost.objective.tracing import trace_loss

K, ROWS = 70, 200
CLASSES = np.random.default_rng(3).permutation(np.arange(ROWS) % K)


def one_against_the_others(score, target):
    signs = jnp.where(jnp.arange(len(score)) == target, 1.0, -1.0)
    return jnp.sum(jnp.logaddexp(0.0, -signs * score))


def focal(score, target):
    chance = jax.nn.softmax(score)[target]
    return -jnp.square(1 - chance) * jnp.log(chance)


def smoothed(score, target):
    chances = jax.nn.log_softmax(score)
    return -0.9 * chances[target] - 0.1 * jnp.mean(chances)


def spherical(score, target):
    chances = jax.nn.softmax(score)
    return -chances[target] / jnp.sqrt(jnp.sum(jnp.square(chances)))


def distance(score, target):
    return jnp.sqrt(1.0 + jnp.sum(jnp.square(score - target.astype(jnp.float32))))


def two_groups(score, target):
    half = len(score) // 2
    return sum(
        jax.nn.logsumexp(part) - part[target % half]
        for part in (score[:half], score[half:])
    )


LOSSES = [
    jb.losses.softmax, one_against_the_others, focal, smoothed, spherical, distance,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_the_diagonal_is_that_of_the_hessian(loss):
    traced, constants = trace_loss(loss, jnp.zeros(2, jnp.int32), K)
    assert traced.diagonal is not None
    score = jnp.asarray(np.random.default_rng(0).normal(size=K), jnp.float32)

    @jax.jit
    def find_both(target):
        own = traced.diagonal(constants, score, target, ())
        return jnp.diagonal(jax.hessian(loss)(score, target)), own

    for target in (0, 7):
        expected, found = find_both(jnp.int32(target))
        bound = 2e-6 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=bound)


def bind(loss, num_scores, targets):
    traced, constants = trace_loss(loss, targets, num_scores)
    scores = np.random.default_rng(1).normal(size=(num_scores, len(targets)))
    objective = Objective(traced, constants, jnp.asarray(targets), (), None)
    return objective, jnp.asarray(scores, jnp.float32), jnp.ones(len(targets))


def test_operations_across_scores_leave_the_diagonal_to_the_hessian():
    def cumulative(score, target):
        return jnp.sum(jnp.exp(jnp.cumsum(score)) * target)

    objective, scores, _ = bind(cumulative, K, np.ones(3, np.float32))
    assert objective.loss.diagonal is None
    rows, found = jax.jit(
        lambda scores: (
            jax.vmap(jax.hessian(cumulative))(scores.T, objective.targets),
            hessians(objective, scores),
        )
    )(scores)
    expected = np.diagonal(rows, axis1=1, axis2=2).T
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "loss", [jb.losses.softmax, one_against_the_others, distance, two_groups]
)
def test_products_find_what_matrices_do(loss):
    """Also for losses of few scores, where both can be compared."""
    objective, scores, weights = bind(loss, 6, np.arange(ROWS, dtype=np.int32) % 6)
    expected, found, dependent, rows = jax.jit(
        lambda *given: (
            find_coupling(objective, *given), _find_of_many(objective, *given),
            find_dependent(objective, given[0]),
            jax.vmap(jax.hessian(loss))(given[0].T, objective.targets),
        )
    )(scores, weights)  # fmt: skip
    if loss is two_groups:  # an eigenvector moves one of them
        assert np.all(found.competing)
    else:
        np.testing.assert_array_equal(found.competing, expected.competing)
        np.testing.assert_allclose(found.start, expected.start, rtol=1e-6)
    if loss is jb.losses.softmax:
        ratio = found.move / expected.move
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    others = np.where(np.eye(6, dtype=bool), 0.0, rows)
    np.testing.assert_array_equal(np.asarray(dependent).T, (others != 0).any(2))


def test_softmax_starts_at_the_logarithms_of_the_frequencies():
    """A class of weight 0 has no end; the others start in its absence."""
    weights = np.random.default_rng(0).uniform(0.5, 2, ROWS).astype(np.float32)
    model, _ = jb.fit(
        make_columns(), CLASSES, jb.losses.softmax, num_scores=K, num_rounds=0,
        sample_weight=weights,
    )  # fmt: skip
    frequency = np.bincount(CLASSES, weights, K) / weights.sum()
    found = np.asarray(model.init_score)
    found = found - np.log(np.sum(np.exp(found)))
    np.testing.assert_allclose(found, np.log(frequency), atol=2e-4)


@pytest.mark.usefixtures("full_search")
def test_many_scores_learn():
    """By separate trees and by shared ones."""
    x = make_columns()
    y = np.argsort(np.argsort(x[:, 0])) * K // ROWS
    call = dict(
        num_scores=K, num_rounds=2, max_depth=1, min_child_samples=1, init_score=0.0
    )
    for shared in (False, True):
        call["share_structure"] = shared
        model, history = jb.fit(x, y, jb.losses.softmax, **call)
        assert history.train_loss[-1] < history.train_loss[0] < np.log(K)
        scores = np.asarray(jb.predict(model, x), np.float64)
        own = np.take_along_axis(scores, y[:, None], axis=1)[:, 0]
        loss = np.mean(np.log(np.sum(np.exp(scores), axis=1)) - own)
        np.testing.assert_allclose(history.train_loss[-1], loss, rtol=1e-5)


def test_directions_by_rows_are_those_by_scores():
    """K = 40 of 256 rows, some of which weigh nothing."""
    random = np.random.default_rng(0)
    gradient = random.normal(size=(40, 256)).astype(np.float32)
    weights = random.uniform(0.5, 2.0, 256).astype(np.float32)
    weights[::7] = 0
    signs = np.sign(random.normal(size=256)).astype(np.float32)
    for competing in (True, False):
        (expected, units), (found, others) = (
            jax.jit(direct, static_argnums=3)(gradient, signs, weights, competing)
            for direct in (_direct_by_scores, _direct_by_rows)
        )
        bound = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=bound)
        np.testing.assert_array_equal(units, others)


def measure(num_scores, shared):
    """The number of operations of a round, and of numbers in the largest array."""
    rows = 64
    codes = jb.apply_bins(jb.fit_bins(make_columns()[:rows]), make_columns()[:rows])
    y = jnp.zeros(rows, jnp.int32)

    def run(codes, y):
        return jb.boost(
            codes, y, jb.losses.softmax, jax.random.key(0), num_scores=num_scores,
            num_rounds=1, max_depth=1, max_bins=8, share_structure=shared,
            init_score="auto" if shared else 0.0,
        )  # fmt: skip

    codes = jnp.minimum(codes, 7)
    count, largest = 0, 0

    def visit(jaxpr):
        nonlocal count, largest
        for equation in jaxpr.eqns:
            count += 1
            shapes = [v.aval for v in equation.outvars]
            largest = max([largest, *(getattr(a, "size", 0) for a in shapes)])
            for inner in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda each: hasattr(each, "eqns") or hasattr(each, "jaxpr"),
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(run)(codes, y).jaxpr)
    return count, largest / (rows * num_scores)


@pytest.mark.parametrize("shared", [False, True])
def test_neither_programs_nor_arrays_grow_with_the_square(shared):
    """Those of shared trees also search the start."""
    short, small = measure(600, shared)
    long, large = measure(1200, shared)
    assert long <= short + 40  # sums by halves take one more turn: 35
    assert large <= 1.1 * small
