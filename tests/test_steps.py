# SPDX-License-Identifier: Apache-2.0
"""The public steps of growing a tree, on what the functions before them return."""

import gc
import inspect
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import scipy.sparse
from implementations import needs_cpu_kernels

import jboost as jb
from jboost.boosting import settings
from jboost.codes import preparing
from jboost.objective import retracing

parts = jb.parts
N, F = 200, 3
RNG = np.random.default_rng(0)
X = RNG.integers(0, 12, (N, F)).astype(np.float32)
X[RNG.random((N, F)) < 0.1] = np.nan
BINS = jb.fit_bins(X, max_bins=16)
BINNED = jb.apply_bins(BINS, X)
CODES = parts.prepare_codes(BINNED, max_bins=16)
COLORS = jb.fit_bins(np.nan_to_num(X), max_bins=16, categorical=[1])
GRADIENT = (RNG.integers(-64, 64, N) + 40 * (X[:, 0] > 5)).astype(np.float32) / 64
CURVATURE = RNG.integers(1, 9, N).astype(np.float32) / 8
grow = partial(parts.grow_tree, max_bins=16, max_depth=3)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_histograms_are_sums_over_rows():
    node = RNG.integers(-1, 3, N)
    found = parts.build_histogram(
        BINNED, GRADIENT, CURVATURE, node=node, num_nodes=2, max_bins=16
    )
    channels = np.stack([64 * GRADIENT, 8 * CURVATURE, np.ones(N)], 1).astype(int)
    expected = references.histogram(np.asarray(BINNED).T, channels, node, 2, 16)
    np.testing.assert_array_equal(64 * found.gradients, expected[..., 0])
    np.testing.assert_array_equal(8 * found.curvatures, expected[..., 1])
    np.testing.assert_array_equal(found.counts, expected[..., 2])


def test_the_root_of_a_tree_is_the_best_split():
    histogram = parts.build_histogram(BINNED, GRADIENT, CURVATURE, max_bins=16)
    split = parts.find_split(histogram)
    tree, _ = grow(BINNED, GRADIENT, CURVATURE)
    for field in ("feature", "threshold", "missing_left"):
        assert getattr(split, field)[0] == getattr(tree, field)[0]
    without = np.arange(F) != split.feature[0]
    assert parts.find_split(histogram, features=without).gain[0] < split.gain[0]


def test_leaf_values_are_newton_steps():
    tree, leaf = grow(BINNED, GRADIENT, CURVATURE, l1=0.25, l2=2.0)
    assert len(np.unique(leaf)) > 4
    for number in np.unique(leaf):
        rows = np.asarray(leaf) == number
        g, h = GRADIENT[rows].sum(), CURVATURE[rows].sum()
        expected = -np.sign(g) * max(abs(g) - 0.25, 0) / (h + 2.0)
        np.testing.assert_allclose(tree.leaf_value[number], expected, rtol=1e-5)
    again = parts.fit_leaves(tree, leaf, GRADIENT, CURVATURE, l1=0.25, l2=2.0)
    assert_same(again, tree)
    np.testing.assert_array_equal(parts.find_leaves(tree, BINNED), leaf)
    values = parts.predict_tree(tree, BINNED)
    np.testing.assert_array_equal(values, tree.leaf_value[leaf])


@pytest.mark.parametrize(("implementation", "depth"), [("xla", 1), (None, 3)])
def test_a_step_is_a_tree_on_the_gradients(implementation, depth):
    y = jnp.asarray(GRADIENT)
    sizes = dict(max_depth=depth, max_bins=16, implementation=implementation)
    state = jb.init(BINNED, y, jb.losses.squared_error, jax.random.key(0))
    _, step = jb.boost_step(
        state, BINNED, y, jb.losses.squared_error, learning_rate=1.0,
        regularization="absolute", **sizes,
    )  # fmt: skip
    tree, leaf = parts.grow_tree(BINNED, 2 * (state.scores - y), 2.0, **sizes)
    assert_same(jax.tree.map(lambda a: a[0], step), tree)
    np.testing.assert_array_equal(
        parts.predict_tree(step, BINNED), tree.leaf_value[leaf]
    )
    model = jb.to_ensemble(parts.stack_trees([step, step], state.init_score), BINS)
    expected = state.init_score + 2 * tree.leaf_value[leaf]
    np.testing.assert_allclose(jb.predict(model, X), expected, atol=1e-6)


@pytest.mark.parametrize(
    "chosen",
    [
        {}, dict(monotone={0: 1}), dict(interactions=[[0], [1, 2]]),
        dict(max_leaves=4, max_delta_step=0.125), dict(min_child_samples=30),
        dict(colsample_bynode=0.5, key=jax.random.key(1)),
        dict(mask=np.arange(N) % 3 > 0),
    ],
)  # fmt: skip
def test_settings_hold_and_prepared_codes_give_the_same(chosen):
    tree, leaf = grow(BINNED, GRADIENT, CURVATURE, **chosen)
    assert_same(grow(CODES, GRADIENT, CURVATURE, **chosen), (tree, leaf))
    rows = chosen.get("mask", np.ones(N, bool))
    counts = np.bincount(np.asarray(leaf)[rows])
    if "max_leaves" in chosen:
        assert len(np.unique(leaf)) == 4
        assert np.abs(tree.leaf_value).max() <= 0.125
    if "min_child_samples" in chosen:
        assert counts[counts > 0].min() >= 30
    if "mask" in chosen:
        alone = grow(BINNED[rows], GRADIENT[rows], CURVATURE[rows])
        assert_same(alone[0].feature, tree.feature)
        assert_same(alone[1], leaf[rows])


def test_sparse_codes_and_categories_are_taken():
    full = scipy.sparse.csr_matrix(np.nan_to_num(X))
    sparse = jb.apply_bins(jb.fit_bins(full, max_bins=16, absent="zero"), full)
    dense = jb.apply_bins(jb.fit_bins(np.nan_to_num(X), max_bins=16), np.nan_to_num(X))
    found = [grow(codes, GRADIENT, CURVATURE) for codes in (sparse, dense)]
    assert_same(*found)
    assert parts.prepare_codes(sparse) is sparse
    values = [parts.predict_tree(found[0][0], codes) for codes in (sparse, dense)]
    np.testing.assert_array_equal(*values)
    whole = np.nan_to_num(X)
    bins = jb.fit_bins(whole, max_bins=16, categorical=[0])
    tree, leaf = grow(
        jb.apply_bins(bins, whole), GRADIENT, categories=bins.categories, max_onehot=16
    )
    assert tree.left_codes is not None and np.asarray(tree.left_codes).any()
    assert len(np.unique(leaf)) > 2


def test_jit_and_vmap_agree_with_bare_calls():
    bare = grow(CODES, GRADIENT, CURVATURE, l2=2.0)
    compiled = jax.jit(lambda codes, l2: grow(codes, GRADIENT, CURVATURE, l2=l2))
    assert_same(compiled(CODES, 2.0), bare)
    assert_same(compiled(BINNED, 2.0), bare)
    many = jax.vmap(lambda g: grow(CODES, g, CURVATURE, l2=2.0))(
        jnp.stack([GRADIENT, -GRADIENT])
    )
    assert_same(jax.tree.map(lambda a: a[0], many), bare)


@needs_cpu_kernels
def test_prepared_codes_are_packed_once():
    text = jax.jit(grow).lower(CODES, GRADIENT, CURVATURE).as_text()
    assert "jboost_grow" in text and "jboost_pack" not in text
    assert "jboost_pack" in jax.jit(grow).lower(BINNED, GRADIENT, CURVATURE).as_text()


def test_sorted_codes_for_candidates():
    y = jnp.asarray(GRADIENT)
    run = dict(max_depth=2, candidates="exact")
    state = jb.init(BINNED, y, jb.losses.squared_error, jax.random.key(0))
    codes = parts.prepare_codes(BINNED, max_bins=None)
    steps = [
        jb.boost_step(state, each, y, jb.losses.squared_error, **run)
        for each in (BINNED, codes)
    ]
    assert_same(*steps)


def test_defaults_are_those_of_training():
    """Except for what depends on a loss, and curvature, which is an array here.

    A function that grows one tree draws no thresholds unless asked to.
    """
    declared = settings.declared(settings.RoundSettings)
    found = inspect.signature(parts.grow_tree).parameters
    others = {"min_child_samples", "l2", "curvature", "rows_per_threshold"}
    shared = (found.keys() & declared.keys()) - others
    assert len(shared) >= 13
    for name in shared:
        assert found[name].default == declared[name].default, name


# boost_step traces a loss once.

FACTOR = 1.0


def make_losses():
    """Losses that read a number, each with a function that replaces the number."""
    factor, array = 1.0, jnp.float32(1.0)

    def change_closure():
        nonlocal factor, array
        factor, array = 4.0, jnp.float32(4.0)

    def change_global():
        globals()["FACTOR"] = 4.0

    def helper():
        return FACTOR

    loss = jb.losses.squared_error
    return {
        "closure": (lambda s, t: factor * loss(s, t), change_closure),
        "array": (lambda s, t: array * loss(s, t), change_closure),
        "global": (lambda s, t: FACTOR * loss(s, t), change_global),
        "helper": (lambda s, t: helper() * loss(s, t), change_global),
        "jit": (jax.jit(lambda s, t: factor * loss(s, t)).__wrapped__, change_closure),
    }


@pytest.mark.parametrize("reads", make_losses())
def test_a_loss_is_traced_once_unless_what_it_reads_changes(reads, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    traces = []
    trace = retracing.trace_loss

    def count(*arguments):
        traces.append(1)
        return trace(*arguments)

    monkeypatch.setattr(retracing, "trace_loss", count)
    targets = jax.ShapeDtypeStruct((N,), jnp.float32)
    loss, change = make_losses()[reads]
    point = (jnp.float32(2), jnp.float32(0), ())

    def evaluate():
        traced, constants = retracing.trace_loss_once(loss, targets)
        return float(traced.value(constants, *point))

    first = [evaluate(), evaluate()]
    assert first[0] == first[1] and len(traces) == 1
    change()
    assert evaluate() == 4 * first[0] and len(traces) == 2


def test_a_loss_that_reads_what_may_change_in_place_is_traced_each_time():
    factor = np.ones(1, np.float32)

    def loss(score, target):
        return factor[0] * jnp.square(score - target)

    targets = jax.ShapeDtypeStruct((N,), jnp.float32)
    values = []
    for _ in range(2):
        traced, constants = retracing.trace_loss_once(loss, targets)
        values.append(
            float(traced.value(constants, jnp.float32(1), jnp.float32(0), ()))
        )
        factor *= 4
    assert values == [1.0, 4.0]


def test_a_remembered_loss_is_not_kept_alive(young_heap):
    def loss(score, target):
        return jnp.square(score - target)

    retracing.trace_loss_once(loss, jax.ShapeDtypeStruct((N,), jnp.float32))
    reference = weakref.ref(loss)
    del loss
    gc.collect()
    assert reference() is None


def test_steps_recall_codes_and_loss(monkeypatch):
    def refuse(*_):
        raise AssertionError("was traced or arranged again")

    loss, y = jb.losses.squared_error, jnp.asarray(GRADIENT)
    state = jb.init(BINNED, y, loss, jax.random.key(0))
    step = partial(jb.boost_step, binned=BINNED, y=y, loss=loss, max_depth=2)
    state, _ = step(state)
    monkeypatch.setattr(retracing, "trace_loss", refuse)
    monkeypatch.setattr(preparing, "_arrange", refuse)
    step(state)


# Bad arguments.

bare = inspect.unwrap  # the shapes are checked here, not by beartype
unchecked = partial(bare(parts.grow_tree), max_bins=16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grow(X, GRADIENT), ValueError, "binned must be .* codes"),
        (lambda: unchecked(BINNED, GRADIENT[1:]), ValueError, "gradient .*200.*199"),
        (lambda: unchecked(BINNED, GRADIENT, X[1:, 0]), ValueError, "curvature .*199"),
        (lambda: grow(BINNED, GRADIENT, -1.0), ValueError, "curvature .*-1"),
        (lambda: grow(BINNED, GRADIENT, max_depth=0), ValueError, "max_depth .* 0"),
        (lambda: grow(BINNED, GRADIENT, l2=-1.0), ValueError, "l2 .*-1"),
        (lambda: unchecked(BINNED, GRADIENT, mask=X[0] > 0), ValueError, "mask .*3"),
        (lambda: grow(CODES, GRADIENT, max_bins=8), ValueError, "max_bins=8.*=16"),
        (lambda: grow(BINNED, GRADIENT, max_bins=8), ValueError, "max_bins=8"),
        (lambda: bare(parts.find_split)(np.ones(3)), TypeError, "histogram .* ndarray"),
        (lambda: bare(parts.predict_tree)(3, BINNED), TypeError, "tree .* int"),
        (lambda: parts.stack_trees([]), ValueError, "trees"),
        (lambda: unchecked(BINNED, GRADIENT, categories=3), TypeError, "categories"),
        (
            lambda: grow(BINNED[:, :1], GRADIENT, categories=COLORS.categories),
            ValueError, r"categories .*\(1,\)",
        ),
        (
            lambda: grow(
                BINNED, GRADIENT, categories=COLORS.categories, monotone=[0, 1, 0]
            ),
            ValueError, r"monotone .*\(1,\)",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
