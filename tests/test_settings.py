# SPDX-License-Identifier: Apache-2.0
"""Every hyperparameter is declared once, and all that draws on it agrees."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_parameters import PAGE, write_tables

import jboost as jb
from jboost.boosting.auto import decide_by_data
from jboost.boosting.method import make_method
from jboost.boosting.settings import (
    BoostSettings,
    FitSettings,
    HoldOutSettings,
    RoundSettings,
    StudySettings,
    declared,
    read_settings,
)
from jboost.codes.codes import DenseCodes
from jboost.model.containers import read_container
from jboost.objective.tracing import trace_loss
from jboost.sklearn import JBoostClassifier, JBoostRegressor

X = np.arange(24, dtype=np.float32).reshape(12, 2) % 7
Y = X[:, 0].copy()
EVERY = {*declared(FitSettings)}
# Another value for each, all of which go together.
OTHERS = dict(
    learning_rate=0.2, max_depth=3, max_bins=100, l1=0.5, l2=2.0, max_delta_step=2.0,
    min_gain=0.5, min_child_weight=2.0, min_child_samples=2, regularization="absolute",
    subsample=0.5, colsample_bytree=0.6, colsample_bylevel=0.7, colsample_bynode=0.8,
    max_leaves=3, monotone={0: 1}, interactions=[[0], [1]], max_onehot=2,
    curvature="absolute", leaf_solver="guarded", num_rounds=1, init_score=1.0,
    absent="zero", categorical=[1], early_stopping_rounds=5, num_scores=1, seed=3,
    share_structure=True, leaf_rows="sample", rows_per_threshold=5, parent_rows=2.5,
    validation_fraction=0.3, refit=False, linear_leaves=True, members=1,
)  # fmt: skip
SORTED = dict(candidates="local", candidate_weights="curvature")  # refuse categories


def defaults(function):
    parameters = inspect.signature(function).parameters
    return {name: each.default for name, each in parameters.items()}


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (jb.fit, FitSettings), (jb.cross_validate, StudySettings),
        (jb.sweep, StudySettings), (jb.boost, BoostSettings),
        (jb.boost_step, RoundSettings), (JBoostRegressor, HoldOutSettings),
        (JBoostClassifier, HoldOutSettings),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_names_and_defaults_are_those_declared(function, kind):
    found = defaults(function)
    shared = {name: found[name] for name in EVERY if name in found}
    expected = {name: each.default for name, each in declared(kind).items()}
    if isinstance(function, type):
        expected["absent"] = "zero"  # as scikit-learn reads sparse matrices
    assert shared == expected
    for name in expected:
        assert re.search(rf"^ +{name}: ", function.__doc__, re.M), name


def test_every_setting_has_a_value_here():
    assert {*OTHERS, *SORTED} == EVERY
    assert "{settings}" not in jb.boost_step.__doc__


@pytest.mark.parametrize("name", sorted({*declared(RoundSettings)} - {"learning_rate"}))
def test_every_setting_reaches_the_program(name):
    """Another value makes another Method, or other Numbers."""
    traced, _ = trace_loss(jb.losses.squared_error, Y)
    if name == "share_structure":  # of a single score, nothing is shared
        traced, _ = trace_loss(lambda s, t: jnp.sum((s - t) ** 2), Y, 2)
    categories = None
    if "categor" in name or name == "max_onehot":
        categories = jb.fit_bins(X, categorical=[1]).categories

    codes, ranges = DenseCodes(np.zeros((2, 12), np.uint8)), None
    others = {**OTHERS, **SORTED}
    if name == "linear_leaves":
        ranges, others = np.array([[0, 1], [0, 1]], np.float32), {name: False}

    def make(**given):
        settings = read_settings(given)
        method, numbers = make_method(
            settings, traced, codes, num_rows=12, uniform=True,
            max_bins=settings.max_bins, num_features=2, categories=categories,
            ranges=ranges,
        )  # fmt: skip
        return method, jax.tree.map(
            np.ndarray.tolist, jax.tree.map(np.asarray, numbers)
        )

    assert make(**{name: others[name]}) != make()


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    validation = (X, Y)
    with pytest.warns(UserWarning, match="no tree of 1 round has a split"):
        jb.fit(
            X, Y, jb.losses.huber, validation=validation, checkpoint=path, **OTHERS,
        )  # fmt: skip
    return read_container(path).fields["fingerprint"]


def test_every_setting_is_in_a_checkpoint(fingerprint):
    """Rates are stored round by round; scores show in the digests of the data.

    So do the weights of rows that are held out; a refit comes after the rounds.
    """
    elsewhere = {"learning_rate", "num_rounds", "num_scores"}
    elsewhere |= {"validation_fraction", "refit", "members"}
    assert EVERY - elsewhere <= {*fingerprint}


def test_fingerprints_name_what_fit_takes(fingerprint):
    """Names and values as they are in files of checkpoints."""
    known = {
        "absent": "zero", "curvature": "absolute", "leaf_solver": "guarded",
        "share_structure": False, "regularization": "absolute", "max_depth": 3,
        "max_leaves": 3, "leaf_rows": "sample", "rows_per_threshold": 5,
        "parent_rows": 2.5, "linear_leaves": True,
        "candidates": "global", "candidate_weights": "samples",
        "implementation": jb.implementations()["training"],
        "l2": 2.0, "min_gain": 0.5, "min_child_weight": 2.0,
        "min_child_samples": 2, "colsample_bytree": np.float32(0.6).item(),
        "colsample_bylevel": np.float32(0.7).item(),
        "colsample_bynode": np.float32(0.8).item(), "l1": 0.5,
        "max_delta_step": [-2.0, 2.0], "monotone": [1, 0],
        "interactions": [[True, False], [False, True]], "max_bins": 8,
        "categorical": [1], "categories.num_codes": [7], "max_onehot": 2,
        "subsample": 0.5, "init_score": [1.0], "seed": 3, "early_stopping_rounds": 5,
        "metrics": [], "by": None, "validation": ["validation"],
        "feature_names": None, "model": None,
        **{f"{rows}number of rows": 12 for rows in ("", "validation ")},
        **{
            f"{rows}type of y": "float32[] PyTreeDef(*)" for rows in ("", "validation ")
        },
    }  # fmt: skip
    digests = {
        name for name, each in fingerprint.items()
        if str(each).startswith(("sha256:", "sum64:"))
    }  # fmt: skip
    found = {name: fingerprint[name] for name in {*fingerprint} - digests}
    assert {n: v for n, v in found.items() if n not in ("jax", "jboost")} == known
    rows = ("offset", "sample_weight", "x", "y")
    assert digests == {
        "loss", "numbers in the loss", "thresholds of x", *rows,
        *(f"validation {name}" for name in rows),
    }  # fmt: skip


def test_the_page_of_parameters_is_the_one_that_the_declarations_give():
    page = PAGE.read_text()
    assert write_tables(page) == page, "run python docs/make_parameters.py"
    listed = re.findall(r"^\| `(\w+)` \|", page, re.M)
    arguments = [*defaults(jb.fit)][3:]
    assert sorted(listed) == sorted(arguments)


def test_settings_are_frozen_and_know_their_names():
    settings = read_settings(dict(l2=3.0, unknown=1))
    assert settings.l2 == 3.0 and settings.replace(l2=4.0).l2 == 4.0
    with pytest.raises(AttributeError):
        settings.l2 = 4.0
    with pytest.raises(AttributeError, match="unknown"):
        _ = settings.unknown
    with pytest.raises(ValueError, match="max_depth"):
        settings.replace(max_depth=0)


@pytest.mark.parametrize("pointed", [False, True])
@pytest.mark.parametrize("leaf_solver", ["guarded", "newton"])
@pytest.mark.parametrize("samples", [0, 7])
def test_the_data_decide_alike_within_a_program_and_outside(
    pointed, leaf_solver, samples
):
    def decide(pointed):
        choices = decide_by_data(pointed, 5, leaf_solver, samples)
        return jax.tree.map(jax.numpy.asarray, choices)

    traced = jax.jit(decide)(pointed)
    host = decide_by_data(np.asarray(pointed), 5, leaf_solver, samples)
    assert int(host.min_child_samples) == (samples or 5)
    assert bool(host.exact_leaves) == (pointed and leaf_solver == "guarded")
    assert [each.item() for each in traced] == [np.asarray(each) for each in host]
