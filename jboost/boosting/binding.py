# SPDX-License-Identifier: Apache-2.0
"""Reads what init, boost_step and boost are given: codes, rows, a loss.

In: their arguments. Out: codes as the settings need them, a traced loss, and the rows
on the device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jboost.boosting.grouping import check_first_group, find_widths, read_groups
from jboost.boosting.own_derivatives import no_loss
from jboost.boosting.settings import Settings
from jboost.boosting.state import Data
from jboost.boosting.target_gaps import refuse_gaps
from jboost.codes.codes import Codes, DenseCodes
from jboost.codes.preparing import arrange_codes, check_codes
from jboost.entry.decorators import is_tracing
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.retracing import trace_loss_once
from jboost.objective.tracing import TracedLoss
from jboost.tables.collisions import warn_of_rounding
from jboost.tables.domains import check_domain
from jboost.tables.offsets import check_offset
from jboost.tables.targets import check_targets, check_weights


class RowArguments(NamedTuple):
    """What the public functions take besides codes; see :func:`jboost.init`."""

    y: Any
    sample_weight: Any = None
    offset: Any = None
    groups: Any = None


class Bound(NamedTuple):
    """A traced loss with its rows."""

    loss: TracedLoss | GroupLoss
    constants: tuple[Any, ...]
    data: Data


def read_codes(settings: Settings, binned: Any, mesh: Any = None) -> Codes:
    """Returns codes that are packed or sorted, as the settings require.

    With a mesh, each device packs its own.
    """
    max_bins = None if settings.sorts_rows else settings.max_bins
    codes = check_codes(binned, max_bins)
    if mesh is None:
        return arrange_codes(codes, max_bins)
    return codes if isinstance(codes, DenseCodes) else DenseCodes(codes.T)


def bind_rows(
    codes: Any,
    loss: Callable[..., Any] | Any,
    rows: RowArguments,
    num_scores: int,
    curvature: Any = None,
) -> Bound:
    """Checks the data of the rows, and traces the loss for them.

    Args:
      codes: [N, F]; only the shape is looked at.
      curvature: the user's own; None if there is none.
    """
    num_rows, (y, sample_weight, offset, groups) = codes.shape[0], rows
    weights = np.ones(num_rows, np.float32)
    if sample_weight is not None:
        weights = check_weights(sample_weight, num_rows, "sample_weight")
    targets = y
    if y is not None or loss is not no_loss:
        targets = check_targets(y, num_rows, weights, "y", warn=True)
    check_domain(loss, targets, weights, num_scores, "y")
    widths, own = None, False
    given = None if sample_weight is None else weights
    groups, given = read_groups(groups, loss, given, num_rows)
    if groups is not None:
        widths, own = find_widths([(groups, num_rows)]), groups.weights is not None
        concrete = not any(isinstance(t, Tracer) for t in jax.tree.leaves(targets))
        if concrete and not is_tracing():
            check_first_group(loss, groups, targets, num_scores, own)
    weights = weights if given is None else given
    traced, constants = trace_loss_once(
        loss, targets, num_scores, curvature, widths, own
    )
    start = np.zeros((num_scores, num_rows), np.float32)
    if offset is not None:
        start = check_offset(offset, num_rows, num_scores)
        warn_of_rounding(offset, "offset")
    targets, weights, start, groups = put_arrays((targets, weights, start, groups))
    data = Data(codes, targets, weights, groups, offset=start)
    refuse_gaps(traced, constants, data)
    return Bound(traced, constants, data)


def put_arrays(arrays: Any) -> Any:
    """Moves arrays to the device; ``jnp.asarray`` would compile for each shape."""
    return jax.tree.map(
        lambda a: a if isinstance(a, jax.Array) else jax.device_put(a), arrays
    )
