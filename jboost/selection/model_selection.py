# SPDX-License-Identifier: Apache-2.0
"""Cross-validation: estimates how well a model generalizes.

In: the arguments of ``fit``, and folds. Out: losses by fold and round, scores of
held-out rows, models. All folds run in one compiled program: a fold is a mask of
weights, and codes and thresholds are computed once from all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Bool, Float, Shaped

from jboost import losses
from jboost.boosting.settings import FitSettings, read_settings, takes_settings
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.kernels.library import takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.selection.comparison import Comparison, average, compare, finish
from jboost.selection.curves import make_record
from jboost.training.comparing import BY_LOSS, Criterion
from jboost.training.request import RawRows
from jboost.training.scoring import By, Metrics


@dataclass(frozen=True)
class CrossValidation:
    """The result of cross-validation over R rounds.

    Attributes:
      train_loss: weighted mean loss of the rows that each fold trained on.
      validation_loss: weighted mean loss of the held-out rows of each fold.
      metrics: {name: [folds, R]}, on the held-out rows.
      mean: mean over the folds of the criterion ``by``; all folds count alike.
      standard_error: standard error of ``mean``: the standard deviation over the folds
        (ddof 1) divided by sqrt(folds); NaN for one fold.
      best_round: the round (from 0) of the best mean; -1 if there was no round.
      scores: of each row after the best round, offset included, from the folds that
        held it out (their mean, if several did); NaN where none did.
      held_out: the rows that each fold held out.
      models: the ensembles of the best round, every array with a leading axis of
        folds; None without ``return_models``.
      parameters: parameters of an adaptive loss in the best round, every array with a
        leading axis of folds; () for other losses.
      by: the criterion that compares rounds: ("loss", "min"), or the name of a metric
        and "min" or "max".
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
        """Shows the best mean; the arrays would fill pages."""
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
        """First round whose mean is within one standard error of the best."""
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
    mesh: Mesh | None = None,
    implementation: str | None = None,
    return_models: bool = False,
    **settings: Unpack[FitSettings],
) -> CrossValidation:
    """Trains on all folds but one and evaluates on that one, for each fold in turn.

        CV(r) = 1/folds sum_k  [mean loss of the rows of fold k after r rounds of
                                training on the rows outside it]

    (Stone 1974; Geisser 1975). Folds are weights of 0 and 1 in one program, which is
    compiled once per loss, depth and order of magnitude of the number of rows. Each
    run equals ``fit`` with those weights, except that the thresholds of features are
    chosen once from all rows; they depend on x and the weights only.

    Args:
      x, y, loss: as for :func:`jboost.fit`; x must be in memory, dense or sparse.
      folds: the number of folds, drawn at random with sizes that differ by at most
        one; or an integer per row, the fold that holds it out (negative: none does);
        or pairs (training rows, held-out rows) of indices or masks; or a splitter of
        scikit-learn, with ``split(x, y, groups)``. An index given c times, as in a
        bootstrap, multiplies the weight of its row by c; c is the same in all rows of
        a group if a loss of groups does not take ``weights``.
      stratify: labels [N], or True for y itself: each fold gets its share of every
        label.
      groups: labels [N]: rows with the same label are held out together. For a loss of
        a group (see :func:`jboost.fit`) they are also its groups, and no fold divides
        one. With "all" and :func:`jboost.random_groups` folds divide rows, and the
        held-out rows of a fold form groups of their own. A loss of a group that does
        not take ``where`` needs ``jb.make_groups(ids, padded=False)``, unless it fails
        on a single row and so cannot be one of a row.
      shuffle: False: folds are contiguous blocks of rows.
      sample_weight: weights of both training and held-out losses.
      metrics: as for :func:`jboost.fit`, on the held-out rows of each fold.
      by: the criterion that compares rounds, as for :func:`jboost.fit`; its mean over
        the folds counts.
      offset, progress, feature_names, implementation: as for :func:`jboost.fit`.
      mesh: a ``jax.sharding.Mesh`` of this process's devices, which share the models;
        each device holds all rows.
      return_models: whether to keep the model of each fold, of ``best_round + 1``
        rounds.
      {settings}

    :func:`jboost.fit` explains the hyperparameters at length. Early stopping looks at
    the mean over the folds. ``seed`` also seeds the draw of the folds.

    Returns:
      A CrossValidation. ``jax.vmap(jb.predict, (0, None))(result.models, x)`` computes
      the scores of all models.

    Raises:
      TypeError, ValueError: for bad arguments, before training.
      TrainingError: no row of a fold has a gradient to learn from, or its training
        loss became NaN or infinite; holds that fold's model up to that round.
      TrainingInterrupted: ctrl-C; its ``result`` holds the rounds so far.
      RuntimeError: a metric failed, or no round is the best because ``by`` is NaN or
        infinite in each.

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
    checks.check_flag("return_models", return_models)
    rows = RawRows(x, y, sample_weight, offset, feature_names)
    request = Comparison(
        rows, folds, stratify, groups, shuffle, metrics, by, progress, mesh,
        keeps_models=True,
    )  # fmt: skip
    study, [curve], interrupted = compare(request, loss, [{}], read_settings(settings))
    mean, error = average(curve.by_fold(study.by.metric))
    models = _stack_models(study, curve) if return_models else None
    result = CrossValidation(
        train_loss=curve.by_fold(column=0),
        validation_loss=curve.by_fold(),
        metrics={name: curve.by_fold(name) for name in study.metrics},
        mean=mean,
        standard_error=error,
        best_round=curve.best,
        scores=_held_out_scores(study, curve),
        held_out=study.folds.held_out > 0,
        by=study.by,
        models=models,
        parameters=curve.parameters[curve.best + 1],
    )
    return finish(result, interrupted, curve.num_rounds)


def _stack_models(study, curve):
    """Returns the models of all folds at the best round."""
    models = [
        make_record(study, curve, fold).model(curve.best + 1)
        for fold in range(len(study.folds.train))
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *models)


def _held_out_scores(study, curve):
    """Returns means over the folds that held a row out; NaN if none did."""
    masks = study.folds.held_out > 0
    total = np.zeros((len(study.rows.offset), masks.shape[1]))
    count = np.zeros(masks.shape[1])
    # Without a round there are no scores.
    for fold, scores in enumerate(() if curve.scores is None else curve.scores):
        total[:, masks[fold]] += scores[:, : masks[fold].sum()]
        count += masks[fold]
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
    return mean[0] if len(mean) == 1 else mean.T
