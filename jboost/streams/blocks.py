# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows in files: headers, codes as bytes, files, and reading ahead.

One file holds: magic | length and checksum of the header | header (JSON) | codes |
other values. Codes lie in it as the CPU kernels take them, by feature and by row, and
are mapped without a copy; or encoded, if that takes much less room. The checksum of a
part is tested when it is first read, and again if the file has changed since.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jaxtyping import Shaped

from jboost.kernels.binning_cpu import packed_shape
from jboost.kernels.calls import available, call_on_host
from jboost.streams.folders import BlockError

_BITS = (1, 2, 4, 8, 16)
_KINDS = "fiub"  # kinds of numbers, without references to objects


class Layout(NamedTuple):
    """The properties that all files of a set share.

    Attributes:
      identity: an identifier, written into every file of the set.
      dtype: the dtype of the codes in memory.
    """

    identity: str
    num_features: int
    dtype: np.dtype


def count_encoded(bits: int, num_rows: int) -> int:
    """Returns the bytes of a column of ``bits``-bit codes before compression."""
    return -(-num_rows // (8 // bits)) if bits < 8 else num_rows * bits // 8


def _read_header(text, layout, number, num_rows, data_bytes):
    """Parses and checks the header of a block.

    Args:
      data_bytes: the size of the file after the header.

    Raises:
      ValueError: the header is malformed, or that of another block.
    """
    try:
        header = json.loads(text)
        known = tuple(header[name] for name in ("set", "block", "rows"))
        columns, others = header["columns"], header["others"]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ValueError("its header is not a JSON object of a block") from None
    if known != (layout.identity, number, num_rows):
        raise ValueError("it belongs to other data")
    if not isinstance(columns, list) or not columns or not isinstance(others, dict):
        raise ValueError("its header must list columns and others")
    entries = [*columns, *others.values()]
    for part, entry in enumerate(entries):
        _check_entry(entry, part, data_bytes)
    _check_columns(columns, layout, num_rows)
    for name, entry in others.items():
        _check_array(name, entry, num_rows)
    return header


def _check_entry(entry, part, data_bytes):
    """Checks where a part lies; parts are numbered in the order of the header."""
    sizes = ("part", "offset", "bytes", "crc")
    if not isinstance(entry, dict) or not all(type(entry.get(k)) is int for k in sizes):
        raise ValueError(f"part {part} must have integers {sizes}")
    begin, size = entry["offset"], entry["bytes"]
    if entry["part"] != part or begin < 0 or size < 0:
        raise ValueError(f"part {part} must have its number and sizes of at least 0")
    if begin + size > data_bytes:
        raise ValueError(
            f"it ends within part {part}, at {data_bytes} of {begin + size} bytes"
        )


def _check_columns(columns, layout, num_rows):
    num_features, dtype = layout.num_features, np.dtype(layout.dtype)
    if "plain" in columns[0]:
        shapes = (num_features, num_rows), packed_shape(num_features, num_rows)
        expected = [math.prod(shape) * dtype.itemsize for shape in shapes]
        if [entry["bytes"] for entry in columns] != expected:
            raise ValueError(f"its codes must have {expected} bytes")
        return
    if len(columns) != num_features:
        raise ValueError(f"it must have {num_features} columns, got {len(columns)}")
    for feature, entry in enumerate(columns):
        bits, deflated = entry.get("bits"), entry.get("deflated")
        known = type(bits) is int and bits in _BITS and bits <= 8 * dtype.itemsize
        if not known or not isinstance(deflated, bool):
            raise ValueError(f"column {feature} must have bits and deflated")
        size = count_encoded(bits, num_rows)
        if not deflated and entry["bytes"] != size:
            raise ValueError(f"column {feature} must have {size} bytes")


def _check_array(name, entry, num_rows):
    shape, kind = entry.get("shape"), entry.get("dtype")
    lengths = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    try:
        dtype = np.dtype(kind if isinstance(kind, str) else "O")
    except (TypeError, ValueError):
        dtype = np.dtype("O")
    if not lengths or shape[:1] != [num_rows] or dtype.kind not in _KINDS:
        raise ValueError(f"{name} must be numbers, with {num_rows} rows")
    if math.prod(shape) * dtype.itemsize != entry["bytes"]:
        raise ValueError(f"{name} of shape {shape} must have as many bytes")


_DEFLATED_SHARE = 1 / 3  # share of the packed bytes: deflate only to less
_SAMPLE = 1 << 15  # bytes that are deflated to estimate the gain for the rest
_ENCODED_SHARE = 1 / 2  # share of the bytes of codes by row: encode only to at most it


def _encode_columns(codes):
    """Returns encodings of columns, and their bytes; None if that saves too little."""
    most = _ENCODED_SHARE * count_row_bytes(len(codes), codes.dtype) * codes.shape[1]
    encoded, size = [], 0
    for column in codes:
        encoded.append(_encode(column))
        size += len(encoded[-1][1])
        if size > most:
            return None
    return [kind for kind, _ in encoded], [payload for _, payload in encoded]


def count_row_bytes(num_features: int, dtype: Any) -> int:
    """Returns the bytes of a row of codes by row."""
    blocks, _, width = packed_shape(num_features, 1)
    return blocks * width * np.dtype(dtype).itemsize


def pack_rows(codes: Shaped[np.ndarray, "F n"]) -> np.ndarray:
    """Arranges codes by row; see :func:`jboost.kernels.binning_cpu.pack`."""
    shape: Any = packed_shape(*codes.shape)
    if available():
        result = jax.ShapeDtypeStruct(shape, codes.dtype)
        num_bins = 1 << 8 * codes.dtype.itemsize
        return call_on_host("pack", result, codes, num_bins=num_bins)
    packed, width = np.zeros(shape, codes.dtype), shape[2]
    for number, part in enumerate(packed):
        columns = codes[number * width : (number + 1) * width]
        part[:, : len(columns)] = columns.T
    return packed


def _encode(column):
    """Returns how a column of codes is written, and its bytes."""
    highest = int(column.max(initial=0))
    bits = next(bits for bits in (1, 2, 4, 8, 16) if highest < 1 << bits)
    if bits >= 8:
        packed = column.astype(f"<u{bits // 8}")
    else:
        # Byte i holds codes i, i + n, i + 2n ... for n bytes: whole slices at a time.
        parts = 8 // bits
        size = count_encoded(bits, len(column))
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


def decode_column(payload: Any, kind: dict[str, Any], codes: np.ndarray) -> None:
    """Writes a column to ``codes``, from its bytes.

    Raises:
      ValueError: the compressed bytes do not hold ``len(codes)`` codes.
    """
    bits = kind["bits"]
    raw = payload
    if kind["deflated"]:
        raw = _inflate(payload, count_encoded(bits, len(codes)))
    if bits >= 8:
        codes[:] = np.frombuffer(raw, f"<u{bits // 8}")
        return
    packed = np.frombuffer(raw, np.uint8)
    for part in range(8 // bits):
        slot = codes[part * len(packed) : (part + 1) * len(packed)]
        slot[:] = (packed[: len(slot)] >> (bits * part)) & ((1 << bits) - 1)


def _inflate(payload, size):
    """Decompresses to ``size`` bytes; never to more, whatever the bytes say."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(payload, size + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(raw) != size or not stream.eof:
        raise ValueError(f"must be decompressed to {size} bytes")
    return raw


try:
    import resource
except ImportError:  # not POSIX
    resource: Any = None

MAGIC = b"jboost-block-2\n\0"


class Block(NamedTuple):
    """One file.

    Attributes:
      plain: whether it holds codes in the layout of the kernels, not encoded.
    """

    path: Path
    number: int
    first_row: int
    num_rows: int
    plain: bool = False


class _Known(NamedTuple):
    """Facts about a file at the time when its header was read.

    Attributes:
      stamp: layout, inode, size and time of the file; differs if the file changes.
      header: the header of plain codes; None for others: theirs is read again.
      tested: 1 for each part with a checksum that was right, else 0.
    """

    stamp: tuple[Any, ...]
    header: dict[str, Any] | None
    start: int
    tested: bytearray


_known: dict[Path, _Known] = {}
_ADVISED = 32  # parts that are read ahead after a part that was not
_disk = {"faults": 0, "asked": 0}


class BlockFile:
    """An open file of a block, with its header."""

    def __init__(self, file: BufferedReader, block: Block, layout: Layout):
        self._file, self.block = file, block
        status = os.fstat(file.fileno())
        stamp = (layout, status.st_ino, status.st_size, status.st_mtime_ns)
        known = _known.get(block.path)
        if known is not None and known.stamp != stamp:
            known = None
        if known is None or known.header is None:
            self.header, self._start = self._read_header(layout, status.st_size)
        else:
            self.header, self._start = known.header, known.start
        if known is None:
            parts = len(self.header["columns"]) + len(self.header["others"])
            header = self.header if self.is_plain else None
            known = _Known(stamp, header, self._start, bytearray(parts))
            _known[block.path] = known
        self._tested = known.tested
        self._mapped: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether the file holds codes in the layout of the kernels, not encoded."""
        return "plain" in self.header["columns"][0]

    def read_into(self, entry, what, array):
        """Reads a part of the file."""
        view = memoryview(array).cast("B")
        try:
            self._file.seek(self._start + entry["offset"])
            if self._file.readinto(view) < entry["bytes"]:
                raise self.damaged(f"it ends within {what}")
        except OSError as error:
            raise _unreadable(self.block, error) from error
        self._test(entry, what, view)

    def map(self, number, what, parts=None):
        """Maps plain codes into memory, and has the system read them.

        The codes are unmapped with the last reference to them.

        Args:
          parts: offset and size of each range that is needed; None: everything.
        """
        entry = self.header["columns"][number]
        begin, size = self._start + entry["offset"], entry["bytes"]
        try:
            if os.fstat(self._file.fileno()).st_size < begin + size:
                raise self.damaged(f"it ends within {what}")
            if self._mapped is None:
                fileno = self._file.fileno()
                self._mapped = mmap.mmap(fileno, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _unreadable(self.block, error) from error
        codes = np.frombuffer(self._mapped, np.uint8, size, begin)
        if self._test(entry, what, codes):
            return codes
        if _must_read_ahead() and hasattr(self._mapped, "madvise"):
            for offset, length in [(0, size)] if parts is None else parts:
                first = begin + offset - (begin + offset) % mmap.PAGESIZE
                length += begin + offset - first
                self._mapped.madvise(mmap.MADV_WILLNEED, first, length)
        return codes

    def _test(self, entry, what, view):
        """Tests the checksum of a part once; returns whether this call tested it."""
        if self._tested[entry["part"]]:
            return False
        if crc32(view) != entry["crc"]:
            raise self.damaged(f"the checksum of {what} is wrong")
        self._tested[entry["part"]] = 1
        return True

    def _read_header(self, layout, file_bytes):
        """Returns the header, and the offset of the codes."""
        begin = self._file.read(len(MAGIC) + 8)
        if len(begin) < len(MAGIC) + 8 or not begin.startswith(MAGIC):
            raise self.damaged("it does not begin as a block file does")
        length, checksum = np.frombuffer(begin[len(MAGIC) :], "<u4").tolist()
        text = self._file.read(min(length, file_bytes))
        if len(text) < length or crc32(text) != checksum:
            raise self.damaged("the checksum of its header is wrong")
        start, own = len(begin) + length, (self.block.number, self.block.num_rows)
        try:
            header = _read_header(text, layout, *own, file_bytes - start)
        except ValueError as error:
            raise self.damaged(error) from None
        return header, start

    def damaged(self, how: Any) -> BlockError:
        """Returns an error that says how the file is damaged."""
        path = os.fspath(self.block.path)
        return BlockError(f"block {self.block.number} is damaged: {str(path)!r}: {how}")


def open_block(block: Block) -> BufferedReader:
    """Opens the file of a block."""
    try:
        return open(block.path, "rb")
    except OSError as error:
        raise _unreadable(block, error) from error


def _unreadable(block, error):
    return BlockError(
        f"block {block.number} cannot be read: {os.fspath(block.path)!r}: {error}"
    )


def _must_read_ahead():
    """Returns whether a page had to be read from a disk since a few blocks ago."""
    if resource is None:
        return True
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    if faults != _disk["faults"]:
        _disk.update(faults=faults, asked=0)
    _disk["asked"] += 1
    return _disk["asked"] <= _ADVISED


_ALIGNMENT = 64  # bytes: XLA takes host memory without a copy only from such addresses
NUM_BUFFERS = 2  # one block in use, one being read


class BlockSet(NamedTuple):
    """The files of all rows, in order; see :class:`Layout`."""

    blocks: tuple[Block, ...]
    identity: str
    num_features: int
    dtype: np.dtype

    @property
    def layout(self) -> Layout:
        """The properties that all files share."""
        return Layout(self.identity, self.num_features, self.dtype)

    @property
    def num_rows(self) -> int:
        """N."""
        return sum(block.num_rows for block in self.blocks)

    @property
    def block_rows(self) -> int:
        """Rows of the largest block."""
        return max((block.num_rows for block in self.blocks), default=0)

    @property
    def num_bytes(self) -> int:
        """The size of the files on disk."""
        return sum(block.path.stat().st_size for block in self.blocks)


def write_block(
    block: Block,
    identity: str,
    codes: Shaped[np.ndarray, "F n"],
    rows: dict[str, np.ndarray],
) -> Block:
    """Writes a block: columns of codes, and arrays with one entry for each row.

    The returned block has ``plain`` set if its codes are not encoded.
    """
    columns, others, payloads, offset = [], {}, [], 0

    def add(payload, kind):
        nonlocal offset
        size = memoryview(payload).nbytes
        place = {"part": len(payloads) // 2, "offset": offset, "bytes": size}
        entry = {**place, "crc": crc32(payload), **kind}
        fill = b"\0" * (-size % _ALIGNMENT)
        payloads.extend((payload, fill))
        offset += size + len(fill)
        return entry

    encoded = _encode_columns(codes)
    if encoded is None:
        columns = [
            add(np.ascontiguousarray(codes), {"plain": True}),
            add(pack_rows(codes), {}),
        ]
    else:
        columns = [add(*pair) for pair in zip(*encoded[::-1], strict=True)]
    for name, array in rows.items():
        kind = {"dtype": array.dtype.str, "shape": list(array.shape)}
        others[name] = add(np.ascontiguousarray(array).tobytes(), kind)
    header = json.dumps(
        {
            "set": identity,
            "block": block.number,
            "rows": block.num_rows,
            "columns": columns,
            "others": others,
        }
    ).encode()
    header += b" " * (-(len(MAGIC) + 8 + len(header)) % _ALIGNMENT)
    sizes = np.array([len(header), crc32(header)], "<u4").tobytes()
    part = block.path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            for piece in (MAGIC, sizes, header, *payloads):
                file.write(piece)
        os.replace(part, block.path)  # a file with the right name is complete
    except OSError as error:
        raise BlockError(
            f"block {block.number} of {offset / 1e6:.1f} MB could not be written to "
            f"{os.fspath(block.path)!r}: {error}"
        ) from error
    return block._replace(plain=encoded is None)


class BlockReader:
    """Reads blocks in order, one ahead.

    An array is valid until the next block is requested.
    """

    def __init__(self, blocks: BlockSet):
        self.set = blocks
        self._buffers: list[np.ndarray] = []

    def read(
        self, features: Sequence[int] | None = None
    ) -> Iterator[tuple[Block, Shaped[np.ndarray, "f n"]]]:
        """Yields each block with the codes of some features; None: of all."""
        return self._read_ahead(partial(self._take_columns, features))

    def read_for_kernels(self, features: Sequence[int]) -> Iterator[tuple[Block, Any]]:
        """Yields each block with its codes by feature and by row.

        Args:
          features: the features to read ahead in the codes by feature; codes of the
            others are returned as well.
        """
        return self._read_ahead(partial(self._take_both, features))

    def _read_ahead(self, take) -> Iterator[tuple[Block, Any]]:
        blocks = self.set.blocks
        if not blocks:  # other processes have some
            return
        if all(block.plain for block in blocks):
            # Mapped here; the system reads ahead, which takes no thread.
            ahead = self._fetch(blocks[0], take)
            for number, block in enumerate(blocks):
                codes, ahead = ahead, None
                if number + 1 < len(blocks):
                    ahead = self._fetch(blocks[number + 1], take)
                yield block, codes
                del codes
            return
        with ThreadPoolExecutor(1, thread_name_prefix="jboost-blocks") as thread:
            ahead = thread.submit(self._fetch, blocks[0], take)
            for number, block in enumerate(blocks):
                codes = ahead.result()
                if number + 1 < len(blocks):
                    ahead = thread.submit(self._fetch, blocks[number + 1], take)
                yield block, codes

    def _fetch(self, block: Block, take: Callable[..., Any]) -> Any:
        with open_block(block) as file:
            return take(BlockFile(file, block, self.set.layout))

    def _take_columns(self, features, file):
        if file.is_plain:
            codes = self._map_columns(file)
            codes = codes if features is None else codes[features]
            return codes
        features = range(self.set.num_features) if features is None else features
        if not self._buffers:  # one in use, one being read
            size = self.set.num_features * self.set.block_rows * self.set.dtype.itemsize
            self._buffers = [aligned_empty(size, np.uint8) for _ in range(NUM_BUFFERS)]
        buffer = self._buffers[file.block.number % NUM_BUFFERS]
        shape = (len(features), file.block.num_rows)
        size = shape[0] * shape[1] * self.set.dtype.itemsize
        codes = buffer[:size].view(self.set.dtype).reshape(shape)
        columns = file.header["columns"]
        for row, feature in zip(codes, features, strict=True):
            entry = columns[feature]
            what = f"column {feature}"
            if entry["bits"] == 8 * row.itemsize and not entry["deflated"]:
                file.read_into(entry, what, row)
                continue
            payload = np.empty(entry["bytes"], np.uint8)
            file.read_into(entry, what, payload)
            try:
                decode_column(payload, entry, row)
            except ValueError as error:
                raise file.damaged(f"{what}: {error}") from None
        return codes

    def _take_both(self, features, file):
        if not file.is_plain:
            codes = self._take_columns(None, file)
            return codes, pack_rows(codes)
        columns = self._map_columns(file, features)
        packed = file.map(1, "codes by row").view(self.set.dtype)
        shape = packed_shape(self.set.num_features, file.block.num_rows)
        return columns, packed.reshape(shape)

    def _map_columns(self, file, features=None):
        shape = (self.set.num_features, file.block.num_rows)
        size = shape[1] * self.set.dtype.itemsize
        parts = None if features is None else [(f * size, size) for f in features]
        return file.map(0, "codes", parts).view(self.set.dtype).reshape(shape)


def read_rows(
    blocks: BlockSet, name: str, block: Block, like: np.ndarray
) -> np.ndarray:
    """Reads one of the arrays that have an entry for each row of a block.

    Args:
      like: an array without rows, of the dtype and shape of the array.
    """
    with open_block(block) as opened:
        file = BlockFile(opened, block, blocks.layout)
        entry = file.header["others"].get(name, {})
        shape = (block.num_rows, *like.shape[1:])
        if entry.get("shape") != [*shape] or np.dtype(entry["dtype"]) != like.dtype:
            raise file.damaged(f"it must hold {name}, {like.dtype} of shape {shape}")
        array = np.empty(shape, like.dtype)
        file.read_into(entry, name, array.reshape(-1))
    return array


def aligned_empty(shape: Any, dtype: Any) -> np.ndarray:
    """Returns an array that XLA can use without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
