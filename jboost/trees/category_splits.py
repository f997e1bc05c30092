# SPDX-License-Identifier: Apache-2.0
"""The best split of one node where codes of some features stand for categories.

A Split sends a threshold's lower side left, or a set of categories.

Of the 2^(C-1) - 1 ways to divide C categories the best one, for any convex criterion
of two sums, is a cut in the order of their means (Fisher 1958; Breiman et al. 1984,
theorem 4.5): C - 1 candidates, after a sort. With sums of gradient and curvature the
means are G / H.

Categories of few rows have means by chance. A set chosen by such means has a gain even
where the categories say nothing: with C of them about C / pi times the variance of a
row, as half of them have a sum above the expected one. So the means are shrunk before
they are sorted and before gains are computed, by as much as the node's own rows call
for. In the model of random effects G_c / H_c varies about the mean of its category with
variance phi / H_c, and those means vary with variance tau about that of the node. phi
is estimated by sum g^2 / sum h over the node's rows, tau by the moments of
sum_c G_c^2 / H_c (DerSimonian and Laird 1986, equation 8), and G_c is replaced by its
expectation given the data,

    H_c (G_c + s m) / (H_c + s), where m = sum_c G_c / sum_c H_c and s = phi / tau.

phi is not centered: it includes the mean of the node and the differences between
categories, so that categories of one or two rows are always shrunk. Where categories
differ by no more than chance, tau is 0 and no set has a gain.

How often a category occurs may say more than its mean: codes fall with the weight of
their categories in training, and thresholds on codes are candidates, too.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.codes.bins import MISSING
from jboost.tables.categories import WORD
from jboost.trees.splitting import (
    UNBOUNDED,
    Draw,
    Split,
    ValueLimits,
    are_large_enough,
    child_limits,
    cut_gain,
    draw_thresholds,
    is_worth,
    limited_gain,
    limited_score,
    node_score,
    search_cuts,
    search_split,
)
from jboost.trees.tree import CATEGORICAL

_STRONGEST = 2.0**80  # shrinks any sum of 31 bits to the mean


class CategoryLimits(NamedTuple):
    """The categorical features, and the limits of their splits.

    Attributes:
      features: indices of the categorical features, ascending.
      num_codes: the number of codes of each feature; they are 1 .. num_codes.
      max_onehot: the most codes of a feature that splits off one category at a time.
    """

    features: Int32[Array, " G"]
    num_codes: Int32[Array, " G"]
    max_onehot: Int32[Array, ""]


def count_words(num_bins: int) -> int:
    """Returns W, the number of 32-bit words that hold a bit for each code."""
    return -(-num_bins // WORD)


def find_mixed_split(
    histogram: Int32[Array, "F B C"],
    unit: Float[Array, "2"],
    features: Bool[Array, " F"],
    categories: CategoryLimits,
    squares: Float[Array, ""] | float = 0.0,
    *,
    l2: Float[Array, ""] | float = 1.0,
    min_gain: Float[Array, ""] | float = 0.0,
    min_child_weight: Float[Array, ""] | float = 1.0,
    min_child_samples: Int32[Array, ""] | int = 1,
    values: ValueLimits | None = None,
    draw: Draw | None = None,
) -> Split:
    """Searches thresholds of numeric features, and sets of categories of the others.

    A node's categories are sorted by their shrunk means (see above), ties by code;
    candidates are the first 1, 2, ... of them. A feature with at most ``max_onehot``
    codes splits off one category at a time, without shrinking. With ``draw``, other
    features are also split by thresholds on their codes, which are in the order of the
    weights of their categories. Gains are those of
    :func:`jboost.trees.splitting.search_split`, from the shrunk sums. Equal gains go to
    the lowest feature, then to the fewest categories (or the lowest code), then to
    missing rows right.

    Categorical features must not be monotone. ``squares`` is the sum of the squared
    integer gradients of the node's rows; 0 turns shrinking off. For a split by
    categories, the Split has threshold -1, and bits of the codes.
    """
    onehot = (categories.num_codes <= categories.max_onehot)[:, None]
    drawn = False if draw is None else draw.rows_per_threshold > 0
    ordered = mark_ordered(categories, features.shape[0], drawn)
    # min_gain is taken off at the end: rounding could make gains equal.
    numeric = search_split(
        histogram, unit, features & ordered, l2=l2, min_gain=0.0, values=values,
        min_child_weight=min_child_weight, min_child_samples=min_child_samples,
        draw=draw,
    )  # fmt: skip
    sums = jnp.moveaxis(histogram[categories.features], -1, 0)
    total = jnp.sum(sums[:, :1], axis=2, keepdims=True)
    missing = sums[:, :, MISSING, None]
    shrunk, varies = _shrink(sums, squares, total)
    shrunk = jnp.where(onehot[None], sums, shrunk)
    least = child_limits(min_child_weight, min_child_samples)
    ranked = _rank_codes(sums, shrunk, onehot, varies, least[1] > 0)
    size = _score_size(total, unit, l2, values)
    num_rows = total[-1, 0, 0]
    total = jnp.sum(shrunk, axis=2, keepdims=True)
    gain_of = _scoring(total, unit, l2, values)
    allowed = ranked.admissible & features[categories.features][:, None]
    code = jnp.arange(histogram.shape[1], dtype=jnp.int32)
    if draw is not None:
        count = jnp.sum(ranked.seen, axis=1, dtype=jnp.int32)
        complete = jnp.all(missing == 0, axis=(0, 2)) & ~onehot[:, 0]
        cuts = count - complete.astype(jnp.int32)
        cuts = jnp.where(onehot[:, 0] | varies[:, 0], cuts, 1)
        filled = code[None, :] < count[:, None]
        allowed &= draw_thresholds(filled, cuts, num_rows, categories.features, draw)

    def measure(left, right):
        admissible = allowed & are_large_enough(left, right, unit, least)
        return jnp.where(admissible, gain_of(left, right), -jnp.inf)

    best, first, left = search_cuts(measure, ranked.left + missing, missing, total)
    num_bins = jnp.int32(histogram.shape[1])
    group, rank = jax.lax.div(first, num_bins), jax.lax.rem(first, num_bins)
    sides = _sides(ranked, group, rank, onehot[group], categories.num_codes[group])
    found = best, categories.features[group], left, *map(pack_bits, sides)
    bounds = None if values is None else values.bounds
    return choose_split(
        numeric, BestSet(*found), categories, size[0, 0], min_gain, bounds,
        histogram.shape[1],
    )  # fmt: skip


class BestSet(NamedTuple):
    """The best set of categories of a node, over all features.

    Attributes:
      gain: its gain, without ``min_gain``.
      left_codes, absent_codes: see :class:`jboost.trees.splitting.Split`.
    """

    gain: Float[Array, ""]
    feature: Int32[Array, ""]
    missing_left: Bool[Array, ""]
    left_codes: UInt32[Array, " W"]
    absent_codes: UInt32[Array, " W"]


def mark_ordered(
    categories: CategoryLimits, num_features: int, drawn: Bool[ArrayLike, ""]
) -> Bool[Array, " F"]:
    """Returns the mask of the features that thresholds on codes may split.

    ``drawn`` says whether thresholds are drawn.
    """
    by_weight = (categories.num_codes > categories.max_onehot) & drawn
    ordered = jnp.ones(num_features, bool)
    return ordered.at[categories.features].set(by_weight)


def choose_split(
    numeric: Split,
    sets: BestSet,
    categories: CategoryLimits,
    size: Float[Array, ""],
    min_gain: Float[Array, ""] | float,
    bounds: Float[Array, "2"] | None,
    num_bins: int,
) -> Split:
    """Chooses between the best threshold and the best set of categories of a node.

    Args:
      numeric: the best threshold; its gain is without ``min_gain``.
      size: the size of the terms of the node's score.
      bounds: limits of the leaf values below the node, if they are limited.
    """
    better = sets.gain > numeric.gain
    better |= (sets.gain == numeric.gain) & (sets.feature < numeric.feature)
    gain = jnp.maximum(sets.gain, numeric.gain)
    by_code = jnp.any(categories.features == numeric.feature)
    code = jnp.arange(num_bins, dtype=jnp.int32)
    heavier = by_code & (code > MISSING) & (code <= numeric.threshold)
    child_bounds = numeric.child_bounds
    if bounds is not None and child_bounds is not None:
        # Between sets of categories there is no order to keep.
        same = jnp.broadcast_to(bounds, (2, 2))
        child_bounds = jnp.where(better, same, child_bounds)
    return Split(
        feature=jnp.where(better, sets.feature, numeric.feature),
        threshold=jnp.where(better | by_code, CATEGORICAL, numeric.threshold),
        missing_left=jnp.where(better, sets.missing_left, numeric.missing_left),
        gain=gain - min_gain,
        found=is_worth(gain, size, min_gain),
        child_bounds=child_bounds,
        left_codes=jnp.where(better, sets.left_codes, pack_bits(heavier)),
        absent_codes=jnp.where(better, sets.absent_codes, jnp.uint32(0)),
    )


def pack_bits(chosen: Bool[Array, " B"]) -> UInt32[Array, " W"]:
    """Packs a mask: bit c % 32 of word c // 32 says whether code c is chosen."""
    words = count_words(chosen.shape[0])
    bits = jnp.pad(chosen, (0, WORD * words - chosen.shape[0])).reshape(words, WORD)
    bit = jnp.arange(WORD, dtype=jnp.uint32)[None, :]
    return jnp.sum(bits.astype(jnp.uint32) << bit, axis=1, dtype=jnp.uint32)


def unpack_bits(words: UInt32[Array, "*M W"], num_bins: int) -> Bool[Array, "*M B"]:
    """Undoes :func:`pack_bits`."""
    code = np.arange(num_bins)
    word, bit = words[..., code // WORD], (code % WORD).astype(np.uint32)
    return (word >> jnp.broadcast_to(bit, word.shape)) & 1 == 1


class _Ranked(NamedTuple):
    """The codes of each categorical feature, ranked in the order of going left."""

    left: Int32[Array, "C G B"]  # sums of the left side, by rank
    admissible: Bool[Array, "G B"]  # whether the cut at a rank may be made
    rank: Int32[Array, "G B"]  # rank of each code
    seen: Bool[Array, "G B"]  # codes that rows of the node have


def _shrink(sums, squares, total):
    """Replaces each G_c by its expectation given the data; all are integers.

    Also returns whether categories differ by more than chance; where they do not,
    nothing is replaced. The magnitudes sum to less than twice those of the rows'
    gradients, which is less than 2^31. No product feeds a sum, which some compilers
    would contract and others not; a maximum with 0 changes nothing, and is between.
    """
    code = jnp.arange(sums.shape[2], dtype=jnp.int32)
    known = jnp.where(code > MISSING, sums[:2], 0)
    gradient, weight = known.astype(jnp.float32)
    heavy = weight > 0
    divisor = jnp.where(heavy, weight, 1.0)
    rows_weight = jnp.maximum(total[1].astype(jnp.float32), 1.0)
    all_gradient, all_weight = jnp.sum(known, axis=2, keepdims=True).astype(jnp.float32)
    all_weight = jnp.maximum(all_weight, 1.0)
    terms = jnp.stack(
        [
            jnp.where(heavy, jnp.square(gradient) / divisor, 0.0),
            jnp.maximum(jnp.square(weight) / all_weight, 0.0),
        ]
    )
    between, largest = _sum_by_halves(terms)
    count = jnp.sum(heavy, axis=1, keepdims=True).astype(jnp.float32)
    by_chance = (squares * (count - 1.0)) / rows_weight
    between = between - jnp.maximum(jnp.square(all_gradient) / all_weight, 0.0)
    excess, spread = between - jnp.maximum(by_chance, 0.0), all_weight - largest
    varies = (excess > 0) & (spread > 0)
    strength = (squares * spread) / (rows_weight * jnp.where(varies, excess, 1.0))
    strength = jnp.minimum(strength, _STRONGEST)
    prior = jnp.maximum((strength * all_gradient) / all_weight, -UNBOUNDED)
    shrunk = weight * (gradient + prior) / jnp.where(heavy, weight + strength, 1.0)
    shrunk = jnp.round(jnp.where(varies, shrunk, 0.0)).astype(jnp.int32)
    replaced = varies & (code > MISSING)[None, :]
    return sums.at[0].set(jnp.where(replaced, shrunk, sums[0])), varies


def _sum_by_halves(values):
    """Sums the last axis in an order that the CPU kernel can follow."""
    size = 1 << (values.shape[-1] - 1).bit_length()
    padding = [(0, 0)] * (values.ndim - 1) + [(0, size - values.shape[-1])]
    values = jnp.pad(values, padding)
    while size > 1:
        size //= 2
        values = values[..., :size] + values[..., size:]
    return values


def _rank_codes(sums, shrunk, onehot, varies, counted):
    """Ranks by shrunk means; codes that are not seen come last.

    Where categories do not vary, they only part from missing values, all together.
    Unless ``counted``, rows without derivatives do not show a code.
    """
    code = jnp.broadcast_to(jnp.arange(sums.shape[2], dtype=jnp.int32), sums.shape[1:])
    seen = jnp.any(sums[:2] != 0, axis=0)
    seen |= counted & jnp.any(sums[2:] != 0, axis=0)
    seen &= code > MISSING
    weight = jnp.maximum(shrunk[1], 1).astype(jnp.float32)
    mean = shrunk[0].astype(jnp.float32) / weight
    # -0 is no other key than 0.
    key = jnp.where(onehot | (mean == 0), 0.0, mean)
    key = jnp.where(seen, key, jnp.inf)
    _, order = jax.lax.sort((key, code), num_keys=1, is_stable=True)
    count = jnp.sum(seen, axis=1, keepdims=True, dtype=jnp.int32)
    filled = code < count
    by_rank = jnp.take_along_axis(shrunk, order[None], axis=2)
    by_rank = jnp.where(filled[None], by_rank, 0)
    return _Ranked(
        left=jnp.where(onehot[None], by_rank, jnp.cumsum(by_rank, axis=2)),
        admissible=filled & (onehot | varies | (code == count - 1)),
        rank=jnp.argsort(order, axis=1).astype(jnp.int32),
        seen=seen,
    )


def _score_size(total, unit, l2, values):
    """Returns how large the terms of the parent's score are."""
    if values is None:
        return node_score(total, unit, l2)
    return limited_score(total, unit, l2, values)[2]


def _scoring(total, unit, l2, values):
    """Returns a function that computes the gain of cuts from both sides' sums."""
    if values is None:
        return partial(cut_gain, node_score(total, unit, l2), unit, l2)
    parent, _, _ = limited_score(total, unit, l2, values)
    return partial(limited_gain, parent, unit, l2, values, jnp.int32(0))


def _sides(ranked, group, rank, onehot, num_codes):
    """Codes that go left, and codes that the node has no rows of."""
    rank_of, seen = ranked.rank[group], ranked.seen[group]
    goes_left = seen & jnp.where(onehot, rank_of == rank, rank_of <= rank)
    code = jnp.arange(seen.shape[0], dtype=jnp.int32)
    return goes_left, ~seen & (code > MISSING) & (code <= num_codes)
