# SPDX-License-Identifier: Apache-2.0
"""Training on blocks of rows on disk gives what training on arrays gives."""

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from public_names import find_public_functions
from tables import FULL, squared_distance

import jboost as jb
from jboost.entry.programs import compiled
from jboost.objective.evaluation import Objective, gradients, hessians, mean_hessian
from jboost.objective.tracing import trace_loss
from jboost.sklearn import JBoostRegressor
from jboost.streams import folders, writing
from jboost.streams.blocks import (
    Block,
    BlockReader,
    BlockSet,
    read_rows,
    write_block,
)
from jboost.streams.folders import Folders, added_bytes

pytestmark = pytest.mark.usefixtures("constant_leaves_of_file")
NUM_ROWS, BLOCK_ROWS, BATCH_ROWS = 200, 36, 27
MEMORY = "64 MiB"
SETTINGS: dict[str, Any] = dict(num_rounds=2, max_depth=3, max_bins=16, **FULL)
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def table():
    """Values of several kinds, many missing, and targets that depend on them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, 3)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[:, :2][random.random((NUM_ROWS, 2)) < 0.1] = np.nan
    y = np.nan_to_num(x) @ [1, 1, 2] + 0.3 * random.normal(size=NUM_ROWS)
    weights = random.random(NUM_ROWS).astype(np.float32)
    weights[::7] = 0
    return x, y.astype(np.float32), weights


def make_stream(x, y, weights=None, offset=None, **options):
    bins = options.pop("bins", None)
    if bins is None:
        bins = jb.fit_bins(x, sample_weight=weights, max_bins=16)
    source = jb.streams.array_batches(
        x, y, sample_weight=weights, offset=offset, batch_rows=BATCH_ROWS
    )
    options = {"memory": MEMORY, "block_rows": BLOCK_ROWS, **options}
    return jb.stream(source, bins=bins, **options)


def assert_same_training(x, y, weights=None, offset=None, **settings):
    settings = {**SETTINGS, **settings}
    expected = jb.fit(x, y, sample_weight=weights, offset=offset, **settings)
    rows = make_stream(x, y, weights, offset)
    model, history = jb.fit(rows, **settings)
    chex.assert_trees_all_equal(model, expected[0])
    np.testing.assert_array_equal(history.train_loss, expected[1].train_loss)
    assert history.choices == expected[1].choices
    if settings["subsample"] < 1:
        improvements = history.oob_improvement, expected[1].oob_improvement
        np.testing.assert_array_equal(*improvements)
        chex.assert_tree_all_finite(improvements[0])
    return model


def make_two(y):
    """Returns targets of a loss of two scores."""
    return np.stack([y, -0.2 * y], axis=1)


def test_models_and_histories_are_the_same_to_the_bit(table):
    """Shallow and deep; models of other losses and settings are in test_routes.py."""
    x, y, weights = table
    assert_same_training(x, y, max_depth=1)
    assert_same_training(
        x, y, weights, 0.1 * y, loss=jb.losses.absolute_error, subsample=0.6,
        colsample_bynode=0.5, seed=3, rows_per_threshold=100, min_child_samples=5,
        max_depth=4, l1=0.5, max_delta_step=1.5, max_leaves=9, monotone={0: 1},
        interactions=[[0, 1], [2]],
    )  # fmt: skip


def test_labels_of_softmax_may_be_of_any_type(table):
    x, y, _ = table
    models = [
        jb.fit(
            x, (y > 0).astype(dtype), jb.losses.softmax, num_scores=2,
            init_score=[0.0, 0.0], curvature="exact", leaf_solver="newton",
            **SETTINGS | dict(max_depth=1),
        )[0]
        for dtype in (np.int32, np.int64, np.float32)
    ]  # fmt: skip
    chex.assert_trees_all_equal(*models)


@pytest.mark.filterwarnings("ignore:no tree of")
def test_trees_that_stop_growing_early_are_the_same(table):
    x, y, weights = table
    model = assert_same_training(x, y, weights, min_gain=20.0, subsample=0.6)
    assert 0 < np.mean(np.asarray(model.threshold) == np.inf) < 1
    assert_same_training(x, y, min_gain=1e9)  # no split at all


def test_the_way_rows_are_cut_and_kept_does_not_matter(table, tmp_path):
    x, y, _ = table
    cut, _ = jb.fit(make_stream(x, y), **SETTINGS)
    other, _ = jb.fit(make_stream(x, y, block_rows=NUM_ROWS - 1), **SETTINGS)
    chex.assert_trees_all_equal(cut, other)  # the last block is one row
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    chex.assert_trees_all_equal(cut, jb.fit(make_stream(mapped, y), **SETTINGS)[0])


def test_wide_codes_are_the_same():
    x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    y, bins = x[:, 0] * x[:, 1], jb.fit_bins(x, max_bins=700)
    settings = SETTINGS | dict(max_bins=700)
    expected, _ = jb.fit(x, y, **settings)
    model, _ = jb.fit(make_stream(x, y, bins=bins, block_rows=300), **settings)
    assert np.isfinite(np.asarray(bins.thresholds)).sum(axis=1).max() > 256
    chex.assert_trees_all_equal(model, expected)


def test_few_distinct_values_need_no_bins(table):
    x, y, weights = table
    x = np.round(x, 1)
    source = jb.streams.array_batches(
        x, y, sample_weight=weights, batch_rows=BATCH_ROWS
    )
    written = jb.stream(source, memory=MEMORY, block_rows=BLOCK_ROWS).prepare(256)
    expected = jb.fit_bins(x, sample_weight=weights)
    np.testing.assert_array_equal(written.bins.thresholds, expected.thresholds)


def test_validation_metrics_and_callbacks_work(table):
    x, y, _ = table
    seen = []

    def watch(round, history, model):
        seen.append(round)
        return round == 4

    def mean_error(scores, targets, weights):
        return jnp.mean(jnp.abs(scores - targets))

    settings = SETTINGS | dict(
        validation=(x[:50] + 0.1, y[:50]), metrics={"mae": mean_error}, num_rounds=8,
        early_stopping_rounds=8, callbacks=watch,
    )  # fmt: skip
    expected, wanted = jb.fit(x, y, **settings)
    model, history = jb.fit(make_stream(x, y), **settings)
    assert seen == 2 * [0, 1, 2, 3, 4]
    chex.assert_trees_all_equal(model, expected)
    np.testing.assert_array_equal(history.validation_loss, wanted.validation_loss)
    assert history.metrics["train"]["mae"] == pytest.approx(
        wanted.metrics["train"]["mae"], rel=1e-6
    )


def test_a_stream_is_written_once_and_removed_with_the_stream(
    table, tmp_path, young_heap
):
    x, y, _ = table
    passes = []

    def source():
        passes.append(1)
        yield from jb.streams.array_batches(x, y, batch_rows=BATCH_ROWS)()

    disks = [tmp_path / "first", tmp_path / "second"]
    rows = jb.stream(source, memory=MEMORY, directories=disks, block_rows=BLOCK_ROWS)
    first, _ = jb.fit(rows, **SETTINGS)
    assert len(passes) == 2
    counts = [len(list(disk.rglob("*.block"))) for disk in disks]
    assert counts == [3, 3]
    second, _ = jb.fit(rows, **SETTINGS)
    assert len(passes) == 2
    chex.assert_trees_all_equal(first, second)
    del rows
    gc.collect()
    assert not list(tmp_path.rglob("*.block"))
    assert all(not list(disk.iterdir()) for disk in disks)


# Data frames, prediction, and what takes no streams.


def frame_batches(x, y, names):
    """Batches whose x are data frames."""
    return [
        (pd.DataFrame(part, columns=names), pd.Series(target))
        for part, target in zip(np.array_split(x, 3), np.array_split(y, 3), strict=True)
    ]


@pytest.mark.parametrize("with_bins", [False, True])
def test_frames_keep_their_names(table, with_bins):
    x, y, _ = table
    batches = frame_batches(x, y, NAMES)
    bins = jb.fit_bins(x, max_bins=16) if with_bins else None
    settings = {**SETTINGS, "monotone": {"a": 1}}
    rows = jb.stream(batches, memory=MEMORY, block_rows=BLOCK_ROWS, bins=bins)
    for bad in ("n", 7):
        with pytest.raises((TypeError, ValueError), match="monotone"):
            jb.fit(rows, **{**settings, "monotone": {bad: 1}})
    model, _ = jb.fit(rows, **settings)
    assert model.feature_names == NAMES
    settings["monotone"] = {0: 1}
    for where in (dict(x=rows), dict(x=x, y=y, feature_names=NAMES)):
        chex.assert_trees_all_equal(model, jb.fit(**where, **settings)[0])
    with pytest.raises(ValueError, match="expected 'a', got 'c'"):
        jb.predict(model, jb.stream(frame_batches(x, y, NAMES[::-1]), memory=MEMORY))
    batches[2] = frame_batches(x, y, NAMES[::-1])[2]
    with pytest.raises(ValueError, match=r"x of batch 2 .*'a'.*'c'"):
        jb.fit(jb.stream(batches, memory=MEMORY), **settings)


@pytest.mark.parametrize("num_scores", [1, 2])
def test_streams_are_predicted_batch_by_batch(table, num_scores):
    x, y, _ = table
    loss, target = jb.losses.squared_error, y
    if num_scores > 1:
        loss, target = squared_distance, make_two(y)
    offset = target

    def link(score):
        return 2.0 * score

    model, _ = jb.fit(
        x, target, loss, num_scores=num_scores, init_score=num_scores * [0.0],
        **SETTINGS,
    )  # fmt: skip
    rows = make_stream(x, target, bins=jb.fit_bins(x[:50]))
    np.testing.assert_array_equal(jb.predict(model, rows), jb.predict(model, x))
    shifted = make_stream(x, target, offset=offset, bins=jb.fit_bins(x[:50]))
    np.testing.assert_array_equal(
        jb.predict(model, shifted, inverse_link=link),
        jb.predict(model, x, offset=offset, inverse_link=link),
    )
    with pytest.raises(ValueError, match="offset must not be given"):
        jb.predict(model, rows, offset=offset)
    tree = jb.cart.fit_tree(np.nan_to_num(x), y)
    np.testing.assert_array_equal(
        jb.predict(tree, make_stream(np.nan_to_num(x), y)),
        jb.predict(tree, np.nan_to_num(x)),
    )


def test_streams_of_categories_are_predicted_as_the_whole_frame():
    """Batches lack values, have new and missing ones, or are the codes of a frame."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        dict(
            word=random.choice(["q", "p", "r", None], 90),
            number=random.normal(size=90).astype(np.float32),
            level=pd.Categorical(random.choice(["low", "high"], 90)),
        )
    )
    y = random.normal(size=90).astype(np.float32) + (frame.word == "p")
    target = np.asarray(y, np.float32)
    model, _ = jb.fit(frame, target, **SETTINGS)
    frame.loc[80:, "word"] = "new"
    frame.loc[60:70, "word"] = None
    codes = jb.interchange.to_matrix(model, frame)
    parts = [slice(0, 30), slice(30, 60), slice(60, 90)]
    frames = [frame.iloc[part] for part in parts]
    expected = jb.predict(model, frame)
    for batches in (frames, [codes[parts[0]], *frames[1:]]):
        pairs = [(x, target[part]) for x, part in zip(batches, parts, strict=True)]
        found = jb.predict(model, jb.stream(pairs, memory=MEMORY))
        np.testing.assert_array_equal(found, expected)
    swapped = (codes[parts[0]], frames[1][["number", "word", "level"]])
    pairs = [(x, target[:30]) for x in swapped]
    with pytest.raises(ValueError, match=r"'word'.*'number'"):
        jb.predict(model, jb.stream(pairs, memory=MEMORY))
    with pytest.raises(TypeError, match=r"model .*pair"):
        jb.predict((model, None), jb.stream(pairs, memory=MEMORY))


KILLED = """
import sys
import numpy as np, jboost as jb
x = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
rows = jb.stream([(x, x[:, 0])], memory="64 MiB", directories=sys.argv[1])
rows.prepare(16)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
def test_folders_of_killed_processes_are_removed_at_the_next_start(tmp_path):
    command = [sys.executable, "-c", KILLED, tmp_path]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        (left,) = tmp_path.iterdir()
        other = Folders([tmp_path])  # leaves the folder of a process that lives
        assert list(left.glob("*.block"))
        other.remove()
        process.kill()
        process.wait(timeout=60)
        assert list(left.glob("*.block"))
    other = Folders([tmp_path])
    assert [*tmp_path.iterdir()] == other.paths
    other.remove()
    assert not list(tmp_path.iterdir())


def test_a_block_is_tested_once_and_again_after_a_change(tmp_path, monkeypatch):
    """Its checksums are computed anew only if its file has changed."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 500)).astype(np.uint8)
    blocks = write_set(tmp_path, noise, block_rows=500)
    counted = []

    def count(payload):
        counted.append(len(payload))
        return zlib.crc32(payload)

    monkeypatch.setattr("jboost.streams.blocks.crc32", count)
    for number in range(3):
        ((_, (columns, packed)),) = BlockReader(blocks).read_for_kernels([1])
        np.testing.assert_array_equal(columns, noise)
        np.testing.assert_array_equal(packed[0, :, :20].T, noise)
        if number == 0:
            tested = len(counted)
    assert tested == len(counted) == 3  # header, codes by feature, codes by row
    path = blocks.blocks[0].path
    path.write_bytes(path.read_bytes())
    list(BlockReader(blocks).read())
    assert len(counted) == 5
    damage(path)
    with pytest.raises(jb.streams.BlockError, match="checksum"):
        list(BlockReader(blocks).read_for_kernels([]))


def test_signal_handlers_stay_only_while_folders_exist(
    tmp_path, monkeypatch, young_heap
):
    numbers = (signal.SIGTERM, signal.SIGHUP)
    monkeypatch.setattr(folders, "_existing", weakref.WeakSet())
    before = [signal.getsignal(number) for number in numbers]
    try:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        first, second = Folders([tmp_path]), Folders([tmp_path])
        assert all(callable(signal.getsignal(number)) for number in numbers)
        first.remove()
        assert callable(signal.getsignal(signal.SIGTERM))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the program's own choice stays
        del second
        gc.collect()
        assert [*map(signal.getsignal, numbers)] == [signal.SIG_DFL, signal.SIG_IGN]
        again = Folders([tmp_path])
        assert callable(signal.getsignal(signal.SIGTERM))
        again.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


TAKES_STREAMS = {"fit", "predict"}
PUBLIC = {
    name.split(".")[-1]: function for name, function in find_public_functions().items()
}
TAKES_ROWS = [
    name
    for name, function in PUBLIC.items()
    if inspect.isfunction(inspect.unwrap(function))
    and "x" in inspect.signature(function).parameters
    and name not in {*TAKES_STREAMS, "array_batches", "rows"}
]


@pytest.mark.parametrize("name", TAKES_ROWS)
def test_functions_that_need_all_rows_refuse_streams(table, small_model, name):
    """Every public function with an argument x, but those that take streams."""
    x, y, _ = table
    model, bins, sketch = small_model
    known = dict(
        model=model, ensemble=model, bins=bins, sketch=sketch, y=y, num_folds=3,
        loss=jb.losses.squared_error, feature=0, features=[0], metric=np.mean,
        points={"l2": [1.0]}, grid={"l2": [1.0]}, tree=None,
    )  # fmt: skip
    function = PUBLIC[name]
    arguments = {
        key: known.get(key)
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and key != "x"
    }
    source = jb.streams.array_batches(x, y)
    with pytest.raises((TypeError, ValueError), match=r"x must .* got a stream"):
        function(**arguments, x=jb.stream(source, memory=MEMORY))
    with pytest.raises((TypeError, ValueError), match=r"x must .*jb\.stream"):
        function(**arguments, x=source)


@pytest.fixture(scope="module")
def small_model(table):
    x, y, _ = table
    model, _ = jb.fit(x, y, **SETTINGS)
    return model, jb.fit_bins(x), jb.sketches.make_sketch(x.shape[1])


def test_streams_are_refused_as_validation_and_by_estimators(table):
    x, y, _ = table
    rows = make_stream(x, y)
    with pytest.raises(TypeError, match=r"validation x .*stream"):
        jb.fit(x, y, validation=(rows, y))
    with pytest.raises(TypeError, match=r"must .* got a callable"):
        jb.fit(jb.streams.array_batches(x, y))
    with pytest.raises((TypeError, ValueError), match="X must be"):
        JBoostRegressor().fit(rows, y)


# Files.


def write_set(folder, codes, rows=None, block_rows=100):
    blocks = []
    for number, first in enumerate(range(0, codes.shape[1], block_rows)):
        part = codes[:, first : first + block_rows]
        path = folder / f"{number}.block"
        blocks.append(Block(path, number, first, part.shape[1]))
        here = {n: a[first : first + block_rows] for n, a in (rows or {}).items()}
        write_block(blocks[-1], "me", part, here)
    return BlockSet(tuple(blocks), "me", len(codes), codes.dtype)


def test_columns_of_any_width_come_back(tmp_path):
    random = np.random.default_rng(1)
    highest = [0, 1, 2, 3, 4, 15, 16, 255, 256, 65535]
    codes = np.stack([random.integers(0, h + 1, 333) for h in highest])
    codes[3, :200] = 0
    codes = codes.astype(np.uint16)
    y = random.normal(size=(333, 2)).astype(np.float32)
    blocks = write_set(tmp_path, codes, {"y": y})
    reader = BlockReader(blocks)
    read = [part.copy() for _, part in reader.read()]
    np.testing.assert_array_equal(np.concatenate(read, axis=1), codes)
    some = [part.copy() for _, part in reader.read([8, 2])]
    np.testing.assert_array_equal(np.concatenate(some, axis=1), codes[[8, 2]])
    parts = [read_rows(blocks, "y", block, y) for block in blocks.blocks]
    np.testing.assert_array_equal(np.concatenate(parts), y)


def test_narrow_and_regular_columns_take_less_room(tmp_path):
    random = np.random.default_rng(2)
    size = 40_000
    noise = random.integers(0, 256, (1, size)).astype(np.uint8)
    bits = random.integers(0, 2, (1, size)).astype(np.uint8)
    sparse = np.where(random.random((1, size)) < 0.01, noise, 0).astype(np.uint8)
    sizes = {}
    for name, codes in (("noise", noise), ("bits", bits), ("sparse", sparse)):
        folder = tmp_path / name
        folder.mkdir()
        sizes[name] = write_set(folder, codes, block_rows=size).num_bytes / size
    assert 1 <= sizes["noise"] < 1.02  # not deflated in vain
    assert 1 / 8 <= sizes["bits"] < 0.14
    assert sizes["sparse"] < 0.1


def test_one_block_is_read_ahead_and_no_more(tmp_path, monkeypatch):
    codes = np.arange(600, dtype=np.uint16)[None, :]
    reader = BlockReader(write_set(tmp_path, codes))
    begun, threads = [], set()
    fetch = BlockReader._fetch

    def watch(self, block, *others):
        begun.append(block.number)
        threads.add(threading.get_ident())
        return fetch(self, block, *others)

    monkeypatch.setattr(BlockReader, "_fetch", watch)
    for block, part in reader.read():
        expected = list(range(min(6, block.number + 2)))
        deadline = time.monotonic() + 10
        while begun != expected and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert begun == expected
        # What is read ahead does not overwrite what is in use.
        assert part[0, 0] == 100 * block.number
    assert threading.get_ident() not in threads


def test_a_run_holds_no_more_than_two_blocks(table, monkeypatch):
    x, y, _ = table
    fetched, held = [], []
    fetch = BlockReader._fetch

    def watch(self, block, take):
        held.append(sum(each() is not None for each in fetched))
        codes = fetch(self, block, take)
        array = codes[0] if isinstance(codes, tuple) else codes
        fetched.append(weakref.ref(array))
        return codes

    monkeypatch.setattr(BlockReader, "_fetch", watch)
    rows = make_stream(x, y)
    jb.fit(rows, **SETTINGS)
    assert len(held) > 20
    assert max(held) == 1  # before another one is read
    assert 2 * x.shape[1] * BLOCK_ROWS <= rows.plan["blocks"]
    assert sum(rows.plan.values()) <= rows.memory


MEASURE = """
import ctypes, signal, sys
import numpy as np
import jboost as jb

def read(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return 1024 * int(line.split()[1])

x = np.random.default_rng(0).random((2_000_000, 1), np.float32)
rows = jb.stream(
    jb.streams.array_batches(x, x[:, 0]), bins=jb.fit_bins(x[:1000]), memory="256 MiB",
    directories=sys.argv[1],
)
settings = dict(num_rounds=1, max_depth=2)
jb.fit(rows, **settings)  # compiles
ratios = []
for _ in range(3):
    ctypes.CDLL(None).malloc_trim(0)
    before = read("RssAnon")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    jb.fit(rows, **settings)
    # Pages of libraries are not ours: the system drops and reads them as it likes.
    peak = read("VmHWM") - read("RssFile") - read("RssShmem")
    ratios.append((peak - before) / sum(rows.plan.values()))
# What the allocator keeps from before differs by a tenth of the plan between runs.
print(sorted(ratios)[1], flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("TSAN_OPTIONS" in os.environ, reason="its memory would count")
def test_a_process_stays_within_its_plan_and_removes_its_files(tmp_path):
    """Resident memory, freed arrays included; then SIGTERM."""
    command = [sys.executable, "-c", MEASURE, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ratio = float(process.stdout.readline())
        assert list(tmp_path.rglob("*.block"))
        process.terminate()
        assert process.wait(timeout=60) == -signal.SIGTERM
    assert not list(tmp_path.iterdir())
    assert ratio <= 1.15


def test_memory_grows_with_scores_not_with_their_square():
    """Hessians [N, K, K] never exist together."""
    num_scores, targets = 20, jnp.zeros(20_000, jnp.int32)
    loss, constants = trace_loss(jb.losses.softmax, targets, num_scores)
    objective = Objective(loss, constants, targets, (), None)
    scores = jax.ShapeDtypeStruct((num_scores, len(targets)), jnp.float32)
    weights = jax.ShapeDtypeStruct((len(targets),), jnp.float32)
    for function, *arguments in (
        (hessians, scores), (gradients, scores), (mean_hessian, scores, weights)
    ):  # fmt: skip
        found = added_bytes(compiled(partial(function, objective)), *arguments)
        assert found <= 4 * len(targets) * num_scores + 3 * 2**22


def test_a_sketch_is_counted_as_what_it_takes():
    x = np.random.default_rng(0).random((100_000, 20), np.float32)
    few = jb.stream([(x[:40_000], x[:40_000, 0])], memory=2 * x[:40_000].nbytes)
    few.prepare(256)  # of so few rows the sketch holds the values
    rows = jb.stream([(part, part[:, 0]) for part in np.split(x, 10)], memory="5 MiB")
    with pytest.raises(ValueError, match=r"memory .*sketch") as caught:
        rows.prepare(256)
    assert "fewer max_bins" in str(caught.value)
    rows.prepare(16)


def test_a_budget_too_small_is_refused_with_what_is_needed(table):
    x, y, _ = table
    rows = make_stream(x, y)
    rows.memory = 2**16
    with pytest.raises(ValueError, match="memory must be at least") as caught:
        jb.fit(rows, **SETTINGS)
    needed = int(str(caught.value).split()[5])
    rows.memory = needed
    jb.fit(rows, **SETTINGS)
    rows.memory = needed - 1
    with pytest.raises(ValueError, match="memory must be at least"):
        jb.fit(rows, **SETTINGS)


def test_a_plan_that_does_not_fit_is_refused_before_blocks_are_written(
    table, monkeypatch
):
    x, y, _ = table
    source = jb.streams.array_batches(x, y, batch_rows=BATCH_ROWS)
    rows = jb.stream(source, memory=MEMORY, block_rows=BLOCK_ROWS)
    jb.fit(rows, **SETTINGS)
    written = []
    monkeypatch.setattr(writing, "write_block", lambda *_: written.append(1))
    short = sum(rows.plan.values()) - 1
    with pytest.raises(ValueError, match="memory must be at least"):
        jb.fit(jb.stream(source, memory=short, block_rows=BLOCK_ROWS), **SETTINGS)
    assert not written


def test_the_plan_is_printed_before_training(table, capsys):
    x, y, _ = table
    rows, printed = make_stream(x, y), []

    def watch(round, history, model):
        printed.append(capsys.readouterr().err)

    jb.fit(rows, **SETTINGS, progress=True, callbacks=watch)
    (line,) = [line for line in printed[0].splitlines() if "training takes" in line]
    assert f"{sum(rows.plan.values()) / 2**20:.1f} MiB of 64.0 MiB" in line


@pytest.mark.parametrize("with_bins", [False, True])
def test_too_many_rows_are_refused_before_blocks_are_written(
    tmp_path, with_bins, young_heap
):
    x = np.random.default_rng(0).random((1 << 14, 2), np.float32)
    bins = jb.fit_bins(x) if with_bins else None
    batches = [(x, x[:, 0])] * 40
    rows = jb.stream(batches, memory="8 MiB", bins=bins, directories=tmp_path)
    with pytest.raises(ValueError, match=r"memory .* rows"):
        jb.fit(rows, num_rounds=1)
    gc.collect()
    assert not list(tmp_path.rglob("*.block"))
    rows = jb.stream(batches[:2], memory="8 MiB", bins=bins, directories=tmp_path)
    rows.prepare(256)
    with pytest.raises(ValueError, match=r"memory .* rows"):
        jb.stream(batches[:5], memory="8 MiB", bins=bins).prepare(256, num_scores=20)


# What goes wrong.


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    """Leaves the header, which ends at a multiple of 64 bytes, and a bit more."""
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"}}") + 64])


HARM = {
    "checksum": damage,
    "ends": truncate,
    "does not begin": lambda path: path.write_bytes(b""),
    "No such file": Path.unlink,
}


@pytest.mark.parametrize("harm", HARM)
def test_a_bad_block_keeps_the_rounds_before(harm, tmp_path):
    x = np.random.default_rng(0).normal(size=(NUM_ROWS, 3)).astype(np.float32)
    rows = make_stream(x, x[:, 0], directories=tmp_path)
    expected, wanted = jb.fit(rows, **SETTINGS)
    (path,) = tmp_path.rglob("000003.block")

    def harm_it(round, history, model):
        if round == 1:
            HARM[harm](path)

    with pytest.raises(jb.TrainingError, match=harm) as caught:
        jb.fit(rows, **{**SETTINGS, "num_rounds": 4}, callbacks=harm_it)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value.__cause__, jb.streams.BlockError)
    assert caught.value.round == 2
    chex.assert_trees_all_equal(caught.value.model, expected)
    np.testing.assert_array_equal(caught.value.history.train_loss, wanted.train_loss)


def test_a_block_of_other_data_is_noticed(tmp_path):
    codes = np.ones((2, 300), np.uint8)
    blocks = write_set(tmp_path, codes)
    (tmp_path / "1.block").replace(tmp_path / "2.block")
    reader = BlockReader(blocks._replace(blocks=blocks.blocks[2:]))
    with pytest.raises(jb.streams.BlockError, match="belongs to other data"):
        list(reader.read())


def test_a_full_disk_is_reported_and_leaves_nothing(
    table, tmp_path, monkeypatch, young_heap
):
    x, y, _ = table

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jboost.streams.blocks.os.replace", full)
    with pytest.raises(
        jb.streams.BlockError, match=r"block 0 .* No space left on device"
    ):
        jb.fit(make_stream(x, y, directories=tmp_path), num_rounds=1)
    gc.collect()
    assert not list(tmp_path.rglob("*.*"))


X, Y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
BAD_BATCHES = [
    ([(X, Y), (X[:, :1], Y)], "x of batch 1 must have 2 columns"),
    ([(X, Y), (X, Y, Y)], "batch 1 must come with sample_weight if and only if"),
    ([(X, Y), (X, (Y, Y))], "y of batch 1 must be like that of the first"),
    ([(X, Y), (X, Y.astype(np.int32))], "y of batch 1 must be like that"),
    ([(X, Y), (X, np.where(Y == 3, np.nan, Y))], "y of batch 1 must be finite"),
    ([(X, Y[:3])], "y of batch 0 must have 6 rows"),
    ([(X, Y, -Y)], "sample_weight of batch 0 must be finite and >= 0"),
    ([(X, Y, 0 * Y)], "sample_weight must be positive in some row"),
    ([], "source must give at least one row"),
    ([(X[:0], Y[:0])], "source must give at least one row"),
    *(([batch], "source must give batches") for batch in (X, (X,), (X, Y, Y, Y, Y))),
]


@pytest.mark.parametrize(("batches", "message"), BAD_BATCHES)
def test_bad_batches_are_refused(batches, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jb.fit(jb.stream(batches, memory=MEMORY), num_rounds=1)


def test_batches_without_rows_and_of_one_row_are_fine():
    ones = [(X[i : i + 1], Y[i : i + 1]) for i in range(6)]
    batches = [(X[:0], Y[:0]), *ones, (X[:0], Y[:0])]
    written = jb.stream(batches, memory=MEMORY).prepare(256)
    ((block, codes),) = BlockReader(written.blocks).read()
    np.testing.assert_array_equal(codes.T, jb.apply_bins(jb.fit_bins(X), X))
    np.testing.assert_array_equal(
        read_rows(written.blocks, "target 0", block, Y.astype("f")), Y
    )


def test_an_error_of_the_source_says_which_batch():
    def source():
        yield X, Y
        raise OSError("the network is down")

    with pytest.raises(OSError, match="the network is down") as caught:
        jb.fit(jb.stream(source, memory=MEMORY))
    assert "in batch 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([(X, Y)], "in the first pass and 6 in"),
        ([(X, Y), (X, Y + 1)], "other targets"),
        ([(X, Y), (X + 1, Y)], "other x"),
        ([(X[:, ::-1], Y), (X[:, ::-1], Y)], "other x"),
    ],
)
def test_a_source_that_changes_is_noticed(second, message):
    passes = iter([[(X, Y), (X, Y)], second])
    rows = jb.stream(lambda: iter(next(passes)), memory=MEMORY)
    with pytest.raises(ValueError, match=message):
        jb.fit(rows, num_rounds=1)


def test_the_door_says_what_it_expects(table):
    x, y, _ = table
    rows = make_stream(x, y)
    for name in ("y", "sample_weight", "offset"):
        with pytest.raises(ValueError, match=f"{name} must not be given"):
            jb.fit(rows, **{name: y})
    for name, value in dict(candidates="exact", candidate_weights="curvature").items():
        with pytest.raises(ValueError, match=rf"{name} .*stream"):
            jb.fit(rows, **{name: value})
    with pytest.raises(TypeError, match="can be read again"):
        jb.stream(iter([(x, y)]), memory=MEMORY)
    with pytest.raises(TypeError, match="source must be a callable"):
        jb.stream("data.parquet", memory=MEMORY)
    for bad in ("much", "1.2.3 GB", 1000):
        with pytest.raises(ValueError, match=r"memory .*bytes"):
            jb.stream([(x, y)], memory=bad)
    with pytest.raises(ValueError, match="must have 3 columns"):
        jb.fit(jb.stream([(x[:, :2], y)], memory=MEMORY, bins=jb.fit_bins(x)))
    with pytest.raises(ValueError, match="y must be given"):
        jb.fit(x)
    with pytest.raises(ValueError, match="must have 2 scores"):
        jb.fit(
            make_stream(x, make_two(y), offset=y), loss=squared_distance,
            num_scores=2,
        )  # fmt: skip


BAD_SETTINGS = dict(
    max_depth=0, l2=-1.0, max_delta_step="no", subsample=0.0, min_child_samples="few",
    max_leaves=1, curvature="round", leaf_solver="none", regularization="none",
    metrics={"a": 1}, early_stopping_rounds=3, validation=(X,), callbacks=1,
)  # fmt: skip
BAD_COLUMNS = dict(
    feature_names=["a"], monotone={2: 1}, interactions=[[0, 5]],
)  # fmt: skip


def test_bad_arguments_are_refused_before_the_data_are_read():
    """Those about columns as soon as the first batch says how many there are."""
    read = []

    def source():
        for number in range(3):
            read.append(number)
            yield X, Y

    rows = jb.stream(source, memory=MEMORY)
    for name, value in BAD_SETTINGS.items():
        with pytest.raises((TypeError, ValueError), match=name):
            jb.fit(rows, num_rounds=1, **{name: value})
    assert read == []
    for name, value in BAD_COLUMNS.items():
        with pytest.raises((TypeError, ValueError), match=name):
            jb.fit(rows, num_rounds=1, **{name: value})
    assert read == [0] * len(BAD_COLUMNS)


def test_budgets_are_read_as_written():
    sizes = {"512 MiB": 512 * 2**20, "1.5 GB": 15 * 10**8, "2GiB": 2**31, 2**22: 2**22}
    for text, size in sizes.items():
        assert jb.stream([(X, Y)], memory=text).memory == size
