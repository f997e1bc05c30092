# SPDX-License-Identifier: Apache-2.0
"""Checks arguments of public functions.

In: an argument as a user passes it. Out: the argument, often converted, or an error
whose message names the argument, the expectation and the value. Of traced values only
the shape is checked, because their numbers are unknown.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

Words = tuple[str, ...]


def check_word(name: str, value: Any, words: Words) -> Any:
    """Checks that an option is one of the given strings, and returns it."""
    if value not in words:
        raise ValueError(f"{name} must be one of {words}, got {value!r}")
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
        raise TypeError(f"{expected}, got {value!r}") from None
    if array.dtype.kind not in "fiu" or array.ndim != 0:
        raise TypeError(f"{expected}, got {value!r}")
    number = float(array)
    inside = least <= number <= most and (above is None or number > above)
    if not inside or (finite and not np.isfinite(number)):
        raise ValueError(f"{expected}, got {value!r}")
    return value


def check_integer(name: str, value: Any, *, least: int, most: int = 2**31 - 1) -> int:
    """Checks and returns a Python integer in [least, most], which cannot be traced."""
    expected = f"{name} must be an integer from {least} to {most}"
    if isinstance(value, Tracer):
        raise TypeError(f"{expected}; it is a size and cannot be traced")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{expected}, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{expected}, got {value!r}")
    return int(value)


def check_feature(
    name: str, feature: Any, num_features: int, feature_names: Any = None
) -> int:
    """Returns the index of a feature, given its index or its name."""
    expected = f"{name} must list features by index, from 0 to {num_features - 1}"
    if feature_names is not None:
        expected += f", or by name, one of {tuple(feature_names)}"
        if isinstance(feature, str) and feature in feature_names:
            return list(feature_names).index(feature)
    if isinstance(feature, bool) or not isinstance(feature, int | np.integer):
        raise TypeError(f"{expected}, got {feature!r}")
    if not 0 <= feature < num_features:
        raise ValueError(f"{expected}, got {feature!r}")
    return int(feature)


def check_monotone(
    monotone: Any, num_features: int, feature_names: Any = None
) -> Array | np.ndarray | None:
    """Returns signs [F], given {feature: sign} or a sequence; None if all are 0."""
    if monotone is None:
        return None
    expected = (
        f"monotone must be {{feature: sign}} or {num_features} signs, each of them "
        "-1, 0 or 1"
    )
    if isinstance(monotone, dict):
        signs = np.zeros(num_features, np.int32)
        features = [
            check_feature("monotone", key, num_features, feature_names)
            for key in monotone
        ]
        if len({*features}) < len(features):
            raise ValueError(
                "monotone must list each feature once, by index or by name, got "
                f"{monotone!r}"
            )
        values = [*monotone.values()]
    else:
        signs, features, values = np.zeros(0, np.int32), None, monotone
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except (TypeError, ValueError):
            raise TypeError(f"{expected}, got {monotone!r}") from None
    if values.dtype.kind not in "fiu" and values.size:
        raise TypeError(f"{expected}, got {monotone!r}")
    if features is None and values.shape != (num_features,):
        raise ValueError(f"{expected}, got shape {values.shape}")
    if isinstance(values, Tracer):
        return values.astype(jnp.int32)
    values = np.asarray(values)
    if not np.all(np.isin(values, (-1, 0, 1))):
        raise ValueError(f"{expected}, got {monotone!r}")
    if features is None:
        signs = values.astype(np.int32)
    else:
        signs[features] = values
    return signs if signs.any() else None


def check_interactions(
    interactions: Any, num_features: int, feature_names: Any = None
) -> np.ndarray | None:
    """Returns groups of features as a mask [G, F]."""
    if interactions is None:
        return None
    kinds = list | tuple | set | frozenset | np.ndarray
    expected = "interactions must be a sequence of groups of features"
    if not isinstance(interactions, list | tuple):
        raise TypeError(f"{expected}, got {interactions!r}")
    if not interactions:
        raise ValueError(f"{expected} with at least one group, got {interactions!r}")
    mask = np.zeros((len(interactions), num_features), bool)
    for number, group in enumerate(interactions):
        name = f"interactions[{number}]"
        if not isinstance(group, kinds):
            raise TypeError(f"{name} must be a group of features, got {group!r}")
        if len(group) == 0:
            raise ValueError(f"{name} must have at least one feature, got {group!r}")
        for feature in group:
            index = check_feature(name, feature, num_features, feature_names)
            if mask[number, index]:
                raise ValueError(f"{name} must list each feature once, got {group!r}")
            mask[number, index] = True
    return mask


def learning_rates(
    learning_rate: Any, num_rounds: int, first: int = 0
) -> Array | np.ndarray:
    """Returns one rate per round from a number or a schedule, starting at ``first``."""
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, above=0.0)
        if isinstance(learning_rate, Tracer):
            return jnp.broadcast_to(learning_rate, (num_rounds,))
        return np.full(num_rounds, learning_rate, np.float32)
    rates: list[Any] = []
    # Under jit, schedules written in jax.numpy are evaluated now instead of traced.
    with jax.ensure_compile_time_eval():
        for number in range(first, first + num_rounds):
            rates.append(learning_rate(number))
            check_number(f"learning_rate({number})", rates[-1], least=0.0)
    if any(isinstance(rate, Tracer) for rate in rates):
        return jnp.stack([jnp.asarray(rate, jnp.float32) for rate in rates])
    return np.array(rates, np.float32)


def check_callable(name: str, value: Any, signature: str) -> Callable[..., Any]:
    """Checks that a value is callable; the error shows ``signature``."""
    if not callable(value):
        raise TypeError(f"{name} must be callable as {signature}, got {value!r}")
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
    if inverse_link is None:
        return None
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
        raise TypeError(f"inverse_link must return one array here, got {found!r}")
    if not jax.tree.leaves(found):
        raise TypeError(
            f"inverse_link must return an array or a pytree of arrays, got {found!r}"
        )
    return inverse_link


def check_names(
    feature_names: Any, names: tuple[str, ...] | None, num_features: int
) -> tuple[str, ...] | None:
    """Checks ``feature_names``; returns them, or else the names of a data frame."""
    given = names if feature_names is None else feature_names
    if given is None:
        return None
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"feature_names must be a sequence of strings, got {given!r}")
    if len(given) != num_features or len({*given}) < num_features:
        raise ValueError(
            f"feature_names must be {num_features} unique names, one per column of x, "
            f"got {given!r}"
        )
    if names is not None and tuple(given) != names:
        raise ValueError(
            f"feature_names must be None or equal the column names of x, {names}, got "
            f"{given!r}; rename the columns instead"
        )
    return tuple(given)
