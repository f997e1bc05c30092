# SPDX-License-Identifier: Apache-2.0
"""Do losses of queries rank as well, and train as fast, as those built into libraries?

NDCG@10 on held-out queries, with XGBoost (rank:ndcg, rank:pairwise) and LightGBM
(lambdarank, rank_xendcg) as peers. Queries are split at random, several times, into
60 % for training, 20 % for early stopping by NDCG@10, and 20 % for the result. Depth,
learning rate, rounds and patience are equal; everything else is the default of each
library. Queries without a relevant document are left out of the mean.

    python experiments/ranking.py                      # generated queries
    python experiments/ranking.py --data DIR           # data.parquet and meta.json
    python experiments/ranking.py --speed              # time per round instead

DIR/meta.json names the columns: "target", the relevance, and "group_column", the query.

--speed measures rounds on 100,000 generated rows with 46 features, in queries of 100
with relevances 0 to 4. Long and short runs alternate, and a round's time is their
difference divided by the additional rounds, so that compilation and binning drop out.
Two more losses are measured: cox on all rows as one group, and squared_error.

Written to --out: ranking.json and ranking.png, or ranking_speed.json.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from experiment_tools import (
    BLUE,
    GRAY,
    compare_pairs,
    describe_machine,
    find_slope,
    make_matrix,
    make_parser,
    open_figure,
    read_table,
    save_figure,
    write_json,
)
from sklearn.metrics import ndcg_score
from tqdm import tqdm

import jboost as jb

METHODS: dict[str, dict[str, Any]] = {  # arguments of fit
    "jboost lambda_mart": jb.recipes.lambda_mart(),
    "jboost lambda_rank": dict(loss=jb.losses.lambda_rank),
    "jboost recipe xendcg": jb.recipes.xendcg(),
    "jboost xendcg": dict(loss=jb.losses.xendcg),
    "jboost listwise_softmax": dict(loss=jb.losses.listwise_softmax),
    "jboost list_mle": dict(loss=jb.losses.list_mle),
    "jboost pairwise_logistic": dict(loss=jb.losses.pairwise_logistic),
}
PEERS = (
    "XGBoost rank:ndcg", "XGBoost rank:pairwise", "LightGBM lambdarank",
    "LightGBM rank_xendcg",
)  # fmt: skip
RATIOS = (  # of rounds, and what they should not exceed
    ("jboost listwise_softmax", "LightGBM rank_xendcg", 0.6),
    ("jboost lambda_rank", "LightGBM lambdarank", 2.0),
    ("jboost cox, all rows", "jboost squared_error", 1.5),
)


class Queries(NamedTuple):
    """Documents; those of a query are neighbors."""

    x: np.ndarray  # [N, F]
    relevance: np.ndarray  # [N]
    query: np.ndarray  # [N]

    def take(self, queries: np.ndarray) -> "Queries":
        """Returns the documents of some queries."""
        chosen = np.isin(self.query, queries)
        return Queries(*(column[chosen] for column in self))

    @property
    def sizes(self) -> np.ndarray:
        """The number of documents of each query, in the order of the rows."""
        first = np.flatnonzero(np.diff(self.query, prepend=-1))
        return np.diff(np.append(first, len(self.query)))


def make_queries(num_queries: int, size: int, num_features: int) -> Queries:
    """Returns generated queries with relevances 0 to 4, most of them 0."""
    rng = np.random.default_rng(0)
    query = np.repeat(np.arange(num_queries), size)
    x = rng.normal(size=(len(query), num_features)).astype(np.float32)
    quality = x[:, 0] + x[:, 1] * x[:, 2] + np.abs(x[:, 3]) + x[:, 4] * (x[:, 5] > 0)
    quality += rng.normal(size=num_queries)[query] + rng.normal(size=len(query))
    cuts = np.quantile(quality, [0.5, 0.75, 0.9, 0.97])
    return Queries(x, np.searchsorted(cuts, quality).astype(np.float32), query)


def load_queries(folder: Path | None) -> tuple[str, Queries]:
    """Returns the name and the documents of a folder, or generated ones."""
    if folder is None:
        return "generated", make_queries(200, 20, 20)
    frame, meta = read_table(folder)
    query = np.unique(frame[meta["group_column"]], return_inverse=True)[1]
    order = np.argsort(query, kind="stable")
    x = make_matrix(frame.drop(columns=[meta["target"], meta["group_column"]]))
    relevance = frame[meta["target"]].to_numpy(np.float32)
    return folder.name, Queries(x[order], relevance[order], query[order])


def find_ndcg(scores: np.ndarray, rows: Queries) -> float:
    """Returns the mean NDCG@10, with gains of 2^relevance - 1, by scikit-learn."""
    ends = np.cumsum(rows.sizes)[:-1]
    parts = zip(
        np.split(scores, ends), np.split(2**rows.relevance - 1, ends), strict=True
    )
    return float(
        np.mean([
            ndcg_score(gain[None], score[None], k=10) if len(gain) > 1 else 1.0
            for score, gain in parts
            if gain.any()
        ])
    )  # fmt: skip


# ---- quality ------------------------------------------------------------------------


def rank(name: str, train: Queries, choosing: Queries, test: Queries, options) -> tuple:
    """Trains with early stopping; returns the test scores and the best round."""
    library, loss = name.split(maxsplit=1)
    find = dict(jboost=rank_jboost, XGBoost=rank_xgboost, LightGBM=rank_lightgbm)
    chosen = name if library == "jboost" else loss
    return find[library](chosen, train, choosing, test, options)


def rank_jboost(name, train: Queries, choosing: Queries, test: Queries, options):
    """Trains with one of METHODS."""
    model, history = jb.fit(
        train.x, train.relevance, **METHODS[name], groups=train.query,
        validation=jb.rows(choosing.x, choosing.relevance, groups=choosing.query),
        metrics={"ndcg@10": partial(jb.metrics.ndcg, at=10)}, by=("ndcg@10", "max"),
        early_stopping_rounds=options.patience, num_rounds=options.rounds,
        learning_rate=options.rate, max_depth=options.depth,
    )  # fmt: skip
    return np.asarray(jb.predict(model, test.x)), history.best_round + 1


def rank_xgboost(objective, train: Queries, choosing: Queries, test: Queries, options):
    """Trains XGBoost."""
    import xgboost

    data = xgboost.QuantileDMatrix(train.x, train.relevance, qid=train.query)
    other = xgboost.QuantileDMatrix(
        choosing.x, choosing.relevance, qid=choosing.query, ref=data
    )
    settings = dict(
        objective=objective, eval_metric="ndcg@10", max_depth=options.depth,
        learning_rate=options.rate, nthread=options.threads,
    )  # fmt: skip
    model = xgboost.train(
        settings, data, options.rounds, evals=[(other, "choosing")],
        early_stopping_rounds=options.patience, verbose_eval=False,
    )  # fmt: skip
    rounds = model.best_iteration + 1
    scores = model.predict(xgboost.DMatrix(test.x), iteration_range=(0, rounds))
    return scores, rounds


def rank_lightgbm(objective, train: Queries, choosing: Queries, test: Queries, options):
    """Trains LightGBM."""
    import lightgbm

    sets = [
        lightgbm.Dataset(rows.x, rows.relevance, group=rows.sizes)
        for rows in (train, choosing)
    ]
    sets[1].reference = sets[0]
    settings = dict(
        objective=objective, metric="ndcg", eval_at=[10], max_depth=options.depth,
        num_leaves=2**options.depth, learning_rate=options.rate,
        num_threads=options.threads, verbose=-1,
    )  # fmt: skip
    stop = lightgbm.early_stopping(options.patience, verbose=False)
    model = lightgbm.train(
        settings, sets[0], options.rounds, valid_sets=[sets[1]], callbacks=[stop]
    )
    return model.predict(test.x), model.best_iteration


def compare_quality(options: argparse.Namespace) -> dict[str, Any]:
    """Returns NDCG@10 and rounds of every method and split."""
    table, rows = load_queries(options.data)
    names = (*METHODS, *PEERS)
    found: dict[str, list] = {name: [] for name in names}
    rounds: dict[str, list] = {name: [] for name in names}
    for split in tqdm(range(options.splits), disable=None):
        queries = np.random.default_rng(split).permutation(np.unique(rows.query))
        ends = [round(0.6 * len(queries)), round(0.8 * len(queries))]
        train, choosing, test = map(rows.take, np.split(queries, ends))
        for name in names:
            scores, best = rank(name, train, choosing, test, options)
            found[name].append(find_ndcg(scores, test))
            rounds[name].append(best)
    best = max(PEERS, key=lambda name: np.mean(found[name]))
    differences = {name: compare_pairs(found[name], found[best]) for name in names}
    return dict(
        table=table, rows=len(rows.x), queries=len(rows.sizes), best_peer=best,
        ndcg=found, rounds=rounds, differences=differences,
    )  # fmt: skip


def report_quality(result: dict[str, Any], out: Path) -> None:
    """Prints and draws the differences to the best peer."""
    print(f"\n{result['table']}: {result['queries']} queries, {result['rows']} rows")
    print(f"{'':32} {'NDCG@10':>8} {'less best peer':>19} {'rounds':>7}")
    for name, values in result["ndcg"].items():
        difference, error = result["differences"][name]
        said = f"{difference:+.4f} +- {error:.4f}"
        rounds = np.mean(result["rounds"][name])
        print(f"{name:32} {np.mean(values):8.4f} {said:>19} {rounds:7.0f}")
    figure, ((axes,),) = open_figure(size=(7, 4))
    names = sorted(result["ndcg"], key=lambda name: result["differences"][name])
    for place, name in enumerate(names):
        color = BLUE if name.startswith("jboost") else GRAY
        difference, error = result["differences"][name]
        axes.errorbar(difference, place, xerr=error, fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(f"NDCG@10 less that of {result['best_peer']}, +- standard error")
    axes.set_title(
        f"{result['table']}: held-out queries of {count_splits(result)} splits"
    )
    save_figure(figure, out / "ranking.png")
    ours = [name for name in result["ndcg"] if name in METHODS]
    best = max(ours, key=lambda name: np.mean(result["ndcg"][name]))
    difference, error = result["differences"][best]
    print(
        f"\nFound: {best} has an NDCG@10 of {np.mean(result['ndcg'][best]):.4f}, "
        f"{difference:+.4f} +- {error:.4f} from the best peer, {result['best_peer']}."
    )


def count_splits(result: dict[str, Any]) -> int:
    """Returns the number of splits."""
    return len(next(iter(result["ndcg"].values())))


# ---- speed --------------------------------------------------------------------------


def make_runs(rows: Queries, options: argparse.Namespace) -> dict[str, Callable]:
    """Returns what is measured: functions of the number of rounds."""
    import lightgbm

    rng = np.random.default_rng(1)
    event = rng.integers(0, 2, len(rows.x)).astype(np.float32)
    survival = dict(time=rng.exponential(size=len(rows.x)).astype("f4"), event=event)
    settings = dict(learning_rate=options.rate, max_depth=options.depth)
    theirs = dict(
        num_leaves=2**options.depth, num_threads=options.threads, verbose=-1, **settings
    )
    data = lightgbm.Dataset(
        rows.x, rows.relevance, group=rows.sizes, params=theirs
    ).construct()

    def ours(targets, loss, **groups):
        return lambda rounds: jb.fit(
            rows.x, targets, loss, num_rounds=rounds, **groups, **settings
        )

    def peer(objective):
        return lambda rounds: lightgbm.train(
            dict(objective=objective, metric="None", **theirs), data, rounds
        )

    by_query = dict(groups=rows.query)
    losses = jb.losses
    return {
        "jboost listwise_softmax": ours(
            rows.relevance, losses.listwise_softmax, **by_query
        ),
        "jboost xendcg": ours(rows.relevance, losses.xendcg, **by_query),
        "LightGBM rank_xendcg": peer("rank_xendcg"),
        "jboost lambda_rank": ours(rows.relevance, losses.lambda_rank, **by_query),
        "LightGBM lambdarank": peer("lambdarank"),
        "jboost cox, all rows": ours(survival, losses.cox, groups="all"),
        "jboost squared_error": ours(rows.relevance, losses.squared_error),
    }


def compare_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of short and long runs, by clock and name."""
    rows = make_queries(1000, 100, 46)
    runs = make_runs(rows, options)
    lengths = (options.few, options.many)
    clocks = {"time": time.perf_counter, "processor time": time.process_time}
    seconds: dict[str, dict[str, tuple[list, list]]] = {
        clock: {name: ([], []) for name in runs} for clock in clocks
    }
    for turn in tqdm(range(options.repeats + 1), disable=None):
        for name, run in runs.items():
            for place, length in enumerate(lengths):
                begin = [read() for read in clocks.values()]
                run(length)
                took = [read() for read in clocks.values()] - np.array(begin)
                for clock, number in zip(clocks, took, strict=True):
                    if turn:  # the first turn compiles
                        seconds[clock][name][place].append(number)
    return dict(seconds=seconds, between=options.many - options.few)


def report_speed(result: dict[str, Any]) -> None:
    """Prints milliseconds per round by both clocks, and ratios."""
    slopes = {
        clock: {
            name: find_slope(few, many, result["between"])
            for name, (few, many) in readings.items()
        }
        for clock, readings in result["seconds"].items()
    }
    print("\nmilliseconds per round, and their noise")
    print(f"{'':26} {'time':>17} {'processor time':>17}")
    for name in slopes["time"]:
        said = [
            f"{1e3 * slope.value:8.2f} {1e3 * slope.noise:8.2f}"
            for slope in (of_clock[name] for of_clock in slopes.values())
        ]
        print(f"{name:26} {' '.join(said)}")
    found = []
    for ours, theirs, most in RATIOS:
        ratios = [
            f"{of_clock[ours].value / of_clock[theirs].value:.2f} in {clock}"
            for clock, of_clock in slopes.items()
            if of_clock[ours].measured and of_clock[theirs].measured
        ]
        found.append(
            f"{ours} takes {' and '.join(ratios) or 'below noise'} of {theirs} (at "
            f"most {most} is wanted)"
        )
    print(f"\nFound: {'; '.join(found)}.")


def main() -> None:
    """Compares quality, or speed."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a table's folder")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=300, help="at most")
    parser.add_argument("--patience", type=int, default=50, help="of early stopping")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--depth", type=int, help="default: 4, with --speed 6")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of peers")
    parser.add_argument("--speed", action="store_true", help="measure rounds")
    parser.add_argument("--few", type=int, default=10, help="rounds of short runs")
    parser.add_argument("--many", type=int, default=60, help="rounds of long runs")
    parser.add_argument("--repeats", type=int, default=5, help="of long and short runs")
    options = parser.parse_args()
    options.depth = options.depth or (6 if options.speed else 4)
    if options.speed:
        result = compare_speed(options)
        report_speed(result)
    else:
        result = compare_quality(options)
        report_quality(result, options.out)
    name = "ranking_speed.json" if options.speed else "ranking.json"
    settings = dict(arguments=vars(options), **describe_machine())
    write_json(options.out / name, settings | result)


if __name__ == "__main__":
    main()
