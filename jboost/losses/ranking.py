# SPDX-License-Identifier: Apache-2.0
"""Losses of rankings of the documents of one query: pairwise, listwise, LambdaRank.

A document's gain is 2^relevance - 1. Sums over pairs come first: their derivatives
evaluate each pair only once.
"""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.custom_derivatives import SymbolicZero

from jboost.entry.checks import check_integer, check_word
from jboost.losses.groups import clear, softplus, weigh_rows
from jboost.losses.rows import POSITIVE, built_in
from jboost.losses.survival import Ties, check_ties, cox


@jax.custom_jvp
def logistic_pairs(scores, weights):
    """Returns the sum over pairs of |w_ij| log(1 + exp(-sign(w_ij) (s_i - s_j))).

    Args:
      weights: [T, G], of all pairs that one of the first T rows belongs to: positive
        where row i should have the higher score, negative where row j should. w_ji is
        -w_ij; such a pair counts once.
    """
    return sum_once(jnp.abs(weights) * softplus(-find_lead(scores, weights)))


@partial(logistic_pairs.defjvp, symbolic_zeros=True)
def _differentiate_pairs(primals, tangents):
    (scores, weights), (moved, changed) = primals, tangents
    tangent = jnp.zeros((), scores.dtype)
    if not isinstance(moved, SymbolicZero):
        tangent += jnp.sum(_find_slopes(scores, weights) * moved)
    if not isinstance(changed, SymbolicZero):
        lead = find_lead(scores, weights)
        tangent += sum_once(jnp.sign(weights) * softplus(-lead) * changed)
    return logistic_pairs(scores, weights), tangent


@jax.custom_jvp
def _find_slopes(scores, weights):
    """Returns the derivative in the scores: - sum_j w_ij / (1 + exp(lead_ij))."""
    return -_sum_by_row(weights * jax.nn.sigmoid(-find_lead(scores, weights)))


@partial(_find_slopes.defjvp, symbolic_zeros=True)
def _differentiate_slopes(primals, tangents):
    (scores, weights), (moved, changed) = primals, tangents
    share = jax.nn.sigmoid(-find_lead(scores, weights))
    tangent = jnp.zeros_like(scores)
    if not isinstance(moved, SymbolicZero):
        # The only numbers that products with the Hessian need.
        curvature = jnp.abs(weights) * share * (1 - share)
        tangent += _sum_by_row(curvature * _subtract(moved, len(weights)))
    if not isinstance(changed, SymbolicZero):
        tangent -= _sum_by_row(changed * share)
    return -_sum_by_row(weights * share), tangent


def find_lead(scores, weights):
    """Returns the score that should be higher minus the other one, [T, G]."""
    lead = _subtract(scores, len(weights))
    return jnp.where(weights < 0, -lead, lead)


def sum_once(values):
    """Sums values [T, G], each pair once; pairs among the first T rows appear twice."""
    first, size = values.shape
    share = jnp.where(jnp.arange(size, dtype=jnp.int32) < first, 0.5, 1.0)
    return jnp.sum(values * share.astype(values.dtype)[None])


def _subtract(values, first):
    """Returns the differences [T, G]: each of the first T values minus each value."""
    return values[:first, None] - values[None, :]


def _sum_by_row(values):
    """Sums antisymmetric values [T, G] of pairs, v_ji = -v_ij, over j to [G]."""
    first, size = values.shape
    sums = jnp.sum(values, axis=1)
    if first == size:
        return sums
    return jnp.concatenate([sums, -jnp.sum(values[:, first:], axis=0)])


@built_in()
def pairwise_logistic(scores, targets, *, where=None):
    """Returns the sum of log(1 + exp(s_j - s_i)) over the pairs with y_i > y_j.

    It is a sum, so that a query with more pairs weighs more.

    Args:
      scores: [G].
      targets: [G], relevances or anything else that is ordered.
      where: bool [G], the real rows; all by default.

    Returns:
      A scalar; 0 if all targets are equal.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> loss = jb.losses.pairwise_logistic(jnp.zeros(3), jnp.array([2, 0, 0]))
      >>> float(loss / jnp.log(2.0)).__round__(5)
      2.0

    References:
      Burges et al. 2005, "Learning to rank using gradient descent" (RankNet), eq. 3.
    """
    real = weigh_rows(scores, where, None) > 0
    scores, targets = clear(scores, real), jnp.asarray(targets)
    higher, lower = targets[:, None], targets[None, :]
    order = jnp.where(higher > lower, 1.0, jnp.where(higher < lower, -1.0, 0.0))
    order = clear(order.astype(scores.dtype), real[:, None] & real[None, :])
    return logistic_pairs(scores, order)


@built_in()
def listwise_softmax(scores, targets, *, where=None):
    """Returns -sum_i p_i log softmax(scores)_i, where p_i = gain_i / sum of gains.

    Args:
      scores: [G].
      targets: [G], relevances from 0 to 100; the gain is 2^target - 1.
      where: bool [G], the real rows; all by default.

    Returns:
      A scalar; 0 if no document is relevant.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> loss = jb.losses.listwise_softmax(jnp.zeros(3), jnp.array([2, 0, 1]))
      >>> float(jnp.exp(loss)).__round__(5)
      3.0

    References:
      Cao et al. 2007, "Learning to rank: from pairwise approach to listwise approach"
      (ListNet), eq. 3 and 5, with top-one probabilities; the gains are those of NDCG,
      as in Bruch et al. 2019, "An analysis of the softmax cross entropy loss".
    """
    real = weigh_rows(scores, where, None) > 0
    return _cross_entropy(scores, find_gains(targets, real), real)


@built_in()
def xendcg(scores, targets, *, key, where=None):
    """Returns the softmax cross-entropy with labels 2^target - u for random u.

    It is -sum_i p_i log softmax(scores)_i with p_i = (2^y_i - u_i) / sum_j (2^y_j -
    u_j). Each u_i is drawn from U(0, 1) whenever the loss is computed.

    Args:
      scores: [G].
      targets: [G], relevances from 0 to 100.
      key: the PRNG key of the group; training passes a new one in each round.
      where: bool [G], the real rows; all by default.

    Returns:
      A scalar; 0 without real rows.

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> targets, key = jnp.array([2, 0, 1]), jax.random.key(0)
      >>> loss = jb.losses.xendcg(jnp.zeros(3), targets, key=key)
      >>> float(jnp.exp(loss)).__round__(5)
      3.0

    References:
      Bruch 2021, "An alternative cross entropy loss for learning-to-rank", eq. 5 and 8
      (XE-NDCG).
    """
    real = weigh_rows(scores, where, None) > 0
    drawn = jax.random.uniform(key, scores.shape, scores.dtype)
    labels = clear(find_gains(targets, real) + 1 - drawn, real)
    return _cross_entropy(scores, labels, real)


@built_in(ties=check_ties)
def list_mle(scores, targets, *, where=None, ties: Ties = "efron"):
    """Returns the negative log-likelihood of the order of the targets.

    -log prod_i exp(s_i) / sum_{k not before i} exp(s_k), with the documents in order of
    decreasing relevance (Plackett-Luce). Documents of equal relevance are tied, so that
    the order of the rows does not matter; see :func:`cox`, which is the same
    likelihood.

    Args:
      scores: [G].
      targets: [G], relevances or anything else that is ordered.
      where: bool [G], the real rows; all by default.
      ties: "efron" or "breslow", the approximation for equal targets.

    Returns:
      A scalar; 0 without real rows.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> loss = jb.losses.list_mle(jnp.zeros(3), jnp.array([2, 0, 1]))
      >>> float(jnp.exp(loss)).__round__(4)
      6.0

    References:
      Xia et al. 2008, "Listwise approach to learning to rank: theory and algorithm",
      eq. 8 (ListMLE).
    """
    order = -jnp.asarray(targets, scores.dtype)
    events = dict(time=order, event=jnp.ones_like(order))
    return cox(scores, events, where=where, ties=ties)


@built_in(temperature=POSITIVE)
def approx_ndcg(scores, targets, *, where=None, temperature=0.1):
    """Returns 1 - NDCG with smooth ranks.

    NDCG = sum_i gain_i / log2(1 + rank_i) / ideal, where rank_i = 1 + sum_{j != i}
    sigmoid((s_j - s_i) / temperature). The loss is not convex.

    Args:
      scores: [G].
      targets: [G], relevances from 0 to 100; the gain is 2^target - 1.
      where: bool [G], the real rows; all by default.
      temperature: the difference of scores that counts as certain, in their units.

    Returns:
      A scalar from 0 to 1; 0 if no document is relevant.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = jnp.array([2, 0, 1])
      >>> float(jb.losses.approx_ndcg(jnp.array([9.0, 0.0, 5.0]), targets)).__round__(5)
      0.0

    References:
      Qin, Liu and Li 2010, "A general approximation framework for direct optimization
      of information retrieval measures", eq. 9 and 14.
    """
    real = weigh_rows(scores, where, None) > 0
    gains, scores = find_gains(targets, real), clear(scores, real)
    others = real[None, :] & ~jnp.eye(len(scores), dtype=bool)
    above = jax.nn.sigmoid((scores[None, :] - scores[:, None]) / temperature)
    ranks = 1 + jnp.sum(clear(above, others), axis=1)
    ideal = find_ideal(gains, len(scores))
    found = jnp.sum(gains / jnp.log2(1 + ranks))
    return jnp.where(ideal > 0, 1 - found / jnp.where(ideal > 0, ideal, 1), 0)


def find_gains(targets, real):
    """Returns 2^target - 1; 0 for masked rows."""
    return jnp.exp2(clear(jnp.asarray(targets, jnp.float32), real)) - 1


def find_ideal(gains, at):
    """Returns the discounted gain of the first ``at`` ranks in the best order."""
    best = -jnp.sort(-gains)[:at]
    return jnp.sum(best * discount(jnp.arange(best.shape[0], dtype=best.dtype)))


def discount(rank):
    """Returns 1 / log2(2 + rank); the first rank is 0."""
    return 1 / jnp.log2(2 + rank)


def _cross_entropy(scores, labels, real):
    """Returns the cross-entropy of softmax(scores) to labels >= 0; 0 if all are 0."""
    total = jnp.sum(labels)
    shares = labels / jnp.where(total > 0, total, 1)
    scores = clear(scores, real)
    top = jax.lax.stop_gradient(jnp.max(jnp.where(real, scores, -jnp.inf)))
    scores = clear(scores - clear(top, jnp.isfinite(top)), real)
    sums = jnp.sum(clear(jnp.exp(scores), real))
    logsum = jnp.log(jnp.where(total > 0, sums, 1))
    return clear(logsum - jnp.sum(shares * scores), total > 0)


Normalize = Literal["none", "scores", "sum", "both"]

_COUNTED = 256  # rows; up to here counting is faster than sorting in XLA on a CPU
_MANY = 2  # documents are sorted if there are more than this times the truncation level


def _check_depth(name, at):
    if at is not None:
        check_integer(name, at, least=1)


@built_in(at=_check_depth, normalize=partial(check_word, words=get_args(Normalize)))
def lambda_rank(
    scores, targets, *, where=None, at: int | None = 30, normalize: Normalize = "none"
):
    """Returns the sum of |change of NDCG| log(1 + exp(s_j - s_i)), y_i > y_j.

    The change is that of swapping i and j in the present order: |gain_i - gain_j|
    |discount_i - discount_j| / ideal, where gain = 2^y - 1, discount = 1 / log2(1 +
    rank), and ideal is the largest discounted gain of the first ``at`` ranks. Only
    pairs with a document among the first ``at`` count. Documents of equal score are
    ranked in the order of the rows.

    The weights count as constants, so the gradient of the loss consists of the lambdas;
    the loss itself may rise while NDCG improves.

    Args:
      scores: [G].
      targets: [G], relevances from 0 to 100.
      where: bool [G], the real rows; all by default.
      at: the truncation level; None for all ranks. Time and memory grow as at x G.
      normalize: "scores" divides each weight by 0.01 + |s_i - s_j| (unless all scores
        are equal); "sum" multiplies the loss by log2(1 + S) / S, where S is the sum of
        |lambda| over all pairs and both of their documents; "both" does both, as
        LightGBM with ``lambdarank_norm`` and XGBoost with
        ``lambdarank_score_normalization`` and ``lambdarank_normalization`` do, which
        are their defaults.

    Returns:
      A scalar; 0 if no pair counts.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = jnp.array([0, 1])
      >>> loss = jb.losses.lambda_rank(jnp.array([0.0, 0.0]), targets)
      >>> change = 1 - 1 / jnp.log2(3.0)
      >>> float(loss / change / jnp.log(2.0)).__round__(4)
      1.0

    References:
      Burges 2010, "From RankNet to LambdaRank to LambdaMART: an overview", section 4
      and eq. 6; Wang et al. 2018, "The LambdaLoss framework", for the loss with
      this gradient. The normalizations are LightGBM's (pull request 2331).
    """
    size = len(scores)
    top = size if at is None else min(at, size)
    real = weigh_rows(scores, where, None) > 0
    gains = find_gains(targets, real)
    ideal = find_ideal(gains, top)
    scores = clear(scores, real)
    keys = jnp.where(real, -lax.stop_gradient(scores), jnp.inf)
    ranks, first = jnp.arange(size, dtype=jnp.int32), size
    if size <= _MANY * top:
        ranks = _find_ranks(keys)
    else:  # the first ``top`` documents come first
        order, first = _find_order(keys), top
        scores, real, gains = scores[order], real[order], gains[order]
    discounts = discount(ranks.astype(scores.dtype))
    counts = ranks < top
    pairs = (counts[:first, None] | counts[None, :]) & real[:first, None] & real[None]
    change = gains[:first, None] - gains[None, :]
    change *= jnp.abs(discounts[:first, None] - discounts[None, :])
    change = clear(change / jnp.where(ideal > 0, ideal, 1), pairs & (ideal > 0))
    lead = find_lead(lax.stop_gradient(scores), change)
    return logistic_pairs(scores, _normalize(change, lead, normalize))


def _find_ranks(keys):
    """Returns how many rows come before each one; ties keep the order of the rows."""
    row = jnp.arange(len(keys), dtype=jnp.int32)
    key, other = keys[:, None], keys[None, :]
    before = (other < key) | ((other == key) & (row[None, :] < row[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _find_order(keys):
    """Returns the rows in increasing order of their keys; ties keep their order."""
    size = len(keys)
    row = jnp.arange(size, dtype=jnp.int32)
    if size > _COUNTED:
        return lax.sort((keys, row), num_keys=1)[1]
    return jnp.zeros_like(row).at[_find_ranks(keys)].set(row, unique_indices=True)


def _normalize(change, lead, normalize):
    """Returns the weights of the pairs [T, G]; see :func:`logistic_pairs`."""
    if normalize in ("scores", "both"):
        spread = jnp.any((lead != 0) & (change != 0))
        change = jnp.where(spread, change / (0.01 + jnp.abs(lead)), change)
    if normalize in ("sum", "both"):
        total = 2 * sum_once(jnp.abs(change) * nn.sigmoid(-lead))
        some = jnp.where(total > 0, total, 1)
        change *= jnp.where(total > 0, jnp.log2(1 + some) / some, 1)
    return change
