# SPDX-License-Identifier: Apache-2.0
"""Every exchange between devices and between processes.

In: values of one shard of the rows. Out: what they are over all shards. A shard is the
rows on one device of a mesh. The functions on arrays are the identity where rows are
not sharded, so that one program text serves both cases.

The shards in force are held in a context, like the implementation of the kernels
(:mod:`jboost.entry.implementation`): a program traced within :func:`use_shards` sums
over all shards. Values that depend on no row, or on sums over rows, are the same on all
shards; conditions of loops and branches that contain a collective must be such values.

The functions at the end exchange values of the host between processes that train one
model together. They do nothing outside :func:`use_processes`, and every process must
call them in the same order.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Int32, UInt64

from jboost.entry.programs import compiled


class Shards(NamedTuple):
    """How the rows of a table are divided among devices.

    Attributes:
      axes: names of the mesh axes over which rows are divided, in order.
      sizes: the number of rows of each shard, without the padding at its end; the
        global order of rows is that of the shards.
      padded: the number of rows that one device would hold, with padding.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    padded: int

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The global number of the first row of each shard."""
        return (0, *np.cumsum(self.sizes)[:-1].tolist())


_shards = jax.make_user_context(None)


def use_shards(shards: Shards | None) -> AbstractContextManager[None]:
    """Sets the shards within a ``with`` block; None: every row is on this device.

    JAX may trace rules of ``custom_jvp`` and ``custom_vmap`` after the block has ended,
    so such rules must not read the shards themselves.
    """
    return _shards(shards)


def current_shards() -> Shards | None:
    """Returns the shards in force; None where rows are not divided."""
    return _shards.value


def total(values: Array) -> Array:
    """Sums integers over all shards; sums of floats would depend on their order."""
    assert not jnp.issubdtype(values.dtype, jnp.floating)
    shards = current_shards()
    return values if shards is None else jax.lax.psum(values, shards.axes)


def most(values: Array) -> Array:
    """Returns the greatest value of all shards, element by element."""
    shards = current_shards()
    return values if shards is None else jax.lax.pmax(values, shards.axes)


def least(values: Array) -> Array:
    """Returns the least value of all shards, element by element."""
    shards = current_shards()
    return values if shards is None else jax.lax.pmin(values, shards.axes)


def exchange(
    sums: list[Array], extremes: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Applies :func:`total` and :func:`most` to several arrays by one collective.

    Args:
      sums: integers.
      extremes: float32. Next to sums, the bits of each shard have a place of their own
        in the sum.
    """
    shards = current_shards()
    if shards is None:
        return sums, extremes
    if not sums:
        whole, split = ravel_pytree(extremes)
        return [], split(most(whole))
    if not extremes:
        whole, split = ravel_pytree(sums)
        return split(total(whole)), []
    own, split_extremes = ravel_pytree(extremes)
    bits = jax.lax.bitcast_convert_type(own, jnp.int32)
    places = jnp.zeros((len(shards.sizes), bits.size), jnp.int32)
    places = places.at[jax.lax.axis_index(shards.axes)].set(bits)
    whole, split = ravel_pytree([*sums, places])
    *sums, places = split(total(whole))
    every = jax.lax.bitcast_convert_type(places, jnp.float32)
    return sums, split_extremes(jnp.max(every, axis=0))


def some(condition: Bool[ArrayLike, "*s"]) -> Any:
    """Returns whether a condition holds on some shard, element by element: [*s]."""
    if current_shards() is None:
        return condition
    return most(jnp.asarray(condition).astype(jnp.int32)) > 0


def every(condition: Bool[Array | np.ndarray | np.bool, "*s"]) -> Any:
    """Returns whether a condition holds on every shard, element by element: [*s]."""
    return ~some(~condition)


def gather(values: Array) -> Array:
    """Concatenates the values of all shards, in their order, along the first axis."""
    shards = current_shards()
    if shards is None:
        return values
    return jax.lax.all_gather(values, shards.axes, tiled=True)


def gather_rows(values: Any) -> Any:
    """Returns all rows of arrays [n, ...], in global order and without padding."""
    shards = current_shards()
    if shards is None:
        return values

    def collect(array):
        parts = jax.lax.all_gather(array, shards.axes)
        kept = [part[:size] for part, size in zip(parts, shards.sizes, strict=True)]
        return jnp.concatenate(kept)

    return jax.tree.map(collect, values)


def first_row() -> Int32[Array, ""]:
    """Returns the global number of this shard's first row."""
    shards = current_shards()
    if shards is None:
        return jnp.int32(0)
    firsts = jnp.asarray(np.array(shards.first_rows, np.int32))
    return firsts[jax.lax.axis_index(shards.axes)]


def count_rows(num_rows: int) -> int:
    """Returns the number of rows on one device instead of ``num_rows`` on each."""
    shards = current_shards()
    return num_rows if shards is None else shards.padded


def real_rows(num_rows: int) -> Bool[Array, " n"]:
    """Returns which rows of this shard are no padding."""
    index = jnp.arange(num_rows, dtype=jnp.int32)
    shards = current_shards()
    if shards is None:
        return index >= 0
    sizes = jnp.asarray(np.array(shards.sizes, np.int32))
    return index < sizes[jax.lax.axis_index(shards.axes)]


def on_first_shard(values: Array) -> Array:
    """Returns the values on the first shard, 0 on the others."""
    shards = current_shards()
    if shards is None:
        return values
    return jnp.where(jax.lax.axis_index(shards.axes) == 0, values, 0)


def take_rows(values: Any, rows: Int32[np.ndarray, " S"]) -> Any:
    """Returns rows of arrays [n, ...] by their global numbers, the same on all shards.

    Rows beyond the last one are 0.
    """
    if current_shards() is None:
        return jax.tree.map(lambda array: array[rows], values)
    num_rows = len(jax.tree.leaves(values)[0])
    index = jnp.asarray(rows) - first_row()
    own = (index >= 0) & (index < num_rows)
    index = jnp.clip(index, 0, num_rows - 1)
    own &= real_rows(num_rows)[index]

    def take(array):
        chosen = array[index]
        if chosen.dtype.itemsize == 4:
            bits = jax.lax.bitcast_convert_type(chosen, jnp.int32)
        else:
            bits = chosen.astype(jnp.int32)
        mask = own.reshape(-1, *(1,) * (bits.ndim - 1))
        bits = total(jnp.where(mask, bits, 0))  # only one shard has the row
        if chosen.dtype.itemsize == 4:
            return jax.lax.bitcast_convert_type(bits, chosen.dtype)
        return bits.astype(chosen.dtype)

    return jax.tree.map(take, values)


_together = ContextVar("_together", default=False)
_polls = itertools.count()  # the same on all processes


@contextmanager
def use_processes(together: bool) -> Iterator[None]:
    """Sets within a ``with`` block whether all processes train one model together."""
    token = _together.set(together and jax.process_count() > 1)
    try:
        yield
    finally:
        _together.reset(token)


def num_processes() -> int:
    """Returns how many processes train the model."""
    return jax.process_count() if _together.get() else 1


def process_number() -> int:
    """Returns the number of this process among those that train the model."""
    return jax.process_index() if _together.get() else 0


def has_lost_others(error: Exception) -> bool:
    """Returns whether an error tells that an exchange with other processes failed.

    JAX raises a JaxRuntimeError where it waits for a result, and a ValueError with the
    same text where it starts a program.
    """
    failed = isinstance(error, jax.errors.JaxRuntimeError)
    status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
    return num_processes() > 1 and (failed or bool(status))


def slowest(seconds: float) -> float:
    """Returns the longest time that a process took."""
    if num_processes() == 1:
        return seconds
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def total_of_processes(values: UInt64[np.ndarray, "*s"]) -> UInt64[np.ndarray, "*s"]:
    """Sums over all processes, modulo 2^64."""
    if num_processes() == 1:
        return values
    # JAX may be without integers of 64 bits.
    words = np.asarray(multihost_utils.process_allgather(values.view(np.uint32)))
    whole = np.ascontiguousarray(words).view(np.uint64)
    return np.asarray(np.sum(whole, axis=0, dtype=np.uint64))


def add_processes(values: Any) -> Any:
    """Sums arrays of int32 over all processes, modulo 2^32."""
    if num_processes() == 1:
        return values
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first[rank] for rank in range(num_processes())]
    mesh = Mesh(np.array(devices), ("processes",))
    operand = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("processes")), np.asarray(values)[None]
    )
    return np.asarray(compiled(_add_processes, mesh)(operand))


def _add_processes(mesh, values):
    def add(own):
        return jax.lax.psum(own[0], "processes")

    specs: Any = dict(in_specs=PartitionSpec("processes"), out_specs=PartitionSpec())
    return jax.shard_map(add, mesh=mesh, **specs)(values)


def gather_numbers(number: int) -> list[int]:
    """Returns a number of every process, in order of rank."""
    if num_processes() == 1:
        return [number]
    found = multihost_utils.process_allgather(np.array([number], np.int32))
    return np.asarray(found).reshape(-1).tolist()


def gather_tables(tables: Any) -> Any:
    """Returns the rows of arrays [n, ...] of all processes, in order of rank."""
    if num_processes() == 1:
        return tables
    sizes = gather_numbers(len(jax.tree.leaves(tables)[0]))

    def collect(array):
        room = np.zeros((max(1, *sizes), *array.shape[1:]), array.dtype)
        room[: len(array)] = array
        # Bytes, because JAX would convert numbers of 64 bits.
        parts = multihost_utils.process_allgather(room.reshape(-1).view(np.uint8))
        parts = np.asarray(parts).view(array.dtype).reshape(len(sizes), *room.shape)
        kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return np.concatenate(kept)

    return jax.tree.map(collect, tables)


def gather_texts(text: str) -> list[str]:
    """Returns a text of every process, in order of rank."""
    content = np.frombuffer(text.encode(), np.uint8)
    ends = np.cumsum(gather_numbers(len(content)))
    parts = np.split(gather_tables(content), ends[:-1])
    return [part.tobytes().decode() for part in parts]


@contextmanager
def agree(*kinds: type[Exception]) -> Iterator[None]:
    """Raises an error of a ``with`` block, which exchanges nothing, on all processes.

    Args:
      kinds: of errors; TypeError and ValueError if none is given.

    Raises:
      Exception: what the block raised here; elsewhere the same kind, with the number
        of the first process where it failed.
    """
    kinds, failures, number = kinds or (TypeError, ValueError), [], 0
    try:
        yield
    except kinds as error:
        failures.append(error)
        number = 1 + [isinstance(error, kind) for kind in kinds].index(True)
    found = gather_numbers(number)
    if not any(found):
        return
    texts = gather_texts("".join(map(str, failures)))
    if failures:
        raise failures.pop()  # its traceback holds this frame: a cycle would keep rows
    rank = next(rank for rank, number in enumerate(found) if number)
    raise kinds[found[rank] - 1](f"process {rank}: {texts[rank]}")


def run_on_first(function: Callable[[], bytes | None]) -> bytes | None:
    """Runs a function on process 0 only; all processes return its result.

    Raises:
      OSError, ValueError: on all processes, if the function raises it.
    """
    if num_processes() == 1:
        return function()
    result, kind, failures = None, 0, []
    if process_number() == 0:
        try:
            result = function()
        except (OSError, ValueError) as error:
            failures, result = [error], str(error).encode("utf-8", "replace")
            kind = 2 if isinstance(error, OSError) else 1
    size = -1 if result is None else len(result)
    kind, size = multihost_utils.broadcast_one_to_all(np.array([kind, size], np.int32))
    if size >= 0:
        padded = np.zeros(-(-size // 4), np.int32)
        if result is not None:
            padded.view(np.uint8)[:size] = np.frombuffer(result, np.uint8)
        padded = np.asarray(multihost_utils.broadcast_one_to_all(padded))
        result = padded.view(np.uint8)[:size].tobytes()
    if kind:
        if failures or result is None:
            raise failures.pop()
        raise (ValueError, OSError)[kind - 1](f"on process 0: {result.decode()}")
    return result


def awaits_preemption() -> bool:
    """Returns whether JAX handles SIGTERM, as a notice that machines are taken away.

    It does if ``jax.config.update("jax_enable_preemption_service", True)`` came before
    ``jax.distributed.initialize``.
    """
    enabled = jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
    return bool(enabled) and jax.distributed.is_initialized()


def is_preempted() -> bool:
    """Returns whether a process of this run got a notice of preemption.

    All processes must ask equally often, and are told at the same call; see
    ``jax.experimental.multihost_utils.reached_preemption_sync_point``.
    """
    # Processes that train models of their own ask at different times.
    alone = num_processes() == 1 and jax.process_count() > 1
    if alone or not awaits_preemption():
        return False
    return bool(multihost_utils.reached_preemption_sync_point(next(_polls)))
