# SPDX-License-Identifier: Apache-2.0
"""Trains all folds of many points on the same rows, side by side in compiled programs.

In: a study with its folds, and points, checked. Out: a Curve for each point. Points
that share a program run side by side; others run one program after another. All runs
share codes and targets; rows outside a run's training set have weight 0 in it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int8, Int32, UInt32
from tqdm import tqdm

from jboost.boosting.method import Numbers
from jboost.boosting.reports import report_round, weigh_losses
from jboost.boosting.round import grow_round, step_round
from jboost.boosting.round_programs import IncludeFallbacks, choose_options
from jboost.boosting.state import (
    Arrays,
    BoostState,
    Data,
    Problem,
    StartPoint,
    Static,
    own_minimizers,
    start_state,
)
from jboost.codes.bins import Bins
from jboost.entry.context import current_implementation
from jboost.entry.decorators import fetch
from jboost.entry.programs import LIGHT, QUICK, compiled
from jboost.entry.stages import run_in_stages, stage
from jboost.numerics.arrays import padded_size
from jboost.objective.evaluation import Objective, loss_values
from jboost.objective.faults import warn_of_lost_rows
from jboost.objective.group_tracing import GroupLoss
from jboost.selection.folds import Folds
from jboost.training.chunks import (
    MOST_ROUNDS,
    begin_compiling,
    move_bar,
    no_trees,
    open_bar,
    pace_rounds,
    wait_for,
)
from jboost.training.host_loop import check_first, describe_no_split
from jboost.training.metrics import Criterion, measure
from jboost.training.record import UNNAMED, Record
from jboost.training.rows import PaddedRows
from jboost.training.starting import (
    check_minimizers,
    check_slopes,
    has_split,
    refuse_group,
    refuse_rows,
    refuse_unbounded,
)
from jboost.trees.initial import MedianStart, is_unbounded
from jboost.trees.tree import Tree

_LEAST_RUNS = 8  # fewer are padded, so that small numbers of runs share a program
_FEWEST = 2**12  # up to this number of scores, compiling takes longer than rounds
_MOST_BYTES = 2**30  # approximate memory limit of the runs of one program


class Shared(NamedTuple):
    """Data that all runs share.

    Attributes:
      offset: the scores before the initial score is added.
      counts: how often each row counts in the training set of each fold; negative: how
        often it counts in the fold's held-out loss.
      watched: the held-out rows of each fold, padded by repeating one. The scores of
        these rows are returned; empty if no scores are needed.
      constants: constants of the loss; None for those that differ between runs.
      words: the seed of the random numbers.
    """

    data: Data
    counts: Int8[Array, "folds N"] | Int32[Array, "folds N"]
    watched: Int32[Array, "folds M"]
    constants: tuple[Any, ...]
    words: UInt32[Array, "2"] | np.ndarray


class Run(NamedTuple):
    """Parameters that differ between runs, with a leading axis of runs.

    Attributes:
      fold: index of the fold that selects the training rows.
      numbers: numeric hyperparameters of the method.
      constants: constants of the loss; None for those that all runs share.
      init_score: None for the minimizer of the loss.
    """

    fold: Int32[Array, ""] | np.ndarray
    numbers: Numbers
    constants: tuple[Any, ...]
    init_score: Float[Array, " K"] | MedianStart | None


class StartCheck(NamedTuple):
    """Problems of a run before its first round.

    Attributes:
      found, row, value: whether the loss of a row of positive weight is not finite; the
        first such row, and its loss.
      endless: the result of :func:`jboost.trees.initial.is_unbounded`.
    """

    found: Bool[Array, ""]
    row: Int32[Array, ""]
    value: Float[Array, ""]
    endless: Bool[ArrayLike, ""]


class Rounds(NamedTuple):
    """Rounds of one run; only the first ``count`` entries of each array are valid.

    Attributes:
      trees: None if they are not kept.
      losses: mean losses of the training rows, and of the held-out rows.
      moved: whether any leaf has a value other than 0.
      split: whether a tree has a split.
      scores: scores of the watched rows after each round.
      parameters: parameters of an adaptive loss after each round; () for other losses.
      kept: whether :func:`jboost.boosting.round.grow_round` makes the same rounds.
    """

    state: BoostState
    trees: Tree | None
    losses: Float[Array, "R 2"]
    moved: Bool[Array, " R"]
    split: Bool[Array, " R"]
    scores: Float[Array, "R K M"]
    parameters: Any
    kept: Bool[Array, ""]


def _pad_runs(number: int, mesh: Mesh | None = None) -> int:
    """Returns the padded number of runs, so that similar numbers share programs.

    With a mesh, all devices get the same number.
    """
    devices = 1 if mesh is None else mesh.size
    return -(-padded_size(number, _LEAST_RUNS) // devices) * devices


def _share(study, constants) -> Shared:
    """Moves the folds to the device."""
    rows, folds = study.rows, study.folds
    watches = study.keeps_models or bool(study.metrics)
    size, most = len(rows.data.weights), max(folds.train.max(), folds.held_out.max())
    dtype = np.int8 if most <= np.iinfo(np.int8).max else np.int32
    counts = np.zeros((_pad_runs(len(folds.train)), size), dtype)
    counts[: len(folds.train), : rows.size] += folds.train.astype(dtype)
    counts[: len(folds.train), : rows.size] -= folds.held_out.astype(dtype)
    longest = int(np.count_nonzero(folds.held_out, axis=1).max())
    watched = np.zeros((len(counts), padded_size(longest) if watches else 0), np.int32)
    for number, mask in enumerate(folds.held_out if watches else ()):
        held_out = np.flatnonzero(mask)
        watched[number] = held_out[-1]
        watched[number, : len(held_out)] = held_out
    return Shared(
        data=rows.data,
        counts=jax.device_put(counts),
        watched=jax.device_put(watched),
        constants=constants,
        words=np.array(
            [0, study.seed], np.uint32
        ),  # seed_from_key(jax.random.key(seed))
    )


def _compile(study, function, *static):
    """Compiles a function of the shared data and of the runs."""
    effort = QUICK if study.rows.offset.size <= _FEWEST else LIGHT
    if study.mesh is None:
        return compiled(function, *static, effort=effort)
    return compiled(_run_on_devices, study.mesh, function, static, effort=effort)


def _run_on_devices(mesh, function, static, shared, *runs):
    """Divides the runs among devices, which exchange nothing."""
    each = PartitionSpec(mesh.axis_names)
    specs = (PartitionSpec(), *[each] * len(runs))
    run = jax.shard_map(
        partial(function, *static), mesh=mesh, in_specs=specs, out_specs=each,
        check_vma=False,
    )  # fmt: skip
    return run(shared, *runs)


def _over_runs(function: Callable[..., Any], operands: Any) -> Any:
    """Maps over runs.

    CPU kernels already use all threads for one run, and a sequential map can skip work
    in single runs; other devices need the parallelism of vmap.
    """
    if current_implementation() == "cpu":
        return jax.lax.map(lambda each: function(*each), operands)
    return jax.vmap(function)(*operands)


def _start_in_stages(loss, shared, runs):
    """Starts one run after the other, by small programs that ``fit`` starts with, too.

    Runs with the same rows, constants and initial score share a start.
    """
    number, found = len(runs.fold), {}
    shared = shared._replace(data=shared.data._replace(codes=None))
    starts = (runs.fold, runs.constants, runs.init_score)
    names = [
        repr(jax.tree.map(lambda a, i=i: a[i].tobytes(), starts)) for i in range(number)
    ]
    with run_in_stages():
        shared = jax.device_put(shared)
        minimizer = _own_minimizer(loss, shared)
        for i, name in enumerate(names):
            if name not in found:
                run = jax.tree.map(lambda array, i=i: array[i], runs)
                found[name] = fetch(_start_run(loss, shared, minimizer, run))
    return jax.tree.map(lambda *each: np.stack(each), *(found[name] for name in names))


def _start_runs(loss, shared, runs):
    minimizer = _own_minimizer(loss, shared)
    return _over_runs(partial(_start_run, loss, shared, minimizer), (runs,))


def _own_minimizer(loss, shared):
    if any(constant is None for constant in shared.constants):
        return None
    return own_minimizers(loss, shared.constants, shared.data)


def _start_run(loss, shared, minimizer, run):
    data, constants = _data_of(shared, run), _constants_of(shared, run)
    start = StartPoint(run.init_score, shared.words, minimizer)
    state, _ = start_state(loss, constants, data, start)
    if isinstance(loss, GroupLoss):
        return state, _find_group_doubt(loss, constants, shared.data, state)
    objective = Objective(loss, constants, data.targets, state.parameters, None)
    values = loss_values(objective, state.scores)
    objective = objective._replace(minimizer=state.minimizer)
    endless = is_unbounded(objective, state.scores, data.weights)
    return state, _doubt(shared.data.weights, values, endless)


@stage
def _doubt(weights, values, endless):
    bad = ~jnp.isfinite(values) & (weights > 0)
    row = jnp.argmax(bad).astype(jnp.int32)
    return StartCheck(jnp.any(bad), row, values[row], jnp.asarray(endless))


def _find_group_doubt(loss, constants, data, state):
    values, weights = weigh_losses(
        loss, constants, state.parameters, data, state.scores, state.words
    )
    bad = ~jnp.isfinite(values) & (weights > 0)
    at = jnp.argmax(bad).astype(jnp.int32)
    row = jnp.int32(0)
    if data.groups.kind == "ids":
        row = jnp.concatenate([table.rows[:, 0] for table in data.groups.tables])[at]
    return StartCheck(jnp.any(bad), row, values[at], jnp.asarray(False))


def _run_rounds(static, keeps_trees, options, shared, runs, rates, counts, state):
    solve, smooth = options.finish.solve, options.smooth

    def make(run, rates, count, state):
        data, constants = _data_of(shared, run), _constants_of(shared, run)
        problem = Problem(static, Arrays(constants, run.numbers, data))
        held_out = repeat_rows(shared.data, -shared.counts[run.fold])
        sets = (held_out._replace(codes=None),)

        def one_round(number, made):
            operands, kept = (problem, rates[number], made.state), jnp.asarray(True)
            if solve:
                after, trees, _ = grow_round(*operands)
            else:
                after, trees, kept = step_round(*operands, smooth)
            steps = (after.steps,)
            report = report_round(problem, False, sets, made.state, after, steps, None)

            def store(buffer, value):
                return jax.lax.dynamic_update_index_in_dim(buffer, value, number, 0)

            return Rounds(
                state=after,
                trees=jax.tree.map(store, made.trees, trees) if keeps_trees else None,
                losses=store(made.losses, report.losses),
                moved=store(made.moved, jnp.any(trees.leaf_value != 0)),
                split=store(made.split, has_split(trees)),
                scores=store(made.scores, after.scores[:, shared.watched[run.fold]]),
                parameters=jax.tree.map(store, made.parameters, after.parameters),
                kept=made.kept & kept,
            )

        empty = _no_rounds(static.method, keeps_trees, shared.watched.shape[1], state)
        return jax.lax.fori_loop(0, count, one_round, empty)

    return _over_runs(make, (runs, rates, counts, state))


def _no_rounds(method, keeps_trees, num_watched, state):
    """Returns empty buffers for the rounds of one run."""
    num_scores, trees = state.steps.shape[0], None
    if keeps_trees:
        trees = jax.tree.map(
            lambda a: jnp.zeros((MOST_ROUNDS, *a.shape[1:]), a.dtype),
            no_trees(method, num_scores, 1),
        )
    return Rounds(
        state=state,
        trees=trees,
        losses=jnp.zeros((MOST_ROUNDS, 2), jnp.float32),
        moved=jnp.zeros(MOST_ROUNDS, bool),
        split=jnp.zeros(MOST_ROUNDS, bool),
        scores=jnp.zeros((MOST_ROUNDS, num_scores, num_watched), jnp.float32),
        parameters=jax.tree.map(
            lambda a: jnp.zeros((MOST_ROUNDS, *a.shape), a.dtype), state.parameters
        ),
        kept=jnp.asarray(True),
    )


def _data_of(shared: Shared, run: Run) -> Data:
    """Returns the rows with a run's weights: 0 outside its training set."""
    return repeat_rows(shared.data, shared.counts[run.fold])


def repeat_rows(data: Data, counts: Any) -> Data:
    """Multiplies weights by counts; 0 for negative counts."""
    groups = data.groups
    if groups is None or groups.weights is None:
        return data._replace(weights=_count_weights(data.weights, counts))
    # The loss weighs rows itself; the core's weights only mark the rows that count.
    own = jnp.maximum(counts, 1).astype(jnp.float32) * groups.weights
    weights = jnp.where(counts > 0, data.weights, 0.0)
    return data._replace(weights=weights, groups=replace(groups, weights=own))


@stage
def _count_weights(weights, counts):
    return jnp.maximum(counts, 0).astype(jnp.float32) * weights


def _constants_of(shared, run):
    pairs = zip(shared.constants, run.constants, strict=True)
    return tuple(common if own is None else own for common, own in pairs)


class Point(NamedTuple):
    """The inputs of training for one point.

    Attributes:
      name: the name of the point in messages; "" if it is the only one.
      problem: its loss and settings, and the rows.
      begin: the initial score, or the rule that finds it.
      metrics: functions bound to the inverse link of the loss.
    """

    name: str
    problem: Problem
    begin: Any
    rates: Float[np.ndarray, " R"]
    metrics: dict[str, Callable[..., Any]]


class Study(NamedTuple):
    """The rows and folds that all points share, and the quantities to record.

    Attributes:
      metrics: names of the metrics.
      by: the criterion that compares rounds.
      patience: rounds without improvement after which a point stops; None: never.
      keeps_models: whether to keep trees and the scores of held-out rows.
      mesh: the devices that share the runs; None: one device.
    """

    bins: Bins
    rows: PaddedRows
    folds: Folds
    names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    by: Criterion
    patience: int | None
    seed: int
    keeps_models: bool
    mesh: Mesh | None = None


@dataclass
class Curve(Record):
    """The rounds of one point so far.

    Attributes:
      over: whether the point has stopped.
      scores: {best round: scores of the held-out rows after it, [folds, K, M]}, if
        models are kept.
      idle: a warning about a fold without a split in its trees; None: no warning.
    """

    over: bool = False
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    idle: str | None = None

    def by_fold(self, metric: str | None = None, name: str = UNNAMED) -> np.ndarray:
        """Returns a metric, or the loss, of a set of rows, [folds, R]."""
        return self.series(metric, name).copy().T


# Called after some rounds of points that run side by side: with their indices, their
# curves, and the states of their runs. It may stop curves, by ``over``.
Judge = Callable[[list[int], list["Curve"], BoostState], None]


def run_points(
    study: Study,
    points: Sequence[Point],
    num_rounds: int,
    progress: bool,
    judge: Judge | None = None,
) -> tuple[list[Curve], bool]:
    """Trains all folds of all points; ``judge`` is called after every MOST_ROUNDS.

    Returns:
      The curves, and whether a signal (ctrl-C) ended training after some rounds.
    """
    groups: dict[Any, list[int]] = {}
    for index, point in enumerate(points):
        groups.setdefault(_program_of(point), []).append(index)
    # A run holds its state twice, before and after a round.
    each = 16 * study.rows.offset.size * len(study.folds.train)
    most = max(1, _MOST_BYTES // each)
    blocks = [
        indices[first : first + most]
        for indices in groups.values()
        for first in range(0, len(indices), most)
    ]
    curves = [_begin_curve(study, point) for point in points]
    interrupted = False
    try:
        with open_bar(num_rounds * len(blocks), progress) as bar:
            for indices in blocks:
                part = [points[i] for i in indices], [curves[i] for i in indices]
                own = None if judge is None else partial(judge, indices)
                _run_block(study, *part, num_rounds, bar, own)
    except KeyboardInterrupt:
        if not any(curve.num_rounds for curve in curves):
            raise
        interrupted = True
    return curves, interrupted


def _begin_curve(study, point):
    """Returns the curve of a point that has not begun."""
    return Curve(
        bins=study.bins,
        init_score=None,
        set_names=(UNNAMED,),
        named=False,
        no_trees=no_trees(point.problem.method, len(study.rows.offset)),
        choices={},
        bagged=False,
        feature_names=study.names,
        metric_names=study.metrics,
        measured=(UNNAMED,) if study.metrics else (),
        by=study.by,
        folds=(len(study.folds.train),),
    )


def _program_of(point):
    """Returns a key that points share if one program can run them side by side."""
    problem = point.problem
    traced = (problem.constants, problem.arrays.numbers, point.begin)
    leaves, structure = jax.tree.flatten(traced)
    shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    # max_nodes is an upper bound, so that the largest of all points suits each.
    method = replace(problem.method, max_nodes=0)
    return problem.loss, method, structure, shapes


def _run_block(
    study: Study,
    points: list[Point],
    curves: list[Curve],
    num_rounds: int,
    bar: tqdm,
    judge: Callable[[list[Curve], BoostState], None] | None,
) -> None:
    """Trains points side by side until all have stopped, and fills their curves."""
    loss, method = points[0].problem.static
    most = max(point.problem.method.max_nodes for point in points)
    method = replace(method, max_nodes=most)
    constants, own = _split_constants([point.problem.constants for point in points])
    shared = _share(study, constants)
    num_folds = len(study.folds.train)
    runs = _stack_runs(points, own, num_folds, study.mesh)
    if study.mesh is None and current_implementation() == "cpu" and not loss.coupled:
        state, doubt = _start_in_stages(loss, shared, runs)
    else:
        state, doubt = _compile(study, _start_runs, loss)(shared, runs)
    begun = _by_point((state.init_score, state.parameters), curves)
    for index, curve in enumerate(curves):
        curve.init_score, parameters = jax.tree.map(lambda a: a[index], begun)  # noqa: B023
        curve.parameters = [parameters]
    _check_start(study, points, state, fetch(doubt))
    find_program = partial(_find_program, study, points[0].problem, method, state)
    begin_compiling(bar)  # another kind of points
    whole = False
    take_run = partial(_take_run, study, points, shared, runs)
    done, split = 0, np.zeros(len(points) * num_folds, bool)
    for first, count in pace_rounds(num_rounds, fixed=judge is not None):
        rates, counts = _plan(points, curves, len(runs.fold), first, count)
        made = find_program(whole)(shared, runs, rates, counts, state)
        wait_for(made.losses, count)
        if not (whole or np.all(made.kept)):
            whole = True  # a fallback that one round needs will be needed again
            begin_compiling(bar)
            made = find_program(whole)(shared, runs, rates, counts, state)
        if first == 0:
            moved = np.asarray(made.moved)[: len(split), 0]
            for number in np.flatnonzero(~moved).tolist():
                index, fold = divmod(number, num_folds)
                if points[index].rates[0] != 0:
                    place = f" of fold {fold}{points[index].name}"
                    operands = take_run(made.state, number)
                    check_first(curves[index], *operands, place, fold)
        before, after = fetch((state.lost, made.state.lost))
        warn_of_lost_rows(before, after, study.rows.size)
        state = made.state
        split |= np.asarray(made.split)[: len(split), :count].any(axis=1)
        move_bar(bar, count, _record_chunk(study, points, curves, made, count))
        if judge is not None:
            judge(curves, state)
        done = first + count
        if all(curve.over for curve in curves):
            break
    bar.update(num_rounds - done)
    if num_rounds > 0 and not split.all():
        number = int(np.argmin(split))
        index, fold = divmod(number, num_folds)
        place = f" in fold {fold}{points[index].name}"
        operands = curves[index], *take_run(state, number)
        curves[index].idle = describe_no_split(*operands, place=place)


def _find_program(study, problem, method, state, whole):
    """Returns the program of rounds; not ``whole``, it may find that steps fail."""
    fallbacks = IncludeFallbacks(derive=whole, slopes=whole, finish=whole)
    flags = state._replace(kinks=None, pointed=np.asarray(state.pointed).any())
    options = choose_options(problem, flags, (False, False), fallbacks)
    static = Static(problem.loss, method)
    return _compile(study, _run_rounds, static, study.keeps_models, options)


def _split_constants(constants):
    """Splits constants into those that all points share and those of each point.

    Both have None where the other has the value.
    """
    common = tuple(
        first if all(same_bits(each, first) for each in others) else None
        for first, *others in zip(*constants, strict=True)
    )
    own = [
        tuple(
            value if shared is None else None
            for shared, value in zip(common, values, strict=True)
        )
        for values in constants
    ]
    return common, own


def _stack_runs(
    points: list[Point], constants: list, num_folds: int, mesh: Mesh | None
) -> Run:
    """Stacks all folds of the first point, then of the next, and so on.

    The first run is repeated as padding.
    """
    runs = [
        Run(np.array(fold, np.int32), point.problem.arrays.numbers, own, point.begin)
        for point, own in zip(points, constants, strict=True)
        for fold in range(num_folds)
    ]
    runs += runs[:1] * (_pad_runs(len(runs), mesh) - len(runs))
    return jax.tree.map(lambda *leaves: np.stack([*map(np.asarray, leaves)]), *runs)


def _check_start(study, points, state, doubt):
    """Checks that the loss is finite at the start and has the minima it needs."""
    num_folds = len(study.folds.train)
    for number in range(len(points) * num_folds):
        point = points[number // num_folds]
        steps = point.problem.method.leaf_solver == "median_step"
        for word, wanted in (
            ("init_score='median'", isinstance(point.begin, MedianStart)),
            ("leaf_solver='median_step'", steps),
        ):
            if wanted:
                own = _take_state(state, number)
                check_minimizers(point.problem, study.rows, own, word)
        if doubt.endless[number]:
            refuse_unbounded()
        if doubt.found[number]:
            own, every = _take_state(state, number), np.arange(study.rows.size)
            first, value = int(doubt.row[number]), float(doubt.value[number])
            if point.problem.loss.coupled:
                group = f"the group of row {first}"
                refuse_group("the data", study.rows, every, value, group)
            refuse_rows("the data", point.problem, study.rows, every >= first, own)
    check_slopes(points[0].problem, study.rows, _take_state(state, 0))


def _take_state(states, number):
    """Returns the state of a run, by one program instead of one for every array."""
    return compiled(_index, small=True)(states, np.int32(number))


def _index(states, number):
    return jax.tree.map(lambda array: array[number], states)


def _take_run(study, points, shared, runs, state, number):
    """Returns the problem of a run, its rows, and its state."""
    run = jax.tree.map(lambda a: a[number], runs)
    static, arrays = points[number // len(study.folds.train)].problem
    problem = Problem(static, arrays._replace(data=_data_of(shared, run)))
    return problem, study.rows, _take_state(state, number)


def _plan(points, curves, size, first, count):
    """Returns the learning rates and the number of the next rounds for each run."""
    rates = np.zeros((size, MOST_ROUNDS), np.float32)
    counts = np.zeros(size, np.int32)
    for index, (point, curve) in enumerate(zip(points, curves, strict=True)):
        (num_folds,) = curve.folds
        runs = slice(index * num_folds, (index + 1) * num_folds)
        rates[runs, :count] = point.rates[first : first + count]
        counts[runs] = 0 if curve.over else count
    return rates, counts


def _by_point(runs, curves):
    """Returns [runs, ...] without padding as [points, folds, ...], on the host."""
    shape = len(curves), *curves[0].folds
    size = math.prod(shape)
    return jax.tree.map(lambda a: a[:size].reshape(*shape, *a.shape[1:]), fetch(runs))


def _record_chunk(study, points, curves, made, count):
    """Records rounds of the points that have not stopped; returns the value to show."""
    scores = made.scores if made.scores.shape[-1] > 0 else None
    results = _by_point((made.losses, made.trees, made.parameters, scores), curves)
    for index, (point, curve) in enumerate(zip(points, curves, strict=True)):
        for entry in range(count):
            if not curve.over:
                place = index, slice(None), entry
                own = jax.tree.map(lambda array: array[place], results)  # noqa: B023
                _record_round(study, point, curve, *own)
    values = [curve.compared() for curve in curves if curve.num_rounds]
    least = min((study.by.rank(each).min() for each in values), default=np.inf)
    return {"best": -least if study.by.direction == "max" else least}


def _record_round(study, point, curve, losses, trees, parameters, scores):
    """Adds one round to a curve, and stops the curve where it ends."""
    if study.keeps_models:
        curve.over = curve.ends_at(losses, study.patience)
    else:  # a sweep goes on with its other points
        curve.over = not np.isfinite(losses[:, 0]).all()
    if curve.over:
        return
    folds = _read_folds(study, scores)
    metrics = measure(point.metrics, folds, curve.num_rounds, RuntimeError)
    if study.keeps_models:
        curve.scores[curve.num_rounds] = scores
    curve.add(trees, losses, metrics, None, parameters)
    best = curve.best_round()
    if study.keeps_models:
        # Another round counts from here on, wherever an interrupt strikes.
        curve.scores = {r: found for r, found in curve.scores.items() if r == best}
    curve.over = curve.is_over(study.patience, best)


def measure_rows(
    study: Study,
    metrics: dict[str, Callable[..., Any]],
    rows: Int[np.ndarray, " M"],
    scores: Float[np.ndarray, "K M"],
) -> dict[str, float]:
    """Returns the metrics of some rows, held out by any fold."""
    part = _read_rows(study, "held-out rows", rows, scores, 1)
    found = measure(metrics, [part], 0, RuntimeError)
    return dict(zip(metrics, found[0].tolist(), strict=True))


def _read_folds(study, scores):
    """Yields the operands of metrics on the held-out rows of each fold."""
    for fold, held_out in enumerate(study.folds.held_out):
        rows = np.flatnonzero(held_out)
        own = scores[fold, :, : len(rows)]
        place = f"the held-out rows of fold {fold}"
        yield _read_rows(study, place, rows, own, held_out[rows])


def _read_rows(study, place, rows, scores, times):
    """Returns the operands of metrics on some rows; each row counts some times."""
    score = scores[0] if scores.shape[0] == 1 else scores.T
    targets, weights = jax.tree.map(lambda a: a[rows], study.rows.real)
    operands = score, targets, weights * np.asarray(times, weights.dtype)
    groups = study.rows.data.groups
    whole = () if groups is None else _spread_rows(study, rows, operands)
    return place, operands, whole, groups


def _spread_rows(study, rows, arguments):
    """Returns scores, targets and weights of all rows; only ``rows`` have a weight."""
    score, _, weight = arguments
    data = study.rows.data
    scores = np.zeros((len(data.weights), *score.shape[1:]), np.float32)
    weights = np.zeros(len(data.weights), np.float32)
    scores[rows], weights[rows] = score, weight
    return scores, data.targets, weights


def same_bits(one, other):
    """Returns whether two arrays have the same bits."""
    if one is other:
        return True
    one, other = np.asarray(one), np.asarray(other)
    like = (one.shape, one.dtype) == (other.shape, other.dtype)
    return like and one.tobytes() == other.tobytes()
