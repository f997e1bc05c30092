# SPDX-License-Identifier: Apache-2.0
"""Training on data several times larger than the memory it may use.

Three questions: does training on blocks stay within its budget, how long does a tree
take against training in memory, and is the model the same? Every run is a process of
its own, of which the peak of resident memory is measured; what the interpreter,
libraries and a small training run take before is measured, too, and subtracted.

    python experiments/streaming.py
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import jboost as jb

BATCH_ROWS = 65536
MIB = 1 << 20


def main():
    """Runs both questions, prints their tables and draws them."""
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
    print(f"{'rows':>9s} {'in memory':>10s} {'blocks':>8s} {'ratio':>6s}  same model")
    for row in ratios:
        print(
            f"{row['rows']:9d} {row['memory']:8.3f} s {row['stream']:6.3f} s "
            f"{row['ratio']:6.2f}  {row['same']}"
        )
    folder = Path(args.results)
    folder.mkdir(exist_ok=True)
    (folder / "streaming.json").write_text(json.dumps(results, indent=2))
    draw(results, folder / "streaming.png")


def parse():
    """The settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    parser.add_argument("--results", default="results")
    parser.add_argument("--worker", choices=[*WORKERS, None], default=None)
    return parser.parse_args()


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
    """Rows that are made anew each time they are read."""

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
    """Bytes of resident memory at most, until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_large(args):
    """Memory and time of a run on much more data than its budget."""
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
    """Seconds per tree in memory and on blocks, in turn, in one process."""
    found = []
    for num_rows in args.ratio_rows:
        parts = list(make_batches(num_rows, 28)())
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        rows = jb.stream(
            jb.array_batches(x, y), memory=args.memory, bins=jb.fit_bins(x)
        )
        for given in ((x, y), (rows,)):
            seconds_per_tree(given)  # compiles
        pairs = [
            (seconds_per_tree((x, y)), seconds_per_tree((rows,)))
            for _ in range(args.repeats)
        ]
        models = [jb.fit(*given, num_rounds=4)[0] for given in ((x, y), (rows,))]
        names = ("feature", "threshold", "missing_left", "leaf_value")
        memory, stream = (
            statistics.median(times) for times in zip(*pairs, strict=True)
        )
        ratio = statistics.median(b / a for a, b in pairs)
        found.append(
            {
                "rows": num_rows,
                "memory": memory,
                "stream": stream,
                "ratio": ratio,
                "same": all(
                    np.array_equal(*(np.asarray(getattr(m, name)) for m in models))
                    for name in names
                ),
            }
        )
    return found


def seconds_per_tree(given, few=4, many=12):
    """By difference, so that binning and the start do not count."""
    seconds = []
    for num_rounds in (few, many):
        begun = time.perf_counter()
        jb.fit(*given, num_rounds=num_rounds)
        seconds.append(time.perf_counter() - begun)
    return (seconds[1] - seconds[0]) / (many - few)


def draw(results, path):
    """Memory beside the budget, and seconds per tree."""
    large, ratios = results["large"], results["ratio"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    names = ["data", "budget", "plan", "passes", "training"]
    keys = ["data_mib", "budget_mib", "planned_mib", "passes_mib", "training_mib"]
    left.barh(names[::-1], [large[key] for key in keys[::-1]])
    left.set_xlabel("MiB (passes and training: peak above the start)")
    right.plot([r["rows"] for r in ratios], [r["memory"] for r in ratios], "o-")
    right.plot([r["rows"] for r in ratios], [r["stream"] for r in ratios], "o-")
    right.legend(["in memory", "blocks on disk"])
    right.set_xlabel("rows (28 features)")
    right.set_ylabel("seconds per tree")
    right.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


WORKERS = {"large": run_large, "ratio": run_ratio}

if __name__ == "__main__":
    main()
