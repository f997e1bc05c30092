# SPDX-License-Identifier: Apache-2.0
"""Properties of the Hessians of many scores, found by products with vectors.

In: a traced loss bound to its data, and scores [K, N]. Out: which scores depend on
others, and a direction without curvature. A Hessian has K^2 numbers, a product costs as
much as a gradient: N K operations, and K numbers for each row.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.stages import elementwise, for_branches, repeat_while, stage
from jboost.objective.evaluation import (
    Objective,
    row_products,
    weighted_mean,
)

_STEPS = 30  # of a projection, at most; as many as there are different curvatures
_SMALL = 1e-12  # of a squared length: what float32 cannot tell from zero


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

    Each product is that with the sum of half the scores' unit vectors, by a bit of
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
    """Returns vectors of 0 and 1, of which any two entries differ once each way."""
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
    """Where the conjugate gradients of a projection stand.

    Attributes:
      number: products so far.
      left: the vector, less what has been found of its projection.
      residual: -A^2 left.
      along: the direction of the next step; at first the vector.
      size: the squared length of the residual, and at first.
    """

    number: Int32[ArrayLike, ""]
    left: Float[ArrayLike, " K"]
    residual: Float[ArrayLike, " K"]
    along: Float[ArrayLike, " K"]
    size: Float[ArrayLike, ""]
    first: Float[ArrayLike, ""]


def find_flat_direction(
    objective: Objective,
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
    unit: Float[Array, " K"],
) -> Float[Array, " K"]:
    """Returns a direction of length 1 along which the mean loss curves least.

    A random vector, less its projection on the range of the mean Hessian A, by
    conjugate gradients for |A n|^2. If A is regular, little is left, and its direction
    means nothing: the caller checks what it does to the rows.

    Args:
      unit: what each score is multiplied by, so that the diagonal of A is 1 or 0.
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
    for _ in range(2):  # what rounding leaves of other directions is relative to it
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
