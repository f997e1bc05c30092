# SPDX-License-Identifier: Apache-2.0
"""Losses with parameters that are re-estimated after each round.

In: a loss with parameters, and a function that estimates them from the scores of all
rows. Out: :class:`Adaptive`, which :func:`jboost.fit` accepts as a loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jboost.entry.checks import check_number
from jboost.entry.representation import show
from jboost.losses.parameters import check_parameter
from jboost.losses.rows import absolute_error, huber
from jboost.numerics.derivatives import differentiable
from jboost.numerics.floats import middle_float
from jboost.numerics.sums import sum_rows

Scalar = Float[ArrayLike, ""]

Report = Literal["current", "first"]


class Adaptive(NamedTuple):
    """Holds a loss with parameters that are re-estimated after each round."""

    loss: Callable[..., Any]
    estimate: Callable[..., Any]
    report: Report = "current"


def adaptive(
    loss: Callable[..., Any],
    estimate: Callable[..., Any],
    *,
    report: Report = "current",
) -> Adaptive:
    """Makes a loss with parameters that are re-estimated after each round.

    The first round uses the parameters estimated from the initial score. The parameters
    of the returned model are in ``history.parameters``.

    Args:
      loss: ``loss(score, target, parameters) -> scalar``, for one row; with ``groups``,
        ``loss(scores, targets, parameters, *, where) -> scalar`` for the rows of one
        group, of which the mask ``where`` [G] marks the real ones.
      estimate: ``estimate(scores, targets, weights) -> parameters`` (any pytree), for
        all N training rows at once; it must ignore rows of weight 0. With ``groups`` it
        may also take the argument ``groups``, int32 [N]: the number of each row's
        group, from 0 to the number of groups - 1.
      report: the parameters used where losses are reported or compared: in the history,
        early stopping, ``cross_validate`` and ``sweep``. "current" uses those estimated
        after the same round; choose it if loss values at different parameters are
        comparable, as for a negative log-likelihood with its normalizing term. "first"
        uses those of the first round; choose it if the loss decreases merely because a
        parameter does, as Huber's loss does with delta.

    Returns:
      A loss to pass to :func:`jboost.fit`.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> def scale(scores, targets, weights):
      ...     return jb.losses.weighted_quantile(abs(targets - scores), weights, 0.9)
      >>> def loss(score, target, delta):
      ...     return jb.losses.huber(score, target, delta=delta)
      >>> friedman = jb.losses.adaptive(loss, scale, report="first")
    """
    for name, function in (("loss", loss), ("estimate", estimate)):
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {show(function)}")
    if report not in get_args(Report):
        raise ValueError(
            f"report must be one of {get_args(Report)}, got {show(report)}"
        )
    return Adaptive(loss, estimate, report)


def make_adaptive_huber(*, alpha: float = 0.9) -> Adaptive:
    """Returns Huber's loss with delta = the alpha-quantile of |r| in each round.

    Friedman 2001, section 4.4 (M_TreeBoost). If that quantile is 0, because a fraction
    alpha of the rows is fitted exactly, delta is the smallest positive |r|: with delta
    = 0 the loss would be constant. If all rows are fitted exactly, delta is 1.

    Losses are reported at the delta of the first round (``report="first"`` in
    :func:`adaptive`), because losses at different deltas are not comparable.
    """
    check_parameter("alpha", alpha, partial(check_number, above=0, below=1))

    def estimate(scores, targets, weights):
        sizes = absolute_error(scores, targets)
        positive = (weights > 0) & (sizes > 0)
        least = jnp.min(jnp.where(positive, sizes, jnp.inf))
        delta = weighted_quantile(sizes, weights, alpha)
        return jnp.maximum(delta, jnp.where(jnp.isfinite(least), least, 1.0))

    return adaptive(
        lambda s, t, delta: huber(s, t, delta=delta), estimate, report="first"
    )


def weighted_quantile(
    values: Float[ArrayLike, " N"], weights: Float[ArrayLike, " N"], q: Scalar
) -> Float[Array, ""]:
    """Returns the smallest value v with sum(weights[values <= v]) >= q sum(weights).

    Bisects the ordered bit patterns of float32 (32 passes over the rows), which is
    exact and much cheaper than sorting inside a compiled loop. The derivative is that
    of the value, the weighted mean of equal ones; 0 in weights and q.
    """
    check_parameter("q", q, partial(check_number, least=0, most=1))
    values = jnp.asarray(values, jnp.float32)
    weights = jnp.asarray(weights, jnp.float32)
    return differentiable(
        _find_quantile, _derive_quantile, values, weights, jnp.float32(q)
    )


def _derive_quantile(found, operands, tangents):
    values, weights, _ = operands
    share = jnp.where(values == found, weights, 0.0)
    moved = jnp.where(share > 0, share * tangents[0], 0.0)
    return jnp.sum(moved) / jnp.maximum(jnp.sum(share), 1e-30)


def _find_quantile(values, weights, q):
    wanted = q * sum_rows(weights)

    def halve(_, interval):
        low, high = interval
        middle = middle_float(low, high)
        enough = sum_rows(jnp.where(values <= middle, weights, 0.0)) >= wanted
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    counted = weights > 0
    low = jnp.min(jnp.where(counted, values, jnp.inf))
    high = jnp.max(jnp.where(counted, values, -jnp.inf))
    below = jnp.nextafter(low, jnp.float32(-jnp.inf))
    return jnp.maximum(jax.lax.fori_loop(0, 32, halve, (below, high))[1], low)
