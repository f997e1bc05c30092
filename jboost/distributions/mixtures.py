# SPDX-License-Identifier: Apache-2.0
"""Mixtures of M normal distributions, from scores [3 M - 1]."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special
from jaxtyping import Array, Float

from jboost.distributions.distribution import Distribution, like, positive
from jboost.distributions.special import divide

_LARGEST_LOGIT = 20.0  # no weight of a component is 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormalMixture(Distribution):
    """A mixture of M normal distributions; the last axis of its fields has length M."""

    locs: Array
    scales: Array
    weights: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a value: [] for one row, [N] for N rows."""
        return self.locs.shape[:-1]

    @property
    def mean(self) -> Array:
        """The mean, which is the sum of weights times locs."""
        return jnp.sum(self.weights * self.locs, axis=-1)

    @property
    def variance(self) -> Array:
        """The variance."""
        away = jnp.square(self.locs - self.mean[..., None])
        return jnp.sum(self.weights * (jnp.square(self.scales) + away), axis=-1)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density."""
        logs = -jnp.square(self._standardize(value)) / 2 - jnp.log(self.scales)
        logs = logs + jnp.log(self.weights) - math.log(2 * math.pi) / 2
        return special.logsumexp(logs, axis=-1)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        return self._tails(value)[0]

    def _tails(self, value):
        z = self._standardize(value)
        below, above = (self.weights * special.ndtr(each) for each in (z, -z))
        return jnp.sum(below, axis=-1), jnp.sum(above, axis=-1)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        first, second = jax.random.split(key)
        which = jax.random.categorical(first, jnp.log(self.weights))
        chosen = jax.nn.one_hot(which, self.locs.shape[-1], dtype=bool)
        loc, scale = (
            jnp.sum(jnp.where(chosen, each, 0), axis=-1)
            for each in (self.locs, self.scales)
        )
        return loc + scale * jax.random.normal(second, self.shape, self.locs.dtype)

    def _standardize(self, value):
        return divide(like(self.locs, value)[..., None] - self.locs, self.scales)


def normal_mixture(score: Float[Array, " K"]) -> NormalMixture:
    """Makes a mixture of M = (K + 1) / 3 normal distributions.

    scales = exp(score[M:2 M]), weights = softmax of (score[2 M:], 0), and locs =
    score[:M] + c scales with c from -1 to 1 in equal steps, so that components with the
    same scores differ.

    Raises:
      ValueError: K + 1 is not a multiple of 3.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> jb.distributions.normal_mixture(jnp.zeros(5)).locs.tolist()
      [-1.0, 1.0]
    """
    number, rest = divmod(score.shape[0] + 1, 3)
    if rest or number < 1:
        raise ValueError(
            "num_scores must be 3 M - 1 for normal_mixture of M components (5 for 2, 8 "
            f"for 3), got {score.shape[0]}"
        )
    scales = positive(score[number : 2 * number])
    apart = np.linspace(-1, 1, number, dtype=np.float32) if number > 1 else np.zeros(1)
    locs = score[:number] + jnp.asarray(apart, score.dtype) * scales
    logits = jnp.clip(score[2 * number :], -_LARGEST_LOGIT, _LARGEST_LOGIT)
    logits = jnp.concatenate([logits, jnp.zeros(1, score.dtype)])
    return NormalMixture(locs, scales, jax.nn.softmax(logits))
