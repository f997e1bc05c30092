# SPDX-License-Identifier: Apache-2.0
"""Quantiles by bisection, bounds on scores, and shapes, for all distributions."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jboost.numerics.arrays import middle_float

MOST = float(jnp.finfo(jnp.float32).max)
_HALVINGS = 33
_LARGEST_LOG = 40.0  # squares of its exponential, and their inverses, are float32


class Distribution:
    """Base class: a frozen dataclass, registered as a pytree of its parameters.

    All parameters have the same shape. ``support`` is the interval of possible values.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.Normal(jnp.zeros(3), jnp.ones(3))
      >>> isinstance(found, jb.distributions.Distribution), found.shape
      (True, (3,))
    """

    support = (-MOST, MOST)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameters: [] for one row, [N] for N rows."""
        return jax.tree.leaves(self)[0].shape

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        raise NotImplementedError

    def _tails(self, value):
        """Returns the probabilities of values up to ``value``, and above it."""
        below = self.cdf(value)
        return below, 1 - below

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws values, [*sample_shape, *shape]."""

        def repeat(leaf):
            return jnp.broadcast_to(leaf, (*sample_shape, *leaf.shape))

        return jax.tree.map(repeat, self).draw(key)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        raise NotImplementedError

    def icdf(self, q: Any) -> Array:
        """Returns the q-quantile: the smallest number with a cdf of at least q.

        Distributions without a closed form find it by bisection of the ordered bit
        patterns of float32; it then has no derivative.

        Args:
          q: probabilities in (0, 1); their shape broadcasts with the parameters.
        """
        q = jnp.asarray(q, jnp.float32)
        q = jnp.broadcast_to(q, jnp.broadcast_shapes(q.shape, self.shape))
        low, high = (jnp.full(q.shape, end) for end in (-MOST, self.support[1]))

        def halve(_, ends):
            low, high = ends
            middle = middle_float(low, high)
            below, above = self._tails(middle)
            # Probabilities near 1 have fewer digits than those of the other side.
            enough = jnp.where(q < 0.5, below >= q, above <= 1 - q)
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        high = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))[1]
        return jnp.where(high == 0, 0, high)  # not -0


def like(parameter: Array, value: Any) -> Array:
    """Returns the values in the dtype of a parameter."""
    return jnp.asarray(value, parameter.dtype)


def positive(score: Array) -> Array:
    """Returns exp(score), between exp(-40) and exp(40)."""
    return jnp.exp(bounded(score))


def bounded(score: Array) -> Array:
    """Returns a logarithm or logit between its bounds, -40 and 40."""
    return jnp.clip(score, -_LARGEST_LOG, _LARGEST_LOG)


def within(inside: Array, log_prob: Array) -> Array:
    """Returns the log probability, -inf for values outside the support."""
    return jnp.where(inside, log_prob, -jnp.inf)


def matrix(first: Array, both: Array | float, second: Array) -> Array:
    """Returns a symmetric matrix [2, 2, *shape] of arrays of one shape."""
    both = jnp.broadcast_to(like(first, both), first.shape)
    return jnp.stack([jnp.stack([first, both]), jnp.stack([both, second])])
