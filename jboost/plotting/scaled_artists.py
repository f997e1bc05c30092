# SPDX-License-Identifier: Apache-2.0
"""Defines text and lines that scale with their axes.

matplotlib measures fonts and lines in points, so text would outgrow its box when a
figure is resized. In: a size in units of the axes. Out: artists that compute their size
in points whenever they are drawn. Imports matplotlib.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.text import Text
from matplotlib.textpath import text_to_path


class ScaledText(Text):
    """Draws text with a font size of ``height`` units of its axes."""

    def __init__(self, x: float, y: float, text: str, height: float, **style: Any):
        super().__init__(x, y, text, **style)
        self._height = height

    def draw(self, renderer: Any) -> None:
        """Draws the artist at the current size of the axes."""
        self._fit()
        super().draw(renderer)

    def get_window_extent(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the extent in pixels at the current size of the axes."""
        self._fit()
        return super().get_window_extent(*args, **kwargs)

    def _fit(self):
        self.set_fontsize(max(self._height * _points(self.axes), 0.01))


class ScaledBox(FancyBboxPatch):
    """Draws a box with a line width of ``width`` units of its axes."""

    def __init__(self, width: float, *corner: Any, **style: Any):
        super().__init__(*corner, **style)
        self._line = width

    def draw(self, renderer: Any) -> None:
        """Draws the artist at the current size of the axes."""
        self.set_linewidth(self._line * _points(self.axes))
        super().draw(renderer)


class ScaledCurve(PathPatch):
    """Draws a curve with a line width of ``width`` units of its axes."""

    def __init__(self, width: float, path: Any, **style: Any):
        super().__init__(path, fill=False, **style)
        self._line = width

    def draw(self, renderer: Any) -> None:
        """Draws the artist at the current size of the axes."""
        self.set_linewidth(self._line * _points(self.axes))
        super().draw(renderer)


def _points(axes):
    """Returns the number of points per unit of the axes."""
    figure = axes.get_figure(root=True) if isinstance(axes, Axes) else None
    if figure is None:
        return 1.0
    (_, low), (_, high) = axes.transData.transform([(0, 0), (0, 1)])
    return abs(high - low) * 72 / figure.dpi


def measure_width(text: str, height: float) -> float:
    """Returns the width of a line of text for a font of this height, in its units."""
    font = FontProperties(size=height)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return width
