# SPDX-License-Identifier: Apache-2.0
"""The worked examples of the text books come out as printed."""

import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.numerics.exact import sum_channels
from jboost.trees.leaves import newton_step

FEET = np.float32([750, 800, 850, 900, 950])[:, None]
RENT = np.float32([1160, 1200, 1280, 1450, 2000])
STUMPS = dict(
    num_rounds=3, learning_rate=1.0, max_depth=1, l2=0.0, min_child_weight=0.0,
    min_child_samples=1, curvature="unit",
)  # fmt: skip

ABSOLUTE = np.array(
    [
        [1280, 1280, 1280, 1280, 1280],
        [1180, 1180, 1450, 1450, 1450],
        [1160, 1190, 1460, 1460, 1460],
        [1155, 1185, 1455, 1455, 2000],
    ]
)
# Errors after each round: mean of squares, mean of absolutes. The table prints whole
# numbers, some truncated and some rounded.
ABSOLUTE_ERRORS = [(113620, 218), (66440, 152), (64840, 148), (6180, 40)]
SQUARED = np.array(
    [
        [1418, 1418, 1418, 1418, 1418],
        [1272, 1272, 1272, 1272, 2000],
        [1180, 1180, 1334, 1334, 2061],
        [1195, 1195, 1349, 1349, 2000],
    ]
)
SQUARED_ERRORS = [(94576, 246), (9895, 74), (4190, 54), (3240, 42)]


def errors(stages):
    return np.stack([((stages - RENT) ** 2).mean(1), abs(stages - RENT).mean(1)], 1)


def fit_stages(loss):
    """F_0, F_1, ... from fit."""
    model, _ = jb.fit(FEET, RENT, loss, **STUMPS)
    start = jb.predict(jb.truncate(model, 0), FEET)
    return model, np.concatenate([start[None], jb.staged_predict(model, FEET)])


@pytest.mark.usefixtures("full_search")
def test_rent_absolute_error():
    model, stages = fit_stages(jb.losses.absolute_error)
    # Every number is whole and exact in float32, up to one rounding of each sum.
    np.testing.assert_allclose(stages, ABSOLUTE, rtol=1e-6)
    np.testing.assert_allclose(errors(stages), ABSOLUTE_ERRORS, rtol=1e-4)
    assert model.threshold[:, 0, 0].tolist() == [825, 775, 925]
    # The text prints what each tree adds.
    added = [[-100, 170], [-20, 10], [-5, 540]]
    np.testing.assert_allclose(model.leaf_value[:, 0], added, rtol=1e-5)


@pytest.mark.usefixtures("full_search")
def test_rent_squared_error():
    _, stages = fit_stages(jb.losses.squared_error)
    # The table is truncated to whole numbers; 2000 may come out as 1999.9999.
    np.testing.assert_array_equal(np.floor(stages + 1e-2), SQUARED)
    # Of the errors most are truncated too, but 245.6 is printed as 246.
    assert np.all(np.abs(errors(stages) - SQUARED_ERRORS) < 1)


GRADES = np.float32([90, 55, 84, 64, 78, 67])
# lectures, labs, background, ML1 mark
STUDENTS = np.float32(
    [
        [16, 10, 1, 85],
        [4, 4, 1, 60],
        [15, 6, 1, 85],
        [7, 8, 0, 45],
        [17, 10, 0, 90],
        [8, 7, 1, 68],
    ]
)
GROUPS = [[0, 1, 0, 2, 0, 3], [0, 1, 0, 2, 0, 2]]  # leaf of each student, by tree
LEAVES = [[11, -18, -9, -6], [9.9, -16.2, -6.75]]
GRADE_STAGES = [
    [73] * 6,
    [74.1, 71.2, 74.1, 72.1, 74.1, 72.4],
    [75.09, 69.58, 75.09, 71.425, 75.09, 71.725],
]


def test_grades_leaf_values_and_updates():
    scores = jnp.full(6, GRADES.mean())
    assert float(scores[0]) == 73
    for group, leaves, stage in zip(GROUPS, LEAVES, GRADE_STAGES[1:], strict=True):
        gradient = 2 * (scores - GRADES)  # of (score - target)^2
        rows = (gradient, jnp.full(6, 2.0))
        sums = sum_channels(rows, jnp.array(group), len(leaves))
        value, _ = newton_step(*sums, jnp.float32(0))
        np.testing.assert_allclose(value, leaves, rtol=1e-5)  # float32
        scores += 0.1 * value[jnp.array(group)]
        np.testing.assert_allclose(scores, stage, rtol=1e-6)  # float32


def make_grades_model():
    """The two trees drawn by hand, as heaps of depth 2.

    Tree 1: ML1 mark <= 64 ? (lectures <= 5.5 ? {2} : {4}) : (lectures <= 11.5 ? {6} :
    {1, 3, 5}). Tree 2: lectures <= 11.5 ? (lectures <= 5.5 ? {2} : {4, 6}) : {1, 3, 5}.
    """
    first, second = LEAVES
    return jb.Ensemble(
        feature=jnp.array([[[3, 0, 0]], [[0, 0, 0]]]),
        threshold=jnp.array([[[64, 5.5, 11.5]], [[11.5, 5.5, jnp.inf]]]),
        missing_left=jnp.ones((2, 1, 3), bool),
        leaf_value=0.1
        * jnp.array(
            [
                [[first[1], first[2], first[3], first[0]]],
                [[second[1], second[2], second[0], 0.0]],
            ]
        ),
        init_score=jnp.float32(73),
        num_features=4,
    )


def test_grades_model():
    model = make_grades_model()
    stages = jb.staged_predict(model, STUDENTS)
    np.testing.assert_allclose(stages, GRADE_STAGES[1:], rtol=1e-6)  # float32
    new = np.array([[14, 5, 1, 80]])
    np.testing.assert_allclose(jb.predict(model, new), [75.09], rtol=1e-6)
