# SPDX-License-Identifier: Apache-2.0
"""Minimizes many functions of one variable whose slopes cost next to nothing.

In: a function that evaluates the slope of each problem at one point. Out: minima, as
``minimum`` defines them. The minimizers of the rows' own losses
are such problems: millions of them, independent of one another.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.stages import (
    elementwise,
    for_branches,
    is_any,
    repeat_while,
    unless_idle,
)
from jboost.numerics.floats import middle_float
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
    float32 bit patterns.

    Args:
      slope, start, step, wanted, num_probes: as for ``find_minimum``, but problems may
        have any shape, and slopes no rounding error.
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
    """What is known about P problems; NaN for unknown points.

    Attributes:
      turn: number of probes on each side.
      width: distance of the next probes from the start.
      points: the next probes.
      left, right: nearest points of negative and of positive slope.
      flat_left, flat_right: nearest points of zero slope on each side.
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


@elementwise
def _begin_bracket(numpy, start, step, here) -> _Bracket:
    none = numpy.full_like(start, numpy.nan)
    left, right = numpy.where(here < 0, start, none), numpy.where(here > 0, start, none)
    points = (start - step, start + step)
    return _Bracket(numpy.int32(0), step, points, left, right, none, none)


@elementwise
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


@elementwise
def _begin_bisection(numpy, left, right):
    """Returns a state: steps made, ends of both brackets, their middles."""
    middle = middle_float(left, right)
    return numpy.int32(0), ((left, right), (left, right)), (middle, middle)


@elementwise
def _halve(numpy, state, slopes):
    count, ((a, b), (c, d)), (first, last) = state
    rising, falling = slopes[0] >= 0, slopes[1] <= 0
    ends = (
        (numpy.where(rising, a, first), numpy.where(rising, first, b)),
        (numpy.where(falling, last, c), numpy.where(falling, d, last)),
    )
    return count + 1, ends, (middle_float(*ends[0]), middle_float(*ends[1]))
