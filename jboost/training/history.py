# SPDX-License-Identifier: Apache-2.0
"""Results of training besides the model: curves, and errors that carry them.

In: losses and metrics by round. Out: a History.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jboost.entry.attributes import make_attribute_error
from jboost.entry.messages import MOST_LINES, cut, import_pandas
from jboost.model.ensemble import Ensemble
from jboost.training.metrics import BY_LOSS, Criterion

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
        last one without a validation set; -1 if there was no round, or if ``by`` is NaN
        or infinite in all of them.
      choices: the values chosen for "auto", the initial score, and the rule that gave
        it, ``"init_score_rule"``: "argmin", "median", "given", "fallback" if no row
        had a gradient at the argmin, so that training starts elsewhere, or "half
        event" if the argmin is at infinity (no event in the rows of a logistic or
        Poisson loss, say) and training starts where half an event would keep it.
      oob_improvement: the decrease of the weighted mean loss of the rows out of the
        bag in each round, [R], with ``subsample`` < 1 (Friedman 2002; as in
        scikit-learn); else None. Its running sum is largest after the number of
        rounds that it advises, ``np.nancumsum(history.oob_improvement).argmax() + 1``,
        usually too few. NaN if there are so few rows that a bag holds them all.
      parameters: the parameters of an adaptive loss, as estimated after the last round
        that the model holds (with early stopping the best one); () for other losses.
        See :func:`jboost.losses.adaptive`.
      by: the criterion that rounds are compared by: ("loss", "min"), or a metric's name
        and "min" or "max".
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
        rounds, best = len(self.train_loss), self.best_round
        title = f"History of {rounds} rounds"
        if rounds == 0:
            return title
        found = f"best round {best}" if best >= 0 else "no best round"
        title += f", {found} by {self.by.name} ({self.by.direction})"
        rows = [["", "first", "best", "last"]]
        for name, values in self._curves().items():
            middle = values[best] if best >= 0 else np.nan
            chosen = (values[0], middle, values[-1])
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
    """

    round: int
    model: Ensemble
    history: History

    def __init__(self, message: str, record: Any, round: int):
        super().__init__(message)
        kept = record.num_rounds
        self.round = round
        self.model, self.history = record.model(kept), record.history(kept)

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
            "swapped (the call is loss(score, target)), or its sign be wrong"
        )
    elif np.isnan(value) and len(losses) == 0:
        advice += (
            ", or the gradient is NaN where the loss is finite: a branch of jnp.where "
            "that is not taken must be finite, too"
        )
    return advice


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
