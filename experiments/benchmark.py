# SPDX-License-Identifier: Apache-2.0
"""How fast is jboost compared with XGBoost, LightGBM and scikit-learn?

    python experiments/benchmark.py --out DIR
    python experiments/benchmark.py --quick --only sparse "cold logistic"
    python experiments/benchmark.py --report DIR/benchmark.json --out DIR

All libraries get equal parameters and take turns; results are ratios of medians over
repeats, jboost's over the fastest peer's. LightGBM's quantized training is a contender
of its own, "lightgbm-q"; "lightgbm-1" and "xgboost-1" use one thread, which is faster
for little data; "xgboost-multi" grows trees with vectors of class scores. Libraries
that are not installed are left out. Measures:

- train: milliseconds per round, as the slope between two numbers of rounds. Peers get
  data sets built beforehand; what a fit does once (bins, copies) cancels in the slope.
- fit: from arrays to a model, warm.
- tree: a single tree of unlimited depth.
- many: models of many small tables, one after another (a quarter of them is measured,
  and counts four times); "jboost-vmap" bins all tables one after another and trains
  all models in one program.
- cv: from arrays to the losses of five folds, warm: `jb.cross_validate`, `xgboost.cv`,
  `lightgbm.cv`.
- predict: raw scores of some rows; "jboost-avx2" is a process with JBOOST_ISA=avx2.
- shap: SHAP values (TreeSHAP, path-dependent; the peers' pred_contribs and
  pred_contrib).
- cold: wall-clock and processor seconds of a whole process that imports, fits and
  predicts ("cold cv": cross-validates instead); "jboost-cached" finds its programs in
  JAX's persistent compilation cache.
- cold losses, cold sweep, cold server, cold new losses: see benchmark_new.py; the last
  has no peer.
- processes: milliseconds per round of two processes of one core each, "jboost-two", and
  of one process with both cores.
- memory: peak resident memory in MiB of a process after a fit, and after a prediction.
- with --loss, held-out loss on the generated data after the larger number of rounds of
  the slope (the script compare_libraries.py compares losses on real tables).

Every source runs in a process of its own, which takes a reading when it is told to, so
that libraries cannot disturb or crash each other; cold and memory take a new process
for each reading. benchmark_peers.py says what equal parameters are, benchmark_cases.py
lists sizes, losses and targets. Data are generated: sums of sines and products of
normal features, plus noise. All libraries get --threads threads (where the system
allows it, processes are confined to as many cores, because JAX uses all available
ones).

Speed can be measured on a quiet machine only. With each reading, the processor time
that other processes used is read from /proc/stat (Linux). Readings during which other
processes used more than --most-load of the cores are discarded, and repeated once the
machine is quiet (after at most --patience seconds of waiting in total), a limited
number of times; what could not be measured is listed.

Written to --out: benchmark.json, and a picture of all ratios, benchmark.png and .svg.
The JSON is written after each step; a run with the same --out continues it and repeats
only steps in which something was not measured. It is refused if machine, versions or
arguments differ, unless --again starts anew. --report prints and draws a JSON.
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
from typing import IO, Any

from benchmark_cases import FIGURES, MILLISECONDS, PEERS, PLAN, PRINTED, Case, Step
from benchmark_new import MODEL
from benchmark_report import draw, find_ratios, print_report, tabulate
from benchmark_timing import (
    CHILDREN,
    Reading,
    read_busy,
    read_own,
    wait_for_quiet,
    watch,
)
from experiment_tools import (
    add_minutes,
    make_figures,
    make_parser,
    read_processor,
    save_json,
    take_in_time,
    write_json,
)
from tqdm import tqdm

WORKER = Path(__file__).with_name("benchmark_worker.py")
DISTRIBUTIONS = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu"}
TIMEOUT = 300.0  # seconds after which a process hangs
SLOW = 1.0  # seconds: what takes longer is read three times at most


# ---- processes ----------------------------------------------------------------------


class FailedError(Exception):
    """A reading could not be taken."""


def make_environment(source: str = "", cache: str = "") -> dict[str, str]:
    """Returns the environment variables of a process that holds a library."""
    made = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"JAX_PLATFORMS": "cpu"}
    if source == "jboost-avx2":
        made["JBOOST_ISA"] = "avx2"
    made.pop("JAX_COMPILATION_CACHE_DIR", None)
    made.pop("PYTHONDONTWRITEBYTECODE", None)  # as after an installation
    if source == "jboost-cached":
        made["JAX_COMPILATION_CACHE_DIR"] = cache
        made["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        made["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return made


class Worker:
    """A process that holds one library and answers requests about it."""

    def __init__(self, source: str, threads: int):
        """The process starts with the first request."""
        self.source, self.threads = source, threads
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def ask(self, task: str, **arguments: Any) -> Any:
        """Returns the answer.

        Raises:
          FailedError: there is none, for the reason that it says.
        """
        if self.process is None:
            self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
            command = [sys.executable, WORKER, "serve", self.source, str(self.threads)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, text=True, env=make_environment(self.source),
            )  # fmt: skip
        requests, answers = self.process.stdin, self.process.stdout
        assert requests and answers
        with contextlib.suppress(BrokenPipeError):  # it ended: the answer is empty
            requests.write(json.dumps({"do": task, **arguments}) + "\n")
            requests.flush()
        late = not select.select([answers], [], [], TIMEOUT)[0]
        line = "" if late else answers.readline()
        if not line:
            said = "no answer in time" if late else self._last_error()
            self.close(kill=True)
            raise FailedError(said)
        answer = json.loads(line)
        if "value" not in answer:
            raise FailedError(answer["failed"])
        return answer["value"]

    def forget(self) -> None:
        """Tells the process, if there is one, to drop models and data."""
        if self.process is not None:
            with contextlib.suppress(FailedError):
                self.ask("forget")

    def _last_error(self) -> str:
        """Returns the last line that the process wrote."""
        assert self.errors
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
        if self.errors is not None:
            self.errors.close()
            self.errors = None


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
    step: Step, source: str, case: Case, threads: int, cache: str
) -> Reading:
    """Takes a reading of a new process that does one thing and ends."""
    word = step.measure.replace(" ", "-")
    command = [WORKER, word, source, threads, json.dumps(case)]
    environment = make_environment(source, cache) | {MODEL: f"{cache}/{source}"}
    if step.measure == "server" and not any(Path(cache).glob(f"{source}.*")):
        run_fresh([WORKER, "save", *command[2:]], environment)
    used, begin = read_own(CHILDREN), time.perf_counter()
    printed, load = watch(lambda: run_fresh(command, environment))
    if step.measure in PRINTED:
        return Reading(tuple(printed), load if step.measure == "new" else None)
    seconds = time.perf_counter() - begin
    return Reading((seconds, read_own(CHILDREN) - used), load)


# ---- taking readings ----------------------------------------------------------------


class Bench:
    """The state of a run: options, a process per source, patience, progress."""

    def __init__(self, options: argparse.Namespace, bar: tqdm):
        """No process is started yet."""
        self.options, self.bar = options, bar
        self.patience = options.patience
        self.cache = tempfile.TemporaryDirectory()
        self.workers: dict[str, Worker] = {}
        self.size: tuple = ()  # rows and columns of the last step

    def close(self) -> None:
        """Ends all processes."""
        for worker in self.workers.values():
            worker.close()
        self.cache.cleanup()

    def find_worker(self, source: str) -> Worker:
        """Returns the process of a source."""
        if source not in self.workers:
            self.workers[source] = Worker(source, self.options.threads)
        return self.workers[source]

    def run(self, step: Step) -> dict:
        """Returns the medians of one step, and what was odd."""
        began, shown = time.perf_counter(), self.bar.n
        case = shrink(step.case) if self.options.quick else step.case
        if case[:2] != self.size:  # another table
            for worker in self.workers.values():
                worker.forget()
            self.size = case[:2]
        readers: dict[str, Callable[[], Reading]] = {}
        notes: dict[str, str] = {}
        losses: dict[str, float | None] = {}
        for source in step.sources:
            self.bar.set_description(f"{step.name}: warming up {source}")
            try:
                readers[source] = self._prepare(step, case, source)
                if self.options.loss and step.measure == "train":
                    losses[source] = self.find_worker(source).ask("loss", case=case)
            except FailedError as error:
                notes[source] = str(error)
                tqdm.write(f"  {step.name}: {source}: {error}")
        self.bar.set_description(step.name)
        sources = self._collect(step, readers, notes)
        self.bar.update(shown + count_readings(step, self.options) - self.bar.n)
        seconds = round(time.perf_counter() - began, 1)
        return {"seconds": seconds, "sources": sources, "losses": losses}

    def _prepare(self, step: Step, case: Case, source: str) -> Callable[[], Reading]:
        """Warms up; returns what takes a reading."""
        if step.fresh:
            threads, cache = self.options.threads, self.cache.name
            if source == "jboost-cached":
                read_fresh(step, source, case, threads, cache)  # fills it
            return lambda: read_fresh(step, source, case, threads, cache)
        worker = self.find_worker(source)
        worker.ask("prepare", measure=step.measure, case=case)
        return lambda: Reading(*worker.ask("read"))

    def _collect(
        self, step: Step, readers: dict[str, Callable[[], Reading]], notes: dict
    ) -> dict[str, dict]:
        """Reads in turn until each source has enough good values.

        A source is read at most twice as often as it would be on a quiet machine; a
        slow one, which wants three good values at most, at most five times.
        """
        figures = [*FIGURES.get(step.measure, MILLISECONDS)]
        good: dict[str, list[tuple]] = {name: [] for name in step.sources}
        discarded = dict.fromkeys(step.sources, 0)
        repeats = min(step.repeats, self.options.repeats)
        enough = dict.fromkeys(readers, repeats)
        most = dict.fromkeys(readers, 2 * repeats)
        for attempt in range(2 * repeats):
            start = attempt % max(1, len(readers))  # nobody is always the first
            for name in [*readers][start:] + [*readers][:start]:
                tried = len(good[name]) + discarded[name]
                done = len(good[name]) >= enough[name] or tried >= most[name]
                if name in notes or done:
                    continue
                begin = time.perf_counter()
                try:
                    reading = readers[name]()
                except FailedError as error:
                    notes[name] = str(error)
                    tqdm.write(f"  {step.name}: {name}: {error}")
                    continue
                if time.perf_counter() - begin > SLOW:
                    enough[name], most[name] = min(3, repeats), min(5, 2 * repeats)
                # Where fewer rounds took longer than more, somebody disturbed, too.
                quiet = (reading.load or 0.0) <= self.options.most_load
                if quiet and min(reading.values) > 0:
                    good[name].append(tuple(reading.values))
                    self.bar.update()
                else:
                    discarded[name] += 1
                    self._wait()
        return {
            name: summarize(figures, values, discarded[name], notes.get(name, ""))
            for name, values in good.items()
        }

    def _wait(self) -> None:
        """Waits for a quiet moment while there is patience."""
        most = min(10.0, self.patience)
        if most > 0:
            self.patience -= wait_for_quiet(self.options.most_load, most)


def summarize(
    figures: list[str], values: list[tuple], discarded: int, note: str
) -> dict[str, Any]:
    """Returns the readings of a source and their medians."""
    readings = [dict(zip(figures, row, strict=True)) for row in values]
    medians = {
        name: statistics.median(reading[name] for reading in readings)
        for name in figures
        if readings
    }
    return {
        "medians": medians,
        "readings": readings,
        "discarded": discarded,
        "note": note or ("" if values else "disturbed"),
    }


# ---- the command line ---------------------------------------------------------------


def make_plan(options: argparse.Namespace) -> list[Step]:
    """Returns the chosen steps, without libraries that are not installed."""
    missing = [
        name
        for name in ("xgboost", "lightgbm", "sklearn")
        if not importlib.util.find_spec(name)
    ]
    for name in missing:
        print(f"{name} is not installed: left out")
    plan = []
    for step in PLAN:
        sources = [s for s in step.sources if s.split("-")[0] not in missing]
        if all(word not in step.name for word in options.only or [""]):
            continue
        if {*sources} & {*PEERS} or all(line.over for line in step.lines):
            plan.append(step._replace(sources=tuple(sources)))
    return plan


def count_readings(step: Step, options: argparse.Namespace) -> int:
    """Returns the readings of a step on a quiet machine."""
    return len(step.sources) * min(step.repeats, options.repeats)


def describe_machine(bench: Bench) -> dict:
    """Returns versions and device."""
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "numpy", "jboost", "xgboost", "lightgbm", "sklearn"):
        try:
            found = DISTRIBUTIONS.get(name, name)
            versions[name] = importlib.metadata.version(found)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "source"
    try:
        described = bench.find_worker("jboost").ask("describe")
    except FailedError as error:
        raise SystemExit(f"jboost cannot be measured: {error}") from error
    return {
        **versions,
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
    add("--only", nargs="+", metavar="WORD", help="steps whose name contains a WORD")
    add("--list", action="store_true", help="print the names of the steps, and end")
    add("--repeats", type=int, default=3, help="most good readings per median")
    add("--threads", type=int, default=2)
    add_minutes(parser)
    add("--loss", action="store_true", help="held-out losses as well")
    add("--most-load", type=float, default=0.1, help="of others, as a share of cores")
    add("--patience", type=float, default=120.0, help="seconds to wait for quiet")
    add("--quick", action="store_true", help="small sizes, two readings, any load")
    add("--again", action="store_true", help="start anew, even if DIR holds a run")
    add("--report", type=Path, metavar="FILE", help="print and draw a JSON, and end")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if not make_plan(options):
        names = ", ".join(step.name for step in PLAN)
        parser.error(f"--only {options.only} matches none of the steps: {names}")
    if options.quick:
        options.repeats = min(2, options.repeats)
        options.most_load, options.patience = 1.0, 0.0
    return options


def shrink(case: Case) -> Case:
    """Returns a case for a quick run, which only shows that everything works."""
    return case._replace(
        num_rows=min(case.num_rows, max(1000, case.num_rows // 40)),
        low=2,
        high=4,
        rounds=min(20, case.rounds),
        predicted=min(case.predicted, 1000),
        num_models=min(10, case.num_models),
    )


def confine(threads: int) -> None:
    """Limits this process and its children to as many cores as there are threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


# ---- runs that continue -------------------------------------------------------------


def load_earlier(options: argparse.Namespace, result: dict) -> dict[str, dict]:
    """Returns the steps of an earlier run into the same folder.

    Ends the program if machine, versions or arguments of that run were others.
    """
    path = options.out / "benchmark.json"
    if options.again or not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    for part in ("machine", "arguments"):
        old, new = earlier[part], result[part]
        for name in {*old, *new}:
            if old.get(name) != new.get(name):
                raise SystemExit(
                    f"{path} holds a run with {name} {old.get(name)}, now it is "
                    f"{new.get(name)}: choose another --out, or --again to start anew"
                )
    return earlier["steps"]


def is_finished(step: Step, entry: dict | None) -> bool:
    """Returns whether each source of a step was measured."""
    return entry is not None and all(
        entry["sources"].get(name, {}).get("readings") for name in step.sources
    )


def measure(options: argparse.Namespace) -> dict:
    """Returns all measurements, those of an earlier run included."""
    names = ("repeats", "threads", "quick", "loss", "most_load")
    arguments = {name: getattr(options, name) for name in names}
    result: dict[str, Any] = {"machine": {}, "arguments": arguments, "steps": {}}
    result["load was read"] = read_busy() is not None
    plan = make_plan(options)
    with tqdm(unit="reading", smoothing=0) as bar:
        bench = Bench(options, bar)
        try:
            result["machine"] = describe_machine(bench)
            result["steps"] = load_earlier(options, result)
            todo = [s for s in plan if not is_finished(s, result["steps"].get(s.name))]
            if len(todo) < len(plan):
                tqdm.write(f"{len(plan) - len(todo)} steps were measured before")
            bar.reset(sum(count_readings(step, options) for step in todo))
            for step in take_in_time(todo, options.minutes):
                result["steps"][step.name] = bench.run(step)
                save_json(options.out / "benchmark.json", result)
        except KeyboardInterrupt:
            tqdm.write("interrupted: the same command continues")
        finally:
            bench.close()
    return result


def main() -> None:
    """Measures, prints the tables, draws the picture, and writes the JSON."""
    options = parse_options()
    if options.list:
        print("\n".join(step.name for step in PLAN))
        return
    if options.report:
        result = json.loads(options.report.read_text())
    else:
        confine(options.threads)  # before JAX counts cores
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        result = measure(options)
        more = {
            "ratios": find_ratios(result),
            "figures": make_figures(ratios=tabulate(result)),
        }
        write_json(options.out / "benchmark.json", result | more)
    print_report(result)
    draw(result, options.out)


if __name__ == "__main__":
    main()
