# SPDX-License-Identifier: Apache-2.0
"""The implementation, the devices and the mesh that functions run on.

The implementation is local to a thread, and part of the keys of JAX's caches.
"""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike

_implementation = jax.make_user_context(None)


def use_implementation(name: str | None) -> AbstractContextManager[None]:
    """Sets the implementation within a ``with`` block; None means the best one.

    JAX may trace rules of ``custom_jvp`` and ``custom_vmap`` after the block has ended,
    so such rules must not read the implementation themselves.
    """
    return _implementation(name)


def current_implementation() -> str | None:
    """Returns the current implementation, None for the best one."""
    return _implementation.value


def default_platform() -> str:
    """Returns the platform that NumPy arrays are put on.

    ``jax.default_backend()`` does not know of ``jax_default_device``.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def runs_on_cpu() -> bool:
    """Returns whether NumPy arrays are put on a CPU."""
    return default_platform() == "cpu"


def is_on_cpu(array: Array) -> bool:
    """Returns whether all of an array is on CPU devices."""
    return all(device.platform == "cpu" for device in array.devices())


def find_mesh(x: Any) -> Any:
    """Returns the mesh over which the rows of an array are divided; None if none."""
    sharding: Any = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return sharding.mesh if sharding.spec and sharding.spec[0] is not None else None


def map_shards(function: Any, x: Any, *others: Any) -> Any:
    """Returns ``function(x, *others)`` of arrays of rows, sharded as those of x."""
    mesh, rows = x.sharding.mesh, PartitionSpec(x.sharding.spec[0])
    specs: Any = dict(mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(jax.shard_map(function, **specs))(x, *others)


def vary(value: Array, *others: ArrayLike) -> Array:
    """Makes a value depend on others, as far as JAX can see.

    ``jax.shard_map`` cannot infer that some values differ between devices: the results
    of opaque calls, and the start of a loop with steps that differ. The compiler finds
    that the result does not depend on the choice, and removes it.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return value
    differs = [jnp.any(other != other) for other in others]
    return jnp.where(jnp.any(jnp.stack(differs)), value, value)
