# SPDX-License-Identifier: Apache-2.0
"""How fast is jboost beside XGBoost, LightGBM and scikit-learn, with equal parameters?

    python experiments/benchmark.py --json FILE
    python experiments/benchmark.py --quick
    python experiments/benchmark.py --cases wide small

Measured, libraries in turn, medians over repeats:

- train: milliseconds a tree, as the slope between two numbers of rounds. Peers get
  data sets built beforehand; what a fit does once (bins, copies) cancels in the slope.
- fit: the whole of one warm fit with 100 rounds, from arrays (case "small" only).
- predict: raw scores of all training rows, from arrays.
- compile: what the first fit of a process takes more than the second, beside
  `import jax`; each in fresh processes.

Data is generated: sums of sines and products of normal features, plus noise. Everyone
gets --threads threads (where the system allows it, the process is confined to as many
cores, because JAX takes what there is).

Speed means something on a quiet machine only. Beside each reading, the processor time
that other processes used is read from /proc/stat (Linux); readings during which they
used more than --most-load of the cores are discarded and tried again, and what could
not be measured is said. A ratio above 1 in brackets means that jboost is faster.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before anything loads OpenMP

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

LIBRARIES = ("jboost", "xgboost", "lightgbm", "sklearn")
LOSSES = ("squared_error", "logistic", "absolute_error")
WHOLE_ROUNDS = 100  # of the measure "fit"
COMPILE = """
import time, numpy as np, jax, jboost as jb
x = np.random.default_rng(0).normal(size=(1000, 10)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.float32)
for _ in range(2):
    begin = time.perf_counter()
    jax.block_until_ready(jb.fit(x, y, jb.losses.{loss}, num_rounds=16)[0])
    print(time.perf_counter() - begin)
"""


class Case(NamedTuple):
    """A size of data, a loss, and the two numbers of rounds of the slope."""

    num_rows: int
    num_features: int
    loss: str
    low: int
    high: int


CASES = {
    "large": Case(1_000_000, 28, "squared_error", 10, 40),
    "large-logistic": Case(1_000_000, 28, "logistic", 10, 40),
    "large-absolute": Case(1_000_000, 28, "absolute_error", 10, 40),
    "wide": Case(100_000, 100, "squared_error", 10, 50),
    "medium": Case(20_000, 8, "squared_error", 50, 250),
    "small": Case(1_000, 10, "squared_error", 100, 500),
}


# ---- timing, with an eye on other processes -----------------------------------------


class Reading(NamedTuple):
    """A measured value and the share of all cores that others used; None: unknown."""

    value: float
    load: float | None


def read_busy() -> tuple[float, int] | None:
    """Returns the seconds all cores were busy since boot, and how many there are."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    # user nice system idle iowait irq softirq steal; guests are part of user.
    fields = [int(field) for field in lines[0].split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return busy / os.sysconf("SC_CLK_TCK"), cores


def read_own() -> float:
    """Returns the processor seconds of this process and its finished children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def take(function: Callable[[], Any]) -> Reading:
    """Times one call; the load is that of a moment before, and of the call."""
    before, own, start = read_busy(), read_own(), time.perf_counter()
    time.sleep(0.1)
    begin = time.perf_counter()
    function()
    end = time.perf_counter()
    after, own = read_busy(), read_own() - own
    if before is None or after is None or after[0] == 0:
        return Reading(end - begin, None)
    others = max(0.0, after[0] - before[0] - own)
    return Reading(end - begin, others / ((end - start) * after[1]))


def worst(*readings: Reading) -> float | None:
    """Returns the highest load of several readings."""
    loads = [reading.load for reading in readings if reading.load is not None]
    return max(loads, default=None)


def collect(
    sources: dict[str, Callable[[], Reading]], options: argparse.Namespace, bar: tqdm
) -> dict[str, dict]:
    """Returns a summary per source, read in turn until each has enough good values.

    A source is read at most three times as often as it would be on a quiet machine.
    """
    good: dict[str, list[float]] = {name: [] for name in sources}
    disturbed = dict.fromkeys(sources, 0)
    for attempt in range(3 * options.repeats):
        for name, source in sources.items():
            if len(good[name]) == options.repeats:
                continue
            reading = source()
            if reading.load is not None and reading.load > options.most_load:
                disturbed[name] += 1
            else:
                good[name].append(reading.value)
            if attempt < options.repeats:
                bar.update()
            bar.set_postfix(discarded=sum(disturbed.values()), refresh=False)
    return {
        name: {
            "median": statistics.median(values) if values else None,
            "values": values,
            "discarded": disturbed[name],
        }
        for name, values in good.items()
    }


# ---- the four libraries -------------------------------------------------------------


class Contender(NamedTuple):
    """A library bound to a table."""

    parameters: dict[str, Any]
    train: Callable[[int], Any]  # rounds -> model, on data sets built beforehand
    fit: Callable[[int], Any]  # the same from arrays
    predict: Callable[[Any], Any]  # model -> raw scores of the training rows


def make_data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets, float32."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(case.num_rows, case.num_features)).astype(np.float32)
    y = sum(np.sin((1 + j) * x[:, j]) for j in range(4)) + x[:, 4] * x[:, 5]
    y += x[:, 6] * x[:, 7] + generator.normal(size=case.num_rows)
    return x, np.float32(y > 0) if case.loss == "logistic" else np.float32(y)


def least_rows(loss: str) -> int:
    """Returns the rows a leaf needs: medians want more than one."""
    return 20 if loss == "absolute_error" else 1


def prepare_jboost(case: Case, x, y, threads: int) -> Contender:
    """JAX uses the cores that the process may run on."""
    import jax

    import jboost as jb

    parameters = {"learning_rate": 0.1, "max_depth": 6, "max_bins": 256, "l2": 1.0}
    parameters |= {"min_child_weight": 1.0, "min_child_samples": least_rows(case.loss)}
    loss = getattr(jb.losses, case.loss)

    def fit(num_rounds):
        model, _ = jb.fit(x, y, loss, num_rounds=num_rounds, **parameters)
        return jax.block_until_ready(model)

    def predict(model):
        return jax.block_until_ready(jb.predict(model, x))

    return Contender(parameters, fit, fit, predict)


def prepare_xgboost(case: Case, x, y, threads: int) -> Contender:
    """XGBoost counts no rows, but absolute error's Hessian is 1 a row."""
    import xgboost

    objectives = ("reg:squarederror", "binary:logistic", "reg:absoluteerror")
    parameters = {
        "objective": objectives[LOSSES.index(case.loss)],
        "tree_method": "hist",
        "learning_rate": 0.1,
        "max_depth": 6,
        "max_bin": 256,
        "reg_lambda": 1.0,
        "min_child_weight": float(least_rows(case.loss)),
        "nthread": threads,
    }

    def build():
        return xgboost.QuantileDMatrix(x, y, max_bin=256, nthread=threads)

    data = build()
    return Contender(
        parameters,
        lambda num_rounds: xgboost.train(parameters, data, num_rounds),
        lambda num_rounds: xgboost.train(parameters, build(), num_rounds),
        lambda model: model.inplace_predict(x, predict_type="margin"),
    )


def prepare_lightgbm(case: Case, x, y, threads: int) -> Contender:
    """LightGBM counts the bin of missing values separately: 255 others."""
    import lightgbm

    objectives = ("regression", "binary", "regression_l1")
    parameters = {
        "objective": objectives[LOSSES.index(case.loss)],
        "learning_rate": 0.1,
        "max_depth": 6,
        "num_leaves": 64,
        "max_bin": 255,
        "lambda_l2": 1.0,
        "min_sum_hessian_in_leaf": 1.0,
        "min_data_in_leaf": least_rows(case.loss),
        "feature_pre_filter": False,
        "num_threads": threads,
        "verbosity": -1,
    }

    def build():
        return lightgbm.Dataset(x, y, params=parameters).construct()

    data = build()
    return Contender(
        parameters,
        lambda num_rounds: lightgbm.train(parameters, data, num_rounds),
        lambda num_rounds: lightgbm.train(parameters, build(), num_rounds),
        lambda model: model.predict(x, raw_score=True, num_threads=threads),
    )


def prepare_sklearn(case: Case, x, y, threads: int) -> Contender:
    """scikit-learn has no limit on the Hessian of a leaf."""
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
    )
    from threadpoolctl import threadpool_limits

    classes = case.loss == "logistic"
    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    parameters = {
        "loss": "log_loss" if classes else case.loss,
        "learning_rate": 0.1,
        "max_depth": 6,
        "max_leaf_nodes": 64,
        "max_bins": 255,
        "l2_regularization": 1.0,
        "min_samples_leaf": least_rows(case.loss),
        "early_stopping": False,
    }

    def fit(num_rounds):
        with threadpool_limits(threads):
            return kind(max_iter=num_rounds, **parameters).fit(x, y)

    def predict(model):
        with threadpool_limits(threads):
            return model.decision_function(x) if classes else model.predict(x)

    return Contender(parameters, fit, fit, predict)


# ---- the measures -------------------------------------------------------------------


def read_slope(contender: Contender, case: Case) -> Reading:
    """Returns milliseconds a tree."""
    low = take(lambda: contender.train(case.low))
    high = take(lambda: contender.train(case.high))
    slope = 1e3 * (high.value - low.value) / (case.high - case.low)
    return Reading(slope, worst(low, high))


def read_call(function: Callable[[], Any]) -> Reading:
    """Returns milliseconds of one call."""
    reading = take(function)
    return Reading(1e3 * reading.value, reading.load)


def measure_case(
    name: str, case: Case, options: argparse.Namespace, bar: tqdm
) -> list[dict]:
    """Returns a row per measure of one case; prints the parameters."""
    x, y = make_data(case)
    contenders, models = {}, {}
    tqdm.write(f"\n{name}: {case}")
    for library in options.libraries:
        bar.set_description(f"{name}: warming up {library}")
        prepare = globals()[f"prepare_{library}"]
        contender = contenders[library] = prepare(case, x, y, options.threads)
        tqdm.write(f"  {library}: {contender.parameters}")
        contender.train(case.low)
        models[library] = contender.train(case.high)
        contender.predict(models[library])
    measures: dict[str, dict[str, Callable[[], Reading]]] = {
        "train, ms a tree": {
            library: lambda c=c: read_slope(c, case)
            for library, c in contenders.items()
        },
        f"predict {case.high} trees, ms": {
            library: lambda c=c, m=models[library]: read_call(lambda: c.predict(m))
            for library, c in contenders.items()
        },
    }
    if name == "small":
        measures[f"fit {WHOLE_ROUNDS} rounds, ms"] = {
            library: lambda c=c: read_call(lambda: c.fit(WHOLE_ROUNDS))
            for library, c in contenders.items()
        }
    rows = []
    for measure, sources in measures.items():
        bar.set_description(f"{name}: {measure}")
        summary = collect(sources, options, bar)
        rows.append({"case": name, "measure": measure, "libraries": summary})
    return rows


def run_python(code: str) -> list[float]:
    """Runs code in a fresh process and returns the numbers it printed."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [float(word) for word in done.stdout.split()]


def read_compile(loss: str) -> Reading:
    """Returns the seconds by which a process's first fit exceeds its second."""
    printed: list[float] = []
    code = COMPILE.format(loss=loss)
    reading = take(lambda: printed.extend(run_python(code)))
    return Reading(printed[0] - printed[1], reading.load)


def measure_compile(options: argparse.Namespace, bar: tqdm) -> dict:
    """Returns seconds of `import jax` and of compiling the training programs."""
    bar.set_description("compile time")
    sources = {"import jax": lambda: take(lambda: run_python("import jax"))}
    for loss in LOSSES[:1] if options.quick else LOSSES:
        sources[loss] = lambda loss=loss: read_compile(loss)
    return collect(sources, options, bar)


# ---- the report ---------------------------------------------------------------------


def format_time(summary: dict) -> str:
    """Returns a median, or why there is none."""
    if summary["median"] is None:
        return "disturbed"
    return f"{summary['median']:.4g}"


def print_cases(rows: list[dict], libraries: list[str]) -> None:
    """Prints medians and, in brackets, peers' medians over jboost's."""
    print(f"\n{'case':16}{'measure':24}" + "".join(f"{n:>18}" for n in libraries))
    for row in rows:
        own = row["libraries"].get("jboost", {"median": None})["median"]
        line = f"{row['case']:16}{row['measure']:24}"
        for name in libraries:
            summary = row["libraries"][name]
            cell, median = format_time(summary), summary["median"]
            if name != "jboost" and own and median is not None:
                cell += f" ({median / own:.2f})"
            line += f"{cell:>18}"
        print(line)


def print_compile(summary: dict) -> None:
    """Prints seconds, and multiples of `import jax`."""
    imported = summary["import jax"]["median"]
    print("\ncompiling the training program, seconds (first fit minus second)")
    for name, entry in summary.items():
        ratio = "-"
        if imported and entry["median"] is not None:
            ratio = f"{entry['median'] / imported:.2f} x import jax"
        print(f"  {name:16}{format_time(entry):>10}   {ratio}")


def print_disturbance(rows: list[dict], summary: dict) -> None:
    """Says how many readings were discarded, and what could not be measured."""
    entries = [e for row in rows for e in row["libraries"].values()]
    entries += list(summary.values())
    if read_busy() is None:
        print("\nthe load of other processes could not be read: times may be disturbed")
        return
    kept = sum(len(entry["values"]) for entry in entries)
    lost = sum(entry["discarded"] for entry in entries)
    missing = sum(entry["median"] is None for entry in entries)
    print(f"\n{kept} readings kept, {lost} discarded because of other processes")
    if missing:
        print(f"{missing} medians could not be measured: the machine was never quiet")


def describe_machine(options: argparse.Namespace) -> dict:
    """Returns versions and device, for the record."""
    import jax

    names = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu"}
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "numpy", *options.libraries):
        try:
            versions[name] = importlib.metadata.version(names.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "source"
    device = jax.devices()[0]
    return {
        "versions": versions,
        "device": f"{device.platform}: {device.device_kind}",
        "processor": read_processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
    }


def read_processor() -> str:
    """Returns the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def parse_options() -> argparse.Namespace:
    """Returns the command line's options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add("--repeats", type=int, default=5, help="good readings per median")
    add("--threads", type=int, default=2)
    add("--most-load", type=float, default=0.1, help="of others, as a share of cores")
    add("--quick", action="store_true", help="a tenth of the rows, fewer of the rest")
    add("--no-compile", action="store_true", help="leave compile time out")
    add("--json", type=Path, help="file to write")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if options.quick:
        options.repeats = min(2, options.repeats)
    return options


def shrink(case: Case) -> Case:
    """Returns a case for a quick run: enough to see that all works."""
    rows = max(1000, case.num_rows // 20)
    return case._replace(num_rows=rows, low=max(2, case.low // 5), high=case.high // 5)


def confine(threads: int) -> None:
    """Lets this process run on as many cores as the peers have threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def main() -> None:
    """Measures, prints the tables, and writes the JSON."""
    options = parse_options()
    confine(options.threads)  # before JAX counts cores
    cases = {name: CASES[name] for name in dict.fromkeys(options.cases)}
    if options.quick:
        cases = {name: shrink(case) for name, case in cases.items()}
    measures = 2 * len(cases) + ("small" in cases)
    readings = options.repeats * len(options.libraries) * measures
    if not options.no_compile:
        readings += options.repeats * (2 if options.quick else 1 + len(LOSSES))
    rows, summary = [], {}
    with tqdm(total=readings, unit="reading", smoothing=0) as bar:
        if not options.no_compile:
            summary = measure_compile(options, bar)
        for name, case in cases.items():
            rows += measure_case(name, case, options, bar)
    machine = describe_machine(options)
    print("\n" + json.dumps(machine))
    print_cases(rows, options.libraries)
    if summary:
        print_compile(summary)
    print_disturbance(rows, summary)
    if options.json:
        arguments = {k: v for k, v in vars(options).items() if k != "json"}
        result = {**machine, "arguments": arguments, "cases": rows, "compile": summary}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
