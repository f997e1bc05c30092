# SPDX-License-Identifier: Apache-2.0
"""Losses of survival times, for one group of rows: Cox's likelihood and concordance.

A larger score means a higher risk. A row is at risk at time t if entry < t <= time.
With R the sum of the risks at t, and E that of the d tied events, the l-th of them,
l = 0, ..., d - 1, is divided by R (Breslow 1974) or R - (l / d) E (Efron 1977). Both
are sums of positive numbers: nothing is subtracted, so nothing cancels.
"""

import math
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.checks import check_word
from jboost.losses.groups import check_names, clear, log, softplus, weigh_rows
from jboost.losses.rows import built_in
from jboost.numerics.exact import cumulate, cumulate_levels

Ties = Literal["efron", "breslow"]
check_ties = partial(check_word, words=get_args(Ties))


class RiskSets(NamedTuple):
    """Holds rows by time; events precede censored rows of the same time."""

    order: Int32[Array, " G"]  # the row at each place; masked rows are last
    time: Float[Array, " G"]  # infinite for masked rows
    weight: Float[Array, " G"]  # 0 for masked rows
    event: Bool[Array, " G"]
    first: Int32[Array, " G"]  # the first place of the same time
    after: Int32[Array, " G"]  # the first place behind the events of the same time
    share: Float[Array, " G"]  # the factor of E: 1, or 1 - l / d
    event_weight: Float[Array, " G"]  # mean weight of the tied events; 0 if no event
    # The first and last place with a time when a row is at risk, but not as a tied
    # event; None if all rows enter at the beginning.
    span: tuple[Int32[Array, " G"], Int32[Array, " G"]] | None
    valid: Bool[Array, ""]  # times are numbers, and later than entries


def find_risk_sets(targets, weights, ties: Ties) -> RiskSets:
    """Sorts the rows of one group by time.

    Args:
      targets: a mapping with ``time`` [G], ``event`` [G] and, for left truncation,
        ``entry`` [G].
      weights: [G], 0 for masked rows.
      ties: "efron" or "breslow".
    """
    check_ties("ties", ties)
    check_names(targets)
    real = weights > 0
    time = jnp.where(real, jnp.asarray(targets["time"], weights.dtype), jnp.inf)
    event = (jnp.asarray(targets["event"], jnp.float32) > 0) & real
    order = jnp.lexsort((~event, time)).astype(jnp.int32)
    valid = ~jnp.any(jnp.isnan(time))
    entry = None
    if "entry" in targets:
        entry = jnp.where(real, jnp.asarray(targets["entry"], weights.dtype), -jnp.inf)
        valid &= jnp.all(entry < time)
        entry = entry[order]
    time, event, weight = time[order], event[order], weights[order]
    places = jnp.arange(len(time), dtype=jnp.int32)
    new = jnp.concatenate([jnp.ones(1, bool), time[1:] != time[:-1]])
    first = lax.cummax(jnp.where(new, places, 0))
    tied = _sum_ties(event.astype(jnp.int32), first)
    count = jnp.maximum(tied, 1).astype(weight.dtype)
    share = jnp.ones_like(weight)
    if ties == "efron":
        share = jnp.where(event, 1 - (places - first).astype(weight.dtype) / count, 1)
    mean = _sum_ties(jnp.where(event, weight, 0), first) / count
    span = None
    if entry is not None:
        begin = jnp.searchsorted(time, entry, side="right").astype(jnp.int32)
        end = first + _sum_ties(jnp.ones_like(first), first)
        span = begin, jnp.where(event, first, end) - 1
    return RiskSets(
        order=order, time=time, weight=weight, event=event, first=first,
        after=first + tied, share=share, event_weight=jnp.where(event, mean, 0),
        span=span, valid=valid,
    )  # fmt: skip


def sum_risks(sets: RiskSets, risks: Float[Array, " G"]) -> Float[Array, " G"]:
    """Returns R - (1 - share) E at each event; only meaningful there.

    Args:
      risks: positive numbers in the order of the sets, 0 for masked rows.
    """
    whole, rest = sum_at_risk(sets, risks)
    return sets.share * whole + (1 - sets.share) * rest


def sum_at_risk(
    sets: RiskSets, risks: Float[Array, " G"]
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Returns R and R - E at each place; ``risks`` as for :func:`sum_risks`."""
    if sets.span is None:
        later = cumulate(risks, reverse=True)
        later = jnp.concatenate([later, jnp.zeros(1, risks.dtype)])
        return later[sets.first], later[sets.after]
    rest = _sum_spans(risks, *sets.span)[sets.first]
    return rest + _sum_ties(jnp.where(sets.event, risks, 0), sets.first), rest


def _sum_ties(values, first):
    """Returns at each place the sum of the values of the same time."""
    return jnp.zeros_like(values).at[first].add(values)[first]


def _sum_spans(values, begin, end):
    """Returns for each place the sum of the values with a span begin..end over it.

    A span of several places is cut at the middle of a block of 2^(level + 1) places,
    where ``level`` is the highest bit that differs in begin and end. Its left part
    lasts until the middle and its right part starts there, so that both are cumulative
    sums within half a block (a disjoint sparse table, transposed).
    """
    size = values.shape[0]
    levels = (size - 1).bit_length()
    level = 31 - lax.clz(begin ^ end)  # -1 for a span of one place
    values = jnp.where(begin <= end, values, 0)

    def scatter(places):
        held = jnp.zeros((levels + 1, 2**levels), values.dtype)
        return held.at[level + 1, places].add(values, mode="drop")

    left, right = scatter(begin), scatter(end)
    total = left[0]
    if levels:
        total += cumulate_levels(left[1:]) + cumulate_levels(right[1:], reverse=True)
    return total[:size]


# Risks are scaled to exp(-RANGE / 2) .. exp(RANGE / 2): float32 can hold their sums.
RANGE = 140.0
ROOT = math.exp(-RANGE / 4)


@built_in(ties=check_ties)
def cox(scores, targets, *, where=None, weights=None, ties: Ties = "efron"):
    """Returns the negative log partial likelihood of the proportional hazards model.

    -sum_t [sum_{i in D_t} w_i s_i - sum_{l < d} mean_{D_t}(w) log(R_t - (l / d) E_t)],
    where D_t contains the d events at time t, R_t = sum_i w_i exp(s_i) over the rows at
    risk (entry_i < t <= time_i) and E_t the same sum over D_t. With Breslow's
    approximation the term (l / d) E_t is left out. Weights enter as in R's
    ``survival::coxph``.

    Scores that are more than 140 below the largest one count as 140 below in R_t.

    Args:
      scores: [G], log hazard ratios.
      targets: a mapping with ``time`` [G], ``event`` [G] (1 or 0) and optionally
        ``entry`` [G] for left truncation, entry < time; times count as float32.
      where: bool [G], the real rows; all by default.
      weights: [G], row weights; rows of weight 0 count as masked.
      ties: "efron" or "breslow", the approximation for events at the same time.

    Returns:
      A scalar; 0 if there is no event, NaN if a time is NaN or not after its entry.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = dict(time=jnp.array([1.0, 2.0, 3.0]), event=jnp.array([1, 0, 1]))
      >>> float(jnp.exp(jb.losses.cox(jnp.zeros(3), targets))).__round__(5)
      3.0

    References:
      Cox 1972, "Regression models and life-tables"; Breslow 1974; Efron 1977, "The
      efficiency of Cox's likelihood function for censored data", section 5. Strata are
      groups.
    """
    weights = weigh_rows(scores, where, weights)
    sets = find_risk_sets(targets, weights, ties)
    relative, risks = scale_risks(scores[sets.order], sets.weight)
    sums = jnp.where(sets.event, sum_risks(sets, risks), 1)
    logs = log(sums, ROOT)
    terms = sets.event_weight * logs - sets.weight * relative
    return jnp.where(sets.valid, jnp.sum(clear(terms, sets.event)), jnp.nan)


def scale_risks(scores, weights):
    """Returns scores less the largest one, and w exp(score) times a common factor."""
    real = weights > 0
    top = jnp.max(jnp.where(real, scores, -jnp.inf))
    top = jax.lax.stop_gradient(clear(top, jnp.isfinite(top)))
    relative = clear(scores - top, real)
    # The square of e^(x / 2) is more accurate than e^(x + RANGE / 2), because x + 70
    # would round x.
    root = jnp.exp(jnp.maximum(relative, -RANGE) / 2) * (1 / ROOT)
    return relative, weights * jnp.square(root)


@built_in()
def concordance(scores, targets, *, where=None, weights=None):
    """Returns a smooth upper bound of 1 - concordance index.

    The mean of log2(1 + exp(s_j - s_i)) over the pairs (i, j) with an event of i
    before j's time, weighted by w_i w_j. Since log2(1 + e^x) >= 1[x > 0], it is at
    least the share of discordant pairs. At equal scores it is 1.

    It compares all pairs of a group: G^2 numbers. For many rows, draw groups at random
    in each round.

    Args:
      scores: [G]; larger scores mean higher risk.
      targets: a mapping with ``time`` [G] and ``event`` [G] (1 or 0). Of rows with the
        same time, events come before censored rows. Times of entry do not matter.
      where: bool [G], the real rows; all by default.
      weights: [G], row weights.

    Returns:
      A scalar; 0 if no pair can be compared.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = dict(time=jnp.array([1.0, 2.0]), event=jnp.array([1, 0]))
      >>> float(jb.losses.concordance(jnp.zeros(2), targets)).__round__(5)
      1.0

    References:
      Raykar et al. 2007, "On ranking in survival analysis: bounds on the concordance
      index", section 4.1 (log-sigmoid bound).
    """
    check_names(targets)
    weights = weigh_rows(scores, where, weights)
    scores = clear(scores, weights > 0)
    time, event = (
        jnp.asarray(targets["time"]),
        jnp.asarray(targets["event"], jnp.float32) > 0,
    )
    last = ~event[None, :] & (time[:, None] == time[None, :])
    pairs = event[:, None] & ((time[:, None] < time[None, :]) | last)
    pairs = jnp.where(pairs, weights[:, None] * weights[None, :], 0)
    total = jnp.sum(pairs)
    excess = softplus(scores[None, :] - scores[:, None]) / jnp.log(2.0)
    return jnp.sum(pairs * excess) / jnp.where(total > 0, total, 1)
