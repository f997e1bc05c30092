# SPDX-License-Identifier: Apache-2.0
"""Packs small arrays of several types into one array of words.

The arrays have 32 bits per entry, or are booleans. A program that returns one array is
compiled, called and read faster than one that returns a dozen.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


def pack(tree: Any) -> Int32[Array, " W"]:
    """Concatenates the bits of all arrays."""
    return jnp.concatenate([_to_words(leaf) for leaf in jax.tree.leaves(tree)])


def count_words(like: Any) -> int:
    """Returns W, the number of words of a pytree of such shapes."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(like))


def unpack(words: Int32[np.ndarray, "R W"], like: Any) -> Any:
    """Returns the pytree that was packed in each row, with an axis R in front.

    ``like`` has the shapes and types of the arrays that were packed.
    """
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])
    parts = np.split(words, ends[:-1], axis=1)
    return jax.tree.unflatten(structure, map(_from_words, parts, leaves))


def _to_words(leaf):
    if leaf.dtype == jnp.bool_:
        return leaf.reshape(-1).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(leaf.reshape(-1), jnp.int32)


def _from_words(words, like):
    shape = (len(words), *np.shape(like))
    if like.dtype == bool:
        return words.astype(bool).reshape(shape)
    return np.ascontiguousarray(words).view(like.dtype).reshape(shape)
