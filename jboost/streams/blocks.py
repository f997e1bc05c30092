# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows in files: codes by column, and other values of each row.

In: arrays of a block. Out: the same arrays, read one block ahead of their use. One
file holds one block, and names where each column begins, so that a few columns can be
read alone::

    magic | length and checksum of the header | header (JSON) | column 0 | column 1 ...

A column of codes takes as few bits as its highest code needs (1, 2, 4, 8 or 16), and
is compressed if that makes it much smaller. Every column has a checksum, tested
whenever it is read.
"""

import json
import os
import shutil
import signal
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Shaped

from jboost.entry.collectives import awaits_preemption
from jboost.tables.frames import SourceError

_MAGIC = b"jboost-block-1\n\0"
_ALIGNMENT = 64  # bytes: XLA takes host memory without a copy only from such addresses
_DEFLATED_SHARE = 1 / 3  # of the packed bytes: what deflating must achieve
_SAMPLE = 1 << 15  # bytes that are deflated to see whether the rest is worth it
NUM_BUFFERS = 2  # one block in use, one being read
_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]

_existing: "weakref.WeakSet[Folders]" = weakref.WeakSet()


class BlockError(SourceError):
    """A file of blocks could not be written, or is damaged or gone."""


class Block(NamedTuple):
    """One file."""

    path: Path
    number: int
    first_row: int
    num_rows: int


class BlockSet(NamedTuple):
    """The files of all rows, in order.

    Attributes:
      identity: written into every file of this set.
      num_features: columns of codes.
      dtype: of the codes in memory.
    """

    blocks: tuple[Block, ...]
    identity: str
    num_features: int
    dtype: np.dtype

    @property
    def num_rows(self) -> int:
        """N."""
        return sum(block.num_rows for block in self.blocks)

    @property
    def block_rows(self) -> int:
        """Rows of the largest block."""
        return max(block.num_rows for block in self.blocks)

    @property
    def num_bytes(self) -> int:
        """The size of the files on disk."""
        return sum(block.path.stat().st_size for block in self.blocks)


class Folders:
    """The folders of block files, which are filled in turn.

    The files are removed by :meth:`remove`, when this object is garbage-collected, at
    the end of the process, and when SIGTERM or SIGHUP ends it. Handlers of these
    signals are installed only while such folders exist, and never replace a handler
    of the program.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]] | None):
        places = directories or (tempfile.gettempdir(),)
        self.paths: list[Path] = []
        self.remove = weakref.finalize(self, _remove_folders, self.paths, os.getpid())
        _existing.add(self)
        _watch_signals()
        for place in places:
            try:
                Path(place).mkdir(parents=True, exist_ok=True)
                made = tempfile.mkdtemp(prefix="jboost-blocks-", dir=place)
            except OSError as error:
                raise BlockError(
                    f"no folder for blocks could be made in {os.fspath(place)!r}: "
                    f"{error}"
                ) from error
            self.paths.append(Path(made))

    def place(self, number: int) -> Path:
        """Returns the path of a block's file."""
        folder = self.paths[number % len(self.paths)]
        return folder / f"{number:06d}.block"


def _remove_folders(paths, owner):
    if os.getpid() != owner:
        return  # a forked child has a copy of the object, but not the files
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    _release_signals()


def _watch_signals():
    """Removes files before a signal ends the process, unless it has a handler."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows handlers to be set in the main thread only
    for number in _SIGNALS:
        if number == signal.SIGTERM and awaits_preemption():
            continue  # Python does not know handlers of C++ code
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _remove_and_end)


def _release_signals():
    """Restores the default handlers if no folder is left."""
    if threading.current_thread() is not threading.main_thread():
        return
    if any(folders.remove.alive for folders in list(_existing)):
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is _remove_and_end:
            signal.signal(number, signal.SIG_DFL)


def _remove_and_end(number, frame):
    for folders in list(_existing):
        folders.remove()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def write_block(
    block: Block,
    identity: str,
    codes: Shaped[np.ndarray, "F n"],
    rows: dict[str, np.ndarray],
) -> None:
    """Writes a block: columns of codes, and arrays with one entry for each row.

    Raises:
      BlockError: the file cannot be written.
    """
    columns, payloads, offset = [], [], 0
    for column in codes:
        coding, payload = _encode(column)
        columns.append(_describe(payload, offset, coding))
        payloads.append(payload)
        offset += len(payload)
    others = {}
    for name, array in rows.items():
        payload = np.ascontiguousarray(array).tobytes()
        kind = {"dtype": array.dtype.str, "shape": list(array.shape)}
        others[name] = _describe(payload, offset, kind)
        payloads.append(payload)
        offset += len(payload)
    header = json.dumps(
        {
            "set": identity,
            "block": block.number,
            "rows": block.num_rows,
            "columns": columns,
            "others": others,
        }
    ).encode()
    sizes = np.array([len(header), zlib.crc32(header)], "<u4").tobytes()
    part = block.path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            for piece in (_MAGIC, sizes, header, *payloads):
                file.write(piece)
        os.replace(part, block.path)  # a file with the right name is complete
    except OSError as error:
        raise BlockError(
            f"block {block.number} of {offset / 1e6:.1f} MB could not be written to "
            f"{os.fspath(block.path)!r}: {error}"
        ) from error


class BlockReader:
    """Reads blocks in order, one ahead, into buffers that are reused.

    An array is valid until the next block is requested.
    """

    def __init__(self, blocks: BlockSet):
        self.set = blocks
        size = blocks.num_features * blocks.block_rows * blocks.dtype.itemsize
        self._buffers = [aligned_empty(size, np.uint8) for _ in range(NUM_BUFFERS)]

    def read(
        self, features: Sequence[int] | None = None
    ) -> Iterator[tuple[Block, Shaped[np.ndarray, "f n"]]]:
        """Yields each block with the codes of some features; None: of all.

        Raises:
          BlockError: a file is damaged, incomplete or gone.
        """
        wanted = range(self.set.num_features) if features is None else features
        blocks = self.set.blocks

        def fetch(number):
            buffer = self._buffers[number % NUM_BUFFERS]
            return self._fetch(blocks[number], wanted, buffer)

        with ThreadPoolExecutor(1, thread_name_prefix="jboost-blocks") as thread:
            ahead = thread.submit(fetch, 0)
            for number, block in enumerate(blocks):
                codes = ahead.result()
                if number + 1 < len(blocks):
                    ahead = thread.submit(fetch, number + 1)
                yield block, codes

    def _fetch(self, block, features, buffer):
        shape = (len(features), block.num_rows)
        size = shape[0] * shape[1] * self.set.dtype.itemsize
        codes = buffer[:size].view(self.set.dtype).reshape(shape)
        with _open_block(block) as file:
            header, start = _read_header(file, block, self.set.identity)
            for row, feature in zip(codes, features, strict=True):
                entry = header["columns"][feature]
                what = f"column {feature}"
                if entry["bits"] == 8 * row.itemsize and not entry["deflated"]:
                    _read_into(file, block, entry, start, what, row)
                    continue
                payload = np.empty(entry["bytes"], np.uint8)
                _read_into(file, block, entry, start, what, payload)
                _decode(payload, entry, row)
        return codes


def read_rows(blocks: BlockSet, name: str, block: Block) -> np.ndarray:
    """Reads one of the arrays that have an entry for each row of a block.

    Raises:
      BlockError: the file is damaged, incomplete or gone.
    """
    with _open_block(block) as file:
        header, start = _read_header(file, block, blocks.identity)
        entry = header["others"][name]
        array = np.empty(entry["shape"], np.dtype(entry["dtype"]))
        _read_into(file, block, entry, start, name, array.reshape(-1))
    return array


def aligned_empty(shape: Any, dtype: Any) -> np.ndarray:
    """Returns an array that XLA can use without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _describe(payload, offset, kind):
    return {
        "offset": offset, "bytes": len(payload), "crc": zlib.crc32(payload), **kind
    }  # fmt: skip


def _encode(column):
    """Returns how a column of codes is written, and its bytes."""
    highest = int(column.max(initial=0))
    bits = next(bits for bits in (1, 2, 4, 8, 16) if highest < 1 << bits)
    if bits >= 8:
        packed = column.astype(f"<u{bits // 8}")
    else:
        # Byte i holds codes i, i + n, i + 2n ... for n bytes: whole slices at a time.
        parts = 8 // bits
        size = -(-len(column) // parts)
        table = np.zeros((parts, size), np.uint8)
        table.reshape(-1)[: len(column)] = column
        shifts = bits * np.arange(parts, dtype=np.uint8)[:, None]
        packed = np.bitwise_or.reduce(table << shifts, axis=0)
    payload = packed.tobytes()
    sample = payload[:_SAMPLE]
    deflated = len(zlib.compress(sample, 1)) < _DEFLATED_SHARE * len(sample)
    if deflated:
        payload = zlib.compress(payload, 1)
    return {"bits": bits, "deflated": deflated}, payload


def _decode(payload, entry, codes):
    bits = entry["bits"]
    raw = zlib.decompress(payload) if entry["deflated"] else payload
    if bits >= 8:
        codes[:] = np.frombuffer(raw, f"<u{bits // 8}")
        return
    packed = np.frombuffer(raw, np.uint8)
    for part in range(8 // bits):
        slot = codes[part * len(packed) : (part + 1) * len(packed)]
        slot[:] = (packed[: len(slot)] >> (bits * part)) & ((1 << bits) - 1)


def _open_block(block: Block) -> BinaryIO:
    try:
        return open(block.path, "rb")
    except OSError as error:
        raise BlockError(
            f"block {block.number} cannot be read: {os.fspath(block.path)!r}: {error}"
        ) from error


def _read_header(file, block, identity):
    """Returns the header, and the offset of the columns."""
    begin = file.read(len(_MAGIC) + 8)
    if len(begin) < len(_MAGIC) + 8 or not begin.startswith(_MAGIC):
        raise _damaged(block, "it does not begin as a block file does")
    length, checksum = np.frombuffer(begin[len(_MAGIC) :], "<u4").tolist()
    text = file.read(length)
    if len(text) < length or zlib.crc32(text) != checksum:
        raise _damaged(block, "the checksum of its header is wrong")
    header = json.loads(text)
    known = (identity, block.number, block.num_rows)
    if (header["set"], header["block"], header["rows"]) != known:
        raise _damaged(block, "it belongs to other data")
    return header, len(begin) + length


def _read_into(file, block, entry, start, what, array):
    try:
        file.seek(start + entry["offset"])
        view = memoryview(array).cast("B")
        if file.readinto(view) < entry["bytes"]:
            raise _damaged(block, f"it ends within {what}")
    except OSError as error:
        raise BlockError(
            f"block {block.number} cannot be read: {os.fspath(block.path)!r}: {error}"
        ) from error
    if zlib.crc32(view) != entry["crc"]:
        raise _damaged(block, f"the checksum of {what} is wrong")


def _damaged(block, how):
    return BlockError(
        f"block {block.number} is damaged: {os.fspath(block.path)!r}: {how}"
    )
