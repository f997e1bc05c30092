# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the arguments of ``fit`` before any data are looked at.

In: the arguments of ``fit``. Out: a FitRequest, which later stages trust. Conditions on
the data (shapes, names of columns, whether a loss is defined for the targets) are
checked where the data are prepared.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jboost import losses
from jboost.boosting.memory_needs import refuse_large_model, refuse_large_table
from jboost.boosting.method import initial_scores
from jboost.boosting.settings import Settings, learning_rates
from jboost.boosting.sharding import check_mesh
from jboost.entry import checks, feature_checks
from jboost.entry.context import find_mesh
from jboost.entry.messages import show
from jboost.model.ensemble import Ensemble
from jboost.objective.group_tracing import read_inputs
from jboost.tables.frames import RowSource
from jboost.tables.groups import RowGroups
from jboost.training.continuing import check_start, match_columns
from jboost.training.metrics import Criterion, bind_metrics, check_metrics, read_by
from jboost.training.rows import name_sets
from jboost.training.sharded import check_devices


class RawRows(NamedTuple):
    """Rows as the caller gave them; see :func:`jboost.fit`."""

    x: Any
    y: Any
    sample_weight: Any
    offset: Any
    feature_names: Any
    groups: Any = None


class FitRequest(NamedTuple):
    """The checked arguments of one call of ``fit``.

    Attributes:
      rows: the training rows.
      loss: the loss function, of one row or of a group.
      settings: the hyperparameters; with a model, init_score and absent are its own.
      rates: the learning rate of each round.
      begin: the initial scores [K], or how to find them.
      sets: the validation sets: {name: (label in errors, parts)}.
      automatic: whether ``num_rounds`` was "auto".
      holds_out: whether some of the rows serve as the validation set.
      named: whether the sets were given by name.
      metrics: the metrics by name, bound to the link of the loss.
      by: the criterion that rounds are compared by.
      watchers: the callbacks.
      mesh: the mesh of devices that hold the rows; None: one device.
      model: the model that training goes on from; None: no model.
      checkpoint: the path of the file; None: no file.
      checkpoint_rounds: the number of rounds between two writes of the file.
    """

    rows: RawRows
    loss: Any
    settings: Settings
    rates: np.ndarray
    begin: Any
    sets: dict[str, tuple[str, Any]]
    automatic: bool
    holds_out: bool
    named: bool
    metrics: dict[str, Callable[..., Any]]
    by: Criterion
    watchers: tuple[Callable[..., Any], ...]
    progress: bool
    mesh: Mesh | None
    model: Ensemble | None
    checkpoint: Path | None
    checkpoint_rounds: int

    @property
    def padded(self) -> bool:
        """Whether rows may be padded.

        Estimates of an adaptive loss see real rows, and so does a loss of all rows that
        takes no mask.
        """
        every = [self.rows.groups, *(parts[-1] for _, parts in self.sets.values())]
        return all(may_pad_rows(self.loss, groups) for groups in every)

    def with_fixed_rounds(self) -> "FitRequest":
        """Returns the request for rows that are too few to hold some out."""
        fixed = self.settings.replace(num_rounds="auto", early_stopping_rounds="auto")
        fixed = fixed.with_rounds(stops=False)
        rates = self.rates[: fixed.num_rounds]
        return self._replace(settings=fixed, rates=rates, holds_out=False)

    def name_columns(
        self, num_features: int, names: tuple[str, ...] | None
    ) -> tuple[str, ...] | None:
        """Checks the columns against the call and the model; returns their names."""
        names = feature_checks.check_names(self.rows.feature_names, names, num_features)
        if self.model is None:
            return names
        return match_columns(self.model, num_features, names)

    def check_columns(self, num_features: int, names: tuple[str, ...] | None) -> None:
        """Checks all that depends on the columns alone, before rows are read."""
        names = self.name_columns(num_features, names)
        feature_checks.check_monotone(self.settings.monotone, num_features, names)
        feature_checks.check_interactions(
            self.settings.interactions, num_features, names
        )


def read_mesh(mesh: Any, x: Any) -> Mesh | None:
    """Returns the mesh of ``fit``, given or that of x; None: one device.

    Raises:
      TypeError, ValueError: it cannot hold the rows.
    """
    mesh = check_mesh(find_mesh(x) if mesh is None else mesh)
    if mesh is not None:
        check_devices(mesh)
    return mesh


def read_request(
    rows: RawRows,
    loss: Any,
    settings: Settings,
    mesh: Mesh | None,
    *,
    validation: Any,
    metrics: Any,
    by: Any,
    callbacks: Any,
    progress: Any,
    model: Any,
    checkpoint: Any,
    checkpoint_rounds: Any,
) -> FitRequest:
    """Checks the arguments of ``fit``; exchanges nothing with other processes.

    Raises:
      TypeError, ValueError: for bad arguments.
    """
    sets = name_sets(validation)
    automatic = settings.num_rounds == "auto"
    settings, holds_out = _decide_rounds(settings, rows, loss, sets, model)
    settings = settings.with_scores(loss, rows.y)
    if model is not None:
        model = check_start(model, settings)
        settings = settings.replace(init_score=model.init_score, absent=model.absent)
    rates = learning_rates(
        settings.learning_rate,
        settings.num_rounds,
        first=0 if model is None else model.num_rounds,
    )
    for name, value in dict(model=model, checkpoint=checkpoint).items():
        if settings.members > 1 and value is not None:
            raise ValueError(
                f"members must be 1 with {name}, which holds one run, got "
                f"{settings.members}"
            )
    watchers = _check_callbacks(callbacks)
    path = _read_checkpoint(checkpoint, checkpoint_rounds)
    begin = initial_scores(settings)
    criterion, metrics = read_by(by, check_metrics(metrics))
    metrics = bind_metrics(metrics, loss, settings.num_scores)
    if criterion.metric is not None and not sets and not holds_out:
        raise ValueError(f"by={show(by)} needs validation=(x, y), got None")
    if isinstance(rows.x, RowSource):
        _check_streamed(rows, settings)
    if rows.groups is not None and mesh is not None:
        raise ValueError(
            "groups must be None with a mesh, got groups: the rows of a group must be "
            "on one device"
        )
    return FitRequest(
        rows=rows,
        loss=loss,
        settings=settings,
        rates=np.asarray(rates),
        begin=begin,
        sets=sets,
        automatic=automatic,
        holds_out=holds_out,
        named=isinstance(validation, dict),
        metrics=metrics,
        by=criterion,
        watchers=watchers,
        progress=checks.check_flag("progress", progress),
        mesh=mesh,
        model=model,
        checkpoint=path,
        checkpoint_rounds=checkpoint_rounds,
    )


def _decide_rounds(settings, rows, loss, sets, model):
    """Returns settings with numbers of rounds, and whether rows are held out."""
    reason = None
    if isinstance(rows.x, RowSource):
        reason = "the rows of a stream"
    elif model is not None:
        reason = "rows that a model may have been trained on"
    elif _is_one_group(rows.groups) and not read_inputs(loss).where:
        reason = "rows of groups whose loss does not take where"
    can = not sets and reason is None
    settings = settings.with_rounds(stops=bool(sets) or can)
    stops = settings.early_stopping_rounds is not None
    if stops and not sets and not can:
        raise ValueError(
            f"early_stopping_rounds needs validation=(x, y), got None: {reason} cannot "
            "be held out"
        )
    holds_out = stops and can
    if settings.refit is True and (not stops or isinstance(rows.x, RowSource)):
        raise ValueError(
            "refit must be 'auto' or False unless training stops early on rows in "
            "memory; jb.refit(model, x, y) takes any rows"
        )
    if settings.refit is True and settings.monotone is not None:
        raise ValueError(
            "refit must be 'auto' or False with monotone, whose constraints new leaf "
            "values might break, got True"
        )
    return settings, holds_out


def _check_streamed(rows, settings):
    """Refuses arguments that batches hold, and settings unsupported for streams."""
    for name in ("y", "sample_weight", "offset", "groups"):
        value = getattr(rows, name)
        if value is not None:
            reason = (
                "losses of groups need their rows in memory"
                if name == "groups"
                else "the batches of the stream hold it"
            )
            raise ValueError(
                f"{name} must not be given where x is a stream, because {reason}, got "
                f"{type(value).__name__}"
            )
    only = {"candidates": "global", "candidate_weights": "samples"}
    for name, needed in {**only, "categorical": "auto"}.items():
        value = getattr(settings, name)
        if value is not None and (not isinstance(value, str) or value != needed):
            raise ValueError(
                f"{name} must be {needed!r} where x is a stream, whose rows are dense "
                f"numbers and whose thresholds are chosen once, got {show(value)}"
            )


def refuse_large_run(request: FitRequest) -> None:
    """Raises a MemoryError if the rows or the model cannot fit into memory."""
    settings, mesh = request.settings, request.mesh
    stops = settings.early_stopping_rounds is not None or bool(request.watchers)
    refuse_large_table(request.rows.x, settings, 1 if mesh is None else mesh.size)
    refuse_large_model(settings, may_stop=stops)


def may_pad_rows(loss: Any, groups: Any) -> bool:
    """Returns whether rows may be padded; see :attr:`FitRequest.padded`."""
    if isinstance(loss, losses.Adaptive):
        return False
    return not (_is_one_group(groups, random=False) and not read_inputs(loss).where)


def _is_one_group(groups, random=True):
    """Returns whether single rows may be left out of a group, not whole groups."""
    if isinstance(groups, RowGroups):
        return groups.kind == "all" or (random and groups.kind == "random")
    return isinstance(groups, str)


def _check_callbacks(callbacks):
    signature = "callback(round, history, model), or several such"
    if not callable(callbacks) and not isinstance(callbacks, tuple | list):
        raise TypeError(
            f"callbacks must be callable as {signature}, got {show(callbacks)}"
        )
    watchers = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for watch in watchers:
        checks.check_callable("callbacks", watch, signature)
    return watchers


def _read_checkpoint(path: Any, every: Any) -> Path | None:
    """Returns the path of the file without links."""
    checks.check_integer("checkpoint_rounds", every, least=1)
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"checkpoint must be a path, got {type(path).__name__}")
    return Path(os.path.realpath(path))
