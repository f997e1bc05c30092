# SPDX-License-Identifier: Apache-2.0
"""Checks that targets are in the domain of a built-in loss.

In: a loss and the targets that it gets. Out: an error that names the first row in which
the loss is not defined, before any training.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jboost import losses
from jboost.entry.results import fetch
from jboost.losses.group_targets import check_relevances, check_times
from jboost.tables.offsets import check_finite


class _Domain(NamedTuple):
    """Describes the targets for which a loss is defined.

    Attributes:
      description: their description in error messages.
      holds: ``holds(targets, num_scores)`` returns a NumPy mask of valid targets.
      hint: ``hint(targets, num_scores)`` returns the end of the message.
    """

    description: str
    holds: Callable[[np.ndarray, int], np.ndarray]
    hint: Callable[[np.ndarray, int], str] = lambda targets, num_scores: ""


def _hint_classes(targets, num_scores):
    """Suggests the number of scores that the classes need, or to count them from 0."""
    given = f"; num_scores is {num_scores}"
    if not (targets == np.floor(targets)).all() or targets.min() < 0:
        return f"{given}; jboost.sklearn.JBoostClassifier takes labels of any kind"
    if targets.min() == 1 and targets.max() == num_scores:
        return f"{given}; subtract 1 from the classes"
    return f"{given}; pass num_scores={int(targets.max()) + 1}"


_COUNTS = _Domain("numbers >= 0", lambda t, _: t >= 0)
_SHARES = _Domain("numbers from 0 to 1", lambda t, _: (t >= 0) & (t <= 1))
_SIGNS = _Domain("-1 or 1", lambda t, _: np.abs(t) == 1)
_CLASSES = _Domain(
    "classes, the integers from 0 to num_scores - 1",
    lambda t, k: (t >= 0) & (t < k) & (t == np.floor(t)),
    _hint_classes,
)
_DOMAINS: tuple[tuple[Callable[..., Any], _Domain], ...] = (
    (losses.poisson, _COUNTS), (losses.tweedie, _COUNTS),
    (losses.gamma, _Domain("numbers > 0", lambda t, _: t > 0)),
    (losses.logistic, _SHARES), (losses.focal, _SHARES), (losses.softmax, _CLASSES),
    (losses.exponential, _SIGNS), (losses.hinge, _SIGNS),
    (losses.hinge_squared, _SIGNS),
)  # fmt: skip

_GROUP_CHECKS: tuple[tuple[Callable[..., Any], Callable[..., None]], ...] = (
    (losses.cox, check_times), (losses.concordance, check_times),
    (losses.listwise_softmax, check_relevances), (losses.xendcg, check_relevances),
    (losses.lambda_rank, check_relevances), (losses.approx_ndcg, check_relevances),
)  # fmt: skip


def check_domain(
    loss: Any, targets: Any, weights: Any, num_scores: int, name: str
) -> None:
    """Checks that the targets are in the domain of a built-in loss.

    Does not check custom losses, traced arrays, or rows of weight 0. Targets [N, K] of
    a loss of one score may hold NaN, which marks labels as missing.

    Args:
      loss: any loss.
      targets: targets as ``loss`` takes them; the first axis is N.
      weights: weights of the rows.
      num_scores: K.
      name: name of the targets in error messages.

    Raises:
      ValueError: names the first row whose target is outside the domain.
    """
    bare = losses.bare_loss(loss)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((targets, weights))):
        return
    check = next((check for known, check in _GROUP_CHECKS if known is bare), None)
    built_in = any(known is bare for known in losses.LOSSES.values())
    if check is None and not built_in:
        return
    host, weights = fetch((targets, weights))
    if check is not None:
        check(host, weights > 0, name)
    if not built_in or not isinstance(host, np.ndarray) or host.ndim not in (1, 2):
        return  # tracing the loss will raise a better error
    if host.ndim == 2 and bare is losses.softmax:
        return  # likewise
    given = host if host.ndim == 1 else np.where(np.isnan(host), np.float32(1), host)
    check_finite(given, weights, name, host)
    domain = next((domain for known, domain in _DOMAINS if known is bare), None)
    if domain is None:
        return
    counts = (weights > 0).reshape(-1, *(1,) * (host.ndim - 1))
    bad = ~domain.holds(given, num_scores) & counts
    if bad.any():
        row, *column = np.argwhere(bad)[0].tolist()
        hint = domain.hint(given[weights > 0], num_scores)
        raise ValueError(
            f"{name} must contain {domain.description} for losses.{bare.__name__}, "
            f"got {host[row, *column]} in row {row}{hint}"
        )
