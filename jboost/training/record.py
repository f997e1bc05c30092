# SPDX-License-Identifier: Apache-2.0
"""The record of training: curves by round, the models, and errors that carry them.

In: trees, losses and metrics, round by round. Out: a History, and the model after any
round. Arrays grow in place, and a model is a view of their first rounds, so that the
total time grows with the number of rounds. No prediction changes where models are
joined.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jboost.codes.bins import Bins
from jboost.entry.importing import make_attribute_error
from jboost.entry.messages import (
    MOST_LINES,
    cut,
    import_pandas,
    make_table,
    warn_user,
)
from jboost.kernels.calls import make_aligned
from jboost.model.ensemble import Ensemble, Links, rounds_of, to_ensemble, truncate
from jboost.training.metrics import BY_LOSS, Criterion
from jboost.trees.tree import NO_TERM, BoostedTrees, Slopes, Tree

UNNAMED = "validation"  # the name of a set that was given without one


@dataclass(frozen=True)
class History:
    """The curves of training, one entry per round of this call of ``fit``.

    Attributes:
      train_loss: weighted mean loss of the training rows after each round, [R].
      validation_loss: weighted mean loss of the validation set after each round, [R]; a
        dict by name for named sets; None without a set.
      metrics: {set: {metric: [R]}}; the training rows are the set "train".
      best_round: the best round (from 0) on the first validation set, by ``by``; the
        last one without a validation set; -1 if there was no round, or if ``by`` is NaN
        or infinite in all of them.
      choices: the values chosen for "auto", the initial score, and the rule that gave
        it, ``"init_score_rule"``: "argmin", "median", "given", "fallback" if no row
        had a gradient at the argmin, so that training starts elsewhere, or "half
        event" if the argmin is at infinity (no event in the rows of a logistic or
        Poisson loss, say) and training starts where half an event would keep it.
      oob_improvement: the decrease of the weighted mean loss of the rows out of the
        bag in each round, [R], with ``subsample`` < 1 and ``leaf_rows="sample"``
        (Friedman 2002; as in scikit-learn); else None. The number of rounds that it
        suggests, ``np.nancumsum(history.oob_improvement).argmax() + 1``, is usually
        too small. NaN if there are so few rows that a bag holds them all.
      parameters: the parameters of an adaptive loss, as estimated after the last round
        that the model holds (with early stopping the best one); () for other losses.
        See :func:`jboost.losses.adaptive`.
      by: the criterion that rounds are compared by: ("loss", "min"), or a metric's name
        and "min" or "max".

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> _, history = jb.fit(x, x[:, 0], num_rounds=5)
      >>> history.train_loss.shape, history.best_round, history.choices["subsample"]
      ((5,), 4, 0.7)
    """

    train_loss: np.ndarray
    validation_loss: Any  # a union would make its users tell the cases apart
    metrics: dict[str, dict[str, np.ndarray]]
    best_round: int
    choices: dict[str, Any]
    oob_improvement: np.ndarray | None = None
    parameters: Any = ()
    by: Criterion = BY_LOSS

    @property
    def best_loss(self) -> float:
        """The value of ``by``, a loss or a metric, after the best round.

        It is that of the first validation set, or without one the loss of the training
        rows; NaN if there is no best round.
        """
        if self.best_round < 0:
            return float("nan")
        values = self.train_loss
        if self.validation_loss is not None:
            by_name = self.validation_loss
            by_name = by_name if isinstance(by_name, dict) else {UNNAMED: by_name}
            name, values = next(iter(by_name.items()))
            if self.by.metric is not None:
                values = self.metrics[name][self.by.metric]
        return float(values[self.best_round])

    def __repr__(self) -> str:
        """Shows the first, the best and the last value of each curve."""
        title, rows = self._summarize()
        return "\n".join([title, *cut(_align(rows), MOST_LINES - 1, "curves")])

    def _repr_html_(self) -> str:
        """Shows the same in a notebook."""
        title, rows = self._summarize()
        return make_table(title, rows[:MOST_LINES])

    def _summarize(self):
        """Returns a title, and a row for each curve after the headings."""
        rounds, best = len(self.train_loss), self.best_round
        title = f"History of {rounds} rounds"
        if rounds == 0:
            return title, []
        found = f"best round {best}" if best >= 0 else "no best round"
        title += f", {found} by {self.by.name} ({self.by.direction})"
        rows = [["", "first", "best", "last"]]
        for name, values in self._curves().items():
            middle = values[best] if best >= 0 else np.nan
            chosen = (values[0], middle, values[-1])
            rows.append([name, *(f"{value:.5g}" for value in chosen)])
        return title, rows

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame``: a row for each round, a column for each curve.

        Columns are named "train_loss", "validation_loss", "validation_auc", ...: the
        set (by its name, where sets have names), then the loss or the metric.

        Raises:
          ImportError: pandas is not installed.
        """
        pandas = import_pandas("to_frame")
        curves = self._curves()
        rounds = pandas.RangeIndex(len(self.train_loss), name="round")
        return pandas.DataFrame(curves, index=rounds)

    def _curves(self) -> dict[str, np.ndarray]:
        """Returns every curve by name, set by set."""
        losses = {"train": self.train_loss}
        found = self.validation_loss
        if found is not None:
            losses |= found if isinstance(found, dict) else {UNNAMED: found}
        curves = {}
        for name, values in losses.items():
            curves[f"{name}_loss"] = values
            for metric, measured in self.metrics.get(name, {}).items():
                curves[f"{name}_{metric}"] = measured
        if self.oob_improvement is not None:
            curves["oob_improvement"] = self.oob_improvement
        return curves


class Trained(NamedTuple):
    """The result of ``fit``: ``model, history = jb.fit(x, y)``.

    Attributes:
      model: the trees.
      history: the curves of training.
    """

    model: Ensemble
    history: History

    def __getattr__(self, name: str) -> Any:
        """Raises an error that names the two fields."""
        raise make_attribute_error(
            "what jb.fit returns, (model, history),", name, "; use one of these two"
        )


class TrainingError(RuntimeError):
    """Training failed; the rounds finished before are kept.

    Attributes:
      round: the round at the time of the error, from 0.
      model: the ensemble of the rounds that were finished.
      history: the history of those rounds.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> def stop(number, history, model):
      ...     if number == 2:
      ...         raise RuntimeError("disk full")
      >>> try:
      ...     jb.fit(x, x[:, 0], num_rounds=5, callbacks=stop)
      ... except jb.TrainingError as error:
      ...     print(error.round, error.model.num_rounds)
      2 3
    """

    round: int
    model: Ensemble
    history: History

    def __init__(
        self, message: str, record: "Record", round: int, fold: tuple[int, ...] = ()
    ):
        super().__init__(message)
        self.round, self.history = round, record.history(fold=fold)
        self.model = record.model(record.num_rounds, *fold)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the attributes, too, for processes that send errors to others."""
        return _restore, (type(self), self.args, vars(self))


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended training; the rounds finished before are kept.

    With early stopping, too, the model holds all of them;
    ``jb.truncate(error.model, error.history.best_round + 1)`` is the best one.

    Attributes:
      round: the round at the time of the interrupt, from 0.
      model: the ensemble of the rounds that were finished; None except from ``fit``.
      history: the history of those rounds; None except from ``fit``.
      result: the result of :func:`cross_validate` or :func:`sweep` for the rounds that
        were finished; None from ``fit``.

    Example:
      >>> import numpy as np, jboost as jb
      >>> def press(number, history, model):
      ...     if number == 3:
      ...         raise KeyboardInterrupt
      >>> x = np.arange(40.0)[:, None]
      >>> try:
      ...     model, history = jb.fit(x, x[:, 0], callbacks=press)
      ... except jb.TrainingInterrupted as error:
      ...     model, history = error.model, error.history
      >>> model.num_rounds
      4
    """

    model: Any  # a union would make the users of fit tell the cases apart
    history: Any
    result: Any

    def __init__(
        self,
        message: str = "",
        round: int = 0,
        *,
        model: Ensemble | None = None,
        history: History | None = None,
        result: Any = None,
    ):
        super().__init__(message)
        self.round, self.result = round, result
        self.model, self.history = model, history


def _restore(kind, args, attributes):
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def explain_divergence(losses: Sequence[float] | np.ndarray, value: float) -> str:
    """Suggests remedies if the training loss is no longer finite.

    Args:
      losses: the losses of the rounds before.
      value: the loss now.
    """
    advice = "a smaller learning_rate or a larger l2 may help"
    fell = len(losses) > 0 and losses[-1] < min(losses[0], 0.0)
    if value == -np.inf or fell:
        advice += (
            ", but the loss fell before, and may be unbounded below; arguments may be "
            "swapped (the call is loss(score, target)), its sign be wrong, or float32 "
            "have lost its digits (a logarithm of 1 - p, which rounds to 0)"
        )
    elif np.isnan(value) and len(losses) == 0:
        advice += (
            ", or the gradient is NaN where the loss is finite: a branch of jnp.where "
            "that is not taken must be finite, too"
        )
    return advice


def _align(rows: list[list[str]]) -> list[str]:
    """Formats a table, with the first column aligned left and the others right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class GrowingArray:
    """An array that grows along axis 0; views of its first rows stay unchanged."""

    def __init__(self, rows: np.ndarray):
        self._memory = rows

    def write(self, first: int, rows: Any) -> None:
        """Writes rows from index ``first`` on; those before it must be written."""
        rows, old = np.asarray(rows), self._memory
        end = first + len(rows)
        if end > len(old):
            # Aligned, so that JAX shares the memory instead of copying it.
            shape = (max(end, 2 * len(old)), *old.shape[1:])
            self._memory = make_aligned(shape, old.dtype)
            self._memory[:first] = old[:first]
        self._memory[first:end] = rows

    def first(self, count: int) -> np.ndarray:
        """Returns a view of the first rows."""
        return self._memory[:count]


class GrowingModel:
    """A model that grows by rounds.

    Attributes:
      num_rounds: the number of its rounds.
    """

    def __init__(self, model: Ensemble):
        self._model, self.num_rounds = model, model.num_rounds
        leaves, self._structure = jax.tree.flatten(rounds_of(model))
        self._arrays = [GrowingArray(np.asarray(leaf)) for leaf in leaves]

    def add(self, model: Ensemble) -> None:
        """Appends the rounds of a model of the same layout."""
        leaves = jax.tree.leaves(rounds_of(model))
        for array, rows in zip(self._arrays, leaves, strict=True):
            array.write(self.num_rounds, rows)
        # Last: an interrupt before it leaves the rounds out.
        self.num_rounds += model.num_rounds

    def first(self, num_rounds: int) -> Ensemble:
        """Returns the model of the first rounds."""
        leaves = [array.first(num_rounds) for array in self._arrays]
        parts = jax.tree.unflatten(self._structure, jax.device_put(leaves))
        return replace(self._model, **parts)


@dataclass
class Record:
    """The rounds so far on the host, of one run or of the folds of cross-validation.

    The trees of ``before`` come first: those of a model that training continues from,
    and the first ``restored`` rounds of this run if it continues from a checkpoint. The
    file now holds ``kept`` rounds of it. Metrics are those of the sets ``measured``.
    """

    bins: Bins
    init_score: Any  # [*folds] or [*folds, K], NumPy, as the trees
    set_names: tuple[str, ...]
    named: bool  # whether the sets were given by name
    no_trees: Tree  # arrays of zero rounds
    choices: dict[str, Any]
    bagged: bool  # whether rounds leave rows out
    feature_names: tuple[str, ...] | None = None
    metric_names: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    before: Ensemble | None = None
    restored: int = 0
    kept: int = 0
    by: Criterion = BY_LOSS
    # Parameters of an adaptive loss, at the start and after each round; else ().
    parameters: list[Any] = field(default_factory=list)
    folds: tuple[int, ...] = ()  # the axis of runs: () for one run, (folds,) for more
    num_rounds: int = 0

    def __post_init__(self):
        def rows(*shape):
            return GrowingArray(np.zeros((0, *self.folds, *shape)))

        self._losses = rows(1 + len(self.set_names))
        self._metrics = rows(len(self.measured), len(self.metric_names))
        self._improvement = rows()
        # One entry a round; None for those that the model has.
        self._trees: list[Tree | None] = []
        self._model: GrowingModel | None = None

    def add(
        self, trees: Any, losses: Any, metrics: Any, improvement: Any, parameters: Any
    ) -> None:
        """Appends a round.

        Args:
          trees: the trees, [*folds, ...]; None: they are not needed.
          losses: the losses of the training rows, then of each validation set,
            [*folds, 1 + sets].
          metrics: the metrics in the order [*folds, measured sets, metrics].
          improvement: the improvement out of the bag, [*folds]; unused unless rounds
            leave rows out.
          parameters: the parameters of an adaptive loss, [*folds, ...].
        """
        number = self.num_rounds
        self._trees.append(trees)
        self.parameters.append(parameters)
        self._losses.write(number, [losses])
        shape = 1, *self.folds, len(self.measured), len(self.metric_names)
        self._metrics.write(number, np.reshape(metrics, shape))
        if self.bagged:
            self._improvement.write(number, [improvement])
        # Last: a round counts from here on, wherever an interrupt strikes.
        self.num_rounds += 1

    def series(self, metric: str | None = None, name: str = "train") -> np.ndarray:
        """Returns a metric, or the loss, of a set after each round, [R, *folds]."""
        if metric is None:
            column = ("train", *self.set_names).index(name)
            return self._losses.first(self.num_rounds)[..., column]
        place = self.measured.index(name), self.metric_names.index(metric)
        return self._metrics.first(self.num_rounds)[..., *place]

    def compared(self, *fold: int) -> np.ndarray:
        """Returns the criterion after each round on the first set, [R].

        It is that of one fold or, without ``fold``, the mean over the folds.
        """
        values = self.series(self.by.metric, self.set_names[0])[:, *fold]
        return values.reshape(len(values), -1).mean(axis=1)

    def best_round(self, *fold: int) -> int:
        """Returns the best round of a fold, or of their mean; -1 if none is finite."""
        if not self.set_names or self.num_rounds == 0:
            return self.num_rounds - 1
        return self.by.find_best(self.compared(*fold))

    def is_over(self, patience: int | None, best: int | None = None) -> bool:
        """Returns whether at least ``patience`` rounds followed the best.

        ``best``: the index of the best round; None: it is computed.
        """
        last = self.num_rounds - 1
        if not patience or last < 0:
            return False
        return last - (self.best_round() if best is None else best) >= patience

    def ends_at(
        self, losses: Float[np.ndarray, "*folds S"], patience: int | None
    ) -> bool:
        """Returns whether the next round diverges, so that the best one ends the run.

        Args:
          losses: the losses of the next round, before they are added.
          patience: rounds without improvement after which the run stops; None: never.

        Raises:
          TrainingError: a loss of the training rows is not finite, and no round is the
            best by early stopping.
        """
        bad = ~np.isfinite(losses[..., 0])
        if not bad.any():
            return False
        fold = tuple(map(int, np.unravel_index(np.argmax(bad), bad.shape)))
        value, number = losses[..., 0][fold], self.num_rounds
        of, kept = "", "the rounds before"
        if fold:
            of, kept = f" of fold {fold[0]}", "the earlier rounds of that fold"
        became = (
            f"the loss of the training rows{of} became {value} in round {number}; "
            f"{explain_divergence(self.series()[:, *fold], value)}"
        )
        if patience and number and self.best_round() >= 0:
            warn_user(f"{became}; training ends at round {self.best_round()}, the best")
            return True
        message = f"{became}; the error's .model and .history hold {kept}"
        raise TrainingError(message, self, number, fold)

    def model(self, num_rounds: int, *fold: int) -> Ensemble:
        """Returns the ensemble after the first ``num_rounds`` rounds."""
        if fold:  # made once, after training
            return self._convert(self._trees[:num_rounds], *fold)
        before, count = self.before, num_rounds - self.restored
        if before is not None and count <= 0:
            return truncate(before, before.num_rounds + count)
        earlier = 0 if before is None else before.num_rounds
        made = self._model
        done = 0 if made is None else made.num_rounds - earlier
        if made is None or done < count:
            new = self._convert(self._trees[done:count])
            if made is None:
                self._model = made = GrowingModel(
                    new if before is None else append_rounds(before, new)
                )
            elif before is None:
                made.add(new)
            else:  # in the layout of both
                made.add(append_rounds(made.first(0), new))
            self._trees[done:count] = [None] * (count - done)
        return made.first(earlier + count)

    def _convert(self, trees, *fold):
        """Returns a model of these rounds alone."""
        joined = self.no_trees
        if trees:
            join = lambda *rounds: np.stack([a[fold] for a in rounds])  # noqa: E731
            joined = jax.tree.map(join, *trees)
        init_score = self.init_score[fold] if fold else self.init_score
        model = to_ensemble(BoostedTrees(joined, init_score), self.bins)
        if model.ranges is not None and self.before is not None:
            known = self.before.ranges  # those that these rounds were trained with
            model = replace(model, ranges=model.ranges if known is None else known)
        return replace(model, feature_names=self.feature_names)

    def history(self, kept: int | None = None, fold: tuple[int, ...] = ()) -> History:
        """Returns the history of one run.

        Args:
          kept: the number of rounds that the model holds; None: all of them.
          fold: the fold of the run in cross-validation.
        """

        def take(*place):
            return self.series(*place)[:, *fold].copy()  # the user's own

        number = self.num_rounds
        by_name = {name: take(None, name) for name in self.set_names}
        measured = self.measured if self.metric_names and number else ()
        parameters = self.parameters[number if kept is None else kept]
        improvement = self._improvement.first(number)
        return History(
            train_loss=take(),
            validation_loss=by_name if self.named else by_name.get(UNNAMED),
            metrics={
                name: {metric: take(metric, name) for metric in self.metric_names}
                for name in measured
            },
            best_round=self.best_round(*fold),
            choices=self.choices,
            oob_improvement=improvement.copy() if self.bagged else None,
            parameters=jax.tree.map(lambda a: a[fold] if fold else a, parameters),
            by=self.by,
        )

    def table(self) -> dict[str, np.ndarray]:
        """Returns the history of one run as arrays, with an entry per round."""
        number = self.num_rounds
        losses, metrics = self._losses.first(number), self._metrics.first(number)
        return {
            "train_loss": losses[:, 0],
            "set_losses": losses[:, 1:],
            "metrics": metrics if number and self.metric_names else np.zeros(0),
            "improvement": self._improvement.first(number),
            **self._stack_parameters(),
        }

    def _stack_parameters(self) -> dict[str, np.ndarray]:
        leaves = [jax.tree.leaves(each) for each in self.parameters]
        columns = enumerate(zip(*leaves, strict=True))
        return {f"parameters.{number}": np.stack(column) for number, column in columns}

    def restore(self, model: Ensemble, table: dict[str, np.ndarray]) -> None:
        """Takes the rounds of an interrupted run of the same call as its own.

        Raises:
          ValueError: an array has another shape than :meth:`table` gives it.
        """
        number, own = len(table["train_loss"]), self.table()
        shapes = {name: (number + len(a), *a.shape[1:]) for name, a in own.items()}
        shapes["improvement"] = (number,) if self.bagged else (0,)
        metrics = (number, len(self.measured), len(self.metric_names))
        shapes["metrics"] = metrics if number and self.metric_names else (0,)
        for name, array in table.items():
            found = array.dtype, array.shape
            if found != (expected := (own[name].dtype, shapes[name])):
                raise ValueError(f"history.{name} must be {expected}, got {found}")
        self.before, self.restored, self.kept = model, number, number
        losses = np.column_stack([table["train_loss"], table["set_losses"]])
        self._losses.write(0, losses)
        self._improvement.write(0, table["improvement"])
        self._metrics.write(0, table["metrics"].reshape(metrics))
        structure = jax.tree.structure(self.parameters[0])
        columns = [table[name] for name in self._stack_parameters()]
        self.parameters = [
            jax.tree.unflatten(structure, [column[i] for column in columns])
            for i in range(number + 1)
        ]
        self.num_rounds = number


def append_rounds(before: Ensemble, after: Ensemble) -> Ensemble:
    """Joins the rounds of ``before`` and ``after``, from the score of ``before``.

    Heaps become as deep as the deeper ones; beside linked trees they are linked, too.
    Scores that share trees in one model only have trees of their own in the result.
    The sums that leaves were fitted to are kept if both models have them.
    """
    if before.shares_structure != after.shares_structure:
        before, after = _repeat_structure(before), _repeat_structure(after)
    linked = before.links is not None or after.links is not None
    if linked:
        before, after = _link(before), _link(after)
        width = max(before.feature.shape[2], after.feature.shape[2])
    else:
        width = 2 ** max(before.max_depth, after.max_depth) - 1
    words = max(_words(before), _words(after))
    terms, ranges = max(_terms(before), _terms(after)), _join_ranges(before, after)
    parts = [_take_arrays(model, width, words, terms) for model in (before, after)]
    arrays: dict[str, Any] = {}
    for name, first in parts[0].items():
        second = parts[1][name]
        join = lambda a, b: np.concatenate([a, b])  # noqa: E731
        known = first is not None and second is not None
        arrays[name] = jax.tree.map(join, first, second) if known else None
    arrays = jax.device_put(arrays)
    left_child = arrays.pop("left_child")
    links = None
    if left_child is not None:
        depth = max(before.max_depth, after.max_depth)
        links = Links(left_child=left_child, max_depth=depth)
    names = after.feature_names or before.feature_names
    return replace(before, **arrays, links=links, feature_names=names, ranges=ranges)


def average_models(
    models: Sequence[Ensemble], weights: Float[np.ndarray, " M"]
) -> Ensemble:
    """Returns one model: its scores are the weighted mean of those of the models."""
    shares = (weights / np.sum(weights)).astype(np.float32)

    def scale(array, share):
        return jax.device_put(np.asarray(array) * share)

    parts, start = [], np.float32(0)
    for model, share in zip(models, shares, strict=True):
        slopes = model.slopes
        if slopes is not None:
            slopes = slopes._replace(slope=scale(slopes.slope, share))
        values = scale(model.leaf_value, share)
        parts.append(replace(model, leaf_value=values, slopes=slopes))
        start = start + np.asarray(model.init_score) * share
    return replace(reduce(append_rounds, parts), init_score=jax.device_put(start))


def _join_ranges(before, after):
    """Returns the ranges of the features, which both models must have in common."""
    if before.slopes is None or after.slopes is None:
        return after.ranges if before.slopes is None else before.ranges
    one, other = np.asarray(before.ranges), np.asarray(after.ranges)
    differs = np.any(one != other, axis=1)
    if differs.any():
        feature = int(np.argmax(differs))
        raise ValueError(
            "ranges of models with linear leaves must be equal to join them, got "
            f"{one[feature].tolist()} and {other[feature].tolist()} for feature "
            f"{feature}"
        )
    return before.ranges


def _terms(model):
    """Linear terms of a leaf."""
    return 0 if model.slopes is None else model.slopes.feature.shape[3]


def _words(model):
    """Words of the sets of categories."""
    return 0 if model.left_codes is None else model.left_codes.shape[3]


def _take_arrays(model, width, words, terms):
    """Returns the arrays with an axis of rounds, with ``width`` nodes per tree."""
    short = width - model.feature.shape[2]

    def pad(array, fill):
        array = np.asarray(array)
        widths = [(0, 0)] * array.ndim
        widths[2] = (0, short)
        return np.pad(array, widths, constant_values=fill)

    arrays: dict[str, Any] = dict(
        feature=pad(model.feature, 0),
        threshold=pad(model.threshold, np.inf),
        missing_left=pad(model.missing_left, True),
        left_codes=None,
        left_child=None,
        slopes=None,
    )
    if words:
        codes = np.zeros((*arrays["feature"].shape, words), np.uint32)
        if model.left_codes is not None:
            old = np.asarray(model.left_codes)
            codes[:, :, : old.shape[2], : old.shape[3]] = old
        arrays["left_codes"] = codes
    if model.links is not None:
        node = np.arange(width, dtype=np.int32)
        left_child = pad(model.links.left_child, 0)
        arrays["left_child"] = np.where(node < width - short, left_child, node)

    def widen(values):
        if model.links is not None:
            return pad(values, 0)
        values = np.asarray(values)  # a leaf's rows all go left from where it was
        shape = (*values.shape[:2], width + 1, *values.shape[3:])
        wide = np.zeros(shape, values.dtype)
        wide[:, :, :: (width + 1) // values.shape[2]] = values
        return wide

    arrays["leaf_value"] = widen(model.leaf_value)
    arrays["sums"] = _map_leaves(widen, model.sums)
    if terms:
        arrays["slopes"] = _take_slopes(model, widen, terms)
    return arrays


def _take_slopes(model, widen, terms):
    """Returns the slopes of all leaves, with ``terms`` terms each."""
    short = ((0, 0), (0, 0), (0, 0), (0, terms - _terms(model)))

    def change(array) -> Any:
        return widen(np.pad(np.asarray(array), short))

    slopes = model.slopes
    if slopes is None:
        none: Any = np.zeros((*model.leaf_value.shape, 0), np.float32)
        feature: Any = np.zeros((*model.feature.shape[:2], *none.shape[2:]), np.int32)
        slopes = Slopes(feature, slope=none, center=none)
    feature = change(np.asarray(slopes.feature) - NO_TERM) + NO_TERM
    return Slopes(feature, change(slopes.slope), change(slopes.center))


def _map_leaves(change, sums):
    """Applies ``change`` to the sums of leaves; l2 is one number per tree."""
    if sums is None:
        return None
    return sums._replace(
        gradient=change(sums.gradient),
        curvature=change(sums.curvature),
        weight=change(sums.weight),
        l2=np.asarray(sums.l2),
    )


def _link(model: Ensemble) -> Ensemble:
    """Returns a model with linked trees; heaps keep the indices of their nodes."""
    if model.links is not None:
        return model
    nodes = model.nodes()
    is_leaf = nodes.is_leaf

    def by_round(array, size=model.num_scores):
        rounds = array.reshape(model.num_rounds, model.num_scores, *array.shape[1:])
        return rounds[:, :size]

    by_tree: Any = partial(by_round, size=model.feature.shape[1])

    def of_leaves(values) -> Any:
        return by_round(np.where(is_leaf, values, 0).astype(np.float32))

    sums = model.sums
    if sums is not None:
        sums = sums._replace(
            gradient=of_leaves(nodes.gradient),
            curvature=of_leaves(nodes.curvature),
            weight=of_leaves(nodes.weight),
        )
    left_codes = None if nodes.left_codes is None else by_tree(nodes.left_codes)
    slopes = nodes.slopes
    if slopes is not None:
        numbers = map(by_round, (slopes.slope, slopes.center))
        slopes = Slopes(by_tree(slopes.feature), *numbers)
    own = np.arange(nodes.left.shape[1], dtype=np.int32)
    left_child = np.where(is_leaf, own, nodes.left)
    return replace(
        model,
        feature=by_tree(nodes.feature),
        threshold=by_tree(nodes.threshold),
        missing_left=by_tree(nodes.missing_left),
        leaf_value=of_leaves(nodes.value),
        sums=sums,
        left_codes=left_codes,
        links=Links(by_tree(left_child), model.max_depth),
        slopes=slopes,
    )


def _repeat_structure(model: Ensemble) -> Ensemble:
    """Returns the same model with a tree for each score, R rounds of K trees."""
    if not model.shares_structure:
        return model
    names = ("feature", "threshold", "missing_left", "left_codes", "links")
    parts = {name: getattr(model, name) for name in names}
    repeat = partial(np.repeat, repeats=model.num_scores, axis=1)
    slopes = model.slopes
    if slopes is not None:
        slopes = slopes._replace(feature=repeat(slopes.feature))
    return replace(model, **jax.tree.map(repeat, parts), slopes=slopes)
