# SPDX-License-Identifier: Apache-2.0
"""Warns of two classes that are about to be learned by squared error.

In: a call of ``fit`` that names no loss. Out: a warning if its targets look like labels
of two classes. Who passes the loss means it, and so does JBoostRegressor.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from jboost.entry.warning import warn_user

P = ParamSpec("P")
R = TypeVar("R")
_LABELS = ({0.0, 1.0}, {-1.0, 1.0}, {1.0, 2.0})
_FEW = 20  # of so few rows two values may be chance


def hint_at_classes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates ``fit(x, y, loss=squared_error)``, whose signature stays the same."""

    @functools.wraps(function)
    def hinted(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) < 3 and "loss" not in kwargs:
            _warn_of_labels(args[1] if len(args) > 1 else kwargs.get("y"))
        return function(*args, **kwargs)

    return hinted


def _warn_of_labels(y: Any) -> None:
    try:
        values = np.asarray(y)
        if values.dtype.kind not in "biuf" or values.size < _FEW:
            return
        values = values.astype(np.float64).reshape(-1)
        few = {*values[:_FEW].tolist()}
    except Exception:  # what cannot be read is refused later, by name
        return
    if len(few) <= 2 and {*np.unique(values).tolist()} in _LABELS:
        low, high = np.unique(values)
        warn_user(
            f"y has only the values {low:g} and {high:g}, and loss is squared_error, "
            "its default; pass jb.losses.logistic to learn the probability of 1 (with "
            "y of 0 and 1), use JBoostClassifier for labels of any kind, or pass "
            "loss=jb.losses.squared_error if it is meant"
        )
