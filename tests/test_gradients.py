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
from jboost.trees.joint_start import minimise_jointly
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
                value = guard(loss, score, y, p, w, step, penalty)
            added[here] = value
        score = score + inputs["rate"][turn] * added
    return score


def guard(loss, score, y, p, w, step, penalty):
    def change(c):
        values = loss.value(score + c, y, p) - loss.value(score, y, p)
        return w @ values + penalty * c**2 / 2

    promised = (w @ loss.gradient(score, y, p)) * -step / 2
    assert -change(step) >= 0.25 * promised
    return step


def square(p):
    return lambda s, t: p * (s - t) ** 2


def logistic(p):
    """For moderate scores: shorter than what is exact for all."""
    return lambda s, t: jnp.log1p(jnp.exp(p * s)) - t * p * s


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
    "poisson": Case(
        lambda p: lambda s, t: jnp.exp(p * s) - t * p * s,
        POISSON, 1.2, COUNTS, {}, "guarded",
    ),
    "quantile": Case(
        lambda p: lambda s, t: jnp.maximum(p * (t - s), (1 - p) * (s - t)),
        QUANTILE, 0.3, NOISY, {}, "quantile", 0.1,
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
    """Batches backward through the steps, forward through the loop."""
    loss, rates = jb.losses.squared_error, jnp.float32([0.4, 0.3])

    def whole(rate):
        _, scores = jb.boost(
            CODES, NOISY, loss, KEY, num_rounds=2, max_depth=DEPTH, learning_rate=rate,
            l2=rate,
        )  # fmt: skip
        return jnp.mean(scores**3)

    def stepped(rate):
        state = jb.init(CODES, NOISY, loss, KEY)
        for _ in range(2):
            state, _ = jb.boost_step(
                state, CODES, NOISY, loss, max_depth=DEPTH, learning_rate=rate, l2=rate
            )
        return jnp.mean(state.scores**3)

    forward = jax.jit(lambda rate: jax.jvp(whole, (rate,), (rate / rate,))[1])
    backward = jax.jit(jax.vmap(jax.grad(stepped)))(rates)
    slopes = [forward(rate) for rate in rates]
    np.testing.assert_allclose(backward, slopes, rtol=1e-5)


@pytest.mark.usefixtures("full_search")
def test_hessians():
    """Forward over reverse, against differences of gradients.

    Gradients agree with central differences. Rows of weight zero may hold anything.
    """
    known = np.arange(N) >= 9
    y = jnp.asarray(np.where(known, BINARY, np.nan))

    def total(numbers, weight):
        trees, scores = jb.boost(
            CODES, y, logistic(numbers["p"]), KEY, num_rounds=T, max_depth=DEPTH,
            init_score=numbers["start"], learning_rate=numbers["rate"],
            leaf_solver="newton", l2=1.0, sample_weight=weight,
        )  # fmt: skip
        return jnp.mean(scores**3, where=known), trees

    def derive(numbers):
        weight = jnp.asarray(known, jnp.float32)
        return jax.grad(total, has_aux=True)(numbers, weight)

    @jax.jit
    def along(numbers):
        ways = {key: jnp.float32(key == "rate") for key in numbers}
        return jax.jvp(derive, (numbers,), (ways,), has_aux=True)

    point = dict(p=np.float32(0.9), start=np.float32(0.1), rate=np.float32(0.4))
    rates = np.float32([0.4, 0.402, 0.398])
    found = [along(point | dict(rate=rate)) for rate in rates]
    trees = found[0][2]
    for _, _, other in found:
        np.testing.assert_array_equal(trees.trees.feature, other.trees.feature)
        np.testing.assert_array_equal(trees.trees.threshold, other.trees.threshold)
    leaves = np.asarray(jb.leaf_indices(jb.to_ensemble(trees, BINS), X))

    def reference(p, start, rate):
        inputs = dict(
            p=p, start=start, rate=[rate] * T, weight=1.0 * known, l2=1.0,
            y=np.float64(BINARY), offset=np.zeros(N),
        )  # fmt: skip
        scores = replay(LOGISTIC, inputs, leaves, solver="newton")
        return np.mean(scores**3, where=known)

    (slopes, moved, _), (above, *_), (below, *_) = found
    for key, slope in slopes.items():
        middle = np.float64(point[key])
        ends = [reference(**point | {key: middle + d}) for d in (1e-6, -1e-6)]
        wanted = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(slope, wanted, rtol=1e-4, err_msg=key)
        difference = (above[key] - below[key]) / 4e-3
        np.testing.assert_allclose(moved[key], difference, rtol=1e-3, atol=1e-5)
        assert np.isfinite(slope) and moved[key] != 0


NORMAL = jb.losses.likelihood(jb.distributions.normal)


@pytest.mark.usefixtures("full_search")
def test_two_scores_agree_with_central_differences():
    """Normal likelihood, steps by its information: -G / (H + l2)."""

    def measured(inputs):
        trees, scores = jb.boost(
            CODES, inputs["y"], NORMAL, KEY, num_scores=2, num_rounds=T,
            max_depth=DEPTH, learning_rate=inputs["rate"],
            sample_weight=inputs["weight"],
            l2=inputs["l2"], init_score=inputs["start"], curvature="fisher",
            leaf_solver="newton", regularization="absolute",
        )  # fmt: skip
        return scores, trees

    @jax.jit
    def move(inputs, ways):
        return jax.jvp(measured, (inputs,), (ways,), has_aux=True)

    def reference(leaves, y, weight, rate, l2, start):
        scores = np.tile(np.float64(start), (N, 1))
        for turn in range(T):
            off, narrow = scores[:, 0] - y, np.exp(-2 * scores[:, 1])
            slopes = (off * narrow, 1 - off**2 * narrow)
            informations = (narrow, np.full(N, 2.0))
            scores = scores.copy()
            for k in range(2):
                top, bottom = weight * slopes[k], weight * informations[k]
                for node in np.unique(leaves[:, turn, k]):
                    here = leaves[:, turn, k] == node
                    step = top[here].sum() / (bottom[here].sum() + l2)
                    scores[here, k] -= rate * step
        return scores

    inputs = dict(
        y=NOISY, weight=np.linspace(0.5, 2, N, dtype=np.float32), rate=np.float32(0.3),
        l2=np.float32(2), start=np.array([0.2, 0.3], np.float32),
    )  # fmt: skip
    for key, value in inputs.items():
        way = DIRECTION["y"] if np.ndim(value) else np.float32(1)
        way = np.resize(way, np.shape(value))
        ways = {name: 0 * each for name, each in inputs.items()} | {key: way}
        _, slope, trees = move(inputs, ways)
        leaves = np.asarray(jb.leaf_indices(jb.to_ensemble(trees, BINS), X))
        around = [
            reference(leaves, **{**inputs, key: value + d * np.float64(way)})
            for d in (1e-6, -1e-6)
        ]
        wanted = (around[0] - around[1]) / 2e-6
        atol = 1e-4 * np.abs(wanted).max()
        np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=atol, err_msg=key)


def test_start_of_two_scores_moves_with_mean_and_deviation():
    def start(y, weight):
        traced, constants = trace_loss(NORMAL, y, 2)
        objective = Objective(traced, constants, y, (), None)
        objective = objective._replace(minimizer=jnp.full((2, N), jnp.inf))
        return minimise_jointly(objective, jnp.zeros((2, N)), weight)

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
def move_kinks(inputs, ways):
    """Minima of groups of rows, and how they move."""

    def find(inputs):
        p, y = inputs["p"], inputs["y"]
        traced, constants = trace_loss(
            lambda s, t: jnp.abs(s - t) + p * (s - t) ** 2, y
        )
        objective = Objective(traced, constants, y, (), None)
        objective = objective._replace(minimizer=locate_minimizers(objective, N))
        groups = LeafProblems(
            jnp.int32(0), jnp.zeros((1, N)), inputs["weight"], None,
            jnp.asarray(GROUP, jnp.int32), inputs["penalty"] * jnp.ones(8),
        )  # fmt: skip
        return solve_groups(objective, groups, jnp.full(8, 0.1), jnp.ones(8, bool))

    return jax.jvp(find, (inputs,), (ways,))


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_minima_at_kinks_move_with_their_rows(penalty):
    """The loss |r| + p r^2, whose minimum in a leaf is at a row or between two."""

    def reference(p, y, weight, penalty):
        def slope(c, r, w):
            return w @ (np.sign(c - r) + 2 * p * (c - r)) + penalty * c

        groups = [(y[g == GROUP], weight[g == GROUP]) for g in range(8)]
        return np.array([bisect(partial(slope, r=r, w=w)) for r, w in groups])

    inputs = dict(
        p=np.float32(0.05), y=NOISY, weight=np.ones(N, np.float32),
        penalty=np.float32(penalty),
    )  # fmt: skip
    still = {key: 0 * value for key, value in inputs.items()}
    doubles = {key: np.float64(value) for key, value in inputs.items()}
    for key, value in doubles.items():
        way = DIRECTION.get(key, np.float32(1))
        at, moved = move_kinks(inputs, still | {key: way})
        np.testing.assert_allclose(at, reference(**doubles), rtol=1e-5, atol=1e-5)
        ends = [
            reference(**doubles | {key: value + d * np.float64(way)})
            for d in (1e-7, -1e-7)
        ]
        wanted = (ends[0] - ends[1]) / 2e-7
        np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=1e-4, err_msg=key)
