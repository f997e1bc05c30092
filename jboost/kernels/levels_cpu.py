# SPDX-License-Identifier: Apache-2.0
"""The steps of one level, for rows that are divided among devices or blocks.

The tree is that of :func:`jboost.kernels.grow_cpu.grow_tree`, bit for bit::

    start_rows                                   each part of the rows
    sum_slots  -> add the sums of all parts      the root
    find_level -> route_rows, sum_slots -> add   levels

Traced operands give a traced call. With NumPy arrays, the kernel runs at once and
updates aliased operands in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt16, UInt32

from jboost.kernels.calls import call, call_on_host, floats, ints
from jboost.kernels.grow_cpu import CHUNK, WORD, SplitLimits

AnyArray = Array | np.ndarray


class PartRows(NamedTuple):
    """A part's rows in the bag, grouped by slot within chunks; see native/grow.h.

    Attributes:
      rounded: gradient and curvature of each row as integers, in one 64-bit word.
      order: the position of each row in its chunk.
      segments: the range [begin, end) of each slot's rows in each chunk.
    """

    rounded: Int32[Array, "N 2"]
    order: UInt16[Array, " N"]
    segments: Int32[Array, "chunks M 2"]


class LevelSplits(NamedTuple):
    """The splits of the slots of a level.

    Attributes:
      position: the position of each slot's node on the level; -1: an empty slot.
      left_codes, absent_codes: sets of codes at categorical splits; None without.
    """

    position: Int32[Array, " M"]
    feature: Int32[Array, " M"]
    threshold: Int32[Array, " M"]
    missing_left: Bool[Array, " M"]
    found: Bool[Array, " M"]
    left_codes: UInt32[Array, "M W"] | None = None
    absent_codes: UInt32[Array, "M W"] | None = None


class TreeState(NamedTuple):
    """A tree so far, and the nodes of its next level; see native/tree.h."""

    feature: Int32[Array, " I"]
    threshold: Int32[Array, " I"]
    missing_left: Bool[Array, " I"]
    position: Int32[Array, " M"]
    place: Int32[Array, " M"]
    free: Int32[Array, "1"]
    histograms: Int32[Array, "M C F B"]
    leaf_bounds: Float[Array, "L 2"] | None
    left_codes: UInt32[Array, "I W"] | None
    bounds: Float[Array, "M 2"] | None
    used: Bool[Array, "M F"] | None


class LevelLimits(NamedTuple):
    """Inputs of the split search other than sums; see :func:`grow_tree`.

    Attributes:
      fractions: fractions of features to sample by tree, level and node.
      unit: the values of one integer step of the gradient and of the curvature.
    """

    seed: UInt32[Array, "2"]
    fractions: Float[Array, "3"]
    limits: SplitLimits
    unit: Float[Array, "2"]
    values: Any
    groups: Bool[Array, "G F"] | None
    categories: Any


def shape_state(
    limits: LevelLimits,
    *,
    max_depth: int,
    num_slots: int,
    sums_shape: tuple[int, int, int],
) -> TreeState:
    """Returns the shapes of a state; ``sums_shape`` is channels, features, bins."""
    nodes, features, num_bins = 2**max_depth - 1, sums_shape[1], sums_shape[2]
    limited, categorical = limits.values is not None, limits.categories is not None
    words, shape = -(-num_bins // WORD), _shape
    return TreeState(
        feature=ints(nodes),
        threshold=ints(nodes),
        missing_left=shape((nodes,), jnp.bool_),
        position=ints(num_slots),
        place=ints(num_slots),
        free=ints(1),
        histograms=ints(num_slots, *sums_shape),
        leaf_bounds=floats(nodes + 1, 2) if limited else None,
        left_codes=shape((nodes, words), jnp.uint32) if categorical else None,
        bounds=floats(num_slots, 2) if limited else None,
        used=None if limits.groups is None else shape((num_slots, features), jnp.bool_),
    )


def find_greatest_derivatives(
    gradient: Float[AnyArray, " N"],
    curvature: Float[AnyArray, " N"],
    in_bag: UInt8[AnyArray, " N"],
) -> tuple[Float[AnyArray, "2"], Int32[AnyArray, ""]]:
    """Returns the greatest magnitudes of rows in the bag, and the number of these."""
    rows = gradient, curvature, in_bag
    return _call("greatest_derivatives", (floats(2), ints()), rows)


def sum_magnitudes(
    gradient: Float[AnyArray, " N"],
    curvature: Float[AnyArray, " N"],
    in_bag: UInt8[AnyArray, " N"],
    greatest: Float[AnyArray, "2"],
) -> Int32[AnyArray, "2 4"]:
    """Sums the magnitudes of rows in the bag.

    Args:
      greatest: magnitudes over all rows from :func:`find_greatest_derivatives`; they
        set the units.
    """
    rows = gradient, curvature, in_bag
    return _call("sum_magnitudes", ints(2, 4), rows, greatest)


def start_rows(
    gradient: Float[AnyArray, " N"],
    curvature: Float[AnyArray, " N"],
    in_bag: UInt8[AnyArray, " N"],
    seed: UInt32[AnyArray, "2"],
    scale: Float[AnyArray, "2"],
    stochastic: Bool[AnyArray, ""],
    first_row: Int32[AnyArray, ""],
    *,
    num_slots: int,
    uniform: bool,
    into: PartRows | None = None,
) -> PartRows:
    """Rounds a part's derivatives to integers, and puts its rows in the bag in slot 0.

    Args:
      in_bag: how many times each row counts; 0 for rows outside the bag.
      scale, stochastic: the fields of :class:`jboost.numerics.exact.FixedPoint`.
      first_row: the number of the part's first row.
      uniform: whether all rows in the bag have one curvature; its integer is then 1.
      into: NumPy arrays that are overwritten with the result.
    """
    operands = gradient, curvature, in_bag, seed, scale, stochastic, first_row
    results = into or shape_rows(gradient.shape[0], num_slots)
    return _call("start_rows", results, operands, uniform=int(uniform))


def shape_rows(size: int, num_slots: int) -> PartRows:
    """Returns the shapes of the rows of a part."""
    segments = ints(-(-size // CHUNK), num_slots, 2)
    return PartRows(ints(size, 2), _shape((size,), jnp.uint16), segments)


def sum_slots(
    packed: AnyArray,
    rows: PartRows,
    num_features: Int32[AnyArray, ""],
    slot: Int32[AnyArray, " P"],
    sums: Int32[AnyArray, "P C F B"],
) -> Int32[AnyArray, "P C F B"]:
    """Adds the histograms, cumulative over bins, of some slots to ``sums``.

    Args:
      num_features: the number of columns to sum; those beyond are padding.
      slot: the slots to sum; the list ends at the first -1.
    """
    return _call("sum_slots", sums, packed, rows, num_features, slot, sums)


def find_level(
    limits: LevelLimits,
    sums: Int32[AnyArray, "P C F B"],
    summed: Int32[AnyArray, " P"],
    squares: Int32[AnyArray, "S 4"] | None,
    greatest: Int32[AnyArray, ""] | None,
    state: TreeState,
    *,
    level: int,
    max_depth: int,
    max_leaves: int,
) -> tuple[TreeState, LevelSplits, Int32[AnyArray, " Q"]]:
    """Finds the splits of a level, writes them, and puts their children in slots.

    Args:
      sums: sums over all rows of the slots ``summed``: the smaller child of each pair.
        On level 0 they are those of the root, and the values in ``state`` are ignored.
      squares, greatest: the result and the argument of :func:`sum_squares`, over all
        rows; None without categories.

    Returns:
      The state of the next level, this level's splits, and the slots to be summed.
    """
    slots, words, sets = state.position.shape[0], state.left_codes, None
    if words is not None:
        sets = _shape((slots, words.shape[1]), jnp.uint32)
    flags, summed_next = _shape((slots,), jnp.bool_), count_pairs(level + 1, slots)
    numbers = ints(slots)
    found = LevelSplits(numbers, numbers, numbers, flags, flags, sets, sets)
    return _call(
        "find_level", (state, found, ints(summed_next)), limits[:4], sums, summed,
        limits[4:], squares, greatest, state, limited=int(limits.values is not None),
        grouped=int(limits.groups is not None),
        categorical=int(limits.categories is not None), level=level,
        max_depth=max_depth, max_leaves=max_leaves,
    )  # fmt: skip


def count_pairs(level: int, num_slots: int) -> int:
    """Returns the greatest number of nodes of a level that must be summed."""
    return max(1, min(2**level, num_slots) // 2)


def route_rows(
    codes: AnyArray,
    splits: LevelSplits,
    rows: PartRows,
    leaf: Int32[AnyArray, " N"],
    *,
    level: int,
    max_depth: int,
) -> tuple[PartRows, Int32[AnyArray, " N"]]:
    """Moves a part's rows to the children of the splits.

    Rows in a node without a split get their leaf, and at the last level all rows do.

    Args:
      codes: codes by feature or by row.
    """
    moved, sizes = (rows, leaf), dict(level=level, max_depth=max_depth)
    return _call("route_rows", moved, codes, splits, rows, leaf, **sizes)


def route_and_sum(
    codes: tuple[AnyArray, AnyArray],
    splits: LevelSplits,
    rows: PartRows,
    leaf: Int32[AnyArray, " N"],
    num_features: Int32[AnyArray, ""],
    slot: Int32[AnyArray, " P"],
    sums: Int32[AnyArray, "P C F B"],
    *,
    level: int,
    max_depth: int,
) -> tuple[PartRows, Int32[AnyArray, " N"], Int32[AnyArray, "P C F B"]]:
    """Runs :func:`route_rows` and then :func:`sum_slots` in one call.

    Args:
      codes: codes by feature and codes by row.
      level: the level of the splits; ``slot`` holds slots of the next level.
    """
    return _call(
        "route_and_sum", (rows, leaf, sums), codes[::-1], splits, rows, leaf,
        num_features, slot, sums, level=level, max_depth=max_depth,
    )  # fmt: skip


def find_greatest(rows: PartRows) -> Int32[AnyArray, ""]:
    """Finds the greatest magnitude of the gradient's integers, of rows in slot 0."""
    return call("greatest_gradient", ints(), rows)


def sum_squares(
    rows: PartRows, greatest: Int32[AnyArray, ""], *, num_slots: int
) -> Int32[AnyArray, "S 4"]:
    """Sums the squares of the gradient's integers over the rows of the first slots.

    Args:
      greatest: the result of :func:`find_greatest` over all rows; it sets the unit.

    Returns:
      Digits of 19 bits, lowest first; see
      :func:`jboost.kernels.exact_sums.join_digits`.
    """
    return call("sum_squares", ints(num_slots, 4), rows, greatest)


def _call(name, results, *operands, **attributes):
    arrays = jax.tree.leaves(operands)
    on_host = all(isinstance(each, np.ndarray) for each in arrays)
    run = call_on_host if on_host else call
    return run(name, results, *arrays, **attributes)


def _shape(shape, dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
