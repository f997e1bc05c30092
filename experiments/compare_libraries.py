# SPDX-License-Identifier: Apache-2.0
"""Is jboost's held-out loss as good as its peers', with equal parameters?

The peers are XGBoost, LightGBM and scikit-learn's HistGradientBoosting. They are
compared on real tables, each split at random into 80 % training and 20 % test rows,
several times.

    python experiments/compare_libraries.py --tables DIR --task all --cache FILE
    python experiments/compare_libraries.py --tables DIR --cache FILE --fresh jboost
    python experiments/compare_libraries.py --tables DIR --cache FILE --set l2=0.1

DIR has a folder per table with `data.parquet` and `meta.json` (target, drop_columns,
columns with a role). FILE stores every fit by task, table, split, library, version and
parameters, so that a second run computes only what is missing. `--set` passes further
arguments to `jboost.fit`, to compare candidates for a default. Written to --out:
compare_libraries.json with the report of every task.

Held-out losses are means of: r^2 (ratios are of MSE, not RMSE), log-loss, half the
Poisson deviance, |r|, pinball loss, Huber loss. For a fair comparison:

- Huber: every library gets the target divided by delta, the median of |y - median(y)|
  of the training rows, so that delta is 1. XGBoost starts at the median; its own start,
  one Newton step from 0, is far outside the data.
- Offsets: XGBoost and LightGBM omit their own start if an offset is given, so they get
  offset + log(events / exposure). scikit-learn fits rates weighted by exposure, which
  is the same loss.
- Minimum rows of a leaf: 20 for the peers if the loss is absolute or quantile, else 1.
  jboost's "auto" chooses the same numbers.
- All other settings of a peer (the step limit for Poisson, for example) are its
  defaults, except that LightGBM's bins may hold a single row, as in all libraries.
"""

import argparse
import ast
import importlib
import json
import os
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from experiment_tools import choose_tables, describe_machine, make_parser, write_json
from tqdm import tqdm

CONTINUOUS = "abalone bike_sharing_hour california_housing diamonds sk_diabetes"
CONTINUOUS = (*CONTINUOUS.split(), "wine_quality")
REGRESSION = (*CONTINUOUS, "lgb_regression")  # 0/1: no quantiles, and delta is 0
BINARY = "adult bank_marketing give_me_some_credit hotel_bookings lgb_binary phoneme"
TASKS = {  # task: {kind of loss: tables}
    "mean": {
        "squared_error": REGRESSION,
        "logistic": tuple(BINARY.split()),
        "softmax": ("lgb_multiclass", "sk_digits"),
        "poisson": ("ausprivauto", "bike_sharing_hour", "randhie"),
    },
    "absolute": {"absolute_error": REGRESSION},
    "quantile": {"quantile 0.1": CONTINUOUS, "quantile 0.9": CONTINUOUS},
    "huber": {"huber": CONTINUOUS},
}
ROLES = ("weight", "exposure", "group", "init_score", "event", "time")
THREADS = 2


# ---- tables -------------------------------------------------------------------------


class Case(NamedTuple):
    """One row of the report."""

    task: str
    table: str
    kind: str


class Rows(NamedTuple):
    """A table, or its training or test part."""

    x: np.ndarray  # [N, F] float32, NaN = missing
    target: np.ndarray  # [N] float32, or int32 classes
    offset: np.ndarray  # [N] float32, all 0 where the table has none


@lru_cache(maxsize=1)
def load_table(folder: Path) -> Rows:
    """Returns a whole table; categories become ranks among the sorted ones."""
    meta = json.loads((folder / "meta.json").read_text())
    frame = pd.read_parquet(folder / "data.parquet")
    roles = [meta[f"{role}_column"] for role in ROLES if f"{role}_column" in meta]
    features = frame.drop(columns=[meta["target"], *meta["drop_columns"], *roles])
    x = np.empty(features.shape, np.float32)
    for position, name in enumerate(features):
        column = features[name]
        if not pd.api.types.is_numeric_dtype(column):
            codes, _ = pd.factorize(column.astype(object), sort=True)
            column = np.where(codes < 0, np.nan, codes)
        x[:, position] = column
    exposure = frame[meta["exposure_column"]] if "exposure_column" in meta else 1.0
    offset = np.zeros(len(x), np.float32) + np.log(np.asarray(exposure, np.float32))
    return Rows(x, frame[meta["target"]].to_numpy(np.float32), offset)


def split_table(case: Case, folder: Path, split: int) -> tuple[Rows, Rows]:
    """Returns 80 % training and 20 % test rows, drawn with the split as the seed."""
    x, target, offset = load_table(folder / case.table)
    order = np.random.default_rng(split).permutation(len(x))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    if case.kind == "huber":
        target = target / np.median(np.abs(target[train] - np.median(target[train])))
    if case.kind == "softmax":
        target = target.astype(np.int32)
    return tuple(Rows(x[i], target[i], offset[i]) for i in (train, test))


# ---- losses -------------------------------------------------------------------------


def held_out_loss(kind: str, score: np.ndarray, target: np.ndarray) -> float:
    """Returns the mean loss in float64; scores are raw (logits, log means)."""
    score = np.asarray(score, np.float64)
    if kind == "softmax":
        chosen = np.take_along_axis(score, target[:, None], axis=1)[:, 0]
        return float(np.mean(np.logaddexp.reduce(score, axis=1) - chosen))
    y = target.astype(np.float64)
    residual = y - score
    match kind.split():
        case ["squared_error"]:
            loss = residual**2
        case ["absolute_error"]:
            loss = np.abs(residual)
        case ["quantile", tau]:
            loss = np.maximum(float(tau) * residual, (float(tau) - 1) * residual)
        case ["huber"]:
            near = np.minimum(np.abs(residual), 1.0)
            loss = near * (np.abs(residual) - near / 2)
        case ["logistic"]:
            loss = np.logaddexp(0, score) - y * score
        case ["poisson"]:  # y log y is 0 at 0
            loss = y * (np.log(np.maximum(y, 1)) - score) - y + np.exp(score)
    return float(np.mean(loss))


def start_score(kind: str, train: Rows, rows: Rows) -> np.ndarray:
    """Returns the best constant for `train`, plus the rows' offset: [N] or [N, K]."""
    y = train.target
    match kind.split():
        case ["squared_error"]:
            constant = np.mean(y, dtype=np.float64)
        case ["absolute_error"] | ["huber"]:  # Huber's own best is not far
            constant = np.median(y)
        case ["quantile", tau]:
            constant = np.quantile(y, float(tau))
        case ["logistic"]:
            constant = np.log(np.mean(y) / np.mean(1 - y))
        case ["softmax"]:
            return np.tile(np.log(np.bincount(y) / len(y)), (len(rows.x), 1))
        case ["poisson"]:
            constant = np.log(np.mean(y) / np.mean(np.exp(train.offset)))
    return rows.offset + constant


# ---- the four libraries -------------------------------------------------------------

LIBRARIES = ("jboost", "xgboost", "lightgbm", "sklearn")
WORDS = """
num_rounds        num_boost_round   num_iterations           max_iter
learning_rate     learning_rate     learning_rate            learning_rate
max_depth         max_depth         max_depth                max_depth
-                 -                 num_leaves               max_leaf_nodes
max_bins          max_bin           max_bin                  max_bins
l2                reg_lambda        lambda_l2                l2_regularization
min_child_weight  min_child_weight  min_sum_hessian_in_leaf  -
-                 -                 min_data_in_leaf         min_samples_leaf
-                 objective         objective                loss
tau               quantile_alpha    alpha                    quantile
delta             huber_slope       alpha                    -
"""
WORDS = [line.split() for line in WORDS.strip().splitlines()]
OBJECTIVES = {
    "squared_error": (None, "reg:squarederror", "regression", "squared_error"),
    "logistic": (None, "binary:logistic", "binary", "log_loss"),
    "softmax": (None, "multi:softprob", "multiclass", "log_loss"),
    "poisson": (None, "count:poisson", "poisson", "poisson"),
    "absolute_error": (None, "reg:absoluteerror", "l1", "absolute_error"),
    "quantile": (None, "reg:quantileerror", "quantile", "quantile"),
    "huber": (None, "reg:pseudohubererror", "huber", None),
}
EXTRAS = {
    "xgboost": {"tree_method": "hist", "nthread": THREADS},
    "lightgbm": {"num_threads": THREADS, "deterministic": True, "force_row_wise": True}
    | {"min_data_in_bin": 1, "feature_pre_filter": False, "verbosity": -1},
    "sklearn": {"early_stopping": False},
}


def list_parameters(library: str, kind: str, options: argparse.Namespace) -> dict:
    """Returns the equal parameters as a library names them; {} if it lacks the loss."""
    name, *tau = kind.split()
    column = LIBRARIES.index(library)
    objective = OBJECTIVES[name][column]
    if library == "sklearn" and objective is None:
        return {}
    robust = name in ("absolute_error", "quantile", "huber")
    median = name in ("absolute_error", "quantile")
    rows = options.min_child_samples or (20 if median else 1)
    # XGBoost counts no rows, but the Hessian of its robust losses is 1 or less.
    weight = float(rows) if robust and library == "xgboost" else 1.0
    bins = 256 if library in ("jboost", "xgboost") else 255
    values = [options.rounds, 0.1, 6, 64, bins, 1.0, weight, rows, objective]
    values += [float(tau[0]) if tau else None, 1.0 if name == "huber" else None]
    words = [names[column] for names in WORDS]
    named = {w: v for w, v in zip(words, values, strict=True) if v is not None}
    named.pop("-", None)
    return named | EXTRAS.get(library, dict(options.set))


def fit_jboost(kind: str, parameters: dict, train: Rows, test: Rows) -> tuple:
    """Returns raw scores of the test rows and the seconds of fitting."""
    import jax

    import jboost as jb

    bound = {k: parameters.pop(k) for k in ("tau", "delta") if k in parameters}
    loss = partial(getattr(jb.losses, kind.split()[0]), **bound)
    if kind == "softmax":
        parameters["num_scores"] = int(train.target.max()) + 1
    offset = [{"offset": r.offset} if r.offset.any() else {} for r in (train, test)]
    begin = time.perf_counter()
    model, _ = jb.fit(train.x, train.target, loss, **offset[0], **parameters)
    jax.block_until_ready(model)
    seconds = time.perf_counter() - begin
    return jb.predict(model, test.x, **offset[1]), seconds


def fit_xgboost(kind: str, parameters: dict, train: Rows, test: Rows) -> tuple:
    """Does the same with XGBoost; building its matrix is part of the time."""
    import xgboost

    if kind == "softmax":
        parameters["num_class"] = int(train.target.max()) + 1
    num_rounds = parameters.pop("num_boost_round")
    given = kind == "huber" or train.offset.any()
    start = [start_score(kind, train, r) if given else None for r in (train, test)]
    begin = time.perf_counter()
    data = xgboost.DMatrix(train.x, train.target, base_margin=start[0])
    model = xgboost.train(parameters, data, num_rounds)
    seconds = time.perf_counter() - begin
    data = xgboost.DMatrix(test.x, base_margin=start[1])
    return model.predict(data, output_margin=True), seconds


def fit_lightgbm(kind: str, parameters: dict, train: Rows, test: Rows) -> tuple:
    """Does the same with LightGBM; building its data set is part of the time."""
    import lightgbm

    if kind == "softmax":
        parameters["num_class"] = int(train.target.max()) + 1
    num_rounds = parameters.pop("num_iterations")
    given = train.offset.any()
    start = start_score(kind, train, train) if given else None
    begin = time.perf_counter()
    data = lightgbm.Dataset(train.x, train.target, init_score=start)
    model = lightgbm.train(parameters, data, num_rounds)
    seconds = time.perf_counter() - begin
    score = model.predict(test.x, raw_score=True)
    return score + (start_score(kind, train, test) if given else 0), seconds


def fit_sklearn(kind: str, parameters: dict, train: Rows, test: Rows) -> tuple:
    """Does the same with scikit-learn's HistGradientBoosting."""
    from sklearn import ensemble
    from threadpoolctl import threadpool_limits

    classes = kind in ("logistic", "softmax")
    name = "HistGradientBoosting" + ("Classifier" if classes else "Regressor")
    estimator = getattr(ensemble, name)(**parameters)
    exposure = np.exp(train.offset)
    weight = exposure if train.offset.any() else None
    with threadpool_limits(THREADS):
        begin = time.perf_counter()
        estimator.fit(train.x, train.target / exposure, sample_weight=weight)
        seconds = time.perf_counter() - begin
        score = (estimator.decision_function if classes else estimator.predict)(test.x)
    return np.log(score) + test.offset if kind == "poisson" else score, seconds


# ---- measuring, with a cache --------------------------------------------------------


def load_cache(path: Path | None) -> dict[str, dict]:
    """Returns {"fits": {key: result}}."""
    if path is None or not path.exists():
        return {"fits": {}}
    return json.loads(path.read_text())


def save(path: Path | None, key: list, value: dict) -> None:
    """Adds one fit to the contents of the file, which another run may have changed."""
    if path is not None:
        cache = load_cache(path)
        cache["fits"][json.dumps(key, sort_keys=True)] = value
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(cache, indent=1))
        os.replace(part, path)


@lru_cache
def find_version(library: str) -> str:
    """Returns the version of a library, or "source" if it has none."""
    return getattr(importlib.import_module(library), "__version__", "source")


def measure(library: str, kind: str, parameters: dict, train: Rows, test: Rows) -> dict:
    """Fits once; "constant" is the loss that a model without features would have."""
    score, seconds = globals()[f"fit_{library}"](kind, dict(parameters), train, test)
    loss = held_out_loss(kind, score, test.target)
    if not np.isfinite(loss):
        raise FloatingPointError(f"the held-out loss is {loss}")
    constant = held_out_loss(kind, start_score(kind, train, test), test.target)
    return {"loss": loss, "constant": constant, "seconds": round(seconds, 4)}


def measure_all(cases: list[Case], options: argparse.Namespace) -> pd.DataFrame:
    """Returns a row per fit, from the cache or computed; failures are not stored."""
    cached = load_cache(options.cache)["fits"]
    fits = []
    splits = range(options.splits)
    jobs = [(c, s, name) for c in cases for s in splits for name in options.libraries]
    progress = tqdm(jobs, smoothing=0)
    for case, split, library in progress:
        parameters = list_parameters(library, case.kind, options)
        if not parameters:
            continue
        progress.set_description(f"{case.table} {case.kind} {library}")
        key = [*case, split, library, find_version(library), parameters]
        result = cached.get(json.dumps(key, sort_keys=True))
        if result is None or library in options.fresh:
            try:
                parts = split_table(case, options.tables, split)
                result = measure(library, case.kind, parameters, *parts)
            except Exception as error:  # one bad fit must not end a long run
                tqdm.write(f"FAILED {library} on {case}, split {split}: {error!r}")
                continue
            save(options.cache, key, result)
        fits.append({**case._asdict(), "split": split, "library": library, **result})
        ratio = compare(pd.DataFrame(fits), options.subject).get("/best")
        if ratio is not None:
            progress.set_postfix(ratio=f"{np.exp(np.log(ratio).mean()):.4f}")
    return pd.DataFrame(fits)


# ---- the report ---------------------------------------------------------------------


def compare(fits: pd.DataFrame, subject: str) -> pd.DataFrame:
    """Returns a row per table: mean losses, the subject's ratios, median seconds.

    "/best" divides by the peer with the lowest mean loss, "/mean" by the mean of the
    peers, both split by split; "+-" is the standard error over the splits.
    """
    case = ["table", "kind"]
    losses = fits.pivot(index=[*case, "split"], columns="library", values="loss")
    rows = losses.groupby(level=case, sort=False).mean()
    rows.insert(0, "constant", fits.groupby(case)["constant"].mean())
    peers = losses.drop(columns=subject, errors="ignore").dropna(how="all")
    if subject in losses and len(peers):
        best = peers.groupby(level=case).mean().idxmin(axis=1)
        lowest = [peers.loc[index, best[index[:2]]] for index in peers.index]
        for name, peer in {"/best": lowest, "/mean": peers.mean(axis=1)}.items():
            ratio = (losses.loc[peers.index, subject] / peer).groupby(level=case)
            rows[name] = ratio.mean()
            rows[f"+-{name}"] = ratio.sem()
    seconds = fits.groupby([*case, "library"])["seconds"].median().unstack()
    return rows.join(seconds.add_prefix("s "))


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the geometric mean, median and worst table of both ratios."""
    ratios = rows.filter(regex="^/").dropna()
    summary = pd.DataFrame({"geometric mean": np.exp(np.log(ratios).mean())})
    summary["median"] = ratios.median()
    summary["worst"] = ratios.max()
    summary["worst table"] = [" ".join(index) for index in ratios.idxmax()]
    return summary.assign(tables=len(ratios))


def report(task: str, fits: pd.DataFrame, options: argparse.Namespace) -> dict:
    """Prints one task's table and summary; returns both."""
    rows = compare(fits, options.subject)
    summary = summarize(rows)
    errors = {c: rows[c].map("{:.2g}".format) for c in rows if c.startswith("+-")}
    shown = rows.assign(**errors).reset_index()
    print(f"\n# {task}: held-out loss, {options.subject} / peers, seconds per fit\n")
    print(shown.to_string(index=False, float_format="{:.5g}".format), end="\n\n")
    if len(summary):
        print(summary.to_string(float_format="{:.4f}".format), flush=True)
    summary = summary.rename_axis("ratio").reset_index()
    result = {"rows": rows.reset_index(), "summary": summary}
    return {k: json.loads(v.to_json(orient="records")) for k, v in result.items()}


def conclude(reports: dict[str, dict], subject: str) -> str:
    """Returns the result in one sentence."""
    said = [
        f"{row['geometric mean']:.4f} for {task} (tables: {row['tables']})"
        for task, tables in reports.items()
        for row in tables["summary"]
        if row["ratio"] == "/best"
    ]
    if not said:
        return f"Found: nothing to compare {subject} with."
    return (
        f"Found: the geometric mean of {subject}'s held-out loss over that of the best "
        f"peer is {', '.join(said)}."
    )


def print_parameters(kind: str, options: argparse.Namespace) -> None:
    """Prints a row per parameter, then those that only one library has."""
    columns, rest = {}, {}
    for library in options.libraries:
        rest[library] = own = list_parameters(library, kind, options)
        words = [names[LIBRARIES.index(library)] for names in WORDS]
        cells = [f"{word} = {own.pop(word)}" if word in own else "-" for word in words]
        columns[f"{library} {find_version(library)}"] = cells
    print(f"\n# {kind}: equal parameters\n")
    print(pd.DataFrame(columns).to_string(index=False))
    print("\nand", *(f"{k}: {v}" for k, v in rest.items() if v), sep="\n", flush=True)


# ---- the command line ---------------------------------------------------------------


def parse_setting(text: str) -> tuple[str, Any]:
    """Turns "l2=0.5" into ("l2", 0.5); anything but a literal stays a string."""
    name, value = text.split("=", 1)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_names = partial(add, nargs="+", choices=LIBRARIES)
    add("--tables", type=Path, required=True, metavar="DIR")
    add("--task", nargs="+", choices=[*TASKS, "all"], default=["all"])
    add("--only", nargs="+", metavar="TABLE", help="only these tables")
    add("--splits", type=int, default=5)
    add("--rounds", type=int, default=300)
    add_names("--libraries", default=list(LIBRARIES))
    add_names("--fresh", default=[], help="measure these libraries again")
    add(
        "--subject",
        choices=LIBRARIES,
        default="jboost",
        help="library whose ratios are shown",
    )
    add("--cache", type=Path, metavar="FILE", help="JSON file that stores all fits")
    add("--set", nargs="+", type=parse_setting, default=[], metavar="NAME=VALUE")
    add("--min-child-samples", type=int, metavar="ROWS", help="the peers' in all tasks")
    options = parser.parse_args()
    if "all" in options.task:
        options.task = list(TASKS)
    kinds = [TASKS[task] for task in options.task]
    known = {table for each in kinds for tables in each.values() for table in tables}
    there = [n for n in sorted(known) if (options.tables / n / "meta.json").exists()]
    if not there:
        parser.error(
            f"--tables must hold a folder for one of {', '.join(sorted(known))}"
        )
    options.only = choose_tables(parser, options.only, there)
    return options


def main() -> None:
    """Runs the chosen tasks one after the other."""
    options, reports = parse_options(), {}
    for task in options.task:
        cases = [
            Case(task, table, kind)
            for kind, tables in TASKS[task].items()
            for table in tables
            if table in options.only
        ]
        for kind in dict.fromkeys(case.kind for case in cases):
            print_parameters(kind, options)
        fits = measure_all(cases, options)
        if len(fits):
            reports[task] = report(task, fits, options)
    if not reports:
        raise SystemExit("every fit failed")
    print(f"\n{conclude(reports, options.subject)}")
    result = {"arguments": vars(options), **describe_machine(), "reports": reports}
    write_json(options.out / "compare_libraries.json", result)


if __name__ == "__main__":
    main()
