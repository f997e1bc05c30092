# SPDX-License-Identifier: Apache-2.0
"""Learning rates of rounds.

In: a number or a schedule. Out: one checked rate per round.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.entry import checks


def learning_rates(
    learning_rate: Any, num_rounds: int, first: int = 0
) -> Array | np.ndarray:
    """Returns one rate per round from a number or a schedule, starting at ``first``."""
    if not callable(learning_rate):
        checks.check_number(
            "learning_rate", learning_rate, above=0.0,
            also=" or a schedule, round -> number",
        )  # fmt: skip
        if isinstance(learning_rate, Tracer):
            rate = jnp.asarray(learning_rate, jnp.float32)
            return jnp.broadcast_to(rate, (num_rounds,))
        # In one number's memory: with early stopping, num_rounds may be any number.
        return np.broadcast_to(np.float32(learning_rate), num_rounds)
    rates: list[Any] = []
    # Under jit, schedules written in jax.numpy are evaluated now instead of traced.
    with jax.ensure_compile_time_eval():
        for number in range(first, first + num_rounds):
            rates.append(learning_rate(number))
            checks.check_number(f"learning_rate({number})", rates[-1], least=0.0)
    if any(isinstance(rate, Tracer) for rate in rates):
        return jnp.stack([jnp.asarray(rate, jnp.float32) for rate in rates])
    return np.array(rates, np.float32)
