# SPDX-License-Identifier: Apache-2.0
"""Metrics in training: names and signatures, checks, calls, and comparison of rounds.

In: names and functions. Out: {name: f(scores, targets, weights)}, each bound to the
inverse link that it needs; a Criterion, which compares rounds. NaN or infinity is never
the best value.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jboost import losses, metrics
from jboost.entry.arguments import (
    bound_keywords,
    hint_metric,
    is_mirrored,
    positional_names,
    takes_mask,
)
from jboost.entry.decorators import fetch
from jboost.entry.messages import show, warn_user
from jboost.losses.groups import check_relevances, check_times
from jboost.model.scores import transform_rows
from jboost.objective.coupled import draw_groups, map_groups
from jboost.objective.group_tracing import check_metric_mask, read_inputs
from jboost.tables.groups import RowGroups

Metrics = str | Sequence[str | Callable[..., Any]] | Mapping[str, Any] | None
By = str | tuple[str, str] | None
SIGNATURE = (
    "f(scores, targets, weights) -> number, or f(y_true, y_pred, sample_weight=...) "
    "as in scikit-learn, with arguments of these names"
)
_GROUP_SIGNATURE = "metric(scores, targets, *, where) of the rows of one group"
_NAMES = (*metrics.METRICS, *metrics.GROUP_METRICS)
# Losses with scores that determine probabilities, or only the class.
_CHANCES = (losses.logistic, losses.focal, losses.exponential)
_MARGINS = (losses.hinge, losses.hinge_squared)


class Criterion(NamedTuple):
    """The criterion that rounds are compared by.

    Attributes:
      name: "loss", or the name of a metric.
      direction: "min" or "max": which values are better.
    """

    name: str = "loss"
    direction: str = "min"

    @property
    def metric(self) -> str | None:
        """The metric's name; None for the loss."""
        return None if self.name == "loss" else self.name

    def rank(self, values: Any) -> Float[np.ndarray, "..."]:
        """Maps values to ranks: the least is best, and not finite is worst."""
        values = np.asarray(values, np.float64)
        signed = -values if self.direction == "max" else values
        return np.where(np.isfinite(values), signed, np.inf)

    def find_best(self, values: Any) -> int:
        """Returns the place of the best value, the first of equal ones.

        -1 if there is no finite one.
        """
        ranks = self.rank(values)
        if not np.isfinite(ranks).any():
            return -1
        return int(np.argmin(ranks))


BY_LOSS = Criterion()


class Compared(NamedTuple):
    """The rows that rounds are compared on.

    Attributes:
      place: the name of the rows in messages.
      values: the criterion after each round on these rows.
      targets, weights: the targets and weights of the rows; None: unknown.
    """

    place: str
    values: Sequence[float] | np.ndarray
    targets: Any = None
    weights: Any = None


def describe_gaps(by: Criterion, compared: Sequence[Compared]) -> str | None:
    """Names the rounds and rows without a finite criterion, and the likely reason.

    Returns:
      None if the criterion is always finite.
    """
    found = [each for each in compared if not np.isfinite(each.values).all()]
    if not found:
        return None
    first = max(found, key=lambda each: np.count_nonzero(~np.isfinite(each.values)))
    values = np.asarray(first.values, np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    rounds = f"in all {len(values)} rounds"
    if len(bad) < len(values):
        rounds = f"in {len(bad)} of {len(values)} rounds, the first of them {bad[0]},"
    others = f" (and of {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"by={show(by.name)} is {values[bad[0]]} {rounds} on {first.place}{others}"
        f"{_describe_targets(first)}"
    )


def _describe_targets(compared):
    """Names the likely reason, if it holds: all targets are the same number."""
    if compared.weights is None:
        return ""
    rows = np.asarray(compared.weights) > 0
    leaves = jax.tree.leaves_with_path(compared.targets)
    for path, leaf in leaves:
        values = np.asarray(leaf)[rows]
        if values.size and np.all(values == values.flat[0]):
            name = jax.tree_util.keystr(path)
            which = f"targets{name}" if name else "targets"
            return (
                f", where {which} of all {np.count_nonzero(rows)} rows are "
                f"{values.flat[0]}"
            )
    return ""


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

        A group with a metric of NaN (a query without relevant documents) is left out.
        The mean is NaN if no group remains.
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
      groups: the groups of the rows, for metrics of groups.
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


def measure(
    functions: Mapping[str, Callable[..., Any]],
    parts: Iterable[tuple[str, tuple[Any, ...], tuple[Any, ...], RowGroups | None]],
    number: int,
    fail: Callable[[str], Exception],
) -> Float[np.ndarray, "P M"]:
    """Evaluates all metrics after a round.

    Args:
      functions: the metrics by name.
      parts: the place in messages, the operands of a metric, the operands of a metric
        of groups, and the groups, for each set of rows.
      number: the round.
      fail: makes the error of a metric that fails, from its message.
    """
    rows = []
    for place, operands, of_groups, groups in parts if functions else ():
        rows.append([])
        for name, function in functions.items():
            given = of_groups if isinstance(function, GroupMetric) else operands
            try:
                rows[-1].append(evaluate_metric(function, given, groups))
            except Exception as error:
                raise fail(
                    f"metrics[{show(name)}] failed in round {number} on {place}: "
                    f"{error!r}; it is called as {describe_call(function)}"
                ) from error
    return np.array(rows, np.float64).reshape(len(rows), len(functions))


def check_metrics(given: Any) -> dict[str, Callable[..., Any]]:
    """Returns {name: function} of names, functions, a sequence of these, or a dict.

    Raises:
      TypeError, ValueError: for anything else.
    """
    if given is None:
        return {}
    if isinstance(given, str) or callable(given):
        given = [given]
    if not isinstance(given, Mapping | list | tuple):
        raise TypeError(
            f"metrics must be names out of {_NAMES}, functions, or a dict "
            f"{{name: {SIGNATURE}}}, got {type(given).__name__}"
        )
    pairs = given.items() if isinstance(given, Mapping) else map(_name, given)
    found: dict[str, Callable[..., Any]] = {}
    for name, value in pairs:
        if name in found or name == "loss":
            raise ValueError(
                "metrics must have different names other than 'loss', got "
                f"{show(name)}{' twice' if name in found else ''}"
            )
        function = metrics.find_metric(value) if isinstance(value, str) else value
        if isinstance(value, str) and function is None:
            raise ValueError(
                f"metrics must be out of {_NAMES}, or 'ndcg@10' for the first 10 "
                f"ranks, got {show(value)}"
                f"{hint_metric(value, _NAMES, metrics.TRUNCATED)}"
            )
        if not callable(function):
            raise TypeError(
                f"metrics[{show(name)}] must be callable as {SIGNATURE}, got "
                f"{show(function)}"
            )
        if not (isinstance(function, GroupMetric) or takes_mask(function)):
            _check_signature(f"metrics[{show(name)}]", function)
        found[name] = function
    return found


def _name(metric):
    """Returns the name of a metric in a sequence, and the metric."""
    if isinstance(metric, str):
        return metric, metric
    name = getattr(losses.bare_loss(metric), "__name__", None)
    if name is None or name == "<lambda>":
        raise TypeError(
            f"metrics must be a dict {{name: function}} where a function has no name, "
            f"got {show(metric)}"
        )
    return name, metric


def _check_signature(place, function):
    """Checks that a function can be called; warns if its arguments look swapped."""
    parameters = positional_names(function)
    if parameters is None:
        return
    foreign = _is_foreign(function)
    try:
        signature = inspect.signature(function)
        if not foreign:
            signature.bind(None, None, None)
        elif _takes_weights(function):
            signature.bind(None, None, sample_weight=None)
        else:
            signature.bind(None, None)
    except TypeError as error:
        text = str(inspect.signature(function))
        raise TypeError(
            f"{place} must be callable as {SIGNATURE}, got {text}: {error}"
        ) from None
    if not foreign and is_mirrored(function):
        warn_user(
            f"{place} is called as f(scores, targets, weights), but its arguments are "
            f"named {tuple(parameters[:2])}; name the first 'y_true' to be called as "
            "scikit-learn calls metrics, or exchange them"
        )


def _is_foreign(function) -> bool:
    """Whether a metric has scikit-learn's signature."""
    return (positional_names(function) or [""])[0] == "y_true"


def _takes_weights(function) -> bool:
    """Whether a metric of scikit-learn's signature takes ``sample_weight``."""
    parameters = inspect.signature(function).parameters
    kinds = [each.kind for each in parameters.values()]
    return "sample_weight" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def describe_call(function: Callable[..., Any]) -> str:
    """Returns how a metric is called, for errors."""
    return _GROUP_SIGNATURE if isinstance(function, GroupMetric) else SIGNATURE


def bind_metrics(
    found: dict[str, Callable[..., Any]],
    loss: Any,
    num_scores: int,
    inverse_link: Any = "auto",
) -> dict[str, Callable[..., Any]]:
    """Binds each metric to the inverse link of the loss, unless it has its own.

    Args:
      found: the metrics by name, from :func:`check_metrics`.
      inverse_link: the inverse link of a row's score; "auto": that of the loss.

    Raises:
      ValueError: a metric needs probabilities that the loss does not give.
    """
    return {
        name: _bind(name, function, loss, num_scores, inverse_link)
        for name, function in found.items()
    }


def _bind(name, function, loss, num_scores, given):
    if isinstance(function, GroupMetric):  # bound by an estimator
        return function
    if takes_mask(function):
        return GroupMetric(function)
    implied = losses.inverse_link(loss) if isinstance(given, str) else given
    if _is_foreign(function):
        return HostMetric(function, implied, _takes_weights(function))
    bound = bound_keywords(function)
    bare = losses.bare_loss(function)
    if not is_one_of(bare, metrics.METRICS.values()) or "inverse_link" in bound:
        return function
    known = losses.bare_loss(loss)
    own_link = not isinstance(given, str) and given is not None
    chances = own_link or is_one_of(known, (*_CHANCES, losses.softmax))
    labels, link = bare in metrics.LABELS, implied
    if labels and not own_link and num_scores == 1:
        # As the classifier labels: by the sign, which no rounding of a link changes.
        chances = chances or is_one_of(known, _MARGINS)
        link = metrics.second_class
    needs = labels or bare in metrics.PROBABILITIES
    if (needs or (bare in metrics.RANKS and num_scores > 1)) and not chances:
        wanted = "labels" if labels else "probabilities"
        own = "softmax" if num_scores > 1 else "sigmoid"
        title = getattr(known, "__name__", repr(loss))
        raise ValueError(
            f"metrics[{show(name)}] needs {wanted}, and how loss {title} gives "
            f"them is not known; bind the link: {{{show(name)}: partial(jb.metrics."
            f"{bare.__name__}, inverse_link=jax.nn.{own})}}"
        )
    try:
        return _with_link(function, link)
    except TypeError:  # a link of one's own need not be hashable
        return partial(function, inverse_link=link)


@lru_cache(maxsize=256)
def _with_link(function, link):
    """Returns one object for equal pairs, because programs are cached by object."""
    return partial(function, inverse_link=link)


_FEW = 20  # the mask of a metric is checked on this number of rows


def try_metrics(
    found: dict[str, Callable[..., Any]],
    targets: Any,
    weights: Any,
    num_scores: int,
    grouped: bool = False,
) -> None:
    """Checks before training that metrics can be computed on the rows.

    Args:
      targets, weights: the targets and weights of the rows, without padding.
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
        if not is_one_of(bare, metrics.METRICS.values()):
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
    if not is_one_of(bare, metrics.GROUP_METRICS.values()):
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


def read_by(
    by: Any, found: dict[str, Callable[..., Any]]
) -> tuple[Criterion, dict[str, Callable[..., Any]]]:
    """Returns the criterion, and the metrics with the one that it names.

    Args:
      by: None or "loss"; the name of a metric; or (name, "min" or "max").
      found: the metrics, by name.

    Raises:
      TypeError, ValueError: it is malformed, or the better direction is unknown.
    """
    if by is None or (isinstance(by, str) and by == "loss"):
        return Criterion(), found
    pair = (by, None) if isinstance(by, str) else by
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(
            f"by must be 'loss', the name of a metric or (name, 'max'), got {show(by)}"
        )
    name, direction = pair
    if direction not in (None, "min", "max"):
        raise ValueError(f"by must be (name, 'min') or (name, 'max'), got {show(by)}")
    if name == "loss":
        if direction == "max":
            raise ValueError("by must not maximize the loss, got ('loss', 'max')")
        return Criterion(), found
    if name not in found:
        function = metrics.find_metric(name)
        if function is None:
            hint = hint_metric(name, (*found, *_NAMES), metrics.TRUNCATED)
            raise ValueError(
                f"by must be 'loss', one of metrics, {(*found,)}, or one of {_NAMES}, "
                f"or 'ndcg@10' for the first 10 ranks, got {show(name)}{hint}"
            )
        found = {**found, name: function}
    if direction is None:
        direction = _find_direction(name, found[name])
    return Criterion(name, direction), found


def _find_direction(name, function):
    """Returns the direction of built-in metrics, else "min"; refuses to guess."""
    inner = function.function if isinstance(function, GroupMetric) else function
    bare = losses.bare_loss(inner)
    if is_one_of(bare, (*metrics.METRICS.values(), *metrics.GROUP_METRICS.values())):
        return "max" if bare in metrics.MAXIMIZED else "min"
    maximized = {metric.__name__ for metric in metrics.MAXIMIZED}
    own = str(getattr(bare, "__name__", ""))
    known = {name, name.partition("@")[0], own} & maximized
    if known or own.endswith("_score") or name.endswith("_score"):
        raise ValueError(
            f"by must say which values of metric {show(name)} are better, "
            f"({show(name)}, 'max')"
            f" or ({show(name)}, 'min'), got {show(name)}"
        )
    return "min"


def is_one_of(function: Any, known: Iterable[Any]) -> bool:
    """Returns whether a function is one of these, parameters bound or not."""
    bare = losses.bare_loss(function)  # need not be hashable
    return any(bare is each for each in known)
