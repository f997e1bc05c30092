# SPDX-License-Identifier: Apache-2.0
"""The features that a model uses, the columns and settings, and warnings.

In: a model and rows. Out: tables and samples as plain values, for ``page.js``.
"""

import platform
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jboost.entry.importing import read_version
from jboost.explanation.importance import permutation_importance
from jboost.explanation.shap import shap_interactions, shap_values
from jboost.model.ensemble import Ensemble, find_used_features
from jboost.plotting.canvas import name_features
from jboost.reports.quality import Scored
from jboost.training.record import History

_SAMPLE = 300  # rows of the swarms
_SHOWN = 12  # features with a swarm and a dependence
_PAIRED = 60  # rows with an explanation of pairs of features
_MOST_PAIRS = 2**22  # numbers in their table
_MOST_SCORES = 6  # with swarms
_EXTREMES = 3  # the best rows, and as many of the worst
_REPEATS = 5  # shuffles of a column
_SHUFFLED = 2**18  # predictions of one repeat
_BINS = 12
_MOST_LEVELS = 200  # categories with names in the page
_NOTABLE = 1e-4  # relative difference of losses
_OVERFIT = 2.0  # times the training loss
_SELDOM = 0.9  # share of missing cells


def list_features(
    model: Ensemble, matrix: Float[np.ndarray, "N F"]
) -> list[dict[str, Any]]:
    """Describes each column: its values, and whether the model uses it."""
    named, used = model.categories, find_used_features(model)
    features = []
    names = name_features(model.feature_names, model.num_features)
    for index, name in enumerate(names):
        column = matrix[:, index]
        known = column[~np.isnan(column)]
        feature: dict[str, Any] = dict(
            name=name, missing=1 - len(known) / len(column), used=index in used,
        )  # fmt: skip
        if named is not None and index in named.features:
            place = named.features.index(index)
            codes = np.asarray(named.codes)[place]
            values = None if named.values is None else named.values[place]
            levels = len(codes) if values is None else len(values)
            inside = known[(known >= 0) & (known < levels)].astype(int)
            counts = np.bincount(inside, minlength=levels)
            kept = np.sort(np.argsort(-counts, kind="stable")[:_MOST_LEVELS])
            named_values = range(levels) if values is None else values
            feature |= dict(
                levels=[str(named_values[each]) for each in kept], codes=kept,
                counts=counts[kept], category=place, num_levels=levels,
            )  # fmt: skip
        elif np.isfinite(known).any():
            known = known[np.isfinite(known)]
            low, high = float(known.min()), float(known.max())
            edges = np.linspace(low, high, _BINS + 1) if high > low else [low, low + 1]
            feature |= dict(
                low=low, high=high, middle=float(np.median(known)),
                whole=bool((known == np.round(known)).all()),
                counts=np.histogram(known, edges)[0],
            )  # fmt: skip
        features.append(feature)
    return features


# ---- features -----------------------------------------------------------------------


def explain(
    model: Ensemble,
    rows: Scored,
    matrix: Float[np.ndarray, "N F"],
    by_class: bool,
    seed: int,
) -> dict[str, Any] | str:
    """Returns SHAP values of a sample, of the best and of the worst rows.

    ``by_class``: rows are explained by the score of their class. Where the model does
    not hold the cover of its leaves, it returns the reason.
    """
    if model.sums is None or not model.num_rounds:
        return "The model does not hold the weights of its leaves, or has no trees."
    random = np.random.default_rng(seed)
    num_rows = len(matrix)
    sample = np.sort(random.permutation(num_rows)[:_SAMPLE])
    extremes = _find_extremes(rows)
    chosen = np.concatenate([sample, extremes])
    shap = shap_values(model, matrix[chosen])
    values, base = np.asarray(shap.values), np.asarray(shap.base).reshape(-1)
    values = values.reshape(*values.shape[:2], -1)
    inside, outside = values[: len(sample)], values[len(sample) :]
    size = np.abs(inside).mean(axis=0).sum(axis=1)
    order = np.argsort(-size, kind="stable")
    top = order[: min(_SHOWN, max(1, np.count_nonzero(size)))]
    scores = min(values.shape[2], _MOST_SCORES)
    deviation = np.abs(inside).sum(axis=2).std(axis=0) / np.sqrt(len(sample))
    return dict(
        order=order,
        size=size, error=1.96 * deviation,
        top=top, partners=_find_partners(model, matrix[sample], top),
        values=matrix[np.ix_(sample, top)].T,
        shap=np.moveaxis(inside[:, top, :scores], 2, 0).transpose(0, 2, 1),
        examples=[
            _describe_row(rows, row, outside[number], base, matrix[row], by_class)
            for number, row in enumerate(extremes)
        ],
    )  # fmt: skip


def _find_extremes(rows):
    """Returns the rows with the greatest and the least loss, or score."""
    key = rows.row_losses
    if key is None:
        key = rows.scores if rows.scores.ndim == 1 else rows.scores[:, 0]
    order = np.argsort(key, kind="stable")
    count = min(_EXTREMES, len(order) // 2)
    return np.concatenate([order[::-1][:count], order[:count]])


def _describe_row(rows, row, shap, base, values, by_class):
    """Explains the score of a row: that of its class, where there are several."""
    target = jax.tree.map(lambda leaf: np.asarray(leaf)[row].tolist(), rows.targets)
    score = int(target) if by_class and shap.shape[1] > 1 else 0
    offset = 0.0 if rows.offset is None else float(rows.offset[row, score])
    own = shap[:, score]
    top = np.argsort(-np.abs(own), kind="stable")[:8]
    scores = rows.scores[row].reshape(-1)
    return dict(
        row=rows.numbers[row], score=float(scores[score]), number=score,
        base=float(base[score]), offset=offset,
        target=target if isinstance(target, int | float) else str(target),
        features=top, shap=own[top], values=values[top],
        loss=None if rows.row_losses is None else float(rows.row_losses[row]),
    )  # fmt: skip


def _find_partners(model, matrix, top):
    """Returns the feature that interacts most with each, or None."""
    rows = matrix[:_PAIRED]
    size = len(rows) * model.num_features**2 * model.num_scores
    if size > _MOST_PAIRS or len(top) < 2:
        return [None] * len(top)
    pairs = np.abs(np.asarray(shap_interactions(model, rows))).mean(axis=0)
    pairs = pairs.reshape(*pairs.shape[:2], -1).sum(axis=2)
    np.fill_diagonal(pairs, 0)
    found = []
    for feature in top:
        # Only features that are shown have their values in the page.
        best = max(range(len(top)), key=lambda place: pairs[feature, top[place]])
        found.append(best if pairs[feature, top[best]] > 0 else None)
    return found


def shuffle(
    model: Ensemble,
    matrix: Float[np.ndarray, "N F"],
    rows: Scored,
    seed: int,
) -> dict[str, Any] | None:
    """Returns by how much the loss rises when a column is shuffled; None for groups."""
    if rows.row_losses is None or not model.num_rounds:
        return None
    used, num_rows = max(len(find_used_features(model)), 1), len(rows.weights)
    count = min(num_rows, max(200, _SHUFFLED // used))
    some = np.sort(np.random.default_rng(seed).permutation(num_rows)[:count])
    if not np.isfinite(rows.row_losses[some]).all():
        return None
    offset = rows.offset
    if offset is not None:
        offset = offset[some].reshape(rows.scores[some].shape)
    targets = jax.tree.map(lambda leaf: leaf[some], rows.targets)
    found = permutation_importance(
        model, matrix[some], targets, rows.loss,
        sample_weight=rows.weights[some], num_repeats=_REPEATS, seed=seed,
        offset=offset,
    )  # fmt: skip
    order = np.argsort(-found.values, kind="stable")[: 2 * _SHOWN]
    order = order[found.values[order] != 0]
    deviations = np.zeros(0) if found.deviations is None else found.deviations[order]
    return dict(order=order, values=found.values[order], error=deviations, rows=count)


# ---- settings, versions and warnings ------------------------------------------------


def list_settings(model: Ensemble, history: Any, loss: Any) -> list[Any]:
    """Returns names and values: sizes of the model, and the choices of training."""
    name = getattr(loss, "__name__", None) or repr(loss)
    found = [
        ("loss", name), ("rounds", model.num_rounds), ("scores", model.num_scores),
        ("features", model.num_features), ("levels of splits", model.max_depth),
        ("trees", "one for all scores" if model.shares_structure else "one per score"),
        ("leaves", "constant" if model.slopes is None else "linear"),
    ]  # fmt: skip
    if isinstance(history, History):
        found.append(("rounds are compared by", history.by.name))
        if history.best_round >= 0:
            found.append(("best round", history.best_round))
        found += [(key, _write(value)) for key, value in history.choices.items()]
    return found


def _write(value):
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value)
        few = value.ravel()[:6].tolist()
        numbers = ", ".join(f"{number:.5g}" for number in few)
        return numbers + (", ..." if value.size > 6 else "")
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def list_versions() -> list[tuple[str, str]]:
    """Returns the versions of Python and of the libraries, and the kind of device."""
    return [
        ("jboost", read_version()), ("Python", platform.python_version()),
        ("jax", jax.__version__), ("numpy", np.__version__),
        ("device", jax.devices()[0].device_kind),
    ]  # fmt: skip


def list_warnings(
    model: Ensemble, features: Sequence[dict[str, Any]], history: Any, rows: Scored
) -> list[str]:
    """Returns sentences about figures that look doubtful."""
    found = []
    constant = [f["name"] for f in features if f.get("low") == f.get("high", np.nan)]
    empty = [f["name"] for f in features if f["missing"] > _SELDOM]
    unused = [f["name"] for f in features if not f["used"]]
    if constant:
        found.append(f"Constant in these rows: {_name(constant)}.")
    if empty:
        found.append(f"Missing in more than 90 % of these rows: {_name(empty)}.")
    if unused:
        found.append(f"Not used by any tree: {_name(unused)}.")
    if rows.row_losses is not None and rows.start_loss is not None:
        mean = np.average(rows.row_losses, weights=rows.weights)
        if not np.isfinite(mean):
            found.append("The loss of some rows is not finite.")
        elif mean - rows.start_loss > _NOTABLE * abs(rows.start_loss):
            found.append("On these rows the initial score alone has a lower loss.")
        heavy = rows.row_losses * rows.weights
        share = np.sort(heavy)[::-1][: max(1, len(heavy) // 100)].sum()
        if len(heavy) >= 100 and share > 0.5 * heavy.sum() > 0:
            found.append("One row in a hundred makes more than half of the loss.")
    if isinstance(history, History) and len(history.train_loss):
        found += _judge_history(history, model)
    return found


def _judge_history(history, model):
    start = np.asarray(history.choices.get("init_score", model.init_score))
    if np.shape(start) != np.shape(model.init_score) or not np.allclose(
        start, model.init_score, rtol=1e-4, atol=1e-6
    ):
        return ["The history may be that of another model: its initial score differs."]
    last = len(history.train_loss) - 1
    sets = history.validation_loss
    if sets is None:
        return ["Training had no validation set."]
    found = []
    values = next(iter(sets.values())) if isinstance(sets, dict) else sets
    if history.best_round == last and last > 0:
        found.append("The last round is the best one: more rounds may help.")
    train = history.train_loss[history.best_round]
    if values[history.best_round] > _OVERFIT * train > 0:
        found.append(
            "At the best round, the validation loss is over twice that of the "
            "training rows."
        )
    return found


def _name(names):
    more = len(names) - 8
    return ", ".join(map(str, names[:8])) + (f" and {more} more" if more > 0 else "")
