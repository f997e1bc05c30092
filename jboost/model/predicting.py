# SPDX-License-Identifier: Apache-2.0
"""Prediction: scores, scores after each round, and leaves.

Rows are a matrix, a data frame, a sparse matrix or a stream. Every function here can be
jitted and vmapped; scores can be differentiated in leaf values, initial score and
offset.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Int32, Shaped

from jboost.entry import checks
from jboost.entry.context import find_mesh, map_shards
from jboost.entry.decorators import traceable
from jboost.entry.memory import require_memory
from jboost.kernels.library import takes_implementation
from jboost.model.ensemble import Ensemble, Model, check_model, read_model, take_part
from jboost.model.preparing import prepare
from jboost.model.scores import find_row_leaves, score_rows, transform_rows
from jboost.model.sparse_blocks import prepare_sparse, run_in_blocks
from jboost.model.wide_thresholds import match_wide
from jboost.tables.frames import RowSource
from jboost.tables.sparse import is_sparse


@traceable
@takes_implementation
def predict(
    model: Model,
    x: Any,
    *,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    inverse_link: Callable[..., Any] | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns the raw score F(x) = init_score + sum of leaf values (+ offset).

    Args:
      model: a model from :func:`jboost.fit`, or a tree from
        :func:`jboost.cart.fit_tree`; its score is the value of the row's leaf.
      x: numbers [N, F], NaN = missing, with the columns that the model was trained
        on; the columns of a data frame in the same order, too. A contiguous float32
        NumPy array is read without a copy. A sparse matrix (as for
        :func:`jboost.fit`) is read in blocks of rows, and only the columns that the
        model uses are read; not under ``jit``. ``model.absent`` defines the value of
        entries that it does not store; if that is None, every entry must be stored.
        A ``jax.Array`` sharded over its rows gives results with the same sharding.
        A stream (:func:`jboost.stream`) is read batch by batch; its targets are not
        used.
      offset: [N] or [N, K], added to the score, as in training. None for a single
        tree, and for a stream: its batches hold their own offsets.
      inverse_link: a function, in jax.numpy, of the score of one row, a scalar or [K].
        Its result, a pytree of arrays or a distribution, replaces the score:
        ``jax.nn.sigmoid`` for probabilities of logistic, ``jax.nn.softmax`` for
        softmax, ``jnp.exp`` for means of poisson, gamma and tweedie;
        :func:`jboost.losses.inverse_link` returns the inverse link of a loss.
      implementation: "xla", "cpu" or "cuda" (the compiled kernels), or None for the
        best where the program runs; the results are equal to the bit.

    Returns:
      [N], or [N, K] for K > 1 scores per row; or the result of ``inverse_link``, with
      an axis N in front of each array. Empty where x has no rows.

    Raises:
      TypeError, ValueError: the model is not a model, x is not a numeric matrix or
        has another number of columns, or the implementation is not available; x is
        sparse, and it or the model is traced, or ``model.absent`` is None.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.predict(model, x).shape
      (40,)
    """
    if isinstance(x, RowSource):
        run = partial(predict, inverse_link=inverse_link)
        return _predict_batches(run, model, x, offset)
    if find_mesh(x) is not None:
        run = partial(predict, model, inverse_link=inverse_link)
        return map_shards(lambda x, own: run(x, offset=own), x, offset)
    ensemble = read_model(model)
    if model.single_tree and offset is not None:
        raise ValueError(
            f"offset must be None for a {type(model).__name__}, which is fitted "
            f"without one, got {type(offset).__name__}"
        )
    task = _prepare(ensemble, x, offset)
    if task is None:
        run = partial(predict, inverse_link=inverse_link)
        return run_in_blocks(run, ensemble, x, offset, rows_axis=0)
    checks.check_link(inverse_link, ensemble.init_score.shape)
    scores = task.score_again() if offset is None else None
    if scores is None:
        base = task.pad_offset(offset, ensemble.num_scores)
        scores = score_rows(task.model, task.rows, base, staged=False)
        scores = task.cut(scores, rows_axis=0)
    return transform_rows(inverse_link, scores)


def _predict_batches(
    run: Callable[..., Any], model: Model, x: RowSource, offset: Any
) -> Any:
    ensemble = read_model(model)
    if offset is not None:
        raise ValueError(
            "offset must not be given where x is a stream, because the batches of the "
            f"stream hold it, got {type(offset).__name__}"
        )
    model, wide = match_wide(ensemble, x)
    schema = ensemble.schema._replace(wide=wide)
    batches = x.batches(schema, categorical=ensemble.categories is not None)
    parts = [run(model, rows, offset=own) for rows, own in batches]
    if not parts:
        raise ValueError("source must give at least one row, got none")
    # In NumPy: JAX compiles a program for the sizes of the batches.
    return jax.tree.map(lambda *arrays: jax.device_put(np.concatenate(arrays)), *parts)


@traceable
@takes_implementation
def staged_predict(
    model: Ensemble,
    x: Any,
    *,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    inverse_link: Callable[..., Any] | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns the score after each round, [R, N] or [R, N, K]; see :func:`predict`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.staged_predict(model, x).shape
      (20, 40)
    """
    check_model(model)
    task = _prepare(model, x, offset)
    if task is None:
        run = partial(staged_predict, inverse_link=inverse_link)
        return run_in_blocks(run, model, x, offset, rows_axis=1)
    checks.check_link(inverse_link, model.init_score.shape)
    _require_rounds(task, model, model.num_scores, "scores")
    base = task.pad_offset(offset, model.num_scores)
    stages = score_rows(task.model, task.rows, base, staged=True)
    stages = task.cut(stages, rows_axis=1, rounds_axis=0)
    return transform_rows(inverse_link, stages, staged=True)


@traceable
@takes_implementation
def leaf_indices(
    model: Model,
    x: Any,
    *,
    implementation: str | None = None,
) -> Int32[Array, "N R *K"] | Int32[Array, " N"]:
    """Returns the leaf of each row in each tree, [N, R] or [N, R, K].

    [N, R] also where the scores of a model share one tree per round.

    Leaves are numbered from 0 to 2^max_depth - 1, from left to right. In linked trees
    the number is the index of the node. For a tree from :func:`jboost.cart.fit_tree`
    the result is [N].

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.leaf_indices(model, x).shape
      (40, 20)
    """
    leaves = _find_leaves(read_model(model), x)
    if not model.single_tree:
        return leaves
    return take_part(leaves, (slice(None), 0))


def _find_leaves(model, x):
    task = _prepare(model, x)
    if task is None:
        return run_in_blocks(_find_leaves, model, x, None, rows_axis=0)
    _require_rounds(task, model, model.feature.shape[1], "leaves")
    leaves = find_row_leaves(task.model, task.rows)
    return task.cut(leaves, rows_axis=0, rounds_axis=1)


def _require_rounds(task, model, columns, what):
    """Raises if the results of all rounds for all rows do not fit into memory."""
    sizes = f"{model.num_rounds:,} rounds for {task.num_rows:,} rows"
    require_memory(
        4.0 * task.num_rows * model.num_rounds * columns,
        f"the result, {what} of {sizes},",
        "pass x in parts, or truncate the model",
    )


def _prepare(model, x, offset=None):
    return (prepare_sparse if is_sparse(x) else prepare)(model, x, offset)
