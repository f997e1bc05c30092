# SPDX-License-Identifier: Apache-2.0
"""Finds minima of many functions of one number at once, from their slopes.

In: a function that gives the slopes at one point for each problem. Out: where each
slope turns from negative to positive. A row's own minimiser, a leaf's exact value,
a tree's line search and the initial score are all this problem, with N, L, 1 and 1
of them. Derivative values need not be continuous: where a slope is zero on an
interval (the median of an even count), the interval's midpoint is taken.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jboost.floats import middle_float

_GROWTH = 4.0  # factor from one probe to the next while bracketing
_BISECTIONS = 34  # halvings of the 2^32 float32 bit patterns, and two to spare
_NOISE = 1e-6  # of the slope at the start: what rounding can fake
_JUMP = (
    1e-3  # a slope that drops to 0 by this share of the steepest seen jumps, not fades
)


class Minimum(NamedTuple):
    """Minima of P problems.

    Attributes:
      point: the minimiser; the start where none was found.
      strict: the slope is negative to the left and positive to the right of it.
      jump: on one side the slope jumps to zero, and stays there as far as seen.
    """

    point: Float[Array, " P"]
    strict: Bool[Array, " P"]
    jump: Bool[Array, " P"]


def find_minimum(
    slope: Callable[[Float[Array, " P"]], Float[Array, " P"]],
    start: Float[Array, " P"],
    step: Float[Array, " P"],
    *,
    low: Float[Array, " P"],
    high: Float[Array, " P"],
    wanted: Bool[Array, " P"],
    num_probes: int = 32,
) -> Minimum:
    """Brackets by growing steps, then bisects both ends of the flat set.

    Args:
      slope: derivatives at one point per problem; exact zeros mean "flat".
      start: where to begin.
      step: distance of the first probe, > 0; each further one is 4 times as far.
      low, high: bounds known to enclose a minimum, or -inf and +inf.
      wanted: problems to solve; the loops end as soon as these are done.
      num_probes: how often to grow before giving up on a side.
    """
    left, right, flat_left, flat_right = _bracket(
        slope, start, step, low, high, wanted, num_probes
    )
    here = jnp.abs(slope(start))
    here = jnp.where(jnp.isfinite(here), here, 0.0)
    # A change of sign within the gradient's rounding is none.
    noise = _NOISE * here
    strict = _rises(slope, right, high, noise) & _rises(slope, left, low, noise)
    left_end = jnp.where(jnp.isnan(left), flat_left, left)
    right_end = jnp.where(jnp.isnan(right), flat_right, right)
    solvable = wanted & jnp.isfinite(left_end) & jnp.isfinite(right_end)
    left_end = jnp.where(solvable, left_end, start)
    right_end = jnp.where(solvable, right_end, start)
    (below, first), (last, above) = _bisect(slope, left_end, right_end)
    # With one side flat for ever there is one edge, else two and their midpoint.
    edge = jnp.where(jnp.isnan(right), first, last)
    point = jnp.where(strict, first / 2 + last / 2, edge)
    inner = jnp.where(jnp.isnan(right), below, above)
    one_sided = jnp.isnan(left) | jnp.isnan(right)
    outer = jnp.where(jnp.isnan(right), left_end, right_end)
    steepest = jnp.maximum(jnp.abs(slope(outer)), here)
    jump = solvable & one_sided & (steepest > 0)
    jump &= jnp.abs(slope(inner)) >= _JUMP * steepest
    point = jnp.where(solvable, point, start)
    return Minimum(point=point, strict=strict & wanted, jump=jump)


def _bracket(slope, start, step, low, high, wanted, num_probes):
    """Nearest points of negative and of positive slope, flat ones beyond."""
    none = jnp.full_like(start, jnp.nan)
    here = slope(start)
    found = (jnp.where(here < 0, start, none), jnp.where(here > 0, start, none))

    def unfinished(state):
        probe, _, left, right, _, _ = state
        open_problems = wanted & (jnp.isnan(left) | jnp.isnan(right))
        return (probe < num_probes) & jnp.any(open_problems)

    def grow(state):
        probe, width, left, right, flat_left, flat_right = state
        down, up = jnp.maximum(start - width, low), jnp.minimum(start + width, high)
        slope_down, slope_up = slope(down), slope(up)
        # A bound ends the search on its side: a minimum lies within.
        new_left = jnp.where((slope_down < 0) | (down <= low), down, none)
        new_right = jnp.where((slope_up > 0) | (up >= high), up, none)
        new_flat_left = jnp.where(slope_down == 0, down, none)
        new_flat_right = jnp.where(slope_up == 0, up, none)
        # Still downhill on the side where the minimum lies: tighten the other end.
        closer_left = jnp.isnan(right) & (slope_up < 0)
        closer_right = jnp.isnan(left) & (slope_down > 0)
        return (
            probe + 1,
            width * _GROWTH,
            jnp.where(closer_left, up, _first(left, new_left)),
            jnp.where(closer_right, down, _first(right, new_right)),
            _first(flat_left, new_flat_left),
            _first(flat_right, new_flat_right),
        )

    state = (jnp.int32(0), step, *found, none, none)
    return jax.lax.while_loop(unfinished, grow, state)[2:]


def _rises(slope, point, bound, noise):
    """Whether the slope at an end of the bracket, or its bound, is no noise."""
    steep = jnp.abs(slope(point)) > noise
    return jnp.isfinite(point) & (steep | (point == bound))


def _first(known, new):
    return jnp.where(jnp.isnan(known), new, known)


def _bisect(slope, left, right):
    """Neighbouring floats around the first slope >= 0 and around the last <= 0."""

    def unfinished(state):
        count, (a, b), (c, d) = state
        wide = (middle_float(a, b) != a) | (middle_float(c, d) != c)
        return (count < _BISECTIONS) & jnp.any(wide)

    def halve(state):
        count, (a, b), (c, d) = state
        first, last = middle_float(a, b), middle_float(c, d)
        rising, falling = slope(first) >= 0, slope(last) <= 0
        return (
            count + 1,
            (jnp.where(rising, a, first), jnp.where(rising, first, b)),
            (jnp.where(falling, last, c), jnp.where(falling, d, last)),
        )

    state = (jnp.int32(0), (left, right), (left, right))
    return jax.lax.while_loop(unfinished, halve, state)[1:]
