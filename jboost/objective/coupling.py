# SPDX-License-Identifier: Apache-2.0
"""Finds which scores of a loss interact or compete, from products with Hessians.

Scores have any units: numbers of different ones are never added.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.stages import (
    elementwise,
    for_branches,
    map_points,
    repeat_while,
    stage,
)
from jboost.kernels.xla import exponent_above, round_alone
from jboost.objective.curvature import summarize_information
from jboost.objective.evaluation import (
    Coupling,
    Objective,
    hessians,
    map_hessians,
    mean_hessian,
    row_products,
    weighted_mean,
)
from jboost.objective.jaxprs import MANY_SCORES

_STEPS = 30  # most steps of a projection, which needs one per curvature
_SMALL = 1e-12  # relative squared length that float32 cannot tell from zero


def mean_product(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    direction: Float[Array, " K"],
) -> Float[Array, " K"]:
    """Returns the weighted mean of the Hessians of all rows times a direction."""
    return weighted_mean(row_products(objective, scores, direction), weights)


def find_dependent(
    objective: Objective, scores: Float[Array, "K N"]
) -> Bool[Array, "K N"]:
    """Returns which gradients depend on another score: d2l / dF_k dF_j != 0, j != k.

    Each product is that with the 0/1 vector of half the scores, chosen by a bit of
    their number or its complement: any two scores are in different halves once.
    """
    halves = _list_halves(scores.shape[0])

    def unfinished(state):
        numpy = for_branches()
        number, found = state
        more = numpy.asarray(number) < len(halves)
        return more & ~numpy.all(numpy.asarray(found))

    def look(state):
        half = _take_half(halves, state[0])
        return _add_dependent(row_products(objective, scores, half), half, *state)

    return repeat_while(unfinished, look, (np.int32(0), _none_like(scores)))[1]


def _list_halves(num_scores):
    """Returns 0/1 vectors; for any j != k, one of them is 1 at j and 0 at k."""
    number = np.arange(num_scores)
    bits = np.arange(max(1, (num_scores - 1).bit_length()))
    half = (number[None, :] >> bits[:, None]) & 1
    return np.stack([half, 1 - half], axis=1).reshape(-1, num_scores).astype(np.float32)


@elementwise
def _none_like(numpy, scores):
    return numpy.zeros(scores.shape, bool)


@elementwise
def _take_half(numpy, halves, number):
    return numpy.asarray(halves)[number]


@elementwise
def _add_dependent(numpy, rows, half, number, found):
    del numpy
    return number + np.int32(1), found | ((rows != 0) & (half == 0)[:, None])


class _Projection(NamedTuple):
    """The state of the conjugate gradients of a projection.

    Attributes:
      left: the vector minus the part of its projection found so far.
      residual: -A^2 left.
      along: the direction of the next step; at first the vector.
      size, first: the squared length of the residual, now and at first.
    """

    number: Int32[ArrayLike, ""]
    left: Float[ArrayLike, " K"]
    residual: Float[ArrayLike, " K"]
    along: Float[ArrayLike, " K"]
    size: Float[ArrayLike, ""]
    first: Float[ArrayLike, ""]


def _find_flat_direction(objective, scores, weights, unit):
    """Returns a direction of length 1 along which the mean loss curves least.

    It is a random vector minus its projection on the range of the mean Hessian A, by
    conjugate gradients for |A n|^2. If A is regular, little is left, and its direction
    is meaningless: the caller checks its effect on the rows. The factors ``unit`` make
    each diagonal entry of A 1 or 0.
    """

    def multiply(vector):
        product = mean_product(objective, scores, weights, _times(unit, vector))
        return _times(unit, product)

    def unfinished(state):
        numpy = for_branches()
        more = numpy.asarray(state.number) <= _STEPS
        return more & (numpy.asarray(state.size) > _SMALL * numpy.asarray(state.first))

    def step(state):
        return _step(state, multiply(multiply(state.along)))

    start = np.random.default_rng(0).normal(size=scores.shape[0])
    vector: Any = start.astype(np.float32)
    for _ in range(2):  # rounding leaves other directions, relative to its length
        vector = _normalize(repeat_while(unfinished, step, _begin(vector)).left)
    return vector


@elementwise
def _times(numpy, unit, vector):
    found = unit * vector
    return numpy.where(numpy.isfinite(found), found, np.float32(0))


@stage
def _begin(vector) -> _Projection:
    zero, one = jnp.zeros_like(vector), jnp.float32(1)
    return _Projection(jnp.int32(0), vector, zero, vector, one, one)


@stage
def _step(state, product) -> _Projection:
    begins = state.number == 0  # the product is that with the vector itself
    bend = jnp.sum(state.along * product)
    length = jnp.where(bend > 0, state.size / jnp.where(bend > 0, bend, 1.0), 0.0)
    length = jnp.where(begins, 0.0, length)
    left = state.left + length * state.along
    residual = jnp.where(begins, -product, state.residual - length * product)
    size = jnp.sum(residual * residual)
    share = jnp.where(begins, 0.0, size / state.size)
    return _Projection(
        number=state.number + 1,
        left=left,
        residual=residual,
        along=residual + share * state.along,
        size=jnp.where(begins | (bend > 0), size, 0.0),
        first=jnp.where(begins, size, state.first),
    )


@stage
def _normalize(vector):
    return vector / jnp.maximum(jnp.sqrt(jnp.sum(vector * vector)), 1e-30)


_LEAST = float(np.finfo(np.float32).tiny)
_ZERO = 1e-2  # smaller sums, relative to their magnitudes, count as zero
# The information of a row is a mean over targets. It is nearly singular for rare
# zero-inflated counts, yet their scores do not compete.
_ZERO_OF_INFORMATION = np.float32(1e-4)
_CHANGE = 0.01  # relative change of an information that is more than its noise
_TAKES_PART = 1e-5  # entry of a direction of length 1, for scores that it moves


def find_coupling(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Coupling | None:
    """Describes the interaction of K scores at the start; None for K = 1.

    The Fisher information takes the place of the Hessian where there is one.

    Scores compete if moving them together in some direction changes no row's loss. The
    direction is an eigenvector of the mean Hessian, with eigenvalue 0, after each score
    is scaled to a mean curvature of 1.
    """
    num_scores = scores.shape[0]
    if num_scores == 1:
        return None
    if objective.loss.information is None and num_scores > MANY_SCORES:
        return _find_of_many(objective, scores, weights)
    if objective.loss.information is None:
        direction, along = _find_direction(mean_hessian(objective, scores, weights))
        sums = map_hessians(objective, scores, _summarize, along)
        return _conclude(weighted_mean(sums, weights), direction, along)
    # A likelihood need not have second derivatives (Laplace).
    rows = summarize_information(objective, scores, _flatten)
    mean = weighted_mean(rows, weights).reshape(num_scores, num_scores)
    direction, along = _find_direction(mean)
    sums = _summarize_flat(rows, along)
    means = weighted_mean(sums, weights)
    found = _conclude(means, direction, along, _ZERO_OF_INFORMATION)
    own = jnp.where(found.competing, 0.0, jnp.diagonal(mean))
    scales = _find_units(jnp.diagonal(mean))
    means = map_points(
        partial(_inform_beside, objective, scores, weights, scales),
        np.arange(num_scores, dtype=np.int32),
    )
    return found._replace(start=own, self_informed=_note_change(means, mean))


def _inform_beside(objective, scores, weights, scales, number):
    """Returns the mean information where one score is a standard error greater."""
    moved = _move_one(scores, scales, number)
    return weighted_mean(summarize_information(objective, moved, _flatten), weights)


@stage
def _move_one(scores, scales, number):
    return scores + jnp.where(jnp.arange(len(scales)) == number, scales, 0.0)[:, None]


@stage
def _note_change(means, mean):
    start = jnp.diagonal(mean)
    moved = jnp.diagonal(means.reshape(len(mean), *mean.shape), axis1=1, axis2=2)
    return jnp.abs(jnp.diagonal(moved) - start) > _CHANGE * start


def _find_of_many(objective, scores, weights):
    """Computes :func:`find_coupling` from products with Hessians, for many scores.

    No Hessian is formed. Where a product vanishes, the terms that oppose those of the
    score itself are as large: twice the latter stand for the sum of all magnitudes.
    """
    diagonal = hessians(objective, scores)
    unit = _find_units(weighted_mean(diagonal, weights))
    direction = _find_flat_direction(objective, scores, weights, unit)
    along = _scale(unit, direction)
    rows = diagonal, row_products(objective, scores, along)
    parts = *rows, find_dependent(objective, scores)
    means = [weighted_mean(_magnitudes(part), weights) for part in parts]
    return _conclude(_list_sums(means, along), direction, along)


@elementwise
def _scale(numpy, unit, direction):
    del numpy
    return unit * direction


@elementwise
def _magnitudes(numpy, values):
    return numpy.abs(values).astype(np.float32)


@stage
def _list_sums(means, along):
    own, total, others = means
    return jnp.stack([own, others, 2 * own * jnp.abs(along), total])


def _flatten(rows):
    return rows.reshape(len(rows), -1).T


@stage
def _find_direction(mean):
    """Returns the eigenvector of :func:`find_coupling`, of scaled and own scores."""
    mean = _finite(mean)
    unit = _find_units(jnp.diagonal(mean))
    # eigh adds the transpose.
    values, axes = jnp.linalg.eigh(round_alone(unit[:, None] * mean * unit[None, :]))
    direction = axes[:, jnp.argmin(jnp.abs(values))]
    # Whether scores compete is a constant; eigenvectors may have no derivative.
    return jax.lax.stop_gradient((direction, unit * direction))


@stage
def _find_units(diagonal):
    """Returns factors of the scores that make all diagonal entries alike; 0 for zeros.

    Times a power of two, the loss has the same factors but for a power of two, since
    one of the exponents of the entries is made even before the root is taken.
    """
    size = jnp.abs(_finite(diagonal))
    is_odd = exponent_above(size[jnp.argmax(size > 0)]) % 2 == 1
    size = size * jnp.where(is_odd, 2.0, 1.0)
    # A no-op bound that keeps XLA from replacing 1 / sqrt by an inexact rsqrt.
    root = jnp.maximum(jnp.sqrt(jnp.maximum(size, _LEAST)), _LEAST)
    return jnp.where(size > 0, 1 / root, 0.0)


@stage
def _summarize_flat(rows, along):
    return _summarize(rows.T.reshape(-1, len(along), len(along)), along)


def _summarize(rows, along):
    """Returns sums over the rows of each Hessian, [4, K, N]."""
    size = jnp.abs(rows)
    own = jnp.diagonal(size, axis1=1, axis2=2)
    # A sum of all entries minus the own one would lose the others if they are small.
    others = jnp.sum(jnp.where(jnp.eye(len(along), dtype=bool), 0.0, size), axis=2)
    # No matrix products: a GPU would round their factors.
    along = along[None, None]
    every = jnp.sum(size * jnp.abs(along), axis=2)
    total = jnp.abs(jnp.sum(rows * along, axis=2))
    return jnp.stack([own.T, others.T, every.T, total.T])


@stage
def _conclude(means, direction, along, zero: Any = _ZERO):
    own, others, every, total = _finite(means)
    competing = jnp.abs(direction) >= _TAKES_PART
    competing &= jnp.all(total <= zero * every) & (others > 0)
    start = jnp.where((others > 0) & ~competing, own, 0.0)
    return Coupling(competing, along, start, jnp.zeros_like(competing))


def _finite(numbers):
    return jnp.where(jnp.isfinite(numbers), numbers, 0.0)
