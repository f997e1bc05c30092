# SPDX-License-Identifier: Apache-2.0
"""fit grows the trees of XGBoost, row by row and tree by tree.

Features have few distinct values, so that both libraries try the same thresholds.
Targets are real-valued (for the logistic loss, probabilities), so that two different
partitions never gain the same. Equal are l2 = lambda, 2 min_gain = gamma (our gain
has the factor 1/2 of Chen and Guestrin's equation 7, XGBoost's has not) and
min_child_weight, in the loss's own units. Two differences are kept out of the way:
XGBoost makes no split that gains less than 1e-6, so every gamma is above that; and our
min_child_weight has a slack of 1e-5, so it is never a weight that nodes can have.
"""

import json
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import xgboost as xgb
from packaging.version import Version

import jboost as jb

NUM_ROWS, NUM_ROUNDS, MAX_DEPTH, RATE = 1000, 12, 5, 0.3
# Scores stay below 2 and are rounded once per round in each library: half an ulp of 2
# is 2 * 2^-24. What that changes in gradients, and so in leaf values (means of
# gradients over means of curvature >= 0.15, times RATE), is less than twice as much.
TOLERANCE = 2 * NUM_ROUNDS * 2 * 2 * 2.0**-24


def half_squared_error(score, target):
    return jnp.square(score - target) / 2


class Problem(NamedTuple):
    loss: object
    objective: str
    init_score: float
    base_score: float  # the same, where XGBoost wants it: a mean


PROBLEMS = {
    "squared": Problem(half_squared_error, "reg:squarederror", 0.25, 0.25),
    "logistic": Problem(jb.losses.logistic, "binary:logistic", 0.0, 0.5),
}
SETTINGS = {  # l2, min_gain, min_child_weight
    "plain": (1.0, 1e-6, 0.9),
    "free": (0.0, 1e-6, 0.0),
    "heavy l2": (30.0, 1e-6, 0.9),
    "priced leaves": (1.0, 0.15, 0.0),
    "heavy children": (0.5, 1e-6, 12.3),
    "everything": (3.0, 0.05, 4.56),
}


def make_data(missing):
    """Features of 2 to 40 distinct values; a smooth target in (0, 1)."""
    rng = np.random.default_rng(0)
    counts = (2, 5, 12, 40, 40)
    x = np.stack([rng.integers(0, count, NUM_ROWS) / count for count in counts], axis=1)
    latent = 2 * x[:, 3] * x[:, 4] - x[:, 2] + 0.5 * x[:, 0]
    if missing:
        gone = rng.random(x.shape) < [0.3, 0.1, 0.0, 0.2, 0.05]
        x[gone] = np.nan
        latent = latent + 0.5 * gone[:, 3]
    noisy = latent + rng.normal(0, 0.5, NUM_ROWS)
    weight = rng.uniform(0.25, 3, NUM_ROWS).astype(np.float32)
    return x.astype(np.float32), (1 / (1 + np.exp(-noisy))).astype(np.float32), weight


def train_booster(x, y, weight, problem, settings, obj=None, **more):
    l2, min_gain, min_child_weight = settings
    parameters = {
        "objective": problem.objective, "base_score": problem.base_score,
        "tree_method": "hist", "max_bin": 256, "max_depth": MAX_DEPTH, "eta": RATE,
        "lambda": l2, "gamma": 2 * min_gain, "min_child_weight": min_child_weight,
        "nthread": 1, **more,
    }  # fmt: skip
    matrix = xgb.DMatrix(x, y, weight=weight)
    return xgb.train(parameters, matrix, NUM_ROUNDS, obj=obj)


def train_xgboost(x, y, weight, problem, settings, **more):
    booster = train_booster(x, y, weight, problem, settings, **more)
    matrix = xgb.DMatrix(x)
    scores = booster.predict(matrix, output_margin=True)
    leaf = booster.predict(matrix, pred_leaf=True).astype(int)
    texts = booster.get_dump(dump_format="json")
    # XGBoost 3.4 writes the threshold of splits between missing and known values so.
    dumped = [json.loads(text.replace(": -inf,", ": -Infinity,")) for text in texts]
    values = [dict(leaf_values(tree)) for tree in dumped]
    return leaf, values, scores


def leaf_values(node):
    """(number, value) of every leaf of a dumped tree."""
    if "leaf" in node:
        yield node["nodeid"], node["leaf"]
    for child in node.get("children", ()):
        yield from leaf_values(child)


def train_jboost(x, y, weight, problem, settings, **more):
    l2, min_gain, min_child_weight = settings
    model, _ = jb.fit(
        x, y, problem.loss, sample_weight=weight, num_rounds=NUM_ROUNDS,
        learning_rate=RATE, max_depth=MAX_DEPTH, l2=l2, min_gain=min_gain,
        min_child_weight=min_child_weight, regularization="absolute",
        curvature="exact", leaf_solver="newton", init_score=problem.init_score,
        **more,
    )  # fmt: skip
    return model


def group_rows(leaf):
    """The partition: each row's leaf, numbered in order of first appearance."""
    _, first, group = np.unique(leaf, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[group]


# Problem, missing cells, weights: both problems for each of the settings.
TABLES = {
    "squared": ("squared", False, False), "logistic": ("logistic", True, True),
    "squared, weights": ("squared", True, True),
    "logistic, plain": ("logistic", False, False),
    "squared, missing": ("squared", True, False),
    "logistic, weights": ("logistic", False, True),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "table"), [
    (settings, [*TABLES][(2 * number + other) % 6])
    for number, settings in enumerate(SETTINGS) for other in (0, 1)
])  # fmt: skip
def test_trees_are_those_of_xgboost(table, settings):
    problem, missing, weighted = TABLES[table]
    x, y, weight = make_data(missing)
    weight = weight if weighted else None
    run = x, y, weight, PROBLEMS[problem], SETTINGS[settings]
    assert_same_trees(x, train_jboost(*run), *train_xgboost(*run))


CONSTRAINTS = {  # ours, and the same in XGBoost's words
    "l1": (dict(l1=2.5), dict(alpha=2.5)),
    "max_delta_step": (dict(max_delta_step=0.2), dict(max_delta_step=0.2)),
    "monotone": (
        dict(monotone=(1, 0, -1, 1, -1)),
        dict(monotone_constraints=(1, 0, -1, 1, -1)),
    ),
    "interactions": (
        dict(interactions=[[0, 3], [3, 4], [1, 2, 4]]),
        dict(interaction_constraints="[[0, 3], [3, 4], [1, 2, 4]]"),
    ),
    "features of no group": (
        dict(interactions=[[2, 3]]), dict(interaction_constraints="[[2, 3]]"),
    ),
    "monotone in groups, steps": (
        dict(interactions=[[0, 3, 4], [1, 2]], monotone={3: -1}, max_delta_step=0.3),
        dict(interaction_constraints="[[0, 3, 4], [1, 2]]", max_delta_step=0.3,
             monotone_constraints=(0, 0, 0, -1, 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "problem", "missing"), [
    *((name, "logistic", True) for name in CONSTRAINTS),
    ("l1", "squared", False), ("monotone", "squared", False),
])  # fmt: skip
def test_constrained_trees_are_those_of_xgboost(name, problem, missing):
    """Not so l1 together with bounds: XGBoost's gain then leaves out 2 l1 |w|."""
    x, y, weight = make_data(missing)
    run = x, y, weight, PROBLEMS[problem], SETTINGS["plain"]
    ours, theirs = CONSTRAINTS[name]
    model = train_jboost(*run, **ours)
    assert_same_trees(x, model, *train_xgboost(*run, **theirs))
    free = train_xgboost(*run)[2]
    assert np.abs(free - np.asarray(jb.predict(model, x))).max() > 0.05


def assert_same_trees(x, model, expected, expected_values, expected_scores):
    leaves = np.asarray(jb.leaf_indices(model, x))
    for number in range(NUM_ROUNDS):
        ours, theirs = leaves[:, number], expected[:, number]
        name = f"tree {number}"
        np.testing.assert_array_equal(group_rows(ours), group_rows(theirs), name)
        value = np.asarray(model.leaf_value)[number, 0, ours]
        expected_value = [expected_values[number][leaf] for leaf in theirs.tolist()]
        np.testing.assert_allclose(value, expected_value, rtol=0, atol=TOLERANCE)
    assert max(len(np.unique(tree)) for tree in leaves.T) > 8
    scores = np.asarray(jb.predict(model, x))
    np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=TOLERANCE)
    assert np.abs(scores).max() < 2


@pytest.mark.parametrize(("problem", "share"), [
    ("squared", 0.999), ("squared", 1.001), ("logistic", 0.999), ("logistic", 3.0),
])  # fmt: skip
def test_a_root_below_min_child_weight_is_that_of_xgboost(problem, share):
    """A tree whose root weighs too little adds 0; one that cannot be split, its root.

    Of the logistic loss the root weighs less in each round, since p (1 - p) falls.
    XGBoost 3.4 no longer looks at the weight of roots.
    """
    x, y, weight = make_data(missing=True)
    y = y / 4  # far from the start
    total = weight.sum() * (0.25 if problem == "logistic" else 1.0)
    run = x, y, weight, PROBLEMS[problem], (1.0, 1e-6, share * total)
    with pytest.warns(UserWarning, match="min_child_weight=.* asks for"):
        found = np.asarray(jb.predict(train_jboost(*run), x))
    expected = add_roots(y, weight, problem, least=share * total)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert (expected == PROBLEMS[problem].init_score) == (share > 1)
    *_, theirs = train_xgboost(*run)
    checked = Version(xgb.__version__) < Version("3.4")
    expected = add_roots(y, weight, problem, least=share * total if checked else 0)
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=TOLERANCE)


def add_roots(y, weight, problem, least):
    """Returns the score after rounds of roots alone, with l2 = 1, in float64."""
    y, weight = y.astype(float), weight.astype(float)
    score = PROBLEMS[problem].init_score
    for _ in range(NUM_ROUNDS):
        mean = 1 / (1 + np.exp(-score)) if problem == "logistic" else score
        curvature = mean * (1 - mean) if problem == "logistic" else 1.0
        mass = (weight * curvature).sum()
        if mass >= least:
            score -= RATE * (weight * (mean - y)).sum() / (mass + 1)
    return score


@pytest.mark.parametrize(("missing", "scale"), [(False, 0.01), (True, 300.0)])
def test_order_statistics_split_as_in_xgboost(missing, scale):
    """Its curvature of a row is its weight, however far apart the targets are."""
    x, y, weight = make_data(missing)
    y, weight = y * scale, np.round(weight) + 1
    begin = np.float32(y.mean())
    for loss, objective, more in (
        (jb.losses.absolute_error, "reg:absoluteerror", {}),
        (partial(jb.losses.quantile, tau=0.3), "reg:quantileerror",
         dict(quantile_alpha=0.3)),
    ):  # fmt: skip
        problem = Problem(loss, objective, begin, begin)
        run = x, y, weight, problem, (1.0, 1e-6, 1.0)
        leaf, *_ = train_xgboost(*run, **more)
        model, history = jb.fit(
            x, y, loss, sample_weight=weight, num_rounds=1, max_depth=MAX_DEPTH,
            regularization="absolute", init_score=float(begin), min_child_samples=1,
        )  # fmt: skip
        assert history.choices["curvature"] == "unit"
        own = np.asarray(jb.leaf_indices(model, x))[:, 0]
        np.testing.assert_array_equal(group_rows(own), group_rows(leaf[:, 0]))
        assert len(np.unique(own)) > 4


@pytest.mark.parametrize("settings", ["plain", "free"])
def test_a_loss_without_curvature_stands_still_as_in_xgboost(settings):
    x, y, weight = make_data(missing=True)
    problem = Problem(jb.losses.absolute_error, "reg:squarederror", 0.25, 0.25)
    with pytest.warns(UserWarning, match="leaf_solver='newton'") as caught:
        model = train_jboost(x, y, weight, problem, SETTINGS[settings])
    assert caught[0].filename == __file__

    def derivatives(scores, matrix):
        return np.sign(scores - matrix.get_label()), np.zeros(NUM_ROWS)

    *_, expected = train_xgboost(
        x, y, weight, problem, SETTINGS[settings], obj=derivatives
    )
    np.testing.assert_array_equal(jb.predict(model, x), expected)
    assert (expected == 0.25).all()
