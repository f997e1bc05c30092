# SPDX-License-Identifier: Apache-2.0
"""Which measure of importance finds the features that matter?

The target is Friedman's (1991) function of five of ten uniform features, with noise. An
eleventh column is x3 with additional noise (it matters only as a proxy), and a twelfth
has 2 values and no effect. The question is which share of each measure's total falls on
columns that do not enter the function. Bars are means over seeds, with standard
deviations.

    python experiments/importance.py
    python experiments/importance.py --data table.parquet --target y

In a table from a file, columns of text are categorical features, and rows without a
target are dropped. Shares refer to the sum of magnitudes, since the permutation
importance of a feature can be negative. Written to --out: importance.png and
importance.json.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from experiment_tools import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    describe_machine,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)
from tqdm import tqdm

import jboost as jb

KINDS = ("improvement", "gain", "cover", "splits", "permutation")
COLORS = (BLACK, BLUE, ORANGE, GREEN, PINK)
WITHOUT_EFFECT = ("x6", "x7", "x8", "x9", "x10", "x3 again", "coin")


def make_table(seed, rows):
    """Returns named features, and targets with a signal-to-noise ratio near 5."""
    random = np.random.default_rng(seed)
    x = random.uniform(size=(rows, 10))
    signal = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = signal + 10 * x[:, 3] + 5 * x[:, 4] + random.normal(size=rows)
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(1, 11)])
    frame["x3 again"] = frame["x3"] + random.normal(0, 0.2, rows)
    frame["coin"] = random.integers(0, 2, rows)
    return frame, y


def read_table(path, target):
    """Returns features, including categories, and targets of a file."""
    read = pd.read_csv if ".csv" in path.suffixes else pd.read_parquet
    table = read(path)
    if target not in table:
        raise SystemExit(f"--target must be one of {list(table)}, got {target!r}")
    if not pd.api.types.is_numeric_dtype(table[target]):
        raise SystemExit(f"--target must hold numbers, {target!r} does not")
    table = table[table[target].notna()]
    y = table.pop(target).to_numpy(np.float64)
    text = table.select_dtypes(exclude="number").columns
    if len(text):
        print(f"categorical columns: {', '.join(map(str, text))}")
    return table, y


def measure(x, y, seed):
    """Returns shares of the total [kinds, F]; permutation uses the held-out half."""
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
        jb.explanation.permutation_importance(
            model, x.iloc[test], y[test], num_repeats=3, seed=seed
        )
    )
    values = np.array([importance.values for importance in found])
    total = np.abs(values).sum(axis=1, keepdims=True)
    shares = np.divide(values, total, out=np.zeros_like(values), where=total > 0)
    return shares, history.validation_loss.min()


def print_row(name, shares):
    """Prints means and standard deviations over seeds of [seeds, kinds]."""
    cells = zip(shares.mean(axis=0), shares.std(axis=0), strict=True)
    print(f"{name:20.20}" + "".join(f"{m:10.3f} +-{s:4.3f}" for m, s in cells))


def draw(names, shares, path):
    """Draws bars by feature, one color per measure."""
    figure, [[axes]] = open_figure(size=(10, 4.5))
    place = np.arange(len(names))
    for number, (kind, color) in enumerate(zip(KINDS, COLORS, strict=True)):
        axes.bar(
            place + (number - 2) * 0.16,
            shares[:, number].mean(axis=0),
            0.15,
            yerr=shares[:, number].std(axis=0),
            color=color,
            label=kind,
            error_kw=dict(lw=0.8),
        )
    axes.set_xticks(place, names, rotation=30, ha="right")
    axes.set_ylabel("share of the total")
    axes.legend(frameon=False)
    save_figure(figure, path)


def conclude(names, shares, generated):
    """Returns the result in one sentence."""
    mean = shares.mean(axis=0)
    if not generated:
        top = [
            f"{kind}: {names[f]}"
            for kind, f in zip(KINDS, mean.argmax(axis=1), strict=True)
        ]
        return f"Found: the most important feature by {'; by '.join(top)}."
    idle = np.abs(mean[:, [names.index(name) for name in WITHOUT_EFFECT]].sum(axis=1))
    best, worst = idle.argmin(), idle.argmax()
    return (
        f"Found: features without effect have the smallest share by {KINDS[best]} "
        f"({idle[best]:.3f}) and the largest by {KINDS[worst]} ({idle[worst]:.3f})."
    )


def main():
    """Prints a table, and writes a PNG and a JSON."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, help="parquet or CSV file (default: generated)"
    )
    parser.add_argument("--target", help="the column to predict, with --data")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    if (options.data is None) != (options.target is None):
        parser.error("--data and --target go together")
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    table = options.data and read_table(options.data, options.target)
    shares, losses = [], []
    for seed in tqdm(range(options.seeds), unit="seed"):
        x, y = table or make_table(seed, options.rows)
        share, loss = measure(x, y, seed)
        shares.append(share)
        losses.append(loss)
    names, shares = list(x.columns), np.array(shares)
    print(f"held-out squared error {np.mean(losses):.4g} +- {np.std(losses):.2g}")
    print(f"{'':20}" + "".join(f"{kind:>16}" for kind in KINDS))
    for f, name in enumerate(names):
        print_row(name, shares[:, :, f])
    if options.data is None:
        idle = [names.index(name) for name in WITHOUT_EFFECT]
        print_row("no effect", shares[:, :, idle].sum(axis=2))
    print(f"\n{conclude(names, shares, options.data is None)}")
    result = {
        "arguments": vars(options), **describe_machine(), "features": names,
        "kinds": KINDS, "shares": shares, "held_out_loss": losses,
    }  # fmt: skip
    write_json(options.out / "importance.json", result)
    draw(names, shares, options.out / "importance.png")


if __name__ == "__main__":
    main()
