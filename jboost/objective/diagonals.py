# SPDX-License-Identifier: Apache-2.0
"""The diagonal of a row's Hessian in a time proportional to the number of scores.

In: the gradient of a loss of K scores as a program. Out: a program that returns the K
entries d2l / dF_k^2 without the K^2 others.

A gradient that is made of elementwise operations and of sums (or other numbers) over
the scores has the Jacobian diag(a) + sum_j b_j w_j', with one pair of vectors for each
such number j: w_j is its own gradient in the scores, and b_j is by how much it moves
each entry. Both are carried along from operation to operation, as forward mode does
with one tangent. The softmax of 1,000 classes has three such pairs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jaxtyping import Array, Float

from jboost.objective.jaxprs import Program, retrace

MANY_SCORES = 64  # more: nothing may hold K^2 numbers for each row, or take their time
# Operations that treat each entry by itself, or keep their order.
_BY_ENTRY = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh",
    "broadcast_in_dim", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos",
    "cosh", "digamma", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "integer_pow", "lgamma", "log", "log1p", "logistic", "max", "min", "mul", "neg",
    "polygamma", "pow", "regularized_incomplete_beta", "rem", "reshape", "round",
    "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "squeeze", "sub",
    "tan", "tanh",
))  # fmt: skip


class _Slopes(NamedTuple):
    """The derivatives of an intermediate result in the scores.

    Attributes:
      own: the vector a, for a result of K entries; None for a single number.
      shared: the vectors b_j and w_j; b_j is 1 for a single number.
    """

    own: Any
    shared: tuple[tuple[Any, Float[Array, " K"]], ...]


class _Unknown(Exception):
    """An operation whose Jacobian has another form."""


def trace_diagonal(gradient: Program, num_scores: int) -> Program | None:
    """Returns the program of the diagonal of the Hessian; None if it needs K^2 numbers.

    Args:
      gradient: a program whose first argument is the K scores.
    """
    jaxpr, place = gradient.jaxpr, len(gradient.constants)

    def diagonal(*inputs):
        slopes: dict[Any, _Slopes] = {
            jaxpr.invars[place]: _Slopes(jnp.ones(num_scores, jnp.float32), ())
        }
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            _carry(equation, values, slopes, num_scores)
        outcome: Any = jaxpr.outvars[0]
        return [_diagonal_of(slopes.get(outcome), num_scores)]

    try:
        return retrace(gradient, diagonal)
    except _Unknown:
        return None


def _diagonal_of(slopes, num_scores):
    if slopes is None:
        return jnp.zeros(num_scores, jnp.float32)
    return sum((b * w for b, w in slopes.shared), slopes.own)


def _carry(equation, values, slopes, num_scores):
    """Evaluates an operation, and adds the slopes of its result."""
    inputs = [
        v.val if isinstance(v, jex_core.Literal) else values[v] for v in equation.invars
    ]
    found = equation.primitive.bind(*inputs, **equation.params)
    found = found if equation.primitive.multiple_results else [found]
    values.update(zip(equation.outvars, found, strict=True))
    moving = [
        place
        for place, v in enumerate(equation.invars)
        if not isinstance(v, jex_core.Literal) and v in slopes
    ]
    name = equation.primitive.name
    if not moving or name == "stop_gradient":
        return
    if not all(jnp.issubdtype(each.dtype, jnp.floating) for each in found):
        return  # comparisons and indices have no slopes
    if len(found) > 1:
        raise _Unknown

    def run(place, moved):
        given = [*inputs[:place], moved, *inputs[place + 1 :]]
        return equation.primitive.bind(*given, **equation.params)

    parts = [
        _pass_on(
            name, lambda x, place=place: run(place, x), inputs[place],
            slopes[equation.invars[place]], found[0], num_scores,
        )
        for place in moving
    ]  # fmt: skip
    slopes[equation.outvars[0]] = _add(parts)


def _pass_on(name, function, value, slopes, found, num_scores):
    """Returns the slopes of a result by way of one operand."""
    value = jnp.asarray(value)
    vector = slopes.own is not None
    if not vector:  # a single number: how much each entry of the result moves with it
        shape = jnp.ones_like(value)
        moved = jax.jvp(function, (value,), (shape,))[1]
        if found.size == 1:
            return _Slopes(None, _scale(slopes, moved.reshape(())))
        if found.size != num_scores:
            raise _Unknown
        moved = moved.reshape(num_scores)
        return _Slopes(jnp.zeros_like(moved), _scale(slopes, moved))
    if found.size == 1 and num_scores > 1:
        (pulled,) = jax.vjp(function, value)[1](jnp.ones_like(found))
        pulled = pulled.reshape(num_scores)
        whole = pulled * slopes.own
        for b, w in slopes.shared:
            whole = whole + jnp.sum(pulled * b) * w
        return _Slopes(None, ((jnp.float32(1), whole),))
    if not found.size == value.size == num_scores or name not in _BY_ENTRY:
        raise _Unknown
    moved = jax.jvp(function, (value,), (jnp.ones_like(value),))[1].reshape(num_scores)
    return _Slopes(moved * slopes.own, _scale(slopes, moved))


def _scale(slopes, factor):
    return tuple((factor * b, w) for b, w in slopes.shared)


def _add(parts):
    """Adds slopes by way of several operands; pairs of the same number become one."""
    own: Any = None
    pairs: dict[int, tuple[Any, Any]] = {}
    for part in parts:
        if part.own is not None:
            own = part.own if own is None else own + part.own
        for b, w in part.shared:
            known = pairs.get(id(w))
            pairs[id(w)] = (b if known is None else known[0] + b, w)
    return _Slopes(own, tuple(pairs.values()))
