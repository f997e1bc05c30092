# SPDX-License-Identifier: Apache-2.0
"""Many calls of prediction for few rows: the same model, read and coded once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
import scipy.sparse
from compilations import Compilations
from implementations import needs_cpu_kernels
from test_predict_kernels import OPERATIONS, assert_same_bits, make_model, make_rows

import jboost as jb

pytestmark = needs_cpu_kernels

SIZES = 1, 2, 11, 12, 64, 65, 300


def share_trees(model):
    """Keeps one tree per round, whose leaves hold the values of all scores."""
    first = {name: getattr(model, name)[:, :1] for name in ("feature", "threshold")}
    return replace(model, missing_left=model.missing_left[:, :1], **first)


def make_sparse(num_rows, num_features, density=0.2, seed=2):
    """Rows that store zeros, denormals and NaN among other numbers."""
    x = make_rows(num_rows, num_features, seed)
    stored = np.random.default_rng(seed).random(x.shape) < density
    row, column = np.nonzero(stored)
    return scipy.sparse.csr_array((x[stored], (row, column)), shape=x.shape)


@pytest.mark.parametrize(("num_scores", "shared"), [(1, False), (3, False), (3, True)])
def test_all_calls_on_a_model_agree(num_scores, shared):
    model = make_model(30, 4, 6, num_scores)
    model = share_trees(model) if shared else model
    x = make_rows(max(SIZES), 6)
    expected = [np.asarray(op(model, x, implementation="xla")) for op in OPERATIONS]
    for size in SIZES * 2:  # codes are computed after some calls
        for operation, rows in zip(OPERATIONS, expected, strict=True):
            rows = rows[:, :size] if operation is jb.staged_predict else rows[:size]
            assert_same_bits(operation(model, x[:size]), rows)


def test_calls_of_several_threads_agree():
    model, x = make_model(200, 5, 6), make_rows(300, 6)
    expected = np.asarray(jb.predict(model, x, implementation="xla"))
    sizes = np.random.default_rng(0).integers(1, 300, 200).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda size: jb.predict(model, x[:size]), sizes))
    for size, scores in zip(sizes, found, strict=True):
        assert_same_bits(scores, expected[:size])


@pytest.mark.parametrize("absent", ["zero", "missing"])
@pytest.mark.parametrize("num_features", [3, 40])
def test_sparse_rows_equal_dense_ones(absent, num_features):
    model = replace(make_model(20, 4, num_features, 3), absent=absent)
    sparse = make_sparse(5000, num_features)
    stored = scipy.sparse.csr_array(
        (np.ones_like(sparse.data), sparse.indices, sparse.indptr), shape=sparse.shape
    )
    fill = np.float32(np.nan if absent == "missing" else 0)
    dense = np.where(stored.toarray() > 0, sparse.toarray(), fill)
    offset = make_rows(5000, 3).clip(-1, 1)
    offset[np.isnan(offset)] = 0
    for size in (1, 12, 300, 5000):
        for operation in OPERATIONS:
            found = operation(model, sparse[:size])
            assert_same_bits(found, operation(model, dense[:size]))
        found = jb.predict(model, sparse[:size], offset=offset[:size])
        expected = jb.predict(model, dense[:size], offset=offset[:size])
        assert_same_bits(found, expected)


def test_sparse_rows_agree_with_xla():
    model = replace(make_model(20, 4, 40), absent="zero")
    sparse = make_sparse(100, 40)
    for operation in OPERATIONS:
        expected = operation(model, sparse, implementation="xla")
        assert_same_bits(operation(model, sparse), expected)


@pytest.mark.parametrize("place", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("num_rows", [2, 20000])
def test_columns_that_do_not_exist_are_refused(place, num_rows):
    model = replace(make_model(20, 4, 4), absent="zero")
    x = make_sparse(num_rows, 4, density=0.9)
    x.indices[-1] = place
    with pytest.raises(ValueError, match="x must be a valid sparse matrix"):
        jb.predict(model, x)


def test_rows_that_do_not_exist_are_refused():
    model = replace(make_model(20, 4, 4), absent="zero")
    x = make_sparse(3, 4, density=0.9)
    x.indptr[1] = 2**20
    with pytest.raises(ValueError, match="x must be a valid sparse matrix"):
        jb.predict(model, x)


def test_no_number_of_rows_is_compiled_for():
    model = replace(make_model(20, 4, 6), absent="zero")
    x, sparse = make_rows(100, 6), make_sparse(100, 6)
    jb.predict(model, x), jb.predict(model, sparse)
    with Compilations() as compilations:
        for size in range(1, 100):
            jb.predict(model, x[:size])
            jb.predict(model, sparse[:size])
    assert not compilations.names


def test_arrays_that_may_change_are_read_again():
    model, x = jax.tree.map(np.array, make_model(20, 4, 6)), make_rows(50, 6)
    before = np.asarray(jb.predict(model, x))
    model.leaf_value[:] *= 2
    model.init_score[...] *= 2
    assert_same_bits(jb.predict(model, x), 2 * before)
