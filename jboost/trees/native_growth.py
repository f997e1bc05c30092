# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level with the CPU kernels.

In: codes in two layouts, derivatives, limits. Out: the tree and each row's leaf, equal
bit for bit to those of plain XLA (:mod:`jboost.trees.plain_growth`). Each level takes
four kernel calls: sample features, find splits, split rows, sum the children. XLA
contributes only the loop around them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.codes.codes import Codes
from jboost.kernels import grow_cpu
from jboost.kernels.library import vary
from jboost.kernels.sampling_cpu import sample_features
from jboost.trees import paths
from jboost.trees.category_splits import count_words
from jboost.trees.levels import column_fractions, start_paths
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
    slots = min(2 ** (max_depth - 1), most)
    operands = codes.pack(num_bins).operands
    num_features = codes.num_features
    rows, unit = grow_cpu.start_rows(
        gradient, curvature, in_bag, seed, slots=slots, uniform=uniform
    )
    least = _kernel_limits(limits)
    categories = _kernel_categories(limits.categories)
    fractions = column_fractions(limits)
    sums = grow_cpu.sum_root(
        operands, rows, least.min_child_samples, num_bins=num_bins, uniform=uniform
    )

    def unfinished(carry):
        level, state, *_ = carry
        return (level < max_depth) & (state.position[0] >= 0)

    def grow_level(carry):
        level, state, path, index, sums = carry
        masks = sample_features(seed, level, fractions, slots, num_features)
        search = (sums, index, state.position, paths.allow(path, masks), unit)
        split = grow_cpu.find_splits(
            search, least, path.bounds, limits.values, categories
        )
        found = paths.keep_best(path, split.gain, split.found)
        split, position = split._replace(found=found), state.position
        state, parent, left_smaller = grow_cpu.split_rows(
            operands, level, split, state, max_depth=max_depth
        )
        path = paths.descend(
            path, level, position, split.feature, found, split.child_bounds,
            jnp.maximum(parent, 0), slots=slots, max_depth=max_depth,
        )  # fmt: skip
        if path.free is not None:  # without a free leaf the next sums are not needed
            parent = jnp.where(path.free > 0, parent, -1)
        index, sums = grow_cpu.sum_children(
            operands, state.rows, least.min_child_samples, parent, left_smaller,
            index, sums,
        )  # fmt: skip
        return level + 1, state, path, index, sums

    state = _start_state(rows, max_depth, num_bins, categories is not None)
    path = start_paths(limits, max_leaves, slots, max_depth)
    index = jnp.zeros(slots, jnp.int32)
    start = jax.tree.map(lambda a: vary(a, sums), (state, path, index))
    carry = (jnp.int32(0), *start, sums)
    _, state, path, _, _ = jax.lax.while_loop(unfinished, grow_level, carry)
    splits = (state.feature, state.threshold, state.missing_left)
    # The loop has written the leaves of the rows in the bag.
    leaf = grow_cpu.find_leaves(operands, *splits, in_bag, state.leaf, state.left_codes)
    tree = Tree(
        *splits,
        leaf_value=jnp.zeros(2**max_depth, jnp.float32),
        bounds=path.leaf_bounds,
        left_codes=state.left_codes,
    )
    return tree, leaf


def _start_state(rows, max_depth, num_bins, categorical):
    """Returns a tree without splits, and the root in slot 0."""
    num_rows, slots = rows.order.shape[0], rows.segments.shape[1]
    num_nodes, words = 2**max_depth - 1, count_words(num_bins)
    return grow_cpu.GrowState(
        *rows,
        feature=jnp.zeros(num_nodes, jnp.int32),
        threshold=jnp.full(num_nodes, num_bins - 1, jnp.int32),
        missing_left=jnp.ones(num_nodes, bool),
        position=jnp.full(slots, -1, jnp.int32).at[0].set(0),
        leaf=jnp.zeros(num_rows, jnp.int32),
        left_codes=jnp.zeros((num_nodes, words), jnp.uint32) if categorical else None,
    )


def _kernel_limits(limits):
    """Returns the limits as the kernels compare sums with them."""
    weight = jnp.float32(limits.min_child_weight) * jnp.float32(WEIGHT_SLACK)
    return grow_cpu.SplitLimits(
        l2=jnp.float32(limits.l2),
        min_gain=jnp.float32(limits.min_gain),
        min_child_weight=weight,
        min_child_samples=jnp.int32(limits.min_child_samples),
    )


def _kernel_categories(categories):
    """Returns the limits on category splits, likewise."""
    if categories is None:
        return None
    weight = jnp.float32(categories.min_weight) * jnp.float32(WEIGHT_SLACK)
    return categories._replace(min_weight=weight)
