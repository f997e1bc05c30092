# SPDX-License-Identifier: Apache-2.0
"""Metrics, and the criterion that rounds are compared by.

In: names and functions. Out: {name: f(scores, targets, weights)}, each bound to the
inverse link that it needs; a Criterion, which compares rounds.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from jboost import losses, metrics
from jboost.entry.arguments import (
    bound_keywords,
    hint_metric,
    is_mirrored,
    positional_names,
    takes_mask,
)
from jboost.entry.messages import show, warn_user
from jboost.training.metrics import Criterion, GroupMetric, HostMetric, is_one_of

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


def describe_call(function: Callable[..., Any]) -> str:
    """Returns how a metric is called, for errors."""
    return _GROUP_SIGNATURE if isinstance(function, GroupMetric) else SIGNATURE


def _is_foreign(function) -> bool:
    """Whether a metric has scikit-learn's signature."""
    return (positional_names(function) or [""])[0] == "y_true"


def _takes_weights(function) -> bool:
    """Whether a metric of scikit-learn's signature takes ``sample_weight``."""
    parameters = inspect.signature(function).parameters
    kinds = [each.kind for each in parameters.values()]
    return "sample_weight" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


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
