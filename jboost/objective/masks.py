# SPDX-License-Identifier: Apache-2.0
"""Checks that rows outside a mask do not change a loss or a metric of a group.

In: a function of one group, and targets of a few rows. Out: nothing, or an error. The
function is evaluated at the same real rows without masked rows and with some, whose
scores lie above and below all others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.efforts import QUICK
from jboost.entry.representation import show
from jboost.entry.warning import warn_user
from jboost.losses import Adaptive
from jboost.objective.group_tracing import (
    check_result,
    describe_group,
    make_call,
    read_inputs,
)
from jboost.objective.tracing import name_of

_ADDED = 3  # masked rows
_HIGH = 9.0  # the score of masked rows, and its negative; others are standard normal
_TOLERANCE = 1e-5
_SEED = 4073  # one that users do not draw their targets with


class _Change(NamedTuple):
    """Two values of a group that should be equal, and what they differ in."""

    first: float
    second: float
    by: str


def check_loss_mask(
    loss: Any, targets: Any, num_scores: int, parameters: Any, weighted: bool
) -> None:
    """Checks that a loss accepts a group, and that masked rows do not change it.

    Args:
      targets: of the rows of one group, on the host.
      parameters: of an adaptive loss.

    Raises:
      TypeError, ValueError: they do, or it does not. A loss that is only multiplied,
        because it divides by the number of all rows, is warned of.
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
    # What a key draws depends on the number of rows.
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
    """Checks that masked rows do not change a metric of groups.

    Args:
      name: of the metric in the arguments of the user.
      targets: of a few rows, on the host.

    Raises:
      ValueError: they do.
    """
    inputs = read_inputs(function)

    @jax.jit
    def run(scores, where, group):
        named = {"weights": where.astype(jnp.float32)} if inputs.weights else {}
        return function(scores, group, where=where, **named)

    trial = _Trial(run, targets, num_scores)
    try:
        change = trial.find_change()
    except Exception:  # the first evaluation on all rows says what is wrong
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

        Args:
          same_size: whether the number of masked rows must stay the same.
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
