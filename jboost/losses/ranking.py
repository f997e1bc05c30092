# SPDX-License-Identifier: Apache-2.0
"""Losses of rankings, for the documents of one query.

In: scores [G] and targets [G], the relevance of each document (0, 1, 2, ...; larger is
better). Out: one number. The gain of a document is 2^relevance - 1.
"""

import jax
import jax.numpy as jnp

from jboost.losses.groups import clear, weigh_rows
from jboost.losses.pairs import logistic_pairs
from jboost.losses.parameters import POSITIVE, built_in
from jboost.losses.risk_sets import Ties, check_ties
from jboost.losses.survival import cox


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
    """Returns the softmax cross-entropy to labels 2^target - u with random u.

    -sum_i p_i log softmax(scores)_i, p_i = (2^y_i - u_i) / sum_j (2^y_j - u_j), where
    each u_i is drawn from U(0, 1) whenever the loss is computed.

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
    sigmoid((s_j - s_i) / temperature). Not convex.

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
