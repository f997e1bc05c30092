# SPDX-License-Identifier: Apache-2.0
"""Minimizes many functions of one variable at once, given their slopes.

A minimum is the point where a slope changes from negative to positive. A row's own
minimizer, the exact value of a leaf, the line search of a tree and the initial score
are such problems: N, L, 1 and 1 of them. Slopes need not be continuous. Where a slope
is zero on an interval (the median of an even count), the midpoint is the result.

One evaluation of slopes can cost a pass over all rows. Therefore one loop evaluates one
slope per problem and iteration, and each problem is in its own phase:

    bracket    left: slope < 0 ...................... right: slope > 0
    narrow     left -> regula falsi (bisection where that is slow) <- right
    edges      left ->| zero_left   slope = 0   zero_right |<- right
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int8, Int32

from jboost.entry.stages import elementwise, for_branches, is_any, repeat_while
from jboost.kernels.xla import power_of_two, round_alone
from jboost.numerics.arrays import middle_float

GROWTH = 16.0  # factor from one probe to the next while bracketing
_TURNS = 128  # iterations after the probes; bisection alone needs 2 * 32
NOISE = 1e-6  # relative to the slope at the start: smaller slopes may be rounding
_FAINT = 64.0  # times the noise: the root of a fainter slope is not located further
_FADED = 2.0**-20  # relative to the steepest slope seen: zero to float32 precision
# A slope that drops to 0 from at least this fraction of the steepest slope seen jumps
# to zero; a smaller one decays.
JUMP = 1e-3
RESOLVED = 2.0**-8  # slopes beside a root, relative to those away, if it is real
_CLOSE = 2.0**-22  # relative distance of about two floats
_PATIENCE = 3  # moves of the same end after which regula falsi counts as slow


class Minimum(NamedTuple):
    """Holds the minima of P problems.

    Attributes:
      point: the minimizer, or the start where none was found.
      strict: whether the slope is negative to its left and positive to its right.
      jump: whether the slope jumps to zero on one side and was zero at every point
        evaluated beyond.
    """

    point: Float[Array, "*P"]
    strict: Bool[Array, "*P"]
    jump: Bool[Array, "*P"]


class _State(NamedTuple):
    """Holds the search state of P problems; NaN for unknown numbers.

    Attributes:
      point: the point of the next slope to evaluate.
      width: distance of the next probe from the start, while bracketing.
      left, right: nearest points of negative and of positive slope, or bounds.
      zero_left, zero_right: ends of the interval where slopes were found to be 0.
      fall, rise: magnitudes of the steepest negative and positive slope seen.
      first: the slope at the start.
      run: number of positive slopes in a row; negative for negative slopes.
      near: edges of the flat interval that were tested close by: 0 none, 1 the left
        one, 2 both.
    """

    turn: Int32[Array, ""]
    point: Float[Array, " P"]
    width: Float[Array, " P"]
    left: Float[Array, " P"]
    right: Float[Array, " P"]
    left_slope: Float[Array, " P"]
    right_slope: Float[Array, " P"]
    zero_left: Float[Array, " P"]
    zero_right: Float[Array, " P"]
    fall: Float[Array, " P"]
    rise: Float[Array, " P"]
    first: Float[Array, " P"]
    run: Int8[Array, " P"]
    near: Int8[Array, " P"]
    done: Bool[Array, " P"]


def find_minimum(
    slope: Callable[[Float[Array, " P"]], Any],
    start: Float[Array, " P"],
    step: Float[Array, " P"],
    *,
    low: Float[Array, " P"],
    high: Float[Array, " P"],
    wanted: Bool[ArrayLike, " P"],
    num_probes: int = 16,
) -> Minimum:
    """Finds minima when evaluating slopes is expensive.

    Brackets each minimum with growing steps, narrows the bracket, and locates both
    edges of an interval of zero slope.

    Args:
      slope: returns the derivatives at one point per problem, and the magnitude [P] of
        their rounding error; slopes up to this magnitude count as zero.
      step: distance of the first probe, > 0; each further probe is 16 times as far.
      low, high: bounds known to enclose a minimum, or -inf and +inf.
      wanted: mask of the problems to solve; the loop ends as soon as these are done.
      num_probes: number of probes on a side before giving up on it.
    """
    bounds = (start, step, low, high)

    def unfinished(state):
        few = for_branches().asarray(state.turn) < _TURNS + 2 * num_probes
        return few & is_any(~for_branches().asarray(state.done))

    def ask(state):
        return _advance(state, slope(state.point), *bounds, num_probes)

    state = repeat_while(unfinished, ask, _begin(start, step, wanted))
    return _conclude(state, start, low, high, wanted)


@elementwise
def _begin(numpy, start, step, wanted):
    none, nothing = numpy.full_like(start, numpy.nan), numpy.zeros_like(start)
    count = numpy.zeros(start.shape, numpy.int8)
    return _State(
        turn=numpy.int32(0), point=start, width=step, left=none, right=none,
        left_slope=none, right_slope=none, zero_left=none, zero_right=none,
        fall=nothing, rise=nothing, first=none, run=count, near=count,
        done=~wanted,
    )  # fmt: skip


@elementwise
def _advance(numpy, state, found, start, step, low, high, num_probes):
    """Learns from a slope and its rounding error, and chooses the next point."""
    # The barriers keep XLA from recomputing the slopes for each use of them.
    value, noise = _keep(numpy, found)
    # An infinite slope has a valid sign although its rounding error is infinite.
    noise = numpy.where(numpy.isfinite(noise), noise, 0.0)
    state = _learn(numpy, state, value, noise, low, high)
    state = _keep(numpy, state)
    farthest = step * np.float32(GROWTH**num_probes)
    return _plan(numpy, state, noise, start, farthest, low, high)


def _keep(numpy, operands):
    return operands if numpy is np else jax.lax.optimization_barrier(operands)


def _learn(numpy, state, value, noise, low, high):
    """Updates the state with the slope at the current point."""
    point = state.point
    value = numpy.where(numpy.abs(value) <= noise, 0.0, value)
    size = numpy.where(numpy.isfinite(value), numpy.abs(value), 0.0)
    bracketed = ~(numpy.isnan(state.left) | numpy.isnan(state.right))
    # Between slopes of opposite signs, NaN is treated like the slope at a kink.
    flat = (value == 0) | (numpy.isnan(value) & bracketed)
    # A bound ends the search on its side: a minimum lies within.
    left = ((value < 0) | (point <= low)) & ~(point < state.left)
    right = ((value > 0) | (point >= high)) & ~(point > state.right)
    # A nonzero slope beyond a flat interval shows that it was a ledge, not a minimum.
    ledge = (value < 0) & (point > state.zero_left)
    ledge |= (value > 0) & (point < state.zero_right)
    zero_left = numpy.where(ledge, numpy.nan, state.zero_left)
    zero_right = numpy.where(ledge, numpy.nan, state.zero_right)
    run = numpy.where(value > 0, numpy.maximum(state.run, 0) + 1, 0)
    run = numpy.where(value < 0, numpy.minimum(state.run, 0) - 1, run)
    return state._replace(
        turn=state.turn + 1,
        left=numpy.where(left, point, state.left),
        right=numpy.where(right, point, state.right),
        left_slope=numpy.where(left, value, state.left_slope),
        right_slope=numpy.where(right, value, state.right_slope),
        zero_left=numpy.where(flat, numpy.fmin(zero_left, point), zero_left),
        zero_right=numpy.where(flat, numpy.fmax(zero_right, point), zero_right),
        fall=numpy.maximum(state.fall, numpy.where(value < 0, size, 0.0)),
        rise=numpy.maximum(state.rise, numpy.where(value > 0, size, 0.0)),
        first=numpy.where(state.turn == 0, value, state.first),
        run=run.astype(np.int8),
        near=numpy.where(ledge, np.int8(0), state.near),
    )


def _plan(numpy, state, noise, start, farthest, low, high):
    """Chooses the next point of each problem, or marks the problem as done."""
    no_left, no_right = numpy.isnan(state.left), numpy.isnan(state.right)
    probing = (no_left | no_right) & (state.width < farthest)
    # While neither end is known, probe upward, downward, then farther out.
    up = no_right & (~no_left | ~(state.point > start))
    width = _width(numpy, state, start)
    probe = numpy.where(
        up, numpy.minimum(start + width, high), numpy.maximum(start - width, low)
    )
    width = numpy.where(up & no_left, width, GROWTH * width)
    inner, narrowed = _narrow(numpy, state, noise)
    edge, near, edged = _edge(numpy, state, noise)
    flat = ~numpy.isnan(state.zero_left)
    point = numpy.where(probing, probe, numpy.where(flat, edge, inner))
    finished = ~probing & numpy.where(flat, edged, no_left | no_right | narrowed)
    done = state.done | finished
    return state._replace(
        point=numpy.where(done, state.point, point),
        width=numpy.where(probing, width, state.width),
        near=numpy.where(probing | ~flat, state.near, near),
        done=done,
    )


def _width(numpy, state, start):
    """Returns the distance of the next probe from the start.

    After the first two slopes, this is twice the distance of the zero of the line
    through them; otherwise it is 16 times the previous distance.
    """
    end = numpy.where(numpy.isnan(state.left), state.right, state.left)
    value = numpy.where(numpy.isnan(state.left), state.right_slope, state.left_slope)
    root = numpy.abs(end - start) * (state.first / (state.first - value))
    useful = (numpy.abs(state.run) == 2) & (root > 0)
    width = numpy.clip(2 * root, state.width * (2 / GROWTH), state.width)
    return numpy.where(useful, width, state.width)


def _narrow(numpy, state, noise):
    """Returns a point inside the bracket, and whether none is left.

    The point comes from regula falsi with the Illinois rule (Dowell and Jarratt 1971):
    the slope at the end that stays is halved with every move of the other end, because
    otherwise that end could stay forever.
    """
    left, right, run = state.left, state.right, state.run.astype(np.int32)
    fall = -state.left_slope * _halve_often(numpy, run - 1)
    rise = state.right_slope * _halve_often(numpy, -run - 1)
    falsi = left + round_alone((right - left) * (fall / (fall + rise)))
    # Keep away from the ends: a point closer than this would gain almost nothing.
    falsi = numpy.maximum(falsi, left + _CLOSE * numpy.abs(left))
    falsi = numpy.minimum(falsi, right - _CLOSE * numpy.abs(right))
    useful = (falsi > left) & (falsi < right) & (numpy.abs(run) < _PATIENCE)
    middle = middle_float(left, right)
    # Near 0, float32 is finer than problems usually need, and bisecting bit patterns is
    # slow. Alternate with the arithmetic mean, in an aperiodic (Thue-Morse) order that
    # cannot synchronize with the behavior of a slope.
    between = numpy.where(_is_odious(state.turn), left / 2 + right / 2, middle)
    faint = _FAINT * noise
    lost = (-state.left_slope <= faint) & (state.right_slope <= faint)
    none = (middle == left) | (middle == right) | lost
    return numpy.where(useful, falsi, between), none


def _halve_often(numpy, number):
    """Returns 2^-number, 1 for negative ones."""
    return power_of_two(-numpy.clip(number, 0, 126))


def _is_odious(turn):
    """Returns whether a number up to 255 has an odd number of ones."""
    for shift in (4, 2, 1):
        turn = turn ^ (turn >> shift)
    return turn & 1 == 1


def _edge(numpy, state, noise):
    """Returns a point outside the flat interval, and whether both edges are known.

    An edge is known if adjacent floats enclose it, or if the slope beyond it is too
    small to distinguish from zero. Smooth slopes become that small close to the
    interval, so each edge is first tested close by.
    """
    closed, points = [], []
    for end, value, zero, most in (
        (state.left, -state.left_slope, state.zero_left, state.fall),
        (state.right, state.right_slope, state.zero_right, state.rise),
    ):
        one_sided = numpy.isnan(state.left) | numpy.isnan(state.right)
        tiny = numpy.maximum(
            _FAINT * noise, numpy.where(one_sided, JUMP, _FADED) * most
        )
        middle = middle_float(numpy.minimum(end, zero), numpy.maximum(end, zero))
        near = zero + round_alone((end - zero) * (tiny / (2 * value)))
        # The second test uses the geometric mean of the distances.
        other = state.zero_right if not points else state.zero_left
        halfway = numpy.sqrt(numpy.abs(end - other))
        halfway = round_alone(halfway * numpy.sqrt(numpy.abs(zero - other)))
        halfway = other + numpy.copysign(halfway, end - other)
        near = numpy.where(state.near <= len(points), near, halfway)
        useful = (near - zero) * (end - near) > 0
        closed.append(
            numpy.isnan(end) | (middle == end) | (middle == zero) | (value <= tiny)
        )
        points.append(numpy.where(useful, near, middle))
    # Test both edges close by before bisecting either.
    on_left = ~closed[0] & (closed[1] | (state.near != 1))
    near = numpy.where(on_left, numpy.maximum(state.near, 1), 2)
    near = numpy.where(on_left & (state.near > 0), 2, near).astype(np.int8)
    return numpy.where(on_left, *points), near, closed[0] & closed[1]


def is_faded(numpy: Any, left: Any, right: Any, fall: Any, rise: Any) -> Any:
    """Returns whether slopes beside a root are faint next to those farther away."""
    beside, away = (
        numpy.maximum(numpy.abs(left), numpy.abs(right)),
        numpy.minimum(fall, rise),
    )
    return (away > 0) & (beside <= RESOLVED * away)


@elementwise
def _conclude(numpy, state, start, low, high, wanted):
    no_left, no_right = numpy.isnan(state.left), numpy.isnan(state.right)
    flat = ~numpy.isnan(state.zero_left)
    # A change of sign within the rounding error of the first slope does not count.
    doubt = NOISE * numpy.where(
        numpy.isfinite(state.first), numpy.abs(state.first), 0.0
    )
    falls = (state.fall > doubt) | (state.left == low)
    rises = (state.rise > doubt) | (state.right == high)
    # Unless slopes fade toward it, as they do not where they are rounding errors.
    faded = is_faded(numpy, state.left_slope, state.right_slope, state.fall, state.rise)
    strict = wanted & ~no_left & ~no_right & ((falls & rises) | faded)
    ends = numpy.where(flat, state.zero_left, state.left)
    ends = ends / 2 + numpy.where(flat, state.zero_right, state.right) / 2
    # If one side stays flat there is only one edge, otherwise two and their midpoint.
    edge = numpy.where(no_right, state.zero_left, state.zero_right)
    steepest = numpy.maximum(state.fall, state.rise)
    inner = numpy.where(no_right, -state.left_slope, state.right_slope)
    jump = wanted & flat & (no_left ^ no_right)
    jump &= (inner >= JUMP * steepest) & (steepest > 0)
    point = numpy.where(strict, ends, numpy.where(jump, edge, start))
    return Minimum(point=point, strict=strict, jump=jump)
