# SPDX-License-Identifier: Apache-2.0
"""Risk sets of survival times: who could have had each event.

In: times, events and times of entry of the rows of one group, and their weights. Out:
the rows in order of time, and for any positive risks of the rows their sum over the
risk set of each event. Sorting depends on the targets only, summing on the scores only.

A row is at risk at time t if entry < t <= time. Rows with an event at the same time are
tied. With R the sum of the risks at time t and E that of the d tied events, the l-th of
them, l = 0, ..., d - 1, is divided by R (Breslow 1974) or by R - (l / d) E (Efron
1977). Both are sums of positive numbers here; nothing is subtracted, so nothing
cancels.
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.representation import show
from jboost.losses.group_targets import check_names
from jboost.numerics.cumulative import cumulate, cumulate_levels

Ties = Literal["efron", "breslow"]


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
    # The places at whose time a row is at risk, but not as a tied event; None if all
    # rows enter at the beginning.
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
    if ties not in get_args(Ties):
        raise ValueError(f"ties must be one of {get_args(Ties)}, got {show(ties)}")
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
    """Returns R and R - E at each place.

    Args:
      risks: positive numbers in the order of the sets, 0 for masked rows.
    """
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
    """Returns at each place the sum of the values whose span begin..end contains it.

    A span of several places is cut where the highest bit changes in which begin and
    end differ: at the middle of a block of 2^(level + 1) places. Its left part lasts
    until the middle and its right part starts there, so that both are cumulative sums
    within half a block (a disjoint sparse table, transposed).
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
