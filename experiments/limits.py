# SPDX-License-Identifier: Apache-2.0
"""Does training stay within the memory that the documentation states, at its limits?

Each case runs in a process of its own and reports the peak of its memory (Linux) above
what it held before training: the imports, x and y. The table shows it beside the
formula of docs/performance.md. Other cases make 10,000 fits or predictions in one
process and report by how much memory grew after the first tenth. Cases that are in the
result file are not run again.

    python experiments/limits.py
    python experiments/limits.py --only "1M x 28" --only "same fit"

Written to --out: limits.json. About 10 minutes on two cores, 4 GB of memory.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
from experiment_tools import (
    add_minutes,
    describe_machine,
    make_figures,
    make_parser,
    print_table,
    take_in_time,
    write_json,
)
from tqdm import tqdm

MB = 1e6
# name: rows, columns, then what differs from a fit of 3 rounds of depth 6.
TABLES = {
    "1k x 28": (1_000, 28, {}),
    "100k x 28": (100_000, 28, {}),
    "1M x 28": (1_000_000, 28, {}),
    "10M x 28": (10_000_000, 28, {}),
    "100k x 5,000": (100_000, 5_000, {}),
    "4M x 5": (4_000_000, 5, {}),
    "4M x 5, logistic": (4_000_000, 5, dict(loss="logistic")),
    "4M x 5, absolute error": (4_000_000, 5, dict(loss="absolute_error")),
    "4M x 5, weights": (4_000_000, 5, dict(weights=True)),
    "4M x 5, validation of 1M": (4_000_000, 5, dict(held_out=1_000_000)),
    "100k x 28, 10 classes": (100_000, 28, dict(scores=10)),
    "100k x 28, 10 classes, shared": (100_000, 28, dict(scores=10, shared=True)),
    "30k x 28, 100 classes": (30_000, 28, dict(scores=100)),
    "1k x 10, 1,000 classes": (
        1_000,
        10,
        dict(scores=1_000, rounds=1, shared=True, simple=True),
    ),
    "1M x 28, 1,000 bins": (1_000_000, 28, dict(bins=1_000)),
    "200k x 28, 65,536 bins": (200_000, 28, dict(bins=65_536)),
    "1M x 28, depth 10": (1_000_000, 28, dict(depth=10)),
    "1M x 28, depth 16": (1_000_000, 28, dict(depth=16)),
    "1k x 5, 10,000 trees": (1_000, 5, dict(rounds=10_000)),
    "1M x 28, boost": (1_000_000, 28, dict(boost=True)),
}
PLAIN = dict(
    loss="squared_error", scores=1, bins=256, depth=6, rounds=3, weights=False,
    held_out=0, shared=False, boost=False, simple=False,
)  # fmt: skip
TIMES = 10_000
REPEATED = ("same fit", "fresh lambdas", "sizes of rows", "predictions")


def training_memory(rows, columns, bins=256, scores=1, depth=6, rounds=100, **case):
    """Returns the bytes above x and y; the formula of docs/performance.md."""
    quadratic = case["loss"] == "squared_error" and scores == 1
    total = sum(padded_size(n) for n in (rows, case["held_out"]) if n)
    code = 1 if bins <= 256 else 2
    width = -(-columns // 16) * 16
    if columns <= 32:
        width = max(8, 1 << (columns - 1).bit_length())
    codes = code * total * (columns + width + columns * case["boost"])
    by_row = total * (90 if quadratic else 130 if scores == 1 else 95 * scores)
    nodes = min(2 ** (depth - 1), 1 << (max(1, rows // 20) - 1).bit_length())
    channels = 2 if quadratic and not case["weights"] else 3
    histograms = (4 * channels * nodes + 60) * columns * bins
    trees = (80 * rounds + 1_800) * scores * 2**depth
    programs = (110 if quadratic else 150 if scores == 1 else 240) * MB
    return codes + by_row + histograms + trees + programs


def padded_size(rows):
    """Returns how many rows tables of so many are padded to; see "Compilation"."""
    if rows <= 8192:
        return next(n for n in (256, 1024, 2048, 4096, 8192) if rows <= n)
    step = 1 << (rows - 1).bit_length() - 4
    return -(-rows // step) * step


def main():
    """Runs the cases that are not in the result file, and prints the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append", help="run this case alone")
    add_minutes(parser, 3)  # a case takes up to a minute and a half
    parser.add_argument("--case", help="used by the script itself")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(run_case(args.case)))
        return
    path, found = args.out / "limits.json", {}
    if path.exists():
        found = json.loads(path.read_text())["cases"]
    cases = [
        name for name in (*TABLES, *REPEATED) if args.only is None or name in args.only
    ]
    left = [name for name in cases if name not in found]
    for name in tqdm(take_in_time(left, args.minutes), unit="case", total=len(left)):
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
        write_json(path, {"machine": describe_machine(), "cases": found})
    figures = make_figures(**tabulate([name for name in cases if name in found], found))
    write_json(path, json.loads(path.read_text()) | {"figures": figures})


def tabulate(cases, found):
    """Prints and returns the tables of the documentation."""
    trained = [["training", "measured, MB", "formula, MB", "formula / measured"]]
    for name in (name for name in cases if name in TABLES):
        rows, columns, changes = TABLES[name]
        formula = training_memory(rows, columns, **{**PLAIN, **changes}) / MB
        measured = found[name]["peak"] / MB
        ratio = formula / measured
        trained.append([name, f"{measured:,.0f}", f"{formula:,.0f}", f"{ratio:.2f}"])
    repeated = [[f"{TIMES:,} times", "after a tenth, MB", "at the end, MB"]]
    for name in (name for name in cases if name in REPEATED):
        early, late = (found[name][when] / MB for when in ("early", "late"))
        repeated.append([name, f"{early:,.0f}", f"{late:,.0f}"])
    for table in (trained, repeated):
        print_table(table)
    return {"trained": trained, "repeated": repeated}


def run_case(name):
    """Runs one case in this process."""
    return repeat(name) if name in REPEATED else train(*TABLES[name])


def train(rows, columns, changes):
    """Trains on random rows; returns the peak above x and y."""
    import jax

    import jboost as jb

    case = {**PLAIN, **changes}
    x, y = make_rows(rows, columns)
    loss = getattr(jb.losses, case["loss"])
    settings = dict(num_rounds=case["rounds"], max_depth=case["depth"])
    if case["scores"] > 1:
        y = (np.abs(y) * 1000).astype(np.int32) % case["scores"]
        loss = jb.losses.softmax
        settings |= dict(num_scores=case["scores"], share_structure=case["shared"])
    if case["simple"]:  # a search for the best start would take minutes
        settings |= dict(init_score=0.0, leaf_solver="newton")
    if case["loss"] == "logistic":
        y = (y > 0).astype(np.float32)
    if case["weights"]:
        settings["sample_weight"] = np.linspace(0.5, 1.5, rows, dtype=np.float32)
    if case["held_out"]:
        settings["validation"] = x[: case["held_out"]], y[: case["held_out"]]
    before = begin_peak()
    begun = time.perf_counter()
    if case["boost"]:
        bins = jb.fit_bins(x, max_bins=case["bins"])
        codes = jb.apply_bins(bins, x)
        settings |= dict(max_bins=bins.num_bins)
        jax.block_until_ready(jb.boost(codes, y, loss, jax.random.key(0), **settings))
    else:
        jb.fit(x, y, loss, max_bins=case["bins"], **settings)
    seconds = time.perf_counter() - begun
    return {"peak": read_status("VmHWM") - before, "seconds": seconds}


def repeat(name):
    """Makes many fits or predictions; returns the memory early and at the end."""
    import jboost as jb

    x, y = make_rows(400, 5)
    model, _ = jb.fit(x[:200], y[:200], num_rounds=3)
    for number in range(TIMES):
        if number == TIMES // 10:
            early = read_status("VmRSS")
        if name == "same fit":
            jb.fit(x[:200], y[:200], num_rounds=2)
        elif name == "fresh lambdas":
            scale = 1 + number / TIMES
            jb.fit(x[:200], y[:200], lambda s, t: scale * (s - t) ** 2, num_rounds=2)  # noqa: B023
        elif name == "sizes of rows":
            size = 50 + number * 37 % 350
            jb.fit(x[:size], y[:size], num_rounds=2, max_depth=1 + number % 4)
        else:
            jb.predict(model, np.zeros((1 + number * 37 % 3000, 5), np.float32))
    return {"early": early, "late": read_status("VmRSS")}


def make_rows(rows, columns):
    """Returns random rows, made part by part, and targets of the first columns."""
    rng = np.random.default_rng(0)
    x = np.empty((rows, columns), np.float32)
    for part in np.array_split(x, 1 + rows * columns // 2**22):
        part[:] = rng.normal(size=part.shape)
    return x, x[:, 0] + x[:, 1] * x[:, 2]


def begin_peak():
    """Begins to measure the peak anew; returns the memory now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return read_status("VmRSS")


def read_status(field):
    """Returns a number of bytes of this process."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
