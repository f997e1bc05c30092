# SPDX-License-Identifier: Apache-2.0
"""How fast is jboost compared with XGBoost, LightGBM and scikit-learn?

    python experiments/benchmark.py --tables DIR --out DIR
    python experiments/benchmark.py --quick
    python experiments/benchmark.py --cases wide small --measures train fit
    python experiments/benchmark.py --report FILE

All libraries get equal parameters and take turns; results are medians over repeats.
LightGBM's quantized training is a separate contender, "lightgbm-q"; libraries that are
not installed are left out. Measures:

- train: milliseconds per tree, as the slope between two numbers of rounds. Peers get
  data sets built beforehand; what a fit does once (bins, copies) cancels in the slope.
- binning: from a matrix of floats to the data that training starts from.
- fit: from a matrix of floats to a model, warm.
- cv: from a matrix of floats to the losses of five folds, warm: `jb.cross_validate`,
  `xgboost.cv`, `lightgbm.cv`, scikit-learn's `cross_validate`; "jboost-loop" fits fold
  by fold. sweep: the same at eight learning rates: `jb.sweep`, and the others in a
  loop.
- predict: raw scores of all training rows, from a matrix of floats, with 50 and 500
  rounds; "jboost-avx2" is a process with JBOOST_ISA=avx2.
- shap: SHAP values of all training rows, from a matrix of floats (TreeSHAP,
  path-dependent; the peers' pred_contribs and pred_contrib).
- cold: seconds of a whole process that imports, fits and predicts ("cold cv":
  cross-validates instead); "jboost-cached" finds its programs in JAX's persistent
  compilation cache.
- compile: how many seconds longer the first fit of a process takes than the second,
  compared with `import jax`.
- memory: peak resident memory in MiB of a process that fits, and of one that predicts
  as well.
- loss: held-out loss on generated data, after the larger number of rounds of the slope.
- tables: held-out loss on the larger tables of --tables (a folder per table, as for
  compare_libraries.py), five splits; "jboost-xla" is jboost in plain XLA.

Every library runs in a process of its own, which takes a reading when it is told to, so
that libraries cannot disturb or crash each other; cold, compile and memory take a new
process for each reading. The parameters are printed; benchmark_worker.py says what
equal means. Data for speed are generated: sums of sines and products of normal
features, plus noise. All libraries get --threads threads (where the system allows it,
processes are confined to as many cores, because JAX uses all available ones).

Speed can be measured on a quiet machine only. With each reading, the processor time
that other processes used is read from /proc/stat (Linux). Readings wait until the
machine is quiet (at most --patience seconds in total). Those during which other
processes used more than --most-load of the cores are discarded and repeated, a limited
number of times; what could not be measured is listed. Written to --out: benchmark.json,
which --report prints again.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmark_report import print_report
from benchmark_timing import Reading, read_busy, take, wait_for_quiet
from benchmark_worker import LIBRARIES, VARIANTS, Case
from experiment_tools import make_parser, read_processor, write_json
from tqdm import tqdm

WORKER = Path(__file__).with_name("benchmark_worker.py")
DISTRIBUTIONS = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu"}
TIMEOUT = 300.0  # seconds after which a process hangs
SLOW = 4.0  # seconds: what takes longer is read three times at most
LARGER = 10_000  # rows of a real table that is used
SPLITS = 5
TABLE_TASKS = ("squared_error", "logistic", "softmax", "poisson", "absolute_error")
TABLE_ROUNDS = 100
CASES = {
    "large": Case(1_000_000, 28, rounds=50),
    "large-logistic": Case(1_000_000, 28, "logistic"),
    "large-absolute": Case(1_000_000, 28, "absolute_error"),
    "large-quantile": Case(1_000_000, 28, "quantile"),
    "large-own": Case(1_000_000, 28, "own"),
    "large-deep": Case(1_000_000, 28, max_depth=10, low=3, high=12),
    "folds": Case(100_000, 28, rounds=50),
    "wide": Case(100_000, 100, low=10, high=40),
    "classes": Case(100_000, 28, "softmax", low=2, high=10),
    "medium": Case(20_000, 8, low=50, high=200, rounds=100),
    "small": Case(1_000, 10, low=100, high=500, rounds=100),
    "explained": Case(20_000, 28, rounds=100),
}
MEASURED = {  # beside "train" and "loss"
    "large": ("binning", "fit", "predict 50", "predict 500", "memory fit", "memory"),
    "wide": ("binning",),
    "folds": ("cv", "cold cv"),
    "medium": ("fit", "cv", "sweep", "cold cv"),
    "small": ("fit", "cv", "sweep", "cold", "cold cv", "compile"),
    "explained": ("shap",),
}
UNTRAINED = ("explained", "folds")  # cases without "train" and "loss"
BESIDE = {"large-absolute": "large", "large-own": "large"}  # jboost's, read in turn
COMPILED = ("squared_error", "logistic", "absolute_error", "softmax")
MEASURES = (
    "binning", "train", "fit", "cv", "sweep", "predict", "shap", "cold", "compile",
    "memory", "loss",
)  # fmt: skip
UNITS = {"train": "ms a tree", "binning": "ms", "fit": "ms", "predict": "ms"}
UNITS |= {"cv": "ms", "sweep": "ms", "shap": "ms"}
UNITS |= {"cold": "s", "compile": "s", "memory": "MiB", "loss": "mean loss"}


# ---- processes ----------------------------------------------------------------------


class FailedError(Exception):
    """A reading could not be taken."""


def make_environment(library: str = "", cache: str = "") -> dict[str, str]:
    """Returns the environment variables of a process that holds a library."""
    made = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"JAX_PLATFORMS": "cpu"}
    if library == "jboost-avx2":
        made["JBOOST_ISA"] = "avx2"
    made["JAX_ENABLE_COMPILATION_CACHE"] = "true" if cache else "false"
    if cache:
        made["JAX_COMPILATION_CACHE_DIR"] = cache
        made["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        made["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return made


class Worker:
    """A process that holds one library and answers requests about it."""

    def __init__(self, library: str, threads: int):
        """The process starts with the first request."""
        self.library, self.threads = library, threads
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as self)

    def ask(self, task: str, **arguments: Any) -> Any:
        """Returns the answer.

        Raises:
          FailedError: there is none, for the reason that it says.
        """
        if self.process is None:
            command = [sys.executable, WORKER, "serve", self.library, str(self.threads)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, text=True, env=make_environment(self.library),
            )  # fmt: skip
        requests, answers = self.process.stdin, self.process.stdout
        assert requests and answers
        with contextlib.suppress(BrokenPipeError):  # it ended: the answer is empty
            requests.write(json.dumps({"do": task, **arguments}) + "\n")
            requests.flush()
        late = not select.select([answers], [], [], TIMEOUT)[0]
        line = "" if late else answers.readline()
        if not line:
            self.close(kill=True)
            raise FailedError("no answer in time" if late else self._last_error())
        answer = json.loads(line)
        if "value" not in answer:
            reason, said = answer.popitem()
            raise FailedError(f"{reason}: {said}")
        return answer["value"]

    def forget(self) -> None:
        """Tells the process, if there is one, to drop models and data."""
        if self.process is not None:
            with contextlib.suppress(FailedError):
                self.ask("forget")

    def _last_error(self) -> str:
        """Returns the last line that the process wrote."""
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        return "the process ended: " + (lines[-1] if lines else "it said nothing")

    def close(self, kill: bool = False) -> None:
        """Ends the process; the next request starts another."""
        if self.process is not None:
            if kill:
                self.process.kill()
            self.process.communicate()
            self.process = None


def run_fresh(arguments: list[Any], environment: dict[str, str]) -> list[float]:
    """Runs Python in a new process; returns the numbers that it printed."""
    try:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=environment, check=True,
            capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["it said nothing"]
        raise FailedError(said[-1]) from error
    except subprocess.TimeoutExpired as error:
        raise FailedError("not ready in time") from error
    return [float(word) for word in done.stdout.split()]


def read_fresh(
    measure: str, library: str, case: Case, threads: int, cache: str = ""
) -> Reading:
    """Takes a reading of a new process that does one thing and ends."""
    printed: list[float] = []
    task = measure.split()[0]
    word = "cold-cv" if measure == "cold cv" else task
    command = [WORKER, word, library, threads, json.dumps(case)]
    environment = make_environment(library, cache)
    reading = take(lambda: printed.extend(run_fresh(command, environment)))
    if task == "compile":
        return Reading(printed[0] - printed[1], reading.load)
    if task == "memory":  # needs no quiet machine
        return Reading(printed[measure == "memory"], None)
    return reading


# ---- the plan -----------------------------------------------------------------------


class Step(NamedTuple):
    """Readings that are taken in turn."""

    name: str  # of the case
    measure: str
    sources: tuple[str, ...]
    repeats: int


def list_sources(name: str, measure: str, libraries: list[str]) -> tuple[str, ...]:
    """Returns the sources of a step: libraries, and variants of jboost."""
    # Quantized or not.
    same = ("binning", "predict 50", "predict 500", "shap", "cold", "cold cv", "sweep")
    sources = [n for n in libraries if n != "lightgbm-q" or measure not in same]
    if "jboost" not in libraries:
        return () if measure == "compile" else tuple(sources)
    if measure == "compile":
        return ("import jax", *COMPILED)
    extra = {"predict 50": "jboost-avx2", "predict 500": "jboost-avx2"}
    extra |= {"cold": "jboost-cached", "cold cv": "jboost-cached", "cv": "jboost-loop"}
    if measure == "train" and name in BESIDE:
        extra["train"] = f"jboost {CASES[BESIDE[name]].loss}"
    if measure in extra:
        sources.insert(sources.index("jboost") + 1, extra[measure])
    return tuple(sources)


def make_plan(options: argparse.Namespace) -> list[Step]:
    """Returns the steps; new processes come first, before libraries are loaded."""
    steps = []
    for name in dict.fromkeys(options.cases):
        measures = MEASURED.get(name, ())
        if name not in UNTRAINED:
            measures = ("train", *measures, "loss")
        for measure in measures:
            if measure.split()[0] not in options.measures:
                continue
            sources = list_sources(name, measure, options.libraries)
            repeats = {"loss": 1, "memory": 2, "memory fit": 2, "compile": 3}
            most = min(options.repeats, repeats.get(measure, options.repeats))
            if sources:
                steps.append(Step(name, measure, sources, most))
    return sorted(steps, key=lambda step: not is_fresh(step))


def is_fresh(step: Step) -> bool:
    """Returns whether a step needs a new process for each reading."""
    return step.measure.split()[0] in ("cold", "compile", "memory")


# ---- taking readings ----------------------------------------------------------------


class Bench:
    """The state of a run: options, cases, a process per library, patience, progress."""

    def __init__(self, options: argparse.Namespace, bar: tqdm):
        """No process is started yet."""
        self.options, self.bar = options, bar
        self.cases = {
            name: shrink(case) if options.quick else case
            for name, case in CASES.items()
        }
        self.patience = options.patience
        self.cache = tempfile.TemporaryDirectory()
        self.workers = {
            name: Worker(name, options.threads)
            for name in (*options.libraries, *VARIANTS)
        }

    def close(self) -> None:
        """Ends all processes."""
        for worker in self.workers.values():
            worker.close()
        self.cache.cleanup()

    def run(self, step: Step) -> dict:
        """Returns the medians of one step, and what was odd."""
        began = time.perf_counter()
        sources: dict[str, Callable[[], Reading]] = {}
        notes: dict[str, str] = {}
        for source in step.sources:
            self.bar.set_description(f"{step.name}: warming up {source}")
            try:
                sources[source] = self._prepare(step, source)
            except FailedError as error:
                notes[source] = str(error)
                tqdm.write(f"  {step.name}, {step.measure}: {source}: {error}")
        self.bar.set_description(f"{step.name}: {step.measure}")
        begun = self.bar.n
        summary = self._collect(sources, notes, step.repeats)
        self.bar.update(begun + len(step.sources) * step.repeats - self.bar.n)
        for worker in self.workers.values():
            worker.forget()
        return {
            "case": step.name,
            "measure": step.measure,
            "unit": UNITS[step.measure.split()[0]],
            "seconds": round(time.perf_counter() - began, 1),
            "sources": {name: summary[name] for name in step.sources},
        }

    def _prepare(self, step: Step, source: str) -> Callable[[], Reading]:
        """Warms up; returns what takes a reading."""
        case, threads = self.cases[step.name], self.options.threads
        if step.measure == "compile":
            if source == "import jax":
                return lambda: take(
                    lambda: run_fresh(["-c", "import jax"], make_environment())
                )
            case = case._replace(loss=source, rounds=16)
            return lambda: read_fresh("compile", "jboost", case, threads)
        if is_fresh(step):
            library, _, cached = source.partition("-cached")
            cached = source.endswith("-cached")
            cache = self.cache.name if cached else ""
            if cached:
                read_fresh(step.measure, library, case, threads, cache)  # fills it
            return lambda: read_fresh(step.measure, library, case, threads, cache)
        worker = self.workers[source.split()[0]]
        if " " in source:
            case = self.cases[BESIDE[step.name]]
        shown = worker.ask("prepare", measure=step.measure, case=case)
        if step.measure == "train":
            tqdm.write(f"  {step.name}, {source}: {json.dumps(shown)}")
        return lambda: Reading(*worker.ask("read", measure=step.measure, case=case))

    def _collect(
        self, sources: dict[str, Callable[[], Reading]], notes: dict, repeats: int
    ) -> dict[str, dict]:
        """Reads in turn until each source has enough good values.

        A source is read at most twice as often as it would be on a quiet machine; a
        slow one, which wants three good values at most, at most five times.
        """
        names = [*sources, *notes]
        good: dict[str, list[float]] = {name: [] for name in names}
        discarded = dict.fromkeys(names, 0)
        enough, most = (
            dict.fromkeys(sources, repeats),
            dict.fromkeys(sources, 2 * repeats),
        )
        for attempt in range(2 * repeats):
            start = attempt % max(1, len(sources))  # nobody is always the first
            order = [*sources][start:] + [*sources][:start]
            for name in order:
                tried = len(good[name]) + discarded[name]
                done = len(good[name]) >= enough[name] or tried >= most[name]
                if name in notes or done:
                    continue
                self._wait()
                begin = time.perf_counter()
                try:
                    reading = sources[name]()
                except FailedError as error:
                    notes[name] = str(error)
                    tqdm.write(f"  {name}: {error}")
                    continue
                if time.perf_counter() - begin > SLOW:
                    enough[name], most[name] = min(3, repeats), min(5, 2 * repeats)
                # Where fewer rounds took longer than more, somebody disturbed, too.
                quiet = (reading.load or 0.0) <= self.options.most_load
                if not quiet or reading.value <= 0:
                    discarded[name] += 1
                else:
                    good[name].append(reading.value)
                    self.bar.update()
        return {
            name: {
                "median": statistics.median(values) if values else None,
                "values": values,
                "discarded": discarded[name],
                "note": notes.get(name, "" if values else "disturbed"),
            }
            for name, values in good.items()
        }

    def _wait(self) -> None:
        """Waits for a quiet moment while there is patience."""
        most = min(10.0, self.patience)
        waited = wait_for_quiet(self.options.most_load, most) if most > 0 else 0.0
        self.patience -= waited if waited > 0.5 else 0.0  # a look costs nothing

    def run_table(self, table: str, kind: str) -> dict:
        """Returns the held-out losses of each split of a real table."""
        libraries = [n for n in self.options.libraries if n != "lightgbm-q"]
        if "jboost" in libraries:
            libraries.append("jboost-xla")
        losses: dict[str, list[float]] = {name: [] for name in libraries}
        for split in range(self.options.splits):
            for name in libraries:
                self.bar.set_description(f"{table} {kind} {name}")
                arguments = dict(folder=str(self.options.tables), table=table)
                arguments |= dict(kind=kind, split=split, rounds=TABLE_ROUNDS)
                try:
                    losses[name].append(self.workers[name].ask("table", **arguments))
                except FailedError as error:
                    tqdm.write(f"  {table} {kind}, {name}: {error}")
                self.bar.update()
        return {"table": table, "kind": kind, "losses": losses}


def list_tables(folder: Path | None) -> list[tuple[str, str]]:
    """Returns the larger tables with a suitable loss."""
    if folder is None:
        return []
    from compare_tables import list_cases

    cases = list_cases(TABLE_TASKS)
    every = [(c.table, c.kind) for c in cases if c.table == c.folder]
    sizes = {}
    for table in {table for table, _ in every}:
        path = folder / table / "meta.json"
        sizes[table] = json.loads(path.read_text())["n_rows"] if path.exists() else 0
    return [(table, kind) for table, kind in every if sizes[table] >= LARGER]


# ---- the command line ---------------------------------------------------------------


def describe_machine(bench: Bench) -> dict:
    """Returns versions and device."""
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "numpy", *bench.options.libraries):
        found = DISTRIBUTIONS.get(name, name.removesuffix("-q"))
        try:
            versions[name] = importlib.metadata.version(found)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "source"
    described = {}
    if "jboost" in bench.options.libraries:
        try:
            described = bench.workers["jboost"].ask("describe")
        except FailedError as error:
            raise SystemExit(f"jboost cannot be measured: {error}") from error
    return {
        "versions": versions,
        **described,
        "isa": os.environ.get("JBOOST_ISA", "the best"),
        "processor": read_processor(),
        "cores": os.cpu_count(),
        "threads": bench.options.threads,
    }


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line, checked."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    add("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add("--repeats", type=int, default=5, help="good readings per median")
    add("--threads", type=int, default=2)
    add("--tables", type=Path, metavar="DIR", help="real tables, for accuracy")
    add("--splits", type=int, default=SPLITS, help="of each real table")
    add("--most-load", type=float, default=0.1, help="of others, as a share of cores")
    add("--patience", type=float, default=300.0, help="seconds to wait for quiet")
    add("--quick", action="store_true", help="a twentieth of the rows, two readings")
    add("--report", type=Path, metavar="FILE", help="print a benchmark.json, and end")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1 or options.splits < 1:
        parser.error("--repeats, --threads and --splits must be at least 1")
    if options.tables and not list_tables(options.tables):
        parser.error(f"--tables must hold folders of tables, {options.tables} has none")
    if not options.report and not (make_plan(options) or options.tables):
        parser.error("--cases and --measures must leave something to measure")
    if options.quick:
        options.repeats = min(2, options.repeats)
        options.splits = 1
        options.patience = min(20.0, options.patience)
    return options


def leave_out_missing(options: argparse.Namespace) -> None:
    """Removes libraries that are not installed from the list, and prints them."""
    found = []
    for name in dict.fromkeys(options.libraries):
        if importlib.util.find_spec(name.removesuffix("-q")):
            found.append(name)
        else:
            print(f"{name} is not installed: left out")
    options.libraries = found


def shrink(case: Case) -> Case:
    """Returns a case for a quick run, which only shows that everything works."""
    return case._replace(
        num_rows=max(1000, case.num_rows // 20),
        low=max(2, case.low // 5),
        high=max(4, case.high // 5),
    )


def confine(threads: int) -> None:
    """Limits this process and its children to as many cores as there are threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def measure(options: argparse.Namespace) -> dict:
    """Returns all measurements, as they are written to the JSON."""
    steps, tables = make_plan(options), list_tables(options.tables)
    tables = tables[:2] if options.quick else tables
    total = sum(len(step.sources) * step.repeats for step in steps)
    total += len(tables) * options.splits * (len(options.libraries) + 1)
    result: dict[str, Any] = {"machine": {}, "rows": [], "tables": []}
    begin = time.perf_counter()
    with tqdm(total=total, unit="reading", smoothing=0) as bar:
        bench = Bench(options, bar)
        try:
            result["machine"] = describe_machine(bench)
            tqdm.write(json.dumps(result["machine"]))
            result["rows"].extend(map(bench.run, steps))
            result["tables"].extend(bench.run_table(*table) for table in tables)
        except KeyboardInterrupt:
            tqdm.write("interrupted: the report holds what was measured until now")
        finally:
            bench.close()
    kept = {k: v for k, v in vars(options).items() if k not in ("out", "report")}
    result["arguments"] = kept | {"tables": bool(options.tables)}
    result["load was read"] = read_busy() is not None
    result["seconds"] = round(time.perf_counter() - begin)
    return result


def main() -> None:
    """Measures, prints the tables, and writes the JSON."""
    options = parse_options()
    if options.report:
        print_report(json.loads(options.report.read_text()))
        return
    leave_out_missing(options)
    confine(options.threads)  # before JAX counts cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = measure(options)
    verdicts = print_report(result)
    write_json(options.out / "benchmark.json", {**result, "asked": verdicts})


if __name__ == "__main__":
    main()
