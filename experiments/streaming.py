# SPDX-License-Identifier: Apache-2.0
"""Can jboost train on data several times larger than the memory it may use?

There are three questions: does training on blocks stay within its memory limit, how
long does a tree take compared with training in memory and with XGBoost's external
memory on pages of as many rows, and is the model the same? Every run is a process of
its own, whose peak resident memory is measured; the memory that the interpreter,
libraries and a small training run use before is subtracted.

    python experiments/streaming.py

Seconds per tree are differences of runs of 12 and of 4 rounds. Those that are smaller
than the spread of the runs are "below noise"; they are not drawn and have no ratio.
Written to --out: streaming.png and streaming.json.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import xgboost
from experiment_tools import (
    BLUE,
    ORANGE,
    find_slope,
    format_number,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)

import jboost as jb

BATCH_ROWS = 65536
BLOCK_ROWS = 1 << 18  # of blocks and pages
FEW, MANY = 4, 12  # rounds of the runs that are compared
MIB = 1 << 20


def main():
    """Runs both parts, prints their tables and draws them."""
    args = parse()
    if args.worker:
        print(json.dumps(WORKERS[args.worker](args)))
        return
    results = {"machine": platform.processor(), "settings": vars(args)}
    print(f"{args.rows} rows of {args.features} features, budget {args.memory}")
    results["large"] = large = call(args, "large")
    table = [
        ("data, as float32", large["data_mib"]),
        ("codes on disk", large["disk_mib"]),
        ("budget", large["budget_mib"]),
        ("planned for training", large["planned_mib"]),
        ("measured above the start: passes", large["passes_mib"]),
        ("measured above the start: training", large["training_mib"]),
    ]
    print("\n".join(f"{name:36s} {value:8.0f} MiB" for name, value in table))
    ratio = large["training_mib"] / large["planned_mib"]
    print(f"{'training over plan':36s} {ratio:8.2f}")
    print(f"{'passes':36s} {large['passes_seconds']:8.1f} s")
    print(f"{'a tree':36s} {large['tree_seconds']:8.2f} s\n")
    results["ratio"] = ratios = call(args, "ratio")
    print(
        f"{'rows':>9s} {'in memory':>12s} {'blocks':>12s} {'ratio':>6s} "
        f"{'XGBoost':>12s} {'ratio':>6s}  same model"
    )
    for row in ratios:
        print(
            f"{row['rows']:9d} {format_number(row['memory'], '.4f'):>12} "
            f"{format_number(row['stream'], '.4f'):>12} "
            f"{format_number(row['ratio'], '.2f', '-'):>6} "
            f"{format_number(row['peer'], '.4f'):>12} "
            f"{format_number(row['peer_ratio'], '.2f', '-'):>6}  {row['same']}"
        )
    print(f"\n{conclude(results)}")
    write_json(args.out / "streaming.json", results)
    draw(results, args.out / "streaming.png")


def conclude(results):
    """Returns the result in one sentence."""
    large, ratios = results["large"], results["ratio"]
    peak = max(large["passes_mib"], large["training_mib"])
    within = "within" if peak <= large["budget_mib"] else "beyond"
    known = [row["ratio"] for row in ratios if row["ratio"] is not None]
    peers = [row["peer_ratio"] for row in ratios if row["peer_ratio"] is not None]
    times = "below noise"
    if known:
        times = f"{min(known):.2f} to {max(known):.2f} times that in memory"
    if peers:
        times += f", {min(peers):.2f} to {max(peers):.2f} times that of XGBoost"
    same = "the same" if all(row["same"] for row in ratios) else "not always the same"
    return (
        f"Found: {peak:.0f} MiB at most, {within} the budget of "
        f"{large['budget_mib']:.0f} MiB; the time of a tree on blocks is {times}; "
        f"models are {same}."
    )


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--features", type=int, default=160)
    parser.add_argument("--memory", default="512 MiB")
    parser.add_argument("--max-bins", type=int, default=64)
    parser.add_argument("--scores", type=int, default=1, help="classes, if above 1")
    parser.add_argument("--trees", type=int, default=4)
    parser.add_argument(
        "--ratio-rows", type=int, nargs="+", default=[250_000, 1_000_000]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=[*WORKERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.trees, args.repeats) < 2:
        parser.error("--trees and --repeats must be at least 2")
    return args


def call(args, worker):
    """Runs a worker in a process of its own."""
    options = []
    for name, value in vars(args).items():
        values = value if isinstance(value, list) else [value]
        if name != "worker":
            options += ["--" + name.replace("_", "-"), *map(str, values)]
    command = [sys.executable, __file__, *options, "--worker", worker]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def make_batches(num_rows, num_features, num_scores=1):
    """Returns rows that are generated again each time they are read."""

    def batches():
        for first in range(0, num_rows, BATCH_ROWS):
            random = np.random.default_rng(first)
            size = min(BATCH_ROWS, num_rows - first)
            x = random.standard_normal((size, num_features), dtype=np.float32)
            y = x[:, 0] + x[:, 1] ** 2 + x[:, 2] * x[:, 3]
            y += random.standard_normal(size, dtype=np.float32)
            if num_scores > 1:
                y = np.clip(np.floor(y + num_scores / 2), 0, num_scores - 1)
                y = y.astype(np.int32)
            yield x, y

    return batches


def peak():
    """Returns the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_large(args):
    """Returns memory and time of a run on data much larger than the limit."""
    settings = dict(max_bins=args.max_bins, num_scores=args.scores)
    if args.scores > 1:
        settings["loss"] = jb.losses.softmax
    warm = jb.stream(make_batches(2000, args.features, args.scores), memory="64 MiB")
    jb.fit(warm, num_rounds=2, **settings)
    del warm
    for _ in make_batches(3 * BATCH_ROWS, args.features)():
        pass  # the source's own batches are not jboost's
    before = peak()
    source = make_batches(args.rows, args.features, args.scores)
    rows = jb.stream(source, memory=args.memory)
    begun, rounds = time.perf_counter(), []

    def watch(round, history, model):
        rounds.append(time.perf_counter())

    rows.prepare(args.max_bins)
    passes, passed = peak(), time.perf_counter()
    jb.fit(rows, num_rounds=args.trees, callbacks=watch, **settings)
    steps = np.diff(rounds).tolist()
    return {
        "data_mib": args.rows * args.features * 4 / MIB,
        "disk_mib": rows.disk_bytes / MIB,
        "budget_mib": rows.memory / MIB,
        "planned_mib": sum(rows.plan.values()) / MIB,
        "plan": {name: value / MIB for name, value in rows.plan.items()},
        "passes_mib": (passes - before) / MIB,
        "training_mib": (peak() - before) / MIB,
        "start_mib": before / MIB,
        "passes_seconds": passed - begun,
        "tree_seconds": statistics.median(steps),
    }


def run_ratio(args):
    """Returns seconds per tree in memory, on blocks, and of XGBoost on pages.

    They alternate in one process.
    """
    found = []
    for num_rows in args.ratio_rows:
        parts = list(make_batches(num_rows, 28)())
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        rows = jb.stream(
            jb.streams.array_batches(x, y), memory=args.memory, bins=jb.fit_bins(x),
            block_rows=min(num_rows, BLOCK_ROWS),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            pages = make_pages(x, y, folder)
            runs = [
                partial(jb.fit, x, y), partial(jb.fit, rows), partial(train_peer, pages)
            ]  # fmt: skip
            for run in runs:
                time_runs(run)  # compiles
            repeats = [[time_runs(run) for run in runs] for _ in range(args.repeats)]
            del runs, pages  # before their files
        models = [jb.fit(*given, num_rounds=4)[0] for given in ((x, y), (rows,))]
        names = ("feature", "threshold", "missing_left", "leaf_value")
        memory, stream, peer = (
            find_slope(*zip(*times, strict=True), MANY - FEW).measured
            for times in zip(*repeats, strict=True)
        )
        steps = [[long - short for short, long in times] for times in repeats]
        ratio = peer_ratio = None
        if memory is not None and stream is not None:
            ratio = statistics.median(own / other for other, own, _ in steps)
        if peer is not None and stream is not None:
            peer_ratio = statistics.median(own / other for _, own, other in steps)
        found.append(
            {
                "rows": num_rows,
                "memory": memory,
                "stream": stream,
                "ratio": ratio,
                "peer": peer,
                "peer_ratio": peer_ratio,
                "same": all(
                    np.array_equal(*(np.asarray(getattr(m, name)) for m in models))
                    for name in names
                ),
            }
        )
    return found


class _Pages(xgboost.DataIter):
    """Rows in parts, which XGBoost keeps on disk."""

    def __init__(self, x, y, folder):
        super().__init__(cache_prefix=str(Path(folder, "pages")))
        self.parts = [
            (x[first : first + BLOCK_ROWS], y[first : first + BLOCK_ROWS])
            for first in range(0, len(x), BLOCK_ROWS)
        ]
        self.reset()

    def reset(self):
        """Begins with the first part."""
        self.left = iter(self.parts)

    def next(self, input_data):
        """Hands out a part; returns whether there was one."""
        part = next(self.left, None)
        if part is not None:
            input_data(data=part[0], label=part[1])
        return part is not None


def make_pages(x, y, folder):
    """Returns the rows in XGBoost's external memory, binned like ours."""
    return xgboost.ExtMemQuantileDMatrix(_Pages(x, y, folder), max_bin=256)


def train_peer(pages, num_rounds):
    """Trains with XGBoost on pages, with the sizes of our defaults."""
    settings = dict(tree_method="hist", max_depth=6, max_bin=256, learning_rate=0.1)
    settings["nthread"] = len(os.sched_getaffinity(0))
    xgboost.train(settings, pages, num_rounds)


def time_runs(run):
    """Returns the seconds of a short and of a long run.

    Binning and the start cancel in their difference.
    """
    seconds = []
    for num_rounds in (FEW, MANY):
        begun = time.perf_counter()
        run(num_rounds=num_rounds)
        seconds.append(time.perf_counter() - begun)
    return seconds


def draw(results, path):
    """Draws memory against the limit, and seconds per tree."""
    large, ratios = results["large"], results["ratio"]
    figure, [[left, right]] = open_figure(1, 2, (10, 4))
    names = ["data", "budget", "plan", "passes", "training"]
    keys = ["data_mib", "budget_mib", "planned_mib", "passes_mib", "training_mib"]
    left.barh(names[::-1], [large[key] for key in keys[::-1]], color=BLUE)
    left.set_xlabel("MiB (passes and training: peak above the start)")
    labels = (("memory", "in memory", BLUE), ("stream", "blocks on disk", ORANGE))
    for key, label, color in labels:
        drawn = [row for row in ratios if row[key] is not None]
        lost = [f"{row['rows']:,}" for row in ratios if row[key] is None]
        label += f" (below noise at {', '.join(lost)} rows)" if lost else ""
        rows, seconds = ([row[name] for row in drawn] for name in ("rows", key))
        right.plot(rows, seconds, "o-", color=color, label=label)
    right.legend(frameon=False)
    right.set_xlabel("rows (28 features)")
    right.set_ylabel("seconds per tree")
    right.set_ylim(bottom=0)
    save_figure(figure, path)


WORKERS = {"large": run_large, "ratio": run_ratio}

if __name__ == "__main__":
    main()
