# SPDX-License-Identifier: Apache-2.0
"""Writes the rows of a source to blocks on disk, as codes.

The source is read twice: a first pass over the batches sketches the quantiles of every
feature; a second pass writes codes, targets and weights. Targets, weights and offset
stay in memory, on one device or on the devices of a mesh.
"""

import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jboost.boosting.state import Data
from jboost.codes.binning import apply_bins
from jboost.codes.bins import Bins
from jboost.codes.codes import DenseCodes
from jboost.codes.gathering import check_columns, has_missing
from jboost.entry.exchanges import agree, gather_numbers, num_processes, process_number
from jboost.kernels.binning_cpu import code_dtype
from jboost.numerics.arrays import padded_size
from jboost.sketches.ordered import OrderedSketch
from jboost.streams.batches import RowBatch, checked_batches, first_row, hash_rows
from jboost.streams.blocks import (
    NUM_BUFFERS,
    Block,
    BlockSet,
    count_row_bytes,
    read_rows,
    write_block,
)
from jboost.streams.folders import BlockError, Folders, as_text, trim_heap
from jboost.training.rows import PaddedRows
from jboost.training.sharded import padded_rows, spread_rows


class BlockTable(NamedTuple):
    """Rows on disk.

    Attributes:
      folders: the folders, which remove the files when they are garbage-collected.
      names: the feature names, if the batches are data frames; else None.
      structure: the pytree structure of the targets.
      kinds: arrays without rows, by name: dtypes and shapes of those in the files.
      num_offsets: the number of scores of the offset; 0 without an offset.
      max_bins: the setting that the thresholds were made for; None for given bins.
    """

    blocks: BlockSet
    folders: Folders
    bins: Bins
    names: tuple[str, ...] | None
    structure: Any
    kinds: dict[str, np.ndarray]
    weighted: bool
    num_offsets: int
    max_bins: int | None


def shape_rows(
    first: RowBatch, num_rows: int, num_scores: int, padded: bool, mesh: Mesh | None
) -> PaddedRows:
    """Returns shapes in place of the rows that :func:`load_rows` loads from files.

    Args:
      first: one row, for the dtypes and shapes.
      num_rows: the number of rows of this process.
    """
    spread = None if mesh is None else spread_rows(mesh, num_rows, padded)
    total = padded_rows(num_rows) if padded else num_rows
    if spread is not None:
        total = len(spread.shards.sizes) * spread.length

    def shape(dtype, *sizes, axis=0) -> Any:
        place = None if spread is None else spread.place(axis)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    data = Data(
        codes=DenseCodes(shape(np.uint8, 0, total, axis=1)),
        targets=jax.tree.map(
            lambda array: shape(array.dtype, total, *array.shape[1:]), first.targets
        ),
        weights=shape(np.float32, total),
        offset=shape(np.float32, num_scores, total, axis=1),
    )
    return PaddedRows(data, num_rows, first.x.shape[1], spread)


def load_rows(
    table: BlockTable, num_scores: int, padded: bool, mesh: Mesh | None
) -> PaddedRows:
    """Loads the values of each row that stay in memory: everything except codes.

    Padding repeats row 0 at weight 0; see :func:`jboost.training.rows.bin_rows`.
    """
    if table.num_offsets not in (0, num_scores):
        raise ValueError(
            f"offset of the batches must have {num_scores} scores, as num_scores "
            f"says, got {table.num_offsets}"
        )
    size = table.blocks.num_rows
    spread = None if mesh is None else spread_rows(mesh, size, padded)
    total = padded_rows(size) if padded and spread is None else size

    def load(name):
        like = table.kinds[name]
        whole = np.empty((total, *like.shape[1:]), like.dtype)
        for block in table.blocks.blocks:
            part = read_rows(table.blocks, name, block, like)
            whole[block.first_row : block.first_row + len(part)] = part
        whole[size:] = whole[:1]
        return whole

    def put(array, axis=0, padding=None):
        if spread is not None:
            return spread.put(array, axis, padding)
        return jax.device_put(array)

    leaves = [put(load(f"target {i}")) for i in range(table.structure.num_leaves)]
    weights = np.ones(total, np.float32)
    if table.weighted:
        weights = load("weight")
    weights[size:] = 0
    offset = np.zeros((num_scores, total), np.float32)
    if table.num_offsets:
        offset = np.ascontiguousarray(load("offset").T)
    data = Data(
        codes=DenseCodes(put(np.zeros((0, total), np.uint8), axis=1)),
        targets=jax.tree.unflatten(table.structure, leaves),
        weights=put(weights, padding=np.zeros(1, np.float32)),
        offset=put(offset, axis=1),
    )
    return PaddedRows(data, size, table.blocks.num_features, spread)


_MOST_BLOCK_ROWS = 1 << 18
_BLOCK_SHARE = 1 / 8  # the share of the memory that blocks may take
_CHUNK = 16384  # rows; blocks of whole chunks are summed fastest
_PIECE = 16384  # rows that are binned at a time
_PIECE_CELLS = 1 << 22  # the most cells in such a piece
_FAILURES = (TypeError, ValueError, OSError, BlockError)  # errors of a pass


class Pass(NamedTuple):
    """Row count of a pass, and checksums (:func:`jboost.streams.batches.hash_rows`)."""

    num_rows: int
    checksums: tuple[int, ...]


class Options(NamedTuple):
    """Options for writing a table.

    Attributes:
      memory: the most bytes that the sketch and the blocks may take.
      directories: folders for the files; none: the system's folder for temporary files.
      block_rows: rows of a block; None: as many as fit their share of the memory.
      check: called with each batch of the first pass and its number; it may refuse it.
      plan: called with the bins, the blocks that will be written, and the first row of
        the first batch, once the number of rows is known; it may refuse them.
    """

    memory: int
    directories: Sequence[str | os.PathLike[str]] | None
    block_rows: int | None
    progress: bool
    check: Callable[[RowBatch, int], None]
    num_scores: int
    plan: Callable[[Bins, BlockSet, RowBatch], None]


def write_table(
    source: Callable[[], Iterator[Any]],
    bins: Bins | None,
    max_bins: int | None,
    options: Options,
) -> BlockTable:
    """Makes the passes over a source: one to find thresholds, and one to write.

    Args:
      bins: thresholds; None: they are found in a pass of their own, for ``max_bins``.
    """
    seen = None
    if bins is None:
        assert max_bins is not None
        seen, bins, kind = _sketch(source, max_bins, options)
        options.plan(bins, _lay_out(seen.num_rows, bins, options), kind)
    with agree(*_FAILURES):
        writer, weight = _write(source, bins, seen, options)
    _compare_processes(writer.first)
    if not any(gather_numbers(int(writer.num_rows > 0))):
        raise ValueError("source must give at least one row, got none")
    if not any(gather_numbers(int(weight > 0))):
        raise ValueError("sample_weight must be positive in some row, got zeros only")
    return writer.finish(max_bins)


def _count_rows(source):
    """Counts the rows before this process's, and its own; 0 and None if it is alone."""
    if num_processes() == 1:
        return 0, None
    with agree(*_FAILURES):
        own = sum(len(batch.x) for batch in checked_batches(source))
    return sum(gather_numbers(own)[: process_number()]), own


def _compare_processes(first):
    """Raises on all processes if their batches differ in kind."""
    check_columns(first.x.shape[1], first.names)
    for name, part in {"sample_weight": first.weights, "offset": first.offset}.items():
        given = gather_numbers(int(part is not None))
        if len({*given}) > 1:
            ranks = [rank for rank, number in enumerate(given) if number]
            raise ValueError(
                f"batches must come with {name} on all processes or on none, got it on "
                f"processes {ranks} of {len(given)}"
            )


def _sketch(source, max_bins, options):
    """Sketches all rows; returns the pass, its thresholds, and the first row."""
    sketch, kind, num_rows, checksums = None, None, 0, ()
    eps = min(1 / 64, 1 / (8 * max_bins))  # an eighth of the share of a bin
    first, known = _count_rows(source)
    with _bar("sketching", options.progress) as bar, agree(*_FAILURES):
        for number, batch in enumerate(checked_batches(source)):
            options.check(batch, number)
            if sketch is None:
                sketch = OrderedSketch(batch.x.shape[1], eps, first)
                kind = first_row(batch)
            sketch.add(batch.x, batch.weights)
            checksums = hash_rows(batch, checksums)
            num_rows += len(batch.x)
            _check_rows(batch, num_rows, options)
            held, memory = sketch.num_bytes, options.memory
            if held > memory:
                raise ValueError(
                    f"memory must hold the sketch of {sketch.num_features} features, "
                    f"which takes {as_text(held)} after {num_rows} rows, got "
                    f"{as_text(memory)}; ask for fewer max_bins, which make it "
                    "smaller, or pass bins"
                )
            trim_heap(batch.x.nbytes)
            bar.update(len(batch.x))
        if sketch is None:
            raise ValueError(_no_rows())
        if known is not None:
            _check_same(Pass(known, ()), Pass(num_rows, ()))
    assert kind is not None
    _compare_processes(kind)
    return Pass(num_rows, checksums), sketch.make_bins(max_bins), kind


def _lay_out(num_rows, bins, options):
    """Returns the blocks that ``num_rows`` rows will take, without their files."""
    dtype = np.dtype(code_dtype(bins.num_bins))
    size = _choose_block_rows(bins.num_features, dtype, options)
    firsts = range(0, num_rows, size)
    blocks = [
        Block(Path(), number, first, min(size, num_rows - first))
        for number, first in enumerate(firsts)
    ]
    return BlockSet(tuple(blocks), "", bins.num_features, dtype)


def _check_rows(batch, num_rows, options):
    """Raises as soon as there are more rows than can be trained on.

    It counts the arrays that any loss needs: targets, weights, each score with its leaf
    and two derivatives, and one pair of derivatives as integers. The plan counts all.
    """
    targets = sum(
        a.dtype.itemsize * math.prod(a.shape[1:])
        for a in jax.tree.leaves(batch.targets)
    )
    least = num_rows * (targets + 4 + 16 * options.num_scores + 8)
    if least > options.memory:
        raise ValueError(
            f"memory must be more than {least} bytes ({as_text(least)}) to train on "
            f"{num_rows} rows, got {as_text(options.memory)}; use fewer rows"
        )


def _write(source, bins, seen, options):
    """Writes the blocks in one pass; ``seen`` is the pass before it, or None.

    Returns the writer, and the total weight of all rows.
    """
    writer, num_rows, checksums, weight = None, 0, (), 0.0
    with _bar("writing", options.progress, seen and seen.num_rows) as bar:
        for number, batch in enumerate(checked_batches(source)):
            if seen is None:
                options.check(batch, number)
            if batch.x.shape[1] != bins.num_features:
                raise ValueError(
                    f"x of the batches must have {bins.num_features} columns, as the "
                    f"bins have, got {batch.x.shape[1]}"
                )
            if writer is None:
                writer = _Writer(options, bins, batch)
            writer.add(batch)
            checksums = hash_rows(batch, checksums)
            num_rows += len(batch.x)
            _check_rows(batch, num_rows, options)
            own = len(batch.x) if batch.weights is None else np.sum(batch.weights)
            weight += float(own)
            bar.update(len(batch.x))
    if seen is not None:
        _check_same(seen, Pass(num_rows, checksums))
    if writer is None:
        raise ValueError(_no_rows())
    return writer, weight


def _no_rows():
    if num_processes() == 1:
        return "source must give at least one row, got none"
    return (
        "source must give at least one batch on every process, one of no rows where a "
        "process has none, got none"
    )


def _check_same(first, second):
    """Raises if the passes saw different rows."""
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


class _Writer:
    """Gathers rows until a block is full, and then writes it."""

    def __init__(self, options: Options, bins: Bins, first: RowBatch):
        num_features = bins.num_features
        dtype = np.dtype(code_dtype(bins.num_bins))
        size = _choose_block_rows(num_features, dtype, options)
        self._bins, self.first = bins, first_row(first)
        self._folders = Folders(options.directories)
        self._identity = uuid.uuid4().hex
        self._blocks: list[Block] = []
        self._codes = np.empty((num_features, size), dtype)
        self._rows = {
            name: np.empty((size, *array.shape[1:]), array.dtype)
            for name, array in _named_rows(self.first).items()
        }
        self._filled, self._missing = 0, False
        self._piece = max(1, min(_PIECE, _PIECE_CELLS // num_features))

    @property
    def num_rows(self) -> int:
        """The number of rows added so far."""
        return self._filled + sum(block.num_rows for block in self._blocks)

    def add(self, batch: RowBatch):
        """Adds the rows of a batch, piece by piece."""
        self._missing = self._missing or has_missing(batch.x, batch.weights)
        named, done = _named_rows(batch), 0
        while done < len(batch.x):
            free = self._codes.shape[1] - self._filled
            end = min(len(batch.x), done + min(free, self._piece))
            here = slice(self._filled, self._filled + end - done)
            self._codes[:, here] = _find_codes(self._bins, batch.x[done:end])
            for name, array in named.items():
                self._rows[name][here] = array[done:end]
            self._filled, done = here.stop, end
            if self._filled == self._codes.shape[1]:
                self._flush()

    def finish(self, max_bins) -> BlockTable:
        """Writes the last block; returns the table."""
        if self._filled:
            self._flush()
        offset = self.first.offset
        missing = any(gather_numbers(int(self._missing)))
        absent = self._bins.absent or ("missing" if missing else None)
        blocks = BlockSet(
            blocks=tuple(self._blocks),
            identity=self._identity,
            num_features=self._codes.shape[0],
            dtype=self._codes.dtype,
        )
        return BlockTable(
            blocks=blocks,
            folders=self._folders,
            bins=replace(self._bins, absent=absent),
            names=self.first.names,
            structure=jax.tree.structure(self.first.targets),
            kinds={name: array[:0].copy() for name, array in self._rows.items()},
            weighted=self.first.weights is not None,
            num_offsets=0 if offset is None else len(offset),
            max_bins=max_bins,
        )

    def _flush(self):
        number, filled = len(self._blocks), self._filled
        before = sum(block.num_rows for block in self._blocks)
        block = Block(self._folders.place(number), number, before, filled)
        rows = {name: array[:filled] for name, array in self._rows.items()}
        codes = self._codes[:, :filled]
        self._blocks.append(write_block(block, self._identity, codes, rows))
        self._filled = 0
        trim_heap(self._codes.nbytes)


def _named_rows(batch):
    """Returns the arrays of a block besides its codes, by name."""
    leaves = jax.tree.leaves(batch.targets)
    named = {f"target {i}": leaf for i, leaf in enumerate(leaves)}
    if batch.weights is not None:
        named["weight"] = batch.weights
    if batch.offset is not None:
        named["offset"] = batch.offset.T
    return named


def _find_codes(bins, matrix):
    """Returns codes by feature; pads the rows first, so that few sizes are compiled."""
    size = len(matrix)
    short = padded_size(size) - size
    padded = np.pad(matrix, ((0, short), (0, 0))) if short else matrix
    return np.asarray(apply_bins(bins, padded))[:size].T


def _choose_block_rows(num_features, dtype, options):
    """Returns as many rows as fit their share of the memory, in whole chunks."""
    if options.block_rows is not None:
        return options.block_rows
    columns = num_features * dtype.itemsize
    bytes_per_row = NUM_BUFFERS * (columns + count_row_bytes(num_features, dtype))
    size = int(options.memory * _BLOCK_SHARE / bytes_per_row)
    size = max(1, min(size, _MOST_BLOCK_ROWS))
    return size - size % _CHUNK if size >= _CHUNK else size


def _bar(what, progress, total=None):
    hidden = not progress or process_number() > 0
    return tqdm(total=total, desc=what, disable=hidden, unit="rows")
