# SPDX-License-Identifier: Apache-2.0
"""Whether training has something to learn from.

Counts the rows without a slope, tells how many of them are at a minimum, and whether
the loss has a minimum at all.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.collectives import some, total
from jboost.entry.stages import elementwise, repeat, stage
from jboost.objective.evaluation import Objective, gradients, hessians, loss_values
from jboost.trees.joint_start import ROUNDING

_PROBES = 6  # distances of the compared losses, 1/16 to 16^4 times the score
_BESIDE = 2.0**-10  # times 1 + |minimizer|: where the loss must be defined, too


class Slopes(NamedTuple):
    """Numbers of rows that a tree can or cannot learn from, all of positive weight.

    Attributes:
      not_finite: number of rows with a derivative that is not a finite number.
      zero: number of rows with only zero derivatives.
      settled: number of rows in ``zero`` that are at a minimum of their own loss.
    """

    rows: Int32[Array, ""]
    not_finite: Int32[Array, ""]
    zero: Int32[Array, ""]
    settled: Int32[Array, ""]

    def stuck(self) -> Any:
        """Returns whether no row has a finite slope, and one is not at its minimum."""
        return (self.not_finite + self.zero == self.rows) & (self.settled < self.rows)


def count_slopes(
    objective: Objective,
    slopes: Float[Array, "K N"],
    scores: Float[Array, "K N"],
    weights: Float[Array, " N"],
) -> Slopes:
    """Counts the rows that ``slopes`` at some scores leave nothing to learn from."""
    minimizer, known = objective.minimizer, None
    here = loss_values(objective, scores)
    settled = _is_lowest(objective, scores, here)
    curved = minimizer is None or len(scores) > 1
    curvature = hessians(objective, scores) if curved else None
    if minimizer is not None:
        known = (minimizer, loss_values(objective, minimizer))
    return _count(slopes, weights, here, settled, curvature, known)


def count_group_slopes(
    slopes: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Slopes:
    """Counts rows as :func:`count_slopes`, for a loss of groups: no row is settled."""
    counts = weights > 0
    flat = jnp.all(slopes == 0, axis=0)
    lost = ~jnp.all(jnp.isfinite(slopes), axis=0)
    none = jnp.zeros_like(counts)
    rows = jnp.stack([counts, counts & lost, counts & flat, none])
    return Slopes(*jnp.sum(rows, axis=1, dtype=jnp.int32))


@stage
def _count(slopes, weights, here, settled, curvature, known):
    counts = weights > 0
    flat = jnp.all(slopes == 0, axis=0)
    lost = ~jnp.all(jnp.isfinite(slopes), axis=0)
    if curvature is not None:
        settled |= jnp.all(curvature > 0, axis=0)
    if known is not None:
        minimizer, least = known
        known = jnp.all(jnp.isfinite(minimizer), axis=0)
        settled = jnp.where(known, here <= least + ROUNDING * jnp.abs(least), settled)
    rows = jnp.stack([counts, counts & lost, counts & flat, counts & flat & settled])
    return Slopes(*total(jnp.sum(rows, axis=1, dtype=jnp.int32)))


def _is_lowest(objective, scores, here):
    """Returns whether no score far or near gives a row a lower loss.

    The loss of a row without a minimum may have reached its infimum in float32: the
    logistic loss of a score of 150 is 0, and so are its derivatives.
    """

    def probe(number, lowest):
        values = loss_values(objective, _distant_point(number, scores))
        return _is_no_lower(lowest, values, here)

    return repeat(2 * _PROBES * len(scores), probe, _every_row(scores))


@stage
def _every_row(scores):
    return jnp.ones(scores.shape[1], bool)


@stage
def _distant_point(number, scores):
    num_scores, size = len(scores), jnp.maximum(jnp.abs(scores), 1.0)
    k, number = number % num_scores, number // num_scores
    powers = jnp.asarray(16.0 ** np.arange(-1, _PROBES - 1), jnp.float32)
    sign, distance = 1.0 - 2.0 * jnp.float32(number % 2), powers[number // 2]
    along = (jnp.arange(num_scores, dtype=jnp.int32) == k)[:, None]
    return scores + jnp.where(along, sign * distance * size, 0.0)


@stage
def _is_no_lower(lowest, values, here):
    return lowest & ~(values < here - ROUNDING * jnp.abs(here))


def is_unbounded(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Bool[ArrayLike, ""]:
    """Returns whether a loss of constant curvature has slopes but no minima.

    A loss that is NaN beside a point has no minimum there. Other losses may approach
    their infimum at infinity (logistic) and are not judged.
    """
    if not objective.loss.quadratic:
        return np.asarray(False)
    slopes, minimizer = gradients(objective, scores), objective.minimizer
    curvature, around = hessians(objective, scores), None
    if minimizer is not None:
        around = [loss_values(objective, point) for point in _around(minimizer)]
    return _is_sloping_only(slopes, curvature, minimizer, around, weights)


@elementwise
def _around(numpy, minimizer):
    side = _BESIDE * (1 + numpy.abs(minimizer))
    return minimizer - side, minimizer + side


@elementwise
def _is_sloping_only(numpy, slopes, curvature, minimizer, around, weights):
    counts, slopes, bounded = weights > 0, slopes[0], curvature[0] > 0
    sloping = some(numpy.any(counts & numpy.isfinite(slopes) & (slopes != 0)))
    if minimizer is not None:
        known = ~numpy.isnan(around[0] + around[1])
        bounded = bounded | (numpy.isfinite(minimizer[0]) & known)
    return sloping & ~some(numpy.any(counts & bounded))
