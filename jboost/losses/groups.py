# SPDX-License-Identifier: Apache-2.0
"""What the losses of groups share: masks, and elementary functions with safe slopes.

In: the arguments of a loss of one group. Out: arrays in which masked rows cannot do
harm.
"""

from functools import partial

import jax
import jax.numpy as jnp


def weigh_rows(scores, where, weights):
    """Returns the weights of the rows [G], 0 for masked rows."""
    size = scores.shape[0]
    weights = jnp.ones(size, scores.dtype) if weights is None else weights
    weights = jnp.asarray(weights, scores.dtype)
    return weights if where is None else jnp.where(jnp.asarray(where), weights, 0)


def clear(values, real):
    """Replaces the values of masked rows by 0, so that they cannot cause NaN."""
    return jnp.where(real, values, 0)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def log(x, root=1.0):
    """Returns log(x root^2), x > 0, where neither x^2 nor 1 / x^2 need be a float32.

    The second derivative of ``jnp.log`` computes 1 / x^2, which overflows for x <
    1e-19. Dividing x by its own value first does not help: XLA reorders divisions.
    """
    return 2 * jnp.log(jnp.sqrt(x) * root)


@log.defjvp
def _differentiate_log(root, primals, tangents):
    return log(primals[0], root), tangents[0] * _invert(primals[0])


@jax.custom_jvp
def _invert(x):
    """Returns 1 / x; the derivative multiplies by it twice."""
    return 1 / x


@_invert.defjvp
def _differentiate_invert(primals, tangents):
    inverse = _invert(primals[0])
    return inverse, -(inverse * (tangents[0] * inverse))


@jax.custom_jvp
def softplus(x):
    """Returns log(1 + e^x); its derivative needs no logarithm, only a sigmoid.

    log(1 + t) = 2 artanh(t / (2 + t)), by a series that is exact to float32 for t <= 1:
    XLA evaluates its own log1p number by number, in several times the time.
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        return jnp.logaddexp(x, 0)
    small = jnp.exp(-jnp.abs(x))
    ratio = small / (2 + small)
    square, series = ratio * ratio, jnp.zeros_like(ratio)
    for power in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / power
    return jnp.maximum(x, 0) + 2 * ratio * series


@softplus.defjvp
def _differentiate_softplus(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return softplus(x), tangent * jax.nn.sigmoid(x)
