# SPDX-License-Identifier: Apache-2.0
"""Formats containers and tables as short text.

In: a container, or the rows of a table. Out: a few lines of text; a ``repr`` shows the
dtype and shape of arrays instead of their contents.
"""

from dataclasses import fields, is_dataclass
from typing import Any

MOST_LINES = 10
_MOST_ITEMS = 4
_WIDTH = 88


def show_fields(container: Any) -> str:
    """Formats the fields of a container, arrays as ``float32[100, 3]``.

    Also works if fields are tracers or other objects, because JAX builds containers
    with such leaves.
    """
    if is_dataclass(container):
        names = [part.name for part in fields(container)]
    else:
        names = list(container._fields)
    parts = [f"{name}={_show(getattr(container, name, None))}" for name in names]
    name = type(container).__name__
    line = f"{name}({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"  {part}," for part in parts[:MOST_LINES]), ")"])


def _show(value) -> str:
    """Formats a field on one line."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        if shape == () and isinstance(value, float | int):
            return repr(value)
        return f"{dtype}[{', '.join(map(str, shape))}]"
    if hasattr(value, "_fields") or is_dataclass(value):
        return f"{type(value).__name__}(...)"
    if isinstance(value, tuple | list):
        shown = [_show(item) for item in value[:_MOST_ITEMS]]
        more = ["..."] if len(value) > _MOST_ITEMS else []
        text = f"({', '.join([*shown, *more])}{',' if len(value) == 1 else ''})"
        return text if len(text) < 60 else f"({len(value)} entries)"
    text = repr(value)
    return text if len(text) < 60 else f"<{type(value).__name__}>"


def cut(lines: list[str], most: int, what: str) -> list[str]:
    """Returns the first lines and a line with the number of the others."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"... {len(lines) - most + 1} more {what}"]
