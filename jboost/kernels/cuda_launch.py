# SPDX-License-Identifier: Apache-2.0
"""Launches CUDA kernels of the folder cuda/ from JAX programs.

The kernels must have been loaded; see :func:`jboost.kernels.library.are_ready`, which
tries the simplest of them, ``sum_keys``.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Int32

from jboost.entry.context import vary
from jboost.kernels.calls import find_handler, ints

SHARED_BYTES = 96 * 1024  # bytes per block; every GPU since 2020 has this much
THREADS = 512
PROCESSORS = 132  # multiprocessors of an H100
BLOCKS = 2 * PROCESSORS  # in flight
INT = 4  # bytes
LANES = 32  # the lanes of a warp
_MOST_MEMBERS = 65_535  # members of a batch in one launch
_MOST_BYTES = 48 * 1024  # the largest table of a block, with its copies
_HANDLERS = {
    "cpu": "launch_on_host",
    "CUDA": {"initialize": "launch_prepare", "execute": "launch"},
}


class Launch(NamedTuple):
    """One launch of a kernel; static.

    Attributes:
      grid: numbers of blocks along axes x and y; axis z is the batch.
      numbers: integer arguments that follow the buffers of the kernel.
      shared_bytes: the size of the memory that the threads of a block share.
      zeroed: whether each result must be filled with zeros before the launch.
    """

    kernel: str
    results: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, int]
    numbers: tuple[int, ...]
    shared_bytes: int = 0
    threads: int = THREADS
    zeroed: tuple[bool, ...] = (False,)


def launch(description: Launch, *operands: Any) -> Any:
    """Runs a kernel; under ``vmap`` all members of the batch in one launch."""
    shared = (False,) * len(operands)
    results = _launch_batch(description, shared, None, operands)
    return results if len(results) > 1 else results[0]


def _launch_batch(description, batched, size, operands):
    """Runs a kernel on a batch: the first axis of some operands and of all results.

    Args:
      size: the length of the batch axis; None without a batch.
    """

    @custom_vmap
    def run(*operands):
        if size is None or size <= _MOST_MEMBERS:
            return _call(description, batched, size, operands)
        return _call_parts(description, batched, size, operands)

    @run.def_vmap
    def run_batch(new_size, newly, *operands):
        flags = tuple(old or new for old, new in zip(batched, newly, strict=True))
        merged = [
            _merge_axes(
                operand, new_size if new else None, size if old else None, whole
            )
            for operand, new, old in zip(operands, newly, batched, strict=True)
            for whole in [(new_size, size)]
        ]
        flat = new_size if size is None else new_size * size
        results = _launch_batch(description, flags, flat, merged)
        axes = (new_size,) if size is None else (new_size, size)
        results = tuple(each.reshape(*axes, *each.shape[1:]) for each in results)
        return results, (True,) * len(results)

    return run(*operands)


def _merge_axes(operand, new, old, whole):
    """Returns the operand with one axis for both batches; as it is, if in neither."""
    if new is None and old is None:
        return operand
    if whole[1] is None:
        return operand
    inner = operand.shape[(new is not None) + (old is not None) :]
    axes = (1 if axis is None else axis for axis in (new, old))
    operand = jnp.broadcast_to(operand.reshape(*axes, *inner), (*whole, *inner))
    return operand.reshape(whole[0] * whole[1], *inner)


def _call_parts(description, batched, size, operands):
    """Runs a kernel on a batch of more members than a grid has along its axis z."""
    parts = []
    for first in range(0, size, _MOST_MEMBERS):
        last = min(size, first + _MOST_MEMBERS)
        some = [
            operand[first:last] if member else operand
            for operand, member in zip(operands, batched, strict=True)
        ]
        parts.append(_call(description, batched, last - first, some))
    return tuple(map(jnp.concatenate, zip(*parts, strict=True)))


def _call(description, batched, size, operands):
    _register()
    lead = () if size is None else (size,)
    results = tuple(
        jax.ShapeDtypeStruct((*lead, *each.shape), each.dtype)
        for each in description.results
    )
    members = (*batched, *((size is not None,) * len(results)))
    strides = [
        each.size * each.dtype.itemsize // (size or 1) if member else 0
        for each, member in zip((*operands, *results), members, strict=True)
    ]
    # XLA writes the zeros: in a CUDA graph a kernel costs less than clearing memory.
    zeroed = [i for i, each in enumerate(description.zeroed) if each]
    zeros = [jnp.zeros(results[i].shape, results[i].dtype) for i in zeroed]
    aliases = {len(operands) + place: i for place, i in enumerate(zeroed)}
    found = jax.ffi.ffi_call("jboost_launch", results, input_output_aliases=aliases)(
        *operands,
        *zeros,
        grid=np.array([*description.grid, 1 if size is None else size], np.int64),
        kernel=description.kernel,
        numbers=np.array(description.numbers, np.int64),
        shared_bytes=np.int64(description.shared_bytes),
        strides=np.array(strides, np.int64),
        threads=np.int64(description.threads),
        zeros=np.int64(len(zeros)),
    )
    return tuple(vary(each, *operands) for each in found)


@cache
def _register():
    for platform, handlers in _HANDLERS.items():
        wrapped = jax.tree.map(find_handler, handlers)
        jax.ffi.register_ffi_target("jboost_launch", wrapped, platform=platform)


def divide_rows(num_rows: int, blocks: int, least: int = 4096) -> tuple[int, int]:
    """Divides rows among about ``blocks`` blocks.

    Returns:
      The number of blocks, at least 1, and of rows per block, a multiple of 4.
    """
    rows = max(least, -(-num_rows // max(1, blocks)))
    rows = -(-rows // 4) * 4
    return max(1, -(-num_rows // rows)), rows


def count_copies(cells: int) -> int:
    """Returns how many copies of a table fit: a power of two, or 0."""
    fit = _MOST_BYTES // (max(1, cells) * INT)
    return min(LANES, 1 << (fit.bit_length() - 1)) if fit else 0


def sum_keys(
    values: Int32[Array, "N C"], keys: Int32[Array, " N"], num_keys: int
) -> Int32[Array, "G C"]:
    """Sums rows of ``values`` by key; leaves out keys outside 0 to num_keys - 1."""
    num_rows, channels = values.shape
    copies = count_copies(num_keys * channels)
    blocks, rows = divide_rows(num_rows, BLOCKS)
    run = Launch(
        "sum_by_key",
        (ints(num_keys, channels),),
        (blocks, 1),
        (num_rows, channels, num_keys, rows, copies),
        num_keys * channels * copies * INT,
        zeroed=(True,),
    )
    return launch(run, values, keys)
