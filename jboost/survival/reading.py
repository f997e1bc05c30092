# SPDX-License-Identifier: Apache-2.0
"""Reads survival targets and weights as users pass them.

In: a mapping with times and events. Out: float32 arrays of one size, checked where they
are concrete.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.losses.group_targets import check_names, check_times


def read_rows(targets: Any, weights: Any, entries: bool) -> dict[str, Any]:
    """Returns time, event, maybe entry, and weights, [N] each; weights default to 1.

    Args:
      entries: whether times of entry are supported.

    Raises:
      TypeError, ValueError: shapes differ, or values are not those of survival targets.
    """
    check_names(targets)
    if "entry" in targets and not entries:
        raise ValueError("targets must not have entry here: it is not supported")
    names = [name for name in ("time", "event", "entry") if name in targets]
    rows = {name: _read(targets[name]) for name in names}
    shape = rows["time"].shape
    rows["weights"] = np.ones(shape, np.float32) if weights is None else _read(weights)
    for name, values in rows.items():
        if values.shape != shape or len(shape) != 1:
            raise ValueError(
                f"time and {name} must have shape [N], got {shape} and {values.shape}"
            )
    own = rows["weights"]
    if isinstance(own, Tracer):
        return rows
    bad = np.flatnonzero(~((own >= 0) & np.isfinite(own)))
    if len(bad):
        raise ValueError(
            f"weights must be finite and >= 0, got {own[bad[0]]} in row {bad[0]}"
        )
    check_times(rows, own > 0, "targets")
    return rows


def _read(values):
    """Returns float32; of NumPy where values are concrete."""
    if isinstance(values, Tracer):
        return values.astype(jnp.float32)
    return np.asarray(values, np.float32)


def read_times(times: Any) -> Any:
    """Returns the times [T] at which something is evaluated.

    Raises:
      ValueError: they do not have one dimension, or one of them is NaN.
    """
    found = _read(times)
    if found.ndim != 1:
        raise ValueError(f"times must have shape [T], got {found.shape}")
    if not isinstance(found, Tracer) and np.isnan(found).any():
        row = int(np.argmax(np.isnan(found)))
        raise ValueError(f"times must not be NaN, got it at index {row}")
    return jnp.asarray(found)
