# SPDX-License-Identifier: Apache-2.0
"""The operations of native/tree.h and native/grow.h, which grow trees on a CPU.

All results equal those of plain XLA bit for bit. :mod:`jboost.kernels.levels_cpu` grows
trees from parts of the rows.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.kernels.binning_cpu import CodeOperands
from jboost.kernels.calls import (
    available,
    call,
    find_address,
    find_function,
    floats,
    ints,
)

CHUNK = 16384  # kChunk of native/grow.h
WORD = 32  # kWordBits of native/categories.h


class SplitLimits(NamedTuple):
    """The conditions that a split must meet; see `jboost.trees.limits.TreeLimits`."""

    l2: Float[Array, ""]
    min_gain: Float[Array, ""]
    min_child_weight: Float[Array, ""]
    min_child_samples: Int32[Array, ""]
    num_features: Int32[Array, ""]
    rows_per_threshold: Int32[Array, ""]


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


def split_pairs(pairs, weights):
    """See :func:`jboost.boosting.round_programs.take_parts`; equal to it."""
    values = floats(*weights.shape)
    results = values, values, jax.ShapeDtypeStruct((), jnp.bool_)
    return call("split_pairs", results, pairs, weights)


def weigh_rows(in_bag, weights, gradient, curvature, mean):
    """See :func:`jboost.boosting.derivatives.weigh_rows`; equal to it bit for bit."""
    values = floats(*weights.shape)
    results = values, values, jax.ShapeDtypeStruct(weights.shape, jnp.uint8)
    return call("weigh_rows", results, in_bag, weights, gradient, curvature, mean)


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
    tree, rows = (codes.codes, feature, threshold, missing_left), (skip, leaf)
    if left_codes is not None:
        return call("find_category_leaves", leaf, tree, left_codes, rows)
    return call("find_leaves", leaf, tree, rows, codes.entries)


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
      rows: gradient, curvature, how many times each row counts, seed, and the
        fractions of features by tree, level and node.
      values: a :class:`jboost.trees.splitting.ValueLimits`, or None.
      groups: features that may meet on a path, or None.
      categories: a :class:`jboost.trees.category_splits.CategoryLimits`, or None;
        not with sparse codes.
    """
    words = None if categories is None else -(-sizes.num_bins // WORD)
    shapes = _shape_tree(sizes.max_depth, codes.shape[1], values, words)
    return call(
        "grow", shapes, codes.codes, None if codes.entries else codes.packed, rows,
        limits, codes.entries, values, groups, categories, limited=values is not None,
        grouped=groups is not None, categorical=categories is not None,
        **sizes._asdict(),
    )  # fmt: skip


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
    shapes = _shape_tree(sizes.max_depth, codes[0].shape[1], values, None)
    return call(
        "grow_sorted", shapes, codes, rows, limits, values, groups, bins,
        limited=values is not None, grouped=groups is not None,
        local=bins is not None, **sizes._asdict(),
    )  # fmt: skip


def _shape_tree(max_depth, num_rows, values, words):
    nodes = 2**max_depth - 1
    shape: Any = jax.ShapeDtypeStruct
    return GrownTree(
        feature=ints(nodes),
        threshold=ints(nodes),
        missing_left=shape((nodes,), jnp.bool_),
        leaf=ints(num_rows),
        bounds=None if values is None else floats(nodes + 1, 2),
        left_codes=None if words is None else shape((nodes, words), jnp.uint32),
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


# ---- least-squares trees, by native/cart.cc ------------------------------------------

_MOST = 2**32  # no limit on rows or levels is greater in effect


def grow_cart(
    matrix: Float[np.ndarray, "N F"],
    targets: Float[np.ndarray, "K N"],
    weights: Float[np.ndarray, " N"] | None,
    *,
    max_depth: int,
    min_child_samples: int,
    min_split_samples: int,
    min_child_weight: float,
    min_gain: float,
) -> dict[str, np.ndarray]:
    """Grows a least-squares tree; see :func:`jboost.cart.least_squares.grow`.

    The data are float64 and never on a device, so that the kernel is called directly
    rather than by XLA.
    """
    matrix, targets = np.ascontiguousarray(matrix), np.ascontiguousarray(targets)
    weights = None if weights is None else np.ascontiguousarray(weights)
    num_leaves = max(1, len(matrix) // min_child_samples)
    num_leaves = min(num_leaves, 2 ** min(max_depth, 62))
    nodes = _make_nodes(len(targets), 2 * num_leaves - 1)
    sizes = (*matrix.shape, len(targets))
    limits = (max_depth, min_child_samples, min_split_samples)
    limits = [min(limit, _MOST) for limit in limits]
    num_nodes = _find_cart()(
        _words(matrix, targets, weights, *sizes),
        _words(*limits, np.float64(min_child_weight), np.float64(min_gain)),
        _words(*nodes.values(), nodes["left"].size),
        _count_threads(),
    )
    if num_nodes < 0:
        raise MemoryError(f"a tree of {len(matrix)} rows does not fit into memory")
    return {name: array[..., :num_nodes].copy() for name, array in nodes.items()}


def _words(*values):
    """Returns a struct of addresses (0 for None), integers and float64 numbers."""
    words = (ctypes.c_int64 * len(values))()
    for i, value in enumerate(values):
        if isinstance(value, np.float64):
            value = value.view(np.int64)
        elif isinstance(value, np.ndarray):
            value = value.ctypes.data
        words[i] = 0 if value is None else value
    return words


def _count_threads():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def _make_nodes(num_targets, size) -> dict[str, Any]:
    return dict(
        left=np.empty(size, np.int32),
        feature=np.empty(size, np.int32),
        threshold=np.empty(size, np.float32),
        missing_left=np.empty(size, np.bool_),
        value=np.empty((num_targets, size)),
        gain=np.empty(size),
        squared_error=np.empty(size),
        weight=np.empty(size),
        num_rows=np.empty(size, np.int32),
    )


@cache
def _find_cart():
    """Returns the C function; other threads of Python run while it does."""
    word = ctypes.c_int64
    arguments = [ctypes.POINTER(word)] * 3
    return ctypes.CFUNCTYPE(word, *arguments, word)(find_address("grow_cart"))
