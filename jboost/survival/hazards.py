# SPDX-License-Identifier: Apache-2.0
"""Survival targets as users pass them, baseline hazards, and survival curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Shaped

from jboost.entry.decorators import on_host, traceable
from jboost.entry.messages import show
from jboost.losses.groups import check_names, check_times, log
from jboost.losses.survival import ROOT, Ties, find_risk_sets, scale_risks, sum_risks
from jboost.numerics.arrays import number_ids, read_ids


def read_rows(targets: Any, weights: Any, entries: bool) -> dict[str, Any]:
    """Returns time, event, maybe entry, and weights, [N] each; weights default to 1."""
    check_names(targets)
    if "entry" in targets and not entries:
        raise ValueError("targets must not have entry here: it is not supported")
    names = [name for name in ("time", "event", "entry") if name in targets]
    rows = {name: _read(targets[name]) for name in names}
    shape = rows["time"].shape
    rows["weights"] = np.ones(shape, np.float32) if weights is None else _read(weights)
    for name, values in rows.items():
        if values.shape != shape or len(shape) != 1:
            raise ValueError(
                f"time and {name} must have shape [N], got {shape} and {values.shape}"
            )
    own = rows["weights"]
    if isinstance(own, Tracer):
        return rows
    bad = np.flatnonzero(~((own >= 0) & np.isfinite(own)))
    if len(bad):
        raise ValueError(
            f"weights must be finite and >= 0, got {own[bad[0]]} in row {bad[0]}"
        )
    check_times(rows, own > 0, "targets")
    return rows


def _read(values):
    """Returns float32; of NumPy where values are concrete."""
    if isinstance(values, Tracer):
        return values.astype(jnp.float32)
    return np.asarray(values, np.float32)


def read_times(times: Any) -> Any:
    """Returns the times [T] of an evaluation in float32."""
    found = _read(times)
    if found.ndim != 1:
        raise ValueError(f"times must have shape [T], got {found.shape}")
    if not isinstance(found, Tracer) and np.isnan(found).any():
        row = int(np.argmax(np.isnan(found)))
        raise ValueError(f"times must not be NaN, got it at index {row}")
    return jnp.asarray(found)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["times", "log_hazards"], meta_fields=["groups"],
)  # fmt: skip
@dataclass(frozen=True)
class BaselineHazard:
    """Holds the cumulative hazard of score 0: a step function of time.

    Attributes:
      times: [T], the times of events, increasing; for strata [S, T], each row filled
        up with infinity.
      log_hazards: [T] or [S, T], the logarithm of the cumulative hazard at each of them
        and until the next, which float32 can hold at all scores.
      groups: the S strata; None without strata.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 1])
      >>> found = jb.survival.baseline_hazard([0.0, 0.0, 0.0], targets)
      >>> found.times.tolist(), [round(h, 4) for h in found.log_hazards.tolist()]
      ([1.0, 3.0], [-1.0986, 0.2877])
    """

    times: Float[Array, "*S T"]
    log_hazards: Float[Array, "*S T"]
    groups: tuple[Any, ...] | None = None

    @property
    def hazards(self) -> Float[Array, "*S T"]:
        """The cumulative hazard at each time; 0 or inf where float32 cannot hold it."""
        return jnp.exp(self.log_hazards)


@on_host("call it on concrete arrays")
def baseline_hazard(
    scores: Shaped[ArrayLike, " N"],
    targets: Mapping[str, Shaped[ArrayLike, " N"]],
    *,
    weights: Shaped[ArrayLike, " N"] | None = None,
    groups: Shaped[ArrayLike, " N"] | Sequence[Any] | None = None,
    ties: Ties = "efron",
) -> BaselineHazard:
    """Estimates the cumulative baseline hazard of a Cox model.

    H(t) = sum_{u <= t} sum_{l < d} mean_{D_u}(w) / (R_u - (l / d) E_u), with the terms
    of :func:`jboost.losses.cox`; the term (l / d) E_u is left out with "breslow". It is
    the hazard of a row with score 0.

    Args:
      scores: [N], the scores of the training rows.
      targets: a mapping with ``time``, ``event`` and optionally ``entry``, [N] each.
      weights: [N], row weights.
      groups: N ids of strata, each with a hazard of its own; None: one stratum.
      ties: "efron" or "breslow"; that of the loss.

    Returns:
      The hazard at the distinct times of events.

    Raises:
      TypeError, ValueError: shapes differ, no event has happened, a score or time is
        NaN, an event is neither 0 nor 1, a row does not enter before its time, a weight
        is negative, or the id of a stratum is missing.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 1])
      >>> found = jb.survival.baseline_hazard([0.0, 0.0, 0.0], targets)
      >>> found.times.tolist(), [round(h, 4) for h in found.hazards.tolist()]
      ([1.0, 3.0], [0.3333, 1.3333])

    References:
      Breslow 1972, discussion of Cox's paper; Efron 1977, for ties; the same as R's
      ``survfit(coxph(...))``, which centers covariates.
    """
    scores = np.asarray(scores, np.float32)
    rows = read_rows(targets, weights, entries=True)
    if scores.shape != rows["time"].shape:
        raise ValueError(
            f"scores and time must have shape [N], got {scores.shape} and "
            f"{rows['time'].shape}"
        )
    bad = np.flatnonzero(~np.isfinite(scores) & (rows["weights"] > 0))
    if len(bad):
        raise ValueError(f"scores must be finite, got {scores[bad[0]]} in row {bad[0]}")
    rows["scores"] = scores
    strata, numbers = _find_strata(groups, len(scores))
    steps = [_find_steps(rows, numbers == each, ties) for each in range(len(strata))]
    longest = max(len(found) for found, _ in steps)
    if longest == 0:
        raise ValueError("targets must contain an event, got none")
    times = np.full((len(strata), longest), np.inf, np.float32)
    # A stratum without events has a hazard of 0.
    hazards = np.full((len(strata), longest), -np.inf, np.float32)
    for row, (found, sums) in enumerate(steps):
        times[row, : len(found)] = found
        if len(found):
            hazards[row] = np.pad(sums, (0, longest - len(sums)), "edge")
    if groups is None:
        return BaselineHazard(jnp.asarray(times[0]), jnp.asarray(hazards[0]))
    return BaselineHazard(jnp.asarray(times), jnp.asarray(hazards), strata)


@traceable
def survival_curves(
    baseline: BaselineHazard,
    scores: Shaped[ArrayLike, " N"],
    times: Shaped[ArrayLike, " T"],
    *,
    groups: Shaped[ArrayLike, " N"] | Sequence[Any] | None = None,
) -> Float[Array, "N T"]:
    """Returns the probability of each row to survive each time.

    S(t | score) = exp(-H(t) exp(score)), with the baseline hazard H.

    Args:
      baseline: the baseline hazard, from :func:`baseline_hazard`.
      scores: [N], log hazard ratios, as :func:`jboost.predict` returns them.
      times: [T], in any order.
      groups: the stratum of each row, N ids; needed if ``baseline`` has strata.

    Returns:
      Probabilities [N, T].

    Raises:
      ValueError: scores or times do not have one dimension, a time is NaN, or groups
        are missing or not among those of the baseline.

    Example:
      >>> import jboost as jb
      >>> targets = dict(time=[1.0, 2.0, 3.0], event=[1, 0, 1])
      >>> baseline = jb.survival.baseline_hazard([0.0, 0.0, 0.0], targets)
      >>> curves = jb.survival.survival_curves(baseline, [0.0, 1.0], [0.5, 2.5])
      >>> [[round(p, 3) for p in row] for row in curves.tolist()]
      [[1.0, 0.717], [1.0, 0.404]]

    References:
      Cox 1972, eq. 13; Breslow 1972.
    """
    scores = jnp.asarray(scores, jnp.float32)
    if scores.ndim != 1:
        raise ValueError(f"scores must have shape [N], got {scores.shape}")
    times = read_times(times)
    numbers = _number_groups(baseline, groups, scores.shape)

    def evaluate(steps, hazards):
        place = jnp.searchsorted(steps, times, side="right")
        return jnp.pad(hazards, (1, 0), constant_values=-jnp.inf)[place]

    table = jnp.atleast_2d(baseline.times), jnp.atleast_2d(baseline.log_hazards)
    logs = jax.vmap(evaluate)(*table)[numbers]
    return jnp.exp(-jnp.exp(logs + scores[:, None]))


def _number_groups(baseline, groups, shape):
    """Returns the index of each row's stratum."""
    if baseline.groups is None:
        if groups is not None:
            raise ValueError("groups must be None: the baseline hazard has no strata")
        return np.zeros(shape, np.int32)
    ids = None if groups is None else np.asarray(groups)
    if ids is None or ids.shape != shape:
        found = None if ids is None else ids.shape
        raise ValueError(
            f"groups must have shape {shape}, one of the strata of the baseline hazard "
            f"for each row, got {found}"
        )
    known = {label: index for index, label in enumerate(baseline.groups)}
    unknown = sorted({*ids.tolist()} - {*known}, key=str)
    if unknown:
        raise ValueError(
            f"groups must be strata of the baseline hazard, got {show(unknown[0])}"
        )
    return np.array([known[each] for each in ids.tolist()], np.int32)


def _find_strata(groups, size):
    """Returns the strata, sorted where they can be, and the number of each row's."""
    if groups is None:
        return (None,), np.zeros(size, np.int32)
    ids = read_ids(groups)
    if len(ids) != size:
        raise ValueError(
            f"groups must be an id for each of the {size} rows, got {len(ids)}"
        )
    numbers, names = number_ids(ids)
    try:
        order = sorted(range(len(names)), key=names.__getitem__)
    except TypeError:  # ids of different types
        order = [*range(len(names))]
    return tuple(names[each] for each in order), np.argsort(order)[numbers]


def _find_steps(rows, inside, ties):
    """Returns distinct times of events in a stratum, and the log hazard until each."""
    size = int(inside.sum())
    padding = (0, 2 ** (size - 1).bit_length() - size)  # few sizes to compile
    held = {name: np.pad(values[inside], padding) for name, values in rows.items()}
    times, rises, ends = map(np.asarray, _find_rises(held, ties=ties))
    # On the host, in double precision: the sums of many rows keep their digits.
    hazards = np.logaddexp.accumulate(rises.astype(np.float64))
    return times[ends], hazards[ends].astype(np.float32)


@partial(jax.jit, static_argnames="ties")
def _find_rises(rows, *, ties):
    """Returns the log of the rise of the hazard at each place, and where steps end."""
    sets = find_risk_sets(rows, rows["weights"], ties)
    scores = rows["scores"][sets.order]
    relative, risks = scale_risks(scores, sets.weight)
    top = jnp.max(jnp.where(sets.weight > 0, scores - relative, -jnp.inf))
    sums = jnp.where(sets.event, sum_risks(sets, risks), 1)
    weights = jnp.where(sets.event, sets.event_weight, 0)
    rises = jnp.log(weights) - log(sums, ROOT) - top
    places = jnp.arange(len(scores), dtype=jnp.int32)
    return sets.time, rises, sets.event & (places == sets.after - 1)
