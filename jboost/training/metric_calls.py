# SPDX-License-Identifier: Apache-2.0
"""Calls metrics of each signature.

In: a function, and scores, targets and weights of all rows. Out: a number. A metric of
jboost gets all rows, one with scikit-learn's signature predictions on the host, and one
of groups, ``metric(scores, targets, *, where)``, is averaged over groups (NDCG of a
query, concordance of a stratum).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.results import fetch
from jboost.model.scores import transform_rows
from jboost.objective.coupled import draw_groups, map_groups
from jboost.objective.group_tracing import read_inputs
from jboost.tables.groups import RowGroups

_CHUNK = 1 << 22  # pairs of rows of the groups that are evaluated at once


class HostMetric(NamedTuple):
    """A metric with scikit-learn's signature, called like those of jboost.

    Attributes:
      function: f(y_true, y_pred) or f(y_true, y_pred, sample_weight=...).
      inverse_link: turns scores into predictions; None: the scores are predictions.
      weighs: whether the function takes ``sample_weight``.
    """

    function: Callable[..., Any]
    inverse_link: Callable[..., Any] | None
    weighs: bool

    def __call__(self, scores, targets, weights) -> Any:
        """Returns its value on the rows of positive weight."""
        rows = np.asarray(weights) > 0
        found = scores
        if self.inverse_link is not None:
            found = transform_rows(self.inverse_link, scores)
        pair = jax.tree.map(lambda a: np.asarray(a)[rows], (targets, found))
        weights = np.asarray(weights)[rows]
        if self.weighs:
            return self.function(*pair, sample_weight=weights)
        if np.any(weights != weights[:1]):
            raise ValueError("it has no argument sample_weight, but rows have weights")
        return self.function(*pair)


class GroupMetric:
    """A metric of one group, called with the rows of all groups."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.inputs = read_inputs(function)
        # The program lives as long as the run, and does not keep its data.
        self._run = jax.jit(partial(_evaluate, function, self.inputs))

    def __call__(
        self, scores: Any, targets: Any, weights: Any, groups: RowGroups
    ) -> float:
        """Returns the weighted mean over groups.

        A group whose metric is NaN has none (a query without relevant documents), and
        is left out. NaN if no group has one.
        """
        group_weights = weights if groups.weights is None else weights > 0
        values, counts = fetch(
            self._run(scores, targets, weights, group_weights, groups)
        )
        known = (counts > 0) & ~np.isnan(values)
        if not known.any():
            return float("nan")
        return float(np.average(values[known], weights=counts[known]))


def _evaluate(function, inputs, scores, targets, weights, group_weights, groups):
    """Returns the value of each group, and its weight."""
    group_weights = jnp.asarray(group_weights, jnp.float32)
    tables, _ = draw_groups(groups, group_weights, jnp.zeros(2, jnp.uint32))

    def evaluate(table):
        width = table.rows.shape[1]

        def one(group):
            rows, size = group
            inside = jnp.arange(width, dtype=jnp.int32) < size
            where = inside & (group_weights[rows] > 0)
            named = {"weights": weights[rows]} if inputs.weights else {}
            value = function(
                scores[rows], jax.tree.map(lambda t: t[rows], targets), where=where,
                **named,
            )  # fmt: skip
            weight = jnp.max(jnp.where(where, group_weights[rows], 0.0))
            return jnp.asarray(value, jnp.float32), weight

        chunk = max(1, _CHUNK // width**2)
        return map_groups(one, (table.rows, table.size), chunk)

    found = [evaluate(table) for table in tables]
    return tuple(jnp.concatenate(parts) for parts in zip(*found, strict=True))


def evaluate_metric(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    groups: RowGroups | None = None,
) -> float:
    """Evaluates a metric: compiled if it is written in jax.numpy, else in NumPy.

    Args:
      arguments: scores, targets and weights of all rows.
      groups: of the rows, for metrics of groups.
    """
    if isinstance(function, GroupMetric):
        assert groups is not None  # checked by try_metrics
        scores, targets, weights = arguments
        return function(scores, targets, weights, groups)
    if isinstance(function, HostMetric):
        return float(function(*arguments))
    try:
        # Not through the cache of programs: JAX releases the program together with
        # the function of the caller, which may hold data.
        value = jax.jit(function)(*arguments)
    except (jax.errors.JAXTypeError, TypeError):
        value = function(*jax.tree.map(np.asarray, arguments))
    return float(value)
