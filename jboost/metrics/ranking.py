# SPDX-License-Identifier: Apache-2.0
"""Metrics of rankings, for the documents of one query.

In: scores [G] and relevances [G] of the documents, and which rows are real. Out: one
number; larger is better. It is NaN if no document is relevant; the mean over queries
leaves such queries out. Documents of equal score share their ranks, so that the order
of the rows does not matter. Rows of weight 0 are left out; other weights do not matter.
Shapes that differ are refused; NaN scores and bad targets are, unless traced.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped

from jboost.entry.checks import check_integer
from jboost.losses.group_targets import check_relevances
from jboost.losses.ranking import discount, find_gains, find_ideal
from jboost.metrics.reading import read_group


class Ranking(NamedTuple):
    """Holds documents in order of decreasing score; masked rows are last."""

    order: Int32[Array, " G"]  # the row at each place
    first: Int32[Array, " G"]  # the first place with the same score
    last: Int32[Array, " G"]
    real: Bool[Array, " G"]  # of each row, in the order of the rows


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
      scores: [G].
      targets: [G]; a document is relevant if its target is greater than 0.
      where: bool [G], the real rows; all by default.
      weights: [G]; rows of weight 0 are left out.
      at: the number of ranks; None for all.

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
    return _divide(jnp.sum(counted), jnp.minimum(jnp.sum(hits), at))


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
      scores: [G].
      targets: [G]; a document is relevant if its target is greater than 0.
      where: bool [G], the real rows; all by default.
      weights: [G]; rows of weight 0 are left out.
      at: the number of ranks; None for all.

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


def _divide(total, count):
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)


def _check_depth(at):
    if at is not None:
        check_integer("at", at, least=1)
