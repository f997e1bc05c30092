# SPDX-License-Identifier: Apache-2.0
"""Grows one tree level by level on sorted rows: any value may be a threshold.

In: codes by feature, one for every distinct value; the rows in order of each feature;
weighted gradient and curvature per row. Out: a Tree in heap order, and each row's
leaf.

Each feature's order is kept grouped by node, and sorted by code within a node, so
that missing rows (code 0) come first. The groups lie at the same places for every
feature, because they hold the same rows:

    positions   0 1 2 3 4 5 6 7 8 9
    level 0     [     node 0      ] rows out of the bag
    level 1     [ left ][  right  ] rows out of the bag

To split a node moves its rows to either side without changing their order: a running
sum and a scatter, no sort. The rows of a node that has stopped growing stay where
they are. A level costs O(F N), whatever the number of nodes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.codes.bins import MISSING
from jboost.codes.codes import Codes
from jboost.kernels import paths, xla
from jboost.kernels.paths import Paths
from jboost.trees.candidates import Segments, accumulate, find_bins
from jboost.trees.levels import (
    TreeLimits,
    count_sides,
    least_samples,
    lookup,
    make_leaf,
    make_rows,
    pair_children,
    pass_paths,
    route_rows,
    sample_features,
    settle_splits,
    start_paths,
    write_splits,
)
from jboost.trees.splitting import (
    WEIGHT_SLACK,
    Split,
    are_large_enough,
    cut_gain,
    is_worth,
    node_score,
)
from jboost.trees.tree import Tree

MOST_CODES = 2**31 - 1  # no table has one entry per code, so any number will do


class _Groups(NamedTuple):
    """Where the nodes of a level lie; slot M is nobody's."""

    slot: Int32[Array, " N"]  # of each position
    start: Int32[Array, " M"]
    size: Int32[Array, " M"]


class _Moves(NamedTuple):
    """How positions change from one level to the next."""

    right: Bool[Array, " N"]  # rows that go to the second part of their group
    stays: Bool[Array, " N"]  # positions
    before: Int32[Array, " N"]  # rows that go right from groups before this position's
    second: Int32[Array, " N"]  # where the second part of this position's group starts


class _Level(NamedTuple):
    """What is carried from level to level; M slots hold the nodes still growing."""

    order: Int32[Array, "F N"]
    moves: _Moves  # still to be made in ``order``
    groups: _Groups  # after them
    position: Int32[Array, " M"]  # of the slot's node on its level; -1: slot is empty
    row_slot: Int32[Array, " N"]
    row_position: Int32[Array, " N"]
    tree: Tree
    paths: Paths


class _Best(NamedTuple):
    """The best cut after each position, over the features looked at."""

    gain: Float[Array, " N"]
    feature: Int32[Array, " N"]
    missing_left: Bool[Array, " N"]


class _Nodes(NamedTuple):
    """What each position knows of its node, the same for all features."""

    live: Bool[Array, " N"]
    last: Bool[Array, " N"]  # the next position belongs to another node
    total: Int32[Array, "C N"]  # sums, and last the number of rows
    below: Int32[Array, "C N"]  # the same of all live positions before the node
    rank: Int32[Array, " N"]  # number of live positions up to this one


def grow_sorted_tree(
    columns: Codes,
    order: Int32[Array, "F N"],
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    in_bag: Bool[Array, " N"],
    words: UInt32[Array, "2"],
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

    Args:
      columns: codes, one row per feature.
      order: from :func:`jboost.trees.candidates.sort_rows`.
      gradient, curvature: of each row, times its weight.
      in_bag: rows to learn from; the others are only routed.
      words: seed of column sampling and stochastic rounding.
      limits: numbers; may be traced. ``max_bins`` is that of each node. Leaf values
        must not be limited.
      mass: what each row counts in a node's quantiles, from
        :func:`jboost.trees.candidates.measure`; None for every value.
      max_depth: number of levels of splits.
      max_nodes, max_leaves: as for :func:`jboost.parts.grow_tree`.
      uniform: all rows in the bag have the same curvature.

    Returns:
      The tree and the leaf of every row.
    """
    num_rows = columns.shape[1]
    most = min(max_nodes or num_rows, max_leaves or num_rows, num_rows)
    most = 1 << (max(1, most) - 1).bit_length()
    slots = min(2 ** (max_depth - 1), most)

    def grow(columns, order, gradient, curvature, in_bag, words, limits, mass):
        rows = make_rows(columns, gradient, curvature, in_bag, words, uniform)
        path = start_paths(limits, max_leaves, slots, max_depth)
        state = _make_root(order, rows, max_depth, slots, path)

        def grows_on(carry):
            level, state = carry
            return (level < max_depth) & jnp.any(state.position >= 0)

        def grow_level(carry):
            level, state = carry
            order, split = _find_splits(level, state, rows, words, limits, mass)
            state = _split_nodes(level, state, order, split, rows, max_depth)
            return level + 1, state

        level, state = jax.lax.while_loop(grows_on, grow_level, (jnp.int32(0), state))
        # Where no node grew on, every row goes left down to its leaf.
        return state.tree, state.row_position << (max_depth - level)

    # A batch of trees is grown one by one: in lockstep their rows would be copied.
    return sequential_vmap(grow)(
        columns, order, gradient, curvature, in_bag, words, limits, mass
    )


def _make_root(order, rows, max_depth, slots, path):
    """The first level: rows in the bag in slot 0; the others are to leave it."""
    num_rows = order.shape[1]
    where = jnp.arange(num_rows, dtype=jnp.int32)
    nobody, size = jnp.zeros(num_rows, jnp.int32), rows.num_in_bag.astype(jnp.int32)
    inside = where < size
    second = jnp.broadcast_to(size, num_rows)
    moves = _Moves(~rows.in_bag, jnp.zeros(num_rows, bool), nobody, second)
    first = jnp.zeros(slots, jnp.int32)
    groups = _Groups(jnp.where(inside, 0, slots), first, first.at[0].set(size))
    position = jnp.full(slots, -1, jnp.int32).at[0].set(0)
    tree = make_leaf(max_depth, MOST_CODES)
    return _Level(order, moves, groups, position, nobody, nobody, tree, path)


def _find_splits(level, state, rows, words, limits, mass):
    """Makes the moves that are due, and finds the best split of each slot."""
    num_features, num_rows = state.order.shape
    slots = state.position.shape[0]
    masks = sample_features(words, level, slots, num_features, limits)
    masks = jnp.pad(paths.allow(state.paths, masks).T, ((0, 0), (0, 1)))
    channels = _live_channels(state, rows, mass)
    nodes = _describe(state, channels)
    least = (
        jnp.float32(limits.min_child_weight) * jnp.float32(WEIGHT_SLACK),
        least_samples(limits, rows.num_in_bag),
    )

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
            best, feature, allowed, sweep, nodes, rows, limits.l2, least
        ), order

    nothing = _Best(
        gain=jnp.full(num_rows, -jnp.inf, jnp.float32),
        feature=jnp.zeros(num_rows, jnp.int32),
        missing_left=jnp.zeros(num_rows, bool),
    )
    every = jnp.arange(num_features, dtype=jnp.int32)
    inputs = (every, rows.columns, state.order, masks)
    best, order = jax.lax.scan(visit, nothing, inputs)
    return order, _choose(best, order, state, nodes, rows, limits)


def _live_channels(state, rows, mass):
    """Gradient, curvature, mass if there is one, and 1; 0 where nothing grows."""
    slots = state.position.shape[0]
    live = rows.in_bag & (state.row_slot < slots)
    parts = [rows.channels[:, 0], rows.channels[:, 1]]
    parts += [] if mass is None else [mass]
    parts += [jnp.ones_like(state.row_slot)]
    return jnp.where(live[:, None], jnp.stack(parts, axis=1), 0)


def _describe(state, channels):
    """Sums of the nodes, laid out by position."""
    slots, slot = state.position.shape[0], state.groups.slot
    totals = xla.segment_sum(channels, state.row_slot, slots + 1)
    below = jnp.cumsum(totals, axis=0) - totals  # slots are in the order of positions
    live = slot < slots
    return _Nodes(
        live=live,
        last=jnp.append(slot[1:] != slot[:-1], True),
        total=totals[slot].T,
        below=below[slot].T,
        rank=accumulate(live.astype(jnp.int32)[:, None])[:, 0],
    )


def _move(order, moves):
    """Rows of each group that go left, then those that go right, in their order."""
    right = moves.right[order]
    passed = accumulate(right.astype(jnp.int32)[:, None])[:, 0] - moves.before
    here = jnp.arange(order.shape[0], dtype=jnp.int32)
    place = jnp.where(right, moves.second + passed - 1, here - passed)
    place = jnp.where(moves.stays, here, place)
    return (
        jnp.zeros_like(order)
        .at[place]
        .set(order, mode="promise_in_bounds", unique_indices=True)
    )


class _Sweep(NamedTuple):
    """One feature, position by position."""

    code: Int32[Array, " N"]
    following: Int32[Array, " N"]  # the next position's code
    running: Int32[Array, "C N"]  # sums up to here, of all nodes
    missing: Int32[Array, "C N"]  # sums of the node's missing rows


def _sweep(code, channels, nodes, state):
    # Rows are counted alike for every feature.
    running = jnp.concatenate([accumulate(channels).T, nodes.rank[None, :]])
    start, size = state.groups.start, state.groups.size

    def sum_missing():
        """They come first in each group: so many of them, and the sums until there."""
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
    """Whether the node's quantiles allow to cut after each position."""
    below = nodes.below[-2] + sweep.missing[-2]
    total = nodes.total[-2] - sweep.missing[-2]
    segments = Segments(sweep.code, nodes.last, below, total)
    num_bins = jnp.asarray(limits.max_bins, jnp.int32) - 1
    found = find_bins(segments, mass, sweep.running[-2], num_bins)
    # Missing values may always be split from all others.
    apart = nodes.last | (sweep.code == MISSING)
    return apart | (found != jnp.append(found[1:], found[:1]))


def _try_cuts(best, feature, allowed, sweep, nodes, rows, l2, least):
    """The better of the best cuts so far and this feature's, at every position."""
    counted = rows.channels.shape[1] == 3
    pick = jnp.array([0, 1, -1] if counted else [0, 1])
    left, total, missing = (
        sums[pick] for sums in (sweep.running - nodes.below, nodes.total, sweep.missing)
    )
    parent = node_score(total, rows.unit, l2)

    def take(best, left, allowed, missing_left):
        right = total - left
        gain = cut_gain(parent, rows.unit, l2, left, right)
        admissible = allowed & are_large_enough(left, right, rows.unit, least)
        # Features come in ascending order: the lowest of equal gain is kept.
        better = admissible & (gain > best.gain)
        return _Best(
            gain=jnp.where(better, gain, best.gain),
            feature=jnp.where(better, feature, best.feature),
            missing_left=jnp.where(better, missing_left, best.missing_left),
        )

    present = sweep.code != MISSING
    best = take(best, left - missing, allowed & present, False)
    # After the missing rows, threshold 1 leaves all values right unless some have
    # code 1: that split then is tried as "all values left, missing right".
    known = present | (sweep.following > 1)
    return jax.lax.cond(
        jnp.all(present),
        lambda best: best,
        lambda best: take(best, left, allowed & known, True),
        best,
    )


def _choose(best, order, state, nodes, rows, limits):
    """The best split of each slot; none for empty slots.

    Equal gains go to the lowest feature, then the lowest threshold, which is the
    first position.
    """
    slots, slot = state.position.shape[0], state.groups.slot
    num_rows = slot.shape[0]
    here = jnp.arange(num_rows, dtype=jnp.int32)
    gain = jax.ops.segment_max(best.gain, slot, slots + 1)
    tied = best.gain == gain[slot]
    features = jnp.where(tied, best.feature, rows.columns.shape[0])
    feature = jax.ops.segment_min(features, slot, slots + 1)
    places = jnp.where(tied & (features == feature[slot]), here, num_rows)
    place = jax.ops.segment_min(places, slot, slots + 1)[:slots]
    place = jnp.minimum(place, num_rows - 1)
    gain, feature = gain[:slots], best.feature[place]
    codes = rows.columns[feature, order[feature, place]].astype(jnp.int32)
    total = nodes.total[:2, state.groups.start]
    parent = node_score(total, rows.unit, limits.l2)
    found = is_worth(gain, parent, limits.min_gain) & (state.position >= 0)
    return Split(
        feature=feature,
        threshold=jnp.maximum(codes, 1),
        missing_left=best.missing_left[place],
        gain=gain - limits.min_gain,
        found=paths.keep_best(state.paths, gain - limits.min_gain, found),
    )


def _split_nodes(level, state, order, split, rows, max_depth):
    """Writes the splits down, and says which rows are to move."""
    slots, (slot, start, size) = state.position.shape[0], state.groups
    count = count_sides(rows.columns, split, state.row_slot, rows.in_bag)
    split, _ = settle_splits(split, count, MOST_CODES)
    source, pair, position = pair_children(state.position, split, slots)
    moved = route_rows(
        rows.columns, split, pair, state.row_slot, state.row_position, slots
    )
    moving = rows.in_bag & (moved.right == 1) & (state.row_slot < slots)
    num_right = jnp.zeros(slots + 1, jnp.int32).at[state.row_slot]
    num_right = num_right.add(moving.astype(jnp.int32))[:slots]
    second = start + size - num_right
    moves = _Moves(
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
    return _Level(
        order=order,
        moves=moves,
        groups=_Groups(
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
