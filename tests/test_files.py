# SPDX-License-Identifier: Apache-2.0
"""Files: models come back to the bit, and nothing else comes in."""

import gzip
import io
import json
import os
import pickle
import resource
import struct
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import lightgbm
import numpy as np
import pytest
import xgboost
from linear_leaves import add_slopes
from tables import same_bits

import jboost as jb
from jboost.model.containers import Container, read_container, write_container
from jboost.model.ensemble import Links
from jboost.tables.categories import Categories
from jboost.trees.tree import LeafSums

ODD = np.array([0x7FC12345, 0xFFC00001, 0x80000000, 1, 0x7F800000], np.uint32)


def make_heaps(rounds=3, scores=1, depth=2, features=3):
    """Trees in heap order with odd leaf values: NaN payloads, -0, a denormal, inf."""
    random = np.random.default_rng(0)
    shape = (rounds, scores, 2**depth - 1)
    leaves = (rounds, scores, 2**depth)
    values = random.normal(size=leaves).astype(np.float32)
    values.reshape(-1)[:5] = ODD.view(np.float32)
    sums = [random.normal(size=leaves).astype(np.float32) for _ in range(3)]
    return jb.Ensemble(
        feature=jnp.asarray(random.integers(0, features, shape), jnp.int32),
        threshold=jnp.asarray(random.normal(size=shape), jnp.float32),
        missing_left=jnp.asarray(random.random(shape) < 0.5),
        leaf_value=jax.device_put(values),
        init_score=jnp.zeros((scores,) if scores > 1 else (), jnp.float32),
        num_features=features,
        feature_names=("height", "größe", "\ud800"),
        absent="zero",
        sums=LeafSums(*sums, l2=np.ones(shape[:2], np.float32)),  # type: ignore
    )


def make_linked():
    """A tree of five nodes, whose root splits by a set of categories."""
    model = make_heaps()
    inf, nan = np.inf, np.nan

    def nodes(values, dtype):
        return jnp.asarray(np.array(values, dtype)[None, None])

    return replace(
        model,
        feature=nodes([1, 0, 0, 0, 0], np.int32),
        threshold=nodes([nan, inf, 0.5, inf, inf], np.float32),
        missing_left=nodes([0, 1, 0, 1, 1], bool),
        leaf_value=nodes([0, 1, 0, 2, 3], np.float32),
        sums=None,
        left_codes=nodes([[6], [0], [0], [0], [0]], np.uint32),
        categories=Categories(
            codes=np.array([[1, 0, 2, 31]], np.int32),
            features=(1,),
            values=(("a", 1, float("inf"), True),),
        ),
        links=Links(left_child=nodes([1, 1, 3, 3, 4], np.int32), max_depth=2),
    )


def make_tree():
    x = np.random.default_rng(1).normal(size=(40, 3))
    return jb.cart.fit_tree(x, x[:, 0] + x[:, 1], max_depth=3, feature_names=[*"abc"])


MODELS = {
    "heaps": make_heaps(),
    "scores": make_heaps(scores=2),
    "no rounds": jb.truncate(make_heaps(), 0),
    "bare": replace(make_heaps(), sums=None, feature_names=None),
    "linked": make_linked(),
    "linear leaves": add_slopes(make_heaps(scores=2)),
    "tree": make_tree(),
    "bins": jb.fit_bins(np.random.default_rng(1).normal(size=(9, 2)), absent="zero"),
    "codes": jb.fit_bins(np.array([[3.0, 0.5], [1, 2], [1, 4]]), categorical=[0]),
}


def written(model):
    file = io.BytesIO()
    jb.save(model, file)
    return file.getvalue()


def read(content):
    return jb.load(io.BytesIO(content))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    model = MODELS[name]
    for path in (tmp_path / "file", str(tmp_path / "text")):
        jb.save(model, path)
        loaded = jb.load(path)
        assert type(loaded) is type(model)
        same_bits(loaded, model)
        host = isinstance(model, jb.cart.RegressionTree | jb.Bins)
        for leaf in jax.tree.leaves(loaded):
            assert isinstance(leaf, np.ndarray if host else jax.Array)


def test_types_of_categories_stay_what_they_were():
    values = read(written(MODELS["linked"])).categories.values
    assert [type(value) for value in values[0]] == [str, int, float, bool]


def read_by_the_book(content):
    """A reader from the description of the format alone."""
    assert content[:8] == b"\x89JBOOST\n"
    version, checksum, length = struct.unpack("<IIQ", content[8:24])
    assert version == 1
    text = content[24 : 24 + length]
    assert zlib.crc32(text) == checksum
    assert (24 + length) % 64 == 0
    header = json.loads(text)
    arrays, end = {}, 0
    for name, entry in header["arrays"].items():
        assert entry["offset"] == end
        begin = 24 + length + end
        data = content[begin : begin + entry["bytes"]]
        assert zlib.crc32(data) == entry["crc32"]
        dtype = np.dtype(entry["dtype"]).newbyteorder("<")
        arrays[name] = np.frombuffer(data, dtype).reshape(entry["shape"])
        end += -(-entry["bytes"] // 64) * 64
    assert len(content) == 24 + length + end
    return header, arrays


def test_the_format_is_as_described():
    model = make_heaps()
    header, arrays = read_by_the_book(written(model))
    assert header["type"] == "Ensemble"
    assert header["written_by"].startswith("jboost ")
    assert header["fields"]["absent"] == "zero"
    assert tuple(header["fields"]["feature_names"]) == model.feature_names
    assert arrays["leaf_value"].tobytes() == np.asarray(model.leaf_value).tobytes()
    assert model.sums is not None
    assert arrays["sums.l2"].tobytes() == np.asarray(model.sums.l2).tobytes()

    x = np.array([[0.1, -0.5, np.nan], [1.0, 2.0, -1.0]], np.float32)
    for row, score in zip(x, jb.predict(model, x), strict=True):
        total = np.float32(0)
        for tree in range(3):
            node = 0
            while node < 3:
                value = row[arrays["feature"][tree, 0, node]]
                right = value > arrays["threshold"][tree, 0, node]
                if np.isnan(value):
                    right = not arrays["missing_left"][tree, 0, node]
                node = 2 * node + 1 + int(right)
            total += arrays["leaf_value"][tree, 0, node - 3]
        np.testing.assert_array_equal(arrays["init_score"] + total, score)


def test_every_changed_byte_is_noticed():
    content = written(make_linked())
    random = np.random.default_rng(0)
    for place in range(len(content)):
        for change in (1, 128, int(random.integers(1, 256))):
            altered = bytearray(content)
            altered[place] ^= change
            with pytest.raises(jb.FileError):
                read(bytes(altered))


def test_every_missing_or_added_byte_is_noticed():
    content = written(make_linked())
    for size in range(len(content)):
        with pytest.raises(jb.FileError):
            read(content[:size])
    for more in (b"\0", b"\0" * 64, content):
        with pytest.raises(jb.FileError, match="expected"):
            read(content + more)


class Danger:
    def __reduce__(self):
        return os.abort, ()


def foreign_files(folder):
    """(content, what the error says) of files that are not ours."""
    x, y = np.arange(20.0)[:, None], np.arange(20.0)
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(x, y), 1)
    params = {"verbose": -1, "min_data_in_leaf": 1, "num_threads": 1}
    other = lightgbm.train(params, lightgbm.Dataset(x, y), 1)
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, x)
    np.savez(archive, x=x)
    yield pickle.dumps(Danger()), "pickle"
    yield bytes(booster.save_raw("json")), "XGBoost.*jb.interchange.read_xgboost"
    yield bytes(booster.save_raw("ubj")), "XGBoost.*jb.interchange.read_xgboost"
    yield other.model_to_string().encode(), "LightGBM.*jb.interchange.read_lightgbm"
    yield array.getvalue(), "NumPy"
    yield archive.getvalue(), "ZIP"
    yield gzip.compress(written(make_heaps())), "gzip"
    yield b"<!DOCTYPE html>", "web page"
    yield b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"
    yield b"", "empty"
    yield b"something else", "must begin with"


def test_foreign_files_are_recognised(tmp_path):
    path = tmp_path / "model.bin"
    for content, message in foreign_files(tmp_path):
        path.write_bytes(content)
        with pytest.raises(jb.FileError, match=rf"model.bin.*{message}"):
            jb.load(path)


def with_header(change, content):
    """The file with another header, under a right checksum."""
    length = int.from_bytes(content[16:24], "little")
    header = json.loads(content[24 : 24 + length])
    text = json.dumps(change(header) or header).encode()
    text += b" " * (-(24 + len(text)) % 64)
    size, checksum = struct.pack("<Q", len(text)), struct.pack("<I", zlib.crc32(text))
    return content[:12] + checksum + size + text + content[24 + length :]


def claim(**entries):
    return lambda header: header["arrays"]["feature"].update(entries)


@pytest.mark.parametrize(
    "change",
    [
        claim(shape=[10_000_000_000], bytes=40_000_000_000),
        claim(shape=[10_000_000_000]),
        claim(bytes=-4),
        claim(shape=[-3, 1, -3]),
        claim(shape=[2**62, 2**62], bytes=0),
        claim(shape="all"),
        claim(shape=[True, 1, 9]),
        claim(shape=[0] * 40, bytes=0),
        claim(dtype="object"),
        claim(dtype="float128"),
        claim(dtype=["int32"]),
        claim(offset=-64),
        claim(crc32=None),
        claim(more=1),
        lambda header: header["arrays"].update(feature=1),
        lambda header: header.update(type=None),
        lambda header: header.pop("fields"),
        lambda header: [header],
    ],
)
def test_claims_are_tested_before_memory_is_taken(change):
    content = with_header(change, written(make_heaps()))
    tracemalloc.start()
    try:
        with pytest.raises(jb.FileError):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_claimed_header_takes_no_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\x89JBOOST\n" + struct.pack("<IIQ", 1, 0, 10**10) + bytes(76))
    tracemalloc.start()
    try:
        with pytest.raises(jb.FileError, match=r"76 .*10000"):
            jb.load(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def edited(model, arrays=(), fields=()):
    """A file under right checksums whose contents were changed."""
    container = read_container(io.BytesIO(written(model)))
    new = {**container.arrays, **dict(arrays)}
    new = {name: array for name, array in new.items() if array is not None}
    file = io.BytesIO()
    write_container(
        Container(container.type, {**container.fields, **dict(fields)}, new), file
    )
    return file.getvalue()


def changed(model, name, *pairs):
    """An array with other values at some places."""
    container = read_container(io.BytesIO(written(model)))
    array = container.arrays[name].copy()
    for place, value in pairs:
        array.reshape(-1)[place] = value
    return {name: array}


HEAPS, LINKED, LINES, TREE, BINS, CODES = (
    MODELS[name]
    for name in ("bare", "linked", "linear leaves", "tree", "bins", "codes")
)
INVALID = {
    "a feature beyond": (HEAPS, changed(HEAPS, "feature", (2, 3)), {}, "feature"),
    "a feature before": (HEAPS, changed(HEAPS, "feature", (0, -1)), {}, "feature"),
    "no number": (HEAPS, changed(HEAPS, "threshold", (1, np.nan)), {}, "threshold"),
    "no heap": (HEAPS, dict(leaf_value=np.zeros((3, 1, 5), "f")), {}, "heap order"),
    "rounds": (HEAPS, dict(leaf_value=np.zeros((2, 1, 4), "f")), {}, "R = 3"),
    "an axis": (HEAPS, dict(leaf_value=np.zeros((3, 4), "f")), {}, "axes"),
    "a type": (HEAPS, dict(leaf_value=np.zeros((3, 1, 4))), {}, "float32"),
    "scores": (HEAPS, dict(init_score=np.zeros(2, "f")), {}, "init_score|K = 1"),
    "gone": (HEAPS, dict(threshold=None), {}, "'threshold'.* missing"),
    "unknown": (HEAPS, dict(colour=np.zeros(1, "f")), {}, "'colour'.* unknown"),
    "a part": (HEAPS, {"sums.l2": np.zeros((3, 1), "f")}, {}, "sums.*missing"),
    "a field": (HEAPS, {}, dict(colour=1), "'colour'.* unknown"),
    "a version": (HEAPS, {}, dict(format_version=2), "format_version.*2"),
    "few features": (HEAPS, {}, dict(num_features=1), "feature"),
    "true features": (HEAPS, {}, dict(num_features=True), "num_features"),
    "names": (HEAPS, {}, dict(feature_names=["a"]), "feature_names"),
    "absent": (HEAPS, {}, dict(absent="gone"), "absent"),
    "an object": (HEAPS, {}, dict(absent={"float": "1"}), "field"),
    "a cycle": (LINKED, changed(LINKED, "links.left_child", (2, 0)), {}, "one parent"),
    "shared": (LINKED, changed(LINKED, "links.left_child", (2, 1)), {}, "one parent"),
    "beyond": (LINKED, changed(LINKED, "links.left_child", (2, 4)), {}, "left_child"),
    "before": (LINKED, changed(LINKED, "links.left_child", (2, -1)), {}, "left_child"),
    "no leaf": (LINKED, changed(LINKED, "threshold", (4, 1.0)), {}, "left_child"),
    "no stay": (LINKED, changed(LINKED, "missing_left", (4, False)), {}, "left_child"),
    "shallow": (LINKED, {}, {"links.max_depth": 1}, "max_depth"),
    "endless": (LINKED, {}, {"links.max_depth": 2**31}, "max_depth"),
    "a code": (LINKED, changed(LINKED, "categories.codes", (0, 32)), {}, "codes"),
    "no codes": (LINKED, dict(left_codes=None), {}, "threshold"),
    "no set": (LINKED, changed(LINKED, "feature", (0, 2)), {}, "threshold"),
    "a place": (LINKED, {}, {"categories.features": [3]}, "categories.features"),
    "values": (LINKED, {}, {"categories.values": [[1] * 5]}, "categories.values"),
    "few values": (LINKED, {}, {"categories.values": [["a"]]}, "categories.values"),
    "no value": (LINKED, {}, {"categories.values": [[["a"]] * 4]}, "categories.values"),
    "many features": (HEAPS, {}, dict(num_features=2 * 10**9), "num_features"),
    "a term": (LINES, changed(LINES, "slopes.feature", (5, 3)), {}, "slopes.feature"),
    "a high term": (
        LINES,
        changed(LINES, "slopes.feature", (5, 2**31 - 1)),
        {},
        "slopes.feature",
    ),
    "no ranges": (LINES, dict(ranges=None), {}, "slopes must come with ranges"),
    "few ranges": (LINES, dict(ranges=np.zeros((2, 2), "f")), {}, "number of ranges"),
    "no centers": (LINES, {"slopes.center": None}, {}, "slopes.center.* missing"),
    "a loop": (TREE, changed(TREE, "left", (1, 1)), {}, "level by level"),
    "outside": (TREE, changed(TREE, "left", (0, 99)), {}, "level by level"),
    "a column": (TREE, changed(TREE, "feature", (0, 3)), {}, "feature"),
    "no end": (BINS, changed(BINS, "thresholds", (-1, 1.0)), {}, "inf"),
    "bins' codes": (CODES, changed(CODES, "categories.codes", (0, -1)), {}, "codes"),
    "no order": (BINS, changed(BINS, "thresholds", (0, np.nan)), {}, "ascend"),
}


@pytest.mark.parametrize("case", INVALID)
def test_models_that_would_lead_astray_are_refused(case):
    model, arrays, fields, message = INVALID[case]
    with pytest.raises(jb.FileError, match=f"written by jboost .*({message})"):
        read(edited(model, arrays, fields))


def test_a_later_version_or_type_is_named():
    content = bytearray(written(HEAPS))
    content[8] = 7
    with pytest.raises(jb.FileError, match=r"version 7 .*reads version 1"):
        read(bytes(content))
    other = with_header(lambda header: header.update(type="Forest"), written(HEAPS))
    with pytest.raises(jb.FileError, match=r"written by jboost .*type.*'Forest'"):
        read(other)


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"model .*dict"):
        jb.save({}, tmp_path / "file")  # type: ignore
    with pytest.raises(TypeError, match="pair"):
        jb.save((HEAPS, None), tmp_path / "file")  # type: ignore
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda model: jb.save(model, tmp_path / "file"))(HEAPS)
    many = jax.tree.map(lambda array: array[None], HEAPS)
    with pytest.raises(ValueError, match="feature must have axes"):
        jb.save(many, tmp_path / "file")
    with pytest.raises(TypeError, match="binary"):
        jb.load(io.StringIO("text"))
    with pytest.raises(FileNotFoundError):
        jb.load(tmp_path / "nowhere")
    assert not [*tmp_path.iterdir()]


def fail(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["fsync", "replace", "limit"])
def test_a_failed_write_leaves_the_old_file_alone(name, tmp_path, monkeypatch):
    path = tmp_path / "model"
    jb.save(HEAPS, path)
    before = path.read_bytes()
    big = replace(TREE, value=np.zeros(TREE.value.shape))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == "limit":  # as a full disk: the write itself fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    else:
        monkeypatch.setattr(os, name, fail)
    try:
        with pytest.raises(OSError):
            jb.save(big, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
    jb.save(big, path)
    same_bits(jb.load(path), big)


def test_what_is_written_is_on_the_disk_before_it_is_named(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, n=name, r=real: (calls.append(n), r(*a))[1]
        )
    jb.save(HEAPS, tmp_path / "model")
    assert calls == ["fsync", "replace", "fsync"]  # the file, and then its folder


def test_permissions_and_links_are_those_of_a_plain_write(tmp_path):
    path, link = tmp_path / "model", tmp_path / "link"
    old = os.umask(0o027)
    try:
        jb.save(HEAPS, path)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        link.symlink_to(path.name)
        jb.save(TREE, link)
    finally:
        os.umask(old)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o604
    assert isinstance(jb.load(path), jb.cart.RegressionTree)
    jb.save(HEAPS, "/dev/null")
    assert not Path("/dev/null").is_file()
