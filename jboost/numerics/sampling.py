# SPDX-License-Identifier: Apache-2.0
"""Random subsets of rows or columns, without replacement, from explicit seeds.

In: two seed seed, what may be chosen, a fraction. Out: a mask with exactly
max(1, round(fraction * number)) entries. Nothing is sorted.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jboost.kernels import sampling_cpu
from jboost.kernels.library import choose
from jboost.numerics.random_bits import hash_words


def sample(
    seed: UInt32[Array, "2"],
    eligible: Bool[Array, " N"],
    fraction: Float[Array, ""] | float,
) -> Bool[Array, " N"]:
    """Chooses a share of the eligible entries, all subsets being equally likely.

    Every entry gets a distinct hash (``hash_words`` is a bijection), and the k least
    are chosen; the k-th least is found by bisection, counting entries. So the fate
    of an entry depends on its index and on which others are eligible, not on the
    length of the array.
    """
    run = choose(cpu=sampling_cpu.sample, xla=sample_in_xla)
    return run(seed, eligible, jnp.asarray(fraction, jnp.float32))


def sample_in_xla(
    seed: UInt32[Array, "2"],
    eligible: Bool[Array, " N"],
    fraction: Float[Array, ""] | float,
) -> Bool[Array, " N"]:
    """Does what :func:`sample` does, in plain XLA: the definition."""

    def narrow(eligible):
        index = jnp.arange(eligible.shape[0], dtype=jnp.uint32)
        hashes = hash_words(index, seed)
        number = jnp.sum(eligible)
        share = jnp.round(fraction * number.astype(jnp.float32)).astype(jnp.int32)
        wanted = jnp.clip(share, 1, number)

        def settle_bit(step, bound):
            """Sets the next bit of the bound if too few hashes lie below it."""
            bit = jnp.uint32(1) << jnp.asarray(31 - step, jnp.uint32)
            fewer = jnp.sum(eligible & (hashes < bound + bit)) < wanted
            return jnp.where(fewer, bound + bit, bound)

        # The largest bound with fewer than k hashes below it is the k-th least hash.
        bound = jax.lax.fori_loop(0, 32, settle_bit, jnp.uint32(0))
        return eligible & (hashes <= bound)

    return jax.lax.cond(fraction < 1, narrow, lambda eligible: eligible, eligible)
