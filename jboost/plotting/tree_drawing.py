# SPDX-License-Identifier: Apache-2.0
"""Draws trees with matplotlib, as boxes joined by curves, on axes in points.

Fonts and lines keep their proportion to the boxes when the axes change their size.
"""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.textpath import text_to_path

from jboost.plotting.canvas import check_axes, ink

_FONT = 10.0  # points
_LINE = 1.3 * _FONT
_PADDING = 6.0  # between text and its box
_MARGIN = 8.0
_BESIDE = 5.0  # between neighbors
_BETWEEN = 26.0  # between levels, which leaves space for the curved edges
_MOST = 32.0  # inches, the maximum size of a new figure
_COLORS = "RdBu_r"
_DARKEST = 0.6  # share of the color range that is used; black text stays legible


def draw_tree(ax: Axes | None, table: Any, sideways: bool) -> Axes:
    """Draws a tree on the axes, or on those of a new figure of the size that it needs.

    ``sideways`` puts the root on the left instead of on top.
    """
    words = [node.words for node in table.nodes]
    if sideways:  # leaves take one line, so that many fit below each other
        words = [n.words if n.is_split else ["  ".join(n.words)] for n in table.nodes]
    size = np.array([(max(map(_measure, each)), _LINE * len(each)) for each in words])
    size += [2 * _PADDING, _PADDING]
    middle = place_boxes(table.nodes, size, sideways)
    middle += [_MARGIN, _MARGIN + 1.5 * _LINE * bool(table.title)]
    note = _explain(table, sideways)
    width, height = (middle + size / 2).max(axis=0) + _MARGIN
    width = max(width, 2 * _MARGIN + max(_measure(table.title), _measure(note)))
    height += 1.8 * _LINE * bool(note)
    ax = _open(width, height) if ax is None else check_axes("ax", ax)
    ax.set_axis_off()
    ax.set(aspect="equal", xlim=(0, width), ylim=(height, 0))
    artists = _draw_edges(ax, table, middle, size, sideways)
    style: Any = dict(fontsize=_FONT, parse_math=False, color=ink(ax), clip_on=True)
    inside: Any = dict(ha="center", va="center", linespacing=1.2)
    rows = zip(table.nodes, middle, size, words, _color_leaves(table), strict=True)
    for node, (x, y), (across, down), lines, fill in rows:
        is_leaf = bool(node.values)
        box = FancyBboxPatch(
            (x - across / 2, y - down / 2), across, down, linewidth=0.8,
            boxstyle="round,pad=0,rounding_size=3",
            facecolor=fill if is_leaf else "none", edgecolor=ink(ax),
            linestyle="-" if node.is_split or is_leaf else ":",
        )  # fmt: skip
        artists.append(ax.add_patch(box))
        text = ax.text(x, y, "\n".join(lines), **style, **inside)
        if is_leaf:
            text.set_color("black")
        artists.append(text)
    if table.title:
        title = ax.text(_MARGIN, _MARGIN, table.title, **style)
        title.set(va="top", fontweight="bold")
        artists.append(title)
    if note:
        legend = ax.text(_MARGIN, height - _MARGIN, note, **style)
        legend.set(va="bottom", alpha=0.7)
        artists.append(legend)
    ax.apply_aspect()
    scale = _Scale(artists)
    ax.add_artist(scale)
    scale.fit()
    return ax


def _measure(text):
    """Returns the width of a line of text in points."""
    font = FontProperties(size=_FONT)
    return text_to_path.get_text_width_height_descent(text, font, False)[0]


def place_boxes(nodes, size, sideways):
    """Returns the centers of the boxes [M, 2]; the smallest edges are at 0.

    Each subtree has a strip of its own, wide enough for its root and for the strips of
    its children. A parent is midway between its children if its box then stays within
    its strip.
    """
    along, across = (0, 1) if sideways else (1, 0)
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes[1:], start=1):
        children[node.parent].append(index)
    families = [(node, *pair) for node, pair in enumerate(children) if pair]
    half, strip = size[:, across] / 2, size[:, across] + _BESIDE
    for node, left, right in reversed(families):  # children before their parents
        strip[node] = max(strip[node], strip[left] + strip[right])
    start = np.full(len(nodes), -_BESIDE / 2)
    for node, left, right in families:
        start[left] = start[node] + (strip[node] - strip[left] - strip[right]) / 2
        start[right] = start[left] + strip[left]
    center = start + strip / 2
    for node, left, right in reversed(families):
        free = (strip[node] - _BESIDE) / 2 - half[node]
        shift = (center[left] + center[right]) / 2 - center[node]
        center[node] += np.clip(shift, -free, free)
    depth = [node.depth for node in nodes]
    widest = np.zeros(max(depth) + 1)
    np.maximum.at(widest, depth, size[:, along])
    levels = np.cumsum([0.0, *(widest[:-1] + _BETWEEN)])
    middle = np.empty_like(size)
    middle[:, across] = center
    middle[:, along] = levels[depth] + size[:, along] / 2
    return middle


def _explain(table, sideways):
    """Returns a one-line legend."""
    notes = []
    if len(table.nodes) > 1:
        notes.append("up: yes" if sideways else "left: yes")
        notes.append("heavy line: missing values")
    if table.cover_name:
        notes.append(f"in brackets: {table.cover_name}")
    return " · ".join(notes)


def _open(width, height) -> Axes:
    """Creates a figure; its least size keeps long, thin trees from shrinking away."""
    from matplotlib import pyplot

    width, height = np.array([width, height]) / max(
        72, *np.divide((width, height), _MOST)
    )
    return pyplot.figure(figsize=(max(width, 1), max(height, 0.5))).add_axes(
        (0, 0, 1, 1)
    )


def _draw_edges(ax, table, middle, size, sideways) -> list[Artist]:
    """Draws curves from parents to children, heavy where missing values go."""
    step = np.array([1.0, 0.0] if sideways else [0.0, 1.0])
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    edges = []
    for index, node in enumerate(table.nodes[1:], start=1):
        start = middle[node.parent] + step * size[node.parent] / 2
        end = middle[index] - step * size[index] / 2
        half = (end - start) * step / 2
        curve = Path([start, start + half, end - half, end], codes)
        heavy = table.nodes[node.parent].missing_left == node.is_left
        width, alpha = (2.2, 0.75) if heavy else (0.8, 0.6)
        style: Any = dict(fill=False, linewidth=width, edgecolor=ink(ax), alpha=alpha)
        edges.append(ax.add_patch(PathPatch(curve, **style)))
    return edges


def _color_leaves(table) -> list[Any]:
    """Returns the fill colors: pale red for high values, pale blue for low ones."""
    values = [
        node.values[0] if len(node.values) == 1 else np.nan for node in table.nodes
    ]
    distance = np.array(values) - table.middle
    largest = np.nanmax(np.abs(distance), initial=0.0)
    share = np.nan_to_num(distance) / (largest or 1.0)
    return list(colormaps[_COLORS](0.5 + 0.5 * _DARKEST * share))


class _Scale(Artist):
    """Scales fonts and lines with axes that have a unit of one point at first.

    matplotlib measures both in points, so text would outgrow its box when a figure is
    resized. This artist draws nothing, but is drawn first.
    """

    zorder = -1

    def __init__(self, artists: list[Any]):
        super().__init__()
        self._sizes = [
            (artist.set_fontsize, artist.get_fontsize())
            if isinstance(artist, Text)
            else (artist.set_linewidth, artist.get_linewidth())
            for artist in artists
        ]

    def draw(self, renderer: Any) -> None:
        """Draws nothing, but prepares the other artists."""
        self.fit()

    def fit(self) -> None:
        """Sets all sizes to those at the current size of the axes."""
        figure = self.get_figure(root=True)
        assert figure is not None and self.axes is not None
        (_, low), (_, high) = self.axes.transData.transform([(0, 0), (0, 1)])
        for resize, size in self._sizes:
            resize(max(size * abs(high - low) * 72 / figure.dpi, 0.01))
