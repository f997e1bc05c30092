# SPDX-License-Identifier: Apache-2.0
"""Are predicted distributions as likely and as calibrated as NGBoost's?

Held-out negative log-likelihood (NLL), continuous ranked probability score (CRPS),
coverage of central 90 % intervals, and time, of boosted distributions: normal ones of
jboost, NGBoost and xgboost-distribution for targets that are numbers; negative binomial
and zero-inflated Poisson ones for counts.

    python experiments/distributions.py                        # generated tables
    python experiments/distributions.py --data DIR [DIR ...]   # data.parquet, meta.json

DIR/meta.json names the column to predict ("target"); it is a count if "task" says so.
Libraries that are not installed are left out: pip install ngboost xgboost-distribution.

Each split holds out a quarter of the rows. jboost gets the others, and nothing else
(``jb.fit(x, y, loss, num_scores=2)``); "formula" is the same loss as a plain function.
For the others a fifth of these rows chooses the number of rounds, and all of them train
the model, at depth 5 (NGBoost: 3, its default). Targets stay in their unit.
NLL and CRPS are in units of the standard deviation of the target, so that tables can be
averaged; of counts they are raw. Times include both fits, and compilation.

Written to --out: distributions.json, and distributions.png with the calibration of each
method: which share of held-out targets lies below each predicted quantile.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats as st
from experiment_tools import (
    compare_pairs,
    describe_machine,
    make_figures,
    make_matrix,
    make_parser,
    open_figure,
    print_table,
    read_table,
    save_figure,
    write_json,
)
from tqdm import tqdm

import jboost as jb

SHARES = (np.arange(99) + 1) / 100
PATIENCE = 50


class Rows(NamedTuple):
    """Rows of a table."""

    x: np.ndarray
    y: np.ndarray

    def take(self, index) -> "Rows":
        """Returns some of them."""
        return Rows(self.x[index], self.y[index])


class Table(NamedTuple):
    """A table, and whether its targets are counts."""

    name: str
    rows: Rows
    counts: bool


class Prediction(NamedTuple):
    """What is known of the predicted distributions of N rows.

    Attributes:
      log_prob: of the targets.
      below: the probability of less than the target, and ``upto`` of no more; the same
        but for counts.
      quantiles: [99, N].
    """

    log_prob: np.ndarray
    below: np.ndarray
    upto: np.ndarray
    quantiles: np.ndarray


def fit_jboost(family: str, fitted: Rows, choosing: Rows, both: Rows) -> Callable:
    """Trains jboost, which chooses rows by itself; returns a function that predicts."""
    del fitted, choosing
    make = getattr(jb.distributions, family)
    model, _ = jb.fit(*both, jb.losses.likelihood(make), num_scores=2)
    return read_jboost(model, make)


def fit_formula(family: str, fitted: Rows, choosing: Rows, both: Rows) -> Callable:
    """Trains jboost with the same loss as a plain function."""
    del fitted, choosing
    make = getattr(jb.distributions, family)

    def loss(score, target):
        return -make(score).log_prob(target)

    model, _ = jb.fit(*both, loss, num_scores=2)
    return read_jboost(model, make)


def read_jboost(model: jb.Ensemble, make: Callable) -> Callable:
    """Returns the function that predicts."""

    def predict(rows, counts):
        found = jb.predict(model, rows.x, inverse_link=make)
        y = jnp.asarray(rows.y, jnp.float32)
        upto = found.cdf(y)
        quantiles = jax.lax.map(found.icdf, jnp.asarray(SHARES, jnp.float32))
        return Prediction(
            np.asarray(found.log_prob(y), np.float64),
            np.asarray(found.cdf(y - 1) if counts else upto),
            np.asarray(upto), np.asarray(quantiles),
        )  # fmt: skip

    return predict


def fit_ngboost(family: str, fitted: Rows, choosing: Rows, both: Rows) -> Callable:
    """Trains NGBoost; returns a function that predicts."""
    from ngboost import NGBRegressor

    del family

    def train(rows, rounds, **others):
        model = NGBRegressor(
            n_estimators=rounds, learning_rate=0.03, verbose=False, random_state=0
        )
        return model.fit(_fill(rows.x), rows.y, **others)

    model = train(
        fitted, 1000, X_val=_fill(choosing.x), Y_val=choosing.y,
        early_stopping_rounds=PATIENCE,
    )  # fmt: skip
    best = model.best_val_loss_itr
    model = train(both, 1000 if best is None else best + 1)

    def predict(rows, counts):
        found = model.pred_dist(_fill(rows.x))
        return _from_scipy(st.norm(found.loc, found.scale), rows.y, counts)

    return predict


def fit_xgboost(family: str, fitted: Rows, choosing: Rows, both: Rows) -> Callable:
    """Trains xgboost-distribution; returns a function that predicts."""
    from xgboost_distribution import XGBDistribution

    name = family.replace("_", "-")

    def train(rows, rounds, eval_set=None, **others):
        model = XGBDistribution(
            distribution=name, n_estimators=rounds, learning_rate=0.05, max_depth=5,
            subsample=0.5, random_state=0, n_jobs=1, **others,
        )  # fmt: skip
        return model.fit(rows.x, rows.y, eval_set=eval_set, verbose=False)

    patient = train(fitted, 1500, [tuple(choosing)], early_stopping_rounds=PATIENCE)
    model = train(both, patient.best_iteration + 1)

    def predict(rows, counts):
        found = model.predict(rows.x)
        if counts:
            return _from_scipy(st.nbinom(found.n, found.p), rows.y, counts)
        return _from_scipy(st.norm(found.loc, found.scale), rows.y, counts)

    return predict


def _fill(x):
    """NGBoost takes no missing values."""
    return np.nan_to_num(x, nan=-999)


def _from_scipy(found, y, counts):
    upto = found.cdf(y)
    return Prediction(
        found.logpmf(y) if counts else found.logpdf(y),
        found.cdf(y - 1) if counts else upto, upto,
        np.stack([found.ppf(share) for share in SHARES]),
    )  # fmt: skip


# {name: (how it is trained, the family, the package that it needs)}
NUMBERS = {
    "jboost": (fit_jboost, "normal", "jboost"),
    "jboost, formula": (fit_formula, "normal", "jboost"),
    "NGBoost": (fit_ngboost, "normal", "ngboost"),
    "xgboost-distribution": (fit_xgboost, "normal", "xgboost_distribution"),
}
COUNTS = {
    "jboost, negative binomial": (fit_jboost, "negative_binomial", "jboost"),
    "jboost, zero-inflated": (fit_jboost, "zero_inflated_poisson", "jboost"),
    "xgboost-distribution, negative binomial": (
        fit_xgboost, "negative_binomial", "xgboost_distribution",
    ),
}  # fmt: skip


def measure(found: Prediction, y: np.ndarray, unit: float) -> dict[str, float]:
    """Returns NLL, CRPS and coverage of predictions."""
    error = y - found.quantiles
    # The CRPS is twice the mean pinball loss over all quantiles.
    pinball = np.maximum(SHARES[:, None] * error, (SHARES[:, None] - 1) * error)
    low, high = found.quantiles[4], found.quantiles[94]
    return dict(
        nll=float(-found.log_prob.mean() - np.log(unit)),
        crps=float(2 * pinball.mean() / unit),
        coverage=float(((y >= low) & (y <= high)).mean()),
    )


def calibrate(found: Prediction, seed: int) -> np.ndarray:
    """Returns the share of targets below each quantile; counts are spread at random."""
    spread = np.random.default_rng(seed).random(len(found.upto))
    position = found.below + spread * (found.upto - found.below)
    return (position <= SHARES[:, None]).mean(axis=1)


def generate_tables() -> list[Table]:
    """Returns numbers whose scale depends on the features, and counts."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (3000, 8)).astype(np.float32)
    center = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2]
    y = 1000 * (center + np.exp(x[:, 3] - 1) * rng.normal(size=3000))
    rate = np.exp(center) * rng.gamma(2, 0.5, 3000)
    return [
        Table("generated", Rows(x, y), counts=False),
        Table("generated counts", Rows(x, rng.poisson(rate)), counts=True),
    ]


def load_table(folder: Path, most: int) -> Table:
    """Returns a table from files, at most so many rows."""
    frame, meta = read_table(folder)
    rows = Rows(
        make_matrix(frame.drop(columns=meta["target"])),
        frame[meta["target"]].to_numpy(np.float64),
    )
    chosen = np.random.default_rng(1).permutation(len(rows.y))[:most]
    return Table(folder.name, rows.take(chosen), "count" in meta.get("task", ""))


def run_table(table: Table, options: argparse.Namespace, progress: Any) -> dict:
    """Measures all methods on a table: {method: [result of each split]}."""
    methods = COUNTS if table.counts else NUMBERS
    rows, found = table.rows, {}
    unit = 1.0 if table.counts else float(np.std(rows.y))
    for name, (fit, family, package) in methods.items():
        if importlib.util.find_spec(package) is None:
            continue
        results = []
        for seed in range(options.splits):
            progress.set_description(f"{table.name}, {name}")
            order = np.random.default_rng(100 + seed).permutation(len(rows.y))
            test, train = np.split(order, [len(order) // 4])
            fitted, choosing = np.split(train, [round(0.8 * len(train))])
            start = time.perf_counter()
            parts = (rows.take(part) for part in (fitted, choosing, train))
            predict = fit(family, *parts)
            seconds = time.perf_counter() - start
            predicted = predict(rows.take(test), table.counts)
            result = measure(predicted, rows.y[test], unit)
            curve = calibrate(predicted, seed)
            results.append(result | dict(seconds=seconds, calibration=curve))
            progress.update()
        found[name] = results
    return found


def draw(found: dict[str, dict], path: Path) -> None:
    """Draws the calibration of each method, a panel for each table."""
    columns = min(3, len(found))
    number = -(-len(found) // columns)
    figure, axes = open_figure(number, columns, (3.6 * columns, 3.4 * number))
    for panel in axes.flat[len(found) :]:
        panel.set_visible(False)
    for panel, (table, methods) in zip(axes.flat, found.items(), strict=False):
        panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for name, results in methods.items():
            curve = np.mean([each["calibration"] for each in results], axis=0)
            panel.plot(SHARES, curve, label=name, linewidth=1.2)
        panel.set(title=table, xlabel="predicted quantile", ylabel="share below it")
        panel.legend(fontsize=6, frameon=False)
    save_figure(figure, path)


def tabulate(found: dict[str, dict]) -> list[list[str]]:
    """Returns the means over the splits, a row for each table and method."""
    rows = [["table", "method", "NLL", "CRPS", "coverage of 90 %", "seconds"]]
    keys = {"nll": ".3f", "crps": ".3f", "coverage": ".2f", "seconds": ".1f"}
    for table, methods in found.items():
        for name, results in methods.items():
            means = {key: np.mean([each[key] for each in results]) for key in keys}
            rows.append([table, name, *(f"{means[k]:{keys[k]}}" for k in keys)])
    return rows


def conclude(found: dict[str, dict]) -> None:
    """Compares jboost with each other library, over the tables that both have."""
    peers = dict.fromkeys(
        name for methods in found.values() for name in methods if "jboost" not in name
    )
    for peer in peers:
        ours, theirs, times = [], [], []
        for methods in (methods for methods in found.values() if peer in methods):
            own = [name for name in methods if name.startswith("jboost")]
            nll = {name: np.mean([r["nll"] for r in methods[name]]) for name in methods}
            took = {n: np.sum([r["seconds"] for r in methods[n]]) for n in methods}
            best = min(own, key=lambda name, nll=nll: nll[name])
            ours.append(nll[best])
            theirs.append(nll[peer])
            times.append((took[best], took[peer]))
        lower = sum(one < other for one, other in zip(ours, theirs, strict=True))
        text = f"{peer}: jboost's NLL is lower on {lower} of {len(ours)} tables"
        if len(ours) > 1:
            difference, error = compare_pairs(ours, theirs)
            text += f", by {-difference:.3f} +- {error:.3f} on average"
        own_time, peer_time = np.sum(times, axis=0)
        print(f"{text}; it takes 1 / {peer_time / own_time:.1f} of the time.")


def main() -> None:
    """Measures all tables, prints means over the splits, draws, and writes a JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument(
        "--max-rows", type=int, default=8000, help="more are left out, at random"
    )
    options = parser.parse_args()
    if options.data is None:
        tables = generate_tables()
    else:
        tables = [load_table(folder, options.max_rows) for folder in options.data]
    number = sum(
        importlib.util.find_spec(package) is not None
        for table in tables
        for *_, package in (COUNTS if table.counts else NUMBERS).values()
    )
    found = {}
    with tqdm(total=number * options.splits, disable=None) as progress:
        for table in tables:
            found[table.name] = run_table(table, options, progress)
    figures = tabulate(found)
    print_table(figures)
    draw(found, options.out / "distributions.png")
    result = dict(values=found, options=vars(options))
    result["figures"] = make_figures(methods=figures)
    write_json(options.out / "distributions.json", result | describe_machine())
    conclude(found)


if __name__ == "__main__":
    main()
