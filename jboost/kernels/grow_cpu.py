# SPDX-License-Identifier: Apache-2.0
"""The operations of native/tree.h and native/grow.h, which grow trees on a CPU.

In: codes, derivatives, limits. Out: a tree and the leaf of each row. All results equal
those of plain XLA bit for bit. :mod:`jboost.kernels.levels_cpu` grows trees from parts
of the rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex64, Float, Int32, UInt8, UInt32

from jboost.kernels.code_operands import CodeOperands
from jboost.kernels.library import available, call, find_function

CHUNK = 16384  # kChunk of native/grow.h
WORD = 32  # kWordBits of native/categories.h


class SplitLimits(NamedTuple):
    """The conditions that a split must meet; see `jboost.trees.limits.TreeLimits`."""

    l2: Float[Array, ""]
    min_gain: Float[Array, ""]
    min_child_weight: Float[Array, ""]
    min_child_samples: Int32[Array, ""]
    num_features: Int32[Array, ""]


class TreeSizes(NamedTuple):
    """Static sizes for the kernel that grows a tree.

    Attributes:
      max_leaves: the most leaves of the tree; 0: no limit.
      num_slots: the most nodes of a level.
      uniform: whether all rows in the bag have the same curvature.
    """

    max_depth: int
    max_leaves: int
    num_bins: int
    num_slots: int
    uniform: int


class SortedSizes(NamedTuple):
    """Sizes as in TreeSizes for the kernel that grows a tree on sorted rows."""

    max_depth: int
    max_leaves: int
    num_slots: int
    uniform: int


class GrownTree(NamedTuple):
    """A tree in heap order with each row's leaf; fields that do not apply are None."""

    feature: Int32[Array, " I"]
    threshold: Int32[Array, " I"]
    missing_left: Bool[Array, " I"]
    leaf: Int32[Array, " N"]
    bounds: Float[Array, "L 2"] | None
    left_codes: UInt32[Array, "I W"] | None


def split_pairs(
    pairs: Complex64[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Bool[Array, ""]]:
    """See :func:`jboost.boosting.round_programs.take_parts`; equal to it."""
    values = jax.ShapeDtypeStruct(weights.shape, jnp.float32)
    results = values, values, jax.ShapeDtypeStruct((), jnp.bool_)
    return call("split_pairs", results, pairs, weights)


def weigh_rows(
    in_bag: Bool[Array, " N"],
    weights: Float[Array, " N"],
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    mean: Float[Array, ""],
) -> tuple[Float[Array, " N"], Float[Array, " N"], UInt8[Array, " N"]]:
    """See :func:`jboost.boosting.round.weigh_rows`; equal to it bit for bit."""
    shape = weights.shape
    values = jax.ShapeDtypeStruct(shape, jnp.float32)
    results = values, values, jax.ShapeDtypeStruct(shape, jnp.uint8)
    return call("weigh_rows", results, in_bag, weights, gradient, curvature, mean)


def histogram(
    codes: CodeOperands,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """See :func:`jboost.trees.histogram.sum_histogram`."""
    shape = (num_nodes, codes.shape[0], num_bins, channels.shape[1])
    operands = (codes.codes, channels, node, *codes.entries)
    return call("histogram", jax.ShapeDtypeStruct(shape, jnp.int32), *operands)


def find_leaves(
    codes: CodeOperands,
    feature: Int32[Array, " I"],
    threshold: Int32[Array, " I"],
    missing_left: Bool[Array, " I"],
    skip: Bool[Array, " N"],
    leaf: Int32[Array, " N"],
    left_codes: UInt32[Array, "I W"] | None = None,
) -> Int32[Array, " N"]:
    """Finds the leaf of each row; rows with ``skip`` keep the one they have."""
    if left_codes is not None:
        tree = (feature, threshold, missing_left, left_codes)
        operands = (codes.codes, *tree, skip, leaf)
        return call("find_category_leaves", _like(leaf), *operands, aliases={6: 0})
    operands = (codes.codes, feature, threshold, missing_left, skip, leaf)
    operands += codes.entries
    return call("find_leaves", _like(leaf), *operands, aliases={5: 0})


def grow_tree(
    codes: CodeOperands,
    rows: tuple[Array, ...],
    limits: SplitLimits,
    values: Any,
    groups: Bool[Array, "G F"] | None,
    categories: Any,
    *,
    sizes: TreeSizes,
) -> GrownTree:
    """Grows a whole tree.

    Args:
      codes: the columns and the codes by row.
      rows: gradient, curvature, how many times each row counts, seed, and the
        fractions of features by tree, level and node.
      limits: the conditions that a split must meet.
      values: a :class:`jboost.trees.splitting.ValueLimits`, or None.
      groups: features that may meet on a path, or None.
      categories: a :class:`jboost.trees.category_splits.CategoryLimits`, or None;
        not with sparse codes.
    """
    nodes, words = 2**sizes.max_depth - 1, -(-sizes.num_bins // WORD)
    shapes: list[Any] = [
        ((nodes,), jnp.int32), ((nodes,), jnp.int32), ((nodes,), jnp.bool_),
        ((codes.shape[1],), jnp.int32),
    ]  # fmt: skip
    shapes += [((nodes + 1, 2), jnp.float32)] if values is not None else []
    shapes += [((nodes, words), jnp.uint32)] if categories is not None else []
    layouts = (codes.codes,) if codes.entries else (codes.codes, codes.packed)
    optional = () if values is None else values
    optional += () if groups is None else (groups,)
    optional += () if categories is None else categories
    found = call(
        "grow", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        *layouts, *rows, *limits, *codes.entries, *optional,
        limited=int(values is not None), grouped=int(groups is not None),
        categorical=int(categories is not None), **sizes._asdict(),
    )  # fmt: skip
    feature, threshold, missing_left, leaf, *rest = found
    bounds = rest.pop(0) if values is not None else None
    left_codes = rest.pop(0) if categories is not None else None
    return GrownTree(feature, threshold, missing_left, leaf, bounds, left_codes)


def grow_sorted_tree(
    codes: tuple[Array, Array],
    rows: tuple[Array, ...],
    limits: SplitLimits,
    values: Any,
    groups: Bool[Array, "G F"] | None,
    bins: tuple[Array, Array] | None,
    *,
    sizes: SortedSizes,
) -> GrownTree:
    """Grows a whole tree on sorted rows; see :mod:`jboost.trees.exact_growth`.

    Args:
      codes: the columns, of any width, and the rows in order of each one.
      rows, limits, values, groups: the arguments of :func:`grow_tree`.
      bins: the mass of each row, and the number of bins for the values of a node; None
        to try every value.
    """
    nodes = 2**sizes.max_depth - 1
    shapes: list[Any] = [
        ((nodes,), jnp.int32), ((nodes,), jnp.int32), ((nodes,), jnp.bool_),
        ((codes[0].shape[1],), jnp.int32),
    ]  # fmt: skip
    shapes += [((nodes + 1, 2), jnp.float32)] if values is not None else []
    optional = () if values is None else values
    optional += () if groups is None else (groups,)
    optional += () if bins is None else bins
    found = call(
        "grow_sorted", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        *codes, *rows, *limits, *optional, limited=int(values is not None),
        grouped=int(groups is not None), local=int(bins is not None),
        **sizes._asdict(),
    )  # fmt: skip
    feature, threshold, missing_left, leaf, *rest = found
    return GrownTree(
        feature, threshold, missing_left, leaf, rest[0] if rest else None, None
    )


@contextmanager
def keep_scratch() -> Iterator[None]:
    """Keeps the memory that a growing tree needs, for the next tree.

    The ``with`` block covers all trees that grow meanwhile; its end frees the memory.
    """
    if not available():
        yield
        return
    keep = find_function("keep_scratch")
    keep(1)
    try:
        yield
    finally:
        keep(-1)


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
