# SPDX-License-Identifier: Apache-2.0
"""Metrics of how scores rank the rows of two classes.

In: scores, targets and weights of all rows. Out: one number. Only the order of the
scores counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.metrics.reading import (
    Link,
    average_labels,
    check_shape,
    link_rows,
    read_rows,
)
from jboost.numerics.sums import sum_rows


def auc(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns the area under the ROC curve (``roc_auc_score``); larger is better.

    For K > 2 classes, it is the mean of one-vs-rest; for targets [N, K], labels with
    NaN where unknown, the mean over the labels. NaN if a class has no rows.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.auc([0.1, 0.7, 0.4], [0, 1, 1]))
      1.0
    """
    if np.ndim(targets) == 2:
        return average_labels(auc, scores, targets, weights, inverse_link)
    return _rank("auc", scores, targets, weights, inverse_link)


def average_precision(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns sum_n (R_n - R_{n-1}) P_n (``average_precision_score``).

    Larger is better. P_n and R_n are precision and recall at the n-th threshold. For
    K > 2 classes, it is the mean of one-vs-rest; for targets [N, K], labels with NaN
    where unknown, the mean over the labels.
    """
    if np.ndim(targets) == 2:
        return average_labels(average_precision, scores, targets, weights, inverse_link)
    return _rank("average_precision", scores, targets, weights, inverse_link)


def _rank(name, scores, targets, weights, inverse_link):
    """Computes a metric of two classes, or its one-vs-rest mean over K classes."""
    rank = _auc_of_two if name == "auc" else _precision_of_two
    scores, targets, weights = read_rows(scores, targets, weights)

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
    hits, misses, first, last = _sort(scores, positive, weights, descending=False)
    below = _sums_before(misses)
    share = (below[first] + below[last + 1]) / (2 * below[-1])
    return sum_rows(hits * share) / sum_rows(hits)


def _precision_of_two(scores, positive, weights):
    """Averages over positives the precision among rows ranked at least as high."""
    hits, misses, _, last = _sort(scores, positive, weights, descending=True)
    found, false = _sums_before(hits)[last + 1], _sums_before(misses)[last + 1]
    precision = jnp.where(hits > 0, found / (found + false), 0)
    return sum_rows(hits * precision) / sum_rows(hits)


def _sort(scores, positive, weights, *, descending):
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
