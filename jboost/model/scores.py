# SPDX-License-Identifier: Apache-2.0
"""Scores, scores by round, and leaves of rows that have been checked.

Scores are linear in leaf values and initial scores, and differentiable in them; with
linear leaves they are differentiable in slopes and rows as well. Rows of a ReadyModel
go directly to the CPU kernels, so that no number of rows triggers a compilation. Other
rows go through compiled programs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jboost.entry.context import current_implementation, vary
from jboost.entry.programs import compiled
from jboost.kernels import prediction
from jboost.kernels.library import choose
from jboost.kernels.prediction import ReadyModel, Rows, Trees, as_rows
from jboost.model.ensemble import find_sharding, place
from jboost.numerics.arrays import flush_denormals, pad_rows
from jboost.tables.categories import Categories, encode, goes_left
from jboost.trees.tree import clip_values, evaluate

_LINKED_ROWS = 64, 2**18  # smallest and largest block for inverse links


def score_rows(
    model: Any,
    rows: Any,
    offset: Float[Array, "N K"] | Float[np.ndarray, "N K"] | None,
    staged: bool,
) -> Array | np.ndarray:
    """Returns scores of the rows, [N] or [N, K]; [R, ...] of each round if ``staged``.

    Args:
      model: a ReadyModel, which gives NumPy arrays, or a :class:`jboost.Ensemble`.
      rows: rows as :meth:`ReadyModel.run` takes them; for an Ensemble, [N, F].
    """
    if not isinstance(model, ReadyModel):
        return compiled(_score_matrix, staged)(model, rows, offset)
    scores = model.run("stages" if staged else "scores", rows)
    if offset is not None:
        scores += offset.reshape(scores.shape[staged:])
    return scores


def make_ready(model: Any, **sparse: Any) -> ReadyModel:
    """Prepares an Ensemble on CPU devices for the kernels; see ReadyModel."""
    model = to_host(model)
    rows = Rows(np.zeros(0, np.float32), 0, model.num_features)
    rows, trees = read_trees(model, rows)
    values = model.leaf_value, model.init_score
    linear = () if model.slopes is None else (*model.slopes, model.ranges)
    return ReadyModel(trees, *values, rows, model.max_depth, linear=linear, **sparse)


def to_host(model: Any) -> Any:
    """Returns the model with NumPy arrays of the dtypes that the kernels take."""
    types = {"f": np.float32, "i": np.int32, "u": np.uint32, "b": np.bool_}

    def convert(array):
        array = np.asarray(array)
        return array.astype(types[array.dtype.kind], copy=False)

    return jax.tree.map(convert, model)


def _score_matrix(staged, model, rows, offset):
    values = (model.leaf_value, model.init_score.reshape(-1))
    rows, trees = read_trees(model, rows)
    linear = None if model.slopes is None else (model.slopes, model.ranges)
    depth = model.max_depth
    run, find = _choose_scores(staged, depth, linear), _choose_leaves(depth)
    # The reference is differentiable itself.
    if current_implementation() == "xla":
        scores = _scores_in_xla(staged, depth, values, trees, rows, linear)
    elif linear is None:
        scores = _scores(run, find, staged, values, trees, rows)
    else:
        scores = _linear_scores(run, staged, depth, values, trees, rows, linear)
    if offset is not None:
        scores += offset[None] if staged else offset
    return scores[..., 0] if model.init_score.ndim == 0 else scores


def find_row_leaves(model: Any, rows: Any) -> Array | np.ndarray:
    """Returns each row's leaf in each tree, [N, R], or [N, R, S] for S > 1."""
    if isinstance(model, ReadyModel):
        return model.run("leaves", rows)
    return compiled(_find_matrix_leaves)(model, rows)


def _find_matrix_leaves(model, rows):
    rows, trees = read_trees(model, rows)
    leaves = _choose_leaves(model.max_depth)(rows, trees)
    return leaves[..., 0] if trees.feature.shape[1] == 1 else leaves


def transform_rows(
    inverse_link: Callable[..., Any] | None,
    scores: Array | np.ndarray,
    *,
    staged: bool = False,
) -> Any:
    """Applies ``inverse_link`` to the score of each row (and round)."""
    if inverse_link is None:
        return scores
    axes, run = 2 if staged else 1, jax.vmap(inverse_link)
    if isinstance(scores, Tracer):
        linked = jax.vmap(run)(scores) if staged else run(scores)
        return _make_batch(inverse_link, scores, linked, axes)
    flat = np.asarray(scores).reshape(-1, *scores.shape[axes:])
    sharding = find_sharding([scores] if isinstance(scores, jax.Array) else [])

    def shape(linked):
        return place(linked.reshape(*scores.shape[:axes], *linked.shape[1:]), sharding)

    linked = jax.tree.map(shape, _transform_blocks(_link_rows(inverse_link), flat))
    return _make_batch(inverse_link, scores, linked, axes)


def _make_batch(link, scores, linked, axes):
    """Rebuilds a distribution, because ``jax.vmap`` may keep its ``batch_shape``."""
    if not hasattr(linked, "batch_shape"):
        return linked
    try:
        batch = link(jnp.moveaxis(scores, -1, 0) if scores.ndim > axes else scores)
        if batch.batch_shape == scores.shape[:axes]:
            return batch
    except Exception:  # whatever a library raises where shapes do not fit
        pass
    raise TypeError(
        "inverse_link must return the parameters of a distribution with axes of its "
        f"own, got {type(linked).__name__}"
    )


_linked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _link_rows(link):
    """Returns the link mapped over rows; a compiled one if it is jitted or JAX's own.

    Other links are not compiled, because callers may pass a new function each time.
    """
    own = str(getattr(link, "__module__", None)).startswith("jax.")
    if not own and not isinstance(link, jax.stages.Wrapped):
        return lambda scores: jax.vmap(link)(jax.device_put(scores))
    run = _linked.get(link)
    if run is None:
        known: Any = ref(link)  # the program must not keep the link alive
        run = _linked[link] = jax.jit(lambda scores: jax.vmap(known())(scores))
    return run


def _transform_blocks(run, scores):
    """Runs on blocks of 4^k rows, so that few programs are compiled.

    JAX compiles operations outside ``jit`` for each shape as well, and caches these
    programs.
    """
    least, most = _LINKED_ROWS
    blocks, first = [], 0
    while first < len(scores) or not blocks:
        size, block = least, scores[first : first + most]
        while size < len(block):
            size *= 4
        linked = run(pad_rows(block, size))
        count = len(block)
        blocks.append(jax.tree.map(lambda a, n=count: np.asarray(a)[:n], linked))
        first += most
    if len(blocks) == 1:
        return blocks[0]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)


def read_trees(model: Any, rows: Any) -> tuple[Rows, Trees]:
    """Returns the rows, with the codes of their categories, and the trees."""
    rows = rows if isinstance(rows, Rows) else as_rows(rows)
    if model.categories is not None:
        codes, features = model.categories.codes, model.categories.features
        rows = replace(rows, codes=codes, coded_features=features)
    left_child = None if model.links is None else model.links.left_child
    structure = (model.feature, model.threshold, model.missing_left)
    return rows, Trees(*structure, model.left_codes, left_child)


def code_columns(rows):
    """Returns the values that nodes compare, [F, N]: without denormals, encoded."""
    matrix = flush_denormals(rows.matrix())
    if rows.codes is not None:
        matrix = encode(Categories(rows.codes, rows.coded_features), matrix)
    return matrix.T


def _choose_leaves(depth):
    """Returns the function of rows and trees that finds the leaves [N, R, S]."""

    def in_xla(rows, trees, max_depth):
        columns = code_columns(rows)
        find = partial(_round_leaves, columns=columns, depth=max_depth)
        return jnp.moveaxis(jax.lax.map(find, trees), 2, 0)

    def on_gpu(rows, *trees, **sizes):
        return prediction.find_leaves_on_gpu(code_columns(rows), *trees, **sizes)

    cpu = prediction.find_leaves
    return choose(cpu=cpu, cuda=on_gpu, xla=in_xla, max_depth=depth)


def _choose_scores(staged, depth, linear):
    """Returns the function that computes the scores.

    Its arguments are rows, trees, the two values, and the parts of ``linear``. The GPU
    kernel takes constant leaves only.
    """

    def in_xla(rows, trees, leaf_value, init_score, *linear, staged, max_depth):
        values = leaf_value, init_score
        return _scores_in_xla(staged, max_depth, values, trees, rows, linear or None)

    def on_gpu(rows, *others, **sizes):
        return prediction.find_scores_on_gpu(code_columns(rows), *others, **sizes)

    cpu, sizes = prediction.find_scores, dict(max_depth=depth, staged=staged)
    cuda = on_gpu if linear is None else None
    return choose(cpu=cpu, cuda=cuda, xla=in_xla, **sizes)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _scores(run, find, staged, values, trees, rows):
    """Returns [N, K], or [R, N, K] after each round; linear in ``values``.

    JAX may call the rule below while another implementation is selected, so the
    functions for scores (``run``) and leaves (``find``) are arguments.
    """
    del find, staged
    return run(rows, trees, *values)


@_scores.defjvp
def _change_scores(run, find, staged, primals, tangents):
    """Differentiates scores in the leaf values; all other derivatives are 0.

    Uses plain gathers, so that JAX can transpose and differentiate them again.
    """
    values, trees, rows = primals
    leaves = find(rows, trees)
    by_round = jnp.moveaxis(leaves, 0, 2)
    size = rows.num_rows
    change = _add_rounds(staged, size, tangents[0], by_round, lambda leaf: leaf, leaves)
    return _scores(run, find, staged, values, trees, rows), change


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _linear_scores(run, staged, depth, values, trees, rows, linear):
    """Returns the scores of trees with linear leaves; see ``_scores``."""
    del staged, depth
    return run(rows, trees, *values, *linear)


@_linear_scores.defjvp
def _change_linear_scores(run, staged, depth, primals, tangents):
    """Differentiates in values, slopes and rows: plain XLA computes the change."""
    in_xla = partial(_scores_in_xla, staged, depth)
    _, change = jax.jvp(in_xla, primals, tangents)
    return _linear_scores(run, staged, depth, *primals), change


def _scores_in_xla(staged, depth, values, trees, rows, linear=None):
    """Computes scores in plain XLA, the reference for the kernels.

    ``linear`` are the slopes of the leaves, and the ranges of the features.
    """
    columns = code_columns(rows)
    find = partial(_round_leaves, columns=columns, depth=depth)
    size, varying = rows.num_rows, (columns, *trees[:3])
    if linear is None:
        return _add_rounds(staged, size, values, trees, find, *varying)
    (slopes, ranges), each = linear, jnp.arange(size, dtype=jnp.int32)
    clipped = clip_values(columns, ranges).reshape(-1)

    def give(value, step, leaf):
        def run(*tree):
            return evaluate(*tree, lambda feature: clipped[feature * size + each])

        shapes = [*value.shape[:1], *leaf.shape[1:]]
        slopes = jax.tree.map(
            lambda part: jnp.broadcast_to(part, (len(value), *part.shape[1:])), step[1]
        )
        return jax.vmap(run)(value, slopes, jnp.broadcast_to(leaf, shapes))

    steps = trees, slopes
    return _add_rounds(
        staged, size, values, steps, lambda step: find(step[0]), *varying, give=give
    )


def _give_values(value, step, leaf):
    del step
    if len(leaf) < len(value):  # all scores share the tree
        return value[:, leaf[0]]
    return jax.vmap(lambda value, leaf: value[leaf])(value, leaf)


def _add_rounds(
    staged, num_rows, values, steps, find, *varying, give=_give_values
):  # fmt: skip
    """Adds leaf values round by round; ``find(step)`` returns the leaves [S, N].

    ``varying`` are the arrays that the leaves depend on. ``give(value, step, leaf)``
    returns the values of the leaves for each row, [K, N].
    """
    leaf_value, init_score = values

    def add_round(sums, step):
        value, step = step
        sums += give(value, step, find(step))
        return sums, sums if staged else None

    zeros = jnp.zeros((init_score.shape[0], num_rows), jnp.float32)
    start = vary(zeros, leaf_value, *varying)
    sums, stages = jax.lax.scan(add_round, start, (leaf_value, steps))
    # Steps are summed apart from the start, beside which float32 might lose them.
    if stages is None:
        return init_score[None] + sums.T
    return init_score[None, None] + jnp.swapaxes(stages, 1, 2)


def _round_leaves(trees, columns, depth):
    """Finds the leaves [S, N] of raw values [F, N] in the trees of one round."""
    return jax.vmap(lambda tree: _tree_leaves(tree, columns, depth))(trees)


def _tree_leaves(tree, columns, depth):
    num_rows = columns.shape[1]
    flat, rows = columns.reshape(-1), jnp.arange(num_rows, dtype=jnp.int32)

    def descend(_, node):
        value = flat[tree.feature[node] * num_rows + rows]
        right = value > tree.threshold[node]
        if tree.left_codes is not None:
            code = jnp.nan_to_num(value, posinf=0, neginf=0).astype(jnp.int32)
            elsewhere = ~goes_left(tree.left_codes[node], code)
            right = jnp.where(jnp.isnan(tree.threshold[node]), elsewhere, right)
        right = jnp.where(jnp.isnan(value), ~tree.missing_left[node], right)
        if tree.left_child is None:
            return 2 * node + 1 + right.astype(jnp.int32)
        left = tree.left_child[node]
        return left + (right & (left != node)).astype(jnp.int32)

    start = vary(jnp.zeros(num_rows, jnp.int32), *tree[:3], columns)
    node = jax.lax.fori_loop(0, depth, descend, start)
    return node - tree.feature.shape[0] if tree.left_child is None else node
