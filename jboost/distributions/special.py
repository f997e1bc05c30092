# SPDX-License-Identifier: Apache-2.0
"""Special functions, tails and draws that keep their digits in float32.

Tails of gamma and beta distributions are exact to 1e-4 of themselves for shapes up to
e^40; for shapes below 1e-3, the smaller one may only be exact to 1e-6. A tail is the
density at its end times the integral of a ratio of densities, which falls at least
exponentially in log x (gamma) or logit x (beta): a few nodes suffice.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special
from jaxtyping import Array, Float

from jboost.distributions.distribution import MOST

_LEAST_RATIO = 1e-30
_LEAST = 1e-4  # below, squares of an argument of log gamma are lost
_SHIFT = 6  # terms of the recurrence, after which the series is exact in float32


@jax.custom_jvp
def divide(value: Float[Array, "*n"], scale: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns value / scale, with a second derivative that is finite for small scales.

    JAX would compute scale^-3 for it, which can overflow in float32.
    """
    return value / scale


@divide.defjvp
def _differentiate_divide(primals, tangents):
    (value, scale), (changed, moved) = primals, tangents
    tangent = -moved * value * _inverse_square(scale)
    return value / scale, changed / scale + tangent


@jax.custom_jvp
def _inverse_square(x):
    return jax.lax.integer_pow(x, -2)


@_inverse_square.defjvp
def _differentiate_inverse_square(primals, tangents):
    (x,), (moved,) = primals, tangents
    square = _inverse_square(x)
    return square, -2 * (square * (square * (x * moved)))  # XLA joins divisions


@jax.custom_jvp
def log(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns log(x), also where 1 / x^2 is no float32."""
    return jnp.log(x)


@log.defjvp
def _differentiate_log(primals, tangents):
    return log(primals[0]), tangents[0] * _invert(primals[0])


@jax.custom_jvp
def _invert(x):
    """Returns 1 / x; the derivative multiplies by it twice."""
    return 1 / x


@_invert.defjvp
def _differentiate_invert(primals, tangents):
    inverse = _invert(primals[0])
    return inverse, -(inverse * (tangents[0] * inverse))


def trigamma(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the second derivative of log gamma for x > 0.

    The recurrence psi'(x) = psi'(x + 1) + 1 / x^2, then the asymptotic series
    (Abramowitz and Stegun 6.4.12).
    """
    found = jnp.zeros_like(x)
    for step in range(_SHIFT):
        found = found + 1 / jnp.square(x + step)
    y = x + _SHIFT
    square = 1 / jnp.square(y)
    tail = (1 / 6 - square * (1 / 30 - square * (1 / 42 - square / 30))) * square
    return found + (1 + 1 / (2 * y) + tail) / y


def trigamma_excess(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns x^2 psi'(x) - x, from 1 near 0 down to 1/2, without cancellation."""
    large = jnp.maximum(x, 10.0)
    square = 1 / jnp.square(large)
    series = 0.5 + (1 / 6 - square * (1 / 30 - square / 42)) / large
    small = jnp.clip(x, 1e-15, 10.0)
    return jnp.where(x > 10, series, jnp.square(small) * trigamma(small) - small)


@jax.custom_jvp
def log_gamma_excess(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns log Gamma(x) - x log x + x, which is small where log Gamma is large.

    Densities are sums of such terms and of products that cancel exactly (Loader 2000,
    "Fast and accurate computation of binomial probabilities"). Derivatives are written
    out: those of both branches would be most of a program.
    """
    large = jnp.maximum(x, 8.0)
    square = 1 / jnp.square(large)
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260))) / large
    series = series + (math.log(2 * math.pi) - jnp.log(large)) / 2
    small = jnp.clip(x, _LEAST, 8.0)
    exact = special.gammaln(small) - small * jnp.log(small) + small
    # log Gamma(x) = -log x - gamma x near 0.
    least = jnp.minimum(x, _LEAST)
    limit = least * (1 - float(jnp.euler_gamma)) - (1 + least) * jnp.log(least)
    return jnp.where(x < _LEAST, limit, jnp.where(x > 8, series, exact))


@log_gamma_excess.defjvp
def _differentiate_excess(primals, tangents):
    return log_gamma_excess(primals[0]), tangents[0] * _digamma_excess(primals[0])


@jax.custom_jvp
def _digamma_excess(x):
    """Returns psi(x) - log x (Abramowitz and Stegun 6.3.18)."""
    large = jnp.maximum(x, 8.0)
    inverse = 1 / large
    square = jnp.square(inverse)
    series = square * (1 / 12 - square * (1 / 120 - square / 252))
    small = jnp.minimum(x, 8.0)
    exact = special.digamma(small) - jnp.log(small)
    return jnp.where(x > 8, -inverse / 2 - series, exact)


@_digamma_excess.defjvp
def _differentiate_digamma_excess(primals, tangents):
    """psi'(x) - 1 / x; tangents are of the size of x, and 1 / x^2 may be no float32."""
    (x,), (moved,) = primals, tangents
    inverse = _invert(x)
    return _digamma_excess(x), inverse * (inverse * (trigamma_excess(x) * moved))


def log_factorial_excess(count: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns log n! - n log n + n; 0 for n = 0."""
    positive = jnp.maximum(count, 1)
    return jnp.where(count > 0, log_gamma_excess(positive) + jnp.log(positive), 0)


def log_ratio_excess(
    value: Float[Array, "*n"], base: Float[Array, "*n"], away: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """Returns log(value / base) - away / base, without cancellation near 0.

    log(1 + e) = 2 artanh(h), h = e / (2 + e), and e - 2 h = e h.

    Args:
      away: value - base, which the caller may know more exactly.
    """
    excess = divide(away, base)
    near = jnp.abs(excess) < 0.3
    small = jnp.where(near, excess, 0)
    half = small / (2 + small)
    square = jnp.square(half)
    series = 1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9))
    series = half * (2 * square * series - small)
    return jnp.where(near, series, log_ratio(value, base) - excess)


def log_ratio(
    value: Float[Array, "*n"], base: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """Returns log(value / base), also of ratios that float32 cannot hold."""
    ratio = divide(value, base)
    held = (ratio > _LEAST_RATIO) & (ratio < 1 / _LEAST_RATIO)
    return jnp.where(held, log(jnp.where(held, ratio, 1)), log(value) - log(base))


_NODES, _WEIGHTS = (
    part.astype(np.float32) / 2 for part in np.polynomial.legendre.leggauss(18)
)
_NODES = _NODES + np.float32(0.5)
_DEPTH = 17.0  # ratios of densities below exp(-_DEPTH) are left out
_STEPS = 4  # Newton steps for the distance where the ratio is as small
_NEAR = 0.25  # below this distance, differences would cancel
_TINY = 1e-37

Tails = tuple[Float[Array, "*n"], Float[Array, "*n"]]


def gamma_tails(a, value, mean, away) -> Tails:
    """Returns P(a, x) and Q(a, x) of x = a value / mean.

    The regularized incomplete gamma functions: the probabilities of a gamma variable
    with shape a and this mean to be below and above the value.

    Args:
      away: value - mean, which the caller may know more exactly.
    """
    x, excess = a * divide(value, mean), a * divide(away, mean)
    # log of x^a exp(-x) / Gamma(a), the density of log x.
    density = a * log_ratio_excess(value, mean, away) - log_gamma_excess(a)
    below = excess < 1
    # P(a, x) is its first term, density / a, plus P(a + 1, x). The density for a + 1 is
    # x / a times that for a: the tail of a shape above 1 is no wider than about 20.
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

    # As for gamma: a first term, plus the tail for a + 1. The density for a + 1 is
    # (a + b) x / a times that for a.
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


_LEAST_DRAW = float(jnp.finfo(jnp.float32).tiny)
_BELOW_ONE = 1 - 2.0**-24
_MANY = 1e4  # counts; jax.random.poisson loses its digits above


def keep_positive(values: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the values; the nearest positive float32 for those beyond its range."""
    return jnp.clip(values, _LEAST_DRAW, MOST)


def draw_gamma(key, shape, scale) -> Array:
    """Draws from gamma distributions.

    A variable of this shape is one of shape + 1 times u^(1 / shape), u uniform, which
    keeps its digits for large shapes and may be less than float32 can hold for small.
    """
    larger, log_power = _draw_powers(key, shape)
    half = jnp.exp(log_power / 2)  # twice, since one factor may be 0 and the other inf
    return keep_positive(larger * scale * half * half)


def draw_beta(key, first, second) -> Array:
    """Draws from beta distributions, between 0 and 1 without both."""
    keys = jax.random.split(key)
    (x, log_x), (y, log_y) = map(_draw_powers, keys, (first, second))
    found = 1 / (1 + y / x * jnp.exp(log_y - log_x))
    return jnp.clip(found, _LEAST_DRAW, _BELOW_ONE)


def draw_poisson(key, rate) -> Array:
    """Draws counts; many by the first terms of Cornish and Fisher's expansion."""
    few = jax.random.poisson(key, jnp.minimum(rate, _MANY), rate.shape)
    z = jax.random.normal(key, rate.shape, rate.dtype)
    many = jnp.round(rate + jnp.sqrt(rate) * z + (jnp.square(z) - 1) / 6)
    return jnp.where(rate < _MANY, few.astype(rate.dtype), many)


def _draw_powers(key, shape):
    """Returns a gamma variable of shape + 1, and log(u) / shape."""
    first, second = jax.random.split(key)
    larger = jax.random.gamma(first, shape + 1, shape.shape, shape.dtype)
    return larger, -jax.random.exponential(second, shape.shape, shape.dtype) / shape
