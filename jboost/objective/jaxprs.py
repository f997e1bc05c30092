# SPDX-License-Identifier: Apache-2.0
"""Traces functions into programs that compare by content, and analyzes them.

Closed-over arrays and float literals become inputs. The diagonal of a row's Hessian
takes O(K): a gradient made of elementwise operations and of sums over the scores has
the Jacobian diag(a) + sum_j b_j w_j', where w_j is the gradient of the j-th sum, and
b_j the derivative of each entry in that sum. All are carried from operation to
operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jaxtyping import Array, Float

# Calls with bodies that are inlined. Custom derivative rules can be dropped here: the
# gradient and Hessian are traced from the original function, where the rules applied.
_INLINED = (
    "jit", "pjit", "closed_call", "core_call", "remat", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
)  # fmt: skip
# Operations with a result of zero if all their operands are zero.
_KEEP_ZERO = (
    "add", "add_any", "sub", "neg", "convert_element_type", "broadcast_in_dim",
    "reshape", "squeeze", "copy", "reduce_sum",
)  # fmt: skip
_PRODUCTS = ("mul", "square", "integer_pow")
# Operations that add, or pass values on to one that does.
_MAY_ADD = (
    "add", "add_any", "sub", "neg", "reduce_sum", "broadcast_in_dim", "concatenate",
    "pad", "reshape", "select_n", "squeeze", "transpose",
)  # fmt: skip
# Parameters of calls that do not affect the value; they are not comparable by content.
_DERIVATIVE_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "jvp", "fwd")


@dataclass(frozen=True)
class Program:
    """Holds a function as a jaxpr, compared and hashed by its content.

    ``jaxpr`` takes constants, then arguments; ``constants`` are the indices of its
    constants in the loss's tuple of constants.
    """

    jaxpr: jex_core.Jaxpr = field(compare=False, repr=False)
    constants: tuple[int, ...]
    structure: tuple[Any, ...] = field(repr=False)
    zero: bool  # whether all outputs are zero for all arguments
    output: Any  # pytree structure of the result

    def __call__(self, constants: tuple[Any, ...], *arguments: Any) -> Any:
        """Evaluates the program; ``constants`` are all constants of the loss."""
        inputs = [constants[i] for i in self.constants]
        inputs += jax.tree.leaves(arguments)
        run = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(self.jaxpr, ()))
        return jax.tree.unflatten(self.output, run(*inputs))


def trace_program(function, arguments, constants):
    """Traces ``function`` and appends the arrays that it closes over to ``constants``.

    It is traced twice: once to find closed-over arrays and float literals, then as a
    function of these, so that they become inputs instead of part of the program.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    found: list[Any] = []
    # Of several scores, XLA would fuse more than pays: exponentials are made again for
    # every sum over the scores.
    one = np.ndim(jax.tree.leaves(arguments)[0]) == 0
    is_input = _is_number if one else _is_float
    _read_constants(closed.jaxpr, closed.consts, is_input, found)
    shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in found]

    def flat(hoisted, *inputs):
        return _evaluate(closed.jaxpr, iter(hoisted), is_input, inputs)

    jaxpr = jax.make_jaxpr(flat)(shapes, *jax.tree.leaves(arguments)).jaxpr
    is_zero = _find_zeros(closed.jaxpr, set())
    return Program(
        jaxpr=jaxpr,
        constants=tuple(_index_of(constant, constants) for constant in found),
        structure=_structure(jaxpr),
        zero=all(map(is_zero, closed.jaxpr.outvars)),
        output=jax.tree.structure(jax.eval_shape(function, *arguments)),
    )


def split_program(
    program: Program, late: Sequence[Any], most: int
) -> tuple[Program, Program]:
    """Splits off the part of a program that does not depend on its late arguments.

    Late arguments come first and change from call to call; the early ones do not. The
    first program takes the early arguments and returns intermediate results of at most
    ``most`` numbers; larger ones are computed again. The second one takes all arguments
    and these results.
    """
    jaxpr = program.jaxpr
    first = len(program.constants) + len(jax.tree.leaves(late))
    num_constants = len(program.constants)
    changing = set(jaxpr.invars[num_constants:first])
    before, after = [], []
    for equation in jaxpr.eqns:
        depends = changing.intersection(_variables(equation.invars))
        if depends or equation.effects:
            changing.update(equation.outvars)
            after.append(equation)
        else:
            before.append(equation)
    # Backward from the last equation: results too large to keep are computed again,
    # which may need results of earlier equations.
    needed = {v for e in after for v in _variables(e.invars)}
    needed.update(_variables(jaxpr.outvars))
    again = []
    for equation in reversed(before):
        wanted = needed.intersection(equation.outvars)
        if any(v.aval.size > most for v in wanted):
            again.append(equation)
            needed.update(_variables(equation.invars))
    rest = [*reversed(again), *after]
    made = {v for e in before for v in e.outvars} - {
        v for e in again for v in e.outvars
    }
    used = [v for e in rest for v in _variables(e.invars)]
    used += _variables(jaxpr.outvars)
    kept = [v for v in dict.fromkeys(used) if v in made]
    return (
        _cut_program(program, before, kept, first),
        _rest_of_program(program, rest, kept),
    )


def _cut_program(program, equations, results, first):
    """Returns a program of the early arguments that makes the results."""
    jaxpr, count = program.jaxpr, len(program.constants)
    fixed = [*jaxpr.invars[:count], *jaxpr.invars[first:]]
    inputs = [_shape_of(v) for v in fixed]

    def run(*values):
        return _run_equations(equations, dict(zip(fixed, values, strict=True)), results)

    traced = jax.make_jaxpr(run)(*inputs).jaxpr
    output = jax.tree.structure([0] * len(results))
    return replace(
        program, jaxpr=traced, structure=_structure(traced), zero=False, output=output
    )


def _rest_of_program(program, equations, kept):
    """Returns a program of all arguments and the results that are kept."""
    jaxpr = program.jaxpr
    every = [*jaxpr.invars, *kept]

    def run(*values):
        values = dict(zip(every, values, strict=True))
        return _run_equations(equations, values, jaxpr.outvars)

    return retrace(program, run, every)


def retrace(program, run, inputs=None):
    """Returns the program of ``run``, a function of the inputs that returns a list.

    The inputs are variables; None for those of the program.
    """
    inputs = program.jaxpr.invars if inputs is None else inputs
    traced = jax.make_jaxpr(run)(*map(_shape_of, inputs)).jaxpr
    return replace(program, jaxpr=traced, structure=_structure(traced))


def separate_products(program: Program, one: int) -> Program:
    """Returns a program without float32 products that are contracted with a sum.

    Whether XLA makes one FMA of a * b + c depends on the rest of the program. Then
    the same loss would give other last bits for integer and for float targets, in a
    stream's program and under vmap. We compute (a * b) * 1 + c, where only the product
    with 1 can be contracted, which rounds nothing; XLA does not know that it is 1. The
    clip of :func:`jboost.kernels.xla.round_alone` would hide infinities.
    ``one`` is the index of a 1 in the loss's tuple of constants.
    """
    jaxpr, place = program.jaxpr, len(program.constants)
    summands = {
        v for e in jaxpr.eqns if e.primitive.name in _MAY_ADD for v in e.invars
        if not isinstance(v, jex_core.Literal)
    }  # fmt: skip

    def run(*inputs):
        given = [*inputs[:place], *inputs[place + 1 :]]
        values = dict(zip(jaxpr.invars, given, strict=True))
        for equation in jaxpr.eqns:
            _run_equations([equation], values, [])
            product = equation.outvars[0]
            if equation.primitive.name in _PRODUCTS and product in summands:
                found = values[product]
                if found.dtype == jnp.float32:
                    values[product] = found * inputs[place]
        return _run_equations([], values, jaxpr.outvars)

    shapes = list(map(_shape_of, jaxpr.invars))
    shapes.insert(place, jax.ShapeDtypeStruct((), jnp.float32))
    traced = jax.make_jaxpr(run)(*shapes).jaxpr
    return replace(
        program, jaxpr=traced, structure=_structure(traced),
        constants=(*program.constants, one),
    )  # fmt: skip


def _shape_of(variable):
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)


def _run_equations(equations, values, results):
    def read(operand):
        return operand.val if isinstance(operand, jex_core.Literal) else values[operand]

    for equation in equations:
        found = equation.primitive.bind(*map(read, equation.invars), **equation.params)
        found = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, found, strict=True))
    return [read(result) for result in results]


def _variables(operands):
    return [v for v in operands if not isinstance(v, jex_core.Literal)]


def _index_of(constant, constants):
    """Returns the index of a constant, appending it if the array is not there yet."""
    for index, known in enumerate(constants):
        if known is constant:
            return index
    constants.append(constant)
    return len(constants) - 1


def _read_constants(jaxpr, consts, is_input, found):
    """Collects closed-over arrays and float literals in :func:`_evaluate`'s order."""
    found.extend(consts)
    for equation in jaxpr.eqns:
        inner = inlined_body(equation)
        for operand in equation.invars:
            if is_input(operand):
                found.append(np.asarray(operand.val, operand.aval.dtype))
        if inner is not None:
            _read_constants(inner.jaxpr, inner.consts, is_input, found)
    for output in jaxpr.outvars:
        if is_input(output):
            found.append(np.asarray(output.val, output.aval.dtype))


def _evaluate(jaxpr, hoisted, is_input, arguments):
    """Evaluates a jaxpr with calls inlined and float literals from ``hoisted``."""
    values = {}

    def read(operand):
        if is_input(operand):
            return next(hoisted)
        if isinstance(operand, jex_core.Literal):
            return operand.val
        return values[operand]

    for variable in jaxpr.constvars:
        values[variable] = next(hoisted)
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        inputs = [read(operand) for operand in equation.invars]
        inner = inlined_body(equation)
        if inner is not None:
            outputs = _evaluate(inner.jaxpr, hoisted, is_input, inputs)
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(output) for output in jaxpr.outvars]


def inlined_body(equation):
    """Returns the closed jaxpr of a call that is inlined, otherwise None."""
    if equation.primitive.name not in _INLINED:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = equation.params.get(name)
        if body is not None:
            if isinstance(body, jex_core.Jaxpr):
                return jex_core.ClosedJaxpr(body, ())
            return body
    return None


def _is_float(operand):
    return isinstance(operand, jex_core.Literal) and jnp.issubdtype(
        np.asarray(operand.val).dtype, jnp.floating
    )


def _is_number(operand):
    """Returns whether an operand is a float literal, but not 0, infinite or NaN.

    Rules of differentiation compare with these. As parts of a program they let XLA
    remove operations that have no effect.
    """
    if not _is_float(operand):
        return False
    value = np.asarray(operand.val)
    return bool(np.any(np.isfinite(value) & (value != 0)))


def _structure(jaxpr):
    """Returns a hashable value that is equal for jaxprs that compute the same thing.

    Variables are numbered in order of appearance, because JAX creates new ones in each
    trace.
    """
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
    """Converts a parameter of a primitive to a hashable value compared by content."""
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
    if isinstance(value, np.dtype):
        return value.name  # equal ones may print differently: float32 and <f4
    hash(value)  # raises TypeError here rather than in a cache
    return value


def find_dependencies(jaxpr):
    """Returns the indices of the inputs that the outputs depend on."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(
                v for v in equation.invars if not isinstance(v, jex_core.Literal)
            )
    return {i for i, variable in enumerate(jaxpr.invars) if variable in needed}


def _find_zeros(jaxpr, zeros):
    """Returns a predicate for operands that are always zero, given known zeros."""

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


# The fate of a result where all scores grow by one number: it stays, it grows by that
# number, it tells finite scores, which all are, it is -inf, or nobody knows.
_STAYS, _GROWS, _IS_FINITE, _ENDLESS, _UNKNOWN = range(5)
_COMPARE = frozenset(("eq", "ge", "gt", "le", "lt", "ne", "sub"))
_TAKE = frozenset((  # results are entries of operands
    "broadcast_in_dim", "concatenate", "copy", "max", "min", "reduce_max",
    "reduce_min", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose",
))  # fmt: skip
_OF_GROWING = {
    "is_finite": _IS_FINITE,
    **dict.fromkeys(_COMPARE, _STAYS),
    **dict.fromkeys(_TAKE, _GROWS),
}


def needs_differences(program: Program, known: Sequence[Any]) -> bool:
    """Returns whether a loss evidently depends on the differences of K scores only.

    That of softmax does. ``known`` are all constants of the loss. The answer is False
    where operations hide it, such as the sum of scores times a one-hot vector.
    """
    jaxpr, number = program.jaxpr, len(program.constants)
    fates = dict.fromkeys(jaxpr.invars, _STAYS)
    for variable, i in zip(jaxpr.invars, program.constants, strict=False):
        if isinstance(known[i], np.ndarray) and np.all(known[i] == -np.inf):
            fates[variable] = _ENDLESS
    fates[jaxpr.invars[number]] = _GROWS
    for equation in jaxpr.eqns:
        found = [
            _STAYS if isinstance(operand, jex_core.Literal) else fates[operand]
            for operand in equation.invars
        ]
        alike = _GROWS if _GROWS in found else _STAYS
        found = [alike if fate == _ENDLESS else fate for fate in found]
        fate = _find_fate(equation.primitive.name, found)
        fates.update(dict.fromkeys(equation.outvars, fate))
    (result,) = jaxpr.outvars
    return isinstance(result, jex_core.Literal) or fates[result] == _STAYS


def _find_fate(name, fates):
    """Returns the fate of a result, given those of the operands."""
    every, (first, *rest) = set(fates), fates or [_STAYS]
    if every <= {_STAYS}:
        return _STAYS
    if every == {_GROWS}:
        return _OF_GROWING.get(name, _UNKNOWN)
    if name == "select_n" and first == _IS_FINITE:
        return rest[1]
    if name == "select_n" and first == _STAYS and {*rest} == {_GROWS}:
        return _GROWS
    if name in ("dynamic_slice", "gather") and {*rest} == {_STAYS}:
        return first
    sums = {"add": every == {_STAYS, _GROWS}, "sub": fates == [_GROWS, _STAYS]}
    return _GROWS if sums.get(name) else _UNKNOWN


def find_used_entries(jaxpr, known):
    """Returns a mask [K] of the output entries that are not zero for all inputs.

    ``known`` are the values of the first inputs. JAX computes the gradient of
    ``score[k]`` as a scalar padded with zeros and then adds these vectors; only those
    two operations are followed.
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
            indices = low + (interior + 1) * np.arange(len(inner))
            within = (indices >= 0) & (indices < len(mask))
            mask[:] = False
            mask[indices[within]] = inner[within]
        return mask

    return used(jaxpr.outvars[0])


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

    ``own`` is the vector a, for a result of K entries; None for a single number.
    ``shared`` are the vectors b_j and w_j; b_j is 1 for a single number.
    """

    own: Any
    shared: tuple[tuple[Any, Float[Array, " K"]], ...]


class _Unknown(Exception):
    """Raised for an operation with a Jacobian of another form."""


def trace_diagonal(gradient: Program, num_scores: int) -> Program | None:
    """Returns the program of the diagonal of the Hessian; None if it needs K^2 numbers.

    The K scores are the first argument of ``gradient``.
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
        if outcome not in slopes:
            return [jnp.zeros(num_scores, jnp.float32)]
        own, shared = slopes[outcome]
        return [sum((b * w for b, w in shared), own)]

    try:
        return retrace(gradient, diagonal)
    except _Unknown:
        return None


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
