# SPDX-License-Identifier: Apache-2.0
"""The kernels of prediction equal plain XLA to the bit, wherever rows come from."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import each_isa

import jboost as jb
from jboost.kernels import calls
from jboost.kernels.prediction import borrow_rows

if not calls.available():
    pytest.skip("the kernels were not built", allow_module_level=True)

# Whether the call is made at once or later.
REFUSALS = ValueError, jax.errors.JaxRuntimeError
OPERATIONS = (jb.predict, jb.staged_predict, jb.leaf_indices)
TINY = np.finfo(np.float32).tiny
DENORMAL = np.float32(1e-42)
AWKWARD = np.float32(
    [0.0, -0.0, DENORMAL, -DENORMAL, TINY, -TINY, np.nextafter(TINY, np.float32(1)),
     1.5, -3, np.finfo(np.float32).max, np.inf, -np.inf, np.nan]
)  # fmt: skip
LARGE = 2**18 + 5000  # cells of x: more than are copied


def make_model(num_rounds, max_depth, num_features, num_scores=1, distinct=200, seed=0):
    """Random trees; some nodes are not split, some compare with awkward numbers."""
    generator = np.random.default_rng(seed)
    shape = (num_rounds, num_scores, 2**max_depth - 1)
    pool = generator.normal(size=(num_features, distinct)).astype(np.float32)
    feature = generator.integers(0, num_features, shape, np.int32)
    threshold = pool[feature, generator.integers(0, distinct, shape)]
    odd = generator.random(shape) < 0.1
    threshold = np.where(odd, generator.choice(AWKWARD, shape), threshold)
    missing_left = generator.random(shape) < 0.5
    unsplit = generator.random(shape) < 0.1
    values = generator.normal(size=(num_rounds, num_scores, 2**max_depth))
    start = generator.normal(size=num_scores).astype(np.float32)
    return jax.device_put(
        jb.Ensemble(
            feature=np.where(unsplit, 0, feature),
            threshold=np.where(unsplit, np.float32(np.inf), threshold),
            missing_left=unsplit | missing_left,
            leaf_value=values.astype(np.float32),
            init_score=start if num_scores > 1 else start[0],
            num_features=num_features,
        )
    )


def make_rows(num_rows, num_features, seed=1):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_rows, num_features)).astype(np.float32)
    odd = generator.random(x.shape) < 0.3
    return np.where(odd, generator.choice(AWKWARD, x.shape), x)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


def encode(model, x):
    """Codes value by value; no denormals."""
    x = np.where(np.abs(x) < TINY, np.float32(0), x)
    if model.categories is None:
        return x
    for codes, feature in zip(
        model.categories.codes, model.categories.features, strict=True
    ):
        column = x[:, feature].copy()
        x[:, feature] = np.nan
        for value, code in enumerate(codes):
            x[(column == value) & (code > 0), feature] = code
    return x


def walk(model, x):
    """Leaves [N, R, K] and scores [R, N, K], one step of all rows after the other.

    Without the axis K where there is one score.
    """
    model = jax.device_get(model)
    x, rows = encode(model, x), np.arange(len(x))
    tiny = np.abs(model.threshold) < TINY
    model = replace(model, threshold=np.where(tiny, 0, model.threshold))
    num_rounds, num_scores, num_inner = model.feature.shape
    leaves = np.zeros((len(x), num_rounds, num_scores), int)
    steps = np.zeros((num_rounds, len(x), num_scores), np.float32)
    for r, k in np.ndindex(num_rounds, num_scores):
        node = np.zeros(len(x), int)
        for _ in range(model.max_depth):
            number, threshold = (
                x[rows, model.feature[r, k, node]],
                model.threshold[r, k, node],
            )
            left = ~(number > threshold)
            if model.left_codes is not None:
                code = np.where(np.isfinite(number), number, 0).clip(-1, 2**30)
                code = code.astype(int)
                words = model.left_codes[r, k, node]
                inside = (code >= 0) & (code < 32 * words.shape[1])
                word = words[rows, np.where(inside, code, 0) // 32]
                in_set = inside & (word >> (code % 32).astype(np.uint32) & 1 == 1)
                left = np.where(np.isnan(threshold), in_set, left)
            left = np.where(np.isnan(number), model.missing_left[r, k, node], left)
            if model.links is None:
                node = 2 * node + np.where(left, 1, 2)
            else:
                node = model.links.left_child[r, k, node] + ~left
        leaves[:, r, k] = node - num_inner if model.links is None else node
        steps[r:, :, k] += model.leaf_value[r, k, leaves[:, r, k]]
    scores = model.init_score.reshape(-1) + steps
    one = model.init_score.ndim == 0
    return (leaves[..., 0], scores[..., 0]) if one else (leaves, scores)


def assert_walks(model, x, implementation):
    leaves, scores = walk(model, x)
    run = dict(implementation=implementation)
    for _ in [None] if implementation == "xla" else each_isa():
        np.testing.assert_array_equal(jb.leaf_indices(model, x, **run), leaves)
        assert_same_bits(jb.staged_predict(model, x, **run), scores)
        assert_same_bits(jb.predict(model, x, **run), scores[-1])


# Against a naive walk, which also plain XLA takes.


@pytest.mark.parametrize(
    "num_rows, num_features, num_rounds, max_depth, num_scores, distinct",
    [
        (1, 1, 1, 1, 1, 3),
        (1000, 1, 3, 1, 1, 40),
        (1000, 17, 20, 2, 3, 250),
        (513, 33, 6, 3, 1, 250),
        (700, 200, 6, 4, 1, 100),  # planes of 64 rows
        (1001, 28, 7, 5, 1, 200),
        (4097, 28, 20, 6, 1, 250),
        (5000, 28, 4, 7, 1, 250),  # levels below the vectors
        (6000, 5, 3, 9, 2, 250),
        (600, 4, 17, 12, 1, 100),  # few rows for such trees
        (40, 28, 30, 6, 2, 254),
        (2000, 5, 60, 5, 1, 3000),  # more thresholds than codes: several runs
        (2000, 2, 9, 8, 1, 100_000),  # ... in a single tree
    ],
)
def test_leaves_and_scores_are_those_of_a_walk(
    num_rows, num_features, num_rounds, max_depth, num_scores, distinct
):
    model = make_model(num_rounds, max_depth, num_features, num_scores, distinct)
    x = make_rows(num_rows, num_features)
    assert_walks(model, x, "cpu")
    if num_rows in (1, 700, 1000, 4097):
        assert_walks(model, x, "xla")


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_any_number_of_rows(num_rows):
    assert_walks(make_model(9, 3, 5), make_rows(num_rows, 5), None)


def test_no_rounds():
    model = jb.truncate(make_model(3, 4, 5, num_scores=2), 0)
    for num_rows in (1, 1000):
        x = make_rows(num_rows, 5)
        expected = np.tile(np.asarray(model.init_score), (num_rows, 1))
        np.testing.assert_array_equal(jb.predict(model, x), expected)
        assert jb.staged_predict(model, x).shape == (0, num_rows, 2)
        assert jb.leaf_indices(model, x).shape == (num_rows, 0, 2)


@pytest.mark.parametrize("value", AWKWARD)
def test_columns_of_one_value(value):
    assert_walks(make_model(10, 4, 6), np.full((1000, 6), value, np.float32), None)


def test_trees_that_never_split():
    model = make_model(3, 4, 5)
    threshold = jnp.full_like(model.threshold, jnp.inf)
    for missing_left in (True, False):
        sides = jnp.full_like(model.missing_left, missing_left)
        stumps = jb.Ensemble(
            model.feature, threshold, sides, model.leaf_value, model.init_score, 5
        )
        assert_walks(stumps, make_rows(500, 5), None)


@pytest.mark.parametrize("count", [253, 254, 255])
def test_as_many_thresholds_as_bytes_hold(count):
    """One comparison a round: all codes there are, and one too many."""
    thresholds = np.arange(count, dtype=np.float32)[:, None, None]
    model = jax.device_put(
        jb.Ensemble(
            feature=np.zeros((count, 1, 1), np.int32),
            threshold=thresholds,
            missing_left=np.arange(count)[:, None, None] % 2 == 0,
            leaf_value=np.tile(np.float32([0, 1]), (count, 1, 1)),
            init_score=np.float32(0),
            num_features=1,
        )
    )
    x = np.arange(-1, count + 1, 0.5, dtype=np.float32)[:, None]
    above = (x > thresholds[:, 0, 0]).sum(1)
    for _ in each_isa():
        np.testing.assert_array_equal(jb.predict(model, x), above)
        missing = jb.predict(model, np.full((100, 1), np.nan))
        np.testing.assert_array_equal(missing, np.full(100, count // 2))


# Where rows come from.


@pytest.mark.parametrize("num_rows", [37, LARGE // 7])
def test_memory_of_any_kind(num_rows):
    model, x = make_model(6, 4, 7), make_rows(num_rows, 7)
    frozen, gaps = x.copy(), np.zeros((num_rows, 20), np.float32)
    frozen.flags.writeable = False
    gaps[:, 3:17:2] = x
    unaligned = np.frombuffer(b"?" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    kinds = [
        x, np.asfortranarray(x), frozen, gaps[:, 3:17:2], gaps.T[3:17:2].T, unaligned,
        x[::-1].copy()[::-1], x.astype(np.float64), jnp.asarray(x), x.astype(">f4"),
        np.asfortranarray(x.astype(np.float64)),
    ]  # fmt: skip
    for operation in OPERATIONS:
        expected = operation(model, x, implementation="xla")
        for kind in kinds:
            assert_same_bits(operation(model, kind), expected)


def test_integers_and_booleans():
    model = make_model(6, 4, 7)
    for dtype in (np.int8, np.int64, bool):
        x = make_rows(100, 7)
        x = np.where(np.isfinite(x), x, 0).astype(np.float64).clip(-9, 9).astype(dtype)
        expected = jb.predict(model, x.astype(np.float32), implementation="xla")
        assert_same_bits(jb.predict(model, x), expected)


def test_rows_begin_anywhere_in_a_line():
    model, rows = make_model(6, 4, 3), make_rows(LARGE // 3, 3)
    memory = np.empty(rows.size + 32, np.float32)
    expected = [
        operation(model, rows, implementation="xla") for operation in OPERATIONS
    ]
    for order, offset in (("C", 0), ("C", 1), ("C", 7), ("F", 1), ("F", 15)):
        start = -memory.ctypes.data % 64 // 4 + offset
        flat = memory[start : start + rows.size]
        x = flat.reshape(rows.shape) if order == "C" else flat.reshape(3, -1).T
        x[:] = rows
        borrowed = borrow_rows(x)
        np.testing.assert_array_equal(borrowed.matrix(), rows)
        for operation, scores in zip(OPERATIONS, expected, strict=True):
            for _ in each_isa():
                assert_same_bits(operation(model, x), scores)


@pytest.mark.parametrize("order", "CF")
def test_large_memory_is_not_copied(order):
    x = np.asarray(make_rows(LARGE // 5, 5), order=order)
    borrowed = borrow_rows(x)
    assert np.shares_memory(borrowed.values, x)
    assert borrowed.values.ctypes.data == x.ctypes.data


def test_memory_may_be_written_to_afterwards():
    model, rows = make_model(10, 6, 5), make_rows(LARGE // 5, 5)
    expected = np.asarray(jb.predict(model, rows, implementation="xla"))
    for _ in range(10):
        x = rows.copy()
        scores = jb.predict(model, x)
        x[:] = 0
        assert_same_bits(scores, expected)


def test_a_program_does_not_keep_memory_of_the_callers():
    model, x = make_model(10, 6, 5), make_rows(LARGE // 5, 5)
    expected = np.asarray(jb.predict(model, x, implementation="xla"))
    program = jax.jit(lambda: jb.predict(model, x)).lower().compile()
    x[:] = 0
    assert_same_bits(program(), expected)


@pytest.mark.parametrize("num_rows", [50, LARGE // 4])
def test_offsets(num_rows):
    model, x = make_model(5, 3, 4, num_scores=2), make_rows(num_rows, 4)
    offset = np.random.default_rng(2).normal(size=(num_rows, 2)).astype(np.float32)
    for operation in (jb.predict, jb.staged_predict):
        expected = operation(model, x, offset=offset, implementation="xla")
        assert_same_bits(operation(model, x, offset=offset), expected)
        assert_same_bits(operation(model, x, offset=jnp.asarray(offset)), expected)


# Under transformations.


def stack(models):
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *models)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_jit_vmap_and_scan(operation):
    models = [make_model(5, 4, 6, num_scores=2, seed=seed) for seed in range(3)]
    pages = jnp.stack([make_rows(300, 6, seed) for seed in range(4)])

    def run(model, x):
        return operation(model, x, implementation="cpu")

    bare = [jnp.stack([run(model, page) for page in pages]) for model in models]
    over_models = jax.vmap(run, (0, None))
    both = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))
    scan = jax.jit(
        lambda pages: jax.lax.scan(lambda _, x: (0, run(models[0], x)), 0, pages)
    )
    for _ in each_isa():
        found = over_models(stack(models), pages[0])
        assert_same_bits(found, jnp.stack([row[0] for row in bare]))
        assert_same_bits(both(stack(models), pages), jnp.stack(bare))
        assert_same_bits(scan(pages)[1], bare[0])


def test_many_large_calls_in_one_program_end():
    model, x = make_model(6, 4, 7), jnp.asarray(make_rows(50_000, 7))

    @jax.jit
    def run(x):
        return [jb.predict(model, x + i, implementation="cpu") for i in range(6)]

    for i, scores in enumerate(run(x)):
        assert_same_bits(scores, jb.predict(model, x + i, implementation="xla"))


def linear_in(model, x, offset, operation, implementation):
    def run(leaf_value, init_score, offset):
        changed = jb.Ensemble(
            model.feature, model.threshold, model.missing_left, leaf_value,
            init_score, model.num_features,
        )  # fmt: skip
        return operation(changed, x, offset=offset, implementation=implementation)

    return run, (model.leaf_value, model.init_score, jnp.asarray(offset))


@pytest.mark.parametrize(
    ("operation", "num_scores"), [(jb.predict, 1), (jb.staged_predict, 2)]
)
def test_derivatives_equal_those_of_xla(operation, num_scores):
    model, x = make_model(5, 4, 6, num_scores), make_rows(300, 6)
    offset = np.zeros((300, num_scores) if num_scores > 1 else 300, np.float32)
    rng, results = np.random.default_rng(0), []
    change, weights = None, None
    for implementation in ("xla", "cpu"):
        run, at = linear_in(model, x, offset, operation, implementation)
        if change is None:
            arrays = (*at, jax.eval_shape(run, *at))
            drawn = [rng.normal(size=a.shape).astype(np.float32) for a in arrays]
            *change, weights = drawn

        @jax.jit
        def derive(at, change, weights, run=run):
            scores, forward = jax.jvp(run, at, change)
            _, transpose = jax.vjp(run, *at)
            return scores, forward, *transpose(weights)

        results.append(derive(at, tuple(change), weights))
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def test_derivatives_under_vmap_and_of_second_order():
    model, x = make_model(4, 3, 5), make_rows(200, 5)
    run, at = linear_in(model, x, np.zeros(200, np.float32), jb.predict, "cpu")

    def loss(*arrays):
        return jnp.sum(run(*arrays) ** 2) / 2

    # The second derivative of (M v)^2 / 2 is M^T M: M itself adds none.
    matrix = leaf_matrix(model, x)
    counts = matrix.T @ matrix
    hessian = jax.jit(jax.hessian(loss))(*at).reshape(counts.shape)
    np.testing.assert_array_equal(hessian, counts)
    many = jnp.stack([at[0], 2 * at[0]])
    slope = jax.grad(loss)
    gradients = jax.jit(jax.vmap(slope, (0, None, None)))(many, *at[1:])
    np.testing.assert_array_equal(gradients[1], jax.jit(slope)(many[1], *at[1:]))


def leaf_matrix(model, x):
    """M [N, leaves] such that the score is M v: 1 at each leaf a row is in."""
    leaves = jb.leaf_indices(model, x, implementation="xla")
    width = model.leaf_value.shape[2]
    return np.eye(width, dtype=np.float32)[np.asarray(leaves)].reshape(len(x), -1)


def test_the_derivative_in_x_is_zero():
    model, x = make_model(4, 3, 5), jnp.asarray(make_rows(200, 5))
    gradient = jax.grad(lambda x: jnp.sum(jb.predict(model, x)))(x)
    np.testing.assert_array_equal(gradient, np.zeros_like(x))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_are_lowered_without_kernels(operation, platform):
    traced = jax.jit(operation).trace(make_model(3, 3, 4), make_rows(50, 4))
    elsewhere = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in elsewhere and "jboost" not in elsewhere
    here = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "jboost" in here and "stablehlo.while" not in here


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_one_thread_gives_the_same():
    code = f"""
import os, sys
sys.path[:0] = {sys.path}
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import numpy as np, jboost as jb
from test_predict_kernels import make_model, make_rows
scores = jb.predict(make_model(8, 5, 6), make_rows(80_000, 6))
sys.stdout.buffer.write(np.asarray(scores).tobytes())
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=-1, check=True)
    scores = jb.predict(make_model(8, 5, 6), make_rows(80_000, 6))
    assert done.stdout == np.asarray(scores).tobytes()


def test_two_devices():
    model, x = make_model(8, 5, 6), make_rows(3000, 6)
    scores = jb.predict(model, x)
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:2],
    )  # fmt: skip
    rows = jax.sharding.PartitionSpec("rows")
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, rows))
    for implementation in ("cpu", None):
        run = partial(jb.predict, model, implementation=implementation)
        shards = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)
        assert_same_bits(jax.jit(shards)(sharded), scores)
    assert_same_bits(jb.predict(model, sharded), scores)
    assert_same_bits(jax.jit(jb.predict)(model, sharded), scores)
    second = jax.device_put(x, jax.devices()[1])
    assert_same_bits(jax.jit(jb.predict)(model, second), scores)


# What is refused.


def test_features_beyond_the_columns_are_refused():
    model, x = make_model(3, 3, 4), make_rows(50, 4)
    for feature in (4, -1, 2**30):
        bad = jb.Ensemble(
            model.feature.at[1, 0, 2].set(feature), model.threshold,
            model.missing_left, model.leaf_value, model.init_score, 4,
        )  # fmt: skip
        with pytest.raises(REFUSALS, match="features beyond"):
            jb.predict(bad, x).block_until_ready()


def call(how, **changes):
    """The kernel on shapes that fit but for the changes."""
    shapes = dict(
        x=(20,), codes=(0, 0), coded_features=(0,), feature=(2, 1, 3),
        threshold=(2, 1, 3), missing_left=(2, 1, 3), left_codes=(0,), left_child=(0,),
        leaf_value=(2, 1, 4), init_score=(1,), scores=(5, 1),
    )  # fmt: skip
    shapes.update(changes)
    dtypes = dict(
        feature=jnp.int32, missing_left=jnp.bool_, codes=jnp.int32,
        coded_features=jnp.int32, left_codes=jnp.uint32, left_child=jnp.int32,
    )  # fmt: skip
    *operands, scores = [
        jnp.zeros(shape, dtypes.get(name, jnp.float32))
        for name, shape in shapes.items()
    ]
    result = jax.ShapeDtypeStruct(scores.shape, jnp.float32)
    attributes = dict(num_features=4, by_column=0, max_depth=2)
    return np.asarray(how("predict", result, *operands, **attributes))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("x", (21,)), ("x", (5, 4)), ("feature", (2, 1, 7)),
        ("feature", (1, 2, 1, 3)), ("threshold", (2, 3)), ("missing_left", (1, 1, 3)),
        ("leaf_value", (2, 1, 3)), ("init_score", (2,)), ("init_score", ()),
        ("leaf_value", (2, 0, 4)), ("leaf_value", (2, 2, 4)),
        ("scores", (5, 2)), ("scores", (6, 1)), ("scores", (5,)),
        ("codes", (1, 4)), ("coded_features", (1,)), ("left_codes", (2, 1, 3)),
        ("left_codes", (2, 1, 3, 0)), ("left_codes", (2, 1, 4, 1)),
        ("left_child", (2, 1, 3)), ("left_child", (2, 3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", [calls.call, calls.call_on_host])
def test_shapes_that_do_not_fit_are_refused(name, shape, how):
    assert call(how).shape == (5, 1)
    with pytest.raises(REFUSALS, match="jboost kernel"):
        call(how, **{name: shape})


@pytest.mark.parametrize("how", [calls.call, calls.call_on_host])
def test_rounds_have_one_tree_or_one_for_each_score(how):
    sizes = dict(leaf_value=(2, 3, 4), init_score=(3,), scores=(5, 3))
    assert call(how, **sizes).shape == (5, 3)
    trees = dict.fromkeys(["feature", "threshold", "missing_left"], (2, 2, 3))
    with pytest.raises(REFUSALS, match="one tree"):
        call(how, **sizes, **trees)
    with pytest.raises(REFUSALS, match="have trees"):
        call(how, **dict.fromkeys(trees, (2, 0, 3)))


def test_unknown_implementations_are_refused():
    model, x = make_model(3, 3, 4), make_rows(50, 4)
    for operation in OPERATIONS:
        with pytest.raises(ValueError, match="implementation"):
            operation(model, x, implementation="gpu")
