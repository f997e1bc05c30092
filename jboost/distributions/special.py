# SPDX-License-Identifier: Apache-2.0
"""Elementary and special functions that keep their digits, and cheap derivatives.

In: positive float32. Out: log gamma and trigamma, less their leading terms; logarithms
and quotients whose derivatives are finite.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy import special
from jaxtyping import Array, Float

_LEAST_RATIO = 1e-30
_LEAST = 1e-4  # below, squares of an argument of log gamma are lost
_SHIFT = 6  # terms of the recurrence, after which the series is exact in float32


@jax.custom_jvp
def divide(value: Float[Array, "*n"], scale: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns value / scale, whose second derivative is finite for small scales, too.

    JAX computes scale^-3 for it, which need not be float32 where scale is.
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


def log_gamma_excess(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns log Gamma(x) - x log x + x, which is small where log Gamma is large.

    Densities are sums of such terms and of products that cancel exactly (Loader 2000,
    "Fast and accurate computation of binomial probabilities").
    """
    large = jnp.maximum(x, 8.0)
    square = 1 / jnp.square(large)
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260))) / large
    series = series + (math.log(2 * math.pi) - jnp.log(large)) / 2
    small = jnp.clip(x, _LEAST, 8.0)
    exact = special.gammaln(small) - small * jnp.log(small) + small
    # log Gamma(x) = -log x - gamma x near 0.
    least = jnp.minimum(x, _LEAST)
    limit = least * (1 - float(jnp.euler_gamma)) - (1 + least) * log(least)
    return jnp.where(x < _LEAST, limit, jnp.where(x > 8, series, exact))


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
      value: positive.
      base: positive.
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
