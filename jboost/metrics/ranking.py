# SPDX-License-Identifier: Apache-2.0
"""Metrics of the order of scores: two classes, documents of a query, survival times.

Documents of equal score share their ranks, so that the order of the rows does not
matter. A query without relevant documents is NaN; the mean over queries leaves it out.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped

from jboost.entry.checks import check_integer
from jboost.losses.groups import check_names, check_relevances, check_times, clear
from jboost.losses.ranking import discount, find_gains, find_ideal
from jboost.metrics.reading import (
    check_shape,
    link_rows,
    of_rows,
    read_group,
)
from jboost.numerics.exact import cumulate, sum_rows


@of_rows(by_label=True)
def auc(scores, targets, weights, inverse_link):
    """Returns the area under the ROC curve (``roc_auc_score``); larger is better.

    For K > 2 classes, it is the mean of one-vs-rest. For targets [N, K], which may be
    NaN where unknown, it is the mean over the labels. It is NaN if a class has no rows.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.auc([0.1, 0.7, 0.4], [0, 1, 1]))
      1.0
    """
    return _rank(_auc_of_two, "auc", scores, targets, weights, inverse_link)


@of_rows(by_label=True)
def average_precision(scores, targets, weights, inverse_link):
    """Returns sum_n (R_n - R_{n-1}) P_n (``average_precision_score``).

    Larger is better. P_n and R_n are precision and recall at the n-th threshold. For
    K > 2 classes, it is the mean of one-vs-rest. For targets [N, K], which may be NaN
    where unknown, it is the mean over the labels.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.average_precision([0.1, 0.7, 0.4], [0, 1, 1]))
      1.0
    """
    name = "average_precision"
    return _rank(_precision_of_two, name, scores, targets, weights, inverse_link)


def _rank(rank, name, scores, targets, weights, inverse_link):
    """Computes a metric of two classes, or its one-vs-rest mean over K classes."""

    def measure(scores, positive, weights):
        broken = jnp.any(jnp.isnan(scores) & (weights > 0))  # has no rank
        return jnp.where(broken, jnp.nan, rank(scores, positive, weights))

    if scores.ndim == 1:
        check_shape(targets, scores, name)
        return measure(scores, targets > 0, weights)
    check_shape(targets, scores[:, 0], name)
    if scores.shape[1] == 2:  # the difference ranks rows for logits and probabilities
        return measure(scores[:, 1] - scores[:, 0], targets == 1, weights)
    found = link_rows(scores, inverse_link)
    classes = jnp.arange(found.shape[1], dtype=jnp.float32)
    positive = targets[None] == classes[:, None]
    return jnp.mean(jax.vmap(measure, (0, 0, None))(found.T, positive, weights))


def _auc_of_two(scores, positive, weights):
    """Returns P(a positive is ranked above a negative), with ties counted as 1/2."""
    hits, misses, first, last = _sort_scores(
        scores, positive, weights, descending=False
    )
    below = _sums_before(misses)
    share = (below[first] + below[last + 1]) / (2 * below[-1])
    return sum_rows(hits * share) / sum_rows(hits)


def _precision_of_two(scores, positive, weights):
    """Returns the mean over positives of the precision down to their own rank."""
    hits, misses, _, last = _sort_scores(scores, positive, weights, descending=True)
    found, false = _sums_before(hits)[last + 1], _sums_before(misses)[last + 1]
    precision = jnp.where(hits > 0, found / (found + false), 0)
    return sum_rows(hits * precision) / sum_rows(hits)


def _sort_scores(scores, positive, weights, *, descending):
    """Sorts by score and returns the weights of positives and negatives, and ties.

    The last two results are the indices of the first and last row of each row's tie.
    Rows of weight 0 contribute nothing at any rank.
    """
    order = jnp.argsort(-scores if descending else scores)
    held, indices = scores[order], jnp.arange(len(order), dtype=jnp.int32)
    new = jnp.concatenate([jnp.ones(1, bool), held[1:] != held[:-1]])
    first = jax.lax.cummax(jnp.where(new, indices, 0))
    ends = jnp.concatenate([new[1:], jnp.ones(1, bool)])
    last = jax.lax.cummin(jnp.where(ends, indices, len(order) - 1), reverse=True)
    hits = jnp.where(positive, weights, 0)[order]
    return hits, weights[order] - hits, first, last


def _sums_before(values):
    """Returns the sum of the values before each index, and of all values, [N + 1]."""
    return jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(values)])


class Ranking(NamedTuple):
    """Holds documents in order of decreasing score; masked rows are last."""

    order: Int32[Array, " G"]  # the row at each place
    first: Int32[Array, " G"]  # the first place with the same score
    last: Int32[Array, " G"]
    real: Bool[Array, " G"]  # one entry per row, in the order of the rows


def ndcg(
    scores: Shaped[ArrayLike, " G"],
    targets: Shaped[ArrayLike, " G"],
    *,
    where: Bool[ArrayLike, " G"] | None = None,
    weights: Shaped[ArrayLike, " G"] | None = None,
    at: int | None = None,
) -> Float[Array, ""]:
    """Returns the normalized discounted cumulative gain of the first ``at`` ranks.

    sum_i gain_i discount_i / (the same in the best order), where gain = 2^target - 1
    and discount = 1 / log2(1 + rank) up to rank ``at``, then 0. Documents of equal
    score share the mean of their discounts (``sklearn.metrics.ndcg_score`` with these
    gains as ``y_true``).

    Args:
      scores: [G].
      targets: [G], relevances from 0 to 100.
      where: bool [G], the real rows; all by default.
      weights: [G]; rows of weight 0 are left out.
      at: the number of ranks; None for all.

    Returns:
      A scalar from 0 to 1, or NaN if no document is relevant.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.ndcg([0.3, 0.9, 0.5], [0, 2, 1]))
      1.0

    References:
      Jarvelin and Kekalainen 2002; Burges et al. 2005, section 6 (gain); McSherry and
      Najork 2008, "Computing information retrieval performance measures efficiently in
      the presence of tied scores".
    """
    _check_depth(at)
    ranking = _sort(scores, targets, where, weights)
    check_relevances(targets, ranking.real, "targets")
    size = len(ranking.order)
    at = size if at is None else min(at, size)
    ranks = jnp.arange(size, dtype=jnp.float32)
    discounts = jnp.where(ranks < at, discount(ranks), 0)
    shared = (
        jnp.zeros(size, jnp.float32).at[ranking.first].add(discounts)[ranking.first]
    )
    shared /= (ranking.last - ranking.first + 1).astype(jnp.float32)
    gains = find_gains(targets, ranking.real)
    ideal = find_ideal(gains, at)
    found = jnp.sum(gains[ranking.order] * shared)
    return jnp.where(ideal > 0, found / ideal, jnp.nan)


def mean_average_precision(
    scores: Shaped[ArrayLike, " G"],
    targets: Shaped[ArrayLike, " G"],
    *,
    where: Bool[ArrayLike, " G"] | None = None,
    weights: Shaped[ArrayLike, " G"] | None = None,
    at: int | None = None,
) -> Float[Array, ""]:
    """Returns the mean precision at the ranks of the relevant documents of a query.

    (sum of hits_r / r over the ranks r <= at of relevant documents) / min(number of
    relevant documents, at), where hits_r counts the relevant documents up to rank r.
    Documents of equal score all have the last of their ranks, as in
    ``sklearn.metrics.average_precision_score``.

    Args:
      targets: [G]; a document is relevant if its target is greater than 0.
      scores, where, weights, at: arguments of :func:`ndcg`.

    Returns:
      A scalar from 0 to 1, or NaN if no document is relevant; its mean over queries is
      the mean average precision.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.mean_average_precision([0.3, 0.9, 0.5], [0, 0, 1]))
      0.5

    References:
      Manning, Raghavan and Schuetze 2008, "Introduction to information retrieval",
      eq. 8.8.
    """
    _check_depth(at)
    ranking = _sort(scores, targets, where, weights)
    hits = _find_hits(targets, ranking)
    found = jnp.cumsum(hits)[ranking.last]
    rank = (ranking.last + 1).astype(jnp.float32)
    at = len(hits) if at is None else at
    counted = jnp.where(rank <= at, hits * found / rank, 0)
    total, count = jnp.sum(counted), jnp.minimum(jnp.sum(hits), at)
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)


def mrr(
    scores: Shaped[ArrayLike, " G"],
    targets: Shaped[ArrayLike, " G"],
    *,
    where: Bool[ArrayLike, " G"] | None = None,
    weights: Shaped[ArrayLike, " G"] | None = None,
    at: int | None = None,
) -> Float[Array, ""]:
    """Returns 1 / rank of the first relevant document of a query, 0 below rank ``at``.

    Documents of equal score all have the last of their ranks.

    Args:
      targets: [G]; a document is relevant if its target is greater than 0.
      scores, where, weights, at: arguments of :func:`ndcg`.

    Returns:
      A scalar from 0 to 1, or NaN if no document is relevant; its mean over queries is
      the mean reciprocal rank.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.mrr([0.3, 0.9, 0.5], [0, 0, 1]))
      0.5

    References:
      Voorhees 1999, "The TREC-8 question answering track report".
    """
    _check_depth(at)
    ranking = _sort(scores, targets, where, weights)
    hits = _find_hits(targets, ranking)
    rank = (ranking.last + 1).astype(jnp.float32)
    best = jnp.min(jnp.where(hits > 0, rank, jnp.inf))
    value = 1 / best if at is None else jnp.where(best <= at, 1 / best, 0)
    return jnp.where(jnp.isfinite(best), value, jnp.nan)


def _sort(scores, targets, where, weights):
    scores, weights = read_group(scores, {"targets": targets}, where, weights)
    real = weights > 0
    key = jnp.where(real, -scores, jnp.inf)
    order = jnp.argsort(key).astype(jnp.int32)
    key, places = key[order], jnp.arange(len(scores), dtype=jnp.int32)
    new = jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    ends = jnp.concatenate([new[1:], jnp.ones(1, bool)])
    first = lax.cummax(jnp.where(new, places, 0))
    last = lax.cummin(jnp.where(ends, places, len(scores) - 1), reverse=True)
    return Ranking(order, first, last, real)


def _find_hits(targets, ranking):
    """Returns 1 at the places of relevant documents."""
    hits = (jnp.asarray(targets, jnp.float32) > 0) & ranking.real
    return hits[ranking.order].astype(jnp.float32)


def _check_depth(at):
    if at is not None:
        check_integer("at", at, least=1)


def concordance_index(
    scores: Shaped[ArrayLike, " G"],
    targets: Mapping[str, Shaped[ArrayLike, " G"]],
    *,
    where: Bool[ArrayLike, " G"] | None = None,
    weights: Shaped[ArrayLike, " G"] | None = None,
) -> Float[Array, ""]:
    """Returns the share of pairs with the earlier event at the higher score.

    A pair (i, j) counts if i had the event before j's time, or at the same time and j
    was censored then. Pairs of equal scores count 1/2. Each pair has weight w_i w_j.
    ``sksurv.metrics.concordance_index_censored`` gives the same number.

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
    rows are kept by score within blocks of 2^(level + 1) places. Pairs of places
    that first differ in this bit are counted by a cumulative sum; then each block is
    split.
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
        start = places & -(jnp.int32(2) << level)  # first place of the block
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
