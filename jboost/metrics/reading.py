# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of metrics, and averages over rows.

Rows of weight 0 do not affect results.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.entry.decorators import fetch
from jboost.losses.groups import weigh_rows
from jboost.numerics.exact import sum_rows

Link = Callable[..., Any] | None


def read_rows(scores, targets, weights):
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


def read_group(scores, targets, where, weights):
    """Converts the rows of one group to float32; weights are 0 for masked rows.

    Args:
      targets: {name in errors: array}, [G] each.
    """
    given = {"scores": scores, **targets, "where": where, "weights": weights}
    shapes = {name: np.shape(a) for name, a in given.items() if a is not None}
    if len({*shapes.values()}) > 1 or len(shapes["scores"]) != 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"scores and targets of a group must have shape [G], got {found}"
        )
    scores = jnp.asarray(scores, jnp.float32)
    weights = weigh_rows(scores, where, weights)
    broken = jnp.isnan(scores) & (weights > 0)
    if not isinstance(broken, Tracer):
        rows = np.flatnonzero(fetch(broken))
        if len(rows):
            raise ValueError(f"scores must not be NaN, got it in row {rows[0]}")
    return scores, weights


def check_shape(targets, found, name):
    """Checks that a metric got one target for each prediction."""
    if targets.shape != found.shape:
        raise ValueError(
            f"{name} needs targets of the same shape as predictions, got targets of "
            f"shape {targets.shape} and predictions of shape {found.shape}"
        )


def _read(name, scores, targets, weights, inverse_link):
    return scores, targets, weights, inverse_link


def of_rows(prepare: Callable[..., Any] = _read, *, by_label: bool = False):
    """Makes metrics of all rows, which have one signature.

    Args:
      prepare: a function of the metric's name, of float32 scores, targets and weights,
        and of the link; it returns the arguments of the decorated function.
      by_label: whether targets [N, K] are K labels, for a mean of metrics of each.
    """

    def decorate(metric):
        def measure(
            scores: Shaped[ArrayLike, "N *K"],
            targets: Shaped[ArrayLike, "N *K"],
            weights: Shaped[ArrayLike, " N"] | None = None,
            *,
            inverse_link: Link = None,
        ) -> Float[Array, ""]:
            rows = read_rows(scores, targets, weights)
            if by_label and np.ndim(targets) == 2:
                return _average_labels(measure, *rows, inverse_link)
            return metric(*prepare(metric.__name__, *rows, inverse_link))

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(measure, name, getattr(metric, name))
        return measure

    return decorate


def _average_labels(metric, scores, targets, weights, inverse_link):
    """Returns the mean of a metric of each of K labels; NaN is an unknown target."""
    name = metric.__name__
    check_shape(targets, scores, name)
    if inverse_link is jax.nn.softmax:
        raise ValueError(
            f"{name} needs one class in each row with the link softmax, got targets of "
            f"shape {targets.shape}"
        )
    known = ~jnp.isnan(targets)
    targets, weights = (
        jnp.where(known, targets, 0),
        jnp.where(known, weights[:, None], 0),
    )
    values = [
        metric(scores[:, k], targets[:, k], weights[:, k], inverse_link=inverse_link)
        for k in range(scores.shape[1])
    ]
    return jnp.mean(jnp.stack(values))


def mean_rows(values, weights):
    """Returns weighted means over the last axis, ignoring rows of weight 0."""
    each = jnp.broadcast_to(weights, values.shape)
    return sum_rows(jnp.where(each > 0, values, 0) * each) / sum_rows(weights)


def link_rows(scores, inverse_link):
    """Converts the scores of each row to predictions."""
    if inverse_link is None:
        return scores
    if inverse_link is jax.nn.softmax and scores.ndim == 2:
        scores = settle_infinities(scores)
    return jax.vmap(inverse_link)(scores)


def settle_infinities(scores):
    """Replaces rows with an infinite maximum, so that softmax is its limit, not NaN.

    A score of infinity takes the whole probability; several share it.
    """
    top = jnp.max(scores, axis=1, keepdims=True)
    limit = jnp.where(scores == top, 0.0, -jnp.inf)
    return jnp.where(jnp.isinf(top), limit, scores)
