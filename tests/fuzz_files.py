# SPDX-License-Identifier: Apache-2.0
"""Hostile files: what is changed, who reads it, and what must then hold.

Of every kind: files to change, a change that keeps checksums right, and a reader. The
reader raises a FileError, or returns a model that every kernel evaluates alike.
"""

import io
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fuzz_changes as changes
import jax
import lightgbm
import numpy as np
import pandas as pd
import scipy.sparse
import xgboost
from test_files import MODELS, written

import jboost as jb
from jboost.interchange.xgboost_format import write_ubjson

ROWS = 120
OWN_ERRORS = jb.FileError, jb.TrainingError


class Files(NamedTuple):
    """Files of a kind.

    Attributes:
      sources: makes the files to change.
      change: returns the bytes of a changed file.
      read: reads a file; raises one of ``OWN_ERRORS`` if it is bad.
      suffix: of the file's name.
    """

    sources: Callable[[], list[Any]]
    change: Callable[[Any, np.random.Generator], bytes]
    read: Callable[[Path], Any]
    suffix: str = ""

    def draw(self, random: np.random.Generator) -> bytes:
        """Returns a changed file."""
        return self.change(changes.pick(self.sources(), random), random)


# Files of models.


def make_frame():
    random = np.random.default_rng(0)
    words = pd.Categorical.from_codes(random.integers(-1, 3, ROWS), ["u", "v", "w"])
    frame = pd.DataFrame(dict(a=random.normal(size=ROWS), b=words, c=0.5))
    frame["d"] = pd.Categorical(random.integers(0, 9, ROWS))
    return frame, (frame["a"] + 2 * (words == "v") + (frame["d"] == 3)).to_numpy()


def train_xgboost():
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


@cache
def xgboost_documents():
    return [json.loads(model.save_raw("json")) for model in train_xgboost()]


@cache
def xgboost_binaries():
    return [write_ubjson(changes.as_ubjson(d)) for d in xgboost_documents()]


@cache
def lightgbm_texts():
    frame, y = make_frame()
    settings = dict(
        verbose=-1, num_threads=1, num_leaves=5, min_data_in_leaf=5, cat_smooth=1,
        min_data_per_group=1, max_cat_to_onehot=1,
    )  # fmt: skip
    texts = []
    for more in (dict(), dict(objective="multiclass", num_class=3)):
        target = np.digitize(y, [0, 1]) if more else y
        data = lightgbm.Dataset(frame, target)
        texts.append(lightgbm.train(settings | more, data, 2).model_to_string())
    return texts


@cache
def own_files():
    frame, y = make_frame()
    several = np.stack([y, -y, y**2], 1).astype(np.float32)
    run = dict(num_rounds=2, max_depth=2)
    trained = {
        "trained": jb.fit(frame, y, **run)[0],
        "shared": jb.fit(
            frame[["a", "c"]], several, jb.losses.squared_error, num_scores=3,
            share_structure=True, **run,
        )[0],
        "targets": jb.cart.fit_tree(frame[["a", "c"]], several, max_depth=2),
    }  # fmt: skip
    return [written(model) for model in (MODELS | trained).values()]


def change_own(content, random):
    if random.random() < 0.05:
        return changes.change_bytes(content, random)
    return changes.change_container(content, random)


def change_xgboost(document, random):
    text = json.dumps(changes.change_document(document, random))
    if random.random() < 0.1:
        text = changes.change_json(text, random)
    return text.encode("utf-8", "surrogatepass")


def change_lightgbm(text, random):
    return changes.change_text(text, random).encode("utf-8", "replace")


def change_ubjson_document(document, random):
    return write_ubjson(changes.as_ubjson(changes.change_document(document, random)))


# Checkpoints, and blocks of a stream: files that a run reads.


@cache
def small_run():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3)).astype(np.float32)
    y = x[:, 0] + x[:, 1] ** 2
    return dict(
        x=x, y=y, validation=(x[:40], y[:40]), max_depth=2, subsample=0.7, num_rounds=4
    )


@cache
def checkpoints():
    contents = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        for rounds in (2, 4):
            run = small_run() | dict(num_rounds=rounds)
            jb.fit(**run, checkpoint=path, checkpoint_rounds=2)
            contents.append(path.read_bytes())
    return contents


def read_checkpoint(path):
    try:
        return jb.fit(**small_run(), checkpoint=path, checkpoint_rounds=2)[0]
    except ValueError as error:  # of another run, or of fewer rounds
        if str(path) not in str(error):
            raise
        raise jb.FileError(str(error)) from error


class Blocks:
    """A stream whose files are written once, and changed before each run."""

    def __init__(self, width, values, rows=900):
        random = np.random.default_rng(0)
        x = random.normal(size=(rows, width)).astype(np.float32)
        if values:
            x = np.round(values * x)
        y = x[:, 0] + np.abs(x[:, 1])
        source = jb.streams.array_batches(x, y, sample_weight=1 + y % 2)
        self.folder = tempfile.TemporaryDirectory()
        self.stream = jb.stream(
            source, memory="64 MiB", directories=self.folder.name, block_rows=300,
            bins=jb.fit_bins(x, max_bins=512 if rows > 600 else 255),
        )  # fmt: skip
        self.fit()
        self.path = next(Path(self.folder.name).rglob("000001.block"))
        self.content = self.path.read_bytes()

    def fit(self):
        return jb.fit(self.stream, num_rounds=2, max_depth=2, max_bins=255)[0]

    def read(self, content):
        try:
            self.path.write_bytes(content)
            return self.fit()
        except jb.streams.BlockError as error:
            raise jb.FileError(str(error)) from error
        except ValueError as error:  # of hostile targets and weights
            if not str(error).startswith(("y must", "loss must", "sample_weight must")):
                raise
            raise jb.FileError(str(error)) from error
        finally:
            self.path.write_bytes(self.content)


@cache
def block_sets():
    """Codes that are mapped, of one and of two bytes, and codes that are encoded."""
    return [Blocks(20, 0, rows=600), Blocks(20, 0), Blocks(4, 1)]


def change_blocks(number, random):
    content = changes.change_block(block_sets()[number].content, random)
    return bytes([number]) + content


def read_blocks(path):
    content = path.read_bytes()
    return block_sets()[content[0]].read(content[1:])


FILES = {
    "xgboost": Files(xgboost_documents, change_xgboost, jb.interchange.read_xgboost),
    "ubjson": Files(
        xgboost_binaries, changes.change_bytes, jb.interchange.read_xgboost
    ),
    "ubjson document": Files(
        xgboost_documents, change_ubjson_document, jb.interchange.read_xgboost
    ),
    "lightgbm": Files(lightgbm_texts, change_lightgbm, jb.interchange.read_lightgbm),
    "model": Files(own_files, change_own, jb.load),
    "checkpoint": Files(checkpoints, change_own, read_checkpoint),
    "block": Files(lambda: [0, 1, 2], change_blocks, read_blocks),
}


# What must hold of a model, whatever its numbers.


def check_model(model: Any, random: np.random.Generator, thorough: float) -> None:
    """Raises unless all ways to use the model work, and agree.

    Args:
      model: what a reader returned.
      random: chooses the rows.
      thorough: the share of models that XLA and the explanations evaluate, too; they
        compile programs.
    """
    if isinstance(model, jb.Bins):
        _check_bins(model, random, thorough)
        return
    repr(model)
    known = jb.load(io.BytesIO(written(model)))
    assert written(known) == written(model)
    categories = getattr(model, "categories", None)
    if model.num_features > 1000:
        rows = scipy.sparse.csr_array(([1.0], ([0], [0])), (4, model.num_features))
        if categories is None and model.absent is not None:
            _predict(model, rows)
        return
    rows = draw_rows(model, random)
    scores = _predict(model, rows)
    if getattr(model, "absent", None) is not None:
        stored = scipy.sparse.csr_array(np.nan_to_num(rows))
        _predict(model, stored)
    if random.random() >= thorough:
        return
    same = jb.predict(model, rows, implementation="xla")
    np.testing.assert_array_equal(np.asarray(scores), np.asarray(same))
    leaves = jb.leaf_indices(model, rows)
    same = jb.leaf_indices(model, rows, implementation="xla")
    np.testing.assert_array_equal(np.asarray(leaves), np.asarray(same))
    model.nodes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _try(lambda: jb.explanation.trees_to_dataframe(model))
        _try(lambda: jb.feature_importance(model))
        _try(lambda: jb.shap_values(model, rows[:8]))
    if isinstance(model, jb.Ensemble) and model.num_rounds:
        jb.staged_predict(model, rows)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.ubj")
            _try(lambda: jb.interchange.write_xgboost(model, path))


def _try(function):
    """Calls it; a refusal that is a plain error is fine."""
    try:
        return function()
    except (ValueError, TypeError):
        return None


def draw_rows(model, random):
    """Rows of codes, gaps and numbers, near the thresholds of the model, too."""
    shape = (16, model.num_features)
    rows = random.integers(-1, 6, shape).astype(np.float32)
    odd = np.array([np.nan, np.inf, -np.inf, 1e30, -1e-40, 0.5], np.float32)
    threshold = np.asarray(model.threshold).reshape(-1)
    some = np.concatenate([odd, threshold[:64], -threshold[:64]])
    rows = np.where(random.random(shape) < 0.5, random.choice(some, shape), rows)
    if getattr(model, "categories", None) is not None:
        coded = list(model.categories.features)
        codes = random.choice([0, 1, 2, 3, 31, 32, 1000, 2**24 - 1, np.nan], shape)
        rows[:, coded] = codes[:, coded]
    return rows.astype(np.float32)


def _predict(model, rows):
    scores = jb.predict(model, rows)
    K = model.as_ensemble().init_score.shape
    assert scores.shape == (rows.shape[0], *K)
    return scores


def _check_bins(bins, random, thorough):
    shape = (16, bins.num_features)
    if bins.num_features > 1000:
        return
    odd = [np.nan, np.inf, -np.inf, 0.0, 1.0, 1e30, -1e-40]
    rows = random.choice(np.array(odd, np.float32), shape)
    if bins.categories is not None:
        coded = list(bins.categories.features)
        rows[:, coded] = random.integers(0, 9, (16, len(coded)))
    codes = jb.apply_bins(bins, rows)
    assert codes.shape == shape
    if random.random() < thorough:
        same = jax.jit(lambda x: jb.apply_bins(bins, x))(rows)
        np.testing.assert_array_equal(np.asarray(codes), np.asarray(same))
