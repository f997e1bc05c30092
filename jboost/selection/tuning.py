# SPDX-License-Identifier: Apache-2.0
"""Searches good hyperparameters in a given time, and trains an ensemble of the best.

    plan      points of one program: from a space, then from a model of the good ones
    train     all folds of these points side by side; the weak ones end early
    choose    a weighted mean of the best points that predicts held-out rows best
    refit     each of them on all rows

The module :mod:`jboost.selection.planning` has the space, and chooses points. A point
goes on after 16, 48, 144, ... rounds if it is among the best third of those that
came as far (asynchronous successive halving; Li et al. 2020). Time is the sum of the
learning rates so far: a point that learns slowly is compared with the others as they
were then. The mean is chosen greedily, with replacement (Caruana et al. 2004).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Float, Shaped
from tqdm import tqdm

from jboost import losses
from jboost.boosting.reports import weigh_losses
from jboost.boosting.settings import (
    Settings,
    StudySettings,
    rate_by_rows,
    read_settings,
    takes_settings,
)
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.context import current_implementation
from jboost.entry.decorators import fetch, on_host
from jboost.entry.messages import MOST_LINES, cut, import_pandas, make_table
from jboost.entry.programs import LIGHT, compiled
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.model.predicting import predict
from jboost.selection.comparison import (
    SWEPT,
    Comparison,
    check_one_loss,
    fold_labels,
    open_study,
    show_value,
)
from jboost.selection.folds import make_folds
from jboost.selection.planning import (
    SLOWER,
    Planner,
    default_space,
    first_point,
    read_space,
)
from jboost.selection.study import (
    Curve,
    Point,
    Study,
    measure_rows,
    repeat_rows,
    run_points,
)
from jboost.training.chunks import MOST_ROUNDS, open_bar
from jboost.training.fitting import fit
from jboost.training.metrics import By, Criterion, Metrics
from jboost.training.record import average_models
from jboost.training.request import RawRows

_BATCH, _LARGE_BATCH = 8, 32  # points side by side: on a CPU, and elsewhere
_RUNGS = tuple(MOST_ROUNDS * 3**i for i in range(8))  # rounds after which points end
_EARLY = 2  # rungs that compare points of one program: large trees learn faster
_KEPT = 1 / 3  # the share of points that goes on
_FEWEST = 3  # points that must have come as far before one ends
_PATIENCE = 3.0  # time without improvement after which a point ends
_SEARCHED = 0.7  # the share of the seconds after which no more rounds are made
_STORED = 24  # points with held-out scores
_CANDIDATES = 12  # points that the ensemble is chosen from
_TURNS = 24  # the greatest sum of the counts that give weights
_ARGUMENTS = (*SWEPT, "num_rounds")  # other names are parameters of the loss


# ---- points -------------------------------------------------------------------------


@dataclass(eq=False)  # comparing arrays gives no single truth value
class _Tried:
    """A point that was tried.

    Attributes:
      place: its place on each axis.
      ranks: the criterion after each round, as ranks: less is better.
      scores: held-out scores of the rows, [K, N], near the best round; None: not kept.
      finished: whether it ended because it no longer improved.
    """

    values: dict[str, Any]
    place: Float[np.ndarray, " D"]
    rate: float
    program: tuple[Any, ...]
    point: Point
    ranks: Float[np.ndarray, " R"] = field(default_factory=lambda: np.zeros(0))
    scores: Float[np.ndarray, "K N"] | None = None
    finished: bool = False

    @property
    def best(self) -> float:
        """The least rank; inf before the first round."""
        return float(np.min(self.ranks, initial=np.inf))

    @property
    def rounds(self) -> int:
        """The number of rounds up to the best one."""
        return int(np.argmin(self.ranks)) + 1 if len(self.ranks) else 0

    def best_until(self, moment: float) -> float:
        """Returns the least rank until a time, the sum of the learning rates."""
        number = max(1, int(np.ceil(moment / self.rate)))
        return float(np.min(self.ranks[:number], initial=np.inf))


# ---- the search ---------------------------------------------------------------------


class _Tuner:
    """The points tried so far, and the clock."""

    def __init__(
        self, study: Study, settings: Settings, begun: float, effort: Any, bar: tqdm
    ):
        self.settings, self.begun, self.bar = settings, begun, bar
        self.most, seconds = effort.trials, effort.seconds
        # Points end here, by time; the study would stop them by rounds.
        self.study = study._replace(patience=None)
        given = settings.given["early_stopping_rounds"]
        self.patience = given if isinstance(given, int) else None
        self.deadline = begun + _SEARCHED * seconds if self.most is None else None
        self.trials: list[_Tried] = []
        self.batch: list[_Tried] = []

    def run(self, planner: Planner, make: Any, first: Any, by: Any) -> bool:
        """Tries points until the time is over; returns whether ctrl-C ended it."""
        interrupted = False
        try:
            while not (interrupted or (self.trials and self.is_over())):
                self._plan(planner, make, first, by)
                points = [trial.point for trial in self.batch]
                _, interrupted = run_points(
                    self.study, points, self.settings.num_rounds, False, self.judge
                )
                self.show()
        except KeyboardInterrupt:
            interrupted = True
        if not any(np.isfinite(trial.best) for trial in self.trials):
            if interrupted:
                raise KeyboardInterrupt
            raise RuntimeError(
                f"no round is the best: {self.study.by.name} is NaN or infinite in "
                "each round; pass another by"
            )
        return interrupted

    def is_over(self) -> bool:
        """Returns whether the time is over, or all points have been tried."""
        if self.deadline is not None:
            return time.perf_counter() > self.deadline
        return self.most is not None and len(self.trials) >= self.most

    def _plan(self, planner, make, first, by):
        """Adds the points of the next batch."""
        size = _BATCH if current_implementation() == "cpu" else _LARGE_BATCH
        if self.most is not None:
            size = min(size, self.most - len(self.trials))
        points = planner.plan(self.trials, size)
        if not self.trials:
            points[0] = first
        self.batch = []
        for values in points:
            number = len(self.trials) + len(self.batch)
            point = make(f" of setting {number}, {values}", values)
            rate = float(np.mean(point.rates[:100]))
            program = tuple(values[name] for name in planner.static)
            place = planner.locate(values)
            self.batch.append(_Tried(values, place, rate, program, point))
        self.trials += self.batch
        one = self.trials[0].point
        check_one_loss(self.study, [one, *(each.point for each in self.batch)], by)

    def conclude(self, slower: int, interrupted: bool) -> "Tuned":
        """Returns the result, without members."""
        sign = -1 if self.study.by.direction == "max" else 1
        return Tuned(
            points=tuple(trial.values for trial in self.trials),
            curves=tuple(sign * trial.ranks for trial in self.trials),
            finished=tuple(trial.finished for trial in self.trials),
            by=self.study.by,
            members=(),
            slower=slower,
            seconds=0.0,
            interrupted=interrupted,
        )

    def judge(self, indices: list[int], curves: list[Curve], state: Any) -> None:
        """Records the rounds of a batch, and ends weak points."""
        scores = None
        own = [self.batch[i] for i in indices]
        alive = [not curve.over for curve in curves]
        for place, (trial, curve) in enumerate(zip(own, curves, strict=True)):
            if curve.num_rounds == 0:
                continue  # its first round was not finite
            before, trial.ranks = trial.best, self.study.by.rank(curve.compared())
            if trial.best < before:
                scores = fetch(state.scores) if scores is None else scores
                self._keep_scores(trial, scores, place)
        for trial, curve, goes_on in zip(own, curves, alive, strict=True):
            if goes_on:
                trial.finished = self._is_finished(trial, curve.num_rounds)
                weak = self._is_weak(trial, curve.num_rounds)
                curve.over = trial.finished or weak
        late = self.deadline is not None and self.is_over()
        for curve in curves:
            curve.over |= late
        self.show()

    def _is_finished(self, trial, done):
        patience = self.patience or max(MOST_ROUNDS, _PATIENCE / trial.rate)
        return done - trial.rounds >= patience or done >= self.settings.num_rounds

    def _is_weak(self, trial, done):
        if done not in _RUNGS:
            return False
        moment, late = done * trial.rate, done >= _RUNGS[_EARLY]
        like = [t for t in self.trials if late or t.program == trial.program]
        reached = [t for t in like if len(t.ranks) * t.rate >= 0.95 * moment]
        others = np.array([each.best_until(moment) for each in reached])
        if len(others) < _FEWEST:
            return False
        return np.mean(others < trial.best_until(moment)) >= _KEPT

    def _keep_scores(self, trial, scores, place):
        """Keeps held-out scores; those of the worst trial make room."""
        held_out = self.study.folds.held_out > 0
        folds, rows = held_out.shape
        own = scores[place * folds : (place + 1) * folds, :, :rows]
        count = np.maximum(held_out.sum(axis=0), 1)
        trial.scores = np.einsum("fkn,fn->kn", own, held_out / count).astype(np.float32)
        stored = [each for each in self.trials if each.scores is not None]
        if len(stored) > _STORED:
            max(stored, key=lambda each: each.best).scores = None

    def show(self) -> None:
        """Moves the bar to the present second."""
        best = min((trial.best for trial in self.trials), default=np.inf)
        value = -best if self.study.by.direction == "max" else best
        self.bar.set_description(refresh=False)
        shown = {"settings": len(self.trials), f"best {self.study.by.name}": value}
        self.bar.set_postfix({k: f"{v:.6g}" for k, v in shown.items()}, refresh=False)
        if self.deadline is None:
            self.bar.update(len(self.trials) - self.bar.n)
        else:
            now = round(time.perf_counter() - self.begun, 1)
            self.bar.update(min(now, self.bar.total) - self.bar.n)


# ---- the ensemble -------------------------------------------------------------------


def _mean_losses(loss, constants, words, data, scores):
    """Returns the mean loss of the rows for each of several scores [C, K, N]."""

    def mean(one):
        values, weights = weigh_losses(loss, constants, (), data, one, words)
        counted = weights > 0
        total = jnp.sum(jnp.where(counted, values * weights, 0.0))
        return total / jnp.sum(jnp.where(counted, weights, 0.0))

    return jax.lax.map(mean, scores)


def _choose_members(study, trials, most):
    """Returns weights of trials: their mean score predicts held-out rows best.

    Beginning with the mean of the best ones that made all their rounds, the trial is
    added, again and again, that lowers the criterion of the mean most; at most ``most``
    different ones.
    """
    ranked = sorted((t for t in trials if t.scores is not None), key=lambda t: t.best)
    ranked = ranked[:_CANDIDATES]
    if most == 1:
        return {trials.index(ranked[0]): 1.0}
    stacked = np.stack([trial.scores for trial in ranked])
    covered = (study.folds.held_out > 0).any(axis=0)
    evaluate = _make_evaluation(study, ranked[0].point, covered)
    counts = np.zeros(len(ranked))
    finished = [i for i, trial in enumerate(ranked) if trial.finished][:most]
    counts[finished or 0] = 1  # a mean of several overfits the held-out rows less
    total = stacked[counts > 0].sum(axis=0)
    best, kept = evaluate(total[None] / np.float32(counts.sum()))[0], counts.copy()
    while counts.sum() < _TURNS:
        full = np.count_nonzero(counts) >= most
        allowed = np.flatnonzero(counts) if full else np.arange(len(ranked))
        ranks = evaluate((total + stacked[allowed]) / np.float32(counts.sum() + 1))
        pick = int(allowed[np.argmin(ranks)])
        total, counts[pick] = total + stacked[pick], counts[pick] + 1
        if ranks.min() < best:
            best, kept = ranks.min(), counts.copy()
    picks = np.flatnonzero(kept)
    return {trials.index(ranked[i]): float(kept[i] / kept.sum()) for i in picks}


def _make_evaluation(study, point, covered):
    """Returns a function that ranks held-out scores [C, K, N] by the criterion."""
    rows, by = study.rows, study.by
    short = len(rows.data.weights) - rows.size
    counts = np.pad(covered.astype(np.int32), (0, short))
    data = repeat_rows(rows.data._replace(codes=None), counts)

    def of_loss(scores):
        padded = np.pad(scores, ((0, 0), (0, 0), (0, short)))
        run = compiled(_mean_losses, point.problem.loss, effort=LIGHT)
        words = np.array([0, study.seed], np.uint32)
        return by.rank(run(point.problem.constants, words, data, padded))

    def of_metric(scores):
        every = np.flatnonzero(covered)
        found = [
            measure_rows(study, point.metrics, every, one[:, every]) for one in scores
        ]
        return by.rank([each[by.metric] for each in found])

    return of_loss if by.metric is None else of_metric


# ---- the result ---------------------------------------------------------------------


class TunedMember(NamedTuple):
    """A setting in the model of :func:`jboost.tune`.

    Attributes:
      setting: its index.
      weight: its weight in the mean score; all weights sum to 1.
      seed: the seed that it was trained with.
    """

    setting: int
    weight: float
    seed: int


@dataclass(frozen=True)
class Tuned:
    """The P settings that :func:`jboost.tune` has tried.

    Attributes:
      points: the values of each, arguments of ``fit`` and parameters of the loss.
      curves: the mean over the folds of the criterion after each round, [R] for each
        setting; R is less where it ended early.
      finished: whether each made all rounds, or enough to know the best number.
      by: the criterion; see :class:`jboost.CrossValidation`.
      members: the settings in the model, the heaviest first.
      slower: 3 if the default range of rates was searched, else 1: rates of members are
        divided by it, and their rounds multiplied.
      seconds: the time that the call took.
      outer: the criterion of tuned models on the rows of each outer fold, which no part
        of their search has seen; None without ``outer_folds``.
      interrupted: whether ctrl-C ended the search.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> _, tuned = jb.tune(x, y, trials=2, folds=2, ensemble=1, num_rounds=16)
      >>> len(tuned.points), len(tuned.curves), tuned.by.name
      (2, 2, 'loss')
    """

    points: tuple[dict[str, Any], ...]
    curves: tuple[Float[np.ndarray, " _"], ...]
    finished: tuple[bool, ...]
    by: Criterion
    members: tuple[TunedMember, ...]
    slower: int
    seconds: float
    interrupted: bool = False
    outer: Float[np.ndarray, " O"] | None = None

    @property
    def values(self) -> Float[np.ndarray, " P"]:
        """The criterion of each setting after its best round; NaN without a round."""
        each = [
            curve[self.by.find_best(curve)] if np.isfinite(curve).any() else np.nan
            for curve in self.curves
        ]
        return np.array(each, np.float64)

    @property
    def best(self) -> int:
        """The index of the best setting."""
        return self.by.find_best(self.values)

    @property
    def best_params(self) -> dict[str, Any]:
        """Arguments of ``fit``, and parameters of the loss, for the best setting."""
        return self.params(self.best)

    def params(self, index: int) -> dict[str, Any]:
        """Returns arguments of ``fit``, and parameters of the loss, for a setting.

        The number of rounds is "auto" if the setting ended before it was known.
        """
        found = dict(self.points[index])
        if self.slower != 1:
            found["learning_rate"] = found["learning_rate"] / self.slower
        rounds: Any = self.slower * (self.by.find_best(self.curves[index]) + 1)
        return {**found, "num_rounds": rounds if self.finished[index] else "auto"}

    @property
    def best_round(self) -> int:
        """The best round, from 0, of the best setting."""
        return self.by.find_best(self.curves[self.best])

    @property
    def best_value(self) -> float:
        """The criterion of the best setting: too good, because it was chosen by it."""
        return float(self.values[self.best])

    @property
    def importance(self) -> dict[str, float]:
        """How much each name matters: {name: a share from 0 to 1}.

        It is the share of the variance of the settings' ranks that lies between the
        quarters of a range, or between listed values, beyond chance (epsilon squared;
        Kelley 1935): 1 if the name alone decides.
        """
        order = np.argsort(self.by.rank(self.values), kind="stable")
        ranks = np.argsort(order) / max(1, len(order))
        return {name: self._explain(name, ranks) for name in self.points[0]}

    def _explain(self, name, ranks):
        column = [point[name] for point in self.points]
        if all(isinstance(each, int | float) for each in column):
            ends = np.quantile(column, [0.25, 0.5, 0.75])
            column = np.searchsorted(ends, column)
        keys = [*map(repr, column)]
        parts = [ranks[[k == key for k in keys]] for key in {*keys}]
        within = sum(np.sum((part - part.mean()) ** 2) for part in parts)
        total, spare = np.sum((ranks - ranks.mean()) ** 2), len(ranks) - len(parts)
        if total == 0 or spare < 1:
            return 0.0
        return float(max(0.0, 1 - within * (len(ranks) - 1) / (spare * total)))

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame``: a row for each setting, the best one first.

        Raises:
          ImportError: pandas is not installed.
        """
        pandas = import_pandas("to_frame")
        table = pandas.DataFrame(list(self.points))
        table[self.by.name] = self.values
        table["best_round"] = [self.by.find_best(curve) for curve in self.curves]
        table["rounds_made"] = [*map(len, self.curves)]
        weights = {member.setting: member.weight for member in self.members}
        table["weight"] = [weights.get(i, 0.0) for i in range(len(table))]
        order = np.argsort(self.by.rank(self.values), kind="stable")
        return table.iloc[order]

    def __repr__(self) -> str:
        """Shows the best setting and the members of the model."""
        lines = [self._title]
        for member in self.members:
            params = self.params(member.setting)
            shown = ", ".join(f"{name}={show_value(v)}" for name, v in params.items())
            lines.append(f"  {member.weight:.2f} of {shown}")
        return "\n".join(cut(lines, MOST_LINES, "members"))

    def _repr_html_(self) -> str:
        """Shows the members in a notebook."""
        params = [self.params(member.setting) for member in self.members]
        rows = [[show_value(value) for value in each.values()] for each in params]
        weights = [member.weight for member in self.members]
        return make_table(self._title, [[*params[0]], *rows], weights)

    @property
    def _title(self):
        return (
            f"Tuned: {len(self.points)} settings in {self.seconds:.3g} s, "
            f"best {self.by.name} {self.best_value:.5g}"
        )


class TunedModel(NamedTuple):
    """The result of ``tune``: ``model, tuned = jb.tune(x, y, loss)``.

    Attributes:
      model: the ensemble, ready to predict.
      tuned: the settings that were tried.
    """

    model: Ensemble
    tuned: Tuned


@explain_arguments
@on_host("call jb.boost there")
@takes_implementation
@takes_settings
def tune(
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    seconds: float = 60.0,
    trials: int | None = None,
    space: Mapping[str, Any] | None = None,
    ensemble: int = 5,
    outer_folds: Any = None,
    folds: Any = 5,
    stratify: Any = None,
    groups: Any = None,
    shuffle: bool = True,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    metrics: Metrics = None,
    by: By = None,
    progress: bool = False,
    feature_names: Sequence[str] | None = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
    **settings: Unpack[StudySettings],
) -> TunedModel:
    """Searches good settings for about ``seconds``, and trains the best ones.

    Settings are cross-validated side by side. All that differ only in numbers share a
    compiled program. The first one is that of the defaults; the next ones fill the
    space evenly, later ones come from where good ones are. Weak ones end after few
    rounds. The model is a weighted mean of up to ``ensemble`` settings, chosen by their
    held-out scores and trained on all rows, as one Ensemble.

    Args:
      x, y, loss: arguments of :func:`jboost.fit`; x is in memory, dense or sparse.
      seconds: the time that the call may take. The search ends after 0.7 of it, at the
        next 16 rounds; the rest is for the training of the best settings on all rows.
      trials: the number of settings to try, instead of ``seconds``: the same call then
        has the same result.
      space: {name: (low, high)}, a range, searched by ratio from a factor of 8 on, in
        whole numbers if both ends are integers; or {name: [values]}. Names are those of
        :func:`jboost.sweep`: settings, and keywords of the loss. They are added to the
        default space of learning_rate, l2, min_child_weight, subsample,
        colsample_bynode, rows_per_threshold, parent_rows, max_depth and linear_leaves,
        or replace its entries. Arguments that are given are not searched.
      ensemble: the most settings in the model; 1: the best one alone.
      outer_folds: folds of a nested cross-validation, as ``folds``: the search is
        repeated without the rows of each, which takes ``seconds`` each time, and
        ``tuned.outer`` has the criterion there. None: no such folds.
      folds, stratify, groups, shuffle, metrics, mesh: arguments of
        :func:`jboost.cross_validate`.
      by: the criterion, as for :func:`jboost.cross_validate`. It must name a metric if
        ``space`` has parameters of the loss.
      sample_weight, offset, progress, feature_names, implementation: arguments of
        :func:`jboost.fit`.
      {settings}

    The page "Tune in a minute" has examples. Ctrl-C ends the search, and the model is
    that of the best settings so far.

    Returns:
      A model and a Tuned: ``model, tuned = jb.tune(x, y, loss)``.

    Raises:
      TypeError, ValueError: for bad arguments, before training.
      TrainingError: no row of a fold has a gradient to learn from.
      RuntimeError: a metric failed, or ``by`` is NaN or infinite in each round.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> model, tuned = jb.tune(x, y, trials=2, folds=2, ensemble=1, num_rounds=16)
      >>> len(tuned.points), jb.predict(model, x).shape
      (2, (200,))
    """
    begun = time.perf_counter()
    seconds = checks.check_number("seconds", seconds, above=0.0)
    if trials is not None:
        trials = checks.check_integer("trials", trials, least=1)
    ensemble = checks.check_integer("ensemble", ensemble, least=1)
    rows = RawRows(x, y, sample_weight, offset, feature_names)
    request = Comparison(
        rows, folds, stratify, groups, shuffle, metrics, by, progress, mesh,
        keeps_models=False,
    )  # fmt: skip
    run = partial(
        _tune, loss=loss, given=settings, effort=_Effort(seconds, trials, ensemble),
        space=read_space(space, settings, loss),
    )  # fmt: skip
    model, tuned, search = run(request)
    if outer_folds is not None:
        outer = _try_outside(search, request._replace(folds=outer_folds), run, folds)
        tuned = replace(tuned, outer=outer)
    return TunedModel(model, replace(tuned, seconds=time.perf_counter() - begun))


class _Effort(NamedTuple):
    """How long to search, and for how many settings; see :func:`tune`."""

    seconds: float
    trials: int | None
    ensemble: int


def _tune(request, *, loss, given, effort, space):
    """Returns the model, the settings that were tried, and the search.

    Args:
      given: the settings that the call names; ``space``: the axes that it names.
    """
    begun = time.perf_counter()
    settings = read_settings(given, StudySettings).with_rounds(stops=True)
    study, make = open_study(request, loss, [{}], settings)
    usual, num_rows = make("", {}).problem, study.rows.size
    axes = default_space(settings, num_rows)
    axes = {name: axis for name, axis in axes.items() if name not in given} | space
    if not usual.method.num_terms and "linear_leaves" not in space:
        axes.pop("linear_leaves", None)  # leaves of this loss are constant
    chosen = {
        **settings.values,
        "learning_rate": SLOWER * rate_by_rows(num_rows),
        "l2": float(usual.arrays.numbers.limits.l2),
    }
    first, planner = first_point(axes, chosen), Planner(axes, settings.seed)
    by_time = effort.trials is None
    total, unit = (effort.seconds, "s") if by_time else (effort.trials, "setting")
    with open_bar(total, request.progress, unit) as bar:
        search = _Tuner(study, settings, begun, effort, bar)
        with resolve_implementation(study.rows.data.weights):
            stopped = search.run(planner, make, first, request.by)
            most = 1 if isinstance(loss, losses.Adaptive) else effort.ensemble
            weights = _choose_members(study, search.trials, most)
        own_rates = {"learning_rate", "num_rounds"} & {*given, *space}
        tuned = search.conclude(1 if own_rates else SLOWER, stopped)
        over = begun + effort.seconds if by_time else None
        call = request, loss, given, settings, study.rows.data.groups is not None
        model, tuned = _train_members(tuned, weights, call, over)
    return model, tuned, search


def _try_outside(search, request, run, folds):
    """Returns the criterion on held-out rows of models tuned without them, by fold.

    Ctrl-C ends it: the folds so far are returned. ``folds`` are those of each search.
    """
    study, rows, found = search.study, request.rows, []
    targets = jax.tree.leaves(study.rows.real[0])
    groups = request.groups
    if study.rows.data.groups is not None:
        groups = fold_labels(groups, request.folds)
    masks = make_folds(
        request.folds, study.rows.size, y=targets[0] if len(targets) == 1 else None,
        stratify=request.stratify, groups=groups,
        shuffle=request.shuffle, seed=study.seed,
    )  # fmt: skip
    for held_out in masks.held_out > 0:
        weights = np.where(held_out, 0, study.rows.real[1])
        inner = rows._replace(sample_weight=weights)
        try:
            model, tuned, _ = run(request._replace(rows=inner, folds=folds))
        except KeyboardInterrupt:
            break
        scores = np.asarray(predict(model, rows.x)).reshape(len(held_out), -1)
        if rows.offset is not None:
            scores = scores + np.asarray(rows.offset).reshape(scores.shape)
        evaluate = _make_evaluation(study, search.trials[0].point, held_out)
        found.append(evaluate(scores.T.astype(np.float32)[None])[0])
        if tuned.interrupted:
            break
    return np.array(found) * (-1 if study.by.direction == "max" else 1)


def _train_members(found, weights, call, over):
    """Trains settings on all rows; returns their mean, and the result with the members.

    Those that time does not suffice for are left out, except for the first one.
    """
    request, loss, fixed, settings, of_groups = call
    rows, models, members, longest = request.rows, [], [], 0.0
    for index, weight in sorted(weights.items(), key=lambda pair: -pair[1]):
        begun = time.perf_counter()
        if models and over is not None and begun + longest > over:
            break
        values, seed = found.params(index), (settings.seed + len(models)) % 2**32
        own = {name: values.pop(name) for name in values.keys() - {*_ARGUMENTS}}
        each: Any = values.pop("loss", loss)
        chosen = {**fixed, **values}
        chosen |= dict(num_scores=settings.num_scores, seed=seed)
        if chosen["num_rounds"] != "auto":
            chosen["early_stopping_rounds"] = None
        try:
            model, _ = fit(
                rows.x, rows.y, partial(each, **own) if own else each,
                sample_weight=rows.sample_weight, offset=rows.offset,
                groups=request.groups if of_groups else None,
                feature_names=rows.feature_names, mesh=request.mesh, **chosen,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not models:
                raise
            break
        models.append(model)
        members.append(TunedMember(index, weight, seed))
        longest = max(longest, time.perf_counter() - begun)
    shares = np.array([member.weight for member in members])
    shares = (shares / shares.sum()).tolist()
    model = models[0] if len(models) == 1 else average_models(models, np.array(shares))
    pairs = zip(members, shares, strict=True)
    members = tuple(member._replace(weight=share) for member, share in pairs)
    return model, replace(found, members=members)
