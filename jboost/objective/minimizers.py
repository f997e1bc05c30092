# SPDX-License-Identifier: Apache-2.0
"""Finds the minimizer of each row's own loss, and its kink there.

In: a traced loss bound to its data. Out: minimizers [K, N], and for piecewise linear
losses the slopes beside them. Both depend on the targets only, not on the scores.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jboost.kernels.float_bits import exponent_above, power_of_two
from jboost.numerics.sums import sum_rows
from jboost.objective.evaluation import (
    BLOCK,
    Kinks,
    Objective,
    gradients,
    hessian_matrices,
    with_scores_first,
)
from jboost.objective.minimum import bisect_minimum

_DISTANCES = 4  # slopes are compared at 2^-10, 1, 2^10 and 2^20 times the size
_SIDE = 2.0**-20  # relative distance from a minimizer at which slopes are evaluated
_NOWHERE = float("inf")  # stands for "no minimizer"; NaN would trip jax_debug_nans
_PROBES = 12  # the farthest probe is 16^12 times as far as the first


def find_minimizers(objective: Objective, num_rows: int) -> Float[Array, "K N"]:
    """Finds the minimizer F* of each row's own loss; inf where there is none.

    F* depends only on the target and is found once. A strict change of the gradient's
    sign counts as a minimum, and so does a jump of the gradient to zero. A gradient
    that decays to zero (logistic loss at large scores) does not. For K > 1 a minimizer
    along one score is meaningful only where scores do not interact, so it is accepted
    only in rows whose off-diagonal Hessian is zero.

    Rows are searched in blocks, and each block takes rows from all over the table. If
    no row of the first block has a minimum (logistic, softmax), the search stops and
    the remaining rows count as having none.
    """
    objective = objective._replace(minimizer=None)
    blocks = -(-num_rows // BLOCK)
    if blocks == 1:
        return _find_minimizers(objective, num_rows)
    # Block b has rows b, b + blocks, ...; indices beyond the end repeat the last row.
    every = jnp.arange(BLOCK * blocks, dtype=jnp.int32).reshape(BLOCK, blocks).T
    every = jnp.minimum(every, num_rows - 1)
    nowhere = jnp.full((objective.loss.num_scores, BLOCK), _NOWHERE, jnp.float32)

    def search(rows):
        targets = jax.tree.map(lambda target: target[rows], objective.targets)
        return _find_minimizers(objective._replace(targets=targets), BLOCK)

    def search_block(some, block):
        number, rows = block
        found = jax.lax.cond(some, search, lambda _: nowhere, rows)
        return jnp.where(number == 0, jnp.any(jnp.isfinite(found)), some), found

    numbers = jnp.arange(blocks, dtype=jnp.int32)
    _, found = jax.lax.scan(search_block, jnp.asarray(True), (numbers, every))
    return jnp.moveaxis(found, 0, 2).reshape(nowhere.shape[0], -1)[:, :num_rows]


def _find_minimizers(objective, num_rows):
    num_scores = objective.loss.num_scores
    start = _start_at_target(objective.targets, num_scores, num_rows)
    if num_scores == 1:

        def slope(points):
            return gradients(objective, points[None, :])[0]

        return _minimizers_from(slope, start[0])[None, :]
    separable = _separable_rows(objective, start)

    def slopes(points):  # scores that do not interact can be searched simultaneously
        return gradients(objective, points.reshape(start.shape)).reshape(-1)

    def search(start):
        found = _minimizers_from(slopes, start.reshape(-1)).reshape(start.shape)
        return jnp.where(separable[None, :], found, _NOWHERE)

    nowhere = jnp.full_like(start, _NOWHERE)
    return jax.lax.cond(jnp.any(separable), search, lambda _: nowhere, start)


def kink_slopes(
    objective: Objective, distance: Float[ArrayLike, ""] = 0.0
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Returns the magnitudes of each row's slopes beside its minimizer, for K = 1.

    Args:
      distance: distance from the minimizer, added to the distance that its rounding
        error requires.
    """
    assert objective.minimizer is not None
    side = _SIDE * jnp.abs(objective.minimizer) + 1e-12 + distance
    left = -gradients(objective, objective.minimizer - side)[0]
    return left, gradients(objective, objective.minimizer + side)[0]


def find_kinks(objective: Objective, weights: Float[Array, " N"]) -> Kinks:
    """Checks whether each row of positive weight has one kink, at its minimizer.

    For K = 1 and a piecewise linear loss. If the loss is also convex, then slopes that
    agree near the minimizer and far away from it agree everywhere in between.
    """
    assert objective.minimizer is not None
    minimizer = objective.minimizer[0]
    counts = weights > 0
    left, right = kink_slopes(objective)
    size = jnp.max(jnp.where(counts & jnp.isfinite(minimizer), jnp.abs(minimizer), 0.0))

    def compare(number, same):
        distance = size * jnp.exp2(10.0 * jnp.float32(number) - 10.0)
        far_left, far_right = kink_slopes(objective, distance)
        return same & (far_left == left) & (far_right == right)

    one = jnp.isfinite(minimizer) & (left > 0) & (right > 0)
    one &= jnp.isfinite(left + right)
    one = jax.lax.fori_loop(0, _DISTANCES, compare, one)
    ends = [
        (jnp.min(jnp.where(counts, a, jnp.inf)), jnp.max(jnp.where(counts, a, 0.0)))
        for a in (left, right)
    ]
    same = (ends[0][0] == ends[0][1]) & (ends[1][0] == ends[1][1])
    kind = jnp.where(jnp.all(one | ~counts), jnp.where(same, 2, 1), 0)
    slopes = jnp.where(counts & one, weights * (left + right), 0.0)
    scale = exact_scale(sum_rows(slopes))
    return Kinks(kind, ends[0][1], ends[1][1], scale)


def exact_scale(total: Float[Array, ""]) -> Float[Array, ""]:
    """Returns a power of two that scales a sum of ``total`` to less than 2^40."""
    # The scaled sum stays below 2^39; rounding adds at most 1 per row.
    return power_of_two(jnp.clip(39 - exponent_above(total), -126, 126))


def _start_at_target(targets, num_scores, num_rows):
    """Returns the start of the search for F*: the target if it fits, otherwise 0."""
    leaves = jax.tree.leaves(targets)
    shape = (num_rows,) if num_scores == 1 else (num_rows, num_scores)
    if len(leaves) == 1 and leaves[0].shape == shape and leaves[0].dtype != jnp.bool_:
        return with_scores_first(leaves[0].astype(jnp.float32))
    # The barrier keeps XLA from constant-folding the loss of N rows at compile time.
    zeros = jnp.zeros((num_scores, num_rows), jnp.float32)
    return jax.lax.optimization_barrier(zeros)


def _minimizers_from(slope, begin):
    """Returns where each slope changes its sign; inf where it does not."""
    side = _SIDE * jnp.abs(begin) + 1e-12
    at_target = (slope(begin - side) < 0) & (slope(begin + side) > 0)

    def search(turn, found):
        # At the target the gradient can be infinite (Poisson) or underflow; zero is a
        # reasonable score for every loss with a link, so it is the second start.
        start = jnp.where(turn == 0, begin, 0.0)
        wanted = jnp.isnan(found) & ((turn == 0) | (begin != 0))
        step = jnp.maximum(jnp.abs(start) * 2.0**-10, 2.0**-20)
        result = bisect_minimum(slope, start, step, wanted=wanted, num_probes=_PROBES)
        return jnp.where(result.strict | result.jump, result.point, found)

    found = jnp.where(at_target, begin, jnp.nan)
    found = jax.lax.fori_loop(0, 2, search, found)
    return jnp.where(jnp.isnan(found), _NOWHERE, found)


def _separable_rows(objective, start):
    """Returns a mask of rows whose Hessian is diagonal at two test points."""
    different = ~jnp.eye(start.shape[0], dtype=bool)
    separable = jnp.ones(start.shape[1], bool)
    for point in (start + 0.5, start - 1.5):
        entries = jnp.where(different[None], hessian_matrices(objective, point), 0.0)
        separable &= jnp.all(entries == 0, axis=(1, 2))
    return separable
