# SPDX-License-Identifier: Apache-2.0
"""refit: gives a model new leaf values for new rows, weights or another loss.

In: a model, rows, a loss. Out: the model with the same splits; its leaf values are
those that training would fit at the same leaves, one round after the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import numpy as np
from jaxtyping import ArrayLike, Shaped

from jboost import losses
from jboost.boosting.method import initial_scores
from jboost.boosting.settings import (
    LeafSettings,
    learning_rates,
    read_settings,
    takes_settings,
)
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.model.ensemble import Ensemble, check_model
from jboost.tables.categories import check_values, describe_column, encode
from jboost.tables.domains import check_domain, warn_of_collisions
from jboost.tables.frames import read_frame
from jboost.tables.sparse import is_sparse
from jboost.tables.targets import check_weights
from jboost.training.host_loop import refit_rounds
from jboost.training.preparing import make_leaf_job
from jboost.training.request import may_pad_rows
from jboost.training.rows import PaddedRows, put_grouped_rows
from jboost.training.starting import start
from jboost.trees.slopes import mix


@explain_arguments
@on_host("call jb.refit on concrete arrays")
@takes_implementation
@takes_settings
def refit(
    model: Ensemble,
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    groups: Any = None,
    decay: float = 0.0,
    init_score: Any = "auto",
    progress: bool = False,
    implementation: str | None = None,
    **settings: Unpack[LeafSettings],
) -> Ensemble:
    """Returns the model with new leaf values, fitted to other rows or another loss.

    The splits stay. Round by round, the derivatives of the loss are evaluated at the
    current scores F, the leaves are fitted as in :func:`jboost.fit`, and the new tree
    is added to the scores:

        value = decay * old value + (1 - decay) * learning_rate * fitted value

    so that each round corrects the remaining errors of the rounds before it. Slopes of
    linear leaves are mixed as the values are, around the old centers if ``decay`` > 0.
    The initial score is mixed in the same way. This is the method of LightGBM's
    ``Booster.refit(decay_rate=0.9)`` and XGBoost's ``process_type="update",
    updater="refresh"`` (decay 0).

    A leaf without rows of positive weight keeps its old value. With the training rows,
    the loss and the settings of training, and decay 0, the result is the trained model,
    except where leaf values were fitted to a sample of the rows (``leaf_rows``), or
    trees to leaf bounds that the model does not store (``monotone``): refitting uses
    all rows, and new values need not be monotone.

    Args:
      model: a model from :func:`jboost.fit`, a file or another library; for an
        estimator, its ``model_``.
      x, y: the rows, as for :func:`jboost.fit`, with the columns and
        categories of the model. Dense or sparse; not a stream.
      loss: the loss, of one row or of a group, as for :func:`jboost.fit`. It may be
        another one than in training, with the same number of scores K.
      sample_weight: row weights [N], >= 0.
      offset: numbers [N] or [N, K], added to the score.
      groups: the groups of the rows, for a loss of groups.
      decay: the share of the old values that is kept, from 0 (only the rows count) to 1
        (nothing changes).
      init_score: the new initial score: "auto" for the argmin of the weighted loss,
        "median" of the rows' own minimizers, a number or K numbers.
        ``model.init_score`` keeps the old one.
      progress: shows a bar.
      implementation: the kernels to run, as for :func:`jboost.fit`.
      {settings}

    The model does not store the settings of training: pass those that differ from the
    defaults, ``learning_rate`` above all.

    Returns:
      A new model. Its ``sums``, which importance and SHAP values use, are those of the
      given rows: a leaf without rows has weight 0.

    Raises:
      TypeError, ValueError: for invalid arguments; a leaf value became infinite or NaN.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> model, history = jb.fit(x, y, num_rounds=20)
      >>> later = jb.refit(model, x, y + 5, decay=0.1)
      >>> bool(np.abs(jb.predict(later, x) - (y + 5)).mean() < 1.0)
      True

    References:
      LightGBM, ``GBDT::RefitTree``; XGBoost, ``TreeRefresher``.
    """
    check_model(model)
    decay = float(checks.check_number("decay", decay, least=0.0, most=1.0))
    # In training, a tree adds nothing if its root is below min_child_weight.
    chosen = read_settings(
        {
            **settings, "init_score": init_score, "num_scores": model.num_scores,
            "min_child_weight": 0.0, "share_structure": model.shares_structure,
            "linear_leaves": model.slopes is not None,
        }
    )  # fmt: skip
    rates = np.asarray(learning_rates(chosen.learning_rate, model.num_rounds))
    begin = initial_scores(chosen)
    padded = may_pad_rows(loss, groups)
    x, rows = read_rows(model, (x, y, sample_weight, offset), loss, padded, groups)
    if model.slopes is not None:
        if is_sparse(x):
            raise ValueError(
                "x must be dense for a model with linear leaves, got sparse x"
            )
        rows = rows.with_values(x, model.ranges)
    with resolve_implementation(rows.data.weights):
        job = make_leaf_job(chosen, loss, rows, rates, model.ranges)
        state, _ = start(job, begin, seed=0)
        if decay > 0:
            mixed = mix(decay, model.init_score, state.init_score)
            state, _ = start(job, mixed.reshape(-1), seed=0)
        return refit_rounds(model, [x], job, state, decay, progress)


class ModelRows(NamedTuple):
    """Rows on the device, and the table that determines their leaves.

    Attributes:
      x: a matrix with the columns of the model; the table as it was passed if it is
        sparse, or if the model compares columns in float64.
      rows: the rows on the device, without codes.
    """

    x: Any
    rows: PaddedRows


def read_rows(
    model: Ensemble,
    parts: tuple[Any, Any, Any, Any],
    loss: Any,
    padded: bool,
    groups: Any = None,
    prefix: str = "",
    *,
    held: bool = False,
) -> ModelRows:
    """Checks rows against the model and the loss, and puts them on the device.

    Args:
      parts: x, y, sample_weight, offset; the last two may be None.
      loss: the loss; the targets must be in its domain.
      padded: whether rows may be padded.
      groups: the groups of the rows, for a loss of groups.
      prefix: the prefix of argument names in errors.
      held: whether the rows are held out, and may have categories that the model lacks.

    Raises:
      TypeError, ValueError: the rows do not suit the model or the loss.
    """
    x, y, weights, offset = parts
    frame = read_frame(
        x, f"{prefix}x", schema=model.schema, sparse=True,
        categorical=model.categories is not None, extend=not held,
    )  # fmt: skip
    matrix, num_scores = frame.matrix, model.num_scores
    if matrix.shape[1] != model.num_features:
        raise ValueError(
            f"{prefix}x must have {model.num_features} columns, as the model was "
            f"trained on, got {matrix.shape[1]}"
        )
    if y is None:
        raise ValueError(f"{prefix}y must be given, got None")
    wide = model.wide_threshold is not None
    if not wide:
        warn_of_collisions(x)
    size = matrix.shape[0]
    if weights is not None:
        weights = check_weights(weights, size, f"{prefix}sample_weight")
    if model.categories is not None and not held:
        _check_known(model, frame, weights)
    rows = put_grouped_rows(
        size, y, weights, offset, groups, loss=loss, num_scores=num_scores,
        padded=padded, prefix=prefix,
    )  # fmt: skip
    check_domain(loss, rows.data.targets, rows.data.weights, num_scores, f"{prefix}y")
    return ModelRows(x if wide or is_sparse(x) else matrix, rows)


def _check_known(model, frame, weights):
    """Raises for categories that the model lacks, in rows of positive weight."""
    categories, names = model.categories, model.feature_names
    check_values(frame.matrix, categories.features, "x", names)
    used = slice(None) if weights is None else np.asarray(weights) > 0
    matrix = np.asarray(frame.matrix)[used]
    unseen = np.isnan(encode(categories, matrix)) & ~np.isnan(matrix)
    for feature in categories.features:
        numbers = np.unique(matrix[unseen[:, feature], feature]).astype(int)
        if len(numbers):
            values = frame.categories and frame.categories[feature]
            found = [n if values is None else values[n] for n in numbers[:5].tolist()]
            raise ValueError(
                "x must have the categories of the model in "
                f"{describe_column(feature, names)}, whose splits know no others, got "
                f"{found}; train new rounds with jb.fit(x, y, model=model), or replace "
                "them by missing values, which the model takes them for"
            )
