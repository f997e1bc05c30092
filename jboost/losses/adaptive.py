# SPDX-License-Identifier: Apache-2.0
"""Losses with parameters that are re-estimated after each round.

A function estimates them from the scores of all rows. The second part, mixed effects,
has y = score + b_group + error, b ~ N(0, t^2), error ~ N(0, s^2). The likelihood of
a group's n residuals r needs only n, their mean m, and the sum of (r - m)^2.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.entry.checks import check_number
from jboost.entry.decorators import traceable
from jboost.entry.messages import show
from jboost.losses.groups import clear, weigh_rows
from jboost.losses.rows import absolute_error, built_in, check_parameter, huber
from jboost.numerics.arrays import middle_float, number_ids, read_ids
from jboost.numerics.derivatives import differentiable
from jboost.numerics.exact import sum_rows

Scalar = Float[ArrayLike, ""]

Report = Literal["current", "first"]


class Adaptive(NamedTuple):
    """Holds a loss with parameters that are re-estimated after each round.

    Attributes:
      loss: the loss of a row, or of a group of rows, at given parameters.
      estimate: the function that estimates the parameters.
      report: the parameters that reported losses use.

    Example:
      >>> import jboost as jb
      >>> loss = jb.losses.make_adaptive_huber()
      >>> isinstance(loss, jb.losses.Adaptive), loss.estimate is not None
      (True, True)
    """

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
        group; the mask ``where`` [G] marks the real rows.
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

    Example:
      >>> import jboost as jb
      >>> jb.losses.make_adaptive_huber(alpha=0.9).report
      'first'
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
    exact and much cheaper than sorting inside a compiled loop. The derivative is the
    weighted mean of those of the values equal to v; in weights and q, it is 0.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> values, weights = jnp.array([1.0, 2.0, 9.0]), jnp.ones(3)
      >>> float(jb.losses.weighted_quantile(values, weights, 0.5))
      2.0
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


STEPS = 24  # halve log(1e12) to 2e-6


class Variances(NamedTuple):
    """Holds the variances of a model with random intercepts.

    Attributes:
      residual: the variance s^2 of a row around the intercept of its group.
      intercept: the variance t^2 of the intercepts.

    Example:
      >>> import jboost as jb
      >>> variances = jb.losses.Variances(residual=4.0, intercept=1.0)
      >>> variances.intercept / (variances.intercept + variances.residual)
      0.2
    """

    residual: Float[Array, ""]
    intercept: Float[Array, ""]


def _check_variances(name, variances):
    residual, intercept = variances
    check_number(f"residual of {name}", residual, above=0)
    check_number(f"intercept of {name}", intercept, least=0)


@built_in(variances=_check_variances)
def random_intercept(scores, targets, variances, *, where=None, weights=None):
    """Returns the negative log-likelihood of a group with a random intercept.

    (sum_i (r_i - m)^2 / s^2 + n m^2 / (s^2 + n t^2) + n log s^2 + log(1 + n t^2 / s^2))
    / 2, up to n log(2 pi) / 2, with r = target - score and m its mean. Its gradient
    pulls the scores to the targets less the expected intercept of the group.

    Args:
      scores: [G].
      targets: [G].
      variances: s^2 and t^2, a :class:`Variances` or another pair.
      where: bool [G], the real rows; all by default.
      weights: [G]; a row of weight 2 counts as two rows.

    Returns:
      A scalar; 0 without real rows.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> variances = jb.losses.Variances(jnp.float32(1), jnp.float32(3))
      >>> loss = jb.losses.random_intercept(jnp.zeros(1), jnp.ones(1), variances)
      >>> float(loss - jnp.log(4.0) / 2)
      0.125

    References:
      Laird and Ware 1982, "Random-effects models for longitudinal data"; Sigrist 2022,
      "Gaussian process boosting", for trees.
    """
    residual, intercept = variances
    weights = weigh_rows(scores, where, weights)
    difference = jnp.asarray(targets, scores.dtype) - scores
    difference = clear(difference, weights > 0)
    size = jnp.sum(weights)
    mean = jnp.sum(weights * difference) / jnp.where(size > 0, size, 1)
    inside = jnp.sum(weights * jnp.square(difference - mean)) / residual
    between = size * jnp.square(mean) / (residual + size * intercept)
    spread = size * jnp.log(residual) + jnp.log1p(size * intercept / residual)
    return (inside + between + spread) / 2


def estimate_variances(scores, targets, weights, groups) -> Variances:
    """Returns the variances that maximize the likelihood of the residuals.

    With q = t^2 / s^2, the best s^2 is (sum (r - m_g)^2 + sum_g n_g m_g^2 / (1 + q
    n_g)) / N. The derivative of the profile likelihood in q is bisected on a
    logarithmic scale, 1e-6 <= q <= 1e6; t^2 is 0 if the likelihood falls from there.

    Args:
      scores: [N].
      targets: [N].
      weights: [N]; rows of weight 0 are ignored.
      groups: N ids of any kind; if traced, numbers from 0 to N - 1.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = jnp.array([2.0, 2.2, -2.0, -2.2])
      >>> groups = jnp.array([0, 0, 1, 1])
      >>> found = jb.losses.estimate_variances(
      ...     jnp.zeros(4), targets, jnp.ones(4), groups)
      >>> [float(each).__round__(3) for each in found]
      [0.02, 4.4]
    """
    numbers = _number_groups(groups)
    size, mean, inside = _summarize(scores, targets, weights, numbers)
    rows = jnp.sum(size)

    def find_residual(ratio):
        between = jnp.sum(size * jnp.square(mean) / (1 + ratio * size))
        found = (inside + between) / jnp.where(rows > 0, rows, 1)
        return jnp.maximum(found, jnp.finfo(jnp.float32).tiny)

    def rises(log_ratio):
        """Returns whether a larger ratio is more likely."""
        share = size / (1 + jnp.exp(log_ratio) * size)
        gain = jnp.sum(jnp.square(share * mean)) / find_residual(jnp.exp(log_ratio))
        return gain > jnp.sum(share)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        up = rises(middle)
        return jnp.where(up, middle, low), jnp.where(up, high, middle)

    edge = jnp.log(jnp.float32(1e6))
    found = lax.fori_loop(0, STEPS, halve, (-edge, edge))[0]
    ratio = jnp.where(rises(-edge), jnp.exp(found), 0)
    residual = find_residual(ratio)
    return Variances(residual, ratio * residual)


def make_random_intercept() -> Adaptive:
    """Returns :func:`random_intercept` with variances estimated in each round.

    Train it with ``groups``: the subjects, stores or regions that have an intercept of
    their own. Predictions are those of a new group, with an intercept of 0; for known
    groups add :func:`predict_intercepts`. The variances of the model are in
    ``history.parameters``.

    Example:
      >>> import jboost as jb
      >>> loss = jb.losses.make_random_intercept()
      >>> loss.report
      'current'
    """
    return adaptive(random_intercept, estimate_variances)


@traceable
def predict_intercepts(
    scores: Shaped[ArrayLike, " N"],
    targets: Shaped[ArrayLike, " N"],
    variances: tuple[Float[ArrayLike, ""], Float[ArrayLike, ""]],
    groups: Shaped[ArrayLike, " N"] | Sequence[Any],
    *,
    weights: Shaped[ArrayLike, " N"] | None = None,
) -> Float[Array, " N"]:
    """Returns the expected intercept of each row's group, given its targets.

    It is t^2 n m / (s^2 + n t^2), with the mean m of the group's residuals: the best
    linear unbiased prediction.

    Args:
      scores: [N].
      targets: [N].
      variances: s^2 and t^2.
      groups: N ids of any kind, as for :func:`jboost.fit`; if traced, numbers from 0
        to N - 1.
      weights: [N].

    Raises:
      ValueError: shapes differ, or an id is missing.

    Example:
      >>> import jboost as jb
      >>> found = jb.losses.predict_intercepts(
      ...     [0.0, 0.0, 1.0], [2.0, 4.0, 1.0], (1.0, 1.0), ["a", "a", "b"])
      >>> [float(each) for each in found]
      [2.0, 2.0, 0.0]

    References:
      Robinson 1991, "That BLUP is a good thing: the estimation of random effects".
    """
    check_parameter("variances", variances, _check_variances)
    residual, intercept = (jnp.asarray(each, jnp.float32) for each in variances)
    scores = jnp.asarray(scores, jnp.float32)
    targets, groups = jnp.asarray(targets, jnp.float32), _number_groups(groups)
    if not scores.shape == targets.shape == groups.shape or scores.ndim != 1:
        raise ValueError(
            f"scores, targets and groups must have shape [N], got {scores.shape}, "
            f"{targets.shape} and {groups.shape}"
        )
    weights = weigh_rows(scores, None, weights)
    size, mean, _ = _summarize(scores, targets, weights, groups)
    return (intercept * size * mean / (residual + size * intercept))[groups]


def _number_groups(groups):
    """Returns numbers from 0 to N - 1 for ids of any kind; traced ids are kept."""
    if isinstance(groups, Tracer):
        return groups
    return jnp.asarray(number_ids(read_ids(groups))[0], jnp.int32)


def _summarize(scores, targets, weights, groups):
    """Returns weight and mean residual by group, and the total of squares within."""
    difference = jnp.asarray(targets, scores.dtype) - scores
    difference = clear(difference, weights > 0)

    def total(values):
        return jax.ops.segment_sum(values, groups, num_segments=len(scores))

    size = total(weights)
    mean = total(weights * difference) / jnp.where(size > 0, size, 1)
    inside = jnp.sum(weights * jnp.square(difference - mean[groups]))
    return size, mean, inside
