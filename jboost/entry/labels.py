# SPDX-License-Identifier: Apache-2.0
"""Names columns by the labels of a table, and compares them with those of training.

Labels are strings, integers, tuples or dates; names are strings.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


class Labels(NamedTuple):
    """Labels of columns, and whether they were strings in the table."""

    names: tuple[str, ...]
    strings: bool

    @property
    def default(self) -> bool:
        """Whether the labels are the numbers 0, 1, 2, ..., as of a matrix."""
        return not self.strings and self.names == _number(len(self.names))

    @property
    def kept(self) -> tuple[str, ...] | None:
        """The names that a model stores; None for default labels."""
        return None if self.default else self.names


def read_labels(labels: Iterable[Any], name: str) -> Labels:
    """Reads the labels of a table; those of mixed types or equal names are refused."""
    labels = [*labels]
    strings = [isinstance(label, str) for label in labels]
    if all(strings):
        return Labels(tuple(labels), strings=True)
    if any(strings):
        raise TypeError(
            f"{name} must have only string column names or no string column names, got "
            f"{labels}"
        )
    names = tuple(map(name_label, labels))
    if len({*names}) < len(names):
        again = next(each for each in names if names.count(each) > 1)
        raise ValueError(
            f"{name} must have column labels that differ as strings, got {again!r} "
            "twice"
        )
    return Labels(names, strings=False)


def name_label(label: Any) -> str:
    """Returns the name that a label of a column has in a model."""
    if isinstance(label, tuple):
        parts = (
            part.item() if isinstance(part, np.generic) else part for part in label
        )
        return str(tuple(parts))
    whole = isinstance(label, float) and label.is_integer()  # 1.0 and 1 are one label
    return str(int(label) if whole else label)


def check_labels(labels: Labels, expected: tuple[str, ...] | None, name: str) -> None:
    """Checks that the columns of a table are those of training, in their order.

    Names are compared with names. Columns without names count as 0, 1, 2, ...: numbers
    are compared with these, and other names are matched by position.

    Args:
      expected: the names of the columns of training; None if they have none.
    """
    names, unnamed = labels.names, expected is None
    expected = _number(len(names)) if expected is None else expected
    if names == expected:
        return
    # Where one side has the labels of a matrix, only numbers contradict them.
    named = expected if labels.default else names
    if (unnamed or labels.default) and not all(map(_is_number, named)):
        return
    lacking = [label for label in expected if label not in names]
    unknown = [label for label in names if label not in expected]
    message = f"{name} must have the columns of training in the same order"
    if unnamed:
        message += ", which have no names and count as 0, 1, 2, ..."
    if lacking:
        message += f", lacks {lacking}"
    if unknown:
        message += f", has additional columns {unknown}"
    if not lacking and not unknown:
        pairs = zip(names, expected, strict=True)
        got, wanted = next(pair for pair in pairs if pair[0] != pair[1])
        message += f", expected {wanted!r}, got {got!r}"
        if labels.strings and not unnamed:
            message += f"; pass {name}[list(model.feature_names)]"
    if unnamed or labels.default:
        message += "; to match columns by position, pass a matrix, as x.to_numpy()"
    raise ValueError(message)


def _number(num_features: int) -> tuple[str, ...]:
    return tuple(map(str, range(num_features)))


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False
