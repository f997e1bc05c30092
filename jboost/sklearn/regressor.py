# SPDX-License-Identifier: Apache-2.0
"""The regressor: a number or K numbers for each row."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin

from jboost.entry.arguments import explain_arguments
from jboost.sklearn.estimators import (
    Boosting,
    check_rows,
    find_loss,
    read_targets,
    unite_sets,
)


class JBoostRegressor(RegressorMixin, Boosting):
    """Gradient boosting of any differentiable loss, as a regressor.

    The hyperparameters are those of :func:`jboost.fit`, which explains them at
    length, and a few of scikit-learn's.

    Args:
      loss: "auto" (squared error), the name of a function of :mod:`jboost.losses`, or
        ``loss(score, target)`` of one row; bind parameters by ``functools.partial``,
        ``partial(jb.losses.quantile, tau=0.9)``. For targets [N, K] a loss of
        :mod:`jboost.losses` is summed over the K, where NaN marks a target as missing;
        a function of your own gets K scores.
      {settings}

    Attributes:
      model_: the :class:`jboost.Ensemble`; ``get_booster()`` returns it as well.
      history_: the :class:`jboost.History`; ``evals_result_`` is the same as a dict.
      n_iter_, best_iteration_: rounds of the model; the best round, from 0.
      feature_importances_: shares of the improvement in squared error.
      n_features_in_, feature_names_in_: the columns of X, as in scikit-learn.

    Example:
      >>> import numpy as np
      >>> from jboost.sklearn import JBoostRegressor
      >>> X = np.arange(400.0)[:, None]
      >>> regressor = JBoostRegressor(num_rounds=50).fit(X, np.sqrt(X[:, 0]))
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
        eval_X: Any = None,
        eval_y: Any = None,
    ) -> "JBoostRegressor":
        """Trains on rows X and targets y.

        Args:
          X: numbers [N, F], NaN = missing: an array, a data frame, a sparse matrix.
          y: [N], or [N, K] for K outputs.
          sample_weight: row weights, >= 0.
          offset: [N] or [N, K], added to the score (a base margin); must be passed to
            ``predict`` as well.
          eval_set: (X, y), (X, y, sample_weight) or (X, y, sample_weight, offset); a
            list of such, named "validation_0", ...; or a dict of such by name. Early
            stopping uses the first.
          eval_X, eval_y: a single set in two arguments;
            ``Pipeline(transform_input=["eval_X"])`` transforms its table like X.

        Returns:
          The estimator.

        Raises:
          TypeError, ValueError: an argument is invalid; training has not begun.
        """
        X = self._read_table(X, reset=True)
        targets = self._read_targets(y)
        check_rows(targets, X)
        self._loss = find_loss("squared_error" if self.loss == "auto" else self.loss)
        num_scores = 1 if targets.ndim == 1 else targets.shape[1]
        rows = (X, targets, sample_weight, offset)
        sets = unite_sets(eval_set, eval_X, eval_y)
        return self._train(rows, sets, num_scores)

    def predict(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns predictions: float32 [N], or float64 [N, K] for K outputs.

        Args:
          X: a table as for ``fit``, with the same columns.
          offset: the offset of these rows, as for ``fit``.
        """
        return _widen(self._score_rows(X, offset, self._link))

    def staged_predict(self, X: Any, *, offset: Any = None) -> Iterator[np.ndarray]:
        """Yields the predictions after each round."""
        yield from map(_widen, self._score_stages(X, offset, self._link))

    def _read_targets(self, y, name="y"):
        return read_targets(y, name, several=True)  # NaN: missing, or of a custom loss

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _widen(predictions):
    return predictions.astype(np.float64) if predictions.ndim == 2 else predictions
