# SPDX-License-Identifier: Apache-2.0
"""Every exchange between devices: sums, extremes and concatenations over shards.

A shard is the rows on one device of a mesh. The functions on arrays are the identity if
rows are not sharded, so that one program text serves both cases.

The shards in force are held in a context, like the implementation of the kernels
(:mod:`jboost.entry.context`): a program traced within :func:`use_shards` sums
over all shards. Values that depend on no row, or on sums over rows, are the same on all
shards; conditions of loops and branches that contain a collective must be such values.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, ArrayLike, Bool, Int32


class Shards(NamedTuple):
    """How the rows of a table are divided among devices.

    Attributes:
      axes: names of the mesh axes over which rows are divided, in order.
      sizes: the number of rows of each shard, without the padding at its end; the
        global order of rows is that of the shards.
      padded: the number of rows that one device would hold, with padding.
      apart: whether CPUs of several processes exchange values, few enough that each
        may send to each. Gloo's sums and gathers take ten times as long to start.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    padded: int
    apart: bool = False

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The global number of the first row of each shard."""
        return (0, *np.cumsum(self.sizes)[:-1].tolist())


def are_apart(mesh: Mesh | AbstractMesh) -> bool:
    """Returns the field ``apart`` of the shards of a mesh."""
    if isinstance(mesh, AbstractMesh) or mesh.size > _FEW_DEVICES:
        return False
    devices = mesh.devices.flat
    several = len({device.process_index for device in devices}) > 1
    return several and all(device.platform == "cpu" for device in devices)


_FEW_DEVICES = 16  # each sends to each
_FEW = 2**14  # values that every shard sends whole to every other
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
    if shards is None:
        return values
    if not shards.apart:
        return jax.lax.psum(values, shards.axes)
    num_shards, size = len(shards.sizes), values.size
    if num_shards == 2 or size <= _FEW:
        return jnp.sum(_list_all(values, shards), axis=0, dtype=values.dtype)
    # Each shard sums one part of the values, and sends the sums to all.
    flat = jnp.pad(values.reshape(-1), (0, -size % num_shards))
    parts = jax.lax.all_to_all(flat.reshape(num_shards, -1), shards.axes, 0, 0)
    sums = _list_all(jnp.sum(parts, axis=0, dtype=values.dtype), shards)
    return sums.reshape(-1)[:size].reshape(values.shape)


def _list_all(values, shards):
    """Returns the values of all shards, [S, ...]."""
    if not shards.apart:
        return jax.lax.all_gather(values, shards.axes)
    copies = jnp.broadcast_to(values, (len(shards.sizes), *values.shape))
    return jax.lax.all_to_all(copies, shards.axes, 0, 0)


def most(values: Array) -> Array:
    """Returns the greatest value of all shards, element by element."""
    shards = current_shards()
    if shards is None:
        return values
    if not shards.apart:
        return jax.lax.pmax(values, shards.axes)
    return jnp.max(_list_all(values, shards), axis=0)


def least(values: Array) -> Array:
    """Returns the least value of all shards, element by element."""
    shards = current_shards()
    if shards is None:
        return values
    if not shards.apart:
        return jax.lax.pmin(values, shards.axes)
    return jnp.min(_list_all(values, shards), axis=0)


def exchange(
    sums: list[Array], extremes: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Applies :func:`total` to integers and :func:`most` to float32, in one collective.

    If there are sums, too, the bits of the extremes of each shard are sent in a place
    of their own of one long sum.
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
    """Concatenates the values of all shards, in shard order, along the first axis."""
    shards = current_shards()
    if shards is None:
        return values
    every = _list_all(values, shards)
    return every.reshape(-1, *every.shape[2:])


def gather_rows(values: Any) -> Any:
    """Returns all rows of arrays [n, ...], in global order and without padding."""
    shards = current_shards()
    if shards is None:
        return values

    def collect(array):
        parts = _list_all(array, shards)
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
    """Returns a mask of this shard's rows that are not padding."""
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
