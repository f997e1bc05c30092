# SPDX-License-Identifier: Apache-2.0
"""Distributions of positive numbers, and of numbers between 0 and 1.

In: a score [K] of one row. Out: a distribution; its fields are in the units of targets.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special
from jaxtyping import Array, Float

from jboost.distributions.distribution import (
    MOST,
    Distribution,
    like,
    matrix,
    within,
)
from jboost.distributions.special import log_gamma_excess, trigamma, trigamma_excess


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogNormal(Distribution):
    """exp of a normal distribution with mean ``loc`` and deviation ``scale``."""

    loc: Array
    scale: Array

    @property
    def mean(self) -> Array:
        """The mean, exp(loc + scale^2 / 2)."""
        return jnp.exp(self.loc + jnp.square(self.scale) / 2)

    @property
    def variance(self) -> Array:
        """The variance, mean^2 (exp(scale^2) - 1)."""
        return jnp.square(self.mean) * jnp.expm1(jnp.square(self.scale))

    def log_prob(self, value: Any) -> Array:
        """Returns the log density; -inf for values <= 0."""
        value = like(self.loc, value)
        inside = value > 0
        log = jnp.log(jnp.where(inside, value, 1))
        z = (log - self.loc) / self.scale
        normal = jnp.log(self.scale) + math.log(2 * math.pi) / 2
        return within(inside, -jnp.square(z) / 2 - normal - log)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        value = like(self.loc, value)
        inside = value > 0
        z = (jnp.log(jnp.where(inside, value, 1)) - self.loc) / self.scale
        return jnp.where(inside, special.ndtr(z), 0)

    def icdf(self, q: Any) -> Array:
        """Returns the q-quantile."""
        return jnp.exp(self.loc + self.scale * special.ndtri(like(self.loc, q)))

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        noise = jax.random.normal(key, self.shape, self.loc.dtype)
        return jnp.exp(self.loc + self.scale * noise)

    def fisher_information(self) -> Array:
        """Returns the information of one value about (loc, scale), [2, 2, *shape]."""
        precision = 1 / jnp.square(self.scale)
        return matrix(precision, 0.0, 2 * precision)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gamma(Distribution):
    """The gamma distribution by ``mean`` and ``concentration``, its shape k.

    The variance is mean^2 / k.
    """

    mean: Array
    concentration: Array
    support = (0.0, MOST)

    @property
    def variance(self) -> Array:
        """The variance, mean^2 / concentration."""
        return jnp.square(self.mean) / self.concentration

    def log_prob(self, value: Any) -> Array:
        """Returns the log density; -inf for values <= 0."""
        value, k = like(self.mean, value), self.concentration
        inside = value > 0
        value = jnp.where(inside, value, 1)
        ratio = value / self.mean
        log_prob = k * (jnp.log(ratio) - ratio + 1) - log_gamma_excess(k)
        return within(inside, log_prob - jnp.log(value))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        ratio = jnp.maximum(like(self.mean, value), 0) / self.mean
        k = jnp.broadcast_to(self.concentration, ratio.shape)
        return special.gammainc(k, k * ratio)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        k = self.concentration
        return jax.random.gamma(key, k, self.shape) * (self.mean / k)

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape]."""
        k = self.concentration
        of_shape = trigamma_excess(k) / jnp.square(k)
        return matrix(k / jnp.square(self.mean), 0.0, of_shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weibull(Distribution):
    """The Weibull distribution: P(Y > y) = exp(-(y / scale)^concentration)."""

    scale: Array
    concentration: Array
    support = (0.0, MOST)

    @property
    def mean(self) -> Array:
        """The mean, scale Gamma(1 + 1 / concentration)."""
        return self.scale * jnp.exp(special.gammaln(1 + 1 / self.concentration))

    @property
    def variance(self) -> Array:
        """The variance."""
        first, second = (
            special.gammaln(1 + power / self.concentration) for power in (1, 2)
        )
        spread = jnp.exp(second) - jnp.exp(2 * first)
        return jnp.square(self.scale) * spread

    def log_prob(self, value: Any) -> Array:
        """Returns the log density; -inf for values <= 0."""
        value, k = like(self.scale, value), self.concentration
        inside = value > 0
        log = jnp.log(jnp.where(inside, value, 1))
        power = k * (log - jnp.log(self.scale))
        return within(inside, jnp.log(k) + power - log - jnp.exp(power))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        ratio = jnp.maximum(like(self.scale, value), 0) / self.scale
        return -jnp.expm1(-jnp.power(ratio, self.concentration))

    def icdf(self, q: Any) -> Array:
        """Returns the q-quantile."""
        hazard = -jnp.log1p(-like(self.scale, q))
        return self.scale * jnp.power(hazard, 1 / self.concentration)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        hazard = jax.random.exponential(key, self.shape, self.scale.dtype)
        return self.scale * jnp.power(hazard, 1 / self.concentration)

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape]."""
        scale, k = self.scale, self.concentration
        rest = 1 - float(jnp.euler_gamma)
        own = jnp.square(k / scale)
        both = -rest / scale
        of_shape = (math.pi**2 / 6 + rest**2) / jnp.square(k)
        return matrix(own, both, of_shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beta(Distribution):
    """The beta distribution by ``mean`` m and ``concentration`` c.

    Its usual parameters are m c and (1 - m) c; the variance is m (1 - m) / (1 + c).
    """

    mean: Array
    concentration: Array
    support = (0.0, 1.0)

    @property
    def variance(self) -> Array:
        """The variance, mean (1 - mean) / (1 + concentration)."""
        return self.mean * (1 - self.mean) / (1 + self.concentration)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density; -inf outside (0, 1)."""
        value = like(self.mean, value)
        inside = (value > 0) & (value < 1)
        value = jnp.where(inside, value, 0.5)
        rest, first, second = 1 - self.mean, *self._powers()
        log, log_rest = jnp.log(value), jnp.log1p(-value)
        log_prob = first * (log - jnp.log(self.mean)) - log_gamma_excess(first)
        log_prob += second * (log_rest - jnp.log(rest)) - log_gamma_excess(second)
        log_prob += log_gamma_excess(self.concentration) - log - log_rest
        return within(inside, log_prob)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        value = jnp.clip(like(self.mean, value), 0, 1)
        first, second = self._powers()
        shape = jnp.broadcast_shapes(value.shape, self.shape)
        first, second, value = (
            jnp.broadcast_to(each, shape) for each in (first, second, value)
        )
        return special.betainc(first, second, value)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        return jax.random.beta(key, *self._powers(), self.shape)

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [2, 2, *shape]."""
        m, c = self.mean, self.concentration
        first, second = (trigamma(power) for power in self._powers())
        own = jnp.square(c) * (first + second)
        both = c * (m * first - (1 - m) * second)
        of_shape = jnp.square(m) * first + jnp.square(1 - m) * second - trigamma(c)
        return matrix(own, both, of_shape)

    def _powers(self):
        return self.mean * self.concentration, (1 - self.mean) * self.concentration


def log_normal(score: Float[Array, "2"]) -> LogNormal:
    """Makes a log-normal distribution: loc = score[0], scale = exp(score[1])."""
    return LogNormal(score[0], jnp.exp(score[1]))


def gamma(score: Float[Array, "2"]) -> Gamma:
    """Makes a gamma distribution: mean = exp(score[0]), shape = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> float(jb.distributions.gamma(jnp.array([0.0, 0.0])).variance)
      1.0
    """
    return Gamma(jnp.exp(score[0]), jnp.exp(score[1]))


def weibull(score: Float[Array, "2"]) -> Weibull:
    """Makes a Weibull distribution: scale = exp(score[0]), shape = exp(score[1])."""
    return Weibull(jnp.exp(score[0]), jnp.exp(score[1]))


def beta(score: Float[Array, "2"]) -> Beta:
    """Makes a beta distribution: mean = sigmoid(score[0]), c = exp(score[1])."""
    return Beta(jax.nn.sigmoid(score[0]), jnp.exp(score[1]))
