# SPDX-License-Identifier: Apache-2.0
"""Predicts for sparse rows: by the CPU kernels, or a dense block at a time.

A block holds only the columns that the model uses, so that it stays small however wide
the matrix is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.kernels.prediction import ReadyModel
from jboost.model.ensemble import Ensemble, find_used_features
from jboost.model.preparing import ON_DEVICE, Task, check_columns, prepare_model
from jboost.model.scores import make_ready
from jboost.model.wide_thresholds import match_wide
from jboost.numerics.arrays import padded_size
from jboost.tables.categories import Categories
from jboost.tables.frames import read_offset
from jboost.tables.sparse import check_gaps, read_rows

_BLOCK_CELLS = 2**21  # numbers in a block: 8 MiB


_ready: WeakKeyDictionary[Ensemble, ReadyModel] = WeakKeyDictionary()


def prepare_sparse(model: Ensemble, x: Any, offset: Any = None) -> Task | None:
    """Returns the checked task for the CPU kernels; None where XLA predicts."""
    model, wide = match_wide(model, x)
    prepared = prepare_model(model)
    sharding = prepared.find_place(None, offset)
    if sharding is ON_DEVICE:
        return None
    matrix = _read_sparse(model, x, wide)
    ready = _ready.get(model)
    if ready is None:
        small, index, _ = keep_used_features(prepared.model)
        ready = make_ready(small, index=index, absent=model.absent)
        if prepare_model(model) is prepared:  # the model is kept
            _ready[model] = ready
    sizes = matrix.shape[0], matrix.shape[0], model.num_rounds
    return Task(ready, matrix, *sizes, True, sharding)


def run_in_blocks(
    run: Callable[..., Any], model: Ensemble, x: Any, offset: Any, rows_axis: int
) -> Array:
    """Calls ``run(model, block)`` for blocks of the rows of a sparse matrix.

    Args:
      run: takes a model on the used columns, dense rows and, if ``offset`` is given,
        ``offset=`` of these rows.
      rows_axis: the axis of the rows in the results of ``run``.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, offset))):
        raise TypeError(
            "model and offset must not be traced where x is sparse, because its rows "
            "are read on the host; inside jit, vmap or grad pass a dense x"
        )
    model, wide = match_wide(model, x)
    matrix = _read_sparse(model, x, wide)
    num_rows = matrix.shape[0]
    if offset is not None:
        offset = read_offset(offset, num_rows, model.num_scores)
        offset = offset[:, 0] if model.num_scores == 1 else offset
    model, index, width = keep_used_features(model)
    size = padded_size(min(num_rows, max(1, _BLOCK_CELLS // width)))
    results = []
    for block, rows in _dense_blocks(matrix, model, index, size):
        count = rows.stop - rows.start
        if offset is None:
            result = run(model, block)
        else:
            part = offset[rows]
            rest = np.zeros((size - count, *part.shape[1:]), np.float32)
            result = run(model, block, offset=np.concatenate([part, rest]))
        # Copied to NumPy at once: the block may only be overwritten after it was read.
        cut = partial(np.take, indices=np.arange(count), axis=rows_axis)
        results.append(
            jax.tree.map(lambda array, cut=cut: cut(np.asarray(array)), result)
        )
    join = partial(np.concatenate, axis=rows_axis)
    return jax.tree.map(lambda *parts: jax.device_put(join(parts)), *results)


def _read_sparse(model, x, wide):
    matrix = read_rows(x, "x", least_rows=0, wide=wide)
    check_columns(model, matrix.shape[1])
    check_gaps(model.absent, matrix, "x")
    return matrix


def _dense_blocks(matrix, model, index, size):
    """Yields one buffer [size, width] again and again, filled with the next rows."""
    width = model.num_features
    fill = np.float32(np.nan if model.absent == "missing" else 0)
    block = np.full((size, width), fill)
    num_rows = matrix.shape[0]
    for first in range(0, max(num_rows, 1), size):
        count = min(size, num_rows - first)
        starts = matrix.starts[first : first + count + 1]
        entries = slice(starts[0], starts[-1])
        rows = np.repeat(np.arange(count), np.diff(starts))
        column = index[matrix.places[entries]]
        used = column < width
        cells = rows[used], column[used]
        block[cells] = matrix.values[entries][used]
        yield block, slice(first, first + count)
        block[cells] = fill  # only stored entries are reset, not the whole block


def keep_used_features(model: Ensemble) -> tuple[Ensemble, np.ndarray, int]:
    """Returns the model on the features that it uses only.

    Also returns the new index of each feature, which for unused features is the number
    of columns; and that number, padded so that models share compiled programs.
    """
    feature, split = np.asarray(model.feature), np.asarray(model.is_split)
    terms = None if model.slopes is None else np.asarray(model.slopes.feature)
    used = find_used_features(model)
    width = padded_size(len(used), least=8)
    index = np.full(model.num_features, width, np.int32)
    index[used] = np.arange(len(used))
    # Where a node is not split, all rows go left, whatever the feature is.
    feature = jax.device_put(np.where(split, index[feature], 0))
    categories = model.categories
    if categories is not None:
        kept = np.isin(categories.features, used)
        categories = Categories(
            codes=np.asarray(categories.codes)[kept],
            features=tuple(index[np.array(categories.features)[kept]].tolist()),
        )
    if terms is not None and model.slopes is not None:
        kept = np.where(terms < 0, -1, index[terms])
        ranges = np.zeros((width, 2), np.float32)
        ranges[: len(used)] = np.asarray(model.ranges)[used]
        slopes = model.slopes._replace(feature=jax.device_put(kept))
        model = replace(model, slopes=slopes, ranges=jax.device_put(ranges))
    model = replace(
        model, feature=feature, num_features=width, feature_names=None, sums=None,
        categories=categories, wide_threshold=None,
    )  # fmt: skip
    return model, index, width
