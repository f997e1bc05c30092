# SPDX-License-Identifier: Apache-2.0
"""Drawings of trees: layout (Reingold and Tilford 1981), tables and texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jboost.entry.checks import check_integer, check_word
from jboost.entry.messages import show
from jboost.model.ensemble import Model, read_model
from jboost.model.sorting import take_tree
from jboost.plotting.canvas import (
    check_axes,
    ink,
    label_features,
    need_matplotlib,
    shorten,
    write_number,
)


def place_across(
    parents: Sequence[int], sizes: Sequence[float], gap: float
) -> np.ndarray:
    """Returns positions perpendicular to the growth direction of the tree.

    Args:
      parents: the index of each node's parent, which precedes the node; -1 for the
        root, which is first. A node has no children or two, the left one first.
      sizes: the sizes of the nodes in this direction.
      gap: the minimum distance between neighbors.

    Returns:
      The center of each node; the smallest edge is at 0.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    offset = np.zeros(len(parents))  # distance of a node from its parent
    # For each subtree, the smallest and largest edge of each level, relative to its
    # root. The deepest level comes first, so adding a level is an append.
    outlines: list[tuple[list[float], list[float]] | None] = [None] * len(parents)
    for node in reversed(range(len(parents))):
        low, high = [], []
        if children[node]:
            left, right = children[node]
            offset[left], offset[right], low, high = _join(
                outlines[left], outlines[right], gap
            )
            outlines[left] = outlines[right] = None  # no longer needed: frees memory
        half = sizes[node] / 2
        outlines[node] = ([*low, -half], [*high, half])
    places = np.zeros(len(parents))
    for node, parent in enumerate(parents):
        if parent >= 0:
            places[node] = places[parent] + offset[node]
    return places - np.min(places - np.asarray(sizes) / 2)


def _join(left, right, gap):
    """Returns the offsets of two subtrees from their parent, and the joint outline."""
    (left_low, left_high), (right_low, right_high) = left, right
    common = min(len(left_low), len(right_low))
    reach = np.subtract(left_high[-common:], right_low[-common:])
    half = (float(reach.max()) + gap) / 2
    low = [edge + half for edge in right_low[:-common]]
    low += [edge - half for edge in left_low]
    if len(left_low) < len(right_low):
        high = [edge + half for edge in right_high]
    else:
        high = [edge - half for edge in left_high[: len(left_high) - common]]
        high += [edge + half for edge in right_high]
    return -half, half, low, high


def place_along(
    depths: Sequence[int], sizes: Sequence[float], gap: float
) -> np.ndarray:
    """Returns the start of each level along the growth direction of the tree.

    Args:
      depths: the depth of each node.
      sizes: the sizes of the nodes in this direction; a level is as wide as its widest
        node.
      gap: the distance between levels.
    """
    widest = np.zeros(max(depths) + 1)
    np.maximum.at(widest, np.asarray(depths), np.asarray(sizes))
    return np.concatenate([[0.0], np.cumsum(widest[:-1] + gap)])


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
      values: leaf values, one for each score that is drawn; empty for inner nodes.
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes

Orientation = Literal["horizontal", "vertical"]
_FONT = 10.0  # points
_LINE = 1.3 * _FONT
_PADDING = 6.0  # between text and its box
_MARGIN = 8.0
_MOST = 32.0  # inches, the maximum size of a new figure
_COLORS = "RdBu_r"
_DARKEST = 0.6  # share of the color range that is used; black text stays legible


class _Boxes(NamedTuple):
    """Holds the positions and texts of the boxes, in points; y points down."""

    middle: np.ndarray  # [M, 2]
    size: np.ndarray  # [M, 2]
    words: list[str]


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
    more, only the three of largest magnitude.

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
      >>> x = np.arange(40.0)[:, None]
      >>> model, _ = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=2, max_depth=2)
      >>> ax = plotting.tree(model, round=1)
      >>> len(ax.patches)  # seven boxes and the six edges between them
      13
    """
    check_word("orientation", orientation, ("horizontal", "vertical"))
    table = read_tree(model, round, score, feature_names, max_depth, precision)
    need_matplotlib()
    sideways = orientation == "horizontal"
    boxes = _lay_out(table, sideways, precision)
    notes = [table.title, _explain(table, sideways)]
    extent = _extent(boxes, notes)
    ax = _open(extent) if ax is None else check_axes("ax", ax)
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set_xlim(0, extent[0])
    ax.set_ylim(extent[1], 0)
    _draw_edges(ax, table, boxes, sideways)
    _draw_boxes(ax, table, boxes)
    _write_notes(ax, notes, extent)
    return ax


def _lay_out(table, sideways, precision) -> _Boxes:
    """Computes the sizes and positions of the boxes from their texts."""
    from jboost.plotting.scaled_artists import measure_width

    lines = [node_words(node, precision) for node in table.nodes]
    if sideways:  # leaves take one line, so that many fit below each other
        lines = [
            words if node.condition else ["  ".join(words)]
            for node, words in zip(table.nodes, lines, strict=True)
        ]
    size = np.array(
        [
            (max(measure_width(line, _FONT) for line in words), _LINE * len(words))
            for words in lines
        ]
    )
    size += [2 * _PADDING, _PADDING]
    depth = np.array([node.depth for node in table.nodes])
    parents = [node.parent for node in table.nodes]
    level, breadth = (0, 1) if sideways else (1, 0)
    # The gap between levels (26 points) leaves space for the curved edges.
    starts = place_along(depth.tolist(), size[:, level].tolist(), 26.0)
    middle = np.empty_like(size)
    middle[:, breadth] = place_across(parents, size[:, breadth].tolist(), 5.0)
    middle[:, level] = starts[depth] + size[:, level] / 2
    middle += [_MARGIN, _MARGIN + 1.5 * _LINE * bool(table.title)]
    return _Boxes(middle, size, ["\n".join(words) for words in lines])


def _explain(table, sideways):
    """Returns a one-line legend."""
    notes = []
    if len(table.nodes) > 1:
        notes.append("up: yes" if sideways else "left: yes")
        notes.append("heavy line: missing values")
    if table.cover_name:
        notes.append(f"in brackets: {table.cover_name}")
    return " · ".join(notes)


def _extent(boxes, notes):
    """Returns the width and height of the drawing in points."""
    from jboost.plotting.scaled_artists import measure_width

    ends = (boxes.middle + boxes.size / 2).max(axis=0)
    widest = max(measure_width(note, _FONT) for note in notes)
    width = max(ends[0], _MARGIN + widest) + _MARGIN
    return width, ends[1] + 1.8 * _LINE * bool(notes[1]) + _MARGIN


def _open(extent) -> "Axes":
    from matplotlib import pyplot

    width, height = np.array(extent) / 72 * min(1, _MOST * 72 / max(extent))
    # The minimum keeps a long, thin tree from shrinking to an empty figure.
    figure = pyplot.figure(figsize=(max(width, 1), max(height, 0.5)))
    return figure.add_axes((0, 0, 1, 1))


def _draw_edges(ax, table, boxes, sideways):
    """Draws curves from parents to children, heavy where missing values go."""
    from matplotlib.path import Path

    from jboost.plotting.scaled_artists import ScaledCurve

    along = np.array([1.0, 0.0] if sideways else [0.0, 1.0])
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    for number, node in enumerate(table.nodes):
        if node.parent == ROOT:
            continue
        start, end = (
            boxes.middle[place] + sign * along * boxes.size[place] / 2
            for place, sign in ((node.parent, 1), (number, -1))
        )
        half = (end - start) * along / 2
        heavy = table.nodes[node.parent].missing_left == node.is_left
        curve = Path([start, start + half, end - half, end], codes)
        width, alpha = (2.2, 0.75) if heavy else (0.8, 0.6)
        ax.add_patch(ScaledCurve(width, curve, edgecolor=ink(ax), alpha=alpha))


def _draw_boxes(ax, table, boxes):
    """Draws the boxes and their texts."""
    from jboost.plotting.scaled_artists import ScaledBox, ScaledText

    fills = _color_leaves(table)
    rows = zip(table.nodes, boxes.middle, boxes.size, boxes.words, fills, strict=True)
    for node, middle, size, words, fill in rows:
        inner = node.condition or node.num_leaves > 1
        box = ScaledBox(
            0.8, tuple(middle - size / 2), size[0], size[1],
            boxstyle="round,pad=0,rounding_size=3",
            facecolor="none" if inner else fill, edgecolor=ink(ax),
            linestyle="-" if node.condition or not inner else ":",
        )  # fmt: skip
        ax.add_patch(box)
        label = ScaledText(middle[0], middle[1], words, _FONT, linespacing=1.2)
        label.set(ha="center", va="center", parse_math=False)
        label.set_color(ink(ax) if inner else "black")
        ax.add_artist(label)


def _color_leaves(table: TreeTable) -> list[Any]:
    """Returns the fill colors: pale red for high values, pale blue for low ones."""
    from matplotlib import colormaps

    values = [
        node.values[0] if len(node.values) == 1 else np.nan for node in table.nodes
    ]
    distance = np.array(values) - table.middle
    largest = np.nanmax(np.abs(distance), initial=0.0)
    share = np.nan_to_num(distance) / (largest or 1.0)
    return list(colormaps[_COLORS](0.5 + 0.5 * _DARKEST * share))


def _write_notes(ax, notes, extent):
    """Writes the title above the tree and the legend below it."""
    from jboost.plotting.scaled_artists import ScaledText

    title, note = notes
    style = dict(ha="left", parse_math=False)
    if title:
        words = ScaledText(_MARGIN, _MARGIN, title, _FONT, va="top", **style)
        words.set(color=ink(ax), fontweight="bold")
        ax.add_artist(words)
    if note:
        below = extent[1] - _MARGIN
        words = ScaledText(_MARGIN, below, note, _FONT, va="bottom", **style)
        words.set(color=ink(ax), alpha=0.7)
        ax.add_artist(words)
