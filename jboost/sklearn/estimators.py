# SPDX-License-Identifier: Apache-2.0
"""What the estimators of :mod:`jboost.sklearn` share.

In: tables as scikit-learn passes them around, and hyper-parameters as attributes. Out:
arguments of ``fit``, and attributes that say what came of it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Array
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from jboost import losses
from jboost.boosting.rounds import Regularization
from jboost.entry.arguments import explain_arguments, hint_argument
from jboost.entry.checks import check_link, check_number
from jboost.explanation.importance import feature_importance
from jboost.model.ensemble import Ensemble
from jboost.model.predicting import leaf_indices, predict, staged_predict
from jboost.objective.curvature import Curvature
from jboost.tables.frames import is_table, refuse_batches
from jboost.tables.sparse import Absent
from jboost.training.fitting import fit
from jboost.training.history import History
from jboost.training.scoring import By, Metrics, bind_metrics, check_metrics, read_by
from jboost.trees.candidates import Candidates, CandidateWeights
from jboost.trees.category_splits import (
    CATEGORY_L2,
    CATEGORY_SMOOTHING,
    MAX_ONEHOT,
    MIN_CATEGORY_WEIGHT,
)
from jboost.trees.leaves import LeafSolver

# The hyper-parameters that go to ``fit`` as they are.
_PASSED = (
    "num_rounds", "learning_rate", "max_depth", "max_bins", "absent", "l1", "l2",
    "max_delta_step", "min_gain", "min_child_weight", "min_child_samples",
    "regularization", "subsample", "colsample_bytree", "colsample_bylevel",
    "colsample_bynode", "max_leaves", "monotone", "interactions", "candidates",
    "candidate_weights", "categorical", "category_l2", "category_smoothing",
    "min_category_weight", "max_onehot", "curvature", "leaf_solver", "init_score",
    "early_stopping_rounds", "by", "callbacks", "progress", "implementation",
)  # fmt: skip
_CONTAINERS = "(X, y), (X, y, sample_weight) or (X, y, sample_weight, offset)"


class Boosting(BaseEstimator):
    """Training and prediction, but for what targets and scores mean."""

    model_: Ensemble
    history_: History
    _loss: Any  # a function; of one output, where there are several

    @explain_arguments
    def __init__(
        self,
        loss: str | Callable[..., Any] | losses.Adaptive = "auto",
        *,
        num_rounds: int = 100,
        learning_rate: Any = 0.1,
        max_depth: int = 6,
        max_bins: int = 256,
        absent: Absent | None = "zero",
        l1: float = 0.0,
        l2: float = 1.0,
        max_delta_step: float = float("inf"),
        min_gain: float = 0.0,
        min_child_weight: float = 1.0,
        min_child_samples: Any = "auto",
        regularization: Regularization = "relative",
        subsample: float = 1.0,
        colsample_bytree: float = 1.0,
        colsample_bylevel: float = 1.0,
        colsample_bynode: float = 1.0,
        max_leaves: int | None = None,
        monotone: Any = None,
        interactions: Any = None,
        candidates: Candidates = "global",
        candidate_weights: CandidateWeights = "samples",
        categorical: Any = "auto",
        category_l2: float = CATEGORY_L2,
        category_smoothing: float = CATEGORY_SMOOTHING,
        min_category_weight: float = MIN_CATEGORY_WEIGHT,
        max_onehot: int = MAX_ONEHOT,
        curvature: Curvature = "auto",
        leaf_solver: LeafSolver = "auto",
        init_score: Any = "auto",
        early_stopping_rounds: int | None = None,
        validation_fraction: float = 0.1,
        inverse_link: Any = "auto",
        metrics: Metrics = None,
        by: By = None,
        callbacks: Any = (),
        progress: bool = False,
        random_state: Any = 0,
        implementation: str | None = None,
    ):
        self.loss = loss
        self.num_rounds = num_rounds
        self.learning_rate = learning_rate
        self.max_depth = max_depth
        self.max_bins = max_bins
        self.absent = absent
        self.l1 = l1
        self.l2 = l2
        self.max_delta_step = max_delta_step
        self.min_gain = min_gain
        self.min_child_weight = min_child_weight
        self.min_child_samples = min_child_samples
        self.regularization = regularization
        self.subsample = subsample
        self.colsample_bytree = colsample_bytree
        self.colsample_bylevel = colsample_bylevel
        self.colsample_bynode = colsample_bynode
        self.max_leaves = max_leaves
        self.monotone = monotone
        self.interactions = interactions
        self.candidates = candidates
        self.candidate_weights = candidate_weights
        self.categorical = categorical
        self.category_l2 = category_l2
        self.category_smoothing = category_smoothing
        self.min_category_weight = min_category_weight
        self.max_onehot = max_onehot
        self.curvature = curvature
        self.leaf_solver = leaf_solver
        self.init_score = init_score
        self.early_stopping_rounds = early_stopping_rounds
        self.validation_fraction = validation_fraction
        self.inverse_link = inverse_link
        self.metrics = metrics
        self.by = by
        self.callbacks = callbacks
        self.progress = progress
        self.random_state = random_state
        self.implementation = implementation

    def set_params(self, **params: Any) -> "Boosting":
        """Sets hyper-parameters, as everywhere in scikit-learn."""
        for name in params:
            if name.partition("__")[0] not in self._get_param_names():
                hint = hint_argument(name, self._get_param_names())
                raise ValueError(
                    f"{type(self).__name__} has no hyper-parameter {name!r}{hint}"
                )
        return super().set_params(**params)

    def get_booster(self) -> Ensemble:
        """The trained model, a pytree that the functions of :mod:`jboost` take."""
        check_is_fitted(self)
        return self.model_

    def apply(self, X: Any) -> np.ndarray:
        """The leaf of each row in each tree, [N, R] or [N, R, K]."""
        check_is_fitted(self)
        return np.asarray(leaf_indices(self.model_, self._read_table(X)))

    @property
    def n_iter_(self) -> int:
        """How many rounds the model has."""
        check_is_fitted(self)
        return self.model_.num_rounds

    @property
    def best_iteration_(self) -> int:
        """The best round (from 0) on the first validation set, or the last."""
        check_is_fitted(self)
        return self.history_.best_round

    @property
    def evals_result_(self) -> dict[str, dict[str, np.ndarray]]:
        """{set: {"loss" or metric: value after each round}}, as in other libraries."""
        history = self.history_
        found = {"train": {"loss": history.train_loss}}
        by_set = history.validation_loss
        if by_set is not None:
            named = by_set if isinstance(by_set, dict) else {"validation": by_set}
            found |= {name: {"loss": values} for name, values in named.items()}
        measured = history.metrics
        return {name: part | measured.get(name, {}) for name, part in found.items()}

    @property
    def feature_importances_(self) -> np.ndarray:
        """Shares of the improvement, [F]; see :func:`jboost.feature_importance`."""
        check_is_fitted(self)
        values = feature_importance(self.model_).values
        total = values.sum()
        return values / total if total > 0 else values

    def _train(self, X, targets, weights, offset, eval_set, loss, num_scores, labels):
        """Runs ``fit``; ``labels`` are what a random split is to keep the shares of."""
        check_link(self._link, () if num_scores == 1 else (num_scores,), single=True)
        seed = self._draw_seed()
        rows: Any = (X, targets, weights, offset)
        validation = self._check_sets(eval_set)
        if validation is None and self.early_stopping_rounds is not None:
            rows, validation = self._split_rows(rows, labels, seed)
        X, targets, weights, offset = rows
        passed: dict[str, Any] = {name: getattr(self, name) for name in _PASSED}
        _, metrics = read_by(self.by, check_metrics(self.metrics))
        link = "auto" if isinstance(self.inverse_link, str) else self.inverse_link
        if num_scores > 1 and loss is not self._loss:  # a sum over outputs
            link = self._link
        metrics = bind_metrics(metrics, self._loss, num_scores, link)
        self.model_, self.history_ = fit(
            X, targets, loss, sample_weight=weights, offset=offset,
            validation=validation, num_scores=num_scores, seed=seed, metrics=metrics,
            **passed,
        )  # fmt: skip
        return self

    def _draw_seed(self):
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _split_rows(self, rows, labels, seed):
        """Training and validation rows, drawn at random."""
        check_number(
            "validation_fraction", self.validation_fraction, above=0.0, most=1 - 1e-9
        )
        places = np.arange(len(rows[1]))
        parts = train_test_split(
            places, test_size=self.validation_fraction, random_state=seed,
            stratify=labels,
        )  # fmt: skip
        kept, held = (
            tuple(None if a is None else _safe_indexing(a, part) for a in rows)
            for part in parts
        )
        return kept, held

    def _check_sets(self, eval_set):
        """One set or a dict of sets, with targets as the loss takes them."""
        if eval_set is None:
            return None
        if isinstance(eval_set, dict):
            sets = eval_set
        elif isinstance(eval_set, list):
            sets = {f"validation_{i}": part for i, part in enumerate(eval_set)}
        else:
            return self._check_set(eval_set)
        return {name: self._check_set(part) for name, part in sets.items()}

    def _check_set(self, part):
        if not isinstance(part, tuple) or not 2 <= len(part) <= 4:
            raise ValueError(
                f"eval_set must be {_CONTAINERS}, a list of such or a dict of such by "
                f"name, got {part!r}"
            )
        X, y, *rest = part
        return (X, self._read_targets(y), *rest)

    def _read_targets(self, y) -> Any:
        """Targets of a validation set as training takes them."""
        raise NotImplementedError

    def _read_table(self, X, *, reset=False) -> Any:
        """X as ``fit`` and ``predict`` take it; its features as scikit-learn counts."""
        refuse_batches(X, "X")
        if is_table(X):
            validate_data(self, X, reset=reset, skip_check_array=True)
            return X
        return validate_data(
            self, X, reset=reset, accept_sparse=True, ensure_all_finite=False,
            ensure_min_samples=1 if reset else 0,
        )  # fmt: skip

    def _score_rows(self, X, offset=None, inverse_link=None) -> np.ndarray:
        check_is_fitted(self)
        X = self._read_table(X)
        found = predict(self.model_, X, offset=offset, inverse_link=inverse_link)
        return np.asarray(found)

    def _score_stages(self, X, offset=None, inverse_link=None) -> Iterator[np.ndarray]:
        check_is_fitted(self)
        X = self._read_table(X)
        yield from np.asarray(
            staged_predict(self.model_, X, offset=offset, inverse_link=inverse_link)
        )

    @property
    def _link(self) -> Callable[[Array], Array] | None:
        """What is given, or else what the loss implies; known when there is a model."""
        if isinstance(self.inverse_link, str):
            if self.inverse_link != "auto":
                raise ValueError(
                    "inverse_link must be 'auto', None or a function of a score, got "
                    f"{self.inverse_link!r}"
                )
            return losses.inverse_link(getattr(self, "_loss", None))
        return self.inverse_link

    def __sklearn_tags__(self):
        """Missing values and sparse matrices are welcome."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags


def is_one_of(loss: Any, known: Iterable[Any]) -> bool:
    """Whether it is one of the functions, its parameters bound or not."""
    bare = losses.bare_loss(loss)
    return any(bare is each for each in known)


def find_loss(loss: Any) -> Any:
    """A function, from its name or itself."""
    if not isinstance(loss, str):
        return loss
    if loss not in losses.LOSSES:
        raise ValueError(
            f"loss must be 'auto', one of {tuple(losses.LOSSES)}, or a function, got "
            f"{loss!r}{losses.suggest_loss(loss, repr('{}'))}"
        )
    return losses.LOSSES[loss]
