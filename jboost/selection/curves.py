# SPDX-License-Identifier: Apache-2.0
"""Cross-validated curves of one or several settings: the host's loop around ``runs``.

In: a table with its folds, and settings, checked. Out: a Curve for each: losses by
fold and round, the best round, held-out scores. Points of one program run side by
side; others, program after program.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from jboost.boosting.method import Method, Numbers
from jboost.codes.bins import Bins
from jboost.objective.tracing import TracedLoss
from jboost.selection.folds import Folds
from jboost.selection.runs import (
    Rounds,
    Run,
    data_of,
    pad_runs,
    run_rounds,
    share,
    start_runs,
)
from jboost.training.chunks import (
    MOST_ROUNDS,
    check_minimisers,
    describe_idleness,
    no_trees,
    refuse_endless,
    refuse_value,
)
from jboost.training.history import UNNAMED, Record, TrainingError, explain_divergence
from jboost.training.rows import Rows
from jboost.training.scoring import SIGNATURE, Criterion, evaluate_metric
from jboost.trees.initial import MedianStart
from jboost.trees.tree import Tree

_CHUNK_SECONDS = 0.5  # how long a call should take, so that progress moves
_MOST_BYTES = 2**30  # of the runs of one program, about


class Point(NamedTuple):
    """What one point trains with; messages call the point by its name."""

    name: str  # "" where there is but one
    loss: TracedLoss
    constants: tuple[Any, ...]
    method: Method
    numbers: Numbers
    begin: Any  # the initial score, or how to find it
    rates: Float[np.ndarray, " R"]
    metrics: dict[str, Callable[..., Any]]  # bound to the link of the loss


class Table(NamedTuple):
    """What all points share, and what is wanted of them.

    Attributes:
      metrics: their names.
      by: what rounds are compared by.
      patience: rounds without improvement after which a point stops; None: never.
      keeps_models: whether trees and scores of held-out rows are wanted.
    """

    bins: Bins
    rows: Rows
    folds: Folds
    names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    by: Criterion
    patience: int | None
    seed: int
    keeps_models: bool


@dataclass
class Curve:
    """The rounds of one point so far; one list entry per round.

    Attributes:
      method: what it trains with.
      functions: its metrics, by name.
      init_score: of each fold, [folds] or [folds, K].
      losses: of the rows learned from and of the held-out ones, each [folds, 2].
      metrics: {name: [folds]} of the held-out rows.
      values: what rounds are compared by: ranks of means over the folds, of which the
        least is best.
      trees: of each chunk of rounds, [folds, R, ...].
      best: the best round; -1 before there is one.
      scores: of the held-out rows after it, [folds, K, M].
      parameters: of an adaptive loss, else (): at the start and after each round.
      over: whether it has stopped.
    """

    method: Method
    functions: dict[str, Callable[..., Any]]
    init_score: np.ndarray
    losses: list[np.ndarray] = field(default_factory=list)
    metrics: list[dict[str, np.ndarray]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    best: int = -1
    scores: np.ndarray | None = None
    parameters: list[Any] = field(default_factory=list)
    over: bool = False

    @property
    def num_rounds(self) -> int:
        """How many rounds have been recorded."""
        return len(self.values)

    def table(self, name: str | None = None, column: int = 1) -> np.ndarray:
        """A loss (0: of the rows learned from, 1: of held-out ones) or a metric."""
        num_folds = len(self.init_score)
        rows = [losses[:, column] for losses in self.losses]
        if name is not None:
            rows = [values[name] for values in self.metrics]
        return np.array(rows, np.float64).reshape(len(rows), num_folds).T


def run_points(
    table: Table, settings: Sequence[Point], num_rounds: int, progress: bool
) -> list[Curve]:
    """Trains all folds of all points."""
    groups: dict[Any, list[int]] = {}
    for place, setting in enumerate(settings):
        groups.setdefault(_program_of(setting), []).append(place)
    blocks = [
        places[first : first + most]
        for places in groups.values()
        for most in (_points_at_once(table, settings[places[0]]),)
        for first in range(0, len(places), most)
    ]
    curves: dict[int, Curve] = {}
    total = num_rounds * len(blocks)
    with tqdm(total=total, disable=not progress, unit="round") as bar:
        for places in blocks:
            found = _run_block(table, [settings[p] for p in places], num_rounds, bar)
            curves |= zip(places, found, strict=True)
    return [curves[place] for place in range(len(settings))]


def same_loss(one: Point, other: Point) -> bool:
    """Whether two points have the same loss, its numbers included."""
    pairs = zip(one.constants, other.constants, strict=True)
    return one.loss == other.loss and all(_same(*pair) for pair in pairs)


def _same(one, other):
    """Whether two arrays have the same bits."""
    if one is other:
        return True
    one, other = np.asarray(one), np.asarray(other)
    like = (one.shape, one.dtype) == (other.shape, other.dtype)
    return like and one.tobytes() == other.tobytes()


def _program_of(setting):
    """Equal for settings that a program can run side by side."""
    traced = (setting.constants, setting.numbers, setting.begin)
    leaves, structure = jax.tree.flatten(traced)
    shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    # How many nodes a level may have is a bound: the largest will do for all.
    method = replace(setting.method, max_nodes=0)
    return setting.loss, method, structure, shapes


def _points_at_once(table, setting):
    """As many as memory should hold: of each run its state, before and after."""
    num_scores, num_rows = table.rows.scores.shape
    each = 16 * num_scores * num_rows * len(table.folds.train)
    return max(1, _MOST_BYTES // each)


def _run_block(
    table: Table, settings: list[Point], num_rounds: int, bar: tqdm
) -> list[Curve]:
    """Trains points side by side, until all are over."""
    loss = settings[0].loss
    most = max(setting.method.max_nodes for setting in settings)
    method = replace(settings[0].method, max_nodes=most)
    watches = table.keeps_models or bool(table.metrics)
    constants, own = _split_constants([setting.constants for setting in settings])
    shared = share(table.rows, table.folds, constants, seed=table.seed, watches=watches)
    num_folds = len(table.folds.train)
    runs = _stack_runs(settings, own, num_folds)
    state, doubt = start_runs(loss, method, shared, runs)
    begun = _by_point(state.init_score, len(settings), num_folds)
    first_parameters = jax.tree.map(
        lambda a: _by_point(a, len(settings), num_folds), state.parameters
    )
    curves = [
        Curve(
            setting.method,
            setting.metrics,
            begun[point],
            parameters=[jax.tree.map(lambda a: a[point], first_parameters)],  # noqa: B023
        )
        for point, setting in enumerate(settings)
    ]
    _check_start(table, settings, curves, state, jax.device_get(doubt))
    first, count = 0, 1
    while first < num_rounds and not all(curve.over for curve in curves):
        count, clock = min(count, num_rounds - first), time.perf_counter()
        rates, counts = _plan(settings, curves, num_folds, first, count)
        made = run_rounds(
            loss, method, table.keeps_models, shared, runs, rates, counts, state
        )
        if first == 0:
            _check_first(table, settings, curves, shared, runs, made)
        state = made.state
        _look(table, curves, made, count, bar)
        first, seconds = first + count, time.perf_counter() - clock
        if seconds < _CHUNK_SECONDS / 2:
            count = min(MOST_ROUNDS, 2 * count)
        elif seconds > 2 * _CHUNK_SECONDS:
            count = max(1, count // 2)
    bar.update(num_rounds - first)
    return curves


def _split_constants(points):
    """The constants that all points share, and each point's others; None elsewhere."""
    first, *others = points
    common = tuple(
        value if all(_same(other[place], value) for other in others) else None
        for place, value in enumerate(first)
    )
    own = [
        tuple(
            value if shared is None else None
            for shared, value in zip(common, point, strict=True)
        )
        for point in points
    ]
    return common, own


def _stack_runs(settings: list[Point], constants: list, num_folds: int) -> Run:
    """All folds of the first point, then of the next; then padding, the first again."""
    runs = [
        Run(np.array(fold, np.int32), setting.numbers, own, setting.begin)
        for setting, own in zip(settings, constants, strict=True)
        for fold in range(num_folds)
    ]
    runs += runs[:1] * (pad_runs(len(runs)) - len(runs))
    return jax.tree.map(lambda *leaves: np.stack([*map(np.asarray, leaves)]), *runs)


def _by_point(array, num_points, num_folds):
    """[runs, ...] as [points, folds, ...], on the host."""
    array = np.asarray(array)[: num_points * num_folds]
    return array.reshape(num_points, num_folds, *array.shape[1:])


def _check_start(table, settings, curves, state, doubt):
    """The loss must be finite at the start, and have minima where they are needed."""
    data, offset = table.rows.data, table.rows.scores
    num_folds = len(table.folds.train)
    for number in range(len(settings) * num_folds):
        setting, curve = settings[number // num_folds], curves[number // num_folds]
        for word, wanted in (
            ("init_score='median'", isinstance(setting.begin, MedianStart)),
            ("leaf_solver='median_step'", curve.method.leaf_solver == "median_step"),
        ):
            if wanted:
                own = jax.tree.map(lambda a: a[number], state)  # noqa: B023
                check_minimisers(setting.loss, setting.constants, data, own, word)
        if doubt.endless[number]:
            refuse_endless()
        if doubt.found[number]:
            row, value = int(doubt.row[number]), float(doubt.value[number])
            start = curve.init_score[number % num_folds]
            refuse_value("the data", data, row, value, offset, start)


def _check_first(table, settings, curves, shared, runs, made):
    """Raises if the first round of a run added nothing because of the gradients."""
    num_folds = len(table.folds.train)
    moved = np.asarray(made.moved)[:, 0]
    for number in np.flatnonzero(~moved[: len(settings) * num_folds]).tolist():
        point, fold = divmod(number, num_folds)
        setting = settings[point]
        if setting.rates[0] == 0:
            continue
        run, own = jax.tree.map(lambda a: a[number], (runs, made.state))  # noqa: B023
        reason = describe_idleness(
            setting.loss, setting.constants, setting.method, data_of(shared, run), own
        )
        if reason is not None:
            raise TrainingError(
                f"training learned nothing in round 0 of fold {fold}{setting.name}: "
                f"{reason}",
                make_record(table, curves[point], fold),
                0,
            )


def _plan(settings, curves, num_folds, first, count):
    """Learning rates and numbers of the next rounds, run by run."""
    size = pad_runs(len(settings) * num_folds)
    rates = np.zeros((size, MOST_ROUNDS), np.float32)
    counts = np.zeros(size, np.int32)
    for point, (setting, curve) in enumerate(zip(settings, curves, strict=True)):
        runs = slice(point * num_folds, (point + 1) * num_folds)
        rates[runs, :count] = setting.rates[first : first + count]
        counts[runs] = 0 if curve.over else count
    return rates, counts


def _look(table: Table, curves: list[Curve], made: Rounds, count: int, bar: tqdm):
    """Takes rounds into the curves, until each is over."""
    num_folds = len(table.folds.train)
    watches = made.scores.shape[-1] > 0
    seen = made.scores if watches else None
    fields = (made.losses, made.trees, seen, made.parameters)
    losses, trees, scores, parameters = jax.tree.map(
        lambda a: _by_point(a, len(curves), num_folds), jax.device_get(fields)
    )
    for point, curve in enumerate(curves):
        if curve.over:
            continue
        for entry in range(count):
            seen = None if scores is None else scores[point, :, entry]
            current = jax.tree.map(lambda a: a[point, :, entry], parameters)  # noqa: B023
            _record(table, curve, losses[point, :, entry], seen, current)
            if curve.over:
                break
        if trees is not None:
            own = jax.tree.map(lambda a: a[point, :, :count], trees)  # noqa: B023
            curve.trees.append(own)
    least = min(curve.values[curve.best] for curve in curves if curve.values)
    shown = -least if table.by.direction == "max" else least
    bar.set_postfix({"best": f"{shown:.5g}"}, refresh=False)
    bar.update(count)


def _record(table, curve, losses, scores, parameters):
    """Takes in one round; says whether the point is over."""
    number = curve.num_rounds
    if not np.isfinite(losses[:, 0]).all():
        if table.keeps_models:
            _raise_at(table, curve, losses[:, 0])
        curve.over = True  # in a sweep a point may diverge
        return
    measured = _measure(table, curve, scores)
    value = losses[:, 1] if table.by.name == "loss" else measured[table.by.name]
    value = float(table.by.rank(np.mean(value, dtype=np.float64)))
    curve.losses.append(losses)
    curve.metrics.append(measured)
    curve.parameters.append(parameters)
    curve.values.append(value)
    if curve.best < 0 or value < curve.values[curve.best]:
        curve.best = number
        curve.scores = scores if table.keeps_models else None
    if table.patience is not None and number - curve.best >= table.patience:
        curve.over = True


def _measure(table, curve, scores):
    """{metric: [folds]} on the held-out rows."""
    number = curve.num_rounds
    values: dict[str, list[float]] = {name: [] for name in table.metrics}
    for fold, held_out in enumerate(table.folds.held_out if values else ()):
        rows = np.flatnonzero(held_out)
        score = scores[fold, :, : len(rows)]
        score = score[0] if score.shape[0] == 1 else score.T
        data = (table.rows.data.targets, table.rows.data.weights)
        targets, weights = jax.tree.map(lambda a: np.asarray(a)[rows], data)  # noqa: B023
        arguments = (score, targets, weights * held_out[rows].astype(weights.dtype))
        for name, function in curve.functions.items():
            try:
                values[name].append(evaluate_metric(function, arguments))
            except Exception as error:
                raise RuntimeError(
                    f"metrics[{name!r}] failed in round {number} on the held-out rows "
                    f"of fold {fold}: {error!r}; it is called as {SIGNATURE}"
                ) from error
    return {name: np.array(column) for name, column in values.items()}


def _raise_at(table, curve, losses):
    """A fold broke off; the error holds its model until then."""
    fold, number = int(np.argmax(~np.isfinite(losses))), curve.num_rounds
    before = curve.table(column=0)[fold]
    raise TrainingError(
        f"the loss of the training rows of fold {fold} became {losses[fold]} in round "
        f"{number}; {explain_divergence(before, losses[fold])}; the error's .model "
        "and .history hold that fold's rounds before",
        make_record(table, curve, fold),
        number,
    )


def make_record(table: Table, curve: Curve, fold: int) -> Record:
    """The rounds of one fold, as ``fit`` would have recorded them."""
    held_out = curve.table()[fold]
    return Record(
        bins=table.bins,
        init_score=curve.init_score[fold],
        set_names=(UNNAMED,),
        named=False,
        no_trees=no_trees(curve.method, table.rows.scores.shape[0]),
        choices={},
        bagged=False,
        feature_names=table.names,
        metric_names=table.metrics,
        by=table.by,
        trees=[
            jax.tree.map(lambda a: a[fold, entry], trees)  # noqa: B023
            for trees in curve.trees
            for entry in range(trees.feature.shape[1])
        ],
        train_loss=curve.table(column=0)[fold].tolist(),
        set_losses=[np.array([loss]) for loss in held_out],
        metrics=[
            {UNNAMED: {name: float(column[fold]) for name, column in values.items()}}
            for values in curve.metrics
        ],
        parameters=[jax.tree.map(lambda a: a[fold], each) for each in curve.parameters],
    )
