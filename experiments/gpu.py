# SPDX-License-Identifier: Apache-2.0
"""How fast is jboost on a GPU, and is it right there?

    pip install -e '.[test]' 'jax[cuda13]' cupy-cuda13x
    pip uninstall -y xgboost-cpu && pip install xgboost
    python experiments/gpu.py --out DIR
    python experiments/gpu.py --only train operations --out DIR

For a machine with an NVIDIA GPU and JAX's CUDA plugin. Takes less than eleven minutes,
with --quick (small sizes) less than four. Parts:

- device: name, driver, versions, speed of the memory;
- tests: a subset of the tests, on the GPU;
- train: ms a tree of a built-in loss and of the same loss as a custom one;
- operations: ms of a histogram, of a split search, and so on, and cells a second of
  the histogram at the root, from all features and from half of them;
- peers: ms a tree in turn with XGBoost, on the same data on the device, and LightGBM;
- predict: ms for all rows of the main table, in turn with XGBoost;
- many: models that differ in their learning rate, by vmap and in turn;
- bits: whether two runs agree to the bit, and the GPU with the CPU;
- wide: ms a tree of a large table, in turn with XGBoost;
- plain: ms a tree in plain XLA;
- user: seconds of two fits from NumPy arrays, in turn with XGBoost, of sixteen losses
  and tables, and of predictions, explanations, cross-validation and the import. It
  takes up to four minutes.

Milliseconds a tree are slopes between two numbers of rounds of jb.boost, of data that
were generated on the device. Every part is a process of its own with a time limit, so
that one that crashes, or runs out of memory, leaves the others. Peers that are not
installed, or that were built without CUDA, are left out and named.

Written to --out: gpu.json (after every part, and during it), a picture (gpu.png
and gpu.svg, if matplotlib is installed), gpu.log with what the processes printed. With
--only, other parts of an earlier run on the same device are kept.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from experiment_tools import (
    choose_tables,
    make_figures,
    make_parser,
    print_table,
    save_json,
    write_json,
)
from gpu_cases import PARTS, QUICK_SECONDS, SECONDS
from gpu_report import conclude, describe_device, draw, tabulate
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("gpu_parts.py")
LEAST = 5.0  # seconds without which no part is started
LEAST_LIMIT = 20.0  # seconds of a part in a short run
TICK = 0.5  # seconds between two looks at a process


def find_missing(platform: str) -> str | None:
    """Returns what a GPU run lacks, as far as it can be seen without JAX."""
    if platform != "cuda":
        return None
    plugins = [f"jax_plugins.xla_cuda{version}" for version in (12, 13)]
    if importlib.util.find_spec("jax_plugins") is None or not any(
        map(importlib.util.find_spec, plugins)
    ):
        return "JAX has no CUDA plugin: pip install 'jax[cuda13]'"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver: libcuda.so.1 cannot be loaded"
    return None


# ---- processes ----------------------------------------------------------------------


class Runner:
    """Starts the parts one after another, and saves what they found."""

    def __init__(self, options: argparse.Namespace, folder: Path, log: IO[str]):
        """Nothing is started yet."""
        self.options, self.folder, self.log = options, folder, log
        self.environment = make_environment(options.platform, str(folder / "cache"))
        self.result = load_earlier(options)
        self.path = options.out / "gpu.json"
        self._saved: dict | None = None
        self.end = time.monotonic() + options.seconds

    def run(self, name: str, bar: tqdm) -> None:
        """Runs a part, unless there is no time left."""
        part, begin = PARTS[name], time.monotonic()
        share = part.limit * self.options.seconds / SECONDS
        left = self.end - begin
        entry = self.result["parts"][name] = {"state": "no time was left"}
        if left >= LEAST:
            self.log.write(f"==== {name}\n")
            self.log.flush()
            try:
                self._watch(name, entry, min(left, max(LEAST_LIMIT, share)), bar)
            finally:
                entry["seconds"] = time.monotonic() - begin
                self.save()
        if name == "device" and "figures" in entry:
            self._keep_device(entry)
        tqdm.write(f"{name}: {entry['state']}, {entry.get('seconds', 0):.0f} s")

    def _keep_device(self, entry: dict) -> None:
        """Drops the parts of an earlier run on another device."""
        old, new = self.result["machine"], entry["figures"]
        if old and any(old.get(key) != new.get(key) for key in ("device", "gpu")):
            self.result["parts"] = {"device": entry}
        self.result["machine"] = new

    def save(self) -> None:
        """Writes all figures so far."""
        save_json(self.path, self.result)

    def _watch(self, name: str, entry: dict, limit: float, bar: tqdm) -> None:
        """Starts a process, and reads its figures until it ends or is killed."""
        figures, before = self.folder / f"{name}.json", bar.n
        command = [sys.executable, WORKER, name, figures, self.options.platform]
        command += ["quick"] * self.options.quick
        begin = time.monotonic()
        process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=self.environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - begin < limit:
                time.sleep(TICK)
                bar.n = before + min(PARTS[name].seconds, time.monotonic() - begin)
                bar.refresh()
                self._read(figures, entry, "interrupted")
            ended = process.poll()
            kill(process)
        except BaseException:
            kill(process)
            raise
        states = {None: f"killed after {limit:.0f} s", 0: "done"}
        failed = f"failed with {ended}: {self._read_reason()}"
        self._read(figures, entry, states.get(ended, failed))

    def _read(self, path: Path, entry: dict, state: str) -> None:
        """Saves what a process has written so far, if it is new."""
        with contextlib.suppress(OSError):
            entry["figures"] = json.loads(path.read_text())
        if state != entry["state"] or entry.get("figures") != self._saved:
            entry["state"], self._saved = state, entry.get("figures")
            self.save()

    def _read_reason(self) -> str:
        """Returns the last line of the log."""
        self.log.flush()
        lines = Path(self.log.name).read_text(errors="replace").split("\n")
        return next((line.strip() for line in lines[::-1] if line.strip()), "")


def kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_environment(platform: str, cache: str) -> dict[str, str]:
    """Returns the environment of the parts: no reserved memory, a shared cache."""
    made = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    made["JAX_PLATFORMS"] = "cpu" if platform == "cpu" else "cuda,cpu"
    made["PYTHONUNBUFFERED"] = "1"  # a test counts when it has ended
    made["JAX_TRACEBACK_FILTERING"] = "off"  # the last line is the error
    if "JAX_COMPILATION_CACHE_DIR" not in made:
        made["JAX_COMPILATION_CACHE_DIR"] = cache
        made["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    return made


# ---- the command line ---------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line, checked."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help="parts to measure")
    add("--quick", action="store_true", help="small sizes, in less than two minutes")
    add("--seconds", type=float, help="of the whole run, at most "
        f"(default: {SECONDS}, with --quick {QUICK_SECONDS})")  # fmt: skip
    add("--platform", choices=("cuda", "cpu"), default="cuda",
        help="cpu: to try the script where no GPU is, with --quick")  # fmt: skip
    options = parser.parse_args()
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    options.only = choose_tables(parser, options.only, [*PARTS])
    return options


def load_earlier(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what is known before a run: with --only, parts of an earlier one."""
    settings = {"quick": options.quick, "platform": options.platform}
    new = {"settings": settings, "machine": {}, "parts": {}}
    path = options.out / "gpu.json"
    if len(options.only) == len(PARTS) or not path.exists():
        return new
    earlier = json.loads(path.read_text())
    return earlier if earlier["settings"] == settings else new


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all figures.

    Ends the program if JAX finds no GPU.
    """
    names = ["device", *(name for name in options.only if name != "device")]
    total = sum(PARTS[name].seconds for name in names)
    form = "{desc}: {percentage:3.0f} % |{bar}| {elapsed}, {remaining} left"
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(options.out / "gpu.log", "w") as log,
        tqdm(total=total, bar_format=form, smoothing=0) as bar,
    ):
        runner = Runner(options, Path(folder), log)
        done = 0
        try:
            for name in names:
                bar.set_description(PARTS[name].title)
                runner.run(name, bar)
                entry = runner.result["parts"][name]
                if name == "device" and "figures" not in entry:
                    raise SystemExit(f"no GPU: {entry['state']}")
                done += PARTS[name].seconds
                bar.n = done
                bar.refresh()
        except KeyboardInterrupt:
            tqdm.write("interrupted: what was measured follows")
    return runner.result


def main() -> None:
    """Measures, prints the tables, draws the picture, and writes everything."""
    options = parse_options()
    missing = find_missing(options.platform)
    if missing:
        raise SystemExit(f"no GPU: {missing}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = measure(options)
    tables, device = tabulate(result), describe_device(result)
    print(f"Device: {device}.")
    for table in tables.values():
        print()
        print_table(table)
    result["figures"] = make_figures(device, **tables)
    write_json(options.out / "gpu.json", result)
    if importlib.util.find_spec("matplotlib"):
        draw(result, options.out)
    print(conclude(result))


if __name__ == "__main__":
    main()
