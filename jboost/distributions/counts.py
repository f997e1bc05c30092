# SPDX-License-Identifier: Apache-2.0
"""Distributions of counts.

In: a score [K] of one row. Out: a distribution of 0, 1, 2, ...
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special
from jaxtyping import Array, Float

from jboost.distributions.distribution import Distribution, like, matrix, within
from jboost.distributions.special import (
    log_factorial_excess,
    log_gamma_excess,
    trigamma_excess,
)

_MOST_COUNT = 2.0**31
_FEW = 3.0  # a concentration
_NODES, _FIRST = 16, 0.03  # of a sum over a logarithmic grid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NegativeBinomial(Distribution):
    """The negative binomial distribution by ``mean`` and ``concentration`` r.

    A Poisson distribution whose rate has a gamma distribution of shape r; the variance
    is mean + mean^2 / r.
    """

    mean: Array
    concentration: Array
    support = (0.0, _MOST_COUNT)

    @property
    def variance(self) -> Array:
        """The variance, mean + mean^2 / concentration."""
        return self.mean + jnp.square(self.mean) / self.concentration

    def log_prob(self, value: Any) -> Array:
        """Returns the log probability; -inf for what is no count."""
        value, r = like(self.mean, value), self.concentration
        inside = _are_counts(value)
        value = jnp.where(inside, value, 0)
        both = r + value
        log_prob = both * jnp.log1p((value - self.mean) / (r + self.mean))
        log_prob += log_gamma_excess(both) - log_gamma_excess(r)
        return within(inside, log_prob + _divide_by_factorial(value, self.mean))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of counts up to ``value``."""
        value = jnp.floor(like(self.mean, value))
        r = jnp.broadcast_to(self.concentration, value.shape)
        share = r / (r + self.mean)
        below = special.betainc(r, jnp.maximum(value, 0) + 1, share)
        return jnp.where(value >= 0, below, 0)

    def draw(self, key: Any) -> Array:
        """Draws one count for each entry of the parameters."""
        first, second = jax.random.split(key)
        r = self.concentration
        rate = jax.random.gamma(first, r, self.shape) * (self.mean / r)
        return like(self.mean, jax.random.poisson(second, rate, self.shape))

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape]."""
        mean, r = self.mean, self.concentration
        few = _information_of_few(mean, jnp.minimum(r, _FEW))
        many = _information_of_many(mean, jnp.maximum(r, _FEW))
        of_shape = jnp.where(r < _FEW, few, many)
        return matrix(r / (mean * (r + mean)), 0.0, of_shape)


def _information_of_few(mean, r):
    """E psi'(r) - psi'(r + Y) - mean / (r (r + mean)) about r, within 1 % for r < 3.

    The expectation is the integral over t > 0 of t exp(-r t) (1 - E exp(-t Y)) / (1 -
    exp(-t)), the other term that of exp(-r t) (1 - exp(-mean t)). Their difference is
    summed over a grid in log t.
    """
    low = _FIRST / (1 + mean / r + mean)
    ratio = ((2 + 20 / r) / low) ** (1 / (_NODES - 1))
    total, t = jnp.zeros_like(r), low
    for _ in range(_NODES):
        small = -jnp.expm1(-t)
        falls = -jnp.expm1(-r * jnp.log1p(mean / r * small)) * t / small
        total = total + t * jnp.exp(-r * t) * (falls + jnp.expm1(-mean * t))
        t = t * ratio
    return total * jnp.log(ratio)


def _information_of_many(mean, r):
    """The same within 1.5 % for r > 3: between its limits for small and large means."""
    small, large = r / (r + 1), 2 * trigamma_excess(r)
    share = mean / (mean + r + 2)
    between = small + (large - small) * share
    return between * jnp.square(mean / (r * (r + mean))) / 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ZeroInflatedPoisson(Distribution):
    """0 with probability ``gate``, otherwise a Poisson count with mean ``rate``."""

    rate: Array
    gate: Array
    support = (0.0, _MOST_COUNT)

    @property
    def mean(self) -> Array:
        """The mean, (1 - gate) rate."""
        return (1 - self.gate) * self.rate

    @property
    def variance(self) -> Array:
        """The variance, mean (1 + gate rate)."""
        return self.mean * (1 + self.gate * self.rate)

    def log_prob(self, value: Any) -> Array:
        """Returns the log probability; -inf for what is no count."""
        value, rate, gate = like(self.rate, value), self.rate, self.gate
        inside = _are_counts(value)
        zero = value == 0
        value = jnp.where(inside, value, 0)
        counted = value - rate + _divide_by_factorial(value, rate)
        positive = jnp.log1p(-gate) + counted
        log_prob = jnp.where(
            zero, jnp.log(gate + (1 - gate) * jnp.exp(-rate)), positive
        )
        return within(inside, log_prob)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of counts up to ``value``."""
        value = jnp.floor(like(self.rate, value))
        rate = jnp.broadcast_to(self.rate, value.shape)
        counted = special.gammaincc(jnp.maximum(value, 0) + 1, rate)
        return jnp.where(value >= 0, self.gate + (1 - self.gate) * counted, 0)

    def draw(self, key: Any) -> Array:
        """Draws one count for each entry of the parameters."""
        first, second = jax.random.split(key)
        zero = jax.random.uniform(first, self.shape, self.rate.dtype) < self.gate
        return jnp.where(
            zero, 0, like(self.rate, jax.random.poisson(second, self.rate, self.shape))
        )

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape]."""
        rate, gate = self.rate, self.gate
        none, some = jnp.exp(-rate), -jnp.expm1(-rate)
        zero = gate + (1 - gate) * none
        own = (1 - gate) * ((1 - gate) * jnp.square(none) / zero + 1 / rate - none)
        both = -none * (some * (1 - gate) / zero + 1)
        of_gate = some * (some / zero + 1 / (1 - gate))
        return matrix(own, both, of_gate)


def _divide_by_factorial(count, mean):
    """Returns log(mean^n exp(-n) / n!)."""
    log = jnp.log(mean) - jnp.log(jnp.maximum(count, 1))
    return count * log - log_factorial_excess(count)


def _are_counts(value):
    return (value >= 0) & (value == jnp.floor(value))


def negative_binomial(score: Float[Array, "2"]) -> NegativeBinomial:
    """Makes a negative binomial: mean = exp(score[0]), r = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> float(jb.distributions.negative_binomial(jnp.zeros(2)).variance)
      2.0
    """
    return NegativeBinomial(jnp.exp(score[0]), jnp.exp(score[1]))


def zero_inflated_poisson(score: Float[Array, "2"]) -> ZeroInflatedPoisson:
    """Makes a zero-inflated Poisson: rate = exp(score[0]), gate = sigmoid(score[1])."""
    return ZeroInflatedPoisson(jnp.exp(score[0]), jax.nn.sigmoid(score[1]))
