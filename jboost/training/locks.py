# SPDX-License-Identifier: Apache-2.0
"""Locks a checkpoint for the run that writes it.

In: the path of a checkpoint. Out: a lock, which ends with the run or with its process,
however that ends. Two runs that write one file would each go on from what the other
one left. Of several processes that train together, process 0 holds the lock.
"""

import os
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jboost.entry.exchanges import (
    run_on_first,
)

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl: Any = None

_held: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes the copies of a forked process, which may outlive the run."""
    for file in list(_held):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_checkpoint(path: Path | None) -> Iterator[None]:
    """Holds the lock of a checkpoint within a ``with`` block; None: there is none.

    The lock is that of the system on a file next to the checkpoint, which is removed
    afterwards. If a killed process left such a file, it is not locked. Nothing is
    locked on file systems that cannot do so.

    Raises:
      ValueError: another run holds the lock, or the file cannot be written.
    """
    if path is not None:
        run_on_first(lambda: _check_folder(path))
    if path is None or fcntl is None:
        yield
        return
    name = path.with_name(f".{path.name}.lock")
    held: list[Any] = []
    try:
        run_on_first(lambda: held.append(_lock(name, path)))
        yield
    finally:
        for file in filter(None, held):
            with suppress(OSError):
                os.unlink(name)  # first: nobody else can have locked this file
            file.close()


def _check_folder(path) -> None:
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            "checkpoint must be a file in a folder that can be written to, got "
            f"{os.fspath(path)!r}"
        )


def _lock(name, path) -> IO[str] | None:
    """Returns the open file, or None if it cannot be locked."""
    while True:
        file = open(name, "a+")  # noqa: SIM115  # closed where it is not returned
        _held.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(200) or "another process"
            file.close()
            raise ValueError(
                f"checkpoint {os.fspath(path)!r} is in use by another run ({owner}); "
                "wait until it ends, or give another path; if there is no such run, "
                f"remove {os.fspath(name)!r}"
            ) from None
        except OSError:  # a file system without locks
            os.unlink(name)
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                break
        file.close()  # the run that had it removed it meanwhile
    with suppress(OSError):  # the disk may be full
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
    return file
