# SPDX-License-Identifier: Apache-2.0
"""Damaged files: a reader gives a model that predicts, or a FileError.

Files of every kind are changed at random, under right checksums: numbers become
hostile, parts are left out, repeated and put in other places. No change may take long,
or take much memory. ``experiments/fuzz.py`` runs the same changes for hours.
"""

import copy
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from fuzz_estimators import ESTIMATORS
from fuzz_files import FILES, lightgbm_texts, xgboost_documents
from fuzzing import run_case, run_file

from jboost.interchange.linked import build_ensemble
from jboost.model.nodes import LEAF, Nodes

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


def assert_refused(target, content, folder):
    """With a FileError, and little memory."""
    assert not run_file(target, content, folder, most_bytes=2**26)


@pytest.mark.parametrize("name", GREEDY)
def test_small_xgboost_files_cannot_ask_for_much(name, tmp_path):
    document = xgboost_documents()[0]
    for path, value in GREEDY[name].items():
        document = set_in(document, f"learner.{path}", value)
    content = json.dumps(document).encode()
    assert_refused("xgboost", content, tmp_path)


def test_small_ubjson_cannot_ask_for_much(tmp_path):
    for mark in b"ZTFi[{S":
        size = b"L" + (2**40).to_bytes(8, "big")
        content = b"{U\x01a[$" + bytes([mark]) + b"#" + size + b"}"
        assert_refused("xgboost", content, tmp_path)


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
def test_small_lightgbm_files_cannot_ask_for_much(key, values, tmp_path):
    lines = lightgbm_texts()[0].splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{key}="))
    lines[place] = f"{key}={values}"
    content = "\n".join(lines).encode()
    assert_refused("lightgbm", content, tmp_path)


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


FEW = dict(block=8, checkpoint=6)  # each of these trains


@pytest.mark.parametrize("target", [*FILES, *ESTIMATORS])
def test_damaged_models_are_refused_or_predict(target, tmp_path):
    count = FEW.get(target, 30)
    accepted = sum(run_case(target, number, tmp_path) for number in range(count))
    assert accepted < count  # most are refused


# Cases that once ended otherwise, in tests/data/fuzz.json.

FOUND = json.loads((Path(__file__).parent / "data" / "fuzz.json").read_text())


@pytest.mark.parametrize("target", FOUND)
def test_cases_that_were_faults(target, tmp_path):
    for number in FOUND[target]:
        run_case(target, number, tmp_path)
