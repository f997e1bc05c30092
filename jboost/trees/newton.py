# SPDX-License-Identifier: Apache-2.0
"""The Newton step of each leaf.

In: sums of gradient and curvature over the rows of a leaf. Out: its step, and by how
much the loss falls if it is quadratic.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def newton_step(
    gradient: Float[Array, " L"],
    curvature: Float[Array, " L"],
    penalty: Float[Array, ""],
    l1: Float[Array, ""] | None = None,
) -> tuple[Float[Array, " L"], Float[Array, " L"]]:
    """Returns -G / (H + penalty) of each leaf (Chen and Guestrin 2016, eq. 5).

    0 where H is not positive, as in XGBoost.

    Args:
      gradient, curvature: G and H, weighted sums over the leaf's rows.
      l1: what G is moved by toward 0 first, as an l1 |c| in the objective asks.

    Returns:
      The values, and the decrease G^2 / (2 (H + penalty)) that they promise.
    """
    weight = jnp.where(curvature > 0, curvature + penalty, jnp.inf)
    if l1 is not None:
        gradient = gradient - jnp.clip(gradient, -l1, l1)
    value = -gradient / weight
    return value, -gradient * value / 2
