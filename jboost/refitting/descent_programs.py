# SPDX-License-Identifier: Apache-2.0
"""Traces what a descent evaluates: the loss of a row, and a step of the optimizer.

In: functions of the user. Out: programs that compare by content, so that equal ones
share a compiled descent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jboost.entry.representation import show
from jboost.losses.several import widen_loss
from jboost.objective.jaxprs import Program, trace_program
from jboost.objective.tracing import trace_loss


def read_parameters(parameters: Any) -> Any:
    """Returns the parameters of a loss as float32 arrays."""

    def read(leaf):
        array = np.asarray(leaf)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"parameters must be a pytree of numbers, got {show(leaf)}")
        return jnp.asarray(array.astype(np.float32))

    return jax.tree.map(read, parameters)


def trace_rows(
    loss: Any, targets: Any, parameters: Any, num_scores: int, constants: list[Any]
) -> Program:
    """Traces the loss of a row with its derivatives in score and parameters.

    Args:
      targets: of all rows.
      parameters: float32 arrays; without any the loss takes two arguments.
      constants: the arrays that the loss closes over are appended.

    Raises:
      TypeError, ValueError: it is not a loss.
    """
    with_parameters = bool(jax.tree.leaves(parameters))
    loss = widen_loss(loss, targets, num_scores)

    def value(score, target, parameters):
        given = (parameters,) if with_parameters else ()
        return jnp.asarray(loss(score, target, *given), jnp.float32)

    if with_parameters and callable(loss):
        trace_loss(lambda s, t: value(s, t, parameters), targets, num_scores)
    else:
        trace_loss(loss, targets, num_scores)  # raises for what is not a loss
    score = jax.ShapeDtypeStruct((num_scores,) if num_scores > 1 else (), jnp.float32)
    row = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[1:], t.dtype), targets)
    program = jax.value_and_grad(value, argnums=(0, 2))
    return trace_program(program, (score, row, parameters), constants)


def trace_update(
    optimizer: optax.GradientTransformation, values: Any, constants: list[Any]
) -> Program:
    """Traces a step of the optimizer: (gradients, state, values) -> (changes, state).

    Raises:
      TypeError: it needs more than that.
    """
    try:
        with usual_rules():
            state = jax.eval_shape(optimizer.init, values)
            inputs = (values, state, values)
            program = trace_program(optimizer.update, inputs, constants)
    except Exception as error:
        raise TypeError(
            "optimizer must be an optax.GradientTransformation whose update takes "
            f"(gradients, state, values), got {type(error).__name__}: {error}"
        ) from error
    return program


@contextmanager
def usual_rules() -> Iterator[None]:
    """Sets JAX's usual rules, for which optimizers are written."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
