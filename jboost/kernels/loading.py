# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the shared library that the build makes of native/.

Without the file (no compiler where jboost was installed) everything runs on plain XLA.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import jax

_FILE = "jboost_kernels.so"


def _load() -> ctypes.CDLL | None:
    """Loads the library; None where there is none.

    JBOOST_LIBRARY names another build of it, with sanitizers for example.
    """
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


def find_handler(name: str) -> Any:
    """Returns a handler of the library as XLA registers it."""
    assert LIBRARY is not None
    return jax.ffi.pycapsule(getattr(LIBRARY, f"jboost_{name}"))
