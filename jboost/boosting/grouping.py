# SPDX-License-Identifier: Apache-2.0
"""Reads the groups of training rows and validation sets, for losses of groups.

In: the argument ``groups``, a loss, weights. Out: index tables for the rows, and the
weights that the core multiplies derivatives by. A loss that takes ``weights`` weighs
rows itself; the core then only knows which rows count.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jboost.losses import Adaptive, bare_loss
from jboost.objective.group_tracing import (
    estimate_in_group,
    read_inputs,
)
from jboost.objective.masks import check_loss_mask
from jboost.objective.tracing import needs_groups
from jboost.tables.groups import (
    MOST_CHECKED,
    RowGroups,
    check_full_groups,
    check_group_weights,
    check_groups,
    pad_groups,
    take_first_group,
)


class ValidationRows(NamedTuple):
    """Rows for ``validation``; see :func:`rows`."""

    x: Any
    y: Any
    sample_weight: Any = None
    offset: Any = None
    groups: Any = None


def rows(
    x: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    offset: Any = None,
    groups: Any = None,
) -> ValidationRows:
    """Names the parts of a validation set; the arguments are those of ``fit``.

    Example:
      >>> import jboost as jb
      >>> parts = jb.rows([[1.0], [2.0]], [0, 1], groups=[7, 7])
      >>> parts.groups
      [7, 7]
    """
    return ValidationRows(x, y, sample_weight, offset, groups)


def read_groups(
    groups: Any, loss: Any, weights: Any, num_rows: int, prefix: str = ""
) -> tuple[RowGroups | None, Any]:
    """Checks the groups of rows.

    Args:
      weights: of the rows, checked; None for 1.
      prefix: of the names of arguments in errors.

    Returns:
      The groups, without padding, and the weights that derivatives are multiplied by.

    Raises:
      TypeError, ValueError: there is not one id for each row, the loss is not one of
        groups, weights differ within a group and the loss does not take them, or groups
        need padding and it does not take ``where``.
    """
    if groups is None:
        if needs_groups(loss):
            raise ValueError(
                f"{prefix}groups must be given, because loss {_name(loss)} takes where "
                "and so is a loss of a group of rows: an id for each row, 'all', or "
                "jb.random_groups(n)"
            )
        return None, weights
    inputs = read_inputs(loss)
    found = check_groups(groups, num_rows, f"{prefix}groups", padded=inputs.where)
    if not inputs.where:
        check_full_groups(found, num_rows, f"{prefix}groups")
    if inputs.weights and (weights is not None or inputs.needs_weights):
        own = np.ones(num_rows, np.float32) if weights is None else weights
        own = own.astype(np.float32)
        return replace(found, weights=own), (own > 0).astype(np.float32)
    if weights is None:
        return found, None
    name = f"{prefix}sample_weight"
    check_group_weights(found, weights, name)
    known = not isinstance(weights, Tracer)
    if known and not inputs.where and (np.asarray(weights) == 0).any():
        raise ValueError(
            f"{name} must be positive where the loss does not take where, because no "
            "row of a group can be left out, got 0"
        )
    return found, weights


def refuse_bags(loss: Any, groups: RowGroups | None, share: Any) -> None:
    """Raises if rounds leave rows out of groups, for a traced loss without mask."""
    if groups is None or groups.kind == "ids" or loss.inputs.where:
        return
    if isinstance(share, Tracer) or share < 1:
        raise ValueError(
            "subsample must be 1 where groups are not ids and the loss does not take "
            f"where, because rows leave their groups, got {share}"
        )


def place_groups(groups: RowGroups | None, total: int) -> RowGroups | None:
    """Returns the groups of ``total`` rows, padding included, on the device."""
    if groups is None:
        return None
    groups = pad_groups(groups, total)
    assert groups is not None
    if groups.weights is not None:
        more = (0, total - len(groups.weights))
        groups = replace(groups, weights=np.pad(np.asarray(groups.weights), more))
    return jax.device_put(groups)


def match_groups(groups: Any, training: RowGroups | None, label: str) -> Any:
    """Returns the groups of a validation set: those given, or the kind of training.

    Raises:
      ValueError: there are groups in one of both only.
    """
    if training is None:
        if groups is not None:
            raise ValueError(f"{label} must not have groups, because fit is given none")
        return None
    if groups is None and training.kind == "ids":
        raise ValueError(
            f"{label} must have groups, because fit is given groups: pass "
            "jb.rows(x, y, groups=ids)"
        )
    if groups is None:
        return training if training.kind == "random" else "all"
    return groups


def check_first_group(
    loss: Any,
    groups: RowGroups,
    targets: Any,
    num_scores: int,
    weighted: bool,
) -> None:
    """Checks the mask of a loss on one group; see :func:`check_loss_mask`.

    Args:
      targets: of all rows, on the host, without padding.
    """
    size = len(jax.tree.leaves(targets)[0])
    if groups.kind != "ids" or groups.number is None:
        most = min(size, groups.width or MOST_CHECKED)
        index = np.unique(np.linspace(0, size - 1, most).astype(int))
    else:
        index = take_first_group(np.asarray(groups.number)[:size])
    part = jax.tree.map(lambda t: np.asarray(t)[index], targets)
    parameters = estimate_in_group(loss, part, num_scores)
    check_loss_mask(loss, part, num_scores, parameters, weighted)


def find_widths(sets: Iterable[tuple[RowGroups | None, int]]) -> list[int]:
    """Returns the widths that a loss is traced for.

    Args:
      sets: groups and number of rows, with padding, of each set.
    """
    widths: set[int] = set()
    for each, size in sets:
        assert each is not None
        if each.kind == "ids":
            widths |= {table.rows.shape[1] for table in each.tables}
        else:
            widths.add(size if each.kind == "all" else each.width)
    return sorted(widths)


def _name(loss):
    bare = bare_loss(loss.loss if isinstance(loss, Adaptive) else loss)
    return getattr(bare, "__name__", repr(bare))
