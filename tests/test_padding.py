# SPDX-License-Identifier: Apache-2.0
"""Rows and columns of small tables are padded: few shapes compile, no model changes."""

import jax
import numpy as np
import pytest
from compilations import Compilations

import jboost as jb
from jboost.training.rows import padded_columns
from jboost.training.sharded import padded_rows

RNG = np.random.default_rng(3)
X = RNG.normal(size=(256, 8)).astype(np.float32)
X[RNG.uniform(size=X.shape) < 0.1] = np.nan
Y = (np.nan_to_num(X[:, 0]) ** 2 + RNG.normal(size=len(X))).astype(np.float32)
SETTINGS = dict(num_rounds=3, max_depth=3)


def fit(rows, columns, **settings):
    x, y = X[:rows, :columns], Y[:rows]
    return jb.fit(x, y, validation=(x[::2], y[::2]), **{**SETTINGS, **settings})


def test_sizes_are_few():
    assert {padded_rows(size) for size in range(257, 1025)} == {1024}
    assert [padded_rows(size) for size in (1, 1025, 8192, 8193)] == [
        256,
        2048,
        8192,
        9216,
    ]
    assert {padded_columns(100, size) for size in range(17, 33)} == {32}
    assert [padded_columns(100, size) for size in (1, 32, 33)] == [8, 32, 33]
    assert padded_columns(8193, 3) == 3


def test_other_sizes_compile_nothing():
    fit(256, 8)
    with Compilations() as compilations:
        for rows, columns in ((180, 3), (199, 5), (255, 7)):
            fit(rows, columns)
    assert not compilations.names


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss=jb.losses.absolute_error),
        dict(
            subsample=0.5, colsample_bynode=0.5, max_leaves=3, l1=0.1,
            monotone=[1, 0, -1], interactions=[[0, 1], [2]],
        ),
        dict(candidates="exact"),
    ],
)  # fmt: skip
def test_padding_changes_no_model(monkeypatch, settings):
    """Of the kernels; test_routes.py compares the models of plain XLA with theirs."""
    model, history = fit(200, 3, **settings)
    monkeypatch.setattr("jboost.training.preparing.padded_columns", lambda _, n: n)
    monkeypatch.setattr("jboost.training.rows.padded_rows", lambda n: n)
    plain, expected = fit(200, 3, **settings)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(history.validation_loss, expected.validation_loss)


def test_a_checkpoint_knows_the_columns_without_padding(tmp_path, monkeypatch):
    path = tmp_path / "run"
    fit(200, 3, checkpoint=path)
    monkeypatch.setattr("jboost.training.preparing.padded_columns", lambda _, n: n)
    fit(200, 3, checkpoint=path)
