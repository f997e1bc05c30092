# SPDX-License-Identifier: Apache-2.0
"""Holds out rows for early stopping where there is no validation set.

In: the training rows, on the device. Out: the same rows twice, each with the weight 0
for the rows of the other part. The part that is held out has no codes: its scores are
those of the training rows.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Shaped

from jboost.entry.exchanges import gather_tables
from jboost.training.rows import PaddedRows

FEWEST_ROWS = 50  # fewer tell too little about the number of rounds
_MOST_VALUES = 50  # targets of more different values are not drawn value by value
_FEW = 1000  # rows that tell that there are many


def hold_out(
    rows: PaddedRows, share: float, seed: int, least: int, member: int = 0
) -> tuple[PaddedRows, PaddedRows] | None:
    """Divides rows into a part to train on and a part that is held out.

    Rows of weight 0 are in neither. Processes that train together draw from the rows
    of all.

    Args:
      share: the share of rows, or of groups, to hold out.
      seed: the seed of the draw.
      least: the least number of rows to divide.
      member: the number of the draw; the first 1 / share draws have no row in common.

    Returns:
      The two parts; None for fewer rows, or a single group.
    """
    targets, weights = gather_tables(rows.real)
    groups, number = rows.data.groups, None
    if groups is not None and groups.number is not None:
        number = np.asarray(groups.number)[: rows.size]
    mask = draw(share, seed, weights > 0, targets, number, least, member)
    if mask is None:
        return None
    first, _ = rows.division
    mask = mask[first : first + rows.size]
    train, held = _weigh(rows, ~mask), _weigh(rows, mask)
    return train, held._replace(data=held.data._replace(codes=None))


def draw(
    share: float,
    seed: int,
    counted: Bool[np.ndarray, " N"],
    targets: Any,
    number: Shaped[np.ndarray, " N"] | None = None,
    least: int = 2,
    member: int = 0,
) -> Bool[np.ndarray, " N"] | None:
    """Draws the rows to hold out; see :func:`hold_out`.

    Where targets have few different values, the same share of each value is drawn.

    Args:
      counted: the rows that may be drawn.
      number: the group of each row, which is not divided; None: there are no groups.
    """
    rows, kinds = np.flatnonzero(counted), _find_kinds(targets, counted)
    chance = np.random.default_rng([seed, len(rows)])
    if number is not None:
        units = np.unique(number[rows])
        kinds = None
    else:
        units = rows
    if len(rows) < least or len(units) < 2:
        return None
    order = chance.permutation(len(units))
    if kinds is not None:  # in order of their values, and at random among equals
        order = order[np.argsort(kinds[order], kind="stable")]
    # One of each 1 / share units along this order.
    begin = chance.random() - member * share
    steps = np.floor(np.arange(len(units) + 1) * share + begin)
    drawn = units[order[np.diff(steps) > 0]]
    if not 0 < len(drawn) < len(units):
        drawn = units[order[member % len(order), None]]
    if number is None:
        mask = np.zeros(len(counted), bool)
        mask[drawn] = True
        return mask
    return np.isin(number, drawn) & counted


def _find_kinds(targets, counted):
    """Returns the index of each row's target among few different ones, or None."""
    leaves = jax.tree.leaves(targets)
    if len(leaves) != 1 or leaves[0].ndim != 1:
        return None
    values = leaves[0][counted]
    if len(np.unique(values[:_FEW])) > _MOST_VALUES:
        return None
    found, kinds = np.unique(values, return_inverse=True)
    return kinds if len(found) <= _MOST_VALUES else None


def _weigh(rows, mask):
    """Returns the rows with the weight 0 outside of a mask."""
    weights = np.where(mask, rows.fetch(rows.data.weights), np.float32(0))
    return rows._replace(data=rows.data._replace(weights=rows.put_weights(weights)))
