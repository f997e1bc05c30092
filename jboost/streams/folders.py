# SPDX-License-Identifier: Apache-2.0
"""Folders for files of blocks, which are removed when they are no longer needed."""

import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jboost.entry.exchanges import (
    awaits_preemption,
)
from jboost.tables.frames import SourceError

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
    """A file of blocks could not be written, or is damaged or gone."""


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
