# SPDX-License-Identifier: Apache-2.0
"""Chooses between the kernels of an operation.

CUDA kernels are compiled when the first program that may use them is traced. Where that
cannot be done, plain XLA runs instead, after one warning.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jboost.entry.context import (
    current_implementation,
    default_platform,
    runs_on_cpu,
    use_implementation,
)
from jboost.entry.messages import show, warn_user
from jboost.kernels import calls, cuda_compiler
from jboost.kernels.cuda_launch import sum_keys

_P = ParamSpec("_P")
_T = TypeVar("_T")

IMPLEMENTATIONS = ("xla", "cpu", "cuda")
_GPUS = frozenset({"gpu", "cuda"})  # JAX's names of NVIDIA's GPUs
_warned: list[bool] = []  # not empty after the warning of missing kernels


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
    native = calls.available() and platform == "cpu"
    used = dict.fromkeys(operations, "cpu" if native else "xla")
    if platform in _GPUS and are_ready():
        used |= dict.fromkeys(("training", "leaves", "predict"), "cuda")
    return {**used, "instructions": calls.current_isa() if native else "none"}


def check_implementation(implementation: str | None) -> None:
    """Checks that an implementation is known and can run."""
    known = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not known:
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, got "
            f"{show(implementation)}"
        )
    if implementation == "cpu" and not calls.available():
        raise ValueError(
            "implementation must be 'xla' or None here, because jboost was installed "
            "without its CPU kernels, got 'cpu'"
        )
    if implementation == "cuda" and (obstacle := find_obstacle()):
        raise ValueError(
            "implementation must be 'cpu', 'xla' or None here, because no CUDA kernel "
            f"can run ({obstacle}), got 'cuda'"
        )


def takes_implementation(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a public function with the keyword argument ``implementation``.

    It applies to everything that the function calls. None keeps the implementation of
    the public function that calls this one, if any.
    """

    @wraps(function)
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
    lacking = implementation is None and not calls.available() and runs_on_cpu()
    if lacking and not _warned:
        _warned.append(True)
        warn_user(
            "jboost was installed without its CPU kernels (Windows has none; elsewhere "
            "no C++17 compiler was found), so everything runs on plain XLA: the same "
            "results, several times slower",
            RuntimeWarning,
        )
    return calls.available() and implementation in (None, "cpu")


def choose(
    *,
    xla: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    tpu: Callable[..., Any] | None = None,
    **sizes: Any,
) -> Callable[..., Any]:
    """Returns the function that does an operation with the current implementation.

    For None: ``cpu`` where the program is lowered for a CPU and the kernels were
    built, ``cuda`` where it is lowered for a GPU that can run its kernels, ``tpu``
    where it is lowered for a TPU, else ``xla``. An operation without the chosen kernel
    is done by ``xla``. ``sizes`` are static arguments of all kernels.
    """
    if sizes:
        kernels: Any = (xla, cpu, cuda, tpu)
        xla, cpu, cuda, tpu = (each and partial(each, **sizes) for each in kernels)
    implementation = current_implementation()
    if implementation == "cuda":
        return cuda or xla
    branches = {}
    if cpu is not None and may_run():
        branches["cpu"] = cpu
    if implementation is not None:
        return branches.get(implementation, xla)
    if cuda is not None and are_ready():
        branches["cuda"] = cuda
    if tpu is not None:
        branches["tpu"] = tpu
    if not branches:
        return xla
    return lambda *operands: jax.lax.platform_dependent(
        *operands, **branches, default=xla
    )


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
        elif platforms <= _GPUS and are_ready():
            implementation = "cuda"
        elif platforms != {"tpu"}:  # its kernel has no name of its own
            implementation = "xla"
    return use_implementation(implementation)


@cache
def find_obstacle() -> str | None:
    """Returns why the kernels cannot run on the GPUs of this machine; None if they can.

    The first call compiles them, or reads them from the user's cache.
    """
    native = calls.LIBRARY
    if native is None:
        return "jboost was installed without its compiled library"
    native.jboost_cuda_error.restype = ctypes.c_char_p
    error = native.jboost_cuda_error()
    if error:
        return error.decode()
    devices, found, version = 0, set(), native.jboost_cuda_version()
    while architecture := native.jboost_cuda_architecture(devices):
        devices, found = devices + 1, found | {architecture}
    if not found:
        return "the driver knows no GPU"
    try:
        for architecture in sorted(found):
            code = cuda_compiler.compile_kernels(architecture, version)
            size = ctypes.c_int64(len(code))
            native.jboost_cuda_load(architecture, code, size)
    except (cuda_compiler.CompilerError, OSError) as error:
        return str(error)
    return None


@cache
def are_ready() -> bool:
    """Returns whether a GPU of JAX can run the kernels; warns if it cannot."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return False
    obstacle = find_obstacle() or _try_kernel(device)
    if obstacle is not None:
        warn_user(
            "jboost's CUDA kernels cannot be used, so everything on the GPU runs on "
            f"plain XLA: the same results, many times slower; {obstacle}",
            RuntimeWarning,
        )
    return obstacle is None


def _try_kernel(device: Any) -> str | None:
    """Returns why a kernel gives no result, or a wrong one, on the device."""
    random = np.random.default_rng(0)
    keys = random.integers(0, 7, 999).astype(np.int32)
    values = random.integers(-9, 9, (999, 2)).astype(np.int32)
    expected = np.zeros((7, 2), np.int32)
    np.add.at(expected, keys, values)
    try:
        with jax.ensure_compile_time_eval(), jax.default_device(device):
            found = np.asarray(sum_keys(jnp.asarray(values), jnp.asarray(keys), 7))
    except Exception as error:  # any error of XLA, the driver or an untried version
        return f"a kernel fails: {error}"
    return None if np.array_equal(found, expected) else "a kernel gives a wrong sum"
