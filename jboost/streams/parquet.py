# SPDX-License-Identifier: Apache-2.0
"""Batches of rows from parquet files.

In: files, and which of their columns are features, targets, weights and offsets. Out:
a source of batches for :func:`jboost.stream`.
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jboost.entry import checks
from jboost.entry.messages import show
from jboost.model.containers import FileError
from jboost.streams.batches import BATCH_ROWS


def parquet_batches(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    target: str | Sequence[str],
    features: Sequence[str] | None = None,
    weight: str | None = None,
    offset: str | Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Callable[[], Iterator[Any]]:
    """Batches of parquet files, read by pyarrow row group by row group.

    Args:
      paths: a file, a folder (its ``*.parquet``, sorted by name), a pattern, or
        several of these.
      target: the column of targets; several give targets [N, ...].
      features: columns of numbers, nulls being missing values; all other columns if
        not given.
      weight: the column of sample weights.
      offset: the column of offsets, or one for each score.
      batch_rows: the most rows of a batch.

    Returns:
      A source for :func:`jboost.stream`.

    Raises:
      ImportError: pyarrow is not installed.
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
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "parquet_batches reads with pyarrow, which is not installed: "
            "pip install pyarrow"
        ) from error
    step = checks.check_integer("batch_rows", batch_rows, least=1)
    files = _find_files(paths)
    used = {name for role in (target, weight, offset) for name in _names(role)}
    if features is None:
        with _naming(files[0], pyarrow):
            known = parquet.read_schema(files[0]).names
        features = [name for name in known if name not in used]
    _check_features(features, target)
    columns = [*features, *sorted(used.difference(features))]
    for path in files:
        with _naming(path, pyarrow):
            schema = parquet.read_schema(path)
        _check_columns(schema, columns, path, pyarrow.types)

    def begin():
        for path in files:
            for part in _read_parts(path, columns, step, pyarrow):
                yield (
                    part.select([*features]),
                    *(_pick(part, role) for role in (target, weight, offset)),
                )

    return begin


def _names(role):
    return () if role is None else (role,) if isinstance(role, str) else tuple(role)


def _check_features(features, target):
    """Checks that features are different, and that none is a target."""
    for name in _names(target):
        if name in features:
            raise ValueError(
                f"features must not contain the target, got {show(name)} as both"
            )
    if len({*features}) < len(features):
        raise ValueError(f"features must be different columns, got {[*features]}")


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
                "encode "
                "strings and dates as numbers first"
            )


def _read_parts(path, columns, step, pyarrow):
    """Yields the record batches of a file."""
    with _naming(path, pyarrow):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        parts = file.iter_batches(batch_size=step, columns=columns)
        while True:
            with _naming(path, pyarrow):
                part = next(parts, None)
            if part is None:
                return
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


def _find_files(paths):
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = []
    for path in several:
        text = os.fspath(path)
        if os.path.isdir(text):
            text = os.path.join(glob.escape(text), "*.parquet")
        found = [text] if os.path.isfile(text) else sorted(glob.glob(text))
        if not found:
            raise ValueError(
                f"paths must name parquet files, found none at {str(path)!r}"
            )
        files += found
    if not files:
        raise ValueError(f"paths must name parquet files, got none in {show(paths)}")
    return files
