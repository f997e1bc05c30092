# SPDX-License-Identifier: Apache-2.0
"""Operations on leaves, each with a CPU kernel and a definition in plain XLA.

In: scores, the leaf of every row. Out: scores with values added, ranges and order
statistics by leaf, with their derivatives.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.collectives import current_shards, exchange
from jboost.kernels import leaves_cpu, leaves_xla
from jboost.kernels.library import choose
from jboost.numerics.derivatives import differentiable


def add_values(
    scores: Float[Array, "K N"],
    values: Float[Array, "K L"],
    leaf: Int32[Array, "T N"],
    *,
    in_place: bool = False,
) -> Float[Array, "K N"]:
    """Returns scores[k, i] + values[k, leaf[k, i]]; rows without a leaf keep theirs.

    Args:
      leaf: the leaf of each row in each score's tree, or in one tree for all
        (T = 1); numbers outside [0, L) stand for no leaf.
      in_place: whether the memory of the scores may be reused.
    """
    leaf = jnp.broadcast_to(leaf, scores.shape)
    cpu = partial(leaves_cpu.add_values, in_place=in_place)
    run = choose(cpu=cpu, xla=leaves_xla.add_values)
    return differentiable(run, _derive_added, scores, values, leaf)


def _derive_added(added, operands, tangents):
    del added
    leaf, num_leaves = operands[2], operands[1].shape[1]
    index = jnp.where((leaf >= 0) & (leaf < num_leaves), leaf, num_leaves)
    values = jnp.pad(tangents[1], ((0, 0), (0, 1)))
    return tangents[0] + jnp.take_along_axis(values, index, axis=1, mode="clip")


def find_range(
    values: Float[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Finds the least and greatest value of each group; infinite if one is NaN.

    The least of none is inf, the greatest -inf. Values hold no -0.
    """
    cpu, xla = (
        partial(kernels.find_range, num_groups=num_groups)
        for kernels in (leaves_cpu, leaves_xla)
    )
    low, high = choose(cpu=cpu, xla=xla)(values, group)
    _, (below, high) = exchange([], [-low, high])
    return -below, high


def middle_minimizers(
    minimizer: Float[Array, " N"],
    scores: Float[Array, " N"],
    weights: Float[Array, " N"],
    kinks: tuple[Float[Array, "*N"], Float[Array, "*N"]],
    scale: Float[Array, ""],
    group: Int32[Array, " N"],
    num_groups: int,
) -> Float[Array, " G"]:
    """Computes weighted order statistics: medians, quantiles.

    The middle of all c that minimize, for each group, the sum over its rows of

        w_i (left_i max(r_i - c, 0) + (kink_i - left_i) max(c - r_i, 0)),

    with r = minimizer - score; 0 for groups without weight. Slopes times weight are
    rounded to multiples of 1 / scale, so that their sums are exact in any order; where
    the sum's slope is below 2^-20 of the sum of kinks it counts as zero, because
    weights in float32 are no more precise (0.1 * 500 rows are not 50).

    The derivative is that of the rows that it selects; see :func:`derive_selected`.

    Args:
      kinks: left and kink above, the latter the jump of the slope at the minimum; for
        each row or one number for all.
      scale: a power of two; weights times kinks times scale sum to less than 2^40.
    """
    cpu, xla = (
        partial(kernels.middle_minimizers, num_groups=num_groups)
        for kernels in (leaves_cpu, leaves_xla)
    )
    run = choose(cpu=cpu, xla=xla)
    rows = (minimizer, scores, weights, *kinks, scale, group)
    if current_shards() is not None:
        return run(*rows)
    return differentiable(run, partial(_derive_middle, num_groups), *rows)


def _derive_middle(num_groups, middle, operands, tangents):
    minimizer, scores, weights, *_, group = operands
    inside = (group >= 0) & (group < num_groups)
    counts = (weights > 0) & ~jnp.isnan(minimizer - scores) & inside
    moved = tangents[0] - tangents[1]
    return derive_selected(middle, minimizer - scores, moved, weights, counts, group)[0]


def derive_selected(
    middle: Float[Array, " G"],
    key: Float[Array, " N"],
    moved: Float[Array, " N"],
    weights: Float[Array, " N"],
    counts: Bool[Array, " N"],
    group: Int32[Array, " N"],
) -> tuple[Float[Array, " G"], Bool[Array, " G"]]:
    """Returns the tangent of an order statistic, and whether two keys define it.

    It is midway between two keys of its group: the greatest key up to it and the least
    from it on, which may be the same. Rows of equal keys move it by the weighted mean
    of their tangents. The tangent is 0 if such keys are missing.

    Args:
      middle: the order statistic of each group.
      key, moved: the key of each row and the tangent of the key.
      counts: mask of the rows to choose from.
    """
    num_groups = middle.shape[0]
    group = jnp.where(counts, group, num_groups)
    here = jnp.append(middle, jnp.nan)[group]
    change, known = jnp.zeros(num_groups, jnp.float32), jnp.ones(num_groups, bool)
    for beside, extreme, nothing in (
        (key <= here, jax.ops.segment_max, -jnp.inf),
        (key >= here, jax.ops.segment_min, jnp.inf),
    ):
        chosen = extreme(jnp.where(beside, key, nothing), group, num_groups + 1)
        selected = jnp.where(beside & (key == chosen[group]), weights, 0.0)
        share = jax.lax.stop_gradient(selected)
        total, sums = (
            jax.ops.segment_sum(parts, group, num_groups + 1)[:num_groups]
            for parts in (share, jnp.where(share > 0, share * moved, 0.0))
        )
        known &= total > 0
        change += sums / jnp.where(total > 0, 2 * total, 1.0)
    return jnp.where(known, change, 0.0), known
