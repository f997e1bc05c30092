# SPDX-License-Identifier: Apache-2.0
"""Scores of linear leaves: kernels and XLA agree to the bit on all routes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from implementations import each_isa, needs_cpu_kernels
from test_predict_categories import add_sets, add_values, link
from test_predict_kernels import (
    REFUSALS,
    assert_same_bits,
    make_model,
    make_rows,
)
from test_small_predictions import make_sparse, share_trees

import jboost as jb
from jboost.trees.tree import Slopes

pytestmark = needs_cpu_kernels

PREDICTIONS = jb.predict, jb.staged_predict


def add_slopes(model, num_terms, seed=7):
    """Random terms; some are missing, and some trees have none."""
    generator = np.random.default_rng(seed)
    rounds, trees = model.feature.shape[:2]
    shape = (*model.leaf_value.shape, num_terms)
    place = (rounds, trees, *shape[2:])
    feature = generator.integers(0, model.num_features, place, np.int32)
    feature[generator.random(place) < 0.3] = -1
    feature[generator.random((rounds, trees)) < 0.2] = -1
    slope, center = generator.normal(size=(2, *shape)).astype(np.float32)
    ranges = generator.normal(size=(model.num_features, 2)).astype(np.float32)
    slopes = Slopes(feature, slope, center)
    ranges = np.sort(2 * ranges, axis=1)
    return jax.device_put(replace(model, slopes=slopes, ranges=ranges))


def assert_routes(model, x, sizes=(1, 12, 65, 300)):
    """Compares all numbers of rows, by row and by column, first walked, then coded."""
    for operation in PREDICTIONS:
        expected = np.asarray(operation(model, x, implementation="xla"))
        for _ in each_isa():
            for size in sizes:
                rows = expected[..., :size, :] if model.num_scores > 1 else expected
                rows = rows if model.num_scores > 1 else rows[..., :size]
                assert_same_bits(operation(model, x[:size]), rows)
                columns = np.asfortranarray(x[:size])
                assert_same_bits(operation(model, columns), rows)


# The loops select columns among 16, 32 or 64 per row, or gather them; 7 terms and the
# leaf value fill a group of lanes.
@pytest.mark.parametrize(
    ("num_features", "num_terms", "depth", "num_scores", "shared"),
    [
        (3, 1, 2, 1, False), (15, 7, 7, 3, True), (16, 2, 4, 2, False),
        (40, 8, 3, 1, False), (70, 17, 5, 1, False),
    ],
)  # fmt: skip
def test_kernels_equal_xla(num_features, num_terms, depth, num_scores, shared):
    model = make_model(12, depth, num_features, num_scores)
    model = add_slopes(share_trees(model) if shared else model, num_terms)
    assert_routes(model, make_rows(300, num_features))


def test_linked_trees_and_categories():
    places = (1, 4)
    model = add_sets(make_model(6, 4, 6, 2), places)
    x = add_values(make_rows(300, 6), places)
    assert_routes(add_slopes(model, 3), x)
    assert_routes(add_slopes(link(model), 3), x)


@pytest.mark.parametrize("absent", ["zero", "missing"])
def test_sparse_rows(absent):
    # Features that only terms use are kept, too.
    model = replace(add_slopes(make_model(3, 2, 40), 2), absent=absent)
    sparse = make_sparse(300, 40)
    stored = scipy.sparse.csr_array(
        (np.ones_like(sparse.data), sparse.indices, sparse.indptr), shape=sparse.shape
    )
    fill = np.float32(np.nan if absent == "missing" else 0)
    dense = np.where(stored.toarray() > 0, sparse.toarray(), fill)
    for operation in PREDICTIONS:
        expected = operation(model, dense, implementation="xla")
        assert_same_bits(operation(model, sparse, implementation="xla"), expected)
        assert_same_bits(operation(model, sparse), expected)
        few = expected[:3] if operation is jb.predict else expected[:, :3]
        assert_same_bits(operation(model, sparse[:3]), few)


def test_the_definition():
    model, x = add_slopes(make_model(5, 3, 4), 2), make_rows(100, 4)
    x[:, 0] = np.where(np.arange(100) % 3, np.inf, np.nan)
    feature, slope, center = map(np.asarray, model.slopes)
    x_clipped = np.clip(x, *np.asarray(model.ranges).T)
    leaves = np.asarray(jb.leaf_indices(model, x))
    expected = np.full(100, model.init_score, float)
    for i, r in np.ndindex(leaves.shape):
        at = r, 0, leaves[i, r]
        used = feature[at] >= 0
        terms = slope[at] * (x_clipped[i, feature[at]] - center[at])
        missing = np.isnan(terms[used]).any()
        expected[i] += model.leaf_value[at] + (0 if missing else terms[used].sum())
    for size in (1, 100):
        found = jb.predict(model, x[:size])
        np.testing.assert_allclose(found, expected[:size], rtol=1e-5, atol=1e-5)


def test_products_that_overflow():
    model, x = add_slopes(make_model(6, 3, 4), 2), make_rows(300, 4)
    steep = model.slopes._replace(slope=2e38 * model.slopes.slope)
    wide = jnp.float32([[-3e38, 3e38]] * 4)
    assert_routes(replace(model, slopes=steep), x)
    assert_routes(replace(model, ranges=wide), x)


def test_many_rows_and_frequent_shapes():
    model, x = add_slopes(make_model(40, 6, 5), 4), make_rows(5000, 5)
    expected = np.asarray(jb.predict(model, x, implementation="xla"))
    assert_same_bits(jb.predict(model, x), expected)
    for _ in range(40):  # from some call on by a compiled program
        assert_same_bits(jb.predict(model, x[:3]), expected[:3])


def test_programs_call_the_kernel():
    model, x = add_slopes(make_model(5, 3, 4, 2), 2), make_rows(200, 4)
    for operation in PREDICTIONS:
        run = jax.jit(operation)
        expected = operation(model, x, implementation="xla")
        assert_same_bits(run(model, x), expected)
        lowered = run.trace(model, x).lower(lowering_platforms=("cpu",)).as_text()
        assert "jboost" in lowered and "stablehlo.while" not in lowered
        elsewhere = run.trace(model, x).lower(lowering_platforms=("cuda",)).as_text()
        assert "jboost" not in elsewhere


def test_derivatives_equal_those_of_xla():
    model, x = add_slopes(make_model(5, 3, 4), 2), make_rows(100, 4)
    at = model.leaf_value, model.slopes.slope, model.slopes.center, jnp.asarray(x)

    def derive(implementation):
        def loss(leaf_value, slope, center, x):
            slopes = model.slopes._replace(slope=slope, center=center)
            changed = replace(model, leaf_value=leaf_value, slopes=slopes)
            scores = jb.predict(changed, x, implementation=implementation)
            return jnp.sum(scores**2)

        gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
        second = jax.grad(lambda *at: jnp.sum(gradient(*at)[1]), argnums=1)
        return jax.jit(lambda *at: (gradient(*at), second(*at)))(*at)

    actual, expected = map(derive, ("cpu", "xla"))
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert np.abs(actual[0][3]).max() > 0


@pytest.mark.parametrize("feature", [4, -2, 2**31 - 1])
def test_terms_beyond_the_columns_are_refused(feature):
    model, x = add_slopes(make_model(3, 2, 4), 2), make_rows(5, 4)
    bad = model.slopes.feature.at[1, 0, 2, 1].set(feature)
    bad = replace(model, slopes=model.slopes._replace(feature=bad))
    with pytest.raises(REFUSALS, match="features beyond"):
        jb.predict(bad, x)
