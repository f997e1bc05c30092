# SPDX-License-Identifier: Apache-2.0
"""Messages stay short, whatever the argument is that they show."""

import inspect
import traceback
import warnings
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest

import jboost as jb
from jboost.entry.messages import show
from jboost.sklearn import JBoostClassifier, JBoostRanker, JBoostRegressor

MOST = 750  # letters; a list of all losses has 500
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3)).astype(np.float32)
Y = X[:, 0] + 1
WIDE = RANDOM.normal(size=(3000, 3))
HUGE = {
    "arrays": [WIDE, WIDE[:, 0]],
    "text": "a b" * 3000,
    "numbers": list(range(5000)),
    "dict": {f"key {number}": X[:2] for number in range(300)},
    "matrix": WIDE,
    "objects": np.array([["t" * 4000] * 3] * 30, object),
    "frame": pd.DataFrame(WIDE),
    "texts": tuple(f"{'name ' * 20}{number}" for number in range(2000)),
    "integer": 10**5000,
    "function": partial(jb.losses.huber, delta=WIDE),
    "nested": [[["u" * 50] * 20] * 20] * 20,
    "set": set(range(3000)),
    "pairs": [("a" * 900, WIDE)] * 3,
}
FEW = dict(num_rounds=1, max_depth=2)
LOSS = jb.losses.squared_error
MODEL, HISTORY = jb.fit(X, Y, absent="zero", **FEW)
BINS = jb.fit_bins(X, max_bins=8)
CODES = jb.apply_bins(BINS, X)
IDS = np.arange(40) // 4


def fit_stream(**given):
    return jb.fit(jb.stream(**given), **FEW)


def fit_with_settings(**settings):
    return JBoostRegressor(**settings).fit(X, Y)


def fit_on(kind):
    return lambda **given: kind(**FEW).fit(**given)


# name: (function, a call that is right, whose arguments it has)
CALLS = {
    "fit": (jb.fit, dict(x=X, y=Y, **FEW)),
    "sweep": (jb.sweep, dict(
        x=X, y=Y, loss=LOSS, points=dict(l2=[1.0]), folds=2, **FEW
    )),
    "boost": (jb.boost, dict(
        binned=CODES, y=Y, loss=LOSS, key=jax.random.key(0), **FEW
    )),
    "predict": (jb.predict, dict(model=MODEL, x=X)),
    "staged_predict": (jb.staged_predict, dict(model=MODEL, x=X)),
    "leaf_indices": (jb.leaf_indices, dict(model=MODEL, x=X)),
    "shap_values": (jb.shap_values, dict(model=MODEL, x=X)),
    "feature_importance": (jb.feature_importance, dict(model=MODEL)),
    "partial_dependence": (
        jb.partial_dependence, dict(model=MODEL, x=X, features=[0])
    ),
    "fit_bins": (jb.fit_bins, dict(x=X)),
    "apply_bins": (jb.apply_bins, dict(bins=BINS, x=X)),
    "refit": (jb.refit, dict(model=MODEL, x=X, y=Y, loss=LOSS)),
    "conformal": (jb.conformal, dict(model=MODEL, x=X, y=Y, alpha=0.5)),
    "inspect_loss": (jb.inspect_loss, dict(loss=LOSS, target=1.0)),
    "truncate": (jb.truncate, dict(model=MODEL, num_rounds=1)),
    "make_groups": (jb.make_groups, dict(ids=IDS)),
    "random_groups": (jb.random_groups, dict(size=4)),
    "rows": (jb.rows, dict(x=X, y=Y)),
    "stream": (fit_stream, dict(batches=[(X, Y)], memory="64 MiB"), jb.stream),
    "permutation": (jb.explanation.permutation_importance, dict(
        model=MODEL, x=X, y=Y, loss=LOSS
    )),
    "fit_tree": (jb.cart.fit_tree, dict(x=X, y=Y)),
    "make_sketch": (jb.sketches.make_sketch, dict(num_features=3)),
    "tree_to_dot": (jb.plotting.tree_to_dot, dict(model=MODEL, round=0)),
    "adaptive": (jb.losses.adaptive, dict(loss=LOSS, estimate=lambda s, t: 1.0)),
    "regressor": (fit_with_settings, FEW, JBoostRegressor),
    "regressor.fit": (fit_on(JBoostRegressor), dict(X=X, y=Y), JBoostRegressor.fit),
    "classifier.fit": (
        fit_on(JBoostClassifier), dict(X=X, y=Y > 1), JBoostClassifier.fit
    ),
    "ranker.fit": (
        fit_on(JBoostRanker), dict(X=X, y=np.arange(40) % 3, qid=IDS), JBoostRanker.fit
    ),
}  # fmt: skip
# A path may be of any length, and so is what the system says of it.
PATHS = ("self", "checkpoint", "directories", "path")


@pytest.mark.parametrize("name", CALLS)
def test_messages_about_huge_arguments_are_short(name):
    function, right, *described = CALLS[name]
    for argument in inspect.signature((described or [function])[0]).parameters:
        for kind in () if argument in PATHS else HUGE:
            for text in find_messages(function, {**right, argument: HUGE[kind]}):
                assert len(text) <= MOST, (argument, kind, text[:MOST])


def find_messages(function, given):
    """Returns what warnings and the error of a call say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function(**given)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if not any(
                "/sklearn/" in each.filename.split("jboost")[0] for each in frames
            ):
                yield str(error)
    yield from (str(each.message) for each in caught)


def test_values_are_shown_on_one_short_line():
    for kind, value in HUGE.items():
        text = show(value)
        assert len(text) <= 220 and "\n" not in text, kind
    for value in (1, "auto", None, [0, 1], (), {"a": 1}, 0.5, np.float32(2), int):
        assert show(value) == repr(value)
    assert show(X) == (
        f"float32[40, 3] of {X[0, 0]:.5g}, {X[0, 1]:.5g}, {X[0, 2]:.5g}, ..."
    )
    assert show([X, Y]).startswith("[float32[40, 3] of ")
    assert show(list(range(50))) == "[0, 1, 2, 3, 4, 5, ...] (50 items)"
    assert show(pd.DataFrame(X)) == "DataFrame of shape (40, 3)"
    assert show(jax.numpy.ones((2, 3))) == "float32[2, 3]"
