# SPDX-License-Identifier: Apache-2.0
"""Random bits from counters: a seeded hash of 32-bit words.

In: two words of seed, and what is to be hashed. Out: words that look random. The bits
of an entry depend on its number alone, not on the size of the array.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32


def hash_words(
    word: UInt32[Array, "*shape"], words: UInt32[Array, "2"]
) -> UInt32[Array, "*shape"]:
    """A seeded bijection of 32-bit words that looks random.

    Two rounds of an xor-shift-multiply mixer (constants: Wellons' lowbias32), each
    after adding a word of the seed; every step can be undone, so distinct words have
    distinct hashes.
    """
    for part in (words[0], words[1]):
        word = word + part
        word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
        word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
        word = word ^ (word >> 16)
    return word


def derive(
    words: UInt32[Array, "2"], index: Int32[Array, "*shape"]
) -> UInt32[Array, "*shape 2"]:
    """Two words for each ``index``-th use of ``words``; cheap to compile and to run."""
    pair = jnp.arange(2, dtype=jnp.uint32)
    number = 2 * jnp.asarray(index)[..., None].astype(jnp.uint32)
    return hash_words(number + pair.reshape((1,) * (number.ndim - 1) + (2,)), words)
