# SPDX-License-Identifier: Apache-2.0
"""What does each method cost compared with the default fit, and with a peer?

Methods that minimize squared error and the default fit are run on one table (a noisy
sum of waves, steps and products; two features have monotone effects). If XGBoost,
LightGBM or scikit-learn implement a method, they run it as well, with equal parameters.

    python experiments/methods.py
    python experiments/methods.py --rows 20000 --turns 1 --methods monotone exact

Each reading is a process of its own. The first call compiles and is not timed, the
second one is. "MB" is the increase of peak memory from before the first call,
compilation included. The error is that on held-out rows without noise. Methods and
peers take turns. The table shows medians, and medians of the ratios of single turns:
time and error to the default fit, time to the peer. In "sparse", nine tenths of the
table are missing, for all that take part; "sketch" computes thresholds only, compared
with ``fit_bins``. Written to --out: methods.json with all readings.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from experiment_tools import make_parser, write_json
from tqdm import tqdm

PACKAGES = ("jax", "xgboost-cpu", "lightgbm", "scikit-learn")
ROUNDS, DEPTH, RATE, BINS, FEATURES = 50, 6, 0.1, 256, 20
SIGNS = {0: 1, 1: -1}
GROUPS = [[0, 1, 2], [2, 3, 4, 5], list(range(5, FEATURES))]
BATCH = 8192


class Table(NamedTuple):
    """Training rows, and other rows whose targets have no noise."""

    x: np.ndarray
    y: np.ndarray
    held_out: np.ndarray
    truth: np.ndarray


def make_table(rows: int, missing: float = 0.0) -> Table:
    """Returns uniform features; a share of the values is hidden after that."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (rows + rows // 4, FEATURES)).astype(np.float32)
    truth = 2 * x[:, 0] - np.exp(x[:, 1]) + np.sin(3 * x[:, 2]) + x[:, 3] * x[:, 4]
    truth += 2.0 * (x[:, 5] > 0.5)
    y = (truth + rng.normal(size=len(x))).astype(np.float32)
    x[rng.random(x.shape) < missing] = np.nan
    return Table(x[:rows], y[:rows], x[rows:], truth[rows:])


Run = Callable[[], Any]  # returns scores of the held-out rows, or None


def boosted(table: Table, recipe: str = "", subsample: float = 1, **settings) -> Run:
    """Runs jb.fit, with a recipe if one is given."""
    import jboost as jb

    if recipe:
        takes_loss = recipe in ("gradient_boost", "xgboost")
        losses = [jb.losses.squared_error] if takes_loss else []
        settings |= getattr(jb.recipes, recipe)(*losses)
    if subsample < 1:
        settings = jb.recipes.stochastic(settings, subsample=subsample)

    def run():
        model, _ = jb.fit(
            table.x, table.y, num_rounds=ROUNDS, max_depth=DEPTH, learning_rate=RATE,
            **settings,
        )  # fmt: skip
        return jb.predict(model, table.held_out)

    return run


def as_sparse(matrix):
    """Returns the values that are not missing, stored by row."""
    import scipy.sparse

    known = ~np.isnan(matrix)
    starts = np.append(0, np.cumsum(known.sum(axis=1)))
    return scipy.sparse.csr_matrix(
        (matrix[known], np.nonzero(known)[1], starts), shape=matrix.shape
    )


def sparse(table: Table) -> Run:
    """Runs the default fit on a sparse matrix."""
    x, held_out = as_sparse(table.x), as_sparse(table.held_out)
    return boosted(table._replace(x=x, held_out=held_out))


def streamed(table: Table) -> Run:
    """Runs the default fit on batches; a million rows need four times the memory."""
    import jboost as jb

    def run():
        source = jb.streams.array_batches(table.x, table.y, batch_rows=BATCH)
        rows = jb.stream(source, memory="256 MiB")
        model, _ = jb.fit(rows, num_rounds=ROUNDS, max_depth=DEPTH, learning_rate=RATE)
        return jb.predict(model, table.held_out)

    return run


def single_tree(table: Table) -> Run:
    """Fits one least-squares tree on all values."""
    import jboost as jb

    def run():
        tree = jb.cart.fit_tree(table.x, table.y, max_depth=10, min_child_samples=5)
        return jb.predict(tree, table.held_out)

    return run


def importance(table: Table) -> Run:
    """Runs the default fit and permutation importance with one repeat."""
    import jboost as jb

    def run():
        model, _ = jb.fit(
            table.x, table.y, num_rounds=ROUNDS, max_depth=DEPTH, learning_rate=RATE
        )
        jb.explanation.permutation_importance(
            model, table.held_out, table.truth.astype(np.float32), num_repeats=1
        )
        return jb.predict(model, table.held_out)

    return run


def all_at_once(table: Table) -> Run:
    """Computes thresholds of a table in memory."""
    import jboost as jb

    return lambda: np.asarray(jb.fit_bins(table.x).thresholds)


def sketched(table: Table) -> Run:
    """Computes thresholds of batches."""
    import jboost as jb

    def run():
        sketch = jb.sketches.make_sketch(FEATURES)
        for first in range(0, len(table.x), BATCH):
            sketch = jb.sketches.update_sketch(sketch, table.x[first : first + BATCH])
        return np.asarray(jb.sketches.bins_from_sketch(sketch).thresholds)

    return run


def xgboost(table: Table, threads: int, **settings) -> Run:
    """Runs XGBoost, whose squared error is half of ours: its lambda 1 is our l2 1."""
    import xgboost as xgb

    settings = {
        "tree_method": "hist", "max_depth": DEPTH, "eta": RATE, "max_bin": BINS,
        "nthread": threads, **settings,
    }  # fmt: skip

    def run():
        data = xgb.DMatrix(table.x, table.y, nthread=threads)
        model = xgb.train(settings, data, ROUNDS)
        return model.predict(xgb.DMatrix(table.held_out, nthread=threads))

    return run


def xgboost_sparse(table: Table, threads: int) -> Run:
    """Runs XGBoost on a sparse matrix."""
    x, held_out = as_sparse(table.x), as_sparse(table.held_out)
    return xgboost(table._replace(x=x, held_out=held_out), threads)


def lightgbm(table: Table, threads: int, **settings) -> Run:
    """Runs LightGBM, with as many leaves as the depth allows by default."""
    import lightgbm as lgb

    settings = {
        "max_depth": DEPTH, "num_leaves": 2**DEPTH - 1, "learning_rate": RATE,
        "max_bin": BINS - 1, "num_threads": threads, "verbose": -1, "lambda_l2": 1.0,
        "min_data_in_leaf": 1, **settings,
    }  # fmt: skip

    def run():
        model = lgb.train(settings, lgb.Dataset(table.x, table.y), ROUNDS)
        return model.predict(table.held_out)

    return run


def sklearn_tree(table: Table, threads: int) -> Run:
    """Fits one tree of scikit-learn, on one thread."""
    from sklearn.tree import DecisionTreeRegressor

    def run():
        tree = DecisionTreeRegressor(max_depth=10, min_samples_leaf=5)
        return tree.fit(table.x, table.y).predict(table.held_out)

    return run


def sklearn_boosting(table: Table, threads: int, **settings) -> Run:
    """Runs Friedman's algorithms in scikit-learn, on one thread."""
    from sklearn.ensemble import GradientBoostingRegressor

    def run():
        model = GradientBoostingRegressor(
            n_estimators=ROUNDS, learning_rate=RATE, max_depth=DEPTH, **settings
        )
        return model.fit(table.x, table.y).predict(table.held_out)

    return run


SIGN_LIST = [SIGNS.get(feature, 0) for feature in range(FEATURES)]
# What runs, what its time and error are compared with, and peers by name.
METHODS: dict[str, tuple[Callable[..., Run], str, dict[str, Callable[..., Run]]]] = {
    "default": (boosted, "default", {"xgboost": xgboost, "lightgbm": lightgbm}),
    "ls_tree_boost": (
        partial(boosted, recipe="ls_tree_boost"), "default",
        {"sklearn": sklearn_boosting},
    ),
    "lad_tree_boost": (partial(boosted, recipe="lad_tree_boost"), "default", {}),
    "m_tree_boost": (partial(boosted, recipe="m_tree_boost"), "default", {}),
    "gradient_boost": (partial(boosted, recipe="gradient_boost"), "default", {}),
    "xgboost": (
        partial(boosted, recipe="xgboost"), "default", {"xgboost": xgboost},
    ),
    "stochastic": (
        partial(boosted, recipe="ls_tree_boost", subsample=0.5), "default",
        {"sklearn": partial(sklearn_boosting, subsample=0.5)},
    ),
    "tree": (single_tree, "default", {"sklearn": sklearn_tree}),
    "curvature": (
        partial(boosted, candidate_weights="curvature", max_bins=64), "default",
        {"xgboost": partial(xgboost, tree_method="approx", max_bin=64)},
    ),
    "local": (partial(boosted, candidates="local", max_bins=64), "default", {}),
    "exact": (
        partial(boosted, candidates="exact"), "default",
        {"xgboost": partial(xgboost, tree_method="exact")},
    ),
    "monotone": (
        partial(boosted, monotone=SIGNS), "default",
        {
            "xgboost": partial(xgboost, monotone_constraints=tuple(SIGN_LIST)),
            "lightgbm": partial(lightgbm, monotone_constraints=SIGN_LIST),
        },
    ),
    "interactions": (
        partial(boosted, interactions=GROUPS), "default",
        {
            "xgboost": partial(xgboost, interaction_constraints=GROUPS),
            "lightgbm": partial(lightgbm, interaction_constraints=GROUPS),
        },
    ),
    "l1, max_delta_step": (
        partial(boosted, l1=2.0, max_delta_step=1.0), "default",
        {"xgboost": partial(xgboost, alpha=2.0, max_delta_step=1.0)},
    ),
    "max_leaves": (
        partial(boosted, max_leaves=31), "default",
        {
            "xgboost": partial(xgboost, max_leaves=31, grow_policy="lossguide"),
            "lightgbm": partial(lightgbm, num_leaves=31),
        },
    ),
    "stream": (streamed, "default", {}),
    "sparse": (sparse, "dense with gaps", {"xgboost": xgboost_sparse}),
    "dense with gaps": (boosted, "dense with gaps", {}),
    "importance": (importance, "default", {}),
    "sketch": (sketched, "fit_bins", {}),
    "fit_bins": (all_at_once, "fit_bins", {}),
}  # fmt: skip
GAPPED, THRESHOLDS = ("sparse", "dense with gaps"), ("sketch", "fit_bins")


def peak_memory() -> float:
    """Returns the peak memory of this process in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def measure(method: str, peer: str, rows: int, threads: int) -> dict[str, float]:
    """Takes one reading in this process."""
    table = make_table(rows, 0.9 if method in GAPPED else 0.0)
    make, _, peers = METHODS[method]
    run = peers[peer](table, threads) if peer else make(table)
    before = peak_memory()
    np.asarray(run())
    begun = time.perf_counter()
    scores = np.asarray(run())
    seconds = time.perf_counter() - begun
    error = np.nan
    if method not in THRESHOLDS:
        error = float(np.mean((scores - table.truth) ** 2))
    return dict(seconds=seconds, megabytes=peak_memory() - before, mse=error)


def read_one(method: str, peer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Takes one reading in a process of its own."""
    command = [sys.executable, __file__, "--rows", str(options.rows), "--threads",
               str(options.threads), "--reading", method, peer]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{method} {peer} failed:\n{done.stderr[-2000:]}")
    return dict(method=method, peer=peer, **json.loads(done.stdout.splitlines()[-1]))


def summarize(readings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns medians, and medians of the ratios of single turns."""

    def take(key, method, peer):
        here = (method, peer)
        return np.array([r[key] for r in readings if (r["method"], r["peer"]) == here])

    def compare(key, one, other):
        return float(np.median(take(key, *one) / take(key, *other)))

    rows = []
    for one in dict.fromkeys((r["method"], r["peer"]) for r in readings):
        method, peer = one
        base, own = (METHODS[method][1], ""), (method, "")
        row = dict(method=method, peer=peer, base=base[0])
        for key in ("seconds", "megabytes", "mse"):
            row[key] = float(np.median(take(key, *one)))
        row["time_to_base"] = compare("seconds", one, base)
        row["error_to_base"] = compare("mse", one, base)
        row["jboost_to_peer"] = compare("seconds", own, one) if peer else None
        rows.append(row)
    return rows


def print_table(summary: list[dict[str, Any]]) -> None:
    """Prints one line for each method, and one for each peer that has it."""
    print(f"{'method':<19} {'by':<9} {'seconds':>8} {'MB':>7} {'error':>8} "
          f"{'time':>6} {'error':>6}  {'jboost':>6}")  # fmt: skip
    print(f"{'':<55}{'to base':>12}  {'to it':>7}")
    for row in summary:
        beside = row["jboost_to_peer"]
        print(
            f"{row['method']:<19} {row['peer'] or 'jboost':<9} {row['seconds']:8.3f} "
            f"{row['megabytes']:7.0f} {row['mse']:8.4f} {row['time_to_base']:6.2f} "
            f"{row['error_to_base']:6.2f}  " + (f"{beside:6.2f}" if beside else "")
        )


def conclude(summary: list[dict[str, Any]]) -> str:
    """Returns the result in one sentence."""
    own = [r for r in summary if not r["peer"] and r["method"] != r["base"]]
    beside = [r for r in summary if r["peer"]]
    said = []
    if own:
        most = max(own, key=lambda row: row["time_to_base"])
        said.append(
            f"the slowest compared with its baseline is {most['method']} "
            f"({most['time_to_base']:.2f} times the time)"
        )
    if beside:
        faster = sum(row["jboost_to_peer"] < 1 for row in beside)
        said.append(f"jboost is faster in {faster} of {len(beside)} pairs with a peer")
    return f"Found: {'; '.join(said) or 'a single method, without a baseline'}."


def main() -> None:
    """Measures and prints."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--rows",
        type=int,
        default=100_000,
        help="training rows; a quarter as many are held out",
    )
    add("--turns", type=int, default=3, help="readings of each method")
    add("--threads", type=int, default=os.cpu_count(), help="of the peers")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--reading", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reading:
        print(json.dumps(measure(*options.reading, options.rows, options.threads)))
        return
    # The baselines of the methods run as well.
    bases = [METHODS[name][1] for name in options.methods]
    names = [name for name in METHODS if name in {*bases, *options.methods}]
    pairs = [(name, peer) for name in names for peer in ("", *METHODS[name][2])]
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads")
    print(f"{versions}; {options.rows} rows, {FEATURES} columns, {ROUNDS} rounds")
    todo = [pair for _ in range(options.turns) for pair in pairs]
    readings = [read_one(*pair, options) for pair in tqdm(todo, unit="run")]
    summary = summarize(readings)
    print_table(summary)
    print(f"\n{conclude(summary)}")
    numbers = dict(
        rows=options.rows, versions=versions, readings=readings, summary=summary
    )
    write_json(options.out / "methods.json", numbers)


if __name__ == "__main__":
    main()
