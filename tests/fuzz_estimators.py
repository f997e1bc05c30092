# SPDX-License-Identifier: Apache-2.0
"""Hostile estimators of scikit-learn: fitted ones, whose attributes are changed.

The reader raises a ValueError or a TypeError, or returns a model that predicts.
"""

import copy
import warnings
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from fuzz_changes import HOSTILE, change_array, pick
from fuzz_files import check_model
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.tree import DecisionTreeRegressor

import jboost as jb

ESTIMATORS = ("scikit-learn",)


class Estimator(NamedTuple):
    """A changed estimator, and what was changed."""

    value: Any
    text: str

    def __str__(self) -> str:
        return self.text


class _Holder:
    """Has the attributes of a tree of Cython, which cannot be set there."""

    def __init__(self, held):
        for name in dir(held):
            if not name.startswith("_") and not callable(getattr(held, name)):
                setattr(self, name, getattr(held, name))


@cache
def fitted():
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 3))
    x[:, 2] = random.integers(0, 5, 120)
    y = x[:, 0] + (x[:, 2] == 3)
    several = np.digitize(y, [0, 1])
    return (
        DecisionTreeRegressor(max_depth=3).fit(x, y),
        RandomForestClassifier(3, max_depth=3, random_state=0).fit(x, several),
        GradientBoostingClassifier(n_estimators=2, random_state=0).fit(x, several),
        HistGradientBoostingRegressor(
            max_iter=2, categorical_features=[2], min_samples_leaf=5
        ).fit(x, y),
    )


def draw_estimator(target: str, random: np.random.Generator) -> Estimator:
    """Returns an estimator with another attribute, or another array in a tree."""
    del target
    estimator = copy.deepcopy(pick(fitted(), random))
    if random.random() < 0.3:
        names = [n for n in vars(estimator) if n.endswith("_") or n.startswith("_")]
        name = pick([*names, "learning_rate", "init_"], random)
        value = pick(HOSTILE, random)
        setattr(estimator, name, value)
        return Estimator(
            estimator, f"{type(estimator).__name__}.{name} = {value!r}"[:99]
        )
    return Estimator(
        estimator, f"{type(estimator).__name__}: {_change(estimator, random)}"
    )


def _change(estimator, random):
    """Changes an array of a tree; returns its name."""
    if hasattr(estimator, "_predictors"):
        member = pick([m for row in estimator._predictors for m in row], random)
        if random.random() < 0.2:
            member.raw_left_cat_bitsets = change_array(
                member.raw_left_cat_bitsets, random
            )
            return "raw_left_cat_bitsets"
        name = pick(member.nodes.dtype.names, random)
        member.nodes = member.nodes.copy()
        changed = change_array(np.ascontiguousarray(member.nodes[name]), random)
        if changed.shape != member.nodes.shape:
            member.nodes = np.resize(member.nodes, max(1, changed.size))
            changed = np.resize(changed, member.nodes.shape)
        with np.errstate(all="ignore"):
            member.nodes[name] = changed
        return f"nodes[{name}]"
    members = np.atleast_1d(getattr(estimator, "estimators_", estimator)).reshape(-1)
    member = pick(members, random)
    holder = _Holder(member.tree_)
    name = pick(
        ("children_left", "children_right", "feature", "threshold", "value",
         "weighted_n_node_samples", "missing_go_to_left"), random,
    )  # fmt: skip
    setattr(holder, name, change_array(np.array(getattr(holder, name)), random))
    member.tree_ = holder
    return f"tree_.{name}"


def read_estimator(
    estimator: Estimator, random: np.random.Generator, thorough: float
) -> bool:
    """Reads an estimator; returns whether it was accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = jb.interchange.read_sklearn(estimator.value)
        except (ValueError, TypeError) as error:
            words = (
                "estimator",
                "Estimator",
                "init",
                "categor",
                type(estimator.value).__name__,
            )
            assert any(word in str(error) for word in words), f"names nothing: {error}"
            return False
        check_model(model, random, thorough)
    return True
