# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level on codes, and applies it.

In: codes, weighted gradient and curvature per row. Out: a Tree in heap order, and each
row's leaf. Node i has children 2i + 1 and 2i + 2; a node that is not split sends all
rows left, so that every path has max_depth steps and ends in one of 2^max_depth leaves:

    level 0            0                node position on level d: node - (2^d - 1)
    level 1        1       2            leaf = position on level max_depth
    level 2      3   4   5   6
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.codes.bins import MISSING
from jboost.codes.codes import Codes
from jboost.entry.collectives import count_rows
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose
from jboost.tables.categories import goes_left
from jboost.trees.limits import TreeLimits
from jboost.trees.native_growth import grow_natively
from jboost.trees.plain_growth import grow_plainly
from jboost.trees.rounding import Measure
from jboost.trees.tree import CATEGORICAL, Tree


def grow_levels(
    codes: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"] | UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    measure: Measure | None = None,
    *,
    max_depth: int,
    num_bins: int,
    max_nodes: int | None = None,
    max_leaves: int | None = None,
    uniform: bool = False,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the structure of one tree; its leaf values are zero.

    Chen and Guestrin 2016, algorithm 1 by levels, over bins. It does what
    :func:`jboost.parts.grow_tree` does, without checks.

    Args:
      codes: dense or sparse; packed where CPU kernels run, else they are packed here.
      gradient, curvature: of each row, times its weight, if ``in_bag`` does not say
        how many times it counts.
      in_bag: rows to learn from, or how many times each row counts; the others, which
        count 0 times, are only routed.
      seed: of column sampling and stochastic rounding.
      limits: numbers; may be traced.
      measure: how derivatives become integers, if that is known; the kernel that grows
        a tree on one device does without.
      max_depth: number of levels of splits.
      num_bins: number of codes.
      max_nodes: the most nodes a level can have, if known to be less than N: N over
        ``min_child_samples``.
      max_leaves: the most leaves: on each level the splits of the highest gain are
        made first, those of equal gain from left to right.
      uniform: all rows in the bag have the same curvature, so that counts of rows
        follow from it.

    Returns:
      The tree and the leaf of every row. Where leaf values are limited, the tree
      has the bounds of its leaves.
    """
    num_rows = count_rows(gradient.shape[0])
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    # A power of two, so that similar numbers of rows share compiled programs.
    most = 1 << (max(1, most) - 1).bit_length()
    sizes: Any = dict(
        max_depth=max_depth, num_bins=num_bins, most=most, max_leaves=max_leaves,
        uniform=uniform,
    )  # fmt: skip
    grow = choose(
        # A batch of trees is grown one by one: in lockstep their rows would be copied.
        cpu=sequential_vmap(partial(grow_natively, **sizes)),
        # Kernels compile nothing, and empty slots would cost time.
        cuda=partial(grow_plainly, **sizes, shared_levels=0),
        xla=partial(grow_plainly, **sizes),
    )
    in_bag = in_bag.astype(jnp.uint8)
    return grow(codes, gradient, curvature, in_bag, seed, limits, measure)


def find_leaves(tree: Tree, codes: Codes) -> Int32[Array, " N"]:
    """Finds the leaf of each row of codes."""
    if codes.operands.codes.dtype == jnp.uint32:  # no kernel takes codes that wide
        return _descend(tree, codes)
    find = choose(cpu=_find_leaves_natively, xla=_descend)
    return find(tree, codes)


def _find_leaves_natively(tree, codes):
    splits = (tree.feature, tree.threshold, tree.missing_left)
    skip, leaf = jnp.zeros(codes.num_rows, bool), jnp.zeros(codes.num_rows, jnp.int32)
    return grow_cpu.find_leaves(codes.operands, *splits, skip, leaf, tree.left_codes)


def _descend(tree, codes):
    def descend(_, node):
        code = codes.row_codes(tree.feature[node])
        threshold = tree.threshold[node]
        above = code > threshold
        if tree.left_codes is not None:
            left = goes_left(tree.left_codes[node], code)
            above = jnp.where(threshold == CATEGORICAL, ~left, above)
        right = jnp.where(code == MISSING, ~tree.missing_left[node], above)
        return 2 * node + 1 + right.astype(jnp.int32)

    start = jnp.zeros(codes.num_rows, jnp.int32)
    node = jax.lax.fori_loop(0, tree.max_depth, descend, start)
    return node - (2**tree.max_depth - 1)
