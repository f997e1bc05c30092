# SPDX-License-Identifier: Apache-2.0
"""Derivatives rounded to integers, the input of tree growth.

Sums of integers are exact: the same bits in any order.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.codes.codes import Codes
from jboost.entry.collectives import first_row, most, total
from jboost.numerics.exact import FixedPoint, choose_scale, quantize


class RoundedRows(NamedTuple):
    """Rows as the input of tree growth; constant over the levels of a tree.

    Attributes:
      channels: integers: gradient, curvature and count; with uniform curvature only
        gradient and count, which then stands for both.
      unit: value of one integer of gradient and of one integer of curvature.
    """

    codes: Codes
    channels: Int32[Array, "N C"]
    in_bag: Bool[Array, " N"]
    num_in_bag: Int32[Array, ""]
    unit: Float[Array, "2"]


class Quantization(NamedTuple):
    """Rules to round all rows' derivatives to integers; see :class:`FixedPoint`."""

    fixed: FixedPoint
    unit: Float[Array, "2"]
    num_in_bag: Int32[Array, ""]


def measure_rows(
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: UInt8[Array, " N"],
    uniform: bool,
) -> Quantization:
    """Chooses the scales for rounding all rows."""
    values = _mask_rows(gradient, curvature, in_bag)
    num_in_bag = total(jnp.sum(in_bag > 0, dtype=jnp.int32))
    fixed = choose_scale(values, num_in_bag, in_bag)
    largest = most(jnp.max(values[1])) if uniform else None
    return make_measure(fixed, num_in_bag, largest)


def make_measure(
    fixed: FixedPoint,
    num_in_bag: Int32[Array, ""],
    uniform: Float[Array, ""] | None,
) -> Quantization:
    """Returns the measure for derivatives in the units of ``fixed``.

    ``uniform`` is the curvature of every row, if they are equal. It becomes the unit,
    so that a row's integer is 1: a count, exact however the gradient is rounded.
    """
    unit = fixed.unit
    if uniform is not None:
        unit = jnp.stack([unit[0], jnp.maximum(uniform, jnp.float32(1e-30))])
    return Quantization(fixed, unit, num_in_bag)


def round_rows(
    gradient: Float[Array, " n"],
    curvature: Float[Array, " n"],
    in_bag: UInt8[Array, " n"],
    seed: UInt32[Array, "2"],
    measure: Quantization,
    uniform: bool,
    first_row: Int32[Array, ""] | int = 0,
) -> Int32[Array, "n C"]:
    """Returns the integers of a block of rows that starts at row ``first_row``."""
    values = _mask_rows(gradient, curvature, in_bag)
    channels = quantize(values.T, measure.fixed, seed, first_row, in_bag)
    count = (in_bag > 0).astype(jnp.int32)[:, None]
    return jnp.concatenate([channels[:, :1] if uniform else channels, count], axis=1)


def make_rows(
    codes: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    uniform: bool,
    measure: Quantization | None = None,
) -> RoundedRows:
    """Rounds all rows' derivatives to integers.

    The curvature is ``uniform`` if it is 0 or one number for every row in the bag.
    """
    rows = (gradient, curvature, in_bag)
    measure = measure or measure_rows(*rows, uniform)
    channels = round_rows(*rows, seed, measure, uniform, first_row())
    return RoundedRows(codes, channels, in_bag > 0, measure.num_in_bag, measure.unit)


def _mask_rows(gradient, curvature, in_bag):
    return jnp.where((in_bag > 0)[None, :], jnp.stack([gradient, curvature]), 0.0)
