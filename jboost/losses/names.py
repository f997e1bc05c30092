# SPDX-License-Identifier: Apache-2.0
"""The built-in losses by name, the loss of bags, and sums over several targets."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.messages import show
from jboost.losses.groups import clear, log, softplus, weigh_rows
from jboost.losses.ranking import (
    approx_ndcg,
    lambda_rank,
    list_mle,
    listwise_softmax,
    pairwise_logistic,
    xendcg,
)
from jboost.losses.rows import (
    absolute_error,
    bare_loss,
    built_in,
    cauchy,
    expectile,
    exponential,
    focal,
    gamma,
    hinge,
    hinge_squared,
    huber,
    log_cosh,
    logistic,
    poisson,
    pseudo_huber,
    quantile,
    softmax,
    squared_error,
    tweedie,
    welsch,
)
from jboost.losses.survival import concordance, cox


@built_in()
def bag(scores, targets, *, where=None):
    """Returns the cross-entropy of a bag that is positive if one of its rows is.

    -log P for a positive bag and -log(1 - P) for a negative one, where 1 - P = prod_i
    (1 - sigmoid(s_i)) (noisy or): the score is the logit of a row. A bag of one row has
    the loss :func:`logistic`.

    Args:
      scores: [G].
      targets: [G]; the bag is positive if any of them is greater than 0. The label of
        the bag may stand in all of its rows.
      where: bool [G], the real rows; all by default.

    Returns:
      A scalar; 0 without real rows.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> loss = jb.losses.bag(jnp.zeros(2), jnp.array([1, 1]))
      >>> float(jnp.exp(-loss)).__round__(5)
      0.75

    References:
      Maron and Lozano-Perez 1998, "A framework for multiple-instance learning"; Zhang,
      Platt and Viola 2005, "Multiple instance boosting for object detection", eq. 2
      and 3 (noisy or).
    """
    real = weigh_rows(scores, where, None) > 0
    positive = jnp.any((jnp.asarray(targets, jnp.float32) > 0) & real)
    negative_loss = jnp.sum(clear(softplus(clear(scores, real)), real))
    # P = 1 - e^-x. Each form is accurate where the other is not (Maechler 2012).
    small = negative_loss < math.log(2)
    below = log(-jnp.expm1(-jnp.where(positive & small, negative_loss, 1)))
    above = jnp.log1p(-jnp.exp(-jnp.where(small, 1, negative_loss)))
    return jnp.where(positive, -jnp.where(small, below, above), negative_loss)


def _by_name(*losses: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return MappingProxyType({loss.__name__: loss for loss in losses})


LOSSES = _by_name(
    squared_error, absolute_error, huber, pseudo_huber, log_cosh, quantile,
    expectile, poisson, gamma, tweedie, logistic, softmax, exponential, focal,
    hinge, hinge_squared, cauchy, welsch,
)  # fmt: skip

GROUP_LOSSES = _by_name(
    cox, concordance, pairwise_logistic, listwise_softmax, list_mle, lambda_rank,
    xendcg, approx_ndcg, bag,
)  # fmt: skip


_ANYTHING = 1.0  # is in the domain of every built-in loss of one score


def sum_targets(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the sum of a loss of one score over the K targets of a row.

        L(F, y) = sum of l(F_k, y_k) over all k with a known y_k

    NaN marks a target as missing: it has no gradient in its score, whatever ``loss``
    does with NaN. The scores share nothing but the rounds, and trees with
    ``share_structure=True``.

    :func:`jboost.fit` and all that takes a loss do this for the built-in losses of one
    score where y has shape [N, K].

    Args:
      loss: ``loss(score, target) -> scalar`` for numbers. For a missing target it is
        evaluated, without effect, at score 0 and target 1.

    Returns:
      A loss to pass to :func:`jboost.fit` with ``num_scores=K`` and y of shape [N, K].

    Raises:
      TypeError: the loss is not callable.
      ValueError: the loss takes several scores.

    Example:
      >>> import numpy as np, jboost as jb
      >>> loss = jb.losses.sum_targets(jb.losses.squared_error)
      >>> float(loss(np.float32([1, 5, 2]), np.float32([3, np.nan, 2])))
      4.0
    """
    if not callable(loss):
        raise TypeError(
            f"loss must be callable as loss(score, target), got {show(loss)}"
        )
    if bare_loss(loss) is softmax:
        raise ValueError(
            "loss must be of one score, got losses.softmax, whose K scores are of one "
            "target"
        )
    return partial(_sum_known, loss=loss)


def is_sum(loss: Any) -> bool:
    """Returns whether a loss is from :func:`sum_targets`."""
    return isinstance(loss, partial) and loss.func is _sum_known


def _sum_known(scores, targets, *, loss):
    targets = jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.floating):
        return jnp.sum(jax.vmap(loss)(scores, targets))
    known = ~jnp.isnan(targets)
    # Replaced before the loss sees them: derivatives of a branch that is not taken
    # must be finite, too.
    scores = jnp.where(known, scores, 0)
    targets = jnp.where(known, targets, jnp.asarray(_ANYTHING, targets.dtype))
    return jnp.sum(jnp.where(known, jax.vmap(loss)(scores, targets), 0))


def count_scores(loss: Any, y: Any, num_scores: int) -> int:
    """Returns the number of scores of a model of these targets.

    It is ``num_scores``, except that a built-in loss of one score has K scores where y
    has shape [N, K], K > 1, and ``num_scores`` is 1, its default.
    """
    columns = _count_columns(y)
    if num_scores == 1 and columns > 1 and _has_one_score(loss):
        return columns
    return num_scores


def widen_loss(loss: Any, targets: Any, num_scores: int) -> Any:
    """Returns the loss, summed over the targets of a row if it is of one score.

    ``targets`` are arrays (or shapes) with first axis N.
    """
    columns = _count_columns(targets)
    if columns > 1 and bare_loss(loss) is softmax:
        raise ValueError(
            f"y must hold one class in each row for losses.softmax, got {columns} "
            "columns; for several labels in a row use losses.logistic, and for "
            "probabilities of the classes optax.losses.softmax_cross_entropy"
        )
    if columns < 2 or not _has_one_score(loss):
        return loss
    if num_scores != columns:
        raise ValueError(
            f"num_scores must be {columns} for losses.{bare_loss(loss).__name__} and y "
            f"of {columns} columns, got {num_scores}"
        )
    return sum_targets(loss)


def _has_one_score(loss):
    bare = bare_loss(loss)
    return bare is not softmax and any(bare is each for each in LOSSES.values())


def _count_columns(y):
    """Returns K for targets [N, K]; 0 for all others."""
    if isinstance(y, list):
        try:
            y = np.asarray(y)
        except Exception:  # any class; refused later, by name
            return 0
    shape = getattr(y, "shape", ())
    return shape[1] if isinstance(shape, tuple) and len(shape) == 2 else 0
