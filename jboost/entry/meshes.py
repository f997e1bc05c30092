# SPDX-License-Identifier: Apache-2.0
"""The mesh over which rows are sharded, and functions of rows mapped over it."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


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
