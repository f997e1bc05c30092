# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a loss at every row, and the positive curvature made of them.

In: a traced loss bound to its data, and scores [K, N]. Out: gradient and curvature
[K, N], finite, the curvature positive. Scores are kept with K in front, so that what
is written for one score per row is mapped over the first axis.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.kernels.sums_xla import exponent_above, power_of_two
from jboost.numerics.sums import sum_rows
from jboost.objective.minimum import bisect_minimum
from jboost.objective.tracing import TracedLoss

Curvature = Literal["auto", "exact", "secant", "absolute", "unit"]
_FLOOR = 1e-6  # least curvature of a row, relative to the mean
_STRAIGHT = 2.0  # wider smoothing for order statistics: see derivatives
_FLAT = 0.1  # of the secant weight: a Hessian below it says nothing of the valley
_MOST = 0.75  # of the rows
_DISTANCES = 4  # at which slopes are compared: 2^-10, 1, 2^10, 2^20 times the size
_SIDE = 2.0**-20  # distance, relative to the target, at which a minimum there is tested
_BLOCK = 8192  # rows whose minimizers are searched at a time
_NOWHERE = float("inf")  # minimizer of a row that has none; no NaN: jax_debug_nans
_BLOCK_NUMBERS = 1 << 20  # numbers that a block of rows may give, for K > 1
_MOST_SQUARE = float(np.finfo(np.float32).max)
_LEAST_ROOT = float(np.finfo(np.float32).tiny)
_PROBES = 12  # steps out for a row's minimizer: 16^12 times the first


class Kinks(NamedTuple):
    """Where the rows of a piecewise linear loss have their kinks.

    Attributes:
      kind: 0: anywhere; 1: each row has one, at its own minimizer; 2: the same, with
        the same slopes for all rows.
      left, right: magnitudes of the slope on each side, of kind 2.
      scale: a power of two; the weighted slopes of all rows sum to less than 2^40
        divided by it.
    """

    kind: Int32[Array, ""]
    left: Float[Array, ""]
    right: Float[Array, ""]
    scale: Float[Array, ""]


class Objective(NamedTuple):
    """A traced loss and everything it needs but the scores.

    Attributes:
      loss: the program of one row.
      constants: what the loss closed over.
      targets: a pytree with the N rows in front.
      parameters: of an adaptive loss, else ().
      minimiser: each row's own minimizer of its loss [K, N], inf where it has none;
        None where no rule asks for it.
      kinks: of a piecewise linear loss, None where nobody asked.
    """

    loss: TracedLoss
    constants: tuple[Any, ...]
    targets: Any
    parameters: Any
    minimiser: Float[Array, "K N"] | None
    kinks: Kinks | None = None


def loss_values(objective: Objective, scores: Float[Array, "K N"]):
    """l(F_i, y_i) of every row, [N]."""
    return _map_rows(objective, objective.loss.value, scores)


def gradients(objective: Objective, scores: Float[Array, "K N"]):
    """dl/dF of every row, [K, N]; zero where a score is the row's own minimizer.

    At the kink of |r| any number in [-1, 1] is a subgradient, and which of them
    differentiation picks depends on how the loss is written; there, a row wishes to
    stay.
    """
    raw = _map_rows(objective, objective.loss.gradient, scores, _with_scores_first)
    if objective.minimiser is None:
        return raw
    return jnp.where(scores == objective.minimiser, 0.0, raw)


def hessian_matrices(objective: Objective, scores: Float[Array, "K N"]):
    """d2l/dF2 of every row, [N, K, K]."""
    hessian = _evaluate_rows(objective, objective.loss.hessian, scores)
    return hessian.reshape(scores.shape[1], scores.shape[0], scores.shape[0])


def mean_hessian(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Float[Array, "K K"]:
    """Weighted mean of the Hessians of all rows.

    Column by column, each the derivative of the gradient along one score, so that N
    Hessians never exist together.
    """
    gradient = objective.loss.gradient

    def mean_column(direction):
        def column(constants, score, target, parameters):
            def slope(score):
                return gradient(constants, score, target, parameters)

            return jax.jvp(slope, (score,), (direction,))[1]

        rows = _map_rows(objective, column, scores, _with_scores_first)
        return mean_of_rows(objective, rows, weights)

    return jax.lax.map(mean_column, jnp.eye(scores.shape[0], dtype=scores.dtype))


def hessians(objective: Objective, scores: Float[Array, "K N"]):
    """For K = 1 the second derivative; else row sums of its magnitudes, [K, N].

    The row sum bounds the matrix from above (Gershgorin), so that all K scores may
    move at once; for softmax it is exactly 2 p (1 - p), the value of Friedman 2001
    times K / (K - 1) and of XGBoost.
    """

    def sum_magnitudes(rows):
        return rows[None, :] if rows.ndim == 1 else jnp.sum(jnp.abs(rows), axis=2).T

    return _map_rows(objective, objective.loss.hessian, scores, sum_magnitudes)


def find_minimisers(objective: Objective, num_rows: int) -> Float[Array, "K N"]:
    """Each row's own minimizer F*, inf where its loss has none.

    F* depends on the target alone and is found once. Accepted are a strict change
    of the gradient's sign, or a jump of the gradient to zero; a gradient that fades
    to zero (logistic loss far out) has no minimum there. For K > 1 a minimizer along
    one score means something only where the scores do not interact: where the
    off-diagonal Hessian is zero.

    Of many rows, blocks are searched, each spread over the whole table; where the
    first block has no minimum (logistic, softmax), the others are taken to have none.
    """
    objective = objective._replace(minimiser=None)
    blocks = -(-num_rows // _BLOCK)
    if blocks == 1:
        return _find_minimisers(objective, num_rows)
    # Block b has rows b, b + blocks, ...; the last row stands in beyond the end.
    every = jnp.arange(_BLOCK * blocks, dtype=jnp.int32).reshape(_BLOCK, blocks).T
    every = jnp.minimum(every, num_rows - 1)
    nowhere = jnp.full((objective.loss.num_scores, _BLOCK), _NOWHERE, jnp.float32)

    def search(rows):
        targets = jax.tree.map(lambda target: target[rows], objective.targets)
        return _find_minimisers(objective._replace(targets=targets), _BLOCK)

    def search_block(some, block):
        number, rows = block
        found = jax.lax.cond(some, search, lambda _: nowhere, rows)
        return jnp.where(number == 0, jnp.any(jnp.isfinite(found)), some), found

    numbers = jnp.arange(blocks, dtype=jnp.int32)
    _, found = jax.lax.scan(search_block, jnp.asarray(True), (numbers, every))
    return jnp.moveaxis(found, 0, 2).reshape(nowhere.shape[0], -1)[:, :num_rows]


def _find_minimisers(objective, num_rows):
    num_scores = objective.loss.num_scores
    start = _start_at_target(objective.targets, num_scores, num_rows)
    if num_scores == 1:

        def slope(points):
            return gradients(objective, points[None, :])[0]

        return _minimisers_from(slope, start[0])[None, :]
    separable = _separable_rows(objective, start)

    def slopes(points):  # where scores do not interact, all of them may move at once
        return gradients(objective, points.reshape(start.shape)).reshape(-1)

    def search(start):
        found = _minimisers_from(slopes, start.reshape(-1)).reshape(start.shape)
        return jnp.where(separable[None, :], found, _NOWHERE)

    nowhere = jnp.full_like(start, _NOWHERE)
    return jax.lax.cond(jnp.any(separable), search, lambda _: nowhere, start)


def kink_slopes(
    objective: Objective, distance: Float[ArrayLike, ""] = 0.0
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Magnitudes of each row's slope left and right of its minimizer, for K = 1.

    Args:
      distance: from the minimizer; at least what its own rounding asks for.
    """
    assert objective.minimiser is not None
    side = _SIDE * jnp.abs(objective.minimiser) + 1e-12 + distance
    left = -gradients(objective, objective.minimiser - side)[0]
    return left, gradients(objective, objective.minimiser + side)[0]


def find_kinks(objective: Objective, weights: Float[Array, " N"]) -> Kinks:
    """Whether each row that counts has one kink, at its minimizer, for K = 1.

    The loss is known to be piecewise linear. If it is convex as well, then a slope
    that is the same close to the minimizer and far away is the same in between.
    """
    assert objective.minimiser is not None
    minimiser = objective.minimiser[0]
    counts = weights > 0
    left, right = kink_slopes(objective)
    size = jnp.max(jnp.where(counts & jnp.isfinite(minimiser), jnp.abs(minimiser), 0.0))

    def compare(number, same):
        distance = size * jnp.exp2(10.0 * jnp.float32(number) - 10.0)
        far_left, far_right = kink_slopes(objective, distance)
        return same & (far_left == left) & (far_right == right)

    one = jnp.isfinite(minimiser) & (left > 0) & (right > 0)
    one &= jnp.isfinite(left + right)
    one = jax.lax.fori_loop(0, _DISTANCES, compare, one)
    ends = [
        (jnp.min(jnp.where(counts, a, jnp.inf)), jnp.max(jnp.where(counts, a, 0.0)))
        for a in (left, right)
    ]
    same = (ends[0][0] == ends[0][1]) & (ends[1][0] == ends[1][1])
    kind = jnp.where(jnp.all(one | ~counts), jnp.where(same, 2, 1), 0)
    slopes = jnp.where(counts & one, weights * (left + right), 0.0)
    scale = exact_scale(sum_rows(slopes))
    return Kinks(kind, ends[0][1], ends[1][1], scale)


def exact_scale(total: Float[Array, ""]) -> Float[Array, ""]:
    """A power of two; what sums to ``total`` then sums to less than 2^40."""
    # The scaled sum stays below 2^39; rounding adds at most 1 a row.
    return power_of_two(jnp.clip(39 - exponent_above(total), -126, 126))


def smoothing_scale(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Float[Array, " K"]:
    """delta = (weighted mean of sqrt |F - F*|)^2, over rows that have an F*.

    Without any, a thousandth of the scores' size. Never so small that F +- delta
    rounds to F.
    """
    minimiser = objective.minimiser
    assert minimiser is not None
    known = jnp.isfinite(minimiser) & (weights > 0)[None, :]
    distance = jnp.where(known, jnp.abs(scores - minimiser), 0.0)
    weight = jnp.where(known, weights[None, :], 0.0)
    total = sum_rows(weight)
    size = mean_of_rows(objective, jnp.abs(scores), weights)
    mean_root = sum_rows(weight * jnp.sqrt(distance)) / jnp.maximum(total, 1e-30)
    delta = jnp.where(total > 0, jnp.square(mean_root), 1e-3 * jnp.maximum(size, 1.0))
    return jnp.maximum(delta, 1e-6 * size + 1e-30)


def is_pointed(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Bool[Array, ""]:
    """Whether the loss looks like |r| to most rows: a valley, but no curvature.

    True where at three quarters of the rows (by weight) the Hessian is below a tenth
    of the secant weight, zero or negative. Leaves are then much like medians: they
    need more rows, and a Newton step says little.
    """
    if objective.minimiser is None:
        return jnp.asarray(False)
    delta = smoothing_scale(objective, scores, weights)[:, None]
    distance = scores - objective.minimiser
    secant = _secant(gradients(objective, scores), distance, delta)
    flat = hessians(objective, scores) <= _FLAT * secant
    flat = (flat & jnp.isfinite(distance)).astype(jnp.float32)
    share = mean_of_rows(objective, flat, weights)
    return jnp.mean(share) >= _MOST


def derivatives(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    curvature: Curvature,
) -> tuple[Float[Array, "K N"], Float[Array, "K N"]]:
    """Gradient and curvature of every row, before weights.

    With t = |F - F*|, g the gradient, h the Hessian, and delta the smoothing scale:

    ``"auto"``: max((g(F + delta) - g(F - delta)) / (2 delta), |g| / sqrt(t^2 +
    delta^2)), so that no row asks to step beyond its own minimum; |h| where F* does
    not exist; the Hessian itself for a quadratic loss. For piecewise linear losses
    delta is twice as wide: a few rows near their kink would otherwise outweigh the
    rest, and an extreme quantile is overfitted in small data.
    ``"exact"``: h. ``"absolute"``: |h|. ``"unit"``: 1.
    ``"secant"``: |g| / sqrt(t^2 + delta^2), the smoothed majorize-minimize weight
    (Hunter and Lange 2004); |h| where F* does not exist.
    All but "unit" and those of quadratic losses are at least 1e-6 of the weighted
    mean of their positive parts, which is 0 if no row has positive curvature. At
    kinks, where a derivative is not finite, the mean of the derivatives at F +- delta
    is taken.
    """
    loss = objective.loss
    gradient, hessian = gradients(objective, scores), hessians(objective, scores)
    if objective.minimiser is None:  # quadratic: nothing to guard against
        unit = curvature == "unit"
        return gradient, jnp.ones_like(gradient) if unit else hessian

    def smooth(gradient, hessian):
        return _smooth_derivatives(
            objective, scores, weights, curvature, gradient, hessian
        )

    def plain(gradient, hessian):
        return gradient, hessian if curvature == "exact" else jnp.abs(hessian)

    if loss.straight:
        gradient, positive = smooth(gradient, hessian)
    else:
        # Two more gradients only where a row has a minimum, or is at a kink.
        needed = ~(jnp.isfinite(gradient) & jnp.isfinite(hessian))
        if curvature in ("auto", "secant") and not loss.quadratic:
            needed |= jnp.isfinite(objective.minimiser)
        needed = jnp.any(needed & (weights > 0)[None, :])
        gradient, positive = jax.lax.cond(needed, smooth, plain, gradient, hessian)
    if curvature == "unit":
        return gradient, jnp.ones_like(gradient)
    return gradient, _floor_curvature(objective, positive, weights)


def _smooth_derivatives(objective, scores, weights, curvature, gradient, hessian):
    """Gradient and curvature by way of gradients at F +- delta."""
    loss = objective.loss
    delta = smoothing_scale(objective, scores, weights)[:, None]
    if loss.straight:
        delta = _STRAIGHT * delta
    gradient_up = gradients(objective, scores + delta)
    gradient_down = gradients(objective, scores - delta)
    kink = (gradient_up + gradient_down) / 2
    gradient = jnp.where(jnp.isfinite(gradient), gradient, kink)
    slope = (gradient_up - gradient_down) / (2 * delta)
    hessian = jnp.where(jnp.isfinite(hessian), hessian, slope)
    if curvature == "exact":
        return gradient, hessian
    positive = jnp.abs(hessian)
    if curvature in ("auto", "secant") and (loss.straight or not loss.quadratic):
        distance = scores - objective.minimiser
        secant = _secant(gradient, distance, delta)
        rule = secant if curvature == "secant" else jnp.maximum(secant, slope)
        positive = jnp.where(jnp.isfinite(distance), rule, positive)
    return gradient, positive


def _secant(gradient, distance, delta):
    """|g| / sqrt(t^2 + delta^2)."""
    # The bounds change nothing; they stop XLA from contracting a square and the sum
    # into one operation, which it does in some programs and not in others.
    squares = [
        jnp.minimum(jnp.square(part), _MOST_SQUARE) for part in (distance, delta)
    ]
    # The same of a quotient with a root, which may become a product with rsqrt.
    root = jnp.maximum(jnp.sqrt(squares[0] + squares[1]), _LEAST_ROOT)
    return jnp.abs(gradient) / root


def _floor_curvature(objective, curvature, weights):
    """Raises curvature to at least 1e-6 of the weighted mean of its positive part."""
    mean = mean_of_rows(objective, jnp.maximum(curvature, 0.0), weights)
    return jnp.maximum(curvature, _FLOOR * mean[:, None])


def mean_of_rows(
    objective: Objective, values: Float[Array, "*K N"], weights: Float[Array, " N"]
) -> Float[Array, "*K"]:
    """Weighted mean over the last axis; rows of weight 0 may hold anything."""
    weights = jnp.broadcast_to(weights, values.shape)
    weighted = jnp.where(weights > 0, weights * values, 0.0)
    return sum_rows(weighted) / sum_rows(weights)


def _map_rows(
    objective: Objective, program: Callable[..., Any], scores, finish=lambda rows: rows
):
    """Evaluates a program of one row at all rows; ``finish`` puts the rows last.

    For K > 1 blocks of rows are evaluated and finished one by one: N Hessians take
    K^2 numbers a row, and even gradients would be held in two layouts.
    """
    num_scores, num_rows = scores.shape
    entries = num_scores**2 if program is objective.loss.hessian else num_scores
    size = max(1, min(_BLOCK, _BLOCK_NUMBERS // entries))
    if num_scores == 1 or num_rows <= size:
        return finish(_evaluate_rows(objective, program, scores))

    def evaluate(first):
        def cut(array, axis=0):
            return jax.lax.dynamic_slice_in_dim(array, first, size, axis)

        part = objective._replace(targets=jax.tree.map(cut, objective.targets))
        return finish(_evaluate_rows(part, program, cut(scores, 1)))

    def add_block(number, found):
        first = jnp.minimum(number * size, num_rows - size)  # the last ones overlap
        start = (*(0,) * (found.ndim - 1), first)
        return jax.lax.dynamic_update_slice(found, evaluate(first), start)

    block = jax.eval_shape(evaluate, jax.ShapeDtypeStruct((), jnp.int32))
    found = jnp.zeros((*block.shape[:-1], num_rows), block.dtype)
    return jax.lax.fori_loop(0, -(-num_rows // size), add_block, found)


def _evaluate_rows(objective, program, scores):
    rows = scores[0] if scores.shape[0] == 1 else scores.T

    def one(score, target):
        return program(objective.constants, score, target, objective.parameters)

    return jax.vmap(one)(rows, objective.targets)


def _with_scores_first(rows):
    return rows[None, :] if rows.ndim == 1 else rows.T


def _start_at_target(targets, num_scores, num_rows):
    """Where the search for F* begins: the target, if it looks like a score, else 0."""
    leaves = jax.tree.leaves(targets)
    shape = (num_rows,) if num_scores == 1 else (num_rows, num_scores)
    if len(leaves) == 1 and leaves[0].shape == shape and leaves[0].dtype != jnp.bool_:
        return _with_scores_first(leaves[0].astype(jnp.float32))
    # The barrier keeps XLA from evaluating the loss of N constants while it compiles.
    zeros = jnp.zeros((num_scores, num_rows), jnp.float32)
    return jax.lax.optimization_barrier(zeros)


def _minimisers_from(slope, begin):
    """Where each slope changes its sign; NaN where it does not."""
    side = _SIDE * jnp.abs(begin) + 1e-12
    at_target = (slope(begin - side) < 0) & (slope(begin + side) > 0)

    def search(turn, found):
        # From the target the gradient may be infinite (Poisson) or underflow; zero is
        # a sane score for every loss with a link.
        place = jnp.where(turn == 0, begin, 0.0)
        wanted = jnp.isnan(found) & ((turn == 0) | (begin != 0))
        step = jnp.maximum(jnp.abs(place) * 2.0**-10, 2.0**-20)
        result = bisect_minimum(slope, place, step, wanted=wanted, num_probes=_PROBES)
        return jnp.where(result.strict | result.jump, result.point, found)

    found = jnp.where(at_target, begin, jnp.nan)
    found = jax.lax.fori_loop(0, 2, search, found)
    return jnp.where(jnp.isnan(found), _NOWHERE, found)


def _separable_rows(objective, start):
    """Rows whose Hessian has no off-diagonal entries, at two points."""
    different = ~jnp.eye(start.shape[0], dtype=bool)
    separable = jnp.ones(start.shape[1], bool)
    for point in (start + 0.5, start - 1.5):
        entries = jnp.where(different[None], hessian_matrices(objective, point), 0.0)
        separable &= jnp.all(entries == 0, axis=(1, 2))
    return separable
