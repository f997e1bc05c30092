# SPDX-License-Identifier: Apache-2.0
"""The base class of the estimators, and the search of their hyperparameters."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import numpy as np
from jaxtyping import Array
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_classifier
from sklearn.utils import check_array, check_random_state, column_or_1d, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data

from jboost import losses
from jboost.boosting.settings import (
    HoldOutSettings,
    Setting,
    StudySettings,
    declared,
    explain_settings,
    takes_settings,
)
from jboost.entry.arguments import (
    explain_arguments,
    hint_argument,
    hint_loss,
    rename_twins,
)
from jboost.entry.checks import (
    as_array,
    check_integer,
    check_link,
    fill_mask,
    refuse_mask,
)
from jboost.entry.messages import show
from jboost.explanation.importance import feature_importance
from jboost.model.ensemble import Ensemble
from jboost.model.predicting import leaf_indices, predict, staged_predict
from jboost.selection.tuning import tune
from jboost.tables.frames import read_objects, refuse_batches
from jboost.tables.groups import is_table
from jboost.tables.sparse import Absent, is_sparse, sort_entries
from jboost.training.fitting import fit
from jboost.training.metrics import By, Metrics, bind_metrics, check_metrics, read_by
from jboost.training.record import History, TrainingInterrupted


def read_targets(
    y: Any, name: str = "y", *, several: bool = False, finite: bool = True
) -> np.ndarray:
    """Returns targets as numbers [N].

    Args:
      several: whether they may be [N, K], where NaN and infinities are accepted.
      finite: whether NaN and infinities in [N] are refused.
    """
    refuse_none(y)
    y = refuse_mask(y, name)
    cells = as_array(y, f"{name} must hold a number for each row")
    if cells.ndim == 0:
        raise ValueError(
            f"{name} must hold a number for each row, got {type(y).__name__}"
        )
    if cells.dtype.kind in "OSTU":
        words = (cell for cell in cells.ravel() if isinstance(cell, str | bytes))
        word = next(words, None)
        if word is not None:
            raise ValueError(
                f"{name} must hold numbers, got {show(str(word))}; JBoostClassifier "
                "takes strings as labels"
            )
        several_in_one = (cell for cell in cells.ravel() if getattr(cell, "shape", ()))
        cell = next(several_in_one, None)
        if cell is not None:
            raise ValueError(
                f"{name} must hold a number for each row, got cells of type "
                f"{type(cell).__name__} of shape {cell.shape}"
            )
    y = check_array(y, ensure_2d=False, ensure_all_finite=False, input_name=name)
    if several and y.ndim == 2 and y.shape[1] > 1:
        return y
    return check_array(
        column_or_1d(y, warn=True), ensure_2d=False, ensure_all_finite=finite,
        input_name=name,
    )  # fmt: skip


def refuse_none(y: Any) -> None:
    """Raises ValueError, in scikit-learn's words, where there are no targets."""
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None")


def check_rows(y: np.ndarray, X: Any) -> None:
    """Raises ValueError unless there is a target for each row of X."""
    num_rows = _num_samples(X)
    if len(y) != num_rows:
        raise ValueError(f"y must have {num_rows} rows, as X has, got shape {y.shape}")


def unite_sets(eval_set: Any, eval_X: Any, eval_y: Any) -> Any:
    """Returns ``eval_set``, or the one set of ``eval_X`` and ``eval_y``."""
    if eval_X is None and eval_y is None:
        return eval_set
    given = {"eval_X": eval_X, "eval_y": eval_y, "eval_set": eval_set}
    names = [name for name, value in given.items() if value is not None]
    if names != ["eval_X", "eval_y"]:
        raise ValueError(
            "eval_X and eval_y must be given together and without eval_set, got "
            + " and ".join(names)
        )
    return eval_X, eval_y


def make_csr(X: Any) -> Any:
    """Returns a sparse matrix of SciPy or JAX by rows, in its own dtype."""
    starts, places, values, shape = sort_entries(X, "X", by_column=False)
    return csr_array((values, places, starts), shape=shape)


_CONTAINERS = "(X, y), (X, y, sample_weight) or (X, y, sample_weight, offset)"


def _declare(default: Any, meaning: str) -> Setting:
    return Setting(default, None, "", meaning)


# fmt: off
class EstimatorSettings(HoldOutSettings, total=False):
    """The hyperparameters of an estimator; its ``fit`` checks them."""

    absent: Annotated[Absent | None, _declare("zero",
        "how entries that a sparse X does not store are read: zero, as in "
        "scikit-learn, or missing")]
    inverse_link: Annotated[Any, _declare("auto",
        "from the score of a row to its prediction (of a classifier: to the "
        "probability of the second class, or to those of K classes). auto: as the loss "
        "implies, :func:`jboost.losses.inverse_link`; None: the score itself")]
    metrics: Annotated[Metrics, _declare(None,
        "what is reported besides the loss, as for :func:`jboost.fit`")]
    by: Annotated[By, _declare(None,
        "what rounds are compared by, as for :func:`jboost.fit`")]
    callbacks: Annotated[Any, _declare((),
        "functions to call after every round, as for :func:`jboost.fit`")]
    progress: Annotated[bool, _declare(False,
        "whether to show a progress bar")]
    random_state: Annotated[Any, _declare(0,
        "an integer, so that each fit is the same; a ``RandomState``; or None for "
        "another seed each time")]
    implementation: Annotated[str | None, _declare(None,
        "which kernels run, as for :func:`jboost.fit`")]
# fmt: on


# Settings that ``jboost.fit`` takes under the same name.
_PASSED = (*declared(HoldOutSettings), "by", "callbacks", "progress", "implementation")

# {substitute: names of attributes in other libraries}.
_INSTEAD = {
    "jb.save(estimator.model_, path), or pickle the estimator": "save save_model "
    "save_raw dump_model model_to_string",
    "jb.load(path), which returns a saved model_, or unpickle an estimator": "load "
    "load_model",
    "model_ or get_booster()": "booster booster_ model",
    "history_": "history",
    "evals_result_, {set: {metric: values}}": "evals_result get_evals_result "
    "train_score_ validation_score_",
    "evals_result_ at best_iteration_": "best_score best_score_",
    "best_iteration_": "best_iteration best_ntree_limit get_best_iteration",
    "n_iter_": "n_estimators_ tree_count_ num_boosted_rounds num_trees "
    "current_iteration",
    "history_.oob_improvement": "oob_improvement_ oob_scores_ oob_score_",
    "feature_importances_ or jb.feature_importance(estimator.model_)": "get_score "
    "get_fscore feature_importance feature_importance_ get_feature_importance coef_",
    "feature_names_in_": "feature_names feature_names_ feature_name_ feature_name",
    "n_features_in_": "n_features_",
    "jb.explanation.trees_to_dataframe(estimator.model_)": "trees_to_dataframe "
    "estimators_ get_dump",
    "jb.shap_values(estimator.model_, X)": "shap_values get_shap_values",
    "apply": "calc_leaf_indexes",
    "the functions of jboost.plotting on model_ and history_": "plot plot_importance "
    "plot_tree plot_metric plot_partial_dependence",
    "jb.fit(X, y, model=estimator.model_)": "partial_fit",
    "jb.refit(estimator.model_, X, y)": "refit",
    "staged_predict": "staged_score staged_predictions",
}
_ELSEWHERE = {name: own for own, names in _INSTEAD.items() for name in names.split()}


class Boosting(BaseEstimator):
    """Training and prediction; subclasses give targets and scores their meaning."""

    _trainer: Any = staticmethod(fit)  # a search has another
    model_: Ensemble
    history_: History
    _loss: Any  # the loss function
    loss: Any
    inverse_link: Any
    metrics: Metrics
    by: By
    random_state: Any

    @explain_arguments
    @takes_settings
    def __init__(
        self,
        loss: str | Callable[..., Any] | losses.Adaptive = "auto",
        **settings: Unpack[EstimatorSettings],
    ):
        self.loss = loss
        for name, each in declared(EstimatorSettings).items():
            setattr(self, name, settings.get(name, each.default))

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Lists the hyperparameters in the documentation of the class."""
        super().__init_subclass__(**keywords)
        cls.__doc__ = explain_settings(cls.__doc__, EstimatorSettings)

    def set_params(self, **params: Any) -> "Boosting":
        """Sets hyperparameters; see scikit-learn."""
        known = self._get_param_names()
        rename_twins(params, known)
        for name in params:
            if name.partition("__")[0] not in known:
                hint = hint_argument(name, known)
                raise ValueError(
                    f"{type(self).__name__} has no hyperparameter {show(name)}{hint}"
                )
        return super().set_params(**params)

    if not TYPE_CHECKING:  # a checker knows the attributes that there are

        def __getattr__(self, name):
            """Raises for names of other libraries, and for results before ``fit``."""
            if hasattr(type(self), name):  # a property; raises its own error
                return object.__getattribute__(self, name)
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ELSEWHERE:
                message += f"; use {_ELSEWHERE[name]}"
            elif name.endswith("_") and not name.startswith("_"):
                check_is_fitted(self)
            raise AttributeError(message, name=name, obj=self)

    def get_booster(self) -> Ensemble:
        """Returns the trained model, which the functions of :mod:`jboost` take."""
        check_is_fitted(self)
        return self.model_

    def apply(self, X: Any) -> np.ndarray:
        """Returns the leaf of each row in each tree, [N, R] or [N, R, K]."""
        return self._evaluate(leaf_indices, X)

    @property
    def n_iter_(self) -> int:
        """Number of rounds of the model."""
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
        check_is_fitted(self)
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

    def _train(self, rows: Any, eval_set, num_scores, groups=None):
        """Calls ``fit``; ``groups`` are numbers of rows, for a loss of groups."""
        check_link(self._link, () if num_scores == 1 else (num_scores,), single=True)
        seed = self._draw_seed()
        validation = self._check_sets(eval_set)
        X, targets, weights, offset = rows
        passed: dict[str, Any] = {name: getattr(self, name) for name in _PASSED}
        _, metrics = read_by(self.by, check_metrics(self.metrics))
        metrics = bind_metrics(metrics, self._loss, num_scores, self._metric_link)
        try:
            self.model_, self.history_ = self._trainer(
                X, targets, self._loss, sample_weight=weights, offset=offset,
                groups=groups, validation=validation, num_scores=num_scores, seed=seed,
                metrics=metrics, **passed,
            )  # fmt: skip
        except TrainingInterrupted as error:
            # After ctrl-C in a notebook the estimator predicts with these rounds.
            self.model_, self.history_ = error.model, error.history
            raise
        return self

    def _draw_seed(self):
        if isinstance(self.random_state, int | np.integer):
            return check_integer(
                "random_state", int(self.random_state), least=0, most=2**32 - 1
            )
        try:
            random = check_random_state(self.random_state)
        except ValueError:
            raise ValueError(
                "random_state must be an integer, a RandomState or None, got "
                f"{show(self.random_state)}"
            ) from None
        return int(random.randint(2**31 - 1))

    def _check_sets(self, eval_set):
        """Returns one set or a dict of sets, with targets as the loss takes them."""
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
        if not isinstance(part, tuple) or not 2 <= len(part) <= 5:
            raise ValueError(
                f"eval_set must be {_CONTAINERS}, a list of such or a dict of such by "
                f"name, got {show(part)}"
            )
        X, y, *rest = part
        return (X, self._read_targets(y, "eval_set"), *rest)

    def _read_targets(self, y, name="y") -> Any:
        """Returns targets as the loss takes them; errors call them ``name``."""
        return read_targets(y, name)

    def _read_table(self, X, *, reset=False) -> Any:
        """Checks and returns X; with ``reset``, sets the feature attributes anew."""
        refuse_batches(X, "X")
        X = fill_mask(X)
        if is_sparse(X) and not issparse(X):
            X = make_csr(X)  # a JAX matrix: scikit-learn does not know it
        if reset:  # the model of an earlier fit does not match the new features
            for name in ("model_", "history_"):
                vars(self).pop(name, None)
        if is_table(X):
            validate_data(self, X, reset=reset, skip_check_array=True)
            return X
        checked = validate_data(
            self, X, reset=reset, accept_sparse=True, ensure_all_finite=False,
            ensure_min_samples=1 if reset else 0,
        )  # fmt: skip
        if is_sparse(X) or np.dtype(getattr(X, "dtype", "O")).kind != "O":
            return checked
        objects = np.asarray(X)  # scikit-learn accepts "1.5" as a number
        return read_objects(objects, "X") if objects.dtype.kind == "O" else checked

    def _score_rows(self, X, offset=None, inverse_link=None) -> np.ndarray:
        return self._evaluate(predict, X, offset=offset, inverse_link=inverse_link)

    def _score_stages(self, X, offset=None, inverse_link=None) -> Iterator[np.ndarray]:
        yield from self._evaluate(
            staged_predict, X, offset=offset, inverse_link=inverse_link
        )

    def _evaluate(self, function, X, **given) -> np.ndarray:
        """Calls a function of model and rows; returns an array that may be changed."""
        check_is_fitted(self)
        return np.array(function(self.model_, self._read_table(X), **given))

    @property
    def _link(self) -> Callable[[Array], Array] | None:
        """The inverse link given, or else the one that the loss implies."""
        if isinstance(self.inverse_link, str):
            if self.inverse_link != "auto":
                raise ValueError(
                    "inverse_link must be 'auto', None or a function of a score, got "
                    f"{show(self.inverse_link)}"
                )
            return losses.inverse_link(getattr(self, "_loss", None))
        return self.inverse_link

    @property
    def _metric_link(self) -> Any:
        """The inverse link for metrics, as :func:`jboost.fit` takes it."""
        return "auto" if isinstance(self.inverse_link, str) else self.inverse_link

    def __sklearn_is_fitted__(self):
        return "model_" in vars(self)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags


def find_loss(loss: Any, known: Mapping[str, Any] = losses.LOSSES) -> Any:
    """Returns a loss function, given its name or the function itself."""
    if not isinstance(loss, str):
        return loss
    if loss not in known:
        others = (
            (losses.LOSSES, "of one row; use JBoostRegressor or JBoostClassifier"),
            (
                losses.GROUP_LOSSES,
                "of groups; use JBoostRanker, or jboost.fit for times and events",
            ),
        )
        hint = next(
            (f"; it is a loss {text}" for named, text in others if loss in named),
            hint_loss(loss, known, repr("{}")),
        )
        raise ValueError(
            f"loss must be 'auto', the name of a loss, or a function, got {show(loss)}"
            f"{hint}"
        )
    return known[loss]


class JBoostSearchCV(MetaEstimatorMixin, BaseEstimator):
    """Searches the hyperparameters of an estimator by :func:`jboost.tune`.

    Hyperparameters of the estimator that differ from their defaults are not searched.
    After ``fit`` it predicts as ``best_estimator_``, with the weighted mean of the best
    settings.

    Args:
      estimator: one of the other estimators of :mod:`jboost.sklearn`.
      seconds, trials, space, ensemble, progress: arguments of :func:`jboost.tune`.
      cv: folds, as ``folds`` of :func:`jboost.tune`: a number, a splitter, or pairs of
        rows. Each fold of a classifier gets its share of every label.

    Attributes:
      best_estimator_: the fitted estimator; its ``model_`` is the ensemble.
      best_params_: hyperparameters of the best setting, and parameters of the loss.
      best_score_: its criterion; a loss is negated, so that greater is better.
      cv_results_: lists with an entry for each setting: "params", "mean_test_score",
        "rank_test_score".
      tuned_: the :class:`jboost.Tuned`.

    Example:
      >>> import numpy as np
      >>> from jboost.sklearn import JBoostRegressor, JBoostSearchCV
      >>> X = np.arange(400.0)[:, None]
      >>> few = JBoostRegressor(num_rounds=20, max_depth=2)
      >>> search = JBoostSearchCV(few, trials=4, cv=2).fit(X, np.sqrt(X[:, 0]))
      >>> bool(search.score(X, np.sqrt(X[:, 0])) > 0.9)
      True
    """

    def __init__(
        self, estimator: Any, *, seconds: float = 60.0, trials: int | None = None,
        space: Mapping[str, Any] | None = None, ensemble: int = 5, cv: Any = 5,
        progress: bool = False,
    ):  # fmt: skip
        self.estimator = estimator
        self.seconds, self.trials, self.space = seconds, trials, space
        self.ensemble, self.cv, self.progress = ensemble, cv, progress

    def fit(self, X: Any, y: Any, **arguments: Any) -> "JBoostSearchCV":
        """Searches, and trains the best settings on all rows.

        Args:
          X, y: those of the estimator's ``fit``.
          arguments: the others of its ``fit``, such as ``sample_weight``, but no
            ``eval_set``.

        Raises:
          TypeError, ValueError: an argument is invalid; the search has not begun.
        """
        if not isinstance(self.estimator, Boosting):
            raise TypeError(
                "estimator must be an estimator of jboost.sklearn, got "
                f"{type(self.estimator).__name__}"
            )
        best: Any = clone(self.estimator)
        best._trainer = partial(self._tune, is_classifier(best))
        best.fit(X, y, **arguments)
        del best._trainer
        self.best_estimator_, self.tuned_ = best, best.history_
        del best.history_
        found, sign = self.tuned_, 1 if self.tuned_.by.direction == "max" else -1
        self.best_params_, self.best_index_ = found.best_params, found.best
        self.best_score_ = sign * found.best_value
        self.cv_results_ = {
            "params": [*found.points],
            "mean_test_score": sign * found.values,
            "rank_test_score": 1 + np.argsort(np.argsort(found.by.rank(found.values))),
        }
        return self

    def _tune(self, stratify, X, targets, loss, *, validation, **given):
        """Calls ``tune`` with the arguments that ``fit`` would get."""
        if validation:
            raise ValueError("eval_set must be None in a search, got a set")
        names = (*declared(HoldOutSettings), "callbacks")
        usual = declared(EstimatorSettings)
        own = {n: given[n] for n in names if repr(given[n]) != repr(usual[n].default)}
        for name in own:
            if name not in declared(StudySettings):
                raise ValueError(
                    f"{name} of the estimator must be {usual[name].default!r} in a "
                    f"search, got {show(own[name])}"
                )
        own |= {name: given[name] for name in ("absent", "seed", "num_scores")}
        others = (
            "sample_weight", "offset", "groups", "metrics", "by", "implementation",
        )  # fmt: skip
        return tune(
            X, targets, loss, seconds=self.seconds, trials=self.trials,
            space=self.space, ensemble=self.ensemble, folds=self.cv,
            stratify=True if stratify else None, progress=self.progress,
            **{name: given[name] for name in others}, **own,
        )  # fmt: skip

    def __sklearn_is_fitted__(self):
        return "best_estimator_" in vars(self)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        own = get_tags(self.estimator)
        tags.estimator_type, tags.classifier_tags = (
            own.estimator_type,
            own.classifier_tags,
        )
        tags.regressor_tags, tags.input_tags = own.regressor_tags, own.input_tags
        tags.target_tags = own.target_tags
        return tags

    def _own(self, name):
        check_is_fitted(self)
        return getattr(self.best_estimator_, name)

    classes_ = property(lambda self: self._own("classes_"))
    n_features_in_ = property(lambda self: self._own("n_features_in_"))
    feature_names_in_ = property(lambda self: self._own("feature_names_in_"))
    feature_importances_ = property(lambda self: self._own("feature_importances_"))


def _delegated(name):
    """Returns a method of a search that calls that of its estimator."""

    def method(self, X, *operands, **arguments):
        return self._own(name)(X, *operands, **arguments)

    method.__name__ = name
    method.__doc__ = f"Calls ``{name}`` of ``best_estimator_``."
    return available_if(lambda search: hasattr(search.estimator, name))(method)


for _name in (
    "predict", "predict_proba", "predict_log_proba", "decision_function",
    "predict_dist", "predict_quantiles", "score",
):  # fmt: skip
    setattr(JBoostSearchCV, _name, _delegated(_name))
