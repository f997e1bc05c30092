# SPDX-License-Identifier: Apache-2.0
"""Tables and a picture of what ``gpu.py`` measured.

In: the content of gpu.json. Out: Markdown, a picture of the figures divided by their
targets, and one sentence.
"""

import statistics
from pathlib import Path
from typing import Any

from experiment_tools import BLUE, GRAY, ORANGE, open_figure, save_pictures
from gpu_cases import FULL, QUICK, Row, list_others, list_rows

BITS = {"rerun": "run to run", "cpu": "this device and the CPU, sums of integers"}
TURNS = "first", "second"
SUMS = "histograms", "unit of histograms"  # of the bits: what no float decides


def choose_sizes(result: dict) -> Any:
    """Returns the sizes of a run."""
    return QUICK if result["settings"]["quick"] else FULL


def find_value(result: dict, row: Row) -> float | None:
    """Returns a figure, or None."""
    return find_figures(result, row.part).get(row.figure)


def find_figures(result: dict, part: str) -> dict[str, Any]:
    """Returns what a part has measured."""
    return result["parts"].get(part, {}).get("figures", {})


def judge(result: dict, row: Row) -> str:
    """Returns how a figure compares with its targets."""
    value = find_value(result, row)
    if value is None:
        known = row.figure in find_figures(result, row.part)
        return "below noise" if known else "not measured"
    if row.reach is None or row.aim is None:
        return ""
    return "aim" if value <= row.aim else "reached" if value <= row.reach else "MISSED"


def describe_bits(found: dict[str, dict[str, float]] | None) -> tuple[str, str]:
    """Returns what differs between two runs, and the verdict."""
    if not found:
        return "", "not measured"
    differing = {name: pair for name, pair in found.items() if pair["share"]}
    if not differing:
        return "same bits", "aim"
    said = [
        f"{name}: {100 * pair['share']:.3g} %, up to {pair['greatest']:.2g}"
        for name, pair in differing.items()
    ]
    return f"{len(differing)} of {len(found)} differ: {'; '.join(said)}", "MISSED"


def take(found: dict[str, Any] | None, sums: bool) -> dict[str, Any]:
    """Returns of the compared arrays the sums of integers, or all others."""
    return {k: pair for k, pair in (found or {}).items() if (k in SUMS) == sums}


def tabulate(result: dict) -> dict[str, list[list[str]]]:
    """Returns all tables, as rows of cells."""
    sizes = choose_sizes(result)
    measures = [["measure", "reach", "aim", "measured", ""]]
    for row in list_rows(sizes):
        value = find_value(result, row)
        asked = ["" if x is None else f"{x:g}" for x in (row.reach, row.aim)]
        said = "" if value is None else f"{value:{row.form}}"
        measures.append([row.label, *asked, said, judge(result, row)])
    bits = find_figures(result, "bits")
    found = {"rerun": bits.get("rerun"), "cpu": take(bits.get("cpu"), sums=True)}
    for key, label in BITS.items():
        measures.append([label, *2 * ["same bits"], *describe_bits(found[key])])
    others = [["other figures", "measured"]]
    said, _ = describe_bits(take(bits.get("cpu"), sums=False))
    others += [["this device and the CPU, models", said]] if said else []
    for row in list_others(sizes):
        value = find_value(result, row)
        if value is not None:
            others.append([row.label, f"{value:{row.form}}"])
    many = find_figures(result, "many")
    if "equal_models" in many:
        label = "models side by side with the bits of those in turn"
        others.append([label, str(many["equal_models"])])
    tables = dict(
        measures=measures, others=others, operations=list_operations(result),
        users=list_users(result), ratios=list_ratios(result), parts=list_parts(result),
    )  # fmt: skip
    return {name: rows for name, rows in tables.items() if len(rows) > 1}


def describe_device(result: dict) -> str:
    """Returns the device, and the versions of what ran on it."""
    machine = result.get("machine", {})
    names = ("jax", "jaxlib", "xgboost", "cupy", "lightgbm")
    versions = machine.get("versions", {}).items()
    shown = [
        f"{name} {version}" for name, version in versions if name.startswith(names)
    ]
    quick = ["small sizes"] if result["settings"]["quick"] else []
    return ", ".join(
        [f"{machine.get('device')} ({machine.get('gpu')})", *shown, *quick]
    )


def list_operations(result: dict) -> list[list[str]]:
    """Returns the table of single operations."""
    times = find_figures(result, "operations").get("operations", {})
    rows = [["ms of an operation", *times]]
    for name in dict.fromkeys(name for column in times.values() for name in column):
        columns = [times[column].get(name) for column in times]
        rows.append([name, *("" if v is None else f"{v:.3f}" for v in columns)])
    return rows


def list_users(result: dict) -> list[list[str]]:
    """Returns the table of fits from NumPy arrays, in seconds."""
    cases = find_figures(result, "user").get("user", {})
    names = [f"{who}, {turn}" for who in ("jboost", "xgboost") for turn in TURNS]
    rows = [["seconds of a fit", *names, "ratio of the second", "ms of a round"]]
    for label, times in cases.items():
        known = [times.get(name) for name in names]
        said = ["" if value is None else f"{value:.2f}" for value in known]
        pair = known[1], known[3]
        ratio = "" if None in pair else f"{pair[0] / pair[1]:.2f}"
        slope = times.get("ms of a round")
        rows.append([label, *said, ratio, "" if slope is None else f"{slope:.2f}"])
    return rows


def list_ratios(result: dict) -> list[list[str]]:
    """Returns how the second fits from NumPy arrays compare with XGBoost's."""
    *_, ratio, _ = zip(*list_users(result), strict=True)
    known = sorted(float(cell) for cell in ratio[1:] if cell)
    rows = [["second fits to XGBoost's", "ratio"]]
    if known:
        found = known[0], statistics.median(known), known[-1]
        names = "least", "median", "greatest"
        rows += [[n, f"{value:.2f}"] for n, value in zip(names, found, strict=True)]
    return rows


def list_parts(result: dict) -> list[list[str]]:
    """Returns the table of parts: how each ended, and what was absent."""
    rows = [["part", "ended", "seconds", "peak MiB", "notes"]]
    for name, part in result["parts"].items():
        figures = part.get("figures", {})
        notes = [f"without {k} ({why})" for k, why in figures.get("absent", {}).items()]
        notes += [f"{k}: {why}" for k, why in figures.get("errors", {}).items()]
        notes += [describe_tests(figures["tests"])] if "tests" in figures else []
        notes += [figures["note"]] if "note" in figures else []
        peak = figures.get("peak_mib")
        seconds = f"{part.get('seconds', 0):.0f}"
        peak = "" if peak is None else f"{peak:,.0f}"
        cells = [name, part["state"], seconds, peak, "; ".join(notes)]
        rows.append([cell.replace("|", "/") for cell in cells])
    return rows


def describe_tests(found: dict[str, list[str]]) -> str:
    """Returns the numbers of tests, and the names of those that failed."""
    said = ", ".join(f"{len(names)} {kind}" for kind, names in found.items())
    failed = [*found.get("failed", []), *found.get("error", [])]
    return f"{said}: {', '.join(failed)}" if failed else said


def conclude(result: dict) -> str:
    """Returns the result in one sentence."""
    rows = list_rows(choose_sizes(result))
    verdicts = [judge(result, row) for row in rows]
    missed = [r.label for r, v in zip(rows, verdicts, strict=True) if v == "MISSED"]
    known = [v for v in verdicts if v in ("aim", "reached", "MISSED")]
    said = f"Found: {len(known)} of {len(rows)} targets were measured, "
    said += f"{verdicts.count('aim')} at the aim, {verdicts.count('reached')} within "
    said += f"reach, {len(missed)} missed"
    return f"{said}: {'; '.join(missed)}." if missed else f"{said}."


def draw(result: dict, folder: Path) -> None:
    """Writes a dot for each figure divided by its target, as PNG and as SVG."""
    from matplotlib import ticker

    rows = [
        (row, value)
        for row in list_rows(choose_sizes(result))
        if (value := find_value(result, row)) is not None and row.reach
    ]
    if not rows:
        return
    figure, ((axes,),) = open_figure(size=(8, 1.2 + 0.35 * len(rows)))
    for place, (row, value) in enumerate(rows):
        ratio = value / row.reach
        color = BLUE if ratio <= 1 else ORANGE
        axes.plot([ratio, 1], [place, place], color=color, linewidth=1, alpha=0.5)
        axes.plot(ratio, place, "o", color=color)
        axes.plot(row.aim / row.reach, place, "|", color=GRAY, markersize=14)
        axes.annotate(
            f"{value:{row.form}}", (1.01, place), va="center", color=color,
            xycoords=("axes fraction", "data"),
        )  # fmt: skip
    axes.axvline(1, color="0.2", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.label for row, _ in rows])
    axes.set(xscale="log", ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("measured / target; gray: a more distant target")
    axes.grid(axis="x", color=GRAY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    save_pictures(figure, folder / "gpu")
