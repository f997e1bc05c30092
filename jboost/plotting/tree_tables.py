# SPDX-License-Identifier: Apache-2.0
"""Converts a tree to the texts of a drawing.

In: a model, and the indices of a tree. Out: a TreeTable, in which parents precede their
children; or text for the program ``dot`` of Graphviz.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jboost.entry.checks import check_integer
from jboost.entry.representation import show
from jboost.model.ensemble import Model, read_model
from jboost.model.sorting import take_tree
from jboost.plotting.canvas import label_features, shorten, write_number

ROOT = -1  # the parent of the root
WEIGHT, CURVATURE = "weight of rows", "curvature of rows"  # kinds of cover
_NAMED = 3  # categories that a condition lists; it counts the others
_LONGEST = 16  # characters of a category
_LISTED = 4  # values of a leaf that are all written; of more, the three largest


class Node(NamedTuple):
    """Holds a node of a drawing.

    Attributes:
      parent: the index of its parent in the table; ROOT for the root.
      is_left: whether it is its parent's left child.
      depth: 0 for the root.
      condition: rows that satisfy it go left; "" if the node is drawn without children.
      missing_left: whether missing values go left.
      values: of a leaf, one for each score that is drawn; none for inner nodes.
      cover: the sum over all rows that reach the node; NaN if unknown.
      num_leaves: the number of leaves in its subtree; 1 for a leaf.
    """

    parent: int
    is_left: bool
    depth: int
    condition: str
    missing_left: bool
    values: tuple[float, ...]
    cover: float
    num_leaves: int


class TreeTable(NamedTuple):
    """Holds a tree to draw.

    Attributes:
      nodes: parents precede their children, and left children precede right ones.
      title: the round and the score of the tree.
      cover_name: the quantity that cover sums; "" if cover is unknown.
      middle: the value at the center of the color scale.
    """

    nodes: list[Node]
    title: str
    cover_name: str
    middle: float


def tree_to_dot(
    model: Model,
    round: int = 0,
    score: int | None = None,
    *,
    feature_names: Sequence[str] | None = None,
    max_depth: int | None = None,
    precision: int = 3,
) -> str:
    """Converts one tree to Graphviz, for ``dot -Tsvg`` or the graphviz package.

    Args:
      model, round, score, feature_names, max_depth, precision: as for
        :func:`jboost.plotting.tree`.

    Returns:
      The text of a digraph.

    Raises:
      TypeError, ValueError: as for :func:`jboost.plotting.tree`.

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
    """Returns a node's text: its condition, value or number of leaves; its cover."""
    if node.condition:
        first = node.condition
    elif node.num_leaves > 1:
        first = f"… {node.num_leaves} leaves"
    else:
        first = _say_values(node.values, precision)
    if not np.isfinite(node.cover):
        return [first]
    whole = node.cover == round(node.cover)
    cover = f"{node.cover:.0f}" if whole else write_number(node.cover, precision)
    return [first, f"({cover})"]


def _say_values(values, precision):
    """Lists the values of a leaf, or the largest ones with the numbers of scores."""
    if len(values) <= _LISTED:
        return ", ".join(write_number(value, precision) for value in values)
    largest = np.argsort(-np.abs(values), kind="stable")[: _LISTED - 1].tolist()
    words = [f"{k}: {write_number(values[k], precision)}" for k in largest]
    return ", ".join([*words, "…"])


def read_tree(
    model: Model,
    round: int,
    score: int | None,
    feature_names: Sequence[str] | None,
    max_depth: int | None,
    precision: int,
) -> TreeTable:
    """Checks the arguments and converts one tree to a table."""
    ensemble = read_model(model)
    num_rounds, num_scores = ensemble.num_rounds, ensemble.num_scores
    drawn = range(num_scores if ensemble.shares_structure else 1)
    if score is not None:
        drawn = [check_integer("score", score, least=0, most=num_scores - 1)]
    check_integer("precision", precision, least=1, most=17)
    if max_depth is not None:
        check_integer("max_depth", max_depth, least=0)
    names = _check_names(feature_names, ensemble)
    if num_rounds == 0:
        raise ValueError("model must have at least one round, got none")
    check_integer("round", round, least=-num_rounds, most=num_rounds - 1)
    round %= num_rounds
    found = model.nodes(slice(round, round + 1))
    trees = [take_tree(found, number) for number in drawn]
    tree, values = trees[0], np.stack([tree.value for tree in trees], axis=1)
    cover, cover_name = _choose_cover(tree)
    title = [] if model.single_tree else [f"round {round} of {num_rounds}"]
    if num_scores > 1 and len(drawn) == 1:
        title.append(f"score {drawn[0]}")
    # Leaves of a boosted tree are changes of the score, so 0 is neutral. Leaves of a
    # single tree are predictions, so their mean (the value of the root) is neutral.
    middle = float(tree.value[0]) if model.single_tree else 0.0

    def say(node):
        return _say_condition(ensemble, tree, node, names, precision)

    nodes = _walk(tree, values, cover, max_depth, say)
    return TreeTable(nodes, ", ".join(title), cover_name, middle)


def _check_names(feature_names, model):
    if feature_names is None:
        return label_features(model.feature_names, model.num_features)
    if isinstance(feature_names, str) or len(feature_names) != model.num_features:
        raise ValueError(
            f"feature_names must be {model.num_features} names, got "
            f"{show(feature_names)}"
        )
    return label_features([str(name) for name in feature_names], model.num_features)


def _choose_cover(tree):
    """Returns the weights of the rows, or their curvature if only that is known."""
    for cover, name in ((tree.weight, WEIGHT), (tree.curvature, CURVATURE)):
        if np.isfinite(cover).all():
            return cover, name
    return np.full(len(tree.left), np.nan), ""


class _Visit(NamedTuple):
    """Holds the index of a node in the arrays, and its position in the tree."""

    node: int
    parent: int  # index of the parent among the visits
    is_left: bool
    depth: int


def _visit(left) -> list[_Visit]:
    """Lists all reachable nodes in depth-first order, left children first.

    Uses a stack instead of recursion, because trees of other libraries may be deeper
    than Python's recursion limit.
    """
    visits: list[_Visit] = []
    pending = [_Visit(0, ROOT, True, 0)]
    while pending:
        index, visit = len(visits), pending.pop()
        visits.append(visit)
        if (child := int(left[visit.node])) >= 0:
            below = visit.depth + 1
            pending.append(_Visit(child + 1, index, False, below))
            pending.append(_Visit(child, index, True, below))
    return visits


def _walk(tree, values, cover, max_depth, say) -> list[Node]:
    """Returns the nodes of the table, without those deeper than ``max_depth``."""
    visits = _visit(tree.left)
    leaves = tree.is_leaf.astype(int)
    for visit in reversed(visits):  # children before their parents
        if visit.parent != ROOT:
            leaves[visits[visit.parent].node] += leaves[visit.node]
    nodes: list[Node] = []
    new = {ROOT: ROOT}  # index of a visit -> index in the table
    for index, (node, parent, is_left, depth) in enumerate(visits):
        if max_depth is not None and depth > max_depth:
            continue
        new[index] = len(nodes)
        inside = not tree.is_leaf[node] and depth != max_depth
        nodes.append(
            Node(
                parent=new[parent],
                is_left=is_left,
                depth=depth,
                condition=say(node) if inside else "",
                missing_left=bool(tree.missing_left[node]) if inside else True,
                values=tuple(values[node].tolist()) if leaves[node] == 1 else (),
                cover=float(cover[node]),
                num_leaves=int(leaves[node]),
            )
        )
    return nodes


def _say_condition(model, tree, node, names, precision):
    """Returns the condition that rows must satisfy to go left."""
    feature, threshold = int(tree.feature[node]), float(tree.threshold[node])
    name = names[feature]
    if np.isnan(threshold):
        return f"{name} {_say_set(model.categories, feature, tree.left_codes[node])}"
    if threshold == np.inf:
        return f"{name} is known"  # all values go left, missing ones go right
    return f"{name} ≤ {write_number(threshold, precision)}"


def _say_set(categories, feature, left_codes):
    """Lists the categories that go left, or those that go right if they are fewer."""
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
