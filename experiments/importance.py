# SPDX-License-Identifier: Apache-2.0
"""Which measure of importance finds the features that matter?

Friedman's (1991) function of five of ten uniform features, with noise; an eleventh
column is x3 with noise on top (it matters only as a stand-in), and a twelfth has 2
values and nothing to say. What is left of each measure's total on the columns that do
not enter the function? Bars are means over seeds, with standard deviations.

    python experiments/importance.py
    python experiments/importance.py --data table.parquet --target y
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from tqdm import tqdm

import jboost as jb

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = ("improvement", "gain", "cover", "splits", "permutation")
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7")
WITHOUT_EFFECT = ("x6", "x7", "x8", "x9", "x10", "x3 again", "coin")


def make_table(seed, rows):
    """Features with names, and targets of signal-to-noise ratio near 5."""
    random = np.random.default_rng(seed)
    x = random.uniform(size=(rows, 10))
    signal = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = signal + 10 * x[:, 3] + 5 * x[:, 4] + random.normal(size=rows)
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(1, 11)])
    frame["x3 again"] = frame["x3"] + random.normal(0, 0.2, rows)
    frame["coin"] = random.integers(0, 2, rows)
    return frame, y


def measure(x, y, seed):
    """Shares of the total [kinds, F]; permutation on the held-out half."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    model, history = jb.fit(
        x.iloc[train],
        y[train],
        validation=(x.iloc[test], y[test]),
        num_rounds=200,
        max_depth=4,
        early_stopping_rounds=20,
    )
    found = [jb.feature_importance(model, kind) for kind in KINDS[:-1]]
    found.append(
        jb.permutation_importance(
            model, x.iloc[test], y[test], num_repeats=3, seed=seed
        )
    )
    values = np.array([importance.values for importance in found])
    return values / values.sum(axis=1, keepdims=True), history.validation_loss.min()


def print_row(name, shares):
    """Means and standard deviations over seeds of [seeds, kinds]."""
    cells = zip(shares.mean(axis=0), shares.std(axis=0), strict=True)
    print(f"{name:12}" + "".join(f"{m:10.3f} +-{s:4.3f}" for m, s in cells))


def draw(names, shares, path):
    """Bars by feature, one colour per measure."""
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    place = np.arange(len(names))
    for number, (kind, colour) in enumerate(zip(KINDS, COLOURS, strict=True)):
        axes.bar(
            place + (number - 2) * 0.16,
            shares[:, number].mean(axis=0),
            0.15,
            yerr=shares[:, number].std(axis=0),
            color=colour,
            label=kind,
            error_kw=dict(lw=0.8),
        )
    axes.set_xticks(place, names, rotation=30, ha="right")
    axes.set_ylabel("share of the total")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main():
    """Prints a table and writes results/importance.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a parquet or CSV table instead")
    parser.add_argument("--target", help="its target column")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    shares, losses = [], []
    for seed in tqdm(range(options.seeds), unit="seed"):
        if options.data is None:
            x, y = make_table(seed, options.rows)
        else:
            read = pd.read_csv if options.data.suffix == ".csv" else pd.read_parquet
            table = read(options.data).select_dtypes("number")
            y = table.pop(options.target).to_numpy(np.float64)
            x = table
        share, loss = measure(x, y, seed)
        shares.append(share)
        losses.append(loss)
    names, shares = list(x.columns), np.array(shares)
    print(f"held-out squared error {np.mean(losses):.4g} +- {np.std(losses):.2g}")
    print(f"{'':12}" + "".join(f"{kind:>16}" for kind in KINDS))
    for f, name in enumerate(names):
        print_row(name, shares[:, :, f])
    if options.data is None:
        idle = [names.index(name) for name in WITHOUT_EFFECT]
        print_row("no effect", shares[:, :, idle].sum(axis=2))
    Path("results").mkdir(exist_ok=True)
    draw(names, shares, "results/importance.png")


if __name__ == "__main__":
    main()
