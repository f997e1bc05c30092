# SPDX-License-Identifier: Apache-2.0
"""Texts for people: warnings, containers, arguments, names of other libraries."""

import html
import os
import reprlib
import sys
import warnings
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

# The folder of the whole package, one level above this box.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the package, at any depth of the call stack.

    The outermost frame inside the package decides, so that a warning of `fit` that an
    estimator calls points at the line that called the estimator.
    """
    frame, depth, level = sys._getframe(1), 1, 1
    while frame is not None:
        depth += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = depth
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def import_pandas(caller: str) -> Any:
    """Imports pandas, which is not a dependency of jboost."""
    try:
        import pandas
    except ImportError:
        raise ImportError(
            f"{caller} needs pandas, which is not installed: pip install pandas"
        ) from None
    return pandas


MOST_LINES = 10
_MOST_ITEMS = 4
_WIDTH = 88
# Of an argument in a message: items of a container, of an array, letters.
_MOST_SHOWN = 6
_FIRST = 3
_MOST_LETTERS = 200


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


class _Shortened(reprlib.Repr):
    """Formats values in short form, at any depth: texts, containers, arrays, tables."""

    def __init__(self):
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _MOST_SHOWN
        self.maxfrozenset = self.maxdeque = self.maxarray = _MOST_SHOWN
        self.maxlevel, self.maxstring, self.maxother = 4, _WIDTH, _MOST_LETTERS

    def repr1(self, x: Any, level: int) -> str:
        """Formats a value; arrays and tables by type, shape and first items."""
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not isinstance(shape, tuple) or shape == () or isinstance(x, type | Tracer):
            return super().repr1(x, level)
        kind = "" if isinstance(x, np.ndarray | jax.Array) else f"{type(x).__name__} "
        if dtype is None:
            return f"{kind}of shape {shape}"
        text = f"{kind}{dtype}[{', '.join(map(str, shape))}]"
        if not isinstance(x, np.ndarray):
            return text
        if x.size <= _MOST_SHOWN and "\n" not in (whole := repr(x)):
            return whole
        first = ", ".join(self._show_item(each, level) for each in x.flat[:_FIRST])
        return f"{text} of {first}, ..."

    def _show_item(self, item, level):
        if isinstance(item, np.floating):
            return f"{item:.5g}"
        return self.repr1(item.item() if hasattr(item, "item") else item, level - 1)

    def repr_int(self, x: int, level: int) -> str:
        """Formats an integer; Python refuses to print the largest."""
        del level
        short = x.bit_length() < 4 * _WIDTH
        return repr(x) if short else f"an integer of {x.bit_length()} bits"


def show(value: Any) -> str:
    """Formats an argument for a message: its ``repr``, on one line and short.

    Long texts and containers are cut; of arrays and tables it shows type, dtype, shape
    and the first items.
    """
    text = " ".join(_SHORTENED.repr(value).split("\n"))
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."
    containers = list | tuple | dict | set | frozenset
    if isinstance(value, containers) and len(value) > _MOST_SHOWN:
        return f"{text} ({len(value)} items)"
    return text


_SHORTENED = _Shortened()


def make_table(
    title: str, rows: list[list[str]], bars: list[float] | None = None
) -> str:
    """Returns a table in HTML, for notebooks; the first row holds the headings.

    Args:
      bars: a number for each of the other rows, drawn as a bar next to it.
    """
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = [f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row]
        if bars is not None and number:
            most = max(*bars, 0.0) or 1.0
            share = max(bars[number - 1], 0.0) / most
            cells.append(f'<td><meter value="{share:.3f}"></meter></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "".join(lines)
    return f"<div><p>{html.escape(title)}</p><table>{body}</table></div>"


def cut(lines: list[str], most: int, what: str) -> list[str]:
    """Returns the first lines and a line with the number of the others."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"... {len(lines) - most + 1} more {what}"]
