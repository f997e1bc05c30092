# SPDX-License-Identifier: Apache-2.0
"""Traces a user's loss into programs for one row, plus its constants.

A :class:`TracedLoss` is hashable, and equal for losses that compute the same thing. It
is part of the key of a compiled training program; the constants, numbers and arrays
that the loss closes over, are arguments of that program. Therefore a new but equal
lambda, another ``delta``, or another array in a closure triggers no compilation, and no
cache keeps the function itself alive.
"""

import weakref
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.arguments import (
    hint_loss,
    is_mirrored,
    positional_names,
    takes_mask,
)
from jboost.entry.checks import explain_failure
from jboost.entry.messages import show, warn_user
from jboost.losses import (
    GROUP_LOSSES,
    LOSSES,
    Adaptive,
    Likelihood,
    bare_loss,
    softmax,
)
from jboost.losses.likelihoods import find_information
from jboost.losses.names import is_sum, widen_loss
from jboost.losses.rows import ParameterError
from jboost.objective.jaxprs import (
    MANY_SCORES,
    Program,
    find_dependencies,
    find_used_entries,
    needs_differences,
    separate_products,
    trace_diagonal,
    trace_program,
)


@dataclass(frozen=True)
class TracedLoss:
    """Holds the programs of a loss for one row, and its properties.

    Attributes:
      value, gradient, hessian: programs that take (score, target, parameters).
      estimate: a program that takes all rows, for :func:`jboost.losses.adaptive`;
        otherwise None.
      reports_first: whether an adaptive loss is reported at its first parameters.
      curvature: the user's own curvature of a row, K numbers; otherwise None.
      information: a program that takes (score, seed, ()) and returns the Fisher
        information of a likelihood; None for other losses.
      sampled: whether the information is an estimate from draws.
      slopes: a program of the gradient and the diagonal of the Hessian of a likelihood
        with an information, [2] or [2, K]; otherwise None.
      diagonal: the diagonal of the Hessian of many scores, where it is less work than
        the Hessian; otherwise None.
      num_scores: K; a score is a scalar for K = 1, otherwise a vector.
      quadratic: whether the Hessian is independent of the score.
      uniform: whether the Hessian is independent of the score and the target.
      piecewise_linear: whether the Hessian is identically zero.
      separate: whether it is a sum of losses of one score each.
      of_differences: whether it evidently depends on differences of the K scores only,
        as softmax does.
    """

    value: Program
    gradient: Program
    hessian: Program
    estimate: Program | None
    num_scores: int
    quadratic: bool
    uniform: bool
    piecewise_linear: bool
    reports_first: bool = False
    curvature: Program | None = None
    information: Program | None = None
    sampled: bool = False
    slopes: Program | None = None
    separate: bool = False
    of_differences: bool = False
    diagonal: Program | None = None

    coupled = False  # not a field: rows do not depend on each other

    def __hash__(self) -> int:
        """Returns a hash that is computed once: programs are looked up by it."""
        return self._hash

    @cached_property
    def _hash(self):
        return hash(tuple(getattr(self, field.name) for field in fields(self)))


# Losses that are equal become the same object, which takes no time to compare.
_known: weakref.WeakKeyDictionary[TracedLoss, Any] = weakref.WeakKeyDictionary()


def trace_loss(
    loss: Any, targets: Any, num_scores: int = 1, curvature: Any = None
) -> tuple[TracedLoss, tuple[Any, ...]]:
    """Traces a loss for one row.

    Args:
      loss: ``loss(score, target) -> scalar``, or the result of ``adaptive``.
      targets: a pytree of arrays (or shapes); the first axis of each is N.
      curvature: a function of the arguments of the loss that returns K numbers or a
        K x K matrix, or None.
    """
    loss = widen_loss(loss, targets, num_scores)
    rows = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), targets)
    row = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[1:], t.dtype), rows)
    score = jax.ShapeDtypeStruct((num_scores,) if num_scores > 1 else (), jnp.float32)
    constants: list[Any] = [np.float32(1)] if num_scores > 1 else []
    estimate = None
    if isinstance(loss, Adaptive):
        num_rows = jax.tree.leaves(rows)[0].shape[0]
        scores = jax.ShapeDtypeStruct((num_rows, *score.shape), jnp.float32)
        weights = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
        inputs = (scores, rows, weights)
        parameters = estimate_shapes(loss.estimate, inputs)
        estimate = trace_program(loss.estimate, inputs, constants)
        arguments, function = (score, row, parameters), loss.loss
    else:
        arguments, function = (score, row), loss
    _check_loss(function, arguments, num_scores)

    def scalar_loss(score, *rest):
        return jnp.asarray(function(score, *rest), jnp.float32)

    value = trace_program(scalar_loss, arguments, constants)
    try:
        gradient = trace_program(jax.grad(scalar_loss), arguments, constants)
        hessian = trace_program(_hessian(scalar_loss, num_scores), arguments, constants)
    except Exception as error:
        raise TypeError(
            f"loss {name_of(function)} must be differentiable twice by JAX"
            f"{explain_obstacle(value.jaxpr)}: {explain_failure(error)}"
        ) from error
    _check_gradient(function, gradient, num_scores)
    if num_scores > 1:
        _warn_of_unused(function, gradient, constants, num_scores)
    own = None
    if curvature is not None:
        own = _trace_curvature(curvature, arguments, constants, num_scores)
    likelihood = _trace_likelihood(loss, scalar_loss, arguments, constants)
    many = num_scores > MANY_SCORES
    diagonal = trace_diagonal(gradient, num_scores) if many else None
    depends = find_dependencies(hessian.jaxpr)
    start = len(hessian.constants)
    traced = TracedLoss(
        value=value,
        gradient=gradient,
        hessian=hessian,
        estimate=estimate,
        num_scores=num_scores,
        quadratic=num_scores == 1 and start not in depends,
        uniform=num_scores == 1 and all(i < start for i in depends),
        piecewise_linear=num_scores == 1 and hessian.zero,
        reports_first=isinstance(loss, Adaptive) and loss.report == "first",
        curvature=own,
        **likelihood,
        separate=is_sum(loss),
        of_differences=num_scores > 1 and needs_differences(value, constants),
        diagonal=diagonal,
    )
    if num_scores > 1:
        traced = _separate_products(traced)
    known = _known.setdefault(traced, weakref.ref(traced))()
    return traced if known is None else known, tuple(constants)


def _separate_products(loss):
    names = "value", "gradient", "hessian", "slopes", "curvature", "diagonal"
    programs = {name: getattr(loss, name) for name in names}
    return replace(loss, **{
        name: separate_products(program, 0)
        for name, program in programs.items() if program is not None
    })  # fmt: skip


def _trace_likelihood(loss, scalar_loss, arguments, constants) -> dict[str, Any]:
    """Returns the fields of a likelihood with an information; {} for other losses."""
    found, score = None, arguments[0]
    if isinstance(loss, Likelihood):
        found = find_information(loss, score.size)
    if found is None:
        return {}
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    twice = _differentiate_twice(scalar_loss, score.size)
    return dict(
        information=trace_program(found.evaluate, (score, seed), constants),
        sampled=found.sampled,
        slopes=trace_program(twice, arguments, constants),
    )


def _hessian(function, num_scores):
    if num_scores > 1:
        return jax.hessian(function)

    # For a scalar score, forward-over-reverse gives a shorter jaxpr than jax.hessian.
    def second_derivative(score, *rest):
        slope = jax.grad(function)
        return jax.jvp(lambda s: slope(s, *rest), (score,), (jnp.ones_like(score),))[1]

    return second_derivative


def _differentiate_twice(function, num_scores):
    """Returns a function of one row for the gradient and the diagonal of the Hessian.

    Both stand there once, repeated for each score: those of densities take long to
    compile.
    """

    def evaluate(score, *rest):
        def differentiate(_, along):
            gradient, product = jax.jvp(
                lambda score: jax.grad(function)(score, *rest), (score,), (along,)
            )
            return gradient, jnp.sum(jnp.where(along > 0, product, 0.0))

        along = jnp.eye(num_scores, dtype=score.dtype)
        along = along.reshape(num_scores, *score.shape)
        gradient, second = jax.lax.scan(differentiate, score, along)
        return jnp.stack([gradient, second.reshape(score.shape)])

    return evaluate


def _describe_tree(tree):
    found = jax.tree.map(lambda t: f"{np.dtype(t.dtype).name}{[*t.shape]}", tree)
    return found if isinstance(found, str) else show(found)


def _trace_curvature(curvature, arguments, constants, num_scores):
    """Traces the user's curvature of a row as a function that returns K numbers."""
    name = name_of(curvature)

    def evaluate(*row):
        return jnp.asarray(curvature(*row), jnp.float32)

    try:
        shape = jax.eval_shape(evaluate, *arguments).shape
    except Exception as error:
        shapes = ", ".join(map(_describe_tree, arguments))
        raise TypeError(
            f"curvature {name} failed on one row with (score, target) of types "
            f"({shapes}); it must accept (score, target) of one row and be written in "
            f"jax.numpy: {explain_failure(error)}"
        ) from error
    if num_scores == 1 and shape != ():
        raise ValueError(
            f"curvature {name} must return a scalar for one row, got shape {shape}"
        )
    matrix = (num_scores, num_scores)
    if num_scores > 1 and shape not in ((num_scores,), matrix):
        raise ValueError(
            f"curvature {name} must return {num_scores} numbers or a matrix of shape "
            f"{matrix} for one row, got shape {shape}"
        )
    if shape != matrix:
        return trace_program(evaluate, arguments, constants)
    # Trees of different scores grow separately, so that only the diagonal can be used.
    return trace_program(
        lambda *row: jnp.diagonal(evaluate(*row)), arguments, constants
    )


def estimate_shapes(estimate: Any, arguments: Any) -> Any:
    """Returns the shapes of the parameters of an adaptive loss."""
    try:
        return jax.eval_shape(estimate, *arguments)
    except ParameterError:
        raise
    except Exception as error:
        raise TypeError(
            f"estimate {name_of(estimate)} of an adaptive loss failed; it must accept "
            "(scores, targets, weights) of all rows and be written in jax.numpy: "
            f"{explain_failure(error)}"
        ) from error


def name_of(function: Any) -> str:
    """Returns the name of a function, for errors."""
    return getattr(bare_loss(function), "__name__", repr(function))


def explain_obstacle(jaxpr: Any) -> str:
    """Explains why JAX cannot differentiate a loss; "" if the reason is unknown."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    if "while" in names:
        return (
            ", but it contains a while_loop (or a fori_loop with traced bounds), which "
            "does not support reverse-mode differentiation; use lax.scan, a fori_loop "
            "with fixed bounds, or jax.custom_jvp"
        )
    calls = sorted(name for name in names if name.endswith("callback"))
    if calls:
        return (
            f", but it contains a {calls[0]} to Python, which has no derivative; write "
            "it in jax.numpy, or define its derivative with jax.custom_jvp"
        )
    return ""


def needs_groups(loss: Any) -> bool:
    """Returns whether a loss can only be one of groups of rows.

    A built-in one is if it names ``where``, another one if it requires it: losses of
    one row of optax have a ``where`` of their own, which is optional.
    """
    function = loss.loss if isinstance(loss, Adaptive) else loss
    built_in = getattr(bare_loss(function), "of_groups", False)
    return takes_mask(function, required=not built_in)


def _check_loss(loss, arguments, num_scores):
    if not callable(loss):
        text = isinstance(loss, str)
        hint = hint_loss(loss, [*LOSSES, *GROUP_LOSSES], "jb.losses.{}") if text else ""
        raise TypeError(
            f"loss must be callable as loss(score, target), got {show(loss)}{hint}"
        )
    name = name_of(loss)
    if needs_groups(loss):
        raise ValueError(
            f"loss {name} must be a loss of one row here, loss(score, target), got one "
            "that takes where, as losses of groups do"
        )
    if is_mirrored(loss):
        warn_user(
            f"loss {name} is called as loss(score, target), but its arguments are "
            f"named {tuple(positional_names(loss) or ())[:2]}; swap them, or rename "
            "them if the loss is symmetric"
        )
    if num_scores == 1 and bare_loss(loss) is softmax:
        raise ValueError(
            "num_scores must be the number of classes for losses.softmax, got 1 "
            "(the default)"
        )
    try:
        result = jax.eval_shape(loss, *arguments)
    except ParameterError:
        raise
    except Exception as error:
        shapes = ", ".join(map(_describe_tree, arguments))
        raise TypeError(
            f"loss {name} failed on one row with (score, target) of types ({shapes}); "
            "it must accept (score, target) of one row and be written in jax.numpy"
            f"{_hint_scores(loss, arguments, num_scores)}: {explain_failure(error)}"
        ) from error
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    if shape is None or dtype is None or shape != ():
        got = f"shape {shape}" if shape is not None else repr(result)
        column = any(leaf.shape == (1,) for leaf in jax.tree.leaves(arguments[1]))
        hint = (
            "if y has shape [N, 1], pass y[:, 0]"
            if column
            else ("write it for one row, without a mean over rows or a batch axis")
        )
        raise ValueError(
            f"loss {name} must return a scalar for one row, got {got}; {hint}"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"loss {name} must return a floating-point number, got dtype {dtype}"
        )


def _check_gradient(loss, gradient, num_scores):
    """Raises ValueError if the gradient is zero, or independent of the score."""
    name = name_of(loss)
    if gradient.zero:
        raise ValueError(
            f"loss {name} must have a nonzero gradient, got one that is zero at every "
            "score; the loss does not depend on its score, or it rounds it"
        )
    if len(gradient.constants) not in find_dependencies(gradient.jaxpr):
        links = "; give it jax.nn.log_softmax(score) if it takes log probabilities"
        links = links if num_scores > 1 else ""
        raise ValueError(
            f"loss {name} must have a minimum in the score, got a loss that is linear "
            "in the score and therefore unbounded below; check that its arguments are "
            f"not swapped: it is called as loss(score, target){links}"
        )


def _warn_of_unused(loss, gradient, constants, num_scores):
    """Warns if the gradient in a score is zero for all scores and targets."""
    known = [constants[i] for i in gradient.constants]
    used = find_used_entries(gradient.jaxpr, known)
    unused = np.flatnonzero(~used).tolist()
    if unused:
        listed = ", ".join(f"score[{k}]" for k in unused)
        warn_user(
            f"loss {name_of(loss)} has zero gradient in {listed}: with "
            f"num_scores={num_scores} it receives {num_scores} scores, and those that "
            "it does not use are never trained; pass a smaller num_scores, or check "
            "the indices in the loss"
        )


def _hint_scores(loss, arguments, num_scores):
    """Suggests groups, a scalar score or num_scores, if the loss works with these."""
    hint = "; if it is a loss of a group of rows, pass groups" * takes_mask(loss)
    for size in range(1, 9) if num_scores == 1 else ():
        scores = jax.ShapeDtypeStruct((size,), jnp.float32)
        try:
            jax.eval_shape(loss, scores, *arguments[1:])
        except Exception:
            continue
        return (
            f"{hint}; with num_scores=1 the score is a scalar (write score, not "
            "score[0]); if it takes several scores, pass num_scores"
        )
    return hint
