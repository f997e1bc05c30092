# SPDX-License-Identifier: Apache-2.0
"""Does a minute of tuning help, and how does it compare with Optuna and LightGBM?

Tunes squared error and logistic loss on tables, and compares losses on test rows:

- jboost with its defaults, `fit(x, y, loss)`;
- `jb.tune(x, y, loss, seconds=60)`;
- Optuna's TPE sampler with LightGBM, ``--trials`` of 5 folds with early stopping; the
  best trial is trained on all rows. Its loss after a tenth of the trials, too;
- CatBoost with its defaults, of which the best number of rounds is found on a fifth of
  the rows.

Ratios below 1 say that tuning errs less. Libraries that are not installed are left out.

    python experiments/tuning.py --tables DIR --half report --only abalone titanic

DIR has a folder per table, as for compare_libraries.py; without --tables, Friedman's
first function is the only table. Written to --out: tuning.json, after each table.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from compare_fits import held_out_loss
from compare_tables import Case, Rows, find_cases, find_half, split_table
from experiment_tools import make_figures, make_parser, print_table, save_json

TASKS = ("squared_error", "logistic")
PEERS = ("defaults", "CatBoost", "Optuna, 10 %", "Optuna")
NOTHING = 1e-6  # a loss below which ratios say nothing


def main() -> None:
    """Tunes on each table, and prints the ratios."""
    options = parse_options()
    results: dict[str, dict[str, Any]] = {}
    for case, train, test in list_tables(options):
        found = measure(case.kind, train, test, options)
        results[f"{case.table}, {case.kind}"] = {"rows": len(train.x), **found}
        table = tabulate(results)
        print(", ".join(table[-2]), flush=True)
        figures = make_figures(losses=table)
        save_json(options.out / "tuning.json", {"results": results, "figures": figures})
    print_table(table)
    pairs = zip(table[0][2:-1], table[-1][2:-1], strict=True)
    said = ", ".join(f"{mean} {head}" for head, mean in pairs)
    print(f"Found: in the mean of {len(results)} table(s), tuning is {said}.")


def tabulate(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns losses of tuned models to those of others, and geometric means."""
    there = [p for p in PEERS if any(p in found for found in results.values())]
    rows = [["table", "rows", *(f"to {name}" for name in there), "settings"]]
    ratios: dict[str, list[float]] = {name: [] for name in there}
    for label, found in results.items():
        tuned, cells = found["tune"]["loss"], []
        for name in there:
            other = found[name]["loss"] if name in found else np.nan
            cells.append(f"{tuned / other:.3f}".replace("nan", "-"))
            if name in found and tuned > NOTHING:
                ratios[name].append(tuned / other)
        number = str(found["tune"]["settings"])
        rows.append([label.replace("_", " "), f"{found['rows']:,}", *cells, number])
    means = [f"{np.exp(np.mean(np.log(each))):.3f}" for each in ratios.values()]
    return [*rows, ["geometric mean", "", *means, ""]]


def list_tables(options):
    """Yields cases with their training and test rows."""
    if options.tables is None:
        generator = np.random.default_rng(0)
        x = generator.random((options.rows, 10)).astype(np.float32)
        y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        y += 10 * x[:, 3] + 5 * x[:, 4] + generator.normal(size=len(x))
        rows = Rows(x, y.astype(np.float32), np.zeros(len(x), np.float32), ())
        first = np.arange(options.rows) < options.rows // 5
        yield (
            Case("squared_error", "squared_error", "friedman"),
            *(rows.take(np.flatnonzero(mask)) for mask in (~first, first)),
        )
        return
    for case in find_cases(options.tables, TASKS):
        named = not options.only or case.table in options.only
        if named and options.half in (None, find_half(case.folder)):
            train, validation, test = split_table(case, options.tables, 0, options.most)
            yield case, train.join(validation), test


def measure(kind, train, test, options):
    """Returns the loss on test rows and the seconds of each contender."""
    import jboost as jb

    loss = getattr(jb.losses, kind)
    found: dict[str, dict[str, Any]] = {}

    def record(name, begun, predict, **more):
        seconds = time.perf_counter() - begun
        value = held_out_loss(kind, predict(test.x), test.target)
        found[name] = {"loss": value, "seconds": seconds, **more}

    begun = time.perf_counter()
    model, _ = jb.fit(train.x, train.target, loss)
    record("defaults", begun, lambda x: np.asarray(jb.predict(model, x)))
    begun = time.perf_counter()
    model, tuned = jb.tune(train.x, train.target, loss, seconds=options.seconds)
    record(
        "tune", begun, lambda x: np.asarray(jb.predict(model, x)),
        settings=len(tuned.points), best=tuned.best_value,
    )  # fmt: skip
    for run in (tune_lightgbm, fit_catboost):
        try:
            run(kind, train, options, record)
        except ImportError:
            continue
    return found


def tune_lightgbm(kind, train, options, record):
    """Tunes LightGBM by Optuna; records the best after a tenth of the trials, too."""
    import lightgbm
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    objective = {"squared_error": "regression", "logistic": "binary"}[kind]
    fixed = {"objective": objective, "verbosity": -1, "num_threads": 2}
    begun = time.perf_counter()
    order = np.random.default_rng(0).permutation(len(train.x)) % 5
    folds = [(np.flatnonzero(order != k), np.flatnonzero(order == k)) for k in range(5)]

    def validate(trial):
        chosen = fixed | {
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "num_leaves": trial.suggest_int("num_leaves", 4, 256, log=True),
            "min_data_in_leaf": trial.suggest_int("min_data_in_leaf", 1, 100, log=True),
            "bagging_fraction": trial.suggest_float("bagging_fraction", 0.5, 1.0),
            "bagging_freq": 1,
            "feature_fraction": trial.suggest_float("feature_fraction", 0.4, 1.0),
            "lambda_l2": trial.suggest_float("lambda_l2", 1e-3, 30.0, log=True),
        }
        data = lightgbm.Dataset(train.x, train.target)
        curves = lightgbm.cv(
            chosen, data, 2000, folds=folds,
            callbacks=[lightgbm.early_stopping(50, verbose=False)],
        )  # fmt: skip
        means = next(values for name, values in curves.items() if "mean" in name)
        trial.set_user_attr("call", (chosen, int(np.argmin(means)) + 1))
        return float(np.min(means))

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    for name, trials in (("Optuna, 10 %", options.trials // 10), ("Optuna", None)):
        rest = options.trials - options.trials // 10 if trials is None else trials
        study.optimize(validate, n_trials=rest)
        chosen, rounds = study.best_trial.user_attrs["call"]
        data = lightgbm.Dataset(train.x, train.target)
        model = lightgbm.train(chosen, data, rounds)
        record(name, begun, lambda x, model=model: model.predict(x, raw_score=True))


def fit_catboost(kind, train, options, record):
    """Fits CatBoost's defaults with early stopping."""
    import catboost

    del options
    begun = time.perf_counter()
    objective = {"squared_error": "RMSE", "logistic": "Logloss"}[kind]
    fixed = {"loss_function": objective, "thread_count": 2, "verbose": False}
    fixed |= {"allow_writing_files": False}
    held_out = np.random.default_rng(0).permutation(len(train.x)) % 5 == 0
    part = train.x[~held_out], train.target[~held_out]
    model = catboost.CatBoost({**fixed, "iterations": 1000})
    model.fit(*part, eval_set=(train.x[held_out], train.target[held_out]))
    rounds = model.get_best_iteration() + 1
    model = catboost.CatBoost({**fixed, "iterations": rounds})
    model.fit(train.x, train.target)
    record(
        "CatBoost",
        begun,
        lambda x: model.predict(x, prediction_type="RawFormulaVal"),
    )


def parse_options():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--tables", type=Path, help="a folder of tables")
    parser.add_argument("--half", choices=("choose", "report"))
    parser.add_argument("--only", nargs="+", default=[], help="names of tables")
    parser.add_argument("--most", type=int, help="rows of a table, at most")
    parser.add_argument("--rows", type=int, default=5000, help="of the made table")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--trials", type=int, default=20, help="of Optuna")
    return parser.parse_args()


if __name__ == "__main__":
    main()
