# SPDX-License-Identifier: Apache-2.0
"""How well does it generalize: cross-validation.

In: what ``fit`` takes, and folds. Out: losses by fold and round, scores of held-out
rows, models. All folds run in one compiled program: a fold is a mask of weights, and
codes and thresholds are made once from all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Shaped

from jboost import losses
from jboost.boosting.settings import FitSettings, read_settings, takes_settings
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.kernels.library import takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.selection.comparison import Request, average, compare
from jboost.selection.curves import make_record
from jboost.training.scoring import BY_LOSS, By, Criterion, Metrics


@dataclass(frozen=True)
class CrossValidation:
    """What cross-validation found; R rounds were made.

    Attributes:
      train_loss: weighted mean loss of the rows that each fold learned from.
      validation_loss: the same of its held-out rows.
      metrics: {name: [folds, R]}, of the held-out rows.
      mean: of what rounds are compared by (see ``by``), over the folds, each of which
        counts alike.
      standard_error: of that mean: the standard deviation over the folds (ddof 1)
        divided by sqrt(folds); NaN for one fold.
      best_round: the round (from 0) of the best mean; -1 if there was no round.
      scores: of each row after the best round, offset included, from the folds that
        held it out (their mean, if several did); NaN where none did.
      held_out: which rows each fold held out.
      models: the ensembles of the best round, with an axis of folds in front of every
        array; None unless asked for.
      parameters: of an adaptive loss in the best round, with an axis of folds in front
        of every array; () for other losses.
      by: what rounds are compared by: ("loss", "min"), or a metric's name and "min" or
        "max".
    """

    train_loss: Float[np.ndarray, "folds R"]
    validation_loss: Float[np.ndarray, "folds R"]
    metrics: dict[str, Float[np.ndarray, "folds R"]]
    mean: Float[np.ndarray, " R"]
    standard_error: Float[np.ndarray, " R"]
    best_round: int
    scores: Float[np.ndarray, "N *K"]
    held_out: Bool[np.ndarray, "folds N"]
    models: Ensemble | None = None
    parameters: Any = ()
    by: Criterion = BY_LOSS

    def __repr__(self) -> str:
        """The mean curve at its best; the arrays would fill pages."""
        folds, rounds = self.validation_loss.shape
        found = f"CrossValidation(folds={folds}, num_rounds={rounds}"
        if rounds == 0:
            return f"{found})"
        best = self.best_round
        return (
            f"{found}, best_round={best}, by={self.by.name!r}, "
            f"mean={self.mean[best]:.5g}, "
            f"standard_error={self.standard_error[best]:.2g})"
        )

    @property
    def one_se_round(self) -> int:
        """The first round whose mean is within one standard error of the best."""
        if self.best_round < 0:
            return -1
        ranks, best = self.by.rank(self.mean), self.best_round
        most = ranks[best] + self.standard_error[best]
        return int(np.argmax(ranks <= np.fmax(most, ranks[best])))


@explain_arguments
@on_host("call jb.boost there")
@takes_implementation
@takes_settings
def cross_validate(
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
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
    implementation: str | None = None,
    return_models: bool = False,
    **settings: Unpack[FitSettings],
) -> CrossValidation:
    """Trains on all folds but one, and measures on that one, for each fold in turn.

        CV(r) = 1/folds sum_k  [mean loss of the rows of fold k after r rounds of
                                training on the rows outside it]

    (Stone 1974; Geisser 1975). The folds are weights of 0 and 1 in one program that is
    compiled once for a loss, a depth and an order of magnitude of the data. Each run
    is that of ``fit`` with those weights, except that thresholds of features are
    chosen once from all rows: they look at x, weights and nothing else.

    Args:
      x, y, loss: as for :func:`jboost.fit`; x is held in memory, dense or sparse.
      folds: how many; or an integer for each row, the fold that holds it out
        (negative: none does); or pairs (training rows, held-out rows) of indices or
        masks; or an object of scikit-learn's with ``split(x, y, groups)``. A number
        of folds is drawn by ``seed``, of sizes that differ by one at most. An index
        given c times, as in a bootstrap, multiplies the weight of its row by c.
      stratify: labels [N], or True for y itself: each fold gets its share of every
        label.
      groups: labels [N]: rows of one label are held out together.
      shuffle: False: the folds are blocks of rows in their order.
      sample_weight: weighs training and held-out losses alike.
      metrics: as for :func:`jboost.fit`, of held-out rows, for each fold and round.
      by: what rounds are compared by, as for :func:`jboost.fit`: a metric's mean over
        the folds instead of that of the loss.
      offset, progress, feature_names, implementation: as for :func:`jboost.fit`.
      return_models: whether to keep the model of each fold, of ``best_round + 1``
        rounds.
      {settings}

    :func:`jboost.fit` explains the last ones at length. Rounds stop early by the mean
    over the folds; the folds are drawn by ``seed``, too.

    Returns:
      A CrossValidation. ``jax.vmap(jb.predict, (0, None))(result.models, x)`` are the
      scores of all models.

    Raises:
      TypeError, ValueError: for bad arguments, before training.
      TrainingError: no row of a fold has a gradient to learn from, or its training
        loss stopped being finite; carries that fold's model until then.
      RuntimeError: a metric failed.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> result = jb.cross_validate(x, y, folds=4, num_rounds=8, max_depth=3)
      >>> result.validation_loss.shape, result.scores.shape
      ((4, 8), (200,))
      >>> bool(result.mean[result.best_round] < np.var(y))
      True
    """
    request = Request(
        x, y, sample_weight, offset, folds, stratify, groups, shuffle, metrics, by,
        feature_names, progress, keeps_models=True,
    )  # fmt: skip
    table, [curve] = compare(request, loss, [{}], read_settings(settings))
    mean, error = average(curve.table(table.by.metric))
    models = _stack_models(table, curve) if return_models else None
    return CrossValidation(
        train_loss=curve.table(column=0),
        validation_loss=curve.table(),
        metrics={name: curve.table(name) for name in table.metrics},
        mean=mean,
        standard_error=error,
        best_round=curve.best,
        scores=_held_out_scores(table, curve),
        held_out=table.folds.held_out > 0,
        by=table.by,
        models=models,
        parameters=curve.parameters[curve.best + 1],
    )


def _stack_models(table, curve):
    """The models of the folds at the best round."""
    models = [
        make_record(table, curve, fold).model(curve.best + 1)
        for fold in range(len(table.folds.train))
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *models)


def _held_out_scores(table, curve):
    """[N] or [N, K]: means over the folds that held a row out; NaN without one."""
    masks = table.folds.held_out > 0
    total = np.zeros((len(table.rows.scores), masks.shape[1]))
    count = np.zeros(masks.shape[1])
    # Without a round there are no scores.
    for fold, scores in enumerate(() if curve.scores is None else curve.scores):
        total[:, masks[fold]] += scores[:, : masks[fold].sum()]
        count += masks[fold]
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
    return mean[0] if len(mean) == 1 else mean.T
