# SPDX-License-Identifier: Apache-2.0
"""Sources of batches: rows that come some at a time, as often as they are asked for.

In: arrays (memory-mapped ones, too), parquet files, or any callable that gives a new
iterator of batches (x, y), (x, y, sample_weight) or (x, y, sample_weight, offset).
Out: the same batches checked, float32, one after the other.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Shaped

from jboost.entry import checks
from jboost.entry.exchanges import (
    num_processes,
)
from jboost.tables.domains import warn_of_collisions, warn_of_rounding
from jboost.tables.frames import Schema, read_frame, read_values
from jboost.tables.offsets import check_offset
from jboost.tables.targets import check_targets, check_weights

BATCH_ROWS = 65536  # the default size of a batch


class RowBatch(NamedTuple):
    """Some rows; ``targets`` is a pytree, ``offset`` is score by score.

    ``names`` are those of the features, where ``x`` came as a data frame.
    """

    x: Float[np.ndarray, "n F"]
    targets: Any
    weights: Float[np.ndarray, " n"] | None
    offset: Float[np.ndarray, "K n"] | None
    names: tuple[str, ...] | None


def array_batches(
    x: Shaped[np.ndarray, "N F"],
    y: Any,
    *,
    sample_weight: Shaped[np.ndarray, " N"] | None = None,
    offset: Shaped[np.ndarray, "N *K"] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Callable[[], Iterator[Any]]:
    """Batches of arrays that need not be in memory: ``numpy.memmap``, HDF5, zarr.

    Args:
      x: anything with a shape, of which ``x[first:last]`` gives rows.
      y: targets: such an array, or a pytree of such.
      sample_weight: >= 0.
      offset: added to the score.
      batch_rows: how many rows are read at a time.

    Returns:
      A source for :func:`jboost.stream`.

    Raises:
      ValueError: the arrays differ in their number of rows.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(10.0).reshape(5, 2), np.arange(5.0)
      >>> [len(batch[0]) for batch in jb.streams.array_batches(x, y, batch_rows=2)()]
      [2, 2, 1]
    """
    step = checks.check_integer("batch_rows", batch_rows, least=1)
    given = {"y": y, "sample_weight": sample_weight, "offset": offset}
    for name, value in given.items():
        for leaf in jax.tree.leaves(value):
            if np.shape(leaf)[:1] != (x.shape[0],):
                raise ValueError(
                    f"{name} must have {x.shape[0]} rows, as x has, got shape "
                    f"{np.shape(leaf)}"
                )

    def begin():
        for first in range(0, x.shape[0], step):
            rows = slice(first, min(first + step, x.shape[0]))
            yield (
                x[rows],
                *jax.tree.map(
                    lambda array, rows=rows: np.asarray(array[rows]),
                    (y, sample_weight, offset),
                ),
            )

    return begin


def checked_batches(
    source: Callable[[], Iterator[Any]],
    schema: Schema | None = None,
    categorical: bool = False,
) -> Iterator[RowBatch]:
    """Yields the batches of a source, each checked against the first one.

    Batches without rows are skipped, unless several processes train together.

    Args:
      source: returns a new iterator of batches.
      schema: what training knows of the columns; None in training.
      categorical: whether the caller can use categories.

    Raises:
      TypeError, ValueError: a batch is malformed; the message says which.
      Exception: whatever the source raises, with a note that names the batch.
    """
    first, number = None, 0
    batches = _start(source)
    while True:
        try:
            given = next(batches)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"raised by the source of batches, in batch {number}")
            raise
        batch, own = _check_batch(given, number, schema, categorical)
        number += 1
        if batch is None:
            continue
        if first is None:
            first = first_row(batch)
            # A batch without names must not replace what training knows.
            if schema is None:
                schema = own
            elif schema.names is None:
                schema = schema._replace(names=own.names)
            if schema.wide is None:
                warn_of_collisions(given[0])
        _check_alike(first, batch, number - 1)
        yield batch


def hash_rows(batch: RowBatch, checksums: tuple[int, ...]) -> tuple[int, ...]:
    """Updates the checksums of x, targets, weights and offset with a batch.

    They do not depend on how rows are divided into batches.
    """
    offset = None if batch.offset is None else batch.offset.T
    leaves: list[Any] = jax.tree.leaves((batch.x, batch.targets, batch.weights, offset))
    checksums = checksums or (0,) * len(leaves)
    pairs = zip(leaves, checksums, strict=True)
    return tuple(zlib.crc32(np.ascontiguousarray(a).data, start) for a, start in pairs)


def as_source(source: Any) -> Callable[[], Iterator[Any]]:
    """Returns a callable that returns a new iterator, from what the user passed."""
    if callable(source):
        begin: Any = source
        return begin
    if isinstance(source, Iterator):
        raise TypeError(
            "source must be something that can be read again, got an iterator "
            f"({type(source).__name__}), which can be read once; pass the function "
            "that makes it"
        )
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | dict):
        return lambda: iter(source)
    raise TypeError(
        "source must be a callable that gives an iterator of (x, y[, sample_weight[, "
        "offset]]), an iterable of such, or what array_batches or parquet_batches "
        f"give, got {type(source).__name__}"
    )


def _start(source):
    batches = source()
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"source() must give an iterator of batches, got {type(batches).__name__}"
        )
    return iter(batches)


def _check_batch(given, number, schema, categorical):
    """Returns a batch (None if it has no rows), and the schema of its columns."""
    place = f"of batch {number}"
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 4:
        raise TypeError(
            "source must give batches (x, y), (x, y, sample_weight) or (x, y, "
            f"sample_weight, offset), got {type(given).__name__} as batch {number}"
        )
    parts: Any = (*given, None, None)[:4]
    x, y, weights, offset = parts
    if _has_no_rows(x) and num_processes() == 1:
        return None, schema
    # Of a process without rows, an empty batch says what its rows would be.
    frame = read_frame(
        x, f"x {place}", schema=schema, categorical=categorical, least_rows=0
    )
    matrix = np.asarray(frame.matrix)
    size = len(matrix)
    if weights is not None:
        weights = _check_weights(weights, size, f"sample_weight {place}")
    targets = jax.tree.map(
        np.asarray,
        check_targets(y, size, weights, f"y {place}", warn=number == 0),
    )
    if offset is not None:
        offset = read_values(offset, f"offset {place}")
        num_scores = np.shape(offset)[-1] if np.ndim(offset) > 1 else 1
        given, name = offset, f"offset {place}"
        offset = np.asarray(check_offset(given, size, num_scores, name))
        if number == 0:
            warn_of_rounding(given, name)
    return RowBatch(matrix, targets, weights, offset, frame.names), frame.schema


def _has_no_rows(x):
    try:
        shape = x.shape if hasattr(x, "shape") else np.shape(x)
        return len(shape) == 2 and shape[0] == 0
    except Exception:  # of any class; refused later, by name
        return False


def first_row(batch: RowBatch) -> RowBatch:
    """Copies the row that later batches are compared with; the batch can be freed."""

    def copy(array):
        return None if array is None else array[:1].copy()

    return batch._replace(
        x=copy(batch.x),
        targets=jax.tree.map(copy, batch.targets),
        weights=copy(batch.weights),
        offset=None if batch.offset is None else batch.offset[:, :1].copy(),
    )


def _check_weights(weights, size, name):
    array = np.asarray(read_values(weights, name))
    if array.shape == (size,) and not array.any():
        return np.zeros(size, np.float32)  # other batches may hold positive ones
    return np.asarray(check_weights(weights, size, name))


def _check_alike(first, batch, number):
    """Checks that a batch has the columns and kinds of targets of the first one."""
    if batch.x.shape[1] != first.x.shape[1]:
        raise ValueError(
            f"x of batch {number} must have {first.x.shape[1]} columns, as the first "
            f"batch has, got {batch.x.shape[1]}"
        )
    for name in ("weights", "offset"):
        if (getattr(first, name) is None) != (getattr(batch, name) is None):
            word = "sample_weight" if name == "weights" else name
            raise ValueError(
                f"batch {number} must come with {word} if and only if the first batch "
                "does"
            )
    kinds = [
        jax.tree.map(lambda a: (a.shape[1:], a.dtype), each.targets)
        for each in (first, batch)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"y of batch {number} must be like that of the first batch in structure, "
            f"shape of a row and dtype, which are {kinds[0]}, got {kinds[1]}"
        )
    if first.offset is not None and len(first.offset) != len(batch.offset):
        raise ValueError(
            f"offset of batch {number} must have {len(first.offset)} scores, as the "
            f"first batch has, got {len(batch.offset)}"
        )
