# SPDX-License-Identifier: Apache-2.0
"""Built-in metrics: functions of all rows, ``metric(scores, targets, weights)``.

In: the scores of all rows, their targets and weights. Out: one number, which training
reports after each round. Every function is written in ``jax.numpy``, ignores rows of
weight 0, and agrees with the scikit-learn function named in its docstring.

``inverse_link`` converts scores to predictions. If :func:`jboost.fit` gets a metric of
this module, by name or as a function, it binds the inverse link of the loss
(:func:`jboost.losses.inverse_link`). A custom loss has none, so that its score is the
prediction. To bind another: ``{"mae": partial(mae, inverse_link=jnp.exp)}``.

``auc`` and ``average_precision`` need a ranking, which any score provides. ``mae``,
``mse``, ``rmse``, ``mape``, ``r2``, ``poisson_deviance`` and ``gamma_deviance`` need
predictions, which every loss provides. ``log_loss`` and ``brier`` need probabilities,
``accuracy`` and ``error`` need labels: from a bound link or a classification loss
(``logistic``, ``focal``, ``exponential``, ``softmax``; for labels also ``hinge`` and
``hinge_squared``). Targets of two classes are 0 and 1, or -1 and 1.
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
    """Returns the area under the ROC curve (``roc_auc_score``); larger is better.

    For K > 2 classes, it is the mean of one-vs-rest. NaN if a class has no rows.

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
    """Returns sum_n (R_n - R_{n-1}) P_n (``average_precision_score``).

    Larger is better. P_n and R_n are precision and recall at the n-th threshold. For
    K > 2 classes, it is the mean of one-vs-rest.
    """
    return _rank("average_precision", scores, targets, weights, inverse_link)


def log_loss(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns the mean of -log(predicted probability of the true class) (``log_loss``).

    For two or K classes. Targets of two classes can be probabilities. With the links
    sigmoid and softmax it is computed from the scores; with any other link,
    probabilities are clipped to [e, 1 - e], e = 2^-23, as in scikit-learn for float32.
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
    """Returns the mean of (p - target)^2, summed over K > 2 (``brier_score_loss``)."""
    scores, targets, weights = _read(scores, targets, weights)
    found = _link_rows(scores, inverse_link)
    if found.ndim == 1:
        chance = _as_share(targets, found, "brier")
        return _mean(jnp.square(found - chance), weights)
    _check_shape(targets, found[:, 0], "brier")
    classes = jnp.arange(found.shape[1], dtype=jnp.float32)
    observed = (targets[:, None] == classes[None]).astype(jnp.float32)
    total = jnp.sum(jnp.square(found - observed), axis=1)
    return _mean(total / 2 if found.shape[1] == 2 else total, weights)


def accuracy(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns the fraction of correct labels (``accuracy_score``); larger is better.

    The label is the class with the largest probability. For two classes and one score,
    it is the second class if its probability is above 1/2.
    """
    return 1 - error(scores, targets, weights, inverse_link=inverse_link)


def error(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, " N"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns the fraction of wrong labels, 1 - accuracy (``zero_one_loss``)."""
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
    """Returns the mean of |prediction - target| (``mean_absolute_error``).

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
    """Returns the mean of (prediction - target)^2 (``mean_squared_error``)."""
    found, targets, weights = _predict("mse", scores, targets, weights, inverse_link)
    return jnp.mean(_mean(jnp.square(found - targets), weights))


def rmse(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns the mean of each output's root ``mse`` (``root_mean_squared_error``)."""
    found, targets, weights = _predict("rmse", scores, targets, weights, inverse_link)
    return jnp.mean(jnp.sqrt(_mean(jnp.square(found - targets), weights)))


def mape(
    scores: Shaped[ArrayLike, "N *K"],
    targets: Shaped[ArrayLike, "N *K"],
    weights: Shaped[ArrayLike, " N"] | None = None,
    *,
    inverse_link: Link = None,
) -> Float[Array, ""]:
    """Returns the mean of |error| / |target| (``mean_absolute_percentage_error``).

    It is a fraction, not a percentage; |target| counts as at least 2^-52, as in
    scikit-learn.
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
    """Returns 1 - squared error / variance (``r2_score``); larger is better."""
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
    """Returns the mean of 2 (t log(t / p) - t + p) (``mean_poisson_deviance``).

    NaN unless all targets t >= 0 and all predictions p > 0.
    """
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
    """Returns the mean of 2 (log(p / t) + t / p - 1) (``mean_gamma_deviance``).

    NaN unless all targets t > 0 and all predictions p > 0.
    """
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
MAXIMIZED = (auc, average_precision, accuracy, r2)  # larger is better
RANKS = (auc, average_precision)
PROBABILITIES = (log_loss, brier)
LABELS = (accuracy, error)


def _read(scores, targets, weights):
    """Converts to float32; weights default to 1, targets of weight 0 become 0.

    The latter keeps NaN targets in ignored rows, such as padding, out of all sums.
    """
    scores, targets = jnp.asarray(scores), jnp.asarray(targets)
    if scores.ndim not in (1, 2):
        raise ValueError(f"scores must have shape [N] or [N, K], got {scores.shape=}")
    size = scores.shape[0]
    weights = jnp.ones(size) if weights is None else jnp.asarray(weights)
    weights = weights.astype(jnp.float32)
    if weights.shape != (size,) or targets.shape[:1] != (size,):
        raise ValueError(
            "scores, targets and weights must have the same number of rows, got shapes "
            f"{scores.shape}, {targets.shape} and {weights.shape}"
        )
    targets = targets.astype(jnp.float32)
    counted = (weights > 0).reshape(-1, *(1,) * (targets.ndim - 1))
    return scores.astype(jnp.float32), jnp.where(counted, targets, 0), weights


def _check_shape(targets, found, name):
    if targets.shape != found.shape:
        raise ValueError(
            f"{name} needs targets of the same shape as predictions, got targets of "
            f"shape {targets.shape} and predictions of shape {found.shape}"
        )


def _mean(values, weights):
    """Returns weighted means over the last axis, ignoring rows of weight 0."""
    each = jnp.broadcast_to(weights, values.shape)
    return sum_rows(jnp.where(each > 0, values, 0) * each) / sum_rows(weights)


def _link_rows(scores, inverse_link):
    """Converts the scores of each row to predictions."""
    return scores if inverse_link is None else jax.vmap(inverse_link)(scores)


def _predict(name, scores, targets, weights, inverse_link):
    """Returns predictions and targets [K, N], and weights; K is 1 for 1-D scores."""
    scores, targets, weights = _read(scores, targets, weights)
    found = _link_rows(scores, inverse_link)
    _check_shape(targets, found, name)
    size = len(weights)
    return found.reshape(size, -1).T, targets.reshape(size, -1).T, weights


def _as_share(targets, found, name):
    """Returns targets of two classes as probabilities; -1 becomes 0."""
    _check_shape(targets, found, name)
    return jnp.maximum(targets, 0)


def _log_probabilities(scores, inverse_link):
    """Returns log probabilities [N, classes], accurate near probabilities 0 and 1."""
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
    """Returns the entry of each row's target."""
    _check_shape(targets, logs[:, 0], name)
    label = targets.astype(jnp.int32)
    return jnp.take_along_axis(logs, label[:, None], axis=1)[:, 0]


def _rank(name, scores, targets, weights, inverse_link):
    """Computes a metric of two classes, or its one-vs-rest mean over K classes."""
    measure = _auc_of_two if name == "auc" else _precision_of_two
    scores, targets, weights = _read(scores, targets, weights)
    if scores.ndim == 1:
        _check_shape(targets, scores, name)
        return measure(scores, targets > 0, weights)
    _check_shape(targets, scores[:, 0], name)
    if scores.shape[1] == 2:  # the difference ranks rows for logits and probabilities
        return measure(scores[:, 1] - scores[:, 0], targets == 1, weights)
    found = _link_rows(scores, inverse_link)
    classes = jnp.arange(found.shape[1], dtype=jnp.float32)
    positive = targets[None] == classes[:, None]
    return jnp.mean(jax.vmap(measure, (0, 0, None))(found.T, positive, weights))


def _auc_of_two(scores, positive, weights):
    """Returns P(a positive is ranked above a negative), with ties counted as 1/2."""
    hits, misses, first, last = _sort(scores, positive, weights, descending=False)
    below = _sums_before(misses)
    share = (below[first] + below[last + 1]) / (2 * below[-1])
    return sum_rows(hits * share) / sum_rows(hits)


def _precision_of_two(scores, positive, weights):
    """Averages over positives the precision among rows ranked at least as high."""
    hits, misses, _, last = _sort(scores, positive, weights, descending=True)
    found, false = _sums_before(hits)[last + 1], _sums_before(misses)[last + 1]
    precision = jnp.where(hits > 0, found / (found + false), 0)
    return sum_rows(hits * precision) / sum_rows(hits)


def _sort(scores, positive, weights, *, descending):
    """Sorts by score and returns the weights of positives and negatives, and ties.

    The last two results are the indices of the first and last row of each row's tie.
    Rows of weight 0 contribute nothing at any rank.
    """
    order = jnp.argsort(-scores if descending else scores)
    held, indices = scores[order], jnp.arange(len(order), dtype=jnp.int32)
    new = jnp.concatenate([jnp.ones(1, bool), held[1:] != held[:-1]])
    first = jax.lax.cummax(jnp.where(new, indices, 0))
    ends = jnp.concatenate([new[1:], jnp.ones(1, bool)])
    last = jax.lax.cummin(jnp.where(ends, indices, len(order) - 1), reverse=True)
    hits = jnp.where(positive, weights, 0)[order]
    return hits, weights[order] - hits, first, last


def _sums_before(values):
    """Returns the sum of the values before each index, and of all values, [N + 1]."""
    return jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(values)])


def second_class(score: Float[ArrayLike, ""]) -> Any:
    """Returns 1 where the score is positive, the second of two classes, else 0."""
    return jnp.where(jnp.asarray(score) > 0, np.float32(1), np.float32(0))
