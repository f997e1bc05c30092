# SPDX-License-Identifier: Apache-2.0
"""Chooses kernels, registers them with XLA, and calls them.

In: the library that was built. Out: ``choose``, which picks between the ways to do an
operation, and ``call``, one FFI call.
"""

import ctypes
import functools
import math
import os
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import Array, ArrayLike

from jboost.entry.context import (
    current_implementation,
    default_platform,
    runs_on_cpu,
    use_implementation,
    vary,
)
from jboost.entry.decorators import is_tracing
from jboost.entry.messages import show, warn_user
from jboost.kernels import cuda_ready
from jboost.kernels.loading import LIBRARY, find_handler

_P = ParamSpec("_P")
_T = TypeVar("_T")

IMPLEMENTATIONS = ("xla", "cpu", "cuda")
ISAS = ("baseline", "avx2", "avx512")
_ALIGNMENT = 64  # bytes: XLA copies host memory that begins elsewhere
# XLA_FFI_DataType of NumPy's types.
_TYPES = {"?": 1, "i": 4, "B": 6, "H": 7, "I": 8, "f": 11}
_registered: set[str] = set()
_texts: list[Any] = []
_abandoned: list[Any] = []  # memory of calls that were interrupted


_library = LIBRARY


def available() -> bool:
    """Returns whether the CPU kernels were built."""
    return _library is not None


def _warn_of_missing_kernels():
    """Warns once per process that the CPU kernels are missing."""
    if "warned" not in _registered and runs_on_cpu():
        _registered.add("warned")
        warn_user(
            "jboost was installed without its CPU kernels (no C++17 compiler was "
            "found), so everything runs on plain XLA: the same results, several times "
            "slower; reinstall it where there is a compiler",
            RuntimeWarning,
        )


def best_isa() -> str:
    """Returns the best instruction set of the kernels that this processor supports."""
    assert _library is not None
    return ISAS[_library.jboost_best_isa()]


def current_isa() -> str:
    """Returns the instruction set that the kernels use now."""
    assert _library is not None
    return ISAS[_library.jboost_current_isa()]


def set_isa(isa: str) -> None:
    """Forces an instruction set for all kernels of this process.

    Raises:
      ValueError: there is no such set, or the processor lacks it.
    """
    known = isa in ISAS and _library is not None
    if not known or not _library.jboost_set_isa(ISAS.index(isa)):  # type: ignore[union-attr]
        best = best_isa() if available() else "none: the kernels were not built"
        raise ValueError(f"JBOOST_ISA must be one of {ISAS}, up to {best}, got {isa!r}")


def implementations() -> dict[str, str]:
    """Returns the implementations that None stands for on JAX's current platform.

    Returns:
      {operation: implementation} for "binning", "training", "leaves", "predict" and
      "shap"; under "instructions" the instruction set of the CPU kernels: "baseline",
      "avx2" or "avx512" (the environment variable JBOOST_ISA forces one), or "none".

    Example:
      >>> import jboost as jb
      >>> sorted(jb.implementations())
      ['binning', 'instructions', 'leaves', 'predict', 'shap', 'training']
    """
    operations = ("binning", "training", "leaves", "predict", "shap")
    platform = default_platform()
    native = _library is not None and platform == "cpu"
    used = dict.fromkeys(operations, "cpu" if native else "xla")
    if platform in cuda_ready.PLATFORMS and cuda_ready.are_ready():
        used |= dict.fromkeys(("training", "leaves", "predict"), "cuda")
    return {**used, "instructions": current_isa() if native else "none"}


if _library is not None and os.environ.get("JBOOST_ISA"):
    set_isa(os.environ["JBOOST_ISA"])


def check_implementation(implementation: str | None) -> None:
    """Checks that an implementation is known and can run.

    Raises:
      ValueError: it is neither None nor one of ``IMPLEMENTATIONS``; it is "cpu" and the
        kernels were not built, or "cuda" and no GPU can run its kernels.
    """
    known = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not known:
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, got "
            f"{show(implementation)}"
        )
    if implementation == "cpu" and _library is None:
        raise ValueError(
            "implementation must be 'xla' or None here, because jboost was installed "
            "without its CPU kernels, got 'cpu'"
        )
    if implementation == "cuda" and (obstacle := cuda_ready.find_obstacle()):
        raise ValueError(
            "implementation must be 'cpu', 'xla' or None here, because no CUDA kernel "
            f"can run ({obstacle}), got 'cuda'"
        )


def takes_implementation(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a public function with the keyword argument ``implementation``.

    It applies to everything that the function calls. None keeps the implementation of
    the public function that calls this one, if any.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs):
        implementation: Any = kwargs.get("implementation")
        if implementation is None:
            return function(*args, **kwargs)
        check_implementation(implementation)
        with use_implementation(implementation):
            return function(*args, **kwargs)

    return run


def may_run() -> bool:
    """Returns whether programs run the CPU kernels, with the current implementation."""
    implementation = current_implementation()
    if implementation is None and _library is None:
        _warn_of_missing_kernels()
    return _library is not None and implementation in (None, "cpu")


def choose(
    *,
    xla: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    tpu: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns the function that does an operation with the current implementation.

    For None: ``cpu`` where the program is lowered for a CPU and the kernels were
    built, ``cuda`` where it is lowered for a GPU that can run its kernels, ``tpu``
    where it is lowered for a TPU, else ``xla``. An operation without the chosen kernel
    is done by ``xla``.
    """
    implementation = current_implementation()
    if implementation == "cuda":
        return cuda or xla
    branches = {}
    if cpu is not None and may_run():
        branches["cpu"] = cpu
    if implementation is not None:
        return branches.get(implementation, xla)
    if cuda is not None and cuda_ready.are_ready():
        branches["cuda"] = cuda
    if tpu is not None:
        branches["tpu"] = tpu
    if not branches:
        return xla
    return lambda *operands: jax.lax.platform_dependent(
        *operands, **branches, default=xla
    )


def call(
    name: str,
    results: Any,
    *operands: Any,
    aliases: dict[int, int] | None = None,
    **attributes: int,
) -> Any:
    """Makes one FFI call; under ``vmap`` the batch is processed one by one.

    Args:
      name: the name of the handler in the library.
      results: shapes and dtypes of the results.
      operands: arrays.
      aliases: operand -> result that is written in its place.
      attributes: integers, handed over as int64.
    """
    run = _make_call(
        name, results, vmap_method="sequential", input_output_aliases=aliases
    )
    values = run(
        *operands, **{key: np.int64(value) for key, value in attributes.items()}
    )
    return jax.tree.map(lambda value: vary(value, *operands), values)


def _make_call(name, results, **options):
    """Returns an FFI call of a handler, which is registered the first time."""
    target = f"jboost_{name}"
    if target not in _registered:
        jax.ffi.register_ffi_target(target, find_handler(name), platform="cpu")
        _registered.add(target)
    return jax.ffi.ffi_call(target, results, **options)


def host() -> Any:
    """Returns the device that runs the CPU kernels; None if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told not to use the CPU
        return None


def call_on_host(
    name: str,
    results: Any,
    *operands: ArrayLike,
    aliases: dict[int, int] | None = None,
    into: Any = None,
    keep: Any = None,
    **attributes: int,
) -> Any:
    """Calls a handler on arrays in host memory, and waits for its end.

    Unlike :func:`call` it compiles one program for all handlers and shapes, and reads
    operands where they lie, if they have no gaps.

    Args:
      name, results, aliases, attributes: the arguments of :func:`call`.
      operands: NumPy arrays, or JAX arrays on a CPU; not traced.
      into: NumPy arrays like the results, which are overwritten; None: new ones.
      keep: other memory that the call uses.

    Returns:
      NumPy arrays; on a CPU ``jax.device_put`` shares their memory.
    """
    shapes, structure = jax.tree.flatten(results)
    inputs = [_require(each) for each in operands]
    sources = {result: inputs[index] for index, result in (aliases or {}).items()}
    outputs = jax.tree.leaves(into) or [
        sources[number] if number in sources else make_aligned(each.shape, each.dtype)
        for number, each in enumerate(shapes)
    ]
    description = [find_address(name), len(inputs), len(outputs), len(attributes)]
    for each in (*inputs, *outputs):
        address = each.__array_interface__["data"][0]
        description += (address, _TYPES[each.dtype.char], each.ndim, *each.shape)
    for key in sorted(attributes):
        description += (*_find_text(key), attributes[key])
    _relay_and_wait(array("q", description), (inputs, outputs, keep))
    return jax.tree.unflatten(structure, outputs)


def _require(operand):
    """Returns the operand as a contiguous array, copied only if it must be."""
    if type(operand) is np.ndarray:
        flags = operand.flags
        if flags.c_contiguous and flags.aligned:
            return operand
    return np.require(operand, requirements=["C", "A"])


def _relay_and_wait(description, arrays):
    """Makes the call that is described; ``arrays`` is the memory that it uses."""
    address = np.array(description.buffer_info()[:1], np.int64).view(np.uint32)
    done = None
    try:
        with _eagerly_on_host():
            done = _relay(address)
            done.block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError):
        raise  # an error of the handler, so the call has ended
    except BaseException:
        # After an interrupt the call may still be running, and needs the memory.
        if done is None:
            _abandoned.append((description, arrays))
        else:
            done.block_until_ready()
        raise


def _eagerly_on_host():
    """Returns a context where programs run at once, on the host, on NumPy arrays.

    Entering contexts takes as long as a small prediction, so none is entered in vain.
    """
    guard = jax.config.jax_transfer_guard_host_to_device  # type: ignore[attr-defined]
    device = default_device()
    if guard in (None, "allow") and device is not None and device.platform == "cpu":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(jax.ensure_compile_time_eval())
    # The operand is an address, not data that users want to guard.
    stack.enter_context(jax.transfer_guard_host_to_device("allow"))
    stack.enter_context(jax.default_device(host()))
    return stack


def default_device() -> Any:
    """Returns the device for NumPy arrays; None inside a trace or a mesh."""
    if is_tracing() or not jax.sharding.get_abstract_mesh().empty:
        return None
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen


@cache
def find_address(name: str) -> Any:
    """Returns the address of a function of the library."""
    function = getattr(_library, f"jboost_{name}")
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def find_function(name: str) -> Callable[[int], None]:
    """Returns a C function that takes an address; it runs without XLA."""
    function = getattr(_library, f"jboost_{name}")
    function.argtypes, function.restype = [ctypes.c_int64], None
    return function


@cache
def _find_text(name):
    """Returns the address and length of an attribute's name, which is kept."""
    text = ctypes.create_string_buffer(name.encode())
    _texts.append(text)
    return ctypes.addressof(text), len(name)


def make_aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a new array aligned so that XLA uses its memory without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@jax.jit
def _relay(address):
    done = jax.ShapeDtypeStruct((1,), np.uint32)
    return _make_call("relay", done)(address)


def resolve_implementation(array: Array) -> AbstractContextManager[None]:
    """Replaces None by the implementation that it stands for on the array's devices.

    Programs that are called at once are lowered for the platform of their operands
    alone, so that only one implementation needs to be traced.
    """
    implementation = current_implementation()
    if implementation is None:
        platforms = {device.platform for device in array.devices()}
        if platforms == {"cpu"} and may_run():
            implementation = "cpu"
        elif platforms <= cuda_ready.PLATFORMS and cuda_ready.are_ready():
            implementation = "cuda"
        elif platforms != {"tpu"}:  # its kernel has no name of its own
            implementation = "xla"
    return use_implementation(implementation)
