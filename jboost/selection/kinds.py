# SPDX-License-Identifier: Apache-2.0
"""Tells losses of a group from losses of a row, where both may come with groups.

In: a loss, the argument ``groups`` of a cross-validation, targets. Out: whether the
loss is of a group. For a loss of a row, ``groups`` are labels that make folds.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.arguments import takes_mask
from jboost.losses import Adaptive
from jboost.objective.group_tracing import estimate_in_group, read_inputs
from jboost.objective.tracing import name_of, needs_groups
from jboost.tables.groups import RowGroups, make_groups, take_first_group
from jboost.tables.targets import check_targets

_TOLERANCE = 1e-4
_SEED = 4073  # one that users do not draw their targets with


def is_of_groups(loss: Any, groups: Any, y: Any, num_scores: int) -> bool:
    """Returns whether a loss is one of a group.

    It is if it requires ``where``, or if ``groups`` are no labels. With labels, another
    loss is evaluated on all rows of one group: losses of a row fail or do not return a
    scalar, or they return the sum over the rows.

    Args:
      loss: with its parameters bound.
      groups: as given.
      y: the targets, as given.

    Raises:
      ValueError: the loss may be of a group and of a row, and they differ.
    """
    if needs_groups(loss) or isinstance(groups, str | RowGroups):
        return True
    if groups is None:
        return False
    try:
        part = _take_group(groups, y)
        found = estimate_in_group(loss, part, num_scores)
    except Exception:  # refused later, by name
        return False
    parameters = (found,) if isinstance(loss, Adaptive) else ()
    return _compare(loss, part, parameters, num_scores)


def _take_group(groups, y):
    """Returns the targets of the first group of several rows."""
    y = np.asarray(y) if isinstance(y, list) else y
    index = take_first_group(np.asarray(make_groups(groups).number))
    part = jax.tree.map(lambda leaf: np.asarray(leaf)[index], y)
    return check_targets(part, len(index), np.zeros(len(index)), "y")


def _compare(loss, part, parameters, num_scores):
    """Compares the loss of a group with the losses of its rows."""
    inputs, size = read_inputs(loss), len(jax.tree.leaves(part)[0])
    function = loss
    if isinstance(loss, Adaptive):
        function = loss.loss
        if "groups" in inspect.signature(loss.estimate).parameters:
            return True
    shape = (size,) if num_scores == 1 else (size, num_scores)
    scores = np.random.default_rng(_SEED).normal(size=shape).astype(np.float32)
    named = {"weights": jnp.ones(size, jnp.float32)} if inputs.needs_weights else {}
    named |= {"key": jax.random.key(0)} if inputs.key else {}
    masked = takes_mask(function)
    named |= {"where": jnp.ones(size, bool)} if masked else {}

    # Parameters are arguments, because an estimate of few rows may be in no domain.
    def of_group(scores, targets, parameters):
        return jnp.asarray(function(scores, targets, *parameters, **named))

    def of_row(score, target, parameters):
        return jnp.asarray(function(score, target, *parameters))

    if not _returns_scalar(of_group, scores, part, parameters):
        return False
    first = jax.tree.map(lambda leaf: leaf[0], (scores, part))
    if masked or not _returns_scalar(of_row, *first, parameters):
        return True
    whole = np.asarray(jax.jit(of_group)(scores, part, parameters))
    of_rows = jax.jit(jax.vmap(of_row, (0, 0, None)))
    rows = np.asarray(of_rows(scores, part, parameters))
    # A mean is one over the scores of a row, where there are several.
    same = [rows.sum(), *([rows.mean()] if num_scores > 1 else [])]
    slack = _TOLERANCE * np.abs(rows).sum()
    if np.isclose(whole, same, rtol=_TOLERANCE, atol=slack, equal_nan=True).any():
        return False
    raise ValueError(
        "groups must be jb.make_groups(ids, padded=False) if loss "
        f"{name_of(function)} is of a group, and None if it is of a row (folds="
        "[*GroupKFold(5).split(x, groups=ids)] of scikit-learn then hold labels out "
        "together), because it accepts both and does not take where, got labels"
    )


def _returns_scalar(function, *arguments):
    """Returns whether a call succeeds, and returns a number."""
    try:
        return jax.eval_shape(function, *arguments).shape == ()
    except Exception:  # a loss may fail in any way
        return False
