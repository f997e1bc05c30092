# SPDX-License-Identifier: Apache-2.0
"""Grows one tree with the CPU kernel.

In: codes in two layouts, derivatives, limits. Out: the tree and each row's leaf, equal
bit for bit to those of plain XLA (:mod:`jboost.trees.plain_growth`). Where all rows are
on one device, one kernel call grows the whole tree: on small data, the calls and the
glue between them would take longer than the work. Where rows are divided among devices,
each one routes and sums its own rows, and a level's sums are exchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8, UInt32

from jboost.codes.codes import Codes
from jboost.entry import collectives
from jboost.kernels import grow_cpu, levels_cpu
from jboost.trees.levels import column_fractions
from jboost.trees.limits import TreeLimits
from jboost.trees.rounding import Measure, measure_rows
from jboost.trees.search_units import restore_bounds, to_search_units
from jboost.trees.splitting import WEIGHT_SLACK
from jboost.trees.tree import Tree


def grow_natively(
    codes: Codes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    measure: Measure | None = None,
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
    rows = gradient, curvature, in_bag, seed
    codes = codes.pack(num_bins)
    if collectives.current_shards() is None:
        found = _grow_here(codes, rows, limits, sizes)
    else:
        measure = measure or measure_rows(gradient, curvature, in_bag, uniform)
        found = _grow_in_shards(codes, rows, measure, limits, sizes)
    tree = Tree(
        found.feature,
        found.threshold,
        found.missing_left,
        leaf_value=jnp.zeros(2**max_depth, jnp.float32),
        bounds=found.bounds,
        left_codes=found.left_codes,
    )
    return tree, found.leaf


def _grow_here(codes, rows, limits, sizes):
    """Grows the tree by one call."""
    return grow_cpu.grow_tree(
        codes.operands,
        (*rows, column_fractions(limits)),
        kernel_limits(limits, codes.num_features),
        limits.values,
        limits.groups,
        kernel_categories(limits.categories),
        sizes=sizes,
    )


def _grow_in_shards(codes, rows, measure, limits, sizes):
    """Grows the tree by calls for each level, with sums over all shards in between."""
    gradient, curvature, in_bag, seed = rows
    operands, uniform = codes.operands, bool(sizes.uniform)
    assert not operands.entries, "sparse codes cannot be divided among devices"
    depths = dict(max_depth=sizes.max_depth)
    level_limits = make_level_limits(limits, codes.num_features, seed, measure.unit)
    part = levels_cpu.start_rows(
        gradient, curvature, in_bag, seed, measure.fixed.scale,
        measure.fixed.stochastic, collectives.first_row(),
        num_slots=sizes.num_slots, uniform=uniform,
    )  # fmt: skip
    shape = (2 if uniform else 3, codes.num_features, sizes.num_bins)
    state = jax.tree.map(
        lambda like: jnp.zeros(like.shape, like.dtype),
        levels_cpu.shape_state(
            level_limits, num_slots=sizes.num_slots, sums_shape=shape, **depths
        ),
    )
    greatest = squares = None
    if limits.categories is not None:
        found: Any = levels_cpu.find_greatest(part)
        greatest = collectives.most(found)
    leaf: Any = jnp.zeros_like(in_bag, jnp.int32)
    summed = jnp.zeros(1, jnp.int32)
    for level in range(sizes.max_depth):
        sums = jnp.zeros((*summed.shape, *shape), jnp.int32)
        sums = levels_cpu.sum_slots(
            operands.packed, part, level_limits.limits.num_features, summed, sums
        )
        if greatest is not None:
            slots = min(2**level, sizes.num_slots)
            squares = levels_cpu.sum_squares(part, greatest, num_slots=slots)
        sums, squares = _add_shards(summed[0] >= 0, sums, squares)
        state, splits, summed = levels_cpu.find_level(
            level_limits, sums, summed, squares, greatest, state,
            level=level, max_leaves=sizes.max_leaves, **depths,
        )  # fmt: skip
        part, leaf = levels_cpu.route_rows(
            operands.codes, splits, part, leaf, level=level, **depths
        )
    nodes = state.feature, state.threshold, state.missing_left
    leaf = grow_cpu.find_leaves(operands, *nodes, in_bag > 0, leaf, state.left_codes)
    bounds = restore_bounds(state.leaf_bounds, limits, measure.unit)
    return grow_cpu.GrownTree(*nodes, leaf, bounds, state.left_codes)


def _add_shards(needed, sums, squares):
    """Adds the sums of all shards, by one exchange; none if no node was summed."""
    if squares is None:
        return jax.lax.cond(needed, collectives.total, lambda sums: sums, sums), None
    whole = jnp.concatenate([sums.reshape(-1), squares.reshape(-1)])
    whole = jax.lax.cond(needed, collectives.total, lambda whole: whole, whole)
    return whole[: sums.size].reshape(sums.shape), whole[sums.size :].reshape(-1, 4)


def make_level_limits(limits, num_columns, seed, unit):
    """Returns the operands of the search for splits, besides sums.

    They are in the units of the search, and so are the bounds that it finds.
    """
    limits, unit = to_search_units(limits, unit)
    return levels_cpu.LevelLimits(
        seed=seed,
        fractions=column_fractions(limits),
        limits=kernel_limits(limits, num_columns),
        unit=unit,
        values=limits.values,
        groups=limits.groups,
        categories=kernel_categories(limits.categories),
    )


def kernel_limits(limits, num_columns):
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


def kernel_categories(categories):
    """Returns the limits on category splits, likewise."""
    if categories is None:
        return None
    weight = jnp.float32(categories.min_weight) * jnp.float32(WEIGHT_SLACK)
    return categories._replace(min_weight=weight)
