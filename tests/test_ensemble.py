# SPDX-License-Identifier: Apache-2.0
"""The model predicts on raw floats what its trees do on codes, and is a pytree."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from by_column import find_leaves
from hypothesis import given, settings
from implementations import IMPLEMENTATIONS

import jboost as jb
from jboost.trees.tree import BoostedTrees

ROUNDS, DEPTH, FEATURES = 5, 3, 3
NODES = 2**DEPTH - 1
LARGEST = np.finfo(np.float32).max
DENORMAL = np.float32(1e-42)
AWKWARD = np.float32(
    [0.0, -0.0, DENORMAL, -DENORMAL, 1e-38, 1.5, 1, 2, LARGEST, -LARGEST, np.inf,
     -np.inf, np.nan, 1e-30, -3, 16777216, 0.1]
)  # fmt: skip


def make_training_columns():
    """Columns whose values lie awkwardly close, far apart, or at the ends."""
    close = np.float32([1 - 2**-24, 1, 1 + 2**-23, 1 + 2**-22])
    columns = [AWKWARD, np.r_[close, AWKWARD[:13]], np.linspace(-3, 3, 17)]
    return np.stack(columns, axis=1).astype(np.float32)


BINS = jb.fit_bins(make_training_columns())


def make_trees(num_scores=1, seed=0):
    """Random trees on codes; some nodes are not split."""
    generator = np.random.default_rng(seed)
    shape = (ROUNDS, num_scores, NODES)
    split = generator.random(shape) < 0.8
    feature = np.where(split, generator.integers(0, FEATURES, shape), 0)
    code = generator.integers(1, BINS.num_bins, shape)
    tree = jb.parts.Tree(
        feature=jnp.asarray(feature, jnp.int32),
        threshold=jnp.asarray(np.where(split, code, BINS.num_bins - 1), jnp.int32),
        missing_left=jnp.asarray(~split | (generator.random(shape) < 0.5)),
        leaf_value=jnp.asarray(
            generator.normal(size=(ROUNDS, num_scores, NODES + 1)), jnp.float32
        ),
    )
    start = generator.normal(size=num_scores).astype(np.float32)
    return BoostedTrees(tree, jnp.asarray(start if num_scores > 1 else start[0]))


def neighbours(values):
    low, high = np.float32(-np.inf), np.float32(np.inf)
    with np.errstate(all="ignore"):  # beyond the largest float lies infinity
        next_ones = [np.nextafter(values, end) for end in (low, high)]
    return np.concatenate([values, *next_ones])


def make_rows():
    """Every awkward value and threshold with its neighbours, shuffled by column."""
    thresholds = np.asarray(BINS.thresholds).ravel()
    pool = neighbours(np.unique(np.concatenate([AWKWARD, thresholds])))
    generator = np.random.default_rng(3)
    return np.stack([generator.permutation(pool) for _ in range(FEATURES)], axis=1)


@jax.jit
def leaves_on_codes(tree, columns):
    over_scores = jax.vmap(find_leaves, (0, None))
    return jax.vmap(over_scores, (0, None))(tree, columns)


def scores_on_codes(trees, x):
    """Scores [R, K, N] after each round, and leaves, by the codes of x."""
    codes = jb.apply_bins(BINS, x)
    leaves = np.asarray(leaves_on_codes(trees.trees, codes.T))
    values = np.asarray(trees.trees.leaf_value)
    added = np.take_along_axis(values, leaves, axis=2)
    start = np.asarray(trees.init_score).reshape(1, -1, 1)
    steps = np.zeros_like(added[0])
    return np.stack([start[0] + (steps := steps + change) for change in added]), leaves


MODEL = jb.to_ensemble(make_trees(), BINS)
ROWS = make_rows()


def test_awkward_values_take_the_same_leaves():
    stages, leaves = scores_on_codes(make_trees(), ROWS)
    np.testing.assert_array_equal(jb.leaf_indices(MODEL, ROWS), leaves[:, 0].T)
    np.testing.assert_array_equal(jb.staged_predict(MODEL, ROWS), stages[:, 0])
    np.testing.assert_array_equal(jb.predict(MODEL, ROWS), stages[-1, 0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(), min_size=FEATURES, max_size=FEATURES))
def test_any_float64_takes_the_same_leaves(row):
    x = np.array([row])
    _, leaves = scores_on_codes(make_trees(), np.repeat(x, len(ROWS), 0))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(jb.leaf_indices(MODEL, x)[0], leaves[:, 0, 0])


def test_several_scores():
    trees = make_trees(num_scores=3)
    model = jb.to_ensemble(trees, BINS)
    stages, leaves = scores_on_codes(trees, ROWS)
    assert (model.num_rounds, model.num_scores, model.max_depth) == (ROUNDS, 3, DEPTH)
    np.testing.assert_array_equal(jb.predict(model, ROWS), stages[-1].T)
    np.testing.assert_array_equal(
        jb.staged_predict(model, ROWS), np.swapaxes(stages, 1, 2)
    )
    np.testing.assert_array_equal(
        jb.leaf_indices(model, ROWS), np.moveaxis(leaves, 2, 0)
    )


def test_shapes_do_not_depend_on_the_container():
    expected = jb.predict(MODEL, ROWS)
    for x in (ROWS.astype(np.float64), jnp.asarray(ROWS), np.asfortranarray(ROWS),
              ROWS.tolist()):  # fmt: skip
        np.testing.assert_array_equal(jb.predict(MODEL, x), expected)


def test_zero_has_one_sign_and_denormals_are_zero():
    zeros = [np.full((1, FEATURES), z) for z in (0.0, -0.0, DENORMAL, -DENORMAL)]
    first, *others = (jb.leaf_indices(MODEL, z) for z in zeros)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_staged_predict_ends_with_predict():
    stages = jb.staged_predict(MODEL, ROWS)
    assert stages.shape == (ROUNDS, len(ROWS))
    np.testing.assert_array_equal(stages[-1], jb.predict(MODEL, ROWS))


@pytest.mark.parametrize("rounds", range(ROUNDS + 1))
def test_truncate(rounds):
    short = jb.truncate(MODEL, rounds)
    assert short.num_rounds == rounds
    stages = jb.staged_predict(MODEL, ROWS)
    expected = stages[rounds - 1] if rounds else np.full(len(ROWS), MODEL.init_score)
    np.testing.assert_array_equal(jb.predict(short, ROWS), expected)
    assert jb.staged_predict(short, ROWS).shape == (rounds, len(ROWS))


@pytest.mark.parametrize("first", range(ROUNDS + 1))
def test_truncate_from_a_later_round(first):
    """Leaf values of any rounds are differences of stages."""
    start = float(MODEL.init_score)
    stages = np.asarray(jb.staged_predict(MODEL, ROWS), np.float64)
    stages = np.concatenate([np.full((1, len(ROWS)), start), stages])
    for count in range(ROUNDS + 1 - first):
        part = jb.truncate(MODEL, count, first=first)
        assert part.num_rounds == count
        expected = start + stages[first + count] - stages[first]
        np.testing.assert_allclose(jb.predict(part, ROWS), expected, atol=1e-5)
    with pytest.raises(ValueError, match=f"num_rounds must .* {ROUNDS - first}"):
        jb.truncate(MODEL, ROUNDS + 1 - first, first=first)
    with pytest.raises(ValueError, match=f"first must .* {ROUNDS}"):
        jb.truncate(MODEL, 0, first=ROUNDS + 1)


def test_one_row_is_predicted_as_among_many():
    """Padding, of rows and of rounds, changes nothing."""
    expected = np.asarray(jb.predict(MODEL, ROWS))
    for count in (1, 2, 63, 64, 65):
        x = ROWS[:count]
        np.testing.assert_array_equal(jb.predict(MODEL, x), expected[:count])


def test_offsets_are_added():
    offset = np.arange(len(ROWS), dtype=np.float32)
    plain = jb.predict(MODEL, ROWS)
    np.testing.assert_array_equal(
        jb.predict(MODEL, ROWS, offset=offset), plain + offset
    )
    stages = jb.staged_predict(MODEL, ROWS, offset=offset)
    np.testing.assert_array_equal(stages[-1], plain + offset)


def test_vmap():
    expected = jb.predict(MODEL, ROWS)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), MODEL, jb.to_ensemble(
        make_trees(seed=1), BINS))  # fmt: skip
    both = jax.vmap(jb.predict, (0, None))(stacked, jnp.asarray(ROWS))
    np.testing.assert_array_equal(both[0], expected)
    other = jb.to_ensemble(make_trees(seed=1), BINS)
    np.testing.assert_array_equal(both[1], jb.predict(other, ROWS))
    pages = jnp.stack([ROWS[:50], ROWS[50:100]])
    paged = jax.vmap(jb.predict, (None, 0))(MODEL, pages)
    np.testing.assert_array_equal(paged.reshape(-1), expected[:100])


def test_gradient_in_leaf_values_is_the_leaf_indicator():
    def score(model):
        return jb.predict(model, ROWS[:1])[0]

    gradient = jax.grad(score, allow_int=True)(MODEL)
    leaves = np.asarray(jb.leaf_indices(MODEL, ROWS[:1]))[0]
    indicator = np.zeros((ROUNDS, 1, NODES + 1))
    indicator[np.arange(ROUNDS), 0, leaves] = 1
    np.testing.assert_array_equal(gradient.leaf_value, indicator)
    assert float(gradient.init_score) == 1


def test_gradient_in_offset_is_one():
    def total(offset):
        return jnp.sum(jb.predict(MODEL, ROWS, offset=offset))

    gradient = jax.grad(total)(jnp.zeros(len(ROWS)))
    np.testing.assert_array_equal(gradient, np.ones(len(ROWS)))


def test_the_model_is_a_pytree():
    leaves, structure = jax.tree.flatten(MODEL)
    assert [leaf.shape for leaf in leaves] == [
        (ROUNDS, 1, NODES), (ROUNDS, 1, NODES), (ROUNDS, 1, NODES),
        (ROUNDS, 1, NODES + 1), (),
    ]  # fmt: skip
    again = jax.tree.unflatten(structure, leaves)
    assert again.num_features == FEATURES and again.format_version == 1
    np.testing.assert_array_equal(jb.predict(again, ROWS), jb.predict(MODEL, ROWS))
    doubled = jax.tree.map(lambda a: 2 * a if a.dtype == jnp.float32 else a, MODEL)
    assert float(doubled.init_score) == 2 * float(MODEL.init_score)
    with pytest.raises(AttributeError):
        MODEL.num_features = 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_predict_lowers_for(platform):
    traced = jax.jit(jb.predict).trace(MODEL, ROWS)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text


def test_boost_lowers():
    codes, y = jb.apply_bins(BINS, ROWS[:64]), jnp.arange(64.0)

    def train(codes, y, key):
        return jb.boost(
            codes, y, jb.losses.squared_error, key, num_rounds=2, max_depth=2,
            max_bins=BINS.num_bins,
        )  # fmt: skip

    traced = jax.jit(train).trace(codes, y, jax.random.key(0))
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.while" in text


NO_ROWS = {
    "floats": np.asarray,
    "doubles": np.float64,
    "jax": jnp.asarray,
    "sparse": scipy.sparse.csr_matrix,
    "frame": lambda x: pd.DataFrame(np.asarray(x)),
}


@pytest.mark.parametrize("kind", [*NO_ROWS])
def test_no_rows_predict_to_empty_arrays(kind):
    """Of the shape and type that the first of no rows of a larger result has."""
    make, link = NO_ROWS[kind], lambda score: (score > 0, dict(mean=score))
    for model, tail in ((MODEL, ()), (jb.to_ensemble(make_trees(3), BINS), (3,))):
        for function, axis in (
            (jb.predict, 0),
            (jb.staged_predict, 1),
            (jb.leaf_indices, 0),
            (partial(jb.predict, inverse_link=link), 0),
            (partial(jb.predict, offset=np.zeros((0, *tail))), 0),
        ):
            offsets = "offset" in getattr(function, "keywords", {})
            expected = function(model, ROWS, **(dict(offset=None) if offsets else {}))
            empty = jax.tree.map(lambda a, axis=axis: np.take(a, [], axis), expected)
            found = function(model, make(ROWS[:0]))
            for one, other in zip(
                jax.tree.leaves(found), jax.tree.leaves(empty), strict=True
            ):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
    with pytest.raises(ValueError, match="x must have 3 columns"):
        jb.predict(MODEL, make(ROWS[:0, :2]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_links_may_return_pytrees(implementation):
    """Of arrays of any shape; rows that were added for padding are cut from each."""

    def link(score):
        return {"mean": score[0], "all": (score > 0, jnp.outer(score, score))}

    model = jb.to_ensemble(make_trees(3), BINS)
    stored = np.where(np.nan_to_num(ROWS) == 0, 1, ROWS)  # every entry
    for x, run in (
        (ROWS, partial(jb.predict, implementation=implementation)),
        (scipy.sparse.csr_matrix(stored), jb.predict),
    ):
        scores, found = np.asarray(run(model, x)), run(model, x, inverse_link=link)
        np.testing.assert_array_equal(found["mean"], scores[:, 0])
        np.testing.assert_array_equal(found["all"][0], scores > 0)
        outer = scores[:, :, None] * scores[:, None, :]
        np.testing.assert_array_equal(found["all"][1], outer)
    stages = jb.staged_predict(model, ROWS, inverse_link=link)
    assert stages["all"][1].shape == (ROUNDS, len(ROWS), 3, 3)
    with pytest.raises(TypeError, match=r"inverse_link .*array"):
        jb.partial_dependence(model, ROWS, 0, inverse_link=link)
    with pytest.raises(TypeError, match="None"):
        jb.predict(model, ROWS, inverse_link=lambda score: None)
