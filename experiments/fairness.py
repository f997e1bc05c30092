# SPDX-License-Identifier: Apache-2.0
"""What does it cost to predict the same mean probability for two groups of people?

The loss sees all rows at once: the sum of log-losses, plus penalty * N * gap^2, where
gap is the difference of the mean predicted probabilities of the two groups (demographic
parity). Rows are split at random, several times, into two thirds for training and one
third for the test.

    python experiments/fairness.py                              # generated people
    python experiments/fairness.py --data DIR --people sex      # e.g. Adult

DIR has a `data.parquet` and a `meta.json` that names the column "target" (two values;
the rarer one is predicted); --people names a column. Its most frequent value is one
group of people, all others are the other group. It stays a feature.

Printed for each penalty and leaf solver: the training loss, the rounds in which it
rose, and the gap and the AUC on test rows. "newton" solves each leaf by itself and
diverges with large penalties, because the penalty couples all leaves. Written to --out:
fairness.json, and fairness.png with the trade-off between gap and AUC and the training
losses.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from experiment_tools import (
    BLUE,
    describe_machine,
    make_matrix,
    make_parser,
    open_figure,
    read_table,
    save_figure,
    write_json,
)
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

import jboost as jb

SOLVERS = ("joint", "newton")


class People(NamedTuple):
    """Rows of a table, or some of them."""

    x: np.ndarray  # [N, F]
    target: np.ndarray  # [N], 1 or 0
    member: np.ndarray  # [N] bool, the first group of people

    def take(self, rows: np.ndarray) -> "People":
        """Returns some of the rows."""
        return People(*(column[rows] for column in self))

    @property
    def targets(self) -> dict[str, np.ndarray]:
        """What the loss sees besides the scores."""
        return dict(target=self.target, member=self.member)


def make_loss(penalty: float) -> Callable[..., Any]:
    """Returns the loss of all rows."""

    def loss(scores, targets, *, where):
        chance = jax.nn.sigmoid(scores)

        def mean(rows):
            return jnp.sum(jnp.where(rows, chance, 0.0)) / jnp.sum(rows)

        member = targets["member"]
        gap = mean(where & member) - mean(where & ~member)
        losses = jax.vmap(jb.losses.logistic)(scores, targets["target"])
        total = jnp.sum(jnp.where(where, losses, 0.0))
        return total + penalty * jnp.sum(where) * gap**2

    return loss


def make_people() -> People:
    """Returns generated people, in two groups with different chances."""
    rng = np.random.default_rng(0)
    member = rng.uniform(size=6000) < 0.6
    x = rng.normal(size=(len(member), 6)).astype(np.float32)
    x[:, 0] += member
    x[:, 5] = member
    score = x[:, 0] + x[:, 1] * x[:, 2] - 1.5
    target = rng.uniform(size=len(x)) < 1 / (1 + np.exp(-score))
    return People(x, target.astype(np.float32), member)


def load_people(folder: Path | None, column: str | None) -> tuple[str, People]:
    """Returns the name and the rows of a folder's table, or generated rows."""
    if folder is None:
        return "generated", make_people()
    frame, meta = read_table(folder)
    if column not in frame:
        raise SystemExit(f"--people must be one of {list(frame)}, got {column!r}")
    codes = pd.factorize(frame[meta["target"]])[0]
    target = (codes == np.argmin(np.bincount(codes))).astype(np.float32)
    member = (frame[column] == frame[column].mode()[0]).to_numpy(bool)
    return folder.name, People(
        make_matrix(frame.drop(columns=meta["target"])), target, member
    )


def measure(train: People, test: People, penalty: float, solver: Any, options):
    """Returns the training losses per row, and the gap and the AUC of test rows."""
    try:
        model, history = jb.fit(
            train.x, train.targets, make_loss(penalty), groups="all",
            leaf_solver=solver, num_rounds=options.rounds, max_depth=options.depth,
            learning_rate=options.rate,
        )  # fmt: skip
    except jb.TrainingError as error:  # the loss is not finite any more
        return dict(losses=[], gap=np.nan, auc=np.nan, error=str(error))
    chance = np.asarray(jax.nn.sigmoid(jb.predict(model, test.x)), np.float64)
    gap = chance[test.member].mean() - chance[~test.member].mean()
    auc = roc_auc_score(test.target, chance)
    losses = np.asarray(history.train_loss, np.float64) / len(train.x)
    return dict(losses=losses, gap=float(gap), auc=float(auc))


def compare(rows: People, options: argparse.Namespace) -> dict[str, dict[float, list]]:
    """Returns what was measured, by leaf solver and penalty, for every split."""
    found: dict[str, dict] = {
        solver: {penalty: [] for penalty in options.penalties} for solver in SOLVERS
    }
    for seed in tqdm(range(options.splits), disable=None):
        order = np.random.default_rng(seed).permutation(len(rows.x))
        order = order[: options.max_rows]
        train, test = map(rows.take, np.split(order, [2 * len(order) // 3]))
        for solver, penalty in [(s, p) for s in found for p in found[s]]:
            result = measure(train, test, penalty, solver, options)
            found[solver][penalty].append(result)
    return found


def count_rises(losses: np.ndarray) -> int:
    """Returns in how many rounds the loss rose by more than float32 rounds."""
    losses = np.asarray(losses)
    return int(np.sum(np.diff(losses) > 1e-6 * np.abs(losses[1:])))


def report(found: dict[str, dict[float, list]]) -> list[dict[str, Any]]:
    """Prints and returns means over the splits."""
    print(f"{'leaves':8} {'penalty':>8} {'loss':>8} {'rises':>6} {'gap':>8} {'AUC':>7}")
    lines = []
    for solver, penalties in found.items():
        for penalty, results in penalties.items():
            line = dict(
                solver=solver, penalty=penalty,
                loss=np.mean([r["losses"][-1] if len(r["losses"]) else np.nan
                              for r in results]),
                rises=sum(count_rises(r["losses"]) for r in results),
                failed=sum("error" in r for r in results),
                gap=np.mean([r["gap"] for r in results]),
                auc=np.mean([r["auc"] for r in results]),
            )  # fmt: skip
            lines.append(line)
            print(
                f"{solver:8} {penalty:8g} {line['loss']:8.4f} {line['rises']:6d} "
                f"{line['gap']:8.4f} {line['auc']:7.4f}"
            )
    return lines


def draw(table: str, found: dict, lines: list[dict[str, Any]], path: Path) -> None:
    """Draws the trade-off, and the training losses of the first split."""
    from matplotlib import colormaps

    figure, ((left, right),) = open_figure(1, 2, (10, 4))
    joint = [line for line in lines if line["solver"] == "joint"]
    left.plot(
        [line["gap"] for line in joint], [line["auc"] for line in joint], "o-",
        color=BLUE,
    )  # fmt: skip
    for line in joint:
        left.annotate(
            f"{line['penalty']:g}", (line["gap"], line["auc"]),
            textcoords="offset points", xytext=(8, -4), fontsize="small",
        )  # fmt: skip
    left.axvline(0, color="black", linewidth=0.8)
    left.set_xlabel("gap of mean probabilities, test rows")
    left.set_ylabel("AUC, test rows")
    left.set_title(f"{table}: trade-off by penalty")
    for place, (penalty, results) in enumerate(found["joint"].items()):
        color = colormaps["cividis"](place / max(len(found["joint"]) - 1, 1))
        losses = results[0]["losses"]
        right.plot(
            1 + np.arange(len(losses)), losses, color=color, label=f"{penalty:g}"
        )
    right.set_xlabel("round")
    right.set_ylabel("training loss per row, with penalty")
    right.set_title("joint leaves")
    right.legend(title="penalty", fontsize="small")
    save_figure(figure, path)


def main() -> None:
    """Trains with every penalty, prints a table, and draws the trade-off."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a table's folder")
    parser.add_argument("--people", metavar="COLUMN", help="divides the people")
    parser.add_argument(
        "--penalties", type=float, nargs="+", default=[0, 0.3, 1, 3, 10, 30, 100]
    )
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument(
        "--max-rows", type=int, default=18_000, help="more are left out, at random"
    )
    options = parser.parse_args()
    table, rows = load_people(options.data, options.people)
    found = compare(rows, options)
    lines = report(found)
    draw(table, found, lines, options.out / "fairness.png")
    joint = [line for line in lines if line["solver"] == "joint"]
    rises = sum(line["rises"] for line in joint)
    first, last = joint[0], joint[-1]
    print(
        f"\nFound: with joint leaves the training loss rose in {rises} rounds of "
        f"{len(joint) * options.splits * options.rounds}. A penalty of "
        f"{last['penalty']:g} instead of {first['penalty']:g} changes the gap from "
        f"{first['gap']:.4f} to {last['gap']:.4f} and the AUC from {first['auc']:.4f} "
        f"to {last['auc']:.4f}."
    )
    result = dict(arguments=vars(options), table=table, means=lines, found=found)
    write_json(options.out / "fairness.json", result | describe_machine())


if __name__ == "__main__":
    main()
