# SPDX-License-Identifier: Apache-2.0
"""What does a tree cost on sparse data, and does it grow with the stored entries?

Random matrices of a fixed shape at several densities, absent entries missing. For each
library: time per tree (a longer run minus one of a tree, over the rounds between, so
that preparation does not count), time to the first tree, of prediction, and how much
memory the process took at most. Libraries take turns, each in a process of its own;
medians. A table in the terminal; a picture and all numbers in ``results/``.
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
from pathlib import Path

import numpy as np
import scipy.sparse
from tqdm import tqdm

LIBRARIES = ("jboost", "xgboost", "lightgbm")
PACKAGES = ("jax", "xgboost-cpu", "lightgbm", "scipy")
DEPTH, RATE, BINS = 6, 0.1, 256


def make_data(rows, columns, density):
    """Entries at random places, normal; targets linear in them, with noise."""
    rng = np.random.default_rng(0)
    size = int(rows * columns * density)
    places = rng.integers(0, rows, size), rng.integers(0, columns, size)
    values = rng.normal(size=size).astype(np.float32)
    x = scipy.sparse.csr_matrix((values, places), shape=(rows, columns))
    x.sum_duplicates()
    y = np.asarray(x @ rng.normal(size=columns)) + rng.normal(size=rows)
    return x, y.astype(np.float32)


def jboost_trainer(x, y, threads):
    """rounds -> model, and model -> scores."""
    import jboost as jb

    def train(rounds):
        model, _ = jb.fit(x, y, num_rounds=rounds, max_depth=DEPTH, learning_rate=RATE)
        return model

    return train, lambda model: np.asarray(jb.predict(model, x))


def xgboost_trainer(x, y, threads):
    """Absent entries are missing there, too."""
    import xgboost as xgb

    settings = dict(
        tree_method="hist", max_depth=DEPTH, eta=RATE, max_bin=BINS, nthread=threads
    )

    def train(rounds):
        data = xgb.QuantileDMatrix(x, y, max_bin=BINS, nthread=threads)
        return xgb.train(settings, data, rounds)

    return train, lambda model: model.predict(xgb.DMatrix(x, nthread=threads))


def lightgbm_trainer(x, y, threads):
    """Absent entries are missing, as said by zero_as_missing."""
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
    """One turn of one library, in this process."""
    x, y = make_data(rows, columns, density)
    before = peak_memory()
    train, predict = TRAINERS[library](x, y, threads)
    train(1)  # compiles, and loads what is loaded late
    begun = time.perf_counter()
    model = train(1)
    short = time.perf_counter() - begun
    begun = time.perf_counter()
    model = train(1 + rounds)
    per_tree = (time.perf_counter() - begun - short) / rounds
    predict(model)
    begun = time.perf_counter()
    score = predict(model)
    seconds = time.perf_counter() - begun
    return dict(
        library=library, density=density, entries=x.nnz, per_tree=per_tree,
        first=short, predict=seconds, megabytes=peak_memory() - before,
        mse=float(np.mean((score - y) ** 2)),
    )  # fmt: skip


def peak_memory():
    """MB, of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def run_turn(library, density, asked):
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--turn", library, "--densities", str(density)]
    for name in ("rows", "columns", "rounds", "threads"):
        command += [f"--{name}", str(getattr(asked, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{library} at density {density} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(turns, density):
    """Medians of each library at one density, and ratios turn by turn."""
    rows = []
    for library in LIBRARIES:
        own = [t for t in turns if (t["library"], t["density"]) == (library, density)]
        row = {key: float(np.median([t[key] for t in own])) for key in own[0]
               if key != "library"}  # fmt: skip
        base = [t for t in turns if (t["library"], t["density"]) == ("jboost", density)]
        ratios = [b["per_tree"] / t["per_tree"] for b, t in zip(base, own, strict=True)]
        rows.append({"library": library, **row, "ratio": float(np.median(ratios))})
    return rows


def print_table(summary):
    """One line for each library and density."""
    head = (
        f"{'density':>8} {'entries':>11} {'library':<9} {'s/tree':>8} {'jboost/it':>9}"
    )
    print(head + f" {'1st tree s':>10} {'predict s':>9} {'MB':>7} {'MSE':>9}")
    for row in summary:
        print(
            f"{row['density']:8.2%} {row['entries']:11.0f} {row['library']:<9} "
            f"{row['per_tree']:8.4f} {row['ratio']:9.2f} {row['first']:10.2f} "
            f"{row['predict']:9.3f} {row['megabytes']:7.0f} {row['mse']:9.4g}"
        )


def draw(summary, path):
    """Time per tree against stored entries."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for library in LIBRARIES:
        own = [row for row in summary if row["library"] == library]
        entries, seconds = (
            [row[key] for row in own] for key in ("entries", "per_tree")
        )
        axes.loglog(entries, seconds, marker="o", label=library)
    axes.set(xlabel="stored entries", ylabel="seconds per tree")
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    """Measures, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=1000)
    parser.add_argument(
        "--densities", type=float, nargs="+", default=[0.001, 0.01, 0.1]
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--turn", choices=LIBRARIES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.turn:
        sizes = (asked.rows, asked.columns, asked.densities[0])
        print(json.dumps(measure(asked.turn, *sizes, asked.rounds, asked.threads)))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(f"{platform.processor() or platform.machine()}, {asked.threads} threads")
    print(f"{versions}; {asked.rows} rows, {asked.columns} columns, depth {DEPTH}")
    asked.output.mkdir(parents=True, exist_ok=True)
    turns, summary = [], []
    total = len(asked.densities) * asked.turns * len(LIBRARIES)
    with tqdm(total=total, unit="run") as bar:
        for density in asked.densities:
            for _ in range(asked.turns):
                for library in LIBRARIES:
                    turns.append(run_turn(library, density, asked))
                    bar.update()
            summary += summarise(turns, density)
    print_table(summary)
    numbers = dict(turns=turns, summary=summary, versions=versions)
    (asked.output / "sparse.json").write_text(json.dumps(numbers, indent=1))
    draw(summary, asked.output / "sparse.png")
    print(f"written: {asked.output / 'sparse.json'}, {asked.output / 'sparse.png'}")


if __name__ == "__main__":
    main()
