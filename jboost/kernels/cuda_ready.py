# SPDX-License-Identifier: Apache-2.0
"""Makes the CUDA kernels ready for the GPUs of this machine.

They are compiled when the first program that may use them is traced. Where that cannot
be done, plain XLA runs instead, after one warning.
"""

import ctypes
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.messages import warn_user
from jboost.kernels import cuda_compiler
from jboost.kernels.loading import LIBRARY
from jboost.kernels.sums_cuda import sum_keys

PLATFORMS = frozenset({"gpu", "cuda"})  # JAX's names of NVIDIA's GPUs


@cache
def find_obstacle() -> str | None:
    """Returns why the kernels cannot run on the GPUs of this machine; None if they can.

    The first call compiles them, or reads them from the user's cache.
    """
    native = LIBRARY
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
