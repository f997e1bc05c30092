# SPDX-License-Identifier: Apache-2.0
"""The file format of XGBoost: categories, and UBJSON (ubjson.org, draft 12)."""

import itertools
import struct
from typing import Any, Literal

import numpy as np

from jboost.entry.messages import show
from jboost.model.ensemble import Ensemble
from jboost.tables.categories import Category

CategoryNames = Literal["names", "codes"]
_INT64 = 15  # XGBoost's number for a list of int64
_NO_NAMES: dict[str, Any] = {"offsets": [], "values": []}


def describe_categories(model: Ensemble, categories: CategoryNames) -> dict[str, Any]:
    """Returns the entry "cats" of a model; "codes" leaves out the names."""
    known = model.schema.categories or ()
    if categories == "codes" or not any(values is not None for values in known):
        none = np.zeros(0, np.int32)
        return {"enc": [], "feature_segments": none, "sorted_idx": none}
    for feature, values in enumerate(known):
        _check_names(model, feature, values or ())
    # XGBoost finds the code of a category by binary search in the sorted names.
    order = [sorted(range(len(v or ())), key=(v or ()).__getitem__) for v in known]
    return {
        "enc": [_encode(values or ()) for values in known],
        "feature_segments": np.cumsum([0, *map(len, order)]).astype(np.int32),
        "sorted_idx": np.array([*itertools.chain(*order)], np.int32),
    }


def _check_names(model, feature, values: tuple[Category, ...]):
    """Checks that all categories are ASCII strings or int64.

    XGBoost stores strings as bytes but computes their offsets in characters, so strings
    beyond ASCII come back corrupted.
    """
    for value in values:
        if isinstance(value, str):
            good = value.isascii() and "\0" not in value
        else:
            good = type(value) is int and -(2**63) <= value < 2**63
        if not good:
            name = (model.feature_names or {feature: feature})[feature]
            raise ValueError(
                'categories must be "codes" for this model, because XGBoost stores '
                f"only ASCII strings and int64 as names of categories, got "
                f"{show(value)} "
                f"in feature {show(name)}; then pass XGBoost the indices of "
                "categories in "
                "model.categories.values"
            )


def _encode(values):
    if not values:
        return _NO_NAMES
    if isinstance(values[0], int):
        return {"type": _INT64, "values": np.array(values, np.int64)}
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    text = "".join(values).encode("ascii")
    return {"offsets": ends, "values": np.frombuffer(text, np.int8)}


def read_categories(encoding: dict[str, Any]) -> tuple[Category, ...] | None:
    """Returns the categories of a feature, or None if their names are unknown.

    The names are unknown if the file has none, or if they are not ASCII: XGBoost 3.2
    stores bytes but counts characters, so the original strings cannot be recovered.
    """
    values = np.asarray(encoding["values"])
    if "offsets" not in encoding:
        return tuple(values.tolist())
    ends = np.asarray(encoding["offsets"], np.int64)
    if len(ends) < 2:
        return None
    if ends[0] != 0 or ends[-1] > len(values) or np.any(np.diff(ends) < 0):
        raise ValueError("offsets of categories must ascend within their text")
    text = values.astype(np.int8).tobytes()
    pairs = itertools.pairwise(ends.tolist())
    if not text.isascii():
        return None
    return tuple(text[first:last].decode("ascii") for first, last in pairs)


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
_MOST_LEVELS = 64  # nested containers, so that a file cannot exhaust the stack


def read_ubjson(data: bytes) -> Any:
    """Returns the value that the bytes encode; refuses bytes after it."""
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

    def skip(self, mark: bytes) -> bool:
        """Moves behind a mark, if it is the next byte."""
        found = self.data[self.offset : self.offset + 1] == mark
        self.offset += found
        return found

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
        kind = self.take(1) if self.skip(b"$") else None
        count = self.size() if self.skip(b"#") else None
        if (kind is not None and count is None) or (count is not None and count < 0):
            self.refuse(self.data[self.offset : self.offset + 1])
        if kind in _CONSTANTS:  # takes no bytes: a small file could claim any length
            self.refuse(kind)
        return kind, count

    def array(self, level: int) -> Any:
        kind, count = self.head()
        if kind in _NUMBERS and count is not None:
            dtype = _NUMBERS[kind]
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        values = []
        while len(values) != count and not (count is None and self.skip(b"]")):
            values.append(self.value(kind or self.take(1), level + 1))
        return values

    def object(self, level: int) -> dict[str, Any]:
        kind, count = self.head()
        values = {}
        while len(values) != count and not (count is None and self.skip(b"}")):
            key = self.text()
            values[key] = self.value(kind or self.take(1), level + 1)
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
