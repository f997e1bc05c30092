# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows in files: codes, and other values of each row.

In: arrays of a block. Out: the same arrays, read one block ahead of their use. One
file holds one block::

    magic | length and checksum of the header | header (JSON) | codes | other values

Codes lie there as the CPU kernels take them, and the file is mapped into memory and
used without a copy; or encoded, if that takes much less room. See
:mod:`jboost.streams.column_codes`. Every part has a checksum. It is tested when the
part is first read, and again if the file has changed since.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from jaxtyping import Shaped

from jboost.kernels.code_operands import packed_shape
from jboost.streams.block_files import MAGIC, Block, BlockFile, open_block
from jboost.streams.block_headers import Layout
from jboost.streams.column_codes import (
    decode_column,
    encode_columns,
    pack_rows,
)
from jboost.streams.folders import BlockError

_ALIGNMENT = 64  # bytes: XLA takes host memory without a copy only from such addresses
NUM_BUFFERS = 2  # one block in use, one being read


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
    def layout(self) -> Layout:
        """What all files have in common."""
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

    Returns:
      The block, which knows in which order its codes lie.

    Raises:
      BlockError: the file cannot be written.
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

    encoded = encode_columns(codes)
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
        """Yields each block with the codes of some features; None: of all.

        Raises:
          BlockError: a file is damaged, incomplete or gone.
        """
        return self._read_ahead(partial(self._take_columns, features))

    def read_for_kernels(self, features: Sequence[int]) -> Iterator[tuple[Block, Any]]:
        """Yields each block with its codes by feature and by row.

        Args:
          features: those whose codes by feature will be needed; the others are there,
            but are not read ahead.

        Raises:
          BlockError: a file is damaged, incomplete or gone.
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

    Raises:
      BlockError: the file is damaged, incomplete or gone.
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
