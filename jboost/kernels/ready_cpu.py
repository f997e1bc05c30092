# SPDX-License-Identifier: Apache-2.0
"""Models that the CPU kernels have checked and prepared, for many calls.

In: a model in NumPy arrays, rows in NumPy memory. Out: scores, scores by round, leaves;
the same to the bit as those of ``jboost.model.scores`` in plain XLA.
"""

import math
from array import array
from functools import lru_cache
from typing import Any
from weakref import finalize

import jax
import numpy as np

from jboost.kernels.library import call, call_on_host, find_function, make_aligned
from jboost.kernels.predict_cpu import Rows, Trees, list_operands

_KINDS = {"scores": 0, "stages": 1, "leaves": 2}
_FEW, _OFTEN = 2**12, 16  # cells of few rows; calls before a program is compiled
_CODED_DEPTH = 8  # up to here, trees in heap order take rows in a single step
_SERIAL = 2**17  # steps below which threads cost more than they save


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
        index: np.ndarray | None = None,
        absent: str | None = None,
    ) -> None:
        """Checks the arrays, and keeps them.

        Args:
          trees, leaf_value, max_depth: the arguments of ``predict_cpu.predict``.
          init_score: [] or [K].
          rows: an empty matrix with the codes of the model's categories.
          index: the feature of each column of sparse rows, F or more if unused.
          absent: the cells that sparse rows do not store: "missing" or "zero".
        """
        values = leaf_value, init_score.reshape(-1)
        operands = [_require(a) for a in (*list_operands(rows, trees), *values)]
        address = call_on_host(
            "open_model", jax.ShapeDtypeStruct((2,), np.uint32), *operands,
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
        """Makes the call of native/ready.cc that the words describe."""
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
        result = jax.ShapeDtypeStruct((size,), np.float32)
        shape = num_rows, *scores
        self.num_calls = 0
        self.program = jax.jit(
            lambda *operands: call("predict_again", result, *operands).reshape(shape)
        )


@lru_cache(maxsize=64)
def _find_kind(shape, scores):
    return _Kind(shape[0], scores)


def _require(array):
    return np.require(array, requirements=("C", "A"))


def _address(memory):
    return memory.__array_interface__["data"][0]
