# SPDX-License-Identifier: Apache-2.0
"""Checks arguments of public functions.

In: an argument as a user passes it. Out: the argument, often converted, or an error
whose message names the argument, the expectation and the value. Of traced values only
the shape is checked, because their numbers are unknown.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.entry.representation import show

Words = tuple[str, ...]


def check_word(name: str, value: Any, words: Words) -> Any:
    """Checks that an option is one of the given strings, and returns it."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {words}, got {show(value)}")
    return value


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -np.inf,
    most: float = np.inf,
    above: float | None = None,
    finite: bool = True,
) -> Any:
    """Checks that a scalar has least <= value <= most and value > above; returns it."""
    if isinstance(value, Tracer):
        if value.ndim != 0:
            raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
        return value
    low = f"> {above}" if above is not None else f">= {least}"
    expected = f"{name} must be a number {low}"
    if most < np.inf:
        expected += f" and <= {most}"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{expected}, got {show(value)}") from None
    if array.dtype.kind not in "fiu" or array.ndim != 0 or np.ma.is_masked(value):
        raise TypeError(f"{expected}, got {show(value)}")
    with np.errstate(over="ignore", under="ignore"):
        number = float(array.astype(np.float32))  # as computations will see it
    inside = least <= float(array) <= most and (above is None or number > above)
    if not inside or (finite and not np.isfinite(number)):
        raise ValueError(f"{expected}, got {show(value)}")
    return value


def check_integer(name: str, value: Any, *, least: int, most: int = 2**31 - 1) -> int:
    """Checks and returns a Python integer in [least, most], which cannot be traced."""
    expected = f"{name} must be an integer from {least} to {most}"
    if isinstance(value, Tracer):
        raise TypeError(f"{expected}; it is a size and cannot be traced")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{expected}, got {show(value)}")
    if not least <= value <= most:
        raise ValueError(f"{expected}, got {show(value)}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Checks that a value is True or False, and returns it as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {show(value)}")
    return bool(value)


def check_callable(name: str, value: Any, signature: str) -> Callable[..., Any]:
    """Checks that a value is callable; the error shows ``signature``."""
    if not callable(value):
        raise TypeError(f"{name} must be callable as {signature}, got {show(value)}")
    return value


def check_link(
    inverse_link: Any, score_shape: tuple[int, ...], *, single: bool = False
) -> Callable[..., Any] | None:
    """Checks that an inverse link is a jax.numpy function of the score of one row.

    Args:
      inverse_link: the function, or None.
      score_shape: shape of the score of one row.
      single: whether it must return one array instead of a pytree.
    """
    if inverse_link is None or (score_shape, single) in _find_checked(inverse_link):
        return inverse_link
    check_callable("inverse_link", inverse_link, "inverse_link(score)")
    try:
        found = jax.eval_shape(
            inverse_link, jax.ShapeDtypeStruct(score_shape, jnp.float32)
        )
    except Exception as error:
        raise TypeError(
            "inverse_link must be a jax.numpy function of the score of one row, which "
            f"has shape {score_shape}; it raised {type(error).__name__}: {error}"
        ) from error
    if single and not isinstance(found, jax.ShapeDtypeStruct):
        raise TypeError(f"inverse_link must return one array here, got {show(found)}")
    if not jax.tree.leaves(found):
        raise TypeError(
            f"inverse_link must return an array or a pytree of arrays, got "
            f"{show(found)}"
        )
    _find_checked(inverse_link).add((score_shape, single))
    return inverse_link


_checked: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def _find_checked(link):
    """Returns how a link has been checked, because tracing takes longer than a row."""
    try:
        return _checked.setdefault(link, set())
    except TypeError:  # not hashable, or without weak references
        return set()
