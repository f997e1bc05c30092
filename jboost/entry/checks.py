# SPDX-License-Identifier: Apache-2.0
"""Checks at the door: what public functions say to bad arguments.

Every message names the argument, what is expected and what came. Values that are
being traced are taken on trust: their shapes are known, their numbers are not.
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
    """Returns the value, which must be one of a few words."""
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
    """Returns the value: a scalar, least <= value <= most, and value > above."""
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
    """A Python integer in [least, most]: a size, which is never traced."""
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
    """The place of a feature, from its place or its name."""
    expected = f"{name} must name features by integers from 0 to {num_features - 1}"
    if feature_names is not None:
        expected += f" or by one of {tuple(feature_names)}"
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
    """Signs [F] from {feature: sign} or a sequence; None where all are 0."""
    if monotone is None:
        return None
    expected = (
        f"monotone must be {{feature: sign}} or {num_features} signs, each of them "
        "-1, 0 or 1"
    )
    if isinstance(monotone, dict):
        signs = np.zeros(num_features, np.int32)
        places = [
            check_feature("monotone", key, num_features, feature_names)
            for key in monotone
        ]
        if len({*places}) < len(places):
            raise ValueError(
                f"monotone must name each feature once, by its place or by its name, "
                f"got {monotone!r}"
            )
        values = [*monotone.values()]
    else:
        signs, places, values = np.zeros(0, np.int32), None, monotone
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except (TypeError, ValueError):
            raise TypeError(f"{expected}, got {monotone!r}") from None
    if values.dtype.kind not in "fiu" and values.size:
        raise TypeError(f"{expected}, got {monotone!r}")
    if places is None and values.shape != (num_features,):
        raise ValueError(f"{expected}, got shape {values.shape}")
    if isinstance(values, Tracer):
        return values.astype(jnp.int32)
    values = np.asarray(values)
    if not np.all(np.isin(values, (-1, 0, 1))):
        raise ValueError(f"{expected}, got {monotone!r}")
    if places is None:
        signs = values.astype(np.int32)
    else:
        signs[places] = values
    return signs if signs.any() else None


def check_interactions(
    interactions: Any, num_features: int, feature_names: Any = None
) -> np.ndarray | None:
    """Groups of features as a mask [G, F]."""
    if interactions is None:
        return None
    kinds = list | tuple | set | frozenset | np.ndarray
    expected = "interactions must be a sequence of groups of features"
    if not isinstance(interactions, list | tuple):
        raise TypeError(f"{expected}, got {interactions!r}")
    if not interactions:
        raise ValueError(f"{expected}, at least one, got {interactions!r}")
    mask = np.zeros((len(interactions), num_features), bool)
    for number, group in enumerate(interactions):
        name = f"interactions[{number}]"
        if not isinstance(group, kinds):
            raise TypeError(f"{name} must be a group of features, got {group!r}")
        if len(group) == 0:
            raise ValueError(f"{name} must hold at least one feature, got {group!r}")
        for feature in group:
            place = check_feature(name, feature, num_features, feature_names)
            if mask[number, place]:
                raise ValueError(f"{name} must name each feature once, got {group!r}")
            mask[number, place] = True
    return mask


def learning_rates(
    learning_rate: Any, num_rounds: int, first: int = 0
) -> Array | np.ndarray:
    """One rate per round, from a number or a schedule, from round ``first`` on."""
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, above=0.0)
        if isinstance(learning_rate, Tracer):
            return jnp.broadcast_to(learning_rate, (num_rounds,))
        return np.full(num_rounds, learning_rate, np.float32)
    rates: list[Any] = []
    with jax.ensure_compile_time_eval():
        for number in range(first, first + num_rounds):
            rates.append(learning_rate(number))
            check_number(f"learning_rate({number})", rates[-1], least=0.0)
    if any(isinstance(rate, Tracer) for rate in rates):
        return jnp.stack([jnp.asarray(rate, jnp.float32) for rate in rates])
    return np.array(rates, np.float32)


def check_callable(name: str, value: Any, signature: str) -> Callable[..., Any]:
    """A function, to be called as ``signature`` says."""
    if not callable(value):
        raise TypeError(f"{name} must be callable as {signature}, got {value!r}")
    return value


def check_link(
    inverse_link: Any, score_shape: tuple[int, ...], *, single: bool = False
) -> Callable[..., Any] | None:
    """A function of the score of one row, written in jax.numpy.

    ``single``: whether it must return one array rather than a pytree.
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
            "inverse_link must be a function in jax.numpy of the score of one row, "
            f"here of shape {score_shape}; it raises {type(error).__name__}: {error}"
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
    """Names of features as they were given, or else those of a data frame."""
    given = names if feature_names is None else feature_names
    if given is None:
        return None
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"feature_names must be a sequence of strings, got {given!r}")
    if len(given) != num_features or len({*given}) < num_features:
        raise ValueError(
            f"feature_names must be {num_features} different names, one for each "
            f"column of x, got {given!r}"
        )
    if names is not None and tuple(given) != names:
        raise ValueError(
            "feature_names must not be given where the columns of x have names of "
            f"their own, {names}, got {given!r}; rename the columns"
        )
    return tuple(given)
