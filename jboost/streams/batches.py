# SPDX-License-Identifier: Apache-2.0
"""Sources of batches of rows: arrays, callables that give iterators, Parquet files."""

import glob
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Shaped

from jboost.entry import checks
from jboost.entry.exchanges import num_processes
from jboost.entry.messages import show
from jboost.model.containers import FileError
from jboost.tables.domains import warn_of_collisions, warn_of_rounding
from jboost.tables.frames import Schema, check_offset, read_frame, read_values
from jboost.tables.targets import check_targets, check_weights

BATCH_ROWS = 65536  # the default size of a batch


class RowBatch(NamedTuple):
    """Some rows; ``targets`` is a pytree, ``offset`` has one row for each score.

    ``names`` are the feature names if ``x`` came as a data frame.
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
      x: any object with a shape that returns rows for ``x[first:last]``.
      y: the targets: an object of this kind, or a pytree of such objects.
      sample_weight: row weights, >= 0.
      offset: base scores, added to the scores of the model.
      batch_rows: the number of rows read at a time.

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

    Batches without rows are skipped, unless several processes train together. Errors,
    those of the source included, name the batch.

    Args:
      schema: names and categories of the columns in training; None while training.
    """
    first, number = None, 0
    batches = source()
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"source() must give an iterator of batches, got {type(batches).__name__}"
        )
    batches = iter(batches)
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
            # A batch without names must not erase the names from training.
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
    """Turns the user's ``source`` into a callable that returns a new iterator."""
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
    # On a process without rows, an empty batch shows the columns and the targets.
    frame = read_frame(
        x, f"x {place}", schema=schema, categorical=categorical, least_rows=0
    )
    matrix = np.asarray(frame.matrix)
    size = len(matrix)
    if weights is not None:
        name = f"sample_weight {place}"
        array = np.asarray(read_values(weights, name))
        if array.shape == (size,) and not array.any():
            weights = np.zeros(size, np.float32)  # other batches may hold positive ones
        else:
            weights = np.asarray(check_weights(weights, size, name))
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
    except Exception:  # any class; refused later, by name
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


def parquet_batches(
    paths: Any,
    *,
    target: str | Sequence[str],
    features: Sequence[str] | None = None,
    weight: str | None = None,
    offset: str | Sequence[str] | None = None,
    filter: Any = None,
    share: tuple[int, int] = (0, 1),
    batch_rows: int = BATCH_ROWS,
) -> Callable[[], Iterator[Any]]:
    """Reads Parquet files with pyarrow, at most ``batch_rows`` rows at a time.

    Args:
      paths: a file, a folder (its ``*.parquet``, sorted by name), a pattern, or
        several of these, also at addresses that fsspec knows (``s3://bucket/rows``);
        or a ``pyarrow.dataset.Dataset``; its partition keys are columns, too.
      target: the column of targets; a sequence of K columns gives targets [N, K].
      features: the feature columns, of numbers; nulls are missing values. None: all
        columns without another role.
      weight: the column of sample weights.
      offset: the column of offsets, or one for each score.
      filter: a ``pyarrow.compute.Expression``; other rows are left out. Row groups
        without such rows, by their statistics, are not read.
      share: (r, P) for process r of P that divide the rows: the row groups with their
        middle in the r-th of P equal parts of all rows (before the filter).
      batch_rows: the most rows of a batch.

    Returns:
      A source for :func:`jboost.stream`.

    Raises:
      ImportError: pyarrow is not installed, or fsspec, which addresses need.
      FileError: a file cannot be read, here or later; names the file.
      TypeError, ValueError: there is no such file; a column is not in all files, holds
        no numbers, or is both target and feature.

    Example:
      >>> import tempfile, pandas as pd, jboost as jb
      >>> table = pd.DataFrame(dict(a=range(1000), y=range(1000)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     table.to_parquet(f"{folder}/part.parquet")
      ...     source = jb.streams.parquet_batches(folder, target="y")
      ...     rows = jb.stream(source, memory="256 MiB")
      ...     model, history = jb.fit(rows, num_rounds=3)
      >>> model.num_features
      1
    """
    try:
        import pyarrow.dataset
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "parquet_batches reads with pyarrow, which is not installed: "
            "pip install pyarrow"
        ) from error
    step = checks.check_integer("batch_rows", batch_rows, least=1)
    pieces = _find_pieces(paths, filter, pyarrow)
    used = {name for role in (target, weight, offset) for name in _names(role)}
    if features is None:
        features = [name for name in pieces[0].schema.names if name not in used]
    for name in _names(target):
        if name in features:
            raise ValueError(
                f"features must not contain the target, got {show(name)} as both"
            )
    if len({*features}) < len(features):
        raise ValueError(f"features must be different columns, got {[*features]}")
    columns = [*features, *sorted(used.difference(features))]
    for piece in pieces:
        _check_columns(piece.schema, columns, piece.path, pyarrow.types)
    pieces = _take_share(pieces, share)

    def begin():
        for piece in pieces:
            for part in _read_batches(piece, columns, filter, step, pyarrow):
                yield (
                    part.select([*features]),
                    *(_pick(part, role) for role in (target, weight, offset)),
                )

    return begin


class _Piece(NamedTuple):
    """Row groups of a file, and the columns that its place in a dataset gives."""

    path: str
    filesystem: Any
    sizes: dict[int, int]  # rows by row group
    keys: dict[str, Any]
    schema: Any


def _names(role):
    return () if role is None else (role,) if isinstance(role, str) else tuple(role)


def _find_pieces(paths, filter, pyarrow):
    """Returns the files with the row groups where rows may pass the filter."""
    if isinstance(paths, pyarrow.dataset.Dataset):
        fragments, whole = [*paths.get_fragments(filter)], paths.schema
    else:
        make = pyarrow.dataset.ParquetFileFormat().make_fragment
        fragments, whole = (
            [make(*place) for place in _find_files(paths, pyarrow.fs)],
            None,
        )
    pieces = []
    for each in fragments:
        if not isinstance(each, pyarrow.dataset.ParquetFileFragment):
            raise TypeError(
                f"paths must be a dataset of Parquet files, got one of "
                f"{each.format.default_extname!r}"
            )
        keys = pyarrow.dataset.get_partition_keys(each.partition_expression)
        with _naming(each.path, pyarrow):
            schema = each.physical_schema
            if filter is not None:
                each = each.subset(filter, schema=whole or schema)
            sizes = {group.id: group.num_rows for group in each.row_groups}
        for name, value in keys.items():
            schema = schema.append(pyarrow.field(name, pyarrow.scalar(value).type))
        pieces.append(_Piece(each.path, each.filesystem, sizes, keys, schema))
    if not pieces:
        raise ValueError("paths must name parquet files, got a dataset without any")
    return pieces


def _take_share(pieces, share):
    """Returns the pieces with the row groups of one of several processes."""
    rank, count = (checks.check_integer("share", each, least=0) for each in share)
    if not rank < count:
        raise ValueError(f"share must be (r, P) with 0 <= r < P, got {share}")
    total, end, taken = sum(sum(piece.sizes.values()) for piece in pieces), 0, []
    for piece in pieces:
        own = {}
        for group, size in piece.sizes.items():
            end += size
            if rank <= (end - size / 2) * count / total < rank + 1:
                own[group] = size
        taken.append(piece._replace(sizes=own))
    # Without rows, one file shows the columns and their types.
    return [piece for piece in taken if piece.sizes] or taken[:1]


def _check_columns(schema, columns, path, types):
    """Checks that a file has the columns, and that they hold numbers."""
    for name in columns:
        if name not in schema.names:
            raise ValueError(
                f"{str(path)!r} must have a column {show(name)}, has "
                f"{show(schema.names)}"
            )
    for name in columns:
        kind = schema.field(name).type
        tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
        if not any(test(kind) for test in (*tests, types.is_decimal)):
            raise TypeError(
                f"column {show(name)} of {str(path)!r} must hold numbers, got {kind}; "
                "encode strings and dates as numbers first"
            )


def _read_batches(piece, columns, filter, step, pyarrow):
    # All columns that the filter may name.
    stored = [
        name for name in piece.schema.names
        if name not in piece.keys and (name in columns or name in str(filter))
    ]  # fmt: skip
    with _naming(piece.path, pyarrow):
        file = pyarrow.parquet.ParquetFile(piece.filesystem.open_input_file(piece.path))
    with file:
        parts = file.iter_batches(step, row_groups=[*piece.sizes], columns=stored)
        if not piece.sizes:
            like = pyarrow.RecordBatch.from_pylist([], schema=file.schema_arrow)
            parts = iter([like.select(stored)])
        while True:
            with _naming(piece.path, pyarrow):
                part = next(parts, None)
            if part is None:
                return
            if piece.keys or filter is not None:
                part = pyarrow.Table.from_batches([part])
                for name, value in piece.keys.items():
                    kind = piece.schema.field(name).type
                    column = pyarrow.repeat(pyarrow.scalar(value, kind), len(part))
                    part = part.append_column(name, column)
                part = part if filter is None else part.filter(filter)
            yield part


@contextmanager
def _naming(path, pyarrow):
    """Names the file in errors of reading it."""
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise FileError(f"{str(path)!r} cannot be read as parquet: {error}") from error


def _pick(part, role):
    """Returns the columns of a role: a series, a table, or None."""
    if role is None:
        return None
    return part.column(role) if isinstance(role, str) else part.select([*role])


def _find_files(paths, systems):
    """Returns pairs of a path and its filesystem."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = []
    for path in several:
        text = os.fspath(path)
        if "://" in text:
            found = _find_remote_files(text, systems)
        else:
            if os.path.isdir(text):
                text = os.path.join(glob.escape(text), "*.parquet")
            found = [text] if os.path.isfile(text) else sorted(glob.glob(text))
            found = [(each, systems.LocalFileSystem()) for each in found]
        if not found:
            raise ValueError(
                f"paths must name parquet files, found none at {str(path)!r}"
            )
        files += found
    if not files:
        raise ValueError(f"paths must name parquet files, got none in {show(paths)}")
    return files


def _find_remote_files(address, systems):
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            f"{address!r} is read with fsspec, which is not installed: "
            "pip install fsspec"
        ) from error
    try:
        system, path = fsspec.core.url_to_fs(address)
        if system.isdir(path):
            path = f"{path.rstrip('/')}/*.parquet"
        known = systems.PyFileSystem(systems.FSSpecHandler(system))
        return [(each, known) for each in sorted(system.glob(path))]
    except (ImportError, OSError) as error:
        raise FileError(f"{address!r} cannot be read: {error}") from error
