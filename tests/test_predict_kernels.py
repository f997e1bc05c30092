# SPDX-License-Identifier: Apache-2.0
"""The kernels of prediction equal plain XLA to the bit, wherever rows come from."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.kernels import calls
from jboost.kernels.prediction import borrow_rows

if not calls.available():
    pytest.skip("the kernels were not built", allow_module_level=True)

ISAS = calls.ISAS[: calls.ISAS.index(calls.best_isa()) + 1]
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


@pytest.fixture(params=ISAS)
def isa(request):
    before = calls.current_isa()
    calls.set_isa(request.param)
    yield request.param
    calls.set_isa(before)


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


def walk(model, x):
    """Leaves [N, R, K] and scores [R, N, K], one comparison after the other."""
    trees = [np.asarray(a) for a in jax.tree.leaves(model)]
    feature, threshold, missing_left, value, start = trees
    num_rounds, num_scores, num_nodes = feature.shape
    leaves = np.zeros((len(x), num_rounds, num_scores), int)
    steps = np.zeros((num_rounds, len(x), num_scores), np.float32)
    for row, r, k in np.ndindex(*leaves.shape):
        node = 0
        while node < num_nodes:
            number = x[row, feature[r, k, node]]
            number = np.float32(0) if abs(number) < TINY else number
            left = number <= threshold[r, k, node] or np.isnan(threshold[r, k, node])
            if np.isnan(number):
                left = missing_left[r, k, node]
            node = 2 * node + (1 if left else 2)
        leaves[row, r, k] = node - num_nodes
        steps[r:, row, k] += value[r, k, node - num_nodes]
    return leaves, start.reshape(-1) + steps


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


def assert_equals_xla(model, x):
    for operation in OPERATIONS:
        expected = operation(model, x, implementation="xla")
        assert_same_bits(operation(model, x, implementation="cpu"), expected)
        assert_same_bits(operation(model, x), expected)


# Against a naive walk, and against the definition.


@pytest.mark.parametrize("num_rows", [3, 200])
def test_a_naive_walk_takes_the_same_leaves(isa, num_rows):
    model, x = make_model(4, 3, 3, num_scores=2), make_rows(num_rows, 3)
    leaves, stages = walk(model, x)
    np.testing.assert_array_equal(jb.leaf_indices(model, x), leaves)
    np.testing.assert_array_equal(jb.staged_predict(model, x), stages)
    np.testing.assert_array_equal(jb.predict(model, x), stages[-1])


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
        (20000, 5, 3, 9, 2, 250),
        (600, 4, 17, 12, 1, 100),  # few rows for such trees
        (40, 28, 30, 6, 2, 254),
        (2000, 5, 60, 5, 1, 3000),  # more thresholds than codes: several runs
        (2000, 2, 9, 8, 1, 100_000),  # ... in a single tree
    ],
)
def test_equals_xla(
    isa, num_rows, num_features, num_rounds, max_depth, num_scores, distinct
):
    model = make_model(num_rounds, max_depth, num_features, num_scores, distinct)
    assert_equals_xla(model, make_rows(num_rows, num_features))


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_any_number_of_rows(isa, num_rows):
    assert_equals_xla(make_model(9, 3, 5), make_rows(num_rows, 5))


def test_no_rounds(isa):
    model = jb.truncate(make_model(3, 4, 5, num_scores=2), 0)
    for num_rows in (1, 1000):
        x = make_rows(num_rows, 5)
        expected = np.tile(np.asarray(model.init_score), (num_rows, 1))
        np.testing.assert_array_equal(jb.predict(model, x), expected)
        assert jb.staged_predict(model, x).shape == (0, num_rows, 2)
        assert jb.leaf_indices(model, x).shape == (num_rows, 0, 2)


@pytest.mark.parametrize("value", AWKWARD)
def test_columns_of_one_value(isa, value):
    assert_equals_xla(make_model(10, 4, 6), np.full((1000, 6), value, np.float32))


def test_trees_that_never_split(isa):
    model = make_model(3, 4, 5)
    threshold = jnp.full_like(model.threshold, jnp.inf)
    for missing_left in (True, False):
        sides = jnp.full_like(model.missing_left, missing_left)
        stumps = jb.Ensemble(
            model.feature, threshold, sides, model.leaf_value, model.init_score, 5
        )
        assert_equals_xla(stumps, make_rows(500, 5))


@pytest.mark.parametrize("count", [253, 254, 255])
def test_as_many_thresholds_as_bytes_hold(isa, count):
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


@pytest.mark.parametrize("offset", [0, 1, 7, 15])
@pytest.mark.parametrize("order", "CF")
def test_rows_begin_anywhere_in_a_line(offset, order, isa):
    model, rows = make_model(6, 4, 3), make_rows(LARGE // 3, 3)
    memory = np.empty(rows.size + 32, np.float32)
    start = -memory.ctypes.data % 64 // 4 + offset
    flat = memory[start : start + rows.size]
    x = flat.reshape(rows.shape) if order == "C" else flat.reshape(3, -1).T
    x[:] = rows
    borrowed = borrow_rows(x)
    np.testing.assert_array_equal(borrowed.matrix(), rows)
    for operation in OPERATIONS:
        expected = operation(model, rows, implementation="xla")
        assert_same_bits(operation(model, x), expected)


@pytest.mark.parametrize("order", "CF")
def test_large_memory_is_not_copied(order):
    x = np.asarray(make_rows(LARGE // 5, 5), order=order)
    borrowed = borrow_rows(x)
    assert np.shares_memory(borrowed.values, x)
    assert borrowed.values.ctypes.data == x.ctypes.data


def test_memory_may_be_written_to_afterwards():
    model, rows = make_model(100, 6, 5), make_rows(LARGE // 5, 5)
    expected = np.asarray(jb.predict(model, rows, implementation="xla"))
    for _ in range(10):
        x = rows.copy()
        scores = jb.predict(model, x)
        x[:] = 0
        assert_same_bits(scores, expected)


def test_a_program_does_not_keep_memory_of_the_callers():
    model, x = make_model(10, 4, 5), make_rows(LARGE // 5, 5)
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
def test_jit_vmap_and_scan(operation, isa):
    models = [make_model(5, 4, 6, num_scores=2, seed=seed) for seed in range(3)]
    pages = jnp.stack([make_rows(300, 6, seed) for seed in range(4)])

    def run(model, x):
        return operation(model, x, implementation="cpu")

    bare = [[run(model, page) for page in pages] for model in models]
    assert_same_bits(jax.jit(run)(models[0], pages[0]), bare[0][0])
    assert_same_bits(jax.vmap(run, (None, 0))(models[0], pages), jnp.stack(bare[0]))
    over_models = jax.vmap(run, (0, None))(stack(models), pages[0])
    assert_same_bits(over_models, jnp.stack([row[0] for row in bare]))
    both = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))(stack(models), pages)
    assert_same_bits(both, jnp.stack([jnp.stack(row) for row in bare]))
    _, scanned = jax.lax.scan(lambda _, x: (0, run(models[0], x)), 0, pages)
    assert_same_bits(scanned, jnp.stack(bare[0]))


def test_many_large_calls_in_one_program_end():
    model, x = make_model(20, 6, 8), jnp.asarray(make_rows(50_000, 8))

    @jax.jit
    def run(x):
        return [jb.predict(model, x + i, implementation="cpu") for i in range(12)]

    for i, scores in enumerate(run(x)):
        expected = jb.predict(model, x + i, implementation="xla")
        assert_same_bits(scores, expected)


def linear_in(model, x, offset, operation, implementation):
    def run(leaf_value, init_score, offset):
        changed = jb.Ensemble(
            model.feature, model.threshold, model.missing_left, leaf_value,
            init_score, model.num_features,
        )  # fmt: skip
        return operation(changed, x, offset=offset, implementation=implementation)

    return run, (model.leaf_value, model.init_score, jnp.asarray(offset))


@pytest.mark.parametrize("num_scores", [1, 2])
@pytest.mark.parametrize("operation", [jb.predict, jb.staged_predict])
def test_derivatives_equal_those_of_xla(operation, num_scores):
    model, x = make_model(5, 4, 6, num_scores), make_rows(300, 6)
    offset = np.zeros((300, num_scores) if num_scores > 1 else 300, np.float32)
    rng, results = np.random.default_rng(0), []
    change, weights = None, None
    for implementation in ("xla", "cpu", None):
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
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
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


def run_script(code, **environment):
    """Runs code that ends in printing bytes as hexadecimals."""
    before = """
import os, sys
sys.path[:0] = %r
if os.environ.get("ONE_CORE"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, numpy as np, jax.numpy as jnp, jboost as jb
from test_predict_kernels import make_model, make_rows
model, x = make_model(8, 5, 6), make_rows(80_000, 6)
"""
    done = subprocess.run(
        [sys.executable, "-c", before % (sys.path,) + code],
        env=os.environ | {"XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return np.frombuffer(bytes.fromhex(done.stdout.strip()), np.float32)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_one_thread_gives_the_same():
    code = "print(np.asarray(jb.predict(model, x)).tobytes().hex())"
    scores = jb.predict(make_model(8, 5, 6), make_rows(80_000, 6))
    assert_same_bits(run_script(code, ONE_CORE="1"), scores)


def test_two_devices():
    code = """
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)
P = jax.sharding.PartitionSpec
sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("rows")))
def run(x):
    return jb.predict(model, x, implementation="cpu")
mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("rows"), out_specs=P("rows")))
scores = np.asarray(mapped(sharded))
either = jax.shard_map(lambda x: jb.predict(model, x), mesh=mesh, in_specs=P("rows"),
                       out_specs=P("rows"))
np.testing.assert_array_equal(jax.jit(either)(sharded), scores)
np.testing.assert_array_equal(jb.predict(model, sharded), scores)
np.testing.assert_array_equal(jax.jit(jb.predict)(model, sharded), scores)
second = jax.device_put(x, jax.devices()[1])
np.testing.assert_array_equal(jax.jit(run)(second), scores)
print(scores.tobytes().hex())
"""
    scores = jb.predict(make_model(8, 5, 6), make_rows(80_000, 6))
    devices = "--xla_force_host_platform_device_count=2"
    assert_same_bits(run_script(code, XLA_FLAGS=devices), scores)


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
