# SPDX-License-Identifier: Apache-2.0
"""Minimizers of the rows' own losses: bisection, search and kinks, derivatives.

In: a traced loss bound to its data. Out: minimizers [K, N], which depend on the targets
only, not on the scores, and can be differentiated in all that the loss reads.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from jboost.entry.collectives import (
    count_rows,
    current_shards,
    every,
    first_row,
    least,
    most,
    real_rows,
    some,
)
from jboost.entry.stages import (
    branch,
    elementwise,
    for_branches,
    is_any,
    repeat,
    repeat_while,
    runs_in_stages,
    stage,
    unless_idle,
)
from jboost.kernels.library import choose
from jboost.kernels.xla import exponent_above, power_of_two
from jboost.numerics.arrays import middle_float
from jboost.numerics.derivatives import differentiable
from jboost.numerics.exact import sum_rows
from jboost.objective.coupling import find_dependent
from jboost.objective.evaluation import (
    Kinks,
    Objective,
    gradients,
    hessian_matrices,
    loss_values,
    map_hessians,
    with_scores_first,
)
from jboost.objective.jaxprs import MANY_SCORES
from jboost.objective.minimum import GROWTH, JUMP, NOISE, Minimum, is_faded

_BISECTIONS = 34  # 32 halvings of the 2^32 float32 bit patterns, plus two


def bisect_minimum(
    slope: Callable[[Float[Array, "*P"]], Float[Array, "*P"]],
    start: Float[Array, "*P"],
    step: Float[Array, "*P"],
    *,
    wanted: Bool[Array, "*P"],
    num_probes: int = 16,
) -> Minimum:
    """Finds minima when evaluating slopes is cheap.

    Brackets on both sides at once, then bisects both edges of the flat interval over
    float32 bit patterns. The arguments are those of ``find_minimum``, but for problems
    of any shape, and slopes without rounding error.
    """
    here = slope(start)
    state = _begin_bracket(start, step, here)

    def unfinished(state):
        numpy = for_branches()
        open_problems = numpy.isnan(state.left) | numpy.isnan(state.right)
        more = numpy.asarray(state.turn) < num_probes
        return more & is_any(numpy.asarray(wanted) & open_problems)

    def grow(state):
        return _grow(state, start, tuple(map(slope, state.points)))

    found = repeat_while(unfinished, grow, state)
    bracket, flat = (found.left, found.right), (found.flat_left, found.flat_right)
    slopes = (slope(found.left), slope(found.right))
    ends, solvable, strict = _choose_ends(start, here, bracket, flat, slopes, wanted)

    def locate(nothing):
        del nothing
        edges = _bisect(slope, *ends)
        sides = tuple(map(slope, _find_sides(bracket, ends, edges)))
        beside = (slope(edges[0][0]), slope(edges[1][1]))
        return _conclude_bisection(
            start, here, bracket, edges, sides, (beside, slopes),
            (solvable, strict, wanted),
        )  # fmt: skip

    # Where no problem is solvable: "strict" does not say yet which ones are wanted.
    nothing = Minimum(start, solvable, solvable)
    return unless_idle(is_any(solvable), locate, nothing)


class _Bracket(NamedTuple):
    """Brackets of the minima of P problems; NaN for unknown points.

    Attributes:
      width: the distance of the next probes from the start.
      left, right: the nearest points of negative and of positive slope.
      flat_left, flat_right: the nearest points of zero slope on each side.
    """

    turn: Int32[Array, ""]
    width: Float[Array, "*P"]
    points: tuple[Float[Array, "*P"], Float[Array, "*P"]]
    left: Float[Array, "*P"]
    right: Float[Array, "*P"]
    flat_left: Float[Array, "*P"]
    flat_right: Float[Array, "*P"]


@elementwise
def _choose_ends(numpy, start, here, ends, flat, slopes, wanted):
    """Returns where bisection begins, which problems it solves, and the strict ones."""
    # A change of sign within the rounding error of the gradient does not count.
    noise = NOISE * _size(numpy, here)
    (left, right), (flat_left, flat_right) = ends, flat
    rises = [
        numpy.isfinite(end) & (numpy.abs(value) > noise)
        for end, value in zip(ends, slopes, strict=True)
    ]
    left_end = numpy.where(numpy.isnan(left), flat_left, left)
    right_end = numpy.where(numpy.isnan(right), flat_right, right)
    solvable = wanted & numpy.isfinite(left_end) & numpy.isfinite(right_end)
    left_end = numpy.where(solvable, left_end, start)
    right_end = numpy.where(solvable, right_end, start)
    return (left_end, right_end), solvable, rises[1] & rises[0]


@elementwise
def _find_sides(numpy, bracket, ends, edges):
    """Returns points beside a jump to zero: at the edge, and far from it; and 0."""
    (left, right), ((below, _), (_, above)) = bracket, edges
    del left
    inner = numpy.where(numpy.isnan(right), below, above)
    return inner, numpy.where(numpy.isnan(right), *ends), numpy.zeros_like(inner)


@elementwise
def _conclude_bisection(
    numpy, start, here, bracket, edges, sides, ends, masks
) -> Minimum:
    (solvable, strict, wanted), ((low, high), (fall, rise)) = masks, ends
    strict = strict | (solvable & is_faded(numpy, low, high, -fall, rise))
    (left, right), ((_, first), (last, _)) = bracket, edges
    inner, outer, middle = sides
    # If one side stays flat there is only one edge, otherwise two and their midpoint.
    edge = numpy.where(numpy.isnan(right), first, last)
    point = numpy.where(strict, first / 2 + last / 2, edge)
    one_sided = numpy.isnan(left) | numpy.isnan(right)
    # In float32, a slope that decays ends in a jump, which is faint beside that at 0.
    steepest = numpy.maximum(
        numpy.maximum(numpy.abs(outer), _size(numpy, here)), _size(numpy, middle)
    )
    jump = solvable & one_sided & (steepest > 0)
    jump &= numpy.abs(inner) >= JUMP * steepest
    point = numpy.where(solvable, point, start)
    return Minimum(point=point, strict=strict & wanted, jump=jump)


def _size(numpy, slope):
    size = numpy.abs(slope)
    return numpy.where(numpy.isfinite(size), size, 0.0)


@partial(elementwise, in_loop=True)
def _begin_bracket(numpy, start, step, here) -> _Bracket:
    none = numpy.full_like(start, numpy.nan)
    left, right = numpy.where(here < 0, start, none), numpy.where(here > 0, start, none)
    points = (start - step, start + step)
    return _Bracket(numpy.int32(0), step, points, left, right, none, none)


@partial(elementwise, in_loop=True)
def _grow(numpy, state, start, slopes) -> _Bracket:
    """Learns from the slopes at two probes, and goes farther out."""
    (down, up), (slope_down, slope_up) = state.points, slopes
    left, right, none = state.left, state.right, numpy.full_like(down, numpy.nan)
    new_left = numpy.where(slope_down < 0, down, none)
    new_right = numpy.where(slope_up > 0, up, none)
    new_flat_left = numpy.where(slope_down == 0, down, none)
    new_flat_right = numpy.where(slope_up == 0, up, none)
    # A probe that is still downhill moves the opposite end of the bracket closer.
    closer_left = numpy.isnan(right) & (slope_up < 0)
    closer_right = numpy.isnan(left) & (slope_down > 0)
    width = state.width * GROWTH
    return _Bracket(
        turn=state.turn + 1,
        width=width,
        points=(start - width, start + width),
        left=numpy.where(closer_left, up, _first(numpy, left, new_left)),
        right=numpy.where(closer_right, down, _first(numpy, right, new_right)),
        flat_left=_first(numpy, state.flat_left, new_flat_left),
        flat_right=_first(numpy, state.flat_right, new_flat_right),
    )


def _first(numpy, known, new):
    return numpy.where(numpy.isnan(known), new, known)


def _bisect(slope, left, right):
    """Returns adjacent floats around the first slope >= 0 and around the last <= 0."""

    def is_wide(state):
        numpy = for_branches()
        count, ends, points = state
        wide = [
            numpy.asarray(point) != numpy.asarray(low)
            for point, (low, _) in zip(points, ends, strict=True)
        ]
        return (numpy.asarray(count) < _BISECTIONS) & is_any(wide[0] | wide[1])

    def halve(state):
        return _halve(state, tuple(map(slope, state[2])))

    _, ends, _ = repeat_while(is_wide, halve, _begin_bisection(left, right))
    return ends


@partial(elementwise, in_loop=True)
def _begin_bisection(numpy, left, right):
    """Returns a state: steps made, ends of both brackets, their middles."""
    middle = middle_float(left, right)
    return numpy.int32(0), ((left, right), (left, right)), (middle, middle)


@partial(elementwise, in_loop=True)
def _halve(numpy, state, slopes):
    count, ((a, b), (c, d)), (first, last) = state
    rising, falling = slopes[0] >= 0, slopes[1] <= 0
    ends = (
        (numpy.where(rising, a, first), numpy.where(rising, first, b)),
        (numpy.where(falling, last, c), numpy.where(falling, d, last)),
    )
    return count + 1, ends, (middle_float(*ends[0]), middle_float(*ends[1]))


_DISTANCES = 4  # slopes are compared at 2^-10, 1, 2^10 and 2^20 times the size
_SIDE = 2.0**-20  # relative distance from a minimizer to slopes evaluated beside it
_LEAST_SIDE = 1e-36  # the same distance from 0
BLOCK = 8192  # rows per block
_MOST_ENTRIES = 2**22  # the most entries of Hessians that are in memory together
_NOWHERE = float("inf")  # stands for "no minimizer"; NaN would trip jax_debug_nans
_NONE = np.float32(0.0)
_PROBES = 12  # the farthest probe is 16^12 times as far as the first


def find_minimizers(objective: Objective, num_rows: int) -> Float[Array, "K N"]:
    """Finds the minimizer F* of each row's own loss; inf where there is none.

    F* depends only on the target and is found once. A strict change of the gradient's
    sign counts as a minimum, and so does a jump of the gradient to zero. A gradient
    that decays to zero (logistic loss at large scores) does not. For K > 1 a minimizer
    along one score is meaningful only where scores do not interact, so it is accepted
    only in rows with a diagonal Hessian.

    Rows are searched in blocks, and each block takes rows from all over the table. If
    no row of the first block has a minimum (logistic, softmax), the search stops and
    the remaining rows count as having none.
    """
    objective = objective._replace(minimizer=None)
    blocks = -(-count_rows(num_rows) // BLOCK)
    if blocks == 1:
        return _find_minimizers(objective, num_rows)
    if not runs_in_stages():
        return _search_blocks(objective, num_rows, blocks)
    num_scores = objective.loss.num_scores
    start = _start_at_target(objective.targets, num_scores, num_rows)
    if num_scores == 1 and np.asarray(_are_minima(objective, start)).all():
        return start
    first = _take_block(objective.targets, num_rows, blocks)
    found = _find_minimizers(objective._replace(targets=first), BLOCK)
    if not np.isfinite(found).any():
        return _nowhere_like(start)
    return _search_blocks(objective, num_rows, blocks)


@stage
def _take_block(targets, num_rows, blocks):
    rows = np.minimum(np.arange(BLOCK, dtype=np.int32) * blocks, num_rows - 1)
    return jax.tree.map(lambda target: target[rows], targets)


@stage
def _search_blocks(objective, num_rows, blocks):
    # Block b has rows b, b + blocks, ...; indices beyond the end repeat the last row.
    begin, own = jnp.asarray(True), -(-num_rows // BLOCK)
    if current_shards() is not None:
        begin = _search_first_block(objective, num_rows, blocks)
    index = jnp.arange(BLOCK * own, dtype=jnp.int32).reshape(BLOCK, own).T
    index = jnp.minimum(index, num_rows - 1)
    nowhere = jnp.full((objective.loss.num_scores, BLOCK), _NOWHERE, jnp.float32)

    def search(rows):
        targets = jax.tree.map(lambda target: target[rows], objective.targets)
        return _find_minimizers(objective._replace(targets=targets), BLOCK)

    def search_block(known, block):
        number, rows = block
        found = jax.lax.cond(known, search, lambda _: nowhere, rows)
        if current_shards() is None:
            known = jnp.where(number == 0, jnp.any(jnp.isfinite(found)), known)
        return known, found

    def search_each(begin, index):
        numbers = jnp.arange(own, dtype=jnp.int32)
        _, found = jax.lax.scan(search_block, begin, (numbers, index))
        return jnp.moveaxis(found, 0, 2).reshape(nowhere.shape[0], -1)[:, :num_rows]

    def search_all(begin, index):  # a GPU waits for each block
        if current_shards() is None:
            begin = jnp.any(jnp.isfinite(search(index[0])))
        none = jnp.full((nowhere.shape[0], num_rows), _NOWHERE, jnp.float32)
        return jax.lax.cond(
            begin, lambda: _find_minimizers(objective, num_rows), lambda: none
        )

    return choose(xla=search_each, cuda=search_all)(begin, index)


def _search_first_block(objective, num_rows, blocks):
    """Returns whether a row of the first block, on any shard, has a minimum."""
    start = (-first_row()) % jnp.int32(blocks)
    number = num_rows // blocks + 1
    rows = start + blocks * jnp.arange(number, dtype=jnp.int32)
    counts = jnp.append(real_rows(num_rows), False)[jnp.minimum(rows, num_rows)]
    rows = jnp.minimum(rows, num_rows - 1)
    targets = jax.tree.map(lambda target: target[rows], objective.targets)
    found = _find_minimizers(objective._replace(targets=targets), number)
    return some(jnp.any(jnp.isfinite(found) & counts[None, :]))


def _find_minimizers(objective, num_rows):
    num_scores = objective.loss.num_scores
    start = _start_at_target(objective.targets, num_scores, num_rows)
    if num_scores == 1:
        return _minimizers_from(objective, start)
    separable = _separable_rows(objective, start)

    def search(start):  # scores that do not interact can be searched simultaneously
        return _where_separable(separable, _minimizers_from(objective, start))

    return branch(is_any(separable), search, _nowhere_like, start)


@elementwise
def _where_separable(numpy, separable, found):
    return numpy.where(separable[None, :], found, _NOWHERE)


@elementwise
def _nowhere_like(numpy, points):
    return numpy.full_like(points, _NOWHERE)


def kink_slopes(
    objective: Objective, distance: Float[ArrayLike, ""] = _NONE
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Returns the magnitudes of each row's slopes beside its minimizer, for K = 1.

    The distance is added to the one that the minimizer's rounding error requires.
    """
    assert objective.minimizer is not None
    left, right = _points_beside(objective.minimizer, distance)
    return _magnitudes(gradients(objective, left), gradients(objective, right))


@elementwise
def _points_beside(numpy, point, distance):
    side = _SIDE * numpy.abs(point) + _LEAST_SIDE + distance
    return point - side, point + side


@elementwise
def _magnitudes(numpy, left, right):
    return -left[0], right[0]


def find_kinks(objective: Objective, weights: Float[Array, " N"]) -> Kinks:
    """Checks whether each row of positive weight has one kink, at its minimizer.

    For K = 1 and a piecewise linear loss. If the loss is also convex, then slopes that
    agree near the minimizer and far away from it agree everywhere in between. One of
    the two may be 0, as that of a hinge loss.
    """
    assert objective.minimizer is not None
    minimizer = objective.minimizer
    beside = kink_slopes(objective)
    one, size = _begin_kinks(minimizer, beside, weights)

    def compare(number, same):
        far = kink_slopes(objective, _far(size, number))
        return _are_same(same, far, beside)

    one = repeat(_DISTANCES, compare, one)
    return _conclude_kinks(one, beside, weights)


@stage
def _begin_kinks(minimizer, beside, weights):
    """Returns a mask of rows with a kink, and the largest minimizer that counts."""
    (left, right), minimizer, counts = beside, minimizer[0], weights > 0
    known = counts & jnp.isfinite(minimizer)
    size = most(jnp.max(jnp.where(known, jnp.abs(minimizer), 0.0)))
    one = jnp.isfinite(minimizer) & (left >= 0) & (right >= 0)
    return one & (left + right > 0) & jnp.isfinite(left + right), size


@stage
def _far(size, number):
    return size * jnp.exp2(10.0 * jnp.float32(number) - 10.0)


@elementwise
def _are_same(numpy, same, far, beside):
    return same & (far[0] == beside[0]) & (far[1] == beside[1])


@stage
def _conclude_kinks(one, beside, weights):
    (left, right), counts = beside, weights > 0
    ends = [
        (
            least(jnp.min(jnp.where(counts, a, jnp.inf))),
            most(jnp.max(jnp.where(counts, a, 0.0))),
        )
        for a in (left, right)
    ]
    same = (ends[0][0] == ends[0][1]) & (ends[1][0] == ends[1][1])
    kind = jnp.where(every(jnp.all(one | ~counts)), 1 + same.astype(jnp.int32), 0)
    slopes = jnp.where(counts & one, weights * (left + right), 0.0)
    scale = exact_scale(sum_rows(slopes))
    return Kinks(kind, ends[0][0], ends[1][0], scale)


def exact_scale(total: Float[Array, ""]) -> Float[Array, ""]:
    """Returns a power of two that scales a sum of ``total`` to less than 2^40."""
    # The scaled sum stays below 2^39; rounding adds at most 1 per row.
    return power_of_two(jnp.clip(39 - exponent_above(total), -126, 126))


@elementwise
def _start_at_target(numpy, targets, num_scores, num_rows):
    """Starts the search for F* at the target if it fits and is finite, else at 0."""
    leaves = jax.tree.leaves(targets)
    shape = (num_rows,) if num_scores == 1 else (num_rows, num_scores)
    if len(leaves) == 1 and leaves[0].shape == shape and leaves[0].dtype != np.bool_:
        start = leaves[0].astype(np.float32)
        return with_scores_first(numpy.where(numpy.isfinite(start), start, 0.0))
    zeros = numpy.zeros((num_scores, num_rows), np.float32)
    # The barrier keeps XLA from constant-folding the loss of N rows at compile time.
    return zeros if numpy is np else jax.lax.optimization_barrier(zeros)


def _minimizers_from(objective, begin):
    """Returns where each slope changes its sign; inf where it does not."""

    def search(turn, found):
        start, step, wanted = _begin_search(turn, begin, found)

        def bisect(found):
            slope = partial(gradients, objective)
            result = bisect_minimum(
                slope, start, step, wanted=wanted, num_probes=_PROBES
            )
            return _add_found(found, result)

        return unless_idle(is_any(wanted), bisect, found)

    found = _keep_minima(begin, _are_minima(objective, begin))
    return _mark_missing(repeat(2, search, found))


def _are_minima(objective, points):
    left, right = _points_beside(points, _NONE)
    return _change_sign(gradients(objective, left), gradients(objective, right))


@elementwise
def _change_sign(numpy, left, right):
    return (left < 0) & (right > 0)


@elementwise
def _keep_minima(numpy, points, known):
    return numpy.where(known, points, numpy.nan)


@elementwise
def _begin_search(numpy, turn, begin, found):
    # At the target the gradient can be infinite (Poisson) or underflow; zero is a
    # reasonable score for every loss with a link, so it is the second start.
    start = numpy.where(turn == 0, begin, 0.0)
    wanted = numpy.isnan(found) & ((turn == 0) | (begin != 0))
    return start, numpy.maximum(numpy.abs(start) * 2.0**-10, 2.0**-20), wanted


@elementwise
def _add_found(numpy, found, result):
    return numpy.where(result.strict | result.jump, result.point, found)


@elementwise
def _mark_missing(numpy, found):
    return numpy.where(numpy.isnan(found), _NOWHERE, found)


def _separable_rows(objective, start):
    """Returns a mask of rows with a diagonal Hessian at two test points."""
    points = _test_points(start)
    num_scores, num_rows = start.shape
    if num_scores > MANY_SCORES:
        return _none_depends(*(find_dependent(objective, each) for each in points))
    if num_rows * num_scores**2 <= _MOST_ENTRIES:
        return _are_diagonal(*(hessian_matrices(objective, each) for each in points))
    # With many scores, the Hessians of all rows would not fit into memory.
    one, other = (map_hessians(objective, each, _mark_diagonal) for each in points)
    return _are_both(one, other)


@elementwise
def _test_points(numpy, start):
    return start + 0.5, start - 1.5


@elementwise
def _are_diagonal(numpy, *hessians):
    different = ~np.eye(hessians[0].shape[1], dtype=bool)
    entries = [numpy.where(different[None], each, 0.0) == 0 for each in hessians]
    return numpy.all(entries[0] & entries[1], axis=(1, 2))


def _mark_diagonal(rows):
    different = ~jnp.eye(rows.shape[1], dtype=bool)
    return jnp.all(jnp.where(different[None], rows, 0.0) == 0, axis=(1, 2))


@elementwise
def _none_depends(numpy, one, other):
    return ~numpy.any(one | other, axis=0)


@elementwise
def _are_both(numpy, one, other):
    del numpy
    return one & other


_FARTHER = 1024.0  # times that distance: there, a smooth slope rises 1024 times as much
_SAME = 0.1  # share of the rise farther away that only a slope with a jump reaches
_JUMP = 2.0**-10  # share of the rise far away; a smaller jump may be rounding


def locate_minimizers(objective: Objective, num_rows: int) -> Float[Array, "K N"]:
    """Returns the minimizers of :func:`find_minimizers`, with derivatives.

    With g and h the derivatives of a row's loss l at its minimizer F*, and d the change
    of a quantity at a fixed score: dF* = -dg / h. At a kink, where l is continuous and
    g jumps, the kink moves by -(dl(F*+) - dl(F*-)) / (g(F*+) - g(F*-)); the same
    quotient, at a greater distance, replaces -dg / h where h is 0. Missing minimizers
    do not move.
    """
    loss, arrays = objective.loss, objective._replace(loss=None, minimizer=None)
    return differentiable(
        partial(_find, loss, num_rows), partial(_derive, loss), arrays
    )


def _find(loss, num_rows, arrays):
    return find_minimizers(arrays._replace(loss=loss), num_rows)


def _derive(loss, minimizer, operands, tangents):
    known = jnp.isfinite(minimizer)
    point = jnp.where(known, minimizer, 0.0)

    def slope(arrays):
        return gradients(arrays._replace(loss=loss), point)

    _, change = jax.jvp(slope, operands, tangents)
    objective = operands[0]._replace(loss=loss)
    matrices = hessian_matrices(objective, point)
    hessian = jnp.diagonal(matrices, axis1=1, axis2=2).T
    smooth = (hessian > 0) & jnp.isfinite(hessian)

    def along(k):
        """Returns a mask of rows at a kink of score k, and moves of all minimizers."""
        kinked = find_kinked(objective, point, k)
        side = jnp.where(kinked, _near(point[k]), 1 + jnp.abs(point[k]))

        def values(arrays):
            above, below = (
                loss_values(arrays._replace(loss=loss), _add(point, k, distance))
                for distance in (side, -side)
            )
            return above - below

        _, change = jax.jvp(values, operands, tangents)
        jump = _rise(objective, point, k, side)
        moves = (jump > 0) & jnp.isfinite(jump)
        return kinked, jnp.where(moves, -change / jnp.where(moves, jump, 1.0), 0.0)

    kinked, beside = jax.lax.map(along, jnp.arange(len(point), dtype=jnp.int32))
    smooth &= ~kinked
    inside = -change / jnp.where(smooth, hessian, 1.0)
    return jnp.where(known, jnp.where(smooth, inside, beside), 0.0)


def find_kinked(
    objective: Objective, point: Float[Array, "K N"], k: Int32[Array, ""]
) -> Bool[Array, " N"]:
    """Returns a mask of the rows where the slope along score k jumps at a point."""
    near = _near(point[k])
    jump = _rise(objective, point, k, near)
    farther = _rise(objective, point, k, _FARTHER * near)
    away = _rise(objective, point, k, 1 + jnp.abs(point[k]))
    least = jnp.maximum(_SAME * farther, _JUMP * away)
    return jax.lax.stop_gradient((jump > 0) & (jump > least))


def _near(point):
    return _SIDE * jnp.abs(point) + _LEAST_SIDE


def _rise(objective, point, k, distance):
    """Returns the rise of the slope from one side of a point to the other."""
    above, below = (
        gradients(objective, _add(point, k, d))[k] for d in (distance, -distance)
    )
    return above - below


def _add(point, k, distance):
    along = (jnp.arange(len(point), dtype=jnp.int32) == k)[:, None]
    return point + jnp.where(along, distance[None], 0.0)
