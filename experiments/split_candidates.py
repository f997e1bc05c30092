# SPDX-License-Identifier: Apache-2.0
"""How coarse may split candidates be? Held-out loss against eps.

Candidates are a share eps of the weight apart. They are chosen once ("global"), once
per tree by curvature ("per tree"), or again in each node ("local"); "exact" tries every
distinct value. Chen and Guestrin (2016, figure 3) found on Higgs that local candidates
may be coarser than global ones, and that fine ones are as good as exact ones.

    python experiments/split_candidates.py
    python experiments/split_candidates.py --data FILE --target COLUMN --rounds 200

Without --data each seed draws a new table: two classes, separated by narrow bands of
features with skewed distributions. FILE is CSV or parquet; columns that are not
numbers become ranks of their sorted values; each seed splits it again. A target of two
values is learned by the logistic loss, any other by squared error. Written to --out: a
PNG with curves of held-out loss and the final loss against eps, and a JSON with all
numbers, the versions and the device.

- Candidates are the ends of at most round(1 / eps) bins.
- Seeds are paired: all methods get the same rows. Errors are standard errors over
  seeds; with --data, whose splits share rows, they are those of Nadeau and Bengio
  (2003).
- Times are those of whole calls of fit, without compilation, divided by the number of
  rounds. The table shows the median over seeds of the ratio to the finest global
  candidates. The methods of one seed run one after the other, so that other load on
  the machine affects all of them.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import compare_losses
import numpy as np
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

KINDS = {
    "global": dict(candidates="global"),
    "per tree": dict(candidates="global", candidate_weights="curvature"),
    "local": dict(candidates="local", candidate_weights="curvature"),
}
COLORS = {"global": BLUE, "per tree": GREEN, "local": ORANGE}
DASHES = ("-", "--", "-.", ":")
EXACT = ("exact", 0.0)


class Table(NamedTuple):
    """Rows to train on and rows held out; NaN = missing."""

    x: np.ndarray
    target: np.ndarray
    test_x: np.ndarray
    test_target: np.ndarray


# ---- data ---------------------------------------------------------------------------


def draw_table(seed: int, num_rows: int, num_test: int) -> Table:
    """Returns a new table: log-normal features, classes by narrow bands of them."""
    rng = np.random.default_rng(seed)
    size = num_rows + num_test
    latent = rng.normal(size=(size, 8))
    waves = np.sin(9 * latent[:, 0]) * (latent[:, 1] > 0) + np.sin(7 * latent[:, 2])
    score = 1.5 * waves + latent[:, 3] * latent[:, 4] + 0.5 * latent[:, 5]
    y = (rng.random(size) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)
    x = np.exp(latent).astype(np.float32)
    return Table(x[:num_rows], y[:num_rows], x[num_rows:], y[num_rows:])


def split_table(table: compare_losses.Table, seed: int, share: float) -> Table:
    """Returns a random split of a file's rows."""
    order = np.random.default_rng(seed).permutation(len(table.x))
    cut = max(1, round(share * len(order)))
    x, y = table.x[order], table.target[order]
    if len(np.unique(y)) == 2:
        y = (y == y.max()).astype(np.float32)
    return Table(x[cut:], y[cut:], x[:cut], y[:cut])


# ---- training -----------------------------------------------------------------------


def train(table: Table, method: tuple, rounds: int, options: argparse.Namespace):
    """Returns held-out loss by round, and seconds per round."""
    kind, eps = method
    words = dict(candidates="exact") if method == EXACT else KINDS[kind]
    bins = {} if method == EXACT else {"max_bins": 1 + round(1 / eps)}
    binary = len(np.unique(table.target)) == 2
    start = time.perf_counter()
    _, history = jb.fit(
        table.x,
        table.target,
        jb.losses.logistic if binary else jb.losses.squared_error,
        validation=(table.test_x, table.test_target),
        num_rounds=rounds,
        subsample=1.0,
        rows_per_threshold=0,
        learning_rate=options.learning_rate,
        max_depth=options.max_depth,
        curvature="exact",
        leaf_solver="newton",
        **words,
        **bins,
    )
    return history.validation_loss, (time.perf_counter() - start) / rounds


def run(options: argparse.Namespace) -> tuple[dict, dict]:
    """Returns {method: [seed, round]} of losses and {method: [seed]} of seconds."""
    methods = [(kind, eps) for kind in KINDS for eps in options.eps] + [EXACT]
    given = options.data and compare_losses.load_table(options.data, options.target)
    losses = {method: [] for method in methods}
    seconds = {method: [] for method in methods}
    bar = tqdm(total=options.seeds * len(methods), unit="fit", smoothing=0)
    for seed in range(options.seeds):
        if given is None:
            table = draw_table(seed, options.rows, options.test_rows)
        else:
            table = split_table(given, seed, options.test_share)
        for method in methods:
            bar.set_description(f"seed {seed}, {name(method)}")
            if seed == 0:
                train(table, method, 1, options)  # compiles
            curve, spent = train(table, method, options.rounds, options)
            losses[method].append(curve)
            seconds[method].append(spent)
            bar.update()
    bar.close()
    return {m: np.stack(c) for m, c in losses.items()}, seconds


# ---- the report ---------------------------------------------------------------------


def name(method: tuple) -> str:
    """Returns the name of a method."""
    return "exact" if method == EXACT else f"{method[0]}, eps {method[1]:g}"


def standard_error(values: np.ndarray, shared: float) -> np.ndarray:
    """Returns the standard error of the mean over axis 0."""
    return np.sqrt((1 / len(values) + shared) * np.var(values, axis=0, ddof=1))


def summarize(losses: dict, seconds: dict, shared: float) -> list[dict]:
    """Returns a row per method: final loss, difference to exact, time."""
    finest = min((m for m in losses if m[0] == "global"), key=lambda m: m[1])
    base = np.array(seconds[finest])
    rows = []
    for method, curve in losses.items():
        last, difference = curve[:, -1], curve[:, -1] - losses[EXACT][:, -1]
        rows.append(
            {
                "method": name(method),
                "loss": last.mean(),
                "error": standard_error(last, shared),
                "minus_exact": difference.mean(),
                "minus_exact_error": standard_error(difference, shared),
                "best_loss": curve.mean(axis=0).min(),
                "time_ratio": float(np.median(np.array(seconds[method]) / base)),
                "seconds_per_round": float(np.median(seconds[method])),
                "curve": curve.mean(axis=0).tolist(),
            }
        )
    return rows


def print_report(rows: list[dict]) -> None:
    """Prints the table."""
    print(f"\n{'':20}{'held-out loss':>22}{'minus exact':>24}{'time':>8}")
    for row in rows:
        loss = f"{row['loss']:.5f} +- {row['error']:.5f}"
        difference = f"{row['minus_exact']:+.5f} +- {row['minus_exact_error']:.5f}"
        print(f"{row['method']:20}{loss:>22}{difference:>24}{row['time_ratio']:8.2f}")
    print("\ntime: per round, as a ratio to the finest global candidates")


def plot(losses: dict, shared: float, title: str, path: Path) -> None:
    """Draws the curves of each kind, and the final loss against eps."""
    figure, [axes] = open_figure(1, len(KINDS) + 1, (16, 4.4))
    exact = losses[EXACT]
    for axis, kind in zip(axes, KINDS, strict=False):
        chosen = [method for method in losses if method[0] == kind]
        for i, method in enumerate(chosen):
            draw_curve(axis, losses[method], COLORS[kind], DASHES[i % 4], method[1])
        draw_curve(axis, exact, BLACK, "-", None)
        axis.set_title(kind, fontsize=11)
        axis.set_xlabel("round")
        axis.set_ylim(*late_limits(losses))
        axis.legend(frameon=False, fontsize=9)
    draw_final(axes[-1], losses, shared)
    axes[0].set_ylabel("held-out loss")
    figure.suptitle(title, fontsize=12)
    save_figure(figure, path)


def draw_curve(axis, curve: np.ndarray, color: str, dashes: str, eps) -> None:
    """Draws the mean over seeds by round."""
    label = "exact" if eps is None else f"eps {eps:g}"
    rounds = np.arange(1, curve.shape[1] + 1)
    axis.plot(rounds, curve.mean(axis=0), dashes, color=color, lw=1.8, label=label)


def draw_final(axis, losses: dict, shared: float) -> None:
    """Draws the loss after the last round against eps, minus that of exact."""
    exact = losses[EXACT][:, -1]
    for number, kind in enumerate(KINDS):
        chosen = sorted(method for method in losses if method[0] == kind)
        eps = np.array([method[1] for method in chosen]) * 1.04 ** (number - 1)
        gaps = np.stack([losses[method][:, -1] - exact for method in chosen], axis=1)
        error = standard_error(gaps, shared)
        style = dict(color=COLORS[kind], marker="o", ms=4, capsize=3, label=kind)
        axis.errorbar(eps, gaps.mean(axis=0), error, **style)
    axis.axhline(0, color=BLACK, lw=1)
    axis.set_xscale("log")
    axis.set_title("after the last round, minus exact", fontsize=11)
    axis.set_xlabel("eps")
    axis.legend(frameon=False, fontsize=9)


def late_limits(losses: dict) -> tuple[float, float]:
    """Returns y limits that exclude the first, steep tenth of the rounds."""
    mean = np.stack([curve.mean(axis=0) for curve in losses.values()])
    late = mean[:, mean.shape[1] // 10 :]
    room = 0.05 * float(np.ptp(late)) or 1.0
    return float(late.min()) - room, float(late.max()) + room


def conclude(rows: list[dict], methods: list[tuple]) -> str:
    """Returns the result in one sentence: how coarse each kind may be."""
    said = []
    for kind in KINDS:
        good = [
            method[1]
            for method, row in zip(methods, rows, strict=True)
            if method[0] == kind and row["minus_exact"] <= 2 * row["minus_exact_error"]
        ]
        said.append(f"{kind} {f'{max(good):g}' if good else 'none'}")
    return (
        "Found: the coarsest eps whose loss is within two standard errors of exact "
        f"candidates, or below: {', '.join(said)}."
    )


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line, checked."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="CSV or parquet file (default: generated)")
    add("--target", help="the column to predict, with --data")
    add("--test-share", type=float, default=0.3, help="share of the rows, with --data")
    add("--rows", type=int, default=10_000, help="training rows, without --data")
    add("--test-rows", type=int, default=20_000, help="held-out rows, without --data")
    add("--eps", type=float, nargs="+", default=[0.3, 0.1, 0.05, 0.01])
    add("--seeds", type=int, default=4, help="at least 2")
    add("--rounds", type=int, default=80)
    add("--learning-rate", type=float, default=0.15)
    add("--max-depth", type=int, default=5)
    options = parser.parse_args()
    if (options.data is None) != (options.target is None):
        parser.error("--data and --target go together")
    if options.seeds < 2 or options.rounds < 1:
        parser.error("--seeds must be at least 2, and --rounds at least 1")
    if not all(0.0001 <= eps <= 1 for eps in options.eps):
        parser.error("--eps must lie in [0.0001, 1]")
    if not 0 < options.test_share < 1:
        parser.error("--test-share must lie in (0, 1)")
    return options


def main() -> None:
    """Trains everything, prints the table, and writes the PNG and the JSON."""
    options = parse_options()
    losses, seconds = run(options)
    share = options.test_share
    shared = share / (1 - share) if options.data else 0.0
    rows = summarize(losses, seconds, shared)
    print_report(rows)
    print(f"\n{conclude(rows, [*losses])}")
    result = {"arguments": vars(options), **describe_machine(), "results": rows}
    write_json(options.out / "split_candidates.json", result)
    where = options.data.stem if options.data else "generated rows"
    title = f"Split candidates, {where}: mean of {options.seeds} seeds"
    plot(losses, shared, title, options.out / "split_candidates.png")


if __name__ == "__main__":
    main()
