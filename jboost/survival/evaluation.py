# SPDX-License-Identifier: Apache-2.0
"""Kaplan-Meier curves, and Brier scores of predicted survival curves.

The errors account for censored rows.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.entry.decorators import traceable
from jboost.entry.messages import show
from jboost.losses.survival import find_risk_sets, sum_at_risk
from jboost.numerics.exact import cumulate
from jboost.survival.hazards import read_rows, read_times

Outcome = Literal["event", "censoring"]


class SurvivalCurve(NamedTuple):
    """Holds a step function that falls from 1.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 1])
      >>> curve = jb.survival.kaplan_meier(targets)
      >>> curve.times.tolist()
      [1.0, 2.0, 3.0]
    """

    times: Float[Array, " N"]  # increasing, maybe repeated
    probabilities: Float[Array, " N"]  # at the last of equal times, and until the next


@traceable
def kaplan_meier(
    targets: Mapping[str, Shaped[ArrayLike, " N"]],
    *,
    weights: Shaped[ArrayLike, " N"] | None = None,
    outcome: Outcome = "event",
) -> SurvivalCurve:
    """Estimates the probability that the event, or censoring, comes later than t.

    prod_{u <= t} (1 - d_u / n_u), with d_u events at time u among the n_u rows at risk.
    For the distribution of censoring, rows with an event at u are no longer at risk of
    being censored then.

    Args:
      targets: a mapping with ``time``, ``event`` (1 or 0) and, for the outcome "event",
        optionally ``entry``, [N] each; a row is at risk from its entry on.
      weights: [N], row weights; rows of weight 0 are ignored.
      outcome: "event" or "censoring".

    Returns:
      The curve at the N times in increasing order.

    Raises:
      TypeError, ValueError: shapes differ, a time is NaN or not after its entry, an
        event is neither 0 nor 1, or a weight is negative.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 1])
      >>> curve = jb.survival.kaplan_meier(targets)
      >>> [round(p, 3) for p in curve.probabilities.tolist()]
      [0.667, 0.667, 0.0]

    References:
      Kaplan and Meier 1958, "Nonparametric estimation from incomplete observations".
    """
    if outcome not in get_args(Outcome):
        wanted = get_args(Outcome)
        raise ValueError(f"outcome must be one of {wanted}, got {show(outcome)}")
    rows = read_rows(targets, weights, entries=outcome == "event")
    sets = find_risk_sets(rows, jnp.asarray(rows["weights"]), "breslow")
    if outcome == "event":
        before, after = sum_at_risk(sets, sets.weight)
    else:  # the rows at risk after the events of the time, and after the time itself
        left = jnp.pad(cumulate(sets.weight, reverse=True), (0, 1))
        end = jnp.searchsorted(sets.time, sets.time, side="right")
        before, after = left[sets.after], left[end]
    factor = jnp.where(before > 0, after / jnp.where(before > 0, before, 1), 1)
    once = jnp.arange(len(sets.time), dtype=jnp.int32) == sets.first
    return SurvivalCurve(sets.time, jnp.cumprod(jnp.where(once, factor, 1)))


@traceable
def brier_scores(
    probabilities: Shaped[ArrayLike, "N T"],
    times: Shaped[ArrayLike, " T"],
    targets: Mapping[str, Shaped[ArrayLike, " N"]],
    *,
    censoring: SurvivalCurve | None = None,
    weights: Shaped[ArrayLike, " N"] | None = None,
) -> Float[Array, " T"]:
    """Returns the mean squared error of predicted survival at each time.

    BS(t) = mean_i of S_i(t)^2 / G(t_i-) if i had the event by t, (1 - S_i(t))^2 / G(t)
    if t_i > t, else 0, where G is the probability not to be censored until then.
    Smaller is better; a constant prediction of 1/2 has about 1/4.

    Args:
      probabilities: [N, T], predicted probabilities to survive the times.
      times: [T].
      targets: a mapping with ``time`` and ``event``, [N] each, of the same rows.
      censoring: G, from :func:`kaplan_meier` with ``outcome="censoring"``, for example
        of the training rows; by default that of these rows.
      weights: [N], row weights.

    Returns:
      The scores [T]; infinite or NaN where G is 0.

    Raises:
      TypeError, ValueError: shapes differ, a time is NaN, an event is neither 0 nor 1,
        targets have times of entry, or a weight is negative.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 1, 1])
      >>> scores = jb.survival.brier_scores([[0.5], [0.5], [1.0]], [1.5], targets)
      >>> [round(s, 4) for s in scores.tolist()]
      [0.1667]

    References:
      Graf et al. 1999, "Assessment and comparison of prognostic classification schemes
      for survival data", section 4; G(t-) as in Gerds and Schumacher 2006.
    """
    found = jnp.asarray(probabilities, jnp.float32)
    moments = read_times(times)
    rows = read_rows(targets, weights, entries=False)
    time, event, weight = (jnp.asarray(values) for values in rows.values())
    event = event > 0
    if found.shape != (len(time), len(moments)):
        raise ValueError(
            "probabilities must have one row for each target and one column for each "
            f"time, {(len(time), len(moments))}, got shape {found.shape}"
        )
    if censoring is None:
        kept = dict(time=time, event=event)
        censoring = kaplan_meier(kept, weights=weight, outcome="censoring")
    known = jnp.pad(censoring.probabilities, (1, 0), constant_values=1)
    own = known[jnp.searchsorted(censoring.times, time, side="left")][:, None]
    then = known[jnp.searchsorted(censoring.times, moments, side="right")][None, :]
    later = time[:, None] > moments[None, :]
    happened = event[:, None] & ~later
    loss = jnp.where(happened, jnp.square(found) / own, 0)
    loss = jnp.where(later, jnp.square(1 - found) / then, loss)
    kept = (weight > 0)[:, None]
    total = jnp.sum(jnp.where(kept, loss, 0) * weight[:, None], axis=0)
    return total / jnp.sum(weight)
