# SPDX-License-Identifier: Apache-2.0
"""Lists the built-in losses by name: those of one row, and those of groups of rows."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jboost.losses.bags import bag
from jboost.losses.lambdas import lambda_rank
from jboost.losses.ranking import (
    approx_ndcg,
    list_mle,
    listwise_softmax,
    pairwise_logistic,
    xendcg,
)
from jboost.losses.rows import (
    absolute_error,
    cauchy,
    expectile,
    exponential,
    focal,
    gamma,
    hinge,
    hinge_squared,
    huber,
    log_cosh,
    logistic,
    poisson,
    pseudo_huber,
    quantile,
    softmax,
    squared_error,
    tweedie,
    welsch,
)
from jboost.losses.survival import concordance, cox


def _by_name(*losses: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return MappingProxyType({loss.__name__: loss for loss in losses})


LOSSES = _by_name(
    squared_error, absolute_error, huber, pseudo_huber, log_cosh, quantile,
    expectile, poisson, gamma, tweedie, logistic, softmax, exponential, focal,
    hinge, hinge_squared, cauchy, welsch,
)  # fmt: skip

GROUP_LOSSES = _by_name(
    cox, concordance, pairwise_logistic, listwise_softmax, list_mle, lambda_rank,
    xendcg, approx_ndcg, bag,
)  # fmt: skip
