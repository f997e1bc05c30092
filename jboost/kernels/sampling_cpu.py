# SPDX-License-Identifier: Apache-2.0
"""Random subsets by the CPU kernel of native/sampling.h.

In: a seed, a mask of eligible entries, a fraction. Out: the mask of
``jboost.numerics.random``, to the bit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jboost.kernels.library import call


def sample(
    seed: UInt32[Array, "2"], eligible: Bool[Array, " N"], fraction: Float[Array, ""]
) -> Bool[Array, " N"]:
    """See :func:`jboost.numerics.random.sample`."""
    result = jax.ShapeDtypeStruct(eligible.shape, jnp.bool_)
    return call("sample", result, seed, eligible, fraction)
