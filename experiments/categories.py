# SPDX-License-Identifier: Apache-2.0
"""Are native categorical splits as good as LightGBM's and XGBoost's on held-out rows?

Rounds, learning rate, depth, leaves, bins, l2 and the minimum weight of a child are
equal; the latter are in units of the loss for all libraries
(`regularization="absolute"`, and half of r^2). The treatment of categories is the
default of each library. jboost is also run with categories as ordinary numbers (their
rank among the sorted ones), and with a column of 0 and 1 for each of the 30 most
frequent ones.

    python experiments/categories.py                     # generated tables
    python experiments/categories.py --data FILE --target COLUMN --loss logistic
    python experiments/categories.py --tables DIR --cache FILE --set max_onehot=10

FILE is CSV or Parquet; columns that are not numbers are categories, as are those named
by `--categorical`. DIR has a folder per table with `data.parquet` and `meta.json`
(target, drop_columns, columns with a role). Each table is split at random into 80 %
training and 20 % test rows, several times. The cache stores every fit, so that a second
run computes only what is missing. Written to --out: categories.json.

Losses are means of r^2, log-loss, or half the Poisson deviance, after the last round
and (in brackets) after each library's best round on the test rows.
"""

import argparse
import ast
import json
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from experiment_tools import choose_tables, describe_machine, make_parser, write_json
from tqdm import tqdm

import jboost as jb

ROLES = ("weight", "exposure", "group", "init_score", "event", "time")
LOSSES = {"squared_error": "regression", "logistic": "binary", "poisson": "poisson"}
OBJECTIVES = {  # of XGBoost
    "squared_error": "reg:squarederror",
    "logistic": "binary:logistic",
    "poisson": "count:poisson",
}
# Table, loss, and what else differs from its meta.json.
REAL = {
    "adult": ("logistic", {}),
    "hotel_bookings": ("logistic", {}),
    "titanic": ("logistic", {}),
    "bank_marketing": ("logistic", {}),
    "ausprivauto": ("poisson", {}),
    "diamonds": ("squared_error", {}),
    "california_housing": ("squared_error", {}),
    "abalone": ("squared_error", {}),
    "wine_quality": ("squared_error", {}),
    "hotel_bookings adr": ("squared_error", {"target": "adr"}),
}
LOSSES_OF_JBOOST = {
    "squared_error": lambda score, target: (score - target) ** 2 / 2,
    "logistic": jb.losses.logistic,
    "poisson": jb.losses.poisson,
}
MOST_COLUMNS = 30  # of one feature as columns of 0 and 1
PARTS = 20  # the loss is computed after so many parts of the rounds


class Table(NamedTuple):
    """A table. Categories are integers from 0, in the order of their names."""

    x: np.ndarray  # [N, F] float32, NaN = missing
    target: np.ndarray  # [N] float32
    offset: np.ndarray  # [N] float32
    categorical: tuple[int, ...]
    loss: str

    def take(self, rows: np.ndarray) -> "Table":
        """Returns some of the rows."""
        x, target, offset, *rest = self
        return Table(x[rows], target[rows], offset[rows], *rest)


# ---- tables -------------------------------------------------------------------------


def read_frame(
    frame: pd.DataFrame, target: str, loss: str, named: list[str], exposure: str | None
) -> Table:
    """Turns a data frame into a table; ``named`` columns are categories as well."""
    features = frame.drop(columns=[target] + ([exposure] if exposure else []))
    x = np.empty(features.shape, np.float32)
    places = []
    for place, name in enumerate(features):
        column = features[name]
        if name in named or not pd.api.types.is_numeric_dtype(column):
            codes, _ = pd.factorize(column.astype(object), sort=True)
            column = np.where(codes < 0, np.nan, codes)
            places.append(place)
        x[:, place] = column
    y = frame[target]
    if not pd.api.types.is_numeric_dtype(y):
        y = pd.Series(pd.factorize(y, sort=True)[0])
    offset = np.zeros(len(x), np.float32)
    if exposure:
        offset += np.log(frame[exposure].to_numpy(np.float32))
    return Table(x, y.to_numpy(np.float32), offset, tuple(places), loss)


@lru_cache(maxsize=1)
def read_table(folder: Path, name: str) -> Table:
    """Reads one of the tables of REAL."""
    loss, changes = REAL[name]
    folder = folder / name.split()[0]
    meta = json.loads((folder / "meta.json").read_text()) | changes
    frame = pd.read_parquet(folder / "data.parquet")
    exposure = meta.get("exposure_column")
    roles = {meta.get(f"{role}_column") for role in ROLES} - {None, exposure}
    frame = frame.drop(columns=[*{*meta["drop_columns"], *roles}])
    coded = [*meta.get("categorical_columns", ()), *meta["integer_coded_categoricals"]]
    named = [column for column in coded if column in frame]
    return read_frame(frame, meta["target"], loss, named, exposure)


def _effects(rng, codes, spread=1.0):
    return rng.normal(0, spread, codes.max() + 1)[codes]


def generate(name: str) -> Table:
    """Returns tables whose categories have a known effect.

    additive: five features of 4 to 64 categories, each with an effect of its own.
    crossed: the slope of a number depends on a category, and two categories interact.
    many: 2,000 categories of very different frequency, with effects, and a number.
    nothing: 10,000 categories in 3,000 rows, without effect, and two numbers.
    """
    rng = np.random.default_rng(sum(map(ord, name)))
    size = 3750 if name == "nothing" else 12500
    numbers = rng.normal(size=(size, 2))
    if name == "additive":
        codes = [rng.integers(0, count, size) for count in (4, 8, 16, 32, 64)]
        signal = sum(_effects(rng, c) for c in codes)
    elif name == "crossed":
        codes = [rng.integers(0, count, size) for count in (20, 30)]
        signal = _effects(rng, codes[0]) * numbers[:, 0]
        signal = signal + _effects(rng, 30 * codes[0] + codes[1])
    elif name == "many":
        codes = [np.minimum(rng.zipf(1.3, size) - 1, 1999)]
        signal = _effects(rng, codes[0]) + numbers[:, 0]
    else:
        codes = [rng.integers(0, 10_000, size)]
        signal = numbers[:, 0] + np.sin(3 * numbers[:, 1])
    codes = [rng.permutation(c.max() + 1)[c] for c in codes]  # no order by frequency
    x = np.column_stack([numbers, *codes]).astype(np.float32)
    y = (signal + rng.normal(size=size)).astype(np.float32)
    places = tuple(range(2, x.shape[1]))
    return Table(x, y, np.zeros(size, np.float32), places, "squared_error")


def split(table: Table, seed: int) -> tuple[Table, Table]:
    """Returns 80 % training and 20 % test rows."""
    order = np.random.default_rng(seed).permutation(len(table.x))
    cut = len(order) // 5
    return table.take(order[cut:]), table.take(order[:cut])


def held_out(loss: str, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns mean losses in float64 of scores [stages, N]."""
    scores, y = np.asarray(scores, np.float64), y.astype(np.float64)
    if loss == "squared_error":
        values = (y - scores) ** 2
    elif loss == "logistic":
        values = np.logaddexp(0, scores) - y * scores
    else:  # y log y is 0 at 0
        values = y * (np.log(np.maximum(y, 1)) - scores) - y + np.exp(scores)
    return np.mean(values, axis=-1)


# ---- the libraries -----------------------------------------------------------------


def stages_of(options: argparse.Namespace) -> np.ndarray:
    """Returns the rounds after which the loss is computed."""
    return np.unique(np.linspace(0, options.rounds, PARTS + 1)[1:].astype(int))


def fit_jboost(train, test, options, categorical=True):
    """Returns scores of the test rows after some rounds, and seconds of fitting."""
    some = {"offset": train.offset} if train.offset.any() else {}
    begin = time.perf_counter()
    model, _ = jb.fit(
        train.x, train.target, LOSSES_OF_JBOOST[train.loss], **some,
        categorical=train.categorical if categorical else None,
        num_rounds=options.rounds, learning_rate=options.rate, max_depth=options.depth,
        **{"regularization": "absolute", **dict(options.set if categorical else ())},
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    some = {"offset": test.offset} if train.offset.any() else {}
    scores = jb.staged_predict(model, test.x, **some)
    return np.asarray(scores)[stages_of(options) - 1], seconds


def fit_numbers(train, test, options):
    """Does the same with categories as ordinary numbers."""
    return fit_jboost(train, test, options, categorical=False)


def fit_columns(train, test, options):
    """Does the same with columns of 0 and 1 for the most frequent categories."""
    parts = [[np.delete(rows.x, train.categorical, axis=1)] for rows in (train, test)]
    for place in train.categorical:
        values, counts = np.unique(train.x[:, place], return_counts=True)
        for value in values[np.argsort(-counts, kind="stable")][:MOST_COLUMNS]:
            for part, rows in zip(parts, (train, test), strict=True):
                part.append((rows.x[:, place] == value)[:, None].astype(np.float32))
    train, test = (
        rows._replace(x=np.concatenate(part, axis=1), categorical=())
        for rows, part in zip((train, test), parts, strict=True)
    )
    return fit_jboost(train, test, options, categorical=False)


def fit_xgboost(train, test, options):
    """Does the same with XGBoost and its treatment of categories."""
    import xgboost

    parameters = {
        "objective": OBJECTIVES[train.loss], "learning_rate": options.rate,
        "max_depth": options.depth, "max_bin": 256, "reg_lambda": 1.0,
        "min_child_weight": 1.0, "tree_method": "hist", "nthread": options.threads,
    }  # fmt: skip
    kinds = ["q"] * train.x.shape[1]
    for place in train.categorical:
        kinds[place] = "c"
    some: dict[str, Any] = {"feature_types": kinds, "enable_categorical": True}
    start = np.log(train.target.sum() / np.exp(train.offset).sum())
    margins = [rows.offset + start for rows in (train, test)]
    margins = margins if train.offset.any() else [None, None]
    begin = time.perf_counter()
    data = xgboost.DMatrix(train.x, train.target, base_margin=margins[0], **some)
    model = xgboost.train(parameters, data, options.rounds)
    seconds = time.perf_counter() - begin
    data = xgboost.DMatrix(test.x, base_margin=margins[1], **some)
    stages = [
        model.predict(data, output_margin=True, iteration_range=(0, int(stage)))
        for stage in stages_of(options)
    ]
    return np.stack(stages), seconds


def fit_lightgbm(train, test, options):
    """Does the same with LightGBM and its treatment of categories."""
    import lightgbm

    parameters = {
        "objective": LOSSES[train.loss], "learning_rate": options.rate,
        "max_depth": options.depth, "num_leaves": 2**options.depth, "max_bin": 255,
        "lambda_l2": 1.0, "min_sum_hessian_in_leaf": 1.0, "min_data_in_leaf": 1,
        "min_data_in_bin": 1, "feature_pre_filter": False, "verbosity": -1,
        "num_threads": options.threads, "deterministic": True, "force_row_wise": True,
    }  # fmt: skip
    start = np.log(train.target.sum() / np.exp(train.offset).sum())
    margins = [rows.offset + start for rows in (train, test)]
    given = train.offset.any()
    begin = time.perf_counter()
    data = lightgbm.Dataset(
        train.x, train.target, init_score=margins[0] if given else None,
        categorical_feature=list(train.categorical),
    )  # fmt: skip
    model = lightgbm.train(parameters, data, options.rounds)
    seconds = time.perf_counter() - begin
    stages = [
        model.predict(test.x, raw_score=True, num_iteration=int(stage))
        for stage in stages_of(options)
    ]
    return np.stack(stages) + (margins[1] if given else 0), seconds


CONTESTANTS = {
    "jboost": fit_jboost,
    "numbers": fit_numbers,
    "columns": fit_columns,
    "lightgbm": fit_lightgbm,
    "xgboost": fit_xgboost,
}


# ---- measuring ----------------------------------------------------------------------


def measure(name, table, seed, who, options, cache) -> dict[str, float]:
    """Returns one fit, from the cache or computed."""
    numbers = [options.rounds, options.rate, options.depth]
    key = json.dumps(
        [name, seed, who, *numbers, options.set if who == "jboost" else []]
    )
    if key not in cache or who in options.fresh:
        train, test = split(table, seed)
        scores, seconds = CONTESTANTS[who](train, test, options)
        losses = held_out(table.loss, scores, test.target)
        cache[key] = dict(
            last=float(losses[-1]), best=float(losses.min()), seconds=seconds
        )
        if options.cache is not None:
            path = options.cache
            kept = json.loads(path.read_text()) if path.exists() else {}
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(kept | {key: cache[key]}, indent=1))
            os.replace(part, path)
    return cache[key]


def report(fits: pd.DataFrame) -> str:
    """Prints a row per table, and the geometric means of the ratios.

    Returns the result in one sentence.
    """
    subject = "jboost" if (fits["who"] == "jboost").any() else fits["who"].iloc[0]
    said = []
    for column, title in (("last", "after the last round"), ("best", "at the best")):
        losses = fits.pivot_table(
            index=["table", "seed"], columns="who", values=column, sort=False
        )
        ratios = losses.rdiv(losses[subject], axis=0).drop(columns=subject)
        rows = losses.groupby(level=0, sort=False).mean()
        logs = np.log(ratios).groupby(level=0, sort=False).mean()
        rows = rows.join(np.exp(logs).add_prefix(f"{subject}/"))
        print(f"\n# held-out loss {title}\n")
        print(rows.to_string(float_format="{:.5g}".format))
        print("\ngeometric means over tables:")
        means = np.exp(logs.mean())
        print(means.to_string(float_format="{:.4f}".format))
        words = ", ".join(f"{mean:.4f} ({who})" for who, mean in means.items())
        said.append(f"{title} {words or 'there is no other'}")
    seconds = fits.pivot_table(
        index="table", columns="who", values="seconds", sort=False
    )
    print("\n# seconds per fit, compilation included\n")
    print(seconds.to_string(float_format="{:.2f}".format), flush=True)
    tables = fits["table"].nunique()
    return (
        f"Found: {subject}'s held-out loss divided by others', geometric mean over "
        f"tables ({tables}): {'; '.join(said)}."
    )


def parse_setting(text: str) -> tuple[str, Any]:
    """Turns "min_gain=0.5" into ("min_gain", 0.5)."""
    name, value = text.split("=", 1)
    return name, ast.literal_eval(value)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="CSV or parquet file (default: generated tables)",
    )
    add("--target", metavar="COLUMN")
    add("--loss", choices=[*LOSSES], default="squared_error")
    add("--categorical", nargs="+", default=[], metavar="COLUMN")
    add("--drop", nargs="+", default=[], metavar="COLUMN")
    add("--tables", type=Path, metavar="DIR", help="real tables")
    add("--only", nargs="+", metavar="TABLE", help="only these tables")
    add("--who", nargs="+", choices=[*CONTESTANTS], default=[*CONTESTANTS])
    add("--fresh", nargs="+", choices=[*CONTESTANTS], default=[])
    add("--splits", type=int, default=5)
    add("--rounds", type=int, default=300)
    add("--rate", type=float, default=0.1)
    add("--depth", type=int, default=6)
    add("--threads", type=int, default=2)
    add("--cache", type=Path, metavar="FILE", help="JSON file that stores all fits")
    add("--set", nargs="+", type=parse_setting, default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if (options.data is None) != (options.target is None):
        parser.error("--data and --target go together")
    options.tables = list_tables(parser, options)
    return options


def list_tables(parser, options: argparse.Namespace) -> dict[str, Any]:
    """Returns {name: function that returns the table}."""
    if options.data is not None:
        read = pd.read_csv if options.data.suffix == ".csv" else pd.read_parquet
        frame = read(options.data).drop(columns=options.drop)
        table = read_frame(
            frame, options.target, options.loss, options.categorical, None
        )
        return {options.data.stem: lambda: table}
    names = ("additive", "crossed", "many", "nothing")
    tables: dict[str, Any] = {name: lambda name=name: generate(name) for name in names}
    if options.tables is not None:
        folder = options.tables
        there = [n for n in REAL if (folder / n.split()[0] / "meta.json").exists()]
        if not there:
            parser.error(f"--tables must hold a folder for one of {', '.join(REAL)}")
        tables |= {name: lambda name=name: read_table(folder, name) for name in there}
    return {name: tables[name] for name in choose_tables(parser, options.only, tables)}


def main() -> None:
    """Measures all libraries on all tables."""
    options = parse_options()
    cache = {}
    if options.cache is not None and options.cache.exists():
        cache = json.loads(options.cache.read_text())
    tables = options.tables
    jobs = [
        (n, s, w) for n in tables for s in range(options.splits) for w in options.who
    ]
    fits, last, table = [], None, None
    for name, seed, who in tqdm(jobs, smoothing=0):
        if name != last:
            last, table = name, tables[name]()
        result = measure(name, table, seed, who, options, cache)
        fits.append(dict(table=name, seed=seed, who=who, **result))
    print(f"\n{report(pd.DataFrame(fits))}")
    arguments = vars(options) | {"tables": [*tables]}
    result = {"arguments": arguments, **describe_machine(), "fits": fits}
    write_json(options.out / "categories.json", result)


if __name__ == "__main__":
    main()
