# SPDX-License-Identifier: Apache-2.0
"""Loads the shared library that the build makes of native/, and calls its functions.

Without it (no compiler where jboost was installed) everything runs on plain XLA.
"""

import ctypes
import math
import os
import sys
from array import array
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jboost.entry.context import vary
from jboost.entry.decorators import is_tracing

ISAS = ("baseline", "avx2", "avx512")
_FILE = "jboost_kernels.so"
_ALIGNMENT = 64  # bytes: XLA copies host memory that begins elsewhere
# XLA_FFI_DataType of NumPy's types.
_TYPES = {"?": 1, "i": 4, "B": 6, "H": 7, "I": 8, "f": 11}
_texts: list[Any] = []
_abandoned: list[Any] = []  # memory of calls that were interrupted


def _load() -> ctypes.CDLL | None:
    """Loads the library (JBOOST_LIBRARY names another build); None if there is none."""
    if os.environ.get("JBOOST_LIBRARY"):
        return ctypes.CDLL(os.environ["JBOOST_LIBRARY"])
    # Beside this file; an editable install keeps it where packages are installed.
    folders = [Path(__file__).parent]
    folders += [Path(entry) / "jboost" / "kernels" for entry in sys.path]
    for folder in folders:
        if (folder / _FILE).is_file():
            return ctypes.CDLL(str(folder / _FILE))
    if os.environ.get("JBOOST_REQUIRE_NATIVE", "0") not in ("", "0"):
        raise ImportError(
            f"JBOOST_REQUIRE_NATIVE is set, but there is no {_FILE} beside "
            f"{__file__}: install jboost where a C++17 compiler is"
        )
    return None


LIBRARY = _load()


def available() -> bool:
    """Returns whether the CPU kernels were built."""
    return LIBRARY is not None


def best_isa() -> str:
    """Returns the best instruction set of the kernels that this processor supports."""
    assert LIBRARY is not None
    return ISAS[LIBRARY.jboost_best_isa()]


def current_isa() -> str:
    """Returns the instruction set that the kernels use now."""
    assert LIBRARY is not None
    return ISAS[LIBRARY.jboost_current_isa()]


def set_isa(isa: str) -> None:
    """Forces an instruction set for all kernels of this process."""
    known = isa in ISAS and LIBRARY is not None
    if not known or not LIBRARY.jboost_set_isa(ISAS.index(isa)):  # type: ignore[union-attr]
        best = best_isa() if available() else "none: the kernels were not built"
        raise ValueError(f"JBOOST_ISA must be one of {ISAS}, up to {best}, got {isa!r}")


if LIBRARY is not None and os.environ.get("JBOOST_ISA"):
    set_isa(os.environ["JBOOST_ISA"])


def floats(*shape: Any) -> Any:
    """Describes a result of float32."""
    return jax.ShapeDtypeStruct(shape, np.float32)


def ints(*shape: Any) -> Any:
    """Describes a result of int32."""
    return jax.ShapeDtypeStruct(shape, np.int32)


def call(name: str, results: Any, *operands: Any, **attributes: int) -> Any:
    """Makes one FFI call; under ``vmap`` the batch is processed one by one.

    Args:
      results: shapes and dtypes of the results, in any container. An operand in their
        place is overwritten with the result.
      operands: arrays, in any containers; None is left out.
      attributes: integers, handed over as int64.
    """
    inputs, shapes, aliases = _list_arrays(results, operands)
    options: Any = dict(vmap_method="sequential", input_output_aliases=aliases)
    numbers = {key: np.int64(value) for key, value in attributes.items()}
    found = _make_call(name, shapes, **options)(*inputs, **numbers)
    found = [vary(each, *inputs) for each in found]
    return jax.tree.unflatten(jax.tree.structure(results), found)


def _list_arrays(results, operands):
    """Returns operands, shapes of results, and {operand: result in its place}."""
    inputs = jax.tree.leaves(operands)
    places = {id(each): place for place, each in enumerate(inputs)}
    shapes, aliases = [], {}
    for number, each in enumerate(jax.tree.leaves(results)):
        shapes.append(jax.ShapeDtypeStruct(each.shape, each.dtype))
        if id(each) in places:
            aliases[places[id(each)]] = number
    return inputs, shapes, aliases


def _make_call(name, results, **options):
    _register(name)
    return jax.ffi.ffi_call(f"jboost_{name}", results, **options)


@cache
def _register(name):
    target = f"jboost_{name}"
    jax.ffi.register_ffi_target(target, find_handler(name), platform="cpu")


def find_handler(name: str) -> Any:
    """Returns a handler of the library as XLA registers it."""
    assert LIBRARY is not None
    return jax.ffi.pycapsule(getattr(LIBRARY, f"jboost_{name}"))


def host() -> Any:
    """Returns the device that runs the CPU kernels; None if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told not to use the CPU
        return None


def call_on_host(
    name: str, results: Any, *operands: Any, keep: Any = None, **attributes: int
) -> Any:
    """Calls a handler on arrays in host memory, and waits for its end.

    Unlike :func:`call` it compiles one program for all handlers and shapes, and reads
    operands where they lie, if they have no gaps.

    Args:
      name, operands, attributes: the arguments of :func:`call`; operands are NumPy
        arrays, or JAX arrays on a CPU; not traced.
      results: the argument of :func:`call`; NumPy arrays are overwritten.
      keep: other memory that the call uses.

    Returns:
      NumPy arrays; on a CPU ``jax.device_put`` shares their memory.
    """
    given, shapes, aliases = _list_arrays(results, operands)
    inputs = [_require(each) for each in given]
    outputs, structure = jax.tree.flatten(results)
    for number, shape in enumerate(shapes):
        if not isinstance(outputs[number], np.ndarray):
            outputs[number] = make_aligned(shape.shape, shape.dtype)
    for place, number in aliases.items():
        outputs[number] = inputs[place]
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
    function = getattr(LIBRARY, f"jboost_{name}")
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def find_function(name: str) -> Callable[[int], None]:
    """Returns a C function that takes an address; it runs without XLA."""
    function = getattr(LIBRARY, f"jboost_{name}")
    function.argtypes, function.restype = [ctypes.c_int64], None
    return function


@cache
def _find_text(name):
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
