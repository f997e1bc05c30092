# SPDX-License-Identifier: Apache-2.0
"""Lists the metrics by name, those of all rows and those of groups, and their needs."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from jboost.metrics.ranking import (
    auc,
    average_precision,
    concordance_index,
    mean_average_precision,
    mrr,
    ndcg,
)
from jboost.metrics.rows import (
    accuracy,
    brier,
    error,
    gamma_deviance,
    log_loss,
    mae,
    mape,
    mse,
    poisson_deviance,
    r2,
    rmse,
)

METRICS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        metric.__name__: metric
        for metric in (
            auc, average_precision, log_loss, brier, accuracy, error, mae, mse, rmse,
            mape, r2, poisson_deviance, gamma_deviance,
        )
    }
)  # fmt: skip
GROUP_METRICS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        metric.__name__: metric
        for metric in (ndcg, mean_average_precision, mrr, concordance_index)
    }
)


def find_metric(name: str) -> Callable[..., Any] | None:
    """Returns a metric by its name; None if there is none.

    Of metrics of groups that look at the first ranks, "ndcg@10" is ``ndcg`` at 10.

    Example:
      >>> import jboost as jb
      >>> jb.metrics.find_metric("auc") is jb.metrics.auc
      True
    """
    base, cut, at = name.partition("@")
    if not cut:
        return METRICS.get(name) or GROUP_METRICS.get(name)
    if base not in TRUNCATED or not at.isdecimal() or int(at) < 1:
        return None
    return partial(GROUP_METRICS[base], at=int(at))


TRUNCATED = ("ndcg", "mean_average_precision", "mrr")  # take a number of ranks
# Larger is better.
MAXIMIZED = (auc, average_precision, accuracy, r2, *GROUP_METRICS.values())
RANKS = (auc, average_precision)
PROBABILITIES = (log_loss, brier)
LABELS = (accuracy, error)
