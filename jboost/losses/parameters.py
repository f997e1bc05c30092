# SPDX-License-Identifier: Apache-2.0
"""Declares built-in losses and the domains of their parameters.

In: a function that is a loss, and a check for each of its parameters. Out: the same
loss, which refuses parameters outside their domain wherever they are known: in a direct
call, in a closure, or bound by ``functools.partial``. Traced parameters pass. The
checks run in Python while a loss is traced, and leave nothing in its program.
"""

import functools
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from jboost.entry.checks import check_number

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], Any]

# Arguments of losses of groups that training passes; all others are parameters.
_PASSED = ("where", "weights", "key")

POSITIVE: Check = partial(check_number, above=0, scalar=False)
NOT_NEGATIVE: Check = partial(check_number, least=0, scalar=False)
SHARE: Check = partial(check_number, above=0, below=1, scalar=False)


class ParameterError(ValueError):
    """Says that a parameter of a loss lies outside its domain."""


def check_parameter(name: str, value: Any, check: Check) -> None:
    """Checks a parameter.

    Args:
      name: of the parameter, for errors.
      check: called with name and value; raises TypeError or ValueError.

    Raises:
      ParameterError: instead of the ValueError, so that it can be told from the errors
        of a loss that does not accept its data.
      TypeError: the value is not of the right kind.
    """
    try:
        check(name, value)
    except ValueError as error:
        raise ParameterError(str(error)) from None


def built_in(**checks: Check) -> Callable[[F], F]:
    """Decorates a loss with the checks of its parameters, by name.

    A call without data, as in ``fit(x, y, huber(delta=3))``, is answered with the
    argument to pass instead. A loss that names ``where`` is one of groups.
    """

    def declare(function: F) -> F:
        signature, name = inspect.signature(function), function.__name__
        order = tuple(signature.parameters)
        items, check, explain = tuple(checks.items()), check_parameter, _explain_call

        def loss(*arguments, **named):
            given = {**dict(zip(order, arguments, strict=False)), **named}
            if not {*order[:2]} <= given.keys() <= {*order}:
                raise TypeError(explain(name, order, arguments, named))
            for parameter, domain in items:
                if parameter in given:
                    check(f"{parameter} of losses.{name}", given[parameter], domain)
            return function(*arguments, **named)

        # With the globals of the loss's own module, so that doctest finds its example.
        whole: Any = types.FunctionType(
            loss.__code__, function.__globals__, closure=loss.__closure__
        )
        functools.update_wrapper(whole, function)
        whole.__signature__ = signature
        whole.of_groups = "where" in signature.parameters
        return whole

    return declare


def _explain_call(name, order, arguments, named):
    """Explains a call without the data of a loss, or with unknown parameters."""
    parameters = [each for each in order[2:] if each not in _PASSED]
    unknown = [each for each in named if each not in order]
    if unknown:
        known = ", ".join(parameters) or "none"
        return f"{name}() has no parameter {unknown[0]!r}; its parameters are: {known}"
    given = {**dict(zip(parameters, arguments, strict=False)), **named}
    words = [f"{each}={value!r}" for each, value in given.items() if not np.ndim(value)]
    instead = f"jb.losses.{name}"
    if words:
        instead = f"functools.partial({instead}, {', '.join(words)})"
    return (
        f"{name}() must be called with {order[0]} and {order[1]}, which training does; "
        f"pass the loss itself, {instead}"
    )
