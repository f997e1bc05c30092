# SPDX-License-Identifier: Apache-2.0
"""Sizes and release of memory, and folders of block files, removed after use."""

import ctypes
import math
import os
import re
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jboost.entry.exchanges import awaits_preemption
from jboost.entry.messages import show
from jboost.entry.programs import Compiled
from jboost.tables.frames import SourceError

_FEW_BYTES = 1 << 20  # freed arrays below this size are left to the allocator


def trim_heap(num_bytes: int) -> None:
    """Returns freed memory to the system if about ``num_bytes`` were freed.

    Does nothing with allocators other than glibc's.
    """
    if num_bytes >= _FEW_BYTES:
        _find_trim()(0)


@cache
def _find_trim() -> Callable[[int], Any]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return bool


_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LEAST_MEMORY = 1 << 16


def read_bytes(memory: Any) -> int:
    """Returns the number of bytes that the argument ``memory`` stands for."""
    expected = f"memory must be a number of bytes >= {_LEAST_MEMORY} or like '512 MiB'"
    if isinstance(memory, bool) or not isinstance(memory, str | int | np.integer):
        raise TypeError(f"{expected}, got {show(memory)}")
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        try:
            number = float(found[1]) if found else np.nan
        except ValueError:
            number = np.nan
        if not found or not np.isfinite(number):
            raise ValueError(f"{expected}, got {show(memory)}")
        memory = int(number * (1024 if found[3] else 1000) ** _UNITS[found[2]])
    if memory < _LEAST_MEMORY:
        raise ValueError(f"{expected}, got {show(memory)}")
    return int(memory)


def as_text(size: int) -> str:
    """Formats a number of bytes."""
    return f"{size / (1 << 20):.1f} MiB"


def count_bytes(arrays: Any) -> int:
    """Returns the size of a pytree of arrays, or of shapes."""
    return sum(
        math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def added_bytes(program: Compiled, *operands: Any) -> int:
    """Returns the bytes of results and scratch; see :func:`compile_ahead`."""
    return compile_ahead(program, *operands)[0]


def compile_ahead(program: Compiled, *operands: Any) -> tuple[int, Any]:
    """Compiles a program for shapes of operands.

    Returns the bytes that it needs besides the operands, for results and scratch, and
    the shapes of the results, with their places on a mesh. A later call with operands
    of these shapes and places does not compile again.
    """
    lowered = program.jitted(*operands).lower(*operands)
    made = lowered.compile()
    shapes = jax.tree.map(_describe, lowered.out_info, made.output_shardings)
    found = made.memory_analysis()
    if found is None:
        return 0, shapes
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return max(0, results) + found.temp_size_in_bytes, shapes


def _describe(shape, place):
    if not isinstance(place, jax.sharding.NamedSharding):
        place = None
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


try:
    import fcntl
except ImportError:  # not POSIX
    fcntl: Any = None

_PREFIX, _LOCK = "jboost-blocks-", "lock"
_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]

_existing: "weakref.WeakSet[Folders]" = weakref.WeakSet()


class BlockError(SourceError):
    """A file of blocks could not be written, or is damaged or gone.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(400, 3))
      >>> batches = jb.streams.array_batches(x, x[:, 0])
      >>> rows = jb.stream(batches, memory="64 MiB", directories=["/dev/null"])
      >>> try:
      ...     jb.fit(rows, num_rounds=1)
      ... except jb.streams.BlockError as error:
      ...     print(str(error).partition(":")[0])
      no folder for blocks could be made in '/dev/null'
    """


class Folders:
    """The folders of block files, which are filled in turn.

    The files are removed by :meth:`remove`, when this object is garbage-collected, at
    the end of the process, and when SIGTERM or SIGHUP ends it. Handlers of these
    signals are installed only while such folders exist, and never replace a handler
    of the program. A process that was killed leaves its folders behind: they are
    removed when folders are next made in the same place.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]] | None):
        places = directories or (tempfile.gettempdir(),)
        self.paths: list[Path] = []
        locks: list[int] = []
        self.remove = weakref.finalize(
            self, _remove_folders, self.paths, locks, os.getpid()
        )
        _existing.add(self)
        _watch_signals()
        for place in places:
            try:
                Path(place).mkdir(parents=True, exist_ok=True)
                _remove_abandoned(Path(place))
                made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
                self.paths.append(made)
                locks += _lock(made)
            except OSError as error:
                raise BlockError(
                    f"no folder for blocks could be made in {os.fspath(place)!r}: "
                    f"{error}"
                ) from error

    def place(self, number: int) -> Path:
        """Returns the path of a block's file."""
        folder = self.paths[number % len(self.paths)]
        return folder / f"{number:06d}.block"


def _remove_folders(paths, locks, owner):
    if os.getpid() != owner:
        return  # a forked child has a copy of the object, but not the files
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    for lock in locks:
        os.close(lock)
    _release_signals()


def _lock(folder):
    """Locks a file in the folder for as long as this process lives."""
    if fcntl is None:
        return []
    lock = os.open(folder / f"{_LOCK}.part", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks
        os.close(lock)
        return []
    # Only now others find the file, and find it locked.
    (folder / f"{_LOCK}.part").rename(folder / _LOCK)
    return [lock]


def _remove_abandoned(place):
    """Removes the folders of processes that have ended without removing them."""
    for path in place.glob(f"{_PREFIX}*/{_LOCK}") if fcntl else ():
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:
            continue  # its process lives
        finally:
            os.close(lock)


def _watch_signals():
    """Removes files before a signal ends the process, unless it has a handler."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows handlers to be set in the main thread only
    for number in _SIGNALS:
        if number == signal.SIGTERM and awaits_preemption():
            continue  # Python does not know handlers of C++ code
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _remove_and_end)


def _release_signals():
    """Restores the default handlers if no folder is left."""
    if threading.current_thread() is not threading.main_thread():
        return
    if any(folders.remove.alive for folders in list(_existing)):
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is _remove_and_end:
            signal.signal(number, signal.SIG_DFL)


def _remove_and_end(number, frame):
    for folders in list(_existing):
        folders.remove()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
