# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Universal Binary JSON (ubjson.org, draft 12), as XGBoost does.

In: bytes. Out: dicts, lists, strings and numbers, with NumPy arrays for containers of
one numeric type; and the reverse. Nothing in the bytes is executed.
"""

import struct
from typing import Any

import numpy as np

_NUMBERS = {
    b"i": np.dtype("i1"),
    b"U": np.dtype("u1"),
    b"I": np.dtype(">i2"),
    b"l": np.dtype(">i4"),
    b"L": np.dtype(">i8"),
    b"d": np.dtype(">f4"),
    b"D": np.dtype(">f8"),
}
_INTEGERS = b"iUIlL"
_CONSTANTS = {b"Z": None, b"T": True, b"F": False}
_MOST_LEVELS = 64  # of nested containers, so that a file cannot exhaust the stack


def read_ubjson(data: bytes) -> Any:
    """Returns the value that the bytes encode.

    Raises:
      ValueError: the bytes are truncated, continue after the value, or are not UBJSON.
    """
    reader = _Reader(data)
    value = reader.value(reader.take(1), 0)
    if reader.offset != len(data):
        raise ValueError(
            f"the file must end after {reader.offset} bytes, got {len(data)} bytes"
        )
    return value


class _Reader:
    def __init__(self, data: bytes):
        self.data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.offset + size > len(self.data):
            raise ValueError(
                f"the file is truncated or not UBJSON: it must have {size} bytes from "
                f"byte {self.offset} on, got a length of {len(self.data)} bytes"
            )
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def peek(self) -> bytes:
        return self.data[self.offset : self.offset + 1]

    def number(self, mark: bytes) -> Any:
        kind = _NUMBERS[mark]
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def size(self) -> int:
        mark = self.take(1)
        if mark not in _NUMBERS or mark not in _INTEGERS:
            self.refuse(mark)
        return self.number(mark)

    def text(self) -> str:
        size = self.size()
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"text before byte {self.offset} must be UTF-8") from None

    def refuse(self, mark: bytes) -> None:
        raise ValueError(f"the file is not UBJSON: {mark!r} at byte {self.offset - 1}")

    def value(self, mark: bytes, level: int) -> Any:
        if level > _MOST_LEVELS:
            raise ValueError(f"containers must not nest deeper than {_MOST_LEVELS}")
        if mark in _CONSTANTS:
            return _CONSTANTS[mark]
        if mark in _NUMBERS:
            return self.number(mark)
        if mark == b"S":
            return self.text()
        if mark == b"C":
            return self.take(1).decode("latin-1")
        if mark == b"[":
            return self.array(level)
        if mark == b"{":
            return self.object(level)
        return self.refuse(mark)

    def head(self) -> tuple[bytes | None, int | None]:
        """Reads the optional type and length of a container's items."""
        kind = count = None
        if self.peek() == b"$":
            self.take(1)
            kind = self.take(1)
        if self.peek() == b"#":
            self.take(1)
            count = self.size()
        if (kind is not None and count is None) or (count is not None and count < 0):
            self.refuse(self.peek())
        if kind in _CONSTANTS:  # takes no bytes: a small file could claim any length
            self.refuse(kind)
        return kind, count

    def array(self, level: int) -> Any:
        kind, count = self.head()
        if kind in _NUMBERS and count is not None:
            dtype = _NUMBERS[kind]
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        values = []
        while len(values) != count:
            mark = self.take(1) if kind is None else kind
            if mark == b"]" and count is None:
                break
            values.append(self.value(mark, level + 1))
        return values

    def object(self, level: int) -> dict[str, Any]:
        kind, count = self.head()
        values = {}
        while len(values) != count:
            if count is None and self.peek() == b"}":
                self.take(1)
                break
            key = self.text()
            values[key] = self.value(self.take(1) if kind is None else kind, level + 1)
        return values


def write_ubjson(value: Any) -> bytes:
    """Encodes dicts, lists, strings, integers and numeric arrays."""
    if isinstance(value, dict):
        pairs = (_write_text(key) + write_ubjson(item) for key, item in value.items())
        return b"{" + b"".join(pairs) + b"}"
    if isinstance(value, np.ndarray):
        return _write_array(value)
    if isinstance(value, list):
        items = b"".join(map(write_ubjson, value))
        return b"[#" + _write_size(len(value)) + items
    if isinstance(value, str):
        return b"S" + _write_text(value)
    return _write_size(value)


def _write_array(array):
    for mark, kind in _NUMBERS.items():
        if kind.newbyteorder("=") == array.dtype:
            head = b"[$" + mark + b"#" + _write_size(array.size)
            return head + array.astype(kind).tobytes()
    raise TypeError(f"arrays must have a dtype that UBJSON has, got {array.dtype}")


def _write_size(size):
    return b"L" + struct.pack(">q", size)


def _write_text(text):
    data = text.encode("utf-8")
    return _write_size(len(data)) + data
