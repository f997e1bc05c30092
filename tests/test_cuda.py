# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels, on a GPU or on threads of the host, through the whole package.

Without a GPU a library stands in for the driver and the compiler. Results must have the
bits of plain XLA, and the sums those of NumPy.
"""

import os
import shutil
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from cuda_driver import COMPILER, build, build_driver, make_table, select_driver
from tables import same_bits, squared_distance
from test_leaf_kernels import middle_by_sorting
from test_predict_categories import add_sets, add_values, link
from test_predict_kernels import make_model, make_rows
from test_small_predictions import share_trees

import jboost as jb
from jboost.codes.binning import bin_columns
from jboost.entry.context import use_implementation
from jboost.kernels import (
    binning_cpu,
    calls,
    cuda_compiler,
    cuda_launch,
    levels_cuda,
    library,
)
from jboost.numerics.exact import sum_channels, sum_rows
from jboost.trees.leaf_operations import middle_minimizers

ON_GPU = jax.default_backend() == "gpu"
pytestmark = pytest.mark.skipif(
    not calls.available() or (not ON_GPU and shutil.which(COMPILER) is None),
    reason="needs a C++ compiler",
)
stand_in = pytest.mark.skipif(ON_GPU, reason="needs the library that stands in")
X, Y = make_table()


@pytest.fixture(scope="module", autouse=True)
def driver(tmp_path_factory):
    """The library that stands in for CUDA, in use by this process without a GPU."""
    if ON_GPU:
        yield
        return
    cache = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    built = build_driver(tmp_path_factory.mktemp("driver"))
    select_driver(built)
    yield
    if cache is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = cache


def draw_rows(num_rows, num_features, num_bins, num_nodes, channels):
    random = np.random.default_rng(num_rows)
    dtype = np.uint8 if num_bins <= 256 else np.uint16
    columns = random.integers(0, num_bins, (num_features, num_rows)).astype(dtype)
    values = random.integers(-(2**20), 2**20, (num_rows, channels)).astype(np.int32)
    node = random.integers(-1, num_nodes + 1, num_rows).astype(np.int32)
    return columns, values, node


SHAPE = ("num_rows", "num_features", "num_bins", "num_nodes", "channels")


def check_sums(run, columns, values, node, *sizes):
    """Compares sums with those of NumPy; none are taken where they are switched off."""
    program = jax.jit(run)
    expected = references.histogram(columns, values, node, *sizes)
    np.testing.assert_array_equal(program(values, node, True), expected)
    assert not np.asarray(program(values, node, False)).any()


@pytest.mark.parametrize(
    SHAPE,
    [
        (1001, 5, 256, 3, 2),
        (4099, 3, 17, 1, 3),
        (200, 2, 700, 4, 2),
        (177, 40, 256, 40, 3),  # several groups of features and ranges of nodes
        (200, 2, 256, 900, 2),  # no table in shared memory
        (100, 2, 40_000, 3, 2),
        (1, 1, 2, 1, 2),
    ],
)
def test_histograms(num_rows, num_features, num_bins, num_nodes, channels):
    rows = draw_rows(num_rows, num_features, num_bins, num_nodes, channels)
    sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
    run = partial(levels_cuda.histogram, jnp.asarray(rows[0]), **sizes)
    check_sums(run, *rows, num_nodes, num_bins)


@pytest.mark.parametrize(
    SHAPE,
    [
        (1001, 5, 256, 3, 2),
        (4099, 14, 17, 1, 3),
        (9000, 28, 100, 2, 2),  # several blocks of rows
        (177, 40, 256, 40, 3),  # three blocks of codes: one group is not full
        (201, 70, 16, 5, 2),
        (200, 2, 256, 900, 2),
        (1, 1, 2, 1, 2),
        (4097, 9, 33, 7, 3),
    ],
)
def test_histograms_of_packed_codes(
    num_rows, num_features, num_bins, num_nodes, channels
):
    rows = draw_rows(num_rows, num_features, num_bins, num_nodes, channels)
    packed = levels_cuda.pack(jnp.asarray(rows[0]), num_bins)
    sizes = dict(num_features=num_features, num_nodes=num_nodes, num_bins=num_bins)
    run = partial(levels_cuda.packed_histogram, packed, **sizes)
    check_sums(run, *rows, num_nodes, num_bins)
    if num_features in (5, 14):  # with a list of the rows of each node, and without
        batch = jax.jit(jax.vmap(run, (0, None)))(
            np.stack([0 * rows[1], -rows[1]]), rows[2]
        )
        expected = references.histogram(*rows, num_nodes, num_bins)
        np.testing.assert_array_equal(batch, [0 * expected, -expected])


def test_fit_packs_codes_for_the_kernels():
    bins = jb.fit_bins(X)
    with use_implementation("cuda"):
        found = bin_columns(bins, X, 256)
    expected = levels_cuda.pack(found.columns, 256)
    np.testing.assert_array_equal(found.packed, expected)


@stand_in
@pytest.mark.parametrize("num_features", [1, 9, 33, 70])
def test_codes_are_packed_as_for_the_cpu(num_features):
    columns, *_ = draw_rows(51, num_features, 256, 1, 1)
    for num_bins in (100, 1000):
        expected = binning_cpu.pack(jnp.asarray(columns), num_bins)
        found = levels_cuda.pack(jnp.asarray(columns), num_bins)
        np.testing.assert_array_equal(found, expected)


def test_codes_of_two_bytes_are_not_packed():
    with use_implementation("cuda"):
        codes = jb.parts.prepare_codes(np.zeros((9, 2), np.uint16), max_bins=1000)
    assert codes.packed is None


@pytest.mark.parametrize(
    ("num_keys", "channels"), [(1, 1), (64, 2), (500, 3), (9000, 2)]
)
def test_sums_by_key(num_keys, channels):
    random = np.random.default_rng(0)
    values = random.integers(-(2**20), 2**20, (3001, channels)).astype(np.int32)
    keys = random.integers(-1, num_keys + 1, 3001).astype(np.int32)
    expected = np.zeros((num_keys, channels), np.int32)
    kept = (keys >= 0) & (keys < num_keys)
    np.add.at(expected, keys[kept], values[kept])
    found = cuda_launch.sum_keys(jnp.asarray(values), jnp.asarray(keys), num_keys)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("num_groups", "weighting"),
    [(1, "whole"), (64, None), (9000, "broken")],
)
def test_sums_of_floats(num_groups, weighting):
    random = np.random.default_rng(0)
    values = (random.normal(size=(2, 3001)) ** 7).astype(np.float32)
    values[0, :3] = np.inf, np.nan, -np.inf
    group = random.integers(-1, num_groups + 1, 3001).astype(np.int32)
    weights = None
    if weighting is not None:
        weights = random.integers(0, 300, 3001).astype(np.float32)
        weights += np.float32(0.3) * (weighting == "broken")
        weights[:2] = 0  # rows of weight 0 may hold anything

    def run(values, group, weights):
        channels = sum_channels(tuple(values), group, num_groups, weights)
        return sum_rows(values, weights), channels

    found = []
    for implementation in ("xla", "cuda"):
        with use_implementation(implementation):
            program = jax.jit(lambda *rows: run(*rows))  # traced for each
            found.append(program(values, group, weights))
    for plain, kernel in zip(*found, strict=True):
        np.testing.assert_array_equal(kernel, plain)
    times = np.ones(3001) if weights is None else weights.astype(np.float64)
    exact = values[1].astype(np.float64) @ times
    np.testing.assert_allclose(found[1][0][1], exact, rtol=1e-6)


@pytest.mark.parametrize("num_groups", [3, 64, 1500])
def test_order_statistics(num_groups):
    """Tables in shared memory, in that of the device, and with digits of four bits.

    Slopes of each row meet those of all, also in a batch.
    """
    random = np.random.default_rng(0)
    key, scores = random.normal(size=(2, 3, 3001)).astype(np.float32).round(1)
    key[:, :4], scores[:, :4] = [np.nan, np.inf, -np.inf, -0.0], 0
    weights = jnp.asarray(random.choice(np.float32([0, 0.5, 1, 2.7]), 3001))
    slopes = jnp.asarray(random.choice(np.float32([0.5, 1]), 3001))
    group = jnp.asarray(random.integers(-1, num_groups + 1, 3001), jnp.int32)
    scale = jnp.float32(2.0**25)

    def run(key, scores):
        return [
            middle_minimizers(key, scores, weights, kinks, scale, group, num_groups)
            for kinks in ((slopes, 2 * slopes), (jnp.float32(0.3), jnp.float32(1)))
        ]

    found = []
    for implementation in (REFERENCE, "cuda"):
        with use_implementation(implementation):
            program = jax.jit(lambda *rows: jax.vmap(run)(*rows))  # traced for each
            found.append(program(key, scores))
    np.testing.assert_array_equal(*found)
    rows = np.asarray((group == 1) & (weights > 0) & ~np.isnan(key[0]))
    left = np.asarray(weights * slopes, np.float64)[rows]
    expected = middle_by_sorting((key - scores)[0][rows], left, 2 * left)
    assert found[1][0][0, 1] == np.float32(expected)


def test_batches_of_any_size(monkeypatch):
    monkeypatch.setattr(cuda_launch, "_MOST_MEMBERS", 2)
    columns, values, node = map(jnp.asarray, draw_rows(50, 2, 8, 2, 2))
    many = jnp.stack([factor * values for factor in range(5)])

    def build(values):
        sizes = dict(num_nodes=2, num_bins=8)
        return levels_cuda.histogram(columns, values, node, **sizes)

    found = jax.vmap(build)(many)
    for i, one in enumerate(many):
        np.testing.assert_array_equal(found[i], build(one))
    assert jax.vmap(build)(many[:0]).shape == (0, *found.shape[1:])
    assert jax.vmap(jax.vmap(build))(many[None, :0]).shape == (1, 0, *found.shape[1:])


def test_a_batch_is_one_launch():
    columns, values, node = draw_rows(200, 3, 16, 2, 2)
    both = np.stack([values, -2 * values])
    nodes = np.stack([node, node[::-1], node])
    columns, both, nodes = map(jnp.asarray, (columns, both, nodes))

    def build(values, node):
        sizes = dict(num_nodes=2, num_bins=16)
        return levels_cuda.histogram(columns, values, node, **sizes)

    batched = jax.vmap(jax.vmap(build, (None, 0)), (0, None))
    found = batched(both, nodes)
    for i, one in enumerate(both):
        for j, other in enumerate(nodes):
            np.testing.assert_array_equal(found[i, j], build(one, other))
    assert str(jax.make_jaxpr(batched)(both, nodes)).count("ffi_call[") == 1


WIDE = np.random.default_rng(1).normal(size=(300, 3)).astype(np.float32)
LEVELS = WIDE.copy()
LEVELS[:, 1] = np.arange(300) * 7 % 60
LEVELS[:, 2] = np.arange(300) % 5
LEVELS[::9] = np.nan
TREES = dict(num_rounds=2, max_depth=2, linear_leaves=False)
# Where arrays lie on a CPU, its kernels have the bits of plain XLA, by other tests.
REFERENCE = "xla" if ON_GPU else "cpu"
CASES = dict(
    absolute=dict(
        x=WIDE, y=WIDE[:, 0], loss=jb.losses.absolute_error, max_bins=1000,
        max_leaves=3,
    ),
    logistic=dict(
        y=Y > 1, loss=jb.losses.logistic, colsample_bytree=0.7, colsample_bynode=0.5,
        rows_per_threshold=30,
        subsample=0.6, min_child_samples=9, sample_weight=np.arange(len(Y)) % 4,
    ),
    limited=dict(
        y=Y > 1, loss=jb.losses.logistic, categorical=[2], monotone={0: 1}, max_depth=1
    ),
    sets=dict(
        x=LEVELS, y=np.sin(np.arange(300) * 7 % 60) + WIDE[:, 0], categorical=[1, 2],
        max_depth=3, rows_per_threshold=0, min_child_samples=1,
    ),
    bounded_sets=dict(
        x=LEVELS, y=np.sin(np.arange(300) * 7 % 60) > 0.3, categorical=[1, 2],
        loss=jb.losses.logistic, max_depth=3, rows_per_threshold=20, l1=0.1,
        max_delta_step=0.7, max_onehot=3,
    ),
    bounded=dict(
        y=Y > 1, loss=jb.losses.logistic, monotone={0: 1, 2: -1}, l1=0.3, max_depth=3,
        max_delta_step=0.7, colsample_bylevel=0.7, rows_per_threshold=9,
    ),
    scores=dict(  # whose trees are a batch
        y=np.stack([Y, X[:, 2]], 1), loss=squared_distance, num_scores=2,
        share_structure=False, max_depth=1,
    ),
)  # fmt: skip


def test_cases_have_codes_of_one_byte_and_of_two():
    codes = (
        jb.apply_bins(jb.fit_bins(x, max_bins=max_bins), x)
        for x, max_bins in ((X, 256), (WIDE, CASES["absolute"]["max_bins"]))
    )
    assert [each.dtype for each in codes] == [np.uint8, np.uint16]


@pytest.mark.parametrize("case", CASES)
def test_models_have_the_bits_of_other_implementations(case):
    """With codes of two bytes, two devices share the rows."""
    call, more = dict(x=X, y=Y) | TREES | CASES[case], {}
    if case == "absolute" and not ON_GPU:
        more = dict(mesh=jax.sharding.Mesh(jax.devices()[:2], "rows"))
    expected, told = jb.fit(**call, implementation=REFERENCE)
    found, history = jb.fit(**call, implementation="cuda", **more)
    same_bits(found, expected)
    np.testing.assert_array_equal(history.train_loss, told.train_loss)


@pytest.mark.parametrize("kind", ["deep", "shared", "linked"])
def test_predictions_have_the_bits_of_plain_xla(kind):
    """Of random trees; their rows hold odd numbers."""
    model = make_model(3, 9 if kind == "deep" else 3, 3, num_scores=2)
    model = share_trees(model) if kind == "shared" else model
    model = add_sets(model, [2]) if kind != "shared" else model
    model = link(model) if kind == "linked" else model
    rows = add_values(make_rows(70, 3), [2])
    for predict in (jb.predict, jb.staged_predict, jb.leaf_indices):
        expected = predict(model, rows, implementation="xla")
        found = predict(model, rows, implementation="cuda")
        np.testing.assert_array_equal(found, expected)


def test_training_is_lowered_for_gpus():
    codes = jb.apply_bins(jb.fit_bins(X), X)
    with use_implementation("cuda"):
        traced = jax.jit(
            lambda y: jb.boost(
                codes, y, jb.losses.squared_error, jax.random.key(0), num_rounds=2
            )
        ).trace(jnp.asarray(Y))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("packed_histogram_2", "search_2", "sample_features", "route_u8"):
        assert f'kernel = "{kernel}"' in text
    assert text.count("jboost_launch") > 5


def test_errors_of_launches():
    def run(**changes):
        shape = jax.ShapeDtypeStruct((1,), jnp.int32)
        launch = cuda_launch.Launch("sum_by_key", (shape,), (1, 1), (1, 1, 1, 4, 1), 8)
        ones = jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        return jax.block_until_ready(
            cuda_launch.launch(launch._replace(**changes), *ones)
        )

    for changes, words in (
        (dict(kernel="nothing"), "named symbol not found"),
        (dict(grid=(1, 70_000)), "70000 blocks along axis 1"),
        (dict(threads=33), "multiple of 32"),
        (dict(shared_bytes=300_000), "invalid argument"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            run(**changes)


def test_launches_of_a_kernel_may_differ_in_shared_memory():
    """Those with less must not take it from those with more, which are kept ready."""
    columns, values, node = draw_rows(99, 4, 700, 10, 2)
    rows = [*map(jnp.asarray, (columns, values, node))]

    def build(columns, values, node):
        more, less = (
            levels_cuda.histogram(columns, values, node, num_nodes=n, num_bins=700)
            for n in (10, 1)
        )
        return more, less

    program = jax.jit(build)
    for _ in range(2):
        for found, nodes in zip(program(*rows), (10, 1), strict=True):
            expected = references.histogram(columns, values, node, nodes, 700)
            np.testing.assert_array_equal(found, expected)


@stand_in
def test_compiled_kernels_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = cuda_compiler.compile_kernels(90, 13)
    assert code == b"image\0"
    (file,) = (tmp_path / "jboost").iterdir()
    file.write_bytes(b"kept")
    assert cuda_compiler.compile_kernels(90, 13) == b"kept"
    cuda_compiler.compile_kernels(86, 13)  # runs what is compiled for 80
    assert len([*(tmp_path / "jboost").iterdir()]) == 2
    # A folder that cannot be written to does no harm.
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert cuda_compiler.compile_kernels(90, 13) == code


@stand_in
def test_errors_of_the_compiler_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_compiler, "read_source", lambda: "#error")
    with pytest.raises(cuda_compiler.CompilerError, match="compilation failed"):
        cuda_compiler.compile_kernels(90, 13)
    with pytest.raises(cuda_compiler.CompilerError, match="the GPU has 75"):
        cuda_compiler.compile_kernels(75, 13)
    assert not [*tmp_path.iterdir()]


@stand_in
def test_without_a_gpu_its_kernels_are_refused():
    code = "import jboost as jb; jb.predict(None, None, implementation='cuda')"
    ended = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=False,
        env=os.environ | {"JBOOST_LIBCUDA": "/nowhere.so"},
    )  # fmt: skip
    assert "implementation must be 'cpu', 'xla' or None here" in ended.stderr
    assert "nowhere" in ended.stderr


@stand_in
def test_without_the_compiler_kernels_are_not_ready(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JBOOST_LIBNVRTC", "/nowhere.so")
    assert "nowhere" in library.find_obstacle.__wrapped__()


@stand_in
def test_nvidias_compiler_takes_the_kernels(tmp_path, monkeypatch):
    """For new GPUs; for old ones, too, where options and architecture are known."""
    pytest.importorskip("nvidia")
    monkeypatch.delenv("JBOOST_LIBNVRTC")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = cuda_compiler.compile_kernels(100, 13)
    assert code.startswith(b"\x7fELF")
    for kernel in ("packed_histogram_2", "sum_by_key", "search_2", "predict"):
        assert f".text.{kernel}\0".encode() in code
    little = 'extern "C" __global__ void little() {}'
    monkeypatch.setattr(cuda_compiler, "read_source", lambda: little)
    assert b".text.little\0" in cuda_compiler.compile_kernels(80, 13)


@stand_in
@pytest.mark.parametrize(
    "options", [("thread", "-O1"), ("address,undefined", "-O0")], ids="".join
)
def test_kernels_have_no_races_and_stay_in_their_memory(options, tmp_path):
    program, (sanitizer, level) = tmp_path / "run_kernels", options
    build("run_kernels.cc", program, f"-fsanitize={sanitizer}", "-g1", level)
    ended = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not ended.stderr
