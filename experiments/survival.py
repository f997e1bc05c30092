# SPDX-License-Identifier: Apache-2.0
"""Does the Cox loss predict survival as well as XGBoost's survival:cox?

Harrell's concordance index, and the negative log partial likelihood (NLL) per event
with Efron's ties, on held-out rows. Rows are split at random, several times, into 60 %
for training, 20 % for early stopping by the Cox loss, and 20 % for the result. Depth,
learning rate, rounds and patience are equal; everything else is the default of each
library, except that XGBoost is run with two values of min_child_weight.

    python experiments/survival.py                          # a generated table
    python experiments/survival.py --data DIR [DIR ...]     # data.parquet, meta.json

DIR/meta.json names the columns: "time_column" and "event_column" (1 if the event took
place, 0 if the row was censored).

Written to --out: survival.json, and survival.png with the survival curves of five held-
out rows of each table, chosen by their scores, beside Kaplan and Meier's curve of all
held-out rows.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from experiment_tools import (
    BLACK,
    compare_pairs,
    describe_machine,
    make_matrix,
    make_parser,
    open_figure,
    read_table,
    save_figure,
    write_json,
)
from tqdm import tqdm

import jboost as jb

EFRON = jb.losses.cox
BRESLOW = partial(jb.losses.cox, ties="breslow")
METHODS: dict[str, dict[str, Any]] = {  # settings beyond those of all methods
    "jboost": dict(loss=EFRON),
    "jboost, Breslow": dict(loss=BRESLOW),
    "jboost, Newton leaves": dict(loss=EFRON, leaf_solver="newton"),
    "XGBoost": dict(),
    "XGBoost, min_child_weight 0": dict(min_child_weight=0),
}
PEERS = [name for name in METHODS if name.startswith("XGBoost")]
find_index, find_loss = jax.jit(jb.metrics.concordance_index), jax.jit(EFRON)
DRAWN = (0.95, 0.75, 0.5, 0.25, 0.05)  # quantiles of the scores


class Patients(NamedTuple):
    """Rows of a table, or some of them."""

    x: np.ndarray  # [N, F]
    time: np.ndarray  # [N]
    event: np.ndarray  # [N], 1 or 0

    def take(self, rows: np.ndarray) -> "Patients":
        """Returns some of the rows."""
        return Patients(*(column[rows] for column in self))

    @property
    def targets(self) -> dict[str, np.ndarray]:
        """What the Cox loss compares scores with."""
        return dict(time=self.time, event=self.event)


def make_patients() -> Patients:
    """Returns generated rows, half of them censored; times are rounded, so that some
    are equal.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 6)).astype(np.float32)
    risk = x[:, 0] + x[:, 1] * x[:, 2]
    time = rng.exponential(np.exp(-risk))
    censored = rng.exponential(np.exp(-risk.mean()), len(x))
    end = np.ceil(100 * np.minimum(time, censored)).astype(np.float32)
    return Patients(x, end, (time <= censored).astype(np.float32))


def load_patients(folder: Path | None) -> tuple[str, Patients]:
    """Returns the name and the rows of a folder's table, or generated rows."""
    if folder is None:
        return "generated", make_patients()
    frame, meta = read_table(folder)
    named = [meta["time_column"], meta["event_column"]]
    time, event = (frame[name].to_numpy(np.float32) for name in named)
    return folder.name, Patients(make_matrix(frame.drop(columns=named)), time, event)


def train_jboost(settings, train: Patients, choosing: Patients, options):
    """Trains with early stopping; returns a function of x that gives scores."""
    model, history = jb.fit(
        train.x, train.targets, groups="all",
        validation=jb.rows(choosing.x, choosing.targets, groups="all"),
        num_rounds=options.rounds, early_stopping_rounds=options.patience,
        learning_rate=options.rate, max_depth=options.depth, **settings,
    )  # fmt: skip
    return lambda x: np.asarray(jb.predict(model, x)), history.best_round + 1


def train_xgboost(settings, train: Patients, choosing: Patients, options):
    """Trains XGBoost likewise; times of censored rows are negative for it."""
    import xgboost

    def mark(rows: Patients):
        return np.where(rows.event > 0, rows.time, -rows.time)

    data = xgboost.QuantileDMatrix(train.x, mark(train))
    other = xgboost.QuantileDMatrix(choosing.x, mark(choosing), ref=data)
    given = dict(
        objective="survival:cox", max_depth=options.depth, learning_rate=options.rate,
        nthread=options.threads,
    )  # fmt: skip
    model = xgboost.train(
        given | settings, data, options.rounds, evals=[(other, "choosing")],
        early_stopping_rounds=options.patience, verbose_eval=False,
    )  # fmt: skip
    rounds = model.best_iteration + 1

    def score(x):
        table = xgboost.DMatrix(x)
        return model.predict(table, iteration_range=(0, rounds), output_margin=True)

    return score, rounds


def train_method(name: str, train: Patients, choosing: Patients, options):
    """Trains one of METHODS."""
    train_with = train_jboost if name.startswith("jboost") else train_xgboost
    return train_with(METHODS[name], train, choosing, options)


def judge(scores: np.ndarray, rows: Patients) -> tuple[float, float]:
    """Returns the concordance index and the NLL per event."""
    index = find_index(scores, rows.targets)
    loss = find_loss(scores, rows.targets)
    return float(index), float(loss) / float(np.sum(rows.event))


def split_rows(rows: Patients, seed: int) -> list[Patients]:
    """Returns 60 % training, 20 % choosing and 20 % test rows."""
    order = np.random.default_rng(seed).permutation(len(rows.time))
    ends = [round(0.6 * len(order)), round(0.8 * len(order))]
    return [rows.take(part) for part in np.split(order, ends)]


def compare(rows: Patients, options: argparse.Namespace) -> dict[str, Any]:
    """Returns concordance, NLL and rounds of every method and split."""
    found = {name: dict(concordance=[], nll=[], rounds=[]) for name in METHODS}
    for seed in tqdm(range(options.splits), disable=None):
        train, choosing, test = split_rows(rows, seed)
        for name, columns in found.items():
            score, rounds = train_method(name, train, choosing, options)
            results = (*judge(score(test.x), test), rounds)
            for column, result in zip(columns.values(), results, strict=True):
                column.append(result)
    return found


def find_best(found: dict[str, Any], column: str) -> str:
    """Returns XGBoost's better variant."""
    sign = 1 if column == "nll" else -1
    return min(PEERS, key=lambda name: sign * np.mean(found[name][column]))


def report(table: str, found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Prints means and paired differences; returns those of the first method."""
    print(f"\n{table}: less the better XGBoost, +- standard error")
    print(f"{'':28} {'C':>7} {'':19} {'NLL':>7} {'':19} {'rounds':>6}")
    differences: dict[str, dict] = {}
    for name, columns in found.items():
        differences[name] = {
            column: compare_pairs(columns[column], found[best][column])
            for column in ("concordance", "nll")
            for best in (find_best(found, column),)
        }
        said = [
            f"{np.mean(columns[column]):7.4f} {value:+9.4f} +- {error:.4f}"
            for column, (value, error) in differences[name].items()
        ]
        print(f"{name:28} {' '.join(said)} {np.mean(columns['rounds']):6.0f}")
    return differences["jboost"]


# ---- curves -------------------------------------------------------------------------


def draw_curves(axes: Any, table: str, rows: Patients, options) -> None:
    """Draws survival curves of the held-out rows of the first split."""
    from matplotlib import colormaps

    train, choosing, test = split_rows(rows, 0)
    score, _ = train_method("jboost", train, choosing, options)
    baseline = jb.survival.baseline_hazard(score(train.x), train.targets)
    scores = np.sort(score(test.x))
    drawn = scores[[round(share * (len(scores) - 1)) for share in DRAWN]]
    times = np.linspace(0, train.time.max(), 500)
    curves = np.asarray(jb.survival.survival_curves(baseline, drawn, times))
    for share, curve in zip(DRAWN, curves, strict=True):
        color = colormaps["cividis"](1 - share)
        axes.step(
            times, curve, where="post", color=color, label=f"score at {share:.0%}"
        )
    everyone = jb.survival.kaplan_meier(test.targets)
    axes.step(
        np.append(0, everyone.times), np.append(1, everyone.probabilities),
        where="post", color=BLACK, linestyle="--", label="Kaplan-Meier, all",
    )  # fmt: skip
    axes.set_title(table)
    axes.set_xlabel("time")
    axes.set_ylim(0, 1.02)


def main() -> None:
    """Compares the methods on every table, and draws curves."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[None], metavar="DIR",
        help="folders of tables",
    )  # fmt: skip
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=300, help="at most")
    parser.add_argument("--patience", type=int, default=50, help="of early stopping")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="XGBoost's")
    options = parser.parse_args()
    tables = [load_patients(folder) for folder in options.data]
    figure, (row,) = open_figure(1, len(tables), (1 + 4 * len(tables), 4))
    found, differences = {}, {}
    for axes, (name, rows) in zip(row, tables, strict=True):
        found[name] = compare(rows, options)
        differences[name] = report(name, found[name])
        draw_curves(axes, name, rows, options)
    row[0].set_ylabel("probability of survival")
    figure.legend(*row[-1].get_legend_handles_labels(), loc="outside right center")
    save_figure(figure, options.out / "survival.png")
    said = [
        f"{name} {c[0]:+.4f} +- {c[1]:.4f} in concordance and "
        f"{nll[0]:+.4f} +- {nll[1]:.4f} in NLL"
        for name, (c, nll) in (
            (name, (d["concordance"], d["nll"])) for name, d in differences.items()
        )
    ]
    print(f"\nFound: jboost less the better XGBoost: {'; '.join(said)}.")
    result = dict(arguments=vars(options), tables=found, differences=differences)
    write_json(options.out / "survival.json", result | describe_machine())


if __name__ == "__main__":
    main()
