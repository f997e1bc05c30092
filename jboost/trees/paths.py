# SPDX-License-Identifier: Apache-2.0
"""Constraints inherited from the path: leaf bounds, allowed features, leaves left.

Arrays are as small as a level; plain XLA, for either way to grow a tree.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class Paths(NamedTuple):
    """Constraints of the M slots of a level; None: no such constraint.

    Attributes:
      bounds: least and greatest leaf value below each slot's node.
      leaf_bounds: least and greatest value of each leaf of the tree grown so far.
      used: features on the path to each slot's node.
      free: number of leaves that may still be added.
    """

    bounds: Float[Array, "M 2"] | None = None
    leaf_bounds: Float[Array, "L 2"] | None = None
    used: Bool[Array, "M F"] | None = None
    groups: Bool[Array, "G F"] | None = None
    free: Int32[Array, ""] | None = None


def start(
    bounds: Float[Array, "2"] | None,
    groups: Bool[Array, "G F"] | None,
    max_leaves: int | None,
    *,
    slots: int,
    max_depth: int,
) -> Paths:
    """Returns the constraints at the root, which is in slot 0."""
    paths = Paths()
    if bounds is not None:
        paths = paths._replace(
            bounds=jnp.broadcast_to(bounds, (slots, 2)),
            leaf_bounds=jnp.broadcast_to(bounds, (2**max_depth, 2)),
        )
    if groups is not None:
        used = jnp.zeros((slots, groups.shape[1]), bool)
        paths = paths._replace(used=used, groups=jnp.asarray(groups))
    if max_leaves is not None:
        paths = paths._replace(free=jnp.int32(max_leaves - 1))
    return paths


def allow(paths: Paths, masks: Bool[Array, "M F"]) -> Bool[Array, "M F"]:
    """Removes features that the constraints forbid from the masks of the slots.

    Features on the path stay, and those of all groups that contain the whole path; at
    the root, all stay. No feature stays if no leaf may be added.
    """
    if paths.used is not None and paths.groups is not None:
        used, groups = paths.used, paths.groups
        # Counts, as products of matrices: exact below 2^24 features.
        missed = used.astype(jnp.float32) @ (~groups).astype(jnp.float32).T
        reached = (missed == 0).astype(jnp.float32) @ groups.astype(jnp.float32) > 0
        masks &= reached | used | ~jnp.any(used, axis=1, keepdims=True)
    if paths.free is not None:
        masks &= paths.free > 0
    return masks


def keep_best(
    paths: Paths, gain: Float[Array, " M"], found: Bool[Array, " M"]
) -> Bool[Array, " M"]:
    """Keeps the splits of highest gain while leaves remain, ties to the lower slot."""
    if paths.free is None:
        return found
    order = jnp.argsort(jnp.where(found, -gain, jnp.inf), stable=True)
    rank = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.shape[0], dtype=order.dtype))
    )
    return found & (rank < paths.free)


def descend(
    paths: Paths,
    level: Int32[Array, ""] | int,
    position: Int32[Array, " M"],
    feature: Int32[Array, " M"],
    found: Bool[Array, " M"],
    child_bounds: Float[Array, "M 2 2"] | None,
    source: Int32[Array, " P"],
    *,
    slots: int,
    max_depth: int,
) -> Paths:
    """Passes constraints to slots 2 r and 2 r + 1, the children of source[r].

    Positions are those of nodes on their own level.
    """
    if paths.bounds is not None and paths.leaf_bounds is not None:
        assert child_bounds is not None
        child = 2 * position[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
        # Leaves under a node that is not split are its leftmost.
        leaf = child << (max_depth - 1 - level)
        leaf = jnp.where(found[:, None], leaf, 2**max_depth).reshape(-1)
        paths = paths._replace(
            bounds=child_bounds[source].reshape(-1, 2)[:slots],
            leaf_bounds=paths.leaf_bounds.at[leaf].set(
                child_bounds.reshape(-1, 2), mode="drop"
            ),
        )
    if paths.used is not None:
        every = jnp.arange(paths.used.shape[1], dtype=jnp.int32)
        used = (paths.used | (feature[:, None] == every[None, :]))[source]
        paths = paths._replace(used=jnp.repeat(used, 2, axis=0)[:slots])
    if paths.free is not None:
        paths = paths._replace(free=paths.free - jnp.sum(found, dtype=jnp.int32))
    return paths
