# SPDX-License-Identifier: Apache-2.0
"""Trees as matplotlib axes and as texts of Graphviz (DOT), from one table of nodes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jboost.entry.checks import check_integer, check_word
from jboost.entry.messages import show
from jboost.model.ensemble import Model, read_model
from jboost.model.nodes import (
    LEAF,
    find_parents,
    list_terms,
    name_values,
    split_values,
    take_tree,
)
from jboost.plotting.canvas import (
    label_features,
    need_matplotlib,
    shorten,
    write_number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Orientation = Literal["horizontal", "vertical"]
_NAMED = 3  # categories that a condition lists; it counts the others
_LONGEST = 16  # characters of a category
_LISTED = 4  # values of a leaf that are all written; of more, the three largest
_TERMS = 3  # linear terms of a leaf that are written


class Node(NamedTuple):
    """Holds a node of a drawing.

    Attributes:
      parent: the index of its parent in the table; LEAF for the root.
      depth: 0 for the root.
      is_split: whether the node is drawn with its children.
      values: leaf values, one for each score that is drawn; empty for inner nodes.
      words: the condition, value or number of leaves; linear terms; the cover if it is
        known.
    """

    parent: int
    is_left: bool
    depth: int
    is_split: bool
    missing_left: bool
    values: tuple[float, ...]
    words: list[str]


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


def tree(
    model: Model,
    round: int = 0,
    score: int | None = None,
    *,
    ax: "Axes | None" = None,
    orientation: Orientation = "horizontal",
    feature_names: Sequence[str] | None = None,
    max_depth: int | None = None,
    precision: int = 3,
) -> "Axes":
    """Draws one tree: conditions, directions of missing values, leaf values, cover.

    Rows that satisfy the condition of a node go up (left if the tree is vertical).
    Missing values follow the heavy line. Numbers in parentheses are the weight of the
    training rows in a node, or the cover stored in a model of another library. Leaves
    that raise the score are red, and leaves that lower it are blue. For a
    RegressionTree, red and blue mean above and below the mean. If several scores share
    a tree, its leaves have no color. They show the values of up to four scores; of
    more, only the three of largest magnitude. A linear leaf has its color by its value,
    followed by up to three terms, slope * (feature - center); the leaf of several
    scores names their features only.

    Args:
      model: a model of :func:`jboost.fit`, :func:`jboost.cart.fit_tree` or a reader.
      round: index of the round; negative ones count from the end.
      score: which tree of the round, or which values of a tree that all scores share.
        None draws the tree of score 0, or the shared one with the values of all scores.
      ax: the axes to draw on. None creates a figure of the size that the tree needs, up
        to 32 inches; larger trees shrink to fit.
      orientation: "horizontal" draws the root on the left, which leaves space for many
        leaves; "vertical" draws the root on top.
      feature_names: names that replace those of the model.
      max_depth: the number of levels of splits to draw; deeper subtrees appear as their
        number of leaves. None draws the whole tree.
      precision: the number of significant digits.

    Returns:
      The axes.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> x = np.arange(400.0)[:, None]
      >>> model, _ = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=2, max_depth=2)
      >>> ax = plotting.tree(model, round=0)
      >>> len(ax.patches)  # seven boxes and the six edges between them
      13
    """
    check_word("orientation", orientation, ("horizontal", "vertical"))
    table = _read_tree(model, round, score, feature_names, max_depth, precision)
    need_matplotlib()
    from jboost.plotting.tree_drawing import draw_tree

    return draw_tree(ax, table, sideways=orientation == "horizontal")


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
      model, round, score, feature_names, max_depth, precision: arguments of
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
    table = _read_tree(model, round, score, feature_names, max_depth, precision)
    lines = ['  node [shape=box, style=rounded, fontname="sans-serif"];']
    for number, node in enumerate(table.nodes):
        label = "\\n".join(map(_quote, node.words))
        lines.append(f'  {number} [label="{label}"];')
        if node.parent != LEAF:
            word = "yes" if node.is_left else "no"
            if table.nodes[node.parent].missing_left == node.is_left:
                word += ", missing"
            lines.append(f'  {node.parent} -> {number} [label="{word}"];')
    return "\n".join(["digraph tree {", *lines, "}"])


def _read_tree(model, round, score, feature_names, max_depth, precision) -> TreeTable:
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
    covers = {"weight of rows": tree.weight, "curvature of rows": tree.curvature}
    known = (name for name, cover in covers.items() if np.isfinite(cover).all())
    cover_name = next(known, "")
    title = [] if model.single_tree else [f"round {round} of {num_rounds}"]
    if num_scores > 1 and len(drawn) == 1:
        title.append(f"score {drawn[0]}")
    # Leaves of a boosted tree are changes of the score, so 0 is neutral. Leaves of a
    # single tree are predictions, so their mean (the value of the root) is neutral.
    middle = float(tree.value[0]) if model.single_tree else 0.0

    def say(node, num_leaves, is_cut):
        """Returns the texts of a node."""
        if is_cut:
            texts = [f"… {num_leaves} leaves"]
        elif num_leaves == 1:
            texts = [_say_values(values[node].tolist(), precision)]
            texts += _say_terms(trees, node, names, precision)
        else:
            texts = [_say_condition(ensemble, tree, node, names, precision)]
        if cover_name:
            cover = float(covers[cover_name][node])
            whole = cover == np.round(cover)
            cover = f"{cover:.0f}" if whole else write_number(cover, precision)
            texts.append(f"({cover})")
        return texts

    nodes = _list_nodes(tree, values, max_depth, say)
    return TreeTable(nodes, ", ".join(title), cover_name, middle)


def _list_nodes(tree, values, max_depth, say) -> list[Node]:
    """Returns the nodes of a table, without those deeper than ``max_depth``."""
    parents, depths = find_parents(tree.left)
    leaves = tree.is_leaf.astype(int)
    for node in reversed(range(1, len(leaves))):  # children before their parents
        leaves[parents[node]] += leaves[node]
    nodes: list[Node] = []
    places, pending = {LEAF: LEAF}, [0]
    while pending:  # depth first, without recursion: trees may be deep
        node = pending.pop()
        parent, places[node] = int(parents[node]), len(nodes)
        is_leaf = bool(tree.is_leaf[node])
        inside = not is_leaf and depths[node] != max_depth
        if inside:
            pending += [int(tree.left[node]) + 1, int(tree.left[node])]
        nodes.append(
            Node(
                parent=places[parent],
                is_left=bool(tree.left[parent] == node),
                depth=int(depths[node]),
                is_split=inside,
                missing_left=bool(tree.missing_left[node]),
                values=tuple(values[node].tolist()) if is_leaf else (),
                words=say(node, leaves[node], not (inside or is_leaf)),
            )
        )
    return nodes


def _check_names(feature_names, model):
    if feature_names is None:
        return label_features(model.feature_names, model.num_features)
    if isinstance(feature_names, str) or len(feature_names) != model.num_features:
        raise ValueError(
            f"feature_names must be {model.num_features} names, got "
            f"{show(feature_names)}"
        )
    return label_features([str(name) for name in feature_names], model.num_features)


def _say_condition(model, tree, node, names, precision):
    """Returns the condition that rows must satisfy to go left."""
    feature, threshold = int(tree.feature[node]), float(tree.threshold[node])
    name = names[feature]
    if np.isnan(threshold):
        return f"{name} {_say_set(model.categories, feature, tree.left_codes[node])}"
    if threshold == np.inf:
        return f"{name} is known"  # all values go left, missing ones go right
    return f"{name} ≤ {write_number(threshold, precision)}"


def _say_terms(trees, node, names, precision):
    """Returns the linear terms of a leaf, or their features for several scores."""
    terms = list_terms(trees[0], node)
    texts = []
    for feature, slope, center in terms[:_TERMS]:
        size, middle = (write_number(abs(v), precision) for v in (slope, center))
        text = f"({names[feature]} {'+' if center < 0 else '-'} {middle})"
        text = f"{'-' if slope < 0 else '+'} {size} {text}"
        texts.append(text if len(trees) == 1 else f"+ slope of {names[feature]}")
    return [*texts, *(["…"] if len(terms) > _TERMS else [])]


def _say_set(categories, feature, left_codes):
    """Lists the categories that go left, or those that go right if they are fewer."""
    left, right, _ = split_values(categories, feature, left_codes)
    fewer, word = (left, "in") if len(left) <= len(right) else (right, "not in")
    named = name_values(categories, feature, fewer[:_NAMED])
    listed = [shorten(str(name), _LONGEST) for name in named]
    if len(fewer) > _NAMED:
        listed.append(f"+{len(fewer) - _NAMED}")
    return f"{word} {{{', '.join(listed)}}}"


def _quote(text: Any) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"')


def _say_values(values, precision):
    """Lists the values of a leaf, or the largest ones with the numbers of scores."""
    if len(values) <= _LISTED:
        return ", ".join(write_number(value, precision) for value in values)
    largest = np.argsort(-np.abs(values), kind="stable")[: _LISTED - 1].tolist()
    words = [f"{k}: {write_number(values[k], precision)}" for k in largest]
    return ", ".join([*words, "…"])
