# SPDX-License-Identifier: Apache-2.0
"""Handles forks, thread limits and the package version before JAX starts.

``import jboost`` runs this module and nothing else; it does not import JAX.
"""

import multiprocessing
import os
import sys

_forked = False  # whether this process was forked from one that had started JAX


def was_forked() -> bool:
    """Returns whether JAX was running in the process that this one was forked from."""
    return _forked


def _note_fork() -> None:
    global _forked
    if "jax" in sys.modules:
        from jax.extend import backend

        bridge = sys.modules[backend.backends.__module__]
        # JAX has no public way to ask this without starting its backends.
        _forked |= getattr(bridge, "backends_are_initialized", lambda: True)()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_note_fork)
if os.path.isdir(tasks := "/proc/self/task") and len(os.listdir(tasks)) == 1:
    _note_fork()  # earlier: JAX runs on threads, and a fork copies none of them


def limit_threads() -> None:
    """Limits JAX's threads on the CPU as joblib limits those of its workers.

    joblib gives each process of its "loky" backend a share of the processors by way of
    OMP_NUM_THREADS, which JAX does not read. PJRT_NPROC and NPROC take precedence.
    """
    share = os.environ.get("OMP_NUM_THREADS", "")
    known = "PJRT_NPROC" in os.environ or "NPROC" in os.environ
    if share.isdigit() and not known and multiprocessing.parent_process() is not None:
        os.environ["PJRT_NPROC"] = share


limit_threads()


def read_version() -> str:
    """Returns the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jboost")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"
