# SPDX-License-Identifier: Apache-2.0
"""Distributions of positive numbers, and of numbers between 0 and 1."""

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
    bounded,
    like,
    matrix,
    positive,
    within,
)
from jboost.distributions.special import (
    beta_tails,
    divide,
    draw_beta,
    draw_gamma,
    gamma_tails,
    keep_positive,
    log_gamma_excess,
    log_ratio_excess,
    trigamma_excess,
)

_LARGE = 64.0  # from this concentration on, terms of the log density would cancel
_LEAST_RATIO = 1e-12  # the least ratio of a value to the mean
_SMALL = 0.1  # an inverse concentration that counts as small
# (-1)^n zeta(n) (2^n - 2) / n for n from 9 to 2: the terms of log Gamma(1 + 2 u) - 2
# log Gamma(1 + u), a series in u.
_MOMENTS = (
    -56.780476,
    31.879456,
    -18.150287,
    10.512545,
    -6.2215665,
    3.7881313,
    -2.4041138,
    1.6449341,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogNormal(Distribution):
    """exp of a normal variable with mean ``loc`` and standard deviation ``scale``.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.LogNormal(jnp.array(0.0), jnp.array(1.0))
      >>> float(found.icdf(0.5))
      1.0
    """

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
        of_value = jnp.log(jnp.where(inside, value, 1))
        z = divide(of_value - self.loc, self.scale)
        normal = jnp.log(self.scale) + math.log(2 * math.pi) / 2
        return within(inside, -jnp.square(z) / 2 - normal - of_value)

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
        return keep_positive(jnp.exp(self.loc + self.scale * noise))

    def fisher_information(self) -> Array:
        """Returns the information of one value about (loc, scale), [2, 2, *shape]."""
        precision = 1 / jnp.square(self.scale)
        return matrix(precision, 0.0, 2 * precision)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gamma(Distribution):
    """The gamma distribution, given by ``mean`` and ``concentration`` (the shape k).

    The variance is mean^2 / k.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.Gamma(jnp.array(6.0), jnp.array(4.0))
      >>> float(found.mean), float(found.variance)
      (6.0, 9.0)
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
        ratio = divide(value, self.mean)
        plain = (k < _LARGE) & (ratio > _LEAST_RATIO)
        small = jnp.log(jnp.where(plain, ratio, 1)) - ratio + 1
        large = log_ratio_excess(value, self.mean, value - self.mean)
        log_prob = k * jnp.where(plain, small, large) - log_gamma_excess(k)
        return within(inside, log_prob - jnp.log(value))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        return self._tails(value)[0]

    def _tails(self, value):
        value = jnp.maximum(like(self.mean, value), 0)
        value, mean, k = jnp.broadcast_arrays(value, self.mean, self.concentration)
        inside = value > 0
        value = jnp.where(inside, value, mean)
        below, above = gamma_tails(k, value, mean, value - mean)
        return jnp.where(inside, below, 0), jnp.where(inside, above, 1)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        k = self.concentration
        return draw_gamma(key, k, self.mean / k)

    def fisher_information(self) -> Array:
        """Returns the information of one value about the two fields, [2, 2, *shape]."""
        k = self.concentration
        of_shape = trigamma_excess(k) / jnp.square(k)
        return matrix(k / jnp.square(self.mean), 0.0, of_shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weibull(Distribution):
    """The Weibull distribution: P(Y > y) = exp(-(y / scale)^concentration).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.Weibull(jnp.array(2.0), jnp.array(1.0))
      >>> float(found.mean), float(found.cdf(0.0))
      (2.0, 0.0)
    """

    scale: Array
    concentration: Array
    support = (0.0, MOST)

    @property
    def mean(self) -> Array:
        """The mean, scale Gamma(1 + 1 / concentration)."""
        moment = special.gammaln(1 + 1 / self.concentration)
        return jnp.exp(jnp.log(self.scale) + moment)

    @property
    def variance(self) -> Array:
        """The variance."""
        inverse = 1 / self.concentration
        first = special.gammaln(1 + inverse)
        small = jnp.minimum(inverse, _SMALL)
        # log(1 + variance / mean^2): log Gamma(1 + 2 u) - 2 log Gamma(1 + u).
        near = jnp.square(small) * jnp.polyval(
            jnp.asarray(_MOMENTS, small.dtype), small
        )
        excess = jnp.where(
            inverse < _SMALL, near, special.gammaln(1 + 2 * inverse) - 2 * first
        )
        size = 2 * (jnp.log(self.scale) + first) + excess
        return -jnp.exp(size) * jnp.expm1(-excess)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density; -inf for values <= 0."""
        value, k = like(self.scale, value), self.concentration
        inside = value > 0
        value = jnp.where(inside, value, 1)
        of_value = jnp.log(value)
        power = k * jnp.where(
            k > _LARGE, self._log_ratio(value), of_value - jnp.log(self.scale)
        )
        return within(inside, jnp.log(k) + power - of_value - jnp.exp(power))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        value = like(self.scale, value)
        inside = value > 0
        power = self.concentration * self._log_ratio(jnp.where(inside, value, 1))
        return jnp.where(inside, -jnp.expm1(-jnp.exp(power)), 0)

    def icdf(self, q: Any) -> Array:
        """Returns the q-quantile."""
        hazard = -jnp.log1p(-like(self.scale, q))
        power = jnp.log(hazard) / self.concentration
        return jnp.exp(jnp.log(self.scale) + power)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        hazard = jax.random.exponential(key, self.shape, self.scale.dtype)
        power = jnp.log(hazard) / self.concentration
        return keep_positive(jnp.exp(jnp.log(self.scale) + power))

    def fisher_information(self) -> Array:
        """Returns the information of one value about the two fields, [2, 2, *shape]."""
        scale, k = self.scale, self.concentration
        rest = 1 - float(jnp.euler_gamma)
        own = jnp.square(k / scale)
        both = -rest / scale
        of_shape = (math.pi**2 / 6 + rest**2) / jnp.square(k)
        return matrix(own, both, of_shape)

    def _log_ratio(self, value):
        """Returns log(value / scale), accurate to the last digits."""
        excess = divide(value - self.scale, self.scale)
        near = jnp.abs(excess) < 0.3
        far = jnp.log(value) - jnp.log(self.scale)
        return jnp.where(near, jnp.log1p(jnp.where(near, excess, 0)), far)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beta(Distribution):
    """The beta distribution, given by its ``mean`` m and ``concentration`` c.

    Its usual parameters are m c and (1 - m) c; the variance is m (1 - m) / (1 + c).
    ``logit`` is that of the mean: above 17, float32 cannot tell the mean from 1.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.Beta(jnp.array(0.0), jnp.array(2.0))
      >>> float(found.mean), round(float(found.cdf(0.25)), 4)
      (0.5, 0.25)
    """

    logit: Array
    concentration: Array
    support = (0.0, 1.0)

    @property
    def mean(self) -> Array:
        """The mean, sigmoid(logit)."""
        return jax.nn.sigmoid(self.logit)

    @property
    def variance(self) -> Array:
        """The variance, mean (1 - mean) / (1 + concentration)."""
        return self.mean * self._rest / (1 + self.concentration)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density; -inf outside (0, 1)."""
        value = like(self.logit, value)
        inside = (value > 0) & (value < 1)
        value = jnp.where(inside, value, 0.5)
        mean, rest, (first, second) = self.mean, self._rest, self._powers()
        away = self._subtract_mean(value)
        log_prob = log_gamma_excess(self.concentration)
        log_prob -= log_gamma_excess(first) + log_gamma_excess(second)
        log_prob += first * log_ratio_excess(value, mean, away)
        log_prob += second * log_ratio_excess(1 - value, rest, -away)
        return within(inside, log_prob - jnp.log(value) - jnp.log1p(-value))

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        return self._tails(value)[0]

    def _tails(self, value):
        value = jnp.clip(like(self.logit, value), 0, 1)
        excess = self.concentration * self._subtract_mean(value)
        first, second, value = jnp.broadcast_arrays(*self._powers(), value)
        below, above = beta_tails(first, second, value, 1 - value, excess)
        below = jnp.where(value > 0, jnp.where(value < 1, below, 1), 0)
        return below, jnp.where(value > 0, jnp.where(value < 1, above, 0), 1)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        return draw_beta(key, *self._powers())

    def fisher_information(self) -> Array:
        """Returns the information of one value about the two fields, [2, 2, *shape]."""
        m, rest, c = self.mean, self._rest, self.concentration
        first, second = self._powers()
        # a^2 psi'(a) = excess + a; outside of ``own`` the terms without excess cancel.
        of_first, of_second = trigamma_excess(first), trigamma_excess(second)
        own = jnp.square(rest) * (of_first + first)
        own += jnp.square(m) * (of_second + second)
        both = (rest * of_first - m * of_second) / c
        of_shape = (of_first + of_second - trigamma_excess(c)) / jnp.square(c)
        return matrix(own, both, of_shape)

    @property
    def _rest(self):
        return jax.nn.sigmoid(-self.logit)

    def _powers(self):
        return self.mean * self.concentration, self._rest * self.concentration

    def _subtract_mean(self, value):
        """Returns value - mean, from the complements where these are exact."""
        return jnp.where(self.logit > 0, self._rest - (1 - value), value - self.mean)


def log_normal(score: Float[Array, "2"]) -> LogNormal:
    """Makes a log-normal distribution: loc = score[0], scale = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.log_normal(jnp.zeros(2))
      >>> round(float(found.mean), 4)
      1.6487
    """
    return LogNormal(score[0], positive(score[1]))


def gamma(score: Float[Array, "2"]) -> Gamma:
    """Makes a gamma distribution: mean = exp(score[0]), shape = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> float(jb.distributions.gamma(jnp.array([0.0, 0.0])).variance)
      1.0
    """
    return Gamma(positive(score[0]), positive(score[1]))


def weibull(score: Float[Array, "2"]) -> Weibull:
    """Makes a Weibull distribution: scale = exp(score[0]), shape = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.weibull(jnp.zeros(2))
      >>> round(float(found.mean), 4)
      1.0
    """
    return Weibull(positive(score[0]), positive(score[1]))


def beta(score: Float[Array, "2"]) -> Beta:
    """Makes a beta distribution: mean = sigmoid(score[0]), c = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.beta(jnp.zeros(2))
      >>> round(float(found.mean), 4)
      0.5
    """
    return Beta(bounded(score[0]), positive(score[1]))
