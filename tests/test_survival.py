# SPDX-License-Identifier: Apache-2.0
"""Baseline hazards, survival curves and Brier scores equal loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb

S = jb.survival
SIZE = 40
RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=SIZE).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.5, 2, SIZE).astype(np.float32)
TARGETS = dict(
    time=RANDOM.integers(2, 12, SIZE).astype(np.float32),
    event=(RANDOM.random(SIZE) < 0.6).astype(np.float32),
)
ENTRY = np.minimum(RANDOM.integers(0, 9, SIZE), TARGETS["time"] - 1).astype("f")
PLAIN = S.BaselineHazard(jnp.ones(1), jnp.zeros(1))
STRATA = np.array(["a", "b", "c"])[RANDOM.integers(0, 3, SIZE)]


def hazard_by_hand(scores, time, event, entry, weights, ties):
    """Cumulative hazard at the distinct times of events."""
    risk = weights * np.exp(scores.astype(np.float64))
    times, steps = np.unique(time[event > 0]), []
    for t in times:
        tied = (time == t) & (event > 0)
        total, own = risk[(entry < t) & (t <= time)].sum(), risk[tied].sum()
        parts = (
            np.arange(tied.sum()) / tied.sum() if ties == "efron" else 0 * tied[tied]
        )
        steps.append((weights[tied].mean() / (total - parts * own)).sum())
    return times, np.cumsum(steps)


@pytest.mark.parametrize("truncated", [False, True], ids=["entered", "truncated"])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("shift", [0, 40])
def test_baseline_hazard(ties, truncated, shift):
    targets = TARGETS | dict(entry=ENTRY) if truncated else TARGETS
    found = S.baseline_hazard(SCORES + shift, targets, weights=WEIGHTS, ties=ties)
    entry = ENTRY if truncated else np.full(SIZE, -np.inf)
    expected = hazard_by_hand(SCORES, *TARGETS.values(), entry, WEIGHTS, ties)
    np.testing.assert_array_equal(found.times, expected[0])
    np.testing.assert_allclose(
        found.hazards, expected[1] * np.exp(-float(shift)), rtol=2e-5
    )
    assert found.groups is None


@pytest.mark.parametrize("shift", [-95, 95, 300])
def test_survival_does_not_depend_on_a_common_shift(shift):
    """The hazard itself is beyond float32."""
    targets = dict(time=[1.0, 2.0, 3.0], event=[1, 1, 1])
    scores = np.full(3, shift, np.float32)
    baseline = S.baseline_hazard(scores, targets)
    curve = S.survival_curves(baseline, scores[:1], [1, 2, 3])[0]
    expected = np.exp(-np.cumsum([1 / 3, 1 / 2, 1]))
    np.testing.assert_allclose(curve, expected, rtol=1e-4)


def test_structured_arrays_are_explained():
    kinds = [("event", bool), ("time", float)]
    array = np.array([(True, 1.0), (False, 2.0)], kinds)
    for call in (S.kaplan_meier, lambda y: S.baseline_hazard(np.zeros(2), y)):
        with pytest.raises(TypeError, match="fields of the array"):
            call(array)


def test_strata_of_different_types():
    names = np.array([1, "a", 1, "a"], object)
    targets = dict(time=np.arange(1.0, 5), event=np.ones(4))
    baseline = S.baseline_hazard(np.zeros(4), targets, groups=names)
    assert baseline.groups == (1, "a")
    np.testing.assert_allclose(baseline.hazards, [[0.5, 1.5], [0.5, 1.5]], rtol=1e-6)


def test_the_hazard_is_the_gradient_of_the_loss():
    """Expected events H(t_i) exp(s_i) less events, if no events are tied."""
    time = RANDOM.permutation(SIZE).astype(np.float32)
    targets = dict(time=time, event=jnp.asarray(TARGETS["event"]))
    baseline = S.baseline_hazard(SCORES, targets)
    curves = S.survival_curves(baseline, SCORES, time)
    expected = -np.log(np.diagonal(curves)) - TARGETS["event"]
    gradient = jax.jit(jax.grad(jb.losses.cox))(jnp.asarray(SCORES), targets)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


def test_strata():
    baseline = S.baseline_hazard(SCORES, TARGETS, groups=STRATA)
    assert baseline.groups == ("a", "b", "c")
    times = np.array([0.0, 3.5, 7.0, 99.0])
    curves = S.survival_curves(baseline, SCORES, times, groups=STRATA)
    for label in "abc":
        inside = label == STRATA
        alone = [values[inside] for values in TARGETS.values()]
        entry, weights = np.full((2, inside.sum()), [[-np.inf], [1.0]])
        steps, hazards = hazard_by_hand(SCORES[inside], *alone, entry, weights, "efron")
        reached = np.searchsorted(steps, times, side="right")
        hazard = np.append(0, hazards)[reached]
        expected = np.exp(-hazard * np.exp(SCORES[inside].astype(float))[:, None])
        np.testing.assert_allclose(curves[inside], expected, atol=1e-5)


def test_a_stratum_without_events_survives():
    targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 0])
    baseline = S.baseline_hazard(np.zeros(3), targets, groups=[7, 7, 9])
    curves = S.survival_curves(baseline, np.zeros(2), [5.0], groups=[7, 9])
    np.testing.assert_allclose(curves[:, 0], [np.exp(-0.5), 1.0])


def test_survival_curves():
    baseline = S.baseline_hazard(SCORES, TARGETS)
    times = RANDOM.uniform(0, 14, 9).astype(np.float32)
    found = jax.jit(S.survival_curves)(baseline, SCORES, times)
    entry = np.full(SIZE, -np.inf)
    steps, hazards = hazard_by_hand(
        SCORES, *TARGETS.values(), entry, np.ones(SIZE), "efron"
    )
    at = np.array([hazards[steps <= t][-1] if (steps <= t).any() else 0 for t in times])
    expected = np.exp(-at[None] * np.exp(SCORES.astype(np.float64))[:, None])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    far = S.survival_curves(baseline, np.array([-200.0, 200.0]), np.array([0.0, 50.0]))
    np.testing.assert_array_equal(far, [[1, 1], [1, 0]])


def product_by_hand(time, event, weights, at, outcome, *, before=False):
    """The Kaplan-Meier estimate at a time, or just before it."""
    value = 1.0
    for t in np.unique(time[time < at if before else time <= at]):
        dead = weights[(time == t) & (event > 0)].sum()
        lost = weights[(time == t) & (event == 0)].sum()
        alive = weights[time >= t].sum()
        value *= (
            1 - dead / alive if outcome == "event" else 1 - lost / (alive - dead or 1)
        )
    return value


@pytest.mark.parametrize("outcome", ["event", "censoring"])
def test_kaplan_meier(outcome):
    weights = np.where(RANDOM.random(SIZE) < 0.2, 0, WEIGHTS).astype(np.float32)
    curve = jax.jit(S.kaplan_meier, static_argnames="outcome")(
        TARGETS, weights=weights, outcome=outcome
    )
    for t in np.unique(TARGETS["time"][weights > 0]):
        place = np.searchsorted(curve.times, t, side="right") - 1
        expected = product_by_hand(*TARGETS.values(), weights, t, outcome)
        np.testing.assert_allclose(curve.probabilities[place], expected, atol=1e-6)


def test_kaplan_meier_of_rows_that_enter_late():
    targets = TARGETS | dict(entry=ENTRY)
    curve = jax.jit(S.kaplan_meier)(targets, weights=WEIGHTS)
    time, event = TARGETS.values()
    expected = 1.0
    for t in np.unique(time):
        dead = WEIGHTS[(time == t) & (event > 0)].sum()
        expected *= 1 - dead / WEIGHTS[(t > ENTRY) & (t <= time)].sum()
        place = np.searchsorted(curve.times, t, side="right") - 1
        np.testing.assert_allclose(curve.probabilities[place], expected, atol=1e-6)


@pytest.mark.parametrize("own", [True, False], ids=["own", "other"])
def test_brier_scores(own):
    time, event = TARGETS.values()
    times = np.array([2.5, 4.0, 6.5])
    predicted = RANDOM.random((SIZE, 3)).astype(np.float32)
    weights = WEIGHTS if own else np.ones(SIZE, np.float32)
    options = {}
    if not own:
        options = dict(censoring=S.kaplan_meier(TARGETS, outcome="censoring"))
    found = S.brier_scores(predicted, times, TARGETS, weights=WEIGHTS, **options)
    expected = []
    for column, t in enumerate(times):
        total = 0.0
        for i in range(SIZE):
            chance = predicted[i, column]
            if time[i] > t:
                scale = product_by_hand(time, event, weights, t, "censoring")
                total += WEIGHTS[i] * (1 - chance) ** 2 / scale
            elif event[i]:
                scale = product_by_hand(
                    time, event, weights, time[i], "censoring", before=True
                )
                total += WEIGHTS[i] * chance**2 / scale
        expected.append(total / WEIGHTS.sum())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_brier_score_without_censoring_is_the_squared_error():
    targets = TARGETS | dict(event=np.ones(SIZE))
    predicted = RANDOM.random((SIZE, 1)).astype(np.float32)
    found = S.brier_scores(predicted, [5.0], targets)
    alive = targets["time"] > 5
    np.testing.assert_allclose(
        found, np.mean((predicted[:, 0] - alive) ** 2), rtol=1e-6
    )


@pytest.mark.parametrize(("call", "words"), [
    (lambda: S.baseline_hazard(SCORES[1:], TARGETS), r"time.*\(39,\)"),
    (lambda: S.baseline_hazard(SCORES, TARGETS | dict(event=0 * SCORES)), "event"),
    (lambda: S.baseline_hazard(SCORES, TARGETS | dict(entry=TARGETS["time"])), "entry"),
    (lambda: S.baseline_hazard(SCORES, TARGETS, groups=[1]), "groups"),
    (lambda: S.kaplan_meier(TARGETS, outcome="death"), "death"),
    (lambda: S.brier_scores(np.ones((SIZE, 2)), [1.0], TARGETS), "probabilities"),
    (lambda: S.baseline_hazard(np.full(SIZE, np.nan), TARGETS), "scores .* nan"),
    (lambda: S.baseline_hazard(SCORES, TARGETS, weights=-WEIGHTS), "weights .*>= 0"),
    (lambda: S.baseline_hazard(SCORES, TARGETS, groups=[None] * SIZE), "groups .*None"),
    (lambda: S.baseline_hazard(SCORES, TARGETS, groups=[np.nan] * SIZE), "groups.*nan"),
    (lambda: S.kaplan_meier(TARGETS | dict(time=np.full(SIZE, np.nan))), "time.* NaN"),
    (lambda: S.kaplan_meier(TARGETS | dict(event=2 * TARGETS["event"])), "got 2.0"),
    (lambda: S.kaplan_meier(TARGETS, weights=WEIGHTS - 1), "weights .*>= 0"),
    (lambda: S.kaplan_meier(dict(time=SCORES)), r"event, got \['time'\]"),
    (lambda: S.kaplan_meier(TARGETS | dict(entry=ENTRY), outcome="censoring"), "entry"),
    (lambda: S.brier_scores(np.ones((SIZE, 1)), [1.0], TARGETS | dict(entry=ENTRY)),
     "entry"),
    (lambda: S.brier_scores(np.ones((SIZE, 1)), [np.nan], TARGETS), "times .* NaN"),
    (lambda: S.survival_curves(PLAIN, SCORES, 1.0), r"times .*\(\)"),
    (lambda: S.survival_curves(PLAIN, SCORES[None], [1.0]), r"scores .*\(1, 40\)"),
    (lambda: S.survival_curves(PLAIN, SCORES, [np.nan]), "times .* NaN"),
])  # fmt: skip
def test_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("groups", [None, ["a"], ["z"] * SIZE])
def test_strata_are_needed(groups):
    baseline = S.baseline_hazard(SCORES, TARGETS, groups=STRATA)
    with pytest.raises(ValueError, match="groups"):
        S.survival_curves(baseline, SCORES, [1.0], groups=groups)
    plain = S.baseline_hazard(SCORES, TARGETS)
    with pytest.raises(ValueError, match="groups"):
        S.survival_curves(plain, SCORES, [1.0], groups=STRATA)
