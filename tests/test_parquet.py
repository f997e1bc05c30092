# SPDX-License-Identifier: Apache-2.0
"""Parquet files as rows of a stream: roles, filters, shares, addresses, datasets."""

import importlib.util

import numpy as np
import pytest

import jboost as jb
from jboost.streams.batches import checked_batches

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
NAMES = ("a", "b", "c")


def test_rows_weights_and_names_are_read(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    x[::7, 1] = np.nan
    y, weights = x[:, 0], rng.integers(1, 5, 300).astype(np.float32)
    halves = np.array_split(np.arange(300), 2)
    for number, rows in enumerate(halves):
        columns = {"y": y[rows], "w": weights[rows], "unused": np.zeros(len(rows))}
        for f, name in enumerate(NAMES):
            columns[name] = pyarrow.array(x[rows, f], from_pandas=True)
        parquet.write_table(
            pyarrow.table(columns), tmp_path / f"{number}.parquet", row_group_size=40
        )
    source = jb.streams.parquet_batches(
        tmp_path, target="y", weight="w", features=NAMES, batch_rows=25
    )
    read = list(checked_batches(source))
    np.testing.assert_array_equal(np.concatenate([b.x for b in read]), x)
    np.testing.assert_array_equal(np.concatenate([b.targets for b in read]), y)
    np.testing.assert_array_equal(np.concatenate([b.weights for b in read]), weights)
    assert max(len(b.x) for b in read) <= 25
    assert read[0].names == NAMES


@pytest.fixture
def files(tmp_path):
    """Two files with a column of targets, one of large integers, and one of text."""
    columns = {
        "a": 2**24 + np.arange(100), "s": ["text"] * 100, "y": np.arange(100.0),
        "z": np.arange(100.0), "flag": [True, None] * 50,
    }  # fmt: skip
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for path in paths:
        parquet.write_table(pyarrow.table(columns), path)
    return paths


BAD_COLUMNS_OF_FILES = [
    (dict(target="x"), ValueError, "must have a column 'x'"),
    (dict(target="y", features=["z", "y"]), ValueError, "features .* 'y' as both"),
    (dict(target=["y", "z"], features=["z"]), ValueError, "features .* 'z' as both"),
    (dict(target="y", features=["z", "z"]), ValueError, "features must be different"),
    (dict(target="y"), TypeError, "column 's' of .*1.parquet.* must hold numbers"),
    (dict(target="s", features=["z"]), TypeError, "column 's' of .*1.parquet"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_COLUMNS_OF_FILES)
def test_bad_columns_of_files_are_refused(files, options, error, message):
    with pytest.raises(error, match=message):
        jb.streams.parquet_batches(files, **options)


def test_files_that_cannot_be_read_are_named(files, tmp_path):
    features = dict(target="y", features=["z", "flag"])
    for paths in ([], tmp_path / "nothing*.parquet"):
        with pytest.raises(ValueError, match=r"paths .*parquet"):
            jb.streams.parquet_batches(paths, **features)
    good = files[1].read_bytes()
    source = jb.streams.parquet_batches(files, **features)
    assert sum(len(batch.x) for batch in checked_batches(source)) == 200
    footer = int.from_bytes(good[-8:-4], "little") + 8
    files[1].write_bytes(b"PAR1".ljust(len(good) - footer) + good[-footer:])
    with pytest.raises(jb.FileError, match=r"2\.parquet"):
        list(checked_batches(source))
    files[1].write_bytes(good[:-20])
    for read in (
        lambda: list(source()),
        lambda: jb.streams.parquet_batches(files, **features),
    ):
        with pytest.raises(jb.FileError, match=r"2\.parquet"):
            read()
    other = tmp_path / "other" / "3.parquet"
    other.parent.mkdir()
    parquet.write_table(parquet.read_table(files[0]).drop(["z"]), other)
    with pytest.raises(ValueError, match=r"3\.parquet'.*'z'"):
        jb.streams.parquet_batches([files[0], other], **features)


def test_large_integers_of_files_are_warned_of(files):
    source = jb.streams.parquet_batches(files, target="y", features=["z", "a"])
    with pytest.warns(UserWarning, match=r"column 'a' of x.*100"):
        list(checked_batches(source))


# Shares, filters, addresses, datasets.


@pytest.fixture(scope="module")
def rows():
    """1000 rows; "year" has two values, y is the number of a row."""
    rng = np.random.default_rng(0)
    years = 2020 + np.arange(1000) // 500
    return pyarrow.table(dict(a=rng.normal(size=1000), year=years, y=np.arange(1000.0)))


@pytest.fixture(scope="module")
def folder(rows, tmp_path_factory):
    """Three files of 16 row groups."""
    path = tmp_path_factory.mktemp("rows")
    for number, (first, last) in enumerate([(0, 300), (300, 310), (310, 1000)]):
        part = rows.slice(first, last - first)
        parquet.write_table(part, path / f"{number}.parquet", row_group_size=70)
    return path


def read_targets(paths, **options):
    source = jb.streams.parquet_batches(paths, target="y", **options)
    return np.concatenate([np.asarray(y) for _, y, *_ in source()])


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_shares_are_all_rows_in_their_order(folder, count):
    parts = [read_targets(folder, share=(rank, count)) for rank in range(count)]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(1000.0))
    # A row group belongs to one share: none is off by more than half of one each side.
    assert max(map(len, parts)) <= 1000 / count + 70


def test_a_share_without_rows_shows_the_columns(folder):
    shares = [
        jb.streams.parquet_batches(folder, target="y", share=(rank, 40))
        for rank in range(40)
    ]
    batches = [next(source()) for source in shares]
    assert {tuple(x.schema.names) for x, *_ in batches} == {("a", "year")}
    assert min(len(y) for _, y, *_ in batches) == 0


def test_a_bad_share_is_refused(folder):
    for share in [(2, 2), (-1, 2), (0.5, 2)]:
        with pytest.raises((TypeError, ValueError), match="share must"):
            jb.streams.parquet_batches(folder, target="y", share=share)


@pytest.mark.parametrize("features", [None, ["a"]])
def test_filters_leave_rows_out(folder, rows, features):
    """A filter may name a column without a role."""
    field = pyarrow.dataset.field
    chosen = (field("year") > 2020) & (field("a") > 0)
    found = read_targets(folder, features=features, filter=chosen)
    np.testing.assert_array_equal(found, rows.filter(chosen)["y"])


def test_row_groups_without_rows_of_the_filter_are_not_read(folder):
    """Damage to the first file is not noticed where no row of it can pass."""
    later = pyarrow.dataset.field("y") >= 310
    path = folder / "0.parquet"
    good = path.read_bytes()
    source = jb.streams.parquet_batches(folder, target="y", filter=later)
    path.write_bytes(b"damage")
    try:
        assert sum(len(y) for _, y, *_ in source()) == 690
    finally:
        path.write_bytes(good)


def test_addresses_of_fsspec_are_read(folder):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(folder), "/kept", recursive=True)
    for paths in (
        "memory://kept", "memory://kept/*.parquet",
        [f"memory://kept/{number}.parquet" for number in range(3)],
    ):  # fmt: skip
        np.testing.assert_array_equal(read_targets(paths), np.arange(1000.0))
    with pytest.raises(ValueError, match=r"paths must .* found none at 'memory://no'"):
        read_targets("memory://no")
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(jb.FileError, match=r"'s3://rows' cannot be read: .*s3fs"):
            read_targets("s3://rows")


def test_partition_keys_of_datasets_are_columns(rows, tmp_path):
    from pyarrow import dataset

    dataset.write_dataset(
        rows, tmp_path, format="parquet", partitioning=["year"],
        partitioning_flavor="hive",
    )  # fmt: skip
    whole = dataset.dataset(tmp_path, partitioning="hive")
    x, *_ = next(jb.streams.parquet_batches(whole, target="y")())
    assert x.column_names == ["a", "year"]
    later = dataset.field("year") == 2021
    assert [*read_targets(whole, filter=later)] == [*range(500, 1000)]
    dataset.write_dataset(rows, tmp_path / "other", format="feather")
    with pytest.raises(TypeError, match="must be a dataset of Parquet files"):
        read_targets(dataset.dataset(tmp_path / "other", format="feather"))
