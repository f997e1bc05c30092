# SPDX-License-Identifier: Apache-2.0
"""What the defaults stand for, against NumPy."""

import chex
import numpy as np
import pytest

import jboost as jb

ROWS, RATE, L2 = 1024, 0.1, 3.0


def make_table():
    """One feature of two values; 2 % of the rows are positive, most of them right."""
    rng = np.random.default_rng(3)
    x = np.repeat([0.0, 1.0], [800, ROWS - 800])[:, None]
    y = (rng.uniform(size=ROWS) < np.where(x[:, 0] == 0, 0.01, 0.06)).astype(np.float32)
    return x, y


X, Y = make_table()


def fit(loss=jb.losses.logistic, x=X, y=Y, **settings):
    return jb.fit(x, y, loss, **dict(num_rounds=2, max_depth=1) | settings)


def follow(gradient, hessian, concentration, start):
    """Returns the scores after two rounds of stumps, by the formulas of the docs."""
    score, first = np.full(ROWS, start), None
    for _ in range(2):
        g, h = gradient(score), hessian(score)
        mean = h.mean()
        first = mean if first is None else first
        unit = concentration * (mean if mean >= first else np.sqrt(mean * first))
        for side in (X[:, 0] == 0, X[:, 0] == 1):
            score[side] -= RATE * g[side].sum() / (h[side].sum() + L2 * unit)
    return score


@pytest.mark.usefixtures("full_search")
def test_rows_of_a_logistic_loss_count_by_their_information():
    """The unit of l2 starts at 1/4, however rare positive rows are."""
    share = Y.mean(dtype=np.float64)

    def probability(score):
        return 1 / (1 + np.exp(-score))

    expected = follow(
        lambda score: probability(score) - Y,
        lambda score: probability(score) * (1 - probability(score)),
        1 / (4 * share * (1 - share)),
        np.log(share / (1 - share)),
    )
    model, history = fit()
    assert history.choices["l2"] == L2
    np.testing.assert_allclose(jb.predict(model, X), expected, rtol=1e-5)  # float32


@pytest.mark.usefixtures("full_search")
def test_rows_count_alike_where_some_have_minima():
    """Two rows in a hundred hold most of the curvature, and still count as two."""
    counts = 1.0 + 50 * Y
    expected = follow(
        lambda score: np.exp(score) - counts,
        lambda score: _secant(score, counts),
        1.0,
        np.log(counts.mean()),
    )
    model, _ = fit(jb.losses.poisson, y=counts, curvature="secant")
    # Minima are found to within 1e-6 or so.
    np.testing.assert_allclose(jb.predict(model, X), expected, rtol=1e-4)


def _secant(score, counts):
    distance = np.abs(score - np.log(counts))
    delta = np.sqrt(distance).mean() ** 2
    return np.abs(np.exp(score) - counts) / np.hypot(distance, delta)


def test_copies_of_rows_are_weights():
    rows = np.r_[np.arange(ROWS), np.arange(0, ROWS, 2)]
    weights = np.where(np.arange(ROWS) % 2 == 0, 2.0, 1.0)
    settings = dict(min_child_samples=1, max_depth=4)
    copied, _ = fit(x=X[rows], y=Y[rows], **settings)
    weighted, _ = fit(sample_weight=weights, **settings)
    np.testing.assert_allclose(
        jb.predict(weighted, X), jb.predict(copied, X), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("rows", "settings", "least"),
    [
        (49, {}, 1),
        (250, {}, 5),
        (2000, {}, 10),
        (2000, dict(rows_per_threshold=0), 20),
        (250, dict(regularization="absolute"), 1),
        (250, dict(loss=jb.losses.absolute_error), 3),
        (250, dict(sample_weight=(np.arange(250) < 100).astype(float)), 2),
    ],
)
def test_least_rows_of_a_leaf(rows, settings, least):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 2))
    y = x[:, 0] + rng.normal(size=rows)
    settings = dict(loss=jb.losses.squared_error) | settings
    model, history = jb.fit(x, y, num_rounds=3, max_depth=4, **settings)
    assert history.choices["min_child_samples"] == least
    counted = settings.get("sample_weight", np.ones(rows)) > 0
    leaves = np.asarray(jb.leaf_indices(model, x[counted]))
    for tree in leaves.reshape(counted.sum(), -1).T:
        assert np.unique(tree, return_counts=True)[1].min() >= least


def test_absolute_has_the_numbers_of_xgboost():
    named = dict(l2=1.0, min_child_weight=1.0, min_child_samples=1)
    plain, _ = fit(regularization="absolute", max_depth=4)
    spelled, _ = fit(regularization="absolute", max_depth=4, **named)
    chex.assert_trees_all_equal(plain, spelled)


def test_choices_given_back_train_the_same_model():
    model, history = fit(max_depth=4)
    chosen = {name: history.choices[name] for name in ("l2", "min_child_samples")}
    again, _ = fit(max_depth=4, **chosen)
    chex.assert_trees_all_equal(again, model)
