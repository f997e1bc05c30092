# SPDX-License-Identifier: Apache-2.0
"""Metrics of predictions: errors and deviances, from scores and their inverse link."""

import jax
import jax.numpy as jnp

from jboost.metrics.reading import check_shape, link_rows, mean_rows, of_rows


def _predict(name, scores, targets, weights, inverse_link):
    """Returns predictions and targets [K, N], and weights; K is 1 for 1-D scores.

    Of several targets, NaN marks missing ones: their weight is 0.
    """
    found = link_rows(scores, inverse_link)
    check_shape(targets, found, name)
    size = len(weights)
    found, targets = found.reshape(size, -1).T, targets.reshape(size, -1).T
    if len(targets) > 1:
        weights = jnp.where(jnp.isnan(targets), 0, weights[None])
    return found, targets, weights


@of_rows(_predict)
def mae(found, targets, weights):
    """Returns the mean of |prediction - target| (``mean_absolute_error``).

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.mae([1.0, 2.0], [2.0, 5.0], [3.0, 1.0]))
      1.5
    """
    return jnp.mean(mean_rows(jnp.abs(found - targets), weights))


@of_rows(_predict)
def mse(found, targets, weights):
    """Returns the mean of (prediction - target)^2 (``mean_squared_error``)."""
    return jnp.mean(mean_rows(jnp.square(found - targets), weights))


@of_rows(_predict)
def rmse(found, targets, weights):
    """Returns the mean of each output's root ``mse`` (``root_mean_squared_error``)."""
    return jnp.mean(jnp.sqrt(mean_rows(jnp.square(found - targets), weights)))


@of_rows(_predict)
def mape(found, targets, weights):
    """Returns the mean of |error| / |target| (``mean_absolute_percentage_error``).

    It is a fraction, not a percentage; |target| counts as at least 2^-52, as in
    scikit-learn.
    """
    size = jnp.maximum(jnp.abs(targets), jnp.float32(2.0**-52))
    return jnp.mean(mean_rows(jnp.abs(found - targets) / size, weights))


@of_rows(_predict)
def r2(found, targets, weights):
    """Returns 1 - squared error / variance (``r2_score``); larger is better.

    Of equal targets it is 1 if all predictions are exact, otherwise 0; of a single
    target it is NaN. Rows of weight 0 do not count.
    """
    center = targets - mean_rows(targets, weights)[:, None]
    left = mean_rows(jnp.square(found - targets), weights)
    spread = mean_rows(jnp.square(center), weights)
    # Equal targets may differ from their mean, which is rounded.
    counted = jnp.broadcast_to(weights > 0, targets.shape)
    least = jnp.min(jnp.where(counted, targets, jnp.inf), axis=1)
    equal = least == jnp.max(jnp.where(counted, targets, -jnp.inf), axis=1)
    share = jnp.where(equal, jnp.sign(left), left / jnp.where(equal, 1, spread))
    several = jnp.sum(counted, axis=1) > 1
    return jnp.mean(jnp.where(several, 1 - share, jnp.nan))


@of_rows(_predict)
def poisson_deviance(found, targets, weights):
    """Returns the mean of 2 (t log(t / p) - t + p) (``mean_poisson_deviance``).

    NaN unless all targets t >= 0 and all predictions p >= 0. At p = 0, which scores
    below -87 round to, it is the limit: 0 for t = 0, otherwise infinite.
    """
    ratio = jnp.where(targets > 0, targets / found, 1)
    value = jax.scipy.special.xlogy(targets, ratio) - targets + found
    value = jnp.where(jnp.isposinf(found), jnp.inf, 2 * value)
    value = jnp.where((targets >= 0) & (found >= 0), value, jnp.nan)
    return jnp.mean(mean_rows(value, weights))


@of_rows(_predict)
def gamma_deviance(found, targets, weights):
    """Returns the mean of 2 (log(p / t) + t / p - 1) (``mean_gamma_deviance``).

    NaN unless all targets t > 0 and all predictions p >= 0; infinite at p = 0.
    """
    ratio = targets / found
    value = jnp.where(found > 0, ratio - jnp.log(ratio) - 1, jnp.inf)
    value = jnp.where((targets > 0) & (found >= 0), value, jnp.nan)
    return jnp.mean(mean_rows(2 * value, weights))
