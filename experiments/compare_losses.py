# SPDX-License-Identifier: Apache-2.0
"""Does L1, L2 or Huber predict best on this table, and after its targets are corrupted?

Each split holds out part of the rows at random and trains on the others with L2
(squared error), L1 (absolute error), Huber with a fixed delta, and Huber with a delta
that is estimated again in each round (Friedman's M_TreeBoost, the 0.9-quantile of
|residual|): once on clean targets, once with a share of the training targets corrupted.
Held-out targets are not changed. All losses use the same trees, rounds and row limits.

    python experiments/compare_losses.py
    python experiments/compare_losses.py --data FILE --target COLUMN --rounds 400

Without --data the table is scikit-learn's diabetes progression (442 rows, no download).
FILE is CSV or parquet; columns that are not numbers become ranks of their sorted
values, and rows without a target are dropped. Written to --out: a PNG with learning
curves, and a JSON with all numbers, the versions and the device.

- Huber's fixed delta is the 0.5-quantile of |y - median(y)| over the training targets
  (--huber-quantile). Outliers hardly change it, and if a model explains about three
  quarters of the variance, it is close to Huber's own 1.345 standard deviations of the
  residuals.
- The noise added to corrupted targets is 3 interquartile ranges times a Student t
  variable with 2 degrees of freedom. It is symmetric, so means and medians do not
  change, and its variance is infinite.
- Standard errors are sqrt((1 / splits + test rows / training rows) variance of splits)
  (Nadeau and Bengio 2003), because splits share rows and plain ones would be too small.
  Splits are paired, so look at the errors of the differences to L2.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from experiment_tools import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    describe_machine,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)
from tqdm import tqdm

import jboost as jb

LOSSES = ("L2", "L1", "Huber", "adaptive Huber")
METRICS = ("MAE", "RMSE", "median AE")
STYLES = {
    "L2": (BLACK, "-"),
    "L1": (ORANGE, "--"),
    "Huber": (BLUE, "-."),
    "adaptive Huber": (GREEN, ":"),
}


class Table(NamedTuple):
    """A data set."""

    name: str
    x: np.ndarray  # [N, F] float32, NaN = missing
    target: np.ndarray  # [N] float32


# ---- data ---------------------------------------------------------------------------


def load_table(path: Path | None, target: str | None) -> Table:
    """Returns scikit-learn's diabetes table, or the table in a file."""
    if path is None:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        return Table("diabetes", x.astype(np.float32), y.astype(np.float32))
    frame = pd.read_csv(path) if ".csv" in path.suffixes else pd.read_parquet(path)
    if target not in frame:
        raise SystemExit(f"--target must be one of {list(frame)}, got {target!r}")
    frame = frame[frame[target].notna()]
    if not pd.api.types.is_numeric_dtype(frame[target]):
        raise SystemExit(f"--target must hold numbers, {target!r} does not")
    features = [encode(column) for _, column in frame.drop(columns=target).items()]
    x = np.stack(features, axis=1).astype(np.float32)
    return Table(path.stem, x, frame[target].to_numpy(np.float32))


def encode(column: pd.Series) -> np.ndarray:
    """Returns numbers as they are, anything else as ranks; NaN where missing."""
    if pd.api.types.is_numeric_dtype(column):
        return column.to_numpy(np.float64, na_value=np.nan)
    codes, _ = pd.factorize(column.astype(object), sort=True)
    return np.where(codes < 0, np.nan, codes)


def split_rows(num_rows: int, seed: list[int], share: float) -> tuple:
    """Returns the training rows and the held-out rows."""
    order = np.random.default_rng(seed).permutation(num_rows)
    num_test = max(1, round(share * num_rows))
    return order[num_test:], order[:num_test]


def corrupt(target: np.ndarray, share: float, seed: list[int]) -> np.ndarray:
    """Returns targets, a share of them with heavy-tailed noise added."""
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(len(target))[: round(share * len(target))]
    low, high = np.quantile(target, [0.25, 0.75])
    noise = np.zeros(len(target))
    noise[chosen] = 3 * (high - low) * generator.standard_t(2, len(chosen))
    return (target + noise).astype(np.float32)


# ---- training -----------------------------------------------------------------------


def make_loss(name: str, target: np.ndarray, quantile: float) -> tuple:
    """Returns the loss, and its delta if that is fixed."""
    if name == "Huber":
        delta = float(np.quantile(np.abs(target - np.median(target)), quantile))
        if delta == 0:
            raise SystemExit("Huber's delta would be 0; raise --huber-quantile")
        return partial(jb.losses.huber, delta=delta), delta
    simple = {"L2": jb.losses.squared_error, "L1": jb.losses.absolute_error}
    return simple.get(name) or jb.losses.make_adaptive_huber(alpha=0.9), None


def measure(scores: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the METRICS of scores [R, N] as an array [metric, R]."""
    error = np.abs(np.asarray(scores, np.float64) - target)
    rmse = np.sqrt(np.mean(error**2, axis=1))
    return np.stack([error.mean(axis=1), rmse, np.median(error, axis=1)])


def train_all(table: Table, options: argparse.Namespace) -> tuple[dict, dict]:
    """Returns {(targets, loss): [split, metric, R]} and Huber's deltas."""
    kinds = {"clean": 0.0, "contaminated": options.contaminate}
    kinds = {k: share for k, share in kinds.items() if k == "clean" or share > 0}
    curves = {(kind, name): [] for kind in kinds for name in LOSSES}
    deltas: dict[str, list] = {kind: [] for kind in kinds}
    bar = tqdm(total=options.splits * len(curves), unit="fit", smoothing=0)
    for split in range(options.splits):
        seed = [options.seed, split]
        train, test = split_rows(len(table.x), seed, options.test_share)
        for kind, name in curves:
            bar.set_description(f"split {split + 1}, {kind}, {name}")
            target = corrupt(table.target[train], kinds[kind], [*seed, 1])
            loss, delta = make_loss(name, target, options.huber_quantile)
            deltas[kind] += [] if delta is None else [delta]
            model, _ = jb.fit(table.x[train], target, loss, **settings(options))
            scores = jb.staged_predict(model, table.x[test])
            curves[kind, name].append(measure(scores, table.target[test]))
            bar.update()
    bar.close()
    return {key: np.stack(splits) for key, splits in curves.items()}, deltas


def settings(options: argparse.Namespace) -> dict:
    """Returns the settings that all losses share."""
    return {
        "num_rounds": options.rounds,
        "learning_rate": options.learning_rate,
        "max_depth": options.max_depth,
        "min_child_samples": options.min_child_samples,
        "seed": options.seed,
    }


# ---- the report ---------------------------------------------------------------------


def standard_error(values: np.ndarray, test_share: float) -> np.ndarray:
    """Returns the corrected standard error of the mean over axis 0."""
    factor = 1 / len(values) + test_share / (1 - test_share)
    return np.sqrt(factor * np.var(values, axis=0, ddof=1))


def summarize(curves: dict, test_share: float) -> list[dict]:
    """Returns a row per targets and loss: metrics after the last round."""
    rows = []
    for (kind, name), curve in curves.items():
        last, base = curve[:, :, -1], curves[kind, "L2"][:, :, -1]
        row = {"targets": kind, "loss": name}
        for i, metric in enumerate(METRICS):
            row[metric] = {
                "mean": last[:, i].mean(),
                "standard_error": standard_error(last[:, i], test_share),
                "minus_L2": (last - base)[:, i].mean(),
                "minus_L2_standard_error": standard_error(
                    (last - base)[:, i], test_share
                ),
                "splits": last[:, i].tolist(),
                "curve": curve[:, i].mean(axis=0).tolist(),
            }
        rows.append(row)
    return rows


def print_report(rows: list[dict]) -> None:
    """Prints means, and differences to L2, with standard errors."""
    for kind in dict.fromkeys(row["targets"] for row in rows):
        chosen = [row for row in rows if row["targets"] == kind]
        print(f"\n{kind} training targets: held-out error +- standard error\n")
        print_block(chosen, "mean", "standard_error")
        print("\nminus L2's, split by split:\n")
        print_block(chosen[1:], "minus_L2", "minus_L2_standard_error")


def print_block(rows: list[dict], value: str, error: str) -> None:
    """Prints one number and its error per loss and metric."""
    print(f"{'':16}" + "".join(f"{metric:>22}" for metric in METRICS))
    for row in rows:
        cells = [f"{row[m][value]:.4g} +- {row[m][error]:.2g}" for m in METRICS]
        print(f"{row['loss']:16}" + "".join(f"{cell:>22}" for cell in cells))


def plot_curves(curves: dict, title: str, test_share: float, path: Path) -> None:
    """Draws held-out MAE by round: a panel per kind of targets, a line per loss."""
    kinds = list(dict.fromkeys(kind for kind, _ in curves))
    figure, axes = open_figure(1, len(kinds), (5.2 * len(kinds), 4.4))
    for axis, kind in zip(axes[0], kinds, strict=True):
        for name in LOSSES:
            draw_curve(axis, name, curves[kind, name][:, 0], test_share)
        axis.set_ylim(*late_limits([curves[kind, n][:, 0] for n in LOSSES], test_share))
        axis.set_title(f"{kind} training targets", fontsize=11)
        axis.set_xlabel("round")
        axis.margins(x=0.01)
    axes[0, 0].set_ylabel("held-out mean absolute error")
    figure.suptitle(title, fontsize=12)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def late_limits(curves: list[np.ndarray], test_share: float) -> tuple[float, float]:
    """Returns y limits that show the bands after the first tenth of the rounds.

    The first rounds are steep and alike for all losses, and would hide differences.
    """
    mean = np.stack([curve.mean(axis=0) for curve in curves])
    error = np.stack([standard_error(curve, test_share) for curve in curves])
    first = mean.shape[1] // 10
    low, high = (mean - error)[:, first:].min(), (mean + error)[:, first:].max()
    room = 0.05 * (high - low) or 1.0
    return float(low - room), float(high + room)


def draw_curve(axis, name: str, curve: np.ndarray, test_share: float) -> None:
    """Draws the mean over splits and a band of one standard error."""
    color, dashes = STYLES[name]
    rounds, mean = np.arange(1, curve.shape[1] + 1), curve.mean(axis=0)
    axis.plot(rounds, mean, dashes, color=color, linewidth=2, label=name)
    error = standard_error(curve, test_share)
    axis.fill_between(rounds, mean - error, mean + error, color=color, alpha=0.1, lw=0)


def conclude(rows: list[dict]) -> str:
    """Returns the result in one sentence."""
    said = []
    for kind in dict.fromkeys(row["targets"] for row in rows):
        chosen = [row for row in rows if row["targets"] == kind]
        best = min(chosen, key=lambda row: row["MAE"]["mean"])
        words = f"{best['loss']} has the lowest MAE on {kind} targets"
        if best["loss"] != "L2":
            value, error = (
                best["MAE"][name] for name in ("minus_L2", "minus_L2_standard_error")
            )
            words += f" ({value:+.3g} +- {error:.2g} against L2)"
        said.append(words)
    return f"Found: {'; '.join(said)}."


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line, checked."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="CSV or parquet file (default: diabetes)")
    add("--target", help="the column to predict, with --data")
    add("--contaminate", type=float, default=0.1, help="share of corrupted targets")
    add("--huber-quantile", type=float, default=0.5, help="of Huber's fixed delta")
    add("--splits", type=int, default=20, help="at least 2")
    add("--test-share", type=float, default=0.2)
    add("--rounds", type=int, default=150)
    add("--learning-rate", type=float, default=0.05)
    add("--max-depth", type=int, default=3)
    add("--min-child-samples", type=int, default=20, help="of a leaf, for every loss")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 <= options.contaminate < 1:
        parser.error("--contaminate must lie in [0, 1)")
    if not 0 < options.test_share < 1 or not 0 < options.huber_quantile < 1:
        parser.error("--test-share and --huber-quantile must lie in (0, 1)")
    if options.splits < 2 or options.rounds < 1:
        parser.error("--splits must be at least 2, and --rounds at least 1")
    if (options.data is None) != (options.target is None):
        parser.error("--data and --target go together")
    return options


def main() -> None:
    """Trains everything, prints the report, and writes the PNG and the JSON."""
    options = parse_options()
    table = load_table(options.data, options.target)
    size = f"{table.x.shape[0]} rows, {table.x.shape[1]} features"
    print(f"{table.name}: {size}; every loss: {settings(options)}")
    curves, deltas = train_all(table, options)
    rows = summarize(curves, options.test_share)
    print_report(rows)
    print(f"\n{conclude(rows)}")
    result = {
        "table": {"name": table.name, "size": size},
        "arguments": vars(options),
        **describe_machine(),
        "huber_delta": deltas,
        "results": rows,
    }
    name = f"compare_losses_{table.name}"
    write_json(options.out / f"{name}.json", result)
    mean_of = f"mean of {options.splits} splits, band: one standard error"
    title = f"{table.name} ({size}), {mean_of}"
    plot_curves(curves, title, options.test_share, options.out / f"{name}.png")


if __name__ == "__main__":
    main()
