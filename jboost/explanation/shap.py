# SPDX-License-Identifier: Apache-2.0
"""Exact SHAP values of trees: the contribution of each feature to a score.

Consider a leaf of value v. Let z_j be the fraction of the cover that follows its path
at the splits on feature j, and o_j be 1 if the row follows the path at these splits,
else 0. Feature i contributes (Owen 1972)

    phi_i = v (o_i - z_i) integral_0^1 prod_{j != i} (z_j + t (o_j - z_j)) dt,

by Gauss-Legendre quadrature, exact with d / 2 points for d features. As in Linear
TreeSHAP (Yu et al. 2022), factors are multiplied from the root down, and sums are added
from the leaves up. An edge replaces the factor of the previous edge on its feature.

A linear leaf gives v plus the terms of the features that are known. A term on feature j
is therefore an edge below the leaf that no cover follows (z_j = 0), to a leaf of its
own that has the value of the term.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped

from jboost.entry import checks
from jboost.entry.context import vary
from jboost.entry.decorators import traceable
from jboost.entry.memory import require_memory
from jboost.entry.messages import show_fields
from jboost.entry.programs import compiled
from jboost.kernels.calls import call, call_on_host, floats
from jboost.kernels.library import choose, takes_implementation
from jboost.kernels.prediction import (
    Rows,
    Trees,
    as_rows,
    borrow_rows,
    repeat_trees,
    run_trees,
)
from jboost.model.ensemble import Model, read_model
from jboost.model.preparing import prepare
from jboost.model.scores import code_columns, read_trees, to_host
from jboost.model.sparse_blocks import keep_used_features, run_in_blocks
from jboost.model.wide_thresholds import match_wide
from jboost.numerics.arrays import flush_denormals
from jboost.tables.categories import goes_left
from jboost.tables.frames import read_offset
from jboost.tables.sparse import is_sparse
from jboost.trees.tree import Slopes, clip_values, find_terms

_BLOCK_CELLS = 2**21  # numbers in one array of a block of rows: 8 MiB
_DEEPEST = 255  # kMaxShapDepth


class Points(NamedTuple):
    """Quadrature on [0, 1]: where an integrand is evaluated, and the weights."""

    abscissa: Float[np.ndarray, " P"]
    weight: Float[np.ndarray, " P"]


def make_points(max_depth: int, num_features: int) -> Points:
    """Returns enough points to be exact for all paths of trees of this depth."""
    degree = max(1, min(max_depth, num_features))
    abscissa, weight = np.polynomial.legendre.leggauss((degree + 1) // 2)
    return Points(
        ((abscissa + 1) / 2).astype(np.float32), (weight / 2).astype(np.float32)
    )


class Edges(NamedTuple):
    """A tree of M nodes, each described by the edge that leads to it.

    Linear terms are nodes below their leaves. Their edges stay open for all rows.

    An edge is "open" for the rows that follow the path at all splits on the edge's
    feature from the root to this edge, and "shut" for other rows.

    Attributes:
      order: all nodes except the root, parents before their children.
      parent: the parent; 0 for the root and for nodes that no edge leads to.
      above: the nearest node above with an edge that tests the same feature, or the
        root. The edge of the root counts as open for all rows.
      is_term: whether the node is a linear term.
      value: the value of a leaf or a term, for all rows or for each; 0 for other nodes.
      share: the fraction of the parent's cover.
      gain_open, gain_shut: factors of the edge in the product: ``gain_open`` applies if
        the edge is open, ``gain_shut`` if it is shut but ``above`` is open.
      change_open, change_shut: the change of (o_i - z_i) / factor_i at the edge, in the
        same two cases.
    """

    order: Int32[Array, "M-1"]
    parent: Int32[Array, " M"]
    above: Int32[Array, " M"]
    feature: Int32[Array, " M"]
    is_left: Bool[Array, " M"]
    is_term: Bool[Array, " M"]
    value: Float[Array, "M #N"]
    share: Float[Array, " M"]
    gain_open: Float[Array, "M P"]
    gain_shut: Float[Array, "M P"]
    change_open: Float[Array, "M P"]
    change_shut: Float[Array, "M P"]


# The linear terms of the leaves, and the ranges of the features; None: no terms.
Linear = tuple[Slopes, Float[Array, "F 2"]] | None


def explain(
    rows: Rows,
    trees: Trees,
    leaf_value: Float[Array, "R K L"],
    cover: Float[Array, "R K L"],
    linear: Linear,
    *,
    max_depth: int,
    pairs: bool,
) -> Float[Array, "N *F K"]:
    """Computes Shapley values [N, F, K], or interactions [N, F, F, K] of ``pairs``."""
    points = make_points(max_depth + (linear is not None), rows.num_features)
    # The CPU kernels recurse over the tree, which limits its depth.
    cpu = None if max_depth > _DEEPEST else partial(_run_kernel, call)
    sizes: Any = dict(points=points, max_depth=max_depth, pairs=pairs)
    run = choose(cpu=cpu, xla=_explain_in_xla, **sizes)
    return run(rows, trees, (leaf_value, cover), linear)


def _run_kernel(run, rows, trees, leaves, linear, points, max_depth, pairs):
    """Computes :func:`explain` by native/shap.h, up to rounding."""
    features = [rows.num_features] * (1 + pairs)
    result = floats(rows.num_rows, *features, leaves[0].shape[1])
    return run_trees(
        run, "shap", result, rows, trees, (leaves, points, linear), max_depth,
        pairs=int(pairs),
    )  # fmt: skip


def _explain_in_xla(rows, trees, leaves, linear, *, points, max_depth, pairs):
    """Computes :func:`explain` in plain XLA; this is the reference for the kernels.

    Processes rows in blocks to bound memory. Each block needs arrays [M, P, rows] and,
    for interactions, [K, F, F, rows]; it has as many rows as fit in 8 MiB, at least
    one.
    """
    num_features = rows.num_features
    columns = flush_denormals(rows.matrix()).T
    num_nodes = 2 ** (max_depth + 1)
    if trees.left_child is not None:
        num_nodes = trees.feature.shape[2]
    none: Any = (None, None)
    slopes, ranges = linear or none
    levels = max_depth + (slopes is not None)
    if slopes is not None:
        num_nodes += math.prod(slopes.feature.shape[2:])
    cells = points.abscissa.size * num_nodes
    if pairs:
        cells = max(cells, num_features**2 * leaves[0].shape[1])
    size = max(1, min(rows.num_rows, _BLOCK_CELLS // cells))
    short = -rows.num_rows % size
    blocks = jnp.pad(columns, ((0, 0), (0, short))).reshape(num_features, -1, size)
    num_rounds, num_scores = leaves[0].shape[:2]

    def explain_block(block):
        clipped: Any = None if slopes is None else clip_values(block, ranges)

        def add_tree(total, step):
            score, tree, slopes, value, cover = step
            terms = None
            if slopes is not None:
                each = jax.tree.map(lambda part: part[:, None], slopes)
                terms = find_terms(each, lambda feature: clipped[feature[:, 0]])
                terms = slopes.feature, jnp.stack(terms, axis=1)
            edges = _make_edges(tree, value, cover, terms, points, levels)
            open_, product = _go_down(edges, _decide(tree, block), points)
            run = _add_pairs if pairs else _add_values
            own = run(edges, open_, product, num_features, levels)
            return total.at[score].add(own), None

        # A scan, not vmap over trees: vmap would turn the updates of single nodes
        # into scatters, which are slow.
        own = *repeat_trees((trees, slopes), num_scores), *leaves
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), own)
        score = jnp.tile(jnp.arange(num_scores, dtype=jnp.int32), num_rounds)
        shape = (num_features,) * (2 if pairs else 1)
        start = vary(jnp.zeros((num_scores, *shape, size), jnp.float32), block)
        return jax.lax.scan(add_tree, start, (score, *flat))[0]

    found = jax.lax.map(explain_block, jnp.swapaxes(blocks, 0, 1))
    found = jnp.moveaxis(found, (1, -1), (-1, 1))  # blocks, rows, features, K
    return found.reshape(-1, *found.shape[2:])[: rows.num_rows]


def _mean_values(trees, leaf_value, cover, *, max_depth):
    """Returns each score's sum over trees of the mean leaf value, weighted by cover."""

    def mean(trees, value, cover):
        links = _link(trees, value, cover)
        share, value = _shares(links, max_depth), links.value

        def gather(_, value):
            below = (share * value)[links.left], (share * value)[links.right]
            return jnp.where(links.is_leaf, links.value, below[0] + below[1])

        return jax.lax.fori_loop(0, max_depth, gather, value)[0]

    trees = repeat_trees(trees, leaf_value.shape[1])
    return jnp.sum(jax.vmap(jax.vmap(mean))(trees, leaf_value, cover), axis=0)


class _Links(NamedTuple):
    """A tree of M nodes; see Trees. A leaf is its own child on both sides."""

    left: Int32[Array, " M"]
    right: Int32[Array, " M"]
    is_leaf: Bool[Array, " M"]
    is_split: Bool[Array, " M"]
    feature: Int32[Array, " M"]
    value: Float[Array, " M"]
    cover: Float[Array, " M"]


def _link(tree, leaf_value, leaf_cover):
    """Converts trees in heap order and linked trees to one form; leaves are nodes."""
    is_split = ~((tree.threshold == np.inf) & tree.missing_left)
    if tree.left_child is None:
        inner = tree.feature.shape[0]
        node = jnp.arange(2 * inner + 1, dtype=jnp.int32)
        left = jnp.where(node < inner, 2 * node + 1, node)
        above = jnp.zeros(inner, jnp.float32)
        value, cover = (jnp.concatenate([above, a]) for a in (leaf_value, leaf_cover))
        grow = ((0, inner + 1),)
        is_split, feature = jnp.pad(is_split, grow), jnp.pad(tree.feature, grow)
    else:
        left, value, cover = tree.left_child, leaf_value, leaf_cover
        node = jnp.arange(left.shape[0], dtype=jnp.int32)
        feature = tree.feature
    is_leaf = left == node
    right = jnp.where(is_leaf, node, left + 1)
    value, cover = (jnp.where(is_leaf, array, 0) for array in (value, cover))
    return _Links(left, right, is_leaf, is_split, feature, value, cover)


def _shares(links, max_depth):
    """Returns each node's fraction of its parent's cover.

    If the parent's cover is 0, both children get one half. A node that is not split
    sends all rows to the left.
    """

    def gather(_, cover):
        right = jnp.where(links.is_split, cover[links.right], 0)
        below = cover[links.left] + right
        return jnp.where(links.is_leaf, links.cover, below)

    cover = jax.lax.fori_loop(0, max_depth, gather, links.cover)
    whole = jnp.where(cover > 0, cover, 1)

    def share(child, unsplit):
        own = jnp.where(cover > 0, cover[child] / whole, 0.5)
        own = jnp.where(links.is_split, own, unsplit)
        return _to_children(links, own, child)

    return share(links.left, 1.0) + share(links.right, 0.0)


def _to_children(links, values, child):
    """Copies values of inner nodes to their left or right children; 0 elsewhere."""
    index = jnp.where(links.is_leaf, child.shape[0], child)
    return jnp.zeros_like(values).at[index].set(values, mode="drop")


def _make_edges(tree, leaf_value, leaf_cover, terms, points, max_depth):
    """Computes the Edges of one tree.

    ``terms`` are the features [L, P] and the values [L, P, N] of linear terms, or None.
    Their edges count in ``max_depth``.
    """
    links = _link(tree, leaf_value, leaf_cover)
    node = jnp.arange(links.left.shape[0], dtype=jnp.int32)
    parent = _to_children(links, node, links.left)
    parent += _to_children(links, node, links.right)
    is_left = links.left[parent] == node
    has_edge = (is_left | (links.right[parent] == node)) & (node > 0)
    feature, share = links.feature[parent], _shares(links, max_depth)
    value = jnp.where(has_edge | (node == 0), links.value, 0)[:, None]
    is_term = jnp.zeros(node.shape, bool)
    if terms is not None:
        of_terms, given = terms
        leaves = node[-len(given) :]
        known = links.is_leaf & (has_edge | (node == 0))
        given = jnp.where(known[leaves, None, None], given, 0)
        given = given.reshape(-1, given.shape[2])
        value = jnp.broadcast_to(value, (len(value), given.shape[1]))
        value = jnp.concatenate([value, given])
        parent = jnp.concatenate([parent, jnp.repeat(leaves, of_terms.shape[1])])
        feature = jnp.concatenate([feature, jnp.maximum(of_terms, 0).reshape(-1)])
        widths = ((0, of_terms.size),)
        is_left, share = jnp.pad(is_left, widths), jnp.pad(share, widths)
        is_term = jnp.pad(is_term, widths, constant_values=True)
        node = jnp.arange(len(parent), dtype=jnp.int32)

    def climb(_, state):
        """Moves up one edge, until an edge tests the same feature; counts depth."""
        above, index, depth = state
        found = (above > 0) & (feature[above] == feature)
        above = jnp.where(found, above, parent[above])
        depth += (index > 0).astype(jnp.int32)
        return above, parent[index], depth

    state = (parent, node, jnp.zeros_like(node))
    above, _, depth = jax.lax.fori_loop(0, max_depth, climb, state)
    order = jnp.argsort(depth, stable=True)[1:].astype(jnp.int32)
    whole = jax.lax.fori_loop(
        0, max_depth, lambda _, z: jnp.where(node > 0, share * z[above], 1.0),
        jnp.ones_like(share),
    )  # fmt: skip
    part, before = whole[:, None], whole[above][:, None]
    t = points.abscissa[None]
    factor, last = part * (1 - t) + t, before * (1 - t) + t
    return Edges(
        order=order,
        parent=parent,
        above=above,
        feature=feature,
        is_left=is_left,
        is_term=is_term,
        value=value,
        share=share,
        gain_open=factor / last,
        gain_shut=part * (1 - t) / last,
        # Differences between an edge and the one above it on the feature. The terms
        # (o - z) / factor are (1 - z) / factor if open and -z / (z (1 - t)) if shut.
        change_open=(before - part) / (factor * last),
        change_shut=-1 / ((1 - t) * last),
    )


def _decide(tree, columns):
    """Returns whether each row goes left at each node, [I, N]."""

    def decide(feature, threshold, missing_left, left_codes):
        value = columns[feature]
        left = value <= threshold
        if left_codes is not None:
            code = jnp.nan_to_num(value, posinf=0, neginf=0).astype(jnp.int32)
            sets = jnp.broadcast_to(left_codes, (*code.shape, *left_codes.shape))
            left = jnp.where(jnp.isnan(threshold), goes_left(sets, code), left)
        return jnp.where(jnp.isnan(value), missing_left, left)

    return jax.vmap(decide)(*tree[:4])


def _go_down(edges, left, points):
    """Returns whether edges are open, [M, N], and products of factors, [M, P, N]."""
    num_nodes, num_rows = edges.parent.shape[0], left.shape[1]
    start = jnp.broadcast_to(points.weight[:, None], (points.weight.size, num_rows))

    def step(state, node):
        open_, product = state
        parent, above = edges.parent[node], open_[edges.above[node]]
        goes_on = edges.is_term[node] | (left[parent] == edges.is_left[node])
        own = above & goes_on
        gain = jnp.where(
            own[None], edges.gain_open[node][:, None], edges.gain_shut[node][:, None]
        )
        gain = jnp.where(above[None], gain, edges.share[node])
        return (
            open_.at[node].set(own),
            product.at[node].set(product[parent] * gain),
        ), None

    open_ = vary(jnp.ones((num_nodes, num_rows), bool), left)
    product = vary(jnp.zeros((num_nodes, *start.shape), jnp.float32), left)
    product = product.at[0].set(start)
    return jax.lax.scan(step, (open_, product), edges.order)[0]


def _changes(edges, open_, node):
    """Returns the change of (o_i - z_i) / factor_i at an edge, [P, N]."""
    own, above = open_[node][None], open_[edges.above[node]][None]
    shut = jnp.where(above, edges.change_shut[node][:, None], 0)
    return jnp.where(own, edges.change_open[node][:, None], shut)


def _add_values(edges, open_, product, num_features, max_depth):
    """Sums over leaves, from the last edge up to the root; returns [F, N]."""
    del max_depth

    def step(state, node):
        values, sums = state
        change = jnp.sum(_changes(edges, open_, node) * sums[node], axis=0)
        values = values.at[edges.feature[node]].add(change)
        return (values, sums.at[edges.parent[node]].add(sums[node])), None

    values = vary(jnp.zeros((num_features, open_.shape[1]), jnp.float32), product)
    sums = product * edges.value[:, None]
    return jax.lax.scan(step, (values, sums), edges.order, reverse=True)[0][0]


def _add_pairs(edges, open_, product, num_features, max_depth):
    """Sums over leaves for pairs of an edge and one above it; returns [F, F, N].

    phi_ij = v (o_i - z_i) (o_j - z_j) / 2 integral prod_{k != i, j} (...) dt for i != j
    (Lundberg et al. 2020, eq. 3). The diagonal holds the rest of phi_i.
    """
    node = jnp.arange(edges.parent.shape[0], dtype=jnp.int32)
    all_changes = jax.vmap(lambda node: _changes(edges, open_, node))(node)
    all_changes = all_changes.at[0].set(0)

    def step(state, node):
        halves, values, sums = state
        own = all_changes[node] * sums[node]
        values = values.at[edges.feature[node]].add(jnp.sum(own, axis=0))

        def add_above(_, state):
            halves, other = state
            both = jnp.sum(all_changes[other] * own, axis=0) / 2
            index = edges.feature[other], edges.feature[node]
            both = jnp.where(index[0] == index[1], 0, both)
            return halves.at[index].add(both), edges.parent[other]

        above = (halves, edges.parent[node])
        halves, _ = jax.lax.fori_loop(0, max_depth - 1, add_above, above)
        return (halves, values, sums.at[edges.parent[node]].add(sums[node])), None

    size = open_.shape[1]
    start = (
        vary(jnp.zeros((num_features, num_features, size), jnp.float32), product),
        vary(jnp.zeros((num_features, size), jnp.float32), product),
        product * edges.value[:, None],
    )
    halves, values, _ = jax.lax.scan(step, start, edges.order, reverse=True)[0]
    return fill_diagonal(halves + jnp.swapaxes(halves, 0, 1), values)


def fill_diagonal(
    pairs: Float[Array, "F F N"], values: Float[Array, "F N"]
) -> Float[Array, "F F N"]:
    """Sets the diagonal so that the interactions of each feature sum to its value."""
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    return pairs.at[index, index].set(values - jnp.sum(pairs, axis=1))


Cover = Literal["auto", "weight", "curvature"]
COVERS = ("auto", "weight", "curvature")


class ShapValues(NamedTuple):
    """The contribution of each feature to each row's score.

    Law: ``values.sum(axis=1) + base`` is the score.

    Attributes:
      values: [N, F], or [N, F, K] for K > 1 scores per row.
      base: the mean score of the training rows, computed from the cover of the leaves;
        with an offset, one for each row, [N] or [N, K].

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, x[:, 0] * x[:, 1], num_rounds=20)
      >>> found = jb.shap_values(model, x)
      >>> found.values.shape, found.base.shape
      ((200, 3), ())
    """

    values: Float[Array, "N F *K"]
    base: Float[Array, "*K"]

    def __repr__(self) -> str:
        return show_fields(self)


@traceable
@takes_implementation
def shap_values(
    model: Model,
    x: Any,
    *,
    cover: Cover = "auto",
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    implementation: str | None = None,
) -> ShapValues:
    """Computes exact SHAP values of raw scores (TreeSHAP, path-dependent).

    These are the Shapley values of a game for each row. If the features S are known,
    its value f(S) is a mean over leaves: at a split on a feature in S it follows the
    row; at any other split it averages both children, weighted by their fraction of
    the training rows (Lundberg et al. 2020, algorithm 1):

        phi_i = sum over S without i of |S|! (F - |S| - 1)! / F! (f(S + i) - f(S))

    A linear leaf gives its leaf value plus those of its linear terms that belong to
    features in S. The terms do not change ``base``.

    Law: ``values.sum(axis=1) + base`` equals ``predict(model, x)``. Both are float32
    sums, which differ by less than 2^-20 of the sum over trees of the largest leaf
    value, linear terms included (measured with 50 to 1,000 trees: 2^-23 to 2^-21.6).

    Args:
      model: a model from :func:`jboost.fit` or :func:`jboost.cart.fit_tree`.
      x: the rows, as for :func:`jboost.predict`; values of a sparse matrix are dense.
      cover: the weight of a child in averages: the "weight" of its rows (as in
        LightGBM, scikit-learn and the literature, where fractions are probabilities),
        or their "curvature", the sum of Hessians (as in XGBoost). "auto": the weight,
        or the curvature if the model was read from a file that does not hold weights.
      offset: the offset of the rows, as for :func:`jboost.predict`; added to ``base``.
      implementation: "xla", "cpu" (the compiled kernels), or None for the best one
        available; "cuda" is "xla" here. Results differ only by rounding, with the
        bound given above. Trees with more than 255 levels always use plain XLA.

    Returns:
      ShapValues with values [N, F], or [N, F, K] for K > 1 scores per row.

    Raises:
      TypeError, ValueError: an argument is invalid, or the model does not hold the
        cover of its leaves; x is sparse, and x or the model is traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, x[:, 0] * x[:, 1], num_rounds=20)
      >>> values, base = jb.shap_values(model, x)
      >>> bool(np.allclose(values.sum(axis=1) + base, jb.predict(model, x), atol=1e-5))
      True

    Notes:
      Lundberg et al. 2020, From local explanations to global understanding with
      explainable AI for trees; Yu et al. 2022, Linear TreeSHAP. The time per row is
      proportional to the number of nodes times half the depth.
    """
    model = _read_model(model, cover)
    values = _explain(model, x, pairs=False)
    # Names are not needed, and would compile the program again.
    bare = replace(model, feature_names=None, absent=None, categories=None)
    base = compiled(_mean_score)(bare)
    if offset is not None:
        offset = read_offset(offset, values.shape[0], model.num_scores)
        offset = offset[:, 0] if base.ndim == 0 else offset
        if isinstance(base, Tracer) or isinstance(offset, Tracer):
            base = base + offset
        else:  # in NumPy, because JAX compiles a sum for each shape
            base = jax.device_put(np.asarray(base) + offset)
    return ShapValues(values, base)


@traceable
@takes_implementation
def shap_interactions(
    model: Model,
    x: Any,
    *,
    cover: Cover = "auto",
    implementation: str | None = None,
) -> Float[Array, "N F F *K"]:
    """Computes SHAP interaction values: contributions of pairs of features.

    phi_ij for i != j is half of the joint contribution of i and j minus their separate
    contributions, averaged as in a Shapley value (Lundberg et al. 2020, equation 3;
    Fujimoto et al. 2006); phi_ii is the rest of phi_i.

    Laws: ``phi[:, i, j] == phi[:, j, i]``; ``phi.sum(axis=2)`` equals the
    :func:`shap_values`, which sum to the score.

    Args:
      model, x, cover, implementation: the arguments of :func:`shap_values`.

    Returns:
      [N, F, F], or [N, F, F, K] for K > 1 scores per row: N F^2 K numbers.

    Raises:
      TypeError, ValueError: the errors of :func:`shap_values`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, x[:, 0] * x[:, 1], num_rounds=20)
      >>> size = np.abs(jb.explanation.shap_interactions(model, x)).mean(axis=0)
      >>> bool(size[0, 1] > 5 * size[0, 2])
      True
    """
    return _explain(_read_model(model, cover), x, pairs=True)


# ---- checks of the model, and execution ---------------------------------------------


def _read_model(model, cover):
    """Returns an ensemble with the requested cover as its ``sums.weight``."""
    checks.check_word("cover", cover, COVERS)
    model = read_model(model)
    if model.sums is None:
        raise ValueError(
            "model must hold the cover of its leaves, got a model whose sums are None"
        )
    known = {name: getattr(model.sums, name) for name in COVERS[1:]}
    if any(isinstance(array, Tracer) for array in known.values()):
        # Chosen in the program, because traced values cannot be read here.
        if cover == "auto":
            unknown = jnp.any(jnp.isnan(known["weight"]))
            chosen = jnp.where(unknown, known["curvature"], known["weight"])
        else:
            chosen = known[cover]
    else:
        chosen = _choose_known(known, cover)
    return replace(model, sums=model.sums._replace(weight=chosen))


def _choose_known(known, cover):
    tells = [name for name, array in known.items() if not np.isnan(array).any()]
    if cover == "auto" and tells:
        cover = tells[0]
    if cover not in tells:
        has = f"only {tells[0]!r}" if tells else "neither"
        wanted = "cover" if cover == "auto" else repr(cover)
        raise ValueError(
            f"model must hold the {wanted} of its leaves for cover={cover!r}, got a "
            f"model with {has}"
        )
    if np.any(np.asarray(known[cover]) < 0):
        raise ValueError(f"the {cover} of the leaves of model must be >= 0")
    return known[cover]


def _explain(model, x, *, pairs):
    if is_sparse(x):
        return _explain_sparse(model, x, pairs)
    task = prepare(model, x, explain=True)
    sizes = [task.num_rows, *[model.num_features] * (1 + pairs), model.num_scores]
    require_memory(
        4.0 * math.prod(sizes),
        f"the result of shape {tuple(sizes)}",
        "pass x in parts",
    )
    if task.on_host and model.max_depth <= _DEEPEST:
        found = _explain_on_host(task.model, borrow_rows(task.rows), pairs)
    else:
        found = compiled(_explain_matrix, pairs)(task.model, task.rows)
    return task.cut(found, rows_axis=0)


def _explain_sparse(model, x, pairs):
    """Explains blocks of rows on the features that the model uses; others get 0."""
    small, place, width = keep_used_features(match_wide(model, x)[0])
    small = replace(small, sums=model.sums)

    def run(_, block):
        return _explain(small, block, pairs=pairs)

    found = np.asarray(run_in_blocks(run, model, x, None, rows_axis=0))
    used = np.flatnonzero(place < width)
    shape = (model.num_features,) * (2 if pairs else 1)
    values = np.zeros((len(found), *shape, *model.init_score.shape), np.float32)
    count = slice(len(used))
    if pairs:
        values[:, used[:, None], used] = found[:, count, count]
    else:
        values[:, used] = found[:, count]
    return jax.device_put(values)


def _explain_on_host(model, rows, pairs):
    """Calls the CPU kernels directly, so that no number of rows is compiled for."""
    rows, trees = read_trees(model := to_host(model), rows)
    if rows.codes is not None:
        rows = borrow_rows(np.asarray(code_columns(rows)).T)
    linear, depth = _read_linear(model), model.max_depth
    points = make_points(depth + (linear is not None), rows.num_features)
    found = _run_kernel(
        call_on_host, rows, trees, (model.leaf_value, model.sums.weight), linear,
        points, depth, pairs,
    )  # fmt: skip
    return found[..., 0] if model.init_score.ndim == 0 else found


def _explain_matrix(pairs, model, matrix):
    """Returns [N, F] or [N, F, F], with a last axis K for several scores."""
    rows, trees = read_trees(model, matrix)
    if rows.codes is not None:
        coded: Any = code_columns(rows)
        rows = as_rows(coded.T)
    found = explain(
        rows, trees, model.leaf_value, model.sums.weight, _read_linear(model),
        max_depth=model.max_depth, pairs=pairs,
    )  # fmt: skip
    return found[..., 0] if model.init_score.ndim == 0 else found


def _read_linear(model):
    return None if model.slopes is None else (model.slopes, model.ranges)


def _mean_score(model):
    """Returns the base, [] or [K]."""
    structure = (model.feature, model.threshold, model.missing_left, model.left_codes)
    left_child = None if model.links is None else model.links.left_child
    mean = _mean_values(
        Trees(*structure, left_child), model.leaf_value, model.sums.weight,
        max_depth=model.max_depth,
    )  # fmt: skip
    return model.init_score + mean.reshape(model.init_score.shape)
