# SPDX-License-Identifier: Apache-2.0
"""Golden trees: twelve small trainings whose trees are written down in a file.

They guard refactoring: a change that should not alter models must not alter these. They
say nothing about whether the trees are good; other tests do. If a change is meant to
alter models, write the file again and review its diff:

    python tests/test_golden.py

Structure is compared exactly: histograms are sums of integers, so a split does not
depend on the processor unless two splits are nearly equally good. Leaf values are
compared bit for bit where they result from additions, divisions and order statistics,
which IEEE 754 determines (a GPU divides otherwise: see "Same bits" in docs/gpus.md).
Two kinds get a tolerance: losses that call exp or log, which
XLA computes differently for different instruction sets, and several scores, whose
initial score results from damped Newton steps with fused multiplications.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from tables import ROWS, draw

import jboost as jb

FILE = Path(__file__).parent / "data" / "golden_trees.json"

# Results of SSE4.2 and AVX-512 differ by 1e-7; other processors may differ by more.
TOLERANCE = 1e-5


X = draw(ROWS, 3)
Y = 2 * (X[:, 0] > 0) + np.square(X[:, 1]) / 8 + draw(ROWS) / 16
Y = Y.astype(np.float32)
GAPS = np.where(np.abs(draw(ROWS + 1, 3)[1:]) < 1, np.nan, X).astype(np.float32)
WEIGHTS = np.arange(ROWS, dtype=np.float32) % 4
LABELS = (Y > 4).astype(np.float32)
CLASSES = np.digitize(Y, [2.0, 5.0]).astype(np.int32)
CATEGORIES = np.c_[X[:, :2], np.floor(np.abs(X[:, 2]))].astype(np.float32)


def two_distances(scores, target):
    return jnp.sum(jnp.square(scores - target))


SETTINGS: dict[str, dict[str, Any]] = {
    "squared error": dict(x=X, y=Y),
    "absolute error, weights": dict(
        x=X, y=Y, loss=jb.losses.absolute_error, sample_weight=WEIGHTS
    ),
    "quantile, missing values": dict(
        x=GAPS, y=Y, loss=partial(jb.losses.quantile, tau=0.75)
    ),
    "huber": dict(x=X, y=Y, loss=jb.losses.huber),
    "logistic": dict(x=X, y=LABELS, loss=jb.losses.logistic),
    "poisson, offset": dict(
        x=X, y=np.floor(np.abs(Y)), loss=jb.losses.poisson, offset=X[:, 2] / 16
    ),
    "softmax": dict(x=X, y=CLASSES, loss=jb.losses.softmax, num_scores=3),
    "two scores, sampling": dict(
        x=X, y=np.stack([Y, X[:, 2]], axis=1), loss=two_distances, num_scores=2,
        subsample=0.75, leaf_rows="sample", colsample_bynode=0.5, seed=1,
    ),
    "categories": dict(
        x=CATEGORIES, y=Y + CATEGORIES[:, 2] % 3, categorical=[2], max_onehot=2
    ),
    "sparse, few leaves": dict(
        x=scipy.sparse.csr_matrix(np.nan_to_num(GAPS)), y=Y, absent="zero", max_leaves=5
    ),
    "monotone, interactions": dict(
        x=X, y=Y, monotone={0: 1, 2: -1}, interactions=[[0, 1], [2]], l1=0.5,
        min_gain=0.25, min_child_weight=8.0,
    ),
    "exact candidates": dict(x=GAPS, y=Y, candidates="exact", num_rounds=1),
}  # fmt: skip
ROUNDED = {"logistic", "poisson, offset", "softmax", "two scores, sampling"}


def train(name):
    """Two rounds; the learning rate, a power of 2, rounds nothing."""
    settings = dict(num_rounds=2, max_depth=3, learning_rate=0.5)
    return jb.fit(**{**settings, **SETTINGS[name]})[0]


def describe(model):
    """The arrays of a model by name, [R, K, ...]."""
    names = ("init_score", "feature", "threshold", "missing_left", "leaf_value")
    arrays = {name: np.asarray(getattr(model, name)) for name in names}
    if model.left_codes is not None:
        arrays["left_codes"] = np.asarray(model.left_codes)
    return arrays


@pytest.fixture(scope="module")
def golden():
    return json.loads(FILE.read_text())


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("name", SETTINGS)
def test_trees_are_those_in_the_file(name, golden):
    found, expected = describe(train(name)), golden[name]
    assert found.keys() == expected.keys()
    for key, array in found.items():
        wanted = np.array(expected[key], array.dtype)
        rounded = name in ROUNDED or jax.default_backend() == "gpu"
        if rounded and key in ("init_score", "leaf_value"):
            np.testing.assert_allclose(
                array, wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key
            )
        else:  # so that -0.0 is not 0.0
            np.testing.assert_array_equal(array, wanted, err_msg=key)
            assert array.tobytes() == wanted.tobytes(), key


def test_the_file_holds_no_other_settings(golden):
    assert golden.keys() == SETTINGS.keys()


def write():
    """Writes the file, one line for each array of a model."""
    parts = []
    for name in SETTINGS:
        lines = []
        for key, array in describe(train(name)).items():
            if array.dtype == np.float32:  # the shortest decimals that give its bits
                array = array.astype(str).astype(np.float64)
            lines.append(f"  {json.dumps(key)}: {json.dumps(array.tolist())}")
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write()
