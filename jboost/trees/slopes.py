# SPDX-License-Identifier: Apache-2.0
"""Linear leaves: their values for rows, and the ranges that values are clipped to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jboost.numerics.derivatives import round_alone
from jboost.trees.tree import Slopes


def find_ranges(thresholds: Float[Any, "F B-1"]) -> Float[Any, "F 2"]:
    """Returns the least and greatest value of each feature in linear terms.

    They lie beyond the outermost thresholds by s, half the distance between the 16 %
    and the 84 % quantile of the thresholds, which is one standard deviation if the
    values are normally distributed. The range of a feature with fewer than three
    thresholds is empty: no leaf has a slope in it.
    """
    numpy: Any = np if isinstance(thresholds, np.ndarray) else jnp
    count = numpy.sum(numpy.isfinite(thresholds), axis=1)

    def quantile(percent):
        place = ((count - 1).clip(0) * percent + 50) // 100
        return numpy.take_along_axis(thresholds, place[:, None], axis=1)[:, 0]

    low, high = quantile(0), quantile(100)
    spread = (quantile(84) - quantile(16)) / 2
    ends = numpy.stack([low - spread, high + spread], axis=1)
    return numpy.where((count < 3)[:, None], numpy.float32(0), ends)


def clip_values(
    columns: Float[Array, "F N"], ranges: Float[Array, "F 2"]
) -> Float[Array, "F N"]:
    """Clips the values of each feature to its range; NaN stays."""
    return jnp.clip(columns, ranges[:, :1], ranges[:, 1:])


def find_terms(
    slopes: Slopes, read: Callable[[Int32[Array, "*n"]], Float[Array, "*m"]]
) -> list[Float[Array, "*m"]]:
    """Returns the P linear terms; all are 0 for a row that misses one of their values.

    ``read`` returns the clipped values of rows in the given features.
    """
    terms, missing = [], jnp.zeros((), bool)
    for term in range(slopes.feature.shape[-1]):
        feature, slope, center = (part[..., term] for part in slopes)
        x, given = read(jnp.maximum(feature, 0)), feature >= 0
        missing = missing | (given & jnp.isnan(x))
        terms.append(jnp.where(given, round_alone(slope * (x - center)), 0.0))
    return [jnp.where(missing, 0.0, term) for term in terms]


def evaluate(
    values: Float[Array, " L"],
    slopes: Slopes,
    leaf: Int32[Array, " N"],
    read: Callable[[Int32[Array, " N"]], Float[Array, " N"]],
) -> Float[Array, " N"]:
    """Returns the values of a tree with linear leaves for each row: the definition.

    ``read`` returns the clipped value of each row in a feature of its own.
    """
    terms = find_terms(jax.tree.map(lambda part: part[leaf], slopes), read)
    return sum(terms, start=values[leaf])
