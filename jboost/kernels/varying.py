# SPDX-License-Identifier: Apache-2.0
"""Tells JAX which values differ between the devices of a mesh."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike


def vary(value: Array, *others: ArrayLike) -> Array:
    """Makes a value depend on others, as far as JAX can see.

    ``jax.shard_map`` must be told what differs between devices: the results of calls
    that it cannot look into, and the start of a loop whose steps differ. The compiler
    sees that nothing depends on the choice, and leaves it out.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return value
    differs = [jnp.any(other != other) for other in others]
    return jnp.where(jnp.any(jnp.stack(differs)), value, value)
