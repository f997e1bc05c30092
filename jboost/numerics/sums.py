# SPDX-License-Identifier: Apache-2.0
"""Sums whose bits do not depend on the order of the terms.

In: float32 or integer arrays. Out: their sums, over an axis or by group. Derivatives
are those of plain sums.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jboost.kernels import leaves_cpu, reduce_cpu, sums_xla
from jboost.kernels.library import choose
from jboost.numerics.derivatives import differentiable


def sum_by_group(
    values: Shaped[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
) -> Shaped[Array, " G"]:
    """Sums ``values``, which may be float, by group; see :func:`sum_channels`."""
    return sum_channels((values,), group, num_groups)[0]


def sum_channels(
    channels: Sequence[Shaped[Array, " N"]],
    group: Int32[Array, " N"],
    num_groups: int,
) -> Shaped[Array, "C G"]:
    """Sums each channel by group; the bits do not depend on the order of the rows.

    Floats are added as multiples of a unit, one for each channel; see
    :func:`sum_rows`. A group outside [0, num_groups) is left out.
    """
    run = partial(sums_xla.sum_channels, num_groups=num_groups)
    if not all(channel.dtype == jnp.float32 for channel in channels):
        return run(group, *channels)
    cpu = partial(leaves_cpu.sum_channels, num_groups=num_groups)
    derive = partial(_derive_channels, num_groups)
    return differentiable(choose(cpu=cpu, xla=run), derive, group, *channels)


def _derive_channels(num_groups, sums, operands, tangents):
    del sums
    group, channels = operands[0], jnp.stack(tangents[1:], axis=1)
    # One more group takes the rows that have none.
    group = jnp.where((group >= 0) & (group < num_groups), group, num_groups)
    return jax.ops.segment_sum(channels, group, num_groups + 1)[:num_groups].T


def sum_rows(values: Float[Array, "*K N"]) -> Float[Array, "*K"]:
    """Sums the last axis; the bits do not depend on the order of the terms.

    Terms are rounded to multiples of 2^-38 times the power of two above the greatest
    magnitude and added as integers; the result is rounded to float32. The error is at
    most N 2^-39 times the greatest magnitude, and that rounding. A sum that holds NaN
    or infinities is NaN or infinite, as in floating point.
    """
    run = choose(cpu=reduce_cpu.sum_rows, xla=sums_xla.sum_rows)
    return differentiable(run, _derive_sum, values)


def _derive_sum(total, operands, tangents):
    del total, operands
    return jnp.sum(tangents[0], axis=-1)
