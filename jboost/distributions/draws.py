# SPDX-License-Identifier: Apache-2.0
"""Draws from gamma, beta and Poisson distributions with any parameters.

In: a key and parameters of one shape. Out: one draw for each, inside the support.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.distributions.distribution import MOST

_LEAST = float(jnp.finfo(jnp.float32).tiny)
_BELOW_ONE = 1 - 2.0**-24
_MANY = 1e4  # counts; jax.random.poisson loses its digits above


def keep_positive(values: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the values; the nearest positive float32 for those beyond its range."""
    return jnp.clip(values, _LEAST, MOST)


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
    return jnp.clip(found, _LEAST, _BELOW_ONE)


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
