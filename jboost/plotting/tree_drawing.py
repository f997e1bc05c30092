# SPDX-License-Identifier: Apache-2.0
"""Draws one tree.

In: a model. Out: axes with a box per node. A unit of the axes is a point (1/72 inch) at
full size. On smaller axes, boxes, text and lines shrink by the same factor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jboost.entry.checks import check_word
from jboost.model.ensemble import Model
from jboost.plotting.canvas import check_axes, ink, need_matplotlib
from jboost.plotting.tree_layout import place_across, place_along
from jboost.plotting.tree_tables import ROOT, TreeTable, node_words, read_tree

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
    RegressionTree, red and blue mean above and below the mean. The leaves of a tree
    that several scores share show the values of all, or of the three scores whose
    values are largest, and have no color.

    Args:
      model: from :func:`jboost.fit`, :func:`jboost.cart.fit_tree` or a reader.
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
