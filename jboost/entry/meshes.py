# SPDX-License-Identifier: Apache-2.0
"""Finds the mesh of arrays whose rows are sharded, and maps functions of rows over it.

In: arrays as the caller has placed them. Out: the mesh, or results placed alike.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def find_mesh(x: Any) -> Mesh | None:
    """Returns the mesh over which the rows of an array are divided; None if none."""
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec:
        return None
    if sharding.spec[0] is None or sharding.mesh.size == 1:
        return None
    return sharding.mesh


def map_shards(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Returns ``function(x, *others)``, computed where the rows of x are.

    Args:
      function: of rows; its results have the rows in front.
      x: sharded over its rows, and ``others`` likewise, or None.
    """
    rows = PartitionSpec(x.sharding.spec[0])
    run = jax.shard_map(
        function, mesh=x.sharding.mesh, in_specs=(rows,) * (1 + len(others)),
        out_specs=rows, check_vma=False,
    )  # fmt: skip
    return jax.jit(run)(x, *others)
