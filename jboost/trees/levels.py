# SPDX-License-Identifier: Apache-2.0
"""The steps of one level, shared by the ways to grow a tree.

M slots hold the nodes of a level that are still growing; rows in a node that has
stopped have slot M.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from jboost.codes.bins import MISSING
from jboost.codes.codes import Codes
from jboost.kernels import levels_cuda
from jboost.kernels.library import choose
from jboost.numerics.random import derive_seeds, sample_in_xla
from jboost.tables.categories import goes_left
from jboost.trees import paths
from jboost.trees.category_splits import (
    BestSet,
    choose_split,
    count_words,
    find_mixed_split,
    mark_ordered,
    unpack_bits,
)
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import (
    Draw,
    Split,
    bound_children,
    child_limits,
    is_worth,
    search_split,
)
from jboost.trees.tree import CATEGORICAL, Tree


def make_leaf(max_depth: int, num_bins: int, categorical: bool = False) -> Tree:
    """Returns a tree without a split."""
    num_nodes, words = 2**max_depth - 1, count_words(num_bins)
    return Tree(
        feature=jnp.zeros(num_nodes, jnp.int32),
        threshold=jnp.full(num_nodes, num_bins - 1, jnp.int32),
        missing_left=jnp.ones(num_nodes, bool),
        leaf_value=jnp.zeros(num_nodes + 1, jnp.float32),
        left_codes=jnp.zeros((num_nodes, words), jnp.uint32) if categorical else None,
    )


def start_paths(
    limits: TreeLimits, max_leaves: int | None, slots: int, max_depth: int
) -> paths.Paths:
    """Returns the constraints that the root passes to its children."""
    bounds = None if limits.values is None else limits.values.bounds
    return paths.start(
        bounds, limits.groups, max_leaves, slots=slots, max_depth=max_depth
    )


def find_splits(
    level: Int32[Array, ""] | int,
    histogram: Int32[Array, "M F B C"],
    position: Int32[Array, " M"],
    path: paths.Paths,
    unit: Float[Array, "2"],
    num_in_bag: Int32[Array, ""],
    seed: UInt32[Array, "2"],
    limits: TreeLimits,
    *,
    squares: Float[Array, " M"] | None = None,
) -> Split:
    """Finds the best split of each slot; none for empty slots.

    ``squares``: sums of squares of the gradient's integers, where there are categories.
    """
    slots = position.shape[0]
    level = jnp.asarray(level, jnp.int32)
    masks = sample_features(seed, level, slots, histogram.shape[1], limits)
    masks = paths.allow(path, masks)
    least = least_samples(limits, num_in_bag)
    per = limits.rows_per_threshold

    def find(histogram, mask, bounds, squares, seed):
        values = limits.values
        if values is not None:
            values = values._replace(bounds=bounds)
        search: Any = search_split
        if limits.categories is not None:
            search = partial(
                find_mixed_split, categories=limits.categories, squares=squares
            )
        return search(
            histogram,
            unit,
            mask,
            l2=limits.l2,
            min_gain=limits.min_gain,
            min_child_weight=limits.min_child_weight,
            min_child_samples=least,
            values=values,
            draw=None if per is None else Draw(jnp.asarray(per, jnp.int32), seed),
        )

    def search_plainly(histogram, unit, masks, limits, least, draws, bounds):
        del unit, limits, least
        seed, level = draws
        # Negative, because sample_features derives seeds from numbers >= 0.
        slot = jnp.arange(slots, dtype=jnp.int32)
        seeds = derive_seeds(seed, -(2**level + slot))
        return jax.vmap(find)(histogram, masks, bounds, squares, seeds)

    on_gpu = None
    if limits.categories is None or levels_cuda.takes_categories(histogram.shape[2]):
        on_gpu = partial(_search_on_gpu, squares)
    run = choose(xla=search_plainly, cuda=on_gpu)
    split = run(histogram, unit, masks, limits, least, (seed, level), path.bounds)
    found = split.found & (position >= 0)
    return split._replace(found=paths.keep_best(path, split.gain, found))


def _search_on_gpu(squares, histogram, unit, masks, limits, least, draws, bounds):
    weight, least = child_limits(limits.min_child_weight, least)
    values, categories = limits.values, limits.categories
    l1, monotone = jnp.float32(0), None
    if values is not None:
        l1, monotone = values.l1, values.monotone
    per, num_features = count_per_threshold(limits), masks.shape[1]
    numbers = levels_cuda.SearchNumbers(
        unit, jnp.stack([limits.l2 / unit[1], weight, l1]), jnp.stack([least, per]),
        *draws,
    )  # fmt: skip
    ordered = masks
    if categories is not None:
        ordered = masks & mark_ordered(categories, num_features, per > 0)[None]
    cuts = levels_cuda.find_cuts(histogram, ordered, numbers, bounds, monotone)
    best, feature, place = _take_best(cuts)
    split = Split(
        feature=feature,
        threshold=place >> 1,
        missing_left=(place & 1) == 1,
        gain=best - limits.min_gain,
        found=is_worth(best, cuts.noise, limits.min_gain),
    )
    if values is not None:
        split = _bound_on_gpu(split, histogram, unit, limits, bounds)
    if categories is None:
        return split
    num_bins, node = histogram.shape[2], jnp.arange(len(feature), dtype=jnp.int32)
    sets = levels_cuda.find_sets(
        histogram, masks, numbers, bounds, squares, *categories,
        num_words=count_words(num_bins),
    )  # fmt: skip
    gain, group, place = _take_best(sets)
    left_codes, absent_codes = sets.left[node, group], sets.absent[node, group]
    found = BestSet(
        gain, categories.features[group], (place & 1) == 1, left_codes, absent_codes
    )

    def choose_one(numeric, sets, size, bounds):
        least = limits.min_gain
        return choose_split(numeric, sets, categories, size, least, bounds, num_bins)

    split = split._replace(gain=best)
    return jax.vmap(choose_one)(split, found, cuts.noise, bounds)


def _take_best(cuts):
    """Returns gain, feature and place of the best cut of each node."""
    best, number = jnp.max(cuts.gain, axis=1), cuts.gain.shape[1]
    every = jnp.arange(number, dtype=jnp.int32)
    match = cuts.gain == best[:, None]
    feature = jnp.min(jnp.where(match, every, number - 1), axis=1)
    place = jnp.take_along_axis(cuts.place, feature[:, None], axis=1)[:, 0]
    return best, feature, place


def _bound_on_gpu(split, histogram, unit, limits, bounds):
    """Adds the bounds of the leaf values below the children of each split."""
    node, values = jnp.arange(histogram.shape[0], dtype=jnp.int32), limits.values
    sums = jnp.moveaxis(histogram[node, split.feature], -1, 1)
    code = jnp.arange(histogram.shape[2], dtype=jnp.int32)[None, None, :]
    left = (code > MISSING) | split.missing_left[:, None, None]
    left &= code <= split.threshold[:, None, None]
    cut, all_rows = (
        jnp.sum(each, axis=2, dtype=sums.dtype)
        for each in (jnp.where(left, sums, 0), sums)
    )

    def bound(cut, all_rows, bounds, feature, threshold):
        own = values._replace(bounds=bounds)
        last = threshold == histogram.shape[2] - 1
        return bound_children(cut, all_rows, unit, limits.l2, own, feature, last)

    rows = cut, all_rows, bounds, split.feature, split.threshold
    return split._replace(child_bounds=jax.vmap(bound)(*rows))


def least_samples(limits: TreeLimits, num_in_bag: Int32[Array, ""]) -> Int32[Array, ""]:
    """Returns the least number of rows of a child; 0 if counts need not be summed."""
    least = jnp.asarray(limits.min_child_samples, jnp.int32)
    return jnp.where(needs_counts(limits), jnp.minimum(least, num_in_bag + 1), 0)


def needs_counts(limits: TreeLimits) -> Bool[Array, ""]:
    """Returns whether the search needs the number of rows of each bin.

    A child without rows gives no gain, so that a minimum of 1 needs no counts.
    """
    if limits.rows_per_threshold is not None:
        return jnp.asarray(True)
    return jnp.asarray(limits.min_child_samples) > 1


def count_per_threshold(limits: TreeLimits) -> Int32[Array, ""]:
    """Returns ``rows_per_threshold`` as kernels take it: 0 if all are tried."""
    per = limits.rows_per_threshold
    return jnp.int32(0) if per is None else jnp.asarray(per, jnp.int32)


def sample_features(
    seed: UInt32[Array, "2"],
    level: Int32[Array, ""] | int,
    slots: int,
    num_features: int,
    limits: TreeLimits,
) -> Bool[Array, "M F"]:
    """Samples the tree's features, from these the level's, from these the node's."""
    sizes: Any = dict(slots=slots, num_features=num_features)
    run = choose(xla=_sample_plainly, cuda=levels_cuda.sample_features, **sizes)
    return run(seed, jnp.asarray(level, jnp.int32), column_fractions(limits))


def _sample_plainly(seed, level, fractions, *, slots, num_features):
    stage = jnp.arange(3, dtype=jnp.int32)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    # Every use has a number of its own: the tree 0, level d 1 + d, then the nodes.
    node = 64 + 2**level + slot
    use = jnp.where(stage == 0, 0, jnp.where(stage == 1, 1 + level, node))
    seeds = derive_seeds(seed, use)

    def narrow(stage, masks):  # one body for all three: it is compiled
        return jax.vmap(sample_in_xla, (0, 0, None))(
            seeds[stage], masks, fractions[stage]
        )

    every = jnp.ones((seeds.shape[1], num_features), bool)
    return jax.lax.cond(
        jnp.min(fractions) < 1,
        lambda masks: jax.lax.fori_loop(0, 3, narrow, masks),
        lambda masks: masks,
        every,
    )


def column_fractions(limits: TreeLimits) -> Float[Array, "3"]:
    """Returns the shares of features by tree, level and node."""
    shares = (
        limits.colsample_bytree, limits.colsample_bylevel, limits.colsample_bynode
    )  # fmt: skip
    return jnp.stack([jnp.asarray(share, jnp.float32) for share in shares])


class SideCounts(NamedTuple):
    """Rows in the bag of each slot: left by their codes, right by them, missing."""

    left: Int32[Array, " M"]
    right: Int32[Array, " M"]
    missing: Int32[Array, " M"]


def count_sides(histogram: Int32[Array, "M F B C"], split: Split) -> SideCounts:
    """Counts the rows of each side of each split from the histograms of the slots."""
    slots, _, num_bins, _ = histogram.shape
    # The last channel counts rows, also where it is the curvature of uniform ones.
    count = histogram[jnp.arange(slots, dtype=jnp.int32), split.feature, :, -1]
    code = jnp.arange(num_bins, dtype=jnp.int32)[None, :]
    left, known = code <= split.threshold[:, None], code > MISSING
    if split.left_codes is not None and split.absent_codes is not None:
        divided = split.threshold[:, None] == CATEGORICAL
        left = jnp.where(divided, unpack_bits(split.left_codes, num_bins), left)
        known &= ~(divided & unpack_bits(split.absent_codes, num_bins))

    def add(chosen):
        return jnp.sum(jnp.where(chosen, count, 0), axis=1, dtype=count.dtype)

    return SideCounts(add(known & left), add(known & ~left), add(~known))


def settle_splits(
    split: Split, count: SideCounts, num_bins: int
) -> tuple[Split, Bool[Array, " M"], Int32[Array, " M"]]:
    """Decides where missing values go.

    Also returns whether each left child has no more rows in the bag than the right one,
    and the number of rows of the smaller one.
    """
    threshold = jnp.where(split.found, split.threshold, num_bins - 1)
    # Where training saw no missing value, missing goes to the child with more rows.
    missing_left = jnp.where(
        count.missing > 0, split.missing_left, count.left >= count.right
    )
    missing_left = missing_left | ~split.found
    left_codes = split.left_codes
    if left_codes is not None and split.absent_codes is not None:
        # Categories that no row of the node has go with the missing ones.
        absent = jnp.where(missing_left[:, None], split.absent_codes, jnp.uint32(0))
        left_codes |= absent
    left = count.left + jnp.where(missing_left, count.missing, 0)
    right = count.left + count.right + count.missing - left
    settled = split._replace(
        threshold=threshold,
        missing_left=missing_left,
        left_codes=left_codes,
        absent_codes=None,
    )
    return settled, left <= right, jnp.minimum(left, right)


class Pairs(NamedTuple):
    """The children of the r-th split node take slots 2r and 2r + 1.

    Attributes:
      source: slot of the r-th split node; 0 beyond the last one.
      used: whether there is an r-th split node.
      pair: r of each slot; the next level's number of slots if its node is not split.
      position: position of the node in each slot of the next level; -1 if empty.
    """

    source: Int32[Array, " pairs"]
    used: Bool[Array, " pairs"]
    pair: Int32[Array, " M"]
    position: Int32[Array, " slots"]


def pair_children(position: Int32[Array, " M"], split: Split, slots: int) -> Pairs:
    """Assigns the children to the ``slots`` slots of the next level."""
    count = jnp.cumsum(split.found, dtype=jnp.int32)
    num_found = count[-1]
    pair = jnp.where(split.found, count - 1, slots)
    place = jnp.arange(max(1, slots // 2), dtype=jnp.int32)
    # A search, unrolled, is one program on a GPU, a scatter several.
    source = jnp.searchsorted(count, place + 1, method="scan_unrolled")
    used = place < num_found
    source = jnp.where(used, source, 0).astype(jnp.int32)
    parent = jnp.stack([position[source]] * 2, axis=1).reshape(-1)[:slots]
    slot = jnp.arange(slots, dtype=jnp.int32)
    after = jnp.where(slot < 2 * num_found, 2 * parent + (slot & 1), -1)
    return Pairs(source, used, pair, after)


def pass_paths(
    path: paths.Paths,
    level: Int32[Array, ""] | int,
    position: Int32[Array, " M"],
    split: Split,
    source: Int32[Array, " pairs"],
    slots: int,
    max_depth: int,
) -> paths.Paths:
    """Returns the constraints that a level's nodes pass to the next level."""
    return paths.descend(
        path, level, position, split.feature, split.found, split.child_bounds, source,
        slots=slots, max_depth=max_depth,
    )  # fmt: skip


class Moved(NamedTuple):
    """Nodes of the rows after a level's splits.

    Attributes:
      node: number r (see Pairs) of the smaller child that holds a row in the bag; -1,
        or a number of no pair, for all other rows.
      slot, position: slot and position of the row's node on the next level.
    """

    node: Int32[Array, " N"]
    slot: Int32[Array, " N"]
    position: Int32[Array, " N"]


def route_rows(
    codes: Codes,
    split: Split,
    pair: Int32[Array, " M"],
    left_smaller: Bool[Array, " M"],
    in_bag: Bool[Array, " N"],
    row_slot: Int32[Array, " N"],
    row_position: Int32[Array, " N"],
    *,
    slots: int,
) -> Moved:
    """Sends rows down by splits from :func:`settle_splits`."""
    cuda = levels_cuda.route_rows if levels_cuda.takes(codes) else None
    run = choose(xla=_route_plainly, cuda=cuda, slots=slots)
    rows = in_bag, row_slot, row_position
    return Moved(*run(codes, split, pair, left_smaller, *rows))


def _route_plainly(
    codes, split, pair, left_smaller, in_bag, row_slot, row_position, *, slots
):  # fmt: skip
    highest = jnp.iinfo(jnp.int32).max  # rows that have stopped stay left
    code = codes.row_codes(lookup(split.feature, row_slot, 0))
    threshold = lookup(split.threshold, row_slot, highest)
    above = (code > threshold).astype(jnp.int32)
    if split.left_codes is not None:
        divided = threshold == CATEGORICAL
        above = _divide(above, divided, split.left_codes, row_slot, code)
    missing_right = (~lookup(split.missing_left, row_slot, True)).astype(jnp.int32)
    right = jnp.where(code == MISSING, missing_right, above)
    row_pair = lookup(pair, row_slot, slots)
    smaller = (right == 0) == lookup(left_smaller, row_slot, False)
    node = jnp.where(in_bag & smaller, row_pair, -1)
    slot = jnp.minimum(2 * row_pair + right, slots)
    return node, slot, 2 * row_position + right


def join_children(
    histogram: Int32[Array, "M F B C"],
    source: Int32[Array, " pairs"],
    left_smaller: Bool[Array, " M"],
    small: Int32[Array, "pairs F B C"],
    slots: int,
) -> Int32[Array, "slots F B C"]:
    """Joins the histograms of smaller children with parent minus child."""
    large = histogram[source] - small
    first = left_smaller[source][:, None, None, None]
    both = jnp.where(first, small, large), jnp.where(first, large, small)
    return jnp.stack(both, axis=1).reshape(-1, *histogram.shape[1:])[:slots]


def write_splits(
    level: Int32[Array, "*M"] | int,
    position: Int32[Array, " M"],
    tree: Tree,
    split: Split,
) -> Tree:
    """Enters the splits of a level, or of several, into the tree."""
    outside = tree.feature.shape[0]
    node = jnp.where(split.found, 2**level - 1 + position, outside)
    # One scatter of triples: three of single numbers take longer to compile.
    fields = (split.feature, split.threshold, split.missing_left.astype(jnp.int32))
    table = (tree.feature, tree.threshold, tree.missing_left.astype(jnp.int32))
    table = jnp.stack(table, axis=1).at[node].set(jnp.stack(fields, 1), mode="drop")
    left_codes = tree.left_codes
    if left_codes is not None:
        left_codes = left_codes.at[node].set(split.left_codes, mode="drop")
    return tree._replace(
        feature=table[:, 0],
        threshold=table[:, 1],
        missing_left=table[:, 2] > 0,
        left_codes=left_codes,
    )


def _divide(above, divided, left_codes, row_slot, code):
    """Returns 1 for rows that go right, where categories split the node."""
    left = goes_left(left_codes[row_slot], code)
    return jnp.where(divided, (~left).astype(jnp.int32), above)


def lookup(
    table: Shaped[Array, " M"], slot: Int32[Array, " N"], otherwise: int | bool
) -> Shaped[Array, " N"]:
    """Returns table[slot], or ``otherwise`` where the node has stopped growing."""
    return jnp.append(table, jnp.asarray(otherwise, table.dtype))[slot]
