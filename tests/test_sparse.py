# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices give the bits of the dense ones that they stand for."""

import re
from dataclasses import replace

import chex
import jax
import jax.experimental.sparse as jsparse
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import xgboost
from by_column import sum_histogram
from implementations import IMPLEMENTATIONS
from references import histogram as naive_histogram
from tables import FULL, squared_distance

import jboost as jb
from jboost.tables.domains import warn_of_collisions

pytestmark = pytest.mark.usefixtures("constant_leaves_of_file")
FILL = {"missing": np.nan, "zero": 0.0}
ROWS, COLUMNS = 200, 3
QUICK = dict(num_rounds=4, max_depth=3, max_bins=16, **FULL)


def make_sparse(seed=0, rows=ROWS, columns=COLUMNS, density=0.3):
    """Normal values of both signs; stored zeros, NaN, infinities and a denormal; a
    column of which nothing is stored, and one of which everything is."""
    rng = np.random.default_rng(seed)
    stored = rng.random((rows, columns)) < density
    stored[:, 1], stored[:, 2] = False, True
    row, column = np.nonzero(stored)
    values = rng.normal(size=len(row)).astype(np.float32)
    values[rng.random(len(row)) < 0.05] = np.nan
    values[rng.random(len(row)) < 0.05] = 0.0
    values[[5, 6, 7]] = np.inf, -np.inf, 1e-40
    return scipy.sparse.csr_matrix((values, (row, column)), shape=(rows, columns))


def densify(x, absent):
    """The definition: NaN or 0 where nothing is stored."""
    x = x.tocoo()
    dense = np.full(x.shape, FILL[absent], np.float32)
    dense[x.row, x.col] = x.data
    return dense


def make_targets(x, seed=1):
    noise = np.random.default_rng(seed).normal(size=x.shape[0])
    values = np.nan_to_num(densify(x, "zero"), posinf=2.0, neginf=-2.0)
    missing = np.isnan(densify(x, "missing"))[:, 0]
    return (values[:, 0] - values[:, 2] + missing + 0.3 * noise).astype(np.float32)


def expand(codes):
    """The matrix of codes that SparseCodes stand for."""
    starts, rows, stored, absent = (
        np.asarray(a) for a in (codes.starts, codes.rows, codes.codes, codes.absent)
    )
    full = np.tile(absent, (codes.num_rows, 1))
    for feature in range(codes.num_features):
        part = slice(starts[feature], starts[feature + 1])
        full[rows[part], feature] = stored[part]
    return full


def assert_same_model(first, second):
    """But for what they take absent entries for."""
    for name in ("feature", "threshold", "missing_left", "leaf_value", "init_score"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


# Bins and codes.

WEIGHTS = {
    "none": None,
    "weights": np.random.default_rng(3).uniform(0.5, 3, ROWS).astype(np.float32),
    "some rows of weight 0": np.random.default_rng(4).integers(0, 3, ROWS) / 4,
}


@pytest.mark.parametrize(
    ("absent", "weights", "max_bins"),
    [
        ("missing", "none", 256), ("zero", "none", 9), ("missing", "weights", 300),
        ("zero", "weights", 256), ("missing", "some rows of weight 0", 9),
        ("zero", "some rows of weight 0", 2),
    ],
)  # fmt: skip
def test_thresholds_and_codes_are_those_of_the_dense_matrix(absent, weights, max_bins):
    x, weight = make_sparse(), WEIGHTS[weights]
    dense = densify(x, absent)
    bins = jb.fit_bins(x, max_bins=max_bins, sample_weight=weight, absent=absent)
    expected = jb.fit_bins(
        dense, max_bins=max_bins, sample_weight=weight, implementation="xla"
    )
    np.testing.assert_array_equal(bins.thresholds, expected.thresholds)
    codes = jb.apply_bins(bins, x)
    assert codes.shape == x.shape
    np.testing.assert_array_equal(expand(codes), jb.apply_bins(expected, dense))


def test_a_column_of_zeros_that_few_rows_store():
    """The weight of absent zeros fills one bin; the others share what is left."""
    rng = np.random.default_rng(0)
    dense = np.zeros((5000, 1), np.float32)
    dense[:400, 0] = rng.normal(size=400)
    weight = rng.integers(0, 4, 5000).astype(np.float32)
    bins = jb.fit_bins(
        scipy.sparse.csc_array(dense), max_bins=16, sample_weight=weight, absent="zero"
    )
    expected = jb.fit_bins(dense, max_bins=16, sample_weight=weight)
    np.testing.assert_array_equal(bins.thresholds, expected.thresholds)


def test_all_kinds_of_sparse_matrices():
    x = make_sparse()
    expected = jb.apply_bins(jb.fit_bins(x), x)
    coo = x.tocoo()
    indices = np.stack([coo.row, coo.col], axis=1)
    order = np.random.default_rng(0).permutation(x.nnz)
    padding = np.array([[ROWS, COLUMNS]] * 3)  # as BCOO pads: out of bounds
    bcoo = jsparse.BCOO(
        (
            jnp.asarray(np.append(coo.data[order], [9, 9, 9]).astype(np.float32)),
            jnp.asarray(np.concatenate([indices[order], padding])),
        ),
        shape=x.shape,
    )
    bcsr = jsparse.BCSR((x.data, x.indices, x.indptr), shape=x.shape)
    kinds = [x.tocsc(), coo, x.tolil(), x.astype(np.float64), bcoo, bcsr]
    kinds += [scipy.sparse.csr_array(x), scipy.sparse.coo_array(x)]
    for kind in kinds:
        chex.assert_trees_all_equal(jb.apply_bins(jb.fit_bins(kind), kind), expected)


def test_duplicates_are_summed_and_the_matrix_is_left_alone():
    data, row = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 0, 1, 2])
    column = np.array([0, 0, 0, 1])
    summed = scipy.sparse.csr_matrix(np.array([[3.0, 0], [4, 0], [0, 8]]))
    coo = scipy.sparse.coo_matrix((data, (row, column)), shape=(3, 2))
    csr = scipy.sparse.csr_matrix((data, column, np.array([0, 2, 3, 4])), shape=(3, 2))
    bcoo = jsparse.BCOO((data, np.stack([row, column], axis=1)), shape=(3, 2))
    expected = jb.fit_bins(summed).thresholds
    for x in (coo, csr, bcoo):
        np.testing.assert_array_equal(jb.fit_bins(x).thresholds, expected)
    assert csr.nnz == 4


def test_integers_and_booleans():
    x = scipy.sparse.random(50, 3, 0.5, random_state=0).tocsr()
    for dtype in (np.int64, np.int8, bool):
        typed = (10 * x).astype(dtype)
        dense = typed.toarray().astype(np.float32)
        expected = jb.fit_bins(dense).thresholds
        bins = jb.fit_bins(typed, absent="zero")
        np.testing.assert_array_equal(bins.thresholds, expected)


def test_values_that_float32_cannot_tell_apart_are_reported():
    x = scipy.sparse.csc_matrix(1e9 + np.arange(1, 101.0)[:, None])
    with pytest.warns(UserWarning, match=r"column 0 of x.*100"):
        warn_of_collisions(x)


# Histograms.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("absent", "max_bins"), [("missing", 16), ("zero", 300)])
def test_histograms_against_a_loop(absent, implementation, max_bins):
    x = make_sparse()
    codes = jb.apply_bins(jb.fit_bins(x, max_bins=max_bins, absent=absent), x)
    rng = np.random.default_rng(0)
    channels = rng.integers(-1000, 1000, (ROWS, 3)).astype(np.int32)
    node = rng.integers(-1, 4, ROWS).astype(np.int32)
    sums = sum_histogram(
        codes, jnp.asarray(channels), jnp.asarray(node), num_nodes=3,
        num_bins=max_bins, implementation=implementation,
    )  # fmt: skip
    expected = naive_histogram(expand(codes).T, channels, node, 3, max_bins)
    np.testing.assert_array_equal(sums, expected)


# Training and prediction.

SETTINGS = {
    "missing": {},
    "zero, sampled and constrained": dict(
        sample_weight=WEIGHTS["some rows of weight 0"], subsample=0.7,
        rows_per_threshold=100,
        colsample_bytree=0.8, colsample_bylevel=0.8, colsample_bynode=0.7, seed=5,
        min_child_samples=15, monotone=[1, 0, -1], interactions=[[0, 2], [1]],
        max_leaves=5, l1=0.1,
    ),
    "zero, deep, codes of two bytes": dict(max_bins=300, max_depth=8, num_rounds=2),
    "zero by XLA": dict(implementation="xla", max_depth=2),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_the_model_of_the_dense_matrix(name):
    x, absent = make_sparse(), re.split("[, ]", name)[0]
    dense = densify(x, absent)
    y, settings = make_targets(x), dict(absent=absent, **QUICK) | SETTINGS[name]
    found, sparse_history = jb.fit(x, y, **settings)
    settings.pop("implementation", None)  # dense rows need not go by XLA, too
    model, history = jb.fit(dense, y, **settings)
    assert np.any(np.isfinite(model.threshold))
    chex.assert_trees_all_equal(found, model)
    np.testing.assert_array_equal(sparse_history.train_loss, history.train_loss)
    score = jb.predict(model, dense)
    np.testing.assert_array_equal(jb.predict(found, dense), score)
    for implementation in IMPLEMENTATIONS:
        scores = jb.predict(found, x, implementation=implementation)
        np.testing.assert_array_equal(scores, score)


def test_several_scores_validation_sets_and_offsets():
    x, other = make_sparse(), make_sparse(seed=7, rows=150)
    y, target = (np.stack([make_targets(m, s) for s in (1, 2)], 1) for m in (x, other))
    rng = np.random.default_rng(0)
    offset, far = (rng.normal(size=(n, 2)) for n in (ROWS, 150))

    def run(first, second):
        validation = {"held out": (second, target, np.linspace(0, 1, 150), far)}
        return jb.fit(
            first, y, squared_distance, offset=offset, validation=validation,
            num_scores=2, absent="zero", early_stopping_rounds=3, **QUICK,
        )  # fmt: skip

    # Training rows and held-out rows need not be of one kind.
    model, history = run(x, densify(other, "zero"))
    expected = run(densify(x, "zero"), other)
    chex.assert_trees_all_equal(model, expected[0])
    chex.assert_trees_all_equal(history.validation_loss, expected[1].validation_loss)
    for function in (jb.predict, jb.staged_predict):
        np.testing.assert_array_equal(
            function(model, other, offset=far),
            function(model, densify(other, "zero"), offset=far),
        )
    np.testing.assert_array_equal(
        jb.leaf_indices(model, other), jb.leaf_indices(model, densify(other, "zero"))
    )


def test_more_rows_than_a_chunk_and_a_block(monkeypatch):
    """Kernels work in chunks of 16,384 rows; predict in blocks of rows."""
    from jboost.model import sparse_blocks

    x = make_sparse(rows=20_001, density=0.02)
    for absent in FILL:
        arguments = dict(
            absent=absent, num_rounds=2, max_depth=3, subsample=0.5, max_bins=64
        )
        model, _ = jb.fit(x, make_targets(x), **arguments)
        dense = densify(x, absent)
        expected, _ = jb.fit(dense, make_targets(x), **arguments)
        chex.assert_trees_all_equal(model, expected)
        scores = jb.predict(expected, dense)
        for cells in (sparse_blocks._BLOCK_CELLS, 100_000):
            monkeypatch.setattr(sparse_blocks, "_BLOCK_CELLS", cells)
            np.testing.assert_array_equal(jb.predict(model, x), scores)


def test_a_model_trained_on_a_dense_matrix_says_what_absent_means():
    x = make_sparse()
    for absent in FILL:
        dense = densify(x, absent)
        model, _ = jb.fit(dense, make_targets(x), absent=absent, **QUICK)
        np.testing.assert_array_equal(jb.predict(model, x), jb.predict(model, dense))
        assert jb.truncate(model, 2).absent == absent


TAKE_ROWS = dict(
    predict=jb.predict,
    staged_predict=jb.staged_predict,
    leaf_indices=jb.leaf_indices,
    shap_values=lambda model, x: jb.shap_values(model, x).values,
    shap_interactions=jb.explanation.shap_interactions,
)


def test_a_model_of_dense_rows_asks_what_gaps_are():
    """All that takes rows refuses gaps, reads full matrices, and believes absent."""
    x = make_sparse()
    x.data[np.isnan(x.data)] = 3  # training must see no missing value
    dense, y = densify(x, "zero"), make_targets(x)
    full = scipy.sparse.csr_matrix(np.where(dense == 0, np.float32(7), dense))
    model, _ = jb.fit(dense, y, **QUICK)
    told = replace(model, absent="zero")
    for run in TAKE_ROWS.values():
        with pytest.raises(ValueError, match=r"absent .*sparse"):
            run(model, x)
        np.testing.assert_array_equal(run(model, full), run(model, full.toarray()))
        np.testing.assert_array_equal(run(told, x), run(model, dense))
    with pytest.raises(ValueError, match=r"absent .*sparse"):
        jb.apply_bins(jb.fit_bins(dense), x)
    with pytest.raises(ValueError, match=r"absent .*sparse"):
        jb.fit(x, y, model=model, **QUICK)
    for rows in (dense, jb.stream([(dense, y)], memory="1 MiB")):
        targets = y if rows is dense else None
        with pytest.raises(ValueError, match=r"absent .*validation x"):
            jb.fit(rows, targets, validation=(x, y), **QUICK)
        found, history = jb.fit(
            rows, targets, validation=(x, y), absent="zero", **QUICK
        )
        assert found.absent == "zero"
        np.testing.assert_allclose(
            history.validation_loss, history.train_loss, rtol=1e-5
        )
    more, _ = jb.fit(dense, y, model=model, absent="zero", **QUICK)
    assert more.absent == "zero"
    assert jb.fit(dense, y, model=more, **QUICK)[0].absent == "zero"
    assert jb.fit(x, y, **QUICK)[0].absent == "missing"


def test_models_of_missing_values_read_gaps_as_missing():
    """Missing values in training decide, in rows that count, by every way in."""
    x = make_sparse()
    y, dense = make_targets(x), densify(x, "missing")
    full = np.nan_to_num(dense)
    last = full.copy()
    last[-1, 2] = np.nan  # the only missing value, in the last batch and one column
    ones, none = np.ones(ROWS, np.float32), np.ones(ROWS, np.float32)
    none[-1] = 0
    half = ROWS // 2

    def stream(rows, weight, **more):
        parts = (slice(half), slice(half, None))
        batches = [(rows[p], y[p], weight[p]) for p in parts]
        return jb.fit(jb.stream(batches, memory="1 MiB", **more), **QUICK)[0]

    def sketch(rows, weight):
        made = jb.sketches.update_sketch(jb.sketches.make_sketch(COLUMNS), rows, weight)
        return jb.sketches.bins_from_sketch(made, max_bins=16)

    ways = dict(
        fit=lambda rows, weight: jb.fit(rows, y, sample_weight=weight, **QUICK)[0],
        bins=lambda rows, weight: jb.fit_bins(rows, sample_weight=weight),
        sorted=lambda rows, weight: jb.fit(
            rows, y, sample_weight=weight, candidates="exact", **QUICK
        )[0],
        batches=stream,
        own_bins=lambda rows, weight: stream(rows, weight, bins=jb.fit_bins(full)),
        sketch=sketch,
        folds=lambda rows, weight: (
            jb.cross_validate(
                rows, y, sample_weight=weight, folds=2, return_models=True, **QUICK
            ).models
        ),
    )
    for name, way in ways.items():
        assert way(dense, ones).absent == "missing", name
        assert way(last, ones).absent == "missing", name
        assert way(last, none).absent is None, name
        assert way(full, ones).absent is None, name
    model, start = ways["fit"](dense, ones), ways["fit"](full, ones)
    for run in TAKE_ROWS.values():
        np.testing.assert_array_equal(run(model, x), run(model, dense))
    more, history = jb.fit(dense, y, model=start, validation=(x, y), **QUICK)
    assert more.absent == "missing"
    np.testing.assert_allclose(history.validation_loss, history.train_loss, rtol=1e-5)
    assert jb.fit(full, y, model=model, **QUICK)[0].absent == "missing"
    assert jb.fit(dense, y, absent="zero", **QUICK)[0].absent == "zero"
    with pytest.raises(ValueError, match=r"absent .*sparse") as caught:
        jb.predict(start, x)
    for word in ("zero", "missing"):
        assert f"replace(model, absent='{word}')" in str(caught.value)


def test_nothing_stored_at_all():
    empty = scipy.sparse.csr_matrix((ROWS, COLUMNS), dtype=np.float32)
    y = np.arange(ROWS, dtype=np.float32)
    model, _ = jb.fit(empty, y, **QUICK)
    np.testing.assert_allclose(jb.predict(model, empty), y.mean(), rtol=1e-6)


def test_features_beyond_those_in_use_cost_nothing():
    """A million columns, which no dense block could hold."""
    x = make_sparse()
    wide = scipy.sparse.csr_matrix((x.data, x.indices, x.indptr), (ROWS, 1_000_000))
    y = make_targets(x)
    arguments = QUICK | dict(max_depth=2, max_bins=8)
    model, _ = jb.fit(x, y, **arguments)
    wider, _ = jb.fit(wide, y, **arguments)
    assert_same_model(wider, model)
    np.testing.assert_array_equal(jb.predict(wider, wide), jb.predict(model, x))


# The traceable loop.


def test_boost_under_jit_and_vmap():
    x = make_sparse()
    y, bins = make_targets(x), jb.fit_bins(x, max_bins=16)

    def train(codes, rate):
        return jb.boost(
            codes, y, jb.losses.squared_error, jax.random.key(0), learning_rate=rate,
            num_rounds=2, max_depth=2, max_bins=16, **FULL,
        )  # fmt: skip

    rates = jnp.array([0.1, 0.5])
    codes = jb.apply_bins(bins, x)
    expected = train(jb.apply_bins(bins, densify(x, "missing")), rates[0])
    # A batch of matrices, too, where they store the same number of entries.
    both = jax.tree.map(lambda a: jnp.stack([a, a]), codes)
    mapped = jax.vmap(jax.vmap(train, (None, 0)), (0, None))
    found = jax.jit(mapped)(both, rates)
    for k in range(2):
        one = jax.tree.map(lambda a, k=k: a[k, 0], found)
        chex.assert_trees_all_equal(one, expected)


def test_single_rounds():
    x = make_sparse()
    y, bins = make_targets(x), jb.fit_bins(x, max_bins=16, absent="zero")
    loss, results = jb.losses.squared_error, []
    for codes in (jb.apply_bins(bins, x), jb.apply_bins(bins, densify(x, "zero"))):
        state = jb.init(codes, y, loss, jax.random.key(0))
        for _ in range(2):
            state, tree = jb.boost_step(
                state, codes, y, loss, max_depth=2, max_bins=16, **FULL
            )
        results.append((state, tree))
    chex.assert_trees_all_equal(*results)


# Peers.


def test_xgboost_takes_absent_entries_the_same_way():
    """Same splits: few distinct values, so that both search all of them."""
    rng = np.random.default_rng(0)
    x = scipy.sparse.random(ROWS, 3, 0.3, random_state=0, format="csr")
    x.data = rng.integers(1, 6, x.nnz).astype(np.float32)
    missing = np.isnan(densify(x, "missing"))
    y = missing[:, 0] + 0.3 * densify(x, "zero")[:, 1] + 0.1 * rng.normal(size=ROWS)
    y = y.astype(np.float32)
    arguments = dict(num_rounds=5, max_depth=3, learning_rate=0.3, init_score=0.5)
    for absent, matrix in (("missing", x), ("zero", densify(x, "zero"))):
        model, _ = jb.fit(
            x, y, lambda score, target: (score - target) ** 2 / 2, absent=absent,
            regularization="absolute", **arguments,
        )  # fmt: skip
        peer = xgboost.train(
            dict(tree_method="hist", max_depth=3, eta=0.3, base_score=0.5, nthread=1),
            xgboost.DMatrix(matrix, y),
            5,
        )
        # Sums of leaves in float32, in another order.
        score, expected = jb.predict(model, x), peer.predict(xgboost.DMatrix(matrix))
        np.testing.assert_allclose(score, expected, atol=1e-5)


# Errors at the door.


def bad_inputs():
    x = make_sparse()
    complex_x = x.astype(np.complex64)
    place = np.arange(2, dtype=np.int32)
    batched = jsparse.BCOO(
        (np.ones((2, 1)), np.zeros((2, 1, 2), np.int32)), shape=(2, 3, 4)
    )
    dense_part = jsparse.BCOO((np.ones((2, 4)), place[:, None]), shape=(3, 4))
    other = jsparse.COO((np.ones(2), place, place), shape=(3, 4))
    flat = scipy.sparse.coo_array(np.arange(5.0))
    nobody = scipy.sparse.csr_matrix((0, 5))
    return [
        (complex_x, TypeError, "x must hold numbers .* dtype complex64"),
        (batched, ValueError, "x must be 2-D"),
        (dense_part, TypeError, "without batch or dense dimensions"),
        (other, TypeError, "a BCOO or BCSR"),
        (flat, ValueError, "x must be 2-D"),
        (nobody, ValueError, "at least one row and one column|must have 3 columns"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_bad_matrices(case):
    x, error, message = bad_inputs()[case]
    model, _ = jb.fit(make_sparse(), np.zeros(ROWS), num_rounds=0)
    with pytest.raises(error, match=message):
        jb.fit_bins(x)
    with pytest.raises(error, match=message):
        jb.fit(x, np.zeros(3))
    with pytest.raises(error, match=message):
        jb.predict(model, x)


def test_other_refusals():
    x = make_sparse()
    y, bins = make_targets(x), jb.fit_bins(x)
    model, _ = jb.fit(x, y, **QUICK)
    with pytest.raises(ValueError, match=r"absent .*'zeros'"):
        jb.fit(x, y, absent="zeros")
    with pytest.raises(ValueError, match=rf"x .*{COLUMNS}"):
        jb.predict(model, x[:, :2])
    with pytest.raises(ValueError, match=rf"x .*{COLUMNS}"):
        jb.apply_bins(bins, x[:, :2])
    with pytest.raises(ValueError, match=rf"validation x .*{COLUMNS}"):
        jb.fit(x, y, validation=(x[:, :2], y))
    with pytest.raises(ValueError, match=r"binned .*max_bins=8"):
        jb.boost(
            jb.apply_bins(bins, x), y, jb.losses.squared_error, jax.random.key(0),
            max_bins=8,
        )  # fmt: skip
    for more in (dict(candidates="local"), dict(candidate_weights="curvature")):
        with pytest.raises(ValueError, match="'samples'"):
            jb.fit(x, y, **more)
    with pytest.raises(ValueError, match="y must have 200 rows"):
        jb.fit(x, y[:-1])
    with pytest.raises(TypeError, match=r"^x .*dense"):
        jb.explanation.permutation_importance(model, x, y)
    bcoo = jsparse.BCOO.fromdense(np.ones((4, COLUMNS), np.float32))
    with pytest.raises(TypeError, match=r"^x .*traced.*sparse"):
        jax.jit(lambda x: jb.predict(model, x))(bcoo)
    with pytest.raises(TypeError, match=r"model and offset .*traced"):
        jax.jit(lambda model: jb.predict(model, x))(model)


def test_histograms_that_nothing_could_hold():
    rng = np.random.default_rng(0)
    places = rng.integers(0, 3000, 100_000), rng.integers(0, 50_000, 100_000)
    wide = scipy.sparse.csr_matrix((rng.normal(size=100_000), places), (3000, 50_000))
    with pytest.raises(ValueError, match=r"2\^30"):
        jb.fit(wide, np.zeros(3000), max_depth=10)
