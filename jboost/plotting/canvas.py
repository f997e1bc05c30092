# SPDX-License-Identifier: Apache-2.0
"""Where pictures are drawn: axes given or made, in the colors of the style in use.

In: axes, or None. Out: axes with thin frames. matplotlib is imported here and in the
drawing functions, when they are called.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Size = tuple[float, float]  # inches
_LONGEST = 34  # letters of a feature's name


def open_axes(ax: Any, size: Size) -> "Axes":
    """The axes that were given, or those of a new figure."""
    need_matplotlib()
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots(figsize=size, layout="constrained")[1]
    return check_axes("ax", ax)


def open_panels(axes: Any, count: int, size: Size) -> "np.ndarray":
    """So many axes side by side, given or new, as an array of objects."""
    need_matplotlib()
    if axes is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=size, layout="constrained")
        return np.asarray(figure.subplots(1, count, squeeze=False)).ravel()
    panels = np.asarray(axes, dtype=object).ravel()
    if len(panels) != count:
        raise ValueError(f"axes must be {count} axes, got {len(panels)}")
    for number, panel in enumerate(panels):
        check_axes(f"axes[{number}]", panel)
    return panels


def need_matplotlib() -> None:
    """Says in one line what is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "jboost.plotting draws with matplotlib, which is not installed: "
            "pip install matplotlib"
        ) from None


def check_axes(name: str, ax: Any) -> "Axes":
    """Axes of matplotlib."""
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise TypeError(f"{name} must be matplotlib axes, got {type(ax).__name__}")
    return ax


def tidy(ax: "Axes", grid: str = "both") -> None:
    """Two sides of the frame, and a faint grid behind what is drawn."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(False)
    if grid != "none":
        ax.grid(axis=grid, color=ink(ax), alpha=0.15, linewidth=0.6)  # type: ignore[arg-type]


def ink(ax: "Axes") -> Any:
    """The color of these axes' own words: dark on light paper, light on dark."""
    return ax.xaxis.label.get_color()


def colours(count: int) -> list[Any]:
    """The first colors of the style, again from the start when they run out."""
    from matplotlib import rcParams

    cycle = rcParams["axes.prop_cycle"].by_key().get("color", ["C0"])
    return [cycle[number % len(cycle)] for number in range(count)]


def label_features(names: Sequence[str] | None, num_features: int) -> list[str]:
    """Names as they are written, none too long; x0, x1, ... where none are known."""
    if names is None or tuple(names) == tuple(map(str, range(num_features))):
        return [f"x{number}" for number in range(num_features)]
    return [shorten(str(name)) for name in names]


def shorten(text: str, longest: int = _LONGEST) -> str:
    """A long text without its middle: both ends tell names apart."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // 2
    return f"{text[: longest - 1 - end]}…{text[-end:]}"


def plain(text: str) -> str:
    """Text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def write_number(value: float, precision: int) -> str:
    """A number to so many digits; where it has a fraction, at least one of it."""
    size = abs(value)
    if not 1e-4 <= size < 1e6:
        return f"{value:.{precision}g}"
    whole = len(str(int(size)))
    return f"{value:.{max(precision, whole + 1)}g}"
