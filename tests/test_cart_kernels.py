# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel of single trees: against NumPy on random tables."""

import numpy as np
import pytest

import jboost as jb
from jboost.entry.context import use_implementation
from jboost.kernels import calls, grow_cpu

pytestmark = pytest.mark.skipif(
    not calls.available(), reason="the kernels were not built"
)
STRUCTURE = "left", "feature", "threshold", "missing_left", "num_rows"
STATISTICS = "value", "gain", "squared_error", "weight"


def draw_table(seed):
    """A random table and limits, with ties, missing values and corners."""
    rng = np.random.default_rng(seed)
    size = rng.choice([1, 2, 3, 24, 100, 1000]), rng.integers(1, 6)
    x = rng.normal(size=size) if rng.random() < 0.5 else rng.integers(0, 9, size)
    x = x.astype(np.float32)
    x[rng.random(size) < rng.choice([0, 0.1, 0.6])] = np.nan
    if rng.random() < 0.3:
        x[:, rng.integers(size[1])] = rng.choice([5.0, np.nan])
    if rng.random() < 0.3:
        x[rng.random(size) < 0.1] = rng.choice([np.inf, -np.inf, 1e-40, -0.0])
    shape = (size[0], rng.integers(2, 4)) if rng.random() < 0.3 else size[:1]
    y = rng.normal(size=shape) if rng.random() < 0.5 else rng.integers(0, 4, shape)
    y = y * 10.0 ** rng.integers(-3, 4) + rng.choice([0.0, 1e6])
    weights = [None, rng.integers(0, 4, size[0]), 10 ** rng.uniform(-3, 3, size[0])]
    settings = dict(
        sample_weight=weights[0 if size[0] < 20 else rng.integers(3)],
        max_depth=rng.choice([None, 0, 2, 6], p=[0.7, 0.1, 0.1, 0.1]),
        min_child_samples=int(rng.choice([1, 1, 2, 7])),
        min_split_samples=int(rng.choice([2, 2, 6])),
        min_child_weight=rng.choice([0.0, 0.0, 3.0]),
        min_gain=rng.choice([0.0, 0.0, 1.5]),
    )
    return x, y, settings


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_the_kernel_grows_the_same_trees(first):
    for seed in range(first, first + 40):
        x, y, settings = draw_table(seed)
        tree = jb.cart.fit_tree(x, y, **settings)
        with use_implementation("xla"):
            other = jb.cart.fit_tree(x, y, **settings)
        for name in STRUCTURE:
            found, expected = getattr(tree, name), getattr(other, name)
            np.testing.assert_array_equal(found, expected, f"{seed} {name}")
        for name in STATISTICS:
            found, expected = getattr(tree, name), getattr(other, name)
            # NumPy may add in another order.
            scale = other.squared_error[0] if name in ("gain", "squared_error") else 0
            np.testing.assert_allclose(
                found, expected, rtol=1e-9, atol=1e-12 * scale, err_msg=f"{seed} {name}"
            )


@pytest.mark.parametrize("missing", [0.0, 0.1])
@pytest.mark.parametrize("outputs", [1, 2])
def test_threads_grow_the_same_trees(missing, outputs, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60_000, 4)).astype(np.float32)
    y = rng.normal(size=(60_000, outputs)) + x[:, :1]
    x[rng.random(x.shape) < missing] = np.nan
    trees = []
    for num_threads in (1, 3):
        monkeypatch.setattr(grow_cpu, "_count_threads", lambda n=num_threads: n)
        trees.append(jb.cart.fit_tree(x, y))
    for name in STRUCTURE + STATISTICS:
        np.testing.assert_array_equal(*(getattr(tree, name) for tree in trees), name)
