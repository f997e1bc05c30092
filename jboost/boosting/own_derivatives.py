# SPDX-License-Identifier: Apache-2.0
"""Derivatives that the caller hands in instead of those of a loss.

They are arrays for one round, or a function that returns them in each round.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jboost.boosting.settings import Settings
from jboost.boosting.state import BoostState, Problem
from jboost.entry.checks import explain_failure
from jboost.entry.messages import show
from jboost.objective.jaxprs import Program, trace_program
from jboost.objective.row_programs import with_scores_first

_SIGNATURE = "derivatives(scores, targets, key)"


def no_loss(score: Any, target: Any) -> Array:
    """Stands in for a loss that is None, where nothing depends on its values."""
    del target
    return jnp.sum(jnp.square(score))


def read_loss(loss: Any, init_score: Any) -> Any:
    """Returns the loss; :func:`no_loss` if it is None."""
    if loss is None and isinstance(init_score, str):
        raise ValueError(
            "init_score must be a number or K numbers where loss is None, got "
            f"{show(init_score)}, which needs a loss"
        )
    return no_loss if loss is None else loss


def read_solver(settings: Settings, loss: Any) -> Settings:
    """Returns the settings of rounds with derivatives from the caller."""
    solver = settings.leaf_solver
    if solver == "hessian" or (loss is None and solver not in ("auto", "newton")):
        needs = "the derivatives" if solver == "hessian" else "the values"
        raise ValueError(
            "leaf_solver must be 'newton' (or 'auto', which is the same) where "
            f"derivatives are given and loss is {'' if loss is None else 'not '}None, "
            f"got {show(solver)}, which needs {needs} of a loss"
        )
    # The curvature policy is not used if derivatives are given.
    solver = "newton" if solver == "auto" else solver
    return settings.replace(leaf_solver=solver, curvature="auto")


def take_arrays(gradient: Any, settings: Any, scores: Any) -> Any:
    """Takes the curvature out of the settings where a gradient is handed in.

    Gradient and curvature must have the shape of the scores, [N] or [N, K], but the
    curvature may be one number. Both are returned as [K, N]; None without a gradient.
    """
    if gradient is None:
        if np.ndim(settings.get("curvature", "auto")):
            raise ValueError(
                "gradient must be given where curvature is an array, got None"
            )
        return None
    given = {"gradient": gradient, "curvature": settings.pop("curvature", "auto")}
    for name, value in given.items():
        if isinstance(value, str) or callable(value):
            raise TypeError(
                f"{name} must be an array of shape {scores.shape}, like the scores, "
                f"where gradient is given, got {show(value)}"
            )
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        given[name] = array
        _check_array(name, array, scores.shape, single=name == "curvature")
    least: Any = 0.0
    if not isinstance(given["curvature"], Tracer):
        least = np.min(np.asarray(given["curvature"]))
    if not least >= 0:
        raise ValueError(f"curvature must be >= 0 in every row, got {least}")
    return _by_score(given["gradient"], given["curvature"], scores.shape)


def trace_derivatives(
    function: Callable[..., Any],
    targets: Any,
    weights: Any,
    num_scores: int,
    constants: tuple[Any, ...],
) -> tuple[Program, tuple[Any, ...]]:
    """Traces ``function(scores, targets, key)``, which returns gradient and curvature.

    Only the shape of the weights is used. The constants of the function follow those of
    the loss.
    """
    if not callable(function):
        raise TypeError(
            f"derivatives must be callable as {_SIGNATURE}, got {show(function)}"
        )
    shape = (len(weights),) if num_scores == 1 else (len(weights), num_scores)
    rows = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), targets)
    key = jax.eval_shape(lambda: _round_key(jnp.zeros(2, jnp.uint32), jnp.int32(0)))
    inputs = (jax.ShapeDtypeStruct(shape, jnp.float32), rows, key)
    try:
        found = jax.eval_shape(function, *inputs)
    except Exception as error:
        raise TypeError(
            "derivatives failed; it must accept (scores, targets, key) of all rows and "
            f"be written in jax.numpy: {explain_failure(error)}"
        ) from error
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(
            "derivatives must return the pair (gradient, curvature), got "
            f"{show(jax.tree.map(lambda a: a.shape, found))}"
        )
    for name, array in zip(("gradient", "curvature"), found, strict=True):
        whose = f"the {name} that derivatives returns"
        _check_array(whose, array, shape, single=name == "curvature")

    def by_score(*arguments):
        gradient, curvature = function(*arguments)
        return _by_score(gradient, curvature, shape)

    every = list(constants)
    program = trace_program(by_score, inputs, every)
    return program, tuple(every)


def hand_in(problem: Problem, program: Program | None, state: BoostState) -> Problem:
    """Returns the problem with the derivatives of this round, if they are handed in."""
    if program is None:
        return problem
    scores = state.scores[0] if state.scores.shape[0] == 1 else state.scores.T
    key = _round_key(state.words, state.round)
    given = program(problem.constants, scores, problem.data.targets, key)
    return problem._replace(arrays=problem.arrays._replace(given=tuple(given)))


def _round_key(words, number):
    """Returns a key for each round, from the seed of the run."""
    return jax.random.fold_in(
        jax.random.wrap_key_data(words, impl="threefry2x32"), number
    )


def _check_array(name, array, shape, *, single):
    alone = ", or a number" if single else ""
    if not hasattr(array, "shape") or np.dtype(array.dtype).kind not in "fiub":
        raise TypeError(f"{name} must hold numbers, got {show(array)}")
    if array.shape != shape and not (single and array.shape == ()):
        raise ValueError(
            f"{name} must have the shape of the scores, {shape}{alone}, got "
            f"{array.shape}"
        )


def _by_score(
    gradient: Any, curvature: Any, shape: tuple[int, ...]
) -> tuple[Float[Array, "K N"], Float[Array, "K N"]]:
    """Returns both as [K, N]; negative curvatures become 0."""
    gradient = jnp.asarray(gradient, jnp.float32)
    curvature = jnp.broadcast_to(jnp.asarray(curvature, jnp.float32), shape)
    return (
        with_scores_first(gradient),
        with_scores_first(jnp.maximum(curvature, jnp.float32(0))),
    )
