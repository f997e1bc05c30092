# SPDX-License-Identifier: Apache-2.0
"""Random subsets by the CPU kernels of native/sampling.h.

In: seed seed, what may be chosen, fractions. Out: the masks of
``jboost.numerics.sampling`` and ``jboost.trees.growing``, to the bit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.kernels.library import call


def sample(
    seed: UInt32[Array, "2"], eligible: Bool[Array, " N"], fraction: Float[Array, ""]
) -> Bool[Array, " N"]:
    """See :func:`jboost.numerics.sampling.sample`."""
    result = jax.ShapeDtypeStruct(eligible.shape, jnp.bool_)
    return call("sample", result, seed, eligible, fraction)


def sample_features(
    seed: UInt32[Array, "2"],
    level: Int32[Array, ""],
    fractions: Float[Array, "3"],
    num_slots: int,
    num_features: int,
) -> Bool[Array, "M F"]:
    """Masks of a level: of the tree's features the level's, of those the node's."""
    result = jax.ShapeDtypeStruct((num_slots, num_features), jnp.bool_)
    return call("sample_features", result, seed, level, fractions)
