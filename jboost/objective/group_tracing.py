# SPDX-License-Identifier: Apache-2.0
"""Traces losses that couple the rows of a group, and checks their masks.

In: a callable ``loss(scores, targets, *, where)``, and the widths of tables of groups.
Out: a :class:`GroupLoss`, which compares by content, and the arrays of its closure.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.arguments import bound_keywords, hint_loss
from jboost.entry.checks import explain_failure
from jboost.entry.messages import show, warn_user
from jboost.entry.programs import QUICK
from jboost.losses import GROUP_LOSSES, Adaptive
from jboost.losses.rows import ParameterError
from jboost.objective.jaxprs import (
    Program,
    find_dependencies,
    split_program,
    trace_program,
)
from jboost.objective.tracing import estimate_shapes, explain_obstacle, name_of

SIGNATURE = "loss(scores, targets, *, where)"
_MOST_KEPT = 4  # numbers for each row of a group in a result that rounds share


@dataclass(frozen=True)
class GroupInputs:
    """Which arguments a loss of a group takes besides scores and targets."""

    where: bool
    weights: bool
    key: bool
    needs_weights: bool


@dataclass(frozen=True)
class GroupLoss:
    """Holds the programs of a loss for one group of each width.

    Attributes:
      widths: the widths of the tables, in order.
      values, gradients: programs for one group of each width, which take (scores, key,
        parameters, targets, where, weights) and the results of the early programs.
      early_values, early_gradients: programs of the parts that do not depend on the
        scores (sorts of times, ideal gains), which take (targets, where, weights).
      estimate, reports_first: fields of :class:`jboost.objective.tracing.TracedLoss`.
      by_pairs: whether a group of each width takes memory for each pair of rows.
    """

    widths: tuple[int, ...]
    values: tuple[Program, ...]
    gradients: tuple[Program, ...]
    early_values: tuple[Program, ...]
    early_gradients: tuple[Program, ...]
    estimate: Program | None
    reports_first: bool
    inputs: GroupInputs
    num_scores: int
    by_pairs: tuple[bool, ...]

    coupled = True  # not a field: see TracedLoss
    of_differences, information = False, None

    def __hash__(self) -> int:
        """Returns a hash that is computed once: programs are looked up by it."""
        return self._hash

    @cached_property
    def _hash(self):
        return hash(tuple(getattr(self, field.name) for field in fields(self)))


_known: weakref.WeakKeyDictionary[GroupLoss, Any] = weakref.WeakKeyDictionary()


def read_inputs(loss: Any) -> GroupInputs:
    """Returns which arguments a loss of a group takes; all that it names."""
    function = loss.loss if isinstance(loss, Adaptive) else loss
    named: set[str] = set()
    anything = needs = False
    for follow in (True, False):  # a decorator may add arguments to those it copies
        try:
            signature = inspect.signature(function, follow_wrapped=follow)
        except (TypeError, ValueError):
            continue
        for each in signature.parameters.values():
            anything |= each.kind is inspect.Parameter.VAR_KEYWORD
            if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD):
                named.add(each.name)
                needs |= each.name == "weights" and each.default is each.empty
    given = bound_keywords(function).keys()
    return GroupInputs(
        where="where" in named - given or (anything and "where" not in given),
        weights="weights" in named - given,
        key="key" in named - given,
        needs_weights=needs and "weights" not in given,
    )


def _call_estimate(loss, scores, targets, weights, groups):
    """Returns the parameters of an adaptive loss; ``groups`` only if it takes them."""
    named = inspect.signature(loss.estimate).parameters
    more = {"groups": groups} if "groups" in named else {}
    return loss.estimate(scores, targets, weights, **more)


def estimate_in_group(loss: Any, targets: Any, num_scores: int) -> Any:
    """Returns the parameters of an adaptive loss in a group at scores 0; else ()."""
    if not isinstance(loss, Adaptive):
        return ()
    size = len(jax.tree.leaves(targets)[0])
    shape = (size,) if num_scores == 1 else (size, num_scores)
    zeros, ones = np.zeros(shape, np.float32), np.ones(size, np.float32)
    group = np.zeros(size, np.int32)
    return _call_estimate(loss, *jax.device_put((zeros, targets, ones, group)))


def trace_group_loss(
    loss: Any,
    targets: Any,
    widths: Iterable[int],
    num_scores: int = 1,
    weighted: bool = False,
) -> tuple[GroupLoss, tuple[Any, ...]]:
    """Traces a loss for one group of each width.

    Args:
      loss: ``loss(scores, targets, *, where) -> scalar``, or the result of
        ``adaptive``.
      targets: a pytree of arrays (or shapes) with a first axis of N.
      weighted: whether rows have weights; a loss gets them if it takes them.
    """
    widths = tuple(sorted(set(widths)))
    rows = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), targets)
    constants: list[Any] = []
    inputs, function = read_inputs(loss), loss
    estimate, parameters = None, ()
    if isinstance(loss, Adaptive):
        function = loss.loss
        estimate, parameters = _trace_estimate(loss, rows, num_scores, constants)
    call = make_call(function, inputs, isinstance(loss, Adaptive))
    values, gradients, by_pairs, parts = [], [], [], []
    for width in widths:
        late, early = describe_group(rows, width, num_scores, inputs, weighted)
        late = (*late, parameters)
        arguments = (*late, *early)
        check_result(function, call, arguments, width)
        values.append(trace_program(call, arguments, constants))
        try:
            gradient = trace_program(jax.grad(call), arguments, constants)
        except Exception as error:
            raise TypeError(
                f"loss {name_of(function)} must be differentiable by JAX"
                f"{explain_obstacle(values[-1].jaxpr)}: {explain_failure(error)}"
            ) from error
        gradients.append(gradient)
        by_pairs.append(_takes_pairs(gradient.jaxpr, width))
        parts.append(
            [split_program(p, late, _MOST_KEPT * width) for p in (values[-1], gradient)]
        )
    # A group of one row may have nothing to learn from.
    _check_slope(function, gradients[-1])
    of_values, of_gradients = zip(*parts, strict=True)
    early_values, late_values = zip(*of_values, strict=True)
    early_gradients, late_gradients = zip(*of_gradients, strict=True)
    traced = GroupLoss(
        widths=widths,
        values=late_values,
        gradients=late_gradients,
        early_values=early_values,
        early_gradients=early_gradients,
        estimate=estimate,
        reports_first=isinstance(loss, Adaptive) and loss.report == "first",
        inputs=inputs,
        num_scores=num_scores,
        by_pairs=tuple(by_pairs),
    )
    known = _known.setdefault(traced, weakref.ref(traced))()
    return traced if known is None else known, tuple(constants)


def make_call(function, inputs, adaptive):
    """Returns the loss as a function of all arguments by position."""

    def call(scores, key, parameters, targets, where, weights):
        named = dict(where=where, weights=weights, key=key)
        named = {name: value for name, value in named.items() if value is not None}
        if not inputs.where:
            del named["where"]
        rest = (parameters,) if adaptive else ()
        return jnp.asarray(function(scores, targets, *rest, **named), jnp.float32)

    return call


def describe_group(rows, width, num_scores, inputs, weighted):
    """Returns the shapes of (scores, key), and of (targets, where, weights)."""
    shape = (width,) if num_scores == 1 else (width, num_scores)
    targets = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct((width, *t.shape[1:]), t.dtype), rows
    )
    weights = jax.ShapeDtypeStruct((width,), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0)) if inputs.key else None
    where = jax.ShapeDtypeStruct((width,), jnp.bool_)
    late = (jax.ShapeDtypeStruct(shape, jnp.float32), key)
    return late, (targets, where, weights if inputs.weights and weighted else None)


def _trace_estimate(loss, rows, num_scores, constants):
    """Traces the estimate of all rows; returns its program and result shapes."""
    (num_rows,) = {t.shape[0] for t in jax.tree.leaves(rows)}
    shape = (num_rows,) if num_scores == 1 else (num_rows, num_scores)
    floats = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (num_rows,))]
    inputs = (floats[0], rows, floats[1], jax.ShapeDtypeStruct((num_rows,), jnp.int32))
    function = partial(_call_estimate, loss)
    parameters = estimate_shapes(function, inputs)
    return trace_program(function, inputs, constants), parameters


def check_result(function, call, arguments, width):
    """Raises if the loss does not accept a group, or returns no scalar."""
    name = name_of(function)
    if not callable(function):
        text = isinstance(function, str)
        hint = hint_loss(function, [*GROUP_LOSSES], "jb.losses.{}") if text else ""
        raise TypeError(
            f"loss must be callable as {SIGNATURE} where groups are given, got "
            f"{show(function)}{hint}"
        )
    try:
        result = jax.eval_shape(call, *arguments)
    except ParameterError:
        raise
    except Exception as error:
        raise TypeError(
            f"loss {name} failed on a group of {width} rows; with groups it is called "
            f"as {SIGNATURE}{_hint_mask(function)}, for all rows of a group at once, "
            "and must be written in jax.numpy (for a loss of one row leave out "
            f"groups): {explain_failure(error)}"
        ) from error
    if result.shape != ():
        raise ValueError(
            f"loss {name} must return a scalar for a group, got shape {result.shape}; "
            "if it is a loss of one row, leave out groups, else sum over the rows "
            "where `where` is true"
        )


def _hint_mask(function):
    """Explains the name of the mask to a loss that calls it otherwise."""
    try:
        named = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    wrong = "mask" in named and "where" not in named
    return " (name the mask where, not mask)" if wrong else ""


def _check_slope(function, gradient):
    """Raises if the gradient is zero, or does not depend on the scores."""
    name = name_of(function)
    if gradient.zero:
        raise ValueError(
            f"loss {name} must have a nonzero gradient, got one that is zero at all "
            "scores; the loss does not depend on its scores, or it rounds them"
        )
    if len(gradient.constants) not in find_dependencies(gradient.jaxpr):
        raise ValueError(
            f"loss {name} must have a minimum in the scores, got a loss that is linear "
            f"in them and therefore unbounded below; it is called as {SIGNATURE}"
        )


def _takes_pairs(jaxpr, width):
    """Returns whether a program holds an array with an entry for each pair of rows."""
    if width < 16:
        return False
    sizes = (v.aval.size for e in jaxpr.eqns for v in e.outvars)
    return any(size >= width**2 // 4 for size in sizes)


_ADDED = 3  # masked rows
_HIGH = 9.0  # the score of masked rows, and its negative; others are standard normal
_TOLERANCE = 1e-5
_SEED = 4073  # one that users do not draw their targets with


class _Change(NamedTuple):
    """Two values of a group that should be equal, and a text on their difference."""

    first: float
    second: float
    by: str


def check_loss_mask(
    loss: Any, targets: Any, num_scores: int, parameters: Any, weighted: bool
) -> None:
    """Checks that a loss accepts a group, and that masked rows do not change it.

    If they only multiply the loss, because it divides by the number of all rows, a
    warning replaces the error. The targets are those of one group, on the host.
    """
    inputs = read_inputs(loss)
    if not inputs.where:
        return
    adaptive = isinstance(loss, Adaptive)
    function = loss.loss if adaptive else loss
    size = len(jax.tree.leaves(targets)[0])
    call = make_call(function, inputs, adaptive)
    late, early = describe_group(targets, size, num_scores, inputs, weighted)
    check_result(function, call, (*late, parameters, *early), size)
    key = jax.random.key(0) if inputs.key else None
    run = jax.jit(call, compiler_options=dict(QUICK.known()))

    def evaluate(scores, where, group):
        weights = where.astype(np.float32) if inputs.weights and weighted else None
        return run(scores, key, parameters, group, where, weights)

    trial = _Trial(evaluate, targets, num_scores)
    # Draws from a key depend on the number of rows.
    change = trial.find_change(same_size=inputs.key)
    if change is None:
        return
    name = name_of(function)
    if not inputs.key and trial.is_multiplied():
        warn_user(
            f"loss {name} is multiplied by {change.second / change.first:g} where "
            f"{_ADDED} masked rows are added to a group of {size}, so that groups "
            "weigh more if they are padded more; use where.sum() instead of "
            "len(scores)"
        )
        return
    raise ValueError(_explain(f"loss {name}", change))


def check_metric_mask(
    name: str, function: Callable[..., Any], targets: Any, num_scores: int
) -> None:
    """Checks on a few rows that masked ones do not change a metric of groups."""
    inputs = read_inputs(function)

    @jax.jit
    def run(scores, where, group):
        named = {"weights": where.astype(jnp.float32)} if inputs.weights else {}
        return function(scores, group, where=where, **named)

    trial = _Trial(run, targets, num_scores)
    try:
        change = trial.find_change()
    except Exception:  # the first evaluation on all rows reports the error
        return
    if change is not None:
        raise ValueError(_explain(f"metrics[{show(name)}]", change))


class _Trial:
    """Evaluates a function of a group without masked rows and with some."""

    def __init__(self, evaluate: Callable[..., Any], targets: Any, num_scores: int):
        self._evaluate = evaluate
        self._targets = targets
        self._size = len(jax.tree.leaves(targets)[0])
        rows = (self._size + _ADDED,)
        shape = rows if num_scores == 1 else (*rows, num_scores)
        rng = np.random.default_rng(_SEED)
        self._draws = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]

    def find_change(self, same_size: bool = False) -> _Change | None:
        """Returns two values of the same real rows that differ, if there are any.

        With ``same_size`` the number of masked rows stays the same.
        """
        added = f"with {_ADDED} masked rows added"
        high, low = self._find(_HIGH), self._find(-_HIGH)
        if same_size:
            pairs = [_Change(low, high, f"where masked scores are {_HIGH:g}")]
        else:
            plain = self._find(None)
            pairs = [_Change(plain, high, added), _Change(plain, low, added)]
        for each in pairs:
            limit = _TOLERANCE * max(1.0, abs(each.first))
            if np.isfinite(each.first) and not abs(each.second - each.first) <= limit:
                return each
        return None

    def is_multiplied(self) -> bool:
        """Returns whether masked rows multiply the function by a number."""
        with np.errstate(all="ignore"):
            ratios = [
                self._find(masked, draw) / self._find(None, draw)
                for draw in (0, 1)
                for masked in (_HIGH, -_HIGH)
            ]
        return bool(np.allclose(ratios, ratios[0], rtol=_TOLERANCE))

    def _find(self, masked, draw=0):
        """Returns the value where masked rows have a score; None: without them."""
        number = self._size if masked is None else self._size + _ADDED
        scores = self._draws[draw][:number].copy()
        scores[self._size :] = masked
        # The rows that are added repeat the first ones of the group.
        index = np.arange(number) % self._size
        group = jax.tree.map(lambda t: np.asarray(t)[index], self._targets)
        return np.float64(self._evaluate(scores, np.arange(number) < self._size, group))


def _explain(subject, change):
    return (
        f"{subject} must not depend on rows outside where, got {change.first:g} for a "
        f"group and {change.second:g} {change.by}; leave them out of every sum, mean, "
        "maximum and sort, for example with jnp.sum(jnp.where(where, values, 0.0)) and "
        "where.sum() instead of len(scores)"
    )
