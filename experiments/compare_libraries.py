# SPDX-License-Identifier: Apache-2.0
"""Are jboost's defaults as good as its peers' on held-out rows, for every kind of loss?

The peers are XGBoost, LightGBM, scikit-learn's HistGradientBoosting and, where it is
installed, CatBoost, Perpetual and YDF (these two with `--bare` only, squared error and
logistic loss). All libraries get the same rounds, learning rate and depth, and use
their own defaults for the rest (LightGBM and scikit-learn 31 leaves of at least 20
rows, XGBoost a weight of 1). With `--bare` they get nothing but the rows: jboost
`fit(x, y, loss)` on training and validation rows, the others at most 2,000 rounds, of
which those until the best one on the validation rows count.

    python experiments/compare_libraries.py --tables DIR
    python experiments/compare_libraries.py --tables DIR --bare
    python experiments/compare_libraries.py --tables DIR --half choose --set l2=0.1
    python experiments/compare_libraries.py --tables DIR --half report \\
        --rates 0.05 0.1 0.3 --rounds 100 300 1000 --depths 4 6 8

DIR has a folder per table with `data.parquet` and `meta.json` (target, drop_columns,
columns with a role); compare_tables.py lists tables and tasks, and other tables list
their tasks in `meta.json`, as {"tasks": {"quantile": ["quantile 0.9"]}}. Each is split
at random into 64 % training, 16 % validation and 20 % test rows, several times.
Categories are their rank among the sorted ones for all libraries, except in the task
"categories", where all libraries split them natively; "jboost-codes" reads them as
ranks there too.

Test losses are compared at the round that early stopping on the validation rows picks
("early"), at the last round, and at the best round of the test rows ("best"): the mean
over the splits, divided by that of the best peer ("/best") or by the peers' mean
("/mean"), as geometric means over tables. `--half` keeps the tables on which defaults
are chosen apart from those on which they are reported; a table's name decides.

The cache stores every fit as it ends, so that a second run computes only what is
missing: peers by their version, jboost by its files. Written to --out:
compare_libraries.json and .svg.

Losses are means of: r^2 (ratios are of MSE, not RMSE), log-loss, half the deviance
(Poisson, gamma, Tweedie with power 1.5), |r|, pinball loss, Huber loss. For a fair
comparison:

- Huber: every library gets the target divided by delta, the median of |y - median(y)|
  of the training rows, so that delta is 1. XGBoost starts at the median; its own start,
  one Newton step from 0, is far outside the data.
- Offsets: XGBoost and LightGBM omit their own start if an offset is given, so they get
  offset + log(events / exposure). scikit-learn fits rates weighted by exposure, which
  is the same loss.
- Losses below 0.1 % of that of a constant count as 0.1 %.
"""

import argparse
import ast
import importlib.util
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from compare_fits import (
    BARE,
    CODES,
    LIBRARIES,
    STAGES,
    Settings,
    find_version,
    list_parameters,
    measure,
)  # fmt: skip
from compare_report import draw, geometric_mean, judge, report, tabulate
from compare_tables import (
    HALVES,
    TASKS,
    Case,
    find_cases,
    find_half,
    list_cases,
    split_table,
)  # fmt: skip
from experiment_tools import (
    add_minutes,
    choose_tables,
    describe_machine,
    make_figures,
    make_parser,
    take_in_time,
    write_json,
)
from tqdm import tqdm

import jboost as jb

GIVEN = {  # arguments of jb.fit that --set may not change
    "x", "y", "loss", "num_rounds", "learning_rate", "max_depth", "num_scores",
    "sample_weight", "offset", "categorical", "validation", "model", "checkpoint",
}  # fmt: skip


class Job(NamedTuple):
    """One fit."""

    case: Case
    split: int
    library: str
    settings: Settings

    def key(self, rows: int) -> str:
        """Returns what the cache stores the fit by: all but the number of rounds."""
        parameters = list_parameters(self.library, self.case.kind, self.settings)
        version = find_version(self.library)
        native = self.case.task == "categories" and self.library != CODES
        parts = [*self.case[1:], native, self.split, rows, version, parameters]
        name = self.library.removesuffix("-codes")
        return json.dumps([name, *parts], sort_keys=True, default=str)


# ---- the cache ----------------------------------------------------------------------


def load_cache(path: Path) -> dict[str, dict]:
    """Returns every stored fit by its key; a line that a killed run left is skipped."""
    fits = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            key, fit = json.loads(line)
        except ValueError:
            continue
        if fit["rounds"] >= fits.get(key, fit)["rounds"]:
            fits[key] = fit
    return fits


def store(path: Path, key: str, fit: dict) -> None:
    """Appends a fit; the line begins with a new one, in case the last is broken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n{json.dumps([key, fit])}")


# ---- measuring ----------------------------------------------------------------------


def list_jobs(cases: list[Case], options: argparse.Namespace) -> list[Job]:
    """Returns every fit, split by split: a run cut short has seen all tables."""
    own = dict(options.set)
    settings = [
        Settings(
            max(options.rounds),
            rate,
            depth,
            options.bare,
            options.equal,
            options.threads,
            own,
        )
        for rate in options.rates
        for depth in options.depths
    ]
    jobs = []
    for split in range(options.splits):
        for case in cases:
            libraries = list(options.libraries)
            if case.task == "categories" and "jboost" in libraries:
                libraries.append(CODES)
            jobs += [
                Job(case, split, library, setting)
                for setting in settings
                for library in libraries
                if list_parameters(library, case.kind, setting) is not None
            ]
    return jobs


def measure_all(
    jobs: list[Job], options: argparse.Namespace
) -> tuple[list[tuple[Job, dict]], list[str]]:
    """Returns the fits, from the cache or computed, and what failed."""
    cache = load_cache(options.cache)
    found, failed, missing = [], [], {}
    for job in jobs:
        key = job.key(options.rows)
        fit = cache.get(key)
        if fit is not None and fit["rounds"] >= job.settings.rounds:
            found.append((job, fit))
        else:
            missing.setdefault(key, []).append(job)  # tasks share fits
    with tqdm(total=len(missing), unit="fit", smoothing=0.05) as progress:
        for key, equal_jobs in take_in_time(missing.items(), options.minutes):
            job = equal_jobs[0]
            case = job.case
            progress.update()
            progress.set_description(f"{case.table} {case.kind} {job.library}")
            try:
                parts = split_table(case, options.tables, job.split, options.rows)
                fit = measure(job.library, case.kind, parts, job.settings)
            except Exception as error:  # one bad fit must not end a long run
                failed.append(f"{job.library}, {case}, split {job.split}: {error!r}")
                tqdm.write(f"FAILED {failed[-1]}")
                continue
            store(options.cache, key, fit)
            found += [(equal, fit) for equal in equal_jobs]
    return found, failed


def judge_all(fits: list[tuple[Job, dict]], rounds: list[int]) -> pd.DataFrame:
    """Returns a row per fit and number of rounds, in the order of the tasks."""
    rows = [
        {
            **job.case._asdict(), "split": job.split, "library": job.library,
            "rounds": number, "rate": job.settings.rate, "depth": job.settings.depth,
            "seconds": fit["seconds"], **judge(fit, number),
        }
        for job, fit in fits
        for number in rounds
    ]  # fmt: skip
    orders = {"task": [*TASKS], "library": [*LIBRARIES, CODES]}
    order = {name: {v: i for i, v in enumerate(vs)} for name, vs in orders.items()}
    return pd.DataFrame(rows).sort_values(
        ["task", "rounds", "rate", "depth", "kind", "table", "split", "library"],
        key=lambda column: column.map(order.get(column.name, lambda value: value)),
    )


def conclude(overview: pd.DataFrame) -> str:
    """Returns the result in one sentence."""
    if overview.empty:
        return "Found: nothing to compare jboost with."
    means = overview.groupby("task", sort=False)["early/best"].apply(geometric_mean)
    said = ", ".join(f"{mean:.3f} ({task})" for task, mean in means.items())
    worst = overview.loc[overview["worst"].idxmax()]
    return (
        "Found: with early stopping, jboost's held-out loss over that of the best peer "
        f"is {said}; at worst {worst['worst']:.3f} ({worst['task']})."
    )


# ---- the command line ---------------------------------------------------------------


def parse_setting(text: str) -> tuple[str, Any]:
    """Turns "l2=0.5" into ("l2", 0.5); anything but a literal stays a string."""
    name, equals, value = text.partition("=")
    free = {*inspect.signature(jb.fit).parameters} - GIVEN
    if not equals or name not in free:
        raise argparse.ArgumentTypeError(
            f"must be NAME=VALUE, NAME one of {', '.join(sorted(free))}; got {text!r}"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse_rounds(text: str) -> int:
    """Reads a number of rounds after which losses are measured."""
    if not text.isdigit() or int(text) not in STAGES:
        raise argparse.ArgumentTypeError(
            f"must be below 100, or a multiple of 5 up to 2000; got {text}"
        )
    return int(text)


def parse_positive(text: str, kind: type = int) -> Any:
    """Reads a positive number."""
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a positive {kind.__name__}; got {text}"
        )
    return number


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tables", type=Path, required=True, metavar="DIR")
    add("--task", nargs="+", choices=[*TASKS, "all"], default=["all"])
    add("--half", choices=HALVES, default="all", help="tables to choose or report on")
    add("--only", nargs="+", metavar="TABLE", help="only these tables")
    add("--rows", type=parse_positive, default=10_000, help="at most, of each table")
    add("--splits", type=parse_positive, default=5)
    add("--rounds", nargs="+", type=parse_rounds, default=[300])
    rate = partial(parse_positive, kind=float)
    add("--rates", nargs="+", type=rate, default=[0.1], help="learning rates")
    add("--depths", nargs="+", type=parse_positive, default=[6])
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    add("--libraries", nargs="+", choices=LIBRARIES, default=found)
    add_minutes(parser)
    add("--bare", action="store_true", help="no rounds, rate and depth are given")
    add("--threads", type=parse_positive, default=2, help="of the peers")
    add("--equal", action="store_true", help="equal parameters, not defaults")
    add("--set", nargs="+", type=parse_setting, default=[], metavar="NAME=VALUE",
        help="more arguments of jboost.fit, to compare candidates for a default",
    )  # fmt: skip
    add("--cache", type=Path, metavar="FILE",
        help="file that stores all fits (default: compare_libraries.jsonl in --out)",
    )  # fmt: skip
    options = parser.parse_args()
    options.task = [*TASKS] if "all" in options.task else options.task
    if options.bare:
        options.rounds, options.rates, options.depths = [BARE], [0.0], [0]
    try:
        cases = find_cases(options.tables, options.task)
    except ValueError as error:
        parser.error(f"--tables: {error}")
    if not cases:
        known = sorted({case.folder for case in list_cases(options.task)})
        parser.error(f"--tables must hold a folder for one of {', '.join(known)}")
    there = sorted({case.folder for case in cases})
    only = choose_tables(parser, options.only, there)
    if options.half != "all":
        only = [name for name in only if find_half(name) == options.half]
    options.cases = [case for case in cases if case.folder in only]
    if not options.cases:
        parser.error(f"--half {options.half} holds none of {', '.join(there)}")
    options.cache = options.cache or options.out / "compare_libraries.jsonl"
    return options


def main() -> None:
    """Fits what is missing, then reports everything."""
    options = parse_options()
    fits, failed = measure_all(list_jobs(options.cases, options), options)
    if not fits:
        raise SystemExit("every fit failed")
    reports, overview = report(judge_all(fits, options.rounds))
    draw(reports, options.out / "compare_libraries.svg")
    if failed:
        print(f"\nFAILED: {len(failed)} fits")
    print(f"\n{conclude(overview)}")
    versions = {name: find_version(name) for name in options.libraries}
    result = {"arguments": vars(options), **describe_machine(), "compared": versions}
    result |= {"reports": reports, "failed": failed}
    result["figures"] = make_figures(tasks=tabulate(reports))
    result["figures"]["device"] += "".join(f", {k} {v}" for k, v in versions.items())
    write_json(options.out / "compare_libraries.json", result)


if __name__ == "__main__":
    main()
