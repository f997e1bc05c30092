# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level on sorted rows: any value may be a threshold.

There is a code for every distinct value. Each feature's order is grouped by node, at
the same positions for all features, and sorted by code within a node, missing rows
(code 0) first. Splitting a node moves its rows by a running sum and a scatter, without
a sort; a level takes O(F N). The CPU kernel (native/sorted.h) gives the same bits.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.codes.bins import MISSING
from jboost.codes.codes import DenseCodes
from jboost.kernels import grow_cpu, xla
from jboost.kernels.library import choose
from jboost.numerics.exact import sum_by_group
from jboost.trees import paths
from jboost.trees.candidates import Segments, accumulate, find_bins
from jboost.trees.grow import kernel_limits
from jboost.trees.levels import (
    SideCounts,
    column_fractions,
    least_samples,
    lookup,
    make_leaf,
    pair_children,
    pass_paths,
    route_rows,
    sample_features,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.trees.limits import TreeLimits, restore_bounds, to_search_units
from jboost.trees.paths import Paths
from jboost.trees.rounding import make_rows
from jboost.trees.splitting import (
    Split,
    are_large_enough,
    bound_children,
    child_limits,
    cut_gain,
    is_worth,
    limited_gain,
    limited_score,
    node_score,
)
from jboost.trees.tree import Tree

MOST_CODES = 2**31 - 1  # no table has one entry per code, so any number will do


class SortedGroups(NamedTuple):
    """The positions of a level's nodes; slot M holds no node."""

    slot: Int32[Array, " N"]  # the slot of each position
    start: Int32[Array, " M"]
    size: Int32[Array, " M"]


class RowMoves(NamedTuple):
    """The moves of rows to new positions, from one level to the next."""

    right: Bool[Array, " N"]  # rows that go to the second part of their group
    stays: Bool[Array, " N"]  # positions outside all groups, where no row moves
    before: Int32[Array, " N"]  # rows that go right from groups before this position's
    second: Int32[Array, " N"]  # where the second part of this position's group starts


class SortedLevel(NamedTuple):
    """The state carried from level to level; M slots hold the nodes still growing."""

    order: Int32[Array, "F N"]
    moves: RowMoves  # still to be made in ``order``
    groups: SortedGroups  # the groups after these moves
    position: Int32[Array, " M"]  # the place of the slot's node on its level; -1: none
    row_slot: Int32[Array, " N"]
    row_position: Int32[Array, " N"]
    tree: Tree
    paths: Paths


class _Best(NamedTuple):
    """The best cut after each position, over the features seen so far.

    The last two exist only if leaf values are limited: the sums of the left side, and
    whether only missing values go right, whatever values other rows have.
    """

    gain: Float[Array, " N"]
    feature: Int32[Array, " N"]
    missing_left: Bool[Array, " N"]
    left: Int32[Array, "2 N"] | None
    apart: Bool[Array, " N"] | None


class _NodeSums(NamedTuple):
    """The sums of each position's node, the same for all features."""

    live: Bool[Array, " N"]
    last: Bool[Array, " N"]  # the next position belongs to another node
    total: Int32[Array, "C N"]  # the last channel is the number of rows
    below: Int32[Array, "C N"]  # sums of all live positions before the node
    rank: Int32[Array, " N"]  # number of live positions up to this one
    bounds: Float[Array, "2 N"] | None  # bounds of leaf values


def find_sorted_splits(level, state, rows, seed, limits, mass):
    """Makes the pending moves, and finds the best split of each slot."""
    num_features, num_rows = state.order.shape
    slots = state.position.shape[0]
    masks = sample_features(seed, level, slots, num_features, limits)
    masks = jnp.pad(paths.allow(state.paths, masks).T, ((0, 0), (0, 1)))
    channels = _live_channels(state, rows, mass)
    nodes = _describe(state, channels)
    fewest = least_samples(limits, rows.num_in_bag)
    least = child_limits(limits.min_child_weight, fewest)

    def visit(best, one):
        feature, codes, order, mask = one
        order = _move(order, state.moves)
        summed = channels[order, :-1]
        sweep = _sweep(codes[order].astype(jnp.int32), summed, nodes, state)
        allowed = nodes.live & mask[state.groups.slot]
        allowed &= nodes.last | (sweep.code != sweep.following)
        if mass is not None:
            allowed &= _is_candidate(sweep, summed[:, -1], nodes, limits)
        return _try_cuts(
            best, feature, allowed, sweep, nodes, rows, limits, least
        ), order

    limited = limits.values is not None
    nothing = _Best(
        gain=jnp.full(num_rows, -jnp.inf, jnp.float32),
        feature=jnp.zeros(num_rows, jnp.int32),
        missing_left=jnp.zeros(num_rows, bool),
        left=jnp.zeros((2, num_rows), jnp.int32) if limited else None,
        apart=jnp.zeros(num_rows, bool) if limited else None,
    )
    every = jnp.arange(num_features, dtype=jnp.int32)
    inputs = (every, rows.codes.columns, state.order, masks)
    best, order = jax.lax.scan(visit, nothing, inputs)
    return order, _choose(best, order, state, nodes, rows, limits)


def _live_channels(state, rows, mass):
    """Returns gradient, curvature, mass if given, and 1; 0 where nothing grows."""
    slots = state.position.shape[0]
    live = rows.in_bag & (state.row_slot < slots)
    parts = [rows.channels[:, 0], rows.channels[:, 1]]
    parts += [] if mass is None else [mass]
    parts += [jnp.ones_like(state.row_slot)]
    return jnp.where(live[:, None], jnp.stack(parts, axis=1), 0)


def _describe(state, channels):
    """Returns the sums of the nodes, laid out by position."""
    slots, slot = state.position.shape[0], state.groups.slot
    totals = xla.segment_sum(channels, state.row_slot, slots + 1)
    below = jnp.cumsum(totals, axis=0) - totals  # slots are in the order of positions
    live = slot < slots
    bounds = state.paths.bounds
    return _NodeSums(
        live=live,
        last=jnp.append(slot[1:] != slot[:-1], True),
        total=totals[slot].T,
        below=below[slot].T,
        rank=accumulate(live.astype(jnp.int32)[:, None])[:, 0],
        bounds=None if bounds is None else jnp.pad(bounds, ((0, 1), (0, 0)))[slot].T,
    )


def _move(order, moves):
    """Moves the rows that go right behind those that go left, group by group."""
    right = moves.right[order]
    passed = accumulate(right.astype(jnp.int32)[:, None])[:, 0] - moves.before
    here = jnp.arange(order.shape[0], dtype=jnp.int32)
    index = jnp.where(right, moves.second + passed - 1, here - passed)
    index = jnp.where(moves.stays, here, index)
    return (
        jnp.zeros_like(order)
        .at[index]
        .set(order, mode="promise_in_bounds", unique_indices=True)
    )


class _Sweep(NamedTuple):
    """One feature, position by position."""

    code: Int32[Array, " N"]
    following: Int32[Array, " N"]  # the next position's code
    running: Int32[Array, "C N"]  # sums up to here, of all nodes
    missing: Int32[Array, "C N"]  # sums of the node's missing rows


def _sweep(code, channels, nodes, state):
    # The row counts are the same for every feature.
    running = jnp.concatenate([accumulate(channels).T, nodes.rank[None, :]])
    start, size = state.groups.start, state.groups.size

    def sum_missing():
        """Sums the missing rows, which come first in each group."""
        absent = code == MISSING
        seen = accumulate(absent.astype(jnp.int32)[:, None])[:, 0]
        end = jnp.maximum(start + size - 1, 0)
        number = seen[end] - seen[start] + absent[start].astype(jnp.int32)
        until = running[:, jnp.maximum(start + number - 1, 0)]
        until = until - nodes.below[:, start]
        until = jnp.where((size > 0) & (number > 0), until, 0)
        return jnp.pad(until, ((0, 0), (0, 1)))[:, state.groups.slot]

    missing = jax.lax.cond(
        jnp.any(code == MISSING), sum_missing, lambda: jnp.zeros_like(running)
    )
    return _Sweep(code, jnp.append(code[1:], code[:1]), running, missing)


def _is_candidate(sweep, mass, nodes, limits):
    """Returns whether the node's quantiles allow a cut after each position."""
    below = nodes.below[-2] + sweep.missing[-2]
    total = nodes.total[-2] - sweep.missing[-2]
    segments = Segments(sweep.code, nodes.last, below, total)
    num_bins = jnp.asarray(limits.max_bins, jnp.int32) - 1
    found = find_bins(segments, mass, sweep.running[-2], num_bins)
    # Missing values may always be split from all others.
    apart = nodes.last | (sweep.code == MISSING)
    return apart | (found != jnp.append(found[1:], found[:1]))


def _try_cuts(best, feature, allowed, sweep, nodes, rows, limits, least):
    """Keeps the better of the best cut so far and this feature's, per position."""
    counted = rows.channels.shape[1] == 3
    pick = jnp.array([0, 1, -1] if counted else [0, 1])
    left, total, missing = (
        sums[pick] for sums in (sweep.running - nodes.below, nodes.total, sweep.missing)
    )
    values, sign = limits.values, jnp.int32(0)
    if values is None:
        parent = node_score(total, rows.unit, limits.l2)
    else:
        values, sign = values._replace(bounds=nodes.bounds), values.monotone[feature]
        parent = limited_score(total, rows.unit, limits.l2, values)[0]

    def take(best, left, allowed, missing_left, sign, apart=False):
        right = total - left
        if values is None:
            gain = cut_gain(parent, rows.unit, limits.l2, left, right)
        else:
            gain = limited_gain(parent, rows.unit, limits.l2, values, sign, left, right)
        admissible = allowed & are_large_enough(left, right, rows.unit, least)
        # Features come in ascending order: the lowest of equal gain is kept.
        better = admissible & (gain > best.gain)
        new = _Best(
            gain,
            feature,
            jnp.asarray(missing_left),
            None if values is None else left[:2],
            None if values is None else jnp.asarray(apart),
        )
        return jax.tree.map(
            lambda new, old: jnp.where(jnp.broadcast_to(better, old.shape), new, old),
            new,
            best,
        )

    present = sweep.code != MISSING
    best = take(best, left - missing, allowed & present, False, sign)
    # After the missing rows, threshold 1 leaves all values right unless some have
    # code 1: that split then is tried as "all values left, missing right".
    known = present | (sweep.following > 1)
    best = jax.lax.cond(
        jnp.all(present),
        lambda best: best,
        lambda best: take(best, left, allowed & known, True, sign),
        best,
    )
    if values is None:
        return best
    # If all values go left, monotone signs do not apply: missing values have no order.
    ends = allowed & present & nodes.last
    return take(best, left - missing, ends, False, jnp.int32(0), apart=True)


def _choose(best, order, state, nodes, rows, limits):
    """Chooses the best split of each slot; none for empty slots.

    Equal gains go to the lowest feature, then the lowest threshold, which is the
    first position.
    """
    slots, slot = state.position.shape[0], state.groups.slot
    num_rows = slot.shape[0]
    here = jnp.arange(num_rows, dtype=jnp.int32)
    gain = jax.ops.segment_max(best.gain, slot, slots + 1)
    tied = best.gain == gain[slot]
    features = jnp.where(tied, best.feature, rows.codes.columns.shape[0])
    feature = jax.ops.segment_min(features, slot, slots + 1)
    indices = jnp.where(tied & (features == feature[slot]), here, num_rows)
    index = jax.ops.segment_min(indices, slot, slots + 1)[:slots]
    index = jnp.minimum(index, num_rows - 1)
    gain, feature = gain[:slots], best.feature[index]
    codes = rows.codes.columns[feature, order[feature, index]].astype(jnp.int32)
    threshold = jnp.maximum(codes, 1)
    total = nodes.total[:2, state.groups.start]
    if limits.values is None:
        size, child_bounds = node_score(total, rows.unit, limits.l2), None
    else:
        apart, cut = best.apart[index], best.left[:, index]
        threshold = jnp.where(apart, MOST_CODES - 1, threshold)
        values = limits.values._replace(bounds=state.paths.bounds)
        per_node = values._replace(bounds=values.bounds.T)
        size = limited_score(total, rows.unit, limits.l2, per_node)[2]
        axes = (1, 1, None, None, values._replace(l1=None, bounds=0, monotone=None))
        child_bounds = jax.vmap(bound_children, (*axes, 0, 0))(
            cut, total, rows.unit, limits.l2, values, feature, apart
        )
    found = is_worth(gain, size, limits.min_gain) & (state.position >= 0)
    return Split(
        feature=feature,
        threshold=threshold,
        missing_left=best.missing_left[index],
        gain=gain - limits.min_gain,
        found=paths.keep_best(state.paths, gain - limits.min_gain, found),
        child_bounds=child_bounds,
    )


def grow_sorted_tree(
    codes: DenseCodes,
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"] | UInt8[Array, " N"],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    mass: Int32[Array, " N"] | None = None,
    *,
    max_depth: int,
    max_nodes: int | None = None,
    max_leaves: int | None = None,
    uniform: bool = False,
) -> tuple[Tree, Int32[Array, " N"]]:
    """Grows the structure of one tree; its leaf values are zero.

    Without ``mass`` every distinct value of a node's rows is tried: Chen and Guestrin
    2016, algorithm 1. With it, candidates are proposed for each node from its own
    rows ("local", algorithm 2); see :func:`jboost.trees.candidates.find_bins`.

    Sums are those of :func:`jboost.parts.grow_tree`, integers, and so are gains and the
    rule for ties. A threshold is the code of the highest value on its left among the
    node's rows. So where each code is a bin of its own, both grow the same tree.

    The codes need ``order``, and ``limits.max_bins`` is that of each node. ``mass`` is
    the weight of each row in a node's quantiles, from
    :func:`jboost.trees.candidates.measure`. The other arguments are those of
    :func:`jboost.trees.grow.grow_levels`.
    """
    num_rows = codes.num_rows
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    most = 1 << (max(1, most) - 1).bit_length()
    sizes: Any = dict(
        max_depth=max_depth, slots=min(2 ** (max_depth - 1), most),
        max_leaves=max_leaves, uniform=uniform,
    )  # fmt: skip
    # A batch of trees is grown one by one: in lockstep their rows would be copied.
    grow = choose(
        cpu=sequential_vmap(partial(_grow_natively, **sizes)),
        xla=sequential_vmap(partial(_grow_plainly, **sizes)),
    )
    rows = (gradient, curvature, in_bag.astype(jnp.uint8))
    return grow(codes, *rows, seed, limits, mass)


def _grow_natively(
    codes, gradient, curvature, in_bag, seed, limits, mass, *, max_depth, slots,
    max_leaves, uniform,
):  # fmt: skip
    bins = mass
    if mass is not None:
        bins = mass, jnp.asarray(limits.max_bins, jnp.int32) - 1
    found = grow_cpu.grow_sorted_tree(
        (codes.columns, codes.order),
        (gradient, curvature, in_bag, seed, column_fractions(limits)),
        kernel_limits(limits._replace(num_features=None), codes.num_features),
        limits.values,
        limits.groups,
        bins,
        sizes=grow_cpu.SortedSizes(max_depth, max_leaves or 0, slots, int(uniform)),
    )
    nodes = found.feature, found.threshold, found.missing_left
    leaf_value = jnp.zeros(2**max_depth, jnp.float32)
    return Tree(*nodes, leaf_value=leaf_value, bounds=found.bounds), found.leaf


def _grow_plainly(
    codes, gradient, curvature, in_bag, seed, limits, mass, *, max_depth, slots,
    max_leaves, uniform,
):  # fmt: skip
    rows = make_rows(codes, gradient, curvature, in_bag, seed, uniform)
    given, given_unit = limits, rows.unit
    limits, unit = to_search_units(given, given_unit)
    rows = rows._replace(unit=unit)
    path = start_paths(limits, max_leaves, slots, max_depth)
    state = _make_root(codes.order, rows, max_depth, slots, path)

    def grows_on(carry):
        level, state = carry
        return (level < max_depth) & jnp.any(state.position >= 0)

    def grow_level(carry):
        level, state = carry
        order, split = find_sorted_splits(level, state, rows, seed, limits, mass)
        state = _split_nodes(level, state, order, split, rows, max_depth)
        return level + 1, state

    level, state = jax.lax.while_loop(grows_on, grow_level, (jnp.int32(0), state))
    bounds = restore_bounds(state.paths.leaf_bounds, given, given_unit)
    tree = state.tree._replace(bounds=bounds)
    # Below the last level that grew, every row goes left down to its leaf.
    return tree, state.row_position << (max_depth - level)


def _make_root(order, rows, max_depth, slots, path):
    """Returns the first level: rows in the bag in slot 0, the others outside."""
    num_rows = order.shape[1]
    where = jnp.arange(num_rows, dtype=jnp.int32)
    nobody, size = jnp.zeros(num_rows, jnp.int32), rows.num_in_bag.astype(jnp.int32)
    inside = where < size
    second = jnp.broadcast_to(size, num_rows)
    moves = RowMoves(~rows.in_bag, jnp.zeros(num_rows, bool), nobody, second)
    first = jnp.zeros(slots, jnp.int32)
    groups = SortedGroups(jnp.where(inside, 0, slots), first, first.at[0].set(size))
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    tree = make_leaf(max_depth, MOST_CODES)
    return SortedLevel(order, moves, groups, position, nobody, nobody, tree, path)


def _count_sides(rows, split, row_slot):
    """Computes :func:`jboost.trees.levels.count_sides` from the rows."""
    slots = split.feature.shape[0]
    code = rows.codes.row_codes(lookup(split.feature, row_slot, 0))
    above = code > lookup(split.threshold, row_slot, 0)
    side = jnp.where(code == MISSING, 2, above.astype(jnp.int32))
    group = jnp.where(rows.in_bag & (row_slot < slots), 3 * row_slot + side, 3 * slots)
    ones = jnp.ones(row_slot.shape[0], jnp.int32)
    return SideCounts(*sum_by_group(ones, group, 3 * slots).reshape(slots, 3).T)


def _split_nodes(level, state, order, split, rows, max_depth):
    """Records the splits, and determines which rows move."""
    slots, (slot, start, size) = state.position.shape[0], state.groups
    count = _count_sides(rows, split, state.row_slot)
    split, left_smaller, _ = settle_splits(split, count, MOST_CODES)
    source, _, pair, position = pair_children(state.position, split, slots)
    moved = route_rows(
        rows.codes, split, pair, left_smaller, rows.in_bag, state.row_slot,
        state.row_position, slots=slots,
    )  # fmt: skip
    right = (moved.position & 1) == 1
    moving = rows.in_bag & right & (state.row_slot < slots)
    num_right = jnp.zeros(slots + 1, jnp.int32).at[state.row_slot]
    num_right = num_right.add(moving.astype(jnp.int32))[:slots]
    second = start + size - num_right
    moves = RowMoves(
        right=moving,
        stays=slot == slots,
        before=lookup(jnp.cumsum(num_right) - num_right, slot, 0),
        second=lookup(second, slot, 0),
    )
    here = jnp.arange(slot.shape[0], dtype=jnp.int32)
    child = 2 * lookup(pair, slot, slots) + (here >= moves.second).astype(jnp.int32)
    starts = jnp.stack([start[source], second[source]], axis=1).reshape(-1)[:slots]
    sizes = size[source] - num_right[source], num_right[source]
    sizes = jnp.stack(sizes, axis=1).reshape(-1)[:slots]
    used = position >= 0
    return SortedLevel(
        order=order,
        moves=moves,
        groups=SortedGroups(
            slot=jnp.minimum(child, slots),
            start=jnp.where(used, starts, 0),
            size=jnp.where(used, sizes, 0),
        ),
        position=position,
        row_slot=moved.slot,
        row_position=moved.position,
        tree=write_splits(level, state.position, state.tree, split),
        paths=pass_paths(
            state.paths, level, state.position, split, source, slots, max_depth
        ),
    )
