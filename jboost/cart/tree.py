# SPDX-License-Identifier: Apache-2.0
"""Single regression trees (CART): exact growth to any depth; weakest-link pruning."""

import heapq
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Int, Shaped

from jboost.cart.least_squares import Rules, grow, make_tree
from jboost.entry import checks, feature_checks
from jboost.entry.decorators import on_host
from jboost.entry.messages import show, show_fields
from jboost.model.nodes import LEAF, find_parents
from jboost.model.predicting import leaf_indices
from jboost.model.regression_tree import RegressionTree
from jboost.tables.domains import warn_of_collisions
from jboost.tables.frames import check_finite, read_frame, read_values
from jboost.tables.targets import check_targets, check_weights

_DEEPEST = 2**31 - 1  # the limit for max_depth=None


@on_host("call jb.boost there")
def fit_tree(
    x: Any,
    y: Any,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    max_depth: int | None = None,
    min_child_samples: int = 1,
    min_split_samples: int = 2,
    min_child_weight: float = 0.0,
    min_gain: float = 0.0,
    feature_names: Sequence[str] | None = None,
) -> RegressionTree:
    """Fits a regression tree by least squares, on all distinct values.

    Splits each node by the feature j and the threshold s that minimize

        sum_{x_ij <= s} w_i (y_i - mean_left)^2
            + sum_{x_ij > s} w_i (y_i - mean_right)^2

    (Breiman et al. 1984, section 8.3), until the targets of a node are equal or the
    limits allow no split. Splits without gain are kept (the first split of an
    exclusive or has none); pruning removes them at alpha = 0. Thresholds are midpoints
    of neighboring distinct values, as in :func:`jboost.fit_bins`. If gains
    differ only by rounding, the lowest feature wins, then the lowest threshold.

    Missing values go to the side with the larger gain, to the right on a tie; a split
    may also separate values from missing values. If a node had no missing values in
    training, they go to the heavier child, to the left on a tie.

    Runs on the host in float64: one sort per column, then one pass over the rows per
    level, on all cores available to the process.

    Args:
      x: numbers [N, F], an array or a data frame, converted to float32; NaN is
        missing, infinities are values.
      y: finite numbers [N] or [N, K]; for K targets per row, squared errors are summed
        over the targets.
      sample_weight: weights of the rows; rows of weight 0 are ignored.
      max_depth: maximum number of levels of splits; None for no limit.
      min_child_samples: minimum number of rows in a child.
      min_split_samples: minimum number of rows in a node that is split.
      min_child_weight: minimum weight of a child. A child always has more than 1e-12
        of its parent's weight, because float64 sums cannot resolve less.
      min_gain: minimum reduction of the weighted sum of squared errors by a split.
      feature_names: F different names, stored in the tree; default: the column names
        of a data frame.

    Returns:
      A RegressionTree, for :func:`jboost.predict`, :func:`jboost.leaf_indices`,
      :func:`jboost.cart.pruning_path` and :func:`jboost.cart.prune`.

    Raises:
      TypeError, ValueError: an argument is invalid or traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.array([[1.0], [2.0], [4.0], [np.nan]])
      >>> tree = jb.cart.fit_tree(x, np.array([1.0, 1.0, 5.0, 5.0]))
      >>> tree.threshold[0], tree.missing_left[0], tree.value
      (np.float32(3.0), np.False_, array([3., 1., 5.]))
    """
    rules = _make_rules(
        max_depth, min_child_samples, min_split_samples, min_child_weight, min_gain
    )
    table = _check_table(x, y, sample_weight, feature_names)
    warn_of_collisions(x)
    return grow_tree(*table, rules)


def _make_rules(
    max_depth, min_child_samples, min_split_samples, min_child_weight, min_gain
):
    """Checks the limits of a tree and returns them."""
    depth = _DEEPEST if max_depth is None else max_depth
    check_integer = partial(checks.check_integer, least=1)
    return Rules(
        max_depth=checks.check_integer("max_depth", depth, least=0),
        min_child_samples=check_integer("min_child_samples", min_child_samples),
        min_split_samples=check_integer("min_split_samples", min_split_samples),
        min_child_weight=check_known("min_child_weight", min_child_weight),
        min_gain=check_known("min_gain", min_gain),
    )


def check_known(name: str, value: Any) -> float:
    """Checks that a value is a finite number >= 0 and returns it."""
    checks.check_number(name, value, least=0.0, finite=False)
    if not np.isfinite(float(value)):  # float64, unlike numbers of ``fit``
        raise ValueError(f"{name} must be a number >= 0.0, got {show(value)}")
    return float(value)


class Table(NamedTuple):
    """Training data of a tree: x in float32, y and weights in float64."""

    matrix: Float[np.ndarray, "N F"]
    targets: Float[np.ndarray, "N *K"]
    weights: Float[np.ndarray, " N"] | None
    names: tuple[str, ...] | None


def _check_table(x, y, sample_weight, feature_names=None):
    frame = read_frame(x, "x")
    matrix = np.asarray(frame.matrix)
    num_rows = len(matrix)
    weights = None
    if sample_weight is not None:
        with np.errstate(over="ignore"):  # becomes inf, which is rejected
            check_weights(sample_weight, num_rows, "sample_weight", most=1e300)
        weights = np.asarray(read_values(sample_weight, "sample_weight"), np.float64)
    if isinstance(y, tuple | dict) or (isinstance(y, list) and not len(y)):
        raise TypeError(
            "y must be an array of numbers, one row per row of x, got "
            f"{type(y).__name__}"
        )
    with np.errstate(over="ignore"):
        targets = check_targets(y, num_rows, weights, "y")
    check_finite(targets, weights, "y", targets)
    if targets.ndim > 2 or 0 in targets.shape:
        raise ValueError(f"y must be [N] or [N, K], got shape {targets.shape}")
    # Checked in float32, the type of scores, but fitted in float64.
    return Table(
        matrix,
        np.asarray(y if isinstance(y, list) else read_values(y, "y"), np.float64),
        weights,
        feature_checks.check_names(feature_names, frame.names, matrix.shape[1]),
    )


def grow_tree(
    matrix: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray | None,
    names: tuple[str, ...] | None,
    rules: Rules,
) -> RegressionTree:
    """Fits a tree to a checked table."""
    num_features = matrix.shape[1]
    if weights is not None:
        used = weights > 0
        if not used.all():
            matrix, targets, weights = matrix[used], targets[used], weights[used]
        # Without weights, candidate cuts are the same for all columns: faster.
        if weights.min() == weights.max() == 1:
            weights = None
    by_output = np.ascontiguousarray(targets.reshape(len(targets), -1).T)
    nodes = grow(matrix, by_output, weights, rules)
    value = nodes.value[0] if targets.ndim == 1 else nodes.value.T
    arrays = nodes._replace(value=value)._asdict()
    return make_tree(**arrays, num_features=num_features, feature_names=names)


def check_tree(tree: Any) -> None:
    """Raises TypeError unless ``tree`` is a RegressionTree."""
    if not isinstance(tree, RegressionTree):
        raise TypeError(f"tree must be a RegressionTree, got {type(tree).__name__}")


_SAME = 1e-10  # relative: alphas closer than this differ only by rounding


class PruningPath(NamedTuple):
    """The S subtrees that are optimal for some alpha, from the largest to the root.

    Attributes:
      alphas: ascending; subtree i is optimal from alphas[i] up to alphas[i + 1]. The
        first is 0: the smallest subtree with the error of the whole tree.
      num_leaves: the number of leaves of each subtree; decreases to 1.
      squared_error: the weighted squared error of each subtree, summed over its leaves.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(4.0)[:, None], np.array([0.0, 1.0, 5.0, 5.0])
      >>> path = jb.cart.pruning_path(jb.cart.fit_tree(x, y))
      >>> path.alphas.tolist(), path.num_leaves.tolist()
      ([0.0, 0.5, 20.25], [3, 2, 1])
    """

    alphas: Float[np.ndarray, " S"]
    num_leaves: Int[np.ndarray, " S"]
    squared_error: Float[np.ndarray, " S"]

    def __repr__(self) -> str:
        return show_fields(self)


@on_host("call it on concrete arrays")
def pruning_path(tree: RegressionTree) -> PruningPath:
    """Finds every subtree that minimizes the cost for some alpha.

        C_alpha(T) = sum of leaves' squared errors + alpha * number of leaves

    (Breiman et al. 1984, section 3.3). Repeatedly collapsing the inner node t with the
    smallest g(t) = (error of t - error of its leaves) / (its leaves - 1) gives these
    subtrees; the alphas are the values of g.

    Errors are weighted sums, so the unit of alpha is the squared target times weight;
    scikit-learn's ``ccp_alpha`` is alpha divided by the total weight.

    Args:
      tree: a tree from :func:`jboost.cart.fit_tree`.

    Returns:
      A PruningPath. Law: ``prune(tree, path.alphas[i])`` has ``path.num_leaves[i]``
      leaves.

    Raises:
      TypeError: the tree is not a RegressionTree, or is being traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(4.0)[:, None], np.array([0.0, 1.0, 5.0, 5.0])
      >>> tree = jb.cart.fit_tree(x, y)
      >>> jb.cart.pruning_path(tree).alphas
      array([ 0.  ,  0.5 , 20.25])
    """
    check_tree(tree)
    alpha, is_split = _collapse_alphas(tree), np.asarray(tree.left) != LEAF
    order = np.argsort(alpha[is_split])
    alpha, gain = (a[is_split][order] for a in (alpha, np.asarray(tree.gain)))
    # Nodes that collapse at the same alpha, up to rounding, form one step. Its alpha is
    # the largest of theirs, so that pruning with it collapses all of them.
    step = np.append(alpha[1:] > alpha[:-1] * (1 + _SAME), True)[: len(alpha)]
    step &= alpha > 0
    ends = np.flatnonzero(step) + 1
    first = int(np.sum(alpha <= 0))
    removed = np.append(first, ends)
    error = np.asarray(tree.squared_error)[~is_split].sum()
    return PruningPath(
        alphas=np.append(0.0, alpha[ends - 1]),
        num_leaves=1 + len(alpha) - removed,
        squared_error=error + np.append(0.0, np.cumsum(gain))[removed],
    )


@on_host("call it on concrete arrays")
def prune(tree: RegressionTree, alpha: float) -> RegressionTree:
    """Returns the smallest subtree with the least squared error + alpha * leaves.

    Breiman et al. 1984, section 3.3; see :func:`pruning_path`.

    Args:
      tree: a tree from :func:`jboost.cart.fit_tree`.
      alpha: the cost of a leaf, >= 0, in units of weight times squared target;
        infinity leaves only the root.

    Returns:
      A RegressionTree that holds only the remaining nodes. Law:
      ``prune(prune(tree, a), b)`` is ``prune(tree, max(a, b))``.

    Raises:
      TypeError, ValueError: tree is not a RegressionTree, or alpha is not a number
        >= 0.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(4.0)[:, None], np.array([0.0, 1.0, 5.0, 5.0])
      >>> tree = jb.cart.fit_tree(x, y)
      >>> jb.cart.prune(tree, 1.0).value
      array([2.75, 0.5 , 5.  ])
    """
    check_tree(tree)
    if not np.array_equal(alpha, np.inf):
        alpha = check_known("alpha", alpha)
    left = np.asarray(tree.left)
    keeps_split = (left != LEAF) & (_collapse_alphas(tree) > alpha)
    stays = np.zeros(len(left), bool)
    stays[0] = True
    stays[left[keeps_split]] = stays[left[keeps_split] + 1] = True
    number = np.cumsum(stays) - 1  # still breadth first, siblings adjacent

    def cut(field, leaf):
        return np.where(keeps_split, field, np.asarray(leaf, field.dtype))[stays]

    return make_tree(
        left=cut(number[left].astype(np.int32), LEAF),
        feature=cut(np.asarray(tree.feature), 0),
        threshold=cut(np.asarray(tree.threshold), np.inf),
        missing_left=cut(np.asarray(tree.missing_left), True),
        value=np.asarray(tree.value)[stays],
        gain=cut(np.asarray(tree.gain), 0),
        squared_error=np.asarray(tree.squared_error)[stays],
        weight=np.asarray(tree.weight)[stays],
        num_rows=np.asarray(tree.num_rows)[stays],
        num_features=tree.num_features,
        feature_names=tree.feature_names,
    )


class AlphaChoice(NamedTuple):
    """Cross-validated errors of the subtrees, and two recommended alphas.

    Attributes:
      tree: the tree fitted to all rows, not pruned.
      alphas: one for each of the S subtrees of ``pruning_path(tree)``: the geometric
        mean of the two alphas between which it is optimal; infinity for the root.
      num_leaves: the number of leaves of each subtree.
      mean_error: weighted mean of the squared errors of held-out rows.
      standard_error: the standard error of ``mean_error``.
      best_alpha: the alpha with the smallest mean error; the largest one on a tie.
      one_se_alpha: the largest alpha with a mean error at most one standard error
        above the smallest.

    Example:
      >>> import numpy as np, jboost as jb
      >>> rng = np.random.default_rng(0)
      >>> x = rng.uniform(size=(300, 2))
      >>> y = np.where(x[:, 0] < 0.5, 1.0, 3.0) + rng.normal(size=300)
      >>> choice = jb.cart.cross_validate_alpha(x, y)
      >>> choice.one_se_alpha >= choice.best_alpha
      True
    """

    tree: RegressionTree
    alphas: Float[np.ndarray, " S"]
    num_leaves: Int[np.ndarray, " S"]
    mean_error: Float[np.ndarray, " S"]
    standard_error: Float[np.ndarray, " S"]
    best_alpha: float
    one_se_alpha: float

    def __repr__(self) -> str:
        return show_fields(self)


@on_host("call it on concrete arrays")
def cross_validate_alpha(
    x: Any,
    y: Any,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    folds: int | Shaped[ArrayLike, " N"] = 10,
    seed: int = 0,
    max_depth: int | None = None,
    min_child_samples: int = 1,
    min_split_samples: int = 2,
    min_child_weight: float = 0.0,
    min_gain: float = 0.0,
) -> AlphaChoice:
    """Cross-validates the alpha of weakest-link pruning.

    Follows Breiman et al. 1984, sections 3.4.2 and 8.5. For each fold, fits a tree to
    the other rows and prunes it with every candidate alpha (times those rows' fraction
    of the weight, because errors are sums over rows). The squared errors e of the
    held-out rows are averaged over all folds. With weights w, the mean
    R = sum w e / sum w has the standard error sqrt(sum w^2 (e - R)^2) / sum w, which
    is s / sqrt(N) for equal weights.

    Args:
      x, y, sample_weight: the training data, as for :func:`jboost.cart.fit_tree`.
      folds: the number of random folds of equal size; or a label for each row. Rows
        with the same label are held out together.
      seed: the random seed of the folds.
      max_depth, min_child_samples, min_split_samples, min_child_weight, min_gain:
        limits of the trees, as for :func:`jboost.cart.fit_tree`.

    Returns:
      An AlphaChoice; ``prune(choice.tree, choice.one_se_alpha)`` is the tree to use.

    Raises:
      TypeError, ValueError: as :func:`jboost.cart.fit_tree`; or there are fewer than
        two folds, or more folds than rows of positive weight.

    Example:
      >>> import numpy as np, jboost as jb
      >>> rng = np.random.default_rng(0)
      >>> x = rng.uniform(size=(300, 2))
      >>> y = np.where(x[:, 0] < 0.5, 1.0, 3.0) + rng.normal(size=300)
      >>> choice = jb.cart.cross_validate_alpha(x, y)
      >>> jb.cart.prune(choice.tree, choice.one_se_alpha).num_leaves
      2
    """
    rules = _make_rules(
        max_depth, min_child_samples, min_split_samples, min_child_weight, min_gain
    )
    matrix, targets, weights, names = _check_table(x, y, sample_weight)
    warn_of_collisions(x)
    weights = np.ones(len(matrix)) if weights is None else weights
    used = weights > 0
    labels = _draw_folds(folds, seed, used)
    matrix, targets, weights = matrix[used], targets[used], weights[used]
    tree = grow_tree(matrix, targets, weights, names, rules)
    path = pruning_path(tree)
    alphas = np.append(np.sqrt(path.alphas[:-1] * path.alphas[1:]), np.inf)
    sums = np.zeros((3, len(alphas)))
    for label in range(labels.max() + 1):
        rest, held = labels != label, labels == label
        other = grow_tree(matrix[rest], targets[rest], weights[rest], names, rules)
        share = weights[rest].sum() / weights.sum()
        sums += _add_errors(
            other, alphas * share, matrix[held], targets[held], weights[held]
        )
    total = weights.sum()
    mean = sums[0] / total
    variance = sums[2] - 2 * mean * sums[1] + mean**2 * np.square(weights).sum()
    error = np.sqrt(np.maximum(variance, 0)) / total
    best = np.flatnonzero(mean <= mean.min() * (1 + _SAME))[-1]
    simplest = np.flatnonzero(mean <= mean[best] + error[best])[-1]
    return AlphaChoice(
        tree=tree,
        alphas=alphas,
        num_leaves=path.num_leaves,
        mean_error=mean,
        standard_error=error,
        best_alpha=float(alphas[best]),
        one_se_alpha=float(alphas[simplest]),
    )


def _collapse_alphas(tree):
    """Returns the smallest alpha that turns each node into a leaf; 0 for leaves.

    g(t) is the mean gain of the remaining splits at and below t. Splits therefore form
    blocks that collapse together. From the bottom up, each split starts a block and
    absorbs the blocks directly below it while their mean gain is not below its own.
    (This is isotonic regression of the gains on the tree, by pooling adjacent
    violators. It takes O(M log^2 M) steps for M nodes; collapsing one node after
    another would take O(M^2) in a deep tree.)
    """
    left, gain = np.asarray(tree.left).tolist(), np.asarray(tree.gain).tolist()
    size, head, alpha = [1] * len(left), list(range(len(left))), [0.0] * len(left)
    under: dict[int, list] = {}  # block: heap of the blocks directly below it
    splits = [node for node, child in enumerate(left) if child != LEAF]
    for node in reversed(splits):
        children = (left[node], left[node] + 1)
        heap = [(-alpha[child], child) for child in children if child in under]
        heapq.heapify(heap)
        alpha[node] = gain[node]
        while heap and -heap[0][0] >= alpha[node]:
            block = heapq.heappop(heap)[1]
            head[block] = node
            gain[node] += gain[block]
            size[node] += size[block]
            alpha[node] = gain[node] / size[node]
            # Pushing the smaller heap into the larger bounds the pushes of an entry.
            small, heap = sorted((heap, under[block]), key=len)
            for entry in small:
                heapq.heappush(heap, entry)
        under[node] = heap
    for node in splits:
        alpha[node] = alpha[head[node]]
    return np.array(alpha)


def _draw_folds(folds, seed, used):
    num_rows = int(used.sum())
    seed = checks.check_integer("seed", seed, least=0, most=2**63 - 1)
    if np.ndim(folds) == 0:
        if num_rows < 2:
            raise ValueError(
                f"x must have at least 2 rows of positive weight, got {num_rows}"
            )
        folds = checks.check_integer("folds", folds, least=2, most=num_rows)
        return np.random.default_rng(seed).permutation(num_rows) % folds
    labels = np.asarray(folds)
    if labels.shape != used.shape:
        raise ValueError(
            f"folds must be an integer or have shape {used.shape}, got {labels.shape}"
        )
    names, labels = np.unique(labels[used], return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"folds must hold at least 2 labels, got {names.tolist()}")
    return labels


def _add_errors(tree, alphas, matrix, targets, weights):
    """Returns sums of w e, w^2 e and w^2 e^2 over rows for each alpha.

    A row's path through the full tree holds its leaf in every pruned tree: a node is a
    leaf from its own alpha up to its parent's. One pass thus serves all alphas.
    """
    sums = _sum_errors(tree, matrix, targets, weights)
    alpha, (parent, _) = _collapse_alphas(tree), find_parents(tree.left)
    # The root is never removed.
    above = np.where(parent == LEAF, np.inf, alpha[parent])
    first, end = np.searchsorted(alphas, alpha), np.searchsorted(alphas, above)
    end[0] = len(alphas)  # the root is also a leaf at alpha = inf
    size = len(alphas) + 1
    steps = [np.bincount(first, s, size) - np.bincount(end, s, size) for s in sums]
    return np.maximum(np.cumsum(steps, axis=1)[:, :-1], 0)  # rounding can give < 0


def _sum_errors(tree, matrix, targets, weights):
    """Returns sums of w e, w^2 e, w^2 e^2 over each node's rows; w: the row's weight.

    e is the squared error of the row if the node is a leaf.
    """
    parent, depth = find_parents(tree.left)
    node = np.array(leaf_indices(tree, matrix))  # a copy to write to
    sums = np.zeros((3, tree.num_nodes))
    for level in range(tree.max_depth, -1, -1):
        rows = np.flatnonzero(depth[node] == level)
        here = node[rows]
        residual = targets[rows] - tree.value[here]
        residual = residual.reshape(len(rows), tree.num_scores)
        error, weight = np.square(residual).sum(axis=1), weights[rows]
        terms = weight * error, weight**2 * error, np.square(weight * error)
        sums += [np.bincount(here, term, tree.num_nodes) for term in terms]
        node[rows] = parent[here]
    return sums
