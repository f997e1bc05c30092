# SPDX-License-Identifier: Apache-2.0
"""How likely are held-out targets under a normal distribution that boosting predicts?

Two scores, the mean and the logarithm of the standard deviation, are trained on the
negative log-likelihood (NLL) of a normal distribution, once for each unit of the target
and each curvature. The NLL is printed in the original unit of the target. It must not
depend on the unit that training used.

    python experiments/likelihood.py
    python experiments/likelihood.py --data FILE --target COLUMN --splits 10

Without --data the table is scikit-learn's diabetes progression (442 rows, no download).
FILE is CSV or parquet; columns that are not numbers become ranks of their sorted
values, and rows without a target are dropped. Written to --out: a JSON with all
numbers, the versions and the device.

- Each split holds out 10 % of the rows at random. 20 % of the others choose the number
  of rounds by early stopping, and all of them train the model (the recipe of Gal and
  Ghahramani 2016, and of NGBoost, Duan et al. 2020). All other settings are defaults.
- "unit 100" means that targets were divided by their standard deviation and multiplied
  by 100 before training; "raw" that they were left alone.
- "fisher" passes the expected Hessian exp(-2 s1), 2 as ``curvature=``; "exact" uses the
  second derivatives of the loss.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
from experiment_tools import describe_machine, make_parser, write_json
from tqdm import tqdm

import jboost as jb

UNITS = ("raw", 100.0, 10.0, 1.0, 0.1, 0.01)


def normal(score, target):
    """The negative log-likelihood of a mean and a log standard deviation."""
    z = (target - score[0]) * jnp.exp(-score[1])
    return z**2 / 2 + score[1] + jnp.log(2 * jnp.pi) / 2


def fisher(score, target):
    """The expected Hessian of ``normal``, which is diagonal."""
    del target
    return jnp.exp(-2 * score[1]), 2.0


CURVATURES = {"auto": "auto", "fisher": fisher, "exact": "exact"}


def load_table(path: Path | None, target: str | None) -> tuple:
    """Returns the name, x and y of scikit-learn's diabetes table, or of a file."""
    if path is None:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        return "diabetes", x.astype(np.float32), y
    frame = pd.read_csv(path) if ".csv" in path.suffixes else pd.read_parquet(path)
    if target not in frame:
        raise SystemExit(f"--target must be one of {list(frame)}, got {target!r}")
    frame = frame[frame[target].notna()]
    features = [encode(column) for _, column in frame.drop(columns=target).items()]
    x = np.stack(features, axis=1).astype(np.float32)
    return path.stem, x, frame[target].to_numpy(np.float64)


def encode(column: pd.Series) -> np.ndarray:
    """Returns numbers as they are, anything else as ranks; NaN where missing."""
    if pd.api.types.is_numeric_dtype(column):
        return column.to_numpy(np.float64, na_value=np.nan)
    codes, _ = pd.factorize(column.astype(object), sort=True)
    return np.where(codes < 0, np.nan, codes)


def measure(x, y, unit, curvature, seed: int, options: argparse.Namespace) -> tuple:
    """Returns the held-out NLL and root mean squared error, and the rounds made."""
    factor = 1.0 if unit == "raw" else unit / np.std(y)
    targets = (factor * y).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = np.split(order, [round(0.9 * len(y))])
    fitted, choosing = np.split(train, [round(0.8 * len(train))])
    settings = dict(num_scores=2, curvature=curvature)
    _, history = jb.fit(
        x[fitted], targets[fitted], normal, num_rounds=options.rounds,
        early_stopping_rounds=options.patience,
        validation=(x[choosing], targets[choosing]), **settings,
    )  # fmt: skip
    rounds = history.best_round + 1
    model, _ = jb.fit(x[train], targets[train], normal, num_rounds=rounds, **settings)
    mean, log_deviation = np.asarray(jb.predict(model, x[test]), np.float64).T
    error = targets[test] - mean
    loss = (error * np.exp(-log_deviation)) ** 2 / 2 + log_deviation
    loss = loss.mean() + np.log(2 * np.pi) / 2 - np.log(factor)
    rmse = np.sqrt(np.mean(error**2)) / factor
    return float(loss), float(rmse), rounds


def main() -> None:
    """Measures all cases, prints means over the splits, and writes a JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, help="CSV or parquet file")
    parser.add_argument("--target", help="column to predict")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=500, help="at most")
    parser.add_argument("--patience", type=int, default=30, help="of early stopping")
    parser.add_argument(
        "--max-rows", type=int, default=20_000, help="more are left out, at random"
    )
    options = parser.parse_args()
    name, x, y = load_table(options.data, options.target)
    rows = np.random.default_rng(0).permutation(len(y))[: options.max_rows]
    x, y = x[rows], y[rows]
    cases = [(unit, name) for name in CURVATURES for unit in UNITS]
    found = {}
    for unit, curvature in tqdm(cases, disable=None):
        found[f"{curvature}, {unit}"] = [
            measure(x, y, unit, CURVATURES[curvature], seed, options)
            for seed in range(options.splits)
        ]
    print(f"{name}: {len(y)} rows, mean of {options.splits} splits")
    print(f"{'curvature, unit':18} {'NLL':>8} {'RMSE':>10} {'rounds':>7}")
    for case, values in found.items():
        loss, rmse, rounds = np.mean(values, axis=0)
        print(f"{case:18} {loss:8.4f} {rmse:10.4g} {rounds:7.0f}")
    means = {case: np.mean(values, axis=0)[0] for case, values in found.items()}
    for curvature in CURVATURES:
        scaled = [means[f"{curvature}, {unit}"] for unit in UNITS]
        print(f"spread of NLL over units, {curvature}: {np.ptp(scaled):.1e}")
    result = dict(table=name, values=found, options=vars(options))
    write_json(options.out / f"likelihood_{name}.json", result | describe_machine())


if __name__ == "__main__":
    main()
