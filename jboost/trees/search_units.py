# SPDX-License-Identifier: Apache-2.0
"""The unit of gradients in which splits are searched.

In: limits in the units of the derivatives, and what one integer of gradient and of
curvature stands for. Out: the same with gradients times a power of two, so that
G^2 / H neither overflows nor underflows, whatever the units of the targets. A power
of two changes neither comparisons nor the digits of a quotient.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.kernels.float_bits import exponent_above, power_of_two
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import UNBOUNDED


def find_scale(unit: Float[Array, "2"]) -> Float[Array, ""]:
    """Returns the power of two that gradients are multiplied by.

    An integer of gradient then stands for about the square root of what an integer of
    curvature stands for, and G^2 / H is about a quotient of integers; but for no more
    than 2^30, because its square has 60 bits more.

    Args:
      unit: what one integer of gradient and of curvature stands for.
    """
    gradient, curvature = exponent_above(unit)
    wanted = jnp.minimum(curvature >> 1, 30)
    return power_of_two(jnp.clip(wanted - gradient + 1, -126, 126))


def to_search_units(
    limits: TreeLimits, unit: Float[Array, "2"]
) -> tuple[TreeLimits, Float[Array, "2"]]:
    """Returns limits and unit of the search, for a unit of the derivatives."""
    scale, values = find_scale(unit), limits.values
    if values is not None:
        values = values._replace(
            l1=jnp.minimum(values.l1 * scale, UNBOUNDED),
            bounds=_scale_bounds(values.bounds, scale),
        )
    min_gain = jnp.float32(limits.min_gain) * scale * scale
    limits = limits._replace(min_gain=min_gain, values=values)
    return limits, jnp.stack([unit[0] * scale, unit[1]])


def restore_bounds(
    bounds: Float[Array, "*M 2"] | None, limits: TreeLimits, unit: Float[Array, "2"]
) -> Float[Array, "*M 2"] | None:
    """Returns bounds found by the search in the units of ``limits`` and ``unit``."""
    values = limits.values
    if bounds is None or values is None:
        return None
    scale = find_scale(unit)
    # Scaling may have clipped the bounds of the root; a division would not restore it.
    clipped, given = (
        jnp.broadcast_to(root, bounds.shape)
        for root in (_scale_bounds(values.bounds, scale), values.bounds)
    )
    return jnp.where(bounds == clipped, given, bounds / scale)


def _scale_bounds(bounds, scale):
    return jnp.clip(bounds * scale, -UNBOUNDED, UNBOUNDED)
