# SPDX-License-Identifier: Apache-2.0
"""What does a tree cost on sparse data, and does the cost grow with the stored entries?

The data are random matrices of a fixed shape and several densities, whose entries that
are not stored are missing. For each library: time per tree (a longer run minus a run of
one tree, over the additional rounds, so that preparation cancels), time to the first
tree, time of prediction, and peak memory. Libraries take turns, each in a process of
its own; the table shows medians. A time per tree that is smaller than the spread of the
readings is "below noise": it is not drawn and has no ratio. Written to --out:
sparse.png and sparse.json.

    python experiments/sparse.py
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version

import numpy as np
import scipy.sparse
from experiment_tools import (
    BLUE,
    GREEN,
    ORANGE,
    find_slope,
    format_number,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)
from tqdm import tqdm

LIBRARIES = ("jboost", "xgboost", "lightgbm")
COLORS = dict(zip(LIBRARIES, (BLUE, ORANGE, GREEN), strict=True))
PACKAGES = ("jax", "xgboost-cpu", "lightgbm", "scipy")
DEPTH, RATE, BINS = 6, 0.1, 256


def make_data(rows, columns, density):
    """Returns normal entries at random positions; targets are linear plus noise."""
    rng = np.random.default_rng(0)
    size = int(rows * columns * density)
    places = rng.integers(0, rows, size), rng.integers(0, columns, size)
    values = rng.normal(size=size).astype(np.float32)
    x = scipy.sparse.csr_matrix((values, places), shape=(rows, columns))
    x.sum_duplicates()
    y = np.asarray(x @ rng.normal(size=columns)) + rng.normal(size=rows)
    return x, y.astype(np.float32)


def jboost_trainer(x, y, threads):
    """Returns rounds -> model, and model -> scores."""
    import jboost as jb

    def train(rounds):
        model, _ = jb.fit(
            x, y, num_rounds=rounds, max_depth=DEPTH, learning_rate=RATE,
            subsample=1.0, rows_per_threshold=0,
        )  # fmt: skip
        return model

    return train, lambda model: np.asarray(jb.predict(model, x))


def xgboost_trainer(x, y, threads):
    """Does the same with XGBoost, where absent entries are missing."""
    import xgboost as xgb

    settings = dict(
        tree_method="hist", max_depth=DEPTH, eta=RATE, max_bin=BINS, nthread=threads
    )

    def train(rounds):
        data = xgb.QuantileDMatrix(x, y, max_bin=BINS, nthread=threads)
        return xgb.train(settings, data, rounds)

    return train, lambda model: model.predict(xgb.DMatrix(x, nthread=threads))


def lightgbm_trainer(x, y, threads):
    """Does the same with LightGBM; zero_as_missing makes absent entries missing."""
    import lightgbm as lgb

    settings = dict(
        max_depth=DEPTH, num_leaves=2**DEPTH - 1, learning_rate=RATE, max_bin=BINS - 1,
        num_threads=threads, zero_as_missing=True, verbose=-1,
    )  # fmt: skip

    def train(rounds):
        data = lgb.Dataset(x, y, params=settings)
        return lgb.train(settings, data, rounds)

    return train, lambda model: model.predict(x)


TRAINERS = dict(
    zip(LIBRARIES, (jboost_trainer, xgboost_trainer, lightgbm_trainer), strict=True)
)


def measure(library, rows, columns, density, rounds, threads):
    """Takes one turn of one library in this process."""
    x, y = make_data(rows, columns, density)
    before = peak_memory()
    train, predict = TRAINERS[library](x, y, threads)
    train(1)  # compiles, and imports what is imported on first use
    few, many = [], []
    for _ in range(2):
        for seconds, number in ((few, 1), (many, 1 + rounds)):
            begun = time.perf_counter()
            model = train(number)
            seconds.append(time.perf_counter() - begun)
    predict(model)
    begun = time.perf_counter()
    score = predict(model)
    seconds = time.perf_counter() - begun
    return dict(
        library=library, density=density, entries=x.nnz, few=few, many=many,
        first=min(few), predict=seconds, megabytes=peak_memory() - before,
        mse=float(np.mean((score - y) ** 2)),
    )  # fmt: skip


def peak_memory():
    """Returns the peak memory of this process in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def run_turn(library, density, asked):
    """Takes one turn in a process of its own."""
    command = [sys.executable, __file__, "--turn", library, "--densities", str(density)]
    for name in ("rows", "columns", "rounds", "threads"):
        command += [f"--{name}", str(getattr(asked, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{library} at density {density} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarize(turns, density, rounds):
    """Returns medians of each library at one density, and ratios of single turns.

    Slopes below noise, and ratios that need them, are None.
    """
    rows, slopes = [], {}
    for library in LIBRARIES:
        own = [t for t in turns if (t["library"], t["density"]) == (library, density)]
        row = {key: float(np.median([t[key] for t in own])) for key in own[0]
               if key not in ("library", "few", "many")}  # fmt: skip
        few, many = ([s for t in own for s in t[key]] for key in ("few", "many"))
        slope = find_slope(few, many, rounds)
        slopes[library] = [
            find_slope(t["few"], t["many"], rounds).value
            for t in own
            if slope.measured is not None
        ]
        pairs = zip(slopes["jboost"], slopes[library], strict=False)
        ratios = [mine / its for mine, its in pairs]
        row |= dict(per_tree=slope.measured, noise=slope.noise)
        ratio = float(np.median(ratios)) if ratios else None
        rows.append({"library": library, **row, "ratio": ratio})
    return rows


def print_table(summary):
    """Prints one line for each library and density."""
    head = (
        f"{'density':>8} {'entries':>11} {'library':<9} {'s/tree':>11} {'jboost/it':>9}"
    )
    print(head + f" {'1st tree s':>10} {'predict s':>9} {'MB':>7} {'MSE':>9}")
    for row in summary:
        print(
            f"{row['density']:8.2%} {row['entries']:11.0f} {row['library']:<9} "
            f"{format_number(row['per_tree'], '11.4f'):>11} "
            f"{format_number(row['ratio'], '9.2f', '-'):>9} {row['first']:10.2f} "
            f"{row['predict']:9.3f} {row['megabytes']:7.0f} {row['mse']:9.4g}"
        )


def draw(summary, path):
    """Draws time per tree against stored entries; names what is below noise."""
    figure, [[axes]] = open_figure()
    for library in LIBRARIES:
        own = [row for row in summary if row["library"] == library]
        drawn = [row for row in own if row["per_tree"] is not None]
        entries, seconds = (
            [row[key] for row in drawn] for key in ("entries", "per_tree")
        )
        lost = [f"{row['density']:.2%}" for row in own if row["per_tree"] is None]
        label = library + (f" (below noise at {', '.join(lost)})" if lost else "")
        axes.plot(entries, seconds, marker="o", color=COLORS[library], label=label)
    axes.set(xlabel="stored entries", ylabel="seconds per tree")
    if any(row["per_tree"] is not None for row in summary):
        axes.set(xscale="log", yscale="log")
    axes.legend(frameon=False)
    save_figure(figure, path)


def conclude(summary):
    """Returns the result in one sentence."""
    own = [row for row in summary if row["library"] == "jboost"]
    own = [row for row in own if row["per_tree"] is not None]
    last = [row for row in summary if row["density"] == summary[-1]["density"]]
    said = "jboost's time per tree is above noise at fewer than two densities"
    if len(own) > 1:
        growth = own[-1]["per_tree"] / own[0]["per_tree"]
        entries = own[-1]["entries"] / own[0]["entries"]
        said = f"{entries:.3g} times the entries take jboost {growth:.3g} times as long"
    beside = [
        f"{format_number(row['ratio'], '.2f')} beside {row['library']}"
        for row in last
        if row["library"] != "jboost"
    ]
    return (
        f"Found: {said}; at density {last[0]['density']:.2%} the ratio of times per "
        f"tree is {', '.join(beside)}."
    )


def main():
    """Measures, prints and draws."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=1000)
    parser.add_argument(
        "--densities", type=float, nargs="+", default=[0.001, 0.01, 0.1]
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turn", choices=LIBRARIES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if min(asked.rounds, asked.turns, asked.rows, asked.columns) < 1:
        parser.error("--rounds, --turns, --rows and --columns must be at least 1")
    if asked.turn:
        sizes = (asked.rows, asked.columns, asked.densities[0])
        print(json.dumps(measure(asked.turn, *sizes, asked.rounds, asked.threads)))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(f"{platform.processor() or platform.machine()}, {asked.threads} threads")
    print(f"{versions}; {asked.rows} rows, {asked.columns} columns, depth {DEPTH}")
    turns, summary = [], []
    total = len(asked.densities) * asked.turns * len(LIBRARIES)
    with tqdm(total=total, unit="run") as bar:
        for density in asked.densities:
            for _ in range(asked.turns):
                for library in LIBRARIES:
                    turns.append(run_turn(library, density, asked))
                    bar.update()
            summary += summarize(turns, density, asked.rounds)
    print_table(summary)
    numbers = dict(turns=turns, summary=summary, versions=versions)
    print(f"\n{conclude(summary)}")
    write_json(asked.out / "sparse.json", numbers)
    draw(summary, asked.out / "sparse.png")


if __name__ == "__main__":
    main()
