# SPDX-License-Identifier: Apache-2.0
"""The host loop of cross-validation: trains all folds of all points.

In: a study with its folds, and points, checked. Out: a Curve for each point. Points
that share a compiled program run side by side; others run one program after another.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jboost.boosting.state import Problem
from jboost.entry.decorators import fetch
from jboost.entry.programs import compiled
from jboost.objective.faults import warn_of_lost_rows
from jboost.selection.runs import (
    Curve,
    Point,
    Run,
    Study,
    by_point,
    data_of,
    make_record,
    pad_runs,
    record_chunk,
    run_rounds,
    same_bits,
    share,
    start_runs,
)
from jboost.training.chunks import MOST_ROUNDS, open_bar, pace_rounds, wait_for
from jboost.training.history import TrainingError
from jboost.training.starting import (
    check_minimizers,
    check_slopes,
    count_rounds,
    describe_idleness,
    describe_limits,
    refuse_group,
    refuse_rows,
    refuse_unbounded,
)
from jboost.trees.initial import MedianStart

_MOST_BYTES = 2**30  # approximate memory limit of the runs of one program


def run_points(
    study: Study, points: Sequence[Point], num_rounds: int, progress: bool
) -> tuple[list[Curve], bool]:
    """Trains all folds of all points.

    Returns:
      The curves, and whether a signal (ctrl-C) ended training after some rounds.
    """
    groups: dict[Any, list[int]] = {}
    for index, point in enumerate(points):
        groups.setdefault(_program_of(point), []).append(index)
    most = _points_at_once(study)
    blocks = [
        indices[first : first + most]
        for indices in groups.values()
        for first in range(0, len(indices), most)
    ]
    num_folds, interrupted = len(study.folds.train), False
    curves = [
        Curve(point.problem.method, point.metrics, np.zeros(num_folds))
        for point in points
    ]
    parts = [[curves[i] for i in indices] for indices in blocks]
    try:
        with open_bar(num_rounds * len(blocks), progress) as bar:
            for indices, part in zip(blocks, parts, strict=True):
                chosen = [points[i] for i in indices]
                _run_block(study, chosen, part, num_rounds, bar)
    except KeyboardInterrupt:
        if not any(curve.num_rounds for part in parts for curve in part):
            raise
        interrupted = True
    for indices, part in zip(blocks, parts, strict=True):
        for index, curve in zip(indices, part, strict=True):
            curves[index] = curve
    return curves, interrupted


def _program_of(point):
    """Returns a key that points share if one program can run them side by side."""
    problem = point.problem
    traced = (problem.constants, problem.arrays.numbers, point.begin)
    leaves, structure = jax.tree.flatten(traced)
    shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    # max_nodes is an upper bound, so that the largest of all points suits each.
    method = replace(problem.method, max_nodes=0)
    return problem.loss, method, structure, shapes


def _points_at_once(study):
    """Returns the number of points that fit into memory side by side.

    A run holds its state twice, before and after a round.
    """
    num_scores, num_rows = study.rows.offset.shape
    each = 16 * num_scores * num_rows * len(study.folds.train)
    return max(1, _MOST_BYTES // each)


def _run_block(
    study: Study,
    points: list[Point],
    curves: list[Curve],
    num_rounds: int,
    bar: tqdm,
) -> None:
    """Trains points side by side until all have stopped; replaces their curves."""
    loss, method = points[0].problem.static
    most = max(point.problem.method.max_nodes for point in points)
    method = replace(method, max_nodes=most)
    watches = study.keeps_models or bool(study.metrics)
    constants, own = _split_constants([point.problem.constants for point in points])
    shared = share(study.rows, study.folds, constants, seed=study.seed, watches=watches)
    num_folds = len(study.folds.train)
    runs = _stack_runs(points, own, num_folds, study.mesh)
    state, doubt = start_runs(loss, method, shared, runs, study.mesh)
    begun = by_point(state.init_score, len(points), num_folds)
    first_parameters = jax.tree.map(
        lambda a: by_point(a, len(points), num_folds), state.parameters
    )
    curves[:] = [
        replace(
            curve,
            init_score=begun[index],
            parameters=[jax.tree.map(lambda a: a[index], first_parameters)],  # noqa: B023
        )
        for index, curve in enumerate(curves)
    ]
    _check_start(study, points, curves, state, fetch(doubt))
    done, split = 0, np.zeros(len(points) * num_folds, bool)
    for first, count in pace_rounds(num_rounds):
        rates, counts = _plan(points, curves, len(runs.fold), first, count)
        made = run_rounds(
            loss,
            method,
            study.keeps_models,
            shared,
            runs,
            rates,
            counts,
            state,
            mesh=study.mesh,
        )
        wait_for(made.losses, count)
        if first == 0:
            _check_first(study, points, curves, shared, runs, made)
        before, after = fetch((state.lost, made.state.lost))
        warn_of_lost_rows(before, after, study.rows.size)
        state = made.state
        split |= np.asarray(made.split)[: len(split), :count].any(axis=1)
        # By one assignment: an interrupt finds the curves before the chunk or after.
        curves[:] = record_chunk(study, curves, made, count, bar)
        done = first + count
        if all(curve.over for curve in curves):
            break
    bar.update(num_rounds - done)
    if num_rounds > 0 and not split.all():
        _tell_limits(study, points, curves, shared, runs, state, split)


def _split_constants(constants):
    """Splits constants into those that all points share and those of each point.

    Both have None where the other has the value.
    """
    first, *others = constants
    common = tuple(
        value if all(same_bits(other[index], value) for other in others) else None
        for index, value in enumerate(first)
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
    runs += runs[:1] * (pad_runs(len(runs), mesh) - len(runs))
    return jax.tree.map(lambda *leaves: np.stack([*map(np.asarray, leaves)]), *runs)


def _check_start(study, points, curves, state, doubt):
    """Checks that the loss is finite at the start and has the minima it needs."""
    num_folds = len(study.folds.train)
    for number in range(len(points) * num_folds):
        point, curve = points[number // num_folds], curves[number // num_folds]
        for word, wanted in (
            ("init_score='median'", isinstance(point.begin, MedianStart)),
            ("leaf_solver='median_step'", curve.method.leaf_solver == "median_step"),
        ):
            if wanted:
                own = _take_run(state, number)
                check_minimizers(point.problem, study.rows, own, word)
        if doubt.endless[number]:
            refuse_unbounded()
        if doubt.found[number]:
            own = _take_run(state, number)
            first, value = int(doubt.row[number]), float(doubt.value[number])
            _refuse(point.problem, study.rows, own, first, value)
    check_slopes(points[0].problem, study.rows, _take_run(state, 0))


def _take_run(states, number):
    """Returns the state of a run, by one program instead of one for every array."""
    return compiled(_index, small=True)(states, np.int32(number))


def _index(states, number):
    return jax.tree.map(lambda array: array[number], states)


def _refuse(problem, rows, state, first, value):
    """Raises for rows with a loss that is not finite; ``first`` is the first one."""
    every = np.arange(rows.size)
    if problem.loss.coupled:
        refuse_group("the data", rows, every, value, f"the group of row {first}")
    refuse_rows("the data", problem, rows, every >= first, state)


def _check_first(study, points, curves, shared, runs, made):
    """Raises if a run learned nothing in its first round because of its gradients."""
    num_folds = len(study.folds.train)
    moved = np.asarray(made.moved)[:, 0]
    for number in np.flatnonzero(~moved[: len(points) * num_folds]).tolist():
        index, fold = divmod(number, num_folds)
        point = points[index]
        if point.rates[0] == 0:
            continue
        run, own = jax.tree.map(lambda a: a[number], (runs, made.state))  # noqa: B023
        static, arrays = point.problem
        arrays = arrays._replace(data=data_of(shared, run))
        reason = describe_idleness(Problem(static, arrays), study.rows, own)
        if reason is not None:
            raise TrainingError(
                f"training learned nothing in round 0 of fold {fold}{point.name}: "
                f"{reason}",
                make_record(study, curves[index], fold),
                0,
            )


def _tell_limits(study, points, curves, shared, runs, state, split):
    """Records the first run without a split in its trees, and the reason."""
    index, fold = divmod(int(np.argmin(split)), len(study.folds.train))
    number = index * len(study.folds.train) + fold
    run, own = jax.tree.map(lambda a: a[number], (runs, state))
    static, arrays = points[index].problem
    problem = Problem(static, arrays._replace(data=data_of(shared, run)))
    reason = describe_limits(problem, study.rows, own, study.bins)
    if reason is not None:
        rounds = count_rounds(curves[index].num_rounds)
        curves[
            index
        ].idle = (
            f"no tree {rounds} has a split in fold {fold}{points[index].name}: {reason}"
        )


def _plan(points, curves, size, first, count):
    """Returns the learning rates and the number of the next rounds for each run."""
    num_folds = len(curves[0].init_score)
    rates = np.zeros((size, MOST_ROUNDS), np.float32)
    counts = np.zeros(size, np.int32)
    for index, (point, curve) in enumerate(zip(points, curves, strict=True)):
        runs = slice(index * num_folds, (index + 1) * num_folds)
        rates[runs, :count] = point.rates[first : first + count]
        counts[runs] = 0 if curve.over else count
    return rates, counts
