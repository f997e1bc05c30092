# SPDX-License-Identifier: Apache-2.0
"""One file of a block: its header, and the parts that it holds.

In: a path, and what the file must hold. Out: parts of it, read or mapped into memory,
whose checksums are right. A checksum is tested when its part is first read, and again
if the file has changed since.
"""

import mmap
import os
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from jboost.streams.block_headers import Layout, read_header
from jboost.streams.folders import BlockError

try:
    import resource
except ImportError:  # not POSIX
    resource: Any = None

MAGIC = b"jboost-block-2\n\0"


class Block(NamedTuple):
    """One file.

    Attributes:
      plain: whether its codes lie there as the kernels take them.
    """

    path: Path
    number: int
    first_row: int
    num_rows: int
    plain: bool = False


class _Known(NamedTuple):
    """What is known of a file as it was when its header was read.

    Attributes:
      stamp: what changes when the file changes.
      header: of plain codes; others have a longer one, and it is read again.
      tested: whether the checksum of each part was right.
    """

    stamp: tuple[Any, ...]
    header: dict[str, Any] | None
    start: int
    tested: bytearray


_known: dict[Path, _Known] = {}
_ADVISED = 32  # parts that are read ahead after a part that was not
_disk = {"faults": 0, "asked": 0}


class BlockFile:
    """An open file of a block, whose header is read."""

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
        """Whether codes lie there as the kernels take them."""
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
          parts: offset and size of what is needed; None: everything.
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
        """Tests the checksum of a part, unless it was; returns whether it did."""
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
            header = read_header(text, layout, *own, file_bytes - start)
        except ValueError as error:
            raise self.damaged(error) from None
        return header, start

    def damaged(self, how: Any) -> BlockError:
        """Returns an error that says how the file is damaged."""
        path = os.fspath(self.block.path)
        return BlockError(f"block {self.block.number} is damaged: {str(path)!r}: {how}")


def open_block(block: Block) -> BufferedReader:
    """Opens the file of a block.

    Raises:
      BlockError: it cannot be opened.
    """
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
