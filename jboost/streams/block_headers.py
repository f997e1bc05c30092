# SPDX-License-Identifier: Apache-2.0
"""Checks the header of a block file before anything is read by it.

In: the text of a header, and what the file must hold. Out: the header, or an error that
says what is wrong. Afterwards, no part lies beyond the file, codes have the size that
their readers allocate, and arrays hold plain numbers.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np

from jboost.kernels.code_operands import packed_shape

_BITS = (1, 2, 4, 8, 16)
_KINDS = "fiub"  # of numbers, which hold no references to objects


class Layout(NamedTuple):
    """What all files of a set have in common.

    Attributes:
      identity: written into every file of the set.
      num_features: columns of codes.
      dtype: of the codes in memory.
    """

    identity: str
    num_features: int
    dtype: np.dtype


def count_encoded(bits: int, num_rows: int) -> int:
    """Returns the bytes of a column of codes of so many bits, before compression."""
    return -(-num_rows // (8 // bits)) if bits < 8 else num_rows * bits // 8


def read_header(
    text: bytes, layout: Layout, number: int, num_rows: int, data_bytes: int
) -> dict[str, Any]:
    """Parses and checks the header of a block.

    Args:
      text: the header.
      layout: of the set of files.
      number: of the block.
      num_rows: of the block.
      data_bytes: the size of the file behind the header.

    Raises:
      ValueError: the block has another header.
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
