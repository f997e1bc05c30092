# SPDX-License-Identifier: Apache-2.0
"""Grows one tree with the CPU kernel.

In: codes in two layouts, derivatives, limits. Out: the tree and each row's leaf, equal
bit for bit to those of plain XLA (:mod:`jboost.trees.plain_growth`). One kernel call
grows the whole tree: on small data, the calls and the glue between them would take
longer than the work.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.codes.codes import Codes
from jboost.kernels import grow_cpu
from jboost.trees.levels import column_fractions
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import WEIGHT_SLACK
from jboost.trees.tree import Tree


def grow_natively(
    codes: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    *,
    max_depth: int,
    num_bins: int,
    most: int,
    max_leaves: int | None,
    uniform: bool,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the tree; see :func:`jboost.trees.growing.grow_levels`.

    ``most`` is the most nodes of a level.
    """
    sizes = grow_cpu.TreeSizes(
        max_depth=max_depth,
        max_leaves=max_leaves or 0,
        num_bins=num_bins,
        num_slots=min(2 ** (max_depth - 1), most),
        uniform=int(uniform),
    )
    found = grow_cpu.grow_tree(
        codes.pack(num_bins).operands,
        (gradient, curvature, in_bag, seed, column_fractions(limits)),
        _kernel_limits(limits, codes.num_features),
        limits.values,
        limits.groups,
        _kernel_categories(limits.categories),
        sizes=sizes,
    )
    tree = Tree(
        found.feature,
        found.threshold,
        found.missing_left,
        leaf_value=jnp.zeros(2**max_depth, jnp.float32),
        bounds=found.bounds,
        left_codes=found.left_codes,
    )
    return tree, found.leaf


def _kernel_limits(limits, num_columns):
    """Returns the limits as the kernel compares sums with them."""
    weight = jnp.float32(limits.min_child_weight) * jnp.float32(WEIGHT_SLACK)
    return grow_cpu.SplitLimits(
        l2=jnp.float32(limits.l2),
        min_gain=jnp.float32(limits.min_gain),
        min_child_weight=weight,
        min_child_samples=jnp.int32(limits.min_child_samples),
        num_features=jnp.int32(
            num_columns if limits.num_features is None else limits.num_features
        ),
    )


def _kernel_categories(categories):
    """Returns the limits on category splits, likewise."""
    if categories is None:
        return None
    weight = jnp.float32(categories.min_weight) * jnp.float32(WEIGHT_SLACK)
    return categories._replace(min_weight=weight)
