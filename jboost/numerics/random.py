# SPDX-License-Identifier: Apache-2.0
"""Random words from counters and seeds, and random subsets of rows or columns.

The bits of an entry depend on its number alone, not on the size of the array.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from jboost.entry.collectives import current_shards, first_row, total
from jboost.entry.messages import show
from jboost.kernels.calls import call
from jboost.kernels.exact_sums import skip_on_cpu
from jboost.kernels.library import choose


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

    They are the words of the key itself; their users hash them first. None gives zeros.
    """
    if key is None:
        return jnp.asarray(np.zeros(2, np.uint32))
    if not hasattr(key, "dtype"):
        raise TypeError(f"key must be one of jax.random.key, got {show(key)}")
    data = jax.random.key_data(key).astype(jnp.uint32)
    # A key of four words (rbg) repeats itself: the XOR of its halves would be 0.
    return data[:2] if data.shape[0] == 2 else hash_words(data[2:4], data[:2])


def derive_seeds(
    seed: UInt32[Array, "2"], index: Int32[Array, "*shape"]
) -> UInt32[Array, "*shape 2"]:
    """Returns another seed for each ``index``; cheap to compile and to run."""
    pair = jnp.arange(2, dtype=jnp.uint32)
    number = 2 * jnp.asarray(index)[..., None].astype(jnp.uint32)
    return hash_words(number + pair.reshape((1,) * (number.ndim - 1) + (2,)), seed)


_DIGIT = 8  # bits of the bound that are found with one collective


def sample(
    seed: UInt32[Array, "2"],
    eligible: Bool[Array, " N"],
    fraction: Float[Array, ""] | float,
) -> Bool[Array, " N"]:
    """Chooses a share of the eligible rows; all subsets are equally likely.

    Every row gets a distinct hash (``hash_words`` is a bijection), and the k least
    are chosen; the k-th least is found by bisection, counting rows. So the choice
    of a row depends on its number and on the set of eligible rows, not on the
    length of the array, nor on how rows are sharded.
    """
    if current_shards() is not None:
        return _sample_sharded(seed, eligible, fraction)
    result = jax.ShapeDtypeStruct(eligible.shape, jnp.bool_)
    run = choose(cpu=partial(call, "sample", result), xla=sample_in_xla)
    return run(seed, eligible, jnp.asarray(fraction, jnp.float32))


def sample_in_xla(
    seed: UInt32[Array, "2"],
    eligible: Bool[Array, " N"],
    fraction: Float[Array, ""] | float,
) -> Bool[Array, " N"]:
    """Computes :func:`sample` in plain XLA: the definition."""

    def narrow(eligible):
        index = jnp.arange(eligible.shape[0], dtype=jnp.uint32)
        hashes = hash_words(index, seed)
        wanted = _count_wanted(jnp.sum(eligible, dtype=jnp.int32), fraction)
        bound = jax.lax.platform_dependent(
            eligible, hashes, wanted, cpu=_find_by_counting, default=_find_by_sorting
        )
        return jnp.where(fraction < 1, eligible & (hashes <= bound), eligible)

    return skip_on_cpu(fraction < 1, narrow, lambda eligible: eligible, eligible)


def _find_by_counting(eligible, hashes, wanted):
    """Returns the k-th least hash, bit by bit."""

    def settle_bit(step, bound):
        """Sets the next bit of the bound if too few hashes lie below it."""
        bit = jnp.uint32(1) << jnp.asarray(31 - step, jnp.uint32)
        below = eligible & (hashes < bound + bit)
        fewer = jnp.sum(below, dtype=jnp.int32) < wanted
        return jnp.where(fewer, bound + bit, bound)

    # The largest bound with fewer than k hashes below it is the k-th least hash.
    return jax.lax.fori_loop(0, 32, settle_bit, jnp.uint32(0))


def _find_by_sorting(eligible, hashes, wanted):
    """Returns the k-th least hash: on a GPU, 32 passes take longer than sorting."""
    ordered = jnp.sort(jnp.where(eligible, hashes, jnp.uint32(2**32 - 1)))
    return ordered[jnp.maximum(wanted - 1, 0)]


def _count_wanted(number, fraction):
    share = jnp.round(fraction * number.astype(jnp.float32)).astype(jnp.int32)
    return jnp.clip(share, 1, number)


def _sample_sharded(seed, eligible, fraction):
    """Computes :func:`sample` for sharded rows; finds the bound digit by digit."""
    size, rounds = 1 << _DIGIT, 32 // _DIGIT

    def narrow(eligible):
        index = jnp.arange(eligible.shape[0], dtype=jnp.uint32)
        hashes = hash_words(index + first_row().astype(jnp.uint32), seed)

        def settle_digit(step, state):
            """Finds the next digit of the k-th least hash among the hashes left."""
            left, bound, wanted = state
            shift = jnp.asarray(_DIGIT * (rounds - 1 - step), jnp.uint32)
            digit = ((hashes >> shift) & (size - 1)).astype(jnp.int32)
            one = left.astype(jnp.int32)
            counts = jnp.zeros(size, jnp.int32).at[digit].add(one)
            upto = jnp.cumsum(total(counts))
            wanted = jnp.where(step == 0, _count_wanted(upto[-1], fraction), wanted)
            found = jnp.argmax(upto >= wanted).astype(jnp.int32)
            below = jnp.where(found > 0, upto[found - 1], 0)
            bound |= found.astype(jnp.uint32) << shift
            return left & (digit == found), bound, wanted - below

        start = (eligible, jnp.uint32(0), jnp.int32(0))
        _, bound, _ = jax.lax.fori_loop(0, rounds, settle_digit, start)
        return eligible & (hashes <= bound)

    return jax.lax.cond(fraction < 1, narrow, lambda eligible: eligible, eligible)
