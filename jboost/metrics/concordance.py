# SPDX-License-Identifier: Apache-2.0
"""The concordance index of scores and censored times.

In: scores, times and events of the rows of one group. Out: one number; larger is
better. It takes O(N log N) time and O(N) memory.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Shaped

from jboost.losses.group_targets import check_names, check_times
from jboost.losses.groups import clear
from jboost.metrics.reading import read_group
from jboost.numerics.cumulative import cumulate


def concordance_index(
    scores: Shaped[ArrayLike, " G"],
    targets: Mapping[str, Shaped[ArrayLike, " G"]],
    *,
    where: Bool[ArrayLike, " G"] | None = None,
    weights: Shaped[ArrayLike, " G"] | None = None,
) -> Float[Array, ""]:
    """Returns the share of pairs in which the higher score had the event earlier.

    A pair (i, j) counts if i had the event before j's time, or at the same time and j
    was censored then. Pairs of equal scores count 1/2. Each pair has weight w_i w_j.
    Same as ``sksurv.metrics.concordance_index_censored``.

    Args:
      scores: [G]; larger scores mean higher risk. Negate predicted times.
      targets: a mapping with ``time`` [G] and ``event`` [G] (1 or 0). Times of entry do
        not matter.
      where: bool [G], the real rows; all by default.
      weights: [G], row weights.

    Returns:
      A scalar from 0 to 1, or NaN if no pair can be compared.

    Raises:
      TypeError, ValueError: shapes differ, a score or time is NaN, or an event is
        neither 0 nor 1. Traced values are not checked.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 1])
      >>> float(jb.metrics.concordance_index([0.9, 0.2, 0.5], targets))
      1.0

    References:
      Harrell et al. 1982, "Evaluating the yield of medical tests"; Harrell, Lee and
      Mark 1996, section 5.5.
    """
    check_names(targets)
    named = {name: targets[name] for name in ("time", "event")}
    scores, weights = read_group(scores, named, where, weights)
    real = weights > 0
    check_times(named, real, "targets")
    scores = clear(scores, real)
    time = clear(jnp.asarray(targets["time"], jnp.float32), real)
    event = (jnp.asarray(targets["event"], jnp.float32) > 0) & real
    total = _weigh_pairs(time, event, weights)
    weigh = jax.vmap(_weigh_lower, (0, None, None, None))
    right, wrong = weigh(jnp.stack([scores, -scores]), time, event, weights)
    known = total > 0
    share = 0.5 + 0.5 * (right - wrong) / jnp.where(known, total, 1)
    return jnp.where(known, share, jnp.nan)


def _weigh_pairs(time, event, weights):
    """Returns the sum of w_i w_j over the pairs that count."""
    order = jnp.lexsort((event, -time))  # all that i is compared with stand before it
    time, event, weights = time[order], event[order], weights[order]
    same = (time[1:] == time[:-1]) & (event[1:] == event[:-1])
    new = jnp.concatenate([jnp.ones(1, bool), ~same])
    places = jnp.arange(len(time), dtype=jnp.int32)
    first = lax.cummax(jnp.where(new, places, 0))
    before = jnp.pad(cumulate(weights), (1, 0))
    return jnp.sum(jnp.where(event, weights * before[first], 0))


def _weigh_lower(scores, time, event, weights):
    """Returns the sum of w_i w_j over the pairs that count with s_j < s_i.

    Row i is compared with the rows that come before it by decreasing time, censored
    rows first. Events of the same time come by decreasing score, so that none before
    another one has a lower score. To count rows with a lower place and a lower score,
    rows are kept by score within blocks of 2^(level + 1) places. Pairs whose places
    first differ in this bit are counted by a cumulative sum; then each block is split.
    """
    order = jnp.lexsort((-scores, event, -time)).astype(jnp.int32)
    size = len(order)
    levels = (size - 1).bit_length()
    padding = (0, 2**levels - size)
    weights = jnp.pad(weights[order], padding)
    risky = jnp.pad(event[order], padding)
    scores = jnp.pad(scores[order], padding)
    places = jnp.arange(2**levels, dtype=jnp.int32)
    # Of equal scores the later place comes first: they are not lower.
    held = jnp.lexsort((-places, scores)).astype(jnp.int32)

    def split(step, state):
        held, total = state
        level = levels - 1 - step
        late = (held >> level) & 1 == 1
        start = places & -(jnp.int32(2) << level)  # of the block
        weight = weights[held]
        lower = _sum_in_blocks(jnp.where(late, 0, weight), start)
        total += jnp.sum(jnp.where(late & risky[held], weight * lower, 0))
        early = _sum_in_blocks((~late).astype(jnp.int32), start)
        half = jnp.int32(1) << level
        target = jnp.where(late, half + places - early, start + early - 1)
        return jnp.zeros_like(held).at[target].set(held, unique_indices=True), total

    return lax.fori_loop(0, levels, split, (held, jnp.float32(0)))[1]


def _sum_in_blocks(values, start):
    """Returns cumulative sums from the start of each block on."""
    sums = jnp.cumsum(values)
    return sums - jnp.pad(sums, (1, 0))[start]
