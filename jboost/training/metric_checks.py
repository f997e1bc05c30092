# SPDX-License-Identifier: Apache-2.0
"""Checks before training that metrics can be computed on the rows.

In: metrics bound to the loss, and targets and weights of real rows. Out: an error that
names the metric.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost import losses, metrics
from jboost.entry.representation import show
from jboost.losses.group_targets import check_relevances, check_times
from jboost.objective.masks import check_metric_mask
from jboost.training.metric_calls import GroupMetric, HostMetric

_FEW = 20  # rows on which the mask of a metric is checked


def try_metrics(
    found: dict[str, Callable[..., Any]],
    targets: Any,
    weights: Any,
    num_scores: int,
    grouped: bool = False,
) -> None:
    """Checks before training that metrics can be computed on the rows.

    Args:
      targets, weights: of the real rows, without padding.
      grouped: whether the rows have groups.

    Raises:
      ValueError: shapes or labels do not fit a built-in metric, or the rows have
        different weights and a metric of scikit-learn's signature takes none.
    """
    for name, function in found.items():
        if isinstance(function, GroupMetric):
            if not grouped:
                raise ValueError(
                    f"metrics[{show(name)}] takes where, as metrics of groups do, and "
                    "needs groups, got None"
                )
            _try_group_metric(name, function.function, targets, weights, num_scores)
            continue
        if isinstance(function, HostMetric) and not function.weighs:
            _check_equal_weights(name, function.function, weights)
        bare = losses.bare_loss(function)
        if not _is_one_of(bare, metrics.METRICS):
            continue
        _check_one_array(name, targets)
        size = len(weights)
        shape = (size,) if num_scores == 1 else (size, num_scores)
        scores = jax.ShapeDtypeStruct(shape, jnp.float32)
        try:
            jax.eval_shape(function, scores, targets, weights)
        except ValueError as error:
            raise ValueError(
                f"metrics[{show(name)}] cannot be computed: {error}"
            ) from None
        if bare in (*metrics.RANKS, *metrics.LABELS):
            _check_labels(name, targets, weights, num_scores)


def _check_one_array(name, targets):
    leaves = jax.tree.leaves(targets)
    if len(leaves) != 1 or leaves[0] is not targets:
        raise ValueError(
            f"metrics[{show(name)}] needs targets that are one array, got "
            f"{jax.tree.structure(targets)}"
        )


def _try_group_metric(name, function, targets, weights, num_scores):
    """Checks the targets of a built-in metric of groups, or the mask of another."""
    bare = losses.bare_loss(function)
    if not _is_one_of(bare, metrics.GROUP_METRICS):
        few = jax.tree.map(lambda t: np.asarray(t)[:_FEW], targets)
        check_metric_mask(name, function, few, num_scores)
        return
    if bare is not metrics.concordance_index:
        _check_one_array(name, targets)
    shape = (len(weights), num_scores)[: 1 + (num_scores > 1)]
    scores, real = jax.ShapeDtypeStruct(shape, jnp.float32), np.asarray(weights) > 0
    try:
        jax.eval_shape(function, scores, targets)
        if bare is metrics.ndcg:
            check_relevances(targets, real, "targets")
        elif bare is metrics.concordance_index:
            check_times(targets, real, "targets")
    except (TypeError, ValueError) as error:
        raise ValueError(f"metrics[{show(name)}] cannot be computed: {error}") from None


def _check_equal_weights(name, function, weights):
    positive = np.unique(np.asarray(weights)[np.asarray(weights) > 0])
    if len(positive) > 1:
        raise ValueError(
            f"metrics[{show(name)}] must be callable as f(y_true, y_pred, "
            "sample_weight=...) where rows have different weights, got "
            f"{inspect.signature(function)} and weights {positive[0]:g} to "
            f"{positive[-1]:g}"
        )


def _check_labels(name, targets, weights, num_scores):
    """Checks that targets are classes, or several labels in a row."""
    values = np.unique(np.asarray(targets)[np.asarray(weights) > 0])
    if np.ndim(targets) == 2:
        num_scores, values = 1, values[~np.isnan(values)]
    ranges = [range(num_scores)] if num_scores > 1 else [(0, 1), (-1, 1)]
    if not any(set(values.tolist()) <= {*labels} for labels in ranges):
        expected = (
            f"0 to {num_scores - 1}" if num_scores > 1 else "0 and 1, or -1 and 1"
        )
        raise ValueError(
            f"metrics[{show(name)}] needs targets that are classes, {expected}, got "
            f"{values[:5].tolist()}{' ...' if len(values) > 5 else ''}"
        )


def _is_one_of(function: Any, known: Mapping[str, Any]) -> bool:
    """Compares by identity: functions of callers need not be hashable."""
    return any(function is each for each in known.values())
