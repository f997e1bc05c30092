# SPDX-License-Identifier: Apache-2.0
"""Reports of compare_libraries.py: ratios of losses, ranks, and a picture.

In: a row per fit with its losses at three rounds. Out: per table and per library,
ratios to the other libraries, as data frames, as text and as an SVG.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from compare_fits import CODES, list_stages
from experiment_tools import BLUE, ORANGE, open_figure, print_table

POINTS = ("early", "last", "best")  # the rounds at which losses are compared
CASE = ["kind", "table"]
SETTING = ["rounds", "rate", "depth"]
PEERS = {  # of the table of the pages
    "catboost": "CatBoost", "xgboost": "XGBoost", "lightgbm": "LightGBM",
    "sklearn": "scikit-learn",
}  # fmt: skip
OVERVIEW = ("early/best", "last/mean", "last/best", "best/best", "worst")
FLOOR = 1e-3  # of the loss of a constant; below it, differences do not matter


def judge(fit: dict[str, Any], rounds: int) -> dict[str, float]:
    """Returns the test losses at three of the first `rounds` rounds.

    "early" is the round that early stopping on the validation rows picks, "last" the
    last one, and "best" the best one for the test rows, which nobody knows.
    """
    kept = len(list_stages(rounds))
    validation, test = (np.array(fit[s])[:kept] for s in ("validation", "test"))
    losses = {
        "early": test[validation.argmin()],
        "last": test[-1],
        "best": test.min(),
    }
    return {point: max(v, FLOOR * fit["constant"]) for point, v in losses.items()}


def find_ratios(fits: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per table and library of one task and setting.

    Columns: the mean losses over the splits; "X/best" and "X/mean", their ratios to
    the lowest and the mean of the other libraries' losses; "+-", the standard error of
    the ratio early/best over the splits; the rank; the median seconds. A library that
    misses a split of a table is left out there. The row of CODES counts for no other.
    """
    found = []
    for case, group in fits.groupby(CASE, sort=False):
        splits = group.pivot(index="split", columns="library", values=list(POINTS))
        splits = splits.dropna(axis=1)
        losses = splits.mean().unstack(level=0)  # [library, point]
        seconds = group.groupby("library")["seconds"].median()
        for library in losses.index:
            others = losses.drop(index=[*{library, CODES} & {*losses.index}])
            if library == CODES:
                others = others.drop(index="jboost", errors="ignore")
            row = {**dict(zip(CASE, case, strict=True)), "library": library}
            row |= losses.loc[library].to_dict()
            row["seconds"] = seconds[library]
            if len(others):
                for point in POINTS:
                    row[f"{point}/best"] = row[point] / others[point].min()
                    row[f"{point}/mean"] = row[point] / others[point].mean()
                peer = splits["early", others["early"].idxmin()]
                row["+-"] = (splits["early", library] / peer).sem()
            if library != CODES:
                for point in POINTS:
                    place = losses.drop(index=CODES, errors="ignore")[point].rank()
                    row[f"{point} rank"] = place[library]
            found.append(row)
    return pd.DataFrame(found)


def geometric_mean(values: pd.Series) -> float:
    """Returns the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def summarize(tables: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per library: geometric means, the worst table, mean ranks."""
    found = {}
    for library, rows in tables.groupby("library", sort=False):
        row: dict[str, Any] = {"tables": len(rows)}
        if "early/best" in rows and rows["early/best"].notna().any():
            for name in OVERVIEW[:-1]:
                row[name] = geometric_mean(rows[name])
            worst = rows.loc[rows["early/best"].idxmax()]
            row |= {
                "worst": worst["early/best"],
                "worst table": f"{worst['table']}, {worst['kind']}",
            }
        row |= {
            f"rank {p}": rows[f"{p} rank"].mean() for p in POINTS if f"{p} rank" in rows
        }
        found[library] = row | {"seconds": rows["seconds"].median()}
    return pd.DataFrame.from_dict(found, orient="index").rename_axis("library")


def tabulate(reports: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the table of the pages: "early" losses to those of the peers, by task."""
    heads = [f"to {name}" for name in PEERS.values()]
    heads[1:1] = ["median", "won"]  # of the comparison with CatBoost
    rows = [["task", "tables", *heads, "to the best", "worst"]]
    for part in reports:
        tables = pd.DataFrame(part["tables"])
        losses = tables.pivot(index=CASE, columns="library", values="early")
        cells = []
        for peer in PEERS:
            known = losses.get(peer, np.nan)
            ratios = (losses["jboost"] / known).dropna()
            cells.append(f"{geometric_mean(ratios):.3f}")
            if peer == "catboost":
                won = f"{(ratios < 1).sum()} of {len(ratios)}" if len(ratios) else "-"
                cells += [f"{ratios.median():.3f}", won]
        best = tables[tables["library"] == "jboost"]["early/best"]
        cells += [f"{geometric_mean(best):.3f}", f"{best.max():.3f}"]
        cells = [cell.replace("nan", "-") for cell in cells]
        rows.append([part["task"].replace("_", " "), str(len(best)), *cells])
    return rows


def compare_codes(tables: pd.DataFrame) -> dict[str, Any]:
    """Returns native categories divided by the same columns as numbers, "early"."""
    losses = tables.pivot(index=CASE, columns="library", values="early")
    if not {"jboost", CODES} <= {*losses}:
        return {}
    ratio = (losses["jboost"] / losses[CODES]).dropna()
    return {
        "native / codes": geometric_mean(ratio),
        "worst": float(ratio.max()),
        "worst table": ", ".join(ratio.idxmax()[::-1]),
    }


def print_report(
    title: str, tables: pd.DataFrame, summary: pd.DataFrame, detailed: bool
) -> None:
    """Prints the libraries' row each, and if `detailed`, jboost's tables."""
    form = "{:.4g}".format
    print(f"\n# {title}\n")
    own = tables[tables["library"] == "jboost"]
    if detailed and "early/best" in own:
        ratios = ["early", "early/best", "+-", "last/mean", "best/best"]
        names = [*CASE, *ratios, "early rank"]
        print(own[names].to_string(index=False, float_format=form), end="\n\n")
    print(summary.to_string(float_format=form, na_rep="-"), flush=True)
    for name, value in compare_codes(tables).items():
        print(f"{name}: {value if isinstance(value, str) else form(value)}")


def report(fits: pd.DataFrame) -> tuple[list[dict[str, Any]], pd.DataFrame]:
    """Prints every task and setting, then an overview.

    Returns:
      The same as records for JSON, and the overview: jboost's row for each task and
      setting, with the mean rank of every library at the round of early stopping.
    """
    reports, overview = [], []
    detailed = len(fits[SETTING].drop_duplicates()) == 1
    for (task, *setting), group in fits.groupby(["task", *SETTING], sort=False):
        tables = find_ratios(group)
        summary = summarize(tables)
        named = {"task": task, **dict(zip(SETTING, setting, strict=True))}
        title = "{task}: {rounds} rounds, learning rate {rate}, depth {depth}"
        print_report(title.format(**named), tables, summary, detailed)
        records = {"tables": tables, "libraries": summary.reset_index()}
        records = {
            k: json.loads(v.to_json(orient="records")) for k, v in records.items()
        }
        reports.append(named | records | {"codes": compare_codes(tables)})
        if {"early/best", "rank early"} <= {*summary} and "jboost" in summary.index:
            named["tables"] = int(summary.loc["jboost", "tables"])
            own = summary.loc["jboost", list(OVERVIEW)].to_dict()
            ranks = summary["rank early"].drop(CODES, errors="ignore")
            overview.append(named | own | ranks.add_prefix("rank ").to_dict())
    overview = pd.DataFrame(overview)
    if len(overview):
        print_overview(overview)
    return reports, overview


def print_overview(overview: pd.DataFrame) -> None:
    """Prints tables in Markdown: the overview, and the means over tasks by setting."""
    several = [name for name in SETTING if overview[name].nunique() > 1]
    print("\n# Overview\n")
    print_markdown(overview.drop(columns={*SETTING} - {*several}))
    if several:
        means = overview.pivot_table(
            index=["rate", "depth"], columns="rounds", values="early/best",
            aggfunc=geometric_mean,
        )  # fmt: skip
        print("\n# early/best by rounds, geometric mean over tasks\n")
        print_markdown(means.reset_index())


def print_markdown(frame: pd.DataFrame) -> None:
    """Prints a table in Markdown."""
    rows = [
        [c if isinstance(c, str) else f"{c:.4g}".replace("nan", "-") for c in row]
        for row in frame.astype(object).itertuples(index=False)
    ]
    print_table([[*map(str, frame)], *rows])


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Writes an SVG: for each task a dot per table, and a bar at the geometric mean.

    A dot is jboost's loss divided by that of the best peer, both at the round that
    early stopping picks; with several settings, their geometric mean.
    """
    from matplotlib import pyplot, ticker

    rows = [
        {"task": part["task"], **row} for part in reports for row in part["tables"]
        if row["library"] == "jboost" and row.get("early/best")
    ]  # fmt: skip
    if not rows:
        return
    ratios = pd.DataFrame(rows).groupby(["task", *CASE], sort=False)["early/best"]
    ratios = ratios.apply(geometric_mean)
    tasks = list(dict.fromkeys(ratios.index.get_level_values("task")))
    # A fixed salt, and no date: equal pictures give equal files.
    with pyplot.rc_context({"svg.hashsalt": "jboost", "figure.facecolor": "white"}):
        figure, [[axes]] = open_figure(size=(7.2, 1.2 + 0.42 * len(tasks)))
        for height, task in enumerate(tasks):
            values = ratios[task].sort_values().to_numpy()
            spread = 0.13 * (np.arange(len(values)) % 3 - 1)  # near dots stay apart
            axes.plot(values, height + spread, "o", color=BLUE, alpha=0.6, markersize=5)
            mean = np.exp(np.log(values).mean())
            axes.plot([mean, mean], [height - 0.32, height + 0.32], color=ORANGE, lw=3)
            axes.annotate(
                f"{mean:.3f}", (1.01, height), xycoords=("axes fraction", "data"),
                va="center", color=ORANGE,
            )  # fmt: skip
        axes.axvline(1, color="0.3", linewidth=1)
        axes.set(
            xscale="log", yticks=range(len(tasks)),
            yticklabels=[f"{t.replace('_', ' ')} ({len(ratios[t])})" for t in tasks],
            xlabel="test loss / that of the best peer (below 1, jboost is better)",
        )  # fmt: skip
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(8, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    print(f"written: {path}")
