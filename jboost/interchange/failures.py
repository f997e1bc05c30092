# SPDX-License-Identifier: Apache-2.0
"""Converts every failure to read a foreign model into a FileError.

Readers index and convert the contents of a file without checking each entry first. A
damaged file can therefore raise almost any exception; callers should see only one type.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jboost.model.containers import FileError

_DAMAGE = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ForeignError(ValueError):
    """A valid model that cannot be converted.

    The message is a predicate: :func:`report_failures` puts the model's name before it.
    """


@contextmanager
def report_failures(name: str, library: str) -> Iterator[None]:
    """Raises a FileError if the code in the context fails to read a model.

    Args:
      name: the name of the file, or the type of the model in memory.
      library: the library that made the model.

    Raises:
      FileError: the model is damaged, of another kind, or cannot be converted.
    """
    try:
        yield
    except ForeignError as error:
        raise FileError(f"{name} {error}") from None
    except _DAMAGE as error:
        raise FileError(
            f"{name} is not a model of {library}, or it is damaged: "
            f"{type(error).__name__}: {error}"
        ) from None
