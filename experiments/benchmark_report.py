# SPDX-License-Identifier: Apache-2.0
"""Prints the result of ``benchmark.py``: medians, ratios, and targets.

In: the result of a run. Out: tables in the terminal, and the target ratios with the
measured ones.
"""

import json
import math
import statistics
from typing import Any, NamedTuple

PEERS = ("xgboost", "lightgbm", "lightgbm-q", "sklearn")
LOST = "not measured"


class Ratio(NamedTuple):
    """A median of jboost over another median, or the held-out loss of real tables."""

    case: str
    measure: str
    over: str = "peers"  # the best of them, or a single source
    subject: str = "jboost"


class Asked(NamedTuple):
    """A target of this library; lower is better."""

    case: str
    measure: str
    reach: float
    aim: float
    ratios: tuple[Ratio, ...]


ASKED = (
    Asked(
        "1M x 28 and 100k x 100, depth 6, squared error", "per tree / fastest peer",
        0.6, 0.45, (Ratio("large", "train"), Ratio("wide", "train")),
    ),
    Asked(
        "1M x 28, 50 rounds", "float matrix to model / fastest peer",
        0.4, 0.3, (Ratio("large", "fit"),),
    ),
    Asked(
        "1M x 28, absolute error, exact medians", "per tree / own squared error",
        1.3, 1.1, (Ratio("large-absolute", "train", "jboost squared_error"),),
    ),
    Asked(
        "the same", "per tree / fastest peer's absolute error",
        0.6, 0.45, (Ratio("large-absolute", "train"),),
    ),
    Asked(
        "logistic; 10 classes; depth 10", "per tree / fastest peer",
        0.7, 0.5,
        tuple(Ratio(n, "train") for n in ("large-logistic", "classes", "large-deep")),
    ),
    Asked(
        "a custom loss", "per tree / the built-in it equals",
        1.05, 1.0, (Ratio("large-own", "train", "jboost squared_error"),),
    ),
    Asked(
        "predict 1M rows, 50 and 500 rounds of depth 6",
        "time / XGBoost inplace_predict", 0.3, 0.1,
        tuple(Ratio("large", f"predict {n}", "xgboost") for n in (50, 500)),
    ),
    Asked(
        "the same with AVX-512 switched off", "time / XGBoost inplace_predict",
        0.7, 0.4,
        tuple(
            Ratio("large", f"predict {n}", "xgboost", "jboost-avx2") for n in (50, 500)
        ),
    ),
    Asked(
        "20k x 28, 100 rounds of depth 6, SHAP values", "time / XGBoost pred_contribs",
        0.2, 0.1, (Ratio("explained", "shap", "xgboost"),),
    ),
    Asked(
        "20k x 8, 100 rounds, warm", "fit / fastest peer",
        1.5, 0.7, (Ratio("medium", "fit"),),
    ),
    Asked(
        "1k x 10, 100 rounds, warm", "fit / XGBoost",
        1.0, 0.5, (Ratio("small", "fit", "xgboost"),),
    ),
    Asked(
        "5 folds: 1k x 10, 20k x 8, 100k x 28", "cross-validation / fastest peer",
        1.0, 0.5, tuple(Ratio(n, "cv") for n in ("small", "medium", "folds")),
    ),
    Asked(
        "8 learning rates, 5 folds: 1k x 10, 20k x 8", "sweep / fastest peer's loop",
        1.0, 0.5, tuple(Ratio(n, "sweep") for n in ("small", "medium")),
    ),
    Asked(
        "cold process, 1k x 10: import, fit, predict", "wall / XGBoost's cold process",
        1.5, 1.0, (Ratio("small", "cold", "xgboost"),),
    ),
    Asked(
        "1M x 28", "peak memory / XGBoost's",
        1.0, 0.7,
        (Ratio("large", "memory fit", "xgboost"), Ratio("large", "memory", "xgboost")),
    ),
    Asked(
        "held-out loss on real tables, five splits", "/ the pure-XLA core",
        1.002, 1.0, (Ratio("tables", "mean"), Ratio("tables", "worst")),
    ),
)  # fmt: skip


# ---- ratios -------------------------------------------------------------------------


def find_median(result: dict, case: str, measure: str, source: str) -> float | None:
    """Returns a median; None if it was not measured."""
    for row in result["rows"]:
        if (row["case"], row["measure"]) == (case, measure):
            return row["sources"].get(source, {"median": None})["median"]
    return None


def find_best(sources: dict[str, dict]) -> tuple[str, float] | None:
    """Returns the peer with the lowest median."""
    medians = {name: sources[name]["median"] for name in PEERS if name in sources}
    known = {name: value for name, value in medians.items() if value}
    return min(known.items(), key=lambda item: item[1]) if known else None


def find_lost(rows: list[dict[str, dict]]) -> list[str]:
    """Returns the peers that were expected but not measured."""
    return [
        name
        for sources in rows
        for name, entry in sources.items()
        if name in PEERS
        and entry["median"] is None
        and not entry["note"].startswith("unsupported")
    ]


def compute_ratio(result: dict, ratio: Ratio) -> tuple[float | None, str]:
    """Returns a ratio and its denominator."""
    if ratio.case == "tables":
        return compare_tables(result["tables"], ratio.measure)
    subject = find_median(result, ratio.case, ratio.measure, ratio.subject)
    base, name = find_median(result, ratio.case, ratio.measure, ratio.over), ratio.over
    if ratio.over == "peers":
        rows = [r for r in result["rows"] if r["case"] == ratio.case]
        sources = [r["sources"] for r in rows if r["measure"] == ratio.measure]
        best = find_best(sources[0]) if sources else None
        name, base = best or ("peers", None)
        name += "".join(f", {lost} {LOST}" for lost in find_lost(sources))
    return (subject / base if subject and base else None), name


def compare_tables(tables: list[dict], how: str) -> tuple[float | None, str]:
    """Returns the mean or highest ratio of losses, and its table."""
    ratios = {
        f"{entry['table']} {entry['kind']}": mean_ratio(entry, "jboost-xla")
        for entry in tables
    }
    known = {name: ratio for name, ratio in ratios.items() if ratio}
    if not known:
        return None, "tables"
    if how == "worst":
        name, value = max(known.items(), key=lambda item: item[1])
        return value, f"worst of {len(known)}: {name}"
    mean = math.exp(statistics.fmean(map(math.log, known.values())))
    return mean, f"geometric mean of {len(known)} tables"


def mean_ratio(entry: dict, name: str) -> float | None:
    """Returns the mean over splits of jboost's loss over another one's."""
    own, other = (entry["losses"].get(key, []) for key in ("jboost", name))
    if not own or len(own) != len(other):
        return None
    return statistics.fmean(a / b for a, b in zip(own, other, strict=True))


def judge(asked: Asked, value: float | None, base: str) -> str:
    """Returns in a word whether a ratio reaches its target."""
    if value is None:
        return LOST
    if LOST in base:  # the fastest peer may be another one
        return "unsure"
    if value <= asked.aim:
        return "aim"
    return "reached" if value <= asked.reach else "MISSED"


# ---- printing -----------------------------------------------------------------------


def print_report(result: dict) -> list[dict]:
    """Prints everything; returns the targets with what was measured."""
    print("\n" + json.dumps(result["machine"]))
    print_rows([row for row in result["rows"] if row["measure"] != "compile"])
    print_compile([row for row in result["rows"] if row["measure"] == "compile"])
    print_tables(result["tables"])
    verdicts = print_asked(result)
    print_disturbance(result)
    print(f"\n{conclude(verdicts)}")
    return verdicts


def conclude(verdicts: list[dict]) -> str:
    """Returns the result in one sentence."""
    measured = [entry for entry in verdicts if entry["measured"] is not None]
    missed = [entry["case"] for entry in measured if entry["verdict"] == "MISSED"]
    if not measured:
        return f"Found: none of the {len(verdicts)} ratios was measured."
    said = f"Found: {len(measured)} of {len(verdicts)} ratios were measured"
    if missed:
        return f"{said}; {len(missed)} miss their target: {'; '.join(missed)}."
    return f"{said}; none misses its target."


def format_median(summary: dict | None) -> str:
    """Returns a median, or why there is none."""
    if summary is None:
        return "-"
    if summary["median"] is None:
        return summary["note"].split(":")[0].split()[0]
    return f"{summary['median']:.4g}"


def print_rows(rows: list[dict]) -> None:
    """Prints medians, their ratios to jboost's, and jboost's to the best peer's."""
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row["sources"]))
    names = [name for name in names if name.split()[0] in (*PEERS, "jboost")]
    print("\nmedians (in brackets: ratio to jboost); last column: jboost / best peer")
    print(f"{'case':15}{'measure':23}" + "".join(f"{n:>21}" for n in names))
    for row in rows:
        sources = row["sources"]
        own = sources.get("jboost", {"median": None})["median"]
        line = f"{row['case']:15}{row['measure'] + ', ' + row['unit']:23}"
        for name in names:
            cell = format_median(sources.get(name))
            value = sources.get(name, {"median": None})["median"]
            if name != "jboost" and own and value:
                cell += f" ({value / own:.2f})"
            line += f"{cell:>21}"
        best = find_best(sources)
        print(line + (f"{own / best[1]:8.3f}" if own and best else f"{'-':>8}"))
    print_variants(rows)


def print_variants(rows: list[dict]) -> None:
    """Prints the variants of jboost that only one measure has."""
    for row in rows:
        for name, summary in row["sources"].items():
            if name.startswith("jboost-"):
                cell = format_median(summary)
                print(
                    f"{row['case']:15}{row['measure']:23}{name}: {cell} {row['unit']}"
                )


def print_compile(rows: list[dict]) -> None:
    """Prints seconds, and multiples of `import jax`."""
    for row in rows:
        imported = row["sources"]["import jax"]["median"]
        print("\ncompiling the training program, seconds (first fit minus second)")
        for name, entry in row["sources"].items():
            ratio = "-"
            if imported and entry["median"] is not None:
                ratio = f"{entry['median'] / imported:.2f} x import jax"
            print(f"  {name:16}{format_median(entry):>10}   {ratio}")


def print_tables(tables: list[dict]) -> None:
    """Prints mean held-out losses and their ratios, split by split."""
    if not tables:
        return
    names = list(tables[0]["losses"])
    print("\nheld-out loss on real tables, means over splits; jboost / others")
    print(f"{'table':22}{'loss':16}" + "".join(f"{n:>12}" for n in names), end="")
    print(f"{'/ xla':>9}{'/ best':>9}")
    for entry in tables:
        losses = entry["losses"]
        means = {n: statistics.fmean(v) if v else None for n, v in losses.items()}
        line = f"{entry['table']:22}{entry['kind']:16}"
        line += "".join(f"{v:12.5g}" if v else f"{'-':>12}" for v in means.values())
        known = {n: v for n, v in means.items() if n in PEERS and v}
        best = min(known, key=lambda n: known[n]) if known else ""
        for other in ("jboost-xla", best):
            ratio = mean_ratio(entry, other)
            line += f"{ratio:9.4f}" if ratio else f"{'-':>9}"
        print(line)


def print_asked(result: dict) -> list[dict]:
    """Prints the targets and the measured ratios side by side."""
    print("\ntargets and measured ratios (lower is better)")
    if result["arguments"]["quick"]:
        print("a quick run: the sizes are not those of the targets")
    print(f"{'case':49}{'measure':43}{'reach':>7}{'aim':>7}{'measured':>10}")
    verdicts = []
    for asked in ASKED:
        begin = f"{asked.case:49}{asked.measure:43}{asked.reach:>7}{asked.aim:>7}"
        for ratio in asked.ratios:
            value, name = compute_ratio(result, ratio)
            verdict = judge(asked, value, name)
            shown = "-" if value is None else f"{value:.4g}"
            where = f"{ratio.case}, {ratio.measure}: / {name}"
            if ratio.case == "tables":
                where = name
            print(f"{begin}{shown:>10}  {verdict:13}{where}")
            begin = " " * len(begin)
            entry: dict[str, Any] = asked._asdict() | ratio._asdict()
            entry = {**entry, "case": asked.case, "measure": asked.measure}
            del entry["ratios"]
            verdicts.append(
                {**entry, "of": where, "measured": value, "verdict": verdict}
            )
    return verdicts


def print_disturbance(result: dict) -> None:
    """Prints how many readings were discarded, and what was not measured."""
    print(f"\n{result['seconds']} seconds in total")
    if not result["load was read"]:
        print("the load of other processes could not be read: times may be disturbed")
    entries = {
        f"{row['case']}, {row['measure']}: {name}": entry
        for row in result["rows"]
        for name, entry in row["sources"].items()
    }
    kept = sum(len(entry["values"]) for entry in entries.values())
    lost = sum(entry["discarded"] for entry in entries.values())
    print(f"{kept} readings kept, {lost} discarded because of other processes")
    for name, entry in entries.items():
        if entry["median"] is None:
            print(f"not measured: {name} ({entry['note']})")
        elif len(entry["values"]) < 2 and entry["discarded"]:
            print(f"one reading only: {name}")
