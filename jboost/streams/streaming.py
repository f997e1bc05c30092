# SPDX-License-Identifier: Apache-2.0
"""Data larger than memory: from a source of batches to blocks of codes on disk.

In: batches of rows, which can be read again. Out: a Stream, which ``fit`` takes in
place of x and y. A first pass over the batches sketches the quantiles of every
feature; a second one writes codes, targets and weights to files, which training
then reads instead of the source.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jboost.boosting.rounds import Data
from jboost.codes.binning import apply_bins, has_missing
from jboost.codes.bins import Bins
from jboost.codes.codes import DenseCodes
from jboost.entry import checks
from jboost.kernels.binning_cpu import code_dtype
from jboost.numerics.padding import padded_size
from jboost.sketches.binning import bins_from_sketch
from jboost.sketches.sketch import make_sketch, update_sketch
from jboost.streams.batches import (
    Batch,
    as_source,
    checked_batches,
    first_row,
    hash_rows,
)
from jboost.streams.blocks import (
    NUM_BUFFERS,
    Block,
    BlockSet,
    Folders,
    read_rows,
    write_block,
)
from jboost.streams.heap import trim_heap
from jboost.tables.frames import RowSource, Schema
from jboost.training.rows import Rows

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LEAST_MEMORY = 1 << 16
_MOST_BLOCK_ROWS = 1 << 18
_BLOCK_SHARE = 1 / 8  # of the budget is for blocks in memory
_CHUNK = 16384  # rows; blocks of whole chunks are summed fastest
_PIECE = 16384  # rows that are binned at a time
_PIECE_CELLS = 1 << 22  # in such a piece at most
_ENTRY_BYTES = 28  # of a sketch

Names = tuple[str, ...] | None


class Table(NamedTuple):
    """What was written.

    Attributes:
      blocks: the files.
      folders: remove the files when they are forgotten.
      bins: thresholds of the codes.
      names: of the features, where the batches are data frames.
      structure: the pytree of targets.
      weighted: whether the batches came with weights.
      num_offsets: scores of the offset; 0 without one.
      max_bins: what the thresholds were made for; None if they were given.
    """

    blocks: BlockSet
    folders: Folders
    bins: Bins
    names: tuple[str, ...] | None
    structure: Any
    weighted: bool
    num_offsets: int
    max_bins: int | None


class Pass(NamedTuple):
    """What a pass over the source saw; see :func:`jboost.streams.batches.hash_rows`."""

    num_rows: int
    checksums: tuple[int, ...]


class Stream(RowSource):
    """Rows on disk, to be trained on; see :func:`stream`.

    Attributes:
      memory: the budget in bytes; may be set to another one.
      plan: after ``fit``, how many bytes of it are used for what.
      source: gives the batches.
    """

    def __init__(self, source, memory, directories, bins, block_rows):
        self.memory = memory
        self.plan: dict[str, int] = {}
        self.source: Callable[[], Iterator[Any]] = source
        self._directories: Sequence[str | os.PathLike[str]] | None = directories
        self._bins: Bins | None = bins
        self._block_rows: int | None = block_rows
        self._table: Table | None = None

    def batches(
        self, schema: Schema, *, categorical: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields the checked rows of each batch to predict, and their offset."""
        for batch in checked_batches(self.source, schema, categorical):
            offset = batch.offset
            if offset is not None:
                offset = offset[0] if len(offset) == 1 else offset.T
            yield batch.x, offset

    @property
    def memory(self) -> int:
        """The budget in bytes."""
        return self._memory

    @memory.setter
    def memory(self, value: int | str):
        self._memory = _as_bytes(value)

    @property
    def disk_bytes(self) -> int:
        """What the files take; 0 before they are written."""
        return 0 if self._table is None else self._table.blocks.num_bytes

    def prepare(
        self,
        max_bins: int,
        progress: bool = False,
        check: Callable[[int, Names], None] = lambda num_features, names: None,
    ) -> Table:
        """Makes the passes over the source, unless blocks are there already.

        Args:
          check: is called with the number of features of the first batch and their
            names; may refuse them.

        Raises:
          BlockError: files cannot be written.
          TypeError, ValueError: batches are not such, or differ between passes.
        """
        wanted = None if self._bins is not None else max_bins
        if self._table is None or self._table.max_bins != wanted:
            self._table = None  # removes its files
            seen, bins = None, self._bins
            if bins is None:
                seen, bins = _sketch(
                    self.source, max_bins, self.memory, progress, check
                )
            self._table = _write(self, bins, wanted, seen, progress, check)
        return self._table

    def close(self) -> None:
        """Removes the files; they are written again when they are needed."""
        self._table = None


def stream(
    source: Any,
    *,
    memory: int | str,
    directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    bins: Bins | None = None,
    block_rows: int | None = None,
) -> Stream:
    """Trains on more rows than memory holds: pass the result to ``fit`` as x.

    The codes of the features (a byte per value, or less) go to disk and are read
    once for every level of a tree. In memory stay a few numbers for each row: target,
    weight, score, derivatives; 60 to 90 bytes in all for one score, by loss, and about
    60 more for each further score. With the same thresholds (``bins``) the model is the
    same, bit for bit, as that of ``fit`` on arrays; in plain XLA, which compiles the
    parts of a round apart, the last bits of leaf values may differ.

    :func:`jboost.predict` takes streams, too, and works batch by batch. All other
    functions need rows in memory and refuse streams.

    Args:
      source: a callable that gives a new iterator of batches (x, y), (x, y,
        sample_weight) or (x, y, sample_weight, offset) each time; a list of such; or
        what :func:`array_batches` or :func:`parquet_batches` give. It is read twice
        (once, if ``bins`` are given), and must give the same rows in the same order;
        checksums of both passes are compared. Where x are data frames, the model
        keeps the names of their columns.
      memory: the most that jboost may hold at a time, "512 MiB" or a number of bytes,
        beside the interpreter, the compiler and its programs (20 to 120 MiB, whatever
        the number of rows), and the source's own batches. Freed memory is returned to
        the system. ``fit`` refuses to train with less than it needs, and says how much
        that is.
      directories: where block files go, in turn, if several (disks) are given; the
        system's folder for temporary files if none is. They are removed with the
        stream, at the end of the process, and on SIGTERM and SIGHUP unless the program
        handles these itself; SIGKILL leaves folders ``jboost-blocks-*`` behind.
      bins: thresholds from :func:`fit_bins` or :func:`bins_from_sketch`; else a
        sketch of all rows finds them.
      block_rows: rows of a block; by default as many as an eighth of the budget
        allows, at most 262,144.

    Returns:
      A Stream: ``jb.fit(stream, loss=...)``. Several calls share its files.

    Raises:
      TypeError, ValueError: for bad arguments.

    Example:
      >>> import numpy as np, jboost as jb
      >>> def batches():
      ...     for seed in range(4):
      ...         x = np.random.default_rng(seed).normal(size=(100, 3))
      ...         yield x, x[:, 0] + x[:, 1] ** 2
      >>> rows = jb.stream(batches, memory="64 MiB")
      >>> model, history = jb.fit(rows, num_rounds=3, max_depth=3)
      >>> bool(history.train_loss[-1] < history.train_loss[0])
      True
    """
    places = directories
    if isinstance(places, str | os.PathLike):
        places = (places,)
    for place in places:
        if not isinstance(place, str | os.PathLike):
            raise TypeError(f"directories must be paths, got {place!r}")
    if bins is not None and not isinstance(bins, Bins):
        raise TypeError(f"bins must be Bins or None, got {type(bins).__name__}")
    if block_rows is not None:
        block_rows = checks.check_integer("block_rows", block_rows, least=1)
    return Stream(as_source(source), memory, tuple(places), bins, block_rows)


def load_rows(table: Table, num_scores: int, padded: bool) -> Rows:
    """What is kept in memory of each row; there are no codes in it.

    As :func:`jboost.training.rows.make_rows`, padding repeats row 0 at weight 0.
    """
    if table.num_offsets not in (0, num_scores):
        raise ValueError(
            f"offset of the batches must have {num_scores} scores, as num_scores "
            f"says, got {table.num_offsets}"
        )
    size = table.blocks.num_rows
    total = padded_size(size) if padded else size

    def load(name):
        whole = None
        for block in table.blocks.blocks:
            part = read_rows(table.blocks, name, block)
            if whole is None:
                whole = np.empty((total, *part.shape[1:]), part.dtype)
            whole[block.first_row : block.first_row + len(part)] = part
        assert whole is not None
        whole[size:] = whole[:1]
        return jax.device_put(whole)

    leaves = [load(f"target {i}") for i in range(table.structure.num_leaves)]
    weights = np.ones(total, np.float32)
    if table.weighted:
        weights = np.array(load("weight"))
    weights[size:] = 0
    scores = np.zeros((num_scores, total), np.float32)
    if table.num_offsets:
        scores = np.ascontiguousarray(np.asarray(load("offset")).T)
    data = Data(
        codes=DenseCodes(jax.device_put(np.zeros((0, total), np.uint8))),
        targets=jax.tree.unflatten(table.structure, leaves),
        weights=jax.device_put(weights),
    )
    return Rows(data, jax.device_put(scores), size)


def _sketch(source, max_bins, memory, progress, check):
    """What one pass saw, and thresholds from it."""
    sketch, num_rows, checksums = None, 0, ()
    eps = min(1 / 64, 1 / (8 * max_bins))  # an eighth of the share of a bin
    with _bar("sketching", progress) as bar:
        for batch in checked_batches(source):
            if sketch is None:
                check(batch.x.shape[1], batch.names)
                sketch = make_sketch(batch.x.shape[1], eps=eps)
            sketch = update_sketch(sketch, batch.x, batch.weights)
            held = _count_sketch_bytes(sketch)
            if held > memory:
                raise ValueError(
                    f"memory must hold the sketch of {sketch.num_features} features, "
                    f"which takes {as_text(held)} after {num_rows + len(batch.x)} "
                    f"rows, got {as_text(memory)}; ask for fewer max_bins, which make "
                    "it smaller, or pass bins"
                )
            checksums = hash_rows(batch, checksums)
            num_rows += len(batch.x)
            trim_heap(batch.x.nbytes)
            bar.update(len(batch.x))
    if sketch is None:
        raise ValueError("source must give at least one row, got none")
    return Pass(num_rows, checksums), bins_from_sketch(sketch, max_bins=max_bins)


def _write(stream, bins, max_bins, seen, progress, check):
    """Writes the blocks in one pass; ``seen`` is what the pass before it saw."""
    writer, num_rows, checksums, weight = None, 0, (), 0.0
    with _bar("writing", progress, seen and seen.num_rows) as bar:
        for batch in checked_batches(stream.source):
            if writer is None and seen is None:
                check(batch.x.shape[1], batch.names)
            if batch.x.shape[1] != bins.num_features:
                raise ValueError(
                    f"x of the batches must have {bins.num_features} columns, as the "
                    f"bins have, got {batch.x.shape[1]}"
                )
            if writer is None:
                writer = _Writer(stream, bins, batch)
            writer.add(batch)
            checksums = hash_rows(batch, checksums)
            num_rows += len(batch.x)
            weight += 1.0 if batch.weights is None else float(np.sum(batch.weights))
            bar.update(len(batch.x))
    if seen is not None:
        _check_same(seen, Pass(num_rows, checksums))
    if writer is None:
        raise ValueError("source must give at least one row, got none")
    if not weight > 0:
        raise ValueError("sample_weight must be positive in some row, got zeros only")
    return writer.finish(max_bins)


def _check_same(first, second):
    """Both passes saw the same rows."""
    expected = "source must give the same rows each time it is read"
    if first.num_rows != second.num_rows:
        raise ValueError(
            f"{expected}, got {first.num_rows} rows in the first pass and "
            f"{second.num_rows} in the second"
        )
    if first.checksums != second.checksums:
        differ = "x" if first.checksums[0] != second.checksums[0] else None
        differ = differ or "targets, weights or offsets"
        raise ValueError(
            f"{expected}, got other {differ} for {second.num_rows} rows in the second "
            "pass"
        )


def _count_sketch_bytes(sketch):
    """What a sketch takes while it is updated: values, and entries old and new."""
    pending = sum(batch.x.nbytes for batch in sketch.pending)
    values = sum(batch.x.size for batch in sketch.pending)
    return pending + 2 * _ENTRY_BYTES * (sketch.num_entries - values)


class _Writer:
    """Gathers rows until a block is full."""

    def __init__(self, stream, bins, first: Batch):
        num_features = bins.num_features
        dtype = np.dtype(code_dtype(bins.num_bins))
        size = stream._block_rows
        if size is None:
            size = _choose_block_rows(num_features, dtype.itemsize, stream.memory)
        self._bins, self._first = bins, first_row(first)
        self._folders = Folders(stream._directories)
        self._identity = uuid.uuid4().hex
        self._blocks: list[Block] = []
        self._codes = np.empty((num_features, size), dtype)
        self._rows = {
            name: np.empty((size, *array.shape[1:]), array.dtype)
            for name, array in _named_rows(self._first).items()
        }
        self._filled, self._missing = 0, False
        self._piece = max(1, min(_PIECE, _PIECE_CELLS // num_features))

    def add(self, batch: Batch):
        """Takes the rows of a batch, piece by piece."""
        self._missing = self._missing or has_missing(batch.x, batch.weights)
        named, done = _named_rows(batch), 0
        while done < len(batch.x):
            room = self._codes.shape[1] - self._filled
            end = min(len(batch.x), done + min(room, self._piece))
            here = slice(self._filled, self._filled + end - done)
            self._codes[:, here] = _find_codes(self._bins, batch.x[done:end])
            for name, array in named.items():
                self._rows[name][here] = array[done:end]
            self._filled, done = here.stop, end
            if self._filled == self._codes.shape[1]:
                self._flush()

    def finish(self, max_bins) -> Table:
        """Writes what is left, and says what was written."""
        if self._filled:
            self._flush()
        offset = self._first.offset
        absent = self._bins.absent or ("missing" if self._missing else None)
        blocks = BlockSet(
            blocks=tuple(self._blocks),
            identity=self._identity,
            num_features=self._codes.shape[0],
            dtype=self._codes.dtype,
        )
        return Table(
            blocks=blocks,
            folders=self._folders,
            bins=replace(self._bins, absent=absent),
            names=self._first.names,
            structure=jax.tree.structure(self._first.targets),
            weighted=self._first.weights is not None,
            num_offsets=0 if offset is None else len(offset),
            max_bins=max_bins,
        )

    def _flush(self):
        number, filled = len(self._blocks), self._filled
        before = sum(block.num_rows for block in self._blocks)
        block = Block(self._folders.place(number), number, before, filled)
        rows = {name: array[:filled] for name, array in self._rows.items()}
        write_block(block, self._identity, self._codes[:, :filled], rows)
        self._blocks.append(block)
        self._filled = 0
        trim_heap(self._codes.nbytes)


def _named_rows(batch):
    """What goes into a block besides codes."""
    leaves = jax.tree.leaves(batch.targets)
    named = {f"target {i}": leaf for i, leaf in enumerate(leaves)}
    if batch.weights is not None:
        named["weight"] = batch.weights
    if batch.offset is not None:
        named["offset"] = batch.offset.T
    return named


def _find_codes(bins, matrix):
    """Codes by feature; rows are padded so that few sizes are compiled."""
    size = len(matrix)
    short = padded_size(size) - size
    padded = np.pad(matrix, ((0, short), (0, 0))) if short else matrix
    return np.asarray(apply_bins(bins, padded))[:size].T


def _choose_block_rows(num_features, itemsize, memory):
    """As many as fit their share of the budget, in whole chunks if they are many."""
    bytes_per_row = (NUM_BUFFERS + 2) * num_features * itemsize
    size = int(memory * _BLOCK_SHARE / bytes_per_row)
    size = max(1, min(size, _MOST_BLOCK_ROWS))
    return size - size % _CHUNK if size >= _CHUNK else size


def _bar(what, progress, total=None):
    return tqdm(total=total, desc=what, disable=not progress, unit="rows")


def _as_bytes(memory):
    expected = f"memory must be a number of bytes >= {_LEAST_MEMORY} or like '512 MiB'"
    if isinstance(memory, bool) or not isinstance(memory, str | int | np.integer):
        raise TypeError(f"{expected}, got {memory!r}")
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        try:
            number = float(found[1]) if found else np.nan
        except ValueError:
            number = np.nan
        if not found or not np.isfinite(number):
            raise ValueError(f"{expected}, got {memory!r}")
        memory = int(number * (1024 if found[3] else 1000) ** _UNITS[found[2]])
    if memory < _LEAST_MEMORY:
        raise ValueError(f"{expected}, got {memory!r}")
    return int(memory)


def as_text(size: int) -> str:
    """Bytes, to be read."""
    return f"{size / (1 << 20):.1f} MiB"
