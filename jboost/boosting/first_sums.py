# SPDX-License-Identifier: Apache-2.0
"""The sums over all shards that a round begins with, made by one collective.

The mean curvature that scales derivatives, the scales that turn scaled derivatives into
integers, and the greatest terms of the leaves' sums would take an exchange or two each.
Here they follow from sums of unscaled derivatives. In the rare cases where those sums
do not determine every bit, exchanges are made as if there were no such sums. If all
rows are on one device, there is nothing to save.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from jboost.entry.collectives import current_shards, most
from jboost.kernels.exact_sums import split_weights
from jboost.kernels.xla import exponent_above
from jboost.numerics.exact import fit_scale, sum_guessed
from jboost.trees.rounding import Quantization, make_measure, measure_rows

_ROUNDINGS = 2.0**-20  # more than those of a quotient and of its sum
_FINEST = 2.0**-29  # 255 times the rounding of a term, relative to the greatest one


class ShardStatistics(NamedTuple):
    """Sums over all rows, score by score.

    Attributes:
      mean: the weighted mean of the curvature; of its positive part, if the curvature
        has a least value.
      least: the least curvature of the rows that count.
      magnitudes: sums of the magnitudes of gradient and curvature over the bag.
      greatest: their greatest terms, and the greatest factor that is not a whole
        weight.
      holds: whether the curvature is still the one that was summed.
    """

    mean: Float[Array, "*K"]
    least: Float[Array, "*K"]
    magnitudes: Float[Array, "*K 2"]
    greatest: Float[Array, "*K 3"]
    num_in_bag: Int32[Array, "*K"]
    holds: Bool[Array, "*K"]


class SumGuesses(NamedTuple):
    """The greatest terms of sums, which the next round guesses to be the same.

    They are those of :func:`sum_first` and of
    :func:`jboost.objective.curvature.smoothing_scale`.
    """

    first: list[Float[Array, "*K"]]
    smoothing: list[Float[Array, "*K"]]


def no_sizes(num_scores: int) -> SumGuesses:
    """Returns the sizes before the first round, which are not a good guess."""
    each, one = jnp.zeros(num_scores, jnp.float32), jnp.float32(0)
    return SumGuesses([each, one, each, each], [each, each, each, one])


def sum_first(
    gradient: Float[Array, "K N"],
    curvature: Float[Array, "K N"],
    weights: Float[Array, " N"],
    in_bag: Bool[Array, " N"],
    raised: bool,
    sizes: SumGuesses | None,
) -> tuple[ShardStatistics | None, SumGuesses | None]:
    """Computes the sums of a round, and the next sizes; None on one device."""
    if current_shards() is None:
        return None, sizes
    assert sizes is not None
    num_scores = len(gradient)
    times, factors = split_weights(jnp.where(in_bag, weights, 0.0))
    positive = jnp.maximum(curvature, 0.0) if raised else curvature
    times = times.astype(jnp.float32)
    by_score = factors[None, :]
    terms = (jnp.abs(by_score * each) for each in (gradient, curvature))
    parts = (
        (positive, weights), (weights, None),
        *((jnp.where(by_score > 0, each, 0.0), times) for each in terms),
    )  # fmt: skip
    below = jnp.where((weights > 0)[None, :], -curvature, -jnp.inf)
    found = sum_guessed(
        parts, sizes.first, [jnp.sum(times > 0, dtype=jnp.int32)],
        [jnp.max(below, axis=1), jnp.max(factors)],
    )  # fmt: skip
    total, weight, *magnitudes = found.sums
    below, factor = found.extremes
    greatest = (*found.sizes[2:], jnp.broadcast_to(factor, (num_scores,)))
    sums = ShardStatistics(
        mean=total / weight,
        least=-below,
        magnitudes=jnp.stack(magnitudes, axis=1),
        greatest=jnp.stack(greatest, axis=1),
        num_in_bag=jnp.broadcast_to(found.counts[0], (num_scores,)),
        holds=jnp.ones(num_scores, bool),
    )
    return sums, sizes._replace(first=found.sizes)


def measure_first(
    first: ShardStatistics | None,
    mean: Float[Array, ""],
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: UInt8[Array, " N"],
    uniform: bool,
) -> Quantization | None:
    """Computes :func:`jboost.trees.rounding.measure_rows` from the first sums, if any.

    Scales are powers of two above sums of scaled derivatives. Up to rounding, those
    sums are the first sums divided by the mean.
    """
    if first is None:
        return None
    sums, greatest = first.magnitudes / mean, first.greatest / mean
    rows = first.num_in_bag.astype(jnp.float32)
    slack = _ROUNDINGS + _FINEST * rows * greatest[:2] / sums
    low, high = (sums * (1 - slack), sums * (1 + slack))
    sure = (exponent_above(low) == exponent_above(high)) & (low > 1e-20)
    sure &= jnp.isfinite(high)

    def keep(*_):
        fixed = fit_scale(sums, first.num_in_bag)
        return make_measure(fixed, first.num_in_bag, greatest[1] if uniform else None)

    def look(gradient, curvature, in_bag):
        return measure_rows(gradient, curvature, in_bag, uniform)

    # The scale of a uniform curvature is not used.
    known = first.holds & (sure[0] if uniform else jnp.all(sure))
    return jax.lax.cond(known, keep, look, gradient, curvature, in_bag)


def find_leaf_sizes(
    first: ShardStatistics | None,
) -> Callable[[Float[Array, "3"]], Float[Array, "3"]] | None:
    """Returns a function that finds the leaf sums' greatest terms; None without sums.

    ``first`` are the sums of one score, of the derivatives that fit its leaves.
    """
    if first is None:
        return None
    greatest = first.greatest
    return lambda own: jax.lax.cond(first.holds, lambda _: greatest, most, own)
