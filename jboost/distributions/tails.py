# SPDX-License-Identifier: Apache-2.0
"""Incomplete gamma and beta functions that are accurate for all shapes, and cheap.

In: positive float32 shapes up to e^40, and a place. Out: the probabilities below and
above it, to 1e-4 of themselves and mostly to 1e-5, however small they are. Where a
shape is below 1e-3, the smaller one may only be exact to 1e-6.

The mass of a tail is the density at its end times the integral of the ratio of
densities. In log x (gamma) or the logit of x (beta) densities are log-concave, so that
the ratio falls at least exponentially, and a few nodes suffice for any shapes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.distributions.special import divide, log_gamma_excess, log_ratio_excess

_NODES, _WEIGHTS = (
    part.astype(np.float32) / 2 for part in np.polynomial.legendre.leggauss(18)
)
_NODES = _NODES + np.float32(0.5)
_DEPTH = 17.0  # ratios of densities below exp(-_DEPTH) are left out
_STEPS = 4  # of Newton's method, for the distance where the ratio is as small
_NEAR = 0.25  # distances at which differences would cancel
_TINY = 1e-37

Tails = tuple[Float[Array, "*n"], Float[Array, "*n"]]


def gamma_tails(a, value, mean, away) -> Tails:
    """Returns P(a, x) and Q(a, x) of x = a value / mean.

    The regularized incomplete gamma functions: the probabilities of a gamma variable
    with shape a and this mean to be below and above the value.

    Args:
      a: the shape.
      value: the place; positive.
      mean: positive.
      away: value - mean, which the caller may know more exactly.
    """
    x, excess = a * divide(value, mean), a * divide(away, mean)
    # log of x^a exp(-x) / Gamma(a), the density of log x.
    density = a * log_ratio_excess(value, mean, away) - log_gamma_excess(a)
    below = excess < 1
    # P(a, x) is its first term, density / a, and P(a + 1, x), whose density is x / a
    # times that of a: the tail of a shape above 1 is no wider than about 20.
    slope, sign = jnp.where(below, 1 - excess, excess), jnp.where(below, -1.0, 1.0)

    def fall(distance):
        moved = sign * distance
        series = _polynomial(moved, (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720))
        excess = jnp.expm1(moved) - moved
        near = jnp.square(moved) * series
        return x * jnp.where(distance < _NEAR, near, excess)

    def rise(distance):
        return x * sign * jnp.expm1(sign * distance)

    inner = _integrate(slope, x, fall, rise)
    tail = jnp.where(below, (1 + x * inner) / a, inner) * jnp.exp(density)
    return _sides(below, tail)


def beta_tails(a, b, x, rest, excess) -> Tails:
    """Returns I_x(a, b) and I_{1-x}(b, a), the regularized incomplete beta functions.

    Args:
      a: the first shape.
      b: the second shape.
      x: the place, from 0 to 1.
      rest: 1 - x.
      excess: b x - a (1 - x), which the caller may know more exactly.
    """
    below = excess + x < rest  # x < (a + 1) / (a + b + 2)
    a, b = jnp.where(below, a, b), jnp.where(below, b, a)
    x, rest = jnp.where(below, x, rest), jnp.where(below, rest, x)
    x, rest = jnp.maximum(x, _TINY), jnp.maximum(rest, _TINY)
    excess = jnp.where(below, excess, -excess)
    size = a + b
    # log of x^a (1 - x)^b / B(a, b), the density of the logit.
    density = a * log_ratio_excess(size * x, a, excess)
    density += b * log_ratio_excess(size * rest, b, -excess)
    density += log_gamma_excess(size) - log_gamma_excess(a) - log_gamma_excess(b)
    spread, skew = x * rest, rest - x
    cumulants = (
        1 / 2, -skew / 6, (1 - 6 * spread) / 24, -skew * (1 - 12 * spread) / 120,
        (1 - spread * (30 - 120 * spread)) / 720,
    )  # fmt: skip

    def fall(distance):  # log(1 - x + x exp(-distance)) + x distance
        first = jnp.log1p(x * jnp.expm1(-distance)) + x * distance
        second = jnp.log1p(rest * jnp.expm1(distance)) - rest * distance
        near = spread * jnp.square(distance) * _polynomial(distance, cumulants)
        found = jnp.where(distance < _NEAR, near, jnp.where(x < rest, first, second))
        return (size + 1) * found

    def rise(distance):
        ratio = -jnp.expm1(-distance) / (rest + x * jnp.exp(-distance))
        return (size + 1) * spread * ratio

    # As for gamma: a first term, and the tail of a + 1, whose density is (a + b) x / a
    # times that of a.
    inner = _integrate(rest - excess, (size + 1) * spread, fall, rise)
    tail = (1 + size * x * inner) / a * jnp.exp(density)
    return _sides(below, tail)


def _integrate(slope, curvature, fall, rise):
    """Returns the integral over t > 0 of exp(-slope t - fall(t)).

    Args:
      slope: 0 or more.
      curvature: the second derivative of ``fall`` at 0.
      fall: convex; its value and derivative are 0 at 0.
      rise: the derivative of ``fall``.
    """

    def improve(_, reach):
        missing = _DEPTH - slope * reach - fall(reach)
        return reach + missing / (slope + rise(reach))

    width = _DEPTH / jnp.maximum(curvature, _TINY)
    reach = jnp.minimum(
        _DEPTH / jnp.maximum(slope, _TINY), jnp.log1p(width + jnp.sqrt(2 * width))
    )
    reach = jax.lax.stop_gradient(jax.lax.fori_loop(0, _STEPS, improve, reach))

    def evaluate(node, weight):
        distance = node * reach
        return weight * jnp.exp(-slope * distance - fall(distance))

    return reach * jnp.sum(jax.vmap(evaluate)(_NODES, _WEIGHTS), axis=0)


def _polynomial(x, coefficients):
    total = jnp.zeros_like(x)
    for each in reversed(coefficients):
        total = total * x + each
    return total


def _sides(below, tail):
    tail = jnp.minimum(tail, 1)
    return jnp.where(below, tail, 1 - tail), jnp.where(below, 1 - tail, tail)
