# SPDX-License-Identifier: Apache-2.0
"""Words and lines that grow and shrink with the axes that they are in.

In: a size in units of the axes. Out: text that fits its box in any figure, window or
enlargement, because its size is found when it is drawn. Imports matplotlib.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.text import Text
from matplotlib.textpath import text_to_path


class ScaledText(Text):
    """Text whose font size is given in units of its axes."""

    def __init__(self, x: float, y: float, text: str, height: float, **style: Any):
        super().__init__(x, y, text, **style)
        self._height = height

    def draw(self, renderer: Any) -> None:
        """Draws in the size that the axes have now."""
        self._fit()
        super().draw(renderer)

    def get_window_extent(self, *args: Any, **kwargs: Any) -> Any:
        """In pixels, as the axes are now."""
        self._fit()
        return super().get_window_extent(*args, **kwargs)

    def _fit(self):
        self.set_fontsize(max(self._height * _points(self.axes), 0.01))


class ScaledBox(FancyBboxPatch):
    """A box whose line is ``width`` units of its axes."""

    def __init__(self, width: float, *corner: Any, **style: Any):
        super().__init__(*corner, **style)
        self._line = width

    def draw(self, renderer: Any) -> None:
        """Draws in the size that the axes have now."""
        self.set_linewidth(self._line * _points(self.axes))
        super().draw(renderer)


class ScaledCurve(PathPatch):
    """A curve that is ``width`` units of its axes."""

    def __init__(self, width: float, path: Any, **style: Any):
        super().__init__(path, fill=False, **style)
        self._line = width

    def draw(self, renderer: Any) -> None:
        """Draws in the size that the axes have now."""
        self.set_linewidth(self._line * _points(self.axes))
        super().draw(renderer)


def _points(axes):
    """How many points a unit of the axes is."""
    figure = axes.get_figure(root=True) if isinstance(axes, Axes) else None
    if figure is None:
        return 1.0
    (_, low), (_, high) = axes.transData.transform([(0, 0), (0, 1)])
    return abs(high - low) * 72 / figure.dpi


def measure_width(text: str, height: float) -> float:
    """The width of one line at a font size, in the same units."""
    font = FontProperties(size=height)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return width
