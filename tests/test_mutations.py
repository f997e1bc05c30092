# SPDX-License-Identifier: Apache-2.0
"""Damaged files: a reader gives a model that predicts, or a FileError.

Files of every kind are changed at random: numbers become hostile, parts are left out,
repeated and put in other places. No change may take long, or take much memory.
"""

import copy
import io
import json
import time
import tracemalloc
import warnings
import zlib
from dataclasses import replace

import lightgbm
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import xgboost
from test_files import MODELS, written

import jboost as jb
from jboost.interchange.linked import build_ensemble
from jboost.interchange.ubjson import write_ubjson
from jboost.model.containers import Container, read_container, write_container
from jboost.model.nodes import LEAF, Nodes

ROWS = 120
MOST_SECONDS, MOST_BYTES = 10, 400 * 2**20
HOSTILE = (
    -1, 0, 1, 2, 7, 31, 2**16, 2**24 - 1, 2**24, 10**9, 2**31 - 1, 2**31, 2**40,
    2**63 - 1, 2**63, 10**30, -(2**31), -(2**63), 0.5, 1e39, 1e308, float("nan"),
    float("inf"), True, None, "", "x", "\ud800", [], {}, [0], ["c"] * 200, {"a": 1},
)  # fmt: skip


# Places in nested lists and dicts, and changes there.


def list_places(value, found=None):
    """(container, key) of all that a document holds."""
    found = [] if found is None else found
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        found.append((value, key))
        if isinstance(item, dict | list):
            list_places(item, found)
    return found


def change_document(document, random):
    """Changes one to three places; all names are as likely as each other."""
    document = copy.deepcopy(document)
    for _ in range(random.integers(1, 4)):
        places = list_places(document)
        names = sorted({str(key) for _, key in places if isinstance(key, str)})
        if not names:
            break
        name = names[random.integers(len(names))]
        places = [place for place in places if str(place[1]) == name]
        holder, key = places[random.integers(len(places))]
        if isinstance(holder[key], list) and holder[key] and random.random() < 0.7:
            holder, key = holder[key], int(random.integers(len(holder[key])))
        change_place(holder, key, random)
    return document


def change_place(holder, key, random):
    kind, old = random.integers(6), holder[key]
    hostile = copy.deepcopy(HOSTILE[random.integers(len(HOSTILE))])
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(old, list):
        holder[key] = old * 2
    elif kind == 2 and isinstance(old, list):
        holder[key] = old[: len(old) // 2]
    elif kind == 3 and isinstance(holder, list):
        holder[key] = holder[random.integers(len(holder))]
    elif isinstance(old, str) and old[:1].isdecimal() and not isinstance(hostile, list):
        holder[key] = str(hostile)
    else:
        holder[key] = hostile


def change_bytes(content, random):
    content = bytearray(content)
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(len(content)))
        size = int(random.integers(1, 9))
        piece = random.choice(list(b"{}[]#$iUIlLdDSCZTF\0\1\x7f\x80\xff"), size)
        kind = random.integers(4)
        if kind == 0:
            del content[place : place + size]
        elif kind == 1:
            content[place : place + size] = piece.astype(np.uint8).tobytes()
        elif kind == 2:
            content[place:place] = piece.astype(np.uint8).tobytes()
        else:
            content[place:] = content[place : place + 2**12]
    return bytes(content)


# Files to change.


def make_frame():
    random = np.random.default_rng(0)
    words = pd.Categorical.from_codes(random.integers(-1, 3, ROWS), ["u", "v", "w"])
    frame = pd.DataFrame(dict(a=random.normal(size=ROWS), b=words, c=0.5))
    frame["d"] = pd.Categorical(random.integers(0, 9, ROWS))
    return frame, (frame["a"] + 2 * (words == "v") + (frame["d"] == 3)).to_numpy()


def xgboost_documents():
    frame, y = make_frame()
    settings = dict(max_depth=3, nthread=1, max_cat_to_onehot=1)
    data = xgboost.DMatrix(frame, y, enable_categorical=True)
    yield xgboost.train(settings, data, 2)
    yield xgboost.train(settings | dict(booster="dart", rate_drop=0.5), data, 2)
    data = xgboost.DMatrix(frame, np.digitize(y, [0, 1]), enable_categorical=True)
    classes = dict(objective="multi:softprob", num_class=3)
    yield xgboost.train(settings | classes, data, 1)
    data = xgboost.DMatrix(frame[["a", "c"]], np.stack([y, -y], 1))
    several = dict(multi_strategy="multi_output_tree")
    yield xgboost.train(settings | several, data, 1)


def lightgbm_texts():
    frame, y = make_frame()
    settings = dict(
        verbose=-1, num_threads=1, num_leaves=5, min_data_in_leaf=5, cat_smooth=1,
        min_data_per_group=1, max_cat_to_onehot=1,
    )  # fmt: skip
    for more in (dict(), dict(objective="multiclass", num_class=3)):
        target = np.digitize(y, [0, 1]) if more else y
        data = lightgbm.Dataset(frame, target)
        text = lightgbm.train(settings | more, data, 2).model_to_string()
        yield text


def change_text(text, random):
    """Of a line "key=1 2 3" one number, or the whole; or lines."""
    lines = text.splitlines()
    for _ in range(random.integers(1, 4)):
        end = lines.index("end of trees") if "end of trees" in lines else len(lines)
        names = sorted({line.partition("=")[0] for line in lines[:end]})
        if not names:
            break
        name = names[random.integers(len(names))]
        places = [i for i, line in enumerate(lines) if line.partition("=")[0] == name]
        place = places[random.integers(len(places))]
        if random.random() < 0.1:
            place = int(random.integers(len(lines)))
        key, sign, values = lines[place].partition("=")
        mark = ":" if key == "feature_infos" and random.random() < 0.5 else " "
        values = values.split(mark)
        kind, one = random.integers(6), int(random.integers(len(values)))
        hostile = HOSTILE[random.integers(len(HOSTILE))]
        if kind == 0:
            del lines[place]
            continue
        if kind == 1:
            lines.insert(place, lines[random.integers(len(lines))])
            continue
        if kind == 2:
            del values[one]
        elif kind == 3:
            values.append(values[one])
        else:
            values[one] = str(hostile)
        lines[place] = key + sign + mark.join(values)
    return "\n".join(lines) + "\n"


def change_container(content, random):
    """The file with other fields, or numbers in arrays, under right checksums."""
    container = read_container(io.BytesIO(content))
    fields, arrays = container.fields, dict(container.arrays)
    if random.random() < 0.5:
        fields = change_document(fields, random)
    for _ in range(random.integers(0, 3)):
        name = [*arrays][random.integers(len(arrays))]
        arrays[name] = change_array(arrays[name], random)
    file = io.BytesIO()
    write_container(Container(container.type, json_safe(fields), arrays), file)
    return change_header(file.getvalue(), random)


def change_array(array, random):
    array = array.copy()
    if random.random() < 0.3 and array.ndim:
        axis = int(random.integers(array.ndim))
        count = int(random.choice([0, 1, array.shape[axis] * 2]))
        return np.resize(array, (*array.shape[:axis], count, *array.shape[axis + 1 :]))
    if array.size:
        hostile = [v for v in HOSTILE if isinstance(v, int | float)]
        value = hostile[random.integers(len(hostile))]
        if array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            value = np.nan_to_num(float(value))
            value = min(max(int(value), int(limits.min)), int(limits.max))
        with np.errstate(over="ignore"):
            array.reshape(-1)[random.integers(array.size)] = value
    return array


def change_header(content, random):
    """Sometimes also what the header says of arrays."""
    if random.random() < 0.7:
        return content
    length = int.from_bytes(content[16:24], "little")
    header = change_document(json.loads(content[24 : 24 + length]), random)
    text = json.dumps(json_safe(header)).encode("ascii")
    text += b" " * (-(24 + len(text)) % 64)
    checksum = zlib.crc32(text).to_bytes(4, "little")
    size = len(text).to_bytes(8, "little")
    return content[:12] + checksum + size + text + content[24 + length :]


def json_safe(value):
    """What JSON has no word for, as the format writes it."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": repr(value)}
    return value


def as_ubjson(value):
    """Lists of numbers as arrays, as XGBoost writes them."""
    if isinstance(value, dict):
        return {key: as_ubjson(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if kinds == {int} and all(abs(item) < 2**63 for item in value):
            return np.array(value, np.int64)
        if kinds and kinds <= {int, float}:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numbers beyond float32
                return np.array(value, np.float32)
        return [as_ubjson(item) for item in value]
    if isinstance(value, float):
        return as_ubjson([value])
    if value is None or (isinstance(value, int) and abs(value) >= 2**63):
        return {}
    return value if not isinstance(value, str) else value.replace("\ud800", "?")


def make_files():
    """By kind: the files, how to change one, and who reads it."""
    documents = [json.loads(b.save_raw("json")) for b in xgboost_documents()]
    encode = lambda document: json.dumps(document).encode()  # noqa: E731
    binary = [write_ubjson(as_ubjson(document)) for document in documents]
    models = MODELS | {"trained": jb.fit(*make_frame(), num_rounds=2, max_depth=2)[0]}
    return {
        "json": (
            documents,
            lambda d, r: encode(change_document(d, r)),
            jb.interchange.read_xgboost,
        ),
        "ubjson": (binary, change_bytes, jb.interchange.read_xgboost),
        "ubjson documents": (
            documents,
            lambda d, r: write_ubjson(as_ubjson(change_document(d, r))),
            jb.interchange.read_xgboost,
        ),
        "lightgbm": (
            [*lightgbm_texts()],
            lambda text, r: change_text(text, r).encode("utf-8", "replace"),
            jb.interchange.read_lightgbm,
        ),
        "own": ([written(m) for m in models.values()], change_container, jb.load),
    }


@pytest.fixture(scope="module")
def files():
    return make_files()


# What must hold of every changed file.


def check_file(content, read, path, most=MOST_BYTES):
    """Reads it; returns whether it holds a model. Raises for all but a FileError."""
    path.write_bytes(content)
    tracemalloc.start()
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = read(path)
        check_prediction(model)
    except jb.FileError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.process_time() - began < MOST_SECONDS
        assert peak < most
    return True


def check_prediction(model):
    """Rows of codes, numbers and gaps have scores."""
    if not isinstance(model, jb.Ensemble):
        return
    x = np.array([[0.0], [1], [2], [np.nan]], np.float32)
    if model.num_features > 1000:
        x = scipy.sparse.csr_array(([1.0], ([0], [0])), (4, model.num_features))
        if model.categories is not None:
            return
    else:
        x = np.tile(x, model.num_features)
    scores = jb.predict(replace(model, feature_names=None), x)
    assert scores.shape == (4, *model.init_score.shape)


# Small files that ask for much: of every kind one place with a number.


def set_in(document, path, value):
    """The document with another value behind keys with points between."""
    document = copy.deepcopy(document)
    *holders, last = path.split(".")
    holder = document
    for key in holders:
        holder = holder[int(key) if key.isdecimal() else key]
    holder[int(last) if isinstance(holder, list) else last] = value
    return document


MODEL = "gradient_booster.model"
GREEDY = {
    "num_class": {"learner_model_param.num_class": "1000000000"},
    "num_target": {"learner_model_param.num_target": "1000000000"},
    "no trees": {
        "learner_model_param.num_class": "1000000000", f"{MODEL}.trees": [],
    },
    "num_feature": {
        "learner_model_param.num_feature": "2000000000", "feature_names": [],
        "feature_types": [],
    },
    "categories": {
        "learner_model_param.num_feature": "200", "feature_names": [],
        "feature_types": ["c"] * 200, f"{MODEL}.trees.0.categories.0": 2**24 - 1,
    },
    "vectors": {f"{MODEL}.trees.0.tree_param.size_leaf_vector": "1000000000"},
    "names": {"feature_names": ["a"]},
    "types": {"feature_types": ["c"]},
    "no categories": {
        f"{MODEL}.trees.0.{name}": []
        for name in ("categories", "categories_nodes", "categories_segments",
                     "categories_sizes")
    },
    "encoding": {f"{MODEL}.cats.enc.1.offsets": [0, 2**31 - 1]},
    "shared categories": {
        f"{MODEL}.trees.0.categories_segments": [0, 0],
        f"{MODEL}.trees.0.categories_sizes": [2**40, 2**40],
    },
}  # fmt: skip


def assert_refused(content, read, path):
    """With a FileError, and little memory."""
    assert not check_file(content, read, path, most=2**26)


@pytest.mark.parametrize("name", GREEDY)
def test_small_xgboost_files_cannot_ask_for_much(files, name, tmp_path):
    document = files["json"][0][0]
    for path, value in GREEDY[name].items():
        document = set_in(document, f"learner.{path}", value)
    content = json.dumps(document).encode()
    assert_refused(content, jb.interchange.read_xgboost, tmp_path / "model")


def test_small_ubjson_cannot_ask_for_much(tmp_path):
    for mark in b"ZTFi[{S":
        size = b"L" + (2**40).to_bytes(8, "big")
        content = b"{U\x01a[$" + bytes([mark]) + b"#" + size + b"}"
        assert_refused(content, jb.interchange.read_xgboost, tmp_path / "model")


@pytest.mark.parametrize(
    "key, values",
    [
        ("max_feature_idx", "2000000000"),
        ("max_feature_idx", str(2**63)),
        ("num_tree_per_iteration", "1000000000"),
        ("num_tree_per_iteration", "0"),
        ("feature_infos", "none " * 9),
        ("split_feature", str(2**32)),
        ("cat_boundaries", "0 4294967295"),
        ("left_child", str(2**32 - 1)),
        ("threshold", "nan nan nan nan"),
    ],
)
def test_small_lightgbm_files_cannot_ask_for_much(files, key, values, tmp_path):
    lines = files["lightgbm"][0][0].splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{key}="))
    lines[place] = f"{key}={values}"
    content = "\n".join(lines).encode()
    assert_refused(content, jb.interchange.read_lightgbm, tmp_path / "model")


def make_chain(depth):
    """A tree whose left children are leaves."""
    inner = np.arange(2 * depth + 1) % 2 == 0
    inner[-1] = False
    node = np.arange(len(inner), dtype=np.int32)
    zeros = np.zeros(len(inner), np.float32)
    left, right = (np.where(inner, node + i, LEAF).astype(np.int32) for i in (1, 2))
    return Nodes(left, right, 0 * node, zeros, inner, zeros, zeros, zeros, zeros)


def test_one_large_tree_among_many_small_ones_does_not_take_gigabytes():
    """All trees of a model have the shape of the largest."""
    trees = [make_chain(4000)] + [make_chain(1)] * 1500
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="times their own size"):
            build_ensemble(
                trees,
                init_score=np.zeros(1, np.float32),
                num_features=1,
                absent="missing",
            )
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    few = build_ensemble(
        trees[:9], init_score=np.zeros(1, np.float32), num_features=1, absent="missing"
    )
    assert few.max_depth == 4000


KINDS = ("json", "ubjson", "ubjson documents", "lightgbm", "own")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_predict(files, kind, tmp_path):
    sources, change, read = files[kind]
    random, count = np.random.default_rng(0), 0
    for _ in range(60):
        source = sources[random.integers(len(sources))]
        count += check_file(change(source, random), read, tmp_path / "file")
    assert count < 60  # most are refused
