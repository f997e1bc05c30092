# SPDX-License-Identifier: Apache-2.0
"""A page that shows a model: quality, features, trees, settings.

quality      numbers and charts for the kind of loss
contents     importance, SHAP values, columns, settings, warnings
javascript   the trees as arrays, and the inverse link
page.*       the page, which draws all of these in a browser
trees.js     predictions there
"""

import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost import losses
from jboost.boosting.groups import read_groups
from jboost.entry import checks
from jboost.entry.decorators import fetch, on_host
from jboost.entry.messages import show
from jboost.losses.likelihoods import Likelihood
from jboost.model.containers import replace_file
from jboost.model.ensemble import Ensemble, Model, read_model
from jboost.model.predicting import predict
from jboost.model.preparing import check_columns
from jboost.model.scores import transform_rows
from jboost.plotting.curves import check_history, read_curves
from jboost.reports import contents, quality
from jboost.reports.javascript import clean, list_arrays, pack, write_link
from jboost.selection.comparison import is_of_groups
from jboost.selection.cross_validation import CrossValidation
from jboost.tables.domains import check_domain
from jboost.tables.frames import read_frame, read_offset
from jboost.tables.groups import make_groups
from jboost.tables.sparse import is_sparse
from jboost.tables.targets import check_targets, check_weights
from jboost.training.record import History

_MOST_BYTES = 1_500_000  # packed trees; the page has at most 2 MB
_MOST_SPLITS = 140_000  # their leaf values alone take more
_STARTS = 200  # rows that one can start from
_MOST_CELLS = 100_000  # in these rows


@on_host("call it with the trained model")
def report(
    model: Model,
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    history: History | CrossValidation | None = None,
    path: str | Path = "report.html",
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    groups: Any = None,
    inverse_link: Callable[..., Any] | None = None,
    class_names: Sequence[Any] | None = None,
    title: str = "Model report",
    seed: int = 0,
) -> Path:
    """Writes a page in HTML that shows a model: one file, which needs no network.

    It has numbers and charts for the kind of loss: calibration, ROC and confusion of
    classes; residuals of numbers; coverage of quantiles and distributions; NDCG of
    ranking; concordance of survival. It shows which features matter (the rise of the
    loss when a column is shuffled, SHAP values with interactions, the best and the
    worst rows explained), the trees, and the settings. Sliders change the features of
    a row, and the page computes the prediction, because it holds the trees.

    The page holds the values of up to 500 rows, the targets of 600, and the names of
    categories: do not publish it where these must not be.

    Args:
      model: a model from :func:`jboost.fit`.
      x, y: rows and targets, best held out from training, in any form that
        :func:`jboost.fit` takes, except sparse matrices and streams.
      loss: the loss that the model was trained with. It decides on the charts.
      history: the history of training, or the result of :func:`jboost.cross_validate`,
        for the curves and the settings that were chosen.
      path: the file to write.
      sample_weight, offset: the weights and offsets of the rows.
      groups: the group of each row, for losses of groups.
      inverse_link: the function of a row's score that gives the prediction, as for
        :func:`jboost.predict`. None: that of the loss.
      class_names: the names of the classes 0, 1, ...
      title: the title of the page.
      seed: the seed of the samples that are shown.

    Returns:
      The path.

    Raises:
      TypeError, ValueError: arguments are invalid or inconsistent.

    Example:
      >>> import pathlib, tempfile
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] * x[:, 1]
      >>> model, history = jb.fit(x[:150], y[:150], num_rounds=10)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder) / "report.html"
      ...     path = jb.report(model, x[150:], y[150:], history=history, path=file)
      ...     path.read_text()[:15]
      '<!DOCTYPE html>'
    """
    ensemble, path = read_model(model), _check_path(path)
    if history is not None and np.size(getattr(history, "train_loss", 1)):
        check_history(history, None)
    checks.check_integer("seed", seed, least=0)
    matrix, rows = _score(
        ensemble, x, y, loss,
        weights=sample_weight, offset=offset, groups=groups, link=inverse_link,
        class_names=class_names,
    )  # fmt: skip
    judged = quality.judge(rows)
    by_class = judged.num_classes > 0
    explained = contents.explain(ensemble, rows, matrix, by_class, seed)
    features = contents.list_features(ensemble, matrix)
    data = dict(
        subtitle=_describe(ensemble, rows),
        quality=judged._asdict(),
        curves=_list_curves(history),
        explained=explained,
        shuffled=contents.shuffle(ensemble, matrix, rows, seed),
        features=features,
        classes=rows.class_names,
        settings=contents.list_settings(ensemble, history, loss),
        versions=contents.list_versions(),
        warnings=contents.list_warnings(ensemble, features, history, rows),
    )
    trees, packed = _pack_model(ensemble, rows, matrix, seed)
    page = _fill_page(str(title), data | trees, packed)
    replace_file(path, [page.encode(errors="replace")])
    return path


def _check_path(path):
    """Returns the path of a file that can be written, before any work is done."""
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path must be a path of a file, got {show(path)}")
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise FileNotFoundError(
            f"path must be a file in a folder that exists, got {str(path)!r}"
        )
    return path


def _score(
    model, x, y, loss, *, weights, offset, groups, link, class_names
) -> tuple[Float[np.ndarray, "N F"], quality.Scored]:
    """Checks the rows; returns their numbers, and the predictions for them."""
    if is_sparse(x):
        raise TypeError(
            "x must hold its rows as a dense table, at best some thousand held-out "
            f"rows, got {type(x).__name__}; pass part of a sparse matrix as "
            "x[:5000].toarray()"
        )
    frame = read_frame(x, "x", schema=model.schema, categorical=True)
    matrix = np.asarray(frame.matrix)
    check_columns(model, matrix.shape[1])
    num_rows, num_scores = len(matrix), model.num_scores
    if weights is None:
        weights = np.ones(num_rows, np.float32)
    weights = np.asarray(check_weights(weights, num_rows, "sample_weight"))
    numbers = np.flatnonzero(weights > 0)  # rows without weight count nowhere
    if not numbers.size:
        raise ValueError("sample_weight must be positive for a row, got zeros only")
    targets = fetch(check_targets(y, num_rows, weights, "y"))
    check_domain(loss, targets, weights, num_scores, "y")
    names = _check_class_names(class_names, max(num_scores, 2))
    link = _find_link(loss, model) if link is None else link
    checks.check_link(link, model.init_score.shape)
    scores = np.asarray(predict(model, x, offset=offset))[numbers]
    if offset is not None:
        offset = np.asarray(read_offset(offset, num_rows, num_scores))[numbers]
    targets = jax.tree.map(lambda leaf: leaf[numbers], targets)
    weights, matrix = weights[numbers], matrix[numbers]
    row_losses, start = None, None
    if is_of_groups(loss, groups, y, num_scores):
        groups = _read_groups(groups, loss, numbers, num_rows)
    else:
        groups = None
        first = np.broadcast_to(np.asarray(model.init_score), scores.shape)
        first = first if offset is None else first + offset.reshape(scores.shape)
        row_losses, before = quality.find_row_losses(
            loss, scores, np.float32(first), targets, weights, num_scores
        )
        start = float(np.average(before, weights=weights))
    return matrix, quality.Scored(
        loss, link, scores, fetch(transform_rows(link, scores)), targets, weights,
        offset, numbers, row_losses, start, groups, names,
    )  # fmt: skip


def _read_groups(groups, loss, numbers, num_rows):
    """Returns the groups of the rows with weight."""
    found, _ = read_groups(groups, loss, None, num_rows)
    if found is None or found.number is None or len(numbers) == num_rows:
        return found
    return make_groups(np.asarray(found.number)[numbers])


def _check_class_names(names, count):
    if names is None:
        return None
    listed = isinstance(names, Sequence | np.ndarray) and not isinstance(names, str)
    if not listed or len(names) != count:
        raise ValueError(f"class_names must be {count} names, got {show(names)}")
    return [str(name) for name in names]


def _find_link(loss, model):
    """Returns the inverse link of a loss; None where its result is no pytree."""
    bare = losses.bare_loss(loss)
    if not isinstance(bare, Likelihood):
        return losses.inverse_link(loss)
    try:
        return checks.check_link(bare.make_distribution, model.init_score.shape)
    except TypeError:
        return None


def _describe(model, rows):
    name = getattr(losses.bare_loss(rows.loss), "__name__", "a loss of its own")
    scores = "" if model.num_scores == 1 else f" of {model.num_scores} scores"
    count = f"{len(rows.weights):,} rows and {model.num_features:,} features"
    return f"{name}: {model.num_rounds:,} rounds{scores}, shown on {count}"


def _list_curves(history):
    """Returns a chart of the loss, and one of each metric."""
    if history is None or not history.train_loss.shape[-1]:
        return []
    names: Any = history.metrics
    if isinstance(history, History):
        names = {name: None for found in names.values() for name in found}
    charts = []
    for metric in (None, *names):
        lines, widths, marked = read_curves(history, metric)
        series = []
        for name, values in lines.items():
            line = dict(name=name, y=np.asarray(values, float), dashed=name == "train")
            if name in widths:
                line |= dict(low=values - widths[name], high=values + widths[name])
            series.append(line)
        label = quality.title(metric or "loss")
        best = history.best_round if marked is not None else -1
        charts.append(
            dict(
                type="lines", title=f"{label} by round", series=series,
                x=list(range(len(series[0]["y"]))), x_label="round", y_label=label,
                mark=None if best < 0 else dict(x=best, text=f"best round {best}"),
            )
        )  # fmt: skip
    return charts


def _pack_model(model: Ensemble, rows, matrix, seed):
    """Returns the facts about the trees, and the trees as text, "" if they do not fit.

    ``what_if`` is a sentence that says why there are no predictions, or "".
    """
    count = max(1, min(len(matrix), _STARTS, _MOST_CELLS // max(matrix.shape[1], 1)))
    starts = np.sort(np.random.default_rng(seed).permutation(len(matrix))[:count])
    link = write_link(rows.link, model.num_scores)
    reason = ""
    if not model.num_rounds:
        reason = "The model has no trees."
    elif model.wide_threshold is not None:
        reason = "The model compares some columns in float64."
    elif np.count_nonzero(model.is_split) > _MOST_SPLITS:
        reason = "The trees are too large for this page."
    shared = model.num_scores if model.shares_structure else 1
    facts = dict(
        num_scores=model.num_scores, per_leaf=shared, num_rounds=model.num_rounds,
        words=0 if model.left_codes is None else model.left_codes.shape[-1],
        levels=0 if model.categories is None else model.categories.codes.shape[-1],
        terms=0 if model.slopes is None else model.slopes.feature.shape[-1],
        single=model.init_score.ndim == 0, starts=rows.numbers[starts],
        link=None if link is None else link._asdict(),
    )  # fmt: skip
    arrays = {} if reason else list_arrays(model)
    if arrays:
        arrays["rows"] = np.asarray(matrix[starts], np.float32)
        given = 0 if rows.offset is None else rows.offset[starts]
        shape = (count, model.num_scores)
        arrays["offset"] = np.array(np.broadcast_to(given, shape), np.float32)
    packed = pack(arrays) if arrays else ""
    if len(packed) > _MOST_BYTES:
        size = f"{len(packed) / 1e6:.1f} MB"
        reason, packed = f"The trees are too large for this page ({size}).", ""
    return dict(model=facts, what_if=reason), packed


def _fill_page(title, data, packed):
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _read("page.css"),
        "DATA": json.dumps(clean(data), separators=(",", ":")).replace("<", "\\u003c"),
        "MODEL": packed,
        "TREES": _read("trees.js"),
        "SCRIPT": _read("page.js"),
    }
    # Split first, because the parts may hold the names of places.
    pieces = _read("page.html").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _read(name):
    return files("jboost.reports").joinpath(name).read_text(encoding="utf-8")
