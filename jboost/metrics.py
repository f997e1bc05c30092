# SPDX-License-Identifier: Apache-2.0
"""Metrics: functions of all rows, ``metric(scores, targets, weights) -> number``.

In: the scores of all rows, their targets and weights. Out: one number, which training
reports after each round. Every function here is written in ``jax.numpy``, ignores rows
of weight 0, and agrees with the function of scikit-learn that it names.

A metric compares predictions with targets, and ``inverse_link`` makes predictions of
scores. Where :func:`jboost.fit` gets a metric of this module, by name or as a function,
it binds the inverse link that the loss implies (:func:`jboost.losses.inverse_link`; for
a loss of your own none, so that the score is the prediction). To use another link,
bind it: ``{"mae": partial(jb.metrics.mae, inverse_link=jnp.exp)}``.

What each needs:

- a ranking, which any score gives: ``auc``, ``average_precision``;
- probabilities, from a loss of classes or a bound link: ``log_loss``, ``brier``;
- labels, from a loss of classes or a bound link: ``accuracy``, ``error``;
- predictions, which every loss gives: ``mae``, ``mse``, ``rmse``, ``mape``, ``r2``,
  ``poisson_deviance``, ``gamma_deviance``.

Losses of classes are ``logistic``, ``focal``, ``exponential`` and ``softmax``; for
labels ``hinge`` and ``hinge_squared``, too. Targets of two classes are 0 and 1, or -1
and 1.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.losses import INVERSE_LINKS, exponential
from jboost.numerics.sums import sum_rows

Link = Callable[..., Any] | None


def auc(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Area under the ROC curve: sklearn's ``roc_auc_score``; larger is better.

    Of K > 2 classes the mean of each class against the rest. NaN where a class has no
    rows.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.auc([0.1, 0.7, 0.4], [0, 1, 1]))
      1.0
    """
    return _rank("auc", scores, targets, weights, inverse_link)


def average_precision(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """sum_n (R_n - R_{n-1}) P_n: ``average_precision_score``; larger is better.

    P_n and R_n are precision and recall at the n-th threshold. Of K > 2 classes the
    mean of each class against the rest.
    """
    return _rank("average_precision", scores, targets, weights, inverse_link)


def log_loss(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """-log of the probability of the class that came: ``log_loss``.

    Two or K classes. Targets of two classes may be probabilities, too. Without a link
    that is known here (sigmoid, softmax) probabilities are clipped to [e, 1 - e] with
    e = 2^-23, as scikit-learn clips those in float32.
    """
    scores, targets, weights = _read(scores, targets, weights)
    logs = _log_probabilities(scores, inverse_link)
    if logs.ndim == 2 and scores.ndim == 2:
        return _mean(-_pick(logs, targets, "log_loss"), weights)
    chance = _as_share(targets, scores, "log_loss")
    return _mean(-chance * logs[:, 1] - (1 - chance) * logs[:, 0], weights)


def brier(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """(p - target)^2 of two classes, its sum over K > 2: ``brier_score_loss``."""
    scores, targets, weights = _read(scores, targets, weights)
    found = _link_rows(scores, inverse_link)
    if found.ndim == 1:
        chance = _as_share(targets, found, "brier")
        return _mean(jnp.square(found - chance), weights)
    _check_shape(targets, found[:, 0], "brier")
    places = jnp.arange(found.shape[1], dtype=jnp.float32)
    came = (targets[:, None] == places[None]).astype(jnp.float32)
    total = jnp.sum(jnp.square(found - came), axis=1)
    return _mean(total / 2 if found.shape[1] == 2 else total, weights)


def accuracy(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Share of the rows with the right label: ``accuracy_score``; larger is better.

    The label is the class of largest probability; of two classes with one score, the
    second where its probability is above 1/2.
    """
    return 1 - error(scores, targets, weights, inverse_link=inverse_link)


def error(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Share of the rows with a wrong label: ``zero_one_loss``, 1 - accuracy."""
    scores, targets, weights = _read(scores, targets, weights)
    found = _link_rows(scores, inverse_link)
    if found.ndim == 2:
        _check_shape(targets, found[:, 0], "error")
        wrong = jnp.argmax(found, axis=1) != targets.astype(jnp.int32)
    else:
        _check_shape(targets, found, "error")
        wrong = (found > 0.5) != (targets > 0)
    return _mean(wrong.astype(jnp.float32), weights)


def mae(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """|prediction - target|: ``mean_absolute_error``.

    Example:
      >>> import jboost as jb
      >>> float(jb.metrics.mae([1.0, 2.0], [2.0, 5.0], [3.0, 1.0]))
      1.5
    """
    found, targets, weights = _predict("mae", scores, targets, weights, inverse_link)
    return jnp.mean(_mean(jnp.abs(found - targets), weights))


def mse(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """(prediction - target)^2: ``mean_squared_error``."""
    found, targets, weights = _predict("mse", scores, targets, weights, inverse_link)
    return jnp.mean(_mean(jnp.square(found - targets), weights))


def rmse(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Square root of ``mse``, output by output: ``root_mean_squared_error``."""
    found, targets, weights = _predict("rmse", scores, targets, weights, inverse_link)
    return jnp.mean(jnp.sqrt(_mean(jnp.square(found - targets), weights)))


def mape(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """|prediction - target| / |target|: ``mean_absolute_percentage_error``.

    As a share, not in percent; |target| counts as at least 2^-52.
    """
    found, targets, weights = _predict("mape", scores, targets, weights, inverse_link)
    size = jnp.maximum(jnp.abs(targets), jnp.float32(2.0**-52))
    return jnp.mean(_mean(jnp.abs(found - targets) / size, weights))


def r2(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """1 - squared error / variance: ``r2_score``; larger is better."""
    found, targets, weights = _predict("r2", scores, targets, weights, inverse_link)
    center = targets - _mean(targets, weights)[:, None]
    left = _mean(jnp.square(found - targets), weights)
    return jnp.mean(1 - left / _mean(jnp.square(center), weights))


def poisson_deviance(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """2 (t log(t / p) - t + p): ``mean_poisson_deviance``; NaN unless t >= 0, p > 0."""
    name = "poisson_deviance"
    found, targets, weights = _predict(name, scores, targets, weights, inverse_link)
    value = jax.scipy.special.xlogy(targets, targets / found) - targets + found
    value = jnp.where((targets >= 0) & (found > 0), 2 * value, jnp.nan)
    return jnp.mean(_mean(value, weights))


def gamma_deviance(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """2 (log(p / t) + t / p - 1): ``mean_gamma_deviance``; NaN unless t > 0, p > 0."""
    name = "gamma_deviance"
    found, targets, weights = _predict(name, scores, targets, weights, inverse_link)
    ratio = targets / found
    value = jnp.where((targets > 0) & (found > 0), ratio - jnp.log(ratio) - 1, jnp.nan)
    return jnp.mean(_mean(2 * value, weights))


METRICS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        metric.__name__: metric
        for metric in (
            auc, average_precision, log_loss, brier, accuracy, error, mae, mse, rmse,
            mape, r2, poisson_deviance, gamma_deviance,
        )
    }
)  # fmt: skip
MAXIMIZED = (auc, average_precision, accuracy, r2)  # the larger the better
RANKS = (auc, average_precision)
PROBABILITIES = (log_loss, brier)
LABELS = (accuracy, error)


def _read(scores, targets, weights):
    """Arrays in float32; a row without a weight counts 1, one of weight 0 is 0."""
    scores, targets = jnp.asarray(scores), jnp.asarray(targets)
    if scores.ndim not in (1, 2):
        raise ValueError(f"scores must be [N] or [N, K], got {scores.shape=}")
    size = scores.shape[0]
    weights = jnp.ones(size) if weights is None else jnp.asarray(weights)
    weights = weights.astype(jnp.float32)
    if weights.shape != (size,) or targets.shape[:1] != (size,):
        raise ValueError(
            f"scores, targets and weights must have as many rows, got {scores.shape}, "
            f"{targets.shape} and {weights.shape}"
        )
    targets = targets.astype(jnp.float32)
    counted = (weights > 0).reshape(-1, *(1,) * (targets.ndim - 1))
    return scores.astype(jnp.float32), jnp.where(counted, targets, 0), weights


def _check_shape(targets, found, name):
    if targets.shape != found.shape:
        raise ValueError(
            f"{name} needs a target for each prediction, got targets of shape "
            f"{targets.shape} and predictions of shape {found.shape}"
        )


def _mean(values, weights):
    """Weighted means along the last axis; rows of weight 0 may hold anything."""
    each = jnp.broadcast_to(weights, values.shape)
    return sum_rows(jnp.where(each > 0, values, 0) * each) / sum_rows(weights)


def _link_rows(scores, inverse_link):
    """Predictions, row by row."""
    return scores if inverse_link is None else jax.vmap(inverse_link)(scores)


def _predict(name, scores, targets, weights, inverse_link):
    """Predictions and targets [K, N]; K is 1 without an axis for it."""
    scores, targets, weights = _read(scores, targets, weights)
    found = _link_rows(scores, inverse_link)
    _check_shape(targets, found, name)
    size = len(weights)
    return found.reshape(size, -1).T, targets.reshape(size, -1).T, weights


def _as_share(targets, found, name):
    """Of two classes: 0 and 1, or a probability in between; -1 counts as 0."""
    _check_shape(targets, found, name)
    return jnp.maximum(targets, 0)


def _log_probabilities(scores, inverse_link):
    """Logarithms [N, classes], accurate also where a probability is nearly 0 or 1."""
    if inverse_link is jax.nn.softmax and scores.ndim == 2:
        return jax.nn.log_softmax(scores, axis=1)
    twice = INVERSE_LINKS[exponential]  # sigmoid(2 score)
    if inverse_link in (jax.nn.sigmoid, twice) and scores.ndim == 1:
        logit = scores if inverse_link is jax.nn.sigmoid else 2 * scores
        return jax.nn.log_sigmoid(jnp.stack([-logit, logit], axis=1))
    found = _link_rows(scores, inverse_link)
    least = jnp.finfo(jnp.float32).eps
    found = jnp.clip(found, least, 1 - least)
    return jnp.log(jnp.stack([1 - found, found], axis=1) if found.ndim == 1 else found)


def _pick(logs, targets, name):
    _check_shape(targets, logs[:, 0], name)
    place = targets.astype(jnp.int32)
    return jnp.take_along_axis(logs, place[:, None], axis=1)[:, 0]


def _rank(name, scores, targets, weights, inverse_link):
    """A metric of two classes, or its mean of each of K classes against the rest."""
    measure = _auc_of_two if name == "auc" else _precision_of_two
    scores, targets, weights = _read(scores, targets, weights)
    if scores.ndim == 1:
        _check_shape(targets, scores, name)
        return measure(scores, targets > 0, weights)
    _check_shape(targets, scores[:, 0], name)
    if scores.shape[1] == 2:  # of logits and of probabilities alike
        return measure(scores[:, 1] - scores[:, 0], targets == 1, weights)
    found = _link_rows(scores, inverse_link)
    places = jnp.arange(found.shape[1], dtype=jnp.float32)
    positive = targets[None] == places[:, None]
    return jnp.mean(jax.vmap(measure, (0, 0, None))(found.T, positive, weights))


def _auc_of_two(scores, positive, weights):
    """P(a positive is ranked above a negative); ties count half."""
    hits, misses, first, last = _sort(scores, positive, weights, descending=False)
    below = _sums_before(misses)
    share = (below[first] + below[last + 1]) / (2 * below[-1])
    return sum_rows(hits * share) / sum_rows(hits)


def _precision_of_two(scores, positive, weights):
    """The mean over positives of the precision among rows ranked as high or higher."""
    hits, misses, _, last = _sort(scores, positive, weights, descending=True)
    found, false = _sums_before(hits)[last + 1], _sums_before(misses)[last + 1]
    precision = jnp.where(hits > 0, found / (found + false), 0)
    return sum_rows(hits * precision) / sum_rows(hits)


def _sort(scores, positive, weights, *, descending):
    """Weights of positives and of negatives by score; where each tie begins and ends.

    Rows of weight 0 add nothing wherever they are.
    """
    order = jnp.argsort(-scores if descending else scores)
    held, places = scores[order], jnp.arange(len(order), dtype=jnp.int32)
    new = jnp.concatenate([jnp.ones(1, bool), held[1:] != held[:-1]])
    first = jax.lax.cummax(jnp.where(new, places, 0))
    ends = jnp.concatenate([new[1:], jnp.ones(1, bool)])
    last = jax.lax.cummin(jnp.where(ends, places, len(order) - 1), reverse=True)
    hits = jnp.where(positive, weights, 0)[order]
    return hits, weights[order] - hits, first, last


def _sums_before(values):
    """[N + 1]: the sum of the values before each place, and of all."""
    return jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(values)])


def second_class(score: Float[ArrayLike, ""]) -> Any:
    """1 where a score speaks for the second of two classes, else 0."""
    return jnp.where(jnp.asarray(score) > 0, np.float32(1), np.float32(0))
