# SPDX-License-Identifier: Apache-2.0
"""Serves the package before JAX is imported: forks, threads, version, unknown names.

``import jboost`` runs this module and nothing else.
"""

import difflib
import multiprocessing
import os
import sys

_forked = False  # whether this process was forked from one that had started JAX


def was_forked() -> bool:
    """Returns whether JAX was running in the process that this one was forked from."""
    return _forked


def _note_fork() -> None:
    global _forked
    if "jax" in sys.modules:
        from jax.extend import backend

        bridge = sys.modules[backend.backends.__module__]
        # JAX has no public way to ask this without starting its backends.
        _forked |= getattr(bridge, "backends_are_initialized", lambda: True)()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_note_fork)
if os.path.isdir(tasks := "/proc/self/task") and len(os.listdir(tasks)) == 1:
    _note_fork()  # earlier: JAX runs on threads, and a fork copies none of them


def limit_threads() -> None:
    """Limits JAX's threads on the CPU as joblib limits those of its workers.

    joblib gives each process of its "loky" backend a share of the processors by way of
    OMP_NUM_THREADS, which JAX does not read. PJRT_NPROC and NPROC take precedence.
    """
    share = os.environ.get("OMP_NUM_THREADS", "")
    known = "PJRT_NPROC" in os.environ or "NPROC" in os.environ
    if share.isdigit() and not known and multiprocessing.parent_process() is not None:
        os.environ["PJRT_NPROC"] = share


limit_threads()


def read_version() -> str:
    """Returns the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jboost")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


# ---- names of other libraries -------------------------------------------------------

# {the code to write in jboost: its names elsewhere, or in another place of jboost}.
_NAMES: dict[str, str] = {
    "jb.fit(x, y)": "train fit partial_fit update boost_round",
    "jb.cross_validate(x, y)": "cv cross_val_score",
    "jb.sweep(x, y, loss, points)": "grid_search GridSearchCV",
    "jb.tune(x, y, loss)": "tune_model randomized_search RandomizedSearchCV optimize",
    "jb.predict(model, x)": "predict inplace_predict predict_raw decision_function",
    "jb.predict(model, x, inverse_link=jax.nn.sigmoid), or jax.nn.softmax for several "
    "scores": "predict_proba predict_log_proba",
    "jb.staged_predict(model, x)": "staged_predict staged_predict_proba",
    "jb.save(model, path)": "save save_model save_raw dump to_file",
    "jb.load(path)": "load_model load from_file",
    "jb.explanation.trees_to_dataframe(model)": "trees_to_dataframe get_dump "
    "dump_model model_to_string",
    "jb.feature_importance(model)": "feature_importance feature_importances "
    "feature_importances_ get_score get_fscore get_feature_importance",
    "jb.explanation.permutation_importance(model, x, y, loss)":
    "permutation_importance",
    "jb.shap_values(model, x)": "shap_values TreeExplainer Explainer",
    "jb.partial_dependence(model, x, features)": "partial_dependence",
    "jb.leaf_indices(model, x)": "leaf_indices apply predict_leaf",
    "jb.truncate(model, num_rounds)": "truncate shrink",
    "jb.refit(model, x, y, loss)": "refit",
    "jb.plotting.importance(model)": "plot_importance",
    "jb.plotting.tree(model)": "plot_tree create_tree_digraph",
    "jb.plotting.tree_to_dot(model)": "to_graphviz export_graphviz",
    "jb.plotting.learning_curve(history)": "plot_metric plot_history plot plot_loss",
    "jb.plotting.partial_dependence(model, x, features)": "plot_partial_dependence "
    "PartialDependenceDisplay",
    "jb.plotting.shap_summary(jb.shap_values(model, x), x)": "summary_plot plot_shap",
    "arrays and tables, jb.fit(x, y)": "DMatrix QuantileDMatrix Dataset Pool",
    "jb.stream(batches) for rows that are not in memory": "DataIter Sequence",
    "jb.fit(x, y, early_stopping_rounds=20, validation=(x, y))": "early_stopping "
    "EarlyStopping",
    "jb.fit(x, y, progress=True)": "log_evaluation print_evaluation "
    "EvaluationMonitor",
    "the history, which jb.fit returns with the model": "history best_iteration "
    "best_score best_round best_loss evals_result train_loss validation_loss",
    "jboost.sklearn.JBoostRegressor": "JBoostRegressor XGBRegressor LGBMRegressor "
    "CatBoostRegressor GradientBoostingRegressor HistGradientBoostingRegressor",
    "jboost.sklearn.JBoostClassifier": "JBoostClassifier XGBClassifier LGBMClassifier "
    "CatBoostClassifier GradientBoostingClassifier HistGradientBoostingClassifier",
    "jboost.sklearn.JBoostRanker": "JBoostRanker XGBRanker LGBMRanker CatBoostRanker",
    "jboost.sklearn.JBoostDistribution": "JBoostDistribution NGBRegressor "
    "NGBClassifier NGBoost",
    "jb.Ensemble": "Booster",
}  # fmt: skip
_OWN = {peer: own for own, peers in _NAMES.items() for peer in peers.split()}


def make_attribute_error(owner: str, name: str, known: str = "") -> AttributeError:
    """Returns the error for an unknown attribute.

    Args:
      known: the end of the message if no other library has the name.
    """
    hint = known
    if not name.startswith("_"):  # Python and other libraries ask for many of these
        close = difflib.get_close_matches(name, _OWN, 1, 0.85)
        hint = f"; use {_OWN[name if name in _OWN else close[0]]}" if close else known
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)
