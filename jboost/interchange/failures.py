# SPDX-License-Identifier: Apache-2.0
"""What happens when a model cannot be read: one kind of error, whatever went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from jboost.model.containers import FileError

_DAMAGE = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ForeignError(ValueError):
    """A valid model that cannot be carried over; the message goes on from its name."""


@contextmanager
def report_failures(name: str, library: str) -> Iterator[None]:
    """Raises a FileError for whatever reading a model of a library raises.

    Args:
      name: of the file, or the type of the model in memory.
      library: whose model it is.
    """
    try:
        yield
    except ForeignError as error:
        raise FileError(f"{name} {error}") from None
    except _DAMAGE as error:
        raise FileError(
            f"{name} is no model of {library}'s, or damaged: {type(error).__name__}: "
            f"{error}"
        ) from None
