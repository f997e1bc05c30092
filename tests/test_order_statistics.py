# SPDX-License-Identifier: Apache-2.0
"""Leaves that are medians and quantiles: l2 adds rows whose residual is 0."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb

ROWS = 240
QUANTILES = {
    tau: partial(jb.losses.quantile, tau=tau) for tau in (0.1, 0.5, 0.75, 0.99)
}
MEDIAN = jb.losses.absolute_error


def make_rows(seed=0):
    """Few distinct numbers, so that residuals are tied, and weights, some of them 0."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 6, (ROWS, 2)).astype(np.float32)
    y = (x[:, 0] + rng.integers(-8, 8, ROWS) / 4).astype(np.float32)
    return x, y, rng.integers(0, 4, ROWS).astype(np.float32)


def middle_minimum(points, loss_at):
    """The middle of the points where a convex piecewise linear loss is least."""
    losses = np.array([loss_at(point) for point in points])
    least = points[losses <= losses.min() + 1e-9 * np.abs(losses).max()]
    return (least.min() + least.max()) / 2


def one_tree(loss, l2, **settings):
    """One tree from the score 1, and the rows of each of its leaves."""
    x, y, weights = make_rows()
    model, _ = jb.fit(
        x, y, loss, sample_weight=weights, num_rounds=1, learning_rate=1.0, max_depth=3,
        init_score=1.0, l2=l2, **settings,
    )  # fmt: skip
    leaf, values = np.asarray(jb.leaf_indices(model, x))[:, 0], model.leaf_value[0, 0]
    groups = [leaf == number for number in np.unique(leaf)]
    assert len(groups) > 1
    return [(float(values[leaf[g][0]]), y[g] - 1.0, weights[g]) for g in groups]


@pytest.mark.parametrize(
    ("tau", "l2"), [(0.5, 0.0), (0.5, 1.0), (0.75, 2.5), (0.1, 1.0)]
)
def test_l2_adds_rows_at_rest(tau, l2):
    """The weighted quantile of the residuals and of l2 zeros."""

    def pinball(residual):
        return np.maximum(tau * residual, (tau - 1) * residual)

    for value, residual, weights in one_tree(QUANTILES[tau], l2):
        expected = middle_minimum(
            np.append(residual, 0.0),
            lambda c, r=residual, w=weights: w @ pinball(r - c) + l2 * pinball(-c),
        )
        assert value == pytest.approx(expected, abs=1e-6)


def test_a_row_at_rest_has_the_mean_slopes_of_rows_whose_slopes_differ():
    def slopes(y):
        return jnp.where(y > 2, 1.25, 0.25), jnp.where(y < 1, 0.75, 0.5)

    def loss(s, t):
        below, above = slopes(t)
        return jnp.where(s > t, above * (s - t), below * (t - s))

    _, y, weights = make_rows()
    mean = [np.average(part, weights=weights) for part in slopes(y)]

    for value, residual, w in one_tree(loss, 2.0):
        below, above = slopes(residual + 1)

        def total(c, r=residual, w=w, below=below, above=above):
            rows = np.where(c > r, above * (c - r), below * (r - c))
            return w @ rows + 2 * (mean[1] * c if c > 0 else -mean[0] * c)

        points = np.append(residual, 0.0)
        assert value == pytest.approx(middle_minimum(points, total), abs=1e-6)


@pytest.mark.parametrize("l2", [0.0, 2.0])
def test_leaves_of_a_hinge_loss_are_order_statistics(l2):
    """Each row has one kink, on one side of which its loss is constant."""
    x, _, weights = make_rows()
    rng = np.random.default_rng(1)
    y = np.where(x[:, 0] + rng.normal(size=ROWS) > 2.5, 1, -1).astype(np.float32)
    offset = (rng.integers(-16, 16, ROWS) / 8).astype(np.float32)
    model, history = jb.fit(
        x, y, jb.losses.hinge, sample_weight=weights, offset=offset, num_rounds=1,
        learning_rate=1.0, max_depth=3, init_score=0.0, l2=l2,
    )  # fmt: skip
    assert history.choices["min_child_samples"] == 20
    share = np.average(y > 0, weights=weights)
    leaf, values = np.asarray(jb.leaf_indices(model, x))[:, 0], model.leaf_value[0, 0]
    assert len(np.unique(leaf)) > 2
    for number in np.unique(leaf):
        t, w, start = (each[leaf == number] for each in (y, weights, offset))

        def total(c, t=t, w=w, start=start):
            at_rest = (1 - share) * c if c > 0 else -share * c
            return w @ np.maximum(0, 1 - t * (start + c)) + l2 * at_rest

        points = np.append(t - start, 0.0)
        value = float(values[number])
        assert value == pytest.approx(middle_minimum(points, total), abs=1e-5)


@pytest.mark.parametrize("settings", [dict(l1=2.0), dict(regularization="absolute")])
def test_nothing_else_shrinks_a_median(settings):
    """Neither l1 nor, in units of the loss, l2, which is 0 for the others."""
    l2 = 3.0 if "regularization" in settings else 0.0
    for value, residual, w in one_tree(MEDIAN, l2, **settings):
        medians = middle_minimum(residual, lambda c, r=residual, w=w: w @ abs(r - c))
        assert value == pytest.approx(medians, abs=1e-6)


def test_a_great_l2_leaves_the_scores_alone():
    for value, *_ in one_tree(MEDIAN, 1e12):
        assert value == 0


def test_a_scaled_loss_trains_the_same_medians():
    x, y, weights = make_rows()

    def train(factor):
        def loss(s, t):
            return factor * jnp.abs(s - t)

        model, _ = jb.fit(x, y, loss, sample_weight=weights, num_rounds=2, l2=1.5)
        return np.asarray(model.leaf_value)

    np.testing.assert_array_equal(train(1.0), train(2.0**20))


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize(("tau", "rows"), [(0.5, 3), (0.75, 7), (0.1, 19), (0.99, 20)])
def test_leaves_of_extreme_quantiles_have_more_rows(tau, rows):
    x, y, _ = make_rows()
    model, history = jb.fit(x, y, QUANTILES[tau], num_rounds=1, max_depth=3)
    assert history.choices["min_child_samples"] == rows
    leaf = np.asarray(jb.leaf_indices(model, x))
    assert min(np.bincount(tree)[np.unique(tree)].min() for tree in leaf.T) >= rows


def test_leaves_may_be_as_small_as_the_history_says():
    x = np.arange(64.0)[:, None]
    y = np.where(np.arange(64) % 8 < 3, 5.0, 0.0)
    model, _ = jb.fit(x, y, MEDIAN, num_rounds=1, max_depth=3)
    rows = np.bincount(np.asarray(jb.leaf_indices(model, x))[:, 0])
    assert rows[rows > 0].min() == 3
