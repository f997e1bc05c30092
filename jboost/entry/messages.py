# SPDX-License-Identifier: Apache-2.0
"""Texts for people: warnings, containers, arguments, names of other libraries."""

import difflib
import os
import reprlib
import sys
import warnings
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

# The folder of the whole package, one level above this box.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the package, at any depth of the call stack.

    The outermost frame inside the package decides, so that a warning of `fit` that an
    estimator calls points at the line that called the estimator.
    """
    frame, depth, level = sys._getframe(1), 1, 1
    while frame is not None:
        depth += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = depth
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def import_pandas(caller: str) -> Any:
    """Imports pandas, which is not a dependency of jboost.

    Raises:
      ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError(
            f"{caller} needs pandas, which is not installed: pip install pandas"
        ) from None
    return pandas


MOST_LINES = 10
_MOST_ITEMS = 4
_WIDTH = 88
# Of an argument in a message: items of a container, of an array, letters.
_MOST_SHOWN = 6
_FIRST = 3
_MOST_LETTERS = 200


def show_fields(container: Any) -> str:
    """Formats the fields of a container, arrays as ``float32[100, 3]``.

    Also works if fields are tracers or other objects, because JAX builds containers
    with such leaves.
    """
    if is_dataclass(container):
        names = [part.name for part in fields(container)]
    else:
        names = list(container._fields)
    parts = [f"{name}={_show(getattr(container, name, None))}" for name in names]
    name = type(container).__name__
    line = f"{name}({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"  {part}," for part in parts[:MOST_LINES]), ")"])


def _show(value) -> str:
    """Formats a field on one line."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        if shape == () and isinstance(value, float | int):
            return repr(value)
        return f"{dtype}[{', '.join(map(str, shape))}]"
    if hasattr(value, "_fields") or is_dataclass(value):
        return f"{type(value).__name__}(...)"
    if isinstance(value, tuple | list):
        shown = [_show(item) for item in value[:_MOST_ITEMS]]
        more = ["..."] if len(value) > _MOST_ITEMS else []
        text = f"({', '.join([*shown, *more])}{',' if len(value) == 1 else ''})"
        return text if len(text) < 60 else f"({len(value)} entries)"
    text = repr(value)
    return text if len(text) < 60 else f"<{type(value).__name__}>"


class _Shortened(reprlib.Repr):
    """Shortens what it formats, at any depth: texts, containers, arrays and tables."""

    def __init__(self):
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _MOST_SHOWN
        self.maxfrozenset = self.maxdeque = self.maxarray = _MOST_SHOWN
        self.maxlevel, self.maxstring, self.maxother = 4, _WIDTH, _MOST_LETTERS

    def repr1(self, x: Any, level: int) -> str:
        """Formats a value; arrays and tables by type, shape and first items."""
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not isinstance(shape, tuple) or shape == () or isinstance(x, type | Tracer):
            return super().repr1(x, level)
        kind = "" if isinstance(x, np.ndarray | jax.Array) else f"{type(x).__name__} "
        if dtype is None:
            return f"{kind}of shape {shape}"
        text = f"{kind}{dtype}[{', '.join(map(str, shape))}]"
        if not isinstance(x, np.ndarray):
            return text
        if x.size <= _MOST_SHOWN and "\n" not in (whole := repr(x)):
            return whole
        first = ", ".join(self._show_item(each, level) for each in x.flat[:_FIRST])
        return f"{text} of {first}, ..."

    def _show_item(self, item, level):
        """Formats an item of an array."""
        if isinstance(item, np.floating):
            return f"{item:.5g}"
        return self.repr1(item.item() if hasattr(item, "item") else item, level - 1)

    def repr_int(self, x: int, level: int) -> str:
        """Formats an integer; Python refuses to print the largest."""
        del level
        short = x.bit_length() < 4 * _WIDTH
        return repr(x) if short else f"an integer of {x.bit_length()} bits"


def show(value: Any) -> str:
    """Formats an argument for a message: its ``repr``, on one line and short.

    Long texts and containers are cut; of arrays and tables it shows type, dtype, shape
    and the first items.
    """
    text = " ".join(_SHORTENED.repr(value).split("\n"))
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."
    containers = list | tuple | dict | set | frozenset
    if isinstance(value, containers) and len(value) > _MOST_SHOWN:
        return f"{text} ({len(value)} items)"
    return text


_SHORTENED = _Shortened()


def cut(lines: list[str], most: int, what: str) -> list[str]:
    """Returns the first lines and a line with the number of the others."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"... {len(lines) - most + 1} more {what}"]


# {what to write in jboost: its names elsewhere, or in another place of jboost}.
_NAMES: dict[str, str] = {
    "jb.fit(x, y)": "train fit partial_fit update boost_round",
    "jb.cross_validate(x, y)": "cv cross_val_score",
    "jb.sweep(x, y, loss, points)": "grid_search randomized_search GridSearchCV",
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
      owner: how the message names what has no such attribute.
      known: what is said where no other library has the name.
    """
    hint = known
    if not name.startswith("_"):  # Python and other libraries ask for many of these
        close = difflib.get_close_matches(name, _OWN, 1, 0.85)
        hint = f"; use {_OWN[name if name in _OWN else close[0]]}" if close else known
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)
