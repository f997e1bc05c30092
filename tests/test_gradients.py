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

N, F, T, DEPTH = 160, 3, 4, 2
KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, F)).astype(np.float32)
SIGNAL = X[:, 0] + np.sin(2 * X[:, 1])
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)
DIRECTION = {
    "p": np.float32(1),
    "l2": np.float32(1),
    "rate": RNG.normal(size=T).astype(np.float32),
    "weight": RNG.normal(size=N).astype(np.float32),
    "y": RNG.normal(size=N).astype(np.float32),
    "offset": RNG.normal(size=N).astype(np.float32),
}


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


def replay(loss, inputs, leaves, *, solver, start=None, bags=None):
    """Trains with given leaves; returns the scores of the rows."""
    y, weight, p = inputs["y"], inputs["weight"], inputs["p"]
    score = inputs["offset"].copy()
    if start is None:

        def total(c):
            return weight @ loss.gradient(inputs["offset"] + c, y, p)

        start = bisect(total)
        if solver == "quantile":
            start = middle_quantile(y - score, weight, p)
    score = score + start
    first = 0.0
    for turn, leaf in enumerate(leaves.T):
        gradient = loss.gradient(score, y, p)
        curvature = curvature_of(loss, score, y, p, weight)
        first = mean = max(first, weight @ curvature / weight.sum())
        penalty, added = inputs["l2"] * mean, np.zeros(N)
        for node in np.unique(leaf):
            here = leaf == node
            w = weight * here if bags is None else weight * here * bags[turn]
            step = -w @ gradient / (w @ curvature + penalty)
            if solver == "quantile":
                value = middle_quantile((y - score)[w > 0], w[w > 0], p)
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


NOISY = (SIGNAL + RNG.standard_t(3, size=N) * 0.4).astype(np.float32)
COUNTS = RNG.poisson(np.exp(SIGNAL / 3)).astype(np.float32) + np.float32(0.5)
BINARY = (SIGNAL + RNG.logistic(size=N) * 0.5 > 0).astype(np.float32)
CASES = {
    "squared": Case(
        lambda p: lambda s, t: p * (s - t) ** 2, SQUARED, 0.7, NOISY, {}, "newton"
    ),
    "squared in plain XLA": Case(
        lambda p: lambda s, t: p * (s - t) ** 2, SQUARED, 0.7, NOISY,
        dict(subsample=0.6, colsample_bynode=0.7), "newton", implementation="xla",
    ),
    "huber": Case(huber, HUBER, 0.6, NOISY, {}, "guarded"),
    "huber, exact": Case(
        huber, HUBER, 0.6, NOISY, dict(leaf_solver="exact"), "exact", 0.1
    ),
    "logistic": Case(
        lambda p: lambda s, t: jnp.logaddexp(0.0, p * s) - t * p * s,
        LOGISTIC, 1.3, BINARY, dict(leaf_solver="newton"), "newton", 0.2,
    ),
    "poisson": Case(
        lambda p: lambda s, t: jnp.exp(p * s) - t * p * s,
        POISSON, 1.2, COUNTS, {}, "guarded",
    ),
    "quantile": Case(
        lambda p: lambda s, t: jnp.maximum(p * (t - s), (1 - p) * (s - t)),
        QUANTILE, 0.3, NOISY, {}, "quantile",
    ),
}  # fmt: skip


def run(case, inputs):
    start = {} if case.start is None else dict(init_score=case.start)
    return jb.boost(
        CODES, inputs["y"], case.loss(inputs["p"]), KEY, num_rounds=T, max_depth=DEPTH,
        learning_rate=lambda i: inputs["rate"][i], l2=inputs["l2"],
        sample_weight=inputs["weight"], offset=inputs["offset"],
        implementation=case.implementation, **start, **case.settings,
    )  # fmt: skip


def find_bags(subsample):
    """Draws the rows of each round as jboost does."""
    from jboost.numerics.random_bits import derive, seed_from_key
    from jboost.numerics.sampling import sample

    seeds = derive(jnp.asarray(seed_from_key(KEY)), 2 * jnp.arange(T, dtype=jnp.int32))
    return [np.asarray(sample(s, jnp.ones(N, bool), subsample)) for s in seeds]


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_central_differences(name):
    case = CASES[name]
    rng = np.random.default_rng(1)
    inputs = dict(
        p=np.float32(case.p), l2=np.float32(1.5),
        rate=np.linspace(0.5, 0.2, T, dtype=np.float32),
        weight=rng.uniform(0.5, 2, N).astype(np.float32), y=case.y,
        offset=rng.normal(size=N).astype(np.float32) * np.float32(0.1),
    )  # fmt: skip
    measure = rng.normal(size=N).astype(np.float32)

    def measured(inputs):
        trees, scores = run(case, inputs)
        return jnp.mean(measure * scores**2), trees

    (value, trees), gradient = jax.jit(jax.value_and_grad(measured, has_aux=True))(
        jax.tree.map(jnp.asarray, inputs)
    )
    leaves = np.asarray(jb.leaf_indices(jb.to_ensemble(trees, BINS), X))
    share = case.settings.get("subsample")
    again = partial(
        replay, case.reference, leaves=leaves, solver=case.solver, start=case.start,
        bags=find_bags(share) if share else None,
    )  # fmt: skip

    def reference(**changed):
        doubles = {key: np.float64(a) for key, a in (inputs | changed).items()}
        return np.mean(measure.astype(np.float64) * again(doubles) ** 2)

    np.testing.assert_allclose(value, reference(), rtol=1e-4)
    for key, direction in DIRECTION.items():
        if key == "p" and name == "quantile":
            continue  # an order statistic jumps in its level
        wide = np.float64(direction) * 1e-6
        difference = reference(**{key: inputs[key] + wide}) - reference(
            **{key: inputs[key] - wide}
        )
        got = np.sum(gradient[key] * direction)
        np.testing.assert_allclose(
            got, difference / 2e-6, rtol=1e-4, atol=1e-6, err_msg=key
        )


def test_steps_have_the_derivatives_of_boost():
    def whole(rate):
        trees, scores = jb.boost(
            CODES, NOISY, jb.losses.squared_error, KEY, num_rounds=3, max_depth=DEPTH,
            learning_rate=rate, l2=rate,
        )  # fmt: skip
        return jnp.mean(scores**3), trees

    def stepped(rate):
        loss = jb.losses.squared_error
        state = jb.init(CODES, NOISY, loss, KEY)
        for _ in range(3):
            state, _ = jb.boost_step(
                state, CODES, NOISY, loss, max_depth=DEPTH, learning_rate=rate, l2=rate
            )
        return jnp.mean(state.scores**3)

    rate = jnp.float32(0.4)
    (slope, _), by_step = (
        jax.jit(jax.grad(whole, has_aux=True))(rate),
        jax.grad(stepped),
    )
    np.testing.assert_allclose(jax.jit(by_step)(rate), slope, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jvp(stepped, (rate,), (jnp.float32(1),))[1], slope, rtol=1e-5
    )


def test_hessians_and_batches_of_gradients():
    """Forward over reverse, and vmap, against differences of gradients."""

    def total(numbers):
        p, rate = numbers
        trees, scores = jb.boost(
            CODES, BINARY, lambda s, t: jnp.logaddexp(0.0, p * s) - t * p * s, KEY,
            num_rounds=2, max_depth=DEPTH, learning_rate=rate, init_score=0.0,
            leaf_solver="newton",
        )  # fmt: skip
        return jnp.mean(scores**3), trees.trees

    here, step = jnp.array([0.9, 0.4]), jnp.array([0.0, 2e-3])
    slopes = jax.jit(jax.grad(total, has_aux=True))
    hessian, _ = jax.jit(jax.hessian(total, has_aux=True))(here)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-4)
    (after, trees), (before, others) = slopes(here + step), slopes(here - step)
    np.testing.assert_array_equal(trees.feature, others.feature)
    np.testing.assert_array_equal(trees.threshold, others.threshold)
    np.testing.assert_allclose(hessian[1], (after - before) / 4e-3, rtol=1e-3)
    both = jax.jit(jax.vmap(slopes))(jnp.stack([here + step, here - step]))[0]
    np.testing.assert_allclose(both, [after, before], rtol=1e-5)
