# SPDX-License-Identifier: Apache-2.0
"""The steps of one level, for rows that are divided among devices or blocks.

In: codes and derivatives of a part of the rows; sums over all rows. Out: the same tree
as from :func:`jboost.kernels.grow_cpu.grow_tree`, bit for bit::

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

from jboost.kernels.grow_cpu import CHUNK, WORD, SplitLimits
from jboost.kernels.library import call, call_on_host

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
      values: a :class:`jboost.trees.splitting.ValueLimits`, or None.
      categories: a :class:`jboost.trees.category_splits.CategoryLimits`, or None.
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
    shape: Any = jax.ShapeDtypeStruct
    limited, categorical = limits.values is not None, limits.categories is not None
    words = -(-num_bins // WORD)
    return TreeState(
        feature=shape((nodes,), jnp.int32),
        threshold=shape((nodes,), jnp.int32),
        missing_left=shape((nodes,), jnp.bool_),
        position=shape((num_slots,), jnp.int32),
        place=shape((num_slots,), jnp.int32),
        free=shape((1,), jnp.int32),
        histograms=shape((num_slots, *sums_shape), jnp.int32),
        leaf_bounds=shape((nodes + 1, 2), jnp.float32) if limited else None,
        left_codes=shape((nodes, words), jnp.uint32) if categorical else None,
        bounds=shape((num_slots, 2), jnp.float32) if limited else None,
        used=None if limits.groups is None else shape((num_slots, features), jnp.bool_),
    )


def find_greatest_derivatives(
    gradient: Float[AnyArray, " N"],
    curvature: Float[AnyArray, " N"],
    in_bag: UInt8[AnyArray, " N"],
) -> tuple[Float[AnyArray, "2"], Int32[AnyArray, ""]]:
    """Returns the greatest magnitudes of rows in the bag, and the number of these."""
    shape: Any = jax.ShapeDtypeStruct
    results = shape((2,), jnp.float32), shape((), jnp.int32)
    return tuple(_call("greatest_derivatives", results, gradient, curvature, in_bag))


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

    Returns:
      Digits; see :func:`jboost.kernels.sums_xla.join_digits`.
    """
    result = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    return _call("sum_magnitudes", result, gradient, curvature, in_bag, greatest)


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
    results = shape_rows(gradient.shape[0], num_slots)
    options = {} if into is None else {"into": into}
    return PartRows(
        *_call("start_rows", results, *operands, uniform=int(uniform), **options)
    )


def shape_rows(size: int, num_slots: int) -> PartRows:
    """Returns the shapes of the rows of a part."""
    shape: Any = jax.ShapeDtypeStruct
    return PartRows(
        shape((size, 2), jnp.int32),
        shape((size,), jnp.uint16),
        shape((-(-size // CHUNK), num_slots, 2), jnp.int32),
    )


def sum_slots(
    packed: AnyArray,
    rows: PartRows,
    num_features: Int32[AnyArray, ""],
    slot: Int32[AnyArray, " P"],
    sums: Int32[AnyArray, "P C F B"],
) -> Int32[AnyArray, "P C F B"]:
    """Adds the histograms, cumulative over bins, of some slots to ``sums``.

    Args:
      packed: codes by row.
      num_features: the number of columns to sum; those beyond are padding.
      slot: the slots to sum; the list ends at the first -1.
    """
    operands = (packed, *rows, num_features, slot, sums)
    aliases = {len(operands) - 1: 0}
    return _call("sum_slots", _like(sums), *operands, aliases=aliases)


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
      max_leaves: the most leaves of the tree; 0: no limit.

    Returns:
      The state of the next level, this level's splits, and the slots to be summed.
    """
    grown, structure = jax.tree.flatten(state)
    slots, words = state.position.shape[0], state.left_codes
    shape: Any = jax.ShapeDtypeStruct
    found = [shape((slots,), jnp.int32)] * 3 + [shape((slots,), jnp.bool_)] * 2
    if words is not None:
        found += [shape((slots, words.shape[1]), jnp.uint32)] * 2
    next_level = shape((count_pairs(level + 1, slots),), jnp.int32)
    before = (*limits[:2], *limits.limits, limits.unit, sums, summed)
    if limits.values is not None:
        before += tuple(limits.values)
    if limits.groups is not None:
        before += (limits.groups,)
    if limits.categories is not None:
        before += (*limits.categories, squares, greatest)
    results = _call(
        "find_level", (*map(_like, grown), *found, next_level), *before, *grown,
        aliases={len(before) + i: i for i in range(len(grown))},
        categorical=int(limits.categories is not None),
        grouped=int(limits.groups is not None), limited=int(limits.values is not None),
        level=level, max_depth=max_depth, max_leaves=max_leaves,
    )  # fmt: skip
    after = jax.tree.unflatten(structure, results[: len(grown)])
    splits = LevelSplits(*results[len(grown) : -1])
    return after, splits, results[-1]


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
    before = (codes, *(each for each in splits if each is not None))
    *moved, leaf = _call(
        "route_rows", (*map(_like, rows), _like(leaf)), *before, *rows, leaf,
        aliases={len(before) + i: i for i in range(4)}, level=level,
        max_depth=max_depth,
    )  # fmt: skip
    return PartRows(*moved), leaf


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
    columns, packed = codes
    before = (packed, columns, *(each for each in splits if each is not None))
    operands = (*before, *rows, leaf, num_features, slot, sums)
    aliases = {len(before) + i: i for i in range(4)}
    *moved, leaf, sums = _call(
        "route_and_sum", (*map(_like, rows), _like(leaf), _like(sums)), *operands,
        aliases=aliases | {len(operands) - 1: 4}, level=level, max_depth=max_depth,
    )  # fmt: skip
    return PartRows(*moved), leaf, sums


def find_leaves(
    codes: AnyArray,
    feature: Int32[AnyArray, " I"],
    threshold: Int32[AnyArray, " I"],
    missing_left: Bool[AnyArray, " I"],
    skip: Bool[AnyArray, " N"],
    leaf: Int32[AnyArray, " N"],
) -> Int32[AnyArray, " N"]:
    """Finds the leaves of the rows of a part.

    Args:
      codes: codes by feature or by row.
      skip: mask of the rows that keep their present leaf.
    """
    operands = (codes, feature, threshold, missing_left, skip, leaf)
    return _call("find_leaves", _like(leaf), *operands, aliases={5: 0})


def find_greatest(rows: PartRows) -> Int32[AnyArray, ""]:
    """Finds the greatest magnitude of the gradient's integers, of rows in slot 0."""
    result = jax.ShapeDtypeStruct((), jnp.int32)
    return call("greatest_gradient", result, *rows)


def sum_squares(
    rows: PartRows, greatest: Int32[AnyArray, ""], *, num_slots: int
) -> Int32[AnyArray, "S 4"]:
    """Sums the squares of the gradient's integers over the rows of the first slots.

    Args:
      greatest: the result of :func:`find_greatest` over all rows; it sets the unit.

    Returns:
      Digits of 19 bits, lowest first; see
      :func:`jboost.kernels.sums_xla.join_digits`.
    """
    result = jax.ShapeDtypeStruct((num_slots, 4), jnp.int32)
    return call("sum_squares", result, *rows, greatest)


def _call(name, results, *operands, **options):
    on_host = all(isinstance(each, np.ndarray) for each in operands)
    run = call_on_host if on_host else call
    return run(name, results, *operands, **options)


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
