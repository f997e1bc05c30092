# SPDX-License-Identifier: Apache-2.0
"""A tree as a list of nodes with words: what a drawing says of it.

In: a model, and which of its trees. Out: a TreeTable, parents before their children;
or the text that the program ``dot`` of Graphviz draws.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jboost.entry.checks import check_integer
from jboost.model.ensemble import Ensemble, check_model, describe_model
from jboost.model.regression_tree import RegressionTree
from jboost.plotting.canvas import label_features, shorten, write_number

ROOT = -1  # is nobody's child
WEIGHT, CURVATURE = "weight of rows", "curvature of rows"  # what cover may be
_NAMED = 3  # categories that a condition spells out
_LONGEST = 16  # letters of one


class Node(NamedTuple):
    """One node.

    Attributes:
      parent: its place in the table; ROOT for the first.
      is_left: of its parent.
      depth: 0 for the root.
      condition: rows for which it holds go left; "" where the node is drawn as an end.
      missing_left: where missing values go.
      value: of a leaf; NaN of inner nodes where the model does not say.
      cover: of all rows that come here; NaN where it is not known.
      num_leaves: below it; 1 for a leaf.
    """

    parent: int
    is_left: bool
    depth: int
    condition: str
    missing_left: bool
    value: float
    cover: float
    num_leaves: int


class TreeTable(NamedTuple):
    """A tree to be drawn.

    Attributes:
      nodes: parents before their children, left before right.
      title: which tree it is.
      cover_name: what cover is the sum of; "" where it is not known.
      middle: the value that is neither high nor low.
    """

    nodes: list[Node]
    title: str
    cover_name: str
    middle: float


class _Arrays(NamedTuple):
    """One tree by number of node; the right child follows the left."""

    left: np.ndarray  # -1 in leaves
    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray  # [M]
    cover: np.ndarray  # [M], right in leaves
    left_codes: np.ndarray | None  # [M, W]


def tree_to_dot(
    model: Ensemble | RegressionTree,
    round: int = 0,
    score: int = 0,
    *,
    feature_names: Sequence[str] | None = None,
    max_depth: int | None = None,
    precision: int = 3,
) -> str:
    """One tree in the language of Graphviz, for ``dot -Tsvg`` or the graphviz package.

    Args:
      model, round, score, feature_names, max_depth, precision: as for
        :func:`jboost.plotting.tree`.

    Returns:
      The text of a digraph.

    Raises:
      TypeError, ValueError: as :func:`jboost.plotting.tree`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> tree = jb.cart.fit_tree(np.array([[1.0], [3.0]]), np.array([0.0, 1.0]))
      >>> print(plotting.tree_to_dot(tree))
      digraph tree {
        node [shape=box, style=rounded, fontname="sans-serif"];
        0 [label="x0 ≤ 2\\n(2)"];
        1 [label="0\\n(1)"];
        0 -> 1 [label="yes, missing"];
        2 [label="1\\n(1)"];
        0 -> 2 [label="no"];
      }
    """
    table = read_tree(model, round, score, feature_names, max_depth, precision)
    lines = ['  node [shape=box, style=rounded, fontname="sans-serif"];']
    for number, node in enumerate(table.nodes):
        label = "\\n".join(map(_quote, node_words(node, precision)))
        lines.append(f'  {number} [label="{label}"];')
        if node.parent != ROOT:
            word = "yes" if node.is_left else "no"
            if table.nodes[node.parent].missing_left == node.is_left:
                word += ", missing"
            lines.append(f'  {node.parent} -> {number} [label="{word}"];')
    return "\n".join(["digraph tree {", *lines, "}"])


def node_words(node: Node, precision: int) -> list[str]:
    """What stands in a node: its condition, value or number of leaves; its cover."""
    if node.condition:
        first = node.condition
    elif node.num_leaves > 1:
        first = f"… {node.num_leaves} leaves"
    else:
        first = write_number(node.value, precision)
    if not np.isfinite(node.cover):
        return [first]
    whole = node.cover == round(node.cover)
    cover = f"{node.cover:.0f}" if whole else write_number(node.cover, precision)
    return [first, f"({cover})"]


def read_tree(
    model: Ensemble | RegressionTree,
    round: int,
    score: int,
    feature_names: Sequence[str] | None,
    max_depth: int | None,
    precision: int,
) -> TreeTable:
    """Checks the arguments and puts one tree into words."""
    if not isinstance(model, Ensemble | RegressionTree):
        raise TypeError(
            "model must be an Ensemble or a RegressionTree, got "
            f"{describe_model(model)}"
        )
    if isinstance(model, Ensemble):
        check_model(model)
    score = check_integer("score", score, least=0, most=model.num_scores - 1)
    check_integer("precision", precision, least=1, most=17)
    if max_depth is not None:
        check_integer("max_depth", max_depth, least=0)
    names = _check_names(feature_names, model)
    if isinstance(model, RegressionTree):
        if round not in (0, -1):
            raise ValueError(f"round must be 0 for a RegressionTree, got {round!r}")
        arrays, title, cover_name = _read_single(model, score), [], WEIGHT
    else:
        rounds = model.num_rounds
        if rounds == 0:
            raise ValueError("model must have at least one round, got none")
        check_integer("round", round, least=-rounds, most=rounds - 1)
        round %= rounds
        title, cover_name = [f"round {round} of {rounds}"], _cover_name(model)
        arrays = _read_round(model, round, score, cover_name)
    if model.num_scores > 1:
        title.append(f"score {score}")
    middle = float(arrays.value[0]) if isinstance(model, RegressionTree) else 0.0

    def say(node):
        return _say_condition(model, arrays, node, names, precision)

    nodes = _walk(arrays, max_depth, say)
    return TreeTable(nodes, ", ".join(title), cover_name, middle)


def _check_names(feature_names, model):
    if feature_names is None:
        return label_features(model.feature_names, model.num_features)
    if isinstance(feature_names, str) or len(feature_names) != model.num_features:
        raise ValueError(
            f"feature_names must be {model.num_features} names, got {feature_names!r}"
        )
    return label_features([str(name) for name in feature_names], model.num_features)


def _read_single(tree, score):
    value = np.asarray(tree.value)
    value = value if value.ndim == 1 else value[:, score]
    parts = (tree.left, tree.feature, tree.threshold, tree.missing_left)
    left, feature, threshold, missing_left = map(np.asarray, parts)
    cover = np.asarray(tree.weight)
    return _Arrays(left, feature, threshold, missing_left, value, cover, None)


def _cover_name(model):
    """Weights of rows, or curvature where only that is known."""
    if model.sums is not None:
        if np.isfinite(model.sums.weight).all():
            return WEIGHT
        if np.isfinite(model.sums.curvature).all():
            return CURVATURE
    return ""


def _read_round(model, round, score, cover_name):
    """One tree of an ensemble, from a heap or by its links."""

    def pick(array):
        return np.asarray(array[round, score])

    parts = (model.feature, model.threshold, model.missing_left)
    feature, threshold, missing_left = map(pick, parts)
    left_codes = None if model.left_codes is None else pick(model.left_codes)
    value = pick(model.leaf_value)
    cover = np.full(value.shape, np.nan)
    if cover_name:
        sums = model.sums.weight if cover_name == WEIGHT else model.sums.curvature
        cover = pick(sums).astype(np.float64)
    split = pick(model.is_split)
    if model.links is not None:
        left = np.where(split, pick(model.links.left_child), -1)
    else:
        inner = np.arange(len(feature))
        left = np.full(2 * len(feature) + 1, -1)
        left[inner] = np.where(split, 2 * inner + 1, -1)
        # Rows of a node that is not split go left to the last level.
        value, cover = _lift(value), _lift(cover)
    return _Arrays(left, feature, threshold, missing_left, value, cover, left_codes)


def _lift(leaves):
    """Of every node of a heap what its leftmost leaf has."""
    levels = [leaves]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0][::2])
    return np.concatenate(levels)


class _Visit(NamedTuple):
    """A node of the arrays, and what the way to it says."""

    node: int
    parent: int  # its place among the visits
    is_left: bool
    depth: int


def _visit(left) -> list[_Visit]:
    """All nodes below the root, each before its children, the left one first."""
    visits: list[_Visit] = []
    pending = [_Visit(0, ROOT, True, 0)]
    while pending:
        place, visit = len(visits), pending.pop()
        visits.append(visit)
        if (child := int(left[visit.node])) >= 0:
            below = visit.depth + 1
            pending.append(_Visit(child + 1, place, False, below))
            pending.append(_Visit(child, place, True, below))
    return visits


def _walk(arrays, max_depth, say) -> list[Node]:
    """The nodes from the root on, those below ``max_depth`` left out."""
    visits = _visit(arrays.left)
    cover, leaves = np.zeros(len(visits)), np.zeros(len(visits), int)
    for place, visit in reversed([*enumerate(visits)]):
        if arrays.left[visit.node] < 0:
            cover[place], leaves[place] = arrays.cover[visit.node], 1
        if visit.parent != ROOT:
            cover[visit.parent] += cover[place]
            leaves[visit.parent] += leaves[place]
    nodes: list[Node] = []
    new = {ROOT: ROOT}  # the place of a visit in the table
    for place, (node, parent, is_left, depth) in enumerate(visits):
        if max_depth is not None and depth > max_depth:
            continue
        new[place] = len(nodes)
        inside = arrays.left[node] >= 0 and depth != max_depth
        nodes.append(
            Node(
                parent=new[parent],
                is_left=is_left,
                depth=depth,
                condition=say(node) if inside else "",
                missing_left=bool(arrays.missing_left[node]) if inside else True,
                value=float(arrays.value[node]) if leaves[place] == 1 else np.nan,
                cover=float(cover[place]),
                num_leaves=int(leaves[place]),
            )
        )
    return nodes


def _say_condition(model, arrays, node, names, precision):
    """What holds of the rows that go left."""
    feature, threshold = int(arrays.feature[node]), float(arrays.threshold[node])
    name = names[feature]
    if np.isnan(threshold):
        return f"{name} {_say_set(model.categories, feature, arrays.left_codes[node])}"
    if threshold == np.inf:
        return f"{name} is known"  # values are split from missing ones
    return f"{name} ≤ {write_number(threshold, precision)}"


def _say_set(categories, feature, left_codes):
    """The categories that go left, or those that do not if they are fewer."""
    group = categories.features.index(feature)
    codes = np.asarray(categories.codes)[group]
    known = np.flatnonzero(codes > 0)
    words = left_codes[codes[known] // 32]
    goes_left = (words >> (codes[known] % 32).astype(np.uint32)) & 1 == 1
    left, right = known[goes_left], known[~goes_left]
    fewer, word = (left, "in") if len(left) <= len(right) else (right, "not in")
    values = None if categories.values is None else categories.values[group]
    listed = [
        shorten(str(value if values is None else values[value]), _LONGEST)
        for value in fewer[:_NAMED].tolist()
    ]
    if len(fewer) > _NAMED:
        listed.append(f"+{len(fewer) - _NAMED}")
    return f"{word} {{{', '.join(listed)}}}"


def _quote(text: Any) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"')
