# SPDX-License-Identifier: Apache-2.0
"""Decorators of the public functions: where they run, and in which process.

In: a public function. Out: the same function, which first refuses what would end in
a deadlock (a forked process) or in a message about JAX's internals (traced values).
"""

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jboost.entry.processes import was_forked

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Types that are never traced; Python's numbers, but not their containers.
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
with jax.ensure_compile_time_eval():
    _NOT_TRACING = get_opaque_trace_state()


def traceable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a public function that also runs under jit, vmap and grad."""

    def prepare(args, kwargs):
        del args, kwargs
        _check_process(function.__name__)

    return _wrap(function, prepare)


def on_host(
    instead: str, *, runs_jax: bool = True
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorates a public function that needs concrete values.

    Args:
      instead: what to do under jit, vmap and grad; ends the error message.
      runs_jax: False if the function is safe in a forked process.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        name = function.__name__
        refusal = f"{name} runs on the host, not under jit, vmap or grad"

        def prepare(args, kwargs):
            if runs_jax:
                _check_process(name)
            if _is_traced((args, kwargs)):
                given = inspect.signature(function).bind(*args, **kwargs).arguments
                traced = [key for key, value in given.items() if _is_traced(value)]
                raise TypeError(f"{refusal}, but {traced[0]} is traced: {instead}")

        def explain(error):
            where = "was called under jit, or with a function that closes over a tracer"
            return TypeError(
                f"{refusal}, but {where}: {instead} ({type(error).__name__})"
            )

        return _wrap(function, prepare, explain)

    return decorate


def _wrap(function, prepare, explain=None):
    prepare_call, allow, errors = prepare, _allow_transfers, jax.errors.JAXTypeError
    is_about_tracing = _is_about_tracing

    def run(*args, **kwargs):
        with allow():
            prepare_call(args, kwargs)
            try:
                return function(*args, **kwargs)
            except errors as error:
                if explain is None or not is_about_tracing(error):
                    raise
                raise explain(error) from error

    # With the globals of its module, so that doctest finds the examples.
    run = types.FunctionType(
        run.__code__, inspect.unwrap(function).__globals__, closure=run.__closure__
    )
    return functools.wraps(function)(run)


def _is_about_tracing(error):
    """Whether the call itself is traced; a callback may jit functions of its own."""
    unexpected = isinstance(error, jax.errors.UnexpectedTracerError)
    return unexpected or is_tracing()


def is_tracing() -> bool:
    """Whether operations are recorded instead of run, even those on constants."""
    return get_opaque_trace_state() != _NOT_TRACING


def _allow_transfers():
    """Makes the copies that a call implies explicit for ``jax_transfer_guard``.

    Whoever passes a NumPy array asks for the copy to the device: "disallow" is about
    copies that nobody asked for. "disallow_explicit" stays in force.
    """
    config: Any = jax.config
    levels = (
        config.jax_transfer_guard_host_to_device,
        config.jax_transfer_guard_device_to_host,
        config.jax_transfer_guard_device_to_device,
    )
    if "disallow" in levels and "disallow_explicit" not in levels:
        return jax.transfer_guard("allow")
    return nullcontext()


def _check_process(name):
    if was_forked():
        raise RuntimeError(
            f"{name} was called in a process that was forked after JAX had started in "
            "its parent: JAX's threads do not survive a fork, and the call would wait "
            "for them forever; start processes with the method 'spawn' "
            "(multiprocessing.get_context('spawn')) or with joblib's 'loky' backend, "
            "or use threads"
        )


def _is_traced(value: Any) -> bool:
    if isinstance(value, dict):  # its keys need not be sortable, as a pytree's must
        return any(map(_is_traced, value.values()))
    if isinstance(value, list | tuple):
        # By type first: a list may hold a million numbers.
        others = {kind for kind in {*map(type, value)} if not issubclass(kind, _PLAIN)}
        return any(_is_traced(each) for each in value) if others else False
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
