# SPDX-License-Identifier: Apache-2.0
"""Records training: losses and metrics by round, and the model after any round.

In: trees and losses, round by round. Out: a History, and an Ensemble.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jboost.codes.bins import Bins
from jboost.entry.packages import import_pandas
from jboost.entry.representation import MOST_LINES, cut
from jboost.model.ensemble import Ensemble, to_ensemble, truncate
from jboost.training.joining import append_rounds
from jboost.training.scoring import BY_LOSS, Criterion
from jboost.trees.tree import BoostedTrees, Tree

UNNAMED = "validation"  # the name of a set that was given without one


@dataclass(frozen=True)
class History:
    """The curves of training, one entry per round of this call of ``fit``.

    Attributes:
      train_loss: weighted mean loss of the training rows after each round, [R].
      validation_loss: the same of the validation set, [R]; a dict by name where sets
        were given by name; None without.
      metrics: {set: {metric: [R]}}; the training rows are the set "train".
      best_round: the best round (from 0) on the first validation set, by ``by``; the
        last one without a validation set; -1 if there was no round.
      choices: what each "auto" stood for, the initial score, and the rule that gave
        it, ``"init_score_rule"``: "argmin", "median", "given", or "fallback" where
        no row had a gradient at the argmin, so that training starts elsewhere.
      oob_improvement: with ``subsample`` < 1, by how much each round lowered the
        weighted mean loss of the rows out of its bag, [R] (Friedman 2002; as in
        scikit-learn); else None. Its running sum is largest after the number of
        rounds that it advises, ``np.cumsum(history.oob_improvement).argmax() + 1``,
        usually too few. NaN where a bag of so few rows holds them all.
      parameters: of an adaptive loss, as estimated after the last round that the
        model holds (with early stopping the best one); () for other losses. See
        :func:`jboost.losses.adaptive`.
      by: what rounds are compared by: ("loss", "min"), or a metric's name and "min" or
        "max".
    """

    train_loss: np.ndarray
    validation_loss: Any  # a union would make its users tell the cases apart
    metrics: dict[str, dict[str, np.ndarray]]
    best_round: int
    choices: dict[str, Any]
    oob_improvement: np.ndarray | None = None
    parameters: Any = ()
    by: Criterion = BY_LOSS

    def __repr__(self) -> str:
        """Shows the first, the best and the last value of each curve."""
        rounds, best = len(self.train_loss), self.best_round
        title = f"History of {rounds} rounds"
        if rounds == 0:
            return title
        title += f", best round {best} by {self.by.name} ({self.by.direction})"
        rows = [["", "first", "best", "last"]]
        for name, values in self._curves().items():
            chosen = (values[0], values[best], values[-1])
            rows.append([name, *(f"{value:.5g}" for value in chosen)])
        lines = cut(_align(rows), MOST_LINES - 1, "curves")
        return "\n".join([title, *lines])

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


class TrainingError(RuntimeError):
    """Training failed; the rounds finished before are kept.

    Attributes:
      round: the round (from 0) in which it happened.
      model: the ensemble of the rounds that were finished.
      history: of those rounds.
    """

    round: int
    model: Ensemble
    history: History

    def __init__(self, message: str, record: "Record", round: int):
        super().__init__(message)
        kept = record.num_rounds
        self.round = round
        self.model, self.history = record.model(kept), record.history(kept)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it carries, for processes that send errors to others."""
        return _restore, (type(self), self.args, vars(self))


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended training; the rounds finished before are kept.

    With early stopping, too, the model holds all of them;
    ``jb.truncate(error.model, error.history.best_round + 1)`` is the best one.

    Attributes:
      round: the round (from 0) in which it happened.
      model: the ensemble of the rounds that were finished; None except from ``fit``.
      history: of those rounds; None except from ``fit``.
      result: what :func:`cross_validate` or :func:`sweep` would have returned for the
        rounds that were finished; None from ``fit``.

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


def explain_divergence(losses: Sequence[float], value: float) -> str:
    """Suggests what may help if the training loss is no longer finite.

    Args:
      losses: of the rounds before.
      value: the loss now.
    """
    advice = "a smaller learning_rate or a larger l2 may help"
    fell = len(losses) > 0 and losses[-1] < min(losses[0], 0.0)
    if value == -np.inf or fell:
        advice += (
            ", but the loss fell before, and may be unbounded below; arguments may be "
            "swapped (the call is loss(score, target)), or its sign be wrong"
        )
    elif np.isnan(value) and not losses:
        advice += (
            ", or the gradient is NaN where the loss is finite: a branch of jnp.where "
            "that is not taken must be finite, too"
        )
    return advice


@dataclass
class Record:
    """The rounds so far on the host: one list entry per round.

    The trees of ``before`` come first: those of a model that training continues from,
    and the first ``restored`` rounds of this run if it continues from a checkpoint. The
    file now holds ``kept`` rounds of it.
    """

    bins: Bins
    init_score: Any  # [] or [K], NumPy, as the trees
    set_names: tuple[str, ...]
    named: bool  # whether the sets were given by name
    no_trees: Tree  # arrays of zero rounds
    choices: dict[str, Any]
    bagged: bool  # whether rounds leave rows out
    feature_names: tuple[str, ...] | None = None
    metric_names: tuple[str, ...] = ()
    before: Ensemble | None = None
    restored: int = 0
    kept: int = 0
    by: Criterion = BY_LOSS
    trees: list[Tree] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    set_losses: list[np.ndarray] = field(default_factory=list)
    metrics: list[dict[str, dict[str, float]]] = field(default_factory=list)
    improvement: list[float] = field(default_factory=list)
    # Of an adaptive loss, else (): at the start, then after each round.
    parameters: list[Any] = field(default_factory=list)

    @property
    def num_rounds(self) -> int:
        """How many rounds have been recorded."""
        return len(self.train_loss)

    def best_round(self, num_rounds: int) -> int:
        """Returns the best of the first ``num_rounds``; what is not finite never is."""
        if not self.set_names or num_rounds == 0:
            return num_rounds - 1
        values = [losses[0] for losses in self.set_losses[:num_rounds]]
        if self.by.metric is not None:
            rows = self.metrics[:num_rounds]
            values = [row[self.set_names[0]][self.by.metric] for row in rows]
        return int(np.argmin(self.by.rank(values)))

    def model(self, num_rounds: int) -> Ensemble:
        """Returns the ensemble after the first ``num_rounds`` rounds."""
        before, count = self.before, num_rounds - self.restored
        if before is not None and count <= 0:
            return truncate(before, before.num_rounds + count)
        trees = self.no_trees
        if count:
            stack = lambda *arrays: np.stack(arrays)  # noqa: E731
            trees = jax.tree.map(stack, *self.trees[:count])
        model = to_ensemble(BoostedTrees(trees, self.init_score), self.bins)
        model = replace(model, feature_names=self.feature_names)
        return model if before is None else append_rounds(before, model)

    def table(self) -> dict[str, np.ndarray]:
        """Returns the history as arrays, with an entry per round."""
        number, sets = self.num_rounds, ("train", *self.set_names)
        metrics = [
            [[row[name][metric] for metric in self.metric_names] for name in sets]
            for row in self.metrics
            if self.metric_names
        ]
        return {
            "train_loss": np.array(self.train_loss, np.float64),
            "set_losses": np.array(self.set_losses, np.float64).reshape(
                number, len(self.set_names)
            ),
            "metrics": np.array(metrics, np.float64),
            "improvement": np.array(self.improvement, np.float64),
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
        self._check_table(table)
        self.before, self.restored = model, len(table["train_loss"])
        self.kept = self.restored
        self.train_loss = table["train_loss"].tolist()
        self.set_losses = [*table["set_losses"]]
        self.improvement = table["improvement"].tolist()
        structure = jax.tree.structure(self.parameters[0])
        columns = [table[name] for name in self._stack_parameters()]
        self.parameters = [
            jax.tree.unflatten(structure, [column[number] for column in columns])
            for number in range(self.restored + 1)
        ]
        sets, names = ("train", *self.set_names), self.metric_names
        self.metrics = [
            {
                name: dict(zip(names, values, strict=True))
                for name, values in zip(sets, row, strict=True)
            }
            for row in table["metrics"].tolist()
        ] or [{} for _ in self.train_loss]

    def _check_table(self, table):
        number, sets = len(table["train_loss"]), len(self.set_names)
        shapes: dict[str, tuple[int, ...]] = {
            name: (number + 1, *column.shape[1:])
            for name, column in self._stack_parameters().items()
        }
        shapes |= dict(train_loss=(number,), set_losses=(number, sets))
        shapes["improvement"] = (number,) if self.bagged else (0,)
        shapes["metrics"] = (0,)
        if number and self.metric_names:
            shapes["metrics"] = (number, 1 + sets, len(self.metric_names))
        kinds = {name: array.dtype for name, array in self.table().items()}
        for name, array in table.items():
            found, expected = (array.dtype, array.shape), (kinds[name], shapes[name])
            if found != expected:
                raise ValueError(f"history.{name} must be {expected}, got {found}")

    def history(self, num_rounds: int, kept: int | None = None) -> History:
        """Returns the history of the first ``num_rounds`` rounds.

        Args:
          kept: how many rounds the model holds; None: all of them.
        """
        table = np.array(self.set_losses[:num_rounds])
        table = table.reshape(num_rounds, len(self.set_names))
        by_name = {name: table[:, i] for i, name in enumerate(self.set_names)}
        metrics = self.metrics[:num_rounds]
        return History(
            train_loss=np.array(self.train_loss[:num_rounds]),
            validation_loss=by_name if self.named else by_name.get(UNNAMED),
            metrics={
                name: {
                    metric: np.array([row[name][metric] for row in metrics])
                    for metric in values
                }
                for name, values in (metrics[0] if metrics else {}).items()
            },
            best_round=self.best_round(num_rounds),
            choices=self.choices,
            oob_improvement=np.array(self.improvement[:num_rounds])
            if self.bagged
            else None,
            parameters=self.parameters[num_rounds if kept is None else kept],
            by=self.by,
        )


def _align(rows: list[list[str]]) -> list[str]:
    """Formats a table, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
