# SPDX-License-Identifier: Apache-2.0
"""Leaf values and initial scores are the minimizers that they claim to be."""

import itertools
from functools import lru_cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from scipy import optimize
from tables import FULL

import jboost as jb
from jboost.boosting.auto import needs_minimizer
from jboost.numerics.exact import sum_channels
from jboost.objective.curvature import derivatives
from jboost.objective.evaluation import Objective
from jboost.objective.minimizers import find_kinks, find_minimizers
from jboost.objective.tracing import trace_loss
from jboost.trees.leaves import LeafProblems, find_steps, solve_leaves
from jboost.trees.tree import LeafSums

L = jb.losses
ROWS, LEAVES = 12, 3  # the last leaf stays empty unless a test fills it


def with_minimizers(objective, rows):
    if not needs_minimizer(objective.loss):
        return objective
    return objective._replace(minimizer=find_minimizers(objective, rows))


@partial(jax.jit, static_argnums=(0, 1))
def compiled_solve(traced, kind, constants, targets, leaf, weights, scores, penalty):
    """Values and Newton steps of leaves."""
    objective = with_minimizers(Objective(traced, constants, targets, (), None), ROWS)
    if traced.piecewise_linear:
        objective = objective._replace(kinks=find_kinks(objective, weights))
    gradient, curvature = derivatives(objective, scores[None], weights, "auto")
    rows = [jnp.where(weights > 0, weights * d[0], 0) for d in (gradient, curvature)]
    sums = LeafSums(*sum_channels(rows, leaf, LEAVES), penalty, penalty)
    newton = find_steps(sums, penalty, None, None)
    groups = LeafProblems(
        jnp.int32(0), scores[None], weights, None, leaf,
        jnp.broadcast_to(penalty, LEAVES),
    )  # fmt: skip
    return solve_leaves(objective, groups, newton, kind), newton.value


@lru_cache
def trace(loss):
    return trace_loss(loss, jnp.zeros(ROWS))


def solve(loss, targets, leaf=0, weights=1, scores=0, penalty=0, kind="exact"):
    numbers = (np.broadcast_to(a, ROWS) for a in (targets, weights, scores))
    targets, weights, scores = (jnp.asarray(a, jnp.float32) for a in numbers)
    leaf = jnp.asarray(np.broadcast_to(leaf, ROWS), jnp.int32)
    traced, constants = trace(loss)
    result = compiled_solve(
        traced, kind, constants, targets, leaf, weights, scores, jnp.float32(penalty)
    )
    return [np.asarray(values, np.float64) for values in result]


def middle_quantile(values, weights, tau):
    """The midpoint of all minimizers of the weighted pinball loss, by sorting."""
    order = np.argsort(values)
    order = order[weights[order] > 0]
    if len(order) == 0:
        return 0.0
    total = np.cumsum(weights[order])
    wanted = tau * total[-1]
    low = values[order][np.argmax(total >= wanted)]
    high = values[order][np.argmax(total > wanted)]
    return low / 2 + high / 2


quarters = st.integers(-40, 40).map(lambda k: k / 4)
rows_of = partial(st.lists, min_size=ROWS, max_size=ROWS)
weights_of_rows = rows_of(st.integers(0, 3)).map(np.array)
leaves_of_rows = rows_of(st.integers(0, 1)).map(np.array)


def quantile_quarter(s, t):
    return L.quantile(s, t, tau=0.25)


def pinball_by_maximum(s, t):
    return jnp.maximum(0.75 * (t - s), -0.25 * (t - s))


@pytest.mark.parametrize(
    ("loss", "tau"), [(L.absolute_error, 0.5), (pinball_by_maximum, 0.75)]
)
@settings(max_examples=25, deadline=None)
@given(
    targets=rows_of(quarters).map(np.array),
    scores=rows_of(quarters).map(np.array),
    weights=weights_of_rows,
    leaf=leaves_of_rows,
)
def test_leaves_are_weighted_quantiles(loss, tau, targets, scores, weights, leaf):
    values, _ = solve(loss, targets, leaf, weights, scores)
    for number in range(LEAVES):
        inside = leaf == number
        residual = (targets - scores)[inside]
        expected = middle_quantile(residual, weights[inside], tau)
        # Bisection ends between two neighbouring floats, of scores up to 20.
        np.testing.assert_allclose(values[number], expected, atol=4e-6)


def test_medians_equal_numpy():
    generator = np.random.default_rng(0)
    targets = generator.normal(size=ROWS)
    leaf = np.array([0] * 7 + [1] * 4 + [2])
    values, _ = solve(L.absolute_error, targets, leaf)
    expected = [np.median(targets[leaf == k]) for k in range(3)]
    np.testing.assert_allclose(values, expected, atol=1e-6)  # neighbouring floats


@partial(jax.jit, static_argnums=0)
def compiled_kinks(traced, constants, targets, weights):
    objective = Objective(traced, constants, targets, (), None)
    return find_kinks(with_minimizers(objective, 100), weights)


def kinks_of(loss, targets, weights=1):
    """Rows are repeated until they are a hundred: one shape, one program."""
    targets, weights = (
        jnp.asarray(np.resize(a, 100), jnp.float32) for a in (targets, weights)
    )
    traced, constants = trace_loss(loss, targets)
    assert traced.piecewise_linear
    return jax.tree.map(float, compiled_kinks(traced, constants, targets, weights))


def insensitive(s, t):
    return jnp.maximum(0.0, jnp.abs(s - t) - 0.5)


def bent_twice(s, t):
    """Convex, with its kink at the minimum and another one further out."""
    return jnp.maximum(jnp.abs(s - t), 3 * jnp.abs(s - t) - 4)


def by_row(s, t):
    """Slopes that depend on the target."""
    return jnp.where(t > 0, 2.0, 1.0) * jnp.abs(s - t)


def test_kinks_are_recognised():
    targets = np.append(np.random.default_rng(2).normal(size=99), 1e6)
    for loss, kind in [
        (L.absolute_error, 2), (quantile_quarter, 2), (by_row, 1), (insensitive, 0),
        (bent_twice, 0),
    ]:  # fmt: skip
        assert kinks_of(loss, targets).kind == kind
    found = kinks_of(quantile_quarter, targets)
    assert (found.left, found.right) == (0.25, 0.75)


def test_kinks_of_rows_that_do_not_count_do_not_count():
    targets = np.array([1.0, 2.0, np.nan, -3.0])
    assert kinks_of(L.absolute_error, targets, [1, 2, 0, 3]).kind == 2
    assert kinks_of(by_row, targets, [1, 2, 0, 0]).kind == 2
    assert kinks_of(by_row, targets, [1, 2, 0, 3]).kind == 1


@pytest.mark.parametrize("loss", [by_row, bent_twice])
def test_leaves_of_other_straight_losses_are_minima(loss):
    targets = np.random.default_rng(4).normal(scale=3.0, size=ROWS)
    weights = np.arange(ROWS) % 3 + 1.0
    values, _ = solve(loss, targets, 0, weights)

    def total(c):
        return jnp.sum(jnp.float32(weights) * loss(c, jnp.float32(targets)))

    least = jax.vmap(total)(jnp.linspace(-9, 9, 3601)).min()
    assert total(jnp.float32(values[0])) <= least * (1 + 1e-5)


def test_a_penalty_makes_it_no_median():
    targets = np.arange(ROWS) + 1.0
    values, _ = solve(L.absolute_error, targets, penalty=4.0)
    # Of sum |y - c| + 2 c^2: 4 c = 12 - 2 k, with k = 1 to 2 rows below c = 2.
    np.testing.assert_allclose(values[0], 2, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-15, 1, 1e15])
def test_medians_of_any_scale(scale):
    targets = scale * np.random.default_rng(1).normal(size=ROWS)
    values, _ = solve(L.absolute_error, targets, np.arange(ROWS) % 2)
    expected = [np.median(targets[k::2]) for k in range(2)]
    np.testing.assert_allclose(values[:2], expected, rtol=1e-5)  # float32 sums


@settings(max_examples=20, deadline=None)
@given(targets=rows_of(quarters).map(np.array), weights=weights_of_rows)
def test_leaf_of_squared_error_is_the_mean(targets, weights):
    if not weights.any():
        weights[0] = 1
    expected = np.average(targets, weights=weights)
    for kind in ("newton", "exact", "guarded"):
        values, _ = solve(L.squared_error, targets, 0, weights, kind=kind)
        # The exact solver takes slopes below 1e-6 of their parts for zero.
        np.testing.assert_allclose(values[0], expected, rtol=1e-5, atol=2e-5)


def minimise(loss, residual, weights, around):
    """The minimum by SciPy, in float64, of a convex function of one number."""

    def total(c):
        return float(np.sum(weights * loss(c - residual)))

    bounds = (np.min(around) - 1, np.max(around) + 1)
    return optimize.minimize_scalar(
        total, bounds=bounds, method="bounded", options=dict(xatol=1e-9)
    ).x


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.3, 3.0]),
    weights=weights_of_rows,
)
def test_leaf_of_huber_is_the_m_estimate(seed, spread, weights):
    weights = np.where(weights.any(), weights, 1)
    targets = spread * np.random.default_rng(seed).standard_t(3, size=ROWS)
    targets = targets.astype(np.float32)
    values, _ = solve(L.huber, targets, 0, weights)
    total = partial(total_loss, huber_by_hand, targets, weights)
    expected = minimise(huber_by_hand, targets, weights, targets)
    # Where the slope is 0 on an interval (all rows in the tails), any point is a
    # minimum; float32 slopes locate it to 1e-6 of their parts.
    assert total(values[0]) <= total(expected) * (1 + 1e-5) + 1e-6


def huber_by_hand(residual):
    magnitude = np.abs(residual)
    return np.where(magnitude <= 1, magnitude**2 / 2, magnitude - 0.5)


def total_loss(loss, targets, weights, c):
    return float(np.sum(weights * loss(c - targets)))


def test_poor_steps_of_many_rows_are_solved_for():
    """Where few rows have a poor step, they are gathered; the minimum is the same."""
    generator, num_leaves = np.random.default_rng(0), 12
    # Ten leaves of about 100 rows, and two of the others.
    leaf = generator.permutation(np.minimum(np.arange(40_000) // 100, 10 + 1))
    leaf[leaf > 10] += generator.integers(0, 2, np.sum(leaf > 10)) - 1
    weights = generator.integers(0, 3, leaf.size).astype(np.float32)
    traced, constants = trace_loss(L.log_cosh, jnp.asarray(weights))

    @jax.jit
    def run(targets, leaf, weights):
        objective = Objective(traced, constants, targets, (), None)
        scores = jnp.zeros((1, leaf.size), jnp.float32)
        channels = [d[0] for d in derivatives(objective, scores, weights, "exact")]
        sums = sum_channels(channels, leaf, num_leaves, weights)
        sums = LeafSums(*sums, sums[0], jnp.float32(0))
        newton = find_steps(sums, jnp.float32(0), None, None)
        penalty = jnp.zeros(num_leaves, jnp.float32)
        groups = LeafProblems(jnp.int32(0), scores, weights, None, leaf, penalty)
        return solve_leaves(objective, groups, newton, "guarded"), newton.value

    for far in (leaf < 5, leaf != 11):  # few rows, and most rows
        # Far from its minimum, log cosh hardly curves: Newton steps go much too far.
        targets = (generator.normal(size=leaf.size) + 6 * far).astype(np.float32)
        values, steps = run(targets, leaf.astype(np.int32), weights)
        for each in range(num_leaves):
            rows = leaf == each
            minimum = minimise(by_hand_log_cosh, targets[rows], weights[rows], targets)
            expected = minimum if np.any(far & rows) else steps[each]
            np.testing.assert_allclose(values[each], expected, rtol=1e-5, atol=1e-6)


def by_hand_log_cosh(residual):
    return np.logaddexp(residual, -residual) - np.log(2)


NOT_CONVEX = {
    "welsch": (L.welsch, lambda r: 1 - np.exp(-(r**2) / 2)),
    "cauchy": (L.cauchy, lambda r: np.log1p(r**2 / 2)),
    "huber": (L.huber, huber_by_hand),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("welsch", "guarded"),
        ("cauchy", "exact"),
        ("huber", "exact"),
    ],
)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 2.0, 30.0]),
    weights=weights_of_rows,
)
def test_leaves_are_no_worse_than_nothing(name, kind, seed, spread, weights):
    """Exact leaves: nor than the Newton step. Guarded: than 0 where it was checked."""
    loss, by_hand = NOT_CONVEX[name]
    targets = spread * np.random.default_rng(seed).standard_t(2, size=ROWS)
    targets = targets.astype(np.float32)
    values, step = solve(loss, targets, 0, weights, kind=kind)
    total = partial(total_loss, by_hand, targets, weights)
    noise = 4e-6 * (total(0) + total(values[0]))  # float32 sums: 1e-6 of the parts
    assert total(values[0]) <= total(0) + noise
    if kind == "exact":
        assert total(values[0]) <= total(step[0]) + noise


@pytest.mark.parametrize(
    ("name", "kind"),
    [("absolute", "exact"), ("huber", "exact"), ("welsch", "guarded")]
    + [("squared", kind) for kind in ("newton", "exact", "guarded", "line_search")],
)
def test_empty_leaves_add_nothing(name, kind):
    losses = dict(
        absolute=L.absolute_error, squared=L.squared_error, huber=L.huber,
        welsch=L.welsch,
    )  # fmt: skip
    targets = np.arange(ROWS) - 3.0
    weights = np.where(np.arange(ROWS) < 8, 1, 0)
    leaf = np.where(weights > 0, 0, 1)  # leaf 1 has rows, but none that counts
    values, _ = solve(losses[name], targets, leaf, weights, kind=kind)
    assert values[0] != 0
    assert values[1:].tolist() == [0, 0]


def test_l2_shrinks():
    targets = np.arange(ROWS) + 1.0
    penalties = [0.0, 1.0, 10.0, 1000.0]
    for loss, kind in [
        (L.squared_error, "newton"),
        (L.squared_error, "exact"),
        (L.huber, "exact"),
        (L.cauchy, "exact"),
    ]:
        values = [solve(loss, targets, penalty=p, kind=kind)[0][0] for p in penalties]
        assert all(a > b > 0 for a, b in itertools.pairwise(values))


def test_l2_of_squared_error_is_ridge():
    targets = np.arange(ROWS) + 1.0
    for kind in ("newton", "exact"):
        values, _ = solve(L.squared_error, targets, penalty=5.0, kind=kind)
        # Minimises sum r^2 + 5 c^2 / 2; the exact solver's slopes are good to 1e-6.
        expected = 2 * targets.sum() / (2 * ROWS + 5)
        np.testing.assert_allclose(values[0], expected, rtol=1e-5)


def shrink_to_parents(leaves, depth, gradient, curvature, penalty, parent):
    """Each leaf's rows, its value by Newton steps, and the value above it."""
    found = {}

    def visit(level, position, rows, value, above):
        if level == depth:
            found[position] = rows, value, above
            return
        right = (leaves[rows] >> (depth - 1 - level)) & 1
        for side in (0, 1):
            own, place = rows[right == side], 2 * position + side
            if len(own) == len(rows):  # no split
                visit(level + 1, place, rows, value, above)
            elif len(own) > 0:
                weight = curvature[own].sum() + penalty + parent
                step = -(gradient[own].sum() - parent * value) / weight
                visit(level + 1, place, own, step, value)

    root = -gradient.sum() / (curvature.sum() + penalty)
    visit(0, 0, np.arange(len(leaves)), root, None)
    return found


@pytest.mark.parametrize("solver", ["newton", "exact"])
def test_leaves_are_shrunk_to_their_parents(solver):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(250, 3)).astype(np.float32)
    y, weights = x[:, 0] + rng.normal(size=250) > 0, rng.integers(1, 4, 250)
    model, _ = jb.fit(
        x, y.astype(np.float32), jb.losses.logistic, num_rounds=1, learning_rate=1.0,
        sample_weight=weights, init_score=0.0, max_depth=4, max_leaves=7, l2=0.5,
        parent_rows=3.0, min_child_samples=2, leaf_solver=solver, max_bins=16,
        linear_leaves=False, **FULL,
    )  # fmt: skip
    leaves = np.asarray(jb.leaf_indices(model, x))[:, 0]
    gradient, curvature = weights * (0.5 - y), weights * 0.25
    penalty, parent = 0.5 * 0.25, 3 * 0.25  # the mean curvature of a row is 1/4
    found = shrink_to_parents(leaves, 4, gradient, curvature, penalty, parent)
    assert len(found) > 4
    for leaf, (rows, value, above) in found.items():
        if solver == "exact":

            def loss(v, rows=rows, above=above):
                values = np.logaddexp(0, v) - y[rows] * v
                penalties = penalty * v**2 + parent * (v - above) ** 2
                return np.sum(weights[rows] * values) + penalties / 2

            value = optimize.minimize_scalar(loss, tol=1e-9).x
        own = np.asarray(model.leaf_value)[0, 0, leaf]
        np.testing.assert_allclose(own, value, rtol=1e-4, atol=1e-5)


def test_line_search_of_squared_error_has_its_closed_form():
    """rho = sum(r f) / sum(f^2) for the tree's own values f."""
    generator = np.random.default_rng(3)
    targets, scores = generator.normal(size=(2, ROWS)).astype(np.float32)
    leaf = np.arange(ROWS) % LEAVES
    values, step = solve(
        L.squared_error, targets, leaf, scores=scores, penalty=7.0, kind="line_search"
    )
    f = step[leaf]
    rho = np.sum((targets - scores) * f) / np.sum(f**2)
    assert rho > 1.5  # the steps are shrunk by the penalty: rho undoes some of it
    np.testing.assert_allclose(values, rho * step, rtol=1e-5)  # float32


def test_line_search_finds_the_best_multiplier():
    targets = np.float32([-5, 1, 2, 9, 4, 4, 0, 1, 30, 2, 2, 1])
    leaf = np.arange(ROWS) % LEAVES
    values, step = solve(L.huber, targets, leaf, kind="line_search")
    rho = values[0] / step[0]
    np.testing.assert_allclose(values, rho * step, rtol=1e-5)

    def total(rho):
        return np.sum(huber_by_hand(rho * step[leaf] - targets))

    best = optimize.minimize_scalar(total, bounds=(0, 20), method="bounded").fun
    assert total(rho) <= best * (1 + 1e-6)


def scaled_pseudo_huber(factor):
    return lambda score, target: factor * L.pseudo_huber(score, target)


def quartic(score, target):  # without curvature at its minimum
    return jnp.square(jnp.square(score - target))


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_median_step_is_one_newton_step_of_the_curvature_at_the_minimum(factor):
    loss = scaled_pseudo_huber(jnp.float32(factor))
    generator = np.random.default_rng(3)
    targets, scores = 3 * generator.standard_t(2, size=(2, ROWS)).astype(np.float32)
    weights, leaf = generator.uniform(0.5, 2, ROWS), np.arange(ROWS) % 2
    values, _ = solve(loss, targets, leaf, weights, scores, kind="median_step")
    for number in range(2):
        inside = leaf == number
        residual, w = (targets - scores)[inside].astype(float), weights[inside]
        middle = middle_quantile(residual, w, 0.5)
        slope = (residual - middle) / np.sqrt(1 + (residual - middle) ** 2)
        expected = middle + np.average(slope, weights=w)
        np.testing.assert_allclose(values[number], expected, rtol=1e-5)  # float32
    assert values[2] == 0  # an empty leaf


def test_median_step_stays_at_the_median_where_it_would_not_help():
    targets = np.arange(ROWS) ** 2 / 10
    values, _ = solve(quartic, targets, kind="median_step")
    np.testing.assert_allclose(values[0], np.median(targets), rtol=1e-6)


def test_median_step_needs_minima():
    targets = np.arange(ROWS) % 2
    values, _ = solve(L.logistic, targets, kind="median_step")
    assert np.isnan(values[0])


def start(loss, targets, weights=None, offset=None):
    """The initial score."""
    column = np.arange(len(targets), dtype=np.float32)[:, None]
    model, _ = jb.fit(
        column, targets, loss, num_rounds=0, sample_weight=weights, offset=offset
    )
    return model.init_score


SAMPLE = np.random.default_rng(5).gamma(2.0, size=500).astype(np.float32)


@pytest.mark.parametrize(
    ("loss", "targets", "expected"),
    [
        (L.squared_error, SAMPLE, SAMPLE.mean()),
        (L.squared_error, SAMPLE + 1e4, SAMPLE.mean() + 1e4),
        (L.absolute_error, SAMPLE, np.median(SAMPLE)),
        (partial(L.quantile, tau=0.9), SAMPLE, np.quantile(SAMPLE, 0.9)),
    ],
    ids=["mean", "far mean", "median", "quantile"],
)  # fmt: skip
def test_initial_score(loss, targets, expected):
    """Those of "logistic" and "poisson" are in test_initial.py."""
    # Slopes are known to 1e-6 of their parts; the 0.9-quantile of 500 rows is an
    # interval of which NumPy takes another point than the middle.
    tolerance = 1e-2 if np.quantile(SAMPLE, 0.9) == expected else 1e-5
    np.testing.assert_allclose(start(loss, targets), expected, rtol=tolerance)


def test_initial_score_uses_weights_and_offsets():
    weights = np.where(np.arange(500) < 50, 3.0, 0.0)
    targets = np.where(weights > 0, SAMPLE, np.float32(np.nan))
    offset = np.linspace(0, 1, 500)
    difference = (SAMPLE - offset)[:50]
    found = start(L.squared_error, targets, weights, offset)
    np.testing.assert_allclose(found, difference.mean(), rtol=1e-5)  # float32
    found = start(L.absolute_error, targets, weights, offset)
    np.testing.assert_allclose(found, np.median(difference), rtol=1e-5)


def test_initial_score_of_welsch_is_not_led_astray():
    """The best of its minima lies among the many, whatever the few far away do."""
    generator = np.random.default_rng(7)
    cluster = 50 + 0.5 * generator.normal(size=430)
    targets = np.concatenate([cluster, np.full(70, 1e5)]).astype(np.float32)
    found = start(L.welsch, targets)
    np.testing.assert_allclose(found, cluster.mean(), atol=0.1)  # a robust mean
