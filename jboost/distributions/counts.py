# SPDX-License-Identifier: Apache-2.0
"""Distributions of counts 0, 1, 2, ..."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jboost.distributions.distribution import (
    MOST,
    Distribution,
    bounded,
    like,
    matrix,
    positive,
    within,
)
from jboost.distributions.special import (
    beta_tails,
    divide,
    draw_gamma,
    draw_poisson,
    gamma_tails,
    log_factorial_excess,
    log_gamma_excess,
    log_ratio,
    log_ratio_excess,
    trigamma_excess,
)

_RARE = 1e-3  # below this (r + count) / (r + mean), log1p would be near -inf
_MANY = 128.0  # above this count, terms of the log probability would cancel
_FEW = 3.0  # a concentration
_NODES, _FIRST = 16, 0.03  # a sum over a logarithmic grid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NegativeBinomial(Distribution):
    """The negative binomial distribution by ``mean`` and ``concentration`` r.

    A Poisson distribution with a gamma distributed rate of shape r; the variance is
    mean + mean^2 / r.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.NegativeBinomial(jnp.array(6.0), jnp.array(4.0))
      >>> float(found.mean), float(found.variance)
      (6.0, 15.0)
    """

    mean: Array
    concentration: Array
    support = (0.0, MOST)

    @property
    def variance(self) -> Array:
        """The variance, mean + mean^2 / concentration."""
        return self.mean + jnp.square(self.mean) / self.concentration

    def log_prob(self, value: Any) -> Array:
        """Returns the log probability; -inf for values that are not counts."""
        value, r = like(self.mean, value), self.concentration
        inside = _are_counts(value)
        value = jnp.where(inside, value, 0)
        both, total = r + value, r + self.mean
        plain = (value <= _MANY) & (both > _RARE * total)
        share = divide(jnp.where(plain, value, 0) - self.mean, total)
        log_prob = both * jnp.log1p(jnp.where(plain, share, 0))
        log_prob += _log_of_ratio(value, self.mean)
        log_prob = jnp.where(plain, log_prob, self._log_prob_at(value))
        log_prob += log_gamma_excess(both) - log_gamma_excess(r)
        return within(inside, log_prob - log_factorial_excess(value))

    def _log_prob_at(self, count):
        """Terms that do not cancel: near a Poisson count, or far from it."""
        mean, r, some = self.mean, self.concentration, jnp.maximum(count, 1)
        both, total, away = r + count, r + mean, mean - count
        near = _log_of_near(some, mean) - both * log_ratio_excess(total, both, away)
        shares = jnp.log1p(divide(r, some)) - jnp.log1p(divide(r, mean))
        far = count * shares + r * log_ratio(both, total)
        like_poisson = (count > 0) & (count * jnp.square(divide(away, mean)) < r)
        return jnp.where(like_poisson, near, far)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of counts up to ``value``."""
        return self._tails(value)[0]

    def _tails(self, value):
        value = jnp.floor(like(self.mean, value))
        value, mean, r = jnp.broadcast_arrays(value, self.mean, self.concentration)
        count, share = jnp.maximum(value, 0), r / (r + mean)
        excess = share * (count - mean + 1)
        below, above = beta_tails(r, count + 1, share, mean / (r + mean), excess)
        return jnp.where(value >= 0, below, 0), jnp.where(value >= 0, above, 1)

    def draw(self, key: Any) -> Array:
        """Draws one count for each entry of the parameters."""
        first, second = jax.random.split(key)
        r = self.concentration
        return draw_poisson(second, draw_gamma(first, r, self.mean / r))

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape].

        That about r is an approximation, within 2 % for r > 0.01.
        """
        mean, r = self.mean, self.concentration
        few = _information_of_few(mean, jnp.minimum(r, _FEW))
        many = _information_of_many(mean, jnp.maximum(r, _FEW))
        of_shape = jnp.maximum(jnp.where(r < _FEW, few, many), 0)
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
    """0 with probability ``gate``, otherwise a Poisson count with mean ``rate``.

    ``logit`` is that of the gate, which float32 cannot tell from 1 above 17.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.ZeroInflatedPoisson(jnp.array(3.0), jnp.array(0.0))
      >>> float(found.mean), float(found.gate)
      (1.5, 0.5)
    """

    rate: Array
    logit: Array
    support = (0.0, MOST)

    @property
    def gate(self) -> Array:
        """The probability of an additional 0."""
        return jax.nn.sigmoid(self.logit)

    @property
    def _open(self):
        return jax.nn.sigmoid(-self.logit)

    @property
    def mean(self) -> Array:
        """The mean, (1 - gate) rate."""
        return self._open * self.rate

    @property
    def variance(self) -> Array:
        """The variance, mean (1 + gate rate)."""
        return self.mean * (1 + self.gate * self.rate)

    def log_prob(self, value: Any) -> Array:
        """Returns the log probability; -inf for values that are not counts."""
        value, rate = like(self.rate, value), self.rate
        inside = _are_counts(value)
        value = jnp.where(inside, value, 0)
        counted = value - rate + _log_of_ratio(value, rate)
        many = _log_of_near(jnp.maximum(value, _MANY), rate)
        counted = jnp.where(value > _MANY, many, counted) - log_factorial_excess(value)
        # log(1 + exp(logit)) = -log(1 - gate)
        total = jax.nn.softplus(self.logit)
        zero = jnp.logaddexp(self.logit, -rate) - total
        some = -self._open * jnp.expm1(-rate)
        few = some < 0.5
        zero = jnp.where(few, jnp.log1p(-jnp.where(few, some, 0)), zero)
        return within(inside, jnp.where(value == 0, zero, counted - total))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of counts up to ``value``."""
        return self._tails(value)[0]

    def _tails(self, value):
        value = jnp.floor(like(self.rate, value))
        value, rate = jnp.broadcast_arrays(value, self.rate)
        count = jnp.maximum(value, 0)
        shape = count + 1
        above, below = gamma_tails(shape, rate, shape, rate - count - 1)
        below, above = self.gate + self._open * below, self._open * above
        return jnp.where(value >= 0, below, 0), jnp.where(value >= 0, above, 1)

    def draw(self, key: Any) -> Array:
        """Draws one count for each entry of the parameters."""
        first, second = jax.random.split(key)
        # The gate may be 1 in float32 where its complement is not 0.
        chosen = jax.random.uniform(first, self.shape, self.rate.dtype) < self._open
        return jnp.where(chosen, draw_poisson(second, self.rate), 0)

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape]."""
        rate, gate, rest = self.rate, self.gate, self._open
        none, some = jnp.exp(-rate), -jnp.expm1(-rate)
        zero = gate + rest * none
        own = rest * (1 / rate - none * gate / zero)
        both = -none * gate * rest / zero
        return matrix(own, both, some * jnp.square(gate) * rest / zero)


def _log_of_ratio(count, mean):
    """Returns log((mean / n)^n); 0 for n = 0."""
    return count * (jnp.log(mean) - jnp.log(jnp.maximum(count, 1)))


def _log_of_near(count, mean):
    """Returns log((mean / n)^n) + n - mean, n > 0, without cancellation."""
    return count * log_ratio_excess(mean, count, mean - count)


def _are_counts(value):
    return (value >= 0) & (value == jnp.floor(value))


def negative_binomial(score: Float[Array, "2"]) -> NegativeBinomial:
    """Makes a negative binomial: mean = exp(score[0]), r = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> float(jb.distributions.negative_binomial(jnp.zeros(2)).variance)
      2.0
    """
    return NegativeBinomial(positive(score[0]), positive(score[1]))


def zero_inflated_poisson(score: Float[Array, "2"]) -> ZeroInflatedPoisson:
    """Makes a zero-inflated Poisson: rate = exp(score[0]), gate = sigmoid(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.zero_inflated_poisson(jnp.zeros(2))
      >>> round(float(found.mean), 4)
      0.5
    """
    return ZeroInflatedPoisson(positive(score[0]), bounded(score[1]))
