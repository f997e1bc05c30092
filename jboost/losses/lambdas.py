# SPDX-License-Identifier: Apache-2.0
"""LambdaMART as a loss: pairs weighted by how much swapping them changes NDCG.

In: scores [G] and relevances [G] of the documents of one query. Out: one number, whose
gradient are the lambdas. The weights depend on the scores, but count as constants when
the loss is differentiated.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax, nn

from jboost.entry.checks import check_integer
from jboost.entry.representation import show
from jboost.losses.groups import clear, weigh_rows
from jboost.losses.pairs import find_lead, logistic_pairs, sum_once
from jboost.losses.ranking import discount, find_gains, find_ideal

Normalize = Literal["none", "scores", "sum", "both"]

_COUNTED = 256  # rows up to which counting is faster than sorting in XLA on a CPU
_MANY = 2  # times the truncation level: so many documents are sorted


def lambda_rank(
    scores, targets, *, where=None, at: int | None = 30, normalize: Normalize = "none"
):
    """Returns the sum of |change of NDCG| log(1 + exp(s_j - s_i)), y_i > y_j.

    The change is that of swapping i and j in the present order: |gain_i - gain_j|
    |discount_i - discount_j| / ideal, where gain = 2^y - 1, discount = 1 / log2(1 +
    rank), and ideal is the largest discounted gain of the first ``at`` ranks. Only
    pairs with a document among the first ``at`` count. Documents of equal score are
    ranked in the order of the rows.

    The weights count as constants, so the gradient of the loss are the lambdas; the
    loss itself may rise while NDCG improves.

    Args:
      scores: [G].
      targets: [G], relevances from 0 to 100.
      where: bool [G], the real rows; all by default.
      at: the truncation level; None for all ranks. Cost and memory are at x G.
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
      and eq. 6; Wang et al. 2018, "The LambdaLoss framework", for the loss whose
      gradient it is. The normalizations are LightGBM's (pull request 2331).
    """
    if normalize not in get_args(Normalize):
        wanted = get_args(Normalize)
        raise ValueError(f"normalize must be one of {wanted}, got {show(normalize)}")
    if at is not None:
        check_integer("at", at, least=1)
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
    """Returns how many rows come before each; ties in the order of the rows."""
    row = jnp.arange(len(keys), dtype=jnp.int32)
    key, other = keys[:, None], keys[None, :]
    before = (other < key) | ((other == key) & (row[None, :] < row[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _find_order(keys):
    """Returns the rows in increasing order of their keys; ties in order of the rows."""
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
