# SPDX-License-Identifier: Apache-2.0
"""Random bits from counters: a seeded hash of 32-bit words.

In: two words of seed, and what is to be hashed. Out: words that look random. The bits
of an entry depend on its number alone, not on the size of the array.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Key, UInt32

from jboost.entry.representation import show


def hash_words(
    word: UInt32[Array, "*shape"], seed: UInt32[Array, "2"]
) -> UInt32[Array, "*shape"]:
    """Hashes 32-bit words by a seeded bijection that looks random.

    Two rounds of an xor-shift-multiply mixer (constants: Wellons' lowbias32), each
    after adding a word of the seed; every step can be undone, so distinct words have
    distinct hashes.
    """
    for part in (seed[0], seed[1]):
        word = word + part
        word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
        word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
        word = word ^ (word >> 16)
    return word


def seed_from_key(key: Key[Array, ""] | None) -> UInt32[Array, "2"]:
    """Returns the two words that all random numbers of a run are derived from.

    The words of the key itself; their users hash them first. None gives zeros.
    """
    if key is None:
        return jnp.asarray(np.zeros(2, np.uint32))
    if not hasattr(key, "dtype"):
        raise TypeError(f"key must be one of jax.random.key, got {show(key)}")
    data = jax.random.key_data(key).astype(jnp.uint32)
    # A key of four words (rbg) repeats itself: the XOR of its halves would be 0.
    return data[:2] if data.shape[0] == 2 else hash_words(data[2:4], data[:2])


def derive(
    seed: UInt32[Array, "2"], index: Int32[Array, "*shape"]
) -> UInt32[Array, "*shape 2"]:
    """Returns another seed for each ``index``; cheap to compile and to run."""
    pair = jnp.arange(2, dtype=jnp.uint32)
    number = 2 * jnp.asarray(index)[..., None].astype(jnp.uint32)
    return hash_words(number + pair.reshape((1,) * (number.ndim - 1) + (2,)), seed)
