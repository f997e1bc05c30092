# SPDX-License-Identifier: Apache-2.0
"""Linear leaves: terms, fit, values for rows; new values for old leaves.

The terms of a leaf are the numeric features of its path. With d_j the value of feature
j, scaled to [-1, 1] by the range of the feature, and c_j its mean in the leaf, weighted
by curvature, the slopes w minimize a quadratic model of the loss around the leaf value:

    sum_i g_i w'(d_i - c) + h_i (w'(d_i - c))^2 / 2  +  ridge |w|^2 / 2

so that w = -(S + ridge)^-1 (sum_i g_i (d_i - c)), where S = sum_i h_i (d_i - c)
(d_i - c)'. Rows that miss one of the values do not take part. Since the terms are
centered, the leaf value is that of a constant leaf. (Linear leaves for boosting: Shi et
al. 2019, "Gradient boosting with piece-wise linear regression trees".)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32

from jboost.entry.collectives import total
from jboost.kernels import exact_sums
from jboost.kernels.calls import call, floats, ints
from jboost.kernels.exact_sums import split_weights
from jboost.kernels.library import choose
from jboost.kernels.xla import exponent_above, power_of_two, round_alone
from jboost.numerics.exact import sum_channels
from jboost.trees.leaf_operations import add_values
from jboost.trees.tree import CATEGORICAL, LeafSums, Slopes, Tree, evaluate

MOST_TERMS = 6
_RIDGE = 2.0  # rows of average curvature
_ROWS_PER_TERM = 3  # at least, in a leaf with slopes


def list_terms(
    tree: Tree, ranges: Float[Array, "F 2"], num_terms: int, num_bins: int
) -> Int32[Array, "L P"]:
    """Returns the features of the terms of each leaf of a tree on codes; -1: none.

    They are the features of the splits on the leaf's path, from the leaf up, that have
    a range; ``num_bins`` is the size of the codes that the tree splits.
    """
    depth = tree.max_depth
    leaf = np.arange(2**depth)[:, None]
    level = np.arange(depth)[::-1]
    path = 2**level - 1 + (leaf >> (depth - level))
    stays = (tree.threshold == num_bins - 1) & tree.missing_left
    wide = (ranges[:, 0] < ranges[:, 1])[tree.feature]
    valid = (~stays & wide & (tree.threshold != CATEGORICAL))[path]
    feature = tree.feature[path]
    same = (feature[:, :, None] == feature[:, None, :]) & valid[:, None, :]
    valid &= ~jnp.any(same & np.tri(depth, k=-1, dtype=bool)[None], axis=2)
    place = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    here = valid[:, :, None] & (
        place[:, :, None] == np.arange(num_terms, dtype=np.int32)[None, None]
    )
    return jnp.max(jnp.where(here, feature[:, :, None], -1), axis=1)


def fit_slopes(
    table: Float[Array, "N F"],
    ranges: Float[Array, "F 2"],
    terms: Int32[Array, "L P"],
    leaf: Int32[Array, " N"],
    derivatives: tuple[Float[Array, " N"], Float[Array, " N"]],
    weights: Float[Array, " N"],
    sums: LeafSums,
    row: tuple[Float[ArrayLike, ""], Float[ArrayLike, ""]],
) -> Slopes:
    """Fits the slopes of the leaves of one tree to gradient and curvature of all rows.

    Args:
      table: the values of the features, clipped to their ranges; NaN: missing.
      derivatives: gradient and curvature of each row.
      sums: the sums of the leaves.
      row: the curvature and the weight of an average row.
    """
    gradient, curvature = derivatives
    num_leaves, num_terms = terms.shape
    size = sum_channels((jnp.abs(gradient),), leaf, num_leaves, weights)[0]
    scales = [_choose_scale(sums) for sums in (size, sums.curvature)]
    middle, half = (ranges[:, 0] + ranges[:, 1]) / 2, (ranges[:, 1] - ranges[:, 0]) / 2
    inverse = jnp.where(half > 0, 1 / half, 0.0)
    run = choose(cpu=_sum_products_natively, xla=_sum_products)
    found = total(
        run(
            table, leaf, terms, (middle, inverse), (gradient, curvature, weights),
            jnp.stack(scales),
        )
    ).astype(jnp.float32)  # fmt: skip
    num_curved = (num_terms + 1) * (num_terms + 2) // 2
    curved, steep = (
        found[:num_curved] / scales[1][None],
        found[num_curved:] / scales[0][None],
    )

    used = terms >= 0
    enough = sums.weight >= _ROWS_PER_TERM * row[1] * jnp.sum(
        used, axis=1, dtype=jnp.float32
    )
    enough &= (curved[0] > 0) & jnp.any(used, axis=1)
    mass = jnp.where(enough, curved[0], 1.0)
    place = np.zeros((num_terms + 1, num_terms + 1), np.int32)
    place[np.tril_indices(num_terms + 1)] = np.arange(num_curved)
    matrix = curved[np.maximum(place, place.T)]
    center = matrix[0, 1:] / mass[None]
    spread = matrix[1:, 1:] - round_alone(center[:, None] * matrix[0, None, 1:])
    spread += _RIDGE * row[0] * np.eye(num_terms, dtype=np.float32)[:, :, None]
    slope = _solve(spread, round_alone(center * steep[:1]) - steep[1:])
    feature = jnp.where(enough[:, None], terms, -1)
    given = feature >= 0
    place = jnp.maximum(feature, 0)
    slope = jnp.where(given, slope.T * inverse[place], 0.0)
    center = middle[place] + round_alone(center.T * half[place])
    return Slopes(feature, slope, jnp.where(given, center, 0.0))


def _choose_scale(total):
    """Returns a power of two for each leaf that keeps its sums below 2^30."""
    exponent = 30 - exponent_above(jnp.maximum(total, jnp.float32(1e-30)))
    return power_of_two(jnp.clip(exponent, -126, 126))


def _sum_products(table, leaf, terms, scaling, rows, scales):
    """Sums h, h d_1, h d_1 d_1, h d_2, h d_2 d_1, ..., g, g d_1, ... by leaf: integers.

    ``scales`` are the units of g and h in each leaf. Rows that miss a value are left
    out.
    """
    feature = terms[leaf]
    (middle, inverse), (gradient, curvature, weights) = scaling, rows
    place = jnp.maximum(feature, 0)
    x = jnp.take_along_axis(table, place, axis=1)
    scaled = jnp.where(feature >= 0, (x - middle[place]) * inverse[place], 0.0)
    complete = ~jnp.any(jnp.isnan(scaled), axis=1)
    times, factors = split_weights(weights)
    factors = jnp.where(complete, factors, 0.0)
    steep, curved = (
        factors * rows * scale[leaf]
        for rows, scale in zip((gradient, curvature), scales, strict=True)
    )
    each = [jnp.ones_like(gradient), *jnp.where(complete[:, None], scaled, 0.0).T]
    products = []
    for number, one in enumerate(each):
        products += [curved * one * other for other in each[: number + 1]]
    products += [steep * one for one in each]
    times = times.astype(jnp.int32)
    whole = [product.astype(jnp.int32) * times for product in products]
    return exact_sums.sum_channels(leaf, None, *whole, num_groups=len(terms))


def _sum_products_natively(table, leaf, terms, *others):
    """Calls the CPU kernel of :func:`_sum_products`."""
    num_leaves, num_terms = terms.shape
    channels = (num_terms + 1) * (num_terms + 2) // 2 + num_terms + 1
    result = ints(channels, num_leaves)
    return call("sum_products", result, table, leaf, terms, *others)


def _solve(matrix, right):
    """Solves P x P systems [P, P, L] that are positive definite, by elimination."""

    def eliminate(_, system):
        matrix, right = system
        first, value = matrix[0] / matrix[0, :1], right[:1] / matrix[0, :1]
        column = matrix[1:, 0]
        matrix = matrix[1:] - round_alone(column[:, None] * first[None])
        right = right[1:] - round_alone(column * value)
        # The next unknown becomes the first one, in rows and in columns.
        matrix = jnp.roll(jnp.concatenate([matrix, first[None]]), -1, axis=1)
        return matrix, jnp.concatenate([right, value])

    # A loop, because XLA would take longer to compile its turns one by one.
    return jax.lax.fori_loop(0, len(matrix), eliminate, (matrix, right))[1]


def limit_slopes(
    slopes: Slopes,
    value: Float[Array, "*K L"],
    bounds: Float[Array, "*K L 2"],
    ranges: Float[Array, "F 2"],
) -> Slopes:
    """Shrinks the slopes of each leaf until all that it can give lies in its bounds."""
    slack = jnp.minimum(value - bounds[..., 0], bounds[..., 1] - value)
    ends = ranges[jnp.maximum(slopes.feature, 0)]
    reach = jnp.maximum(slopes.center - ends[..., 0], ends[..., 1] - slopes.center)
    reach = jnp.sum(round_alone(jnp.abs(slopes.slope) * reach), axis=-1)
    factor = jnp.clip(slack / jnp.where(reach > 0, reach, 1.0), 0.0, 1.0)
    return slopes._replace(slope=slopes.slope * factor[..., None])


def add_leaves(
    scores: Float[Array, "K N"],
    trees: Tree,
    leaf: Int32[Array, "T N"],
    table: Float[Array, "N F"] | None,
    *,
    in_place: bool = False,
) -> Float[Array, "K N"]:
    """Returns the scores after the trees of a round, from the leaf of every row."""
    if trees.slopes is None:
        return add_values(scores, trees.leaf_value, leaf, in_place=in_place)
    assert table is not None
    run = choose(cpu=_add_natively, xla=_add_plainly)

    def repeat(array):
        return jnp.broadcast_to(array, (len(scores), *array.shape[1:]))

    slopes = jax.tree.map(repeat, trees.slopes)
    each = scores, trees.leaf_value, slopes, repeat(leaf)
    if len(scores) > 1:
        return jax.lax.map(lambda parts: run(table, *parts), each)
    return run(table, *jax.tree.map(lambda array: array[0], each))[None]


def _add_plainly(table, scores, value, slopes, leaf):
    each = jnp.arange(len(table), dtype=jnp.int32)
    return scores + evaluate(value, slopes, leaf, lambda feature: table[each, feature])


def _add_natively(table, scores, value, slopes, leaf):
    return call("add_lines", floats(*scores.shape), table, leaf, scores, value, *slopes)


class GivenLeaves(NamedTuple):
    """The leaves of a round's trees, for new values.

    Attributes:
      leaf: the leaf of each row in each tree.
      leaf_value, slopes: the old values; an empty leaf keeps them.
      decay: the share of the old values that other leaves keep.
    """

    leaf: Int32[Array, "T N"]
    leaf_value: Float[Array, "K L"]
    slopes: Slopes | None
    decay: Float[Array, ""]


def mix_leaves(trees: Tree, given: GivenLeaves) -> Tree:
    """Returns the trees with the old values where leaves are empty, and their share."""
    assert trees.sums is not None
    decay, slopes, before = given.decay, trees.slopes, given.slopes
    filled = trees.sums.weight > 0
    if slopes is not None and before is not None:
        # With decay around the old centers, so that old and new terms can be added.
        moved = round_alone(slopes.slope * (before.center - slopes.center))
        moved = jnp.sum(jnp.where(slopes.feature >= 0, moved, 0.0), axis=-1)
        moved = trees.leaf_value + jnp.where(decay > 0, moved, 0.0)
        slopes = Slopes(
            jnp.where(decay > 0, before.feature, slopes.feature),
            mix(decay, before.slope, slopes.slope),
            jnp.where(decay > 0, before.center, slopes.center),
        )
        # One tree of all scores has the same terms for each.
        keep = filled
        if len(slopes.feature) != len(filled):
            keep = jnp.any(filled, axis=0, keepdims=True)
        slopes = jax.tree.map(
            lambda new, before: jnp.where(keep[..., None], new, before), slopes, before
        )
        trees = trees._replace(leaf_value=moved, slopes=slopes)
    mixed = mix(decay, given.leaf_value, trees.leaf_value)
    return trees._replace(leaf_value=jnp.where(filled, mixed, given.leaf_value))


def mix(decay: Any, old: Any, new: Any) -> Any:
    """Returns ``decay`` of the old values and the rest of the new ones."""
    # Without decay to the bit, with the sign of a zero.
    return jnp.where(decay > 0, decay * old + (1 - decay) * new, new)
