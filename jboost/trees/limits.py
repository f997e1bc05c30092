# SPDX-License-Identifier: Apache-2.0
"""The numbers that shape a tree, and the unit of gradients for the search of splits.

The search multiplies gradients by a power of two, so that G^2 / H neither overflows nor
underflows in any units of the targets; this changes neither comparisons nor digits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.kernels.xla import exponent_above, power_of_two, round_alone
from jboost.trees.category_splits import CategoryLimits
from jboost.trees.splitting import UNBOUNDED, ValueLimits


class TreeLimits(NamedTuple):
    """The numbers that shape a tree; all may be traced.

    The page "Parameters" explains them. None: no limit.

    Attributes:
      parent_rows: weight of the parent's value in a leaf's, counted like l2; None: 0.
      values: limits of leaf values; the root's bounds are those of
        ``max_delta_step``.
      groups: features that may meet on a path (``interactions``).
      num_features: number of columns of the codes that are features; the columns
        after them are padding. None: all.
      rows_per_threshold: rows of a node per threshold that it tries for each feature;
        None or 0: try all thresholds.
    """

    l2: Float[Array, ""] | float = 1.0
    min_gain: Float[Array, ""] | float = 0.0
    min_child_weight: Float[Array, ""] | float = 1.0
    min_child_samples: Int32[Array, ""] | int = 1
    colsample_bytree: Float[Array, ""] | float = 1.0
    colsample_bylevel: Float[Array, ""] | float = 1.0
    colsample_bynode: Float[Array, ""] | float = 1.0
    parent_rows: Float[Array, ""] | None = None
    values: ValueLimits | None = None
    groups: Bool[Array, "G F"] | None = None
    max_bins: Int32[Array, ""] | int = 256
    categories: CategoryLimits | None = None
    num_features: Int32[ArrayLike, ""] | None = None
    rows_per_threshold: Int32[ArrayLike, ""] | None = None


def limit_leaves(limits: TreeLimits) -> TreeLimits:
    """Returns the limits that leaf values depend on; None for the others."""
    nothing: Any = None
    return limits._replace(
        colsample_bytree=nothing, colsample_bylevel=nothing, colsample_bynode=nothing,
        groups=None, max_bins=nothing, categories=None, num_features=None,
        rows_per_threshold=None,
    )  # fmt: skip


def count_in(limits: TreeLimits, unit: Float[ArrayLike, ""]) -> TreeLimits:
    """Returns limits that are counted in rows, for rows that weigh ``unit``."""

    def scale(*numbers):
        return (round_alone(unit * jnp.float32(number)) for number in numbers)

    l2, gain, weight = scale(limits.l2, limits.min_gain, limits.min_child_weight)
    limits = limits._replace(l2=l2, min_gain=gain, min_child_weight=weight)
    if limits.parent_rows is not None:
        (parent,) = scale(limits.parent_rows)
        limits = limits._replace(parent_rows=parent)
    if limits.values is not None:
        (l1,) = scale(limits.values.l1)
        limits = limits._replace(values=limits.values._replace(l1=l1))
    return limits


def limit_values(l1, max_delta_step, signs: Any, num_features):
    """Returns the limits of leaf values; None if there are none.

    A traced number counts as a limit, because its value is not known.
    """
    known = not isinstance(l1, Tracer) and not isinstance(max_delta_step, Tracer)
    if signs is None and known and l1 == 0 and max_delta_step in (0, np.inf):
        return None
    step = as_float(max_delta_step)
    numpy: Any = jnp if isinstance(step, jax.Array) else np
    most = numpy.float32(UNBOUNDED)
    step = numpy.where(step == 0, most, numpy.minimum(step, most))
    bounds = numpy.stack([-step, step])
    signs = np.zeros(num_features, np.int32) if signs is None else signs
    return ValueLimits(as_float(l1), bounds, signs)


def limit_categories(categories, max_onehot):
    """Returns the numbers for categorical features, if there are any."""
    if categories is None:
        return None
    codes = categories.codes
    traced = isinstance(codes, Tracer)
    num_codes: Any = jnp.max(codes, axis=1) if traced else np.max(codes, axis=1)
    features: Any = np.array(categories.features, np.int32)
    return CategoryLimits(features, num_codes, as_int(max_onehot))


def as_float(number) -> Any:
    """Converts to float32, by NumPy where possible, which compiles nothing."""
    if isinstance(number, jax.Array):
        return number.astype(jnp.float32)
    return np.float32(number)


def as_int(number) -> Any:
    """Converts to int32, as :func:`as_float` does."""
    return (
        number.astype(jnp.int32) if isinstance(number, jax.Array) else np.int32(number)
    )


def find_scale(unit: Float[Array, "2"]) -> Float[Array, ""]:
    """Returns the power of two that gradients are multiplied by.

    The gradient unit is then about the square root of the curvature unit, and G^2 / H
    is about a quotient of integers. The gradient unit is at most 2^30, because
    its square has 60 bits more.
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
