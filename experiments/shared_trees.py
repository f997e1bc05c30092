# SPDX-License-Identifier: Apache-2.0
"""Should all scores share one tree per round, or should each have a tree of its own?

jboost with share_structure=False and True, and XGBoost with multi_strategy
one_output_per_tree and multi_output_tree, are trained on the same rows, with learning
rate 0.1, depth 6 and early stopping after 30 rounds. Rows are split at random into 70 %
for training and 30 % for validation. Losses are those of the best round on the
validation rows: the log loss of tables with classes, the mean squared error of tables
with several targets, which are divided by their standard deviations.

    python experiments/shared_trees.py                         # tables made here
    python experiments/shared_trees.py --data FILE --target COLUMN
    python experiments/shared_trees.py --data FILE --target COLUMN COLUMN

FILE is CSV or Parquet. One target column holds classes, several hold numbers. Columns
that are not numbers are numbered in the order of their values; classes of fewer than 20
rows are left out. Each fit is kept in --out, so that an interrupted run goes on, and
tables of several runs are summarized together. Written to --out: shared_trees.jsonl
(all fits), shared_trees.json (ratios) and shared_trees.png.
"""

import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
from experiment_tools import (
    BLUE,
    GREEN,
    ORANGE,
    add_minutes,
    choose_tables,
    describe_machine,
    make_figures,
    make_matrix,
    make_parser,
    open_figure,
    print_table,
    save_figure,
    take_in_time,
    write_json,
)
from sklearn.datasets import load_digits, make_classification
from tqdm import tqdm

import jboost as jb

SHARED, OWN = "jboost, shared trees", "jboost, K trees"
MULTI, ONE = "XGBoost, multi_output_tree", "XGBoost, one_output_per_tree"
KINDS = (SHARED, OWN, MULTI, ONE)
COLORS = dict(zip(KINDS[1:], (BLUE, ORANGE, GREEN), strict=True))
NAMES = dict(loss="loss", seconds="training time", predict="prediction time")
RATE, DEPTH, PATIENCE = 0.1, 6, 30
LEAST_ROWS = 20  # of a class
CLASSES = {"5 classes": 5, "10 classes": 10, "20 classes": 20}
TARGETS = ("6 related targets", "4 unrelated targets")
TABLES = ("digits", *CLASSES, *TARGETS)


# ---- tables -------------------------------------------------------------------------


def make_table(name):
    """Returns features, and classes [N] or targets [N, K], of a table made here."""
    if name == "digits":
        return load_digits(return_X_y=True)
    if name in CLASSES:
        return make_classification(
            6000, 20, n_informative=10, n_redundant=4, n_classes=CLASSES[name],
            n_clusters_per_class=2, class_sep=1.0, flip_y=0.05, random_state=0,
        )  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (6000, 12))
    if name == "6 related targets":  # mixtures of two functions
        causes = np.stack([np.sin(4 * x[:, 0]) * x[:, 1], x[:, 2] * x[:, 3]], axis=1)
        y = causes @ rng.normal(size=(2, 6))
    else:  # each of three features that no other target depends on
        own = x.reshape(len(x), 4, 3)
        y = np.sin(4 * own[:, :, 0]) * own[:, :, 1] + own[:, :, 2]
    return x, y + 0.2 * rng.normal(size=y.shape)


def read_table(path, targets, most):
    """Does the same for at most so many rows of a file."""
    read = pd.read_csv if ".csv" in path.suffixes else pd.read_parquet
    frame = read(path)
    missing = [name for name in targets if name not in frame]
    if missing:
        raise SystemExit(f"--target must be among {list(frame)}, got {missing[0]!r}")
    frame = frame.dropna(subset=targets)
    if len(frame) > most:
        frame = frame.sample(most, random_state=0)
    if len(targets) > 1:
        y = frame[targets].to_numpy(np.float64)
    else:
        counts = frame[targets[0]].value_counts()
        frequent = counts.index[counts >= LEAST_ROWS]
        frame = frame[frame[targets[0]].isin(frequent)]
        y = pd.factorize(frame[targets[0]], sort=True)[0]
    return make_matrix(frame.drop(columns=targets)), y


def split(x, y, seed):
    """Returns 70 % and 30 % of the rows; targets have a standard deviation of 1."""
    order = np.random.default_rng(seed).permutation(len(x))
    first, second = np.split(order, [int(0.7 * len(x))])
    if y.ndim == 2:
        y = (y - y[first].mean(axis=0)) / y[first].std(axis=0)
    y = y.astype(np.int32 if y.ndim == 1 else np.float32)
    x = x.astype(np.float32)
    return (x[first], y[first]), (x[second], y[second])


# ---- fits ---------------------------------------------------------------------------


def count_scores(y):
    """Returns K."""
    return int(y.max()) + 1 if y.ndim == 1 else y.shape[1]


def train_jboost(kind, train, validation, rounds):
    """Returns the number of rounds, and rows -> scores."""
    x, y = train
    loss = jb.losses.softmax if y.ndim == 1 else jb.losses.squared_error
    model, history = jb.fit(
        x, y, loss, num_scores=count_scores(y), share_structure=kind == SHARED,
        validation=validation, num_rounds=rounds, learning_rate=RATE, max_depth=DEPTH,
        early_stopping_rounds=PATIENCE,
    )  # fmt: skip
    return history.best_round + 1, lambda x: np.asarray(jb.predict(model, x))


def train_xgboost(kind, train, validation, rounds):
    """Does the same with XGBoost."""
    import xgboost as xgb

    settings = dict(eta=RATE, max_depth=DEPTH, multi_strategy=kind.split()[-1])
    if train[1].ndim == 1:
        settings |= dict(objective="multi:softprob", num_class=count_scores(train[1]))
    data = xgb.QuantileDMatrix(*train)
    held = xgb.QuantileDMatrix(*validation, ref=data)
    model = xgb.train(
        settings, data, rounds, evals=[(held, "validation")], verbose_eval=False,
        early_stopping_rounds=PATIENCE,
    )  # fmt: skip
    used = (0, model.best_iteration + 1)
    return used[1], lambda x: model.inplace_predict(
        x, predict_type="margin", iteration_range=used
    )


def held_out_loss(scores, y):
    """Returns the log loss or the mean squared error."""
    scores = np.asarray(scores, np.float64)
    if y.ndim == 2:
        return float(np.mean((scores - y) ** 2))
    scores = scores - scores.max(axis=1, keepdims=True)
    own = np.take_along_axis(scores, y[:, None], axis=1)[:, 0]
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - own))


def measure(kind, x, y, rounds, seed):
    """Trains once, after a run of two rounds that compiles, and predicts all rows."""
    train, validation = split(x, y, seed)
    fit = train_xgboost if kind in (MULTI, ONE) else train_jboost
    fit(kind, train, validation, 2)
    begun = time.perf_counter()
    used, predict = fit(kind, train, validation, rounds)
    seconds = time.perf_counter() - begun
    loss, x = held_out_loss(predict(validation[0]), validation[1]), x.astype(np.float32)
    predict(x)
    readings = []
    for _ in range(5):
        begun = time.perf_counter()
        predict(x)
        readings.append(time.perf_counter() - begun)
    return dict(
        kind=kind, rows=len(x), scores=count_scores(y), rounds=used, loss=loss,
        seconds=seconds, predict=float(np.median(readings)), seed=seed, most=rounds,
    )  # fmt: skip


# ---- results ------------------------------------------------------------------------


def summarize(fits):
    """Returns, for each table, the ratios of shared trees to each other kind."""
    rows = []
    for table in dict.fromkeys(fit["table"] for fit in fits):
        own = {fit["kind"]: fit for fit in fits if fit["table"] == table}
        if {*own} == {*KINDS}:
            ratios = {
                kind: {name: own[SHARED][name] / own[kind][name] for name in NAMES}
                for kind in KINDS[1:]
            }
            rows.append(dict(table=table, fits=own, ratios=ratios))
    return rows


def find_means(rows):
    """Returns the geometric means of the ratios over the tables."""
    return {
        kind: {
            name: float(
                np.exp(np.mean([np.log(r["ratios"][kind][name]) for r in rows]))
            )
            for name in NAMES
        }
        for kind in KINDS[1:]
    }


def tabulate(rows, means):
    """Returns a table of the loss of each kind, and one of ratios."""
    losses, ratios = [["table", "K", *KINDS]], [["to", *NAMES.values()]]
    for row in rows:
        fits = [row["fits"][kind] for kind in KINDS]
        cells = [f"{fit['loss']:.3f} ({fit['rounds']})" for fit in fits]
        losses.append([row["table"], str(fits[0]["scores"]), *cells])
    for kind, found in means.items():
        ratios.append([kind, *(f"{found[name]:.2f}" for name in NAMES)])
    return {"losses": losses, "ratios": ratios}


def draw(rows, path):
    """Draws the ratios of each table; below 1, shared trees are better."""
    figure, axes = open_figure(1, 3, (11, 1.4 + 0.28 * len(rows)), sharey=True)
    places = np.arange(len(rows))[::-1]
    for (name, title), panel in zip(NAMES.items(), axes[0], strict=True):
        for kind, color in COLORS.items():
            ratios = [row["ratios"][kind][name] for row in rows]
            panel.plot(ratios, places, "o", color=color, label=kind, alpha=0.8)
        panel.axvline(1, color="black", linewidth=0.8)
        if name != "loss":
            panel.set_xscale("log")
        panel.set(xlabel=f"{title}, shared / other")
    axes[0, 0].set_yticks(places, [row["table"] for row in rows])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, path)


def main():
    """Measures what is not kept yet, and summarizes all."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="some of the tables")
    parser.add_argument("--data", type=Path, metavar="FILE")
    parser.add_argument("--target", nargs="+", metavar="COLUMN")
    parser.add_argument("--rows", type=int, default=8000, help="of FILE, at most")
    parser.add_argument("--rounds", type=int, default=1500, help="at most")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    add_minutes(parser)
    asked = parser.parse_args()
    if (asked.data is None) != (asked.target is None):
        parser.error("--data and --target belong together")
    if asked.data is None:
        tables = dict.fromkeys(choose_tables(parser, asked.only, TABLES))
    else:
        tables = {f"{asked.data.stem}, {' + '.join(asked.target)}": asked.data}
    cache = asked.out / "shared_trees.jsonl"
    asked.out.mkdir(parents=True, exist_ok=True)
    lines = cache.read_text().splitlines() if cache.exists() else []
    fits = [json.loads(line) for line in lines]
    fits = [f for f in fits if (f["seed"], f["most"]) == (asked.seed, asked.rounds)]
    known = {(fit["table"], fit["kind"]) for fit in fits}
    with tqdm(total=len(KINDS) * len(tables)) as bar:
        for table, path in take_in_time(tables.items(), asked.minutes):
            x, y = (
                make_table(table)
                if path is None
                else read_table(path, asked.target, asked.rows)
            )
            for kind in KINDS:
                bar.set_description(f"{table}: {kind}")
                if (table, kind) not in known:
                    fit = measure(kind, x, y, asked.rounds, asked.seed)
                    fits.append({"table": table, **fit})
                    with cache.open("a") as file:
                        file.write(json.dumps(fits[-1]) + "\n")
                bar.update()
    rows = summarize(fits)
    means = find_means(rows)
    tables = tabulate(rows, means)
    for table in tables.values():
        print_table(table)
    result = dict(machine=describe_machine(), means=means, tables=rows)
    result["figures"] = make_figures(**tables)
    write_json(asked.out / "shared_trees.json", result)
    draw(rows, asked.out / "shared_trees.png")
    ratio, speed = means[OWN]["loss"], means[OWN]["predict"]
    print(
        f"Found: over {len(rows)} tables, the loss of shared trees is {ratio:.3f} of "
        f"that of K trees, and predictions take {speed:.2f} of their time."
    )


if __name__ == "__main__":
    main()
