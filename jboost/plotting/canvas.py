# SPDX-License-Identifier: Apache-2.0
"""Prepares axes for plots, in the colors of the current style, and formats labels.

matplotlib is an optional dependency, so functions import it only when they are called.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Size = tuple[float, float]  # inches
_LONGEST = 34  # characters of a feature name


def open_axes(ax: Any, size: Size) -> "Axes":
    """Returns the given axes, or the axes of a new figure."""
    need_matplotlib()
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots(figsize=size, layout="constrained")[1]
    return check_axes("ax", ax)


def open_panels(axes: Any, count: int, size: Size) -> "np.ndarray":
    """Returns the given axes, or ``count`` new ones side by side, as an array."""
    need_matplotlib()
    if axes is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=size, layout="constrained")
        return np.asarray(figure.subplots(1, count, squeeze=False)).ravel()
    panels = np.asarray(axes, dtype=object).ravel()
    if len(panels) != count:
        raise ValueError(f"axes must be {count} matplotlib axes, got {len(panels)}")
    for number, panel in enumerate(panels):
        check_axes(f"axes[{number}]", panel)
    return panels


def need_matplotlib() -> None:
    """Raises an ImportError that says how to install matplotlib if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "jboost.plotting needs matplotlib, which is not installed: "
            "pip install matplotlib"
        ) from None


def check_axes(name: str, ax: Any) -> "Axes":
    """Checks that an argument is a matplotlib axes object, and returns it."""
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise TypeError(f"{name} must be matplotlib axes, got {type(ax).__name__}")
    return ax


def tidy(ax: "Axes", grid: Literal["both", "x"] = "both") -> None:
    """Removes the top and right spines, and adds a faint grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(False)
    ax.grid(axis=grid, color=ink(ax), alpha=0.15, linewidth=0.6)


def ink(ax: "Axes") -> Any:
    """Returns the color of the axes' labels, which suits light and dark styles."""
    return ax.xaxis.label.get_color()


def colors(count: int) -> list[Any]:
    """Returns the first ``count`` colors of the style's color cycle."""
    from matplotlib import rcParams

    cycle = rcParams["axes.prop_cycle"].by_key().get("color", ["C0"])
    return [cycle[number % len(cycle)] for number in range(count)]


def label_features(names: Sequence[str] | None, num_features: int) -> list[str]:
    """Returns shortened feature names, or x0, x1, ... if there are none."""
    return [shorten(name) for name in name_features(names, num_features)]


def name_features(names: Sequence[str] | None, num_features: int) -> list[str]:
    """Returns feature names, or x0, x1, ... if there are none."""
    if names is None or tuple(names) == tuple(map(str, range(num_features))):
        return [f"x{number}" for number in range(num_features)]
    return list(map(str, names))


def shorten(text: str, longest: int = _LONGEST) -> str:
    """Replaces the middle of a long text by an ellipsis.

    Both ends are kept, because long feature names often share a prefix or a suffix.
    """
    if len(text) <= longest:
        return text
    end = (longest - 1) // 2
    return f"{text[: longest - 1 - end]}…{text[-end:]}"


def plain(text: str) -> str:
    """Escapes dollar signs, which matplotlib would parse as math."""
    return text.replace("$", r"\$")


def write_number(value: float, precision: int) -> str:
    """Formats a number with ``precision`` significant digits.

    A number with a fractional part gets at least one decimal, so that a threshold of
    1234.5 does not appear as 1234 or 1235.
    """
    size = abs(value)
    if not 1e-4 <= size < 1e6:
        return f"{value:.{precision}g}"
    whole = len(str(int(size)))
    return f"{value:.{max(precision, whole + 1)}g}"
