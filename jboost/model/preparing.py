# SPDX-License-Identifier: Apache-2.0
"""Prepares a model and dense rows for the compiled programs and the kernels.

They are checked, and either ready for the CPU kernels, which need no compilation, or
padded so that nearby sizes share compiled programs.
"""

from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.entry.context import current_implementation
from jboost.kernels.calls import available, default_device
from jboost.kernels.library import may_run
from jboost.kernels.prediction import ReadyModel
from jboost.model.ensemble import (
    Ensemble,
    Links,
    find_sharding,
    map_rounds,
    place,
    take_part,
)
from jboost.model.scores import make_ready
from jboost.model.wide_thresholds import match_wide
from jboost.numerics.arrays import pad_rows, padded_size
from jboost.tables.categories import check_values
from jboost.tables.frames import read_frame, read_offset
from jboost.trees.tree import NO_TERM

_FEW_NODES, _FEW_LEVELS = 64, 8  # smallest sizes of a padded single tree
_FEW_STEPS = 2**20  # rows times trees: one core takes about a millisecond for these


class Task(NamedTuple):
    """A checked and prepared call of a prediction function.

    Attributes:
      model: a ReadyModel for predictions by the kernels, else an Ensemble with only
        the parts that prediction uses; padded if it runs in XLA.
      rows: rows as :meth:`ReadyModel.run` takes them; for XLA, a padded matrix.
      num_rows, num_rounds: numbers without padding.
      size: the number of rows, padding included.
      on_host: whether the kernels read the rows directly, in NumPy memory.
      sharding: the sharding of results that are computed on the host; None for the
        default device.
      from_elsewhere: whether the host computes them for another device.
    """

    model: Ensemble | ReadyModel
    rows: Any
    num_rows: int
    size: int
    num_rounds: int
    on_host: bool = False
    sharding: Any = None
    from_elsewhere: bool = False

    def pad_offset(self, offset: Any, num_scores: int) -> Any:
        """Returns the offset as [size, K]."""
        if offset is None:
            return None
        offset = read_offset(offset, self.num_rows, num_scores)
        pad = jnp.pad if isinstance(offset, Tracer) else np.pad
        return pad(offset, ((0, self.size - self.num_rows), (0, 0)))

    def score_again(self) -> Any:
        """Returns the scores of few rows if their shape is frequent; otherwise None."""
        placed = self.from_elsewhere or self.sharding is not None
        if placed or not isinstance(self.model, ReadyModel):
            return None
        return self.model.predict_again(self.rows)

    def cut(self, result: Any, rows_axis: int, rounds_axis: int | None = None) -> Any:
        """Drops padded rows and rounds; returns a JAX array."""
        if self.on_host:
            return place(np.asarray(result), self.sharding)
        index = [slice(None)] * result.ndim
        index[rows_axis] = slice(self.num_rows)
        if rounds_axis is not None:
            index[rounds_axis] = slice(self.num_rounds)
        return take_part(result, tuple(index), self.sharding)


def prepare(
    model: Ensemble, x: Any, offset: Any = None, *, explain: bool = False
) -> Task:
    """Checks the arguments; the kernels get the rows as they are, XLA gets them padded.

    Args:
      offset: the offset of the rows; all arrays together determine the device.
      explain: whether to keep the sums of the leaves, which explanations need.
    """
    model, wide = match_wide(model, x)
    matrix = _read_matrix(model, x, wide)
    prepared = prepare_model(model, explain)
    if isinstance(matrix, jax.Array) and not isinstance(matrix, Tracer):
        elsewhere = prepared.devices and matrix.devices() != prepared.devices
        matrix = np.asarray(matrix) if elsewhere else matrix
    num_rows, num_rounds = matrix.shape[0], model.num_rounds
    sharding, helps = prepared.find_place(matrix, offset), False
    if sharding is ON_DEVICE and prepared.helps_out(matrix, offset, explain):
        sharding, helps = prepared.sharding, True
    if sharding is not ON_DEVICE:
        ready = prepared.ready or prepared.model
        sizes = num_rows, num_rows, num_rounds
        return Task(ready, np.asarray(matrix), *sizes, True, sharding, helps)
    size = num_rows
    if not isinstance(matrix, Tracer):
        size = padded_size(num_rows)
        matrix = pad_rows(matrix, size)
    model = prepared.padded or _pad_model(prepared.model, explain)
    return Task(model, matrix, num_rows, size, num_rounds)


def _read_matrix(model, x, wide):
    plain = type(x) is np.ndarray and x.dtype == np.float32 and x.ndim == 2
    if plain and x.shape[1]:
        matrix = x
    else:
        known = model.categories is not None
        schema = model.schema._replace(wide=wide)
        matrix = read_frame(
            x, "x", schema=schema, categorical=known, least_rows=0
        ).matrix
    check_columns(model, matrix.shape[1])
    if model.categories is not None:
        features, codes = model.categories.features, model.categories.codes
        check_values(matrix, features, "x", model.feature_names, codes=codes)
    if matrix.size >= 2**31:
        raise ValueError(f"x must have fewer than 2^31 cells, got {matrix.shape=}")
    return matrix


def check_columns(model: Ensemble, num_columns: int) -> None:
    """Checks that rows have as many columns as the model has features."""
    if num_columns != model.num_features:
        raise ValueError(
            f"x must have {model.num_features} columns, as in training, got "
            f"{num_columns}"
        )


ON_DEVICE: Any = object()  # in place of a sharding, for work that XLA does


class PreparedModel(NamedTuple):
    """A model with only the parts that prediction uses.

    Attributes:
      model: the model without names, which would compile another program.
      on_cpu: whether all arrays are on CPU devices and none is traced.
      ready: the model for the CPU kernels; None for explanations, and if it is on
        several devices or the kernels were not built.
      padded: the model as programs take it, if it is kept on another device: padding
        it for each prediction would copy it to the host and back.
      sharding: the sharding of results; None for the default device.
    """

    model: Ensemble
    on_cpu: bool
    ready: ReadyModel | None
    padded: Ensemble | None
    devices: frozenset[Any]
    sharding: Any

    def find_place(self, x: Any, offset: Any) -> Any:
        """Returns the sharding of results of the CPU kernels, or ON_DEVICE.

        The kernels are called at once on arrays of one CPU device.
        """
        device = default_device()
        if device is None or device.platform != "cpu" or not self.on_cpu:
            return ON_DEVICE
        if not may_run() or not self.devices <= {device}:
            return ON_DEVICE
        if offset is None and isinstance(x, np.ndarray):
            return self.sharding
        operands = _find_arrays(x, offset)
        if any(isinstance(array, Tracer) for array in operands):
            return ON_DEVICE
        if any(array.devices() - {device} for array in operands):
            return ON_DEVICE
        return self.sharding or find_sharding(operands)

    def helps_out(self, x: Any, offset: Any, explain: bool) -> bool:
        """Returns whether the CPU kernels compute results for another device.

        They do for explanations, which have no other kernels, and for predictions that
        take less time than to start a program there. Rows are NumPy arrays.
        """
        device = default_device()
        if device is None or device.platform == "cpu" or len(self.devices) > 1:
            return False
        on_host = isinstance(x, np.ndarray) and not _find_arrays(offset)
        if not on_host or not available() or current_implementation() is not None:
            return False
        steps = x.shape[0] * self.model.num_rounds * self.model.feature.shape[1]
        return explain or (self.ready is not None and steps <= _FEW_STEPS)


_prepared: WeakKeyDictionary[Ensemble, PreparedModel] = WeakKeyDictionary()


def prepare_model(model: Ensemble, explain: bool = False) -> PreparedModel:
    """Prepares a model for prediction, or with the sums of its leaves to ``explain``.

    Models for prediction are kept, because preparing takes longer than predicting.
    """
    known = None if explain else _prepared.get(model)
    if known is not None:
        return known
    sums = model.sums if explain else None
    small = replace(
        model, sums=sums, feature_names=None, absent=None, wide_threshold=None
    )
    if small.categories is not None:
        small = replace(small, categories=replace(small.categories, values=None))
    leaves, arrays = jax.tree.leaves(small), _find_arrays(small)
    if any(isinstance(array, Tracer) for array in arrays):
        return PreparedModel(small, False, None, None, frozenset(), None)
    devices = frozenset(device for array in arrays for device in array.devices())
    on_cpu = all(device.platform == "cpu" for device in devices)
    together = on_cpu or len(devices) == 1
    ready = make_ready(small) if together and available() and not explain else None
    sharding, padded = find_sharding(arrays), None
    # NumPy arrays may change, so a model that holds them is prepared for each call.
    keep = not explain and len(arrays) == len(leaves)
    if keep and not on_cpu:
        padded = jax.device_put(_pad_model(small, explain), sharding)
    prepared = PreparedModel(small, on_cpu, ready, padded, devices, sharding)
    if keep:
        _prepared[model] = prepared
    return prepared


def _pad_model(model, explain):
    """Pads a model to one of few sizes, so that models share compiled programs."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(model)):
        return model
    if model.num_rounds == 1 and model.links is not None and not explain:
        return _pad_nodes(model)
    short = padded_size(model.num_rounds, least=8) - model.num_rounds

    def pad(array):
        array = np.asarray(array)
        return np.pad(array, ((0, short), *((0, 0),) * (array.ndim - 1)))

    return _pad_arrays(pad, model)


def _pad_arrays(pad, model):
    """Applies ``pad``, which adds zeros; linear terms that it adds have no feature."""
    padded: Any = map_rounds(pad, model)
    if model.slopes is None:
        return padded
    terms = pad(np.asarray(model.slopes.feature) - NO_TERM) + NO_TERM
    return replace(padded, slopes=padded.slopes._replace(feature=terms))


def _pad_nodes(model):
    """Adds nodes that no row reaches to a single linked tree, and levels below it."""
    links = model.links
    num_nodes = max(_FEW_NODES, 1 << (model.feature.shape[2] - 1).bit_length())

    def pad(array) -> Any:
        array = np.asarray(array)
        widths = [(0, 0)] * array.ndim
        widths[2] = (0, num_nodes - array.shape[2])
        return np.pad(array, widths)

    # A row stays in its leaf, so that more levels change nothing.
    depth = padded_size(links.max_depth, least=_FEW_LEVELS)
    return replace(
        _pad_arrays(pad, replace(model, links=None)),
        links=Links(pad(links.left_child), depth),
    )


def _find_arrays(*operands):
    return [leaf for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.Array)]
