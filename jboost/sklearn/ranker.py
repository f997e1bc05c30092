# SPDX-License-Identifier: Apache-2.0
"""The ranker: orders the rows of each query; the greatest score comes first."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jboost.boosting.groups import ValidationRows
from jboost.entry.arguments import explain_arguments
from jboost.entry.messages import show
from jboost.losses import GROUP_LOSSES, concordance, cox
from jboost.losses.groups import check_relevances
from jboost.metrics import ndcg
from jboost.numerics.arrays import number_ids, read_ids
from jboost.sklearn.estimators import (
    Boosting,
    check_rows,
    find_loss,
    read_targets,
    unite_sets,
)
from jboost.tables.frames import read_values
from jboost.tables.groups import check_group_weights, make_groups
from jboost.tables.targets import check_weights
from jboost.training.metrics import GroupMetric

_DEFAULT_LOSS = "listwise_softmax"
# Losses that take one number per row as the target, not times and events.
_LOSSES = {
    name: loss for name, loss in GROUP_LOSSES.items() if loss not in (concordance, cox)
}


class JBoostRanker(Boosting):
    """Gradient boosting of any loss of a group of rows, as a ranker.

    The hyperparameters are those of :func:`jboost.fit`, which explains them at
    length, and a few of scikit-learn's.

    Args:
      loss: "auto" (:func:`jboost.losses.listwise_softmax`), the name of a loss of
        groups in :mod:`jboost.losses` ("lambda_rank", "pairwise_logistic", ...), or
        ``loss(scores, targets, *, where)`` of the rows of one query.
      {settings}

    Attributes:
      model_: the :class:`jboost.Ensemble`; ``get_booster()`` returns it as well.
      history_: the :class:`jboost.History`; ``evals_result_`` is the same as a dict.
      n_iter_, best_iteration_: rounds of the model; the best round, from 0.
      feature_importances_: shares of the improvement in squared error.
      n_features_in_, feature_names_in_: the columns of X, as in scikit-learn.

    Example:
      >>> import numpy as np
      >>> from jboost.sklearn import JBoostRanker
      >>> X = np.arange(40.0)[:, None] % 10
      >>> y, qid = X[:, 0] // 4, np.arange(40) // 10
      >>> ranker = JBoostRanker(num_rounds=20).fit(X, y, qid=qid)
      >>> round(ranker.score(X, y, qid=qid), 3)
      1.0
    """

    @explain_arguments
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        qid: Any = None,
        group: Any = None,
        offset: Any = None,
        eval_set: Any = None,
        eval_X: Any = None,
        eval_y: Any = None,
        eval_qid: Any = None,
        eval_group: Any = None,
    ) -> "JBoostRanker":
        """Trains on rows X with relevance y.

        Args:
          X, eval_set, eval_X, eval_y: arguments of :meth:`JBoostRegressor.fit`.
          y: the relevance of each row [N], the greater the better.
          sample_weight: weights of the rows [N], or of the queries in the order of
            their first rows, as in XGBoost.
          qid: the query of each row [N], in any order.
          group: instead of ``qid``: the numbers of rows of consecutive queries, as in
            LightGBM.
          offset: numbers [N], added to the score; pass one to ``predict`` as well.
          eval_qid, eval_group: queries of each set, in a container like ``eval_set``.

        Returns:
          The estimator.

        Raises:
          TypeError, ValueError: for bad arguments, before training.
        """
        X = self._read_table(X, reset=True)
        targets = self._read_targets(y)
        check_rows(targets, X)
        queries = read_queries(qid, group, len(targets), "")
        weights = _expand_weights(sample_weight, queries)
        auto = isinstance(self.loss, str) and self.loss == "auto"
        loss = _DEFAULT_LOSS if auto else self.loss
        self._loss = find_loss(loss, _LOSSES)
        sets = unite_sets(eval_set, eval_X, eval_y)
        sets = _join_queries(sets, eval_qid, eval_group)
        rows = (X, targets, weights, offset)
        return self._train(rows, sets, 1, queries)

    def predict(self, X: Any, *, offset: Any = None) -> np.ndarray:
        """Returns the scores of the rows, float32 [N]; they need no query.

        Args:
          X: rows with the columns of ``fit``.
          offset: the offset of these rows [N].
        """
        return self._score_rows(X, offset)

    def staged_predict(self, X: Any, *, offset: Any = None) -> Iterator[np.ndarray]:
        """The scores after each round, one by one."""
        yield from self._score_stages(X, offset)

    def score(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        qid: Any = None,
        group: Any = None,
        offset: Any = None,
    ) -> float:
        """Returns the mean NDCG of the queries, those without relevant rows left out.

        Args:
          X, y, sample_weight, qid, group, offset: the same as for ``fit``.
        """
        targets = self._read_targets(y)
        check_rows(targets, X)
        queries = read_queries(qid, group, len(targets), "")
        weights = _expand_weights(sample_weight, queries)
        weights = np.ones(len(targets)) if weights is None else weights
        weights = check_weights(weights, len(targets), "sample_weight")
        check_relevances(targets, weights > 0, "y")
        groups = make_groups(queries)
        check_group_weights(groups, weights, "sample_weight", "for a mean over queries")
        scores = self.predict(X, offset=offset)
        return GroupMetric(ndcg)(scores, targets.astype(np.float32), weights, groups)

    def _read_targets(self, y, name="y"):
        return read_targets(y, name, finite=False)  # a custom loss may take all


def read_queries(qid: Any, group: Any, num_rows: int, prefix: str) -> np.ndarray:
    """Returns the number of each row's query, in order of appearance.

    Args:
      qid: the query of each row [N]; None if ``group`` is given.
      group: the sizes of consecutive queries; None if ``qid`` is given.
      prefix: the prefix of both names in errors.
    """
    if (qid is None) == (group is None):
        got = "none" if qid is None else "both"
        raise ValueError(
            f"{prefix}qid (the query of each row) or {prefix}group (the sizes of "
            f"consecutive queries) must be given, got {got}"
        )
    if qid is not None:
        ids = read_ids(qid, f"{prefix}qid")
        if len(ids) != num_rows:
            raise ValueError(
                f"{prefix}qid must be an id for each of the {num_rows} rows, got "
                f"{len(ids)}"
            )
        return number_ids(ids)[0]
    sizes = np.asarray(group)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 1).any():
        raise ValueError(
            f"{prefix}group must be the sizes of consecutive queries, integers >= 1, "
            f"got {show(sizes)}"
        )
    if sizes.sum() != num_rows:
        raise ValueError(
            f"{prefix}group must sum to the {num_rows} rows, got {sizes.sum()}"
        )
    return np.repeat(np.arange(len(sizes)), sizes)


def _expand_weights(weights, queries, name="sample_weight"):
    """Returns weights of rows, where they may be those of queries."""
    if weights is None:
        return None
    weights, count = np.asarray(read_values(weights, name)), queries.max() + 1
    if weights.ndim != 1 or len(weights) not in (len(queries), count):
        raise ValueError(
            f"{name} must have one entry for each of the {len(queries)} rows or of the "
            f"{count} queries, got shape {weights.shape}"
        )
    return weights if len(weights) == len(queries) else weights[queries]


def _join_queries(eval_set, qid, group):
    """Returns validation sets with the queries of their rows as the fifth part."""
    given = {"eval_qid": qid, "eval_group": group}
    if eval_set is None:
        for name, container in given.items():
            if container is not None:
                raise ValueError(f"{name} must be None without eval_set")
        return None
    if not isinstance(eval_set, dict | list):
        return _join(eval_set, qid, group)
    for name, container in given.items():
        _check_container(name, container, eval_set)
    keys = eval_set if isinstance(eval_set, dict) else range(len(eval_set))
    parts = {
        key: _join(eval_set[key], *(each and each[key] for each in given.values()))
        for key in keys
    }
    return parts if isinstance(eval_set, dict) else [*parts.values()]


def _check_container(name, container, eval_set):
    """Checks that queries are given as the sets of rows are."""
    if container is None:
        return
    if isinstance(eval_set, dict):
        if not isinstance(container, dict) or container.keys() != eval_set.keys():
            got = (
                [*container]
                if isinstance(container, dict)
                else type(container).__name__
            )
            raise ValueError(
                f"{name} must be a dict with the names of eval_set, {[*eval_set]}, got "
                f"{got}"
            )
    elif not isinstance(container, list | tuple) or len(container) != len(eval_set):
        sized = isinstance(container, list | tuple)
        got = len(container) if sized else type(container).__name__
        raise ValueError(
            f"{name} must be a list with one entry for each of the {len(eval_set)} "
            f"sets of eval_set, got {got}"
        )


def _join(part, qid, group):
    """Returns the parts of one set; a malformed one is refused by ``fit``."""
    if not isinstance(part, tuple) or not 2 <= len(part) <= 4 or part[1] is None:
        return part
    X, y, weights, offset = (*part, None, None)[:4]
    y = read_targets(y, "eval_set", finite=False)
    queries = read_queries(qid, group, len(y), "eval_")
    weights = _expand_weights(weights, queries, "eval_set sample_weight")
    return ValidationRows(X, y, weights, offset, queries)
