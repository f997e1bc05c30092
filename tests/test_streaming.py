# SPDX-License-Identifier: Apache-2.0
"""Training on blocks of rows on disk gives what training on arrays gives."""

import gc
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.streams.batches import checked_batches
from jboost.streams.blocks import (
    Block,
    BlockReader,
    BlockSet,
    read_rows,
    write_block,
)

NUM_ROWS, BLOCK_ROWS, BATCH_ROWS = 1501, 300, 170
MEMORY = "64 MiB"


@pytest.fixture(scope="module")
def table():
    """Values of several kinds, many missing, and targets that depend on them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, 7)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[:, 2] = x[:, 2] > 0
    x[random.random(x.shape) < 0.1] = np.nan
    x[:, 3] = random.normal(size=NUM_ROWS)
    known = np.nan_to_num(x)
    y = (
        known[:, 0]
        + known[:, 1] ** 2
        + known[:, 3]
        + 0.3 * random.normal(size=NUM_ROWS)
    )
    weights = random.random(NUM_ROWS).astype(np.float32)
    weights[::7] = 0
    return x, y.astype(np.float32), weights


def make_stream(x, y, weights=None, offset=None, **options):
    bins = options.pop("bins", None)
    if bins is None:
        bins = jb.fit_bins(x, sample_weight=weights)
    source = jb.array_batches(
        x, y, sample_weight=weights, offset=offset, batch_rows=BATCH_ROWS
    )
    options = {"memory": MEMORY, "block_rows": BLOCK_ROWS, **options}
    return jb.stream(source, bins=bins, **options)


def assert_same_model(first, second):
    leaves, structure = jax.tree.flatten(first)
    others, other_structure = jax.tree.flatten(second)
    assert structure == other_structure
    for one, other in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def assert_same_training(x, y, weights=None, offset=None, **settings):
    settings = {"num_rounds": 3, "max_depth": 4, **settings}
    expected = jb.fit(x, y, sample_weight=weights, offset=offset, **settings)
    rows = make_stream(x, y, weights, offset)
    model, history = jb.fit(rows, **settings)
    assert_same_model(model, expected[0])
    np.testing.assert_array_equal(history.train_loss, expected[1].train_loss)
    assert history.choices == expected[1].choices
    if "subsample" in settings:
        improvements = history.oob_improvement, expected[1].oob_improvement
        np.testing.assert_array_equal(*improvements)
        assert np.isfinite(improvements[0]).all()


def three_classes(y):
    return np.digitize(y, [0.0, 1.5]).astype(np.int32)


def test_squared_error_is_the_same_to_the_bit(table):
    x, y, _ = table
    assert_same_training(x, y)


def test_weights_sampling_and_offset_are_the_same_to_the_bit(table):
    x, y, weights = table
    assert_same_training(
        x, y, weights, 0.1 * y, subsample=0.6, colsample_bynode=0.5, seed=3,
        min_child_samples=5,
    )  # fmt: skip


def test_absolute_error_is_the_same_to_the_bit(table):
    x, y, weights = table
    assert_same_training(x, y, weights, loss=jb.losses.absolute_error)


def test_constrained_trees_are_the_same_to_the_bit(table):
    x, y, _ = table
    assert_same_training(
        x, y, l1=0.5, max_delta_step=1.5, max_leaves=9, monotone={0: 1, 3: 1},
        interactions=[[0, 1, 2], [1, 3, 4, 5]],
    )  # fmt: skip


def test_softmax_is_the_same_to_the_bit(table):
    x, y, weights = table
    settings = {"curvature": "exact", "leaf_solver": "newton", "init_score": 0.0}
    loss = jb.losses.softmax
    assert_same_training(
        x, three_classes(y), weights, loss=loss, num_scores=3, **settings
    )


@pytest.mark.parametrize("max_depth", [1, 8])
def test_any_depth_is_the_same_to_the_bit(table, max_depth):
    x, y, _ = table
    assert_same_training(x, y, max_depth=max_depth)


def test_trees_that_stop_growing_early_are_the_same(table):
    x, y, weights = table
    settings = {"min_gain": 30.0, "subsample": 0.6}
    assert_same_training(x, y, weights, **settings)
    model, _ = jb.fit(make_stream(x, y, weights), num_rounds=2, max_depth=4, **settings)
    assert (np.asarray(model.threshold) == np.inf).any()
    assert_same_training(x, y, min_gain=1e9)  # no split at all


def test_the_way_rows_are_cut_does_not_matter(table):
    x, y, _ = table
    settings = {"num_rounds": 2, "max_depth": 4}
    cut, _ = jb.fit(make_stream(x, y), **settings)
    other, _ = jb.fit(make_stream(x, y, block_rows=NUM_ROWS - 1), **settings)
    assert_same_model(cut, other)  # the last block is one row


def test_wide_codes_are_the_same(table):
    x, y, _ = table
    bins = jb.fit_bins(x, max_bins=700)
    expected, _ = jb.fit(x, y, max_bins=700, num_rounds=2, max_depth=4)
    model, _ = jb.fit(make_stream(x, y, bins=bins), num_rounds=2, max_depth=4)
    assert np.isfinite(np.asarray(bins.thresholds)).sum(axis=1).max() > 256
    assert_same_model(model, expected)


def test_few_distinct_values_need_no_bins(table):
    x, y, weights = table
    x = np.round(x, 1)
    source = jb.array_batches(x, y, sample_weight=weights, batch_rows=BATCH_ROWS)
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

    settings = dict(
        validation=(x[:200] + 0.1, y[:200]), metrics={"mae": mean_error}, max_depth=4,
        num_rounds=8, early_stopping_rounds=8, callbacks=watch,
    )  # fmt: skip
    expected, wanted = jb.fit(x, y, **settings)
    model, history = jb.fit(make_stream(x, y), **settings)
    assert seen == 2 * [0, 1, 2, 3, 4]
    assert_same_model(model, expected)
    np.testing.assert_array_equal(history.validation_loss, wanted.validation_loss)
    assert history.metrics["train"]["mae"] == pytest.approx(
        wanted.metrics["train"]["mae"], rel=1e-6
    )


def test_a_stream_is_written_once_and_removed_with_the_stream(table, tmp_path):
    x, y, _ = table
    passes = []

    def source():
        passes.append(1)
        yield from jb.array_batches(x, y, batch_rows=BATCH_ROWS)()

    disks = [tmp_path / "first", tmp_path / "second"]
    rows = jb.stream(source, memory=MEMORY, directories=disks, block_rows=BLOCK_ROWS)
    first, _ = jb.fit(rows, num_rounds=2, max_depth=4)
    assert len(passes) == 2
    counts = [len(list(disk.rglob("*.block"))) for disk in disks]
    assert counts == [3, 3]
    second, _ = jb.fit(rows, num_rounds=2, max_depth=4)
    assert len(passes) == 2
    assert_same_model(first, second)
    del rows
    gc.collect()
    assert not list(tmp_path.rglob("*.block"))
    assert all(not list(disk.iterdir()) for disk in disks)


def test_parquet_files_are_read(table, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    x, y, weights = table
    halves = np.array_split(np.arange(NUM_ROWS), 2)
    for number, rows in enumerate(halves):
        columns = {"y": y[rows], "w": weights[rows], "unused": np.zeros(len(rows))}
        for f in range(x.shape[1]):
            columns[f"x{f}"] = pyarrow.array(x[rows, f], from_pandas=True)
        parquet.write_table(
            pyarrow.table(columns), tmp_path / f"{number}.parquet", row_group_size=400
        )
    source = jb.parquet_batches(
        tmp_path, target="y", weight="w", features=[f"x{f}" for f in range(7)],
        batch_rows=250,
    )  # fmt: skip
    read = list(checked_batches(source))
    np.testing.assert_array_equal(np.concatenate([b.x for b in read]), x)
    np.testing.assert_array_equal(np.concatenate([b.targets for b in read]), y)
    np.testing.assert_array_equal(np.concatenate([b.weights for b in read]), weights)
    assert max(len(b.x) for b in read) <= 250
    with pytest.raises(ValueError, match="must have a column 'z'"):
        jb.parquet_batches(tmp_path, target="z")
    with pytest.raises(ValueError, match="found none"):
        jb.parquet_batches(tmp_path / "nothing*.parquet", target="y")


def test_memory_mapped_arrays_are_read(table, tmp_path):
    x, y, _ = table
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    model, _ = jb.fit(make_stream(mapped, y), num_rounds=2, max_depth=4)
    assert_same_model(model, jb.fit(x, y, num_rounds=2, max_depth=4)[0])


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
    parts = [read_rows(blocks, "y", block) for block in blocks.blocks]
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
    held = []
    monkeypatch.setattr(
        "jboost.streams.block_rounds.BlockReader",
        lambda blocks: held.append(BlockReader(blocks)) or held[-1],
    )
    rows = make_stream(x, y)
    jb.fit(rows, num_rounds=1, max_depth=4)
    (reader,) = held
    size = sum(buffer.nbytes for buffer in reader._buffers)
    assert size == 2 * x.shape[1] * BLOCK_ROWS
    assert size <= rows.plan["blocks"]
    assert sum(rows.plan.values()) <= rows.memory


def test_a_budget_too_small_is_refused_with_what_is_needed(table):
    x, y, _ = table
    rows = make_stream(x, y)
    settings = {"num_rounds": 1, "max_depth": 4}
    rows.memory = 2**16
    with pytest.raises(ValueError, match="memory must be at least") as caught:
        jb.fit(rows, **settings)
    needed = int(str(caught.value).split()[5])
    rows.memory = needed
    jb.fit(rows, **settings)
    rows.memory = needed - 1
    with pytest.raises(ValueError, match="memory must be at least"):
        jb.fit(rows, **settings)


# What goes wrong.


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])


HARM = {
    "checksum": damage,
    "ends": truncate,
    "does not begin": lambda path: path.write_bytes(b""),
    "No such file": Path.unlink,
}


@pytest.mark.parametrize("harm", HARM)
def test_a_bad_block_keeps_the_rounds_before(table, harm, tmp_path):
    x, y, _ = table
    rows = make_stream(x, y, directories=tmp_path)
    settings = {"max_depth": 4, "num_rounds": 4}
    expected, wanted = jb.fit(rows, **{**settings, "num_rounds": 2})
    (path,) = tmp_path.rglob("000003.block")

    def harm_it(round, history, model):
        if round == 1:
            HARM[harm](path)

    with pytest.raises(jb.TrainingError, match=harm) as caught:
        jb.fit(rows, **settings, callbacks=harm_it)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value.__cause__, jb.BlockError)
    assert caught.value.round == 2
    assert_same_model(caught.value.model, expected)
    np.testing.assert_array_equal(caught.value.history.train_loss, wanted.train_loss)


def test_a_block_of_other_data_is_noticed(tmp_path):
    codes = np.ones((2, 300), np.uint8)
    blocks = write_set(tmp_path, codes)
    (tmp_path / "1.block").replace(tmp_path / "2.block")
    reader = BlockReader(blocks._replace(blocks=blocks.blocks[2:]))
    with pytest.raises(jb.BlockError, match="belongs to other data"):
        list(reader.read())


def test_a_full_disk_is_reported_and_leaves_nothing(table, tmp_path, monkeypatch):
    x, y, _ = table

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jboost.streams.blocks.os.replace", full)
    with pytest.raises(jb.BlockError, match=r"block 0 .* No space left on device"):
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
]


@pytest.mark.parametrize(("batches", "message"), BAD_BATCHES)
def test_bad_batches_are_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        jb.fit(jb.stream(batches, memory=MEMORY), num_rounds=1)


@pytest.mark.parametrize("batch", [X, (X,), (X, Y, Y, Y, Y)])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(TypeError, match="source must give batches"):
        jb.fit(jb.stream([batch], memory=MEMORY), num_rounds=1)


def test_batches_without_rows_and_of_one_row_are_fine():
    ones = [(X[i : i + 1], Y[i : i + 1]) for i in range(6)]
    batches = [(X[:0], Y[:0]), *ones, (X[:0], Y[:0])]
    written = jb.stream(batches, memory=MEMORY).prepare(256)
    ((block, codes),) = BlockReader(written.blocks).read()
    np.testing.assert_array_equal(codes.T, jb.apply_bins(jb.fit_bins(X), X))
    np.testing.assert_array_equal(read_rows(written.blocks, "target 0", block), Y)


def test_an_error_of_the_source_says_which_batch():
    def source():
        yield X, Y
        raise OSError("the network is down")

    with pytest.raises(OSError, match="the network is down") as caught:
        jb.fit(jb.stream(source, memory=MEMORY))
    assert "in batch 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("second", "message"),
    [([(X, Y)], "in the first pass and 6 in"), ([(X, Y), (X, Y + 1)], "other targets")],
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
        with pytest.raises(ValueError, match=rf"{name} must be .* where x is a stream"):
            jb.fit(rows, **{name: value})
    with pytest.raises(TypeError, match="can be read again"):
        jb.stream(iter([(x, y)]), memory=MEMORY)
    with pytest.raises(TypeError, match="source must be a callable"):
        jb.stream("data.parquet", memory=MEMORY)
    for bad in ("much", "1.2.3 GB", 1000):
        with pytest.raises(ValueError, match="memory must be a number of bytes"):
            jb.stream([(x, y)], memory=bad)
    with pytest.raises(ValueError, match="must have 7 columns"):
        jb.fit(jb.stream([(x[:, :6], y)], memory=MEMORY, bins=jb.fit_bins(x)))
    with pytest.raises(ValueError, match="y must be given"):
        jb.fit(x)
    with pytest.raises(ValueError, match="must have 3 scores"):
        jb.fit(
            make_stream(x, three_classes(y), offset=y),
            loss=jb.losses.softmax, num_scores=3,
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
