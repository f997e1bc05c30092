# SPDX-License-Identifier: Apache-2.0
"""Distributions of real numbers: normal, Laplace, Student's t, mixtures of normals."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special
from jaxtyping import Array, Float

from jboost.distributions.distribution import Distribution, like, matrix, positive
from jboost.distributions.special import (
    beta_tails,
    divide,
    log_gamma_excess,
    log_ratio_excess,
    trigamma,
)

_LEAST_LOG_EXCESS = math.log(1e-4)  # the mean needs df > 1
_MANY = 100.0  # degrees of freedom
_FARTHEST = 1e18  # in units of the scale, or of the scale times sqrt(df)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normal(Distribution):
    """The normal distribution: mean ``loc``, standard deviation ``scale``.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.Normal(jnp.array(1.0), jnp.array(2.0))
      >>> float(found.cdf(1.0)), float(found.variance)
      (0.5, 4.0)
    """

    loc: Array
    scale: Array

    @property
    def mean(self) -> Array:
        """The mean, ``loc``."""
        return self.loc

    @property
    def variance(self) -> Array:
        """The variance, ``scale`` squared."""
        return jnp.square(self.scale)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density."""
        z = divide(like(self.loc, value) - self.loc, self.scale)
        return -jnp.square(z) / 2 - jnp.log(self.scale) - math.log(2 * math.pi) / 2

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        return special.ndtr((like(self.loc, value) - self.loc) / self.scale)

    def icdf(self, q: Any) -> Array:
        """Returns the q-quantile."""
        return self.loc + self.scale * special.ndtri(like(self.loc, q))

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        noise = jax.random.normal(key, self.shape, self.loc.dtype)
        return self.loc + self.scale * noise

    def fisher_information(self) -> Array:
        """Returns the information of one value about (loc, scale), [2, 2, *shape]."""
        precision = 1 / jnp.square(self.scale)
        return matrix(precision, 0.0, 2 * precision)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Laplace(Distribution):
    """The Laplace distribution: median ``loc``, mean absolute deviation ``scale``.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.Laplace(jnp.array(1.0), jnp.array(2.0))
      >>> float(found.icdf(0.5)), float(found.variance)
      (1.0, 8.0)
    """

    loc: Array
    scale: Array

    @property
    def mean(self) -> Array:
        """The mean, ``loc``."""
        return self.loc

    @property
    def variance(self) -> Array:
        """The variance, 2 ``scale`` squared."""
        return 2 * jnp.square(self.scale)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density."""
        distance = like(self.loc, value) - self.loc
        # The gradient of jnp.abs at 0 is 1, not 0.
        distance = jnp.sign(distance) * distance
        return divide(-distance, self.scale) - jnp.log(2 * self.scale)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        z = (like(self.loc, value) - self.loc) / self.scale
        tail = jnp.exp(-jnp.abs(z)) / 2
        return jnp.where(z < 0, tail, 1 - tail)

    def icdf(self, q: Any) -> Array:
        """Returns the q-quantile."""
        q = like(self.loc, q)
        tail = jnp.log(2 * jnp.minimum(q, 1 - q))
        return self.loc + self.scale * jnp.where(q < 0.5, tail, -tail)

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        noise = jax.random.laplace(key, self.shape, self.loc.dtype)
        return self.loc + self.scale * noise

    def fisher_information(self) -> Array:
        """Returns the information of one value about (loc, scale), [2, 2, *shape]."""
        precision = 1 / jnp.square(self.scale)
        return matrix(precision, 0.0, precision)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StudentT(Distribution):
    """Student's t: center ``loc``, ``scale`` and degrees of freedom ``df``.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.StudentT(*jnp.array([1.0, 2.0, 4.0]))
      >>> float(found.mean), float(found.variance)
      (1.0, 8.0)
    """

    loc: Array
    scale: Array
    df: Array

    @property
    def mean(self) -> Array:
        """The mean, ``loc``; NaN for df <= 1."""
        return jnp.where(self.df > 1, self.loc, jnp.nan)

    @property
    def variance(self) -> Array:
        """The variance; inf for df <= 2, NaN for df <= 1."""
        finite = self.df > 2
        ratio = self.df / jnp.where(finite, self.df - 2, 1)
        variance = jnp.where(finite, jnp.square(self.scale) * ratio, jnp.inf)
        return jnp.where(self.df > 1, variance, jnp.nan)

    def log_prob(self, value: Any) -> Array:
        """Returns the log density."""
        z = divide(like(self.loc, value) - self.loc, self.scale)
        square = jnp.square(jnp.where(jnp.abs(z) < _FARTHEST, z, _FARTHEST))
        few = _log_kernel_of_few(square, jnp.minimum(self.df, _MANY))
        many = _log_kernel_of_many(square, jnp.maximum(self.df, _MANY))
        kernel = jnp.where(self.df > _MANY, many, few)
        return kernel - math.log(2 * math.pi) / 2 - jnp.log(self.scale)

    def cdf(self, value: Any) -> Array:
        """Returns the probability of values up to ``value``."""
        return self._tails(value)[0]

    def _tails(self, value):
        z = divide(like(self.loc, value) - self.loc, self.scale)
        df, root = jnp.broadcast_to(self.df, z.shape), jnp.sqrt(self.df)
        square = jnp.square(jnp.minimum(jnp.abs(z) / root, _FARTHEST))  # z^2 / df
        x, rest = 1 / (1 + square), square / (1 + square)
        excess = (x - df * rest) / 2
        outer, _ = beta_tails(df / 2, jnp.full_like(z, 0.5), x, rest, excess)
        return jnp.where(z < 0, outer / 2, 1 - outer / 2), jnp.where(
            z < 0, 1 - outer / 2, outer / 2
        )

    def draw(self, key: Any) -> Array:
        """Draws one value for each entry of the parameters."""
        noise = jax.random.t(key, self.df, self.shape)
        return self.loc + self.scale * noise

    def fisher_information(self) -> Array:
        """Returns the information of one value about the fields, [3, 3, *shape].

        Lange, Little and Taylor 1989, "Robust statistical modeling using the t
        distribution", appendix B.
        """
        df, scale = self.df, self.scale
        ratio = 1 / (df + 3)
        of_df = _information_of_df(df)
        both = -2 * ratio / ((df + 1) * scale)
        zero = jnp.zeros_like(df)
        square = 1 / jnp.square(scale)
        rows = [
            [(df + 1) * ratio * square, zero, zero],
            [zero, 2 * df * ratio * square, both],
            [zero, both, of_df],
        ]
        return jnp.stack([jnp.stack(row) for row in rows])


def _log_kernel_of_few(square, df):
    """The log density for loc 0 and scale 1, plus log(2 pi) / 2, at square = z^2."""
    half = df / 2
    tail = (half + 0.5) * jnp.log1p(square / df)
    # log Gamma(half + 1 / 2) - log Gamma(half) - log(half) / 2
    ratio = (half + 0.5) * jnp.log1p(1 / df) - 0.5
    ratio = ratio + log_gamma_excess(half + 0.5) - log_gamma_excess(half)
    return ratio - tail


def _log_kernel_of_many(square, df):
    """The same where derivatives in df would cancel."""
    near = jnp.minimum(square, df)
    share = near / df
    tail = near + df * log_ratio_excess(1 + share, jnp.ones_like(share), share)
    farther = jnp.log(square + df) - jnp.log(df)  # a quotient's curvature overflows
    # Far out z^2 cancels against the rest of its own logarithm.
    tail = jnp.where(square < df, tail, df * farther) + farther
    ratio = (1 / (24 * jnp.square(df)) - 1 / 4) / df
    return ratio - tail / 2


def _information_of_df(df):
    """(psi'(df / 2) - psi'((df + 1) / 2)) / 4 - (df + 5) / (2 df (df + 1) (df + 3))."""
    small = jnp.minimum(df, 8.0)
    exact = (trigamma(small / 2) - trigamma((small + 1) / 2)) / 4
    exact = exact - (small + 5) / (2 * small * (small + 1) * (small + 3))
    # For many degrees of freedom the terms cancel: their asymptotic series in 1 / df.
    u = 1 / jnp.maximum(df, 8.0)
    series = (7 + 3 * u) / ((1 + u) * (1 + 3 * u)) - u + 3 * u**3 - 17 * u**5
    return jnp.where(df > 8, u**4 / 2 * series, exact)


def normal(score: Float[Array, "2"]) -> Normal:
    """Makes a normal distribution: loc = score[0], scale = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.normal(jnp.array([3.0, 0.0]))
      >>> float(found.mean), float(found.scale)
      (3.0, 1.0)
    """
    return Normal(score[0], positive(score[1]))


def laplace(score: Float[Array, "2"]) -> Laplace:
    """Makes a Laplace distribution: loc = score[0], scale = exp(score[1]).

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.laplace(jnp.zeros(2))
      >>> round(float(found.mean), 4)
      0.0
    """
    return Laplace(score[0], positive(score[1]))


def student_t(score: Float[Array, "3"]) -> StudentT:
    """Makes Student's t: loc = score[0], scale = exp(score[1]), df = 1 + exp(score[2]).

    More than one degree of freedom, at least 1.0001: the mean exists.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> found = jb.distributions.student_t(jnp.zeros(3))
      >>> round(float(found.mean), 4)
      0.0
    """
    df = 1 + positive(jnp.maximum(score[2], _LEAST_LOG_EXCESS))
    return StudentT(score[0], positive(score[1]), df)


# ---- mixtures -----------------------------------------------------------------------

_LARGEST_LOGIT = 20.0  # no weight of a component is 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormalMixture(Distribution):
    """A mixture of M normal distributions; the last axis of its fields has length M.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> locs, weights = jnp.array([0.0, 4.0]), jnp.array([0.75, 0.25])
      >>> found = jb.distributions.NormalMixture(locs, jnp.ones(2), weights)
      >>> float(found.mean), float(found.variance)
      (1.0, 4.0)
    """

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
