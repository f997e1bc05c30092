# SPDX-License-Identifier: Apache-2.0
"""Conformal intervals have the promised coverage, and are those of the formula."""

from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.stats import betabinom, binomtest

import jboost as jb

RNG = np.random.default_rng(3)
ROWS = 600
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
NOISE = np.exp(X[:, 1]) * RNG.normal(size=ROWS)
Y = X[:, 0] + NOISE
TRAIN, CAL, NEW = slice(200), slice(200, 400), slice(400, None)
SETTINGS = dict(num_rounds=20, max_depth=3)
ALPHA = 0.1


def two_quantiles(score, target):
    """Pinball losses of the 5 % and 95 % quantiles."""
    low = jb.losses.quantile(score[0], target, tau=0.05)
    return low + jb.losses.quantile(score[1], target, tau=0.95)


def normal(score, target):
    return score[1] + ((target - score[0]) * jnp.exp(-score[1])) ** 2 / 2


def mean_and_scale(score):
    return score[0], jnp.exp(score[1])


@cache
def train(kind):
    """The model of a kind of score, and what its predictions need."""
    if kind == "absolute":
        return jb.fit(X[TRAIN], Y[TRAIN], **SETTINGS)[0], {}
    losses = dict(quantiles=(two_quantiles, (-2, 2)), normalized=(normal, (0, 0)))
    loss, start = losses[kind]
    settings = dict(num_scores=2, init_score=start, **SETTINGS)
    model, _ = jb.fit(X[TRAIN], Y[TRAIN], loss, **settings)
    return model, dict(inverse_link=mean_and_scale) if loss is normal else {}


KINDS = ("absolute", "quantiles", "normalized")


def rank_of(number, alpha=ALPHA):
    return int(np.ceil(np.round((number + 1) * (1 - alpha), 9)))


def reference(kind, target, found):
    """The score of a row, and the interval with a margin, from two predictions."""
    first, second = found
    if kind == "absolute":
        return np.abs(target - first), lambda q: (first - q, first + q)
    if kind == "normalized":
        return np.abs(target - first) / second, lambda q: (
            first - q * second, first + q * second,
        )  # fmt: skip
    return (
        np.maximum(first - target, target - second),
        lambda q: (first - q, second + q),
    )


def predict_pair(kind, x):
    model, options = train(kind)
    found = jb.predict(model, x, **options)
    if kind == "absolute":
        return np.asarray(found, np.float64), None
    pair = found if isinstance(found, tuple) else found.T
    return tuple(np.asarray(part, np.float64) for part in pair)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_are_those_of_the_formula(kind):
    model, options = train(kind)
    intervals = jb.conformal(model, X[CAL], Y[CAL], alpha=ALPHA, score=kind, **options)
    scores, _ = reference(kind, Y[CAL], predict_pair(kind, X[CAL]))
    number = len(scores)
    margin = np.sort(scores)[rank_of(number) - 1]
    assert intervals.margin == margin
    level = rank_of(number) / number
    assert margin == np.quantile(scores, level, method="inverted_cdf")
    inside = scores <= margin
    assert rank_of(number) == inside.sum()
    _, make = reference(kind, Y[NEW], predict_pair(kind, X[NEW]))
    for end, expected in zip(
        intervals.predict_interval(X[NEW]), make(margin), strict=True
    ):
        np.testing.assert_allclose(end, expected, rtol=1e-12)
    assert "alpha=0.1" in repr(intervals)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [19, 60])
def test_coverage_is_as_promised(kind, number):
    """Of 200 draws of calibration rows and one new row, and of many new rows."""
    rng = np.random.default_rng(number)
    repeats, news = 200, 50
    # The model is a function of rows that are drawn here: two predictions and a target.
    first, hits = 0, []
    chance = rank_of(number) / (number + 1)

    def predict(rows):
        center, scale = rows[:, 0], np.exp(rows[:, 1])
        if kind == "absolute":
            return center
        pair = (center, scale) if kind == "normalized" else (center - scale, center)
        return np.stack(pair, 1)

    for _ in range(repeats):
        rows = rng.normal(size=(number + news, 2))
        targets = rows[:, 0] + rng.standard_t(2, size=len(rows))
        intervals = jb.conformal(
            predict, rows[:number], targets[:number], alpha=ALPHA, score=kind
        )
        low, high = intervals.predict_interval(rows[number:])
        inside = (low <= targets[number:]) & (targets[number:] <= high)
        first += int(inside[0])
        hits.append(inside.sum())
    assert chance >= 1 - ALPHA
    assert binomtest(first, repeats, chance).pvalue > 1e-3
    law = betabinom(news, rank_of(number), number + 1 - rank_of(number))
    error = (np.mean(hits) - law.mean()) / (law.std() / np.sqrt(repeats))
    assert abs(error) < 4


def test_shares_of_rows_count_as_the_fractions_that_they_stand_for():
    """Of 8 rows, 1 / 9 allows one miss in nine, though its nearest float is smaller."""
    for number in range(1, 60):
        targets = RNG.permutation(number) + 1.0
        for misses in range(1, number + 1):
            intervals = jb.conformal(
                np.zeros_like, targets, targets, alpha=misses / (number + 1)
            )
            assert intervals.margin == number + 1 - misses


def test_any_model_and_table():
    table = pd.DataFrame(X, columns=["a", "b", "c"])
    model, mean = jb.fit(table[TRAIN], Y[TRAIN], **SETTINGS)[0], train("absolute")[0]
    made = [
        jb.conformal(model, table[CAL], pd.Series(Y[CAL]), alpha=ALPHA),
        jb.conformal(mean, X[CAL], Y[CAL].tolist(), alpha=ALPHA),
        jb.conformal(partial(jb.predict, mean), X[CAL], Y[CAL], alpha=ALPHA),
    ]
    margins = [float(each.margin) for each in made]
    assert margins[0] == margins[1] == margins[2]
    low, high = made[0].predict_interval(table[NEW])
    assert ((low <= Y[NEW]) & (Y[NEW] <= high)).mean() > 0.8
    assert low.dtype == np.float64


def test_two_models_of_quantiles_make_intervals():
    models = [
        jb.fit(X[TRAIN], Y[TRAIN], partial(jb.losses.quantile, tau=tau), **SETTINGS)[0]
        for tau in (0.05, 0.95)
    ]

    def predict(x):
        return tuple(jb.predict(model, x) for model in models)

    intervals = jb.conformal(predict, X[CAL], Y[CAL], alpha=ALPHA, score="quantiles")
    low, high = intervals.predict_interval(X[NEW])
    assert ((low <= Y[NEW]) & (Y[NEW] <= high)).mean() > 0.8


def test_offsets_and_several_targets():
    offset = X[:, 2]
    pair = np.stack([Y, 100 * Y], 1)
    model, _ = jb.fit(X[TRAIN], Y[TRAIN], offset=offset[TRAIN], **SETTINGS)
    given = jb.conformal(model, X[CAL], Y[CAL], alpha=ALPHA, offset=offset[CAL])
    scores = np.abs(Y[CAL] - np.asarray(jb.predict(model, X[CAL], offset=offset[CAL])))
    assert given.margin == np.sort(scores)[rank_of(200) - 1]
    low, high = given.predict_interval(X[NEW], offset=offset[NEW])
    np.testing.assert_allclose(high - low, 2 * given.margin)
    both, _ = jb.fit(X[TRAIN], pair[TRAIN], **SETTINGS)
    intervals = jb.conformal(both, X[CAL], pair[CAL], alpha=ALPHA)
    low, high = intervals.predict_interval(X[NEW])
    assert intervals.margin.shape == (2,) and low.shape == (200, 2)
    assert ((low <= pair[NEW]) & (pair[NEW] <= high)).mean(axis=0).min() > 0.8


def test_intervals_that_are_too_wide_narrow_down_to_a_point():
    """Predicted quantiles far apart: the margin is negative."""
    targets = np.linspace(-1, 1, 99)
    wide = np.array([[-3.0, 3.0]] * 99 + [[-0.1, 0.1]])
    intervals = jb.conformal(
        lambda x: x, wide[:99], targets, alpha=ALPHA, score="quantiles"
    )
    assert intervals.margin < 0
    low, high = intervals.predict_interval(wide)
    assert (low <= high).all() and low[-1] == high[-1] == 0


REFUSALS = {
    "alpha": (dict(alpha=0.0), "alpha must be"),
    "few rows": (dict(alpha=0.001), r"at least 1 / 201 with 200 calibration rows"),
    "word": (dict(score="cqr"), "score must be one of"),
    "one number": (dict(score="quantiles"), "two numbers predicted"),
    "two numbers": (
        dict(model="quantiles"), "needs one number|shape of the predictions",
    ),
    "lengths": (dict(y_cal=Y[NEW][:-1]), "y_cal must have the shape"),
    "missing": (dict(y_cal=np.where(X[CAL, 0] > 1, np.nan, 0)), "y_cal must be finite"),
    "scales": (
        dict(model=lambda x: x[:, :2], score="normalized"), "be positive, got -",
    ),
    "link": (
        dict(model=lambda x: x[:, 0], inverse_link=jnp.exp), "model is a function",
    ),
    "predictions": (dict(model=lambda x: x[:, 0] * np.nan), "predictions must be fin"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_arguments_are_refused(name):
    given, message = REFUSALS[name]
    call = dict(model="absolute", x_cal=X[CAL], y_cal=Y[CAL], alpha=ALPHA) | given
    if isinstance(call["model"], str):
        call["model"], _ = train(call["model"])
    with pytest.raises(ValueError, match=message):
        jb.conformal(**call)


def test_weights_are_not_taken():
    call = dict(x_cal=X[CAL], y_cal=Y[CAL], alpha=ALPHA, sample_weight=np.ones(200))
    with pytest.raises(TypeError, match="sample_weight"):
        jb.conformal(np.zeros_like, **call)
