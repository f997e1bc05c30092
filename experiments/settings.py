# SPDX-License-Identifier: Apache-2.0
"""Which settings matter on small tables?

    python experiments/settings.py

Five folds on three tables of scikit-learn and on Friedman's first function, with one
setting changed at a time. Ratios are losses at the best round of each, divided by that
of the defaults; the last row is the standard error of that loss over the folds,
divided by it.

Written to --out: settings.json.
"""

from functools import partial

import numpy as np
from experiment_tools import (
    describe_machine,
    make_figures,
    make_parser,
    print_table,
    write_json,
)
from sklearn import datasets
from tqdm import tqdm

import jboost as jb

SETTINGS = (
    dict(max_depth=2), dict(max_depth=4), dict(max_depth=8), dict(min_child_samples=30),
    dict(colsample_bynode=0.3), dict(subsample=1.0, rows_per_threshold=0),
    dict(l2=10.0), dict(parent_rows=0.0), dict(parent_rows=30.0),
    dict(linear_leaves=False), dict(learning_rate=0.05),
)  # fmt: skip
FOLDS = 5


def list_tables():
    """Returns {name: (x, y, loss, number of scores)}."""
    losses = jb.losses
    friedman = datasets.make_friedman1(2000, noise=1.0, random_state=0)
    diabetes = datasets.load_diabetes(return_X_y=True)
    cancer = datasets.load_breast_cancer(return_X_y=True)
    wine = datasets.load_wine(return_X_y=True)
    return {
        "diabetes (442 rows, squared error)": (*diabetes, losses.squared_error, 1),
        "breast cancer (569, logistic)": (*cancer, losses.logistic, 1),
        "wine (178, softmax)": (*wine, losses.softmax, 3),
        "Friedman (2,000, squared error)": (*friedman, losses.squared_error, 1),
    }


def measure(x, y, loss, scores, rounds, **settings):
    """Returns the losses of the folds at the best round of all, and that round."""
    found = jb.cross_validate(
        x, y, loss, folds=FOLDS, num_rounds=rounds, num_scores=scores, **settings
    )
    curves = np.asarray(found.validation_loss)
    best = int(curves.mean(axis=0).argmin())
    return curves[:, best], best


def main():
    """Measures all settings on all tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="at most")
    options = parser.parse_args()
    tables = list_tables()
    columns = {name: [] for name in tables}
    with tqdm(total=len(tables) * (1 + len(SETTINGS))) as bar:
        for name, table in tables.items():
            run = partial(measure, *table, options.rounds)
            base, best = run()
            bar.update()
            for settings in SETTINGS:
                losses, _ = run(**settings)
                columns[name].append(f"{losses.mean() / base.mean():.2f}")
                bar.update()
            error = base.std(ddof=1) / np.sqrt(FOLDS) / base.mean()
            columns[name] += [str(best), f"{error:.2f}"]
    labels = [
        "`" + ", ".join(f"{k}={v}" for k, v in settings.items()) + "`"
        for settings in SETTINGS
    ]
    labels += ["best round of the defaults", "standard error"]
    cells = zip(labels, *columns.values(), strict=True)
    table = [["setting", *tables], *([*row] for row in cells)]
    print_table(table)
    worst = {row[0]: max(map(float, row[1:])) for row in table[1 : 1 + len(SETTINGS)]}
    safe = [label for label, ratio in worst.items() if ratio <= 1]
    if safe:
        print(f"Found: no table errs more with {', '.join(safe)}.")
    else:
        print("Found: every setting errs more than the defaults on some table.")
    result = {**describe_machine(), "figures": make_figures(ratios=table)}
    write_json(options.out / "settings.json", result)


if __name__ == "__main__":
    main()
