# SPDX-License-Identifier: Apache-2.0
"""A block's codes as bytes: as the CPU kernels take them, or encoded.

Columns of few codes, or of codes that compress well, are encoded: a column takes as few
bits a code as its highest code needs (1, 2, 4, 8 or 16), and is compressed if that
makes it much smaller. Where this does not make a block much smaller, its codes are
stored as they are, twice: by feature, from which rows are routed, and by row, from
which they are summed. Such files can be mapped into memory and used without a copy.
"""

import zlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jboost.kernels import library
from jboost.kernels.code_operands import packed_shape
from jboost.streams.block_headers import count_encoded

_DEFLATED_SHARE = 1 / 3  # of the packed bytes: what deflating must achieve
_SAMPLE = 1 << 15  # bytes that are deflated to see whether the rest is worth it
_ENCODED_SHARE = 1 / 2  # of the codes' bytes: what encoding must achieve


def encode_columns(
    codes: Shaped[np.ndarray, "F n"],
) -> tuple[list[dict[str, Any]], list[bytes]] | None:
    """Returns how columns are encoded, and their bytes; None: not worth it."""
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
    """Arranges codes by row; see :func:`jboost.kernels.code_operands.pack`."""
    shape: Any = packed_shape(*codes.shape)
    if library.available():
        result = jax.ShapeDtypeStruct(shape, codes.dtype)
        num_bins = 1 << 8 * codes.dtype.itemsize
        return library.call_on_host("pack", result, codes, num_bins=num_bins)
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
      ValueError: compressed bytes are not those of so many codes.
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
