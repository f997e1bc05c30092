# SPDX-License-Identifier: Apache-2.0
"""Metrics of rows, from predictions, probabilities or labels.

They take scores, and the inverse link that turns these into predictions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from jboost.losses.rows import INVERSE_LINKS, exponential
from jboost.metrics.reading import (
    check_shape,
    link_rows,
    mean_rows,
    of_rows,
    settle_infinities,
)


@of_rows(by_label=True)
def log_loss(scores, targets, weights, inverse_link):
    """Returns the mean of -log(predicted probability of the true class) (``log_loss``).

    It takes two or K classes. For targets [N, K], which may be NaN where unknown, it is
    the mean over the labels. Targets of two classes can be probabilities. With the
    links sigmoid and softmax it is computed from the scores; with any other link,
    probabilities are clipped to [e, 1 - e], e = 2^-23, as in scikit-learn for float32.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.log_loss([0.25, 0.5], [0, 1])), 4)
      0.4904
    """
    logs = _log_probabilities(scores, inverse_link)
    if logs.ndim == 2 and scores.ndim == 2:
        return mean_rows(-_pick(logs, targets, "log_loss"), weights)
    chance = _as_share(targets, scores, "log_loss")
    # An infinite logarithm does not count where its class has no share.
    second = jnp.where(chance > 0, -chance * logs[:, 1], 0)
    first = jnp.where(chance < 1, (1 - chance) * logs[:, 0], 0)
    return mean_rows(second - first, weights)


@of_rows(by_label=True)
def brier(scores, targets, weights, inverse_link):
    """Returns the mean of (p - target)^2, summed over K > 2 (``brier_score_loss``).

    For targets [N, K], which may be NaN where unknown, it is the mean over the labels.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.brier([0.25, 0.5], [0, 1]))
      0.15625
    """
    found = link_rows(scores, inverse_link)
    if found.ndim == 1:
        chance = _as_share(targets, found, "brier")
        return mean_rows(jnp.square(found - chance), weights)
    check_shape(targets, found[:, 0], "brier")
    classes = jnp.arange(found.shape[1], dtype=jnp.float32)
    observed = (targets[:, None] == classes[None]).astype(jnp.float32)
    total = jnp.sum(jnp.square(found - observed), axis=1)
    return mean_rows(total / 2 if found.shape[1] == 2 else total, weights)


@of_rows()
def accuracy(scores, targets, weights, inverse_link):
    """Returns the fraction of correct labels (``accuracy_score``); larger is better.

    Targets are [N]. The label is the class with the largest probability. For two
    classes and one score, it is the second class if its probability is above 1/2.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.accuracy([0.1, 0.3, 0.9], [0, 1, 1])), 4)
      0.6667
    """
    return 1 - _find_error(scores, targets, weights, inverse_link)


@of_rows()
def error(scores, targets, weights, inverse_link):
    """Returns the fraction of wrong labels, 1 - accuracy (``zero_one_loss``).

    Targets are [N].

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.error([0.1, 0.3, 0.9], [0, 1, 1])), 4)
      0.3333
    """
    return _find_error(scores, targets, weights, inverse_link)


def second_class(score: Float[ArrayLike, ""]) -> Any:
    """Returns 1 where the score is positive, the second of two classes, else 0.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.second_class(0.3))
      1.0
    """
    return jnp.where(jnp.asarray(score) > 0, np.float32(1), np.float32(0))


def _find_error(scores, targets, weights, inverse_link):
    found = link_rows(scores, inverse_link)
    if found.ndim == 2:
        check_shape(targets, found[:, 0], "error")
        wrong = jnp.argmax(found, axis=1) != targets.astype(jnp.int32)
        broken = jnp.any(jnp.isnan(found), axis=1)
    else:
        check_shape(targets, found, "error")
        wrong = (found > 0.5) != (targets > 0)
        broken = jnp.isnan(found)
    return mean_rows(jnp.where(broken, jnp.nan, wrong.astype(jnp.float32)), weights)


def _as_share(targets, found, name):
    """Returns targets of two classes as probabilities; -1 becomes 0."""
    check_shape(targets, found, name)
    return jnp.maximum(targets, 0)


def _log_probabilities(scores, inverse_link):
    """Returns log probabilities [N, classes], accurate near probabilities 0 and 1."""
    if inverse_link is jax.nn.softmax and scores.ndim == 2:
        return jax.nn.log_softmax(settle_infinities(scores), axis=1)
    twice = INVERSE_LINKS[exponential]  # sigmoid(2 score)
    if inverse_link in (jax.nn.sigmoid, twice) and scores.ndim == 1:
        logit = scores if inverse_link is jax.nn.sigmoid else 2 * scores
        return jax.nn.log_sigmoid(jnp.stack([-logit, logit], axis=1))
    found = link_rows(scores, inverse_link)
    least = jnp.finfo(jnp.float32).eps
    found = jnp.clip(found, least, 1 - least)
    return jnp.log(jnp.stack([1 - found, found], axis=1) if found.ndim == 1 else found)


def _pick(logs, targets, name):
    """Returns the entry of each row's target."""
    check_shape(targets, logs[:, 0], name)
    label = targets.astype(jnp.int32)
    return jnp.take_along_axis(logs, label[:, None], axis=1)[:, 0]


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
    """Returns the mean of (prediction - target)^2 (``mean_squared_error``).

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.mse([1.0, 3.0], [2.0, 5.0]))
      2.5
    """
    return jnp.mean(mean_rows(jnp.square(found - targets), weights))


@of_rows(_predict)
def rmse(found, targets, weights):
    """Returns the mean of each output's root ``mse`` (``root_mean_squared_error``).

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.rmse([1.0, 3.0], [2.0, 5.0])), 4)
      1.5811
    """
    return jnp.mean(jnp.sqrt(mean_rows(jnp.square(found - targets), weights)))


@of_rows(_predict)
def mape(found, targets, weights):
    """Returns the mean of |error| / |target| (``mean_absolute_percentage_error``).

    It is a fraction, not a percentage; |target| counts as at least 2^-52, as in
    scikit-learn.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.mape([1.0, 3.0], [2.0, 2.0]))
      0.5
    """
    size = jnp.maximum(jnp.abs(targets), jnp.float32(2.0**-52))
    return jnp.mean(mean_rows(jnp.abs(found - targets) / size, weights))


@of_rows(_predict)
def r2(found, targets, weights):
    """Returns 1 - squared error / variance (``r2_score``); larger is better.

    It is 1 for equal targets that are all predicted exactly, 0 for other predictions of
    equal targets, and NaN for a single target. Rows of weight 0 do not count.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.r2([1.0, 3.0], [2.0, 5.0])), 4)
      -0.1111
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

    It is NaN unless all targets t >= 0 and all predictions p >= 0. At p = 0, which
    scores below -87 round to, it is the limit: 0 for t = 0, otherwise infinite.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.poisson_deviance([1.0, 2.0], [1.0, 3.0])), 4)
      0.2164
    """
    ratio = jnp.where(targets > 0, targets / found, 1)
    value = jax.scipy.special.xlogy(targets, ratio) - targets + found
    value = jnp.where(jnp.isposinf(found), jnp.inf, 2 * value)
    value = jnp.where((targets >= 0) & (found >= 0), value, jnp.nan)
    return jnp.mean(mean_rows(value, weights))


@of_rows(_predict)
def gamma_deviance(found, targets, weights):
    """Returns the mean of 2 (log(p / t) + t / p - 1) (``mean_gamma_deviance``).

    It is NaN unless all targets t > 0 and all predictions p >= 0; infinite at p = 0.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.metrics.gamma_deviance([1.0, 2.0], [1.0, 3.0])), 4)
      0.0945
    """
    ratio = targets / found
    value = jnp.where(found > 0, ratio - jnp.log(ratio) - 1, jnp.inf)
    value = jnp.where((targets > 0) & (found >= 0), value, jnp.nan)
    return jnp.mean(mean_rows(2 * value, weights))
