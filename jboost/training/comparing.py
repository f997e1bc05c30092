# SPDX-License-Identifier: Apache-2.0
"""Compares rounds.

In: what rounds are compared by, and its values. Out: the best round. This is the only
place where rounds are compared, for ``fit``, cross-validation and sweeps: a value that
is NaN or infinite is never the best, and whoever asks is told about it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jboost.entry.representation import show


class Criterion(NamedTuple):
    """The criterion by which rounds are compared.

    Attributes:
      name: "loss", or the name of a metric.
      direction: "min" or "max": which values are better.
    """

    name: str = "loss"
    direction: str = "min"

    @property
    def metric(self) -> str | None:
        """The metric's name; None for the loss."""
        return None if self.name == "loss" else self.name

    def rank(self, values: Any) -> Float[np.ndarray, "..."]:
        """Maps values to numbers of which the least is best; not finite is worst."""
        values = np.asarray(values, np.float64)
        signed = -values if self.direction == "max" else values
        return np.where(np.isfinite(values), signed, np.inf)

    def find_best(self, values: Any) -> int:
        """Returns the place of the best value, the first of equal ones.

        -1 if there is no finite one.
        """
        ranks = self.rank(values)
        if not np.isfinite(ranks).any():
            return -1
        return int(np.argmin(ranks))


BY_LOSS = Criterion()


class Compared(NamedTuple):
    """The rows on which rounds are compared.

    Attributes:
      place: how messages refer to the rows.
      values: the criterion after each round on these rows.
      targets, weights: of the rows; None where they are not known.
    """

    place: str
    values: Sequence[float] | np.ndarray
    targets: Any = None
    weights: Any = None


def describe_gaps(by: Criterion, compared: Sequence[Compared]) -> str | None:
    """Says in which rounds the criterion is not finite, where and why.

    Returns:
      None if it always is.
    """
    found = [each for each in compared if not np.isfinite(each.values).all()]
    if not found:
        return None
    first = max(found, key=lambda each: np.count_nonzero(~np.isfinite(each.values)))
    values = np.asarray(first.values, np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    rounds = f"in all {len(values)} rounds"
    if len(bad) < len(values):
        rounds = f"in {len(bad)} of {len(values)} rounds, the first of them {bad[0]},"
    others = f" (and of {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"by={show(by.name)} is {values[bad[0]]} {rounds} on {first.place}{others}"
        f"{_describe_targets(first)}"
    )


def _describe_targets(compared):
    """Returns what may be the reason: all targets are the same number."""
    if compared.weights is None:
        return ""
    rows = np.asarray(compared.weights) > 0
    leaves = jax.tree.leaves_with_path(compared.targets)
    for path, leaf in leaves:
        values = np.asarray(leaf)[rows]
        if values.size and np.all(values == values.flat[0]):
            name = jax.tree_util.keystr(path)
            which = f"targets{name}" if name else "targets"
            return (
                f", where {which} of all {np.count_nonzero(rows)} rows are "
                f"{values.flat[0]}"
            )
    return ""
