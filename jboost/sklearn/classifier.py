# SPDX-License-Identifier: Apache-2.0
"""The classifier: probabilities and a label, or K labels, for each row.

Labels are [N], or indicators [N, K]. Probabilities exist where the loss implies them.
"""

from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
from scipy.sparse import issparse
from sklearn.base import ClassifierMixin
from sklearn.utils import check_array, column_or_1d, compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from jboost import losses
from jboost.boosting.settings import takes_settings
from jboost.entry.arguments import explain_arguments
from jboost.entry.checks import as_array, refuse_mask
from jboost.entry.messages import show
from jboost.sklearn.estimators import (
    Boosting,
    EstimatorSettings,
    check_rows,
    find_loss,
    refuse_none,
    unite_sets,
)
from jboost.tables.groups import find_gap
from jboost.tables.targets import check_weights
from jboost.training.metrics import is_one_of

_SIGNED = (losses.exponential, losses.hinge, losses.hinge_squared)  # -1 and 1
_NUMBERS = (bool, int, float, np.bool_, np.number)
_BINARY = (losses.logistic, losses.focal, *_SIGNED)


def _gives_probabilities(classifier):
    """Returns whether scores have an inverse link that makes them probabilities."""
    if not isinstance(classifier.inverse_link, str):
        return classifier.inverse_link is not None
    loss = classifier.loss
    if isinstance(loss, str):
        loss = losses.logistic if loss == "auto" else losses.LOSSES.get(loss)
    return losses.inverse_link(loss) is not None


class JBoostClassifier(ClassifierMixin, Boosting):
    """Gradient boosting of any differentiable loss, as a classifier.

    The hyperparameters are those of :func:`jboost.fit`, which explains them at
    length, and a few of scikit-learn's.

    Args:
      loss: "auto" (``logistic`` for two classes, ``softmax`` for more); the name of a
        loss of :mod:`jboost.losses` or the function: ``softmax`` for any number of
        classes, ``logistic``, ``focal``, ``exponential``, ``hinge`` and
        ``hinge_squared`` for two; or a function of your own, ``loss(score, target)`` of
        one row, where target is 0 or 1, and for K > 2 classes a number below K beside
        K scores. For several labels, a loss for two classes is summed over them; a
        function of your own gets K scores and K indicators.
      class_weight: factors of the ``sample_weight`` of training rows: {label: weight},
        or "balanced": N / (K rows of the class). Sets of ``eval_set`` have weights of
        their own. {0: 1, 1: w} is XGBoost's ``scale_pos_weight=w``.
      {settings}

    Without an ``inverse_link`` there is no ``predict_proba``.

    Attributes:
      classes_: the labels, sorted; 0 to K - 1 for indicators of K labels.

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
    class_weight: Any
    _several: bool  # whether a row has several labels

    @explain_arguments
    @takes_settings
    def __init__(
        self,
        loss: str | Callable[..., Any] | losses.Adaptive = "auto",
        *,
        class_weight: Any = None,
        **settings: Unpack[EstimatorSettings],
    ):
        super().__init__(loss, **settings)
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
        eval_X: Any = None,
        eval_y: Any = None,
    ) -> "JBoostClassifier":
        """Trains on rows X and labels y; see :meth:`JBoostRegressor.fit`.

        Args:
          X: numbers [N, F], NaN = missing: an array, a data frame, a sparse matrix.
          y: labels [N] of at least two classes; or several labels per row, as
            indicators [N, K] of 0 and 1 (also a sparse matrix), NaN where unknown.
          sample_weight, offset, eval_set, eval_X, eval_y: the same as for a regressor.

        Returns:
          The estimator.

        Raises:
          TypeError, ValueError: an argument is invalid; training has not begun.
        """
        X = self._read_table(X, reset=True)
        sets = unite_sets(eval_set, eval_X, eval_y)
        self._several = _has_columns(y)
        if self._several:
            return self._fit_indicators(X, y, sample_weight, offset, sets)
        y = _check_labels(y)
        check_rows(y, X)
        self.classes_, codes = np.unique(y, return_inverse=True)
        weights, counted = sample_weight, codes
        if weights is not None:
            weights = check_weights(weights, len(y), "sample_weight")
            counted = codes[np.asarray(weights > 0)]
        if len(np.unique(counted)) < 2:
            raise ValueError(
                "y must hold at least two classes in rows of positive weight, got one "
                f"class, {show(self.classes_[counted[0]])}"
            )
        self._loss = self._choose_loss()
        if self.class_weight is not None:
            factors = compute_sample_weight(self.class_weight, y)
            weights = factors if weights is None else factors * weights
        rows = (X, self._code(codes), weights, offset)
        return self._train(rows, sets, self._num_scores)

    def _fit_indicators(self, X, y, weights, offset, sets):
        y = _check_indicators(y)
        check_rows(y, X)
        if self.class_weight is not None:
            raise ValueError(
                "class_weight must be None for several labels in a row, got "
                f"{show(self.class_weight)}; pass sample_weight"
            )
        self.classes_ = np.arange(y.shape[1])
        self._loss = self._choose_loss()
        rows = (X, self._code(y), weights, offset)
        return self._train(rows, sets, y.shape[1])

    def decision_function(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns raw scores: [N], above 0 for the second class, or [N, K].

        With several labels per row, the score of a label is above 0 where it applies.
        """
        return self._score_rows(X, offset)

    def staged_decision_function(
        self, X: Any, *, offset: Any = None
    ) -> Iterator[np.ndarray]:
        """Yields the scores after each round."""
        yield from self._score_stages(X, offset)

    @available_if(_gives_probabilities)
    def predict_proba(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns probabilities [N, classes], by the loss's link.

        With several labels per row, there is one probability for each label, as from
        scikit-learn's ``OneVsRestClassifier``.
        """
        return _complete(self._score_rows(X, offset, self._link))

    @available_if(_gives_probabilities)
    def predict_log_proba(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns the logarithms of the probabilities."""
        return np.log(self.predict_proba(X, offset=offset))

    @available_if(_gives_probabilities)
    def staged_predict_proba(
        self, X: Any, *, offset: Any = None
    ) -> Iterator[np.ndarray]:
        """Yields the probabilities after each round."""
        yield from map(_complete, self._score_stages(X, offset, self._link))

    def predict(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns the label of the largest score; of two classes, the second above 0.

        With several labels per row, these are indicators [N, K]. An ``inverse_link`` of
        your own gives the label of the largest probability.
        """
        return self._find_labels(self._score_rows(X, offset, self._own_link))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns the share of rows with the right label, or with all labels right."""
        y = y if _has_columns(y) else _check_labels(y)
        return super().score(X, y, sample_weight)

    def staged_predict(self, X: Any, *, offset: Any = None) -> Iterator[np.ndarray]:
        """Yields the predicted labels after each round."""
        stages = self._score_stages(X, offset, self._own_link)
        yield from map(self._find_labels, stages)

    @property
    def _own_link(self):
        return None if isinstance(self.inverse_link, str) else self.inverse_link

    def _find_labels(self, found):
        """Returns labels from scores, or from probabilities if the user gave a link."""
        second = (found > (0 if self._own_link is None else 0.5)).astype(int)
        if self._several:
            return second
        if found.ndim == 2:
            return self.classes_[found.argmax(axis=1)]
        return self.classes_[second]

    def _choose_loss(self):
        num_classes = 2 if self._several else len(self.classes_)
        if isinstance(self.loss, str) and self.loss == "auto":
            return losses.logistic if num_classes == 2 else losses.softmax
        loss = find_loss(self.loss)
        bare = losses.bare_loss(loss)
        if not is_one_of(loss, losses.LOSSES.values()):
            return loss
        if bare is losses.softmax and not self._several:
            return loss
        if not is_one_of(loss, _BINARY):
            softmax = "" if self._several else "'softmax' or "
            raise ValueError(
                f"loss must be {softmax}one of {[*map(_name, _BINARY)]}, or a "
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
        """Returns classes as the loss expects them: 0, 1, ..., or -1 and 1."""
        codes = 2 * codes - 1 if is_one_of(self._loss, _SIGNED) else codes
        return codes.astype(np.float32 if self._several else np.int32)

    def _read_targets(self, y, name="y"):
        if self._several:
            return self._code(_check_indicators(y, name))
        y = _check_labels(y, name)
        codes = np.searchsorted(self.classes_, y).clip(0, len(self.classes_) - 1)
        unknown = self.classes_[codes] != y
        if unknown.any():
            raise ValueError(
                f"{name} must hold the classes of y, {self.classes_}, got "
                f"{y[unknown].tolist()[0]!r}"
            )
        return self._code(codes)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


def _has_columns(y):
    if isinstance(y, list):
        y = as_array(y, "y must hold a label for each row")
    shape = getattr(y, "shape", ())
    return len(shape) == 2 and shape[1] > 1


def _check_indicators(y, name="y"):
    y = refuse_mask(y, name)
    given = check_array(y, accept_sparse=True, ensure_all_finite=False, input_name=name)
    found = np.asarray(given.toarray() if issparse(given) else given, np.float32)
    bad = ~(np.isnan(found) | (found == 0) | (found == 1))
    if bad.any():
        row = int(np.argmax(bad.any(axis=1)))
        raise ValueError(
            f"{name} of several columns must hold indicators of labels, 0 and 1 or NaN "
            f"where unknown, got {found[row].tolist()} in row {row}; for several "
            "targets of many classes use sklearn.multioutput.MultiOutputClassifier"
        )
    return found


def _check_labels(y, name="y"):
    """Returns labels [N]: one in every row, all of one kind."""
    refuse_none(y)
    y = column_or_1d(refuse_mask(y, name), warn=True)
    if y.dtype.kind == "O":  # scikit-learn checks floats
        gap = find_gap(y)
        if gap is not None:
            raise ValueError(
                f"{name} must hold a label in every row, got {show(y[gap])} in row "
                f"{gap}"
            )
        y = _narrow_labels(y, name)
    check_classification_targets(y)
    return y


def _narrow_labels(y, name):
    """Converts objects that are all booleans, or all numbers, to a dtype of these."""
    kinds = {type(label): label for label in y.tolist()}
    booleans = {issubclass(kind, bool | np.bool_) for kind in kinds}
    if all(issubclass(kind, str) for kind in kinds):
        return y
    if len(booleans) == 1 and all(issubclass(kind, _NUMBERS) for kind in kinds):
        return np.array(y.tolist())
    raise ValueError(
        f"{name} must hold labels of one kind, strings, booleans or numbers, got "
        f"{', '.join(map(repr, kinds.values()))}"
    )


def _complete(probabilities):
    """Returns the probabilities of both classes [N, 2] from that of the second [N]."""
    if probabilities.ndim == 2:
        return probabilities
    return np.stack([1 - probabilities, probabilities], axis=1)


def _name(loss):
    return loss.__name__
