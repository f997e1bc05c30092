# SPDX-License-Identifier: Apache-2.0
"""Turns a user's loss into data: programs for one row, and constants.

In: any callable ``loss(score, target)``. Out: a :class:`TracedLoss`, hashable, equal
for losses that compute the same thing, and the tuple of numbers and arrays that the
loss closed over. Compiled training programs are kept by the former and take the
latter as an argument: a fresh but equal lambda, another ``delta`` or another array
in a closure compiles nothing, and nothing holds on to the function itself.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jboost.entry.arguments import is_mirrored, positional_names
from jboost.entry.warning import warn_user
from jboost.losses import Adaptive, bare_loss, softmax, suggest_loss

# Calls whose body is spliced in; what they say about differentiation has been used
# by then, because gradient and Hessian are traced from the function itself.
_INLINED = (
    "jit", "pjit", "closed_call", "core_call", "remat", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
)  # fmt: skip
_KEEP_ZERO = (
    "add", "add_any", "sub", "neg", "convert_element_type", "broadcast_in_dim",
    "reshape", "squeeze", "copy", "reduce_sum",
)  # fmt: skip
_DERIVATIVE_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "jvp", "fwd")


@dataclass(frozen=True)
class Program:
    """A function as a jaxpr, compared and hashed by what it computes.

    ``jaxpr`` takes the constants, then the arguments; ``constants`` says which of
    the loss's constants it takes.
    """

    jaxpr: jex_core.Jaxpr = field(compare=False, repr=False)
    constants: tuple[int, ...]
    structure: tuple[Any, ...] = field(repr=False)
    zero: bool  # whether the outputs are zero for all arguments
    output: Any  # tree structure of the result

    def __call__(self, constants: tuple[Any, ...], *arguments: Any) -> Any:
        """Evaluates it; ``constants`` are all those of the loss."""
        inputs = [constants[i] for i in self.constants]
        inputs += jax.tree.leaves(arguments)
        run = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(self.jaxpr, ()))
        return jax.tree.unflatten(self.output, run(*inputs))


@dataclass(frozen=True)
class TracedLoss:
    """What a loss computes for one row.

    Attributes:
      value, gradient, hessian: programs of (score, target, parameters).
      estimate: a program of all rows, for :func:`jboost.losses.adaptive`.
      reports_first: whether such a loss is reported at its first parameters.
      num_scores: K; a score is a scalar for K = 1, else a vector.
      quadratic: the Hessian does not depend on the score.
      uniform: the Hessian does not depend on the target either.
      straight: the Hessian is identically zero: the loss is piecewise linear.
    """

    value: Program
    gradient: Program
    hessian: Program
    estimate: Program | None
    num_scores: int
    quadratic: bool
    uniform: bool
    straight: bool
    reports_first: bool = False


def trace_loss(
    loss: Any, targets: Any, num_scores: int = 1
) -> tuple[TracedLoss, tuple[Any, ...]]:
    """Traces a loss for one row.

    Args:
      loss: ``loss(score, target) -> scalar``, or what ``adaptive`` returns.
      targets: a pytree of arrays (or shapes) with the N rows in front.
      num_scores: K.

    Returns:
      The traced loss and the values of its constants.

    Raises:
      TypeError, ValueError: the loss is not callable, does not take (score,
        target), is not a scalar, is not floating, or is constant or linear in the
        score.
    """
    rows = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), targets)
    row = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[1:], t.dtype), rows)
    score = jax.ShapeDtypeStruct((num_scores,) if num_scores > 1 else (), jnp.float32)
    constants: list[Any] = []
    estimate = None
    if isinstance(loss, Adaptive):
        num_rows = jax.tree.leaves(rows)[0].shape[0]
        scores = jax.ShapeDtypeStruct((num_rows, *score.shape), jnp.float32)
        weights = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
        inputs = (scores, rows, weights)
        parameters = _estimate_shapes(loss.estimate, inputs)
        estimate = _trace(loss.estimate, inputs, constants)
        arguments, function = (score, row, parameters), loss.loss
    else:
        arguments, function = (score, row), loss
    _check_loss(function, arguments, num_scores)

    def scalar_loss(score, *rest):
        return jnp.asarray(function(score, *rest), jnp.float32)

    value = _trace(scalar_loss, arguments, constants)
    try:
        gradient = _trace(jax.grad(scalar_loss), arguments, constants)
        hessian = _trace(_hessian(scalar_loss, num_scores), arguments, constants)
    except Exception as error:
        raise TypeError(
            f"loss {_name(function)} must be differentiable twice by JAX"
            f"{_obstacle(value.jaxpr)}: {type(error).__name__}: {error}"
        ) from error
    _check_gradient(function, gradient)
    if num_scores > 1:
        _warn_of_unused(function, gradient, constants, num_scores)
    depends = _dependencies(hessian.jaxpr)
    start = len(hessian.constants)
    traced = TracedLoss(
        value=value,
        gradient=gradient,
        hessian=hessian,
        estimate=estimate,
        num_scores=num_scores,
        quadratic=num_scores == 1 and start not in depends,
        uniform=num_scores == 1 and all(i < start for i in depends),
        straight=num_scores == 1 and hessian.zero,
        reports_first=isinstance(loss, Adaptive) and loss.report == "first",
    )
    return traced, tuple(constants)


def _hessian(function, num_scores):
    if num_scores > 1:
        return jax.hessian(function)

    def second_derivative(score, *rest):  # jax.hessian of a scalar, as a shorter jaxpr
        slope = jax.grad(function)
        return jax.jvp(lambda s: slope(s, *rest), (score,), (jnp.ones_like(score),))[1]

    return second_derivative


def _estimate_shapes(estimate, arguments):
    try:
        return jax.eval_shape(estimate, *arguments)
    except Exception as error:
        raise TypeError(
            f"estimate {_name(estimate)} of an adaptive loss failed; it must be "
            "written in jax.numpy for all rows and take (scores, targets, weights): "
            f"{type(error).__name__}: {error}"
        ) from error


def _name(function):
    return getattr(function, "__name__", repr(function))


def _obstacle(jaxpr):
    """What in a loss keeps JAX from differentiating it, where that is known."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    if "while" in names:
        return (
            ", but has a while_loop (or a fori_loop without a fixed number of steps), "
            "which has no reverse-mode derivative; use lax.scan, a fori_loop with "
            "fixed bounds, or jax.custom_jvp"
        )
    calls = sorted(name for name in names if name.endswith("callback"))
    if calls:
        return (
            f", but has a {calls[0]} to Python, which has no derivative; write it in "
            "jax.numpy, or give it one with jax.custom_jvp"
        )
    return ""


def _check_loss(loss, arguments, num_scores):
    if not callable(loss):
        hint = suggest_loss(loss, "jb.losses.{}") if isinstance(loss, str) else ""
        raise TypeError(
            f"loss must be callable as loss(score, target), got {loss!r}{hint}"
        )
    name = _name(loss)
    if is_mirrored(loss):
        warn_user(
            f"loss {name} is called as loss(score, target), but names its arguments "
            f"{tuple(positional_names(loss) or ())[:2]}; exchange them, or rename them "
            "if the loss is symmetric"
        )
    if num_scores == 1 and bare_loss(loss) is softmax:
        raise ValueError(
            "num_scores must be the number of classes for losses.softmax, got 1 (the "
            "default)"
        )
    try:
        result = jax.eval_shape(loss, *arguments)
    except Exception as error:
        shapes = ", ".join(str(jax.tree.map(_describe, a)) for a in arguments)
        raise TypeError(
            f"loss {name} failed on one row with (score, target) of types ({shapes}); "
            "it must be written in jax.numpy for one row and take (score, target)"
            f"{_hint_scores(loss, arguments, num_scores)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    if shape is None or dtype is None or shape != ():
        got = f"shape {shape}" if shape is not None else repr(result)
        column = any(leaf.shape == (1,) for leaf in jax.tree.leaves(arguments[1]))
        hint = (
            "if the target is a column y [N, 1], pass y[:, 0]"
            if column
            else ("write it for one row, without a mean or a batch axis")
        )
        raise ValueError(
            f"loss {name} must return a scalar for one row, got {got}; {hint}"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"loss {name} must return a floating number, got dtype {dtype}")


def _check_gradient(loss, gradient):
    """Refuses a loss whose gradient is the same, or zero, at every score."""
    name = _name(loss)
    if gradient.zero:
        raise ValueError(
            f"loss {name} must have a gradient to train on, got one that is zero at "
            "every score: the loss ignores its score, or is constant or rounded"
        )
    if len(gradient.constants) not in _dependencies(gradient.jaxpr):
        raise ValueError(
            f"loss {name} must have a minimum in the score, got a loss that is linear "
            "in it and so unbounded below; the arguments may be swapped: the call is "
            "loss(score, target)"
        )


def _warn_of_unused(loss, gradient, constants, num_scores):
    """Warns of scores whose gradient is zero whatever the scores and the target."""
    known = [constants[i] for i in gradient.constants]
    used = _used_entries(gradient.jaxpr, known)
    unused = np.flatnonzero(~used).tolist()
    if unused:
        listed = ", ".join(f"score[{k}]" for k in unused)
        warn_user(
            f"loss {_name(loss)} has no gradient in {listed}: num_scores={num_scores} "
            f"gives it {num_scores} scores, and the unused ones are never trained; "
            "pass a smaller num_scores, or check the indices in the loss"
        )


def _hint_scores(loss, arguments, num_scores):
    """Names num_scores, if the loss works with a few scores and not with one."""
    for size in range(2, 9) if num_scores == 1 else ():
        scores = jax.ShapeDtypeStruct((size,), jnp.float32)
        try:
            jax.eval_shape(loss, scores, *arguments[1:])
        except Exception:
            continue
        return "; if it takes several scores, pass num_scores"
    return ""


def _describe(aval):
    return f"{np.dtype(aval.dtype).name}{list(aval.shape)}"


def _trace(function, arguments, constants):
    """Traces ``function`` and appends what it closes over to ``constants``."""
    closed = jax.make_jaxpr(function)(*arguments)
    found: list[Any] = []
    _read_constants(closed.jaxpr, closed.consts, found)
    shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in found]

    def flat(hoisted, *inputs):
        return _evaluate(closed.jaxpr, iter(hoisted), inputs)

    jaxpr = jax.make_jaxpr(flat)(shapes, *jax.tree.leaves(arguments)).jaxpr
    return Program(
        jaxpr=jaxpr,
        constants=tuple(_position(constant, constants) for constant in found),
        structure=_structure(jaxpr),
        zero=_is_zero(closed.jaxpr),
        output=jax.tree.structure(jax.eval_shape(function, *arguments)),
    )


def _position(constant, constants):
    """Index of a constant, appended unless the same array is there already."""
    for position, known in enumerate(constants):
        if known is constant:
            return position
    constants.append(constant)
    return len(constants) - 1


def _read_constants(jaxpr, consts, found):
    """Collects, in the order of :func:`_evaluate`, closed-over arrays and floats."""
    found.extend(consts)
    for equation in jaxpr.eqns:
        inner = _inlined_body(equation)
        for operand in equation.invars:
            if _is_float_literal(operand):
                found.append(np.asarray(operand.val, operand.aval.dtype))
        if inner is not None:
            _read_constants(inner.jaxpr, inner.consts, found)
    for output in jaxpr.outvars:
        if _is_float_literal(output):
            found.append(np.asarray(output.val, output.aval.dtype))


def _evaluate(jaxpr, hoisted, arguments):
    """Evaluates a jaxpr with calls spliced in and float literals from ``hoisted``."""
    values = {}

    def read(operand):
        if _is_float_literal(operand):
            return next(hoisted)
        if isinstance(operand, jex_core.Literal):
            return operand.val
        return values[operand]

    for variable in jaxpr.constvars:
        values[variable] = next(hoisted)
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        inputs = [read(operand) for operand in equation.invars]
        inner = _inlined_body(equation)
        if inner is not None:
            outputs = _evaluate(inner.jaxpr, hoisted, inputs)
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(output) for output in jaxpr.outvars]


def _inlined_body(equation):
    """The closed jaxpr of a call to be spliced in, or None."""
    if equation.primitive.name not in _INLINED:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = equation.params.get(name)
        if body is not None:
            if isinstance(body, jex_core.Jaxpr):
                return jex_core.ClosedJaxpr(body, ())
            return body
    return None


def _is_float_literal(operand):
    return isinstance(operand, jex_core.Literal) and jnp.issubdtype(
        np.asarray(operand.val).dtype, jnp.floating
    )


def _structure(jaxpr):
    """A hashable value, equal for jaxprs that compute the same."""
    names: dict[Any, int] = {}

    def name(variable):
        if isinstance(variable, jex_core.Literal):
            value = np.asarray(variable.val)
            return ("literal", str(value.dtype), value.shape, value.tobytes())
        return names.setdefault(variable, len(names))

    def shape(variable):
        return (variable.aval.shape, str(variable.aval.dtype))

    inputs = tuple((name(v), shape(v)) for v in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            tuple(name(v) for v in equation.invars),
            tuple(
                (key, _static(value))
                for key, value in sorted(equation.params.items())
                if key not in _DERIVATIVE_RULES
            ),
            tuple((name(v), shape(v)) for v in equation.outvars),
        )
        for equation in jaxpr.eqns
    )
    return inputs, equations, tuple(name(v) for v in jaxpr.outvars)


def _static(value):
    """A parameter of a primitive as something hashable that compares by content."""
    if isinstance(value, jex_core.ClosedJaxpr):
        return _structure(value.jaxpr), tuple(_static(c) for c in value.consts)
    if isinstance(value, jex_core.Jaxpr):
        return _structure(value)
    if isinstance(value, np.ndarray | jax.Array) and value.ndim + value.size > 0:
        content = np.asarray(value)
        return str(content.dtype), content.shape, content.tobytes()
    if isinstance(value, tuple | list):
        return tuple(_static(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _static(item)) for key, item in sorted(value.items()))
    hash(value)  # raises TypeError here rather than in a cache
    return value


def _dependencies(jaxpr):
    """Positions of the inputs on which the outputs depend."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(
                v for v in equation.invars if not isinstance(v, jex_core.Literal)
            )
    return {i for i, variable in enumerate(jaxpr.invars) if variable in needed}


def _is_zero(jaxpr):
    """Whether every output is zero whatever the inputs."""
    zero = _find_zeros(jaxpr, set())
    return all(zero(output) for output in jaxpr.outvars)


def _find_zeros(jaxpr, zeros):
    """A function that tells which operands are zero, given some variables that are."""

    def zero(operand):
        if isinstance(operand, jex_core.Literal):
            return np.all(np.asarray(operand.val) == 0)
        return operand in zeros

    for equation in jaxpr.eqns:
        inputs = [zero(operand) for operand in equation.invars]
        name = equation.primitive.name
        if name == "mul":
            vanishes = any(inputs)
        elif name in ("div", "select_n"):
            vanishes = inputs[0] if name == "div" else all(inputs[1:])
        else:
            vanishes = bool(inputs) and all(inputs) and name in _KEEP_ZERO
        if vanishes:
            zeros.update(equation.outvars)
    return zero


def _used_entries(jaxpr, known):
    """Mask of the entries of the output [K] that are not zero whatever the inputs.

    ``known`` are the values of the first inputs. The gradient of ``score[k]`` is a
    scalar that is padded with zeros, and such vectors are added.
    """
    pairs = zip(jaxpr.invars, known, strict=False)
    fixed = {v for v, a in pairs if isinstance(a, np.ndarray) and not a.any()}
    zero = _find_zeros(jaxpr, fixed)
    made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def used(operand):
        mask = np.full(operand.aval.shape, not zero(operand))
        equation = None if isinstance(operand, jex_core.Literal) else made.get(operand)
        if equation is None or mask.ndim != 1 or not mask.any():
            return mask
        name, inputs = equation.primitive.name, equation.invars
        if name in ("add", "add_any") and all(
            i.aval.shape == mask.shape for i in inputs
        ):
            return used(inputs[0]) | used(inputs[1])
        if name == "pad" and zero(inputs[1]):
            [(low, _, interior)] = equation.params["padding_config"]
            inner = used(inputs[0])
            places = low + (interior + 1) * np.arange(len(inner))
            within = (places >= 0) & (places < len(mask))
            mask[:] = False
            mask[places[within]] = inner[within]
        return mask

    return used(jaxpr.outvars[0])
