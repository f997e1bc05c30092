# SPDX-License-Identifier: Apache-2.0
"""Gradients through training against central differences with the same splits.

The reference trains in float64 NumPy, with losses and derivatives written by hand,
with the leaves that jboost found for the rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.objective.evaluation import Objective
from jboost.objective.minimizers import locate_minimizers
from jboost.objective.tracing import trace_loss
from jboost.trees.leaves import LeafProblems, solve_groups

N, F, T, DEPTH = 160, 3, 4, 2
KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, F)).astype(np.float32)
SIGNAL = X[:, 0] + np.sin(2 * X[:, 1])
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)
MIXED = X.copy()
MIXED[::7, 0] = np.nan
MIXED[:, 2] = np.floor(np.abs(3 * X[:, 2]))
OF_CATEGORIES = jb.fit_bins(MIXED, categorical=[2])
TABLES = {
    "plain": (X, BINS, CODES, {}),
    "mixed": (
        MIXED, OF_CATEGORIES, jb.apply_bins(OF_CATEGORIES, MIXED),
        dict(categories=OF_CATEGORIES.categories),
    ),
}  # fmt: skip
DIRECTION = {
    "p": np.float32(1), "l2": np.float32(1), "start": np.float32(1),
    "rate": RNG.normal(size=T).astype(np.float32),
    "weight": RNG.normal(size=N).astype(np.float32),
    "y": RNG.normal(size=N).astype(np.float32),
    "offset": RNG.normal(size=N).astype(np.float32),
}  # fmt: skip


class Reference(NamedTuple):
    """A loss by hand: value, gradient and Hessian of (F, y, p), and own minimizer."""

    value: object
    gradient: object
    hessian: object
    minimizer: object = None
    quadratic: bool = False


def bisect(slope, low=-60.0, high=60.0):
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return middle


def middle_quantile(key, weight, level):
    """The middle of all minima of sum w (level (r - c)+ + (1 - level) (c - r)+)."""
    order = np.argsort(key)
    key, mass = key[order], np.cumsum(weight[order])
    wanted, slack = level * mass[-1], 1e-6 * mass[-1]
    low = key[np.searchsorted(mass, wanted - slack)]
    return (low + key[np.searchsorted(mass, wanted + slack, side="right")]) / 2


def curvature_of(loss, score, y, p, weight):
    """The policy "auto" of docs/curvature.md."""
    hessian = loss.hessian(score, y, p)
    if loss.quadratic:
        return hessian
    if loss.minimizer is None:
        return np.abs(hessian)
    distance = np.abs(score - loss.minimizer(y, p))
    delta = (weight @ np.sqrt(distance) / weight.sum()) ** 2
    rise = loss.gradient(score + delta, y, p) - loss.gradient(score - delta, y, p)
    secant = np.abs(loss.gradient(score, y, p)) / np.hypot(distance, delta)
    return np.maximum(rise / (2 * delta), secant)


def concentrate(loss, gradient, curvature, weight):
    """N / N_eff of docs/curvature.md."""
    if loss.quadratic or loss.minimizer is not None:
        return 1.0
    share = weight / weight.sum()
    parts = (curvature, gradient**2)
    information = sum(part / (share @ part) for part in parts) / 2
    return share @ information**2


def replay(loss, inputs, leaves, *, solver, bags=None):
    """Trains with given leaves; returns the scores of the rows."""
    y, weight, p, start = (inputs.get(key) for key in ("y", "weight", "p", "start"))
    score = inputs["offset"].copy()
    if start is None:

        def total(c):
            return weight @ loss.gradient(inputs["offset"] + c, y, p)

        start = bisect(total)
        if solver == "quantile":
            start = middle_quantile(y - score, weight, p)
    score = score + start
    first = None
    for turn, leaf in enumerate(leaves.T):
        gradient = loss.gradient(score, y, p)
        curvature = curvature_of(loss, score, y, p, weight)
        mean = weight @ curvature / weight.sum()
        if first is None:
            first, unit = mean, concentrate(loss, gradient, curvature, weight)
        mean = unit * (mean if mean >= first else np.sqrt(mean * first))
        penalty, added = inputs["l2"] * mean, np.zeros(N)
        for node in np.unique(leaf):
            here = leaf == node
            w = weight * here if bags is None else weight * here * bags[turn]
            step = -w @ gradient / (w @ curvature + penalty)
            if solver == "quantile":
                key, w = (y - score)[w > 0], w[w > 0]  # and l2 zeros
                value = middle_quantile(
                    np.append(key, 0), np.append(w, inputs["l2"]), p
                )
            elif solver == "newton":
                value = step
            else:
                value = guard(loss, score, y, p, w, step, penalty, solver)
            added[here] = value
        score = score + inputs["rate"][turn] * added
    return score


def guard(loss, score, y, p, w, step, penalty, solver):
    def change(c):
        values = loss.value(score + c, y, p) - loss.value(score, y, p)
        return w @ values + penalty * c**2 / 2

    promised = (w @ loss.gradient(score, y, p)) * -step / 2
    if solver == "guarded" and -change(step) >= 0.25 * promised:
        return step
    return bisect(lambda c: w @ loss.gradient(score + c, y, p) + penalty * c)


def huber(p):
    def loss(score, target):
        size = jnp.abs(score - target)
        return jnp.where(size < p, size**2 / 2, p * (size - p / 2))

    return loss


def square(p):
    return lambda s, t: p * (s - t) ** 2


def logistic(p):
    return lambda s, t: jnp.logaddexp(0.0, p * s) - t * p * s


HUBER = Reference(
    lambda s, y, p: np.where(
        abs(s - y) < p, (s - y) ** 2 / 2, p * (abs(s - y) - p / 2)
    ),
    lambda s, y, p: np.clip(s - y, -p, p),
    lambda s, y, p: (abs(s - y) < p) * 1.0,
    lambda y, p: y,
)
SQUARED = Reference(
    lambda s, y, p: p * (s - y) ** 2,
    lambda s, y, p: 2 * p * (s - y),
    lambda s, y, p: 2 * p + 0 * s,
    quadratic=True,
)
LOGISTIC = Reference(
    lambda s, y, p: np.logaddexp(0, p * s) - y * p * s,
    lambda s, y, p: p / (1 + np.exp(-p * s)) - y * p,
    lambda s, y, p: p**2 * np.exp(-p * s) / (1 + np.exp(-p * s)) ** 2,
)
POISSON = Reference(
    lambda s, y, p: np.exp(p * s) - y * p * s,
    lambda s, y, p: p * np.exp(p * s) - y * p,
    lambda s, y, p: p**2 * np.exp(p * s),
    lambda y, p: np.log(y) / p,
)
QUANTILE = Reference(
    None,
    lambda s, y, p: np.where(s < y, -p, 1 - p),
    lambda s, y, p: 0 * s,
    lambda y, p: y,
)


class Case(NamedTuple):
    loss: object
    reference: Reference
    p: float
    y: np.ndarray
    settings: dict
    solver: str
    start: float | None = None
    implementation: str | None = None
    table: str = "plain"


NOISY = (SIGNAL + RNG.standard_t(3, size=N) * 0.4).astype(np.float32)
COUNTS = RNG.poisson(np.exp(SIGNAL / 3)).astype(np.float32) + np.float32(0.5)
BINARY = (SIGNAL + RNG.logistic(size=N) * 0.5 > 0).astype(np.float32)
CASES = {
    "squared in plain XLA": Case(
        square, SQUARED, 0.7, NOISY,
        dict(subsample=0.6, leaf_rows="sample", colsample_bynode=0.7), "newton",
        implementation="xla", table="mixed",
    ),
    "huber": Case(huber, HUBER, 0.6, NOISY, {}, "guarded", 0.1),
    "poisson, exact": Case(
        lambda p: lambda s, t: jnp.exp(p * s) - t * p * s,
        POISSON, 1.2, COUNTS, dict(leaf_solver="exact"), "exact",
    ),
    "quantile": Case(
        lambda p: lambda s, t: jnp.maximum(p * (t - s), (1 - p) * (s - t)),
        QUANTILE, 0.3, NOISY, {}, "quantile",
    ),
    "logistic": Case(
        logistic, LOGISTIC, 1.3, BINARY, dict(leaf_solver="newton"), "newton", 0.2
    ),
}  # fmt: skip


def run(case, inputs):
    start = dict(init_score=inputs["start"]) if "start" in inputs else {}
    codes, settings = TABLES[case.table][2:]
    return jb.boost(
        codes, inputs["y"], case.loss(inputs["p"]), KEY, num_rounds=T, max_depth=DEPTH,
        learning_rate=lambda i: inputs["rate"][i], l2=inputs["l2"],
        sample_weight=inputs["weight"], offset=inputs["offset"],
        implementation=case.implementation, **start, **settings, **case.settings,
    )  # fmt: skip


def find_bags(subsample):
    """Draws the rows of each round as jboost does."""
    from jboost.numerics.random import derive_seeds, sample, seed_from_key

    seeds = derive_seeds(
        jnp.asarray(seed_from_key(KEY)), 2 * jnp.arange(T, dtype=jnp.int32)
    )
    return [np.asarray(sample(s, jnp.ones(N, bool), subsample)) for s in seeds]


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_central_differences(name):
    case = CASES[name]
    # The derivative of sqrt |F - F*| loses digits where a row is close to its minimum.
    rng = np.random.default_rng(2)
    inputs = dict(
        p=np.float32(case.p), l2=np.float32(1.5),
        rate=np.linspace(0.5, 0.2, T, dtype=np.float32),
        weight=rng.uniform(0.5, 2, N).astype(np.float32), y=case.y,
        offset=rng.normal(size=N).astype(np.float32) * np.float32(0.1),
    )  # fmt: skip
    if case.start is not None:
        inputs["start"] = np.float32(case.start)
    measure = rng.normal(size=N).astype(np.float32)
    share = case.settings.get("subsample")
    if share is None:
        inputs["weight"][:5] = 0.0  # their derivative is that of the sums

    def measured(inputs):
        trees, scores = run(case, inputs)
        return jnp.mean(measure * scores**2), trees

    (value, trees), gradient = jax.jit(jax.value_and_grad(measured, has_aux=True))(
        jax.tree.map(jnp.asarray, inputs)
    )
    x, bins, *_ = TABLES[case.table]
    leaves = np.asarray(jb.leaf_indices(jb.to_ensemble(trees, bins), x))
    again = partial(
        replay, case.reference, leaves=leaves, solver=case.solver,
        bags=find_bags(share) if share else None,
    )  # fmt: skip

    def reference(**changed):
        doubles = {key: np.float64(a) for key, a in (inputs | changed).items()}
        return np.mean(measure.astype(np.float64) * again(doubles) ** 2)

    np.testing.assert_allclose(value, reference(), rtol=1e-4)
    for key in inputs:
        if name == "quantile" and key in ("p", "weight", "l2"):
            # It is piecewise constant in these.
            np.testing.assert_allclose(gradient[key], 0.0, atol=1e-5)
            continue
        wide = np.float64(DIRECTION[key]) * 1e-6
        difference = reference(**{key: inputs[key] + wide}) - reference(
            **{key: inputs[key] - wide}
        )
        got = np.sum(gradient[key] * DIRECTION[key])
        np.testing.assert_allclose(
            got, difference / 2e-6, rtol=1e-4, atol=1e-6, err_msg=key
        )


def test_steps_have_the_derivatives_of_boost():
    """Backward through the steps, forward through the loop."""
    loss, rate = jb.losses.squared_error, jnp.float32(0.4)

    def whole(rate):
        _, scores = jb.boost(
            CODES, NOISY, loss, KEY, num_rounds=3, max_depth=DEPTH, learning_rate=rate,
            l2=rate,
        )  # fmt: skip
        return jnp.mean(scores**3)

    def stepped(rate):
        state = jb.init(CODES, NOISY, loss, KEY)
        for _ in range(3):
            state, _ = jb.boost_step(
                state, CODES, NOISY, loss, max_depth=DEPTH, learning_rate=rate, l2=rate
            )
        return jnp.mean(state.scores**3)

    slope = jax.jit(lambda rate: jax.jvp(whole, (rate,), (rate / rate,))[1])(rate)
    np.testing.assert_allclose(jax.jit(jax.grad(stepped))(rate), slope, rtol=1e-5)


def test_hessians_and_batches_of_gradients():
    """Forward over reverse under vmap, against differences of values and gradients.

    Rows of weight zero may hold anything.
    """
    lost = np.arange(N) < 9
    y = jnp.asarray(np.where(lost, np.nan, BINARY))
    weight = jnp.asarray(np.where(lost, 0.0, 1.0), jnp.float32)

    def total(numbers, weight):
        p, rate = numbers
        trees, scores = jb.boost(
            CODES, y, logistic(p), KEY, num_rounds=2, max_depth=DEPTH, init_score=0.0,
            learning_rate=rate, leaf_solver="newton", sample_weight=weight,
        )  # fmt: skip
        return jnp.mean(scores**3, where=~lost), trees.trees

    def slopes(numbers):
        slope = jax.value_and_grad(total, (0, 1), has_aux=True)
        (value, trees), found = slope(numbers, weight)
        return (value, found), trees

    @jax.jit
    @jax.vmap
    def along(numbers):
        return jax.jvp(slopes, (numbers,), (jnp.array([0.0, 1.0]),), has_aux=True)

    rates = jnp.array([0.4, 0.402, 0.398])
    found, moved, trees = along(jnp.stack([jnp.full(3, 0.9), rates], 1))
    for array in (trees.feature, trees.threshold):
        assert all((each == array[0]).all() for each in array)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(moved), strict=True)
    for each, change in pairs:
        assert np.isfinite(each).all() and each.any()
        difference = (each[1] - each[2]) / 4e-3
        np.testing.assert_allclose(change[0], difference, rtol=1e-3, atol=1e-5)


def nll(score, target):
    return score[1] + (target - score[0]) ** 2 * jnp.exp(-2 * score[1]) / 2


@pytest.mark.usefixtures("full_search")
def test_two_scores_agree_with_central_differences():
    """Normal likelihood, steps of plain gradient descent: -G / (weight + l2)."""

    def measured(inputs):
        trees, scores = jb.boost(
            CODES, inputs["y"], nll, KEY, num_rounds=T, max_depth=DEPTH, num_scores=2,
            learning_rate=inputs["rate"], sample_weight=inputs["weight"],
            l2=inputs["l2"], init_score=inputs["start"], curvature="unit",
            leaf_solver="newton",
        )  # fmt: skip
        return jnp.mean(scores**2), trees

    def reference(leaves, y, weight, rate, l2, start):
        scores = np.tile(np.float64(start), (N, 1))
        for turn in range(T):
            off, narrow = scores[:, 0] - y, np.exp(-2 * scores[:, 1])
            slopes = (off * narrow, 1 - off**2 * narrow)
            scores = scores.copy()
            for k, slope in enumerate(slopes):
                for node in np.unique(leaves[:, turn, k]):
                    here = leaves[:, turn, k] == node
                    step = weight[here] @ slope[here] / (weight[here].sum() + l2)
                    scores[here, k] -= rate * step
        return np.mean(scores**2)

    inputs = dict(
        y=NOISY, weight=np.linspace(0.5, 2, N, dtype=np.float32), rate=np.float32(0.3),
        l2=np.float32(2), start=np.array([0.2, 0.3], np.float32),
    )  # fmt: skip
    slopes, trees = jax.jit(jax.grad(measured, has_aux=True))(
        jax.tree.map(jnp.asarray, inputs)
    )
    leaves = np.asarray(jb.leaf_indices(jb.to_ensemble(trees, BINS), X))
    for key, slope in slopes.items():
        direction = np.float64(DIRECTION["y"] if np.ndim(slope) else 1)
        direction = np.resize(direction, slope.shape)
        around = [
            reference(leaves, **{**inputs, key: inputs[key] + d * direction})
            for d in (1e-6, -1e-6)
        ]
        got, wanted = np.sum(slope * direction), (around[0] - around[1]) / 2e-6
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6, err_msg=key)


def test_start_of_two_scores_moves_with_mean_and_deviation():
    def start(y, weight):
        state = jb.init(CODES, y, nll, KEY, num_scores=2, sample_weight=weight)
        return state.init_score

    def formula(y, weight):
        mean = np.average(y, weights=weight)
        return np.array([mean, np.log(np.average((y - mean) ** 2, weights=weight)) / 2])

    here = NOISY, np.linspace(0.5, 2, N, dtype=np.float32)
    along = DIRECTION["y"], DIRECTION["weight"]
    got = jax.jit(lambda *ends: jax.jvp(start, ends[:2], ends[2:])[1])(*here, *along)
    ends = [
        formula(
            *(
                np.float64(a) + d * np.float64(b)
                for a, b in zip(here, along, strict=True)
            )
        )
        for d in (1e-6, -1e-6)
    ]
    np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-6, rtol=1e-4)


# Losses of one row, and where they are least.
OWN_MINIMA = {
    "smooth": (lambda p, s, t: jnp.exp(p * s) - t * p * s, lambda y, p: np.log(y) / p),
    "kink": (lambda p, s, t: jnp.abs(s - p * t) + (s - p * t) ** 2, lambda y, p: p * y),
    "edge": (lambda p, s, t: jnp.maximum(0.0, p * t - s), lambda y, p: p * y),
    "flat": (lambda p, s, t: (s - p * t) ** 4, lambda y, p: p * y),
    "cusp": (lambda p, s, t: jnp.sqrt(jnp.abs(s - t * p)), lambda y, p: p * y),
    "none": (lambda p, s, t: jnp.exp(-p * s) * t, None),
}


@jax.jit
def find_minimizers(number, p, y):
    """Of the losses above, which share a program."""
    losses = [partial(loss, p) for loss, _ in OWN_MINIMA.values()]
    traced, constants = trace_loss(lambda s, t: jax.lax.switch(number, losses, s, t), y)
    return locate_minimizers(Objective(traced, constants, y, (), None), len(y))[0]


@jax.jit
def move_minimizers(number, p, y, by_p, by_y):
    find = partial(find_minimizers, number)
    return jax.jvp(find, (p, y), (by_p, by_y))


@pytest.mark.parametrize("name", OWN_MINIMA)
def test_minimizers_of_rows_move_as_formulas_say(name):
    formula = OWN_MINIMA[name][1]
    number = jnp.int32([*OWN_MINIMA].index(name))
    p, y = jnp.float32(1.7), jnp.asarray(np.linspace(0.5, 4, 11), jnp.float32)
    move = partial(move_minimizers, number, p, y)
    at, by_p = move(jnp.float32(1), jnp.zeros(11))
    _, by_y = move(jnp.float32(0), jnp.ones(11))
    if formula is None:
        assert np.isinf(at).all() and not by_p.any() and not by_y.any()
        return
    y, p = np.float64(y), 1.7
    np.testing.assert_allclose(at, formula(y, p), rtol=1e-5, atol=1e-6)
    wanted = (formula(y, p + 1e-6) - formula(y, p - 1e-6)) / 2e-6
    np.testing.assert_allclose(by_p, wanted, rtol=1e-4, atol=1e-5)
    wanted = (formula(y + 1e-6, p) - formula(y - 1e-6, p)) / 2e-6
    np.testing.assert_allclose(by_y, wanted, rtol=1e-4, atol=1e-5)


GROUP = np.arange(N) % 8


@jax.jit
def move_kinks(penalty, p, y, by_p, by_y):
    """Minima of groups of rows, and how they move."""

    def find(p, y):
        traced, constants = trace_loss(
            lambda s, t: jnp.abs(s - t) + p * (s - t) ** 2, y
        )
        objective = Objective(traced, constants, y, (), None)
        objective = objective._replace(minimizer=locate_minimizers(objective, N))
        groups = LeafProblems(
            jnp.int32(0), jnp.zeros((1, N)), jnp.ones(N), None,
            jnp.asarray(GROUP, jnp.int32), jnp.full(8, penalty),
        )  # fmt: skip
        return solve_groups(objective, groups, jnp.full(8, 0.1), jnp.ones(8, bool))

    return jax.jvp(find, (p, y), (by_p, by_y))


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_minima_at_kinks_move_with_their_rows(penalty):
    """The loss |r| + p r^2, whose minimum in a leaf is at a row or between two."""

    def root(p, r):
        return bisect(lambda c: np.sum(np.sign(c - r) + 2 * p * (c - r)) + penalty * c)

    def reference(p, y):
        return np.array([root(p, y[g == GROUP]) for g in range(8)])

    p, along = jnp.float32(0.05), DIRECTION["y"]
    move = partial(move_kinks, jnp.float32(penalty), p, NOISY)
    at, by_p = move(jnp.float32(1), 0 * along)
    _, by_y = move(jnp.float32(0), along)
    y, p, along = np.float64(NOISY), np.float64(p), np.float64(along)
    np.testing.assert_allclose(at, reference(p, y), rtol=1e-5, atol=1e-5)
    ends = [reference(p + d, y) for d in (1e-7, -1e-7)]
    np.testing.assert_allclose(by_p, (ends[0] - ends[1]) / 2e-7, rtol=1e-3, atol=1e-3)
    ends = [reference(p, y + d * along) for d in (1e-7, -1e-7)]
    np.testing.assert_allclose(by_y, (ends[0] - ends[1]) / 2e-7, rtol=1e-3, atol=1e-4)
