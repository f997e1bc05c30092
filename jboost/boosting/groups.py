# SPDX-License-Identifier: Apache-2.0
"""Groups of training and validation rows, and the rounds of losses of groups.

Out: tables of rows, and the weights that multiply derivatives; a loss that takes
``weights`` weighs rows itself. Then: start, derivatives and leaf values of such losses.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.boosting.settings import Settings
from jboost.losses import Adaptive, bare_loss
from jboost.numerics.exact import sum_channels, sum_rows
from jboost.numerics.random import derive_seeds, sample
from jboost.objective.coupled import GroupObjective, group_gradient
from jboost.objective.group_tracing import (
    check_loss_mask,
    estimate_in_group,
    read_inputs,
)
from jboost.objective.minimum import find_minimum
from jboost.objective.probing import Probe, use_product
from jboost.objective.tracing import needs_groups
from jboost.tables.groups import (
    MOST_CHECKED,
    RowGroups,
    check_full_groups,
    check_group_weights,
    make_groups,
    take_first_group,
)
from jboost.trees.joint import Stopping, find_step, shorten
from jboost.trees.joint_start import move_scores
from jboost.trees.leaves import LeafProblems


class ValidationRows(NamedTuple):
    """Rows for ``validation``; see :func:`rows`."""

    x: Any
    y: Any
    sample_weight: Any = None
    offset: Any = None
    groups: Any = None


def rows(
    x: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    offset: Any = None,
    groups: Any = None,
) -> ValidationRows:
    """Names the parts of a validation set; the arguments are those of ``fit``.

    Example:
      >>> import jboost as jb
      >>> parts = jb.rows([[1.0], [2.0]], [0, 1], groups=[7, 7])
      >>> parts.groups
      [7, 7]
    """
    return ValidationRows(x, y, sample_weight, offset, groups)


def read_groups(
    groups: Any, loss: Any, weights: Any, num_rows: int, prefix: str = ""
) -> tuple[RowGroups | None, Any]:
    """Checks the groups of rows.

    Args:
      weights: row weights, checked; None: 1.

    Returns:
      The groups, without padding, and the weights that derivatives are multiplied by.
    """
    if groups is None:
        if needs_groups(loss):
            raise ValueError(
                f"{prefix}groups must be given, because loss {_name(loss)} takes where "
                "and so is a loss of a group of rows: an id for each row, 'all', or "
                "jb.random_groups(n)"
            )
        return None, weights
    inputs = read_inputs(loss)
    found = make_groups(groups, padded=inputs.where)
    if found.number is not None and len(found.number) != num_rows:
        raise ValueError(
            f"{prefix}groups must be an id for each of the {num_rows} rows, got "
            f"{len(found.number)}"
        )
    if not inputs.where:
        check_full_groups(found, num_rows, f"{prefix}groups")
    if inputs.weights and (weights is not None or inputs.needs_weights):
        own = np.ones(num_rows, np.float32) if weights is None else weights
        own = own.astype(np.float32)
        return replace(found, weights=own), (own > 0).astype(np.float32)
    if weights is None:
        return found, None
    name = f"{prefix}sample_weight"
    check_group_weights(found, weights, name)
    known = not isinstance(weights, Tracer)
    if known and not inputs.where and (np.asarray(weights) == 0).any():
        raise ValueError(
            f"{name} must be positive where the loss does not take where, because no "
            "row of a group can be left out, got 0"
        )
    return found, weights


def refuse_bags(loss: Any, groups: RowGroups | None, settings: Settings) -> None:
    """Raises if rounds leave rows out of groups and the traced loss takes no mask."""
    if groups is None or groups.kind == "ids" or loss.inputs.where:
        return
    if settings.leaves_out:
        raise ValueError(
            "subsample must be 1, or leaf_rows 'all', where groups are not ids and the "
            "loss does not take where, because rows leave their groups, got "
            f"{settings.subsample}"
        )


def place_groups(groups: RowGroups | None, total: int) -> RowGroups | None:
    """Returns the groups of ``total`` rows on the device; padding is in no group."""
    if groups is None:
        return None

    def pad(array, value=0):
        if array is None:
            return None
        array = np.asarray(array)
        return np.pad(array, (0, total - len(array)), constant_values=value)

    slot, number, weights = (
        pad(groups.slot, -1),
        pad(groups.number),
        pad(groups.weights),
    )
    return jax.device_put(replace(groups, slot=slot, number=number, weights=weights))


def match_groups(groups: Any, training: RowGroups | None, label: str) -> Any:
    """Returns the groups of a validation set: those given, or the kind of training."""
    if training is None:
        if groups is not None:
            raise ValueError(f"{label} must not have groups, because fit is given none")
        return None
    if groups is None and training.kind == "ids":
        raise ValueError(
            f"{label} must have groups, because fit is given groups: pass "
            "jb.rows(x, y, groups=ids)"
        )
    if groups is None:
        return training if training.kind == "random" else "all"
    return groups


def check_first_group(
    loss: Any,
    groups: RowGroups,
    targets: Any,
    num_scores: int,
    weighted: bool,
) -> None:
    """Checks the mask of a loss on one group; see :func:`check_loss_mask`.

    The targets are those of all rows, on the host, without padding.
    """
    size = len(jax.tree.leaves(targets)[0])
    if groups.kind != "ids" or groups.number is None:
        most = min(size, groups.width or MOST_CHECKED)
        index = np.unique(np.linspace(0, size - 1, most).astype(int))
    else:
        index = take_first_group(np.asarray(groups.number)[:size])
    part = jax.tree.map(lambda t: np.asarray(t)[index], targets)
    parameters = estimate_in_group(loss, part, num_scores)
    check_loss_mask(loss, part, num_scores, parameters, weighted)


def find_widths(sets: Iterable[tuple[RowGroups | None, int]]) -> list[int]:
    """Returns the widths to trace a loss for; numbers of rows include padding."""
    widths: set[int] = set()
    for each, size in sets:
        assert each is not None
        if each.kind == "ids":
            widths |= {table.rows.shape[1] for table in each.tables}
        else:
            widths.add(size if each.kind == "all" else each.width)
    return sorted(widths)


def _name(loss):
    bare = bare_loss(loss.loss if isinstance(loss, Adaptive) else loss)
    return getattr(bare, "__name__", repr(bare))


_STREAM = np.uint32(0x9E3779B9)  # keeps these random numbers apart from those of trees
_NOISE = 1e-5  # share of a sum of magnitudes; a smaller float32 sum is noise
_FIRST_STEP = 1e-3  # the first step of the search for the initial score
_PROBES = 10  # each is 16 times as far as the one before: up to 7e7
_SWEEPS = 4  # searches over all scores, if K > 1
_STOPPING = Stopping(steps=5, residual=0.1, least_bend=0.25, overshoot=0.0)


def round_words(
    words: UInt32[Array, "2"], number: Int32[ArrayLike, ""]
) -> UInt32[Array, "2"]:
    """Returns the seed for the random draws of a loss of groups in a round."""
    return derive_seeds(jnp.asarray(words) ^ _STREAM, jnp.asarray(number, jnp.int32))


def draw_bag(
    groups: RowGroups | None,
    seed: UInt32[Array, "2"],
    weights: Float[Array, " N"],
    share: Float[Array, ""],
) -> Bool[Array, " N"]:
    """Draws a share of the rows, as a mask; whole groups if ids define the groups."""
    eligible = weights > 0
    if groups is None or groups.number is None or groups.kind != "ids":
        return sample(seed, eligible, share)
    # There are at most as many groups as rows.
    counted = jnp.zeros_like(eligible).at[groups.number].max(eligible)
    return sample(seed, counted, share)[groups.number] & eligible


def find_group_start(
    objective: GroupObjective, offset: Float[Array, "K N"]
) -> tuple[Float[Array, " K"], Bool[Array, ""]]:
    """Finds the shift of each score, for all rows, that minimizes the loss.

    If no such shift changes the loss, all are 0, and the second result is True.
    """
    weights = objective.weights

    def slope(start, k):
        gradient = group_gradient(objective, move_scores(offset, start))[k]
        counted = jnp.where(weights > 0, gradient * weights, 0.0)
        return sum_rows(counted), _NOISE * sum_rows(jnp.abs(counted))

    def solve(start, k):
        # One after the other: the gradient is compiled once.
        beside = jnp.array([0, -1, 1], jnp.float32)
        slopes, noises = jax.lax.map(lambda c: slope(start.at[k].add(c), k), beside)
        flat = jnp.all(jnp.abs(slopes) <= noises)

        def slope_at(point):
            value, error = slope(start.at[k].set(point[0]), k)
            # Far away a loss may overflow.
            value = jnp.where(jnp.isnan(value), point[0] - start[k], value)
            return value[None], jnp.where(jnp.isnan(error), 0.0, error)[None]

        unbounded = jnp.full(1, jnp.inf, jnp.float32)
        found = find_minimum(
            slope_at, start[k][None], jnp.full(1, _FIRST_STEP, jnp.float32),
            low=-unbounded, high=unbounded, wanted=~flat[None], num_probes=_PROBES,
        )  # fmt: skip
        good = found.strict[0] & ~flat
        return jnp.where(good, start.at[k].set(found.point[0]), start), flat

    num_scores = offset.shape[0]
    numbers = jnp.tile(
        jnp.arange(num_scores, dtype=jnp.int32), _SWEEPS if num_scores > 1 else 1
    )
    start, flat = jax.lax.scan(solve, jnp.zeros(num_scores, jnp.float32), numbers)
    return start, jnp.all(flat)


def solve_group_leaves(
    objective: GroupObjective,
    scores: Float[Array, "K N"],
    probe: Probe,
    k: Int32[Array, ""],
    leaf: Int32[Array, " N"],
    sums: Any,
    problems: LeafProblems,
) -> Float[Array, " L"]:
    """Returns leaf values as :func:`jboost.trees.joint.solve_jointly` does.

    Rows out of the bag weigh 0.
    """
    gradient, curvature, l1 = sums.gradient, sums.curvature, problems.l1
    if problems.pull is not None:
        gradient = gradient - problems.pull
    if l1 is not None:
        gradient = gradient - jnp.clip(gradient, -l1, l1)
    num_leaves, weights = gradient.shape[0], objective.weights

    def sum_leaves(rows):
        rows = jnp.where(weights > 0, rows[k], 0.0)
        return sum_channels((rows,), leaf, num_leaves, weights)[0]

    def find(product):
        def multiply(values):
            direction = jnp.zeros_like(scores).at[k].set(values[leaf])
            return sum_leaves(product(direction))

        return find_step(gradient, curvature, problems.penalty, multiply, _STOPPING)

    def slope_at(values):
        slope = sum_leaves(group_gradient(objective, scores.at[k].add(values[leaf])))
        return slope if problems.pull is None else slope - problems.pull

    values = use_product(objective, scores, probe, find)
    return shorten(values, gradient, slope_at, _STOPPING)
