# SPDX-License-Identifier: Apache-2.0
"""Decorators of public functions: checks of the process and of traced arguments.

A lack of memory becomes a MemoryError; an interrupt leaves no damage in JAX's caches.
"""

import functools
import inspect
import os
import re
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jboost.entry.importing import was_forked

_EXHAUSTED = re.compile("RESOURCE_EXHAUSTED: |INTERNAL: .*[Oo]ut of memory", re.DOTALL)


def fetch(arrays: Any) -> Any:
    """Returns a pytree with its arrays as NumPy arrays.

    Reading an array that could not be allocated ends the process, or never returns, in
    XLA. Waiting for it first raises an error.
    """
    return jax.device_get(jax.block_until_ready(arrays))


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error of Python, a kernel or XLA tells a lack of memory.

    A program raises a ValueError where it runs at once, and a JaxRuntimeError where its
    result is awaited. XLA replaces the status of programs that wait for others.
    """
    from_program = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    exhausted = from_program and _EXHAUSTED.match(str(error)) is not None
    return exhausted or isinstance(error, MemoryError)


_P = ParamSpec("_P")
_T = TypeVar("_T")

# Types that are never traced, to skip the leaves of long lists of numbers.
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
_JAX = os.path.dirname(jax.__file__)
_WAITING = f"{os.sep}array.py"  # where JAX waits for results and traces nothing
# Of another thread: this module may be imported by the first call, inside a trace.
with ThreadPoolExecutor(1) as _thread:
    _NOT_TRACING = _thread.submit(get_opaque_trace_state).result()


def traceable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a public function that also works under jit, vmap and grad."""

    def prepare(args, kwargs):
        del args, kwargs
        check_process(function.__name__)

    return _wrap(function, prepare)


def on_host(
    instead: str, *, runs_jax: bool = True
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorates a public function that needs concrete values.

    Args:
      instead: the advice for calls under jit, vmap and grad; ends the error message.
      runs_jax: False if the function does not use JAX and so works in a forked process.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        name = function.__name__
        refusal = f"{name} runs on the host, not under jit, vmap or grad"

        def prepare(args, kwargs):
            if runs_jax:
                check_process(name)
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
    is_about_tracing, lacks_memory = _is_about_tracing, is_out_of_memory
    failures, name = (jax.errors.JaxRuntimeError, ValueError), function.__name__
    recover = _recover_caches

    def run(*args, **kwargs):
        with allow():
            prepare_call(args, kwargs)
            try:
                return function(*args, **kwargs)
            except errors as error:
                if explain is None or not is_about_tracing(error):
                    raise
                raise explain(error) from error
            except failures as error:
                if not lacks_memory(error):
                    raise
                raise MemoryError(f"{name} ran out of memory: {error}") from error
            except KeyboardInterrupt as error:
                recover(error)
                raise

    # A function with the globals of the decorated one's module, so that doctest finds
    # its examples there.
    run = types.FunctionType(
        run.__code__, inspect.unwrap(function).__globals__, closure=run.__closure__
    )
    return functools.wraps(function)(run)


def _recover_caches(interrupt):
    """Clears JAX's caches if an interrupt hit the code that fills them.

    It can leave an entry marked as being computed, so that the same call raises a
    RecursionError forever. Programs that are needed again are compiled again.
    """
    if is_tracing():  # the program belongs to a caller
        return
    error: BaseException | None = interrupt
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if file.startswith(_JAX) and not file.endswith(_WAITING):
                jax.clear_caches()
                return
        error = error.__context__


def _is_about_tracing(error):
    """Checks whether an error is about the call, not about a function it calls."""
    unexpected = isinstance(error, jax.errors.UnexpectedTracerError)
    return unexpected or is_tracing()


def is_tracing() -> bool:
    """Checks whether JAX currently traces all operations, even those on constants."""
    return get_opaque_trace_state() != _NOT_TRACING


def _allow_transfers():
    """Allows the transfers that a call implies under ``jax_transfer_guard``.

    Passing a NumPy array is an explicit request to copy it to the device, whereas
    "disallow" is about implicit copies. "disallow_explicit" remains in force.
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


def check_process(name: str) -> None:
    """Raises RuntimeError in a process that was forked after JAX had started."""
    if was_forked():
        raise RuntimeError(
            f"{name} was called in a process that was forked after JAX had started in "
            "its parent process; JAX's threads do not survive a fork, so the call "
            "would never return; start processes with the method 'spawn' "
            "(multiprocessing.get_context('spawn')) or with joblib's 'loky' backend, "
            "or use threads"
        )


def _is_traced(value: Any) -> bool:
    if isinstance(value, dict):  # not a pytree if its keys cannot be sorted
        return any(map(_is_traced, value.values()))
    if isinstance(value, list | tuple):
        # Collect the types first, because a list can have a million numbers.
        others = {kind for kind in {*map(type, value)} if not issubclass(kind, _PLAIN)}
        return any(_is_traced(each) for each in value) if others else False
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
