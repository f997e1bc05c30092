# SPDX-License-Identifier: Apache-2.0
"""Prints and draws the result of ``benchmark.py``: medians, ratios, and targets.

In: the result of a run, complete or not. Out: tables in the terminal, or as Markdown,
and a picture of all ratios.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_cases import FIGURES, GROUPS, MILLISECONDS, PEERS, PLAN, Line, Step
from experiment_tools import BLUE, GRAY, ORANGE, open_figure, save_pictures

LOST = "not measured"
NAMES = {
    "xgboost": "XGBoost", "xgboost-1": "XGBoost, one thread",
    "xgboost-multi": "XGBoost, trees of vectors", "lightgbm": "LightGBM",
    "lightgbm-1": "LightGBM, one thread", "lightgbm-q": "LightGBM, quantized",
    "sklearn": "scikit-learn", "jboost-built-in": "jboost",
}  # fmt: skip
LABELS = 180  # width of the labels of the picture, in points


# ---- ratios -------------------------------------------------------------------------


def find_median(entry: dict, source: str, figure: str) -> float | None:
    """Returns a median of a step; None if it was not measured."""
    return entry["sources"].get(source, {}).get("medians", {}).get(figure)


def find_best(entry: dict, figure: str) -> tuple[str, float] | None:
    """Returns the peer with the lowest median."""
    medians = {name: find_median(entry, name, figure) for name in PEERS}
    known = {name: value for name, value in medians.items() if value}
    return min(known.items(), key=lambda item: item[1]) if known else None


def find_ratios(result: dict) -> list[dict]:
    """Returns all lines of the plan by group, with the ratios that were measured."""
    found = [
        find_ratio(result["steps"].get(step.name), step, line)
        for step in PLAN
        for line in step.lines
    ]
    return sorted(found, key=lambda row: GROUPS.index(row["group"]))


def find_ratio(entry: dict | None, step: Step, line: Line) -> dict[str, Any]:
    """Returns a line with its ratio, its denominator, and a verdict."""
    measured, over = None, line.over or "peers"
    if entry:
        own = find_median(entry, line.subject, line.figure)
        best = find_best(entry, line.figure)
        if line.over:
            best = line.over, find_median(entry, line.over, line.figure)
        over, base = best or (over, None)
        measured = own / base if own and base else None
        lost = [
            name
            for name in entry["sources"]
            if name in PEERS and find_median(entry, name, line.figure) is None
        ]
        if not line.over:
            over += "".join(f", {name} {LOST}" for name in lost)
    found = {**line._asdict(), "step": step.name, "measured": measured, "over": over}
    return found | {"verdict": judge(line, measured, over)}


def judge(line: Line, measured: float | None, over: str) -> str:
    """Returns in a word whether a ratio reaches its target."""
    if measured is None:
        return LOST
    if line.reach is None or line.aim is None:
        return ""
    if LOST in over:  # the fastest peer may be another one
        return "unsure"
    if measured <= line.aim:
        return "aim"
    return "reached" if measured <= line.reach else "MISSED"


# ---- tables -------------------------------------------------------------------------


def print_report(result: dict) -> list[dict]:
    """Prints everything; returns the lines with what was measured."""
    print("\n" + json.dumps(result["machine"]))
    print_medians(result)
    ratios = find_ratios(result)
    print_ratios(result, ratios)
    print_disturbance(result)
    print(f"\n{conclude(ratios)}")
    return ratios


def print_medians(result: dict) -> None:
    """Prints the medians of all sources."""
    print("\nmedians, and the range of the readings in percent of them")
    for step in PLAN:
        entry = result["steps"].get(step.name)
        for figure, unit in FIGURES.get(step.measure, MILLISECONDS).items():
            if entry:
                named = f"{step.name}, {figure}" if figure != "time" else step.name
                cells = [
                    f"{name} {format_median(entry['sources'][name], figure)}"
                    for name in entry["sources"]
                ]
                print(f"{named:40}{unit:11} " + "; ".join(cells))
                losses = entry.get("losses")
                if losses:
                    print(f"{'':40}{'loss':11} " + json.dumps(losses))


def format_median(source: dict, figure: str) -> str:
    """Returns a median with the range of the readings, or why there is none."""
    median = source["medians"].get(figure)
    if median is None:
        return source["note"]
    values = [reading[figure] for reading in source["readings"]]
    return f"{median:.4g} ({100 * (max(values) - min(values)) / median:.0f} %)"


def print_ratios(result: dict, ratios: list[dict]) -> None:
    """Prints the targets and the measured ratios side by side."""
    print("\nratios of medians and their targets (lower is better)")
    if result["arguments"]["quick"]:
        print("a quick run: the sizes are not those of the labels")
    print(f"{'':66}{'reach':>7}{'aim':>7}{'measured':>10}")
    group = ""
    for row in ratios:
        if row["group"] != group:
            group = row["group"]
            print(group)
        asked = [f"{row[name] or '-':>7}" for name in ("reach", "aim")]
        shown = "-" if row["measured"] is None else f"{row['measured']:.3g}"
        verdict = f"{row['verdict']:13}{row['over']}"
        print(f"  {row['label']:64}{asked[0]}{asked[1]}{shown:>10}  {verdict}")


def tabulate(result: dict) -> list[list[str]]:
    """Returns the measured ratios as a table of the documentation."""
    rows = [["measure", "jboost / fastest peer", "fastest peer"]]
    group = ""
    for row in find_ratios(result):
        if row["measured"] is None:
            continue
        if row["group"] != group:
            group = row["group"]
            rows.append([f"**{group}**", "", ""])
        label = row["label"].replace("%", " %")
        over = NAMES.get(row["over"], row["over"])
        rows.append([label, format_ratio(row["measured"]), over])
    return rows


def format_ratio(ratio: float) -> str:
    """Returns a ratio with two decimals, or two digits if it is small."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def print_disturbance(result: dict) -> None:
    """Prints how many readings were discarded, and what was not measured."""
    steps = result["steps"]
    seconds = sum(entry["seconds"] for entry in steps.values())
    print(f"\n{len(steps)} of {len(PLAN)} steps in {seconds:.0f} seconds")
    if not result["load was read"]:
        print("the load of other processes could not be read: times may be disturbed")
    entries = {
        f"{name}: {source}": entry
        for name, step in steps.items()
        for source, entry in step["sources"].items()
    }
    kept = sum(len(entry["readings"]) for entry in entries.values())
    lost = sum(entry["discarded"] for entry in entries.values())
    print(f"{kept} readings kept, {lost} discarded because of other processes")
    for name, entry in entries.items():
        if not entry["readings"]:
            print(f"not measured: {name} ({entry['note']})")
        elif len(entry["readings"]) < 2 and entry["discarded"]:
            print(f"one reading only: {name}")


def conclude(ratios: list[dict]) -> str:
    """Returns the result in one sentence."""
    measured = [row for row in ratios if row["measured"] is not None]
    if not measured:
        return f"Found: none of the {len(ratios)} ratios was measured."
    slower = sum(row["measured"] > 1 for row in measured)
    missed = [row["label"] for row in measured if row["verdict"] == "MISSED"]
    said = f"Found: {len(measured)} of {len(ratios)} ratios were measured, {slower} of"
    said += f" them are above 1; {len(missed)} miss their target"
    return said + (f": {'; '.join(missed)}." if missed else ".")


# ---- the picture --------------------------------------------------------------------


def draw(result: dict, folder: Path) -> None:
    """Writes a dot for each measured ratio, as PNG and as SVG."""
    from matplotlib import pyplot

    rows = [row for row in find_ratios(result) if row["measured"]]
    if not rows:
        return
    halves, height = split_groups(rows)
    style: Any = {"figure.facecolor": "white", "font.size": 8}
    with pyplot.rc_context(style):
        figure, (panels,) = open_figure(
            1, len(halves), size=(10, 0.6 + 0.175 * height), sharex=True
        )
        figure.get_layout_engine().set(wspace=0.05)
        for axes, half in zip(panels, halves, strict=True):
            draw_half(axes, half, height)
        figure.supxlabel(
            "jboost / fastest peer: ratio of medians (below 1, jboost needs less)",
            fontsize=9,
        )
        save_pictures(figure, folder / "benchmark")


def split_groups(rows: list[dict]) -> tuple[list[list[dict | str]], float]:
    """Returns rows below the names of their groups, in two halves, and their height."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    blocks: list[list[dict | str]] = [[name, *part] for name, part in groups.items()]
    sizes = [len(block) + 0.5 for block in blocks]

    def height(cut: int) -> float:
        return max(sum(sizes[:cut]), sum(sizes[cut:]))

    cut = min(range(1, len(blocks) + 1), key=height)
    halves = [list(chain(*part)) for part in (blocks[:cut], blocks[cut:]) if part]
    return halves, height(cut)


def draw_half(axes: Any, lines: list[dict | str], height: float) -> None:
    """Draws names of groups, labels, dots, and the line at 1, in so many rows."""
    from matplotlib import ticker

    headings = np.cumsum([isinstance(line, str) for line in lines])
    places = np.arange(len(lines)) + 0.5 * (headings - 1)
    axes.set(xscale="log", yticks=places, ylim=(height - 1, -0.6))
    axes.set_yticklabels(
        [line if isinstance(line, str) else line["label"] for line in lines], ha="left"
    )
    axes.tick_params(axis="y", length=0, pad=LABELS)
    for place, line, label in zip(places, lines, axes.get_yticklabels(), strict=True):
        if isinstance(line, str):
            label.set(fontweight="bold")
            continue
        color = BLUE if line["measured"] <= 1 else ORANGE
        axes.plot([line["measured"], 1], [place, place], color=color, lw=1, alpha=0.5)
        axes.plot(line["measured"], place, "o", color=color, markersize=4.5)
        axes.annotate(
            format_ratio(line["measured"]), (1.01, place), va="center", color=color,
            xycoords=("axes fraction", "data"),
        )  # fmt: skip
    axes.axvline(1, color="0.2", linewidth=1)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(axis="x", color=GRAY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
