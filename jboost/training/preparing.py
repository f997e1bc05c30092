# SPDX-License-Identifier: Apache-2.0
"""Prepares the rows of a training run: arrays or a stream, behind one interface.

In: a request, checked. Out: thresholds, codes and targets on the device, the
validation sets, and a function that makes the :class:`jboost.training.chunks.Runner`
for such rows. Later stages do not depend on where the rows are.

Rows that are held out for early stopping are the same rows once more: each part has the
weight 0 for the rows of the other. The part that is held out has no codes, because its
scores are those of the training rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Shaped

from jboost.boosting.groups import (
    check_first_group,
    find_widths,
    read_groups,
    refuse_bags,
)
from jboost.boosting.method import make_method, refuse_sorting
from jboost.boosting.settings import Settings
from jboost.boosting.sharding import refuse_with_mesh
from jboost.boosting.state import Arrays, Problem, Static, prepare_groups
from jboost.codes.binning import fit_frame
from jboost.codes.bins import Bins
from jboost.codes.codes import DenseCodes
from jboost.codes.gathering import unite_frames
from jboost.entry import feature_checks
from jboost.entry.exchanges import (
    agree,
    gather_numbers,
    gather_tables,
    num_processes,
)
from jboost.entry.programs import QUICK, compiled
from jboost.model.ensemble import Ensemble
from jboost.objective.retracing import trace_loss_once
from jboost.tables.domains import check_domain, warn_of_collisions
from jboost.tables.frames import RowSource, Schema, read_frame
from jboost.tables.sparse import SparseMatrix, check_gaps
from jboost.tables.targets import check_weights
from jboost.training.chunks import ArrayRunner, Job, Runner
from jboost.training.continuing import adopt_categories
from jboost.training.metrics import try_metrics
from jboost.training.record import UNNAMED
from jboost.training.request import FitRequest, RawRows
from jboost.training.rows import (
    PaddedRows,
    bin_rows,
    join_rows,
    make_sets,
    padded_columns,
)
from jboost.trees.tree import find_ranges

FEWEST_ROWS = 50  # fewer tell too little about the number of rounds
_MOST_VALUES = 50  # targets of more different values are not drawn value by value
_FEW = 1000  # rows that tell that there are many


class TrainingRows(NamedTuple):
    """The training rows; their codes are in memory or on disk.

    Attributes:
      rows: the rows on the device; without codes if these are on disk.
      schema: the schema of the columns.
      weighted: whether weights were given.
      with_offset: whether an offset was given.
      make_runner: returns the runner that makes rounds on the rows; called with a job
        and the initial scores.
      ranges: the ranges of the features in linear leaves; None: leaves are constant.
    """

    bins: Bins
    rows: PaddedRows
    schema: Schema
    weighted: bool
    with_offset: bool
    make_runner: Callable[[Job, Any], Runner]
    ranges: Any = None


class Prepared(NamedTuple):
    """All rows of a run.

    Attributes:
      training: the training rows.
      sets: the validation sets.
      feature_names: the names of the columns, if known.
      model: the model that training goes on from; None: no model. It holds how gaps of
        sparse matrices are read, which may be decided only now.
      whole: the rows that leaf values are at last fitted to; None: they stay.
    """

    training: TrainingRows
    sets: dict[str, PaddedRows]
    feature_names: tuple[str, ...] | None
    model: Ensemble | None
    whole: PaddedRows | None = None

    @property
    def bins(self) -> Bins:
        """The bins of the training rows."""
        return self.training.bins


def prepare_rows(request: FitRequest) -> Prepared:
    """Reads, checks and bins the rows, and puts them on the device.

    No rows are held out yet; see :func:`divide_rows`.

    Raises:
      TypeError, ValueError: for rows that do not suit the request.
    """
    if isinstance(request.rows.x, RowSource):
        training: TrainingRows = request.rows.x.prepare_training(request)
    else:
        training = bin_arrays(
            request.rows, request.settings, request.padded, request.model,
            pad_columns=request.mesh is None, mesh=request.mesh, loss=request.loss,
        )  # fmt: skip
    bins, rows, model = training.bins, training.rows, request.model
    num_scores = request.settings.num_scores
    names = request.name_columns(bins.num_features, training.schema.names)
    if model is not None:
        model = adopt_categories(model, bins.categories)
        model = replace(model, absent=bins.absent)
    sets = make_sets(
        request.sets, bins, training.schema._replace(names=names), rows, num_scores,
        request.padded, training.with_offset, loss=request.loss,
        ranges=training.ranges,
    )  # fmt: skip
    parts = [rows, *sets.values()]
    groups = [part.data.groups for part in parts]
    if any(each is not None and each.weights is not None for each in groups):
        # A loss of groups that takes weights is traced once for all sets of rows.
        parts = [part.handing_weights() for part in parts]
    rows, *others = parts
    training, sets = training._replace(rows=rows), dict(zip(sets, others, strict=True))
    named = {"y": rows}
    named |= {f"{place} y": sets[name] for name, (place, _) in request.sets.items()}
    with agree():
        for name, part in named.items():
            targets, weights = part.data.targets, part.data.weights
            if part.spread is not None:
                targets, weights = part.real
            check_domain(request.loss, targets, weights, num_scores, name)
    return Prepared(training, sets, names, model)


def divide_rows(request: FitRequest, prepared: Prepared, member: int = 0) -> Prepared:
    """Holds out rows for the request, and adds those that leaves are at last fitted to.

    For ``num_rounds="auto"`` few rows stay as they are. Each member holds out others.

    Raises:
      ValueError: too few rows can be held out.
    """
    settings, rows = request.settings, prepared.training.rows
    if not request.holds_out and settings.refit is True:
        pair = rows, next(iter(prepared.sets.values()))
        whole = join_rows(pair, request.loss, settings.num_scores, request.padded)
        return prepared._replace(whole=whole)
    if not request.holds_out:
        return prepared
    divided = hold_out(
        rows, settings.validation_fraction, settings.seed,
        least=FEWEST_ROWS if request.automatic else 2, member=member,
    )  # fmt: skip
    if divided is None and not request.automatic:
        kind = "rows" if rows.data.groups is None else "groups"
        raise ValueError(
            f"early_stopping_rounds needs validation=(x, y), got None and too few "
            f"{kind} of positive weight to hold some out"
        )
    if divided is None:
        return prepared
    train, held = divided
    training = prepared.training._replace(rows=train)
    whole = rows._replace(data=rows.data._replace(codes=None))
    return prepared._replace(
        training=training,
        sets={UNNAMED: held},
        whole=whole if settings.refits else None,
    )


def bin_arrays(
    given: RawRows,
    settings: Settings,
    padded: bool,
    model: Ensemble | None = None,
    pad_columns: bool = False,
    mesh: Mesh | None = None,
    loss: Any = None,
) -> TrainingRows:
    """Finds thresholds, and puts the rows on the device.

    Args:
      padded: whether rows are padded to one of few sizes.
      model: the model that training goes on from; None: no model.
      pad_columns: whether columns are padded, too, unless the settings count or name
        them.
      mesh: the mesh of devices that hold the rows; None: one device.
      loss: the loss; needed if it may be one of groups.
    """
    known = schema = None
    categorical = settings.categorical
    if model is not None:  # a code must stand for the same category as in the model
        known, schema = model.categories, model.schema
        auto = isinstance(categorical, str) and categorical == "auto"
        categorical = known.features if auto and known is not None else categorical
    with agree():
        frame, weights, names = _read_arrays(
            given, settings, model, mesh, schema, categorical is not None
        )
    size = frame.matrix.shape[0] if weights is None else np.count_nonzero(weights)
    if sum(gather_numbers(int(size))) == 0:
        raise ValueError(
            "x must have a row of positive weight on some process, got none on any"
        )
    frame = unite_frames(frame, names, schema)
    matrix, sorts, weighted = frame.matrix, settings.sorts_rows, weights is not None
    bins = fit_frame(
        frame,
        max_bins=None if sorts else settings.max_bins,
        sample_weight=weights,
        absent=settings.absent,
        categorical=categorical,
        feature_names=names,
        known=known,
    )
    columns = None
    if pad_columns and not isinstance(matrix, SparseMatrix):
        columns = _count_columns(settings, bins, matrix.shape)
    groups, factors = read_groups(given.groups, loss, weights, matrix.shape[0])
    ranges = _find_ranges(settings, matrix, bins, model)
    rows = bin_rows(
        bins, matrix, given.y, factors, given.offset, settings.num_scores, padded, "",
        num_columns=columns, mesh=mesh, groups=groups,
        ranges=ranges,
    )  # fmt: skip
    if groups is not None:
        own = groups.weights is not None
        check_first_group(loss, groups, rows.real[0], settings.num_scores, own)
    return TrainingRows(
        bins=bins,
        rows=rows.sorted() if sorts else rows,
        schema=frame.schema,
        weighted=weighted,
        with_offset=given.offset is not None,
        make_runner=lambda job, begin: ArrayRunner(job),
        ranges=ranges,
    )


def _find_ranges(settings, matrix, bins, model):
    """Returns the ranges of the features; None for constant leaves.

    A model that training goes on from keeps its ranges.
    """
    sparse = isinstance(matrix, SparseMatrix)
    if settings.linear_leaves and sparse and settings.given["linear_leaves"] is True:
        raise ValueError("linear_leaves must be 'auto' or False for sparse x, got True")
    if not settings.linear_leaves or sparse:
        return None
    if model is not None and model.ranges is not None:
        known = np.asarray(model.ranges)  # infinite in models of other libraries
        return known if np.isfinite(known).all() else None
    categorical = () if bins.categories is None else bins.categories.features
    return find_ranges(np.asarray(bins.thresholds), categorical)


def _read_arrays(given, settings, model, mesh, schema, categorical):
    """Checks the rows of this process; returns the table, weights and names."""
    alone = num_processes() == 1  # others may hold rows where this one has none
    frame = read_frame(
        given.x, "x", schema=schema, sparse=True, categorical=categorical, extend=True,
        least_rows=int(alone),
    )  # fmt: skip
    matrix, weights = frame.matrix, given.sample_weight
    if model is not None and isinstance(matrix, SparseMatrix):
        check_gaps(settings.absent, matrix, "x")
    names = feature_checks.check_names(
        given.feature_names, frame.names, matrix.shape[1]
    )
    if given.y is None:
        raise ValueError("y must be given where x is an array, got None")
    warn_of_collisions(given.x)
    if weights is not None:
        weights = check_weights(
            weights, matrix.shape[0], "sample_weight", all_rows=alone
        )
    refuse_sorting(settings, matrix)
    if mesh is not None:
        refuse_with_mesh(settings, matrix)
    return frame, weights, names


def _count_columns(settings, bins, shape):
    """Returns how many columns the codes have, with padding."""
    sampled = min(
        settings.colsample_bytree, settings.colsample_bylevel, settings.colsample_bynode
    )
    named = (settings.monotone, settings.interactions, bins.categories)
    limited = settings.l1 != 0 or settings.max_delta_step not in (0, np.inf)
    known = all(each is None for each in named) and not limited
    if known and sampled == 1 and not settings.sorts_rows:
        return padded_columns(*shape)
    return bins.num_features


def make_problem(
    settings: Settings,
    loss: Any,
    rows: PaddedRows,
    bins: Bins | None,
    feature_names: tuple[str, ...] | None = None,
    *,
    uniform: bool = False,
    sets: Sequence[PaddedRows] = (),
    ranges: Any = None,
) -> Problem:
    """Traces the loss for the rows, and sorts the settings.

    Args:
      bins: the bins of the features; None: leaves are known, and no splits are sought.
      sets: the validation sets; their groups may have other sizes.
      uniform: whether all rows have the same weight, or weight 0.
      ranges: the ranges of the features, where rows have values for linear leaves.

    Raises:
      TypeError, ValueError: for settings that do not suit the loss or the rows.
    """
    data, spread = rows.data, rows.spread
    targets, num_rows = data.targets, len(data.weights)
    num_bins, codes = settings.max_bins, data.codes
    if bins is None:
        none: Any = np.zeros((0, num_rows), np.uint8)
        codes = DenseCodes(none)
    elif not settings.sorts_rows:
        num_bins = bins.num_bins
    if ranges is not None and data.values is not None:  # padded columns have none
        short = data.values.shape[1] - len(ranges)
        ranges = np.pad(np.asarray(ranges), ((0, short), (0, 0)))
    if spread is not None:  # a loss that estimates parameters sees all rows
        targets = jax.tree.map(spread.describe, targets)
    widths = None
    if data.groups is not None:
        every = [part.data for part in (rows, *sets)]
        widths = find_widths([(part.groups, len(part.weights)) for part in every])
    traced, constants = trace_loss_once(
        loss, targets, settings.num_scores, settings.own_curvature, widths,
        data.groups is not None and data.groups.weights is not None,
    )  # fmt: skip
    method, numbers = make_method(
        settings,
        traced,
        codes,
        num_rows=num_rows if spread is None else spread.shards.padded,
        uniform=uniform,
        max_bins=num_bins,
        num_features=0 if bins is None else bins.num_features,
        categories=None if bins is None else bins.categories,
        feature_names=feature_names,
        num_devices=1 if spread is None else spread.mesh.size,
        ranges=None if data.values is None else ranges,
    )
    if method.num_terms == 0:
        data = data._replace(values=None)
    if spread is not None:
        constants, numbers = map(spread.put_everywhere, (constants, numbers))
    return Problem(Static(traced, method), Arrays(constants, numbers, data))


def make_job(request: FitRequest, prepared: Prepared) -> Job:
    """Traces the loss, and compares settings and metrics with the rows."""
    rows, sets = prepared.training.rows, prepared.sets
    problem = make_problem(
        request.settings,
        request.loss,
        rows,
        prepared.bins,
        prepared.feature_names,
        uniform=not prepared.training.weighted,
        sets=tuple(sets.values()),
        ranges=prepared.training.ranges,
    )
    if problem.loss.coupled:
        settings = request.settings
        refuse_bags(problem.loss, problem.data.groups, settings)
        problem, sets = _prepare_groups(problem, sets, settings.leaves_out)
    named = {"train": rows, **sets}
    with agree():
        for part in named.values():
            targets, weights = part.real
            try_metrics(
                request.metrics, targets, weights, request.settings.num_scores,
                part.data.groups is not None,
            )  # fmt: skip
    named = named if request.metrics else {}
    real = {name: gather_tables(part.real) for name, part in named.items()}
    return Job(problem, request.rates, rows, sets, request.metrics, real)


def make_leaf_job(
    settings: Settings, loss: Any, rows: PaddedRows, rates: np.ndarray, ranges: Any
) -> Job:
    """Makes a job that fits leaf values only: rows have no codes.

    ``ranges`` are those of the model.
    """
    problem = make_problem(settings, loss, rows, None, ranges=ranges)
    if problem.loss.coupled:
        problem, _ = _prepare_groups(problem, {}, sampled=False)
    return Job(problem, rates, rows, {}, {}, {})


def _prepare_groups(problem, sets, sampled):
    """Computes the group inputs that all rounds share, for all sets of rows."""

    def prepare(data):
        bare = data._replace(codes=None)
        run = compiled(_run_prepare, problem.loss, sampled, effort=QUICK)
        return data._replace(prepared=run(problem.constants, bare))

    arrays = problem.arrays._replace(data=prepare(problem.data))
    sets = {name: part._replace(data=prepare(part.data)) for name, part in sets.items()}
    return problem._replace(arrays=arrays), sets


def _run_prepare(loss, sampled, constants, data):
    return prepare_groups(loss, constants, data, sampled).prepared


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
