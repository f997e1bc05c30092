# SPDX-License-Identifier: Apache-2.0
"""Cox's loss and the concordance bound equal double loops in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb

L = jb.losses
RANDOM = np.random.default_rng(0)
SIZE = 40  # of nearly all cases, which so share programs


def make_times(size=SIZE, *, scale=1.0, seed=0):
    """Scores, times with many ties, events, weights, and entries before the times."""
    random = np.random.default_rng(seed)
    time = random.integers(2, 3 + size // 3, size).astype(np.float32)
    return dict(
        scores=(scale * random.normal(size=size)).astype(np.float32),
        time=time,
        event=(random.random(size) < 0.7).astype(np.float32),
        weights=random.uniform(0.5, 2, size).astype(np.float32),
        entry=np.minimum(random.integers(0, size // 3, size), time - 1).astype("f"),
    )


def cox_by_hand(scores, time, event, weights, entry, ties):
    """Value and gradient, term by term: one division for each event."""
    s, w = scores.astype(np.float64), weights.astype(np.float64)
    risk, value, gradient = w * np.exp(s - s.max()), 0.0, np.zeros(len(s))
    for t in np.unique(time[event > 0]):
        tied = (time == t) & (event > 0)
        at_risk = (entry < t) & (t <= time)
        for count in range(tied.sum()):
            part = count / tied.sum() if ties == "efron" else 0.0
            shares = risk * at_risk - part * risk * tied
            value += w[tied].mean() * (np.log(shares.sum()) + s.max())
            gradient += w[tied].mean() * shares / shares.sum()
        value -= (w * s)[tied].sum()
        gradient -= w * tied
    return value, gradient


@partial(jax.jit, static_argnames=("ties", "truncated"))
def evaluate(case, *, ties="efron", truncated=False):
    """Value and gradient of the loss."""
    names = ("time", "event", "entry") if truncated else ("time", "event")
    targets = {name: case[name] for name in names}

    def loss(scores):
        return L.cox(scores, targets, weights=case["weights"], ties=ties)

    return jax.value_and_grad(loss)(case["scores"])


@pytest.mark.parametrize("truncated", [False, True], ids=["entered", "truncated"])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("scale", [1, 20])
def test_cox(ties, truncated, scale):
    case = make_times(scale=scale)
    entry = case["entry"] if truncated else np.full(SIZE, -np.inf)
    expected = cox_by_hand(**case | dict(entry=entry), ties=ties)
    value, gradient = evaluate(case, ties=ties, truncated=truncated)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-5)
    assert abs(gradient.sum()) < 1e-5


def test_strata_are_groups():
    case, stratum = make_times(30), RANDOM.integers(0, 3, 30)
    where = stratum[None] == np.arange(3)[:, None]
    rows = {k: np.stack([v] * 3) for k, v in case.items()}
    found = jax.vmap(evaluate)(rows | dict(weights=rows["weights"] * where))
    for group in range(3):
        part = {k: v[where[group]] for k, v in case.items()}
        part["entry"] = np.full(len(part["time"]), -np.inf)
        value, gradient = cox_by_hand(**part, ties="efron")
        np.testing.assert_allclose(found[0][group], value, rtol=1e-5)
        np.testing.assert_allclose(found[1][group][where[group]], gradient, atol=1e-5)


def test_weight_two_is_a_duplicate_in_breslow():
    """In Efron's approximation duplicates of an event are tied."""
    case, half = make_times(20), np.repeat([2.0, 0.0], 20).astype(np.float32)
    twice = {k: np.concatenate([v, v]) for k, v in case.items()}
    double = evaluate(twice, ties="breslow")
    weighted = evaluate(twice | dict(weights=half * twice["weights"]), ties="breslow")
    np.testing.assert_allclose(weighted[0], double[0], rtol=1e-5)
    np.testing.assert_allclose(weighted[1][:20], 2 * double[1][:20], atol=1e-5)


def test_cox_is_accurate_for_many_rows_and_far_scores():
    """No sum cancels: neither in risk sets nor by left truncation."""
    size = 100_000
    random = np.random.default_rng(1)
    scores = random.uniform(-50, 50, size).astype(np.float32)
    time = random.permutation(size).astype(np.float32)
    entry = time - random.integers(1, size, size).astype(np.float32)
    event = np.ones(size, np.float32)
    case = dict(scores=scores, time=time, event=event, weights=event, entry=entry)
    gradient = np.asarray(evaluate(case)[1])
    order = np.argsort(time)
    risk = np.exp(scores[order].astype(np.float64))
    later = np.cumsum(risk[::-1])[::-1]
    expected = np.empty(size)
    expected[order] = risk * np.cumsum(1 / later) - 1
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=1e-4)


def test_truncation_does_not_cancel():
    """The one with the largest risk has left before the others enter."""
    rows = dict(
        time=[1, 3, 4, 5], event=[1] * 4, weights=[1] * 4, entry=[0, 2, 2, 0],
        scores=[50, -50, -49, -48],
    )  # fmt: skip
    case = {name: np.zeros(SIZE, np.float32) for name in rows} | dict(
        time=np.ones(SIZE, np.float32)
    )
    for name, values in rows.items():
        case[name][:4] = values
    gradient = evaluate(case, truncated=True)[1][:4]
    tail = np.exp([-2.0, -1.0, 0.0])
    first, second = tail / tail.sum(), tail * [0, 1, 1] / tail[1:].sum()
    expected = first + second + [0, 0, 1] - 1
    np.testing.assert_allclose(gradient, [0, *expected], atol=1e-6)


def test_invalid_times_give_nan():
    case, first = make_times(), np.arange(SIZE) == 0
    lost = case | dict(time=np.where(first, np.float32(np.nan), case["time"]))
    assert jnp.isnan(evaluate(lost)[0])
    weights = np.where(first, np.float32(0), case["weights"])
    assert jnp.isfinite(evaluate(lost | dict(weights=weights))[0])
    late = case | dict(entry=np.where(first, case["time"], case["entry"]))
    assert jnp.isnan(evaluate(late, truncated=True)[0])
    with pytest.raises(ValueError, match="exact"):
        evaluate(case, ties="exact")


def concordance_by_hand(scores, time, event, weights):
    s, w, value, total = scores.astype(np.float64), weights, 0.0, 0.0
    for i in range(len(s)):
        for j in range(len(s)):
            before = time[i] < time[j] or (time[i] == time[j] and not event[j])
            if event[i] and before:
                value += w[i] * w[j] * np.log2(1 + np.exp(s[j] - s[i]))
                total += w[i] * w[j]
    return value / total


def test_concordance_bounds_the_index():
    case = make_times()
    del case["entry"]
    targets = dict(time=jnp.asarray(case["time"]), event=jnp.asarray(case["event"]))
    arguments = jnp.asarray(case["scores"]), targets
    found = L.concordance(*arguments, weights=jnp.asarray(case["weights"]))
    np.testing.assert_allclose(found, concordance_by_hand(**case), rtol=1e-5)
