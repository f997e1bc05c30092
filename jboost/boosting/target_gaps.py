# SPDX-License-Identifier: Apache-2.0
"""Refuses targets that are infinite or NaN where the loss is not finite.

In: what the traceable loop is given, which no check of ``fit`` has seen. Out: an error
that names the first such row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.boosting.reports import weigh_losses
from jboost.boosting.state import Data, estimate_parameters
from jboost.objective.evaluation import Objective
from jboost.objective.faults import describe_gap, find_gaps, find_never_finite


def refuse_gaps(loss: Any, constants: tuple[Any, ...], data: Data) -> None:
    """Refuses targets that are not finite if the loss is finite at no score tried.

    Traced values are not checked, nor are rows of weight 0.

    Args:
      loss, constants: traced.

    Raises:
      ValueError: names the first row.
    """
    data, offset = data._replace(codes=None), data.offset
    assert offset is not None
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(data)):
        return
    rows = np.flatnonzero(find_gaps(data.targets, data.weights))
    if not len(rows):
        return
    parameters = estimate_parameters(loss, constants, data, offset)
    if loss.coupled:
        words = jnp.zeros(2, jnp.uint32)
        found = weigh_losses(loss, constants, parameters, data, offset, words)
        values, weights = map(np.asarray, found)
        bad = np.full(len(rows), not np.isfinite(values[weights > 0]).all())
    else:
        targets = jax.tree.map(lambda t: np.asarray(t)[rows], data.targets)
        objective = Objective(loss, constants, targets, parameters, None)
        bad = find_never_finite(objective, np.asarray(offset)[:, rows])
    if bad.any():
        row = int(rows[np.argmax(bad)])
        target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)
        raise ValueError(describe_gap("y", target, row))
