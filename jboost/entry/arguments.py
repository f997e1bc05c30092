# SPDX-License-Identifier: Apache-2.0
"""Recognizes names that other libraries give to arguments, losses and metrics.

The end of an error message then tells the name that jboost uses.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any, ParamSpec, TypeVar

from jboost.entry.messages import show

P = ParamSpec("P")
R = TypeVar("R")

# {jboost's argument: its names in XGBoost, LightGBM, CatBoost and scikit-learn}.
_NAMES: dict[str, str] = {
    "num_rounds": "n_estimators num_boost_round num_iterations num_iteration n_iter "
    "max_iter iterations num_trees nrounds num_round",
    "learning_rate": "eta shrinkage shrinkage_rate",
    "max_depth": "depth",
    "max_leaves": "num_leaves max_leaf_nodes num_leaf",
    "max_bins": "max_bin border_count n_bins",
    "l1": "reg_alpha alpha lambda_l1 l1_regularization reg_l1",
    "l2": "reg_lambda lambda lambda_ lambda_l2 l2_regularization l2_leaf_reg",
    "min_gain": "gamma min_split_loss min_gain_to_split min_split_gain "
    "min_impurity_decrease",
    "min_child_weight": "min_sum_hessian_in_leaf min_sum_hessian",
    "min_child_samples": "min_samples_leaf min_data_in_leaf min_data",
    "subsample": "bagging_fraction sub_row bagging bagging_freq subsample_freq",
    "colsample_bytree": "feature_fraction colsample rsm max_features",
    "colsample_bynode": "feature_fraction_bynode",
    "num_scores": "num_class n_classes num_classes",
    "loss": "objective criterion obj fobj",
    "init_score": "base_score init",
    "offset": "base_margin",
    "sample_weight": "weight weights scale_pos_weight class_weight is_unbalance",
    "validation": "eval_set evals valid_sets eval_data validation_data X_val y_val "
    "eval_X eval_y",
    "metrics": "eval_metric metric feval custom_metric scoring eval_metrics",
    "by": "stop_on first_metric_only maximize",
    "early_stopping_rounds": "early_stopping early_stopping_round n_iter_no_change "
    "od_wait",
    "groups": "qid",
    "share_structure": "multi_strategy",
    "seed": "random_state random_seed",
    "progress": "verbose verbosity verbose_eval silent logging_level",
    "monotone": "monotone_constraints monotonic_cst",
    "interactions": "interaction_constraints interaction_cst",
    "categorical": "categorical_feature categorical_features cat_features "
    "enable_categorical feature_types",
    "parent_rows": "path_smooth",
    "linear_leaves": "linear_tree linear_trees",
    "rows_per_threshold": "extra_trees",
    "max_onehot": "max_cat_to_onehot one_hot_max_size",
    "feature_names": "feature_name columns",
    "model": "xgb_model init_model warm_start",
    "candidates": "tree_method",
    "absent": "missing zero_as_missing",
    "folds": "nfold n_splits cv",
    "stratify": "stratified",
}
_PEERS = {peer: own for own, peers in _NAMES.items() for peer in peers.split()}
# Arguments with values that must be converted, too. The gains of XGBoost and LightGBM
# lack the factor 1/2 of Chen and Guestrin 2016, eq. 7, which jboost keeps.
_NOTES = {
    "gamma": "min_gain=gamma / 2", "min_split_loss": "min_gain=min_split_loss / 2",
    "min_gain_to_split": "min_gain=min_gain_to_split / 2",
    "min_split_gain": "min_gain=min_split_gain / 2",
    "scale_pos_weight": "sample_weight=np.where(y == 1, scale_pos_weight, 1.0)",
    "class_weight": "sample_weight, with the weight of each row's class",
    "is_unbalance": "sample_weight, with the weight of each row's class",
    "num_leaves": "max_leaves; trees grow level by level down to max_depth",
    "max_leaf_nodes": "max_leaves; trees grow level by level down to max_depth",
    "verbose": "progress=True", "verbosity": "progress=True",
    "verbose_eval": "progress=True", "silent": "progress=False",
    "bagging_freq": "subsample, which is drawn in every round",
    "subsample_freq": "subsample, which is drawn in every round",
    "missing": "absent for entries that a sparse matrix does not store; NaN is always "
    "missing",
}  # fmt: skip
_SHRUNK = "the noise of each node's rows to shrink its categories"
# {an argument that jboost does not have: its replacement, for the error message}.
_ABSENT = {
    "nthread": "the cores that the process may use",
    "n_jobs": "the cores that the process may use",
    "num_threads": "the cores that the process may use",
    "thread_count": "the cores that the process may use",
    "booster": "trees only", "boosting_type": "gradient boosting only",
    "boosting": "gradient boosting only", "grow_policy": "level-wise growth only",
    "device": "the device that JAX uses", "device_type": "the device that JAX uses",
    "tree_learner": "one machine", "num_parallel_tree": "one tree per round and score",
    "params": "keywords: learning_rate=0.1, max_depth=6, ...",
    "evals_result": "the history that fit returns",
    "importance_type": "feature_importance(model, kind)",
    "tol": "early stopping that counts any improvement",
    "min_delta": "early stopping that counts any improvement",
    "cat_l2": _SHRUNK, "cat_smooth": _SHRUNK, "min_data_per_group": _SHRUNK,
    # Names of version 0.1.0.
    "category_l2": _SHRUNK, "category_smoothing": _SHRUNK,
    "min_category_weight": _SHRUNK,
}  # fmt: skip
# The words of fit and of the estimators for the same argument; each takes both.
_TWINS = {"validation": "eval_set", "seed": "random_state"}
_TWINS |= {other: own for own, other in _TWINS.items()}
# {jboost's loss: its names in the same libraries, in lower case}.
_LOSSES = {
    "squared_error": "reg:squarederror reg:linear regression regression_l2 l2 "
    "mean_squared_error mse l2_root root_mean_squared_error rmse ls "
    "least_squares",
    "absolute_error": "reg:absoluteerror regression_l1 l1 mean_absolute_error "
    "mae lad least_absolute_deviation",
    "pseudo_huber": "reg:pseudohubererror",
    "log_cosh": "logcosh",
    "quantile": "reg:quantileerror pinball multiquantile",
    "expectile": "reg:expectileerror",
    "poisson": "count:poisson",
    "gamma": "reg:gamma",
    "tweedie": "reg:tweedie",
    "logistic": "binary:logistic binary:logitraw reg:logistic binary logloss "
    "log_loss binary_logloss cross_entropy crossentropy xentropy deviance "
    "binomial_deviance binary_crossentropy bce",
    "softmax": "multi:softmax multi:softprob multiclass multi_logloss "
    "multinomial_deviance categorical_crossentropy",
    "hinge": "binary:hinge",
    "pairwise_logistic": "rank:pairwise pairlogit",
    "listwise_softmax": "querysoftmax",
    "lambda_rank": "rank:ndcg lambdarank",
    "xendcg": "rank_xendcg xe_ndcg xe_ndcg_mart",
    "cox": "survival:cox",
}
_METRICS = {
    "log_loss": "logloss mlogloss binary_logloss multi_logloss cross_entropy "
    "neg_log_loss nll",
    "error": "merror binary_error multi_error zero_one_loss",
    "accuracy": "acc accuracy_score",
    "auc": "roc_auc roc_auc_score",
    "average_precision": "aucpr ap average_precision_score",
    "brier": "brier_score brier_score_loss neg_brier_score",
    "mae": "l1 mean_absolute_error neg_mean_absolute_error",
    "mse": "l2 mean_squared_error neg_mean_squared_error",
    "rmse": "l2_root root_mean_squared_error neg_root_mean_squared_error",
    "mape": "mean_absolute_percentage_error neg_mean_absolute_percentage_error",
    "r2": "r2_score",
    "poisson_deviance": "poisson poisson-nloglik mean_poisson_deviance",
    "gamma_deviance": "gamma gamma-deviance mean_gamma_deviance",
    "ndcg": "ndcg_score rank_ndcg",
    "mean_average_precision": "map mean_ap",
    "mrr": "mean_reciprocal_rank",
    "concordance_index": "c_index cindex c-index harrell_c",
}
# Common names of the two arguments of a loss; jboost's order is (score, target).
_TRUE = ("y_true", "true", "target", "targets", "label", "labels", "actual")
_FOUND = ("y_pred", "pred", "preds", "prediction", "predictions", "y_hat", "yhat",
          "y_score", "score", "scores", "logit", "logits")  # fmt: skip
_PEER_LOSSES = {peer: own for own, peers in _LOSSES.items() for peer in peers.split()}
_PEER_METRICS = {peer: own for own, peers in _METRICS.items() for peer in peers.split()}


def names_elsewhere(name: str) -> list[str]:
    """Returns the names that other libraries have for an argument of jboost."""
    return _NAMES.get(name, "").split()


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to suggest the right name for an unknown keyword argument.

    Its signature, docstring and type stay the same.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        rename_twins(kwargs, parameters)
        for name in kwargs:
            if name not in parameters:
                # For a method, also suggest arguments of the estimator itself.
                owner = type(args[0]) if "self" in parameters and args else None
                hint = hint_argument(name, [*parameters], owner)
                called = function.__qualname__
                if owner is not None and function.__name__ == "__init__":
                    called = owner.__name__  # which may have inherited it
                raise TypeError(
                    f"{called}() got an unexpected keyword argument {show(name)}{hint}"
                )
        return function(*args, **kwargs)

    return explained


def rename_twins(given: dict[str, Any], known: Container[str]) -> None:
    """Renames arguments, in place, to the word that a function has for them."""
    for name, twin in _TWINS.items():
        if name in given and name not in known and twin in known:
            if twin in given:
                raise TypeError(f"{twin} and {name} are the same argument; pass one")
            given[twin] = given.pop(name)


def hint_argument(name: str, known: list[str], owner: type | None = None) -> str:
    """Returns a suggestion for an unknown argument, or "" if there is none.

    Args:
      owner: the class of a method; its constructor may have the argument.
    """
    if name in _ABSENT and name not in known:
        return f"; jboost has no such argument and uses {_ABSENT[name]}"
    beside = [] if owner is None else [*inspect.signature(owner).parameters]
    wanted = _translate(name, known) or _translate(name, beside)
    if wanted in known:
        return f"; use {_spell(name, wanted)}"
    if wanted in beside and owner is not None:
        return f"; in {owner.__name__}(...) use {_spell(name, wanted)}"
    if name in ("eval_set", "evals", "valid_sets", "validation") and owner is not None:
        return "; pass eval_set to its method fit"
    own = _PEERS.get(name)
    if own is not None:
        return f"; jboost.fit has it as {_spell(name, own)}"
    close = difflib.get_close_matches(name, [*known, *beside], n=1, cutoff=0.75)
    return f"; did you mean {close[0]!r}?" if close else ""


def _translate(name: str, known: list[str]) -> str | None:
    """Returns the argument in ``known`` that a name of another library means."""
    if name in known:
        return name
    own = _PEERS.get(name, name)
    if name in ("X_val", "y_val"):  # arguments of HistGradientBoosting
        own = f"eval_{name[0]}" if "eval_X" in known else own
    if name == "scale_pos_weight" and "class_weight" in known:
        return "class_weight"
    return next((each for each in (own, _TWINS.get(own)) if each in known), None)


def _spell(name: str, own: str) -> str:
    """Returns the argument to pass, with any conversion of its value."""
    if name == "scale_pos_weight" and own == "class_weight":
        return "class_weight={0: 1.0, 1: scale_pos_weight}"
    note = _NOTES.get(name, "")
    return note if note.startswith(own) else repr(own)


def hint_loss(name: str, known: Iterable[str], form: str) -> str:
    """Suggests the built-in loss that an unknown name means, or lists all losses.

    Args:
      form: how to write a loss, such as "jb.losses.{}".
    """
    low = name.lower()
    known = [*known]
    found = {own: own for own in known}
    found |= {peer: own for peer, own in _PEER_LOSSES.items() if own in found}
    # CatBoost includes parameters in names: "Quantile:alpha=0.9".
    own = found.get(low) or found.get(low.split(":")[0])
    if own is None:
        close = difflib.get_close_matches(low, found, n=1)
        own = found[close[0]] if close else None
    if own is None:
        return "; losses are " + ", ".join(map(form.format, known))
    classes = " with num_scores=(number of classes)" if own == "softmax" else ""
    return f"; did you mean {form.format(own)}{classes}?"


def hint_metric(name: str, known: Iterable[str], truncated: Iterable[str]) -> str:
    """Suggests the built-in metric that an unknown name means.

    Args:
      name: a misspelled metric, or one of another library, such as "map@5".
      truncated: the metrics that accept a number of ranks, as in "name@5".
    """
    base, _, at = name.lower().partition("@")
    found = {own: own for own in known} | _PEER_METRICS
    close = difflib.get_close_matches(base, found, n=1)
    own = _PEER_METRICS.get(name.lower()) or (found[close[0]] if close else None)
    if own is None:
        return ""
    if own in truncated and at:
        own += f"@{at}" if at.isdecimal() and int(at) > 0 else "@10"
    return f"; did you mean {own!r}?"


def positional_names(function) -> list[str] | None:
    """Returns the names of a function's positional parameters; None if unknown."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [each.name for each in parameters if each.kind in kinds]


def takes_mask(function: Any, *, required: bool = False) -> bool:
    """Checks whether a function has an argument ``where``, as for groups of rows."""
    try:
        where = inspect.signature(function).parameters.get("where")
    except (TypeError, ValueError):
        return False
    if where is None or "where" in bound_keywords(function):
        return False
    return not required or where.default is where.empty


def bound_keywords(function: Any) -> dict[str, Any]:
    """Returns the keywords that ``functools.partial`` has bound."""
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        bound = {**function.keywords, **bound}
        function = function.func
    return bound


def is_mirrored(function: Any) -> bool:
    """Checks whether the arguments of a loss are named like (target, score)."""
    first, second = (*(positional_names(function) or ()), "", "")[:2]
    return first.lower() in _TRUE and second.lower() in _FOUND
