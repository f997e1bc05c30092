# SPDX-License-Identifier: Apache-2.0
"""Masks, safe elementary functions and checks of targets for losses of groups."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.entry.decorators import fetch


def weigh_rows(scores, where, weights):
    """Returns the weights of the rows [G], 0 for masked rows."""
    size = scores.shape[0]
    weights = jnp.ones(size, scores.dtype) if weights is None else weights
    weights = jnp.asarray(weights, scores.dtype)
    return weights if where is None else jnp.where(jnp.asarray(where), weights, 0)


def clear(values, real):
    """Replaces the values of masked rows by 0, so that they cannot cause NaN."""
    return jnp.where(real, values, 0)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def log(x, root=1.0):
    """Returns log(x root^2), x > 0, where neither x^2 nor 1 / x^2 need be a float32.

    The second derivative of ``jnp.log`` computes 1 / x^2, which overflows for x <
    1e-19. Dividing x by its own value first does not help: XLA reorders divisions.
    """
    return 2 * jnp.log(jnp.sqrt(x) * root)


@log.defjvp
def _differentiate_log(root, primals, tangents):
    return log(primals[0], root), tangents[0] * _invert(primals[0])


@jax.custom_jvp
def _invert(x):
    """Returns 1 / x; the derivative multiplies by it twice."""
    return 1 / x


@_invert.defjvp
def _differentiate_invert(primals, tangents):
    inverse = _invert(primals[0])
    return inverse, -(inverse * (tangents[0] * inverse))


@jax.custom_jvp
def softplus(x):
    """Returns log(1 + e^x); its derivative needs no logarithm, only a sigmoid.

    log(1 + t) = 2 artanh(t / (2 + t)), by a series that is exact to float32 for t <= 1:
    XLA evaluates its own log1p number by number, in several times the time.
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        return jnp.logaddexp(x, 0)
    small = jnp.exp(-jnp.abs(x))
    ratio = small / (2 + small)
    square, series = ratio * ratio, jnp.zeros_like(ratio)
    for power in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / power
    return jnp.maximum(x, 0) + 2 * ratio * series


@softplus.defjvp
def _differentiate_softplus(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return softplus(x), tangent * jax.nn.sigmoid(x)


# So that float32 can hold the sum of the gains 2^y - 1 of any number of rows.
MOST_RELEVANCE = 100


def check_relevances(targets: Any, real: Any, name: str) -> None:
    """Checks that relevances have a gain 2^y - 1.

    Args:
      real: bool [N]; other rows are not checked.
    """
    if not _is_concrete((targets, real)) or np.shape(targets) != np.shape(real):
        return
    targets, real = map(np.asarray, fetch((targets, real)))
    row = _find_first(~((targets >= 0) & (targets <= MOST_RELEVANCE)) & real)
    if row is not None:
        raise ValueError(
            f"{name} must contain relevances from 0 to {MOST_RELEVANCE}, whose gain is "
            f"2^relevance - 1, got {targets[row]} in row {row}"
        )


def check_times(targets: Any, real: Any, name: str) -> None:
    """Checks times and events, and times of entry where there are any.

    Args:
      targets: a mapping with ``time``, ``event`` and maybe ``entry``, [N] each.
      real: bool [N]; other rows are not checked.
    """
    check_names(targets, name)
    held = {key: targets[key] for key in ("time", "event", "entry") if key in targets}
    shapes = {np.shape(values) for values in (*held.values(), real)}
    if not _is_concrete((held, real)) or len(shapes) > 1:
        return
    columns = fetch([real, *held.values()])
    real, time, event, *entries = map(np.asarray, columns)
    row = _find_first(np.isnan(time) & real)
    if row is not None:
        raise ValueError(f"{name}['time'] must not be NaN, got it in row {row}")
    row = _find_first((event != 0) & (event != 1) & real)
    if row is not None:
        raise ValueError(
            f"{name}['event'] must be 1 where the event happened and 0 where the row "
            f"was censored, got {event[row]} in row {row}; write event == code to "
            "choose one of several events"
        )
    for entry in entries:
        row = _find_first(~(entry < time) & real)
        if row is not None:
            raise ValueError(
                f"{name}['entry'] must be less than time, so that the row is at risk, "
                f"got entry {entry[row]} and time {time[row]} in row {row}"
            )


def check_names(targets: Any, name: str = "targets") -> None:
    """Checks that targets are a mapping with ``time`` and ``event``."""
    fields = getattr(getattr(targets, "dtype", None), "names", None)
    if fields is None and hasattr(targets, "keys"):
        missing = {"time", "event"} - {*targets.keys()}
        if missing:
            raise ValueError(
                f"{name} must have time and event, got {[*targets.keys()]}"
            )
        return
    got = type(targets).__name__
    if hasattr(targets, "shape"):
        got = f"an array of shape {targets.shape}"
    form = "times, event=events)"
    if fields is not None:
        form = "y[...], event=y[...]) with the fields of the array"
    raise TypeError(
        f"{name} must be a mapping with time and event, got {got}; write dict(time="
        f"{form}"
    )


def _is_concrete(arrays):
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))


def _find_first(bad):
    return int(np.argmax(bad)) if np.any(bad) else None
