# SPDX-License-Identifier: Apache-2.0
"""Every curvature with every leaf solver gives the documented leaf values.

The reference is naive NumPy in float64. The loss is Cauchy's, whose Hessian is negative
in the tails, so that no two curvatures are the same. The rows are assigned to leaves in
advance: nothing is compiled but the leaf values, all of them in one program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import FULL

import jboost as jb
from jboost.boosting.derivatives import choose_scaling, differentiate, start_round
from jboost.boosting.method import make_method
from jboost.boosting.round import find_own_steps, fit_leaves, sum_leaves
from jboost.boosting.settings import read_settings
from jboost.boosting.state import Arrays, Data, Problem, StartPoint, Static, start_state
from jboost.codes.codes import DenseCodes
from jboost.objective.evaluation import Objective
from jboost.objective.minimizers import find_minimizers
from jboost.objective.tracing import trace_loss
from jboost.trees.tree import LeafSums, Tree

ROWS, LEAVES, L2, START = 120, 4, 3.0, 0.25
RNG = np.random.default_rng(0)
TARGETS = RNG.standard_t(2, ROWS).astype(np.float32)
WEIGHTS = np.where(np.arange(ROWS) % 7 == 0, 0, RNG.uniform(0.2, 3, ROWS))
WEIGHTS = WEIGHTS.astype(np.float32)
LEAF = (np.arange(ROWS) % LEAVES).astype(np.int32)
CURVATURES = ("auto", "exact", "absolute", "secant", "unit")
REGULARIZATIONS = ("relative", "absolute")
STEPS = {
    (curvature, solver, regularization)
    for curvature in CURVATURES
    for solver in ("newton", "hessian")
    for regularization in REGULARIZATIONS
    if regularization == "relative" or curvature in ("auto", "unit")
}
SEARCHED = {
    ("unit", solver, "relative") for solver in ("line_search", "exact", "guarded")
}


def fill_leaves(combinations):
    """{combination: leaf values} of one round, learning rate 1, by the library."""
    traced, constants = trace_loss(jb.losses.cauchy, TARGETS)
    codes = DenseCodes(jnp.zeros((1, ROWS), jnp.uint8))
    offset = jnp.zeros((1, ROWS), jnp.float32)
    data = Data(codes, jnp.asarray(TARGETS), jnp.asarray(WEIGHTS), offset=offset)
    settings = {}
    for curvature, leaf_solver, regularization in combinations:
        chosen = read_settings(
            dict(
                max_depth=2, max_bins=4, l2=L2, min_child_samples=1, **FULL,
                regularization=regularization, curvature=curvature,
                leaf_solver=leaf_solver,
            )
        )  # fmt: skip
        settings[curvature, leaf_solver, regularization] = make_method(
            chosen, traced, codes, num_rows=ROWS, uniform=False, max_bins=4,
            num_features=1, categories=None,
        )  # fmt: skip
    empty = jnp.zeros(LEAVES, jnp.float32)
    nodes = jnp.zeros(LEAVES - 1, jnp.int32)
    sums = LeafSums(empty, empty, empty, jnp.float32(0))
    tree = Tree(nodes, nodes, nodes > 0, empty, sums)

    @jax.jit
    def fill(numbers):
        words = jnp.zeros(2, jnp.uint32)
        start = StartPoint(jnp.float32([START]), words)
        state, _ = start_state(traced, constants, data, start)
        values = []
        for (method, _), given in zip(settings.values(), numbers, strict=True):
            arrays = Arrays(constants, given, data)
            problem = Problem(Static(traced, method), arrays)
            _, raw = differentiate(problem, state)
            now = start_round(problem, choose_scaling(problem), state, raw)
            one = jax.tree.map(lambda array: array[0], now.trees())
            leaf = jnp.asarray(LEAF)
            summed = sum_leaves(problem, now, one, tree, leaf)
            newton = find_own_steps(problem, now, one, summed)
            fitted = fit_leaves(problem, 1.0, state, now, one, summed, leaf, newton)
            values.append(fitted.leaf_value)
        return values

    values = fill([numbers for _, numbers in settings.values()])
    return dict(zip(settings, map(np.asarray, values), strict=True))


def value(residual):
    return np.log1p(residual**2 / 2)


def slope(residual):
    return residual / (1 + residual**2 / 2)


RESIDUAL = START - TARGETS.astype(np.float64)


def mean(values):
    return np.average(values, weights=WEIGHTS)


def curve(curvature):
    """Curvature of every row, as docs/curvature.md says; targets are minimizers."""
    distance = abs(RESIDUAL)
    delta = mean(np.sqrt(distance)) ** 2
    hessian = (1 - RESIDUAL**2 / 2) / (1 + RESIDUAL**2 / 2) ** 2
    secant = abs(slope(RESIDUAL)) / np.sqrt(distance**2 + delta**2)
    rise = (slope(RESIDUAL + delta) - slope(RESIDUAL - delta)) / (2 * delta)
    rules = {
        "auto": np.maximum(secant, rise), "secant": secant, "exact": hessian,
        "absolute": abs(hessian), "unit": np.ones(ROWS),
    }  # fmt: skip
    return np.maximum(rules[curvature], 1e-6 * mean(np.maximum(rules[curvature], 0)))


def sums(values):
    return np.bincount(LEAF, WEIGHTS * values, LEAVES)


def newton(curvature, leaf_curvature, regularization="relative"):
    """The Newton steps, and what l2 penalises them by."""
    counted = leaf_curvature if curvature == "unit" else curvature
    relative = regularization == "relative" and counted != "unit"
    penalty = L2 * (mean(curve(counted)) if relative else 1.0)
    return -sums(slope(RESIDUAL)) / (sums(curve(leaf_curvature)) + penalty), penalty


def total(leaf, change, penalty=0.0):
    """The loss of a leaf after adding each change to the scores of its rows."""
    rows = np.flatnonzero(leaf == LEAF)
    moved = value(RESIDUAL[rows][:, None] + change)
    return WEIGHTS[rows] @ moved + penalty * change**2 / 2


@pytest.fixture(scope="module")
def found():
    return fill_leaves(sorted(STEPS | SEARCHED))


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("combination", sorted(STEPS), ids="-".join)
def test_newton_steps(found, combination):
    curvature, leaf_solver, regularization = combination
    leaf_curvature = "exact" if leaf_solver == "hessian" else curvature
    steps, _ = newton(curvature, leaf_curvature, regularization)
    np.testing.assert_allclose(found[combination], steps, rtol=2e-5)  # float32 sums
    others = [newton(other, other, regularization)[0] for other in CURVATURES]
    distance = [abs(found[combination] - other).max() for other in others]
    assert sorted(distance)[1] > 1e-3  # no two curvatures give the same


@pytest.mark.usefixtures("full_search")
def test_functional_gradient_descent(found):
    """Unit curvature with Newton leaves: -G / (n + l2), whatever the loss."""
    plain = -sums(slope(RESIDUAL)) / (sums(np.ones(ROWS)) + L2)
    for regularization in REGULARIZATIONS:
        steps = found["unit", "newton", regularization]
        np.testing.assert_allclose(steps, plain, rtol=1e-5)  # float32 sums


@pytest.mark.usefixtures("full_search")
def test_solvers_that_search(found):
    """Of unit curvature: a line search scales its steps, the others need auto's."""
    grid = np.linspace(-4, 4, 80001)
    steps, penalty = newton("unit", "auto")
    for leaf in range(LEAVES):
        exact = found["unit", "exact", "relative"][leaf]
        losses = total(leaf, grid, penalty)
        assert total(leaf, exact, penalty)[0] <= losses.min() + 1e-5
        guarded = found["unit", "guarded", "relative"][leaf]
        drop = total(leaf, 0.0) - total(leaf, steps[leaf], penalty)
        gradient = sums(slope(RESIDUAL))[leaf]
        kept = drop[0] >= 0.25 * -gradient * steps[leaf] / 2
        np.testing.assert_allclose(guarded, steps[leaf] if kept else exact, rtol=2e-5)
    steps, _ = newton("unit", "unit")
    multiples = found["unit", "line_search", "relative"] / steps
    np.testing.assert_allclose(multiples, multiples[0], rtol=1e-5)
    along = sum(total(leaf, grid * steps[leaf]) for leaf in range(LEAVES))
    best = sum(total(leaf, multiples[0] * steps[leaf]) for leaf in range(LEAVES))
    assert best[0] <= along.min() + 1e-5


def test_the_reference_knows_the_minimizers():
    traced, constants = trace_loss(jb.losses.cauchy, TARGETS)
    objective = Objective(traced, constants, jnp.asarray(TARGETS), (), None)
    np.testing.assert_array_equal(find_minimizers(objective, ROWS)[0], TARGETS)
