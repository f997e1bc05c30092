# SPDX-License-Identifier: Apache-2.0
"""Checks arguments that name features or list them.

Errors name the argument, the expectation and the value.
"""

import difflib
from contextlib import suppress
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.entry.checks import refuse_mask
from jboost.entry.labels import name_label
from jboost.entry.messages import show

_SHOWN = 20  # names in an error message


def check_feature(
    name: str, feature: Any, num_features: int, feature_names: Any = None
) -> int:
    """Returns the index of a feature, given its index, its name or its label.

    An integer that is the index of one feature and the label of another is refused.
    """
    expected = f"{name} must list features by index, from 0 to {num_features - 1}"
    names = () if feature_names is None else tuple(feature_names)
    if names:
        shown = ", ".join(map(repr, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
        expected += f", or by name, one of ({shown})"
    by_index = isinstance(feature, int | np.integer) and not isinstance(feature, bool)
    label = name_label(feature)
    if label in names:
        index = names.index(label)
        if not by_index or index == feature:
            return index
        meant = f"{label!r} for column {index}, which has this label"
        if 0 <= feature < num_features:
            meant += f", or {names[feature]!r} for the column at index {feature}"
        raise ValueError(
            f"{name} must list features by name where integers are labels of other "
            f"columns, got {show(feature)}; pass {meant}"
        )
    if isinstance(feature, str | tuple | date):
        raise ValueError(f"{expected}, got {show(feature)}{_suggest(label, names)}")
    if not by_index:
        raise TypeError(f"{expected}, got {show(feature)}")
    if not 0 <= feature < num_features:
        raise ValueError(f"{expected}, got {show(feature)}")
    return int(feature)


def list_features(features: Any, feature_names: Any = None) -> list[Any]:
    """Returns several features as they are, and one feature as a list of one."""
    single = isinstance(features, str) or not np.iterable(features)
    if single or name_label(features) in (feature_names or ()):  # labels may be tuples
        return [features]
    return list(features)


def _suggest(label, names):
    """Returns a hint at the name closest to a misspelled one; "" if none is close."""
    close = difflib.get_close_matches(label.lower(), [n.lower() for n in names], n=1)
    meant = [each for each in names if each.lower() in close]
    return f"; did you mean {meant[0]!r}?" if meant else ""


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
                f"{show(monotone)}"
            )
        values = [*monotone.values()]
    else:
        signs, features, values = np.zeros(0, np.int32), None, monotone
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(refuse_mask(values, "monotone"))
        except (TypeError, ValueError):
            raise TypeError(f"{expected}, got {show(monotone)}") from None
    if values.dtype.kind not in "fiu" and values.size:
        raise TypeError(f"{expected}, got {show(monotone)}")
    if features is None and values.shape != (num_features,):
        raise ValueError(f"{expected}, got shape {values.shape}")
    if isinstance(values, Tracer):
        return values.astype(jnp.int32)
    values = np.asarray(values)
    if not np.all(np.isin(values, (-1, 0, 1))):
        raise ValueError(f"{expected}, got {show(monotone)}")
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
        raise TypeError(f"{expected}, got {show(interactions)}")
    if not interactions:
        raise ValueError(
            f"{expected} with at least one group, got {show(interactions)}"
        )
    mask = np.zeros((len(interactions), num_features), bool)
    for number, group in enumerate(interactions):
        name = f"interactions[{number}]"
        if not isinstance(group, kinds):
            raise TypeError(f"{name} must be a group of features, got {show(group)}")
        if len(group) == 0:
            raise ValueError(
                f"{name} must have at least one feature, got {show(group)}"
            )
        for feature in group:
            index = check_feature(name, feature, num_features, feature_names)
            if mask[number, index]:
                raise ValueError(
                    f"{name} must list each feature once, got {show(group)}"
                )
            mask[number, index] = True
    return mask


def check_names(
    feature_names: Any, names: tuple[str, ...] | None, num_features: int
) -> tuple[str, ...] | None:
    """Checks ``feature_names``; returns them, or else the names of a data frame."""
    given = names if feature_names is None else feature_names
    if given is None:
        return None
    found = given
    with suppress(TypeError):  # not iterable
        found = given if isinstance(given, str) else tuple(given)
    if not isinstance(found, tuple) or not all(isinstance(n, str) for n in found):
        raise TypeError(
            f"feature_names must be a sequence of strings, got {show(given)}"
        )
    if len(found) != num_features or len({*found}) < num_features:
        raise ValueError(
            f"feature_names must be {num_features} unique names, one per column of x, "
            f"got {show(given)}"
        )
    if names is not None and found != names:
        raise ValueError(
            f"feature_names must be None or equal the column names of x, "
            f"{show(names)}, got {show(given)}; rename the columns instead"
        )
    return found
