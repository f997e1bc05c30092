# SPDX-License-Identifier: Apache-2.0
"""Gradient and positive curvature of every row, and its Fisher information.

Gradient and curvature are [K, N]. Rows where they are not finite are left to the
caller; with ``raised=False``, so are curvatures of "exact" that are not positive.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.entry.collectives import exchange, first_row, some
from jboost.entry.stages import runs_in_stages, stage
from jboost.kernels.exact_sums import skip_on_cpu
from jboost.kernels.xla import exponent_above, power_of_two
from jboost.numerics.derivatives import square_root
from jboost.numerics.exact import sum_each, sum_guessed
from jboost.numerics.random import derive_seeds
from jboost.objective.evaluation import (
    Objective,
    gradients,
    hessians,
    known_shares,
    known_targets,
    map_information,
    map_rows,
    own_curvatures,
    rest_at_minima,
    weighted_mean,
    without_minima,
)

INFORMED = ("fisher", "standardized", "natural")  # policies that need an information
_STREAM = np.uint32(0x85EBCA6B)  # keeps these random numbers apart from those of trees
_FLOOR = 1e-6  # least information of a row, relative to the weighted mean


def information_triangles(
    objective: Objective, scores: Float[Array, "K N"], seed: UInt32[Array, "2"]
) -> Float[Array, "P N"]:
    """Returns the information of every row, the entries F_kl with k <= l, row by row.

    P = K (K + 1) / 2, in the order of ``numpy.triu_indices(K)``. N matrices are never
    in memory at once. The seed is used if the distribution has no formula.
    """
    return map_information(objective, scores, _row_seeds(scores, seed), pack_triangles)


def information_diagonals(
    objective: Objective, scores: Float[Array, "K N"], seed: UInt32[Array, "2"]
) -> Float[Array, "K N"]:
    """Returns F_kk of every row."""
    return map_information(objective, scores, _row_seeds(scores, seed), take_diagonals)


def summarize_information(
    objective: Objective,
    scores: Float[Array, "K N"],
    finish: Callable[..., Float[Array, "... N"]],
    *operands: Any,
):
    """Applies ``finish(rows, *operands)`` to blocks of matrices [N, K, K]."""
    seeds = _row_seeds(scores, jnp.zeros(2, jnp.uint32))
    return map_information(objective, scores, seeds, finish, *operands)


def round_seed(words: UInt32[Array, "2"], number: Array) -> UInt32[Array, "2"]:
    """Returns the seed of a round's draws, which estimate the information."""
    return derive_seeds(jnp.asarray(words) ^ _STREAM, jnp.asarray(number, jnp.int32))


def pack_triangles(rows: Float[Array, "N ..."]) -> Float[Array, "P N"]:
    """Returns the upper triangles of the matrices [N, K, K], or numbers [N]."""
    if rows.ndim == 1:
        return rows[None]
    first, second = np.triu_indices(rows.shape[1])
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    return jnp.stack([rows[:, k, other] for k, other in pairs])


def take_diagonals(rows: Float[Array, "N ..."]) -> Float[Array, "K N"]:
    """Returns the diagonals of the matrices [N, K, K], or numbers [N]."""
    if rows.ndim == 1:
        return rows[None]
    return jnp.stack([rows[:, k, k] for k in range(rows.shape[1])])


def _row_seeds(scores, seed):
    number = jnp.arange(scores.shape[1], dtype=jnp.int32) + first_row()
    return derive_seeds(seed, number)


def informed_derivatives(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    curvature: str,
    seed: UInt32[Array, "2"],
) -> tuple[Float[Array, "K N"], Float[Array, "K N"], Float[Array, "K N"] | None]:
    """Returns w g, w h and w of every row, with weights w from F = F_kk of score k.

    ``"fisher"``: w = 1, h = F. A leaf value is a step of Fisher scoring; w is None.
    ``"natural"``: w = 1 / F, h = F. A leaf value is the mean of the natural gradient
    g / F, as in NGBoost: all rows count alike.
    ``"standardized"``: w = F^(-1/2), so that w g has unit variance in each row if the
    distribution is right; 1 for a score that its own F depends on, such as a rate or
    degrees of freedom: rows where F is great tell more about it. h is the greater of F
    and |l''|: F alone expects nothing from a row far away, such as 2 of the logarithm
    of a normal scale where l'' is 2 z^2. If scores interact, F is at least
    its mean at the start of training, or four times its present mean, if that is less.

    ``"natural"`` and ``"standardized"`` need F of at least 1e-6 of its mean.
    """
    information = information_diagonals(objective, scores, seed)
    if curvature == "fisher":
        return gradients(objective, scores), information, None
    coupling = objective.coupling if curvature == "standardized" else None
    start = None if coupling is None else coupling.start
    information = _raise_information(information, weights, start)
    if curvature == "natural":
        return _weigh(gradients(objective, scores), information)
    gradient, second = _differentiate_twice(without_minima(objective), scores)
    gradient = rest_at_minima(objective.minimizer, scores, gradient)
    alone = None if coupling is None else coupling.self_informed
    return _weigh(gradient, information, second, alone)


@stage
def _raise_information(information, weights, start):
    least = least_curvature(weighted_mean(information, weights), start)
    return jnp.maximum(information, least[:, None])


@stage
def _differentiate_twice(objective, scores):
    """Returns the gradient and the diagonal of the Hessian of every row."""
    found = map_rows(objective, objective.loss.slopes, scores, _with_rows_last)
    return found[0], found[1]


def _with_rows_last(rows):
    """Moves the axis of rows to the end: [N, 2] or [N, 2, K] to [2, K, N]."""
    return rows.T[:, None] if rows.ndim == 2 else jnp.moveaxis(rows, 0, 2)


@stage
def _weigh(gradient, information, second=None, self_informed=None):
    # It is 0 if no row has information, as about degrees of freedom that tend to inf.
    informed = information > 0
    known = jnp.where(informed, information, 1.0)
    if second is None:
        factor, curvature = 1 / known, information
    else:
        alone = True if self_informed is None else self_informed[:, None]
        factor = jnp.where(alone, 1.0, known**-0.5)
        curvature = jnp.fmax(information, second)
    factor = jnp.where(informed, factor, 0.0)
    return factor * gradient, factor * curvature, factor


Policy = Literal[
    "auto", "exact", "secant", "absolute", "unit", "probe",
    "fisher", "natural", "standardized",
]  # fmt: skip
Curvature = Policy | Callable[[Any, Any], Any]  # a function of one row
Chosen = Policy | Literal["function"]  # the policy of a compiled program
_STRAIGHT = 2.0  # factor of the smoothing scale of piecewise linear losses
_FLAT = 0.1  # a Hessian below this fraction of the secant weight counts as flat
_MOST = 0.75  # a loss with this fraction of flat rows counts as pointed
_DECLINE = 4.0  # bound of the curvature at the start, in units of the present mean
_MOST_SQUARE = float(np.finfo(np.float32).max)
_LEAST_ROOT = float(np.finfo(np.float32).tiny)
_NO_DISTANCE = 1e-30  # the smoothing scale of scores that are 0 and all at a minimum


def smoothing_scale(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    guess: Sequence[Float[Array, "..."]] | None = None,
) -> tuple[Float[Array, " K"], list[Float[Array, "..."]] | None]:
    """Returns delta = (weighted mean of sqrt |F - F*|)^2 over rows that have an F*.

    If there is no such row, delta is 1/1000 of the mean magnitude of the scores (or of
    1, if that is greater); :func:`_scale_by_steps` may replace it. It is never so small
    that F +- delta rounds to F.

    Also returns the greatest terms of the sums, a ``guess`` for the next round; a guess
    changes no result.
    """
    minimizer = objective.minimizer
    assert minimizer is not None
    known = jnp.isfinite(minimizer)
    distance = jnp.where(known, jnp.abs(scores - minimizer), 0.0)
    root = jnp.where(known, square_root(distance), 0.0)
    parts = (
        (jnp.abs(scores), weights), (root, weights),
        (known.astype(jnp.float32), weights), (weights, None),
    )  # fmt: skip
    if guess is None:
        found, greatest = sum_each(*parts), None
    else:
        found, greatest, *_ = sum_guessed(parts, guess)
    size, roots, total, whole = found
    size = size / whole
    mean_root = roots / jnp.where(total > 0, total, 1.0)
    delta = jnp.where(total > 0, jnp.square(mean_root), 1e-3 * jnp.maximum(size, 1.0))
    delta = jnp.maximum(delta, 1e-6 * size)
    return jnp.where(delta > 0, delta, _NO_DISTANCE), greatest


def is_pointed(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Bool[ArrayLike, ""]:
    """Checks whether the loss resembles |r| in most rows: a minimum without curvature.

    Returns True if, in at least 75 % of the rows by weight, the Hessian is at most 10 %
    of the secant weight, possibly zero or negative. Leaf values then behave like
    medians: they need more rows, and Newton steps are unreliable.
    """
    if objective.minimizer is None:
        return np.asarray(False)
    if runs_in_stages() and not np.isfinite(objective.minimizer).any():
        return np.asarray(False)  # needs no Hessian
    slopes, curvature = gradients(objective, scores), hessians(objective, scores)
    known = known_targets(objective.loss, objective.targets)
    shares = known_shares(known, weights, len(scores))
    nothing: Any = None  # the rest needs no loss
    objective = Objective(nothing, (), (), (), objective.minimizer)
    return _is_pointed(objective, slopes, curvature, scores, weights, shares)


@stage
def _is_pointed(objective, slopes, curvature, scores, weights, shares):
    delta = smoothing_scale(objective, scores, weights)[0][:, None]
    distance = scores - objective.minimizer
    secant = _secant(slopes, distance, delta)
    flat = curvature <= _FLAT * secant
    flat = (flat & jnp.isfinite(distance)).astype(jnp.float32)
    share = weighted_mean(flat, weights) / shares
    return jnp.mean(share) >= _MOST


def derivatives(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    curvature: Chosen,
    smooth: bool | None = None,
    *,
    raised: bool = True,
    delta: Float[Array, " K"] | None = None,
    seed: UInt32[Array, "2"] | None = None,
) -> tuple[Float[Array, "K N"], Float[Array, "K N"]]:
    """Returns gradient and curvature of every row, not multiplied by weights.

    With t = |F - F*|, g the gradient, h the Hessian, and delta the smoothing scale:

    ``"auto"``: max((g(F + delta) - g(F - delta)) / (2 delta), |g| / sqrt(t^2 +
    delta^2)), so that no row's Newton step goes beyond the row's own minimum; |h|
    where F* does not exist; h for a quadratic loss. For piecewise linear losses delta
    is doubled: otherwise a few rows near their kink would dominate, and extreme
    quantiles of small data would overfit.
    ``"exact"``: h. ``"absolute"``: |h|. ``"unit"``: 1.
    ``"function"``: the result of the user's function.
    ``"fisher"``, ``"natural"``, ``"standardized"``: see
    :func:`jboost.objective.curvature.informed_derivatives`.
    ``"secant"``: |g| / sqrt(t^2 + delta^2), the smoothed majorize-minimize weight
    (Hunter and Lange 2004); |h| where F* does not exist.

    For K > 1, h is the diagonal of the row's Hessian. Where scores interact without
    competing, "auto" is at least the weighted mean of |h| at the initial scores (or
    four times the present mean, if that is less). Where they compete (softmax), "auto"
    is |h|, and the other policies use 2 h in place of h, as XGBoost does; see
    :class:`jboost.objective.evaluation.Coupling`.

    Except for "unit" and quadratic losses, the curvature is at least 1e-6 times the
    weighted mean of its positive part, which is 0 if no row has positive curvature.
    At kinks, where a derivative is not finite, the mean of the derivatives at F +-
    delta replaces it. Rows where that is not finite, either, are left to the caller.

    Args:
      smooth: whether derivatives at F +- delta are needed, if known: a program then
        holds only the code that it runs. They are needed if some row has a minimum that
        the policy depends on, or a derivative that is not finite. None: the program
        decides.
      raised: whether the curvature is raised to its least value; if not, that is left
        to :func:`least_curvature`.
      seed: the seed of random draws, used where information is estimated.
    """
    loss = objective.loss
    if curvature in INFORMED:
        assert seed is not None
        return informed_derivatives(objective, scores, weights, curvature, seed)[:2]
    own = curvature == "function"
    endless = smooth is False and _looks_at_minima(loss, curvature)
    moving = objective._replace(minimizer=None) if endless else objective
    gradient = gradients(moving, scores)
    hessian = (own_curvatures if own else hessians)(objective, scores)
    if objective.minimizer is None and not own:  # quadratic: the Hessian is safe
        unit = curvature == "unit"
        return gradient, jnp.ones_like(gradient) if unit else hessian

    def soften(gradient, hessian):
        return _smooth_derivatives(
            objective, scores, weights, curvature, gradient, hessian, delta
        )

    if objective.coupling is not None and curvature != "auto" and not own:
        # The bound of XGBoost: for softmax the sum of |H_kl| over l, 2 p (1 - p).
        hessian = jnp.where(objective.coupling.competing[:, None], 2.0, 1.0) * hessian

    def plain(gradient, hessian):
        return gradient, hessian if own or curvature == "exact" else jnp.abs(hessian)

    if objective.minimizer is None:
        smooth = False
    if smooth is None and not loss.piecewise_linear:
        # Evaluate two more gradients only if some row has a minimum or is at a kink.
        needed = _needs_smoothing(objective, gradient, hessian, weights, curvature)
        gradient, positive = jax.lax.cond(needed, soften, plain, gradient, hessian)
    elif smooth is False:
        gradient, positive = plain(gradient, hessian)
    else:
        gradient, positive = soften(gradient, hessian)
    if curvature == "unit":
        return gradient, jnp.ones_like(gradient)
    if not raised:
        return gradient, positive
    coupling, start = objective.coupling, None
    if coupling is not None and curvature == "auto":
        start = coupling.start
    least = least_curvature(mean_positive(positive, weights), start)
    return gradient, jnp.maximum(positive, least[:, None])


def count_lost(
    is_any: Bool[Array, ""], find: Callable[[], Bool[Array, " N"]]
) -> Int32[Array, "2"]:
    """Returns how many rows have lost a derivative, and the first of them (or 0).

    ``find`` returns a mask of them. It is called only if ``is_any``, which says that it
    finds any row of this device.
    """

    def count(_):
        lost = find()
        rows = jnp.arange(len(lost), dtype=jnp.int32)
        place = (first_row() + rows).astype(jnp.float32)  # beyond 2^24 one nearby
        first = jnp.max(jnp.where(lost, -place, -jnp.inf))
        return jnp.sum(lost, dtype=jnp.int32), first

    def count_none(is_any):
        # Computed, so that it differs between devices as the other result does.
        none = jnp.float32(-jnp.inf)
        return is_any.astype(jnp.int32), jnp.where(is_any, jnp.float32(0), none)

    own = skip_on_cpu(is_any, count, count_none, is_any)
    (number,), (first,) = exchange([own[0]], [own[1]])
    first = jnp.where(number > 0, -first, 0.0).astype(jnp.int32)
    return jnp.stack([number, first])


def are_finite(
    gradient: Float[Array, "K N"],
    curvature: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Bool[Array, ""]:
    """Returns whether the derivatives of all rows that count are finite."""
    finite = jnp.isfinite(gradient) & jnp.isfinite(curvature)
    return ~some(jnp.any(~finite & (weights > 0)[None, :]))


def _needs_smoothing(objective, gradient, hessian, weights, curvature):
    needed = ~are_finite(gradient, hessian, weights)
    if not _looks_at_minima(objective.loss, curvature):
        return needed
    known = jnp.isfinite(objective.minimizer) & (weights > 0)[None, :]
    return needed | some(jnp.any(known))


def _looks_at_minima(loss, curvature):
    return curvature in ("auto", "secant") and not loss.quadratic


def _smooth_derivatives(
    objective, scores, weights, curvature, gradient, hessian, delta
):
    """Returns gradient and curvature from the gradients at F +- delta."""
    loss = objective.loss
    if delta is None:
        delta, _ = smoothing_scale(objective, scores, weights)
        if loss.num_scores > 1:  # rows may have no minima of their own
            delta = _scale_by_steps(objective, weights, gradient, hessian, delta)
    delta = delta[:, None]
    if loss.piecewise_linear:
        delta = _STRAIGHT * delta
    gradient_up = gradients(objective, scores + delta)
    gradient_down = gradients(objective, scores - delta)
    kink = (gradient_up + gradient_down) / 2
    gradient = jnp.where(jnp.isfinite(gradient), gradient, kink)
    slope = (gradient_up - gradient_down) / (2 * delta)
    hessian = jnp.where(jnp.isfinite(hessian), hessian, slope)
    if curvature in ("exact", "function"):
        return gradient, hessian
    positive = jnp.abs(hessian)
    if curvature in ("auto", "secant") and (
        loss.piecewise_linear or not loss.quadratic
    ):
        distance = scores - objective.minimizer
        known = jnp.isfinite(distance)
        # Derivatives of the branch not taken must be finite, too.
        secant = _secant(gradient, jnp.where(known, distance, 0.0), delta)
        rule = secant if curvature == "secant" else jnp.maximum(secant, slope)
        positive = jnp.where(known, rule, positive)
    return gradient, positive


def _scale_by_steps(objective, weights, gradient, hessian, delta):
    """Replaces |F - F*| by Newton steps |g / h| of scores without any known F*."""
    usable = jnp.isfinite(gradient) & (gradient != 0) & jnp.isfinite(hessian)
    usable &= hessian != 0
    steps = jnp.abs(gradient) / jnp.abs(jnp.where(usable, hessian, 1.0))
    roots = jnp.where(usable, square_root(jnp.where(usable, steps, 0.0)), 0.0)
    parts = (roots, usable.astype(jnp.float32))
    roots, share = sum_each(*((part, weights) for part in parts))
    found = jnp.square(roots / jnp.where(share > 0, share, 1.0))
    counts = jnp.isfinite(objective.minimizer) & (weights > 0)[None, :]
    known = some(jnp.any(counts, axis=1)) | ~(found > 0) | ~jnp.isfinite(found)
    return jnp.where(known, delta, found)


def _secant(gradient, distance, delta):
    """Returns |g| / sqrt(t^2 + delta^2)."""
    # Squares are taken in units of the greater part, so that none overflows, nor both
    # underflow. A unit is a power of two, which changes no bit.
    exponent = exponent_above(jnp.maximum(jnp.abs(distance), delta))
    exponent = jnp.clip(jax.lax.stop_gradient(exponent), -126, 126)
    up, down = power_of_two(-exponent), power_of_two(exponent)
    # No-op bounds that stop XLA from contracting a square and the sum into one FMA,
    # which it does in some programs and not in others.
    squares = [
        jnp.minimum(jnp.square(part * up), _MOST_SQUARE) for part in (distance, delta)
    ]
    # This bound keeps XLA from replacing the division by a product with rsqrt.
    root = jnp.maximum(jnp.sqrt(squares[0] + squares[1]) * down, _LEAST_ROOT)
    return jnp.abs(gradient) / root


def mean_positive(
    curvature: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Float[Array, " K"]:
    """Returns the weighted mean of the positive part of the curvature."""
    return weighted_mean(jnp.maximum(curvature, 0.0), weights)


def least_curvature(
    mean: Float[Array, " K"], start: Float[Array, " K"] | None
) -> Float[Array, " K"]:
    """Returns 1e-6 times the weighted mean of the positive part of the curvature.

    ``mean`` is the result of :func:`mean_positive`. If scores interact, ``start``, the
    mean curvature at the start of training, is a second bound, up to 4 times ``mean``.
    """
    least = _FLOOR * mean
    if start is None:
        return least
    return jnp.maximum(least, jnp.minimum(start, _DECLINE * mean))
