# SPDX-License-Identifier: Apache-2.0
"""Estimators with the interface of scikit-learn.

In: X and y of every kind that scikit-learn or :func:`jboost.fit` takes. Out: estimators
that work in pipelines, searches and cross-validation.

    from jboost.sklearn import JBoostClassifier

    classifier = JBoostClassifier(num_rounds=200).fit(X, y)
    classifier.predict_proba(X)
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
except ImportError as error:
    raise ImportError(
        "jboost.sklearn needs scikit-learn, which is not installed: "
        "pip install scikit-learn"
    ) from error
from sklearn.utils import check_array, column_or_1d, compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from jboost import losses
from jboost.entry.arguments import explain_arguments
from jboost.sklearn.estimators import Boosting, find_loss, is_one_of
from jboost.tables.columns import find_gap
from jboost.tables.targets import check_weights
from jboost.training.scoring import By, Metrics
from jboost.trees.category_splits import (
    CATEGORY_L2,
    CATEGORY_SMOOTHING,
    MAX_ONEHOT,
    MIN_CATEGORY_WEIGHT,
)

_SIGNED = (losses.exponential, losses.hinge, losses.hinge_squared)  # -1 and 1
_BINARY = (losses.logistic, losses.focal, *_SIGNED)


class JBoostRegressor(RegressorMixin, Boosting):
    """Gradient boosting of any differentiable loss, as a regressor.

    Hyper-parameters are those of :func:`jboost.fit`, under the same names and with the
    same defaults, but for the following.

    Args:
      loss: "auto" (squared error), the name of a function of :mod:`jboost.losses`, or
        ``loss(score, target)`` of one row; bind parameters by ``functools.partial``,
        ``partial(jb.losses.quantile, tau=0.9)``. Of targets [N, K] a loss of
        :mod:`jboost.losses` is summed over the K; a function of your own sees K scores.
      absent: what the gaps of a sparse X are, "zero" as in scikit-learn, or "missing".
      early_stopping_rounds: by the first set of ``eval_set``; without one, by a share
        of the rows that is held out.
      metrics: predictions for metrics are made by ``inverse_link``.
      validation_fraction: that share.
      inverse_link: from the score of a row to what ``predict`` returns. "auto": as the
        loss implies (:func:`jboost.losses.inverse_link`; exp for poisson), so that
        means are predicted; None: the score itself.
      random_state: an integer (the default makes each fit the same), a
        ``RandomState``, or None for another seed each time.

    Attributes:
      model_: the :class:`jboost.Ensemble`; ``get_booster()`` returns it as well.
      history_: the :class:`jboost.History`; ``evals_result_`` is the same as a dict.
      n_iter_, best_iteration_: rounds of the model; the best round, from 0.
      feature_importances_: shares of the improvement in squared error.
      n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Example:
      >>> import numpy as np
      >>> from jboost.sklearn import JBoostRegressor
      >>> X = np.arange(40.0)[:, None]
      >>> regressor = JBoostRegressor(num_rounds=20).fit(X, np.sqrt(X[:, 0]))
      >>> bool(regressor.score(X, np.sqrt(X[:, 0])) > 0.9)
      True
    """

    @explain_arguments
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        offset: Any = None,
        eval_set: Any = None,
    ) -> "JBoostRegressor":
        """Trains on rows X and targets y.

        Args:
          X: numbers [N, F], NaN = missing: an array, a data frame, a sparse matrix.
          y: [N], or [N, K] for K outputs.
          sample_weight: >= 0.
          offset: [N] or [N, K], added to the score (a base margin); to be given to
            ``predict`` as well.
          eval_set: (X, y), (X, y, sample_weight) or (X, y, sample_weight, offset); a
            list of such, named "validation_0", ...; or a dict of such by name. Early
            stopping looks at the first.

        Returns:
          The estimator.

        Raises:
          TypeError, ValueError: for bad arguments, before training.
        """
        X = self._read_table(X, reset=True)
        targets = self._read_targets(y)
        self._loss = find_loss("squared_error" if self.loss == "auto" else self.loss)
        num_scores = 1 if targets.ndim == 1 else targets.shape[1]
        known = is_one_of(self._loss, losses.LOSSES.values())
        loss = _sum_outputs(self._loss) if num_scores > 1 and known else self._loss
        return self._train(
            X, targets, sample_weight, offset, eval_set, loss, num_scores, None
        )

    def predict(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """What the score stands for, in float32: [N]; in float64 for K outputs [N, K].

        Args:
          X: as for ``fit``, with the same columns.
          offset: as for ``fit``.
        """
        return _widen(self._score_rows(X, offset, self._link))

    def staged_predict(self, X: Any, *, offset: Any = None) -> Iterator[np.ndarray]:
        """The predictions after each round, one by one."""
        yield from map(_widen, self._score_stages(X, offset, self._link))

    def _read_targets(self, y):
        if y is None:
            raise ValueError("fit requires y to be passed, but the target y is None")
        y = check_array(y, ensure_2d=False, input_name="y", estimator=self)
        return column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y

    def __sklearn_tags__(self):
        """Several outputs are welcome."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _sum_outputs(loss):
    """Of K scores and targets: the outputs are apart, but for the trees' rounds."""
    return lambda scores, targets: jnp.sum(jax.vmap(loss)(scores, targets))


def _widen(predictions):
    return predictions.astype(np.float64) if predictions.ndim == 2 else predictions


def _gives_probabilities(classifier):
    """Whether there is a link; without one a score is just a score."""
    if not isinstance(classifier.inverse_link, str):
        return classifier.inverse_link is not None
    loss = classifier.loss
    if isinstance(loss, str):
        loss = losses.logistic if loss == "auto" else losses.LOSSES.get(loss)
    return losses.inverse_link(loss) is not None


class JBoostClassifier(ClassifierMixin, Boosting):
    """Gradient boosting of any differentiable loss, as a classifier.

    Hyper-parameters are those of :class:`JBoostRegressor`, but for the following.

    Args:
      loss: "auto" (``logistic`` for two classes, ``softmax`` for more); the name of a
        loss of :mod:`jboost.losses` or the function: ``softmax`` for any number of
        classes, ``logistic``, ``focal``, ``exponential``, ``hinge`` and
        ``hinge_squared`` for two; or a function of your own, ``loss(score, target)`` of
        one row, where target is 0 or 1, and for K > 2 classes a number below K beside
        K scores.
      inverse_link: from the score of a row to the probability of the second class, or
        to those of K classes. "auto": as the loss implies. Without one there is no
        ``predict_proba``.
      class_weight: {label: weight}, or "balanced": N / (K rows of the class), by which
        ``sample_weight`` of the training rows is multiplied; sets of ``eval_set`` have
        weights of their own. {0: 1, 1: w} is XGBoost's ``scale_pos_weight=w``.

    Attributes:
      classes_: the labels, sorted.

    Example:
      >>> import numpy as np
      >>> from jboost.sklearn import JBoostClassifier
      >>> X = np.arange(40.0)[:, None]
      >>> y = np.where(X[:, 0] > 20, "high", "low")
      >>> classifier = JBoostClassifier(num_rounds=20).fit(X, y)
      >>> classifier.predict([[5.0], [30.0]]).tolist()
      ['low', 'high']
    """

    classes_: np.ndarray

    @explain_arguments
    def __init__(
        self,
        loss: str | Callable[..., Any] | losses.Adaptive = "auto",
        *,
        num_rounds: int = 100,
        learning_rate: Any = 0.1,
        max_depth: int = 6,
        max_bins: int = 256,
        absent: Any = "zero",
        l1: float = 0.0,
        l2: float = 1.0,
        max_delta_step: float = float("inf"),
        min_gain: float = 0.0,
        min_child_weight: float = 1.0,
        min_child_samples: Any = "auto",
        regularization: Any = "relative",
        subsample: float = 1.0,
        colsample_bytree: float = 1.0,
        colsample_bylevel: float = 1.0,
        colsample_bynode: float = 1.0,
        max_leaves: int | None = None,
        monotone: Any = None,
        interactions: Any = None,
        candidates: Any = "global",
        candidate_weights: Any = "samples",
        categorical: Any = "auto",
        category_l2: float = CATEGORY_L2,
        category_smoothing: float = CATEGORY_SMOOTHING,
        min_category_weight: float = MIN_CATEGORY_WEIGHT,
        max_onehot: int = MAX_ONEHOT,
        curvature: Any = "auto",
        leaf_solver: Any = "auto",
        init_score: Any = "auto",
        early_stopping_rounds: int | None = None,
        validation_fraction: float = 0.1,
        inverse_link: Any = "auto",
        class_weight: Any = None,
        metrics: Metrics = None,
        by: By = None,
        callbacks: Any = (),
        progress: bool = False,
        random_state: Any = 0,
        implementation: str | None = None,
    ):
        super().__init__(
            loss, num_rounds=num_rounds, learning_rate=learning_rate,
            max_depth=max_depth, max_bins=max_bins, absent=absent, l1=l1, l2=l2,
            max_delta_step=max_delta_step, min_gain=min_gain,
            min_child_weight=min_child_weight, min_child_samples=min_child_samples,
            regularization=regularization, subsample=subsample,
            colsample_bytree=colsample_bytree, colsample_bylevel=colsample_bylevel,
            colsample_bynode=colsample_bynode, max_leaves=max_leaves,
            monotone=monotone, interactions=interactions, candidates=candidates,
            candidate_weights=candidate_weights, categorical=categorical,
            category_l2=category_l2, category_smoothing=category_smoothing,
            min_category_weight=min_category_weight, max_onehot=max_onehot,
            curvature=curvature, leaf_solver=leaf_solver,
            init_score=init_score,
            early_stopping_rounds=early_stopping_rounds,
            validation_fraction=validation_fraction, inverse_link=inverse_link,
            metrics=metrics, by=by, callbacks=callbacks, progress=progress,
            random_state=random_state, implementation=implementation,
        )  # fmt: skip
        self.class_weight = class_weight

    @explain_arguments
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        offset: Any = None,
        eval_set: Any = None,
    ) -> "JBoostClassifier":
        """Trains on rows X and labels y; see :meth:`JBoostRegressor.fit`.

        Args:
          X: numbers [N, F], NaN = missing: an array, a data frame, a sparse matrix.
          y: labels [N] of at least two classes.
          sample_weight, offset, eval_set: as for a regressor.

        Returns:
          The estimator.

        Raises:
          TypeError, ValueError: for bad arguments, before training.
        """
        X = self._read_table(X, reset=True)
        y = _check_labels(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        weights, counted = sample_weight, codes
        if weights is not None:
            weights = check_weights(weights, len(y), "sample_weight")
            counted = codes[np.asarray(weights > 0)]
        if len(np.unique(counted)) < 2:
            raise ValueError(
                "y must hold at least two classes in rows of positive weight, got one "
                f"class, {self.classes_[counted[0]]!r}"
            )
        self._loss = self._choose_loss()
        if self.class_weight is not None:
            factors = compute_sample_weight(self.class_weight, y)
            weights = factors if weights is None else factors * weights
        return self._train(
            X, self._code(codes), weights, offset, eval_set, self._loss,
            self._num_scores, codes,
        )  # fmt: skip

    def decision_function(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """The raw score: [N], above 0 for the second class, or [N, K]."""
        return self._score_rows(X, offset)

    def staged_decision_function(
        self, X: Any, *, offset: Any = None
    ) -> Iterator[np.ndarray]:
        """The scores after each round, one by one."""
        yield from self._score_stages(X, offset)

    @available_if(_gives_probabilities)
    def predict_proba(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Probabilities [N, classes], by the loss's link."""
        return _complete(self._score_rows(X, offset, self._link))

    @available_if(_gives_probabilities)
    def predict_log_proba(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Logarithms of the probabilities."""
        return np.log(self.predict_proba(X, offset=offset))

    @available_if(_gives_probabilities)
    def staged_predict_proba(
        self, X: Any, *, offset: Any = None
    ) -> Iterator[np.ndarray]:
        """The probabilities after each round, one by one."""
        yield from map(_complete, self._score_stages(X, offset, self._link))

    def predict(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """The label of the largest score; of two classes, the second above 0.

        With an ``inverse_link`` of your own, the label of the largest probability.
        """
        return self._find_labels(self._score_rows(X, offset, self._own_link))

    def staged_predict(self, X: Any, *, offset: Any = None) -> Iterator[np.ndarray]:
        """The labels after each round, one by one."""
        stages = self._score_stages(X, offset, self._own_link)
        yield from map(self._find_labels, stages)

    @property
    def _own_link(self):
        return None if isinstance(self.inverse_link, str) else self.inverse_link

    def _find_labels(self, found):
        """``found`` are scores, or with a link of one's own probabilities."""
        if found.ndim == 2:
            return self.classes_[found.argmax(axis=1)]
        return self.classes_[(found > (0 if self._own_link is None else 0.5)) * 1]

    def _choose_loss(self):
        num_classes = len(self.classes_)
        if isinstance(self.loss, str) and self.loss == "auto":
            return losses.logistic if num_classes == 2 else losses.softmax
        loss = find_loss(self.loss)
        bare = losses.bare_loss(loss)
        if bare is losses.softmax or not is_one_of(loss, losses.LOSSES.values()):
            return loss
        if not is_one_of(loss, _BINARY):
            raise ValueError(
                f"loss must be 'softmax' or one of {[*map(_name, _BINARY)]}, or a "
                f"function of your own, got {_name(bare)!r}"
            )
        if num_classes > 2:
            raise ValueError(
                f"loss must be 'softmax' or a function of {num_classes} scores for "
                f"{num_classes} classes, got {_name(bare)!r}, which is for two; or "
                "wrap the estimator in sklearn.multiclass.OneVsRestClassifier"
            )
        return loss

    @property
    def _num_scores(self):
        several = is_one_of(self._loss, [losses.softmax])
        return len(self.classes_) if several or len(self.classes_) > 2 else 1

    def _code(self, codes):
        """Classes as the loss wants them: 0, 1, ..., or -1 and 1."""
        signed = is_one_of(self._loss, _SIGNED)
        return (2 * codes - 1 if signed else codes).astype(np.int32)

    def _read_targets(self, y):
        y = _check_labels(y, "eval_set")
        codes = np.searchsorted(self.classes_, y).clip(0, len(self.classes_) - 1)
        unknown = self.classes_[codes] != y
        if unknown.any():
            raise ValueError(
                f"eval_set must hold the classes of y, {self.classes_}, got "
                f"{y[unknown][0]!r}"
            )
        return self._code(codes)


def _check_labels(y, name="y"):
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None")
    y = column_or_1d(y, warn=True)
    gap = find_gap(y) if y.dtype.kind == "O" else None  # scikit-learn checks floats
    if gap is not None:
        raise ValueError(
            f"{name} must hold a label in every row, got {y[gap]!r} in row {gap}"
        )
    check_classification_targets(y)
    return y


def _complete(probabilities):
    """Those of two classes, where there is that of the second."""
    if probabilities.ndim == 2:
        return probabilities
    return np.stack([1 - probabilities, probabilities], axis=1)


def _name(loss):
    return loss.__name__
