# SPDX-License-Identifier: Apache-2.0
"""Derivatives of functions that JAX cannot differentiate, or not as we define them.

Programs that are not differentiated stay the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jboost.entry.stages import may_be_differentiated


def differentiable(
    run: Callable[..., Any], derive: Callable[..., Any], *operands: Any
) -> Any:
    """Returns ``run(*operands)`` with the derivative that ``derive`` defines.

    ``derive(result, operands, tangents)`` returns the tangent of the result in JAX
    operations, linear in the tangents. Tangents of integers are of dtype ``float0``.
    """
    if not may_be_differentiated():  # shorter programs
        return run(*operands)
    # Where a scan is differentiated twice, JAX forgets the rules of custom derivatives,
    # except within checkpoints, which do nothing else here.
    call = jax.checkpoint(partial(_differentiable, run, derive), prevent_cse=False)
    return call(*operands)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(run, derive, *operands):
    del derive
    return run(*operands)


@_differentiable.defjvp
def _derive(run, derive, primals, tangents):
    result = differentiable(run, derive, *primals)
    return result, derive(result, primals, tangents)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_derivatives(operands: Any, reason: str) -> Any:
    """Returns the operands; differentiating them raises an error with ``reason``."""
    del reason
    return operands


@without_derivatives.defjvp
def _refuse(reason, primals, tangents):
    raise NotImplementedError(reason)


def weigh(
    weights: Float[Array, "*K N"], values: Float[Array, "*K N"]
) -> Float[Array, "*K N"]:
    """Multiplies by weights; 0 where the weight is 0, whatever the value.

    The derivative in a weight of 0 is the value; 0 if that is not a finite number.
    """
    return differentiable(_weigh, _derive_weighed, weights, values)


def _weigh(weights, values):
    return jnp.where(weights > 0, weights * values, 0.0)


def _derive_weighed(weighed, operands, tangents):
    del weighed
    weights, values = operands
    known = jnp.where(jnp.isfinite(values), values, 0.0)
    return tangents[0] * known + _weigh(weights, tangents[1])


def replace_without_derivative(
    mask: Bool[Array, "..."], values: Float[Array, "..."], value: float
) -> Float[Array, "..."]:
    """Replaces values under a mask; the derivative remains that of ``values``."""
    return differentiable(
        lambda mask, values: jnp.where(mask, value, values),
        lambda result, operands, tangents: tangents[1],
        mask, values,
    )  # fmt: skip


def square_root(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns square roots; the derivative at 0, which is infinite, counts as 0."""
    return differentiable(jnp.sqrt, _derive_root, values)


def _derive_root(root, operands, tangents):
    del operands
    return tangents[0] / jnp.where(root > 0, 2 * root, jnp.inf)
