# SPDX-License-Identifier: Apache-2.0
"""The regressors: of numbers, and of distributions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from jboost import distributions, losses
from jboost.boosting.settings import declared, takes_settings
from jboost.entry.arguments import explain_arguments
from jboost.entry.checks import check_integer
from jboost.entry.messages import show
from jboost.model.predicting import predict
from jboost.sklearn.estimators import (
    Boosting,
    EstimatorSettings,
    check_rows,
    find_loss,
    read_targets,
    unite_sets,
)
from jboost.tables.targets import check_weights


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


# The built-in families, and their numbers of scores.
FAMILIES: Mapping[str, int] = MappingProxyType(
    dict(
        normal=2, student_t=3, laplace=2, log_normal=2, gamma=2, weibull=2, beta=2,
        negative_binomial=2, zero_inflated_poisson=2, normal_mixture=5,
    )
)  # fmt: skip


class JBoostDistribution(RegressorMixin, Boosting):
    """Gradient boosting of the parameters of a distribution.

    The hyperparameters are those of :func:`jboost.fit`, which explains them at
    length, and a few of scikit-learn's.

    Args:
      distribution: the name of a function of :mod:`jboost.distributions`, or a function
        that makes a distribution of the score of one row, see
        :func:`jboost.losses.likelihood`.
      num_scores: K, the scores of a row; None: that of the named family (of
        "normal_mixture", 5 for two components), or 1 for a function.
      {settings}

    Attributes:
      model_: the :class:`jboost.Ensemble`; ``get_booster()`` returns it as well.
      history_: the :class:`jboost.History`; ``evals_result_`` is the same as a dict.
      n_iter_, best_iteration_: rounds of the model; the best round, from 0.
      feature_importances_: shares of the improvement in likelihood.
      n_features_in_, feature_names_in_: the columns of X, as in scikit-learn.

    Example:
      >>> import numpy as np
      >>> from jboost.sklearn import JBoostDistribution
      >>> rng = np.random.default_rng(0)
      >>> X = rng.uniform(size=(200, 1))
      >>> y = X[:, 0] * rng.normal(size=200)
      >>> estimator = JBoostDistribution(num_rounds=20, max_depth=2).fit(X, y)
      >>> estimator.predict_quantiles(X, [0.05, 0.5, 0.95]).shape
      (200, 3)
      >>> estimator.predict_dist(X).scale.shape
      (200,)
    """

    distribution: str | Callable[..., Any]
    num_scores: int | None

    @explain_arguments
    @takes_settings
    def __init__(
        self,
        distribution: str | Callable[..., Any] = "normal",
        num_scores: int | None = None,
        **settings: Unpack[EstimatorSettings],
    ):
        self.distribution = distribution
        self.num_scores = num_scores
        for name, each in declared(EstimatorSettings).items():
            setattr(self, name, settings.get(name, each.default))

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
    ) -> "JBoostDistribution":
        """Trains on rows X and targets y [N]; see :meth:`JBoostRegressor.fit`.

        Args:
          offset: numbers [N, K] (or [N] for K = 1), added to the scores.
        """
        X = self._read_table(X, reset=True)
        targets = self._read_targets(y)
        check_rows(targets, X)
        self._make, num_scores = self._read_distribution()
        self._loss = losses.likelihood(self._make)
        rows = (X, targets, sample_weight, offset)
        sets = unite_sets(eval_set, eval_X, eval_y)
        return self._train(rows, sets, num_scores)

    def predict_dist(self, X: Any, *, offset: Any = None) -> Any:
        """Returns the distribution of each row, one object with an axis of rows.

        Args:
          X: rows with the columns of ``fit``.
          offset: the offset of these rows, with the shape of that of ``fit``.
        """
        check_is_fitted(self)
        X = self._read_table(X)
        return predict(self.model_, X, offset=offset, inverse_link=self._make)

    def predict(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns the mean of each row's distribution, [N].

        An ``inverse_link`` other than "auto" replaces the mean.
        """
        return self._score_rows(X, offset, self._link)

    def staged_predict(self, X: Any, *, offset: Any = None) -> Iterator[np.ndarray]:
        """The predictions after each round, one by one."""
        yield from self._score_stages(X, offset, self._link)

    def predict_quantiles(
        self,
        X: Any,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
        *,
        offset: Any = None,
    ) -> np.ndarray:
        """Returns quantiles of each row's distribution, [N, Q].

        Args:
          X: rows with the columns of ``fit``.
          quantiles: Q numbers in (0, 1).
          offset: the offset of these rows, with the shape of that of ``fit``.

        Raises:
          ValueError: a number is not in (0, 1).
        """
        shares = np.atleast_1d(np.asarray(quantiles, np.float32))
        if shares.ndim != 1 or not ((shares > 0) & (shares < 1)).all():
            raise ValueError(
                f"quantiles must be numbers in (0, 1), got {show(quantiles)}"
            )
        found = self.predict_dist(X, offset=offset)
        find = getattr(found, "icdf", None) or found.quantile
        return np.stack([np.asarray(find(jnp.float32(q))) for q in shares], axis=1)

    def score(
        self, X: Any, y: Any, sample_weight: Any = None, *, offset: Any = None
    ) -> float:
        """Returns the mean log-likelihood of the targets; larger is better."""
        targets = self._read_targets(y)
        check_rows(targets, X)
        weights = sample_weight
        if weights is not None:
            weights = check_weights(weights, len(targets), "sample_weight")
        targets = jnp.asarray(targets, jnp.float32)
        found = self.predict_dist(X, offset=offset).log_prob(targets)
        return float(np.average(np.asarray(found, float), weights=weights))

    @property
    def _link(self) -> Any:
        if not isinstance(self.inverse_link, str) or self.inverse_link != "auto":
            return super()._link
        return self._find_mean

    @property
    def _metric_link(self) -> Any:
        return self._link

    def _find_mean(self, score):
        mean = self._make(score).mean
        return mean() if callable(mean) else mean

    def _read_distribution(self):
        """Returns the function that makes a distribution, and K."""
        make, num_scores = self.distribution, self.num_scores
        if isinstance(make, str):
            if make not in FAMILIES:
                raise ValueError(
                    "distribution must be a function of a score, or one of "
                    f"{', '.join(map(repr, FAMILIES))}, got {show(make)}"
                )
            known = FAMILIES[make]
            make = getattr(distributions, make)
        else:
            built_in = [
                name for name in FAMILIES if make is getattr(distributions, name)
            ]
            known = FAMILIES[built_in[0]] if built_in else 1
        if num_scores is None:
            return make, known
        return make, check_integer("num_scores", num_scores, least=1)

    def __sklearn_tags__(self):
        """Declares that ``score`` is a log-likelihood, which may be negative."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags
