# SPDX-License-Identifier: Apache-2.0
"""What do checkpoints cost in training time, size and time to load?

Runs with equal settings alternate (no checkpoints, every 50 rounds, every 10, every
one), so that other load on the machine affects all of them; the table shows medians.
Processor time does not include waiting for the disk (a checkpoint waits for it twice).

    python experiments/checkpoints.py

A cost that is smaller than the spread of the runs without checkpoints is "below noise".
Written to --out: checkpoints.json.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from experiment_tools import describe_machine, make_parser, write_json

import jboost as jb


def main():
    """Times the runs, and prints and writes a table."""
    args = parse()
    random = np.random.default_rng(0)
    x = random.normal(size=(args.rows, args.features)).astype(np.float32)
    y = x[:, 0] + x[:, 1] * x[:, 2] + random.normal(size=args.rows)
    train(args, x, y)  # compiles
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        table = time_runs(args, x, y, Path(folder))
        files = time_files(train(args, x, y), Path(folder) / "model")
    print(f"\n{args.rows} rows, {args.features} features, {args.rounds} rounds")
    print(
        f"{'checkpoint':12s} {'seconds':>8s} {'of processor':>13s} {'ratio':>6s} bytes"
    )
    for row in table:
        ratio = row["processor_seconds"] / table[0]["processor_seconds"]
        print(
            f"{row['checkpoint']:12s} {row['seconds']:8.2f} "
            f"{row['processor_seconds']:10.2f} {ratio:6.2f} {row['bytes']}"
        )
    print(
        f"the model: {files['bytes']} bytes, saved in {files['save']:.4f} s, loaded in "
        f"{files['load']:.4f} s"
    )
    print(f"\n{conclude(table)}")
    result = {
        "settings": vars(args), **describe_machine(), "runs": table, "model": files,
    }  # fmt: skip
    write_json(args.out / "checkpoints.json", result)


def conclude(table):
    """Returns the result in one sentence."""
    base, said = table[0], []
    for row in table[1:]:
        cost = row["processor_seconds"] / base["processor_seconds"] - 1
        above = cost * base["processor_seconds"] > base["spread"]
        said.append(
            f"{f'{cost:.1%}' if above else 'below noise'} ({row['checkpoint']})"
        )
    return f"Found: checkpoints cost, in processor time, {', '.join(said)}."


def time_runs(args, x, y, folder):
    """Returns medians of each kind of run; the runs alternate."""
    names = ("none", "every 50", "every 10", "every round")
    seconds: dict[str, list] = {name: [] for name in names}
    processor: dict[str, list] = {name: [] for name in names}
    size = dict.fromkeys(names, 0)
    for repeat in range(args.repeats):
        print(f"run {repeat + 1} of {args.repeats}", flush=True)
        for name, every in zip(names, (0, 50, 10, 1), strict=True):
            path = folder / f"{name} {repeat}"
            kept = {"checkpoint": path, "checkpoint_rounds": every} if every else {}
            clock, own = time.perf_counter(), time.process_time()
            train(args, x, y, **kept)
            seconds[name].append(time.perf_counter() - clock)
            processor[name].append(time.process_time() - own)
            size[name] = path.stat().st_size if every else 0
    return [
        dict(
            checkpoint=name,
            seconds=statistics.median(seconds[name]),
            processor_seconds=statistics.median(processor[name]),
            spread=max(processor[name]) - min(processor[name]),
            bytes=size[name],
        )
        for name in names
    ]


def train(args, x, y, **kept):
    """Trains once; returns the model."""
    return jb.fit(x, y, num_rounds=args.rounds, max_depth=args.max_depth, **kept)[0]


def time_files(model, path):
    """Returns medians of saving and loading."""
    times = {"save": [], "load": []}
    for _ in range(9):
        begun = time.perf_counter()
        jb.save(model, path)
        written = time.perf_counter()
        jb.load(path)
        times["save"].append(written - begun)
        times["load"].append(time.perf_counter() - written)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"bytes": path.stat().st_size, **medians}


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--max-depth", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", help="folder of the files (default: a temporary one)"
    )
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, to separate costs from noise")
    return args


if __name__ == "__main__":
    main()
