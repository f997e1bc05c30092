# SPDX-License-Identifier: Apache-2.0
"""Prediction by the kernels of native/predict.h and cuda/predict.cu.

Rows are flat memory, on a GPU values by column with categories as codes. Results equal
those of ``jboost.model.scores`` in plain XLA bit for bit. A :class:`ReadyModel` is
checked and prepared on the host, for many calls.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import finalize

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from jboost.kernels.calls import (
    call,
    call_on_host,
    find_function,
    floats,
    ints,
    make_aligned,
)
from jboost.kernels.cuda_launch import SHARED_BYTES, Launch, launch

_THREADS = 128
_SPREAD = 1024  # blocks that find_leaves_on_gpu makes of few rows and many trees
_MISSING_LEFT = 30  # bit of a node's word
_KINDS = {"scores": 0, "stages": 1, "leaves": 2}
_FEW, _OFTEN = 2**12, 16  # cells of few rows; calls before a program is compiled
_CODED_DEPTH = 8  # up to here, trees in heap order take rows in a single step
_SERIAL = 2**17  # steps below which threads cost more than they save


class Trees(NamedTuple):
    """R rounds of S trees; see :class:`jboost.Ensemble`.

    Attributes:
      left_codes: the codes that go left, as bits; None if no feature is categorical.
      left_child: the left child of each node; None for trees in heap order.
    """

    feature: Int32[Array, "R S I"]
    threshold: Float[Array, "R S I"]
    missing_left: Bool[Array, "R S I"]
    left_codes: UInt32[Array, "R S I W"] | None = None
    left_child: Int32[Array, "R S I"] | None = None


def repeat_trees(parts: Any, num_scores: int) -> Any:
    """Returns the parts of trees, [R, S, ...], for each score, [R, K, ...]."""

    def repeat(array):
        return jnp.broadcast_to(array, (len(array), num_scores, *array.shape[2:]))

    return jax.tree.map(repeat, parts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A matrix [N, F] as flat memory.

    Attributes:
      values: the numbers of the matrix; a NumPy array is the memory of the caller.
      by_column: whether the columns lie one after the other; only in NumPy's memory.
      codes: the codes of the categories in the columns ``coded_features``; see
        :class:`jboost.tables.categories.Categories`.
    """

    values: Float[Array, " M"] | Float[np.ndarray, " M"]
    # An int, or a dimension without a size where a program is exported.
    num_rows: Any = field(metadata=dict(static=True))
    num_features: int = field(metadata=dict(static=True))
    by_column: bool = field(default=False, metadata=dict(static=True))
    # Integers; derivatives put something else in their place.
    codes: Shaped[Array, "G V"] | Shaped[np.ndarray, "G V"] | None = None
    coded_features: tuple[int, ...] = field(default=(), metadata=dict(static=True))

    def matrix(self) -> Float[Array, "N F"] | Float[np.ndarray, "N F"]:
        """Returns the matrix, with categories as they came."""
        if self.by_column:
            return self.values.reshape(self.num_features, self.num_rows).T
        return self.values.reshape(self.num_rows, self.num_features)


def as_rows(matrix: Float[Array, "N F"]) -> Rows:
    """Returns a JAX array as rows."""
    num_rows, num_features = matrix.shape
    return Rows(matrix.reshape(-1), num_rows, num_features)


def borrow_rows(matrix: Float[np.ndarray, "N F"]) -> Rows:
    """Rows in the memory of a NumPy array, if there are no gaps in it."""
    by_column = matrix.flags.f_contiguous and not matrix.flags.c_contiguous
    flat = _require(matrix.T if by_column else matrix)
    num_rows, num_features = matrix.shape
    return Rows(flat.reshape(-1), num_rows, num_features, by_column)


def _require(array):
    return np.require(array, requirements=("C", "A"))


def find_scores(rows, trees, leaf_value, init_score, *linear, max_depth, staged):
    """Computes the scores [N, K] on a CPU; after each round [R, N, K] if ``staged``.

    ``linear`` are the slopes of the leaves and the ranges of the features, if any.
    """
    num_rounds, num_scores = leaf_value.shape[:2]
    name, shape = "predict", (rows.num_rows, num_scores)
    if staged:
        name, shape = "staged_predict", (num_rounds, *shape)
    values = leaf_value, init_score, *linear
    return run_trees(call, name, floats(*shape), rows, trees, values, max_depth)


def find_leaves(rows, trees, *, max_depth):
    """Finds the leaf of each row in each tree on a CPU, [N, R, S]."""
    result = ints(rows.num_rows, *trees.feature.shape[:2])
    return run_trees(call, "leaf_indices", result, rows, trees, (), max_depth)


def run_trees(
    run: Callable[..., Any],
    name: str,
    result: Any,
    rows: Rows,
    trees: Trees,
    values: tuple[Any, ...],
    max_depth: int,
    **attributes: int,
) -> Any:
    """Makes a call on rows, trees and other values; missing parts are empty arrays.

    ``run`` is one of the functions of :mod:`jboost.kernels.calls`.
    """
    return run(
        name, result, *_list_operands(rows, trees), values, max_depth=max_depth,
        num_features=rows.num_features, by_column=int(rows.by_column), **attributes,
    )  # fmt: skip


def _list_operands(rows, trees):
    codes, left_codes, left_child = rows.codes, trees.left_codes, trees.left_child
    return (
        rows.values,
        np.zeros((0, 0), np.int32) if codes is None else codes,
        np.array(rows.coded_features, np.int32),
        *trees[:3],
        np.zeros(0, np.uint32) if left_codes is None else left_codes,
        np.zeros(0, np.int32) if left_child is None else left_child,
    )


def find_scores_on_gpu(columns, trees, leaf_value, init_score, *, max_depth, staged):
    """Computes :func:`find_scores` from values by column, [F, N]; see predict.cu."""
    num_features, num_rows = columns.shape
    rounds, num_scores, num_leaves = leaf_value.shape
    num_trees = trees.feature.shape[1]
    shape = (rounds, num_rows, num_scores) if staged else (num_rows, num_scores)
    tile = num_features * _THREADS * 4
    shared = tile <= SHARED_BYTES
    operands, numbers = _read_trees(trees, max_depth)
    num_nodes, *others = numbers
    run = Launch(
        "predict",
        (floats(*shape),),
        (-(-num_rows // _THREADS), num_scores if num_trees == num_scores else 1),
        (
            *(num_rows, num_features, rounds, num_trees, num_scores),
            *(num_nodes, num_leaves, *others, shared, staged),
        ),
        tile if shared else 0,
        _THREADS,
    )
    return launch(run, columns, *operands, leaf_value, init_score)


def find_leaves_on_gpu(columns, trees, *, max_depth):
    """Computes :func:`find_leaves` from values by column, [F, N]; see predict.cu."""
    num_rows = columns.shape[1]
    rounds, num_trees = trees.feature.shape[:2]
    operands, numbers = _read_trees(trees, max_depth)
    blocks = -(-num_rows // _THREADS)
    every = rounds * num_trees
    run = Launch(
        "find_leaves",
        (ints(num_rows, rounds, num_trees),),
        (blocks, max(1, min(every, _SPREAD // max(1, blocks)))),
        (num_rows, every, *numbers),
        threads=_THREADS,
    )
    return launch(run, columns, *operands)


def _read_trees(trees, max_depth):
    """Returns the trees as the kernels take them, and their sizes."""
    word = trees.feature | (trees.missing_left.astype(jnp.int32) << _MISSING_LEFT)
    threshold = jax.lax.bitcast_convert_type(trees.threshold, jnp.int32)
    nodes = jnp.stack([word, threshold], axis=-1)
    sets, left_child = trees.left_codes, trees.left_child
    words = 0 if sets is None else sets.shape[-1]
    linked = left_child is not None
    sets = jnp.zeros(1, jnp.uint32) if sets is None else sets
    left_child = jnp.zeros(1, jnp.int32) if left_child is None else left_child
    sizes = (trees.feature.shape[2], words, max_depth, int(linked))
    return (nodes, sets, left_child), sizes


class ReadyModel:
    """Holds a model that the kernels have checked and prepared, in their memory."""

    def __init__(
        self,
        trees: Trees,
        leaf_value: np.ndarray,
        init_score: np.ndarray,
        rows: Rows,
        max_depth: int,
        *,
        linear: tuple[Any, ...] = (),
        index: np.ndarray | None = None,
        absent: str | None = None,
    ) -> None:
        """Checks the arrays, and keeps them.

        Args:
          init_score: [] or [K].
          rows: an empty matrix with the codes of the model's categories.
          linear: feature, slope and center of the terms of the leaves, and the ranges
            of the features; empty if leaves are constant.
          index: the feature of each column of sparse rows, F or more if unused.
          absent: the cells that sparse rows do not store: "missing" or "zero".
        """
        values = leaf_value, init_score.reshape(-1), *linear
        operands = [_require(a) for a in (*_list_operands(rows, trees), *values)]
        address = call_on_host(
            "open_model", jax.ShapeDtypeStruct((2,), np.uint32), *operands, by_column=0,
            num_features=rows.num_features, max_depth=max_depth,
        ).view(np.int64)[0]  # fmt: skip
        self._address, self._memory = int(address), operands
        self._operand: Any = None  # the address, for compiled programs
        finalize(self, find_function("close_model"), self._address).atexit = False
        self._predict_here = find_function("predict_here")
        num_rounds, num_trees = trees.feature.shape[:2]
        coded = trees.left_child is None and max_depth <= _CODED_DEPTH
        steps = num_trees * (1 if coded else max_depth + 1)
        self._rounds, self._steps = num_rounds, num_rounds * steps
        self._scores = init_score.shape
        self._trees = () if num_trees == 1 else (num_trees,)
        self._index, self._absent_is_missing = index, absent == "missing"

    def run(self, answer: str, rows: Any) -> np.ndarray:
        """Returns scores [N, *K], stages [R, N, *K] or leaves [N, R, *S].

        Args:
          answer: "scores", "stages" or "leaves".
          rows: float32 [N, F], or, if the model has an ``index``, a
            :class:`jboost.tables.sparse.SparseMatrix` sorted by row.
        """
        if self._index is None:
            flags = rows.flags
            by_column = flags.f_contiguous and not flags.c_contiguous
            if not (flags.aligned and (by_column or flags.c_contiguous)):
                rows, by_column = _require(rows), False
            words = _address(rows), by_column, *(0,) * 6
            return self._call(answer, len(rows), words, rows)
        starts, places, values = memory = [_require(a) for a in rows[:3]]
        words = (
            _address(values), 0, _address(starts), _address(places),
            _address(self._index), len(values), len(self._index),
            self._absent_is_missing,
        )  # fmt: skip
        return self._call(answer, rows.shape[0], words, memory)

    def predict_again(self, rows: np.ndarray) -> jax.Array | None:
        """Returns the scores of few rows if their shape is frequent; otherwise None.

        A compiled program is then faster than :meth:`run` and a copy into a JAX array.
        """
        if self._index is not None or rows.size > _FEW:
            return None
        kind = _find_kind(rows.shape, self._scores)
        kind.num_calls += 1
        if kind.num_calls <= _OFTEN:
            return None
        if self._operand is None:
            words = np.array([self._address], np.int64).view(np.uint32)
            self._operand = jax.device_put(words)
        # The program must not outlive the model.
        return kind.program(rows, self._operand).block_until_ready()

    def _call(self, answer, num_rows, words, memory):
        """Makes the call of native/predict_ffi.cc that the words describe."""
        if answer == "leaves":
            shape, dtype = (num_rows, self._rounds, *self._trees), np.int32
        elif answer == "scores":
            shape, dtype = (num_rows, *self._scores), np.float32
        else:
            shape, dtype = (self._rounds, num_rows, *self._scores), np.float32
        few = num_rows * self._steps < _SERIAL
        result = np.empty(shape, dtype) if few else make_aligned(shape, dtype)
        kind = _KINDS[answer]
        words = array("q", (self._address, _address(result), kind, num_rows, *words, 0))
        address = words.buffer_info()[0]
        if few:
            self._predict_here(address)
        else:
            keep = self, words, memory, result
            call_on_host("predict_ready", (), keep=keep, address=address)
        if words[-1] == 1:
            raise ValueError("x must store its entries in rows and columns that exist")
        if words[-1] == 2:
            raise MemoryError("jboost kernel: out of memory")
        return result


class _Kind:
    """The number of calls with rows of one shape, and a program for such rows."""

    def __init__(self, num_rows, scores):
        size = num_rows * math.prod(scores)
        result = floats(size)
        shape = num_rows, *scores
        self.num_calls = 0
        self.program = jax.jit(
            lambda *operands: call("predict_again", result, *operands).reshape(shape)
        )


@lru_cache(maxsize=64)
def _find_kind(shape, scores):
    return _Kind(shape[0], scores)


def _address(memory):
    return memory.__array_interface__["data"][0]
