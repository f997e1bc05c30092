# SPDX-License-Identifier: Apache-2.0
"""Plans points: the space of settings, and the next ones to try in it.

The first points fill the space evenly (an additive recurrence; Roberts 2018), later
ones come from densities of the good and of the other points (Bergstra et al. 2011).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jboost.boosting.settings import RoundSettings, Settings, declared, rate_by_rows
from jboost.entry.messages import show
from jboost.selection.comparison import SWEPT, keywords_of

SLOWER = 3  # a search takes larger rates than `fit`, which need fewer rounds
_EVEN = 16  # bad points; with fewer, points fill the space evenly
_GOOD = 0.2  # the share of points that count as good
_DRAWS, _WIDTH = 32, 0.12  # candidates for a point; width of the densities


class Axis(NamedTuple):
    """The values of one name: numbers from ``low`` to ``high``, or a list of values."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    values: tuple[Any, ...] = ()

    def at(self, share: float) -> Any:
        """Returns the value at a place in [0, 1)."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return round(value) if self.whole else float(value)

    def place(self, value: Any) -> float:
        """Returns the place of a value, the middle of its part for listed ones."""
        if self.values:
            same = [i for i, each in enumerate(self.values) if each == value]
            return (same[0] + 0.5) / len(self.values) if same else 0.5
        ends = np.log([self.low, self.high, max(value, self.low)])
        if not self.log:
            ends = np.array([self.low, self.high, value], np.float64)
        return float(np.clip((ends[2] - ends[0]) / (ends[1] - ends[0]), 0.0, 1 - 1e-9))


def is_option(name: str) -> bool:
    """Returns whether each value of a name has a program of its own."""
    setting = declared(RoundSettings).get(name)
    return name == "loss" or (setting is not None and not setting.traced)


def read_axis(name: str, given: Any) -> Axis:
    """Returns the axis of a name: a pair of numbers is a range, a list is a choice.

    A range of sizes, such as max_depth, is a list; the default is first, if there.
    """
    number = int | float | np.number
    if isinstance(given, tuple) and len(given) == 2:
        low, high = given
        numbers = all(isinstance(e, number) and not isinstance(e, bool) for e in given)
        if not (numbers and np.isfinite(given).all() and low < high):
            raise ValueError(
                f"space[{show(name)}] must be (low, high), two numbers with low < "
                f"high, or a list of values, got {show(given)}"
            )
        whole = all(isinstance(each, int | np.integer) for each in given)
        if whole and is_option(name):
            usual = declared(RoundSettings)[name].default or low
            sizes = range(int(low), int(high) + 1)
            return Axis(values=tuple(sorted(sizes, key=lambda n: abs(n - usual))))
        log = low > 0 and high >= 8 * low
        return Axis(float(low), float(high), log, whole)
    if isinstance(given, list) and given:
        return Axis(values=tuple(given))
    raise TypeError(
        f"space[{show(name)}] must be (low, high) or a list of values, got "
        f"{show(given)}"
    )


def read_space(space: Any, given: Mapping[str, Any], loss: Any) -> dict[str, Axis]:
    """Returns the axis of each name in the argument ``space``."""
    if space is None:
        return {}
    if not isinstance(space, Mapping):
        raise TypeError(
            "space must be {name: (low, high)} or {name: [values]}, got "
            f"{show(space)}"
        )
    for name in space:
        if name not in SWEPT and name not in keywords_of(loss):
            known = ", ".join([*SWEPT, *keywords_of(loss)])
            raise ValueError(f"space must name {known}, got {show(name)}")
        if name in given:
            raise ValueError(
                f"space must not name {name}, which is given as an argument, "
                f"{show(given[name])}"
            )
    return {name: read_axis(name, each) for name, each in space.items()}


def default_space(settings: Settings, num_rows: int) -> dict[str, Axis]:
    """Returns the axes of the names that are searched by default.

    All but the rate are shares, counts of rows, and sizes of trees: they do not depend
    on the units of the loss.
    """
    rate = rate_by_rows(num_rows)
    space: dict[str, Any] = {
        "learning_rate": (SLOWER / 2 * rate, 2 * SLOWER * rate),
        "l2": (0.1, 30.0),
        "min_child_weight": (1.0, 50.0),
        "subsample": (0.5, 1.0),
        "colsample_bynode": (0.4, 1.0),
        "max_depth": [6, 4, 8],
    }
    if settings.draws_thresholds:
        space |= {"rows_per_threshold": (20, 1000), "parent_rows": (1.0, 100.0)}
    if settings.linear_leaves:
        space["linear_leaves"] = ["auto", False]
    return {name: read_axis(name, each) for name, each in space.items()}


def first_point(axes: dict[str, Axis], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first point: the usual values of the names that are searched.

    It is the middle of the range of a name without a usual number in it.
    """
    point = {}
    for name, axis in axes.items():
        if axis.values:
            point[name] = axis.values[0]
            continue
        value = usual.get(name)
        known = isinstance(value, int | float) and axis.low <= value <= axis.high
        point[name] = axis.at(axis.place(value) if known else 0.5)
    return point


class Planner:
    """Chooses points: evenly at first, then near good ones."""

    def __init__(self, axes: dict[str, Axis], seed: int):
        self.axes = axes
        self.generator = np.random.default_rng(seed)
        self.static = [
            name for name, axis in axes.items() if (axis.values and is_option(name))
        ]
        self.numbers = [name for name in axes if name not in self.static]
        # The root of t^(d + 1) = t + 1 generalizes the golden ratio.
        count, root = len(self.numbers), 2.0
        for _ in range(64):
            root = (1 + root) ** (1 / (count + 1))
        self.steps = root ** -np.arange(1.0, count + 1)
        self.shift, self.drawn = self.generator.random(count), 0
        # First the default program, then those with one other value, then all.
        first = {name: axes[name].values[0] for name in self.static}
        self.programs = [first] + [
            {**first, name: value}
            for name in self.static
            for value in axes[name].values[1:]
        ]
        self.fresh = [*self.programs]

    def plan(self, trials: Sequence[Any], count: int) -> list[dict[str, Any]]:
        """Returns the next points, which share a program."""
        known = [trial for trial in trials if np.isfinite(trial.best)]
        order = np.argsort([trial.best for trial in known], kind="stable")
        good = [known[i] for i in order[: max(4, round(_GOOD * len(known)))]]
        rest = [known[i] for i in order[len(good) :]]
        program = self._choose_program(good)
        places = [self._draw(good, rest) for _ in range(count)]
        axes = [self.axes[name] for name in self.numbers]
        found = []
        for place in places:
            numbers = [axis.at(share) for axis, share in zip(axes, place, strict=True)]
            found.append({**dict(zip(self.numbers, numbers, strict=True)), **program})
        return found

    def _choose_program(self, good):
        if self.fresh:
            return self.fresh.pop(0)
        held = [{name: trial.values[name] for name in self.static} for trial in good]
        every = [*self.programs, *(each for each in held if each not in self.programs)]
        weights = np.array([0.5 + held.count(each) for each in every])
        if self.static and self.generator.random() < 0.1:  # any combination
            values = [self.axes[name].values for name in self.static]
            picks = [each[self.generator.integers(len(each))] for each in values]
            return dict(zip(self.static, picks, strict=True))
        return every[self.generator.choice(len(every), p=weights / weights.sum())]

    def _draw(self, good, rest):
        if len(rest) < _EVEN or not self.numbers:
            self.drawn += 1
            return (self.shift + self.drawn * self.steps) % 1.0
        near, far = (np.stack([t.place for t in each]) for each in (good, rest))
        centers = near[self.generator.integers(len(near), size=_DRAWS)]
        moved = centers + _WIDTH * self.generator.normal(size=centers.shape)
        moved = np.abs(moved)  # reflected at 0 and at 1
        moved = np.clip(np.where(moved > 1, 2 - moved, moved), 0, 1 - 1e-9)
        moved[: _DRAWS // 8] = self.generator.random((_DRAWS // 8, moved.shape[1]))
        gain = _log_density(moved, near) - _log_density(moved, far)
        return moved[np.argmax(gain)]

    def locate(self, values: dict[str, Any]) -> Float[np.ndarray, " D"]:
        """Returns the place of a point on the axes of numbers."""
        places = [self.axes[name].place(values[name]) for name in self.numbers]
        return np.array(places, np.float64)


def _log_density(points, centers):
    """Sums over the axes the logarithms of densities, a tenth of them uniform."""
    distance = (points[:, None] - centers[None]) / _WIDTH
    kernels = np.exp(-(distance**2) / 2) / (_WIDTH * np.sqrt(2 * np.pi))
    return np.sum(np.log(0.1 + 0.9 * kernels.mean(axis=1)), axis=1)
