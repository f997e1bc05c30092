# SPDX-License-Identifier: Apache-2.0
"""Tools of the experiments: command line, tables, pictures, results, slopes.

In: a script's docstring, a table's folder, figures, numbers, timings. Out: a parser
with ``--help`` and ``--out``, data frames, PNG and JSON files in one style, differences
and slopes with their noise.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

# Okabe and Ito's colors can be told apart by color-blind readers.
BLACK, BLUE, ORANGE, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
PINK, GRAY = "#CC79A7", "#999999"
PACKAGES = (
    "jboost", "jax", "jaxlib", "numpy", "pandas", "scikit-learn", "xgboost-cpu",
    "lightgbm",
)  # fmt: skip


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the script's docstring, with ``--out``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR",
        help="folder to write to (default: results)",
    )  # fmt: skip
    return parser


def add_minutes(parser: argparse.ArgumentParser, minutes: float = 4) -> None:
    """Adds ``--minutes`` for ``take_in_time``."""
    parser.add_argument(
        "--minutes", type=float, default=minutes,
        help="begin nothing new after them; the same command goes on (default: "
        f"{minutes:g})",
    )  # fmt: skip


def take_in_time(jobs: Iterable[Any], minutes: float) -> Iterator[Any]:
    """Yields jobs until the time is over, and then says how many are left."""
    jobs = [*jobs]
    end = time.monotonic() + 60 * minutes
    for done, job in enumerate(jobs):
        if time.monotonic() > end:
            left = len(jobs) - done
            print(f"{left} of {len(jobs)} are left; the same command goes on")
            return
        yield job


def choose_tables(
    parser: argparse.ArgumentParser, only: Sequence[str] | None, known: Sequence[str]
) -> list[str]:
    """Returns the known tables named by ``--only``, or all of them.

    Ends the program with the list of known tables if a name is unknown.
    """
    unknown = [name for name in only or () if name not in known]
    if unknown:
        parser.error(f"--only must be among {', '.join(known)}; got {unknown[0]!r}")
    return [name for name in known if only is None or name in only]


def describe_machine() -> dict[str, Any]:
    """Returns the versions and the device that the numbers come from."""
    import jax

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "source" if name == "jboost" else "not installed"
    device = jax.devices()[0]
    return {
        "versions": versions,
        "device": f"{device.platform}: {device.device_kind}",
        "processor": read_processor(),
    }


def read_processor() -> str:
    """Returns the processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


# ---- tables -------------------------------------------------------------------------


def read_table(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Returns the columns of a folder's ``data.parquet``, and its ``meta.json``.

    Columns that ``meta.json`` lists under ``drop_columns`` are left out.
    """
    meta = json.loads((folder / "meta.json").read_text())
    frame = pd.read_parquet(folder / "data.parquet")
    return frame.drop(columns=meta.get("drop_columns", [])), meta


def make_matrix(frame: pd.DataFrame) -> np.ndarray:
    """Returns float32 [N, F]; categories become ranks of their sorted values."""
    x = np.empty(frame.shape, np.float32)
    for position, (_, column) in enumerate(frame.items()):
        if pd.api.types.is_numeric_dtype(column):
            x[:, position] = column.to_numpy(np.float32, na_value=np.nan)
        else:
            codes, _ = pd.factorize(column.astype(object), sort=True)
            x[:, position] = np.where(codes < 0, np.nan, codes)
    return x


# ---- results ------------------------------------------------------------------------


def make_figures(device: str | None = None, **tables: list[list[str]]) -> dict:
    """Returns tables for the pages (docs/make_figures.py), and where they are from.

    Args:
      device: what ran the script, if not the cores of this machine.
      tables: by name, a row of headings and the rows below it, as the pages show them.
    """
    given = ["DIR" if Path(each).is_absolute() else each for each in sys.argv[1:]]
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    script = f"experiments/{Path(sys.argv[0]).name}"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {
        "command": " ".join(["python", script, *given]),
        "date": datetime.date.today().isoformat(),
        "device": device or f"{cores} cores of {read_processor()}",
        "tables": tables,
    }


def print_table(rows: list[list[str]]) -> None:
    """Prints a table in Markdown; the first row holds the headings."""
    heads, *others = rows
    for row in (heads, ["---"] * len(heads), *others):
        print(f"| {' | '.join(row)} |")


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, creates its folder, and prints the path."""
    save_json(path, result)
    print(f"written: {path}")


def save_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result in one step: a killed run leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, default=_as_json) + "\n")
    part.replace(path)


def _as_json(value):
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def open_figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (6, 4), **settings: Any
) -> tuple[Any, Any]:
    """Returns a figure for a file, and its axes as an array [rows, columns]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **settings
    )


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG in the style of the experiments, and prints the path."""
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
    print(f"written: {path}")


def save_pictures(figure: Any, path: Path) -> None:
    """Writes a PNG and an SVG, where equal figures give equal files; prints the paths.

    Args:
      path: without the ending.
    """
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    # A fixed salt, and no date.
    with pyplot.rc_context({"svg.hashsalt": "jboost"}):
        for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
            figure.savefig(path.with_suffix(suffix), dpi=160, metadata=metadata)
            print(f"written: {path.with_suffix(suffix)}")
    pyplot.close(figure)


def compare_pairs(
    ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, float]:
    """Returns the mean difference of paired numbers, and its standard error."""
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    error = np.std(differences, ddof=1) / np.sqrt(len(differences))
    return float(np.mean(differences)), float(error)


# ---- slopes -------------------------------------------------------------------------


class Slope(NamedTuple):
    """Seconds per tree: the difference of long and short runs over their rounds.

    Attributes:
      value: the difference of the medians, divided by the difference of rounds.
      noise: the sum of the ranges of both kinds of runs, divided in the same way.
    """

    value: float
    noise: float

    @property
    def measured(self) -> float | None:
        """The value, or None if it is below noise and thus meaningless.

        Above noise, every long run took longer than every short one, so the slopes and
        ratios of single turns are positive as well.
        """
        return self.value if self.value > self.noise else None


def find_slope(few: Sequence[float], many: Sequence[float], between: int) -> Slope:
    """Returns the slope of repeated readings.

    Args:
      few: seconds of the short runs.
      many: seconds of the long runs.
      between: the additional rounds of the long runs.
    """
    value = float(np.median(many) - np.median(few)) / between
    return Slope(value, float(np.ptp(few) + np.ptp(many)) / between)
