# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernels with NVRTC, NVIDIA's compiler library.

The machine code is kept in the user's cache folder. NVRTC is installed together with
JAX for CUDA (``jax[cuda12]``, ``jax[cuda13]``), so neither nvcc nor a second wheel is
needed.
"""

import ctypes
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "cuda"
# No contraction of a * b + c. Flags for host code do not exist: NVRTC has none.
_OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
_VERSIONS = (13, 12)  # CUDA versions, the newest first


class CompilerError(Exception):
    """The kernels cannot be compiled; the message says why."""


def read_source() -> str:
    """Returns the source of all kernels as one text; ``#include`` lines are dropped."""
    files = [SOURCES / "prelude.h", *sorted(SOURCES.glob("*.cu"))]
    lines = [
        line
        for file in files
        for line in (f'#line 1 "{file.name}"', *file.read_text().splitlines())
        if not line.startswith("#include")
    ]
    return "\n".join(lines) + "\n"


def compile_kernels(architecture: int, driver: int) -> bytes:
    """Returns the kernels for GPUs of an architecture, 90 for compute capability 9.0.

    Args:
      driver: the version of CUDA that the driver of the GPU supports, 13 for 13.0.

    Raises:
      CompilerError: NVRTC was not found, or fails.
    """
    source = read_source()
    compiler = _load_compiler(driver)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(compiler, "nvrtcVersion", major, minor)
    key = repr((source, _OPTIONS, major.value, minor.value, architecture))
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    file = _find_cache() / f"kernels-{digest}.bin"
    try:
        return file.read_bytes()
    except OSError:
        pass
    code = _compile(compiler, source, architecture)
    _save(file, code)
    return code


def _find_cache():
    """Returns the folder for compiled kernels, as the XDG specification names it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jboost"


def _save(file, code):
    """Writes the file at once, so that processes can share it; without it, no harm."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, file)
    except OSError:
        pass


def _load_compiler(driver):
    """Loads NVRTC from JBOOST_LIBNVRTC, from a Python package or from the system.

    A driver runs code from NVRTC of its own version or older, but not from newer ones.
    """
    if os.environ.get("JBOOST_LIBNVRTC"):
        return ctypes.CDLL(os.environ["JBOOST_LIBNVRTC"])
    folders = [Path(entry) / "nvidia" for entry in sys.path]
    names = [f"libnvrtc.so.{version}" for version in _VERSIONS if version <= driver]
    candidates = [
        found
        for name in names
        for folder in folders
        for found in sorted(folder.glob(f"*/lib/{name}"))
    ]
    for candidate in (*candidates, *names):
        try:
            return ctypes.CDLL(str(candidate))
        except OSError:
            continue
    raise CompilerError(
        "NVRTC was not found; install jax[cuda12] or jax[cuda13], which bring it"
    )


def _call(compiler, name, *results):
    """Calls a function that writes its results to the addresses it gets."""
    _check(compiler, getattr(compiler, name)(*map(ctypes.byref, results)))


def _check(compiler: Any, code: int, log: str = "") -> None:
    if code:
        compiler.nvrtcGetErrorString.restype = ctypes.c_char_p
        text = compiler.nvrtcGetErrorString(code)
        raise CompilerError(f"NVRTC: {(text or b'error').decode()} ({code})\n{log}")


def _compile(compiler, source, architecture):
    program = ctypes.c_void_p()
    created = compiler.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    _check(compiler, created)
    try:
        target = _choose_architecture(compiler, architecture)
        options = [*_OPTIONS, f"--gpu-architecture=sm_{target}"]
        texts = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        code = compiler.nvrtcCompileProgram(program, len(options), texts)
        _check(compiler, code, _read(compiler, program, "ProgramLog").decode())
        return _read(compiler, program, "CUBIN")
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _choose_architecture(compiler, architecture):
    """Returns the newest architecture that both NVRTC and the GPU support."""
    number = ctypes.c_int()
    _call(compiler, "nvrtcGetNumSupportedArchs", number)
    known = (ctypes.c_int * number.value)()
    _check(compiler, compiler.nvrtcGetSupportedArchs(known))
    # Code runs on newer GPUs of the same major number.
    fit = [a for a in known if a // 10 == architecture // 10 and a <= architecture]
    if not fit:
        raise CompilerError(
            f"NVRTC compiles for the architectures {[*known]}, but the GPU has "
            f"{architecture}"
        )
    return max(fit)


def _read(compiler, program, name):
    size = ctypes.c_size_t()
    _check(
        compiler, getattr(compiler, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    )
    buffer = ctypes.create_string_buffer(size.value)
    _check(compiler, getattr(compiler, f"nvrtcGet{name}")(program, buffer))
    return buffer.raw
